"""One attribute changes on one rank between two checks of a real gloo job: all ranks leave the short path together.

Each case is judged twice, with what the ranks remember of the last check and without it: the findings must be the same.
"""

from __future__ import annotations

import copy
import warnings
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from jobs import run_ranks
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as DcpProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from ckptlint import live
from ckptlint.live.api import Live

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")

WORLD = 4
ONE = 1
"""The rank on which something changes."""

State = dict[str, Any]

SHORT = [("max", 12), ("sum", 4096)]
"""The collectives of a check in which nothing but contents can have changed."""


class Meshes(NamedTuple):
    """Made once; a job keeps its meshes."""

    line: DeviceMesh
    again: DeviceMesh
    grid: DeviceMesh
    pair: DeviceMesh


class Case(NamedTuple):
    """What is changed.

    Attributes:
        change: takes the state of a rank and the meshes; on `ONE` alone, or on all ranks.
        codes: of the findings on all ranks; LIV208, which a change since the last check may add, is not counted.
        everywhere: whether all ranks change.
        rounds: collectives that all ranks run, where nothing but contents can have changed: 2, and 6 if these differ
            (beside broadcasts that tell where); 0 where they run those of a first check at once.
    """

    change: Callable[[State, Meshes], Any]
    codes: tuple[str, ...] = ()
    everywhere: bool = False
    rounds: int = 0


def dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def overridden(rank: int, meshes: Meshes, rows: int = 2, shift: int = 0, written: int | None = None) -> DTensor:
    """As Megatron-FSDP makes them: closures on the local tensor tell where it lies."""
    tensor = dtensor(torch.full((rows, 4), float(rank)), meshes.line, [Shard(0)], (8, 4))
    place = ChunkStorageMetadata(torch.Size((2 * rank + shift, 0)), torch.Size((rows, 4)))
    sizes = torch.Size((rows if written is None else written, 4))
    saved = ChunkStorageMetadata(place.offsets, sizes)
    data = TensorWriteData(saved, DcpProperties(dtype=tensor.dtype), torch.Size((8, 4)))
    item = WriteItem(MetadataIndex("", saved.offsets), WriteItemType.SHARD, tensor_data=data)
    tensor._local_tensor.__create_chunk_list__ = lambda: [place]
    tensor._local_tensor.__create_write_items__ = lambda fqn, _: [item]
    return tensor


def wrapped(rank: int, meshes: Meshes, cut: int = 3, shift: int = 0) -> DTensor:
    """Two chunks in one LocalShardsWrapper."""
    parts = [torch.ones(2, cut), torch.zeros(2, 4 - cut)]
    local = LocalShardsWrapper(parts, [(2 * rank, 0), (2 * rank + shift, cut)])
    return dtensor(local, meshes.line, [Shard(0)], (8, 4))


def sharded(rank: int, *, shift: int = 0, rows: int = 2, dtype: Any = torch.float32, seen: int = 0) -> ShardedTensor:
    """As FSDP1 makes them; `seen` moves another rank's shard in this rank's view."""
    places = [ShardMetadata([2 * other, 0], [2, 4], f"rank:{other}/cpu") for other in range(WORLD)]
    metadata = ShardedTensorMetadata(places, torch.Size((8, 4)), TensorProperties(dtype=dtype))
    shard = LocalShard(torch.full((2, 4), float(rank), dtype=dtype), places[rank])
    made = ShardedTensor._init_from_local_shards_and_global_metadata([shard], metadata)
    places[rank].shard_offsets[0] += shift
    made.metadata().shards_metadata[3].shard_offsets[0] += seen
    if rows != 2:
        made.local_shards()[0].tensor = torch.full((rows, 4), float(rank))
    return made


