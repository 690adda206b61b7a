"""Folders that are hard to read: links, other kinds of files, refusals, names of another case, files that vanish."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import REAL, a_socket, codes, found, report_on, run

import ckptlint
from ckptlint import progress
from ckptlint.errors import AccessError
from ckptlint.lint.report import Report
from ckptlint.sandbox import isolated
from ckptlint.storage import local
from ckptlint.storage.folder import coalesced
from ckptlint.storage.local import LocalFolder
from ckptlint.storage.locate import folder_at
from ckptlint.storage.paths import is_url, shown

Copy = Callable[[str], Path]


def refused(report: Report) -> str:
    """The one sentence of a run that was refused something: exit 4, and nothing was judged."""
    assert (report.exit_code, report.verdict, report.checkpoints) == (4, "incomplete", [])
    (sentence,) = report.unreadable
    assert "\n" not in sentence
    return sentence


def raising(monkeypatch: pytest.MonkeyPatch, call: str, where: Path, number: int) -> None:
    """Let `stat` or `open` of one path fail as an operating system would."""
    real = io.open if call == "open" else getattr(Path, call)

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == where:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, call, failing)
    if call == "open":
        monkeypatch.setattr("builtins.open", lambda name, *more, **how: failing(Path(name), *more, **how))


# ---------------------------------------------------------------- links


def test_a_link_to_the_checkpoint_folder_is_the_folder(real_copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(real_copy("edit_base"), target_is_directory=True)
    report = ckptlint.check(tmp_path / "latest")
    assert (report.exit_code, codes(report)) == (0, set())
    assert report.checkpoints[0].checkpoint.path == str(tmp_path / "latest")


def test_links_inside_the_folder_are_followed(real_copy: Copy) -> None:
    folder = real_copy("edit_base")
    (folder / "data").mkdir()
    (folder / "__1_0.distcp").rename(folder / "data" / "one")
    (folder / "__1_0.distcp").symlink_to("data/one")
    assert codes(ckptlint.check(folder)) == set()


def test_a_sub_folder_that_leads_outside_is_a_note(real_copy: Copy, tmp_path: Path) -> None:
    from ckptlint.testing import write_checkpoint

    records = ["sub/__0_0.distcp 0:1593"]
    folder = write_checkpoint({"tensors": {"w": {"shape": [4], "records": records}}}, tmp_path / "c")
    (folder / "sub").rename(tmp_path / "elsewhere")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    report = ckptlint.check(folder)
    assert [(code, level, "outside" in text) for code, level, text in found(report)] == [("PAY003", "info", True)]


@pytest.mark.parametrize("target", ["nowhere", "__1_0.distcp", "__0_0.distcp/x"])
def test_a_link_that_leads_nowhere_is_an_error(real_copy: Copy, target: str) -> None:
    folder = real_copy("edit_base")
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").symlink_to(target)
    ((code, _, text),) = found(ckptlint.check(folder), "error")
    assert (code, "a broken link" in text) == ("PAY003", True)


@pytest.mark.parametrize("target", ["nowhere", ".metadata"])
def test_metadata_that_links_nowhere_is_said_to(real_copy: Copy, target: str) -> None:
    folder = real_copy("edit_base")
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to(target)
    ((code, _, text),) = found(ckptlint.check(folder), "error")
    assert (code, f".metadata is a link to {target}, which is not there" in text) == ("COM001", True)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_metadata_that_lies_outside_is_read_and_noted(real_copy: Copy, tmp_path: Path, name: str) -> None:
    folder = real_copy("megatron_edit_base/iter_0000010")
    (folder / name).rename(tmp_path / "blob")
    (folder / name).symlink_to(tmp_path / "blob")
    report = ckptlint.check(folder)
    assert report.exit_code == 0
    assert f"{name} is a link to a file outside the checkpoint" in [text for _, _, text in found(report, "info")]


@pytest.mark.parametrize("loop", ["..", ".", "iter_0000099"])
def test_folders_that_link_in_a_circle_end(real_copy: Copy, tmp_path: Path, loop: str) -> None:
    run = tmp_path / "run"  # above it lies nothing but this test's own
    run.mkdir()
    real_copy("edit_base").rename(run / "iter_0000001")
    (run / "iter_0000001" / "up").symlink_to("..")
    (run / "iter_0000099").symlink_to(loop)
    (run / "other").symlink_to(".")
    for all_steps in (False, True):
        report = ckptlint.check(run, all_steps=all_steps)
        if loop == "iter_0000099":  # it leads nowhere
            assert report.checkpoints
        else:  # it is the newest step, and may be the newest good one
            assert report.exit_code == 4
            assert "iter_0000099 is a link to " in report.unreadable[0]
            assert bool(report.checkpoints) is all_steps
    assert ckptlint.check(run / "iter_0000001").exit_code == 0


def test_a_path_that_is_a_circle_of_links_is_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert report_on(tmp_path / "a").exit_code == 3
    assert report_on(tmp_path / "a" / "x").exit_code == 3


# ---------------------------------------------------------------- what is no file


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "socket": a_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("__1_0.distcp", "PAY003", "not a regular file"), (".metadata", "COM001", ".metadata is not a regular file")],
)
def test_what_is_no_regular_file_is_an_error(real_copy: Copy, kind: str, name: str, code: str, says: str) -> None:
    folder = real_copy("edit_base")
    (folder / name).unlink()
    KINDS[kind](folder / name)
    ((told, _, text),) = found(ckptlint.check(folder), "error")
    assert (told, says in text) == (code, True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_common_state_that_is_no_regular_file_never_passes(real_copy: Copy, kind: str) -> None:
    folder = real_copy("megatron_edit_base/iter_0000010")
    (folder / "common.pt").unlink()
    KINDS[kind](folder / "common.pt")
    assert ckptlint.check(folder).exit_code == 1


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["stat of the folder", "stat of a payload", "open of .metadata", "open of common.pt"])
def test_an_error_of_the_file_system_is_an_incomplete_verdict(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    folder = real_copy("megatron_edit_base/iter_0000010")
    what, _, where = call.partition(" of ")
    place = {"the folder": folder, "a payload": folder / "__0_0.distcp"}.get(where, folder / where)
    raising(monkeypatch, what, place, number)
    assert os.strerror(number) in refused(ckptlint.check(folder))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_a_file_handle_that_goes_stale_while_reading(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = real_copy("megatron_edit_base/iter_0000010")

    class Stale(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    real = io.open

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        return io.BufferedReader(Stale(path)) if Path(path).name == name else real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr("builtins.open", opened)
    assert f"{name} cannot be read: {os.strerror(errno.ESTALE)}" in refused(ckptlint.check(folder))


def test_an_entry_that_cannot_be_looked_at_while_listing(real_copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = real_copy("edit_base")
    real = os.scandir

    class Listing:
        def __init__(self, path: Any) -> None:
            self._real = real(path)

        def __enter__(self) -> Any:
            return iter([Entry(item) for item in self._real])

        def __exit__(self, *_: object) -> None:
            self._real.close()

    class Entry:
        def __init__(self, item: os.DirEntry[str]) -> None:
            self.name = item.name
            self._item = item

        def is_symlink(self) -> bool:
            return self._item.is_symlink()

        def stat(self) -> os.stat_result:
            if self.name == "__1_0.distcp":
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return self._item.stat()

    monkeypatch.setattr(os, "scandir", lambda path=".": Listing(path) if Path(path) == folder else real(path))
    assert os.strerror(errno.EACCES) in refused(ckptlint.check(folder))


@pytest.mark.parametrize(
    ("made", "name"), [("megatron_edit_base/iter_0000010", "iter_0000010"), ("edit_base", "step-10")]
)
def test_a_run_folder_that_may_not_be_listed_is_said_to_be_unseen(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: str, name: str
) -> None:
    step = real_copy(made).rename(tmp_path / name)
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    report = ckptlint.check(step)
    assert report.exit_code == 0
    (sentence,) = report.checkpoints[0].checkpoint.not_looked_at
    assert "ckptlint did not look at the other steps of its run and their tracker" in sentence
    assert os.strerror(errno.EACCES) in sentence


# ---------------------------------------------------------------- files that vanish


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_a_file_that_vanishes_after_the_listing_is_an_incomplete_verdict(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = real_copy("megatron_edit_base/iter_0000010")
    raising(monkeypatch, "open", folder / name, errno.ENOENT)
    assert f"{name} cannot be read" in refused(ckptlint.check(folder))


def test_a_payload_that_vanishes_after_the_listing_is_an_incomplete_verdict_once_it_is_opened(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = real_copy("edit_base")
    raising(monkeypatch, "open", folder / "__1_0.distcp", errno.ENOENT)
    assert "__1_0.distcp cannot be read" in refused(ckptlint.check(folder, depth="headers"))


def test_a_payload_behind_a_link_that_vanishes_after_the_listing_is_missing(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = real_copy("edit_base")
    (folder / "__1_0.distcp").rename(folder / "one")
    (folder / "__1_0.distcp").symlink_to("one")
    raising(monkeypatch, "stat", folder / "__1_0.distcp", errno.ENOENT)
    assert codes(ckptlint.check(folder), "error") == {"PAY003"}


# ---------------------------------------------------------------- names of another case


@pytest.fixture
def caseless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that finds files under names of any case, as those of macOS and Windows do."""

    def actual(path: Path) -> Path:
        if os.path.lexists(path):
            return path
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        return next((other for other in beside if other.name.casefold() == path.name.casefold()), path)

    real_stat, real_open = Path.stat, Path.open
    monkeypatch.setattr(Path, "stat", lambda path, **options: real_stat(actual(path), **options))
    monkeypatch.setattr(Path, "open", lambda path, *a, **options: real_open(actual(path), *a, **options))


