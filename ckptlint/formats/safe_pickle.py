"""Reading a pickle without running it: the C unpickler over a closed set of inert stand-ins.

`pickle.Unpickler.find_class` is the only way a pickle reaches a name. Here it never resolves one: each (module, name)
becomes a stand-in that keeps what it was given and does nothing. Names outside the list of `.metadata` are refused:
they become stand-ins too, so that the rest can still be read, and are reported with their byte offset. In a state the
call decides (`pickle_names`): a stand-in for a name that nobody knows tells when it is called. Pickles inside bytes are
read by the same reader. The opcodes are walked in Python only to explain a refusal. Of a large `.metadata` the regular
row runs become columns first (`pickle_columns`), and the unpickler reads the rest.

A crafted stream may still crash, starve or stall the C unpickler, which is why loaders run in a `sandbox`.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckptlint.errors import ForeignError, LimitError, UnreadableError
from ckptlint.formats import pickle_names
from ckptlint.formats.pickle_columns import (
    END,
    WORTHWHILE,
    ChunkRows,
    OneChunk,
    PlanRows,
    RecordRows,
    RowRun,
    Scan,
    scan,
)
from ckptlint.formats.pickle_rows import Buffer
from ckptlint.formats.sandbox import give_back_freed_memory
from ckptlint.formats.torch_archive import read_pickle_member
from ckptlint.model.text import printable

SIZE_LIMIT = 2 * 1024**3
"""Largest metadata pickle that is read, in bytes; 10 million chunks take about 1.5 GiB."""

_WALK_LIMIT = 64 * 1024**2
_NESTED_LIMIT = 8
_ZIP = b"PK\3\4"
_INNER_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_HOLDS_BYTES = ((b"CU\x8c", 1), (b"BTX", 4), (b"\x8e\x96\x8d", 8))  # opcodes of bytes and texts, width of their length
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER


class Node(list[Any]):
    """A stand-in for one of the metadata classes: a list whose only element is the state the pickle gave.

    A list because BUILD then runs in C (`__setstate__` is `list.append`), which halves the time of a large file.
    Hashed by identity: a dict keyed by nodes keeps every entry, equal ones too.
    """

    __slots__ = ()
    kind = ""  # the class it stands for, as torch calls it
    name = ""  # the class as the pickle names it
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]


class _Named(type):
    """The class of stand-in classes, so that a class kept as a value can be sent on by its name."""

    module: str
    name: str


class _Watched(_Named):
    """The class of stand-ins for names that are not known, which tell with what arguments they are called."""

    told: Callable[[tuple[Any, ...]], None]
    __getinitargs__ = None  # with it OBJ and INST without arguments are a call here too, as they are of a function

    def __call__(cls, *args: Any) -> Any:
        cls.told(args)
        return super().__call__(*args)


class Opaque(metaclass=_Named):
    """A stand-in for any other name: keeps module, name, arguments, state and items, and does nothing."""

    __slots__ = ("args", "items", "state")
    module = ""
    name = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any) -> Opaque:
        self = object.__new__(cls)
        self.args = args
        self.state = None
        self.items = []
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Keep a list item of a subclass of list."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Keep the list items of a subclass of list."""
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return printable(f"<{self.module}.{self.name}>")

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.module, self.name, self.args, self.state, self.items)


def _remade(module: str, name: str, args: tuple[Any, ...], state: Any, items: list[Any]) -> Opaque:
    """A stand-in as it left the process that read it."""
    made = _opaque(module, name)(*args)
    made.state, made.items = state, items
    return made


