"""What differs between two checkpoints, as text and as JSON (`ckptlint diff`)."""

from __future__ import annotations

import json

from ckptlint.comparing.differences import Diff, Difference, DifferenceKind
from ckptlint.grouping import grouped
from ckptlint.model.text import plural
from ckptlint.reporters.contents.tensor_table import fitted, folded, meaning_of_star, starred
from ckptlint.reporters.full import header
from ckptlint.reporters.style import Style
from ckptlint.vocabulary.keys import role

SCHEMA = "ckptlint.diff/1"
_HEADINGS: dict[DifferenceKind, str] = {
    "removed": "only in the old one",
    "added": "only in the new one",
    "renamed": "under a different key",
    "kind": "stored as a different kind",
    "shape": "with a different shape",
    "dtype": "with a different dtype",
    "cut": "cut differently",
    "files": "in different files",
}
_LINES = 40


def as_text(diff: Diff, style: Style) -> str:
    """The differences by kind, those that look alike folded over layers."""
    blocks = ["\n".join(header(ckpt, style) for ckpt in (*diff.old, *diff.new))]
    for kind, heading in _HEADINGS.items():
        items = [item for item in diff.differences if item.kind == kind]
        if items:
            lines = [style.paint(f"{heading}: {plural(len(items), 'key')}", "bold"), *_grouped(items, style)]
            if len(lines) > _LINES + 1:
                left = plural(len(lines) - _LINES - 1, "more pattern")
                lines[_LINES + 1 :] = [f"  and {left} (--format json has all)"]
            blocks.append("\n".join(lines))
    head, rest = diff_verdict(diff)
    verdict = style.paint(head, "error" if diff.differences else "good") + rest
    blocks.append("\n".join(line for text in verdict.splitlines() for line in style.wrap(text, "")))
    return "\n\n".join(blocks) + "\n"


def diff_verdict(diff: Diff) -> tuple[str, str]:
    """What differs in a few words, and what follows them."""
    counts = ", ".join(f"{diff.counts[kind]:,} {heading}" for kind, heading in _HEADINGS.items() if diff.counts[kind])
    if counts:
        both = f"{plural(diff.shared, 'key')} in both." if diff.shared else "No key is in both."
        is_named = diff.counts["removed"] and diff.counts["added"]
        return f"Different: {counts}.", f" {both}" + " --values also finds renamed tensors." * bool(is_named)
    return "The same", f": {plural(diff.shared, 'key')}.\nValues were not compared: --values reads both."


def _grouped(items: list[Difference], style: Style) -> list[str]:
    """A line for each difference; keys that differ alike are folded into one."""
    looks = ((role(starred(item.key)), item.old, item.new, role(starred(item.other))) for item in items)
    rows, moments = list[list[str]](), set[str]()
    for members in grouped(zip(looks, items, strict=True)).values():
        first = members[0]
        names, moment_names = folded([item.key for item in members])
        others, also = folded([item.other for item in members if item.other])
        moments |= moment_names | also
        if others:
            rows += [[name, first.old] for name in names] + [[f"-> {name}", first.new] for name in others]
        else:
            rows += [[name, " -> ".join(filter(None, (first.old, first.new)))] for name in names]
    _, *lines = fitted(["", ""], rows, style.width - 2)
    return [f"  {line}" for line in [*lines, *meaning_of_star(moments, style)]]


def as_json(diff: Diff) -> str:
    """Every difference as JSON."""
    document = {
        "schema": SCHEMA,
        "same": not diff.differences,
        "old": [ckpt.path for ckpt in diff.old],
        "new": [ckpt.path for ckpt in diff.new],
        "shared": diff.shared,
        "differences": [
            {"kind": item.kind, "key": item.key, "old": item.old or None, "new": item.new or None}
            | ({"other": item.other} if item.other else {})
            for item in diff.differences
        ],
    }
    return json.dumps(document, indent=2) + "\n"
