"""Runs as frameworks lay them out: what a check of the run and of each step, and `latest`, make of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import REAL, codes, manifest, run, swept

import ckptlint
from ckptlint.loaders.run.finished import step_state
from ckptlint.storage.local import LocalFolder

WORLD = REAL / "frameworks"
ROWS = manifest(WORLD)
HEALTHY = [row for row in ROWS if row["verdict"] == "healthy"]


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(WORLD / name, folder / Path(name).name, symlinks=True))


def latest(path: Path) -> tuple[int, str, str]:
    """(exit code, name of the step, what stands on stderr)."""
    answer = run("latest", "--isolated", path)
    return answer.returncode, answer.stdout.strip().removeprefix(f"{path}/"), answer.stderr


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_the_latest_step(row: dict[str, str]) -> None:
    assert latest(WORLD / row["path"])[:2] == (
        (0, row["latest"]) if row["latest"] and "snapshots" not in row["latest"] else (4, "")
    )


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("depth", ["files", *swept("headers"), "data"])
@pytest.mark.parametrize("row", HEALTHY, ids=lambda row: row["path"])
def test_every_step_of_a_healthy_run_is_silent(row: dict[str, str], depth: str) -> None:
    report = ckptlint.check(WORLD / row["path"], depth=depth, all_steps=True)
    assert codes(report, "error", "warning") == set()
    assert report.exit_code == 0
    assert any(part.checkpoint is not None and part.checkpoint.tensors for part in report.checkpoints)
    assert not any(part.failed for part in report.checkpoints)


@pytest.mark.parametrize("name", ["lost", "unfinished", "older", "link"])
def test_a_healthy_step_does_not_fail_for_the_tracker(name: str) -> None:
    step = next(row["latest"] for row in ROWS if row["path"] == f"trackers/{name}")
    report = ckptlint.check(WORLD / "trackers" / name / step)
    assert (codes(report, "error", "warning"), report.exit_code) == (set(), 0)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lost", "latest_checkpointed_iteration.txt names step 30: write 20 into it to resume from iter_0000020"),
        ("unfinished", "latest_checkpointed_iteration.txt names step 30: write 20 into it to resume from iter_0000020"),
        ("older", "latest_checkpointed_iteration.txt names step 10: write 20 into it to resume from iter_0000020"),
        ("link", "latest names step 30: point it to step-20"),
    ],
)
def test_latest_says_what_to_write_into_the_tracker(name: str, advice: str) -> None:
    assert advice in latest(WORLD / "trackers" / name)[2]


PARTS_OF_COLOSSALAI = ["modeling", "optimizer", "lr_scheduler", "running_states.json", "pytorch_optim_group.bin"]


@pytest.mark.parametrize("part", PARTS_OF_COLOSSALAI)
def test_a_part_that_a_step_of_colossalai_lost_is_named(tmp_path: Path, part: str) -> None:
    top = copied("colossalai", tmp_path)
    (path,) = (top / "epoch-0_step-60").rglob(part)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    report = ckptlint.check(top)
    assert [(item.code, item.title.partition(" is missing beside ")[0]) for item in report.diagnostics] == [
        ("COM001", part)
    ]
    assert latest(top)[:2] == (0, "epoch-0_step-30")


# ---------------------------------------------------------------- broken

Edit = Callable[[Path], object]


def named(old: str, new: str) -> Edit:
    """Change the inventory of the newest step."""

    def edit(top: Path) -> None:
        path = top / "global_step_20/actor/ckpt_contents.json"
        path.write_text(path.read_text().replace(old, new))

    return edit


def flipped(path: str, at: int = 200) -> Edit:
    def edit(top: Path) -> None:
        data = bytearray((top / path).read_bytes())
        data[at] ^= 1
        (top / path).write_bytes(data)

    return edit


def changed_blob(top: Path) -> None:
    (blob,) = (path for path in (top / "models--acme--tiny/blobs").iterdir() if len(path.name) == 64)
    flipped(blob.name, 500)(blob.parent)


def lost(*paths: str) -> Edit:
    def edit(top: Path) -> None:
        for path in paths:
            shutil.rmtree(top / path) if (top / path).is_dir() else (top / path).unlink()

    return edit


def written(path: str, content: bytes) -> Edit:
    return lambda top: (top / path).write_bytes(content)


def of_step(path: str, step: int) -> Edit:
    """Let a file say that it is of another step."""

    def edit(top: Path) -> None:
        state = torch.load(top / path, weights_only=False)
        state["lr_scheduler"]["last_epoch"] = step
        torch.save(state, top / path)

    return edit


BROKEN: dict[str, tuple[str, Edit, str, str]] = {
    "verl: the inventory is not written": (
        "verl_megatron", lost("global_step_20/actor/ckpt_contents.json"), "COM001", "ckpt_contents.json",
    ),
    "verl: a part of the inventory is lost": (
        "verl_megatron", lost("global_step_20/actor/optimizer"), "COM001", "optimizer/dist_ckpt",
    ),
    "verl: the inventory names another part": (
        "verl_megatron", named("extra/dist_ckpt", "other/dist_ckpt"), "COM001", "other/dist_ckpt",
    ),
    "the Trainer's mark": (
        "trainer_jit", written("checkpoint-20/checkpoint-is-incomplete.txt", b""), "COM001", "checkpoint-is-incomplete",
    ),
    "a random state of rank 0": ("trainer_jit", lost("checkpoint-20/rng_state_0.pth"), "COM012", "rng_state_0.pth"),
    "a blob that changed": ("hub_cache", changed_blob, "PAY012", "model.safetensors"),
    "VeOmni: rank 1": (
        "ranks/veomni", lost("global_step_10/extra_state/extra_state_rank_1.pt"), "COM012", "extra_state_rank_1.pt",
    ),
    "prime-rl: rank 2": ("ranks/prime_rl", lost("step_10/dataloader/rank_2.pt"), "COM012", "rank_2.pt"),
    "Automodel: rank 1 of the loader": (
        "ranks/automodel", lost("epoch_0_step_10/dataloader/dataloader_dp_rank_1.pt"), "COM012", "dp_rank_1.pt",
    ),
    "Automodel: rank 3 of the random states": (
        "ranks/automodel", lost("epoch_0_step_10/rng/rng_global_rank_2.pt"), "COM012", "rng_global_rank_2.pt",
    ),
    "verl: data of rank 1": ("ranks/verl", lost("global_step_10/data_1.pt"), "COM012", "data_1.pt"),
    "a file of a set is empty": (
        "ranks/prime_rl", written("step_10/dataloader/rank_1.pt", b""), "SAF002", "rank_1.pt is empty",
    ),
}  # fmt: skip


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_told(tmp_path: Path, case: str) -> None:
    name, edit, code, key = BROKEN[case]
    top = copied(name, tmp_path)
    edit(top)
    report = ckptlint.check(top, depth="data" if code == "PAY012" else "files")
    assert codes(report, "error", "warning") == {code}
    told = [item for item in report.diagnostics if item.code == code]
    assert len(told) == 1
    assert key in f"{told[0].title} {told[0].finding.at.file} {told[0].finding.notes}"
    if code == "COM001":
        assert latest(top)[1] != next(row["latest"] for row in ROWS if row["path"] == name)


def test_a_lost_part_without_an_inventory_of_an_older_layout(tmp_path: Path) -> None:
    top = copied("verl_megatron", tmp_path)
    for step in (10, 20):
        role = top / f"global_step_{step}/actor"
        (role / "ckpt_contents.json").unlink()
        (role / "model/dist_ckpt").rename(role / "dist_ckpt")
        shutil.rmtree(role / "model")
        shutil.rmtree(role / "optimizer")
        shutil.rmtree(role / "extra")
    assert ckptlint.check(top).exit_code == 0


def test_payload_below_a_path_is_never_nothing_there(tmp_path: Path) -> None:
    """A layout that nobody described: the folder is named, and neither command says that there is nothing."""
    (tmp_path / "run/step_1/parts").mkdir(parents=True)
    for rank in range(2):
        torch.save({"weights": torch.ones(1000)}, tmp_path / f"run/step_1/parts/somebody_{rank}.pt")
    answer = run("--isolated", tmp_path / "run")
    assert answer.returncode == 4
    assert "parts" in answer.stdout + answer.stderr
    assert latest(tmp_path / "run")[:2] == (4, "")


def test_optimizer_files_of_verl_without_any_model_file(tmp_path: Path) -> None:
    step = Path(shutil.copytree(REAL / "rank_files/verl_fsdp2_4r", tmp_path / "step"))
    for path in step.glob("model_*"):
        path.unlink()
    report = ckptlint.check(step)
    assert codes(report, "error", "warning") == {"RNK001"}
    assert ["4 of 4 model files are missing" in item.title for item in report.diagnostics] == [True]


def test_lightning_by_name_and_as_a_step(tmp_path: Path) -> None:
    """Each file is a step; the newest is cut, so the one before it is what to resume from."""
    top = copied("lightning", tmp_path)
    for name in ("epoch=0-step=4.ckpt", "last.ckpt"):
        os.truncate(top / name, 900)
        assert ckptlint.check(top / name).exit_code
    assert latest(top)[1] == "epoch=0-step=2.ckpt"
    (top / "epoch=0-step=4.ckpt").write_bytes(b"")
    assert latest(top)[1] == "epoch=0-step=2.ckpt"


def test_json_of_latest_holds_the_advice(tmp_path: Path) -> None:
    answer = run("latest", "--isolated", WORLD / "trackers/lost", "--format", "json")
    (search,) = json.loads(answer.stdout)["runs"]
    assert "write 20 into it" in search["tracker"]


def test_files_beside_a_step_are_its_own_where_the_step_is_named(tmp_path: Path) -> None:
    """Megatron-Bridge keeps dataloader states in `energon`; a link that leads out of the run is not followed."""
    run_folder = copied("energon/larger_job", tmp_path)
    step = run_folder / "iter_0000010"
    assert codes(ckptlint.check(step), "warning") == {"COM012"}
    (run_folder / "energon").rename(tmp_path / "elsewhere")
    (run_folder / "energon").symlink_to(tmp_path / "elsewhere")
    assert codes(ckptlint.check(step), "warning") == set()


def test_a_step_with_the_mark_of_a_running_save_is_nowhere_a_finished_one(tmp_path: Path) -> None:
    shutil.copytree(REAL / "frameworks" / "trainer_jit", tmp_path / "run")
    step = tmp_path / "run" / "checkpoint-20"
    assert step_state(LocalFolder(step)) != "unfinished"
    (step / "checkpoint-is-incomplete.txt").touch()
    assert step_state(LocalFolder(step)) == "unfinished"