class _Dict(dict[Any, Any]):
    """An OrderedDict as stored: its items, without attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Refused:
    """A name the pickle may not ask for.

    Attributes:
        target: `module.name`, printable.
        position: byte offset of the opcode that names it; -1 when it lies too far into the file to be looked for.
        called: whether an opcode would call it.
        trace: the opcodes concerned, one line each.
        unknown: whether it is refused because it is called and nobody knows what it does.
        nested: whether it stands in a pickle inside bytes; the position counts from the start of that one.
    """

    target: str
    position: int
    called: bool
    trace: tuple[str, ...]
    unknown: bool = False
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Unpickled:
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


@dataclass(slots=True)
class _Names:
    """The names met while one pickle is read."""

    refused: dict[tuple[str, str], None] = field(default_factory=dict)
    unknown: dict[tuple[str, str], None] = field(default_factory=dict)
    called: dict[tuple[str, str], None] = field(default_factory=dict)
    loaded: list[bytes] = field(default_factory=list)


# ---------------------------------------------------------------- the names

_CHECKPOINT = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_STORAGE_WRITERS = (
    f"{_CHECKPOINT}.filesystem",
    f"{_OLD}.checkpoint.filesystem",
    "olmo_core.distributed.checkpoint.filesystem",
    "nemo_automodel.components.checkpoint._backports.filesystem",
    "dlrover.trainer.torch.flash_checkpoint.fsdp_engine",
)

_NODES: dict[tuple[str, str], str] = {
    **{
        (f"{package}.metadata", name): name
        for package in (_CHECKPOINT, f"{_OLD}.checkpoint")  # torch 1.13 wrote the second
        for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
    },
    **{(f"{package}.metadata", "MetadataIndex"): "MetadataIndex" for package in (_CHECKPOINT, f"{_OLD}.checkpoint")},
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): "TensorProperties",
    (f"{_OLD}.sharded_tensor.metadata", "TensorProperties"): "TensorProperties",  # torch <= 2.2
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): "StorageMeta",
    **{(module, "_StorageInfo"): "_StorageInfo" for module in _STORAGE_WRITERS},
    **{(module, "_StoragePrefix"): "_StoragePrefix" for module in _STORAGE_WRITERS},
    **{
        (f"{_CHECKPOINT}.planner", name): name
        for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
    },
    (_MCORE, "MCoreMetadata"): "Metadata",  # megatron-core 0.15 and 0.16.0rc0
    (_MCORE, "MCoreSavePlan"): "SavePlan",  # megatron-core 0.11 - 0.15
}
_ENUMS = {
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_OLD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.planner", "WriteItemType"),
}
_CLASS_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")  # the second on Python 3.13
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}
_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "chalf": "complex32",
}
_LOAD_FROM_BYTES = ("torch.storage", "_load_from_bytes")
_ENCODE = ("_codecs", "encode")


def _opaque(module: str, name: str, new: Callable[..., Any] | None = None) -> type[Opaque]:
    """A stand-in class of this name, with another constructor when `new` is given."""
    body: dict[str, Any] = {"__slots__": (), "module": module, "name": name}
    if new is not None:
        body["__new__"] = lambda cls, *args: new(*args)
    made: type[Opaque] = _Named("Opaque", (Opaque,), body)  # type: ignore[assignment]
    return made


def _watched(module: str, name: str, called: dict[tuple[str, str], None]) -> type[Opaque]:
    """A stand-in class that notes its name in `called` when it is called as more than a class that is made.

    NEWOBJ makes an object without a call; with arguments, a name in lower case is a class written in C, whose
    constructor does the work.
    """

    def told(args: tuple[Any, ...]) -> None:
        if pickle_names.is_function_call(module, name, args):
            called[module, name] = None

    def new(cls: type[Opaque], *args: Any) -> Opaque:
        if args and name[:1].islower():
            called[module, name] = None
        return Opaque.__new__(cls, *args)

    body: dict[str, Any] = {"__slots__": (), "module": module, "name": name, "told": told, "__new__": new}
    made: type[Opaque] = _Watched("Opaque", (Opaque,), body)  # type: ignore[assignment]
    return made


for _kind in (_Named, _Watched):
    copyreg.pickle(_kind, lambda cls: (_opaque, (cls.module, cls.name)))


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("torch.serialization._get_layout was given no name")
    return name.removeprefix("torch.")


def _raw(value: Any) -> bytes | None:
    """The bytes that a stand-in for bytes or a bytearray means; None where it is neither."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, Opaque):
        return None
    key, args = (value.module, value.name), value.args
    if key[0] in pickle_names.BUILTINS and key[1] == "bytearray" and len(args) == 1:
        return _raw(args[0])
    encodes = key == _ENCODE or key[1] == "bytearray"
    if encodes and len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        try:
            return args[0].encode("latin-1")
        except UnicodeEncodeError:
            return None
    return None


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise pickle.UnpicklingError("a path was given parts that are no text")
    return "/".join(parts).replace("//", "/")


