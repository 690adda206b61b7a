"""The common state from where a writer put it: `common.pt`, a `common_state` object, or entries of their own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.loaders.problems import from_error, from_refusals
from ckptlint.model import CommonState, Problem
from ckptlint.records import MEMBER_LIMIT, read_pickle_member
from ckptlint.storage import Folder
from ckptlint.unpickle import Unpickled, read_state

COMMON_FILE = "common.pt"
COMMON_ENTRY = "common_state/shard_0_1"
OWN_ENTRIES = ("args", "checkpoint_version", "iteration")

Location = tuple[str, int, int]
"""Raw file path, byte offset and byte length of a record."""


def read_common(folder: Folder, entries: dict[str, Location]) -> tuple[CommonState | None, list[Problem]]:
    """The common state, and what stood in the way of reading it.

    Args:
        folder: the checkpoint.
        entries: where the records lie that may hold common state, by entry name.

    Source:
        megatron.core.dist_checkpointing.strategies.common (<= 0.18: `common.pt`; 0.19: one ShardedObject holding a
        list of one dict); megatron.training.checkpointing for fsdp_dtensor and torch_dcp (one entry per value).
    """
    if folder.has(COMMON_FILE):
        with folder.open(COMMON_FILE) as file:
            return _decoded(COMMON_FILE, lambda: read_pickle_member(file))
    if COMMON_ENTRY in entries:
        return _decoded(COMMON_ENTRY, lambda: _record(folder, entries[COMMON_ENTRY]))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in OWN_ENTRIES:
        if name in entries:
            common, found = _decoded(name, lambda name=name: _record(folder, entries[name]), name)  # type: ignore[misc]
            problems += found
            if common is not None:
                values |= common.values
    return (CommonState("entries " + ", ".join(values), values) if values else None), problems


def _record(folder: Folder, location: Location) -> bytes:
    path, offset, length = location
    if not 0 < length <= MEMBER_LIMIT or offset < 0:
        raise LimitError(f"has a record that claims {length:,} bytes at {offset:,}")
    if folder.look_at(path)[0] not in ("ok", "link-outside"):
        raise UnreadableError("cannot be read: its payload file is not there")
    return read_pickle_member(io.BytesIO(folder.read_range(path, offset, length)))


def _decoded(
    source: str, read: Callable[[], bytes], key: str | None = None
) -> tuple[CommonState | None, list[Problem]]:
    try:
        unpickled: Unpickled = read_state(read())
    except UnreadableError as error:
        return None, [from_error(error, source)]
    problems = from_refusals(unpickled, source, "data.pkl of ")
    value = unpickled.root
    if isinstance(value, list) and len(value) == 1 and key is None:
        value = value[0]
    if key is not None:
        return CommonState(source, {key: value}), problems
    if isinstance(value, dict):
        return CommonState(source, value), problems
    if not problems:
        problems.append(from_error(UnreadableError("holds no dict of common values"), source))
    return None, problems
