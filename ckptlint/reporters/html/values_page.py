"""What two checkpoints hold, as one self-contained page; of two steps of a run with a map of how far weights moved."""

from __future__ import annotations

from ckptlint.analysis.step_before.movement import astray
from ckptlint.comparing.values.compare import Values
from ckptlint.reporters.comparing.values import groups_of, sentence_of, values_verdict
from ckptlint.reporters.html.movement import movement_map
from ckptlint.reporters.html.page import environment, frame


def render(values: Values, paths: tuple[str, str]) -> str:
    """The page; jinja2 escapes every text."""
    word, sentence, is_good = values_verdict(values)
    rows = [
        (words, *sentence_of(members, values), members[0].is_proven)
        for words, groups, _ in groups_of(values)
        for members in groups
    ]
    strays = astray(values.movements)
    marked = dict.fromkeys((movement.fqn for movement in strays), "")
    left = sum(left for _, _, left in groups_of(values))
    template = environment().get_template("values.html.jinja")
    return template.render(
        **frame(),
        verdict="pass" if is_good else "fail",
        icon="✕" if not is_good else "→" if values.exit_code else "✓",
        word=word,
        sentence=sentence,
        paths=paths,
        problems=values.sentences,
        rows=rows,
        left=left,
        map=values.movements and movement_map("How far the weights moved", values.movements, marked, strays),
    )
