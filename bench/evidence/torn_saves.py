"""Kill -9 of real saves into a folder that holds an older step: what torch then loads, and what ckptlint says.

    python bench/evidence/torn_saves.py [--kills 12] [--seed 0] [--apart 600]

Two ranks save a state of ones; their files are then dated `--apart` seconds back, as if the job had trained on in
between (0 leaves the times as they are). A second save of twos into the same folder, by `dcp.save`, `dcp.async_save` or
three ranks, is killed with all its processes at a random moment after it began to write. torch loads what is there: all
ones (old), all twos (new), both (torn), or it refuses (no). ckptlint reads it at depth files. Prints a line for each
kind of save: how often each came out, and which torn states pass or whole ones fail.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import ckptlint

KINDS = {"plain": (2, False), "async": (2, True), "three ranks": (3, False)}
_PARTS, _ELEMENTS = 60, 50_000


def main() -> None:
    """Kill, load, check; exit 1 where a torn state passes or a whole one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="of each kind of save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", type=float, default=600.0, help="seconds between the two saves")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    wrong = 0
    for kind in KINDS:
        found, bad = kills(kind, options.kills, options.seed, options.apart)
        wrong += len(bad)
        print(f"{kind:12} " + ", ".join(f"{count} {state}" for state, count in sorted(found.items())), *bad, flush=True)
    raise SystemExit(1 if wrong else 0)


def kills(kind: str, count: int, seed: int, apart: float) -> tuple[Counter[str], list[str]]:
    """What came out, and the wrong answers; the moments are spread over the time that a whole save takes."""
    dice, found, bad = random.Random(f"{kind} {seed}"), Counter[str](), []
    ranks, is_async = KINDS[kind]
    lasts = 0.0
    for number in range(count + 1):
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "step-1"
            _save(folder, 1.0, 2, False, None)
            for path in folder.iterdir():
                status = path.stat()
                os.utime(path, (status.st_atime - apart, status.st_mtime - apart))
            if number == 0:  # how long it takes
                lasts = _save(folder, 2.0, ranks, is_async, None)
                continue
            _save(folder, 2.0, ranks, is_async, dice.uniform(0.0, 0.5 * lasts))
            state, report = loaded(folder), ckptlint.check(folder, depth="files", fail_on="error")
            told = bool(report.exit_code) or any(item.severity.label == "warning" for item in report.diagnostics)
            found[state] += 1
            if (state == "torn" and not told) or (state in ("old", "new") and report.exit_code):
                bad.append(f"{state} {'passes' if state == 'torn' else 'fails'}")
    return found, bad


def loaded(folder: Path) -> str:
    """What torch loads."""
    into = {key: torch.zeros(_ELEMENTS) for key in keys()}
    try:
        dcp.load(into, checkpoint_id=folder, no_dist=True)
    except BaseException:
        return "no"
    values = {float(value) for tensor in into.values() for value in tensor.unique()}
    return {(1.0,): "old", (2.0,): "new"}.get(tuple(sorted(values)), "torn")


def keys() -> list[str]:
    """The names of the tensors."""
    return [f"layers.{i}.weight" for i in range(_PARTS)]


def _save(folder: Path, value: float, ranks: int, is_async: bool, delay: float | None) -> float:
    """Save with so many processes; kill them all so long after it began to write. Returns the seconds of the save."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as meeting:
        ready = context.Barrier(ranks + 1)
        arguments = (folder, value, ranks, is_async, Path(meeting) / "store", ready)
        children = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for child in children:
            child.start()
        ready.wait(60)
        began, wall = time.perf_counter(), time.time()
        if delay is not None:
            while time.perf_counter() - began < 5 and not _began_to_write(folder, wall):
                time.sleep(0.0005)
            time.sleep(delay)
            for child in children:
                if child.pid is not None:
                    os.kill(child.pid, signal.SIGKILL)
        for child in children:
            child.join()
        return time.perf_counter() - began


def _began_to_write(folder: Path, since: float) -> bool:
    """Whether a file of the folder was written after a moment."""
    return any(path.stat().st_mtime >= since for path in folder.glob("*.distcp"))


def _rank(rank: int, folder: Path, value: float, ranks: int, is_async: bool, store: Path, ready: object) -> None:
    """One rank: its share of the tensors."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    state = {key: torch.full((_ELEMENTS,), value) for i, key in enumerate(keys()) if i % ranks == rank}
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    ready.wait(60)  # type: ignore[attr-defined]
    if is_async:
        dcp.async_save(state, storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
