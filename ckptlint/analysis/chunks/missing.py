"""Finds the ranks that should have saved a missing part of a tensor, and payload bytes that may still hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from ckptlint.geometry.chunk_graph import coordinates
from ckptlint.geometry.writers import ranks_of_chunks, ranks_of_files
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.text import join_words, named_ranks
from ckptlint.model.tiling import Box, IntArray, distinct

_REGIONS = 3  # most missing regions of a tensor that findings show
_SIBLINGS, _PARTS = 16, 64  # most tensors of one shape that are compared, and most chunks of each
_NAMED = 3
_PLANS = "the plans of all ranks"


class Absent(NamedTuple):
    """The ranks that should have saved a missing part.

    Attributes:
        ranks: one rank, or several that all planned the same other part, so that one of them should have saved this.
        shown_by: the evidence, in words.
        instead: the part that the rank saved by mistake, and the rank that saves this part of other tensors.
    """

    ranks: tuple[int, ...]
    shown_by: str
    instead: tuple[Box, int] | None = None


# ---------------------------------------------------------------- bytes without an entry


@fact
def unnamed_bytes(ckpt: Checkpoint, least: int = 1) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Payload file -> [start, stop) of each gap between entries with at least `least` bytes.

    A file without entries is one gap. Left out are files that were not examined, files with negative offsets, and
    formats whose entries have no offsets.
    """
    table, gaps_by_file = ckpt.records, {}
    order = np.lexsort((table.byte_offset, table.file))
    bounds = np.searchsorted(table.file[order], np.arange(len(ckpt.files) + 1))
    for number in _with_room(ckpt, order, least).tolist():
        file, rows = ckpt.files[number], order[bounds[number] : bounds[number + 1]]
        if not file.size or not file.name.endswith(".distcp") or (len(rows) and not ckpt.locates_bytes):
            continue
        reached = np.maximum.accumulate(np.concatenate([[0], _ends(table.byte_offset[rows], table.byte_length[rows])]))
        nexts = np.concatenate([table.byte_offset[rows], [file.size]])
        wide = np.flatnonzero(nexts - reached >= least).tolist()
        if wide:
            gaps_by_file[file.name] = tuple((int(reached[i]), int(nexts[i])) for i in wide)
    return gaps_by_file


def _with_room(ckpt: Checkpoint, order: IntArray, least: int) -> IntArray:
    """Rows of the files with a gap of at least `least` bytes."""
    table, files = ckpt.records, ckpt.files
    file, start = table.file[order], table.byte_offset[order]
    stop = _ends(start, table.byte_length[order])
    before = np.concatenate([[0], stop[:-1]])
    before[1:][file[1:] != file[:-1]] = 0
    end = np.zeros(len(files), np.int64)
    np.maximum.at(end, file, stop)
    has_room = files.size - end >= least
    has_room[file[start - before >= least]] = True
    has_room[file[(start < 0) | (table.byte_length[order] < 0)]] = False
    return np.flatnonzero(has_room & files.are("ok"))


def _ends(starts: IntArray, lengths: IntArray) -> IntArray:
    stops: IntArray = starts + np.minimum(lengths, np.iinfo(np.int64).max - np.maximum(starts, 0))
    return stops


@fact
def lost_records(ckpt: Checkpoint) -> Mapping[tuple[str, Box], tuple[str, list[int]]]:
    """(key, missing region) -> payload file, and first bytes of the records in it that no entry names: one holds it."""
    rank_of_file = dict(zip(ckpt.files.names, ranks_of_files(ckpt).tolist(), strict=True))
    unnamed = ((file, start, stop - start) for file, gaps in unnamed_bytes(ckpt).items() for start, stop in gaps)
    by_rank = grouped((rank_of_file[gap[0]], gap) for gap in unnamed)
    records = {}
    for tensor in ckpt.sound_tensors() if by_rank else ():
        for region in tensor.tiling.coverage.missing[:_REGIONS] if tensor.tiling.live.any() else ():
            lengths = _record_lengths(ckpt, tensor, region)
            # A gap counts only at exactly the length of a sibling's record: gaps also come from alignment and dropped
            # copies. Two candidate files prove nothing, so the part is then not called recoverable.
            hits = [gap for gap in _where_lost(ckpt, absent_ranks(ckpt, tensor, region), by_rank) if gap[2] in lengths]
            if hits and len({file for file, *_ in hits}) == 1:
                file, _, length = hits[0]
                records[tensor.fqn, region] = file, [start for _, start, size in hits if size == length]
    return records


