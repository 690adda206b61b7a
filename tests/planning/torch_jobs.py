"""State dicts of real jobs, and real ranks that save and load them: functions for the exact form, and what torch does.

A rank is a fork with a gloo group over a file. What it found is a JSON file: the items of torch's own load plan, the
files that a real `dcp.load` opened, and how many bytes it asked of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, and not in each fork
import torch.distributed.checkpoint as dcp
from gloo_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# ---------------------------------------------------------------- state dicts


class Block(nn.Module):
    """Sizes that few meshes divide."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(10, 22, bias=False)
        self.w2 = nn.Linear(22, 10, bias=False)
        self.norm = nn.LayerNorm(10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(37, 10)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(10)
        self.output = nn.Linear(10, 37, bias=False)
        self.register_buffer("freqs", torch.ones(5))


def sharded(mesh: DeviceMesh, tensor_parallel: DeviceMesh | None = None) -> dict[str, Any]:
    """A model under FSDP2 with its optimizer, as a trainer saves it."""
    torch.manual_seed(1)
    model = Model()
    if tensor_parallel is not None:
        for block in model.layers:
            parallelize_module(block, tensor_parallel, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        parallelize_module(model, tensor_parallel, {"output": ColwiseParallel()})
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, _ = get_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": weights, "optimizer": flat, "step": 7, "scheduler": {"last_epoch": 3, "lrs": [0.1, 0.2]}}


def fsdp(mesh: DeviceMesh) -> dict[str, Any]:
    """1-D."""
    return sharded(mesh)


def fsdp_tp(mesh: DeviceMesh) -> dict[str, Any]:
    """2-D: dp x tp."""
    return sharded(mesh["dp"], mesh["tp"])


def hsdp(mesh: DeviceMesh) -> dict[str, Any]:
    """Replicas of shards."""
    return sharded(mesh)


def by_hand() -> dict[str, Any]:
    """Placements of all sorts on a mesh that the job builds itself, on what it takes for a GPU."""
    world = int(os.environ["WORLD_SIZE"])
    device = "cuda" if os.environ.get("CKPTLINT_TEST_GPU") else "cpu"
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("x",))
    made = {
        "uneven": distribute_tensor(torch.arange(3 * 11.0).reshape(11, 3).to(device), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(3 * 13.0).reshape(3, 13).to(device), mesh, [Shard(1)]),
        "whole": distribute_tensor(torch.arange(6.0).to(device), mesh, [Replicate()]),
        "few": distribute_tensor(torch.arange(2.0).to(device), mesh, [Shard(0)]),
        "plain": torch.arange(4.0, device=device),
        "number": torch.tensor(3.0, device=device),
        "empty": torch.empty(0, 4, device=device),
        "text": "hello",
    }
    if world % 2 == 0:
        grid = init_device_mesh(device, (2, world // 2), mesh_dim_names=("a", "b"))
        made["grid"] = distribute_tensor(torch.arange(9 * 7.0).reshape(9, 7).to(device), grid, [Shard(0), Shard(1)])
        made["twice"] = distribute_tensor(torch.arange(9 * 7.0).reshape(9, 7).to(device), grid, [Shard(0), Shard(0)])
    else:
        made["grid"] = distribute_tensor(torch.arange(9 * 7.0).reshape(9, 7).to(device), mesh, [Shard(1)])
        made["twice"] = distribute_tensor(torch.arange(9 * 7.0).reshape(9, 7).to(device), mesh, [Shard(0)])
    return made


# ---------------------------------------------------------------- real ranks


def state_dict_of(name: str, mesh: dict[str, int]) -> dict[str, Any]:
    """What a function of this file gives on a mesh of these sizes."""
    function: Callable[..., dict[str, Any]] = globals()[name]
    if name == "by_hand":
        return function()
    return function(init_device_mesh("cpu", (*mesh.values(),), mesh_dim_names=(*mesh,)))


def save(name: str, mesh: dict[str, int], path: Path) -> Path:
    """A checkpoint that so many real ranks wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on_ranks(mesh, lambda rank: dcp.save(state_dict_of(name, mesh), checkpoint_id=path), path.parent)
    return path


def load(name: str, mesh: dict[str, int], path: Path, answers: Path) -> list[dict[str, Any]]:
    """For each real rank: `items` of torch's own plan; `opened`: file -> bytes that `dcp.load` read from it."""
    answers.mkdir(parents=True, exist_ok=True)

    def work(rank: int) -> None:
        reader = dcp.FileSystemReader(path)
        planner = DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state_dict_of(name, mesh), metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        items = []
        for item in planner.create_local_plan().items:
            stored = metadata.storage_data[item.storage_index]
            place = [item.dest_index.fqn, stored.relative_path, stored.offset, stored.length]
            if item.type == LoadItemType.BYTE_IO:
                items.append([*place, [], [], [], []])
            else:
                start, inside = [*item.dest_index.offset], [*item.dest_offsets]
                items.append([*place, start, inside, [*item.storage_offsets], [*item.lengths]])
        with counted() as opened:
            dcp.load(state_dict_of(name, mesh), checkpoint_id=path)
        (answers / f"{rank}.json").write_text(json.dumps({"items": sorted(items), "opened": opened}))

    on_ranks(mesh, work, answers)
    world = len([*answers.glob("*.json")])
    return [json.loads((answers / f"{rank}.json").read_text()) for rank in range(world)]


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """File name -> how often torch's FileSystem opened it to read, and the bytes that were read from it."""
    opened: dict[str, list[int]] = {}
    open_stream = FileSystem.create_stream

    @contextmanager
    def counting(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with open_stream(self, path, mode) as stream:
            counts = opened.setdefault(Path(path).name, [0, 0])
            counts[0] += 1
            yield _Counting(stream, counts)

    FileSystem.create_stream = counting  # type: ignore[method-assign]
    try:
        yield opened
    finally:
        FileSystem.create_stream = open_stream  # type: ignore[method-assign]


class _Counting:
    """A file that counts what is read from it."""

    def __init__(self, stream: Any, counts: list[int]) -> None:
        self.stream, self.counts = stream, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.stream.read(size)
        self.counts[1] += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self.stream.readinto(buffer)
        self.counts[1] += count
        return count

    def readline(self, *size: int) -> bytes:
        data: bytes = self.stream.readline(*size)
        self.counts[1] += len(data)
        return data
