"""Hostile and damaged input: nothing in it runs, nothing of it reaches a terminal raw, and none of it passes."""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import pickletools
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pickles
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pickles import CF, CM, CP, Call, dumped, name_of, named, new, number, stream, text, write_zip
from support import REAL, REPOSITORY, check_bytes, codes, examples, found, report_on, run, run_python, swept

import ckptlint
from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickles import safe_pickle
from ckptlint.formats.pickles.safe_pickle import read_metadata, read_state
from ckptlint.formats.torch_archive import ranges_in, read_archive
from ckptlint.lint.report import Report
from ckptlint.lint.settings.options import FORMATS
from ckptlint.loaders.readers.common_state import _yaml
from ckptlint.model.text import printable
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.style import Style
from ckptlint.testing import write_checkpoint

pytestmark = pytest.mark.usefixtures("either_way")
one_way = pytest.mark.parametrize("either_way", ["opcode by opcode"], indirect=True)
"""For tests that read no metadata of their own in this process: there is nothing to read as columns."""
in_columns = pytest.mark.parametrize("either_way", ["in columns", *swept("opcode by opcode")], indirect=True)
"""For tests of small metadata, which has no rows: it is looked for columns, and then read opcode by opcode."""

MEGATRON = "megatron_edit_base/iter_0000010"
TARGET = ("pickles", "payload")  # can be imported, and would leave a trace
FOR_MACHINES = {  # one text, whatever the style
    name for name, form in FORMATS.items() if form.syntax in ("json", "markup") and name != "junit"
}


def with_common(folder: Path, data: bytes) -> Report:
    """The report on a healthy Megatron checkpoint whose common state is this pickle."""
    if not folder.exists():
        shutil.copytree(REAL / MEGATRON, folder)
    write_zip(folder / "common.pt", data)
    return ckptlint.check(folder)


def common_stream(value: bytes, protocol: int = 2) -> bytes:
    """A common state that holds this value beside an honest one."""
    return stream(
        pickle.EMPTY_DICT, pickle.MARK, text("iteration"), pickle.BININT1, b"\x0a", text("x"), value, pickle.SETITEMS,
        protocol=protocol,
    )  # fmt: skip


def outputs(report: Report) -> list[str]:
    """The report in every format, narrow and wide where a reader chooses, all of it shown."""
    narrow, wide = (Style(ascii_only=a, per_rule=0, verbose=True, width=w) for a, w in ((True, 80), (False, 120)))
    texts = [render(report, narrow) for render in REPORTERS.values()]
    texts += [render(report, wide) for name, render in REPORTERS.items() if name not in FOR_MACHINES]
    assert any(texts)
    return texts


def metadata_around(**extras: Any) -> bytes:
    """An honest `.metadata` of an empty state, with more attributes on its root."""
    state = {"state_dict_metadata": {}, "planner_data": {}, "storage_data": {}} | extras
    return dumped(new(CM, "Metadata", **state))


def metadata_of(tensors: dict[str, Any], storage: dict[Any, Any] | None = None, **extras: Any) -> bytes:
    return metadata_around(state_dict_metadata=tensors, storage_data=storage or {}, **extras)


def a_tensor(size: Any, *chunks: tuple[Any, Any]) -> Any:
    properties = new(CM, "TensorProperties", dtype=name_of("torch", "float32"))
    listed = [new(CM, "ChunkStorageMetadata", offsets=offsets, sizes=sizes) for offsets, sizes in chunks]
    return new(CM, "TensorStorageMetadata", properties=properties, size=size, chunks=listed)


def stored(fqn: str, path: str, offset: Any = None, start: Any = 0, length: Any = 10) -> dict[Any, Any]:
    index = {"fqn": fqn} if offset is None else {"fqn": fqn, "offset": offset}
    return {new(CM, "MetadataIndex", **index): new(CF, "_StorageInfo", relative_path=path, offset=start, length=length)}


# ---------------------------------------------------------------- nothing runs


def calling(opcode: str, protocol: int) -> bytes:
    """The opcodes that call the payload on one text, in the way named."""
    target = named(*TARGET, protocol)
    argument = text("ran")
    match opcode:
        case "REDUCE":
            return target + argument + pickle.TUPLE1 + pickle.REDUCE
        case "REDUCE, old tuple":
            return target + pickle.MARK + argument + pickle.TUPLE + pickle.REDUCE
        case "INST":
            return pickle.MARK + argument + pickle.INST + "\n".join(TARGET).encode() + b"\n"
        case "OBJ":
            return pickle.MARK + target + argument + pickle.OBJ
        case "NEWOBJ":
            return target + argument + pickle.TUPLE1 + pickle.NEWOBJ
        case "NEWOBJ_EX":
            return target + argument + pickle.TUPLE1 + pickle.EMPTY_DICT + pickle.NEWOBJ_EX
        case "twice":
            return target + argument + pickle.TUPLE1 + pickle.REDUCE + argument + pickle.TUPLE1 + pickle.REDUCE
        case "through the memo":
            through = pickle.BINPUT + b"\x07" + pickle.POP + pickle.BINGET + b"\x07"
            return target + through + argument + pickle.TUPLE1 + pickle.REDUCE
    raise AssertionError(opcode)


CALLS = ["REDUCE", "REDUCE, old tuple", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "twice", "through the memo"]


def byte_of(data: bytes) -> int:
    """Where the payload's name is asked for."""
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name == "STACK_GLOBAL" or (opcode.name in ("GLOBAL", "INST") and argument == " ".join(TARGET)):
            return position or 0
    raise AssertionError("no such opcode")


def assert_refused(report: Report, byte: int, target: str = ".".join(TARGET)) -> None:
    sentences = [title for code, level, title in found(report) if (code, level) == ("SAF001", "error")]
    assert len(sentences) == 1, found(report)
    assert target in sentences[0]
    assert f"at byte {byte:,}" in sentences[0]
    assert (report.exit_code, report.verdict) == (1, "fail")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_metadata_is_refused_and_not_made(tmp_path: Path, marker: Path, call: str, protocol: int) -> None:
    data = stream(calling(call, protocol), protocol=protocol)
    assert_refused(check_bytes(data, tmp_path / "ckpt"), byte_of(data))


@one_way
def test_the_payload_of_these_tests_would_leave_a_trace(marker: Path) -> None:
    pickle.loads(stream(calling("REDUCE", 2)))
    assert marker.read_text() == "('ran',)"
    marker.unlink()


def test_a_pickle_of_protocol_0_without_a_proto_opcode_never_passes(tmp_path: Path, marker: Path) -> None:
    data = pickle.GLOBAL + b"pickles\npayload\n(S'ran'\ntR."
    pickletools.dis(data, io.StringIO())
    report = check_bytes(data, tmp_path / "a")
    assert report.exit_code == 1
    assert codes(report, "error") & {"SAF001", "SAF002"}
    assert with_common(tmp_path / "b", data).exit_code == 1


def test_a_call_beside_a_missing_mark_is_refused(tmp_path: Path) -> None:
    report = check_bytes(b"\x80\x02cos\nsystem\nt.", tmp_path / "ckpt")
    assert (report.exit_code, codes(report, "error"), report.unreadable) == (1, {"SAF001"}, ())


def test_calls_hidden_inside_an_honest_metadata_are_found_and_the_rest_is_read(tmp_path: Path, marker: Path) -> None:
    tensors = {"w": a_tensor((4,), ((0,), (4,)))}
    hidden = Call(name_of(*TARGET), "ran")
    data = metadata_of(tensors, stored("w", "__0_0.distcp", (0,), 0, 100), planner_data={"w": ("w", hidden)})
    report = check_bytes(data, tmp_path / "ckpt")
    assert "SAF001" in codes(report, "error")
    assert list(report.checkpoints[0].checkpoint.tensors) == ["w"]
    assert report.exit_code == 1


