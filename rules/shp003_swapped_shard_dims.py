from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ckptlint.analysis.fit.key_matching import is_confirmed, reference_shapes
from ckptlint.analysis.layers.hidden_size import Hidden
from ckptlint.analysis.layers.projections import (
    ProjectionFamily,
    axis_factor,
    families,
    inner_size,
    is_width,
    short_name,
    swap_factor,
)
from ckptlint.analysis.optimizer.inventory import Param, inventory_of, is_weight
from ckptlint.geometry.chunk_graph import axis_name
from ckptlint.model import Checkpoint
from ckptlint.model.cover import Shape
from ckptlint.model.text import numbered, shape_text
from ckptlint.rule import Confidence, Finding, Location, Note, Severity, require, rule
from ckptlint.vocabulary.keys import is_adapter


class Swap(NamedTuple):
    """A weight that is p times too long on one axis and p times too short on another."""

    param: Param
    expected: Shape  # without the axes of layers and experts
    basis: str  # where the expected shape comes from
    notes: tuple[Note, ...] = ()
    confidence: Confidence = "certain"  # if the expected shape is declared


@rule("SHP003", "swapped-shard-dims", Severity.ERROR, whole=True, needs=("params",))
def swapped_shard_dims(ckpt: Checkpoint) -> Iterator[Finding]:
    """A weight was transposed, but its placement still shards the old dim.

    What it checks:
        No weight is p times too long on a dim that is split into p shards, and p times too short on one that is not
        split. If the reference or the job's arguments give the right shape, that is an error. If it follows from the
        hidden size (of norms, embedding and routers) and the partner projection, or from other layers, that is a
        warning. Square weights, pairs that fit each other as they are, and experts that several ranks concatenated in
        one key are left out.
    Why it matters:
        Both shapes have the same chunks, so a load that trusts the file fills rows with another rank's columns, or
        fails on the size.
    Usual causes:
        The job transposed the local tensor and rebuilt the DTensor with its old placement: Shard(1) for what is now
        Shard(2).
    How to fix:
        Transpose the placement together with the tensor, and save again.
    See:
        torch.distributed.tensor.DTensor.from_local
    """
    first_by_key: dict[str, Swap] = {}
    # In order of trust: a reference knows the shape; hidden size and partner infer it; other layers only outvote it.
    for swap in (*_from_reference(ckpt), *_from_hidden(ckpt), *_from_layers(ckpt)):
        if not is_confirmed(ckpt, swap.param):
            first_by_key.setdefault(swap.param.tensor.fqn, swap)
    for swap in first_by_key.values():
        yield _finding(ckpt, swap)


