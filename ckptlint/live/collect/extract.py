"""What this rank holds of a state dict: chunks and objects, and what is wrong with them without asking other ranks.

Nothing here communicates: attributes are read, and the chunk lists that tensors carry are asked for. Attributes decide
what a value is, never imports of the libraries that define it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from ckptlint.analysis.optimizer.inventory import optimizer_parts, split_state
from ckptlint.live.collect import compat
from ckptlint.live.collect.limit import Limit
from ckptlint.live.collect.tensor_digest import freed_bytes
from ckptlint.model import RankFinding
from ckptlint.model.cover import Shape
from ckptlint.model.text import shape_text
from ckptlint.model.tiling import Box
from ckptlint.vocabulary.keys import MOMENTS, parse
from ckptlint.vocabulary.placements import bounding_box, runs


class Flaw(NamedTuple):
    """What is wrong with a chunk by itself.

    Attributes:
        code: of the rule whose finding it is.
        text: a sentence of at most 200 bytes in which `{of}` stands for " of <fqn>".
        voids: whether the box of the chunk says nothing because of it.
    """

    code: str
    text: str
    voids: bool = True


_Leaf = tuple[tuple[Any, ...], Any]
"""The path of a value in the state dict, and the value."""

_Box = tuple[Shape, Shape]
"""Offsets and sizes."""

_SENTENCE = 200
_LEAVES = frozenset({bool, bytes, complex, float, int, str, type(None)})
_TENSOR = ("key", "data", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
_OBJECT = ("key", "data", "global_shape", "global_offset", "replica_id")
_FACTORY = ("build_fn", "merge_fn", "build")
_CHECKPOINTABLE = ("__create_chunk_list__", "shape", "dtype")
_REPLICA_BITS = 20

AXIS_LIMIT = 64
"""Axes of a tensor; one that has more is an object to live mode."""


class RankChunk(NamedTuple):
    """One chunk, or one object, that this rank holds.

    Attributes:
        fqn: path joined by dots as DCP flattens it, or Megatron-Core's `key`.
        kind: an object is a plain value (grid (1,)), or a ShardedObject (unit cell of its grid).
        writer: which library's rules of ownership apply.
        dtype: torch's name without the module, as DCP would record it; "" for objects.
        shape: global shape, in elements.
        offsets: first index of the chunk on each axis, in elements.
        sizes: extent of the chunk on each axis, in elements.
        replica: 0 the one that is written, n > 0 a further copy, -1 nobody declared who writes.
        copies: how many ranks hold this chunk, when the placements say so (DTensor); 0 unknown.
        data: the local torch.Tensor, or the object's value; None when the rank holds no data.
        view: of a torch ShardedTensor, a hash of where this rank believes all shards are; all ranks must share it.
        problems: what is wrong with this chunk by itself.

    Source: torch 2.13 torch.distributed.checkpoint.planner_helpers._create_write_items; megatron-core 0.16
    megatron.core.dist_checkpointing.mapping
    """

    fqn: str
    kind: Literal["tensor", "object"]
    writer: Literal["dtensor", "mcore", "sharded_tensor", "chunk_list", "plain"]
    dtype: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    replica: int
    copies: int
    data: Any
    view: bytes = b""
    problems: tuple[Flaw, ...] = ()


@dataclass(frozen=True, slots=True)
class _Share:
    """What the placements of a DTensor give to this rank; shared by all tensors that are cut alike."""

    shape: Shape
    offsets: Shape
    sizes: Shape
    replica: int
    copies: int
    declared: str
    problems: tuple[Flaw, ...]
    order: tuple[int, ...] | None


_Shares = dict[object, tuple[Any, "_Share | None"]]
"""By mesh, placements and shape; the mesh is kept so that no other one gets its id."""


def extract(
    state_dict: Mapping[Any, Any], *, resolve_stateful: bool = True, limit: Limit | None = None
) -> list[RankChunk]:
    """All chunks and objects of this rank, in the order of the state dict, as a save by DCP or Megatron-Core takes it.

    Args:
        resolve_stateful: whether `state_dict()` of top-level values that are Stateful is called, as DCP does.

    Raises:
        OutOfTime: the limit is reached.
    """
    limit = limit or Limit()
    rank_chunks: list[RankChunk] = []
    paths: dict[str, tuple[Any, ...]] = {}
    met: _Shares = {}
    leaves: list[_Leaf] = []
    with torch.no_grad():
        _walk((), resolved(state_dict, limit) if resolve_stateful else state_dict.items(), leaves, limit)
        for number, (path, value) in enumerate(leaves):
            if not number % 64:
                limit.look()
            fqn = ".".join(map(str, path))
            items = _read(fqn, value, met)
            if items and items[0].writer != "mcore" and (first := paths.setdefault(fqn, path)) is not path:
                clash = _problem("LIV108", f"two entries have the same key: {_path(first)} and {_path(path)}")
                items = [item._replace(problems=(*item.problems, clash)) for item in items]
            rank_chunks.extend(items)
    return _with_unsharded_states(rank_chunks)


# ---------------------------------------------------------------- the walk


def resolved(state_dict: Mapping[Any, Any], limit: Limit | None = None) -> Iterator[tuple[Any, Any]]:
    """The entries, with `state_dict()` called where a value is Stateful; entries below are pickled as they are.

    Source: torch 2.13 torch.distributed.checkpoint.state_dict_saver._stateful_to_state_dict
    """
    limit = limit or Limit()
    for key, value in limit.within(state_dict.items()):
        if _has(value, ("state_dict", "load_state_dict")):
            started = time.monotonic()
            value = value.state_dict()
            limit.extend(time.monotonic() - started)
        yield key, value


def _walk(path: tuple[Any, ...], entries: Iterable[tuple[Any, Any]], leaves: list[_Leaf], limit: Limit) -> None:
    """Add the values that are saved.

    Source: torch 2.13 torch.distributed.checkpoint._traverse.traverse_state_dict: mappings always, lists that hold a
    tensor or a mapping, no tuples.
    """
    for key, value in limit.within(entries):
        _leaves((*path, key), value, leaves, limit)


def _leaves(path: tuple[Any, ...], value: Any, leaves: list[_Leaf], limit: Limit) -> None:
    if type(value) in _LEAVES or isinstance(value, torch.Tensor):
        leaves.append((path, value))
    elif isinstance(value, Mapping):
        _walk(path, value.items(), leaves, limit)
    elif isinstance(value, list) and _is_walked(value, limit):
        _walk(path, enumerate(value), leaves, limit)
    elif isinstance(value, list):
        leaves.append((path, value))
    elif _has(value, _FACTORY):
        _leaves(path, value.build(), leaves, limit)
    elif type(value).__name__ != "LocalNonpersistentObject" and not _has(value, ("obj", "unwrap")):
        leaves.append((path, value))


def _is_walked(item: Any, limit: Limit) -> bool:
    """Whether a list is walked because it holds this."""
    if type(item) in _LEAVES:
        return False
    if isinstance(item, list):
        limit.look()
        return any(_is_walked(value, limit) for value in item)
    return isinstance(item, (torch.Tensor, Mapping)) or _has(item, _OBJECT) or _has(item, _FACTORY)


def _has(value: Any, names: Sequence[str]) -> bool:
    """Whether the object or its class define all these names; `__getattr__`, which may do anything, is not asked."""
    kind: Any = type(value)
    try:
        attributes = () if issubclass(kind, type) else getattr(value, "__dict__", ())
    except Exception:  # a property
        attributes = ()
    return all(name in attributes or _defines(kind, name) for name in names)


@cache
def _defines(kind: type, name: str) -> bool:
    """Whether a class has an attribute, whatever its metaclass makes up."""
    return any(name in base.__dict__ for base in kind.__mro__)


def _path(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


# ---------------------------------------------------------------- kinds


def _read(fqn: str, value: Any, met: _Shares) -> list[RankChunk]:
    """The chunks of a value; one that cannot be read as what it is, or has too many axes, is an object."""
    try:
        items = [_with_freed(item) for item in _as_it_is(fqn, value, met)]
        if all(len(item.shape) <= AXIS_LIMIT and set(map(type, item.shape)) <= {int} for item in items):
            return items
    except MemoryError:
        raise
    except Exception:  # code of the value's own class
        return [_plain_object(fqn, value)]
    return [_plain_object(fqn, value)]


def _as_it_is(fqn: str, value: Any, met: _Shares) -> list[RankChunk]:
    """The chunks of a value, which is read as its attributes tell; `met` are of DTensors that were met before."""
    if type(value) in _LEAVES:
        return [_plain_object(fqn, value)]
    if not isinstance(value, torch.Tensor):
        if _has(value, _TENSOR):
            return [_mcore_tensor(value.key, value)]
        if _has(value, _OBJECT):
            return [_mcore_object(value)]
        return _chunk_list(fqn, value) if _has(value, _CHECKPOINTABLE) else [_plain_object(fqn, value)]
    if hasattr(value, "_local_tensor") and hasattr(value, "_spec"):
        return _dtensor(fqn, value, met)
    if hasattr(value, "_sh_ten"):
        return [_mcore_tensor(fqn, value._sh_ten)]
    if hasattr(value, "local_shards") and hasattr(value, "metadata"):
        return _sharded_tensor(fqn, value)
    if hasattr(value, "__create_chunk_list__"):
        return _chunk_list(fqn, value)
    shape = tuple(value.shape)
    return [RankChunk(fqn, "tensor", "plain", _dtype(value.dtype), shape, (0,) * len(shape), shape, -1, 0, value)]


def _plain_object(fqn: str, value: Any) -> RankChunk:
    return RankChunk(fqn, "object", "plain", "", (1,), (0,), (1,), -1, 0, value)


def _mcore_object(value: Any) -> RankChunk:
    shape, offsets, replica = tuple(value.global_shape), tuple(value.global_offset), _replica(value.replica_id)
    cell = (1,) * len(shape)
    problems = _bounds(shape, offsets, cell)
    return RankChunk(value.key, "object", "mcore", "", shape, offsets, cell, replica, 0, value.data, problems=problems)


def _mcore_tensor(fqn: str, value: Any) -> RankChunk:
    """One chunk of a Megatron-Core ShardedTensor.

    Source: megatron-core 0.16 dist_checkpointing.strategies.checkpointable (plain), megatron-core 0.11 to 0.15
    dist_checkpointing.strategies.torch.sharded_tensor_to_torch_sharded_tensor (prepended axes, flattened range; 0.10
    and older did not give a flattened tensor of one axis a second one).
    """
    data, prepended, cut = value.data, getattr(value, "prepend_axis_num", 0), getattr(value, "flattened_range", None)
    local = tuple(value.local_shape)
    shape, offsets, sizes = tuple(value.global_shape), tuple(value.global_offset), (1,) * prepended + local
    problems = _regular_grid(value, sizes)
    if cut is not None:
        cells = tuple(offset // size if size else 0 for offset, size in zip(offsets, sizes, strict=True))
        shape = (*value.axis_fragmentations, prod(local))
        offsets, sizes = (*cells, cut.start), (1,) * len(cells) + (cut.stop - cut.start,)
    if data is not None:
        # A save leaves data with the prepended axes, and flat data with one axis per axis of the tensor.
        if (data.numel() != sizes[-1]) if cut is not None else tuple(data.shape) not in (local, sizes):
            has, expected = shape_text(data.shape), shape_text(sizes[-1:] if cut is not None else local)
            problems += (_problem("LIV101", f"the data{{of}} is {has}, but its chunk is declared as {expected}"),)
        if data.dtype != value.dtype:
            problems += (_payload_dtype(data.dtype, value.dtype),)
    problems += _bounds(shape, offsets, sizes)
    replica, dtype = _replica(value.replica_id), _dtype(value.dtype)
    return RankChunk(fqn, "tensor", "mcore", dtype, shape, offsets, sizes, replica, 0, data, problems=problems)


def _regular_grid(value: Any, sizes: Shape) -> tuple[Flaw, ...]:
    """What contradicts the regular grid that a Megatron-Core ShardedTensor declares with its fragmentations."""
    fragments, shape, offsets = value.axis_fragmentations, value.global_shape, value.global_offset
    if fragments is None or not len(fragments) == len(shape) == len(offsets) == len(sizes):
        return ()
    if getattr(value, "allow_shape_mismatch", False):
        return ()
    for axis, (count, size, offset, local) in enumerate(zip(fragments, shape, offsets, sizes, strict=True)):
        if count * local != size:
            said = f"{count} fragments of {local} make {count * local}, not {size}"
        elif local and offset % local:
            said = f"offset {offset} is not a multiple of the local size {local}"
        else:
            continue
        return (_problem("LIV110", f"dim {axis}{{of}} does not fit its grid: {said}"),)
    return ()


def _replica(replica_id: Any) -> int:
    """0 for the copy that is written, a positive number for each other one.

    Source: megatron-core 0.16 dist_checkpointing.mapping.is_main_replica
    """
    if isinstance(replica_id, int):
        return replica_id
    if not any(replica_id):
        return 0
    packed: int = sum(number << _REPLICA_BITS * place for place, number in enumerate(replica_id))
    return 1 + packed % (1 << 62)


def _sharded_tensor(fqn: str, value: Any) -> list[RankChunk]:
    """The shards of a torch ShardedTensor on this rank (FSDP1, torchrec; Megatron-Core makes them too).

    Source: torch 2.13 torch.distributed.checkpoint.planner_helpers._create_write_item_for_shard,
    torch.distributed.checkpoint._sharded_tensor_utils._flatten_sharded_tensors (a shard that is a ShardedTensor)
    """
    metadata, shards = value.metadata(), value.local_shards()
    shape, dtype = tuple(metadata.size), metadata.tensor_properties.dtype
    mcore = getattr(value, "mcore_sh_ten", None)
    view = b""
    if mcore is None:
        boxes = sorted((tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in metadata.shards_metadata)
        view = blake2b(repr(boxes).encode(), digest_size=8).digest()
    if len(shards) == 1 and hasattr(shards[0].tensor, "local_shards"):
        outer = shards[0].metadata.shard_offsets
        return [
            item._replace(shape=shape, offsets=tuple(map(int.__add__, item.offsets, outer)), view=b"")
            for item in _sharded_tensor(fqn, shards[0].tensor)
        ]
    rank_chunks = []
    writer: Literal["mcore", "sharded_tensor"] = "sharded_tensor" if mcore is None else "mcore"
    replica = -1 if mcore is None else _replica(mcore.replica_id)
    for shard in shards:
        data, offsets, sizes = shard.tensor, tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
        problems = _bounds(shape, offsets, sizes)
        if tuple(data.shape) != sizes:
            said = f"is {shape_text(data.shape)}, but its metadata says {shape_text(sizes)}"
            problems += (_problem("LIV101", f"the shard{{of}} {said}"),)
        if data.dtype != dtype:
            problems += (_payload_dtype(data.dtype, dtype),)
        box = shape, offsets, sizes
        rank_chunks.append(RankChunk(fqn, "tensor", writer, _dtype(dtype), *box, replica, 0, data, view, problems))
    return rank_chunks


def _chunk_list(fqn: str, value: Any) -> list[RankChunk]:
    """The chunks of a tensor that lists them itself; those of Megatron-Core's container know their owner."""
    shards = getattr(value, "_local_shards", None)
    if shards and all(hasattr(shard, "_sh_ten") for shard in shards):
        return [_mcore_tensor(fqn, shard._sh_ten) for shard in shards]
    item = RankChunk(fqn, "tensor", "chunk_list", _dtype(value.dtype), tuple(value.shape), (), (), -1, 0, value)
    return _several(item, _chunks(value))


