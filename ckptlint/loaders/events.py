"""The steps of a running job, each reported once: when it is finished, or when it stays unfinished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Literal

from ckptlint.errors import AccessError, CkptlintError, NothingToCheckError
from ckptlint.loaders.discover import find_checkpoints
from ckptlint.loaders.run.finished import step_state
from ckptlint.loaders.run.folder import read_tracker
from ckptlint.loaders.run.steps import Step, components, not_followed, steps_of, sub_folder
from ckptlint.model.text import human_duration, printable
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import steps_like
from ckptlint.vocabulary.metadata_files import METADATA

_LEVELS = 3  # a step, its components, theirs (verl)


@dataclass(frozen=True, slots=True)
class Event:
    """Something to act on: of a step, or of the run itself ("", None), in a sentence, "" for a finished step.

    `files` are those of the step at the last look.
    """

    kind: Literal["finished", "unfinished", "writing", "unread"]
    step: str = ""
    number: int | None = None
    text: str = ""
    files: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Memory:
    """What a watch remembers: the sizes of the last look and since when they are so, and the steps handed out.

    `latest` is the latest time of any file or folder that was looked at, infinity where the store does not say.
    """

    since: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    left_behind: set[str] = field(default_factory=set)
    trouble: dict[str, str] = field(default_factory=dict)
    latest: float = 0.0

    def note_trouble(self, step: str, number: int | None, error: CkptlintError) -> list[Event]:
        """The error as an event, unless it was the last one there: a store that is away for an hour is one message."""
        if self.trouble.get(step) == str(error):
            return []
        self.trouble[step] = str(error)
        return [Event("unread", step, number, str(error))]

    def quiet(self, step: str, folder: float) -> float:
        """Seconds without a change in a step whose folder is of this time: as the watch saw it, or as times say."""
        now, written = time.time(), max([folder, *(at for _, at in self.sizes[step].values())])
        return max(now - self.since[step], now - written if written else 0.0)


def events(
    open_run: Callable[[], Folder],
    interval: float,
    once: bool = False,
    stale: float = inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Each finished step once, oldest first, and each that stays unfinished once; without end unless `once`.

    A step is finished when what is written last is there and its files did not change between two looks, one interval
    apart: `.metadata`; for Megatron `metadata.json` and the tracker too, where the run has one. A job writes the
    tracker last, so it is asked of the newest step alone, until that was silent for `stale`: it may have been set back.
    A step that vanishes is forgotten: one of the same name is a new one. Raises NothingToCheckError for a folder that
    is a checkpoint itself, and AccessError where the first look is refused.

    Args:
        open_run: the run folder, not listed yet; called for each look.
        interval: seconds between two looks.
        once: look twice, tell what is there, steps that a job may still be writing too, and end; no time passes between
            where all files and folders are older than an interval. A mark that the save is complete would not do: other
            ranks, or a copy, may still write.
        stale: seconds without a change after which an unfinished step is reported, whether or not a later one finished.
    """
    memory = _Memory()
    yield from _look(open_run(), memory, stale)
    while True:
        if not once or memory.latest > time.time() - interval:
            sleep(interval)
        try:
            yield from _look(open_run(), memory, stale, once)
            memory.trouble.pop("", None)
        except CkptlintError as error:
            yield from memory.note_trouble("", None, error)
        if once:
            return


