"""Live mode beside what a job could do instead: each rank's records in one `all_gather_object`, and DCP's own planning.

    python bench/speed/live.py                 100,000 chunks per rank, 4 processes, gloo
    python bench/speed/live.py --wire          words on the wire for 1 to 8 ranks, 2,000 chunks per rank
    python bench/speed/live.py --kinds         what a check of 10,000 tensors of each kind costs
    python bench/speed/live.py --growth        bytes from each rank for 1 to 64 ranks (threads), 1,000 chunks per rank

All times are of the slowest rank, in one run, after a barrier. The first check is cold (names are hashed, shapes are
seen for the first time), the second one is what every later save pays. `--kinds` takes processor time of the slower of
two ranks, each time of tensors that `detach()` made anew.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from copy import copy
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "live"))

from jobs import run_ranks
from threads import Sharded, run_threads

from ckptlint import live
from ckptlint.live.api import Live
from ckptlint.live.collect.extract import extract
from ckptlint.live.compare.fingerprints import LEAST_CELLS


def state(chunks: int) -> dict[str, Any]:
    """So many small DTensors, cut on axis 0 over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape, local = torch.Size((8 * dist.get_world_size(), 4)), torch.zeros(8, 4)
    return {
        f"model.layers.{i // 100}.experts.{i % 100}.weight": DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(4, 1)
        )
        for i in range(chunks)
    }


def slowest(what: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    what()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def gather_records(held: dict[str, Any]) -> list[Any]:
    """Every rank's records on every rank, as a validator that asks all ranks would send them."""
    records = [(i.fqn, i.dtype, i.shape, i.offsets, i.sizes, i.replica) for i in extract(held)]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, records)
    return out


def plan(held: dict[str, Any]) -> None:
    """DCP's planning as `dcp.save` runs it: local plans, gather, global plan with its validation, scatter."""
    planner = DefaultSavePlanner()
    wrapper = _DistWrapper(None, True, 0)

    def local() -> Any:
        planner.set_up_planner(held, None, wrapper.is_coordinator)
        return planner.create_local_plan()

    def everywhere(plans: list[Any]) -> list[Any]:
        return planner.create_global_plan(plans)[0]

    wrapper.reduce_scatter("plan", local, everywhere)


def compare(chunks: int) -> Callable[[int], dict[str, float]]:
    def job(rank: int) -> dict[str, float]:
        installed = live.install(timeout=300)
        held = state(chunks)
        cold = slowest(lambda: live.check(held, tag=0))
        installed.group.log.clear()
        warm = slowest(lambda: live.check(held, tag=1))
        words = sum(words for _, words in installed.group.log)
        bare = min(
            slowest(lambda number=number: live.check(held, tag=f"n{number}", digest="none")) for number in (1, 2)
        )
        records = slowest(lambda: gather_records(held))
        planning = slowest(lambda: plan(held))
        size = len(pickle.dumps([(i.fqn, i.dtype, i.shape, i.offsets, i.sizes, i.replica) for i in extract(held)]))
        return {
            "live.check, first": cold,
            "live.check": warm,
            'live.check, digest="none"': bare,
            "all_gather_object of the records": records,
            "DCP planning": planning,
            "bytes": 8 * words,
            "pickled": size,
        }

    return job


def on_the_wire(chunks: int) -> Callable[[int], list[tuple[str, int]]]:
    def job(rank: int) -> list[tuple[str, int]]:
        warnings.simplefilter("ignore")
        installed = live.install(timeout=60)
        live.check(state(chunks), tag=0)
        return list(installed.group.log)

    return job


