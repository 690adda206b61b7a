"""The parts of a step: what its checkpoints hold together, and that it lost the model beside its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

from ckptlint.errors import CkptlintError
from ckptlint.loaders.discover import find_checkpoints, has_twin
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.loaders.run.finished import other_step, step_state
from ckptlint.loaders.run.steps import folder_below, older_steps
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import join_words, printable
from ckptlint.storage.folder import Folder
from ckptlint.storage.listing import is_plain
from ckptlint.vocabulary.frameworks import family_of, step_number
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.parts import PARTS, part_of_file, part_of_key

_LEVELS = 8  # folders between a checkpoint and its step
_OLDER = 8  # finished steps among which one with a model is looked for
_MINOR = 8  # an unknown file below this share of the step's bytes holds no model


def parts_of(checkpoints: Iterable[Checkpoint]) -> tuple[str, ...]:
    """The parts that the checkpoints of one step hold together."""
    parts: set[str | None] = set()
    for ckpt in checkpoints:
        parts |= {part_of_file(file.family) for file in ckpt.step_files}
        files = ckpt.files.names
        if files and not is_plain(files[0]) and all(map(_is_of_optimizer, files)):
            parts.add("optimizer")  # whose keys are numbers of parameters
            continue
        names: set[str] = {entry.fqn for entry in ckpt.byte_objects} | ckpt.objects.keys.keys()
        if ckpt.common is not None:
            names |= {key for key in ckpt.common.values if isinstance(key, str)}
        parts |= {part_of_key(name) for name in names.union(ckpt.tensors)}
    return tuple(part for part in PARTS if part in parts)


def _is_of_optimizer(file: str) -> bool:
    family = family_of(file.rpartition("/")[2])
    return family is not None and family.part == "optimizer"


def lost_model(places: Sequence[CheckpointPlace], checkpoints: Sequence[Checkpoint]) -> Problem | None:
    """That a whole step holds an optimizer, and nowhere the parameters that it is of; None where that is not so.

    All checkpoints of the step are given, in the order of their places. Nothing is said of a step that could not be
    read whole, that has large files which nobody knows, or whose model lies in a tree of its own: `optim/step-10`
    beside `model/step-10`.
    """
    parts = parts_of(checkpoints)
    if places[0].step is None or "model" in parts or "optimizer" not in parts:
        return None
    if any(not ckpt.readable or ckpt.partial_because or any(ckpt.problems_of("unsupported")) for ckpt in checkpoints):
        return None
    moments = (name for ckpt in checkpoints for name, tensor in ckpt.tensors.items() if tensor.volume > 1)
    stored = sum(ckpt.total_bytes for ckpt in checkpoints)
    unknown = [file.size for ckpt in checkpoints for file in ckpt.step_files if file.state == "unknown"]
    step = _step_folder(places[0])
    if not any(parse(name).kind == "optimizer" for name in moments) or sum(unknown) * _MINOR > stored or step is None:
        return None
    with suppress(CkptlintError):
        if has_twin(step):
            return None
        lost, holder = _model_of_older(step, places)
        what = f": {join_words(lost)} {'is' if len(lost) == 1 else 'are'} missing, which {holder} has" if lost else ""
        sentence = f"{printable(step.name)} holds an optimizer and no model{what}"
        why = "a resume has moments and no weights to go on from"
        hint = other_step(step) or "copy the weights of this step from where they were written"
        file = lost[0] if lost else places[0].folder.name
        return Problem("incomplete", file, sentence, why=why, hint=hint, outside_checkpoint=True)
    return None


def _step_folder(place: CheckpointPlace) -> Folder | None:
    """The folder of the step that a checkpoint is in; None where it is one file."""
    folder: Folder | None = place.folder
    for _ in range(_LEVELS):
        if folder is None or place.step is None or folder.display == place.step[0]:
            break
        folder = folder.parent
    return folder if folder is not None and not folder.is_one_file else None


def _model_of_older(step: Folder, places: Sequence[CheckpointPlace]) -> tuple[list[str], str]:
    """What the nearest older step of more checkpoints has besides, as paths in the step, and its name; ([], "")."""
    number, run = step_number(step.name), step.parent
    here = {place.folder.place.removeprefix(step.place).strip("/") for place in places}
    for older in islice(older_steps(run, step.name, number), _OLDER) if run is not None and number is not None else ():
        if step_state(older.folder) == "unfinished":
            continue
        start = older.folder.place
        there = {place.folder.place.removeprefix(start).strip("/") for place in find_checkpoints(older.folder, False)}
        if lost := sorted({_first_missing(step, place) for place in there - here} - {""}):
            return lost, printable(older.name)
    return [], ""


def _first_missing(step: Folder, place: str) -> str:
    """The first folder of a path below a step that is not there, or is empty; "" where all of it is there."""
    folder, passed = step, list[str]()
    for name in place.split("/"):
        passed.append(printable(name))
        below = folder_below(folder, [name])
        if below is None or not (below.entries or below.folders()):
            return "/".join(passed)
        folder = below
    return ""
