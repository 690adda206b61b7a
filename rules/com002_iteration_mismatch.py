"""COM002: a step folder, its content and the tracker agree on the step."""

from __future__ import annotations

import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from ckptlint.analysis.inventory import inventory_of
from ckptlint.analysis.numbered_files import is_one_of_several
from ckptlint.model import Checkpoint, RunFolder, StepClaim
from ckptlint.model.text import listed
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.dtypes import FORMS
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
        than the tracked one is info: a job that is killed between save and tracker leaves a healthy run. That is the
        run's: it is told when the run folder is checked, no step fails for it, and a step that is named by itself is
        not compared with the tracker.

        A number inside the step that differs from the folder's is a warning if the library takes both from one counter:
        `global_step` of a `trainer_state.json` in `checkpoint-<number>`, `train_state.step` of torchtitan in
        `step-<number>`, `global_step` in `train/rank*.pt` of OLMo-core in `step<number>`, and `global_step` of a
        `trainer_state.json` beside DeepSpeed's `global_step<number>`. Other counters (`step`, `global_step`,
        `last_epoch` of a scheduler, Adam's own `step`, in the records at depth `headers`) may count batches or start
        anew. They are info if they have the number of another step of the run, and a warning if they have not moved
        since the step before, with which they agreed. Files of ranks that are called alike and say different steps
        are a warning.
    Why it matters:
        A resume takes the tracked step and counts on from the iteration saved in it, whatever the folder is called.
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
    for file in states:
        if file.step != file.folder_step:
            yield Finding(
                f"the folder is named for step {file.folder_step}, but {file.name} says step {file.step}",
                at=Location(file=file.name),
                missing=("global_step", str(file.step)),
                severity=Severity.WARNING,
                why="the Trainer finds a step by the number of its folder, and counts on from the number in the file",
                hint=f"rename the folder to checkpoint-{file.step}, or restore the {file.name} of its step",
            )
    if run is None:
        return
    if run.tracker is None and run.prefix != "iter_" and not claims and ckpt.payload is None:
        raise NotApplicable("nothing but the folder's name says which step this is")
    yield from _counted(ckpt, run, claims)
    kept = _stored(ckpt, run)
    stored = kept[0][1] if kept else None
    for source, iteration in kept:
        if iteration != run.step and run.prefix == "iter_":
            yield Finding(
                f"the folder is named for step {run.step}, but {source} says iteration {iteration}",
                at=Location(file=source),
                missing=("iteration", str(iteration)),
                notes=_numbers(run, iteration),
                hint=f"if the content is right, rename the folder to {run.folder_of(iteration)}; otherwise restore the "
                f"{source} of step {run.step}",
            )
    if run.tracker is not None and run.is_asked:
        yield from _tracked(run, run.tracker, _numbers(run, stored))


def _tracked(run: RunFolder, tracker: int | Literal["release"], notes: tuple[Note, ...]) -> Iterator[Finding]:
    """What is wrong with the step that the tracker names: a fault of the run."""
    named, newest = tracker if tracker == "release" else f"step {tracker}", run.newest_complete
    finding = Finding("", at=Location(file=run.tracker_file), notes=notes, of_run=True)
    resume = "copy the step back" if newest is None else run.tracking(newest)
    if run.tracked == "absent":
        alone = len(run.steps) == 1
        yield replace(
            finding,
            message=f"{run.tracker_file} names {named}, which is not there",
            missing=("tracked", str(tracker)),
            severity=Severity.WARNING if alone else None,
            hint=f"{resume} to resume from this step, or copy {run.folder_of(tracker)} back",
        )
    elif run.tracked == "unfinished" and tracker != run.step:
        yield replace(
            finding,
            message=f"{run.tracker_file} names {named}, whose save did not finish",
            missing=("unfinished", str(tracker)),
            hint=f"{resume}, the newest finished step",
        )
    elif tracker != "release" and tracker < run.step == newest:
        yield replace(
            finding,
            message=f"{run.tracker_file} names step {tracker}, but this finished step {run.step} is newer",
            missing=("newer", str(tracker)),
            severity=Severity.INFO,
            why=f"a resume starts from step {tracker} and repeats the training since then",
            hint=f"{resume}, unless somebody chose the older step on purpose",
        )


def _stored(ckpt: Checkpoint, run: RunFolder) -> list[tuple[str, int]]:
    """The iterations that were saved in the step, each with where."""
    found = [] if run.saved is None else [(_TRAIN_STATE, run.saved)]
    value = ckpt.common.values.get("iteration") if ckpt.common is not None else None
    if ckpt.common is not None and isinstance(value, int) and not isinstance(value, bool):
        found.insert(0, (ckpt.common.source, value))
    return found


