"""COM001: the save reached its end."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("COM001", "completeness-marker", Severity.ERROR, always=True)
def completeness_marker(ckpt: Checkpoint) -> Iterator[Finding]:
    """A file that a finished save has is missing.

    What it checks:
        Payload files come with `.metadata` (or the `__N.metadata` of every rank); a Megatron-Core torch_dist checkpoint
        has `metadata.json` and a source of its common state (`common.pt`, or the entry `common_state/shard_0_1` from
        0.19 on); no `.metadata.tmp` is newer than `.metadata`.
    Why it matters:
        Each of these is written last in its stage, so the save or the copy did not finish.
    Usual causes:
        A job that was killed, an asynchronous save nobody waited for, a partial copy (dot files are easily left
        behind).
    How to fix:
        Use the newest complete step, or copy again from where the checkpoint was written.
    See:
        megatron.core.dist_checkpointing.serialization.save
    """
    yield from map(Finding.of_problem, ckpt.problems_of("incomplete"))
