"""What Megatron-Core adds to a DCP folder: ShardedObjects in key names, every rank's plan, `metadata.json`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ckptlint.errors import LimitError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.problems import from_error
from ckptlint.loaders.readers.common_state import COMMON_ENTRY, COMMON_FILE
from ckptlint.loaders.readers.dcp_metadata import Description
from ckptlint.model import ByteObject, ObjectTable, Problem, empty_objects
from ckptlint.model.facts import fact
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder

CONFIG_FILE = "metadata.json"
_CONFIG_LIMIT = 1024**2
_DIGITS = 15
_NUMBERS = rf"[0-9]{{1,{_DIGITS}}}(?:\.[0-9]{{1,{_DIGITS}}})*"
_OBJECT = re.compile(rf"^(?:([^/\n]+)/shard_({_NUMBERS})_({_NUMBERS})$|.*$)", re.MULTILINE)
_PADDED = re.compile("[._]0[0-9]")  # a number that is not spelled as Python spells it
_DESCRIBING = re.compile(r"(?:^|\.)(?:dp_group_idx_\d+\.optimizer|param_groups|param_state_sharding_type)$")
_DESCRIBING_LIMIT = 64
_GROUP = re.compile(r"dp_group_idx_\d+")
_RUNTIME_KEYS = ("rng_state", "rerun_state_machine_state")


def split_objects(entries: Mapping[str, int]) -> tuple[ObjectTable, list[ByteObject]]:
    """The ShardedObjects among the bytes entries, by their key, and the other entries.

    Args:
        entries: printable name -> row of its record.

    Source:
        megatron.core.dist_checkpointing.mapping.ShardedObject: `{key}/shard_{offset}_{shape}`, numbers joined by "."
    """
    # printable names have no line breaks
    parts = dict(zip(entries, _OBJECT.findall("\n".join(entries)), strict=True)) if entries else {}
    others = [ByteObject(fqn, entries[fqn]) for fqn, (key, _, _) in parts.items() if not key]
    for other in others:
        del parts[other.fqn]
    if not parts:
        return empty_objects(), others
    keys, offsets, shapes = zip(*parts.values(), strict=True)
    spelled = {pair: number for number, pair in enumerate(dict.fromkeys(zip(keys, shapes, strict=True)))}
    grids: dict[tuple[str, tuple[int, ...]], int] = {}
    one = [grids.setdefault((key, tuple(map(int, shape.split(".")))), len(grids)) for key, shape in spelled]
    grid = np.fromiter(map(spelled.__getitem__, zip(keys, shapes, strict=True)), np.int32, len(keys))
    axes = np.fromiter((offset.count(".") + 1 for offset in offsets), np.int64, len(offsets))
    numbers = np.fromiter(map(int, ".".join(offsets).split(".")), np.int64, int(axes.sum()))
    record = np.fromiter(map(entries.__getitem__, parts), np.int64, len(parts))
    is_odd = _PADDED.search("\n".join(parts)) is not None
    odd = {row: fqn for row, fqn in enumerate(parts) if _PADDED.search(fqn)} if is_odd else {}
    return ObjectTable(
        [*grids], np.array(one, np.int32)[grid], numbers, np.append(0, np.cumsum(axes)), record, odd
    ), others


def describing_objects(objects: ObjectTable) -> set[str]:
    """The entries that say how an optimizer module was saved, one of each kind and module.

    Groups of one distributed optimizer (`dp_group_idx_N`) hold the same parameter groups, so one stands for all.
    """
    first: dict[str, str] = {}
    for key, _, rows in objects.rows_by_grid():
        if _DESCRIBING.search(key):
            first.setdefault(_GROUP.sub("dp_group_idx_*", key), objects[int(rows[0])].fqn)
    return set(list(first.values())[:_DESCRIBING_LIMIT])


@fact
def read_config(folder: Folder) -> tuple[dict[str, Any], Problem | None]:
    """The content of `metadata.json`, and why it cannot be read; {} where there is none.

    Source:
        megatron.core.dist_checkpointing.core.CheckpointingConfig
    """
    config, error = read_json(folder, CONFIG_FILE, _CONFIG_LIMIT)
    if error is None:
        return config, None
    if isinstance(error, LimitError):
        return config, from_error(error, CONFIG_FILE)
    why = "Megatron-Core writes it last and reads it first: without it, it does not recognise the folder"
    return config, from_error(error, CONFIG_FILE, why=why, hint="copy it from another step of the same job")


def dialect(
    described: Description, root_name: str, config: dict[str, Any], folder: Folder, objects: ObjectTable
) -> str:
    """Which writer's key scheme a folder with readable `.metadata` follows."""
    keys = described.tensors.keys() | described.byte_records.keys()
    if any(key.startswith("optimizer.param_to_group_meta.") for key in keys):
        return "fsdp_dtensor"
    if config.get("sharded_backend") == "torch_dist":
        return "torch_dist"
    run_entries = {"args", "checkpoint_version"} <= keys
    if run_entries and any(key.startswith("model.module.") for key in keys):
        return "fsdp_dtensor"
    # a user's own common.pt or keys with "/shard_" in them are no mark; NVRx writes plans for any format
    marks = "mcore_data" in described.extras or root_name == "MCoreMetadata" or COMMON_ENTRY in keys
    planned = "all_local_plans" in described.extras
    if marks or any(map(_is_megatron_object, objects.keys)) or (planned and folder.has(COMMON_FILE)):
        return "torch_dist"
    return "torch_dcp" if run_entries and "iteration" in keys else "dcp"


def _is_megatron_object(key: str) -> bool:
    return key in _RUNTIME_KEYS or key.endswith("._extra_state") or ".dp_group_idx_" in key


def missing_marks(format_: str, config: dict[str, Any], folder: Folder, keys: Collection[str]) -> list[Problem]:
    """What a finished torch_dist save has and this folder lacks.

    Source:
        megatron.core.dist_checkpointing.serialization.save: `common.pt` first (<= 0.18), `metadata.json` last
    """
    if format_ != "torch_dist":
        return []
    problems = []
    if not folder.has(CONFIG_FILE):
        problems.append(
            Problem(
                "incomplete",
                CONFIG_FILE,
                f"{CONFIG_FILE} is missing beside the Megatron-Core checkpoint in .metadata",
                why="Megatron-Core writes it last, so the save never finished, or the copy left it out",
                hint="go back to the newest complete step; if you know that all files are there, copy it from another "
                "step of the same job",
            )
        )
    has_common = folder.has(COMMON_FILE) or COMMON_ENTRY in keys or folder.has("train_state.pt")
    if config and not has_common:
        declared = config.get("common_backend")
        says = f"; {CONFIG_FILE} declares the common backend {printable(str(declared))!r}" if declared else ""
        problems.append(
            Problem(
                "incomplete",
                COMMON_FILE,
                f"{COMMON_FILE} is missing, and so is an entry {COMMON_ENTRY}{says}",
                why="it holds arguments, iteration and parameter groups; Megatron-Core cannot load without them",
                hint=f"copy {COMMON_FILE} from where it was written; if it is not there either, the save was killed: "
                "use another step",
            )
        )
    return problems