def _where_lost(
    ckpt: Checkpoint, absent: Absent | None, by_rank: Mapping[int, list[tuple[str, int, int]]]
) -> list[tuple[str, int, int]]:
    """The gaps (file, start, length) that may hold a missing part: those of its rank, or all where no rank is known."""
    # with save plans, or where several ranks planned one part, the gaps are copies that were dropped
    if absent is None:
        return [] if ckpt.save_plans is not None else [gap for gaps in by_rank.values() for gap in gaps]
    return by_rank.get(absent.ranks[0], []) if len(absent.ranks) == 1 and not absent.instead else []


def _record_lengths(ckpt: Checkpoint, tensor: Tensor, region: Box) -> frozenset[int]:
    """Lengths in bytes of the records of all chunks with the shape of this region."""
    peers = (tensor.tiling.sizes == np.array(region.sizes, np.int64)).all(axis=1) & (tensor.chunks.record >= 0)
    return frozenset(ckpt.records.byte_length[tensor.chunks.record[peers]].tolist())


# ---------------------------------------------------------------- ranks


@fact
def absent_ranks(ckpt: Checkpoint, tensor: Tensor, region: Box) -> Absent | None:
    """The ranks that should have saved a missing region; None where nothing shows it."""
    # Witnesses in order of strength: save plans state the rank, file numbers must fit an affine rule, tensors of the
    # same shape only show where this job puts such a part. The first that speaks decides.
    if planned := _planned(ckpt, tensor, region):
        return Absent(planned, _PLANS)
    rank = absent_writer(ckpt, tensor, region)
    if rank is not None:
        return Absent((rank,), "the files of the other chunks")
    return _by_siblings(ckpt, tensor, region)


def absent_writer(ckpt: Checkpoint, tensor: Tensor, region: Box) -> int | None:
    """The rank whose file should hold the missing region, if file numbers follow the grid of the present chunks.

    The ranks must be an affine function of the grid positions, with more chunks than coefficients, so that they test
    the function. Deduplication spreads replicas by load and follows no such rule: the answer is then None.
    """
    tiling = tensor.tiling
    at = coordinates(tiling, region)
    axes = [axis for axis, (slots, _) in at.items() if len(slots) > 1]
    rows = np.flatnonzero(tiling.live & (tensor.chunks.record >= 0))
    if not axes or not len(rows) > len(axes) + 1 or any(len(at[axis][1]) != 1 for axis in axes):
        return None
    others = [axis for axis in range(len(tiling.shape)) if axis not in at and tiling.shape[axis] > 1]
    if any(len(tiling.intervals(axis)) > 1 for axis in others):
        return None
    ranks = ranks_of_chunks(ckpt, tensor, rows)
    if (ranks < 0).any():
        return None
    position = np.ones((len(rows), len(axes) + 1))
    for column, axis in enumerate(axes):
        position[:, column] = np.searchsorted(at[axis][0].starts, tiling.offsets[rows, axis])
    wanted = ranks.astype(float)
    factors, *_ = np.linalg.lstsq(position, wanted, rcond=None)
    # The fit must be exact and every axis must count (a factor of 0.5 or more): a factor near 0 means that several
    # chunks share a rank, so the rank of the missing one does not follow.
    if np.abs(position @ factors - wanted).max() > 1e-6 or np.abs(factors[:-1]).min() < 0.5:
        return None
    missing = float(np.array([at[axis][1][0] for axis in axes] + [1.0]) @ factors)
    rank = round(missing)
    return rank if rank >= 0 and abs(missing - rank) < 1e-6 else None


