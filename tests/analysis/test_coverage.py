"""What is said of chunks too tangled to be judged to the end; all else of GEO003 and GEO004 is in their fixtures."""

from __future__ import annotations

import numpy as np
import pytest
from support import REPOSITORY
from tilings import Chunk, layout

import ckptlint
from ckptlint.depth import Depth
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import CheckpointReport
from ckptlint.model import Checkpoint, ChunkTable, Tensor
from ckptlint.model import cover as boxes

PINWHEEL: list[Chunk] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


@pytest.fixture
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is painted as a whole, and the search ends before it begins."""
    for name in ("_CELL_LIMIT", "_WORK", "_WORK_PER_BOX", "_WORK_PER_DAMAGED_BOX"):
        monkeypatch.setattr(boxes, name, 0)


def judged(chunks: list[Chunk], *codes: str) -> CheckpointReport:
    made = layout((3, 3), chunks)
    tensor = Tensor("model.w", "float32", (3, 3), ChunkTable(made, np.full(len(chunks), -1)))
    rules = [rule for rule in load_rules() if rule.code in codes or rule.code == "LNT002"]
    return run_rules(Checkpoint("here", "dcp", tensors={"model.w": tensor}), rules, Depth.METADATA)


def test_a_tiling_that_was_not_looked_through_is_no_pass(no_budget: None) -> None:
    report = judged(PINWHEEL, "GEO003", "GEO004", "GEO005", "GEO008")
    assert sorted(report.failed) == ["GEO003", "GEO004"]
    assert report.failed["GEO003"] == "the chunks of model.w are too tangled to tell whether there are overlaps"
    assert [item.code for item in report.diagnostics] == ["LNT002", "LNT002"]
    assert "GEO004 coverage-hole cannot tell: the chunks of model.w" in report.diagnostics[1].title


def test_volumes_alone_tell_a_hole_that_was_not_located(no_budget: None) -> None:
    report = judged(PINWHEEL[:-1], "GEO004", "GEO005")
    (hole,) = report.diagnostics
    assert (hole.title, hole.region) == ("part of model.w is missing: at least 1 element", None)
    assert "the search stopped there" in str(hole.all_notes())


def test_a_search_that_stopped_says_so_beside_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "_CELL_LIMIT", 0)
    monkeypatch.setattr(boxes, "_CELLS_OF_FEW", 0)
    monkeypatch.setattr(boxes, "_FEW", 0)
    for name in ("_WORK_PER_BOX", "_WORK_PER_DAMAGED_BOX"):
        monkeypatch.setattr(boxes, name, 0)
    said = []
    for cells in range(1, 40):
        monkeypatch.setattr(boxes, "_WORK", cells * (boxes._WORK_OF_CELL + 100))
        report = judged([*PINWHEEL, ((0, 0), (1, 2)), ((1, 1), (2, 2))], "GEO003")
        said += [str(item.all_notes()) for item in report.diagnostics if item.code == "GEO003"]
    assert "at least" in said[0] and "the search stopped there" in said[0]
    assert "; 6 elements are stored more than once" in said[-1]


def test_the_tensors_of_a_checkpoint_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = boxes.Budget(left=10 * boxes._WORK_OF_CELL)
    monkeypatch.setattr(boxes, "_CELL_LIMIT", 0)
    first, last = (
        np.array([o for o, _ in PINWHEEL]),
        np.array([[a + b for a, b in zip(*c, strict=True)] for c in PINWHEEL]),
    )
    monkeypatch.setattr(boxes, "_WORK_PER_BOX", 0)
    assert [boxes.cover(first, last, (3, 3), budget).exact for _ in range(12)] == [True] * 9 + [False] * 3


def test_damage_and_doubt_are_both_told(no_budget: None) -> None:
    report = ckptlint.check(REPOSITORY / "fixtures" / "real" / "fsdp2_4r_hole", select=["GEO"])
    assert report.exit_code == 1
    assert {item.code for item in report.diagnostics} >= {"GEO004", "LNT002"}
