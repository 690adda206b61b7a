"""The axes of the device mesh: their sizes, and what says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptlint.model import AxisSize, Declared, ObjectTable, SavePlans

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "world")


def read_topology(
    declared: Mapping[str, Declared], objects: ObjectTable, writers: SavePlans | None, ranks: Iterable[int] = ()
) -> dict[str, AxisSize]:
    """Axis -> size and source: what the metadata counts (`metadata`) beats what the job declared, guesses come last.

    Of the ranks in payload file names the highest is a lower bound of the world size (`files`).

    Source: `rng_state` has the shape (PP, TP), in Megatron-LM 0.16 (PP, TP, DP x CP) where there is expert parallelism;
    `rerun_state_machine_state` has one object per rank; `all_local_plans` one plan per rank (Megatron-Core)
    """
    sizes: dict[str, AxisSize] = {}
    for axis in AXES:
        item = declared.get(axis)
        if item is not None and isinstance(item.value, int) and 0 < item.value < 2**31 and item.value is not True:
            sizes[axis] = AxisSize(item.value, item.source)
    for key, shape in objects.grids:
        if key == "rng_state" and len(shape) in (2, 3):
            for axis, size in zip(("pp", "tp"), shape, strict=False):
                sizes[axis] = AxisSize(size, "metadata")
        elif key == "rerun_state_machine_state" and len(shape) == 1:
            sizes["world"] = AxisSize(shape[0], "metadata")
    if writers is not None:
        sizes["world"] = AxisSize(writers.world_size, "metadata")
    if "world" not in sizes and (highest := max(ranks, default=-1)) >= 0:
        sizes["world"] = AxisSize(highest + 1, "files")
    if "dp" not in sizes and {"world", "tp", "pp"} <= sizes.keys() and sizes["world"].source != "files":
        model_parallel = sizes["tp"].size * sizes["pp"].size * (sizes["cp"].size if "cp" in sizes else 1)
        if sizes["world"].size % model_parallel == 0:
            sizes["dp"] = AxisSize(sizes["world"].size // model_parallel, "inferred")
    return sizes


def axes_of_size(topology: Mapping[str, AxisSize], size: int) -> list[str]:
    """Names of the axes that have this size, in the order tp, pp, cp, ep, etp, dp; guesses and world left out."""
    of_size = {axis for axis, axis_size in topology.items() if axis_size.size == size > 1} - {"world", "vpp"}
    return [axis for axis in AXES if axis in of_size]
