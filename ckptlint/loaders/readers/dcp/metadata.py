"""From the unpickled `.metadata` (or all `__N.metadata`) of torch.distributed.checkpoint to columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, groupby, islice, repeat
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.formats.pickles.columns import END, ChunkRows, RecordRows, RowRun
from ckptlint.formats.pickles.safe_pickle import Node, Opaque
from ckptlint.grouping import grouped
from ckptlint.model import KEY_LIMIT, RANK_LIMIT, ChunkTable, MalformedChunk, Problem, RecordTable, Tensor
from ckptlint.model.cover import Budget
from ckptlint.model.files import Names
from ckptlint.model.text import all_printable, plural, printable
from ckptlint.model.tiling import COORDINATE_LIMIT, IntArray, Tiling, distinct

_PRINTABLE = 10**100
_PART = 65536  # numbers that are Python objects at once

_first = itemgetter(0)


@dataclass(slots=True)
class Description:
    """What the metadata says, before anything else in the folder was looked at.

    Attributes:
        paths: raw relative path of each payload file, in the order of `RecordTable.file`.
        byte_records: name of each bytes entry, printable -> row of its record, -1 without one.
        extras: attributes of the root that are not torch's own (`all_local_plans`, `mcore_data`).
        has_offset: bool [m], the records that hold a chunk, not a bytes entry.
    """

    tensors: dict[str, Tensor]
    byte_records: dict[str, int]
    records: RecordTable
    has_offset: Any
    paths: list[str]
    extras: dict[str, Any]
    storage_meta: Any
    version: str | None
    problems: list[Problem] = field(default_factory=list)


def attributes_of(node: Any, kind: str) -> dict[str, Any]:
    """The attributes of a stand-in of this class, empty where pickle dropped an empty state; else UnreadableError."""
    if not _is_node(node, kind) or len(node) > 1:
        raise UnreadableError(f"has {_name_of(node)} where a {kind} was expected")
    state = node[0] if node else {}
    if not isinstance(state, dict):
        raise UnreadableError(f"has a {kind} with {_name_of(state)} instead of attributes")
    return state


def _is_node(node: Any, kind: str) -> bool:
    return type(node).__base__ is Node and node.kind == kind


def attributes_of_all(nodes: Sequence[Any], kind: str) -> list[dict[str, Any]]:
    """`attributes_of` for many stand-ins; a million well-formed ones are taken apart without a Python loop."""
    if len(set(map(type, nodes))) == 1 and _is_node(nodes[0], kind) and set(map(len, nodes)) == {1}:
        states = list(map(_first, nodes))
        if set(map(type, states)) == {dict}:
            return states
    return [attributes_of(node, kind) for node in nodes]


def describe(roots: Sequence[Any], file: str = ".metadata") -> Description:
    """Columns for everything that the root of `.metadata` describes, or those of all `__N.metadata`, merged.

    Rows of records in the roots are used up; problems are reported under `file`. Raises UnreadableError for a root that
    is no DCP metadata.

    Source: torch.distributed.checkpoint.metadata.Metadata (1.13 - 2.15)
    """
    states = [attributes_of(root, "Metadata") for root in roots]
    entries: dict[str, list[Any] | None] = {}  # of each rank that has one; None for a bytes entry
    index: list[Node] = []
    infos: list[Node] = []
    for state in states:
        described = state.get("state_dict_metadata")
        if not isinstance(described, dict):
            raise UnreadableError("has no state_dict_metadata in its root")
        for key in described if set(map(type, described)) != {str} else ():
            if not isinstance(key, str):
                raise UnreadableError(f"has {_name_of(key)} as a key of state_dict_metadata")
        of_bytes = {
            kind for kind in set(map(type, described.values())) if getattr(kind, "kind", "") == "BytesStorageMetadata"
        }
        of_state = {fqn: None if type(node) in of_bytes else [node] for fqn, node in described.items()}
        for fqn, nodes in of_state.items() if entries else ():
            if (earlier := entries.setdefault(fqn, nodes)) is not None and earlier is not nodes:
                earlier += nodes or ()
        entries = entries or of_state
        stored = state.get("storage_data")
        if stored is not None and not isinstance(stored, dict):
            raise UnreadableError(f"has {_name_of(stored)} as storage_data")
        index.extend(stored or ())
        infos.extend((stored or {}).values())
    problems: list[Problem] = []
    raw = _records(index, infos, file, problems)
    tensors, byte_names = _tensors(entries, states[0].get("mcore_data"), file, problems)
    records, has_offset, joined, byte_records = _join(tensors, byte_names, raw)
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    version = states[0].get("version")
    return Description(
        tensors=joined,
        byte_records=byte_records,
        records=records,
        has_offset=has_offset,
        paths=[*raw.paths],
        extras={key: value for state in reversed(states) for key, value in state.items() if key not in known},
        storage_meta=states[0].get("storage_meta"),
        version=version if isinstance(version, str) else None,
        problems=problems + _misplaced([state.get("planner_data") for state in states], entries, file),
    )


def _misplaced(planner_data: list[Any], entries: Mapping[str, Any], file: str) -> list[Problem]:
    """The keys that load under another name than their own, or under none, where the state dict is made from them.

    Source: torch.distributed.checkpoint._nested_dict.flatten_state_dict (2.0 - 2.13): the path, joined by dots, is the
    key; default_planner._EmptyStateDictLoadPlanner puts each tensor at the path of its key
    """
    paths = {key: path for data in planner_data if isinstance(data, dict) for key, path in data.items()}
    if not paths:
        return []
    wrong = [
        f"puts {printable(fqn)} at {_path_text(paths[fqn])}" if fqn in paths else f"has no path of {printable(fqn)}"
        for fqn in entries
        if fqn not in paths or _path_text(paths[fqn]) != fqn
    ]
    if not wrong:
        return []
    more = f", and {plural(len(wrong) - 1, 'more key')} elsewhere" if len(wrong) > 1 else ""
    why = "a conversion to a torch.save file, or a load without a model, places tensors by this map"
    return [Problem("unreadable", file, f"{file} has planner_data that {wrong[0]}{more}", why=why)]


def _path_text(path: Any) -> str:
    return ".".join(map(str, path)) if isinstance(path, (tuple, list)) else printable(repr(path))


def _tensors(
    entries: dict[str, list[Any] | None], mcore_data: Any, file: str, problems: list[Problem]
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by raw name, their records still unknown, and the raw names of the bytes entries."""
    tensors: dict[str, Tensor] = {}
    byte_names: list[str] = []
    tilings: dict[tuple[Any, ...], Tiling] = {}
    budget = Budget()
    flattened = mcore_data if isinstance(mcore_data, dict) else {}
    for fqn, nodes in entries.items():
        if len(fqn) > KEY_LIMIT:
            problems.append(_limit(file, fqn, f"a key has {len(fqn):,} characters, the limit is {KEY_LIMIT:,}"))
        if nodes is None:
            byte_names.append(fqn)
            continue
        kind = getattr(nodes[0], "kind", "")
        states = [attributes_of(node, "TensorStorageMetadata") for node in nodes if getattr(node, "kind", "") == kind]
        try:
            shape = _int_tuple(states[0].get("size"))
            listed = list(chain(*(_list(state.get("chunks")) for state in states)))
            if len(shape) > RANK_LIMIT:
                problems.append(_limit(file, fqn, f"it has {len(shape):,} dims, the limit is {RANK_LIMIT}"))
                listed = []
            offsets, sizes, malformed = _chunks(listed, len(shape))
        except UnreadableError as error:
            raise UnreadableError(f"{error}, at key {printable(fqn)[:200]}") from None
        if len(states) > 1:
            offsets, sizes = _without_replicas(offsets, sizes)
            problems += _disagreement(fqn, states, file)
        key = (shape, len(offsets), offsets.tobytes(), sizes.tobytes())  # a scalar's chunks have no bytes
        tiling = tilings.setdefault(key, Tiling(shape, offsets, sizes, budget))
        reformulated = flattened.get(fqn)
        tensor = Tensor(
            fqn=printable(fqn),
            dtype=_dtype(states[0].get("properties")),
            global_shape=_clamped(shape),
            chunks=ChunkTable(tiling, np.full(len(offsets), -1, np.int64)),
            malformed=tuple(malformed),
            is_flattened=isinstance(reformulated, dict) and "nd_reformulated_orig_global_shape" in reformulated,
        )
        if len(shape) <= RANK_LIMIT and not tensor.is_representable:
            wrong = "is negative" if min(shape, default=0) < 0 else "does not fit 64 bits"
            problems.append(_limit(file, fqn, f"size {_short(shape)} {wrong}"))
        elif any(_beyond(c.offsets) or _beyond(c.sizes) for c in malformed):
            problems.append(_limit(file, fqn, "a chunk's offset or size does not fit 64 bits"))
        tensors[fqn] = tensor
    return tensors, byte_names


