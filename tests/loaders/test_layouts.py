"""Folders as frameworks lay them out: what a path means, and what trackers say of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import REAL, codes, found

import ckptlint
from ckptlint.lint.report import Report
from ckptlint.lint.steps.trust import steps_in
from ckptlint.loaders.discover import find
from ckptlint.testing import write_checkpoint, write_safetensors

torch = pytest.importorskip("torch")


def dcp(folder: Path, *keys: str) -> Path:
    """A checkpoint that torch's DCP writes, of one float tensor for each key."""
    import torch.distributed.checkpoint as writer

    state = {key: torch.ones(4, 3) for key in keys or ("model.layers.0.w",)}
    writer.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def real(name: str, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(REAL / name, folder))


def hugging_face(folder: Path) -> Path:
    """What torch's HuggingFaceStorageWriter leaves on one rank when it consolidates."""
    import torch.distributed.checkpoint as writer
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    pytest.importorskip("safetensors")
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    writer.save({"layers.0.w": torch.ones(4, 3)}, storage_writer=storage, no_dist=True)
    return folder


def text(path: Path, content: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def torchtitan(run: Path) -> list[str]:
    dcp(run / "step-10")
    dcp(run / "step-20", "layers.0.w", "optimizer.state.layers.0.w.exp_avg")
    return ["step-20"]


def torchtitan_export(run: Path) -> list[str]:
    dcp(run / "step-10")
    hugging_face(run / "step-20")
    return ["step-20", "step-20/sharded"]


def accelerate(run: Path) -> list[str]:
    for step in (500, 1000):
        dcp(run / f"checkpoint-{step}" / "pytorch_model_fsdp_0")
        dcp(run / f"checkpoint-{step}" / "optimizer_0", "optimizer.state.layers.0.w.exp_avg")
        saved(run / f"checkpoint-{step}" / "random_states_0.pkl", {})
        text(run / f"checkpoint-{step}" / "trainer_state.json", "{}")
    return ["checkpoint-1000/optimizer_0", "checkpoint-1000/pytorch_model_fsdp_0"]


def adapter_beside_fsdp(run: Path) -> list[str]:
    step = run / "checkpoint-500"
    dcp(step / "pytorch_model_fsdp_0")
    write_safetensors(step / "adapter_model.safetensors", {"tensors": {"lora_A.weight": {"shape": [4, 8]}}})
    text(step / "adapter_config.json", '{"peft_type": "LOHA"}')
    return ["checkpoint-500", "checkpoint-500/pytorch_model_fsdp_0"]


def trainer_output(run: Path) -> list[str]:
    write_safetensors(run / "model.safetensors", {"tensors": {"w": {"shape": [4]}}})
    dcp(run / "checkpoint-500" / "pytorch_model_fsdp_0")
    text(run / "runs" / "events.out.tfevents.0")
    return [".", "checkpoint-500/pytorch_model_fsdp_0"]


def lightning(run: Path) -> list[str]:
    for epoch, step in ((0, 10), (1, 20)):
        saved(dcp(run / f"epoch={epoch}-step={step}.ckpt") / "meta.pt", {"epoch": epoch})
    return ["epoch=1-step=20.ckpt"]


def composer(run: Path) -> list[str]:
    dcp(run / "ep0-ba10", "state.model.w")
    dcp(run / "ep0-ba20", "state.model.w")
    return ["ep0-ba20"]


def verl_megatron(run: Path) -> list[str]:
    for step in (10, 20):
        real("megatron_0.19_tp2/iter_0000010", run / f"global_step_{step}" / "actor" / "dist_ckpt")
        text(run / f"global_step_{step}" / "actor" / "huggingface" / "config.json", "{}")
        saved(run / f"global_step_{step}" / "data.pt", {})
    text(run / "latest_checkpointed_iteration.txt", "20")
    return ["global_step_20/actor/dist_ckpt"]


def veomni(run: Path) -> list[str]:
    saved(dcp(run / "global_step_10") / "extra_state" / "extra_state_rank_0.pt", {})
    return ["global_step_10"]


def bridge(run: Path) -> list[str]:
    for step in (5, 10):
        folder = real("megatron_0.19_tp2/iter_0000010", run / f"iter_{step:07d}")
        text(folder / "run_config.yaml", "model:\n  _target_: megatron.bridge.models.GPTModelProvider\n")
        saved(folder / "train_state.pt", {"step": torch.tensor(step, dtype=torch.int32)})
        text(folder / "tokenizer" / "tokenizer.json", "{}")
    saved(run / "latest_train_state.pt", {"step": torch.tensor(10, dtype=torch.int32)})
    text(run / "latest_checkpointed_iteration.txt", "10")
    return ["iter_0000010"]


def bridge_fsdp(run: Path) -> list[str]:
    real("megatron_fsdp_4r/iter_0000010", run / "iter_0000010")
    saved(run / "iter_0000010" / "train_state.pt", {"step": torch.tensor(10, dtype=torch.int32)})
    text(run / "iter_0000010" / "run_config.yaml", "a: 1\n")
    saved(run / "latest_train_state.pt", {"step": torch.tensor(10, dtype=torch.int32)})
    return ["iter_0000010"]


def bridge_export(run: Path) -> list[str]:
    hugging_face(run / "iter_0000010")
    text(run / "latest_checkpointed_iteration.txt", "10")
    return ["iter_0000010", "iter_0000010/sharded"]


def nemo(run: Path) -> list[str]:
    for step in (9, 19):
        name = f"model--val_loss=0.10-step={step}-consumed_samples={step * 8}.0"
        real("megatron_0.15_tp2/iter_0000010", run / name / "weights")
        text(run / name / "context" / "model.yaml", "a: 1\n")
        text(run / name / "context" / "io.json", "{}")
    return ["model--val_loss=0.10-step=19-consumed_samples=152.0/weights"]


def megatron(run: Path, name: str = "megatron_tp2_pp2/iter_0000010", step: str = "iter_0000010") -> list[str]:
    real(name, run / step)
    text(run / "latest_checkpointed_iteration.txt", step.removeprefix("iter_00000"))
    return [step]


def release(run: Path) -> list[str]:
    return megatron(run, step="release")


def fsdp_dtensor(run: Path) -> list[str]:
    return megatron(run, "megatron_fsdp_dtensor_tp2_dp2/iter_0000010")


def fsdp1(run: Path) -> list[str]:
    real("fsdp1_sharded", run / "step_100")
    return ["step_100"]


def olmo(run: Path) -> list[str]:
    for step in (100, 200):
        dcp(run / f"step{step}" / "model_and_optim", "model.w", "optim.w.exp_avg")
        saved(run / f"step{step}" / "train" / "rank0.pt", {"global_step": step})
    return ["step200/model_and_optim"]


def automodel(run: Path) -> list[str]:
    for step in (10, 20):
        folder = run / f"epoch_0_step_{step}"
        name = "shard-00001-model-00001-of-00001.safetensors"
        shard = {"tensors": {"layers.0.w": {"shape": [4, 3], "offsets": [0, 0]}}}
        write_safetensors(folder / "model" / name, shard)
        hugging_face(folder / "model" / "consolidated")
        shutil.rmtree(folder / "model" / "consolidated" / "sharded")
        text(folder / "model" / ".hf_metadata" / "config.json", "{}")
        dcp(folder / "optim", "optim.state.layers.0.w.exp_avg")
    last = "epoch_0_step_20"
    return [f"{last}/model", f"{last}/model/consolidated", f"{last}/optim"]


def lingua(run: Path) -> list[str]:
    for step in ("0000000100", "0000000200"):
        text(dcp(run / "checkpoints" / step, "model.w") / "train_state_00000.json", "{}")
    return ["checkpoints/0000000200"]


def prime_rl(run: Path) -> list[str]:
    dcp(run / "step_10" / "trainer", "app.model.w")
    saved(run / "step_10" / "dataloader" / "rank_0.pt", {})
    return ["step_10/trainer"]


def xtuner(run: Path) -> list[str]:
    dcp(run / "hf-10" / "weights", "model.w")
    return ["hf-10/weights"]


LAYOUTS = [torchtitan, torchtitan_export, accelerate, adapter_beside_fsdp, trainer_output, lightning, composer]
LAYOUTS += [verl_megatron, veomni, bridge, bridge_fsdp, bridge_export, nemo, megatron, release, fsdp_dtensor, fsdp1]
LAYOUTS += [olmo, automodel, lingua, prime_rl, xtuner]


def named(report: Report, run: Path) -> list[str]:
    return sorted(str(Path(part.checkpoint.path).relative_to(run)) for part in report.checkpoints)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_run_folder_means_its_newest_step(layout: Callable[[Path], list[str]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    wanted = sorted(layout(run))
    if layout is lingua:
        run, wanted = run / "checkpoints", [name.removeprefix("checkpoints/") for name in wanted]
    report = ckptlint.check(run)
    found_parts = [name.removesuffix("/adapter_model.safetensors") for name in named(report, run)]
    assert found_parts == wanted
    assert (report.exit_code, found(report, "error", "warning")) == (0, [])
    step = run / wanted[0].partition("/")[0]
    assert ckptlint.check(step).exit_code == 0  # the step itself means the same


def test_every_step_is_checked_on_request(tmp_path: Path) -> None:
    for layout in (torchtitan, accelerate, lightning, olmo, nemo, bridge, verl_megatron):
        run = tmp_path / layout.__name__
        run.mkdir()
        newest = layout(run)
        assert len(find(str(run), all_steps=True)) == 2 * len(newest), layout.__name__
    run = tmp_path / "trainer_output"
    run.mkdir()
    trainer_output(run)
    assert [found.folder.path.name for found in find(str(run), all_steps=True)] == [
        "trainer_output",
        "pytorch_model_fsdp_0",
    ]


# ---------------------------------------------------------------- steps, trackers, marks


@pytest.mark.parametrize("layout", [megatron, bridge, verl_megatron, fsdp_dtensor, bridge_export])
@pytest.mark.parametrize("tracker", ["3", "30", "release"])
def test_a_tracker_that_names_another_step_is_reported(
    layout: Callable[[Path], list[str]], tracker: str, tmp_path: Path
) -> None:
    layout(tmp_path)
    text(tmp_path / "latest_checkpointed_iteration.txt", tracker)
    report = ckptlint.check(tmp_path)
    assert codes(report, "error", "warning") == {"COM002"}
    assert found(report, "error", "warning")[0][2].endswith("which does not exist")


def test_a_tracker_behind_the_newest_finished_step_is_a_note(tmp_path: Path) -> None:
    for layout, older in ((bridge, "5"), (verl_megatron, "10")):
        run = tmp_path / layout.__name__
        run.mkdir()
        layout(run)
        text(run / "latest_checkpointed_iteration.txt", older)
        told = [
            (code, level)
            for code, level, _ in found(ckptlint.check(run, ignore=["RUN005"]), "error", "warning", "info")
        ]
        assert told == [("COM002", "info")]


def test_the_train_state_of_bridge_is_a_tracker_of_its_own(tmp_path: Path) -> None:
    bridge_fsdp(tmp_path)
    saved(tmp_path / "latest_train_state.pt", {"step": torch.tensor(30, dtype=torch.int32)})
    (finding,) = found(ckptlint.check(tmp_path), "error", "warning")
    assert finding[2] == "latest_train_state.pt names step 30, which does not exist"


def test_a_train_state_of_another_step_is_an_error(tmp_path: Path) -> None:
    bridge(tmp_path)
    saved(tmp_path / "iter_0000010" / "train_state.pt", {"step": torch.tensor(9, dtype=torch.int64)})
    (finding,) = found(ckptlint.check(tmp_path), "error", "warning")
    assert finding[2] == "the folder is named for step 10, but train_state.pt says step 9"
    text(tmp_path / "iter_0000010" / "train_state.pt", "no archive")
    assert codes(ckptlint.check(tmp_path), "error") == {"SAF002"}


def test_a_train_state_that_calls_something_is_refused(tmp_path: Path, marker: Path) -> None:
    import os

    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    bridge(tmp_path)
    saved(tmp_path / "iter_0000010" / "train_state.pt", {"step": Call()})
    assert codes(ckptlint.check(tmp_path), "error") == {"SAF001"}


def test_the_mark_of_nemo_says_that_a_save_did_not_end(tmp_path: Path) -> None:
    (newest,) = nemo(tmp_path)
    text(tmp_path / f"{newest.partition('/')[0]}-unfinished", "")
    assert codes(ckptlint.check(tmp_path), "error") == {"COM001"}
    assert ckptlint.check(dcp(tmp_path / "weights.incomplete")).exit_code == 1
    text(tmp_path / "final-unfinished", "")  # NeMo marks only names with metrics
    assert ckptlint.check(dcp(tmp_path / "final")).exit_code == 0


def test_one_of_eight_rank_files_of_verl_never_passes(tmp_path: Path) -> None:
    saved(tmp_path / "global_step_10" / "actor" / "model_world_size_8_rank_0.pt", {})
    text(tmp_path / "global_step_10" / "actor" / "huggingface" / "config.json", "{}")
    report = ckptlint.check(tmp_path)
    assert (codes(report, "error"), report.exit_code) == ({"RNK001"}, 1)


def test_a_step_whose_component_did_not_finish_is_not_passed(tmp_path: Path) -> None:
    accelerate(tmp_path)
    (tmp_path / "checkpoint-1000" / "optimizer_0" / ".metadata").unlink()
    report = ckptlint.check(tmp_path)
    assert (codes(report, "error"), len(report.checkpoints)) == ({"COM001"}, 2)


def test_what_lies_beside_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    torchtitan(tmp_path)
    for name in ("ft-replicat-0/note.txt", "logs/a.txt", "step-20/tokenizer/tokenizer.json", "step-20/.cache/x"):
        text(tmp_path / name)
    assert ckptlint.check(tmp_path).exit_code == 0


@pytest.mark.parametrize("target", ["/", "..", ".", "../elsewhere"])
@pytest.mark.parametrize("options", [{}, {"all_steps": True}])
def test_a_step_that_is_a_link_out_of_the_run_is_named_and_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: dict[str, bool]
) -> None:
    run_folder = tmp_path / "run"
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, run_folder / "iter_0000010")
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "elsewhere" / "iter_0000098")
    (run_folder / "iter_0000099").symlink_to(target)
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scandir(path))
    report = ckptlint.check(run_folder, **options)
    if options:  # the others are judged, and the link is named
        assert [part.checkpoint.path for part in report.checkpoints] == [str(run_folder / "iter_0000010")]
        assert next((step.name, step.verdict) for step in steps_in(report)) == ("iter_0000099", "not judged")
    else:
        assert not report.checkpoints
    assert report.exit_code == 4  # nobody can tell what was asked for is
    (told,) = report.unreadable
    assert "iter_0000099 is a link to " in told
    own = (str(run_folder), str(run_folder / "iter_0000010"))
    assert not [path for path in listed if path == "/" or (Path(path).is_relative_to(tmp_path) and path not in own)]
    assert ckptlint.check(run_folder / "iter_0000010").exit_code == 0


