"""Files in files: containers nested at random, with a pickle that runs code or with a healthy file in the middle."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.package import PackageExporter

DEPTH = 3
"""How many containers in one another are opened."""

Wrap = Callable[[Random, str, bytes], bytes]


class Call:
    """Its pickle calls `os.mkdir`."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


class Nested(NamedTuple):
    """A file of containers.

    Attributes:
        kinds: from the outermost in.
        depth: how many are archives or packed.
        is_clear: whether none is TorchScript, which is not read, and no zip file shows a `data.pkl` that is not its
            own: torch may read that, so it is not passed.
    """

    data: bytes
    kinds: tuple[str, ...]
    depth: int
    is_clear: bool


def saved(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def array(value: Any) -> bytes:
    """What numpy.save writes."""
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def zipped(_: Random, name: str, data: bytes, packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file with a text and this member."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        archive.writestr("readme.txt", "step 1\n" * 9)
        archive.writestr(name, data)
    return file.getvalue()


def tarred(rng: Random, name: str, data: bytes) -> bytes:
    """A tar file with a text and this member, packed or not, in any of its forms."""
    file = io.BytesIO()
    form = rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for label, content in (("model_config.yaml", b"a: 1\n"), (name, data)):
            member = tarfile.TarInfo(label)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def of_torch(_: Random, name: str, data: bytes) -> bytes:
    """An archive by torch's own writer, as `torch.export.save` makes it."""
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    for label, content in (("archive_format", b"pt2"), ("models/model.json", b"{}"), (name, data)):
        writer.write_record(label, content, len(content))
    writer.write_end_of_file()
    return file.getvalue()


def package(_: Random, name: str, data: bytes) -> bytes:
    """An archive of `torch.package` with this file among its resources."""
    file = io.BytesIO()
    with PackageExporter(file) as exporter:
        exporter.save_binary("resources", name.rpartition("/")[2], data)
    return file.getvalue()


def torch_file(_: Random, name: str, data: bytes) -> bytes:
    """A healthy file of torch.save to which somebody added a member."""
    file = io.BytesIO(saved({"step": 1}))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"archive/{name.rpartition('/')[2]}", data)  # not as a storage, which nobody unpickles
    return file.getvalue()


def script(_: Random, name: str, data: bytes) -> bytes:
    """An archive of TorchScript with this file among its extra ones."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file, _extra_files={name: data})
    return file.getvalue()


def program(_: Random, name: str, data: bytes) -> bytes:
    """A program that `torch.export.save` wrote, to whose extra files somebody added one."""
    file = io.BytesIO(_program())
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"archive/extra/{name}", data)
    return file.getvalue()


@cache
def _program() -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), file)
    return file.getvalue()


def events(*values: bytes) -> bytes:
    """A file of TensorBoard's events: of each its length, a sum of that, itself and its sum."""
    file = b""
    for value in values:
        size = struct.pack("<Q", len(value))
        file += size + struct.pack("<I", zlib.crc32(size)) + value + struct.pack("<I", zlib.crc32(value))
    return file


def deflated(data: bytes) -> bytes:
    """Deflated data without any header."""
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


PACKS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zlib": zlib.compress,
    "deflate": deflated,
}
ARCHIVES: dict[str, Wrap] = {
    "zip": zipped,
    "stored": lambda rng, name, data: zipped(rng, name, data, zipfile.ZIP_STORED),
    "zip by bz2": lambda rng, name, data: zipped(rng, name, data, zipfile.ZIP_BZIP2),
    "zip by lzma": lambda rng, name, data: zipped(rng, name, data, zipfile.ZIP_LZMA),
    "npz": lambda rng, name, data: zipped(rng, name + ".npy", data),
    "tar": tarred,
    "pt2": of_torch,
    "package": package,
    "torch file": torch_file,
    "script": script,
    "program": program,
}
LEAVES: dict[str, Callable[[Any], bytes]] = {
    **{f"protocol {number}": lambda value, number=number: pickle.dumps(value, number) for number in (0, 1, 2, 4, 5)},
    "torch": saved,
    "legacy torch": lambda value: saved(value, _use_new_zipfile_serialization=False),
    "objects": lambda value: array(np.array([value], object)),
    "array, pickle": lambda value: array(np.arange(9.0)) + pickle.dumps(value, 2),
    "array, objects": lambda value: array(np.arange(9)) + array(np.array([value], object)),
}
_LINES = b'{"text": "a", "ids": [1, 2]}\n' * 99
_TRACE = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::mm"}] * 9}).encode()
_COLUMN = np.arange(99).tobytes()
HEALTHY: dict[str, bytes] = {
    "log": b"step 1 loss 2.0\n" * 99,
    "lines": _LINES,
    "lines, gzip": gzip.compress(_LINES),
    "tokenizer": json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode(),
    "trace": _TRACE,
    "trace, gzip": gzip.compress(_TRACE),
    "events": events(b"\x09\0\0\x80\xf1\x92\x92\xdaA\x1a\rbrain.Event:2", *[b"\x10\1*\x0b\n\t\n\4loss\x15\0\0\0@"] * 9),
    "parquet": b"PAR1\x15\0\x15\xb0\x0c\x15\xb0\x0c"
    + _COLUMN
    + b"\x15\4\x19,5\0\x18\6schema\x15\2\0" * 2
    + b"\x1a\0\0\0PAR1",
    "arrow": b"ARROW1\0\0\xff\xff\xff\xff\x78\0\0\0\x10\0\0\0\0\0\n\0"
    + _COLUMN
    + b"\xff\xff\xff\xff\0\0\0\0\x90\0\0\0ARROW1",
    "settings": b"model:\n  layers: 2\n",
    "numbers": array(np.random.default_rng(0).normal(size=(64, 8)).astype("f4")),
    "arrays": array(np.arange(9)) + array(np.ones(3)),
    "raw numbers": np.random.default_rng(1).normal(size=4096).astype("f4").tobytes(),
    "code": b"import os\n",
    "empty": b"",
}
NAMES = [
    *("x", "vocab.txt", "weights.bin", "m.pt2", "state.zip", "a.nemo", "b.tgz", "log.jsonl.gz", "data.npz", "x.npy"),
    *("tokens.json", "sub/a/x", "README.md", ".hidden", "trace.json.gz", "data/0", "storage"),
    *("model.mar", "events.log", "scaler", "b.xz", "rows.parquet", "rows.arrow", "events.out.tfevents.1.host.2.0"),
]


def nested(rng: Random, mark: str | None, most: int = 4) -> Nested:
    """Containers in one another.

    Args:
        mark: the folder that the pickle inside would make; None for a healthy file.
        most: how many containers at most.
    """
    if mark is None and rng.random() < 0.6:
        leaf = rng.choice(sorted(HEALTHY))
        data = HEALTHY[leaf]
    else:
        leaf = rng.choice(sorted(LEAVES))
        data = LEAVES[leaf](Call(mark) if mark is not None else {"step": 1, "w": [1.0, 2.0]})
    kinds = [leaf]
    depth = rng.randint(0, most)
    is_clear = True
    for _ in range(depth):
        known = sorted(ARCHIVES) + sorted(PACKS)
        kind = rng.choice([kind for kind in known if kind != "deflate" or kinds[0] != kind])
        with warnings.catch_warnings(action="ignore"):
            name = rng.choice(NAMES)
            data = PACKS[kind](data) if kind in PACKS else ARCHIVES[kind](rng, name, data)
        kinds.insert(0, kind)
        is_clear &= (
            kind in PACKS or kind in ("tar", "pt2", "package", "torch file", "program") or b"data.pkl" not in data
        )
    return Nested(data, tuple(kinds), depth, is_clear)
