"""Files that run code where a loader opens them, however they are written: none passes, and nothing of them runs."""

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
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import found

import ckptlint

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


class Touch:
    """Its pickle makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    safetensors.save_file({"w": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def array(header: str, body: bytes, version: int = 1, encoding: str = "latin-1") -> bytes:
    """A `.npy` file with a header of one's own."""
    text = header.encode(encoding) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + body


def header(descr: str = "'|O'", shape: str = "(1,)", before: str = "", after: str = "") -> str:
    return f"{before}{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}{after}"


HEADERS = {
    "plain": header(),
    "escaped": header(r"'|\x4f'"),
    "escaped and long": header(r"'|\x4f'", "(1L,)"),
    "octal and long": header(r"'|\117'", "(1L,)"),
    "name and long": header(r"'\x6fbject'", "(1L,)"),
    "unicode and long": header(r"'\u004f'", "(1L, 1L)"),
    "joined and long": header("'|' '\\x4f'", "(1L,)"),
    "named character": header(r"'\N{LATIN CAPITAL LETTER O}'", "(1L,)"),
    "spaces": header(before="  \t", after="  \t \n\n"),
    "lines": header().replace(",", ",\n\t "),
    "lines and long": header(r"'|\x4f'", "(1L,)").replace(",", ",\n  "),
    "comment and long": header(r"'|\x4f'", "(1L,)") + " # f4",
    "fields and long": header(r"[('a', '<f4'), ('b', '|\x4f')]", "(1L,)"),
    "fields": header("[('a', '<f4'), ('b', '|O')]"),
    "nested fields": header(r"[('a', [('b', '|\x4f', (2L,))])]"),
    "subtype": header("('|O', (2,))"),
    "many spaces": header(after=" " * 60_000),
    "no whole header": header()[:-4],
}
NUMBERS = {
    "plain": header("'<f4'", "(2,)"),
    "long": header("'<f4'", "(2L,)"),
    "fields": header("[('O', '<f4'), ('object', '<f4')]", "(1,)"),
    "fields and long": header("[('O', '<f4'), ('object', '<f4')]", "(1L,)"),
}


def zipped(members: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def z_file(data: bytes, width: int = 19, gap: bytes = b"") -> bytes:
    """A file of joblib < 0.9.3: `joblib.numpy_pickle_compat.write_zfile`."""
    return b"ZF" + hex(len(data)).encode().ljust(width) + gap + zlib.compress(data)


def lz4(data: bytes) -> bytes:
    """An LZ4 frame of one block that is not packed; its checksum of the header is not looked at here."""
    return b'\x04"M\x18\x60\x40\x82' + struct.pack("<I", len(data) | 1 << 31) + data + b"\0" * 4


def alone(size: int, lc: int = 3, lp: int = 0, pb: int = 2) -> Callable[[bytes], bytes]:
    """FORMAT_ALONE of lzma with a dictionary of this size."""
    chain = [{"id": lzma.FILTER_LZMA1, "dict_size": size, "lc": lc, "lp": lp, "pb": pb}]
    return lambda data: lzma.compress(data, lzma.FORMAT_ALONE, filters=chain)


def old_tar(data: bytes) -> bytes:
    """The form of torch < 0.2, as far as `torch.serialization._legacy_load` looks."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "zf": z_file,
    "zf of python 2": lambda data: z_file(data, gap=b" "),
    "lz4": lz4,
    "old lz4": lambda data: b"\x02!L\x18" + struct.pack("<I", len(data)) + data,
    "zstandard": lambda data: b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + data,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "fast zlib": lambda data: zlib.compress(data, 1),
    "small zlib": lambda data: (pack := zlib.compressobj(wbits=9)).compress(data) + pack.flush(),
    **{f"lzma {size}": alone(size) for size in (4096, 5000, 65536, 2**20, 2**23, 2**24 + 17, 3 << 20)},
    "lzma of other properties": alone(65537, 1, 2, 1),
    "gzip twice": lambda data: gzip.compress(gzip.compress(data)),
    "gzip of zf": lambda data: gzip.compress(z_file(data)),
    "gzip of lz4": lambda data: gzip.compress(lz4(data)),
    "unknown": lambda data: b"QRS\1" + bytes(byte ^ 0x55 for byte in data),
    "old tar": old_tar,
}
ENDINGS = ("joblib", "pkl", "pickle", "pt", "pth", "ckpt", "dill", "p")
