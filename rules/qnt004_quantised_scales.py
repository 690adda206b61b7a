"""QNT004: the scales of quantised weights are numbers that a quantiser gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.quantised import quantisation
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, PayloadTable, Tensor
from ckptlint.model.text import braces, plural, some
from ckptlint.rule import Finding, Location, NotApplicable, Severity, given, rule
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import role
from ckptlint.vocabulary.schemes import Part, Scheme

_SHOWN = 6
_FAR = 1_000.0
_LEAST = 4  # siblings


@rule("QNT004", "quantised-scales", Severity.ERROR, depth=Depth.DATA)
def quantised_scales(ckpt: Checkpoint) -> Iterator[Finding]:
    """The scales of a quantised weight are zero, or far from those of its siblings.

    What it checks:
        A scale whose numbers are all zero, beside codes that are not, is an error: the weight is zero. It is a warning
        if the largest scale of a weight is 1,000 times larger or smaller than the median of the same role in at least
        four other layers or experts. Scales that are powers of two in bytes are not judged. NaN and infinities are
        PAY011's.
    Why it matters:
        The weight is multiplied with its scale, so the layer gives nothing, or drowns the others.
    Usual causes:
        Scales were inverted, were saved before they were measured, or were read with the wrong dtype.
    How to fix:
        Export the model again from the weights that it was quantised from.
    """
    payload = given(ckpt.payload)
    found = quantisation(ckpt)
    if not found.weights:
        raise NotApplicable("no weight is stored quantised")
    dead: dict[tuple[Scheme, Part], list[Tensor]] = defaultdict(list)
    sizes: dict[tuple[Scheme, Part, str], list[tuple[Tensor, float]]] = defaultdict(list)
    for one in found.weights:
        for part, tensor in one.parts.items():
            most = _most(payload, tensor) if part.needed and tensor.dtype in FLOATS else None
            if most == 0 and _most(payload, one.codes) != 0:
                dead[one.scheme, part].append(tensor)
            elif most:
                sizes[one.scheme, part, role(one.weight)].append((tensor, most))
    for (scheme, part), tensors in dead.items():
        yield _finding(
            tensors,
            f"{_last(tensors[0])} of {plural(len(tensors), 'weight')} in {scheme.title} is zero, but the codes are not",
            f"{scheme.name} {part.names} zero",
        )
    for (scheme, part, _), alike in sizes.items():
        usual = float(np.median([most for _, most in alike]))
        far = [(tensor, most) for tensor, most in alike if not usual / _FAR < most < usual * _FAR]
        if far and len(alike) > max(_LEAST, 2 * len(far)):
            yield _finding(
                [tensor for tensor, _ in far],
                f"the largest value{{of}} is {far[0][1]:.3g}, and the median of its {len(alike) - 1} "
                f"siblings {usual:.3g}",
                f"{scheme.name} {part.names} far",
                inferred_from="the scales of the same role",
            )


def _last(tensor: Tensor) -> str:
    return tensor.fqn.rpartition(".")[2]


def _most(payload: PayloadTable, tensor: Tensor) -> float | None:
    """The largest magnitude in a tensor; None where not all of it was read, or it holds something that is no number."""
    records = tensor.chunks.record[tensor.layout.live]
    if not len(records) or (records < 0).any() or not payload.scanned[records].all():
        return None
    if (payload.nan + payload.plus_inf + payload.minus_inf)[records].any():
        return None
    return float(payload.most[records].max())


def _finding(tensors: list[Tensor], message: str, group: str, inferred_from: str = "") -> Finding:
    keys = [tensor.fqn for tensor in tensors]
    return Finding(
        message,
        at=Location.of(tensors[0]),
        identity=tuple(keys[1:]),
        keys=tuple(keys[1:]),
        confidence="likely" if inferred_from else "certain",
        notes=(("scales", some(braces(keys), _SHOWN)),),
        why="the weight is multiplied with its scale, so the layer gives nothing, or drowns the others",
        hint="export the model again from the weights that it was quantised from",
        group=group,
        inferred_from=inferred_from,
    )
