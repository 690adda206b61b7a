"""Files of torch.save, read without torch, against what torch itself makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from archives import with_checksums

from ckptlint.errors import UnreadableError
from ckptlint.formats.torch_file import ranges_of, read_torch_file, storage_bytes
from ckptlint.model.stored import StoredTensor
from ckptlint.storage.locate import folder_at


def states() -> dict[str, Any]:
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    return {
        "whole": whole, "turned": whole.t(), "rows": whole[2:4], "columns": whole[:, 3:5], "tied": whole,
        "scalar": torch.tensor(7), "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "unsigned": torch.zeros(4, dtype=torch.uint16), "fp8": torch.zeros(4).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)), "inner": [{"half": torch.ones(3).half()}],
        "expanded": torch.ones(1).expand(5),
    }  # fmt: skip


def tensors(root: Any) -> dict[str, StoredTensor]:
    flat = {key: value for key, value in root.items() if isinstance(value, StoredTensor)}
    return flat | {"half": root["inner"][0]["half"]}


@pytest.mark.parametrize("new", [True, False], ids=["archive", "torch < 1.6"])
def test_tensors_are_what_torch_says_of_them(tmp_path: Path, new: bool) -> None:
    saved = states()
    if not new:  # torch itself does not read dtypes without a storage class of their own back from it
        del saved["unsigned"], saved["fp8"]
    torch.save(saved, tmp_path / "state.pt", _use_new_zipfile_serialization=new)
    folder, name = folder_at(str(tmp_path / "state.pt"))
    found = read_torch_file(folder, name)
    assert found.faults == ()
    assert found.prefix == ("state" if new else "")
    loaded = torch.load(tmp_path / "state.pt", weights_only=False)
    loaded["half"] = loaded["inner"][0]["half"]
    read = tensors(found.root)
    assert sorted(read) == sorted(key for key in loaded if key != "inner")
    for key, stored in read.items():
        own = loaded[key]
        assert stored.dtype == str(own.dtype).removeprefix("torch.")
        assert (stored.shape, stored.strides) == (tuple(own.shape), own.stride())
        assert stored.offset == own.storage_offset()
        assert stored.length * own.element_size() == own.untyped_storage().nbytes()
        raw = bytes(own.untyped_storage())
        assert storage_bytes(ranges_of(folder, name), found.storages[stored.key]) == raw
        assert folder.read_range(name, found.storages[stored.key].start, len(raw)) == raw  # foretold
    assert read["tied"].key == read["whole"].key == read["columns"].key


def edited(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(UnreadableError) as error:
        read_torch_file(*folder_at(str(path)))
    return str(error.value)


def test_what_is_no_such_file_is_said_in_a_sentence(tmp_path: Path) -> None:
    torch.save(states(), tmp_path / "state.pt")
    whole = (tmp_path / "state.pt").read_bytes()
    path = tmp_path / "other.pt"
    assert edited(path, b"") == "is empty (0 bytes)"
    for lost in (1, 10, 30, 90, len(whole) // 2):
        assert edited(path, whole[:-lost]).startswith("is cut short: "), lost
    for not_cut in (whole + b"more", whole[:-22] + bytes(22), whole[:-22] + b"?" + whole[-21:]):
        assert "where the archive's end record should be" in edited(path, not_cut)
    assert "Git LFS pointer" in edited(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "starts with zero bytes" in edited(path, bytes(5000))
    assert "is not a file of torch.save" in edited(path, b"<html>not found</html>")
    torch.save(states(), path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    assert "inside a pickle" in edited(path, old[:300])
    path.write_bytes(old[:-5])
    cut = read_torch_file(*folder_at(str(path)))
    assert cut.faults == ((f"has {len(old) - 5:,} bytes, its storages end at {len(old):,}", len(old) - 5),)


def test_a_storage_that_is_too_short_is_a_fault(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(64)}, tmp_path / "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    at = data.index(b"K\x40tq")  # the storage's 64 elements
    (tmp_path / "state.pt").write_bytes(with_checksums(data[: at + 1] + b"\x20" + data[at + 2 :]))
    found = read_torch_file(*folder_at(str(tmp_path / "state.pt")))
    assert [sentence for sentence, _ in found.faults] == ["has 256 bytes in data/0, but its data.pkl says 128"]


def test_what_changes_a_tensor_afterwards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pt"

    def saved(value: object, old: bytes = b"", new: bytes = b"") -> tuple[Any, Any]:
        """What torch loads, and what is read, of a file in which some bytes are replaced."""
        torch.save(value, path)
        path.write_bytes(with_checksums(path.read_bytes().replace(old, new)) if old else path.read_bytes())
        return torch.load(path, weights_only=False), read_torch_file(*folder_at(str(path)))

    ones, halves = torch.ones(4), torch.zeros(4).half()
    loaded, read = saved({"a": ones, "b": halves}, b"X\1\0\0\x001", b"X\1\0\0\x000")
    assert (
        loaded["b"].dtype == torch.float32 and read.unpickled.refused
    )  # one storage under two types: the first counts
    ones.dota = torch.zeros(4)  # type: ignore[attr-defined]
    loaded, read = saved({"a": ones}, b"dota", b"data")
    assert loaded["a"].sum() == 0 and read.unpickled.refused  # an attribute that replaces the values
    assert saved({"a": ones})[1].unpickled.refused == ()
    loaded, read = saved({path: 1, str(path): 2, torch.float32: 3, "float32": 4})
    assert len(loaded) == len(read.root) == 4
    loaded, read = saved({"a": torch.ones(4, dtype=torch.complex64).conj()})
    assert loaded["a"].is_conj() and read.root["a"].wrapped and not read.unpickled.refused
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "meta")
    loaded, read = saved({"a": torch.ones(4)})
    assert loaded["a"].is_meta and read.unpickled.refused
