"""Real jobs of the real libraries that save through a hook: a healthy save goes through, a drifted copy does not."""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import fixtures_of, run_alike, run_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ckptlint import live
from ckptlint.live.api import as_text
from ckptlint.live.hooks import dcp as hooks

pytestmark = pytest.mark.ci

SAVED = "saved"


def outcome(save: Callable[[], Any]) -> str:
    """What came of a save: `saved`, or the report of what was raised, the same on all ranks."""
    try:
        save()
    except live.LiveError as error:
        return as_text(error.report)
    return SAVED


def needs_megatron_core() -> None:
    pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")
    for package in ("einops", "psutil"):
        pytest.importorskip(package, reason=f"megatron-core needs {package}")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def sharded(rank: int, rows: int = 2) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], run_check=False)


OF_ONE_STEP: dict[str, Any] = {"max_steps": 1, "accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
OF_ONE_STEP |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
"""What the trainers of Lightning are told here: one step of two ranks, and nothing beside it."""


# ---------------------------------------------------------------- torch


class App:
    """A Stateful that counts."""

    asked = 0
    value = 1.0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"w": torch.full((2,), self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_every_save_of_torch_is_checked_until_undone(tmp_path: Path) -> None:
    def job(rank: int) -> dict[str, Any]:
        live.install()
        save, async_save = dcp.save, dcp.async_save
        undo = live.patch_dcp()
        app, drifted = App(), {"w": sharded(rank), "norm": torch.full((3,), 1 + 1e-7 * (rank == 2))}
        found = {
            "healthy": outcome(lambda: dcp.save({"w": sharded(rank), "app": app}, checkpoint_id=tmp_path / "healthy")),
            "again": outcome(lambda: dcp.save({"w": sharded(rank), "app": app}, checkpoint_id=tmp_path / "healthy")),
            "asked": app.asked,
            "drifted": outcome(lambda: dcp.save(state_dict=drifted, checkpoint_id=tmp_path / "drifted")),
            "async": outcome(lambda: dcp.async_save(drifted, checkpoint_id=tmp_path / "async").result()),
            "writer": outcome(lambda: dcp.save(drifted, storage_writer=dcp.FileSystemWriter(tmp_path / "writer"))),
            "fine": outcome(lambda: dcp.async_save({"w": sharded(rank)}, checkpoint_id=tmp_path / "fine").result()),
        }
        if rank == 1:
            dcp.save({"alone": torch.ones(1)}, checkpoint_id=tmp_path / "alone", no_dist=True)
        pair = dist.new_group([0, 1])
        if rank < 2:
            dcp.save({"pair": torch.full((1,), float(rank))}, checkpoint_id=tmp_path / "pair", process_group=pair)
        os.environ["CKPTLINT_LIVE"] = "0"
        found["off"] = outcome(lambda: dcp.save(drifted, checkpoint_id=tmp_path / "off"))
        del os.environ["CKPTLINT_LIVE"]
        undo()
        found["undone"] = (dcp.save, dcp.async_save) == (save, async_save)
        return found

    first = run_alike(job)
    assert first["healthy"] == first["again"] == first["fine"] == first["off"] == SAVED
    assert first["asked"] == 2 and first["undone"]
    for name in ("drifted", "async", "writer"):
        assert "LIV205" in first[name] and "rank 2" in first[name]
        assert files(tmp_path / name) == []
    for name in ("healthy", "fine", "alone", "pair", "off"):
        assert ".metadata" in files(tmp_path / name)


class Burning(App):
    """A Stateful whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("the optimizer is on fire")


def test_a_state_dict_that_raises_on_one_rank_stops_the_save_on_all_at_once(tmp_path: Path) -> None:
    def job(rank: int) -> tuple[str, str, float, str]:
        live.install(timeout=60)
        live.patch_dcp()
        state = {"w": sharded(rank), "app": Burning() if rank == 1 else App()}
        started = time.monotonic()
        with pytest.raises(live.LiveError) as error:
            dcp.save(state, checkpoint_id=tmp_path / "step")
        seconds = time.monotonic() - started
        healthy = outcome(lambda: dcp.save({"w": sharded(rank), "app": App()}, checkpoint_id=tmp_path / "next"))
        return str(error.value), repr(error.value.__cause__), seconds, healthy

    ranks = run_ranks(job)
    assert "LIV210" in ranks[0][0] and "rank 1 could not read its own state: RuntimeError" in ranks[0][0]
    assert ranks[0][0].endswith("Nothing was written.\n")
    for text, *_ in ranks[1:]:
        assert text.startswith("ckptlint live: LIV210 rank 1 could not read its own state: RuntimeError: the optimizer")
    assert [cause for _, cause, _, _ in ranks] == ["None", "RuntimeError('the optimizer is on fire')", "None", "None"]
    assert max(seconds for _, _, seconds, _ in ranks) < 20, "nobody waits for the time limit of 60 s"
    assert files(tmp_path / "step") == []
    assert [healthy for *_, healthy in ranks] == [SAVED] * 4 and ".metadata" in files(tmp_path / "next")


def test_running_statistics_of_each_ranks_own_data_are_healthy(tmp_path: Path) -> None:
    def job(rank: int) -> tuple[str, list[float]]:
        live.install()
        live.patch_dcp()
        torch.manual_seed(0)
        model = fully_shard(Net(), mesh=init_device_mesh("cpu", (4,)))
        model(torch.randn(5, 3) + rank).sum().backward()
        mean = model.norm.running_mean.tolist()
        return outcome(lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step")), mean

    ranks = run_ranks(job)
    assert [said for said, _ in ranks] == [SAVED] * 4
    assert len({tuple(mean) for _, mean in ranks}) == 4


# ---------------------------------------------------------------- Megatron-Core


def megatron_saves(tmp_path: Path, rank: int) -> dict[str, Any]:
    live.install()
    megatron_core = fixtures_of("megatron_core")
    checkpointing = megatron_core.dist_checkpointing
    save, undo = checkpointing.save, live.patch_mcore()
    run = megatron_core.Run(tp=2, layers=2, sharding="fully_reshardable")
    with megatron_core.CudaToCpu():
        megatron_core.start_parallel(run)
        state, _ = megatron_core.training_state(run)
        drifted = copy.copy(state)
        name, tensor = next((key, value) for key, value in state["model"].items() if "final_layernorm" in key)
        bad = copy.copy(tensor)
        bad.data = tensor.data + (rank == 3)
        drifted["model"] = {**state["model"], name: bad}

        def saved(state: dict[str, Any], folder: str) -> str:
            if rank == 0:
                (tmp_path / folder).mkdir()
            dist.barrier()
            strategy = megatron_core.TorchDistSaveShardedStrategy("torch_dist", 1)
            return outcome(lambda: checkpointing.save(state, str(tmp_path / folder), strategy))

        found = {"drifted": saved(drifted, "drifted"), "healthy": saved(state, "healthy")}
    undo()
    found["undone"] = checkpointing.save is save
    return found


def test_every_save_of_megatron_core_is_checked_until_undone(tmp_path: Path) -> None:
    needs_megatron_core()
    refused_by_megatron(run_alike(partial(megatron_saves, tmp_path)), tmp_path)


def refused_by_megatron(first: dict[str, Any], folder: Path) -> None:
    """The drifted copy was refused before anything was written, the healthy state was saved."""
    assert first["healthy"] == SAVED and first["undone"]
    assert "LIV205" in first["drifted"] and "decoder.final_layernorm.weight" in first["drifted"]
    assert files(folder / "drifted") == [] and ".metadata" in files(folder / "healthy")


def test_megatron_fsdp_saves_through_torch(tmp_path: Path) -> None:
    needs_megatron_core()

    def job(rank: int) -> dict[str, Any]:
        live.install()
        live.patch_dcp()
        fsdp_dtensor = fixtures_of("fsdp_dtensor")
        found = {"healthy": outcome(lambda: fsdp_dtensor.megatron_fsdp(rank, tmp_path / "healthy"))}
        preprocess = fsdp_dtensor.uneven_dtensor.preprocess_state_dict_for_uneven_dtensor

        def and_lose_it(state: dict[str, Any]) -> None:
            preprocess(state)
            state["model"] = {name: tensor.detach() for name, tensor in state["model"].items()}

        fsdp_dtensor.uneven_dtensor.preprocess_state_dict_for_uneven_dtensor = and_lose_it
        found["detached"] = outcome(lambda: fsdp_dtensor.megatron_fsdp(rank, tmp_path / "detached"))
        return found

    for folder in ("healthy", "detached"):
        (tmp_path / folder).mkdir()
    first = run_alike(job)
    assert first["healthy"] == SAVED and ".metadata" in files(tmp_path / "healthy")
    assert "LIV101" in first["detached"] and files(tmp_path / "detached") == []


# ---------------------------------------------------------------- trainers


class Net(nn.Module):
    """Its running statistics differ between data-parallel ranks, as they do in healthy jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def free_port(folder: Path, rank: int) -> None:
    """Give all ranks the address that torchrun would."""
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (folder / "port").write_text(str(free.getsockname()[1]))
    dist.barrier()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(folder / "port").read_text())


def test_accelerate_saves_copies_that_are_equal(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    def job(rank: int) -> dict[str, Any]:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # forked, perhaps after a test of a trainer
        free_port(tmp_path, rank)
        live.install()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.register_save_state_pre_hook(live.accelerate_hook)
        accelerator.backward(model(torch.randn(5, 3) + rank).sum())
        optimizer.step()
        found = {
            "kind": str(accelerator.distributed_type),
            "mean": model.module.norm.running_mean.tolist(),
            "healthy": outcome(lambda: accelerator.save_state(str(tmp_path / "healthy"))),
        }
        with torch.no_grad():
            model.module.last.weight.add_(1e-6 * (rank == 1))
        found["drifted"] = outcome(lambda: accelerator.save_state(str(tmp_path / "drifted")))
        return found

    first, second = run_ranks(job, world=2)
    assert first["kind"].endswith("MULTI_CPU") and first.pop("mean") != second.pop("mean")
    assert first == second
    assert first["healthy"] == SAVED and "model.safetensors" in files(tmp_path / "healthy")
    assert "LIV205" in first["drifted"] and "last.weight" in first["drifted"]
    assert files(tmp_path / "drifted") == []


def test_accelerate_saves_fsdp2_through_torch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    def job(rank: int) -> dict[str, Any]:
        from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

        free_port(tmp_path, rank)
        live.install()
        live.patch_dcp()
        accelerator = Accelerator(cpu=True)
        accelerator.register_save_state_pre_hook(live.accelerate_hook)
        # accelerate refuses FSDP on a CPU; from here on it saves as it does on GPUs
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False)
        accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        model = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (2,)))
        accelerator._models.append(model)
        found = {"healthy": outcome(lambda: accelerator.save_state(str(tmp_path / "healthy")))}
        with torch.no_grad():
            model.bias._local_tensor.data = torch.ones(3)
        found["broken"] = outcome(lambda: accelerator.save_state(str(tmp_path / "broken")))
        return found

    first = run_alike(job, world=2)
    assert first["healthy"] == SAVED and ".metadata" in files(tmp_path / "healthy")
    assert "LIV101" in first["broken"] and ".metadata" not in files(tmp_path / "broken")


