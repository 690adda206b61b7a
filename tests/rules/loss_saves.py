"""Small saves that torch writes, in many layouts, each with a change of the optimizer's state before it is written."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from support import REAL
from torch import nn
from torch.distributed import checkpoint as dcp

State = dict[str, Any]
Change = Callable[[State, random.Random], str]
"""What is done to the state dict of an optimizer, as torch gives it: `state` by number and `param_groups`."""


class Save(NamedTuple):
    """What a job saves at a step.

    Attributes:
        names: of the parameters, by their numbers in the optimizer.
    """

    model: dict[str, torch.Tensor]
    optimizer: State
    scheduler: State
    names: list[str]
    step: int


@cache
def trained_model(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, State, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.LayerNorm(4))
    params, kinds = [*model.parameters()], [[0], [1, 5], [2, 3, 4, 6, 7, 8]]
    groups = [
        {"params": [params[number] for number in kind], "weight_decay": 0.1 / (1 + at)} for at, kind in enumerate(kinds)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    names = [name for name, _ in model.named_parameters()]
    return model, optimizer, scheduler.state_dict(), [names[number] for kind in kinds for number in kind]


def trained(step: int) -> Save:
    """A model with AdamW in three groups, after some updates, at a step that may be later."""
    model, optimizer, scheduler, names = trained_model(min(step, 3) + step // 10 % 10)
    state = optimizer.state_dict()
    for of_param in state["state"].values():
        of_param["step"] = torch.tensor(float(step))
    return Save(copy.deepcopy(model.state_dict()), copy.deepcopy(state), {**scheduler, "last_epoch": step}, names, step)


def fused(save: Save) -> Save:
    """The same as FusedAdam of Transformer Engine and Apex counts: one step for each group."""
    for group in save.optimizer["param_groups"]:
        kept = {name: group[name] for name in ("params", "lr", "betas", "eps", "weight_decay")}
        group.clear()
        group |= {**kept, "bias_correction": True, "step": save.step}
    for of_param in save.optimizer["state"].values():
        of_param.pop("step", None)
    return save


# ---------------------------------------------------------------- how it is written


def named(save: Save) -> State:
    """The state as `get_optimizer_state_dict` gives it: by names."""
    states = {save.names[number]: of_param for number, of_param in save.optimizer["state"].items()}
    groups = save.optimizer["param_groups"]
    groups = [group | {"params": [save.names[number] for number in group["params"]]} for group in groups]
    return {"state": states, "param_groups": groups}


def flat(save: Save) -> State:
    """The same, flattened: one entry for each setting of each parameter."""
    by_name = named(save)
    state = {f"state.{name}.{key}": value for name, of in by_name["state"].items() for key, value in of.items()}
    for group in by_name["param_groups"]:
        for name in group["params"]:
            state |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return state


def as_dcp(place: Path, save: Save) -> None:
    dcp.save({"model": save.model, "optimizer": named(save)}, checkpoint_id=place, no_dist=True)


def as_flat_dcp(place: Path, save: Save) -> None:
    dcp.save({"model": save.model, "optimizer": flat(save)}, checkpoint_id=place, no_dist=True)


def as_app_state(place: Path, save: Save) -> None:
    dcp.save({"app": {"model": save.model, "optim": named(save), "step": save.step}}, checkpoint_id=place, no_dist=True)


def as_parts(place: Path, save: Save) -> None:
    dcp.save({"model": save.model}, checkpoint_id=place / "model", no_dist=True)
    dcp.save({"optim": named(save)}, checkpoint_id=place / "optim", no_dist=True)


def as_trainer(place: Path, save: Save) -> None:
    place.mkdir(parents=True)
    save_file(save.model, place / "model.safetensors", metadata={"format": "pt"})
    torch.save(save.optimizer, place / "optimizer.pt")
    torch.save(save.scheduler, place / "scheduler.pt")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": save.step}))


def as_accelerate(place: Path, save: Save) -> None:
    place.mkdir(parents=True)
    torch.save(save.model, place / "pytorch_model.bin")
    torch.save(save.optimizer, place / "optimizer.bin")
    torch.save(save.scheduler, place / "scheduler.bin")


def as_one_file(place: Path, save: Save) -> None:
    place.mkdir(parents=True)
    state = {"model": save.model, "optimizer": save.optimizer, "scheduler": save.scheduler, "global_step": save.step}
    torch.save(state, place / "state.pt")


def as_named_file(place: Path, save: Save) -> None:
    place.mkdir(parents=True)
    torch.save(save.model, place / "pytorch_model.bin")
    torch.save(named(save), place / "optimizer.pt")


def as_lightning(place: Path, save: Save) -> None:
    """A file that Lightning's Trainer wrote, with another model and optimizer in it."""
    place.mkdir(parents=True)
    state = loaded(REAL / "frameworks/lightning/epoch=0-step=4.ckpt")
    state |= {"state_dict": save.model, "optimizer_states": [save.optimizer], "lr_schedulers": [save.scheduler]}
    torch.save(state | {"global_step": save.step}, place / f"epoch=0-step={save.step}.ckpt")