def _disagreement(fqn: str, states: list[Any], file: str) -> list[Problem]:
    """What is wrong when ranks differ in the global shape or dtype of a tensor, and one of these is not whole.

    Where each is, the ranks have tensors of their own under one name, and each reads its own metadata.
    """
    listed: dict[tuple[tuple[int, ...], str], list[Any]] = {}
    for state in states:
        said = _int_tuple(state.get("size")), _dtype(state.get("properties"))
        listed.setdefault(said, []).extend(_list(state.get("chunks")))
    if len(listed) == 1 or all(_volume(chunks, shape) >= prod(shape) for (shape, _), chunks in listed.items()):
        return []
    whole = " and ".join(f"{dtype} {_short(shape)}" for shape, dtype in islice(listed, 4))
    sentence = f"{file}: ranks disagree on {printable(fqn)}: {whole}"
    why = "each rank takes shape and dtype from its own metadata, so what it loads depends on the rank"
    return [Problem("unreadable", file, sentence, why=why, hint="save again from the job")]


def _volume(listed: list[Any], shape: tuple[int, ...]) -> int:
    """Elements of the chunks, each place once."""
    _, sizes = _without_replicas(*_chunks(listed, len(shape))[:2])
    return sum(prod(row) for row in sizes.tolist())


def _chunks(listed: list[Any], rank: int) -> tuple[IntArray, IntArray, list[MalformedChunk]]:
    """Offsets and sizes of the chunks that fit a table of this rank, and the chunks that do not."""
    if RowRun not in set(map(type, listed)):
        return _columns(*_extents(listed), rank)
    columns = []
    for are_runs, items in groupby(listed, lambda item: type(item) is RowRun or item is END):
        if are_runs:
            columns += [_row_run_columns(row_run, rank) for row_run in items if row_run is not END]
        else:
            columns.append(_columns(*_extents(list(items)), rank))
    offsets, sizes, malformed = zip(*columns, strict=True)
    return np.concatenate(offsets), np.concatenate(sizes), list(chain(*malformed))