def _planned(ckpt: Checkpoint, tensor: Tensor, region: Box) -> tuple[int, ...]:
    """The ranks that planned this region, or else the one group of ranks that planned another part together."""
    plans = ckpt.save_plans
    rows = _plan_rows(ckpt).get(tensor.fqn)
    if plans is None or rows is None:
        return ()
    axes = len(region.offsets)
    offsets, sizes = plans.offsets[rows, :axes], plans.sizes[rows, :axes]
    exact = ((offsets == region.offsets) & (sizes == region.sizes)).all(axis=1)
    if exact.any():
        return tuple(distinct(plans.rank[rows[exact]]).tolist())
    owners: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for row, offset, size in zip(rows.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        if prod(size) and region.volume % prod(size) == 0:
            owners[tuple(offset)].add(int(plans.rank[row]))
    # Nobody planned the region: a rank computed a wrong offset. Two ranks with one part are then the suspects (GEO004:
    # "two ranks planned the same half"); two such groups name nobody.
    several = {tuple(sorted(ranks)) for ranks in owners.values() if len(ranks) > 1}
    return several.pop() if len(several) == 1 else ()


@fact
def _plan_rows(ckpt: Checkpoint) -> Mapping[str, IntArray]:
    """Key -> its rows in the save plans; {} unless the plans cover exactly the keys of this checkpoint."""
    plans = ckpt.save_plans
    if plans is None or not ckpt.is_torch_dist or set(plans.fqns) != set(ckpt.records.fqns):
        return {}
    order = np.argsort(plans.fqn, kind="stable")
    bounds = np.searchsorted(plans.fqn[order], np.arange(len(plans.fqns) + 1))
    return {fqn: order[bounds[i] : bounds[i + 1]] for i, fqn in enumerate(plans.fqns)}


def _by_siblings(ckpt: Checkpoint, tensor: Tensor, region: Box) -> Absent | None:
    """The rank that saved this region of tensors of this shape, whose other parts are of the same ranks as here."""
    if len(tensor.chunks) > _PARTS:
        return None
    ranks = _rank_by_box(ckpt, tensor)
    absent_by_rank: dict[int, Absent] = {}
    for sibling in _whole_tensors(ckpt).get(tensor.global_shape, ()):
        theirs = _rank_by_box(ckpt, sibling)
        shared = ranks.keys() & theirs.keys()
        if region not in theirs or not shared:
            continue
        rank = theirs[region]
        moved = [box for box in shared if ranks[box] != theirs[box]]
        # One moved part is a wrong offset (GEO004: "rank 1 of 2 saved experts 0-1 in place of its own"). More of them
        # mean that the two tensors are simply spread over ranks in another way.
        if len(moved) < 2 and all(ranks[box] == rank for box in moved):
            instead = (moved[0], theirs[moved[0]]) if moved else None
            absent_by_rank.setdefault(rank, Absent((rank,), f"it saved the same part of {sibling.fqn}", instead))
    return next(iter(absent_by_rank.values())) if len(absent_by_rank) == 1 and -1 not in absent_by_rank else None


@fact
def _whole_tensors(ckpt: Checkpoint) -> Mapping[tuple[int, ...], list[Tensor]]:
    """Shape -> its first complete tensors, at most `_SIBLINGS`."""
    whole_tensors: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for tensor in ckpt.sound_tensors():
        siblings = whole_tensors[tensor.global_shape]
        if len(tensor.chunks) <= _PARTS and len(siblings) < _SIBLINGS and not tensor.tiling.coverage.missing:
            siblings.append(tensor)
    return whole_tensors


def _rank_by_box(ckpt: Checkpoint, tensor: Tensor) -> Mapping[Box, int]:
    rows = np.flatnonzero(tensor.tiling.live & (tensor.chunks.record >= 0))
    return dict(zip(map(tensor.tiling.box, rows.tolist()), ranks_of_chunks(ckpt, tensor, rows).tolist(), strict=True))


# ---------------------------------------------------------------- in words


def rank_note(absent: Absent | None) -> str:
    """Sentence on the ranks that should have saved the part, with the evidence; "" where unknown."""
    if absent is None:
        return ""
    who = named_ranks(absent.ranks)
    if len(absent.ranks) > 1:
        return f"{who} planned the same part of this key, so one of them should have saved this one"
    if absent.shown_by.startswith("it "):
        return f"{who} should have saved it: {absent.shown_by}"
    return f"{who} should have saved it, as {absent.shown_by} show"


def absent_hint(ckpt: Checkpoint, tensor: Tensor, region: Box) -> str:
    """Hint for a missing part: where its record probably is, or which rank's state dict or offsets to inspect."""
    if lost := lost_records(ckpt).get((tensor.fqn, region)):
        at = f"in {lost[0]} at byte {join_words([f'{start:,}' for start in lost[1][:_NAMED]], 'or')}"
        copy = f"restore {ckpt.metadata_file} from a copy"
        return f"{copy}: the record is probably still {at}; only its entry is missing"
    absent = absent_ranks(ckpt, tensor, region)
    if absent is None:
        return "list which ranks pass this key to save, and compare their offsets"
    who = named_ranks(absent.ranks)
    if len(absent.ranks) > 1:
        return f"compare the offsets of this key on {who}, and save again"
    if absent.instead:
        box, owner = absent.instead
        mine = f"rank {owner}'s"
        return f"compare the offset of this key on {who} with {mine}: {who} saved {box}, which is {mine} part"
    (rank,) = absent.ranks
    file, metadata = _file_of(ckpt, rank), ckpt.metadata_file
    if rank not in ranks_with_entries(ckpt):
        if _unnamed_of(ckpt, rank, 1):
            return f"restore {metadata} from a copy: {file} of {who} is here, but {metadata} does not use it"
        return f"save again with {who}: {metadata} uses no file of it, so it probably never saved ({file})"
    lengths = _record_lengths(ckpt, tensor, region)
    if lengths and (unnamed := _unnamed_of(ckpt, rank, min(lengths))):
        return f"look into {file} of {who}: {metadata} does not use {unnamed:,} of its bytes; this part may be in them"
    if absent.shown_by == _PLANS:
        return f"save again: {who} planned this part, but {file} does not hold it"
    return f"look at the state dict of {who}: it should hold this part, but {file} holds only other tensors"


def _file_of(ckpt: Checkpoint, rank: int) -> str:
    """The first file of a rank, or the name that it would have."""
    rows = np.flatnonzero(ranks_of_files(ckpt) == rank)
    if len(rows):
        return ckpt.files.names[int(rows[0])]
    of_set = ckpt.rank_files.files if ckpt.rank_files else ()
    name = next((file.name for file in of_set if file.numbers == {"rank": rank}), f"__{rank}_0.distcp")
    return f"shard-{rank + 1:05d}-*.safetensors" if ckpt.is_safetensors else name


def _unnamed_of(ckpt: Checkpoint, rank: int, least: int) -> int:
    """Bytes of a rank's files in gaps of at least `least` bytes."""
    rows = np.flatnonzero(ranks_of_files(ckpt) == rank).tolist()
    gaps = unnamed_bytes(ckpt)
    sizes = (stop - start for row in rows for start, stop in gaps.get(ckpt.files.names[row], ()))
    return sum(size for size in sizes if size >= least)


@fact
def ranks_with_entries(ckpt: Checkpoint) -> frozenset[int]:
    """The ranks with at least one entry in their files."""
    return frozenset(distinct(ranks_of_files(ckpt)[distinct(ckpt.records.file)]).tolist())
