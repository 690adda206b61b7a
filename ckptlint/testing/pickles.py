"""Pickles and archives as torch writes them, without torch."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from ckptlint.vocabulary.dtypes import ITEM_BITS, STORAGES


class Name:
    """A module and a name to be pickled as a GLOBAL."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Stub:
    """An object of one of torch's classes, by its attributes."""

    def __init__(self, module: str, name: str, state: Any) -> None:
        self.cls, self.state = Name(module, name), state


class PickledStorage:
    """The data of a tensor, pickled as torch's persistent id of it."""

    def __init__(self, cls: Name, key: str, count: int) -> None:
        self.pid = ("storage", cls, key, "cpu", count)


class Call:
    """What a call gives, pickled as that call."""

    def __init__(self, name: Name, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments


class Enum:
    """A member of an enum; how it is pickled depends on the writer's Python."""

    def __init__(self, cls: Name, member: str, value: int) -> None:
        self.cls, self.member, self.value = cls, member, value


class Pickler(pickle._Pickler):
    """Writes the stand-ins the way pickle writes torch's own objects.

    Attributes:
        names: other spellings of modules or of `module.name`, as other writers have them.
        enums_by_name: write enum members as Python 3.11.2 does, by `getattr`.
    """

    names: Mapping[str, str] = MappingProxyType({})
    enums_by_name = False

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Name):
            self._save_name(obj)
        elif isinstance(obj, Stub):
            self.save(obj.cls)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(obj)
            if obj.state:
                super().save(obj.state)
                self.write(pickle.BUILD)
        elif isinstance(obj, Call):
            self.save(obj.name)
            super().save(obj.arguments)
            self.write(pickle.REDUCE)
        elif isinstance(obj, PickledStorage):
            super().save(obj.pid)
            self.write(pickle.BINPERSID)
        elif isinstance(obj, Enum):
            by_name = Call(Name("builtins", "getattr"), (obj.cls, obj.member))
            self.save(by_name if self.enums_by_name else Call(obj.cls, (obj.value,)))
        else:
            super().save(obj, save_persistent_id)

    def _save_name(self, name: Name) -> None:
        whole = self.names.get(f"{name.module}.{name.name}", f"{self.names.get(name.module, name.module)}.{name.name}")
        module, _, attribute = whole.rpartition(".")
        if self.proto >= 4:
            super().save(module)
            super().save(attribute)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{module}\n{attribute}\n".encode())


def random_bytes(seed: object, count: int) -> bytes:
    """So many bytes below 64, of which no float is NaN or infinite."""
    return bytes(byte & 0x3F for byte in random.Random(seed).randbytes(count))  # type: ignore[arg-type]  # noqa: S311


def pickled(value: Any) -> bytes:
    """The value in protocol 2, as `torch.save` takes it."""
    file = io.BytesIO()
    Pickler(file, 2).dump(value)
    return file.getvalue()


def archive(stem: str, values: Any) -> bytes:
    """A torch.save archive of the values; text stands for the bytes of its `data.pkl`."""
    data = values.encode("latin-1") if isinstance(values, str) else pickled(values)
    return torch_archive({"data.pkl": data}, stem=stem)


def tensor_record(table: Mapping[str, Any]) -> bytes:
    """A record of torch 2.13 that holds a tensor.

    Args:
        table: `dtype` and `shape`; `seed` of its values, or one `value` for all; `put` to place bits at elements;
            `storage`, elements of a larger storage; `storages`, how many there are; `subclass`; `crc = false`;
            `pickle`, another data.pkl; `raw`, another record; `flip`, a byte of the data that changes afterwards;
            `cut`, bytes that are zeroed at the end.
    """
    if "raw" in table:
        return str(table["raw"]).encode("latin-1")
    dtype, shape = table["dtype"], list(map(int, table["shape"]))
    item = ITEM_BITS.get(dtype, 8) // 8
    count = max(prod(shape), table.get("storage", 0))
    word = np.dtype(f"u{min(item, 8)}")
    values = np.frombuffer(random.Random(table["seed"]).randbytes(count * item), word) & word.type(0x3F)  # noqa: S311
    if "value" in table:
        values = np.full_like(values, table["value"])
    for at, bits in table.get("put", {}).items():
        values = np.concatenate([values[: int(at)], [word.type(bits)], values[int(at) + 1 :]])
    data = values.tobytes()
    members = {f"data/{n}": data for n in range(table.get("storages", 1))}
    body = table["pickle"].encode("latin-1") if "pickle" in table else _tensor_pickle(dtype, shape, count, table)
    record = bytearray(torch_archive({"data.pkl": body} | members, table.get("crc", True)))
    if "flip" in table:
        record[bytes(record).index(data) + table["flip"]] ^= 0x10
    if cut := table.get("cut"):
        record[-cut:] = bytes(cut)
    return bytes(record)


