"""The tables of a case, written out as true DCP, Megatron-Core and safetensors folders."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ckptlint.loaders.reference import MANIFEST_SCHEMA
from ckptlint.seals.digests import ALGORITHM
from ckptlint.seals.file import SCHEMA, SEAL, metadata_hash
from ckptlint.seals.row_hashes import VALUES
from ckptlint.storage.local import LocalFolder
from ckptlint.storage.paths import is_safe
from ckptlint.testing.pickles import (
    Call,
    Enum,
    Name,
    Pickler,
    Stub,
    archive,
    random_bytes,
    rank_file,
    tensor_record,
    torch_file,
)
from ckptlint.vocabulary.dtypes import ITEM_BITS, SAFETENSORS

FRAMING = 1577
"""Bytes that torch 2.13 adds around a small tensor in a record; measured 1,513 to 1,633."""

_CM = "torch.distributed.checkpoint.metadata"
_CF = "torch.distributed.checkpoint.filesystem"
_CP = "torch.distributed.checkpoint.planner"


def write_checkpoint(table: dict[str, Any], folder: Path) -> Path:
    """Write what a case describes; returns the checkpoint's own folder, below the given one for a step of a run."""
    for name, text in table.get("beside", {}).items():
        _write_file(folder, name, 0).write_bytes(text.encode("latin-1"))
    folder = folder / table.get("step", "")
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, int | str] = {}
    records: list[tuple[str, int, bytes]] = []
    ranks = [(f"__{rank}.metadata", held, rank) for rank, held in enumerate(table.get("ranks", ()))]
    for name, held, rank in ranks if "ranks" in table else [(table.get("metadata_name", ".metadata"), table, None)]:
        content = _read_content(held, rank, "depth" in table)
        if held.get("metadata", not {"safetensors", "rank_files", "torch"} & table.keys()):
            (folder / name).write_bytes(content.pickled(held))
        files |= content.ends
        records += content.records
    for name, file in table.get("safetensors", {}).items():
        write_safetensors(folder / name, file)
    for name, file in table.get("rank_files", {}).items():
        _write_file(folder, name, 0).write_bytes(rank_file(file.get("prefix", Path(name).stem), file))
    if table.get("megatron"):
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))
    if table.get("megatron") or "common" in table:
        (folder / "common.pt").write_bytes(archive("common", table.get("common", {})))
    for name, values in table.get("archives", {}).items():
        _write_file(folder, name, 0).write_bytes(archive(Path(name).stem, values))
    for name, values in table.get("torch", {}).items():
        (folder / name).write_bytes(torch_file(Path(name).stem, values))
    for name, optimizer in table.get("optimizers", {}).items():
        (folder / name).write_bytes(torch_file(Path(name).stem, optimizer_state(**optimizer)))
    for name, size in (files | table.get("files", {})).items():
        if is_safe(name):
            _write_file(folder, name, size, table.get("links", {}).get(name))
    for name, start, record in records:
        with (folder / name).open("r+b") as file:
            file.seek(start)
            file.write(record)
    for name, text in table.get("raw", {}).items():
        _shift_time(_write_file(folder, name, 0), 10)
        (folder / name).write_bytes(text.encode("latin-1"))
    if "seal" in table:
        _write_seal(table, folder)
    for name, seconds in [*((name, -100) for name in table.get("older", ())), *table.get("younger", {}).items()]:
        _shift_time(folder / name, seconds)
    return folder


def _write_seal(table: dict[str, Any], folder: Path) -> None:
    """Write the seal that a case describes; by default it is about the metadata that is there."""
    files = [table, *table.get("safetensors", {}).values()]
    tensors = {fqn: entry for file in files for fqn, entry in file.get("tensors", {}).items()}
    document: dict[str, Any] = {"schema": SCHEMA, "algorithm": ALGORITHM, "ckptlint": "0.2.0", "step": 10}
    document["metadata_blake2b"] = metadata_hash(LocalFolder(folder))
    document |= {key: value for key, value in table["seal"].items() if key != "digests"}
    document["entries"] = {
        fqn: {"dtype": tensors.get(fqn, {}).get("dtype", "float32"), "shape": tensors.get(fqn, {}).get("shape", [1])}
        | (entry if isinstance(entry, dict) else {"digest": entry})
        for fqn, entry in table["seal"].get("digests", {}).items()
    }
    (folder / SEAL).write_text(json.dumps(document))


