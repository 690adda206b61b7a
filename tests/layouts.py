"""What every layout promises, as tests that a class for each inherits (as zarr-python's `StoreTests`).

A layout gives one function that writes a healthy folder, and names the files of it to damage. What it cannot tell it
declares in `cannot`, with the reason.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from archives import flipped, members, with_members, with_tar_header, with_two_directories, without_storage
from support import codes, examples

import ckptlint
from ckptlint.lint.report import Report


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


EVIL = pickle.dumps({"state": Evil()}, 2)


def torch_records(path: Path) -> dict[str, bytes] | None:
    """The members of an archive as torch's own reader reads them; None where it cannot."""
    torch = pytest.importorskip("torch")
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        return {name: reader.get_record(name) for name in reader.get_all_records()}
    except (RuntimeError, UnicodeError):
        return None


class LayoutTests:
    """The contract of a layout.

    Attributes:
        files: one of each role, relative to the step.
        cannot: (test, file or "") -> why the layout cannot tell it.
    """

    files: ClassVar[tuple[str, ...]] = ()
    cannot: ClassVar[Mapping[tuple[str, str], str]] = {}

    @staticmethod
    def write(folder: Path) -> Path:
        """Write a healthy checkpoint below an empty folder; returns the step."""
        raise NotImplementedError

    @pytest.fixture
    def step(self, tmp_path: Path) -> Path:
        return self.write(tmp_path)

    def _tells(self, name: str, test: str, report: Report) -> None:
        """The report is no pass, or the layout says why it cannot be otherwise."""
        if reason := self.cannot.get((test, name)):
            assert report.exit_code == 0, f"{name} is told now, strike out: {reason}"
        else:
            assert report.exit_code or codes(report, "warning"), f"{test} of {name} passes"

    def _changed(self, step: Path, test: str, edit: Callable[[bytes], bytes], depth: str = "files") -> None:
        for name in self.files:
            before = (step / name).read_bytes()
            (step / name).write_bytes(edit(before))
            self._tells(name, test, ckptlint.check(step, depth=depth))
            (step / name).write_bytes(before)

    @pytest.mark.parametrize("depth", ["files", "headers", "data"])
    def test_healthy_is_silent(self, step: Path, depth: str) -> None:
        assert codes(ckptlint.check(step, depth=depth), "error", "warning") == set()

    def test_missing(self, step: Path) -> None:
        for name in self.files:
            (step / name).rename(step / "away")
            hidden = (step / "away").read_bytes()
            (step / "away").unlink()
            self._tells(name, "missing", ckptlint.check(step))
            (step / name).write_bytes(hidden)

    def test_empty(self, step: Path) -> None:
        self._changed(step, "empty", lambda data: b"")

    def test_cut(self, step: Path) -> None:
        self._changed(step, "cut", lambda data: data[: len(data) * 2 // 3])

    def test_zeroed_end(self, step: Path) -> None:
        self._changed(step, "zeroed", lambda data: data[:-512] + bytes(len(data[-512:])))

    @staticmethod
    def loaded(step: Path, name: str) -> object:
        """What torch reads of a file; None where it cannot."""
        return torch_records(step / name)

    @pytest.mark.sweep
    def test_random_flips(self, step: Path) -> None:
        dice = random.Random(self.files[0])
        for name in self.files:
            path = step / name
            before, held = path.read_bytes(), self.loaded(step, name)
            assert held
            for _ in range(examples(3, 20)):
                bit = dice.randrange(8 * len(before))
                path.write_bytes(flipped(before, bit))
                if self.loaded(step, name) != held:
                    assert ckptlint.check(step, depth="data").exit_code, f"bit {bit} of {name}"
            path.write_bytes(before)


class ArchiveTests(LayoutTests):
    """The contract of a layout whose files are archives of torch.save."""

    def test_a_flipped_bit_in_the_pickle(self, step: Path) -> None:
        self._changed(step, "pickle", lambda data: flipped(data, 8 * sum(members(data)["data.pkl"]) - 24))

    def test_a_flipped_bit_in_the_data(self, step: Path) -> None:
        def edit(data: bytes) -> bytes:
            start, size = next(
                (span for name, span in members(data).items() if name.startswith("data/") and span[1]),
                members(data)["version"],
            )
            return flipped(data, 8 * (start + size // 2))

        self._changed(step, "data", edit, "data")

    def test_a_lost_storage(self, step: Path) -> None:
        for name in self.files:
            before = (step / name).read_bytes()
            if any(member.startswith("data/") for member in members(before)):
                (step / name).write_bytes(without_storage(before))
                self._tells(name, "storage", ckptlint.check(step))
                (step / name).write_bytes(before)

    def test_hostile(self, step: Path) -> None:
        for name in self.files:
            before = (step / name).read_bytes()
            (step / name).write_bytes(with_members(before, data=EVIL))
            assert "SAF001" in codes(ckptlint.check(step), "error"), name
            (step / name).write_bytes(before)

    def test_archives_that_readers_read_differently(self, step: Path) -> None:
        healthy = pickle.dumps({"state": {}}, 2)
        self._changed(step, "two directories", lambda data: with_two_directories(data, EVIL, healthy))
        self._changed(step, "two directories", lambda data: with_two_directories(data, healthy, EVIL))
        self._changed(step, "bytes before", lambda data: b"PK\3\4" + bytes(60) + data)
        self._changed(step, "bytes after", lambda data: data + b"PK\5\6" + bytes(18))
        self._changed(step, "script", lambda data: with_members(data, constants=b"N."))

    def test_pickles_that_hide(self, step: Path) -> None:
        plain = pickle.dumps({"step": 3, "more": "\0" * 600}, 2)
        self._changed(step, "tar", lambda data: with_tar_header(plain))
        self._changed(step, "second pickle", lambda data: plain + EVIL)
        self._changed(step, "trailing bytes", lambda data: plain + b"\0")
        number = 0x1950A86A20F9469CFC6C
        self._changed(step, "magic number", lambda data: b"L%dL\n." % number + pickle.dumps(1001) + EVIL)
