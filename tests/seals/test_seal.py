"""Seals: what real saves hold is what was sealed, and what is not is told, whoever wrote the checkpoint."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import codes, found

import ckptlint
from ckptlint.errors import AccessError, UnreadableError
from ckptlint.model import Seal, SealEntry
from ckptlint.seals.digests import ALGORITHM, MASK, elem_digest, elements
from ckptlint.seals.file import SEAL, metadata_hash, read_seal, write_seal
from ckptlint.storage.local import LocalFolder

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")


def raw(value: Any) -> bytes:
    """The bytes of a tensor in row-major order."""
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()  # type: ignore[no-any-return]


def digest(value: Any) -> int:
    """The digest of a whole tensor, from the bytes that torch gives."""
    parts = 2 if value.is_complex() else 1
    bits = np.frombuffer(raw(value), f"<u{value.element_size() // parts}")
    return elem_digest(bits, elements((0,) * value.dim(), value.shape, value.shape), parts=parts)


def sealed(folder: Path, state: Mapping[str, Any], **changes: Any) -> Path:
    """A seal of these tensors, for the metadata that lies in the folder."""
    entries = {
        key: SealEntry(str(value.dtype).removeprefix("torch."), tuple(value.shape), digest(value))
        for key, value in state.items()
    }
    seal = Seal(ALGORITHM, metadata_hash(LocalFolder(folder)), entries, **changes)
    write_seal(folder, seal)
    return folder


def loaded(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint as torch itself loads them, whole."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


REAL_ONES = [
    "fsdp2_4r", "hsdp_2x2", "fsdp1_sharded", "flat_1d", "tp2_fsdp2_uneven", "one_file_per_item", "replicated_4r",
]  # fmt: skip


@pytest.mark.parametrize("name", REAL_ONES)
def test_what_real_jobs_saved_is_what_torch_loads(name: str, real_copy: Callable[[str], Path]) -> None:
    folder = real_copy(name)
    state = loaded(folder)
    sealed(folder, state)
    report = ckptlint.check(folder, depth="data", select=["LIV", "SAF"])
    assert found(report) == []
    assert report.exit_code == 0 and "LIV302" in report.checkpoints[0].passed
    largest = max(state, key=lambda key: state[key].numel())
    state[largest].view(-1)[-1] += 1
    sealed(folder, state)
    report = ckptlint.check(folder, depth="data", select=["LIV"])
    assert [(item.code, item.fqn) for item in report.diagnostics] == [("LIV302", largest)]


def test_every_dtype_and_stride_of_a_real_save(tmp_path: Path) -> None:
    names = ["bool", "uint8", "int16", "int64", "uint32", "float16", "bfloat16", "float32", "float64", "complex64"]
    names += ["complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    state = {name: (100 * torch.rand(40, 60)).to(getattr(torch, name)) for name in names}
    state |= {"turned": torch.randn(30, 20).t(), "view": torch.randn(900)[100:500].view(20, 20)}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "thin": torch.randn(7, 1, 5).permute(2, 1, 0)}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    sealed(tmp_path, state)
    assert found(ckptlint.check(tmp_path, depth="data")) == []
    for key in state.keys() - {"empty"}:
        changed = bytearray(raw(state[key]))
        changed[-state[key].element_size()] ^= 1
        other = torch.frombuffer(changed, dtype=state[key].dtype).reshape(state[key].shape)
        sealed(tmp_path, state | {key: other})
        assert [item.fqn for item in ckptlint.check(tmp_path, depth="data").diagnostics] == [key]


def test_large_members_are_digested_in_blocks(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(1500, 1001, generator=made), "t": torch.randn(700, 1301, generator=made).t()}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    sealed(tmp_path, state)
    assert found(ckptlint.check(tmp_path, depth="data")) == []
    (payload,) = tmp_path.glob("*.distcp")
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    assert codes(ckptlint.check(tmp_path, depth="data")) == {"LIV302", "PAY012"}


@pytest.mark.parametrize("cut", [False, True])
def test_safetensors_files(cut: bool, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.w": torch.randn(40, 30, generator=made).to(torch.bfloat16) for i in range(4)}
    if cut:
        dcp.save(
            dict(state), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True
        )
    else:
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    sealed(tmp_path, state)
    assert found(ckptlint.check(tmp_path, depth="data")) == []
    (payload,) = tmp_path.glob("*.safetensors")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 0x80
    payload.write_bytes(data)
    report = ckptlint.check(tmp_path, depth="data")
    assert [(item.code, item.severity.label) for item in report.diagnostics] == [("LIV302", "error")]
    assert report.exit_code == 1


def test_the_safetensors_mode_of_torchs_writer(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("safetensors_mode")
    ckpt = ckptlint.load(folder)
    state = {}
    from safetensors.torch import load

    for path in folder.glob("*.distcp"):
        data = path.read_bytes()
        start = data.index(b'{"') - 8
        state |= load(data[start:])
    state = {key: value for key, value in state.items() if ckpt.tensors[key].global_shape == tuple(value.shape)}
    assert state
    sealed(folder, state)
    report = ckptlint.check(folder, depth="data", select=["LIV302"])
    assert found(report) == []
    key = next(iter(state))
    state[key].view(-1)[0] += 1
    sealed(folder, state)
    assert [item.fqn for item in ckptlint.check(folder, depth="data", select=["LIV302"]).diagnostics] == [key]


def test_a_later_save_into_the_folder_is_no_difference(tmp_path: Path) -> None:
    state = {"w": torch.randn(16, 16)}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    sealed(tmp_path, state)
    dcp.save({"w": torch.randn(16, 16)}, checkpoint_id=tmp_path, no_dist=True)
    report = ckptlint.check(tmp_path, depth="data")
    assert codes(report) == {"LIV305"} and report.exit_code == 0


def test_a_sample_says_what_it_left_out(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(16, 16) for i in range(20)}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    sealed(tmp_path, state)
    report = ckptlint.check(tmp_path, depth="data", sample=25, seed=1)
    (item,) = report.diagnostics
    assert (
        item.code == "LIV305"
        and "15 keys were not compared with ckptlint.seal.json: left out by --sample" in item.title
    )


def test_without_depth_data_a_seal_is_not_judged(tmp_path: Path) -> None:
    state = {"w": torch.randn(16, 16)}
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    sealed(tmp_path, {"w": torch.randn(16, 16)})
    report = ckptlint.check(tmp_path, depth="headers")
    assert report.checkpoints[0].not_run["LIV302"] == "needs --depth data"


# ---------------------------------------------------------------- the file


def test_a_seal_reads_as_it_was_written(tmp_path: Path) -> None:
    entries = {"a.w": SealEntry("bfloat16", (3, 4), MASK), "b\\x1b": SealEntry("float32", (), 0)}
    seal = Seal(ALGORITHM, "0" * 32, entries, {"rng_state": "ignored"}, 2000)
    path = write_seal(tmp_path, seal)
    assert sorted(file.name for file in tmp_path.iterdir()) == [SEAL] == [path.name]
    document = json.loads(path.read_text())
    assert document["schema"] == "ckptlint.seal/1" and document["ckptlint"] == ckptlint.__version__
    back = read_seal(LocalFolder(tmp_path))
    assert back is not None
    assert (back.algorithm, back.metadata, back.entries, back.skipped, back.step) == (
        ALGORITHM,
        "0" * 32,
        entries,
        {"rng_state": "ignored"},
        2000,
    )
    assert read_seal(LocalFolder(tmp_path / "..")) is None


GOOD = {"schema": "ckptlint.seal/1", "algorithm": "elem64-1", "metadata_blake2b": "", "entries": {}}
ENTRY = {"dtype": "float32", "shape": [2], "digest": "0" * 16}
BROKEN: dict[str, Any] = {
    "empty": "", "no JSON": "{", "a list": "[]",
    "a key twice": '{"schema": "ckptlint.seal/1", "schema": "ckptlint.seal/1"}',
    "another schema": GOOD | {"schema": "ckptlint.seal/9"},
    "no entries": {key: value for key, value in GOOD.items() if key != "entries"},
    "a short hash": GOOD | {"metadata_blake2b": "12"}, "a hash of capitals": GOOD | {"metadata_blake2b": "AB" * 16},
    "a step that is a text": GOOD | {"step": "3"}, "a step that is true": GOOD | {"step": True},
    "skipped is a list": GOOD | {"skipped": ["a"]}, "a reason that is a number": GOOD | {"skipped": {"a": 1}},
    "a long reason": GOOD | {"skipped": {"a": "x" * 1000}}, "a long key": GOOD | {"entries": {"a" * 5000: ENTRY}},
    "a short digest": GOOD | {"entries": {"a": ENTRY | {"digest": "12"}}},
    "a digest that is a number": GOOD | {"entries": {"a": ENTRY | {"digest": 1234567890123456}}},
    "a negative shape": GOOD | {"entries": {"a": ENTRY | {"shape": [-1]}}},
    "a shape beyond 64 bits": GOOD | {"entries": {"a": ENTRY | {"shape": [2**40, 2**40]}}},
    "an entry that is a text": GOOD | {"entries": {"a": "0" * 16}},
    "a dtype that is a number": GOOD | {"entries": {"a": ENTRY | {"dtype": 3}}}, "nested": "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_seal_is_one_sentence_and_no_pass(name: str, tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(16, 16)}, checkpoint_id=tmp_path, no_dist=True)
    text = BROKEN[name] if isinstance(BROKEN[name], str) else json.dumps(BROKEN[name])
    (tmp_path / SEAL).write_text(text)
    with pytest.raises(UnreadableError):
        read_seal(LocalFolder(tmp_path))
    report = ckptlint.check(tmp_path, depth="data")
    ((code, severity, sentence),) = found(report)
    assert (severity, report.exit_code) == ("error", 1) and code in ("SAF002", "SAF003")
    assert sentence.startswith("ckptlint.seal.json ") and "\n" not in sentence and len(sentence) < 300
    assert "LIV302" in report.checkpoints[0].not_applicable


def test_a_pickle_in_place_of_a_seal_is_told_once(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(16, 16)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / SEAL).write_bytes(pickle.dumps(os.system))
    ((code, severity, _),) = found(ckptlint.check(tmp_path, depth="data"))
    assert (code, severity) == ("SAF001", "error")


def test_text_of_a_seal_cannot_move_the_cursor(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(16, 16)}, checkpoint_id=tmp_path, no_dist=True)
    document = GOOD | {"metadata_blake2b": metadata_hash(LocalFolder(tmp_path)), "ckptlint": "\x1b[2J"}
    document |= {"skipped": {"\x1b[31mkey": "why\n\x1b[0m"}}
    (tmp_path / SEAL).write_text(json.dumps(document))
    report = ckptlint.check(tmp_path, depth="data")
    text = "".join(f"{item.title} {item.all_notes()}" for item in report.diagnostics)
    assert "\x1b" not in text.replace("\\x1b", "") and codes(report) == {"LIV305"}


def test_a_seal_is_written_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for name in (SEAL, f".{SEAL}.part"):
        (tmp_path / name).symlink_to("kept")
    write_seal(tmp_path, Seal(ALGORITHM, "", {}))
    assert (tmp_path / "kept").read_text() == "kept" and not (tmp_path / SEAL).is_symlink()


def test_what_cannot_be_written_leaves_the_old_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_seal(tmp_path, Seal(ALGORITHM, "", {}))
    before = (tmp_path / SEAL).read_bytes()
    with monkeypatch.context() as broken, pytest.raises(AccessError, match="cannot be written"):
        broken.setattr(os, "fsync", lambda number: os.close(-1))
        write_seal(tmp_path, Seal(ALGORITHM, "1" * 32, {}))
    assert [*tmp_path.iterdir()] == [tmp_path / SEAL]
    assert (tmp_path / SEAL).read_bytes() == before
    with pytest.raises(AccessError, match="cannot be written"):
        write_seal(tmp_path / "absent", Seal(ALGORITHM, "", {}))
