"""State that was lost and that nothing else of the save misses, in files that torch and others write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import REAL, report_on
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def told(folder: Path, code: str) -> list[str]:
    """The sentences of a rule that are more than information."""
    loud = [
        item
        for report in report_on(folder, depth="data").checkpoints
        for item in report.diagnostics
        if item.code == code
    ]
    return [item.message for item in loud if item.severity.label != "info"]


def trained(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its AdamW, with a group of matrices and a group of vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    matrices, vectors = (
        [param for param in model.parameters() if (param.dim() > 1) is is_matrix] for is_matrix in (True, False)
    )
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def engine_states(**changes: Any) -> dict[str, Any]:
    """The entries of `mp_rank_00_model_states.pt` that DeepSpeed 0.19 writes at stage 0."""
    model, optimizer = trained()
    state = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 2, "param_shapes": None}
    state |= {"lr_scheduler": {"last_batch_iteration": 1}, "dp_world_size": 1, "mp_world_size": 1}
    return state | {"ds_version": "0.19.8", "ds_config": {"zero_optimization": {"stage": 0}}} | changes


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, False),
        ({"optimizer": None}, True),
        ({"optimizer": None, "lr_scheduler": None, "global_steps": 0}, False),
        ({"optimizer": None, "lr_scheduler": None}, False),
        ({"optimizer": None, "global_steps": 0}, False),
    ],
)
def test_an_engine_that_stepped_and_never_wrote_its_optimizer_is_told(
    tmp_path: Path, changes: dict[str, Any], is_told: bool
) -> None:
    (step := tmp_path / "global_step2").mkdir()
    torch.save(engine_states(**changes), step / "mp_rank_00_model_states.pt")
    assert ["the job stepped 2 times" in text for text in told(step, "COM001")] == [True] * is_told


@pytest.mark.parametrize(
    ("lost", "changes", "is_told"),
    [
        ((), {}, False),
        ((), {"optimizer_states": []}, True),
        (("optimizer_states",), {}, True),
        (("optimizer_states", "lr_schedulers"), {}, False),  # save_weights_only
        ((), {"optimizer_states": [], "lr_schedulers": []}, False),
        ((), {"optimizer_states": [], "global_step": 0}, False),
        (("optimizer_states", "pytorch-lightning_version"), {}, False),  # whose optimizer may be anywhere
        (("optimizer_states", "pytorch-lightning_version"), {"optimizer": None}, True),
    ],
)
def test_a_file_with_a_scheduler_and_no_optimizer_is_told(
    tmp_path: Path, lost: tuple[str, ...], changes: dict[str, Any], is_told: bool
) -> None:
    """A file that Lightning's Trainer wrote, with the scheduler that it had been given."""
    state = torch.load(REAL / "frameworks/lightning/epoch=0-step=4.ckpt", weights_only=False)
    _, optimizer = trained()
    state |= {"lr_schedulers": [torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict()]} | changes
    torch.save({name: value for name, value in state.items() if name not in lost}, tmp_path / "epoch=0-step=4.ckpt")
    assert ["the job stepped 4 times" in text for text in told(tmp_path, "COM001")] == [True] * is_told


@pytest.mark.parametrize("is_beside", [False, True])
def test_an_optimizer_in_a_file_beside_is_not_lost(tmp_path: Path, is_beside: bool) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": None, "scheduler": {"last_epoch": 4}, "global_step": 4}
    torch.save(state, tmp_path / "state.pt")
    if is_beside:
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert len(told(tmp_path, "COM001")) == (not is_beside)


@pytest.mark.parametrize("folder", ["orchestrator", "results", "export"])
@pytest.mark.parametrize("lost", ["nothing", "the file", "the folder"])
def test_a_folder_of_state_that_the_only_older_step_has_is_told(tmp_path: Path, folder: str, lost: str) -> None:
    model, optimizer = trained()
    for step in (10, 20):
        (place := tmp_path / f"step_{step}").mkdir()
        torch.save(model.state_dict(), place / "pytorch_model.bin")
        torch.save(optimizer.state_dict(), place / "optimizer.pt")
        if step == 10 or lost != "the folder":
            (place / folder).mkdir()
        if step == 10 or lost == "nothing":
            name = {"orchestrator": "progress.pt", "results": "scores.pt", "export": "pytorch_model.bin"}[folder]
            torch.save({"step": step}, place / folder / name)
    sentences = ["the step has no orchestrator/progress.pt, which step_10 has"]
    assert told(tmp_path / "step_20", "COM001") == sentences * (lost != "nothing" and folder == "orchestrator")


