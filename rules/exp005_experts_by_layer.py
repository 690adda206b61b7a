from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ckptlint.analysis.layers.experts import MoeLayer, moe_layers
from ckptlint.analysis.layers.outliers import shape_outliers
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import numbered, plural, ranges, shape_text, verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import block_of

Experts = tuple[tuple[str, int, frozenset[tuple[int, ...]]], ...]
"""Of each weight of the experts: its name, the number of experts, the shapes they have."""


@rule("EXP005", "experts-by-layer", Severity.WARNING, whole=True, needs=("no model config", "sound"))
def experts_by_layer(ckpt: Checkpoint) -> Iterator[Finding]:
    """Layers that are otherwise equal differ in the number or shape of their experts.

    What it checks:
        Layers of one block whose other parameters, the router's included, have the same names and shapes store as many
        experts, of the same shapes. Numbers are compared only where no router tells them (EXP001, EXP002). Single
        layers that SHP002 reports are left out, and so are jobs that declare heterogeneous layers.
    Why it matters:
        Loading into equal layers fails, or leaves the experts that are not stored at their initial values.
    Usual causes:
        A stage or node saved only its own experts, or an export merged two saves.
    How to fix:
        Find the ranks that wrote these layers, and save again.
    See:
        megatron.core.transformer.moe.experts.SequentialMLP.sharded_state_dict
    """
    layers = [layer for layer in moe_layers(ckpt) if layer.layer is not None]
    if len(layers) < 2:
        raise NotApplicable("there are no two layers with experts")
    if "heterogeneous" in ckpt.declared:
        raise NotApplicable("the job declares layers of their own kinds")
    outliers = {item.param for item in shape_outliers(ckpt)}
    for alike in _alike(ckpt, layers):
        usual = Counter(map(_experts, alike)).most_common(1)[0][0]
        odd = grouped(
            (_experts(layer), layer)
            for layer in alike
            if _experts(layer) != usual and not outliers.intersection(p for role in layer.roles for p in role.params)
        )
        others = [layer.layer or 0 for layer in alike if _experts(layer) == usual]
        for experts, members in odd.items():
            yield _finding(members, experts, usual, others)


def _alike(ckpt: Checkpoint, layers: list[MoeLayer]) -> list[list[MoeLayer]]:
    """Layers of one block that are equal outside of their experts."""
    outside: dict[tuple[object, ...], set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for param in inventory_of(ckpt).params:
        if not param.key.in_experts and param.expert_axis is None:
            outside[block_of(param.key), param.key.layer].add((param.key.role, param.own_shape))
    groups: dict[tuple[object, ...], list[MoeLayer]] = defaultdict(list)
    for layer in layers:
        roles = frozenset(role.role for role in layer.roles)
        groups[layer.block, roles, frozenset(outside[layer.block, layer.layer])].append(layer)
    return [group for group in groups.values() if len(group) > 1]


def _experts(layer: MoeLayer) -> Experts:
    return tuple(
        (role.role, role.count if layer.rows is None else 0, frozenset(param.own_shape for param in role.params))
        for role in sorted(layer.roles, key=lambda role: role.role)
    )


def _finding(layers: list[MoeLayer], experts: Experts, usual: Experts, others: list[int]) -> Finding:
    number = next(i for i, (role, usual_role) in enumerate(zip(experts, usual, strict=True)) if role != usual_role)
    (name, count, shapes), (_, usual_count, usual_shapes) = experts[number], usual[number]
    lead = next(role.params[0] for role in layers[0].roles if role.role == name)
    numbers = [layer.layer or 0 for layer in layers]
    shape, usual_shape = (" and ".join(map(shape_text, sorted(role_shapes))) for role_shapes in (shapes, usual_shapes))
    has = plural(count, "expert") if count != usual_count else "experts"
    wants = [str(usual_count)] if count != usual_count else []
    with_shape = f" with shape {shape}" if shapes != usual_shapes else ""
    wants += [f"shape {usual_shape}"] if shapes != usual_shapes else []
    like = "them" if len(numbers) > 1 else "it"
    return Finding(
        f"{numbered('layer', numbers)} {verb(len(numbers), 'has')} {has}{{of}}{with_shape}; "
        f"{plural(len(others), 'layer')} like {like} {verb(len(others), 'has')} {' and '.join(wants)}",
        at=Location(lead.tensor),
        identity=(name, ranges(numbers)),
        hint="check how their stage or ranks saved them, unless a setting makes these layers different",
        inferred_from=f"{numbered('layer', others)}, equal in everything else",
    )
