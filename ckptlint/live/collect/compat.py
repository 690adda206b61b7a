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
from functools import cache
from operator import attrgetter
from typing import Any

import torch

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

_STRIDED = _VERSION >= (2, 13)
"""Whether a _StridedShard cuts as `layout.runs` does; before torch 2.13 it stood for an order of mesh dims."""


def is_known(placement: Any) -> bool:
    """Whether `layout.runs` knows what this placement of a DTensor means in this version of torch."""
    if placement.is_replicate() or placement.is_partial():
        return True
    return hasattr(placement, "dim") and (_STRIDED or not hasattr(placement, "split_factor"))


def is_fixed(placement: Any) -> bool:
    """Whether a placement is one of torch's own and no pending sum: such never change, and equal ones cut alike."""
    is_own = type(placement).__module__.startswith("torch.distributed.")
    return is_own and is_known(placement) and not placement.is_partial()


@cache
def is_dtensor(kind: type) -> bool:
    """Whether all objects of a class are DTensors, which have slots for these attributes."""
    return issubclass(kind, torch.Tensor) and all(hasattr(kind, name) for name in ("_local_tensor", "_spec"))


_ORDER = ("_spec.shard_order",) if _VERSION >= (2, 10) else ()

spec_of = attrgetter(
    "_spec.placements", "_spec.tensor_meta.shape", "_local_tensor.shape", "_local_tensor.dtype", *_ORDER
)
"""What a DTensor says of where it lies, but for its mesh."""


def place_in(mesh: Any) -> tuple[Any, ...]:
    """The mesh, its shape, the place of this rank (None outside), and the order of its dims where it declares one."""
    coordinate, order = mesh.get_coordinate(), getattr(mesh, "_shard_order", None)
    shape = tuple(mesh.shape)
    return mesh, shape, None if coordinate is None else tuple(coordinate), None if order is None else tuple(order)


def shard_order(spec: Any) -> tuple[int, ...] | None:
    """The mesh dims in the order in which they cut, where the DTensor's spec or mesh says it; None: left to right."""
    declared: Sequence[int] | None = getattr(spec.mesh, "_shard_order", None)
    if declared is None:
        entries = getattr(spec, "shard_order", None) or ()
        declared = [mesh_dim for entry in entries for mesh_dim in entry.mesh_dims]
    order = tuple(mesh_dim for mesh_dim in declared if hasattr(spec.placements[mesh_dim], "dim"))
    return None if order == tuple(sorted(order)) else order
