"""Measures `ckptlint plan` on checkpoints of generate.py: python bench/speed/plan.py [--chunks 250000 1000000].

The whole command, reading included, for 1,024 ranks: as they saved, resharded to tensor parallelism, to fewer larger
parts, and to replicas. Wall and processor time, peak memory of the largest process, and the exponent between the two
sizes. The function of an exact form is measured apart, since what it takes is the job's own code.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent

JOBS = {
    "fsdp": ("dp=1024", "dp=128,tp=8", "dp_replicate=8,dp=128"),
    "tp-fsdp": ("dp=128,tp=8", "dp=1024", "dp=64,tp=4,pp=4"),
}
BUDGET_SECONDS, BUDGET_BYTES = 20, 1.5e9


def measured(folder: Path, to: str) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and peak bytes of one plan."""
    command = [sys.executable, "-m", "ckptlint", "plan", str(folder), "--to", to, "--no-progress"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, child.returncode
    return time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", default=list(JOBS), choices=list(JOBS))
    chosen = parser.parse_args()
    print("| saved | into | chunks | wall s | processor s | peak MB | exponent |\n|---|---|---:|---:|---:|---:|---:|")
    for kind in chosen.kinds:
        before: dict[str, tuple[int, float]] = {}
        for chunks in chosen.chunks:
            with tempfile.TemporaryDirectory(prefix="ckptlint-plan-bench-") as name:
                folder = Path(name)
                # in a process of its own: the peak of a child counts what its parent held when it forked
                subprocess.run([sys.executable, HERE / "generate.py", kind, str(chunks), folder], check=True)
                for rank in range(1024):
                    (folder / f"__{rank}_0.distcp").touch()  # what is planned reads no payload
                for to in JOBS[kind]:
                    wall, processor, peak = measured(folder, to)
                    exponent = ""
                    if to in before:
                        less, seconds = before[to]
                        exponent = f"{math.log(processor / seconds) / math.log(chunks / less):.2f}"
                    before[to] = chunks, processor
                    late = "" if wall < BUDGET_SECONDS and peak < BUDGET_BYTES else " (over)"
                    row = f"| {wall:.1f}{late} | {processor:.1f} | {peak / 1e6:,.0f} | {exponent} |"
                    print(f"| {kind} | {to} | {chunks:,} {row}", flush=True)


if __name__ == "__main__":
    main()
