from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.step_before.step_change import changes, older_name, stored_keys
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, require, rule

_NEEDS = ("step before", "whole step before")


@rule("RUN003", "changed-since-step-before", Severity.WARNING, whole=True, needs=_NEEDS, yields_to=("GEO004", "OBJ002"))
def changed_since_step_before(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's shape, dtype or number of chunks differs from the step before.

    What it checks:
        Every tensor has the shape and dtype that it has in the nearest older finished step of the run. It is only info
        if a dtype changed everywhere, or a vocabulary grew in all embeddings. Fewer chunks count if most tensors kept
        theirs; another world size changes all of them, and that is fine.
    Why it matters:
        Only values should change between two steps, so a load into the model of the older step fails or converts.
    Usual causes:
        A plan or a placement that was kept after the structure changed, one rank with another configuration, a cast
        that reached only some parameters.
    How to fix:
        Compare with `ckptlint diff OLDER THIS --layout`, and resume from the older step unless the change was meant.
    See:
        pytorch#149785
    """
    before = require(ckpt.before)
    older = older_name(ckpt)
    changed = [
        difference
        for difference in changes(stored_keys(before), stored_keys(ckpt))
        if difference.kind in ("shape", "dtype", "cut")
    ]
    for change, fqn in ((difference, fqn) for difference in changed for fqn in difference.fqns):
        yield Finding(
            change.sentence("stored here", older),
            at=Location(ckpt.tensors.get(fqn, fqn)),
            identity=(change.kind,),
            is_apart=change.kind != "cut",
            confidence="certain" if change.is_partial else "possible",
            notes=(("because", change.rest),),
            hint="resume from the older step, unless the change was intended" if change.is_partial else "",
            inferred_from=f"the same tensor in {older}",
            group=f"{change.kind} {change.fqns[0]}",
        )
