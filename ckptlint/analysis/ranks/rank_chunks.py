"""Presents the ranks of a running job as a checkpoint, so that rules and figures for files apply to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ckptlint.model import Checkpoint, ChunkTable, FileTable, RankTable, RecordTable, StoredFile, Tensor
from ckptlint.model.cover import Budget
from ckptlint.model.files import Names
from ckptlint.model.text import named_ranks
from ckptlint.model.tiling import Box, IntArray, Tiling
from ckptlint.rule import Finding, Location, Note, Severity
from ckptlint.vocabulary.keys import role

_VERSIONS = 8


class KeyRows(NamedTuple):
    """The rows of one key.

    Attributes:
        rows: rows of the table, by rank.
        live: those of them that hold at least one element.
    """

    fqn: str
    rows: IntArray
    live: IntArray


def holders(table: RankTable) -> Iterator[KeyRows]:
    """The rows of each key, in order of its name."""
    order = np.lexsort((table.rank, table.fqn))
    is_live = np.asarray((table.sizes > 0).all(axis=1))
    changes = np.flatnonzero(table.fqn[order][1:] != table.fqn[order][:-1]) + 1
    groups = np.split(order, changes) if len(order) else []
    for rows in sorted(groups, key=lambda rows: table.fqns[int(table.fqn[rows[0]])]):
        yield KeyRows(table.fqns[int(table.fqn[rows[0]])], rows, rows[is_live[rows]])


def described_row(table: RankTable, row: int) -> tuple[str, str, tuple[int, ...]]:
    """Kind, dtype and global shape of a row; what all holders of a key must share."""
    dtype = int(table.dtype[row])
    kind = "object" if table.is_object[row] else "tensor"
    return kind, "" if dtype < 0 else table.dtypes[dtype], tuple(table.global_shape[row, : table.ndim[row]].tolist())


def box_of_row(table: RankTable, row: int) -> Box:
    """The box of a row's chunk."""
    n = int(table.ndim[row])
    return Box(tuple(table.offsets[row, :n].tolist()), tuple(table.sizes[row, :n].tolist()))


def agree(table: RankTable, rows: IntArray) -> bool:
    """Whether all rows describe one tensor or object: kind, dtype, number of axes and global shape."""
    columns = (table.is_object, table.dtype, table.ndim)
    same = all((column[rows] == column[rows[:1]]).all() for column in columns)
    return bool(same and (table.global_shape[rows] == table.global_shape[rows[:1]]).all())


def owners(table: RankTable, key_rows: KeyRows) -> IntArray:
    """Rows whose chunk is written: declared writers, and the lowest rank of equal undeclared chunks."""
    rows = key_rows.live[table.replica[key_rows.live] <= 0]
    undeclared = rows[table.replica[rows] < 0]
    if len(undeclared) == 0:
        return rows
    cells = np.concatenate([table.offsets[undeclared], table.sizes[undeclared]], axis=1)
    _, first = np.unique(cells, axis=0, return_index=True)  # rows come by rank, so the first is the lowest
    return np.sort(np.concatenate([rows[table.replica[rows] >= 0], undeclared[first]]))


class ChunkCopies(NamedTuple):
    """The copies of one chunk or object: rows of one key with equal boxes that hold elements, by rank."""

    fqn: str
    box: Box
    rows: IntArray
    is_whole: bool


def cells(table: RankTable) -> Iterator[ChunkCopies]:
    """The chunks with their copies, for keys whose ranks agree on kind, dtype and shape and report no fault."""
    flawed = _flawed(table)
    for key_rows in holders(table):
        if key_rows.fqn in flawed or len(key_rows.live) == 0 or not agree(table, key_rows.rows):
            continue
        places = np.concatenate([table.offsets[key_rows.live], table.sizes[key_rows.live]], axis=1)
        _, number = np.unique(places, axis=0, return_inverse=True)
        order = np.argsort(number.reshape(-1), kind="stable")
        for rows in np.split(key_rows.live[order], np.flatnonzero(np.diff(number.reshape(-1)[order])) + 1):
            shape = described_row(table, int(rows[0]))[2]
            place = box_of_row(table, int(rows[0]))
            yield ChunkCopies(key_rows.fqn, place, rows, place.sizes == shape)


def digest_groups(table: RankTable, cell: ChunkCopies) -> list[IntArray]:
    """Rows of the copies whose contents were hashed, those with equal contents together, the largest group first."""
    known = cell.rows[table.digest[cell.rows] != 0]
    groups = [known[table.digest[known] == digest] for digest in np.unique(table.digest[known]).tolist()]
    return sorted(groups, key=lambda rows: (-len(rows), int(table.rank[rows[0]])))


