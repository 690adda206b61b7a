"""The files of a step beside its tensors: written by the real libraries, whole and damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pickles
import pytest
from support import a_socket, codes, found, run

import ckptlint
from ckptlint.formats.content import pickles_in

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


class Evil:
    """Its pickle calls a function of the operating system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


class Registered:
    """What a user registers with accelerate."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def training() -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.fixture(scope="module")
def accelerate_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `Accelerator.save_state` writes."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*training())
    accelerator.register_for_checkpointing(Registered())
    folder = tmp_path_factory.mktemp("accelerate") / "checkpoint_0"
    accelerator.save_state(str(folder))
    return folder


def trainer_step(folder: Path, ranks: int = 2) -> Path:
    """The layout of the Hugging Face Trainer (transformers 5.x), written with its own calls of torch.save."""
    folder.mkdir(parents=True)
    model, optimizer, scheduler = training()
    safetensors.save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save(torch.amp.GradScaler("cpu").state_dict(), folder / "scaler.pt")
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    for rank in range(ranks):
        torch.save(state, folder / f"rng_state_{rank}.pth")
    text = {"global_step": 500, "log_history": [{"loss": float("nan")}]}
    (folder / "trainer_state.json").write_text(json.dumps(text))
    for name in ("config.json", "tokenizer.json", "README.md", "merges.txt", ".gitattributes", "modeling_llama.py"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return trainer_step(tmp_path / "checkpoint-500")


def dcp_step(folder: Path, key: str = "w") -> Path:
    import torch.distributed.checkpoint as writer

    writer.save({key: torch.ones(4)}, checkpoint_id=str(folder), no_dist=True)
    return folder


def copied(step: Path, folder: Path) -> Path:
    return Path(shutil.copytree(step, folder / "step"))


# ---------------------------------------------------------------- healthy


def test_what_accelerate_saves_is_read_and_quiet(accelerate_step: Path) -> None:
    report = ckptlint.check(accelerate_step)
    assert found(report) == []
    assert {file.name: file.state for file in report.checkpoints[0].checkpoint.step_files} == {
        "custom_checkpoint_0.pkl": "read",
        "optimizer.bin": "read",
        "random_states_0.pkl": "read",
        "scheduler.bin": "read",
    }


def test_what_the_trainer_of_hugging_face_saves_is_read_or_known_and_quiet(step: Path) -> None:
    report = ckptlint.check(step)
    assert found(report) == []
    files = report.checkpoints[0].checkpoint.step_files
    assert {file.name for file in files if file.state == "unknown"} == set()
    assert {file.name for file in files if file.state == "read"} == {
        "config.json", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scaler.pt", "scheduler.pt",
        "trainer_state.json",
    }  # fmt: skip
    assert next(file.step for file in files if file.name == "trainer_state.json") == 500


def test_files_in_the_form_before_torch_1_6_are_read(step: Path) -> None:
    _, optimizer, _ = training()
    torch.save(optimizer.state_dict(), step / "optimizer.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(999)}, step / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert found(ckptlint.check(step)) == []


# ---------------------------------------------------------------- hostile, empty, cut


def archived(path: Path) -> None:
    torch.save({"state": Evil()}, path)


def archived_as_before_1_6(path: Path) -> None:
    torch.save({"state": Evil()}, path, _use_new_zipfile_serialization=False)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Evil()))


NAMES = (
    "random_states_0.pkl", "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin",
    "scaler.pt", "pytorch_model.bin", "rng_state_0.pth", "train_state.pt", "sampler.bin", "dl_state_dict.bin",
    "custom_checkpoint_0.pkl", "mine.pt", "below/mine.pkl", "__0.metadata.bck",
)  # fmt: skip


@pytest.mark.parametrize("write", [archived, archived_as_before_1_6, pickled])
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_file_beside_the_weights_is_told(
    accelerate_step: Path, tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    folder = copied(accelerate_step, tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    write(folder / name)
    report = ckptlint.check(folder)
    assert [(item.code, item.finding.at.file) for item in report.diagnostics] == [("SAF001", name)]
    assert report.exit_code == 1


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_an_empty_or_cut_file_beside_the_weights_is_told(
    accelerate_step: Path, tmp_path: Path, name: str, share: float
) -> None:
    folder = copied(accelerate_step, tmp_path)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    report = ckptlint.check(folder)
    assert [(item.code, item.finding.at.file) for item in report.diagnostics] == [("SAF002", name)]


@pytest.mark.forks
def test_a_file_that_breaks_a_limit_is_told_by_its_name_and_hides_no_other(step: Path) -> None:
    (step / "scheduler.pt").write_bytes(b"\x80\x02}" + b"N" + b"\x85" * 3_000_000 + b"Ns.")  # hashes a deep tuple
    (step / "scaler.pt").write_bytes(b"")
    report = json.loads(run("--format", "json", step).stdout)
    assert {(item["code"], item["file"]) for item in report["checkpoints"][0]["findings"]} == {
        ("SAF003", "scheduler.pt"),
        ("SAF002", "scaler.pt"),
    }


def test_metadata_of_a_rank_beside_the_whole_is_read_too(tmp_path: Path) -> None:
    dcp_step(tmp_path)
    pickled(tmp_path / "__0.metadata")
    report = ckptlint.check(tmp_path)
    assert found(report, "error")[0][0] == "SAF001"


# ---------------------------------------------------------------- around the components of a step


def test_files_around_the_components_of_a_step_are_judged_once(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-500"
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp_step(step / name, f"{name}.w")
    torch.save({"last_epoch": 1}, step / "scheduler.pt")
    (step / "trainer_state.json").write_text("{}")
    assert codes(ckptlint.check(step), "error", "warning") == set()
    archived(step / "rng_state_0.pth")
    report = ckptlint.check(step)
    assert [(item.code, item.finding.at.file) for item in report.diagnostics] == [("SAF001", "../rng_state_0.pth")]
    names = [[file.name for file in part.checkpoint.step_files] for part in report.checkpoints]
    assert names == [["../rng_state_0.pth", "../scheduler.pt", "../trainer_state.json"], []]


def test_two_models_of_a_folder_tell_its_other_files_once(step: Path) -> None:
    safetensors.save_file({"lora_A": torch.ones(4, 2)}, step / "adapter_model.safetensors")
    (step / "adapter_config.json").write_text("{}")
    archived(step / "rng_state_0.pth")
    report = ckptlint.check(step)
    assert len(report.checkpoints) == 2
    assert [item.code for item in report.diagnostics] == ["SAF001"]


def test_of_files_code_alone_is_told_at_depth_metadata(step: Path) -> None:
    archived(step / "rng_state_0.pth")
    report = ckptlint.check(step, depth="metadata")
    assert codes(report) == {"SAF001"}
    assert report.checkpoints[0].checkpoint.step_files == ()


# ---------------------------------------------------------------- ranks and steps


def test_a_lost_random_state_and_a_renamed_folder_are_told(tmp_path: Path) -> None:
    step = trainer_step(tmp_path / "checkpoint-400", ranks=4)
    (step / "rng_state_2.pth").unlink()
    report = ckptlint.check(step)
    assert [(code, level) for code, level, _ in found(report)] == [("COM002", "warning"), ("COM012", "warning")]


# ---------------------------------------------------------------- the optimizer against the model


def with_optimizer(step: Path, model: Any, edit: Callable[[dict[str, Any]], None] = lambda state: None) -> Path:
    """A step of another model, with the state of AdamW for it as torch writes it."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    edit(state)
    safetensors.save_file(dict(model.named_parameters()), step / "model.safetensors", metadata={"format": "pt"})
    torch.save(state, step / "optimizer.pt")
    return step


