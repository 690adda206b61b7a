"""Every folder of a MANIFEST.tsv below fixtures/real gets the verdict that stands there: one oracle for all of them.

Columns of a manifest that are read here:
    path: of the folder, beside the manifest.
    verdict: `healthy` (exit 0, nothing above a note), `warning` (exit 0, no error) or `broken` (exit 1).
    codes: of each finding above a note at depth data, in any order; a code as often as it is found.
    key: a text that one of these findings names: a key, a file, a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from claims import causes_of_real
from support import REAL, SHARED, SWEEP, codes, found, manifest, sweep_only

import ckptlint
from ckptlint.lint.report import Diagnostic
from ckptlint.rule import Severity

MANIFESTS = sorted(REAL.rglob("MANIFEST.tsv"))
ROWS = [(path.parent, {"codes": "", "key": ""} | row) for path in MANIFESTS for row in manifest(path.parent)]
OTHER_DEPTHS = {"healthy": ("metadata", "headers") if SWEEP else ("metadata",)}
EVERY = [
    pytest.param(folder / row["path"], row, number, id=f"{folder.name}/{row['path']}")
    for number, (folder, row) in enumerate(ROWS)
]

pytestmark = pytest.mark.sweep


@pytest.mark.sweep(share=6)
@pytest.mark.parametrize(("path", "row", "number"), EVERY)
def test_a_folder_gets_its_verdict(path: Path, row: dict[str, str], number: int) -> None:
    wrong = list(wrong_at("data", path, row))
    for depth in OTHER_DEPTHS.get(row["verdict"], ("files",)) if number % 4 == 0 else ():
        wrong += wrong_at(depth, path, row)
    assert not wrong, "\n".join(wrong)


@sweep_only
@pytest.mark.forks
def test_readers_in_children_give_the_same_verdicts() -> None:
    """A tenth of the folders; neighbours in a manifest are of one layout."""
    paths = [(folder / row["path"], row) for folder, row in ROWS[::10]]
    wrong = [f"{path}: {text}" for path, row in paths for text in wrong_at("data", path, row)]
    assert not wrong, "\n".join(wrong)


def wrong_at(depth: str, path: Path, row: dict[str, str]) -> Iterator[str]:
    """Where the report at a depth is not what the manifest and the causes say; codes are those of depth data."""
    report = ckptlint.check(path, depth=depth)
    loud = [item for item in report.diagnostics if item.severity > Severity.INFO]
    listed = [f"{item.code} {item.severity.label} {item.title}" for item in loud]
    if report.unreadable or report.not_found:
        yield f"{depth}: unreadable {report.unreadable}, not found {report.not_found}"
    yield from (f"{depth}: {part.failed} failed" for part in report.checkpoints if part.failed)
    if depth == "data" or row["verdict"] == "healthy":
        if sorted(item.code for item in loud) != sorted(filter(None, row["codes"].split(","))):
            yield f"{depth}: {listed} instead of {row['codes'] or 'nothing'}"
        if report.exit_code != (row["verdict"] != "healthy"):
            yield f"{depth}: exit {report.exit_code} of what is {row['verdict']}"
    if depth == "data" and not any(row["key"] in named_by(item) for item in loud or [None]):
        yield f"{row['key']!r} is named by none of {listed}"
    states = {file.state for part in report.checkpoints for file in part.checkpoint.files}
    if depth == "metadata" and not states <= {"unchecked"}:
        yield f"{depth}: files are {states}"
    told = [cause.name for part in report.checkpoints for cause in part.causes]
    if depth != "metadata" and told != causes_of_real(path.relative_to(REAL).as_posix(), depth):
        yield f"{depth}: the causes {told}"


def named_by(item: Diagnostic | None) -> str:
    """All that a finding names; nothing where there is none."""
    return f"{item.fqn} {item.title} {item.finding.at.file} {item.finding.identity} {item.all_notes()}" if item else ""


def test_every_folder_is_in_a_manifest_and_most_are_healthy() -> None:
    """A folder of a corpus, and each at the top that is a checkpoint, has a row."""
    for path in MANIFESTS:
        listed = {row["path"].partition("/")[0] for row in manifest(path.parent)}
        folders = [own for own in path.parent.iterdir() if own.is_dir()]
        if path.parent == REAL:
            folders = [own for own in folders if any(own.glob("*.distcp")) or (own / ".metadata").exists()]
        assert {own.name for own in folders} <= listed, path
    assert len(MANIFESTS) == 11 and sum(row["verdict"] == "healthy" for _, row in ROWS) >= 290
    assert sum(row["verdict"] != "healthy" for _, row in ROWS) >= 145


SHARED_ROWS = [row for row in manifest(SHARED) if int(row["issue"]) <= 3]


@pytest.mark.sweep(share=3)
@pytest.mark.skipif(not SHARED_ROWS, reason="no folder of shared checkpoints beside the repository")
@pytest.mark.parametrize("row", SHARED_ROWS, ids=lambda row: row["path"])
def test_a_shared_checkpoint_gets_its_verdict(row: dict[str, str]) -> None:
    report = ckptlint.check(SHARED / row["path"], depth=row["depth"] or "files")
    if row["verdict"] == "healthy":
        assert (report.exit_code, found(report, "error", "warning")) == (0, [])
    else:
        assert codes(report, "error", "warning") & {*row["codes"].split(",")}, found(report)
