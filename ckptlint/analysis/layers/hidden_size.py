"""The hidden size of each block, where its norms, routers and embeddings agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from ckptlint.analysis.fit.trusted_config import FINAL_NORMS, MAIN_BLOCKS, number, trusted
from ckptlint.analysis.optimizer.inventory import Param, inventory_of, is_weight
from ckptlint.model import Checkpoint
from ckptlint.model.cover import Shape
from ckptlint.model.facts import fact
from ckptlint.model.text import join_words
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.keys import Block, Key, block_of, inside_layer, module_path, modules_of

_INNER_NORM = lazy_pattern(r"(q|k|v|kv|qk|query|key|value)(_a|_b)?_?(layer)?norm|norm_[qkv]")


class Hidden(NamedTuple):
    """The hidden size of one block of layers.

    Attributes:
        sources: evidence with counts: `(("norm weight", 62), ("embedding", 1))`.
        declared: file that declares the same size; "" without one.
    """

    size: int
    sources: tuple[tuple[str, int], ...]
    declared: str = ""

    def __str__(self) -> str:
        counted = [f"{n} {what}{'s' if n > 1 else ''}" for what, n in self.sources]
        texts = [f"hidden_size of {self.declared}"] * bool(self.declared) + counted
        return f"hidden size {self.size:,} from {join_words(texts)}"


@fact
def hidden_sizes(ckpt: Checkpoint) -> dict[Block, Hidden]:
    """Block -> its hidden size, where norms, embedding, routers and arguments agree.

    A tensor outside layers counts for all blocks below its module. A declared size that tensors contradict is ignored;
    without such tensors it counts only if the model has a single block.
    """
    norms: dict[Block, Counter[int]] = defaultdict(Counter)
    routers: dict[Block, list[Shape]] = defaultdict(list)
    outside: list[tuple[tuple[str, ...], str, str, int]] = []
    for param in inventory_of(ckpt).params:
        key, shape = param.key, param.own_shape
        repeats = param.tensor.global_shape[0] if param.layer_axis is not None else 1
        if key.block:
            norms[block_of(key)] += Counter()
            if _is_layer_norm(param):
                norms[block_of(key)][shape[0]] += repeats
            elif key.function == "router" and len(shape) == 2:
                routers[block_of(key)] += [shape] * repeats
        elif key.function == "embedding" and len(shape) == 2:
            outside.append((modules_of(key), _home(key), "embedding", shape[1]))
        elif key.function == "norm" and len(shape) == 1 and "bias" not in key.path and not _INNER_NORM.search(key.path):
            outside.append((modules_of(key), _home(key), "norm weight", shape[0]))
    hidden_of_block = {}
    declared_size = number(trusted(ckpt), "hidden")
    for block, inside in norms.items():
        declared = declared_size if not block[0] and block[1] in MAIN_BLOCKS else None
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
            hidden_of_block[block] = hidden
    return hidden_of_block


def hidden_params(ckpt: Checkpoint) -> list[Param]:
    """The norms and the embedding whose last axis must be the declared hidden size, where there is one main block."""
    params = [param for param in inventory_of(ckpt).params if not modules_of(param.key)]
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
    """Whether it is the embedding, or the norm after the last layer."""
    name = module_path(param.key)[-1]
    is_norm = param.key.function == "norm" and len(param.own_shape) == 1 and "bias" not in param.key.path
    return (is_norm and name in FINAL_NORMS) or (param.key.function == "embedding" and is_weight(param))


def _is_layer_norm(param: Param) -> bool:
    """Whether it is a norm of the layer itself, or fused into its first projection; inner ones have other lengths."""
    key, tail = param.key, inside_layer(param.key)
    if key.function != "norm" or len(param.own_shape) != 1 or "bias" in tail[-1]:
        return False
    if tail[-1] == "layer_norm_weight" and len(tail) > 1:
        return tail[-2] in ("linear_qkv", "linear_fc1", "in_proj")
    return len(tail) == 2 and not _INNER_NORM.match(tail[0])


def _home(key: Key) -> str:
    """The path (with a final dot) whose blocks a module outside layers is evidence for."""
    modules = module_path(key)[:-1]
    if modules and modules[-1] in ("embedding", "embeddings"):
        modules = modules[:-1]
    return "".join(f"{module}." for module in modules)


def _agreed(sizes: dict[str, Counter[int]], routers: list[Shape]) -> Hidden | None:
    candidates = {size for counts in sizes.values() for size in counts} or {shape[1] for shape in routers}
    size = candidates.pop() if len(candidates) == 1 else None
    if size is None or any(size not in shape for shape in routers):
        return None
    counts = {what: counter[size] for what, counter in sizes.items()} | {"router weight": len(routers)}
    return Hidden(size, tuple((what, n) for what, n in counts.items() if n))
