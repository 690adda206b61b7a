"""Rows of a pickle that all have one form, read with numpy: no object is made for any of them.

A row is opcodes of one object whose constant parts (classes, names of attributes) are the same in every row and whose
values are integers, None, texts, references to the memo, torch.Size, or other objects likewise. `learn` takes the form
from one row, `read_table` reads all rows of it. `columns` confirms what the constant parts mean, and knows where
rows may be.

Source: pickle protocols 4 and 5 as CPython 3.8 - 3.14 writes them: everything in frames, MEMOIZE, no PUT
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ckptlint.model.tiling import IntArray, distinct
from ckptlint.progress import advance

ROWS_AT_ONCE = 1 << 15  # rows read at once: their columns stay in the processor's cache
MOST_AXES = 8  # a Size with more is left to the unpickler
PADDING = 64  # bytes that may be read behind the end
_ATTEMPTS = 16  # rows that a form is learned from
_ATTRIBUTES = 16

INT, NONE, TEXT, GET, SIZE, FLAG, NESTED = 1, 2, 3, 4, 5, 6, 7
_KIND = np.zeros(256, np.uint8)
_KIND[list(b"KMJ\x8a")] = INT
_KIND[ord("N")] = NONE
_KIND[list(b"\x8cX")] = TEXT
_KIND[list(b"hj")] = GET
_KIND[list(b"\x88\x89")] = FLAG

MEMOIZE = 0x94
OBJECT = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_WITH_TUPLE = b")\x81\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE MARK: its state is a tuple
_TUPLE_BUILT = b"t\x94b"  # TUPLE MEMOIZE BUILD
_REDUCED = b"\x94\x85\x94R\x94"  # behind the tuple of a torch.Size: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE
BARE_OBJECT = b")\x81\x94"  # EMPTY_TUPLE NEWOBJ MEMOIZE: without attributes
_BUILT = b"ub"  # SETITEMS BUILD
OBJECTS_PER_ROW = {b"\x8c\x14ChunkStorageMetadata\x94": 1, b"\x8c\rMetadataIndex\x94": 2, b"\x8c\tWriteItem\x94": 1}
INDEX_CLASS = b"\x8c\rMetadataIndex\x94"
_ITEM_CLASS = b"\x8c\tWriteItem\x94"
ENTRY_CLASS = b"\x8c\x14BytesStorageMetadata\x94"
SIZE_CLASS = b"\x8c\x04Size\x94"

# bytes of an opcode with its argument, for those that may stand outside of a row run
LENGTH = {
    **dict.fromkeys(b"\x94)]}(N\x88\x89\x85\x86\x87teasubR\x81\x8f\x90\x91\x93", 1),
    **dict.fromkeys(b"Kh", 2),
    ord("M"): 3,
    ord("J"): 5,
    ord("j"): 5,
    ord("G"): 9,
}
LENGTH_BYTES = {ord("C"): 1, ord("B"): 4, ord("X"): 4, 0x8C: 1, 0x8D: 8, 0x8E: 8, 0x8A: 1}


class IrregularError(Exception):
    """The pickle is not one to scan; the unpickler is to read it whole."""


@dataclass(slots=True)
class Column:
    """One attribute of many rows.

    Attributes:
        kind: uint8 [n], an integer, None, a text, a reference to the memo, a torch.Size, True or False, an object whose
            attributes are columns of their own; 0 where the row has no such attribute.
        number: int8 to int64 [n], the integer, the text's first byte, the memo index referred to, the rank of the
            Size.
        memo: uint8 [n], memo index of the text, the Size or the object, counted from the first entry of the row.
        length: int32 [n], bytes of the text; None without any.
        coordinates: int8 to int64 [n, d], the Size, zeros behind its rank; None without any.
    """

    kind: Any
    number: Any
    memo: Any
    length: Any = None
    coordinates: Any = None

    @classmethod
    def empty(cls, count: int) -> Column:
        return cls(np.zeros(count, np.uint8), np.zeros(count, np.int8), np.zeros(count, np.uint8))

    def put_object(self, rows: Any, memos: Any) -> None:
        """In these rows stands an object; `memos` entries come before it."""
        self.kind[rows], self.memo[rows] = NESTED, memos

    def put(self, rows: Any, values: _Values, memos: Any) -> None:
        """Take the values of a block of rows; `memos` entries come before them in their rows."""
        count = len(self.kind)
        self.kind[rows], self.memo[rows] = values.kind, memos + values.memo
        self.number = wide_enough(self.number, values.number)
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
            self.coordinates = wide_enough(self.coordinates, values.coordinates)
            self.coordinates[rows, :wide] = values.coordinates


def wide_enough(column: Any, values: IntArray) -> Any:
    """The column, in wider integers if the values need them: most fit 8 to 32 bits of the 64."""
    least, most = values.min(initial=0), values.max(initial=0)
    while least < np.iinfo(column.dtype).min or most > np.iinfo(column.dtype).max:
        column = column.astype(f"i{2 * column.itemsize}")
    return column


@dataclass(slots=True, eq=False)
class Table:
    """All rows of one form.

    Attributes:
        names: memo indices of torch.Size (-1 when there is none), then for each object its class and attributes.
        attributes: number of attributes of each object; empty for planned items, whose columns are those of `PLANNED`.
        entries: int32 [n + 1], memo entries of all rows before a row; None once `base` is known.
        base: int32 [n], memo index of a row's first entry; -1 for a row outside of any row run.
        referred: int32 [n, r], the memo indices that a row refers to, -1 for none; None once `base` is known.
        row runs: first byte -> first row, number of rows, byte behind the last, whether any refers to the memo.
        alone: first bytes of the rows that no other follows.
        values: what the unpickler found under `names`, once it came across the first row run.
        rows: what the rows say, once the unpickler has confirmed them.
    """

    names: tuple[int, ...]
    attributes: tuple[int, ...]
    columns: list[Column]
    entries: Any
    base: Any
    referred: Any
    row_runs: dict[int, tuple[int, int, int, bool]]
    alone: set[int]
    values: tuple[Any, ...] = ()
    rows: Any = None

    def objects(self) -> Iterator[tuple[Any, dict[Any, Column]]]:
        """Class and columns by attribute, for each object of a row."""
        name, column = 1, 0
        for count in self.attributes:
            keys = self.values[name + 1 : name + 1 + count]
            yield self.values[name], dict(zip(keys, self.columns[column : column + count], strict=True))
            name, column = name + 1 + count, column + count


# ---------------------------------------------------------------- the bytes


class Buffer:
    """A pickle in memory of its own, from which `scan` takes the frames without a copy.

    Attributes:
        body: the bytes, then some zero bytes.
        end: number of bytes.
        cuts: where a frame began that was taken out, ascending.
    """

    def __init__(self, blocks: Iterable[bytes], size: int) -> None:
        """The bytes of some blocks, at most `size` of them."""
        self.body, self.end, self.cuts = _zeros(size + PADDING), 0, list[int]()
        for block in blocks:
            piece = block[: size - self.end]
            self.body[self.end : self.end + len(piece)] = piece
            self.end += len(piece)

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


class PickleView:
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


# ---------------------------------------------------------------- the form of a row


class _Constant(NamedTuple):
    """Opcodes that are the same in every row, and the memo entries they make."""

    opcodes: bytes
    made: int


class _Either(NamedTuple):
    """An object that begins with these opcodes, with `inside` it; where something else stands, `otherwise`.

    Attributes:
        column: notes the object; -1 for opcodes that only begin an attribute.
    """

    opening: _Constant
    inside: tuple[_Step, ...]
    otherwise: tuple[_Step, ...]
    column: int


_Step = _Constant | int | _Either
"""A part of a row; a number is a value, and its column."""


class RowForm(NamedTuple):
    """How a row is written.

    Attributes:
        names: as in `Table`.
        steps: the parts of a row in order; the first is constant.
        columns: number of columns.
    """

    names: tuple[int, ...]
    attributes: tuple[int, ...]
    steps: tuple[_Step, ...]
    columns: int


_SPELLED = ("fqn", "index", "offset", "type", "bytes_io_data", "tensor_data", "chunk", "offsets", "sizes", "properties")
PLANNED = (*_SPELLED, "dtype", "layout", "requires_grad", "memory_format", "pin_memory", "size")
"""The columns of a planned item: a WriteItem with its MetadataIndex, TensorWriteData, chunk and TensorProperties."""

PLAN_CLASSES = ("WriteItem", "MetadataIndex", "TensorWriteData", "ChunkStorageMetadata", "TensorProperties")
PLAN_ATTRIBUTES = (*_SPELLED, "size")
"""What a planned item spells; a TensorProperties has its five as a tuple."""


def planned_items(size_index: int, memo: dict[bytes, int]) -> RowForm | None:
    """The form of a WriteItem, given the memo indices of its classes and attributes; None while one is unknown.

    Source: torch.distributed.checkpoint.planner.WriteItem, TensorWriteData (2.0 - 2.15)
    """
    wanted = [name.encode() for name in (*PLAN_CLASSES, *PLAN_ATTRIBUTES)]
    if size_index < 0 or not all(name in memo for name in wanted):
        return None
    column = {name: number for number, name in enumerate(PLANNED)}

    def get(name: str) -> bytes:
        return get_opcode(memo[name.encode()])

    def made(kind: str, *after: str) -> _Constant:
        return _Constant(get(kind) + OBJECT + b"".join(map(get, after)), 2)

    def attribute(name: str) -> tuple[_Step, ...]:
        return _Constant(get(name), 0), column[name]

    built = _Constant(_BUILT, 0)
    chunk = _Either(
        made("ChunkStorageMetadata"),
        (*attribute("offsets"), *attribute("sizes"), built),
        (column["chunk"],),
        column["chunk"],
    )
    state = (column[name] for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"))
    properties = _Either(
        _Constant(get("TensorProperties") + _WITH_TUPLE, 1),
        (*state, _Constant(_TUPLE_BUILT, 1)),
        (column["properties"],),
        column["properties"],
    )
    data = _Either(
        made("TensorWriteData"),
        (_Constant(get("chunk"), 0), chunk, _Constant(get("properties"), 0), properties, *attribute("size"), built),
        (column["tensor_data"],),
        column["tensor_data"],
    )
    opening = made("WriteItem", "index"), made("MetadataIndex", "fqn")
    steps = (
        _Constant(opening[0].opcodes + opening[1].opcodes, 4),
        column["fqn"],
        *attribute("index"),
        _Either(_Constant(get("offset"), 0), (column["offset"],), (), -1),
        _Constant(_BUILT + get("type"), 0),
        column["type"],
        *attribute("bytes_io_data"),
        _Constant(get("tensor_data"), 0),
        data,
        built,
    )
    return RowForm((size_index, *(memo[name] for name in wanted)), (), steps, len(column))


def learn(view: PickleView, at: int, objects: int, size_index: int) -> RowForm | None:
    """The form of the row that begins here; None when it is not regular."""
    body = view.body
    names, attributes, constants, memos = [size_index], [], [], []
    constant, made = b"", 0
    for _ in range(objects):
        opcode, index = get_at(body, at)
        at += len(opcode)
        if not opcode or body[at : at + len(OBJECT)] != OBJECT:
            return None
        constant, made, at = constant + opcode + OBJECT, made + 2, at + len(OBJECT)
        names.append(index)
        count = 0
        while body[at : at + len(_BUILT)] != _BUILT:
            opcode, index = get_at(body, at)
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
    steps: list[_Step] = []
    for number, (opcodes, entries) in enumerate(zip(constants, memos, strict=True)):
        steps += _Constant(opcodes, entries), number
    return RowForm(tuple(names), tuple(attributes), (*steps, _Constant(constant, 0)), len(constants))


def get_at(body: mmap.mmap, at: int) -> tuple[bytes, int]:
    """The GET opcode here and its index; nothing when it is another opcode."""
    width = {0x68: 2, 0x6A: 5}.get(body[at], 0)
    opcode = body[at : at + width]
    return opcode, int.from_bytes(opcode[1:], "little")


def get_opcode(index: int) -> bytes:
    return bytes([0x68, index]) if index < 256 else b"j" + index.to_bytes(4, "little")


# ---------------------------------------------------------------- many rows at once


def read_table(view: PickleView, form: RowForm, at: int) -> Table:
    """All rows of this form from here on."""
    start = occurrences(view, form, at)
    count = len(start)
    end, entries, valid = np.zeros(count, np.int32), np.zeros(count + 1, np.int32), np.zeros(count, bool)
    memos = entries[1:]
    columns = [Column.empty(count) for _ in range(form.columns)]
    for first in range(0, count, ROWS_AT_ONCE):
        advance("chunks and records", first, count)
        rows = slice(first, min(first + ROWS_AT_ONCE, count))
        block = _Block(view, form, start, rows, columns)
        block.walk(form.steps, slice(None))
        end[rows], memos[rows], valid[rows] = block.end()
    linked = valid[1:] & valid[:-1] & (end[:-1] == start[1:])
    firsts = np.flatnonzero(valid & ~np.concatenate([[False], linked]))
    behind = np.flatnonzero(valid & ~np.concatenate([linked, [False]])) + 1
    many = behind - firsts > 1  # a row alone may be appended by an opcode that takes one object
    alone = set(start[firsts[~many]].tolist())
    firsts, behind = firsts[many], behind[many]
    referring = [column for column in columns if (column.kind == GET).any()]
    referred = np.full((count, len(referring)), -1, np.int32)
    for number, column in enumerate(referring):
        np.copyto(referred[:, number], column.number, where=column.kind == GET, casting="unsafe")
    refers = np.zeros(count + 1, np.int32)
    refers[1:] = (referred >= 0).any(axis=1)
    np.cumsum(refers, out=refers)
    described = firsts, behind - firsts, end[behind - 1], refers[behind] > refers[firsts]
    row_runs = dict(zip(start[firsts].tolist(), zip(*(item.tolist() for item in described), strict=True), strict=True))
    np.cumsum(entries, out=entries)
    base = np.full(count, -1, np.int32)
    return Table(form.names, form.attributes, columns, entries, base, referred, row_runs, alone)


def records(view: PickleView, at: int, size_index: int) -> Table | None:
    """The records behind the chunks at `at`, if their first rows are found; a guess that `_Scanner.run` confirms."""
    at = view.body.find(INDEX_CLASS, at)
    for _ in range(4):
        at = view.body.find(OBJECT, at + 1) if at >= 0 else -1
        for start in (at - 5, at - 2) if at >= 0 else ():
            if form := learn(view, start, 2, size_index):
                return read_table(view, form, start)
    return None


def occurrences(view: PickleView, form: RowForm, at: int) -> Any:
    """int32 [n], ascending: the positions from `at` on where a row may begin."""
    opening = form.steps[0]
    assert isinstance(opening, _Constant)
    last = {1: INDEX_CLASS, 2: _ITEM_CLASS}.get(len(form.attributes))  # chunks, then records, then planned items
    behind = view.body.find(last, at) if last else -1
    end = view.end if behind < 0 else behind
    wanted = np.uint64(int.from_bytes(opening.opcodes[:8], "little"))
    positions = []
    for phase in range(8):
        words = np.frombuffer(view.body, "<u8", max(end - at - phase, 0) // 8, at + phase)
        positions.append((np.flatnonzero(words == wanted) * 8 + (at + phase)).astype(np.int32))
    return np.sort(np.concatenate(positions), kind="stable")  # eight ascending parts: a merge


class _Block:
    """Rows that are read together, from their starts on.

    Attributes:
        at: int64 [n], how far each row was read; the end of the pickle for a row that is invalid.
        memos: int32 [n], memo entries made so far.
        valid: bool [n], whether each row has the form so far.
    """

    def __init__(self, view: PickleView, form: RowForm, start: Any, rows: slice, columns: list[Column]) -> None:
        self.view, self.columns, self.first, self.size_index = view, columns, rows.start, form.names[0]
        self.at = start[rows].astype(np.int64)
        self.valid, self.memos = np.ones(len(self.at), bool), np.zeros(len(self.at), np.int32)
        # where a frame began inside of a row: it must have been at an opcode
        near = slice(
            *np.searchsorted(view.cuts, [self.at[0], start[rows.stop] if rows.stop < len(start) else view.end])
        )
        self.cuts = view.cuts[near]
        self.holder = np.searchsorted(self.at, self.cuts, "right") - 1
        self.confirmed = np.zeros(len(self.cuts), bool)

    def walk(self, steps: tuple[_Step, ...], rows: Any) -> None:
        """Read on in these rows, all of them or those of an int64 array."""
        opcode_at = self._watch(rows)
        for step in steps:
            if isinstance(step, _Constant):
                self._expect(step, rows, opcode_at)
            elif isinstance(step, int):
                at = self.at[rows]
                opcode_at(at)
                value = _read_values(self.view, at, self.size_index, opcode_at)
                valid = self.valid[rows] & value.valid
                self.columns[step].put(self._of_table(rows), value, self.memos[rows])
                self.valid[rows], self.at[rows] = valid, np.where(valid, value.end, self.view.end)
                self.memos[rows] += value.made
            else:
                hit = _stands(self.view, self.at[rows], step.opening.opcodes)
                for inside in _part(rows, hit):
                    if step.column >= 0:
                        self.columns[step.column].put_object(self._of_table(inside), self.memos[inside])
                    self.walk((step.opening, *step.inside), inside)
                for others in _part(rows, ~hit) if step.otherwise else ():
                    self.walk(step.otherwise, others)

    def end(self) -> tuple[IntArray, Any, Any]:
        """Where each row ends, the memo entries it makes, and whether it has the form."""
        inside = ~self.confirmed & (self.cuts < self.at[self.holder])
        self.valid[self.holder[inside]] = False
        return self.at, self.memos, self.valid

    def _of_table(self, rows: Any) -> Any:
        """The same rows, counted from the first of the table."""
        return slice(self.first, self.first + len(self.at)) if isinstance(rows, slice) else self.first + rows

    def _expect(self, step: _Constant, rows: Any, opcode_at: Callable[[IntArray], None]) -> None:
        """Step over constant opcodes; rows where something else stands become invalid."""
        at = self.at[rows]
        for offset in _opcodes(step.opcodes):
            opcode_at(at + offset)
        self.valid[rows] &= _stands(self.view, at, step.opcodes)
        self.at[rows] = at + len(step.opcodes)
        self.memos[rows] += np.int32(step.made)

    def _watch(self, rows: Any) -> Callable[[IntArray], None]:
        """Takes note of opcodes, given their positions in these rows."""
        if isinstance(rows, slice):
            which, holder = np.arange(len(self.cuts)), self.holder
        else:
            nearest = np.minimum(np.searchsorted(rows, self.holder), len(rows) - 1)
            which = np.flatnonzero(rows[nearest] == self.holder)
            holder = nearest[which]
        cuts = self.cuts[which]

        def opcode_at(position: IntArray) -> None:
            if len(which):
                self.confirmed[which] |= position[holder] == cuts

        return opcode_at


def _part(rows: Any, hit: Any) -> tuple[Any, ...]:
    """Those of the rows where it is so, in a tuple; an empty one without any."""
    if hit.all():
        return (rows,)
    kept = np.flatnonzero(hit) if isinstance(rows, slice) else rows[hit]
    return (kept,) if len(kept) else ()


def _opcodes(constant: bytes) -> list[int]:
    """Where the opcodes of a constant part begin."""
    starts, at = [], 0
    while at < len(constant):
        starts.append(at)
        at += LENGTH[constant[at]]
    return starts


def _stands(view: PickleView, at: IntArray, constant: bytes) -> Any:
    """bool [n], whether the constant bytes stand at each position."""
    stands = np.ones(len(at), bool)
    for offset in range(0, len(constant), 8):
        word = constant[offset : offset + 8]
        mask = np.uint64((1 << 8 * len(word)) - 1)
        stands &= (view.word[at + offset] & mask) == np.uint64(int.from_bytes(word, "little"))
    return stands


@dataclass(slots=True)
class _Values:
    """Values read at many positions, as in `Column`; `made` memo entries each, and where they end."""

    kind: Any
    number: IntArray
    length: Any | None
    memo: Any
    made: Any
    coordinates: IntArray | None
    end: IntArray
    valid: Any


def _read_values(view: PickleView, at: IntArray, size_index: int, opcode_at: Callable[[IntArray], None]) -> _Values:
    """The value that stands at each position."""
    count = len(at)
    op = view.byte[at]
    kind = _KIND[op]
    number, end = np.zeros(count, np.int64), at + 1
    memo, made = np.zeros(count, np.int32), np.zeros(count, np.int32)
    length = coordinates = None
    valid = kind > 0
    present = np.bincount(kind, minlength=8)
    if present[INT]:
        rows = _where(kind, INT, present)
        number[rows], end[rows], valid[rows] = _integers(view, at[rows], op[rows])
    if present[TEXT]:
        rows = _where(kind, TEXT, present)
        number[rows], end[rows], valid[rows] = _texts(view, at[rows], op[rows])
        length = np.where(kind == TEXT, end - number - 1, 0)
        opcode_at(np.where(kind == TEXT, end - 1, at))
        made[rows] = 1
    if present[GET]:
        rows = _where(kind, GET, present)
        number[rows], end[rows] = _references(view, at[rows], op[rows])
        kind = np.where((kind == GET) & (number == size_index), np.uint8(SIZE), kind)
        if len(rows := np.flatnonzero(kind == SIZE)):
            size = _Sizes(view, end[rows], lambda places: opcode_at(_placed(at, rows, places)))
            number[rows], end[rows], valid[rows] = size.rank, size.end, size.valid
            made[rows], memo[rows] = size.made, size.made - 1
            coordinates = np.zeros((count, size.coordinates.shape[1]), np.int64)
            coordinates[rows] = size.coordinates
    return _Values(kind, number, length, memo, made, coordinates, end, valid)


def _where(kind: Any, wanted: int, present: Any) -> Any:
    return slice(None) if present[wanted] == len(kind) else np.flatnonzero(kind == wanted)


def _placed(at: IntArray, rows: IntArray, places: IntArray) -> IntArray:
    whole = at.copy()
    whole[rows] = places
    return whole


_WIDTH = np.zeros(256, np.int64)
_MASK = np.zeros(256, np.uint64)
for _op, _bytes in ((ord("K"), 1), (ord("M"), 2), (ord("J"), 4), (ord("h"), 1), (ord("j"), 4)):
    _WIDTH[_op] = _bytes
    _MASK[_op] = (1 << 8 * _bytes) - 1


def _integers(view: PickleView, at: IntArray, op: Any) -> tuple[IntArray, IntArray, Any]:
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


def _texts(view: PickleView, at: IntArray, op: Any) -> tuple[IntArray, IntArray, Any]:
    """First byte, end (behind their MEMOIZE) and validity of SHORT_BINUNICODE and BINUNICODE opcodes."""
    is_short = op == 0x8C
    word = view.word[at + 1]
    start = at + np.where(is_short, 2, 5)
    end = start + (word & np.where(is_short, np.uint64(0xFF), np.uint64(0xFFFFFFFF))).view(np.int64)
    valid = end < view.end
    end = np.minimum(end, view.end)
    valid &= view.byte[end] == MEMOIZE
    return start, end + 1, valid


def _references(view: PickleView, at: IntArray, op: Any) -> tuple[IntArray, IntArray]:
    """Memo index and end of BINGET and LONG_BINGET opcodes."""
    return (view.word[at + 1] & _MASK[op]).view(np.int64), at + 1 + _WIDTH[op]


class _Sizes:
    """torch.Size objects, read from behind the GET of their class on.

    Attributes:
        rank, end, made, valid: for each, with the memo entries made.
        coordinates: int64 [n, d].
    """

    def __init__(self, view: PickleView, at: IntArray, opcode_at: Callable[[IntArray], None]) -> None:
        count = len(at)
        valid = np.ones(count, bool)
        rank = np.zeros(count, np.int64)
        coordinates = np.zeros((count, MOST_AXES), np.int64)
        opcode_at(at)
        marked = view.byte[at] == ord("(")
        at = at + marked
        rows = np.arange(count)
        for axis in range(MOST_AXES + 1):
            opcode_at(at)
            op = view.byte[at[rows]]
            is_int = _KIND[op] == INT
            rows, op = rows[is_int], op[is_int]
            if len(rows) == 0 or axis == MOST_AXES:
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
        valid &= (rank == 0) | (view.byte[at] == MEMOIZE)
        for offset in range(len(_REDUCED)):
            opcode_at(at + offset)
        self.rank, self.valid = rank, valid
        self.end = at + len(_REDUCED)
        self.made = (3 - (rank == 0)).astype(np.int32)
        self.coordinates = coordinates[:, : max(int(rank.max()), 1)]


# ---------------------------------------------------------------- many texts at once


def bytes_of_texts(texts: list[bytes]) -> bytes:
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


def slices(view: PickleView, start: Any, length: Any) -> list[bytes]:
    return list(map(view.body.__getitem__, map(slice, start.tolist(), (start + length).tolist())))


def numbered(values: Any) -> tuple[Any, Any]:
    """The distinct values, ascending, and int32 [n], the number of each."""
    blocks = [values[first : first + ROWS_AT_ONCE] for first in range(0, len(values), ROWS_AT_ONCE)]
    different = distinct(np.concatenate([values[:0], *map(distinct, blocks)]))
    numbers = np.zeros(len(values), np.int32)
    for number, block in enumerate(blocks):
        numbers[number * ROWS_AT_ONCE :][: len(block)] = np.searchsorted(different, block)
    return different, numbers


def distinct_texts(view: PickleView, start: Any, length: Any) -> tuple[Any, Any, Any]:
    """int32 [n], the number of each text among the distinct ones, and where these start and how long they are."""
    words = range(-(-int(length.max(initial=0)) // 8))
    blocks = [slice(first, first + ROWS_AT_ONCE) for first in range(0, len(start), ROWS_AT_ONCE)]
    mixed = length.astype(np.uint64)
    for rows in blocks:
        mix = mixed[rows]
        for number in words:
            mix ^= _word(view, start[rows], length[rows], number)
            mix *= _FACTOR
            mix ^= mix >> np.uint64(29)
    order = np.argsort(mixed)
    mixed = mixed[order]
    is_new = np.ones(len(mixed), bool)
    np.not_equal(mixed[1:], mixed[:-1], out=is_new[1:])
    del mixed
    numbers = np.zeros(len(order), np.int32)
    numbers[order] = np.cumsum(is_new, dtype=np.int32) - np.int32(1)
    examples = order[is_new]
    del order
    by_place = np.argsort(examples)  # of one of its rows: neighbours in memory are read one after the other
    examples, place = examples[by_place], np.zeros(len(examples), np.int32)
    place[by_place] = np.arange(len(examples), dtype=np.int32)
    numbers = place[numbers]
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


def _word(view: PickleView, start: IntArray, length: Any, number: int) -> Any:
    """The text's bytes 8 * number to 8 * number + 7 as one word, zeros behind its end."""
    left = np.clip(length - 8 * number, 0, 8)
    return view.word[np.where(left > 0, start + np.int64(8 * number), 0)] & _FIRST_BYTES[left]


_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
