"""What two checkpoints hold, as text and as JSON (`ckptlint diff --values`)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from math import isfinite, prod

from ckptlint.analysis.same_values.facts import Match, Relation
from ckptlint.lint.values import Values
from ckptlint.model.text import braces, human_bytes, plural
from ckptlint.reporters.style import Style, cut
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.keys import role

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
    "differ": "differ",
    "absent": "nothing to compare",
    "unread": "not read",
}
_ORDERS = ("reordered", "joined", "split", "padded")
_REST = {
    "unmerged": "are not what the adapter makes of the base",
    "differ": "differ",
    "order": "hold the same rows in an order that no known conversion makes",
    "absent": "have nothing to compare with",
    "unread": "could not be read",
}
_WIDTH = max(map(len, _WORDS.values())) + 2
_PATTERNS = 12


def values_as_text(found: Values, style: Style) -> str:
    """A line for each group of tensors that are alike, and a last line that a gate can trust."""
    lines = []
    for relation, words in _WORDS.items():
        groups = _groups([match for match in found.matches if match.relation == relation])
        for members in groups[:_PATTERNS]:
            lines += _lines(words, members, found, style)
        if len(groups) > _PATTERNS:
            lines.append(f"{words:{_WIDTH}}{len(groups) - _PATTERNS:,} more patterns (--format json has all)")
    return "\n".join([*lines, "", *_verdict(found, style)]) + "\n"


def _groups(matches: list[Match]) -> list[list[Match]]:
    alike: dict[tuple[object, ...], list[Match]] = defaultdict(list)
    for match in matches:
        roles = ("",) if match.relation in ("equal", "rounded") else (*map(role, match.old), "", *map(role, match.new))
        alike[roles, match.what, match.notes, match.is_proven].append(match)
    return list(alike.values())


def _lines(words: str, members: list[Match], found: Values, style: Style) -> list[str]:
    first = members[0]
    sides = [braces(name for match in members for name in getattr(match, side)) for side in ("old", "new")]
    count = sum(max(len(match.old), 1) for match in members)
    size = sum(
        prod(found.old[name].shape) * ITEM_BITS.get(found.old[name].dtype, 0) // 8
        for match in members
        for name in match.old
        if name in found.old
    )
    if first.relation == "equal":
        return [f"{words:{_WIDTH}}{plural(count, 'tensor')}, {human_bytes(size)}"]
    if first.relation == "absent":
        where = "only in the old one" if first.old else "only in the new one"
        names = ", ".join(map(cut, sides[0] or sides[1]))
        return style.wrap(f"{words:{_WIDTH}}{plural(len(members), 'tensor')}: {names} ({where})", " " * _WIDTH, "")
    if first.relation == "rounded":
        return [f"{words:{_WIDTH}}{plural(count, 'tensor')}: {first.what}"]
    names = " -> ".join(dict.fromkeys(", ".join(map(cut, side)) for side in sides if side))
    text = f"{words:{_WIDTH}}{plural(count, 'tensor')}: {names}"
    lines = style.wrap(text, " " * _WIDTH, "")
    notes = [first.what, *first.notes]
    changes = sorted(match.change for match in members if isfinite(match.change))
    if changes and not first.notes:
        to = f" to {changes[-1]:.2g}" if len(changes) > 1 else ""
        notes.append(f"every row; the norm of the difference is {changes[0]:.2g}{to} of the old one's")
    for note in filter(None, notes):
        lines += style.wrap(note, " " * (_WIDTH + 2), " " * _WIDTH)
    return lines


def _verdict(found: Values, style: Style) -> list[str]:
    count, whole = found.proven
    lacking = (match for match in found.matches if not match.is_proven)
    kinds = Counter("order" if match.relation in _ORDERS else match.relation for match in lacking)
    rest = [f"{kinds[kind]:,} {text}" for kind, text in _REST.items() if kinds[kind]]
    lines = [*found.sentences[:_PATTERNS]]
    if found.exit_code == 0:
        return [
            *lines,
            style.paint("Proven", "good") + f": {plural(count, 'tensor')} of {whole:,} hold the same values.",
        ]
    head = style.paint("Not proven", "error")
    return [*lines, f"{head}: {count:,} of {plural(whole, 'tensor')} hold the same values; {', '.join(rest)}."]


def values_as_json(found: Values, paths: tuple[str, str]) -> str:
    """Every match as JSON."""
    count, whole = found.proven
    document = {
        "schema": VALUES_SCHEMA,
        "old": paths[0],
        "new": paths[1],
        "proven": found.exit_code == 0,
        "exit_code": found.exit_code,
        "tensors": {"proven": count, "of": whole, "old": len(found.old), "new": len(found.new)},
        "problems": list(found.sentences),
        "matches": [
            {
                "relation": match.relation,
                "old": list(match.old),
                "new": list(match.new),
                "proven": match.is_proven,
                "what": match.what or None,
                "notes": list(match.notes),
                "change": match.change if isfinite(match.change) else None,
            }
            for match in found.matches
        ],
    }
    return json.dumps(document, indent=2) + "\n"
