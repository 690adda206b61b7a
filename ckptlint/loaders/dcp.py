"""From the unpickled `.metadata` (or all `__N.metadata`) of torch.distributed.checkpoint to columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from ckptlint.boxes import COORDINATE_LIMIT, IntArray, Layout
from ckptlint.errors import UnreadableError
from ckptlint.model import RANK_LIMIT, ByteObject, ChunkTable, MalformedChunk, Problem, RecordTable, Tensor, printable
from ckptlint.unpickle import Node, Opaque

KEY_LIMIT = 4096
_PRINTABLE = 10**100

_first = itemgetter(0)


@dataclass(slots=True)
class Description:
    """What the metadata says, before anything else in the folder was looked at.

    Attributes:
        paths: raw relative path of each payload file, in the order of `RecordTable.file`.
        extras: attributes of the root that are not torch's own (`all_local_plans`, `mcore_data`).
        has_offset: bool [m], the records that hold a chunk, not a bytes entry.
    """

    tensors: dict[str, Tensor]
    byte_objects: list[ByteObject]
    records: RecordTable
    has_offset: Any
    paths: list[str]
    extras: dict[str, Any]
    storage_meta: Any
    version: str | None
    planner_data: Any
    problems: list[Problem] = field(default_factory=list)


def state_of(node: Any, kind: str) -> dict[str, Any]:
    """The attributes of a stand-in of the given class; empty where pickle dropped an empty state.

    Raises:
        UnreadableError: it is something else.
    """
    if not _is_node(node, kind) or len(node) > 1:
        raise UnreadableError(f"has {_name_of(node)} where a {kind} was expected")
    state = node[0] if node else {}
    if not isinstance(state, dict):
        raise UnreadableError(f"has a {kind} with {_name_of(state)} instead of attributes")
    return state


def _is_node(node: Any, kind: str) -> bool:
    return type(node).__base__ is Node and node.kind == kind


def states_of(nodes: Sequence[Any], kind: str) -> list[dict[str, Any]]:
    """`state_of` for many stand-ins; a million well-formed ones are taken apart without a Python loop."""
    if len(set(map(type, nodes))) == 1 and _is_node(nodes[0], kind) and set(map(len, nodes)) == {1}:
        states = list(map(_first, nodes))
        if set(map(type, states)) == {dict}:
            return states
    return [state_of(node, kind) for node in nodes]


def describe(roots: Sequence[Any], file: str = ".metadata") -> Description:
    """Columns for everything the metadata describes.

    Args:
        roots: the unpickled root of `.metadata`, or those of all `__N.metadata`, whose chunks are then merged.
        file: the name that problems are reported under.

    Raises:
        UnreadableError: a root is no DCP metadata.

    Source:
        torch.distributed.checkpoint.metadata.Metadata (1.13 - 2.15)
    """
    states = [state_of(root, "Metadata") for root in roots]
    entries: dict[str, list[Any]] = {}
    index: list[Node] = []
    infos: list[Node] = []
    for state in states:
        described = state.get("state_dict_metadata")
        if not isinstance(described, dict):
            raise UnreadableError("has no state_dict_metadata in its root")
        for fqn, node in described.items():
            if not isinstance(fqn, str):
                raise UnreadableError(f"has {_name_of(fqn)} as a key of state_dict_metadata")
            entries.setdefault(fqn, []).append(node)
        stored = state.get("storage_data")
        if stored is not None and not isinstance(stored, dict):
            raise UnreadableError(f"has {_name_of(stored)} as storage_data")
        index.extend(stored or ())
        infos.extend((stored or {}).values())
    problems: list[Problem] = []
    raw = _RawRecords.read(index, infos, file, problems)
    tensors, byte_names = _tensors(entries, states[0].get("mcore_data"), file, problems)
    records, has_offset, joined, byte_objects = _join(tensors, byte_names, raw)
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    version = states[0].get("version")
    return Description(
        tensors=joined,
        byte_objects=byte_objects,
        records=records,
        has_offset=has_offset,
        paths=raw.paths,
        extras={key: value for state in reversed(states) for key, value in state.items() if key not in known},
        storage_meta=states[0].get("storage_meta"),
        version=version if isinstance(version, str) else None,
        planner_data=states[0].get("planner_data"),
        problems=problems,
    )


# ---------------------------------------------------------------- tensors


def _tensors(
    entries: dict[str, list[Any]], mcore_data: Any, file: str, problems: list[Problem]
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by raw name, their records still unknown, and the raw names of the bytes entries."""
    tensors: dict[str, Tensor] = {}
    byte_names: list[str] = []
    layouts: dict[tuple[Any, ...], Layout] = {}
    flattened = mcore_data if isinstance(mcore_data, dict) else {}
    for fqn, nodes in entries.items():
        kind = getattr(nodes[0], "kind", "")
        if len(fqn) > KEY_LIMIT:
            problems.append(_limit(file, fqn, f"a key has {len(fqn):,} characters, the limit is {KEY_LIMIT:,}"))
        if kind == "BytesStorageMetadata":
            byte_names.append(fqn)
            continue
        states = [state_of(node, "TensorStorageMetadata") for node in nodes if getattr(node, "kind", "") == kind]
        try:
            shape = _int_tuple(states[0].get("size"))
            listed = [_list(state.get("chunks")) for state in states]
            chunks = states_of(listed[0] if len(listed) == 1 else list(chain(*listed)), "ChunkStorageMetadata")
        except UnreadableError as error:
            raise UnreadableError(f"{error}, at key {printable(fqn)[:200]}") from None
        if len(shape) > RANK_LIMIT:
            problems.append(_limit(file, fqn, f"it has {len(shape):,} axes, the limit is {RANK_LIMIT}"))
            chunks = []
        offsets, sizes, malformed = _columns(chunks, len(shape))
        if len(states) > 1:
            offsets, sizes = _without_replicas(offsets, sizes)
        key = (shape, offsets.tobytes(), sizes.tobytes())
        layout = layouts.setdefault(key, Layout(shape, offsets, sizes))
        reformulated = flattened.get(fqn)
        tensor = Tensor(
            fqn=printable(fqn),
            dtype=_dtype(states[0].get("properties")),
            global_shape=_clamped(shape),
            chunks=ChunkTable(layout, np.full(len(offsets), -1, np.int64)),
            malformed=tuple(malformed),
            is_flattened=isinstance(reformulated, dict) and "nd_reformulated_orig_global_shape" in reformulated,
        )
        if (len(shape) <= RANK_LIMIT and not tensor.is_representable) or any(
            _beyond(c.offsets) or _beyond(c.sizes) for c in malformed
        ):
            wrong = "is negative" if min(shape, default=0) < 0 else "does not fit 64 bits"
            reason = f"size {_short(shape)} {wrong}"
            if tensor.is_representable:
                reason = "a chunk's offset or size does not fit 64 bits"
            problems.append(_limit(file, fqn, reason))
        tensors[fqn] = tensor
    return tensors, byte_names


