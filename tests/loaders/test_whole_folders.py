"""Folders as trainers and exporters leave them: every file is checked, known as harmless or named, and none is judged
as something else than it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import codes, found

import ckptlint

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402


def step_of_two_models(run: Path, trained: int, stored: int) -> Path:
    """A step as the Trainer of sentence-transformers writes it: a model, the layer behind it, one optimizer of both."""
    step = run / "checkpoint-2"
    (step / "2_Dense").mkdir(parents=True)
    model, dense = torch.nn.Linear(4, 8), torch.nn.Linear(8, trained, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *dense.parameters()])
    dense(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), step / "model.safetensors")
    save_file({"linear.weight": torch.ones(stored, 8)}, step / "2_Dense" / "model.safetensors")
    torch.save(optimizer.state_dict(), step / "optimizer.pt")
    return step


def test_one_optimizer_of_two_models_is_compared_with_both(tmp_path: Path) -> None:
    assert codes(ckptlint.check(step_of_two_models(tmp_path / "a", 6, 6))) == set()
    ((code, _, sentence),) = found(ckptlint.check(step_of_two_models(tmp_path / "b", 6, 7)))
    assert code == "OPT008" and "optimizer.pt" in sentence


@pytest.mark.parametrize("name", ["mtp.safetensors", "vision-00001-of-00001.safetensors", "extra.safetensors"])
def test_a_file_that_the_index_names_is_of_its_model(tmp_path: Path, name: str) -> None:
    """DeepSeek's layers for multi-token prediction, vision towers: numbers that no model by itself would have."""
    first = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(8, 4) for i in range(2)}
    second = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(8, 4) for i in (2, 4)}
    save_file(first, tmp_path / "model-00001-of-00001.safetensors")
    save_file(second, tmp_path / name)
    places = {**dict.fromkeys(first, "model-00001-of-00001.safetensors"), **dict.fromkeys(second, name)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (part,) = ckptlint.check(tmp_path).checkpoints
    assert {*part.checkpoint.tensors} == {*first, *second}
    save_file(load_file(tmp_path / name) | {"not.named": torch.ones(2)}, tmp_path / name)
    assert "PAY014" in codes(ckptlint.check(tmp_path), "error", "warning")
    index.write_text("{")
    assert len(ckptlint.check(tmp_path).checkpoints) == 2
