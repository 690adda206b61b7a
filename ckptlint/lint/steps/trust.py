"""Which step of a run to trust: what the report says of each, and the newest that passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, Literal, TypeVar

from ckptlint.depth import Depth
from ckptlint.errors import AccessError, CkptlintError, ConfigError, NothingToCheckError, UnknownLayoutError
from ckptlint.lint.report import CheckpointReport, Diagnostic, Report
from ckptlint.lint.settings.request import Request
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find, find_checkpoints
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.loaders.readers.dcp.payload_files import file_table
from ckptlint.loaders.run.finished import lacking_files, step_state
from ckptlint.loaders.run.folder import read_tracker
from ckptlint.loaders.run.steps import Step, is_alike, is_followed, newness, run_at, runs_below, steps_of
from ckptlint.loaders.step_parts import parts_of
from ckptlint.model import Checkpoint
from ckptlint.model.checkpoint import UNFINISHED, ProblemKind
from ckptlint.model.text import human_duration, join_words, plural, printable
from ckptlint.progress import counted, telling_ctrl_c
from ckptlint.rule import Severity
from ckptlint.sandbox import isolated, prefetch
from ckptlint.shown import Shown
from ckptlint.storage.folder import Folder
from ckptlint.storage.locate import listed_once
from ckptlint.storage.paths import shown
from ckptlint.vocabulary.frameworks import family_of, step_number, steps_like
from ckptlint.vocabulary.parts import PARTS, not_stored, part_of_file

StepVerdict = Literal["passes", "fails", "unfinished", "lacks parts", "not judged", "gone"]
"""`not judged`: it may be sound, and could not be read or judged as a whole; `gone`: it vanished meanwhile."""

Judge = Callable[[str], Report]
"""What gives the report on the checkpoint at a path."""

_DOUBTFUL: tuple[ProblemKind, ...] = ("unsupported", "limit")  # they say nothing about the checkpoint itself

LEVELS = 32
"""Folders below a step or beside the steps that are looked into; deeper ones are a doubt."""

_FEW = 8  # most searches end with one of them
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """What became of one step.

    Attributes:
        number: the step that its name carries.
        name: of its folder, printable.
        path: as the user would name it.
        why: what is wrong, one sentence; "" where it passes.
        code: of the first finding, "" without one.
        parts: what it holds of `vocabulary.parts.PARTS`.
        size: bytes of its payload.
        written: when its newest file was written, seconds since the epoch; 0 where the store does not say.
        warnings: what is odd about it and does not fail it, a code and a sentence each.
        hidden: the errors that an ignore or a baseline hides, as words; "" without one. No such step is recommended.
    """

    number: int
    name: str
    path: str
    verdict: StepVerdict
    why: str = ""
    code: str = ""
    parts: tuple[str, ...] = ()
    size: int = 0
    written: float = 0.0
    warnings: tuple[str, ...] = ()
    hidden: str = ""

    def as_unfinished(self, why: str) -> JudgedStep:
        """The same step, whose save never finished."""
        return replace(self, verdict="unfinished", code=UNFINISHED, why=why)

    def row(self) -> dict[str, Any]:
        """What became of it, as a row of a table."""
        return {"step": self.name, "path": self.path, "verdict": self.verdict, "why": self.why, "bytes": self.size}


@dataclass(frozen=True, slots=True, repr=False)
class Search(Shown):
    """The outcome of a search for the newest good step of one run.

    Attributes:
        run: the folder of the run, as the user would name it.
        newest: the newest step that passes, None without one.
        skipped: the newer ones, the newest first.
        tracker: what to do where the run's tracker names another step, as a sentence; "" otherwise.
    """

    run: str
    newest: JudgedStep | None = None
    skipped: list[JudgedStep] = field(default_factory=list)
    tracker: str = ""

    def __repr__(self) -> str:
        answer = f"{self.newest.name} passes" if self.newest else "no step passes"
        return f"<Search {shown(self.run)}: {answer}, {len(self.skipped)} skipped>"

    @property
    def path(self) -> str | None:
        """Where the step lies from which to resume; None where none passes, or a newer one might."""
        return self.newest.path if self.newest is not None and self.is_certain else None

    def rows(self) -> list[dict[str, Any]]:
        """A row for each step that was judged, the newest first: name, path, verdict and why, bytes."""
        return [step.row() for step in [*self.skipped, *([self.newest] if self.newest else [])]]

    @property
    def is_certain(self) -> bool:
        """Whether no newer step could be the one."""
        return all(step.verdict != "not judged" for step in self.skipped)

    @property
    def exit_code(self) -> int:
        """0 found, 4 a newer step might be it, 1 none passes, 3 there is none."""
        if not self.is_certain:
            return 4
        return 0 if self.newest else 1 if self.skipped else 3


def runs_at(path: str) -> list[tuple[str, Folder]]:
    """The runs that a path means, each under the name that the user would give it.

    Raises:
        NothingToCheckError: nothing is there, it is a file, or no step is in or below it.
        UnknownLayoutError: checkpoints lie there, and no step.
        AccessError: a folder could not be listed.
    """
    folder = run_at(path)
    runs = runs_below(folder)
    if not runs:
        with suppress(NothingToCheckError):
            there = printable(find_checkpoints(folder, False)[0].display)
            raise UnknownLayoutError(f"{there} is a checkpoint, not a run: use `ckptlint {there}`")
        looked_for = "looked for folders such as iter_*, step-*, checkpoint-*"
        raise NothingToCheckError(f"no step under {shown(path)}: {looked_for}")
    return [("/".join(filter(None, (path.rstrip("/") or "/", place))), run) for place, run in runs]


def looks_at(request: Request, judge: Callable[[Request], Report]) -> tuple[Judge, Judge | None]:
    """A first look at each step, and a closer one at a step that passes it; None where the first one sees all.

    Numbers are drawn only from the steps that a choice rests on.
    """
    draws = request.reading is not None and request.reading.draws
    first = request._replace(reading=None) if draws else request
    return lambda step: judge(first.only(step)), (lambda step: judge(request.only(step))) if draws else None


def newest_good(
    run: Folder,
    path: str,
    judge: Judge,
    required: Sequence[str] = (),
    before: int | None = None,
    compare: Judge | None = None,
) -> Search:
    """Judge the steps of a run from the newest down to the first that passes.

    Args:
        path: the run folder as the user would name it.
        required: the parts that the step must hold; without any, those that the step before it holds.
        before: only steps below this number.
        compare: a closer look at a step that passes, None where `judge` sees all.

    Raises:
        ConfigError: there is no such part.
        AccessError: the run folder could not be listed.
    """
    if unknown := [part for part in required if part not in PARTS]:
        raise ConfigError(f"there is no part {unknown[0]!r}, only {', '.join(PARTS)}")
    steps = [step for step in [*steps_of(run), *_released(run)] if before is None or step.number < before]
    skipped: list[JudgedStep] = []
    with listed_once(path, run), telling_ctrl_c(lambda: f"{judged_of(skipped, steps)}, none is recommended"):
        works = [partial(_stamped, step, f"{path.rstrip('/')}/{step.name}", judge) for step in steps]
        for position, (stamp, judged) in enumerate(counted("steps", results_in_order(works), len(works))):
            if judged.hidden and judged.verdict == "passes":
                judged = replace(judged, verdict="fails", why=judged.hidden)
            judged = with_parts(judged, steps[position], required, steps[position + 1 :])
            if judged.verdict == "passes" and compare is not None:
                judged = looked_closer(judged, compare)
            if judged.verdict == "passes" and not _is_still(path, steps[position], stamp):
                why = "it changed while ckptlint judged it: run ckptlint again"
                judged = replace(judged, verdict="not judged", why=why)
            if judged.verdict == "passes":
                return Search(path, judged, skipped, _tracking(run, judged, steps))
            skipped.append(judged)
    return Search(path, None, skipped)


def judged_of(judged: Sequence[JudgedStep], steps: Sequence[Step]) -> str:
    """How many of the steps are judged, in words."""
    return f"{len(judged):,} of {plural(len(steps), 'step')} judged"


def _stamped(step: Step, path: str, judge: Judge) -> tuple[int | None, JudgedStep]:
    """The stamp of a step before it is judged, and what is said of it."""
    return stamp_of(step), judge_step(step, path, judge)


def _is_still(path: str, step: Step, stamp: int | None) -> bool:
    """Whether a step is still what it was under this stamp; a store is listed once more for that."""
    with suppress(CkptlintError):
        run = run_at(path)
        again = step._replace(run=run) if run.place == step.run.place else step
        return stamp is not None and stamp_of(again) == stamp
    return False


def stamp_of(step: Step) -> int | None:
    """A hash of what tells whether something in a step changed (`Folder.stamps`); None where it cannot be listed."""
    with suppress(CkptlintError):
        if step.is_folder:
            return _stamp_below(step.folder)
        return hash(tuple(row for row in step.run.stamps() if row[0] == step.name))
    return None


def _stamp_below(folder: Folder, levels: int = LEVELS) -> int:
    inner = [folder.sub(name) for name in folder.folders() if not folder.escapes_to(name)]
    if inner and not levels:
        raise AccessError(f"{folder.display} holds more than {LEVELS} levels of folders")
    return hash((*folder.stamps(), *(_stamp_below(sub, levels - 1) for sub in inner)))


def results_in_order(works: Sequence[Callable[[], _T]]) -> Iterator[_T]:
    """What each work returns, which must be picklable; later ones are done in processes that do many of them."""
    yield from (work() for work in works[:_FEW])
    yield from prefetch(works[_FEW:], min(4, os.cpu_count() or 1))


def _released(run: Folder) -> list[Step]:
    """The folder `release` where the tracker names it, beside steps that have numbers: it is older than all of them."""
    with suppress(CkptlintError):
        is_named = "release" in run.folders() and isolated(partial(read_tracker, run), 0)[1] == "release"
        if is_named and not any(step.name == "release" for step in steps_of(run)):
            return [Step(0, run, "release")]
    return []


def _tracking(run: Folder, newest: JudgedStep, steps: Sequence[Step]) -> str:
    try:
        tracker, named = isolated(partial(read_tracker, run), 0)  # one of them is a pickle
    except CkptlintError as error:
        return f"the run's tracker cannot be read: {error}"
    if tracker is None:
        return _without_tracker(newest, steps)
    if named in ("release", newest.number):
        return ""
    step = "no step" if named is None else f"step {named}"
    what = newest.name if tracker.holds == "folder" else newest.number
    how = f"point it to {newest.name}" if tracker.holds == "link" else f"write {what} into it"
    return f"{tracker.file} names {step}: {how} to resume from {newest.name}"


def _without_tracker(newest: JudgedStep, steps: Sequence[Step]) -> str:
    """What a trainer does that looks for its tracker alone; "" for other trainers, and for one step, copied alone."""
    _, like = steps_like(newest.name) or ("", None)
    step = next((step for step in steps if printable(step.name) == newest.name and step.is_folder), None)
    if like is None or step is None or not like.tracker or len(steps) < 2:
        return ""
    if like.holding and not {*like.holding} & {*step.folder.folders()}:
        return ""
    return f"no {like.tracker}: training starts over; write {newest.number} into it to resume from {newest.name}"


def judge_step(step: Step, path: str, judge: Judge) -> JudgedStep:
    """What the report on a step says of it, not compared with other steps."""
    outcome = JudgedStep(step.number, printable(step.name), path, "not judged")
    try:
        outcome = replace(outcome, written=step.folder.newest)
        if step_state(step.folder) == "unfinished":
            age = time.time() - outcome.written
            when = f"; its newest file is {human_duration(age)} old" if outcome.written and age >= 0 else ""
            why = step.run.lost_link(step.name) or f"its save did not finish{when}"
            outcome = replace(outcome.as_unfinished(why), size=_payload_bytes(step, path))
            what_is_there = verdict_of(judge(path)) if step.folder.entries else outcome
            if what_is_there.verdict == "fails":  # what is written last is there, and damaged
                return replace(outcome, verdict="fails", code=what_is_there.code, why=what_is_there.why)
            return outcome
        report = judge(path)
    except NothingToCheckError:
        return replace(outcome, verdict="gone", why="somebody removed it during the check")
    except CkptlintError as error:
        return replace(outcome, why=str(error), size=_payload_bytes(step, path))
    if not _is_there(step):
        return replace(outcome, verdict="gone", why="somebody removed it during the check")
    return replace(verdict_of(report), number=outcome.number, name=outcome.name, path=path, written=outcome.written)


def _payload_bytes(step: Step, path: str) -> int:
    """Bytes of the payload in a step, as a report says; 0 where it holds no checkpoint yet, or is not followed."""
    with suppress(CkptlintError):
        return sum(map(_bytes_of, find(path))) if is_followed(step.run, step.name) else 0
    return 0


def _bytes_of(place: CheckpointPlace) -> int:
    if place.recognised is None or place.recognised.kind == "incomplete":  # no file describes it: none is read
        return int(file_table(place.folder).size.sum())
    return open_checkpoint(place, True).total_bytes


def _is_there(step: Step) -> bool:
    with suppress(CkptlintError):
        return bool(step.folder.entries)
    return False


def verdict_of(report: Report) -> JudgedStep:
    """What a report says of the one step that it is about; names and number are the caller's."""
    checkpoints = [part.checkpoint for part in report.checkpoints]
    size = sum(ckpt.total_bytes for ckpt in checkpoints)
    written = max((ckpt.times.newest for ckpt in checkpoints), default=0.0)
    outcome = JudgedStep(0, "", "", "passes", parts=parts_of(checkpoints), size=size, written=written)
    spare = _spare_exports(report)
    of_exports = []
    for part in spare:
        where = f"in the export {part.checkpoint.path.rpartition('/')[2]}, which the step can make again"
        of_exports += [f"{lead.code} {where}: {lead.title}" for lead in _leads([part]) if report.is_failing(lead)]
    report = replace(report, checkpoints=[part for part in report.checkpoints if part not in spare])
    checkpoints, leads = [part.checkpoint for part in report.checkpoints], _leads(report.checkpoints)
    is_copy = all(any(map(_says_copy, part.diagnostics)) for part in report.checkpoints)
    failing = [
        lead
        for lead in sorted(leads, key=lambda lead: -lead.severity)
        if report.is_failing(lead)
        or (lead.severity == Severity.ERROR and lead.rule.after != "rules")  # also where no error fails the run
        or (is_copy and _says_copy(lead))
    ]
    odd = [lead for lead in leads if lead.severity == Severity.WARNING and lead not in failing]
    sentences = (*(f"{lead.code} {lead.title}" for lead in odd), *of_exports)
    outcome = replace(outcome, warnings=sentences, hidden=_hidden(report))
    doubts = [p.message for ckpt in checkpoints if not ckpt.readable for p in ckpt.problems_of(*_DOUBTFUL)]
    is_wrong = bool(failing) and failing[0].severity == Severity.ERROR
    torn = [lead for lead in leads if lead.code == UNFINISHED and lead.severity > Severity.INFO]
    if torn and (torn[0].severity == Severity.ERROR or not (is_wrong or doubts)):
        return outcome.as_unfinished(torn[0].title)
    if doubts:
        return replace(outcome, verdict="not judged", why=doubts[0])
    if failing and (is_wrong or not report.is_incomplete):
        lead, *others = failing
        more = f" (and {plural(len(others), 'more finding')})" if others else ""
        why = f"{lead.severity.label} {lead.code} {lead.title}{more}"
        return replace(outcome, verdict="fails", code=lead.code, why=why)
    if report.is_incomplete:
        reasons = [reason for part in report.checkpoints for reason in part.failed.values()]
        reasons += [p.message for ckpt in checkpoints for p in ckpt.problems if p.kind == "unread" or p.blocks]
        return replace(outcome, verdict="not judged", why=next(chain(report.unreadable, reasons), "it cannot be read"))
    if report.not_found or not checkpoints:
        return replace(outcome, verdict="unfinished", why=next(iter(report.not_found), "it holds no checkpoint"))
    return outcome


