"""Healthy checkpoints, those that look broken among them, get neither errors nor warnings from any rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import REAL, manifest

import ckptlint
from ckptlint.rule import Severity

HEALTHY = [
    pytest.param(folder / row["path"], id=f"{folder.name}/{row['path']}")
    for folder in (REAL, REAL / "lookalikes")
    for row in manifest(folder)
    if row["verdict"] == "healthy"
]


@pytest.mark.parametrize("path", HEALTHY)
def test_healthy_checkpoint_passes(path: Path) -> None:
    report = ckptlint.check(path, depth="data")
    loud = [
        f"{item.code} {item.severity.label} {item.finding.at.fqn or '-'}: {item.title}"
        for checkpoint in report.checkpoints
        for item in checkpoint.diagnostics
        if item.severity > Severity.INFO
    ]
    assert not loud
    assert not any(checkpoint.failed for checkpoint in report.checkpoints)
    assert report.exit_code == 0


def test_every_lookalike_is_in_the_manifest() -> None:
    folder = REAL / "lookalikes"
    named = {row["path"].split("/")[0] for row in manifest(folder)}
    assert named == {path.name for path in folder.iterdir() if path.is_dir()}
