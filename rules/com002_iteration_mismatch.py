"""COM002: a step folder, its content and the tracker agree on the step."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint, RunFolder
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule

_TRAIN_STATE = "train_state.pt"


@rule("COM002", "iteration-mismatch", Severity.ERROR)
def iteration_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The number of the step folder, the iteration saved in it and the tracker file disagree.

    What it checks:
        A folder `iter_<number>` holds the iteration of its name in the common state, or in Megatron-Bridge's
        `train_state.pt`. The tracker beside it (`latest_checkpointed_iteration.txt` of Megatron-LM, Megatron-Bridge,
        slime and verl, `dlrover_latest.txt`) names a step that is there and was finished, or `release`; a finished step
        newer than the tracked one is a warning, and so is an absent tracked step where one step alone was copied out of
        a run. The `global_step` of a `trainer_state.json` is the number of its folder `checkpoint-<number>`, or a
        warning. The run folder is judged from its newest finished step only, so a step chosen by hand stays silent.
    Why it matters:
        A resume takes the tracked step and counts on from the iteration in its common state, whatever the folder is
        called.
    Usual causes:
        A renamed or copied step folder, a save that was interrupted before the tracker was written, a tracker that was
        not reduced over the ranks.
    How to fix:
        Correct the tracker to the newest finished step, and give a renamed folder its own number back.
    See:
        megatron.training.checkpointing.read_metadata
    """
    run = ckpt.run
    states = [file for file in ckpt.step_files if file.step is not None and file.folder_step is not None]
    if run is None and not states:
        raise NotApplicable("the folder's name is no step of a run with a tracker")
    for file in states:
        if file.step != file.folder_step:
            yield Finding(
                f"the folder is named for step {file.folder_step}, and {file.name} says step {file.step}",
                at=Location(file=file.name),
                missing=("global_step", str(file.step)),
                severity=Severity.WARNING,
                why="the Trainer finds a step by the number of its folder, and counts on from the number in the file",
                hint=f"rename the folder to checkpoint-{file.step}, or restore the {file.name} of its step",
            )
    if run is None:
        return
    kept = _stored(ckpt, run)
    stored = kept[0][1] if kept else None
    for source, iteration in kept:
        if iteration != run.step and run.prefix == "iter_":
            yield Finding(
                f"the folder is named for step {run.step}, and {source} says iteration {iteration}",
                at=Location(file=source),
                missing=("iteration", str(iteration)),
                notes=_numbers(run, iteration),
                hint=f"if the content is right, rename the folder to {run.folder_of(iteration)}; otherwise restore the "
                f"{source} of step {run.step}",
            )
    if run.tracker is None or run.step != run.newest_complete:
        return
    named = run.tracker if run.tracker == "release" else f"step {run.tracker}"
    if run.tracked == "absent":
        alone = len(run.steps) == 1
        yield Finding(
            f"{run.tracker_file} names {named}, which is not there",
            at=Location(file=run.tracker_file),
            missing=("tracked", str(run.tracker)),
            severity=Severity.WARNING if alone else None,
            notes=_numbers(run, stored),
            hint=f"write {run.step} into it to resume from this step, or copy {run.folder_of(run.tracker)} back",
        )
    elif run.tracked == "unfinished":
        yield Finding(
            f"{run.tracker_file} names {named}, whose save did not finish",
            at=Location(file=run.tracker_file),
            missing=("unfinished", str(run.tracker)),
            notes=_numbers(run, stored),
            hint=f"write {run.step} into it, the newest step that was finished",
        )
    elif run.tracker != "release" and run.tracker < run.step:
        yield Finding(
            f"{run.tracker_file} names step {run.tracker}, and this finished step {run.step} is newer",
            at=Location(file=run.tracker_file),
            missing=("newer", str(run.tracker)),
            severity=Severity.WARNING,
            why=f"a resume takes step {run.tracker}, and the training between the two is repeated",
            notes=_numbers(run, stored),
            hint=f"write {run.step} into it, unless the older step was chosen on purpose",
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