def _says_copy(item: Diagnostic) -> bool:
    """Whether a checkpoint is a copy; a step is none where a frozen model lies beside one that learns."""
    return item.code == "RUN005" and item.severity >= Severity.WARNING


def _leads(parts: Iterable[CheckpointReport]) -> list[Diagnostic]:
    return [group.lead for part in parts for group in part.groups if not group.lead.finding.of_run]


def _spare_exports(report: Report) -> list[CheckpointReport]:
    """The exports of a step that a resume does not read: model and optimizer lie beside them in another form."""
    exports = [part for part in report.checkpoints if part.checkpoint.format in ("safetensors", "torch")]
    others = [part.checkpoint for part in report.checkpoints if part not in exports] if exports else []
    return exports if {"model", "optimizer"} <= {*parts_of(others)} else []


def _hidden(report: Report) -> str:
    """The errors in a report that do not count there, as words: no option makes a step with an error one to trust."""
    errors = [item for item in report.ignored if item.severity >= Severity.ERROR and not item.finding.of_run]
    by = {item.ignored.by for item in errors if item.ignored is not None}
    hiding = {"baseline": "the baseline", "per-key-ignores": "an ignore"}
    what = join_words([words for who, words in hiding.items() if who in by])
    return f"{plural(len(errors), 'error')} hidden by {what}" if errors else ""


