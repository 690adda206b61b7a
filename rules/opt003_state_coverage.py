from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from ckptlint.analysis.fit.trusted_config import trusted_topology
from ckptlint.analysis.optimizer.inventory import Inventory, Param, inventory_of
from ckptlint.geometry.writers import ranks_of_files, saved_by
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, layers_in, named_ranks, plural, ranges, verb
from ckptlint.model.tiling import distinct
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import Key, parse

_MOST = 0.9
_SHOWN = 8
_FROZEN = "; nothing is wrong if these were frozen"
_META = "param_to_group_meta."
_GROUPS = "param_groups."
_RUN = "consecutive layers"
_ADAPTERS = ("lora_", "adapter", "dora_", "prompt_")
_BUFFERS = ("inv_freq", "freqs", "rotary", "running_", "num_batches", "position_ids", "expert_bias", "score_correction")


@rule("OPT003", "state-coverage", Severity.ERROR, whole=True, needs=("no DeepSpeed", "params", "states", "sound"))
def state_coverage(ckpt: Checkpoint) -> Iterator[Finding]:
    """Layers lack the optimizer state that the rest of their block has, or a state has no parameter.

    What it checks:
        Where the optimizer names its parameters and 90% of the states find theirs, no whole pipeline stage, and no last
        layers together with the final norm and output, lack the state that the other layers of the block have. A state
        without a parameter is a warning, as are last layers without it where the final norm has it, unless the groups
        leave them out. Other layers, whole blocks and single parameters without state are info: they may be frozen,
        never stepped or lost. Layers and blocks become errors if param_to_group_meta names their parameters.
    Why it matters:
        Parameters without state restart their moments after a resume, which shows only in the loss.
    Usual causes:
        Only the first of several local optimizer parts was saved; parts of different pipeline stages share keys; state
        is created lazily and did not exist yet.
    How to fix:
        Merge the parts under separate keys per stage; create all state before saving.
    See:
        torch.distributed.checkpoint.state_dict.get_optimizer_state_dict
    """
    inventory = inventory_of(ckpt)
    if inventory.mapped_share < _MOST:
        raise NotApplicable(f"only {inventory.mapped_share:.0%} of the optimizer states find a parameter by name")
    stateful = {param for state in inventory.states for param in state.params}
    yield from _states_without_parameter(ckpt, inventory, stateful)
    if inventory.buckets or inventory.numbered:
        return
    trained = _params_in_groups(ckpt, _META)
    reported: set[Param] = set()
    for finding, params in _layers_without_state(ckpt, inventory, stateful, trained):
        reported.update(params)
        yield finding
    yield from _single_params(inventory, stateful, reported)


def _states_without_parameter(ckpt: Checkpoint, inventory: Inventory, stateful: set[Param]) -> Iterator[Finding]:
    """Findings on states whose parameter is not stored."""
    known = {parse(entry.fqn).path for entry in ckpt.byte_objects}
    layers_of: dict[str, set[int]] = defaultdict(set)
    incomplete = set()
    for param in inventory.params:
        layers_of[param.key.role] |= set() if param.key.layer is None else {param.key.layer}
        if param not in stateful and not _is_buffer(param):
            incomplete.add((param.key.block, param.key.layer))
    tied = any(_may_be_tied(param.key) for param in inventory.params)
    for state in inventory.states:
        if state.params or state.path in known or "_flat_param" in state.path:
            continue
        key = parse(state.path)
        if tied and _may_be_tied(key):  # the weight is stored under its other name
            continue
        where = layers_in([key.layer], key.block) if key.layer is not None else state.path
        layers = layers_of.get(key.role, ())
        others = f"the model has it in layers {ranges(layers)}; the state is of {where}" if layers else ""
        # The state may be of a parameter that the model names otherwise (a fused name over split weights). That is
        # ruled out if other layers store this very role, or if every parameter of this layer has its own state.
        certain = key.role in layers_of or (key.block, key.layer) not in incomplete
        yield Finding(
            "state{of} belongs to no parameter",
            at=Location(state.tensor),
            severity=Severity.WARNING,
            confidence="certain" if certain else "possible",
            notes=(("parameter", f"no {state.path} in the model"), ("layers", others)),
            why="either the model part lacks the parameter, or the state is a leftover that nothing loads",
            hint="compare the model's layers with those of the run that wrote the optimizer",
            group=f"{state.chain} {key.role} {key.layer}",
        )


def _may_be_tied(key: Key) -> bool:
    """Whether the key may be one of the two names of a weight that embedding and output layer share."""
    return key.function in ("embedding", "output")


class _Gap(NamedTuple):
    """Layers of one block without state."""

    layers: tuple[int, ...]
    pattern: str  # how the numbers follow each other; "" if they are neither consecutive nor a stride
    is_bottom: bool = False  # the lowest layers are often frozen on purpose
    is_stage: bool = False  # whole pipeline stages, or the last layers together with final norm and output
    is_passed: bool = False  # the last layers, where the final norm has state: its gradient went through them


