"""Two steps of one training run, as torch saves them in many layouts: the maker of the pairs that are damaged."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import on_ranks
from support import REAL
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

State = dict[str, Any]
"""`model` and `optim` of one step, whole, as `get_state_dict` gives them."""

BEFORE, NOW = 190, 200
OF_THE_RESTART, WITH_NEW_TOKENS, MUCH_LATER = 195, 210, 9_000
HEALTHY_RUNS = {
    "restarted from an older step": (BEFORE, OF_THE_RESTART, NOW),
    "new tokens": (NOW, WITH_NEW_TOKENS),
    "thousands of updates apart": (NOW, MUCH_LATER),
}
"""What a run does -> its steps."""
BY_COLUMNS = ("o_proj", "down_proj")
WHOLE = ("norm", "gate")


def committed_run() -> dict[int, State]:
    """Both steps of fixtures/real/numbers, with queries, keys and values apart: AdamW knows no borders of tensors."""
    return {step: _apart(_loaded(REAL / f"numbers/step-{step}")) for step in (BEFORE, NOW)}


def healthy_runs(steps: dict[int, State]) -> dict[int, State]:
    """Steps that go on from others in legal ways, by their number: see `HEALTHY_RUNS`."""
    return {
        OF_THE_RESTART: trained_on(steps[BEFORE], OF_THE_RESTART - BEFORE),
        WITH_NEW_TOKENS: trained_on(_with_new_tokens(steps[NOW]), WITH_NEW_TOKENS - NOW),
        MUCH_LATER: trained_on(steps[NOW], MUCH_LATER - NOW),
    }


def trained_on(state: State, updates: int) -> State:
    """The state after more updates of torch's AdamW, all but the last 100 at a rate of 0.

    The gradients are drawn: half of each is that of the update before, and their size is that of the second moments.
    """
    (group,), made = state["optim"]["param_groups"], copy.deepcopy(state)
    weights = [made["model"].get(name, made["model"].get(f"model.{name}")) for name in group["params"]]
    states = [made["optim"]["state"][name] for name in group["params"]]
    flat = torch.nn.Parameter(_in_row(weights))  # AdamW knows no borders of tensors
    moments = {name: _in_row([one[name] for one in states]) for name in ("exp_avg", "exp_avg_sq")}
    settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([flat], **settings, fused=True)
    optimizer.state[flat] = {"step": states[0]["step"] + max(updates - 100, 0), **moments}
    numbers = torch.Generator().manual_seed(updates)
    size = moments["exp_avg_sq"].sqrt().clone()
    always = torch.empty_like(size).normal_(generator=numbers)
    for _ in range(min(updates, 100)):
        flat.grad = (torch.empty_like(size).normal_(generator=numbers) + always) * size / 2
        optimizer.step()
    begin, now = 0, optimizer.state[flat]
    for weight, one in zip(weights, states, strict=True):
        of_tensor = slice(begin, begin := begin + weight.numel())
        weight.copy_(flat.detach()[of_tensor].view_as(weight))
        one["step"] = now["step"].clone()
        for name in moments:
            one[name].copy_(now[name][of_tensor].view_as(weight))
    return made


def _in_row(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _with_new_tokens(state: State) -> State:
    """The state with more rows for tokens, which the optimizer begins with."""
    made = copy.deepcopy(state)
    for name, whole in made["model"].items():
        if "embed_tokens" in name or "lm_head" in name:
            numbers = torch.Generator().manual_seed(whole.shape[0])
            rows = torch.empty(8, whole.shape[1]).normal_(0, 0.02, generator=numbers)
            made["model"][name] = torch.cat([whole, rows])
    for name, moments in made["optim"]["state"].items():
        if "embed_tokens" in name or "lm_head" in name:
            for what in ("exp_avg", "exp_avg_sq"):
                moments[what] = torch.cat([moments[what], torch.zeros(8, moments[what].shape[1])])
    return made


def _loaded(step: Path) -> State:
    state: State = {}
    _load_state_dict(state, FileSystemReader(step), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    return state


def _apart(state: State) -> State:
    for group in state["optim"]["param_groups"]:
        group["params"] = [one for name in group["params"] for one in _names(name)]
    model = {
        one: piece
        for name, whole in state["model"].items()
        for one, piece in zip(_names(name), _pieces(name, whole), strict=True)
    }
    states = {
        one: {what: _pieces(name, whole)[number] if whole.dim() else whole for what, whole in moments.items()}
        for name, moments in state["optim"]["state"].items()
        for number, one in enumerate(_names(name))
    }
    return {"model": model, "optim": {**state["optim"], "state": states}}


def _names(name: str) -> list[str]:
    return [name.replace("qkv_proj", f"{one}_proj") for one in ("qkv" if "qkv_proj" in name else "q")]


def _pieces(name: str, whole: Tensor) -> list[Tensor]:
    return [piece.clone() for piece in whole.chunk(3)] if "qkv_proj" in name else [whole]


# ---------------------------------------------------------------- layouts

Save = Callable[[int, State, Path], None]


def _distributed(state: State, mesh: DeviceMesh, places: Callable[[str], list[Placement]]) -> State:
    """The state with its tensors as DTensors."""

    def placed(name: str, whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, places(name)) if whole.dim() else whole

    model = {name: placed(name, whole) for name, whole in state["model"].items()}
    states = {
        name: {what: placed(name, whole) for what, whole in moments.items()}
        for name, moments in state["optim"]["state"].items()
    }
    return {"model": model, "optim": {**state["optim"], "state": states}}


def one_rank(step: int, state: State, run: Path) -> None:
    dcp.save(state, checkpoint_id=run / f"step-{step}", no_dist=True)


def _by_dcp(sizes: tuple[int, ...], places: Callable[[str], list[Placement]]) -> Save:
    def save(step: int, state: State, run: Path) -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        dcp.save(_distributed(state, mesh, places), checkpoint_id=run / f"step-{step}")

    return save


def _tensor_parallel(name: str) -> list[Placement]:
    if any(word in name for word in WHOLE):
        return [Replicate()]
    return [Shard(1 if any(word in name for word in BY_COLUMNS) else 0)]


def rank_files(step: int, state: State, run: Path) -> None:
    """As verl's manager writes them: states by the number of their parameter, each rank its own file."""
    rank, place = dist.get_rank(), run / f"global_step_{step}/actor"
    place.mkdir(parents=True, exist_ok=True)
    made = _distributed(state, init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)), lambda _: [Shard(0)])
    (group,) = made["optim"]["param_groups"]
    prefix = "model." if f"model.{group['params'][0]}" in made["model"] else ""
    order = [name.removeprefix(prefix) for name in made["model"]]
    numbered = {order.index(name): states for name, states in made["optim"]["state"].items()}
    groups = [{**group, "params": sorted(numbered)}]
    torch.save(made["model"], place / f"model_world_size_4_rank_{rank}.pt")
    torch.save({"state": numbered, "param_groups": groups}, place / f"optim_world_size_4_rank_{rank}.pt")
    extra = {"lr_scheduler": {"last_epoch": step, "_step_count": step + 1, "_last_lr": [group["lr"]]}, "rng": {}}
    torch.save(extra, place / f"extra_state_world_size_4_rank_{rank}.pt")
    if rank == 0:
        (place / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))


