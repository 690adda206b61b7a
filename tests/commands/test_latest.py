"""`ckptlint latest` on runs of real steps: the newest that passes, what was skipped, and what is never answered."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import support
import torch
from safetensors.torch import save_file
from support import REAL, copy_step

import ckptlint
from ckptlint.lint.settings import request

GOOD, HOLE = REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole"


def latest(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    return support.run("latest", "--isolated", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A torn newest step, a hole in the one before, a truncated one, and two good ones."""
    for number in (100, 200, 300, 500):
        copy_step(GOOD, tmp_path / f"step-{number}", number)
    shutil.copytree(HOLE, tmp_path / "step-400")
    (tmp_path / "step-500" / ".metadata").rename(tmp_path / "step-500" / ".metadata.tmp")
    os.truncate(tmp_path / "step-300" / "__1_0.distcp", 5_000)
    return tmp_path


def test_the_newest_good_step_alone_is_on_stdout(run: Path) -> None:
    """What was skipped, and why, is on stderr, the newest first."""
    answer = latest(run)
    assert (answer.returncode, answer.stdout) == (0, f"{run}/step-200\n")
    *lines, unread = answer.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["step-500", "step-400", "step-300", "step-200"]
    assert unread == "ckptlint: tensor bytes were not read; --depth data reads them all"
    assert "its save did not finish" in lines[0]
    assert "error GEO004" in lines[1]
    assert "error PAY004" in lines[2]


def test_what_was_read_is_not_said_to_be_unread(run: Path) -> None:
    answer = latest(run, "--depth", "data")
    assert answer.stdout == f"{run}/step-200\n" and "not read" not in answer.stderr


def test_for_cron_a_pass_says_no_more_than_its_paths(run: Path) -> None:
    """With -q stderr has what failed, with -qq nothing."""
    answer = latest(run, "-q")
    assert (answer.returncode, answer.stdout) == (0, f"{run}/step-200\n")
    assert [line.split()[1:3] for line in answer.stderr.splitlines()] == [
        [f"step-{number}", "skipped:"] for number in (500, 400, 300)
    ]
    assert latest(run, "-qq").stderr == "" and latest(run, "-qq").stdout == answer.stdout
    assert latest(run, "-q", "--before", "300").stderr == ""
    none = latest(run, "-q", "--before", "500", "--require", "scheduler")
    assert (none.returncode, none.stderr.splitlines()[-1]) == (1, "ckptlint: no step passes")
    shutil.rmtree(run / "step-100")
    enough, short = (support.run("deletable", "--isolated", run, "--keep", keep, "-q") for keep in ("1", "2"))
    assert (enough.returncode, enough.stderr) == (0, "")
    assert short.returncode == 1 and "2 whole steps must stay; this run has 1" in short.stderr
    assert support.run("deletable", "--isolated", run, "--keep", "2", "-qq").stderr == ""