def steps_in(report: Report) -> list[JudgedStep]:
    """The steps in a report, the newest first; [] where it has one step or none."""
    parts: dict[tuple[str, int], list[CheckpointReport]] = {item[:2]: [] for item in report.unread_steps}
    for part in report.checkpoints:
        if (step := step_around(part.checkpoint)) is not None:
            parts.setdefault(step, []).append(part)
    if len(parts) < 2:
        return []
    judged = []
    for (path, number), members in parts.items():
        unread = tuple(why for step_path, _, why in report.unread_steps if step_path == path)
        outcome = verdict_of(replace(report, checkpoints=members, not_found=(), unreadable=unread))
        outcome = replace(outcome, path=path, name=path.rpartition("/")[2], number=number)
        # whether the save ended, as `step_state` says it; what a step lacks beside others is outside of it
        torn = (problem for part in members for problem in part.checkpoint.problems_of("incomplete"))
        judged.append((outcome, not unread and all(problem.outside_checkpoint for problem in torn)))
    judged.sort(key=lambda pair: newness(pair[0].number, pair[0].name), reverse=True)
    judged.sort(key=lambda pair: pair[0].path.rpartition("/")[0])
    return [_beside_before(step, judged[at + 1 :]) for at, (step, _) in enumerate(judged)]


