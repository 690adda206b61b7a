from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptlint.analysis.optimizer.records import optimizer_records
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import join_words, printable
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.config_fields import is_scalar

_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_COMPARED = ("max_lr", "min_lr", "start_wd", "end_wd", "lr", "weight_decay")


@rule("COM005", "param-group-collision", Severity.WARNING)
def param_group_collision(ckpt: Checkpoint) -> Iterator[Finding]:
    """Loaders cannot tell two parameter groups apart, yet their learning rates or decays differ.

    What it checks:
        In each list of Megatron-Core's parameter groups, two groups with equal wd_mult, lr_mult, is_expert_parallel and
        is_decoupled_lr also have equal max_lr, min_lr, start_wd, end_wd, lr and weight_decay. Groups that differ in
        none of these fields are only info. Groups of different chains or modules are never compared.
    Why it matters:
        Loaders that match groups by these four fields give one group the learning rate or decay of the other.
    Usual causes:
        The groups differ only in their learning rate or decay, and the loader's identity of a group lacks max_lr and
        min_lr.
    How to fix:
        Load with a version that also matches groups by max_lr and min_lr, or give the groups different multipliers.
    See:
        megatron.core.optimizer.optimizer.MegatronOptimizer._filter_and_reorder_param_groups
    """
    identified = []
    for record in optimizer_records(ckpt):
        if record.kind == "param_groups" and isinstance(record.value, list):
            groups = {number: group for number, group in enumerate(record.value) if _is_identified(group)}
            identified += [(record, groups)] if groups else []
    if not identified:
        raise NotApplicable("no parameter groups of Megatron-Core were found")
    for record, groups in identified:
        same = grouped((tuple(group[name] for name in _IDENTITY), number) for number, group in groups.items())
        for identity, numbers in same.items():
            if len(numbers) < 2:
                continue
            fields = [name for name in _COMPARED if len({_value(groups[n], name) for n in numbers}) > 1]
            equal = ", ".join(f"{name} {_text(value)}" for name, value in zip(_IDENTITY, identity, strict=True))
            title = record.module.title
            yield Finding(
                f"parameter groups {join_words([*map(str, numbers)])}{' of ' + title if title else ''} "
                + (f"differ only in {join_words(fields)}" if fields else "cannot be told apart"),
                at=Location(file=record.place.partition(": ")[0], label=record.place),
                identity=(title, *fields),
                severity=None if fields else Severity.INFO,
                why="" if fields else "a loader that matches groups by these fields uses one for both",
                notes=(
                    ("equal", equal),
                    *((name, ", ".join(_text(_value(groups[n], name)) for n in numbers)) for name in fields),
                    ("sizes", _sizes(groups, numbers)),
                ),
                hint="load with a Megatron-Core that also matches groups by max_lr and min_lr, then compare their rates"
                if fields
                else "",
            )


def _is_identified(group: Any) -> bool:
    return isinstance(group, dict) and all(is_scalar(group.get(name)) for name in _IDENTITY)


def _value(group: dict[Any, Any], name: str) -> Any:
    value = group.get(name)
    return value if is_scalar(value) else None


def _text(value: Any) -> str:
    return printable(str(value))[:40]


def _sizes(groups: dict[int, dict[Any, Any]], numbers: list[int]) -> str:
    """The numbers of parameters of these groups, as text; "" if a group does not list them."""
    params = [groups[number].get("params") for number in numbers]
    counts = [f"{len(group):,}" for group in params if isinstance(group, list)]
    return f"{join_words(counts)} parameters" if len(counts) == len(params) else ""
