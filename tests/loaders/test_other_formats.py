"""Formats of others: told by their name, with what to do, and never taken for an interrupted save of torch's."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import REAL, codes, found

import ckptlint
from ckptlint.loaders.discover import find
from ckptlint.loaders.run.finished import step_state

HEADER = b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
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
        (tmp_path / f"iter_0000010_{rank}_local.pt").write_bytes(b"N.")
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


def scripted() -> Any:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(torch.nn.Linear(64, 64), torch.ones(1, 64))


@pytest.mark.parametrize("name", ["vad.jit", "model.pt", "pytorch_model.bin"])
def test_torchscript_alone(name: str, tmp_path: Path) -> None:
    scripted().save(str(tmp_path / name))
    for path in (tmp_path, tmp_path / name):
        only(path, f"{name} belongs to a format that ckptlint does not check: TorchScript")


@pytest.mark.parametrize("name", ["vad.jit", "vad.pt", "vad.dat"])
def test_torchscript_beside_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0" + HEADER.ljust(64) + bytes(16))
    scripted().save(str(tmp_path / name))
    report = ckptlint.check(tmp_path, fail_on="error")
    assert found(report) == [
        ("SAF002", "warning", f"{name} is a TorchScript archive, whose code runs when it is loaded")
    ]
    assert report.exit_code == 4


def test_a_torchscript_file_that_is_cut_is_damaged(tmp_path: Path) -> None:
    scripted().save(str(tmp_path / "model.pt"))
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:-200])
    assert codes(ckptlint.check(tmp_path / "model.pt")) == {"PAY013"}


OBJECTS = {"x": np.array(["a", None], object), "y": np.ones(3), "z": [np.array([{}], object)]}


@pytest.mark.parametrize(
    "values", [OBJECTS, np.array(["a"], object), {"w": np.ones((3, 4)), "r": np.random.RandomState(0)}]
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickles_of_joblib_are_of_one_format(values: Any, protocol: int, tmp_path: Path) -> None:
    pytest.importorskip("joblib").dump(values, tmp_path / "forest.pkl", protocol=protocol)
    assert codes(ckptlint.check(tmp_path / "forest.pkl")) == {"SAF004"}


def test_an_array_of_objects_of_joblib_is_judged(tmp_path: Path) -> None:
    """The pickle in place of the array is of protocol 0, which no first byte tells, and nothing holds the array."""
    joblib = pytest.importorskip("joblib")
    joblib.dump(np.array(["a"], object), tmp_path / "forest.pkl", protocol=2)
    data = (tmp_path / "forest.pkl").read_bytes()
    start = data.index(b"\x80", 2)
    (tmp_path / "forest.pkl").write_bytes(data[:start] + b"cos\nsystem\n(S'x'\ntR.0N.")
    assert "os.system" in found(ckptlint.check(tmp_path / "forest.pkl"))[0][2]


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: {"model": module, "epoch": 3}])
def test_a_pickled_module_is_named_with_what_to_save_instead(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    torch.save(wrap(torch.nn.Linear(3, 3)), tmp_path / "model.pt")
    problem = next(d for d in ckptlint.check(tmp_path / "model.pt").diagnostics if d.code == "SAF004")
    assert "a whole Linear module: torch.save its state_dict()" in problem.finding.hint