def _tensor_pickle(dtype: str, shape: list[int], count: int, table: Mapping[str, Any]) -> bytes:
    """The data.pkl of a record that holds one tensor, as `torch.save` writes it."""
    cls = next((name for name, ours in STORAGES.items() if ours == dtype), None)
    module, name = ("torch", cls) if cls else ("torch.storage", "UntypedStorage")
    size = count if cls else count * ITEM_BITS.get(dtype, 8) // 8
    storage = PickledStorage(Name(module, name), "0", size)
    arguments: tuple[Any, ...] = (storage, 0, tuple(shape), strides_of(shape), False, {})
    version = "v2" if cls else "v3"
    rebuild = Name("torch._utils", f"_rebuild_tensor_{version}")
    whole: tuple[Any, ...] = arguments if cls else (*arguments, Name("torch", dtype))
    if table.get("subclass"):
        scaled = Name("job", "Scaled")
        return pickled(Call(Name("torch._tensor", "_rebuild_from_type_v2"), (rebuild, scaled, whole, None)))
    return pickled(Call(rebuild, whole))


def torch_file(stem: str, values: Any) -> bytes:
    """What torch.save makes of the values in a file of this stem.

    Args:
        values: tables and lists; `{ tensor = shape, dtype, value }` is a tensor, `{ class = "module.name", state }` an
            object of that class, and a name of digits a number.
    """
    members: dict[str, bytes] = {}

    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            dtype, shape = value.get("dtype", "float32"), tuple(value["tensor"])
            item = int(value.get("value", 0)).to_bytes(ITEM_BITS[dtype] // 8, "little")
            return _rebuilt(dtype, shape, item * prod(shape), members)
        if "class" in value:
            module, _, name = value["class"].rpartition(".")
            return Stub(module, name, made(value["state"]))
        return {int(key) if key.isdecimal() else key: made(item) for key, item in value.items()}

    data = pickled(made(values))  # which fills the members
    return torch_archive({"data.pkl": data} | members, stem=stem)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _rebuilt(dtype: str, shape: tuple[int, ...], data: bytes, members: dict[str, bytes]) -> Call:
    """The call that rebuilds a tensor of these bytes, which are added to the members of its archive."""
    key, cls = str(len(members)), next(name for name, ours in STORAGES.items() if ours == dtype)
    members[f"data/{key}"] = data
    storage = PickledStorage(Name("torch", cls), key, prod(shape))
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides_of(shape), False, {}))


def rank_file(stem: str, table: Mapping[str, Any]) -> bytes:
    """A file of torch.save with tensors, of which some may be one rank's part of a DTensor of torch 2.13.

    Args:
        stem: the name that the folder in the archive has.
        table: `tensors`, key -> `shape`, `dtype`, `seed` of its values; of a DTensor `local`, the shape of the part,
            `placements` (`Shard(0)`, `Replicate()`), and `mesh`, its shape; `rank` and `names` of the mesh; `values`,
            what is beside the tensors; `state`, whether the tensors are an optimizer's, by `<number>.<name>`.
            A key `a/b` is in a dict `a`.
    """
    members: dict[str, bytes] = {}
    root: dict[Any, Any] = deepcopy(dict(table.get("values", {})))
    for key, entry in table.get("tensors", {}).items():
        made = _stored(f"{key} {entry.get('seed', '')}", entry, members, table)
        owner = root
        *above, name = key.split("/")
        for inner in above:
            owner = owner.setdefault(inner, {})
        if table.get("state"):
            number, _, name = key.partition(".")
            owner = root.setdefault("state", {}).setdefault(int(number), {})
        owner[name] = made
    return torch_archive({"data.pkl": pickled(root)} | members, stem=stem)


