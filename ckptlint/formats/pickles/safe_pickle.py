"""Reading a pickle without running it: the C unpickler over a closed set of inert stand-ins.

`pickle.Unpickler.find_class` is the only way a pickle reaches a name. Here it never resolves one: each (module, name)
becomes a stand-in that keeps what it was given and does nothing (`pickle_stand_ins`). Names outside the list of
`.metadata` are refused: they become stand-ins too, so that the rest can still be read, and are reported with their byte
offset. In a state the call decides: its name and the shape of its arguments must be in the table (`names`).
Pickles inside bytes are read by the same reader. A pickle is read a second time, in Python, only to explain a refusal
(`refusals`). Of a large `.metadata` the regular row runs become columns first (`columns`), and the
unpickler reads the rest.

A crafted stream may still crash, starve or stall the C unpickler, which is why loaders run in a `sandbox`.
"""

from __future__ import annotations

import copyreg
import gc
import io
import os
import pickle
import pickletools
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

from ckptlint.errors import ForeignError, LimitError, OwnFileError, UnreadableError
from ckptlint.formats.pickles import names
from ckptlint.formats.pickles.columns import (
    END,
    WORTHWHILE,
    ChunkRows,
    End,
    EntryRows,
    OneChunk,
    PickleScan,
    PlanRows,
    RecordRows,
    RowRun,
    scan,
)
from ckptlint.formats.pickles.joblib_arrays import MARK, without_arrays
from ckptlint.formats.pickles.names import Pair
from ckptlint.formats.pickles.refusals import Refused, refusal_text
from ckptlint.formats.pickles.rows import Buffer
from ckptlint.formats.pickles.stand_ins import SCALARS, Fault, StandIns, raw_bytes
from ckptlint.formats.pickles.stand_ins import Node as Node
from ckptlint.formats.pickles.stand_ins import Opaque as Opaque
from ckptlint.formats.pointers import pointer_in
from ckptlint.formats.torch_archive import ranges_in, read_archive
from ckptlint.formats.torch_legacy import PICKLES, is_magic, is_tar
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.sandbox import give_back_freed_memory

SIZE_LIMIT = 2 * 1024**3
"""Largest metadata pickle that is read, in bytes; 10 million chunks take about 1.5 GiB."""

_WALK_LIMIT = 64 * 1024**2
_NESTED_LIMIT = 8
_ZIP = b"PK\3\4"
_TIMES_AS_FAST = 10  # as `pickletools` the C unpickler goes through a pickle
_POP_AND_BYTES = b"0C\x10"  # POP, then 16 bytes
_TOO_LARGE = "would take more memory to read than its size explains"
_FRAME = lazy_pattern(rb"\x95.{4}\0{4}", re.DOTALL)  # the opcode and a length that a file can have
_INNER_PICKLE = lazy_pattern(rb"\x80[\x02-\x05]")
_HOLDS_BYTES = ((b"CU\x8c", 1), (b"BTX", 4), (b"\x8e\x96\x8d", 8))  # opcodes of bytes and texts, width of their length


class Unpickled(NamedTuple):
    """What a pickle holds.

    Attributes:
        root: the object, made of built-in values and stand-ins; None when a refusal left nothing. In a list of chunks
            and among the keys of storage_data, a `RowRun` may stand for many rows, with `END` behind it.
        refused: names that must not be there, and names nobody knows that are called.
        unknown: names of classes nobody here knows, only made or filled, decoded as inert values.
    """

    root: Any
    refused: tuple[Refused, ...] = ()
    unknown: tuple[str, ...] = ()


class _Unpickler(StandIns, pickle.Unpickler):
    """The C unpickler over the stand-ins; one instance reads one pickle."""

    def __init__(self, file: io.BytesIO, strict: bool, row_runs: PickleScan | None = None) -> None:
        super().__init__(file, strict)
        self._row_runs = row_runs

    def persistent_load(self, pid: Any) -> Any:
        """A storage, or a row run."""
        return self._row_runs.persistent_load(pid) if self._row_runs else super().persistent_load(pid)