def healthy(rank: int, meshes: Meshes) -> State:
    full = torch.arange(32.0).reshape(8, 4)
    row, column = divmod(rank, 2)
    return {
        "model": {
            "cut": dtensor(full[2 * rank : 2 * rank + 2].clone(), meshes.line, [Shard(0)], (8, 4)),
            "both": dtensor(full.chunk(2)[row].chunk(2, 1)[column].clone(), meshes.grid, [Shard(0), Shard(1)], (8, 4)),
            "nested": dtensor(full[2 * rank : 2 * rank + 2].clone(), meshes.grid, [Shard(0), Shard(0)], (8, 4)),
            "copied": dtensor(full.chunk(2)[column].clone(), meshes.grid, [Replicate(), Shard(0)], (8, 4)),
            "half": dtensor(torch.ones(4), meshes.pair, [Replicate()], (4,)),
            "overridden": overridden(rank, meshes),
            "wrapped": wrapped(rank, meshes),
            "sharded": sharded(rank),
            "plain": torch.arange(6.0),
            "layers": [torch.ones(2), {"w": torch.ones(3)}],
            1: torch.ones(1),
        },
        f"stage{rank // 2}": {"only_here": torch.ones(3) * (rank // 2)},
        "step": 7,
        "betas": [0.9, 0.95],
        "args": Namespace(lr=0.1, rank=rank),
        "rng_state": torch.tensor([rank]),
    }


def put(key: Any, make: Callable[[Meshes], Any]) -> Callable[[State, Meshes], Any]:
    return lambda state, meshes: state["model"].__setitem__(key, make(meshes))


def spec(key: str, **fields: Any) -> Callable[[State, Meshes], Any]:
    """Changes the spec of a DTensor in place."""
    return lambda state, meshes: [setattr(state["model"][key]._spec, name, value) for name, value in fields.items()]


def on_mesh(key: str, name: str) -> Callable[[State, Meshes], Any]:
    return lambda state, meshes: setattr(state["model"][key]._spec, "mesh", getattr(meshes, name))


def local(key: str, make: Callable[[], torch.Tensor]) -> Callable[[State, Meshes], Any]:
    return lambda state, meshes: setattr(state["model"][key], "_local_tensor", make())


def top(key: str, value: Any) -> Callable[[State, Meshes], Any]:
    return lambda state, meshes: state.__setitem__(key, value)


def renamed(state: State, meshes: Meshes) -> None:
    state["model"]["plane"] = state["model"].pop("plain")


def reshaped(state: State, meshes: Meshes) -> None:
    old = state["model"]["cut"]._spec
    old.tensor_meta = old.tensor_meta._replace(shape=torch.Size((10, 4)))


def drifted(key: str) -> Callable[[State, Meshes], Any]:
    def change(state: State, meshes: Meshes) -> None:
        tensor = state["model"][key]
        getattr(tensor, "_local_tensor", tensor).view(-1)[0] += 1e-3

    return change


def reordered(state: State, meshes: Meshes) -> None:
    entries = list(state["model"].items())
    state["model"] = dict(reversed(entries))


def unflattened(state: State, meshes: Meshes) -> None:
    """The same name at another path."""
    state["model.plain"] = state["model"].pop("plain")


def key_of_another_type(state: State, meshes: Meshes) -> None:
    """True equals 1 and reads otherwise."""
    state["model"] = {True if key == 1 else key: value for key, value in state["model"].items()}


def torn_off(state: State, meshes: Meshes) -> None:
    """A clone loses the closures."""
    tensor = state["model"]["overridden"]
    tensor._local_tensor = tensor._local_tensor.clone()


def closures(state: State, meshes: Meshes) -> None:
    """A local tensor that says itself where it lies, where the placements say the same."""
    mine, other = state["model"]["cut"]._local_tensor, state["model"]["overridden"]._local_tensor
    for name in ("__create_chunk_list__", "__create_write_items__"):
        setattr(mine, name, getattr(other, name))


def ordered(state: State, meshes: Meshes) -> None:
    meshes.grid._shard_order = [1, 0]  # type: ignore[attr-defined]


def more_shards(state: State, meshes: Meshes) -> None:
    tensor = state["model"]["wrapped"]
    parts = [torch.ones(2, 3), torch.zeros(1, 1), torch.zeros(1, 1)]
    tensor._local_tensor = LocalShardsWrapper(parts, [(2 * ONE, 0), (2 * ONE, 3), (2 * ONE + 1, 3)])


def listed(state: State, meshes: Meshes) -> None:
    """A list with a tensor in it is walked, one without is a value."""
    state["betas"] = [0.9, torch.tensor(0.95)]


ENTRY = ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0))