def sound(ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint without tensors for which a rank reports a fault of its chunks."""
    assert ckpt.ranks is not None
    flawed = _flawed(ckpt.ranks)
    return replace(ckpt, tensors={fqn: tensor for fqn, tensor in ckpt.tensors.items() if fqn not in flawed})


def _flawed(table: RankTable) -> set[str]:
    return {finding.fqn for finding in table.findings if finding.voids == "chunks"}


def ranks_of(table: RankTable, rows: Iterable[int]) -> str:
    """The ranks of some rows in words.

    >>> named_ranks([3]), named_ranks([0, 1, 2, 6])
    ('rank 3', 'ranks 0-2,6')
    """
    return named_ranks(int(table.rank[row]) for row in rows)


def at_ranks(table: RankTable, fqn: str, rows: Iterable[int]) -> Location:
    """A key, and the ranks of some of its rows."""
    ranks = sorted({int(table.rank[row]) for row in rows})
    return Location(fqn, label=named_ranks(ranks), ranks=tuple(ranks))


def at_cell(ckpt: Checkpoint, cell: ChunkCopies, rows: Iterable[int]) -> Location:
    """The chunk, and the ranks of some of its rows; its tensor is drawn where the ranks agree on it."""
    assert ckpt.ranks is not None
    tensor = ckpt.tensors.get(cell.fqn)
    region = None if tensor is None else cell.box
    return replace(at_ranks(ckpt.ranks, cell.fqn, rows), key=tensor or cell.fqn, region=region)


def versions(table: RankTable, cell: ChunkCopies, groups: Sequence[IntArray], noun: str) -> tuple[Note, ...]:
    """Notes on who holds which of several contents, in order of ranks, and where the first two differ.

    Args:
        groups: as `digest_groups` gives them.
        noun: what each of them is.
    """
    ordered = sorted(groups, key=lambda rows: int(table.rank[rows[0]]))
    notes = [(f"{noun} {i}", ranks_of(table, rows)) for i, rows in enumerate(ordered[:_VERSIONS], 1)]
    if more := len(ordered) - len(notes):
        notes.append(("more", f"{more:,} more, each different"))
    difference = table.differences.get((cell.fqn, str(cell.box)), "")
    return tuple(note for note in (*notes, ("values", difference)) if note[1])


def reported(ckpt: Checkpoint, hint: str = "") -> Iterator[Finding]:
    """Findings that the ranks made themselves, one for each sentence, with the ranks that made it."""
    by_text: dict[tuple[str, str, str], set[int]] = {}
    for finding in ckpt.rank_findings:
        by_text.setdefault((finding.fqn, finding.text, finding.level), set()).add(finding.rank)
    for (fqn, text, level), said in sorted(by_text.items()):
        who = "" if -1 in said else named_ranks(said)
        yield Finding(
            text,
            at=Location(fqn or None, label=who, ranks=() if -1 in said else tuple(sorted(said))),
            identity=(text,),
            severity=Severity[level.upper()] if level else None,
            hint=hint,
            group=role(fqn) if fqn else text,
        )


def as_checkpoint(table: RankTable, path: str) -> Checkpoint:
    """The table as a checkpoint whose files are the ranks: chunk i of a tensor is in the `file` of its rank.

    Keys whose holders disagree about shape or dtype are left out, as are objects.
    """
    tensors, budget = {}, Budget()
    for key_rows in holders(table):
        if table.is_object[key_rows.rows[0]] or not agree(table, key_rows.rows):
            continue
        rows = owners(table, key_rows)
        _, dtype, shape = described_row(table, int(key_rows.rows[0]))
        tiling = Tiling(shape, table.offsets[rows, : len(shape)], table.sizes[rows, : len(shape)], budget)
        tensors[key_rows.fqn] = Tensor(key_rows.fqn, dtype, shape, ChunkTable(tiling, rows.astype(np.int64)))
    names, none = Names.of(table.fqns), np.zeros(len(table), np.int64)
    return Checkpoint(
        path,
        "live",
        "running job",
        tensors=tensors,
        records=RecordTable(
            names, table.fqn, table.rank, none, none, np.zeros(len(table), bool), np.ones(len(table), bool), {}
        ),
        files=FileTable.of(
            StoredFile(f"rank {rank}", None, None, "unchecked", True) for rank in range(table.world_size)
        ),
        readable=not any(finding.voids == "check" for finding in table.findings),
        metadata_file="state dict",
        ranks=table,
    )
