"""Runs as jobs leave them: saves that were killed, other retentions beside, two runs in one folder, copies, links.

A step is made of files that the real libraries wrote, in the order in which a trainer writes them. What is whole is
known from the bytes: a step that holds each file of its save, to the last byte.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from archives import with_other_values
from safetensors.torch import save
from support import REAL, drawing

from ckptlint.lint.report import Report
from ckptlint.lint.run import run
from ckptlint.lint.settings.files import Settings
from ckptlint.lint.settings.request import Request
from ckptlint.lint.steps import trust as steps
from ckptlint.lint.steps.retention import Retention, deletable
from ckptlint.lint.steps.trust import looks_at

REQUEST = Request.of({}, Settings(), [])
_REPORTS: dict[tuple[str, str], Report] = {}


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _trainer(number: int) -> dict[str, bytes]:
    """The files of transformers' Trainer, the last one last."""
    torch.manual_seed(number)
    shapes = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,), "lm_head.weight": (12, 8)}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    state = {i: {"step": torch.tensor(float(number)), "exp_avg": value} for i, value in enumerate(model.values())}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [*state]}]}
    trainer = {"best_model_checkpoint": None, "epoch": 1.0, "global_step": number, "log_history": []}
    return {
        "model.safetensors": save(model, {"format": "pt"}),
        "optimizer.pt": pickled(optimizer),
        "scheduler.pt": pickled({"last_epoch": number, "_step_count": number + 1}),
        "rng_state.pth": pickled({"cpu": torch.get_rng_state()}),
        "trainer_state.json": json.dumps(trainer).encode(),
    }


def _copied(folder: str, order: tuple[str, ...], number: int) -> dict[str, bytes]:
    """The files of a real step with other values; those that are written last in this order."""
    place = REAL / folder
    names = [path.name for path in sorted(place.iterdir()) if path.name not in order]
    files = {name: (place / name).read_bytes() for name in [*names, *order]}
    if "common.pt" in files:
        files["common.pt"] = pickled(torch.load(place / "common.pt", weights_only=False) | {"iteration": number})
    is_payload = {name: name.endswith(".distcp") for name in files}
    return {name: with_other_values(data, number) if is_payload[name] else data for name, data in files.items()}


@dataclass(frozen=True)
class Layout:
    """How a trainer names its steps and writes them.

    Attributes:
        files: number -> name -> bytes, in the order of the save.
        moved: files that are written under another name and renamed.
    """

    name: str
    files: Callable[[int], dict[str, bytes]]
    tracker: str = ""
    moved: tuple[str, ...] = ()


LAYOUTS = {
    "trainer": Layout("checkpoint-{}", cache(_trainer)),
    "dcp": Layout("step_{}", cache(partial(_copied, "edit_base", (".metadata",))), moved=(".metadata",)),
    "torchtitan": Layout("step-{}", cache(partial(_copied, "fsdp2_4r", (".metadata",))), moved=(".metadata",)),
    "megatron": Layout(
        "iter_{:07}",
        cache(partial(_copied, "frameworks/trackers/older/iter_0000010", (".metadata", "metadata.json"))),
        "latest_checkpointed_iteration.txt",
        (".metadata",),
    ),
}


