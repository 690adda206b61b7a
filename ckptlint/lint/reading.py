"""Reads what the records of a checkpoint hold, and draws elements from tensors that follow from each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.follows import follows_of
from ckptlint.analysis.pairs import pairs_of
from ckptlint.model import Checkpoint, Pair, PairTable
from ckptlint.model.text import plural
from ckptlint.numerics.draw import Elements, draw_changes, draw_pairs
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import ReadOptions
from ckptlint.storage.folder import Folder

_OF_CHUNK, _CHUNKS = 65_536, 16_384  # elements and chunks that are drawn at depth `data`
_OF_CHUNK_BY_HEADERS, _CHUNKS_BY_HEADERS = 4_096, 2_048


def read_records(folder: Folder, ckpt: Checkpoint, how: ReadOptions, compares: bool = True) -> Checkpoint:
    """The checkpoint with `payload`, and with `pairs` where all records were asked for.

    Args:
        compares: whether its tensors are compared with each other: not those of the step before.

    Raises:
        AccessError, KeyboardInterrupt: as `read_payload`.
    """
    ckpt = read_payload(folder, ckpt, how)
    if how.percent is not None or not compares:
        return ckpt
    per_chunk, most = (_OF_CHUNK, _CHUNKS) if how.depth.reads_all else (_OF_CHUNK_BY_HEADERS, _CHUNKS_BY_HEADERS)
    pairs = draw_pairs(folder, ckpt, pairs_of(ckpt), per_chunk, most)
    return replace(ckpt, pairs=pairs, not_looked_at=(*ckpt.not_looked_at, *_not_drawn(pairs)))


def with_changes(folder: Folder, ckpt: Checkpoint, before: Folder, how: ReadOptions) -> Checkpoint:
    """The checkpoint with `changes`, where it and the step before it were read.

    Raises:
        AccessError: a read was refused.
    """
    older = ckpt.before
    if ckpt.payload is None or older is None or older.payload is None or how.percent is not None:
        return ckpt
    per_chunk, most = (_OF_CHUNK, _CHUNKS) if how.depth.reads_all else (_OF_CHUNK_BY_HEADERS, _CHUNKS_BY_HEADERS)
    now, was = Elements(folder, ckpt), Elements(before, older)
    return replace(ckpt, changes=draw_changes(now, was, follows_of(ckpt, older), per_chunk, most))


def _not_drawn(pairs: PairTable) -> Iterator[str]:
    """What was left out of the comparison of tensors that follow from each other, as sentences."""
    by_reason: dict[str, list[Pair]] = defaultdict(list)
    for pair, reason in pairs.unread.items():
        by_reason[reason].append(pair)
    for reason, members in by_reason.items():
        first = members[0]
        more = f" and {plural(len(members) - 1, 'more pair')}" if len(members) > 1 else ""
        yield f"{first.first} was not compared with {first.second}{more}: {reason}"
    if len(pairs.rows) < pairs.chunks:
        yield f"moments and master copies were compared in {len(pairs.rows):,} of {plural(pairs.chunks, 'chunk')}"