def _beside_before(judged: JudgedStep, older: Iterable[tuple[JudgedStep, bool]]) -> JudgedStep:
    """The verdict on a step, once its parts are compared with those of the finished step before it in its run."""
    run = judged.path.rpartition("/")[0]
    of_run = takewhile(lambda pair: pair[0].path.rpartition("/")[0] == run, older)
    before = next((step for step, is_finished in of_run if is_finished), None)
    return judged if before is None else with_all(judged, before.parts, step_before_has(before.name))


def with_all(judged: JudgedStep, required: Iterable[str], asked: str) -> JudgedStep:
    """The verdict on a step, once the parts that it must hold are compared with those it holds; `asked` says why."""
    lost = [part for part in PARTS if part in required and part not in judged.parts]
    if judged.verdict != "passes" or not lost:
        return judged
    return replace(judged, verdict="lacks parts", why=f"{not_stored(lost)}; {asked}")


def step_before_has(name: str) -> str:
    """Why a step must hold what the one before it holds."""
    return f"the step before it, {name}, has it"


def step_around(ckpt: Checkpoint) -> tuple[str, int] | None:
    """Path and number of the step that a checkpoint is, or is in; None outside of any."""
    if ckpt.step:
        return ckpt.step
    names = ckpt.path.split("/")
    places = [(place, number) for place, name in enumerate(names) if (number := step_number(name)) is not None]
    return ("/".join(names[: places[-1][0] + 1]), places[-1][1]) if places else None


