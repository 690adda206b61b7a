"""A run on one screen: find, open, judge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ckptlint.depth import Depth
from ckptlint.errors import AccessError, CkptlintError, ConfigError, NothingToCheckError, ReaderError
from ckptlint.formats.pickles.names import call_table
from ckptlint.lint.engine import run_rules
from ckptlint.lint.report import CheckpointReport, Report
from ckptlint.lint.settings.ignores import apply_baseline, read_baseline, set_aside
from ckptlint.lint.settings.request import Request
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.loaders.run.folder import step_before
from ckptlint.loaders.step_parts import lost_model
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.progress import counted
from ckptlint.rule import Severity
from ckptlint.sandbox import one_budget, prefetch
from ckptlint.storage.paths import is_url, shown

if TYPE_CHECKING:
    from ckptlint.payload.reading import ReadOptions


Opened = tuple[CheckpointPlace, Checkpoint | CkptlintError]
"""A checkpoint that a path means and what is in it, or why it could not be read."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C among several checkpoints, with a sentence that says how many are finished, and the report on those."""

    def __init__(self, sentence: str, report: Report) -> None:
        super().__init__(sentence)
        self.report = report


Opener = Callable[[str, bool, Depth, "ReadOptions | None"], Iterator[Opened]]


def opened(
    path: str,
    all_steps: bool,
    depth: Depth,
    reading: ReadOptions | None,
    jobs: int | None = None,
    seen: dict[str, CheckpointPlace] | None = None,
    before: str | None = None,
    more: int = 0,
) -> Iterator[Opened]:
    """Each checkpoint under a path; with the first one of a step what the whole step lacks.

    Args:
        jobs: checkpoints that are read at once, in processes of their own; one per processor by default, 8 at most.
        seen: the checkpoints that other paths brought, to which those of this one are added. A path that names a file
            brings none of them again: pre-commit names every changed file of a checkpoint.
        before: the step to compare each with; the one before it in its run, if nobody says.
        more: paths that come after this one, each of which counts as a checkpoint in the progress.

    Raises:
        NothingToCheckError, AccessError: as `find`.
        ConfigError: `before` cannot be compared with.
    """
    every = find(path, all_steps)
    done = len(seen or ())
    if seen is not None:
        if not is_url(path) and not Path(path.removeprefix("file://")).is_dir():
            every = [place for place in every if place.display not in seen]
        seen.update((place.display, place) for place in every)
    reads = _all_read(every, depth, reading, jobs or min(8, os.cpu_count() or 1)) if every else iter(())
    reads = counted("checkpoints", reads, done + len(every) + more, done)
    named = None if before is None else _of_named_step(before, path, every)
    for step, of_step in groupby(_with_steps_before(every, reads, reading, named), key=lambda item: item[0].step):
        members = list(of_step)
        checkpoints = [ckpt for _, ckpt in members if isinstance(ckpt, Checkpoint)]
        places, problem = [place for place, _ in members], None
        if step is not None and depth.looks_at_files and len(checkpoints) == len(members):
            problem = lost_model(places, checkpoints)
        if problem is not None:
            problems = [[item for item in ckpt.problems if not item.of_empty_part] for ckpt in checkpoints]
            problems[0].append(problem)
            with_problem = map(lambda ckpt, items: replace(ckpt, problems=items), checkpoints, problems)
            members = list(zip(places, with_problem, strict=True))
        yield from members


def _of_named_step(before: str, path: str, every: Sequence[CheckpointPlace]) -> dict[str, CheckpointPlace]:
    """Checkpoint of the step at a path -> the same part of the step that the user named to compare with.

    Raises ConfigError where that one cannot be found, is what is checked, or has none of these parts.
    """
    try:
        named = find(before)
    except CkptlintError as error:
        raise ConfigError(f"{shown(before)} cannot be compared with: {error}") from None
    if {place.folder.display for place in every} & {place.folder.display for place in named}:
        raise ConfigError(f"--before names {shown(before)}, which is what is checked: name an older step")
    if len(every) == len(named) == 1:
        return {every[0].display: named[0]}
    by_part = {_part_of_step(place, before): place for place in named}
    pairs = {place.display: by_part.get(_part_of_step(place, path)) for place in every}
    same = {checked: older for checked, older in pairs.items() if older is not None}
    if not same:
        raise ConfigError(f"{shown(before)} cannot be compared with: name the same part of a step as is checked")
    return same


def _part_of_step(place: CheckpointPlace, path: str) -> str:
    """The path of a checkpoint in the step that it belongs to; without a number, that is the path of the user."""
    return place.display.removeprefix(place.step[0] if place.step else shown(path)).strip("/")