# ---------------------------------------------------------------- reading


def read_metadata(data: bytes | Buffer) -> Unpickled:
    """The content of a `.metadata` or `__N.metadata` file, names outside the closed list refused.

    A buffer is read without a copy of it. It is used up; whoever calls should not hold on to it.

    Raises:
        UnreadableError: the bytes are not one whole pickle.
        LimitError: reading it would take more memory than a file of this size may need.
    """
    if isinstance(data, Buffer) or WORTHWHILE <= len(data) <= SIZE_LIMIT:
        if (root := _read_row_runs(data)) is not None:
            return Unpickled(root)
        data = bytes(data)
    return _read(data, strict=True)


def read_state(data: bytes) -> Unpickled:
    """The content of a `data.pkl` (common state, records); unknown classes are inert, dangerous names refused.

    Raises:
        UnreadableError: the bytes are not one whole pickle.
        LimitError: reading it would take more memory than a file of this size may need.
    """
    return _read(data, strict=False)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps the cyclic garbage collector from walking millions of fresh objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _no_extensions() -> Iterator[None]:
    """Hide the extension codes that other code registered with `copyreg`: the C unpickler resolves them on its own."""
    tables: list[dict[Any, Any]] = [getattr(copyreg, "_inverted_registry"), getattr(copyreg, "_extension_cache")]  # noqa: B009
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, entries in zip(tables, kept, strict=True):
            table.clear()
            table.update(entries)


def asks_for_names(data: bytes) -> bool:
    """Whether `pickle.load` would take these bytes for a pickle that reaches a name and calls it, or that is whole.

    For a text that may be a pickle of protocol 0: to be asked in a child process, as every pickle is read.
    """
    loaded = _load(data, strict=True)
    named = [fault for key, fault in loaded.faults if names.is_importable(*key)]
    return bool(named) and (loaded.error is None or "called" in named)


class _Loaded(NamedTuple):
    """One pickle after the unpickler: its object, what it did wrong, why it ended early, and its length."""

    root: Any
    faults: list[tuple[Pair, Fault]]
    unknown: list[Pair]  # names that nobody knows
    given: list[bytes]  # what is handed to a loader
    error: Exception | None
    end: int


class _Framed(io.BytesIO):
    """A stream that knows where its last read began: the unpickler takes a frame at once, with what follows STOP."""

    began = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """So many bytes."""
        self.began = self.tell()
        return super().read(size)


def _load(data: bytes, strict: bool) -> _Loaded:
    """Run the C unpickler with stand-ins for every name; its error is an answer, not raised."""
    stream = (_Framed if _FRAME.search(data) else io.BytesIO)(data)
    unpickler = _Unpickler(stream, strict)
    root, error = None, None
    try:
        with paused_gc(), _no_extensions():
            root = unpickler.load()
    except MemoryError:
        raise LimitError(_TOO_LARGE) from None
    except OwnFileError:
        raise
    except Exception as caught:  # a crafted stream can make the unpickler raise anything
        error = caught
    end = stream.tell()
    if error is None and isinstance(stream, _Framed):
        is_short = end > _TIMES_AS_FAST * (end - stream.began)
        if is_short or not _ends_at(data, end, strict):
            end = _after_stop(data, stream.began, end)
    return _Loaded(root, list(unpickler.faults), list(unpickler.unknown), unpickler.loaded, error, end)


def _ends_at(data: bytes, end: int, strict: bool) -> bool:
    """Whether a pickle ends with the last byte of its frame: then bytes that stand there instead are what it gives."""
    mark = os.urandom(16)
    with io.BytesIO(data[: end - 1] + _POP_AND_BYTES + mark + pickle.STOP) as stream:
        unpickler = _Unpickler(stream, strict)
        try:
            with paused_gc(), _no_extensions():
                value = unpickler.load()
        except MemoryError:
            raise LimitError(_TOO_LARGE) from None
        except Exception:  # a crafted stream can make the unpickler raise anything; its opcodes show it then
            return False
        finally:
            unpickler.memo.clear()  # the stand-ins hold the unpickler: only a collector would free them
    return type(value) is bytes and value == mark