def test_a_call_hidden_behind_an_unsupported_root_is_still_unsafe(tmp_path: Path, marker: Path) -> None:
    root = new("bytecheckpoint.checkpointer.meta_type", "Metadata", user_defined_dict=Call(name_of(*TARGET), "ran"))
    assert "SAF001" in codes(check_bytes(dumped(root), tmp_path / "ckpt"), "error")


# ---------------------------------------------------------------- BUILD against the stand-ins


STAND_INS = [
    (CM, "Metadata"), (CM, "TensorProperties"), (CP, "WriteItemType"), ("torch", "Size"), ("torch", "float32"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("collections", "OrderedDict"),
    ("builtins", "getattr"), (f"{CM}", "_MEM_FORMAT_ENCODING"),
]  # fmt: skip


def overwritten(module: str, name: str, *, slots: bool) -> bytes:
    """BUILD on a name itself: a pickle's way to set attributes of what it was given."""
    attributes = pickle.EMPTY_DICT + pickle.MARK
    for attribute in ("__setstate__", "__new__", "append", "kind", "__defaults__", "__kwdefaults__", "find_class"):
        value = text("torch.strided") + pickle.TUPLE1 if attribute == "__defaults__" else pickle.NONE
        attributes += text(attribute) + value
    attributes += pickle.SETITEMS
    state = pickle.NONE + attributes + pickle.TUPLE2 if slots else attributes
    return stream(named(module, name), state, pickle.BUILD)


@pytest.mark.parametrize("slots", [False, True], ids=["state", "slotstate"])
def test_damage_by_crafted_pickles_does_not_survive_them(tmp_path: Path, slots: bool) -> None:
    before = ckptlint.check(REAL / "fsdp2_4r"), ckptlint.check(REAL / MEGATRON)
    # what is an error before the attack must be one after it
    misuse = metadata_around(extra=Call(name_of("torch.serialization", "_get_layout")))
    assert check_bytes(misuse, tmp_path / "misuse").exit_code == 1
    for module, name in STAND_INS:
        attack = overwritten(module, name, slots=slots)
        check_bytes(attack, tmp_path / "a")
        with_common(tmp_path / "b", common_stream(attack[2:-1]))
    after = ckptlint.check(REAL / "fsdp2_4r"), ckptlint.check(REAL / MEGATRON)
    for first, second in zip(before, after, strict=True):
        assert found(first) == found(second)
        assert second.exit_code == 0
        assert first.checkpoints[0].checkpoint.tensors.keys() == second.checkpoints[0].checkpoint.tensors.keys()
    assert check_bytes(misuse, tmp_path / "misuse").exit_code == 1


@pytest.mark.parametrize("slots", [False, True], ids=["state", "slotstate"])
@pytest.mark.parametrize(("module", "name"), STAND_INS)
def test_build_leaves_the_module_as_it_was(module: str, name: str, slots: bool) -> None:
    from ckptlint.formats.pickles import safe_pickle as unpickle

    def state() -> dict[str, Any]:
        members = {
            key: item for key, item in vars(unpickle).items() if hasattr(item, "__dict__") and key != "__builtins__"
        }
        return {
            key: (dict(vars(item)), getattr(item, "__defaults__", None), getattr(item, "__kwdefaults__", None))
            for key, item in members.items()
        }

    before = state()
    for read in (read_metadata, read_state):
        try:
            read(overwritten(module, name, slots=slots))
        except ckptlint.errors.UnreadableError:
            continue
    after = state()
    assert {key: after[key] for key in before if after[key] != before[key]} == {}


@pytest.mark.parametrize("slots", [False, True], ids=["state", "slotstate"])
def test_build_on_an_instance_is_kept_as_data_or_refused(tmp_path: Path, marker: Path, slots: bool) -> None:
    attributes = pickle.EMPTY_DICT + text("state_dict_metadata") + named(*TARGET) + pickle.SETITEM
    state = pickle.NONE + attributes + pickle.TUPLE2 if slots else attributes
    data = stream(named(CM, "Metadata"), pickle.EMPTY_TUPLE, pickle.NEWOBJ, state, pickle.BUILD)
    report = check_bytes(data, tmp_path / "ckpt")
    assert report.exit_code == 1
    assert "SAF001" in codes(report, "error")


# ---------------------------------------------------------------- getattr on enums


MEMBER = named("builtins", "getattr") + named(CP, "WriteItemType") + text("SHARD") + pickle.TUPLE2 + pickle.REDUCE


def test_the_enum_of_python_3_11_2_is_honest(tmp_path: Path) -> None:
    value = Call(name_of("builtins", "getattr"), name_of(CP, "WriteItemType"), "SHARD")
    report = check_bytes(metadata_around(extra=value), tmp_path / "ckpt")
    assert codes(report, "error", "warning") == set()
    member = named("__builtin__", "getattr") + named("megatron.core.enums", "ModelType") + text("a") + pickle.TUPLE2
    state = read_state(common_stream(member + pickle.REDUCE))
    assert (state.refused, state.unknown) == ((), ())


@pytest.mark.parametrize(
    "opcodes",
    [
        MEMBER + text("x") + pickle.TUPLE1 + pickle.REDUCE,
        named("builtins", "getattr") + MEMBER + text("__class__") + pickle.TUPLE2 + pickle.REDUCE,
        named("builtins", "getattr") + named("torch", "Size") + text("__init__") + pickle.TUPLE2 + pickle.REDUCE,
        named("builtins", "getattr") + named(CM, "Metadata") + text("__init__") + pickle.TUPLE2 + pickle.REDUCE,
        named("builtins", "getattr") + text("a") + text("join") + pickle.TUPLE2 + pickle.REDUCE,
        named("builtins", "getattr") + named(*TARGET) + text("__globals__") + pickle.TUPLE2 + pickle.REDUCE,
        named("builtins", "getattr") + named(CP, "WriteItemType") + named(*TARGET) + pickle.TUPLE2 + pickle.REDUCE,
        named("builtins", "getattr") + named(CP, "WriteItemType") + pickle.TUPLE1 + pickle.REDUCE,
    ],
    ids=["called member", "nested", "Size", "Metadata", "text", "payload", "name is no text", "one argument"],
)
def test_getattr_on_anything_but_an_enum_never_passes(tmp_path: Path, marker: Path, opcodes: bytes) -> None:
    report = check_bytes(stream(opcodes), tmp_path / "a")
    assert report.exit_code == 1
    assert codes(report, "error") & {"SAF001", "SAF002"}
    inside = metadata_around()
    hidden = inside[:-1] + pickle.EMPTY_DICT + text("extra") + opcodes + pickle.SETITEM + pickle.BUILD + pickle.STOP
    assert check_bytes(hidden, tmp_path / "b").exit_code == 1


# ---------------------------------------------------------------- other ways to reach a name


@pytest.mark.parametrize(
    "opcode",
    [pickle.EXT1 + b"\xc8", pickle.EXT2 + b"\xc8\x00", pickle.EXT4 + b"\xc8\x00\x00\x00"],
    ids=["EXT1", "EXT2", "EXT4"],
)
@pytest.mark.parametrize("cached", [False, True], ids=["registered", "used before"])
def test_extension_codes_reach_nothing(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, opcode: bytes, cached: bool
) -> None:
    monkeypatch.setattr(copyreg, "_extension_registry", {})
    copyreg.add_extension(*TARGET, 200)
    try:
        if cached:
            assert pickle.loads(opcode + pickle.STOP) is pickles.payload
        report = check_bytes(stream(opcode, text("ran"), pickle.TUPLE1, pickle.REDUCE), tmp_path / "ckpt")
        ran = marker.exists()
        marker.unlink(missing_ok=True)
        assert not ran, "a payload was run"
        assert report.exit_code == 1
        if not cached:
            assert pickle.loads(opcode + pickle.STOP) is pickles.payload, "a stand-in was left in copyreg's cache"
    finally:
        copyreg.remove_extension(*TARGET, 200)
        copyreg.clear_extension_cache()


def test_an_unregistered_extension_code_is_unreadable(tmp_path: Path) -> None:
    assert codes(check_bytes(stream(pickle.EXT1 + b"\xc9"), tmp_path / "ckpt"), "error") == {"SAF002"}


@pytest.mark.parametrize("opcode", [pickle.PERSID + b"pickles.payload\n", text("x") + pickle.BINPERSID])
def test_persistent_ids_resolve_nothing(tmp_path: Path, marker: Path, opcode: bytes) -> None:
    report = check_bytes(stream(opcode), tmp_path / "a")
    assert codes(report, "error") == {"SAF002"}
    assert report.exit_code == 1
    assert with_common(tmp_path / "b", common_stream(opcode)).exit_code == 0


def partial_of(target: bytes, *arguments: bytes) -> bytes:
    """The opcodes that Python writes for a partial."""
    state = pickle.MARK + target + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.EMPTY_DICT + pickle.NONE
    return named("functools", "partial") + target + pickle.TUPLE1 + pickle.REDUCE + state + pickle.TUPLE + pickle.BUILD


def test_functools_partial_is_data(tmp_path: Path, marker: Path) -> None:
    call = partial_of(named(*TARGET), text("ran"))
    again = call + pickle.EMPTY_TUPLE + pickle.REDUCE
    assert "SAF001" in codes(check_bytes(stream(call), tmp_path / "a"), "error")
    assert with_common(tmp_path / "b", common_stream(call)).exit_code == 0
    assert "SAF001" in codes(with_common(tmp_path / "c", common_stream(again)), "error")
    inside = partial_of(named("os", "system"), text("true"))
    assert "SAF001" in codes(with_common(tmp_path / "d", common_stream(inside)), "error")


# those of test_gadgets act there, in this place too
GADGETS = """
nt.system os.execv builtins.__import__ __builtin__.execfile builtins.compile importlib.import_module runpy.run_path
shutil.rmtree socket.create_connection pty.spawn commands.getoutput webbrowser.open ctypes.CDLL _ctypes.dlopen
marshal.loads dill.loads cloudpickle.load joblib.load code.interact codeop.compile_command pdb.run trace.Trace bdb.Bdb
pip.main types.FunctionType types.CodeType operator.attrgetter _operator.attrgetter operator.methodcaller
functools.reduce sys.settrace io.FileIO tempfile.mktemp pathlib.Path _sqlite3.connect dbm.open logging.config.listen
asyncio.create_subprocess_shell multiprocessing.Process threading.Thread _thread.start_new_thread
concurrent.futures.ThreadPoolExecutor signal.signal numpy.load numpy.fromfile numpy.save
numpy.f2py.crackfortran.getlincoef numpy.lib.npyio.load pandas.eval pandas.read_pickle torch.load torch.hub.load
torch.hub.load_state_dict_from_url torch.jit.load torch.package.PackageImporter torch.serialization.load
torch.utils.collect_env.run torch.utils._config_module.load_config torch.utils.cpp_extension.load
torch.classes.load_library torch.ops.load_library torch._dynamo.guards.GuardBuilder
torch._inductor.codecache.compile_file torch.fx.graph_module._forward_from_src torch.distributed.rpc.rpc_sync
torch.multiprocessing.spawn torch.testing._internal.common_utils.run_tests _testcapi.run_in_subinterp
_xxsubinterpreters.run_string _posixsubprocess.fork_exec
"""


def test_a_name_known_to_be_dangerous_is_refused() -> None:
    for module, _, name in (target.rpartition(".") for target in GADGETS.split()):
        [refused] = read_state(stream(named(module, name), text("x"), pickle.TUPLE1, pickle.REDUCE)).refused
        assert (refused.target, refused.called, refused.unknown) == (f"{module}.{name}", True, False)


@one_way
@pytest.mark.parametrize(
    "target", ["os.path.join", "torch.hub", "a b.c", "os .system", "x\n.y", "subprocess.Popen.poll"]
)
def test_a_dotted_or_odd_name_is_refused_in_the_common_state(tmp_path: Path, target: str) -> None:
    module, _, name = target.rpartition(".")
    value = text(module) + text(name) + pickle.STACK_GLOBAL + pickle.EMPTY_TUPLE + pickle.REDUCE
    assert "SAF001" in codes(with_common(tmp_path / "a", common_stream(value, 4)), "error")
    head, _, rest = target.partition(".")
    value = text(head) + text(rest) + pickle.STACK_GLOBAL + pickle.EMPTY_TUPLE + pickle.REDUCE
    assert "SAF001" in codes(with_common(tmp_path / "b", common_stream(value, 4)), "error")


MADE = pickle.EMPTY_TUPLE + pickle.NEWOBJ
FILLED = MADE + pickle.EMPTY_DICT + text("a") + pickle.BININT1 + b"\1" + pickle.SETITEM + pickle.BUILD


def calling_with(*arguments: Any) -> bytes:
    """The opcodes that call what lies on the stack."""
    return pickle.MARK + b"".join(pickle.dumps(value, 2)[2:-1] for value in arguments) + pickle.TUPLE + pickle.REDUCE


HARMLESS = {
    "argparse.Namespace": FILLED, "types.SimpleNamespace": calling_with(), "pathlib.PosixPath": calling_with("a", "b"),
    "signal.Signals": calling_with(15), "signal.SIGTERM": b"", "_io.BytesIO": MADE,
    "collections.OrderedDict": calling_with(), "torch.bfloat16": b"", "torch.Generator": calling_with(),
    "torch._C.Generator": calling_with(), "numpy.ndarray": b"", "numpy.dtype": calling_with("f4", False, True),
    "numpy.dtypes.UInt32DType": b"", "megatron.core.enums.ModelType": calling_with(1),
    "megatron.core.transformer.enums.AttnBackend": calling_with(5),
    "megatron.core.transformer.enums.InferenceCudaGraphScope": calling_with(1),
    "megatron.core.optimizer.OptimizerConfig": FILLED, "megatron.core.rerun_state_machine.RerunState": calling_with(0),
    "transformer_engine.common.recipe.DelayedScaling": FILLED,
    "megatron.core.extensions.transformer_engine.TEDelayedScaling": FILLED, "datetime.timedelta": calling_with(1, 2, 3),
    "decimal.Decimal": calling_with("1.5"), "enum.Enum": b"", "uuid.UUID": MADE,
    "builtins.range": calling_with(0, 3, 1), "builtins.slice": calling_with(0, 3, None),
    "omegaconf.dictconfig.DictConfig": FILLED, "accelerate.parallelism_config.ParallelismConfig": FILLED,
    "torch.distributed.fsdp.MixedPrecisionPolicy": FILLED,
    "torch.distributed.fsdp._fully_shard._fsdp_api.CPUOffloadPolicy": FILLED,
    "torch.distributed.fsdp.wrap.transformer_auto_wrap_policy": b"",
}  # fmt: skip


@one_way
@pytest.mark.parametrize("target", HARMLESS)
def test_a_class_that_healthy_common_state_holds_is_not_even_a_note(tmp_path: Path, target: str) -> None:
    report = with_common(tmp_path / "ckpt", common_stream(named(*target.rsplit(".", 1)) + HARMLESS[target]))
    assert found(report) == []
    assert report.exit_code == 0


@one_way
@pytest.mark.parametrize("target", ["signal.SIGTERM", "megatron.core.enums.ModelType", "torch.optim.adam.Adam"])
def test_a_class_itself_in_the_common_state_is_data(tmp_path: Path, target: str) -> None:
    report = with_common(tmp_path / "ckpt", common_stream(named(*target.rsplit(".", 1))))
    assert codes(report, "error", "warning") == set()
    assert report.exit_code == 0


@one_way
@pytest.mark.parametrize(
    "target", ["my_training.config.Config", "slime.utils.Arguments", "transformers.models.llama.LlamaConfig"]
)
def test_a_class_nobody_knows_in_the_common_state_is_only_a_note(tmp_path: Path, target: str) -> None:
    value = named(*target.rsplit(".", 1)) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    value += pickle.EMPTY_DICT + text("a") + pickle.NONE + pickle.SETITEM + pickle.BUILD
    report = with_common(tmp_path / "ckpt", common_stream(value))
    assert [(code, level) for code, level, _ in found(report)] == [("SAF001", "info")]
    assert target in found(report)[0][2]
    assert (report.exit_code, report.verdict) == (0, "pass")
    assert codes(check_bytes(stream(value), tmp_path / "b"), "error") >= {"SAF001"}


# ---------------------------------------------------------------- what torch reads is what is judged


MALICIOUS = stream(named("posix", "system"), text("true"), pickle.TUPLE1, pickle.REDUCE)
BENIGN = common_stream(pickle.NONE)


HIDDEN = {
    # torch looks names up without regard to case, and finds the last of two
    "other case": [("common/version", b"3"), ("common/data.pkl", BENIGN), ("common/DATA.pkl", MALICIOUS)],
    "one name twice": [("common/version", b"3"), ("common/data.pkl", BENIGN), ("common/data.pkl", MALICIOUS)],
    "two folders": [("evil/version", b"3"), ("common/data.pkl", BENIGN), ("evil/data.pkl", MALICIOUS)],
    "a file and a folder": [("data.pkl", MALICIOUS), ("common/data.pkl", BENIGN)],
}


def hide(path: Path, case: str, call: bytes = MALICIOUS) -> None:
    """An archive whose harmless pickle is not the one that torch loads."""
    if case == "old format":
        # torch decides by the first four bytes, zip readers by the last: the old format's pickle is run
        path.write_bytes(call + write_zip(path, BENIGN).read_bytes())
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in HIDDEN[case]:
            archive.writestr(name, call if data == MALICIOUS else data)


@one_way
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", [*HIDDEN, "old format"])
def test_an_archive_is_not_judged_by_a_pickle_that_torch_does_not_load(tmp_path: Path, case: str) -> None:
    folder = Path(shutil.copytree(REAL / MEGATRON, tmp_path / "ckpt"))
    hide(folder / "common.pt", case)
    report = ckptlint.check(folder)
    assert report.verdict != "pass", found(report)
    assert codes(report, "error") & {"SAF001", "SAF002"}


@one_way
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", ["other case", "one name twice", "old format"])
def test_torch_does_run_what_such_an_archive_hides(tmp_path: Path, case: str) -> None:
    torch = pytest.importorskip("torch")
    call = stream(named("posix", "mkdir"), text(str(tmp_path / "ran")), pickle.TUPLE1, b"R")
    hide(tmp_path / "common.pt", case, call)
    with contextlib.suppress(Exception):  # what comes after the call is no checkpoint
        torch.load(tmp_path / "common.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


@one_way
@pytest.mark.parametrize("field", [42, 24], ids=["header offset", "size"])
def test_a_broken_archive_is_unreadable(tmp_path: Path, field: int) -> None:
    folder = Path(shutil.copytree(REAL / MEGATRON, tmp_path / "ckpt"))
    data = bytearray((folder / "common.pt").read_bytes())
    entry = data.index(b"PK\x01\x02")
    while not bytes(data[entry + 46 :]).startswith((b"common/data.pkl", b"archive/data.pkl")):
        entry = data.index(b"PK\x01\x02", entry + 1)
    data[entry + field : entry + field + 4] = b"\xf0\xff\xff\x7f"
    (folder / "common.pt").write_bytes(data)
    assert ckptlint.check(folder).exit_code == 1


@one_way
def test_a_zip64_offset_beyond_any_file_is_unreadable(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / MEGATRON, tmp_path / "ckpt"))
    name = b"common/data.pkl"
    extra = struct.pack("<HHQ", 1, 8, 2**64 - 1)
    head = struct.pack("<4s4B4HL2L", b"PK\x01\x02", 45, 3, 45, 0, 0, 0, 0, 33, 0, 4, 4)
    entry = head + struct.pack("<5H2L", len(name), len(extra), 0, 0, 0, 0, 0xFFFFFFFF) + name + extra
    start = b"PK\x03\x04" + bytes(60)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), len(start), 0)
    (folder / "common.pt").write_bytes(start + entry + end)
    with pytest.raises(UnreadableError):  # a record, which is read from memory
        read_archive(ranges_in(start + entry + end), len(start + entry + end))
    assert zipfile.is_zipfile(folder / "common.pt")
    assert codes(ckptlint.check(folder), "error") == {"SAF002"}


