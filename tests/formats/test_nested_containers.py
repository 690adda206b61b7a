"""No container hides a pickle that runs code, however nested; the same containers of healthy files are quiet."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from support import examples, found, report_on

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from nested_containers import DEPTH, NAMES, Nested, nested  # noqa: E402

CONTAINERS = int(os.environ.get("CONTAINERS", examples(20, 200)))
"""How many files are drawn: `CONTAINERS=1000 pytest tests/formats/test_nested_containers.py`."""
SAY_WHAT_THEY_ARE = ("weights.bin", ".npz")
"""Endings of files that are told where they are something else."""
_AT_ONCE = 20
_TELLS = ("SAF001", "SAF002", "SAF003")


def told_of(folder: Path, files: dict[str, Nested]) -> dict[str, list[tuple[str, str]]]:
    """File -> code and level of what is said of it, beside weights that are whole."""
    folder.mkdir()
    safetensors.save_file({"w": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file.data)
    rows = found(report_on(folder))
    assert all(any(name in text for name in files) for _, _, text in rows)
    return {name: [(code, level) for code, level, text in rows if name in text.split()] for name in files}


def drawn(seed: int, mark: str | None) -> dict[str, Nested]:
    names = Random(seed).choices(NAMES, k=_AT_ONCE)
    files = [nested(Random(f"{seed} {number}"), mark) for number in range(_AT_ONCE)]
    return {
        f"{name.rpartition('/')[0]}/{number}-{name.rpartition('/')[2]}".lstrip("/"): file
        for number, (name, file) in enumerate(zip(names, files, strict=True))
        if file.data
    }


@pytest.mark.sweep
@pytest.mark.parametrize("batch", range(-(-CONTAINERS // _AT_ONCE)))
def test_what_is_in_containers_is_told_and_healthy_twins_are_quiet(tmp_path: Path, batch: int) -> None:
    mark = tmp_path / "mark"
    hostile = drawn(batch, str(mark))
    told = told_of(tmp_path / "hostile", hostile)
    missed = [(name, hostile[name].kinds) for name, rows in told.items() if not {*_TELLS} & {code for code, _ in rows}]
    assert missed == []
    assert not mark.exists()
    healthy = {
        name: file
        for name, file in drawn(batch, None).items()
        if file.depth <= DEPTH and file.is_clear and not name.endswith(SAY_WHAT_THEY_ARE)
    }
    told = told_of(tmp_path / "healthy", healthy)
    assert [(name, healthy[name].kinds, rows) for name, rows in told.items() if rows] == []
