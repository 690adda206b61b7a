from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.quantised import WIDE, QuantisedWeight, quantisation
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, PayloadTable, Tensor
from ckptlint.model.text import first_names, fold_names, join_words, plural, verb
from ckptlint.model.tiling import IntArray
from ckptlint.rule import Confidence, Finding, Location, Severity, require, rule
from ckptlint.vocabulary.config_fields import declares_pruning
from ckptlint.vocabulary.dtypes import FLOATS, INTEGERS
from ckptlint.vocabulary.keys import NEVER_ZERO, parse, role
from ckptlint.vocabulary.schemes import Part, Scheme

_SHOWN = 6
_FAR = 1_000.0
_LEAST = 4  # siblings
_LEAST_CODES = 16
_ALL = 3  # least weights for the finding that an export has no codes at all
_MOST_HIT = 2  # with zeros in the scales of more weights, float16 underflow is the likelier cause


@rule("QNT004", "quantised-scales", Severity.ERROR, depth=Depth.DATA, needs=("quantised weights",))
def quantised_scales(ckpt: Checkpoint) -> Iterator[Finding]:
    """A quantised weight has codes that are all the same, or scales that are zero or far from its siblings'.

    What it checks:
        A scale that is all zero, beside codes that differ, is an error; with some zeros over codes that are not zero
        it is a warning (info for float16 in over two weights: small numbers underflow). Integer codes that are all the
        same, beside scales that are not zero, are an error in all weights, else a warning, and info where the weight
        may be zeros (output projections, declared pruning). It is a warning if the largest scale of a weight is 1,000
        times larger or smaller than the median of the same role in at least four other layers or experts. Scales that
        are powers of two in bytes are not judged.
    Why it matters:
        The weight is its codes times its scale, so the layer outputs zeros or dominates all others.
    Usual causes:
        Codes were never copied. Scales were inverted, saved before they were measured, or read with the wrong dtype.
    How to fix:
        Export the model again from the weights that it was quantised from.
    """
    payload = require(ckpt.payload)
    stored = quantisation(ckpt)
    dead: dict[tuple[Scheme, Part], list[Tensor]] = defaultdict(list)
    sizes: dict[tuple[Scheme, Part, str], list[tuple[Tensor, float]]] = defaultdict(list)
    gaps: dict[tuple[Scheme, Part], list[Tensor]] = defaultdict(list)
    for weight in stored.weights:
        for part, tensor in weight.parts.items():
            most = _largest(payload, tensor) if part.needed and tensor.dtype in FLOATS else None
            if most == 0 and _largest(payload, weight.codes) != 0 and not _is_constant(payload, weight.codes):
                dead[weight.scheme, part].append(tensor)
            elif most:
                if not part.may_be_zero and _has_gaps(payload, weight.codes, tensor):
                    gaps[weight.scheme, part].append(tensor)
                sizes[weight.scheme, part, role(weight.weight)].append((tensor, most))
    for (scheme, part), tensors in dead.items():
        yield _finding(
            tensors,
            f"{tensors[0].fqn.rpartition('.')[2]} of {plural(len(tensors), 'weight')} in {scheme.title} is zero, "
            "but the codes are not",
            f"{scheme.name} {part.names} zero",
        )
    for (scheme, part), tensors in gaps.items():
        zeros = int(payload.zeros[_records(tensors[0])].sum())
        underflows = tensors[0].dtype == "float16" and len(tensors) > _MOST_HIT
        yield _finding(
            tensors,
            f"{zeros:,} of {tensors[0].volume:,} values{{of}} {verb(zeros, 'is')} 0, but the codes there "
            "are not" + (f"; the same in {plural(len(tensors) - 1, 'other weight')}" if len(tensors) > 1 else ""),
            f"{scheme.name} {part.names} gaps",
            "possible" if underflows else "likely",
        )
    yield from _constant_codes(ckpt, payload, stored.weights)
    for (scheme, part, _), peers in sizes.items():
        usual = float(np.median([most for _, most in peers]))
        far = [(tensor, most) for tensor, most in peers if not usual / _FAR < most < usual * _FAR]
        if far and len(peers) > max(_LEAST, 2 * len(far)):
            yield _finding(
                [tensor for tensor, _ in far],
                f"the largest value{{of}} is {far[0][1]:.3g}, but the median of its {len(peers) - 1} "
                f"siblings {usual:.3g}",
                f"{scheme.name} {part.names} far",
                "likely",
                inferred_from="the scales of the same role",
            )


