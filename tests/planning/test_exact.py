"""The exact form against torch: every read item of its planner, and what a real `dcp.load` opens and reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_jobs as jobs
from support import REPOSITORY, sweep_only, swept

import ckptlint
from ckptlint.model import Checkpoint
from ckptlint.planning.exact import exact_job
from ckptlint.planning.job import Job
from ckptlint.planning.outcome import Plan
from ckptlint.planning.reads import reads
from ckptlint.planning.verdict import plan_of

pytestmark = pytest.mark.usefixtures("warm_ranks")
JOBS = str(Path(jobs.__file__))

SAVED = {
    "fsdp4": ("fsdp", {"dp": 4}),
    "dp2tp2": ("fsdp_tp", {"dp": 2, "tp": 2}),
    "hsdp2x2": ("hsdp", {"replicate": 2, "shard": 2}),
    "hand3": ("by_hand", {"x": 3}),
    "hand4": ("by_hand", {"x": 4}),
}
LOADED = [
    ("dp2tp2", "fsdp_tp", {"dp": 1, "tp": 3}),
    ("hand3", "by_hand", {"x": 2}),
    ("fsdp4", "hsdp", {"replicate": 2, "shard": 3}),
    ("hand4", "by_hand", {"x": 6}),
    ("fsdp4", "fsdp", {"dp": 7}),
    ("fsdp4", "fsdp_tp", {"dp": 2, "tp": 4}),
    ("dp2tp2", "fsdp_tp", {"dp": 2, "tp": 2}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint that real ranks wrote, once for all tests."""
    folder = tmp_path_factory.mktemp("saved")
    return cache(lambda name: jobs.save(*SAVED[name], folder / name / "step"))


def planned(path: Path, function: str, mesh: dict[str, int]) -> tuple[Checkpoint, Job, Plan]:
    ckpt = ckptlint.load(path)
    job = exact_job(f"{JOBS}:{function}", mesh, [*ckpt.tensors, *(item.fqn for item in ckpt.byte_objects)])
    return ckpt, job, plan_of(ckpt, job)


def items(ckpt: Checkpoint, job: Job, rank: int) -> list[list[Any]]:
    """The items of a rank as `jobs.load` gives those of torch."""
    found: list[list[Any]] = []
    objects = {item.fqn: item.record for item in ckpt.byte_objects}
    for request in job.requests:
        if request.key in objects and rank in request.ranks:
            found.append([request.key, *ckpt.byte_range_of(objects[request.key]), [], [], [], []])
        if request.key in objects or request.target is None:
            continue
        tensor, target = ckpt.tensors[request.key], request.target
        parts = reads(tensor.tiling, target)
        for box in target.box[target.rank == rank].tolist():
            for row in np.flatnonzero(parts.box == box).tolist():
                place = ckpt.byte_range_of(int(tensor.chunks.record[parts.chunk[row]]))
                columns = (parts.in_box[row], parts.in_chunk[row], parts.lengths[row])
                found.append(
                    [request.key, *place, target.offsets[box].tolist(), *(column.tolist() for column in columns)]
                )
    return sorted(found)


@pytest.mark.sweep(share=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "function", "mesh"),
    [*LOADED[:2], *swept(*LOADED[2:])],
    ids=[f"{s}-{f}-{prod(m.values())}" for s, f, m in LOADED],
)
def test_every_item_is_that_of_torch(
    saved: Callable[[str], Path], tmp_path: Path, source: str, function: str, mesh: dict[str, int]
) -> None:
    path = saved(source)
    theirs = jobs.load(function, mesh, path, tmp_path / "answers")
    ckpt, job, plan = planned(path, function, mesh)
    assert (plan.verdict, plan.exit_code) == ("loads", 0)
    assert len(theirs) == job.world == prod(mesh.values())
    for rank, answer in enumerate(theirs):
        assert items(ckpt, job, rank) == answer["items"]
        kind = plan.cost.kind[rank]
        assert plan.cost.requests[kind] == len(answer["items"])
        assert plan.cost.read[kind] == sum(item[3] for item in answer["items"])
        opened = {plan.cost.names[row] for row in plan.cost.files[kind].tolist()}
        assert answer["opened"].keys() == opened | {".metadata"}
        assert {times for times, _ in answer["opened"].values()} == {1}


