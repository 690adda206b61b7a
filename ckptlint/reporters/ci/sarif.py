"""The `sarif` format: SARIF 2.1.0, one run for all checkpoints, one result for each group."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckptlint._version import __version__
from ckptlint.geometry.chunk_map import make_grid
from ckptlint.lint.pages.rule_page import page
from ckptlint.lint.report import CheckpointReport, FindingGroup, Report, ranks_named
from ckptlint.model import Checkpoint
from ckptlint.reporters.full import note_line, notes
from ckptlint.reporters.json_report import sampled
from ckptlint.reporters.style import Style, shown_file
from ckptlint.rule import Rule, Severity
from ckptlint.storage.paths import is_url

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"  # the base that viewers and code scanning replace by the root of the checkout
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_CHUNK_LIMIT = 100


def render(report: Report, style: Style) -> str:
    """The report as SARIF text, in ASCII.

    Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", with errata 01
    """
    index = {rule.code: number for number, rule in enumerate(report.rules)}
    pages = _pages()
    parts = list(enumerate(report.checkpoints))
    bases = {f"CKPT{number}": _base(part.checkpoint.path) for number, part in parts}
    root = {"description": {"text": "the folder that ckptlint was started in"}}
    results = [
        _result(part, f"CKPT{number}", group, index)
        for number, part in parts
        for group in (*part.groups, *part.ignored_groups)
    ]
    if any("baselineState" in result for result in results):
        for result in results:  # compared with a baseline, every result has a state
            result.setdefault("baselineState", "new")
    driver = {"name": "ckptlint", "version": __version__, "rules": [_rule(rule, pages) for rule in report.rules]}
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(report, index)],
        "originalUriBaseIds": {_ROOT: root, **bases},
        "artifacts": _artifacts(report, results),
        "results": results,
        "properties": {
            "depth": report.depth,
            "sample": sampled(report),
            "verdict": report.verdict,
            "settings": report.settings or None,
            "causes": [
                {"checkpoint": part.checkpoint.path, "name": cause.name, "sentence": cause.sentence, "do": cause.do}
                for part in report.checkpoints
                for cause in part.causes
            ],
        },
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _pages() -> str:
    """The address of the documentation that the package states (`project.urls`); "" where it states none."""
    with suppress(PackageNotFoundError):
        for line in metadata("ckptlint").get_all("Project-URL") or ():
            label, _, address = line.partition(", ")
            if label.lower() == "documentation":
                return f"{address.rstrip('/')}/rules"
    return ""


@cache  # a process may write many reports, as for the steps of a run
def _rule(rule: Rule, pages: str) -> dict[str, Any]:
    about = f"{rule.section('What it checks')} {rule.section('Why it matters')}".strip()
    anchor = f"{rule.code}-{rule.name}".lower()
    return {
        "id": rule.code,
        "name": rule.name,
        **({"helpUri": f"{pages}/{rule.code[:3]}.html#{anchor}"} if pages else {}),
        "shortDescription": {"text": rule.summary or rule.name},
        "fullDescription": {"text": about or rule.summary or rule.name},
        "help": {"text": page(rule, 100)},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _invocation(report: Report, index: dict[str, int]) -> dict[str, Any]:
    """How the run went: a crashed rule or an unread path makes it unsuccessful, findings do not."""
    errors: list[dict[str, Any]] = [{"level": "error", "message": {"text": text}} for text in report.unread]
    for part in report.checkpoints:
        for code, error in part.failed.items():
            text = f"{code} did not finish on {part.checkpoint.path}: {error}"
            rule = {"id": code, "index": index[code]}
            errors.append({"level": "error", "message": {"text": text}, "associatedRule": rule})
    checkpoints = [part.checkpoint for part in report.checkpoints]
    unknown = (f"{ckpt.path}: not known: {text}" for ckpt in checkpoints for text in ckpt.not_looked_at)
    remarks = [{"level": "note", "message": {"text": text}} for text in unknown]
    return {
        "executionSuccessful": not errors,
        "exitCode": report.exit_code,
        "toolExecutionNotifications": errors + remarks,
    }


def _base(path: str) -> dict[str, Any]:
    """The URI of a checkpoint: below the checkout where its path is, absolute otherwise."""
    if is_url(path):
        return {"uri": f"{quote(path, safe=':/%')}/", "description": {"text": path}}
    if Path(path).is_absolute() or ".." in Path(path).parts:
        whole = Path(os.path.normpath(Path(path).absolute()))
        return {"uri": f"{whole.as_uri()}/", "description": {"text": path}}
    return {"uri": f"{quote(os.path.normpath(path))}/", "uriBaseId": _ROOT, "description": {"text": path}}


def _artifacts(report: Report, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The files that results point at, with their lengths where they are known."""
    lengths = {
        (f"CKPT{number}", quote(file.name)): file.size
        for number, part in enumerate(report.checkpoints)
        for file in part.checkpoint.files
    }
    named: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        for location in result["locations"] + result["relatedLocations"]:
            file = location["physicalLocation"]["artifactLocation"]
            named[file["uriBaseId"], file["uri"]] = file
    sizes = [(file, lengths.get(key)) for key, file in named.items()]
    return [{"location": file} | ({} if size is None else {"length": size}) for file, size in sizes]


