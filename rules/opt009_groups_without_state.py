from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.optimizer.records import optimizer_records
from ckptlint.model import Checkpoint
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import parse

_GROUPS = ("param_groups", "param_to_group_meta")
_ADAM = ".betas"
_GROUP = lazy_pattern(r"param_groups\.\d+\.betas$")


@rule("OPT009", "groups-without-state", Severity.WARNING, whole=True, needs=("sound",))
def groups_without_state(ckpt: Checkpoint) -> Iterator[Finding]:
    """An optimizer that has stepped is stored without any state.

    What it checks:
        Parameter groups with a step above 0 (Megatron-Core), or with betas, which every form of Adam has from its first
        step on, come with at least one tensor or object of state. Groups of optimizers that need no state, such as SGD
        without momentum, are not judged, nor is what a flag of the job says (COM007). A single entry of a parameter is
        only info, since it may be frozen; so is a single group of a job that has not stepped.
    Why it matters:
        A resume finds the optimizer, loads its settings, and continues with zero moments.
    Usual causes:
        A filter of keys dropped the state; the ranks that held it did not save; it was moved elsewhere before the save.
    How to fix:
        Resume from a step that has the state, or load only the weights and warm up again.
    See:
        torch.distributed.checkpoint.state_dict.get_optimizer_state_dict
    """
    inventory = inventory_of(ckpt)
    is_sharded = any("param_state" in key and parse(key).kind == "optimizer" for key in ckpt.objects.keys)
    if inventory.states or inventory.numbered or inventory.buckets or is_sharded:
        raise NotApplicable("there is optimizer state")
    optimizer = [entry.fqn for entry in ckpt.byte_objects if parse(entry.fqn).kind == "optimizer"]
    has_tensors = any(parse(key).kind == "optimizer" for key in ckpt.tensors)
    if has_tensors or any(".state." in f".{name}" for name in optimizer):
        raise NotApplicable("the optimizer has state of a form that is not known")
    is_declared = not optimizer and any(name in ckpt.declared for name in ("save_optim", "no_save_optim"))  # by COM007
    for record in () if is_declared else optimizer_records(ckpt):
        if record.kind == "param_groups" and (step := _step(record.value)):
            yield _finding(record.place.partition(": ")[0], record.place, f"say step {step:,}")
    adam = [name for name in optimizer if name.endswith(_ADAM) and any(word in name for word in _GROUPS)]
    if adam:
        count = "1 entry" if len(adam) == 1 else f"{len(adam)} entries"
        finding = _finding(ckpt.metadata_file, adam[0], f"({count}) have betas, as Adam's do")
        # a key with a name is one parameter, which may be frozen; one with a number is a group of them
        has_stepped = bool(ckpt.run and ckpt.run.step) or any(claim.step > 0 for claim in ckpt.claims)
        is_sure = len(adam) > 1 or (_GROUP.search(adam[0]) is not None and has_stepped)
        yield finding if is_sure else replace(finding, confidence="possible")


def _finding(file: str, place: str, text: str) -> Finding:
    message = f"the parameter groups of an optimizer {text}, but no state of it is stored"
    hint = "load without the optimizer, or use a step that has its state"
    return Finding(message, at=Location(file=file, label=place), identity=("state", place), hint=hint)


def _step(groups: Any) -> int:
    """The highest step in the groups with parameters; 0 if no group has one."""
    if not isinstance(groups, list):
        return 0
    stepped = [group for group in groups if isinstance(group, dict) and group.get("params") != []]
    steps = [step for group in stepped if isinstance(step := group.get("step"), (int, float))]
    return int(max(steps, default=0)) if all(abs(step) < 2**63 for step in steps) else 0