CASES = {
    # DTensor
    "placement": Case(spec("cut", placements=(Shard(1),)), ("LIV101",)),
    "placement, consistent": Case(
        put("cut", lambda meshes: dtensor(torch.zeros(8, 1), meshes.line, [Shard(1)], (8, 4))), ("LIV202", "LIV203")
    ),
    "a copy is a shard now": Case(spec("copied", placements=(Shard(1), Shard(0))), ("LIV101",)),
    "mesh of other ranks": Case(on_mesh("half", "line")),
    "another mesh, equal": Case(on_mesh("cut", "again")),
    "mesh of another shape": Case(
        lambda state, meshes: [
            setattr(state["model"]["cut"]._spec, "mesh", meshes.grid),
            setattr(state["model"]["cut"]._spec, "placements", (Shard(0), Replicate())),
        ],
        ("LIV101",),
    ),
    "order of the mesh's dims": Case(ordered, ("LIV103",)),
    "order in the spec": Case(spec("nested", shard_order=(ENTRY,)), ("LIV103",)),
    "global shape": Case(reshaped, ("LIV101", "LIV201")),
    "local shape": Case(local("cut", lambda: torch.zeros(1, 4)), ("LIV101",)),
    "dtype": Case(local("cut", lambda: torch.zeros(2, 4, dtype=torch.bfloat16)), ("LIV201",)),
    "contents of a copy": Case(drifted("copied"), ("LIV205",), rounds=6),
    "contents of a shard": Case(drifted("cut"), rounds=2),
    "closures come": Case(closures),
    "closures go": Case(torn_off),
    "offset of a chunk list": Case(
        put("overridden", lambda meshes: overridden(ONE, meshes, shift=1)), ("LIV202", "LIV203")
    ),
    "size of a chunk list": Case(put("overridden", lambda meshes: overridden(ONE, meshes, rows=1)), ("LIV203",)),
    "what a save writes": Case(
        put("overridden", lambda meshes: overridden(ONE, meshes, written=1)), ("LIV101", "LIV103")
    ),
    # LocalShardsWrapper
    "offset of a wrapped shard": Case(
        put("wrapped", lambda meshes: wrapped(ONE, meshes, shift=1)), ("LIV202", "LIV203")
    ),
    "cut of the wrapped shards": Case(put("wrapped", lambda meshes: wrapped(ONE, meshes, cut=2))),
    "number of wrapped shards": Case(more_shards),
    "dtype of wrapped shards": Case(
        lambda state, meshes: setattr(
            state["model"]["wrapped"], "_local_tensor", state["model"]["wrapped"]._local_tensor.to(torch.bfloat16)
        ),
        ("LIV201",),
    ),
    # ShardedTensor of FSDP1
    "offset of a shard": Case(put("sharded", lambda meshes: sharded(ONE, shift=1)), ("LIV202", "LIV203")),
    "view of the other shards": Case(put("sharded", lambda meshes: sharded(ONE, seen=1)), ("LIV201",)),
    "shape of a shard": Case(put("sharded", lambda meshes: sharded(ONE, rows=1)), ("LIV101",)),
    "dtype of a shard": Case(put("sharded", lambda meshes: sharded(ONE, dtype=torch.float16)), ("LIV201",)),
    # plain tensors
    "shape of a plain tensor": Case(put("plain", lambda meshes: torch.arange(7.0)), ("LIV201",)),
    "number of its axes": Case(put("plain", lambda meshes: torch.arange(6.0)[None]), ("LIV201",)),
    "its dtype": Case(put("plain", lambda meshes: torch.arange(6.0).double()), ("LIV201",)),
    "its contents": Case(drifted("plain"), ("LIV205",), rounds=6),
    "a DTensor instead": Case(
        put("plain", lambda meshes: dtensor(torch.arange(2.0), meshes.line, [Shard(0)], (6,))), ("LIV202",)
    ),
    "a ShardedTensor instead": Case(put("cut", lambda meshes: sharded(ONE)), ("LIV201",)),
    "a value instead": Case(put("plain", lambda meshes: 5), ("LIV201",)),
    "a list instead": Case(put("plain", lambda meshes: [torch.ones(1)])),
    # keys
    "key added": Case(put("new", lambda meshes: torch.ones(2))),
    "key removed": Case(lambda state, meshes: state["model"].pop("cut"), ("LIV203",)),
    "key of a copy removed": Case(lambda state, meshes: state["model"].pop("plain")),
    "key renamed": Case(renamed),
    "keys in another order": Case(reordered),
    "path of one name": Case(unflattened),
    "type of a key": Case(key_of_another_type),
    "two paths of one name": Case(top("model.plain", torch.arange(6.0)), ("LIV108",)),
    "element added to a list": Case(lambda state, meshes: state["model"]["layers"].append(torch.ones(1))),
    "the other half's keys": Case(lambda state, meshes: state.__setitem__("stage1", state.pop("stage0")), ("LIV205",)),
    # plain values
    "value": Case(top("step", 8), ("LIV209",), rounds=6),
    "type of a value": Case(top("step", 7.0), ("LIV209",), rounds=6),
    "a value that is True": Case(top("step", True), ("LIV209",), rounds=6),
    "a value in a list": Case(top("betas", [0.9, 0.951]), ("LIV209",), rounds=6),
    "a value in a namespace": Case(lambda state, meshes: setattr(state["args"], "lr", 0.2), ("LIV209",), rounds=6),
    "a value that differs by design": Case(lambda state, meshes: setattr(state["args"], "rank", 9), rounds=2),
    "contents that differ by design": Case(top("rng_state", torch.tensor([77])), rounds=2),
    "a tensor in a list": Case(listed),
    "a tensor instead of a value": Case(top("step", torch.tensor(7)), ("LIV201",)),
    "nothing to digest": Case(top("step", object()), rounds=6),
    # on all ranks
    "nothing": Case(lambda state, meshes: None, everywhere=True, rounds=2),
    "all values": Case(top("step", 8), everywhere=True, rounds=2),
    "all shapes": Case(put("plain", lambda meshes: torch.arange(7.0)), everywhere=True),
    "all keys": Case(put("new", lambda meshes: torch.ones(2)), everywhere=True),
}


