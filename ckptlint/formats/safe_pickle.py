"""Reading a pickle without running it: the C unpickler over a closed set of inert stand-ins.

`pickle.Unpickler.find_class` is the only way a pickle reaches a name. Here it never resolves one: each (module, name)
becomes a stand-in that keeps what it was given and does nothing. Names outside the list of `.metadata` are refused:
they become stand-ins too, so that the rest can still be read, and are reported with their byte offset. The opcodes
are walked in Python only to explain a refusal. Of a large `.metadata` the regular row runs become columns first
(`pickle_columns`), and the unpickler reads the rest.

A crafted stream may still crash, starve or stall the C unpickler, which is why loaders run in a `sandbox`.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import pickletools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickle_columns import END, WORTHWHILE, ChunkRows, RecordRows, RowRun, Scan, scan
from ckptlint.model.text import printable

SIZE_LIMIT = 2 * 1024**3
"""Largest metadata pickle that is read, in bytes; 10 million chunks take about 1.5 GiB."""

_WALK_LIMIT = 64 * 1024**2


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
    """

    target: str
    position: int
    called: bool
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unpickled:
    """What a pickle holds.

    Attributes:
        root: the object, made of built-in values and stand-ins; None when a refusal left nothing. In a list of chunks
            and among the keys of storage_data, a `RowRun` may stand for many rows, with `END` behind it.
        refused: names that must not be there.
        unknown: names of classes nobody here knows, decoded as inert values.
    """

    root: Any
    refused: tuple[Refused, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class _Names:
    """The names met while one pickle is read."""

    refused: dict[tuple[str, str], type[Opaque]] = field(default_factory=dict)
    unknown: dict[tuple[str, str], type[Opaque]] = field(default_factory=dict)


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
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")  # the second on Python 3.13
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}
_BUILTINS = ("builtins", "__builtin__")
_DTYPE = re.compile(r"(b?float|complex|u?int|bits|q?u?int)\d[\w]*|bool|half|float|double|short|int|long|cfloat|cdouble")
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

