"""The regular row runs of a metadata pickle as columns, without an object for each row.

All but a thousandth of a large `.metadata` is one of two rows again and again: a ChunkStorageMetadata, or a
MetadataIndex with its _StorageInfo. `scan` reads such rows with numpy and writes a shorter pickle, in which each
row run of them is one persistent id. The C unpickler then reads that one and stays the judge of everything else.

What keeps the two pickles equal in meaning:

- Every opcode outside of a row run is stepped over one by one from the first byte on, so a row run begins at an opcode;
  its rows are proven to end at one. An opcode that no metadata needs (POP, DUP, PUT, GLOBAL, ...) ends the scan.
- The memo entries of a row run are left out, and the indices of later ones are lowered by their number. A GET outside
  of a row run that refers into one ends the scan.
- The class, the attribute names and whatever else a row takes from the memo are handed to `Scan.persistent_load` and
  compared with the stand-ins in `Scan.finish`.
- A row run leaves two objects on the stack, itself and `END`, so an opcode that takes one object for a row fails.

Whoever scans must find each row run where it belongs, or else read the original pickle.

Source:
    pickle protocols 4 and 5 as CPython 3.8 - 3.14 writes them: everything in frames, MEMOIZE, no PUT
"""

from __future__ import annotations

import io
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ckptlint.model.files import Names
from ckptlint.model.layout import COORDINATE_LIMIT, IntArray
from ckptlint.progress import tell

if TYPE_CHECKING:
    from concurrent.futures import Future

WORTHWHILE = 1024**2
"""Bytes from which on a scan is tried; a smaller pickle is read in milliseconds anyway."""

_BLOCK = 1 << 15  # rows read at once: their columns stay in the processor's cache
_AXES = 8  # a Size with more is left to the unpickler
_PADDING = 64  # bytes that may be read behind the end
_ATTEMPTS = 16  # rows that a form is learned from
_ATTRIBUTES = 16

_INT, _NONE, _TEXT, _GET, _SIZE = 1, 2, 3, 4, 5
_KIND = np.zeros(256, np.uint8)
_KIND[list(b"KMJ\x8a")] = _INT
_KIND[ord("N")] = _NONE
_KIND[list(b"\x8cX")] = _TEXT
_KIND[list(b"hj")] = _GET

_MEMOIZE = 0x94
_OBJECT = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_REDUCED = b"\x94\x85\x94R\x94"  # behind the tuple of a torch.Size: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE
_BUILT = b"ub"  # SETITEMS BUILD
_OBJECTS_PER_ROW = {b"\x8c\x14ChunkStorageMetadata\x94": 1, b"\x8c\rMetadataIndex\x94": 2}
_INDEX_CLASS = b"\x8c\rMetadataIndex\x94"
_SIZE_CLASS = b"\x8c\x04Size\x94"

# bytes of an opcode with its argument, for those that may stand outside of a row run
_LENGTH = {
    **dict.fromkeys(b"\x94)]}(N\x88\x89\x85\x86\x87teasubR\x81\x8f\x90\x91\x93", 1),
    **dict.fromkeys(b"Kh", 2),
    ord("M"): 3,
    ord("J"): 5,
    ord("j"): 5,
    ord("G"): 9,
}
_LENGTH_BYTES = {ord("C"): 1, ord("B"): 4, ord("X"): 4, 0x8C: 1, 0x8D: 8, 0x8E: 8, 0x8A: 1}


class IrregularError(Exception):
    """The pickle is not one to scan; the unpickler is to read it whole."""


class _End:
    """What a row run leaves on the stack behind itself."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("no row")


END = _End()


@dataclass(slots=True)
class _Column:
    """One attribute of many rows.

    Attributes:
        kind: uint8 [n], an integer, None, a text, a reference to the memo or a torch.Size.
        number: int8 to int64 [n], the integer, the text's first byte, the memo index referred to, the rank of the
            Size.
        memo: uint8 [n], memo index of the text or the Size, counted from the first entry of the row.
        length: int32 [n], bytes of the text; None without any.
        coordinates: int8 to int64 [n, d], the Size, zeros behind its rank; None without any.
    """

    kind: Any
    number: Any
    memo: Any
    length: Any = None
    coordinates: Any = None

    @classmethod
    def empty(cls, count: int) -> _Column:
        return cls(np.zeros(count, np.uint8), np.zeros(count, np.int8), np.zeros(count, np.uint8))

    def put(self, rows: slice, values: _Values, memos: Any) -> None:
        """Take the values of a block of rows; `memos` entries come before them in their rows."""
        count = len(self.kind)
        self.kind[rows], self.memo[rows] = values.kind, memos + values.memo
        self.number = _wide_enough(self.number, values.number)
        self.number[rows] = values.number
        if values.length is not None:
            self.length = np.zeros(count, np.int32) if self.length is None else self.length
            self.length[rows] = values.length
        if values.coordinates is not None:
            wide = values.coordinates.shape[1]
            if self.coordinates is None:
                self.coordinates = np.zeros((count, wide), np.int8)
            elif self.coordinates.shape[1] < wide:
                self.coordinates = np.pad(self.coordinates, ((0, 0), (0, wide - self.coordinates.shape[1])))
            self.coordinates = _wide_enough(self.coordinates, values.coordinates)
            self.coordinates[rows, :wide] = values.coordinates


def _wide_enough(column: Any, values: IntArray) -> Any:
    """The column, in wider integers if the values need them: most fit 8 to 32 bits of the 64."""
    least, most = values.min(initial=0), values.max(initial=0)
    while least < np.iinfo(column.dtype).min or most > np.iinfo(column.dtype).max:
        column = column.astype(f"i{2 * column.itemsize}")
    return column


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
        rank: int8 [n], number of axes of the offset, -1 for none.
        offsets: int8 to int64 [n, d], zeros behind the rank.
        paths: the distinct relative paths; path: int32 [n], position in it.
        byte_offset, byte_length: int8 to int64 [n], bytes.
    """

    names: Names
    name: Any
    hint: Any
    rank: Any
    offsets: Any
    paths: Names
    path: Any
    byte_offset: Any
    byte_length: Any


