"""Drawn damages to real pairs of steps in many layouts are told once, by what they are; healthy pairs are not."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from damages import Save
from pair_damages import HEALTHY, OPERATORS, Pair, pair_of, round_masters
from saved_pairs import (
    BEFORE,
    COMMITTED,
    HEALTHY_RUNS,
    LAYOUTS,
    NOW,
    RESHARDABLE,
    State,
    committed_run,
    healthy_runs,
    placed,
    saved,
)
from support import SWEEP, found, report_on, swept

SEED = 79
COUNT = int(os.environ.get("PAIRS", 20 if SWEEP else 6))
"""Damaged pairs; healthy ones are half as many: `PAIRS=300 SWEEP=1 pytest tests/numbers/test_drawn_pairs.py`."""
DRAWN = LAYOUTS if SWEEP else ("one_rank", "tp_4", COMMITTED)
GOING_ON = ("one_rank", "tp_4") if SWEEP else ("one_rank",)
"""Layouts of the runs that go on in a legal way."""

READ_WHOLE = {"PAY017"}  # rules at depth data alone
Saved = dict[str, dict[int, Path]]


class Drawn(NamedTuple):
    """One case.

    Attributes:
        name: of the operator, or of the healthy change.
        layout, older: of the step, and of the step before.
        number: what the rest is drawn by.
    """

    name: str
    layout: str
    older: str
    number: int


def drawn(names: list[str], count: int, seed: int, layouts: tuple[str, ...]) -> Iterator[Drawn]:
    """Cases in which every operator and layout comes in turn, and a third go on in another layout."""
    draw = random.Random(seed)
    for number in range(count):
        if number % len(names) == 0:
            order = draw.sample(names, len(names))
        layout = layouts[number % len(layouts)]
        others = [other for other in layouts if other != layout and {other, layout} <= {*RESHARDABLE}]
        older = draw.choice(others) if others and number % 3 == 0 else layout
        yield Drawn(order[number % len(names)], layout, older, number)


def pairs_in(made: Saved) -> Callable[[str, str], Pair]:
    saves = cache(lambda layout, step: Save(layout, made[layout][step]))
    return cache(lambda layout, older: pair_of(saves(layout, NOW), saves(older, BEFORE), layout))


def wrong_with(case: Drawn, made: Saved, pair: Pair, run: Path) -> str | None:
    """What is wrong in what is said of a case, "" for nothing; None where the save has nothing of the kind."""
    pair.now.reset()
    operator = OPERATORS.get(case.name)
    change = HEALTHY[case.name] if operator is None else operator.damage
    about = change(pair, random.Random(f"{case}"))
    round_masters(pair)
    if not about or (operator is not None and not pair.now.is_changed):
        return None
    placed(made[case.older][BEFORE], run)
    step = made[case.layout][NOW]
    pair.now.write(run / step.relative_to(older_run(made[case.layout][BEFORE])))
    reads_all = operator is not None and operator.codes <= READ_WHOLE
    loud = found(report_on(run, depth="data" if reads_all else "headers"), "error", "warning")
    shutil.rmtree(run)
    if operator is None:
        return f"{about}: {loud}" if loud else ""
    codes = {code for code, _, _ in loud}
    is_told = bool(codes & operator.codes) and any(re.search(operator.words, said) for *_, said in loud)
    return "" if is_told and len(codes) == 1 else f"{about}: {loud}"


def older_run(step: Path) -> Path:
    return step.parent.parent if step.name == "actor" else step.parent


@pytest.fixture(scope="module")
def steps() -> dict[int, State]:
    return committed_run()


@pytest.fixture(scope="module")
def made(steps: dict[int, State], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved(steps, tmp_path_factory.mktemp("pairs"), DRAWN)


@pytest.fixture(scope="module")
def runs(steps: dict[int, State], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved(steps | healthy_runs(steps), tmp_path_factory.mktemp("runs"), GOING_ON)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("names", "count"), [([*OPERATORS], COUNT), ([*HEALTHY], COUNT // 2)], ids=["damaged", "healthy"]
)
def test_drawn_pairs_are_judged_rightly(names: list[str], count: int, made: Saved, tmp_path: Path) -> None:
    pairs, wrong = pairs_in(made), []
    for case in drawn(names, count, SEED, DRAWN):
        if said := wrong_with(case, made, pairs(case.layout, case.older), tmp_path / "run"):
            wrong.append((case, said))
    assert wrong == []


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if "expert" in name] + [name for name in HEALTHY if "expert" in name]
)
def test_experts_that_are_stacked_are_named_by_their_numbers(name: str, tmp_path: Path) -> None:
    made = saved({}, tmp_path, (COMMITTED,))
    case = Drawn(name, COMMITTED, COMMITTED, SEED)
    assert wrong_with(case, made, pairs_in(made)(COMMITTED, COMMITTED), tmp_path / "run") == ""


def test_second_moments_that_a_rank_lost_of_copies_are_told(made: Saved, tmp_path: Path) -> None:
    """Copies of one tensor are on all ranks: their two moments may be in the files of two of them."""
    pair = pairs_in(made)("tp_4", "tp_4")
    about = OPERATORS["squares_zeroed_in_a_rank"].damage(pair, random.Random(SEED))
    pair.now.write(tmp_path / "run/step-200")
    loud = found(report_on(tmp_path / "run", depth="data"), "error", "warning")
    assert {code for code, _, _ in loud} == {"OPT011"}
    placed(made["tp_4"][BEFORE], tmp_path / "run")
    ((code, _, said),) = found(report_on(tmp_path / "run", depth="data"), "error", "warning")
    assert code == "RUN008"
    assert said.startswith(f"the moments of {about} cannot come from those of step-190 by 10 updates")


@pytest.mark.parametrize("depth", ["headers", *swept("data")])
@pytest.mark.parametrize("layout", GOING_ON)
@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_a_run_that_goes_on_in_a_legal_way_is_healthy(
    name: str, layout: str, depth: str, runs: Saved, tmp_path: Path
) -> None:
    for step in HEALTHY_RUNS[name]:
        placed(runs[layout][step], tmp_path)
    loud = found(report_on(tmp_path, depth=depth), "error", "warning")
    if name == "restarted from an older step":
        ((code, severity, said),) = loud
        assert (code, severity) == ("RUN008", "warning")
        assert said.endswith("perhaps the run went on from another step")
    else:
        assert loud == []
