"""The save plans of all ranks, as they were before deduplication."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ckptlint.model import SavePlans
from ckptlint.model.tiling import distinct


class Duplicate(NamedTuple):
    """One (fqn, offset) that several ranks planned to write.

    Attributes:
        rows: rows of the `SavePlans`, by rank.
        equal: whether sizes, global shapes and dtypes are the same in all plans.
    """

    fqn: str
    offset: tuple[int, ...] | None
    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    equal: bool


def duplicates(table: SavePlans) -> list[Duplicate]:
    """Every (fqn, offset) that occurs in the plans of two or more ranks, in order of name and offset."""
    if len(table) == 0:
        return []
    key = np.concatenate([table.fqn[:, None], table.is_bytes[:, None], table.offsets], axis=1)
    order = np.lexsort((table.rank, *key.T[::-1]))
    same = (key[order[1:]] == key[order[:-1]]).all(axis=1)
    if not same.any():
        return []
    duplicate_rows = []
    bounds = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = order[start:stop]
        ranks = tuple(sorted(set(table.rank[rows].tolist()))) if len(rows) > 1 else ()
        if len(ranks) < 2:
            continue
        described = (table.sizes[rows], table.global_shape[rows], table.dtype[rows])
        equal = all((column == column[:1]).all() for column in described)
        is_bytes = bool(table.is_bytes[rows[0]])
        offset = None if is_bytes else tuple(v for v in table.offsets[rows[0]].tolist() if v >= 0)
        fqn = table.fqns[int(table.fqn[rows[0]])]
        duplicate_rows.append(Duplicate(fqn, offset, tuple(rows.tolist()), ranks, bool(equal)))
    return duplicate_rows


def planned_by(table: SavePlans, rank: int) -> set[str]:
    """Names that a rank planned to write."""
    return {table.fqns[i] for i in distinct(table.fqn[table.rank == rank]).tolist()}
