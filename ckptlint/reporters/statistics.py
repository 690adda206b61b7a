"""What `--statistics` prints: a line per rule that found something, and the verdict."""

from __future__ import annotations

from ckptlint.lint.report import Report
from ckptlint.model.text import table
from ckptlint.reporters.full import verdict
from ckptlint.reporters.style import Style


def render(report: Report, style: Style) -> str:
    """A table of problems, code, name and keys concerned, worst first; notes are counted too."""
    if style.quiet >= 2:
        return ""

    groups = [(part.checkpoint.path, group) for part in report.checkpoints for group in part.groups]
    rows = []
    for rule in sorted({group.lead.rule for _, group in groups}, key=lambda rule: (-rule.severity, rule.code)):
        of_rule = [(path, group) for path, group in groups if group.lead.rule is rule]
        keys = {(path, key) for path, group in of_rule for item in group.members for key in item.keys}
        rows.append((len(of_rule), rule.code, rule.name, len(keys)))
    heads = ("count", "code", "name", "keys")
    counts = [table(rows, heads, intfmt=",", disable_numparse=False), ""] if rows else []
    unread = [line for text in report.unread for line in style.wrap(text, "  ", "")]
    lines = counts if style.quiet else [*counts, *unread, *verdict(report, style, wrapped=True)]
    return "".join(line + "\n" for line in lines)
