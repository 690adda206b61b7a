"""Which steps of a run may be deleted: whatever a run went through, enough whole steps and all that is named stay."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import simulated_runs
from support import REAL, examples

GOOD, HOLE = REAL / "edit_base", REAL / "fsdp2_4r_hole"


@pytest.mark.sweep
@pytest.mark.parametrize("layout", simulated_runs.LAYOUTS)
def test_enough_whole_steps_stay_whatever_a_run_went_through(tmp_path: Path, layout: str) -> None:
    deleted = 0
    for seed in range(examples(10, 200)):
        dice = Random(f"{layout} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        made = simulated_runs.simulated(folder, dice, simulated_runs.LAYOUTS[layout])
        found, wrong = simulated_runs.retained(made, dice.randint(1, 3))
        assert wrong == [], (seed, found.rows())
        deleted += len(found.paths)
    assert deleted