def _chunks(value: Any) -> list[_Box]:
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.__create_chunk_list__()]


def _several(item: RankChunk, boxes: list[_Box]) -> list[RankChunk]:
    """The chunks at these boxes, each with its shard of the data, or the data where there is one of each."""
    shards = getattr(item.data, "_local_shards", None) or [item.data]
    if len(shards) != len(boxes):
        shards = [None] * len(boxes)
    rank_chunks = []
    for (offsets, sizes), data in zip(boxes, shards, strict=True):
        dtype = item.dtype if data is None else _dtype(data.dtype)
        problems = item.problems + _bounds(item.shape, offsets, sizes)
        rank_chunks.append(item._replace(dtype=dtype, offsets=offsets, sizes=sizes, data=data, problems=problems))
    return rank_chunks


# ---------------------------------------------------------------- DTensor


def _dtensor(fqn: str, value: Any, met: _Shares) -> list[RankChunk]:
    """The chunks of a DTensor on this rank, as DCP would write them.

    Source: torch 2.13 torch.distributed.tensor.DTensor.__create_write_items__ and __create_chunk_list__: what the local
    tensor overrides counts, else the placements.
    """
    local, spec = value._local_tensor, value._spec
    shape = spec.tensor_meta.shape
    key = (id(spec.mesh), spec.placements, shape, getattr(spec, "shard_order", None))
    try:
        _, share = met[key]
    except KeyError:
        share = _share(value, spec, tuple(shape))
        met[key] = spec.mesh, share
    if share is None:
        return []
    if hasattr(local, "__create_chunk_list__") or hasattr(local, "__create_write_items__"):
        return _overridden(fqn, value, share)
    problems = share.problems
    if share.order is not None:
        said = f"mesh axes split it in the order {share.order}, a save assumes left to right"
        problems += (_problem("LIV103", f"the chunk list{{of}} is missing: {said}"),)
    if local.shape != share.sizes:
        said = f"is {shape_text(local.shape)}, but {share.declared} gives {shape_text(share.sizes)}"
        problems += (_problem("LIV101", f"the local tensor{{of}} {said}"),)
    where = share.shape, share.offsets, share.sizes, share.replica, share.copies
    return [RankChunk(fqn, "tensor", "dtensor", _dtype(local.dtype), *where, local, b"", problems)]


