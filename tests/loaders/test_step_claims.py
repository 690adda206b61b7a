"""What a save says of its own step, in the layouts of real trainers: their state dicts, written by torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptlint
from ckptlint.model import StepClaim

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")


class Trainer:
    """torchtitan 0.2.2, train.py: `Trainer.state_dict` under the key `train_state` of `CheckpointManager.states`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """Its two numbers."""
        return {"step": self.step, "ntokens_seen": self.step * 4096}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called."""


def titan(run: Path, step: int) -> Path:
    """A step as torchtitan 0.2.2 saves it: `dcp.save(states, checkpoint_id="step-N")`, schedulers and all."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for _ in range(step):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        scheduler.step()
    names = [name for name, _ in model.named_parameters()]
    moments = {
        f"optimizer.state.{name}.{key}": value
        for name, state in zip(names, optimizer.state.values(), strict=True)
        for key, value in state.items()
    }
    states = {**model.state_dict(), **moments, "train_state": Trainer(step), "lr_scheduler": scheduler}
    dcp.save(states, checkpoint_id=str(run / f"step-{step}"), no_dist=True)
    return run / f"step-{step}"


def numbers(path: Path, depth: str = "files") -> list[tuple[str, str]]:
    report = ckptlint.check(path, depth=depth)
    return [(item.severity.label, item.message) for part in report.checkpoints for item in part.diagnostics
            if item.code == "COM002"]  # fmt: skip


def test_torchtitan(tmp_path: Path) -> None:
    """Both numbers are read from their records; a renamed folder is a warning, and Adam and the scheduler are not."""
    for step in (2, 4):
        titan(tmp_path, step)
    claims = ckptlint.load(tmp_path / "step-4").claims
    assert claims[:2] == (StepClaim("lr_scheduler.last_epoch", 4), StepClaim("train_state.step", 4))
    assert (claims[2].source[:10], claims[2].step) == ("optimizer.", 4)
    assert numbers(tmp_path / "step-4", "headers") == []
    (tmp_path / "step-4").rename(tmp_path / "step-6")
    assert numbers(tmp_path / "step-6", "headers") == [
        ("warning", "the folder is named for step 6, but train_state.step says step 4")
    ]


def test_an_older_step_under_a_newer_name(tmp_path: Path) -> None:
    """One cause, one finding: the train state, the scheduler and Adam all say 2."""
    shutil.copytree(titan(tmp_path, 2), tmp_path / "step-4")
    found = numbers(tmp_path / "step-4", "headers")
    assert found == [("warning", "the folder is named for step 4, but train_state.step says step 2")]


def test_adam_alone(tmp_path: Path) -> None:
    """Without a train state Adam's count tells, where it is the number of another step; it did not move."""
    state = {"w": torch.ones(8, 8), "optimizer.state.w.step": torch.tensor(2.0)}
    state |= {"optimizer.state.w.exp_avg": torch.ones(8, 8), "optimizer.state.w.exp_avg_sq": torch.ones(8, 8)}
    for step in (2, 4):
        dcp.save(state, checkpoint_id=str(tmp_path / "other" / f"step_{step}"), no_dist=True)
    assert numbers(tmp_path / "other" / "step_4") == [
        ("warning", "the folder is named for step 4, but optimizer.state.w.step says step 2")
    ]


def test_frozen_parameters_stay_behind(tmp_path: Path) -> None:
    """A body that was frozen in step 2 keeps its count; that of the head, whose name is the last of many, tells."""
    for step in (2, 4):
        counts = {f"body.{number:03}": 2.0 for number in range(99)} | {"head": float(step)}
        state = {name: {"step": torch.tensor(count)} for name, count in counts.items()}
        folder = tmp_path / f"step_{step}"
        dcp.save({"w": torch.ones(8, 8), "optimizer": {"state": state}}, checkpoint_id=str(folder), no_dist=True)
        of_trainer = tmp_path / "trainer" / f"checkpoint-{step}"
        of_trainer.mkdir(parents=True)
        torch.save({"state": state, "param_groups": [{"params": [*state]}]}, of_trainer / "optimizer.pt")
        torch.save({"w": torch.ones(8, 8)}, of_trainer / "pytorch_model.bin")
    assert ckptlint.load(tmp_path / "step_4").claims == (StepClaim("optimizer.state.head.step", 4),)
    assert numbers(tmp_path / "step_4") == []
    assert [file.step for file in ckptlint.load(of_trainer).step_files] == [4]
    assert numbers(of_trainer) == []


def test_a_tensor_without_axes(tmp_path: Path) -> None:
    """torchtitan 0.0.2 kept the step as a tensor."""
    state = {"w": torch.ones(4), "train_state": {"step": torch.tensor(3, dtype=torch.int32)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "step-9"), no_dist=True)
    assert ckptlint.load(tmp_path / "step-9").claims == (StepClaim("train_state.step", 3),)


def test_accelerates_optimizer_that_was_left_from_the_step_before(tmp_path: Path) -> None:
    """axolotl: FSDP2's model and optimizer are DCP folders in a step of the Trainer."""
    for number, made in ((10, 10), (20, 20), (30, 20)):
        step = tmp_path / f"checkpoint-{number}"
        moments = {"w": {"step": torch.tensor(float(made)), "exp_avg": torch.ones(8)}}
        dcp.save({"model": {"w": torch.ones(8)}}, checkpoint_id=str(step / "pytorch_model_fsdp_0"), no_dist=True)
        dcp.save({"optimizer": {"state": moments}}, checkpoint_id=str(step / "optimizer_0"), no_dist=True)
        (step / "trainer_state.json").write_text(f'{{"global_step": {number}}}')
    assert numbers(tmp_path) == [
        ("warning", "the folder is named for step 30, but optimizer.state.w.step says step 20")
    ]
    assert numbers(tmp_path / "checkpoint-20") == []
