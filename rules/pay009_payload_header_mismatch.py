from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ckptlint.depth import Depth
from ckptlint.geometry.writers import ranks_of_chunks
from ckptlint.model import Checkpoint, PayloadTable, RecordContent, Tensor
from ckptlint.model.text import byte_span, named_ranks, plural
from ckptlint.model.tiling import IntArray
from ckptlint.rule import Finding, Location, Note, Severity, require, rule
from ckptlint.vocabulary.dtypes import ITEM_BITS, loses, nbytes

_PACKED = 2
_FEW = 16  # chunks, up to which comparing each takes less time than telling their kinds apart


class _Mismatch(NamedTuple):
    """A chunk whose record contradicts the metadata."""

    row: int
    what: str  # that differs: `shape`, `dtype`, `bytes`, `offsets`, or `kind` for a record without a tensor
    text: str  # what the record holds
    weak: bool  # it may be read in more than one way: a tensor subclass, or several storages


@rule("PAY009", "payload-header-mismatch", Severity.ERROR, depth=Depth.HEADERS)
def payload_header_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A record holds a shape, dtype or offset different from its chunk's.

    What it checks:
        The header inside each record states the tensor's dtype and the chunk's shape, and its storage is large enough;
        in the SAFETENSORS mode of torch's FileSystemWriter it also states the chunk's offsets. It is only a warning if
        all chunks of a tensor agree on the other dtype and conversion changes no value, and info for tensor subclasses
        and records with several storages. Records that went through a stream transform are not opened.
    Why it matters:
        torch takes sizes and dtype from the first rank's plan, so only the record shows what another rank wrote. A
        wrong dtype loads without an error; a wrong shape fails, or fills only part of the chunk.
    Usual causes:
        A rank wrote its tensor-parallel part under a chunk of full size, ranks ran in different precision, a
        deduplicated chunk had another size, somebody edited the metadata or swapped payload files, or a rank wrote two
        chunks of one key into one safetensors file, where torch (2.13) keeps the last.
    How to fix:
        Build the chunk's metadata from the tensor that the rank writes, and save again.
    See:
        torch.distributed.checkpoint.planner_helpers._create_write_items, filesystem._write_files_from_queue
    """
    payload = require(ckpt.payload)
    for tensor in ckpt.sound_tensors():
        rows = _rows_to_compare(payload, tensor)
        if mismatches := [mismatch for row in rows if (mismatch := _compare(payload, tensor, row))]:
            yield _finding(ckpt, payload, tensor, mismatches)


def _rows_to_compare(payload: PayloadTable, tensor: Tensor) -> list[int]:
    """Indices of the chunks whose kind (content, sizes, bytes) does not match the metadata, in order; of few, all."""
    # A tensor may have 100,000 chunks, but few kinds of them: one chunk of each kind is compared.
    rows = np.flatnonzero(tensor.chunks.record >= 0)
    if len(rows) <= _FEW:
        return rows.tolist()
    records = tensor.chunks.record[rows]
    columns: list[IntArray] = [
        column[records].astype(np.int64) for column in (payload.state, payload.content, payload.storages, payload.size)
    ]
    table = np.column_stack([*columns, tensor.tiling.sizes[rows]])
    kinds, first, kind = np.unique(table, axis=0, return_index=True, return_inverse=True)
    bad = [number for number in range(len(kinds)) if _compare(payload, tensor, int(rows[first[number]]))]
    return [int(row) for row in rows[np.isin(kind.reshape(-1), bad)]] if bad else []


def _compare(payload: PayloadTable, tensor: Tensor, row: int) -> _Mismatch | None:
    """How the header of a record contradicts the chunk's metadata; None if it agrees or cannot be judged."""
    record = int(tensor.chunks.record[row])
    content = payload.of(record)
    sizes = tuple(tensor.tiling.sizes[row].tolist())
    if content is None or any(size < 0 for size in sizes):
        return None
    if content.form == "object":
        text = "no tensor" if content.length < 0 else f"a list of {content.length}"
        return _Mismatch(row, "kind", text, weak=False)
    if content.dtype == "unknown" and not content.shape:
        return None  # a tensor subclass with its own __reduce__, which only its code can rebuild
    weak = content.form == "subclass" or int(payload.storages[record]) > 1
    if content.shape != sizes and not _differs_by_packing(tensor, content, sizes):
        return _Mismatch(row, "shape", f"shape {list(content.shape)}", weak)
    if content.dtype != tensor.dtype and "unknown" not in (content.dtype, tensor.dtype):
        return _Mismatch(row, "dtype", content.dtype, weak)
    bits, stored = ITEM_BITS.get(content.dtype), int(payload.size[record])
    if bits and (content.offset + content.extent) * bits // 8 > stored and content.extent:
        return _Mismatch(row, "bytes", f"a storage of {stored:,} bytes", weak)
    offsets = tuple(tensor.tiling.offsets[row].tolist())
    if content.declared_offsets not in (None, offsets):
        return _Mismatch(row, "offsets", f"the chunk at offsets {list(content.declared_offsets or ())}", weak)
    return None


