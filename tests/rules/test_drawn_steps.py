"""Drawn losses of what a step holds besides its optimizer's state are told once; healthy steps are not told of."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_saves import LAYOUTS, loaded, named, trained
from safetensors.torch import load_file, save_file
from support import REAL, SWEEP
from test_drawn_losses import told
from torch.distributed import checkpoint as dcp

SEED = 82
COUNT = int(os.environ.get("LOSSES", 30 if SWEEP else 6))
"""Cases of each kind."""
Make = Callable[[Path, random.Random], str]
"""Writes a run or a step into a folder; what has to be said, a regular expression, "" for what is healthy."""
KINDS: dict[str, list[Make]] = {}


def of(kind: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        KINDS.setdefault(kind, []).append(make)
        return make

    return add


# ---------------------------------------------------------------- a scheduler and no optimizer


def never_written(steps: int, lack: str) -> str:
    return rf"^COM001 the job stepped {steps:,} times and has a scheduler, but {lack}"


@of("optimizer")
def engine_of_deepspeed(place: Path, draw: random.Random) -> str:
    """One file, or each stage of a pipeline."""
    source = draw.choice(["z0_fp32_2r", "pipe_pp2_dp2_z0"])
    shutil.copytree(REAL / "deepspeed" / source, place, dirs_exist_ok=True)
    lost, has_scheduler = draw.choice([True, True, False]), draw.choice([True, True, False])
    paths = sorted(place.rglob("mp_rank_*_model_states.pt"))
    for path in paths:
        state = loaded(path) | {} if not lost else loaded(path) | {"optimizer": None}
        torch.save(state | ({} if has_scheduler else {"lr_scheduler": None}), path)
    others = r" \(as in 1 other file\)" if len(paths) > 1 else ""
    lack = rf"optimizer in {paths[0].name} is None{others} and no \*_optim_states.pt is there$"
    return never_written(2, lack) if lost and has_scheduler else ""


@of("optimizer")
def file_of_lightning(place: Path, draw: random.Random) -> str:
    save = trained(draw.choice([7, 4000]))
    state = loaded(REAL / "frameworks/lightning/epoch=0-step=4.ckpt")
    state |= {"state_dict": save.model, "optimizer_states": [save.optimizer], "lr_schedulers": [save.scheduler] * 2}
    name = f"epoch=0-step={save.step}.ckpt"
    kind = draw.choice(["is empty", "is None", "is not there", "weights only", "whole", "step 0"])
    if kind in ("is not there", "weights only"):
        del state["optimizer_states"]
    if kind == "weights only":
        del state["lr_schedulers"]
    if kind in ("is empty", "is None", "step 0"):
        state["optimizer_states"] = None if kind == "is None" else []
    place.mkdir(parents=True)
    torch.save(state | {"global_step": 0 if kind == "step 0" else save.step}, place / name)
    return never_written(save.step, rf"optimizer_states in \S+ {kind}") if kind.startswith("is ") else ""


@of("optimizer")
def file_of_a_loop(place: Path, draw: random.Random) -> str:
    """What scripts write by torch.save."""
    save = trained(draw.choice([2, 300]))
    names = draw.choice(["model optimizer scheduler step", "state_dict optimizer lr_scheduler global_step",
                         "model_state_dict optimizer_state_dict scheduler_state_dict iteration"])  # fmt: skip
    model, optimizer, scheduler, step = names.split()
    kind = draw.choice(["is None", "is empty", "whole", "beside", "no scheduler", "step 0"])
    held: Any = {"is empty": {}, "whole": save.optimizer}.get(kind)
    state = {model: save.model, optimizer: held, scheduler: save.scheduler, step: 0 if kind == "step 0" else save.step}
    if kind == "no scheduler":
        del state[scheduler]
    place.mkdir(parents=True)
    torch.save(state, place / draw.choice(["state.pt", "checkpoint.pth", f"model_{save.step}.pt"]))
    if kind == "beside":
        torch.save(save.optimizer, place / "optimizer.pt")
    return never_written(save.step, rf"{optimizer} in \S+ {kind}") if kind.startswith("is ") else ""


@of("optimizer")
def folder_of_a_trainer(place: Path, draw: random.Random) -> str:
    save = trained(draw.choice([5, 1200]))
    LAYOUTS["trainer"](step := place / f"checkpoint-{save.step}", save)
    kind = draw.choice(["lost", "lost", "whole", "FSDP", "weights only"])
    if kind != "whole":
        (step / "optimizer.pt").unlink()
    if kind == "FSDP":
        dcp.save({"optimizer": named(save)}, checkpoint_id=step / "optimizer_0", no_dist=True)
    if kind == "weights only":
        (step / "scheduler.pt").unlink()
    return never_written(save.step, "no file or folder of the step holds an optimizer") if kind == "lost" else ""


@of("optimizer")
def folder_of_accelerate(place: Path, draw: random.Random) -> str:
    save = trained(draw.choice([5, 1200]))
    LAYOUTS["accelerate"](step := place / f"step_{save.step}", save)
    kind = draw.choice(["lost", "whole", "weights only"])
    for name in {"lost": ["optimizer.bin"], "whole": [], "weights only": ["optimizer.bin", "scheduler.bin"]}[kind]:
        (step / name).unlink()
    lack = "no file or folder of the step holds an optimizer"
    return rf"^COM001 the step has a scheduler, but {lack}" if kind == "lost" else ""


# ---------------------------------------------------------------- a step without its weights

PARTS = {
    "policy": ("policy/weights/model", "policy/optimizer/optim"),
    "parts": ("model", "optim"),
    "accelerate": ("pytorch_model_fsdp_0", "optimizer_0"),
    "actor": ("actor/model", "actor/optim"),
}


def with_parts(step: Path, number: int, layout: str) -> None:
    save = trained(number)
    weights, optimizer = PARTS[layout]
    dcp.save({"model": save.model}, checkpoint_id=step / weights, no_dist=True)
    dcp.save({"optimizer": named(save)}, checkpoint_id=step / optimizer, no_dist=True)


@of("weights")
def parts_in_folders(place: Path, draw: random.Random) -> str:
    layout, numbers = draw.choice([*PARTS]), draw.choice([[10], [5, 10], [5, 10, 20]])
    prefix = draw.choice(["step_", "checkpoint-", "global_step_"])
    for number in numbers:
        with_parts(place / f"{prefix}{number}", number, layout)
    lost = place / f"{prefix}{numbers[-1]}" / PARTS[layout][0]
    kind = draw.choice(["gone", "gone", "empty", "whole", "of an older step"])
    if kind == "whole":
        return ""
    if kind == "of an older step" and len(numbers) > 1:
        shutil.rmtree(place / f"{prefix}{numbers[0]}" / PARTS[layout][0])
        return ""
    shutil.rmtree(lost)
    if kind == "empty":
        lost.mkdir()
    which = rf": \S+ is missing, which {prefix}{numbers[-2]} has" if len(numbers) > 1 else ""
    return rf"^COM001 {prefix}{numbers[-1]} holds an optimizer and no model{which}|^COM001 the folder \S+ is empty"


@of("weights")
def files_beside(place: Path, draw: random.Random) -> str:
    """Files of one folder; the weights may be an adapter, or lie in a folder of FSDP's."""
    layout, numbers = draw.choice(["trainer", "accelerate"]), draw.choice([[10], [5, 10], [5, 10, 20]])
    kind = draw.choice(["gone", "gone", "gone", "whole", "adapter", "FSDP"])
    for number in numbers:
        LAYOUTS[layout](step := place / f"checkpoint-{number}", trained(number))
        if kind in ("adapter", "FSDP") or (kind == "gone" and number == numbers[-1]):
            (step / {"trainer": "model.safetensors", "accelerate": "pytorch_model.bin"}[layout]).unlink()
        if kind == "adapter":
            shutil.copytree(REAL / "adapters/lora", step, dirs_exist_ok=True)
        if kind == "FSDP":
            dcp.save({"model": trained(number).model}, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)
    return "^COM001 the step's folder holds an optimizer and no model" if kind == "gone" else ""


