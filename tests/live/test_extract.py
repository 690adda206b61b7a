"""What a rank holds: equal to what torch would write, read without communication, and wrong where it is wrong."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._extension
import torch.distributed.checkpoint.planner_helpers
from jobs import fixtures_of, run_ranks
from support import REPOSITORY, swept
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptlint.live.collect import compat
from ckptlint.live.collect.extract import RankChunk, extract

pytestmark = pytest.mark.ci

RAISED = "communication"


@pytest.fixture
def as_rank() -> Iterator[Callable[[int], None]]:
    """Makes this process one rank of a job of 64 in which nothing is ever sent."""

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())

    yield become
    dist.destroy_process_group()


def forbid_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every method of process groups, backends and stores raise."""

    def raises(*args: object, **kwargs: object) -> None:
        raise AssertionError(RAISED)

    for kind in (dist.ProcessGroup, dist.distributed_c10d.Backend, dist.Store):
        for name in dir(kind):
            if not name.startswith("__") and callable(getattr(kind, name)):
                monkeypatch.setattr(kind, name, raises)


def one(state: dict[Any, Any]) -> RankChunk:
    (item,) = extract(state)
    return item


def said(items: list[RankChunk]) -> list[tuple[str, str]]:
    return [(code, text.replace("{of}", f" of {item.fqn}")) for item in items for code, text, _ in item.problems]


# ---------------------------------------------------------------- as torch would write it


def planned(plan: SavePlan) -> list[tuple[Any, ...]]:
    rows = []
    for item in plan.items:
        data = item.tensor_data
        if data is None:
            rows.append((item.index.fqn,))
        else:
            dtype = str(data.properties.dtype).removeprefix("torch.")
            chunk = data.chunk
            rows.append((item.index.fqn, dtype, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes)))
    return sorted(rows)


def held(items: list[RankChunk]) -> list[tuple[Any, ...]]:
    rows = [
        (item.fqn,) if item.kind == "object" else (item.fqn, item.dtype, item.shape, item.offsets, item.sizes)
        for item in items
    ]
    return sorted(rows)


def local_plan(state: dict[str, Any]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dcp.state_dict_saver._stateful_to_state_dict(state), None, is_coordinator=True)
    return planner.create_local_plan()


def job_of_fixtures(name: str, *args: Any) -> Callable[[int], Any]:
    """A job that trains and saves as `fixtures/make/torch_dcp.py` does, and reports what was read at the save."""

    def job(rank: int) -> Any:
        sys.path.insert(0, str(REPOSITORY / "fixtures" / "make"))
        dcp._extension.ZStandard = object  # its package may be missing, and no job here writes with it
        import torch_dcp

        found: list[Any] = []

        def save(state: dict[str, Any], **options: Any) -> None:
            items = extract(state)
            data = [
                tuple(item.data.shape) == item.sizes and str(item.data.dtype) == f"torch.{item.dtype}"
                for item in items
                if item.kind == "tensor"
            ]
            owners = {(item.fqn, item.offsets): (item.writer, item.replica, item.copies) for item in items}
            views = {item.fqn: item.view for item in items if item.view}
            found.append((held(items), planned(local_plan(state)), said(items), all(data), owners, views))

        torch_dcp.dcp.save = save
        getattr(torch_dcp, name)(rank, None, *args)
        return found[0]

    return job


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *(("hsdp", ()), ("tp_fsdp2", ()), ("expert_parallel", (2,)), ("fsdp1", (StateDictType.SHARDED_STATE_DICT,))),
        *swept(("replicated", ()), ("fsdp2", ()), ("expert_parallel", (1,)), ("flat_1d", ())),
        *swept(("fsdp1", (StateDictType.LOCAL_STATE_DICT,))),
    ],
)
def test_healthy_jobs_are_read_as_torch_would_write_them(name: str, args: tuple[Any, ...]) -> None:
    ranks = run_ranks(job_of_fixtures(name, *args))
    for items, plan, problems, is_data_sound, _, _ in ranks:
        assert items == plan and plan
        assert problems == []
        assert is_data_sound
    owners = [rank[4] for rank in ranks]
    declared = {writer for found in owners for writer, _, _ in found.values()}
    if name == "hsdp":
        assert declared == {"dtensor"}
        assert [{(replica, copies) for _, replica, copies in found.values()} for found in owners] == [
            {(0, 2)},
            {(0, 2)},
            {(1, 2)},
            {(1, 2)},
        ]
    if name == "fsdp1":
        assert declared == {"sharded_tensor"} | ({"plain"} if args[0] == StateDictType.SHARDED_STATE_DICT else set())
        views = [rank[5] for rank in ranks]
        assert views[0] and all(view.items() <= views[0].items() for view in views), "all ranks see the same shards"


