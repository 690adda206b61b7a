"""Real ranks, each a fork of this process with a gloo group over a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def on_ranks(mesh: dict[str, int], work: Callable[[int], None], folder: Path) -> None:
    """Run the work on forked ranks with a gloo group; an error on one of them is raised here."""
    world = 1
    for size in mesh.values():
        world *= size
    store = folder / f"store-{os.urandom(4).hex()}"
    children = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
                torch.set_num_threads(1)
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
                work(rank)
                dist.barrier()
                status = 0
            except BaseException as error:
                sys.stderr.write(f"rank {rank}: {error!r}\n")
            finally:
                os._exit(status)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * world