class _Unpickler(pickle.Unpickler):
    """The C unpickler over the stand-ins; one instance reads one pickle.

    Args:
        strict: True for `.metadata`, whose list of names is closed; False for the common state, where classes of the
            training code are inert values and only names known to be dangerous are refused.
        found: the row runs that the pickle has persistent ids for.
    """

    def __init__(self, file: io.BytesIO, strict: bool, found: Scan | None = None) -> None:
        super().__init__(file)
        self.names = _Names()
        self._strict = strict
        self._found = found
        # made anew for each pickle: a crafted BUILD can then damage nothing that outlives the read
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name; nothing is imported or looked up."""
        key = (module, name)
        if key not in self._stand_ins:
            self._stand_ins[key] = self._stand_in(module, name)
        return self._stand_ins[key]

    def persistent_load(self, pid: Any) -> Any:
        """A storage of a tensor record as its description, or a row run; `.metadata` has none of its own."""
        if self._found:
            return self._found.persistent_load(pid)
        if self._strict:
            raise pickle.UnpicklingError("a persistent id, which metadata does not have")
        return _opaque("torch", "storage")(pid)

    def _stand_in(self, module: str, name: str) -> Any:
        key = (module, name)
        if kind := _NODES.get(key):
            return type("Node", (Node,), {"__slots__": (), "kind": kind, "name": name})
        if key == ("torch", "Size"):
            return ().__add__  # takes a tuple and returns that same tuple, in C; anything else is a TypeError
        if key == ("torch.serialization", "_get_layout"):
            return _opaque(module, name, _layout)
        if key in _PATHS:
            return _opaque(module, name, _path)
        if module == "torch" and pickle_names.DTYPE.fullmatch(name):
            return _DTYPE_ALIASES.get(name, name)
        if key == ("collections", "OrderedDict"):
            return _Dict
        if module in pickle_names.BUILTINS and name == "getattr":
            return self._member_of(module)
        if key in pickle_names.CONTAINERS or (key in _ENUMS and self._strict):
            return _opaque(module, name)
        standing = "refused" if self._strict else pickle_names.standing(module, name)
        if standing == "refused":
            self.names.refused[key] = None
            return _opaque(module, name)
        if standing == "known":
            return self._known(key)
        if standing == "unknown":
            self.names.unknown[key] = None
        return _watched(module, name, self.names.called)

    def _known(self, key: tuple[str, str]) -> type[Opaque]:
        """The stand-in of a known name; those that open bytes, or call what they are given, look at it."""
        plain, at = _opaque(*key), pickle_names.CALLS_ITS_ARGUMENT.get(key)

        def load(data: Any) -> Opaque:
            raw = _raw(data)
            if raw is None:
                self.names.refused[key] = None
            else:
                self.names.loaded.append(raw)
            return plain(data)

        def call(*args: Any) -> Opaque:
            for given in args[at:][:1]:
                self._hand_over(key, given)
            return plain(*args)

        if key == _LOAD_FROM_BYTES:
            return _opaque(*key, load)
        return plain if at is None else _opaque(*key, call)

    def _hand_over(self, caller: tuple[str, str], given: Any) -> None:
        """A known function calls what it is given."""
        if isinstance(given, _Named) and issubclass(given, Opaque):
            key = (given.module, given.name)
            if type(given) is _Watched:
                self.names.called[key] = None
            elif key not in self.names.refused and not pickle_names.may_be_called(*key):
                self.names.refused[caller] = None
        elif isinstance(given, Opaque):  # a partial, a member: nobody can tell what that would do
            self.names.refused[caller] = None

    def _member_of(self, module: str) -> type[Opaque]:
        """`getattr` on a class: a class inside it, or a member of an enum, which cannot be called.

        Up to protocol 3 classes in classes are pickled so, and on Python 3.11.2 the members of enums. By their names
        the first are told from the second.
        """

        def member(owner: Any, name: Any) -> Any:
            is_class = isinstance(owner, type) and issubclass(owner, Opaque) and isinstance(name, str)
            key = (owner.module, owner.name) if is_class else ("", "")
            if not is_class or (self._strict and key not in _ENUMS) or key in self.names.refused:
                self.names.refused[(module, "getattr")] = None
            elif type(owner) is _Watched and _CLASS_NAME.fullmatch(name):
                return self._inner_class(key[0], f"{key[1]}.{name}")
            return _opaque(*key)(name)

        return _opaque(module, "getattr", member)

    def _inner_class(self, module: str, name: str) -> type[Opaque]:
        """The stand-in of a class inside another one, by its name with a dot."""
        key = (module, name)
        if key not in self._stand_ins:
            if key not in pickle_names.CLASSES:
                self.names.unknown[key] = None
            self._stand_ins[key] = _watched(module, name, self.names.called)
        made: type[Opaque] = self._stand_ins[key]
        return made


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
    """Keep the cyclic garbage collector from walking millions of fresh objects again and again."""
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
    found = _load(data, strict=True)
    named = [key for key in found.names.refused if pickle_names.is_importable(*key)]
    return bool(named) and (found.error is None or any(call for _, call in _walk(data, set(named)).values()))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One pickle after the unpickler: its object, the names it asked for, why it ended early, and its length."""

    root: Any
    names: _Names
    error: Exception | None
    end: int