@dataclass(slots=True, eq=False)
class Table:
    """All rows of one form.

    Attributes:
        names: memo indices of torch.Size (-1 when there is none), then for each object its class and attributes.
        attributes: number of attributes of each object.
        entries: int32 [n + 1], memo entries of all rows before a row; None once `base` is known.
        base: int32 [n], memo index of a row's first entry; -1 for a row outside of any row run.
        row runs: first byte -> first row, number of rows, byte behind the last, whether any refers to the memo.
        alone: first bytes of the rows that no other follows.
        values: what the unpickler found under `names`, once it came across the first row run.
        rows: what the rows say, once the unpickler has confirmed them.
    """

    names: tuple[int, ...]
    attributes: tuple[int, ...]
    columns: list[_Column]
    entries: Any
    base: Any
    row_runs: dict[int, tuple[int, int, int, bool]]
    alone: set[int]
    values: tuple[Any, ...] = ()
    rows: ChunkRows | RecordRows | None = None

    def objects(self) -> Iterator[tuple[Any, dict[Any, _Column]]]:
        """Class and columns by attribute, for each object of a row."""
        name, column = 1, 0
        for count in self.attributes:
            keys = self.values[name + 1 : name + 1 + count]
            yield self.values[name], dict(zip(keys, self.columns[column : column + count], strict=True))
            name, column = name + 1 + count, column + count


@dataclass(slots=True, eq=False)
class RowRun:
    """Consecutive rows of a table, from `first` on, where the row run stands."""

    table: Table
    first: int
    count: int

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("no row")


