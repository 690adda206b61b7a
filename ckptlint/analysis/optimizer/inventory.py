"""Sorts the tensors of a checkpoint into parameters, optimizer states and buckets, and maps states to parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import COPIES, STATE_NAMES, Key, parse

_BUCKET = lazy_pattern(
    r"(?:distributed\.)?dp_group_idx_(?P<group>\d+)\.(?:gbuf_idx_(?P<gbuf>\d+)\.dtype_\([^)]*\)\.bucket_idx_(?P<bucket>\d+)\.)?(?P<what>.+)"
)


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A parameter or buffer of the model.

    Attributes:
        layer_axis: the axis on which layers are stacked, None when they are not.
        expert_axis: the axis of the routed experts, None when there is none.
    """

    tensor: Tensor
    key: Key
    layer_axis: int | None = None
    expert_axis: int | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of one layer's and one expert's weight: the global shape without those two axes."""
        return tuple(self.tensor.global_shape[axis] for axis in self.own_axes)

    @property
    def own_axes(self) -> tuple[int, ...]:
        """The axes that belong to the weight itself, in the order of `own_shape`."""
        dropped = (self.layer_axis, self.expert_axis)
        return tuple(axis for axis in range(len(self.tensor.global_shape)) if axis not in dropped)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """An optimizer state tensor.

    Attributes:
        what: name of the state, with its suffixes (`exp_avg`, `exp_avg.codes`).
        chain: optimizer chain and module that hold it.
        path: path of the parameter, as the state spells it.
        params: its parameters: one, or all components that a fused state covers; empty when none was found.
        is_component: whether the state covers only a part of its parameter (`weight_w` of a fused `weight`).
        scope: prefixes before the path of the parameter, such as a pipeline stage (`model1`).
    """

    tensor: Tensor
    what: str
    chain: tuple[str, ...]
    path: str
    params: tuple[Param, ...] = ()
    is_component: bool = False
    scope: tuple[str, ...] = ()

    @property
    def param(self) -> Param | None:
        """The parameter, when it is exactly one and whole."""
        return self.params[0] if len(self.params) == 1 and not self.is_component else None


class Bucket(NamedTuple):
    """A tensor of a distributed optimizer's flat buffer, which names no parameter."""

    tensor: Tensor
    chain: tuple[str, ...]
    group: int
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class Inventory:
    """The tensors of a checkpoint by what they are.

    Attributes:
        params: parameters and buffers of the model, copies (ema, teacher) left out.
        copies: parameters of second copies of the model, by the copy's name.
        states: optimizer states, mapped to parameters where possible.
        numbered: optimizer states that name their parameter by an integer.
        buckets: flat optimizer buffers.
    """

    params: list[Param] = field(default_factory=list)
    copies: dict[str, list[Param]] = field(default_factory=dict)
    states: list[OptimizerState] = field(default_factory=list)
    numbered: list[Tensor] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def mapped_share(self) -> float:
        """Share of the optimizer states with a known parameter, 0.0 to 1.0; 1.0 without states."""
        return sum(bool(state.params) for state in self.states) / len(self.states) if self.states else 1.0


@fact
def inventory_of(ckpt: Checkpoint) -> Inventory:
    """The inventory of a checkpoint; only tensors whose geometry can be judged are in it."""
    inventory = Inventory()
    optimizer: list[tuple[Tensor, Key]] = []
    for tensor in ckpt.sound_tensors():
        key = parse(tensor.fqn)
        if key.kind == "optimizer":
            optimizer.append((tensor, key))
        elif key.kind == "model" and not key.path.endswith("_flat_param"):
            param = _param(tensor, key)
            copy = next((name for name in key.scope if name in COPIES), None)
            (inventory.params if copy is None else inventory.copies.setdefault(copy, [])).append(param)
    index = _Index(inventory.params)
    for tensor, key in optimizer:
        chain, rest = optimizer_parts(key)
        if bucket := _BUCKET.fullmatch(rest):
            inventory.buckets.append(Bucket(tensor, chain, int(bucket["group"]), bucket["what"]))
        elif not rest.startswith("state."):
            continue
        elif state := _state(tensor, chain, rest.removeprefix("state."), index):
            inventory.states.append(state)
        else:
            inventory.numbered.append(tensor)
    return inventory


@fact
def moments_of(ckpt: Checkpoint) -> dict[str, list[OptimizerState]]:
    """Key of a parameter -> its moments; a fused moment is listed under each of its components."""
    moments = (state for state in inventory_of(ckpt).states if state.what.startswith(("exp_avg", "momentum")))
    return grouped((param.tensor.fqn, state) for state in moments for param in state.params)


def siblings(params: Iterable[Param]) -> dict[tuple[tuple[str, ...], str], list[Param]]:
    """(scope, role) -> the parameters that play one role in different layers or experts."""
    return grouped(((param.key.scope, param.key.role), param) for param in params)


def _param(tensor: Tensor, key: Key) -> Param:
    layer_axis = expert_axis = None
    axes = list(range(len(tensor.global_shape)))
    sizes = tensor.tiling.sizes[tensor.tiling.live]
    # Megatron-Core saves stacked layers as one chunk per layer. Without chunks of size 1 on the first axis nothing
    # distinguishes it from an axis of the weight, so the tensor counts as not stacked.
    if key.is_stacked and axes and len(sizes) and (sizes[:, 0] == 1).all():
        layer_axis = axes.pop(0)
    is_stack = key.in_experts or key.function in ("mlp_in", "mlp_out")
    if key.expert is None and is_stack and len(axes) >= 3:
        expert_axis = axes.pop(0)
    return Param(tensor, key, layer_axis, expert_axis)


