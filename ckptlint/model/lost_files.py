"""Files that are missing, by the ranks and nodes that wrote them: a list to copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby
from math import gcd

from ckptlint.grouping import grouped

LostFiles = tuple[tuple[str, tuple[str, ...]], ...]
"""(whose they are, in words; their names), in the order of ranks."""


def by_node(lost: Mapping[str, int | None], there: Collection[int]) -> LostFiles:
    """The files of each node, where whole nodes are missing; else those of each run of ranks.

    Args:
        lost: name of a missing file -> the rank that wrote it, None where nothing says; there: all other ranks.

    >>> by_node({"__4_0.distcp": 4, "__5_0.distcp": 5, "__6_0.distcp": 6, "__7_0.distcp": 7}, range(4))[0][0]
    'ranks 4-7, probably one node'
    >>> by_node({"__3_0.distcp": 3}, range(3))
    (('rank 3', ('__3_0.distcp',)),)
    """
    ranks = sorted({rank for rank in lost.values() if rank is not None} - {*there})
    total = max([*ranks, *there], default=-1) + 1
    runs = [[rank for _, rank in alike] for _, alike in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    size = gcd(total, *(place for run in runs for place in (run[0], run[-1] + 1)))
    if size > 1:
        runs = [run[start : start + size] for run in runs for start in range(0, len(run), size)]
    run_of = {rank: number for number, run in enumerate(runs) for rank in run}
    names = grouped((run_of.get(rank, -1) if rank is not None else -1, name) for name, rank in lost.items())
    by_run = []
    for number, run in enumerate(runs):
        whose = f"ranks {run[0]}-{run[-1]}" if len(run) > 1 else f"rank {run[0]}"
        by_run.append((whose + ", probably one node" * (size > 1), tuple(names.get(number, ()))))
    return (*by_run, ("", tuple(names[-1]))) if -1 in names else tuple(by_run)
