"""SHP009: the projections of an attention or MLP can be multiplied with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptlint.analysis.inventory import Param
from ckptlint.analysis.key_matching import is_confirmed
from ckptlint.analysis.layer_outliers import shape_outliers
from ckptlint.analysis.projections import ProjectionFamily, families, fused_factors, is_rank_part, short_name
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.keys import module_path

_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))
_UNTRANSPOSED = frozenset({"w1", "w2"})
_LEAST_HEAD = 8
_SCALES = re.compile(r".*(scale|zero|g_idx|absmax|norm).*")  # of a quantised weight, shaped by its blocks

Misfit = tuple[Param, int, Param, int, str]
"""A weight and its inner axis, its partner and that one's, and what is wrong."""


@rule("SHP009", "projection-misfit", Severity.WARNING, whole=True, needs=("params",))
def projection_misfit(ckpt: Checkpoint) -> Iterator[Finding]:
    """The projections of an attention or MLP have sizes that cannot be multiplied.

    What it checks:
        If the hidden size is known: gate and up have one shape, and the second projection of an MLP takes as many
        inputs as the first one gives (or half, if gate and up are one weight). The output of an attention with separate
        weights takes what query, key and value give. A weight that is transposed relative to its partners is named.
        Latent attention, experts in one tensor whose second weight is stored untransposed, and what SHP002, SHP004 or
        SHP005 report are left out.
    Why it matters:
        No model has these shapes, so one of the two weights was truncated, padded or transposed before it was saved.
    Usual causes:
        An export took one rank's part for the whole, or transposed a weight but not its partner, in every layer.
    How to fix:
        Compare both with the configuration of the model, and export again.
    See:
        torch.nn.Linear
    """
    alone = {item.param for item in shape_outliers(ckpt)}
    for family in families(ckpt):
        if family.hidden is None or family.is_latent:
            continue
        for odd, own, partner, other, text in (*_mlp(family), *_attention(family)):
            if alone.intersection((odd, partner)) or is_confirmed(ckpt, odd) or is_confirmed(ckpt, partner):
                continue
            if odd.own_shape[own] != partner.own_shape[other] and is_rank_part(ckpt, (odd, own), (partner, other)):
                continue
            yield _finding(family, odd, partner, text)


def _finding(family: ProjectionFamily, odd: Param, partner: Param, text: str) -> Finding:
    notes: tuple[Note, ...] = (
        ("partner", f"{partner.tensor.fqn}: {shape_text(partner.tensor.global_shape)}"),
        ("hidden", str(family.hidden)),
    )
    return Finding(
        f"weight{{of}} is {shape_text(odd.tensor.global_shape)}, {text}",
        at=Location.of(odd.tensor),
        notes=notes,
        hint="compare both with the configuration of the model; the one that does not fit is wrong in every layer",
        inferred_from=f"{short_name(partner)} and {family.hidden}",
    )


def _weights(family: ProjectionFamily, function: str) -> list[Param]:
    members = family.weights.get(function, [])
    return [param for param in members if not _SCALES.fullmatch(param.key.path.rpartition(".")[2])]


def _inner(param: Param, hidden: int) -> int | None:
    """The one axis that is not as long as hidden; None where both are, or neither is."""
    axes = [axis for axis, size in enumerate(param.own_shape) if size != hidden]
    return axes[0] if len(axes) == 1 and param.own_shape[axes[0]] else None


def _mlp(family: ProjectionFamily) -> Iterator[Misfit]:
    assert family.hidden is not None
    hidden = family.hidden.size
    firsts, seconds = _weights(family, "mlp_in"), _weights(family, "mlp_out")
    names = {module_path(param.key)[-1]: param for param in (*firsts, *seconds)}
    if any(param.key.in_experts and param.key.expert is None for param in firsts) and _UNTRANSPOSED & names.keys():
        return
    for gate, up in _HALVES:
        if gate in names and up in names and names[gate].own_shape != names[up].own_shape:
            a, b = names[gate], names[up]
            if hidden in a.own_shape and hidden in b.own_shape:
                width = _inner(seconds[0], hidden) if len(seconds) == 1 else None
                if width is not None and seconds[0].own_shape[width] in a.own_shape:
                    a, b = b, a  # what comes after it fits the other one
                axis = next(i for i, (x, y) in enumerate(zip(a.own_shape, b.own_shape, strict=True)) if x != y)
                yield a, axis, b, axis, f"but {short_name(b)} is {shape_text(b.tensor.global_shape)}"
            return
    if len(seconds) != 1:
        return
    second = seconds[0]
    for first in firsts:
        own, other = _inner(first, hidden), _inner(second, hidden)
        if own is None or other is None:
            continue
        size, width = first.own_shape[own], second.own_shape[other]
        shape = shape_text(first.tensor.global_shape)
        if own == other and any(size == k * width for k in fused_factors(first)):
            yield second, other, first, own, f"with the same orientation as {short_name(first)}, {shape}"
            return
        if not any(size == k * width for k in fused_factors(first)):
            yield second, other, first, own, f"but {short_name(first)} before it is {shape}"
            return


def _attention(family: ProjectionFamily) -> Iterator[Misfit]:
    assert family.hidden is not None
    hidden = family.hidden.size
    found = [_weights(family, function) for function in ("q", "k", "v", "attn_out")]
    if any(len(members) != 1 for members in found):
        return
    query, key, value, out = (members[0] for members in found)
    axes = [_inner(param, hidden) for param in (query, key, value)]
    own, other = axes[0], _inner(out, hidden)
    sides = {axis for axis in axes if axis is not None}
    if other is not None and (own is not None or not sides):  # a query without one side does not say what comes out
        sides.add(1 - other)
    if len(sides) > 1:
        yield from _turned(hidden, [query, key, value, out])
        return
    if not sides or any(hidden not in param.own_shape for param in (query, key, value, out)):
        return
    side = sides.pop()
    q, k, v = (param.own_shape[side] for param in (query, key, value))
    o = out.own_shape[1 - side]
    if not q or not k or not v or q % k or (q == o and k != v):  # the last two are SHP005's
        return
    is_plain, is_gated = q * v == o * k, q * v == 2 * o * k
    heads = q - o  # a gate of one number for each head
    if is_plain or is_gated or (k == v and heads > 0 and o % heads == 0 and o // heads >= _LEAST_HEAD):
        return
    text = f"but {short_name(out)} after it is {shape_text(out.tensor.global_shape)}"
    yield query, side if own is None else own, out, 1 - side, text


def _turned(hidden: int, weights: list[Param]) -> Iterator[Misfit]:
    """The weight that is transposed relative to most of them."""
    sides: dict[int, list[tuple[Param, int]]] = {0: [], 1: []}
    for number, param in enumerate(weights):
        axis = _inner(param, hidden)
        if axis is not None:
            sides[1 - axis if number == len(weights) - 1 else axis].append((param, axis))
    few, most = sorted(sides.values(), key=len)
    if len(few) == 1:
        (odd, own), (partner, other) = few[0], most[0]
        yield odd, own, partner, other, f"transposed relative to {short_name(partner)}"
    elif few:
        (odd, own), (partner, other) = sides[1][0], sides[0][0]
        yield odd, own, partner, other, f"transposed relative to {short_name(partner)}"
