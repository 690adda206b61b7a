from __future__ import annotations

from collections.abc import Iterator

from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names
from ckptlint.rule import Finding, Location, NotApplicable, Severity, require, rule
from ckptlint.seals.file import SEAL
from ckptlint.seals.verify import compare_with_seal, misfit


@rule("LIV302", "payload-differs-from-seal", Severity.ERROR, depth=Depth.DATA)
def payload_differs_from_seal(ckpt: Checkpoint) -> Iterator[Finding]:
    """The stored values of a tensor are not those that the job sealed.

    What it checks:
        Where ckptlint.seal.json lies beside the checkpoint, each tensor's stored elements have the sealed digest,
        however the tensor is sharded. If every tensor of a checkpoint without .metadata differs, only a warning:
        nothing else tells one save from the next there.
    Why it matters:
        Bytes changed or moved after the job had sealed them. The checksums of the records may still be right.
    Usual causes:
        An asynchronous save copied the state while training went on, two shards swapped places, or a copy or conversion
        mixed two steps.
    How to fix:
        Compare with the state of the job if it still runs. Else go back to a step that passes.
    See:
        ckptlint.live.seal
    """
    if reason := misfit(ckpt):
        raise NotApplicable(reason)
    seal = require(ckpt.seal)
    step = f" at step {seal.step}" if seal.step is not None else ""
    sealed = f"{SEAL}, written by ckptlint {seal.version}{step}"
    comparison = compare_with_seal(ckpt)
    is_older = not seal.metadata and len(comparison.different) > 1 and not comparison.equal
    for fqn, digest in comparison.different.items():
        tensor = ckpt.tensors[fqn]
        files = dict.fromkeys(ckpt.chunk_file(tensor, row) for row in tensor.tiling.live.nonzero()[0].tolist())
        yield Finding(
            f"the stored values{{of}} differ from those that the job sealed: digest {digest:016x}, "
            f"sealed {seal.entries[fqn].digest:016x}",
            at=Location(tensor),
            severity=Severity.WARNING if is_older else None,
            notes=(("files", first_names(files)), ("sealed", sealed)),
            hint=f"every tensor differs: check whether {SEAL} belongs to an earlier save into this folder"
            if is_older
            else "",
            group="different",
        )
