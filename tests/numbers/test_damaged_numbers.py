"""Damage to the numbers of one step is told, of real saves in many layouts, or cannot be told from the step alone."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
from damages import LAYOUTS, MOMENTS, OPERATORS, Operator, Save, matrices
from support import SWEEP, found, report_on

DRAWS = int(os.environ.get("DAMAGES", 1))
"""Draws of each operator: `DAMAGES=6 SWEEP=1 pytest tests/numbers/test_damaged_numbers.py`."""

UNDECIDED: dict[str, dict[str, str]] = {
    "moments of a few rows differ by more than the scale": {
        "fsdp2_4r": "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
    },
    "of some ranks fewer than eight matrices have chunks of 16 elements": {
        "dcp_fsdp2_4r": "weights_of_a_rank_times_2 weights_of_a_rank_times_0.5 weights_of_a_rank_times_8 "
        "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
        "verl_fsdp2_4r": "weights_of_a_rank_times_2 weights_of_a_rank_times_0.5 weights_of_a_rank_times_8 "
        "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
        "fsdp1_sharded": "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
        "megatron_tp2_pp2": "weights_of_a_rank_times_2 weights_of_a_rank_times_0.5 weights_of_a_rank_times_8",
        "megatron_fsdp_4r": "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
        "megatron_experts": "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
    },
    "one of four tensors with as many axes breaks the law in all ranks: it may be stored in another way": {
        "megatron_experts": "first_moment_times_100 squares_of_another_scale masters_shifted",
    },
    "without experts and tables of tokens a rank shares fewer than four tensors with others": {
        "megatron_experts": "moments_zeroed_in_a_rank",
    },
    "of two ranks nobody knows which is scaled": {
        "experimental_2r": "weights_of_a_rank_times_2 weights_of_a_rank_times_0.5 weights_of_a_rank_times_8 "
        "moments_of_a_rank_times_2 moments_of_a_rank_times_0.5 moments_of_a_rank_times_8",
    },
    "of two or three tensors one breaks the bound in all ranks: the optimizer may be another one": {
        "fsdp1_sharded": "first_moment_times_100 squares_of_another_scale",
        "megatron_fsdp_4r": "first_moment_times_100 squares_of_another_scale",
    },
    "a flat buffer may hold padding that nobody wrote": {
        "flat_2r": "bit_30_of_one_exp_avg_sq",
        "megatron_tp2_pp2": "bit_30_of_one_exp_avg_sq",
    },
    "the step is not known, or has not moved a weight for certain: the layers may have been stacked": {
        "dcp_fsdp2_4r": "layer_copied",
        "deepspeed_z1_4r": "layer_copied",
        "deepspeed_z3_4r": "layer_copied",
        "deepspeed_trainer_z3_2r": "layer_copied",
        "megatron_experts": "layer_copied",
        "safetensors": "layer_copied",
    },
    "each rank holds a few whole parameters, which no other rank shares": {
        "deepspeed_z1_4r": "squares_zeroed_in_a_rank moments_zeroed_in_a_rank",
    },
    "the model was never trained: all its norms hold one value": {"safetensors": "one_norm_less_1"},
}
"""Why one step does not decide -> layout -> operators; a limit of the step, or a limit that the rule's page states."""


def undecided(layout: str) -> set[str]:
    return {name for layouts in UNDECIDED.values() for name in layouts.get(layout, "").split()}


pytestmark = pytest.mark.sweep


class Judged(NamedTuple):
    """What ckptlint said of one damage.

    Attributes:
        about: what the operator did.
        is_allowed_silent: whether one step does not decide.
        loud: code, severity and title of each warning and error.
    """

    operator: Operator
    about: str
    is_allowed_silent: bool
    loud: list[tuple[str, str, str]]

    @property
    def codes(self) -> set[str]:
        return {code for code, _, _ in self.loud}

    @property
    def is_right(self) -> bool:
        """Whether one rule that may report it did, or none where that is allowed."""
        return self.codes <= self.operator.codes and len(self.codes) <= 1 and bool(self.codes or self.is_allowed_silent)


def judged(layout: str, draws: int, folder: Path) -> Iterator[Judged]:
    """So many draws of each operator that finds something to damage in a save, in an order drawn by its layout."""
    save = Save(layout)
    for operator in random.Random(layout).sample(OPERATORS, len(OPERATORS)):
        for number in range(draws):
            save.reset()
            about = operator.damage(save, random.Random(f"{layout} {operator.name} {number}"))
            if not about or not save.is_changed:
                break
            place = folder / f"{operator.name}_{number}" / save.folder.name
            save.write(place)
            loud = found(report_on(place, depth="data"), "error", "warning")
            yield Judged(operator, about, not operator.codes or operator.name in undecided(layout), loud)
            shutil.rmtree(place)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_told_once_by_its_rule(layout: str, tmp_path: Path) -> None:
    """Two operators in every run, all of them in a sweep."""
    seen = [*islice(judged(layout, DRAWS, tmp_path), None if SWEEP else 2 * DRAWS)]
    assert seen
    assert [one for one in seen if not one.is_right] == []
    silent = {one.operator.name for one in seen if not one.codes}
    assert DRAWS < 6 or undecided(layout) <= silent, "these are told: strike them out of UNDECIDED"


@pytest.mark.parametrize("by", [4.0, 0.25])
def test_scaled_moments_of_a_small_save_are_told(by: float, tmp_path: Path) -> None:
    save = Save("dcp_fsdp2_4r")
    for row in (row for state in MOMENTS for row in matrices(save, state) if save.chunks[row].rank == 1):
        save.values[row] *= by
    save.write(tmp_path / "save")
    told = [
        title for code, _, title in found(report_on(tmp_path / "save", depth="data"), "warning") if code == "PAY018"
    ]
    assert sorted(title.partition(" are ")[0] for title in told) == [f"the {state} of rank 1" for state in MOMENTS]
