"""Many records of one form are read at once; that must not differ from reading them one by one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.payload.archives import record_headers
from ckptlint.payload.archives.record_headers import Forms, RecordPlace, read_headers
from ckptlint.testing import write_checkpoint


def _seen(path: Path, file: int, forms: Forms | None = None) -> tuple[dict[int, Any], dict[int, str]]:
    """Row -> data.pkl and members of each record of a file, and row -> what is wrong with the others."""
    found = find(str(path))[0]
    ckpt, folder = open_checkpoint(found), found.folder
    table = ckpt.records
    columns = zip(table.file.tolist(), table.byte_offset.tolist(), table.byte_length.tolist(), strict=True)
    places = [RecordPlace(row, start, length) for row, (own, start, length) in enumerate(columns) if own == file]
    records: dict[int, Any] = {}
    broken: dict[int, str] = {}
    for part in read_headers(folder, ckpt.files[file].path or "", places, forms):
        records |= {record.row: (record.pickle, record.parts) for record in part.records}
        for group in part.alike:
            records |= {int(row): (group.pickles[at], group.parts(at)) for at, row in enumerate(group.rows)}
        broken |= {row: f"{error} {error.position}" for row, error in part.broken}
    assert len(records) + len(broken) == len(places)
    return records, broken


@pytest.mark.parametrize("seed", range(6))
def test_records_of_one_form_are_read_as_one_by_one(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    tensors = {f"layers.{i}.w": {"shape": [8, 16 + i % 3], "chunks": ["0:8, :"]} for i in range(120)}
    path = write_checkpoint({"depth": "headers", "tensors": tensors}, tmp_path / "step")
    payload = path / "__0_0.distcp"
    data = bytearray(payload.read_bytes())
    for _ in range(60 * (seed > 0)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    payload.write_bytes(data)
    together = _seen(path, 0)
    monkeypatch.setattr(record_headers, "_FORMS", 0)
    assert together == _seen(path, 0)
    assert len(together[1]) > 0 if seed else not together[1]


@pytest.mark.parametrize("seed", range(4))
def test_forms_of_another_file_change_nothing(seed: int, tmp_path: Path) -> None:
    rng, chunks = random.Random(seed), ["0:8, :", "8:16, :"]
    tensors = {f"layers.{i}.w": {"shape": [16, 16 + i % 3], "chunks": chunks} for i in range(60)}
    path = write_checkpoint({"depth": "headers", "tensors": tensors}, tmp_path / "step")
    payload = path / "__1_0.distcp"
    data = bytearray(payload.read_bytes())
    for _ in range(30 * (seed > 0)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    payload.write_bytes(data)
    forms: Forms = {}
    _seen(path, 0, forms)
    assert forms
    after, alone = _seen(path, 1, forms), _seen(path, 1)
    assert after == alone
    assert len(alone[1]) > 0 if seed else not alone[1]


def test_most_records_are_read_by_their_form(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w": {"shape": [8, 16], "chunks": ["0:8, :"]} for i in range(100)}
    path = write_checkpoint({"depth": "headers", "tensors": tensors}, tmp_path / "step")
    found = find(str(path))[0]
    ckpt, folder = open_checkpoint(found), found.folder
    table = ckpt.records
    places = [RecordPlace(row, *map(int, (table.byte_offset[row], table.byte_length[row]))) for row in range(100)]
    (batch,) = read_headers(folder, "__0_0.distcp", places)
    assert len(batch.records) == 1
    assert sum(len(group.rows) for group in batch.alike) == 99