def _layers_without_state(
    ckpt: Checkpoint, inventory: Inventory, stateful: set[Param], trained: set[str]
) -> Iterator[tuple[Finding, list[Param]]]:
    """(finding, its parameters) for layers without state in a block with some, and for blocks without any."""
    blocks = grouped(
        ((param.key.scope, param.key.block or param.key.path.partition(".")[0]), param)
        for param in inventory.params
        if not _is_buffer(param)
    )
    in_groups = _params_in_groups(ckpt, _GROUPS)
    # Where adapters are trained, the blocks of the base are frozen by design.
    has_adapters = any(name in param.key.path for param in stateful for name in _ADAPTERS)
    for (_, block), params in blocks.items():
        having = [param for param in params if param in stateful]
        if not having:
            if not has_adapters and params[0].key.block:
                yield _block_finding(ckpt, block, params, trained), params
            continue
        # Only roles that have state somewhere count, and none of the experts: an expert that no token reached has no
        # state, and a lone expert must not make its layer look lost.
        roles = {param.key.role for param in having if not param.key.in_experts}
        of_layer: dict[int, list[Param]] = defaultdict(list)
        for param in params:
            if param.key.layer is not None and param.key.role in roles:
                of_layer[param.key.layer].append(param)
        without = [layer for layer, members in of_layer.items() if not stateful.intersection(members)]
        if without and len(without) < len(of_layer):
            lost = [param for layer in sorted(without) for param in of_layer[layer]]
            # Frozen and lost layers look alike. Loss follows pipeline stages (Automodel#3250: only the first optimizer
            # part of each rank was saved), or takes the end of the model together with final norm and output.
            gap = _gap(sorted(without), sorted(of_layer))
            is_stage = gap.pattern == _RUN and (
                _fills_stages(ckpt, gap.layers, len(of_layer)) or _reaches_output(inventory, stateful, gap, of_layer)
            )
            last = [param for param in params if param.key.layer in gap.layers]
            # A trained final norm passes its gradient into the last layers, so these should have state as well, unless
            # the groups leave them out. A prediction layer and the unused last layer of LLaVA's tower do not qualify.
            is_left_out = bool(in_groups) and not any(param.key.path in in_groups for param in last)
            is_last = gap.layers[-1] == max(of_layer) and {param.key.role for param in last} <= roles
            is_passed = is_last and not is_left_out and _norms_trained(inventory, stateful, last)
            gap = gap._replace(is_stage=is_stage, is_passed=is_passed)
            yield _layers_finding(ckpt, block, gap, lost, len(of_layer), trained), lost


def _fills_stages(ckpt: Checkpoint, layers: tuple[int, ...], count: int) -> bool:
    """Whether the layers are exactly those of one or more pipeline stages of equal size."""
    stages = trusted_topology(ckpt).get("pp")
    if stages is None or stages.size < 2 or count % stages.size:
        return False
    each = count // stages.size
    return layers[0] % each == 0 and len(layers) % each == 0


def _reaches_output(inventory: Inventory, stateful: set[Param], gap: _Gap, of_layer: dict[int, list[Param]]) -> bool:
    """Whether the gap ends at the last layer and the final norm and output layer have no state either."""
    after_layers = [p for p in inventory.params if not p.key.block and p.key.function in ("norm", "output")]
    # Without norm and output in the checkpoint, several layers that divide the block evenly may still be a stage.
    is_even_share = len(gap.layers) > 1 and len(of_layer) % len(gap.layers) == 0
    is_at_end = gap.layers[-1] == max(of_layer) and bool(after_layers or is_even_share)
    return is_at_end and not stateful.intersection(after_layers)


def _norms_trained(inventory: Inventory, stateful: set[Param], last: list[Param]) -> bool:
    """Whether there are norms in the module that holds the block of these layers, and all of them have state."""
    key = last[0].key
    outside = [p for p in inventory.params if p.key.scope == key.scope and p.key.function == "norm" and not p.key.block]
    parent = key.block.split(".")[:-1]
    final_norms = {param for param in outside if param.key.path.split(".")[:-2] == parent}
    return bool(final_norms) and final_norms <= stateful


def _gap(without: list[int], present: list[int]) -> _Gap:
    """The gap of the layers `without` state among all layers that are `present`, both sorted."""
    index_of = {layer: i for i, layer in enumerate(present)}
    indices = [index_of[layer] for layer in without]
    steps = {b - a for a, b in pairwise(indices)}
    if steps <= {1}:
        return _Gap(tuple(without), _RUN, indices[0] == 0)
    # A stride over the whole block is a choice: jobs that insert layers train those alone.
    if len(steps) == 1 and len(indices) >= (len(present) - 1) // min(steps):
        step = steps.pop()
        return _Gap(tuple(without), "every second layer" if step == 2 else f"one layer in {step}")
    return _Gap(tuple(without), "")


