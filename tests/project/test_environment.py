"""Unlucky surroundings: folders without end, files that change under the reader, links in circles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import REAL, REPOSITORY, SWEEP, codes, examples, found, report_on, run, run_python, swept

import ckptlint
from ckptlint.architecture import huggingface, tables
from ckptlint.formats.pickles import names
from ckptlint.lint import run as pipeline
from ckptlint.lint.settings.options import FORMATS
from ckptlint.model import Checkpoint
from ckptlint.storage.local import LocalFolder

Copy = Callable[[str], Path]
MEGATRON = "megatron_edit_base/iter_0000010"
MANY = examples(5_000, 50_000)


# ---------------------------------------------------------------- many files


class _Listing:
    """A listing of a folder, and behind it many files that are not there."""

    def __init__(self, real: Any, name: str) -> None:
        self._real = real
        self._name = name

    def __enter__(self) -> Iterator[Any]:
        status = os.stat_result((0o100644, 1, 1, 1, 0, 0, 100, 0, 0, 0))

        class Entry:
            def __init__(self, name: str) -> None:
                self.name = name

            def stat(self) -> os.stat_result:
                return status

            def is_symlink(self) -> bool:
                return False

        listed = [*self._real, *(Entry(self._name.format(number)) for number in range(MANY))]
        return iter(listed)

    def __exit__(self, *_: object) -> None:
        self._real.close()


@pytest.mark.sweep
def test_a_folder_of_many_files(real_copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing is made up, of thousands of names: docs/evidence.md has a million."""
    folder = real_copy("edit_base")
    real = os.scandir
    fake = lambda path=".": _Listing(real(path), "{}.txt") if Path(path) == folder else real(path)  # noqa: E731
    monkeypatch.setattr(os, "scandir", fake)
    report = ckptlint.check(folder)
    assert report.exit_code == 0, found(report)


@pytest.mark.sweep
def test_many_payload_files_that_nothing_claims(real_copy: Copy) -> None:
    """They are opened: one of them may be a pickle, which a load of the folder never needs."""
    folder = real_copy("edit_base")
    for number in range(MANY // 5):
        (folder / f"__{number}_9.distcp").write_bytes(b"PK\3\4" + bytes(96))
    report = ckptlint.check(folder)
    assert (report.exit_code, codes(report)) == (1, {"PAY006"})


# ---------------------------------------------------------------- links


def test_links_in_circles_come_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "step-5").symlink_to(".")
    (tmp_path / "step-6").symlink_to("step-6")
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "model").symlink_to("..")
    assert report_on(tmp_path).exit_code == 1  # step-6 is a link that leads nowhere
    assert report_on(tmp_path / "step-6").exit_code == 3
    for all_steps in (False, True):
        assert report_on(tmp_path, all_steps=all_steps).verdict != "pass"


# ---------------------------------------------------------------- files that change