def _result(part: CheckpointReport, base: str, group: FindingGroup, index: dict[str, int]) -> dict[str, Any]:
    ckpt, lead = part.checkpoint, group.lead
    text = "\n".join([lead.title, *map(note_line, notes(group))])
    result: dict[str, Any] = {
        "ruleId": lead.code,
        "ruleIndex": index[lead.code],
        "level": _LEVELS[lead.severity],
        "kind": "fail",  # any other kind has no level (SARIF 3.27.10)
        "message": {"text": text.replace("](", "] (")},  # `[text](target)` is an embedded link
        "locations": [_location(ckpt, base, group)],
        "relatedLocations": _chunks(ckpt, base, group),
        "partialFingerprints": {"ckptlint/v1": lead.fingerprint},
        "occurrenceCount": len(group.members),
    }
    members = [{"fqn": m.fqn, "message": m.message, "fingerprint": m.fingerprint} for m in group.members]
    about = {
        "ranks": ranks_named(ckpt, lead.finding.at),
        "confidence": "" if lead.finding.confidence == "certain" else lead.finding.confidence,
        "inferredFrom": lead.finding.inferred_from,
        "findings": members if len(members) > 1 else [],
    }
    if any(about.values()):
        result["properties"] = {name: value for name, value in about.items() if value}
    if lead.ignored is not None and lead.ignored.by == "baseline":
        result["baselineState"] = "unchanged"
    elif lead.ignored is not None:
        accepted = {"kind": "external", "status": "accepted", "justification": lead.ignored.reason}
        result["suppressions"] = [accepted]
    return result


def _location(ckpt: Checkpoint, base: str, group: FindingGroup) -> dict[str, Any]:
    finding, name = group.lead.finding, shown_file(ckpt, group.lead.finding.at.file)
    span = finding.at.byte_range if name == finding.at.file else None
    region = {"startLine": 1} | (_bytes(*span) if span else {})  # viewers want a line, for binary files too
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": _file(name, base), "region": region}}
    if finding.at.fqn:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.at.fqn, "kind": "object"}]
    return location


def _chunks(ckpt: Checkpoint, base: str, group: FindingGroup) -> list[dict[str, Any]]:
    """Where the chunks of the finding and those that its chunk map draws are stored, at most 100."""
    finding = group.lead.finding
    if finding.at.tensor is None:
        return []
    grid = make_grid(finding.at.tensor, finding.at.region) if finding.at.region else None
    letters = {} if grid is None else grid.legend
    locations: list[dict[str, Any]] = []
    for row in islice(dict.fromkeys([*finding.at.rows, *letters]), _CHUNK_LIMIT):
        record = int(finding.at.tensor.chunks.record[row])
        if record >= 0:
            name, start, length = ckpt.byte_range_of(record)
            place: dict[str, Any] = {"artifactLocation": _file(shown_file(ckpt, name), base)}
            if region := _bytes(start, length):
                place["region"] = region
            text = f"chunk {letters.get(row, row)}: {finding.at.tensor.tiling.box(row)}"
            locations.append({"physicalLocation": place, "message": {"text": text}})
    return locations


def _bytes(start: int, length: int) -> dict[str, int]:
    """A byte region; nothing for what no file can have."""
    return {"byteOffset": start, "byteLength": length} if start >= 0 and length >= 0 else {}


def _file(name: str, base: str) -> dict[str, str]:
    return {"uri": quote(name), "uriBaseId": base}
