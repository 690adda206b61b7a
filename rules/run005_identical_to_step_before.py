from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.chunks.checksums import chunk_sums
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural
from ckptlint.rule import Finding, Location, NotApplicable, Severity, require, rule
from ckptlint.vocabulary.keys import MOMENTS

_LEAST = 64  # elements: a smaller tensor may stay as it is by chance


@rule("RUN005", "identical-to-step-before", Severity.WARNING, depth=Depth.HEADERS, whole=True, needs=("step before",))
def identical_to_step_before(ckpt: Checkpoint) -> Iterator[Finding]:
    """The weights are bit-identical to those of the step before.

    What it checks:
        The CRC-32s of the records differ between the two steps, for tensors of at least 64 elements with the same
        chunks in both. If all weights and all moments are the same, it is a warning: one save under two names. If all
        weights are the same but no moment can be compared, or moments changed, it is only info: the learning rate may
        be zero. Frozen weights beside others that changed are fine.
    Why it matters:
        This step contains none of the training between the two steps.
    Usual causes:
        An asynchronous save that staged its data too late, or a save that wrote a stale copy of the state.
    How to fix:
        Resume from the older step, and find out what the asynchronous save copies and when.
    See:
        NVIDIA-NeMo/RL#3312
    """
    before = require(ckpt.before)
    if before.payload is None:
        raise NotApplicable("the records of the step before were not read")
    inventory = inventory_of(ckpt)
    weights = _compared(ckpt, before, [param.tensor for param in inventory.params])
    moments = _compared(ckpt, before, [state.tensor for state in inventory.states if state.what in MOMENTS])
    if not weights or not all(weights):
        return
    is_copy = bool(moments) and all(moments)
    subject = "all weights and all moments are" if is_copy else "all weights that can be compared are"
    counts = f"{plural(len(weights), 'weight')} and {plural(len(moments), 'moment')}"
    yield Finding(
        f"{subject} bit-identical to {older_name(ckpt)}",
        at=Location(label="compared with the step before"),
        identity=("identical",),
        confidence="certain" if is_copy else "possible",
        notes=(("compared", f"{counts}, by CRC-32 and length"),),
        hint="resume from the older step: this one is a copy of it"
        if is_copy
        else "check whether the weights were frozen or the learning rate was zero between the two steps",
        inferred_from="equal lengths and CRC-32s",
    )


def _compared(ckpt: Checkpoint, before: Checkpoint, tensors: list[Tensor]) -> list[bool]:
    """Whether the bytes are equal, for each tensor that both steps store in the same chunks with checksums."""
    equal = []
    for tensor in tensors:
        older = before.tensors.get(tensor.fqn)
        if older is None or tensor.volume < _LEAST or tensor.global_shape != older.global_shape:
            continue
        mine, theirs = chunk_sums(ckpt, tensor), chunk_sums(before, older)
        if mine is not None and theirs is not None and mine.shape == theirs.shape:
            equal.append(bool((mine == theirs).all()))
    return equal
