from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from ckptlint.analysis.fit.trusted_config import number, trusted
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.model import Checkpoint
from ckptlint.model.text import layers_in, numbered, plural, ranges, verb
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import Block, block_of, inside_layer, is_adapter, module_path, parse

Layers = dict[int, list[Param]]

_NEEDED = frozenset({"q", "qkv", "attn_out", "mlp_in", "mlp_out"})
"""Projections that no attention or MLP can do without; keys and values may be shared with another layer."""

_COMPLETE = 3
_MOST = 0.8
_LIMIT = 100_000  # no model has as many layers, but a key may claim any number


@rule("SHP001", "layer-gap", Severity.ERROR, whole=True, needs=("no model config", "no DeepSpeed"))
def layer_gap(ckpt: Checkpoint) -> Iterator[Finding]:
    """Layers are missing from the middle or the start of a block, or one layer lacks part of a module.

    What it checks:
        The layer numbers of a block run from 0 without a gap, unless the job declares exactly the stored number of
        layers or another block has the missing ones. A start above 0 that nothing else confirms is a warning, and info
        if only layer 0, or the embedding too, is missing. It is also a warning if one layer lacks a single weight that
        the others have, while the rest of its module is there.
    Why it matters:
        The missing layers or weights keep their initial values after a load.
    Usual causes:
        Each pipeline or virtual stage numbered its layers from 0, so stages shared keys and deduplication kept one; a
        filter dropped keys; a stage never saved.
    How to fix:
        Number the layers across all (virtual) stages, and save again from the job.
    See:
        megatron.core.transformer.transformer_layer.get_transformer_layer_offset
    """
    blocks: dict[Block, Layers] = defaultdict(lambda: defaultdict(list))
    for param in inventory_of(ckpt).params:
        if param.key.layer is not None and not is_adapter(param.key):
            blocks[block_of(param.key)][param.key.layer].append(param)
    if not blocks:
        raise NotApplicable("no key has a layer number")
    numbers: dict[Block, set[int]] = defaultdict(set)
    for name in ckpt.tensors:  # those that cannot be judged included
        key = parse(name)
        if key.kind == "model" and key.layer is not None:
            numbers[block_of(key)].add(key.layer)
    for block, layers in blocks.items():
        if _is_stack_of_blocks(layers):
            yield from _missing_layers(ckpt, block, numbers)
        yield from _missing_weights(ckpt, layers)


def _is_stack_of_blocks(layers: Layers) -> bool:
    """Whether the layers have several modules, some of a known function; a plain list may skip numbers."""
    # A norm alone makes no block: convolutions with one lie in lists whose other members have no weights.
    return all(
        len({module_path(param.key) for param in params}) > 1
        and any(param.key.function not in ("other", "norm") for param in params)
        for params in layers.values()
    )


def _missing_layers(ckpt: Checkpoint, block: Block, numbers: dict[Block, set[int]]) -> Iterator[Finding]:
    """A finding on layer numbers below the highest stored one that are missing."""
    present = sorted(numbers[block])
    missing = set(range(min(present[-1], _LIMIT) + 1)) - numbers[block]
    for sibling, others in numbers.items():  # split models: each block has numbers of its own
        if sibling != block and sibling[0] == block[0] and not numbers[block] & others:
            missing -= others
    count = number(trusted(ckpt), "layers")
    if not missing or count == len(present):
        return
    steps = {b - a for a, b in pairwise(present)}
    stride = steps.pop() if len(steps) == 1 and len(present) > 2 else 1
    word = {2: "every second", 3: "every third"}.get(stride, f"every {stride}th")
    name = ".".join((*block[0], block[1]))
    sentence = f"{layers_in(missing, name)} {verb(len(missing), 'is')} missing; {ranges(present)} are there"
    is_declared = count == present[-1] + 1
    declared = f"{count} layers in {ckpt.declared['layers'].source}; {len(missing)} missing" if is_declared else ""
    sizes = [f"{axis} {ckpt.topology[axis].size}" for axis in ("pp", "vpp") if axis in ckpt.topology]
    yield Finding(
        sentence,
        at=Location(label=f"{ckpt.metadata_file}: {len(present)} layers in {name}"),
        identity=tuple(f"{name}.{layer}" for layer in sorted(missing)),
        confidence=_confidence(ckpt, missing, is_declared),
        notes=(
            ("numbers", f"{word} layer is there, as if virtual stages had shared keys" if stride > 1 else ""),
            ("declared", declared),
            ("mesh", ", ".join(sizes)),
        ),
        hint=f"find the ranks or stages that held {numbered('layer', missing)}, and their keys",
        inferred_from="" if is_declared else f"the numbers of the {plural(len(present), 'other layer')}",
    )


def _confidence(ckpt: Checkpoint, missing: set[int], is_declared: bool) -> Confidence:
    # A missing start may be no loss: a save of the upper layers alone, or numbers from 1, look the same.
    if is_declared or missing != set(range(len(missing))):
        return "certain"
    has_embedding = any(param.key.function == "embedding" for param in inventory_of(ckpt).params)
    return "likely" if has_embedding and missing != {0} else "possible"


def _missing_weights(ckpt: Checkpoint, layers: Layers) -> Iterator[Finding]:
    """Findings on a weight that few layers lack, although they have the rest of its module."""
    roles = {layer: frozenset(_roles(params)) for layer, params in layers.items()}
    usual, complete = Counter(roles.values()).most_common(1)[0]
    if complete < _COMPLETE:
        return
    odd = {layer: stored for layer, stored in roles.items() if stored != usual}
    # Layers with roles of their own are another kind of layer (hybrid models), and lack nothing.
    if len(odd) > max(1, (1 - _MOST) * len(roles)) or not all(stored < usual for stored in odd.values()):
        return
    others = ranges(layer for layer in roles if roles[layer] == usual)
    lead = {role: param for layer in layers if roles[layer] == usual for role, param in _roles(layers[layer]).items()}
    for layer, stored in sorted(odd.items()):
        parents = {_parent_path(lead[role]) for role in stored}
        for role in sorted(usual - stored):
            parent = _parent_path(lead[role])
            word = lead[role].key.block.rpartition(".")[2]
            fqn = lead[role].tensor.fqn.replace(f"{word}.{lead[role].key.layer}.", f"{word}.{layer}.", 1)
            if not parent or parent not in parents or lead[role].key.function not in _NEEDED or fqn in ckpt.tensors:
                continue  # a layer may do without a whole module
            if role.rpartition(".")[2] not in ("weight", "bias"):
                continue  # only quantised layers have scales
            yield Finding(
                f"no part{{of}} is stored; {complete} other layers have theirs",
                at=Location(fqn, label=f"{ckpt.metadata_file}: layer {layer} has {len(stored)} of {len(usual)} keys"),
                identity=(fqn,),
                confidence="likely",
                notes=(("siblings", f"layers {others} have all {len(usual)}"),),
                hint="find the filter or the rename that dropped this key in one layer, and save again",
                inferred_from=f"the keys of layers {others}",
                group=f"{role} missing",
            )


def _roles(params: list[Param]) -> dict[str, Param]:
    return {param.key.role: param for param in params if not param.key.in_experts}


def _parent_path(param: Param) -> tuple[str, ...]:
    """Path, below the layer, of the parent of the parameter's module; () if the parent is the layer itself."""
    tail = inside_layer(param.key)
    depth = len(module_path(param.key)) - (len(param.key.path.split(".")) - len(tail))
    return tail[: depth - 1]