@pytest.mark.parametrize("name", ["iter_0000099", "checkpoint-99"])
def test_a_step_that_is_a_link_to_a_checkpoint_of_any_name_is_checked_and_told(tmp_path: Path, name: str) -> None:
    target = tmp_path / "disk" / "weights"
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, target)
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, target / "other")  # one level, and no further
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    report = ckptlint.check(tmp_path / "run")
    assert [part.checkpoint.path for part in report.checkpoints] == [str(tmp_path / "run" / name)]
    assert report.exit_code == 0
    assert [(code, level) for code, level, _ in found(report)] == [("SAF001", "info")]
    assert found(report)[0][2] == f"{name} is a link to {target}, outside the run"
    (target / ".metadata").write_bytes(b"")
    assert ckptlint.check(tmp_path / "run").exit_code == 1


@pytest.mark.parametrize("target", ["/", "../..", "../../elsewhere"])
def test_a_component_or_any_folder_of_a_step_that_is_a_link_out_is_named_and_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    step = tmp_path / "run" / "checkpoint-10"
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, step / "pytorch_model_fsdp_0")
    (tmp_path / "elsewhere" / "pytorch_model_fsdp_0").mkdir(parents=True)
    for name in ("optimizer_0", "stray"):
        (step / name).symlink_to(target)
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scandir(path))
    report = ckptlint.check(step)
    (part,) = report.checkpoints
    unknown = [file.name for file in part.checkpoint.step_files if file.state == "unknown"]
    assert unknown == ["../optimizer_0/", "../stray/"]
    assert "/" not in listed
    assert [path for path in listed if path.endswith(("optimizer_0", "stray"))] == []
    (step / "stray").unlink()
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "elsewhere")
    assert len(ckptlint.check(step).checkpoints) == 1 + (target == "../../elsewhere")


