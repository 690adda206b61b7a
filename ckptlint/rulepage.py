"""The page of one rule, and the table of all of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from ckptlint.rule import SECTIONS, Rule


def page(rule: Rule, width: int = 80) -> str:
    """The rule's docstring as a page of text."""
    lines = [f"{rule.code} {rule.name}", f"{rule.severity.label}, needs --depth {rule.needs}", ""]
    lines += textwrap.wrap(rule.summary, width)
    for heading in SECTIONS:
        if text := rule.section(heading):
            lines += ["", f"{heading}:", *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines)


def catalogue(rules: Sequence[Rule], format_: str, width: int = 80) -> str:
    """All rules as a table, as Markdown, or as JSON."""
    if format_ == "json":
        rows = [
            {
                "code": rule.code,
                "name": rule.name,
                "severity": rule.severity.label,
                "needs": rule.needs,
                "default": True,
                "summary": rule.summary,
            }
            for rule in rules
        ]
        return json.dumps(rows, indent=2)
    from tabulate import tabulate

    heads = ("code", "name", "severity", "depth", "finds")
    cells = [(rule.code, rule.name, rule.severity.label, rule.needs, rule.summary) for rule in rules]
    if format_ == "markdown":
        return tabulate(cells, heads, tablefmt="github")
    room = max(24, width - 48)
    return tabulate(cells, heads, tablefmt="simple", maxcolwidths=[None, None, None, None, room])
