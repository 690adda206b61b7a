"""Calls composed at random from the names that ckptlint lets pass: what truly acts when it is loaded must be SAF001.

    python bench/evidence/calls.py [--streams 100000] [--seed 1] [--found FOLDER]

Each stream takes names of `ckptlint/formats/pickles/calls.toml`, mostly with the arguments that real files give, and
puts something in the place of one: a partial, a name, the result of `getattr`, an object whose attributes are called,
bytes of any protocol, items, a second BUILD, the state of a class that has code of its own for being restored or
deleted. A child process, forked from one that has torch imported, loads it with `pickle.load`, or with `torch.load`
where it has storages, in a folder of its own under an audit hook. The hook fires on the import of a module, on opening
a file to write, on exec, compile, processes, sockets and changes of files; a new file in the folder counts too.
ckptlint then reads the same stream. One on which the hook fired and which is not SAF001 is a miss: it is loaded again
in a process of its own, left in FOLDER, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import tomllib
import types
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "ckptlint" / "formats" / "pickles" / "calls.toml"
BATCH = 64
SECONDS = 5
MARK = "marked"  # the file that an effect leaves in the folder of the child

Chance = random.Random


# ---------------------------------------------------------------- opcodes


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def blob(value: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def named(module: str, name: str, stacked: bool = False) -> bytes:
    if stacked or "." in name:
        return text(module) + text(name) + pickle.STACK_GLOBAL
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def tuple_of(*values: bytes) -> bytes:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


def list_of(*values: bytes) -> bytes:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS


def dict_of(**values: bytes) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(text(k) + v for k, v in values.items()) + pickle.SETITEMS


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + pickle.REDUCE


def new(made: bytes, *arguments: bytes) -> bytes:
    return made + tuple_of(*arguments) + pickle.NEWOBJ


def new_of(made: bytes, **options: bytes) -> bytes:
    return made + pickle.EMPTY_TUPLE + dict_of(**options) + pickle.NEWOBJ_EX


# ---------------------------------------------------------------- what acts

ACTS: list[tuple[str, str, Callable[[], list[bytes]]]] = [
    ("os", "mkdir", lambda: [text(MARK)]),
    ("posix", "system", lambda: [text(f"touch {MARK}")]),
    ("builtins", "eval", lambda: [text(f"open('{MARK}', 'w')")]),
    ("builtins", "open", lambda: [text(MARK), text("w")]),
    ("_io", "FileIO", lambda: [text(MARK), text("w")]),
    ("pickle", "loads", lambda: [blob(inner(0))]),
    ("torch._C", "PyTorchFileWriter", lambda: [text(MARK)]),
    ("numpy", "memmap", lambda: [text(MARK), text("u1"), text("w+"), number(0), number(1)]),
    ("importlib", "import_module", lambda: [text("this")]),
    ("sympy.core.sympify", "sympify", lambda: [text(f"open('{MARK}', 'w')")]),
    ("sympy.core.function", "Derivative", lambda: [text(f"open('{MARK}', 'w')")]),
    ("yaml", "unsafe_load", lambda: [text(f"!!python/object/apply:os.mkdir [{MARK}]")]),
    ("own_code", "act", lambda: [text(MARK)]),
    ("own_code", "Actor", lambda: [text(MARK + "/x")]),
]
LOADER = ("torch.storage", "_load_from_bytes")


def inner(protocol: int) -> bytes:
    """A pickle that acts, in a protocol."""
    if protocol == 0:
        return f"cos\nmkdir\n(S'{MARK}'\ntR.".encode()
    made = named("os", "mkdir", protocol >= 4) + tuple_of(text(MARK)) + pickle.REDUCE
    if protocol == 1:
        return made + pickle.STOP
    frame = pickle.FRAME + struct.pack("<Q", len(made) + 1) if protocol >= 4 else b""
    return pickle.PROTO + bytes([protocol]) + frame + made + pickle.STOP


def loaded_bytes(chance: Chance) -> bytes:
    """Bytes for a loader: a pickle that acts, in torch's old format, in an archive, or hidden in a bytearray."""
    data = inner(chance.randrange(6))
    equal = chance.choice((int, Decimal, Fraction))  # to the number that torch asks for
    magic = b"".join(pickle.dumps(part, 2) for part in (equal(0x1950A86A20F9469CFC6C), 1001, {}))
    form = chance.randrange(6)
    if form == 1:
        data = magic + data
    elif form == 2:
        data = archive(data)
    elif form == 5:  # a frame that reaches over the pickles behind its own
        data = b"\x80\4\x95" + struct.pack("<Q", 12 + len(magic) + len(data)) + magic[2:] + data
    elif form == 3:  # ckptlint would judge the beginning
        start = tuple_of(blob(magic)) + pickle.REDUCE
        return named("builtins", "bytearray") + start + pickle.MARK + b"".join(map(number, data)) + pickle.APPENDS
    elif form == 4:
        return call(named("_codecs", "encode"), text((magic + data).decode("latin-1")), text("latin1"))
    return blob(data)


