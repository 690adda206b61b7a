"""The regular row runs of a metadata pickle as columns, without an object for each row.

All but a thousandth of a large `.metadata` is one of four rows again and again: a ChunkStorageMetadata, a
MetadataIndex with its _StorageInfo, the key of a bytes entry with its BytesStorageMetadata, or, where Megatron-Core
keeps the plans of all ranks, a WriteItem. `scan` reads such rows with numpy (`pickle_rows`; bytes entries, whose rows
do not begin alike, here) and writes a shorter pickle, in which each row run of them is one persistent id.
The C unpickler then reads that one and stays the judge of everything else.

What keeps the two pickles equal in meaning:

- Every opcode outside of a row run is stepped over one by one from the first byte on, so a row run begins at an opcode;
  its rows are proven to end at one. An opcode that no metadata needs (POP, DUP, PUT, GLOBAL, ...) ends the scan.
- The memo entries of a row run are left out, and the indices of later ones are lowered by their number. A GET outside
  of a row run that refers to a chunk in one becomes a persistent id too, one that refers to the key of a bytes entry
  the text itself; any other that refers into one ends the scan.
- The class, the attribute names and whatever else a row takes from the memo are handed to `Scan.persistent_load` and
  compared with the stand-ins in `Scan.finish`.
- A row run leaves two objects on the stack, itself and `END`, so an opcode that takes one object for a row fails. In a
  dict an `End` of its own and `END` follow, whose loss or change shows.

Whoever scans must find each row run where it belongs, or else read the original pickle.

Source: pickle protocols 4 and 5 as CPython 3.8 - 3.14 writes them: everything in frames, MEMOIZE, no PUT
"""

from __future__ import annotations

import io
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from ckptlint.formats.pickles.rows import (
    BARE_OBJECT,
    ENTRY_CLASS,
    GET,
    INT,
    LENGTH,
    LENGTH_BYTES,
    MEMOIZE,
    MOST_AXES,
    NESTED,
    NONE,
    OBJECTS_PER_ROW,
    PLAN_ATTRIBUTES,
    PLAN_CLASSES,
    PLANNED,
    ROWS_AT_ONCE,
    SIZE,
    SIZE_CLASS,
    TEXT,
    Buffer,
    Column,
    IrregularError,
    PickleView,
    Table,
    bytes_of_texts,
    distinct_texts,
    get_opcode,
    learn,
    numbered,
    planned_items,
    read_table,
    records,
    slices,
    wide_enough,
)
from ckptlint.model.files import Names
from ckptlint.model.tiling import COORDINATE_LIMIT, IntArray, distinct

if TYPE_CHECKING:
    from concurrent.futures import Future

WORTHWHILE = 1024**2
"""Bytes from which on a scan is tried; a smaller pickle is read in milliseconds anyway."""

_ATTEMPTS = 16  # rows that a form is learned from
_WINDOW = 4096, 1 << 17  # bytes in which bytes entries are sought, for the first of a row run and at most
_PLAN_NAMES = {name.encode() for name in PLAN_ATTRIBUTES}
_PLAN_CLASSES = {b"\x8c" + bytes([len(name)]) + name.encode() + b"\x94": name.encode() for name in PLAN_CLASSES}