def newest_passing(steps: Iterable[JudgedStep]) -> dict[str, JudgedStep | None]:
    """Run -> the newest of its steps that passes without a hidden error, None where none does."""
    newest: dict[str, JudgedStep | None] = {}
    for step in steps:
        run = step.path.rpartition("/")[0]
        newest[run] = newest.get(run) or (step if step.verdict == "passes" and not step.hidden else None)
    return newest


def with_parts(
    judged: JudgedStep, step: Step, required: Sequence[str], older: Sequence[Step], depth: Depth = Depth.FILES
) -> JudgedStep:
    """The verdict on a step, once the parts that it must hold are compared with those it holds.

    Args:
        required: the parts; without any, those that the finished step before it holds.
        older: the older steps of its run, the newest first.
        depth: of the report; where it does not look at files, parts are known by their names alone.
    """
    if judged.verdict != "passes":
        return judged
    if not depth.looks_at_files:
        judged = replace(judged, parts=_by_names(step, judged.parts))
    if why := lacking(step, older):
        return judged.as_unfinished(why)
    if not required:
        before = next(_finished(older, depth), None)
        return judged if before is None else with_all(judged, before[1], step_before_has(before[0]))
    return with_all(judged, required, f"--require {','.join(required)} asks for it")


def looked_closer(judged: JudgedStep, compare: Judge) -> JudgedStep:
    """The verdict on a step that passes, once a report says more of it."""
    closer = verdict_of(compare(judged.path))
    return replace(judged, verdict=closer.verdict, code=closer.code, why=closer.why, warnings=closer.warnings)


