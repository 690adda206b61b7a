"""The quick form: sizes of axes, and its boxes against those of real jobs where torch decides the placements."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support import REAL, swept

import ckptlint
from ckptlint.errors import ConfigError
from ckptlint.model import Checkpoint
from ckptlint.planning.exact import exact_job
from ckptlint.planning.job import Job
from ckptlint.planning.quick import axis_sizes, quick_job, world_of


@pytest.mark.parametrize(
    ("text", "sizes", "world"),
    [
        ("dp=8", {"dp": 8}, 8),
        ("tp=2, pp=4,dp_shard=3", {"tp": 2, "pp": 4, "dp": 3}, 24),
        ("fsdp=4,dp_replicate=2", {"dp": 4, "dp_replicate": 2}, 8),
        ("dp=8,ep=4,cp=2,vpp=2,pp=2", {"dp": 8, "ep": 4, "cp": 2, "vpp": 2, "pp": 2}, 32),
    ],
)
def test_sizes_of_axes(text: str, sizes: dict[str, int], world: int) -> None:
    assert axis_sizes(text) == sizes
    assert world_of(sizes) == world


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not an axis"),
        ("dp", "is not an axis"),
        ("dp=", "is not an axis"),
        ("dp=2.5", "is not an axis"),
        ("dp=1e3", "is not an axis"),
        ("zero=3", "there is no axis 'zero'"),
        ("dp=0", "is not the size"),
        ("dp=-2", "is not the size"),
        ("dp=" + "9" * 4000, "is not the size"),
        ("dp=2,fsdp=2", "twice"),
        ("dp=100000,tp=100000", "at most"),
        ("dp=4,ep=3", "does not divide"),
    ],
)
def test_nonsense_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        axis_sizes(text)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- boxes


def boxes(job: Job, key: str) -> list[list[tuple[list[int], list[int]]]]:
    """For each rank the boxes with elements that it wants of a tensor, as offsets and sizes."""
    found: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(job.world)]
    for request in job.requests:
        if request.key == key and request.target is not None:
            for rank, box in zip(request.target.rank.tolist(), request.target.box.tolist(), strict=True):
                if request.target.sizes[box].all():
                    found[rank].append((request.target.offsets[box].tolist(), request.target.sizes[box].tolist()))
    return found


@pytest.fixture(scope="module")
def jobs() -> ModuleType:
    import torch_jobs as jobs

    return jobs


@pytest.fixture(scope="module")
def saved(jobs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """What two dp and two tp ranks saved."""
    path: Path = jobs.save("fsdp_tp", {"dp": 2, "tp": 2}, tmp_path_factory.mktemp("saved") / "step")
    return ckptlint.load(path)


@pytest.mark.sweep(share=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "mesh", "to"),
    [
        ("fsdp", {"dp": 3}, "dp=3"),
        ("fsdp_tp", {"dp": 3, "tp": 2}, "dp=3,tp=2"),
        *swept(
            ("fsdp", {"dp": 1}, "dp=1"),
            ("fsdp", {"dp": 8}, "dp=8"),
            ("hsdp", {"replicate": 2, "shard": 3}, "dp_replicate=2,dp=3"),
            ("fsdp_tp", {"dp": 2, "tp": 2}, "dp=2,tp=2"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else str(prod(value.values())),
)
@pytest.mark.usefixtures("warm_ranks")
def test_the_quick_form_cuts_as_torch_does(
    jobs: ModuleType, saved: Checkpoint, function: str, mesh: dict[str, int], to: str
) -> None:
    exact = exact_job(f"{jobs.__file__}:{function}", mesh, saved.tensors)
    quick = quick_job(saved, to)
    # the job leaves the embedding to FSDP, while its role says that tp cuts it too; that is marked as guessed
    guessed = {key for item in quick.constraints if item.guessed for key in item.keys}
    differs = {key for key in saved.tensors if boxes(exact, key) != boxes(quick, key)}
    assert {request.key for request in quick.requests} == {request.key for request in exact.requests}
    if "tp" in mesh:
        assert "model.tok_embeddings.weight" in guessed
        differs = {key for key in differs if "tok_embeddings" not in key}
    if mesh.get("dp") == 3 and "tp" in mesh:  # what torch says there is not what its ranks hold
        differs = {key for key in differs if "output" not in key}
        assert [item.effect for item in exact.constraints] == ["fails"]
    assert not differs


def test_stages_hold_their_layers_and_ends() -> None:
    ckpt = ckptlint.load(REAL / "fsdp2_4r")
    job = quick_job(ckpt, "pp=2,dp=2")
    whole = [0, 1], [2, 3]
    for key, ranks in {
        "model.tok_embeddings.weight": whole[0],
        "model.layers.0.attention.wq.weight": whole[0],
        "optimizer.state.layers.0.attention.wq.weight.exp_avg": whole[0],
        "optimizer.state.layers.1.attention.wq.weight.step": whole[1],
        "model.layers.1.attention.wq.weight": whole[1],
        "model.norm.weight": whole[1],
        "model.output.weight": whole[1],
    }.items():
        assert [rank for rank, held in enumerate(boxes(job, key)) if held] == ranks, key


def test_experts_go_to_ep_ranks() -> None:
    ckpt = ckptlint.load(REAL / "ep4")
    job = quick_job(ckpt, "dp=4,ep=2")
    stacked = [key for key, tensor in ckpt.tensors.items() if len(tensor.global_shape) == 3]
    assert stacked
    for key in stacked:
        count = ckpt.tensors[key].global_shape[0]
        for rank, held in enumerate(boxes(job, key)):
            for offsets, sizes in held:
                assert offsets[0] // (count // 2) == (offsets[0] + sizes[0] - 1) // (count // 2) == rank % 2
    assert sum(prod(sizes) for held in boxes(job, stacked[0]) for _, sizes in held) == ckpt.tensors[stacked[0]].volume


def test_a_guess_is_marked_and_what_the_cuts_show_is_none() -> None:
    guesses = {item.sentence: item.keys for item in quick_job(ckptlint.load(REAL / "fsdp2_4r"), "tp=2").constraints}
    assert all(item.guessed for item in quick_job(ckptlint.load(REAL / "fsdp2_4r"), "tp=2").constraints)
    assert "model.layers.0.attention.wo.weight" in guesses["tp cuts dim 1, as is usual for such a tensor"]
    shown = quick_job(ckptlint.load(REAL / "megatron_tp2_pp2"), "tp=2,pp=2")
    assert not any("tp cuts" in item.sentence for item in shown.constraints)  # the chunks are those of tp ranks


def test_gate_and_up_are_cut_apart() -> None:
    ckpt = ckptlint.load(REAL / "megatron_tp2_dp2_fully_reshardable")
    job = quick_job(ckpt, "tp=2")
    assert boxes(job, "decoder.layers.mlp.linear_fc1.weight") == [
        [([0, 0, 0], [1, 8, 8]), ([0, 16, 0], [1, 8, 8])],
        [([0, 8, 0], [1, 8, 8]), ([0, 24, 0], [1, 8, 8])],
    ]


@pytest.mark.parametrize(
    "name", ["fsdp2_4r", "hsdp_2x2", "tp2_fsdp2_uneven", "hf_sharded", "ep4", "flat_1d", "plain_dtypes"]
)
@pytest.mark.parametrize("to", ["dp=1", "dp=7", "dp=2,tp=3", "pp=2,dp=2,cp=2,ep=2"])
def test_each_element_is_wanted_by_some_rank(name: str, to: str) -> None:
    ckpt = ckptlint.load(REAL / name)
    job = quick_job(ckpt, to)
    assert {request.key for request in job.requests} == {*ckpt.tensors, *(item.fqn for item in ckpt.byte_objects)}
    for request in job.requests:
        if request.target is None or not request.target.shape:
            continue
        held = np.zeros(request.target.shape, bool)
        for start, size in zip(request.target.offsets, request.target.sizes, strict=True):
            held[tuple(slice(a, a + b) for a, b in zip(start.tolist(), size.tolist(), strict=True))] = True
        assert held.all(), request.key
