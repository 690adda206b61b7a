"""Rules on the tensors of an optimizer, which may lie in a file beside those of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, NotApplicable


def of_each(ckpt: Checkpoint, judge: Callable[[Checkpoint], Iterator[Finding]]) -> Iterator[Finding]:
    """What a rule finds in a checkpoint and each of its `optimizers`, or NotApplicable where none can be judged."""
    reasons = list[NotApplicable]()
    try:
        yield from judge(ckpt)
    except NotApplicable as reason:
        reasons.append(reason)
    for states in ckpt.optimizers:
        try:
            for finding in judge(states) if states.payload is not None else ():
                # rows, and the tensor's records, are of the file alone
                at = replace(finding.at, key=finding.at.fqn, rows=(), file=states.files.names[0])
                yield replace(finding, at=at, identity=(*finding.identity, at.file))
        except NotApplicable as reason:
            reasons.append(reason)
    if len(reasons) > len(ckpt.optimizers):
        raise reasons[0]
