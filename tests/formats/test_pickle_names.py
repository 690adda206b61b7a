"""Which names a pickle may ask for: exact pairs, and what decides about all others is the call."""

from __future__ import annotations

import enum
import io
import pickle
import pickletools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pickles import Call, dumped, name_of, named, stream, text, write_zip
from support import REAL, check_bytes, codes, found, run_python

import ckptlint
from ckptlint.formats.pickles.safe_pickle import asks_for_names, read_state
from ckptlint.formats.torch_archive import ranges_in, read_archive
from ckptlint.lint.report import Report


def with_common(folder: Path, *opcodes: bytes, trusted: str = "") -> Report:
    """The report on a healthy Megatron checkpoint whose common state holds what these opcodes push."""
    if not folder.exists():
        shutil.copytree(REAL / "megatron_edit_base/iter_0000010", folder)
    value = stream(pickle.EMPTY_DICT, text("x"), *opcodes, pickle.SETITEM, protocol=4)
    write_zip(folder / "common.pt", value)
    settings = folder.parent / "settings.toml"
    settings.write_text(f"[rules.unsafe-pickle]\ntrusted-modules = [{trusted!r}]\n")
    return ckptlint.check(folder, config=settings)


def called(target: str, *arguments: bytes) -> bytes:
    return named(*target.rsplit(".", 1)) + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def as_bytes(value: bytes) -> bytes:
    return pickle.BINBYTES + len(value).to_bytes(4, "little") + value


# ---------------------------------------------------------------- what real files hold

# every global in the states of fixtures/real, of public checkpoints and of what torch 2.13 and numpy 2.4 write, tensors
# of torch.distributed and the settings of FSDP among them, and of what these wrote on a CPU: DeepSpeed 0.19.8 (ZeRO 0
# to 3, in the Trainer too), transformers 5.x (Trainer: six optimizers, adapters), accelerate 1.15, verl 0.9.1 (FSDP 1
# and 2, tensor parallel), Lightning 2.6; none of them is even a note
REAL_NAMES = """
__builtin__.Ellipsis __builtin__.NotImplemented __builtin__.bytearray __builtin__.complex __builtin__.dict
__builtin__.frozenset __builtin__.getattr __builtin__.list __builtin__.long __builtin__.set __builtin__.slice
__builtin__.xrange _codecs.encode _io.BytesIO accelerate.parallelism_config.ParallelismConfig
accelerate.state.PartialState accelerate.utils.dataclasses.DeepSpeedPlugin accelerate.utils.dataclasses.DistributedType
accelerate.utils.dataclasses.FullyShardedDataParallelPlugin argparse.Namespace collections.Counter
collections.OrderedDict collections.defaultdict collections.deque datetime.datetime datetime.timedelta datetime.timezone
deepspeed.runtime.fp16.loss_scaler.LossScaler deepspeed.runtime.zero.config.ZeroStageEnum
deepspeed.utils.tensor_fragment.fragment_address megatron.core.enums.ModelType
megatron.core.extensions.transformer_engine.TEDelayedScaling megatron.core.rerun_state_machine.RerunMode
megatron.core.safe_globals.safe_load_from_bytes megatron.core.transformer.enums.AttnBackend
megatron.core.transformer.enums.CudaGraphModule megatron.core.transformer.enums.InferenceCudaGraphScope
numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar numpy.dtype numpy.dtypes.UInt32DType
numpy.ma.MaskedArray numpy.ma.core._mareconstruct numpy.ndarray numpy.random._mt19937.MT19937 numpy.random._pcg64.PCG64
numpy.random._pickle.__bit_generator_ctor numpy.random._pickle.__generator_ctor numpy.random._pickle.__randomstate_ctor
numpy.random.bit_generator.SeedSequence numpy.random.bit_generator.__pyx_unpickle_SeedSequence pathlib.PosixPath
random.Random re._compile torch.BFloat16Storage torch.BoolStorage torch.ByteStorage torch.CharStorage
torch.ComplexDoubleStorage torch.ComplexFloatStorage torch.DoubleStorage torch.FloatStorage torch.HalfStorage
torch.IntStorage torch.LongStorage torch.ShortStorage torch.Tensor torch._tensor._rebuild_from_type_v2
torch._utils._rebuild_parameter torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3
torch._utils._rebuild_wrapper_subclass torch.bfloat16 torch.bool torch.complex128 torch.complex64 torch.device
torch.distributed._mesh_layout._FlatLayout torch.distributed._mesh_layout._MeshLayout
torch.distributed._shard.metadata.ShardMetadata torch.distributed._shard.sharded_tensor.api.ShardedTensor
torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING
torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata
torch.distributed._shard.sharded_tensor.metadata.TensorProperties torch.distributed._shard.sharded_tensor.shard.Shard
torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec torch.distributed.device_mesh.DeviceMesh
torch.distributed.fsdp._fully_shard._fsdp_api.CPUOffloadPolicy
torch.distributed.fsdp._fully_shard._fsdp_api.MixedPrecisionPolicy
torch.distributed.fsdp._fully_shard._fsdp_api.OffloadPolicy torch.distributed.fsdp.api.BackwardPrefetch
torch.distributed.fsdp.api.CPUOffload torch.distributed.fsdp.api.FullOptimStateDictConfig
torch.distributed.fsdp.api.FullStateDictConfig torch.distributed.fsdp.api.MixedPrecision
torch.distributed.fsdp.api.ShardedOptimStateDictConfig torch.distributed.fsdp.api.ShardedStateDictConfig
torch.distributed.fsdp.api.ShardingStrategy torch.distributed.fsdp.api.StateDictType
torch.distributed.fsdp.wrap.transformer_auto_wrap_policy torch.distributed.remote_device._remote_device
torch.distributed.tensor.DTensor torch.distributed.tensor._dtensor_spec.DTensorSpec
megatron.energon.flavors.webdataset.sample_loader.SliceState
megatron.energon.savable_loader.SavableDataLoaderState
megatron.energon.state.FlexState
torch.distributed.tensor._dtensor_spec.ShardOrderEntry torch.distributed.tensor._dtensor_spec.TensorMeta
torch.distributed.tensor.placement_types.Replicate torch.distributed.tensor.placement_types.Shard
torch.distributed.tensor.placement_types._StridedShard torch.float16 torch.float32 torch.float64 torch.float8_e4m3fn
torch.float8_e5m2 torch.float8_e8m0fnu torch.int16 torch.int32 torch.int64 torch.int8 torch.serialization._get_layout
torch.storage.UntypedStorage torch.storage._load_from_bytes torch.uint16 torch.uint32 torch.uint64 torch.uint8
transformers.integrations.deepspeed.HfDeepSpeedConfig transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig
transformers.trainer_pt_utils.AcceleratorConfig transformers.trainer_utils.HubStrategy
transformers.trainer_utils.IntervalStrategy transformers.trainer_utils.SaveStrategy
transformers.trainer_utils.SchedulerType transformers.training_args.OptimizerNames
transformers.training_args.TrainingArguments types.SimpleNamespace zoneinfo.ZoneInfo
"""


