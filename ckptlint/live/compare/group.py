"""The one process group of live mode: fixed-size reductions of int64 words, under a deadline of their own.

Words are numpy arrays on the outside; they travel on the device that the group's backend wants. SUM and MAX are the
only reductions: NCCL has no bitwise ones, and sums of int64 wrap modulo 2^64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Protocol

import numpy as np

from ckptlint.errors import CkptlintError
from ckptlint.model.tiling import IntArray

Reduction = Literal["sum", "max"]


class GroupBroken(CkptlintError):  # noqa: N818  a state, which every later call meets too
    """A collective of live mode did not finish in time or failed; its group was aborted and is not used again."""


class RankGroup(Protocol):
    """What the protocol needs of a process group.

    Every method is collective: all ranks call it in one order, with arrays of one length. Each raises GroupBroken.

    Attributes:
        rank: of this process, 0 to world - 1.
        world: number of ranks.
        log: the collectives that were called, as (name, words sent); the benchmark and tests read it.
    """

    rank: int
    world: int
    log: list[tuple[str, int]]

    def begin(self, seconds: float) -> None:
        """Set the deadline of the collectives that follow; not collective."""

    def reduce(self, words: IntArray, how: Reduction) -> IntArray:
        """int64 [n], the element-wise sum (modulo 2^64) or maximum over all ranks."""

    def gather(self, words: IntArray) -> IntArray:
        """int64 [world, n], the words of every rank."""

    def broadcast(self, words: IntArray, source: int) -> IntArray:
        """int64 [n], the words of one rank."""


class Solo:
    """A `RankGroup` of one: a process without torch.distributed, or a job of one rank."""

    rank = 0
    world = 1

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def begin(self, seconds: float) -> None:
        pass  # nothing can be late

    def reduce(self, words: IntArray, how: Reduction) -> IntArray:
        self.log.append((how, len(words)))
        return words

    def gather(self, words: IntArray) -> IntArray:
        self.log.append(("gather", len(words)))
        return words[None]

    def broadcast(self, words: IntArray, source: int) -> IntArray:
        self.log.append(("broadcast", len(words)))
        return words


class TorchGroup:
    """A `RankGroup` of all ranks over `torch.distributed`, which nothing else uses.

    Args:
        group: what `new_group` returned.
        device: where its tensors are, as the backend wants it.
    """

    def __init__(self, group: Any, device: Any) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.log: list[tuple[str, int]] = []
        self._group, self._device = group, device
        self._deadline = time.monotonic() + 60
        self._is_broken = False

    def is_alive(self) -> bool:
        """Whether torch knows the group still: `destroy_process_group` ends it."""
        import torch.distributed as dist

        with suppress(RuntimeError, ValueError):
            return dist.get_rank(self._group) >= 0
        return False

    def begin(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def reduce(self, words: IntArray, how: Reduction) -> IntArray:
        import torch.distributed as dist

        tensor = self._sent(words, how)
        op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        return self._finish(lambda: dist.all_reduce(tensor, op, self._group, async_op=True), how, tensor)

    def gather(self, words: IntArray) -> IntArray:
        import torch
        import torch.distributed as dist

        tensor = self._sent(words, "gather")
        whole = torch.empty((self.world, len(words)), dtype=torch.int64, device=self._device)
        rows = list(whole.unbind())
        return self._finish(lambda: dist.all_gather(rows, tensor, self._group, async_op=True), "gather", whole)

    def broadcast(self, words: IntArray, source: int) -> IntArray:
        import torch.distributed as dist

        tensor = self._sent(words, "broadcast")
        return self._finish(lambda: dist.broadcast(tensor, source, self._group, async_op=True), "broadcast", tensor)

    def _sent(self, words: IntArray, name: str) -> Any:
        import torch

        self.log.append((name, len(words)))
        return torch.from_numpy(np.ascontiguousarray(words).copy()).to(self._device)

    def _finish(self, start: Callable[[], Any], name: str, tensor: Any) -> IntArray:
        """What a collective puts into the tensor.

        It is waited for without blocking in it, so that a lost rank costs the deadline and not the job.
        """
        if self._is_broken:
            raise GroupBroken("its process group was aborted earlier")
        try:
            work, pause = start(), 1e-5
            while not work.is_completed():
                if time.monotonic() > self._deadline:
                    raise TimeoutError(f"a collective ({name}) did not finish in time")
                time.sleep(pause)
                pause = min(pause * 1.5, 0.005)
            work.wait()
        except Exception as error:
            # after an abort the buffers hold anything: nobody reads them
            self._is_broken = True
            self._abort()
            kind = "" if isinstance(error, TimeoutError) else f"{type(error).__name__}: "
            raise GroupBroken(f"{kind}{error}") from error
        received: IntArray = tensor.cpu().numpy()
        return received

    def _abort(self) -> None:
        with suppress(AttributeError, RuntimeError):  # a backend that cannot: its own time-out ends it
            self._group._get_backend(self._device).abort()


def new_torch_group(backend: str, seconds: float, max_ctas: int = 1) -> TorchGroup:
    """Make the group; collective over all ranks of the default group.

    Args:
        backend: `gloo`, or `nccl` for tensors on the current CUDA device.
        seconds: the deadline of a check; the group's own time-out is far beyond it.
        max_ctas: blocks of the GPU that NCCL may take for it.

    Raises GroupBroken where the first reduction over it fails, which also makes its connections.
    """
    import torch
    import torch.distributed as dist

    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    limit = timedelta(seconds=max(600.0, 10 * seconds))
    made = dist.new_group(backend=backend, timeout=limit, pg_options=options, group_desc="ckptlint")
    group = TorchGroup(made, device)
    group.begin(limit.total_seconds())
    if int(group.reduce(np.ones(1, np.int64), "sum")[0]) != group.world:
        raise GroupBroken("the first reduction over the group gave a wrong sum")
    group.log.clear()
    return group