def _stored(seed: str, entry: Mapping[str, Any], members: dict[str, bytes], table: Mapping[str, Any]) -> Call:
    """The call that rebuilds a tensor of random bytes, which are added to the members of its archive."""
    dtype, shape = entry.get("dtype", "float32"), tuple(entry["shape"])
    local = tuple(entry.get("local", shape))
    plain = _rebuilt(dtype, local, random_bytes(seed, prod(local) * ITEM_BITS[dtype] // 8), members)
    if "placements" not in entry:
        return plain
    sizes, rank = list(entry["mesh"]), table.get("rank", 0)
    axes = [
        Stub("torch.distributed._mesh_layout", "_FlatLayout", {"shape": (size,), "stride": (step,)})
        for size, step in zip(sizes, strides_of(sizes), strict=True)
    ]
    mesh = {
        "_device_type": "cpu",
        "_layout": Stub("torch.distributed._mesh_layout", "_MeshLayout", {"axes": tuple(axes)}),
        "_mesh_dim_names": tuple(entry.get("names", ("fsdp", "tp")[: len(sizes)])),
        "_flatten_rank_map": tuple(range(prod(sizes))),
        "_rank": rank,
        "_root_mesh": None,
    }
    placed = []
    for text in entry["placements"]:
        name, _, dim = text.rstrip(")").partition("(")
        state = {"dim": int(dim)} if dim else {}
        placed.append(Stub("torch.distributed.tensor.placement_types", name, state))
    spec = {"mesh": Stub("torch.distributed.device_mesh", "DeviceMesh", mesh), "placements": tuple(placed)}
    described = Stub("torch.distributed.tensor._dtensor_spec", "DTensorSpec", spec)
    tensor = Name("torch.distributed.tensor", "DTensor")
    cpu = Call(Name("torch", "device"), ("cpu",))
    whole = (tensor, Name("torch", dtype), shape, strides_of(shape), 0, Name("torch", "strided"), cpu, False)
    rebuild = Name("torch._utils", "_rebuild_wrapper_subclass")
    attributes: dict[str, Any] = {"_local_tensor": plain, "_spec": described}
    return Call(Name("torch._tensor", "_rebuild_from_type_v2"), (rebuild, tensor, whole, attributes))


def torch_archive(members: Mapping[str, bytes], crc: bool = True, stem: str = "archive") -> bytes:
    """An archive with torch's framing: sizes in the directory alone, data at multiples of 64, zip64 end records.

    Members are named without the folder, whose name is `stem`; `crc` is False for what
    `torch.serialization.set_crc32_options(False)` leaves.
    """
    archive, directory = bytearray(), bytearray()
    for short, data in {**members, "byteorder": b"little", "version": b"3\n"}.items():
        name = f"{stem}/{short}".encode()
        at = len(archive)
        fill = -(at + 30 + len(name) + 4) % 64
        archive += struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), fill + 4)
        archive += name + struct.pack("<2s H", b"FB", fill) + bytes(fill) + data
        total = zlib.crc32(data) if crc else 0
        archive += struct.pack("<4s3I", b"PK\7\x08", total, len(data), len(data))
        fields = (b"PK\1\2", 0, 0, 0x808, 0, 0, 0, total, len(data), len(data), len(name), 0, 0, 0, 0, 0, at)
        directory += struct.pack("<4s6H3I5H2I", *fields) + name
    count, start, size = len(members) + 2, len(archive), len(directory)
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 30, 45, 0, 0, count, count, size, start)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, 0)
    return bytes(archive + directory + end)
