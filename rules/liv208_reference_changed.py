from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import reported, torn
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV208", "reference-changed", Severity.ERROR, live=True)
def reference_changed(ckpt: Checkpoint) -> Iterator[Finding]:
    """Keys, shapes or dtypes are not those you expect, or have changed since the last check.

    What it checks:
        With `expect`: some rank holds every expected key, with its shape and dtype, and there is no other key. Without
        it: compares with the last check of the job, if at least half of its keys are still there. A change that leaves
        siblings alone (one layer, one moment) is a warning; a complete one (a whole module, a dtype everywhere) is only
        info, and so is a new key. The number of holders may change; keys on which the ranks disagree are left to
        LIV201.
    Why it matters:
        If all ranks transpose or trim a tensor alike, they agree with each other, and no other rule notices.
    Usual causes:
        A placement survived a transpose, a module was swapped or frozen between two saves, or the optimizer made its
        state in the first step (only info).
    How to fix:
        If you meant the change, do nothing. Else find what replaced the tensor since the last check.
    """
    disagreed = torn(require(ckpt.ranks))
    kept: dict[tuple[str | None, str], Finding] = {}
    for finding in reported(ckpt):  # a rank that holds no siblings takes for complete what others know to be partial
        message_key = finding.at.fqn, finding.message
        first = kept.setdefault(message_key, finding)
        if (finding.severity or Severity.ERROR) > (first.severity or Severity.ERROR):
            kept[message_key] = finding
    yield from (finding for finding in kept.values() if finding.at.fqn not in disagreed)
