from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from ckptlint.model import Checkpoint, PayloadTable, Tensor
from ckptlint.model.text import byte_span
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS, nbytes

_FRAMING = 4096
_SHARE = 0.01
_DENOMINATOR = 1024
_SUBCLASS_FRAMING = (2048, 4096)  # of a record with several storages; one of a plain tensor has less (1.7 KB)
_QUANTISED_BITS = (4, 8)
_SCALES = 0.25  # bytes of scales and zero points for each byte of quantised values, at most (groups of 32)


@rule("PAY007", "payload-length", Severity.ERROR, needs=("offsets", "no torch file"))
def payload_length(ckpt: Checkpoint) -> Iterator[Finding]:
    """A stored record is too short for its chunk.

    What it checks:
        Each record is at least as long as its chunk's elements need. If it is longer by more than 4 KiB and 1 %, that
        is info: usually somebody saved a view with its whole storage. In safetensors the two are equal, and a longer
        one is an error. Transformed records, packed and unknown dtypes are left out. Outside of safetensors a record
        has a header of its own, which hides a lack of up to 1.6 KB. `.metadata` does not say that a tensor is of a
        subclass, such as a quantised one of torchao: at depth files it is only a possible finding if every record of a
        matrix has the length that such a tensor needs. From depth headers on each record says what it holds.
    Why it matters:
        The record cannot hold the chunk, so a load fails or reads other bytes as values.
    Usual causes:
        The metadata states another dtype or shape than the rank wrote.
    How to fix:
        Save again, and clone views before you save.
    See:
        torch.distributed.checkpoint.filesystem._StorageInfo.length
    """
    table, payload = ckpt.records, ckpt.payload
    for tensor in ckpt.sound_tensors():
        if nbytes(tensor.dtype, 1) is None:
            continue
        rows = np.flatnonzero(tensor.chunks.record >= 0)
        records = tensor.chunks.record[rows]
        keep = ~table.transformed[records] & (tensor.tiling.sizes[rows] >= 0).all(axis=1)
        rows, records = rows[keep], records[keep]
        if not len(rows):
            continue
        # as floats: a chunk may claim more bytes than int64 holds
        needed = tensor.tiling.sizes[rows].astype(float).prod(axis=1) * (nbytes(tensor.dtype, 8) or 0) / 8
        stored = table.byte_length[records].astype(float)
        is_short = (stored < needed) & (stored >= 0)
        short = np.flatnonzero(is_short)
        if payload is not None:
            short = short[[not _is_subclass(payload, tensor, row) for row in rows[short].tolist()]]
        if len(short):
            finding = _too_short(ckpt, tensor, rows[short], int(records[short[0]]))
            is_unread = payload is None or (payload.sample and not any(map(payload.of, records[short].tolist())))
            is_unsure = is_unread and not ckpt.is_safetensors and is_short.all()
            if is_unsure and _may_be_quantised(tensor, rows, stored):
                why = "the record is cut, or holds a quantised tensor, and .metadata does not say which"
                hint = "run with --depth headers: the header of the record says what it holds"
                finding = replace(finding, severity=Severity.INFO, confidence="possible", why=why, hint=hint)
            yield finding
        slack = 0 if ckpt.is_safetensors else np.maximum(_FRAMING, _SHARE * needed)
        long = np.flatnonzero(stored > needed + slack)
        if len(long):
            row = int(rows[long[0]])
            extra = int(stored[long[0]] - needed[long[0]])
            yield Finding(
                "records{of} are longer than their chunks",
                at=Location(tensor, rows=(row,)),
                severity=None if ckpt.is_safetensors else Severity.INFO,
                notes=(("excess", f"{len(long):,} of {len(rows):,} records, the first by {extra:,} bytes"),),
                why="readers of safetensors refuse a file if a tensor's bytes do not match its shape and dtype"
                if ckpt.is_safetensors
                else "usually a view, saved with its whole storage: it loads, but wastes space",
                hint="write the file again"
                if ckpt.is_safetensors
                else "clone the view before saving, if the space matters",
            )


def _is_subclass(payload: PayloadTable, tensor: Tensor, row: int) -> bool:
    """Whether a record holds the chunk as a tensor subclass whose form ckptlint does not know."""
    content = payload.of(int(tensor.chunks.record[row]))
    is_own = content is not None and content.form == "subclass" and content.dtype == "unknown"
    return content is not None and is_own and content.shape in ((), tuple(tensor.tiling.sizes[row].tolist()))


def _may_be_quantised(tensor: Tensor, rows: np.ndarray, stored: np.ndarray) -> bool:
    """Whether records of a matrix fit quantised values. Source: torchao 0.18 Int8Tensor, Float8Tensor, Int4Tensor"""
    values = [tensor.tiling.sizes[rows].astype(float).prod(axis=1) * bits / 8 for bits in _QUANTISED_BITS]
    least, most = _SUBCLASS_FRAMING
    fits = [(stored >= size + least) & (stored <= size * (1 + _SCALES) + most) for size in values]
    return len(tensor.global_shape) > 1 and tensor.dtype in FLOATS and any(fit.all() for fit in fits)


def _too_short(ckpt: Checkpoint, tensor: Tensor, rows: np.ndarray, record: int) -> Finding:
    row = int(rows[0])
    box = tensor.tiling.box(row)
    needed = nbytes(tensor.dtype, box.volume) or 1
    file, start, length = ckpt.byte_range_of(record)
    ratio = Fraction(length, needed)
    share = f"{ratio}" if ratio.denominator <= _DENOMINATOR else f"{float(ratio):.1%}"
    what = f"the record of chunk {box}{{of}} is" if len(rows) == 1 else f"{len(rows):,} records{{of}} are"
    return Finding(
        f"{what} too short: {needed:,} bytes needed, {length:,} stored ({share} of it)",
        at=Location(tensor, region=box, rows=tuple(rows[:16].tolist()), file=file, byte_range=(start, length)),
        notes=(("record", f"{file}, bytes {byte_span(start, length)}"),),
        hint="compare dtype and shape with the same tensor of another step",
    )
