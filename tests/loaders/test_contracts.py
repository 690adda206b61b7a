"""The contract of each layout, on what the real libraries wrote."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from archives import flipped
from layouts import CANNOT, ArchiveTests, LayoutTests, copied, torch_records

import ckptlint
from ckptlint.loaders.layouts import layouts


class TestDcp(LayoutTests):
    kind = "dcp"
    files = ("__1_0.distcp",)
    swapped = ("__1_0.distcp", "__2_0.distcp")
    mark = "copy.tmp"
    source = "fsdp2_4r"

    def test_a_save_that_has_begun_and_not_ended(self, step: Path) -> None:
        (step / ".metadata").rename(step / ".metadata.tmp")
        super().test_a_save_that_has_begun_and_not_ended(step)

    @staticmethod
    def flipped_data(data: bytes) -> bytes:
        return flipped(data, 8 * 1200)

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


class TestDcpOfOneRank(TestDcp):
    files = ("__0_0.distcp",)
    swapped = None
    older = "frameworks/trackers/link/step-10"
    source = "frameworks/trackers/link/step-20"


class TestPerRank(TestDcp):
    kind = "per-rank"
    source = "per_rank_metadata"

    def test_a_save_that_has_begun_and_not_ended(self, step: Path) -> None:
        (step / "__1.metadata").rename(step / "__1.metadata.tmp")
        LayoutTests.test_a_save_that_has_begun_and_not_ended(self, step)

    @pytest.mark.skip("each rank has metadata of its own")
    def test_random_flips(self, step: Path) -> None:
        pass


class TestMegatron(ArchiveTests):
    kind = "dcp"
    files = ("common.pt",)
    source = "megatron_tp2_dp2_fully_reshardable/iter_0000010"


class TestSafetensors(LayoutTests):
    kind = "safetensors"
    files = ("model-00002-of-00005.safetensors",)
    swapped = ("model-00002-of-00005.safetensors", "model-00003-of-00005.safetensors")
    source = "contradictions/llama_sharded"

    @staticmethod
    def flipped_data(data: bytes) -> bytes:
        (header,) = struct.unpack("<Q", data[:8])
        return flipped(data, 8 * (8 + header))

    @pytest.mark.skip("no checksums: a changed value is a value")
    def test_random_flips(self, step: Path) -> None:
        pass


class TestSafetensorsOfOneFile(TestSafetensors):
    files = ("model.safetensors",)
    swapped = None
    older = "frameworks/trainer_jit/checkpoint-10"
    source = "frameworks/trainer_jit/checkpoint-20"


class TestVerl(ArchiveTests):
    kind = "verl"
    files = ("model_world_size_4_rank_1.pt", "optim_world_size_4_rank_2.pt", "extra_state_world_size_4_rank_3.pt")
    swapped = ("model_world_size_4_rank_1.pt", "model_world_size_4_rank_2.pt")
    source = "rank_files/verl_fsdp2_4r"


class TestFlat(ArchiveTests):
    kind = "flat"
    files = ("model_0000009.rank_1.pth",)
    swapped = ("model_0000009.rank_0.pth", "model_0000009.rank_1.pth")

    def write(self, folder: Path) -> Path:
        step = copied("rank_files/flat_2r", folder)
        for path in step.glob("model_0000004*"):
            path.rename(folder / path.name.replace("4", "9"))
        return step

    def test_a_file_of_an_older_save(self, step: Path) -> None:
        shutil.copy(step.parent / self.files[0], step)
        self._tells(self.files[0], "of an older save", ckptlint.check(step, depth="headers"))


class TestDeepSpeed(ArchiveTests):
    kind = "deepspeed"
    files = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    swapped = ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")
    source = "deepspeed/z2_bf16_4r/global_step2"


class TestUniversal(ArchiveTests):
    kind = "deepspeed-universal"
    files = ("zero/embed.weight/fp32.pt", "zero/embed.weight/exp_avg.pt", "zero/optimizer_state.pt")
    swapped = ("zero/embed.weight/exp_avg.pt", "zero/embed.weight/exp_avg_sq.pt")
    source = "deepspeed/universal_z1/global_step2_universal"


class TestMegatronLegacy(ArchiveTests):
    kind = "megatron-legacy"
    files = ("mp_rank_00/model_optim_rng.pt",)
    swapped = ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt")
    source = "megatron_legacy/tp2/iter_0000010"


class TestShardedBin(ArchiveTests):
    kind = "torch"
    files = ("pytorch_model-00002-of-00003.bin",)
    swapped = ("pytorch_model-00001-of-00003.bin", "pytorch_model-00002-of-00003.bin")
    source = "rank_files/sharded_bin"


class TestAccelerate(ArchiveTests):
    kind = "torch"
    files = ("pytorch_model.bin", "optimizer.bin")
    swapped = files
    source = "rank_files/accelerated"


class TestLightning(ArchiveTests):
    kind = "file"
    files = ("epoch=0-step=3.ckpt",)
    mark = ""
    source = "rank_files/lightning"


class TestTrainer(ArchiveTests):
    kind = "safetensors"
    files = ("rng_state_0.pth", "training_args.bin", "optimizer.pt", "scheduler.pt", "pytorch_model_fsdp.bin")
    swapped = ("rng_state_0.pth", "rng_state_1.pth")

    def write(self, folder: Path) -> Path:
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


CONTRACTS = {name: thing for name, thing in globals().items() if name.startswith("Test")}


def test_every_layout_that_holds_tensors_has_a_contract() -> None:
    kinds = {row.kind for row in layouts()} - {"incomplete", "lost", "unsupported"}
    assert kinds == {own.kind for own in CONTRACTS.values()}, "each needs a class in this file"


def test_what_a_layout_cannot_tell_is_written_of_one_that_is_there() -> None:
    assert {f"Test{name}" for name in CANNOT} <= CONTRACTS.keys()