def _row_run_columns(row_run: RowRun, rank: int) -> tuple[IntArray, IntArray, list[MalformedChunk]]:
    table, rows = row_run.table.rows, slice(row_run.first, row_run.first + row_run.count)
    assert isinstance(table, ChunkRows)
    if (table.offset_rank[rows] == rank).all() and (table.size_rank[rows] == rank).all():
        return table.offsets[rows, :rank].astype(np.int64), table.sizes[rows, :rank].astype(np.int64), []
    offsets = _tuples(table.offset_rank[rows], table.offsets[rows])
    return _columns(offsets, _tuples(table.size_rank[rows], table.sizes[rows]), rank)


def _tuples(rank: IntArray, coordinates: IntArray) -> list[tuple[int, ...]]:
    return [tuple(row[:axes]) for axes, row in zip(rank.tolist(), coordinates.tolist(), strict=True)]


def _extents(listed: list[Any]) -> tuple[list[Any], list[Any]]:
    chunks = attributes_of_all(listed, "ChunkStorageMetadata")
    try:
        return list(map(itemgetter("offsets"), chunks)), list(map(itemgetter("sizes"), chunks))
    except KeyError as error:
        raise UnreadableError(f"has a chunk without {error}") from None


def _columns(offsets: list[Any], sizes: list[Any], rank: int) -> tuple[IntArray, IntArray, list[MalformedChunk]]:
    """Offsets and sizes as int64 [n, rank]; chunks of another rank or beyond the limits are returned apart."""
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


