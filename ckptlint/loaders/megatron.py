"""What Megatron-Core adds to a DCP folder: ShardedObjects in key names, every rank's plan, `metadata.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.formats.safe_pickle import Node
from ckptlint.loaders.common_state import COMMON_ENTRY, COMMON_FILE
from ckptlint.loaders.dcp import Description, state_of, states_of
from ckptlint.loaders.problems import from_error
from ckptlint.model import ByteObject, Format, ObjectTable, Problem, SavePlans, empty_objects
from ckptlint.model.layout import COORDINATE_LIMIT, IntArray
from ckptlint.model.text import all_printable, printable
from ckptlint.storage.folder import Folder

CONFIG_FILE = "metadata.json"
_CONFIG_LIMIT = 64 * 1024**2
_DIGITS = 15
_NUMBERS = rf"[0-9]{{1,{_DIGITS}}}(?:\.[0-9]{{1,{_DIGITS}}})*"
_OBJECT = re.compile(rf"([^/]+)/shard_({_NUMBERS})_({_NUMBERS})")
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
    matches = [*map(_OBJECT.fullmatch, entries)]
    others = [ByteObject(fqn, row) for match, (fqn, row) in zip(matches, entries.items(), strict=True) if not match]
    found = [match for match in matches if match]
    if not found:
        return empty_objects(), others
    keys, offsets, shapes = zip(*(match.groups() for match in found), strict=True)
    spelled = {pair: number for number, pair in enumerate(dict.fromkeys(zip(keys, shapes, strict=True)))}
    grids: dict[tuple[str, tuple[int, ...]], int] = {}
    one = [grids.setdefault((key, tuple(map(int, shape.split(".")))), len(grids)) for key, shape in spelled]
    grid = np.array([*map(spelled.__getitem__, zip(keys, shapes, strict=True))], np.int32)
    axes = np.array([offset.count(".") + 1 for offset in offsets], np.int64)
    numbers = np.array(".".join(offsets).split("."), f"U{_DIGITS}").astype(np.int64)
    record = np.array([entries[match.string] for match in found], np.int64)
    odd = {row: match.string for row, match in enumerate(found) if _PADDED.search(match.string)}
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


def read_config(folder: Folder) -> tuple[dict[str, Any] | None, Problem | None]:
    """The content of `metadata.json`, or why it cannot be read; (None, None) where there is none.

    Source:
        megatron.core.dist_checkpointing.core.CheckpointingConfig
    """
    if not folder.has(CONFIG_FILE):
        return None, None
    try:
        config = json.loads(folder.read(CONFIG_FILE, _CONFIG_LIMIT))
    except UnreadableError as error:
        return None, from_error(error, CONFIG_FILE)
    except (ValueError, RecursionError) as error:
        damage = UnreadableError(f"is not JSON ({printable(str(error))})")
        why = "Megatron-Core writes it last and reads it first: without it, it does not recognise the folder"
        return None, from_error(damage, CONFIG_FILE, why=why, hint="copy it from another step of the same job")
    return (config, None) if isinstance(config, dict) else ({}, None)


def dialect(
    described: Description, root_name: str, config: dict[str, Any] | None, folder: Folder, objects: ObjectTable
) -> Format:
    """Which writer's key scheme a folder with readable `.metadata` follows."""
    keys = described.tensors.keys() | described.byte_records.keys()
    if any(key.startswith("optimizer.param_to_group_meta.") for key in keys):
        return "fsdp_dtensor"
    if config and config.get("sharded_backend") == "torch_dist":
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


def missing_marks(
    format_: Format, config: dict[str, Any] | None, config_is_broken: bool, folder: Folder, keys: Collection[str]
) -> list[Problem]:
    """What a finished torch_dist save has and this folder lacks.

    Source:
        megatron.core.dist_checkpointing.serialization.save: `common.pt` first (<= 0.18), `metadata.json` last
    """
    if format_ != "torch_dist":
        return []
    problems = []
    if config is None and not config_is_broken:
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
                hint=f"copy {COMMON_FILE} again from where the checkpoint was written",
            )
        )
    return problems


# ---------------------------------------------------------------- every rank's plan


def read_plans(plans: Any) -> SavePlans | None:
    """Every rank's plan as columns, or None where there are none or they make no sense (they are advisory).

    Source:
        `all_local_plans` of megatron-core >= 0.11: a list by rank of SavePlan or MCoreSavePlan
    """
    if not isinstance(plans, list) or not plans:
        return None
    try:
        listed = [state_of(plan, "SavePlan").get("items") or () for plan in plans]
        states = states_of([*chain.from_iterable(listed)], "WriteItem")
        index = states_of([*map(itemgetter("index"), states)], "MetadataIndex")
        data = [state.get("tensor_data") for state in states]
        is_bytes = np.array([item is None for item in data], bool)
        rows = np.flatnonzero(~is_bytes)
        held = states_of([item for item in data if item is not None], "TensorWriteData")
        chunks = states_of([*map(itemgetter("chunk"), held)], "ChunkStorageMetadata")
        names = [*map(itemgetter("fqn"), index)]
        unique = {name: i for i, name in enumerate(dict.fromkeys(names))}
        dtypes = [_dtype_of(item.get("properties")) for item in held]
        unique_dtypes = {name: i for i, name in enumerate(dict.fromkeys(dtypes))}
        dtype = np.full(len(states), -1, np.int16)
        dtype[rows] = [unique_dtypes[name] for name in dtypes]
        return SavePlans(
            world_size=len(plans),
            fqns=all_printable([*unique]),
            fqn=np.array([*map(unique.__getitem__, names)], np.int32),
            rank=np.repeat(np.arange(len(plans), dtype=np.int32), [*map(len, listed)]),
            is_bytes=is_bytes,
            offsets=_padded([*map(itemgetter("offsets"), chunks)], rows, len(states)),
            sizes=_padded([*map(itemgetter("sizes"), chunks)], rows, len(states)),
            dtypes=all_printable([*unique_dtypes]),
            dtype=dtype,
            global_shape=_padded([*map(itemgetter("size"), held)], rows, len(states)),
        )
    except (UnreadableError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _dtype_of(properties: Any) -> str:
    if type(properties).__base__ is Node and properties and isinstance(properties[0], tuple):
        return str(properties[0][0])
    return "unknown"


def _padded(values: list[tuple[int, ...]], rows: IntArray, count: int) -> IntArray:
    """int64 [count, d], the values in their rows, -1 everywhere else."""
    lengths = np.array([*map(len, values)], np.int64)
    flat = np.fromiter(chain.from_iterable(values), np.int64, int(lengths.sum()))
    if ((flat <= -COORDINATE_LIMIT) | (flat >= COORDINATE_LIMIT)).any():
        raise ValueError("a plan's numbers do not fit")
    table = np.full((count, int(lengths.max(initial=0))), -1, np.int64)
    own = np.repeat(np.cumsum(lengths) - lengths, lengths)
    table[np.repeat(rows, lengths), np.arange(len(flat)) - own] = flat
    return table
