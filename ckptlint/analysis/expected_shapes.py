"""What size a tensor should have, told from its neighbours, and in words what that rests on."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ckptlint.analysis.inventory import Param, take
from ckptlint.analysis.key_matching import compare
from ckptlint.analysis.trusted_config import FINAL_NORMS, MAIN_BLOCKS, number, trusted, trusted_topology
from ckptlint.model import ITEM_BITS, Checkpoint, Tensor
from ckptlint.model.layout import distinct
from ckptlint.vocabulary.keys import Key

Shape = tuple[int, ...]
Block = tuple[tuple[str, ...], str]
"""The module of a multimodal job, and the path up to the layer number."""

FLOATS = frozenset(dtype for dtype in ITEM_BITS if "float" in dtype)
"""Dtypes whose tensors have the shape of the weight; packed and quantised ones have another."""

_ADAPTER = re.compile(r"lora|adapter|dora|ia3|prompt|prefix_tuning|boft|oft_", re.IGNORECASE)
_INNER_NORM = re.compile(r"(q|k|v|kv|qk|query|key|value)(_a|_b)?_?(layer)?norm|norm_[qkv]")
_FUSED_NORM_OWNERS = frozenset({"linear_qkv", "linear_fc1", "in_proj"})
_LOST_AXES = ("tp", "ep", "etp", "dp", "world")


def as_text(shape: Shape) -> str:
    """A shape as reports print it."""
    return "[" + ", ".join(f"{size:,}" for size in shape) + "]"


def axis_factor(tensor: Tensor, axis: int) -> int:
    """In how many places the live chunks cut an axis: the number of their distinct starts."""
    return len(distinct(tensor.layout.offsets[tensor.layout.live, axis]))


def block_of(key: Key) -> Block:
    """The block that a parameter's layer belongs to, whatever pipeline stage wrote it."""
    return modules_of(key), key.block


def modules_of(key: Key) -> tuple[str, ...]:
    """The module of a multimodal job that a key belongs to."""
    return tuple(part for part in key.scope if part.startswith("mimo."))


def module_of(key: Key) -> tuple[str, ...]:
    """The path of the module that owns a parameter, its last part the module's own name.

    >>> from ckptlint.vocabulary.keys import parse
    >>> module_of(parse("decoder.layers.3.mlp.linear_fc1.weight_w")), module_of(parse("layers.0.experts.down_proj"))
    (('decoder', 'layers', '3', 'mlp', 'linear_fc1'), ('layers', '0', 'experts', 'down_proj'))
    """
    parts = key.path.split(".")
    while len(parts) > 1 and (parts[-1].startswith(("weight", "bias")) or parts[-1] == key.component):
        parts = parts[:-1]
    return tuple(parts)


def inside_layer(key: Key) -> tuple[str, ...]:
    """The parts of a path behind the layer number."""
    parts = key.path.split(".")[len(key.block.split(".")) :] if key.block else key.path.split(".")
    return tuple(parts[1:] if key.layer is not None else parts)


def is_adapter(key: Key) -> bool:
    """Whether a parameter belongs to a low-rank or other adapter, which some layers have and others have not."""
    return bool(_ADAPTER.search(key.path))


