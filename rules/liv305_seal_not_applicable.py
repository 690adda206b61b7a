from __future__ import annotations

from collections.abc import Iterator

from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.seals.file import SEAL
from ckptlint.seals.verify import compare_with_seal, misfit

_SHOWN = 6


@rule("LIV305", "seal-not-applicable", Severity.INFO, depth=Depth.DATA)
def seal_not_applicable(ckpt: Checkpoint) -> Iterator[Finding]:
    """The seal belongs to another save, or does not cover some tensors.

    What it checks:
        The seal names this .metadata by its hash and uses an algorithm that this version knows, and every tensor of the
        checkpoint was compared with it. Says nothing where there is no seal.
    Why it matters:
        Tensors that were not compared may hold anything; LIV302 judges only the others.
    Usual causes:
        A later save into the same folder, ignored keys, dtypes without a digest, --sample, or unreadable records.
    How to fix:
        Seal the checkpoint again from the job that wrote it.
    See:
        ckptlint.live.seal
    """
    if ckpt.seal is None:
        raise NotApplicable(misfit(ckpt))
    if reason := misfit(ckpt):
        message = f"{SEAL} was not compared with the payload: {reason}"
        hint = "seal the checkpoint again from the job that wrote it, or remove the seal"
        yield Finding(message, at=Location(file=SEAL), identity=(ckpt.seal.algorithm, ckpt.seal.metadata), hint=hint)
        return
    for why, fqns in compare_with_seal(ckpt).unknown.items():
        yield Finding(
            f"{len(fqns):,} key{'s were' if len(fqns) > 1 else ' was'} not compared with {SEAL}: {why}",
            at=Location(file=SEAL),
            identity=tuple(fqns[:_SHOWN]),
            notes=(("keys", first_names(fold_names(fqns), _SHOWN, "pattern")),),
        )
