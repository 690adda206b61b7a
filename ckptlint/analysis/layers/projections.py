"""The projections of an attention or MLP: partners in one layer, and how their sizes fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from ckptlint.analysis.layers.hidden_size import Hidden, hidden_sizes
from ckptlint.analysis.optimizer.inventory import Param, inventory_of, is_weight
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.cover import Shape
from ckptlint.model.facts import fact
from ckptlint.model.text import shape_text
from ckptlint.model.tiling import distinct
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.keys import Block, block_of, inside_layer, is_adapter, module_path


def axis_factor(tensor: Tensor, axis: int) -> int:
    """Number of pieces into which the live chunks cut an axis."""
    return len(distinct(tensor.tiling.offsets[tensor.tiling.live, axis]))


class ProjectionFamily(NamedTuple):
    """The projections of one attention or MLP (of one expert, where experts are numbered).

    Attributes:
        hidden: of its block; None when not established.
        weights: class -> the weights with two axes of their own, by module name.
        is_latent: whether it is multi-head latent attention, whose projections go through low ranks.
    """

    hidden: Hidden | None
    weights: dict[str, list[Param]]
    is_latent: bool = False

    def partners(self, param: Param) -> list[Param]:
        """The weights that must share this weight's inner size: MLP in/out, query/attention output, key/value."""
        return [] if self.is_latent else self.weights.get(_PARTNER.get(param.key.function, ""), [])


_PARTNER = {"mlp_in": "mlp_out", "mlp_out": "mlp_in", "q": "attn_out", "attn_out": "q", "k": "v", "v": "k"}
_LATENT = lazy_pattern(r"(linear_)?(q|kv)_(a|b|down|up)_proj(_with_mqa)?")
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))
_UNTRANSPOSED = frozenset({"w1", "w2"})
_LEAST_HEAD = 8  # least head size for which surplus query rows may be one gate per head
_SCALES = lazy_pattern(r".*(scale|zero|g_idx|absmax|norm).*")  # of a quantised weight, shaped by its blocks
_SINGLE = frozenset({"gate_proj", "up_proj", "w3", "up"})


@fact
def families(ckpt: Checkpoint) -> list[ProjectionFamily]:
    """The projections inside layers, by the attention or MLP they belong to; adapters and packed weights left out."""
    hidden = hidden_sizes(ckpt)
    weights: dict[tuple[object, ...], dict[str, list[Param]]] = defaultdict(lambda: defaultdict(list))
    blocks: dict[tuple[object, ...], Block] = {}
    latent: set[tuple[object, ...]] = set()
    for param in inventory_of(ckpt).params:
        key = param.key
        module = module_path(key)
        home = (key.scope, module[:-1], key.expert)
        if not key.block or is_adapter(key):
            continue
        if _LATENT.fullmatch(module[-1]):
            latent.add(home)
        if key.function in _PARTNER and is_weight(param):
            weights[home][key.function].append(param)
            blocks[home] = block_of(key)
    return [
        ProjectionFamily(hidden.get(blocks[home]), dict(by_function), home in latent)
        for home, by_function in weights.items()
        # convolutions have their outputs on the axis of experts, so in other numbers
        if len(
            {p.tensor.global_shape[p.expert_axis] for p in chain(*by_function.values()) if p.expert_axis is not None}
        )
        < 2
    ]


def inner_size(param: Param, hidden: int) -> int | None:
    """Size of the axis besides the hidden one (hidden itself for square weights); None without a hidden axis."""
    first, second = param.own_shape
    if hidden not in (first, second):
        return None
    return second if first == hidden else first


def fused_factors(param: Param) -> tuple[int, ...]:
    """Allowed multiples of the inner size for a first projection: (1, 2) where gate and up may be fused."""
    is_single = module_path(param.key)[-1] in _SINGLE or param.key.component in ("w", "v")
    return (1, 2) if param.key.function == "mlp_in" and not is_single else (1,)


def is_width(param: Param, inner: int, partner: Param, width: int) -> bool:
    """Whether the inner sizes of two projections fit, allowing for a fused gate and up."""
    pairs = ((inner, width, param), (width, inner, partner))
    return any(size == k * theirs for size, theirs, weight in pairs for k in fused_factors(weight))


def short_name(param: Param) -> str:
    """The name below its layer, or below the experts."""
    tail = inside_layer(param.key)
    start = next((i + 1 for i, word in enumerate(tail) if word in ("experts", "local_experts")), 0)
    return ".".join(tail[start:] if len(tail) > start else tail).lstrip("0123456789.")


def swap_factor(param: Param, expected: Shape) -> tuple[int, int, int] | None:
    """(a, b, p) if axis a is p times too long and cut into p pieces, and axis b is p times too short; else None.

    So looks a transposed weight that kept its old Shard placement (Automodel#1691).
    """
    shape = param.own_shape
    if len(shape) != len(expected) or sorted(shape) == sorted(expected):
        return None
    differing = [i for i, (x, y) in enumerate(zip(shape, expected, strict=True)) if x != y]
    if len(differing) != 2 or 0 in shape or 0 in expected:
        return None
    for i, j in (differing, differing[::-1]):
        p, rest = divmod(shape[i], expected[i])
        a, b = param.own_axes[i], param.own_axes[j]
        if p > 1 and not rest and shape[j] * p == expected[j]:
            return (a, b, p) if axis_factor(param.tensor, a) == p and axis_factor(param.tensor, b) == 1 else None
    return None


