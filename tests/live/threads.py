"""Many ranks as threads of one process: what the protocol does with 64 of them, without 64 processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckptlint.live.api import Live
from ckptlint.live.compare.gate import Gate
from ckptlint.live.compare.group import GroupBroken, Reduction
from ckptlint.model.tiling import IntArray


class Sharded:
    """A chunk with the attributes of Megatron-Core's ShardedTensor."""

    prepend_axis_num = 0
    flattened_range = None
    allow_shape_mismatch = False

    def __init__(
        self, key: str, data: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], replica: Any
    ) -> None:
        self.key, self.data, self.dtype = key, data, data.dtype
        self.local_shape, self.global_shape, self.global_offset = tuple(data.shape), shape, offset
        self.axis_fragmentations = None
        self.replica_id = replica


class Meeting:
    """Where the ranks of one job meet: each brings words and takes what comes of those of all, computed once."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.words: list[IntArray] = [np.zeros(0, np.int64)] * world
        self.how: list[str] = [""] * world
        self.result: IntArray | Exception = self.words[0]
        self.barrier = threading.Barrier(world, self._compute)

    def _compute(self) -> None:
        try:
            (how,) = set(self.how)  # ranks that call another function, or send other lengths, fail here, as they should
            every = np.stack(self.words)
            if how == "sum":
                self.result = every.view(np.uint64).sum(axis=0).view(np.int64)
            else:
                self.result = every.max(axis=0) if how == "max" else every
        except ValueError as error:
            self.result = error


class ThreadGroup:
    """A rank's view of a meeting, with the methods of `ckptlint.live.compare.group.RankGroup`."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world, self.log = rank, meeting.world, []
        self._meeting, self._seconds = meeting, 30.0

    def begin(self, seconds: float) -> None:
        self._seconds = seconds

    def reduce(self, words: IntArray, how: Reduction) -> IntArray:
        self.log.append((how, len(words)))
        return self._meet(words, how)

    def gather(self, words: IntArray) -> IntArray:
        self.log.append(("gather", len(words)))
        return self._meet(words, "gather")

    def broadcast(self, words: IntArray, source: int) -> IntArray:
        self.log.append(("broadcast", len(words)))
        return self._meet(words, "broadcast")[source]

    def _meet(self, words: IntArray, how: str) -> IntArray:
        try:
            self._meeting.words[self.rank], self._meeting.how[self.rank] = words, how
            self._meeting.barrier.wait(self._seconds)
            result = self._meeting.result
            self._meeting.barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise GroupBroken("a rank was lost") from None
        if isinstance(result, Exception):
            raise result
        return result if how == "gather" else result.copy()


def run_threads(function: Callable[[Live], Any], world: int = 64, timeout: float = 10.0) -> list[Any]:
    """What `function` returned on each rank, each with a `Live` of its own; the first exception of a rank is raised."""
    meeting, store = Meeting(world), dist.HashStore()
    lives = [Live(ThreadGroup(rank, meeting), Gate(store, rank, world), timeout) for rank in range(world)]
    for live in lives:
        live.memory.cells = 3 * 2**11  # a small table: all of them pass through one process
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.5)  # ranks wait for each other often enough: switches in between only cost time
    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(function, lives))
    finally:
        sys.setswitchinterval(interval)
