from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_sets import compared
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, verb
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN = 6


@rule("RNK003", "ranks-at-other-steps", Severity.ERROR, needs=("rank files",))
def ranks_at_other_steps(ckpt: Checkpoint) -> Iterator[Finding]:
    """Files of one set come from different steps.

    What it checks:
        All files of a set of per-rank torch files state the same step of the optimizer, step of the scheduler and
        iteration.
    Why it matters:
        A load joins parts of two steps into one tensor, and only the loss may show it.
    Usual causes:
        An interrupted save into a folder that held an older one, or files of several nodes that were copied at
        different times.
    How to fix:
        Take all files from one save, or go back to a step whose files agree.
    See:
        LMResiliency/lm-resiliency#82
    """
    for item in compared(ckpt).steps:
        step, files = item.says[-1]
        rest = "; ".join(f"{len(rank_files)} at step {value}" for value, rank_files in item.says[:-1])
        yield Finding(
            f"{first_names(files, _SHOWN)} {verb(len(files), 'comes')} from step {step}, "
            f"but other files of this kind do not: {rest}",
            at=Location(file=files[0]),
            identity=files,
            hint="take all files from the same save, or go back to a step whose files agree",
        )