# ---------------------------------------------------------------- a folder of a step that is gone


@of("folder")
def folder_of_a_step(place: Path, draw: random.Random) -> str:
    layout = draw.choice(["parts", "dcp"])
    folder = draw.choice(["orchestrator", "dataloader", "rng", "train_state", "sampler"])
    name = "progress.pt" if folder == "orchestrator" else draw.choice(["rank_0.pt", "state.pt", "rng_state.pt"])
    prefix, numbers = draw.choice(["step_", "checkpoint-"]), draw.choice([[10, 20], [10, 20, 30]])
    kind = draw.choice(["gone", "gone", "empty", "whole", "results", "export", "log"])
    for number in numbers:
        LAYOUTS[layout](step := place / f"{prefix}{number}", trained(number))
        is_there = number < numbers[-1] or kind == "whole"
        if kind in ("gone", "empty", "whole"):
            (step / folder).mkdir() if is_there or kind == "empty" else None
            if is_there:
                torch.save({"step": number}, step / folder / name)
            (step / "STABLE").touch() if prefix == "step_" else None
        elif number == numbers[0]:  # one step alone has it
            (step / kind).mkdir()
            path = step / kind / {"results": "scores.pt", "export": "pytorch_model.bin", "log": "events.log"}[kind]
            torch.save(trained(number).model, path)
    is_known = folder == "orchestrator"  # a single older step says nothing of others
    holders = f"{prefix}{numbers[0]} has" if len(numbers) == 2 else "all older steps have"
    is_told = kind in ("gone", "empty") and (is_known or len(numbers) > 2)
    return rf"^COM001 the step has no {folder}/{name}, which {holders}" if is_told else ""


