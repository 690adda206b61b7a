"""Who planned to write what, read from every rank's plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptlint.analysis.ranks.save_plans import Duplicate, duplicates, planned_by
from ckptlint.model import SavePlans
from ckptlint.testing import load_folder, write_checkpoint

TENSORS = {"w": {"shape": [8, 4], "chunks": ["0:4, :", "4:8, :"]}, "s": {"shape": [], "chunks": [""]}}


def table(folder: Path, plans: list[list[Any]], tensors: dict[str, Any] | None = None) -> SavePlans:
    write_checkpoint({"tensors": tensors or TENSORS, "bytes": ["rng"], "plans": plans, "megatron": True}, folder)
    writers = load_folder(folder).save_plans
    assert writers is not None
    return writers


def half(number: int, **changed: Any) -> dict[str, Any]:
    return {"fqn": "w", "chunk": f"{4 * number}:{4 * number + 4}, :"} | changed


def seen(found: list[Duplicate]) -> list[tuple[str, tuple[int, ...] | None, tuple[int, ...], bool]]:
    return [(d.fqn, d.offset, d.ranks, d.equal) for d in found]


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ([[half(0), "rng"], [half(1)]], []),
        ([[], []], []),
        ([[half(0)], [half(0)]], [("w", (0, 0), (0, 1), True)]),
        ([["rng"], [], ["rng"], ["rng"]], [("rng", None, (0, 2, 3), True)]),
        ([[half(0), half(1)], [half(1)], [half(0)]], [("w", (0, 0), (0, 2), True), ("w", (4, 0), (0, 1), True)]),
        ([[half(0)], [half(0, chunk="0:3, :")]], [("w", (0, 0), (0, 1), False)]),
        ([[half(0)], [half(0, dtype="bfloat16")]], [("w", (0, 0), (0, 1), False)]),
        ([[half(0)], [half(0, shape=[16, 4])]], [("w", (0, 0), (0, 1), False)]),
        ([[half(0), half(0)], [half(1)]], []),
        ([[{"fqn": "s", "chunk": "", "shape": []}]] * 2, [("s", (), (0, 1), True)]),
    ],
    ids=[
        "each once", "nothing planned", "one chunk by two ranks", "bytes by three ranks", "two chunks", "other size",
        "other dtype", "other global shape", "twice by one rank", "scalar",
    ],
)  # fmt: skip
def test_duplicates(tmp_path: Path, plans: list[list[Any]], expected: list[Any]) -> None:
    assert seen(duplicates(table(tmp_path, plans))) == expected


def test_rows_of_a_duplicate_are_its_rows_in_the_table_by_rank(tmp_path: Path) -> None:
    made = table(tmp_path, [[half(1)], [half(0)], [half(0)], [half(1)]])
    found = duplicates(made)
    assert [made.rank[list(d.rows)].tolist() for d in found] == [[1, 2], [0, 3]]


def test_a_bytes_entry_and_a_tensor_of_one_name_are_no_duplicate(tmp_path: Path) -> None:
    made = table(tmp_path, [["s"], [{"fqn": "s", "chunk": "", "shape": []}]])
    assert duplicates(made) == []


def test_offsets_of_tensors_of_different_rank_do_not_mix(tmp_path: Path) -> None:
    tensors = {"a": {"shape": [4]}, "b": {"shape": [4, 4]}}
    plans = [[{"fqn": "a", "chunk": "0:4"}], [{"fqn": "a", "chunk": "0:4"}, {"fqn": "b", "chunk": "0:4, 0:4"}]]
    assert seen(duplicates(table(tmp_path, plans, tensors))) == [("a", (0,), (0, 1), True)]


def test_planned_by_lists_the_names_of_one_rank(tmp_path: Path) -> None:
    made = table(tmp_path, [[half(0), "rng"], [half(1)], []])
    assert [planned_by(made, rank) for rank in range(4)] == [{"w", "rng"}, {"w"}, set(), set()]
    assert (made.world_size, len(made)) == (3, 3)


def test_columns_are_padded_behind_the_rank_of_the_tensor(tmp_path: Path) -> None:
    made = table(tmp_path, [["rng", half(1), {"fqn": "s", "chunk": "", "shape": []}]])
    assert made.offsets.tolist() == [[-1, -1], [4, 0], [-1, -1]]
    assert made.sizes.tolist() == [[-1, -1], [4, 4], [-1, -1]]
    assert made.global_shape.tolist() == [[-1, -1], [8, 4], [-1, -1]]
    assert made.is_bytes.tolist() == [True, False, False]
    assert made.dtype.tolist() == [-1, 0, 0]
