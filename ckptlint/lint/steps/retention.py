"""Which steps of a run may be deleted, so that its newest whole steps and all that something points to stay."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import PurePath
from typing import Any

from ckptlint.errors import AccessError, CkptlintError, NothingToCheckError
from ckptlint.lint.report import Report
from ckptlint.lint.steps.trust import (
    LEVELS,
    Judge,
    JudgedStep,
    judge_step,
    judged_of,
    lacking,
    looked_closer,
    results_in_order,
    runs_at,
    stamp_of,
    with_all,
)
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.run.folder import read_trackers, trackers
from ckptlint.loaders.run.steps import Step, is_alike, numberless, run_at, runs_below, steps_of
from ckptlint.model.text import inert, join_words, plural, printable
from ckptlint.progress import counted, telling_ctrl_c
from ckptlint.rule import Severity
from ckptlint.sandbox import isolated
from ckptlint.shown import Shown
from ckptlint.storage.folder import Folder
from ckptlint.storage.locate import listed_once
from ckptlint.storage.paths import shown
from ckptlint.vocabulary.frameworks import is_newest, step_number
from ckptlint.vocabulary.keys import parse

_TRAINER_STATE, _STATE_LIMIT = "trainer_state.json", 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Decision:
    """What may become of a step.

    Attributes:
        kept_because: why it must stay; "" where it may be deleted.
    """

    step: JudgedStep
    kept_because: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Retention(Shown):
    """Which steps of a run may be deleted.

    Attributes:
        run: the folder of the run, as the user would name it.
        keep: how many whole steps must stay.
        whole: how many whole steps stay for that.
        decisions: of all steps, the newest first.
        refused: why no step may be deleted now, one sentence; "" otherwise.
    """

    run: str
    keep: int
    whole: int = 0
    decisions: tuple[Decision, ...] = ()
    refused: str = ""

    def __repr__(self) -> str:
        return f"<Retention {shown(self.run)}: {self.refused or self.sentence}>"

    @property
    def deletable(self) -> tuple[JudgedStep, ...]:
        """The steps that may be deleted, the newest first."""
        decisions = self.decisions if not self.exit_code else ()
        return tuple(decision.step for decision in decisions if not decision.kept_because)

    @property
    def paths(self) -> tuple[str, ...]:
        """Their paths."""
        return tuple(step.path for step in self.deletable)

    @property
    def sentence(self) -> str:
        """How many steps may be deleted, and how many stay."""
        if self.whole < self.keep:
            return f"{plural(self.keep, 'whole step')} must stay; this run has {self.whole}"
        return f"{len(self.deletable)} of {plural(len(self.decisions), 'step')} may be deleted"

    @property
    def exit_code(self) -> int:
        """0 there are enough whole steps, 1 there are not, 4 the run could not be judged or changed meanwhile."""
        return 4 if self.refused else 1 if self.whole < self.keep else 0

    def rows(self) -> list[dict[str, Any]]:
        """A row for each step, the newest first: its name, path, verdict and why, bytes, and why it stays (or "")."""
        gone = {*self.paths}
        because = (
            (made.step, made.kept_because or self.refused * (made.step.path not in gone)) for made in self.decisions
        )
        return [step.row() | {"stays": why} for step, why in because]


_Pointers = tuple[dict[str, str], str]
"""Name of a step -> what names it from outside; and why it is not known which step a resume needs, or ""."""


def deletable(path: str, keep: int, judge: Judge, compare: Judge | None = None) -> Retention:
    """Judge each step of a run once, and say which may be deleted; deletes nothing.

    Args:
        keep: how many whole steps must stay, at least 1.
        compare: a closer look at a step that passes, None where `judge` sees all.

    Raises:
        NothingToCheckError, UnknownLayoutError, AccessError: as `runs_at`.
    """
    runs = runs_at(path)
    if len(runs) > 1:
        return Retention(path, keep, refused=f"{shown(path)} holds {len(runs)} runs: name one of them")
    ((place, run),) = runs
    steps = steps_of(run)
    stamps = {step.name: stamp_of(step) for step in steps}
    pointers = _pointers(run, steps)
    contents: dict[str, _Contents] = {}
    judged: list[JudgedStep] = []
    last: _Contents | None = None
    with listed_once(place, run), telling_ctrl_c(lambda: f"{judged_of(judged, steps)}, none may be deleted yet"):
        works = [partial(_judged, step, f"{place.rstrip('/')}/{step.name}", judge) for step in steps]
        for judged_step, made in counted("steps", results_in_order(works), len(works)):
            judged.append(judged_step)
            if made is not None:
                contents[judged_step.path] = last = last if last == made else made  # most steps of a run hold the same
        judged, whole = _compared(steps, judged, keep, compare, contents)
    reasons = _stays(steps, judged, whole, keep)
    for name, why in pointers[0].items():
        reasons[name] = reasons[name] or why
    unlinked = {**reasons}
    doubt = pointers[1] or _follow(run, steps, reasons)
    decisions = map(Decision, judged, (reasons[step.name] for step in steps))
    retention = Retention(place, keep, len(whole), tuple(decisions))
    if not retention.paths:
        return retention
    relied_on = {step.name: stamps[step.name] for step in whole}
    return replace(retention, refused=doubt or _changed(place, retention, pointers, relied_on, unlinked))


# ---------------------------------------------------------------- which steps are whole


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a step holds.

    Attributes:
        weights: a hash of key and shape of each tensor of the model.
        moments: elements of the optimizer's state.
    """

    weights: frozenset[int]
    moments: int

    def lacks(self, older: _Contents) -> str:
        """What an older step holds and this one does not, as the end of a sentence; "" where it holds all.

        The padding of an optimizer's buckets follows the parallel sizes, so a tenth may be missing.
        """
        if lost := len(older.weights - self.weights):
            return f"{lost:,} of {plural(len(older.weights), 'weight')} in their shapes"
        lost = older.moments - self.moments
        return f"{lost:,} of {older.moments:,} elements of the optimizer" if lost * 10 > older.moments else ""