class End:
    """What a row run leaves on the stack behind itself."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("no row")


END = End()


@dataclass(slots=True, eq=False)
class ChunkRows:
    """Rows that are a ChunkStorageMetadata.

    Attributes:
        offset_rank, size_rank: int8 [n], number of axes.
        offsets, sizes: int8 to int64 [n, d], zeros behind the rank.
    """

    offset_rank: Any
    offsets: Any
    size_rank: Any
    sizes: Any


@dataclass(slots=True, eq=False)
class RecordRows:
    """Rows that are a MetadataIndex with its _StorageInfo.

    Attributes:
        names: the distinct names; name: int32 [n], position in it.
        hint: int8 to int64 [n], the chunk's number among those of its tensor, as far as the writer knew; -1 for none.
        rank: int8 to int64 [n], number of axes of the offset; -1 for none, -2 for one that is in `odd`.
        offsets: int8 to int64 [n, d], zeros behind the rank.
        paths: the distinct relative paths; path: int32 [n], position in it.
        byte_offset, byte_length: int8 to int64 [n], bytes.
        transformed: the rows whose bytes an extension changed (`transform_descriptors`).
        odd: row -> an offset that fits no column.
    """

    names: Names | list[str]
    name: Any
    hint: Any
    rank: Any
    offsets: Any
    paths: Names | list[str]
    path: Any
    byte_offset: Any
    byte_length: Any
    transformed: Collection[int] = ()
    odd: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class EntryRows(NamedTuple):
    """The keys of bytes entries, row by row, and what stands for the BytesStorageMetadata of each: it has no state."""

    names: list[str]
    entry: Any


@dataclass(slots=True, eq=False)
class PlanRows:
    """Rows that are a WriteItem.

    Attributes:
        names: the distinct keys; name: int32 [n], position in it.
        is_bytes: bool [n], without a tensor.
        chunk: the chunk of each tensor; the ranks of a row without one are -1.
        size_rank, sizes: the global shape, as in `ChunkRows`.
        properties: the distinct TensorProperties as the unpickler made them, or what stands for their dtype.
        of_properties: int32 [n], position in it, -1 without a tensor.
    """

    names: Names
    name: Any
    is_bytes: Any
    chunk: ChunkRows
    size_rank: Any
    sizes: Any
    properties: list[Any]
    of_properties: Any


@dataclass(slots=True, eq=False)
class OneChunk:
    """A row of `ChunkRows` where something outside of its run refers to it."""

    table: Table
    row: int

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("no row")

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes."""
        rows = self.table.rows
        assert isinstance(rows, ChunkRows)
        offsets, sizes = rows.offsets[self.row].tolist(), rows.sizes[self.row].tolist()
        return tuple(offsets[: rows.offset_rank[self.row]]), tuple(sizes[: rows.size_rank[self.row]])


@dataclass(slots=True, eq=False)
class RowRun:
    """Consecutive rows of a table, from `first` on, where the row run stands."""

    table: Table
    first: int
    count: int

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("no row")


