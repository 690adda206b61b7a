"""What `ckptlint diff --values` costs: against reading both sides, and how it grows with tensors, rows and chunks.

    python bench/speed/values.py FOLDER [--gib 4] [--turns 3]

FOLDER is made, filled, and removed again. The sides hold the same: a sharded step of torch DCP and its export in
safetensors. Both are in the page cache, so the rate is the processor's; a step beyond it is read at the disk's.
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
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_BLOCK = 2 * 1024**2
_SIDE = 4096


def write(folder: Path, shapes: dict[str, tuple[int, ...]], chunks: int = 1) -> None:
    """Both sides: `old`, by torch DCP, its first axis in so many chunks, and `new`, in safetensors."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from ckptlint.testing import write_checkpoint

    made = {}
    for number, (key, shape) in enumerate(shapes.items()):
        made[key] = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float32).bfloat16()
    files: list[dict[str, Any]] = [{}]
    for key, value in made.items():
        if sum(one.nbytes for one in files[-1].values()) > 2**30:
            files.append({})
        files[-1][key] = value
    (folder / "new").mkdir(parents=True)
    names = {}
    for number, own in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        save_file(own, folder / "new" / name)
        names |= dict.fromkeys(own, name)
    (folder / "new" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    if chunks == 1:
        dcp.save(made, storage_writer=dcp.FileSystemWriter(folder / "old", thread_count=2), no_dist=True)
        return
    tensors = {}
    for key, shape in shapes.items():
        step = shape[0] // chunks
        tensors[key] = {"shape": list(shape), "dtype": "bfloat16",
                        "chunks": [f"{i * step}:{(i + 1) * step}, :" for i in range(chunks)]}  # fmt: skip
    for side in ("old", "new"):
        shutil.rmtree(folder / side, ignore_errors=True)
        write_checkpoint({"depth": "data", "tensors": tensors}, folder / side)


def plain(folder: Path) -> float:
    """Seconds in which one process reads every file of both sides."""
    buffer = bytearray(_BLOCK)
    started = time.perf_counter()
    for path in sorted(folder.glob("*/*")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def run(*words: str) -> tuple[float, float, float]:
    """Seconds of a command that must exit with 0, those of the processor, and its peak memory in MiB."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "ckptlint", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{words} ended with {os.waitstatus_to_exitcode(status)}"
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def made(folder: Path, *arguments: Any) -> Path:
    """The sides, written by a process of its own: a child's peak memory starts at that of its parent."""
    process = get_context("spawn").Process(target=write, args=(folder, *arguments))
    process.start()
    process.join()
    return folder


def compared(folder: Path, turns: int) -> tuple[float, float, float, float]:
    """Medians of the seconds of a diff, a plain read of both, and a check of both; and the peak memory in MiB."""
    rows = []
    for _ in range(turns):
        read = plain(folder)
        diff = run("diff", str(folder / "old"), str(folder / "new"), "--values")
        check = sum(run(str(folder / side), "--depth", "data", "--exit-zero")[0] for side in ("old", "new"))
        rows.append((diff[0], read, check, diff[2]))
    first, second, third, fourth = (statistics.median(column) for column in zip(*rows, strict=True))
    return first, second, third, fourth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0, help="of each side")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    given.folder.mkdir()
    try:
        count = max(int(given.gib * 2**30 / (2 * _SIDE**2)), 1)
        shapes = {f"layers.{i}.w": (_SIDE, _SIDE) for i in range(count)}
        diff, read, check, peak = compared(made(given.folder / "large", shapes), given.turns)
        print(f"{given.gib:g} GiB on each side: {diff:.1f} s, {2 * given.gib / diff:.2f} GiB/s, {peak:.0f} MiB")
        print(
            f"  {check / diff:.2f} of the rate of --depth data, {read / diff:.2f} of that of a plain read from memory"
        )
        shutil.rmtree(given.folder / "large")
        for what, sizes in (
            ("tensors", (1_000, 10_000, 100_000)),
            ("rows", (10**4, 10**5, 10**6)),
            ("chunks", (10, 100, 1000)),
        ):
            for size in sizes:
                folder = given.folder / f"{what}{size}"
                if what == "tensors":
                    made(folder, {f"layers.{i}.w": (8, 16) for i in range(size)})
                elif what == "rows":
                    made(folder, {"w": (size, 16)})
                else:
                    made(folder, {f"layers.{i}.w": (1000, 64) for i in range(8)}, size)
                seconds, _, peak = run("diff", str(folder / "old"), str(folder / "new"), "--values")
                print(f"{size:,} {what}: {seconds:.2f} s, {peak:.0f} MiB")
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