def test_lightning_saves_copies_that_are_equal(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")

    def job(rank: int) -> dict[str, Any]:
        import lightning.pytorch as pl
        from lightning.fabric.plugins.environments import LightningEnvironment

        free_port(tmp_path, rank)
        os.environ.update(NODE_RANK="0")
        live.install()

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                return self.net(batch + self.global_rank).sum()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        class Check(live.LightningCheck, pl.Callback):
            """What a user writes."""

        torch.manual_seed(0)
        module = Module()
        trainer = pl.Trainer(
            strategy="ddp",
            plugins=[LightningEnvironment()],
            callbacks=[Check()],
            **OF_ONE_STEP,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 3), batch_size=4))
        found = {
            "mean": module.net.norm.running_mean.tolist(),
            "healthy": outcome(lambda: trainer.save_checkpoint(tmp_path / "healthy.ckpt")),
        }
        with torch.no_grad():
            module.net.last.weight.add_(1e-6 * (rank == 1))
        found["drifted"] = outcome(lambda: trainer.save_checkpoint(tmp_path / "drifted.ckpt"))
        return found

    first, second = run_ranks(job, world=2)
    assert first.pop("mean") != second.pop("mean")
    assert first == second
    assert first["healthy"] == SAVED and (tmp_path / "healthy.ckpt").exists()
    assert "LIV205" in first["drifted"] and "last.weight" in first["drifted"]
    assert not (tmp_path / "drifted.ckpt").exists()