def _judged(step: Step, path: str, judge: Judge) -> tuple[JudgedStep, _Contents | None]:
    """What the report on a step says, and what the step holds; None where an error in it does not let it pass."""
    reports: list[Report] = []

    def judge_and_keep(at: str) -> Report:
        reports.append(judge(at))
        return reports[-1]

    judged_step = judge_step(step, path, judge_and_keep)
    errors = [item for report in reports[:1] for item in report.diagnostics if item.severity >= Severity.ERROR]
    return judged_step, _contents(reports[0]) if reports and (judged_step.verdict == "passes" or not errors) else None


def _contents(report: Report) -> _Contents:
    weights, moments = set[int](), 0
    for part in report.checkpoints:
        for tensor in part.checkpoint.tensors.values():
            kind = parse(tensor.fqn).kind
            if kind == "model":
                weights.add(hash((tensor.fqn, tensor.global_shape)))
            moments += tensor.volume * (kind == "optimizer")
    return _Contents(frozenset(weights), moments)


def _compared(
    steps: Sequence[Step],
    judged: Sequence[JudgedStep],
    keep: int,
    compare: Judge | None,
    contents: Mapping[str, _Contents],
) -> tuple[list[JudgedStep], list[Step]]:
    """The verdicts once steps are compared with older ones, and the newest whole steps: `keep` of one name or fewer."""
    verdicts, whole, forms = list(judged), list[Step](), [numberless(step.name) for step in steps]
    for at, (step, judged_step) in enumerate(zip(steps, judged, strict=True)):
        if judged_step.verdict != "passes" or is_newest(step.name):
            continue
        if whole and not is_alike(step.name, whole[0].name):
            continue
        older = [(steps[n], judged[n]) for n in range(at + 1, len(steps)) if forms[n] == forms[at]]
        judged_step = _beside_older(step, judged_step, older, contents)
        if judged_step.verdict == "passes" and compare is not None and len(whole) < keep:
            judged_step = looked_closer(judged_step, compare)
        verdicts[at] = judged_step
        if judged_step.verdict == "passes" and len(whole) < keep:
            whole.append(step)
    return verdicts, whole


def _beside_older(
    step: Step, judged_step: JudgedStep, older: Sequence[tuple[Step, JudgedStep]], contents: Mapping[str, _Contents]
) -> JudgedStep:
    """The verdict on a step that passes, once it is compared with all older ones of its kind.

    `latest` asks whether the step before has more. Here one older step that passes is enough: of two torn saves in a
    row the second must not pass for whole.
    """
    passing = [pair for pair in older if pair[1].verdict == "passes"]
    parts = {part for _, older_judged in passing for part in older_judged.parts}
    if why := lacking(step, [older_step for older_step, _ in passing], len(passing)):
        return judged_step.as_unfinished(why)
    judged_step = with_all(judged_step, parts, "an older step has it")
    if judged_step.verdict != "passes":
        return judged_step
    here = contents[judged_step.path]
    for name, there in [
        (older_judged.name, contents[older_judged.path]) for _, older_judged in older if older_judged.path in contents
    ]:
        if there is not here and (less := here.lacks(there)):
            return replace(judged_step, verdict="lacks parts", why=f"it lacks {less}; {name} has them")
    return judged_step