def write_reference(table: dict[str, Any], place: Path) -> Path:
    """Write what a case is compared with: a manifest, or a model folder where there is a `reference_config`."""
    entries = {
        fqn: {"dtype": tensor.get("dtype", "float32"), "shape": tensor.get("shape")}
        | ({"values": tensor["values"]} if "values" in tensor else {})
        for fqn, tensor in table.get("reference", {}).items()
    }
    if "reference_config" not in table:
        place = place.with_suffix(".json")
        values = {"algorithm": VALUES, "salt": "0" * 16}
        place.write_text(json.dumps({"schema": MANIFEST_SCHEMA, "values": values, "tensors": entries}))
        return place
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(table["reference_config"]))
    if entries:
        (place / "model.safetensors").write_bytes(safetensors_header(entries))
    return place


def optimizer_state(groups: Sequence[Mapping[str, Any]], states: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer as torch.optim has it, for `torch_file`; `states` is parameter, name -> shape."""
    state = {param: {name: {"tensor": shape} for name, shape in shapes.items()} for param, shapes in states.items()}
    return {"state": state, "param_groups": [dict(group) for group in groups]}


def write_safetensors(path: Path, table: Mapping[str, Any]) -> Path:
    """Write a safetensors file whose tensors are zeros, or values that differ where a tensor has a `seed`.

    Args:
        table: `tensors`, as `safetensors_header` takes them; `header`, its text, in their place; `before`, text before
            the header; `size`, the bytes of the file where its tensors do not explain them.
    """
    start = safetensors_header(table.get("tensors", {}))
    if "header" in table:
        text = table["header"].encode("latin-1")
        start = len(text).to_bytes(8, "little") + text
    entries = _entries(table.get("tensors", {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(table.get("before", "").encode("latin-1") + start)
        begin = file.tell()
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        file.truncate(table.get("size", begin + end))
        for name, entry in entries.items():
            if "seed" in table["tensors"][name]:
                start, stop = entry["data_offsets"]
                file.seek(begin + start)
                file.write(random_bytes(table["tensors"][name]["seed"], stop - start))
    return path


def safetensors_header(tensors: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The start of a safetensors file.

    Args:
        tensors: key -> `dtype` (torch's name, or one that only safetensors has) and `shape`; `span`, the place of its
            bytes, by default behind the tensor before; `offsets`, its place in the whole, as torch's DCP stores it.
    """
    header: dict[str, Any] = _entries(tensors)
    places = {fqn: {"saved_offsets": entry["offsets"]} for fqn, entry in tensors.items() if "offsets" in entry}
    if places:
        shards = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        header = {"__metadata__": shards} | header
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def _entries(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    names = {ours: theirs for theirs, ours in SAFETENSORS.items()}
    entries, stop = {}, 0
    for fqn, entry in tensors.items():
        dtype = entry.get("dtype", "float32")
        start, stop = entry.get("span", (stop, stop + prod(entry["shape"]) * ITEM_BITS.get(dtype, 8) // 8))
        entries[fqn] = {"dtype": names.get(dtype, dtype), "shape": entry["shape"], "data_offsets": [start, stop]}
    return entries


def _write_file(folder: Path, name: str, size: int | str, link: str | None = None) -> Path:
    """A file of so many zero bytes, `absent`, or a `folder`; at the end of a link when there is one.

    Payload starts as an archive does: a file of zeros is a fault.
    """
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if link is not None:
        path.symlink_to(link)
        path = path.parent / link
        path.parent.mkdir(parents=True, exist_ok=True)
    if size == "folder":
        path.mkdir()
    elif isinstance(size, int):
        with path.open("wb") as file:
            file.write(b"PK\3\4"[:size] if name.endswith(".distcp") else b"")
            file.truncate(size)
    return path


def _shift_time(path: Path, seconds: int) -> None:
    moved = path.stat().st_mtime + seconds
    os.utime(path, (moved, moved))


def parse_chunk(text: str, shape: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a chunk, from slices or from `(offsets)+(sizes)`.

    >>> parse_chunk("4:8, :", [16, 8]), parse_chunk("(1,0,0)+(8,16)", [2, 8, 16])
    (((4, 0), (4, 8)), ((1, 0, 0), (8, 16)))
    """
    if match := re.fullmatch(r"\((.*)\)\+\((.*)\)", text):
        return _numbers(match[1]), _numbers(match[2])
    bounds = []
    for span, extent in zip(text.split(",") if text else [], shape, strict=True):
        start, _, stop = span.strip().partition(":")
        bounds.append((int(start or 0), int(stop or extent)))
    return tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)


@dataclass(slots=True)
class _Content:
    """What goes into one metadata file, and how long each payload file becomes.

    Attributes:
        rank: the rank that wrote it, when every rank has a metadata file of its own.
        deep: whether records are archives, not zeros.
        records: file, first byte and content of the records that are more than zero bytes.
    """

    rank: int | None = None
    deep: bool = False
    entries: dict[str, Any] = field(default_factory=dict)
    storage: dict[Any, Any] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[tuple[str, int, bytes]] = field(default_factory=list)

    def add_tensor(self, fqn: str, table: dict[str, Any]) -> None:
        self.tensors[fqn] = table
        shape, dtype = table["shape"], table.get("dtype", "float32")
        bits = ITEM_BITS.get(dtype, 8)
        chunks = []
        for number, text in enumerate(table.get("chunks", [", ".join(":" for _ in shape)])):
            offsets, sizes = parse_chunk(text, shape)
            chunks.append(Stub(_CM, "ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)}))
            record = table["records"][number] if "records" in table else None
            length = max(prod(sizes) if min(sizes, default=0) >= 0 else 0, 0) * bits // 8 + FRAMING
            file = self._file(number)
            if self.deep and min(sizes, default=0) >= 0 and record != "":
                holds = dict(enumerate(table.get("holds", ()))).get(number, {})
                data = tensor_record({"shape": sizes, "dtype": dtype, "seed": f"{fqn} {number}"} | holds)
                place, _, span = (record or f"{file} {self.ends.get(file, 0)}:").partition(" ")
                self.records.append((place, int(span.partition(":")[0]), data))
                length = len(data)
            self.store(fqn, offsets, record, file, length, table.get("transform"))
        state = {"properties": _properties(dtype), "size": _size(tuple(map(int, shape))), "chunks": chunks}
        self.entries[fqn] = Stub(_CM, "TensorStorageMetadata", state)

    def add_bytes(self, fqn: str, record: bytes = b"") -> None:
        self.entries[fqn] = Stub(_CM, "BytesStorageMetadata", {})
        file = self._file(0)
        record = record or (archive("archive", {}) if self.deep else b"")
        if record:
            self.records.append((file, self.ends.get(file, 0), record))
        self.store(fqn, None, None, file, len(record) or 1261)

    def _file(self, number: int) -> str:
        return f"__{number if self.rank is None else self.rank}_0.distcp"

    def store(
        self,
        fqn: str,
        offsets: tuple[int, ...] | None,
        record: str | None,
        file: str = "__0_0.distcp",
        length: int = 0,
        transform: str | None = None,
    ) -> None:
        """File an entry: at the place that `record` names, nowhere for "", or at the end of its rank's file."""
        if record == "":
            return
        if record is None:
            start, stop = self.ends.get(file, 0), self.ends.get(file, 0) + length
        else:
            file, _, span = record.partition(" ")
            start, stop = (int(number) for number in span.split(":"))
        if start >= 0:
            self.ends[file] = max(self.ends.get(file, 0), stop)
        index = {"fqn": fqn, "index": None} | ({} if offsets is None else {"offset": _size(offsets)})
        info: dict[str, Any] = {"relative_path": file, "offset": start, "length": stop - start}
        info |= {"transform_descriptors": [transform]} if transform else {}
        self.storage[Stub(_CM, "MetadataIndex", index)] = Stub(_CF, "_StorageInfo", info)

    def plans(self, ranks: list[list[Any]]) -> list[Stub]:
        return [Stub(_CP, "SavePlan", {"items": [self._item(entry) for entry in items]}) for items in ranks]

    def _item(self, entry: str | dict[str, Any]) -> Stub:
        table = {"fqn": entry} if isinstance(entry, str) else entry
        fqn, chunk = table["fqn"], table.get("chunk")
        if chunk is None:
            index = Stub(_CM, "MetadataIndex", {"fqn": fqn, "index": None})
            return Stub(_CP, "WriteItem", {"index": index, "type": _WRITE_BYTES, "tensor_data": None})
        shape = table.get("shape", self.tensors[fqn]["shape"])
        dtype = table.get("dtype", self.tensors[fqn].get("dtype", "float32"))
        offsets, sizes = parse_chunk(chunk, shape)
        index = Stub(_CM, "MetadataIndex", {"fqn": fqn, "index": None, "offset": _size(offsets)})
        box = Stub(_CM, "ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
        state = {"chunk": box, "properties": _properties(dtype), "size": _size(tuple(shape))}
        data = Stub(_CP, "TensorWriteData", state)
        return Stub(_CP, "WriteItem", {"index": index, "type": _WRITE_SHARD, "tensor_data": data})

    def pickled(self, table: dict[str, Any]) -> bytes:
        """The metadata file; `table` gives what its root holds besides."""
        extras = {"all_local_plans": self.plans(table["plans"])} if "plans" in table else {}
        extras |= {"mcore_data": table["mcore_data"]} if "mcore_data" in table else {}
        place = Call(Name("pathlib", "PosixPath"), ("/", "checkpoints", "case"))
        meta: dict[str, Any] = {"checkpoint_id": place, "save_id": "0", "load_id": None, "modules": []}
        state = {
            "state_dict_metadata": self.entries,
            "planner_data": None if extras else {fqn: (fqn,) for fqn in self.entries},
            "storage_data": self.storage,
            "storage_meta": Stub(_CM, "StorageMeta", meta),
            "version": "1.0.0",
        }
        state |= extras | table.get("root", {})
        file = io.BytesIO()
        pickler = Pickler(file, table.get("protocol", 4))
        pickler.names, pickler.enums_by_name = table.get("names", {}), table.get("enums_by_name", False)
        pickler.dump(Stub(_CM, "Metadata", {key: value for key, value in state.items() if value != "absent"}))
        return file.getvalue()


def _read_content(table: dict[str, Any], rank: int | None, deep: bool) -> _Content:
    content = _Content(rank, deep)
    for fqn, tensor in table.get("tensors", {}).items():
        content.add_tensor(fqn, tensor)
    for fqn in [*table.get("objects", ()), *table.get("bytes", ())]:
        content.add_bytes(fqn)
    for fqn, value in table.get("state", {}).items():
        content.add_bytes(fqn, archive("archive", value))
    for fqn, places in table.get("stray", {}).items():
        for place in [places] if isinstance(places, str) else places:
            offsets, _, record = place.partition(" @ ")
            content.store(fqn, _numbers(offsets) if offsets != "bytes" else None, record)
    for fqn in table.get("unstored", ()):
        content.entries[fqn] = Stub(_CM, "BytesStorageMetadata", {})
    return content


_WRITE_SHARD = Enum(Name(_CP, "WriteItemType"), "SHARD", 2)
_WRITE_BYTES = Enum(Name(_CP, "WriteItemType"), "BYTE_IO", 3)
_CONTIGUOUS = Enum(Name(_CM, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT", 0)


def _size(values: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (values,))


def _properties(dtype: str) -> Stub:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    return Stub(_CM, "TensorProperties", (Name("torch", dtype), layout, False, _CONTIGUOUS, False))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
