"""Runs of many layouts with one fault in a step here and there, of which is known which steps are whole.

Each step is made of files that the real libraries wrote, with other values in each step. What is whole is known from
what was done to it, not from what ckptlint says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

import simulated_runs
import torch
import torch.distributed.checkpoint as dcp
from archives import with_other_values
from safetensors.torch import load, save
from simulated_runs import pickled
from support import REAL

from ckptlint.vocabulary.frameworks import step_number

Files = dict[str, bytes]
Label = Literal["whole", "broken", "lesser", "unsure"]
"""`lesser`: it lost a part, which older steps may show; `unsure`: what ckptlint can know of it is left open."""


def _read(place: Path) -> Files:
    return {
        path.relative_to(place).as_posix(): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()
    }


def _learned(name: str, data: bytes, number: int) -> bytes:
    """A file of a save with other values for each number, as training leaves them."""
    if name.endswith(".safetensors"):
        return save({key: value + number / 1024 for key, value in load(data).items()}, {"format": "pt"})
    return with_other_values(data, number) if name.endswith((".distcp", ".pt", ".bin")) else data


def _copied(folder: str, number: int, below: str = "") -> Files:
    return {f"{below}{name}": _learned(name, data, number) for name, data in _read(REAL / folder).items()}


def _state(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    return {f"layers.{n}.{kind}.weight": torch.randn(16, 8) for n in range(2) for kind in ("up", "down")}


def _adam(number: int) -> dict[str, Any]:
    each = {
        n: {"step": torch.tensor(float(number)), "exp_avg": value} for n, value in enumerate(_state(-number).values())
    }
    return {"state": each, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [*each]}]}


def _deepspeed(number: int) -> Files:
    name = "mp_rank_00_model_states.pt"
    state = torch.load(REAL / "deepspeed/z0_fp32_2r/global_step2" / name, weights_only=False)
    state |= {"global_steps": number, "global_samples": 2 * number}
    state["module"] = {key: value + number / 1024 for key, value in state["module"].items()}
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"] *= 1 - number / 1024
    return {name: pickled(state)}


def _lightning(number: int) -> Files:
    state = torch.load(REAL / "frameworks/lightning/last.ckpt", weights_only=False) | {"global_step": number}
    state["state_dict"] = {key: value + number / 1024 for key, value in state["state_dict"].items()}
    return {"": pickled(state)}


def _colossalai(number: int) -> Files:
    index = {
        "metadata": {"total_size": 2048, "param_groups": "pytorch_optim_group.bin"},
        "weight_map": {str(n): "pytorch_optim-00001.bin" for n in range(4)},
    }
    return {
        "modeling/model.safetensors": save(_state(number), {"format": "pt"}),
        "optimizer/pytorch_optim.bin.index.json": json.dumps(index).encode(),
        "optimizer/pytorch_optim-00001.bin": pickled(_adam(number)["state"]),
        "optimizer/pytorch_optim_group.bin": pickled(_adam(number)["param_groups"]),
        "lr_scheduler": pickled({"last_epoch": number, "_step_count": number + 1}),
        "running_states.json": json.dumps({"epoch": 0, "step": number, "sample_start_index": 0}).encode(),
    }


def _by_dcp(**states: dict[str, Any]) -> Files:
    """What torch's DCP writes of each state, into a folder of this name."""
    with TemporaryDirectory() as place:
        for name, state in states.items():
            dcp.save(state, checkpoint_id=f"{place}/{name.replace('__', '/')}", no_dist=True)
        return _read(Path(place))


def _moments(number: int) -> dict[str, torch.Tensor]:
    return {f"optimizer.state.exp_avg.{key}": value * 0.1 for key, value in _state(number).items()}


def _torchtitan(number: int) -> Files:
    state = {f"model.{key}": value for key, value in _state(number).items()} | _moments(number)
    files = _by_dcp(step=state | {"train_state": {"step": number}})
    return {name.removeprefix("step/"): data for name, data in files.items()}


def _nemo_rl(number: int) -> Files:
    return _by_dcp(policy__weights__model=_state(number), policy__optimizer__optim=_moments(number))