def _differs_by_packing(tensor: Tensor, content: RecordContent, sizes: tuple[int, ...]) -> bool:
    """Whether the shapes differ only because float4 counts its two values per byte as one or as two."""
    # torch has both views of one memory: float4_e2m1fn_x2 counts pairs, and quantisers declare the number of values.
    packed = tensor.dtype.startswith("float4") or content.dtype.startswith("float4")
    same = content.shape[:-1] == sizes[:-1] and len(content.shape) == len(sizes) > 0
    return packed and same and sizes[-1] in (content.shape[-1] * _PACKED, content.shape[-1] // _PACKED)


def _finding(ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor, mismatches: list[_Mismatch]) -> Finding:
    first = mismatches[0]
    box = tensor.tiling.box(first.row)
    record = int(tensor.chunks.record[first.row])
    file, start, length = ckpt.byte_range_of(record)
    expected = tensor.dtype if first.what == "dtype" else f"shape {list(box.sizes)}"
    if first.what == "bytes":
        expected = f"{nbytes(tensor.dtype, box.volume) or 0:,} bytes"
    elif first.what == "offsets":
        expected = f"offsets {list(box.offsets)}"
    count, rows = len(mismatches), tuple(mismatch.row for mismatch in mismatches[:16])
    which = f"the record of chunk {box}{{of}} holds" if count == 1 else f"{count:,} records{{of}} hold"
    read = [row for row in range(len(tensor.chunks)) if payload.of(int(tensor.chunks.record[row])) is not None]
    # If all ranks wrote the same other dtype, torch converts on load, and only a conversion that loses values does
    # harm. If some did, their parts of one tensor differ in precision, which nobody wants.
    agreed = first.what == "dtype" and count == len(read) and len({mismatch.text for mismatch in mismatches}) == 1
    is_harmless = agreed and not loses(first.text, tensor.dtype)
    is_weak = all(mismatch.weak for mismatch in mismatches)
    content = payload.of(record)
    stored = f"{content.dtype} {list(content.shape)}" if content and content.form != "object" else first.text
    notes: list[Note] = [
        ("record", f"{file}, bytes {byte_span(start, length)}: {stored} in {int(payload.stored[record]):,} bytes"),
        ("chunk", f"{tensor.dtype} {list(box.sizes)} needs {nbytes(tensor.dtype, box.volume) or 0:,} bytes"),
    ]
    if first.what == "dtype" and not agreed:
        notes += _dtype_notes(ckpt, payload, tensor, read)
    if agreed:
        cost = "converts every value" if is_harmless else "changes values as it converts them"
        notes.append(("load", f"a reader that takes the dtype of the metadata, such as dcp_to_torch_save, {cost}"))
    return Finding(
        f"{which} {first.text} where the metadata says {expected}",
        at=Location(tensor, region=box, rows=rows, file=file, byte_range=(start, length)),
        severity=Severity.INFO if is_weak else Severity.WARNING if is_harmless else None,
        notes=tuple(notes),
        hint="compare with the same tensor of another step; the record shows what its rank held",
    )


def _dtype_notes(ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor, read: list[int]) -> list[Note]:
    """A note on the dtypes of the records, with the ranks that wrote them."""
    by_dtype: dict[str, set[int]] = {}
    count: Counter[str] = Counter()
    for row, rank in zip(read, ranks_of_chunks(ckpt, tensor, read).tolist(), strict=True):
        content = require(payload.of(int(tensor.chunks.record[row])))
        count[content.dtype] += 1
        if rank >= 0:
            by_dtype.setdefault(content.dtype, set()).add(rank)
    of = {dtype: f" of {named_ranks(ranks)}" for dtype, ranks in by_dtype.items()}
    texts = [f"{dtype} in {plural(count[dtype], 'chunk')}{of.get(dtype, '')}" for dtype in count]
    return [("dtypes", ", ".join(texts))]