def after_the_metadata(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something between the reading of the metadata and that of the payload."""
    real = pipeline.open_checkpoint

    def opened(*arguments: Any) -> Checkpoint:
        ckpt = real(*arguments)
        act()
        return ckpt

    monkeypatch.setattr(pipeline, "open_checkpoint", opened)


@pytest.mark.parametrize("depth", ["headers", "data"])
@pytest.mark.parametrize("size", [None, 0, 1, 1700])
def test_a_payload_that_shrinks_or_vanishes_before_it_is_read_never_passes(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch, depth: Any, size: int | None
) -> None:
    file = real_copy("edit_base") / "__1_0.distcp"
    after_the_metadata(monkeypatch, file.unlink if size is None else lambda: os.truncate(file, size))
    assert ckptlint.check(file.parent, depth=depth).exit_code in (1, 4)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize("size", [0, 700])
def test_a_file_that_shrinks_after_the_listing_never_passes(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    folder = real_copy(MEGATRON)
    listed = LocalFolder(folder).entries
    os.truncate(folder / name, size)
    monkeypatch.setattr(LocalFolder, "entries", property(lambda self: listed if self.path == folder else {}))
    assert ckptlint.check(folder).verdict != "pass"


def test_a_metadata_that_grows_after_the_listing_is_read_to_its_end(
    real_copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = real_copy("edit_base")
    listed = LocalFolder(folder).entries
    with (folder / ".metadata").open("ab") as file:
        file.write(b"more")
    monkeypatch.setattr(LocalFolder, "entries", property(lambda self: listed if self.path == folder else {}))
    assert codes(ckptlint.check(folder), "error") == {"SAF002"}


# ---------------------------------------------------------------- archives


def test_an_archive_that_unpacks_to_far_more_is_not_unpacked(real_copy: Copy) -> None:
    folder = real_copy(MEGATRON)
    with (
        zipfile.ZipFile(folder / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("common/data.pkl", "w", force_zip64=True) as member,
    ):
        for _ in range(64):
            member.write(bytes(1024**2))
    report = ckptlint.check(folder)
    assert "compressed or encrypted member" in found(report, "error")[0][2]
    assert report.exit_code == 1


def test_the_real_checkpoint_of_these_tests_passes() -> None:
    assert ckptlint.check(REAL / "edit_base", REAL / MEGATRON, depth="data").exit_code == 0


# ---------------------------------------------------------------- streams and memory


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", *swept("2>&-", ">&-", "<&-")])
@pytest.mark.parametrize(("name", "exit_code"), [("fsdp2_4r_hole", 1), *swept(("fsdp2_4r", 0))])
def test_closed_streams_do_not_change_the_verdict(tmp_path: Path, closed: str, name: str, exit_code: int) -> None:
    for options in ("", f"--output {tmp_path}/out.json"):
        command = f"{sys.executable} -m ckptlint {REAL / name} {options} {closed}"
        assert subprocess.run(["sh", "-c", command], cwd=REPOSITORY, stdout=-3, check=False).returncode == exit_code
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == ("fail" if exit_code else "pass")


@pytest.mark.parametrize("form", ["full", *swept(*(form for form in FORMATS if form != "full"))])
def test_what_the_encoding_of_the_output_lacks_is_escaped(real_copy: Copy, form: str) -> None:
    folder = real_copy("edit_base")
    folder = folder.rename(folder.with_name("\N{SNOWMAN}"))
    done = run(folder, "--format", form, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert run("show", folder, env={"PYTHONIOENCODING": "ascii"}).stdout.splitlines()[0].endswith("\\u2603")


@pytest.mark.parametrize("mebibytes", [180, 200, *swept(60, 100, 130, 1000)])
@pytest.mark.parametrize(("name", "exit_code"), [("fsdp2_4r", 0), ("fsdp2_4r_hole", 1)])
def test_too_little_memory_is_no_verdict(mebibytes: int, name: str, exit_code: int) -> None:
    command = f"ulimit -v {mebibytes * 1024} && {sys.executable} -m ckptlint {REAL / name} --depth files"
    done = subprocess.run(["sh", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == (4 if mebibytes < 192 else exit_code)
    assert (f"ckptlint: `ulimit -v` leaves {mebibytes} MiB of memory" in done.stderr) == (mebibytes < 192)


@pytest.mark.parametrize(("error", "sentence"), [("MemoryError()", "not enough memory"), ("OSError()", "a mistake in")])
def test_a_failure_of_ckptlint_itself_claims_no_findings(error: str, sentence: str) -> None:
    code = (
        "import sys, ckptlint.__main__ as entry, ckptlint.commands.main as command\n"
        f"def fail(): raise {error}\n"
        "command.main = fail\nsys.argv = ['ckptlint', '.']\nentry.main()"
    )
    done = run_python(code)
    assert done.returncode == 4
    assert sentence in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------- a working directory that is not one's own


@pytest.mark.parametrize("arguments", [["--help"], ["."], ["live", "."]])
def test_nothing_is_imported_from_the_working_directory(real_copy: Copy, arguments: list[str]) -> None:
    """`python -m` puts it first on the import path, where nothing keeps Python from what it loads itself."""
    folder = real_copy("edit_base")
    loaded = run_python("import runpy, sys; print(*sys.modules)").stdout.split()
    for name in {"click", "numpy", "tabulate", "rules", "torch", *sys.stdlib_module_names} - {*loaded}:
        (folder / f"{name}.py").write_text("raise SystemExit('code of the checkpoint ran')\n")
    done = run(*arguments, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- an installation that is not whole


@pytest.mark.forks
@pytest.mark.parametrize(
    ("module", "cached", "file", "checkpoint", "text"),
    [
        (names, names.call_table, "calls.toml", "fsdp2_4r", None),
        (names, names.call_table, "calls.toml", "fsdp2_4r", "x = {"),
        (tables, tables._lines, "megatron.json", MEGATRON, None),
        (tables, tables._lines, "megatron.json", MEGATRON, '{\n"": '),
        (huggingface, huggingface.model_table, "tables/llama.json", "exports/ok_llama", "{"),
        (huggingface, huggingface.model_table, "tables/llama.json", "exports/ok_llama", '{"float32": "gate"}'),
    ],
)
def test_a_lost_file_of_ckptlint_is_no_fault_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: ModuleType,
    cached: Any,
    file: str,
    checkpoint: str,
    text: str | None,
) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "module.py"))
    if text is not None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    cached.cache_clear()
    done = run(REAL / checkpoint)
    cached.cache_clear()
    assert (done.returncode, done.stdout) == (4, "")
    how = "missing" if text is None else "broken"
    assert done.stderr.startswith(f"ckptlint: ckptlint's own file {tmp_path / file} is {how}: install ckptlint again")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["fsdp2_4r_hole", *swept("megatron_numbers/iter_0000200", "exports/R01_shards_lost")])
def test_no_output_depends_on_how_python_hashes(name: str) -> None:
    """The order of a set does, and must not reach a report that is compared or kept."""
    for command in (("show", "--format", "json"), ("check", "--depth", "data", "--format", "concise")):
        seeds = ("0", "1", "2") if SWEEP else ("0", "1")
        printed = {run(*command, REAL / name, env={"PYTHONHASHSEED": seed}).stdout for seed in seeds}
        assert len(printed) == 1, command
