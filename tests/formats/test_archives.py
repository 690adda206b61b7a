"""The archives that tests make are what they say: two real readers read them differently."""

from __future__ import annotations

import io
import pickle
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from archives import with_members, with_tar_header, with_two_directories
from support import examples

from ckptlint.errors import ForeignError, UnreadableError
from ckptlint.formats.torch_archive import ranges_in, read_archive
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


def after(first: bytes, data: bytes) -> bytes:
    """The members of an archive in one that begins with other bytes, which its directory does not name."""
    made = io.BytesIO(first)
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "a") as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    return made.getvalue()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.replace(b"\x08\x08\0\0", b"\x09\x08\0\0"), "encrypted"),
        (lambda data: data.replace(b"data/1", b"data/0"), "different readers"),
        (lambda data: data.replace(b"version", b"ver\0ion"), "different readers"),
        (lambda data: data.replace(b".format_version", b"other/_version"), "zip64 locator"),
        (lambda data: data[:-4] + b"\1\0" + data[-2:], "end"),
        (lambda data: data[:-2] + b"\1\0", "split or commented"),
        (lambda data: after(b"PK\3\4 hidden", data), "11 bytes before its first member"),
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


def edited(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """An archive with some edits where places, lengths and names stand, or with parts of another one."""
    made = bytearray(data)
    marks = [at for at in range(len(made) - 3) if made[at : at + 2] == b"PK"] + [len(made) - 22]
    for _ in range(dice.randint(1, 3)):
        at = min(dice.choice(marks) + dice.randrange(64), len(made) - 1)
        if at < 0:
            return b""
        match dice.randrange(5):
            case 0:
                made[at] ^= 1 << dice.randrange(8)
            case 1:
                made[at] = dice.choice((0, 1, 2, 0xFF, made[dice.randrange(len(made))]))
            case 2:
                source = dice.choice(marks)
                made[at : at + 46] = made[source : source + 46]
            case 3:
                made = made[:at] + other[dice.randrange(len(other)) :] + made[dice.choice(marks) :]
            case _:
                made = made[: dice.choice(marks)] + made[dice.choice(marks) :] + bytes(dice.choice((0, 1, 22)))
    return bytes(made)


@pytest.mark.sweep
def test_what_is_read_is_what_both_real_readers_read(saved: bytes, tmp_path: Path) -> None:
    dice, read = random.Random(5), 0
    sources = [saved, with_members(saved, data=b"N.", more=b"x" * 99)]
    for _ in range(examples(750, 30_000)):
        made = edited(dice.choice(sources), dice.choice(sources), dice)
        try:
            archive = read_archive(ranges_in(made), len(made))
        except UnreadableError:
            continue
        read += 1
        with zipfile.ZipFile(io.BytesIO(made)) as python:
            assert sorted(python.namelist()) == sorted(member.name.decode() for member in archive.members)
            name = next(name for name in python.namelist() if name.lower().endswith("/data.pkl"))
            assert python.read(name) == archive.pickle
        (tmp_path / "edited.pt").write_bytes(made)
        own = torch._C.PyTorchFileReader(str(tmp_path / "edited.pt"))
        assert own.get_record("data.pkl") == archive.pickle
        assert sorted(own.get_all_records()) == sorted(
            member.name.decode().partition("/")[2] for member in archive.members
        )
    assert read > 50