_Mismatch = tuple[Param, Param, str]
"""A weight, its partner, and the mismatch in words."""


@fact
def mismatches(ckpt: Checkpoint) -> list[tuple[ProjectionFamily, Param, Param, str]]:
    """Weights that cannot be multiplied with their partner: (family, weight, partner, text)."""
    known = [family for family in families(ckpt) if family.hidden is not None and not family.is_latent]
    return [(family, *mismatch) for family in known for mismatch in (*_mlp(family), *_attention(family))]


def _weights(family: ProjectionFamily, function: str) -> list[Param]:
    members = family.weights.get(function, [])
    return [param for param in members if not _SCALES.fullmatch(param.key.path.rpartition(".")[2])]


def _inner(param: Param, hidden: int) -> int | None:
    """The only axis whose size is not the hidden size; None where both or neither have it."""
    axes = [axis for axis, size in enumerate(param.own_shape) if size != hidden]
    return axes[0] if len(axes) == 1 and param.own_shape[axes[0]] else None


def _mlp(family: ProjectionFamily) -> Iterator[_Mismatch]:
    """Gate and up of unequal shape, or a second projection whose input is not the output of the first."""
    assert family.hidden is not None
    hidden = family.hidden.size
    firsts, seconds = _weights(family, "mlp_in"), _weights(family, "mlp_out")
    names = {module_path(param.key)[-1]: param for param in (*firsts, *seconds)}
    # MegaBlocks stacks experts with w1 and w2 stored alike, neither transposed: equal axes are right there (SHP009:
    # "experts of MegaBlocks").
    if any(param.key.in_experts and param.key.expert is None for param in firsts) and _UNTRANSPOSED & names.keys():
        return
    for gate, up in _HALVES:
        if gate in names and up in names and names[gate].own_shape != names[up].own_shape:
            a, b = names[gate], names[up]
            if hidden in a.own_shape and hidden in b.own_shape:
                width = _inner(seconds[0], hidden) if len(seconds) == 1 else None
                if width is not None and seconds[0].own_shape[width] in a.own_shape:
                    a, b = b, a  # the second projection fits `a`, so `b` is the wrong one
                yield a, b, f"but {short_name(b)} is {shape_text(b.tensor.global_shape)}"
            return
    if len(seconds) != 1:
        return
    second = seconds[0]
    for first in firsts:
        axis, second_axis = _inner(first, hidden), _inner(second, hidden)
        if axis is None or second_axis is None:
            continue
        size, width = first.own_shape[axis], second.own_shape[second_axis]
        shape = shape_text(first.tensor.global_shape)
        if axis == second_axis and any(size == k * width for k in fused_factors(first)):
            yield second, first, f"so it looks transposed: {short_name(first)} is {shape}"
            return
        if not any(size == k * width for k in fused_factors(first)):
            yield second, first, f"but {short_name(first)} before it is {shape}"
            return


def _attention(family: ProjectionFamily) -> Iterator[_Mismatch]:
    """A transposed projection, or an output projection whose input fits no attention over query, key and value."""
    assert family.hidden is not None
    hidden = family.hidden.size
    projections = [_weights(family, function) for function in ("q", "k", "v", "attn_out")]
    if any(len(members) != 1 for members in projections):
        return
    query, key, value, out = (members[0] for members in projections)
    axes = [_inner(param, hidden) for param in (query, key, value)]
    inner, out_axis = axes[0], _inner(out, hidden)
    sides = {axis for axis in axes if axis is not None}
    # Beside a square query the side of the output shows nothing.
    if out_axis is not None and (inner is not None or not sides):
        sides.add(1 - out_axis)
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
    # Head sizes are unknown, but query and key heads have one size, and value and output heads another: o = q * v / k.
    # Also legal: a query with its gate (Qwen3-Next: twice the rows), and one with a gate number per head (SHP009).
    is_plain, is_gated = q * v == o * k, q * v == 2 * o * k
    heads = q - o  # a gate of one number for each head
    if is_plain or is_gated or (k == v and heads > 0 and o % heads == 0 and o // heads >= _LEAST_HEAD):
        return
    yield query, out, f"but {short_name(out)} after it is {shape_text(out.tensor.global_shape)}"


def _turned(hidden: int, weights: list[Param]) -> Iterator[_Mismatch]:
    """The weight that is transposed relative to the majority."""
    sides: dict[int, list[Param]] = {0: [], 1: []}
    for number, param in enumerate(weights):
        axis = _inner(param, hidden)
        if axis is not None:
            sides[1 - axis if number == len(weights) - 1 else axis].append(param)
    few, most = sorted(sides.values(), key=len)
    if len(few) == 1:
        yield few[0], most[0], f"transposed relative to {short_name(most[0])}"
    elif few:
        yield sides[1][0], sides[0][0], f"transposed relative to {short_name(sides[0][0])}"
