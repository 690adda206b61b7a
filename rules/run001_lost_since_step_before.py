from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ckptlint.analysis.step_before.step_change import KIND_NAMES, changes, older_name, stored_keys
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_few, plural, printable
from ckptlint.rule import Finding, Location, Severity, require, rule
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.parts import part_of_file

_PLACE = "compared with the step before"


@rule("RUN001", "lost-since-step-before", Severity.WARNING, whole=True, needs=("step before", "whole step before"))
def lost_since_step_before(ckpt: Checkpoint) -> Iterator[Finding]:
    """This step lacks keys or files that the step before it has.

    What it checks:
        Every tensor, object, bytes entry, kind of side file and state in an optimizer's file of the nearest older
        finished step of the run is here too. What is gone while its siblings stay is a warning: one layer, one
        moment, the random state of a step that keeps its optimizer. What is gone with everything of its kind (a
        module of the model, the whole optimizer) is info. If more than half of the model's keys are gone, one
        finding says so; it is only info if all of them are, because then somebody renamed them.
    Why it matters:
        A resume from this step loads without these values, or stops at the first missing one.
    Usual causes:
        A plan reused after the structure changed, a save incomplete from the second step on, a rank
        that never saved its part, a rotation that removed files.
    How to fix:
        Compare with `ckptlint diff OLDER THIS`, and resume from the older step unless the change was meant.
    See:
        pytorch#149785, nvidia-resiliency-ext#359, transformers#31034, Megatron-LM#4378
    """
    before = require(ckpt.before)
    was, now = stored_keys(before), stored_keys(ckpt)
    gone = [change for change in changes(was, now) if change.kind == "gone"]
    kinds = Counter(parse(fqn).kind for fqn in was)
    kept = {parse(fqn).kind for fqn in now}
    lost = sum(len(change.fqns) for change in gone if parse(change.fqns[0]).kind == "model")
    if lost * 2 > kinds["model"]:
        yield _renamed(ckpt, was, now, lost, kinds["model"])
    for kind in kinds.keys() - kept - {"model"}:
        count = plural(kinds[kind], "such key")
        yield Finding(
            f"no part of the {KIND_NAMES[kind]} is stored here; {older_name(ckpt)} has {count}",
            at=Location(label=_PLACE),
            identity=("kind", kind),
            severity=Severity.INFO if kind == "optimizer" or "optimizer" not in kept else None,
            inferred_from=f"the keys of {older_name(ckpt)}",
        )
    for change in gone:
        kind = parse(change.fqns[0]).kind
        if kind in kept and not (kind == "model" and lost * 2 > kinds["model"]):
            for fqn in change.fqns:
                yield Finding(
                    change.sentence("stored here", older_name(ckpt)),
                    at=Location(fqn, label=_PLACE),
                    confidence="certain" if change.is_partial else "possible",
                    notes=(("because", change.rest),),
                    hint="resume from the older step, unless the job leaves it out on purpose" * change.is_partial,
                    inferred_from=f"the keys of {older_name(ckpt)}",
                    group=f"gone {change.fqns[0]}",
                )
    yield from _files(ckpt, before, keeps_optimizer="optimizer" in kept)


def _renamed(ckpt: Checkpoint, was: Mapping[str, object], now: Mapping[str, object], lost: int, model: int) -> Finding:
    """The finding that most keys of the model are gone: it is another model, or its keys were renamed."""
    new = [fqn for fqn in now if fqn not in was and parse(fqn).kind == "model"]
    paths = {parse(fqn).path for fqn in was if fqn not in now}
    same = sum(parse(fqn).path in paths for fqn in new)
    return Finding(
        f"{lost:,} of the model's {plural(model, 'key')} in {older_name(ckpt)} are missing here",
        at=Location(label=_PLACE),
        identity=("renamed", str(lost)),
        confidence="possible" if lost == model and new else "certain",
        notes=(
            ("new", f"{plural(len(new), 'key')} that {older_name(ckpt)} does not have"),
            ("because", f"{same:,} differ only in a wrapper's name, such as {new[0]}" if same else ""),
        ),
        why="a load that uses the older keys finds none of them",
        hint="resume with the code that wrote this step, or rename the keys",
        inferred_from=f"the keys of {older_name(ckpt)}",
    )


def _files(ckpt: Checkpoint, before: Checkpoint, keeps_optimizer: bool) -> Iterator[Finding]:
    """Families of files that the step before has and this one lacks."""
    here = {file.family for file in ckpt.step_files}
    names: dict[str, str] = {}
    for file in before.step_files:
        part = part_of_file(file.family)
        # in a folder: an export, which somebody makes of one step; or a state that COM001 misses with its folder
        is_inner = part in ("model", None) and "/" in file.name
        if file.family not in here and (part or file.family == "trainer state") and not is_inner:
            names.setdefault(file.family, file.name)
    is_meant = "optimizer state" in names and not keeps_optimizer
    for family, name in names.items():
        yield Finding(
            f"there is no {family} here; {older_name(ckpt)} has {name}",
            at=Location(file=name),
            identity=("family", family),
            confidence="possible" if is_meant else "certain",
            notes=(("because", "the optimizer is missing too: this step may hold only the model" * is_meant),),
            hint="" if is_meant else "resume from the older step, or copy the file from where this step was written",
            inferred_from=f"the files of {older_name(ckpt)}",
        )
    yield from _states(ckpt, before)


def _states(ckpt: Checkpoint, before: Checkpoint) -> Iterator[Finding]:
    """Parameters that have a state in the optimizer's file of the step before, and none in this one."""
    older = {file.name: file.optimizer for file in before.step_files if file.optimizer is not None}
    for file in ckpt.step_files:
        now, was = file.optimizer, older.get(file.name)
        # an optimizer drops no state; one whose groups list others was made anew, and one without any is told by OPT008
        if now is None or was is None or now.params != was.params or not now.shapes:
            continue
        if lost := [str(param) for param in was.shapes if param not in now.shapes]:
            yield Finding(
                f"{file.name} has no state for {len(lost):,} of its {plural(len(now.params), 'parameter')}; "
                f"{older_name(ckpt)} has it",
                at=Location(file=file.name),
                identity=("states", file.name),
                notes=(("parameters", first_few([printable(param) for param in lost])),),
                why="a resume continues with zero moments there",
                hint="resume from the older step",
                inferred_from=f"the files of {older_name(ckpt)}",
            )
