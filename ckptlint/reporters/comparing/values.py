"""What two checkpoints hold, as text and as JSON (`ckptlint diff --values`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from math import isfinite, prod
from statistics import median

from ckptlint.analysis.step_before.movement import astray
from ckptlint.comparing.locate_differences import ROUNDED_WITHIN
from ckptlint.comparing.values.compare import Values
from ckptlint.comparing.values.match import Match, Relation
from ckptlint.grouping import grouped
from ckptlint.model.text import first_names, human_bytes, plural, verb
from ckptlint.reporters.comparing.movement import change_text, moved_lines
from ckptlint.reporters.contents.tensor_table import fitting, folded, starred
from ckptlint.reporters.style import NAME_LIMIT, Style
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.keys import parse, role

VALUES_SCHEMA = "ckptlint.values/1"

_WORDS: dict[Relation, str] = {
    "equal": "equal",
    "rounded": "equal after rounding",
    "renamed": "equal, under another name",
    "padded": "equal, with more rows",
    "transposed": "transposed",
    "reordered": "rows reordered",
    "joined": "put together",
    "split": "taken apart",
    "merged": "merged",
    "quantised": "quantised",
    "unmerged": "not merged",
    "exchanged": "under a wrong name",
    "differ": "differ",
    "absent": "nothing to compare",
    "unread": "not read",
}
_REST = {
    "unmerged": ("is", "are", "not the base with the adapter merged in"),
    "exchanged": ("is", "are", "under the name of another"),
    "differ": ("differs", "differ", ""),
    "order": ("holds", "hold", "the same rows in another order, which the name does not explain"),
    "padded": ("has", "have", "rows that the other side lacks, and no configuration calls them padding"),
    "absent": ("is", "are", "on one side only"),
    "unread": ("could not be read", "could not be read", ""),
}
"""What is not proven: the verb for one tensor, for several, and the rest."""
_WIDTH = max(map(len, _WORDS.values())) + 2
_PATTERNS = 12


def values_as_text(values: Values, style: Style) -> str:
    """A line for each group of tensors that are alike, and a last line that a gate can trust."""
    lines = []
    for words, groups, left in groups_of(values):
        for members in groups:
            lines += _lines(words, members, values, style)
        if left:
            lines.append(f"{words:{_WIDTH}}{plural(left, 'more pattern')} (--format json has all)")
    lines += moved_lines(values.movements, style)
    word, sentence, is_good = values_verdict(values)
    verdict = f"{style.paint(word, 'good' if is_good else 'error')}: {sentence}"
    return "\n".join([*lines, "", *values.sentences[:_PATTERNS], *style.wrap(verdict, "", "")]) + "\n"


def groups_of(values: Values) -> Iterator[tuple[str, list[list[Match]], int]]:
    """What tensors have to do with each other, in words, with the groups that are alike, and how many are left out."""
    # of two steps of a run, the weights that moved are left to the table, and the state of the job is one group
    moved = {movement.fqn for movement in values.movements if movement.change}
    for relation, words in _WORDS.items():
        members = [m for m in values.matches if m.relation == relation and not (m.old and m.old[0] in moved)]
        state: list[str] = []
        if moved and relation == "differ":
            state = [match.old[0] for match in members if parse(match.old[0]).kind != "model"]
            members = [match for match in members if parse(match.old[0]).kind == "model"]
        groups = _groups(members)
        if state:
            groups = [[Match("differ", tuple(state), (), False, STATE)], *groups]
        if groups:
            yield words, groups[:_PATTERNS], len(groups[_PATTERNS:])


STATE = "state of the optimizer and of the job"


def _groups(matches: list[Match]) -> list[list[Match]]:
    def look(match: Match) -> tuple[object, ...]:
        names = tuple(role(starred(name)) for name in (*match.old, "", *match.new))
        if match.relation in ("equal", "rounded") or ROUNDED_WITHIN in match.notes:
            names = ("",)
        elif match.relation == "absent":
            names = (parse((match.old or match.new)[0]).kind, "old" if match.old else "new")
        return names, match.what, match.notes, match.is_proven

    return [*grouped((look(match), match) for match in matches).values()]


def sentence_of(members: list[Match], values: Values, limit: int = NAME_LIMIT) -> tuple[str, list[str]]:
    """How many tensors a group has, which these are, and what else is to be said of them."""
    first = members[0]
    old, new = ([name for match in members for name in getattr(match, side)] for side in ("old", "new"))
    sides = [folded(names)[0] for names in (old, new)]
    count = plural(len(old) or len(members), "tensor")
    if first.relation == "equal":
        sizes = ((prod(side.shape), side.dtype) for name in old if (side := values.old.get(name)) is not None)
        size = sum(volume * ITEM_BITS.get(dtype, 0) // 8 for volume, dtype in sizes)
        return f"{count}, {human_bytes(size)}", []
    if first.relation == "absent":
        where = "only in the old one" if first.old else "only in the new one"
        names = first_names((fitting(name, limit) for name in sides[0] or sides[1]), _PATTERNS)
        return f"{plural(len(members), 'tensor')}: {names} ({where})", []
    if first.relation == "rounded" or first.what == STATE:
        return f"{count}: {first.what}", []
    notes = [first.what, *first.notes]
    changes = sorted(match.change for match in members if isfinite(match.change))
    if changes and not first.notes and first.relation == "differ":
        to = f" to {changes[-1]:.2g}" if len(changes) > 1 else ""
        notes.append(f"every row; the norm of the difference is {changes[0]:.2g}{to} of the old one's")
    names = " -> ".join(dict.fromkeys(", ".join(fitting(name, limit) for name in side) for side in sides if side))
    return f"{count}: {names}", [note for note in notes if note]


def _lines(words: str, members: list[Match], values: Values, style: Style) -> list[str]:
    sentence, notes = sentence_of(members, values, min(NAME_LIMIT, style.width - 2))
    lines = style.wrap(f"{words:{_WIDTH}}{sentence}", " " * _WIDTH, "")
    lines = [line if len(line) <= style.width else f"  {line.lstrip()}" for line in lines]  # a name that needs the room
    for note in notes:
        lines += style.wrap(note, " " * (_WIDTH + 2), " " * _WIDTH)
    return lines


def values_verdict(values: Values) -> tuple[str, str, bool]:
    """`Proven`, `Not proven`, or `Moved` for two steps of a run; the rest of the sentence; whether nothing is wrong."""
    count, whole = values.proven
    merged = sum(len(match.old) for match in values.matches if match.relation == "merged")
    if values.exit_code == 0 and merged:
        return "Proven", f"NEW is OLD with the adapter merged in: {merged:,} merged, {count - merged:,} equal.", True
    if values.exit_code == 0:
        return "Proven", f"{plural(count, 'tensor')} of {whole:,} {verb(count, 'holds')} the same values.", True
    moved = {movement.fqn: movement.change for movement in values.movements if movement.change}
    lacking = [match for match in values.matches if not match.is_proven and not _is_of_training(match, moved)]
    orders = ("reordered", "joined", "split", "transposed")
    kinds = Counter("order" if match.relation in orders else match.relation for match in lacking)
    kinds["absent"] *= bool(values.lone) or count < whole
    rest = [
        f"{kinds[kind]:,} {singular if kinds[kind] == 1 else more} {text}".rstrip()
        for kind, (singular, more, text) in _REST.items()
        if kinds[kind]
    ]
    if moved:
        strays = len(astray(values.movements))
        far = f"by {change_text(median(moved.values()))} of their norm in the median"
        if strays:
            rest.insert(0, f"{strays:,} {verb(strays, 'does')} not continue the old step")
        some = f"{len(moved):,} of {plural(len(values.movements), 'weight')}, {far}"
        return "Moved", "; ".join([some, *rest]) + ".", not rest
    hold = verb(count, "holds")
    return "Not proven", f"{count:,} of {plural(whole, 'tensor')} {hold} the same values; {', '.join(rest)}.", False


def _is_of_training(match: Match, moved: Collection[str]) -> bool:
    """Whether a match differs as training makes it: a weight that moved, or state beside one."""
    return bool(moved) and match.relation == "differ" and (match.old[0] in moved or parse(match.old[0]).kind != "model")


def values_as_json(values: Values, paths: tuple[str, str]) -> str:
    """Every match as JSON."""
    (count, whole), strays = values.proven, astray(values.movements)
    document = {
        "schema": VALUES_SCHEMA,
        "old": paths[0],
        "new": paths[1],
        "proven": values.exit_code == 0,
        "exit_code": values.exit_code,
        "tensors": {"proven": count, "of": whole, "old": len(values.old), "new": len(values.new)},
        "problems": list(values.sentences),
        "lone": list(values.lone),
        "matches": [match.as_dict() for match in values.matches],
        "moved": [
            {"tensor": movement.fqn, "layer": movement.layer, "change": movement.change, "cosine": movement.cosine}
            | {"continues": movement not in strays}
            for movement in values.movements
            if movement.change
        ],
        "did_not_move": [
            {"tensor": movement.fqn, "trained": movement.is_trained}
            for movement in values.movements
            if not movement.change
        ],
    }
    return json.dumps(document, indent=2) + "\n"