def _finding(ckpt: Checkpoint, swap: Swap) -> Finding:
    param, tensor = swap.param, swap.param.tensor
    a, b, p = require(swap_factor(param, swap.expected))
    expected = list(tensor.global_shape)
    for axis, size in zip(param.own_axes, swap.expected, strict=True):
        expected[axis] = size
    x, y = tensor.global_shape[a], tensor.global_shape[b]
    numbers = f"{x:,} = {p} x {expected[a]:,} and {y:,} = {expected[b]:,} / {p}"
    from_, to = (p - 1) * (x // p), (p - 1) * y
    return Finding(
        f"shape{{of}} is {shape_text(tensor.global_shape)} where {shape_text(tuple(expected))} fits {swap.basis}; "
        f"{numbers}, and {axis_name(ckpt, a, p)} is split into {p} shards",
        at=Location(tensor),
        confidence=swap.confidence,
        notes=swap.notes,
        hint=f"use Shard({b}) instead of Shard({a}) where the job transposes this weight, and save again; no value is "
        f"lost, but values from index {from_:,} of dim {a} on belong at index {to:,} of dim {b}",
        inferred_from=swap.basis.partition(" from ")[0] if swap.confidence == "likely" else "",
        group=f"{numbers} {swap.basis}",
    )


def _from_reference(ckpt: Checkpoint) -> Iterator[Swap]:
    if ckpt.reference is None:
        return
    shapes = reference_shapes(ckpt)
    for param in inventory_of(ckpt).params:
        full = shapes.get(param.tensor.fqn)
        if full is None or len(full) != len(param.tensor.global_shape):
            continue
        expected = tuple(full[axis] for axis in param.own_axes)
        if swap_factor(param, expected):
            yield Swap(param, expected, f"the reference {ckpt.reference.source}")


def _from_hidden(ckpt: Checkpoint) -> Iterator[Swap]:
    """Weights that lack the hidden size on both axes, have it after the correction, and then fit their partner."""
    # A writer's fault hits a role in every layer. If one weight of the role does not fit after the correction, the role
    # has sizes of its own (experts that work on a latent size), and none of it is reported.
    swaps_of: dict[tuple[object, ...], list[Swap]] = defaultdict(list)
    doubtful: set[tuple[object, ...]] = set()
    for family in families(ckpt):
        if family.hidden is None:
            continue
        for param in (param for weights in family.weights.values() for param in weights):
            if (corrected := _corrected(param, family.hidden.size)) is not None:
                if (swap := _confirmed(family, family.hidden, param, corrected)) is not None:
                    swaps_of[param.key.scope, param.key.role].append(swap)
                else:
                    doubtful.add((param.key.scope, param.key.role))
    yield from (swap for role, swaps in swaps_of.items() if role not in doubtful for swap in swaps)


def _corrected(param: Param, hidden: int) -> Shape | None:
    """The shape with the split axis p times shorter, the other longer; None unless only it has the hidden size."""
    shape = param.own_shape
    if hidden in shape or 0 in shape:
        return None
    for axis in (0, 1):
        p = axis_factor(param.tensor, param.own_axes[axis])
        if p < 2 or shape[axis] % p:
            continue
        expected = (shape[0] // p, shape[1] * p) if axis == 0 else (shape[0] * p, shape[1] // p)
        if hidden in expected and swap_factor(param, expected):
            return expected
    return None


def _confirmed(family: ProjectionFamily, hidden: Hidden, param: Param, expected: Shape) -> Swap | None:
    """The swap, if some partner fits the corrected shape, as stored or after the same correction; else None."""
    inner = expected[0] if expected[1] == hidden.size else expected[1]
    for partner in family.partners(param):
        shape = partner.own_shape
        if _fit(param, param.own_shape, partner, shape):
            return None  # they fit as they are: a latent size, not a swap
        width = inner_size(partner, hidden.size)
        stored = shape_text(partner.tensor.global_shape)
        if width is not None and is_width(param, inner, partner, width):
            if param.key.expert is not None and axis_factor(partner.tensor, partner.own_axes[shape.index(width)]) > 1:
                return None  # several ranks' experts in one key are longer on the same axes
            note = f"{short_name(partner)} {stored} has both {width:,} and {hidden.size:,}"
        else:
            corrected = _corrected(partner, hidden.size)
            if corrected is None or not _fit(param, expected, partner, corrected):
                continue
            note = f"{short_name(partner)} {stored} fits after the same correction"
        confidence: Confidence = "certain" if hidden.declared else "likely"
        return Swap(param, expected, str(hidden), (("partner", note),), confidence)
    return None


def _fit(param: Param, shape: Shape, partner: Param, partner_shape: Shape) -> bool:
    """Whether two projections share both sizes, in any order of their axes."""
    return any(
        partner_shape[j] == shape[i] and is_width(param, shape[1 - i], partner, partner_shape[1 - j])
        for i in (0, 1)
        for j in (0, 1)
    )


def _from_layers(ckpt: Checkpoint) -> Iterator[Swap]:
    """Layers of a role whose other layers have a shape that is a swap of theirs."""
    groups: dict[tuple[object, ...], dict[Shape, list[Param]]] = defaultdict(lambda: defaultdict(list))
    for param in inventory_of(ckpt).params:
        if param.key.layer is not None and is_weight(param) and not is_adapter(param.key):
            groups[param.key.scope, param.key.role][param.own_shape].append(param)
    partners = {id(p): f for f in families(ckpt) for weights in f.weights.values() for p in weights}
    for shapes in groups.values():
        if len(shapes) != 2:
            continue
        (first, ours), (second, theirs) = shapes.items()
        suspected = [
            (_fits_partners(group, partners), len({param.key.layer for param in group}), group, others, expected)
            for group, others, expected in ((ours, theirs, second), (theirs, ours, first))
            if all(swap_factor(param, expected) for param in group)
        ]
        if not suspected:
            continue
        # Either group may be the transposed one, since a placement that moved with the axes looks the same. The group
        # that does not fit its partners is suspected first, then the smaller one.
        fits, layers, group, others, expected = min(suspected, key=lambda candidate: candidate[:2])
        if not fits:
            numbers = {param.key.layer or 0 for param in others}
            evidence = _evidence(_fits_partners(others, partners), layers, len(numbers))
            for param in group:
                yield Swap(param, expected, numbered("layer", numbers), (("evidence", evidence),), "likely")


def _evidence(fits: bool, suspected: int, others: int) -> str:
    if fits:
        return "the other projections of these layers fit the expected shape"
    if suspected == others:
        return "nothing shows which of the two shapes is right"
    if suspected > others:
        return f"most layers ({suspected} of {suspected + others}) have this shape; only the split dim contradicts it"
    return f"most layers ({others} of {suspected + others}) have the expected shape"


def _fits_partners(members: list[Param], partners: dict[int, ProjectionFamily]) -> bool:
    """Whether each weight shares both sizes with another projection of its layer."""
    return all(
        id(param) in partners
        and any(
            _fit(param, param.own_shape, partner, partner.own_shape) for partner in partners[id(param)].partners(param)
        )
        for param in members
    )