def test_deletable_says_what_it_did_not_read(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        step = tmp_path / f"checkpoint-{number}"
        step.mkdir()
        save_file({"w": torch.ones(4) * number}, step / "model.safetensors")
    answer = support.run("deletable", "--isolated", tmp_path, "--keep", "2")
    assert answer.stdout == f"{tmp_path}/checkpoint-10\n"
    assert answer.stderr.splitlines()[-1].startswith(
        "ckptlint: tensor bytes were not read; --depth data reads them all"
    )


def test_a_report_on_a_step_that_fails_names_what_finds_another(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    advice = "`ckptlint latest RUN_DIR` prints the newest step that passes."
    said = " ".join(support.run("check", "--isolated", run / "step-400").stdout.split())
    assert said.count(advice) == 1
    assert advice not in " ".join(support.run("check", "--isolated", run / "step-200").stdout.split())
    milder = support.run("check", "--isolated", run / "step-400", "--severity", "GEO004=warning").stdout
    assert advice.replace("latest RUN_DIR", "RUN_DIR --all-steps") in " ".join(milder.split())
    alone = Path(shutil.copytree(HOLE, tmp_path_factory.mktemp("alone") / "step-400"))
    assert "ckptlint latest" not in support.run("check", "--isolated", alone).stdout


def test_json_holds_the_same(run: Path) -> None:
    """For machines: the step, and each that was skipped with its verdict and code."""
    document = json.loads(latest(run, "--format", "json").stdout)
    (search,) = document["runs"]
    assert document["exit_code"] == 0
    assert (search["step"]["path"], search["step"]["parts"]) == (f"{run}/step-200", ["model", "optimizer"])
    assert [(step["name"], step["verdict"], step["code"]) for step in search["skipped"]] == [
        ("step-500", "unfinished", "COM001"),
        ("step-400", "fails", "GEO004"),
        ("step-300", "fails", "PAY004"),
    ]


def test_before_and_options_of_check(run: Path) -> None:
    """Only older steps; a rule that is ignored skips nothing."""
    assert latest(run, "--before", "200").stdout == f"{run}/step-100\n"
    assert latest(run, "--ignore", "GEO", "--require", "model").stdout == f"{run}/step-400\n"


def test_parts(run: Path) -> None:
    """A step without the optimizer of the step before is passed over, unless the model alone is asked for."""
    shutil.rmtree(run / "step-500")
    assert "no optimizer state is stored; the step before it, step-300, has it" in latest(run, "--ignore", "GEO").stderr
    answer = latest(run, "--require", "model,rng")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "no random state is stored; --require model,rng asks for it" in answer.stderr
    assert latest(run, "--require", "modle").returncode == 2


def test_parts_at_depth_metadata(tmp_path: Path) -> None:
    """A step to resume from is chosen by its files, whatever the depth."""
    for number in (1, 2):
        step = tmp_path / f"checkpoint-{number}"
        step.mkdir()
        save_file({"w": torch.full((4,), float(number))}, step / "model.safetensors")
        torch.save({"state": {}, "param_groups": []}, step / "optimizer.pt")
        torch.save({"optimizer": 1}, step / "own.pt")
        (step / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    for depth in ("metadata", "files"):
        answer = latest(tmp_path, "--depth", depth)
        assert (answer.returncode, answer.stdout) == (0, f"{tmp_path}/checkpoint-2\n"), answer.stderr
        assert "(it holds model and optimizer" in answer.stderr
    answer = latest(tmp_path, "--depth", "metadata", "--require", "model,rng")
    assert answer.returncode == 1
    assert "checkpoint-2 skipped: no random state is stored" in answer.stderr


def test_no_step_passes(tmp_path: Path) -> None:
    """Exit 1, and nothing on stdout."""
    shutil.copytree(HOLE, tmp_path / "step-1")
    answer = latest(tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.splitlines()[-1] == "ckptlint: no step passes"


def test_nothing_there(tmp_path: Path) -> None:
    """Exit 3 for a folder without steps, for none at all and for a file."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        answer = latest(path)
        assert (answer.returncode, answer.stdout) == (3, "")
        assert answer.stderr.count("\n") == 1


def test_in_doubt_there_is_no_answer(run: Path) -> None:
    """A newer step of a format that is not read may be the one: exit 4."""
    (run / "step-600").mkdir()
    (run / "step-600" / "metadata.pkl").write_bytes(b"x")
    answer = latest(run)
    assert (answer.returncode, answer.stdout) == (4, "")
    assert "step-200 passes, but step-600 may be a newer good step: no answer" in answer.stderr


def test_a_file_that_leaves_a_step_unjudged_is_named(run: Path) -> None:
    copy_step(GOOD, run / "step-600", 600)
    (run / "step-600" / "extra.json").symlink_to("nowhere")
    answer = latest(run)
    sentence = "extra.json is a link that leads nowhere, so ckptlint did not read it"
    assert (answer.returncode, answer.stdout) == (4, "")
    assert f"ckptlint: step-600 skipped: {sentence}\n" in answer.stderr
    assert ckptlint.deletable(run, 1).rows()[0]["why"] == sentence


def test_a_link_out_of_the_run_is_in_doubt(run: Path) -> None:
    """It is named and not searched."""
    (run / "step-700").symlink_to("/")
    answer = latest(run)
    assert (answer.returncode, answer.stdout) == (4, "")
    assert "step-700" in answer.stderr


def test_links_in_circles_and_names_that_are_no_steps(run: Path) -> None:
    """Neither is a step; a tracker of garbage changes nothing."""
    (run / "step-x").mkdir()
    (run / "loop").symlink_to(run)
    (run / "latest_checkpointed_iteration.txt").write_bytes(b"\xff" * 100)
    assert latest(run).stdout == f"{run}/step-200\n"


@pytest.mark.parametrize("tracked", ["global_step150", "global_step400"])
def test_no_hint_tells_to_resume_from_a_damaged_step(tmp_path: Path, tracked: str) -> None:
    """The tracker is behind the newest step, or names one that is not there: `check` says no other step than this."""
    for number in (100, 150, 200):
        copy_step(REAL / "edit_base", tmp_path / f"global_step{number}", number)
    (tmp_path / "latest").write_text(tracked)

    def hint() -> str:
        items = [item for part in ckptlint.check(tmp_path).checkpoints for item in part.diagnostics]
        return next(item.finding.hint for item in items if item.code == "COM002")

    assert hint().startswith("write global_step200 into latest")
    os.truncate(tmp_path / "global_step200" / "__1_0.distcp", 500)
    assert hint() == "`ckptlint latest RUN_DIR` prints the step to resume from"


def test_a_step_is_not_a_run() -> None:
    done = latest(REAL / "fsdp2_4r")
    assert done.returncode == 4
    assert done.stderr == f"ckptlint: {REAL}/fsdp2_4r is a checkpoint, not a run: use `ckptlint {REAL}/fsdp2_4r`\n"


def test_several_runs(run: Path, tmp_path: Path) -> None:
    """A table, and no answer: which run was meant?"""
    both = tmp_path / "both"
    both.mkdir()
    shutil.copytree(run / "step-100", both / "a" / "step-1")
    shutil.copytree(HOLE, both / "b" / "checkpoints" / "step-2")
    answer = latest(both)
    assert (answer.returncode, answer.stdout) == (4, "")
    assert re.search(r"^a +step-1$", answer.stderr, re.MULTILINE) and f"{both} holds 2 runs" in answer.stderr
    assert "step-2 fails (GEO004)" in answer.stderr
    document = json.loads(latest(both, "--format", "json").stdout)
    assert [search["step"] and search["step"]["name"] for search in document["runs"]] == ["step-1", None]


def test_megatron_run(tmp_path: Path) -> None:
    """A step of Megatron-LM holds model, optimizer, scheduler and random state; the last file of a save is missing."""
    real = REAL / "megatron_tp2_pp2" / "iter_0000010"
    for number in (10, 20):
        copy_step(real, tmp_path / f"iter_{number:07}", number)
    (tmp_path / "iter_0000020" / "metadata.json").unlink()
    answer = latest(tmp_path, "--require", "model,optimizer,scheduler,rng")
    assert (answer.returncode, answer.stdout) == (0, f"{tmp_path}/iter_0000010\n")
    assert "iter_0000020 skipped: its save did not finish" in answer.stderr


FOLDERS = {
    "xtuner": ["ckpt-step-100", "ckpt-step-200"],
    "xtuner's exports": ["hf-1000"],
    "AReaL": ["epoch0epochstep9globalstep9", "epoch1epochstep4globalstep14"],
    "kohya": ["lora-step00000500-state", "lora-step00001000-state"],
    "kohya's epochs": ["lora-000009-state", "lora-000010-state"],
    "torchtune": ["epoch_0", "epoch_1"],
    "Ray": ["checkpoint_000000", "checkpoint_000001"],
    "of nobody's": ["sweep7_at_90_done", "sweep7_at_120_done"],
    "Megatron's release": ["release"],
}
FILES = {
    "with a measure": ["3-0.51.ckpt", "12-0.42.ckpt"],
    "with epochs": ["model_0_500.pt", "model_1_1000.pt"],
    "Composer": ["ep0-ba30-rank0.pt", "ep0-ba60-rank0.pt"],
    "litgpt": ["iter-000100-ckpt.pth", "iter-000200-ckpt.pth"],
    "of scripts": ["ckpt_100.pt", "ckpt_200.pt"],
    "ESPnet": ["9epoch.pth", "10epoch.pth"],
}


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("steps", [*FOLDERS.values(), *FILES.values()], ids=[*FOLDERS, *FILES])
def test_steps_are_siblings_that_a_number_tells_apart(tmp_path: Path, steps: list[str]) -> None:
    for number, name in enumerate(steps):
        if name.endswith(("pt", "pth", "ckpt")):
            torch.save({"model": {"w": torch.ones(4) * number}, "step": number}, tmp_path / name)
        else:
            copy_step(GOOD, tmp_path / name, number)
    assert latest(tmp_path).stdout == f"{tmp_path}/{steps[-1]}\n"
    assert len(ckptlint.check(tmp_path, all_steps=True).checkpoints) == len(steps)


@pytest.mark.parametrize("names", [("stage_0", "stage_1"), ("seed_1", "seed_2"), ("a.pt", "b.pt"), ("1.pt", "2.pt")])
def test_parts_and_models_beside_each_other_are_no_steps(tmp_path: Path, names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        if name.endswith("pt"):
            torch.save({f"layers.{number}.w": torch.ones(4)}, tmp_path / name)
        else:
            copy_step(GOOD, tmp_path / name, number)
    assert latest(tmp_path).returncode == 4


@pytest.mark.parametrize(("counter", "code"), [("epoch", 0), ("rank", 4)])
def test_files_that_count_from_0_are_steps_where_a_counter_in_them_grows(
    tmp_path: Path, counter: str, code: int
) -> None:
    for number in range(3):
        torch.save({"model": {"w": torch.ones(4)}, counter: number}, tmp_path / f"v2-{number:03}.ckpt")
    answer = latest(tmp_path)
    assert (answer.returncode, answer.stdout) == (code, "" if code else f"{tmp_path}/v2-002.ckpt\n")


def test_what_only_its_number_makes_an_older_step_is_named_and_models_of_two_sizes_are_none(tmp_path: Path) -> None:
    for name, size in (("bs32", 8), ("bs64", 8), ("llama-8b", 8), ("llama-70b", 90)):
        place = tmp_path / name[:2] / name
        place.mkdir(parents=True)
        save_file({"w": torch.ones(size, size)}, place / "model.safetensors")
    checked = ckptlint.check(tmp_path / "bs").checkpoints
    assert [part.checkpoint.not_looked_at for part in checked] == [
        ("whether 1 other step passes: bs32 (`ckptlint RUN_DIR --all-steps` checks it)",)
    ]
    table = support.run("check", tmp_path / "bs", "--all-steps", "--format", "json")
    assert [step["step"] for step in json.loads(table.stdout)["steps"]] == [64, 32]
    assert len(ckptlint.check(tmp_path / "ll").checkpoints) == 2


def test_weights_that_became_several_files_are_not_missing(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        (tmp_path / f"checkpoint-{number}").mkdir()
    for number in (10, 20):
        save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / f"checkpoint-{number}" / "model.safetensors")
    for part, key in enumerate("ab"):
        name = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({key: torch.ones(4)}, tmp_path / "checkpoint-30" / name)
    index = {"metadata": {}, "weight_map": {k: f"model-0000{n}-of-00002.safetensors" for n, k in ((1, "a"), (2, "b"))}}
    (tmp_path / "checkpoint-30" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert latest(tmp_path).stdout == f"{tmp_path}/checkpoint-30\n"


@pytest.mark.parametrize("data", [b"", b"PK\3\4"], ids=["empty", "cut"])
def test_the_state_that_torchtune_has_beside_its_epochs(tmp_path: Path, data: bytes) -> None:
    for epoch in (0, 1):
        (tmp_path / f"epoch_{epoch}").mkdir()
        save_file({"w": torch.ones(4)}, tmp_path / f"epoch_{epoch}" / "model-00001-of-00001.safetensors")
    (tmp_path / "recipe_state").mkdir()
    state = tmp_path / "recipe_state" / "recipe_state.pt"
    torch.save({"optimizer": {"state": {}, "param_groups": []}, "epochs_run": 2}, state)
    assert ckptlint.check(tmp_path).exit_code == 0
    state.write_bytes(data)
    reported = [item for part in ckptlint.check(tmp_path).checkpoints for item in part.diagnostics]
    assert [(item.code, item.severity.label) for item in reported] == [("SAF002", "error")]


def test_a_copy_of_the_step_before_is_not_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL#3312: the save of step 120 wrote what the one of step 90 had staged."""
    monkeypatch.setattr(request, "CHEAP_BYTES", 1)
    for number, values in ((30, 30), (60, 60), (90, 90), (120, 90)):
        copy_step(GOOD, tmp_path / f"step_{number}", values)
    answer = latest(tmp_path)
    assert (answer.returncode, answer.stdout) == (0, f"{tmp_path}/step_90\n")
    sentence = "ckptlint: step_120 skipped: warning RUN005 all weights and all moments are bit-identical to step_90"
    assert answer.stderr.splitlines()[0] == sentence
    assert latest(tmp_path, "--ignore", "RUN005").stdout == f"{tmp_path}/step_120\n"


def test_the_warnings_of_the_answer_are_reported(tmp_path: Path) -> None:
    """A step whose own counter says another number is not named without a word."""
    for number, stated in ((10, 10), (20, 20), (30, 20)):
        step = tmp_path / f"checkpoint-{number}"
        step.mkdir()
        save_file({"w": torch.ones(4) * number}, step / "model.safetensors")
        (step / "trainer_state.json").write_text(json.dumps({"global_step": stated}))
    answer = latest(tmp_path)
    assert answer.stdout == f"{tmp_path}/checkpoint-30\n"
    assert answer.stderr.splitlines()[:-1] == [
        "ckptlint: checkpoint-30 passes (it holds model), with 1 warning",
        "ckptlint: warning COM002 the folder is named for step 30, but trainer_state.json says step 20",
    ]
    document = json.loads(latest(tmp_path, "--format", "json").stdout)
    assert [warning[:6] for warning in document["runs"][0]["step"]["warnings"]] == ["COM002"]


@pytest.mark.parametrize(("name", "step"), [("_SUCCESS", 1), ("DONE", 1), ("notes.bin", 2)])
def test_a_mark_of_the_only_older_step_is_missed(tmp_path: Path, name: str, step: int) -> None:
    for number in (1, 2):
        copy_step(GOOD, tmp_path / f"step-{number}", number)
    (tmp_path / "step-1" / name).write_bytes(b"")
    assert latest(tmp_path).stdout == f"{tmp_path}/step-{step}\n"


def test_an_older_save_that_did_not_finish_hides_no_lack(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        copy_step(GOOD, tmp_path / f"step-{number}", number)
        (tmp_path / f"step-{number}" / "notes.bin").write_text("notes")
    (tmp_path / "step-3" / ".metadata").unlink()
    for number in (3, 4):
        (tmp_path / f"step-{number}" / "notes.bin").unlink()
    assert latest(tmp_path).stdout == f"{tmp_path}/step-2\n"
