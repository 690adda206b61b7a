"""The `rdjson` format: the Reviewdog Diagnostic Format, which reviewdog and editors read."""

from __future__ import annotations

import json
from typing import Any

from ckptlint.lint.report import CheckpointReport, FindingGroup, Report
from ckptlint.reporters.full import note_line, notes
from ckptlint.reporters.style import Style, cut_names, shown_file
from ckptlint.rule import Severity

_SEVERITIES = {Severity.ERROR: "ERROR", Severity.WARNING: "WARNING", Severity.INFO: "INFO"}


def render(report: Report, style: Style) -> str:
    """One diagnostic for every group, and one for each path that was not read.

    Source: reviewdog, proto/rdf/reviewdog.proto: DiagnosticResult
    """
    diagnostics = [_diagnostic(sentence, ".", "ERROR", "unread") for sentence in report.unread]
    diagnostics += [_of_group(part, group) for part in report.checkpoints for group in part.groups]
    return json.dumps({"source": {"name": "ckptlint"}, "diagnostics": diagnostics}, indent=2) + "\n"


def _of_group(part: CheckpointReport, group: FindingGroup) -> dict[str, Any]:
    lead = group.lead
    message = "\n".join([cut_names(lead.title, lead.fqn), *map(note_line, notes(group))])
    path = f"{part.checkpoint.path}/{shown_file(part.checkpoint, lead.finding.at.file)}"
    return _diagnostic(message, path, _SEVERITIES[lead.severity], lead.code)


def _diagnostic(message: str, path: str, severity: str, code: str) -> dict[str, Any]:
    place = {"path": path, "range": {"start": {"line": 1}}}
    return {"message": message, "location": place, "severity": severity, "code": {"value": code}}
