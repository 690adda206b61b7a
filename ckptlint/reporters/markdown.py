"""The `markdown` format: for a pull-request comment, a job summary or a model card."""

from __future__ import annotations

import re

from ckptlint.lint.report import CheckpointReport, Report, worst
from ckptlint.model.text import plural
from ckptlint.patterns import lazy_pattern
from ckptlint.reporters.full import block, details, groups_to_show, summary, verdict
from ckptlint.reporters.style import Style, cut, cut_names

TEXT_LIMIT = 50_000
"""Characters after which findings are only counted: a GitHub comment holds 65,536."""
_WORDS = lazy_pattern(r"((?!www\.)[\w .,;:()/'+-](?!//)|`ckptlint [\w ]+`)*")  # no markup, mention or link
_MARKS = {"pass": "✅", "fail": "❌", "incomplete": "⚠️"}


def render(report: Report, style: Style) -> str:
    """A verdict line; per checkpoint a table of its groups, and each group as text with its chunk map."""
    if style.quiet >= 2:
        return ""
    style = style._replace(color=False)
    blocks = [f"## {_MARKS[report.verdict]} ckptlint: {report.verdict}"]
    blocks += [code(sentence) for sentence in report.unread]
    blocks.append("  \n".join(line if _WORDS.fullmatch(line) else code(line) for line in verdict(report, style)))
    blocks += [_fenced(details(report, style))] if style.verbose else []
    room = TEXT_LIMIT
    for part in report.checkpoints:
        texts = _checkpoint(part, style, room)
        room -= sum(map(len, texts))
        blocks += texts
    return "\n\n".join(blocks) + "\n"


def code(text: str, in_table: bool = False) -> str:
    r"""Any text as a code span of one line: no markup, link or mention in it takes effect.

    >>> print(code("a`b|c"), code("a|b", in_table=True))
    ``a`b|c`` `a\|b`
    """
    text = " ".join(text.split()) or " "
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return fence + pad + (text.replace("|", r"\|") if in_table else text) + pad + fence


def _checkpoint(part: CheckpointReport, style: Style, room: int) -> list[str]:
    """A checkpoint as texts: causes, a table of findings, and details of the first."""
    texts = [f"### {code(part.checkpoint.path)}\n\n{code(summary(part.checkpoint).replace('  ', ', '))}"]
    texts += [code(f"not known: {sentence}") for sentence in part.checkpoint.not_looked_at]
    texts += [f"**Cause:** {code(cause.sentence)}\n\n**Do:** {code(cause.do)}" for cause in part.causes]
    shown, left_out = worst(groups_to_show(part, style), style.per_rule)
    if not shown:
        return [*texts, "No problems." if not part.is_incomplete else "Not judged."]
    rows, details = [], []
    for group in shown:
        lead = group.lead
        problem = code(cut(cut_names(lead.title, lead.fqn)), in_table=True)
        row = f"| {lead.severity.label} | {lead.code} {lead.rule.name} | {problem} | {group.key_count} |"
        detail = "" if group in part.folded else _fenced("\n".join(block(part.checkpoint, group, style)))
        if len(row) + len(detail) > room:
            left_out[group.lead.code] += 1
            continue
        room -= len(row) + len(detail)
        rows.append(row)
        details += [detail] if detail else []
    if rows:
        texts.append("\n".join(["| severity | rule | problem | keys |", "|---|---|---|---:|", *rows]))
    more = [f"{plural(count, 'more group')} of {name} not shown." for name, count in left_out.items()]
    return texts + details + ([" ".join(more)] if more else [])


def _fenced(text: str) -> str:
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}text\n{text}\n{fence}"