def archive(data: bytes) -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", data)
        made.writestr("archive/version", "3\n")
        made.writestr("archive/data/0", bytes(64))
    return file.getvalue()


def acting(chance: Chance) -> tuple[bytes, list[bytes]]:
    """A callable that acts, and the arguments with which it does."""
    kind = chance.randrange(6)
    if kind < 2:
        return named(*LOADER), [loaded_bytes(chance)]
    if kind == 2:
        owner, name = chance.choice([("numpy ndarray", "tofile"), ("torch.storage UntypedStorage", "from_file")])
        got = call(named("builtins", "getattr"), named(*owner.split()), text(name))
        array = call(named("numpy", "zeros"), number(3)) if chance.random() < 0.3 else honest("array", chance)
        return got, [array, text(MARK)] if name == "tofile" else [text(MARK), pickle.NEWTRUE, number(8)]
    module, name, arguments = chance.choice(ACTS[6:] if chance.random() < 0.7 else ACTS)
    return named(module, name, chance.random() < 0.3), arguments()


def partial_of(chance: Chance) -> bytes:
    """A partial that acts when it is called, filled as Python writes it or in its call."""
    function, arguments = acting(chance)
    if chance.random() < 0.4:
        return call(named("functools", "partial"), function, *arguments)
    state = tuple_of(function, tuple_of(*arguments), pickle.EMPTY_DICT, pickle.NONE)
    first = named("torch.nn.init", "normal_") if chance.random() < 0.3 else function
    return call(named("functools", "partial"), first) + state + pickle.BUILD


# ---------------------------------------------------------------- objects whose attributes are called

_NAMES = """
keys items __getitem__ __iter__ __len__ detach requires_grad_ dtype device _untyped_storage to startswith update
__setstate__ append extend add set_ data setdefault _patch_step_function _hook_for_profile _flat_weights replace read
_init_flat_weights decode __float__ numerator as_integer_ratio __index__ fget _metadata __class__ element_type copy
"""
NAMES = _NAMES.split()
_OBJECTS = """
argparse:Namespace types:SimpleNamespace collections:UserDict collections:ChainMap collections:OrderedDict
own_code:Plain own_code:AttrDict torch.optim:Adam torch.optim:SGD torch.nn.modules.linear:Linear
torch.distributed.checkpoint.metadata:Metadata torch.distributed.checkpoint.metadata:MetadataIndex
torch.nn.modules.rnn:LSTM torch.distributed.device_mesh:DeviceMesh collections:Counter
"""
OBJECTS = _OBJECTS.split()


def an_object(chance: Chance, weapon: bytes) -> bytes:
    """An object with attributes or items that are a weapon."""
    module, _, name = chance.choice(OBJECTS).partition(":")
    made = named(module, name)
    is_called = name in ("SimpleNamespace", "OrderedDict", "Counter")
    made += pickle.EMPTY_TUPLE + (pickle.REDUCE if is_called else pickle.NEWOBJ)
    attributes = dict_of(**dict.fromkeys(chance.sample(NAMES, chance.randint(1, 4)), weapon))
    way = chance.randrange(6)
    if way == 0:
        attributes = tuple_of(pickle.NONE, attributes)
    if way == 1 or name == "AttrDict":
        made += text(chance.choice(("__setstate__", "extend", "append"))) + weapon + pickle.SETITEM
    if way != 1:
        made += attributes + pickle.BUILD
    if way in (2, 3):  # what pickle then looks up is an attribute
        made += chance.choice((text(MARK), loaded_bytes(chance), pickle.EMPTY_DICT)) + pickle.BUILD
    if way == 4:
        made += chance.choice((text(MARK), loaded_bytes(chance))) + pickle.APPEND
    return made


