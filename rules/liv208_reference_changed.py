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
        it: against the last check of the job, where at least half of its keys are there again, as RUN001 to RUN003
        compare a step with the one before: a change that leaves siblings as they were is a warning (one layer, one
        moment), one that is complete in itself a note (a whole module, a dtype everywhere), and so is a new key. A
        number of holders that changed is not looked at, and keys about which ranks disagree are LIV201.
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
    kept: dict[tuple[str | None, str], Finding] = {}
    for finding in told(ckpt):  # a rank that holds no siblings takes for complete what others know to be partial
        said = finding.at.fqn, finding.message
        first = kept.setdefault(said, finding)
        if (finding.severity or Severity.ERROR) > (first.severity or Severity.ERROR):
            kept[said] = finding
    yield from (finding for finding in kept.values() if finding.at.fqn not in torn)