def _after_stop(data: bytes, start: int, end: int) -> int:
    """The end of a pickle whose STOP is between two positions, the first of an opcode: some readers go on there."""
    with suppress(ValueError):  # a name that is not ASCII, which no pickle with frames has
        for opcode, _, at in pickletools.genops(data[start:end]):
            if opcode.name == "STOP":
                return start + (at or 0) + 1
    return start


def _read(data: bytes, strict: bool, depth: int = 0) -> Unpickled:
    """Unpickle a stream and the streams that arrays in it hold, each within the limits."""
    if len(data) > SIZE_LIMIT:
        raise LimitError(f"has {len(data):,} bytes, the limit is {SIZE_LIMIT:,}")
    if not data:
        raise UnreadableError("is empty (0 bytes)", 0)
    inner: list[bytes] = []
    if not strict and MARK in data:
        data, inner = without_arrays(data)
    loaded = _load(data, strict)
    loaded.given.extend(inner)
    refused, unknown, error = _judged(data, loaded, strict, depth)
    if not refused and loaded.error is not None:
        raise _unreadable(data, loaded.error)
    if not refused and error is not None:
        raise error
    if loaded.error is None and not refused and (rest := len(data) - loaded.end):
        raise UnreadableError(f"has {rest:,} bytes after the end of its pickle", loaded.end)
    return Unpickled(loaded.root, refused, unknown)


def _judged(
    data: bytes, loaded: _Loaded, strict: bool, depth: int
) -> tuple[tuple[Refused, ...], tuple[str, ...], UnreadableError | None]:
    """What is refused and what is unknown, in the pickles inside its bytes too, and why one of those is unreadable."""
    refused = list(refusal_text(data, strict, loaded.faults))
    unknown = [printable(".".join(key)) for key in loaded.unknown if (key, "unknown") not in loaded.faults]
    error = None
    given = dict.fromkeys(loaded.given)
    kept = dict.fromkeys(_bytes_of(loaded.root)) if not strict and _may_hold_pickles(data) else {}
    for raw in given | kept:
        if depth == _NESTED_LIMIT:
            raise LimitError(f"holds pickles inside pickles, more than {_NESTED_LIMIT} deep")
        try:
            inner = _read_bytes(raw, depth + 1)
        except LimitError:
            raise
        except UnreadableError as caught:
            if raw in given or _is_whole(raw):
                error = UnreadableError(f"holds a pickle inside bytes, which {caught}")
            continue
        refused += [item._replace(nested=True) for item in inner.refused]
        unknown += inner.unknown
    return tuple(dict.fromkeys(refused)), tuple(dict.fromkeys(unknown)), error


def _read_bytes(raw: bytes, depth: int) -> Unpickled:
    """What a pickle inside bytes asks for: an archive, or as many pickles in a row as torch's old format has."""
    if raw[:4] == _ZIP:
        return _read(read_archive(ranges_in(raw), len(raw)).pickle, False, depth)
    if is_tar(raw):  # what torch looks for first
        raise UnreadableError("is a tar archive, a form of torch < 0.2", 0)
    pickles, end, error = read_row(raw, depth)
    refused = tuple(item for loaded in pickles for item in loaded.refused)
    if error is None and (rest := len(raw) - end) and not is_magic(pickles[0].root):
        error = UnreadableError(f"has {rest:,} bytes after the end of its pickle", end)
    if error is not None and not refused:
        raise error
    return Unpickled(None, refused, tuple(name for loaded in pickles for name in loaded.unknown))


