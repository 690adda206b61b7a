"""Counts the reads of a job's ranks in bytes, requests and files, and lists the files that each node must see.

Sums are kept per box of a target and assigned to ranks at the end, so thousands of ranks with equal parts cost no more
than one of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptlint.geometry.writers import ranks_of_files
from ckptlint.model import Checkpoint
from ckptlint.model.tiling import IntArray
from ckptlint.planning.job import Target
from ckptlint.planning.outcome import Cost, NodeReads
from ckptlint.planning.reads import Reads, counted

_MANY = 1 << 22


@dataclass(eq=False)
class _OfTarget:
    """Sums over all tensors of one target, and pairs of a box and a file, as `box * files + file`.

    Attributes:
        sums: float64 [3, boxes], bytes needed, bytes read, and requests.
    """

    target: Target
    sums: npt.NDArray[np.float64]
    pairs: list[IntArray] = field(default_factory=list)
    waiting: int = 0

    def distinct_pairs(self) -> IntArray:
        """All pairs, each once."""
        return np.unique(np.concatenate(self.pairs)) if self.pairs else np.zeros(0, np.int64)


class Tally:
    """Adds up what ranks read."""

    def __init__(self, ckpt: Checkpoint, world: int) -> None:
        self.ckpt, self.world = ckpt, world
        self.files = max(len(ckpt.files), 1)
        self.touched = np.zeros(len(ckpt.records), bool)
        self.of_targets: dict[int, _OfTarget] = {}

    def add(self, target: Target, reads: Reads, records: IntArray, needed: IntArray) -> None:
        """Add one tensor, or one object: int64 [n], the record of each item, and its needed bytes."""
        if id(target) not in self.of_targets:
            self.of_targets[id(target)] = _OfTarget(target, np.zeros((3, len(target.offsets))))
        of_target, count = self.of_targets[id(target)], len(target.offsets)
        # Source: torch 2.13 FileSystemReader.read_data gives torch.load the whole record for each item, and narrows;
        # HuggingFaceStorageReader asks safetensors for the slice.
        whole = needed if self.ckpt.is_safetensors else self.ckpt.records.byte_length[records]
        of_target.sums += [np.bincount(reads.box, weights, count) for weights in (needed, whole, None)]
        of_target.pairs.append(reads.box * self.files + self.ckpt.records.file[records])
        of_target.waiting += len(reads.box)
        if of_target.waiting > _MANY:
            of_target.pairs, of_target.waiting = [of_target.distinct_pairs()], 0
        self.touched[records] = True

    def cost(self) -> Cost:
        """The total cost by kind of rank."""
        of_targets = self.of_targets.values()
        kind, first = _kinds([of_target.target for of_target in of_targets], self.world)
        totals, pairs = np.zeros((3, len(first))), []
        for of_target in of_targets:
            of_kind, box = _boxes_of(of_target.target, first)
            totals += [np.bincount(of_kind, sums[box], len(first)) for sums in of_target.sums]
            pairs.append(_joined(of_kind, box, of_target.distinct_pairs(), self.files))
        opened = np.unique(np.concatenate(pairs)) if pairs else np.zeros(0, np.int64)
        files = np.split(opened % self.files, np.searchsorted(opened // self.files, np.arange(1, len(first))))
        needed, read, requests = totals.astype(np.int64)
        return Cost(
            kind,
            needed,
            read,
            requests,
            tuple(files),
            self.ckpt.files.names,
            int(self.ckpt.records.byte_length[self.touched].sum()),
            written(self.ckpt),
        )


def _kinds(targets: list[Target], world: int) -> tuple[IntArray, IntArray]:
    """int64 [world], ranks that want the same boxes of all targets alike; and the first rank of each kind."""
    kind = np.zeros(world, np.int64)
    for target in targets:
        place = np.arange(len(target.rank)) - np.searchsorted(target.rank, target.rank)
        for number in range(int(place.max(initial=-1)) + 1):
            of_rank = np.zeros(world, np.int64)
            chosen = place == number
            of_rank[target.rank[chosen]] = target.box[chosen] + 1
            kind = np.unique(kind * (len(target.offsets) + 1) + of_rank, return_inverse=True)[1].reshape(-1)
    _, first = np.unique(kind, return_index=True)
    return kind, first


def _boxes_of(target: Target, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """(place in `ranks`, box) for each box that one of these ranks wants."""
    low, high = np.searchsorted(target.rank, ranks, "left"), np.searchsorted(target.rank, ranks, "right")
    return np.repeat(np.arange(len(ranks)), high - low), target.box[counted(low, high - low)]


def _joined(kind: IntArray, box: IntArray, pairs: IntArray, files: int) -> IntArray:
    """`kind * files + file` for each file of each box of a kind."""
    of_box = pairs // files
    low, high = np.searchsorted(of_box, box, "left"), np.searchsorted(of_box, box, "right")
    joined: IntArray = np.repeat(kind, high - low) * files + pairs[counted(low, high - low)] % files
    return np.unique(joined)


def written(ckpt: Checkpoint) -> dict[int, int]:
    """Rank that saved -> bytes of its records, where file names contain the rank."""
    ranks = ranks_of_files(ckpt)
    if not len(ckpt.records) or not len(ranks):
        return {}
    sizes = np.bincount(ckpt.records.file, ckpt.records.byte_length, len(ckpt.files))
    bytes_by_rank: Counter[int] = Counter()
    for rank, size in zip(ranks.tolist(), sizes.tolist(), strict=True):
        if rank >= 0:
            bytes_by_rank[rank] += int(size)
    return dict(sorted(bytes_by_rank.items()))


def writer_nodes(ckpt: Checkpoint, count: int) -> IntArray:
    """int64 [files], the node that wrote each file, where so many nodes saved; -1 where its name has no rank."""
    ranks = ranks_of_files(ckpt)
    per_node = -(-(int(ranks.max(initial=0)) + 1) // count)
    return np.where(ranks < 0, -1, ranks // per_node)


def nodes_of(cost: Cost, ckpt: Checkpoint, per_node: int, homes: IntArray | None) -> tuple[NodeReads, ...]:
    """The files that each node must see; `homes` has for each file the node that has it, where not all see all."""
    sizes = ckpt.files.size
    world, nodes = len(cost.kind), []
    for number, low in enumerate(range(0, world, per_node)):
        high = min(low + per_node, world)
        kinds = np.unique(cost.kind[low:high]).tolist()
        rows = np.unique(np.concatenate([cost.files[kind] for kind in kinds]))
        away = rows if homes is None else rows[homes[rows] != number]
        names = {row: cost.names[row] for row in rows.tolist()}
        absent = () if homes is None else tuple(names[row] for row in away.tolist())
        nodes.append(NodeReads((low, high - 1), tuple(names.values()), absent, int(np.maximum(sizes[rows], 0).sum())))
    return tuple(nodes)


def needs_away(target: Target, reads: Reads, files: npt.NDArray[np.int32], homes: IntArray, per_node: int) -> bool:
    """Whether any rank reads a file (int32 [n], of each item) that its node has not."""
    # Each box has a first and a last node that needs it. If they differ, a file on one node is away from the other.
    low, high = np.full(len(target.offsets), np.iinfo(np.int64).max), np.full(len(target.offsets), -1)
    node = target.rank // per_node
    np.minimum.at(low, target.box, node)
    np.maximum.at(high, target.box, node)
    wanted = high[reads.box] >= 0
    at_home = (low[reads.box] == homes[files]) & (high[reads.box] == homes[files])
    return bool((wanted & ~at_home).any())
