"""`ckptlint diff --values` on what real converters, mergers and quantisers made of real checkpoints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import REAL, bench, examples

import ckptlint
from ckptlint.comparing.values import Values
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


@pytest.mark.parametrize("name", ROWS)
def test_a_real_conversion_is_proven(name: str) -> None:
    found = compared(name)
    odd = [match for match in found.matches if not match.is_proven]
    assert [match for match in odd if match.relation != "absent"] == []  # a tied head is there once more
    assert (found.exit_code, list(found.lone), list(found.sentences)) == (0, [], [])
    if not ROWS[name]["adapter"]:
        assert compared(name, PAIRS / ROWS[name]["new"], PAIRS / ROWS[name]["old"]).exit_code == 0


def test_metas_one_file_alone_and_that_of_one_rank_of_two(tmp_path: Path) -> None:
    pair = PAIRS / "torchtune_llama"
    state, file = load_file(pair / "meta" / "model.safetensors"), tmp_path / "consolidated.00.pth"
    torch.save(state, file)
    assert compared("torchtune_llama", pair / "hf", tmp_path).exit_code == 0
    torch.save({key: value.chunk(2, int("wo" in key or "w2" in key))[0].clone() for key, value in state.items()}, file)
    with pytest.raises(UnknownLayoutError, match="does not know how these files belong together"):
        compared("torchtune_llama", pair / "hf", tmp_path)


NEAR = bench("near_misses")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", NEAR.KINDS)
def test_a_near_miss_of_a_real_conversion_is_not_proven_and_named(tmp_path: Path, kind: str) -> None:
    judged = list(NEAR.near_misses(examples(4, 12), len(kind), tmp_path, [kind]))
    assert judged and [one for one in judged if one[2]] == []
