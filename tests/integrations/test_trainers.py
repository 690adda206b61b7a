"""The real trainers for a few steps: a healthy run is silent and moves `latest.good`, damage after a write is found."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import REPOSITORY, run
from torch import nn

from ckptlint.errors import CheckpointError, ConfigError
from ckptlint.integrations import saved
from ckptlint.integrations.saved import GOOD

sys.path.append(str(REPOSITORY / "tests" / "live"))  # jobs.py

pytestmark = pytest.mark.ci

Damage = Callable[[Path], object]


def cut(path: Path) -> None:
    """What an interrupted copy or a full disk leaves."""
    os.truncate(path, path.stat().st_size - 100)


def good(run: Path) -> str:
    return str((run / GOOD).readlink())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a check run in this process; one test of each trainer has them in processes of their own."""

    def ask(arguments: Sequence[str], end: float) -> dict[str, Any]:
        assert time.monotonic() < end
        return dict(json.loads(run(*arguments).stdout))

    monkeypatch.setattr(saved, "_ask", ask)


# ---------------------------------------------------------------- transformers


def hf_run(folder: Path, damage: Damage | None = None, at: int = 3, nan: bool = False, **options: Any) -> Any:
    """A Llama trained for four steps with a save after each; a callback before ckptlint's damages one of them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from ckptlint.integrations.transformers import CheckpointLint

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    )

    class Fault(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if nan and state.global_step == at:
                model.model.norm.weight.data[0] = float("nan")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if damage and state.global_step == at:
                damage(folder / f"checkpoint-{at}")

    example = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options.pop("args", {})
    )
    callbacks = [Fault(), CheckpointLint(**options)]
    trainer = transformers.Trainer(model, arguments, train_dataset=[example] * 64, callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.usefixtures("here")
def test_transformers_healthy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from_hub = pytest.importorskip("transformers.trainer_utils", reason="transformers is not installed")
    hf_run(tmp_path, args={"save_total_limit": 2})
    assert [record for record in caplog.records if record.name == "ckptlint"] == []
    assert good(tmp_path) == "checkpoint-4"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4", GOOD]
    assert from_hub.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: cut(step / "model.safetensors"), "PAY004: model.safetensors is 100 B short"),
        (lambda step: (step / "optimizer.pt").unlink(), "the step has no optimizer.pt, which checkpoint-2 has"),
    ],
)
def test_transformers_damaged(damage: Damage, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last: list[str] = []
    hf_run(tmp_path, lambda step: (last.append(good(tmp_path)), damage(step)))
    messages = [record.getMessage() for record in caplog.records if record.name == "ckptlint"]
    assert len(messages) == 1 and said in messages[0] and "checkpoint-3" in messages[0]
    assert last == ["checkpoint-2"] and good(tmp_path) == "checkpoint-4", "the job went on"


@pytest.mark.usefixtures("here")
def test_transformers_nan_is_seen_at_depth_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = hf_run(tmp_path, nan=True, depth="data", on_fault="stop")
    assert trainer.state.global_step == 3 and good(tmp_path) == "checkpoint-2"
    assert "NaN" in caplog.text and "model.norm.weight" in caplog.text


def test_transformers_raises_where_asked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="PAY004"):
        hf_run(tmp_path, lambda step: cut(step / "model.safetensors"), on_fault="raise")
    with pytest.raises(ConfigError, match="use one of warn, stop, raise"):
        hf_run(tmp_path, on_fault="never")


def test_a_check_that_times_out_fails_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = hf_run(tmp_path, timeout=0.01)
    assert trainer.state.global_step == 4 and caplog.text.count("did not end in time") == 4
    assert not (tmp_path / GOOD).is_symlink()


# ---------------------------------------------------------------- Lightning


def lightning_run(folder: Path, damage: Damage | None = None, background: bool = False, **options: Any) -> Any:
    """A model trained for three steps with a save after each; the plugin that writes damages the second."""
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from ckptlint.integrations.lightning import CheckpointLint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(30, 20)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Writer(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            if damage and "step=2" in str(path):
                damage(Path(path))

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AsyncCheckpointIO(Writer()) if background else Writer()],
        callbacks=[CheckpointLint(**options), ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(16, 30), batch_size=4))
    return trainer


@pytest.mark.parametrize("background", [False, True])
def test_lightning(
    background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    if not background:  # whose thread would take the streams from this one
        request.getfixturevalue("here")
    lightning_run(tmp_path / "healthy", background=background)
    assert [record for record in caplog.records if record.name == "ckptlint"] == []
    assert good(tmp_path / "healthy") == "epoch=0-step=3.ckpt"
    lightning_run(tmp_path / "cut", cut, background=background)
    messages = [record.getMessage() for record in caplog.records if record.name == "ckptlint"]
    assert len(messages) == 1 and "epoch=0-step=2.ckpt did not pass" in messages[0]
    assert good(tmp_path / "cut") == "epoch=0-step=3.ckpt"


@pytest.mark.usefixtures("here")
def test_lightning_stops_or_raises_where_asked(tmp_path: Path) -> None:
    assert lightning_run(tmp_path / "stopped", cut, on_fault="stop").global_step == 2
    assert good(tmp_path / "stopped") == "epoch=0-step=1.ckpt"
    with pytest.raises(CheckpointError, match=r"step=2.ckpt did not pass"):
        lightning_run(tmp_path / "raised", cut, on_fault="raise")


# ---------------------------------------------------------------- accelerate and torchtitan, two ranks


def no_collective() -> Any:
    """Every collective of the process group, with a counter in its place; both ranks must have made as many."""
    counted = {"calls": 0}
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "broadcast_object_list"):
        original = getattr(dist, name)

        def call(*args: Any, original: Any = original, **named: Any) -> Any:
            counted["calls"] += 1
            return original(*args, **named)

        setattr(dist, name, call)
    return counted


def test_accelerate_checks_on_rank_0_alone(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from jobs import run_ranks
    from test_hooks import free_port

    from ckptlint.integrations import accelerate as integration

    def job(rank: int) -> dict[str, Any]:
        free_port(tmp_path, rank)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the test that ran before
        project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = accelerate.Accelerator(cpu=True, project_config=project)
        model = nn.Linear(3, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        checked: list[str] = []
        judge = integration.check_saved
        integration.check_saved = lambda *args, **named: checked.append(judge(*args, **named).verdict)
        undo = integration.check_saves(accelerator)

        def step() -> None:
            accelerator.backward(model(torch.randn(5, 3)).sum())
            optimizer.step()
            accelerator.save_state()

        counted = no_collective()
        step()
        step()
        step()  # the oldest goes: accelerate reads a number in every name beside it
        dist.barrier()  # save_state ends without one
        accelerator.load_state()
        undo()
        accelerator.save_state()
        return {"checked": checked, "calls": counted["calls"], "kind": str(accelerator.distributed_type)}

    first, second = run_ranks(job, world=2)
    assert first["checked"] == ["pass"] * 3 and second["checked"] == []
    assert first["kind"].endswith("MULTI_CPU") and first["calls"] == second["calls"]
    assert good(tmp_path) == "checkpoints/checkpoint_2"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


def test_accelerate_finds_a_cut_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from ckptlint.integrations.accelerate import check_saves

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(30, 40)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    save = accelerator.save_state

    def save_and_cut(folder: Path) -> str:
        save(str(folder))
        cut(folder / "model.safetensors")
        return str(folder)

    accelerator.save_state = save_and_cut
    check_saves(accelerator, on_fault="raise")
    with pytest.raises(CheckpointError, match="PAY004"):
        accelerator.save_state(tmp_path / "checkpoint_0")
    assert not (tmp_path / GOOD).is_symlink()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan_checks_what_is_finished(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.checkpoint", reason="torchtitan is not installed")
    from jobs import run_ranks

    from ckptlint.integrations import torchtitan as integration

    def job(rank: int) -> list[tuple[str, str]]:
        from torchtitan.components.checkpoint import CheckpointManager

        class Holder:
            def state_dict(self) -> dict[str, Any]:
                return {"w": torch.ones(2)}

            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = torch.distributed.fsdp.fully_shard(nn.Linear(30, 40), mesh=mesh)
        manager = CheckpointManager(
            CheckpointManager.Config(
                enable=True, folder="run", interval=1, async_mode=mode, keep_latest_k=2, last_save_model_only=True
            ),
            dataloader=None,
            model_parts=[model],
            optimizers=Holder(),
            lr_schedulers=Holder(),
            states={"train_state": Holder()},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )
        checked: list[tuple[str, str]] = []
        judge = integration.check_saved

        def note(path: str, **named: Any) -> None:
            if path.endswith("step-2"):
                cut(next(Path(path).glob("*.distcp")))
            checked.append((Path(path).name, judge(path, **named).verdict))

        integration.check_saved = note
        integration.check_saves(manager)
        for step in (1, 2, 3):
            manager.save(step)
        if mode == "disabled":
            manager.save(4, last_step=True)
        manager.close()
        return checked

    first, second = run_ranks(job, world=2)
    assert second == []
    steps = [("step-1", "pass"), ("step-2", "fail"), ("step-3", "pass")]
    assert first == steps + ([("step-4", "pass")] if mode == "disabled" else [])
    assert good(tmp_path / "run") == "step-3", "the last step holds the model alone"


# ---------------------------------------------------------------- Megatron-LM


def megatron_run(run: Path, cut: int = 0, *words: str, ranks: int = 1, **environment: str) -> str:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        pytest.skip("no checkout of Megatron-LM is on PYTHONPATH")
    job = str(Path(__file__).with_name("megatron_job.py"))
    words = (job, str(run), str(cut), *words, "--tensor-model-parallel-size", str(ranks))
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [sys.executable, "-W", "ignore", "-m", *launch, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("words", [(), ("--async-save",), ("--ckpt-format", "torch")])
def test_a_save_of_megatron_is_checked_once_it_is_finished(tmp_path: Path, ranks: int, words: tuple[str, ...]) -> None:
    log = megatron_run(tmp_path, 2, *words, ranks=ranks)
    assert "iter_0000002 did not pass" in log
    assert log.count("did not pass") == 1
    assert good(tmp_path) == "iter_0000003"


def test_a_save_that_writes_no_weights_is_not_checked(tmp_path: Path) -> None:
    assert "ckptlint:" not in megatron_run(tmp_path, FREEZE="1")
    assert not (tmp_path / GOOD).is_symlink()
