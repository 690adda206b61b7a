from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("SAF003", "resource-limit", Severity.ERROR, always=True, fixed=True)
def resource_limit(ckpt: Checkpoint) -> Iterator[Finding]:
    """A number or size in the metadata exceeds a limit.

    What it checks:
        A metadata file has at most 2 GiB and takes no more memory to read than its size explains. Keys have at most
        4,096 characters and tensors at most 64 axes. Shapes, their volume, offsets and lengths fit 64 bits.
    Why it matters:
        The input could exhaust memory, or torch cannot represent it.
    Usual causes:
        A damaged or hostile file.
    How to fix:
        Copy the file again from where it was written. If it is sound, report that the limit is too low.
    """
    for problem in ckpt.problems_of("limit"):
        finding = Finding.of_problem(problem)
        at = replace(finding.at, key=ckpt.tensors.get(problem.fqn or "", problem.fqn))
        # the sentence names the record, and its other keys are no help
        yield replace(finding, at=at, identity=(problem.message,), detail=())
