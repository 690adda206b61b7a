from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.geometry.writers import saved_by
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import span
from ckptlint.model.tiling import Coverage, Crossing, Tiling
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import role

_SIBLINGS = 3
_MOST = 0.8


@rule("GEO008", "boundary-mismatch", Severity.WARNING)
def boundary_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """Chunks of one tensor divide a dim at different indices.

    What it checks:
        On no dim do the intervals of two chunks cross. None lies strictly inside another either, where at least 80% of
        three or more siblings (the same tensor of other layers) form a plain grid. Tensors with holes, overlaps or
        duplicates are left to GEO001 to GEO007; flattened tensors, whose chunks are contiguous runs or pieces of single
        rows, are allowed.
    Why it matters:
        Ranks disagree where a shared dim is divided, so code that assumes one grid mixes rows. torch accepts the plan,
        since every element is stored once.
    Usual causes:
        Each tensor-parallel rank computed uneven boundaries of its own; one rank has a different bucket layout; the
        shard order was ignored.
    How to fix:
        Derive the offsets of all ranks from one layout, and save again.
    See:
        torch.distributed.tensor.placement_types._StridedShard
    """
    siblings = grouped((role(tensor.fqn), tensor) for tensor in ckpt.sound_tensors())
    for group in siblings.values():
        grids = sum(tensor.tiling.is_grid for tensor in group)
        for tensor in group:
            layout = tensor.tiling
            if len(layout.shape) < 2 or layout.is_grid or tensor.is_flattened or not layout.live.any():
                continue
            if len(layout.outside) or layout.duplicates or layout.coverage != Coverage() or layout.is_row_major:
                continue
            misfits = [misfit for tiles, axis in _by_axis(tensor) for misfit in tiles.crossings if misfit.axis == axis]
            if not misfits and len(group) > _SIBLINGS and grids >= _MOST * (len(group) - 1):
                misfits = tensor.tiling.nestings
            if misfits:
                yield _finding(ckpt, tensor, misfits[0])


def _by_axis(tensor: Tensor) -> Iterator[tuple[Tiling, int]]:
    """(chunks to compare, axis) for each axis, without pieces of single rows if other chunks hold whole rows."""
    # A flat range of a block that starts or ends inside a row leaves pieces that are one long on every axis before the
    # one they are cut on. Axes on which all chunks are one long (stacked layers, experts) say nothing about this.
    layout = tensor.tiling
    lead = np.ones(len(layout.sizes), bool)
    for axis in range(len(layout.shape)):
        keep = ~lead if axis and not lead[layout.live].all() else np.ones(len(lead), bool)
        yield Tiling(layout.shape, layout.offsets[keep], layout.sizes[keep]), axis
        lead &= layout.sizes[:, axis] == 1


def _finding(ckpt: Checkpoint, tensor: Tensor, misfit: Crossing) -> Finding:
    layout, axis, spans = tensor.tiling, misfit.axis, [span(*misfit.first), span(*misfit.second)]
    starts, stops = layout.offsets[:, axis], (layout.offsets + layout.sizes)[:, axis]
    holders = [layout.live & (starts == start) & (stops == stop) for start, stop in (misfit.first, misfit.second)]
    rows = tuple(int(holds.argmax()) for holds in holders)
    places = [f"chunk {layout.box(row)} in {ckpt.chunk_file(tensor, row)}" for row in rows]
    return Finding(
        f"no data is missing, but the ranks disagree where dim {axis}{{of}} is cut: {spans[0]} against {spans[1]}",
        at=Location(tensor, region=layout.box(rows[1]), rows=rows, ranks=saved_by(ckpt, tensor, rows)),
        notes=tuple(("cut", f"{cut} by {place}") for cut, place in zip(spans, places, strict=True)),
        hint="check that the ranks that wrote these files agree on the shard order",
    )