@sweep_only
def test_uneven_parts_that_torch_takes_for_others_fail_as_the_plan_says(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """37 rows over 2 tp and 3 dp ranks: torch 2.13 says 6 rows for a rank that holds 5, and 5 for one that holds 6."""
    path = saved("fsdp4")
    _, _, plan = planned(path, "fsdp_tp", {"dp": 3, "tp": 2})
    assert (plan.verdict, plan.exit_code) == ("fails", 1)
    (item,) = plan.constraints
    assert item.keys[0] == "model.output.weight"
    assert all("output.weight" in key for key in item.keys)
    with pytest.raises(AssertionError):  # the ranks ended in an error
        jobs.load("fsdp_tp", {"dp": 3, "tp": 2}, path, tmp_path / "answers")


# ---------------------------------------------------------------- what torch refuses, converts and leaves


WANTED = """
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def more():
    return {"weight": torch.zeros(4, 6), "new": {"bias": torch.zeros(3)}, "later": torch.zeros(2), "step": 1}


def larger():
    return {"weight": torch.zeros(4, 7), "bias": torch.zeros(2), "step": 1}


def narrower(mesh):
    return {"weight": distribute_tensor(torch.zeros(4, 6, dtype=torch.bfloat16), mesh, [Shard(0)])}


def an_object():
    return {"weight": "text", "bias": torch.zeros(5)}


def first_layer():
    return {"layers.0.w": torch.zeros(4)}


def model():
    return {"layers.0.w": torch.zeros(4), "layers.1.w": torch.zeros(4), "layers.2.w": torch.zeros(4)}


def optimizer():
    return {f"optimizer.state.layers.{number}.w.exp_avg": torch.zeros(4) for number in range(3)}


def half_an_optimizer():
    return model() | {key: value for key, value in optimizer().items() if "layers.2" not in key}


def axes(mesh):
    return {"weight": distribute_tensor(torch.zeros(4, 6), mesh["tp"], [Shard(0)])}


def own_key():
    return {}["layers"]


def a_tensor():
    return {"step": torch.zeros(()), "weight": torch.zeros(4, 6)}
"""


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of two tensors and a number, and a file with functions that want something else."""
    import torch
    import torch.distributed.checkpoint as dcp

    path = tmp_path / "step"
    state: dict[str, Any] = {"weight": torch.ones(4, 6), "bias": torch.ones(5), "step": 3}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    (tmp_path / "wanted.py").write_text(WANTED)
    return path, tmp_path / "wanted.py"


@pytest.mark.parametrize(
    ("function", "exit_code", "says"),
    [
        ("first_layer", 1, ["no rank asks for the optimizer", "no rank asks for layers 1-2 of layers"]),
        ("model", 0, ["no rank asks for the optimizer"]),
        ("half_an_optimizer", 1, ["no rank asks for layer 2 of layers in the optimizer"]),
        ("optimizer", 1, ["no rank asks for the model"]),
    ],
)
def test_a_part_besides_the_model_may_be_left_out_but_no_layer_of_it(
    tmp_path: Path, function: str, exit_code: int, says: list[str]
) -> None:
    """torch loads without a word; what the job does not ask for is gone with its first save."""
    import torch
    import torch.distributed.checkpoint as dcp

    path, file = tmp_path / "step", tmp_path / "wanted.py"
    weights = {f"layers.{number}.w": torch.ones(4) for number in range(3)}
    moments = {f"optimizer.state.{key}.exp_avg": torch.ones(4) for key in weights}
    dcp.save(weights | moments, checkpoint_id=path, no_dist=True)
    file.write_text(WANTED)
    assert refusal(path, file, function) == ""
    plan = ckptlint.plan(path, f"{file}:{function}", world=1)
    assert (plan.verdict, plan.exit_code) == ("loads", exit_code)
    assert [item.sentence for item in plan.constraints] == says
    lost = next((item.sentence for item in plan.constraints if item.effect == "drops"), "")
    assert f"Loads, but loses something: {lost}" in " ".join(str(plan).split()) or not exit_code


def test_an_axis_that_the_mesh_has_not(small: tuple[Path, Path]) -> None:
    """The error of torch is followed by what to do; that of a key of the job's own is not."""
    with pytest.raises(
        ckptlint.ConfigError, match="the mesh has the axis dp and no tp: give --mesh, such as dp=4,tp=2"
    ):
        of_small(small, "axes", 2)
    with pytest.raises(ckptlint.ConfigError) as error:
        of_small(small, "own_key")
    assert "--mesh" not in str(error.value)


def refusal(path: Path, file: Path, function: str) -> str:
    """What torch says when it loads into what the function returns; "" when it does."""
    import torch.distributed.checkpoint as dcp

    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    try:
        dcp.load(names[function](), checkpoint_id=path, no_dist=True)
    except dcp.CheckpointException as error:
        ((cause, _),) = error.failures.values()
        return f"{type(cause).__name__}: {cause}"
    return ""


def of_small(small: tuple[Path, Path], function: str, world: int = 1) -> Plan:
    path, file = small
    return ckptlint.plan(path, f"{file}:{function}", world=world)


def test_missing_keys_are_those_that_torch_names(small: tuple[Path, Path]) -> None:
    plan = of_small(small, "more", 2)
    assert (plan.verdict, plan.exit_code) == ("fails", 1)
    assert plan.missing == ("later", "new.bias")
    assert plan.unexpected == ("bias",)
    assert refusal(*small, "more") == f"RuntimeError: Missing key in checkpoint state_dict: {plan.missing[0]}."


def test_shapes_are_those_that_torch_names(small: tuple[Path, Path]) -> None:
    plan = of_small(small, "larger")
    assert (plan.verdict, plan.exit_code) == ("fails", 1)
    assert [(item.key, item.stored, item.wanted) for item in plan.mismatches] == [
        ("bias", (5,), (2,)),
        ("weight", (4, 6), (4, 7)),
    ]
    said = refusal(*small, "larger")
    assert said.startswith(
        "ValueError: Size mismatch between saved torch.Size([5]) and current: torch.Size([2]) for bias"
    )


def test_an_object_in_place_of_a_tensor_is_refused(small: tuple[Path, Path]) -> None:
    plan = of_small(small, "an_object")
    assert plan.exit_code == 1
    assert [(item.effect, item.keys) for item in plan.constraints] == [("fails", ("weight",))]
    assert refusal(*small, "an_object").startswith("ValueError: Invalid checkpoint metadata for weight")


def test_a_tensor_in_place_of_an_object_is_noted(small: tuple[Path, Path]) -> None:
    plan = of_small(small, "a_tensor")
    assert plan.exit_code == 0
    assert [(item.effect, item.keys) for item in plan.constraints] == [("note", ("step",))]
    assert refusal(*small, "a_tensor") == ""


def test_conversions_are_told(small: tuple[Path, Path]) -> None:
    plan = of_small(small, "narrower", 3)
    assert plan.exit_code == 0
    ((key, stored, wanted, loses),) = [(c.key, c.stored, c.wanted, c.loses) for c in plan.converted]
    assert (key, stored, wanted, loses) == ("weight", "float32", "bfloat16", True)
    assert plan.cost.requests[plan.cost.kind].tolist() == [1, 1, 0]  # 4 rows over 3 ranks: 2, 2, none


@pytest.mark.slow
def test_bytes_read_are_those_of_whole_records(tmp_path: Path) -> None:
    """Of large records the reader reads what the plan says, within a percent, though a rank needs a part."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    path = tmp_path / "step"
    dcp.save({"weight": torch.ones(1024, 1024)}, checkpoint_id=path, no_dist=True)
    (tmp_path / "wanted.py").write_text(
        "import torch\nfrom torch.distributed.tensor import Shard, distribute_tensor\n\n"
        "def state_dict(mesh):\n    return {'weight': distribute_tensor(torch.ones(1024, 1024), mesh, [Shard(0)])}\n"
    )
    plan = ckptlint.plan(path, f"{tmp_path}/wanted.py:state_dict", world=4)
    with jobs.counted() as opened:
        dcp.load({"weight": torch.zeros(1024, 1024)}, planner=DefaultLoadPlanner(), checkpoint_id=path, no_dist=True)
    read = opened["__0_0.distcp"][1]
    assert len(set(plan.cost.read[plan.cost.kind].tolist())) == 1
    assert abs(read / int(plan.cost.read[0]) - 1) < 0.01
    assert plan.cost.needed[plan.cost.kind].tolist() == [1024 * 1024] * 4
    assert round(plan.cost.amplification, 2) == 4.0


@pytest.mark.slow
def test_the_function_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands in docs/questions.md, for a model of the user."""
    text = (REPOSITORY / "docs" / "questions.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# job.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "job.py").write_text(code)
    (tmp_path / "train.py").write_text(
        "from torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))\n        self.norm = nn.LayerNorm(8)\n"
    )
    monkeypatch.chdir(tmp_path)
    job = exact_job("job.py:state_dict", {"dp": 5}, [])
    weight = next(request for request in job.requests if request.key == "model.layers.0.weight")
    assert weight.target is not None
    assert weight.target.sizes[weight.target.box].tolist() == [[2, 8]] * 4 + [[0, 8]]
    states = [request.key for request in job.requests if request.key.startswith("optimizer.state.layers.1.bias.")]
    assert {key.rpartition(".")[2] for key in states} == {"step", "exp_avg", "exp_avg_sq"}


GPU_JOB = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def state_dict():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7))
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    extra = nn.Linear(4, 4, device=f"cuda:{torch.cuda.current_device()}").cuda()
    huge = torch.empty(1 << 40, 64, device="cuda")
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, dist.get_rank())
    assert float(extra.weight.sum()) == 1.0 and len(names) == dist.get_world_size()
    return {"model": model, "extra": extra, "huge": huge}
"""


@pytest.mark.slow
def test_a_job_for_gpus_runs_without_one(tmp_path: Path) -> None:
    """nccl, cuda, meta, a tensor of 256 TiB: none of it is there, and the state dict is."""
    (tmp_path / "gpu.py").write_text(GPU_JOB)
    job = exact_job(f"{tmp_path}/gpu.py:state_dict", {"dp": 4}, [])
    shapes = {request.key: request.target.shape for request in job.requests if request.target is not None}
    assert shapes == {
        "extra.bias": (4,),
        "extra.weight": (4, 4),
        "huge": (1 << 40, 64),
        "model.0.bias": (5,),
        "model.0.weight": (5, 7),
        "model.1.bias": (7,),
        "model.1.weight": (7, 5),
    }
    parts = {request.key: request.target for request in job.requests if request.target is not None}["model.0.weight"]
    assert parts.sizes[parts.box][:, 0].tolist() == [2, 2, 1, 0]
