"""COM002: a step folder, its content and the tracker agree on the step."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint, RunFolder
from ckptlint.rule import Finding, NotApplicable, Note, Severity, rule

_TRACKER = "latest_checkpointed_iteration.txt"


@rule("COM002", "iteration-mismatch", Severity.ERROR)
def iteration_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The number of the step folder, the iteration saved in it and the tracker file disagree.

    What it checks:
        A folder `iter_<number>` holds the iteration of its name in the common state. The tracker
        `latest_checkpointed_iteration.txt` beside it names a step that is there and was finished; a finished step newer
        than the tracked one is a warning, and so is an absent tracked step where one step alone was copied out of a
        run. The run folder is judged from its newest finished step only, so a step chosen by hand stays silent.
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
    if run is None:
        raise NotApplicable("the folder's name is no step of Megatron-LM")
    stored = ckpt.common.values.get("iteration") if ckpt.common is not None else None
    if isinstance(stored, int) and not isinstance(stored, bool) and stored != run.step:
        assert ckpt.common is not None
        yield Finding(
            f"the folder is named for step {run.step}, and {ckpt.common.source} says iteration {stored}",
            file=ckpt.common.source,
            missing=("iteration", str(stored)),
            notes=_numbers(run, stored),
            hint=f"if the content is right, rename the folder to iter_{stored:07d}; otherwise restore the "
            f"{ckpt.common.source} of step {run.step}",
        )
    if run.tracker is None or run.step != run.newest_complete:
        return
    if run.tracked == "absent":
        alone = len(run.steps) == 1
        yield Finding(
            f"{_TRACKER} names step {run.tracker}, which is not there",
            file=_TRACKER,
            missing=("tracked", str(run.tracker)),
            severity=Severity.WARNING if alone else None,
            notes=_numbers(run, stored),
            hint=f"write {run.step} into it to resume from this step, or copy iter_{run.tracker:07d} back",
        )
    elif run.tracked == "unfinished":
        yield Finding(
            f"{_TRACKER} names step {run.tracker}, whose save did not finish",
            file=_TRACKER,
            missing=("unfinished", str(run.tracker)),
            notes=_numbers(run, stored),
            hint=f"write {run.step} into it, the newest step that was finished",
        )
    elif run.tracker < run.step:
        yield Finding(
            f"{_TRACKER} names step {run.tracker}, and this finished step {run.step} is newer",
            file=_TRACKER,
            missing=("newer", str(run.tracker)),
            severity=Severity.WARNING,
            why=f"a resume takes step {run.tracker}, and the training between the two is repeated",
            notes=_numbers(run, stored),
            hint=f"write {run.step} into it, unless the older step was chosen on purpose",
        )


def _numbers(run: RunFolder, stored: object) -> tuple[Note, ...]:
    iteration = stored if isinstance(stored, int) else "not stored"
    shown = [str(step) for step in run.steps[-8:]]
    steps = ", ".join((["..."] if len(run.steps) > 8 else []) + shown)
    tracker = "none" if run.tracker is None else f"{run.tracker} ({run.tracked})"
    newest = "none" if run.newest_complete is None else str(run.newest_complete)
    return (
        ("numbers", f"folder {run.step}, common state {iteration}, tracker {tracker}"),
        ("steps", f"{steps or run.step}; newest finished {newest}"),
    )
