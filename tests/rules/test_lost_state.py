"""State that was lost and that nothing else of the save misses, in files that torch and others write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from support import report_on


def told(folder: Path, code: str) -> list[str]:
    """The sentences of a rule that are more than information."""
    loud = [item for report in report_on(folder).checkpoints for item in report.diagnostics if item.code == code]
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


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_group_that_lost_its_settings_is_told(tmp_path: Path, is_flat: bool, is_lost: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    settings = ("lr", "betas", "eps", "weight_decay") if is_lost else ()
    for name in settings:
        del (state if is_flat else state["param_groups"][1])[f"param_groups.1.bias.{name}" if is_flat else name]
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert [text.partition(",")[0] for text in told(tmp_path / "step-2", "OPT014")] == [
        f"parameter group {'1.bias of 6' if is_flat else '1 of 2'} has no lr"
    ] * is_lost


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_group_of_an_optimizers_file_that_lost_its_settings_is_told(tmp_path: Path, is_lost: bool) -> None:
    model, optimizer = trained()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    state = optimizer.state_dict()
    if is_lost:
        del state["param_groups"][0]["lr"]
    torch.save(state, tmp_path / "optimizer.pt")
    assert told(tmp_path, "OPT014") == ["parameter group 0 of 2 has no lr, which group 1 has"] * is_lost