# ---------------------------------------------------------------- hidden size


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden size of one block of layers.

    Attributes:
        sources: what shows it, and how often: `(("norm weight", 62), ("embedding", 1))`.
        declared: where the job says the same, "" when it does not.
    """

    size: int
    sources: tuple[tuple[str, int], ...]
    declared: str = ""

    def __str__(self) -> str:
        counted = [f"{n} {what}{'s' if n > 1 else ''}" for what, n in self.sources]
        parts = [f"hidden_size of {self.declared}"] * bool(self.declared) + counted
        listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        return f"hidden size {self.size:,} from {listed}"


@lru_cache(maxsize=4)
def hidden_sizes(ckpt: Checkpoint) -> dict[Block, Hidden]:
    """Block -> its hidden size, where all that could show it agree: norms, embedding, routers, and the job itself.

    A source outside of layers counts for the blocks that lie below the module it lies in. A declared value that the
    tensors contradict is left out; without tensors to compare it stands alone, when the model has one block only.
    """
    norms: dict[Block, Counter[int]] = defaultdict(Counter)
    routers: dict[Block, list[Shape]] = defaultdict(list)
    outside: list[tuple[tuple[str, ...], str, str, int]] = []
    for param in take(ckpt).params:
        key, shape = param.key, param.own_shape
        repeats = param.tensor.global_shape[0] if param.layer_axis is not None else 1
        if key.block:
            norms[block_of(key)] += Counter()
            if _is_layer_norm(param):
                norms[block_of(key)][shape[0]] += repeats
            elif key.cls == "router" and len(shape) == 2:
                routers[block_of(key)] += [shape] * repeats
        elif key.cls == "embedding" and len(shape) == 2:
            outside.append((modules_of(key), _home(key), "embedding", shape[1]))
        elif key.cls == "norm" and len(shape) == 1 and "bias" not in key.path and not _INNER_NORM.search(key.path):
            outside.append((modules_of(key), _home(key), "norm weight", shape[0]))
    found = {}
    said = number(trusted(ckpt), "hidden")
    for block, inside in norms.items():
        declared = said if not block[0] and block[1] in MAIN_BLOCKS else None
        sizes = {"norm weight": Counter(inside), "embedding": Counter[int]()}
        for modules, home, what, size in outside:
            if modules == block[0] and f"{block[1]}.".startswith(home):
                sizes[what][size] += 1
        hidden = _agreed(sizes, routers[block])
        if hidden is not None and declared == hidden.size:
            hidden = Hidden(hidden.size, hidden.sources, ckpt.declared["hidden"].source)
        elif declared and len(norms) == 1 and not routers[block] and not any(sizes.values()):
            hidden = Hidden(declared, (), ckpt.declared["hidden"].source)
        if hidden is not None:
            found[block] = hidden
    return found


def hidden_params(ckpt: Checkpoint) -> list[Param]:
    """The norms and the embedding whose last axis is the hidden size that the job's arguments give.

    Those of the one block that they describe: none where no such block stands alone.
    """
    params = [param for param in take(ckpt).params if not modules_of(param.key)]
    blocks = {param.key.block for param in params} & MAIN_BLOCKS
    if len(blocks) != 1:
        return []
    (block,) = blocks
    return [
        param
        for param in params
        if (param.key.block == block and _is_layer_norm(param))
        or (not param.key.block and f"{block}.".startswith(_home(param.key)) and _is_final(param))
    ]


def _is_final(param: Param) -> bool:
    """Whether it is the embedding, or the norm behind the last layer."""
    name = module_of(param.key)[-1]
    is_norm = param.key.cls == "norm" and len(param.own_shape) == 1 and "bias" not in param.key.path
    return (is_norm and name in FINAL_NORMS) or (param.key.cls == "embedding" and is_weight(param))


def _is_layer_norm(param: Param) -> bool:
    """Whether a norm is as long as the hidden size: a module of the layer itself, or fused into its first projection.

    Norms inside attention, mixers and MLPs have the length of a head, a rank or an inner size.
    """
    key, tail = param.key, inside_layer(param.key)
    if key.cls != "norm" or len(param.own_shape) != 1 or "bias" in tail[-1]:
        return False
    if tail[-1] == "layer_norm_weight" and len(tail) > 1:
        return tail[-2] in _FUSED_NORM_OWNERS
    return len(tail) == 2 and not _INNER_NORM.match(tail[0])


def _home(key: Key) -> str:
    """The path, with a dot at its end, below which a module outside of layers speaks for blocks."""
    parts = module_of(key)[:-1]
    if parts and parts[-1] in ("embedding", "embeddings"):
        parts = parts[:-1]
    return "".join(f"{part}." for part in parts)


def _agreed(sizes: dict[str, Counter[int]], routers: list[Shape]) -> Hidden | None:
    seen = {size for counts in sizes.values() for size in counts}
    if not seen:
        seen = {shape[1] for shape in routers}
    if len(seen) != 1:
        return None
    size = seen.pop()
    if any(size not in shape for shape in routers):
        return None
    counts = {what: found[size] for what, found in sizes.items()} | {"router weight": len(routers)}
    return Hidden(size, tuple((what, n) for what, n in counts.items() if n))


# ---------------------------------------------------------------- what the user and the mesh say


@lru_cache(maxsize=4)
def reference_shapes(ckpt: Checkpoint) -> dict[str, Shape]:
    """The shapes that the reference gives to tensors of the model, by their name here."""
    if ckpt.reference is None:
        return {}
    return {
        pair.stored.fqn: pair.expected_shape
        for pair in compare(ckpt, ckpt.reference).pairs
        if pair.alike and pair.stored.kind == "model" and pair.expected_shape is not None
    }


def is_confirmed(ckpt: Checkpoint, param: Param) -> bool:
    """Whether the reference gives the tensor the shape that it has."""
    return reference_shapes(ckpt).get(param.tensor.fqn) == param.tensor.global_shape


def mesh_axes(ckpt: Checkpoint, factor: int) -> list[str]:
    """The axes of this size along which a tensor may have been split; a bound from file names is no axis."""
    sizes = trusted_topology(ckpt)
    return [
        axis for axis in _LOST_AXES if axis in sizes and sizes[axis].size == factor and sizes[axis].source != "files"
    ]


def knows_mesh(ckpt: Checkpoint) -> bool:
    """Whether the size of the tensor-parallel axis is known."""
    return "tp" in trusted_topology(ckpt)


# ---------------------------------------------------------------- partners in one layer


@dataclass(frozen=True, slots=True, eq=False)
class Family:
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
        """The weights whose inner size is this one's: MLP in and out, query and attention output, key and value."""
        return [] if self.is_latent else self.weights.get(_PARTNER.get(param.key.cls, ""), [])