def _share(value: Any, spec: Any, shape: Shape) -> _Share | None:
    """What the placements give to this rank; None for a rank outside of the mesh."""
    mesh, placements = spec.mesh, spec.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes_of_mesh = tuple(mesh.shape)
    replica, copies = 0, 1
    for place, size, placement in zip(coordinate, sizes_of_mesh, placements, strict=True):
        if placement.is_replicate():
            replica, copies = replica * size + place, copies * size
    declared = f"({', '.join(map(repr, placements))}) of {shape_text(shape)} on a mesh of {shape_text(sizes_of_mesh)}"
    problems: tuple[Flaw, ...] = ()
    if any(placement.is_partial() for placement in placements):
        problems += (_problem("LIV106", f"the values{{of}} are partial sums, not reduced yet: {declared}"),)
    order = None
    if all(map(compat.is_known, placements)):
        runs_by_dim = runs(shape, placements, sizes_of_mesh, coordinate)
        offsets, sizes = bounding_box(runs_by_dim, shape)
        for dim, dim_runs in enumerate(runs_by_dim):
            if len(dim_runs) > 1 and all(sizes):
                said = f"on dim {dim} it holds {sizes[dim]} of {shape[dim]} indices, in {len(dim_runs)} separate runs"
                problems += (_problem("LIV102", f"the shard{{of}} is not one box: {said}; {declared}"),)
        if (order := compat.shard_order(spec)) is not None:
            ordered_runs = runs(shape, placements, sizes_of_mesh, coordinate, order)
            order = None if bounding_box(ordered_runs, shape) == (offsets, sizes) else order
    else:
        ((offsets, sizes),) = _chunks(value)
    return _Share(shape, offsets, sizes, replica, copies, declared, problems, order)


