"""RUN006: all files of a step come from one save."""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator

from ckptlint.analysis.inventory import State, inventory_of
from ckptlint.depth import Depth
from ckptlint.geometry.chunk_graph import rank_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import FORMS

_LARGEST = 2_000_000


@rule("RUN006", "two-saves-in-one-folder", Severity.WARNING, needs=Depth.HEADERS)
def two_saves_in_one_folder(ckpt: Checkpoint) -> Iterator[Finding]:
    """The optimizer's step differs from file to file: the folder holds files of two saves.

    What it checks:
        The scalar `step` that Adam keeps for each parameter is the same in all files, by the CRC-32 of its record.
        Parameters that lag behind because they got no gradient, were frozen or were reset differ within one file, or
        from layer to layer; that is fine.
    Why it matters:
        The files belong to different moments of the training, and a load mixes them without an error.
    Usual causes:
        A save into a folder that held an older step, an interrupted copy over an older one, or a rank that staged its
        data late.
    How to fix:
        Copy the files of one save again from where they were written, or resume from another step.
    See:
        torch.optim.Adam: `step` is a tensor for each parameter
    """
    payload = ckpt.payload
    if payload is None:
        raise NotApplicable("the records were not read")
    steps = [state for state in inventory_of(ckpt).states if state.what == "step" and state.tensor.volume == 1]
    found = [(state, int(state.tensor.chunks.record[0])) for state in steps if len(state.tensor.chunks) == 1]
    known = [(state, row, int(payload.crc[row])) for state, row in found if row >= 0 and payload.crc[row] > 0]
    if not known:
        raise NotApplicable("no step of a parameter is stored with a checksum")
    by_file: dict[int, set[int]] = defaultdict(set)
    by_layer: dict[object, set[int]] = defaultdict(set)
    lead: dict[int, tuple[State, int]] = {}
    for state, row, crc in known:
        by_file[int(ckpt.records.file[row])].add(crc)
        key = state.param.key if state.param else None
        by_layer[(key.scope, key.block, key.layer) if key else None].add(crc)
        lead.setdefault(crc, (state, int(ckpt.records.file[row])))
    if len(lead) < 2 or any(len(values) > 1 for values in by_file.values()):
        return
    if all(len(values) == 1 for values in by_layer.values()):
        return
    files: dict[int, list[str]] = defaultdict(list)
    for file, values in by_file.items():
        files[next(iter(values))].append(ckpt.files[file].name)
    told = sorted(files.items(), key=lambda pair: -len(pair[1]))
    crc, names = told[-1]
    yield Finding(
        f"files of two saves: the optimizer's step in {_some(names)} differs from the other files",
        at=Location(
            file=sorted(names)[0],
            ranks=tuple(sorted({rank for name in names if (rank := rank_of(name)) is not None})),
        ),
        missing=("steps",),
        notes=tuple(("step", f"{_value(lead[c][0].tensor.dtype, c)} in {_some(group)}") for c, group in told[:4]),
        hint="compare the times of these files with the others', and copy the files of one save again",
        inferred_from="the optimizer's step in each file",
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _value(dtype: str, crc: int) -> str:
    """The whole number whose bytes have this checksum, as text."""
    form = FORMS.get(dtype)
    for number in range(_LARGEST) if form else ():
        if zlib.crc32(struct.pack(form or "", number)) == crc:
            return f"{number:,}"
    return "another value"
