"""Pickles that run code when they are loaded, each shown to, and none of them a pass or run by ckptlint."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import struct
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from pickles import named, stream, text, write_zip
from support import REAL, SWEEP, check_bytes, codes, found, run_python

import ckptlint

MARK = "@MARK@"
"""Stands for the path of the file whose existence shows that a gadget ran."""

# module, name, and the arguments as Python; a name with dots is taken apart by pickle from protocol 4 on
CALLS = """
os system 'touch @MARK@'
posix system 'touch @MARK@'
os popen 'touch @MARK@; echo'
os mkdir '@MARK@'
os makedirs '@MARK@'
os mkfifo '@MARK@'
os symlink '/', '@MARK@'
posix open '@MARK@', 66
os spawnlp 0, 'touch', 'touch', '@MARK@'
subprocess Popen ['touch', '@MARK@']
subprocess run ['touch', '@MARK@']
subprocess call ['touch', '@MARK@']
subprocess check_call ['touch', '@MARK@']
subprocess check_output ['touch', '@MARK@']
subprocess getoutput 'touch @MARK@'
subprocess getstatusoutput 'touch @MARK@'
builtins eval 'open("@MARK@", "w")'
builtins exec 'open("@MARK@", "w")'
builtins open '@MARK@', 'w'
io open '@MARK@', 'w'
_io open '@MARK@', 'w'
_io FileIO '@MARK@', 'w'
_pyio open '@MARK@', 'w'
codecs open '@MARK@', 'w'
shutil copyfile '/etc/hostname', '@MARK@'
shutil copy '/etc/hostname', '@MARK@'
timeit timeit 'open("@MARK@", "w")', 'pass', __import__('timeit').default_timer, 1
cProfile run 'open("@MARK@", "w")'
profile run 'open("@MARK@", "w")'
pydoc pipepager 'text', 'cat > @MARK@'
zipfile ZipFile '@MARK@', 'w'
tarfile open '@MARK@', 'w'
sqlite3 connect '@MARK@'
gzip open '@MARK@', 'w'
bz2 open '@MARK@', 'w'
lzma open '@MARK@', 'w'
logging FileHandler '@MARK@'
mailbox mbox '@MARK@'
uuid _get_command_stdout 'touch', '@MARK@'
urllib.request urlretrieve 'file:///etc/hostname', '@MARK@'
distutils.file_util write_file '@MARK@', ['a']
distutils.dir_util mkpath '@MARK@'
pathlib Path.touch __import__('pathlib').PosixPath('@MARK@')
pathlib os.mkdir '@MARK@'
random _os.mkdir '@MARK@'
argparse _os.mkdir '@MARK@'
uuid os.mkdir '@MARK@'
pickle loads b'cos\\nmkdir\\n(S"@MARK@"\\ntR.'
_pickle loads b'cos\\nmkdir\\n(S"@MARK@"\\ntR.'
numpy savetxt '@MARK@', [1.0]
numpy memmap '@MARK@', 'uint8', 'w+', 0, (1,)
numpy.lib.format open_memmap '@MARK@', 'w+', 'uint8', (1,)
numpy.testing._private.utils runstring 'open("@MARK@", "w")', {}
numpy.dtypes __loader__.set_data '@MARK@', b'x'
torch save 1, '@MARK@'
torch.serialization save 1, '@MARK@'
torch.serialization os.mkdir '@MARK@'
torch._C PyTorchFileWriter '@MARK@'
torch from_file '@MARK@', True, 1
torch.storage UntypedStorage.from_file '@MARK@', True, 1
torch.hub download_url_to_file 'file:///etc/hostname', '@MARK@', None, False
megatron.core.dist_checkpointing.strategies.torch os.mkdir '@MARK@'
yaml unsafe_load '!!python/object/apply:os.mkdir ["@MARK@"]'
sympy.core.sympify sympify '__import__("os").mkdir("@MARK@")'
sympy.parsing.sympy_parser parse_expr '__import__("os").mkdir("@MARK@")'
networkx.readwrite.edgelist write_edgelist __import__('networkx').Graph(), '@MARK@'
safetensors.numpy save_file {}, '@MARK@'
safetensors.torch save_file {}, '@MARK@'
accelerate.utils.other save {}, '@MARK@'
accelerate.utils.modeling os.mkdir '@MARK@'
click.utils open_file '@MARK@', 'w'
"""


def pushed(value: object) -> bytes:
    """The opcodes that push a value."""
    return pickle.dumps(value, 2)[2:-1]


def call(target: str, *arguments: bytes) -> bytes:
    """The opcodes that call a name on what the opcodes of its arguments push."""
    return named(*target.rsplit(".", 1)) + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def pickled_archive(folder: Path, data: bytes) -> bytes:
    return write_zip(folder / "archive.pt", data, "archive").read_bytes()


MAGIC = 0x1950A86A20F9469CFC6C  # of torch's old format


def shapes(mark: str, folder: Path) -> dict[str, bytes]:
    """Calls in other ways than REDUCE of a name that says what it does."""
    mkdir, path, as_bytes = named("os", "mkdir"), text(mark), mark.encode()
    inner = stream(call("os.mkdir", path))
    magic = b"".join(pickle.dumps(part, 2) for part in (MAGIC, 1001, {}))
    rebuild = named("torch._tensor", "_rebuild_from_type_v2") + pickle.MARK
    lazily = named("builtins", "map") + mkdir + path + pickle.TUPLE1 + pickle.TUPLE2
    partial = named("functools", "partial") + mkdir + path + pickle.TUPLE2 + pickle.REDUCE
    load = "torch.storage._load_from_bytes"
    return {
        "INST": pickle.MARK + path + pickle.INST + b"os\nmkdir\n",
        "OBJ": pickle.MARK + mkdir + path + pickle.OBJ,
        "NEWOBJ of a map, made a list": call("builtins.list", lazily + pickle.NEWOBJ),
        "NEWOBJ of a map, made a tuple by NEWOBJ": (
            named("builtins", "tuple") + lazily + pickle.NEWOBJ + pickle.TUPLE1 + pickle.NEWOBJ
        ),
        "NEWOBJ_EX": named("builtins", "list")
        + lazily
        + pickle.EMPTY_DICT
        + pickle.NEWOBJ_EX
        + pickle.POP
        + call("collections.deque", lazily + pickle.NEWOBJ),
        "a partial that is called": partial + pickle.EMPTY_TUPLE + pickle.REDUCE,
        "getattr of an import": call("builtins.getattr", call("builtins.__import__", text("os")), text("mkdir"))
        + path
        + pickle.TUPLE1
        + pickle.REDUCE,
        "reduce": call("functools.reduce", named("operator", "add"), pushed([1, 2]))
        + pickle.POP
        + call("functools.reduce", mkdir, pushed([mark, 0o700])),
        "reduce of enum": call("enum.reduce", mkdir, pushed([mark, 0o700])),
        "starmap": call("builtins.list", call("itertools.starmap", mkdir, pushed([(mark,)]))),
        "a tensor's type": rebuild
        + mkdir
        + pickle.NONE
        + pushed((mark,))
        + pickle.EMPTY_DICT
        + pickle.TUPLE
        + pickle.REDUCE,
        "a tensor's type, a partial": rebuild
        + partial
        + pickle.NONE
        + pickle.EMPTY_TUPLE
        + pickle.EMPTY_DICT
        + pickle.TUPLE
        + pickle.REDUCE,
        "a generator's constructor": call("numpy.random._pickle.__generator_ctor", path, mkdir),
        "a generator's constructor, unknown": call(
            "numpy.random._pickle.__generator_ctor",
            text(f"!!python/object/apply:os.mkdir [{mark!r}]"),
            named("yaml", "unsafe_load"),
        ),
        "bytes as an archive": call(load, pushed(pickled_archive(folder, inner))),
        "bytes in torch's old format": call(load, pushed(magic + inner)),
        "bytes of protocol 0": call(load, pushed(b"cos\nmkdir\n(S'" + as_bytes + b"'\ntR.")),
        "bytes of protocol 3": pickle.BINBYTES.join((named("torch.storage", "_load_from_bytes"), b""))
        + struct.pack("<I", len(inner))
        + inner
        + pickle.TUPLE1
        + pickle.REDUCE,
        "bytes in bytes": call(
            load, pushed(pickled_archive(folder, stream(call(load, pushed(pickled_archive(folder, inner))))))
        ),
        "hidden in an honest list": pushed([1, {"lr": 0.1}])[:-1] + pickle.APPEND.join((call("os.mkdir", path), b"")),
    }


def filled(target: str, **attributes: bytes) -> bytes:
    """The opcodes that make an object of a class and give it attributes."""
    state = b"".join(text(name) + value for name, value in attributes.items())
    made = pickle.REDUCE if target == "types.SimpleNamespace" else pickle.NEWOBJ
    made = named(*target.rsplit(".", 1)) + pickle.EMPTY_TUPLE + made
    return made + pickle.EMPTY_DICT + pickle.MARK + state + pickle.SETITEMS + pickle.BUILD


def partial_of(function: bytes, *arguments: bytes) -> bytes:
    """The opcodes that Python writes for a partial."""
    given = pickle.MARK + b"".join(arguments) + pickle.TUPLE
    state = pickle.MARK + function + given + pickle.EMPTY_DICT + pickle.NONE + pickle.TUPLE
    return named("functools", "partial") + function + pickle.TUPLE1 + pickle.REDUCE + state + pickle.BUILD


def pushed_bytes(value: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(value)) + value


def in_protocol(number: int, mark: str) -> bytes:
    """A pickle that makes a folder, as each protocol writes it."""
    if number == 0:
        return b"cos\nmkdir\n(S'" + mark.encode() + b"'\ntR."
    body = named("os", "mkdir", number) + text(mark) + (pickle.TUPLE1 if number > 1 else pickle.TUPLE) + pickle.REDUCE
    if number == 1:
        return named("os", "mkdir") + pickle.MARK + text(mark) + pickle.TUPLE + pickle.REDUCE + pickle.STOP
    return stream(body, protocol=number)


def of_known_names(mark: str) -> dict[str, bytes]:
    """Calls that make a folder with names that real files hold, each harmless on what real files give it."""
    load, path = named("torch.storage", "_load_from_bytes"), text(mark)
    data = pushed_bytes(in_protocol(0, mark))
    act = partial_of(load, data)
    keys = filled("argparse.Namespace", keys=act)
    detach = filled("argparse.Namespace", detach=act)
    number = pickle.BININT1 + b"\x02"
    array = call("numpy.core.multiarray._reconstruct", named("numpy", "ndarray"), pushed((0,)), pushed_bytes(b"b"))
    method = call("builtins.getattr", named("numpy", "ndarray"), text("tofile"))
    from_file = call("builtins.getattr", named("torch.storage", "UntypedStorage"), text("from_file"))
    file = pickle.MARK + path + pickle.NEWTRUE + number + pickle.TUPLE + pickle.REDUCE
    listing = partial_of(named("builtins", "list"), pushed([1]))
    factory = call("collections.defaultdict", act)
    maps = pickle.EMPTY_LIST + factory + pickle.APPEND
    meta = pushed((2,)) + pushed((1,)) + pickle.NEWFALSE + pickle.TUPLE
    meta = pickle.MARK + named("torch", "float32") + meta[:-1] + pickle.TUPLE
    attributes = pickle.EMPTY_DICT + text("detach") + act + pickle.SETITEM
    meta_tensor = named("torch._utils", "_rebuild_meta_tensor_no_storage")
    armed = call(
        "torch._tensor._rebuild_from_type_v2", meta_tensor, named("torch.nn.parameter", "Buffer"), meta, attributes
    )
    at_end = pickle.NEWTRUE + pickle.EMPTY_DICT
    parameter = partial_of(named("torch._utils", "_rebuild_parameter"), detach)
    changed = named("argparse", "Namespace") + pickle.NONE + pickle.EMPTY_DICT + text("keys") + act + pickle.SETITEM
    changed += pickle.TUPLE2 + pickle.BUILD + pickle.POP
    again = pickle.EMPTY_DICT + text("__setstate__") + load + pickle.SETITEM + pickle.BUILD + data + pickle.BUILD
    made = {
        "dict": call("builtins.dict", keys),
        "UserDict": call("collections.UserDict", keys),
        "OrderedDict": call("collections.OrderedDict", keys),
        "Counter": call("collections.Counter", filled("collections.UserDict", keys=act, data=pickle.EMPTY_DICT)),
        "ChainMap": call("builtins.dict", filled("collections.ChainMap", keys=act, maps=pickle.EMPTY_LIST)),
        "defaultdict": call("collections.defaultdict", pickle.NONE, keys),
        "a factory": call("builtins.dict", filled("collections.ChainMap", keys=listing, maps=maps)),
        "_reconstructor": call("copyreg._reconstructor", *(named("builtins", "dict"),) * 2, keys),
        "_reconstructor of an OrderedDict": call(
            "copyreg._reconstructor", named("collections", "OrderedDict"), named("builtins", "dict"), keys
        ),
        "Parameter": call("torch.nn.parameter.Parameter", detach),
        "Buffer": call("torch.nn.parameter.Buffer", detach),
        "_rebuild_parameter": call("torch._utils._rebuild_parameter", detach, at_end),
        "a parameter's state": call("torch._utils._rebuild_parameter_with_state", detach, at_end + at_end[1:]),
        "_rebuild_parameter of a tensor": call("torch._utils._rebuild_parameter", armed, at_end),
        "UUID": call("uuid.UUID", filled("types.SimpleNamespace", replace=parameter)),
        "a method of an array": method + array + path + pickle.TUPLE2 + pickle.REDUCE,
        "a method of an array, a partial": call(
            "builtins.dict", filled("argparse.Namespace", keys=partial_of(method, array, path))
        ),
        "a storage in a file": from_file + file,
        "a storage in a file, by NEWOBJ": call("builtins.dict", filled(
            "argparse.Namespace", keys=partial_of(from_file, path, pickle.NEWTRUE, number)
        )),
        "sympy": named("sympy.core.function", "Derivative")
        + text(f"__import__('os').mkdir({mark!r})") + pickle.TUPLE1 + pickle.NEWOBJ,
        "an optimizer": filled("torch.optim.Adam", _patch_step_function=act),
        "a class that is changed": changed + call("builtins.dict", filled("argparse.Namespace")),
        "a second BUILD": filled("argparse.Namespace")[: -len(pickle.EMPTY_DICT + pickle.MARK + pickle.SETITEMS + b"b")]
        + again,
        "a second BUILD of an OrderedDict": call("collections.OrderedDict") + again,
        "a second BUILD of metadata": named("torch.distributed.checkpoint.metadata", "Metadata")
        + pickle.EMPTY_TUPLE + pickle.NEWOBJ + again,
        "an item": filled("types.SimpleNamespace", append=load) + data + pickle.APPEND,
        "a bytearray": named("torch.storage", "_load_from_bytes")
        + call("builtins.bytearray", pushed_bytes(b""))
        + pickle.MARK + b"".join(pickle.BININT1 + bytes([byte]) for byte in in_protocol(0, mark)) + pickle.APPENDS
        + pickle.TUPLE1 + pickle.REDUCE,
    }  # fmt: skip
    inner, own = in_protocol(2, mark), named("own_code", Path(mark).name)
    for number in (Decimal(MAGIC), Fraction(MAGIC)):  # torch asks whether the first is equal to its number
        row = b"".join(pickle.dumps(part, 2) for part in (number, 1001, {})) + inner
        made[f"bytes behind a {type(number).__name__}"] = call("torch.storage._load_from_bytes", pushed_bytes(row))
    made["a function that an optimizer calls"] = filled("torch.optim.Adam", _patch_step_function=own)
    made["a function in an object that an optimizer calls"] = filled(
        "torch.optim.SGD", defaults=filled("types.SimpleNamespace", setdefault=own)
    )
    made["a sparsifier"] = filled(
        "torch.ao.pruning._experimental.data_sparsifier.data_norm_sparsifier.DataNormSparsifier",
        _container=pickle.EMPTY_DICT,
        state=filled("types.SimpleNamespace", __deepcopy__=own),
        data_groups=pickle.EMPTY_DICT,
    )
    for protocol in range(6):
        made[f"bytes of protocol {protocol}"] = load + pushed_bytes(in_protocol(protocol, mark)) + b"\x85R"
    return made


def gadgets(folder: Path) -> dict[str, tuple[Path, bytes]]:
    """Name -> the file that shows that it ran, and the pickle."""
    made: dict[str, tuple[Path, bytes]] = {}
    for number, line in enumerate(CALLS.strip().split("\n")):
        module, name, arguments = line.split(" ", 2)
        mark = folder / f"ran_{number}"
        value = eval(f"({arguments.replace(MARK, str(mark))},)")
        opcodes = text(module) + text(name) + pickle.STACK_GLOBAL + pushed(value) + pickle.REDUCE
        made[f"{module}.{name} {number}"] = mark, stream(opcodes, protocol=4)
    for number, name in enumerate(shapes("", folder)):
        mark = folder / f"shape_{number}"
        made[name] = mark, stream(shapes(str(mark), folder)[name], protocol=4)
    for number, name in enumerate(of_known_names("")):
        mark = folder / f"known_{number}"
        made[f"known: {name}"] = mark, stream(of_known_names(str(mark))[name], protocol=4)
    for protocol in (0, 1):
        mark = folder / f"old_{protocol}"
        opcodes = pickle.GLOBAL + b"os\nmkdir\n(S'" + str(mark).encode() + b"'\nt" + pickle.REDUCE + pickle.STOP
        made[f"protocol {protocol}"] = mark, (pickle.EMPTY_DICT + pickle.POP if protocol else b"") + opcodes
    return made


RUN = """
import json, os, pickle, sys, types
try:
    import torch
