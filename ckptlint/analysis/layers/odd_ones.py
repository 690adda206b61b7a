"""Ranks and layers of which nearly all chunks have a trait that the same tensors elsewhere do not have."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.model import Checkpoint
from ckptlint.model.facts import fact
from ckptlint.model.text import layers_in
from ckptlint.model.tiling import BoolArray, IntArray, distinct
from ckptlint.numerics.chunks import ChunkNumbers, chunk_numbers
from ckptlint.vocabulary.keys import Key, parse

_NEARLY_ALL, _NEARLY_NONE = 0.9, 0.1
_LEAST_CHUNKS = 4  # of a rank, each of another tensor
_LEAST_KINDS, _LEAST_LAYERS = 3, 3


class OddOne(NamedTuple):
    """A rank or a layer that differs from all others.

    Attributes:
        title: `rank 2`, or `layer 3 of model.layers`.
        rank: its number, -1 for a layer.
        rows: int64 [k], its chunks with the trait, rows of `ChunkNumbers`.
        judged: chunks that could have it.
    """

    title: str
    rank: int
    rows: IntArray
    judged: int


@fact
def param_keys(ckpt: Checkpoint) -> dict[str, Key]:
    """Key of a weight or state -> the parameter's, taken apart."""
    inventory = inventory_of(ckpt)
    keys = {param.tensor.fqn: param.key for param in inventory.params}
    for state in inventory.states:
        keys[state.tensor.fqn] = state.param.key if state.param is not None else parse(state.path)
    return keys


def sees_all(fqn: str) -> bool:
    """Whether each step of training reaches the whole tensor: no expert waits for a token, no row for its word."""
    return not any(word in fqn for word in ("expert", "embed", "wte", "embd"))


def odd_ones(ckpt: Checkpoint, is_judged: BoolArray, has_trait: BoolArray) -> list[OddOne]:
    """The ranks with a trait, or where there are none the layers; bool [n] for each row of `chunk_numbers(ckpt)`."""
    numbers = chunk_numbers(ckpt)
    judged = np.flatnonzero(is_judged)
    if not len(judged) or not has_trait[judged].any():
        return []
    return _ranks(numbers, judged, has_trait) or _layers(ckpt, numbers, judged, has_trait)


def _ranks(numbers: ChunkNumbers, judged: IntArray, has_trait: BoolArray) -> list[OddOne]:
    without = np.zeros(len(numbers.tensors), bool)  # tensors of which some chunk does not have it
    without[numbers.tensor[judged[~has_trait[judged]]]] = True
    judged = judged[without[numbers.tensor[judged]] & (numbers.rank[judged] >= 0)]
    odd, others = [], 0
    for rank in distinct(numbers.rank[judged]).tolist():
        mine = judged[numbers.rank[judged] == rank]
        share = float(has_trait[mine].mean())
        if share >= _NEARLY_ALL and len(distinct(numbers.tensor[mine])) >= _LEAST_CHUNKS:
            odd.append(OddOne(f"rank {rank}", rank, mine[has_trait[mine]], len(mine)))
        elif share <= _NEARLY_NONE:
            others += 1
        else:
            return []
    return odd if others else []


def _layers(ckpt: Checkpoint, numbers: ChunkNumbers, judged: IntArray, has_trait: BoolArray) -> list[OddOne]:
    keys = param_keys(ckpt)
    by_layer: dict[tuple[str, int], dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in judged.tolist():
        number = int(numbers.tensor[row])
        key = keys.get(numbers.tensors[number].fqn)
        if key is not None and key.layer is not None and key.expert is None:
            block = ".".join([*key.scope, key.block])
            by_layer[block, key.layer][numbers.states[number], key.role].append(row)
    odd: list[OddOne] = []
    for name in {block for block, _ in by_layer}:
        layers = {layer: kinds for (block, layer), kinds in by_layer.items() if block == name}
        of_block, usual = [], 0
        for layer, kinds in layers.items():
            rows = np.array([row for members in kinds.values() for row in members], np.int64)
            share = float(has_trait[rows].mean())
            if share >= _NEARLY_ALL and len(kinds) >= _LEAST_KINDS:
                of_block.append(OddOne(layers_in([layer], name), -1, rows[has_trait[rows]], len(rows)))
            elif share <= _NEARLY_NONE:
                usual += 1
        if len(of_block) == 1 and usual == len(layers) - 1 >= _LEAST_LAYERS - 1:
            odd += of_block
    return odd