def _with_steps_before(
    every: list[CheckpointPlace],
    reads: Iterator[Checkpoint | CkptlintError],
    reading: ReadOptions | None,
    named: Mapping[str, CheckpointPlace] | None,
) -> Iterator[Opened]:
    """Each checkpoint with the step before it.

    Of a step whose older neighbour is not asked for, the neighbour's metadata alone is read; with its files where a
    file of the step counts as another one, which may have stood still since; and with the headers of its records where
    those of the step are read from a local disk, or drawn from, to compare their elements.
    """
    asked = {place.display for place in every}
    waiting: list[tuple[CheckpointPlace, Checkpoint | CkptlintError, CheckpointPlace | None]] = []
    read: dict[str, Checkpoint | CkptlintError] = {}
    for place in every:
        read[place.display] = ckpt = next(reads)
        older = None
        if isinstance(ckpt, Checkpoint) and ckpt.readable:
            older = step_before(place.folder) if named is None else named.get(place.display)
        if older is not None and older.display not in asked:
            assert isinstance(ckpt, Checkpoint)
            least, headers, run = Depth.METADATA, None, ckpt.run
            if run is not None and any(file.step in run.steps and file.step != run.step for file in ckpt.step_files):
                least = Depth.FILES
            if reading is not None and reading.percent is None and (reading.draws or older.folder.is_near):
                least, headers = Depth.HEADERS, replace(reading, depth=Depth.HEADERS, digests={}, rows=(), sums=None)
            read[older.display] = _read(older, least, headers, ckpt)
        waiting.append((place, ckpt, older))
        while waiting and (waiting[0][2] is None or waiting[0][2].display in read):
            place, ckpt, older = waiting.pop(0)
            before = None if older is None else read[older.display]
            if named is not None and isinstance(ckpt, Checkpoint) and ckpt.readable:
                ckpt = _checked_named(ckpt, before)
            if isinstance(ckpt, Checkpoint) and isinstance(before, Checkpoint) and before.readable:
                # an export beside the saves of a run has names of its own
                ckpt = replace(ckpt, before=before if before.format == ckpt.format else None)
                if reading is not None and older is not None:
                    from ckptlint.lint.reading import with_changes

                    ckpt = with_changes(place.folder, ckpt, older.folder, reading)
            yield place, ckpt


def _checked_named(ckpt: Checkpoint, before: Checkpoint | CkptlintError | None) -> Checkpoint:
    """The checkpoint, with a sentence where the named step lacks its part; raises ConfigError where they do not fit."""
    if before is None:
        sentence = f"{ckpt.path} was not compared: the step of --before has no such part"
        return replace(ckpt, not_looked_at=(*ckpt.not_looked_at, sentence))
    if isinstance(before, CkptlintError):
        why = str(before)
    elif not before.readable:
        why = next((problem.message for problem in before.problems if problem.blocks), "it is not readable")
    elif before.format != ckpt.format:
        why = f"it is {before.format}, and {ckpt.path} is {ckpt.format}"
    else:
        return ckpt
    raise ConfigError(f"the step of --before cannot be compared with: {why}")


def _all_read(
    every: Sequence[CheckpointPlace], depth: Depth, reading: ReadOptions | None, jobs: int
) -> Iterator[Checkpoint | CkptlintError]:
    """What is in each place, in their order; metadata is read ahead, by several processes."""
    if len(every) == 1 or jobs == 1 or (reading is not None and not reading.draws):
        yield from (_read(place, depth, reading) for place in every)
        return
    metadata = prefetch([partial(_read, place, depth, None) for place in every], jobs)
    for place, ckpt in zip(every, metadata, strict=True):
        yield _with_records(place, ckpt, reading) if isinstance(ckpt, Checkpoint) else ckpt


@one_budget()
def _read(
    place: CheckpointPlace, depth: Depth, reading: ReadOptions | None, after: Checkpoint | None = None
) -> Checkpoint | CkptlintError:
    try:
        if place.recognised is not None and place.recognised.kind != "safetensors":
            call_table()  # each child that reads pickles would read it anew
        # an archive has its metadata at its end
        place.folder.is_read_whole = reading is not None and reading.reads_whole
        return _with_records(place, open_checkpoint(place, depth.looks_at_files, after is None), reading, after)
    except CkptlintError as error:
        return error


def _with_records(
    place: CheckpointPlace, ckpt: Checkpoint, reading: ReadOptions | None, after: Checkpoint | None = None
) -> Checkpoint | CkptlintError:
    if reading is None or not ckpt.readable:
        return ckpt
    from ckptlint.lint.reading import read_records

    try:
        return read_records(place.folder, ckpt, reading, after)
    except CkptlintError as error:
        return error


