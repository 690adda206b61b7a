"""The harness of the live tests itself: ranks answer, fail, die and hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from jobs import Failure, run_ranks


def test_ranks_communicate_and_answer_in_order() -> None:
    def job(rank: int) -> tuple[int, float]:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        return rank, total.item()

    assert run_ranks(job) == [(rank, 6.0) for rank in range(4)]


def test_ranks_that_raise_die_or_hang_are_failures() -> None:
    def job(rank: int) -> int:
        dist.barrier()
        time.sleep(1)  # until all have left the barrier
        if rank == 1:
            raise ValueError("a rank that raises")
        if rank == 2:
            os._exit(7)
        if rank == 3:
            time.sleep(60)
        return rank

    results = run_ranks(job, timeout=4, expect_failures=True)
    assert results[0] == 0
    assert isinstance(results[1], Failure) and "a rank that raises" in results[1].text
    assert isinstance(results[2], Failure) and "exit code 7" in results[2].text
    assert isinstance(results[3], Failure) and "exit code -9" in results[3].text


def test_a_failure_that_nobody_expects_is_raised() -> None:
    def job(rank: int) -> None:
        raise ValueError(f"rank {rank} raises")

    with pytest.raises(AssertionError, match="rank 1 raises"):
        run_ranks(job, world=2)
