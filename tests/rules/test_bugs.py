"""Real bugs, reproduced with the real libraries: each broken state is named, each fixed twin passes."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

import ckptlint
from ckptlint.lint.report import Diagnostic
from ckptlint.rule import Severity

REPOSITORY = Path(__file__).parents[2]
BUGS = REPOSITORY / "fixtures" / "real" / "bugs"


def _text(item: Diagnostic) -> str:
    """All that a finding names."""
    return f"{item.fqn} {item.title} {item.finding.missing} {item.all_notes()}"


def rows() -> list[dict[str, str]]:
    with (BUGS / "MANIFEST.tsv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["path"])
def test_a_real_bug_gets_its_verdict(row: dict[str, str]) -> None:
    report = ckptlint.check(BUGS / row["path"], depth="data")
    loud = [item for item in report.diagnostics if item.severity > Severity.INFO]
    found = [f"{item.code} {item.title}" for item in loud]
    assert report.unreadable == () and not any(part.failed for part in report.checkpoints)
    if row["verdict"] == "healthy":
        assert (report.exit_code, found) == (0, [])
    else:
        codes = row["codes"].split(",")
        named = [item for item in loud if item.code in codes and row["key"] in _text(item)]
        assert named, found
        assert report.exit_code == (0 if row["verdict"] == "warning" and report.counts["error"] == 0 else 1)


def test_every_reproduced_bug_is_in_the_manifest() -> None:
    listed = {row["path"].partition("/")[0] for row in rows()}
    assert listed == {path.name for path in BUGS.iterdir() if path.is_dir()}


def test_the_page_names_every_reproduced_bug() -> None:
    page = (REPOSITORY / "docs" / "bugs.md").read_text(encoding="utf-8")
    shown = {match[1] for match in re.finditer(r"<!-- finding: fixtures/real/bugs/([^/ ]+)", page)}
    broken = {row["path"].partition("/")[0] for row in rows() if row["verdict"] in ("broken", "warning")}
    assert shown >= broken