def run(request: Request, source: Opener | None = None) -> Report:
    """Judge every checkpoint under the paths; what could not be found or read is part of the report.

    Args:
        source: reads what is under a path otherwise than `opened` does, which it is called like.

    Raises:
        ConfigError: the reference, the step before or the baseline cannot be used.
        Interrupted: Ctrl-C, after the first of several checkpoints.
    """
    started = time.perf_counter()
    rules, depth, reading, reference = request.rules, request.depth, request.reading, None
    if request.expect is not None:
        from ckptlint.loaders.reference import read_reference

        reference = read_reference(request.expect)
        if reference.values and reading is not None:
            from ckptlint.payload.reading import with_reference

            reading = with_reference(reading, reference)
    hidden = {} if request.baseline is None else read_baseline(request.baseline)
    parts: list[CheckpointReport] = []
    not_found: list[str] = []
    unreadable: list[str] = []
    unread_steps: list[tuple[str, int, str]] = []
    seen = dict[str, CheckpointPlace]()
    handled, stop = 0, ""
    for more, path in zip(reversed(range(len(request.paths))), request.paths, strict=True):
        read = source or partial(opened, jobs=request.jobs, seen=seen, before=request.before, more=more)
        try:
            for opened_place, ckpt in read(path, request.all_steps, depth, reading):
                if isinstance(ckpt, Checkpoint):
                    if reference is not None:
                        unseen = (*ckpt.not_looked_at, *filter(None, [reference.not_looked_at]))
                        ckpt = replace(ckpt, reference=reference.part(opened_place.folder.name), not_looked_at=unseen)
                    deepest = depth if ckpt.payload is None else ckpt.payload.depth  # where numbers were drawn
                    parts.append(run_rules(ckpt, rules, deepest))
                else:
                    (not_found if isinstance(ckpt, NothingToCheckError) else unreadable).append(_sentence(path, ckpt))
                    unread_steps += [(*opened_place.step, _sentence(path, ckpt))] if opened_place.step else []
                handled += 1
        except NothingToCheckError as error:
            not_found.append(str(error))
        except (AccessError, ReaderError) as error:
            unreadable.append(_sentence(path, error))
        except KeyboardInterrupt as error:
            total = max(len(seen), handled + 1) + more
            stop = f"interrupted: {len(parts):,} of {plural(total, 'checkpoint')} checked"
            if source is not None or not parts or total == 1:
                raise KeyboardInterrupt(*(error.args or [stop] * (total > 1))) from None
            # steps come newest first: that the next one was not checked is all that the advice on a step must know
            unread_steps += [(*place.step, stop) for place in [*seen.values()][handled : handled + 1] if place.step]
            break
    _advise(parts, [step[:2] for step in unread_steps])
    judging = tuple(rule for rule in rules if (reference is not None or not rule.expects) and not rule.live)
    parts = set_aside(parts, rules, request.ignores, is_whole=not (not_found or unreadable or stop))
    parts, solved = apply_baseline(parts, rules, hidden)
    if any(part.diagnostics for part in parts):
        from ckptlint.lint.causes import with_causes

        parts = [with_causes(part) for part in parts]
    report = Report(
        parts,
        judging,
        depth,
        request.fail_on,
        tuple(not_found),
        (*unreadable, *filter(None, [stop])),
        tuple(unread_steps),
        request.lenient,
        time.perf_counter() - started,
        () if stop else solved,
        shown(request.settings),
    )
    if stop:
        failed = sum(any(map(report.is_failing, part.diagnostics)) for part in parts)
        raise Interrupted(f"{stop}, {failed or 'none'} failed", report)
    return report


def _advise(parts: Sequence[CheckpointReport], unread: Collection[tuple[str, int]]) -> None:
    """Let no hint tell to resume from a step that has an error or could not be read."""
    steps = [part.checkpoint.step or part.checkpoint.path for part in parts]
    errors = [any(item.severity >= Severity.ERROR and not item.finding.of_run for item in p.diagnostics) for p in parts]
    damaged = {*unread, *compress(steps, errors)}
    for part in compress(parts, [step in damaged for step in steps]):
        for row, item in enumerate(part.diagnostics):
            if hint := item.finding.hint_if_damaged:
                part.diagnostics[row] = replace(item, finding=replace(item.finding, hint=hint))


def _sentence(path: str, error: CkptlintError) -> str:
    if isinstance(error, ReaderError):
        return f"{shown(path)} could not be read because of a bug in ckptlint, please report it: {error}"
    return str(error)
