"""How far weights moved since the step before, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ckptlint.analysis.step_before.movement import Movement, astray, short_names
from ckptlint.grouping import grouped
from ckptlint.model.text import first_names, fold_names, plural, table
from ckptlint.reporters.style import Style, cut

_PATTERNS = 12
_FURTHEST = 5  # weights that are named where more moved
_HEAD = ("weights", "least", "median", "most")


def moved_lines(movements: Sequence[Movement], style: Style) -> list[str]:
    """How far the weights of a run moved, kind by kind."""
    if not movements:
        return []
    head, *more = moved_sentences(movements, astray(movements))
    if not any(movement.change for movement in movements):
        return ["", *(line for sentence in (head, *more) for line in style.wrap(sentence, "  ", ""))]
    moved = table(_rows(movements), _HEAD, tablefmt="plain", disable_numparse=False).splitlines()
    lines = ["", *style.wrap(head, "", ""), "", *moved, ""]
    return [*lines, *(line for sentence in more for line in style.wrap(sentence, "  ", ""))]


def moved_sentences(movements: Sequence[Movement], strays: Sequence[Movement]) -> list[str]:
    """How many weights moved, which the furthest, which do not continue the old ones (`strays`), which did not move."""
    moved = sorted((movement for movement in movements if movement.change > 0), key=lambda movement: -movement.change)
    much = "the norm of the difference divided by the weight's norm"
    lines = [f"{plural(len(moved), 'weight')} moved. How far: {much}."] if moved else []
    if len(moved) > _FURTHEST:
        far = (f"{cut(movement.fqn)} {change_text(movement.change)}" for movement in moved[:_FURTHEST])
        lines.append(f"The furthest: {', '.join(far)}")
    if strays:
        names = first_names([*map(cut, fold_names(movement.fqn for movement in strays))], _PATTERNS)
        least, most = (f"{f(movement.cosine for movement in strays) + 0.0:.2f}" for f in (min, max))
        cosines = f"cosine {least}" if least == most else f"cosines {least} to {most}"
        count = plural(len(strays), "weight", "does")
        lines.append(f"{count} not continue the old step, unlike the others: {names} ({cosines})")
    still = [movement for movement in movements if not movement.change]
    trained = [movement.fqn for movement in still if movement.is_trained]
    if still:
        names = ", ".join(map(cut, fold_names(movement.fqn for movement in still)))
        lines.append(f"{plural(len(still), 'weight')} did not move: {names}")
    if trained:
        some = f"{len(trained):,} of them: {', '.join(map(cut, fold_names(trained)))}"
        lines.append(f"The optimizer holds state for {some if len(trained) < len(still) else 'all of them'}")
    return lines


def _rows(movements: Sequence[Movement]) -> list[tuple[str, ...]]:
    """Kind, least change, median and most, each with the layer."""
    kinds = grouped((movement.kind, movement) for movement in movements)
    names = short_names(kinds)
    rows: list[tuple[str, ...]] = []
    for kind, members in kinds.items():
        changes = sorted((movement.change, -1 if movement.layer is None else movement.layer) for movement in members)
        least, middle, most = (change_text(changes[i][0]) for i in (0, len(changes) // 2, -1))
        texts = f"{least} (layer {changes[0][1]})", middle, f"{most} (layer {changes[-1][1]})"
        rows.append((cut(names[kind]), *(texts if len(members) > 1 else (least, "", ""))))
    return rows


def change_text(value: float) -> str:
    """A change with two digits."""
    return f"{value:.2g}" if value else "0"
