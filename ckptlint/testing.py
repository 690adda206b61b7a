"""Checkpoints from small tables: the cases of `fixtures/*.toml`, written out as true DCP folders and read back.

For authors of rules and plug-ins: `read_cases` reads a fixture, `run_case` judges one case with one rule. torch is not
needed: the metadata is pickled with classes that only carry torch's names.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ckptlint.analysis.held_by_ranks import as_checkpoint
from ckptlint.formats.safetensors_header import DTYPES
from ckptlint.lint.engine import run_rules
from ckptlint.lint.ignores import KeyIgnore, set_aside
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import CheckpointReport
from ckptlint.lint.selection import ignorable
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.reference import MANIFEST_SCHEMA, read_reference
from ckptlint.model import ITEM_BITS, STORAGES, Checkpoint, Problem, RankTable, Remark
from ckptlint.payload.reader import default_reading, read_payload
from ckptlint.rule import DEPTHS, Depth, Finding, Rule, Severity
from ckptlint.seals.digests import ALGORITHM
from ckptlint.seals.seal import SCHEMA, SEAL, metadata_hash
from ckptlint.storage.folder import LocalFolder, is_safe

FRAMING = 1577
"""Bytes that torch 2.13 adds around a small tensor in a record; measured 1,513 to 1,633."""

_CM = "torch.distributed.checkpoint.metadata"
_CF = "torch.distributed.checkpoint.filesystem"
_CP = "torch.distributed.checkpoint.planner"


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a fixture.

    Attributes:
        name: what it shows.
        table: the checkpoint, as TOML gave it (CONTRIBUTING explains the keys).
        expect: what the rule must find, as `described` words it; nothing for a good case.
        says: texts that must appear in the full report.
        others: whether other rules find something worse than a note here.
    """

    name: str
    table: dict[str, Any]
    expect: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    others: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it is about what the ranks of a job hold, not about files."""
        return bool(self.table.keys() & {"held", "remarks"})


def read_cases(path: Path) -> list[Case]:
    """The cases of a fixture file."""
    cases = []
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["case"]:
        name, expect, says = table.pop("name"), table.pop("expect", ()), table.pop("says", ())
        cases.append(Case(name, table, tuple(expect), tuple(says), table.pop("others", False)))
    return cases


def run_case(rule: Rule, case: Case, folder: Path) -> CheckpointReport:
    """Write the case into an empty folder, read it back, and judge it with one rule; or what its ranks hold."""
    if case.is_live:
        return run_rules(held_by_ranks(case.table), [rule], "metadata")
    depth = case.table.get("depth", max(rule.needs, "files", key=DEPTHS.index))
    ckpt = load_folder(write_checkpoint(case.table, folder), depth)
    ckpt = replace(ckpt, problems=[*ckpt.problems, *(Problem("view", **view) for view in case.table.get("views", ()))])
    if case.table.keys() & {"reference", "reference_config"}:
        place = write_reference(case.table, folder.with_name(f"{folder.name}-expected"))
        ckpt = replace(ckpt, reference=read_reference(str(place)))
    rules = [rule, _crashing(case.table["crash"])] if "crash" in case.table else [rule]
    ignores = [_key_ignore(**table) for table in case.table.get("ignores", ())]
    named = set().union(*(ignore.codes for ignore in ignores))
    rules += [other for other in load_rules() if other.code in named]
    return set_aside([run_rules(ckpt, rules, depth)], rules, ignores)[0]


def held_by_ranks(table: Mapping[str, Any]) -> Checkpoint:
    """The `held` chunks and the `remarks` of a case, as live mode hands them to the rules."""
    rows = [
        ({"dtype": "float32", "replica": 0, "copies": 0, "digest": 0, "view": 0} | item, rank)
        for item in table.get("held", ())
        for rank in item["ranks"]
    ]
    fqns = sorted({item["fqn"] for item, _ in rows})
    dtypes = sorted({item["dtype"] for item, _ in rows})
    width = max((len(item["shape"]) for item, _ in rows), default=0)
    boxes = [parse_chunk(item.get("chunk", ", ".join(":" * len(item["shape"]))), item["shape"]) for item, _ in rows]

    def column(values: Iterable[Any], kind: Any = np.int64) -> Any:
        return np.array(list(values), kind)

    def padded(values: Iterable[Sequence[int]], fill: int) -> Any:
        return column((*value, *[fill] * (width - len(value))) for value in values).reshape(len(rows), width)

    ranks = RankTable(
        world_size=1 + max([rank for _, rank in rows], default=3),
        keys=len(fqns),
        fqns=fqns,
        fqn=column((fqns.index(item["fqn"]) for item, _ in rows), np.int32),
        rank=column((rank for _, rank in rows), np.int32),
        is_object=column((item["dtype"] == "" for item, _ in rows), bool),
        dtypes=dtypes,
        dtype=column((dtypes.index(item["dtype"]) if item["dtype"] else -1 for item, _ in rows), np.int16),
        ndim=column((len(item["shape"]) for item, _ in rows), np.int8),
        offsets=padded((offsets for offsets, _ in boxes), 0),
        sizes=padded((sizes for _, sizes in boxes), 1),
        global_shape=padded((item["shape"] for item, _ in rows), 1),
        replica=column(item["replica"] for item, _ in rows),
        copies=column((item["copies"] for item, _ in rows), np.int32),
        strict=column((item.get("writer") == "mcore" for item, _ in rows), bool),
        digest=column(item["digest"] for item, _ in rows),
        view=column(item["view"] for item, _ in rows),
        remarks=tuple(Remark(**{"rank": -1, "fqn": ""} | remark) for remark in table.get("remarks", ())),
    )
    return as_checkpoint(ranks, "state dict")


def _key_ignore(key: str, rules: list[str]) -> KeyIgnore:
    codes = frozenset[str]().union(*(ignorable(load_rules(), token) for token in rules))
    return KeyIgnore(key, codes, "the case says so", "ckptlint.toml")


def _crashing(code: str) -> Rule:
    """A rule that ends in an error of its own."""

    def check(ckpt: Checkpoint) -> Iterator[Finding]:
        yield from ()
        raise IndexError("tuple index out of range")

    return Rule(code, "crashing-rule", Severity.ERROR, check)


def load_folder(folder: Path, depth: Depth = "files") -> Checkpoint:
    """The checkpoint of a folder that is one, without looking for steps or components."""
    ckpt = open_checkpoint(LocalFolder(folder))
    deep = depth in ("headers", "data") and ckpt.readable
    return read_payload(LocalFolder(folder), ckpt, default_reading(depth)) if deep else ckpt  # type: ignore[arg-type]


def described(report: CheckpointReport) -> list[str]:
    """The findings as fixtures word them: `level subject region`, the level only where it is below the rule's own."""
    lines = []
    for item in report.diagnostics:
        level = f"{item.severity.label} " if item.severity < item.rule.severity else ""
        region = f" {item.finding.at.region}" if item.finding.at.region else ""
        lines.append(f"{level}{item.fqn or item.finding.at.file or 'checkpoint'}{region}")
    return sorted(lines)


