"""The safetensors blob at the end of a payload file of torch's FileSystemWriter in its SAFETENSORS mode."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.loaders.reference import HEADER_LIMIT, SAFETENSORS_DTYPES
from ckptlint.model import ITEM_BITS, RANK_LIMIT, Content, printable
from ckptlint.storage import Folder


class BlobTensor(NamedTuple):
    """A tensor of a blob: what it is, first byte in the file, bytes."""

    content: Content
    start: int
    size: int


def read_blob(folder: Folder, path: str, start: int, size: int) -> dict[str, BlobTensor]:
    """The tensors of a blob by their printable names.

    Args:
        path: the file, raw.
        start: first byte of the blob.
        size: bytes of the file, which the blob reaches to the end of.

    Raises:
        UnreadableError: its header is damaged, or its tensors leave holes, overlap or do not fill the file.
        LimitError: the header is larger than the safetensors library reads.

    Source:
        safetensors 0.8: u64 little-endian length, JSON object, data; torch.distributed.checkpoint.filesystem (>= 2.8)
    """
    head = folder.read_range(path, start, 8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > size - start - 8:
        raise UnreadableError(
            f"lies in a safetensors blob with a header of {length:,} bytes, more than the file has", 0
        )
    if length > HEADER_LIMIT:
        raise LimitError(f"lies in a safetensors blob with a header of {length:,} bytes, the limit is {HEADER_LIMIT:,}")
    try:
        header = json.loads(folder.read_range(path, start + 8, length))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"lies in a safetensors blob whose header is no JSON ({printable(str(error))})", 0
        ) from None
    if not isinstance(header, dict):
        raise UnreadableError("lies in a safetensors blob whose header is no JSON object", 0)
    begin = start + 8 + length
    found = {printable(name): _tensor(entry, begin) for name, entry in header.items() if name != "__metadata__"}
    spans = sorted((item.start, item.start + item.size) for item in found.values())
    edges = [(begin, begin), *spans, (size, size)]
    if gap := next(((stop, at) for (_, stop), (at, _) in pairwise(edges) if stop != at), None):
        raise UnreadableError(
            f"lies in a safetensors blob whose tensors leave a hole or overlap between {gap[0]:,} and {gap[1]:,}", 0
        )
    return found


def _tensor(entry: Any, begin: int) -> BlobTensor:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise UnreadableError("lies in a safetensors blob with an entry that describes no tensor", 0) from None
    numbers = (*shape, first, last)
    if len(shape) > RANK_LIMIT or not all(type(value) is int and 0 <= value < 2**62 for value in numbers):
        raise UnreadableError("lies in a safetensors blob with an entry that has no whole numbers", 0)
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    name = SAFETENSORS_DTYPES.get(str(dtype), "unknown")
    if last < first or (name in ITEM_BITS and prod(shape) * ITEM_BITS[name] // 8 != last - first):
        raise UnreadableError(f"lies in a safetensors blob with {last - first:,} bytes for {name} {list(shape)}", 0)
    return BlobTensor(Content("tensor", name, shape, strides), begin + first, last - first)
