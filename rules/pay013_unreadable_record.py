from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, NotApplicable, Severity, rule


@rule("PAY013", "unreadable-record", Severity.ERROR, always=True)
def unreadable_record(ckpt: Checkpoint) -> Iterator[Finding]:
    """A record is not a whole archive, or a safetensors file has no valid header.

    What it checks:
        From depth headers on, every record of a payload file is a whole torch.save archive: end record, central
        directory, members and a data.pkl that decodes. A safetensors file, at any depth, has a valid JSON header, byte
        ranges without overlaps and holes, nothing after the last one, and one dtype in all shards of a key; PAY004
        reports one that is too short for its tensors. Records that went through a stream transform, and writers of raw
        bytes, are left out. At depth files no payload file starts with zeros.
    Why it matters:
        These keys, or the whole file, cannot be loaded.
    Usual causes:
        An interrupted write, flipped bits, a git-lfs pointer instead of the file, or a value in the state dict that is
        not a tensor: torch's HuggingFaceStorageWriter writes it before the header.
    How to fix:
        Copy the file again, or save again. Keep values that are not tensors out of a safetensors export.
    See:
        torch.serialization.load, caffe2/serialize/inline_container.cc,
        torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter
    """
    problems = list(ckpt.problems_of("container"))
    if ckpt.payload is not None and not ckpt.is_safetensors:  # what a file lost is said of its records
        records = {problem.file for problem in problems if problem.detail}
        problems = [problem for problem in problems if problem.detail or problem.file not in records]
    if ckpt.payload is None and not problems and ckpt.records.fqns:
        raise NotApplicable("records are opened from depth headers on")
    yield from map(Finding.of_problem, problems)