# ---------------------------------------------------------------- forged sizes


SERVER = """
import json, os, resource, sys
import ckptlint.lint.run, ckptlint.lint.registry
from ckptlint.formats.pickles import safe_pickle
ckptlint.lint.registry.load_rules()
for line in sys.stdin:
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            print(json.dumps(f"ended with {status}"), flush=True)
        continue
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    folder, safe_pickle.WORTHWHILE = json.loads(line)
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    report = ckptlint.check(folder)
    # not ru_maxrss, which begins at the peak of the process that this one was forked from
    peak = int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])
    levels = [d.code for d in report.diagnostics if d.severity.label == 'error']
    print(json.dumps([report.exit_code, levels, peak]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Checks folders in processes that may take 2 GiB and a minute of processor time each."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=REPOSITORY, **pipes) as process:
        yield process


@pytest.fixture
def limited(server: subprocess.Popen[str], tmp_path: Path) -> Limited:
    """Exit code and error codes of a folder with such metadata, found in a process that may take 2 GiB and a minute."""

    def checked(data: bytes, name: str = ".metadata") -> tuple[int, set[str]]:
        folder = tmp_path / "ckpt"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / "__0_0.distcp").write_bytes(b"PK\3\4" + bytes(96))
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps([str(folder), safe_pickle.WORTHWHILE]), file=server.stdin)
        answer = json.loads(server.stdout.readline())
        assert isinstance(answer, list), answer
        exit_code, listed, peak = answer
        assert peak < 2 * 1024**2, f"{peak} KiB were used"
        return exit_code, set(listed)

    return checked


Limited = Callable[..., tuple[int, set[str]]]

FORGED = {
    "LONG_BINPUT": pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 0x7FFFFFFF),
    "LONG_BINPUT, highest": pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 0xFFFFFFFF),
    "PUT": pickle.NONE + pickle.PUT + b"2000000000\n",
    "PUT, beyond": pickle.NONE + pickle.PUT + b"9" * 30 + b"\n",
    "BINBYTES8": pickle.BINBYTES8 + struct.pack("<Q", 2**60) + b"x",
    "BINBYTES8, 64 GiB": pickle.BINBYTES8 + struct.pack("<Q", 2**36) + b"x",
    "BINUNICODE8": pickle.BINUNICODE8 + struct.pack("<Q", 2**60) + b"x",
    "BINUNICODE8, beyond": pickle.BINUNICODE8 + struct.pack("<Q", 2**64 - 1) + b"x",
    "BYTEARRAY8": pickle.BYTEARRAY8 + struct.pack("<Q", 2**40) + b"x",
    "BINBYTES": pickle.BINBYTES + struct.pack("<I", 2**32 - 1) + b"x",
    "BINUNICODE": pickle.BINUNICODE + struct.pack("<I", 2**32 - 1) + b"x",
    "FRAME": pickle.FRAME + struct.pack("<Q", 2**60) + pickle.NONE,
    "FRAME, beyond": pickle.FRAME + struct.pack("<Q", 2**64 - 1) + pickle.NONE,
    "LONG4": pickle.LONG4 + struct.pack("<i", 2**31 - 1) + b"x",
    "LONG4, negative": pickle.LONG4 + struct.pack("<i", -1) + b"x",
    "paths of paths": named("pathlib", "PosixPath") + text("x" * 1000) + pickle.TUPLE1 + pickle.REDUCE
    + b"".join(
        pickle.BINPUT + bytes([i]) + pickle.POP + named("pathlib", "PosixPath") + (pickle.BINGET + bytes([i])) * 2
        + pickle.TUPLE2 + pickle.REDUCE for i in range(40)
    ),
}  # fmt: skip


@in_columns
@pytest.mark.parametrize("case", FORGED)
def test_a_forged_length_reserves_nothing(limited: Limited, case: str) -> None:
    exit_code, levels = limited(stream(FORGED[case], protocol=5))
    assert exit_code == 1
    assert levels in ({"SAF002"}, {"SAF003"})


DEEP = {
    "MARK": pickle.MARK * 1_000_000,
    "lists": pickle.EMPTY_LIST * 1_000_000 + pickle.APPEND * 999_999,
    "tuples": pickle.EMPTY_TUPLE + pickle.TUPLE1 * 1_000_000,
    "marked tuples": pickle.MARK * 1_000_000 + pickle.TUPLE * 1_000_000,
    "dicts": pickle.EMPTY_DICT + (pickle.NONE + pickle.EMPTY_DICT) * 100_000 + pickle.SETITEM * 100_000,
    "stand-ins": named(CM, "Metadata") * 100_000 + (pickle.EMPTY_LIST + pickle.TUPLE1 + pickle.REDUCE),
}


@in_columns
@pytest.mark.parametrize("case", DEEP)
def test_deep_nesting_is_unreadable(limited: Limited, case: str) -> None:
    exit_code, levels = limited(stream(DEEP[case]))
    assert exit_code == 1
    assert levels <= {"SAF002", "SAF003"}
    assert levels


@in_columns
@pytest.mark.parametrize("place", ["planner_data", "extra", "version", "storage_meta", "mcore_data"])
def test_deep_nesting_beside_an_honest_description_is_no_crash(limited: Limited, place: str) -> None:
    deep = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 200_000
    data = metadata_around()[:-1] + pickle.EMPTY_DICT + text(place) + deep + pickle.SETITEM + pickle.BUILD + pickle.STOP
    exit_code, _ = limited(data)
    assert exit_code in (0, 1)


def test_a_key_that_crashes_the_reader_is_a_finding(limited: Limited) -> None:
    # hashing a deeply nested tuple overruns the stack of the interpreter
    key = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 5_000_000
    assert limited(stream(pickle.EMPTY_DICT, key, pickle.NONE, pickle.SETITEM)) == (1, {"SAF003"})


@in_columns
@pytest.mark.forks
def test_a_key_that_takes_hours_to_hash_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.sandbox._BASE_SECONDS", 0.9)
    key = pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 60
    report = check_bytes(stream(pickle.EMPTY_DICT, key, pickle.NONE, pickle.SETITEM), tmp_path / "ckpt")
    assert codes(report, "error") == {"SAF003"}
    assert report.exit_code == 1


@pytest.mark.parametrize("digits", [10, 200])
def test_a_rank_number_in_a_file_name_reserves_nothing(limited: Limited, digits: int) -> None:
    data = metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", f"__{'9' * digits}_0.distcp", (0,), 0, 1600))
    exit_code, levels = limited(data)
    assert exit_code == 1
    assert levels == {"PAY003"}


@pytest.mark.parametrize("name", ["__9999999999.metadata", "__9999999999999999999999.metadata"])
def test_a_rank_number_of_a_metadata_file_reserves_nothing(limited: Limited, name: str) -> None:
    exit_code, levels = limited(metadata_around(), name)
    assert exit_code == 1
    assert levels <= {"COM001", "SAF003"}


@pytest.mark.forks
def test_a_metadata_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.write(b"\x80\x04")
        file.truncate(3 * 1024**3)
    report = ckptlint.check(tmp_path)
    assert codes(report, "error") == {"SAF003"}


@one_way
def test_a_pipe_in_place_of_metadata_is_not_waited_for(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes on this system")
    os.mkfifo(tmp_path / ".metadata")
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    done = run(tmp_path, own_process=True)
    assert done.returncode != 0


# ---------------------------------------------------------------- numbers and types that make no sense


HUGE = 10**5000  # more digits than Python turns into text
DIGITS = "9" * 5000
SENSELESS: dict[str, bytes] = {
    "huge size": metadata_of({"w": a_tensor((HUGE,), ((0,), (4,)))}),
    "huge negative size": metadata_of({"w": a_tensor((-HUGE,), ((0,), (4,)))}),
    "huge chunk": metadata_of({"w": a_tensor((4,), ((HUGE,), (HUGE,)))}),
    "least int64 as offset": metadata_of({"w": a_tensor((4,), ((-(2**63),), (4,)), ((0,), (4,)))}),
    "least int64 twice": metadata_of({"w": a_tensor((4,), ((-(2**63),), (-(2**63),)), ((0,), (4,)))}),
    "huge byte offset": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "f", (0,), HUGE, -HUGE)),
    "text as byte offset": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "f", (0,), "a", "b")),
    "text in the size": metadata_of({"w": a_tensor(("4",), ((0,), (4,)))}),
    "text in a chunk": metadata_of({"w": a_tensor((4,), (("a",), ("b",)))}),
    "fraction in a chunk": metadata_of({"w": a_tensor((4,), ((0,), (4.5,)))}),
    "None in a chunk": metadata_of({"w": a_tensor((4,), ((None,), (None,)))}),
    "text in an index": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "f", ("a",))),
    "tuple in an index": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "f", ((0,),))),
    "huge index": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "f", (HUGE,))),
    "long number in an object": metadata_of({f"k/shard_{DIGITS}_1": new(CM, "BytesStorageMetadata")}),
    "long number in a name": metadata_of({f"layers.{'0' * 300}{DIGITS}.{i}": a_tensor((4,)) for i in "ab"}),
    "surrogate in a path": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "a\ud800.distcp", (0,))),
    "zero byte in a path": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "a\0.distcp", (0,))),
    "path of 5,000 characters": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "a" * 5000, (0,))),
    "empty path": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", "", (0,))),
    "number as path": metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", 7, (0,))),  # type: ignore[arg-type]
    "number as key": metadata_of({7: a_tensor((4,), ((0,), (4,)))}),  # type: ignore[dict-item]
    "no chunk list": metadata_of({"w": new(CM, "TensorStorageMetadata", size=(4,), chunks=None)}),
    "chunks of another kind": metadata_of({"w": new(CM, "TensorStorageMetadata", size=(4,), chunks=[1, 2])}),
    "no properties": metadata_of({"w": new(CM, "TensorStorageMetadata", size=(4,), chunks=[])}),
    "an entry that is None": metadata_of({"w": None}),
    "65 axes": metadata_of({"w": a_tensor((1,) * 65, ((0,) * 65, (1,) * 65))}),
    "long key": metadata_of({"k" * 5000: a_tensor((4,), ((0,), (4,)))}),
    "storage of another kind": metadata_around(storage_data=[1]),
    "entries of another kind": metadata_around(state_dict_metadata=None),
    "root is a list": dumped([1]),
    "root is None": dumped(None),
    "root is a class": stream(named(CM, "Metadata")),
    "root is a dtype": stream(named("torch", "float32")),
    "root is torch.Size": stream(named("torch", "Size")),
    "root without state": dumped(new(CM, "Metadata")),
    "state is a list": stream(named(CM, "Metadata"), pickle.EMPTY_TUPLE, pickle.NEWOBJ, b"]b"),
    "two pickles": metadata_around() + metadata_around(),
}  # fmt: skip


@pytest.mark.sweep(share=3)
@in_columns
@pytest.mark.parametrize("case", SENSELESS)
def test_senseless_metadata_is_a_finding_in_every_format(tmp_path: Path, case: str) -> None:
    report = check_bytes(SENSELESS[case], tmp_path / "ckpt")
    assert report.unreadable == (), case  # a mistake of the reader
    assert report.exit_code == 1
    assert not any(part.failed for part in report.checkpoints), [part.failed for part in report.checkpoints]
    outputs(report)


@pytest.mark.parametrize("case", ["least int64 as offset", "least int64 twice", "fraction in a chunk"])
def test_numbers_that_box_arithmetic_does_not_take(tmp_path: Path, case: str) -> None:
    assert codes(check_bytes(SENSELESS[case], tmp_path / "ckpt"), "error") & {"SAF003", "SAF002"}


@one_way
@pytest.mark.parametrize(
    "value",
    [number(HUGE), number(-HUGE), text("4"), pickle.NONE, pickle.EMPTY_LIST, pickle.NEWTRUE],
    ids=["huge", "huge negative", "text", "None", "list", "True"],
)
def test_senseless_arguments_are_no_crash(tmp_path: Path, value: bytes) -> None:
    args = named("argparse", "Namespace") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
    for axis in ("tensor_model_parallel_size", "world_size", "pipeline_model_parallel_size"):
        args += text(axis) + value
    args += pickle.SETITEMS + pickle.BUILD
    data = stream(pickle.EMPTY_DICT, text("args"), args, pickle.SETITEM)
    report = with_common(tmp_path / "ckpt", data)
    assert report.exit_code in (0, 1)
    outputs(report)


@one_way
@pytest.mark.parametrize(
    "config",
    [b"[" * 100_000, b"{" * 100_000, b'{"sharded_backend": 7}', b"[]", b"null", b"\xff\xfe", b"9" * 5000, b"{}"],
)
def test_a_senseless_metadata_json_is_no_crash(tmp_path: Path, config: bytes) -> None:
    folder = Path(shutil.copytree(REAL / MEGATRON, tmp_path / "ckpt"))
    (folder / "metadata.json").write_bytes(config)
    report = ckptlint.check(folder)
    outputs(report)
    if config in (b"[" * 100_000, b"{" * 100_000, b"\xff\xfe"):
        assert report.exit_code == 1


TAGS = ["!!bool x", "!!int ''", "!!float ''", "!!timestamp x", "!!binary \u00e9", "!!null [", "!!set x"]
TAGS += ["!!int " + "9" * 5000, "!!python/object/apply:os.system [touch was_here]"]


@pytest.mark.sweep(share=3)
@one_way
@pytest.mark.parametrize("value", [*TAGS, "{? [a] : b}", "&a [*a]", "*nowhere", "[" * 1500])
def test_a_senseless_run_config_is_no_crash(tmp_path: Path, value: str) -> None:
    folder = Path(shutil.copytree(REAL / MEGATRON, tmp_path / "ckpt"))
    (folder / "run_config.yaml").write_text(f"model: {value}\n")
    report = ckptlint.check(folder)
    assert (report.exit_code, report.unreadable) == (0, ())
    outputs(report)


def laughs(form: str) -> str:
    """Each value is nine times the one before it."""
    rows = [f"a{i}: &a{i} " + form.format(", ".join([f"*a{i - 1}"] * 9)) for i in range(1, 12)]
    return "\n".join(["a0: &a0 {k: 1}", *rows])


@one_way
@pytest.mark.parametrize("text", [laughs("{{<<: [{}]}}"), laughs("[{}]"), "[" + "[]," * 30_000 + "]"])
def test_a_yaml_that_repeats_itself_is_a_limit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.loaders.readers.common_state._YAML_VALUES", 10_000)
    with pytest.raises(LimitError, match=r"^it has more than 10,000 values$"):
        _yaml(text)


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: {<<: *a}}"])
def test_a_yaml_that_contains_itself_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"^a value contains itself$"):
        _yaml(text)


def test_anchors_and_merges_of_a_yaml_are_followed_and_a_long_number_is_a_text() -> None:
    assert _yaml(value := "1" + ":1" * 200_000) == value
    text = "base: &b {x: 1, y: [1, 2]}\nmodel: {<<: *b, x: 2}\nother: *b\n_type: !!python/object:a.B {z: 3}"
    base = {"x": 1, "y": [1, 2]}
    assert _yaml(text) == {"base": base, "model": base | {"x": 2}, "other": base, "_type": {"z": 3}}


# ---------------------------------------------------------------- any bytes


SETTINGS = settings(max_examples=examples(5, 60), suppress_health_check=[HealthCheck.function_scoped_fixture])
METADATA = (REAL / "edit_base" / ".metadata").read_bytes()
WRITTEN = (REAL / MEGATRON / ".metadata").read_bytes()
with zipfile.ZipFile(REAL / MEGATRON / "common.pt") as _archive:
    COMMON = _archive.read(next(name for name in _archive.namelist() if name.endswith("data.pkl")))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of healthy checkpoints whose metadata is overwritten again and again."""
    parent = tmp_path_factory.mktemp("flipped")
    return {
        name: Path(shutil.copytree(REAL / name, parent / name.replace("/", "-"))) for name in ("edit_base", MEGATRON)
    }