@pytest.mark.parametrize(("world", "there"), [(4, 4), (4, 3), (4, 2), (8, 4)])
def test_a_rank_folder_without_its_file_is_told(tmp_path: Path, world: int, there: int) -> None:
    model, optimizer = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for rank in range(0, world, 2 if world == 8 else 1):
        if rank != 1 or there == 4:
            (place := tmp_path / f"rank_{rank:05d}").mkdir()
            torch.save(optimizer.state_dict(), place / "distrib_optim.pt")
    if there == 2:
        (tmp_path / "rank_00003" / "distrib_optim.pt").unlink()
    whole = {4: [], 3: ["of 1 rank of 4 is missing: rank_00001/distrib_optim.pt"], 2: []}[there]
    assert told(tmp_path, "COM012") == [f"the distrib_optim.pt file {text}" for text in whole]


@pytest.mark.parametrize(
    ("kept", "step", "is_told"),
    [
        (("optimizer.pt",), 10, False),
        ((), 10, True),
        ((), 0, False),
        (("optimizer_0",), 10, False),  # FSDP
        (("global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",), 10, False),  # DeepSpeed
        (("rank0-of-1-optimizer.pt",), 10, False),  # TPUs
    ],
)
def test_a_step_of_a_trainer_without_an_optimizer_is_told(
    tmp_path: Path, kept: tuple[str, ...], step: int, is_told: bool
) -> None:
    model, optimizer = trained()
    (place := tmp_path / f"checkpoint-{step}").mkdir()
    torch.save(model.state_dict(), place / "pytorch_model.bin")
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict(), place / "scheduler.pt")
    (place / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    for name in kept:
        (place / name).parent.mkdir(exist_ok=True)
        if "." in name:
            torch.save(optimizer.state_dict(), place / name)
        else:
            dcp.save(
                {"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=place / name, no_dist=True
            )
    assert [text for text in told(place, "COM001") if "stepped 10 times" in text] == [
        "the job stepped 10 times and has a scheduler, but no file or folder of the step holds an optimizer"
    ] * is_told


@pytest.mark.parametrize("step", [1, 100])
def test_an_adapter_that_a_run_never_trained_is_told(tmp_path: Path, step: int) -> None:
    """One that peft initialised, at a step in the name of its folder alone; at step 1 a warm-up trained nothing yet."""
    shutil.copytree(REAL / "adapters/lora_untrained", place := tmp_path / f"checkpoint-{step}")
    assert ["but this is step 100" in text for text in told(place, "CFG007")] == [True] * (step > 1)


@pytest.mark.parametrize(
    ("lost", "is_new", "is_told"), [((), False, False), ((2, 3), False, True), ((2, 3), True, False)]
)
def test_states_that_the_step_before_has_are_told(
    tmp_path: Path, lost: tuple[int, ...], is_new: bool, is_told: bool
) -> None:
    """One whose groups list other parameters is a new optimizer."""
    for step in (1, 2):
        model, optimizer = trained(step)
        (place := tmp_path / f"checkpoint_{step}").mkdir()
        torch.save(model.state_dict(), place / "pytorch_model.bin")
        state = optimizer.state_dict()
        state["state"] = {param: of for param, of in state["state"].items() if step == 1 or param not in lost}
        if is_new and step == 2:
            state["param_groups"][1]["params"] = [param for param in state["param_groups"][1]["params"] if param != 2]
        torch.save(state, place / "optimizer.bin")
    assert (
        told(tmp_path / "checkpoint_2", "RUN001")
        == ["optimizer.bin has no state for 2 of its 6 parameters; checkpoint_1 has it"] * is_told
    )