def _load(data: bytes, strict: bool) -> _Loaded:
    stream = io.BytesIO(data)
    unpickler = _Unpickler(stream, strict)
    root, error = None, None
    try:
        with paused_gc(), _no_extensions():
            root = unpickler.load()
    except MemoryError:
        raise LimitError("would take more memory to read than its size explains") from None
    except Exception as caught:  # a crafted stream can make the unpickler raise anything
        error = caught
    return _Loaded(root if error is None else None, unpickler.names, error, stream.tell())


def _read(data: bytes, strict: bool, depth: int = 0) -> Unpickled:
    if len(data) > SIZE_LIMIT:
        raise LimitError(f"has {len(data):,} bytes, the limit is {SIZE_LIMIT:,}")
    if not data:
        raise UnreadableError("is empty (0 bytes)", 0)
    found = _load(data, strict)
    refused, unknown, error = _judged(data, found, strict, depth)
    if not refused and found.error is not None:
        raise _unreadable(data, found.error)
    if not refused and error is not None:
        raise error
    if found.error is None and not refused and (rest := len(data) - found.end):
        raise UnreadableError(f"has {rest:,} bytes after the end of its pickle", found.end)
    return Unpickled(found.root, refused, unknown)


def _judged(
    data: bytes, found: _Loaded, strict: bool, depth: int
) -> tuple[tuple[Refused, ...], tuple[str, ...], UnreadableError | None]:
    """What is refused and what is unknown, in the pickles inside its bytes too, and why one of those is unreadable."""
    names = found.names
    refused = list(_explain(data, names))
    unknown = [printable(".".join(key)) for key in names.unknown if key not in names.called]
    error = None
    given = dict.fromkeys(names.loaded)
    kept = dict.fromkeys(_bytes_of(found.root)) if not strict and _may_hold_pickles(data) else {}
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
        refused += [replace(item, nested=True) for item in inner.refused]
        unknown += inner.unknown
    return tuple(dict.fromkeys(refused)), tuple(dict.fromkeys(unknown)), error