LAYOUTS: dict[str, Callable[[Path, Save], None]] = {
    writer.__name__.removeprefix("as_"): writer
    for writer in (
        as_dcp, as_flat_dcp, as_app_state, as_parts, as_trainer, as_accelerate, as_one_file, as_named_file, as_lightning
    )
}  # fmt: skip


# ---------------------------------------------------------------- what libraries wrote


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False, map_location="cpu")


WRITTEN = {
    "megatron": ("megatron_numbers/iter_0000200", "common.pt"),
    "megatron_chains": ("megatron_0.12_dp2/iter_0000010", "common.pt"),
    "megatron_legacy": ("megatron_legacy/tp2/iter_0000010", "model_optim_rng.pt"),
    "megatron_legacy_tp_pp": ("megatron_legacy/tp2_pp2/iter_0000010", "model_optim_rng.pt"),
    "deepspeed": ("deepspeed/z0_fp32_2r/global_step2", "_model_states.pt"),
    "deepspeed_moe": ("deepspeed/moe_ep2_z0/global_step2", "_optim_states.pt"),
}
"""Steps that libraries wrote, and how the names of the files end that hold their optimizers."""
if find_spec("megatron") is None:  # torch loads its arguments by its classes
    WRITTEN = {name: written for name, written in WRITTEN.items() if not name.startswith("megatron")}


def optimizers_in(value: Any) -> Iterator[State]:
    """The state dicts of optimizers inside of what a file holds."""
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from optimizers_in(inner)


def later(step: Path, number: int) -> Path:
    """A step of DeepSpeed with the counters of a later one."""
    for path in step.glob("*_states.pt"):
        state = loaded(path)
        for optimizer in optimizers_in(state):
            for of_param in optimizer["state"].values():
                of_param["step"] = torch.full_like(of_param["step"], number)
        if "global_steps" in state:
            state |= {"global_steps": number, "global_samples": 2 * number}
            state["lr_scheduler"] = {"last_batch_iteration": number - 1}
        torch.save(state, path)
    return step.rename(step.with_name(f"global_step{number}"))


def with_change(written: str, place: Path, change: Change, draw: random.Random) -> str:
    """A copy of what a library wrote, of which one file or each has an optimizer of several groups changed."""
    source, ending = WRITTEN[written]
    step = Path(shutil.copytree(REAL / source, place / Path(source).name))
    if written.startswith("deepspeed"):
        step = later(step, draw.choice([256, 300, 4000]))
    paths = sorted(step.rglob(f"*{ending}"))
    seed = draw.random()
    for path in paths if draw.random() < 0.5 else [draw.choice(paths)]:
        state = loaded(path)
        said = change(next(one for one in optimizers_in(state) if len(one["param_groups"]) > 1), random.Random(seed))
        torch.save(state, path)
    return said
