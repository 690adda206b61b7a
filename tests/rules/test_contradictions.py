"""Two facts of one checkpoint that exclude each other are at least a warning, whichever of the two is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import REAL, found

import ckptlint


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
