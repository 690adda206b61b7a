"""The `json` format, described by `report.schema.json`: every finding, grouped or not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from ckptlint._version import __version__
from ckptlint.geometry.chunk_graph import coordinates
from ckptlint.lint.report import Cause, CheckpointReport, Diagnostic, FindingGroup, Report, ranks_named
from ckptlint.lint.steps.trust import JudgedStep, steps_in
from ckptlint.model import Checkpoint
from ckptlint.model.checkpoint import StepFileState
from ckptlint.model.files import FILE_STATES
from ckptlint.model.tiling import Box
from ckptlint.reporters.style import Style

SCHEMA = "ckptlint.report/1"


def render(report: Report, style: Style) -> str:
    """The report as JSON text."""
    counts = {level: report.counts[level] for level in ("error", "warning", "info")}
    hidden = Counter(item.ignored.by for item in report.ignored if item.ignored)
    document = {
        "schema": SCHEMA,
        "tool": {
            "version": __version__,
            "depth": report.depth,
            "sample": sampled(report),
            "rules": [rule.code for rule in report.rules],
            "settings": report.settings or None,
        },
        "verdict": report.verdict,
        "summary": {**counts, "ignored": hidden["per-key-ignores"], "baselined": hidden["baseline"]},
        "rules": asdict(report.rule_counts),
        "steps": [step_object(step) for step in steps_in(report)],
        "checkpoints": [_checkpoint(report, part) for part in report.checkpoints],
        "not_found": list(report.not_found),
        "unreadable": list(report.unreadable),
    }
    return json.dumps(document, indent=2) + "\n"


def step_object(step: JudgedStep) -> dict[str, Any]:
    """A step and its verdict, in the words of `report.schema.json`."""
    return {
        "step": step.number,
        "name": step.name,
        "path": step.path,
        "verdict": step.verdict,
        "why": step.why or None,
        "code": step.code or None,
        "parts": list(step.parts),
        "bytes": step.size,
        "written": step.written or None,
        "warnings": [*step.warnings],
        "hidden": step.hidden or None,
    }


def sampled(report: Report) -> str | None:
    """What share of the records was read, with the seed; None for all of them."""
    payloads = [part.checkpoint.payload for part in report.checkpoints if part.checkpoint.payload is not None]
    return "; ".join(payload.sample for payload in payloads if payload.sample) or None


def totals_of(ckpt: Checkpoint) -> dict[str, int]:
    """How much a checkpoint holds."""
    objects = len(ckpt.objects) + len(ckpt.byte_objects)
    return {"tensors": len(ckpt.tensors), "objects": objects, "files": len(ckpt.files), "bytes": ckpt.total_bytes}


def _checkpoint(report: Report, part: CheckpointReport) -> dict[str, Any]:
    ckpt, reference, groups = part.checkpoint, part.checkpoint.reference, [*part.groups, *part.ignored_groups]
    states = zip(FILE_STATES, np.bincount(ckpt.files.state, minlength=len(FILE_STATES)).tolist(), strict=True)
    beside = Counter(file.state for file in ckpt.step_files)
    numbers = {id(item): n for n, item in enumerate(item for group in groups for item in group.members)}
    return {
        "path": ckpt.path,
        "format": ckpt.format,
        "writer": ckpt.writer or None,
        "totals": totals_of(ckpt),
        "files": {
            "payload": {state: count for state, count in states if count},
            "beside": {state: beside[state] for state in get_args(StepFileState)},
        },
        "step_files": [
            {"name": file.name, "family": file.family or None, "state": file.state, "size": file.size}
            for file in ckpt.step_files
        ],
        "unseen": list(ckpt.not_looked_at),
        "reference": reference
        and {"source": reference.source, "kind": reference.kind, "tensors": len(reference.tensors)},
        "topology": {axis: {"size": size.size, "source": size.source} for axis, size in ckpt.topology.items()},
        "causes": [_cause(cause, numbers) for cause in part.causes],
        "findings": [_finding(part, item, group) for group in groups for item in group.members],
        "rules": asdict(report.rule_counts_of(part)),
        "not_run": [{"code": code, "reason": reason} for code, reason in part.silent.items()],
        "failed": [{"code": code, "error": error} for code, error in part.failed.items()],
    }


def _cause(cause: Cause, numbers: dict[int, int]) -> dict[str, Any]:
    findings = sorted(cause.findings, key=lambda item: numbers[id(item)])
    return {
        "name": cause.name,
        "sentence": cause.sentence,
        "do": cause.do,
        "codes": list(cause.codes),
        "findings": [numbers[id(item)] for item in findings],
        "fingerprints": [item.fingerprint for item in findings],
    }


def _finding(part: CheckpointReport, item: Diagnostic, group: FindingGroup) -> dict[str, Any]:
    ckpt, finding, tensor = part.checkpoint, item.finding, item.finding.at.tensor
    # what costs time to explain is the same for all members of a group
    notes = item.all_notes() if item is group.lead else [*finding.notes, ("hint", finding.hint)]
    notes = [note for note in notes if note[1] and note[0] not in ("inferred", "confidence")]
    region, ignored, mesh = finding.at.region, item.ignored, {}
    if tensor is not None and region is not None and tensor.is_sound:
        mesh = {f"dim {axis}": inside for axis, (_, inside) in coordinates(tensor.tiling, region).items()}
    chunks = []
    for row in finding.at.rows if tensor is not None else ():
        box, record = tensor.tiling.box(row), int(tensor.chunks.record[row])  # type: ignore[union-attr]
        chunks.append(_box(box) | place_of(ckpt, record))
    return {
        "code": item.code,
        "name": item.rule.name,
        "severity": item.severity.label,
        "message": item.message,
        "fqn": item.fqn,
        "keys": list(item.keys),
        "dtype": tensor.dtype if tensor else None,
        "global_shape": list(tensor.global_shape) if tensor else None,
        "region": _box(region) if region else None,
        "ranks": ranks_named(ckpt, finding.at),
        "mesh": mesh,
        "chunks": chunks,
        "file": finding.at.file or None,
        "byte_range": list(finding.at.byte_range) if finding.at.byte_range else None,
        "confidence": finding.confidence,
        "inferred_from": finding.inferred_from or None,
        "why": item.why,
        "notes": [{"label": label, "text": text} for label, text in notes if label != "hint"],
        "detail": list(finding.detail),
        "lost_files": [{"of": whose or None, "files": list(names)} for whose, names in finding.lost_files],
        "hint": "; ".join(text for label, text in notes if label == "hint") or None,
        "url": None,
        "group": f"{item.code}/{group.number}",
        "fingerprint": item.fingerprint,
        "ignored": ignored and {"by": ignored.by} | ({"reason": ignored.reason} if ignored.reason else {}),
    }


def place_of(ckpt: Checkpoint, record: int) -> dict[str, Any]:
    """Where the bytes of a record are; None for what is stored nowhere, by a row of -1."""
    file, offset, length = ckpt.byte_range_of(record) if record >= 0 else (None, None, None)
    return {"file": file, "byte_offset": offset, "byte_length": length}


def _box(box: Box) -> dict[str, Any]:
    return {"offsets": list(box.offsets), "sizes": list(box.sizes)}
