"""Reporters: a Report as text. None of them prints; the command line does."""

from __future__ import annotations

from collections.abc import Callable

from ckptlint.report import Report
from ckptlint.reporters import concise, full, html, json_report
from ckptlint.reporters.style import Style

REPORTERS: dict[str, Callable[[Report, Style], str]] = {
    "full": full.render,
    "concise": concise.render,
    "json": json_report.render,
    "json-v1": json_report.render,
    "html": html.render,
}

SUFFIXES = {".json": "json", ".txt": "full", ".html": "html"}
"""Formats by the suffix of an output file."""
