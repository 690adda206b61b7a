from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("SAF002", "unreadable-metadata", Severity.ERROR, always=True, fixed=True)
def unreadable_metadata(ckpt: Checkpoint) -> Iterator[Finding]:
    """A metadata file is empty, truncated, or not what its name promises.

    What it checks:
        `.metadata` and `__N.metadata` are one whole pickle of a torch Metadata object, `common.pt` is a torch.save
        archive, `metadata.json` of a Megatron-Core checkpoint is JSON, and the files that a trainer saves beside the
        tensors (`optimizer.pt`, `scheduler.pt`, `random_states_N.pkl`, `trainer_state.json`, ...) can be read. The
        `config.json` of an exported model is a JSON object; beside other checkpoints it is only a warning if it is not.
        At depth data, `integrity.json` lists checksums and `ckptlint.seal.json` is a seal. The metadata files of single
        ranks agree on a tensor's global shape and dtype, unless each describes a whole tensor. `planner_data` puts each
        tensor where its key says. It is a warning, and the verdict is incomplete, if a file was not read: if what has
        its name is a pipe, a socket, a device, a folder or a link that leads nowhere, if it starts as a pickle does,
        whatever its name, and cannot be read to its end, or if the files before took the bytes that are read of such
        files together.
    Why it matters:
        Nothing can be loaded, and nothing else can be checked.
    Usual causes:
        A killed save, a full disk, an interrupted copy, a Git LFS pointer instead of the file.
    How to fix:
        Restore the file from where it was written, or use an earlier step.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemWriter.finish
    """
    unsafe = {problem.file for problem in ckpt.problems_of("unsafe")}  # a pickle in place of JSON, say
    for problem in ckpt.problems_of("unreadable", "unread"):
        if problem.file in unsafe:
            continue
        is_mild = problem.outside_checkpoint or problem.kind == "unread"
        yield replace(Finding.of_problem(problem), severity=Severity.WARNING if is_mild else None)
