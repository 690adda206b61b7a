"""Finds parameters that differ in shape or dtype from the same parameter of most other layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from ckptlint.analysis.fit.trusted_config import mesh_axes
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.cover import Shape
from ckptlint.model.facts import fact
from ckptlint.model.text import ranges
from ckptlint.vocabulary.dtypes import FLOATS, ITEM_BITS
from ckptlint.vocabulary.keys import is_adapter, module_path, parse
from ckptlint.vocabulary.schemes import quantised_weight

_FEW_OUTLIERS = 0.2
_MAJORITY = 3


class Outlier(NamedTuple):
    """A parameter that differs from its siblings.

    Attributes:
        usual: the shape (axes of layers and experts left out) or dtype that the siblings share.
        agreeing: the layers that have it, as ranges.
        others: how many these are.
        changed: how many modules of its layer differ likewise; two or more are a layer of another width.
    """

    param: Param
    usual: Shape | str
    agreeing: str
    others: int
    changed: int = 1


@fact
def shape_outliers(ckpt: Checkpoint) -> list[Outlier]:
    """Parameters in layers that have another shape than the same parameter of the other layers."""
    outliers = []
    for members, classes in _alike(ckpt):
        first = members[0].tensor
        if first.dtype == "uint8" and len(first.global_shape) == 1 and quantised_weight(first.fqn):
            continue  # a text about a quantised weight
        numbers = [member.key.layer for member in members if member.key.layer is not None]
        for item in _outliers(members, [member.own_shape for member in members]):
            # the first and last of a plain stack take the shape of what comes before and after
            if len(classes) > 1 or item.param.key.layer not in (min(numbers), max(numbers)):
                outliers.append(item)
    modules: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for item in outliers:
        modules[_layer_of(item.param)].add(".".join(module_path(parse(item.param.key.role))))
    return [item._replace(changed=len(modules[_layer_of(item.param)])) for item in outliers]


def dtype_outliers(ckpt: Checkpoint) -> list[Outlier]:
    """Parameters in layers that have another float dtype than the same parameter of the other layers."""
    outliers = []  # without those of eight bits: recipes keep some layers in more
    for members, _ in _alike(ckpt):
        if all(member.tensor.dtype in FLOATS and ITEM_BITS[member.tensor.dtype] > 8 for member in members):
            outliers += _outliers(members, [member.tensor.dtype for member in members])
    return outliers


def local_factor(ckpt: Checkpoint, item: Outlier) -> tuple[int, int] | None:
    """The axis and the factor, when an outlier is the usual shape divided on one axis by the size of a mesh axis."""
    shape, usual = item.param.own_shape, item.usual
    if isinstance(usual, str) or len(usual) != len(shape) or item.changed > 1:
        return None
    differing = [i for i, (a, b) in enumerate(zip(shape, usual, strict=True)) if a != b]
    if len(differing) != 1 or not shape[differing[0]]:
        return None
    factor, rest = divmod(usual[differing[0]], shape[differing[0]])
    return (item.param.own_axes[differing[0]], factor) if not rest and mesh_axes(ckpt, factor) else None


def _layer_of(param: Param) -> tuple[object, ...]:
    return param.key.scope, param.key.block, param.key.layer


@fact
def _alike(ckpt: Checkpoint) -> list[tuple[list[Param], set[str]]]:
    """Parameters of one role in layers with one set of roles, and the classes that such a layer has."""
    roles: dict[tuple[object, ...], set[str]] = defaultdict(set)
    classes: dict[tuple[object, ...], set[str]] = defaultdict(set)
    members = [p for p in inventory_of(ckpt).params if p.key.layer is not None and not is_adapter(p.key)]
    for param in members:
        roles[_layer_of(param)].add(param.key.role)
        if param.key.function != "other":
            classes[_layer_of(param)].add(param.key.function)
    kinds = {layer: frozenset(layer_roles) for layer, layer_roles in roles.items()}
    groups = grouped(((param.key.scope, param.key.role, kinds[_layer_of(param)]), param) for param in members)
    return [(group, classes[_layer_of(group[0])]) for group in groups.values() if len(group) > _MAJORITY]


def _outliers(members: list[Param], values: list[Shape] | list[str]) -> list[Outlier]:
    """The members with another value than at least three others; several only as one run of layers, few and equal."""
    counts = Counter[Shape | str](values)
    usual, agreeing = counts.most_common(1)[0]
    odd = [member for member, value in zip(members, values, strict=True) if value != usual]
    if not odd or agreeing < _MAJORITY:
        return []
    layers = sorted({member.key.layer or 0 for member in odd})
    is_run = layers[-1] - layers[0] == len(layers) - 1
    if len(odd) > 1 and (len(counts) > 2 or not is_run or len(odd) > _FEW_OUTLIERS * len(members)):
        return []
    others = {m.key.layer or 0 for m, value in zip(members, values, strict=True) if value == usual}
    text = ranges(others)  # once: a run of outliers may be long
    return [Outlier(member, usual, text, len(others)) for member in odd]
