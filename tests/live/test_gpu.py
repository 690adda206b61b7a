"""What needs a GPU: NCCL, CUDA tensors in the protocol. Digests on CUDA are in test_digest.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_alike
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptlint import live
from ckptlint.live.compare.group import new_torch_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A job of one rank whose process group is NCCL."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    live.uninstall()
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_the_group_over_nccl() -> None:
    """int64 SUM wraps modulo 2^64, MAX is signed, and the words come back from the device."""
    import numpy as np

    group = new_torch_group("nccl", 30)
    words = np.array([2**63 - 1, -5, 7], np.int64)
    assert (group.reduce(words, "sum") == words).all()
    assert (group.reduce(words, "max") == words).all()
    assert (group.gather(words) == words[None]).all()
    assert (group.broadcast(words, 0) == words).all()
    group._abort()
    total = torch.ones((), device="cuda")
    dist.all_reduce(total)
    assert int(total) == 1, "the job's own group outlives ours"


@pytest.mark.usefixtures("nccl")
def test_a_check_of_one_rank_with_tensors_on_the_device() -> None:
    live.install()
    state = {"w": torch.ones(100, 10, device="cuda", dtype=torch.bfloat16), "step": 3}
    assert live.check(state, tag=1).verdict == "pass"


def test_the_whole_protocol_with_four_ranks_on_one_device() -> None:
    """gloo between processes that share the GPU; spawned by forks that have not touched CUDA."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA was used in this process, which then cannot be forked: run this test alone")

    def job(rank: int) -> Any:
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        live.install(timeout=30)
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(32.0).view(8, 4)
        state = {"w": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])}
        state["w"]._local_tensor = state["w"]._local_tensor.cuda()
        state["plain"] = torch.ones(5, device="cuda")
        clean = [d.code for d in live.check(state, tag=1).diagnostics]
        if rank == 3:
            state["plain"][2] += 1e-7
        with pytest.raises(live.LiveError) as error:
            live.check(state, tag=2)
        return clean, str(error.value)

    clean, text = run_alike(job)
    assert clean == []
    assert "copies of plain differ between ranks" in text
