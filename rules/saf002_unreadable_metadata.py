"""SAF002: the metadata can be read."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("SAF002", "unreadable-metadata", Severity.ERROR, always=True, fixed=True)
def unreadable_metadata(ckpt: Checkpoint) -> Iterator[Finding]:
    """A metadata file is empty, truncated, or not what its name promises.

    What it checks:
        `.metadata` and `__N.metadata` are one whole pickle of a torch Metadata object, `common.pt` is a torch.save
        archive, `metadata.json` of a Megatron-Core checkpoint is JSON, and the files that a trainer saves beside the
        tensors (`optimizer.pt`, `scheduler.pt`, `random_states_N.pkl`, `trainer_state.json`, ...) can be read. At depth
        data, `integrity.json` lists checksums and `ckptlint.seal.json` is a seal. The metadata files of single ranks
        agree on a tensor's global shape and dtype, unless each describes a whole tensor.
    Why it matters:
        Nothing can be loaded, and nothing else can be checked.
    Usual causes:
        A killed save, a full disk, an interrupted copy, a Git LFS pointer instead of the file.
    How to fix:
        Restore the file from where it was written, or use an earlier step.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemWriter.finish
    """
    yield from map(Finding.of_problem, ckpt.problems_of("unreadable"))