def _layers_finding(
    ckpt: Checkpoint, block: str, gap: _Gap, lost: list[Param], count: int, trained: set[str]
) -> Finding:
    named = [param for param in lost if param.key.path in trained]
    may_be_frozen = not named and (gap.is_bottom or not gap.is_stage)
    subject = f"{layers_in(gap.layers, block)} {verb(len(gap.layers), 'has')}"
    others = count - len(gap.layers)
    ranks = _savers(ckpt, lost)
    cause = "the lowest layers, often frozen" if gap.is_bottom else gap.pattern or "no pattern"
    return Finding(
        f"{subject} no optimizer state; the other {plural(others, 'layer', 'has')} it",
        at=Location(lost[0].tensor, ranks=ranks),
        identity=(block, ranges(gap.layers)),
        confidence="certain" if not may_be_frozen else "likely" if gap.is_passed and not gap.is_bottom else "possible",
        notes=(
            ("layers", f"{len(gap.layers)} of {count}: {cause}"),
            ("parameters", _patterns(lost)),
            ("trained", _trained(named)),
        ),
        hint=f"look for the optimizer part of {_ranks_text(ranks, 'these layers')}" + ("" if named else _FROZEN),
        inferred_from="" if named else "the other layers" + ("" if block == "layers" else f" of {block}"),
    )


def _block_finding(ckpt: Checkpoint, block: str, params: list[Param], trained: set[str]) -> Finding:
    named = [param for param in params if param.key.path in trained]
    return Finding(
        f"no parameter of {block} has optimizer state" + (", though it was trained" if named else ": frozen or lost"),
        at=Location(params[0].tensor, ranks=(ranks := _savers(ckpt, params))),
        identity=(block,),
        confidence="certain" if named else "possible",
        notes=(("parameters", _patterns(params)), ("trained", _trained(named))),
        hint=f"look for the optimizer part of {_ranks_text(ranks, 'this block')}" + ("" if named else _FROZEN),
        inferred_from="" if named else "the other blocks",
    )


def _savers(ckpt: Checkpoint, params: list[Param]) -> tuple[int, ...]:
    """The ranks that saved these weights; () if that is every rank that saved anything."""
    ranks = set().union(*(saved_by(ckpt, param.tensor) for param in params))
    return tuple(sorted(ranks)) if ranks < set(distinct(ranks_of_files(ckpt)).tolist()) - {-1} else ()


def _ranks_text(ranks: tuple[int, ...], what: str) -> str:
    return f"{named_ranks(ranks)}, which saved the weights of {what}" if ranks else f"the ranks that held {what}"


def _trained(named: list[Param]) -> str:
    return f"{_META[:-1]} names {len(named)} of them, so the optimizer updated them" if named else ""


def _single_params(inventory: Inventory, stateful: set[Param], reported: set[Param]) -> Iterator[Finding]:
    """An info on single parameters without state: few of all, or those whose layer and role have state elsewhere."""
    tied = any(not state.params and _may_be_tied(parse(state.path)) for state in inventory.states)
    judged = [param for param in inventory.params if not _is_buffer(param) and not (tied and _may_be_tied(param.key))]
    absent = [param for param in judged if param not in stateful and param not in reported]
    roles = {(param.key.scope, param.key.role) for param in stateful}
    layers = {(param.key.block, param.key.layer) for param in stateful if param.key.layer is not None}
    # Few without state are worth a look. Many were frozen on purpose where a whole role or layer has none. Weights here
    # and there were lost in a merge of optimizer shards, or frozen by Spectrum (axolotl).
    shown = absent
    if 10 * len(absent) > len(judged):
        shown = [
            param
            for param in absent
            if (param.key.scope, param.key.role) in roles
            and (param.key.in_experts or (param.key.block, param.key.layer) in layers)
        ]
    if shown:
        yield Finding(
            f"{len(shown)} of {len(judged)} parameters have no optimizer state",
            at=Location(shown[0].tensor),
            identity=tuple(param.tensor.fqn for param in shown),
            confidence="possible",
            notes=(("parameters", _patterns(shown)),),
            why="buffers, frozen parameters and experts that no token reached have none; others restart their moments",
        )


def _params_in_groups(ckpt: Checkpoint, word: str) -> set[str]:
    """Paths of the parameters that the optimizer's groups name, read from keys that hold `word` before the path."""
    # Megatron-Core's groups (_META) leave out what needs no gradient, so a name there proves training. torch's
    # (_GROUPS, 2.13) list every parameter that was handed over, frozen ones too: only an absence there means something.
    paths = set()
    for entry in ckpt.byte_objects:
        _, separator, rest = entry.fqn.partition(word)
        if separator and parse(entry.fqn).kind == "optimizer":
            paths.add(parse(rest.rpartition(".")[0]).path)
    return paths


def _is_buffer(param: Param) -> bool:
    """Whether the parameter can have no gradient: an integer, a scalar, or a name that only buffers have."""
    tensor = param.tensor
    is_number = tensor.dtype.startswith(("int", "uint", "bool")) or tensor.volume <= 1
    return is_number or any(name in param.key.path for name in _BUFFERS)


def _patterns(params: Iterable[Param]) -> str:
    return first_names(fold_names(param.tensor.fqn for param in params), _SHOWN, "pattern")