def _overridden(fqn: str, value: Any, share: _Share) -> list[RankChunk]:
    """The chunks of a DTensor whose local tensor states its own place (Megatron-FSDP, LocalShardsWrapper)."""
    local = value._local_tensor
    placed = [(share.offsets, share.sizes)]
    read = _chunks(local) if hasattr(local, "__create_chunk_list__") else placed
    written = placed
    if hasattr(local, "__create_write_items__"):
        chunks = [item.tensor_data.chunk for item in local.__create_write_items__(fqn, value)]
        written = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    problems = tuple(problem for problem in share.problems if problem.code == "LIV106")
    if _live(read) != _live(written):
        said = f"a save writes {_boxes(written)}, a load reads {_boxes(read)}"
        problems += (_problem("LIV103", f"the chunk lists{{of}} contradict each other: {said}"),)
    boxes = written or _live(read)
    if len(boxes) == 1 and not hasattr(local, "_local_shards"):
        problems += _against_placements(value, boxes[0], share)
    owners = share.replica, share.copies
    item = RankChunk(fqn, "tensor", "dtensor", _dtype(local.dtype), share.shape, (), (), *owners, local, b"", problems)
    return _several(item, boxes)


def _against_placements(value: Any, box: _Box, share: _Share) -> tuple[Flaw, ...]:
    """What the local tensor and the placements say against the chunk that is declared instead."""
    local, shape, (_, sizes) = value._local_tensor, share.shape, box
    if len(shape) != len(sizes):
        return ()
    if tuple(local.shape) != sizes:
        said = f"is {shape_text(local.shape)}, but its chunk is {Box(*box)}"
        return (_problem("LIV101", f"the local tensor{{of}} {said}"),)
    sharded = {placement.dim for placement in value._spec.placements if hasattr(placement, "dim")}
    cut = [dim for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size != whole]
    if all(sizes) and not sharded.issuperset(cut):
        dim = min(set(cut) - sharded)
        said = f"splits dim {dim} ({sizes[dim]} of {shape[dim]}), but no placement shards it: {share.declared}"
        return (_problem("LIV104", f"the chunk list{{of}} {said}", voids=False),)
    return ()


