"""Reporters: a Report as text, in which no name is a command of a CI runner. None prints; the command line does."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from ckptlint.lint.report import Report
from ckptlint.lint.settings.options import FORMATS, ReportFormat
from ckptlint.model.text import JSON_ESCAPE, MARKUP_ESCAPE, inert
from ckptlint.reporters.style import Style

Render = Callable[[Report, Style], str]

_ESCAPES = {"json": JSON_ESCAPE, "markup": MARKUP_ESCAPE}
"""How `inert` escapes in a syntax, if not visibly."""


def _imported_when_called(form: ReportFormat) -> Render:
    """One run writes one or two formats: the others are not imported."""

    def render(report: Report, style: Style) -> str:
        text = cast(Render, import_module(f"ckptlint.reporters.{form.module}").render)(report, style)
        if form.syntax == "commands":
            return text
        return inert(text, *([_ESCAPES[form.syntax]] if form.syntax in _ESCAPES else []))

    return render


REPORTERS: dict[str, Render] = {
    name: _imported_when_called(form) for name, form in {**FORMATS, "statistics": ReportFormat("statistics")}.items()
}
"""What makes each format, and the table of `--statistics`."""
