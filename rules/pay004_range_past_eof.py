from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ckptlint.depth import Depth
from ckptlint.geometry.record_states import least_container, rows_by_file
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, human_bytes
from ckptlint.model.tiling import IntArray, distinct
from ckptlint.rule import MOST_KEYS, Finding, Location, Severity, pointer_advice, rule

_COPY = "compare its size with the original's and copy it again"
_BLOCK = 4096


@rule("PAY004", "range-past-eof", Severity.ERROR, depth=Depth.FILES)
def range_past_eof(ckpt: Checkpoint) -> Iterator[Finding]:
    """A payload file is shorter than the metadata says.

    What it checks:
        Each storage entry ends inside its file, and neither its offset nor its length is negative. In the safetensors
        serialisation entries have no byte offsets; there a file has at least the bytes of all its tensors.
    Why it matters:
        The end of the file is missing, so these tensors cannot be loaded.
    Usual causes:
        A killed writer, a full disk, an interrupted copy or upload.
    How to fix:
        Copy the file again from where it was written, or go back one step.
    See:
        torch.distributed.checkpoint.filesystem._StorageInfo
    """
    table = ckpt.records
    if not ckpt.locates_bytes:
        yield from _smaller_than_tensors(ckpt)
        return
    size = ckpt.files.size[table.file]
    negative = (table.byte_offset < 0) | (table.byte_length < 0)
    beyond = (size >= 0) & (table.byte_length > size - table.byte_offset)
    short = rows_by_file(table, beyond & ~negative)
    is_all = len(short) == len(distinct(table.file)) > 1  # which no interrupted copy leaves
    files_by_bytes = _files_by_bytes(ckpt) if short else {}
    for rows in short:
        yield replace(_truncated(ckpt, rows, files_by_bytes), kind="all short" if is_all else "short")
    for rows in rows_by_file(table, negative):
        yield _damaged(ckpt, rows)


def _smaller_than_tensors(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on files of the safetensors serialisation that are shorter than their header and tensors."""
    table = ckpt.records
    for of_file in rows_by_file(table, ~table.transformed):
        file = ckpt.files[int(table.file[of_file[0]])]
        rows, needed = least_container(table, of_file)
        if file.size is not None and file.size < needed:
            keys = _keys(ckpt, rows)
            label = f"{file.name}: {_entries(len(rows))} in one safetensors container"
            yield Finding(
                f"{file.name} is {f'{human_bytes(needed - file.size)} short' if file.size else 'empty'}: it has "
                f"{file.size:,} bytes, its tensors need {needed:,} or more",
                at=Location(keys[0] if len(keys) == 1 else None, file=file.name, label=label),
                identity=(file.name,),
                keys=tuple(keys[:MOST_KEYS]),
                notes=(("keys", first_names(keys)),),
                hint=_hint(file.size),
            )


def _files_by_bytes(ckpt: Checkpoint) -> dict[tuple[int, int], list[int]]:
    needed = np.zeros(len(ckpt.files), np.int64)
    np.maximum.at(needed, ckpt.records.file, ckpt.records.byte_offset + ckpt.records.byte_length)
    return grouped(
        (pair, file) for file, pair in enumerate(zip(ckpt.files.size.tolist(), needed.tolist(), strict=True))
    )


def _hint(size: int, partner: str = "") -> str:
    """The hint for a short file of `size` bytes; `partner` is the file that may have been exchanged with it."""
    if partner:
        return f"exchange it with {partner}, which has exactly the bytes that these entries need, and check again"
    if not size:
        return "copy it again from where it was written; if it is empty there too, the writer's disk was full"
    return _COPY + "; an interrupted copy often ends at a block, as this one does" * (size % _BLOCK == 0)


def _truncated(ckpt: Checkpoint, rows: IntArray, files_by_bytes: Mapping[tuple[int, int], list[int]]) -> Finding:
    """The finding for the entries of one file that reach past its end."""
    table = ckpt.records
    file, start, length = ckpt.byte_range_of(int(rows[np.argmin(table.byte_offset[rows])]))
    stored = ckpt.files[int(table.file[rows[0]])]
    has = stored.size or 0
    # as Python ints: the end of a forged entry does not fit int64
    needed = max(map(sum, zip(table.byte_offset[rows].tolist(), table.byte_length[rows].tolist(), strict=True)))
    keys = _keys(ckpt, rows)
    exchanged = files_by_bytes.get((needed, has), [])  # one of many may be any of them
    what = stored.instead or f"is {f'{human_bytes(needed - has)} short' if has else 'empty'}"
    why = "" if has else "the file is empty, so these tensors cannot be loaded"
    hint = _hint(has, ckpt.files[exchanged[0]].name if len(exchanged) == 1 else "")
    label = f"{file}: {_entries(len(rows))} past the end, the first from byte {start:,}"
    why, hint = pointer_advice(stored.instead) or (why, hint)
    return Finding(
        f"{file} {what}: it has {has:,} bytes, its entries need {needed:,}",
        at=Location(keys[0] if len(keys) == 1 else None, file=file, byte_range=(start, length), label=label),
        identity=(file,),
        keys=tuple(keys[:MOST_KEYS]),
        notes=(("keys", first_names(keys)),),
        why=why,
        hint=hint,
    )


def _damaged(ckpt: Checkpoint, rows: IntArray) -> Finding:
    """The finding for the entries of one file that have a negative offset or length."""
    file, start, length = ckpt.byte_range_of(int(rows[0]))
    keys = _keys(ckpt, rows)
    label = f"{file}: {_entries(len(rows))} with a negative offset or length"
    return Finding(
        f"the storage entry{{of}} is impossible: {length:,} bytes at offset {start:,} of {file}"
        if len(rows) == 1
        else f"{_entries(len(rows))} of {file} are impossible, the first: {length:,} bytes at offset {start:,}",
        at=Location(keys[0] if len(keys) == 1 else None, file=file, byte_range=(start, length), label=label),
        identity=(file, "negative"),
        kind="negative",
        keys=tuple(keys[:MOST_KEYS]),
        notes=(("keys", first_names(keys)),),
        why="the metadata is wrong, not the payload: the bytes may all be there, but a load cannot find them",
        hint="restore .metadata from where it was written",
    )


def _keys(ckpt: Checkpoint, rows: IntArray) -> list[str]:
    return list(dict.fromkeys(ckpt.records.name(row) for row in rows.tolist()))


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"