def test_lightning_saves_model_parallel_states_through_torch(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")

    def job(rank: int) -> dict[str, Any]:
        import lightning.pytorch as pl
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.pytorch.strategies import ModelParallelStrategy

        free_port(tmp_path, rank)
        os.environ.update(NODE_RANK="0")
        live.install()
        live.patch_dcp()

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(3, 4)

            def configure_model(self) -> None:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                return self.net(batch).sum()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=0.1)

        module = Module()
        trainer = pl.Trainer(
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            plugins=[LightningEnvironment()],
            **OF_ONE_STEP,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 3), batch_size=4))
        found = {"healthy": outcome(lambda: trainer.save_checkpoint(tmp_path / "healthy"))}
        with torch.no_grad():
            module.net.bias._local_tensor.data = torch.ones(3)
        found["broken"] = outcome(lambda: trainer.save_checkpoint(tmp_path / "broken"))
        return found

    first = run_alike(job, world=2)
    assert first["healthy"] == SAVED and ".metadata" in files(tmp_path / "healthy")
    assert "LIV101" in first["broken"] and ".metadata" not in files(tmp_path / "broken")


def test_torchtitan_saves_through_torch(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.checkpoint", reason="torchtitan is not installed")

    def job(rank: int) -> dict[str, Any]:
        from torchtitan.components.checkpoint import CheckpointManager

        live.install()
        live.patch_dcp()
        state = App()
        model = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (2,)))
        manager = CheckpointManager(
            CheckpointManager.Config(enable=True, folder="checkpoint", interval=1),
            dataloader=None,
            model_parts=[model],
            optimizers=App(),
            lr_schedulers=App(),
            states={"train_state": state},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )
        found = {"healthy": outcome(lambda: manager.save(1))}
        state.value += 1e-6 * rank
        found["broken"] = outcome(lambda: manager.save(2))
        return found

    first = run_alike(job, world=2)
    assert first["healthy"] == SAVED and ".metadata" in files(tmp_path / "checkpoint" / "step-1")
    assert "LIV205" in first["broken"] and "train_state.w" in first["broken"]
    assert files(tmp_path / "checkpoint" / "step-2") == []


