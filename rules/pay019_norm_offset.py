from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from ckptlint.analysis.optimizer.inventory import Param, inventory_of, siblings
from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.numerics.chunks import chunk_numbers
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.dtypes import ITEM_BITS

_LEAST_SIBLINGS, _LEAST_ELEMENTS = 3, 16
_SIGNED, _UNSIGNED = 0.2, 0.02  # share of values below 0 around 0, and around 1
_STUCK = 1 / 16  # relative distance from what a norm was created with, within which 16 bits round small updates off
_HINT = "compare with the step before, and with how the converter stores this kind of norm (less 1, or as it is)"


class _Norm(NamedTuple):
    """Numbers of a norm: share of values below 0, root mean square, and whether it holds one value."""

    param: Param
    below: float
    rms: float
    is_constant: bool


@rule("PAY019", "norm-offset", Severity.WARNING, depth=Depth.DATA)
def norm_offset(ckpt: Checkpoint) -> Iterator[Finding]:
    """The weight of one norm lies around 0 where those of its name in other layers lie around 1, or the other way.

    What it checks:
        Of four or more norms of one name in different layers, none has values of both signs and half of the usual size
        while all others are positive; none is positive and twice as large while all others have both signs; and none
        holds one value (0 or 1) while all others vary; in 16 bits, where small updates are rounded off, only if the
        others moved away from that value.
    Why it matters:
        A norm that is off by 1 scales every activation of its layer, or turns it off.
    Usual causes:
        Some models store a norm less 1, some as it is: a conversion of one layer that did the other thing; a norm
        whose key was not found, and kept the values that it was created with.
    How to fix:
        Take the norm from another step, or convert again.
    See:
        transformers.models.gemma.modeling_gemma.GemmaRMSNorm
    """
    for norms in _by_name(ckpt):
        for norm in norms:
            others = [sibling for sibling in norms if sibling is not norm]
            if what := _offset(norm, others):
                tensor = norm.param.tensor
                yield Finding(
                    f"{tensor.fqn} {what}",
                    at=Location(tensor, file=ckpt.chunk_file(tensor, 0)),
                    confidence="likely",
                    hint=_HINT,
                    inferred_from="the norms of this name in other layers",
                )


def _offset(norm: _Norm, others: list[_Norm]) -> str:
    """How one norm differs from all others of its name; "" where it does not."""
    usual = median(sibling.rms for sibling in others)
    if norm.is_constant:
        may_be_stuck = ITEM_BITS[norm.param.tensor.dtype] <= 16 and abs(usual - norm.rms) <= _STUCK * norm.rms
        is_odd = not may_be_stuck and not any(sibling.is_constant for sibling in others)
        return f"holds one value, {norm.rms:.3g}; its {len(others)} siblings vary" if is_odd else ""
    if norm.below >= _SIGNED and 2 * norm.rms <= usual and all(sibling.below <= _UNSIGNED for sibling in others):
        return f"has both signs, {norm.rms:.3g} in size; its {len(others)} siblings are positive, around {usual:.3g}"
    if norm.below <= _UNSIGNED and norm.rms >= 2 * usual and all(sibling.below >= _SIGNED for sibling in others):
        return f"is positive, around {norm.rms:.3g}; its {len(others)} siblings have both signs, {usual:.3g} in size"
    return ""


def _by_name(ckpt: Checkpoint) -> Iterator[list[_Norm]]:
    numbers = chunk_numbers(ckpt)
    wanted = {
        param.tensor.fqn: param
        for param in inventory_of(ckpt).params
        if param.key.function == "norm" and param.key.layer is not None and param.tensor.fqn.endswith("weight")
    }
    is_norm = np.array([tensor.fqn in wanted for tensor in numbers.tensors], bool)[numbers.tensor]
    norm_rows = np.flatnonzero(is_norm).tolist()
    rows_of = grouped((numbers.tensors[int(numbers.tensor[row])].fqn, row) for row in norm_rows)
    negatives, one_value = numbers.column("negatives"), numbers.column("one_value")
    for members in siblings(wanted[fqn] for fqn in rows_of).values():
        norms = []
        for param in members:
            rows = np.array(rows_of[param.tensor.fqn])
            count = int(numbers.elements[rows].sum())
            if count == param.tensor.volume >= _LEAST_ELEMENTS:
                mean_square = float((numbers.rms[rows] ** 2 * numbers.elements[rows]).sum()) / count
                is_constant = bool(one_value[rows].all() and np.ptp(numbers.most[rows]) == 0)
                norms.append(_Norm(param, int(negatives[rows].sum()) / count, mean_square**0.5, is_constant))
        if len(norms) > _LEAST_SIBLINGS:
            yield norms
