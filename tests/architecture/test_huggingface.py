"""What a config.json implies: real models to the number, what nothing is known of, and configurations made to harm."""

from __future__ import annotations

import json
import math
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ends, examples

import ckptlint.architecture
from ckptlint.architecture.expected import NoTable
from ckptlint.architecture.expressions import parse_expression
from ckptlint.architecture.huggingface import expected_models, model_table
from ckptlint.architecture.tables import rows_of

COUNTS = json.loads((Path(__file__).parent / "counts.json").read_text())
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TYPES = sorted(file.stem for file in Path(ckptlint.architecture.__path__[0], "tables").iterdir())


def saved(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    model = next(model for model in expected_models(config) if model.form == "saved")
    return {key: tensor.shape for key, tensor in model.tensors.items()}


def test_a_small_llama_by_hand() -> None:
    layer = {
        "self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (16, 64), "self_attn.v_proj.weight": (16, 64),
        "self_attn.o_proj.weight": (64, 64), "mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96), "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,),
    }  # fmt: skip
    assert saved(LLAMA) == {
        "model.embed_tokens.weight": (300, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (300, 64),
        **{f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()},
    }
    (model,) = expected_models(LLAMA, "conf.json")
    assert (model.source, model.model_type, model.form) == ("conf.json", "llama", "saved")
    assert (model.dtype, model.model_class) == ("bfloat16", "LlamaForCausalLM")
    assert model.fields["head_dim"] == 8  # not declared: hidden_size // num_attention_heads
    assert model.tensors["model.layers.0.self_attn.k_proj.weight"].dims[1] == "hidden_size"
    assert "transformers" in model.made_with


def test_a_tied_head_may_be_stored_or_not() -> None:
    (model,) = expected_models(LLAMA | {"tie_word_embeddings": True})
    head = model.tensors["lm_head.weight"]
    assert not head.needed and head.because == ("tie_word_embeddings",)
    assert expected_models(LLAMA)[0].tensors["lm_head.weight"].needed


def test_ties_by_default_are_those_of_the_class() -> None:
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2}
    assert not expected_models(gpt2)[0].tensors["lm_head.weight"].needed
    assert expected_models(gpt2 | {"tie_word_embeddings": False})[0].tensors["lm_head.weight"].needed


def test_the_base_model_has_no_prefix() -> None:
    assert "embed_tokens.weight" in saved(LLAMA | {"architectures": ["LlamaModel"]})
    classifier = saved(
        LLAMA | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    )
    assert classifier["score.weight"] == (3, 64) and "lm_head.weight" not in classifier


def test_experts_are_numbered_on_disk_and_fused_in_memory() -> None:
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_local_experts": 3,
    }
    models = {model.form: model.tensors for model in expected_models(config)}
    assert models["saved"]["model.layers.0.block_sparse_moe.experts.2.w1.weight"].shape == (6, 8)
    assert models["in memory"]["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 12, 8)


def test_a_field_may_go_by_the_name_of_another_library() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 3}
    assert sum(".experts." in key and "up_proj" in key for key in saved(config)) == 3


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: case["config"]["architectures"][0])
def test_models_as_transformers_builds_them(case: dict[str, Any]) -> None:
    """Configurations that no table was fitted to, with the numbers that transformers gave for each form.

    The last is that of mistralai/Mistral-7B-v0.1, which has no `head_dim`; its index gives 14,483,464,192 bytes.
    """
    found = {
        model.form: [len(model.tensors), sum(math.prod(tensor.shape) for tensor in model.tensors.values())]
        for model in expected_models(case["config"])
    }
    assert found == case["forms"]


@pytest.mark.ci
@pytest.mark.parametrize("case", COUNTS[::6], ids=lambda case: case["config"]["architectures"][0])
def test_models_as_the_installed_transformers_builds_them(case: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra tables)")
    torch = pytest.importorskip("torch")
    config = transformers.CONFIG_MAPPING[case["config"]["model_type"]].from_dict(case["config"])
    with torch.device("meta"):
        model = getattr(transformers, case["config"]["architectures"][0])._from_config(config)
    built = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    models = {model.form: model.tensors for model in expected_models(case["config"])}
    predicted = models.get("in memory", models["saved"])
    assert {key: tensor.shape for key, tensor in predicted.items()} == built


# ---------------------------------------------------------------- the data file