def assert_judged(report: Report, tensors: int) -> None:
    """A pass is given only to metadata that was read, with all the tensors the checkpoint has."""
    for output in (REPORTERS["full"](report, Style()), REPORTERS["json"](report, Style())):
        assert output
    for part in report.checkpoints:
        assert part.failed == {}
    if report.exit_code == 0:
        assert len(report.checkpoints) == 1
        assert report.checkpoints[0].checkpoint.readable
        assert len(report.checkpoints[0].checkpoint.tensors) == tensors


@pytest.mark.forks
@SETTINGS
@given(st.binary(max_size=400))
@example(b"")
@example(b"\x80")
@example(b"\x80\x04.")
@example(b"\x80\x04N.")
def test_any_bytes_lead_to_a_report_that_is_no_pass(base: dict[str, Path], data: bytes) -> None:
    folder = base["edit_base"]
    for prefix in (b"", b"\x80\x04"):
        (folder / ".metadata").write_bytes(prefix + data)
        report = ckptlint.check(folder)
        assert report.verdict != "pass"
        assert codes(report, "error") <= {"SAF001", "SAF002", "SAF003"}


@SETTINGS
@given(st.integers(0, len(METADATA) - 1))
@example(0)
@example(1)
@example(len(METADATA) - 1)
def test_any_truncation_of_metadata_fails(base: dict[str, Path], length: int) -> None:
    (base["edit_base"] / ".metadata").write_bytes(METADATA[:length])
    report = ckptlint.check(base["edit_base"])
    assert report.exit_code == 1
    assert "SAF002" in codes(report, "error")