def test_a_format_that_is_not_read_is_told_wherever_it_lies_in_a_step(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "step-10")
    text(tmp_path / "step-10" / "a" / "b" / "global_step10" / "metadata.pkl")
    text(tmp_path / "step-10" / "logs" / "b" / "metadata.pkl")  # no state of the step
    report = ckptlint.check(tmp_path)
    paths = [str(Path(part.checkpoint.path).relative_to(tmp_path)) for part in report.checkpoints]
    assert paths == ["step-10", "step-10/a/b/global_step10"]
    assert (codes(report, "error"), report.exit_code) == ({"SAF004"}, 1)


@pytest.mark.parametrize("target", [".", ".."])
def test_a_link_back_to_a_step_or_its_run_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    for number in (1, 2):
        write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "run" / f"step-{number}")
    (tmp_path / "run" / "step-1" / "run").symlink_to(target)
    monkeypatch.chdir(tmp_path)
    for path in ("run", tmp_path / "run"):
        report = ckptlint.check(path, all_steps=True)
        assert (len(report.checkpoints), report.exit_code) == (2, 0)


def test_a_step_that_lies_on_another_disk_is_checked(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "disk" / "iter_0000099")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "iter_0000099").symlink_to(tmp_path / "disk" / "iter_0000099")
    (tmp_path / "run" / "iter_0000098").symlink_to("iter_0000099")
    assert len(ckptlint.check(tmp_path / "run", all_steps=True).checkpoints) == 2
