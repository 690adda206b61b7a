"""Reorders the rows of two sides into one order, by the conventions of their namings and the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from ckptlint.comparing.values.match import Side, Sides
from ckptlint.model.tiling import IntArray
from ckptlint.seals.row_hashes import RowHashes, digest, matrix
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.namings import Naming, StoredRoles, naming_of, stored

_LARGEST_HEAD = 512  # largest head size that is tried where no configuration declares one


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads that the configurations declare; 0 where unknown.

    Attributes:
        size: rows of a head.
        count: number of query heads.
        model_type: name of the architecture in transformers.
    """

    size: int = 0
    count: int = 0
    model_type: str = ""


def in_one_order(old: Sides, new: Sides, heads: Heads) -> tuple[Sides, Sides]:
    """Both sides with the roles that their names imply, and rows in one order where roles are not stored alike."""
    namings = naming_of(old), naming_of(new)
    sides = _named(old, namings[0], heads), _named(new, namings[1], heads)
    if namings[0] is None or namings[1] is None or namings[0] is namings[1]:
        return sides
    ways = [
        {(tensor.stored_as.roles, tensor.stored_as.how) for tensor in side.values() if tensor.stored_as}
        for side in sides
    ]
    apart = {roles for roles, _ in ways[0] ^ ways[1]}

    def is_apart(tensor: Side) -> bool:
        return bool(tensor.stored_as and tensor.stored_as.how and tensor.stored_as.roles in apart and tensor.is_read)

    wanted = [[*filter(is_apart, side.values())] for side in sides]
    keys = _rows_of_keys(sides[0]) | _rows_of_keys(sides[1])
    sizes = [heads.size] if heads.size else _sizes([*wanted[0], *wanted[1]])
    best: list[Sides] = [*sides]
    most = -1
    for size in sizes:
        known = replace(heads, size=size)
        moved = [
            {tensor.fqn: _moved(tensor, known, keys, is_old=members is wanted[0]) for tensor in members}
            for members in wanted
        ]
        ordered: list[Sides] = [{**side, **members} for side, members in zip(sides, moved, strict=True)]
        # Without a declared head size every divisor is tried, and the size that makes most contents equal wins: a wrong
        # size permutes the rows of both sides differently, so it makes few equal.
        fitting = len(_contents(ordered[0], keys) & _contents(ordered[1], keys)) if len(sizes) > 1 else 0
        if fitting > most:
            best, most = ordered, fitting
    return best[0], best[1]


def _named(side: Sides, naming: Naming | None, heads: Heads) -> Sides:
    """The side, with the roles of its keys under a naming."""
    if naming is None:
        return side
    stored_roles = {key: key_roles for key in side if (key_roles := stored(key, naming))}
    if (naming.halves and any(map(naming.halves.search, side))) or heads.model_type in naming.halves_types:
        stored_roles = {
            key: StoredRoles(stored_as.roles, stored_as.how - {"pairs"}) for key, stored_as in stored_roles.items()
        }
    matrices = [(key, stored_as, parse(key)) for key, stored_as in stored_roles.items() if len(side[key].shape) > 1]
    last = {
        (name.layer, name.in_experts, side[key].shape[-1])
        for key, stored_as, name in matrices
        if stored_as.roles == ("down",)
    }
    for key, stored_as, name in matrices:  # a block without a gate has as many rows first as columns last
        if stored_as.roles == ("gate", "up") and (name.layer, name.in_experts, side[key].shape[-2]) in last:
            stored_roles[key] = StoredRoles(("up",), stored_as.how)
    return {key: replace(tensor, stored_as=stored_roles.get(key)) for key, tensor in side.items()}


def _rows_of_keys(side: Sides) -> dict[int | None, int]:
    """Layer -> rows of its attention key projection, where that is a separate tensor."""
    keys = [
        tensor
        for tensor in side.values()
        if tensor.stored_as and tensor.stored_as.roles == ("k",) and len(tensor.shape) > 1
    ]
    return {parse(tensor.fqn).layer: tensor.shape[-2] for tensor in keys}


