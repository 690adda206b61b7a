"""Moments in files of torch.save beside a model, by number: damage is told at each depth, training stays silent."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import REAL, codes, report_on
from test_healthy_optimizers import Decoder, of_all, train

from ckptlint.lint.settings import request

NUMBERS = {f"OPT01{n}" for n in range(4)} | {"RUN007", "RUN008", "RUN009"} | {f"PAY0{n}" for n in range(16, 21)}
State = dict[str, Any]


def trainer(model: State, optimizer: State, run: Path, step: int) -> Path:
    """As transformers' Trainer and accelerate name the files."""
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file(model, place / "model.safetensors")
    torch.save(optimizer, place / "optimizer.pt")
    return place / "optimizer.pt"


def lightning(model: State, optimizer: State, run: Path, step: int) -> Path:
    """As Lightning's Trainer does, which trains with several optimizers too."""
    place = run / f"epoch=0-step={step}.ckpt"
    run.mkdir(exist_ok=True)
    saved = {"epoch": 0, "global_step": step, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {}}
    torch.save(saved | {"state_dict": model, "optimizer_states": [optimizer], "lr_schedulers": []}, place)
    return place


LAYOUTS = {"trainer": trainer, "lightning": lightning}
HAS_STEPS = {"trainer": True, "lightning": False}
"""Whether the step before is looked for: not of files, whose names may count epochs."""


@pytest.fixture(scope="module")
def steps() -> Iterator[dict[int, tuple[State, State]]]:
    """Model and optimizer of AdamW after 30 and 40 steps."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model, saved = Decoder(), dict[int, tuple[State, State]]()

        def keep(step: int, optimizers: list[torch.optim.Optimizer]) -> None:
            if step in (30, 40):
                states = model.state_dict(), optimizers[0].state_dict()
                saved[step] = torch.load(through_file(states), weights_only=False)

        train(model, of_all(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), amsgrad=True), steps=41, each=keep)
    yield saved


def through_file(value: Any) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return file


def matrices(optimizer: State) -> list[State]:
    return [state for state in optimizer["state"].values() if state["exp_avg"].dim() == 2]


def maximum_lost(optimizer: State) -> None:
    matrices(optimizer)[3]["max_exp_avg_sq"].zero_()


def squares_lost(optimizer: State) -> None:
    matrices(optimizer)[3]["exp_avg_sq"].zero_()


def first_too_large(optimizer: State) -> None:
    matrices(optimizer)[4]["exp_avg"].mul_(100)


def a_sign(optimizer: State) -> None:
    matrices(optimizer)[2]["exp_avg_sq"][0, 0] *= -1


def of_another_parameter(optimizer: State) -> None:
    one, two = [state for state in matrices(optimizer) if state["exp_avg"].shape == (16, 16)][:2]
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        one[name], two[name] = two[name], one[name]


def never_stepped(optimizer: State) -> None:
    for state in optimizer["state"].values():
        state["step"].fill_(1)
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            state[name].zero_()


DAMAGES: dict[Callable[[State], None], tuple[set[str], set[str]]] = {
    maximum_lost: ({"OPT010"}, {"OPT010"}),
    squares_lost: ({"OPT011", "RUN008"}, {"OPT011", "RUN008"}),
    first_too_large: ({"OPT011", "RUN008"}, {"OPT011", "RUN008"}),
    a_sign: ({"RUN008"}, {"OPT010", "RUN008"}),
    of_another_parameter: ({"RUN008"}, {"RUN008"}),
    never_stepped: (set(), {"OPT013"}),
}
"""Damage -> the rules that tell it at depth headers, and at depth data; beside RUN008, OPT011 says nothing."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_silent(layout: str, steps: dict[int, tuple[State, State]], tmp_path: Path) -> None:
    for step, states in steps.items():
        file = LAYOUTS[layout](*states, tmp_path / "run", step)
    for depth in ("headers", "data"):
        report = report_on(tmp_path / "run", depth=depth)
        assert codes(report) & NUMBERS == set()
        [states] = report.checkpoints[-1].checkpoint.optimizers
        assert states.files.names[0] == file.name
        assert states.pairs is not None and len(states.pairs.rows) == 2 * len(steps[40][1]["state"])
        assert (states.changes is not None and len(states.changes.rows) > 0) == HAS_STEPS[layout]


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_told(
    damage: Callable[[State], None], layout: str, steps: dict[int, tuple[State, State]], tmp_path: Path
) -> None:
    LAYOUTS[layout](*steps[30], tmp_path / "run", 30)
    model, optimizer = torch.load(through_file(steps[40]), weights_only=False)
    damage(optimizer)
    file = LAYOUTS[layout](model, optimizer, tmp_path / "run", 40)
    for depth, told in zip(("headers", "data"), DAMAGES[damage], strict=True):
        report = report_on(tmp_path / "run", depth=depth)
        yielding = {"OPT011"} if "RUN008" in told else set()
        assert codes(report) & NUMBERS == told - (yielding if HAS_STEPS[layout] else {"RUN008"}), depth
        numbers = [item for item in report.diagnostics if item.code in NUMBERS]
        assert {item.finding.at.file for item in numbers} <= {file.name}
        assert not any(part.failed for part in report.checkpoints)


