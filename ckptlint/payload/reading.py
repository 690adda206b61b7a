"""Options for reading the payload."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, Reference
from ckptlint.model.tiling import IntArray
from ckptlint.seals.row_hashes import RowHashes, can_be_rounded
from ckptlint.vocabulary.dtypes import ITEM_BITS


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read the payload, at depth `headers` or `data`, with so many threads, one file each.

    Attributes:
        percent: share of the records to read, None for all; seed: of the random choice.
        draws: whether records are opened only to draw numbers from some, which `wanted` then names.
        wanted: int64 [k], rows of `Checkpoint.records` to read; None for all.
        digests: key -> dtypes in which a digest of the tensor's values is wanted, at depth `data`.
        salt: of the hashes that these digests are of.
        rows: keys that also need row hashes besides their digest.
        sums: file -> its checksum as `integrity.recorded_sums` has them, from a list of the user; None without one.
        hashes_only: look at nothing but hashes of tensors and the checksums that are recorded.
    """

    depth: Depth
    jobs: int
    percent: float | None = None
    seed: int = 0
    draws: bool = False
    wanted: IntArray | None = None
    digests: Mapping[str, Collection[str]] = field(default_factory=dict)
    salt: int = 0
    rows: Collection[str] = ()
    sums: Mapping[str, str] | None = None
    hashes_only: bool = False

    @property
    def reads_whole(self) -> bool:
        """Whether every byte of each file is read."""
        return self.depth.reads_all and self.percent is None


def with_reference(how: ReadOptions, reference: Reference | None) -> ReadOptions:
    """Options that compute the digests a reference has."""
    if reference is None or not reference.values or how.percent is not None or not how.depth.reads_all:
        return how
    digests = {fqn: [*dtypes] for fqn, dtypes in reference.values.items()}
    return replace(how, digests=digests, salt=reference.salt, rows=reference.rows.keys())


def default_reading(depth: Depth, percent: float | None = None, seed: int | None = None) -> ReadOptions:
    """A reading with a thread per processor, 8 at most, and a seed of its own when none is given."""
    jobs = min(8, os.cpu_count() or 1)
    drawn = int.from_bytes(os.urandom(4)) >> 1  # as `secrets` would, which imports much
    return ReadOptions(depth, jobs, percent, drawn if seed is None else seed)


def hashes_of(ckpt: Checkpoint, how: ReadOptions) -> dict[str, tuple[RowHashes, ...]]:
    """Key -> collectors of row hashes for tensors that need a digest, in all dtypes they can be rounded to."""
    collectors = {}
    for fqn, dtypes in how.digests.items():
        tensor = ckpt.tensors.get(fqn)
        if tensor is not None and tensor.is_tiled and ITEM_BITS.get(tensor.dtype, 4) % 8 == 0:
            fitting = [d for d in dtypes if d == tensor.dtype or can_be_rounded(tensor.dtype, d)]
            collectors[fqn] = tuple(RowHashes(tensor.global_shape, dtype, how.salt, False) for dtype in fitting)
    return collectors