# what the common state and the records of healthy checkpoints hold (formats: argparse, torch, numpy, Megatron-Core)
_CONTAINERS = {
    *((module, name) for module in _BUILTINS for name in ("set", "frozenset", "bytearray", "complex", "list", "dict")),
    ("_codecs", "encode"),  # bytes in protocol 2
}
_KNOWN_INERT = _CONTAINERS | {
    ("_io", "BytesIO"),
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("signal", "Signals"),
    ("functools", "partial"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "_load_from_bytes"),
    ("torch", "Generator"),
    ("torch._C", "Generator"),
    ("torch", "device"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}
_KNOWN_INERT_PREFIXES = ("megatron.core.", "transformer_engine.common.recipe.", "numpy.dtypes.")

# in the common state a class of the standard library is refused unless it is one of these
_HARMLESS_STDLIB = frozenset({"collections", "datetime", "decimal", "enum", "fractions", "numbers", "uuid", "zoneinfo"})
_HARMLESS_BUILTINS = frozenset({"range", "slice", "object", "int", "float", "str", "bytes", "bool", "tuple"})
_OLD_STDLIB = frozenset({"__builtin__", "commands", "copy_reg", "imp", "popen2", "urllib2", "distutils", "asyncore"})
_DANGEROUS_PACKAGES = frozenset({"cffi", "cloudpickle", "dill", "jinja2", "joblib", "numba", "pip", "psutil"})
_DANGEROUS_PACKAGES |= {"pkg_resources", "requests", "setuptools", "urllib3", "_testcapi", "_xxsubinterpreters"}
_DANGEROUS_PREFIXES = (
    "numpy.ctypeslib",
    "numpy.DataSource",
    "numpy.distutils",
    "numpy.f2py",
    "numpy.from",
    "numpy.genfromtxt",
    "numpy.lib",
    "numpy.load",
    "numpy.memmap",
    "numpy.save",
    "numpy.testing",
    "pandas.",
    "torch._dynamo",
    "torch._inductor",
    "torch.classes",
    "torch.distributed.",
    "torch.fx",
    "torch.hub",
    "torch.jit",
    "torch.multiprocessing",
    "torch.ops",
    "torch.package",
    "torch.testing",
    "torch.utils",
)
_TORCH_VALUES = re.compile(
    r"torch\.(strided|jagged|_mkldnn|sparse_\w+|per_\w+_affine\w*|channels_last\w*|\w+_format|device)|torch\._utils\._rebuild_\w+|"
    r"torch\._tensor\._rebuild_\w+|torch\.nn\.parameter\.\w+"
)


def _opaque(module: str, name: str, new: Callable[..., Any] | None = None) -> type[Opaque]:
    """A stand-in class of this name, with another constructor when `new` is given."""
    body: dict[str, Any] = {"__slots__": (), "module": module, "name": name}
    if new is not None:
        body["__new__"] = lambda cls, *args: new(*args)
    made: type[Opaque] = _Named("Opaque", (Opaque,), body)  # type: ignore[assignment]
    return made


copyreg.pickle(_Named, lambda cls: (_opaque, (cls.module, cls.name)))


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("torch.serialization._get_layout was given no name")
    return name.removeprefix("torch.")


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
        if module == "torch" and _DTYPE.fullmatch(name):
            return _DTYPE_ALIASES.get(name, name)
        if key == ("collections", "OrderedDict"):
            return _Dict
        if module in _BUILTINS and name == "getattr":
            return self._member_of(module)
        stand_in = _opaque(module, name)
        if key in _ENUMS | _CONTAINERS:
            return stand_in
        if self._strict or self._is_dangerous(module, name):
            self.names.refused[key] = stand_in
        elif not self._is_known(module, name):
            self.names.unknown[key] = stand_in
        return stand_in

    def _member_of(self, module: str) -> type[Opaque]:
        """`getattr` on an enum class, which is how Python 3.11.2 pickles enum members; the result cannot be called."""

        def member(owner: Any, name: Any) -> Opaque:
            enum = isinstance(owner, type) and issubclass(owner, Opaque) and isinstance(name, str)
            key = (owner.module, owner.name) if enum else ("", "")
            if not enum or (self._strict and key not in _ENUMS) or key in self.names.refused:
                self.names.refused[(module, "getattr")] = _opaque(module, "getattr")
            return _opaque(*key)(name)

        return _opaque(module, "getattr", member)

    def _is_known(self, module: str, name: str) -> bool:
        """Whether healthy common state holds it."""
        dotted = f"{module}.{name}"
        is_storage = module == "torch" and name.endswith("Storage")
        is_signal = module == "signal" and name.startswith("SIG")
        known = (module, name) in _KNOWN_INERT or dotted.startswith(_KNOWN_INERT_PREFIXES)
        return known or is_storage or is_signal or bool(_TORCH_VALUES.fullmatch(dotted))

    def _is_dangerous(self, module: str, name: str) -> bool:
        """Whether it is known to do something when called, or may be: functions of torch, most of Python's library."""
        if self._is_known(module, name):
            return False
        dotted = f"{module}.{name}"
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            return True
        package = module.partition(".")[0]
        if package in _BUILTINS:
            return name not in _HARMLESS_BUILTINS
        if package in sys.stdlib_module_names or package in _OLD_STDLIB or package == "__main__":
            return package not in _HARMLESS_STDLIB
        if package == "torch" and not name[:1].isupper():
            return True
        return package in _DANGEROUS_PACKAGES or dotted.startswith(_DANGEROUS_PREFIXES)


# ---------------------------------------------------------------- reading


def read_metadata(data: bytes) -> Unpickled:
    """The content of a `.metadata` or `__N.metadata` file, names outside the closed list refused.

    Raises:
        UnreadableError: the bytes are not one whole pickle.
        LimitError: reading it would take more memory than a file of this size may need.
    """
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


def _read(data: bytes, strict: bool) -> Unpickled:
    if len(data) > SIZE_LIMIT:
        raise LimitError(f"has {len(data):,} bytes, the limit is {SIZE_LIMIT:,}")
    _check_start(data)
    if strict and len(data) >= WORTHWHILE and (root := _read_row_runs(data)) is not None:
        return Unpickled(root)
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
    refused = _explain(data, unpickler.names.refused)
    if error is not None and not refused:
        raise _unreadable(data, error)
    if error is None and not refused and (rest := len(data) - stream.tell()):
        raise UnreadableError(f"has {rest:,} bytes behind the end of its pickle", stream.tell())
    unknown = tuple(printable(f"{module}.{name}") for module, name in unpickler.names.unknown)
    return Unpickled(root if error is None else None, refused, unknown)


def _read_row_runs(data: bytes) -> Any:
    """The root of a large `.metadata` with its regular row runs as columns; None when it must be read otherwise."""
    try:
        found = scan(data)
        if found is None:
            return None
        unpickler = _Unpickler(io.BytesIO(found.pickle), strict=True, found=found)
        with paused_gc(), _no_extensions():
            root = unpickler.load()
        found.finish(lambda name: getattr(name, "kind", ""), unpickler.find_class("torch", "Size"))
    except Exception:  # whatever it is, reading the original pickle tells
        return None
    return None if unpickler.names.refused or _placed(root) != len(found.row_runs) else root


def _placed(root: Any) -> int:
    """How many row runs stand where they belong: chunks in a list of chunks, records among those of storage_data."""
    count = 0
    state = _state(root, "Metadata")
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    for tensor in described.values() if isinstance(described, dict) else ():
        chunks = _state(tensor, "TensorStorageMetadata").get("chunks")
        if isinstance(chunks, list) and RowRun in set(map(type, chunks)):
            pairs = zip(chunks, [*chunks[1:], None], strict=True)
            count += sum(isinstance(_rows(item), ChunkRows) and behind is END for item, behind in pairs)
    for key, info in stored.items() if isinstance(stored, dict) else ():
        count += type(key) is RowRun and isinstance(_rows(key), RecordRows) and info is END
    return count


def _rows(item: Any) -> Any:
    return item.table.rows if type(item) is RowRun else None


def _state(node: Any, kind: str) -> dict[str, Any]:
    is_kind = type(node).__base__ is Node and node.kind == kind and len(node) == 1
    return node[0] if is_kind and isinstance(node[0], dict) else {}


def _check_start(data: bytes) -> None:
    if not data:
        raise UnreadableError("is empty (0 bytes)", 0)
    if data[0] == 0x80:
        return
    if data.startswith(b"version https://git-lfs"):
        raise UnreadableError("is a Git LFS pointer, not the file itself", 0)
    if data.lstrip()[:1] in (b"{", b"["):
        raise UnreadableError("is a JSON text, not a pickle", 0)
    if not data.strip(b"\0"):
        raise UnreadableError("holds only zero bytes", 0)
    raise UnreadableError(f"starts with byte 0x{data[0]:02x}, a pickle starts with 0x80", 0)


def _unreadable(data: bytes, error: Exception) -> UnreadableError:
    """One sentence on why a stream does not decode, with the byte where the opcodes stop making sense."""
    position = 0
    try:
        for opcode, _, at in pickletools.genops(data[:_WALK_LIMIT]):
            position = at or 0
            if opcode.name == "STOP":
                return UnreadableError(f"is a pickle that does not decode: {_first_line(error)}")
    except (ValueError, UnicodeError) as found:
        if "unknown" in str(found):
            return UnreadableError(f"is no pickle from byte {position + 1:,} on", position + 1)
    if len(data) <= _WALK_LIMIT or isinstance(error, EOFError) or "truncated" in str(error):
        return UnreadableError(f"ends at byte {len(data):,} inside a pickle (no STOP)", len(data))
    return UnreadableError(f"is a pickle that does not decode: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return printable((str(error) or type(error).__name__).splitlines()[0][:200])


# ---------------------------------------------------------------- explaining a refusal


def _explain(data: bytes, refused: dict[tuple[str, str], type[Opaque]]) -> tuple[Refused, ...]:
    """Where each refused name stands in the stream and what would call it."""
    if not refused:
        return ()
    named, called = _walk(data, set(refused))
    in_order = sorted(refused, key=lambda key: named.get(key, (len(data), "")))
    return tuple(_refusal(key, named.get(key), called.get(key)) for key in in_order)


def _refusal(key: tuple[str, str], named: tuple[int, str] | None, call: tuple[int, str] | None) -> Refused:
    target = printable(f"{key[0]}.{key[1]}")
    trace = []
    if named:
        trace.append(f"0x{named[0]:04x}  {named[1]:<12}  {printable(key[0])} {printable(key[1])}")
    if call:
        trace.append(f"0x{call[0]:04x}  {call[1]:<12}  <- would call it")
    return Refused(target, named[0] if named else -1, call is not None, tuple(trace))


def _walk(
    data: bytes, wanted: set[tuple[str, str]]
) -> tuple[dict[tuple[str, str], tuple[int, str]], dict[tuple[str, str], tuple[int, str]]]:
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
    return named, called


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
