"""Adapters that peft saved: the healthy ones pass, what broken saves left is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import REAL, codes, ends, found, manifest

import ckptlint

ADAPTERS = REAL / "adapters"
ROWS = manifest(ADAPTERS)


def _with_config(folder: Path, text: str) -> Path:
    shutil.copytree(ADAPTERS / "lora", folder)
    (folder / "adapter_config.json").write_text(text)
    return folder


def _edited(folder: Path, **fields: Any) -> Path:
    config = json.loads((ADAPTERS / "lora" / "adapter_config.json").read_text())
    return _with_config(folder, json.dumps(config | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"r": "four"}, {"r": -4}, {"r": 10**400}, {"r": True}, {"target_modules": 7},
        {"target_modules": [None, 3, "q_proj"]}, {"rank_pattern": [1, 2]}, {"rank_pattern": {"q_proj": "many"}},
        {"modules_to_save": {"a": 1}}, {"peft_type": 3}, {"layers_to_transform": "all"},
        {"target_parameters": [[], "x"]},
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_other_types_are_not_judged(fields: dict[str, Any], tmp_path: Path) -> None:
    assert found(ckptlint.check(_edited(tmp_path / "a", **fields)), "error", "warning") == []


def test_no_regular_expression_of_a_file_is_run(tmp_path: Path) -> None:
    """`(a+)+$` takes a backtracking engine time that doubles with every letter of the name it fails on."""
    evil = r"((((m|o|d|e|l|\.)+)+)+)+!$"
    folder = _edited(
        tmp_path / "a",
        target_modules=evil,
        rank_pattern={evil: 4},
        modules_to_save=[evil],
        exclude_modules=evil,
        layers_pattern=evil,
    )
    with ends():
        assert found(ckptlint.check(folder), "error", "warning") == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "[" * 100_000, '{"r": ' + "9" * 10_000 + "}", "\x00\xff", '{"a": "' + "x" * 3 * 1024**2 + '"}'],
    ids=["empty", "cut", "list", "deep", "digits", "noise", "large"],
)
def test_a_configuration_that_cannot_be_used_is_one_sentence(text: str, tmp_path: Path) -> None:
    report = ckptlint.check(_with_config(tmp_path / "a", text))
    loud = [row for row in found(report) if row[0] != "SAF004"]
    assert len(loud) == 1 and "adapter_config.json" in loud[0][2]
    assert codes(report) <= {"SAF002", "SAF003"}


def test_what_is_nested_too_deep_for_a_field_is_left_out(tmp_path: Path) -> None:
    folder = _edited(tmp_path / "a")
    text = (folder / "adapter_config.json").read_text().rstrip()[:-1]
    (folder / "adapter_config.json").write_text(f'{text}, "more": {"[" * 300 + "]" * 300}}}')
    assert found(ckptlint.check(folder)) == []


def test_an_adapter_alone_cannot_be_loaded(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "lora", tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert found(ckptlint.check(tmp_path / "a")) == [
        ("CFG007", "error", "adapter_model.safetensors is here without adapter_config.json")
    ]