def _columns(chunks: list[dict[str, Any]], rank: int) -> tuple[IntArray, IntArray, list[MalformedChunk]]:
    """Offsets and sizes of the chunks that fit a table of this rank, and the chunks that do not."""
    try:
        offsets = list(map(itemgetter("offsets"), chunks))
        sizes = list(map(itemgetter("sizes"), chunks))
    except KeyError as error:
        raise UnreadableError(f"has a chunk without {error}") from None
    shapely = {tuple} >= set(map(type, offsets)) | set(map(type, sizes))
    if shapely and {rank} >= set(map(len, offsets)) | set(map(len, sizes)):
        try:
            columns = _int_columns(offsets, rank), _int_columns(sizes, rank)
        except (OverflowError, TypeError, ValueError):
            pass
        else:
            if all(((c > -COORDINATE_LIMIT) & (c < COORDINATE_LIMIT)).all() for c in columns):
                return *columns, []
    rows, malformed = [], []
    for offset, size in zip(map(_int_tuple, offsets), map(_int_tuple, sizes), strict=True):
        if len(offset) == len(size) == rank and not _beyond(offset) and not _beyond(size):
            rows.append((offset, size))
        else:
            malformed.append(MalformedChunk(_clamped(offset), _clamped(size), -1))
    return _int_columns([o for o, _ in rows], rank), _int_columns([s for _, s in rows], rank), malformed


def _int_columns(rows: Iterable[tuple[int, ...]], rank: int) -> IntArray:
    rows = list(rows)
    if not {int} >= set(map(type, chain.from_iterable(rows))):
        raise TypeError("numpy would take text and fractions for numbers")
    flat = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * rank)
    return flat.reshape(len(rows), rank)


