"""Megatron's older form, a file for each model parallel rank: real saves are silent, what is broken is named."""

from __future__ import annotations

import argparse
import enum
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import REAL, codes, found

import ckptlint
from ckptlint.depth import Depth
from ckptlint.loaders.discover import find
from ckptlint.loaders.rank_files.megatron_keys import GridCoordinate, Sizes, grid, offsets_of
from ckptlint.loaders.run.finished import step_state

LEGACY = REAL / "megatron_legacy"
NAMES = sorted(folder.name for folder in LEGACY.iterdir())
STEP = "iter_0000010"
MODEL = "model_optim_rng.pt"


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("depth", ["METADATA", "FILES", "HEADERS", "DATA"])
@pytest.mark.parametrize("name", NAMES)
def test_what_megatron_saved_is_silent(name: str, depth: str) -> None:
    report = ckptlint.check(LEGACY / name, depth=Depth[depth])
    assert found(report) == []
    [item] = report.checkpoints
    assert item.checkpoint is not None
    assert item.checkpoint.format == "megatron-legacy"
    assert item.checkpoint.partial_because == ""


def checkpoint(name: str) -> Any:
    return ckptlint.check(LEGACY / name).checkpoints[0].checkpoint


def test_parts_and_stages_become_one_model() -> None:
    ckpt = checkpoint("tp2_pp2")
    assert ckpt.tensors["embedding.word_embeddings.weight"].global_shape == (48, 16)
    assert {key.split(".")[2] for key in ckpt.tensors if key.startswith("decoder.layers")} == {"0", "1"}
    fc1 = ckpt.tensors["decoder.layers.1.mlp.linear_fc1.weight"]
    assert fc1.global_shape == (48, 16)
    assert sorted(fc1.tiling.offsets[:, 0].tolist()) == [0, 12, 24, 36]  # gate and up of two ranks
    moment = ckpt.tensors["optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.weight"]
    assert (moment.global_shape, moment.dtype) == ((48, 16), "float32")


@pytest.mark.parametrize("name", ["tp2_dp2_distributed", "pp2_vpp2_distributed", "ep2_distributed"])
def test_flat_buffers_become_the_states_of_parameters(name: str) -> None:
    ckpt = checkpoint(name)
    model = {key for key in ckpt.tensors if not key.startswith("optimizer.")}
    for what in ("fp32_param", "exp_avg", "exp_avg_sq"):
        for key in model:
            assert ckpt.tensors[f"optimizer.state.{what}.{key}"].global_shape == ckpt.tensors[key].global_shape