def read_row(data: bytes, depth: int = 0) -> tuple[list[Unpickled], int, UnreadableError | None]:
    """The pickles in a row with which bytes start, at most the five that torch's old format has.

    The number that the first of them must hold is compared by torch: with an object that is equal to it the others are
    loaded too.

    Returns:
        Them, the byte after the last, and why that one does not end.

    Source: torch.serialization._legacy_load
    """
    pickles: list[Unpickled] = []
    at = 0
    while len(pickles) < PICKLES and (at < len(data) or not pickles):
        rest = data[at:]
        loaded = _load(rest, strict=False)
        refused, unknown, error = _judged(rest, loaded, False, depth)
        if loaded.error is not None and pickles and not is_magic(pickles[0].root) and not refused:
            break  # what follows one pickle need be none
        pickles.append(Unpickled(loaded.root, refused, unknown))
        if loaded.error is not None:
            return pickles, at, _unreadable(rest, loaded.error)
        at += loaded.end
        if error is not None:
            return pickles, at, error
    return pickles, at, None


def _may_hold_pickles(data: bytes) -> bool:
    """Whether bytes or a text in a pickle may start as a pickle or an archive does.

    The same two bytes are part of the numbers by which a large pickle refers back. In protocol 2 bytes are a text of
    their codes, of which UTF-8 puts one byte before the first.
    """
    if data.find(_ZIP, 2) >= 0:
        return True
    for match in _INNER_PICKLE.finditer(data, 2):
        for at in {match.start(), match.start() - (data[match.start() - 1] == 0xC2)}:
            for opcodes, width in _HOLDS_BYTES:
                length = int.from_bytes(data[at - width : at], "little")
                if at > width and data[at - width - 1] in opcodes and 2 <= length <= len(data) - at:
                    return True
            if data[at - 1] in b"VS" or data[at - 2] in b"S":
                return True
    return False


def _bytes_of(root: Any) -> Iterator[bytes]:
    """The bytes in an object that start as a pickle or an archive does."""
    stack, seen = [root], set()
    while stack:
        value = stack.pop()
        if (raw := raw_bytes(value)) is not None:
            if raw[:4] == _ZIP or (raw[:1] == b"\x80" and raw[1:2] in (b"\2", b"\3", b"\4", b"\5")):
                yield raw
        elif id(value) not in seen and isinstance(value, (list, tuple, dict, Opaque)):
            seen.add(id(value))
            if isinstance(value, Opaque):
                stack += [value.args, value.state, value.items]
            else:
                items = chain.from_iterable(value.items()) if isinstance(value, dict) else value
                stack += [item for item in items if type(item) not in SCALARS]


def _is_whole(raw: bytes) -> bool:
    """Whether bytes are a pickle to its last opcode, or an archive of one, so that somebody will load them."""
    if raw[:4] == _ZIP:
        return b"data.pkl" in raw.lower()
    try:
        return all(opcode.name != "STOP" or at == len(raw) - 1 for opcode, _, at in pickletools.genops(raw))
    except (ValueError, UnicodeError):
        return False


def _read_row_runs(data: bytes | Buffer) -> Any:
    """The root of a large `.metadata` with its regular row runs as columns; None when it must be read otherwise."""
    try:
        row_runs = scan(data)
        if row_runs is None:
            return None
        give_back_freed_memory()
        unpickler = _Unpickler(io.BytesIO(row_runs.pickle), strict=True, row_runs=row_runs)
        with paused_gc(), _no_extensions():
            root = unpickler.load()
        row_runs.finish(lambda name: getattr(name, "kind", ""), unpickler.find_class("torch", "Size"))
        give_back_freed_memory()
    except Exception:  # whatever it is, reading the original pickle shows it
        return None
    is_placed = not unpickler.faults and _placed(root) == (len(row_runs.row_runs), len(row_runs.single))
    return root if is_placed and _spelled_out(root) else None


