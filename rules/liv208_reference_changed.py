"""LIV208: the state dict holds the keys, shapes and dtypes that it is expected to hold."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import agree, holders, told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV208", "reference-changed", Severity.ERROR, live=True)
def reference_changed(ckpt: Checkpoint) -> Iterator[Finding]:
    """Keys, shapes or dtypes are not those expected, or not those of the check before.

    What it checks:
        With `expect`: every expected key is held somewhere with the expected shape and dtype, and no other key. Without
        it: against the last check of the job, where at least half of its keys are there again; a key that is gone or
        has changed is then a warning, a new one a note. A number of
        holders that changed is not looked at, and keys about which ranks disagree are LIV201.
    Why it matters:
        A tensor that was transposed or cut on all ranks alike is consistent, and no other rule can see it.
    Usual causes:
        A placement that was kept through a transpose, a module that was swapped or frozen between two saves, an
        optimizer whose state appears with the first step (a note).
    How to fix:
        Nothing where the change was meant. Else find what replaced the tensor since the last check.
    """
    assert ckpt.ranks is not None
    torn = {held.fqn for held in holders(ckpt.ranks) if not agree(ckpt.ranks, held.rows)}
    yield from (finding for finding in told(ckpt) if finding.at.fqn not in torn)
