"""A run of many steps: python bench/speed/steps.py [--steps 200] [--tensors 1000].

Times `ckptlint RUN --all-steps` and `ckptlint latest RUN` on a run of real DCP steps, wall and processor time of all
processes together.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from budget import tensors


def timed(*arguments: str) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and exit code of the command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", "ckptlint", *arguments], capture_output=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--torn", action="store_true", help="cut a payload file of each step short")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        tensors(run / "step-1", chosen.tensors)
        for number in range(2, chosen.steps + 1):
            shutil.copytree(run / "step-1", run / f"step-{number}")
        for payload in run.glob("*/__0_0.distcp") if chosen.torn else ():
            os.truncate(payload, payload.stat().st_size // 2)
        print(f"{chosen.steps} steps of {chosen.tensors:,} tensors\n")
        print("| command | wall s | processor s | exit |\n|---|--:|--:|--:|")
        for arguments in (
            ["check", str(run), "--all-steps"],
            ["latest", str(run)],
            ["deletable", str(run), "--keep", "1"],
        ):
            wall, processor, code = timed(*arguments)
            print(
                f"| `{arguments[0]} {' '.join(arguments[2:])}`".rstrip() + f" | {wall:.1f} | {processor:.1f} | {code} |"
            )


if __name__ == "__main__":
    main()
