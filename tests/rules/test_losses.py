"""Exports that people lost: each public report, rebuilt by damage to a healthy export, is named.

The reports are GitHub's, as owner/name#number. Others have a folder of their own: the manifests of
`fixtures/real/exports`, `adapters` and `quantised_exports` say which.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import REAL, run

import ckptlint

Damage = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


def tensors(change: Callable[[Tensors], Tensors]) -> Damage:
    """Each file of weights, written again with a change."""

    def damage(folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                about = opened.metadata()
            held = {k: v.contiguous().clone() for k, v in change(load_file(file)).items()}
            save_file(held, file, about)

    return damage


def without(*parts: str, but: str = "never") -> Damage:
    """The export without the tensors that have one of these parts in their names."""
    return tensors(lambda held: {k: v for k, v in held.items() if but in k or not any(part in k for part in parts)})


def named(change: Callable[[str], str]) -> Damage:
    """The export under other names."""
    return tensors(lambda held: {change(k): v for k, v in held.items()})


def valued(change: Callable[[torch.Tensor], torch.Tensor], *parts: str) -> Damage:
    """The export with other values for the tensors that have all of these parts in their names."""
    return tensors(lambda held: {k: change(v) if all(p in k for p in parts) else v for k, v in held.items()})


def document(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """A JSON file of the export with other fields."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return damage


def config(**fields: Any) -> Damage:
    return document("config.json", lambda values: values.update(fields))


def index(change: Callable[[dict[str, str]], object]) -> Damage:
    return document("model.safetensors.index.json", lambda values: change(values["weight_map"]))


def both(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage


def cut(name: str, share: float) -> Damage:
    """A file that ends early."""

    def damage(folder: Path) -> None:
        held = (folder / name).read_bytes()
        (folder / name).write_bytes(held[: int(len(held) * share)])

    return damage


def no_files(pattern: str) -> Damage:
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def one_bit_flipped(folder: Path) -> None:
    """Hashes beside the weights, and then other bytes under the same size."""
    file = folder / "model.safetensors"
    held = bytearray(file.read_bytes())
    (folder / "SHA256SUMS").write_text(f"{sha256(held).hexdigest()}  {file.name}\n")
    held[-1] ^= 1
    file.write_bytes(held)


SHARDED, EXPERTS = "exports/ok_llama_sharded", "exports/ok_qwen3_moe"
LAST = "model-00007-of-00007.safetensors"


def copied(source: str, target: str) -> Damage:
    """The export with the values of some tensors in the place of others."""
    return tensors(lambda held: {k: held[k.replace(target, source)] if target in k else v for k, v in held.items()})


def zeroed(name: str) -> Damage:
    """A file of the export with zeros in the place of all values."""

    def damage(folder: Path) -> None:
        save_file(
            {k: torch.zeros_like(v) for k, v in load_file(folder / name).items()}, folder / name, {"format": "pt"}
        )

    return damage


def with_nan(held: torch.Tensor) -> torch.Tensor:
    held[0, 0] = torch.nan
    return held


def trained(folder: Path) -> None:
    """Norms that hold several values."""
    valued(torch.rand_like, "norm")(folder)


def more_tokens(folder: Path) -> None:
    """A tokenizer with more tokens than the embedding has rows."""
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = {
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(rows + 2)}, "merges": []},
        "added_tokens": [],
    }
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


def without_file(weight_map: dict[str, str]) -> None:
    for key in [key for key, name in weight_map.items() if name == LAST]:
        del weight_map[key]


def requantised(folder: Path) -> None:
    """The shards are replaced by one file, and their index stays."""
    held: Tensors = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
        file.unlink()
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 64)


def doubled(key: str) -> str:
    return key.replace("encoder.layer", "encoder.encoder.layer")


def tripled(key: str) -> str:
    return key.replace("language_model.", "language_model.language_model.language_model.", 1)


def moved(key: str) -> str:
    return f"model.{key}".replace("model.language_model.model.", "language_model.") if "language" in key else key


def singular(key: str) -> str:
    return key.replace("backbone.embeddings", "backbone.embedding")


def padded(held: torch.Tensor) -> torch.Tensor:
    return torch.cat([held, torch.zeros_like(held[:8])])