def _without_replicas(offsets: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
    """Equal chunks once: without collectives every rank lists the replicated tensors it wrote."""
    both = np.concatenate([offsets, sizes], axis=1)
    if both.shape[1] == 0:
        return offsets[:1], sizes[:1]
    _, first = np.unique(both, axis=0, return_index=True)
    keep = np.sort(first)
    return offsets[keep], sizes[keep]


def _dtype(properties: Any) -> str:
    """The dtype of a TensorProperties, whose state is a tuple of 5 (torch) or 3 (a MindSpore port of Megatron)."""
    if type(properties).__base__ is Node and len(properties) == 1:
        state = properties[0]
        first = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else 0
        if isinstance(first, str):
            return printable(first)
    return "unknown"


# ---------------------------------------------------------------- records


@dataclass(slots=True)
class _RawRecords:
    """storage_data as parallel lists and columns."""

    fqns: list[str]
    offsets: list[tuple[int, ...] | None]
    paths: list[str]
    file: Any
    byte_offset: IntArray
    byte_length: IntArray
    transformed: Any

    @classmethod
    def read(cls, index: list[Node], infos: list[Node], file: str, problems: list[Problem]) -> _RawRecords:
        try:
            keys = states_of(index, "MetadataIndex")
            values = states_of(infos, "_StorageInfo")
            fqns = list(map(itemgetter("fqn"), keys))
            names = list(map(itemgetter("relative_path"), values))
            lengths = list(map(itemgetter("length"), values))
            starts = list(map(itemgetter("offset"), values))
        except KeyError as error:
            raise UnreadableError(f"has a storage entry without {error}") from None
        if not {str} >= set(map(type, fqns)) | set(map(type, names)):
            raise UnreadableError("has a storage entry whose name or path is no text")
        offsets: list[tuple[int, ...] | None] = [key.get("offset") for key in keys]  # absent for bytes entries
        if not {tuple, type(None)} >= set(map(type, offsets)):
            offsets = [None if offset is None else _int_tuple(offset) for offset in offsets]
        place = {name: number for number, name in enumerate(dict.fromkeys(names))}
        numbers = np.fromiter(map(place.__getitem__, names), np.int32, len(names))
        columns = []
        for values_of, what in ((starts, "offset"), (lengths, "length")):
            try:
                columns.append(np.fromiter(values_of, np.int64, len(values_of)))
            except (OverflowError, TypeError, ValueError):
                problems.append(_limit(file, None, f"a storage entry's {what} does not fit 64 bits"))
                whole = (v if isinstance(v, int) and abs(v) < COORDINATE_LIMIT else -1 for v in values_of)
                columns.append(np.fromiter(whole, np.int64, len(values_of)))
        transformed = np.zeros(len(values), bool)
        if not {3} >= set(map(len, values)):
            transformed[:] = [bool(value.get("transform_descriptors")) for value in values]
        return cls(fqns, offsets, list(place), numbers, columns[0], columns[1], transformed)


def _join(
    tensors: dict[str, Tensor], byte_names: list[str], raw: _RawRecords
) -> tuple[RecordTable, Any, dict[str, Tensor], list[ByteObject]]:
    """Find each chunk's and bytes entry's record; records are filed under (fqn, offset).

    Returns the records as a table, which of them have an offset, the tensors by printable name, the bytes entries.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(raw.fqns))}
    fqn = np.fromiter(map(names.__getitem__, raw.fqns), np.int32, len(raw.fqns))
    owned = np.zeros(len(fqn), bool)
    rank = np.fromiter((-1 if offset is None else len(offset) for offset in raw.offsets), np.int64, len(fqn))

    by_rank: dict[int, list[tuple[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if name in names and len(tensor.chunks):
            by_rank.setdefault(len(tensor.global_shape), []).append((names[name], tensor))
    for axes, group in by_rank.items():
        rows = np.flatnonzero(rank == axes)
        try:
            stored = _int_columns([raw.offsets[row] or () for row in rows.tolist()], axes)
        except (OverflowError, TypeError, ValueError):
            keep = [row for row in rows.tolist() if not _beyond(_int_tuple(raw.offsets[row] or ()))]
            rows = np.array(keep, np.int64)
            stored = _int_columns([raw.offsets[row] or () for row in keep], axes)
        lengths = [len(tensor.chunks) for _, tensor in group]
        wanted = np.concatenate([tensor.layout.offsets for _, tensor in group])
        owner = np.repeat(np.array([number for number, _ in group], np.int64), lengths)
        found = _match(
            np.concatenate([fqn[rows, None].astype(np.int64), stored], axis=1),
            np.concatenate([owner[:, None], wanted], axis=1),
            rows,
            owned,
        )
        for (_, tensor), part in zip(group, np.split(found, np.cumsum(lengths)[:-1]), strict=True):
            tensor.chunks.record[:] = part

    byte_row: dict[str, int] = {}
    wanted_bytes = set(byte_names)
    for row in np.flatnonzero(rank == -1).tolist():
        owned[row] = raw.fqns[row] in wanted_bytes
        byte_row[raw.fqns[row]] = row
    byte_objects = [ByteObject(printable(name), byte_row.get(name, -1)) for name in byte_names]
    records = RecordTable(
        fqns=[printable(name) for name in names],
        fqn=fqn,
        file=raw.file,
        byte_offset=raw.byte_offset,
        byte_length=raw.byte_length,
        transformed=raw.transformed,
        owned=owned,
        strays={row: _stray(raw.offsets[row]) for row in np.flatnonzero(~owned).tolist()},
    )
    return records, rank >= 0, {tensor.fqn: tensor for tensor in tensors.values()}, byte_objects


def _stray(offsets: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if offsets is None else _clamped(_int_tuple(offsets))


def _match(stored: IntArray, wanted: IntArray, rows: IntArray, owned: Any) -> IntArray:
    """For each wanted (name, offset) the stored row that equals it, or -1; marks every matched row as owned.

    Rows are compared by a 64-bit mix of their columns and then in full, so a collision costs a match, never makes one;
    the colliding rows are then looked up one by one.
    """
    found = np.full(len(wanted), -1, np.int64)
    if not len(stored):
        return found
    stored_mix, wanted_mix = _mix(stored), _mix(wanted)
    order = np.argsort(stored_mix, kind="stable")
    in_order = stored_mix[order]
    at = np.searchsorted(in_order, wanted_mix)
    candidate = order[np.minimum(at, len(order) - 1)]
    equal = (stored[candidate] == wanted).all(axis=1)
    found[equal] = rows[candidate[equal]]
    owned[found[equal]] = True
    open_wanted = np.flatnonzero(~equal & (stored_mix[candidate] == wanted_mix))
    if len(open_wanted) or (in_order[1:] == in_order[:-1]).any():
        by_key: dict[tuple[int, ...], list[int]] = {}
        for i, key in enumerate(map(tuple, stored.tolist())):
            by_key.setdefault(key, []).append(int(rows[i]))
        for i, key in enumerate(map(tuple, wanted.tolist())):
            if key in by_key:
                found[i] = by_key[key][-1]
                owned[by_key[key]] = True
    return found


def _mix(columns: IntArray) -> Any:
    mixed = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


# ---------------------------------------------------------------- small things


def _int_tuple(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, int) for v in value):
        raise UnreadableError(f"has {_name_of(value)} where a size or offset was expected")
    return tuple(map(int, value))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UnreadableError(f"has {_name_of(value)} where a list of chunks was expected")
    return value


def _clamped(values: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers, those of more than 100 digits cut to that: Python refuses to print them."""
    return tuple(max(-_PRINTABLE, min(value, _PRINTABLE)) for value in values)


def _beyond(values: tuple[int, ...]) -> bool:
    return any(abs(value) >= COORDINATE_LIMIT for value in values)


def _limit(file: str, fqn: str | None, reason: str) -> Problem:
    name = None if fqn is None else printable(fqn)
    subject = file if name is None else f"{file}: {name[:200]}"
    return Problem("limit", file, f"{subject}: {reason}", fqn=name)


def _short(shape: tuple[int, ...]) -> str:
    sizes = [str(size) if abs(size) < 10**15 else f"{size:.3g}" for size in _clamped(shape)]
    return "[" + ", ".join(sizes) + "]"


def _name_of(value: Any) -> str:
    if type(value).__base__ is Node:
        return f"a {value.kind}"
    return f"{value!r}" if isinstance(value, Opaque) else f"a {type(value).__name__}"
