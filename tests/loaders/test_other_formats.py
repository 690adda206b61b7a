"""Formats of others: told by their name, with what to do, and never taken for an interrupted save of torch's."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support import REAL, found

import ckptlint
from ckptlint.loaders.discover import find
from ckptlint.loaders.run.finished import step_state

OTHERS = REAL / "other_formats"


def only(path: Path, *words: str) -> None:
    rows = found(ckptlint.check(path))
    assert [row[:2] for row in rows] == [("SAF004", "error")], rows
    for word in words:
        assert word in rows[0][2], rows[0][2]
    finding = ckptlint.check(path).diagnostics[0].finding
    assert finding.hint


def test_torchsnapshot() -> None:
    only(OTHERS / "torchsnapshot", ".snapshot_metadata belongs to a format that ckptlint does not check: torchsnapshot")


@pytest.mark.parametrize("path", ["gguf", "gguf/tiny.gguf"])
def test_gguf(path: str) -> None:
    only(OTHERS / path, "tiny.gguf belongs to a format that ckptlint does not check: GGUF")


def paddle(folder: Path) -> None:
    """`paddle.distributed.save_state_dict` (3.x): `N_M.distcp` of each rank, a pickle `N.metadata` by rank 0."""
    metadata = {"state_dict_metadata": {}, "storage_metadata": {}, "flat_mapping": {}}
    (folder / "0.metadata").write_bytes(pickle.dumps(metadata, 4))
    for rank in range(2):
        (folder / f"{rank}_0.distcp").write_bytes(pickle.dumps({"linear.w_0": b"\0" * 64}, 4))


@pytest.mark.parametrize("under", ["", "step-100"])
def test_paddle(tmp_path: Path, under: str) -> None:
    step = tmp_path / under
    step.mkdir(exist_ok=True)
    paddle(step)
    only(tmp_path, "0.metadata belongs to a format that ckptlint does not check: PaddlePaddle")
    assert step_state(find(str(tmp_path))[0].folder) == "unknown"


def test_a_save_of_torch_that_broke_off_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    assert [row[0] for row in found(ckptlint.check(tmp_path))] == ["COM001"]


def test_local_files_of_nvrx(tmp_path: Path) -> None:
    """`LocalCheckpointManager`: one file for each rank whose part, or a copy of it, the node holds."""
    for rank in (0, 1):
        (tmp_path / f"iter_0000010_{rank}_local.pt").write_bytes(b"PK\3\4")
    only(tmp_path, "NVRx local checkpoint")


def test_packed_nemo(tmp_path: Path) -> None:
    (tmp_path / "llama.nemo").write_bytes(b"./model_config.yaml".ljust(512, b"\0"))
    only(tmp_path, "llama.nemo belongs to a format that ckptlint does not check: NeMo, packed")
    only(tmp_path / "llama.nemo", "NeMo, packed")


def test_orbax(tmp_path: Path) -> None:
    for name in ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "d/0123abcd", "ocdbt.process_0/manifest.ocdbt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    only(tmp_path, "Orbax")


def test_an_exported_file_beside_the_steps_of_a_run_hides_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes((OTHERS / "gguf" / "tiny.gguf").read_bytes())
    (tmp_path / "step-100").mkdir()
    paddle(tmp_path / "step-100")
    only(tmp_path, "PaddlePaddle")
