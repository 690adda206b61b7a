"""Sizes that only an attacker would choose: each ends soon, in one sentence, and what is not read is no pass."""

from __future__ import annotations

import json
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import REAL, found, report_on, run

safetensors = pytest.importorskip("safetensors.numpy")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

TEN_TERABYTES = 10**13
DCP = str(REAL / "edit_base")


def sparse(path: Path) -> None:
    """Let the file go on in zeros that take no space."""
    try:
        with path.open("ab") as file:
            file.truncate(TEN_TERABYTES)
    except OSError as error:  # a file system that has no such files
        pytest.skip(str(error))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A folder of weights that is healthy."""
    folder = tmp_path / "export"
    folder.mkdir()
    safetensors.save_file({"w": np.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    """A DCP folder that is healthy."""
    return Path(shutil.copytree(DCP, tmp_path / "dcp"))


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    """Each of these ends in seconds, and takes no memory that grows with what a file claims."""
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("model.safetensors", "PAY013"),
        ("optimizer.pt", "SAF002"),
        ("scaler.bin", "SAF002"),
        ("model.safetensors.index.json", "SAF003"),
    ],
)
def test_a_sparse_file_beside_weights_is_one_finding(export: Path, name: str, code: str) -> None:
    sparse(export / name)
    report = report_on(export)
    assert [row[0] for row in found(report, "error", "warning")] == [code]
    assert report.exit_code in (1, 4)


@pytest.mark.parametrize("name", ["train.log", "events.out.tfevents.1.host", "notes.md"])
def test_a_sparse_file_that_no_load_reads_is_quiet(export: Path, name: str) -> None:
    sparse(export / name)
    report = report_on(export)
    assert (found(report), report.exit_code) == ([], 0)


@pytest.mark.parametrize(("name", "code"), [("__1_0.distcp", "PAY006"), (".metadata", "SAF003")])
def test_a_sparse_file_of_dcp_is_one_finding(dcp: Path, name: str, code: str) -> None:
    sparse(dcp / name)
    report = report_on(dcp)
    assert ([row[0] for row in found(report)], report.exit_code) == ([code], 1)


@pytest.mark.parametrize("name", ["ckptlint.seal.json", "sha256sums.txt"])
def test_a_sparse_seal_or_list_of_sums_is_one_finding(dcp: Path, name: str) -> None:
    sparse(dcp / name)
    report = report_on(dcp, depth="data")
    assert ([row[0] for row in found(report)], report.exit_code) == (["SAF003"], 1)


def test_a_sparse_file_of_torch_save_is_one_finding(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "model.pt")
    sparse(tmp_path / "model.pt")
    report = report_on(tmp_path)
    assert ([row[0] for row in found(report)], report.exit_code) == (["PAY013"], 1)


def test_an_archive_of_many_members_is_looked_at_whole(export: Path) -> None:
    def exit_code(last: bytes) -> int:
        with zipfile.ZipFile(export / "a.zip", "w") as archive:
            for number in range(5_000):
                archive.writestr(f"{number}.txt", b"a")
            archive.writestr("last", last)
        return report_on(export).exit_code

    assert exit_code(b"a") == 0
    assert exit_code(b"cos\nsystem\n(S'true'\ntR.") == 1


def test_many_files_are_looked_at_one_by_one(export: Path) -> None:
    for number in range(2_000):
        (export / f"{number}.txt").write_text("a")
    assert report_on(export).exit_code == 0
    (export / "1999.txt").write_text("cos\nsystem\n(S'true'\ntR.")
    report = report_on(export)
    assert ([row[0] for row in found(report)], report.exit_code) == (["SAF001"], 1)


REFERENCES: dict[str, Callable[[Path], object]] = {
    "sparse": sparse,
    "brackets": lambda path: path.write_text("[" * 10**6),
    "braces": lambda path: path.write_text('{"a":' * 10**6),
    "digits": lambda path: path.write_text('{"schema": ' + "9" * 10**6 + "}"),
    "null": lambda path: path.write_text("null"),
    "no text": lambda path: path.write_bytes(bytes(range(256)) * 99),
    "a pickle": lambda path: path.write_bytes(b"cos\nsystem\n(S'true'\ntR."),
    "shapes": lambda path: path.write_text(
        json.dumps({"schema": "ckptlint.manifest/1", "tensors": {"w": {"shape": [-1, 2**70], "dtype": "F32"}}})
    ),
}


@pytest.mark.parametrize("option", ["--expect", "--baseline"])
@pytest.mark.parametrize("made", REFERENCES)
def test_a_hostile_manifest_or_baseline_is_one_sentence(option: str, made: str, tmp_path: Path) -> None:
    reference = tmp_path / "reference.json"
    REFERENCES[made](reference)
    done = run(DCP, option, str(reference))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "reference.json" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("made", REFERENCES)
def test_a_hostile_seal_is_told(made: str, dcp: Path) -> None:
    REFERENCES[made](dcp / "ckptlint.seal.json")
    report = report_on(dcp, depth="data")
    expected = {"a pickle": ["SAF001"], "sparse": ["SAF003"]}.get(made, ["SAF002"])
    assert [row[0] for row in found(report)] == expected
    assert report.exit_code == 1
