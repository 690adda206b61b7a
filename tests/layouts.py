"""What every layout promises, as tests that a class for each inherits (as zarr-python's `StoreTests`).

A layout gives one function that writes a healthy folder, and names the files of it to damage. What it cannot tell
`loaders/cannot.toml` declares, with the reason.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from archives import flipped, members, with_members, with_tar_header, with_two_directories, without_storage
from support import REAL, codes, examples, report_on

import ckptlint
from ckptlint.lint.report import Report
from ckptlint.loaders.layouts import layouts


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


with (Path(__file__).parent / "loaders" / "cannot.toml").open("rb") as file:
    CANNOT = tomllib.load(file)


def copied(source: str, folder: Path) -> Path:
    """A copy of a checkpoint below fixtures/real."""
    return Path(shutil.copytree(REAL / source, folder / "copy", symlinks=True))


class LayoutTests:
    """The contract of a layout.

    `cannot.toml` says what it cannot tell, and why; what is written there and told after all fails too.

    Attributes:
        kind: the layout, as its row names it.
        files: one of each role, relative to the step.
        swapped: two files of a set.
        older: a checkpoint below fixtures/real, an older save of the same state, where there is one.
        mark: what a save that has begun leaves.
        source: a healthy checkpoint below fixtures/real.
    """

    kind: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()
    swapped: ClassVar[tuple[str, str] | None] = None
    older: ClassVar[str] = ""
    mark: ClassVar[str] = "checkpoint-is-incomplete.txt"
    source: ClassVar[str] = ""

    def write(self, folder: Path) -> Path:
        """Write a healthy checkpoint below an empty folder, a copy of `source` by default; returns the step."""
        return copied(self.source, folder)

    @pytest.fixture
    def step(self, tmp_path: Path) -> Path:
        return self.write(tmp_path)

    def _tells(self, name: str, test: str, report: Report) -> None:
        """The report is no pass, or the layout says why it cannot be otherwise."""
        layout = type(self).__name__.removeprefix("Test")
        known = CANNOT.get(layout, {}).get("cannot", [])
        reasons = [entry["why"] for entry in known if entry["damage"] == test and name in entry.get("files", [name])]
        if reasons:
            assert report.exit_code == 0, f"{test} of {name} is told now, strike out: {reasons[0]}"
        else:
            assert report.exit_code or codes(report, "warning"), (
                f"{test} of {name} passes: find it, or give a reason below [{layout}] in tests/loaders/cannot.toml"
            )

    def _changed(self, step: Path, test: str, edit: Callable[[bytes], bytes], depth: str = "files") -> None:
        for name in self.files:
            before, times = (step / name).read_bytes(), (step / name).stat()
            (step / name).write_bytes(edit(before))
            os.utime(step / name, ns=(times.st_atime_ns, times.st_mtime_ns))  # a check-out is of any age
            self._tells(name, test, ckptlint.check(step, depth=depth))
            (step / name).write_bytes(before)

    @pytest.mark.parametrize("depth", ["files", "headers", "data"])
    def test_healthy_is_silent(self, step: Path, depth: str) -> None:
        report = ckptlint.check(step, depth=depth)
        assert codes(report, "error", "warning") == set()
        found = [part.checkpoint.format for part in report.checkpoints if part.checkpoint is not None]
        row = next(row for row in layouts() if row.kind == self.kind)
        assert {*found} <= {*row.formats}

    def test_missing(self, step: Path) -> None:
        for name in self.files:
            hidden = (step / name).read_bytes()
            (step / name).unlink()
            self._tells(name, "missing", report_on(step))
            (step / name).write_bytes(hidden)

    def test_files_that_exchanged_their_names(self, step: Path) -> None:
        if self.swapped is None:
            pytest.skip("no two files of one set")
        first, second = (step / name for name in self.swapped)
        first.rename(step / "away")
        second.rename(first)
        (step / "away").rename(second)
        self._tells(self.swapped[0], "swapped", ckptlint.check(step, depth="headers"))

    def test_a_file_of_an_older_save(self, step: Path) -> None:
        if not self.older:
            pytest.skip("no older save of the same state")
        for name in self.files:
            before = (step / name).read_bytes()
            (step / name).write_bytes((REAL / self.older / name).read_bytes())
            self._tells(name, "of an older save", ckptlint.check(step, depth="headers"))
            (step / name).write_bytes(before)

    def test_a_save_that_has_begun_and_not_ended(self, step: Path) -> None:
        if not self.mark:
            pytest.skip("one file: a save that has not ended is a file that is cut")
        (step / self.mark).write_bytes(b"")
        assert "COM001" in codes(ckptlint.check(step), "error", "warning")

    def test_links_out_of_the_step(self, step: Path, tmp_path: Path) -> None:
        """A link to the same bytes elsewhere is no fault, one that leads nowhere is."""
        for name in self.files:
            place = step / name
            place.rename(tmp_path / "elsewhere")
            place.symlink_to(tmp_path / "elsewhere")
            assert codes(ckptlint.check(step), "error", "warning") == set(), name
            (tmp_path / "elsewhere").rename(tmp_path / "gone")
            self._tells(name, "broken link", ckptlint.check(step))
            place.unlink()
            (tmp_path / "gone").rename(place)

    def test_a_flipped_bit_in_the_data(self, step: Path) -> None:
        self._changed(step, "bit in the data", self.flipped_data, "data")

    @staticmethod
    def flipped_data(data: bytes) -> bytes:
        """The file with one bit of a tensor flipped."""
        start, size = next(
            (span for name, span in members(data).items() if name.startswith("data/") and span[1]),
            members(data)["version"],
        )
        return flipped(data, 8 * (start + size // 2))

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