# ---------------------------------------------------------------- why a step stays


def _stays(steps: Sequence[Step], judged: Sequence[JudgedStep], whole: Sequence[Step], keep: int) -> dict[str, str]:
    """Name of each step -> why it stays, "" for none of the reasons that lie in the steps themselves."""
    newest = "the newest whole step" if keep == 1 else f"one of the {keep} newest whole steps"
    if len(whole) < keep:
        short = f"fewer than {plural(keep, 'whole step')}" if keep > 1 else "no step is whole"
        return {step.name: newest if step in whole else short for step in steps}
    last = steps.index(whole[-1])
    reasons, earliest = {}, inf
    for at, (step, judged_step) in enumerate(zip(steps, judged, strict=True)):
        if step in whole:
            reasons[step.name] = newest
        elif at < last:
            reasons[step.name] = f"newer than {printable(whole[-1].name)}"
        else:
            reasons[step.name] = _own_reason(step, judged_step, whole[0])
            # few are written later: the newer ones are not gone through for each
            if not reasons[step.name] and earliest < judged_step.written:
                reasons[step.name] = _of_clock(at, steps, judged)
        earliest = min(earliest, judged_step.written or inf)
    return reasons


def _own_reason(step: Step, judged_step: JudgedStep, newest: Step) -> str:
    if not is_alike(step.name, newest.name) or step.is_folder != newest.is_folder:
        return f"not named like {printable(newest.name)}"
    if judged_step.verdict == "not judged":
        return "it could not be judged"
    if judged_step.verdict == "gone":
        return judged_step.why
    if step.run.target(step.name):
        return "it is a link"
    if inert(printable(judged_step.path)) != judged_step.path:
        return "its name has characters that cannot be printed"
    try:
        return "it holds steps of its own" if step.is_folder and _holds_steps(step.folder, step.number) else ""
    except CkptlintError as error:
        return str(error)


def _holds_steps(folder: Folder, number: int, levels: int = LEVELS) -> bool:
    """Whether a folder holds several steps, or one of another number; DeepSpeed's of the same number is a part of it.

    Raises CkptlintError where it is too deep, or cannot be listed.
    """
    if any(len(steps_of(run)) > 1 for _, run in runs_below(folder)):
        return True
    inner = [name for name in folder.folders() if not folder.escapes_to(name)]
    if not levels and inner:
        raise AccessError(f"{folder.display} holds more than {LEVELS} levels of folders")
    named = {step_number(name) for name in inner if not name.isdecimal()} - {None, number}
    return bool(named) or any(_holds_steps(folder.sub(name), number, levels - 1) for name in inner)


def _of_clock(at: int, steps: Sequence[Step], judged: Sequence[JudgedStep]) -> str:
    """Why the time of a step contradicts its number: a new run in the folder of an old one counts from 0 again."""
    here = judged[at]
    for step, newer in zip(steps[:at], judged[:at], strict=True):
        is_older = newer.number > here.number and 0 < newer.written < here.written
        if is_older and is_alike(step.name, steps[at].name):
            return f"it was written after {newer.name}: perhaps two runs lie here"
    return ""


# ---------------------------------------------------------------- what points to a step


def _pointers(run: Folder, steps: Sequence[Step]) -> _Pointers:
    """What the trackers of a run name; raises CkptlintError where one could not be read."""
    named, lost = dict[str, str](), list[str]()
    for tracker, number, text in isolated(lambda: [*read_trackers(run)], 0):  # one of them is a pickle
        names = [step.name for step in steps if step.name == text or (number is not None and step.number == number)]
        named |= dict.fromkeys(names, f"{tracker.file} names it")
        if not names and number is None and not (tracker.holds == "folder" and text in run.folders()):
            lost.append(tracker.file)
    if lost:
        doubt = f"{join_words(lost)} names no step that ckptlint understands: a resume may need any of them"
        return named, doubt
    known = {step.name for step in steps}
    folders = [name for name in run.folders() if name not in known and run.inner_target(name) not in known]
    there = run.entries.strange | dict.fromkeys(folders, "a folder")
    files = [tracker.file for tracker in trackers() if tracker.holds != "link" and tracker.file in there]
    return named, f"{files[0]} is {there[files[0]]}: a resume may need any step" if files else ""