def _sizes(wanted: Iterable[Side]) -> list[int]:
    """Possible head sizes; [0] where no order depends on them."""
    rows = [
        tensor.shape[-2:][0] for tensor in wanted if tensor.stored_as and tensor.stored_as.how & {"pairs", "by group"}
    ]
    common = gcd(*rows)
    return [size for size in range(2, min(common, _LARGEST_HEAD) + 1, 2) if common % size == 0] or [0]


def _moved(side: Side, heads: Heads, keys: Mapping[int | None, int], is_old: bool) -> Side:
    """A tensor in canonical order (role after role, halves, [out, in]); unchanged where its order is unknown."""
    assert side.stored_as is not None
    shape, steps, stored_roles = side.shape, list[str](), side.stored_as
    if "[in, out]" in stored_roles.how and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
        steps.append("transposed")
    rows = shape[-2:][0]
    order: IntArray = np.arange(rows)
    if "by group" in stored_roles.how:
        of_keys = keys.get(parse(side.fqn).layer, 0) // max(heads.size, 1)
        groups = (rows // max(heads.size, 1) - heads.count) // 2 if heads.count else of_keys
        if heads.size < 1 or groups < 1 or rows % groups or rows // groups <= 2 * heads.size:
            return side
        blocks = np.split(order.reshape(groups, -1), [-2 * heads.size, -heads.size], axis=1)
        order = np.concatenate([block.reshape(-1) for block in blocks])
        steps.append(f"in {groups:,} groups")
    elif "alternating" in stored_roles.how:
        order = order.reshape(-1, len(stored_roles.roles)).T.reshape(-1)
        steps.append("in turn")
    elif "halves exchanged" in stored_roles.how:
        order = np.roll(order, rows // 2)
        steps.append("with its halves exchanged")
    if "pairs" in stored_roles.how:
        if heads.size < 2 or rows % heads.size:
            return side
        order = order.reshape(-1, heads.size // 2, 2).transpose(0, 2, 1).reshape(-1)
        way = "each head's even rows first, then the odd ones" if is_old else "the two halves of each head interleaved"
        steps.append(f"{way} ({heads.size} rows a head)")
    is_turned = steps[:1] == ["transposed"]
    hashes = {dtype: _in_order(gathered, order, is_turned) for dtype, gathered in side.hashes.items()}
    return replace(side, shape=shape, hashes=hashes, moved=", ".join(steps))


def _in_order(hashes: RowHashes, order: IntArray, is_turned: bool) -> RowHashes:
    """The hashes of a tensor with other rows, of each slice the same ones."""
    reordered = copy(hashes)
    slices = matrix(hashes.shape)[0]
    if is_turned:
        reordered.shape = (*hashes.shape[:-2], hashes.shape[-1], hashes.shape[-2])
        reordered.rows, reordered.columns = hashes.columns.reshape(-1), hashes.rows.reshape(slices, -1)
    if not np.array_equal(order, np.arange(len(order))):
        reordered.rows = reordered.rows.reshape(slices, -1)[:, order].reshape(-1)
        reordered.columns = np.zeros((0, 0), np.uint64)  # they depend on where each row is
    return reordered


def _contents(side: Sides, keys: Mapping[int | None, int]) -> set[tuple[str, int]]:
    """Dtype and digest of the rows of each tensor of attention, and of the queries with which a fused one begins."""
    contents = set()
    for tensor in (tensor for tensor in side.values() if tensor.stored_as and {*tensor.stored_as.roles} & {"q", "k"}):
        for dtype, hashes in tensor.hashes.items():
            contents.add((dtype, digest(hashes.rows)))
            if tensor.stored_as and len(tensor.stored_as.roles) > 1:
                queries = len(hashes.rows) - 2 * keys.get(parse(tensor.fqn).layer, 0)
                contents.add((dtype, digest(hashes.rows[:queries])))
    return contents