@pytest.mark.usefixtures("caseless")
def test_a_file_found_only_without_regard_to_case_is_a_note(real_copy: Copy) -> None:
    folder = real_copy("edit_base")
    (folder / "__1_0.distcp").rename(folder / "__1_0.DISTCP")
    report = ckptlint.check(folder)
    assert report.exit_code == 0
    ((code, level, text),) = found(report)
    assert (code, level, "only in other letter case" in text) == ("PAY003", "info", True)
    assert "rename __1_0.DISTCP" in report.diagnostics[0].finding.hint


@pytest.mark.usefixtures("caseless")
def test_such_a_file_is_not_listed_twice(tmp_path: Path) -> None:
    from ckptlint.testing import write_checkpoint

    folder = write_checkpoint({"tensors": {"w": {"shape": [4], "records": ["a__0_0.distcp 0:1593"]}}}, tmp_path / "c")
    (folder / "a__0_0.distcp").rename(folder / "A__0_0.distcp")
    report = ckptlint.check(folder)
    assert codes(report) == {"PAY003"}
    assert len(report.checkpoints[0].checkpoint.files) == 1


def test_a_file_under_another_case_is_missing_where_case_counts(real_copy: Copy) -> None:
    folder = real_copy("edit_base")
    (folder / "__1_0.distcp").rename(folder / "__1_0.DISTCP")
    if (folder / "__1_0.distcp").exists():
        pytest.skip("this file system ignores case")
    report = ckptlint.check(folder)
    assert codes(report, "error") == {"PAY003"}
    assert "rename __1_0.DISTCP" in report.diagnostics[0].finding.hint


