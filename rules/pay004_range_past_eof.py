"""PAY004: stored ranges lie inside their files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.chunkmap import human_bytes
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, NotApplicable, Severity, rule


@rule("PAY004", "range-past-eof", Severity.ERROR, needs="files")
def range_past_eof(ckpt: Checkpoint) -> Iterator[Finding]:
    """A payload file is shorter than the metadata says.

    What it checks:
        Each storage entry starts at 0 or later, has a length that is not negative, and ends inside its file.
    Why it matters:
        The payload is cut, so these tensors cannot be loaded.
    Usual causes:
        A writer that was killed, a full disk, an interrupted copy or upload.
    How to fix:
        Copy the file again from where it was written, or go back one step.
    See:
        torch.distributed.checkpoint.filesystem._StorageInfo
    """
    if not ckpt.locates_bytes:
        raise NotApplicable("in the safetensors serialisation an entry's offset and length do not locate its bytes")
    table = ckpt.records
    sizes = np.array([-1 if file.size is None else file.size for file in ckpt.files] or [0], np.int64)
    size = sizes[table.file]
    negative = (table.byte_offset < 0) | (table.byte_length < 0)
    beyond = (size >= 0) & (table.byte_length > size - table.byte_offset)
    for number in np.unique(table.file[negative | beyond]).tolist():
        rows = np.flatnonzero((table.file == number) & (negative | beyond))
        first = int(rows[np.argmin(table.byte_offset[rows])])
        file, start, length = ckpt.place(first)
        keys = list(dict.fromkeys(table.name(row) for row in rows.tolist()))
        if negative[rows].any():
            message = f"{file}: a storage entry{{of}} claims {length:,} bytes at {start:,}"
        else:
            needed = int((table.byte_offset[rows] + table.byte_length[rows]).max())
            has = int(sizes[number])
            short = f"{human_bytes(needed - has)} short" if has else "empty"
            message = f"{file} is {short}: it has {has:,} bytes, its entries need {needed:,}"
        yield Finding(
            message,
            fqn=keys[0] if len(keys) == 1 else None,
            file=file,
            byte_range=(start, length),
            missing=(file,),
            place=f"{file}: {len(rows):,} entries behind the end, the first at byte {start:,}",
            notes=(("keys", ", ".join(keys[:4]) + (f" and {len(keys) - 4:,} more" if len(keys) > 4 else "")),),
            hint="compare the size with the file where it was written; a copy that broke off leaves a round number"
            if not negative[rows].any()
            else "the entry was damaged or edited; take .metadata from where it was written",
        )
