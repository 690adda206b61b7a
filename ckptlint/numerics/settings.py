"""How the optimizer was set when the step was saved: betas, rate, decay and step of each group of parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ckptlint.loaders.optimizer_state import param_groups_in
from ckptlint.model import Checkpoint
from ckptlint.model.facts import fact
from ckptlint.model.tiling import IntArray
from ckptlint.vocabulary.keys import parse

_NAMES = ("params", "betas", "lr", "initial_lr", "weight_decay", "step")
_GROUPS = "param_groups."
_MOST_READS = 8_192


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of one group of parameters; None for what is not stored as a plain number.

    Attributes:
        place: where they are, for people: a file and what is in it, or the key of the group.
        params: the parameters, by name or number as the group lists them; () where it does not.
        betas: of Adam's first and second moment.
        lr, initial_lr: the rate of the next step, and the one that a scheduler started from.
        weight_decay: share of the weight that is taken off per step, times the rate.
        step: steps taken, where the group counts them.
    """

    place: str
    params: tuple[int | str, ...] = ()
    betas: tuple[float, float] | None = None
    lr: float | None = None
    initial_lr: float | None = None
    weight_decay: float | None = None
    step: float | None = None


@fact
def optimizer_settings(ckpt: Checkpoint) -> tuple[GroupSettings, ...]:
    """The groups of all optimizers, as far as their settings were read: those of records at depth headers.

    Source: torch.optim.Optimizer.state_dict; torch.distributed.checkpoint.state_dict, which keys the settings
    `param_groups.<number or parameter>.<setting>`; Megatron-Core's common state; DeepSpeed's `base_optimizer_state`
    """
    groups = [*_of_records(ckpt)]
    sources = [] if ckpt.common is None else [(ckpt.common.source, ckpt.common.values)]
    for source, value in (*sources, *ckpt.object_values.items()):
        groups += [_settings(place, group) for place, group in param_groups_in(source, value)]
    groups += [_settings(place, group) for place, group in ckpt.param_groups]
    return tuple(groups)


def setting_records(ckpt: Checkpoint) -> IntArray:
    """int64 [k], the records that hold the settings which are judged by; none where that takes too many reads.

    Some of them alone would hide the group with the highest rate.
    """
    rows = [item.record for item in ckpt.byte_objects if item.record >= 0 and _setting(item.fqn) is not None]
    return np.array(rows if len(rows) <= _MOST_READS else [], np.int64)


def _of_records(ckpt: Checkpoint) -> Iterator[GroupSettings]:
    if ckpt.payload is None:
        return
    groups: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for entry in ckpt.byte_objects:
        if (setting := _setting(entry.fqn)) is not None:
            content = ckpt.payload.of(entry.record)
            if content is not None and content.value not in (None, ...):
                groups[setting[:2]][setting[2]] = content.value
    for (stem, group), values in groups.items():
        if not group.isdecimal():
            values.setdefault("params", [parse(group).path])
        yield _settings(f"{stem}.{group}", values)


def _setting(key: str) -> tuple[str, str, str] | None:
    """Where the groups are, the group and the name of a setting that is stored under a key of its own.

    >>> _setting("optim.param_groups.layer.weight.lr")
    ('optim.param_groups', 'layer.weight', 'lr')
    """
    rest, _, name = key.rpartition(".")
    before, groups, group = rest.rpartition(_GROUPS)
    return (before + groups[:-1], group, name) if groups and group and name in _NAMES else None


def _settings(place: str, group: Mapping[Any, Any]) -> GroupSettings:
    params, betas = group.get("params"), group.get("betas")
    names = tuple(p for p in params if isinstance(p, (int, str))) if isinstance(params, list) else ()
    pair = None
    if isinstance(betas, (list, tuple)) and len(betas) == 2 and all(map(is_number, betas)):
        pair = (float(betas[0]), float(betas[1])) if 0 <= betas[0] < 1 and 0 < betas[1] < 1 else None
    values = [group.get(name) for name in ("lr", "initial_lr", "weight_decay", "step")]
    return GroupSettings(place, names, pair, *(float(value) if is_number(value) else None for value in values))


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number, finite and no flag, that fits in 64 bits."""
    return type(value) in (int, float) and abs(value) < 2**63  # no NaN is less
