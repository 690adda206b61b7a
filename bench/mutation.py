"""Damages every healthy checkpoint of `fixtures/real` in every way of `tests/mutation`, and counts what ckptlint says.

python bench/mutation.py [--sites 3] [--seed 0] [--operator NAME] [--save NAME] [--jobs 2] [--list]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "mutation")]

from mutants import Outcome, Save, judge, saves  # noqa: E402
from operators import OPERATORS  # noqa: E402


def outcomes(save: Save, chosen: str, sites: int, seed: int) -> list[Outcome]:
    """What came of the mutants of one checkpoint."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for operator in OPERATORS:
            if chosen in operator.name:
                for mutant in operator.sample(save, sites, seed):
                    found.append(judge(save, operator, mutant, Path(folder)))
    return found


def _row(arguments: tuple) -> list[tuple]:
    return [
        (
            o.operator.name,
            o.operator.depth,
            o.save.name,
            o.mutant.about,
            o.mutant.legal,
            o.mutant.unseen,
            o.verdict,
            tuple(sorted(o.codes)),
            o.is_named,
            tuple(sorted(o.unrelated)),
        )
        for o in outcomes(*arguments)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operator", default="")
    parser.add_argument("--save", default="")
    a = parser.parse_args()
    work = [(save, a.operator, a.sites, a.seed) for save in saves() if a.save in save.name]
    with get_context("fork").Pool(2) as pool:
        rows = [row for part in pool.imap(_row, work) for row in part]
    for operator in OPERATORS:
        mine = [r for r in rows if r[0] == operator.name]
        if not mine:
            continue
        c = Counter(r[6] for r in mine)
        print(
            f"== {operator.name} [{operator.depth}]: {len(mine)} {dict(c)} unnamed={sum(r[6] == 'caught' and not r[8] for r in mine)} by={dict(Counter(x for r in mine for x in r[7]).most_common())}"
        )
        bad = Counter(x for r in mine for x in r[9])
        if bad:
            print("   unrelated:", dict(bad))
        for r in mine:
            if (
                (r[6] in ("missed", "noted") and not r[5])
                or r[6] == "alarm"
                or (r[6] == "caught" and (not r[8] or r[5]))
                or r[9]
            ):
                print("  ", r[6], "" if r[8] else "unnamed", r[2], "|", r[3], "|", r[7], "|", r[9], "|", r[5])


if __name__ == "__main__":
    main()
