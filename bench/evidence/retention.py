"""Simulated runs (tests/lint/simulated_runs.py) on which steps are deleted that `ckptlint deletable` names; counts.

    python bench/evidence/retention.py [--runs 2000] [--first 0] [--hostile]

Writes a line for every hundred runs, and one for each run in which a step is gone that should have stayed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "lint")]

from simulated_runs import LAYOUTS, retained, simulated  # noqa: E402

from ckptlint import sandbox  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--hostile", action="store_true", help="runs that somebody changes, also while they are judged")
    chosen = parser.parse_args()
    sandbox.in_children = False  # the files are our own
    counts, started = Counter[str](), time.monotonic()
    for number in range(chosen.first, chosen.first + chosen.runs):
        layout = [*LAYOUTS][number % len(LAYOUTS)]
        dice = Random(f"{layout} {number}")
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top, "run")
            folder.mkdir()
            made = simulated(folder, dice, LAYOUTS[layout])
            keep = dice.randint(1, 3)
            whole = len(made.whole())
            found, wrong = retained(made, keep, chosen.hostile)
        counts.update(
            runs=1, steps=len(found.decisions), whole=whole, spare=max(0, whole - keep), deleted=len(found.paths)
        )
        counts[f"exit {found.exit_code}"] += 1
        counts["wrong"] += bool(wrong)
        for sentence in wrong:
            print(f"{layout} {number} --keep {keep}: {sentence}: {found.rows()}", flush=True)
        if (number + 1) % 100 == 0:
            print(f"{time.monotonic() - started:.0f} s: {dict(counts)}", flush=True)
    print(f"{time.monotonic() - started:.0f} s: {dict(counts)}", flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
