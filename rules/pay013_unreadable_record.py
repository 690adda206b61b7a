"""PAY013: every record and every safetensors file is a container that can be read."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, NotApplicable, Severity, rule


@rule("PAY013", "unreadable-record", Severity.ERROR, always=True)
def unreadable_record(ckpt: Checkpoint) -> Iterator[Finding]:
    """A record is no archive, or a safetensors file has no sound header.

    What it checks:
        From depth headers on, every record of a payload file is a whole torch.save archive: an end record, a central
        directory and members inside the record, local headers that say the same as the directory, a data.pkl that
        decodes. Of safetensors at any depth: a header inside the file, JSON, ranges that neither overlap nor leave
        holes, nothing behind the last one, one dtype in all shards of a key; a file that is too short for its tensors
        is left to PAY004. Left out are records that went through a stream transform, and writers of raw bytes.
    Why it matters:
        These keys cannot be loaded, or the whole file cannot.
    Usual causes:
        A torn write, flipped bits, a git-lfs pointer instead of the file, or a value that is no tensor in a state that
        torch's HuggingFaceStorageWriter saved: it writes such a value before the header.
    How to fix:
        Copy the file again or save again; keep non-tensor items out of a safetensors export.
    See:
        torch.serialization.load, caffe2/serialize/inline_container.cc,
        torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter
    """
    problems = list(ckpt.problems_of("container"))
    if ckpt.payload is None and not problems and ckpt.records.fqns:
        raise NotApplicable("records are opened at depth headers")
    yield from map(Finding.of_problem, problems)
