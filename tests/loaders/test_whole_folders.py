"""Folders as trainers and exporters leave them: every file is checked, known as harmless or named, and none is judged
as something else than it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def a_model(number: int = 0) -> dict[str, Any]:
    """The state of a small model, of other values for each number."""
    return {"0.weight": torch.full((16, 8), number + 0.5), "0.bias": torch.arange(16.0) + number}


def an_optimizer() -> dict[str, Any]:
    model = torch.nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def written(run: Path, files: dict[str, Any]) -> Path:
    """A folder with these files: of torch.save, of text, or of bytes."""
    for name, value in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            (run / name).write_bytes(value)
        elif name.endswith(".safetensors"):
            save_file(value, run / name)
        else:
            torch.save(value, run / name)
    return run


FOLDERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a model and its optimizer": ({"model.pt": a_model(), "optimizer.pt": an_optimizer()}, ["optimizer.pt"], []),
    "first of a series": ({"model_0.pt": a_model(), "optimizer_0.pt": an_optimizer()}, ["optimizer_0.pt"], []),
    "steps in files, with an optimizer each": (
        {f"model_{n}00.pt": a_model(n) for n in (1, 2)} | {f"optimizer_{n}00.pt": an_optimizer() for n in (1, 2)},
        ["model_200.pt", "optimizer_200.pt"], ["model_100.pt", "optimizer_100.pt"],
    ),
    "Composer": (
        {f"ep{n}-ba{n}0-rank0.pt": {"state": a_model(n), "epoch": n} | a_model(n) for n in (1, 2, 3)},
        ["ep3-ba30-rank0.pt"], ["ep1-ba10-rank0.pt", "ep2-ba20-rank0.pt"],
    ),
    "nanoGPT": ({"ckpt.pt": {"model": a_model(), "optimizer": an_optimizer(), "iter_num": 3}}, ["ckpt.pt"], []),
    "litgpt": (
        {f"{step}/lit_model.pth": {"model": a_model()} for step in ("step-00000010", "step-00000020", "final")},
        ["step-00000020/lit_model.pth", "final/lit_model.pth"], ["step-00000010/lit_model.pth"],
    ),
    "Ray Train": (
        {f"checkpoint_00000{n}/{name}.pt": {"epoch": n} if name == "extra_state" else a_model(n)
         for n in (0, 1) for name in ("model", "extra_state")},
        ["checkpoint_000001/model.pt", "checkpoint_000001/extra_state.pt"], ["checkpoint_000000/model.pt"],
    ),
    "ColossalAI": (
        {f"epoch-0_step-{n}/model.pt": a_model(n) for n in (30, 60)}, ["epoch-0_step-60/model.pt"], [],
    ),
    "several models": (
        {"alex.pth": a_model(1), "vgg.pth": a_model(2), "lin.pth": {"lin0.weight": torch.ones(1, 64)}},
        ["alex.pth", "vgg.pth", "lin.pth"], [],
    ),
    "files beside the steps": (
        {"step-10/model.safetensors": a_model(1), "step-20/model.safetensors": a_model(2), "pt.bin": a_model(2)},
        ["pt.bin", "step-20/model.safetensors"], ["step-10/model.safetensors"],
    ),
    "xtuner": (
        {"iter_100.pth": a_model(), "hf-100/model.safetensors": a_model()},
        ["iter_100.pth", "hf-100/model.safetensors"], [],
    ),
}  # fmt: skip
"""Files of a run -> those of its newest step, each of which a resume reads; and those of older steps."""


@pytest.mark.parametrize("name", FOLDERS)
def test_every_file_is_accounted_for(tmp_path: Path, name: str) -> None:
    """What is empty, full of zeros or cut is broken, whatever its first bytes; what is older is named as not read."""
    files, newest, older = FOLDERS[name]
    run = written(tmp_path / "run", files)
    report = ckptlint.check(run)
    assert (codes(report, "error", "warning"), report.exit_code) == (set(), 0)
    for damaged in newest:
        whole = (run / damaged).read_bytes()
        for data in (b"", bytes(len(whole)), whole[: len(whole) * 2 // 3]):
            (run / damaged).write_bytes(data)
            report = ckptlint.check(run)
            assert report.exit_code == 1 and Path(damaged).name in str(found(report)), (damaged, data[:8])
        (run / damaged).write_bytes(whole)
    unseen = [sentence for part in ckptlint.check(run).checkpoints for sentence in part.checkpoint.unseen]
    assert any("--all-steps" in sentence for sentence in unseen) or not older
    for damaged in older:
        (run / damaged).write_bytes(b"")
    assert ckptlint.check(run).exit_code == 0
    if older:
        assert ckptlint.check(run, all_steps=True).exit_code == 1


@pytest.mark.parametrize("names", [["checkpoint_1.pt", "checkpoint_2.pt"], ["ckpt.pt"]])
def test_a_full_disk_is_no_wrong_path(tmp_path: Path, names: list[str]) -> None:
    report = ckptlint.check(written(tmp_path, dict.fromkeys(names, b"")))
    assert report.exit_code == 1 and names[-1] in str(found(report))