def tensors(kind: str, count: int) -> dict[str, Any]:
    """So many tensors of 32 elements on each rank, new ones each time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 8 * dist.get_world_size()

    def one(number: int) -> Any:
        local = torch.zeros(8, 4)
        if kind == "plain tensors":
            return local
        if kind == "Megatron chunks":
            return Sharded(f"t{number}", local, (8 * dist.get_rank(), 0), (rows, 4), (0, 0, 0))
        is_copied = kind == "DTensors, a fifth replicated" and number % 5 == 0
        placement, shape = (Replicate(), (8, 4)) if is_copied else (Shard(0), (rows, 4))
        options: dict[str, Any] = {"run_check": False, "shape": torch.Size(shape), "stride": (4, 1)}
        return DTensor.from_local(local, mesh, [placement], **options)

    return {f"model.layers.{i // 100}.experts.{i % 100}.weight": one(i) for i in range(count)}


def later(kind: str, count: int, turns: int = 7) -> Callable[[int], tuple[list[float], int]]:
    """Seconds of the later checks, and the bytes that each one sends."""

    def job(rank: int) -> tuple[list[float], int]:
        installed = live.install(timeout=300)
        held = tensors(kind, count)
        live.check(held, tag="first")
        seconds = []
        for turn in range(turns):
            state = {key: copy(value) if isinstance(value, Sharded) else value.detach() for key, value in held.items()}
            installed.group.log.clear()
            dist.barrier()
            started = time.process_time()
            live.check(state, tag=turn)
            own = torch.tensor(time.process_time() - started)
            dist.all_reduce(own, dist.ReduceOp.MAX)
            seconds.append(float(own))
        return seconds, 8 * sum(words for _, words in installed.group.log)

    return job


def growth(world: int, chunks: int, is_copied: bool) -> int:
    """Bytes from each rank of a check, the ranks being threads."""

    def one(live: Live) -> int:
        live.memory.cells = LEAST_CELLS
        offset, shape = ((0,), (4,)) if is_copied else ((4 * live.group.rank,), (4 * world,))
        state = {
            f"t{i}": torch.zeros(4) if is_copied else Sharded(f"t{i}", torch.zeros(4), offset, shape, (0, 0, 0))
            for i in range(chunks)
        }
        live.check(state)
        return 8 * sum(words for _, words in live.group.log)

    found: int = run_threads(one, world, timeout=600)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000, help="per rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    if options.kinds:
        rows = []
        for kind in ("DTensors", "DTensors, a fifth replicated", "plain tensors", "Megatron chunks"):
            seconds, sent = run_ranks(later(kind, 10_000), 2, timeout=900)[0]
            rows.append((kind, *(f"{1000 * of(seconds):.0f}" for of in (min, median, mean)), f"{sent:,}"))
        print(tabulate(rows, ("10,000 on each of 2 ranks", "least ms", "median", "mean", "bytes")))
        return
    if options.growth:
        rows = []
        for world in (1, 2, 4, 8, 16, 32, 64):
            rows.append((world, *(f"{growth(world, 1000, is_copied=is_copied):,}" for is_copied in (False, True))))
        print(tabulate(rows, ("ranks", "own chunks", "copies")))
        return
    if options.wire:
        rows = []
        for world in (1, 2, 4, 8):
            log = run_ranks(on_the_wire(2000), world, timeout=300)[0]
            rows.append(
                (world, ", ".join(f"{name} {words}" for name, words in log), 8 * sum(words for _, words in log))
            )
        print(tabulate(rows, ("ranks", "collectives, words", "bytes from each rank")))
        return
    found = run_ranks(compare(options.chunks), options.ranks, timeout=1800)[0]
    own = found["live.check"]
    sizes = {"live.check": found.pop("bytes"), "all_gather_object of the records": found.pop("pickled") * options.ranks}
    rows = [
        (name, f"{s:.2f}", f"{s / own:.1f}", f"{sizes[name]:,.0f}" if name in sizes else "")
        for name, s in found.items()
    ]
    print(f"{options.chunks:,} chunks per rank, {options.ranks} ranks, torch {torch.__version__}, gloo")
    print(tabulate(rows, ("", "seconds", "ratio", "bytes to each rank")))


if __name__ == "__main__":
    main()
