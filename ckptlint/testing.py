"""Checkpoints from small tables: the cases of `fixtures/*.toml`, written out as true DCP folders and read back.

For authors of rules and plug-ins: `read_cases` reads a fixture, `run_case` judges one case with one rule. torch is not
needed: the metadata is pickled with classes that only carry torch's names.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ckptlint.engine import run_rules
from ckptlint.loaders import open_checkpoint
from ckptlint.model import ITEM_BITS, Checkpoint
from ckptlint.report import CheckpointReport
from ckptlint.rule import Rule
from ckptlint.storage import Folder

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
    """

    name: str
    table: dict[str, Any]
    expect: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


def read_cases(path: Path) -> list[Case]:
    """The cases of a fixture file."""
    cases = []
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["case"]:
        name, expect, says = table.pop("name"), table.pop("expect", ()), table.pop("says", ())
        cases.append(Case(name, table, tuple(expect), tuple(says)))
    return cases


def run_case(rule: Rule, case: Case, folder: Path) -> CheckpointReport:
    """Write the case into an empty folder, read it back, and judge it with one rule."""
    write_checkpoint(case.table, folder)
    return run_rules(load_folder(folder), [rule], "files")


def load_folder(folder: Path) -> Checkpoint:
    """The checkpoint of a folder that is one, without looking for steps or components."""
    return open_checkpoint(Folder(folder))


def described(report: CheckpointReport) -> list[str]:
    """The findings as fixtures word them: `level subject region`, the level only where it is below the rule's own."""
    lines = []
    for item in report.diagnostics:
        level = f"{item.severity.label} " if item.severity < item.rule.severity else ""
        region = f" {item.finding.region}" if item.finding.region else ""
        lines.append(f"{level}{item.fqn or item.finding.file or 'checkpoint'}{region}")
    return sorted(lines)


# ---------------------------------------------------------------- writing


