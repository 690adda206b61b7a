from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.step_before.step_change import KIND_NAMES, changes, older_name, stored_keys
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import at_most, fold_names, plural
from ckptlint.rule import Finding, Location, Severity, require, rule
from ckptlint.vocabulary.keys import parse

_SHOWN = 6


@rule("RUN002", "new-since-step-before", Severity.INFO, whole=True, needs=("step before", "whole step before"))
def new_since_step_before(ckpt: Checkpoint) -> Iterator[Finding]:
    """This step has keys that the step before it does not have.

    What it checks:
        The nearest older finished step of the run has all keys of this step. A new key is only info: optimizer state
        appears with the first gradient of its parameter.
    Why it matters:
        Code that reads the older step does not know these keys.
    Usual causes:
        Somebody added or unfroze a module, or the optimizer made its state at its first step.
    How to fix:
        Nothing, if the change was meant.
    """
    before = require(ckpt.before)
    new = (change for change in changes(stored_keys(before), stored_keys(ckpt)) if change.kind == "new")
    kinds = grouped((parse(fqn).kind, fqn) for change in new for fqn in change.fqns)
    for kind, fqns in kinds.items():
        yield Finding(
            f"{plural(len(fqns), 'new key')} of the {KIND_NAMES[kind]}, not in {older_name(ckpt)}",
            at=Location(label="compared with the step before"),
            identity=(kind,),
            notes=(("new", ", ".join(at_most(fold_names(fqns), _SHOWN, "pattern"))),),
            inferred_from=f"the keys of {older_name(ckpt)}",
        )
