"""The table of Megatron models: against checkpoints that megatron-core wrote, and against megatron-core itself."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import REAL

import ckptlint
from ckptlint.architecture.expected import NoTable
from ckptlint.architecture.megatron import fields, megatron_models
from ckptlint.vocabulary.config_fields import attributes
from ckptlint.vocabulary.keys import parse

DENSE = {
    "num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 20, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 5, "padded_vocab_size": 64, "position_embedding_type": "rope", "swiglu": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm",
}  # fmt: skip

WHOLE = [
    "megatron_0.12_dp2", "megatron_0.15_tp2", "megatron_0.19_tp2", "megatron_tp2_pp2",
    "megatron_tp2_dp2_fully_reshardable", "megatron_moe_ep2_dp2", "lookalikes/megatron_tied_padded_tp2",
    "lookalikes/megatron_tied_pp2", "lookalikes/megatron_moe_dense_first", "lookalikes/megatron_mtp",
]  # fmt: skip
"""Checkpoints of whole models, of four versions, with the arguments that they were made with."""


@pytest.mark.parametrize("name", WHOLE)
def test_the_arguments_imply_what_megatron_core_stored(name: str) -> None:
    ckpt = ckptlint.load(REAL / name / "iter_0000010")
    assert ckpt.common is not None
    stored = {fqn: tensor.global_shape for fqn, tensor in ckpt.tensors.items() if parse(fqn).kind == "model"}
    forms = megatron_models(attributes(ckpt.common.values["args"]))
    implied = [{key: tensor.shape for key, tensor in form.tensors.items()} for form in forms]
    assert stored in implied


def test_every_form_is_another_one() -> None:
    forms = megatron_models(DENSE)
    shapes = {frozenset((key, tensor.shape) for key, tensor in form.tensors.items()) for form in forms}
    assert len(forms) == len(shapes) == 3  # stacked, numbered, split; a dense RMSNorm model has the same norms in both
    assert {form.model_type for form in forms} == {"megatron gpt"}
    assert all("megatron-core" in form.made_with for form in forms)


def test_a_size_says_where_it_comes_from() -> None:
    stacked = megatron_models(DENSE)[0].tensors
    qkv = stacked["decoder.layers.self_attention.linear_qkv.weight"]
    assert qkv.shape == (2, 40, 12)
    assert qkv.dims[0] == "num_layers"
    assert "num_query_groups" in qkv.dims[1]
    assert stacked["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 40, 12)
    assert stacked["output_layer.weight"].because == ("untie_embeddings_and_output_weights",)


def test_layers_that_differ_are_numbered() -> None:
    args = DENSE | {"num_experts": 4, "moe_ffn_hidden_size": 6, "moe_layer_freq": [0, 1]}
    for form in megatron_models(args):
        assert not any(key.startswith("decoder.layers.mlp") for key in form.tensors)
        assert "decoder.layers.0.mlp.router.weight" not in form.tensors
        assert form.tensors["decoder.layers.1.mlp.router.weight"].shape == (4, 12)


def test_a_hybrid_model_has_the_layers_of_its_pattern() -> None:
    args = DENSE | {"is_hybrid_model": True, "hybrid_override_pattern": "M|*-", "mamba_num_heads": 4}
    (form, *_) = megatron_models(args | {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 16})
    assert form.tensors["decoder.layers.0.mixer.in_proj.weight.x"].shape == (32, 12)
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in form.tensors
    assert "decoder.layers.2.mlp.linear_fc1.weight" in form.tensors


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"group_query_attention": False}, "num_query_groups", 4),
        ({"kv_channels": None}, "kv_channels", 3),
        ({"ffn_hidden_size": None, "hidden_size": 96}, "ffn_hidden_size", 256),
        ({"ffn_hidden_size": None, "swiglu": False}, "ffn_hidden_size", 48),
        ({"num_experts": 4}, "moe_ffn_hidden_size", 20),
        ({"num_experts": 4, "moe_layer_freq": 2}, "moe_layer_freq", [1, 0]),
        ({"moe_layer_freq": 2}, "moe_layer_freq", [0, 0]),
        ({"padded_vocab_size": None, "vocab_size": 100, "tensor_model_parallel_size": 2}, "padded_vocab_size", 256),
        ({"padded_vocab_size": None, "vocab_size": 100, "should_pad_vocab": False}, "padded_vocab_size", 100),
        ({"num_moe_experts": 8}, "num_experts", 8),
    ],
)
def test_what_is_left_out_is_what_megatron_takes(given: dict[str, object], name: str, value: object) -> None:
    assert fields(DENSE | given)[name] == value


def test_a_provider_of_megatron_bridge_has_names_of_its_own() -> None:
    own = {"untie_embeddings_and_output_weights", "swiglu", "group_query_attention", "padded_vocab_size"}
    bridge = {name: value for name, value in DENSE.items() if name not in own}
    bridge |= {"gated_linear_unit": True, "share_embeddings_and_output_weights": False, "vocab_size": 64}
    bridge |= {"should_pad_vocab": False}
    assert fields(bridge) == fields(DENSE)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_layers": None}, "num_layers is None, which is no size"),
        ({"num_layers": -1}, "num_layers is -1, which is no size"),
        ({"num_layers": 10**9}, "it implies 1,000,000,000 layers"),
        ({"num_layers": True}, "num_layers is True, which is no size"),
        ({"hidden_size": 10**5000}, "hidden_size is a number of 2\\*\\*62 or more, which is no size"),
        ({"num_layers": [1] * 9}, "num_layers is a list of 9, which is no size"),
        ({"swiglu": "yes"}, "swiglu is 'yes', which is no flag"),
        ({"normalization": "Other"}, "no table for normalization 'Other'"),
        ({"softmax_type": "learnable"}, "no table for softmax_type 'learnable'"),
        ({"heterogeneous_layers_config_path": "x.json"}, "no table for models with heterogeneous_layers_config_path"),
        ({"experimental_attention_variant": "dsa"}, "no table for models with experimental_attention_variant"),
        ({"spec": ["my.module", "my_spec"]}, "no table for the layers of my.module my_spec"),
        ({"is_hybrid_model": True}, "no table for a hybrid model without a pattern"),
        ({"hybrid_override_pattern": "MG"}, "no table for layers G of a hybrid model"),
        ({"hybrid_override_pattern": "M" * 10**6}, "its hybrid pattern is no short text"),
        ({"num_experts": 4, "moe_layer_freq": [1]}, "moe_layer_freq is a list of 1 for 2 layers"),
        ({"num_experts": 10**9, "num_layers": 10**4}, "more than|2\\*\\*62"),
    ],
)
def test_what_the_probes_did_not_vary_has_no_table(given: dict[str, object], reason: str) -> None:
    with pytest.raises(NoTable, match=f"args of Megatron: .*{reason}"):
        megatron_models(DENSE | given)


@pytest.mark.ci
def test_megatron_core_says_the_same(tmp_path: Path) -> None:
    if not (find_spec("megatron") and find_spec("megatron.core")):
        pytest.skip("needs megatron-core, which is in the ci extra")
    script = Path(__file__).parents[2] / "bench" / "tables" / "megatron_probes.py"
    out = tmp_path / "probes.json"
    command = [sys.executable, str(script), str(out), "--probes", "10", "--seed", "31"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    probes = json.loads(out.read_text())["probes"]
    compared = 0
    for probe in probes:
        assert "differs" not in probe
        try:
            forms = megatron_models(probe["args"])
        except NoTable:
            continue
        said = [{key: list(tensor.shape) for key, tensor in form.tensors.items()} for form in forms]
        assert probe["shapes"] in said, (probe["args"], probe["naming"], probe["engine"])
        compared += 1
    assert compared >= 10
