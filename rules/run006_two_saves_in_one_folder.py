from __future__ import annotations

import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator

from ckptlint.analysis.chunks.two_saves import replaced_files
from ckptlint.analysis.optimizer.inventory import OptimizerState, inventory_of
from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, PayloadTable
from ckptlint.model.text import first_names, human_duration, verb
from ckptlint.rule import MOST_KEYS, Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import FORMS
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.metadata_files import ranks_in

_LARGEST = 2_000_000
_SEVERAL = 2


@rule("RUN006", "two-saves-in-one-folder", Severity.ERROR, depth=Depth.FILES)
def two_saves_in_one_folder(ckpt: Checkpoint) -> Iterator[Finding]:
    """Payload files are of another save than `.metadata`, by their times or by the optimizer's step in them.

    What it checks:
        No payload file is much younger than `.metadata`, which a save writes last, while the others lie close before
        it. At depth headers: the scalar `step` that Adam keeps for each parameter is the same in all files, by the
        CRC-32 of its record. Parameters that lag behind because they got no gradient, were frozen or were reset differ
        within one file, or from layer to layer; that is fine. It is an error where times and steps tell the same files
        apart, or the other files have the step of the folder or of a counter.
    Why it matters:
        The files belong to different moments of the training, and a load mixes them without an error.
    Usual causes:
        A job saved again into this folder and was killed before it wrote `.metadata`; an interrupted copy over an older
        step; a rank that staged its data late. Times alone look the same if somebody changed or fetched single files
        later; where checksums show a change, it says so.
    How to fix:
        Copy the files of one save again from where they were written, or resume from another step.
    See:
        torch.distributed.checkpoint.FileSystemWriter.finish; torch.optim.Adam: `step` is a tensor for each parameter
    """
    torn = None if any(p.kind == "incomplete" for p in ckpt.problems) else replaced_files(ckpt)
    if ckpt.payload is None and torn is None:
        raise NotApplicable("no payload file is much younger than .metadata, and the records were not read")
    groups = _by_step(ckpt, ckpt.payload) if ckpt.payload is not None else []
    young = {ckpt.files[file].name for file in torn.files} if torn is not None else set()
    if groups:
        yield _steps_differ(ckpt, groups, young)
    elif torn is not None:
        yield _times_differ(ckpt, sorted(young), torn.pause)


def _times_differ(ckpt: Checkpoint, names: list[str], pause: float) -> Finding:
    """The finding on files younger than `.metadata`; a save writes checksums, so where all fail they were changed."""
    damages = [] if ckpt.payload is None else [d for d in ckpt.payload.damages if d.file in names and d.record >= 0]
    is_changed = {damage.file for damage in damages} == {*names}
    what = "changed after the save" if is_changed else "files of two saves, or changed after the save"
    are, fail = verb(len(names), "is"), "fails its checksums" if len(names) == 1 else "fail their checksums"
    return Finding(
        f"{what}: {first_names(names, 3)} {are} {human_duration(pause)} younger than .metadata and the other files"
        + f", and {fail}" * is_changed,
        at=Location(file=names[0], ranks=ranks_in(names)),
        identity=("times",),
        keys=tuple(dict.fromkeys(ckpt.records.name(damage.record) for damage in damages))[:MOST_KEYS]
        if is_changed
        else (),
        files=tuple(names[1:]),
        severity=Severity.WARNING,
        kind="times",
        why="what changes the bytes of a file sets its time, too"
        if is_changed
        else ".metadata is written last: either a later save into this folder replaced these files and never finished, "
        "or something wrote or copied them later",
        hint="copy these files again from where they were written"
        if is_changed
        else "load another step; if these files were copied again later, compare them with the originals",
        inferred_from="the times of the files",
    )


def _by_step(ckpt: Checkpoint, payload: PayloadTable) -> list[tuple[str, list[str], int]]:
    """(step as text, its files, number of its parameters), the checkpoint's step first; [] if files are of one save."""
    steps = [state for state in inventory_of(ckpt).states if state.what == "step" and state.tensor.volume == 1]
    located = [(state, int(state.tensor.chunks.record[0])) for state in steps if len(state.tensor.chunks) == 1]
    known = [(state, row, int(payload.crc[row])) for state, row in located if row >= 0 and payload.crc[row] > 0]
    by_file: dict[int, set[int]] = defaultdict(set)
    by_layer: dict[object, set[int]] = defaultdict(set)
    lead: dict[int, OptimizerState] = {}
    for state, row, crc in known:
        by_file[int(ckpt.records.file[row])].add(crc)
        key = state.param.key if state.param else None
        by_layer[(key.scope, key.block, key.layer) if key else None].add(crc)
        lead.setdefault(crc, state)
    # A layer that was frozen lags by design, and may have a file of its own: then each layer is at one step.
    is_by_layer = all(len(values) == 1 for values in by_layer.values())
    if len(lead) < 2 or is_by_layer or any(len(values) > 1 for values in by_file.values()):
        return []
    files = grouped((crc, ckpt.files[file].name) for file, (crc,) in by_file.items())
    counts = Counter(crc for _, _, crc in known)
    groups = [(_value(lead[crc].tensor.dtype, crc), names, counts[crc]) for crc, names in files.items()]
    return sorted(groups, key=lambda group: (group[0] not in _stated(ckpt), -len(group[1])))


def _stated(ckpt: Checkpoint) -> set[str]:
    """The step numbers in the folder's name and in counters outside of the optimizer, as text."""
    counters = {claim.step for claim in ckpt.claims if parse(claim.source).kind != "optimizer"}
    steps = counters | ({ckpt.run.step} if ckpt.run else set())
    return {f"{step:,}" for step in steps if isinstance(step, int)}


def _steps_differ(ckpt: Checkpoint, groups: list[tuple[str, list[str], int]], young: set[str]) -> Finding:
    """The finding on files whose steps differ; an error if their times or the checkpoint's own step prove it."""
    (step, _, _), *others = groups
    names = sorted(groups[-1][1])
    is_young = any(young and young >= set(group) for _, group, _ in groups)
    # of each odd file several parameters must contradict it: a single one may have had no gradient
    is_stated = step in _stated(ckpt) and all(count >= _SEVERAL * len(group) for _, group, count in others)
    also = ", and so do their times" if is_young else f"; the checkpoint says step {step}" if is_stated else ""
    return Finding(
        f"files of two saves: the optimizer's step in {first_names(names, 3)} differs from the other files{also}",
        at=Location(file=names[0], ranks=ranks_in(names)),
        identity=("steps",),
        kind="steps",
        confidence="certain" if is_young or is_stated else "likely",
        notes=tuple(("step", f"{value} in {first_names(sorted(group), 3)}") for value, group, _ in groups[:4]),
        hint="compare the times of these files with the others', and copy the files of one save again",
        inferred_from="the optimizer's step in each file" + (" and the times of the files" if is_young else ""),
    )


def _value(dtype: str, crc: int) -> str:
    """The whole number whose bytes have this CRC-32, as text; "another value" if no small one has."""
    form = FORMS.get(dtype, "")
    numbers = (number for number in range(_LARGEST) if zlib.crc32(struct.pack(form, number)) == crc)
    return next((f"{number:,}" for number in numbers), "another value") if form else "another value"
