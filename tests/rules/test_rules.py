"""Every case of every fixture: the findings it expects and no others of its rule, and what the real torch reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support import REPOSITORY

from ckptlint.depth import Depth
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import Report
from ckptlint.reporters.full import render
from ckptlint.reporters.style import Style
from ckptlint.rule import Severity
from ckptlint.testing import Case, described, fixture_cases, held_by_ranks, load_folder, run_case, write_checkpoint

CASES = list(fixture_cases(REPOSITORY / "fixtures"))
RULES = {rule.code: rule for rule in load_rules()}

ALL = [pytest.param(code, case, id=f"{code}:{case.name}") for code, case in CASES]
EVERY = [pytest.param(case, id=f"{code}:{case.name}") for code, case in CASES if not case.is_live]
GOOD = [pytest.param(case, id=f"{code}:{case.name}") for code, case in CASES if not case.expect]


@pytest.mark.parametrize(("code", "case"), ALL)
def test_finds_what_the_case_expects(code: str, case: Case, tmp_path: Path) -> None:
    rule = RULES[code]
    report = run_case(rule, case, tmp_path / "case")
    assert described(report) == sorted(case.expect)
    assert set(report.failed) == ({case.table["crash"]} if "crash" in case.table else set())
    text = plain(render(Report([report], (rule,)), Style(width=100, per_rule=0, verbose=True)))
    for sentence in case.says:
        assert plain(sentence) in text


@pytest.mark.parametrize("case", GOOD)
def test_good_case_is_good_for_every_rule(case: Case, tmp_path: Path) -> None:
    depth = Depth(case.table.get("depth", "files"))
    if case.is_live:
        report = run_rules(held_by_ranks(case.table), [rule for rule in RULES.values() if rule.live], depth)
    else:
        report = run_rules(load_folder(write_checkpoint(case.table, tmp_path / "case"), depth), RULES.values(), depth)
    assert not report.failed
    loud = [f"{item.code} {item.title}" for item in report.diagnostics if item.severity > Severity.INFO]
    assert bool(loud) == case.others, loud


@pytest.mark.parametrize("case", EVERY)
def test_torch_reads_the_metadata(case: Case, tmp_path: Path) -> None:
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    if case.table.get("names"):
        pytest.skip("it names classes that this torch does not have")
    if "state_dict_metadata" in case.table.get("root", {}):
        pytest.skip("its root is damaged")
    folder = write_checkpoint(case.table, tmp_path / "case")
    raw = case.table.get("raw", {})
    paths = [path for path in folder.glob("*.metadata") if path.name not in raw]
    if not paths:
        pytest.skip("it has no metadata, or metadata that is no pickle of torch's")
    for path in paths:
        root = pickle.loads(path.read_bytes())
        assert isinstance(root, metadata.Metadata)
        assert list(root.state_dict_metadata) == wanted(case, path.name)


def wanted(case: Case, name: str) -> list[str]:
    """The keys that a metadata file of the case describes."""
    table = case.table["ranks"][int(name[2:].partition(".")[0])] if "ranks" in case.table else case.table
    return [key for group in ("tensors", "objects", "bytes", "state", "unstored") for key in table.get(group, ())]


def plain(text: str) -> str:
    """The text with every run of white space as one blank: lines are wrapped at the width."""
    return " ".join(text.split())
