"""How the objects of the Python API look in a console and in a notebook (`ckptlint.shown`)."""

from __future__ import annotations

from typing import Any

from ckptlint.comparing.differences import Diff
from ckptlint.comparing.values.compare import Values
from ckptlint.lint.report import Report
from ckptlint.lint.steps.retention import Retention
from ckptlint.lint.steps.trust import Search
from ckptlint.model.text import MARKUP_ESCAPE, inert, plural
from ckptlint.planning.outcome import Plan
from ckptlint.reporters import full, plan, run
from ckptlint.reporters.comparing import diff, values
from ckptlint.reporters.html import page
from ckptlint.reporters.style import Style, cut
from ckptlint.shown import Shown

_ROWS = 100  # of a table
_STYLE = Style(ascii_only=False)


def as_text(shown: Shown) -> str:
    """What the command prints of it, on a terminal of 80 columns without colour."""
    match shown:
        case Report():
            text = full.render(shown, _STYLE)
        case Plan():
            text = plan.as_text(shown, _STYLE)
        case Diff():
            text = diff.as_text(shown, _STYLE)
        case Values():
            text = values.values_as_text(shown, _STYLE)
        case Search():
            text = "".join(f"{line}\n" for line in [*run.search_lines(shown), *filter(None, [shown.path])])
        case Retention():
            table = [run.decision_table(shown), ""] if shown.decisions else []
            text = "".join(f"{line}\n" for line in [*table, *run.retention_lines(shown), *shown.paths])
        case _:
            raise TypeError(f"{type(shown).__name__} has no text")
    return inert(text)


def as_html(shown: Shown) -> str:
    """The verdict and a table, as a part of a page; jinja2 escapes every text."""
    (word, *sentences), rows = _summary(shown)
    template = page.environment().get_template("view.html.jinja")
    html = template.render(
        word=word,
        sentences=[*filter(None, sentences)],
        head=[*rows[0]] if rows else [],
        rows=[["" if cell is None else cut(str(cell)) for cell in row.values()] for row in rows[:_ROWS]],
        more=plural(len(rows) - _ROWS, "more row") if len(rows) > _ROWS else "",
    )
    return inert(html, MARKUP_ESCAPE)


def _summary(shown: Shown) -> tuple[list[str], list[dict[str, Any]]]:
    """The verdict, what else is to be said, and the rows of the table."""
    match shown:
        case Report():
            return page.summary(shown), page.group_rows(shown)
        case Plan():
            return [*plan.verdict_line(shown), plan.job_line(shown), *plan.plan_facts(shown)], shown.rows()
        case Diff():
            return ["", "".join(diff.diff_verdict(shown))], shown.rows()
        case Values():
            return [*values.values_verdict(shown)[:2], *shown.sentences], shown.rows()
        case Search():
            return ["", *run.search_lines(shown)], shown.rows()
        case Retention():
            return ["", *run.retention_lines(shown)], shown.rows()
    raise TypeError(f"{type(shown).__name__} has no table")
