"""Damage is caught by a rule that may speak of it, which names what was damaged; legal mutants raise nothing.

A small sample in every run; `bench/evidence/mutation.py` judges the whole and writes a section of docs/evidence.md.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mutants import Operator, judge, saves
from operators import OPERATORS, UNPROVOKED
from support import examples

from ckptlint.lint.registry import load_rules

SEED = 0
SAVES = examples(1, 3)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_a_sample_of_mutants(operator: Operator, tmp_path: Path) -> None:
    judged = excused = 0
    for save in random.Random(f"{SEED} {operator.name}").sample(saves(), k=len(saves())):
        for mutant in operator.sample(save, 1, SEED):
            outcome = judge(save, operator, mutant, tmp_path)
            about = f"{save.name}: {mutant.about}", outcome.codes, outcome.unrelated
            assert not outcome.unrelated, (
                f"{sorted(outcome.unrelated)}: a false alarm, or add these codes to this @operator in operators.py",
                about,
            )
            if outcome.verdict in ("missed", "noted") and mutant.unseen:
                excused += 1
                continue
            assert outcome.verdict == ("silent" if mutant.legal else "caught"), about
            assert mutant.legal or mutant.unseen or outcome.is_named, about
            judged += 1
        if judged == SAVES:
            break
    assert judged or excused, "it fits no checkpoint"


def test_every_rule_on_saved_files_is_of_an_operator_or_has_a_reason() -> None:
    provoked = frozenset().union(*(operator.codes for operator in OPERATORS))
    excused = frozenset(" ".join(UNPROVOKED.values()).split())
    rules = {rule.code for rule in load_rules() if not rule.live}
    forgotten = sorted(rules - provoked - excused)
    assert not forgotten, (
        f"{forgotten}: in tests/mutation/operators.py, add each to the @operator lines whose damage it reports, "
        "or to UNPROVOKED with a reason"
    )
    assert provoked | excused <= rules, "a rule that is gone"
    assert not provoked & excused, "strike these out of UNPROVOKED"
