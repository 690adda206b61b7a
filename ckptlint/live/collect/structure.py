"""Whether a state dict is made as it was at the last check, for a tenth of what reading it costs.

A signature holds every attribute that `extract` looks at, or what it made of them: where two are equal, so is what is
read, but for the contents. Nothing is recognised by the identity of a tensor or of its spec: `detach()` makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ckptlint.live.collect import compat
from ckptlint.live.collect.extract import READERS, Held, Kind, Leaf, Parts, fqn_of, kind_of

_KEYS = frozenset({str, int})
"""Types of keys of which equal ones read alike; True is 1 and reads otherwise."""

_local = attrgetter("_local_tensor")
_mesh = attrgetter("_spec.mesh")
_placements = attrgetter("_spec.placements")


@dataclass(frozen=True, slots=True)
class Structure:
    """What a state dict is made of; equal ones are extracted alike. Nothing in it changes when the state does.

    Attributes:
        paths: where its values lie.
        dtensors: numbers of the values that are DTensors like most.
        specs: of each of these its placements, shapes and dtype.
        meshes: of each of these the id of its mesh.
        places: by id the mesh, its shape, the place of this rank, and the order of its dims where it declares one. The
            mesh is held, so that no other one gets the id.
        others: of each other value what is read of it.
    """

    paths: list[tuple[Any, ...]]
    dtensors: list[int]
    specs: list[tuple[Any, ...]]
    meshes: list[int]
    places: dict[int, tuple[Any, ...]]
    others: list[tuple[Any, ...]]


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
    paths, values = [path for path, _ in found], [value for _, value in found]
    places: dict[int, tuple[Any, ...]] = {}
    kinds = list(map(type, values))
    sharded = {kind for kind in set(kinds) if compat.is_dtensor(kind)}
    dtensors = _usual([i for i, kind in enumerate(kinds) if kind in sharded], values, places)
    tensors = [values[i] for i in dtensors]
    contents = list(values)
    for i, local in zip(dtensors, map(_local, tensors), strict=True):
        contents[i] = local
    others: list[tuple[Any, ...]] = []
    known: dict[int, list[Held]] = {}
    parts: Parts = {}
    for i in sorted(set(range(len(values))).difference(dtensors)) if len(dtensors) < len(values) else ():
        kind = kind_of(values[i])
        if kind in _SIGNS:
            signature, contents[i] = _SIGNS[kind](values[i])
        else:
            with torch.no_grad():
                held = known[i] = READERS[kind](fqn_of(paths[i]), values[i], parts)
            signature = tuple(item._replace(data=isinstance(item.data, torch.Tensor)) for item in held)
        others.append(signature)
    if known:
        rows = ([item.data for item in known[i]] if i in known else (data,) for i, data in enumerate(contents))
        contents = list(chain.from_iterable(rows))
    if not _KEYS.issuperset(map(type, chain.from_iterable(paths))):
        return Reading(None, contents, known)
    specs, meshes = list(map(compat.spec_of, tensors)), list(map(id, map(_mesh, tensors)))
    return Reading(Structure(paths, dtensors, specs, meshes, places, others), contents, known)


def _usual(numbers: list[int], values: Sequence[Any], places: dict[int, tuple[Any, ...]]) -> list[int]:
    """The DTensors whose placements say it all and of which this rank has a part; `places` is filled with their meshes.

    The others say themselves where they lie, hold nothing here, or have placements that torch does not define.
    """
    tensors = [values[i] for i in numbers]
    locals_ = list(map(_local, tensors))
    unusual: set[int] = set()
    for name in ("__create_chunk_list__", "__create_write_items__"):
        if any(map(hasattr, locals_, repeat(name))):
            unusual.update(i for i, local in zip(numbers, locals_, strict=True) if hasattr(local, name))
    places.update((key, compat.place_in(mesh)) for key, mesh in _by_id(list(map(_mesh, tensors))).items())
    placements = _by_id(list(map(_placements, tensors)))
    loose = {key for key, found in placements.items() if not all(map(compat.is_fixed, found))}
    outside = {key for key, (_, _, coordinate, _) in places.items() if coordinate is None}
    if loose or outside:
        for i, tensor in zip(numbers, tensors, strict=True):
            if id(_placements(tensor)) in loose or id(_mesh(tensor)) in outside:
                unusual.add(i)
    return [i for i in numbers if i not in unusual] if unusual else numbers


def _by_id(items: list[Any]) -> dict[int, Any]:
    return dict(zip(map(id, items), items, strict=True))


# ---------------------------------------------------------------- what is read of each other kind, and its contents


def _plain_tensor(value: Any) -> tuple[tuple[Any, ...], Any]:
    return ("plain", value.shape, value.dtype), value


def _mcore_tensor(value: Any) -> tuple[tuple[Any, ...], Any]:
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


def _mcore_object(value: Any) -> tuple[tuple[Any, ...], Any]:
    shape, offsets = tuple(value.global_shape), tuple(value.global_offset)
    return ("mcore object", value.key, shape, offsets, _replica(value.replica_id)), value.data


def _replica(replica_id: Any) -> Any:
    return replica_id if isinstance(replica_id, int) else tuple(replica_id)


_SIGNS: dict[Kind, Callable[[Any], tuple[tuple[Any, ...], Any]]] = {
    "object": lambda value: (("object",), value),
    "plain_tensor": _plain_tensor,
    "mcore_tensor": _mcore_tensor,
    "wrapped_mcore_tensor": lambda value: _mcore_tensor(value._sh_ten),
    "mcore_object": _mcore_object,
}
"""Of the kinds that are not here everything is read, which is their signature: ShardedTensors of FSDP1, chunk lists."""
