"""A file that torch.save wrote: its value as plain Python, its tensors as what the pickle says of them.

An archive is read by its directory and its `data.pkl` alone, in a few ranges; what is in the storages is not. Tensors
become `StoredTensor`, those of a device mesh `StoredDTensor` and `StoredShards`; classes of the training code stay the
inert `Opaque`. The few storages that say how something is cut (the ranks of a mesh) are small and are read too. Files
of torch < 1.6 are pickles in a row, with the storages after them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import SEEK_END
from math import prod
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar
from zlib import crc32

import numpy as np

from ckptlint.errors import ForeignError, LimitError, ScriptError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import Opaque, Unpickled, read_row, read_state
from ckptlint.formats.pickles.stand_ins import SCALARS
from ckptlint.formats.pointers import pointer_in
from ckptlint.formats.torch_archive import LOCAL_SIZE, Member, Read, data_start, ranges_in, read_archive
from ckptlint.formats.torch_legacy import PICKLES, PICKLES_LIMIT, is_legacy, is_tar
from ckptlint.model import RANK_LIMIT, RecordContent
from ckptlint.model.stored import Mesh, Placement, StoredDTensor, StoredShards, StoredTensor
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import FORMS, ITEM_BITS, STORAGES

_ARCHIVE = b"PK\3\4"
_HEAD = 4096
_ALIGNMENT = 64
_MESH_LIMIT = 8 * 2**20  # bytes of the ranks of a mesh
_PICKLED_LIMIT = 64 * 1024**2  # a bare pickle in place of an archive
_PICKLED = lazy_pattern(rb"\x80[\2-\5]")
_WIDE = 0xFFFFFFFF

Made = TypeVar("Made", Mesh, Placement)


class Storage(NamedTuple):
    """Where the bytes of a storage lie.

    In an archive `start` is foretold from the place of the header, as torch aligns; the header itself is read at the
    depths that open records.
    """

    name: bytes  # of the member, b"" in a file without members
    header: int  # first byte of its local header, -1 without one
    start: int  # first byte of its data
    size: int  # bytes of its data
    crc: int  # CRC-32 as recorded, 0 where none was


class TorchFile(NamedTuple):
    """What a file of torch.save holds.

    `faults` is what contradicts itself in it, as sentences without a subject (`has ...`), each with a byte position.
    """

    root: Any  # the value; dicts, lists and tuples as stored, with `Stored` for tensors
    prefix: str  # the folder inside the archive, the stem of the file's name when it was written; "" without
    storages: Mapping[str, Storage]  # key -> place of its bytes
    unpickled: Unpickled  # the names that the pickles may not ask for, and those nobody knows, without the object
    size: int  # bytes of the file
    faults: tuple[tuple[str, int], ...] = ()


def read_torch_file(folder: Folder, name: str, read_bare: Callable[[bytes], Unpickled] = read_state) -> TorchFile:
    """A file of torch.save, or a bare pickle, which `read_bare` reads.

    Raises:
        UnreadableError: it is empty, cut, damaged, or readers could take it for different things.
        ForeignError: it is no such file.
        ScriptError: torch.jit.save wrote it.
        LimitError: it would take more to read than such a file may need.
        AccessError: the operating system refused a read.

    Source: torch.serialization (1.0 - 2.13), caffe2/serialize/inline_container.cc
    """
    return _read(ranges_of(folder, name), folder.stat(name)[1] or 0, read_bare)


def read_torch_bytes(data: bytes) -> TorchFile:
    """The same for bytes in memory, such as a record of a payload file."""
    return _read(ranges_in(data), len(data), without_content=ForeignError)


def read_torch_stream(file: BinaryIO) -> TorchFile:
    """The same for an open file that can be read at any place."""

    def read(spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [file.read(length) for start, length in spans if file.seek(start) >= 0]

    return _read(read, file.seek(0, SEEK_END), without_content=ForeignError)


def ranges_of(folder: Folder, name: str) -> Read:
    """Reads ranges of a file."""
    return lambda spans: folder.ranges(name, spans)


def _read(
    read: Read,
    size: int,
    read_bare: Callable[[bytes], Unpickled] = read_state,
    without_content: type[UnreadableError] = UnreadableError,
) -> TorchFile:
    """A file of `torch.save`: an archive, the legacy stream, or a bare pickle."""
    [head] = read([(0, min(size, _HEAD))])
    if not head:
        raise without_content("is empty (0 bytes)", 0)
    if head[:4] == _ARCHIVE:
        try:
            return _archive(read, size)
        except (LimitError, ForeignError, ScriptError):  # a zip file of something else, which all readers read alike
            raise
        except UnreadableError as error:
            # a zip file of something else may be compressed, commented, or of any other form
            kind = UnreadableError if b"data.pkl" in (head + _tail(read, size)).lower() else ForeignError
            raise kind(str(error), error.position) from None
    if is_tar(head):
        raise UnreadableError("starts as a tar archive, in which torch.load looks for another pickle first", 0)
    if is_legacy(head):
        return _old_file(read, size)
    if pointer := pointer_in(head):
        raise without_content(pointer, 0)
    if not head.strip(b"\0"):
        tail = _tail(read, size)  # of an array of something else, some bytes are not zero
        kind = without_content if b"data.pkl" in tail or not tail.strip(b"\0") else ForeignError
        raise kind("starts with zero bytes instead of the first member of a torch.save archive", 0)
    foreign = ForeignError(f"is not a file of torch.save: it starts with the bytes {head[:4].hex(' ')}", 0)
    if size > _PICKLED_LIMIT:
        too_large = LimitError(f"has {size:,} bytes, the limit is {_PICKLED_LIMIT:,}")
        raise too_large if _PICKLED.match(head) else foreign
    try:
        return _file(read_bare(read([(0, size)])[0]), "", {}, size, read)
    except ForeignError:
        if head[0] == 0x80:
            raise
        raise foreign from None


def _tail(read: Read, size: int) -> bytes:
    return read([(max(size - _PICKLED_LIMIT, 0), min(size, _PICKLED_LIMIT))])[0]


def storage_bytes(read: Read, place: Storage) -> bytes:
    """The bytes of a small storage; fewer where the file ends before.

    Raises:
        UnreadableError: the bytes do not match their checksum.
    """
    if place.header < 0:
        return read([(place.start, place.size)])[0]
    [data] = read([(place.header, LOCAL_SIZE + len(place.name) + 4 * _ALIGNMENT + place.size)])
    begin = data_start(data, Member(place.name, place.crc, place.size, 0))
    content = data[begin : begin + place.size]
    if place.crc and crc32(content) != place.crc:
        raise UnreadableError("has a storage whose bytes do not match their checksum", place.start)
    return content


def number_in(read: Read, file: TorchFile, value: Any) -> int | None:
    """The whole number that a value is, or that a tensor of one element holds; None for anything else."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    place = file.storages.get(value.key) if isinstance(value, StoredTensor) else None
    is_bfloat16 = isinstance(value, StoredTensor) and value.dtype == "bfloat16"  # the upper half of a float32
    form = "<H" if is_bfloat16 else FORMS.get(value.dtype) if isinstance(value, StoredTensor) else None
    if place is None or form is None or prod(value.shape) != 1 or place.size > 64:
        return None
    try:
        [number] = struct.unpack_from(form, storage_bytes(read, place), value.offset * struct.calcsize(form))
    except (UnreadableError, struct.error):
        return None
    if is_bfloat16:
        [number] = struct.unpack("<f", struct.pack("<I", number << 16))
    return int(number) if number == number and abs(number) < 2**62 and number == int(number) else None


