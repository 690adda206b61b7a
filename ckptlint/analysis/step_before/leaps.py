"""Chunks that cannot have become what they are from the step before, and who has them in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np

from ckptlint.analysis.optimizer.pairs import LEAST_JUDGED, breaking_share, ranks_of_both
from ckptlint.model import ChangeTable, Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.text import first_names, fold_names, plural
from ckptlint.model.tiling import BoolArray, IntArray, distinct
from ckptlint.numerics.chunks import ranks_by_file
from ckptlint.rule import Location, NotApplicable, Note
from ckptlint.vocabulary.keys import parse

_FEW = 0.25  # share of chunks up to which they are odd among others, not changed on purpose
ALIKE, OTHER = 0.9, 0.5  # cosines with the step before: of weights that were trained on, and of other ones
_SCALE = 2.0
LEAST_ELEMENTS = 64  # elements of a chunk whose angle counts
_OFTEN = 0.001  # share of elements that break the law where it does not hold
_OTHERS = 0.05  # share of chunks that break Adam's bound by themselves, where the optimizer is another one


class Leap(NamedTuple):
    """Chunks with one fault.

    Attributes:
        title: whose they are: a key, `rank 2`, or `12 of 160 tensors of layer 3`.
        rows: int64 [k], rows of `Checkpoint.changes`.
        rank: the rank, -1 for several.
    """

    title: str
    rows: IntArray
    rank: int


@fact
def leapt_weights(ckpt: Checkpoint) -> tuple[Leap | None, Leap | None]:
    """The weights that certainly, and that likely do not continue those of the step before.

    Certain are those that moved further than the optimizer can. The likely ones point elsewhere while the others hardly
    turned; the rate or the betas are not known.
    """
    table = ckpt.changes
    if table is None or not (weights := kinds_of(table, "weight") & (table.was > 0)).any():
        return None, None
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = table.now / table.was
    is_elsewhere = (table.cosine < OTHER) | (scale > _SCALE) | (scale < 1 / _SCALE)
    reach = np.array([follow.reach for follow in table.follows])[table.follow]
    bounded = weights & np.isfinite(reach)
    is_far = bounded & (table.odd > 0)
    if went_on_from_elsewhere(ckpt):
        is_far &= is_elsewhere
    if is_far.any() and not are_few(ckpt, table, bounded, is_far):
        is_far &= is_elsewhere & (breaking_share(ckpt, "moments") < OTHER)
    axes = np.array([len(ckpt.tensors[follow.key].global_shape) for follow in table.follows], np.int64)
    turned = weights & ~np.isfinite(reach) & (table.drawn >= LEAST_ELEMENTS) & (axes[table.follow] > 1)
    likely = None
    if turned.any() and float(np.nanmedian(table.cosine[turned])) >= ALIKE:
        is_other = turned & (table.cosine < OTHER)
        if are_few(ckpt, table, turned, is_other):
            likely = leap_of(ckpt, table, turned, is_other)
    return leap_of(ckpt, table, bounded, is_far), likely


@fact
def leapt_moments(ckpt: Checkpoint) -> Leap | None:
    """The moments that do not continue those of the step before, or NotApplicable where they are not Adam's."""
    table = ckpt.changes
    if table is None:
        return None
    judged = _judged_moments(table)
    is_odd = judged & ((table.odd > _OFTEN * table.drawn) | ((table.now == 0) & kinds_of(table, "first")))
    if not is_odd.any():
        return None
    if not are_few(ckpt, table, judged, is_odd) and breaking_share(ckpt, "moments") > _OTHERS:
        raise NotApplicable("the moments do not follow Adam's bound")
    return leap_of(ckpt, table, judged, is_odd)


def _judged_moments(table: ChangeTable) -> BoolArray:
    updates = np.array([0 if follow.betas is None else follow.updates for follow in table.follows], np.int64)
    return np.asarray(kinds_of(table, "first", "second") & (table.was > 0) & (updates[table.follow] > 0))


@fact
def went_on_from_elsewhere(ckpt: Checkpoint) -> bool:
    """Whether moments of many tensors and ranks leapt and none were lost, as in a step of another branch of the run."""
    leap, table = None, ckpt.changes
    with suppress(NotApplicable):
        leap = leapt_moments(ckpt)
    if table is None or leap is None or leap.rank >= 0 or not table.now[leap.rows].all():
        return False
    return bool(len(leap.rows) > _FEW * _judged_moments(table).sum())


def leaps_of(ckpt: Checkpoint) -> list[Leap]:
    """All that leapt."""
    leaps: list[Leap | None] = [*leapt_weights(ckpt)]
    with suppress(NotApplicable):
        leaps.append(leapt_moments(ckpt))
    return [leap for leap in leaps if leap is not None]