def test_numbers_are_drawn_where_a_step_is_large(
    steps: dict[int, tuple[State, State]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "CHEAP_BYTES", 1)
    trainer(*steps[30], tmp_path / "run", 30)
    model, optimizer = torch.load(through_file(steps[40]), weights_only=False)
    trainer(model, optimizer, tmp_path / "run", 40)
    assert codes(report_on(tmp_path / "run")) & NUMBERS == set()
    first_too_large(optimizer)
    torch.save(optimizer, tmp_path / "run/checkpoint-40/optimizer.pt")
    assert codes(report_on(tmp_path / "run")) & NUMBERS == {"RUN008"}


def test_a_real_file_of_accelerate(tmp_path: Path) -> None:
    file = shutil.copytree(REAL / "rank_files/accelerated", tmp_path / "accelerated") / "optimizer.bin"
    assert codes(report_on(file.parent, depth="data")) & NUMBERS == set()
    optimizer = torch.load(file)
    max(optimizer["state"].values(), key=lambda state: float(state["exp_avg"].abs().max()))["exp_avg_sq"].zero_()
    torch.save(optimizer, file)
    for depth in ("headers", "data"):
        assert codes(report_on(file.parent, depth=depth)) & NUMBERS == {"OPT011"}, depth


def test_a_real_file_of_lightning(tmp_path: Path) -> None:
    """Two optimizers in one file are told apart."""
    real = REAL / "rank_files/lightning/epoch=0-step=3.ckpt"
    assert codes(report_on(real, depth="data")) & NUMBERS == set()
    root = torch.load(real, weights_only=False)
    [optimizer] = root["optimizer_states"]
    root["optimizer_states"].append(torch.load(through_file(optimizer)))
    for state in optimizer["state"].values():
        state["step"].fill_(1)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()
    torch.save(root, tmp_path / real.name)
    told = [item for item in report_on(tmp_path / real.name, depth="data").diagnostics if item.code in NUMBERS]
    assert [(item.code, item.fqn) for item in told] == [("OPT013", "optimizer.0.state.0.exp_avg")]


def test_a_bit_of_a_moment_is_told_once(steps: dict[int, tuple[State, State]], tmp_path: Path) -> None:
    """What does not match its checksum proves nothing else."""
    file = trainer(*steps[40], tmp_path / "run", 40)
    data = bytearray(file.read_bytes())
    wanted = matrices(steps[40][1])[4]["exp_avg"].numpy().tobytes()
    at = data.find(wanted)
    data[at : at + len(wanted)] = matrices(steps[40][1])[4]["exp_avg"].mul(1e4).numpy().tobytes()
    file.write_bytes(data)
    assert codes(report_on(tmp_path / "run", depth="headers"), "error", "warning") == {"OPT011"}
    assert codes(report_on(tmp_path / "run", depth="data"), "error", "warning") == {"PAY012"}