def half(held: torch.Tensor) -> torch.Tensor:
    return held[:, : held.shape[1] // 2] if held.ndim > 1 else held


def cut_rows(held: torch.Tensor) -> torch.Tensor:
    return held[: held.shape[0] // 2]


def with_mtp(held: Tensors) -> Tensors:
    """With `mtp.*` as Qwen3-Next has it, of its last layer with full attention (vllm qwen3_next_mtp)."""
    last = max(key.split(".")[2] for key in held if "self_attn.q_proj" in key)
    start, norm = f"model.layers.{last}.", held["model.norm.weight"]
    copied = {key.replace(start, "mtp.layers.0."): value for key, value in held.items() if key.startswith(start)}
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return held | copied | {f"mtp.{name}.weight": norm for name in names} | {"mtp.fc.weight": norm.tile(len(norm), 2)}


UNDECLARED = config(num_nextn_predict_layers=None)
QWEN = "exports/ok_qwen3_next"


def first_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(scale[:1]), scale[1:]])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return (weight.float() * 127).round().to(torch.int8)


def ignoring(name: str) -> Damage:
    """A module that stands among those that are not quantised, and is."""
    return document("config.json", lambda v: v["quantization_config"].update(modules_to_not_convert=["lm_head", name]))


awq = config(
    quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
)


def symmetric(folder: Path) -> None:
    """Zero points are stored, and the configuration says that there are none."""
    text = (folder / "config.json").read_text()
    assert '"symmetric": false' in text
    (folder / "config.json").write_text(text.replace('"symmetric": false', '"symmetric": true'))


