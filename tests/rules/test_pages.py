"""What every rule must have: a code and a name of its own, a whole page, a fixture with both kinds of case."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
from support import REPOSITORY

from ckptlint.lint.pages.rule_page import page
from ckptlint.lint.registry import load_rules
from ckptlint.rule import SECTIONS, Rule
from ckptlint.testing import read_cases

RULES = [pytest.param(rule, id=rule.code) for rule in load_rules()]


def test_codes_and_names_are_unique() -> None:
    assert not [code for code, count in Counter(rule.code for rule in load_rules()).items() if count > 1]
    assert not [name for name, count in Counter(rule.name for rule in load_rules()).items() if count > 1]


def test_every_module_and_every_fixture_belongs_to_a_rule() -> None:
    modules = {path.name for path in (REPOSITORY / "rules").glob("*.py")} - {"__init__.py"}
    assert modules == {Path(inspect.getfile(rule.check)).name for rule in load_rules()}
    fixtures = {path.stem for path in (REPOSITORY / "fixtures").glob("*.toml")}
    assert fixtures == {rule.code for rule in load_rules()}


@pytest.mark.parametrize("rule", RULES)
def test_code_name_and_file_agree(rule: Rule) -> None:
    assert re.fullmatch(r"[A-Z]{3}\d{3}", rule.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
    source = Path(inspect.getfile(rule.check))
    several = sum(inspect.getfile(other.check) == str(source) for other in load_rules()) > 1
    assert source.name.startswith(rule.code[:4].lower()) if several else source.name == module_name(rule)
    assert rule.check.__name__ == rule.name.replace("-", "_")
    assert several or inspect.getmodule(rule.check).__doc__ is None, "the page says what the module is for"


@pytest.mark.parametrize("rule", RULES)
def test_page_has_a_summary_and_all_sections(rule: Rule) -> None:
    first, second, *_ = [*(inspect.getdoc(rule.check) or "").splitlines(), "", ""]
    assert first == rule.summary and first.endswith(".") and not second
    headings = re.findall(r"^(\w[\w ]*):$", inspect.getdoc(rule.check) or "", re.MULTILINE)
    assert headings in (list(SECTIONS), list(SECTIONS[:-1]))
    text = page(rule)
    assert text.startswith(f"{rule.code} {rule.name}\n")
    for heading in headings:
        assert rule.section(heading)
        assert f"\n{heading}:\n" in text


@pytest.mark.parametrize("rule", RULES)
def test_fixture_has_a_bad_and_a_good_case(rule: Rule) -> None:
    cases = read_cases(REPOSITORY / "fixtures" / f"{rule.code}.toml")
    assert any(case.expect for case in cases)
    assert any(not case.expect for case in cases)
    assert not [name for name, count in Counter(case.name for case in cases).items() if count > 1]


def module_name(rule: Rule) -> str:
    """The file that a rule must lie in.

    >>> module_name(next(rule for rule in load_rules() if rule.code == "GEO004"))
    'geo004_coverage_hole.py'
    """
    return f"{rule.code.lower()}_{rule.name.replace('-', '_')}.py"


def test_a_misspelt_key_of_a_fixture_is_refused(tmp_path: Path) -> None:
    for line, key in (
        ("tensor = {}", "tensor"),
        ("before = { bytez = [] }", "bytez"),
        ("tensors = { w = { x = 1 } }", "x"),
    ):
        (tmp_path / "GEO001.toml").write_text(f'[[case]]\nname = "a case"\n{line}\n')
        with pytest.raises(ValueError, match=rf"^GEO001\.toml, case 'a case': there is no key '{key}'$"):
            read_cases(tmp_path / "GEO001.toml")


LIKE = """
[[case]]
name = "a gap"
objects = ["o"]
tensors."w" = { shape = [4], dtype = "int8" }
tensors."v" = { shape = [4] }
files = { "a" = 1, "b" = 2 }
expect = ["w"]
[[case]]
name = "no gap"
"""


def test_a_case_takes_what_it_does_not_say_from_the_one_that_it_is_like(tmp_path: Path) -> None:
    own = 'like = "a gap"\nwithout = ["objects", "b"]\ntensors."w" = { shape = [8] }\nfiles."c" = 3\n'
    (tmp_path / "GEO001.toml").write_text(LIKE + own)
    first, second = read_cases(tmp_path / "GEO001.toml")
    assert first.table["files"] == {"a": 1, "b": 2} and "objects" in first.table
    assert second.table == {"tensors": {"w": {"shape": [8]}, "v": {"shape": [4]}}, "files": {"a": 1, "c": 3}}
    assert not second.expect


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ('like = "a gab"', "no full case has the name 'a gab'"),
        ('like = "no gap"', "no full case has the name 'no gap'"),
        ('like = "a gap"\nwithout = ["x"]', "no key of 'a gap' is named 'x'"),
        ('without = ["x"]', "there is no key 'without'"),
    ],
)
def test_a_case_that_is_like_no_other_is_refused(tmp_path: Path, own: str, says: str) -> None:
    (tmp_path / "GEO001.toml").write_text(LIKE + own)
    with pytest.raises(ValueError, match=f"^GEO001\\.toml, case 'no gap': {says}$"):
        read_cases(tmp_path / "GEO001.toml")