def test_there_are_tables_for_the_types_that_were_promised() -> None:
    assert len(TYPES) >= 380


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("model_type", TYPES)
def test_every_expression_of_a_table_can_be_read(model_type: str) -> None:
    table = model_table(model_type)
    assert table is not None and table["made_with"].startswith("transformers 5.")
    known = set(table["fields"]) | set(table["ranges"])
    for row in rows_of(table["rows"]):
        for text in (*row.dims, row.exists, row.optional):
            assert not text or set(parse_expression(text).names) <= known
    for text in table["ranges"].values():
        assert set(parse_expression(text).names) <= known
    assert table["usual"] in table["models"]
    sizes = {name for row in rows_of(table["rows"]) for text in row.dims for name in parse_expression(text).names}
    for name in sizes:  # ids of tokens are small numbers that sizes equal by chance
        assert "token_id" not in name or all(name in table.get("only", {}).get(model, {}) for model in table["models"])


# ---------------------------------------------------------------- what is not judged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "no_such"}, "no table for model_type no_such"), ({"model_type": None}, "has no model_type"),
        ({"model_type": 7}, "has no model_type"), ({"model_type": "a" * 10**6}, "has no model_type"),
        ({"model_type": "\x1b[31m"}, "no table for model_type"), ({"model_type": ""}, "has no model_type"),
        ({"architectures": ["MyOwn"]}, "no table for MyOwn of model_type llama"),
        ({"architectures": "LlamaForCausalLM"}, "no table for these architectures"),
        ({"architectures": [["x"]]}, "no table for these architectures"),
        ({"quantization_config": {"quant_method": "spqr"}}, "quantisation spqr"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantisation of an unknown method"),
        ({"quantization_config": 4}, "quantisation"), ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"), ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"hidden_size": [64]}, "hidden_size is"), ({"hidden_size": -64}, "no size"),
        ({"hidden_size": 2**62}, "describes no model"), ({"num_attention_heads": 0}, "describes no model"),
        ({"num_hidden_layers": 10**9}, "implies more than"), ({"num_hidden_layers": 10**4000}, "describes no model"),
        ({"num_hidden_layers": None}, "num_hidden_layers is null"), ({"vocab_size": None}, "vocab_size is null"),
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes'"),
        ({"hidden_size": "\n" * 10**6}, "hidden_size is"),
    ],
)  # fmt: skip
def test_a_configuration_that_says_nothing_is_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NoTable) as raised, ends():
        expected_models(LLAMA | change)
    text = str(raised.value)
    assert words in text and "\n" not in text and "\x1b" not in text and len(text) < 250


def test_quantisation_that_keeps_names_is_judged() -> None:
    assert saved(LLAMA | {"quantization_config": {"quant_method": "fp8"}}) == saved(LLAMA)


def test_a_caller_bounds_the_tensors() -> None:
    assert expected_models(LLAMA, at_most=21)
    with pytest.raises(NoTable, match="more than 20 tensors"):
        expected_models(LLAMA, at_most=20)


def test_a_deep_or_wide_configuration_costs_nothing() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"text_config": deep, "vision_config": deep}
    wide = {f"field_{i}": i for i in range(100_000)}
    tracemalloc.start()
    with ends(20):
        assert expected_models(LLAMA | wide | {"text_config": deep})
        for model_type in TYPES[::8]:
            with suppress(NoTable):
                expected_models(
                    {"model_type": model_type, "text_config": deep, "num_hidden_layers": 10**9, "n_layer": 10**9}
                )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**6, 10**30), st.floats(), st.text(max_size=5),
    st.lists(st.integers(-3, 10**12), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=examples(12, 300))
@given(st.data())
def test_any_value_of_any_field_is_a_model_or_one_sentence(data: st.DataObject) -> None:
    model_type = data.draw(st.sampled_from(TYPES))
    fields = (model_table(model_type) or {})["fields"]
    config: dict[str, Any] = {"model_type": model_type}
    for name in data.draw(st.lists(st.sampled_from(sorted(fields) or ["x"]), max_size=4)):
        part, *rest = config, *name.split(".")
        for section in rest[:-1]:
            part = part.setdefault(section, {}) if isinstance(part, dict) else {}
        if isinstance(part, dict):
            part[rest[-1]] = data.draw(HOSTILE)
    try:
        with ends():
            models = expected_models(config, at_most=5000)
        assert all(len(model.tensors) <= 5000 for model in models)
    except NoTable as reason:
        assert "\n" not in str(reason) and len(str(reason)) < 400