def _numbers(run: RunFolder, stored: int | None) -> tuple[Note, ...]:
    iteration = "not stored" if stored is None else stored
    shown = [str(step) for step in run.steps[-8:]]
    steps = ", ".join((["..."] if len(run.steps) > 8 else []) + shown)
    tracker = "none" if run.tracker is None else f"{run.tracker} ({run.tracked})"
    newest = "none" if run.newest_complete is None else str(run.newest_complete)
    return (
        ("numbers", f"folder {run.step}, common state {iteration}, tracker {tracker}"),
        ("steps", f"{steps or run.step}; newest finished {newest}"),
    )


# ---------------------------------------------------------------- other counters


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
                f"{listed(steps[step])} {verb} step {step}, but {listed(steps[most])} step {most}",
                at=Location(file=steps[step][0]),
                missing=("ranks", str(step)),
                severity=Severity.WARNING,
                why="each rank of one save writes the same step: these files are of two saves",
                hint=f"copy the files of step {most} again, or resume from another step",
            )


def _counted(ckpt: Checkpoint, run: RunFolder, claims: list[StepClaim]) -> Iterator[Finding]:
    """The numbers that differ from the folder's, each once, with the surest of those that say it."""
    told: set[int] = {run.step}
    judged = [(claim, *_level(ckpt, run, claim)) for claim in claims]
    for claim, level, because in sorted(judged, key=lambda item: item[1] or Severity.INFO, reverse=True):
        if claim.step in told or level is None:
            continue
        told.add(claim.step)
        is_file = any(file.name == claim.source for file in ckpt.step_files)
        yield Finding(
            f"the folder is named for step {run.step}, but {claim.source} says step {claim.step}",
            at=Location(file=claim.source) if is_file else Location(claim.source),
            missing=("claim", str(claim.step)),
            severity=level,
            why="a resume finds the step by its folder, and counts on from the number inside",
            notes=(("because", because),),
            hint=f"compare it with step {claim.step} before you resume",
        )
    if not told & {number for number in run.steps if number != run.step}:
        yield from _adam(ckpt, run)


def _level(ckpt: Checkpoint, run: RunFolder, claim: StepClaim) -> tuple[Severity | None, str]:
    """How sure it is that the number should be the folder's, and why; None for a counter that may count otherwise."""
    for counter in world().one_counter:
        if run.prefix == counter.prefix and counter.entry.fullmatch(claim.source):
            return Severity.WARNING, f"{counter.framework} takes both from one counter"
    if claim.step not in run.steps or claim.step == run.step:
        return None, ""
    before = ckpt.before
    if before is not None and before.run is not None and "last_epoch" not in claim.source:
        stood = claim.step == before.run.step and claim in _claims(before)
        if stood:
            return Severity.WARNING, f"{run.folder_of(claim.step)} says the same, and it is step {claim.step}"
    return (
        Severity.INFO,
        f"{run.folder_of(claim.step)} is another step of the run; this counter may count something else",
    )


def _adam(ckpt: Checkpoint, run: RunFolder) -> Iterator[Finding]:
    """Adam's own count, where it is the number of another step; told by the checksums of its records."""
    payload = ckpt.payload
    if payload is None:
        return
    states = [state for state in inventory_of(ckpt).states if state.what == "step" and state.tensor.volume == 1]
    rows = [(state.tensor, int(row)) for state in states for row in state.tensor.chunks.record if row >= 0]
    found = {(tensor.dtype, int(payload.crc[row])) for tensor, row in rows if payload.crc[row] > 0}
    if len(found) != 1 or (form := FORMS.get(dtype := next(iter(found))[0])) is None:
        return  # parameters lag: RUN006 tells where that is a fault
    known = {(dtype, zlib.crc32(struct.pack(form, number))): number for number in run.steps}
    step = known.get(next(iter(found)), run.step)
    if step != run.step:
        yield Finding(
            f"the folder is named for step {run.step}, but the optimizer is at step {step}",
            at=Location(states[0].tensor.fqn, states[0].tensor),
            missing=("adam", str(step)),
            severity=Severity.INFO,
            notes=(
                ("because", f"{run.folder_of(step)} is another step of the run; Adam does not count skipped steps"),
            ),
            hint=f"compare it with step {step} before you resume",
            inferred_from="the checksum of Adam's step",
        )
