"""Tensors as the pickle of a torch file describes them: plain ones, and one rank's part of a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of a storage from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its pickle describes it.

    Attributes:
        dtype: torch's name, or `unknown`.
        shape, strides: in elements.
        offset: its first element in the storage.
        key: the storage: member `data/<key>` of the archive.
        length: elements of the storage, -1 where the size of an element is not known.
        wrapped: whether it is inside a subclass of torch.Tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    key: str
    length: int
    wrapped: bool = False

    @property
    def extent(self) -> int:
        """Elements of the storage from its first to its last."""
        return extent(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Placement:
    """How one axis of a mesh holds a tensor.

    Attributes:
        kind: `Shard`, `_StridedShard`, `Replicate`, or another name.
        dim: the dimension that is cut, None for none.
        split_factor: of a `_StridedShard`, None elsewhere.
    """

    kind: str
    dim: int | None = None
    split_factor: int | None = None

    def __str__(self) -> str:
        if self.dim is None:
            return self.kind
        factor = "" if self.split_factor is None else f", factor {self.split_factor}"
        return f"{self.kind.lstrip('_')}({self.dim}{factor})"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh.

    Attributes:
        names: of its axes; () where they have none.
        shape: ranks along each axis.
        strides: of each axis in `ranks`.
        ranks: in row-major order; () where they could not be read.
        spans_world: whether these are the ranks of the whole world that the mesh is a part of, not its own alone.
        coordinate: where the writer was on it, None where the file does not say.
        rank: that of the writer in the world, -1 where the file does not say.

    Source: torch.distributed.device_mesh.DeviceMesh: `mesh` (torch 2.4 - 2.9); `_layout` over `_rank_map` (2.13)
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ranks: tuple[int, ...]
    spans_world: bool = False
    coordinate: tuple[int, ...] | None = None
    rank: int = -1

    def __str__(self) -> str:
        axes = zip(self.names or ("?",) * len(self.shape), self.shape, strict=False)
        return "mesh (" + ", ".join(f"{name} {size}" for name, size in axes) + ")"

    def place_of(self, rank: int) -> tuple[int, ...] | None:
        """Where a rank is on it; None where it is not on it."""
        return _place(self.shape, self.strides, self.ranks, rank)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from one on the mesh's own axes alone, itself among them."""
        return _group(self.shape, self.strides, self.ranks, rank)


@cache
def _place(
    shape: tuple[int, ...], strides: tuple[int, ...], ranks: tuple[int, ...], rank: int
) -> tuple[int, ...] | None:
    if rank not in ranks or 0 in strides or 0 in shape:
        return None
    at = ranks.index(rank)
    return tuple(at // stride % size for size, stride in zip(shape, strides, strict=True))


@cache
def _group(shape: tuple[int, ...], strides: tuple[int, ...], ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    if rank not in ranks:
        return (rank,)
    places = {ranks.index(rank)}
    for size, stride in zip(shape, strides, strict=True):
        places = {place - place // stride % size * stride + i * stride for place in places for i in range(size)}
    return tuple(ranks[place] for place in sorted(places) if place < len(ranks))


@dataclass(frozen=True, slots=True)
class StoredDTensor:
    """One rank's part of a DTensor.

    Attributes:
        dtype, shape: of the whole.
        local: what this file holds of it.
        placements: one for each axis of the mesh.
        order: the axes in the order in which they cut it, where the file says one.
    """

    dtype: str
    shape: tuple[int, ...]
    local: StoredTensor
    placements: tuple[Placement, ...]
    mesh: Mesh
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredShards:
    """One rank's shards of a ShardedTensor.

    Attributes:
        dtype, shape: of the whole.
        locals: (offsets, sizes, tensor) of each shard that this file holds.
        tiling: (offsets, sizes, rank) of the shards of all ranks; the rank -1 where it is not said.
        rank: the one that wrote it, -1 where it is not said.
        world: ranks of the process group, 0 where it is not said.
    """

    dtype: str
    shape: tuple[int, ...]
    locals: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredTensor], ...]
    tiling: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    rank: int = -1
    world: int = 0


Stored = StoredTensor | StoredDTensor | StoredShards