@dataclass(slots=True)
class PickleScan:
    """What `scan` made of a pickle.

    Attributes:
        pickle: the shorter pickle.
        view: the original, until the rows are read.
        row runs: in the order of the stream.
        references: for each row run, the memo indices outside of all row runs that its rows refer to.
        single: the chunks of row runs that something else refers to, one for each reference.
    """

    pickle: bytes
    view: PickleView | None
    tables: list[Table]
    row_runs: list[RowRun]
    references: list[IntArray]
    single: list[OneChunk]
    outside: dict[int, Any] = field(default_factory=dict)
    met: int = 0
    met_single: int = 0

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a row run or behind one.

        Raises:
            IrregularError: it comes out of turn, or its rows would mean something else than those before.
        """
        if pid is None:
            return END
        if pid is False:
            return End()
        if pid == self.met_single and type(pid) is int and pid < len(self.single):
            self.met_single += 1
            return self.single[pid]
        if not isinstance(pid, tuple) or self.met >= len(self.row_runs) or pid[0] != self.met:
            raise IrregularError
        row_run, references = self.row_runs[self.met], self.references[self.met]
        self.met += 1
        table, named = row_run.table, 1 + len(row_run.table.names)
        if len(pid) != named + len(references):
            raise IrregularError
        if not table.values:
            table.values = pid[1:named]
        elif not all(map(is_, table.values, pid[1:named])):
            raise IrregularError
        self.outside.update(zip(references.tolist(), pid[named:], strict=True))
        return row_run

    def finish(self, kind_of: Callable[[Any], str], size: Any) -> None:
        """Give each table its rows, now that the unpickler has met all row runs.

        Args:
            kind_of: the class that a stand-in stands for.
            size: the stand-in of torch.Size.

        Raises:
            IrregularError: the rows are something else than they looked like.
        """
        if self.met < len(self.row_runs) or self.met_single < len(self.single):
            raise IrregularError
        for table in self.tables:
            if not table.values:
                continue
            if table.names[0] >= 0 and table.values[0] is not size:
                raise IrregularError
            if not table.attributes:
                classes = tuple(map(kind_of, table.values[1 : 1 + len(PLAN_CLASSES)]))
                if (*classes, *table.values[1 + len(PLAN_CLASSES) :]) != (*PLAN_CLASSES, *PLAN_ATTRIBUTES):
                    raise IrregularError
                table.rows = self._plan_rows(table, kind_of)
                continue
            objects = [(kind_of(kind), columns) for kind, columns in table.objects()]
            kinds, attributes = [kind for kind, _ in objects], [columns for _, columns in objects]
            if kinds == ["ChunkStorageMetadata"] and attributes[0].keys() == {"offsets", "sizes"}:
                table.rows = self._chunk_rows(table, attributes[0])
            elif kinds == ["MetadataIndex", "_StorageInfo"]:
                table.rows = self._record_rows(table, *attributes)
            elif kinds == ["BytesStorageMetadata"]:
                names = table.rows.decode("utf-8", "surrogatepass").split("\0")
                if len(names) != len(table.base) + 1:
                    raise IrregularError  # a NUL in one
                table.rows = EntryRows(names[:-1], table.values[1]())
            else:
                raise IrregularError
        self.view = None
        for table in self.tables:  # what is left of them are the rows
            table.columns, table.base = [], None

    def _chunk_rows(self, table: Table, chunk: dict[Any, Column]) -> ChunkRows:
        return ChunkRows(*self._sizes(table, chunk["offsets"]), *self._sizes(table, chunk["sizes"]))

    def _record_rows(self, table: Table, index: dict[Any, Column], info: dict[Any, Column]) -> RecordRows:
        """The records of a table as columns; what has other fields is not regular."""
        optional = {"transform_descriptors"} & info.keys()
        if index.keys() - {"offset"} != {"fqn", "index"} or info.keys() - optional != {
            "relative_path",
            "offset",
            "length",
        }:
            raise IrregularError
        if any((info[key].kind[table.base >= 0] != NONE).any() for key in optional):
            raise IrregularError
        ids, names = self._texts(table, index["fqn"])
        path, paths = self._texts(table, info["relative_path"])
        if "offset" in index:
            rank, offsets = self._sizes(table, index["offset"])
        else:
            rank, offsets = np.full(len(ids), -1, np.int8), np.zeros((len(ids), 0), np.int32)
        starts, lengths = (self._integers(table, info[key]) for key in ("offset", "length"))
        hint = np.where(index["index"].kind == INT, index["index"].number, -1)
        return RecordRows(names, ids, hint, rank, offsets, paths, path, starts, lengths)

    def _plan_rows(self, table: Table, kind_of: Callable[[Any], str]) -> PlanRows:
        """The planned items of a table as columns; what has other fields is not regular."""
        column = dict(zip(PLANNED, table.columns, strict=True))
        described = table.base >= 0
        if (column["bytes_io_data"].kind[described] != NONE).any():
            raise IrregularError
        data = column["tensor_data"].kind
        is_bytes = data == NONE
        if (described & ~is_bytes & (data != NESTED)).any():
            raise IrregularError
        ids, names = self._texts(table, column["fqn"])
        chunk = ChunkRows(*self._sizes(table, column["offsets"]), *self._sizes(table, column["sizes"]))
        self._chunks_at(table, column["chunk"], chunk, kind_of)
        size_rank, sizes = self._sizes(table, column["size"])
        if (described & ~is_bytes & ((chunk.offset_rank < 0) | (chunk.size_rank < 0) | (size_rank < 0))).any():
            raise IrregularError
        of_properties, properties = self._properties(table, column["properties"], column["dtype"], kind_of)
        return PlanRows(names, ids, is_bytes, chunk, size_rank, sizes, properties, of_properties)

    def _chunks_at(self, table: Table, column: Column, chunk: ChunkRows, kind_of: Callable[[Any], str]) -> None:
        """Fill in the chunks that rows of planned items only refer to.

        Raises:
            IrregularError: something else is referred to.
        """
        rows = np.flatnonzero((table.base >= 0) & (column.kind == GET))
        indices = column.number[rows]
        is_filled = np.zeros(len(rows), bool)
        for holder in self.tables:
            inline = np.flatnonzero((holder.base >= 0) & (column.kind == NESTED)) if holder is table else None
            if inline is not None:
                source, entries, origin = inline, holder.base[inline] + column.memo[inline], chunk
            elif isinstance(holder.rows, ChunkRows):
                source = np.flatnonzero(holder.base >= 0)
                entries, origin = holder.base[source], holder.rows
            else:
                continue
            if len(source) == 0 or len(rows) == 0:
                continue
            at = np.minimum(np.searchsorted(entries, indices), len(entries) - 1)
            hit = np.flatnonzero(entries[at] == indices)
            _copy_chunks(chunk, rows[hit], origin, source[at[hit]])
            is_filled[hit] = True
        for row, index in zip(rows[~is_filled].tolist(), indices[~is_filled].tolist(), strict=True):
            node = self.outside.get(index)
            state = node[0] if isinstance(node, list) and len(node) == 1 else None
            if kind_of(type(node)) != "ChunkStorageMetadata" or not isinstance(state, dict):
                raise IrregularError
            offsets, sizes = (_as_size(state.get(name)) for name in ("offsets", "sizes"))
            single = ChunkRows(*(np.array([value]) for values in (offsets, sizes) for value in (len(values), values)))
            _copy_chunks(chunk, np.array([row]), single, np.array([0]))

    def _properties(
        self, table: Table, column: Column, dtype: Column, kind_of: Callable[[Any], str]
    ) -> tuple[Any, list[Any]]:
        """For each row int32 [n], its place among the distinct TensorProperties or dtypes, and these.

        Raises:
            IrregularError: something else is referred to.
        """
        described = table.base >= 0
        inline = np.flatnonzero(described & (column.kind == NESTED))
        if (dtype.kind[inline] != GET).any():
            raise IrregularError
        # twice the memo index of the TensorProperties, or that of the dtype and one more; -1 without a tensor
        referred = np.full(len(described), -1, np.int64)
        referred[inline] = 2 * dtype.number[inline].astype(np.int64) + 1
        referring = np.flatnonzero(described & (column.kind == GET))
        if (described & ~np.isin(column.kind, (0, GET, NESTED))).any():
            raise IrregularError
        indices = column.number[referring].astype(np.int64)
        referred[referring] = 2 * indices
        if len(inline) and len(referring):
            entries = table.base[inline] + column.memo[inline]
            at = np.minimum(np.searchsorted(entries, indices), len(entries) - 1)
            hit = entries[at] == indices
            referred[referring[hit]] = referred[inline[at[hit]]]
        different, which = numbered(referred)
        values = []
        for index in different[different >= 0].tolist():
            values.append(value := self.outside.get(index // 2))
            if not isinstance(value, str) if index % 2 else kind_of(type(value)) != "TensorProperties":
                raise IrregularError
        return which - np.int32(len(different) - len(values)), values

    def _integers(self, table: Table, column: Column) -> Any:
        """int8 to int64 [n], an attribute that is an integer in every row of a row run.

        Raises:
            IrregularError: in some row it is none.
        """
        if (column.kind[table.base >= 0] != INT).any():
            raise IrregularError
        return column.number

    def _texts(self, table: Table, column: Column) -> tuple[Any, Names]:
        """An attribute that is a text in every row of a row run: int32 [n], positions among the distinct texts.

        Raises:
            IrregularError: in some row it is none, or a text is nothing that `Names` holds.
        """
        rows = table.base >= 0
        spelled, referring = rows & (column.kind == TEXT), np.flatnonzero(rows & (column.kind == GET))
        if np.count_nonzero(rows) != np.count_nonzero(spelled) + len(referring):
            raise IrregularError
        assert self.view is not None
        ids = np.zeros(len(rows), np.int32)
        start = length = np.zeros(0, np.int32)
        if column.length is not None:
            ids[spelled], start, length = distinct_texts(self.view, column.number[spelled], column.length[spelled])
        indices, which = numbered(column.number[referring])
        sought = self._texts_at(indices) if len(referring) else []
        place = dict.fromkeys(sought, -1)
        whole = io.BytesIO()
        for first in range(0, len(start), ROWS_AT_ONCE):
            texts = slices(self.view, start[first : first + ROWS_AT_ONCE], length[first : first + ROWS_AT_ONCE])
            whole.write(bytes_of_texts(texts))
            if place:
                place |= {text: number for number, text in enumerate(texts, first) if text in place}
        only_referred = [text for text, number in place.items() if number < 0]
        place |= {text: number for number, text in enumerate(only_referred, len(start))}
        whole.write(bytes_of_texts(only_referred))
        if len(referring):
            ids[referring] = np.array([place[text] for text in sought], np.int32)[which]
        lengths = np.concatenate([length, np.array([*map(len, only_referred)], np.int32)])
        names = Names(whole.getvalue(), np.cumsum(lengths + 1, dtype=np.int64) - 1)
        if names.text.count(b"\0") != len(names):
            raise IrregularError
        return ids, names

    def _sizes(self, table: Table, column: Column) -> tuple[Any, Any]:
        """An attribute that is a torch.Size or None in every row: rank (-1 for None) and coordinates [n, d].

        Raises:
            IrregularError: in some row it is something else.
        """
        rows = table.base >= 0
        kind = column.kind
        rank = np.where(kind == SIZE, column.number, -1).astype(np.int8)
        coordinates = np.zeros((len(rows), 0), np.int8) if column.coordinates is None else column.coordinates
        referring = np.flatnonzero(rows & (kind == GET))
        if (rows & (kind != SIZE) & (kind != NONE) & (kind != GET) & (kind != 0)).any():
            raise IrregularError
        if len(referring):
            indices, which = numbered(column.number[referring])
            rank_at, sizes_at = self._sizes_at(indices)
            rank[referring] = rank_at[which]
            coordinates = _with_rows(coordinates, referring, sizes_at[which])
        if coordinates.size and (coordinates.max() >= COORDINATE_LIMIT or coordinates.min() <= -COORDINATE_LIMIT):
            raise IrregularError
        return rank, coordinates

    def _texts_at(self, indices: IntArray) -> list[bytes]:
        """The texts under these memo indices."""
        assert self.view is not None
        texts_by_index: dict[int, bytes] = {}
        for column, entries, rows in self._entries(TEXT):
            at = np.minimum(np.searchsorted(entries, indices), len(entries) - 1)
            hit = np.flatnonzero(entries[at] == indices)
            source = rows[at[hit]]
            texts = slices(self.view, column.number[source], column.length[source])
            texts_by_index |= zip(indices[hit].tolist(), texts, strict=True)
        for index in indices.tolist():
            if index not in texts_by_index:
                text = self.outside.get(index)
                if not isinstance(text, str):
                    raise IrregularError
                texts_by_index[index] = text.encode("utf-8", "surrogatepass")
        return [texts_by_index[index] for index in indices.tolist()]

    def _sizes_at(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Ranks and coordinates of the Sizes under these memo indices."""
        rank, coordinates = np.full(len(indices), -2, np.int64), np.zeros((len(indices), MOST_AXES), np.int64)
        for column, entries, rows in self._entries(SIZE):
            at = np.minimum(np.searchsorted(entries, indices), len(entries) - 1)
            hit = np.flatnonzero(entries[at] == indices)
            source = rows[at[hit]]
            rank[hit] = column.number[source]
            assert column.coordinates is not None
            coordinates[hit, : column.coordinates.shape[1]] = column.coordinates[source]
        for row in np.flatnonzero(rank == -2).tolist():
            size = _as_size(self.outside.get(int(indices[row])))
            rank[row] = len(size)
            coordinates[row, : len(size)] = size
        return rank, coordinates[:, : max(int(rank.max()), 0)]

    def _entries(self, kind: int) -> Iterator[tuple[Column, Any, IntArray]]:
        """For each column, the memo indices of its texts or Sizes, ascending, and their rows."""
        for table in self.tables:
            for column in table.columns:
                rows = np.flatnonzero((column.kind == kind) & (table.base >= 0))
                if len(rows):
                    yield column, table.base[rows] + column.memo[rows], rows