def _ms_swift(number: int) -> Files:
    below = f"iter_{number:07}/common.pt"
    common = REAL / "frameworks/ms_swift/checkpoint-10/iter_0000010/common.pt"
    return {
        "args.json": b"{}",
        "model.safetensors": save(_state(number), {"format": "pt"}),
        below: pickled(torch.load(common, weights_only=False) | {"iteration": number}),
    }


def _accelerate(number: int) -> Files:
    states = (REAL / "rank_files/accelerated/random_states_0.pkl").read_bytes()
    return {
        "model.safetensors": save(_state(number), {"format": "pt"}),
        "optimizer.bin": pickled(_adam(number)),
        "scheduler.bin": pickled({"last_epoch": number, "_step_count": number + 1}),
        "random_states_0.pkl": states,
    }


def _one_file(number: int) -> Files:
    return {"": pickled({"model": _state(number), "optimizer": _adam(number), "step": number})}


@dataclass(frozen=True)
class Drawn:
    """How a trainer names its steps, and what lies in one.

    Attributes:
        files: number -> relative path -> bytes; "" is the step itself, where it is one file.
        apart: for each part that can go as a whole, the files or folders it is in.
        tracker: a file of the run, and what it says of a step.
    """

    name: str
    files: Callable[[int], Files]
    apart: tuple[tuple[str, ...], ...] = ()
    tracker: tuple[str, str] | None = None


_OLD = simulated_runs.LAYOUTS
LAYOUTS = {
    "trainer": Drawn("checkpoint-{}", _OLD["trainer"].files, (("model.safetensors",), ("optimizer.pt",))),
    "torchtitan": Drawn("step-{}", cache(_torchtitan)),
    "dcp": Drawn("step_{}", _OLD["dcp"].files),
    "megatron": Drawn("iter_{:07}", _OLD["megatron"].files, (), ("latest_checkpointed_iteration.txt", "{}")),
    "export": Drawn("step_{}", cache(partial(_copied, "exports/ok_llama"))),
    "sharded export": Drawn("checkpoint-{}", cache(partial(_copied, "exports/ok_llama_sharded"))),
    "deepspeed": Drawn("global_step{}", cache(_deepspeed), (), ("latest", "global_step{}")),
    "lightning": Drawn("epoch=0-step={}.ckpt", cache(_lightning)),
    "accelerate": Drawn("checkpoint_{}", cache(_accelerate), (("model.safetensors",), ("optimizer.bin",))),
    "verl": Drawn(
        "global_step_{}", cache(lambda n: _copied("rank_files/verl_fsdp2_4r", n, "actor/")), (),
        ("latest_checkpointed_iteration.txt", "{}"),
    ),
    "colossalai": Drawn("epoch-0_step-{}", cache(_colossalai), (("modeling",), ("optimizer",))),
    "nemo_rl": Drawn("step_{}", cache(_nemo_rl), (("policy/weights",), ("policy/optimizer",))),
    "ms_swift": Drawn("checkpoint-{}", cache(_ms_swift)),
    "one file": Drawn("ckpt_{}.pt", cache(_one_file)),
}  # fmt: skip


@dataclass
class DrawnRun:
    """A run in a folder.

    Attributes:
        labels: name of a step -> what is known of it, the oldest first.
        refused: whether the newest step is a link out of the run that ckptlint does not follow.
        root: what is known of a model in the run's own folder.
        notes: what was done, for whoever reads a failure.
    """

    folder: Path
    layout: Drawn
    labels: dict[str, Label] = field(default_factory=dict)
    refused: bool = False
    root: Label | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def newest(self) -> str:
        """The newest step."""
        return [*self.labels][-1]


def drawn(folder: Path, dice: Random, layout: Drawn) -> DrawnRun:
    """A run with up to four steps, of which some have a fault, and with what lies beside steps."""
    made = DrawnRun(folder, layout)
    number = 0
    for _ in range(dice.choice([1, 2, 2, 3, 3, 4])):
        number += dice.choice([10, 20])
        step = folder / layout.name.format(number)
        for name, data in layout.files(number).items():
            place = step / name if name else step
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        made.labels[step.name] = "whole"
    for name in made.labels:
        if dice.random() < 0.35:
            made.labels[name] = _fault(made, dice, folder / name)
    if layout.tracker is not None:
        tracker, text = layout.tracker
        (folder / tracker).write_text(text.format(number))
    for beside, odds in ((_root_model, 0.2), (_export_inside, 0.2), (_links, 0.3), (_newest_link, 0.15)):
        if dice.random() < odds:
            beside(made, dice, number)
    return made