def write_checkpoint(table: dict[str, Any], folder: Path) -> None:
    """Write the folder that a case describes."""
    folder.mkdir(parents=True, exist_ok=True)
    content = _Content()
    for fqn, tensor in table.get("tensors", {}).items():
        content.add_tensor(fqn, tensor)
    for fqn in [*table.get("objects", ()), *table.get("bytes", ())]:
        content.add_bytes(fqn)
    for fqn, place in table.get("stray", {}).items():
        offsets, _, record = place.partition(" @ ")
        content.store(fqn, _numbers(offsets) if offsets != "bytes" else None, record)
    for fqn in table.get("unstored", ()):
        content.entries[fqn] = _Stub(_CM, "BytesStorageMetadata", {})
    extras = {"all_local_plans": content.plans(table["plans"])} if "plans" in table else {}
    extras |= {"mcore_data": table["mcore_data"]} if "mcore_data" in table else {}
    if table.get("metadata", True):
        (folder / table.get("metadata_name", ".metadata")).write_bytes(content.pickled(extras))
    if table.get("megatron"):
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))
        _write_common(folder / "common.pt", table.get("common", {}))
    elif "common" in table:
        _write_common(folder / "common.pt", table["common"])
    files = dict(content.ends) | table.get("files", {})
    for name, size in files.items():
        if size != "absent" and not name.startswith(("/", "..")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
    for name, text in table.get("raw", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
        later = path.stat().st_mtime + 10
        os.utime(path, (later, later))


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
    """What goes into `.metadata`, and how long each payload file becomes."""

    entries: dict[str, Any] = field(default_factory=dict)
    storage: dict[Any, Any] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_tensor(self, fqn: str, table: dict[str, Any]) -> None:
        self.tensors[fqn] = table
        shape, dtype = table["shape"], table.get("dtype", "float32")
        bits = ITEM_BITS.get(dtype, 8)
        chunks = []
        for number, text in enumerate(table.get("chunks", [", ".join(":" for _ in shape)])):
            offsets, sizes = parse_chunk(text, shape)
            chunks.append(_Stub(_CM, "ChunkStorageMetadata", {"offsets": _Size(offsets), "sizes": _Size(sizes)}))
            record = table["records"][number] if "records" in table else None
            length = max(prod(sizes) if min(sizes, default=0) >= 0 else 0, 0) * bits // 8 + FRAMING
            self.store(fqn, offsets, record, f"__{number}_0.distcp", length, table.get("transform"))
        state = {"properties": _properties(dtype), "size": _Size(tuple(map(int, shape))), "chunks": chunks}
        self.entries[fqn] = _Stub(_CM, "TensorStorageMetadata", state)

    def add_bytes(self, fqn: str) -> None:
        self.entries[fqn] = _Stub(_CM, "BytesStorageMetadata", {})
        self.store(fqn, None, None, "__0_0.distcp", 1261)

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
        index = {"fqn": fqn, "index": None} | ({} if offsets is None else {"offset": _Size(offsets)})
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
            return _Stub(_CP, "WriteItem", {"index": index, "type": _Enum(3), "tensor_data": None})
        shape = table.get("shape", self.tensors[fqn]["shape"])
        dtype = table.get("dtype", self.tensors[fqn].get("dtype", "float32"))
        offsets, sizes = parse_chunk(chunk, shape)
        index = _Stub(_CM, "MetadataIndex", {"fqn": fqn, "index": None, "offset": _Size(offsets)})
        box = _Stub(_CM, "ChunkStorageMetadata", {"offsets": _Size(offsets), "sizes": _Size(sizes)})
        state = {"chunk": box, "properties": _properties(dtype), "size": _Size(tuple(shape))}
        data = _Stub(_CP, "TensorWriteData", state)
        return _Stub(_CP, "WriteItem", {"index": index, "type": _Enum(2), "tensor_data": data})

    def pickled(self, extras: dict[str, Any]) -> bytes:
        meta = {"checkpoint_id": "/checkpoints/case", "save_id": "0", "load_id": None, "modules": []}
        state = {
            "state_dict_metadata": self.entries,
            "planner_data": None if extras else {fqn: (fqn,) for fqn in self.entries},
            "storage_data": self.storage,
            "storage_meta": _Stub(_CM, "StorageMeta", meta),
            "version": "1.0.0",
        }
        file = io.BytesIO()
        _Pickler(file, 4).dump(_Stub(_CM, "Metadata", state | extras))
        return file.getvalue()


class _Name:
    """A module and a name to be pickled as a GLOBAL."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Only so that the pickler takes it for a function."""


class _Stub:
    """An object of one of torch's classes, by its attributes."""

    def __init__(self, module: str, name: str, state: dict[str, Any]) -> None:
        self.cls, self.state = _Name(module, name), state


class _Size(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()


class _Enum(int):
    """A WriteItemType."""


class _Pickler(pickle._Pickler):
    """Writes the stand-ins the way pickle writes torch's own objects (protocol 4)."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Name):
            super().save(obj.module)
            super().save(obj.name)
            self.write(pickle.STACK_GLOBAL)
        elif isinstance(obj, _Stub):
            self.save(obj.cls)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(obj)
            if obj.state:
                super().save(obj.state)
                self.write(pickle.BUILD)
        elif isinstance(obj, _Size):
            self._reduce(_Name("torch", "Size"), tuple(obj))
        elif isinstance(obj, _Enum):
            self._reduce(_Name(_CP, "WriteItemType"), int(obj))
        else:
            super().save(obj, save_persistent_id)

    def _reduce(self, name: _Name, argument: Any) -> None:
        self.save(name)
        super().save(argument)
        self.write(pickle.TUPLE1 + pickle.REDUCE)


def _properties(dtype: str) -> _Stub:
    layout = _Name("torch", "strided")  # the reader looks at the dtype alone
    stub = _Stub(_CM, "TensorProperties", {})
    stub.state = (_Name("torch", dtype), layout, False, 0, False)  # type: ignore[assignment]
    return stub


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _write_common(path: Path, values: dict[str, Any]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(values, 2))
        archive.writestr("common/version", "3\n")


def fixture_cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """Every case of every fixture in a folder, with the code that its file is named for."""
    for path in sorted(folder.glob("*.toml")):
        for case in read_cases(path):
            yield path.stem, case