class _Index:
    """Finds the parameter that an optimizer state names, by its path."""

    def __init__(self, params: list[Param]) -> None:
        self._by_path = grouped((param.key.path, param) for param in params)

    def find(self, path: str, scope: tuple[str, ...]) -> Param | None:
        """The parameter with this path: of the same scope, else of the same module, else the only one."""
        candidates = self._by_path.get(path, [])
        same = [param for param in candidates if param.key.scope == scope]
        same = same or [param for param in candidates if _modules(param.key.scope) == _modules(scope)]
        if same:
            return same[0]
        return candidates[0] if len(candidates) == 1 else None

    def components(self, path: str, scope: tuple[str, ...]) -> tuple[Param, ...]:
        """The stored components of a fused parameter: `_w` and `_v`, or `.query`, `.key`, ..."""
        halves = [self.find(path + half, scope) for half in ("_w", "_v")]
        if all(halves):
            return tuple(half for half in halves if half)
        params = [self.find(f"{path}.{name}", scope) for name in ("query", "key", "value", "z", "beta", "alpha")]
        return tuple(param for param in params if param)


def _modules(scope: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in scope if name.startswith("mimo."))


def optimizer_parts(key: Key) -> tuple[tuple[str, ...], str]:
    """Chain and module of an optimizer key, and the rest of its name after them.

    >>> optimizer_parts(parse("optimizer.mimo.vision.0.chained_1.optimizer.state.exp_avg.w"))
    (('mimo.vision', 'chained_1'), 'state.exp_avg.w')
    """
    scope, rest = key.scope, key.path.split(".", 1)[1]
    if match := re.match(r"mimo\.([^.]+)\.(?:\d+\.)?", rest):
        scope, rest = (*scope, f"mimo.{match[1]}"), rest[match.end() :]
    while match := re.match(r"(chained_\d+)\.(?:optimizer\.)?", rest):
        scope, rest = (*scope, match[1]), rest[match.end() :]
    return scope, rest


def dp_group(fqn: str) -> tuple[tuple[str, ...], int, str] | None:
    """Chain, number and record of a group of the distributed optimizer; None for any other name.

    >>> dp_group("chained_0.optimizer.distributed.dp_group_idx_1.per_bucket_numel")
    (('chained_0',), 1, 'per_bucket_numel')
    """
    key = parse(fqn)
    if key.kind != "optimizer":
        return None
    scope, rest = optimizer_parts(key)
    match = _BUCKET.fullmatch(rest)
    return None if match is None else (scope, int(match["group"]), match["what"])


def split_state(rest: str) -> tuple[str, str] | None:
    """Name of the state and of its parameter after `optimizer.state.`, by the words alone.

    None when the parameter is named by a number, or when no word is the name of a state.

    >>> split_state("exp_avg.layers.0.w"), split_state("layers.0.w.exp_avg"), split_state("0.exp_avg")
    (('exp_avg', 'layers.0.w'), ('exp_avg', 'layers.0.w'), None)
    """
    head, _, tail = rest.partition(".")
    if head.isdecimal():
        return None
    if head in STATE_NAMES and tail:
        return head, tail
    words = rest.split(".")
    known = next((i for i, word in enumerate(words) if word in STATE_NAMES and i), None)
    return None if known is None else (".".join(words[known:]), ".".join(words[:known]))


def _state(tensor: Tensor, chain: tuple[str, ...], rest: str, index: _Index) -> OptimizerState | None:
    """The state in a name after `optimizer.state.`; None where it names its parameter by number."""
    # Megatron-Core writes `<what>.<param>`, torch `<param>.<what>`; where both are possible, the parameter that exists
    # decides
    head, _, tail = rest.partition(".")
    if head in STATE_NAMES and tail:
        return _mapped(tensor, head, chain, tail, index)
    words = rest.split(".")
    for stop in range(len(words) - 1, 1 if head.isdecimal() else 0, -1):  # `0.weight` may name a parameter
        path, what = ".".join(words[:stop]), ".".join(words[stop:])
        state = _mapped(tensor, what, chain, path, index)
        if state.params:
            return state
    if head.isdecimal():
        return None
    known = next((i for i, word in enumerate(words) if word in STATE_NAMES and i), len(words) - 1)
    return OptimizerState(tensor, ".".join(words[known:]), chain, parse(".".join(words[:known])).path)


def _mapped(tensor: Tensor, what: str, chain: tuple[str, ...], path: str, index: _Index) -> OptimizerState:
    key = parse(path)
    inner = tuple(name for name in key.scope if not name.startswith("mimo."))
    scope = (*(_modules(chain) or _modules(key.scope)), *inner)
    param = index.find(key.path, scope)
    if params := (param,) if param else index.components(key.path, scope):
        return OptimizerState(tensor, what, chain, key.path, params, scope=scope)
    whole = key.path[:-2] if key.component in ("w", "v") else key.path.rpartition(".")[0] if key.component else ""
    if whole and (param := index.find(whole, scope)):
        return OptimizerState(tensor, what, chain, key.path, (param,), is_component=True, scope=scope)
    return OptimizerState(tensor, what, chain, key.path, scope=scope)


def is_weight(param: Param) -> bool:
    """Whether a parameter is a matrix, stacked or not, stored in the shape it is used in."""
    last = param.key.path.rpartition(".")[2]
    return len(param.own_shape) == 2 and param.tensor.dtype in FLOATS and "bias" not in last and "norm" not in last
