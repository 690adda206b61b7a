"""Reporters: a Report as text. None of them prints; the command line does."""

from __future__ import annotations

from collections.abc import Callable

from ckptlint.report import Report
from ckptlint.reporters import concise, full, github, gitlab, json_report, junit, markdown, sarif, statistics
from ckptlint.reporters.style import Style

REPORTERS: dict[str, Callable[[Report, Style], str]] = {
    "full": full.render,
    "concise": concise.render,
    "json": json_report.render,
    "json-v1": json_report.render,
    "sarif": sarif.render,
    "junit": junit.render,
    "github": github.render,
    "gitlab": gitlab.render,
    "markdown": markdown.render,
    "statistics": statistics.render,
}

SUFFIXES = {".json": "json", ".txt": "full", ".sarif": "sarif", ".xml": "junit", ".md": "markdown"}
"""Formats by the suffix of an output file."""