def lacking(step: Step, older: Iterable[Step], kinds_of: int = 1) -> str:
    """That a step lacks files which older ones have (`loaders.run.finished.lacking_files`); "" where it lacks none."""
    with suppress(CkptlintError):
        alike = (
            older_step.folder for older_step in older if older_step.is_folder and is_alike(older_step.name, step.name)
        )
        files, holders = lacking_files(step.folder, alike, kinds_of) if step.is_folder else ((), "")
        return f"the step has no {join_words(files, 'or')}, which {holders}" if files else ""
    return ""


def _by_names(step: Step, parts: Iterable[str]) -> tuple[str, ...]:
    """The parts that a step holds by its metadata, and by the names of its files."""
    names = step.folder.files_beside() if step.is_folder else ()
    stored_parts = {*parts, *(part_of_file(family.name) for family in map(family_of, names) if family is not None)}
    return tuple(part for part in PARTS if part in stored_parts)


def _finished(steps: Iterable[Step], depth: Depth) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and parts of each step whose save finished and that can be read."""
    for step in steps:
        with suppress(CkptlintError):
            if step_state(step.folder) != "unfinished":
                places = find_checkpoints(step.folder, False)
                parts = parts_of(open_checkpoint(place, depth.looks_at_files, False) for place in places)
                yield printable(step.name), parts if depth.looks_at_files else _by_names(step, parts)
