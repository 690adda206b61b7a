"""All commands say the same of one step: what it lacks, what is hidden, what a resume does not need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support import REAL, codes, run

import ckptlint

WEIGHTS = {f"layers.{n}.w": torch.arange(1.0, 33).reshape(4, 8) + n for n in range(2)}
MOMENTS = {f"optimizer.state.exp_avg.{key}": value * 0.1 for key, value in WEIGHTS.items()}


def save(run_folder: Path, number: int, *, model: str = "weights/model", optimizer: str = "optimizer/optim") -> Path:
    """A step with model and optimizer in folders of their own, as NeMo-RL saves them; "" leaves one out."""
    step = run_folder / f"step_{number}"
    for place, state in ((model, WEIGHTS), (optimizer, MOMENTS)):
        if place:
            moved = {key: value + number for key, value in state.items()}
            dcp.save(moved, checkpoint_id=step / "policy" / place, no_dist=True)
    return step


def answers(runs: Path, *options: str) -> tuple[list[str], str | None, str | None]:
    """Codes of a check of the run, the newest step that `--all-steps` names, and that of `latest`."""
    report = ckptlint.check(runs)
    lines = run(runs, "--all-steps", "--fail-on", "warning", *options).stdout.split("The newest step that passes:")
    printed = lines[1].split()[0] if lines[1:] else None
    chosen = run("latest", runs, *options).stdout.strip() or None
    return sorted(codes(report, "error", "warning")), printed, chosen


def test_a_step_with_an_optimizer_and_no_model(tmp_path: Path) -> None:
    older = save(tmp_path, 5)
    step = save(tmp_path, 10)
    assert answers(tmp_path) == ([], str(step), str(step))
    shutil.rmtree(step / "policy" / "weights")
    assert answers(tmp_path) == (["COM001"], str(older), str(older))
    [item] = ckptlint.check(step).diagnostics
    assert item.title == "step_10 holds an optimizer and no model: policy/weights is missing, which step_5 has"
    gone = ckptlint.deletable(tmp_path, 1)
    assert [decision.step.verdict for decision in gone.decisions] == ["unfinished", "passes"]
    assert run("watch", "--once", "--interval", 0, tmp_path).returncode == 1
    shutil.rmtree(older)  # it needs no older step to be so
    assert answers(tmp_path) == (["COM001"], None, None)


def verdicts(runs: Path) -> dict[str, dict[str, str]]:
    """View -> step -> its verdict there."""
    table = json.loads(run(runs, "--all-steps", "--format", "json").stdout)["steps"]
    lines = run("watch", "--once", "--interval", 0, "--jsonl", runs).stdout.splitlines()
    rows = {"--all-steps": table, "watch": [*map(json.loads, lines)]}
    rows |= {"latest": ckptlint.latest(runs).rows(), "deletable": ckptlint.deletable(runs, 1).rows()}
    return {view: {Path(row["path"]).name: row["verdict"] for row in of_view} for view, of_view in rows.items()}


def test_a_newest_step_that_lost_a_part_is_nowhere_the_answer(tmp_path: Path) -> None:
    older, step = save(tmp_path, 5), save(tmp_path, 10)
    assert {tuple(view.values()) for view in verdicts(tmp_path).values()} <= {("passes",), ("passes", "passes")}
    shutil.rmtree(step / "policy" / "optimizer")
    assert answers(tmp_path) == ([], str(older), str(older))
    for view, of_view in verdicts(tmp_path).items():
        assert of_view == {"step_10": "lacks parts", "step_5": "passes"}, view
    shutil.rmtree(older / "policy" / "optimizer")  # a run that saves no optimizer lacks none
    assert answers(tmp_path) == ([], str(step), str(step))


def test_of_two_steps_with_one_number_each_view_takes_the_same(tmp_path: Path) -> None:
    for name in ("epoch=0-step=10.ckpt", "last.ckpt"):
        shutil.copy(REAL / "frameworks/lightning/last.ckpt", tmp_path / name)
    assert answers(tmp_path)[1:] == (str(tmp_path / "last.ckpt"), str(tmp_path / "last.ckpt"))


@pytest.mark.parametrize(
    "place",
    [
        lambda top: save(top / "optim", 10, model="").parent,
        lambda top: (save(top / "weights", 10, optimizer=""), save(top / "states", 10, model=""))[1].parent,
        lambda top: save(top, 10, model="").joinpath("policy", "optimizer"),
        lambda top: save(top, 10, optimizer="").parent,
    ],
    ids=["a tree of optimizers", "a tree of weights beside it", "the optimizer alone is asked for", "the model alone"],
)
def test_an_optimizer_that_lies_by_itself_on_purpose(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    assert not codes(ckptlint.check(place(tmp_path)), "error", "warning")


def save_beside(run_folder: Path, number: int, model: str) -> Path:
    """A step with the files of accelerate 1.12's `save_state`, its model under a path of its own."""
    step = run_folder / f"checkpoint_{number}"
    (step / model).parent.mkdir(parents=True)
    save_file({key: value + number for key, value in WEIGHTS.items()}, step / model)
    weights = [torch.nn.Parameter(torch.zeros(4, 8)) for _ in WEIGHTS]
    optimizer = torch.optim.AdamW(weights)
    torch.save(optimizer.state_dict(), step / "optimizer.bin")
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict(), step / "scheduler.bin")
    return step


