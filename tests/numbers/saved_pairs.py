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
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

State = dict[str, Any]
"""`model` and `optim` of one step, whole, as `get_state_dict` gives them."""

BEFORE, NOW = 190, 200
BY_COLUMNS = ("o_proj", "down_proj")
WHOLE = ("norm", "gate")


def committed_run() -> dict[int, State]:
    """Both steps of fixtures/real/numbers, with queries, keys and values apart: AdamW knows no borders of tensors."""
    return {step: _apart(_loaded(REAL / f"numbers/step-{step}")) for step in (BEFORE, NOW)}


def trained_run(seed: int) -> dict[int, State]:
    """Two steps of a new run of a decoder whose layers have experts."""
    from test_healthy_optimizers import OPTIMIZERS, Decoder, train

    steps: dict[int, State] = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Decoder(has_experts=True)
        for layer in model.layers:  # all experts are chosen
            del layer.mlp.experts[3:]
            layer.mlp.gate = torch.nn.Linear(16, 3, bias=False)

        def keep(step: int, optimizers: list[torch.optim.Optimizer]) -> None:
            if step == BEFORE:
                steps[step] = _copied(get_state_dict(model, optimizers))

        optimizers = train(model, OPTIMIZERS["AdamW"], steps=NOW, each=keep)
    steps[NOW] = _copied(get_state_dict(model, optimizers))
    return steps


def _copied(states: tuple[Any, Any]) -> State:
    return copy.deepcopy({"model": states[0], "optim": states[1]})


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
LAYOUTS = ("one_rank", *BY_RANKS)


def saved(steps: dict[int, State], folder: Path, layouts: tuple[str, ...] = LAYOUTS) -> dict[str, dict[int, Path]]:
    """Layout -> step -> its folder below `folder`; each layout is a run of its own."""

    def work(_: int) -> None:
        for layout in layouts:
            for step, state in steps.items() if layout in BY_RANKS else ():
                BY_RANKS[layout](step, state, folder / layout)

    for step, state in steps.items():
        one_rank(step, state, folder / "one_rank")
    on_ranks({"x": 4}, work, folder)
    names = {layout: "global_step_{}/actor" if layout == "rank_files" else "step-{}" for layout in layouts}
    return {layout: {step: folder / layout / names[layout].format(step) for step in steps} for layout in layouts}


def placed(step: Path, run: Path) -> Path:
    """A copy of a step in another run."""
    place = run / (f"{step.parent.name}/actor" if step.name == "actor" else step.name)
    return Path(shutil.copytree(step, place))