def _live(boxes: list[_Box]) -> list[_Box]:
    return sorted(box for box in boxes if all(box[1]))


def _boxes(boxes: list[_Box]) -> str:
    return " ".join(str(Box(*box)) for box in boxes[:3]) + " ..." * (len(boxes) > 3) or "nothing"


# ---------------------------------------------------------------- problems


def findings_of(rank_chunks: Iterable[RankChunk], rank: int) -> list[RankFinding]:
    """The problems of what a rank holds, as findings for the other ranks."""
    return [
        RankFinding(rank, item.fqn, problem.code, problem.text, voids="chunks" if problem.voids else "")
        for item in rank_chunks
        for problem in item.problems
    ]


def _problem(code: str, sentence: str, voids: bool = True) -> Flaw:
    """A problem whose sentence is cut to the length that travels between ranks."""
    if len(encoded := sentence.encode(errors="backslashreplace")) <= _SENTENCE:
        return Flaw(code, encoded.decode(), voids)
    return Flaw(code, encoded[: _SENTENCE - 3].decode(errors="ignore") + "...", voids)


def _with_freed(item: RankChunk) -> RankChunk:
    """The same, with LIV111 where its memory was freed."""
    if not isinstance(item.data, torch.Tensor) or (sizes := freed_bytes(item.data)) is None:
        return item
    stored, needed = sizes
    said = f"the memory{{of}} was freed: its storage has {stored:,} bytes, and its elements need {needed:,}"
    return item._replace(problems=(*item.problems, _problem("LIV111", said, voids=False)))


