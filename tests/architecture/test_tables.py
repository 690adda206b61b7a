"""Rows of a table expanded for given fields: names, shapes, conditions, and how far anything may grow."""

from __future__ import annotations

import json

import pytest
from support import ends

from ckptlint.architecture.expected import NoTable
from ckptlint.architecture.tables import TableRow, entry, expand

RANGES = {"layer": "layers", "expert": "experts", "block": "depths[stage]", "stage": "len(depths)"}
ROWS = [
    TableRow("embed", ("vocab", "hidden")),
    TableRow("layers.{layer}.up", ("2 * hidden", "hidden"), "layer < dense"),
    TableRow("layers.{layer}.experts.{expert}.up", ("width", "hidden"), "layer >= dense"),
    TableRow("layers.{layer}.bias", ("hidden",), "bias"),
    TableRow("head", ("vocab", "hidden"), "", "tied"),
    TableRow("mask", ("1",), "", "true"),
]
FIELDS = {"vocab": 100, "hidden": 8, "layers": 3, "experts": 2, "dense": 1, "width": 5, "bias": False, "tied": True}


def test_conditions_and_ranges_decide_what_exists() -> None:
    found = expand(ROWS, RANGES, FIELDS)
    assert list(found) == [
        "embed",
        "layers.0.up",
        *(f"layers.{layer}.experts.{expert}.up" for layer in (1, 2) for expert in (0, 1)),
        "head",
        "mask",
    ]
    assert found["layers.0.up"].shape == (16, 8)
    assert found["layers.2.experts.1.up"].shape == (5, 8)
    assert found["layers.2.experts.1.up"].dims == ("width", "hidden")
    assert found["layers.0.up"].because == ("dense",)


def test_what_is_tied_or_a_buffer_is_not_needed() -> None:
    found = expand(ROWS, RANGES, FIELDS)
    assert {key for key, tensor in found.items() if not tensor.needed} == {"head", "mask"}
    assert found["head"].because == ("tied",)
    assert expand(ROWS, RANGES, FIELDS | {"tied": False})["head"].needed


def test_a_range_and_a_size_may_depend_on_an_index() -> None:
    found = expand(
        [TableRow("stages.{stage}.{block}.w", ("widths[stage]",))], RANGES, {"depths": [1, 0, 2], "widths": [4, 5, 6]}
    )
    assert {key: tensor.shape for key, tensor in found.items()} == {
        "stages.0.0.w": (4,),
        "stages.2.0.w": (6,),
        "stages.2.1.w": (6,),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 10**9}, {"layers": -1}, {"layers": "3"}, {"layers": None}, {"layers": 2.5}, {"layers": 10**400},
        {"experts": 10**9}, {"layers": 40_000, "experts": 40_000}, {"hidden": -8}, {"hidden": [8]}, {"vocab": 2**62},
    ],
)  # fmt: skip
def test_a_hostile_value_is_refused_at_once(change: dict[str, object]) -> None:
    with pytest.raises(NoTable) as raised, ends():
        expand(ROWS, RANGES, FIELDS | change)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_a_missing_field_is_named() -> None:
    with pytest.raises(NoTable, match="vocab is not given"):
        expand(ROWS, RANGES, {name: value for name, value in FIELDS.items() if name != "vocab"})


def test_a_caller_bounds_the_keys() -> None:
    assert len(expand(ROWS, RANGES, FIELDS, at_most=8)) == 8
    with pytest.raises(NoTable, match="more than 7"):
        expand(ROWS, RANGES, FIELDS, at_most=7)


def test_a_range_that_grows_with_its_index_is_bounded_too() -> None:
    with pytest.raises(NoTable), ends():
        expand([TableRow("{stage}.{block}", ("1",))], RANGES, {"depths": [0, 10**12]}, at_most=1000)
    with pytest.raises(NoTable), ends():
        expand([TableRow("{stage}.{block}", ("1",), "block < 0")], RANGES, {"depths": [0, 10**12]}, at_most=1000)


def test_only_the_line_that_is_asked_for_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: lengths.append(len(text)) or real(text))
    table = entry("megatron.json", "gpt")
    assert table and sum(lengths) < 40_000
    assert entry("megatron.json", "no such type") is None
