"""PAY013: every record and every safetensors file is a readable container."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("PAY013", "unreadable-record", Severity.ERROR, always=True)
def unreadable_record(ckpt: Checkpoint) -> Iterator[Finding]:
    """A safetensors file is no readable container.

    What it checks:
        A safetensors file starts with a header that can be read, and its tensors tile the rest of the file from the end
        of the header on: no hole, no overlap, nothing behind the last one. A file that is too short for its tensors is
        left to PAY004.
    Why it matters:
        The load of the file fails, and with it that of every key in it.
    Usual causes:
        A torn write, flipped bits, a git-lfs pointer instead of the file, or a value that is no tensor in a state that
        torch's HuggingFaceStorageWriter saved: it writes such a value before the header.
    How to fix:
        Copy the file again or save again; keep values that are no tensors out of an export to safetensors.
    See:
        torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter
    """
    for problem in ckpt.problems:
        if problem.kind == "container":
            yield Finding(
                problem.message,
                fqn=problem.fqn,
                file=problem.file,
                missing=(problem.file,),
                why=problem.why,
                hint=problem.hint,
                detail=problem.detail,
            )