@pytest.mark.parametrize("target", REAL_NAMES.split())
def test_a_name_that_real_files_hold_is_known(target: str) -> None:
    module, _, name = target.rpartition(".")
    state = read_state(stream(named(module, name)))
    assert (state.refused, state.unknown) == ((), ())


def names_in(data: bytes) -> set[tuple[str, str]]:
    """The globals of a pickle, by its opcodes and apart from the reader that is tested."""
    names, texts, memo, last = set(), [""], {}, ""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            names.add(tuple(argument.split(" ", 1)))
        elif opcode.name == "STACK_GLOBAL":
            names.add(tuple(texts[-2:]))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = last
        elif opcode.name.endswith("BINPUT"):
            memo[argument] = last
        elif opcode.name.endswith("BINGET"):
            texts.append(memo[argument])
        if opcode.name not in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            last = argument if isinstance(argument, str) else ""
            texts += [last] if "UNICODE" in opcode.name else []
    return names  # type: ignore[return-value]


def real_pickles() -> Iterator[tuple[Path, bytes]]:
    for path in sorted(REAL.rglob("*")):
        if path.suffix in (".pt", ".distcp"):
            data, at = path.read_bytes(), -1
            while (at := data.find(b"PK\3\4", at + 1)) >= 0:
                start = at + 30 + int.from_bytes(data[at + 26 : at + 28], "little")
                found = data[start + int.from_bytes(data[at + 28 : at + 30], "little") :]
                if data[at + 30 : start].endswith(b"/data.pkl") and found[:1] == pickle.PROTO:  # not one in a text
                    yield path, found


def test_the_list_has_every_name_of_the_real_files() -> None:
    broken = {"metadata_truncated", "metadata_is_json", "metadata_malicious", "megatron_common_malicious"}
    names = set()
    for path, data in real_pickles():
        if not (broken | {"objects"}) & set(path.parts):  # whole objects, which the corpus judges
            names |= names_in(data)
    assert len(names) > 30
    assert {".".join(pair) for pair in names} - set(REAL_NAMES.split()) - {"torch.Size"} == set()


