"""The chunk graph of one tensor per mesh axis: it explains findings, and gives no verdicts.

Nodes are the distinct intervals [start, stop) that live chunks occupy on the axis; an edge joins an interval to the
one that starts where it ends. A healthy axis is one path from 0 to the global size; a missing link is a gap. A hole at
one crossing of two healthy axes leaves both paths whole, which is why verdicts come from `model.tiling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.text import numbered, ranges, verb
from ckptlint.model.tiling import Box, IntArray, Tiling, distinct
from ckptlint.vocabulary.mesh import axes_of_size

if TYPE_CHECKING:
    import networkx as nx

_PLACE_LIMIT = 65536


@dataclass(frozen=True, slots=True, eq=False)
class AxisSlots:
    """The places of one axis: the intervals on its path, and where links are missing the ones that would fill them.

    Attributes:
        starts, stops: int64 [n], the interval [start, stop) of every place, in order; together they tile the axis.
        is_absent: bool [n], the places that no chunk occupies.
    """

    axis: int
    starts: IntArray
    stops: IntArray
    is_absent: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.starts)

    def inside(self, start: int, stop: int) -> list[int]:
        """Positions of the places that lie within [start, stop)."""
        return np.flatnonzero((self.starts >= start) & (self.stops <= stop)).tolist()


@fact
def axis_graph(tiling: Tiling, axis: int) -> nx.DiGraph[tuple[int, int]]:
    """The chunk graph of one axis; node attribute `rows` lists the chunks on each interval."""
    import networkx as nx

    graph: nx.DiGraph[tuple[int, int]] = nx.DiGraph(axis=axis, size=tiling.shape[axis])
    starts = tiling.offsets[:, axis]
    stops = starts + tiling.sizes[:, axis]
    rows = np.flatnonzero(tiling.live).tolist()
    by_node = grouped(((int(starts[row]), int(stops[row])), row) for row in rows)
    graph.add_nodes_from((node, {"rows": rows}) for node, rows in by_node.items())
    by_start = grouped((node[0], node) for node in by_node)
    graph.add_edges_from((node, follower) for node in by_node for follower in by_start.get(node[1], ()))
    return graph


@fact
def axis_slots(tiling: Tiling, axis: int) -> AxisSlots | None:
    """The places of an axis, or None when its intervals overlap, so that no one path exists.

    A gap counts as so many places as the most common interval length fits into it, as one otherwise.
    """
    size = tiling.shape[axis]
    starts, stops = tiling.intervals(axis).T
    is_outside = len(starts) and (starts[0] < 0 or stops[-1] > size)
    if len(starts) > _PLACE_LIMIT or (stops[:-1] > starts[1:]).any() or is_outside:
        return None
    lengths, counts = np.unique(stops - starts, return_counts=True)
    usual = int(lengths[counts.argmax()]) if len(lengths) else size
    lows, highs = np.append(0, stops), np.append(starts, size)
    places = []
    for gap in np.flatnonzero(lows < highs).tolist():
        low, high = int(lows[gap]), int(highs[gap])
        step = usual if (high - low) % usual == 0 else high - low
        if (high - low) // step + len(starts) > _PLACE_LIMIT:
            return None
        places.append(np.arange(low, high, step))
        places.append(np.append(places[-1][1:], high))
    absent, ends = (np.concatenate([np.zeros(0, np.int64), *places[i::2]]) for i in range(2))
    starts, stops = np.concatenate([starts, absent]), np.concatenate([stops, ends])
    order = np.argsort(starts, kind="stable")
    return AxisSlots(axis, starts[order], stops[order], order >= len(starts) - len(absent))


def coordinates(tiling: Tiling, region: Box) -> dict[int, tuple[AxisSlots, list[int]]]:
    """Axis -> its places and the positions the region takes, for each axis that is cut; {} when none is known."""
    places = {}
    for axis, (start, stop) in enumerate(zip(region.offsets, region.ends, strict=True)):
        if len(distinct(tiling.offsets[tiling.live, axis])) < 2 and (start, stop) == (0, tiling.shape[axis]):
            continue
        slots = axis_slots(tiling, axis)
        if slots is not None and (inside := slots.inside(start, stop)):
            places[axis] = slots, inside
    return places


def place_on_mesh(tiling: Tiling, region: Box) -> str:
    """A missing region by its places on the mesh, whatever the size of the tensor: what findings of one cause share."""
    places = coordinates(tiling, region)
    return ", ".join(f"dim {axis}: {ranges(inside)} of {len(slots)}" for axis, (slots, inside) in places.items())


def axis_name(ckpt: Checkpoint, axis: int, count: int) -> str:
    """`dim 0`, with the mesh axis in brackets when exactly one has as many places."""
    names = axes_of_size(ckpt.topology, count) if count > 1 else []
    return f"dim {axis} ({names[0]})" if len(names) == 1 else f"dim {axis}"


def mesh_note(ckpt: Checkpoint, tensor: Tensor, region: Box) -> str:
    """Which shard of which axis a missing region is, in one sentence; "" when the axes have no plain path."""
    clauses, crossing = list[str](), list[str]()
    for axis, (slots, inside) in coordinates(tensor.tiling, region).items():
        count = len(slots)
        if count == 1:
            continue
        # stacked layers or experts, each stored by itself, are no mesh axis
        name = axis_name(ckpt, axis, count) if count < tensor.global_shape[axis] else f"dim {axis}"
        lengths = distinct(slots.stops - slots.starts)
        of = f" of size {lengths[0]:,}" if len(lengths) == 1 else ""
        shards = numbered("shard", inside)
        if slots.is_absent[inside].all():
            clauses.append(f"{name} is split into {count} shards{of}; {shards} {verb(len(inside), 'is')} missing")
        elif len(inside) < count:
            crossing.append(f"{shards} of {count} on {name}")
    if crossing and not clauses:
        clauses.append("no dim lacks a shard; what is missing is " + " x ".join(crossing))
    elif crossing:
        clauses.append("at " + " x ".join(crossing))
    return "; ".join(clauses)