class Seen(NamedTuple):
    """What one rank saw of a change: the findings with and without a memory, and the collectives with one."""

    told: list[tuple[str, ...]]
    expected: list[tuple[str, ...]]
    log: list[tuple[str, int]]


def told(installed: Live, state: State, tag: str, **options: Any) -> list[tuple[str, ...]]:
    installed.group.log.clear()
    report = installed.check(state, tag=tag, on_error="warn", **options)
    assert not any(part.failed for part in report.checkpoints)
    return sorted(
        (d.code, d.fqn or "", d.severity.label, d.title, d.finding.at.label or "") for d in report.diagnostics
    )


def judged(installed: Live, state: State, tag: str, **options: Any) -> Seen:
    """The verdict on a state, twice; what is remembered is as before afterwards."""
    before = copy.copy(installed.memory)
    found = told(installed, state, tag, **options)
    log = list(installed.group.log)
    installed.memory = copy.copy(before)
    installed.memory.healthy = None
    expected = told(installed, state, f"{tag}, again", **options)
    installed.memory = before
    return Seen(found, expected, log)


def remembered(installed: Live, make: Callable[[], State]) -> None:
    """Two checks of one state; the second takes the short path."""
    assert [found for found in told(installed, make(), "first") if found[0] != "LIV213"] == []
    assert installed.memory.healthy is not None
    told(installed, make(), "second")
    assert installed.group.log == SHORT