class Outer:
    """Training code may keep a class in a class."""

    class Inner:
        """Its pickle of protocol 2, which torch.save writes, asks for it by `getattr`."""

    class Mode(enum.Enum):
        """So does that of an enum."""

        fast = "fast"


@pytest.mark.parametrize("protocol", [0, 2])
def test_a_class_in_a_class_is_made_and_filled_as_any_other(protocol: int) -> None:
    for value in (Outer.Inner(), Outer.Mode.fast):
        data = pickle.dumps(value, protocol)
        state = read_state(data.replace(__name__.encode(), b"own.code"))
        assert (state.refused, state.unknown) == ((), ("own.code.Outer", f"own.code.{type(value).__qualname__}"))
    spec = named("torch.distributed._shard.sharded_tensor.api", "ShardedTensor") + text("ProcessGroupState")
    inner = named("__builtin__", "getattr") + spec + pickle.TUPLE2 + pickle.REDUCE
    state = read_state(stream(inner, pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.EMPTY_DICT, pickle.BUILD))
    assert (state.refused, state.unknown) == ((), ())
    called_ = read_state(stream(inner, text("a b"), pickle.TUPLE1, pickle.REDUCE))
    assert [refused.called for refused in called_.refused] == [True]


def test_what_torch_and_numpy_write_is_known() -> None:
    import numpy as np
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    generators = [np.random.default_rng(1), np.random.RandomState(1), np.random.Generator(np.random.Philox(1))]
    states = {
        "random": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        "generators": generators,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "tensors": [torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(1)), torch.ones(2, device="meta")],
        "arrays": [np.ones(2), np.float32(1), np.ma.array([1], mask=[0]), np.datetime64("2020-01-01")],
    }
    for name, state in states.items():
        file = io.BytesIO()
        torch.save(state, file)
        for data in (read_archive(ranges_in(file.getvalue()), len(file.getvalue())).pickle, pickle.dumps(state)):
            found = read_state(data)
            assert (found.refused, found.unknown) == ((), ()), name


# ---------------------------------------------------------------- exact pairs


TRUSTED_BEFORE = [
    ("megatron.core.dist_checkpointing.strategies.torch", "os.system"),
    ("numpy.dtypes", "__loader__.set_data"),
    ("torch._utils", "sys.modules"),
    ("torch.nn.parameter", "torch.load"),
    ("uuid", "os.system"),
    ("collections", "_sys.path"),
]
FUNCTIONS = [
    "megatron.core.transformer.spec_utils.import_module", "yaml.unsafe_load", "sympy.core.sympify.sympify",
    "sympy.parsing.sympy_parser.parse_expr", "torch._C.PyTorchFileWriter", "uuid._get_command_stdout", "enum.reduce",
    "numpy.dtypes.__loader__", "torch._utils._rebuild_anything", "webdataset.gopen.gopen",
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), TRUSTED_BEFORE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_name_with_dots_is_refused_in_any_module(tmp_path: Path, module: str, name: str, protocol: int) -> None:
    opcodes = named(module, name, protocol)
    for rest in (b"", text("id") + pickle.TUPLE1 + pickle.REDUCE):
        report = with_common(tmp_path / "a", opcodes, rest)
        assert (report.exit_code, codes(report, "error")) == (1, {"SAF001"})
        assert f"{module}.{name}" in found(report, "error")[0][2]


@pytest.mark.parametrize("target", FUNCTIONS)
def test_a_function_that_is_called_and_nobody_knows_fails(tmp_path: Path, target: str) -> None:
    report = with_common(tmp_path / "a", called(target, text("id")))
    assert (report.exit_code, codes(report, "error")) == (1, {"SAF001"})
    assert f"asks to call {target} at byte" in found(report, "error")[0][2]


ARGUMENT = text("a b")


@pytest.mark.parametrize(
    "opcodes",
    [
        named("own.code", "run") + pickle.EMPTY_TUPLE + pickle.REDUCE,
        named("own.code", "Runner") + ARGUMENT + pickle.TUPLE1 + pickle.REDUCE,
        pickle.MARK + pickle.INST + b"own.code\nrun\n",
        pickle.MARK + named("own.code", "run") + pickle.OBJ,
        pickle.MARK + named("own.code", "run") + ARGUMENT + pickle.OBJ,
        named("own.code", "opener") + ARGUMENT + pickle.TUPLE1 + pickle.NEWOBJ,
        called(
            "torch._tensor._rebuild_from_type_v2",
            named("own.code", "run") + named("torch", "Tensor") + ARGUMENT + pickle.TUPLE1 + pickle.EMPTY_DICT,
        ),
        called("copyreg._reconstructor", named("own.code", "Kind"), named("own.code", "Base"), ARGUMENT),
    ],
    ids=["REDUCE", "REDUCE of a class", "INST", "OBJ", "OBJ with arguments", "NEWOBJ of a C class", "type", "base"],
)
def test_every_way_to_call_is_a_call(tmp_path: Path, opcodes: bytes) -> None:
    report = with_common(tmp_path / "a", opcodes)
    assert (report.exit_code, codes(report, "error")) == (1, {"SAF001"})
    assert "which ckptlint does not know" in found(report, "error")[0][2]
    trusted = with_common(tmp_path / "a", opcodes, trusted="own")
    assert (trusted.exit_code, found(trusted)) == (0, [])