@settings(SETTINGS, max_examples=examples(10, 300))
@given(st.integers(0, len(METADATA) - 1), st.integers(1, 255))
def test_any_changed_byte_of_metadata_leads_to_a_report(base: dict[str, Path], position: int, change: int) -> None:
    changed = METADATA[:position] + bytes([METADATA[position] ^ change]) + METADATA[position + 1 :]
    (base["edit_base"] / ".metadata").write_bytes(changed)
    assert_judged(ckptlint.check(base["edit_base"]), tensors=2)


@SETTINGS
@given(st.integers(0, len(WRITTEN) - 1), st.integers(1, 255))
def test_any_changed_byte_of_megatron_metadata_leads_to_a_report(
    base: dict[str, Path], position: int, change: int
) -> None:
    folder = base[MEGATRON]
    (folder / "common.pt").write_bytes((REAL / MEGATRON / "common.pt").read_bytes())
    changed = WRITTEN[:position] + bytes([WRITTEN[position] ^ change]) + WRITTEN[position + 1 :]
    (folder / ".metadata").write_bytes(changed)
    healthy = len(ckptlint.load(REAL / MEGATRON).tensors)
    assert_judged(ckptlint.check(folder), tensors=healthy)


@one_way
@SETTINGS
@given(st.integers(0, len(COMMON) - 1), st.integers(0, 255))
def test_any_changed_byte_or_truncation_of_the_common_state_leads_to_a_report(
    base: dict[str, Path], position: int, change: int
) -> None:
    folder = base[MEGATRON]
    (folder / ".metadata").write_bytes(WRITTEN)
    healthy = len(ckptlint.load(REAL / MEGATRON).tensors)
    if change:
        data = COMMON[:position] + bytes([COMMON[position] ^ change]) + COMMON[position + 1 :]
        assert_judged(with_common(folder, data), tensors=healthy)
    else:
        report = with_common(folder, COMMON[:position])
        assert report.exit_code == 1
        assert "SAF002" in codes(report, "error")


