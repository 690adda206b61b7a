"""What the ranks of a running job hold, seen as a checkpoint: the words and figures of files then serve for ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ckptlint.boxes import Box, IntArray, Layout
from ckptlint.keys import ranges
from ckptlint.model import Checkpoint, ChunkTable, RankTable, RecordTable, StoredFile, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The rows of one key.

    Attributes:
        rows: rows of the table, by rank.
        live: those of them that hold at least one element.
    """

    fqn: str
    rows: IntArray
    live: IntArray


def holders(table: RankTable) -> Iterator[Holders]:
    """The rows of each key, in order of its name."""
    order = np.lexsort((table.rank, table.fqn))
    bounds = np.flatnonzero(np.append(True, table.fqn[order][1:] != table.fqn[order][:-1])) if len(order) else []
    is_live = (table.sizes > 0).all(axis=1)
    groups = np.split(order, bounds[1:]) if len(order) else []
    for rows in sorted(groups, key=lambda rows: table.fqns[int(table.fqn[rows[0]])]):
        yield Holders(table.fqns[int(table.fqn[rows[0]])], rows, rows[is_live[rows]])


def described(table: RankTable, row: int) -> tuple[str, str, tuple[int, ...]]:
    """Kind, dtype and global shape of a row; what all holders of a key must share."""
    dtype = int(table.dtype[row])
    kind = "object" if table.is_object[row] else "tensor"
    return kind, "" if dtype < 0 else table.dtypes[dtype], tuple(table.global_shape[row, : table.ndim[row]].tolist())


def box(table: RankTable, row: int) -> Box:
    """Where a row's chunk lies."""
    n = int(table.ndim[row])
    return Box(tuple(table.offsets[row, :n].tolist()), tuple(table.sizes[row, :n].tolist()))


def agree(table: RankTable, rows: IntArray) -> bool:
    """Whether all rows describe one tensor or object: kind, dtype, number of axes and global shape."""
    columns = (table.is_object, table.dtype, table.ndim)
    same = all((column[rows] == column[rows[:1]]).all() for column in columns)
    return bool(same and (table.global_shape[rows] == table.global_shape[rows[:1]]).all())


def owners(table: RankTable, held: Holders) -> IntArray:
    """Rows whose chunk is written: declared ones, and of equal undeclared chunks the lowest rank's."""
    rows = held.live[table.replica[held.live] <= 0]
    undeclared = rows[table.replica[rows] < 0]
    if len(undeclared) == 0:
        return rows
    cells = np.concatenate([table.offsets[undeclared], table.sizes[undeclared]], axis=1)
    _, first = np.unique(cells, axis=0, return_index=True)  # rows come by rank, so the first is the lowest
    return np.sort(np.concatenate([rows[table.replica[rows] >= 0], undeclared[first]]))


def ranks_of(table: RankTable, rows: Iterable[int]) -> str:
    """The ranks of some rows in words.

    >>> named([3]), named([0, 1, 2, 6])
    ('rank 3', 'ranks 0-2,6')
    """
    return named(int(table.rank[row]) for row in rows)


def named(ranks: Iterable[int]) -> str:
    """Ranks in words, as a set."""
    numbers = sorted(set(ranks))
    return f"rank{'s' if len(numbers) != 1 else ''} {ranges(numbers)}"


def as_checkpoint(table: RankTable, path: str) -> Checkpoint:
    """The table as a checkpoint whose files are the ranks: chunk i of a tensor lies in the `file` of its rank.

    Keys whose holders disagree about shape or dtype are left out, as are objects.
    """
    tensors = {}
    for held in holders(table):
        if table.is_object[held.rows[0]] or not agree(table, held.rows):
            continue
        rows = owners(table, held)
        _, dtype, shape = described(table, int(held.rows[0]))
        layout = Layout(shape, table.offsets[rows, : len(shape)], table.sizes[rows, : len(shape)])
        tensors[held.fqn] = Tensor(held.fqn, dtype, shape, ChunkTable(layout, rows.astype(np.int64)))
    none = np.zeros(len(table), np.int64)
    return Checkpoint(
        path,
        "live",
        tensors=tensors,
        records=RecordTable(
            table.fqns, table.fqn, table.rank, none, none, np.zeros(len(table), bool), np.ones(len(table), bool), {}
        ),
        files=[StoredFile(f"rank {rank}", None, None, "unchecked", True) for rank in range(table.world_size)],
        metadata_file="state dict",
        ranks=table,
    )