# ---------------------------------------------------------------- the two containers


def _archive(read: Read, size: int) -> TorchFile:
    archive = read_archive(read, size)
    prefix = printable(archive.members[0].name.partition(b"/")[0].decode("utf-8", "surrogateescape"))
    storages = {
        member.short[5:]: Storage(member.name, member.header, _begin(member, limit), member.size, member.crc)
        for member, limit in zip(archive.members, archive.limits, strict=True)
        if member.is_storage
    }
    try:
        unpickled = read_state(archive.pickle)
    except ForeignError as error:
        raise UnreadableError(str(error), error.position) from None
    return _file(unpickled, prefix, storages, size, read)


def _begin(member: Member, limit: int) -> int:
    """Where torch starts a member's data: at the next multiple of 64 after its local header.

    Source: caffe2/serialize/inline_container.cc, getPadding
    """
    after = member.header + LOCAL_SIZE + len(member.name)
    wide = 16 * (member.size >= _WIDE) + 8 * (member.header >= _WIDE)
    start = -(-(after + 4 + (4 + wide if wide else 0)) // _ALIGNMENT) * _ALIGNMENT
    return start if start + member.size <= limit else after


def _old_file(read: Read, size: int) -> TorchFile:
    """Pickles in a row, then for each storage, in the order of the last pickle, its length and its bytes.

    Source: torch.serialization._legacy_save, torch/csrc/serialization.cpp THPStorage_writeFileRaw
    """
    pickles, at, error = read_row(read([(0, min(size, PICKLES_LIMIT))])[0])
    refused = tuple(name for pickled in pickles for name in pickled.refused)
    unknown = tuple(dict.fromkeys(name for pickled in pickles for name in pickled.unknown))
    if refused and (error is not None or len(pickles) < PICKLES or pickles[3].root is None):
        return _file(Unpickled(None, refused, unknown), "", {}, size, read)
    if error is not None:
        raise error
    if len(pickles) < PICKLES:
        raise UnreadableError(f"ends at byte {at:,} after {len(pickles)} of the {PICKLES} pickles of its format", at)
    keys = pickles[4].root
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise UnreadableError("has no list of its storages after its value")
    nodes = (node for node in _nodes(pickles[3].root) if (node.module, node.name) == ("torch", "storage"))
    lengths = {pid[2]: pid for pid in map(_pid, nodes) if pid is not None}
    storages = {}
    for key in keys:
        kind = lengths[key][1].name if key in lengths else ""
        item = 1 if kind == "UntypedStorage" else ITEM_BITS.get(STORAGES.get(kind, "unknown"), 0) // 8
        if not item:
            raise UnreadableError(f"has a storage {printable(key)} that nothing in it describes", at)
        length = lengths[key][4] * item
        storages[key] = Storage(b"", -1, at + 8, length, 0)
        at += 8 + length
    made = _file(Unpickled(pickles[3].root, refused, unknown), "", storages, size, read)
    faults = () if at == size else ((f"has {size:,} bytes, its storages end at {at:,}", min(at, size)),)
    return made._replace(faults=made.faults + faults)


def _nodes(root: Any) -> Iterator[Opaque]:
    stack, seen = [root], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Opaque):
            yield value
            stack += [value.args, value.state, *value.items]
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            stack += value