# ---------------------------------------------------------------- writing


def write_checkpoint(table: dict[str, Any], folder: Path) -> Path:
    """Write what a case describes; returns the checkpoint's own folder, below the given one for a step of a run."""
    for name, text in table.get("beside", {}).items():
        path = _write_file(folder, name, 0)
        path.write_bytes(text.encode("latin-1"))
    folder = folder / table.get("step", "")
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, int | str] = {}
    records: list[tuple[str, int, bytes]] = []
    for name, part, rank in _parts(table):
        content = _read_content(part, rank, "depth" in table)
        if part.get("metadata", "safetensors" not in table):
            (folder / name).write_bytes(content.pickled(part))
        files |= content.ends
        records += content.records
    for name, file in table.get("safetensors", {}).items():
        write_safetensors(folder / name, file)
    if table.get("megatron"):
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))
    if table.get("megatron") or "common" in table:
        (folder / "common.pt").write_bytes(_archive("common", table.get("common", {})))
    for name, values in table.get("archives", {}).items():
        (folder / name).write_bytes(_archive(Path(name).stem, values))
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
    for name in table.get("older", ()):
        _shift_time(folder / name, -100)
    return folder


def _write_seal(table: dict[str, Any], folder: Path) -> None:
    """Write the seal that a case describes; by default it is about the metadata that lies there."""
    tensors = table.get("tensors", {}) | {
        fqn: entry for file in table.get("safetensors", {}).values() for fqn, entry in file.get("tensors", {}).items()
    }
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
        for fqn, tensor in table.get("reference", {}).items()
    }
    if "reference_config" not in table:
        place = place.with_suffix(".json")
        place.write_text(json.dumps({"schema": MANIFEST_SCHEMA, "tensors": entries}))
        return place
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(table["reference_config"]))
    if entries:
        (place / "model.safetensors").write_bytes(safetensors_header(entries))
    return place


