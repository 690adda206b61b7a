"""The header of a safetensors file: read strictly, without the library and without a byte of a tensor.

Source: safetensors 0.8: u64 little-endian length, a JSON object, then the payload, which the tensors tile without holes
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pointers import pointer_in
from ckptlint.formats.strict_json import checked_key, checked_shape, is_size, json_object
from ckptlint.model.text import printable
from ckptlint.model.tiling import IntArray
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import SAFETENSORS, SAFETENSORS_BITS

HEADER_LIMIT = 100_000_000
"""Bytes of a header; the limit of the safetensors library itself."""

_FIRST_READ = 65536  # most headers end within it: one read, and one request to a store


class Header(NamedTuple):
    """What a header says; the lists and columns run in the order of the header."""

    payload: int  # first byte behind the header, in the file
    metadata: dict[str, str]  # the texts under `__metadata__`
    names: list[str]  # the keys, raw
    dtypes: list[str | None]  # torch's names, None for a dtype that torch has none for
    shapes: list[tuple[int, ...]]  # extents in elements
    begin: IntArray  # int64 [n], first byte of each tensor, counted from `payload`
    end: IntArray  # int64 [n], the byte behind it


def read_header(folder: Folder, name: str, size: int) -> Header:
    """The header of a file of so many bytes.

    Raises:
        UnreadableError: the file does not start with a header; its message goes behind the file's name.
        LimitError: the header is longer than `HEADER_LIMIT`, or a number or name in it exceeds a limit.
        AccessError: the operating system refused the read.
    """
    start = folder.read_range(name, 0, _FIRST_READ)
    length = header_length(start, size)
    if 8 + length > len(start):
        start += folder.read_range(name, len(start), 8 + length - len(start))
    return parse_header(start[8 : 8 + length], 8 + length)


def header_length(start: bytes, size: int) -> int:
    """The length that the first bytes of a file of `size` bytes claim for its header; `read_header` has the errors."""
    if pointer := pointer_in(start):
        raise UnreadableError(pointer)
    if start[:4] == b"PK\x03\x04":
        what = "torch wrote a value that is not a tensor before the header, and no reader of safetensors expects it"
        raise UnreadableError(f"starts with a zip record: {what} there", 0)
    if not start:
        raise UnreadableError("is empty (0 bytes)", 0)
    if len(start) < 8:
        raise UnreadableError(f"is cut short: {len(start)} B are there, its header is not", 0)
    length = int.from_bytes(start[:8], "little")
    if start[8:].lstrip(b" \t\r\n")[:1] not in (b"{", b""):  # JSON allows these before it, and safetensors 0.8 does
        raise UnreadableError("does not start like a safetensors file: its header is not a JSON object", 8)
    if length > size - 8:
        claim = f"ends inside its header, which claims {length:,} bytes; {size - 8:,} are there"
        raise UnreadableError(claim, min(size, 8))
    if length > HEADER_LIMIT:
        raise LimitError(f"has a header of {length:,} bytes, the limit is {HEADER_LIMIT:,}")
    return length


def parse_header(text: bytes, payload: int) -> Header:
    """A header from its JSON, before a payload that starts at this byte of the file; `read_header` has the errors."""
    entries = json_object(text)
    metadata = {} if (stored := entries.pop("__metadata__", None)) is None else stored
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnreadableError("has a header whose __metadata__ does not map text to text", 8)
    shapes, dtypes, spans = [], [], []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise UnreadableError(f"has no dtype and shape for {printable(checked_key(name))}", 8)
        if entry["dtype"] not in SAFETENSORS_BITS:  # torch 2.13 consolidates a key that no rank had with the dtype ""
            named = printable(entry["dtype"][:40])
            raise UnreadableError(f"has {named!r} as the dtype of {printable(name)}, unknown to the format", 8)
        shapes.append(checked_shape(name, entry.get("shape")))
        dtypes.append(SAFETENSORS.get(entry["dtype"]))
        spans.append(_span(name, entry.get("data_offsets")))
        if dtypes[-1] is None:  # elements of less than a byte must end with a byte, the last that they are given
            elements, size = prod(shapes[-1]), spans[-1][1] - spans[-1][0]
            if (bits := elements * SAFETENSORS_BITS[entry["dtype"]]) != 8 * size:
                needed = f"{bits:,} bits, which is not a whole number of bytes" if bits % 8 else f"{bits // 8:,} bytes"
                but = f"but its {elements:,} {entry['dtype']} need {needed}"
                raise UnreadableError(f"gives {printable(name)} {size:,} bytes, {but}", 8)
    ends = np.array(spans, np.int64).reshape(len(spans), 2)
    return Header(payload, metadata, list(entries), dtypes, shapes, ends[:, 0], ends[:, 1])


def layout_faults(header: Header, size: int) -> list[tuple[str, str, int]]:
    """Where the tensors do not tile the payload: sentence, key concerned and first byte in the file, of each kind one.

    A file that ends before its last tensor is not among them: its entries reach past its end.
    """
    order = np.lexsort((header.end, header.begin))
    begin, end = header.begin[order], header.end[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end]))
    faults = []
    for rows, sentence in (
        (np.flatnonzero(begin < reached[:-1]), "{shared:,} bytes belong to two tensors, {name} and the one before it"),
        (np.flatnonzero(begin > reached[:-1]), "no tensor claims {hole:,} bytes before {name}"),
    ):
        if len(rows):
            row = int(rows[0])
            name = printable(header.names[int(order[row])])
            shared = int(min(end[row], reached[row]) - begin[row])
            text = sentence.format(name=name, shared=shared, hole=int(begin[row] - reached[row]))
            more = f" (the first of {len(rows):,} such places)" if len(rows) > 1 else ""
            faults.append((text + more, name, header.payload + int(min(begin[row], reached[row]))))
    rest = size - header.payload - int(reached[-1])
    if rest > 0:
        faults.append((f"no tensor claims {rest:,} bytes after the last tensor", "", size - rest))
    return faults


def _span(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(is_size(offset) for offset in value):
        raise UnreadableError(f"has data_offsets of {printable(name)} that are not two sizes", 8)
    if value[1] < value[0]:
        raise UnreadableError(f"has data_offsets of {printable(name)} that end before they start", 8)
    return value[0], value[1]
