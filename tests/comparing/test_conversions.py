"""`ckptlint diff --values` on what real converters, mergers and quantisers made of real checkpoints."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import REAL, SWEEP, bench, examples

import ckptlint
from ckptlint.comparing.values.compare import Values
from ckptlint.errors import UnknownLayoutError

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


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", ROWS)
def test_a_real_conversion_is_proven(name: str) -> None:
    found = compared(name)
    odd = [match for match in found.matches if not match.is_proven]
    assert [match for match in odd if match.relation != "absent"] == []  # a tied head is there once more
    assert (found.exit_code, list(found.lone), list(found.sentences)) == (0, [], [])
    if not ROWS[name]["adapter"] and (SWEEP or [*ROWS].index(name) % 4 == 0):
        assert compared(name, PAIRS / ROWS[name]["new"], PAIRS / ROWS[name]["old"]).exit_code == 0


def test_metas_one_file_alone_and_that_of_one_rank_of_two(tmp_path: Path) -> None:
    pair = PAIRS / "torchtune_llama"
    state, file = load_file(pair / "meta" / "model.safetensors"), tmp_path / "consolidated.00.pth"
    torch.save(state, file)
    assert compared("torchtune_llama", pair / "hf", tmp_path).exit_code == 0
    torch.save({key: value.chunk(2, int("wo" in key or "w2" in key))[0].clone() for key, value in state.items()}, file)
    with pytest.raises(UnknownLayoutError, match="does not know how these files belong together"):
        compared("torchtune_llama", pair / "hf", tmp_path)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("single_blocks.1.linear1", lambda rows: [*rows[:24], *rows[48:72], *rows[24:48], *rows[72:]]),  # k and v
        ("single_blocks.1.linear1", lambda rows: [*rows[:8], *rows[8:16][::-1], *rows[16:]]),  # one head of q
        ("double_blocks.0.img_attn.qkv", lambda rows: [*rows[24:], *rows[:24]]),
        ("final_layer.adaLN_modulation.1", lambda rows: [*rows[24:], *rows[:24]]),  # as diffusers has them
        ("double_blocks.0.img_mlp.0", "double_blocks.1.img_mlp.0"),
        ("double_blocks.0.img_mlp.0", "double_blocks.0.txt_mlp.0"),
        ("time_in.out_layer", "vector_in.out_layer"),
    ],
)
def test_a_near_miss_of_flux(tmp_path: Path, key: str, change: str | Callable[[list[int]], list[int]]) -> None:
    pair = PAIRS / "diffusers_flux"
    state = load_file(pair / "original" / "model.safetensors")
    for name in (f"{key}.weight", f"{key}.bias"):
        other = name.replace(key, change) if isinstance(change, str) else name
        rows = list(range(len(state[name]))) if isinstance(change, str) else change(list(range(len(state[name]))))
        state[name], state[other] = state[other][rows].clone(), state[name][rows].clone()
    save_file(state, tmp_path / "model.safetensors")
    for sides in ((tmp_path, pair / "diffusers"), (pair / "diffusers", tmp_path)):
        found = compared("diffusers_flux", *sides)
        named = {name for match in found.matches if not match.is_proven for name in (*match.old, *match.new)}
        assert found.exit_code == 1 and {f"{key}.weight", f"{key}.bias"} <= named


NEAR = bench("evidence/near_misses")


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("kind", NEAR.KINDS)
def test_a_near_miss_of_a_real_conversion_is_not_proven_and_named(tmp_path: Path, kind: str) -> None:
    judged = list(NEAR.near_misses(examples(1, 6), len(kind), tmp_path, [kind]))
    assert judged and [one for one in judged if one[2]] == []
