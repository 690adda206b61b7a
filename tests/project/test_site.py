"""The documents as a site: built without a warning, whole, and asking no host for anything."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import REPOSITORY

from ckptlint.lint.registry import load_rules

DOCS = REPOSITORY / "docs"
TOP = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog", "SECURITY": "security"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("needs mkdocs and mkdocs-material, which the docs extra brings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # material's notice of its successor
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


pytestmark = pytest.mark.ci


def test_every_page_is_on_the_site_and_can_be_searched(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    expected = {page.replace("README", "index") for page in pages} | set(TOP.values())
    html = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert html - {"404"} == expected
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {item["location"].partition("#")[0].removesuffix(".html") or "index" for item in index["docs"]}
    assert found == expected
    assert any("coverage-hole" in item["title"] for item in index["docs"])


def test_no_host_is_asked_for_anything(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:)?//|<link\b[^>]*\bhref=\"?(https?:)?//")
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not [match for match in loads.findall(text) if any(match)], path
        if 'rel="canonical"' in text:
            pytest.fail("a site without an address has no canonical links")
        assert 'class="mermaid"' not in text, "the theme would fetch mermaid from a host"
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_the_rules_stand_below_their_families_and_nothing_is_outside_the_navigation(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    for rule in load_rules():
        assert f'href="rules/{rule.code[:3]}.html"' in text, rule.code
    nav = yaml.safe_dump(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    for path in [*DOCS.glob("*.md"), DOCS / "rules" / "README.md"]:
        assert path.relative_to(DOCS).as_posix() in nav, f"mkdocs.yml does not name {path.name}"


def test_links_of_the_pages_at_the_top_are_followed(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="rules/index.html"' in text and 'href="reference.html#settings"' in text
    assert 'src="finding.svg"' in text and (site / "finding.svg").is_file()
    assert 'href="contributing.html#a-new-rule"' in (site / "reference.html").read_text(encoding="utf-8")
