"""What `ckptlint diff` says in words."""

from __future__ import annotations

import pytest
from support import REAL

import ckptlint
from ckptlint.comparing.differences import Diff
from ckptlint.comparing.values.compare import Values
from ckptlint.comparing.values.match import Match, Relation
from ckptlint.reporters.comparing.diff import diff_verdict
from ckptlint.reporters.comparing.values import groups_of, sentence_of, values_as_text, values_verdict
from ckptlint.reporters.style import Style


@pytest.mark.parametrize(
    ("relations", "says"),
    [
        (["absent"], "1 is on one side only."),
        (["absent", "absent"], "2 are on one side only."),
        (["differ"], "1 differs."),
        (["differ", "differ", "unmerged"], "1 is not the base with the adapter merged in, 2 differ."),
        (["joined"], "1 holds the same rows in another order, which the name does not explain."),
    ],
)
def test_the_verdict_on_values_counts_in_good_grammar(relations: list[Relation], says: str) -> None:
    matches = tuple(Match(relation, (f"w{i}",), (), False) for i, relation in enumerate(relations))
    word, sentence, _ = values_verdict(
        Values({}, {}, matches, lone=[m.old[0] for m in matches if m.relation == "absent"])
    )
    assert word == "Not proven" and sentence.endswith(f"; {says}")


def test_states_and_weights_that_one_side_does_not_have_are_a_line_each() -> None:
    names = ["optimizer.state.a.exp_avg", "optimizer.state.b.exp_avg", "a.weight", "b.weight"]
    found = Values({}, {}, tuple(Match("absent", (name,), (), False) for name in names), ())
    (groups,) = (groups for _, groups, _ in groups_of(found))
    assert [sentence_of(group, found)[0] for group in groups] == [
        "2 tensors: optimizer.state.a.exp_avg, optimizer.state.b.exp_avg (only in the old one)",
        "2 tensors: a.weight, b.weight (only in the old one)",
    ]


def test_a_long_name_has_the_whole_line() -> None:
    name = "model.vision_tower.vision_model.encoder.layers.11.self_attn.out_proj.weight"
    lone = Values({}, {}, (Match("absent", (name,), (), False),), ())
    lines = values_as_text(lone, Style(width=80)).splitlines()
    assert lines[:3] == ["nothing to compare         1 tensor:", f"  {name}", " " * 27 + "(only in the old one)"]


def test_keys_that_only_have_other_names_point_to_the_values() -> None:
    found = ckptlint.diff(REAL / "edit_base", REAL / "fsdp2_4r")
    assert isinstance(found, Diff)
    head, rest = diff_verdict(found)
    assert head.startswith("Different: 2 only in the old one")
    assert rest == " No key is in both. --values also finds renamed tensors."
