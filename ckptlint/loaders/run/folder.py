"""The run folder around a step: which step its tracker names, and which of its steps were finished."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Literal, get_args

from ckptlint.errors import CkptlintError, UnreadableError
from ckptlint.formats.torch_file import number_in, ranges_of, read_torch_file
from ckptlint.loaders.layouts import CheckpointPlace, recognise
from ckptlint.loaders.problems import from_error, from_torch_file
from ckptlint.loaders.run.finished import step_state
from ckptlint.loaders.run.steps import alike_steps, checkpoints_in, folder_below, older_file, older_steps
from ckptlint.model import Problem, RunFolder, StepState
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import Holds, Tracker, is_part, step_number, steps_like, world

_UNSEEN = "ckptlint did not look at the other steps of its run and their tracker"

_LEVELS = 5  # folders between a part and its step: NeMo-RL's step_N/policy/weights/iter_0000000


def read_run(folder: Folder) -> RunFolder | None:
    """What is around a step folder, or around the step that the folder is a component of.

    None when no name on the way is that of a step. Where the run has a tracker the tracked step and the newest ones are
    looked into, down to the first that was finished.

    Source: megatron.training.checkpointing: `iter_%07d` and, written last, `latest_checkpointed_iteration.txt`; verl
    (b178a3cd) writes the same file beside `global_step_%d`; dlrover (7c3e9648) `dlrover_latest.txt`; DeepSpeed (0.19)
    `latest`, which holds the name of the folder
    """
    step_folder = _step_folder(folder)
    step = None if step_folder is None else step_number(step_folder.name)
    if step_folder is None or step is None:
        return None
    parent, like = step_folder.parent, steps_like(step_folder.name)
    prefix, tracked_always = (like[0], like[1].tracked) if like else ("", False)
    number = step_folder.name[len(prefix) :]
    digits = (like[1].digits or (len(number) if number.startswith("0") else 0)) if like else 0
    alone = RunFolder(step, (step,), prefix=prefix, digits=digits)
    if parent is None:
        return replace(alone, steps=(), not_looked_at=_UNSEEN if tracked_always else "")
    try:
        steps = {older.number: older.name for older in alike_steps(parent, step_folder.name)}
        file, tracker = read_tracker(parent) if prefix else (None, None)
        alone = replace(alone, steps=tuple(sorted(steps)))
        if file is None and not tracked_always:
            return alone
        newest = next((n for n in sorted(steps, reverse=True) if step_state(parent.sub(steps[n])) == "complete"), None)
        tracked: StepState = "unknown"
        if tracker == "release":
            tracked = step_state(parent.sub("release")) if "release" in parent.folders() else "absent"
        elif tracker is not None:
            tracked = step_state(parent.sub(steps[tracker])) if tracker in steps else "absent"
    except CkptlintError as error:
        return replace(alone, steps=(), not_looked_at=f"{_UNSEEN}: {error}")
    file = file or trackers()[0]
    alone = replace(alone, tracker_file=file.file, holds=file.holds)
    return replace(alone, newest_complete=newest, tracker=tracker, tracked=tracked)


def _step_folder(folder: Folder) -> Folder | None:
    """The step that a folder is, or is in as a part; a number alone may be a year."""
    step: Folder | None = None
    for level in range(_LEVELS):
        if is_named_step(folder.name):
            like = steps_like(folder.name)
            is_step = like is None or not like[1].tracked or len(folder.name) >= len(like[0]) + like[1].digits
            if step is not None or not is_step:
                return folder if is_step else step
            step = folder
        elif not is_part(folder.name) or level == _LEVELS - 1:
            return step
        above = folder.parent
        if above is None or (step is folder and not is_part(above.name)):
            return step
        folder = above
    return step


def step_before(folder: Folder) -> CheckpointPlace | None:
    """The same part in the nearest older finished step of the run; None without one.

    Only steps that are named alike count, and links out of the run lead nowhere.
    """
    if folder.is_one_file:
        whole = folder if folder.parent is None else folder.parent.sub(folder.name)  # a view hides the others
        name = older_file(whole, folder.part)
        return CheckpointPlace(whole.only(name)) if name else None
    inner: list[str] = []
    step = folder
    while step_number(step.name) is None:
        above = step.parent
        if above is None or len(inner) == _LEVELS or not is_part(step.name):
            return None
        inner.insert(0, step.name)
        step = above
    number, run = step_number(step.name), step.parent
    if run is None or number is None:
        return None
    with suppress(CkptlintError):
        for older in older_steps(run, step.name, number):
            there = run.sub(older.name)
            place = None if step_state(there) == "unfinished" else folder_below(there, inner)
            for part in checkpoints_in(place) if place is not None else ():
                if part.folder.part == folder.part:
                    return part
    return None


def is_of_a_run(folder: Folder) -> bool:
    """Whether a folder is a step, or holds steps, payload or a tracker; one that cannot be listed counts as such."""
    try:
        return (
            is_named_step(folder.name)
            or recognise(folder) is not None
            or any(folder.has(tracker.file) for tracker in trackers())
            or any(_is_step(folder, name) for name in folder.folders())
        )
    except CkptlintError:
        return True


def is_named_step(name: str) -> bool:
    """Whether a name is that of a step, and more than a number."""
    return step_number(name) is not None and not name.isdecimal()


def _is_step(folder: Folder, name: str) -> bool:
    """Whether a folder is named like a step, and holds a checkpoint if by a number alone, which may be a year."""
    return step_number(name) is not None and (not name.isdecimal() or recognise(folder.sub(name)) is not None)


def trackers() -> list[Tracker]:
    """The files that name a step, those that hold a number first."""
    return sorted(world().trackers, key=lambda tracker: get_args(Holds).index(tracker.holds))


def read_tracker(parent: Folder) -> tuple[Tracker | None, int | Literal["release"] | None]:
    """The tracker, and the step that it names; None for either where there is none."""
    return next(((tracker, number) for tracker, number, _ in read_trackers(parent)), (None, None))


def read_trackers(parent: Folder) -> Iterator[tuple[Tracker, int | Literal["release"] | None, str]]:
    """Each tracker that is there, the step that it names, None where it names none, and what it says as a text."""
    for tracker in trackers():
        name = tracker.file
        if tracker.holds == "link":
            target = PurePath(parent.target(name)).name
            if (number := step_number(target)) is not None:
                yield tracker, number, target
        elif parent.has(name) and tracker.holds == "train state":
            yield tracker, read_train_state(parent, name)[0], ""
        elif parent.has(name):
            text = parent.short_text(name)
            number = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
            number = step_number(text) if tracker.holds == "folder" else number
            yield tracker, "release" if text == "release" else number, text


def read_train_state(folder: Folder, name: str) -> tuple[int | None, list[Problem]]:
    """The step that a train state holds, None where there is none, and what stood in the way of reading it.

    Source: megatron.bridge.training.state.TrainState.state_dict: `step` as an int32 tensor without axes
    """
    if not folder.has(name):
        return None, []
    try:
        torch_file = read_torch_file(folder, name)
    except UnreadableError as error:
        return None, [from_error(error, name)]
    value = torch_file.root.get("step") if isinstance(torch_file.root, dict) else None
    return number_in(ranges_of(folder, name), torch_file, value), from_torch_file(torch_file, name)
