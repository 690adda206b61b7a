"""DeepSpeed's folders: real saves are silent at every depth, broken ones are named by file, rank or tensor."""

from __future__ import annotations

import enum
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REAL, found, manifest

import ckptlint
from ckptlint.depth import Depth

torch = pytest.importorskip("torch")

SAVES = REAL / "deepspeed"
STEP = "global_step2"
OPTIM = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"


# ---------------------------------------------------------------- editing files that name DeepSpeed's classes


@pytest.fixture(autouse=True)
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of the classes in DeepSpeed's files, under their own names, so that torch reads and writes them."""

    def module(name: str, **members: type) -> None:
        made = types.ModuleType(name)
        for key, member in members.items():
            member.__module__, member.__qualname__ = name, key
            setattr(made, key, member)
        monkeypatch.setitem(sys.modules, name, made)

    for name in (
        "deepspeed",
        "deepspeed.runtime",
        "deepspeed.runtime.zero",
        "deepspeed.runtime.fp16",
        "deepspeed.utils",
    ):
        module(name)
    module("deepspeed.runtime.zero.config", ZeroStageEnum=ZeroStageEnum)
    module("deepspeed.runtime.fp16.loss_scaler", LossScaler=type("LossScaler", (), {}))
    module("deepspeed.utils.tensor_fragment", fragment_address=type("fragment_address", (), {}))


class ZeroStageEnum(int, enum.Enum):
    """Its members as DeepSpeed numbers them."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


Change = Callable[[Any], Any]


def edit(file: str, change: Change) -> Callable[[Path], None]:
    """Changes the value of a file in place; the archive keeps the file's name inside."""

    def run(step: Path) -> None:
        value = torch.load(step / file, weights_only=False)
        changed = change(value)
        torch.save(value if changed is None else changed, step / file)

    return run


def state(change: Change) -> Change:
    """The same for the optimizer's state dict."""
    return lambda value: change(value["optimizer_state_dict"]) and None