# ---------------------------------------------------------------- values


def _file(unpickled: Unpickled, prefix: str, storages: Mapping[str, Storage], size: int, read: Read) -> TorchFile:
    reading = _Reading(read, storages)
    try:
        root = reading.value(unpickled.root)
    except RecursionError:
        raise LimitError("is nested too deeply") from None
    verdict = Unpickled(None if unpickled.root is None else True, unpickled.refused, unpickled.unknown)
    return TorchFile(root, prefix, storages, verdict, size, tuple(dict.fromkeys(reading.faults)))


@dataclass(slots=True)
class _Reading:
    """Turns the stand-ins of one pickle into values; each object once, so that shared ones stay shared."""

    read: Read
    storages: Mapping[str, Storage]
    memo: dict[int, Any] = field(default_factory=dict)
    faults: list[tuple[str, int]] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)

    def value(self, value: Any) -> Any:
        """The value with tensors in place of what rebuilds them."""
        if not isinstance(value, (dict, list, tuple, Opaque)):
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        made: Any
        if isinstance(value, dict):
            made = self.memo[id(value)] = {}
            for key, item in value.items():
                kept = item if type(item) in SCALARS else self.value(item)
                is_kept = isinstance(key, (str, int, float, bytes, tuple)) or key is None
                made[key if is_kept else printable(repr(key))] = kept
        elif isinstance(value, list):
            made = self.memo[id(value)] = []
            made.extend(item if type(item) in SCALARS else self.value(item) for item in value)
        elif isinstance(value, tuple):
            made = value if all(type(item) in SCALARS for item in value) else tuple(map(self.value, value))
        else:
            made = self._node(value)
        self.memo[id(value)] = made
        return made

    def _node(self, node: Opaque) -> Any:
        args = node.args
        if node.module == "torch._tensor" and node.name == "_rebuild_from_type_v2" and len(args) == 4:
            if _is(args[0], "_rebuild_wrapper_subclass") and _is(args[1], "DTensor"):
                return self._dtensor(args[2], _attributes(args[3])) or node
            if _is(args[1], "ShardedTensor"):
                return self._shards(args[2], args[3]) or node
        tensor = stored_tensor(node) if node.module in ("torch._utils", "torch._tensor") else None
        if tensor is not None:
            self._judge(tensor)
        return node if tensor is None else tensor

    def _judge(self, tensor: StoredTensor) -> None:
        """Whether its storage is there, is as long as the pickle says, and holds it."""
        if tensor.key in self.reported:
            return
        place, member = self.storages.get(tensor.key), f"data/{printable(tensor.key)}"
        bits, end = ITEM_BITS.get(tensor.dtype, 0), tensor.offset + tensor.extent
        size = tensor.length * bits // 8
        if place is None:
            fault = f"has no member {member}, but its data.pkl has a tensor there"
        elif bits and tensor.length >= 0 and size != place.size:
            fault = f"has {place.size:,} bytes in {member}, but its data.pkl says {size:,}"
        elif 0 <= tensor.length < end:
            fault = f"has a tensor of {end:,} elements in {member}, which has {tensor.length:,}"
        else:
            return
        self.reported.add(tensor.key)
        self.faults.append((fault, place.header if place is not None else 0))

    def _dtensor(self, made: Any, state: dict[str, Any]) -> StoredDTensor | None:
        """`_rebuild_wrapper_subclass(type, dtype, shape, ...)` with `{_local_tensor, _spec}` as its state.

        Source: torch.distributed.tensor.DTensor (torch 2.4 - 2.13)
        """
        if not isinstance(made, tuple) or len(made) < 3 or not _counts(made[2]):
            return None
        local, stated = self.value(state.get("_local_tensor")), _state(state.get("_spec"))
        mesh = self._once(self._mesh, stated.get("mesh"))
        stated_placements = stated.get("placements")
        if not isinstance(local, StoredTensor) or mesh is None or not isinstance(stated_placements, tuple):
            return None
        placements = tuple(self._once(_placement, node) for node in stated_placements)
        if len(placements) != len(mesh.shape) or None in placements:
            return None
        dtype = str(made[1]) if isinstance(made[1], str) else local.dtype
        order = _order(stated.get("shard_order"), len(placements))
        return StoredDTensor(dtype, made[2], local, placements, mesh, order)  # type: ignore[arg-type]

    def _once(self, make: Callable[[Opaque], Made | None], node: Any) -> Made | None:
        """What is made of an object, one for all who share it."""
        if not isinstance(node, Opaque):
            return None
        if id(node) not in self.memo:
            self.memo[id(node)] = None  # a mesh that is its own root
            self.memo[id(node)] = make(node)
        made: Made | None = self.memo[id(node)]
        return made

    def _mesh(self, node: Opaque) -> Mesh | None:
        """The mesh that a DeviceMesh states; None where it holds no tensor of ranks."""
        state = _state(node)
        names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            names = ()
        at = _tuple(state.get("_coordinate_on_dim"))
        rank = state.get("_rank")
        rank = rank if type(rank) is int and 0 <= rank < 2**31 else -1
        if "mesh" in state:  # torch <= 2.9
            tensor = self.value(state["mesh"])
            if not isinstance(tensor, StoredTensor):
                return None
            strides = tuple(prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
            return Mesh(tuple(map(printable, names)), tensor.shape, strides, self._ranks(tensor), False, at, rank)
        axes = _state(state.get("_layout")).get("axes")
        sizes = [_axis(axis) for axis in axes] if isinstance(axes, tuple) else [None]
        if None in sizes:
            return None
        ranks = _tuple(state.get("_flatten_rank_map"))
        if ranks is None:
            tensor = self.value(state.get("_rank_map"))
            ranks = self._ranks(tensor) if isinstance(tensor, StoredTensor) else ()
        shape, strides = tuple(axis[0] for axis in sizes if axis), tuple(axis[1] for axis in sizes if axis)
        return Mesh(tuple(map(printable, names)), shape, strides, ranks, True, at, rank)

    def _ranks(self, tensor: StoredTensor) -> tuple[int, ...]:
        place, bits = self.storages.get(tensor.key), ITEM_BITS.get(tensor.dtype, 0)
        if place is None or bits not in (32, 64) or place.size > _MESH_LIMIT:
            return ()
        numbers = np.frombuffer(storage_bytes(self.read, place), f"<i{bits // 8}", prod(tensor.shape))
        return tuple(numbers.tolist())

    def _shards(self, made: Any, state: Any) -> StoredShards | None:
        """`_rebuild_wrapper_subclass(type, dtype, shape, ...)` with (local shards, metadata, process group, ...).

        Source: torch.distributed._shard.sharded_tensor.api.ShardedTensor.__getstate__ (torch 2.13)
        """
        if not isinstance(made, tuple) or len(made) < 3 or not _counts(made[2]):
            return None
        if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
            return None
        described = _state(state[1]).get("shards_metadata")
        tiling = [_shard_place(item) for item in described] if isinstance(described, list) else [None]
        shards = []
        for shard in state[0]:
            tensor, place = self.value(_state(shard).get("tensor")), _shard_place(_state(shard).get("metadata"))
            if not isinstance(tensor, StoredTensor) or place is None:
                return None
            shards.append((place[0], place[1], tensor))
        if None in tiling:
            return None
        group = _state(state[2])
        rank, world = group.get("global_rank"), group.get("global_world_size")
        rank = rank if type(rank) is int and 0 <= rank < 2**31 else -1
        world = world if type(world) is int and 0 < world < 2**31 else 0
        dtype = str(made[1]) if isinstance(made[1], str) else "unknown"
        places = tuple(place for place in tiling if place is not None)
        return StoredShards(dtype, made[2], tuple(shards), places, rank, world)


def _placement(node: Opaque) -> Placement | None:
    state = _state(node)
    dim, factor = state.get("dim"), state.get("split_factor")
    fits = dim is None or (type(dim) is int and 0 <= dim < RANK_LIMIT)
    fits &= factor is None or (type(factor) is int and 0 < factor < 2**31)
    return Placement(printable(node.name), dim, factor) if fits else None


def _order(entries: Any, axes: int) -> tuple[int, ...] | None:
    """(dim, axes of the mesh) of each dim that several axes cut, as one order of the axes.

    Source: torch.distributed.tensor._dtensor_spec.ShardOrderEntry (torch 2.13)
    """
    if not isinstance(entries, tuple):
        return None
    cuts = [_tuple(entry.args[1]) if isinstance(entry, Opaque) and len(entry.args) == 2 else None for entry in entries]
    if None in cuts:
        return None
    order = tuple(axis for cut in cuts if cut for axis in cut)
    return order if len(set(order)) == len(order) and all(axis < axes for axis in order) else None


def _axis(layout: Any) -> tuple[int, int] | None:
    """Size and stride of an axis; None for one that was flattened from several that do not lie end to end."""
    sizes, steps = _tuple(_state(layout).get("shape")), _tuple(_state(layout).get("stride"))
    if not sizes or steps is None or len(sizes) != len(steps):
        return None
    inner = zip(sizes[1:], steps[1:], steps, strict=False)
    return (prod(sizes), steps[-1]) if all(size * step == outer for size, step, outer in inner) else None


def _shard_place(node: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Offsets, sizes and rank of a `ShardMetadata`; the rank -1 where it is not said."""
    state = _state(node)
    offsets, sizes = _tuple(state.get("shard_offsets")), _tuple(state.get("shard_sizes"))
    rank = _state(state.get("placement")).get("_rank")
    if offsets is None or sizes is None or len(offsets) != len(sizes):
        return None
    return offsets, sizes, rank if type(rank) is int and 0 <= rank < 2**31 else -1


def stored_tensor(node: Any) -> StoredTensor | None:
    """The plain tensor that a call rebuilds, or that is inside a parameter or a subclass; None for other calls.

    Source: torch._utils._rebuild_tensor_v2 and _v3 (the latter with the dtype as seventh argument, for dtypes without a
    storage class of their own), torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_parameter
    """
    wrapped = False
    if isinstance(node, Opaque) and node.name.startswith("_rebuild_parameter") and node.args:
        node = node.args[0]
    if not isinstance(node, Opaque):
        return None
    name, args = node.name, node.args
    if name == "_rebuild_from_type_v2" and len(args) >= 3 and isinstance(args[2], tuple):
        if not (isinstance(args[0], type) and issubclass(args[0], Opaque)):
            return None
        wrapped, name, args = not _is_plain(args[1]), args[0].name, args[2]
    if name not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3") or len(args) < 4:
        return None
    storage, offset, shape, strides = args[:4]
    pid = _pid(storage)
    if pid is None or not (_counts((offset,)) and _counts(shape) and _counts(strides) and len(shape) == len(strides)):
        return None
    dtype = STORAGES.get(pid[1].name, "unknown")
    if name == "_rebuild_tensor_v3" and len(args) >= 7 and isinstance(args[6], str):
        dtype = str(printable(args[6]))
    rest = args[7:] if name == "_rebuild_tensor_v3" else args[6:]  # a view may be conjugated or negated
    wrapped |= any(any(flags.values()) for flags in rest if isinstance(flags, dict))
    length = pid[4]
    if pid[1].name == "UntypedStorage":
        length = length * 8 // bits if (bits := ITEM_BITS.get(dtype, 0)) else -1
    return StoredTensor(dtype, shape, strides, offset, pid[2], length, wrapped)


def subclass_form(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor of a class that holds other tensors, such as torchao's; both () for other calls.

    Source: torch._utils._rebuild_wrapper_subclass, called by torch._tensor._rebuild_from_type_v2
    """
    if isinstance(node, Opaque) and node.name.startswith("_rebuild_parameter") and node.args:
        node = node.args[0]
    args = node.args if isinstance(node, Opaque) and node.name == "_rebuild_from_type_v2" else ()
    if len(args) < 3 or not _is(args[0], "_rebuild_wrapper_subclass"):
        return (), ()
    shape, strides = args[2][2:4] if isinstance(args[2], tuple) and len(args[2]) > 3 else ((), ())
    is_form = _counts(shape) and _counts(strides) and len(shape) == len(strides)
    return (shape, strides) if is_form else ((), ())


def _is_plain(node: Any) -> bool:
    """Whether a class is torch's own: such a tensor has attributes of Python beside its elements, no other meaning."""
    plain = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))
    return isinstance(node, type) and issubclass(node, Opaque) and (node.module, node.name) in plain


