"""Healthy checkpoints that real libraries write anew under names drawn at random, none of which may be flagged.

    python bench/evidence/healthy.py [--folders 300] [--seed 1] [--keep FOLDER]

Each folder is a run of one of `KINDS`, with what people keep beside steps. Each step by itself and the whole run are
checked at depth files and data, and `ckptlint latest` must name the newest step. Every warning, error, refusal and
wrong answer is printed with the seed, the number and the kind; any ends the command in 1.
`--keep` leaves there what was flagged. The share of a library that is not installed is left out, and it is named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import multiprocessing
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import ckptlint
from ckptlint.depth import Depth
from ckptlint.errors import CkptlintError
from ckptlint.lint.steps.trust import newest_good, runs_at

Dice = random.Random
Steps = dict[Path, int]
WORDS = ["alpha", "bird", "exp7", "gpt-small", "lr3e-4", "mini", "my_run", "net", "resnet50", "seg",
    "tuned", "v2", "vit_b16", "wiki2", "zeta", "run.b", "8gpu"]  # fmt: skip
OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD", "Adafactor"]  # fmt: skip
DTYPES = ["float32", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool",
    "complex64", "float8_e4m3fn"]  # fmt: skip


# ---------------------------------------------------------------- what is drawn


def numbers(dice: Dice, count: int) -> list[int]:
    """Steps that start and stride at random."""
    stride = dice.choice([1, 2, 5, 10, 50, 100, 250, 500, 1000, dice.randint(1, 4000)])
    start = (dice.choice([0, 1, stride, stride * dice.randint(1, 40), dice.randint(0, 9000)]) if stride > 2
        else dice.randint(2, 99))  # fmt: skip
    return [start + stride * index for index in range(count)]


def model_of(dice: Dice) -> torch.nn.Module:
    """A small model of a random kind."""
    nn, width = torch.nn, dice.choice([4, 6, 8, 10])
    layers = dice.randint(1, 3)
    kinds: list[Callable[[], torch.nn.Module]] = [lambda: nn.Sequential(*(nn.Linear(width, width,
        bias=dice.random() < 0.7) for _ in range(layers))), lambda:
        nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 3 * width), layers), lambda:
        nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 5, 1)),
        lambda: nn.Sequential(OrderedDict(emb=nn.Embedding(dice.randint(11, 30), width), rnn=nn.LSTM(width,
        7, layers))), lambda: nn.Sequential(OrderedDict(encoder=nn.GRU(width, 5),
        heads=nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 1))))]  # fmt: skip
    return dice.choice(kinds)()


def trained(dice: Dice, model: torch.nn.Module, classes: Sequence[str] = OPTIMIZERS) -> torch.optim.Optimizer:
    """An optimizer that took some steps, with one group of parameters or two."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cut = dice.randint(1, len(own) - 1) if len(own) > 1 and dice.random() < 0.4 else len(own)
    name = dice.choice(classes)
    options: dict[str, Any] = {"lr": 1e-3} | ({"momentum": dice.choice([0.0, 0.9])} if name == "SGD" else {})
    groups = [{"params": part} for part in (own[:cut], own[cut:]) if part]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **options)
    for _ in range(dice.randint(1, 3)):
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def scheduler_of(dice: Dice, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A scheduler of a random class."""
    kinds = torch.optim.lr_scheduler
    return dice.choice([lambda: kinds.StepLR(optimizer, 3), lambda: kinds.CosineAnnealingLR(optimizer, 10),
        lambda: kinds.LambdaLR(optimizer, lambda epoch: 0.9**epoch), lambda: kinds.OneCycleLR(optimizer,
        0.1, total_steps=20, cycle_momentum=False), lambda: kinds.SequentialLR(optimizer,
        [kinds.ConstantLR(optimizer), kinds.ExponentialLR(optimizer, 0.9)], [2])])()  # fmt: skip


def nested(dice: Dice, mesh: Any = None, depth: int = 0) -> Any:
    """A state of tensors, DTensors where there is a mesh, containers and objects."""
    kind = dice.choice(
        ["dict", "tensor", "tensor", "list", "value"] if 0 < depth < 4 else ["dict", "tensor"][depth > 3 :]
    )
    if kind == "dict":
        keys = [dice.choice([f"{dice.choice(WORDS)}{index}", index]) for index in
            range(dice.randint(2, 6))]  # fmt: skip
        return dice.choice([dict, OrderedDict])((key, nested(dice, mesh, depth + 1)) for key in keys)
    if kind == "list":
        return [nested(dice, mesh, depth + 1) for _ in range(dice.randint(0, 3))]
    if kind == "value":
        state = np.random.default_rng(1).bit_generator.state
        values = [3, -1.5, None, "text", True, (1, "a"), {}, [], {1, 2}, torch.Size([2, 3]), np.arange(4),
            random.getstate()]  # fmt: skip
        return dice.choice([*values, np.float32(2), state, torch.get_rng_state(), Path("a") / "b", b"\x00\x01"])
    shape = [dice.randint(1, 9) for _ in range(dice.randint(0, 3))]
    if mesh is not None and shape and dice.random() < 0.6:
        return distribute_tensor(torch.randn(shape), mesh, [Shard(dice.randrange(len(shape)))])
    return torch.randn(shape).mul(9).to(getattr(torch, dice.choice(DTYPES)))


def beside(run: Path, dice: Dice) -> None:
    """What people keep beside their steps."""
    texts = {
        "config.yaml": "lr: 0.001\nbatch_size: 32\nseed: 7\n",
        "README.md": "# A run\n",
        ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
        "train.log": "step 1 loss 2.3\n",
        "logs/rank_0.log": "started\n",
        f"events.out.tfevents.{dice.randint(10**9, 2 * 10**9)}.host.12.0": "\x18\0\0\0\0\0",
        f"runs/Nov24_10-00-00_host/events.out.tfevents.{dice.randint(10**9, 2 * 10**9)}.host.1.0": "\x18\0\0\0",
        "wandb/run-20261124_100000-ab12cd34/files/config.yaml": "lr:\n  value: 0.001\n",
        "wandb/run-20261124_100000-ab12cd34/run-ab12cd34.wandb": ":W&B\0",
        "metrics.jsonl": '{"step": 1, "loss": 2.3}\n',
        "args.json": '{"lr": 0.001, "epochs": 3}',
        "requirements.txt": "torch\n",
        "train.py": "print(1)\n",
        "samples/step_10.txt": "once upon a time\n",
        "vocab.txt": "[PAD]\nthe\n",
    }
    for name in dice.sample(sorted(texts), dice.randint(0, 6)):
        if not (path := run / name).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[name])
    if dice.random() < 0.3:
        for path in [path for path in run.rglob("*") if path.suffix in {".pt", ".pth", ".ckpt", ".safetensors"}]:
            seal = hashlib.sha256(path.read_bytes()).hexdigest()
            path.with_name(f"{path.name}.sha256").write_text(f"{seal}  {path.name}\n")


# ---------------------------------------------------------------- kinds


def named(dice: Dice) -> Callable[[int], str]:
    """How a run calls its steps."""
    word, zeros = dice.choice(WORDS), dice.choice([0, 0, 4, 6, 8])
    form = dice.choice(["step-{}", "step_{}", "step{}", "iter_{}", "{}", "epoch_{}", "checkpoint-{}",
        "w-{}", "w_{}", "w{}_ckpt", "w.step{}", "global_step{}", "ckpt_{}_w", "w-iter{}"])  # fmt: skip
    return lambda number: form.replace("w", word).format(f"{number:0{zeros}}")


def save_dcp(folder: Path, seed: str, step: int, is_async: bool) -> None:
    """One step, as each of the ranks saves it."""
    dice = Dice(seed)
    torch.manual_seed(dice.randrange(2**31) + step)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    state: dict[str, Any] = {}
    if dice.random() < 0.7:
        model = model_of(dice)
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        options = StateDictOptions(flatten_optimizer_state_dict=dice.random() < 0.5)
        weights, moments = get_state_dict(model, trained(dice, model, ["SGD", "Adam", "AdamW"]), options=options)
        state = {"model": weights, dice.choice(["optim", "optimizer"]): moments}
    if not state or dice.random() < 0.5:
        state[dice.choice(WORDS)] = nested(dice, mesh)
    state |= {"step": step} if dice.random() < 0.5 else {}
    if is_async:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)


def rank_loop(rank: int, world: int, store: str, jobs: Any) -> None:
    """A rank of a pool, which saves what it is told to."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        save_dcp(*jobs.recv())
        jobs.send(None)


@cache
def pool(world: int) -> list[Any]:
    """The ends of the pipes to ranks that wait for saves; they end with this process."""
    context, store = multiprocessing.get_context("fork"), tempfile.mktemp()
    pipes = [context.Pipe() for _ in range(world)]
    for rank, (_, there) in enumerate(pipes):
        context.Process(target=rank_loop, args=(rank, world, store, there), daemon=True).start()
        there.close()
    return [here for here, _ in pipes]


def torch_dcp(run: Path, dice: Dice) -> Steps:
    """`torch.distributed.checkpoint`, without a group or with two to four ranks."""
    world, is_async, name, seed = dice.choice([0, 0, 2, 3, 4]), dice.random() < 0.3, named(dice), str(dice.random())
    steps = {run / name(number): number for number in numbers(dice, dice.randint(1, 4))}
    for path, number in steps.items():
        if not world:
            save_dcp(path, seed, number, False)
        for pipe in pool(world) if world else ():
            pipe.send((path, seed, number, is_async))
        for pipe in pool(world) if world else ():
            pipe.recv()
    return steps


def torch_files(run: Path, dice: Dice) -> Steps:
    """A file of `torch.save` for each step, with the whole state, and `latest` or `best` beside them."""
    word, zeros, end = (
        dice.choice(WORDS),
        dice.choice([0, 0, 3, 5, 8]),
        dice.choice([".pt", ".pth", ".ckpt", ".pth.tar"]),
    )
    form = dice.choice(["ep{e}-ba{s}-rank0", "{e}-{loss:.2f}", "{word}_{e}_{s}", "{word}{s}",
        "{word}-step{s}", "{e}epoch", "{s}", "{word}_{s}_full", "epoch={e}-step={s}", "ckpt.{s}",
        "{word}-{e}-val_loss{loss:.3f}", "checkpoint_{s}", "{word}.{s}", "epoch_{e}_acc_{loss:.4f}",
        "{s}_{word}"])  # fmt: skip
    kept = dice.choice(
        [("model", "optimizer"), ("state_dict", "optimizer_states"), ("model_state_dict", "optimizer_state_dict")]
    )
    model = model_of(dice)
    counter, steps = dice.choice(["step", "epoch", "global_step", "iteration"]), {}
    first = dice.randint(2, 30)
    for index, number in enumerate(numbers(dice, dice.randint(2, 4))):
        own = number if "{s}" in form else first + index
        optimizer = trained(Dice(word), model)
        state = {kept[0]: model.state_dict(), kept[1]: optimizer.state_dict(), counter: own}
        if dice.random() < 0.5:
            state |= {"scheduler": scheduler_of(dice, optimizer).state_dict(), "args": argparse.Namespace(lr=0.1)}
        if dice.random() < 0.5:
            state["rng"] = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        numbered = {"e": f"{first + index:0{zeros}}", "s": f"{number:0{zeros}}", "word": word, "loss": dice.random()}
        torch.save(state, path := run / (form.format(**numbered) + end))
        steps[path] = own
    for name in dice.sample(["latest", "last", "best", "model_best"], dice.randint(0, 2)):
        source = dice.choice([*steps]) if "best" in name else path
        copy = source.with_name(name + end)
        copy.symlink_to(source.name) if dice.random() < 0.4 else shutil.copyfile(source, copy)
        steps[copy] = steps[source]
    return steps


Kind = Callable[[Path, Dice], Steps]
KINDS: list[Kind] = [torch_dcp, torch_files]


# ---------------------------------------------------------------- what ckptlint says


def wrong_about(run: Path, steps: Steps) -> Iterator[str]:
    """What ckptlint has against a healthy run: findings from a warning up, refusals, a newest step that is another."""
    has_folders = any(path.is_dir() for path in steps)
    for depth in (Depth.FILES, Depth.DATA):
        for path in [*steps, run] if len(steps) > 1 or has_folders else steps:
            report = ckptlint.check(path, depth=depth, all_steps=path == run)
            told = [f"{one.severity.label} {one.code} {one.title}" for one in report.diagnostics if
                one.severity.label in ("warning", "error")]  # fmt: skip
            if report.exit_code not in (0, 1):
                told += [f"exit {report.exit_code}", *report.unreadable, *report.not_found]
            yield from (f"{path.relative_to(run.parent)} at depth {depth}: {one}" for one in told)
    newest = {str(path) for path, step in steps.items() if step == max(steps.values())}
    if len(steps) > 1:
        try:
            found = [newest_good(one, path, ckptlint.check) for path, one in runs_at(str(run))]
        except CkptlintError as error:
            yield f"latest: {error}"
        else:
            told = [search.newest.path if search.newest and not search.exit_code else "none" for search in found]
            if len(told) != 1 or told[0] not in newest:
                yield f"latest names {told}, not {sorted(newest)}"


def write(number: int, seed: int, folder: Path, kind: Kind) -> tuple[Path, Steps]:
    """The run of a number, and its steps."""
    dice = Dice(f"{seed} {number}")
    torch.manual_seed(dice.randrange(2**31))
    run = folder / str(number) / dice.choice(WORDS)
    run.mkdir(parents=True)
    steps = kind(run, dice)
    beside(run, dice)
    return run, steps


def healthy(count: int, seed: int, folder: Path, kinds: Sequence[Kind] = KINDS) -> Iterator[tuple[int, str, list[str]]]:
    """Number, kind and what is said against it, of so many runs."""
    for number in range(count):
        kind = kinds[number % len(kinds)]
        run, steps = write(number, seed, folder, kind)
        if not (said := [*wrong_about(run, steps)]):
            shutil.rmtree(run.parent)
        yield number, kind.__name__, said


def main() -> None:
    """Write and judge so many runs, print what is said against them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import healthy_trainers

    needs = healthy_trainers.KINDS
    kinds = [*KINDS, *(kind for kind, library in needs.items() if importlib.util.find_spec(library))]
    for kind in needs.keys() - {*kinds}:
        print(f"{needs[kind]} is not installed: {kind.__name__} is left out")
    made: Counter[str] = Counter()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, kind, said in healthy(
            chosen.folders * len(kinds) // (len(KINDS) + len(needs)), chosen.seed, chosen.keep or Path(scratch), kinds
        ):
            made[kind] += 1
            wrong += bool(said)
            for one in said:
                print(f"seed {chosen.seed}, {number}, {kind}: {one}", flush=True)
    print(f"{made.total()} runs ({', '.join(f'{count} {kind}' for kind, count in made.items())}), {wrong} flagged")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
