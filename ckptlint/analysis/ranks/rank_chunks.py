"""Presents the ranks of a running job as a checkpoint, so that rules and figures for files apply to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, ChunkTable, FileTable, RankTable, RecordTable, StoredFile, Tensor
from ckptlint.model.cover import Budget
from ckptlint.model.files import Names
from ckptlint.model.text import named_ranks, plural
from ckptlint.model.tiling import BoolArray, Box, IntArray, Tiling
from ckptlint.rule import MOST_KEYS, Finding, Location, Note, Severity
from ckptlint.vocabulary.keys import role

_VERSIONS = 8
_JUDGED = 100  # keys that are held alike; a job that lost its seed has thousands


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
    is_live = _is_live(table)
    for rows in _split(np.lexsort((table.rank, _place_of_name(table))), table.fqn[:, None].astype(np.int64)):
        yield KeyRows(table.fqns[int(table.fqn[rows[0]])], rows, rows[is_live[rows]])


def _is_live(table: RankTable) -> BoolArray:
    return np.asarray((table.sizes > 0).all(axis=1))


def _place_of_name(table: RankTable) -> IntArray:
    """int64 [n], where the name of each row stands among all names."""
    place = np.empty(len(table.fqns), np.int64)
    place[sorted(range(len(table.fqns)), key=table.fqns.__getitem__)] = np.arange(len(table.fqns))
    return place[table.fqn]


def _split(order: IntArray, columns: IntArray) -> list[IntArray]:
    """The rows in this order, those together that follow each other and are equal in all columns."""
    changes = np.flatnonzero((columns[order][1:] != columns[order][:-1]).any(axis=1)) + 1
    ends = [0, *changes.tolist(), len(order)]
    return [order[start:end] for start, end in pairwise(ends)] if len(order) else []


def torn(table: RankTable) -> set[str]:
    """The keys whose rows do not all describe one tensor or object: kind, dtype, number of axes and global shape."""
    keys, first = np.unique(table.fqn, return_index=True)
    same = first[np.searchsorted(keys, table.fqn)]
    differs = (table.global_shape != table.global_shape[same]).any(axis=1)
    for column in (table.is_object, table.dtype, table.ndim):
        differs |= column != column[same]
    return {table.fqns[number] for number in set(table.fqn[differs].tolist())}


def condensed(table: RankTable) -> RankTable:
    """The table with a hundred keys of those that the ranks hold alike, the others named in `RankTable.alike`.

    Alike are keys of which the same ranks hold the same copies, equal or differing from each other in the same way. A
    shape counts where the ranks do not all hold the same chunk.
    """
    boxes = np.concatenate([table.offsets, table.sizes, table.global_shape], axis=1)
    described = np.concatenate([boxes, table.dtype[:, None]], axis=1)
    of_key = np.concatenate([table.fqn[:, None], boxes], axis=1)
    order = np.lexsort((table.rank, *of_key[:, :0:-1].T, _place_of_name(table)))
    start = np.flatnonzero(np.diff(table.fqn[order], prepend=-1))
    first = np.repeat(start, np.diff(start, append=len(order)))  # of the rows of a key
    boxes, described, of_key = boxes[order], described[order], of_key[order]
    uniform = np.logical_and.reduceat((described == described[first]).all(axis=1), start) if len(start) else start
    width = table.offsets.shape[1]
    is_whole = (table.sizes == table.global_shape).all(axis=1)[order]
    described = np.where(np.repeat(uniform, np.diff(start, append=len(order)))[:, None], 0, described)
    columns = [table.rank, table.is_object, table.ndim, table.replica, table.copies, table.strict, _is_live(table)]
    same_digest = _first_alike(np.column_stack([of_key[:, : 1 + 2 * width], table.digest[order]])) - first
    same_digest = np.where(table.digest[order] != 0, same_digest, -1)
    same_view = _first_alike(np.column_stack([of_key[:, :1], table.view[order]])) - first
    stack = [*(column[order] for column in columns), is_whole, same_digest, same_view, described]
    pattern = np.column_stack(stack).astype(np.int64)
    reported = {finding.fqn for finding in table.findings}
    ends = pairwise([*start.tolist(), len(order)])
    patterns = ((pattern[low:high].tobytes(), int(table.fqn[order[low]])) for low, high in ends)
    keys = grouped((look, number) for look, number in patterns if table.fqns[number] not in reported)
    left_out = {numbers[0]: numbers[_JUDGED:] for numbers in keys.values() if len(numbers) > _JUDGED}
    kept = ~np.isin(table.fqn, [number for numbers in left_out.values() for number in numbers])
    names = {
        table.fqns[number]: tuple(table.fqns[key_number] for key_number in others)
        for number, others in left_out.items()
    }
    rows = {name: getattr(table, name)[kept] for name in _COLUMNS}
    return replace(table, **rows, alike=names) if names else table


_COLUMNS = (
    "fqn", "rank", "is_object", "dtype", "ndim", "offsets", "sizes", "global_shape", "replica", "copies", "strict",
    "digest", "view",
)  # fmt: skip


def _first_alike(rows: IntArray) -> IntArray:
    """int64 [n], for each row the first one that is equal to it."""
    _, first, place = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[place.reshape(-1)])


def with_alike(finding: Finding, table: RankTable) -> Finding:
    """The finding with the keys that stand behind its own."""
    if not (keys := table.alike.get(finding.at.fqn or "", ())):
        return finding
    note = ("more", f"{plural(len(keys), 'more key')} like the first {_JUDGED}, counted and not listed")
    return replace(finding, keys=(*finding.keys, *keys)[:MOST_KEYS], notes=(*finding.notes, note))


def described_row(table: RankTable, row: int) -> tuple[str, str, tuple[int, ...]]:
    """Kind, dtype and global shape of a row; what all holders of a key must share."""
    dtype = int(table.dtype[row])
    kind = "object" if table.is_object[row] else "tensor"
    return kind, "" if dtype < 0 else table.dtypes[dtype], tuple(table.global_shape[row, : table.ndim[row]].tolist())


def owners(table: RankTable, key_rows: KeyRows) -> IntArray:
    """Rows whose chunk is written: declared writers, and the lowest rank of equal undeclared chunks."""
    rows = key_rows.live[table.replica[key_rows.live] <= 0]
    undeclared = rows[table.replica[rows] < 0]
    if len(undeclared) == 0:
        return rows
    cells = np.concatenate([table.offsets[undeclared], table.sizes[undeclared]], axis=1)
    if len(undeclared) == len(rows) and (cells == cells[0]).all():
        return undeclared[:1]
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
    left_out = _flawed(table) | torn(table)
    columns = np.concatenate([table.fqn[:, None], table.offsets, table.sizes], axis=1)
    order = np.lexsort((table.rank, *columns[:, :0:-1].T, _place_of_name(table)))
    for rows in _split(order[_is_live(table)[order]], columns):
        if (fqn := table.fqns[int(table.fqn[rows[0]])]) not in left_out:
            row, axes = int(rows[0]), int(table.ndim[rows[0]])
            place = Box(tuple(table.offsets[row, :axes].tolist()), tuple(table.sizes[row, :axes].tolist()))
            yield ChunkCopies(fqn, place, rows, place.sizes == described_row(table, row)[2])


def digest_groups(table: RankTable, cell: ChunkCopies) -> list[IntArray]:
    """Rows of the copies whose contents were hashed, those with equal contents together, the largest group first."""
    known = cell.rows[table.digest[cell.rows] != 0]
    groups = [known[table.digest[known] == digest] for digest in np.unique(table.digest[known]).tolist()]
    return sorted(groups, key=lambda rows: (-len(rows), int(table.rank[rows[0]])))


def _flawed(table: RankTable) -> set[str]:
    return {finding.fqn for finding in table.findings if finding.voids == "chunks"}


def sound(ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint without tensors for which a rank reports a fault of its chunks."""
    assert ckpt.ranks is not None
    flawed = _flawed(ckpt.ranks)
    return replace(ckpt, tensors={fqn: tensor for fqn, tensor in ckpt.tensors.items() if fqn not in flawed})


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
    """Notes on who holds which of several contents (`noun`) by rank, and where the first two differ."""
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
    tensors, budget, disagreed = {}, Budget(), torn(table)
    for key_rows in holders(table):
        if table.is_object[key_rows.rows[0]] or key_rows.fqn in disagreed:
            continue
        rows = owners(table, key_rows)
        _, dtype, shape = described_row(table, int(key_rows.rows[0]))
        tiling = Tiling(shape, table.offsets[rows, : len(shape)], table.sizes[rows, : len(shape)], budget)
        tensors[key_rows.fqn] = Tensor(key_rows.fqn, dtype, shape, ChunkTable(tiling, rows.astype(np.int64)))
    none, no, yes = (np.full(len(table), value) for value in (0, False, True))
    files = (StoredFile(f"rank {rank}", None, None, "unchecked", True) for rank in range(table.world_size))
    return Checkpoint(
        path,
        "live",
        "running job",
        tensors=tensors,
        records=RecordTable(Names.of(table.fqns), table.fqn, table.rank, none, none, no, yes, {}),
        files=FileTable.of(files),
        readable=not any(finding.voids == "check" for finding in table.findings),
        metadata_file="state dict",
        ranks=table,
    )
