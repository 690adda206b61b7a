"""The archives that tests make are what they say: two real readers read them differently."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from archives import with_members, with_tar_header, with_two_directories

from ckptlint.errors import ForeignError, UnreadableError
from ckptlint.formats.torch_file import read_torch_bytes


@pytest.fixture
def saved(tmp_path: Path) -> bytes:
    torch.save({"w": torch.ones(5), "v": torch.zeros(300)}, tmp_path / "state.pt")
    return (tmp_path / "state.pt").read_bytes()


def test_two_directories_are_two_files_to_two_readers(saved: bytes, tmp_path: Path) -> None:
    made = with_two_directories(saved, b"N.", b"I1\n.")
    (tmp_path / "two.pt").write_bytes(made)
    assert torch._C.PyTorchFileReader(str(tmp_path / "two.pt")).get_record("data.pkl") == b"N."
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        assert archive.read("state/data.pkl") == b"I1\n."
    with pytest.raises(UnreadableError, match="ends at"):
        read_torch_bytes(made)


def test_a_pickle_with_a_tar_header_is_a_tar_archive() -> None:
    made = with_tar_header(pickle.dumps({"more": "\0" * 600}, 2))
    assert tarfile.TarInfo.frombuf(made[:512], "utf-8", "surrogateescape").name
    with pytest.raises(UnreadableError, match="tar archive"):
        read_torch_bytes(made)


def test_a_script_is_no_state(saved: bytes) -> None:
    with pytest.raises(UnreadableError, match="TorchScript"):
        read_torch_bytes(with_members(saved, constants=b"N."))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.replace(b"\x08\x08\0\0", b"\x09\x08\0\0"), "encrypted"),
        (lambda data: data.replace(b"data/1", b"data/0"), "different readers"),
        (lambda data: data.replace(b"version", b"ver\0ion"), "different readers"),
        (lambda data: data.replace(b".format_version", b"other/_version"), "zip64 locator"),
        (lambda data: data[:-4] + b"\1\0" + data[-2:], "end"),
    ],
)
def test_what_two_readers_could_take_otherwise_is_refused(saved: bytes, change: object, says: str) -> None:
    with pytest.raises(UnreadableError, match=says):
        read_torch_bytes(change(saved))  # type: ignore[operator]


def test_a_zip_file_of_something_else_is_foreign() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arrays/x.npy", b"0" * 900)
    with pytest.raises(ForeignError):
        read_torch_bytes(file.getvalue())
