"""The private attributes of torch and Megatron that live mode reads, each with the versions in which it was seen.

| attribute | of | seen in |
|---|---|---|
| `_local_tensor`, `_spec` (`mesh`, `placements`, `tensor_meta.shape`) | torch DTensor | torch 2.13 |
| `_spec.shard_order` | torch DTensor | torch 2.13; since 2.10 |
| `_local_shards` | LocalShardsWrapper of torch, LocalShardsContainer of Megatron-Core | torch 2.13, core 0.15 to 0.19 |
| `_shard_order` | torch DeviceMesh, set by Megatron-FSDP | megatron-core 0.14 to 0.19 |
| `__create_chunk_list__`, `__create_write_items__` | local tensors of Megatron-FSDP | megatron-core 0.14 to 0.19 |
| `_sh_ten` | CheckpointableShardedTensor of Megatron-Core | megatron-core 0.15 to 0.19 |
| `mcore_sh_ten` | torch ShardedTensor made by Megatron-Core | megatron-core 0.10 to 0.19 |
| `flattened_range` | ShardedTensor of Megatron-Core | megatron-core 0.10 to 0.15; refused since |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])

_STRIDED = _VERSION >= (2, 13)
"""Whether a _StridedShard cuts as `vocabulary.placements.runs` does; before torch 2.13 it was an order of mesh dims."""


def is_known(placement: Any) -> bool:
    """Whether `vocabulary.placements.runs` knows what this placement of a DTensor means in this version of torch."""
    if placement.is_replicate() or placement.is_partial():
        return True
    return hasattr(placement, "dim") and (_STRIDED or not hasattr(placement, "split_factor"))


def shard_order(spec: Any) -> tuple[int, ...] | None:
    """The mesh dims in the order in which they cut, where the DTensor's spec or mesh says it; None: left to right."""
    declared: Sequence[int] | None = getattr(spec.mesh, "_shard_order", None)
    if declared is None:
        entries = getattr(spec, "shard_order", None) or ()
        declared = [mesh_dim for entry in entries for mesh_dim in entry.mesh_dims]
    order = tuple(mesh_dim for mesh_dim in declared if hasattr(spec.placements[mesh_dim], "dim"))
    return None if order == tuple(sorted(order)) else order