LOSSES: list[tuple[str, str, Damage, str, str]] = [
    # the report, a healthy export, its damage, the code with e for error or w for warning, what the finding names
    #
    # the index and the files
    ("redai-studio/Relax#148", SHARDED, index(lambda m: m.update(ghost=LAST)), "PAY014e", "ghost"),
    (
        "NVIDIA-NeMo/Megatron-Bridge#4083",
        SHARDED,
        index(lambda m: m.pop("model.layers.0.mlp.up_proj.weight")),
        "PAY014w",
        "up_proj",
    ),
    ("NVIDIA-NeMo/Megatron-Bridge#4083, a whole file", SHARDED, index(without_file), "PAY014e", LAST),
    ("Neph0s/CoSER#3", SHARDED, no_files("*-0000[4-7]-*"), "PAY014e", "model-00004-of-00007"),
    ("vllm-project/vllm#34859", SHARDED, no_files(LAST), "PAY014e", LAST),
    ("verl-project/verl#4338", SHARDED, no_files("model-00001-*"), "PAY014e", "model-00001-of-00007"),
    ("Blaizzy/mlx-vlm#1827", SHARDED, requantised, "PAY014w", "stale"),
    ("pytorch/torchtitan#2137", SHARDED, no_files("*.index.json"), "PAY014e", "without an index"),
    ("vllm-project/speculators#739", "exports/ok_llama", cut("model.safetensors", 0.6), "PAY004e", "model.safetensors"),
    ("osaurus-ai/vmlx-swift#217", SHARDED, cut(LAST, 0.8), "PAY004e", LAST),
    ("unslothai/unsloth#6796", SHARDED, cut(LAST, 0), "PAY013e", LAST),
    ("Comfy-Org/ComfyUI#15599", "exports/ok_llama", longer, "PAY013e", "model.safetensors"),
    ("huggingface/huggingface_hub#3643", "exports/ok_llama", one_bit_flipped, "PAY012e", "model.safetensors"),
    (
        "vllm-project/llm-compressor#2579",
        "exports/ok_llava",
        named(tripled),
        "CFG004e",
        "language_model.language_model",
    ),
    # what the configuration declares
    ("sgl-project/sglang#16235", "exports/ok_llama", without(".layers.1."), "CFG001e", "layers.1"),
    ("QwenLM/Qwen3-VL-Embedding#89", "exports/ok_llama", without("lm_head"), "CFG001e", "lm_head"),
    ("NVIDIA-NeMo/Automodel#2732", "exports/ok_llama_tied", config(tie_word_embeddings=False), "CFG001e", "lm_head"),
    ("sgl-project/sglang#26772", "exports/ok_qwen2_vl", without("visual."), "CFG001w", "visual"),
    ("sgl-project/sglang#26772, llava", "exports/ok_llava", without("vision_tower."), "CFG001w", "vision_tower"),
    ("huggingface/transformers#48075", "exports/ok_mamba", named(singular), "CFG001e", "backbone.embeddings"),
    ("huggingface/transformers#46650", "exports/ok_bert", named(doubled), "CFG004e", "encoder.encoder"),
    ("huggingface/transformers#45358", "exports/ok_llava", named(moved), "CFG001e", "language_model"),
    (
        "pytorch/torchtitan#961",
        "exports/ok_llama",
        named(lambda k: k.replace("layers.", "layers._orig_mod.")),
        "CFG004e",
        "_orig_mod",
    ),
    ("NVIDIA-NeMo/Megatron-Bridge#5375", "exports/ok_llama", valued(padded, "embed_tokens"), "CFG003e", "rows"),
    (
        "modelscope/twinkle#116",
        "exports/ok_gpt_oss",
        valued(lambda v: v[: len(v) // 2], "experts"),
        "CFG003e",
        "experts",
    ),
    (
        "unslothai/unsloth#5403",
        EXPERTS,
        valued(lambda v: v[: len(v) // 2], "experts", "gate_proj"),
        "CFG003e",
        "gate_proj",
    ),
    ("NVIDIA-NeMo/Megatron-Bridge#4083, experts", EXPERTS, without("experts.2.", "experts.3."), "CFG001e", "experts"),
    ("pytorch/pytorch#189945", "exports/ok_llama", valued(lambda v: v[:-2], "down_proj"), "CFG003e", "down_proj"),
    ("llama.cpp, ids beyond the rows", "exports/ok_llama", more_tokens, "CFG008e", "the tokenizer"),
    (
        "a router's bias",
        "exports/ok_glm4_moe",
        without("e_score_correction_bias"),
        "CFG001e",
        "e_score_correction_bias",
    ),
    ("norms in float64", "exports/ok_llama", valued(torch.Tensor.double, "norm"), "CFG005w", "float64"),
    # values
    (
        "up_proj a copy of gate_proj",
        "quantised_exports/wide",
        both(trained, copied("gate_proj", "up_proj")),
        "PAY010e",
        "up_proj",
    ),
    (
        "an expert a copy",
        EXPERTS,
        both(trained, copied("layers.1.mlp.experts.0.", "layers.1.mlp.experts.1.")),
        "PAY010w",
        "experts",
    ),
    (
        "a head unlike the embedding",
        "exports/ok_tied_and_stored",
        valued(torch.rand_like, "lm_head"),
        "NAM001e",
        "lm_head",
    ),
    ("NaN", "quantised_exports/wide", valued(with_nan, "down_proj"), "PAY011e", "down_proj"),
    ("a shard of zeros", SHARDED, zeroed("model-00003-of-00007.safetensors"), "PAY015e", "down_proj"),
    # dtypes
    (
        "pytorch/torchtitan#4166",
        "exports/ok_llama_sharded",
        config(dtype="float32", torch_dtype=None),
        "CFG005w",
        "bfloat16",
    ),
    # multi-token layers
    (
        "modelscope/ms-swift#7848: as transformers saves its own class, so nobody can tell a loss",
        "exports/ok_mtp",
        without(".layers.2."),
        "CFG001i",
        "none is stored",
    ),
    (
        "2U1/Qwen-VL-Series-Finetune#259",
        "exports/ok_table_qwen3_5",
        config(mtp_num_hidden_layers=1),
        "CFG001w",
        "none is stored",
    ),
    (
        "NVIDIA-NeMo/Megatron-Bridge#5528",
        "exports/ok_mtp",
        both(without(".layers.2."), config(num_nextn_predict_layers=3)),
        "CFG001w",
        "none is stored",
    ),
    (
        "NVIDIA-NeMo/Megatron-Bridge#5946",
        "exports/ok_mtp",
        config(num_nextn_predict_layers=2),
        "CFG001e",
        "1 is stored",
    ),
    ("intel/auto-round#1526", "exports/ok_mtp", without("layers.2.mlp", "layers.2.self_attn"), "CFG001e", "layers.2"),
    (
        "NVIDIA/Model-Optimizer#2427",
        "exports/ok_mtp",
        without("layers.2.eh_proj", "layers.2.hnorm"),
        "CFG001e",
        "eh_proj",
    ),
    ("an undeclared one", "exports/ok_mtp", both(UNDECLARED, without("layers.2.eh_proj")), "CFG001w", "eh_proj"),
    ("one where 0 are declared", "exports/ok_mtp", config(num_nextn_predict_layers=0), "CFG002w", "but 1 is stored"),
    (
        "half a projection",
        "exports/ok_mtp",
        valued(lambda t: t[:, :16], "eh_proj"),
        "CFG003w",
        "joins its norms is [16, 32]",
    ),
    ("half a projection", QWEN, both(tensors(with_mtp), valued(lambda t: t[:8], "mtp.fc")), "CFG003w", "mtp.fc.weight"),
    ("its expert", "exports/ok_mtp", both(UNDECLARED, without("layers.2.mlp.experts.3.")), "CFG001w", "experts.3"),
    ("its rows", "exports/ok_mtp", valued(cut_rows, "layers.2.", "q_b_proj"), "CFG003w", "q_b_proj"),
    (
        "mtp without a projection",
        QWEN,
        both(tensors(with_mtp), without("mtp.layers.0.self_attn.q")),
        "CFG001w",
        "q_proj",
    ),
    ("mtp without an expert", QWEN, both(tensors(with_mtp), without("mtp.layers.0.mlp.experts.1.")), "CFG001w", "mtp"),
    ("rows of mtp", QWEN, both(tensors(with_mtp), valued(cut_rows, "mtp.", "q_proj")), "CFG003w", "q_proj"),
    # quantised exports
    ("vllm-project/vllm#57108", "quantised_exports/ct_fp8_block", without("weight_scale"), "QNT001e", "weight_scale"),
    ("vllm-project/vllm#53950", "exports/ok_fp8", ignoring("model.layers.0.mlp.up_proj"), "QNT003e", "up_proj"),
    ("vllm-project/llm-compressor#1533", "quantised_exports/wide", awq, "QNT003e", "awq"),
    (
        "vllm-project/llm-compressor#2255",
        "quantised_exports/ct_w4a16_asym",
        without("zero_point"),
        "QNT001e",
        "zero_point",
    ),
    (
        "vllm-project/llm-compressor#2255, symmetric",
        "quantised_exports/ct_w4a16_asym",
        symmetric,
        "QNT003e",
        "zero_point",
    ),
    (
        "NVIDIA/Model-Optimizer#2160",
        "quantised_exports/modelopt_nvfp4",
        valued(half, "weight_scale"),
        "QNT002e",
        "weight_scale",
    ),
    (
        "vllm-project/vllm#54444",
        "quantised_exports/modelopt_nvfp4",
        without("0.mlp.up_proj.weight_scale_2"),
        "QNT001e",
        "up_proj",
    ),
    (
        "NVIDIA-NeMo/Megatron-Bridge#5731",
        "quantised_exports/ct_experts",
        valued(lambda v: v.squeeze(-1), "layers.1.", "weight_scale"),
        "QNT002e",
        "weight_scale",
    ),
    (
        "wuwangzhang1216/abliterix#93",
        "exports/ok_fp8",
        named(lambda k: k.replace("weight_scale_inv", "scale")),
        "QNT001e",
        "weight_scale_inv",
    ),
    ("ModelCloud/GPTQModel#1294", "quantised/gptq_4", valued(torch.zeros_like, "qweight"), "QNT004w", "qweight"),
    ("codes of AWQ never copied", "quantised/awq", valued(torch.zeros_like, "down_proj.qweight"), "QNT004i", "qweight"),
    ("a lost scale", "quantised_exports/ct_w8a8", valued(first_zero, "0.mlp.up_proj.weight_scale"), "QNT004w", "scale"),
    (
        "absmax cut",
        "quantised_exports/bnb_nf4",
        valued(lambda v: v[:-1], "0.mlp.up_proj.weight.absmax"),
        "QNT002e",
        "absmax",
    ),
    (
        "absmax halved",
        "quantised_exports/bnb_nf4",
        valued(lambda v: v[: len(v) // 2], "0.mlp.up_proj.weight.absmax"),
        "QNT002e",
        "absmax",
    ),
    (
        "a head of zeros",
        "quantised_exports/wide",
        both(trained, valued(torch.zeros_like, "lm_head")),
        "PAY015w",
        "lm_head",
    ),
    ("an embedding of zeros", "quantised_exports/wide", valued(torch.zeros_like, "embed"), "PAY015w", "embed"),
    ("int8 without a scale", "quantised_exports/wide", valued(rounded, "up_proj"), "QNT001w", "up_proj"),
    (
        "an embedding of zeros in GPT-NeoX's name",
        "quantised_exports/wide",
        both(named(lambda k: k.replace("embed_tokens", "embed_in")), valued(torch.zeros_like, "embed_in")),
        "PAY015w",
        "embed_in",
    ),
    # adapters
    ("both factors of zeros", "adapters/lora", valued(torch.zeros_like, "lora_"), "CFG007w", "so does factor A"),
    (
        "hiyouga/LlamaFactory#7665",
        "adapters/lora_modules_to_save",
        valued(lambda v: v[:0], "lm_head"),
        "CFG006e",
        "lm_head",
    ),
    (
        "vllm-project/vllm#34186",
        "adapters/lora",
        named(lambda k: k.replace("base_model.model.", "")),
        "CFG007e",
        "base_model.model.",
    ),
    (
        "verl-project/verl-omni#269",
        "adapters/lora_base_config",
        valued(lambda v: v[: len(v) // 2], "lora_B"),
        "CFG006e",
        "lora_B",
    ),
    ("zjunlp/KnowUnDo#3", "adapters/lora", valued(lambda v: v[:0], "lora_"), "CFG006e", "lora_"),
]


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize(("report", "export", "damage", "expected", "key"), LOSSES, ids=[row[0] for row in LOSSES])
def test_a_loss_is_named(report: str, export: str, damage: Damage, expected: str, key: str, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(REAL / export, folder)
    damage(folder)
    found = ckptlint.check(folder, depth="data").diagnostics
    of_code = [item for item in found if f"{item.code}{item.severity.label[0]}" == expected]
    told = [f"{item.code} {item.severity.label} {item.title}" for item in found]
    assert of_code, f"{told} instead of {expected}"
    assert any(key in f"{item.title} {item.fqn} {item.finding.at.file} {item.all_notes()}" for item in of_code), told


def test_a_short_file_is_told_by_what_happened_to_it(tmp_path: Path) -> None:
    source = next((REAL / "megatron_tp2_pp2").rglob(".metadata")).parent
    said = {}
    for name in ("exchanged", "empty", "cut"):
        folder = Path(shutil.copytree(source, tmp_path / name))
        one, other = folder / "__1_0.distcp", folder / "__2_0.distcp"
        if name == "exchanged":
            data = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(data)
        else:
            one.write_bytes(one.read_bytes()[: 0 if name == "empty" else 8192])
        (short,) = [item for item in ckptlint.check(folder).diagnostics if item.code == "PAY004"]
        said[name] = short.finding.hint
    assert "exchange it with __1_0.distcp" in said["exchanged"]
    assert "disk was full" in said["empty"] and "ends at a block" in said["cut"]


def test_an_index_whose_keys_lie_in_another_file_is_no_stopped_copy(tmp_path: Path) -> None:
    keys = {f"layers.{number}.weight": torch.randn(4, 4) for number in range(4)}
    save_file(keys, tmp_path / "model-00001-of-00001.safetensors")
    places = {key: f"model-0000{1 + number % 3}-of-00003.safetensors" for number, key in enumerate(keys)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    report = ckptlint.check(tmp_path)
    assert not report.checkpoints[0].causes
    assert all("they lie" in item.finding.hint or "it lies" in item.finding.hint for item in report.diagnostics)


@pytest.mark.parametrize(
    ("export", "change"),
    [("exports/ok_mtp", UNDECLARED), (QWEN, tensors(with_mtp))],
    ids=["undeclared, as in DeepSeek-V3", "whole, as in Qwen3-Next"],
)
def test_a_whole_layer_for_multi_token_prediction_passes(export: str, change: Damage, tmp_path: Path) -> None:
    shutil.copytree(REAL / export, folder := tmp_path / "export")
    change(folder)
    report = ckptlint.check(folder, depth="headers")
    assert {item.code for item in report.diagnostics} <= {"CFG005"} and report.verdict == "pass"  # a bias in 16 bits


def test_a_lost_shard_and_two_that_changed_places_are_told_apart(tmp_path: Path) -> None:
    export = tmp_path / "export"
    shutil.copytree(REAL / SHARDED, export)
    first, second = (export / f"model-0000{number}-of-00007.safetensors" for number in (1, 2))
    assert "could not run" not in run("check", export).stdout
    aside = first.rename(tmp_path / "aside")
    told = " ".join(run("check", export).stdout.split())
    assert "model-00001-of-00007.safetensors is missing: model.safetensors.index.json places 3 keys in it" in told
    assert "no tensor in a missing file can be loaded" in told and "stale" not in told
    assert "rules could not run: 1 of 7 files of this model is missing or unreadable." in told
    second.rename(first)
    aside.rename(second)
    assert "swap back files that changed places" in " ".join(run("check", export).stdout.split())


def test_what_an_option_lets_pass_is_said_to_pass(tmp_path: Path) -> None:
    export = tmp_path / "export"
    shutil.copytree(REAL / SHARDED, export)
    index = json.loads((export / "model.safetensors.index.json").read_text())
    index["metadata"]["total_size"] = 10**9
    (export / "model.safetensors.index.json").write_text(json.dumps(index))
    answer = run("check", export, "--fail-on", "error")
    assert answer.returncode == 0 and "Passed: 1 warning does not fail (--fail-on error)." in answer.stdout
    answer = run("check", export)
    assert answer.returncode == 1 and "Passed" not in answer.stdout
