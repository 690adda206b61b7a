"""Which part of a tensor a rank holds, from its placements on a device mesh; pure Python, without torch.

Each dim of the tensor carries the runs of global indices that lie on this rank, in the order in which they lie there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Run = tuple[int, int]
"""A half-open range [start, stop) of indices of one dim."""
Runs = tuple[Run, ...]


def runs(
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    order: Iterable[int] | None = None,
) -> tuple[Runs, ...]:
    """Per dim the runs that the rank at this coordinate of the mesh holds; () where it holds nothing.

    A placement with a `dim` shards that dim, one with a `split_factor` too does so strided; any other does not shard.
    Raises IndexError where it shards a dim that the shape does not have.

    Args:
        shape: the global shape, in elements.
        placements: one per mesh dim.
        order: mesh dims in the order in which they cut; left to right by default.

    Source: torch 2.13 torch.distributed.tensor._utils._compute_local_shape_and_global_offset; the pieces are those of
    Shard.local_shard_size_and_offset and _StridedShard.local_shard_size_and_offset.
    """
    runs_by_dim: list[Runs] = [((0, size),) if size else () for size in shape]
    for mesh_dim in range(len(placements)) if order is None else order:
        placement = placements[mesh_dim]
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        pieces, place = mesh_shape[mesh_dim], coordinate[mesh_dim]
        whole, split = (0, _length(runs_by_dim[dim])), getattr(placement, "split_factor", None) or 1
        kept = [_take(runs_by_dim[dim], _piece(_piece(whole, split, i), pieces, place)) for i in range(split)]
        runs_by_dim[dim] = _joined(run for some in kept for run in some)
    return tuple(runs_by_dim)


def bounding_box(runs_by_dim: Sequence[Runs], shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes that torch gives to the runs of each dim: the first index, or the end of an empty dim."""
    offsets = tuple(dim_runs[0][0] if dim_runs else size for dim_runs, size in zip(runs_by_dim, shape, strict=True))
    return offsets, tuple(_length(dim_runs) for dim_runs in runs_by_dim)


def _piece(whole: Run, pieces: int, place: int) -> Run:
    """The piece of a range at a place: pieces of one size, rounded up, the last ones short or empty."""
    start, stop = whole
    size = -(-(stop - start) // pieces)
    return min(stop, start + size * place), min(stop, start + size * (place + 1))


def _take(runs: Runs, piece: Run) -> Runs:
    """The runs at the positions of `piece` in the concatenation of `runs`."""
    taken: list[Run] = []
    position = 0
    for start, stop in runs:
        first, last = max(piece[0] - position, 0), min(piece[1] - position, stop - start)
        if first < last:
            taken.append((start + first, start + last))
        position += stop - start
    return tuple(taken)


def _joined(runs: Iterable[Run]) -> Runs:
    """The runs, neighbours that touch as one."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)
