from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from ckptlint.analysis.ranks.numbered_files import is_one_of_several
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, RunFolder, StepClaim
from ckptlint.model.text import first_names, join_words, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, require, rule
from ckptlint.vocabulary.frameworks import world

_NUMBERS = lazy_pattern(r"\d+")


@rule("COM002", "iteration-mismatch", Severity.ERROR)
def iteration_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The step folder's number, the iteration saved in it and the tracker file disagree.

    What it checks:
        A folder `iter_<number>` holds the iteration of its name, in the common state or in Megatron-Bridge's
        `train_state.pt`. The tracker beside it (`latest_checkpointed_iteration.txt` of Megatron-LM, Megatron-Bridge,
        slime and verl, `dlrover_latest.txt`, DeepSpeed's `latest`, or a link) names a finished step that is there, or
        `release`. An absent tracked step is a warning if one step alone was copied out of a run. A finished step newer
        than the tracked one is info, of the run folder alone: a job killed between save and tracker leaves a healthy
        run.

        A number inside the step that differs from the folder's is a warning if the library takes both from one counter:
        `global_step` of a `trainer_state.json` in `checkpoint-<number>`, `train_state.step` of torchtitan in
        `step-<number>`, and `global_step` in `train/rank*.pt` of OLMo-core in `step<number>`. DeepSpeed's engine counts
        apart from transformers' Trainer: its `global_step<number>` may be behind `trainer_state.json` by one step an
        epoch, and is a warning beyond. Other counters (`step`, `global_step`,
        `last_epoch` of a scheduler, Adam's own `step`) may count batches or start anew: info if they have the number of
        another step of the run, a warning if they have not moved since the step before, with which they agreed. Files
        of ranks called alike that say different steps are a warning.
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
    trainer_states = [file for file in ckpt.step_files if file.step is not None and file.folder_step is not None]
    disagreements = [*_rank_disagreements([claim for claim in claims if not is_one_of_several(ckpt, claim.source)])]
    yield from disagreements
    if run is None and not trainer_states and not disagreements:
        raise NotApplicable("the folder's name is no step of a run")
    iterations = _stored_iterations(ckpt, run)
    if run and run.tracker is None and run.prefix != "iter_" and not claims and not trainer_states:
        raise NotApplicable("nothing but the folder's name says which step this is")
    counters = []
    for file in trainer_states:
        hint = f"rename the folder to checkpoint-{file.step}, or restore the {file.name} of its step"
        because = "the Trainer writes both from one counter"
        counters.append(_Counter(file.name, file.step or 0, Severity.WARNING, hint, because))
    if run is not None:
        for source, iteration in iterations if run.prefix == "iter_" else ():
            hint = f"if the content is right, rename the folder to {run.folder_of(iteration)}; otherwise restore the "
            counters.append(_Counter(source, iteration, Severity.ERROR, f"{hint}{source} of step {run.step}"))
        for claim in claims:
            level, because = _level(ckpt, run, claim)
            hint = f"compare this folder with step {claim.step} before you resume"
            counters.append(_Counter(claim.source, claim.step, level, hint, because))
    folder = run.step if run is not None else next((file.folder_step for file in trainer_states), None)
    notes = _number_notes(run, iterations[0][1] if iterations else None) if run is not None else ()
    yield from _contradiction(ckpt, folder, counters, notes if iterations else ())
    if run is not None and run.tracker is not None and run.is_asked:
        yield from _tracker_findings(run, run.tracker, notes)


def _tracker_findings(run: RunFolder, tracker: int | Literal["release"], notes: tuple[Note, ...]) -> Iterator[Finding]:
    target, newest = tracker if tracker == "release" else f"step {tracker}", run.newest_complete
    at, names = Location(file=run.tracker_file), f"{run.tracker_file} names {target}"
    ask = "`ckptlint latest RUN_DIR` prints the step to resume from"
    finding = Finding("", at=at, notes=notes, of_run=True, hint_if_damaged=ask)
    order = "copy the step back" if newest is None else run.tracking(newest)
    resume = f"{order} to resume from this step" if newest in (None, run.step) else ask  # other steps are not judged
    if run.tracked == "absent":
        # A tracker names its step only after the save, so an absent step was lost. Where one step is all there is,
        # it was more probably copied out of the run together with the tracker, and nothing is lost here.
        yield replace(
            finding,
            message=f"{names}, which does not exist",
            identity=("tracked", str(tracker)),
            severity=Severity.WARNING if len(run.steps) == 1 else None,
            hint=f"{resume}, or restore {run.folder_of(tracker)}",
        )
    elif run.tracked == "unfinished" and tracker != run.step:
        yield replace(
            finding, message=f"{names}, whose save did not finish", identity=("unfinished", str(tracker)), hint=resume
        )
    # A job that is killed between save and tracker leaves a healthy step ahead of the tracker: no loss, so info.
    elif tracker != "release" and tracker < run.step == newest:
        yield replace(
            finding,
            message=f"{names}, but step {run.step} is newer and finished",
            identity=("newer", str(tracker)),
            severity=Severity.INFO,
            why=f"a resume starts from step {tracker} and repeats the training since then",
            hint=f"{resume}, unless the older step was chosen on purpose",
        )


def _stored_iterations(ckpt: Checkpoint, run: RunFolder | None) -> list[tuple[str, int]]:
    """(file, iteration) for each iteration that the step itself stores, the common state's first."""
    iterations = [] if run is None or run.saved is None else [("train_state.pt", run.saved)]
    value = ckpt.common_value("iteration")
    if ckpt.common is not None and isinstance(value, int) and not isinstance(value, bool):
        iterations.insert(0, (ckpt.common.source, value))
    return iterations


def _number_notes(run: RunFolder, stored: int | None) -> tuple[Note, ...]:
    states = {"unfinished": ", which is not complete", "absent": ", which does not exist"}
    steps = ", ".join(["..."] * (len(run.steps) > 8) + [str(step) for step in run.steps[-8:]])
    sentences = [f"the folder is step {run.step}"]
    sentences += [f"the common state says {stored}"] if stored is not None else []
    if run.tracker is not None:
        sentences.append(f"the tracker points to {run.tracker}{states.get(run.tracked, '')}")
    newest = "none" if run.newest_complete is None else str(run.newest_complete)
    return ("numbers", join_words(sentences)), ("steps", f"{steps or run.step}; newest finished {newest}")


class _Counter(NamedTuple):
    """A step number that is stored inside the step."""

    source: str
    step: int
    level: Severity | None  # if it differs from the folder's number; None if it may count something else than steps
    hint: str
    because: str = ""  # why it must equal the folder's number, where the message does not say enough


def _contradiction(
    ckpt: Checkpoint, folder: int | None, counters: list[_Counter], notes: tuple[Note, ...]
) -> Iterator[Finding]:
    """One finding on all counters that differ from the folder's step; its text is about the most severe."""
    differing = [counter for counter in counters if counter.level is not None and counter.step != folder]
    if not differing:
        return
    lead, *_ = sorted(differing, key=lambda counter: counter.level or Severity.INFO, reverse=True)
    sources_of = grouped((counter.step, counter.source) for counter in counters)
    steps = [f"{step}: {first_names(dict.fromkeys(sources))}" for step, sources in sorted(sources_of.items())]
    is_file = any(file.name == lead.source for file in ckpt.step_files)
    yield Finding(
        f"the folder is named for step {folder}, but {lead.source} says step {lead.step}",
        at=Location(file=lead.source) if is_file else Location(lead.source),
        identity=("step", str(lead.step)),
        severity=lead.level,
        why="a resume picks the step by its folder name, and continues counting from the number inside",
        notes=(("because", lead.because), ("counters", "; ".join(steps) if steps[1:] else ""), *notes),
        hint=lead.hint,
    )


def _claims(ckpt: Checkpoint) -> list[StepClaim]:
    """The step numbers in entries and files of the step, without those of the Trainer, which have their own check."""
    files = [file for file in ckpt.step_files if file.step is not None and file.folder_step is None]
    return [*ckpt.claims, *(StepClaim(file.name, file.step) for file in files if file.step is not None)]


def _rank_disagreements(claims: list[StepClaim]) -> Iterator[Finding]:
    """Findings on files whose names differ only in numbers, such as a rank, and which hold different steps."""
    by_pattern: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for claim in claims:
        by_pattern[_NUMBERS.sub("0", claim.source)][claim.step].append(claim.source)
    for steps in by_pattern.values():
        # One save gives all ranks one step, but nothing says which files are the strangers: the majority is taken as
        # right, and the later step of two with as many files.
        most, *others = sorted(steps, key=lambda step: (-len(steps[step]), -step))
        for step in others:
            claims_it = f"{join_words(steps[step])} {verb(len(steps[step]), 'says')} step {step}"
            yield Finding(
                f"{claims_it}, but {join_words(steps[most])} step {most}",
                at=Location(file=steps[step][0]),
                identity=("ranks", str(step)),
                severity=Severity.WARNING,
                why="each rank of one save writes the same step: these files come from two saves",
                hint=f"copy the files of step {most} again, or resume from another step",
            )


def _level(ckpt: Checkpoint, run: RunFolder, claim: StepClaim) -> tuple[Severity | None, str]:
    """(severity if the number is not the folder's, why it should be); None if it may count something else."""
    if claim.uncounted is not None:
        is_possible = 0 <= claim.step - run.step <= claim.uncounted
        because = f"the counter of this folder may be up to {claim.uncounted} steps behind that one, and never ahead"
        return None if is_possible else Severity.WARNING, because
    for counter in world().one_counter:
        if run.prefix == counter.prefix and counter.entry.fullmatch(claim.source):
            return Severity.WARNING, f"{counter.framework} writes both from one counter"
    # Any other `step` or `global_step` may count batches or epochs, or start anew with each job. It is evidence only
    # if it is the number of another step of this run: chance rarely hits one.
    if claim.step not in run.steps or claim.step == run.step:
        return None, ""
    before = ckpt.before
    # It counted steps in the step before, and has not moved since: the value of that save was stored again.
    # `last_epoch` is excluded: a scheduler that starts anew may reach the number of an earlier step by itself.
    is_step_before = before is not None and before.run is not None and claim.step == before.run.step
    if is_step_before and "last_epoch" not in claim.source and claim in _claims(require(before)):
        return Severity.WARNING, f"in {run.folder_of(claim.step)} the same counter matches the folder"
    because = f"{run.folder_of(claim.step)} is another step of the run; this counter may count something else"
    return Severity.INFO, because
