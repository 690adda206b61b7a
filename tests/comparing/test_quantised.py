"""`ckptlint diff --values` between a model and its quantised export, as real libraries write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import REAL, run

from ckptlint.comparing.values.quantised_weights import unpacked

State = dict[str, torch.Tensor]
PAIRS = REAL / "conversions"
KEY = "model.layers.0.mlp.up_proj.weight"


def stored(name: str) -> State:
    """An export of `fixtures/real/conversions`."""
    return load_file(PAIRS / f"quantised_{name}" / "model.safetensors")


def export(folder: Path, state: State, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file({key: value.contiguous().clone() for key, value in state.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def compared(old: Path, new: Path) -> tuple[int, dict[str, Any]]:
    answer = run("diff", str(old), str(new), "--values", "--format", "json")
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def told(document: dict[str, Any], relation: str) -> list[dict[str, Any]]:
    return [match for match in document["matches"] if match["relation"] == relation]


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "halved": lambda scale, _: scale / 2,
    "of another layer": lambda _, other: other,
    "turned round": lambda scale, _: scale.flip(0),
    "one lost": lambda scale, _: torch.cat([scale[:-1], scale[:1] * 3]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "case", ["fp8_blocks", "fp8_rows", "int8_rows", "int4_groups", "mxfp4", "nvfp4", "torchao_int8"]
)
def test_scales_that_are_not_the_weights(tmp_path: Path, case: str, fault: str) -> None:
    made = stored(case)
    scale = next(key for key in made if key.endswith(("scale", "scale_inv")) and ".0." in key and "global" not in key)
    if made[scale].dtype == torch.uint8:
        pytest.skip("its scales are exponents")
    wide, other = (made[key].float() for key in (scale, scale.replace(".0.", ".1.")))
    made[scale] = FAULTS[fault](wide, other).to(made[scale].dtype)
    code, document = compared(PAIRS / "quantised_wide", export(tmp_path / "new", made))
    (match,) = told(document, "differ")
    assert code == 1
    assert KEY in match["old"]
    assert "further than half a step" in match["notes"][0]


def test_codes_whose_packing_is_not_read_are_named() -> None:
    code, document = compared(PAIRS / "quantised_wide", PAIRS / "quantised_quanto_int4")
    (first, *_) = told(document, "unread")
    assert code == 4 and KEY in first["old"] and f"{KEY}._data._data" in first["new"]
    assert "packed uint8: its rows cannot be read" in str(first)


FACTORS = {"fp8_blocks": 1.06, "fp8_rows": 1.06, "int8_rows": 1.02, "int4_groups": 1.25, "nvfp4": 1.25}


@pytest.mark.parametrize("case", FACTORS)
def test_one_factor_in_all_scales(tmp_path: Path, case: str) -> None:
    made, by = stored(case), FACTORS[case]
    for key in made:
        if key.endswith(("scale", "scale_inv")) and "global" not in key:
            made[key] = (made[key].float() * by).to(made[key].dtype)
    code, document = compared(PAIRS / "quantised_wide", export(tmp_path / "new", made))
    found = told(document, "differ")
    assert (code, told(document, "quantised"), len(found)) == (1, [], 2)
    for match in found:
        assert float(match["notes"][1].removeprefix("together scaled by ")) == pytest.approx(by, rel=0.05)


def test_the_codes_of_another_layer(tmp_path: Path) -> None:
    made = stored("fp8_blocks")
    made[KEY] = made[KEY.replace(".0.", ".1.")].clone()
    code, document = compared(PAIRS / "quantised_wide", export(tmp_path / "new", made))
    (match,) = told(document, "differ")
    assert code == 1
    assert "all rows are not this weight's" in match["notes"][1]


def test_one_code_that_changed(tmp_path: Path) -> None:
    made = stored("int4_groups")
    made["model.layers.0.mlp.up_proj.weight_packed"][7, 3] ^= 0x4000
    code, document = compared(PAIRS / "quantised_wide", export(tmp_path / "new", made))
    (match,) = told(document, "differ")
    assert code == 1
    assert match["notes"][0].startswith("1 of 12,288 elements are further than half a step")


def test_experts_as_gpt_oss_keeps_them(tmp_path: Path) -> None:
    wide = load_file(PAIRS / "quantised_gpt_oss" / "wide" / "model.safetensors")
    (key,) = wide
    wide[key][1] = wide[key][2]
    code, document = compared(PAIRS / "quantised_gpt_oss" / "mxfp4", export(tmp_path / "odd", wide))
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
