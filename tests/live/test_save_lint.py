"""Faults on one rank of four: what torch's own save does with them, and what SaveLint says instead."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import run_ranks
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from ckptlint.live.hooks.dcp import SaveLint


class Planner(SaveLint, DefaultSavePlanner):
    """What a user writes."""


def sharded(local: torch.Tensor, *shape: int, placements: tuple[Any, ...] = (Shard(0),), mesh: Any = None) -> DTensor:
    """A DTensor of this shape over four ranks whose local tensor is what it is."""
    whole = torch.empty(shape, device="meta")
    mesh = mesh or init_device_mesh("cpu", (4,))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def boxed(offsets: tuple[int, ...], sizes: tuple[int, ...], *shape: int) -> DTensor:
    """A tensor of which this rank holds exactly this box."""
    return sharded(LocalShardsWrapper([torch.ones(sizes)], [offsets]), *shape)


def healthy(rank: int) -> dict[str, Any]:
    return {"w": sharded(torch.ones(4, 2), 16, 2), "norm": torch.ones(3), "step": 7}


def overlap(rank: int) -> dict[str, Any]:
    return {"w": boxed((3 if rank == 1 else 4 * rank, 0), (4, 2), 16, 2)}


def dtype_of_rank_2(rank: int) -> dict[str, Any]:
    return {"w": sharded(torch.ones(4, 2, dtype=torch.bfloat16 if rank == 2 else torch.float32), 16, 2)}


def local_shape(rank: int) -> dict[str, Any]:
    return {"w": sharded(torch.ones(5 if rank == 1 else 4, 2), 16, 2)}


def strided_shard(rank: int) -> dict[str, Any]:
    placements = (Shard(0), _StridedShard(0, split_factor=2))
    return {"w": sharded(torch.ones(4, 2), 16, 2, placements=placements, mesh=init_device_mesh("cpu", (2, 2)))}


def order_of_the_mesh(rank: int) -> dict[str, Any]:
    """Rows as Megatron-FSDP lays them out, by tp first, without the chunk list that would say so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._shard_order = [1, 0]
    return {"w": sharded(torch.ones(4, 2), 16, 2, placements=(Shard(0), Shard(0)), mesh=mesh)}


def order_of_the_spec(rank: int) -> dict[str, Any]:
    """What torch itself may make of a redistribution: an order of mesh dims that the placements do not show."""
    mesh, whole = init_device_mesh("cpu", (2, 2)), torch.empty(16, 2)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
    return {"w": DTensor(torch.ones(4, 2), spec, requires_grad=False)}


def one_sided_override(rank: int) -> dict[str, Any]:
    tensor = sharded(torch.ones(4, 2), 16, 2)
    place = dcp.metadata.ChunkStorageMetadata(torch.Size((12 - 4 * rank, 0)), torch.Size((4, 2)))
    tensor._local_tensor.__create_chunk_list__ = lambda: [place]
    return {"w": tensor}


def override_cuts_another_dim(rank: int) -> dict[str, Any]:
    tensor = sharded(torch.ones(4, 16), 16, 4)
    wide = sharded(torch.ones(16, 1), 16, 4, placements=(Shard(1),))
    local = torch.ones(16, 1)
    local.__create_chunk_list__ = wide.__create_chunk_list__
    local.__create_write_items__ = lambda fqn, _: wide.__create_write_items__(fqn, wide)
    tensor._local_tensor = local
    return {"w": tensor}


def out_of_bounds(rank: int) -> dict[str, Any]:
    return {"w": boxed((13 if rank == 3 else 4 * rank, 0), (4, 2), 16, 2)}


def payload_dtype(rank: int) -> dict[str, Any]:
    shard = LocalShard(torch.ones(4, 2), ShardMetadata([4 * rank, 0], [4, 2], f"rank:{rank}/cpu"))
    tensor = init_from_local_shards([shard], 16, 2)
    if rank == 1:
        tensor.local_shards()[0].tensor = torch.ones(4, 2, dtype=torch.bfloat16)
    return {"w": tensor}


def unsharded_state(rank: int) -> dict[str, Any]:
    moment = torch.ones(4, 2) * rank
    return {"model": {"w": sharded(torch.ones(4, 2), 16, 2)}, "optimizer": {"state": {"w": {"exp_avg": moment}}}}


