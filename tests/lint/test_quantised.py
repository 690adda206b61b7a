"""`ckptlint diff --values` between a model and its quantised export, as real libraries write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import REAL, run

from ckptlint.payload.quantised import unpacked

State = dict[str, torch.Tensor]
ROWS, COLUMNS = 256, 384
KEY = "model.layers.0.mlp.up_proj.weight"


def weights(seed: int = 0) -> State:
    torch.manual_seed(seed)
    state = {f"model.layers.{layer}.mlp.up_proj.weight": torch.randn(ROWS, COLUMNS) / 20 for layer in range(2)}
    return {key: value.bfloat16() for key, value in state.items()} | {"model.norm.weight": torch.randn(384).bfloat16()}


def fp8_of_transformers(state: State, block: list[int] | None = None) -> State:
    """By the operation with which transformers quantises on the fly."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=block or [128, 128], scale_fmt="float")
    quantise = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))
    made: State = quantise.convert(dict(state.items()))
    return made


def compressed(
    state: State,
    bits: int = 4,
    kind: str = "int",
    strategy: str = "group",
    group: int | None = 128,
    symmetric: bool = True,
    form: str = "pack-quantized",
) -> State:
    """By the compressors of compressed-tensors, scales as its helpers choose them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=symmetric,
                            scale_dtype=torch.uint8 if form.startswith("mxfp4") else None)  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    found = {}
    for key, value in state.items():
        if value.ndim < 2:
            found[key] = value
            continue
        grouped = value.reshape(len(value), -1, group) if group else value.reshape(len(value), 1, -1)
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
        own = {"weight": value}
        whole = None
        if strategy == "tensor":
            low, high = low.min().reshape(1), high.max().reshape(1)
        if strategy == "tensor_group":
            whole = (448 * 6 / value.abs().max().float()).reshape(1)
            own["weight_global_scale"] = whole
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        own |= {"weight_scale": scale, "weight_zero_point": zero}
        made = BaseCompressor.get_value_from_registry(form).compress(own, scheme)
        found |= {f"{key.removesuffix('weight')}{name}": part for name, part in made.items()}
    return found


CASES: dict[str, Callable[[State], State]] = {
    "fp8 in blocks": fp8_of_transformers,
    "fp8 in odd blocks": lambda state: fp8_of_transformers(state, [64, 96]),
    "fp8 by rows": lambda state: compressed(state, 8, "float", "channel", None, form="float-quantized"),
    "fp8 by tensor": lambda state: compressed(state, 8, "float", "tensor", None, form="float-quantized"),
    "int8 by rows": lambda state: compressed(state, 8, "int", "channel", None, form="int-quantized"),
    "int8 with zero points": lambda state: compressed(state, 8, "int", "channel", None, False, "int-quantized"),
    "int4 in groups": compressed,
    "int4 with zero points": lambda state: compressed(state, symmetric=False),
    "int8 packed": lambda state: compressed(state, 8),
    "int3 packed": lambda state: compressed(state, 3),
    "nvfp4": lambda state: compressed(state, 4, "float", "tensor_group", 16, form="nvfp4-pack-quantized"),
    "mxfp4": lambda state: compressed(state, 4, "float", "group", 32, form="mxfp4-pack-quantized"),
}


def export(folder: Path, state: State, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def compared(old: Path, new: Path) -> tuple[int, dict[str, Any]]:
    answer = run("diff", str(old), str(new), "--values", "--format", "json")
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def told(document: dict[str, Any], relation: str) -> list[dict[str, Any]]:
    return [match for match in document["matches"] if match["relation"] == relation]


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_export_is_proven(tmp_path: Path, case: str) -> None:
    state = weights()
    old, new = export(tmp_path / "old", state), export(tmp_path / "new", CASES[case](state))
    for sides in ((old, new), (new, old)):
        code, document = compared(*sides)
        assert [match for match in document["matches"] if not match["proven"]] == []
        assert (code, len(told(document, "quantised"))) == (0, 2)


FAULTS: dict[str, Callable[[State, str], None]] = {
    "scales halved": lambda state, scale: state.update({scale: (state[scale].float() / 2).to(state[scale].dtype)}),
    "scales of another layer": lambda state, scale: state.update({scale: state[scale.replace(".0.", ".1.")] * 1}),
    "scales turned round": lambda state, scale: state.update({scale: state[scale].flip(0)}),
    "one scale lost": lambda state, scale: state.update({scale: torch.cat([state[scale][:-1], state[scale][:1] * 3])}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", ["fp8 in blocks", "fp8 by rows", "int8 by rows", "int4 in groups"])
def test_scales_that_are_not_the_weights(tmp_path: Path, case: str, fault: str) -> None:
    torch.manual_seed(1)
    size = torch.rand(ROWS, 1) * 4 + 0.5  # rows of very different size, as trained ones are
    state = {key: value * (size if value.ndim > 1 else 1) * (3 if ".1." in key else 1) for key, value in
             weights().items()}  # fmt: skip
    made = CASES[case](state)
    scale = next(key for key in made if "scale" in key and ".0." in key)
    FAULTS[fault](made, scale)
    code, document = compared(export(tmp_path / "old", state), export(tmp_path / "new", made))
    (match,) = told(document, "differ")
    assert (code, KEY in match["old"]) == (1, True)
    assert "further than half a step" in match["notes"][0]


def test_the_codes_of_another_layer(tmp_path: Path) -> None:
    state = weights()
    made = fp8_of_transformers(state)
    made[KEY] = made[KEY.replace(".0.", ".1.")].clone()
    code, document = compared(export(tmp_path / "old", state), export(tmp_path / "new", made))
    (match,) = told(document, "differ")
    assert code == 1
    assert "all rows are not this weight's" in match["notes"][1]


def test_one_code_that_changed(tmp_path: Path) -> None:
    state = weights()
    made = compressed(state)
    made["model.layers.0.mlp.up_proj.weight_packed"][7, 3] ^= 0x4000
    code, document = compared(export(tmp_path / "old", state), export(tmp_path / "new", made))
    (match,) = told(document, "differ")
    assert code == 1
    assert match["notes"][0].startswith("1 of 98,304 elements are further than half a step")


def test_experts_as_gpt_oss_keeps_them(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 2, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, (3, 24, 2), dtype=torch.uint8)
    wide = mxfp4.convert_moe_packed_tensors(blocks, scales)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    old = export(tmp_path / "old", {f"{name}_blocks": blocks, f"{name}_scales": scales})
    code, document = compared(old, export(tmp_path / "new", {name: wide}))
    assert (code, len(told(document, "quantised"))) == (0, 1)
    wide[1] = wide[2]
    code, document = compared(old, export(tmp_path / "odd", {name: wide}))
    assert (code, len(told(document, "differ"))) == (1, 1)


QUANTISED = REAL / "quantised"


@pytest.mark.parametrize("name", ["gptq_4", "gptq_3", "gptq_8_order", "gptq_v2", "awq"])
def test_what_gptqmodel_packed(tmp_path: Path, name: str) -> None:
    code, document = compared(QUANTISED / "wide", QUANTISED / name)
    assert [match for match in document["matches"] if not match["proven"]] == []
    assert (code, len(told(document, "quantised"))) == (0, 1)
    state = load_file(QUANTISED / name / "model.safetensors")
    (key,) = [key for key in state if key.endswith("scales")]
    state[key][-1] *= 2
    config = json.loads((QUANTISED / name / "config.json").read_text())
    code, document = compared(QUANTISED / "wide", export(tmp_path / "odd", state, config))
    assert (code, len(told(document, "differ"))) == (1, 1)


def test_codes_that_run_over_words() -> None:
    codes = np.random.default_rng(0).integers(0, 8, (5, 64))
    bits = ((codes[:, :, None] >> np.arange(3)) & 1).reshape(5, -1, 32)
    words = (bits << np.arange(32)).sum(axis=2).astype(np.uint32)
    assert np.array_equal(unpacked(words, 3)[:, :64], codes)
