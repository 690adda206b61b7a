"""Whether a state dict is made as it was at the last check, for a tenth of what reading it costs.

A signature holds every attribute that `extract` looks at, or what it made of them: where two are equal, so is what is
read, but for the contents. Nothing is recognised by the identity of a tensor or of its spec: `detach()` makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ckptlint.live.collect import compat
from ckptlint.live.collect.extract import READERS, Held, Kind, Leaf, Parts, fqn_of, kind_of

_KEYS = frozenset({str, int})
"""Types of keys of which equal ones read alike; True is 1 and reads otherwise."""

_Mesh = tuple[Any, tuple[int, ...], "tuple[int, ...] | None", "tuple[int, ...] | None"]
"""A device mesh, its shape, the place of this rank, and the order of its dims that Megatron-FSDP declares."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What a state dict is made of; equal ones are extracted alike.

    Attributes:
        paths: where its values lie.
        signatures: one for each value, what is read of it but for the contents. Nothing in them can change later.
        meshes: of its DTensors, by id; they are held, so that no other one gets the id.
    """

    paths: list[tuple[Any, ...]]
    signatures: list[tuple[Any, ...]]
    meshes: dict[int, _Mesh]


class Reading(NamedTuple):
    """What was read at a glance.

    Attributes:
        structure: None where it cannot be told from others.
        contents: the data of each row that `held_of` gives, in its order.
        known: rows of values that only reading in full tells from others, by number.
    """

    structure: Structure | None
    contents: list[Any]
    known: dict[int, list[Held]]


def read(found: Sequence[Leaf]) -> Reading:
    """What the values of a state dict are.

    Args:
        found: what `leaves` gave.
    """
    seen = _Seen({}, {})
    signatures: list[tuple[Any, ...]] = []
    contents: list[Any] = []
    known: dict[int, list[Held]] = {}
    parts: Parts = {}
    for number, (path, value) in enumerate(found):
        kind = kind_of(value)
        sign = _SIGNS.get(kind)
        signed = sign(value, seen) if sign is not None else None
        if signed is not None:
            signatures.append(signed[0])
            contents.append(signed[1])
            continue
        with torch.no_grad():
            held = known[number] = READERS[kind](fqn_of(path), value, parts)
        signatures.append(tuple(_described(item) for item in held))
        contents += [item.data for item in held]
    paths = [path for path, _ in found]
    is_told = _KEYS.issuperset(map(type, chain.from_iterable(paths)))
    return Reading(Structure(paths, signatures, seen.meshes) if is_told else None, contents, known)


def _described(item: Held) -> tuple[Any, ...]:
    return item._replace(data=isinstance(item.data, torch.Tensor))


# ---------------------------------------------------------------- what is read of each kind


class _Seen(NamedTuple):
    """What many values share.

    Attributes:
        meshes: as in Structure.
        placements: tuples of them by id, None for those that equality does not tell apart; held, as the meshes are.
    """

    meshes: dict[int, _Mesh]
    placements: dict[int, tuple[Any, bool]]


_Signed = tuple[tuple[Any, ...], Any]
"""The signature of a value that is one row, and its data."""


def _object(value: Any, _: _Seen) -> _Signed:
    return ("object",), value


def _plain_tensor(value: Any, _: _Seen) -> _Signed:
    return ("plain", value.shape, value.dtype), value


def _dtensor(value: Any, seen: _Seen) -> _Signed | None:
    """None for a rank outside of the mesh, which has no row, and where the placements or the local tensor are special."""
    local, spec = value._local_tensor, value._spec
    mesh, placements = spec.mesh, spec.placements
    _, _, coordinate, _ = seen.meshes.get(id(mesh)) or _seen_mesh(mesh, seen)
    _, is_fixed = seen.placements.get(id(placements)) or _seen_placements(placements, seen)
    if coordinate is None or not is_fixed:
        return None
    if hasattr(local, "__create_chunk_list__") or hasattr(local, "__create_write_items__"):
        return None
    order = getattr(spec, "shard_order", None)
    return ("dtensor", id(mesh), placements, spec.tensor_meta.shape, order, local.shape, local.dtype), local


def _seen_mesh(mesh: Any, seen: _Seen) -> _Mesh:
    coordinate, order = mesh.get_coordinate(), getattr(mesh, "_shard_order", None)
    seen.meshes[id(mesh)] = known = (
        mesh,
        tuple(mesh.shape),
        None if coordinate is None else tuple(coordinate),
        None if order is None else tuple(order),
    )
    return known


def _seen_placements(placements: Any, seen: _Seen) -> tuple[Any, bool]:
    seen.placements[id(placements)] = known = placements, all(map(compat.is_fixed, placements))
    return known


def _mcore_tensor(value: Any, _: _Seen) -> _Signed:
    data, fragments = value.data, value.axis_fragmentations
    return (
        "mcore",
        value.key,
        value.dtype,
        tuple(value.local_shape),
        tuple(value.global_shape),
        tuple(value.global_offset),
        None if fragments is None else tuple(fragments),
        _replica(value.replica_id),
        getattr(value, "prepend_axis_num", 0),
        getattr(value, "flattened_range", None),
        getattr(value, "allow_shape_mismatch", False),
        None if data is None else (data.shape, data.dtype),
    ), data


def _mcore_object(value: Any, _: _Seen) -> _Signed:
    shape, offsets = tuple(value.global_shape), tuple(value.global_offset)
    return ("mcore object", value.key, shape, offsets, _replica(value.replica_id)), value.data


def _replica(replica_id: Any) -> Any:
    return replica_id if isinstance(replica_id, int) else tuple(replica_id)


_SIGNS: dict[Kind, Callable[[Any, _Seen], _Signed | None]] = {
    "object": _object,
    "plain_tensor": _plain_tensor,
    "dtensor": _dtensor,
    "mcore_tensor": _mcore_tensor,
    "wrapped_mcore_tensor": lambda value, seen: _mcore_tensor(value._sh_ten, seen),
    "mcore_object": _mcore_object,
}
"""The others are read in full: FSDP1's ShardedTensor, chunk lists, and of DTensors those with one of their own."""
