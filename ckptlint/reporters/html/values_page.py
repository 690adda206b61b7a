"""What two checkpoints hold, as one self-contained page; of two steps of a run with a map of how far weights moved."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

from ckptlint.comparing.updates import Update, short_names
from ckptlint.comparing.values import Values
from ckptlint.reporters.html.page import environment, frame
from ckptlint.reporters.style import cut
from ckptlint.reporters.values import change_text, groups_of, kinds_of, moved_sentences, sentence_of, values_verdict

_SHADES = 9
_ROWS = 512  # layers of the map
_COLUMNS = 64


def render(found: Values, paths: tuple[str, str]) -> str:
    """The page; jinja2 escapes every text."""
    word, sentence = values_verdict(found)
    rows = [
        (words, *sentence_of(members, found), members[0].is_proven)
        for words, groups, _ in groups_of(found)
        for members in groups
    ]
    left = sum(left for _, _, left in groups_of(found))
    template = environment().get_template("values.html.jinja")
    return template.render(
        **frame(),
        verdict="fail" if found.exit_code else "pass",
        icon="✕" if found.exit_code else "✓",
        word=word,
        sentence=sentence,
        paths=paths,
        problems=found.sentences,
        rows=rows,
        left=left,
        moved=moved_sentences(found.updates) if found.updates else [],
        map=_map(found.updates) if found.updates else None,
    )


def _map(updates: Sequence[Update]) -> dict[str, Any]:
    """Layers down, kinds across: the text of each cell, its shade and what it says when pointed at."""
    by_kind = kinds_of(updates)
    names = short_names(by_kind)
    inside = [kind for kind, members in by_kind.items() if any(update.layer is not None for update in members)]
    changes = [update.change for update in updates if update.change > 0]
    least, most = log10(min(changes)), log10(max(changes))

    def cell(members: Sequence[Update]) -> tuple[str, str, str]:
        if not members:
            return "", "none", ""
        update = min(members, key=lambda update: update.change)
        if not update.change:
            return "0", "still", f"{cut(update.fqn)} did not move"
        place = (log10(update.change) - least) / (most - least) if most > least else 0.5
        said = f"{cut(update.fqn)}: {update.change:.3g} of its norm, cosine {update.cosine:.6f}"
        return change_text(update.change), str(1 + round(place * (_SHADES - 1))), said

    columns = inside[:_COLUMNS]
    layers = sorted({update.layer for update in updates if update.layer is not None})[:_ROWS]
    at = {(update.kind, update.layer): list[Update]() for update in updates}
    for update in updates:
        at[update.kind, update.layer].append(update)
    return {
        "head": [cut(names[kind]) for kind in columns],
        "rows": [(layer, [cell(at.get((kind, layer), [])) for kind in columns]) for layer in layers],
        "others": [(cut(names[kind]), cell(members)) for kind, members in by_kind.items() if kind not in inside],
        "left": max(len(inside) - _COLUMNS, 0),
    }
