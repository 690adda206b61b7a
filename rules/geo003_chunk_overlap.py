"""GEO003: no element is in two chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ckptlint.boxes import Box
from ckptlint.model import Checkpoint, Tensor
from ckptlint.rule import Finding, Note, Severity, rule

_PAIR_LIMIT = 64


@rule("GEO003", "chunk-overlap", Severity.ERROR)
def chunk_overlap(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two chunks of a tensor hold the same elements.

    What it checks:
        No two chunks with different offsets share an element. Empty chunks count for nothing; equal offsets are GEO007.
    Why it matters:
        A load raises nothing and keeps whichever chunk is read last.
    Usual causes:
        Two ranks claim the region because replica_id or the placement lacks a mesh axis, or offsets were computed from
        padded sizes.
    How to fix:
        Correct the placement and save again.
    See:
        torch.distributed.checkpoint.default_planner._validate_global_plan
    """
    for tensor in ckpt.sound_tensors():
        coverage = tensor.layout.coverage
        if not coverage.doubled:
            continue
        pairs = list(_pairs(tensor))
        if not pairs:
            continue
        region, first, second = pairs[0]
        count = f"{len(pairs)}{'+' if len(pairs) >= _PAIR_LIMIT else ''} pairs" if len(pairs) > 1 else "2 chunks"
        verb = f"{count}{{of}} overlap, first in {region}" if len(pairs) > 1 else f"{count}{{of}} both hold {region}"
        yield Finding(
            verb,
            fqn=tensor.fqn,
            tensor=tensor,
            region=region,
            rows=(first, second),
            notes=_sizes(ckpt, tensor, first, second, coverage.doubled_volume),
            hint=_odd_one(ckpt, tensor, first, second),
        )


def _pairs(tensor: Tensor) -> Iterator[tuple[Box, int, int]]:
    """The common part and the two rows of each overlapping pair with different offsets, at most `_PAIR_LIMIT`."""
    seen: set[tuple[int, int]] = set()
    layout = tensor.layout
    whole = Box((0,) * len(layout.shape), layout.shape)
    for region in layout.coverage.doubled:
        for pair in combinations(layout.touching(region)[:_PAIR_LIMIT], 2):
            if len(seen) >= _PAIR_LIMIT:
                return
            first, second = layout.box(pair[0]), layout.box(pair[1])
            common = first.intersect(second)
            if pair not in seen and common is not None and first.offsets != second.offsets:
                seen.add(pair)
                yield common.intersect(whole) or common, *pair


def _sizes(ckpt: Checkpoint, tensor: Tensor, first: int, second: int, volume: int) -> tuple[Note, ...]:
    boxes = " and ".join(
        f"{tensor.layout.box(row)} in {ckpt.chunk_file(tensor, row) or 'no file'}" for row in (first, second)
    )
    return (("chunks", f"{boxes}; {volume:,} elements are held more than once"),)


def _odd_one(ckpt: Checkpoint, tensor: Tensor, *rows: int) -> str:
    """Which of the chunks differs in size from all its peers."""
    sizes = tensor.layout.sizes
    if len(sizes) < 4:
        return ""
    for row in rows:
        same = int((sizes == sizes[row]).all(axis=1).sum())
        others = {tuple(size) for i, size in enumerate(sizes.tolist()) if i != row}
        if same == 1 and len(others) == 1:
            own, peers = list(tensor.layout.box(row).sizes), list(others.pop())
            where = ckpt.chunk_file(tensor, row) or "no file"
            return f"the chunk in {where} has sizes {own}, its {len(sizes) - 1} peers {peers}"
    return ""
