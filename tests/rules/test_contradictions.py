"""Two facts of one checkpoint that exclude each other are at least a warning, whichever of the two is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import REAL, found, manifest

import ckptlint
from ckptlint.lint.report import Diagnostic
from ckptlint.rule import Severity

FOLDER = REAL / "contradictions"
ROWS = manifest(FOLDER)


def _text(item: Diagnostic) -> str:
    return f"{item.fqn} {item.title} {item.finding.missing} {item.all_notes()}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_a_contradiction_is_named(row: dict[str, str]) -> None:
    report = ckptlint.check(FOLDER / row["path"], depth="data")
    loud = [item for item in report.diagnostics if item.severity > Severity.INFO]
    told = [f"{item.code} {item.title}" for item in loud]
    assert report.unreadable == ()
    if row["verdict"] == "healthy":
        assert (report.exit_code, told) == (0, [])
    else:
        assert [item for item in loud if item.code == row["codes"] and row["key"] in _text(item)], told
        assert max(item.severity for item in loud) is (
            Severity.ERROR if row["verdict"] == "broken" else Severity.WARNING
        )


def test_every_contradiction_is_in_the_manifest() -> None:
    assert {row["path"] for row in ROWS} == {path.name for path in FOLDER.iterdir() if path.is_dir()}


@pytest.mark.parametrize("backend", ["zarr", "torch", "fsdp_dtensor"])
def test_metadata_json_of_another_backend(backend: str, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(REAL / "megatron_0.15_tp2" / "iter_0000010", folder)
    config = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(config | {"sharded_backend": backend}))
    report = ckptlint.check(folder)
    assert found(report, "error", "warning") == [
        ("COM009", "error", f"metadata.json says sharded_backend {backend}, but the files here are torch_dist")
    ]


def test_metadata_json_beside_fsdp_dtensor(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(REAL / "megatron_fsdp_dtensor_tp2_dp2" / "iter_0000010", folder)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    sentence = (
        "metadata.json says sharded_backend torch_dist, but the files here are fsdp_dtensor, which has no such file"
    )
    assert found(ckptlint.check(folder), "error", "warning") == [("COM009", "error", sentence)]
