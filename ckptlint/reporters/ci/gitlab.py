"""The `gitlab` format: a GitLab code quality report."""

from __future__ import annotations

import hashlib
import json
import posixpath
from typing import Any

from ckptlint.lint.report import CheckpointReport, FindingGroup, Report
from ckptlint.reporters.full import confidence_text
from ckptlint.reporters.style import Style, shown_file
from ckptlint.rule import Severity
from ckptlint.storage.paths import is_url

_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}


def render(report: Report, style: Style) -> str:
    """One issue for every group, as GitLab's subset of the Code Climate format.

    Source: GitLab, "Code Quality": description, check_name, fingerprint, severity, location.path, location.lines.begin.
    """
    issues = [_issue(sentence, "unread", _digest(sentence), "blocker", ".") for sentence in report.unread]
    issues += [_of_group(part, group) for part in report.checkpoints for group in part.groups]
    seen: set[str] = set()
    for number, issue in enumerate(issues):
        # GitLab drops an issue whose fingerprint another one has: the same fault in two checkpoints of one run
        if issue["fingerprint"] in seen:
            issue["fingerprint"] = _digest(f"{issue['fingerprint']}/{number}")
        seen.add(issue["fingerprint"])
    return json.dumps(issues, indent=2) + "\n"


def _of_group(part: CheckpointReport, group: FindingGroup) -> dict[str, Any]:
    lead = group.lead
    more = f" (+{len(group.members) - 1:,} more)" if len(group.members) > 1 else ""
    description = f"{lead.code} {lead.title}{confidence_text(lead)}{more}"
    path = f"{part.checkpoint.path}/{shown_file(part.checkpoint, lead.finding.at.file)}"
    return _issue(description, lead.rule.name, lead.fingerprint, _SEVERITIES[lead.severity], path)


def _issue(description: str, name: str, fingerprint: str, severity: str, path: str) -> dict[str, Any]:
    return {
        "description": description,
        "check_name": name,
        "fingerprint": fingerprint,
        "severity": severity,
        "location": {"path": path if is_url(path) else posixpath.normpath(path), "lines": {"begin": 1}},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
