"""The safetensors blob at the end of a payload file of torch's FileSystemWriter in its SAFETENSORS mode."""

from __future__ import annotations

from math import prod

from ckptlint.errors import UnreadableError
from ckptlint.formats.safetensors_header import header_length, layout_faults, parse_header
from ckptlint.loaders.readers.safetensors import sharding_info
from ckptlint.model import RecordContent
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ITEM_BITS


def read_blob(folder: Folder, path: str, start: int, size: int) -> dict[str, tuple[RecordContent, int, int]]:
    """What the tensors of a blob are by printable name, first byte in the file, and bytes; it ends as the file does.

    Raises UnreadableError where its header is damaged, its tensors leave holes, overlap or do not fill the file, or it
    does not say the offsets of each; LimitError for a larger header than the safetensors library reads.

    Source: torch.distributed.checkpoint.filesystem (>= 2.8), SerializationFormat.SAFETENSORS
    """
    try:
        length = header_length(folder.read_range(path, start, 64), size - start)
        header = parse_header(folder.read_range(path, start + 8, length), start + 8 + length)
        info = sharding_info(header) or {}
    except UnreadableError as error:
        raise UnreadableError(f"lies in a safetensors blob that {error}", 0) from None
    faults = [sentence for sentence, _, _ in layout_faults(header, size)]
    if len(header.end) and header.payload + int(header.end.max()) > size:
        faults.append("its tensors reach past the end of the file")
    if faults:
        raise UnreadableError(f"lies in a damaged safetensors blob: {faults[0]}", 0)
    columns = zip(header.names, header.dtypes, header.shapes, header.begin.tolist(), header.end.tolist(), strict=True)
    tensors = {}
    for name, known, shape, begin, end in columns:
        dtype = known or "unknown"
        if dtype in ITEM_BITS and prod(shape) * ITEM_BITS[dtype] // 8 != end - begin:
            wrong = f"{end - begin:,} bytes for {dtype} {list(shape)}"
            raise UnreadableError(f"lies in a damaged safetensors blob: its header says {wrong}", 0)
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        place, _ = info.get(name, (None, None))
        content = RecordContent("tensor", dtype, shape, strides, declared_offsets=place)
        tensors[printable(name)] = content, header.payload + begin, end - begin
    return tensors
