"""Opening a checkpoint: its layout's reader in a child process, and the files beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ckptlint.errors import AccessError, LimitError
from ckptlint.formats.pickles.safe_pickle import paused_gc
from ckptlint.loaders.layouts import CheckpointPlace, Layout
from ckptlint.loaders.layouts.incomplete import INCOMPLETE, unfinished
from ckptlint.loaders.layouts.unsupported import unread_beside
from ckptlint.loaders.problems import from_error
from ckptlint.loaders.readers.dcp.payload_files import file_table
from ckptlint.loaders.readers.vocabulary import with_vocabulary
from ckptlint.loaders.run.finished import is_unfinished_name, other_step, unfinished_marks
from ckptlint.loaders.run.folder import read_run, read_train_state
from ckptlint.loaders.run.step_files import folders_beside, with_step_files
from ckptlint.loaders.run.steps import components, steps_of, sub_folder
from ckptlint.model import Checkpoint, Problem, SaveTimes
from ckptlint.model.text import printable
from ckptlint.sandbox import isolated, one_budget
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import family_of
from ckptlint.vocabulary.metadata_files import METADATA

_COPY_WEIGHTS = "copy the weights from where they were written; if they are not there either, use another step"
_OF_SAFETY = ("unsafe", "unread", "limit")  # kinds of problems that count at every depth


@one_budget()
def open_checkpoint(place: CheckpointPlace, look_at_files: bool = True, is_judged: bool = True) -> Checkpoint:
    """Read one checkpoint that `find` returned, in a child process under limits; damage and malice become problems.

    Files are looked at for depth `files`. One that is judged is to be safe, also where its other files are not judged;
    one to compare with need not be. Raises AccessError where a read is refused or the place is not to be read, and
    ReaderError for a mistake of ckptlint's.
    """
    if place.refused:
        raise AccessError(place.refused)
    folder, looks_beside = place.folder, look_at_files or is_judged
    if looks_beside and place.reports_for:  # before a child reads the run around the step: it is listed once
        place = replace(place, reports_for=(*place.reports_for, *folders_beside(folder)))
    ckpt = _open(place, look_at_files)
    recognised = place.recognised
    title = recognised.layout.formats.get(ckpt.format, ckpt.format) if recognised else ckpt.format
    ckpt = replace(ckpt, title=title, times=_times(folder, ckpt))
    if ckpt.run is not None:
        ckpt = replace(ckpt, run=replace(ckpt.run, is_asked=place.of_run))
    if place.linked_to:
        sentence = f"{printable(folder.name)} is a link to {place.linked_to}, outside the run"
        note = Problem("note", ckpt.metadata_file, sentence, why="a cleanup or another save there changes this step")
        ckpt = replace(ckpt, problems=[*ckpt.problems, note])
    redirected = (folder.redirected,) if folder.redirected else ()
    ckpt = replace(ckpt, not_looked_at=(*ckpt.not_looked_at, *place.not_followed, *redirected), step=place.step)
    if not looks_beside:
        return ckpt
    if not look_at_files:
        unsafe = (problem for problem in with_step_files(place, ckpt).problems if problem.kind in _OF_SAFETY)
        return replace(ckpt, problems=list(dict.fromkeys([*ckpt.problems, *unsafe])))
    ckpt = with_step_files(place, with_vocabulary(folder, ckpt))
    if not any(file.optimizer for file in ckpt.step_files):
        return ckpt
    # the tensors in other models of a step have shapes too, such as the `2_Dense` of sentence-transformers
    subs = ((above, sub_folder(above, name)) for above in place.reports_for for name in above.folders())
    models = (sub for above, sub in subs if sub and sub.place in place.claimed and sub.place != above.place)
    opened = (_open(CheckpointPlace.at(model), False) for model in models)
    shapes = tuple(tensor.global_shape for model in opened for tensor in model.tensors.values())
    files = (
        replace(file, optimizer=replace(file.optimizer, shapes_beside=shapes)) if file.optimizer else file
        for file in ckpt.step_files
    )
    return replace(ckpt, step_files=tuple(files))


def _times(folder: Folder, ckpt: Checkpoint) -> SaveTimes:
    """Those of the payload files only where files of two saves may lie there."""
    entries = folder.entries
    finished = entries[METADATA].mtime if METADATA in entries else 0.0
    is_torn = 0 < finished < entries.newest_payload
    if not is_torn and ckpt.format not in ("dcp-safetensors", "dcp-per-rank"):
        return SaveTimes(folder.newest, metadata=finished)
    names = list(ckpt.files.names)
    at = entries.positions(names)
    times = np.where(at >= 0, entries.mtime[at], 0.0) if len(entries.mtime) else np.zeros(len(names))
    for row in np.flatnonzero(at < 0).tolist():
        entry = entries.others.get(names[row])
        times[row] = entry.mtime if entry is not None and not entry.is_link else 0.0  # a link has times of its own
    return SaveTimes(folder.newest, times, finished)


def _open(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    """Read a checkpoint in a child process; one that breaks a limit is a problem of the checkpoint."""
    recognised, folder = place.recognised, place.folder
    if recognised is None:
        return read_checkpoint(place, look_at_files)
    layout = recognised.layout
    try:
        with paused_gc():  # the answer is millions of objects too
            return isolated(partial(read_checkpoint, place, look_at_files), layout.input_bytes(folder))
    except LimitError as error:
        format_, label = "dcp", METADATA
        if layout.describes_itself:
            format_, label = next(iter(layout.formats)), recognised.evidence.file
        problems = [from_error(error, label, blocks=True, hint=other_step(folder))]
        files = file_table(folder)
        return Checkpoint(folder.display, format_, problems=problems, readable=False, files=files, metadata_file=label)


def read_checkpoint(place: CheckpointPlace, look_at_files: bool = True) -> Checkpoint:
    """The same in this process, where a crafted file may crash, starve or stall it."""
    recognised = place.recognised
    if recognised is None:
        if any(family and family.part == "optimizer" for family in map(family_of, place.folder.files())):
            why = "a resume has moments and no weights to go on from"
            ckpt = unfinished(place.folder, "the step's folder holds an optimizer and no model", "", why)
            ckpt = replace(ckpt, metadata_file="file of weights")
            return _with_surroundings(place.folder, INCOMPLETE._replace(restore={"incomplete": _COPY_WEIGHTS}), ckpt)
        what = "holds no checkpoint" if place.folder.entries else "is empty"
        return _with_surroundings(place.folder, INCOMPLETE, unfinished(place.folder, f"the step's folder {what}", ""))
    if is_unfinished_name(place.folder.name):  # what is not yet there is no fault of its own
        return replace(unfinished(place.folder, "", ""), problems=unfinished_marks(place.folder, blocks=True))
    with paused_gc():
        return _with_surroundings(place.folder, recognised.layout, recognised.layout.read(place, look_at_files))


def _with_surroundings(folder: Folder, layout: Layout, ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint with its run, the marks of its save, other formats beside it, and what to use instead of it."""
    problems = [*ckpt.problems]
    restore = "" if ckpt.readable else layout.restore.get(ckpt.format, "")
    if restore and any(problem.blocks and not problem.hint for problem in problems):
        hint = _instead(folder) or restore
        problems = [replace(p, hint=p.hint or hint) if p.blocks else p for p in problems]
    is_described = ckpt.readable or layout.describes_itself
    if layout.looks_around and (is_described or any(problem.kind == "unreadable" for problem in problems)):
        problems += unread_beside(folder)
    if not (layout.looks_around and is_described):
        return replace(ckpt, problems=problems)
    saved, state_problems = read_train_state(folder, layout.train_state)
    problems += unfinished_marks(folder) + state_problems
    if (run := read_run(folder)) is None:
        return replace(ckpt, problems=problems)
    unseen = (*ckpt.not_looked_at, run.not_looked_at) if run.not_looked_at else ckpt.not_looked_at
    return replace(ckpt, run=replace(run, saved=saved), problems=problems, not_looked_at=unseen)


def _instead(folder: Folder) -> str:
    """What to check instead, as advice: another step, or of a file by itself the folder around it; "" without one."""
    if not folder.is_one_file or folder.parent is None:
        return other_step(folder)
    whole, place = folder.parent.sub(folder.name), folder.display.removesuffix(folder.part).rstrip("/") or "."
    if steps_of(whole):
        return f"name the run folder, {place}, or one of the steps in it"
    return f"name the folder of the checkpoint, {place}" if components(whole) else ""