@dataclass(slots=True)
class Scan:
    """What `scan` made of a pickle.

    Attributes:
        pickle: the shorter pickle.
        view: the original, until the rows are read.
        row runs: in the order of the stream.
        references: for each row run, the memo indices outside of all row runs that its rows refer to.
    """

    pickle: bytes
    view: _View | None
    tables: list[Table]
    row_runs: list[RowRun]
    references: list[tuple[int, ...]]
    outside: dict[int, Any] = field(default_factory=dict)
    met: int = 0

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a row run or behind one.

        Raises:
            IrregularError: it comes out of turn, or its rows would mean something else than those before.
        """
        if pid is None:
            return END
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
        self.outside.update(zip(references, pid[named:], strict=True))
        return row_run

    def finish(self, kind_of: Callable[[Any], str], size: Any) -> None:
        """Give each table its rows, now that the unpickler has met all row runs.

        Args:
            kind_of: the class that a stand-in stands for.
            size: the stand-in of torch.Size.

        Raises:
            IrregularError: the rows are something else than they looked like.
        """
        if self.met < len(self.row_runs):
            raise IrregularError
        for table in self.tables:
            if not table.values:
                continue
            if table.names[0] >= 0 and table.values[0] is not size:
                raise IrregularError
            objects = [(kind_of(kind), columns) for kind, columns in table.objects()]
            kinds, attributes = [kind for kind, _ in objects], [columns for _, columns in objects]
            if kinds == ["ChunkStorageMetadata"] and attributes[0].keys() == {"offsets", "sizes"}:
                table.rows = self._chunk_rows(table, attributes[0])
            elif kinds == ["MetadataIndex", "_StorageInfo"]:
                table.rows = self._record_rows(table, *attributes)
            else:
                raise IrregularError
        self.view = None
        for table in self.tables:  # what is left of them are the rows
            table.columns, table.base = [], None

    def _chunk_rows(self, table: Table, chunk: dict[Any, _Column]) -> ChunkRows:
        return ChunkRows(*self._sizes(table, chunk["offsets"]), *self._sizes(table, chunk["sizes"]))

    def _record_rows(self, table: Table, index: dict[Any, _Column], info: dict[Any, _Column]) -> RecordRows:
        optional = {"transform_descriptors"} & info.keys()
        if index.keys() - {"offset"} != {"fqn", "index"} or info.keys() - optional != {
            "relative_path",
            "offset",
            "length",
        }:
            raise IrregularError
        if any((info[key].kind[table.base >= 0] != _NONE).any() for key in optional):
            raise IrregularError
        ids, names = self._texts(table, index["fqn"])
        path, paths = self._texts(table, info["relative_path"])
        if "offset" in index:
            rank, offsets = self._sizes(table, index["offset"])
        else:
            rank, offsets = np.full(len(ids), -1, np.int8), np.zeros((len(ids), 0), np.int32)
        starts, lengths = (self._integers(table, info[key]) for key in ("offset", "length"))
        hint = np.where(index["index"].kind == _INT, index["index"].number, -1)
        return RecordRows(names, ids, hint, rank, offsets, paths, path, starts, lengths)

    def _integers(self, table: Table, column: _Column) -> Any:
        """int8 to int64 [n], an attribute that is an integer in every row of a row run.

        Raises:
            IrregularError: in some row it is none.
        """
        if (column.kind[table.base >= 0] != _INT).any():
            raise IrregularError
        return column.number

    def _texts(self, table: Table, column: _Column) -> tuple[Any, Names]:
        """An attribute that is a text in every row of a row run: int32 [n], positions among the distinct texts.

        Raises:
            IrregularError: in some row it is none, or a text is nothing that `Names` holds.
        """
        rows = table.base >= 0
        spelled, referring = rows & (column.kind == _TEXT), np.flatnonzero(rows & (column.kind == _GET))
        if np.count_nonzero(rows) != np.count_nonzero(spelled) + len(referring):
            raise IrregularError
        assert self.view is not None
        ids = np.zeros(len(rows), np.int32)
        start = length = np.zeros(0, np.int32)
        if column.length is not None:
            ids[spelled], start, length = _distinct(self.view, column.number[spelled], column.length[spelled])
        indices, which = _numbered(column.number[referring])
        sought = self._texts_at(indices) if len(referring) else []
        place = dict.fromkeys(sought, -1)
        whole = io.BytesIO()
        for first in range(0, len(start), _BLOCK):
            texts = _slices(self.view, start[first : first + _BLOCK], length[first : first + _BLOCK])
            whole.write(_joined(texts))
            if place:
                place |= {text: number for number, text in enumerate(texts, first) if text in place}
        only_referred = [text for text, number in place.items() if number < 0]
        place |= {text: number for number, text in enumerate(only_referred, len(start))}
        whole.write(_joined(only_referred))
        if len(referring):
            ids[referring] = np.array([place[text] for text in sought], np.int32)[which]
        lengths = np.concatenate([length, np.array([*map(len, only_referred)], np.int32)])
        names = Names(whole.getvalue(), np.cumsum(lengths + 1, dtype=np.int64) - 1)
        if names.text.count(b"\0") != len(names):
            raise IrregularError
        return ids, names

    def _sizes(self, table: Table, column: _Column) -> tuple[Any, Any]:
        """An attribute that is a torch.Size or None in every row: rank (-1 for None) and coordinates [n, d].

        Raises:
            IrregularError: in some row it is something else.
        """
        rows = table.base >= 0
        kind = column.kind
        rank = np.where(kind == _SIZE, column.number, -1).astype(np.int8)
        coordinates = np.zeros((len(rows), 0), np.int8) if column.coordinates is None else column.coordinates
        referring = np.flatnonzero(rows & (kind == _GET))
        if (rows & (kind != _SIZE) & (kind != _NONE) & (kind != _GET)).any():
            raise IrregularError
        if len(referring):
            found_rank, found = self._sizes_at(column.number[referring])
            if (wider := found.shape[1] - coordinates.shape[1]) > 0:
                coordinates = np.pad(coordinates, ((0, 0), (0, wider)))
            rank[referring] = found_rank
            coordinates = _wide_enough(coordinates, found)
            coordinates[referring, : found.shape[1]] = found
        if coordinates.size and (coordinates.max() >= COORDINATE_LIMIT or coordinates.min() <= -COORDINATE_LIMIT):
            raise IrregularError
        return rank, coordinates

    def _texts_at(self, indices: IntArray) -> list[bytes]:
        """The texts under these memo indices."""
        assert self.view is not None
        found: dict[int, bytes] = {}
        for column, entries, rows in self._entries(_TEXT):
            at = np.minimum(np.searchsorted(entries, indices), len(entries) - 1)
            hit = np.flatnonzero(entries[at] == indices)
            source = rows[at[hit]]
            texts = _slices(self.view, column.number[source], column.length[source])
            found |= zip(indices[hit].tolist(), texts, strict=True)
        for index in indices.tolist():
            if index not in found:
                text = self.outside.get(index)
                if not isinstance(text, str):
                    raise IrregularError
                found[index] = text.encode("utf-8", "surrogatepass")
        return [found[index] for index in indices.tolist()]

    def _sizes_at(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Ranks and coordinates of the Sizes under these memo indices."""
        rank, coordinates = np.full(len(indices), -2, np.int64), np.zeros((len(indices), _AXES), np.int64)
        for column, entries, rows in self._entries(_SIZE):
            at = np.minimum(np.searchsorted(entries, indices), len(entries) - 1)
            hit = np.flatnonzero(entries[at] == indices)
            source = rows[at[hit]]
            rank[hit] = column.number[source]
            assert column.coordinates is not None
            coordinates[hit, : column.coordinates.shape[1]] = column.coordinates[source]
        for row in np.flatnonzero(rank == -2).tolist():
            size = self.outside.get(int(indices[row]))
            if not isinstance(size, tuple) or len(size) > _AXES or not {int} >= set(map(type, size)):
                raise IrregularError
            if any(abs(extent) >= COORDINATE_LIMIT for extent in size):
                raise IrregularError
            rank[row] = len(size)
            coordinates[row, : len(size)] = size
        return rank, coordinates[:, : max(int(rank.max()), 0)]

    def _entries(self, kind: int) -> Iterator[tuple[_Column, Any, IntArray]]:
        """For each column, the memo indices of its texts or Sizes, ascending, and their rows."""
        for table in self.tables:
            for column in table.columns:
                rows = np.flatnonzero((column.kind == kind) & (table.base >= 0))
                if len(rows):
                    yield column, table.base[rows] + column.memo[rows], rows


