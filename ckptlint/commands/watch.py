"""The steps of a running job: which one is finished, which one was left behind (`ckptlint watch`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ckptlint.errors import CkptlintError, NothingToCheckError
from ckptlint.formats.sandbox import isolated
from ckptlint.loaders.discover import components, find_checkpoints, step_number
from ckptlint.loaders.run_folder import read_tracker, step_state
from ckptlint.storage.folder import Folder
from ckptlint.storage.locate import folder_at
from ckptlint.storage.paths import shown

_LEVELS = 3  # a step, its components, theirs (verl)

Sizes = dict[str, tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Event:
    """Something to act on.

    Attributes:
        kind: a step is `finished`; a later one finished and it stays `unfinished`; it, or the run, is `unread`.
        step: the name of the step's folder, "" for the run itself.
        text: what happened, as a sentence; "" for a finished step.
        files: the files of the step at the last look.
    """

    kind: Literal["finished", "unfinished", "unread"]
    step: str = ""
    text: str = ""
    files: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Memory:
    """What a watch remembers: the sizes of the last look, and the steps that were handed out."""

    sizes: dict[str, Sizes] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    left_behind: set[str] = field(default_factory=set)
    trouble: dict[str, str] = field(default_factory=dict)

    def told(self, step: str, error: CkptlintError) -> list[Event]:
        """The error as an event, unless it was the last one there: a store that is away for an hour is one message."""
        if self.trouble.get(step) == str(error):
            return []
        self.trouble[step] = str(error)
        return [Event("unread", step, str(error))]


def events(
    path: str, interval: float, once: bool = False, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """Each finished step once, oldest first, and the steps that later ones left behind; without end unless `once`.

    A step is finished when what is written last is there and its files did not change between two looks, one interval
    apart: `.metadata`; for Megatron `metadata.json` and the tracker too, where the run has one. A step that vanishes is
    forgotten: one of the same name is a new one.

    Args:
        interval: seconds between two looks.
        once: look twice, tell what is there, and end.

    Raises:
        NothingToCheckError: the path is no folder, or is a checkpoint itself.
        AccessError: the first look was refused.
    """
    memory = _Memory()
    yield from _look(path, memory)
    while True:
        sleep(interval)
        try:
            yield from _look(path, memory)
            memory.trouble.pop("", None)
        except CkptlintError as error:
            yield from memory.told("", error)
        if once:
            return


def _look(path: str, memory: _Memory) -> list[Event]:
    run = _run_folder(path)
    steps = sorted((number, name) for name in run.folders() if (number := step_number(name)) is not None)
    names = [name for _, name in steps]
    for gone in {*memory.sizes, *memory.trouble} - {"", *names}:
        memory.sizes.pop(gone, None)
        memory.trouble.pop(gone, None)
        memory.finished.discard(gone)
        memory.left_behind.discard(gone)
    _, tracker = isolated(partial(read_tracker, run), 0)  # one of them is a pickle
    still: set[str] = set()
    found: list[Event] = []
    for number, name in steps:
        if name in memory.finished:
            continue
        try:
            sizes = dict(_sizes(run.sub(name)))
            if memory.sizes.get(name) == sizes:
                still.add(name)
                if _is_finished(run.sub(name), number, tracker):
                    found.append(Event("finished", name, files=frozenset(sizes)))
            memory.sizes[name] = sizes
            memory.trouble.pop(name, None)
        except NothingToCheckError:  # it vanished meanwhile
            continue
        except CkptlintError as error:
            found += memory.told(name, error)
    memory.finished |= {event.step for event in found if event.kind == "finished"}
    newest = max((i for i, name in enumerate(names) if name in memory.finished), default=0)
    for name in names[:newest]:
        if name in still - memory.finished - memory.left_behind:
            memory.left_behind.add(name)
            text = f"{name} stays unfinished, and {names[newest]} is finished"
            found.append(Event("unfinished", name, text, frozenset(memory.sizes[name])))
    return sorted(found, key=lambda event: names.index(event.step))


def is_vanishing(path: str, event: Event) -> bool:
    """Whether a file of a step that was there at the last look is gone: what was read of it does not count."""
    try:
        return not event.files <= dict(_sizes(folder_at(path)[0])).keys()
    except CkptlintError:
        return True


def _run_folder(path: str) -> Folder:
    """The run folder, listed anew."""
    run, file = folder_at(path)
    if file:
        raise NothingToCheckError(f"{shown(path)} is a file: watch takes a run folder")
    if not any(step_number(name) is not None for name in run.folders()) and components(run):
        raise NothingToCheckError(f"{shown(path)} is a checkpoint: watch takes the run folder around its steps")
    return run


def _sizes(folder: Folder, levels: int = _LEVELS, prefix: str = "") -> Iterator[tuple[str, tuple[int, float]]]:
    """Size and time of every file in a step."""
    for name, entry in folder.entries.items():
        if not entry.is_folder:
            yield prefix + name, (entry.size, entry.mtime)
        elif levels > 1:
            yield from _sizes(folder.sub(name), levels - 1, f"{prefix}{name}/")


def _is_finished(step: Folder, number: int, tracker: int | Literal["release"] | None) -> bool:
    """Whether everything that is written last is there; formats without such a mark only need a checkpoint."""
    state = step_state(step)
    if state == "unknown":
        try:
            find_checkpoints(step, all_steps=False)
        except NothingToCheckError:
            return False
        return True
    return state == "complete" and (not isinstance(tracker, int) or number <= tracker)