# ---------------------------------------------------------------- a mesh of 64, and nobody to ask

PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
    (_StridedShard(0, split_factor=8), Shard(0)),
]


@pytest.mark.parametrize("rank", [0, 13, 63])
def test_nothing_is_sent_while_dtensors_of_64_ranks_are_read(
    as_rank: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    as_rank(rank)
    mesh = init_device_mesh("cpu", (8, 8))
    state = {}
    for i, (shape, placements) in enumerate(product([(64, 9), (70, 3), (3, 20), (0, 5)], PLACEMENTS)):
        whole = torch.empty(shape, device="meta")
        offsets_and_sizes = dist.tensor._utils.compute_local_shape_and_global_offset(shape, mesh, placements)
        local = torch.ones(offsets_and_sizes[0])
        options = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        state[f"t{i}"] = DTensor.from_local(local, mesh, placements, **options)
    outside = DeviceMesh("cpu", [(rank + 1) % 64, (rank + 2) % 64], _init_backend=False)
    state["elsewhere"] = DTensor.from_local(torch.ones(1), outside, [Shard(0)], run_check=False)
    plan = planned(local_plan(state))
    forbid_communication(monkeypatch)
    with pytest.raises(AssertionError, match=RAISED):
        dist.barrier()
    items = extract(state)
    assert held(items) == plan and len(items) == 4 * len(PLACEMENTS)
    assert said(items) == []
    row, column = divmod(rank, 8)
    replicas = [(item.replica, item.copies) for item in items[: len(PLACEMENTS)]]
    assert replicas == [(0, 1), (column, 8), (row, 8), (rank, 64), (0, 1)]


def test_partial_and_strided_placements_are_named(as_rank: Callable[[int], None]) -> None:
    as_rank(9)
    mesh = init_device_mesh("cpu", (8, 8))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()], run_check=False)
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    strided = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False, shape=torch.Size([128]), stride=(1,))
    items = extract({"partial": partial, "strided": strided})
    assert said(items) == [
        (
            "LIV106",
            "the values of partial are partial sums, not reduced yet: "
            "(Partial(sum), Replicate()) of [4] on a mesh of [8, 8]",
        ),
        (
            "LIV102",
            "the shard of strided is not one box: on dim 0 it holds 2 of 128 indices, in 2 separate runs; "
            "(Shard(dim=0), _StridedShard(dim=0, sf=2)) of [128] on a mesh of [8, 8]",
        ),
    ]
    assert (items[1].offsets, items[1].sizes) == ((17,), (2,)), "as torch would write it"
    assert items[0].copies == 8


def test_an_empty_shard_is_no_fault(as_rank: Callable[[int], None]) -> None:
    as_rank(9)
    mesh = init_device_mesh("cpu", (8, 8))
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    options = {"run_check": False, "shape": torch.Size([128, 0]), "stride": (1, 1)}
    strided = DTensor.from_local(torch.ones(2, 0), mesh, placements, **options)
    overridden = DTensor.from_local(torch.ones(0, 0), mesh, [Shard(0), Replicate()], **options | {"shape": (4, 4)})
    place = dcp.metadata.ChunkStorageMetadata(torch.Size((4, 0)), torch.Size((0, 0)))
    items = dcp.planner_helpers._create_write_items("", overridden)
    items[0] = replace(items[0], tensor_data=replace(items[0].tensor_data, chunk=place))
    overridden._local_tensor.__create_chunk_list__ = lambda: [place]
    overridden._local_tensor.__create_write_items__ = lambda fqn, tensor: items
    found = extract({"strided": strided, "overridden": overridden})
    assert [(item.offsets, item.sizes) for item in found] == [((17, 0), (2, 0)), ((4, 0), (0, 0))]
    assert said(found) == []