def _constant_codes(ckpt: Checkpoint, payload: PayloadTable, weights: list[QuantisedWeight]) -> Iterator[Finding]:
    """Findings on weights whose integer codes are all the same, although their scales are not zero."""
    judged = [weight for weight in weights if weight.codes.dtype in INTEGERS and weight.codes.volume >= _LEAST_CODES]
    constant = []
    for weight in filter(lambda weight: _is_constant(payload, weight.codes), judged):
        scales = [tensor for part, tensor in weight.parts.items() if part.needed and tensor.dtype in FLOATS]
        constant += [weight] if all(_largest(payload, scale) != 0 for scale in scales) else []
    is_all = len(constant) == len(judged) >= _ALL
    is_pruned = declares_pruning(ckpt.config.values if ckpt.config else {})
    by_confidence: dict[Confidence, list[QuantisedWeight]] = defaultdict(list)
    for weight in constant:
        # some models start with weights of zeros, whose codes are 0 unless the scheme shifts them
        is_shifted = weight.scheme.shifted and not any(part.declared for part in weight.parts)
        is_dead = parse(weight.weight).function in NEVER_ZERO or (is_shifted and _largest(payload, weight.codes) == 0)
        may_be_meant = is_pruned or not is_dead
        by_confidence["certain" if is_all else "possible" if may_be_meant else "likely"].append(weight)
    for confidence, ones in by_confidence.items():
        titles = join_words(list(dict.fromkeys(weight.scheme.title for weight in ones)))
        yield _finding(
            [weight.codes for weight in ones],
            f"the codes of {len(ones)} of {plural(len(judged), 'weight')} in {titles} are all the same, but the scales "
            "are not zero",
            f"{titles} codes {confidence}",
            confidence,
        )


def _is_constant(payload: PayloadTable, codes: Tensor) -> bool:
    records = _records(codes)
    is_read = _largest(payload, codes) is not None and bool(payload.one_value[records].all())
    return is_read and len(set(payload.most[records].tolist())) == 1


def _has_gaps(payload: PayloadTable, codes: Tensor, scale: Tensor) -> bool:
    """Whether a scale has zeros for blocks of codes that are not all zero."""
    # Where the zero codes are is not known, only how many there are: fewer than the blocks hold is proof.
    zeros = int(payload.zeros[_records(scale)].sum())
    if not zeros or scale.dtype not in WIDE or codes.volume % scale.volume or _largest(payload, codes) is None:
        return False
    return int(payload.zeros[_records(codes)].sum()) < zeros * (codes.volume // scale.volume)


def _records(tensor: Tensor) -> IntArray:
    return tensor.chunks.record[tensor.tiling.live]


def _largest(payload: PayloadTable, tensor: Tensor) -> float | None:
    """The largest magnitude in a tensor; None if some of it was not read, or is NaN or infinity."""
    records = _records(tensor)
    if not len(records) or (records < 0).any() or not payload.scanned[records].all():
        return None
    if (payload.nan + payload.plus_inf + payload.minus_inf)[records].any():
        return None
    return float(payload.most[records].max())


def _finding(
    tensors: list[Tensor], message: str, group: str, confidence: Confidence = "certain", inferred_from: str = ""
) -> Finding:
    keys = [tensor.fqn for tensor in tensors]
    return Finding(
        message,
        at=Location(tensors[0]),
        identity=tuple(keys[1:]),
        keys=tuple(keys[1:]),
        confidence=confidence,
        notes=(("tensors", first_names(fold_names(keys), _SHOWN)),),
        why="the weight is its codes times its scale, so the layer outputs zeros or dominates all others",
        hint="export the model again from the weights that it was quantised from",
        group=group,
        inferred_from=inferred_from,
    )
