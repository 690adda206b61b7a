"""Drawn losses of state are told once and by what they are, whoever wrote the save; what looks alike is silent."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loss_saves import LAYOUTS, WRITTEN, Change, Save, State, flat, fused, named, trained, trained_model, with_change
from support import SWEEP, report_on
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

SEED = 81
COUNT = int(os.environ.get("LOSSES", 36 if SWEEP else 12))
"""Damages of each kind: `LOSSES=300 pytest tests/rules/test_drawn_losses.py`."""
MEGATRON = tuple(name for name in WRITTEN if name.startswith("megatron"))
DEEPSPEED = tuple(name for name in WRITTEN if name.startswith("deepspeed"))


class Kind(NamedTuple):
    """One thing that an optimizer's state loses.

    Attributes:
        code: of the rule that tells it.
        layouts: in which the damages are written.
        made: what the job saves before the damage.
        damages, traps: each returns what has to be said, a regular expression; "" for what may stay silent.
    """

    code: str
    layouts: tuple[str, ...]
    made: Callable[[random.Random], Save]
    damages: dict[str, Change]
    traps: dict[str, Change]


def some(draw: random.Random, state: State, most: int = 99) -> list[int]:
    """Numbers of some groups, not of all."""
    numbers = [*range(len(state["param_groups"]))]
    return sorted(draw.sample(numbers, draw.randint(1, min(most, len(numbers) - 1))))


OTHER = r"(group \d has|those of \S+ have)"


def named_groups(state: State, numbers: list[int]) -> str:
    total = len(state["param_groups"])
    if len(numbers) == 1:
        groups = rf"parameter group {numbers[0]} of {total} has"
    else:
        groups = rf"{len(numbers)} parameter groups of {total} \({', '.join(map(str, numbers))}\) have"
    params = sum(len(state["param_groups"][number].get("params", ())) for number in numbers)
    return rf"({groups}|the settings of {params} of \d+ parameters \(.+\) have)"


# ---------------------------------------------------------------- groups at other steps


def with_step(state: State, draw: random.Random, step: Any, most: int = 99) -> str:
    numbers = some(draw, state, most)
    highest = int(state["param_groups"][0]["step"])
    for number in numbers:
        if step is ...:
            del state["param_groups"][number]["step"]
        else:
            state["param_groups"][number]["step"] = step
    at = "no step" if step in (None, ...) else f"step {step:,}"
    return rf"{named_groups(state, numbers)} {at}, but {OTHER} step {highest:,}\b"


def step_of_null(state: State, draw: random.Random) -> str:
    return with_step(state, draw, None)


def step_gone(state: State, draw: random.Random) -> str:
    return with_step(state, draw, ...)


def step_of_1(state: State, draw: random.Random) -> str:
    return with_step(state, draw, 1)


def step_of_0(state: State, draw: random.Random) -> str:
    return with_step(state, draw, 0)


def step_behind(state: State, draw: random.Random) -> str:
    return with_step(state, draw, int(state["param_groups"][0]["step"]) - draw.randint(1, 3))


def step_as_float(state: State, draw: random.Random) -> str:
    return with_step(state, draw, 2.0).replace("2.0", "2")


def steps_as_tensors(state: State, draw: random.Random) -> str:
    for group in state["param_groups"]:
        group["step"] = torch.tensor(float(group["step"]))
    return ""


def no_steps(state: State, draw: random.Random) -> str:
    for group in state["param_groups"]:
        group.pop("step", None)
    return ""


def empty_group(state: State, draw: random.Random) -> str:
    state["param_groups"].append(state["param_groups"][0] | {"params": [], "step": None})
    return ""


def another_optimizers_group(state: State, draw: random.Random) -> str:
    group = state["param_groups"][-1]
    group |= {"momentum": 0.9, "nesterov": True, "step": 3}
    return ""


def as_it_is(state: State, draw: random.Random) -> str:
    return ""


# ---------------------------------------------------------------- groups without settings


def without(state: State, draw: random.Random, names: tuple[str, ...]) -> str:
    numbers = some(draw, state)
    for number in numbers:
        for name in names:
            del state["param_groups"][number][name]
    lost = [name for name in ("lr", "betas", "eps", "weight_decay") if name in names]
    last = f"{', '.join(lost[:-1])} or {lost[-1]}" if len(lost) > 1 else lost[0]
    return rf"{named_groups(state, numbers)} no {last}, which {OTHER}$"


def no_rate(state: State, draw: random.Random) -> str:
    return without(state, draw, ("lr",))


def no_settings(state: State, draw: random.Random) -> str:
    return without(state, draw, ("lr", "betas", "eps", "weight_decay"))


def no_betas(state: State, draw: random.Random) -> str:
    return without(state, draw, ("betas", "eps"))


def no_decay(state: State, draw: random.Random) -> str:
    return without(state, draw, ("weight_decay",))


def sgd_beside(state: State, draw: random.Random) -> str:
    """A group as torch.optim.SGD has it: two optimizers in one state."""
    held = state["param_groups"][-1]
    settings = torch.optim.SGD([torch.zeros(1)], lr=1e-2, momentum=0.9).state_dict()["param_groups"][0]
    for name in ("amsgrad", "betas", "eps", "decoupled_weight_decay", "capturable"):
        held.pop(name, None)
    held |= {name: value for name, value in settings.items() if name != "params"}
    return ""


def extra_setting(state: State, draw: random.Random) -> str:
    state["param_groups"][0]["initial_lr"] = 1e-3
    state["param_groups"][-1]["name"] = "norms"
    return ""


def rate_of_0(state: State, draw: random.Random) -> str:
    state["param_groups"][0] |= {"lr": 0.0, "weight_decay": 0}
    return ""


# ---------------------------------------------------------------- counters in 16 bits


def cast(state: State, dtype: torch.dtype, names: tuple[str, ...], every: int = 1) -> int:
    count = 0
    for number, of_param in enumerate(state["state"].values()):
        for name in names:
            if name in of_param and number % every == 0:
                of_param[name] = of_param[name].to(dtype)
                count += name == "step"
    return count


def counters(state: State, dtype: torch.dtype, limit: int, names: tuple[str, ...] = ("step",), every: int = 1) -> str:
    highest = max(float(of_param["step"]) for of_param in state["state"].values())
    count = cast(state, dtype, names, every)
    said = rf"({count}|{2 * count}) step counters? (is|are) {str(dtype)[6:]}, which counts to {limit:,}"  # two ranks
    return said if highest >= limit else ""


ALL = ("step", "exp_avg", "exp_avg_sq")


def all_bf16(state: State, draw: random.Random) -> str:
    return counters(state, torch.bfloat16, 256, ALL)


def counters_bf16(state: State, draw: random.Random) -> str:
    return counters(state, torch.bfloat16, 256)


def all_fp16(state: State, draw: random.Random) -> str:
    return counters(state, torch.float16, 2048, ALL)


def counters_fp16(state: State, draw: random.Random) -> str:
    return counters(state, torch.float16, 2048)


def some_bf16(state: State, draw: random.Random) -> str:
    return counters(state, torch.bfloat16, 256, every=2)


def one_bf16(state: State, draw: random.Random) -> str:
    return counters(state, torch.bfloat16, 256, every=99)


def moments_bf16(state: State, draw: random.Random) -> str:
    cast(state, torch.bfloat16, ALL[1:])
    return ""


def counters_fp64(state: State, draw: random.Random) -> str:
    cast(state, torch.float64, ALL[:1])
    return ""


def counters_int64(state: State, draw: random.Random) -> str:
    cast(state, torch.int64, ALL[:1])
    return ""


# ---------------------------------------------------------------- an optimizer that never stepped


def dummy(state: State, draw: random.Random, count: float = 1, keep: str = "") -> str:
    for of_param in state["state"].values():
        of_param["step"] = torch.full_like(of_param["step"], count)
        for name in ALL[1:]:
            if name != keep:
                of_param[name] = torch.zeros_like(of_param[name])
    total = len(state["state"])
    return rf"all {2 * total} moments are zero and {total} counters of the optimizer say 1, but the job is at step"


def dummy_state(state: State, draw: random.Random) -> str:
    return dummy(state, draw)


def dummy_state_bf16(state: State, draw: random.Random) -> str:
    said = dummy(state, draw)
    cast(state, torch.bfloat16, ALL[1:])
    return said


def dummy_with_amsgrad(state: State, draw: random.Random) -> str:
    said = dummy(state, draw)
    for of_param in state["state"].values():
        of_param["max_exp_avg_sq"] = torch.zeros_like(of_param["exp_avg"])
    return said


def one_moment_kept(state: State, draw: random.Random) -> str:
    """A warm restart: what was reset by hand and stepped once."""
    for of_param in state["state"].values():
        of_param["step"] = torch.ones_like(of_param["step"])
    return ""


def a_frozen_part(state: State, draw: random.Random) -> str:
    """Parameters without gradients from the start, which count and have zeros."""
    for number, of_param in state["state"].items():
        if number % 3 == 0:
            of_param |= {name: torch.zeros_like(of_param[name]) for name in ALL[1:]}
    return ""


def changes(*functions: Change) -> dict[str, Change]:
    return {function.__name__: function for function in functions}


TORCH = tuple(LAYOUTS)
KINDS = {
    "steps": Kind(
        "OPT014",
        (*TORCH, *MEGATRON),
        lambda draw: fused(trained(draw.choice([10, 300, 20_000]))),
        changes(step_of_null, step_gone, step_of_1, step_of_0, step_behind, step_as_float),
        changes(as_it_is, steps_as_tensors, no_steps, empty_group, another_optimizers_group),
    ),
    "settings": Kind(
        "OPT014",
        (*TORCH, *(name for name in MEGATRON if name in ("megatron", "megatron_legacy")), *DEEPSPEED),
        lambda draw: trained(draw.choice([10, 300])),
        changes(no_rate, no_settings, no_betas, no_decay),
        changes(as_it_is, sgd_beside, extra_setting, rate_of_0, empty_group),
    ),
    "counters": Kind(
        "OPT015",
        (*TORCH, *DEEPSPEED),
        lambda draw: trained(draw.choice([256, 300, 4000])),
        changes(all_bf16, counters_bf16, all_fp16, counters_fp16, some_bf16, one_bf16),
        changes(as_it_is, moments_bf16, counters_fp64, counters_int64),
    ),
    "dummy": Kind(
        "OPT013",
        TORCH,
        lambda draw: trained(draw.choice([2, 300, 4000])),
        changes(dummy_state, dummy_state_bf16, dummy_with_amsgrad),
        changes(as_it_is, one_moment_kept, a_frozen_part),
    ),
}
AT_LEAST_INFO = {"step_of_1", "step_of_0", "step_behind", "step_as_float"}
"""What is only info outside of Megatron, where a group may have been added later."""


def told(place: Path) -> list[tuple[str, str]]:
    """(code, sentence) of each group of like findings that are more than information."""
    groups = [one for report in report_on(place, depth="data").checkpoints for one in report.groups]
    return [(one.lead.code, one.lead.title) for one in groups if one.lead.severity.label != "info"]


def said_of(kind: Kind, name: str, change: Change, layout: str, number: int, place: Path) -> str:
    """What is wrong in what is said of a case; "" for nothing."""
    draw = random.Random(f"{name} {layout} {number}")
    if layout in WRITTEN:
        wanted = with_change(layout, place, change, draw)
    else:
        save = kind.made(draw)
        wanted = change(save.optimizer, draw)
        LAYOUTS[layout](place / f"checkpoint-{save.step}", save)
    loud = told(place)
    if not wanted or (name in AT_LEAST_INFO and layout not in MEGATRON):
        return f"{loud}" if loud else ""
    right = [code for code, said in loud if code == kind.code and re.search(wanted, said)]
    return "" if len(right) == len(loud) == 1 else f"{wanted}: {loud}"


def test_states_by_name_are_those_of_torch() -> None:
    model, optimizer, *_ = trained_model(3)
    save = trained(3)
    for made, is_flat in ((named(save), False), (flat(save), True)):
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        assert repr(made) == repr(get_optimizer_state_dict(model, optimizer, options=options))


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_losses_of_an_optimizer_are_told_once(kind: str, tmp_path: Path) -> None:
    draw, wrong = random.Random(SEED), []
    every = {**KINDS[kind].damages, **KINDS[kind].traps}
    names = sorted(every)
    for number in range(COUNT):
        name = names[number % len(names)]
        layout = draw.choice(KINDS[kind].layouts)
        if said := said_of(KINDS[kind], name, every[name], layout, number, tmp_path / str(number)):
            wrong.append((name, layout, number, said))
    assert wrong == []