except ImportError:
    pass
def found(name):
    if name[0] == "_":
        raise AttributeError
    return lambda *_: open(name, "w").close()
sys.modules["own_code"] = types.ModuleType("own_code")
sys.modules["own_code"].__getattr__ = found
for file in json.load(sys.stdin):
    if not (child := os.fork()):
        os.close(1)
        os.close(2)
        with open(os.devnull, "w"), open(os.devnull, "w"):
            try:
                pickle.load(open(file, "rb"))
            finally:
                os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "win32", reason="the gadgets are those of a POSIX system")
def test_no_gadget_passes_or_runs(tmp_path: Path) -> None:
    made = gadgets(tmp_path)
    files = []
    tried = dict([*made.items()][:: 1 if SWEEP else 20])
    for number, (_, data) in enumerate(tried.values()):
        files.append(tmp_path / f"{number}.pkl")
        files[-1].write_bytes(data)
    run_python(RUN, input=json.dumps(list(map(str, files))), cwd=tmp_path, timeout=600)
    idle = [name for name, (mark, _) in tried.items() if not mark.exists() and not mark.is_symlink()]
    assert len(tried) - len(idle) >= 60 * len(tried) // len(made)
    assert not importlib.util.find_spec("torch") or [name for name in idle if name.startswith("known: ")] == []
    assert [name for name in idle if importlib.util.find_spec(name.partition(".")[0])] == []
    for mark, _ in made.values():
        if mark.is_dir() and not mark.is_symlink():
            shutil.rmtree(mark)
        else:
            mark.unlink(missing_ok=True)
    passed = {}
    folder = Path(shutil.copytree(REAL / "megatron_edit_base/iter_0000010", tmp_path / "megatron"))
    for name, (mark, data) in tried.items():
        inside = data[2:-1] if data[:1] == pickle.PROTO else data[:-1]
        write_zip(folder / "common.pt", stream(pickle.EMPTY_DICT, text("x"), inside, pickle.SETITEM, protocol=4))
        for place, report in (("common", ckptlint.check(folder)), ("metadata", check_bytes(data, tmp_path / "ckpt"))):
            if report.exit_code != 1 or "SAF001" not in codes(report, "error"):
                passed[name, place] = report.exit_code, found(report)
        assert not mark.exists() and not mark.is_symlink(), f"{name} ran"
    assert passed == {}
