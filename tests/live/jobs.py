"""Small jobs of several ranks on this machine, for tests: gloo, forked processes, killed when their time is up."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from support import REPOSITORY

from ckptlint.lint.registry import load_rules


@dataclass(frozen=True, slots=True)
class Failure:
    """What came of a rank that returned nothing: its traceback, or how its process ended."""

    text: str


ON_ONE_GPU = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1") | {
    "NCCL_SOCKET_IFNAME": "lo",
    "LOCAL_RANK": "0",
}
"""With a host id of its own for each rank NCCL takes several on one GPU, and talks over sockets."""


def run_ranks(
    function: Callable[[int], Any],
    world: int = 4,
    timeout: float = 600.0,
    *,
    expect_failures: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """What `function(rank)` returned on each rank of a job, in the order of ranks.

    The ranks are forked, so that closures go in; for another backend than gloo they are spawned, and share one GPU.
    What they return must pickle. `RANK`, `LOCAL_RANK` and `WORLD_SIZE` are set as torchrun sets them. No rank outlives
    `timeout` seconds.

    Raises:
        AssertionError: a rank raised, died or ran out of time; with `expect_failures` a Failure stands in its place.
    """
    _import_what_ranks_need()
    context: Any = multiprocessing.get_context("fork" if backend == "gloo" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        senders = [sender for _, sender in pipes]
        ranks: list[BaseProcess] = [
            context.Process(
                target=_rank, args=(function, rank, world, timeout, Path(folder, "store"), senders, backend)
            )
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            for sender in senders:
                sender.close()
            results = _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in ranks:
                _kill(process)
    for rank, process in enumerate(ranks):
        if rank not in results:
            results[rank] = Failure(f"no answer within {timeout:g} s, or died; exit code {process.exitcode}")
    failed = [f"rank {rank}: {results[rank].text}" for rank in range(world) if isinstance(results[rank], Failure)]
    assert expect_failures or not failed, "\n".join(failed)
    return [results[rank] for rank in range(world)]


def run_alike(function: Callable[[int], Any], world: int = 4, backend: str = "gloo") -> Any:
    """What `function(rank)` returned on each rank of a job, which is the same on all of them."""
    first, *others = run_ranks(function, world, backend=backend)
    assert all(other == first for other in others)
    return first


def works(device: str = "cpu") -> bool:
    """Whether the job's own group of four goes on."""
    total = torch.ones((), device=device)
    dist.all_reduce(total)
    return int(total) == 4


def fixtures_of(name: str) -> ModuleType:
    """A module of `fixtures/make`, in a rank: what saves go through is left as torch has it."""
    import torch.distributed.checkpoint as dcp

    sys.path.insert(0, str(REPOSITORY / "fixtures" / "make"))
    storage_meta = dcp.FileSystemWriter.storage_meta
    module = import_module(name)
    dcp.FileSystemWriter.storage_meta = storage_meta  # the fixtures' knows only their own folders
    return module


@cache
def _import_what_ranks_need() -> None:
    """Import here, once, what every rank of every job would import: torch's compiler takes most of a second."""
    for name in (
        "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
        "torch.distributed.tensor", "ckptlint.live.api", "ckptlint.live.sealing",
    ):  # fmt: skip
        import_module(name)
    load_rules()


def _collect(receivers: list[Connection], deadline: float) -> dict[int, Any]:
    """The answers that arrive before the deadline, by rank; a rank that dies closes its pipe."""
    results: dict[int, Any] = {}
    waiting = list(receivers)
    while waiting and (seconds := deadline - time.monotonic()) > 0:
        for receiver in wait(waiting, seconds):
            assert isinstance(receiver, Connection)
            waiting.remove(receiver)
            try:
                results[receivers.index(receiver)] = receiver.recv()
            except EOFError:
                continue
    return results


def _kill(process: BaseProcess) -> None:
    """End a rank and whatever it started (Megatron-Core leaves a Manager process behind)."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError):  # it has no group of its own yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _rank(
    function: Callable[[int], Any],
    rank: int,
    world: int,
    timeout: float,
    store: Path,
    answers: list[Connection],
    backend: str,
) -> None:
    signal.alarm(math.ceil(timeout) + 5)  # should the test run be killed, nobody else ends this process
    answer = answers.pop(rank)
    for other in answers:
        other.close()  # or the end of that rank would be seen at the end of this one
    os.setpgid(0, 0)
    # a forked process has no threads to share work with; accelerate asks for some by default
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        if "nccl" in backend:
            os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"host{rank}")
            torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        answer.send(function(rank))
        signal.pause()  # until all have answered: a peer may still read from this rank
    except BaseException:
        answer.send(Failure(traceback.format_exc()))
    os._exit(1)  # without the exit handlers of the test run
