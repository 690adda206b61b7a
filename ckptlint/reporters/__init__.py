"""Reporters: a Report as text, in which no name is a command of a CI runner. None prints; the command line does."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from ckptlint.lint.options import FORMATS
from ckptlint.lint.report import Report
from ckptlint.model.text import JSON_ESCAPE, MARKUP_ESCAPE, inert
from ckptlint.reporters.style import Style

Render = Callable[[Report, Style], str]

_MODULES = {"html": "html.page", "json": "json_report"} | {
    name: f"ci.{name}" for name in ("github", "gitlab", "junit", "sarif")
}
"""Where a format is made, if not in the module of its own name."""

_ESCAPES = dict.fromkeys(("gitlab", "json", "sarif"), JSON_ESCAPE) | dict.fromkeys(("html", "junit"), MARKUP_ESCAPE)
"""How `inert` escapes in a format, if not visibly."""


def _imported_when_called(name: str) -> Render:
    """One run writes one or two formats: the others are not imported."""
    module = f"ckptlint.reporters.{_MODULES.get(name, name)}"

    def render(report: Report, style: Style) -> str:
        text = cast(Render, import_module(module).render)(report, style)
        if name == "github":  # which is made of commands, and of texts that it makes inert itself
            return text
        return inert(text, *([_ESCAPES[name]] if name in _ESCAPES else []))

    return render


REPORTERS: dict[str, Render] = {name: _imported_when_called(name) for name in (*FORMATS, "statistics")}
"""What makes each format, and the table of `--statistics`."""
