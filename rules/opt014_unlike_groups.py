from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptlint.analysis.optimizer.records import optimizer_records
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, join_words, plural, printable
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_OF_CLASS = {"amsgrad": ("lr", "betas", "eps", "weight_decay"), "nesterov": ("lr", "momentum", "weight_decay")}
"""A setting that only optimizers of one family have -> those that each group of it has."""
_SHOWN = 6


class _Groups(NamedTuple):
    """The parameter groups of one optimizer."""

    file: str
    place: str  # what is in the file, for people
    groups: dict[str, Mapping[Any, Any]]  # name, a number or a parameter -> settings; `...` where one was not read


@rule("OPT014", "unlike-groups", Severity.WARNING, whole=True, needs=("sound",))
def unlike_groups(ckpt: Checkpoint) -> Iterator[Finding]:
    """A parameter group of an optimizer lacks a setting or a step that the others have.

    What it checks:
        Where one group has `lr`, all have it. Groups of Adam and AdamW (with `amsgrad`) all have `lr`, `betas`, `eps`
        and `weight_decay`, and groups of SGD (with `nesterov`) `lr`, `momentum` and `weight_decay`, if one of them
        does. So SGD and AdamW in one state may differ.

        Where an optimizer counts steps in its groups (FusedAdam of Transformer Engine, Megatron-Core), all groups with
        the same settings are at one step. Another step is only info outside of Megatron, since a group may have been
        added later. Groups without parameters are not judged, nor are steps of single parameters.
    Why it matters:
        Without its settings the next step of the optimizer stops. Without its step the group starts again at step 1,
        and the correction of Adam's bias makes its first updates wrong.
    Usual causes:
        The state was loaded into an optimizer with other groups, and saved again. The rank that wrote the groups had no
        parameters of one of them, so it never counted its steps.
    How to fix:
        Give the group the settings and the step of the others, or use an earlier step of the run.
    See:
        pytorch/pytorch#143828, NVIDIA/TransformerEngine#1986
    """
    lists = [*_of_files(ckpt), *_of_keys(ckpt)]
    if not any(len(group_list.groups) > 1 for group_list in lists):
        raise NotApplicable("no optimizer with several parameter groups")
    for group_list in lists:
        yield from _lost_settings(group_list)
        yield from _other_steps(group_list, is_fixed=ckpt.common is not None or ckpt.format == "megatron-legacy")


def _of_files(ckpt: Checkpoint) -> Iterator[_Groups]:
    """The groups in the common state, in objects and in torch files."""
    for record in optimizer_records(ckpt):
        if record.kind == "param_groups" and isinstance(record.value, list):
            yield _Groups(record.place.partition(": ")[0], record.place, _by_number(record.value))
    for file in ckpt.step_files:
        if file.optimizer is not None:
            yield _Groups(file.name, "", _by_number(file.optimizer.groups))
    group_lists: list[_Groups] = []
    for place, group in ckpt.param_groups:
        where, _, number = place.rpartition("[")
        if number == "0]" or not group_lists:  # the next optimizer
            group_lists.append(_Groups(place.partition(": ")[0], where, {}))
        group_lists[-1].groups[number.rstrip("]")] = group
    yield from group_lists


def _by_number(groups: Iterable[Any]) -> dict[str, Mapping[Any, Any]]:
    return {str(number): group for number, group in enumerate(groups) if isinstance(group, dict)}


def _of_keys(ckpt: Checkpoint) -> Iterator[_Groups]:
    """The groups whose settings are entries or tensors of their own: `optim.param_groups.<number or name>.lr`."""
    group_lists: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    records = {entry.fqn: entry.record for entry in ckpt.byte_objects} | dict.fromkeys(ckpt.tensors, -1)
    for key, record in records.items():
        stem, is_group, rest = key.rpartition("param_groups.")
        group, _, name = rest.rpartition(".")
        if is_group and group:
            content = ckpt.payload.of(record) if ckpt.payload is not None and record >= 0 else None
            group_lists[f"{stem}param_groups"][group][name] = content.value if content is not None else ...
    yield from (_Groups(ckpt.metadata_file, stem, {**groups}) for stem, groups in group_lists.items())