def put(*keys: Any, to: Any) -> Change:
    """Puts a value at a place; a function of the old one makes it."""

    def run(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to(value[keys[-1]]) if callable(to) else to

    return run


def drop(*keys: Any) -> Change:
    """Takes out what lies at a place."""

    def run(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        del value[keys[-1]]

    return run


def gone(*files: str) -> Callable[[Path], None]:
    """Without these files or folders."""

    def run(step: Path) -> None:
        for file in files:
            shutil.rmtree(step / file) if (step / file).is_dir() else (step / file).unlink()

    return run


def cut(file: str, part: float) -> Callable[[Path], None]:
    """A file of which only the first part is there."""
    return lambda step: os.truncate(step / file, int((step / file).stat().st_size * part))


def shorter(by: int) -> Change:
    return lambda tensor: tensor[:-by].clone()


# ---------------------------------------------------------------- the real saves


@pytest.mark.parametrize("name", [row["path"] for row in manifest(SAVES) if row["verdict"] == "healthy"])
def test_real_saves_have_not_even_a_note(name: str) -> None:
    report = ckptlint.check(SAVES / name)
    assert found(report) == []
    seen = [part.checkpoint for part in report.checkpoints]
    assert all(ckpt.tensors and not ckpt.partial_because and not ckpt.problems for ckpt in seen)
    assert "universal" in name or any(ckpt.format == "deepspeed" for ckpt in seen)


# ---------------------------------------------------------------- broken ones, beyond those in the manifest

Z1, Z2, Z3 = "z1_bf16_4r", "z2_bf16_4r", "z3_bf16_4r"
RANK3 = "bf16_" + OPTIM.format(3, 0)
RANK1 = "bf16_" + OPTIM.format(1, 0)
MODEL = "mp_rank_00_model_states.pt"
MODEL1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
EXPERT = "layer_1_expert_2_mp_rank_00_model_states.pt"


def hostile(value: Any) -> dict[str, Any]:
    class Marker:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("echo ckptlint_was_here",)

    return value | {"more": Marker()}


BROKEN: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    "each node has its own half (R35)": (
        Z2,
        gone("bf16_" + OPTIM.format(2, 0), RANK3),
        "RNK001",
        "2 of 4 optimizer files are missing: dp 2-3",
    ),
    "model states of rank 0 only (R36)": (
        Z3,
        gone(*(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (1, 2, 3))),
        "RNK001",
        "3 of 4 model files are missing: dp 1-3",
    ),
    "an expert is missing": ("moe_ep2_z1", gone(EXPERT), "RNK001", f"{EXPERT} is missing"),
    "a stage of the pipeline is missing": (
        "pipe_pp2_dp2_z1",
        gone("mp_rank_01_model_states.pt"),
        "RNK001",
        "mp_rank_01_model_states.pt is missing",
    ),
    "a file is cut": (Z1, cut(RANK1, 0.6), "PAY013", RANK1),
    "a file is empty": (Z3, cut(MODEL1, 0), "PAY013", f"{MODEL1} is empty"),
    "another partition count": (Z1, edit(RANK3, state(put("partition_count", to=[8, 8]))), "RNK002", RANK3),
    "another version": (Z1, edit(RANK3, put("ds_version", to="0.15.4")), "RNK002", "DeepSpeed version is 0.15.4"),
    "a padding that does not fit": (
        Z1,
        edit(RANK3, state(put("group_paddings", 0, to=lambda n: n + 2))),
        "RNK005",
        f"group 0 of {RANK3} says that",
    ),
    "a flat group is short in stage 3": (
        Z3,
        edit(RANK1, state(put("fp32_flat_groups", 0, to=shorter(1)))),
        "RNK005",
        f"group 0 of {RANK1} has",
    ),
    "moments are short": (
        Z1,
        edit(RANK1, state(put("base_optimizer_state", "state", 0, "exp_avg", to=shorter(2)))),
        "RNK005",
        f"exp_avg of group 0 of {RANK1} has",
    ),
    "a parameter without a weight": (
        "z1_fp32_2r",
        edit(MODEL, drop("module", "layers.1.up.weight")),
        "RNK005",
        f"{MODEL} holds no values of layers.1.up.weight",
    ),
    "a weight of another shape in a layer's file": (
        "pipe_pp2_dp2_z1",
        edit("layer_03-model_states.pt", put("up.weight", to=lambda w: w[:-1].clone())),
        "RNK005",
        "layer_03-model_states.pt holds shape [10, 7] of 3.up.weight",
    ),
    "a gate for more experts": (
        "moe_ep2_z1",
        edit(MODEL, put("module", "sparse.1.deepspeed_moe.gate.wg.weight", to=lambda w: torch.zeros(5, 7))),
        "RNK005",
        "5 rows of sparse.1.deepspeed_moe.gate.wg.weight",
    ),
    "a rank of a larger job": (
        Z1,
        lambda step: torch.save(torch.load(step / RANK3, weights_only=False), step / ("bf16_" + OPTIM.format(4, 0))),
        "RNK005",
        "belongs to rank 4, but there are only the ranks 0-3",
    ),
    "a hostile pickle": (Z2, edit(RANK1, hostile), "SAF001", RANK1),
    "a hostile pickle in a layer": (
        "pipe_pp2_dp2_z0",
        edit("layer_01-model_states.pt", hostile),
        "SAF001",
        "layer_01-model_states.pt",
    ),
    "universal: a parameter is missing": (
        "universal_z1",
        gone("zero/layers.0.up.weight"),
        "RNK001",
        "zero/layers.0.up.weight/ is missing",
    ),
    "universal: a state is missing": (
        "universal_z3",
        gone("zero/embed.weight/exp_avg_sq.pt"),
        "RNK001",
        "zero/embed.weight/exp_avg_sq.pt is missing",
    ),
    "universal: a state is short": (
        "universal_z3",
        edit("zero/embed.weight/exp_avg.pt", shorter(1)),
        "RNK005",
        "zero/embed.weight/exp_avg.pt is [132] of embed.weight",
    ),
    "universal: a state is empty": (
        "universal_z1",
        cut("zero/embed.weight/exp_avg.pt", 0),
        "PAY013",
        "zero/embed.weight/exp_avg.pt is empty",
    ),
    "universal: the conversion was broken off": (
        "universal_z1",
        lambda step: (step / "tmp").mkdir(),
        "COM001",
        "tmp/ is still there",
    ),
    "universal: hostile": (
        "universal_z1",
        edit("zero/embed.weight/step.pt", lambda value: hostile({"a": value})),
        "SAF001",
        "zero/embed.weight/step.pt",
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    def run(name: str) -> Path:
        shutil.copytree(SAVES / name, tmp_path / name)
        return tmp_path / name

    yield run


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("case", BROKEN)
def test_broken_saves_are_named(case: str, copy: Callable[[str], Path]) -> None:
    name, damage, code, sentence = BROKEN[case]
    run = copy(name)
    [step] = [path for path in run.iterdir() if path.is_dir()]
    damage(step)
    report = ckptlint.check(run, depth=Depth.FILES)
    told = found(report, "error", "warning")
    assert [(c, t) for c, _, t in told if c == code and sentence in t], told
    assert {c for c, _, _ in told} == {code}


def test_latest_names_what_is_not_there(copy: Callable[[str], Path]) -> None:
    run = copy(Z1)
    (run / "latest").write_text("global_step4")
    assert [(c, t) for c, _, t in found(ckptlint.check(run))] == [
        ("COM002", "latest names step 4, which does not exist")
    ]


def test_the_trainer_and_the_engine_name_one_step(copy: Callable[[str], Path]) -> None:
    step = copy("trainer_z2_2r") / "checkpoint-2"
    told = json.loads((step / "trainer_state.json").read_text()) | {"global_step": 9}
    (step / "trainer_state.json").write_text(json.dumps(told))
    [(code, _, title)] = found(ckptlint.check(step))
    assert (code, title) == ("COM002", "the folder is named for step 2, but trainer_state.json says step 9")
    step = step.rename(step.with_name("checkpoint-9"))
    (code, _, title), *more = found(ckptlint.check(step))
    assert (code, title) == ("COM002", "the folder is named for step 2, but ../trainer_state.json says step 9")
    assert not more


@pytest.mark.parametrize(
    ("trainer", "epoch", "is_possible"),
    [(2, 0.5, True), (3, 1.0, True), (6, 3.0, True), (7, 3.0, False), (1, 0.5, False), (500, "?", True)],
)
def test_the_engine_counts_at_most_one_step_an_epoch_less_than_the_trainer(
    copy: Callable[[str], Path], trainer: int, epoch: object, is_possible: bool
) -> None:
    step = copy("trainer_z2_2r") / "checkpoint-2"
    told = json.loads((step / "trainer_state.json").read_text()) | {"global_step": trainer, "epoch": epoch}
    (step / "trainer_state.json").write_text(json.dumps(told))
    step = step.rename(step.with_name(f"checkpoint-{trainer}"))
    assert [code for code, *_ in found(ckptlint.check(step))] == ([] if is_possible else ["COM002"])


def test_a_trainers_step_without_weights_of_its_own_is_read_whole(copy: Callable[[str], Path]) -> None:
    step = copy("trainer_z3_2r") / "checkpoint-2"
    (step / "model.safetensors").unlink()
    (step / "rng_state_1.pth").write_bytes(b"")
    [part] = ckptlint.check(step).checkpoints
    assert part.checkpoint.format == "deepspeed"
    assert [(item.code, item.title) for item in part.diagnostics] == [
        ("SAF002", "../rng_state_1.pth is empty (0 bytes)")
    ]


def test_the_universal_form_of_a_step_is_judged_beside_it(tmp_path: Path) -> None:
    for name in ("z1_fp32_2r", "universal_z1"):
        shutil.copytree(SAVES / name, tmp_path, dirs_exist_ok=True)
    names = [part.checkpoint.path.rpartition("/")[2] for part in ckptlint.check(tmp_path).checkpoints]
    assert names == ["global_step2", "global_step2_universal"]