@one_way
@SETTINGS
@given(st.data())
def test_any_changed_byte_of_the_archive_leads_to_a_report(base: dict[str, Path], data: st.DataObject) -> None:
    folder = base[MEGATRON]
    (folder / ".metadata").write_bytes(WRITTEN)
    whole = (REAL / MEGATRON / "common.pt").read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.integers(1, 255))
    (folder / "common.pt").write_bytes(whole[:position] + bytes([whole[position] ^ change]) + whole[position + 1 :])
    assert_judged(ckptlint.check(folder), tensors=len(ckptlint.load(REAL / MEGATRON).tensors))


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes if opcode.arg is None]
PIECES = st.one_of(
    st.sampled_from(OPCODES),
    st.sampled_from(
        [named(module, name) for module, name in STAND_INS] + [MEMBER, named(*TARGET), named("os", "system")]
    ),
    st.integers(-5, 5).map(number),
    st.sampled_from(["", "w", "state_dict_metadata", "storage_data", "fqn", "offset", "chunks"]).map(text),
    st.integers(0, 3).map(lambda slot: pickle.BINPUT + bytes([slot])),
    st.integers(0, 3).map(lambda slot: pickle.BINGET + bytes([slot])),
)


@pytest.mark.forks
@SETTINGS
@given(st.lists(PIECES, max_size=30))
def test_any_sequence_of_opcodes_leads_to_a_report_that_is_no_pass(base: dict[str, Path], pieces: list[bytes]) -> None:
    folder = base["edit_base"]
    trace = folder.parent / "was_here"
    pickles.TRACE = trace
    (folder / ".metadata").write_bytes(stream(*pieces))
    assert ckptlint.check(folder).verdict != "pass"
    (folder / ".metadata").write_bytes(METADATA)
    write_zip(folder / "common.pt", common_stream(b"".join(pieces)))
    ckptlint.check(folder)
    (folder / "common.pt").unlink()
    pickles.TRACE = None
    assert not trace.exists()


