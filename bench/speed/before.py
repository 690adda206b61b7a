"""Measures ckptlint against an earlier version of itself, and torch, in turns: python bench/speed/before.py PYTHON.

PYTHON is an interpreter in whose environment the earlier version is installed (`git worktree add ../before COMMIT`,
then `pip install -e ../before` in an environment of its own). Prints a markdown table: seconds of processor and wall
time and the peak memory, before and now, and how the times of now compare with what torch takes to read and validate
the same file.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from payload import made, many
from ratios import HERE, TORCH, file_of, measure, script


def cost(command: list[str]) -> tuple[float, float, float]:
    """Processor seconds, wall seconds and peak megabytes of a command and the processes it makes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _, peak, _ = measure(command)
    taken, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, taken, peak


def least(commands: list[list[str]], repeat: int) -> list[tuple[float, float, float]]:
    """The least of some runs of each command, which take turns."""
    runs = [[cost(command) for command in commands] for _ in range(repeat)]
    return [tuple(map(min, *own)) if repeat > 1 else own[0] for own in zip(*runs, strict=True)]  # type: ignore[misc]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the interpreter of the earlier version")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--large", action="store_true", help="also 10 million chunks, now alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        cases: list[tuple[str, str, bool, Callable[[], Path]]] = [
            ("a checkpoint of 4 ranks", "files", False, lambda: HERE.parents[1] / "fixtures" / "real" / "fsdp2_4r"),
            ("100,000 chunks with all_local_plans", "metadata", True, lambda: file_of("mcore", 100_000, folder)),
            ("100,000 ShardedObjects", "metadata", True, lambda: file_of("objects", 100_000, folder)),
            ("1,000,000 chunks", "metadata", True, lambda: file_of("fsdp", 1_024_000, folder)),
            ("98,304 payload files", "files", False, lambda: file_of("files", 98_304, folder)),
            ("30,000 records", "headers", False, lambda: records(folder / "records")),
        ]
        print(
            "| what | depth | processor s: before | now | wall s: before | now | peak MB: before | now | now / torch |"
        )
        print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
        for name, depth, has_torch, make in cases:
            place = make()
            commands = [checking(python, place, depth) for python in (given.before, script("", place)[0])]
            commands += [script(TORCH, place)] if has_torch else []
            (old, old_wall, old_peak), (new, new_wall, new_peak), *torch = least(commands, given.repeat)
            ratio = f"{new / torch[0][0]:.2f} ({new_wall / torch[0][1]:.2f} of wall time)" if torch else ""
            print(f"| {name} | {depth} | {old:.2f} | {new:.2f} | {old_wall:.2f} | {new_wall:.2f} ", end="")
            print(f"| {old_peak:,.0f} | {new_peak:,.0f} | {ratio} |", flush=True)
        if given.large:
            place = file_of("fsdp", 10_240_000, folder)
            new, wall, peak = cost(checking(script("", place)[0], place, "metadata"))
            print(f"| 10,000,000 chunks | metadata | | {new:.2f} | | {wall:.2f} | | {peak:,.0f} | |")


def records(folder: Path) -> Path:
    """A checkpoint of 30,000 small records."""
    return folder if folder.exists() else made(many, folder, 30_000)


def checking(python: str, place: Path, depth: str) -> list[str]:
    """The command that is measured; the working folder is no package of its own there."""
    return [python, "-P", "-m", "ckptlint", "check", str(place), "--depth", depth, "-qq", "--exit-zero"]


if __name__ == "__main__":
    main()