@cache
def restorers() -> list[tuple[str, str]]:
    """Classes of torch, numpy and Python that have code of their own for being restored, copied or deleted."""
    found = []
    for place, module in sorted(sys.modules.items()):
        if place.partition(".")[0] in ("torch", "numpy", *sys.stdlib_module_names) and "__main__" not in place:
            for name, value in sorted(vars(module).items()):
                ways = ("__setstate__", "__reduce_ex__", "__deepcopy__", "__del__")
                if (
                    isinstance(value, type)
                    and value.__module__ == place
                    and any(way in vars(base) for way in ways for base in value.__mro__ if base is not object)
                ):
                    found.append((place, name))
    return found


_USES = """
_container state data_groups defaults param_groups hook module handle fd _patch_step_function _flat_weights _all_weights
__deepcopy__ __reduce_ex__ __dict__ items pop keys update setdefault args func loc scale fields axes mesh_dim_names
close
"""
USES = _USES.split()


def restored(chance: Chance, thing: bytes, depth: int = 0) -> bytes:
    """An object of a class with code of its own for being restored, its state around the names that such code uses."""
    names = chance.sample(USES, chance.randint(1, 5))
    values = {}
    for name in names:
        kind = chance.randrange(5)
        if kind == 0 and depth < 2:
            values[name] = restored(chance, thing, depth + 1)
        elif kind == 1:
            inner = dict_of(**dict.fromkeys(chance.sample(USES, 2), thing))
            values[name] = call(named("types", "SimpleNamespace")) + inner + pickle.BUILD
        elif kind == 2:
            values[name] = chance.choice((pickle.EMPTY_DICT, list_of(thing), tuple_of(thing, pickle.EMPTY_TUPLE)))
        else:
            values[name] = chance.choice((thing, number(chance.choice((0, 1, 200)))))
    made = new(named(*chance.choice(restorers())))
    return made + chance.choice((dict_of(**values), tuple_of(pickle.NONE, dict_of(**values)))) + pickle.BUILD


def weapon(chance: Chance, depth: int = 0) -> bytes:
    """Something that has no business among the arguments of a call."""
    kind = chance.randrange(10)
    if kind == 2:
        return restored(chance, partial_of(chance) if chance.random() < 0.5 else acting(chance)[0])
    if kind < 3:
        return an_object(chance, partial_of(chance))
    if kind < 5:
        return partial_of(chance)
    if kind == 5:
        function, arguments = acting(chance)
        return an_object(chance, function) if chance.random() < 0.5 else function
    if kind == 6:
        function, arguments = acting(chance)
        return chance.choice((call, new))(function, *arguments)
    if kind == 7 and depth < 2:
        return a_call(chance, depth + 1)
    if kind == 8:
        return loaded_bytes(chance)
    rows = entries()
    return named(*chance.choice(rows)[0])


# ---------------------------------------------------------------- honest arguments


@cache
def entries() -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """The names of the table with their entries."""
    found = []
    for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["calls"]:
        for line in [entry["names"]] if isinstance(entry["names"], str) else entry["names"]:
            modules, _, names = line.partition(":")
            found += [((module.strip(), name), entry) for module in modules.split(",") for name in names.split()]
    return found


@cache
def givers() -> dict[str, list[tuple[tuple[str, str], dict[str, Any]]]]:
    """By word: the names that give it, or are it."""
    found: dict[str, list[Any]] = {}
    for pair, entry in entries():
        for field in ("gives", "as"):
            if word := entry.get(field):
                found.setdefault(word, []).append((pair, entry))
    return found