def _read_bytes(raw: bytes, depth: int) -> Unpickled:
    """What a pickle inside bytes asks for: an archive, one pickle, or the five in a row of torch's old format.

    Source:
        torch.serialization._legacy_load
    """
    if raw[:4] == _ZIP:
        return _read(read_pickle_member(raw), False, depth)
    refused: list[Refused] = []
    unknown: list[str] = []
    for number in range(5):
        found = _load(raw, strict=False)
        more, names, error = _judged(raw, found, False, depth)
        refused += more
        unknown += names
        if not refused and found.error is not None:
            raise _unreadable(raw, found.error)
        if not refused and error is not None:
            raise error
        raw = raw[found.end :]
        if found.error is not None or not raw or (number == 0 and found.root != _LEGACY_MAGIC):
            break
    return Unpickled(None, tuple(refused), tuple(unknown))


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
        if (raw := _raw(value)) is not None:
            if raw[:4] == _ZIP or (raw[:1] == b"\x80" and raw[1:2] in (b"\2", b"\3", b"\4", b"\5")):
                yield raw
        elif id(value) not in seen and isinstance(value, (list, tuple, dict, Opaque)):
            seen.add(id(value))
            if isinstance(value, Opaque):
                stack += [value.args, value.state, value.items]
            else:
                stack += [part for pair in value.items() for part in pair] if isinstance(value, dict) else value


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
        found = scan(data)
        if found is None:
            return None
        give_back_freed_memory()
        unpickler = _Unpickler(io.BytesIO(found.pickle), strict=True, found=found)
        with paused_gc(), _no_extensions():
            root = unpickler.load()
        found.finish(lambda name: getattr(name, "kind", ""), unpickler.find_class("torch", "Size"))
        give_back_freed_memory()
    except Exception:  # whatever it is, reading the original pickle tells
        return None
    return None if unpickler.names.refused or _placed(root) != (len(found.row_runs), len(found.single)) else root


def _placed(root: Any) -> tuple[int, int]:
    """How many row runs and chunks of row runs stand where they belong.

    Chunks belong in a list of chunks, records among those of storage_data, planned items in the list of a plan, and the
    chunk of a row run in a planned item.
    """
    count = single = 0
    state = _state(root, "Metadata")
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    for tensor in described.values() if isinstance(described, dict) else ():
        chunks = _state(tensor, "TensorStorageMetadata").get("chunks")
        if isinstance(chunks, list) and RowRun in set(map(type, chunks)):
            pairs = zip(chunks, [*chunks[1:], None], strict=True)
            count += sum(isinstance(_rows(item), ChunkRows) and behind is END for item, behind in pairs)
    for key, info in stored.items() if isinstance(stored, dict) else ():
        count += type(key) is RowRun and isinstance(_rows(key), RecordRows) and info is END
    plans = state.get("all_local_plans")
    for plan in plans if isinstance(plans, list) else ():
        items = _state(plan, "SavePlan").get("items")
        items = items if isinstance(items, list) else []
        for item, behind in zip(items, [*items, None][1:], strict=True):
            count += isinstance(_rows(item), PlanRows) and behind is END
            data = _state(_state(item, "WriteItem").get("tensor_data"), "TensorWriteData")
            single += type(data.get("chunk")) is OneChunk
    return count, single


def _rows(item: Any) -> Any:
    return item.table.rows if type(item) is RowRun else None


def _state(node: Any, kind: str) -> dict[str, Any]:
    is_kind = type(node).__base__ is Node and node.kind == kind and len(node) == 1
    return node[0] if is_kind and isinstance(node[0], dict) else {}


def _wrong_start(data: bytes) -> str:
    """What the first bytes are instead of a pickle's; torch writes no pickle that starts otherwise."""
    if data.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself"
    if data.lstrip()[:1] in (b"{", b"["):
        return "is JSON, not a pickle"
    if not data.strip(b"\0"):
        return "holds only zero bytes"
    return f"is not a pickle: it starts with byte 0x{data[0]:02x} instead of 0x80"


