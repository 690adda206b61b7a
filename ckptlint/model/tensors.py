"""What is stored: tensors and their chunks, objects, records and files.

Chunks and records are rows of arrays; Python objects for them exist only inside findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from ckptlint.model.files import Names
from ckptlint.model.tiling import Coverage, IntArray, Tiling

RANK_LIMIT = 64
"""More axes than any tensor has."""

KEY_LIMIT = 4096
"""More characters than any key has."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of one tensor; row i is chunk i.

    Attributes:
        tiling: offsets and sizes, shared by all tensors that are cut alike.
        record: int64 [n], row of the chunk's stored bytes in `Checkpoint.records`; -1 when no storage entry exists.

    Source: torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """

    tiling: Tiling
    record: IntArray

    def __len__(self) -> int:
        return len(self.record)


@dataclass(frozen=True, slots=True)
class MalformedChunk:
    """A chunk that fits no table: its offsets and sizes have other lengths than the tensor's shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    record: int


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A stored tensor.

    Attributes:
        fqn: the key, made printable.
        dtype: torch's name without the module (`bfloat16`), or `unknown`.
        global_shape: extent of each axis, in elements, as the metadata gives it.
        chunks: the chunks whose rank fits the shape.
        malformed: the others.
        is_flattened: Megatron-Core <= 0.15 stored an N-D tensor as `[X/x, Y/y, x*y]`.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: ChunkTable
    malformed: tuple[MalformedChunk, ...] = ()
    is_flattened: bool = False

    @property
    def tiling(self) -> Tiling:
        """Where the chunks lie."""
        return self.chunks.tiling

    @property
    def volume(self) -> int:
        """Elements of the global shape."""
        return prod(self.global_shape)

    @property
    def is_representable(self) -> bool:
        """Whether shape and volume fit int64, which torch and the box arithmetic need."""
        shape = self.global_shape
        is_small = len(shape) <= RANK_LIMIT and min(shape, default=0) >= 0 and max(shape, default=0) < 2**62
        return is_small and self.volume < 2**63

    @property
    def is_sound(self) -> bool:
        """Whether the chunks can be compared with the shape at all; False leaves the tensor to GEO002 or SAF003."""
        return self.is_representable and not self.malformed

    @property
    def is_tiled(self) -> bool:
        """Whether each element surely is in one chunk, and no more than one, and no chunk leaves the tensor."""
        return self.is_sound and self.tiling.coverage == Coverage() and not len(self.tiling.outside)


@dataclass(frozen=True, slots=True)
class ShardedObject:
    """One shard of a Megatron-Core ShardedObject, read from its key `{key}/shard_{offset}_{shape}`.

    Attributes:
        fqn: the whole entry name.
        offset, shape: place in the grid of objects, and the grid.
        record: row in `Checkpoint.records`, -1 without a storage entry.

    Source: megatron.core.dist_checkpointing.mapping.ShardedObject.unique_key
    """

    fqn: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    record: int


@dataclass(frozen=True, slots=True, eq=False)
class ObjectTable:
    """The ShardedObjects as columns; row i is one shard, and `table[i]` is a view of it.

    Attributes:
        grids: the distinct pairs of key and shape, in order of first use.
        grid: int32 [m], position in `grids`.
        numbers: int64 [k], the offsets of all shards one after another.
        start: int64 [m + 1], where a shard's offset starts there; the next one's start ends it.
        record: int64 [m], row in `Checkpoint.records`, -1 without a storage entry.
        names: row -> the whole entry name, where it is not spelled as `{key}/shard_{offset}_{shape}`.
    """

    grids: list[tuple[str, tuple[int, ...]]]
    grid: npt.NDArray[np.int32]
    numbers: IntArray
    start: IntArray
    record: IntArray
    names: dict[int, str]

    def __len__(self) -> int:
        return len(self.grid)

    def __getitem__(self, row: int) -> ShardedObject:
        key, shape = self.grids[self.grid[row]]
        offset = tuple(self.numbers[self.start[row] : self.start[row + 1]].tolist())
        fqn = self.names.get(row) or f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
        return ShardedObject(fqn, key, offset, shape, int(self.record[row]))

    def __iter__(self) -> Iterator[ShardedObject]:
        return map(self.__getitem__, range(len(self)))

    @property
    def keys(self) -> dict[str, None]:
        """The distinct keys, in order of first use."""
        return dict.fromkeys(key for key, _ in self.grids)

    def rows_by_grid(self) -> Iterator[tuple[str, tuple[int, ...], IntArray]]:
        """Each pair of key and shape with its rows, ascending."""
        order = np.argsort(self.grid, kind="stable")
        bounds = np.searchsorted(self.grid[order], np.arange(len(self.grids) + 1))
        for number, (key, shape) in enumerate(self.grids):
            yield key, shape, order[bounds[number] : bounds[number + 1]]

    def offsets_of(self, rows: IntArray, axes: int) -> IntArray:
        """int64 [k, axes], the offsets of those of the rows that have so many numbers."""
        start = self.start[rows]
        whole = start[self.start[rows + 1] - start == axes]
        return np.asarray(self.numbers[whole[:, None] + np.arange(axes)])


def empty_objects() -> ObjectTable:
    """A table without rows."""
    none = np.zeros(0, np.int64)
    return ObjectTable([], none.astype(np.int32), none, np.zeros(1, np.int64), none, {})


@dataclass(frozen=True, slots=True)
class ByteObject:
    """A DCP bytes entry that is no ShardedObject (torch BytesStorageMetadata)."""

    fqn: str
    record: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """The storage entries of the metadata as columns; row i is one stored record.

    Attributes:
        fqns: the distinct names, printable, in order of first use.
        fqn: int32 [m], position in `fqns`.
        file: int32 [m], position in `Checkpoint.files`.
        byte_offset: int64 [m], first byte of the record in its file.
        byte_length: int64 [m], bytes of the record, archive framing included.
        transformed: bool [m], whether the bytes went through a stream transform (`stream.zstd/1`).
        owned: bool [m], whether a chunk, object or bytes entry refers to the record.
        unreferenced: row -> the offsets it is filed under (None for bytes), for the rows that nothing refers to.
        copies: row -> dtype and shape, for those of them that hold a key which another file holds too.

    Source: torch.distributed.checkpoint.filesystem._StorageInfo, torch.distributed.checkpoint.metadata.MetadataIndex
    """

    fqns: Names
    fqn: npt.NDArray[np.int32]
    file: npt.NDArray[np.int32]
    byte_offset: IntArray
    byte_length: IntArray
    transformed: npt.NDArray[np.bool_]
    owned: npt.NDArray[np.bool_]
    unreferenced: dict[int, tuple[int, ...] | None]
    copies: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fqn)

    def name(self, row: int) -> str:
        """The entry name of a record."""
        return self.fqns[int(self.fqn[row])]


def empty_records() -> RecordTable:
    """A table without rows."""
    small, wide, flags = (np.zeros(0, kind) for kind in (np.int32, np.int64, bool))
    return RecordTable(Names.of(()), small, small, wide, wide, flags, flags, {})