@of("folder")
def mark_of_a_step(place: Path, draw: random.Random) -> str:
    """What prime-rl writes last."""
    numbers, is_lost = draw.choice([[10, 20], [10, 20, 30]]), draw.random() < 0.7
    layout = draw.choice(["trainer", "accelerate", "dcp"])
    for number in numbers:
        LAYOUTS[layout](step := place / f"step_{number}", trained(number))
        if not (is_lost and number == numbers[-1]):
            (step / "STABLE").touch()
    return r"^COM001 (STABLE is missing beside|the step has no STABLE, which)" if is_lost else ""


# ---------------------------------------------------------------- folders of ranks


@of("ranks")
def folders_of_ranks(place: Path, draw: random.Random) -> str:
    pytest.importorskip("megatron.core")  # torch loads its arguments by its classes
    shutil.copytree(REAL / "megatron_legacy/tp2", place, dirs_exist_ok=True)
    step = place / "iter_0000010"
    world, digits = draw.choice([4, 6, 8]), draw.choice([1, 5])
    for path in step.rglob("*.pt"):
        state = loaded(path)
        state["args"].world_size, state["args"].data_parallel_size = world, world // 2
        torch.save(state, path)
    name = draw.choice(["distrib_optim.pt", "optimizer.pt", "rng.pt"])
    kind = draw.choice(["file", "folder", "two", "whole", "every other", "other file"])
    lost = {"file": 1, "folder": 1, "two": 2}.get(kind, 0)
    gone = draw.sample(range(1, world - 1), lost)
    optimizer = trained(10).optimizer
    for rank in range(0, world, 2 if kind == "every other" else 1):
        if rank not in gone or kind != "folder":
            (step / f"rank_{rank:0{digits}}").mkdir()
        if rank not in gone:
            torch.save(optimizer, step / f"rank_{rank:0{digits}}" / name)
    if kind == "other file":
        torch.save({"note": 1}, step / f"rank_{0:0{digits}}" / "profile.pt")
    names = ", ".join(f"rank_{rank:0{digits}}/{name}" for rank in sorted(gone))
    ranks = "1 rank" if lost == 1 else f"{lost} ranks"
    return rf"^COM012 the {name} file of {ranks} of {world} is missing: {names}$" if lost else ""


# ---------------------------------------------------------------- names of an adapter's factors

NAMES = {"peft": ("lora_A", "lora_B"), "diffusers": ("lora.down", "lora.up"), "kohya": ("lora_down", "lora_up"),
         "linear": ("lora_linear_layer.down", "lora_linear_layer.up")}  # fmt: skip


def renamed(keys: dict[str, torch.Tensor], naming: str) -> dict[str, torch.Tensor]:
    down, up = NAMES[naming]
    return {key.replace("lora_A", down).replace("lora_B", up): value for key, value in keys.items()}


@of("namings")
def names_of_factors(place: Path, draw: random.Random) -> str:
    source = draw.choice(["lora", "lora_all_linear", "lora_conv", "lora_qv"])
    factors = load_file(REAL / "adapters" / source / "adapter_model.safetensors")
    modules = sorted({key.partition(".lora_")[0] for key in factors})
    component = draw.choice(["unet", "transformer", "text_encoder"])
    part = {key: f"{component}.{key.removeprefix('base_model.model.')}" for key in factors}
    most, other = draw.sample([*NAMES], 2)
    kind = draw.choice(["mixed", "mixed", "one", "components", "stored twice", "all"])
    chosen = {"mixed": draw.sample(modules, max(1, len(modules) // 3)), "one": draw.sample(modules, 1)}.get(kind, [])
    made: dict[str, torch.Tensor] = {}
    for key, value in factors.items():
        is_other = key.partition(".lora_")[0] in chosen
        made |= renamed({part[key]: value}, other if is_other else most)
        if kind == "stored twice":
            made |= renamed({part[key]: value.clone()}, other)
        if kind == "components":
            made |= renamed({f"text_encoder_2.{part[key].partition('.')[2]}": value.clone()}, other)
    place.mkdir(parents=True)
    save_file(made, place / "pytorch_lora_weights.safetensors")
    if not chosen or {most, other} == {"diffusers", "linear"}:  # one library's, read alike
        return ""
    return rf"^CFG006 modules of {component} are named in 2 ways: \d+ as \w+ does \(\S+\) and \d+ as \w+ does"


# ---------------------------------------------------------------- all of them


def wrong_with(make: Make, place: Path, draw: random.Random) -> str:
    wanted = make(place, draw)
    newest = max(place.iterdir(), key=lambda path: (path.is_dir(), len(path.name), path.name))
    is_run = newest.is_dir() and make in KINDS["weights"] + KINDS["folder"]
    loud = [" ".join(one) for one in told(newest if is_run else place)]
    if not wanted:
        return f"{loud}" if loud else ""
    return "" if len(loud) == 1 and re.search(wanted, loud[0]) else f"{wanted}: {loud}"


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_losses_of_a_step_are_told_once(kind: str, tmp_path: Path) -> None:
    wrong = []
    for number in range(COUNT):
        make = KINDS[kind][number % len(KINDS[kind])]
        if said := wrong_with(make, tmp_path / str(number), random.Random(f"{SEED} {number}")):
            wrong.append((make.__name__, number, said))
    assert wrong == []
