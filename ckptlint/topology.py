"""The sizes of the parallel axes, each with where it was read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptlint.model import AxisSize, CommonState, ShardedObject, WriterTable

_DECLARED = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
    "world": "world_size",
}


def read_topology(
    common: CommonState | None, objects: Iterable[ShardedObject], writers: WriterTable | None
) -> dict[str, AxisSize]:
    """Axis -> size and source; what the metadata itself counts (`metadata`) beats what the arguments declare (`args`).

    Source:
        names of megatron.training.arguments (0.19); `rng_state` has the shape (PP, TP); `all_local_plans` has one plan
        per rank; `rerun_state_machine_state` one object per rank.
    """
    sizes: dict[str, AxisSize] = {}
    arguments = attributes(common.values.get("args")) if common else {}
    for axis, name in _DECLARED.items():
        value = arguments.get(name)
        if isinstance(value, int) and value > 0:
            sizes[axis] = AxisSize(value, "args")
    for obj in objects:
        if obj.key == "rng_state" and len(obj.shape) == 2:
            sizes["pp"] = AxisSize(obj.shape[0], "metadata")
            sizes["tp"] = AxisSize(obj.shape[1], "metadata")
        elif obj.key == "rerun_state_machine_state" and len(obj.shape) == 1:
            sizes["world"] = AxisSize(obj.shape[0], "metadata")
    if writers is not None:
        sizes["world"] = AxisSize(writers.world_size, "metadata")
    return sizes


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of an inert object (argparse.Namespace), or the dict itself."""
    state = getattr(node, "state", node)
    return {k: v for k, v in state.items() if isinstance(k, str)} if isinstance(state, dict) else {}


def axes_of_size(topology: dict[str, AxisSize], size: int) -> list[str]:
    """Names of the axes that have this size, world excepted, in the order tp, pp, cp, ep, etp, dp."""
    return [axis for axis in _DECLARED if axis != "world" and axis in topology and topology[axis].size == size]
