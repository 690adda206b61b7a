"""What the sizes in `config.json` keep a job from: heads, feed-forward rows, experts, layers and blocks of scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import REAL, run

import ckptlint
from ckptlint.planning.quick import quick_job
from ckptlint.testing import load_folder, write_checkpoint

CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "vocab_size": 31,
}
LAYER = "model.layers.{}.mlp.{}_proj.weight"
DENSE = {LAYER.format(layer, name): {"shape": [24, 16]} for layer in (0, 1) for name in ("gate", "up")}
EXPERTS = {
    f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": {"shape": [24, 16]}
    for layer in (0, 1)
    for expert in range(6)
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}


def said(folder: Path, to: str, config: dict[str, Any], tensors: dict[str, Any] = DENSE) -> dict[str, list[str]]:
    """Effect -> the sentences of a plan that are no guess."""
    table = {"safetensors": {"model.safetensors": {"tensors": tensors}}, "raw": {"config.json": json.dumps(config)}}
    found: dict[str, list[str]] = {}
    for item in quick_job(load_folder(write_checkpoint(table, folder)), to).constraints:
        if not item.guessed:
            found.setdefault(item.effect, []).append(item.sentence)
    return found


@pytest.mark.parametrize(
    ("to", "changes", "effect", "begins"),
    [
        ("tp=3", {}, "fails", "8 attention heads do not divide by tp 3: transformers, vLLM, SGLang and Megatron-Core"),
        ("tp=4", {"num_key_value_heads": 6, "num_attention_heads": 12}, "fails", "6 KV heads do not divide by tp 4: "),
        ("tp=4", {}, "note", "2 KV heads do not divide by tp 4: vLLM, SGLang and Megatron-Core (0.16 on) give "),
        (
            "tp=5",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "note",
            "the 24 rows of a feed-forward layer do",
        ),
        ("tp=2", FP8, "note", "the 24 rows of a feed-forward layer are 12 for each rank of tp 2, no whole blocks of 8"),
        (
            "pp=3",
            {},
            "note",
            "2 layers do not divide by pp 3: Megatron-Core refuses that unless the job names",
        ),
    ],
)
def test_what_does_not_divide_names_who_refuses(
    tmp_path: Path, to: str, changes: dict[str, Any], effect: str, begins: str
) -> None:
    found = said(tmp_path, to, CONFIG | changes)
    assert [sentence[: len(begins)] for sentence in found.pop(effect)] == [begins]
    assert not found


@pytest.mark.parametrize(
    ("to", "config"),
    [
        ("tp=2", CONFIG),  # an odd vocabulary is padded, or cut unevenly
        ("dp=3", CONFIG),
        ("pp=2", CONFIG),
        ("tp=3", {}),
        ("tp=3", {"num_attention_heads": [8, 4], "num_key_value_heads": None, "intermediate_size": "24"}),
        ("tp=4", CONFIG | {"num_key_value_heads": 6, "kv_lora_rank": 4}),
        ("tp=5", {"intermediate_size": 999}),  # no layer has these rows
        ("tp=3", CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 3} | FP8),
        ("tp=3", {"text_config": CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 6}}),
    ],
)
def test_what_divides_and_what_is_not_declared_says_nothing(tmp_path: Path, to: str, config: dict[str, Any]) -> None:
    assert said(tmp_path, to, config) == {}


def test_experts(tmp_path: Path) -> None:
    config = {"num_experts": 6, "moe_intermediate_size": 24}
    assert said(tmp_path / "ep", "dp=4,ep=4", config, EXPERTS) == {
        "note": ["6 experts do not divide by ep 4: Megatron-Core and SGLang refuse that, vLLM spreads them unevenly"]
    }
    rows = said(tmp_path / "tp", "tp=5", config, EXPERTS)["note"]
    assert [row.partition(":")[0] for row in rows] == ["the 24 rows of an expert do not divide by tp 5"]
    assert said(tmp_path / "whole", "dp=2,tp=2,ep=2", config | FP8, EXPERTS) == {}  # with ep an expert stays whole


def test_a_refusal_ends_with_exit_1_for_an_export_a_sharded_save_and_a_quantised_one(tmp_path: Path) -> None:
    table = {"safetensors": {"model.safetensors": {"tensors": DENSE}}, "raw": {"config.json": json.dumps(CONFIG)}}
    sharded = {"tensors": DENSE, "raw": {"config.json": json.dumps(CONFIG)}}
    for folder in (write_checkpoint(table, tmp_path / "export"), write_checkpoint(sharded, tmp_path / "sharded")):
        refused = run("plan", folder, "--to", "tp=3")
        assert refused.returncode == 1 and "Does not load: 1 reason below." in refused.stdout
        assert run("plan", folder, "--to", "tp=2").returncode == 0
    assert ckptlint.plan(REAL / "exports" / "ok_fp8", to="tp=3").verdict == "fails"
    assert ckptlint.plan(REAL / "exports" / "ok_fp8", to="tp=2").verdict == "loads"


def test_a_guess_on_fsdp_says_how_many_tensors_are_cut(tmp_path: Path) -> None:
    tensors = {f"w{number}": {"shape": [8, 4]} for number in range(4)}
    tensors["w0"]["chunks"] = ["0:4, :", "4:8, :"]
    some = quick_job(load_folder(write_checkpoint({"tensors": tensors}, tmp_path / "some")), "dp=2")
    none = quick_job(load_folder(write_checkpoint({"tensors": {"w": {"shape": [8]}}}, tmp_path / "none")), "dp=2")
    assert [item.sentence.partition(", since ")[2] for item in (*some.constraints, *none.constraints)] == [
        "only 1 of 4 tensors are stored in more than one chunk",
        "the checkpoint is not cut and does not say",
    ]