def test_a_buffer_gives_each_parameter_its_own_numbers() -> None:
    """The fp32 copy in the buffer, rounded, is the weight in the model: the places in the buffer are right."""
    ckpt = checkpoint("pp2_vpp2_distributed")
    step = LEGACY / "pp2_vpp2_distributed" / STEP

    def bytes_of(key: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = ckpt.tensors[key]
        file, offset, length = ckpt.byte_range_of(int(tensor.chunks.record[0]))
        data = bytearray((step / file).read_bytes()[offset : offset + length])
        return torch.frombuffer(data, dtype=dtype)

    for key in ckpt.tensors:
        if not key.startswith("optimizer."):
            master = bytes_of(f"optimizer.state.fp32_param.{key}", torch.float32)
            weight = bytes_of(key, torch.bfloat16).float()
            assert (master - weight).abs().max() < 0.02, key  # the optimizer took one step after the copy was made


# ---------------------------------------------------------------- grids


def test_a_grid_of_fewer_expert_parts_than_tensor_parts() -> None:
    assert grid(Sizes(tp=2, ep=2, etp=1)) == {
        "mp_rank_00_000": GridCoordinate(0, 0, 0, 0),
        "mp_rank_01_001": GridCoordinate(1, 0, 1, 0),
    }
    assert len(grid(Sizes(tp=2, pp=3, ep=2, etp=2))) == 12


def test_layers_before_a_chunk() -> None:
    sizes = Sizes(pp=2, vpp=2)
    assert offsets_of({}, 2, sizes) == {(0, 0): 0, (0, 1): 2, (1, 0): 4, (1, 1): 6}
    assert offsets_of({(0, 0): 1, (0, 1): 2, (1, 0): 2, (1, 1): 1}, 0, sizes)[1, 1] == 5


# ---------------------------------------------------------------- broken


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enums of Megatron's under their own names, so that torch can read and write them."""
    for module, name, members in (
        ("megatron.core.enums", "ModelType", {"encoder_or_decoder": 1}),
        ("megatron.core.transformer.enums", "AttnBackend", {f"m{i}": i for i in range(1, 7)}),
        ("megatron.core.rerun_state_machine", "RerunMode", {"DISABLED": "disabled"}),
    ):
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            place = ".".join(parts[:depth])
            if depth < len(parts) and place in sys.modules and isinstance(sys.modules[place], Stub):
                continue
            monkeypatch.setitem(sys.modules, place, Stub(place))
        made = enum.Enum(name, members, module=module)  # type: ignore[misc]
        setattr(sys.modules[module], name, made)


class Stub(types.ModuleType):
    """A package that holds nothing."""

    __path__: ClassVar[list[str]] = []


@pytest.fixture
def copied(tmp_path: Path, megatron: None) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        shutil.copytree(LEGACY / name, tmp_path / name)
        return tmp_path / name / STEP

    return copy


Copied = Callable[[str], Path]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def told(step: Path) -> list[tuple[str, str, str]]:
    return found(ckptlint.check(step.parent), "error", "warning")


def only(step: Path, code: str, *words: str, level: str = "error") -> None:
    rows = told(step)
    assert [row[:2] for row in rows] == [(code, level)], rows
    for word in words:
        assert word in rows[0][2], rows[0][2]


def test_rewriting_changes_nothing(copied: Copied) -> None:
    step = copied("tp2_pp2")
    for path in step.rglob("*.pt"):
        edit(path, lambda state: None)
    assert told(step) == []


Damage = Callable[[Path], Any]


def gone(*names: str) -> Damage:
    """Files, or folders, of a step that are lost."""

    def lose(step: Path) -> None:
        for path in (step / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return lose


def edited(name: str, change: Callable[[Any], Any]) -> Damage:
    return lambda step: edit(step / name, change)


def cut(name: str, keep: int) -> Damage:
    return lambda step: (step / name).write_bytes((step / name).read_bytes()[:keep])


def set_steps(state: Any, *steps: int | None) -> None:
    """Let the groups of a rank's optimizer say these steps, the last of them from there on."""
    for number, group in enumerate(state["optimizer"]["optimizer"]["param_groups"]):
        group["step"] = steps[min(number, len(steps) - 1)]


def shorten(state: Any) -> None:
    """Let the buffer of a distributed optimizer lack its last elements, and say so."""
    [buffer] = state[0].values()
    for what in ("param", "exp_avg", "exp_avg_sq"):
        buffer[what] = buffer[what][:-400].clone()
    buffer["numel_unpadded"] -= 400


class Marker:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("echo ckptlint-marker",)


OPTIMIZER = "distrib_optim.pt"
OF_FOUR = {"tensor_model_parallel_size": 4, "world_size": 4}
PROJECTION = "decoder.layers.1.self_attention.linear_proj.weight"
BROKEN: dict[str, tuple[str, Damage, str, tuple[str, ...]]] = {
    "a lost rank file": ("tp2_pp2", gone(f"mp_rank_01_001/{MODEL}"), "RNK001", (f"mp_rank_01_001/{MODEL} is missing",)),
    "a lost rank folder": ("tp2", gone("mp_rank_01"), "RNK001", (f"mp_rank_01/{MODEL} is missing",)),
    "a lost stage": (
        "tp2_pp2", gone("mp_rank_00_000", "mp_rank_01_000"), "RNK001", ("2 of 4 model files are missing", "pp 0"),
    ),
    "arguments that differ": (
        "tp2_pp2", edited(f"mp_rank_01_000/{MODEL}", lambda state: setattr(state["args"], "num_layers", 4)),
        "RNK002", (f"num_layers 4 in mp_rank_01_000/{MODEL}",),
    ),
    "a rank of a job of other sizes": (
        "tp2", edited(f"mp_rank_01/{MODEL}", lambda state: vars(state["args"]).update(OF_FOUR)),
        "RNK002", ("tensor_model_parallel_size 4", f"mp_rank_01/{MODEL}"),
    ),
    "an iteration that differs": (
        "tp2_pp2", edited(f"mp_rank_00_001/{MODEL}", lambda state: state.update(iteration=9)),
        "RNK003", (f"mp_rank_00_001/{MODEL} comes from step 9",),
    ),
    "an optimizer of one rank at another step": (
        "tp2_pp2", edited(f"mp_rank_00_001/{MODEL}", lambda state: set_steps(state, 1)),
        "RNK003", (f"mp_rank_00_001/{MODEL} comes from step 1",),
    ),
    "parts of different shape": (
        "tp2", edited(f"mp_rank_01/{MODEL}", lambda state: state["model"].update(
            {PROJECTION: state["model"][PROJECTION][:, :6].clone()})),
        "RNK002", ("local shape", PROJECTION, "mp_rank_01"),
    ),
    "a lost distributed optimizer": (
        "tp2_dp2_distributed", gone(f"mp_rank_01/{OPTIMIZER}"), "RNK001", (f"mp_rank_01/{OPTIMIZER} is missing",),
    ),
    "a rank without an optimizer": (
        "tp2_pp2", edited(f"mp_rank_01_001/{MODEL}", lambda state: state.pop("optimizer")),
        "RNK002", (f"the optimizer state is missing in mp_rank_01_001/{MODEL}",),
    ),
    "a short buffer": (
        "tp2_dp2_distributed", edited(f"mp_rank_01/{OPTIMIZER}", shorten),
        "RNK008", (f"in mp_rank_01/{OPTIMIZER} have 2,608 elements instead of",),
    ),
    "no rank has a model": (
        "tp2_dp2_distributed", gone(f"mp_rank_00/{MODEL}", f"mp_rank_01/{MODEL}"),
        "COM001", (f"no rank has a {MODEL}",),
    ),
} | {
    f"a hostile pickle in {name}": (
        "tp2_dp2_distributed", edited(name, lambda state: state.update(x=Marker())), "SAF001", (f"{name} asks to call",)
    )
    for name in (f"mp_rank_01/{MODEL}", f"mp_rank_01/{OPTIMIZER}")
} | {
    f"a file that is cut to {keep} bytes": (
        "tp2_pp2", cut(f"mp_rank_01_000/{MODEL}", keep), "PAY013", (f"mp_rank_01_000/{MODEL}",)
    )
    for keep in (0, 2000)
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_told_once_and_by_its_place(copied: Copied, fault: str) -> None:
    name, damage, code, words = BROKEN[fault]
    step = copied(name)
    damage(step)
    only(step, code, *words)


@pytest.mark.parametrize("name", ["tp2", "tp2_pp2", "pp2_tied"])
def test_groups_that_count_no_steps_are_silent(copied: Copied, name: str) -> None:
    """An optimizer that counts in the states of parameters, and a group that a rank has no parameters for."""
    step = copied(name)
    for rank in step.iterdir():
        edit(rank / MODEL, lambda state: set_steps(state, None))
    assert found(ckptlint.check(step)) == []
    last = max(rank.name for rank in step.iterdir())

    def empty(state: Any) -> None:
        set_steps(state, 10)
        state["optimizer"]["optimizer"]["param_groups"].append({"params": [], "step": 11, "is_expert_parallel": True})
        state["optimizer"]["fp32_from_fp16_params"].append([])

    edit(step / last / MODEL, empty)
    assert found(ckptlint.check(step)) == []


def test_a_folder_of_another_step(copied: Copied) -> None:
    step = copied("no_optimizer")
    step = step.rename(step.with_name("iter_0000020"))
    (step.parent / "latest_checkpointed_iteration.txt").write_text("20")
    only(step, "COM002", "the folder is named for step 20", "says step 10")


def test_a_tracker_that_names_what_is_not_there(copied: Copied) -> None:
    step = copied("no_optimizer")
    (step.parent / "latest_checkpointed_iteration.txt").write_text("30")
    only(step, "COM002", "names step 30, which does not exist", level="warning")


def test_the_whole_where_a_part_should_be(copied: Copied) -> None:
    step = copied("tp2")
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    parts = [torch.load(step / f"mp_rank_0{i}" / MODEL, weights_only=False)["model"][key] for i in range(2)]
    for rank in range(2):
        edit(step / f"mp_rank_0{rank}" / MODEL, lambda state: state["model"].update({key: torch.cat(parts, 1)}))
    rows = told(step)
    assert rows
    assert all(key in row[2] for row in rows), rows


def test_a_layer_that_a_stage_lacks(copied: Copied) -> None:
    step = copied("pp2_vpp2")

    def drop(state: Any) -> None:
        for key in [key for key in state["model1"] if key.startswith("decoder.layers.0.")]:
            del state["model1"][key]

    edit(step / "mp_rank_00_000" / MODEL, drop)
    rows = told(step)
    assert ("CFG001", "error") in {row[:2] for row in rows}, rows
    assert "layer 2 of decoder.layers" in " ".join(row[2] for row in rows), rows


def test_two_stages_with_the_same_bytes(copied: Copied) -> None:
    step = copied("tp2_pp2")
    shutil.copy(step / "mp_rank_01_000" / MODEL, step / "mp_rank_01_001" / MODEL)
    rows = told(step)
    assert [row[:2] for row in rows] == [("RNK006", "error")], rows
    assert "mp_rank_01_001/model_optim_rng.pt" in rows[0][2]
    assert "same bytes as mp_rank_01_000/model_optim_rng.pt" in rows[0][2]


def test_two_ranks_that_changed_places(copied: Copied) -> None:
    step = copied("tp2")
    (step / "mp_rank_00").rename(step / "x")
    (step / "mp_rank_01").rename(step / "mp_rank_00")
    (step / "x").rename(step / "mp_rank_01")
    rows = told(step)
    assert {row[:2] for row in rows} == {("RNK006", "warning")}, rows
    assert "mp_rank_00/model_optim_rng.pt holds what was saved as rank 1, mp_rank_01" in rows[0][2]


def test_a_final_norm_that_is_lost(copied: Copied) -> None:
    step = copied("pp2_uneven")
    edit(step / "mp_rank_00_001" / MODEL, lambda state: state["model"].pop("decoder.final_layernorm.weight"))
    rows = told(step)
    assert "CFG001" in {row[0] for row in rows}, rows
    assert "decoder.final_layernorm.weight" in " ".join(row[2] for row in rows)


def test_a_vocabulary_padded_otherwise(copied: Copied) -> None:
    step = copied("no_optimizer")
    for rank in range(2):

        def pad(state: Any) -> None:
            for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                state["model"][key] = torch.cat([state["model"][key]] * 2)

        edit(step / f"mp_rank_0{rank}" / MODEL, pad)
    rows = told(step)
    assert rows
    assert all("word_embeddings" in row[2] or "vocab" in row[2] or "output_layer" in row[2] for row in rows), rows


def test_a_job_that_saves_no_optimizer_is_silent(copied: Copied) -> None:
    step = copied("tp2_pp2")
    for path in step.glob(f"*/{MODEL}"):
        edit(path, lambda state: state.pop("optimizer"))
    assert told(step) == []


def test_a_buffer_that_is_shorter_than_it_says(copied: Copied) -> None:
    step = copied("tp2_dp2_distributed")

    def cut(state: Any) -> None:
        [buffer] = state[0].values()
        buffer["exp_avg"] = buffer["exp_avg"][:-64].clone()

    edit(step / "mp_rank_00" / "distrib_optim.pt", cut)
    assert ("RNK008", "error") in {row[:2] for row in told(step)}


def test_a_moment_of_another_shape(copied: Copied) -> None:
    step = copied("tp2")

    def cut(state: Any) -> None:
        own = state["optimizer"]["optimizer"]["state"][3]
        own["exp_avg"] = own["exp_avg"][:-1].clone()

    edit(step / "mp_rank_00" / MODEL, cut)
    assert ("RNK008", "error") in {row[:2] for row in told(step)}


def test_an_expert_that_is_lost(copied: Copied) -> None:
    step = copied("ep2")
    key = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    edit(step / "mp_rank_00_001" / MODEL, lambda state: state["model"].pop(key))
    rows = told(step)
    assert "local_experts.3" in " ".join(row[2] for row in rows), rows


def test_hostile_sizes_are_bounded(copied: Copied) -> None:
    step = copied("no_optimizer")
    edit(step / "mp_rank_00" / MODEL, lambda state: setattr(state["args"], "tensor_model_parallel_size", 2**40))
    assert codes(ckptlint.check(step.parent)) is not None


def test_folders_of_a_larger_job_are_a_note(copied: Copied) -> None:
    step = copied("no_optimizer")
    shutil.copytree(step / "mp_rank_01", step / "mp_rank_02")
    assert told(step) == []
    assert "mp_rank_02" in " ".join(row[2] for row in found(ckptlint.check(step.parent), "info"))


def test_a_rank_stands_for_its_step() -> None:
    for inner in ("mp_rank_01", f"mp_rank_01/{MODEL}"):
        [item] = ckptlint.check(LEGACY / "tp2" / STEP / inner).checkpoints
        assert item.checkpoint is not None
        assert len(item.checkpoint.files) == 2


def test_arguments_in_an_unknown_form(copied: Copied) -> None:
    step = copied("tp2")
    for rank in range(2):
        edit(step / f"mp_rank_0{rank}" / MODEL, lambda state: state.update(args=argparse.Namespace()))
    assert told(step) == []


def test_a_stage_that_is_being_written_is_not_finished(copied: Copied) -> None:
    step = copied("tp2_pp2")
    assert step_state(find(str(step))[0].folder) == "complete"
    path = step / "mp_rank_01_001" / MODEL
    path.write_bytes(path.read_bytes()[:-30])
    assert step_state(find(str(step))[0].folder) == "unfinished"


def test_parameters_of_unknown_names_are_not_judged(copied: Copied) -> None:
    step = copied("no_optimizer")
    for rank in range(2):
        part = {"adapter.x": torch.rand(3, rank + 2)}
        edit(step / f"mp_rank_0{rank}" / MODEL, lambda state, part=part: state["model"].update(part))  # type: ignore[misc]
    assert told(step) == []
