from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from ckptlint.analysis.ranks.numbered_files import is_one_of_several
from ckptlint.model import Checkpoint, RunFolder, StepClaim, StepFile
from ckptlint.model.text import first_names, join_words
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.frameworks import world

_NUMBERS = re.compile(r"\d+")
_TRAIN_STATE = "train_state.pt"


@rule("COM002", "iteration-mismatch", Severity.ERROR)
def iteration_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The step folder's number, the iteration saved in it and the tracker file disagree.

    What it checks:
        A folder `iter_<number>` holds the iteration of its name, in the common state or in Megatron-Bridge's
        `train_state.pt`. The tracker beside it (`latest_checkpointed_iteration.txt` of Megatron-LM, Megatron-Bridge,
        slime and verl, `dlrover_latest.txt`, DeepSpeed's `latest`, or a link) names a finished step that is there, or
        `release`. An absent tracked step is a warning if one step alone was copied out of a run. A finished step newer
        than the tracked one is info, which a check of the run folder alone reports: a job that is killed between save
        and tracker leaves a healthy run.

        A number inside the step that differs from the folder's is a warning if the library takes both from one counter:
        `global_step` of a `trainer_state.json` in `checkpoint-<number>`, `train_state.step` of torchtitan in
        `step-<number>`, `global_step` in `train/rank*.pt` of OLMo-core in `step<number>`, and `global_step` of a
        `trainer_state.json` beside DeepSpeed's `global_step<number>`. Other counters (`step`, `global_step`,
        `last_epoch` of a scheduler, Adam's own `step`) may count batches or start anew. They are info if they have
        the number of another step of the run, and a warning if they have not moved since the step before, with which
        they agreed. All numbers that contradict the folder's are one finding. Files of ranks that are called alike and
        say different steps are a warning.
    Why it matters:
        A resume loads the step that the tracker names, and continues from the iteration stored in it.
    Usual causes:
        Somebody renamed or copied a step folder; the save was interrupted before the tracker was written; the tracker
        was not reduced over the ranks; a file belongs to another step.
    How to fix:
        Set the tracker to the newest finished step, and give a renamed folder its own number back.
    See:
        megatron.training.checkpointing.read_metadata
    """
    run, claims = ckpt.run, _claims(ckpt)
    states = [file for file in ckpt.step_files if file.step is not None and file.folder_step is not None]
    apart = [*_ranks_apart([claim for claim in claims if not is_one_of_several(ckpt, claim.source)])]
    yield from apart
    if run is None and not states and not apart:
        raise NotApplicable("the folder's name is no step of a run")
    kept = _stored(ckpt, run)
    if run and run.tracker is None and run.prefix != "iter_" and not claims and not states:
        raise NotApplicable("nothing but the folder's name says which step this is")
    counters = [_of_trainer(file) for file in states]
    if run is not None:
        counters += [_of_iteration(run, *item) for item in kept if run.prefix == "iter_"]
        counters += [_of_claim(ckpt, run, claim) for claim in claims]
    folder = run.step if run is not None else next((file.folder_step for file in states), None)
    notes = _numbers(run, kept[0][1] if kept else None) if run is not None else ()
    yield from _contradiction(ckpt, folder, counters, notes if kept else ())
    if run is not None and run.tracker is not None and run.is_asked:
        yield from _tracked(run, run.tracker, notes)


def _tracked(run: RunFolder, tracker: int | Literal["release"], notes: tuple[Note, ...]) -> Iterator[Finding]:
    """What is wrong with the step that the tracker names: a fault of the run."""
    named, newest = tracker if tracker == "release" else f"step {tracker}", run.newest_complete
    finding = Finding("", at=Location(file=run.tracker_file), notes=notes, of_run=True)
    resume = "copy the step back" if newest is None else run.tracking(newest)
    if run.tracked == "absent":
        alone = len(run.steps) == 1
        yield replace(
            finding,
            message=f"{run.tracker_file} names {named}, which does not exist",
            identity=("tracked", str(tracker)),
            severity=Severity.WARNING if alone else None,
            hint=f"{resume} to resume from this step, or restore {run.folder_of(tracker)}",
        )
    elif run.tracked == "unfinished" and tracker != run.step:
        yield replace(
            finding,
            message=f"{run.tracker_file} names {named}, whose save did not finish",
            identity=("unfinished", str(tracker)),
            hint=f"{resume}, the newest finished step",
        )
    elif tracker != "release" and tracker < run.step == newest:
        yield replace(
            finding,
            message=f"{run.tracker_file} names step {tracker}, but step {run.step} is newer and finished",
            identity=("newer", str(tracker)),
            severity=Severity.INFO,
            why=f"a resume starts from step {tracker} and repeats the training since then",
            hint=f"{resume}, unless the older step was chosen on purpose",
        )


def _stored(ckpt: Checkpoint, run: RunFolder | None) -> list[tuple[str, int]]:
    """The iterations that were saved in the step, each with where."""
    found = [] if run is None or run.saved is None else [(_TRAIN_STATE, run.saved)]
    value = ckpt.common_value("iteration")
    if ckpt.common is not None and isinstance(value, int) and not isinstance(value, bool):
        found.insert(0, (ckpt.common.source, value))
    return found


def _numbers(run: RunFolder, stored: int | None) -> tuple[Note, ...]:
    states = {"unfinished": ", which is not complete", "absent": ", which does not exist"}
    shown = [str(step) for step in run.steps[-8:]]
    steps = ", ".join((["..."] if len(run.steps) > 8 else []) + shown)
    said = [f"the folder is step {run.step}"]
    said += [f"the common state says {stored}"] if stored is not None else []
    said += [f"the tracker points to {run.tracker}{states.get(run.tracked, '')}"] if run.tracker is not None else []
    newest = "none" if run.newest_complete is None else str(run.newest_complete)
    return (
        ("numbers", join_words(said)),
        ("steps", f"{steps or run.step}; newest finished {newest}"),
    )


# ---------------------------------------------------------------- what counts steps


class _Counter(NamedTuple):
    """A number in the step that counts steps.

    Attributes:
        level: how bad it is if it is not the folder's; None for one that may count otherwise.
        because: what makes that sure; "" where it needs no word.
    """

    source: str
    step: int
    level: Severity | None
    hint: str
    because: str = ""


def _contradiction(
    ckpt: Checkpoint, folder: int | None, counters: list[_Counter], notes: tuple[Note, ...]
) -> Iterator[Finding]:
    """One finding on all counters that are not at the folder's step, led by the surest."""
    other = [counter for counter in counters if counter.level is not None and counter.step != folder]
    if not other:
        return
    lead, *_ = sorted(other, key=lambda counter: counter.level or Severity.INFO, reverse=True)
    said = defaultdict(list)
    for counter in counters:
        said[counter.step].append(counter.source)
    at = [f"{step}: {first_names(dict.fromkeys(sources))}" for step, sources in sorted(said.items())]
    about = (("because", lead.because), ("counters", "; ".join(at) if at[1:] else ""))
    is_file = any(file.name == lead.source for file in ckpt.step_files)
    yield Finding(
        f"the folder is named for step {folder}, but {lead.source} says step {lead.step}",
        at=Location(file=lead.source) if is_file else Location(lead.source),
        identity=("step", str(lead.step)),
        severity=lead.level,
        why="a resume picks the step by its folder name, and continues counting from the number inside",
        notes=tuple(note for note in about if note[1]) + notes,
        hint=lead.hint,
    )


def _of_trainer(file: StepFile) -> _Counter:
    hint = f"rename the folder to checkpoint-{file.step}, or restore the {file.name} of its step"
    return _Counter(file.name, file.step or 0, Severity.WARNING, hint, "the Trainer writes both from one counter")


def _of_iteration(run: RunFolder, source: str, iteration: int) -> _Counter:
    hint = f"if the content is right, rename the folder to {run.folder_of(iteration)}; otherwise restore the "
    return _Counter(source, iteration, Severity.ERROR, f"{hint}{source} of step {run.step}")


def _of_claim(ckpt: Checkpoint, run: RunFolder, claim: StepClaim) -> _Counter:
    hint = f"compare this folder with step {claim.step} before you resume"
    level, because = _level(ckpt, run, claim)
    return _Counter(claim.source, claim.step, level, hint, because)


def _claims(ckpt: Checkpoint) -> list[StepClaim]:
    """What entries and files of the step say, but for what has a check of its own."""
    files = [file for file in ckpt.step_files if file.step is not None and file.folder_step is None]
    return [*ckpt.claims, *(StepClaim(file.name, file.step) for file in files if file.step is not None)]


def _ranks_apart(claims: list[StepClaim]) -> Iterator[Finding]:
    """Files of ranks, alike but for their numbers, that say different steps: one save writes them all."""
    alike: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for claim in claims:
        alike[_NUMBERS.sub("0", claim.source)][claim.step].append(claim.source)
    for steps in alike.values():
        most, *others = sorted(steps, key=lambda step: (-len(steps[step]), -step))
        for step in others:
            verb = "says" if len(steps[step]) == 1 else "say"
            yield Finding(
                f"{join_words(steps[step])} {verb} step {step}, but {join_words(steps[most])} step {most}",
                at=Location(file=steps[step][0]),
                identity=("ranks", str(step)),
                severity=Severity.WARNING,
                why="each rank of one save writes the same step: these files come from two saves",
                hint=f"copy the files of step {most} again, or resume from another step",
            )


def _level(ckpt: Checkpoint, run: RunFolder, claim: StepClaim) -> tuple[Severity | None, str]:
    """How sure it is that the number should be the folder's, and why; None for a counter that may count otherwise."""
    for counter in world().one_counter:
        if run.prefix == counter.prefix and counter.entry.fullmatch(claim.source):
            return Severity.WARNING, f"{counter.framework} writes both from one counter"
    if claim.step not in run.steps or claim.step == run.step:
        return None, ""
    before = ckpt.before
    if before is not None and before.run is not None and "last_epoch" not in claim.source:
        stood = claim.step == before.run.step and claim in _claims(before)
        if stood:
            return Severity.WARNING, f"in {run.folder_of(claim.step)} the same counter matches the folder"
    return (
        Severity.INFO,
        f"{run.folder_of(claim.step)} is another step of the run; this counter may count something else",
    )