def layers(rows: int = 12) -> Any:
    return torch.nn.Sequential(torch.nn.Embedding(rows, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))


def test_an_optimizer_that_contradicts_the_weights_beside_it_is_told(step: Path) -> None:
    assert found(ckptlint.check(with_optimizer(step, layers()))) == []
    resized = {"0.weight": torch.ones(16, 8), **dict(list(layers().named_parameters())[1:])}
    safetensors.save_file(resized, step / "model.safetensors", metadata={"format": "pt"})
    assert [(code, level) for code, level, _ in found(ckptlint.check(step))] == [("OPT008", "warning")]


@pytest.mark.parametrize(
    "edit",
    [
        lambda state: state["state"].clear(),
        lambda state: state["param_groups"][0]["params"].pop(),
        lambda state: state["param_groups"][0]["params"].append(0),
        lambda state: state["state"][1].update(exp_avg_sq=torch.ones(3)),
    ],
    ids=["no state", "unlisted", "twice", "two shapes"],
)
def test_an_optimizer_that_contradicts_itself_is_told(step: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    report = ckptlint.check(with_optimizer(step, layers(), edit))
    assert [(code, level) for code, level, _ in found(report)] == [("OPT008", "warning")]


# ---------------------------------------------------------------- the account


def test_each_report_accounts_for_the_folder(step: Path) -> None:
    (step / "what.xyz").write_bytes(b"1")
    (step / "stray" / "deeper").mkdir(parents=True)
    (step / "stray" / "b.xyz").write_bytes(b"1")
    told = run(step).stdout.replace("\n  ", " ").splitlines()
    (line,) = [line for line in told if line.startswith("Beside")]
    assert line == (
        "Besides the tensors: 7 files read, 5 known and not judged (code, text, tokenizer), 3 unknown (what.xyz, "
        "stray/b.xyz, stray/deeper/)."
    )
    document = json.loads(run(step, "--format", "json").stdout)
    files = {file["name"]: file for file in document["checkpoints"][0]["step_files"]}
    assert files["what.xyz"] == {"name": "what.xyz", "family": None, "state": "unknown", "size": 1}
    assert files["scaler.pt"]["state"] == "read"
    assert files["merges.txt"]["family"] == "tokenizer"
    assert "3 unknown (what.xyz" in run(step, "--format", "html").stdout


# ---------------------------------------------------------------- parts of a step, steps of runs, files by name


def unread_files(folder: Path) -> None:
    """What torch_checkpointing leaves."""
    folder.mkdir()
    (folder / "metadata.pkl").write_bytes(b"N.")


def test_a_part_of_a_step_in_a_format_that_is_not_read_is_told_by_its_name(step: Path, tmp_path: Path) -> None:
    unread_files(step / "global_step500")
    report = ckptlint.check(step)
    assert found(report, "error", "warning")[0][:2] == ("SAF004", "error")
    assert [part.checkpoint.path for part in report.checkpoints] == [str(step), str(step / "global_step500")]
    assert report.exit_code == 1
    folder = dcp_step(tmp_path / "dcp")
    unread_files(folder / "files")
    assert codes(ckptlint.check(folder)) == {"SAF004"}


def test_several_runs_below_a_path_are_all_judged(tmp_path: Path) -> None:
    for name in ("runA_step1", "runB/step-10", "runC/step-10", "runC/step-20"):
        dcp_step(tmp_path / name)
    assert ckptlint.check(tmp_path).exit_code == 0
    (tmp_path / "runB" / "step-10" / ".metadata").write_bytes(b"")
    report = ckptlint.check(tmp_path)
    names = [str(Path(part.checkpoint.path).relative_to(tmp_path)) for part in report.checkpoints]
    assert names == ["runA_step1", "runB/step-10", "runC/step-20"]
    assert (codes(report), report.exit_code) == ({"SAF002"}, 1)


@pytest.mark.parametrize("name", ["ck.tar", "model.pt"])
def test_a_named_file_that_is_no_part_of_a_checkpoint_is_refused_by_its_name(step: Path, name: str) -> None:
    if not (step / name).exists():
        torch.save({"epoch": 3, "rng": torch.arange(3)}, step / name)
    report = ckptlint.check(step / name)
    ((code, level, sentence),) = found(report)
    assert (code, level, report.exit_code) == ("SAF004", "error", 1)
    assert sentence.startswith(name)
    assert [part.checkpoint.path for part in report.checkpoints] == [str(step / name)]


def test_a_named_file_of_weights_is_a_checkpoint(step: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "epoch": 3}, step / "ck.tar")
    report = ckptlint.check(step / "ck.tar")
    assert (report.exit_code, list(report.checkpoints[0].checkpoint.tensors)) == (0, ["w"])


