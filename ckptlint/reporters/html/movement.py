"""The map of a run's page and of `diff`: how far weights moved, layers down and kinds across."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from ckptlint.analysis.step_before.movement import Movement, short_names
from ckptlint.grouping import grouped
from ckptlint.model.text import plural
from ckptlint.reporters.comparing.movement import change_text, moved_sentences
from ckptlint.reporters.style import cut

_SHADES = 9
_ROWS = 512  # layers of the map
_COLUMNS = 64


def movement_map(
    title: str, movements: Sequence[Movement], marked: Mapping[str, str], strays: Sequence[Movement] = ()
) -> dict[str, Any]:
    """Sentences, and of each cell its text, shade, what it says when pointed at, and where it leads.

    Args:
        marked: key of a weight that stands out -> id of its finding, "" for none.
        strays: those that do not continue the step before, where no finding says so.
    """
    kinds = grouped((movement.kind, movement) for movement in movements)
    names = short_names(kinds)
    inside = [kind for kind, members in kinds.items() if any(movement.layer is not None for movement in members)]
    changes = [movement.change for movement in movements if movement.change > 0] or [1.0]
    least, most = log10(min(changes)), log10(max(changes))
    wide = max(most - least, 1)  # a decade at least: what moved alike looks alike

    def cell(members: Sequence[Movement]) -> tuple[str, str, str, str]:
        if not members:
            return "", "none", "", ""
        # the marked one, or one that did not move, or else the one that moved furthest
        movement = max(members, key=lambda member: (member.fqn in marked, not member.change, member.change))
        place = 0.5 + (log10(movement.change) - (least + most) / 2) / wide if movement.change else 0.5
        said = f"{cut(movement.fqn)}: {movement.change:.3g} of its norm, cosine {movement.cosine:.6f}"
        shade = str(1 + round(place * (_SHADES - 1)))
        if not movement.change:
            said, shade = f"{cut(movement.fqn)} did not move", "still"
        if movement.fqn in marked:
            shade += " marked"
        return change_text(movement.change), shade, said, marked.get(movement.fqn, "")

    columns = inside[:_COLUMNS]
    layers = sorted({movement.layer for movement in movements if movement.layer is not None})[:_ROWS]
    at = grouped(((movement.kind, movement.layer), movement) for movement in movements)
    left = len(inside) - len(columns)
    return {
        "title": title,
        "sentences": moved_sentences(movements, strays),
        "head": [cut(names[kind]) for kind in columns],
        "rows": [(layer, [cell(at.get((kind, layer), [])) for kind in columns]) for layer in layers],
        "others": [(cut(names[kind]), cell(members)) for kind, members in kinds.items() if kind not in inside],
        "left": f"{plural(left, 'more kind')} of weights are left out." if left > 0 else "",
    }