def _follow(run: Folder, steps: Sequence[Step], reasons: dict[str, str]) -> str:
    """Add what links, and the trainer's states in the run and in steps that stay, name; returns what stays unknown."""
    by_name = {step.name: step for step in steps}
    queue: list[tuple[str, Folder]] = [("", run)]
    queue += [(step.name, step.folder) for step in steps if reasons[step.name] and step.is_folder and _is_near(step)]
    while queue:
        label, folder = queue.pop()
        hidden = by_name if not label else ()
        try:
            pointed = [*_best(folder, label), *_links(folder, label, hidden)]
        except AccessError as error:
            return f"{error}, so ckptlint does not know whether links there lead to steps"
        for named, why in pointed:
            if named in by_name and named != label and not reasons[named]:
                reasons[named] = why
                if by_name[named].is_folder:
                    queue.append((named, by_name[named].folder))
    return ""


def _is_near(step: Step) -> bool:
    """Whether a step is in the run, and no link out of it that is not followed."""
    with suppress(CkptlintError):
        return bool(step.folder)
    return False


def _best(folder: Folder, label: str) -> Iterator[tuple[str, str]]:
    """The step that a trainer calls the best.

    Source: transformers 5.23: TrainerState.best_model_checkpoint, a path in `trainer_state.json`
    """
    best = None
    with suppress(CkptlintError):  # said of the step
        best = read_json(folder, _TRAINER_STATE, _STATE_LIMIT)[0].get("best_model_checkpoint")
    if isinstance(best, str):
        yield PurePath(best).name, f"the best, says {_TRAINER_STATE}{' of ' + printable(label) if label else ''}"


def _links(folder: Folder, label: str, but: Collection[str], levels: int = LEVELS) -> Iterator[tuple[str, str]]:
    """Each name on the way of a link in a folder or below it, and which link that is.

    Folders named in `but` are not searched; raises AccessError where something else could not be.
    """
    try:
        names = [name for name, entry in folder.entries.others.items() if entry.is_link]
        for name in [*names, *folder.entries.strange]:
            place = printable(f"{label}/{name}" if label else name)
            for via in {*PurePath(folder.target(name)).parts, *PurePath(folder.link_target_resolved(name)).parts}:
                yield via, f"the link {place} leads there"
        inner = [name for name in folder.folders() if name not in but and name not in names]
    except NothingToCheckError:
        return  # it went meanwhile
    if inner and not levels:
        raise AccessError(f"{folder.display} holds more than {LEVELS} levels of folders")
    for name in inner:
        yield from _links(folder.sub(name), f"{label}/{name}" if label else name, (), levels - 1)


# ---------------------------------------------------------------- whether the run is still what was judged


def _changed(
    place: str,
    retention: Retention,
    pointers: _Pointers,
    relied_on: Mapping[str, int | None],
    unlinked: Mapping[str, str],
) -> str:
    """What became another since it was judged, as a sentence; "" where a deletion is still safe.

    The whole steps that stay are relied on, by their stamps; `unlinked` says why each stays before links were followed.
    """
    again = "run ckptlint again"
    try:
        run = run_at(place)
        steps = {step.name: step for step in steps_of(run)}
        for name, stamp in relied_on.items():
            if stamp is None or name not in steps or stamp_of(steps[name]) != stamp:
                return f"{printable(name)} changed while ckptlint judged the others: {again}"
        there = {*map(printable, run.entries), *map(printable, run.entries.strange)}
        stay = [decision.step.name for decision in retention.decisions if decision.kept_because]
        if lost := [name for name in stay if name not in there]:
            return f"somebody removed {join_words(lost)} during the check, so the steps it named are not known: {again}"
        if _pointers(run, [*steps.values()]) != pointers:
            return f"the trackers name other steps than before: {again}"
        reasons = {name: unlinked.get(name, "new") for name in steps}
        if doubt := _follow(run, [*steps.values()], reasons):
            return doubt
        gone_soon = {step.name for step in retention.deletable}
        if led := [printable(name) for name, why in reasons.items() if why and printable(name) in gone_soon]:
            return f"a new link or tracker leads to {join_words(led)}: {again}"
    except CkptlintError as error:
        return f"the run cannot be looked at again: {error}"
    return ""