def _as_size(value: Any) -> tuple[int, ...]:
    """A Size as the unpickler made it.

    Raises:
        IrregularError: it is none, or too long or large for the columns.
    """
    if not isinstance(value, tuple) or len(value) > MOST_AXES or not {int} >= set(map(type, value)):
        raise IrregularError
    if any(abs(extent) >= COORDINATE_LIMIT for extent in value):
        raise IrregularError
    return value


def _copy_chunks(into: ChunkRows, rows: IntArray, source: ChunkRows, of: IntArray) -> None:
    """Copy rows of one table to rows of another, whose columns become wider where they must."""
    into.offset_rank[rows], into.size_rank[rows] = source.offset_rank[of], source.size_rank[of]
    into.offsets = _with_rows(into.offsets, rows, source.offsets[of])
    into.sizes = _with_rows(into.sizes, rows, source.sizes[of])


def _with_rows(coordinates: Any, rows: IntArray, values: Any) -> Any:
    if (wider := values.shape[1] - coordinates.shape[1]) > 0:
        coordinates = np.pad(coordinates, ((0, 0), (0, wider)))
    coordinates = wide_enough(coordinates, values)
    coordinates[rows, : values.shape[1]] = values
    return coordinates


# ---------------------------------------------------------------- scanning


def scan(data: bytes | Buffer) -> PickleScan | None:
    """The row runs of a pickle and a shorter pickle without them; None when it is not one to scan.

    The scan holds on to a buffer and leaves it without frames.
    """
    buffer = Buffer([data], len(data)) if isinstance(data, bytes) else data
    try:
        return _Scanner(buffer).run()
    except IrregularError:
        return None