@pytest.mark.parametrize(
    ("model", "also", "is_lost"),
    [
        ("consolidated/model.safetensors", "consolidated/config.json", True),
        ("export/model.safetensors", "export/config.json", True),
        ("model/model.safetensors", "", False),  # saved elsewhere from now on
        ("weights.safetensors", "", False),
    ],
)
def test_an_export_in_a_step_is_not_the_model_that_a_resume_reads(
    tmp_path: Path, model: str, also: str, is_lost: bool
) -> None:
    older, step = save_beside(tmp_path, 20, "model.safetensors"), save_beside(tmp_path, 40, model)
    if also:
        (step / also).write_text('{"architectures": ["Invented"]}')
    newest = str(older if is_lost else step)
    assert answers(tmp_path) == (["COM001"] * is_lost, newest, newest)
    assert {view["checkpoint_40"] for view in verdicts(tmp_path).values()} == {"unfinished" if is_lost else "passes"}


def test_an_unknown_file_as_large_as_a_model_may_be_the_model(tmp_path: Path) -> None:
    step = save(tmp_path, 10, model="")
    (step / "policy" / "blob.xyz").write_bytes(bytes(range(256)) * 16)
    assert not codes(ckptlint.check(tmp_path), "error", "warning")


@pytest.fixture
def hole(tmp_path: Path) -> Path:
    shutil.copytree(REAL / "fsdp2_4r", tmp_path / "run/step-10")
    shutil.copytree(REAL / "fsdp2_4r_hole", tmp_path / "run/step-20")
    return tmp_path / "run"


def test_a_baseline_recommends_no_step(hole: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    assert run(hole, "--all-steps", "--output", known).returncode == 1
    done = run(hole, "--all-steps", "--baseline", known)
    assert done.returncode == 0
    assert "hidden by the baseline)" in done.stdout
    _, printed, chosen = answers(hole, "--baseline", str(known))
    assert (printed, chosen) == (str(hole / "step-10"), str(hole / "step-10"))
    [table] = [json.loads(run(hole, "--all-steps", "--baseline", known, "--format", "json").stdout)["steps"]]
    assert [bool(step["hidden"]) for step in table] == [True, False]


def test_an_ignore_recommends_no_step(hole: Path, tmp_path: Path) -> None:
    settings = tmp_path / "ckptlint.toml"
    settings.write_text('[per-key-ignores]\n"*" = { rules = ["GEO"], reason = "known" }\n')
    _, printed, chosen = answers(hole, "--config", str(settings))
    assert (printed, chosen) == (str(hole / "step-10"), str(hole / "step-10"))


def test_no_option_recommends_a_step_with_an_error_unsaid(hole: Path) -> None:
    shutil.copytree(hole / "step-20", hole / "step-10", dirs_exist_ok=True)
    alone = ["--select", "GEO"]
    for option in (["--exit-zero"], ["--fail-on", "never"]):
        assert answers(hole, *option)[1] is None, option
    for option in (["--severity", "GEO004=info"], ["--ignore", "GEO004"]):
        said = " ".join(run(hole, "--all-steps", *alone, *option).stdout.split())
        assert f"The newest step that passes with --select and {option[0]}: {hole}/step-20" in said
    assert run("latest", hole, *alone, "--severity", "GEO004=info").returncode == 1
    assert "--select and --ignore left rules out" in run("latest", hole, *alone, "--ignore", "GEO004").stderr
    assert "left rules out" not in run("latest", hole.parent / "run", "--before", 20).stderr


def test_a_broken_export_inside_a_step_is_told_and_the_step_stays_usable(tmp_path: Path) -> None:
    older, step = save(tmp_path, 5), save(tmp_path, 10)
    export = step / "policy/weights/model/consolidated"
    export.mkdir()
    save_file(WEIGHTS, export / "model.safetensors")
    (export / "model.safetensors").write_bytes((export / "model.safetensors").read_bytes()[:-40])
    assert answers(tmp_path) == (["PAY004"], str(step), str(step))
    said = run("latest", tmp_path).stderr
    assert "in the export consolidated, which the step can make again: model.safetensors is 40 B short" in said
    shutil.rmtree(step / "policy/weights/model")
    (step / "policy/weights/model").mkdir(parents=True)
    save_file(WEIGHTS, step / "policy/weights/model/model.safetensors")  # the only model: it must be whole
    whole = (step / "policy/weights/model/model.safetensors").read_bytes()
    (step / "policy/weights/model/model.safetensors").write_bytes(whole[:-40])
    assert answers(tmp_path)[1:] == (str(older), str(older))
