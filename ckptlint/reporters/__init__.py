"""Reporters: a Report as text. None of them prints; the command line does."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from ckptlint.lint.options import FORMATS
from ckptlint.lint.report import Report
from ckptlint.reporters.style import Style

Render = Callable[[Report, Style], str]

_MODULES = {"html": "html.page", "json": "json_report"} | {
    name: f"ci.{name}" for name in ("github", "gitlab", "junit", "sarif")
}
"""Where a format is made, if not in the module of its own name."""


def _imported_when_called(module: str) -> Render:
    """One run writes one or two formats: the others are not imported."""

    def render(report: Report, style: Style) -> str:
        return cast(Render, import_module(f"ckptlint.reporters.{module}").render)(report, style)

    return render


REPORTERS: dict[str, Render] = {
    name: _imported_when_called(_MODULES.get(name, name)) for name in (*FORMATS, "statistics")
}
"""What makes each format, and the table of `--statistics`."""
