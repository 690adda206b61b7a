"""A plan as one self-contained page, with one histogram: what each rank reads."""

from __future__ import annotations

from html import escape

import numpy as np

from ckptlint.model.text import human_bytes, named_ranks
from ckptlint.planning.outcome import Cost, Plan
from ckptlint.reporters import plan as texts
from ckptlint.reporters.full import summary
from ckptlint.reporters.html.page import environment, frame, markup

_BARS = 64
_HEIGHT, _TOP = 220, 12


def render(plan: Plan) -> str:
    """The page; every text is escaped, by jinja2 or here."""
    word, sentence = texts.verdict_line(plan)
    nodes = []
    for number, node in enumerate(plan.nodes):
        ranks, size = named_ranks(range(node.ranks[0], node.ranks[1] + 1)), human_bytes(node.bytes)
        files, absent = (texts.listed_patterns(names) for names in (node.files, node.absent))
        nodes.append((number, ranks, len(node.files), size, files, absent))
    template = environment().get_template("plan.html.jinja")
    return template.render(
        **frame(),
        verdict="fail" if plan.exit_code else "pass",
        icon="✕" if plan.exit_code else "✓",
        word=word,
        sentence=sentence[:1].upper() + sentence[1:],
        job=texts.job_line(plan),
        path=plan.checkpoint.path,
        facts=summary(plan.checkpoint),
        sections=[(heading, texts.patterns(keys), lines) for heading, keys, lines in texts.sections(plan)],
        shapes=texts.shape_rows(plan),
        shapes_heading=texts.shapes_heading(plan),
        shapes_head=texts.SHAPES_HEAD,
        head=texts.TABLE_HEAD,
        rows=texts.rows(plan.cost),
        lines=texts.plan_facts(plan),
        histogram=markup(histogram(plan.cost)),
        nodes=nodes,
        is_own=any(node.absent for node in plan.nodes),
    )


def histogram(cost: Cost) -> str:
    """What each rank reads, as SVG: a bar for each rank, or for neighbouring ranks the largest of them.

    The solid part of a bar is what is needed, the rest what the reader reads beside it.
    """
    read, needed = cost.read[cost.kind], cost.needed[cost.kind]
    world = len(read)
    edges = np.linspace(0, world, min(world, _BARS) + 1).astype(int)
    top = max(int(read.max(initial=0)), int(needed.max(initial=0)), 1)
    step = 100 / (len(edges) - 1)
    bottom = _TOP + _HEIGHT
    tags = []
    for share in (0, 0.5, 1):
        y = bottom - _HEIGHT * share
        tags.append(f'<line class="rule" x2="100%" y1="{y:g}" y2="{y:g}"/>')
        tags.append(f'<text class="side" x="-8" y="{y + 4:g}">{escape(human_bytes(int(top * share)))}</text>')
    for number, (low, high) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        at = low + int(read[low:high].argmax())
        title = (
            f"{named_ranks(range(low, high))}: {human_bytes(int(read[at]))} read, {human_bytes(int(needed[at]))} needed"
        )
        place, bars = f'x="{step * (number + 0.1):.2f}%" width="{step * 0.8:.2f}%"', []
        for css, value in (("read", int(read[at])), ("needed", min(int(needed[at]), int(read[at])))):
            height = _HEIGHT * value / top
            bars.append(f'<rect class="{css}" {place} y="{bottom - height:.2f}" height="{height:.2f}"/>')
        tags.append(f"<g><title>{escape(title)}</title>{''.join(bars)}</g>")
    for rank, anchor, at in ((0, "start", 0), (world - 1, "end", 100))[:world]:
        tags.append(f'<text text-anchor="{anchor}" x="{at}%" y="{bottom + 18}">rank {rank:,}</text>')
    label = 'role="img" aria-label="What each rank reads"'
    return f'<svg class="bars" {label} height="{bottom + 26}">{"".join(tags)}</svg>'
