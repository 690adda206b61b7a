"""Models of Megatron-Core beside their arguments: one that does not fit them is named once, a healthy one passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import REAL

import ckptlint
from ckptlint.analysis.fit.judgement import config_fit, has_known_config
from ckptlint.model import ModelConfig

MODELS = REAL / "megatron_args"


@pytest.mark.parametrize(
    "name",
    ["megatron_two_modules", "megatron_edit_base", "bugs/B13_fixed", "bugs/B41_fixed", "bugs/megatron4791e_fixed"],
)
def test_a_model_of_other_layers_is_not_judged(name: str) -> None:
    ckpt = ckptlint.load(REAL / name / "iter_0000010")
    assert ckpt.config is not None
    assert not has_known_config(ckpt)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 10**9}, {"num_layers": 19_000}, {"num_layers": [1] * 1000},
        {"num_experts": 10**12, "hidden_size": 10**18}, {"padded_vocab_size": "many"},
        {"moe_layer_freq": [[1]] * 2, "num_experts": 4}, {"normalization": ["RMSNorm"]},
    ],
)  # fmt: skip
def test_wild_arguments_are_one_sentence(changes: dict[str, object]) -> None:
    ckpt = ckptlint.load(MODELS / "ok_hybrid" / "iter_0000010")
    assert ckpt.config is not None
    values = {**ckpt.config.values, "hybrid_override_pattern": None, "is_hybrid_model": False} | changes
    fit = config_fit(replace(ckpt, config=ModelConfig("common.pt", values)))
    assert isinstance(fit, str)
    assert "\n" not in fit


def test_the_arguments_stand_in_one_of_two_files() -> None:
    args = ckptlint.load(MODELS / "ok_hybrid" / "iter_0000010").config
    model = ckptlint.load(MODELS / "ok_run_config" / "iter_0000010").config
    assert args is not None
    assert model is not None
    assert args.file == "common.pt"
    assert model.file == "run_config.yaml"