STORAGE = (
    tuple_of(text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"), number(16)) + pickle.BINPERSID
)
PLAIN: dict[str, Callable[[Chance], bytes]] = {
    "any": lambda c: number(1),
    "none": lambda c: pickle.NONE,
    "flag": lambda c: pickle.NEWFALSE,
    "int": lambda c: number(c.choice((0, 1, 3))),
    "float": lambda c: pickle.BINFLOAT + struct.pack(">d", 0.5),
    "number": lambda c: number(1),
    "text": lambda c: text(c.choice(("cpu", "f4", "1", "torch.strided", "MT19937", "utf-8", MARK))),
    "bytes": lambda c: blob(c.choice((b"b", b"\7\350\1\1\0\0\0\0\0\0", b"\0" * 16))),
    "buffer": lambda c: call(named("builtins", "bytearray"), blob(b"ab")),
    "list": lambda c: list_of(number(1), text("a")),
    "tuple": lambda c: tuple_of(number(1)),
    "dict": lambda c: dict_of(a=number(1)),
    "mapping": lambda c: call(named("collections", "OrderedDict")),
    "ints": lambda c: tuple_of(*map(number, (2,) * c.randrange(3))),
    "ratio": lambda c: text("-3/4"),
    "decimal": lambda c: text(c.choice(("1.5", "1E+10"))),
    "numpy_code": lambda c: text(c.choice(("f4", "V8", "U5", "O8"))),
    "pairs": lambda c: list_of(tuple_of(text("a"), number(1))),
    "plain": lambda c: dict_of(int=number(5)),
    "attributes": lambda c: dict_of(a=number(1)),
    "kept": lambda c: dict_of(a=number(1)),
    "apart": lambda c: dict_of(a=number(1)),
    "type": lambda c: named(*c.choice((("own_code", "Plain"), ("torch.distributed.tensor", "DTensor")))),
    "stranger": lambda c: named("own_code", "act"),
    "storage": lambda c: STORAGE,
    "array": lambda c: call(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"),
                            tuple_of(number(0)), blob(b"b")),
    "tensor": lambda c: call(named("torch._utils", "_rebuild_tensor_v2"), STORAGE, number(0), tuple_of(number(2)),
                             tuple_of(number(1)), pickle.NEWFALSE, call(named("collections", "OrderedDict"))),
}  # fmt: skip


def honest(word: str, chance: Chance, depth: int = 0) -> bytes:
    """A value for a word of the table."""
    word = chance.choice(split(word.strip(" []*"), "|")).strip()
    if word.startswith("("):
        return tuple_of(*(honest(part, chance, depth) for part in split(word[1:-1])))
    if word.startswith("'"):
        return text(word[1:-1])
    if word in PLAIN:
        return PLAIN[word](chance)
    pair, entry = chance.choice(givers()[word])
    if entry.get("gives") == word and depth < 3:
        return arguments_of(pair, entry, chance, depth + 1)
    return named(*pair)


def split(shape: str, mark: str = ",") -> list[str]:
    """The parts of a shape, at its outer commas or bars."""
    parts, depth = [""], 0
    for letter in shape:
        depth += (letter == "(") - (letter == ")")
        if letter == mark and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def arguments_of(
    pair: tuple[str, str], entry: dict[str, Any], chance: Chance, depth: int = 0, spoil: bool = False
) -> bytes:
    """A call of a listed name, honest or with a weapon in one place."""
    ways = [(field, shape) for field in ("call", "new") for shape in entry.get(field, ())]
    field, shape = chance.choice(ways) if ways else (chance.choice(("call", "new")), "any")
    parts = [part for part in split(shape) if not part.strip().startswith("[") or chance.random() < 0.5]
    values = [honest(part, chance, depth) for part in parts]
    if spoil:
        at = chance.randrange(len(values) + 1)
        values[at : at + (chance.random() < 0.8)] = [weapon(chance, depth)]
    made = (call if field == "call" else new)(named(*pair, "." in pair[1]), *values)
    if (state := entry.get("state")) and (not spoil or chance.random() < 0.5):
        filled = honest(state, chance, depth) if not spoil or chance.random() < 0.5 else weapon(chance, depth)
        made += filled + pickle.BUILD
    return made


def a_call(chance: Chance, depth: int = 0) -> bytes:
    """A call of a listed name with something wrong."""
    pair, entry = chance.choice([item for item in entries() if "call" in item[1] or "new" in item[1]])
    made = arguments_of(pair, entry, chance, depth, spoil=True)
    match chance.randrange(12):
        case 0:
            made += weapon(chance, 2) + pickle.APPEND
        case 1:
            made += text("keys") + weapon(chance, 2) + pickle.SETITEM
        case 2:
            made += pickle.MARK + weapon(chance, 2) + pickle.ADDITEMS
        case 3:
            made += weapon(chance, 2) + pickle.BUILD
        case 4:
            made += tuple_of(text(MARK)) + pickle.REDUCE
        case 5:
            made += tuple_of(pickle.NONE, dict_of(**{chance.choice(NAMES): weapon(chance, 2)})) + pickle.BUILD
    return made


def tricks(chance: Chance) -> bytes:
    """A weapon where it is used later: through the memo, twice, as a class that is changed."""
    thing = weapon(chance)
    match chance.randrange(6):
        case 5:
            made, name = named("builtins", "type"), chance.choice(("dict", "object", "a"))
            return new_of(named(*chance.choice(entries())[0]) if chance.random() < 0.8 else made, **{name: thing})
        case 0:
            pair, _ = chance.choice(entries())
            stored = thing + pickle.BINPUT + b"\7" + pickle.POP
            return stored + call(named(*pair), pickle.BINGET + b"\7", pickle.BINGET + b"\7")
        case 1:
            return call(named("builtins", chance.choice(("dict", "list", "set", "tuple"))), thing)
        case 2:
            module, _, name = chance.choice(OBJECTS).partition(":")
            changed = tuple_of(pickle.NONE, dict_of(**{chance.choice(NAMES): thing})) + pickle.BUILD + pickle.POP
            return named(module, name) + changed + an_object(chance, thing)
        case 3:
            return thing + pickle.DUP + tuple_of(text(MARK)) + pickle.REDUCE + pickle.POP
        case _:
            function, arguments = acting(chance)
            head = "torch._tensor", "_rebuild_from_type_v2"
            return call(named(*head), function, named("torch", "Tensor"), tuple_of(*arguments), pickle.EMPTY_DICT)


def stream(chance: Chance) -> bytes:
    """A pickle of a few such values."""
    kinds = (a_call, a_call, tricks, weapon)
    parts = [chance.choice(kinds)(chance) for _ in range(chance.randint(1, 2))]
    return pickle.PROTO + b"\4" + b"".join(part + pickle.POP for part in parts[:-1]) + parts[-1] + pickle.STOP


# ---------------------------------------------------------------- loading

_FIRED: list[str] = []
_NAMED: set[str] = set()  # modules that the stream itself names, which may not be there
_WATCH: list[bool] = []
_CHANGES = re.compile(
    r"exec|compile|code\.__new__|subprocess\.|socket\.|ctypes\.|shutil\.|tempfile\.|sqlite3|sys\.(settrace|setprofile)|"
    r"os\.(mkdir|remove|rename|rmdir|chmod|chown|link|symlink|truncate|utime|system|exec|fork|forkpty|posix_spawn|spawn|"
    r"startfile|putenv|unsetenv|kill|chdir)"
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes what no loading of data does."""
    if not _WATCH:
        return
    if event == "pickle.find_class":
        _NAMED.update(arguments[0][: dot.start()] for dot in re.finditer(r"\.|$", arguments[0]))
    writes = event == "open" and (arguments[2] or 0) & _WRITES
    if writes or (event == "import" and arguments[0] not in _NAMED) or _CHANGES.match(event):
        _FIRED.append(event)


def own_code() -> types.ModuleType:
    """A module of a job: a class, a dict that finds attributes among its items, a function and a class that act."""
    module = types.ModuleType("own_code")
    source = """
class Plain:
    pass
class AttrDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name)
def act(*arguments):
    open("marked", "w").close()
class Actor:
    def __init__(self, path):  # of a word anything may be made, as of the value of an enum
        if "/" in path:
            open("marked", "w").close()
"""
    exec(source, vars(module))
    for value in vars(module).values():
        if hasattr(value, "__module__"):
            value.__module__ = "own_code"
    return module


def prepare() -> None:
    """Import what the names need, so that any later import is one that a call makes."""
    import torch

    sys.modules["own_code"] = own_code()
    for module, name in {(pair[0], pair[1]) for pair, _ in entries()} | {act[:2] for act in ACTS}:
        with suppress(Exception):
            __import__(module)
            getattr(sys.modules[module], name.partition(".")[0])
    for module in {name.partition(":")[0] for name in OBJECTS}:
        __import__(module)
    file = BytesIO()
    torch.save({"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(2)), "c": torch.ones(2).to_sparse()}, file)
    for warm in (file.getvalue(), old_format()):
        torch.load(BytesIO(warm), weights_only=False)
    rng = Chance(0)
    for pair, entry in entries():  # an honest call of each: what it imports when it is first used is its own need
        if "call" in entry or "new" in entry:
            with suppress(BaseException):
                load(pickle.PROTO + b"\4" + arguments_of(pair, entry, rng) + pickle.STOP)


def old_format() -> bytes:
    import torch

    file = BytesIO()
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def load(data: bytes) -> None:
    """As torch loads it where it has a storage, else as Python does."""
    if pickle.BINPERSID not in data:
        pickle.load(BytesIO(data))
    else:
        import torch

        torch.load(BytesIO(archive(data)), weights_only=False)


def child(streams: list[bytes], start: int, folder: str, out: int) -> None:
    """Load streams one after the other and write what fired; whoever stops early is gone on with by another child."""
    os.chdir(folder)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream_ in (0, 1, 2):
        os.dup2(nothing, stream_)
    for at in range(start, len(streams)):
        signal.alarm(SECONDS)
        _FIRED.clear()
        _NAMED.clear()
        payload = archive(streams[at]) if pickle.BINPERSID in streams[at] else b""
        _WATCH.append(True)
        try:
            if payload:
                import torch

                torch.load(BytesIO(payload), weights_only=False)
            else:
                pickle.load(BytesIO(streams[at]))
        except BaseException:  # what happened before the error counts
            pass
        finally:
            _WATCH.clear()
        fired = sorted(set(_FIRED)) + (["file"] if any(Path().iterdir()) else [])
        os.write(out, (json.dumps([at, fired]) + "\n").encode())
        if fired:  # what acted may have left more than a file: the rest goes to a fresh process
            break
    os._exit(0)


def fired(streams: list[bytes], folder: str) -> Iterator[tuple[int, list[str]]]:
    """The number of each stream and what fired on it; `died` where the child did not live to say."""
    at = 0
    while at < len(streams):
        for path in Path(folder).iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ours)
            child(streams, at, folder, theirs)
        os.close(theirs)
        with os.fdopen(ours) as answers:
            for line in answers:
                number_, events = json.loads(line)
                yield number_, events
                at = number_ + 1
        status = os.waitpid(pid, 0)[1]
        if status:  # killed by a limit, or a crash of the interpreter
            yield at, ["died"]
            at += 1


def judge(data: bytes) -> str:
    """What ckptlint says of a stream: refused, unreadable or passed."""
    from ckptlint.errors import CkptlintError
    from ckptlint.formats.pickles.safe_pickle import read_state

    try:
        return "refused" if read_state(data).refused else "passed"
    except CkptlintError:
        return "unreadable"


def run(count: int, seed: int, found: Path) -> tuple[Counter[str], Counter[str], list[bytes]]:
    """Make, load and judge so many streams.

    Returns:
        Streams by what happened (fired, quiet, died) and what ckptlint said; streams by event; the misses.
    """
    chance = Chance(seed)
    totals: Counter[str] = Counter()
    events: Counter[str] = Counter()
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        with chdir(folder):  # what is called there may leave a file
            prepare()
        sys.addaudithook(hook)
        for first in range(0, count, BATCH):
            streams = [stream(chance) for _ in range(min(BATCH, count - first))]
            for at, what in fired(streams, folder):
                verdict = judge(streams[at])
                acted = "died" if what == ["died"] else "fired" if what else "quiet"
                totals[f"{acted} {verdict}"] += 1
                events.update(what)
                if acted == "fired" and verdict != "refused":
                    again = dict(fired([streams[at]], folder)).get(0)  # alone, so that nothing before it is at fault
                    if again and again != ["died"]:
                        missed.append(streams[at])
                        found.mkdir(parents=True, exist_ok=True)
                        (found / f"{seed}-{first + at}-{verdict}.pkl").write_bytes(streams[at])
    return totals, events, missed


def main() -> None:
    """Run it and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--found", type=Path, default=Path("calls-found"))
    arguments = parser.parse_args()
    start = time.monotonic()
    totals, events, missed = run(arguments.streams, arguments.seed, arguments.found)
    print(f"{arguments.streams:,} streams, seed {arguments.seed}, {time.monotonic() - start:.0f} s")
    for name, number_ in sorted(totals.items()):
        print(f"  {name:<20} {number_:>9,}")
    print("  events: " + ", ".join(f"{name} {number_:,}" for name, number_ in events.most_common()))
    print(f"  acted and were not refused: {len(missed):,}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
