from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np

from ckptlint.analysis.layers.odd_ones import param_keys
from ckptlint.analysis.optimizer.pairs import moments_that_do_not_fit
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.numerics.chunks import chunk_numbers
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import COMPUTED, SQUARES

_FAR = 1e6
_LEAST = 64  # numbers of a tensor


@rule("PAY016", "outlier-element", Severity.WARNING, depth=Depth.DATA)
def outlier_element(ckpt: Checkpoint) -> Iterator[Finding]:
    """One element is beyond all others by so much that a bit of its exponent must have flipped.

    What it checks:
        The largest magnitude of a tensor is at most a million times the root mean square of all its other elements, and
        of the usual tensor of its state; a million million times in sums of squares. Tensors of fewer than 64 elements,
        those whose other elements are all 0, buffers, and flat groups, whose padding nobody wrote, are left out, and
        moments of which OPT011 tells.
    Why it matters:
        That element alone decides every sum that it is part of: an output, a norm of gradients, the next step.
    Usual causes:
        A bit flipped in memory before the save, so that checksums agree; something wrote past the end of its buffer.
    How to fix:
        Take the element from another step.
    See:
        IEEE 754: with bit 30 flipped a float32 of 0.02 is 7e36
    """
    numbers = chunk_numbers(ckpt)
    if not len(numbers.tensor):
        raise NotApplicable("no floating tensor was read")
    most, squares = numbers.most, numbers.column("squares")
    begin = np.flatnonzero(np.diff(numbers.tensor, prepend=-1))  # the rows of a tensor follow each other
    top = np.maximum.reduceat(most, begin)
    with np.errstate(over="ignore", invalid="ignore"):
        is_top = np.zeros(len(most), bool)
        groups = np.split(most, begin[1:])
        is_top[[start + int(group.argmax()) for start, group in zip(begin.tolist(), groups, strict=True)]] = True
        others = np.add.reduceat(squares + np.where(is_top, 0.0, most * most), begin)
        count = np.add.reduceat(numbers.elements, begin)
        rms = np.sqrt(others / np.maximum(count - 1, 1))
    states = np.array(numbers.states)
    # what may be a row of parameters with padding between them
    rows = [tensor.fqn for tensor in numbers.tensors if len(tensor.global_shape) == 1]
    flat = {fqn for fqn in rows if fqn not in param_keys(ckpt) or fqn.endswith("_flat_param")}
    is_flat = np.array([tensor.fqn in flat for tensor in numbers.tensors], bool)
    for state in dict.fromkeys(numbers.states):
        mine = np.flatnonzero((states == state) & (count >= _LEAST) & (rms > 0) & ~is_flat)
        if not len(mine):
            continue
        far = _FAR * _FAR if state in SQUARES else _FAR
        usual = median(rms[mine].tolist())
        for number in mine[top[mine] > far * np.maximum(rms[mine], usual)].tolist():
            tensor = numbers.tensors[number]
            if tensor.fqn.rpartition(".")[2] in COMPUTED:
                continue
            row = int(np.flatnonzero(is_top & (numbers.tensor == number))[0])
            chunk = int(numbers.chunk[row])
            if (tensor.fqn, chunk) in moments_that_do_not_fit(ckpt):
                continue
            box = tensor.tiling.box(chunk)
            yield Finding(
                f"one element in chunk {box}{{of}} is {top[number]:.3g} in magnitude, the root mean square of the "
                f"{count[number] - 1:,} others {rms[number]:.3g}",
                at=Location.of_chunk(ckpt, tensor, chunk),
                hint="take the element or the tensor from another step, and test the memory of that rank's host",
            )