def test_before_torch_213_a_strided_shard_lies_where_torch_says(
    as_rank: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placements do not say what older versions mean by it; here torch 2.13 answers in their place."""
    monkeypatch.setattr(compat, "_STRIDED", False)
    as_rank(9)
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    options = {"run_check": False, "shape": torch.Size([128]), "stride": (1,)}
    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (8, 8)), placements, **options)
    items = extract({"w": tensor})
    assert held(items) == planned(local_plan({"w": tensor}))
    assert said(items) == []


def test_shards_of_a_wrapper_are_chunks_with_data_of_their_own(as_rank: Callable[[int], None]) -> None:
    as_rank(0)
    mesh = init_device_mesh("cpu", (64,))
    parts = [torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)]
    wrapper = LocalShardsWrapper(parts, [(0, 0), (0, 3)])
    tensor = DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False)
    empty = DTensor.from_local(
        LocalShardsWrapper([], []), mesh, [Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,)
    )
    state = {"w": tensor, "empty": empty}
    items = extract(state)
    assert held(items) == planned(local_plan(state))
    assert all(torch.equal(item.data, part) for item, part in zip(items, parts, strict=True))
    assert said(items) == []
    assert {item.dtype for item in items} == {"bfloat16"}


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_sharded_tensor_inside_a_sharded_tensor(as_rank: Callable[[int], None]) -> None:
    """FSDP1 over tensor parallelism without DTensors: the columns of this rank's rows are sharded once more."""
    as_rank(1)

    def tensor(shard: torch.Tensor, offsets: list[int], sizes: list[list[int]], *shape: int) -> ShardedTensor:
        places = [ShardMetadata(offset, size, f"rank:{rank}/cpu") for rank, (offset, size) in enumerate(sizes)]
        mine = [LocalShard(shard, next(place for place in places if place.shard_offsets == offsets))]
        properties = TensorProperties(dtype=torch.float32)
        metadata = ShardedTensorMetadata(places, torch.Size(shape), properties)
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)

    inner = tensor(torch.ones(2, 3), [0, 3], [([0, 0], [2, 3]), ([0, 3], [2, 3])], 2, 6)
    outer = tensor(inner, [2, 0], [([0, 0], [2, 6]), ([2, 0], [2, 6])], 4, 6)
    items = extract({"w": outer})
    assert held(items) == planned(local_plan({"w": outer})) == [("w", "float32", (4, 6), (2, 3), (2, 3))]
    assert said(items) == [] and items[0].view == b""


# ---------------------------------------------------------------- the walk