def write_safetensors(path: Path, table: Mapping[str, Any]) -> Path:
    """Write a safetensors file whose tensors are zeros.

    Args:
        table: `tensors`, as `safetensors_header` takes them; `header`, its text, in their place; `before`, text before
            the header; `size`, the bytes of the file where its tensors do not explain them.
    """
    start = safetensors_header(table.get("tensors", {}))
    if "header" in table:
        text = table["header"].encode("latin-1")
        start = len(text).to_bytes(8, "little") + text
    ends = [entry["data_offsets"][1] for name, entry in _entries(table.get("tensors", {})).items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(table.get("before", "").encode("latin-1") + start)
        file.truncate(table.get("size", file.tell() + max(ends, default=0)))
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
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    entries, stop = {}, 0
    for fqn, entry in tensors.items():
        dtype = entry.get("dtype", "float32")
        start, stop = entry.get("span", (stop, stop + prod(entry["shape"]) * ITEM_BITS.get(dtype, 8) // 8))
        entries[fqn] = {"dtype": names.get(dtype, dtype), "shape": entry["shape"], "data_offsets": [start, stop]}
    return entries


def _parts(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    """The metadata files of a case: `.metadata`, or one of each entry of `ranks`."""
    if "ranks" in table:
        for rank, part in enumerate(table["ranks"]):
            yield f"__{rank}.metadata", part, rank
    else:
        yield table.get("metadata_name", ".metadata"), table, None


def _write_file(folder: Path, name: str, size: int | str, link: str | None = None) -> Path:
    """A file of so many zero bytes, `absent`, or a `folder`; at the end of a link when there is one."""
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
    for part, extent in zip(text.split(",") if text else [], shape, strict=True):
        start, _, stop = part.strip().partition(":")
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
            chunks.append(_Stub(_CM, "ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)}))
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
        self.entries[fqn] = _Stub(_CM, "TensorStorageMetadata", state)

    def add_bytes(self, fqn: str, record: bytes = b"") -> None:
        self.entries[fqn] = _Stub(_CM, "BytesStorageMetadata", {})
        file = self._file(0)
        record = record or (_archive("archive", {}) if self.deep else b"")
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
            start, stop = (int(part) for part in span.split(":"))
        if start >= 0:
            self.ends[file] = max(self.ends.get(file, 0), stop)
        index = {"fqn": fqn, "index": None} | ({} if offsets is None else {"offset": _size(offsets)})
        info: dict[str, Any] = {"relative_path": file, "offset": start, "length": stop - start}
        info |= {"transform_descriptors": [transform]} if transform else {}
        self.storage[_Stub(_CM, "MetadataIndex", index)] = _Stub(_CF, "_StorageInfo", info)

    def plans(self, ranks: list[list[Any]]) -> list[_Stub]:
        return [_Stub(_CP, "SavePlan", {"items": [self._item(entry) for entry in items]}) for items in ranks]

    def _item(self, entry: str | dict[str, Any]) -> _Stub:
        table = {"fqn": entry} if isinstance(entry, str) else entry
        fqn, chunk = table["fqn"], table.get("chunk")
        if chunk is None:
            index = _Stub(_CM, "MetadataIndex", {"fqn": fqn, "index": None})
            return _Stub(_CP, "WriteItem", {"index": index, "type": _WRITE_BYTES, "tensor_data": None})
        shape = table.get("shape", self.tensors[fqn]["shape"])
        dtype = table.get("dtype", self.tensors[fqn].get("dtype", "float32"))
        offsets, sizes = parse_chunk(chunk, shape)
        index = _Stub(_CM, "MetadataIndex", {"fqn": fqn, "index": None, "offset": _size(offsets)})
        box = _Stub(_CM, "ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
        state = {"chunk": box, "properties": _properties(dtype), "size": _size(tuple(shape))}
        data = _Stub(_CP, "TensorWriteData", state)
        return _Stub(_CP, "WriteItem", {"index": index, "type": _WRITE_SHARD, "tensor_data": data})

    def pickled(self, table: dict[str, Any]) -> bytes:
        """The metadata file; `table` gives what its root holds besides."""
        extras = {"all_local_plans": self.plans(table["plans"])} if "plans" in table else {}
        extras |= {"mcore_data": table["mcore_data"]} if "mcore_data" in table else {}
        place = _Call(_Name("pathlib", "PosixPath"), ("/", "checkpoints", "case"))
        meta: dict[str, Any] = {"checkpoint_id": place, "save_id": "0", "load_id": None, "modules": []}
        state = {
            "state_dict_metadata": self.entries,
            "planner_data": None if extras else {fqn: (fqn,) for fqn in self.entries},
            "storage_data": self.storage,
            "storage_meta": _Stub(_CM, "StorageMeta", meta),
            "version": "1.0.0",
        }
        state |= extras | table.get("root", {})
        file = io.BytesIO()
        pickler = _Pickler(file, table.get("protocol", 4))
        pickler.names, pickler.enums_by_name = table.get("names", {}), table.get("enums_by_name", False)
        pickler.dump(_Stub(_CM, "Metadata", {key: value for key, value in state.items() if value != "absent"}))
        return file.getvalue()


def _read_content(table: dict[str, Any], rank: int | None, deep: bool) -> _Content:
    content = _Content(rank, deep)
    for fqn, tensor in table.get("tensors", {}).items():
        content.add_tensor(fqn, tensor)
    for fqn in [*table.get("objects", ()), *table.get("bytes", ())]:
        content.add_bytes(fqn)
    for fqn, value in table.get("state", {}).items():
        content.add_bytes(fqn, _archive("archive", value))
    for fqn, places in table.get("stray", {}).items():
        for place in [places] if isinstance(places, str) else places:
            offsets, _, record = place.partition(" @ ")
            content.store(fqn, _numbers(offsets) if offsets != "bytes" else None, record)
    for fqn in table.get("unstored", ()):
        content.entries[fqn] = _Stub(_CM, "BytesStorageMetadata", {})
    return content


class _Name:
    """A module and a name to be pickled as a GLOBAL."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Stub:
    """An object of one of torch's classes, by its attributes."""

    def __init__(self, module: str, name: str, state: Any) -> None:
        self.cls, self.state = _Name(module, name), state


class _Storage:
    """The data of a tensor, pickled as torch's persistent id of it."""

    def __init__(self, cls: _Name, key: str, count: int) -> None:
        self.pid = ("storage", cls, key, "cpu", count)


class _Call:
    """What a call gives, pickled as that call."""

    def __init__(self, name: _Name, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments


class _Enum:
    """A member of an enum; how it is pickled depends on the writer's Python."""

    def __init__(self, cls: _Name, member: str, value: int) -> None:
        self.cls, self.member, self.value = cls, member, value


_WRITE_SHARD = _Enum(_Name(_CP, "WriteItemType"), "SHARD", 2)
_WRITE_BYTES = _Enum(_Name(_CP, "WriteItemType"), "BYTE_IO", 3)
_CONTIGUOUS = _Enum(_Name(_CM, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT", 0)


class _Pickler(pickle._Pickler):
    """Writes the stand-ins the way pickle writes torch's own objects.

    Attributes:
        names: other spellings of modules or of `module.name`, as other writers have them.
        enums_by_name: write enum members as Python 3.11.2 does, by `getattr`.
    """

    names: Mapping[str, str] = MappingProxyType({})
    enums_by_name = False

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Name):
            self._save_name(obj)
        elif isinstance(obj, _Stub):
            self.save(obj.cls)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(obj)
            if obj.state:
                super().save(obj.state)
                self.write(pickle.BUILD)
        elif isinstance(obj, _Call):
            self.save(obj.name)
            super().save(obj.arguments)
            self.write(pickle.REDUCE)
        elif isinstance(obj, _Storage):
            super().save(obj.pid)
            self.write(pickle.BINPERSID)
        elif isinstance(obj, _Enum):
            by_name = _Call(_Name("builtins", "getattr"), (obj.cls, obj.member))
            self.save(by_name if self.enums_by_name else _Call(obj.cls, (obj.value,)))
        else:
            super().save(obj, save_persistent_id)

    def _save_name(self, name: _Name) -> None:
        whole = self.names.get(f"{name.module}.{name.name}", f"{self.names.get(name.module, name.module)}.{name.name}")
        module, _, attribute = whole.rpartition(".")
        if self.proto >= 4:
            super().save(module)
            super().save(attribute)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{module}\n{attribute}\n".encode())


def _size(values: tuple[int, ...]) -> _Call:
    return _Call(_Name("torch", "Size"), (values,))


def _properties(dtype: str) -> _Stub:
    layout = _Call(_Name("torch.serialization", "_get_layout"), ("torch.strided",))
    return _Stub(_CM, "TensorProperties", (_Name("torch", dtype), layout, False, _CONTIGUOUS, False))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _archive(stem: str, values: Any) -> bytes:
    """A torch.save archive of the values; text stands for the bytes of its `data.pkl`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        data = values.encode("latin-1") if isinstance(values, str) else pickle.dumps(values, 2)
        archive.writestr(f"{stem}/data.pkl", data)
        archive.writestr(f"{stem}/version", "3\n")
    return file.getvalue()


# ---------------------------------------------------------------- records as torch writes them


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
    cls = next((name for name, ours in STORAGES.items() if ours == dtype), None)
    module, name = ("torch", cls) if cls else ("torch.storage", "UntypedStorage")
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    size = count if cls else count * ITEM_BITS.get(dtype, 8) // 8
    arguments: tuple[Any, ...] = (_Storage(_Name(module, name), "0", size), 0, tuple(shape), strides, False, {})
    version = "v2" if cls else "v3"
    rebuild = _Name("torch._utils", f"_rebuild_tensor_{version}")
    whole: tuple[Any, ...] = arguments if cls else (*arguments, _Name("torch", dtype))
    if table.get("subclass"):
        made = _Call(_Name("torch._tensor", "_rebuild_from_type_v2"), (rebuild, _Name("job", "Scaled"), whole, None))
    else:
        made = _Call(rebuild, whole)
    file = io.BytesIO()
    _Pickler(file, 2).dump(made)
    return file.getvalue()


def torch_archive(members: Mapping[str, bytes], crc: bool = True) -> bytes:
    """An archive with torch's framing: sizes in the directory alone, data at multiples of 64, zip64 end records.

    Args:
        members: name without the folder -> bytes.
        crc: False for what `torch.serialization.set_crc32_options(False)` leaves.
    """
    archive, directory = bytearray(), bytearray()
    for short, data in {**members, "byteorder": b"little", "version": b"3\n"}.items():
        name = f"archive/{short}".encode()
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


def fixture_cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """Every case of every fixture in a folder, with the code that its file is named for."""
    for path in sorted(folder.glob("*.toml")):
        for case in read_cases(path):
            yield path.stem, case
