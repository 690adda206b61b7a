from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, require, rule


@rule("RNK006", "other-rank-inside", Severity.ERROR, needs=("rank files",))
def other_rank_inside(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's file holds what another rank wrote.

    What it checks:
        The rank in a file's name is the rank that its content states: a device mesh and a ShardedTensor say who wrote
        them, and torch.save names the folder inside its archive after the file. It is only a warning if just that
        folder differs and no other file has the same bytes: somebody may have renamed the file.
    Why it matters:
        One rank's shard is stored twice and another's is lost, although every file is whole.
    Usual causes:
        A copy or an upload that wrote one file under two names, or a script that renumbered ranks.
    How to fix:
        Copy the file again from the node that wrote it, or go back one step.
    See:
        torch.serialization.save, torch.distributed.device_mesh.DeviceMesh
    """
    for item in (file for file in require(ckpt.rank_files).files if file.inside):
        same = f": the same bytes as {item.same_as}" if item.same_as else ""
        yield Finding(
            f"{item.name} holds what was saved as {item.inside}{same}",
            at=Location(file=item.name),
            identity=(item.name,),
            confidence="certain" if item.is_stated or item.same_as else "likely",
            hint="copy the file again from the node that wrote it, or go back one step"
            if item.is_stated or item.same_as
            else "check whether the file was renamed on purpose: then nothing is lost",
        )
