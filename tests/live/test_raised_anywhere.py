"""An exception at any line of the local phase of one rank: LiveError on all ranks or none, and nobody waits."""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from jobs import run_ranks
from test_edges import outcome
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptlint import live
from ckptlint.live import api
from ckptlint.live.collect.limit import OutOfTime

RAISED = int(os.environ.get("RAISED", "10"))
"""How many are drawn: `RAISED=200 pytest tests/live/test_raised_anywhere.py`."""

LIVE = str(Path(api.__file__).parent)
ERRORS: list[type[BaseException]] = [
    ValueError, MemoryError, RecursionError, AssertionError, StopIteration, OSError, AttributeError, OutOfTime,
    torch.OutOfMemoryError, KeyboardInterrupt, SystemExit,
]  # fmt: skip


@contextmanager
def raising_at(line: int, error: type[BaseException]) -> Iterator[Callable[[], int]]:
    """Raise once so many lines of the local phase have run; gives how many did."""
    count, first = 0, None

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count, first
        code = frame.f_code
        if first is None and event == "call" and code.co_name == "_input" and code.co_filename == api.__file__:
            first = frame
        above: FrameType | None = frame
        while above is not None and above is not first:
            above = above.f_back
        if first is None or above is None or not code.co_filename.startswith(LIVE) or code.co_name == "failed":
            return None
        if event == "line" and frame.f_lineno > first.f_code.co_firstlineno + _TRY * (frame is first):
            count += 1
            if count == line:
                raise error("drawn")
        return trace

    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(None)


_TRY = 8  # lines of `_input` up to its `try`, in which nothing happens


def test_an_exception_anywhere_is_told_to_all_ranks() -> None:
    def job(rank: int) -> list[tuple[str, str, float, str]]:
        live.install(timeout=20)
        mesh = init_device_mesh("cpu", (2,))
        state = {
            "shard": DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False),
            "copy": DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False),
            "plain": torch.ones(3),
            "arguments": Namespace(lr=0.1, betas=(0.9, 0.95)),
            "list": [{"a": 1}, torch.ones(2)],
            "step": 7,
        }
        with raising_at(0, ValueError) as lines:
            outcome(lambda: live.check(state, tag="first"))
        drawn = random.Random(5)
        seen = []
        for turn in range(RAISED):
            unlucky, line, error = drawn.randrange(2), drawn.randrange(1, lines() + 1), drawn.choice(ERRORS)
            with raising_at(line if rank == unlucky else 0, error):
                said, seconds = outcome(lambda turn=turn: live.check(state, tag=turn))
            after, _ = outcome(lambda turn=turn: live.check(state, tag=f"after {turn}"))
            seen.append((f"{error.__name__} at line {line} of {lines()} on rank {unlucky}", said, seconds, after))
        return seen

    zero, one = run_ranks(job, world=2, timeout=570)
    for (what, *of_zero), (_, *of_one) in zip(zero, one, strict=True):
        said = {of_zero[0], of_one[0]}
        is_end = len(said) == 2 and "LiveError LIV210" in said and said & {"KeyboardInterrupt", "SystemExit"}
        assert is_end or (len(said) == 1 and {*said.pop().split()} <= TOLD), (what, of_zero, of_one)
        assert max(of_zero[1], of_one[1]) < 10, what
        assert of_zero[2] in ("pass", "LIV208") and of_zero[2] == of_one[2], (what, of_zero, of_one)


TOLD = {"pass", "LiveError", "LIV201", "LIV208", "LIV210", "LIV211", "LIV213"}
"""LIV201 and LIV213 where the value at hand could not be read, LIV208 where the last check did not see all keys."""