def _records(index: list[Any], infos: list[Any], file: str, problems: list[Problem]) -> RecordRows:
    """storage_data as one table, of stand-ins, row runs or both; row i is one stored record, texts in order of use."""
    is_node = [type(key) is not RowRun for key in index]
    nodes = _rows_of(list(compress(index, is_node)), list(compress(infos, is_node)), file, problems)
    if all(is_node):
        return nodes
    lengths = [key.count if type(key) is RowRun else 1 for key in index]
    ends = np.cumsum(lengths)
    starts, total = ends - lengths, int(ends[-1])
    blocks: list[tuple[Any, RecordRows, slice]] = [(starts[is_node], nodes, slice(None))]
    row_runs = [(key, int(start)) for key, start in zip(index, starts, strict=True) if type(key) is RowRun]
    for key, start in row_runs:
        assert isinstance(key.table.rows, RecordRows)
        blocks.append((slice(start, start + key.count), key.table.rows, slice(key.first, key.first + key.count)))
    tables = {id(table): table for _, table, _ in blocks}
    names, paths = Numbering(), Numbering()
    numbers = {key: (names.add([*table.names]), paths.add([*table.paths])) for key, table in tables.items()}
    name, path = np.zeros(total, np.int32), np.zeros(total, np.int32)
    hint, rank, byte_offset, byte_length = (np.zeros(total, np.int64) for _ in range(4))
    offsets = np.zeros((total, max(table.offsets.shape[1] for table in tables.values())), np.int64)
    for place, table, span in blocks:
        of_names, of_paths = numbers[id(table)]
        name[place], path[place] = of_names[table.name[span]], of_paths[table.path[span]]
        hint[place], rank[place] = table.hint[span], table.rank[span]
        offsets[place, : table.offsets.shape[1]] = table.offsets[span]
        byte_offset[place], byte_length[place] = table.byte_offset[span], table.byte_length[span]
    for key, _ in row_runs:
        key.table.rows = None  # copied; of a million records they are 50 MB
    rows = starts[is_node]
    used, name = names.in_order_of_use(name)
    used_paths, path = paths.in_order_of_use(path)
    odd = {int(rows[row]): offset for row, offset in nodes.odd.items()}
    transformed = rows[[*nodes.transformed]].tolist()
    return RecordRows(used, name, hint, rank, offsets, used_paths, path, byte_offset, byte_length, transformed, odd)


def _rows_of(index: list[Node], infos: list[Node], file: str, problems: list[Problem]) -> RecordRows:
    """The table of stand-ins."""
    try:
        keys = attributes_of_all(index, "MetadataIndex")
        values = attributes_of_all(infos, "_StorageInfo")
        fqns = list(map(itemgetter("fqn"), keys))
        names = list(map(itemgetter("relative_path"), values))
        lengths = list(map(itemgetter("length"), values))
        starts = list(map(itemgetter("offset"), values))
    except KeyError as error:
        raise UnreadableError(f"has a storage entry without {error}") from None
    if not {str} >= set(map(type, fqns)) | set(map(type, names)):
        raise UnreadableError("has a storage entry whose key or path is not text")
    fqn, different = numbered(fqns)
    number, paths = numbered(names)
    rank, offsets, odd = _filed_under([key.get("offset") for key in keys])  # absent for bytes entries
    columns = []
    for values_of, what in ((starts, "offset"), (lengths, "length")):
        try:
            columns.append(np.fromiter(values_of, np.int64, len(values_of)))
        except (OverflowError, TypeError, ValueError):
            problems.append(_limit(file, None, f"a storage entry's {what} does not fit 64 bits"))
            whole = (v if isinstance(v, int) and abs(v) < 2**63 else -1 for v in values_of)
            columns.append(np.fromiter(whole, np.int64, len(values_of)))
    transformed: list[int] = []
    if not {3} >= set(map(len, values)):
        transformed = [row for row, value in enumerate(values) if value.get("transform_descriptors")]
    stated = (key.get("index") for key in keys)
    hints = [hint if type(hint) is int and 0 <= hint < COORDINATE_LIMIT else -1 for hint in stated]
    hint, (start, length) = np.array(hints, np.int64), columns
    return RecordRows(different, fqn, hint, rank, offsets, paths, number, start, length, transformed, odd)