def _lost_settings(group_list: _Groups) -> Iterator[Finding]:
    """A finding on the groups that lack settings, for each set of settings that is lost."""
    lost_of: dict[tuple[str, ...], list[str]] = defaultdict(list)
    owner_of = {setting: name for name, group in reversed(group_list.groups.items()) for setting in group}
    for name, group in group_list.groups.items():
        marks = [settings for mark, settings in _OF_CLASS.items() if mark in group]
        wanted = dict.fromkeys(("lr", *(setting for settings in marks for setting in settings)))
        if lost := tuple(setting for setting in wanted if setting in owner_of and setting not in group):
            lost_of[lost].append(name)
    for lost, names in lost_of.items():
        yield Finding(
            f"{_named(names, len(group_list.groups))} no {join_words(lost, 'or')}, which {_owner(owner_of[lost[0]])}",
            at=Location(file=group_list.file, label=group_list.place),
            identity=("settings", group_list.place, *names[:_SHOWN]),
            keys=_keys(group_list, names),
            kind="settings",
            group=f"settings {names} {lost}",
            why="the next step of the optimizer stops, or runs with its defaults",
            hint="save again from an optimizer whose groups are whole, or use an earlier step of the run",
        )


def _other_steps(group_list: _Groups, is_fixed: bool) -> Iterator[Finding]:
    """A finding on the groups that are at another step than the furthest, or have none."""
    alike: dict[frozenset[Any], dict[str, Any]] = defaultdict(dict)
    for name, group in group_list.groups.items():
        if group.get("params") != [] and group.get("step") is not ...:
            alike[frozenset(group.keys() - {"step"})][name] = group.get("step")
    for steps in alike.values():
        counted = {name: step for name, step in steps.items() if type(step) in (int, float)}
        if not counted or not any(type(step) in (int, float) and step > 0 for step in counted.values()):
            continue
        first, most = max(counted.items(), key=lambda item: item[1])
        apart = grouped(
            (step, name) for name, step in steps.items() if step is None or (name in counted and step != most)
        )
        for step, names in apart.items():
            at = "no step" if step is None else f"step {_count(step)}"
            yield Finding(
                f"{_named(names, len(group_list.groups))} {at}, but {_owner(first)} step {_count(most)}",
                at=Location(file=group_list.file, label=group_list.place),
                identity=("step", group_list.place, *names[:_SHOWN]),
                keys=_keys(group_list, names),
                confidence="certain" if is_fixed or step is None else "possible",
                kind="step",
                group=f"step {names} {at} {most}",
                why="a resume corrects the bias of Adam's moments in this group as at another step",
                hint=f"set this step to {_count(most)} before you resume, or use an earlier step of the run",
            )


def _keys(group_list: _Groups, names: list[str]) -> tuple[str, ...]:
    """The groups as ignores name them: `optimizer.param_groups.1`."""
    stem = group_list.place.rpartition(": ")[2].removesuffix("param_groups").rstrip(".")
    return tuple(".".join(filter(None, (stem, "param_groups", name))) for name in names)


def _named(names: list[str], total: int) -> str:
    """Groups as the begin of a sentence; where torch flattened the state, each parameter has settings of its own."""
    if names[0].isdecimal() and len(names) == 1:
        return f"parameter group {names[0]} of {total:,} has"
    shown = first_names(map(printable, names), _SHOWN)
    if names[0].isdecimal():
        return f"{plural(len(names), 'parameter group')} of {total:,} ({shown}) have"
    return f"the settings of {len(names):,} of {total:,} parameters ({shown}) have"


def _owner(name: str) -> str:
    return f"group {name} has" if name.isdecimal() else f"those of {printable(name)} have"


def _count(step: float) -> str:
    return f"{step:,}".removesuffix(".0")