def _look(run: Folder, memory: _Memory, stale: float, is_last: bool = False) -> list[Event]:
    """What happened in a run since the last look: steps that finished, stalled, vanished or are in trouble."""
    numbers = {step.name: step.number for step in reversed(steps_in_run(run))}
    names = [*numbers]
    for gone in {*memory.sizes, *memory.trouble} - {"", *names}:
        memory.sizes.pop(gone, None)
        memory.since.pop(gone, None)
        memory.trouble.pop(gone, None)
        memory.finished.discard(gone)
        memory.left_behind.discard(gone)
    _, tracker = isolated(partial(read_tracker, run), 0)  # one of them is a pickle
    still: set[str] = set()
    news: list[Event] = []
    for name, number in numbers.items():
        if name in memory.finished:
            continue
        try:
            step = _view(run, name)
            if step is None:
                raise AccessError(not_followed(run, name))
            sizes = dict(_sizes(step))
            times = [run.entries[name].mtime, *(written for _, written in sizes.values())]
            memory.latest = max(memory.latest, *(written or inf for written in times))
            if memory.sizes.get(name) == sizes:
                still.add(name)
                is_fresh = name == names[-1] and memory.quiet(name, run.entries[name].mtime) < stale
                if is_finished(step, number, tracker if is_fresh else None):
                    news.append(Event("finished", name, number, files=frozenset(sizes)))
            else:
                memory.since[name] = time.time()
            memory.sizes[name] = sizes
            memory.trouble.pop(name, None)
        except NothingToCheckError:  # it vanished meanwhile
            continue
        except CkptlintError as error:
            news += memory.note_trouble(name, number, error)
    memory.finished |= {event.step for event in news if event.kind == "finished"}
    newest = max((i for i, name in enumerate(names) if name in memory.finished), default=0)
    for place, name in enumerate(names):
        if name not in still - memory.finished - memory.left_behind:
            continue
        quiet = memory.quiet(name, run.entries[name].mtime)
        if place < newest:
            text = f"{name} is still unfinished, and {names[newest]} is finished"
        elif quiet >= stale:
            text = f"{name} is still unfinished: nothing in it has changed for {human_duration(quiet)}"
        else:
            continue
        memory.left_behind.add(name)
        news.append(Event("unfinished", name, numbers[name], text, frozenset(memory.sizes[name])))
    reported = memory.finished | memory.left_behind | {*memory.trouble}
    for name in (name for name in names if is_last and name not in reported):
        news.append(Event("writing", name, numbers[name], f"{name} is not finished yet: it was not checked"))
    return sorted(news, key=lambda event: names.index(event.step))


def is_vanishing(open_run: Callable[[], Folder], event: Event) -> bool:
    """Whether a file of a step that was there at the last look is gone: what was read of it does not count."""
    try:
        step = _view(open_run(), event.step)
        return step is None or not event.files <= dict(_sizes(step)).keys()
    except CkptlintError:
        return True


def _view(run: Folder, name: str) -> Folder | None:
    """A step, which may be one file; None for a link that is not followed."""
    return run.only(name) if run.has(name) else sub_folder(run, name)


def steps_in_run(run: Folder) -> list[Step]:
    """As `steps_of`; raises NothingToCheckError for a folder that is a checkpoint and not a run."""
    steps = steps_of(run)
    if not any(step.is_folder for step in steps) and components(run):
        raise NothingToCheckError(f"{printable(run.display)} is a checkpoint: name the run folder that holds the steps")
    return steps


def _sizes(folder: Folder, levels: int = _LEVELS, prefix: str = "") -> Iterator[tuple[str, tuple[int, float]]]:
    """Size and time of every file and folder in a step."""
    for name, entry in folder.entries.items():
        yield prefix + name, (entry.size, entry.mtime)
        if entry.is_folder and levels > 1 and (sub := sub_folder(folder, name)) is not None:
            yield from _sizes(sub, levels - 1, f"{prefix}{name}/")


def is_finished(step: Folder, number: int, tracker: int | Literal["release"] | None) -> bool:
    """Whether everything that is written last is there; formats without such a mark only need a checkpoint."""
    state = step_state(step)
    if state == "unknown":
        try:
            return any(place.recognised for place in find_checkpoints(step, all_steps=False))
        except NothingToCheckError:
            return False
    like = steps_like(step.name)
    ends_itself = step.has(METADATA) and not (like and like[1].tracked)  # no tracker is written after it
    return state == "complete" and (ends_itself or not isinstance(tracker, int) or number <= tracker)