def kinds_of(table: ChangeTable, *kinds: str) -> BoolArray:
    """bool [n], whether a row is of a tensor of these kinds."""
    are = np.array([follow.kind in kinds for follow in table.follows], bool)
    return np.asarray(are[table.follow])


def ranks_of(ckpt: Checkpoint, table: ChangeTable) -> IntArray:
    """int64 [n], the rank that saved each row's chunk, -1 where nothing says so."""
    ranks = ranks_by_file(ckpt)
    pairs = zip(table.follow.tolist(), table.chunk.tolist(), strict=True)
    records = [int(tensor_of(ckpt, table, follow).chunks.record[chunk]) for follow, chunk in pairs]
    return ranks[ckpt.records.file[np.array(records, np.int64)]] if records else np.zeros(0, np.int64)


def tensor_of(ckpt: Checkpoint, table: ChangeTable, follow: int) -> Tensor:
    """The tensor of a row of `ChangeTable.follows`."""
    return ckpt.tensors[table.follows[follow].key]


def leap_of(ckpt: Checkpoint, table: ChangeTable, judged: BoolArray, is_odd: BoolArray) -> Leap | None:
    """What the odd ones among the judged have in common; None where there are none."""
    rows = np.flatnonzero(judged & is_odd)
    if not len(rows):
        return None
    rank = ranks_of(ckpt, table)
    ranks, keys = distinct(rank[rows]), keys_of(table, rows)
    if len(keys) == 1:
        return Leap(keys[0], rows, int(ranks[0]) if len(ranks) == 1 else -1)
    if len(ranks) == 1 and ranks[0] >= 0 and len(distinct(rank[judged])) > 1:
        return Leap(f"rank {ranks[0]}", rows, int(ranks[0]))
    if (lost := _rank_of_either(ckpt, table, np.flatnonzero(judged), rows)) >= 0:
        return Leap(f"rank {lost}", rows, lost)
    layers = {parse(key).layer for key in keys}
    of_layer = f" of layer {layers.pop()}" if len(layers) == 1 and None not in layers else ""
    return Leap(f"{len(keys):,} of {plural(len(keys_of(table, np.flatnonzero(judged))), 'tensor')}{of_layer}", rows, -1)


def _rank_of_either(ckpt: Checkpoint, table: ChangeTable, judged: IntArray, odd: IntArray) -> int:
    """The rank that saved each odd row's chunk, or the second moment beside it; -1 if none, or few rows are others'."""
    tensors = [(ckpt.tensors[follow.key], ckpt.tensors[follow.second or follow.key]) for follow in table.follows]

    def ranks(rows: IntArray) -> Iterator[tuple[int, int]]:
        for follow, chunk in zip(table.follow[rows].tolist(), table.chunk[rows].tolist(), strict=True):
            yield ranks_of_both(ckpt, tensors[follow][0], chunk, tensors[follow][1])

    of_all: set[int] = {*ranks_by_file(ckpt).tolist()} - {-1}
    for both in ranks(odd):
        of_all &= {*both}
        if not of_all:  # mostly at once
            return -1
    rest = judged[~np.isin(judged, odd)]
    for rank in sorted(of_all):
        if len([*islice((both for both in ranks(rest) if rank not in both), LEAST_JUDGED)]) == LEAST_JUDGED:
            return rank
    return -1


def are_few(ckpt: Checkpoint, table: ChangeTable, judged: BoolArray, is_odd: BoolArray) -> bool:
    """Whether odd chunks are few among the judged, or those of one rank of several."""
    leap = leap_of(ckpt, table, judged, is_odd)
    return leap is not None and (leap.title.startswith("rank ") or len(leap.rows) <= _FEW * judged.sum())


def place_of(ckpt: Checkpoint, table: ChangeTable, leap: Leap) -> Location:
    """Where the first chunk is."""
    row = int(leap.rows[0])
    return Location.of_chunk(ckpt, tensor_of(ckpt, table, int(table.follow[row])), int(table.chunk[row]), leap.rank)


def key_notes(keys: tuple[str, ...]) -> tuple[Note, ...]:
    """Which tensors leapt, where the sentence on them names none."""
    return (("keys", first_names(fold_names(keys))),) if len(keys) > 1 else ()


def keys_of(table: ChangeTable, rows: IntArray) -> tuple[str, ...]:
    """The keys of these rows, in order."""
    return tuple(table.follows[follow].key for follow in distinct(table.follow[rows]).tolist())
