from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.step_before.step_change import older_name, stored_keys
from ckptlint.model import Checkpoint
from ckptlint.model.text import human_bytes
from ckptlint.rule import Finding, Location, NotApplicable, Severity, require, rule

_ENVELOPE = 2_048  # bytes around the numbers of a record, of which a job of more ranks writes more


@rule("RUN004", "smaller-than-step-before", Severity.WARNING, whole=True, needs=("step before", "whole step before"))
def smaller_than_step_before(ckpt: Checkpoint) -> Iterator[Finding]:
    """The same keys take less than half, or more than twice, the bytes of the step before.

    What it checks:
        All storage entries together are about as long as in the nearest older finished step of the run. A save of more
        ranks may take 2 KiB more for each record that it has more. Steps with different keys, shapes or dtypes, or with
        stream transforms, are not compared.
    Why it matters:
        The same tensors need the same bytes, so the metadata of one of the two steps is wrong.
    Usual causes:
        Views that were saved with their whole storage, truncated records, the metadata of one step beside the payload
        of another.
    How to fix:
        Check both with `--depth headers`, and resume from the one that passes.
    """
    before = require(ckpt.before)
    if ckpt.format != before.format:
        raise NotApplicable(f"{before.path} is stored in another format")
    was, now = stored_keys(before), stored_keys(ckpt)
    tensors = {fqn: (stored.dtype, stored.shape) for fqn, stored in now.items() if stored.is_tensor}
    if tensors != {fqn: (stored.dtype, stored.shape) for fqn, stored in was.items() if stored.is_tensor}:
        raise NotApplicable("the step before holds different tensors")
    if ckpt.records.transformed.any() or before.records.transformed.any():
        raise NotApplicable("records went through a stream transform")
    size, size_before = (int(save.records.byte_length.sum()) for save in (ckpt, before))
    more = _ENVELOPE * (len(ckpt.records) - len(before.records))
    if not size_before or (size_before <= 2 * size + max(-more, 0) and size <= 2 * size_before + max(more, 0)):
        return
    yield Finding(
        f"the records hold {human_bytes(size)}; for the same keys {older_name(ckpt)} holds {human_bytes(size_before)}",
        at=Location(label="compared with the step before"),
        identity=("bytes",),
        notes=(("ratio", f"{size / size_before:.2f}"),),
        hint="check both with --depth headers, and resume from the one that passes",
        inferred_from=f"the bytes of {older_name(ckpt)}",
    )