# ---------------------------------------------------------------- without a group


def test_a_save_of_the_module_that_defines_it_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    real = hooks.check_save
    monkeypatch.setattr(hooks, "check_save", lambda *a, **named: (checked.append(a[1]), real(*a, **named)))
    before = state_dict_saver.save, state_dict_saver.async_save
    undo = live.patch_dcp()
    try:
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        broken = {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}
        with pytest.raises(live.LiveError, match="LIV108"):
            save(broken, checkpoint_id=tmp_path / "broken")
        async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "async").result()
        dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "async again").result()
    finally:
        undo()
        live.uninstall()
    assert checked == [tmp_path / "broken", tmp_path / "async", tmp_path / "async again"]
    assert (state_dict_saver.save, state_dict_saver.async_save) == before
    assert ".metadata" in files(tmp_path / "async again") and not (tmp_path / "broken").exists()


def test_a_job_of_one_rank_needs_no_group(tmp_path: Path) -> None:
    undo = live.patch_dcp()
    try:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step")
        broken = {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}
        with pytest.raises(live.LiveError, match="LIV108"):
            dcp.save(broken, checkpoint_id=tmp_path / "broken")
    finally:
        undo()
        live.uninstall()
    assert ".metadata" in files(tmp_path / "step") and not (tmp_path / "broken").exists()