def numbered(texts: list[str]) -> tuple[Any, list[str]]:
    """int32 [n], positions in the list of distinct texts, and that list, in order of first use."""
    place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return np.fromiter(map(place.__getitem__, texts), np.int32, len(texts)), list(place)


class Numbering:
    """One numbering for texts that come from several tables."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.place: dict[str, int] = {}

    def add(self, texts: list[str]) -> Any:
        """int32 [n], the number of each of these different texts."""
        if not self.texts:  # mostly there is one table: a dictionary of a million texts would be of no use
            self.texts = texts
            return np.arange(len(texts), dtype=np.int32)
        self.place = self.place or {text: number for number, text in enumerate(self.texts)}
        numbers = np.array([self.place.setdefault(text, len(self.place)) for text in texts], np.int32)
        self.texts = list(self.place)
        return numbers

    def in_order_of_use(self, numbers: Any) -> tuple[list[str], Any]:
        """The texts in the order in which `numbers` first names them, and `numbers` in that order."""
        first = np.zeros(len(self.texts), np.int32)
        first[numbers[::-1]] = np.arange(len(numbers), dtype=np.int32)[::-1]
        if (first[1:] >= first[:-1]).all():
            return self.texts, numbers
        order = np.argsort(first, kind="stable")
        new = np.zeros(len(order), np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        blocks = (order[start : start + _PART].tolist() for start in range(0, len(order), _PART))
        return [self.texts[number] for block in blocks for number in block], new[numbers]


def _filed_under(offsets: list[Any]) -> tuple[IntArray, IntArray, dict[int, tuple[int, ...]]]:
    """Rank and coordinates of the offsets in the keys of storage_data, and those that fit no column."""
    if not {tuple, type(None)} >= set(map(type, offsets)):
        offsets = [None if offset is None else _int_tuple(offset) for offset in offsets]
    rank = np.fromiter((-1 if offset is None else len(offset) for offset in offsets), np.int64, len(offsets))
    coordinates = np.zeros((len(offsets), min(max(rank.max(initial=0), 0), RANK_LIMIT)), np.int64)
    odd: dict[int, tuple[int, ...]] = {}
    for axes in distinct(rank[rank > 0]).tolist():
        rows = np.flatnonzero(rank == axes)
        try:
            if axes > RANK_LIMIT:
                raise OverflowError
            columns = _int_columns([offsets[row] for row in rows.tolist()], axes)
            if ((columns >= COORDINATE_LIMIT) | (columns <= -COORDINATE_LIMIT)).any():
                raise OverflowError
            coordinates[rows, :axes] = columns
        except (OverflowError, TypeError, ValueError):
            for row in rows.tolist():
                offset = _int_tuple(offsets[row])
                if axes > RANK_LIMIT or _beyond(offset):
                    odd[row], rank[row] = offset, -2
                else:
                    coordinates[row, :axes] = offset
    return rank, coordinates, odd


def _join(
    tensors: dict[str, Tensor], byte_names: list[str], raw: RecordRows
) -> tuple[RecordTable, Any, dict[str, Tensor], dict[str, int]]:
    """Find each chunk's and bytes entry's record; records are filed under (fqn, offset).

    Returns the records as a table, which of them have an offset, the tensors by printable name, the bytes entries.
    """
    names = [*raw.names]
    numbers = dict(zip(names, range(len(names)), strict=True))
    owned = np.zeros(len(raw.name), bool)

    stored_tensors = [(numbers[name], tensor) for name, tensor in tensors.items() if name in numbers]
    by_rank = grouped((len(item[1].global_shape), item) for item in stored_tensors if len(item[1].chunks))
    for axes, group in by_rank.items():
        rows = np.flatnonzero(raw.rank == axes)
        stored = raw.offsets[rows, :axes]
        owners = np.array([number for number, _ in group], np.int64)
        lengths = np.array([len(tensor.chunks) for _, tensor in group])
        wanted = np.concatenate([tensor.tiling.offsets for _, tensor in group])
        matched = _by_hint(raw, rows, stored, wanted, owners, lengths)
        if matched is not None:
            owned[rows] = True
        else:
            matched = _match(
                np.concatenate([raw.name[rows, None].astype(np.int64), stored], axis=1),
                np.concatenate([np.repeat(owners, lengths)[:, None], wanted], axis=1),
                rows,
                owned,
            )
        for (_, tensor), rows_of_tensor in zip(group, np.split(matched, np.cumsum(lengths)[:-1]), strict=True):
            tensor.chunks.record[:] = rows_of_tensor

    rows = np.flatnonzero(raw.rank == -1)
    of_bytes = np.fromiter(map(numbers.get, byte_names, repeat(-1)), np.int64, len(byte_names))
    row_of = np.full(len(raw.names) + 1, -1, np.int64)  # the last one for names that have no record
    row_of[raw.name[rows]] = rows
    wanted_bytes = np.zeros(len(raw.names) + 1, bool)
    wanted_bytes[of_bytes] = True
    wanted_bytes[-1] = False
    owned[rows] = wanted_bytes[raw.name[rows]]
    fqns = all_printable(names)
    shown = byte_names if fqns == names and (of_bytes >= 0).all() else all_printable(byte_names)
    byte_records = dict(zip(shown, row_of[of_bytes].tolist(), strict=True))
    transformed = np.zeros(len(raw.name), bool)
    transformed[[*raw.transformed]] = True
    records = RecordTable(
        fqns=Names.of(fqns),
        fqn=raw.name,
        file=raw.path,
        byte_offset=raw.byte_offset,
        byte_length=raw.byte_length,
        transformed=transformed,
        owned=owned,
        unreferenced={row: _stray(raw, row) for row in np.flatnonzero(~owned).tolist()},
    )
    return records, raw.rank != -1, {tensor.fqn: tensor for tensor in tensors.values()}, byte_records


def _by_hint(
    raw: RecordRows, rows: IntArray, stored: IntArray, wanted: IntArray, owners: IntArray, lengths: IntArray
) -> IntArray | None:
    """What `_match` finds, where every record names the number of its chunk and every chunk has one record.

    Source: torch.distributed.checkpoint.default_planner.create_default_global_save_plan (>= 2.0), MetadataIndex.index
    """
    if len(rows) != len(wanted):
        return None
    first, count = np.full(len(raw.names), -1, np.int64), np.zeros(len(raw.names), np.int64)
    first[owners], count[owners] = np.cumsum(lengths) - lengths, lengths
    fqn, hint = raw.name[rows], raw.hint[rows]
    if ((hint < 0) | (hint >= count[fqn])).any():
        return None
    at = first[fqn] + hint
    matched = np.full(len(wanted), -1, np.int64)
    matched[at] = rows
    return matched if (matched >= 0).all() and (stored == wanted[at]).all() else None


def _stray(raw: RecordRows, row: int) -> tuple[int, ...] | None:
    """The offset that a record is filed under."""
    rank = int(raw.rank[row])
    if rank < 0:
        return _clamped(raw.odd[row]) if row in raw.odd else None
    return tuple(raw.offsets[row, :rank].tolist())


def _match(stored: IntArray, wanted: IntArray, rows: IntArray, owned: Any) -> IntArray:
    """For each wanted (name, offset) the stored row that equals it, or -1; marks every matched row as owned.

    Rows are compared by a 64-bit mix of their columns and then in full, so a collision costs a match, never makes one;
    the colliding rows are then looked up one by one.
    """
    matched = np.full(len(wanted), -1, np.int64)
    if not len(stored):
        return matched
    stored_mix, wanted_mix = _mix(stored), _mix(wanted)
    order = np.argsort(stored_mix, kind="stable")
    in_order = stored_mix[order]
    at = np.searchsorted(in_order, wanted_mix)
    candidate = order[np.minimum(at, len(order) - 1)]
    equal = (stored[candidate] == wanted).all(axis=1)
    matched[equal] = rows[candidate[equal]]
    owned[matched[equal]] = True
    open_wanted = np.flatnonzero(~equal & (stored_mix[candidate] == wanted_mix))
    if len(open_wanted) or (in_order[1:] == in_order[:-1]).any():
        by_key = grouped(zip(map(tuple, stored.tolist()), rows.tolist(), strict=True))
        for i, key in enumerate(map(tuple, wanted.tolist())):
            if key in by_key:
                matched[i] = by_key[key][-1]
                owned[by_key[key]] = True
    return matched


def _mix(columns: IntArray) -> Any:
    mixed = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


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
