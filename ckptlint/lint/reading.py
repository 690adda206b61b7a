"""Reads what the records of a checkpoint hold, and draws elements from tensors that follow from each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ckptlint.analysis.follows import follows_of
from ckptlint.analysis.leaps import leaps_of
from ckptlint.analysis.pairs import pairs_of
from ckptlint.model import Checkpoint, Pair, PairTable
from ckptlint.model.text import plural
from ckptlint.numerics.draw import Elements, draw_changes, draw_pairs, records_to_draw
from ckptlint.numerics.origins import origins_of
from ckptlint.numerics.settings import setting_records
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import ReadOptions
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.keys import parse, state_name

_BY_DATA, _BY_HEADERS, _BY_DRAWING = (65_536, 16_384), (4_096, 2_048), (1_024, 4_096)
"""Elements of a chunk that are drawn, and chunks, at depths `data` and `headers`, and where nothing else is read."""

_OPENED = 2_048  # chunks whose records are opened only to draw from them, with those that are compared with them


def read_records(folder: Folder, ckpt: Checkpoint, how: ReadOptions, after: Checkpoint | None = None) -> Checkpoint:
    """The checkpoint with `payload`, and with `pairs` where all records were asked for.

    Args:
        after: the step that it is to be compared with; its tensors are then not compared with each other.

    Raises:
        AccessError, KeyboardInterrupt: as `read_payload`.
    """
    if how.draws:
        drawn = records_to_draw(ckpt, after or ckpt, _drawn_together(after or ckpt), _OPENED)
        how = replace(how, wanted=np.union1d(drawn, setting_records(ckpt)))
    ckpt = read_payload(folder, ckpt, how)
    if how.percent is not None or after is not None:
        return ckpt
    pairs = draw_pairs(folder, ckpt, pairs_of(ckpt), *_amounts(how))
    return replace(ckpt, pairs=pairs, not_looked_at=(*ckpt.not_looked_at, *_not_drawn(pairs, how.draws)))


def with_changes(folder: Folder, ckpt: Checkpoint, before: Folder, how: ReadOptions) -> Checkpoint:
    """The checkpoint with `changes`, and what leapt chunks hold, where it and the step before it were read.

    Raises:
        AccessError: a read was refused.
    """
    older = ckpt.before
    if ckpt.payload is None or older is None or older.payload is None or how.percent is not None:
        return ckpt
    now, was = Elements(folder, ckpt), Elements(before, older)
    changes = draw_changes(now, was, follows_of(ckpt, older), *_amounts(how))
    leaps = leaps_of(replace(ckpt, changes=changes))
    origins = {row: origin for leap in leaps for row, origin in origins_of(now, was, changes, leap.rows).items()}
    return replace(ckpt, changes=replace(changes, origins=origins))


def _amounts(how: ReadOptions) -> tuple[int, int]:
    return _BY_DRAWING if how.draws else _BY_DATA if how.depth.reads_all else _BY_HEADERS


def _drawn_together(ckpt: Checkpoint) -> list[tuple[str, ...]]:
    """The keys of weights and states: those that are compared with each other together, the others alone."""
    groups = [(pair.first, pair.second) for pair in pairs_of(ckpt)]
    paired = {key for group in groups for key in group}
    keys = (tensor.fqn for tensor in ckpt.sound_tensors() if tensor.volume > 1 and tensor.fqn not in paired)
    return [*groups, *((key,) for key in keys if parse(key).kind == "model" or state_name(key))]


def _not_drawn(pairs: PairTable, draws: bool) -> Iterator[str]:
    """What was left out of the comparison of tensors that follow from each other, as sentences.

    Args:
        draws: whether only some records were opened, which the report says already.
    """
    by_reason: dict[str, list[Pair]] = defaultdict(list)
    for pair, reason in pairs.unread.items():
        by_reason[reason].append(pair)
    for reason, members in by_reason.items():
        first = members[0]
        more = f" and {plural(len(members) - 1, 'more pair')}" if len(members) > 1 else ""
        yield f"{first.first} was not compared with {first.second}{more}: {reason}"
    if len(pairs.rows) < pairs.chunks and not draws:
        yield f"moments and master copies were compared in {len(pairs.rows):,} of {plural(pairs.chunks, 'chunk')}"