class _Scanner:
    def __init__(self, buffer: Buffer) -> None:
        self.view = PickleView(buffer)
        self.size_index = -1
        self.tables: list[Table] = []
        self.attempts = 0
        self.ahead: Future[Table | None] | None = None
        self.row_runs: list[RowRun] = []
        self.references: list[IntArray] = []
        self.single: list[OneChunk] = []
        self.first_entries = array("q")  # memo index of each row run's first entry, and after its last
        self.behind_entries = array("q")
        self.left_out = array("q", [0])  # memo entries of the row runs before each, and of all
        self.named: dict[bytes, int] = {}  # memo indices of what planned items name
        self.has_plans = False
        self.given: dict[tuple[int, ...], bytes] = {}  # what gets the names of a table
        self.entries = Table((), (0,), [], None, None, None, {}, set())
        self.entry_count = self.entry_end = 0  # rows so far, and the byte behind them
        self.entry_texts = io.BytesIO()  # a NUL after each
        self.entry_tail = b""  # what stands behind the text of each key
        self.entry_keys: dict[int, tuple[IntArray, IntArray]] = {}  # first row -> where keys begin, their lengths

    def run(self) -> PickleScan:
        """Step over the opcodes outside of row runs, from the first byte to STOP."""
        body, cuts = self.view.body, [*self.view.cuts.tolist(), self.view.end]
        row_classes: dict[int, int] = {}
        pieces: list[bytes] = []
        at, memo, copied, next_cut, cut = 2, 0, 0, 1, cuts[0]
        while True:
            while at >= cut:
                if at > cut or cut == self.view.end:
                    raise IrregularError
                cut, next_cut = cuts[next_cut], next_cut + 1
            op = body[at]
            if op == MEMOIZE:
                memo += 1
                at += 1
            elif op == 0x68 or op == 0x6A:
                width = 2 if op == 0x68 else 5
                index = body[at + 1] if op == 0x68 else int.from_bytes(body[at + 1 : at + 5], "little")
                if index in row_classes and (table := self._table_at(at, index, row_classes[index])):
                    first, count, end, refers = table.row_runs[at]
                    entries = int(table.entries[first + count] - table.entries[first])
                    pieces += body[copied:at], self._placeholder(RowRun(table, first, count), memo, entries, refers)
                    memo += entries
                    at = copied = end
                    next_cut = bisect_left(cuts, end)
                    cut, next_cut = cuts[next_cut], next_cut + 1
                    continue
                if self.left_out[-1] and (reference := self._reference(index)):
                    pieces += body[copied:at], reference
                    copied = at + width
                at += width
            elif op == 0x8C:
                length = body[at + 1]
                if length < 15 and (text := body[at + 2 : at + 2 + length]) in _PLAN_NAMES:
                    self.named[text] = memo
                if self.entry_tail and (row_run := self._entries_at(at)):
                    entries = 2 * row_run.count
                    pieces += body[copied:at], self._placeholder(row_run, memo, entries, False)
                    memo += entries
                    at = copied = self.entry_end
                    next_cut = bisect_left(cuts, at)
                    cut, next_cut = cuts[next_cut], next_cut + 1
                    continue
                at += 2 + length
            elif op in LENGTH:
                if op == 0x93:
                    head = body[max(at - 32, 0) : at]
                    name = next((name for name in OBJECTS_PER_ROW if head.endswith(name)), None)
                    if name:
                        row_classes[memo] = OBJECTS_PER_ROW[name]
                    if planned := next((_PLAN_CLASSES[name] for name in _PLAN_CLASSES if head.endswith(name)), None):
                        self.named[planned] = memo
                    elif head.endswith(SIZE_CLASS):
                        self.size_index = memo
                    elif head.endswith(ENTRY_CLASS) and not self.entry_tail:
                        self.entries.names = -1, memo
                        self.entry_tail = b"\x94" + get_opcode(memo) + BARE_OBJECT
                at += LENGTH[op]
            elif op in LENGTH_BYTES:
                width = LENGTH_BYTES[op]
                at += 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "little")
            elif op == ord(".") and at + 1 == self.view.end and self.row_runs:
                pieces.append(body[copied : self.view.end])
                break
            else:
                raise IrregularError
        if self.entry_keys:
            starts, lengths = map(np.concatenate, zip(*self.entry_keys.values(), strict=True))
            count = len(starts)
            self.entries.columns = [Column(np.full(count, TEXT, np.uint8), starts, np.zeros(count, np.uint8), lengths)]
            self.entries.entries = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
            self.entries.base, self.entries.rows = np.full(count, -1, np.int32), self.entry_texts.getvalue()
            self.tables.append(self.entries)
        self._fill_base()
        return PickleScan(b"".join(pieces), self.view, self.tables, self.row_runs, self.references, self.single)

    def _fill_base(self) -> None:
        """Say of each row run which memo its first entry has, so that GETs of it find their text."""
        for table in self.tables:
            runs_of_table = [
                (s.first, s.count, memo)
                for s, memo in zip(self.row_runs, self.first_entries, strict=True)
                if s.table is table
            ]
            if runs_of_table:
                first, count, memo = np.array(runs_of_table, np.int32).T
                rows = np.repeat(first - np.cumsum(count, dtype=np.int32) + count, count)
                rows += np.arange(len(rows), dtype=np.int32)
                table.base[rows] = np.repeat(memo - table.entries[first], count) + table.entries[rows]
            table.entries = table.referred = None
            for column in table.columns:
                referring = np.flatnonzero((column.kind == GET) & (table.base >= 0))
                if (column.number[referring] >= table.base[referring] + column.memo[referring]).any():
                    raise IrregularError  # refers to what is not there yet

    def _table_at(self, at: int, index: int, objects: int) -> Table | None:
        """The table that has a row run from here on."""
        for table in self.tables:
            if at in table.row_runs:
                return table
            if at in table.alone:
                return None
        if objects == 2 and self.ahead:
            ahead, self.ahead = self.ahead.result(), None
            if ahead:
                self.tables.append(ahead)
                return self._table_at(at, index, objects)
        if index == self.named.get(b"WriteItem"):
            form = None if self.has_plans else planned_items(self.size_index, self.named)
            if form is None:
                return None
            self.has_plans = True
            self.tables.append(read_table(self.view, form, at))
            return self._table_at(at, index, objects)
        if self.attempts < _ATTEMPTS:
            self.attempts += 1
            if form := learn(self.view, at, objects, self.size_index):
                if objects == 1 and not self.tables:
                    # numpy lets go of the interpreter: the records are read at the same time
                    from concurrent.futures import ThreadPoolExecutor

                    with ThreadPoolExecutor(1) as pool:
                        self.ahead = pool.submit(records, self.view, at, self.size_index)
                        self.tables.append(read_table(self.view, form, at))
                else:
                    self.tables.append(read_table(self.view, form, at))
                return self._table_at(at, index, objects)
        return None

    def _entries_at(self, at: int) -> RowRun | None:
        """The row run of bytes entries from here on, whose keys `entry_keys` then has."""
        view, tail, keys = self.view, self.entry_tail, []
        first = at
        for _ in range(2):  # one alone may be set by an opcode that takes one
            behind = at + 2 + view.body[at + 1]
            if view.body[at] != 0x8C or view.body[behind : behind + len(tail)] != tail:
                return None
            at = behind + len(tail)
        at, window = first, _WINDOW[0]
        while True:
            texts = view.body[at : min(at + window, view.end)].split(tail)[:-1]
            length = np.fromiter(map(len, texts), np.int64, len(texts)) - 2
            start = at + 2 + np.cumsum(length + (2 + len(tail))) - (length + (2 + len(tail)))
            is_key = (length >= 0) & (view.byte[start - 2] == 0x8C) & (view.byte[start - 1] == length)
            sound = len(texts) if is_key.all() else int(is_key.argmin())
            if sound:
                self.entry_texts.write(b"\0".join([text[2:] for text in texts[:sound]] + [b""]))
                keys.append((start[:sound], length[:sound]))
                at = int(start[sound - 1] + length[sound - 1]) + len(tail)
            if not sound or sound < len(texts):
                break
            window = min(2 * window, _WINDOW[1])
        start, length = map(np.concatenate, zip(*keys, strict=True))
        cuts = view.cuts[slice(*np.searchsorted(view.cuts, (first, at)))]
        row = np.searchsorted(start - 2, cuts, "right") - 1
        beyond = cuts - (start + length)[row]  # how far behind the text; its opcode and that of the GET are whole
        whole = (cuts == start[row] - 2) | (beyond == 0) | (beyond == 1) | (beyond >= len(tail) - len(BARE_OBJECT))
        if not whole.all():
            raise IrregularError
        self.entry_keys[self.entry_count] = start, length
        self.entry_count, self.entry_end = self.entry_count + len(start), at
        return RowRun(self.entries, self.entry_count - len(start), len(start))

    def _placeholder(self, row_run: RowRun, memo: int, entries: int, refers: bool) -> bytes:
        """The opcodes that take the place of a row run."""
        table = row_run.table
        outside = self._outside(row_run, memo) if refers else np.zeros(0, np.int64)
        number = len(self.row_runs)
        if table.names not in self.given:
            named = (b"N" if index < 0 else get_opcode(self._mapped(index)) for index in table.names)
            self.given[table.names] = b"".join(named)
        given = self.given[table.names]
        mapped = outside - np.array(self.left_out, np.int64)[self._run_before(outside) + 1]
        gets = np.zeros(len(mapped), [("opcode", "u1"), ("index", "<u4")])
        gets["opcode"], gets["index"] = ord("j"), mapped
        self.row_runs.append(row_run)
        self.references.append(outside)
        self.first_entries.append(memo)
        self.behind_entries.append(memo + entries)
        self.left_out.append(self.left_out[-1] + entries)
        in_list = len(table.attributes) < 2 and table is not self.entries
        behind = b"NQ" if in_list else b"NQ\x89QNQ"  # as a value, then a pair of its own
        return b"(J" + number.to_bytes(4, "little") + given + gets.tobytes() + b"tQ" + behind

    def _outside(self, row_run: RowRun, memo: int) -> IntArray:
        """int64 [r], ascending: the memo indices before it and outside of all row runs that its rows refer to."""
        table, rows = row_run.table, slice(row_run.first, row_run.first + row_run.count)
        indices = distinct(table.referred[rows].ravel()).astype(np.int64)
        indices = indices[(indices >= 0) & (indices < memo)]
        if not self.row_runs:
            return indices
        at = self._run_before(indices)
        return indices[(at < 0) | (indices >= np.array(self.behind_entries)[at])]

    def _run_before(self, indices: IntArray) -> IntArray:
        """int64 [n], the last row run that begins at each memo index or before it; -1 without one."""
        return np.searchsorted(np.array(self.first_entries, np.int64), indices, "right") - 1

    def _reference(self, index: int) -> bytes:
        """The opcodes that take the place of a GET outside of all row runs; empty where it stays as it is."""
        at = bisect_right(self.first_entries, index)
        if at and index < self.behind_entries[at - 1]:
            table, first, count = (run := self.row_runs[at - 1]).table, run.first, run.count
            if table is self.entries:
                row, is_object = divmod(index - self.first_entries[at - 1], 2)
                if is_object:
                    raise IrregularError
                start, length = (int(column[row]) for column in self.entry_keys[first])
                return self.view.body[start - 2 : start + length]
            entries = table.entries[first : first + count]
            entry = index - self.first_entries[at - 1] + int(entries[0])
            row = int(np.searchsorted(entries, entry))
            if len(table.attributes) != 1 or row == count or entries[row] != entry:
                raise IrregularError
            self.single.append(OneChunk(table, first + row))
            return b"J" + (len(self.single) - 1).to_bytes(4, "little") + b"Q"
        return get_opcode(index - self.left_out[at]) if self.left_out[at] else b""

    def _mapped(self, index: int) -> int:
        """A memo index as it is in the shorter pickle."""
        at = bisect_right(self.first_entries, index)
        if at and index < self.behind_entries[at - 1]:
            raise IrregularError
        return index - self.left_out[at]