_PARTNER = {"mlp_in": "mlp_out", "mlp_out": "mlp_in", "q": "attn_out", "attn_out": "q", "k": "v", "v": "k"}
_LATENT = re.compile(r"(linear_)?(q|kv)_(a|b|down|up)_proj(_with_mqa)?")
_SINGLE = frozenset({"gate_proj", "up_proj", "w3", "up"})


@lru_cache(maxsize=4)
def families(ckpt: Checkpoint) -> list[Family]:
    """The projections inside layers, by the attention or MLP they belong to; adapters and packed weights left out."""
    hidden = hidden_sizes(ckpt)
    weights: dict[tuple[object, ...], dict[str, list[Param]]] = defaultdict(lambda: defaultdict(list))
    blocks: dict[tuple[object, ...], Block] = {}
    latent: set[tuple[object, ...]] = set()
    for param in take(ckpt).params:
        key = param.key
        module = module_of(key)
        home = (key.scope, module[:-1], key.expert)
        if not key.block or is_adapter(key):
            continue
        if _LATENT.fullmatch(module[-1]):
            latent.add(home)
        if key.cls in _PARTNER and is_weight(param):
            weights[home][key.cls].append(param)
            blocks[home] = block_of(key)
    return [
        Family(hidden.get(blocks[home]), dict(found), home in latent)
        for home, found in weights.items()
        if _is_of_one_kind(param for members in found.values() for param in members)
    ]


def _is_of_one_kind(params: Iterable[Param]) -> bool:
    """Whether the leading axis of all is the same number of experts; of convolutions it is the output."""
    return len({p.tensor.global_shape[p.expert_axis] for p in params if p.expert_axis is not None}) < 2


def is_weight(param: Param) -> bool:
    """Whether a parameter is a matrix, stacked or not, stored in the shape it is used in."""
    last = param.key.path.rpartition(".")[2]
    return len(param.own_shape) == 2 and param.tensor.dtype in FLOATS and "bias" not in last and "norm" not in last


def inner_size(param: Param, hidden: int) -> int | None:
    """The size of the axis that is not hidden, or hidden itself where both are; None where none is."""
    first, second = param.own_shape
    if hidden not in (first, second):
        return None
    return second if first == hidden else first


def fused_factors(param: Param) -> tuple[int, ...]:
    """How many times the inner size a first projection may be: two where gate and up may be one weight."""
    is_single = module_of(param.key)[-1] in _SINGLE or param.key.component in ("w", "v")
    return (1, 2) if param.key.cls == "mlp_in" and not is_single else (1,)


def is_width(param: Param, inner: int, partner: Param, width: int) -> bool:
    """Whether the inner sizes of two projections fit, fused gate and up considered."""
    return any(inner == k * width for k in fused_factors(param)) or any(
        width == k * inner for k in fused_factors(partner)
    )


def short_name(param: Param) -> str:
    """The name below its layer, or below the experts."""
    tail = inside_layer(param.key)
    start = next((i + 1 for i, part in enumerate(tail) if part in ("experts", "local_experts")), 0)
    return ".".join(tail[start:] if len(tail) > start else tail).lstrip("0123456789.")


def swap_factor(param: Param, expected: Shape) -> tuple[int, int, int] | None:
    """Axes a and b and p, when the shape is the expected one times p on a, which is cut in p places, and / p on b.

    None for a plain transposition, which leaves the shape without a trace of p.
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
