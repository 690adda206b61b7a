"""How fast the payload is read: depth `data` against a plain sequential read, and the headers of many records.

    python bench/speed/payload.py FOLDER [--gib 8] [--files 2] [--records 100000]

FOLDER is made, filled with checkpoints, and removed again; it lies on the disk to be measured, which needs the room.
Files are dropped from the page cache before each turn with posix_fadvise; the two readers take turns, so that both see
the same disk and the same neighbours; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from ckptlint.testing import write_checkpoint

_BLOCK = 2 * 1024**2


def large(folder: Path, size: int, files: int) -> Path:
    """A checkpoint of so many bytes: one bfloat16 tensor in each file, written by torch."""
    import torch
    import torch.distributed.checkpoint as dcp

    part = torch.randn(2**24).to(torch.bfloat16)
    tensors = {f"w{i}": part.repeat(size // files // part.nbytes) for i in range(files)}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, thread_count=files), no_dist=True)
    return folder


def many(folder: Path, records: int, files: int = 8) -> Path:
    """A checkpoint of so many small records: tensors of eight chunks, eight shapes."""
    chunks = [f"{i * 8}:{i * 8 + 8}, :" for i in range(files)]
    tensors = {f"layers.{i}.w": {"shape": [8 * files, 16 + i % 8], "chunks": chunks} for i in range(records // files)}
    return write_checkpoint({"depth": "headers", "tensors": tensors}, folder)


def made(make: Callable[..., Path], folder: Path, *arguments: int) -> Path:
    """The folder, written by a process of its own: a child's peak memory starts at that of its parent."""
    process = get_context("spawn").Process(target=make, args=(folder, *arguments))
    process.start()
    process.join()
    return folder


def drop(folder: Path) -> None:
    """Forget the cached pages of a folder's files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(folder: Path) -> float:
    """Seconds to read every payload file from front to back."""
    buffer = bytearray(_BLOCK)
    started = time.perf_counter()
    for path in sorted(folder.glob("*.distcp")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def check(folder: Path, depth: str) -> tuple[float, float, float]:
    """Seconds that `ckptlint --depth` takes, interpreter included; those of the processor; its peak memory in MiB."""
    command = [sys.executable, "-m", "ckptlint", str(folder), "--depth", depth, "--format", "json"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    out = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    assert status == 0 and json.loads(out)["verdict"] == "pass", out[-2000:]
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    given.folder.mkdir()
    try:
        size = int(given.gib * 2**30)
        for files in sorted({1, given.files}):
            folder = made(large, given.folder / f"large{files}", size, files)
            reads, checks, busy, memory = [], [], [], 0.0
            for turn in range(given.turns):
                for is_plain in (
                    (True, False) if turn % 2 else (False, True)
                ):  # a disk may tire: each goes first in turn
                    drop(folder)
                    if is_plain:
                        reads.append(plain(folder))
                        continue
                    seconds, processor, peak = check(folder, "data")
                    checks.append(seconds)
                    busy.append(processor)
                    memory = max(memory, peak)
            share = statistics.median(read / check for read, check in zip(reads, checks, strict=True))
            read, checked = (size / statistics.median(column) / 1e9 for column in (reads, checks))
            print(f"{given.gib:g} GiB in {files} file(s): plain read {read:.2f} GB/s, --depth data {checked:.2f} GB/s")
            print(f"  median share of a turn {share:.0%}, peak {memory:.0f} MiB, load {os.getloadavg()[0]:.1f}")
            print(f"  processor: at least {min(busy) / given.gib:.3f} s per GiB, the interpreter's start included")
            print("  seconds:", [round(s, 2) for s in reads], [round(s, 2) for s in checks])
            shutil.rmtree(folder)
        folder = made(many, given.folder / "many", given.records)
        for depth in ("files", "headers", "data"):
            drop(folder)
            seconds, _, peak = check(folder, depth)
            print(f"{given.records:,} records, --depth {depth}: {seconds:.1f} s, {peak:.0f} MiB")
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
