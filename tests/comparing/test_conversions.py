"""`ckptlint diff --values` on what real converters, mergers and quantisers made of real checkpoints."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import REAL, bench, sweep_only

import ckptlint
from ckptlint.analysis.same_values.facts import Match
from ckptlint.comparing.values import Values

PAIRS = REAL / "conversions"
with (PAIRS / "PAIRS.tsv").open(encoding="utf-8") as opened:
    ROWS = {row["name"]: row for row in csv.DictReader(opened, delimiter="\t")}
STATE = ["optim*", "*optimizer*", "nested*", "model.seen"]  # verl joins the copies of a buffer


def compared(name: str, old: Path | None = None, new: Path | None = None) -> Values:
    row = ROWS[name]
    adapter = PAIRS / row["adapter"] if row["adapter"] else None
    found = ckptlint.diff(
        old or PAIRS / row["old"], new or PAIRS / row["new"], values=True, ignore=STATE, adapter=adapter
    )
    assert isinstance(found, Values)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_real_conversion_is_proven(name: str) -> None:
    found = compared(name)
    odd = [match for match in found.matches if not match.is_proven]
    assert [match for match in odd if match.relation != "absent"] == []  # a tied head is there once more
    assert (found.exit_code, list(found.lone), list(found.sentences)) == (0, [], [])
    if not ROWS[name]["adapter"]:
        assert compared(name, PAIRS / ROWS[name]["new"], PAIRS / ROWS[name]["old"]).exit_code == 0


State = dict[str, torch.Tensor]


def floats(state: State) -> list[str]:
    """The larger matrices, by name."""
    return [key for key in sorted(state) if state[key].ndim > 1 and state[key].dtype.itemsize > 1
            and state[key].is_floating_point() and state[key].numel() > 64]  # fmt: skip


def one_element(state: State) -> list[str]:
    key = floats(state)[len(floats(state)) // 2]
    flat = state[key].view(-1)
    flat[flat.numel() // 3] += 1
    return [key]


def two_rows(state: State) -> list[str]:
    key = floats(state)[-1]
    state[key][[0, 5]] = state[key][[5, 0]]
    return [key]


def two_tensors(state: State) -> list[str]:
    """Two of one shape, no tied ones."""
    keys = floats(state)
    first, second = next(
        (one, two)
        for i, one in enumerate(keys)
        for two in keys[i + 1 :]
        if state[one].shape == state[two].shape and not state[one].equal(state[two])
    )
    state[first], state[second] = state[second], state[first]
    return [first, second]


def zeros(state: State) -> list[str]:
    key = floats(state)[0]
    state[key][len(state[key]) // 2 :] = 0
    return [key]


def lost(state: State) -> list[str]:
    key = floats(state)[0]
    del state[key]
    return [key]


FAULTS: list[Callable[[State], list[str]]] = [one_element, two_rows, two_tensors, zeros, lost]
SPOILT = [name for name, row in ROWS.items() if (PAIRS / row["new"] / "model.safetensors").is_file()
          and not name.startswith("quantised")]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", SPOILT)
def test_the_same_conversion_with_a_fault_is_not(
    tmp_path: Path, name: str, fault: Callable[[State], list[str]]
) -> None:
    source = PAIRS / ROWS[name]["new"]
    state = load_file(source / "model.safetensors")
    keys = fault(state)
    target = Path(shutil.copytree(source, tmp_path / "new"))
    save_file(state, target / "model.safetensors", {"format": "pt"})
    found = compared(name, new=target)
    assert found.exit_code == 1
    told = [match for match in found.matches if not match.is_proven]
    assert told or found.lone
    if fault is not lost:
        assert all(any(_names(match, key) for match in told) for key in keys), told


def _names(match: Match, key: str) -> bool:
    return key in match.new


@sweep_only
def test_a_sample_of_near_misses_is_not_proven(tmp_path: Path) -> None:
    judged = list(bench("near_misses").near_misses(60, 7, tmp_path))
    assert len(judged) == 60 and not [one for one in judged if one[2]]