@dataclass
class App:
    """Stateful as torch defines it; counts how often its state is asked for."""

    asked: int = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"w": torch.ones(2), "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Proxy:
    """An object whose attributes may be anything but must not be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_state_dicts_are_flattened_as_torch_flattens_them() -> None:
    state = {
        "model": OrderedDict(w=torch.ones(2), nested={"b": torch.ones(3), 4: 5}), "list": [torch.ones(1), 2, {"x": 3}],
        "deep": [[1, 2], [[torch.ones(1)]]], "numbers": [1, 2], "empty": [], "nothing": {},
        "tuple": (torch.ones(1), torch.ones(1)), "none": None, 7: "seven", "app": App(), "inner": {"app": App()},
    }  # fmt: skip
    items = extract(state)
    assert held(items) == planned(local_plan({**state, "app": App()}))
    assert {item.fqn: item.data for item in items if item.kind == "object"}["tuple"] is state["tuple"]
    assert {item.fqn for item in items} >= {"list.0", "list.1", "list.2.x", "deep.1.0.0", "app.w", "inner.app", "7"}
    assert state["app"].asked == 1 and state["inner"]["app"].asked == 0
    assert "app.w" not in {item.fqn for item in extract(state, resolve_stateful=False)}
    item = one({"n": 3})
    assert (item.kind, item.writer, item.shape, item.offsets, item.sizes) == ("object", "plain", (1,), (0,), (1,))


def test_objects_are_not_asked_for_what_they_do_not_define() -> None:
    state = {"proxy": Proxy(), "class": App, "list": [Proxy(), App]}
    assert [(item.fqn, item.kind) for item in extract(state)] == [(key, "object") for key in state]


def test_two_entries_of_one_name() -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": 3, 1: 1, "1": 2}
    with pytest.raises(ValueError, match="duplicated flatten key"):
        local_plan(state)
    items = extract(state)
    assert [item.fqn for item in items] == ["a.b", "a.b", "1", "1"]
    assert said(items) == [
        ("LIV108", "two entries have the same key: ['a']['b'] and ['a.b']"),
        ("LIV108", "two entries have the same key: [1] and ['1']"),
    ]


def test_states_that_are_one_shard_of_their_parameter(as_rank: Callable[[int], None]) -> None:
    as_rank(0)
    mesh = init_device_mesh("cpu", (64,))
    sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    whole = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()], run_check=False)
    model = {"layers.0.w": sharded, "layers.0.v": whole, "b": torch.ones(2, 3)}

    def moments(shape: tuple[int, ...]) -> dict[str, Any]:
        return {"exp_avg": torch.ones(shape), "step": torch.tensor(3.0), "exp_avg_sq_row": torch.ones(shape)}

    for optimizer in (
        {"optimizer": {"state": {name: moments((2, 3)) for name in model}}},
        {"optim": {f"state.{name}.{what}": value for name in model for what, value in moments((2, 3)).items()}},
        {"optimizer": {"state": {"exp_avg": {name: torch.ones(2, 3) for name in model}}}},
    ):
        found = said(extract({"model": model, **optimizer}))
        assert [code for code, _ in found] == ["LIV109"]
        assert "is a plain tensor [2, 3], the size of one shard of its parameter [128, 3]" in found[0][1]
    single = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False)
    one_each = {"model": {"s": single}, "optimizer": {"state": {"s": {"exp_avg": torch.ones(1)}}}}
    assert said(extract(one_each)) == [], "a number says nothing of how it was cut"
    for healthy in (moments((128, 3)), moments((2,)), {"exp_avg": sharded}, {"exp_avg": torch.ones(())}):
        assert said(extract({"model": model, "optimizer": {"state": {"layers.0.w": healthy}}})) == []


# ---------------------------------------------------------------- Megatron-Core, by what its releases look like


@dataclass
class McoreTensor:
    """The attributes of megatron.core.dist_checkpointing.mapping.ShardedTensor, without its checks."""

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass
class McoreObject:
    """The attributes of megatron.core.dist_checkpointing.mapping.ShardedObject."""

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0


def mcore(**changes: Any) -> McoreTensor:
    values = {
        "key": "w", "data": torch.ones(4, 3), "dtype": torch.float32, "local_shape": (4, 3), "global_shape": (8, 3),
        "global_offset": (4, 0), "axis_fragmentations": (2, 1),
    }  # fmt: skip
    return McoreTensor(**{**values, **changes})


def test_a_megatron_chunk_goes_by_its_key() -> None:
    item = one({"model": {"some.path": mcore()}})
    assert (item.fqn, item.writer, item.kind, item.dtype) == ("w", "mcore", "tensor", "float32")
    assert (item.shape, item.offsets, item.sizes, item.replica) == ((8, 3), (4, 0), (4, 3), 0)
    assert item.problems == ()


def test_axes_that_were_prepended_have_size_one() -> None:
    prepended = {"global_shape": (6, 8, 3), "global_offset": (5, 4, 0), "axis_fragmentations": (6, 2, 1)}
    for shape in ((4, 3), (1, 4, 3)):  # before a save, and after it has viewed the data
        item = one({"w": mcore(data=torch.ones(shape), prepend_axis_num=1, **prepended)})
        assert (item.offsets, item.sizes, item.problems) == ((5, 4, 0), (1, 4, 3), ())


def test_flattened_ranges_of_older_releases() -> None:
    matrix = mcore(data=torch.ones(5), flattened_range=slice(2, 7))
    item = one({"w": matrix})
    assert (item.shape, item.offsets, item.sizes) == ((2, 1, 12), (1, 0, 2), (1, 1, 5))
    vector = mcore(
        data=torch.ones(3),
        local_shape=(4,),
        global_shape=(8,),
        global_offset=(4,),
        axis_fragmentations=(2,),
        flattened_range=slice(1, 4),
    )
    item = one({"w": vector})
    assert (item.shape, item.offsets, item.sizes) == ((2, 4), (1, 1), (1, 3))
    assert item.problems == ()
    (problem,) = one({"w": mcore(data=torch.ones(6), flattened_range=slice(2, 7))}).problems
    assert problem[0] == "LIV101"


@pytest.mark.parametrize(
    ("replica_id", "expected"),
    [(0, 0), ((0, 0, 0), 0), (3, 3), ((0, 0, 1), 1 + (1 << 40)), ((2, 1, 0), 3 + (1 << 20)), ((), 0)],
)
def test_replica_ids(replica_id: Any, expected: int) -> None:
    assert one({"w": mcore(replica_id=replica_id)}).replica == expected


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"data": torch.ones(3, 4)}, "LIV101", "the data of w is [3, 4], but its chunk is declared as [4, 3]"),
        ({"dtype": torch.bfloat16}, "LIV107", "the data of w is float32, but declared as bfloat16"),
        (
            {"axis_fragmentations": (3, 1)},
            "LIV110",
            "dim 0 of w does not fit its grid: 3 fragments of 4 make 12, not 8",
        ),
        (
            {"global_offset": (3, 0)},
            "LIV110",
            "dim 0 of w does not fit its grid: offset 3 is not a multiple of the local size 4",
        ),
        (
            {"global_offset": (8, 0)},
            "LIV105",
            "chunk [8:12, 0:3] of w reaches outside the tensor, whose shape is [8, 3]",
        ),
        (
            {"global_offset": (4,)},
            "LIV105",
            "offsets [4] and sizes [4, 3] of w do not have the 2 axes of its shape [8, 3]",
        ),
    ],
)
def test_what_a_megatron_tensor_contradicts(changes: dict[str, Any], code: str, sentence: str) -> None:
    assert said(extract({"w": mcore(**changes)})) == [(code, sentence)]


def test_what_a_megatron_tensor_need_not_obey() -> None:
    uneven = {"global_shape": (7, 3), "global_offset": (3, 0), "axis_fragmentations": None}
    padded = {"global_shape": (9, 3), "allow_shape_mismatch": True}
    assert said(extract({"a": mcore(**uneven), "b": mcore(**padded), "c": mcore(data=None)})) == []


def test_objects_cells_and_what_is_not_saved() -> None:
    class LocalNonpersistentObject:
        obj = torch.ones(1)

        def unwrap(self) -> Any:
            return self.obj

    @dataclass
    class Factory:
        key: str
        data: torch.Tensor
        built: int = 0
        merge_fn: Any = None
        build_fn: Any = None

        def build(self) -> list[McoreTensor]:
            self.built += 1
            return [mcore(key=self.key, global_offset=(row, 0), data=self.data) for row in (0, 4)]

    factory = Factory("halves", torch.ones(4, 3))
    state = {
        "rng": McoreObject("rng_state", b"data", (2, 3), (1, 2), (0, 0, 1)),
        "local": LocalNonpersistentObject(),
        "factory": factory,
        "list": [mcore(key="in a list")],
    }
    cell, first, second, listed = extract(state)
    assert (cell.fqn, cell.kind, cell.writer, cell.dtype) == ("rng_state", "object", "mcore", "")
    assert (cell.shape, cell.offsets, cell.sizes) == ((2, 3), (1, 2), (1, 1))
    assert cell.replica > 0 and cell.data == b"data"
    assert (first.fqn, first.offsets, second.fqn, second.offsets) == ("halves", (0, 0), "halves", (4, 0))
    assert listed.fqn == "in a list"
    assert factory.built == 1
    assert said([cell, first, second, listed]) == []
    assert said(extract({"rng": McoreObject("rng", b"", (2,), (2,))}))[0][0] == "LIV105"


# ---------------------------------------------------------------- Megatron-Core itself


@pytest.fixture
def mapping() -> Any:
    """megatron.core.dist_checkpointing.mapping."""
    return pytest.importorskip("megatron.core.dist_checkpointing.mapping", reason="megatron-core is not installed")


def test_megatron_core_before_and_inside_its_save(mapping: Any, as_rank: Callable[[int], None]) -> None:
    as_rank(1)
    from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict

    part = mapping.ShardedTensor.from_rank_offsets
    tensors = {
        "one": [part("one", torch.ones(4, 3), (0, 1, 2), replica_id=(0, 0, 1))],
        "stacked": [part("stacked", torch.ones(4, 3), (0, 5, 6), (1, 1, 2), prepend_axis_num=1)],
        "several": [part("several", torch.ones(4, 3), (0, i, 2)) for i in range(2)],
    }
    items = extract(tensors)
    assert said(items) == []
    facts = [(i.fqn, i.shape, i.offsets, i.sizes, i.dtype, i.writer, i.replica) for i in items]
    assert facts[1] == ("stacked", (6, 8, 3), (5, 4, 0), (1, 4, 3), "float32", "mcore", 0)
    converted = mcore_to_pyt_state_dict(tensors)
    inside = extract(converted)
    assert [(i.fqn, i.shape, i.offsets, i.sizes, i.dtype, i.writer, i.replica) for i in inside] == facts
    assert said(inside) == []
    assert held(inside) == planned(local_plan(converted))


def test_megatron_core_objects_and_factories(mapping: Any) -> None:
    factory = mapping.ShardedTensorFactory(
        "fc1",
        torch.ones(4, 3),
        lambda key, data, replica_id, _: [
            mapping.ShardedTensor.from_rank_offsets(key, half, (0, i, 2), replica_id=replica_id)
            for i, half in enumerate(data.chunk(2))
        ],
        torch.cat,
        replica_id=(0, 2),
    )
    state = {
        "factory": factory,
        "object": mapping.ShardedObject("rng", {"seed": 1}, (2,), (1,), replica_id=1),
        "local": mapping.LocalNonpersistentObject(torch.ones(1)),
    }
    items = extract(state)
    assert [(i.fqn, i.kind, i.offsets, i.sizes) for i in items] == [
        ("fc1", "tensor", (0, 0), (2, 3)),
        ("fc1", "tensor", (2, 0), (2, 3)),
        ("rng", "object", (1,), (1,)),
    ]
    assert all(item.replica > 0 for item in items) and said(items) == []


def test_a_grid_that_megatron_core_itself_does_not_doubt(mapping: Any) -> None:
    values = ("w", torch.ones(4, 3), torch.float32, (4, 3), (8, 3), (4, 0), (4, 1))
    assert said(extract({"w": mapping.ShardedTensor(*values)})) == [
        ("LIV110", "dim 0 of w does not fit its grid: 4 fragments of 4 make 16, not 8")
    ]
    with pytest.raises(Exception, match="must be divisible by local shape"):
        mapping.ShardedTensor(*values[:5], (3, 0), (2, 1))


def test_a_training_state_of_megatron_core(mapping: Any, tmp_path: Path) -> None:
    """A GPT and its distributed optimizer at TP 2, PP 2: what is main here is what DCP is given to write."""
    for package in ("einops", "psutil"):
        pytest.importorskip(package, reason=f"megatron-core needs {package}")

    def job(rank: int) -> Any:
        megatron_core = fixtures_of("megatron_core")
        from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

        found: dict[str, Any] = {}
        create_local_plan, save = MCoreSavePlanner.create_local_plan, megatron_core.dist_checkpointing.save

        def plan(planner: MCoreSavePlanner) -> SavePlan:
            found["plan"] = create_local_plan(planner)
            found["inside"] = extract(planner.state_dict, resolve_stateful=False)
            return found["plan"]

        def look(state: dict[str, Any], *args: Any, **options: Any) -> Any:
            found["items"] = extract(state)
            return save(state, *args, **{**options, "validate_access_integrity": False})

        MCoreSavePlanner.create_local_plan, megatron_core.dist_checkpointing.save = plan, look
        run = megatron_core.Run(tp=2, pp=2, layers=2, fully_parallel=False)
        with megatron_core.CudaToCpu():
            megatron_core.start_parallel(run)
            state, _ = megatron_core.training_state(run)
            strategy = megatron_core.TorchDistSaveShardedStrategy("torch_dist", 1)
            megatron_core.dist_checkpointing.save(state, str(tmp_path), strategy)
        items, inside = found["items"], found["inside"]
        main = [item for item in items if item.writer == "mcore" and item.kind == "tensor" and item.replica == 0]
        tensors = [item for item in inside if item.kind == "tensor"]
        rows = [row for row in planned(found["plan"]) if len(row) > 1]
        return held(main), held(tensors), rows, said(items) + said(inside), len(items)

    for main, inside, plan, problems, count in run_ranks(job):
        assert main == inside == plan
        assert len(plan) >= 30 and count > len(plan)
        assert problems == []


def test_chunk_lists_of_megatron_fsdp(mapping: Any) -> None:
    pytest.importorskip("einops", reason="megatron-core imports einops")

    def job(rank: int) -> Any:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh._shard_order = [1, 0]
        dp, tp = mesh.get_coordinate()
        rows = [[5, 1], [0, 2]][tp][dp]
        whole = torch.empty(8, 3)
        options = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        tensor = DTensor.from_local(torch.ones(rows, 3), mesh, (Shard(0), Shard(0)), **options)
        uneven_dtensor.update_uneven_dtensor_chunk_metadata(tensor)
        state = {"w": tensor, "copied": copy.deepcopy(tensor)}
        lost = {
            "detach": tensor.detach(),
            "clone": tensor.clone(),
            "from_local": DTensor.from_local(tensor.to_local().clone(), mesh, (Shard(0), Shard(0)), **options),
        }
        with pytest.MonkeyPatch.context() as patch:
            forbid_communication(patch)
            items, without = extract(state), extract(lost)
        return held(items), planned(local_plan(state)), said(items), said(without), planned(local_plan(lost))

    results = run_ranks(job)
    for (items, plan, problems, _, _), rows in zip(results, [(0, 5), (6, 0), (5, 1), (6, 2)], strict=True):
        assert items == plan
        assert plan == [(fqn, "float32", (8, 3), (rows[0], 0), (rows[1], 3)) for fqn in ("copied", "w") if rows[1]]
        assert problems == []
    silently = [[row[3][0] for row in result[4]] for result in results]
    assert silently == [[0] * 3, [2] * 3, [4] * 3, [6] * 3], "torch falls back to even rows and says nothing"
    for _, _, _, problems, _ in results[:3]:
        assert {text.split(" of ")[1].split()[0] for code, text in problems if code == "LIV101"} == {
            "detach",
            "clone",
            "from_local",
        }
    assert [code for code, _ in results[3][3]] == [], "its share happens to be even"


# ---------------------------------------------------------------- cost
