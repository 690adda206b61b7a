"""The contract of each layout that holds archives of torch.save, on what the real libraries wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
from layouts import ArchiveTests, LayoutTests, torch_records
from support import REAL

BESIDE = "no list says that it should be there"


def copied(source: str, folder: Path) -> Path:
    return Path(shutil.copytree(REAL / source, folder / "copy", symlinks=True))


class TestMegatron(ArchiveTests):
    files = ("common.pt",)

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("megatron_tp2_dp2_fully_reshardable/iter_0000010", folder)


class TestVerl(ArchiveTests):
    files = (
        "model_world_size_4_rank_1.pt",
        "optim_world_size_4_rank_2.pt",
        "extra_state_world_size_4_rank_3.pt",
    )

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("rank_files/verl_fsdp2_4r", folder)


class TestDeepSpeed(ArchiveTests):
    files = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("deepspeed/z2_bf16_4r/global_step2", folder)


class TestUniversal(ArchiveTests):
    files = ("zero/embed.weight/fp32.pt", "zero/embed.weight/exp_avg.pt", "zero/optimizer_state.pt")

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("deepspeed/universal_z1/global_step2_universal", folder)


class TestMegatronLegacy(ArchiveTests):
    files = ("mp_rank_00/model_optim_rng.pt",)

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("megatron_legacy/tp2/iter_0000010", folder)


class TestShardedBin(ArchiveTests):
    files = ("pytorch_model-00002-of-00003.bin",)

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("rank_files/sharded_bin", folder)


class TestAccelerate(ArchiveTests):
    files = ("pytorch_model.bin", "optimizer.bin")
    cannot: ClassVar = {("missing", "optimizer.bin"): BESIDE}

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("rank_files/accelerated", folder)


class TestLightning(ArchiveTests):
    files = ("epoch=0-step=3.ckpt",)

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("rank_files/lightning", folder)


class TestTrainer(ArchiveTests):
    files = ("rng_state_0.pth", "training_args.bin", "optimizer.pt", "scheduler.pt", "pytorch_model_fsdp.bin")
    cannot: ClassVar = {("missing", name): BESIDE for name in files[1:]}

    @staticmethod
    def write(folder: Path) -> Path:
        torch = pytest.importorskip("torch")
        step = copied("deepspeed/trainer_z2_2r/checkpoint-2", folder)
        shutil.rmtree(step / "global_step2")
        (step / "latest").unlink()
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), step / "optimizer.pt")
        torch.save(torch.optim.lr_scheduler.ConstantLR(optimizer).state_dict(), step / "scheduler.pt")
        torch.save(model.state_dict(), step / "pytorch_model_fsdp.bin")
        return step


class TestDcp(LayoutTests):
    files = ("__1_0.distcp",)
    cannot: ClassVar = {("zeroed", "__1_0.distcp"): "records are opened from depth headers on"}

    @staticmethod
    def write(folder: Path) -> Path:
        return copied("fsdp2_4r", folder)

    @staticmethod
    def loaded(step: Path, name: str) -> object:
        checkpoint = pytest.importorskip("torch.distributed.checkpoint")
        data, part = (step / name).read_bytes(), step.parent / "record"
        found = []
        stored = checkpoint.FileSystemReader(step).read_metadata().storage_data.values()
        for start, length in sorted((info.offset, info.length) for info in stored if info.relative_path == name):
            part.write_bytes(data[start : start + length])
            found.append(torch_records(part))
        return found