def _unreadable(data: bytes, error: Exception) -> ForeignError:
    """One sentence on why a stream does not decode, with the byte where the opcodes stop making sense."""
    if data[:1] != b"\x80":
        return ForeignError(_wrong_start(data) if data else "is empty (0 bytes)", 0)
    position = 0
    try:
        for opcode, _, at in pickletools.genops(data[:_WALK_LIMIT]):
            position = at or 0
            if opcode.name == "STOP":
                return ForeignError(f"is a pickle that does not decode: {_first_line(error)}")
    except (ValueError, UnicodeError) as found:
        if "unknown" in str(found):
            return ForeignError(f"stops being a pickle at byte {position + 1:,}", position + 1)
    if len(data) <= _WALK_LIMIT or isinstance(error, EOFError) or "truncated" in str(error):
        return ForeignError(f"ends at byte {len(data):,} inside a pickle (no STOP)", len(data))
    return ForeignError(f"is a pickle that does not decode: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return printable((str(error) or type(error).__name__).splitlines()[0][:200])


# ---------------------------------------------------------------- explaining a refusal


def _explain(data: bytes, names: _Names) -> tuple[Refused, ...]:
    """Where each refused name stands in the stream and what would call it."""
    wanted = names.refused | names.called
    if not wanted:
        return ()
    found = _walk(data, set(wanted))
    in_order = sorted(wanted, key=lambda key: found[key][0] if key in found else (len(data), ""))
    made = []
    for key in in_order:
        named, call = found.get(key, (None, None))
        made.append(_refusal(key, named, call, unknown=key not in names.refused))
    return tuple(made)


def _refusal(
    key: tuple[str, str], named: tuple[int, str] | None, call: tuple[int, str] | None, unknown: bool
) -> Refused:
    target = printable(f"{key[0]}.{key[1]}")
    trace = []
    if named:
        trace.append(f"0x{named[0]:04x}  {named[1]:<12}  {printable(key[0])} {printable(key[1])}")
    if call:
        trace.append(f"0x{call[0]:04x}  {call[1]:<12}  <- would call it")
    return Refused(target, named[0] if named else -1, unknown or call is not None, tuple(trace), unknown)


def _walk(
    data: bytes, wanted: set[tuple[str, str]]
) -> dict[tuple[str, str], tuple[tuple[int, str], tuple[int, str] | None]]:
    """First position of each wanted name, and of the opcode that would call it, by following the stack symbolically.

    Stops as soon as every wanted name was seen called or, failing that, at the end of the stream.
    """
    named: dict[tuple[str, str], tuple[int, str]] = {}
    called: dict[tuple[str, str], tuple[int, str]] = {}
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    mark = object()
    try:
        for opcode, arg, at in pickletools.genops(data[:_WALK_LIMIT]):
            name, position = opcode.name, at or 0
            slot = arg if isinstance(arg, int) else -1
            if name in ("GLOBAL", "INST"):
                key = tuple(str(arg).split(" ", 1))
            elif name == "STACK_GLOBAL":
                key = tuple(stack[-2:])
            else:
                key = ()
            popped = _pop(stack, opcode, mark)
            pushed: Any = arg if isinstance(arg, str) else None
            if key in wanted:
                named.setdefault(key, (position, name))
                pushed = key
                if name == "INST":
                    called.setdefault(key, (position, name))
            if name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ") and popped and popped[0] in wanted:
                called.setdefault(popped[0], (position, name))
            if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE") and stack:
                memo[len(memo) if name == "MEMOIZE" else slot] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo.get(slot))
            elif name == "DUP" and stack:
                stack.append(stack[-1])
            elif name == "MARK":
                stack.append(mark)
            elif opcode.stack_after and name not in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD", "ADDITEMS"):
                stack.append(pushed)
            if len(called) == len(wanted):
                break
    except (ValueError, IndexError, UnicodeError, StopIteration):
        pass  # a damaged stream (StopIteration: no mark where one is needed): what was found up to here still stands
    return {key: (place, called.get(key)) for key, place in named.items()}


def _pop(stack: list[Any], opcode: pickletools.OpcodeInfo, mark: object) -> list[Any]:
    """Take an opcode's operands off the symbolic stack, the deepest first; those it leaves in place stay."""
    if opcode.name in ("MARK", "DUP", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"):
        return []
    before = opcode.stack_before
    if pickletools.markobject in before:
        at = len(stack) - 1 - next(i for i, item in enumerate(reversed(stack)) if item is mark)
        items = stack[at + 1 :]
        del stack[at:]
        return items
    count = len(before) - (opcode.name in ("APPEND", "SETITEM", "BUILD"))
    operands = stack[len(stack) - count :] if count else []
    del stack[len(stack) - count :]
    return operands