@pytest.mark.parametrize(
    "opcodes",
    [
        named("own.code", "Config") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.BUILD,
        named("own.code", "Pair") + pickle.NONE + pickle.NONE + pickle.TUPLE2 + pickle.NEWOBJ,
        called("own.code.Mode", text("fast")),
        called("own.code.Table"),
        called("copyreg._reconstructor", named("own.code", "Config"), named("builtins", "object"), pickle.NONE),
        named("own.code", "helper"),
        called("functools.partial", named("own.code", "helper")),
        called("collections.defaultdict", named("own.code", "Meter")),
    ],
    ids=["filled", "named tuple", "enum", "a dict of its own", "protocol 0", "a function", "a partial", "a factory"],
)
def test_a_class_that_is_only_made_and_filled_is_a_note(tmp_path: Path, opcodes: bytes) -> None:
    report = with_common(tmp_path / "a", opcodes)
    assert [(code, level) for code, level, _ in found(report)] == [("SAF001", "info")]
    assert report.exit_code == 0
    assert found(with_common(tmp_path / "a", opcodes, trusted="own.code")) == []
    assert found(with_common(tmp_path / "a", opcodes, trusted="own.co")) == found(report)


def test_what_is_known_to_be_dangerous_cannot_be_vouched_for(tmp_path: Path) -> None:
    for target in ("os.system", "subprocess.Popen", "torch.hub.load", "dill.loads"):
        report = with_common(tmp_path / "a", called(target, text("id")), trusted=target.partition(".")[0])
        assert report.exit_code == 1


# ---------------------------------------------------------------- pickles inside bytes


def test_bytes_that_code_of_the_training_loads_are_read_too(tmp_path: Path) -> None:
    for inner in (dumped({"step": 3}), dumped(Call(name_of("os", "system"), "id")), b"\x80\x04 no pickle"):
        report = with_common(tmp_path / "a", as_bytes(inner))
        assert report.exit_code == int(b"system" in inner)
        buffer = named("_io", "BytesIO") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.MARK
        state = as_bytes(inner) + pickle.BININT1 + b"\0" + pickle.NONE + pickle.TUPLE
        assert with_common(tmp_path / "a", buffer, state, pickle.BUILD).exit_code == report.exit_code
        if report.exit_code:
            assert "of a pickle inside its bytes" in found(report, "error")[0][2]


@pytest.mark.parametrize("inner", [b"", b"\x80\x02", b"PK\3\4", b"no pickle"])
def test_bytes_that_torch_opens_and_that_cannot_be_read_are_no_pass(tmp_path: Path, inner: bytes) -> None:
    report = with_common(tmp_path / "a", called("torch.storage._load_from_bytes", as_bytes(inner)))
    assert report.exit_code == 1


def test_a_frame_beyond_the_end_hides_no_second_pickle(tmp_path: Path, marker: Path) -> None:
    first, second = pickle.dumps({"step": 3}, 4), dumped(Call(name_of("pickles", "payload"), "ran"), 4)
    length = len(first) - 11 + len(second)  # without PROTO and FRAME
    data = first[:3] + length.to_bytes(8, "little") + first[11:] + second
    path = Path(shutil.copytree(REAL / "edit_base", tmp_path / "a")) / "rng_state_0.pth"
    path.write_bytes(data)
    with path.open("rb") as file:  # a buffered file stops where the first ends
        assert pickle.load(file) == {"step": 3}
        pickle.load(file)
    assert marker.exists()
    marker.unlink()
    report = ckptlint.check(path.parent)
    assert (codes(report, "error"), marker.exists()) == ({"SAF002"}, False)
    inside = called("torch.storage._load_from_bytes", as_bytes(data))
    assert with_common(tmp_path / "b", inside).exit_code == 1
    assert with_common(tmp_path / "b", as_bytes(first)).exit_code == 0


