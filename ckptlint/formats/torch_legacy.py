"""The files that torch.save made before 1.6, and still makes on request: pickles in a row, then the storages."""

from __future__ import annotations

import pickletools
from typing import Any

MAGIC = 0x1950A86A20F9469CFC6C
"""The number that the first pickle holds (torch.serialization.MAGIC_NUMBER)."""

PICKLES_LIMIT = 16 * 1024**2
"""Bytes at the start of a file in which its pickles are looked for; the tensors follow them."""

PICKLES = 5
"""How many they are: magic number, protocol, system, object, keys of the storages."""

_MAGIC_BYTES = 64  # the pickle of a number is short, in every protocol


def is_magic(root: Any) -> bool:
    """Whether a pickle holds the magic number itself, not what is equal to it."""
    return type(root) is int and root == MAGIC


def is_legacy(head: bytes) -> bool:
    """Whether a file starts with the pickle of the magic number and nothing else, whatever its protocol."""
    try:
        opcodes = [(opcode.name, value) for opcode, value, _ in pickletools.genops(head[:_MAGIC_BYTES])]
    except ValueError:
        return False
    return [value for name, value in opcodes if name not in ("PROTO", "FRAME", "STOP")] == [MAGIC]


def is_tar(head: bytes) -> bool:
    """Whether the first 512 bytes are a tar header: torch.load tries that before it unpickles.

    Source: torch.serialization._legacy_load (torch 2.13), which asks Python's tarfile; a checksum of the header decides
    """
    import tarfile

    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True
