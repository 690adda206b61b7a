"""The generated pages are what the code says now, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from support import REPOSITORY

DOCS = REPOSITORY / "docs"
LIMIT = 250_000


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """`docs/make.py` as a module."""
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh_and_small(make: ModuleType) -> None:
    pages: dict[Path, str] = make.pages()
    stale = [str(path.relative_to(DOCS)) for path, text in pages.items() if not path.is_file() or read(path) != text]
    assert not stale, "run `python docs/make.py`"
    assert {path for path in pages if path.parent.name == "rules"} == set((DOCS / "rules").iterdir())
    assert sum(len(text.encode()) for text in pages.values()) < LIMIT


def test_what_a_page_prints_holds_no_number_or_list_of_all_rules(make: ModuleType) -> None:
    text = make.printed("```console\n$ ckptlint fixtures/real/edit_base --verbose\n```")
    lines = [
        "Passed: N rules ran in 0.05 s, N had nothing to judge.",
        "Tensor bytes were not read: --depth headers adds N rules, --depth data N.",
    ]
    assert all(f"\n{line}\n" in text for line in lines)
    assert not re.search(r"[A-Z]{3}\d{3}", text), "a new rule would change the page"
    assert "\n  ...\n" in text


def test_the_page_of_a_rule_that_is_gone_goes_too(make: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "GEO999.md").write_text("# a rule that was removed")
    (tmp_path / "by-hand.md").write_text("stays")
    make.write({tmp_path / "rules" / "GEO001.md": "new"}, tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert left == {"by-hand.md", "rules/GEO001.md"}


def test_pages_keep_the_whole_text_of_a_rule(make: ModuleType) -> None:
    assert "what \\_\\_N.metadata and `a_b` say" in make._plain("what __N.metadata and `a_b` say")
    text = read(DOCS / "rules" / "GEO004.md")
    for heading in ("What it checks", "Why it matters", "Usual causes", "How to fix", "See"):
        assert f"\n## {heading}\n\n" in text
    assert text.count("```") == 4


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md", "docs/recipes.md", "docs/rules/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = REPOSITORY / page
    for target in re.findall(r"\]\(([^)#:]+)\)", read(path)):
        assert (path.parent / target).exists(), target


def read(path: Path) -> str:
    """The text of a page."""
    return path.read_text(encoding="utf-8")