def test_a_named_file_is_opened_by_the_safe_reader(step: Path) -> None:
    archived(step / "model.pt")
    assert codes(ckptlint.check(step / "model.pt")) == {"SAF001", "SAF004"}


def test_an_adapter_without_tensors_is_no_pass(step: Path) -> None:
    safetensors.save_file({}, step / "adapter_model.safetensors", metadata={"format": "pt"})
    assert codes(ckptlint.check(step), "error") == {"COM011"}
    assert codes(ckptlint.check(step / "adapter_model.safetensors"), "error") == {"COM011"}


# ---------------------------------------------------------------- what is not read is named


def states(report: Any) -> dict[str, str]:
    return {file.name: file.state for part in report.checkpoints for file in part.checkpoint.step_files}


@pytest.mark.parametrize("mark", ["common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("name", ["extra", "weights", "extra/weights", "modelopt_state"])
def test_a_folder_with_a_part_of_a_save_is_read_too(tmp_path: Path, name: str, mark: str) -> None:
    below = dcp_step(tmp_path / "step-10") / name
    below.mkdir(parents=True)
    torch.save({"modelopt_version": "0.31.0"}, below / mark)
    report = ckptlint.check(tmp_path / "step-10")
    named = f"{name}/" if "/" in name else f"{name}/{mark}"
    assert (found(report), states(report)) == ([], {named: "read" if named.endswith(".pt") else "unknown"})
    if "/" not in name:
        archived(below / "optimizer.pt")
        assert codes(ckptlint.check(tmp_path / "step-10")) == {"SAF001"}


def test_hostile_common_state_below_a_step_is_told(tmp_path: Path) -> None:
    step = dcp_step(tmp_path / "step-10")
    (step / "modelopt_state").mkdir()
    archived(step / "modelopt_state" / "common.pt")
    dcp_step(step / "modelopt_state" / "weights")
    report = ckptlint.check(step)
    assert [(item.code, item.finding.at.file) for item in report.diagnostics] == [
        ("SAF001", "modelopt_state/common.pt")
    ]


def test_folders_that_are_not_looked_into_are_named(step: Path) -> None:
    for name in ("code", ".cache", "runs", "checkpoint-400", "tokenizer/deeper/deepest"):
        (step / name).mkdir(parents=True)
    (step / "outside").symlink_to("/")
    report = ckptlint.check(step)
    assert [title for _, _, title in found(report)] == [
        "outside is a link to a folder outside of the checkpoint, so ckptlint did not read it"
    ]
    told = {name: state for name, state in states(report).items() if name.endswith("/")}
    assert told == {
        ".cache/": "unknown", "checkpoint-400/": "known", "code/": "unknown", "outside/": "unknown",
        "runs/": "unknown", "tokenizer/deeper/": "unknown",
    }  # fmt: skip


def test_a_run_that_is_named_like_logs_is_not_unknown(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("run/step-1", "run/step-2", "runs/deep/step-1"):
        shutil.copytree(step, tmp_path / "all" / place)
    (tmp_path / "all" / "runs" / "other.bin").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "all")
    for path in (".", "../all", tmp_path / "all"):
        files = [file.name for part in ckptlint.check(path).checkpoints for file in part.checkpoint.step_files]
        assert sorted(name for name in files if "run" in name or "other" in name) == ["../../other.bin"]


def test_litter_is_named_as_such(step: Path) -> None:
    (step / ".DS_Store").write_bytes(b"1")
    file = next(file for file in ckptlint.check(step).checkpoints[0].checkpoint.step_files if file.name == ".DS_Store")
    assert (file.family, file.state) == ("left by other tools", "known")


def test_all_of_many_files_of_unknown_names_are_read(step: Path) -> None:
    for rank in range(1024):
        (step / f"something_{rank}.pt").write_bytes(pickle.dumps({"rank": rank}))
    report = ckptlint.check(step)
    assert (found(report), report.exit_code) == ([], 0)
    assert sum(name.startswith("something") and state == "read" for name, state in states(report).items()) == 1024
    pickled(step / "zz.pt")
    assert codes(ckptlint.check(step)) == {"SAF001"}


def test_files_beyond_the_bytes_that_are_read_make_the_verdict_incomplete(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptlint.loaders.run.step_files._BYTES_LIMIT", 2**20)
    for number in range(40):
        (step / f"mine_{number:02}.pt").write_bytes(pickle.dumps({"number": number}))
    pickled(step / "zz.pt")
    report = ckptlint.check(step, fail_on="error")
    ((code, level, sentence),) = found(report)
    assert (code, level, report.exit_code) == ("SAF002", "warning", 4)
    # the files whose names are known count first
    assert sentence.startswith("30 files beside the tensors were not read: mine_11.pt, ")
    assert sum(state == "unknown" for state in states(report).values()) == 30


def test_two_files_of_one_label_do_not_hide_each_other(tmp_path: Path) -> None:
    inner = tmp_path / "checkpoint-5" / "global_step5"
    dcp_step(inner / "model")
    torch.save({"a": 1}, inner / "mine.pt")
    archived(tmp_path / "checkpoint-5" / "mine.pt")
    assert codes(ckptlint.check(tmp_path / "checkpoint-5")) == {"SAF001"}
    torch.save({"a": 1}, tmp_path / "checkpoint-5" / "mine.pt")
    archived(inner / "mine.pt")
    assert codes(ckptlint.check(tmp_path / "checkpoint-5")) == {"SAF001"}


UNOPENED: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that leads nowhere": lambda path: path.symlink_to("gone"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("what", UNOPENED)
@pytest.mark.parametrize("name", ["optimizer.pt", "config.json", "mine.pkl", "trainer_state.json"])
def test_what_cannot_be_opened_makes_the_verdict_incomplete(step: Path, name: str, what: str) -> None:
    if (what, name) in (("a folder", "mine.pkl"), ("a folder", "config.json")):
        return
    (step / name).unlink(missing_ok=True)
    UNOPENED[what](step / name)
    report = ckptlint.check(step)
    assert (report.exit_code, report.verdict) == (4, "incomplete")
    assert [(code, level) for code, level, _ in found(report)] == [("SAF002", "warning")]
    assert f"{name} is {what}" in run(step).stdout.replace("\n    ", " ")


def test_what_stands_in_place_of_a_file_of_older_steps_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        dcp_step(tmp_path / f"step-{number}")
    torch.save({"a": 1}, tmp_path / "step-1" / "optimizer.pt")
    os.mkfifo(tmp_path / "step-2" / "optimizer.pt")
    sentences = {code: title for code, _, title in found(ckptlint.check(tmp_path))}
    assert sentences["COM001"] == "the step has no file optimizer.pt (it is a pipe), which step-1 has"


@pytest.mark.parametrize(
    ("text", "why"), [("9" * 5000, "holds a number of too many digits"), ("[" * 10**5, "is nested too deeply")]
)
def test_json_that_python_refuses_is_said_in_words(step: Path, text: str, why: str) -> None:
    (step / "trainer_state.json").write_text(f'{{"global_step": {text}')
    assert f"trainer_state.json {why} to be read" in [title for _, _, title in found(ckptlint.check(step))]


def test_what_cannot_be_opened_under_other_names_is_named(step: Path) -> None:
    (step / "README.md").unlink()
    (step / "README.md").symlink_to("gone")
    os.mkfifo(step / "what.xyz")
    report = ckptlint.check(step)
    assert (found(report), report.exit_code) == ([], 0)
    assert (states(report)["README.md"], states(report)["what.xyz"]) == ("known", "unknown")


DAMAGE = {
    "cut": b'{"model_type": "llama", ', "empty": b"", "zeroed": bytes(4096), "a list": b"[]", "no text": b"\xff{}",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_configuration_is_an_error_where_a_load_needs_it(step: Path, tmp_path: Path, damage: str) -> None:
    trained, adapter = dcp_step(tmp_path / "step-10"), tmp_path / "adapter"
    adapter.mkdir()
    factors = {f"base_model.model.q.lora_{name}.weight": torch.ones(4, 4) for name in "AB"}
    safetensors.save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q"]}')
    exported = tmp_path / "exported"
    exported.mkdir()
    torch.save({"w": torch.ones(3)}, exported / "pytorch_model.bin")
    for folder, level in ((step, "error"), (exported, "error"), (trained, "warning"), (adapter, "warning")):
        (folder / "config.json").write_bytes(DAMAGE[damage])
        report = ckptlint.check(folder, fail_on="error")
        ((severity, sentence),) = [(how, text) for code, how, text in found(report) if code == "SAF002"]
        assert (severity, report.exit_code) == (level, int(level == "error"))
        assert sentence.startswith("config.json is damaged: it ")


@pytest.mark.parametrize("number", [999_999_999, 10**30])
def test_sets_with_absurd_numbers_do_not_pass(tmp_path: Path, number: int) -> None:
    states = {"optimizer_state_dict": {}}
    for name in ("zero_pp_rank_0", f"zero_pp_rank_{number}"):
        (tmp_path / "zero").mkdir(exist_ok=True)
        torch.save(states, tmp_path / "zero" / f"{name}_mp_rank_00_optim_states.pt")
    (tmp_path / "verl").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "verl" / f"model_world_size_{number}_rank_0.pt")
    for name in ("zero", "verl"):
        assert codes(ckptlint.check(tmp_path / name), "error") == {"SAF003"}
    (tmp_path / "verl" / f"model_world_size_{number}_rank_0.pt").unlink()
    for name in ("model_world_size_1_rank_0.pt", f"model_world_size_1_rank_{number}.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / "verl" / name)
    assert codes(ckptlint.check(tmp_path / "verl"), "error", "warning") == {"SAF002"}


def test_metadata_of_a_rank_that_no_job_has_is_told(tmp_path: Path) -> None:
    step = dcp_step(tmp_path / "step-10")
    (step / "__0.metadata").write_bytes((step / ".metadata").read_bytes())
    (step / ".metadata").rename(step / "__999999999.metadata")
    assert "COM001" in codes(ckptlint.check(step), "error")


def test_a_grid_of_folders_that_no_job_has_is_told(tmp_path: Path) -> None:
    for name in ("mp_rank_00", "mp_rank_99999_99999_99999"):
        (tmp_path / name).mkdir()
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / name / "model_optim_rng.pt")
    assert codes(ckptlint.check(tmp_path), "error") == {"SAF003"}


# ---------------------------------------------------------------- content decides what is opened, not a name
PLACES = (
    "optimizer", "modelopt_state", "checkpoint.pth.tar", "x.npz", "latest", "vocab.txt", "optimizer.pt.bak",
    ".hidden.pt.AbCdEf", "code/x.py", "logs/a.log", ".cache/x", "a/b/c/d.pt", "mine.pkl", "metadata.json",
)  # fmt: skip
PACKS = (bz2, gzip, lzma, zlib)


class Marking:
    def __reduce__(self) -> tuple[Any, ...]:
        return pickles.payload, ("ran",)


def deflated(value: Any, file: Any) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(400):
            archive.writestr(f"a/{number}/{'x' * 40}" if number != 200 else "a/data.pkl", pickle.dumps(value, 2))


WRITERS: dict[str, Callable[[Any, Any], Any]] = {
    "archive": torch.save,
    "legacy": partial(torch.save, _use_new_zipfile_serialization=False),
    **{f"protocol {number}": partial(pickle.dump, protocol=number) for number in (0, 1, 2, 5)},
    "npy": lambda value, file: np.save(file, np.array([value], object)),
    "npz": lambda value, file: np.savez_compressed(file, np.array([value], object)),
    **{pack.__name__: lambda value, file, pack=pack: file.write(pack.compress(pickle.dumps(value))) for pack in PACKS},
    "deflated": deflated,
    "utf-8": lambda value, file: file.write(b"\x80\2U\2\xc3\xa90" + pickle.dumps(value, 2)[2:]),
    "utf-8 text": lambda value, file: file.write(b"S'\xc3\xa9'\n0" + pickle.dumps(value, 0)),
}


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("form", WRITERS)
def test_a_pickle_is_told_by_its_first_bytes(step: Path, marker: Path, form: str) -> None:
    for name in PLACES if form == "archive" else ("vocab.txt", "code/x.py"):
        for value in ({"a": [1, "b"]}, Marking()):
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            with (step / name).open("wb") as file:
                WRITERS[form](value, file)
            report, is_loud = ckptlint.check(step), isinstance(value, Marking) or form in ("deflated", "utf-8")
            assert bool(found(report)) is bool(report.exit_code) is is_loud, (name, found(report))
        (step / name).unlink()


def test_files_that_are_too_many_to_be_looked_at_are_named(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.loaders.run.step_files._HEADS", {True: 5})
    for name, code in (("{}.log", 0), ("x{}", 4)):
        for number in range(20):
            (step / name.format(number)).write_text("step 1\n")
        report = ckptlint.check(step, fail_on="error")
        assert (len(found(report)), report.exit_code) == (1, code)


# ---------------------------------------------------------------- litter


def test_litter_is_neither_payload_nor_a_model(tmp_path: Path, step: Path) -> None:
    folder = dcp_step(tmp_path / "dcp")
    for name in ("._.metadata", ".___0_0.distcp", ".DS_Store", "Thumbs.db", ".__0_0.distcp.Ab12Cd"):
        (folder / name).write_bytes(b"\0\5\26\7")
    (step / "._model.safetensors").write_bytes(b"\0\5\26\7")
    for path in (folder, step):
        report = ckptlint.check(path)
        assert found(report) == []
        assert len(report.checkpoints) == 1


def test_a_hundred_thousand_empty_members_are_unpacked_in_the_time_of_their_bytes() -> None:
    members = gzip.compress(b"") * 100_000
    started = time.process_time()
    assert [*pickles_in("packed", io.BytesIO(members + gzip.compress(pickle.dumps({"a": 1}))), 2**24)]
    assert time.process_time() - started < 5  # each member once cost a copy of all that follow
