"""`ckptlint diff --values` between two steps of a run: how far weights moved, and which did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckptlint
from ckptlint.analysis.step_before.movement import short_names
from ckptlint.comparing.values.compare import Values

FROZEN, STUCK = "model.layers.1.up.weight", "model.layers.3.up.weight"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(24, 16),
            nn.ModuleList(Block() for _ in range(5)),
            nn.Linear(16, 24),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two real steps; one weight was frozen, and one was put back though its optimizer works on it."""
    torch.manual_seed(0)
    model = Model()
    model.layers[1].up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    folder = tmp_path_factory.mktemp("steps")
    stuck = model.layers[3].up.weight
    kept = stuck.detach().clone()
    for number in range(2):
        for _ in range(3):
            tokens = torch.randint(0, 24, (8, 12))
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        stuck.data.copy_(kept)
        state, optim = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": optim}, checkpoint_id=str(folder / f"step-{number}"), no_dist=True)
    return folder / "step-0", folder / "step-1"


def test_frozen_weights_and_those_that_should_have_moved(steps: tuple[Path, Path]) -> None:
    answer = run("diff", *map(str, steps), "--values", "--format", "json")
    document = json.loads(answer.stdout)
    assert (answer.returncode, document["proven"]) == (1, False)
    assert document["did_not_move"] == [{"tensor": FROZEN, "trained": False}, {"tensor": STUCK, "trained": True}]
    (match,) = [match for match in document["matches"] if match["old"] == ["model.layers.2.down.weight"]]
    old, new = (torch.zeros(16, 32) for _ in range(2))
    for path, into in zip(steps, (old, new), strict=True):
        dcp.load({"model": {"layers.2.down.weight": into}}, checkpoint_id=str(path), no_dist=True)
    assert match["change"] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)
    assert match["cosine"] == pytest.approx(float((new * old).sum() / old.norm() / new.norm()), rel=1e-4)


def test_the_table_and_the_page(steps: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    printed = run("diff", *map(str, steps), "--values", "--html", str(page)).stdout
    table = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert "0 (layer 1)" in table["up"]
    assert "state of the optimizer and of the job" in printed
    assert f"The optimizer holds state for 1 of them: {STUCK}" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.splitlines()[-1].startswith("Moved: ")
    text = page.read_text(encoding="utf-8")
    assert text.count("heat-still") >= 3  # its style, and both weights
    assert f"{STUCK} did not move" in text
    assert "<script" not in text


def test_two_sides_that_are_no_steps_have_no_table(steps: tuple[Path, Path]) -> None:
    same = ckptlint.diff(steps[0], steps[0], values=True)
    assert isinstance(same, Values)
    assert (same.exit_code, list(same.movements)) == (0, [])


def test_names_are_as_short_as_they_can_be() -> None:
    kinds = ["h.*.attn.up.weight", "h.*.mlp.up.weight", "h.*.mlp.up.bias", "wte.weight"]
    assert list(short_names(kinds).values()) == ["attn.up", "mlp.up", "bias", "wte"]