def _is_payload(path: Path) -> bool:
    endings = (".safetensors", ".distcp", ".pt", ".bin", ".ckpt", ".metadata")
    return path.is_file() and path.name.endswith(endings) and path.stat().st_size > 1024


def _fault(made: DrawnRun, dice: Random, step: Path) -> Label:
    """Break a step, or take a part of it away."""
    files = sorted(filter(_is_payload, [step, *step.rglob("*")]))
    ways = [
        "cut",
        "empty",
        *(["lost", "emptied folder"] if made.layout.apart else []),
        *(["bare"] if step.is_dir() else []),
    ]
    way = dice.choice(ways)
    if way in ("cut", "empty"):
        path = dice.choice(files)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if way == "cut" else 0])
        made.notes.append(f"{step.name}: {path.relative_to(made.folder)} {way}")
        return "broken"
    if way == "bare":
        shutil.rmtree(step)
        step.mkdir()
        made.notes.append(f"{step.name}: empty folder")
        return "broken"
    names = dice.choice(made.layout.apart)
    made.notes.append(f"{step.name}: {way} {names}")
    for name in names:
        place = step / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        if way == "emptied folder":
            (place if not Path(name).suffix else step / "empty").mkdir()
    return "lesser"


def _root_model(made: DrawnRun, dice: Random, _number: int) -> None:
    """A model in the run's own folder, as a trainer leaves its last one."""
    for name, data in _read(REAL / "exports/ok_llama").items():
        (made.folder / name).write_bytes(data)
    made.root = "whole"
    if dice.random() < 0.4:
        path = made.folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-50])
        made.root = "broken"
    made.notes.append(f"a model in the root: {made.root}")


def _export_inside(made: DrawnRun, dice: Random, number: int) -> None:
    """An export inside a step, which the step can make again."""
    name = dice.choice([*made.labels])
    step = made.folder / name
    if not step.is_dir() or not [*step.iterdir()]:
        return
    place = step / dice.choice(["hf", "consolidated"])
    place.mkdir()
    for file, data in _copied("exports/ok_llama", number).items():
        (place / file).write_bytes(data)
    if dice.random() < 0.4:
        path = place / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-50])
        made.labels[name] = "unsure" if made.labels[name] == "whole" else made.labels[name]
    made.notes.append(f"an export in {place.relative_to(made.folder)}")


def _links(made: DrawnRun, dice: Random, _number: int) -> None:
    """A link beside the steps, which leads to one or nowhere."""
    target = dice.choice([*made.labels, "step-999", "/nowhere/step-7"])
    name = dice.choice(["best", "newest", "latest.good"])
    (made.folder / name).symlink_to(target)
    made.notes.append(f"{name} -> {target}")


def _newest_link(made: DrawnRun, dice: Random, number: int) -> None:
    """The newest step is a link to another disk: to a whole step, to nothing, or to a folder of something else."""
    is_file = "" in made.layout.files(number)
    name, way = (
        made.layout.name.format(number + 10),
        dice.choice(["disk", "dangling", *(["elsewhere"] * (not is_file))]),
    )
    if step_number(name) is None:  # its number is known from a file alone
        way = "disk"
    other = made.folder.parent / f"{made.folder.name}-{way}"
    other.mkdir()
    if way == "disk":
        for file, data in made.layout.files(number + 10).items():
            place = other / name / file if file else other / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        target = other / name
    elif way == "elsewhere":
        (other / "notes.txt").write_text("no checkpoint")
        target = other
    else:
        target = other / "gone" / name
    (made.folder / name).symlink_to(target)
    made.refused = way == "elsewhere"
    made.labels[name] = "whole" if way == "disk" else "broken"
    made.notes.append(f"{name} is a link: {way}")
