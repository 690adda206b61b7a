"""Measures ckptlint against torch, against a bare unpickler and against itself: python bench/speed/ratios.py [--large].

Everything is measured in one run and given as a ratio; a figure of another day or machine is no comparison. Files are
made by `generate.py` in a temporary folder (or --folder, where they are kept). --large adds the file with 10 million
chunks, which takes minutes to write.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

TORCH = """
import sys
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _validate_global_plan
assert not _validate_global_plan([None, None], FileSystemReader(sys.argv[1]).read_metadata())
"""

FLOOR = """
import gc, pickle, sys
gc.disable()
class Unpickler(pickle.Unpickler):
    classes = {}
    def find_class(self, module, name):
        if name == "Size":
            return tuple
        if name in ("_get_layout", "_MEM_FORMAT_ENCODING"):
            return str
        if module == "torch":
            return name
        body = {"__setstate__": lambda self, state: None} if name == "TensorProperties" else {}
        return self.classes.setdefault(name, type(name, (), body))
with open(sys.argv[1] + "/.metadata", "rb") as file:
    Unpickler(file).load()
"""

VALIDATOR = """
import sys, time
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _validate_global_plan
metadata = FileSystemReader(sys.argv[1]).read_metadata()
started = time.perf_counter()
assert not _validate_global_plan([None, None], metadata)
print(time.perf_counter() - started)
"""

GEOMETRY = """
import sys, time
from ckptlint.depth import Depth
from ckptlint.lint.engine import run_rules
from ckptlint.loaders.discover import find
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.lint.registry import load_rules
ckpt = open_checkpoint(find(sys.argv[1])[0], look_at_files=False)
rules = load_rules()
started = time.perf_counter()
assert not run_rules(ckpt, rules, Depth.METADATA).diagnostics
print(time.perf_counter() - started)
"""


def measure(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak megabytes of the process and its children together, and stdout."""
    started = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, env=ENVIRONMENT, **pipes)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    assert process.returncode == 0, (command, process.returncode)
    return seconds, peak / 1e6, process.stdout.read() if process.stdout else ""


def resident(pid: int) -> int:
    """Bytes in memory of a process and its children, what they share counted twice."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return own + sum(resident(int(child)) for child in children)


def median(command: list[str], repeat: int) -> tuple[float, float]:
    """Median seconds and greatest peak of some runs."""
    runs = [measure(command) for _ in range(repeat)]
    return statistics.median(seconds for seconds, _, _ in runs), max(peak for _, peak, _ in runs)


def seconds(command: list[str], repeat: int) -> float:
    """Median seconds of some runs, without looking at their memory."""
    taken = []
    for _ in range(repeat):
        started = time.perf_counter()
        subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def ckptlint(folder: Path) -> list[str]:
    """The command that is measured."""
    return [sys.executable, "-m", "ckptlint", "check", str(folder), "--depth", "metadata", "-qq"]


def script(text: str, folder: Path) -> list[str]:
    """A Python command with the folder as its argument."""
    return [sys.executable, "-c", text, str(folder)]


def file_of(kind: str, chunks: int, folder: Path) -> Path:
    """The folder with such a `.metadata`, made if it is not there."""
    place = folder / f"{kind}-{chunks}"
    if not (place / ".metadata").exists():
        subprocess.run([sys.executable, str(HERE / "generate.py"), kind, str(chunks), str(place)], check=True)
    return place


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also 10 million chunks")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=1_024_000, help="of the file that all are measured on")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        print(
            f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        against_others(file_of("fsdp", arguments.chunks, folder), arguments.repeat)
        geometry(file_of("moe", 256 * 64, folder), arguments.repeat)
        start(HERE.parents[1] / "fixtures" / "real" / "fsdp2_4r", arguments.repeat)
        growth(folder, arguments.chunks, arguments.large, arguments.repeat)
        kinds(folder, arguments.repeat)


def against_others(place: Path, repeat: int) -> None:
    """ckptlint, torch and the bare unpickler on one file."""
    size = (place / ".metadata").stat().st_size / 1e6
    print(f"\n## One file: {place.name}, {size:.0f} MB\n")
    print("| | s | peak MB | ckptlint / this: time | memory |\n|---|---|---|---|---|")
    own, own_peak = median(ckptlint(place), repeat)
    print(f"| ckptlint, all rules | {own:.2f} | {own_peak:.0f} | | |")
    for name, text in (("torch: import, read, validate", TORCH), ("bare unpickler", FLOOR)):
        seconds, peak = median(script(text, place), repeat)
        print(f"| {name} | {seconds:.2f} | {peak:.0f} | {own / seconds:.3f} | {own_peak / peak:.2f} |")


def geometry(place: Path, repeat: int) -> None:
    """All rules on one tensor that is cut into 16,384 chunks, against torch's validator."""
    _, _, slow = measure(script(VALIDATOR, place))
    fast = statistics.median(float(measure(script(GEOMETRY, place))[2]) for _ in range(repeat))
    print(f"\n## One tensor [256, 7168, 4096] cut 256 x 64\n\ntorch's validator {float(slow):.1f} s, ", end="")
    print(f"all rules {fast * 1000:.1f} ms: {float(slow) / fast:,.0f} times faster")


def start(place: Path, repeat: int) -> None:
    """What a small run costs."""
    commands = ["-c", "pass"], ["-m", "ckptlint", "--version"], ["-m", "ckptlint", "check", str(place), "-qq"]
    nothing, version, small = (seconds([sys.executable, *command], 5 * repeat) for command in commands)
    print("\n## Start\n\n| | s | times `python -c pass` |\n|---|---|---|")
    for name, taken in (("python -c pass", nothing), ("--version", version), (f"check {place.name}", small)):
        print(f"| {name} | {taken:.3f} | {taken / nothing:.1f} |")


def growth(folder: Path, most: int, large: bool, repeat: int) -> None:
    """ckptlint at growing sizes; the exponent of a straight line through the last three points, start-up taken off."""
    sizes = [size for size in (10_240, 102_400, 1_024_000) if size <= most] + [10_240_000] * large
    print("\n## Growth\n\n| chunks | s | peak MB |\n|---|---|---|")
    points = []
    for size in sizes:
        seconds, peak = median(ckptlint(file_of("fsdp", size, folder)), repeat)
        points.append((size, seconds))
        print(f"| {size:,} | {seconds:.2f} | {peak:,.0f} |")
    for (small, fast), (big, slow) in pairwise(points):
        print(f"\nexponent {small:,} to {big:,}: {math.log(slow / fast) / math.log(big / small):.2f}")


def kinds(folder: Path, repeat: int) -> None:
    """The other shapes of metadata, at a tenth of a million chunks or objects."""
    print(
        "\n## Other kinds, 100,000 chunks or objects each\n\n| kind | ckptlint s | torch s | ratio |\n|---|---|---|---|"
    )
    for kind in ("tp-fsdp", "flat", "mcore", "objects"):
        place = file_of(kind, 100_000, folder)
        own, _ = median(ckptlint(place), repeat)
        other, _ = median(script(TORCH, place), 1)
        print(f"| {kind} | {own:.2f} | {other:.2f} | {own / other:.3f} |")


if __name__ == "__main__":
    main()
