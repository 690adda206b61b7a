"""The `concise` format: one line per group, for grep and editors."""

from __future__ import annotations

from ckptlint.lint.report import Report, worst
from ckptlint.model.text import plural
from ckptlint.reporters.full import confidence_text
from ckptlint.reporters.style import Style, cut


def render(report: Report, style: Style) -> str:
    """`path:key[region]: level CODE sentence (+n more)` for every group."""
    if style.quiet >= 2:
        return ""
    lines = []
    for part in report.checkpoints:
        shown, left_out = worst(part.groups, style.per_rule)
        for group in shown:
            lead = group.lead
            subject = cut(lead.fqn or lead.finding.at.file or part.checkpoint.metadata_file)
            region = str(lead.finding.at.region or "").replace(" ", "")
            more = f" (+{len(group.members) - 1:,} more)" if len(group.members) > 1 else ""
            level = style.paint(lead.severity.label, lead.severity.label)
            said = f"{lead.message}{confidence_text(lead)}{more}"
            lines.append(f"{part.checkpoint.path}:{subject}{region}: {level} {lead.code} {said}")
        lines += [
            f"{part.checkpoint.path}: {plural(count, 'more group')} of {code}" for code, count in left_out.items()
        ]
    lines += report.unread
    return "".join(line + "\n" for line in lines)
