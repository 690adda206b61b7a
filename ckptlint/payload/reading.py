"""How to read the payload."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from ckptlint.depth import Depth


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read the payload.

    Attributes:
        depth: `headers` or `data`.
        jobs: threads, one file each.
        percent: share of the records to read, None for all.
        seed: of the random choice.
    """

    depth: Depth
    jobs: int
    percent: float | None = None
    seed: int = 0


def default_reading(depth: Depth, percent: float | None = None, seed: int | None = None) -> Reading:
    """A reading with a thread per processor, 8 at most, and a seed of its own when none is given."""
    jobs = min(8, os.cpu_count() or 1)
    return Reading(depth, jobs, percent, secrets.randbelow(2**31) if seed is None else seed)
