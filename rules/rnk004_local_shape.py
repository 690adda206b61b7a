"""RNK004: each rank holds of a tensor what mesh and placements give it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("RNK004", "local-shape", Severity.ERROR)
def local_shape(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's part of a tensor has another shape than its placements imply.

    What it checks:
        From the global shape, the device mesh, the placements and the rank follows how many rows and columns a rank
        holds: pieces of one size, rounded up, the last ones short or empty. A ShardedTensor's shard is the one that
        all files list for its rank. What GEO rules would say of the same part is left out.
    Why it matters:
        The parts do not tile the tensor: a merge joins too few rows, or rows twice.
    Usual causes:
        The file of another rank or of another world size, a tensor that was cut or padded by hand.
    How to fix:
        Take the file of this rank from the same save, or go back to a step whose files fit.
    See:
        torch.distributed.tensor.placement_types.Shard, torch.distributed._shard.sharded_tensor
    """
    if ckpt.rank_files is None:
        raise NotApplicable("no set of rank files")
    for item in ckpt.rank_files.misfits:
        if item.what == "shape":
            yield Finding(
                f"{item.file} holds {item.stored}{{of}} instead of {item.expected}",
                at=Location(item.fqn, file=item.file),
                missing=(item.file,),
                notes=(("because", item.because),),
                alike=f"{item.file} {item.stored} {item.expected}",
            )