ACCEPTED, REFUSED = "accepted", "refused"
FAULTS: Mapping[str, tuple[Callable[[int], dict[str, Any]], str, str]] = {
    # what torch does, and what SaveLint says; "" where it says nothing: contents are not its business
    "healthy": (healthy, ACCEPTED, ""),
    "overlap": (overlap, REFUSED, ""),
    "missing chunk": (lambda rank: {} if rank == 1 else {"w": sharded(torch.ones(4, 2), 16, 2)}, REFUSED, ""),
    "shape": (
        lambda rank: {"w": sharded(torch.ones(4, 2), 15 if rank == 1 else 16, 2)},
        ACCEPTED,
        "LIV201 the ranks disagree on the global shape of w; float32 [15, 2] on rank 1",
    ),
    "dtype": (dtype_of_rank_2, ACCEPTED, "LIV201 the ranks disagree on the dtype of w; bfloat16 [16, 2] on rank 2"),
    "two claim one chunk": (lambda rank: {"w": boxed((8 * (rank % 2), 0), (8, 2), 16, 2)}, ACCEPTED, ""),
    "one place, two sizes": (
        lambda rank: {"w": boxed((0, 0), (15 if rank == 3 else 16, 2), 16, 2)},
        ACCEPTED,
        "LIV202 rank 0 and rank 3 hold chunks of w that start at [0, 0] and differ in size",
    ),
    "plain value": (lambda rank: {"norm": torch.full((3,), float(rank))}, ACCEPTED, ""),
    "plain shape": (
        lambda rank: {"norm": torch.ones(4 if rank == 2 else 3)},
        ACCEPTED,
        "LIV201 the ranks disagree on the global shape of norm; float32 [4] on rank 2",
    ),
    "object": (lambda rank: {"step": rank}, ACCEPTED, ""),
    "local shape": (
        local_shape,
        ACCEPTED,
        "LIV101 the local tensor of w is [5, 2], but (Shard(dim=0)) of [16, 2] on a mesh of [4] gives [4, 2]",
    ),
    "stale placement": (lambda _: {"w": sharded(torch.ones(4, 2).t(), 8, 4)}, ACCEPTED, ""),
    "strided shard": (
        strided_shard,
        REFUSED,
        "LIV102 the shard of w is not one box: on dim 0 it holds 4 of 16 indices, in 2 separate runs",
    ),
    "partial": (
        lambda _: {"w": sharded(torch.ones(16, 2), 16, 2, placements=(Partial(),))},
        REFUSED,
        "LIV106 the values of w are partial sums",
    ),
    "tensor or object": (
        lambda rank: {"norm": 3 if rank == 2 else torch.ones(3)},
        REFUSED,
        "LIV201 the ranks disagree on the kind of norm; object [1] on rank 2",
    ),
    "order of the mesh": (
        order_of_the_mesh,
        ACCEPTED,
        "LIV103 the chunk list of w is missing: mesh axes split it in the order (1, 0)",
    ),
    "order of the spec": (
        order_of_the_spec,
        ACCEPTED,
        "LIV103 the chunk list of w is missing: mesh axes split it in the order (1, 0)",
    ),
    "one-sided override": (one_sided_override, ACCEPTED, "a save writes [0:4, 0:2], a load reads [12:16, 0:2]"),
    "override": (
        override_cuts_another_dim,
        ACCEPTED,
        "LIV104 the chunk list of w splits dim 1 (1 of 4), but no placement shards it",
    ),
    "out of bounds": (out_of_bounds, REFUSED, "LIV105 chunk [13:17, 0:2] of w reaches outside the tensor"),
    "payload dtype": (payload_dtype, ACCEPTED, "LIV107 the data of w is bfloat16, but declared as float32"),
    "unsharded state": (unsharded_state, ACCEPTED, "LIV109 the state of optimizer.state.w.exp_avg is a plain tensor"),
}


def saved(state: dict[str, Any], planner: DefaultSavePlanner, folder: Path) -> tuple[str, str, bool]:
    """What a save does, what it says, and whether it leaves a file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dcp.save(state, checkpoint_id=folder, planner=planner)
            outcome, text = ACCEPTED, ""
        except CheckpointException as error:
            outcome, text = REFUSED, str(error)
    said = [str(warning.message) for warning in caught if "LIV" in str(warning.message)]
    return outcome, unwrapped("\n".join([text, *said])), any(folder.glob("*"))


def unwrapped(text: str) -> str:
    """The text in one line, `error[CODE] name:` as the code alone."""
    return re.sub(r"(?:error|warning)\[(\w+)\] [a-z-]+:", r"\1", " ".join(text.split()))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank: fault -> what torch's planner does, what ours does."""
    folder = tmp_path_factory.mktemp("saves")

    def job(rank: int) -> dict[str, Any]:
        return {
            name: (
                saved(make(rank), DefaultSavePlanner(), folder / name / "torch"),
                saved(make(rank), Planner(), folder / name / "ours"),
            )
            for name, (make, _, _) in FAULTS.items()
        }

    return run_ranks(job)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_torch_does_and_what_save_lint_says(outcomes: list[dict[str, Any]], fault: str) -> None:
    _, expected, says = FAULTS[fault]
    for rank in outcomes:
        (outcome, _, files), (ours, text, our_files) = rank[fault]
        assert (outcome, files) == (expected, expected == ACCEPTED)
        is_error = expected == REFUSED or (says and "LIV104" not in says and "LIV109" not in says)
        assert (ours, our_files) == ((REFUSED, False) if is_error else (ACCEPTED, True))
        if is_error:
            assert all(part in text for part in says.split("; "))
    assert says or not any("LIV" in rank[fault][1][1] for rank in outcomes)
    assert any(all(part in rank[fault][1][1] for part in says.split("; ")) for rank in outcomes)


def test_cached_plans_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    def job(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                planner = Planner(enable_plan_caching=True)
                dcp.save(healthy(rank), checkpoint_id=tmp_path / str(step), planner=planner)
        return [str(warning.message) for warning in caught if "plan" in str(warning.message)]

    first, *others = run_ranks(job)
    assert first == ["torch cached the save plans of ranks 0-3: they were not compared"]
    assert others == [[], [], []]


def test_an_asynchronous_save_fails_at_its_result(tmp_path: Path) -> None:
    def job(rank: int) -> str:
        future = dcp.async_save(dtype_of_rank_2(rank), checkpoint_id=tmp_path / "step", planner=Planner())
        with pytest.raises(CheckpointException) as error:
            future.result()
        return unwrapped(str(error.value))

    assert all("LIV201 the ranks disagree on the dtype of w" in text for text in run_ranks(job))
    assert not list((tmp_path / "step").glob("*"))


def test_a_replicated_dtensor_is_healthy(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        state = {"w": distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Replicate(), Shard(0)])}
        dcp.save(state, checkpoint_id=tmp_path / "step", planner=Planner())

    run_ranks(job)