# ---------------------------------------------------------------- scanning


def scan(data: bytes | Buffer) -> Scan | None:
    """The row runs of a pickle and a shorter pickle without them; None when it is not one to scan.

    The scan holds on to a buffer and leaves it without frames.
    """
    buffer = Buffer([data], len(data)) if isinstance(data, bytes) else data
    try:
        return _Scanner(buffer).run()
    except IrregularError:
        return None


class Buffer:
    """A pickle in memory of its own, from which `scan` takes the frames without a copy.

    Attributes:
        body: the bytes, then some zero bytes.
        end: number of bytes.
        cuts: where a frame began that was taken out, ascending.
    """

    def __init__(self, blocks: Iterable[bytes], size: int) -> None:
        """The bytes of some blocks, at most `size` of them."""
        self.body, self.end, self.cuts = _zeros(size + _PADDING), 0, list[int]()
        for block in blocks:
            part = block[: size - self.end]
            self.body[self.end : self.end + len(part)] = part
            self.end += len(part)

    def take_out_frames(self) -> None:
        """Leave out the opcodes of the frames, which must follow one another from behind the protocol to the end.

        Raises:
            IrregularError: they do not; the buffer is then as it was.
        """
        body, at, frames = self.body, 2, []
        if self.end < 12 or body[0] != 0x80 or body[1] not in (4, 5):
            raise IrregularError
        while at < self.end:
            length = int.from_bytes(body[at + 1 : at + 9], "little")
            if body[at] != 0x95 or at + 9 + length > self.end:
                raise IrregularError
            frames.append((at + 9, length))
            at += 9 + length
        end = 2
        for start, length in frames:
            self.cuts.append(end)
            body.move(end, start, length)
            end += length
        body[end : self.end] = bytes(self.end - end)
        self.end = end

    def __bytes__(self) -> bytes:
        """The pickle as it was, frames included."""
        if not self.cuts:
            return self.body[: self.end]
        whole, body = io.BytesIO(), memoryview(self.body)
        whole.write(body[:2])
        for start, stop in pairwise([*self.cuts, self.end]):
            whole.write(b"\x95" + (stop - start).to_bytes(8, "little"))
            whole.write(body[start:stop])
        return whole.getvalue()


class _View:
    """The pickle without its frames.

    Attributes:
        body: the opcodes, then some zero bytes.
        end: number of bytes of the opcodes.
        byte: uint8 [end + padding].
        word: uint64 [...], the eight bytes from each position on.
        cuts: int64 [f], where a frame began; each must be the start of an opcode.
    """

    def __init__(self, buffer: Buffer) -> None:
        buffer.take_out_frames()
        self.body, self.end = buffer.body, buffer.end
        self.byte = np.frombuffer(self.body, np.uint8)
        self.word: Any = np.ndarray((len(self.body) - 7,), "<u8", self.body, strides=(1,))
        self.cuts = np.array(buffer.cuts, np.int64)


