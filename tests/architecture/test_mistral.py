"""The table of Mistral's own format, against the modules that mistral-inference builds."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from support import REAL, ends

import ckptlint
from ckptlint.architecture.expected import NoTable
from ckptlint.architecture.mistral import mistral_models

MODELS = sorted((REAL / "mistral_format").iterdir())
DENSE: dict[str, Any] = json.loads((REAL / "mistral_format" / "dense" / "params.json").read_text())


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_every_key_and_shape_is_the_one_stored(folder: Path) -> None:
    ckpt = ckptlint.load(folder)
    assert ckpt.config is not None and ckpt.config.file == "params.json"
    (model,) = mistral_models(ckpt.config.values)
    expected = {key: tensor.shape for key, tensor in model.tensors.items()}
    assert expected == {key: tensor.global_shape for key, tensor in ckpt.tensors.items()}
    assert all(tensor.needed for tensor in model.tensors.values())
    for key, tensor in model.tensors.items():  # each dim is worded as it is worked out
        fields = {"vision_encoder.spatial_merge_size": 2, **model.fields}
        assert tuple(prod(int(fields[name]) for name in dim.split(" * ")) for dim in tensor.dims) == tensor.shape, key


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_healthy_models_pass(folder: Path) -> None:
    report = ckptlint.check(folder, depth="data")
    assert (report.exit_code, report.counts["error"], report.counts["warning"]) == (0, 0, 0)


def test_a_tied_head_may_be_stored_or_not() -> None:
    (model,) = mistral_models(DENSE | {"tied_embeddings": True})
    assert not model.tensors["output.weight"].needed


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dim": "wide"}, "no size for dim"), ({"dim": -1}, "no size for dim"), ({"dim": True}, "no size for dim"),
        ({"hidden_dim": None}, "no size for hidden_dim"), ({"n_layers": 10**9}, "9,000,000,000 tensors"),
        ({"n_layers": 10**400}, "no size for n_layers"), ({"moe": [1]}, "moe holds no fields"),
        ({"moe": {"num_experts": 10**6, "num_experts_per_tok": 2}}, "more than the"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "num_shared_experts"),
        ({"vision_encoder": {"hidden_size": 4}}, "no size for num_channels"),
        ({"q_lora_rank": 64}, "'q_lora_rank', which the table does not know"),
        ({"model_type": "mamba"}, "other than a plain transformer"),
        ({"use_biases": True}, "other than a plain transformer"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "'quantization'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_table_does_not_know_is_not_judged(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoTable) as refused, ends():
        mistral_models(DENSE | fields)
    assert reason in str(refused.value)
