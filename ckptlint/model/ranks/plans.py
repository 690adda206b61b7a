"""What every rank planned to write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptlint.model.tiling import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SavePlans:
    """What every rank planned to write, before deduplication; row i is one planned item.

    Advisory: a save from cached metadata repeats an older plan.

    Attributes:
        world_size: number of plans.
        fqns: the distinct names, printable.
        fqn: int32 [m], position in `fqns`.
        rank: int32 [m], the saving rank.
        is_bytes: bool [m], a bytes entry, without offsets.
        offsets: int64 [m, d], padded with -1 after the tensor's rank.
        sizes: int64 [m, d], likewise.
        dtypes: the distinct dtypes; dtype: int16 [m], position in it, -1 for bytes.
        global_shape: int64 [m, d], likewise padded.

    Source: `all_local_plans`, megatron.core.dist_checkpointing.strategies.state_dict_saver (>= 0.11) and NVRx
    """

    world_size: int
    fqns: list[str]
    fqn: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    is_bytes: npt.NDArray[np.bool_]
    offsets: IntArray
    sizes: IntArray
    dtypes: list[str]
    dtype: npt.NDArray[np.int16]
    global_shape: IntArray

    def __len__(self) -> int:
        return len(self.fqn)
