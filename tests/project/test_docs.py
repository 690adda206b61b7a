"""The generated pages are what the code says now, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from support import REAL, REPOSITORY, SWEEP, bench, manifest

from ckptlint.lint.registry import FAMILIES, load_rules
from ckptlint.lint.settings import request
from ckptlint.lint.settings.options import FORMATS
from ckptlint.loaders.layouts import layouts

DOCS = REPOSITORY / "docs"
PER_RULE, OTHER_PAGES = 1_740, 65_000


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return bench("make", "docs")


@pytest.mark.sweep
def test_generated_pages_are_fresh_and_small(make: ModuleType) -> None:
    """Only a sweep runs the commands of the pages, each in a process; test_recipes looks at what is there."""
    as_they_are = {} if SWEEP else {"played": str, "printed": str, "_way": lambda found: found[0]}
    as_for_a_user = patch.object(request, "CHEAP_BYTES", 512 * 1024**2)
    with patch.multiple(make, **{"DOCS": DOCS} | as_they_are), as_for_a_user:
        pages: dict[Path, str] = make.pages()
    stale = [str(path.relative_to(DOCS)) for path, text in pages.items() if not path.is_file() or read(path) != text]
    assert not stale, "run `python docs/make.py`"
    assert {path for path in pages if path.parent.name == "rules"} == set((DOCS / "rules").iterdir())
    written = {path: text for path, text in pages.items() if path.name not in ("limits.md", "design.md", "finding.svg")}
    sizes = {path: len(text.encode()) for path, text in written.items()}
    of_rules = sum(size for path, size in sizes.items() if path.parent.name == "rules")
    over = of_rules - PER_RULE * len(load_rules())
    assert over < 0, f"the pages of rules are {over} bytes too long together: shorten docstrings, drop cases"
    assert sum(sizes.values()) - of_rules < OTHER_PAGES, "the other generated pages are too long"
    picture = pages[DOCS / "finding.svg"]
    assert len(picture.encode()) < 30_000 and "GEO004" in picture


def test_the_reference_names_what_every_layout_is_of() -> None:
    says = read(DOCS / "reference.md").partition("## What it reads")[2].partition("\n## ")[0].lower()
    names = {row.kind.partition("-")[0] for row in layouts()} - {"flat", "file", "incomplete", "lost", "unsupported"}
    assert not (missing := {name for name in names if name not in says}), f"{missing}: add to docs/reference.md"


def test_what_a_page_prints_holds_no_number_or_list_of_all_rules(make: ModuleType) -> None:
    text = make.printed("```console\n$ ckptlint fixtures/real/edit_base --verbose\n```")
    lines = [
        "Passed: N rules ran in 0.05 s.",
        "Every record was read.",
    ]
    assert all(f"\n{line}\n" in text for line in lines)
    assert not re.search(r"[A-Z]{3}\d{3}", text), "a new rule would change the page"
    assert "\n  ...\n" in text


def test_the_page_of_a_family_that_is_gone_goes_too(make: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "XYZ.md").write_text("# a family that was removed")
    (tmp_path / "by-hand.md").write_text("stays")
    make.write(made := {tmp_path / "rules" / "GEO.md": "new"})
    make.remove_others(made, tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert left == {"by-hand.md", "rules/GEO.md"}


def test_one_rules_pages_are_those_of_all(make: ModuleType) -> None:
    """`docs/make.py CODE` writes what a whole run writes."""
    made = make.of_rules(["GEO004", "SAF001"])
    assert {path.name for path in made} == {"GEO.md", "SAF.md", "README.md", "messages.txt"}
    assert not [path for path, text in made.items() if read(path) != text]


def test_pages_keep_the_whole_text_of_a_rule(make: ModuleType) -> None:
    assert "what \\_\\_N.metadata and `a_b` say" in make._plain("what __N.metadata and `a_b` say")
    text = read(DOCS / "rules" / "GEO.md").split("\n## GEO004 coverage-hole\n")[1].split("\n## ")[0]
    for heading in ("What it checks", "Why it matters", "Usual causes", "How to fix", "See"):
        assert f"\n**{heading}.** " in text
    assert text.count("```") == 4


PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")])


@pytest.mark.parametrize("page", [pytest.param(path, id=path.relative_to(REPOSITORY).as_posix()) for path in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", read(page)):
        there = page.parent / target if target else page
        assert there.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)", read(there), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, f"{target}#{heading}"


def test_every_family_has_a_heading_and_every_rule_a_row() -> None:
    text = read(DOCS / "rules" / "README.md")
    assert re.findall(r"^## ([A-Z]{3}): ", text, re.MULTILINE) == sorted(FAMILIES)
    rows = re.findall(r"^\| \[([A-Z]{3}\d{3})\]", text, re.MULTILINE)
    assert rows == [rule.code for rule in load_rules()]
    about = read(REPOSITORY / "README.md").split("| family | about |")[1].split("\n\n")[0]
    assert set(re.findall(r"[A-Z]{3}(?=[,| ])", re.sub(r"\|[^|]*\|$", "|", about, flags=re.MULTILINE))) == set(FAMILIES)


def test_a_scene_is_played_in_a_folder_of_its_own(make: ModuleType) -> None:
    page = "```toml\n# a.toml\nx = 1\n```\n<!-- run\necho y > b\n-->\n```console\n$ cat a.toml b\nold\n$ ls\n```\n"
    assert make.played(page).split("```console\n")[1] == "$ cat a.toml b\nx = 1\ny\n\n$ ls\na.toml\nb\n```\n"
    assert make.played(make.played(page)) == make.played(page)


def read(path: Path) -> str:
    """The text of a page."""
    return path.read_text(encoding="utf-8")


def test_the_page_names_every_reproduced_bug() -> None:
    page, rows = read(DOCS / "bugs.md"), manifest(REAL / "bugs")
    shown = {match[1] for match in re.finditer(r"<!-- finding: fixtures/real/bugs/([^/ ]+)", page)}
    broken = {row["path"].partition("/")[0] for row in rows if row["verdict"] in ("broken", "warning")}
    assert shown >= broken


def test_the_reference_has_a_row_for_each_format() -> None:
    text = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(\.\w+)`)? ?\| ", text, re.MULTILINE))
    assert {name: form.suffix for name, form in FORMATS.items()}.items() <= rows.items()


def texts_for_readers() -> Iterator[tuple[str, str]]:
    """(path, text) of each page, and of the docstrings of each module."""
    for page in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")):
        yield page.name, page.read_text(encoding="utf-8")
    for folder in ("ckptlint", "rules", "bench", "tests"):
        for module in sorted(REPOSITORY.glob(f"{folder}/**/*.py")):
            nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            said = [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
            yield str(module.relative_to(REPOSITORY)), "\n".join(said)


def is_named_rightly(name: str) -> bool:
    """Whether a dotted name is a module of ckptlint, or what one holds; names of other libraries and files count."""
    parts = name.removeprefix("ckptlint.").split(".")
    package = REPOSITORY / "ckptlint" / parts[0]
    if not package.is_dir() or parts[-1] in ("json", "safetensors", "good"):
        return True
    below = package / parts[1]
    return (
        below.is_dir() or below.with_suffix(".py").is_file() or hasattr(import_module(f"ckptlint.{parts[0]}"), parts[1])
    )


def test_every_module_that_a_text_names_is_there() -> None:
    dead = []
    for place, text in texts_for_readers():
        paths = re.findall(r"`(\w+/[\w/]+\.py)`", text)
        dead += [
            f"{place}: {path}"
            for path in paths
            if not any((REPOSITORY / top / path).is_file() for top in ("", "ckptlint"))
        ]
        names = re.findall(r"`(ckptlint\.\w+\.\w+|\w+\.\w+\.\w+)`", text)
        dead += [f"{place}: {name}" for name in names if not is_named_rightly(name)]
    assert dead == []
