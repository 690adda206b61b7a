"""Tensors that hold a weight of all layers, as Megatron-Core saves them, taken apart where the other side does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.comparing.values.match import Side
from ckptlint.vocabulary.keys import parse


def stacked(side: Sequence[OpenedCheckpoint], there: Collection[str]) -> dict[str, str]:
    """Key -> the part of it up to the word before the layer's number, of what holds all layers, but not `there`."""
    if all(key in there for opened in side for key in opened.ckpt.tensors):
        return {}
    layers = len({layer for key in there if (layer := parse(key).layer) is not None})
    return {
        param.tensor.fqn: param.key.block
        for opened in side
        for param in inventory_of(opened.ckpt).params
        if param.key.is_stacked and param.tensor.fqn not in there and len(param.tensor.global_shape) > 1
        if param.layer_axis == 0 or param.tensor.global_shape[0] == layers
    }


def layer_by_layer(sides: Mapping[str, Side], blocks: Mapping[str, str]) -> dict[str, Side]:
    """The tensors of a side, each layer of those in `blocks` under a name with its number."""
    layers = {}
    for name, side in sides.items():
        block = blocks.get(name, "")
        at = name.find(f"{block}.") + len(block)
        if not block or side.stored is None or not side.is_read or at < len(block):
            layers[name] = side
            continue
        by_layer = {dtype: hashes.layers() for dtype, hashes in side.hashes.items()}
        for number in range(side.shape[0]):
            fqn = f"{name[:at]}.{number}{name[at:]}"
            hashes = {dtype: hashes_of[number] for dtype, hashes_of in by_layer.items()}
            stored = replace(side.stored, layer=number)
            layers[fqn] = replace(side, fqn=fqn, shape=side.shape[1:], hashes=hashes, stored=stored)
    return layers
