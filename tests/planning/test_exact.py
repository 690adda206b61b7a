"""The exact form against torch: every read item of its planner, and what a real `dcp.load` opens and reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptlint
from ckptlint.model import Checkpoint
from ckptlint.planning.exact import exact_job
from ckptlint.planning.job import Job
from ckptlint.planning.outcome import Plan
from ckptlint.planning.reads import reads
from ckptlint.planning.verdict import plan_of

pytest.importorskip("torch")
import jobs

JOBS = str(Path(jobs.__file__))

SAVED = {
    "fsdp4": ("fsdp", {"dp": 4}),
    "dp2tp2": ("fsdp_tp", {"dp": 2, "tp": 2}),
    "hsdp2x2": ("hsdp", {"replicate": 2, "shard": 2}),
    "hand3": ("by_hand", {"x": 3}),
    "hand4": ("by_hand", {"x": 4}),
}
LOADED = [
    ("fsdp4", "fsdp", {"dp": 1}),
    ("fsdp4", "fsdp", {"dp": 4}),
    ("fsdp4", "fsdp", {"dp": 7}),
    ("fsdp4", "hsdp", {"replicate": 2, "shard": 3}),
    ("fsdp4", "fsdp_tp", {"dp": 2, "tp": 4}),
    ("dp2tp2", "fsdp_tp", {"dp": 2, "tp": 2}),
    ("dp2tp2", "fsdp_tp", {"dp": 1, "tp": 3}),
    ("dp2tp2", "fsdp", {"dp": 5}),
    ("hsdp2x2", "fsdp", {"dp": 3}),
    ("hsdp2x2", "hsdp", {"replicate": 4, "shard": 2}),
    ("hand3", "by_hand", {"x": 2}),
    ("hand3", "by_hand", {"x": 5}),
    ("hand4", "by_hand", {"x": 6}),
    ("hand4", "by_hand", {"x": 8}),
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
    for wish in job.wishes:
        if wish.key in objects and rank in wish.ranks:
            found.append([wish.key, *ckpt.byte_range_of(objects[wish.key]), [], [], [], []])
        if wish.key in objects or wish.target is None:
            continue
        tensor, target = ckpt.tensors[wish.key], wish.target
        parts = reads(tensor.layout, target)
        for box in target.box[target.rank == rank].tolist():
            for row in np.flatnonzero(parts.box == box).tolist():
                place = ckpt.byte_range_of(int(tensor.chunks.record[parts.chunk[row]]))
                columns = (parts.in_box[row], parts.in_chunk[row], parts.lengths[row])
                found.append([wish.key, *place, target.offsets[box].tolist(), *(column.tolist() for column in columns)])
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "function", "mesh"), LOADED, ids=[f"{s}-{f}-{prod(m.values())}" for s, f, m in LOADED]
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