def cases_in(make: Callable[[int, Meshes], State], cases: dict[str, Case]) -> Callable[[int], dict[str, Seen]]:
    def job(rank: int) -> dict[str, Seen]:
        warnings.simplefilter("ignore")
        installed = live.install(timeout=20)
        line, again, grid = (init_device_mesh("cpu", shape) for shape in ((4,), (4,), (2, 2)))
        meshes = Meshes(line, again, grid, DeviceMesh("cpu", [0, 1]))
        remembered(installed, lambda: make(rank, meshes))
        seen = {}
        for name, case in cases.items():
            state = make(rank, meshes)
            if rank == ONE or case.everywhere:
                case.change(state, meshes)
            seen[name] = judged(installed, state, name)
            if hasattr(grid, "_shard_order"):
                del grid._shard_order
        return seen

    return job


def assert_as_without_memory(seen: list[dict[str, Seen]], cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        first = seen[0][name]
        assert all(rank[name] == first for rank in seen), f"{name}: all ranks see the same and run the same"
        assert first.told == first.expected, name
        codes = {code for code, *_ in first.told} - {"LIV208", "LIV213"}
        assert codes == set(case.codes), name
        assert (first.log[:2] == SHORT) == bool(case.rounds), name
        rounds = [how for how, _ in first.log if how != "broadcast"]
        assert not case.rounds or len(rounds) == case.rounds, name
        is_traced = len(rounds) < len(first.log)
        assert is_traced == bool({"LIV205", "LIV209", "LIV210"}.intersection(case.codes)), name


def test_one_attribute_of_one_rank() -> None:
    assert_as_without_memory(run_ranks(cases_in(healthy, CASES), WORLD, timeout=120), CASES)


# ---------------------------------------------------------------- Megatron-Core


@pytest.fixture(scope="module")
def core() -> ModuleType:
    """megatron.core.dist_checkpointing.mapping."""
    found: ModuleType = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    pytest.importorskip("megatron.core.dist_checkpointing.strategies.checkpointable")
    return found


def megatron(core: ModuleType) -> Callable[[int, Meshes], State]:
    """One of everything that its save takes, or makes of it on the way."""
    from megatron.core.dist_checkpointing.strategies.checkpointable import (
        CheckpointableShardedTensor,
        LocalShardsContainer,
    )

    def made(key: str, rank: int, pieces: int = 2, prepended: int = 0) -> Any:
        """A tensor in so many pieces, and of each as many copies as there are ranks for."""
        part, copy_number = rank % pieces, rank // pieces
        data = torch.full((4,) if prepended else (2, 4), float(part))
        whole, offset = ((pieces, 4), (part, 0)) if prepended else ((2 * pieces, 4), (2 * part, 0))
        return core.ShardedTensor(
            key, data, data.dtype, tuple(data.shape), whole, offset, (pieces, 1), (0, 0, copy_number), prepended
        )

    def both(key: str, tensor: torch.Tensor, replica: Any, flat: Any) -> State:
        whole, fragments = tuple(tensor.shape), (1,) * tensor.ndim
        return {
            half: core.ShardedTensor(
                f"{key}.{half}", tensor + i, tensor.dtype, whole, whole, (0,) * tensor.ndim, fragments, replica
            )
            for i, half in enumerate("ab")
        }

    def state(rank: int, meshes: Meshes) -> State:
        return {
            "model": {
                "w": made("w", rank),
                "own": made("own", rank, pieces=4),
                "expert": made("expert", rank, prepended=1),
                "extra": core.ShardedObject("extra", {"scale": 1.0}, (2,), (rank % 2,), (0, rank // 2)),
                "glu": core.ShardedTensorFactory("glu", torch.ones(2, 2), both, lambda parts: parts, (0, 0, rank)),
                "list": [made("list", rank), 3],
            },
            "wrapped": CheckpointableShardedTensor.from_sh_ten(made("wrapped", rank)),
            "container": LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(made("container", rank, 4))]),
            "iteration": 7,
        }

    return state


def field(name: str, value: Any, key: str = "w") -> Callable[[State, Meshes], Any]:
    return lambda state, meshes: setattr(state["model"][key], name, value)


def inside(key: str, name: str, value: Any) -> Callable[[State, Meshes], Any]:
    """A field of what a wrapper holds."""

    def change(state: State, meshes: Meshes) -> None:
        wrapper = state[key]
        setattr(wrapper._local_shards[0]._sh_ten if key == "container" else wrapper._sh_ten, name, value)

    return change


def twice(state: State, meshes: Meshes) -> None:
    state["model"]["w"] = state["model"]["extra"]


MEGATRON = {
    "nothing": Case(lambda state, meshes: None, everywhere=True, rounds=2),
    "key": Case(field("key", "v"), ("LIV203", "LIV206")),
    "dtype": Case(field("dtype", torch.float16), ("LIV107", "LIV201")),
    "local shape": Case(field("local_shape", (1, 4)), ("LIV101", "LIV110")),
    "global shape": Case(field("global_shape", (6, 4)), ("LIV110", "LIV201")),
    "offset": Case(field("global_offset", (1, 0)), ("LIV110",)),
    "fragmentations": Case(field("axis_fragmentations", (4, 1)), ("LIV110",)),
    "no fragmentations": Case(field("axis_fragmentations", None)),
    "replica id": Case(field("replica_id", (0, 0, 2)), ("LIV203", "LIV206")),
    "another number for the same copy": Case(field("replica_id", 0)),
    "prepended axes": Case(field("prepend_axis_num", 0, "expert"), ("LIV210",)),
    "shapes may differ": Case(field("allow_shape_mismatch", True)),
    "flattened range": Case(field("flattened_range", slice(0, 8)), ("LIV201",)),
    "no data": Case(field("data", None)),
    "shape of the data": Case(field("data", torch.ones(1, 4)), ("LIV101",)),
    "dtype of the data": Case(field("data", torch.ones(2, 4, dtype=torch.float16)), ("LIV107", "LIV205")),
    "contents of a copy": Case(field("data", torch.zeros(2, 4)), ("LIV205",), rounds=6),
    "contents of the only copy": Case(field("data", torch.zeros(2, 4), "own"), rounds=2),
    "object's key": Case(field("key", "other", "extra"), ("LIV206",)),
    "object's cell": Case(field("global_offset", (0,), "extra"), ("LIV204", "LIV206")),
    "object's grid": Case(field("global_shape", (3,), "extra"), ("LIV201",)),
    "object's replica id": Case(field("replica_id", (0, 2), "extra"), ("LIV206",)),
    "object's value": Case(field("data", {"scale": 2.0}, "extra"), ("LIV209",), rounds=6),
    "an object instead of a tensor": Case(twice, ("LIV203", "LIV204", "LIV206")),
    "what a factory builds": Case(field("data", torch.ones(3, 2), "glu"), ("LIV201",)),
    "contents of what a factory builds": Case(field("data", torch.zeros(2, 2), "glu"), ("LIV205",), rounds=6),
    "offset inside a wrapper": Case(
        inside("wrapped", "global_offset", (0, 0)), ("LIV203", "LIV204", "LIV205", "LIV206")
    ),
    "replica id inside a wrapper": Case(inside("wrapped", "replica_id", (0, 0, 2)), ("LIV203", "LIV206")),
    "offset inside a container": Case(inside("container", "global_offset", (0, 0)), ("LIV203", "LIV204", "LIV205")),
    "shape inside a container": Case(inside("container", "global_shape", (10, 4)), ("LIV110", "LIV201")),
    "data inside a container": Case(inside("container", "data", torch.ones(1, 4)), ("LIV101",)),
    "shards of a container": Case(lambda state, meshes: state["container"]._local_shards.clear(), ("LIV203",)),
}


def test_one_attribute_of_megatron_core(core: ModuleType) -> None:
    assert_as_without_memory(run_ranks(cases_in(megatron(core), MEGATRON), WORLD, timeout=120), MEGATRON)


# ---------------------------------------------------------------- from check to check


def test_the_short_path_is_taken_again_once_all_is_well() -> None:
    """Healthy, healthy, a drift, the drift again, healed, healthy: the last check counts, whatever it was."""

    def job(rank: int) -> list[tuple[list[str], int, int]]:
        warnings.simplefilter("ignore")
        installed = live.install(timeout=20)
        meshes = Meshes(*(init_device_mesh("cpu", shape) for shape in ((4,), (4,), (2, 2))), DeviceMesh("cpu", [0, 1]))
        seen = []
        for step, is_bad in enumerate([False, False, True, True, False, False]):
            state = healthy(rank, meshes)
            if is_bad and rank == ONE:
                drifted("copied")(state, meshes)
            codes = [code for code, *_ in told(installed, state, str(step)) if code != "LIV213"]
            traced = sum(how == "broadcast" for how, _ in installed.group.log)
            seen.append((codes, len(installed.group.log) - traced, traced))
        return seen

    drift = [(["LIV205"], 6, 6), (["LIV205"], 5, 6)]
    expected = [([], 3, 0), ([], 2, 0), *drift, ([], 3, 0), ([], 2, 0)]
    assert run_ranks(job, WORLD) == [expected] * WORLD


def test_options_absence_failures_and_another_group_are_changes() -> None:
    def job(rank: int) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        installed = live.install(timeout=2)
        meshes = Meshes(*(init_device_mesh("cpu", shape) for shape in ((4,), (4,), (2, 2))), DeviceMesh("cpu", [0, 1]))

        def make() -> State:
            return healthy(rank, meshes)

        remembered(installed, make)
        seen: dict[str, Any] = {}
        options = {"digest": "none"}, {"ignore": ["model.plain"]}, {"expect": ["step"]}, {"resolve_stateful": False}
        for number, option in enumerate(options):
            seen[str(option)] = judged(installed, make(), str(number), **option)  # type: ignore[arg-type]
        if rank != ONE:  # one rank stays away: the others remember what they did, and so does it
            assert [code for code, *_ in told(installed, make(), "absent")] == ["LIV211"]
        dist.barrier()
        told(installed, make(), "all are here")
        seen["after an absence"] = list(installed.group.log)
        state = make() | ({"broken": {"w": core_like()}} if rank == ONE else {})
        seen["a rank that raises"] = [code for code, *_ in told(installed, state, "raises")]
        told(installed, make(), "after it")
        seen["after it"] = list(installed.group.log)
        remembered(installed, make)
        live.uninstall()
        other = live.install(timeout=2)
        told(other, make(), "another group")
        seen["another group"] = list(other.group.log)
        return seen

    results = run_ranks(job, WORLD)
    assert all(result == results[0] for result in results)
    first = results[0]
    full = [("max", 12), ("sum", 258_048), ("max", 4096)]
    for name, seen in first.items():
        if isinstance(seen, Seen):
            assert seen.told == seen.expected and seen.log[:2] != SHORT, name
    assert first["after an absence"] == SHORT
    assert first["a rank that raises"] == ["LIV210"]
    assert first["after it"] == full
    assert first["another group"] == full


def core_like() -> Any:
    """What looks like a ShardedTensor of Megatron-Core and cannot be read."""
    names = "key data dtype local_shape global_shape global_offset axis_fragmentations replica_id"
    return Namespace(**dict.fromkeys(names.split()))
