"""The `github` format: workflow commands that GitHub Actions shows as annotations."""

from __future__ import annotations

from ckptlint.lint.report import CheckpointReport, FindingGroup, Report
from ckptlint.model.text import inert, plural
from ckptlint.reporters.full import note_line, notes, verdict
from ckptlint.reporters.style import Style, cut_names, shown_file
from ckptlint.rule import Severity

SHOWN = 10
"""Annotations of one level that GitHub shows for a step; the others are only in its log."""
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render(report: Report, style: Style) -> str:
    """One command for every group, the worst first; the last one that GitHub shows says how many more there are.

    Source: GitHub Actions, "Workflow commands"; actions/toolkit packages/core/src/command.ts for the escapes.
    """
    if style.quiet >= 2:
        return ""
    lines = [_command("error", {"title": "ckptlint"}, sentence) for sentence in report.unread]
    for severity, command in _COMMANDS.items():
        pairs = [(part, group) for part in report.checkpoints for group in part.groups]
        annotations = [_annotation(command, part, group) for part, group in pairs if group.lead.severity == severity]
        if len(annotations) > SHOWN:
            more = f"{plural(len(annotations) - SHOWN + 1, f'more {command}')}: the log of this step lists them"
            annotations.insert(SHOWN - 1, _command(command, {"title": "ckptlint"}, more))
        lines += annotations
    for ckpt in (part.checkpoint for part in report.checkpoints):
        for sentence in ckpt.not_looked_at:
            lines.append(_command("notice", {"title": "ckptlint"}, f"{ckpt.path}: not known: {sentence}"))
    if not style.quiet:
        lines += map(inert, verdict(report, style))
    return "".join(line + "\n" for line in lines)


def _annotation(command: str, part: CheckpointReport, group: FindingGroup) -> str:
    lead = group.lead
    file = f"{part.checkpoint.path}/{shown_file(part.checkpoint, lead.finding.at.file)}"
    place = {"file": file, "line": "1", "title": f"{lead.code} {lead.rule.name}"}
    text = [cut_names(lead.title, lead.fqn), *map(note_line, notes(group))]
    return _command(command, place, "\n".join(text))


def _command(command: str, properties: dict[str, str], message: str) -> str:
    values = (inert(_data(value).replace(":", "%3A").replace(",", "%2C")) for value in properties.values())
    listed = ",".join(f"{name}={value}" for name, value in zip(properties, values, strict=True))
    return f"::{command} {listed}::{inert(_data(message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