def record_content(tensor: StoredTensor) -> RecordContent:
    """What a record that holds this tensor says of it."""
    form: Literal["tensor", "subclass"] = "subclass" if tensor.wrapped else "tensor"
    return RecordContent(form, tensor.dtype, tensor.shape, tensor.strides, tensor.offset, f"data/{tensor.key}")


def _pid(storage: Any) -> tuple[Any, ...] | None:
    pid = storage.args[0] if isinstance(storage, Opaque) and storage.args else None
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage" or not isinstance(pid[2], str):
        return None
    is_class = isinstance(pid[1], type) and issubclass(pid[1], Opaque)
    return pid if is_class and _counts((pid[4],)) else None


def _is(value: Any, name: str) -> bool:
    return isinstance(value, type) and issubclass(value, Opaque) and value.name == name


def _counts(values: Any) -> bool:
    is_short = isinstance(values, tuple) and len(values) <= RANK_LIMIT
    return is_short and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _tuple(values: Any) -> tuple[int, ...] | None:
    """A list or tuple of counts as a tuple."""
    counts = tuple(values) if isinstance(values, list) and len(values) < 2**20 else values
    is_long = isinstance(counts, tuple) and len(counts) > RANK_LIMIT
    if is_long and all(type(value) is int and 0 <= value < 2**31 for value in counts):
        return counts  # the ranks of a world
    return counts if _counts(counts) else None


def _state(node: Any) -> dict[str, Any]:
    """The attributes that an object was filled with; {} for anything else."""
    return _attributes(node.state) if isinstance(node, Opaque) else {}


def _attributes(state: Any) -> dict[str, Any]:
    """A state as `copyreg` writes it: attributes, or (attributes, slots)."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}
    return state if isinstance(state, dict) else {}