@dataclass
class Run:
    """A run in a folder.

    Attributes:
        clock: seconds since the epoch, a little more with each file that is written.
        saved: name of a step -> the files that its save writes.
    """

    folder: Path
    layout: Layout
    dice: Random
    clock: float = 1.7e9
    saved: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file and give it its time."""
        path.write_bytes(data)
        self.clock += 1
        os.utime(path, (self.clock, self.clock))

    def save(self, number: int, best: str | None) -> Iterator[None]:
        """Save a step: each `yield` is a moment at which the job may be killed."""
        step = self.folder / self.layout.name.format(number)
        files = dict(self.layout.files(number))
        if best is not None and "trainer_state.json" in files:
            state = json.loads(files["trainer_state.json"]) | {"best_model_checkpoint": f"/elsewhere/out/{best}"}
            files["trainer_state.json"] = json.dumps(state).encode()
        shutil.rmtree(step, ignore_errors=True)
        self.saved[step.name] = files
        step.mkdir()
        yield
        for name, data in files.items():
            place = step / (f"{name}.tmp" if name in self.layout.moved else name)
            for size in (0, len(data) // 2, len(data)):
                self.write(place, data[:size])
                yield
            place.rename(step / name)
            yield
        if self.layout.tracker:
            for text in ("", str(number)):
                self.write(self.folder / self.layout.tracker, text.encode())
                yield

    def whole(self) -> list[str]:
        """The steps that hold all that their saves wrote, the newest first."""
        names = [name for name, files in self.saved.items() if self._is_whole(name, files)]
        return sorted(names, key=lambda name: int(re.sub(r"\D", "", name)), reverse=True)

    def _is_whole(self, name: str, files: dict[str, bytes]) -> bool:
        places = [(self.folder / name / file, data) for file, data in files.items()]
        return all(place.is_file() and place.read_bytes() == data for place, data in places)


def simulated(folder: Path, dice: Random, layout: Layout) -> Run:
    """A run that jobs, retentions and people left in a folder."""
    made = Run(folder, layout, dice)
    starts = dice.choice([(0,), (0,), (0,), (500, 0), (70, 0)])
    for start in starts:
        for at in range(1, dice.randint(2, 7)):
            whole = made.whole()
            moments = made.save(start + 10 * at, dice.choice(whole) if whole and dice.random() < 0.5 else None)
            kill = dice.randint(1, 4 * len(layout.files(start + 10 * at)) + 2) if dice.random() < 0.35 else 10**6
            for moment, _ in enumerate(moments, 1):
                if moment == kill:
                    break
            if dice.random() < 0.15:
                half_delete(made)
    if layout.tracker and dice.random() < 0.2 and (whole := made.whole()):  # somebody went back
        made.write(folder / layout.tracker, re.sub(r"\D", "", dice.choice(whole)).encode())
    if dice.random() < 0.3 and (whole := made.whole()):
        target = dice.choice(whole)
        (folder / dice.choice(["best", "LATEST", "latest.good"])).symlink_to(
            dice.choice([target, folder.absolute() / target, f"/elsewhere/{target}"])
        )
    if dice.random() < 0.1 and (whole := made.whole()):
        other = folder.parent / f"{folder.name}-disk"
        other.mkdir()
        shutil.move(folder / whole[0], other / whole[0])
        (folder / whole[0]).symlink_to(other / whole[0])
    if dice.random() < 0.15:
        for path in folder.rglob("*"):
            if not path.is_symlink():
                os.utime(path, (time := 1.7e9 + dice.randint(0, 10**6), time))
    return made


def half_delete(made: Run) -> None:
    """What another retention has left of a step when it was killed."""
    steps = [path for path in made.folder.iterdir() if path.is_dir() and not path.is_symlink()]
    if steps:
        files = sorted(made.dice.choice(steps).iterdir())
        made.dice.shuffle(files)
        for path in files[: made.dice.randint(1, max(1, len(files) - 1))]:
            path.unlink()


def judged(path: str) -> Report:
    """The report on a step, made once for the same bytes under the same name: a report is of one step."""
    files = sorted((p.relative_to(path).as_posix(), p.read_bytes()) for p in Path(path).rglob("*") if p.is_file())
    key = (Path(path).name, sha256(repr(files).encode()).hexdigest())
    if key not in _REPORTS:
        _REPORTS[key] = run(REQUEST.only(path))
    return _REPORTS[key]


def hostile(made: Run) -> set[str]:
    """Change a run in one of the ways in which whole steps were lost once; the steps that must stay for it."""
    dice, whole = made.dice, made.whole()
    steps = sorted(path for path in made.folder.iterdir() if path.is_dir() and not path.is_symlink())
    if not whole or not steps:
        return set()
    victim = made.folder / dice.choice(whole)
    way = dice.choice(["inside", "less", "another", "tracker", "deep link", "option"])
    if way == "inside":
        inner = victim.joinpath(*dice.choice([(), ("a",), ("a", "b")]), made.layout.name.format(9_999))
        inner.mkdir(parents=True)
        for name, data in made.saved[whole[0]].items():
            (inner / name).write_bytes(data)
        return {victim.name}
    if way in ("less", "another"):  # the newest ones are of a smaller model, or of another one
        for number in (20_000, 20_010)[: dice.randint(1, 2)]:
            place = made.folder / made.layout.name.format(number)
            place.mkdir()
            state = {"lm_head.weight": torch.randn(12, 8), "other.weight": torch.randn(4, 4)}
            kept = dict([*state.items()][way == "another" :])
            if made.layout.name == "checkpoint-{}":
                made.write(place / "model.safetensors", save(kept, {"format": "pt"}))
            else:
                dcp.save({f"model.{key}": value for key, value in kept.items()}, checkpoint_id=place, no_dist=True)
        return set()
    if way == "tracker":
        name = dice.choice(["latest", "latest_checkpointed_iteration.txt", "dlrover_latest.txt"])
        (made.folder / name).unlink(missing_ok=True)
        dice.choice([os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/nowhere/else")])(made.folder / name)
        return set(whole)
    if way == "deep link":
        deep = (made.folder / whole[0]).joinpath(*"abcdefgh"[: dice.randint(1, 8)])
        deep.mkdir(parents=True)
        (deep / "x").symlink_to(dice.choice([victim, victim / "some" / "file"]))
        return {victim.name}
    return set()


def disturbed(made: Run) -> Callable[[], set[str]]:
    """What another process does to a run while it is judged; it gives the steps that must stay for it."""
    dice, whole = made.dice, made.whole()
    way = dice.choice(["overwrite", "overwrite", "link", "delete", "tracker", "best"]) if whole else ""

    def disturb() -> set[str]:
        victim = made.folder / dice.choice(whole)
        files = sorted(path for path in victim.iterdir() if path.is_file() and path.stat().st_size > 64)
        if way == "overwrite" and files:  # in place, of the same length, perhaps with the same time
            path = dice.choice(files)
            before = path.stat()
            with path.open("r+b") as file:
                file.write(bytes(64))
            if dice.random() < 0.5:
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            return set()
        if way == "link":
            (made.folder / "best-now").symlink_to(victim)
        elif way == "best":
            inner = made.folder / whole[0] / "best-now"
            inner.symlink_to(Path("..", victim.name))
        elif way == "tracker" and (tracker := made.folder / (made.layout.tracker or "none")).is_file():
            tracker.write_text(re.sub(r"\D", "", victim.name))
        elif way == "delete":
            victim.unlink() if victim.is_symlink() else shutil.rmtree(victim)
            return set()
        else:
            return set()
        return {victim.name}

    return disturb if way else set


LENIENT: tuple[dict[str, Any], ...] = (
    {"exit-zero": True}, {"fail-on": "never"}, {"severity": ["PAY=info", "COM001=info"]}, {"ignore": ["PAY"]},
    {"select": ["GEO"]}, {"depth": "metadata"},
)  # fmt: skip


def retained(made: Run, keep: int, is_hostile: bool = False) -> tuple[Retention, list[str]]:
    """What ckptlint says, and what is wrong once the steps that it names are deleted, a sentence each."""
    pointed = hostile(made) if is_hostile else set()
    disturb = disturbed(made) if is_hostile and made.dice.random() < 0.5 else set
    request = Request.of(made.dice.choice(LENIENT), Settings(), [], "delete") if is_hostile else REQUEST
    whole, tracked, pointed = made.whole(), _tracked(made), pointed | _pointed(made)
    times = {name: max(p.stat().st_mtime for p in (made.folder / name).iterdir()) for name in whole}
    moment, count = made.dice.randint(1, 4), 0

    def judge(path: str) -> Report:
        nonlocal count, pointed
        report = run(request.only(path)) if is_hostile else judged(path)
        count += 1
        if count == moment:
            pointed = pointed | disturb()
        return report

    with patch.object(steps, "_FEW", 1 << 20):  # what is done while it judges is known in this process alone
        found = deletable(str(made.folder), keep, judge, looks_at(drawing(request), run)[1])
    whole = [name for name in whole if name in made.whole()]  # as it is now
    named = {name for name in tracked | pointed if (made.folder / name).exists()}
    for path in found.paths:
        shutil.rmtree(path)
    after, wrong = made.whole(), []
    if len(after) < min(keep, len(whole)):
        wrong.append(f"{len(after)} whole steps stay of {len(whole)}, asked for {keep}")
    youngest = sorted(whole, key=lambda name: times[name], reverse=True)
    for why, names in {"newest by number": whole[:keep], "newest by time": youngest[:1]}.items():
        wrong += [f"{name} is gone, {why}" for name in names if name not in after]
    for name in named:
        if not (made.folder / name).exists():
            wrong.append(f"{name} is gone, and something names it")
    return found, wrong


def _tracked(made: Run) -> set[str]:
    """The step that the tracker names, where it is there."""
    tracker = made.folder / (made.layout.tracker or "none")
    text = tracker.read_text() if tracker.is_file() else ""
    name = made.layout.name.format(int(text)) if text else ""
    return {name} if name and (made.folder / name).exists() else set()


def _pointed(made: Run) -> set[str]:
    """The steps that links and the newest whole step's best name."""
    names = {path.readlink().name for path in made.folder.iterdir() if path.is_symlink()}
    for name in made.whole()[:1]:
        state = made.saved[name].get("trainer_state.json")
        best = json.loads(state)["best_model_checkpoint"] if state else None
        names |= {Path(best).name} if best else set()
    return {name for name in names if (made.folder / name).exists()}
