"""Every case of every fixture: what its rule, the other rules, the causes and the real torch make of it."""

from __future__ import annotations

import importlib.util
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from claims import causes_of_case
from support import REPOSITORY, SWEEP, bench

from ckptlint.depth import Depth
from ckptlint.lint.causes import with_causes
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import CheckpointReport, Report
from ckptlint.model import Checkpoint
from ckptlint.reporters.full import render
from ckptlint.reporters.style import Style
from ckptlint.rule import Rule, Severity
from ckptlint.testing import Case, checkpoint_of_ranks, described, fixture_cases, open_case, run_case
from ckptlint.testing.cases import depth_of, judge_case

RULES = {rule.code: rule for rule in load_rules()}
CASES = list(fixture_cases(REPOSITORY / "fixtures"))
OF_RULE = {code: [case for other, case in CASES if other == code] for code, _ in CASES}
MESSAGES = (Path(__file__).parent / "messages.txt").read_text(encoding="utf-8")
MAKE = bench("make", "docs")
RENEW = "run `python docs/make.py`, and read what is new in tests/rules/messages.txt aloud"


@pytest.mark.sweep
@pytest.mark.parametrize("code", OF_RULE)
def test_each_case_is_judged_as_it_says(code: str, tmp_path: Path) -> None:
    wrong, reports = [], list[CheckpointReport]()
    for number, case in enumerate(OF_RULE[code]):
        (folder := tmp_path / str(number)).mkdir()
        try:
            found = wrong_about(code, case, folder / "case", SWEEP or not number, reports)
            wrong += [f"{case.name}: {text}" for text in found]
        except Exception as error:
            wrong.append(f"{case.name}: {''.join(traceback.format_exception(error))}")
    assert not wrong, "\n".join(wrong)
    assert MAKE.sentences(code, reports) in MESSAGES, f"{code}: {RENEW}"


def test_the_file_of_all_sentences_is_fresh_and_small() -> None:
    """The sentences of rules are compared where their cases are judged."""
    rest = MESSAGES.partition("# help\n")[2]
    assert f"# help\n{rest}" == f"{MAKE.help_texts()}\n{MAKE.error_texts()}", RENEW
    assert [line[2:] for line in MESSAGES.splitlines() if line.startswith("# ")] == [*OF_RULE, "help", "errors"]
    assert len(MESSAGES.encode()) < 175_000


def wrong_about(
    code: str, case: Case, folder: Path, is_read_by_torch: bool, reports: list[CheckpointReport]
) -> list[str]:
    """It is written and read once; what its rule says is asked of that rule alone, the rest of all rules together."""
    rule = RULES[code]
    depth = depth_of(rule, case)
    rules = [other for other in RULES.values() if other.live or not case.is_live]
    ckpt = checkpoint_of_ranks(case.table) if case.is_live else open_case(case, folder, depth)
    every = with_causes(run_rules(ckpt, rules, depth))
    reports.append(judge_case(rule, case, ckpt, depth))
    wrong = [
        *wrong_findings(rule, case, reports[-1]),
        *wrong_causes(code, case, every),
        *wrong_yields(case, ckpt, depth, every),
    ]
    if not case.expect:
        bare = replace(ckpt, reference=None, before=None)  # `others` is about the checkpoint, not what is beside it
        is_bare = ckpt.reference is None and ckpt.before is None
        wrong += wrong_others(case, every if is_bare else run_rules(bare, rules, depth))
    if is_read_by_torch and importlib.util.find_spec("torch") is not None:
        wrong += wrong_metadata(case, folder / case.table.get("step", ""))
    return wrong


def test_authors_of_rules_judge_a_case_in_one_call(tmp_path: Path) -> None:
    for is_live in (False, True):
        code, case = next((code, case) for code, case in CASES if case.is_live == is_live and case.expect)
        assert described(run_case(RULES[code], case, tmp_path / code)) == sorted(case.expect)


def wrong_findings(rule: Rule, case: Case, report: CheckpointReport) -> Iterator[str]:
    """Where the findings of its rule are not those that a case expects, or do not say what it says."""
    if (found := described(report)) != (wanted := sorted(case.expect)):
        yield f"findings: {found} instead of {wanted}"
    if (failed := sorted(report.failed)) != (crashed := [case.table["crash"]] if "crash" in case.table else []):
        yield f"failed rules: {failed} instead of {crashed}"
    if case.says:
        text = plain(render(Report([report], (rule,)), Style(width=100, per_rule=0, verbose=True)))
        yield from (f"not said: {sentence}" for sentence in case.says if plain(sentence) not in text)


def wrong_yields(case: Case, ckpt: Checkpoint, depth: Depth, report: CheckpointReport) -> Iterator[str]:
    """Where a rule does not find alone what this case leaves to the rule of the fixture, or is shown beside it."""
    for code in case.yielding:
        if not run_rules(ckpt, [RULES[code]], depth).diagnostics:
            yield f"{code} finds nothing here, so it cannot yield"
        if beside := [item for item in report.diagnostics if item.code == code]:
            yield f"{code} is shown, so it is worse than what it yields to, or not on the same keys: {beside}"


def test_every_rule_that_yields_does_so_in_a_case_and_none_in_a_circle() -> None:
    declared = {(rule.code, other) for rule in RULES.values() for other in rule.yields_to}
    shown = {(code, other) for other, case in CASES for code in case.yielding}
    assert declared == shown, "(rule, other of its yields_to): a case of fixtures/<other>.toml says yielding = [rule]"
    assert tuple(TopologicalSorter({rule.code: rule.yields_to for rule in RULES.values()}).static_order())


def wrong_others(case: Case, report: CheckpointReport) -> Iterator[str]:
    """Where a good case is not good for every rule."""
    yield from (f"{code} failed: {error}" for code, error in report.failed.items())
    loud = [f"{item.code} {item.title}" for item in report.diagnostics if item.severity > Severity.INFO]
    if bool(loud) != case.others:
        yield f"other rules say {loud}: mend the case, or write `others = {str(bool(loud)).lower()}` if that is meant"


def wrong_causes(code: str, case: Case, report: CheckpointReport) -> Iterator[str]:
    """Where the causes of a case are not those whose fixtures claim it."""
    wanted = causes_of_case(code, case.name)
    if [cause.name for cause in report.causes] != wanted:
        yield f"causes: {[(cause.name, cause.sentence) for cause in report.causes]} instead of {wanted}"


def wrong_metadata(case: Case, folder: Path) -> Iterator[str]:
    """Where torch reads other keys, unless a case asks for classes, a root or bytes that torch does not read."""
    from torch.distributed.checkpoint.metadata import Metadata

    if case.table.get("names") or "state_dict_metadata" in case.table.get("root", {}):
        return
    for path in folder.glob("*.metadata"):
        if path.name in case.table.get("raw", {}):
            continue
        root = pickle.loads(path.read_bytes())
        if not isinstance(root, Metadata):
            yield f"torch reads {path.name} as {type(root)}"
        elif (found := list(root.state_dict_metadata)) != (keys := wanted(case, path.name)):
            yield f"torch reads the keys {found} in {path.name} instead of {keys}"


def wanted(case: Case, name: str) -> list[str]:
    """The keys that a metadata file of the case describes."""
    table = case.table["ranks"][int(name[2:].partition(".")[0])] if "ranks" in case.table else case.table
    return [key for group in ("tensors", "objects", "bytes", "state", "unstored") for key in table.get(group, ())]


def plain(text: str) -> str:
    """The text with every run of white space as one blank: lines are wrapped at the width."""
    return " ".join(text.split())