def _placed(root: Any) -> tuple[int, int]:
    """How many row runs and chunks of row runs stand where they belong; what ends them in a dict is taken out.

    Bytes entries belong in state_dict_metadata, chunks in a list of chunks, records among those of storage_data,
    planned items in the list of a plan, and the chunk of a row run in a planned item.
    """
    count = single = 0
    state = _state(root, "Metadata")
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    for entries, kind in ((described, EntryRows), (stored, RecordRows)):
        if isinstance(entries, dict):
            ends = [entries.pop(key) for key in [key for key in entries if type(key) is End]]
            runs = sum(isinstance(_rows(key), kind) and behind is END for key, behind in entries.items())
            count += runs if ends == [END] * runs else 0
    for tensor in described.values() if isinstance(described, dict) else ():
        chunks = _state(tensor, "TensorStorageMetadata").get("chunks")
        if isinstance(chunks, list) and RowRun in set(map(type, chunks)):
            pairs = zip(chunks, [*chunks[1:], None], strict=True)
            count += sum(isinstance(_rows(item), ChunkRows) and behind is END for item, behind in pairs)
    plans = state.get("all_local_plans")
    for plan in plans if isinstance(plans, list) else ():
        items = _state(plan, "SavePlan").get("items")
        items = items if isinstance(items, list) else []
        for item, behind in zip(items, [*items, None][1:], strict=True):
            count += isinstance(_rows(item), PlanRows) and behind is END
            data = _state(_state(item, "WriteItem").get("tensor_data"), "TensorWriteData")
            single += type(data.get("chunk")) is OneChunk
    return count, single


def _spelled_out(root: Any) -> bool:
    """Put the bytes entries of row runs into state_dict_metadata; whether every key is there once."""
    described = _state(root, "Metadata").get("state_dict_metadata")
    if not isinstance(described, dict) or RowRun not in set(map(type, described)):
        return True
    count, items = 0, [*described.items()]
    described.clear()  # filled anew, since something else may refer to it
    for key, entry in items:
        rows = _rows(key)
        described |= dict.fromkeys(rows.names[key.first : key.first + key.count], rows.entry) if rows else {key: entry}
        count += key.count if rows else 1
    return len(described) == count


def _rows(item: Any) -> Any:
    return item.table.rows if type(item) is RowRun else None


def _state(node: Any, kind: str) -> dict[str, Any]:
    is_kind = type(node).__base__ is Node and node.kind == kind and len(node) == 1
    return node[0] if is_kind and isinstance(node[0], dict) else {}


def _wrong_start(data: bytes) -> str:
    """What the first bytes are instead of a pickle's; torch writes no pickle that starts otherwise."""
    if not data:
        return "is empty (0 bytes)"
    if data.lstrip()[:1] in (b"{", b"["):
        return "is JSON, not a pickle"
    if not data.strip(b"\0"):
        return "holds only zero bytes"
    return pointer_in(data[:2048]) or f"is not a pickle: it starts with byte 0x{data[0]:02x} instead of 0x80"


def _unreadable(data: bytes, error: Exception) -> ForeignError:
    """One sentence on why a stream does not decode, with the byte where the opcodes stop making sense."""
    if data[:1] != b"\x80":
        return ForeignError(_wrong_start(data), 0)
    position = 0
    try:
        for _, _, at in pickletools.genops(data[:_WALK_LIMIT]):  # up to STOP
            position = at or 0
    except (ValueError, UnicodeError) as stop:
        if "unknown" in str(stop):
            return ForeignError(f"stops being a pickle at byte {position + 1:,}", position + 1)
        if len(data) <= _WALK_LIMIT or isinstance(error, EOFError) or "truncated" in str(error):
            return ForeignError(f"ends at byte {len(data):,} inside a pickle (no STOP)", len(data))
    first_line = printable((str(error) or type(error).__name__).splitlines()[0][:200])
    return ForeignError(f"is a pickle that does not decode: {first_line}")
