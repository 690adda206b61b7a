"""`.metadata` as other writers and older versions leave it: read as what it is, without a complaint."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pickles import CF, CM, CP, MT, Call, Size, dumped, name_of, new, write_zip
from support import codes, found, swept

import ckptlint
from ckptlint.lint.report import Report
from ckptlint.model import Checkpoint

pytestmark = pytest.mark.usefixtures("either_way")

OLD_CM = "torch.distributed._shard.checkpoint.metadata"
OLD_CF = "torch.distributed._shard.checkpoint.filesystem"
OLD_ST = "torch.distributed._shard.sharded_tensor.metadata"

Properties = Callable[[], Any]


def enum(module: str, name: str, value: int) -> Any:
    return Call(name_of(module, name), value)


def strided() -> Any:
    return Call(name_of("torch.serialization", "_get_layout"), "torch.strided")


def properties(module: str = CM, memory: tuple[str, str] = (CM, "_MEM_FORMAT_ENCODING"), dtype: str = "float32") -> Any:
    state = name_of("torch", dtype), strided(), False, enum(*memory, 0), False
    return new(module, "TensorProperties", raw_state=state)


def metadata(
    *,
    root: tuple[str, str] = (CM, "Metadata"),
    classes: str = CM,
    storage: str = CF,
    props: Properties = properties,
    size: type = Size,
    index: bool = True,
    info: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """The metadata of `w` [8, 4] in two chunks, a scalar `step`, and one bytes entry `lr`."""

    def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        return new(classes, "ChunkStorageMetadata", offsets=size(offsets), sizes=size(sizes))

    def tensor(shape: tuple[int, ...], *chunks: Any) -> Any:
        return new(classes, "TensorStorageMetadata", properties=props(), size=size(shape), chunks=list(chunks))

    def key(fqn: str, number: int | None, offset: tuple[int, ...] | None) -> Any:
        state: dict[str, Any] = {"fqn": fqn} | ({"index": number} if index else {})
        return new(classes, "MetadataIndex", **state | ({} if offset is None else {"offset": Size(offset)}))

    def place(file: str, offset: int, length: int) -> Any:
        return new(storage, "_StorageInfo", relative_path=file, offset=offset, length=length, **info or {})

    state = {
        "state_dict_metadata": {
            "w": tensor((8, 4), chunk((0, 0), (4, 4)), chunk((4, 0), (4, 4))),
            "step": tensor((), chunk((), ())),
            "lr": new(classes, "BytesStorageMetadata"),
        },
        "planner_data": {"w": ("w",), "step": ("step",), "lr": ("lr",)},
        "storage_data": {
            key("w", 0, (0, 0)): place("__0_0.distcp", 0, 1600),
            key("w", 1, (4, 0)): place("__1_0.distcp", 0, 1600),
            key("step", None, ()): place("__0_0.distcp", 1600, 1500),
            key("lr", None, None): place("__0_0.distcp", 3100, 1200),
        },
    }
    return new(*root, **{name: value for name, value in (state | more).items() if value is not ...})


def written(folder: Path, data: bytes) -> Report:
    (folder / ".metadata").write_bytes(data)
    for name, size in (("__0_0.distcp", 4300), ("__1_0.distcp", 1600)):
        (folder / name).write_bytes(b"PK\3\4" + bytes(size - 4))
    return ckptlint.check(folder)


def the_checkpoint(report: Report) -> Checkpoint:
    (part,) = report.checkpoints
    return part.checkpoint


def assert_read(report: Report, dtype: str = "float32") -> Checkpoint:
    """Nothing above a note was found, and the tensors are what was written."""
    assert found(report, "error", "warning") == []
    assert report.exit_code == 0
    ckpt = the_checkpoint(report)
    assert {fqn: (t.dtype, t.global_shape, len(t.chunks)) for fqn, t in ckpt.tensors.items()} == {
        "w": (dtype, (8, 4), 2),
        "step": (dtype, (), 1),
    }
    assert ckpt.tensors["w"].tiling.offsets.tolist() == [[0, 0], [4, 0]]
    assert ckpt.tensors["w"].tiling.sizes.tolist() == [[4, 4], [4, 4]]
    assert [ckpt.chunk_file(ckpt.tensors["w"], row) for row in (0, 1)] == ["__0_0.distcp", "__1_0.distcp"]
    assert ckpt.byte_range_of(int(ckpt.tensors["step"].chunks.record[0])) == ("__0_0.distcp", 1600, 1500)
    assert [entry.fqn for entry in ckpt.byte_objects] == ["lr"]
    assert np.asarray(ckpt.records.owned).all()
    return ckpt


def old_properties() -> Any:
    return properties(OLD_ST, (OLD_ST, "MEM_FORMAT_ENCODING"))


def getattr_properties(module: str = "builtins") -> Any:
    member = Call(name_of(module, "getattr"), name_of(CM, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT")
    state = name_of("torch", "float32"), strided(), False, member, False
    return new(CM, "TensorProperties", raw_state=state)


def three_properties() -> Any:
    return new(CM, "TensorProperties", raw_state=(name_of("torch", "float32"), False, False))


def storage_meta(**changed: Any) -> Any:
    state = {"checkpoint_id": "/checkpoints/x", "save_id": "1", "load_id": None, "modules": []} | changed
    return new(CM, "StorageMeta", **{name: value for name, value in state.items() if value is not ...})


def path(module: str, name: str, *parts: str) -> Any:
    return Call(name_of(module, name), *parts)


DIALECTS: dict[str, tuple[Any, str]] = {
    "torch 1.13": (
        lambda: metadata(root=(OLD_CM, "Metadata"), classes=OLD_CM, storage=OLD_CF, props=old_properties),
        "torch < 2.4",
    ),
    "torch 2.0 to 2.2": (lambda: metadata(props=old_properties), "torch < 2.4"),
    "torch 2.3": (lambda: metadata(), "torch < 2.4"),
    "torch 2.4 to 2.6": (lambda: metadata(storage_meta=storage_meta(modules=...)), "torch >= 2.4"),
    "torch 2.8": (lambda: metadata(storage_meta=storage_meta(), info={}), "torch >= 2.7"),
    "torch 2.9": (lambda: metadata(storage_meta=storage_meta(), version="1.0.0"), "torch >= 2.9"),
    "planner_data None": (
        lambda: metadata(planner_data=None, storage_meta=storage_meta(), version="1.0.0"),
        "torch >= 2.9",
    ),
    "planner_data empty": (lambda: metadata(planner_data={}), "torch < 2.4"),
    "planner_data absent": (lambda: metadata(planner_data=...), "torch < 2.4"),
    "storage_meta None": (lambda: metadata(storage_meta=None), "torch < 2.4"),
    "version None": (lambda: metadata(storage_meta=storage_meta(), version=None), "torch >= 2.7"),
    "checkpoint_id None": (
        lambda: metadata(storage_meta=storage_meta(checkpoint_id=None, save_id=None)),
        "torch >= 2.7",
    ),
    "StorageMeta without attributes": (lambda: metadata(storage_meta=new(CM, "StorageMeta")), "torch >= 2.4"),
    "checkpoint_id a path": (
        lambda: metadata(storage_meta=storage_meta(checkpoint_id=path("pathlib", "PosixPath", "/", "a", "b"))),
        "torch >= 2.7",
    ),
    "checkpoint_id a path of Python 3.13": (
        lambda: metadata(storage_meta=storage_meta(checkpoint_id=path("pathlib._local", "PosixPath", "/a/b"))),
        "torch >= 2.7",
    ),
    "checkpoint_id a path of Windows": (
        lambda: metadata(storage_meta=storage_meta(checkpoint_id=path("pathlib", "PureWindowsPath", "C:\\", "a"))),
        "torch >= 2.7",
    ),
    "enum members of Python 3.11.2": (lambda: metadata(props=getattr_properties), "torch < 2.4"),
    "enum members by __builtin__": (lambda: metadata(props=lambda: getattr_properties("__builtin__")), "torch < 2.4"),
    "TensorProperties of three": (lambda: metadata(props=three_properties), "torch < 2.4"),
    "plain tuples": (lambda: metadata(size=tuple), "torch < 2.4"),
    "MetadataIndex without index": (lambda: metadata(index=False), "torch < 2.4"),
    "transform_descriptors None": (lambda: metadata(info={"transform_descriptors": None}), "torch < 2.4"),
    "unknown attributes of the root": (lambda: metadata(someone_else={"a": [1, 2.5, None, True]}), "torch < 2.4"),
    "OLMo-core": (lambda: metadata(storage="olmo_core.distributed.checkpoint.filesystem"), "torch < 2.4"),
    "NeMo Automodel": (
        lambda: metadata(storage="nemo_automodel.components.checkpoint._backports.filesystem"),
        "torch < 2.4",
    ),
    "dlrover": (lambda: metadata(storage="dlrover.trainer.torch.flash_checkpoint.fsdp_engine"), "torch < 2.4"),
}


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("protocol", [2, *swept(3), 4, *swept(5)])
@pytest.mark.parametrize("case", DIALECTS)
def test_a_dialect_is_read_without_a_complaint(tmp_path: Path, case: str, protocol: int) -> None:
    made, writer = DIALECTS[case]
    report = written(tmp_path, dumped(made(), protocol))
    ckpt = assert_read(report)
    assert (ckpt.format, ckpt.writer) == ("dcp", writer)
    assert codes(report) == set()


def test_these_streams_are_built_like_those_of_torch() -> None:
    def opcodes(data: bytes) -> Iterator[str]:
        return (opcode.name for opcode, _, _ in pickletools.genops(data))

    data = dumped(metadata(storage_meta=storage_meta(), version="1.0.0"))
    pickletools.dis(data, io.StringIO())
    assert {"STACK_GLOBAL", "NEWOBJ", "BUILD", "REDUCE", "TUPLE", "MEMOIZE", "SETITEMS"} <= set(opcodes(data))
    assert {"GLOBAL", "NEWOBJ", "BUILD", "REDUCE", "BINPUT"} <= set(opcodes(dumped(metadata(), 3)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", "bfloat16"), ("half", "float16"), ("long", "int64"), ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e8m0fnu", "float8_e8m0fnu"), ("complex64", "complex64"), ("quint4x2", "quint4x2"), ("uint7", "uint7"),
        ("float4_e2m1fn_x2", "float4_e2m1fn_x2"),
    ],
)  # fmt: skip
def test_dtypes_of_every_age_are_read(tmp_path: Path, name: str, dtype: str) -> None:
    assert_read(written(tmp_path, dumped(metadata(props=lambda: properties(dtype=name)))), dtype)


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
@pytest.mark.parametrize(("name", "value"), [("set", [1, 2]), ("frozenset", ["a"]), ("bytearray", b"x")])
def test_containers_among_unknown_attributes_are_data(tmp_path: Path, module: str, name: str, value: Any) -> None:
    assert_read(written(tmp_path, dumped(metadata(mine=Call(name_of(module, name), value)), 2)))


def test_values_that_protocols_write_through_a_name_are_data(tmp_path: Path) -> None:
    encoded = Call(name_of("_codecs", "encode"), "x", "latin1")
    ordered = Call(name_of("collections", "OrderedDict"))
    number = Call(name_of("builtins", "complex"), 1.0, 2.0)
    assert_read(written(tmp_path, dumped(metadata(mine=[encoded, ordered, number]), 2)))
    assert_read(written(tmp_path, dumped(metadata(mine=[{1, 2}, frozenset("a"), b"x", 2**70, 1.5]), 4)))


# ---------------------------------------------------------------- plans


def plan(module: str, name: str, *items: Any, **more: Any) -> Any:
    return new(module, name, items=list(items), storage_data=None, planner_data={}, **more)


def write_item(fqn: str, offset: tuple[int, ...] | None, member: Any, shape: tuple[int, ...] = (8, 4)) -> Any:
    state: dict[str, Any] = {"fqn": fqn, "index": None} | ({} if offset is None else {"offset": Size(offset)})
    data = None
    if offset is not None:
        sizes = (4, 4) if offset else ()
        box = new(CM, "ChunkStorageMetadata", offsets=Size(offset), sizes=Size(sizes))
        data = new(CP, "TensorWriteData", chunk=box, properties=properties(), size=Size(shape))
    return new(CP, "WriteItem", index=new(CM, "MetadataIndex", **state), type=member, tensor_data=data)


def both_plans(module: str, name: str, *, by_name: bool = False, **more: Any) -> list[Any]:
    def member(value: int, word: str) -> Any:
        kind = name_of(CP, "WriteItemType")
        return Call(name_of("builtins", "getattr"), kind, word) if by_name else Call(kind, value)

    first = [write_item("w", (0, 0), member(2, "SHARD")), write_item("lr", None, member(3, "BYTE_IO"))]
    second = [write_item("w", (4, 0), member(2, "SHARD")), write_item("step", (), member(1, "TENSOR"), ())]
    return [plan(module, name, *first, **more), plan(module, name, *second, **more)]


@pytest.mark.parametrize(
    ("root", "module", "name", "more"),
    [
        ((CM, "Metadata"), CP, "SavePlan", {"usable": True}),
        ((CM, "Metadata"), CP, "SavePlan", {}),
        ((CM, "Metadata"), MT, "MCoreSavePlan", {"mcore_data": {}}),
        ((MT, "MCoreMetadata"), MT, "MCoreSavePlan", {"mcore_data": {}}),
    ],
    ids=["core 0.16", "NVRx", "core 0.11", "core 0.15"],
)
@pytest.mark.parametrize("by_name", [False, True], ids=["by value", "Python 3.11.2"])
def test_the_plans_of_all_ranks_are_read(
    tmp_path: Path, root: tuple[str, str], module: str, name: str, more: dict[str, Any], by_name: bool
) -> None:
    extras: dict[str, Any] = {"all_local_plans": both_plans(module, name, by_name=by_name, **more)}
    if "mcore_data" in more:
        extras["mcore_data"] = {"w": {}}
    data = dumped(metadata(root=root, planner_data=None, **extras))
    if "mcore_data" in more:
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        write_zip(tmp_path / "common.pt", b"\x80\x02}.")
    report = written(tmp_path, data)
    ckpt = assert_read(report)
    assert ckpt.format == ("torch_dist" if "mcore_data" in more else "dcp")
    writers = ckpt.save_plans
    assert writers is not None
    assert writers.world_size == 2
    assert [(writers.fqns[f], r) for f, r in zip(writers.fqn.tolist(), writers.rank.tolist(), strict=True)] == [
        ("w", 0),
        ("lr", 0),
        ("w", 1),
        ("step", 1),
    ]
    assert writers.is_bytes.tolist() == [False, True, False, False]
    assert ckpt.topology["world"].size == 2


@pytest.mark.parametrize("plans", [[], None, "x", [1], [{}]], ids=["empty", "None", "text", "numbers", "dicts"])
def test_plans_that_make_no_sense_are_left_out(tmp_path: Path, plans: Any) -> None:
    assert assert_read(written(tmp_path, dumped(metadata(all_local_plans=plans)))).save_plans is None


def test_mcore_metadata_without_its_config_is_an_unfinished_megatron_save(tmp_path: Path) -> None:
    report = written(tmp_path, dumped(metadata(root=(MT, "MCoreMetadata"), planner_data=None, mcore_data={})))
    assert the_checkpoint(report).format == "torch_dist"
    assert codes(report, "error") == {"COM001"}


def test_a_tensor_that_megatron_flattened_is_marked(tmp_path: Path) -> None:
    data = {"w": {"nd_reformulated_orig_global_shape": (2, 2, 8)}}
    report = written(tmp_path, dumped(metadata(mcore_data=data)))
    assert [tensor.is_flattened for tensor in the_checkpoint(report).tensors.values()] == [True, False]


# ---------------------------------------------------------------- not DCP after all


def test_bytecheckpoint_is_told_as_unsupported(tmp_path: Path) -> None:
    module = "bytecheckpoint.checkpointer.meta_type"
    root = new(module, "Metadata", all_tensor_metadata={}, bytecheckpoint_version="1", user_defined_dict={})
    report = written(tmp_path, dumped(root))
    assert [(code, level) for code, level, _ in found(report)] == [("SAF004", "error")]
    assert "ByteCheckpoint" in found(report)[0][2]
    assert report.exit_code == 1