# ---------------------------------------------------------------- what reaches the terminal


NASTY = {
    "colour": "a\x1b[31mb", "title": "a\x1b]0;owned\x07b", "link": "a\x1b]8;;http://x\x1b\\b", "bidi": "a\u202eb\u202c",
    "isolate": "a\u2066b\u2069", "zero width": "a\u200bb\ufeff", "newline": "a\nb\r\nc",
    "separator": "a\u2028b\u2029c\x85d", "c1": "a\x9b31mb", "surrogate": "a\ud800b", "delete": "a\x7f\x08b",
    "tag": "a\U000e0041b",
}  # fmt: skip
RAW = set("\x1b\x07\r\x7f\x08\x85\x9b\u2028\u2029\u202e\u202c\u2066\u2069\u200b\ufeff\ud800\U000e0041")


def assert_clean(output: str) -> None:
    assert [hex(ord(c)) for c in output if c in RAW or (ord(c) < 32 and c != "\n")] == []


def name_case(folder: Path, nasty: str) -> Path:
    """A checkpoint with the name as key, file, dtype, object, plan and message, each of them in some finding."""
    chunk = ((0,), (2,))
    tensors = {
        nasty: a_tensor((4,), chunk),
        f"x.{nasty}.1": a_tensor((10**30,), chunk),
        f"{nasty}/shard_0_2": new(CM, "BytesStorageMetadata"),
        f"{nasty}/shard_x": new(CM, "BytesStorageMetadata"),
        "m": new(
            CM,
            "TensorStorageMetadata",
            properties=new(CM, "TensorProperties", dtype=nasty),
            size=(4,),
            chunks=[new(CM, "ChunkStorageMetadata", offsets=(0, 0), sizes=(1, 1))],
        ),
    }
    file = nasty.replace("\ud800", "")  # no file has such a name; see `test_senseless_metadata_...`
    storage = (
        stored(nasty, f"{file}__0_0.distcp", (0,)) | stored("m", f"../{file}", (0,)) | stored(f"stray{nasty}", "f")
    )
    folder.mkdir()
    (folder / ".metadata").write_bytes(metadata_of(tensors, storage, planner_data={nasty: (nasty,)}))
    (folder / "__0_0.distcp").write_bytes(b"PK\3\4" + bytes(100_000))
    return folder


@one_way
@pytest.mark.parametrize("format_", sorted(FOR_MACHINES))
def test_what_a_machine_reads_is_one_text_whatever_the_style(tmp_path: Path, format_: str) -> None:
    report = ckptlint.check(name_case(tmp_path / "ckpt", NASTY["colour"]))
    styles = [Style(ascii_only=True, per_rule=0, verbose=True, width=80), Style(width=120), Style(quiet=True)]
    assert len({REPORTERS[format_](report, style) for style in styles}) == 1


@pytest.mark.sweep(share=3)
@in_columns
@pytest.mark.parametrize("case", NASTY)
def test_names_reach_no_output_raw(tmp_path: Path, case: str) -> None:
    report = ckptlint.check(name_case(tmp_path / "ckpt", NASTY[case]))
    assert len(codes(report)) >= 4
    for output in (shown := outputs(report)):
        assert_clean(output)
    assert any(printable(NASTY[case]) in output for output in shown)
    document = json.loads(REPORTERS["json"](report, Style()))
    assert_clean(json.dumps(document, ensure_ascii=False).replace("\\n", ""))


