"""Live mode over NCCL: four ranks that share one GPU. Digests on CUDA are in test_digest.py.

Without a GPU a sweep runs the same over gloo: only NCCL and the device are then new to a machine that has one.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import Failure, fixtures_of, run_alike, run_ranks, works
from support import SWEEP
from test_check import FAULTS, Raising, a_mesh, healthy, on, reported
from test_hooks import files, megatron_saves, needs_megatron_core, refused_by_megatron
from test_live_cli import torchrun
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptlint import live
from ckptlint.live import api
from ckptlint.live.collect import compat

HAS_GPU = torch.cuda.is_available()
DEVICE, BACKEND, SECONDS = ("cuda", "cpu:gloo,cuda:nccl", 8) if HAS_GPU else ("cpu", "gloo", 2)
WHY = "there is no CUDA device"
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason=WHY)

pytestmark = [pytest.mark.gpu, pytest.mark.sweep, pytest.mark.skipif(not (HAS_GPU or SWEEP), reason=WHY)]


def started(rank: int) -> api.Live:
    """Live mode, over the backend of the job."""
    warnings.simplefilter("ignore")
    api._device_name = lambda: f"gpu{rank}"  # ranks that share one get gloo
    installed = live.install(timeout=SECONDS)
    assert dist.get_backend(installed.group._group) == ("nccl" if HAS_GPU else "gloo")  # type: ignore[attr-defined]
    return installed


def codes(action: Callable[..., Any], *arguments: Any, **options: Any) -> list[tuple[str, str, str]]:
    """What a check or a save found: code, key, ranks."""
    try:
        report = action(*arguments, **options)
    except live.LiveError as error:
        report = error.report
    return sorted(reported(report)) if hasattr(report, "diagnostics") else []


def state(rank: int, spoil: Callable[[dict[str, Any], int], None] = lambda state, rank: None) -> dict[str, Any]:
    """A state of the tests of the check, with its tensors on the device."""
    made = healthy(rank)
    spoil(made, rank)
    for key, value in made["model"].items():
        if isinstance(value, DTensor):
            value._local_tensor = value._local_tensor.to(DEVICE)
        elif type(value) is torch.Tensor:
            made["model"][key] = value.to(DEVICE)
    return made


def test_faults_are_found_and_the_job_goes_on(tmp_path: Path) -> None:
    seen = run_alike(partial(one_after_another, tmp_path), backend=BACKEND)
    for name, fault in FAULTS.items():
        reports = seen.pop(name)
        if name != "a strided shard" or compat._STRIDED:  # an older torch saves other chunks of it
            assert reports == sorted(fault.expect), name
    codes_of = {name: [code for code, *_ in found] for name, found in seen.items()}
    assert codes_of == {"raises": ["LIV210"], "late": ["LIV211"], "in step": [], "busy": ["LIV205"], "works": ["yes"]}
    assert ".metadata" in files(tmp_path / "few")


def one_after_another(folder: Path, rank: int) -> dict[str, Any]:
    started(rank)
    seen: dict[str, Any] = {}
    for name, fault in FAULTS.items():
        codes(live.check, state(rank), tag=f"before {name}")
        seen[name] = codes(live.check, state(rank, fault.spoil), tag=name)
    seen["raises"] = codes(live.check, state(rank, on(2, lambda state: state.update(optim=Raising()))))
    held = state(rank)  # the ranks meet here
    time.sleep(SECONDS * 1.5 * (rank == 2))
    began = time.monotonic()
    seen["late"] = codes(live.check, held, tag="late")
    assert time.monotonic() - began < SECONDS + 3
    codes(live.check, held, tag="in step")
    seen["in step"] = codes(live.check, held, tag="and again")
    square = torch.ones(8192 if HAS_GPU else 8, 8192 if HAS_GPU else 8, device=DEVICE)
    for _ in range(40):
        square = square @ square
    seen["busy"] = codes(live.check, state(rank, FAULTS["a replica drifted by 1e-7"].spoil), tag="busy")
    few, undo = dist.new_group([0, 1]), live.patch_dcp()
    if rank < 2:
        dcp.save({"bias": torch.ones(4, device=DEVICE)}, checkpoint_id=folder / "few", process_group=few)
    undo()
    dist.barrier()
    return seen | {"works": [("yes", "", "")] * works(DEVICE)}


def test_fsdp_is_saved_sealed_and_loaded(tmp_path: Path) -> None:
    seen = run_alike(partial(fsdp, tmp_path), backend=BACKEND)
    faults = {"fsdp2 one bit, loaded": "LIV304", "hsdp one bit, loaded": "LIV205", "hsdp one bit, saved": "LIV205"}
    for name, found in seen.items():
        assert [code for code, *_ in found] == ([faults[name]] if name in faults else []), name
    assert files(tmp_path / "bad") == [] and ".metadata" in files(tmp_path / "hsdp_async")
    if HAS_GPU:
        ended = torchrun(4, tmp_path / "fsdp2", "--digest")
        assert ended.returncode == 0, ended.stdout + ended.stderr


def fsdp(folder: Path, rank: int) -> dict[str, Any]:
    started(rank)
    undo, seen = live.patch_dcp(), {}
    for name, sizes, names in (("fsdp2", (4,), ("shard",)), ("hsdp", (2, 2), ("copy", "shard"))):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)))
        for layer in (*model.to(DEVICE), model):
            fully_shard(layer, mesh=a_mesh(DEVICE, sizes, mesh_dim_names=names))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        model(torch.randn(8, 64, device=DEVICE)).square().mean().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        held, at = {"model": weights, "optim": moments, "step": 2}, folder / name
        seen[f"{name} save"] = codes(dcp.save, held, checkpoint_id=at)
        dcp.async_save(held, checkpoint_id=folder / f"{name}_async").result()
        live.seal(held, at)
        seen[f"{name} loaded"] = codes(live.check_loaded, held, at)
        if rank == 3:
            weight: Any = next(value for value in weights.values() if value.ndim == 2)
            weight.to_local().view(torch.int32)[0, 0] ^= 1
        seen[f"{name} one bit, loaded"] = codes(live.check_loaded, held, at)
    seen["hsdp one bit, saved"] = codes(dcp.save, held, checkpoint_id=folder / "bad")
    undo()
    return seen


def test_a_rank_that_dies_costs_the_others_a_check() -> None:
    seen = run_ranks(dying, expect_failures=True, backend=BACKEND)
    assert isinstance(seen.pop(2), Failure) and seen == [[[], ["LIV211"], ["LIV211"]]] * 3


def dying(rank: int) -> list[list[str]]:
    """Rank 2 goes through the gate, and comes to no collective."""
    group, found = started(rank).group, []
    for tag in "abc":
        if rank == 2 and tag == "b":
            group.begin = lambda seconds: os._exit(1)  # type: ignore[method-assign]
        found.append([code for code, *_ in codes(live.check, {"w": torch.ones(4, device=DEVICE)}, tag=tag)])
    return found


def test_nccl_alone_is_enough() -> None:
    assert run_alike(alone, backend="nccl" if HAS_GPU else "gloo") == [[], ["LIV205"], True]


def alone(rank: int) -> list[Any]:
    """Also: int64 SUM wraps modulo 2^64, MAX is signed, and the job's group outlives ours."""
    group = started(rank).group
    seen: list[Any] = []
    for drift in (0, 1e-6):
        tensor = torch.ones(9, device=DEVICE) + drift * (rank == 3)
        seen.append([code for code, *_ in codes(live.check, {"w": tensor}, tag=drift)])
    words = np.array([2**61, -5, rank], np.int64)
    group.begin(SECONDS)
    assert group.reduce(words, "sum").tolist() == [-(2**63), -20, 6]
    assert group.reduce(words, "max").tolist() == [2**61, -5, 3]
    assert group.gather(words)[:, 2].tolist() == [0, 1, 2, 3] and group.broadcast(words, 1)[2] == 1
    group._abort()  # type: ignore[attr-defined]
    return [*seen, works(DEVICE)]


@NEEDS_GPU
def test_megatron_core_saves_through_its_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_megatron_core()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # its fused functions compile for minutes in four processes
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    refused_by_megatron(run_alike(partial(megatron, tmp_path), backend=BACKEND), tmp_path)


def megatron(folder: Path, rank: int) -> dict[str, Any]:
    """The job of the test over gloo, without what stands in for CUDA there."""
    started(rank)
    stand_ins: Any = fixtures_of("megatron_cpu")
    stand_ins.use_cpu, stand_ins.CudaToCpu = (lambda: None), nullcontext
    torch.manual_seed(1234)  # the model is initialised on the CPU, by each rank alike
    return megatron_saves(folder, rank)