def dtype_of(code: str, *state: object) -> bytes:
    """What a dtype is pickled as, with other numbers in its state."""
    filled = pickle.dumps((3, "|", None, None, None, *state), 2)[2:-1]
    return called("numpy.dtype", text(code), pickle.NEWFALSE, pickle.NEWTRUE) + filled + pickle.BUILD


@pytest.mark.parametrize(
    ("opcodes", "exit_code"),
    [
        (dtype_of("O8", -1, -1, 63), 0),
        (dtype_of("O8", -1, -1, 0), 1),  # a pointer that numpy takes for a number
        (dtype_of("f4", -1, -1, 0), 0),
        (dtype_of("f4", 4096, 4, 0), 1),  # an element that ends far behind its bytes
        (dtype_of("V8", 8, 1, 0), 0),
        (dtype_of("V8", 4096, 1, 0), 1),
        (called("fractions.Fraction", text("-3/4")), 0),
        (called("fractions.Fraction", text("1e300000000")), 1),  # never ends
        (called("decimal.Decimal", text("1.5E+10")), 0),
        (called("decimal.Decimal", text("1E+99999999")), 1),
    ],
)
def test_numbers_are_those_that_the_library_writes(tmp_path: Path, opcodes: bytes, exit_code: int) -> None:
    assert with_common(tmp_path / "a", opcodes).exit_code == exit_code


def test_numpy_trusts_the_numbers_of_a_dtype() -> None:
    pointer = called("numpy._core.multiarray.scalar", dtype_of("O8", -1, -1, 0), as_bytes(b"\1" * 8))
    done = run_python(f"import pickle; print(pickle.loads({stream(pointer, protocol=4)!r}))")
    assert done.returncode < 0  # a signal ended it
    assert read_state(stream(pointer, protocol=4)).refused


def test_pickles_inside_pickles_end_somewhere(tmp_path: Path) -> None:
    data = dumped({"a": 1})
    for _ in range(12):
        data = dumped({"a": data})
    report = with_common(tmp_path / "a", as_bytes(data))
    assert codes(report, "error") == {"SAF003"}


# ---------------------------------------------------------------- old protocols


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_old_protocol_is_read_as_any_other(protocol: int) -> None:
    value = {"step": 3, "betas": (0.9, 0.95)}
    assert read_state(pickle.dumps(value, protocol)).root == value


@pytest.mark.parametrize("protocol", [0, 1])
def test_a_call_in_an_old_protocol_is_named(tmp_path: Path, protocol: int) -> None:
    data = dumped(Call(name_of("posix", "system"), "id"), protocol)
    report = check_bytes(data, tmp_path / "a")
    assert (report.exit_code, codes(report, "error")) == (1, {"SAF001"})
    assert "asks to call posix.system at byte" in found(report, "error")[0][2]
    assert with_common(tmp_path / "b", data[:-1]).exit_code == 1


def test_an_old_pickle_beside_safetensors_is_named_and_a_text_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REAL / "hf_sharded", folder, ignore=lambda _, names: [n for n in names if ".safetensors" not in n])
    healthy = found(ckptlint.check(folder))
    for words in ("# tracks properties of this Flutter project\n", "config\nversion\n1\n", "id: 3\n", ".\n"):
        (folder / ".metadata").write_text(words)
        assert found(ckptlint.check(folder)) == healthy
    for data in (b"cposix\nsystem\n(S'id'\ntR.", b"I1\n0" * 3000 + b"(S'id'\niposix\nsystem\n."):
        (folder / ".metadata").write_bytes(data)
        report = ckptlint.check(folder)
        assert (report.exit_code, codes(report, "error")) == (1, {"SAF001"})


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("I1\n0I2\n0I3\n.", False),
        ("cposix\nsystem\n.", True),
        ("cposix\nsystem\n(S'id'\ntR", True),
        ("cposix\nsystem\n(S'id'\nt", False),
        ("cmine\nThing\n(tR.", True),
        ("copy this\nto there\n(tR.", False),
    ],
    ids=["no name", "whole", "cut after the call", "cut before the call", "an unknown class", "no name of Python"],
)
def test_a_text_asks_for_names_if_it_is_whole_or_calls_one(text: str, asks: bool) -> None:
    assert asks_for_names(text.encode()) is asks


def test_the_metadata_of_a_rank_beside_a_good_one_is_judged(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "a"))
    (folder / "__0.metadata").write_bytes(dumped(Call(name_of("posix", "system"), "id"), 0))
    report = ckptlint.check(folder)
    assert (report.exit_code, codes(report, "error")) == (1, {"SAF001"})
