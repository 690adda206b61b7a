from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_sets import compared
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("RNK004", "local-shape", Severity.ERROR, needs=("rank files",))
def local_shape(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's part of a tensor does not have the shape that its placements imply.

    What it checks:
        The global shape, the device mesh, the placements and the rank say how many rows and columns a rank holds: parts
        of one size, rounded up, the last ones short or empty. The shard of a ShardedTensor is the one that all files
        list for its rank. GEO rules do not repeat this for the same part.
    Why it matters:
        The shards do not tile the tensor: a merge misses rows, or uses rows twice.
    Usual causes:
        The file of another rank or of another world size, or a tensor that somebody cut or padded by hand.
    How to fix:
        Take this rank's file from the same save, or go back to a step whose files fit.
    See:
        torch.distributed.tensor.placement_types.Shard, torch.distributed._shard.sharded_tensor
    """
    for item in compared(ckpt).shapes:
        yield Finding(
            f"{item.file} holds {item.stored}{{of}} instead of {item.expected}",
            at=Location(item.fqn, file=item.file),
            identity=(item.file,),
            notes=(("because", item.because),),
            hint="copy this file from the same save as the others, or go back one step",
            group=f"{item.file} {item.stored} {item.expected}",
        )
