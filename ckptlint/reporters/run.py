"""What `ckptlint latest` and `ckptlint deletable` print of a run."""

from __future__ import annotations

from ckptlint.lint.settings.request import Request
from ckptlint.lint.steps.retention import Decision, Retention
from ckptlint.lint.steps.trust import JudgedStep, Search
from ckptlint.model.text import human_bytes, join_words, plural, table

_WARNINGS = 8  # that are shown
_WIDE = 29  # characters of a reason in a line of the table, so that 80 columns are enough


def search_lines(search: Search, quiet: int = 0) -> list[str]:
    """What was skipped and what was found, a sentence each; quiet as of `Style`."""
    if quiet >= 2:
        return []
    lines = [f"{step.name} skipped: {step.why}" for step in search.skipped]
    doubt = next((step.name for step in search.skipped if step.verdict == "not judged"), "")
    if search.newest is None:
        lines.append(f"no step passes, and {doubt} could not be judged" if doubt else "no step passes")
    elif doubt:
        lines.append(f"{search.newest.name} passes, but {doubt} may be a newer good step: no answer")
    else:
        parts = join_words(search.newest.parts) or "none of the named parts"
        lines += [f"{search.newest.name} passes (it holds {parts}){_with_warnings(search.newest)}"][quiet:]
        lines += [f"warning {sentence}" for sentence in search.newest.warnings[:_WARNINGS]]
    return lines + ([search.tracker] if search.tracker else [])


def not_judged_by(request: Request) -> list[str]:
    """What steps were not judged by, a sentence each; none where every byte was read."""
    rules = [f"{join_words([f'--{name}' for name in request.lenient])} left rules out"] if request.lenient else []
    read = "only some tensor bytes were read" if request.reading else "tensor bytes were not read"
    return rules + ([] if request.depth.reads_all else [f"{read}; --depth data reads them all"])


def retention_lines(retention: Retention) -> list[str]:
    """What could not be searched, and how many steps may be deleted, or why none may."""
    return [retention.refused or retention.sentence]


def decision_table(retention: Retention) -> str:
    """Each step, whether it is whole, and why it stays."""
    gone, rows = {*retention.paths}, []
    for decision in retention.decisions:
        why = "" if decision.step.path in gone else decision.kept_because
        rows.append((decision.step.name, _whole(decision), human_bytes(decision.step.size), why))
    head, most = ("step", "whole", "payload", "stays because"), (None, _WIDE, None, _WIDE)
    return table(rows, head, maxcolwidths=most)


def _with_warnings(step: JudgedStep) -> str:
    """How many warnings a step has that passes, to follow a sentence; "" without one."""
    return f", with {plural(len(step.warnings), 'warning')}" if step.warnings else ""


def _whole(decision: Decision) -> str:
    step = decision.step
    if step.verdict == "passes":
        return f"yes{_with_warnings(step)}"
    return f"{'not judged' if step.verdict == 'not judged' else 'no'}: {step.why}"
