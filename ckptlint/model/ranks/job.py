"""What the ranks of a running job hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.tiling import IntArray


class RankFinding(NamedTuple):
    """What a rank of a running job found in its own state, or what came of comparing it with the others.

    Attributes:
        rank: who found it; -1 for all.
        fqn: the key concerned, printable; "" for none.
        code: the rule whose finding it is.
        text: one sentence, `{of}` as in a finding.
        level: its severity where the evidence is weaker than the rule's own.
        voids: what says nothing because of it: the chunks of the key, or the whole check.
    """

    rank: int
    fqn: str
    code: str
    text: str
    level: Literal["", "info", "warning"] = ""
    voids: Literal["", "chunks", "check"] = ""


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """What the ranks of a running job hold under the keys that were compared; row i is one chunk or object of one rank.

    Attributes:
        keys: how many keys there are in all, 0 when not known; the table holds the suspicious ones alone.
        fqns: the distinct names, printable.
        fqn: int32 [m], position in `fqns`.
        rank: int32 [m], the holding rank.
        is_object: bool [m], a value that is no tensor, or a shard of a ShardedObject.
        dtypes: the distinct dtypes; dtype: int16 [m], position in it, -1 for objects.
        ndim: int8 [m], number of axes; 1 for a plain object.
        offsets: int64 [m, d], padded with 0 after `ndim`.
        sizes: int64 [m, d], padded with 1.
        global_shape: int64 [m, d], padded with 1.
        replica: int64 [m], 0 the copy that is written, n > 0 a further one, -1 nobody declared who writes.
        copies: int32 [m], how many ranks hold the chunk by its placements; 0 when they do not say.
        strict: bool [m], whether the writer's rules allow one owner only (Megatron-Core).
        digest: int64 [m], of the contents; 0 when they were not compared.
        view: int64 [m], hash of the rank's own view of all shards (FSDP1); 0 for none.
        findings: of single ranks, and what came of comparing them.
        differences: (key, chunk as text) -> where its copies differ first, and their values there, in words.
        alike: key -> further keys that its ranks hold just so, which have no rows: what is true of it is true of them.
    """

    world_size: int
    keys: int
    fqns: list[str]
    fqn: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    is_object: npt.NDArray[np.bool_]
    dtypes: list[str]
    dtype: npt.NDArray[np.int16]
    ndim: npt.NDArray[np.int8]
    offsets: IntArray
    sizes: IntArray
    global_shape: IntArray
    replica: IntArray
    copies: npt.NDArray[np.int32]
    strict: npt.NDArray[np.bool_]
    digest: IntArray
    view: IntArray
    findings: tuple[RankFinding, ...] = ()
    differences: Mapping[tuple[str, str], str] = field(default_factory=dict)
    alike: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fqn)