@one_way
@pytest.mark.parametrize("format_", ["full", "concise", "json"])
@pytest.mark.parametrize("case", ["colour", "surrogate"])
def test_names_reach_no_terminal_raw(tmp_path: Path, case: str, format_: str) -> None:
    done = run(name_case(tmp_path / "ckpt", NASTY[case]), "-v", "--format", format_, "--max-per-rule", "0")
    assert done.returncode == 1, done.stderr
    assert_clean(done.stdout)
    assert_clean(done.stderr)


@pytest.mark.sweep(share=3)
@in_columns
@pytest.mark.parametrize("case", sorted(set(NASTY) - {"surrogate"}))
def test_names_in_a_refused_call_reach_no_output_raw(tmp_path: Path, case: str) -> None:
    nasty = NASTY[case]
    data = stream(text(nasty), text(nasty), pickle.STACK_GLOBAL, text("x"), pickle.TUPLE1, pickle.REDUCE, protocol=4)
    report = check_bytes(data, tmp_path / "ckpt")
    assert "SAF001" in codes(report, "error")
    other = with_common(tmp_path / "other", common_stream(data[2:-1], 4))
    for output in outputs(report) + outputs(other):
        assert_clean(output)


@pytest.mark.sweep(share=3)
@one_way
@pytest.mark.parametrize("suffix", [".safetensors", *swept(".data-00000-of-00001", ".distcp"), ""])
@pytest.mark.parametrize("case", sorted(set(NASTY) - {"surrogate", "newline", "link"}))
def test_file_names_reach_no_output_raw(tmp_path: Path, case: str, suffix: str) -> None:
    folder = tmp_path / f"run{NASTY[case]}"
    (folder / f"step-1{'' if suffix else NASTY[case]}").mkdir(parents=True)
    if suffix:
        (folder / "step-1" / f"evil{NASTY[case]}{suffix}").write_bytes(b"x")
    report = report_on(folder)
    assert report.exit_code in (1, 3)
    for output in outputs(report):
        assert_clean(output)


@one_way
def test_a_file_name_that_is_no_unicode_is_no_crash(tmp_path: Path) -> None:
    shutil.copytree(REAL / "edit_base", tmp_path / "ckpt")
    try:
        (Path(os.fsdecode(os.fsencode(tmp_path / "ckpt") + b"/\xff\xfe__9_0.distcp"))).write_bytes(bytes(100))
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    done = run(tmp_path / "ckpt", "-v", "--fail-on", "error")
    assert done.returncode == 0
    assert "\\udcff" in done.stdout
    json.loads(run(tmp_path / "ckpt", "--format", "json").stdout)


@one_way
@given(st.text(), st.text())
@example("a\x1b", "a\\x1b")
@example("\\", "\\\\")
@example("\ud800", "\\ud800")
@example("\u202e", "\\u202e")
@example("a\nb", "a\\nb")
def test_two_names_never_merge(a: str, b: str) -> None:
    assert (printable(a) == printable(b)) == (a == b)
    assert printable(a).isprintable()


def test_keys_that_differ_only_in_what_is_escaped_stay_apart(tmp_path: Path) -> None:
    names = ["a\x1b", "a\\x1b", "a\\\\x1b", "a\ud800", "a\\ud800"]
    tensors = {name: a_tensor((4,), ((0,), (2,))) for name in names}
    report = check_bytes(metadata_of(tensors), tmp_path / "ckpt")
    assert len(report.checkpoints[0].checkpoint.tensors) == len(names)
    assert len({item.fqn for item in report.diagnostics if item.code == "GEO004"}) == len(names)


# ---------------------------------------------------------------- the folder


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time and content of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else b"",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.mark.parametrize(
    "name", ["fsdp2_4r_hole", MEGATRON, "metadata_malicious", "metadata_truncated", "per_rank_metadata_missing_rank"]
)
def test_a_check_changes_nothing_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(REAL / name, tmp_path / "ckpt"))
    before = snapshot(folder)
    report = ckptlint.check(folder)
    outputs(report)
    run(folder, cwd=folder)
    assert snapshot(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../outside.distcp", "a/../../outside.distcp", "..\\outside.distcp", "C:\\x", "\\\\host\\x"]
)
@in_columns
@pytest.mark.parametrize("kind", ["tensor", "common state"])
def test_a_path_that_leaves_the_folder_is_not_touched(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "outside.distcp").write_bytes(b"secret" * 100)
    if kind == "tensor":
        data = metadata_of({"w": a_tensor((4,), ((0,), (4,)))}, stored("w", path, (0,), 0, 50))
    else:
        name = "common_state/shard_0_1"
        data = metadata_of({name: new(CM, "BytesStorageMetadata")}, stored(name, path, None, 0, 50))
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def seen(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes):
            os.write(log, os.path.realpath(os.fsencode(arguments[0])) + b"\n")  # from a child process too

    watching = True
    sys.addaudithook(seen)
    try:
        report = check_bytes(data, tmp_path / "ckpt")
    finally:
        watching = False
        os.close(log)
    touched = (tmp_path / "log").read_text().splitlines()
    assert "PAY003" in codes(report, "error")
    inside = os.path.realpath(tmp_path / "ckpt")
    assert [p for p in touched if p == os.path.realpath("/etc/passwd") or "outside" in p] == []
    assert any(p.startswith(inside) for p in touched)
    assert "secret" not in "".join(outputs(report))


def test_a_link_to_a_file_outside_is_a_note(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "ckpt"))
    (tmp_path / "blob").write_bytes((folder / "__1_0.distcp").read_bytes())
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").symlink_to(tmp_path / "blob")
    report = ckptlint.check(folder)
    assert [(code, level) for code, level, _ in found(report)] == [("PAY003", "info")]
    assert report.exit_code == 0


@one_way
@pytest.mark.parametrize("target", ["/dev/zero", "/dev", "nowhere", "__1_0.distcp"])
def test_a_link_to_no_regular_file_never_passes(tmp_path: Path, target: str) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "ckpt"))
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").symlink_to(target)
    report = ckptlint.check(folder)
    assert report.verdict != "pass"


def test_a_common_record_behind_a_link_outside_is_not_printed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"top secret " * 100)
    folder = tmp_path / "ckpt"
    folder.mkdir()
    name = "common_state/shard_0_1"
    (folder / "__0_0.distcp").symlink_to(secret)
    data = metadata_of({name: new(CM, "BytesStorageMetadata")}, stored(name, "__0_0.distcp", None, 0, 500))
    (folder / ".metadata").write_bytes(data)
    report = ckptlint.check(folder)
    assert report.exit_code == 1
    assert "top secret" not in "".join(outputs(report))


@one_way
def test_a_module_beside_the_checkpoint_is_not_imported(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path)
    for module in ("click", "numpy", "networkx", "ckptlint_plugin", "sitecustomize"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')")
    (tmp_path / "pyproject.toml").write_text('[tool.ckptlint]\nplugins = ["ckptlint_plugin"]\nselect = ["LNT002"]\n')
    script = Path(sys.executable).parent / "ckptlint"
    if not script.exists():
        pytest.skip("the ckptlint script is not installed beside this Python")
    program = "import sys, subprocess; sys.exit(subprocess.call(sys.argv[1:]))"
    done = run_python(program, script, tmp_path, "--depth", "files", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was_here").exists()


def test_the_path_a_writer_recorded_about_itself_is_not_printed(tmp_path: Path) -> None:
    meta = new(CM, "StorageMeta", checkpoint_id="/home/someone/private/run", save_id="x", load_id=None, modules=[])
    report = check_bytes(metadata_of({"w": a_tensor((4,), ((0,), (2,)))}, storage_meta=meta), tmp_path / "ckpt")
    assert report.exit_code == 1
    assert "private" not in "".join(outputs(report))
