from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.chunks.checksums import chunk_sums
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.step_before.follows import updates_between
from ckptlint.analysis.step_before.leaps import keys_of, kinds_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural
from ckptlint.numerics.settings import optimizer_settings
from ckptlint.rule import Finding, Location, NotApplicable, Severity, require, rule
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import MOMENTS

_LEAST = 64  # elements: a smaller tensor may stay as it is by chance
# Adam moves a weight w by about the rate, unless its gradients are far below epsilon (1e-8); in float32 it stays only
# where that is below |w| / 2**25
_LEAST_RATE, _LEAST_MOMENT, _NEARLY_ALL = 1e-6, 1e-8, 0.9


@rule("RUN005", "identical-to-step-before", Severity.WARNING, depth=Depth.HEADERS, whole=True, needs=("step before",))
def identical_to_step_before(ckpt: Checkpoint) -> Iterator[Finding]:
    """The weights are bit-identical to those of the step before.

    What it checks:
        The CRC-32s of the records differ between the two steps, for tensors of at least 64 elements with the same
        chunks in both. Weights and moments that are all the same are a warning: one save under two names. Weights alone
        are info, since the learning rate may be zero, and a warning for float32 weights of which Adam changed nearly
        all moments, at rates of 1e-6 or more. Frozen weights beside others are fine.
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
    moved = _must_have_moved(ckpt, before) if all(weights) else ""
    if not (moved or (weights and all(weights))):
        return
    is_copy = bool(moments) and all(moments)
    subject = "all weights and all moments are" if is_copy else "all weights that can be compared are"
    counts = f"{plural(len(weights), 'weight')} and {plural(len(moments), 'moment')}"
    yield Finding(
        f"{subject} bit-identical to {older_name(ckpt)}{', though the optimizer made updates since' if moved else ''}",
        at=Location(label="compared with the step before"),
        identity=("identical",),
        confidence="certain" if is_copy or moved else "possible",
        notes=(("compared", f"{counts}, by CRC-32 and length" if weights else "drawn elements"), ("because", moved)),
        hint="resume from the older step: this one is a copy of it"
        if is_copy
        else "resume from the older step: the weights are its own, and only the optimizer's state is of this one"
        if moved
        else "check whether the weights were frozen or the learning rate was zero between the two steps",
        inferred_from="equal lengths and CRC-32s" if weights else "equal elements",
    )


def _must_have_moved(ckpt: Checkpoint, before: Checkpoint) -> str:
    """Why Adam must have moved the float32 weights, which all stayed, as a sentence; "" where they may have stayed."""
    tensors, table = [param.tensor for param in inventory_of(ckpt).params], ckpt.changes
    params = {tensor.fqn: tensor for tensor in tensors if tensor.dtype in FLOATS}
    rate = min(
        min((group.lr or 0.0 for part in (step, *step.optimizers) for group in optimizer_settings(part)), default=0.0)
        for step in (ckpt, before)
    )
    if table is None or rate < _LEAST_RATE or any(tensor.dtype != "float32" for tensor in params.values()):
        return ""
    rows = np.array([follow.key in params for follow in table.follows], bool)[table.follow]
    # what was trained in 16 bits may be stored in 32
    if not rows.any() or (table.same < table.drawn)[rows].any() or table.short_was[rows].mean() > 0.5:
        return ""
    updates = elements = 0
    for part in (ckpt, *ckpt.optimizers):
        if part.changes is not None and part.before is not None:
            updates += updates_between(part, part.before)
            moved = kinds_of(part.changes, "first") & (part.changes.same < part.changes.drawn)
            trained = keys_of(part.changes, np.flatnonzero(moved & (part.changes.now > _LEAST_MOMENT)))
            elements += sum(part.tensors[key].volume for key in trained)
    are_trained = updates and elements >= _NEARLY_ALL * sum(tensor.volume for tensor in params.values())
    return f"{plural(updates, 'update')} changed the moments, with a rate of {rate:.3g} or more" if are_trained else ""


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
