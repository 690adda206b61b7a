"""`ckptlint diff --values` on what real converters, mergers and quantisers made of real checkpoints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support import REAL, bench, examples

import ckptlint
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


NEAR = bench("near_misses")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", NEAR.KINDS)
def test_a_near_miss_of_a_real_conversion_is_not_proven_and_named(tmp_path: Path, kind: str) -> None:
    judged = list(NEAR.near_misses(examples(4, 12), len(kind), tmp_path, [kind]))
    assert judged and [one for one in judged if one[2]] == []