# ---------------------------------------------------------------- small things


def test_a_file_url_is_a_local_path(real_copy: Copy) -> None:
    folder = real_copy("edit_base")
    done = run(f"file://{folder}")
    assert done.returncode == 0, done.stderr
    assert isinstance(folder_at(f"file://{folder}")[0], LocalFolder)


def test_a_folder_named_like_a_scheme_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_url("s3:")
    assert not is_url("s3:/bucket")
    assert report_on("s3:/bucket").exit_code == 3


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://u:p@h:8/a/b?X-Amz-Signature=s#f", "https://h:8/a/b"),
        ("https://token@h/a", "https://h/a"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("s3://bucket/a?X-Amz-Signature=s", "s3://bucket/a"),
        ("az://container@account/a?sig=s&se=x", "az://container@account/a"),
        ("hf://org/model@main/a#b", "hf://org/model@main/a#b"),
        ("s3://bucket/a\x1b[31m", "s3://bucket/a\\x1b[31m"),
        ("runs/u:p@h?x=1", "runs/u:p@h?x=1"),
    ],
)
def test_secrets_in_urls_are_not_shown(url: str, safe: str) -> None:
    assert shown(url) == safe


def test_spans_stay_within_their_limit() -> None:
    wanted = [(i * 10, 10) for i in range(1000)]
    spans = coalesced(wanted, gap=0, limit=100)
    assert [stop - start for start, stop, _ in spans] == [100] * 100
    assert sorted(i for _, _, members in spans for i in members) == list(range(1000))
    assert coalesced([]) == []
    assert coalesced([(0, 500)], limit=100) == [(0, 500, [0])]


def test_ranges_of_a_file_that_cannot_be_read_are_refused(real_copy: Copy) -> None:
    with pytest.raises(AccessError, match="nothing cannot be read"):
        LocalFolder(REAL / "edit_base").ranges("nothing", [(0, 1)])


# ---------------------------------------------------------------- many files


def test_many_files_are_looked_at_as_few_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"__{number}_0.distcp").write_bytes(b"x" * number)
    (tmp_path / "link.distcp").symlink_to("__3_0.distcp")
    (tmp_path / "dangling.distcp").symlink_to("nowhere")
    (tmp_path / "outside.distcp").symlink_to(tmp_path.parent)
    names = [*(f"__{number}_0.distcp" for number in range(42)), "link.distcp", "dangling.distcp", "../escape"]
    few = LocalFolder(tmp_path)
    expected = few.entries, [column.tolist() for column in few.stat_many(names)]
    monkeypatch.setattr(local, "_MANY", 4)
    monkeypatch.setattr(local, "_PART", 3)
    monkeypatch.setattr(local, "_SLOW", 0)
    told: list[tuple[str, int, int]] = []
    with progress.listening(lambda *far: told.append(far)):
        many = LocalFolder(tmp_path)
        assert (many.entries, [column.tolist() for column in many.stat_many(names)]) == expected
    assert told[-1] == ("files", 5, 5)  # those that the listing does not tell


def test_a_child_tells_how_far_it_is() -> None:
    def work() -> str:
        for done in range(3):
            progress.advance("records", done, 3)
            time.sleep(0.3)
        return "done"

    told: list[tuple[str, int, int]] = []
    with progress.listening(lambda *far: told.append(far)):
        assert isolated(work, 0) == "done"
    assert sorted(set(told)) == [("records", 0, 3), ("records", 1, 3), ("records", 2, 3)]
    assert not progress.is_listened_to()
