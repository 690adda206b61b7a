"""What Megatron-Core adds to a DCP folder: ShardedObjects in key names, every rank's plan, `metadata.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ckptlint.errors import LimitError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.problems import from_error
from ckptlint.loaders.readers.common_state import COMMON_ENTRY, COMMON_FILE
from ckptlint.loaders.readers.dcp.metadata import Description
from ckptlint.model import ByteObject, ObjectTable, Problem, empty_objects
from ckptlint.model.facts import fact
from ckptlint.model.text import printable
from ckptlint.model.tiling import IntArray
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder

CONFIG_FILE = "metadata.json"
_CONFIG_LIMIT = 1024**2
_DIGITS = 15
_NUMBERS = rf"[0-9]{{1,{_DIGITS}}}(?:\.[0-9]{{1,{_DIGITS}}})*"
_MARK = "/shard_"
_OBJECT = lazy_pattern(rf"[^/\n]+{_MARK}{_NUMBERS}_{_NUMBERS}")
_AS_SPACES = bytes.maketrans(b"._\n", b"   ")
_PADDED = lazy_pattern("[._]0[0-9]")  # a number that is not spelled as Python spells it
_DESCRIBING = lazy_pattern(r"(?:^|\.)(?:dp_group_idx_\d+\.optimizer|param_groups|param_state_sharding_type)$")
_DESCRIBING_LIMIT = 64
_GROUP = lazy_pattern(r"dp_group_idx_\d+")
_RUNTIME_KEYS = ("rng_state", "rerun_state_machine_state")


def split_objects(entries: Mapping[str, int]) -> tuple[ObjectTable, list[ByteObject]]:
    """The ShardedObjects among the bytes entries (printable name -> row of its record) by their key, and other entries.

    Source: megatron.core.dist_checkpointing.mapping.ShardedObject: `{key}/shard_{offset}_{shape}`, numbers joined by
    "."
    """
    marked = [fqn for fqn in entries if _MARK in fqn]
    places = _places(marked)
    if places is None:  # there is none, or a name only looks like one
        marked = [*filter(_OBJECT.fullmatch, marked)]
        places = _places(marked)
    rows = entries if len(marked) == len(entries) else {fqn: entries[fqn] for fqn in marked}
    others = [ByteObject(fqn, row) for fqn, row in entries.items() if fqn not in rows] if rows is not entries else []
    if places is None:
        return empty_objects(), others
    numbers, start, is_padded = places
    grids: dict[tuple[str, tuple[int, ...]], int] = {}
    grid, number, before, behind = [], 0, "\n", ""
    for fqn in marked:
        if not fqn.startswith(before) or not fqn.endswith(behind):  # mostly it has the grid of the one before it
            key, shape = fqn.partition(_MARK)[0], fqn.rpartition("_")[2]
            number = grids.setdefault((key, tuple(map(int, shape.split(".")))), len(grids))
            before, behind = f"{key}/", f"_{shape}"
        grid.append(number)
    record = np.fromiter(rows.values(), np.int64, len(rows))
    odd = {row: fqn for row, fqn in enumerate(marked) if _PADDED.search(fqn)} if is_padded else {}
    return ObjectTable([*grids], np.array(grid, np.int32), numbers, start, record, odd), others


def _places(names: list[str]) -> tuple[IntArray, IntArray, bool] | None:
    """Numbers and starts of an `ObjectTable`, and whether one is padded; None for no names, or one of another form."""
    text = "\n".join((*names, "")).encode()  # printable names have no line breaks, and a key has no slash
    byte = np.frombuffer(text, np.uint8)
    ends, slash = (np.flatnonzero(byte == ord(mark)) for mark in "\n/")
    if not names or len(slash) != len(ends) or ((slash <= np.append(0, ends[:-1] + 1)) | (slash > ends)).any():
        return None
    length = ends + 1 - slash
    behind = np.cumsum(length)
    whole = byte[np.repeat(slash - behind + length, length) + np.arange(behind[-1])].tobytes()
    numbered = whole.replace(_MARK.encode(), b"")
    if len(whole) - len(numbered) != len(_MARK) * len(names):
        return None
    byte = np.frombuffer(numbered, np.uint8)
    at = np.flatnonzero((byte < ord("0")) | (byte > ord("9")))  # what stands behind each number
    digits = np.diff(at, prepend=-1) - 1
    separator = byte[at]
    is_last = separator != ord(".")  # of an offset or a shape
    if not ((digits > 0) & (digits <= _DIGITS)).all() or separator[is_last].tobytes() != b"_\n" * len(names):
        return None
    numbers = np.fromstring(numbered.translate(_AS_SPACES), np.int64, sep=" ")
    in_offset = (np.cumsum(is_last) - is_last) % 2 == 0
    start = np.append(0, np.flatnonzero(is_last[in_offset]) + 1)
    return numbers[in_offset], start, bool((numbers < 10 ** (digits - 1))[digits > 1].any())


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

    Source: megatron.core.dist_checkpointing.core.CheckpointingConfig
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
    every = "\n".join(("", *described.tensors, *described.byte_records, ""))

    def has(*keys: str) -> bool:
        return all(f"\n{key}\n" in every for key in keys)

    if "\noptimizer.param_to_group_meta." in every:
        return "fsdp_dtensor"
    if config.get("sharded_backend") == "torch_dist":
        return "torch_dist"
    run_entries = has("args", "checkpoint_version")
    if run_entries and "\nmodel.module." in every:
        return "fsdp_dtensor"
    # a user's own common.pt or keys with "/shard_" in them are no mark; NVRx writes plans for any format
    marks = "mcore_data" in described.extras or root_name == "MCoreMetadata" or has(COMMON_ENTRY)
    planned = "all_local_plans" in described.extras
    marks = marks or (planned and folder.has(COMMON_FILE))
    if marks or any(k in _RUNTIME_KEYS or k.endswith("._extra_state") or ".dp_group_idx_" in k for k in objects.keys):
        return "torch_dist"
    return "torch_dcp" if run_entries and has("iteration") else "dcp"


def missing_marks(format_: str, config: dict[str, Any], folder: Folder, keys: Collection[str]) -> list[Problem]:
    """What a finished torch_dist save has and this folder lacks.

    Source: megatron.core.dist_checkpointing.serialization.save: `common.pt` first (<= 0.18), `metadata.json` last
    """
    if format_ != "torch_dist":
        return []
    problems = []
    if not folder.has(CONFIG_FILE):
        sentence = f"{CONFIG_FILE} is missing beside the Megatron-Core checkpoint in .metadata"
        why = "Megatron-Core writes it last, so the save never finished, or the copy left it out"
        copied = "if you know that all files are there, copy it from another step of the same job"
        hint = f"go back to the newest complete step; {copied}"
        problems.append(Problem("incomplete", CONFIG_FILE, sentence, why=why, hint=hint))
    has_common = folder.has(COMMON_FILE) or COMMON_ENTRY in keys or folder.has("train_state.pt")
    if config and not has_common:
        declared = config.get("common_backend")
        says = f"; {CONFIG_FILE} declares the common backend {printable(str(declared))!r}" if declared else ""
        sentence = f"{COMMON_FILE} is missing, and so is an entry {COMMON_ENTRY}{says}"
        why = "it holds arguments, iteration and parameter groups; Megatron-Core cannot load without them"
        killed = "if it is not there either, the save was killed: use another step"
        hint = f"copy {COMMON_FILE} from where it was written; {killed}"
        problems.append(Problem("incomplete", COMMON_FILE, sentence, why=why, hint=hint))
    return problems