def _bounds(shape: Shape, offsets: Shape, sizes: Shape) -> tuple[Flaw, ...]:
    if not len(shape) == len(offsets) == len(sizes):
        box = f"offsets {shape_text(offsets)} and sizes {shape_text(sizes)}"
        said = f"{box}{{of}} do not have the {len(shape)} axes of its shape {shape_text(shape)}"
        return (_problem("LIV105", said),)
    for offset, size, whole in zip(offsets, sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            said = f"chunk {Box(offsets, sizes)}{{of}} reaches outside the tensor, whose shape is {shape_text(shape)}"
            return (_problem("LIV105", said),)
    return ()


def _payload_dtype(data: torch.dtype, declared: torch.dtype) -> Flaw:
    said = f"the data{{of}} is {_dtype(data)}, but declared as {_dtype(declared)}"
    return _problem("LIV107", said, voids=False)


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_unsharded_states(rank_chunks: list[RankChunk]) -> list[RankChunk]:
    """The same, with LIV109 on optimizer states that hold one shard of their parameter as a plain tensor."""
    plain = ((i, item) for i, item in enumerate(rank_chunks) if item.writer == "plain" and item.kind == "tensor")
    states = {i: path for i, item in plain if (path := _param_of_state(item))}
    params: dict[str, list[RankChunk]] = {}
    for item in rank_chunks if states else ():
        if item.writer == "dtensor" and item.sizes != item.shape and (key := parse(item.fqn)).kind == "model":
            params.setdefault(key.path, []).append(item)
    for i, path in states.items():
        item, of_path = rank_chunks[i], params.get(path, [])
        if len(of_path) == 1 and of_path[0].sizes == item.shape:
            whole = shape_text(of_path[0].shape)
            said = f"is a plain tensor {shape_text(item.shape)}, the size of one shard of its parameter {whole}"
            problem = _problem("LIV109", f"the state{{of}} {said}", voids=False)
            rank_chunks[i] = item._replace(problems=(*item.problems, problem))
    return rank_chunks


def _param_of_state(item: RankChunk) -> str:
    """The path of the parameter of which this plain tensor is an optimizer state, element by element; or ""."""
    if prod(item.shape) < 2:
        return ""
    key = parse(item.fqn)
    _, rest = optimizer_parts(key) if key.kind == "optimizer" else ((), "")
    named = split_state(rest.removeprefix("state.")) if rest.startswith("state.") else None
    return parse(named[1]).path if named is not None and named[0] in MOMENTS else ""