def _zeros(count: int) -> mmap.mmap:
    """Memory in huge pages where the system has them: a page fault for each 4 KiB would take longer than the copy."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, count)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Scanner:
    def __init__(self, buffer: Buffer) -> None:
        self.view = _View(buffer)
        self.size_index = -1
        self.tables: list[Table] = []
        self.attempts = 0
        self.ahead: Future[Table | None] | None = None
        self.row_runs: list[RowRun] = []
        self.references: list[tuple[int, ...]] = []
        self.first_entries: list[int] = []  # memo index of each row run's first entry, and behind its last
        self.behind_entries: list[int] = []
        self.left_out = [0]  # memo entries of the row runs before each, and of all

    def run(self) -> Scan:
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
            if op == _MEMOIZE:
                memo += 1
                at += 1
            elif op == 0x68 or op == 0x6A:
                width = 2 if op == 0x68 else 5
                index = body[at + 1] if op == 0x68 else int.from_bytes(body[at + 1 : at + 5], "little")
                if index in row_classes and (table := self._table_at(at, row_classes[index])):
                    first, count, end, refers = table.row_runs[at]
                    entries = int(table.entries[first + count] - table.entries[first])
                    pieces += body[copied:at], self._placeholder(RowRun(table, first, count), memo, entries, refers)
                    memo += entries
                    at = copied = end
                    while cut < end:
                        cut, next_cut = cuts[next_cut], next_cut + 1
                    continue
                if (mapped := self._mapped(index)) != index:
                    pieces += body[copied:at], _get(mapped)
                    copied = at + width
                at += width
            elif op == 0x8C:
                at += 2 + body[at + 1]
            elif op in _LENGTH:
                if op == 0x93:
                    head = body[max(at - 32, 0) : at]
                    name = next((name for name in _OBJECTS_PER_ROW if head.endswith(name)), None)
                    if name:
                        row_classes[memo] = _OBJECTS_PER_ROW[name]
                    elif head.endswith(_SIZE_CLASS):
                        self.size_index = memo
                at += _LENGTH[op]
            elif op in _LENGTH_BYTES:
                width = _LENGTH_BYTES[op]
                at += 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "little")
            elif op == ord(".") and at + 1 == self.view.end and self.row_runs:
                pieces.append(body[copied : self.view.end])
                break
            else:
                raise IrregularError
        self._fill_base()
        return Scan(b"".join(pieces), self.view, self.tables, self.row_runs, self.references)

    def _fill_base(self) -> None:
        for table in self.tables:
            own = [
                (s.first, s.count, memo)
                for s, memo in zip(self.row_runs, self.first_entries, strict=True)
                if s.table is table
            ]
            if own:
                first, count, memo = np.array(own, np.int32).T
                rows = np.repeat(first - np.cumsum(count, dtype=np.int32) + count, count)
                rows += np.arange(len(rows), dtype=np.int32)
                table.base[rows] = np.repeat(memo - table.entries[first], count) + table.entries[rows]
            table.entries = None

    def _table_at(self, at: int, objects: int) -> Table | None:
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
                return self._table_at(at, objects)
        if self.attempts < _ATTEMPTS:
            self.attempts += 1
            if form := _learn(self.view, at, objects, self.size_index):
                if objects == 1 and not self.tables:
                    # numpy lets go of the interpreter: the records are read at the same time
                    from concurrent.futures import ThreadPoolExecutor

                    with ThreadPoolExecutor(1) as pool:
                        self.ahead = pool.submit(_records, self.view, at, self.size_index)
                        self.tables.append(_read_table(self.view, form, at))
                else:
                    self.tables.append(_read_table(self.view, form, at))
                return self._table_at(at, objects)
        return None

    def _placeholder(self, row_run: RowRun, memo: int, entries: int, refers: bool) -> bytes:
        """The opcodes that take the place of a row run."""
        table = row_run.table
        outside = self._outside(row_run, memo) if refers else ()
        number = len(self.row_runs)
        self.row_runs.append(row_run)
        self.references.append(outside)
        self.first_entries.append(memo)
        self.behind_entries.append(memo + entries)
        self.left_out.append(self.left_out[-1] + entries)
        given = b"".join(b"N" if index < 0 else _get(self._mapped(index)) for index in (*table.names, *outside))
        behind = b"NQ" if len(table.attributes) == 1 else b"NQNQN"  # in a list; as a value, then a key
        return b"(J" + number.to_bytes(4, "little") + given + b"tQ" + behind

    def _outside(self, row_run: RowRun, memo: int) -> tuple[int, ...]:
        """The memo indices outside of all row runs that the rows refer to."""
        table, rows = row_run.table, slice(row_run.first, row_run.first + row_run.count)
        base = memo + table.entries[rows] - table.entries[row_run.first]
        found: list[int] = []
        for column in table.columns:
            referring = column.kind[rows] == _GET
            indices = column.number[rows][referring]
            if (indices >= (base + column.memo[rows])[referring]).any():
                raise IrregularError  # refers to what is not there yet
            found += dict.fromkeys(indices.tolist())
        return tuple(index for index in dict.fromkeys(found) if index < memo and not self._is_inside(index))

    def _is_inside(self, index: int) -> bool:
        """Whether a memo entry belongs to a row run."""
        at = bisect_right(self.first_entries, index) - 1
        return at >= 0 and index < self.behind_entries[at]

    def _mapped(self, index: int) -> int:
        """A memo index as it is in the shorter pickle."""
        at = bisect_right(self.first_entries, index)
        if at and index < self.behind_entries[at - 1]:
            raise IrregularError
        return index - self.left_out[at]


# ---------------------------------------------------------------- the form of a row


@dataclass(frozen=True, slots=True)
class _Form:
    """How a row is written: constant opcodes, a value, constant opcodes, ..., constant opcodes.

    Attributes:
        constants: the opcodes before each value and behind the last.
        memos: memo entries that each of them makes.
    """

    names: tuple[int, ...]
    attributes: tuple[int, ...]
    constants: tuple[bytes, ...]
    memos: tuple[int, ...]


def _learn(view: _View, at: int, objects: int, size_index: int) -> _Form | None:
    """The form of the row that begins here; None when it is not regular."""
    body = view.body
    names, attributes, constants, memos = [size_index], [], [], []
    constant, made = b"", 0
    for _ in range(objects):
        opcode, index = _get_at(body, at)
        at += len(opcode)
        if not opcode or body[at : at + len(_OBJECT)] != _OBJECT:
            return None
        constant, made, at = constant + opcode + _OBJECT, made + 2, at + len(_OBJECT)
        names.append(index)
        count = 0
        while body[at : at + len(_BUILT)] != _BUILT:
            opcode, index = _get_at(body, at)
            at += len(opcode)
            if not opcode or count == _ATTRIBUTES:
                return None
            constants.append(constant + opcode)
            memos.append(made)
            names.append(index)
            value = _read_values(view, np.array([at]), size_index, lambda at: None)
            if not value.valid[0]:
                return None
            at, count, constant, made = int(value.end[0]), count + 1, b"", 0
        attributes.append(count)
        constant, at = constant + _BUILT, at + len(_BUILT)
    constants.append(constant)
    return _Form(tuple(names), tuple(attributes), tuple(constants), (*memos, 0))


def _get_at(body: mmap.mmap, at: int) -> tuple[bytes, int]:
    """The GET opcode here and its index; nothing when it is another opcode."""
    width = {0x68: 2, 0x6A: 5}.get(body[at], 0)
    opcode = body[at : at + width]
    return opcode, int.from_bytes(opcode[1:], "little")


def _get(index: int) -> bytes:
    return bytes([0x68, index]) if index < 256 else b"j" + index.to_bytes(4, "little")


# ---------------------------------------------------------------- many rows at once


def _read_table(view: _View, form: _Form, at: int) -> Table:
    """All rows of this form from here on."""
    start = _occurrences(view, form.constants[0], at)
    count = len(start)
    end, entries, valid = np.zeros(count, np.int32), np.zeros(count + 1, np.int32), np.zeros(count, bool)
    memos = entries[1:]
    columns = [_Column.empty(count) for _ in form.constants[1:]]
    for first in range(0, count, _BLOCK):
        tell("chunks and records", first, count)
        rows = slice(first, min(first + _BLOCK, count))
        end[rows], memos[rows], valid[rows] = _read_rows(view, form, start, rows, columns)
    linked = valid[1:] & valid[:-1] & (end[:-1] == start[1:])
    firsts = np.flatnonzero(valid & ~np.concatenate([[False], linked]))
    behind = np.flatnonzero(valid & ~np.concatenate([linked, [False]])) + 1
    many = behind - firsts > 1  # a row alone may be appended by an opcode that takes one object
    alone = set(start[firsts[~many]].tolist())
    firsts, behind = firsts[many], behind[many]
    refers = np.zeros(count + 1, np.int32)
    for column in columns:
        refers[1:] |= column.kind == _GET
    np.cumsum(refers, out=refers)
    described = firsts, behind - firsts, end[behind - 1], refers[behind] > refers[firsts]
    row_runs = dict(zip(start[firsts].tolist(), zip(*(part.tolist() for part in described), strict=True), strict=True))
    np.cumsum(entries, out=entries)
    return Table(form.names, form.attributes, columns, entries, np.full(count, -1, np.int32), row_runs, alone)


def _records(view: _View, at: int, size_index: int) -> Table | None:
    """The records behind the chunks at `at`, if their first rows are found; a guess that `_Scanner.run` confirms."""
    at = view.body.find(_INDEX_CLASS, at)
    for _ in range(4):
        at = view.body.find(_OBJECT, at + 1) if at >= 0 else -1
        for start in (at - 5, at - 2) if at >= 0 else ():
            if form := _learn(view, start, 2, size_index):
                return _read_table(view, form, start)
    return None


def _occurrences(view: _View, constant: bytes, at: int) -> Any:
    """int32 [n], ascending: the positions from `at` on where a row may begin."""
    behind = view.body.find(_INDEX_CLASS, at)  # chunks come before, records behind it
    end = view.end if behind < 0 else behind
    wanted = np.uint64(int.from_bytes(constant[:8], "little"))
    found = []
    for phase in range(8):
        words = np.frombuffer(view.body, "<u8", max(end - at - phase, 0) // 8, at + phase)
        found.append((np.flatnonzero(words == wanted) * 8 + (at + phase)).astype(np.int32))
    return np.sort(np.concatenate(found), kind="stable")  # eight ascending parts: a merge


def _read_rows(view: _View, form: _Form, start: Any, rows: slice, columns: list[_Column]) -> tuple[IntArray, Any, Any]:
    """End, memo entries and validity of a block of rows; their values go into the columns."""
    at = start[rows].astype(np.int64)
    count = len(at)
    valid, memos = np.ones(count, bool), np.zeros(count, np.int32)
    # where a frame began inside of a row: it must have been at an opcode
    near = slice(*np.searchsorted(view.cuts, [at[0], start[rows.stop] if rows.stop < len(start) else view.end]))
    cuts = view.cuts[near]
    holder = np.searchsorted(at, cuts, "right") - 1
    confirmed = np.zeros(len(cuts), bool)

    def opcode_at(position: IntArray) -> None:
        if len(cuts):
            np.logical_or(confirmed, position[holder] == cuts, out=confirmed)

    for constant, made, column in zip(form.constants, form.memos, [*columns, None], strict=True):
        for offset in _opcodes(constant):
            opcode_at(at + offset)
        at = _expect(view, at, valid, constant)
        memos += np.int32(made)
        if column is None:
            break
        opcode_at(at)
        value = _read_values(view, at, form.names[0], opcode_at)
        valid &= value.valid
        column.put(rows, value, memos)
        memos += value.made
        at = np.where(valid, value.end, view.end)
    inside = ~confirmed & (cuts < at[holder])
    valid[holder[inside]] = False
    return at, memos, valid


def _opcodes(constant: bytes) -> list[int]:
    """Where the opcodes of a constant part begin."""
    starts, at = [], 0
    while at < len(constant):
        starts.append(at)
        at += _LENGTH[constant[at]]
    return starts


def _expect(view: _View, at: IntArray, valid: Any, constant: bytes) -> IntArray:
    """The positions behind the constant bytes; rows where something else stands become invalid."""
    for offset in range(0, len(constant), 8):
        part = constant[offset : offset + 8]
        mask = np.uint64((1 << 8 * len(part)) - 1)
        valid &= (view.word[at + offset] & mask) == np.uint64(int.from_bytes(part, "little"))
    return at + len(constant)


@dataclass(slots=True)
class _Values:
    """Values read at many positions, as in `_Column`; `made` memo entries each, and where they end."""

    kind: Any
    number: IntArray
    length: Any | None
    memo: Any
    made: Any
    coordinates: IntArray | None
    end: IntArray
    valid: Any


def _read_values(view: _View, at: IntArray, size_index: int, opcode_at: Callable[[IntArray], None]) -> _Values:
    """The value that stands at each position."""
    count = len(at)
    op = view.byte[at]
    kind = _KIND[op]
    number, end = np.zeros(count, np.int64), at + 1
    memo, made = np.zeros(count, np.int32), np.zeros(count, np.int32)
    length = coordinates = None
    valid = kind > 0
    present = np.bincount(kind, minlength=6)
    if present[_INT]:
        rows = _where(kind, _INT, present)
        number[rows], end[rows], valid[rows] = _integers(view, at[rows], op[rows])
    if present[_TEXT]:
        rows = _where(kind, _TEXT, present)
        number[rows], end[rows], valid[rows] = _texts(view, at[rows], op[rows])
        length = np.where(kind == _TEXT, end - number - 1, 0)
        opcode_at(np.where(kind == _TEXT, end - 1, at))
        made[rows] = 1
    if present[_GET]:
        rows = _where(kind, _GET, present)
        number[rows], end[rows] = _references(view, at[rows], op[rows])
        kind = np.where((kind == _GET) & (number == size_index), np.uint8(_SIZE), kind)
        if len(rows := np.flatnonzero(kind == _SIZE)):
            size = _Sizes(view, end[rows], lambda part: opcode_at(_placed(at, rows, part)))
            number[rows], end[rows], valid[rows] = size.rank, size.end, size.valid
            made[rows], memo[rows] = size.made, size.made - 1
            coordinates = np.zeros((count, size.coordinates.shape[1]), np.int64)
            coordinates[rows] = size.coordinates
    return _Values(kind, number, length, memo, made, coordinates, end, valid)


def _where(kind: Any, wanted: int, present: Any) -> Any:
    return slice(None) if present[wanted] == len(kind) else np.flatnonzero(kind == wanted)


def _placed(at: IntArray, rows: IntArray, part: IntArray) -> IntArray:
    whole = at.copy()
    whole[rows] = part
    return whole


_WIDTH = np.zeros(256, np.int64)
_MASK = np.zeros(256, np.uint64)
for _op, _bytes in ((ord("K"), 1), (ord("M"), 2), (ord("J"), 4), (ord("h"), 1), (ord("j"), 4)):
    _WIDTH[_op] = _bytes
    _MASK[_op] = (1 << 8 * _bytes) - 1


def _integers(view: _View, at: IntArray, op: Any) -> tuple[IntArray, IntArray, Any]:
    """Value, end and validity of BININT, BININT1, BININT2 and LONG1 opcodes."""
    number = (view.word[at + 1] & _MASK[op]).view(np.int64)
    number -= ((op == ord("J")) & (number >> 31 == 1)).astype(np.int64) << 32
    end = at + 1 + _WIDTH[op]
    valid = np.ones(len(at), bool)
    if len(rows := np.flatnonzero(op == 0x8A)):
        width = view.byte[at[rows] + 1].astype(np.int64)
        valid[rows] = (width >= 1) & (width <= 8)
        width = np.clip(width, 1, 8)
        shift = 8 * (8 - width)
        number[rows] = (view.word[at[rows] + 2] << shift.astype(np.uint64)).view(np.int64) >> shift
        end[rows] = at[rows] + 2 + width
    return number, end, valid


def _texts(view: _View, at: IntArray, op: Any) -> tuple[IntArray, IntArray, Any]:
    """First byte, end (behind their MEMOIZE) and validity of SHORT_BINUNICODE and BINUNICODE opcodes."""
    is_short = op == 0x8C
    word = view.word[at + 1]
    start = at + np.where(is_short, 2, 5)
    end = start + (word & np.where(is_short, np.uint64(0xFF), np.uint64(0xFFFFFFFF))).view(np.int64)
    valid = end < view.end
    end = np.minimum(end, view.end)
    valid &= view.byte[end] == _MEMOIZE
    return start, end + 1, valid


def _references(view: _View, at: IntArray, op: Any) -> tuple[IntArray, IntArray]:
    """Memo index and end of BINGET and LONG_BINGET opcodes."""
    return (view.word[at + 1] & _MASK[op]).view(np.int64), at + 1 + _WIDTH[op]


class _Sizes:
    """torch.Size objects, read from behind the GET of their class on.

    Attributes:
        rank, end, made, valid: for each, with the memo entries made.
        coordinates: int64 [n, d].
    """

    def __init__(self, view: _View, at: IntArray, opcode_at: Callable[[IntArray], None]) -> None:
        count = len(at)
        valid = np.ones(count, bool)
        rank = np.zeros(count, np.int64)
        coordinates = np.zeros((count, _AXES), np.int64)
        opcode_at(at)
        marked = view.byte[at] == ord("(")
        at = at + marked
        rows = np.arange(count)
        for axis in range(_AXES + 1):
            opcode_at(at)
            op = view.byte[at[rows]]
            is_int = _KIND[op] == _INT
            rows, op = rows[is_int], op[is_int]
            if len(rows) == 0 or axis == _AXES:
                valid[rows] = False
                break
            number, end, sound = _integers(view, at[rows], op)
            coordinates[rows, axis] = number
            at[rows] = end
            valid[rows] &= sound
            rank[rows] += 1
        closing = np.frombuffer(b")\x85\x86\x87tttttt", np.uint8)[rank]
        valid &= view.byte[at] == np.where(marked, np.uint8(ord("t")), closing)
        valid &= marked == (rank > 3)
        at = at + 1 - (rank == 0)  # the empty tuple is not memoized: its opcode takes the place of the first MEMOIZE
        word = view.word[at] >> np.uint64(8)
        valid &= (word & np.uint64(0xFFFFFFFF)) == np.uint64(int.from_bytes(_REDUCED[1:], "little"))
        valid &= (rank == 0) | (view.byte[at] == _MEMOIZE)
        for offset in range(len(_REDUCED)):
            opcode_at(at + offset)
        self.rank, self.valid = rank, valid
        self.end = at + len(_REDUCED)
        self.made = (3 - (rank == 0)).astype(np.int32)
        self.coordinates = coordinates[:, : max(int(rank.max()), 1)]


# ---------------------------------------------------------------- many texts at once


def _joined(texts: list[bytes]) -> bytes:
    """The texts with a NUL after each.

    Raises:
        IrregularError: one is no text.
    """
    joined = b"\0".join((*texts, b""))
    try:
        joined.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise IrregularError from None
    return joined


def _slices(view: _View, start: Any, length: Any) -> list[bytes]:
    return list(map(view.body.__getitem__, map(slice, start.tolist(), (start + length).tolist())))


def _numbered(values: Any) -> tuple[Any, Any]:
    """The distinct values, ascending, and int32 [n], the number of each."""
    blocks = [values[first : first + _BLOCK] for first in range(0, len(values), _BLOCK)]
    distinct = np.unique(np.concatenate([values[:0], *map(np.unique, blocks)]))
    numbers = np.zeros(len(values), np.int32)
    for number, block in enumerate(blocks):
        numbers[number * _BLOCK :][: len(block)] = np.searchsorted(distinct, block)
    return distinct, numbers


def _distinct(view: _View, start: Any, length: Any) -> tuple[Any, Any, Any]:
    """int32 [n], the number of each text among the distinct ones, and where these start and how long they are."""
    words = range(-(-int(length.max(initial=0)) // 8))
    blocks = [slice(first, first + _BLOCK) for first in range(0, len(start), _BLOCK)]
    mixed = length.astype(np.uint64)
    for rows in blocks:
        part = mixed[rows]
        for number in words:
            part ^= _word(view, start[rows], length[rows], number)
            part *= _FACTOR
            part ^= part >> np.uint64(29)
    order = np.argsort(mixed)
    mixed = mixed[order]
    is_new = np.ones(len(mixed), bool)
    np.not_equal(mixed[1:], mixed[:-1], out=is_new[1:])
    del mixed
    numbers = np.zeros(len(order), np.int32)
    numbers[order] = np.cumsum(is_new, dtype=np.int32) - np.int32(1)
    examples = order[is_new]
    del order
    example_start, example_length = start[examples], length[examples]
    for rows in blocks:
        same = numbers[rows]
        if (length[rows] != example_length[same]).any() or any(
            (
                _word(view, start[rows], length[rows], number) != _word(view, example_start[same], length[rows], number)
            ).any()
            for number in words
        ):
            raise IrregularError  # two texts with one mix: crafted
    return numbers, example_start, example_length


def _word(view: _View, start: IntArray, length: Any, number: int) -> Any:
    """The text's bytes 8 * number to 8 * number + 7 as one word, zeros behind its end."""
    left = np.clip(length - 8 * number, 0, 8)
    return view.word[np.where(left > 0, start + np.int64(8 * number), 0)] & _FIRST_BYTES[left]


_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
