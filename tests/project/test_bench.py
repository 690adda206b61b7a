"""The files that the benchmarks are measured on are what they claim to be."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from support import REPOSITORY, bench, codes, run_python, sweep_only, swept

import ckptlint
from ckptlint.formats.pickles import safe_pickle as unpickle


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """`bench/speed/generate.py` as a module."""
    return bench("speed/generate")


@pytest.mark.parametrize("kind", ["fsdp", *swept("tp-fsdp", "flat", "mcore"), "objects", "files"])
def test_a_healthy_kind_passes(generate: ModuleType, tmp_path: Path, kind: str) -> None:
    generate.generate(kind, 1024, tmp_path)
    report = ckptlint.check(tmp_path, depth="files" if kind == "files" else "metadata")
    assert codes(report) == set() and report.exit_code == 0


@pytest.mark.parametrize(
    "kind",
    ["tensors", "chunks", "irregular_chunks", "files", "objects", "layers", "entries", "permuted_layers", "long_names"],
)
def test_what_grows_healthy_passes(
    generate: ModuleType, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench" / "speed")
    __import__("budget").KINDS[kind](tmp_path / "step-1", 84)
    assert ckptlint.check(tmp_path / "step-1", depth="files", fail_on="error").exit_code == 0


def test_holes_are_found_one_in_each_tensor(generate: ModuleType, tmp_path: Path) -> None:
    generate.generate("holes", 4096, tmp_path)
    report = ckptlint.check(tmp_path, depth="metadata")
    assert [item.code for item in report.diagnostics] == ["GEO004"] * 6


def test_the_stream_says_what_torch_says(generate: ModuleType) -> None:
    generate.check_stream()


def test_most_of_a_large_file_is_read_as_columns(generate: ModuleType, tmp_path: Path) -> None:
    generate.generate("fsdp", 20_480, tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    found = unpickle.scan(data)
    assert found is not None and len(found.pickle) < len(data) / 40
    assert unpickle._read_row_runs(data) is not None


@sweep_only
def test_no_torn_save_passes_and_no_whole_one_fails() -> None:
    """Saves that are killed in a folder with an older step."""
    program = (REPOSITORY / "bench" / "evidence" / "torn_saves.py").read_text(encoding="utf-8")
    done = run_python(program, "--kills", "3", cwd=REPOSITORY, timeout=600)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3), done.stdout + done.stderr[-2000:]