RESHARDABLE = ("one_rank", "fsdp2_4r", "hsdp_2x2", "tp_4", "tp2_fsdp2")
"""The layouts of one format: a job may go on in another one of them."""
BY_RANKS: dict[str, Save] = {
    "fsdp2_4r": _by_dcp((4,), lambda _: [Shard(0)]),
    "hsdp_2x2": _by_dcp((2, 2), lambda _: [Replicate(), Shard(0)]),
    "tp_4": _by_dcp((4,), _tensor_parallel),
    "tp2_fsdp2": _by_dcp((2, 2), lambda name: [Shard(0), *_tensor_parallel(name)]),
    "rank_files": rank_files,
}
COMMITTED = "megatron_experts"
"""As Megatron-Core saved both steps of a run of its own: fixtures/real/megatron_numbers."""
LAYOUTS = ("one_rank", *BY_RANKS, COMMITTED)


def saved(steps: dict[int, State], folder: Path, layouts: tuple[str, ...] = LAYOUTS) -> dict[str, dict[int, Path]]:
    """Layout -> step -> its folder, below `folder` or of `COMMITTED`; each layout is a run of its own."""

    def work(_: int) -> None:
        for layout in layouts:
            for step, state in steps.items() if layout in BY_RANKS else ():
                BY_RANKS[layout](step, state, folder / layout)

    for step, state in steps.items() if "one_rank" in layouts else ():
        one_rank(step, state, folder / "one_rank")
    if BY_RANKS.keys() & {*layouts}:
        on_ranks({"x": 4}, work, folder)
    names = {layout: "global_step_{}/actor" if layout == "rank_files" else "step-{}" for layout in layouts}
    made = {layout: {step: folder / layout / names[layout].format(step) for step in steps} for layout in layouts}
    if COMMITTED in layouts:
        made[COMMITTED] = {step: REAL / f"megatron_numbers/iter_{step:07d}" for step in (BEFORE, NOW)}
    return made


def placed(step: Path, run: Path) -> Path:
    """A copy of a step in another run."""
    place = run / (f"{step.parent.name}/actor" if step.name == "actor" else step.name)
    return Path(shutil.copytree(step, place))
