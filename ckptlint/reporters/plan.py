"""A plan as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model.text import (
    at_most,
    fold_names,
    human_bytes,
    join_words,
    named_ranks,
    plural,
    shape_text,
    table,
    verb,
)
from ckptlint.planning.outcome import Constraint, Cost, Plan
from ckptlint.reporters.contents.tensor_table import fitted
from ckptlint.reporters.full import header
from ckptlint.reporters.style import Style, cut

SCHEMA = "ckptlint.plan/1"
NO_ROOM = "Loads, but does not fit"
_PATTERNS = 6  # of keys
_NODES = 16


# ---------------------------------------------------------------- text


def as_text(plan: Plan, style: Style) -> str:
    """The verdict, what it rests on, and one table of what the ranks read."""
    head = [header(plan.checkpoint, style), *style.wrap(job_line(plan), "    ", "  ")]
    word, sentence = verdict_line(plan)
    painted = style.paint(word, "good" if not plan.exit_code else "error")
    verdict = "\n".join(style.wrap(f"{word}: {sentence}", "    ", "")).replace(word, painted, 1)
    blocks = ["\n".join(head), verdict]
    if plan.mismatches:
        table_of_shapes = fitted([*SHAPES_HEAD], shape_rows(plan), style.width)
        blocks.append("\n".join([style.paint(shapes_heading(plan), "bold"), *table_of_shapes]))
    blocks += ["\n".join(_section(*section, style)) for section in sections(plan)]
    if not style.quiet:
        costs = table(rows(plan.cost), TABLE_HEAD, colalign=("left", *["right"] * 4))
        blocks += [costs, "\n".join(line for text in plan_facts(plan) for line in style.wrap(text, "  ", ""))]
    if plan.nodes:
        blocks.append("\n".join(_nodes(plan, style)))
    return "\n\n".join(block for block in blocks if block) + "\n"


def job_line(plan: Plan) -> str:
    """The job in a line."""
    form = "by its own state dict" if plan.form == "exact" else "by sizes of axes alone"
    return f"into {plan.to}: {plural(plan.world, 'rank')}, {form}"


def verdict_line(plan: Plan) -> tuple[str, str]:
    """The verdict in a word or two, and the sentence that follows it."""
    if plan.missing:
        first = f"torch raises RuntimeError: Missing key in checkpoint state_dict: {cut(plan.missing[0])}."
        return "Does not load", first
    if plan.mismatches:
        item = plan.mismatches[0]
        stored, wanted = (f"torch.Size({[*shape]})" for shape in (item.stored, item.wanted))
        return "Does not load", f"torch raises ValueError: Size mismatch between saved {stored} and current: {wanted}"
    if failing := [item for item in plan.constraints if item.effect == "fails"]:
        return "Does not load", f"{plural(len(failing), 'reason')} below."
    if plan.astray:
        return "Does not load", f"nodes lack parts of {plural(len(plan.astray), 'key')}."
    if plan.exit_code:
        lost = next((item.sentence for item in plan.constraints if item.effect == "drops"), "")
        return ("Loads, but loses something", f"{lost}.") if lost else (NO_ROOM, memory_sentence(plan))
    if plan.form == "quick":
        return "Loads", "as far as sizes tell; only the job's own code says which keys it asks for (--to job.py:NAME)."
    return "Loads", "every key that the job asks for is there, in the shape that it wants."


def sections(plan: Plan) -> list[tuple[str, list[str], list[str]]]:
    """(heading, keys, further lines) beside the cost."""
    blocks: list[tuple[str, list[str], list[str]]] = []

    def add(heading: str, keys: Iterable[str], *lines: str) -> None:
        names = [*keys]
        if names or lines:
            blocks.append((heading, names, [line for line in lines if line]))

    if plan.missing:
        untouched = "with allow_partial_load=True they keep what the job put there"
        add(f"Not in the checkpoint: {plural(len(plan.missing), 'key')}", plan.missing, untouched)
    if plan.astray:
        add(f"Partly on another node: {plural(len(plan.astray), 'key')}", plan.astray)
    for effect, word in (("fails", "Refused"), ("drops", "Lost"), ("note", "Note")):
        for item in plan.constraints:
            if item.effect == effect and not item.guessed:
                add(f"{word}: {item.sentence}", item.keys, item.source and f"source: {item.source}")
    changes = grouped(((change.stored, change.wanted, change.loses), change.key) for change in plan.converted)
    for (stored, wanted, loses), keys in changes.items():
        add(f"Converted from {stored} to {wanted}{', which loses precision' if loses else ''}", keys)
    if plan.unexpected:
        add(f"In the checkpoint, but not asked for: {plural(len(plan.unexpected), 'key')}", plan.unexpected)
    for item in plan.constraints:
        if item.guessed:
            add(f"Guessed: {item.sentence}", item.keys)
    return blocks


SHAPES_HEAD = ("key", "stored", "wanted")


def shapes_heading(plan: Plan) -> str:
    """What stands above `shape_rows`."""
    return f"With a different shape: {plural(len(plan.mismatches), 'tensor')}"


def shape_rows(plan: Plan) -> list[list[str]]:
    """The tensors that the job wants in another shape, folded over layers, below `SHAPES_HEAD`."""
    keys = grouped(((item.stored, item.wanted), item.key) for item in plan.mismatches)
    return [
        [name, shape_text(stored), shape_text(wanted)]
        for (stored, wanted), names in keys.items()
        for name in patterns(names)
    ]


def patterns(keys: Sequence[str]) -> list[str]:
    """Keys folded over layers, cut after some."""
    folded = [cut(name) for name in fold_names(keys)]
    return folded if len(folded) <= _PATTERNS + 1 else at_most(folded, _PATTERNS, "pattern", "and ")


def _section(heading: str, keys: list[str], lines: list[str], style: Style) -> list[str]:
    first, *rest = style.wrap(heading, "    ", "")
    texts = filter(None, [listed_patterns(keys), *lines])
    return [style.paint(first, "bold"), *rest, *(line for text in texts for line in style.wrap(text, "    ", "  "))]


def listed_patterns(keys: Sequence[str]) -> str:
    """Keys in a line."""
    return ", ".join(patterns(keys))


TABLE_HEAD = ("by bytes read", "needed", "read", "requests", "files")


def rows(cost: Cost) -> list[tuple[str, ...]]:
    """The least, the median and the most that a rank reads, and all ranks together."""
    order = np.argsort(cost.read[cost.kind], kind="stable").tolist()
    words: dict[tuple[str, ...], tuple[int, list[str]]] = {}
    for word, rank in {"least": order[0], "median": order[len(order) // 2], "most": cost.worst[0]}.items():
        kind = int(cost.kind[rank])
        amounts = *_amounts(cost, [kind]), f"{len(cost.files[kind]):,}"
        words.setdefault(amounts, (rank, []))[1].append(word)
    rank_rows = [
        (f"{', '.join(amount)} (rank {rank})" if len(cost.needed) > 1 else "each", *amounts)
        for amounts, (rank, amount) in words.items()
    ]
    opened = len(np.unique(np.concatenate(cost.files)))
    return [*rank_rows, (f"all {len(cost.kind):,}", *_amounts(cost, cost.kind), f"{opened:,}")]


def _amounts(cost: Cost, kinds: Any) -> tuple[str, str, str]:
    needed, read, requests = (int(column[kinds].sum()) for column in (cost.needed, cost.read, cost.requests))
    return human_bytes(needed), human_bytes(read), f"{requests:,}"


def plan_facts(plan: Plan) -> list[str]:
    """What the table does not show: amplification, the ideal, the worst ranks, the balance of the writers."""
    cost = plan.cost
    read = int(cost.read[cost.kind].sum())
    is_said = plan.memory is None or verdict_line(plan)[0] == NO_ROOM
    lines = [] if is_said else [f"{'Fits' if plan.fits else 'Does not fit'}: {memory_sentence(plan)}"]
    if read:
        worst = named_ranks(cost.worst).capitalize()
        most = human_bytes(int(cost.read.max()))
        more = f"{worst} {verb(len(cost.worst), 'reads')} the most: {most}, {_of_mean(cost.read[cost.kind])} the mean."
        lines.append(more if len(cost.worst) < len(cost.kind) else f"All ranks read the same amount: {most}.")
        amplified = f"Read amplification {cost.amplification:.2f}: bytes read per byte needed, ideally 1."
        lines.append(f"{amplified} Reading each needed record once would be {human_bytes(cost.distinct)}.")
    if len(cost.written) > 1:
        sizes = np.array([*cost.written.values()])
        heaviest = max(cost.written, key=lambda rank: cost.written[rank])
        least, largest = (human_bytes(int(size)) for size in (sizes.min(), sizes.max()))
        wrote = f"{plural(len(sizes), 'rank')} wrote it, {least} to {largest} each"
        lines.append(f"{wrote}; rank {heaviest} wrote {_of_mean(sizes)} the mean.")
    return lines


def memory_sentence(plan: Plan) -> str:
    """What the rank that needs the most needs of the memory that was named."""
    needed = plan.cost.needed[plan.cost.kind]
    most, rank = int(needed.max(initial=0)), int(needed.argmax())
    least = "at least " if plan.verdict == "fails" else ""  # what it cannot load is not counted
    return (
        f"rank {rank} needs {least}{human_bytes(most)} of {human_bytes(plan.memory or 0)} for what it loads, as "
        "stored; gradients, activations and buffers come on top."
    )


def _of_mean(values: Any) -> str:
    mean = float(values.mean())
    return f"{float(values.max()) / mean if mean else 1.0:.2f} times"


def _nodes(plan: Plan, style: Style) -> list[str]:
    is_own = any(node.absent for node in plan.nodes)
    lines = [style.paint("What each node must see, besides .metadata", "bold")]
    for number, node in enumerate(plan.nodes[:_NODES]):
        low, high = node.ranks
        amount = f"{plural(len(node.files), 'file')}, {human_bytes(node.bytes)}"
        ranks = named_ranks(range(low, high + 1))
        text = f"node {number} ({ranks}): {amount}: {listed_patterns(node.files) or 'none'}"
        if is_own:
            text += f"; lacks {join_words(patterns(node.absent)) or 'none'}"
        lines += style.wrap(text, "    ", "  ")
    if len(plan.nodes) > _NODES:
        lines.append(f"  and {plural(len(plan.nodes) - _NODES, 'more node')} (--format json has all)")
    return lines


# ---------------------------------------------------------------- JSON


def as_json(plan: Plan) -> str:
    """All of it; ranks that read the same are listed each."""
    cost = plan.cost
    files = [[cost.names[row] for row in of_kind.tolist()] for of_kind in cost.files]
    columns = {"needed_bytes": cost.needed, "read_bytes": cost.read, "requests": cost.requests}
    document = {
        "schema": SCHEMA,
        "verdict": plan.verdict,
        "exit_code": plan.exit_code,
        "checkpoint": plan.checkpoint.path,
        "form": plan.form,
        "to": plan.to,
        "world": plan.world,
        "missing": [*plan.missing],
        "unexpected": [*plan.unexpected],
        "shape_mismatch": [
            {"key": item.key, "stored": [*item.stored], "wanted": [*item.wanted]} for item in plan.mismatches
        ],
        "converted": [
            {"key": item.key, "stored": item.stored, "wanted": item.wanted, "loses": item.loses}
            for item in plan.converted
        ],
        "constraints": [
            _constraint(item) | {"source": item.source or None} for item in plan.constraints if not item.guessed
        ],
        "guessed": [_constraint(item) for item in plan.constraints if item.guessed],
        "totals": {
            **{name: int(column[cost.kind].sum()) for name, column in columns.items()},
            "distinct_bytes": cost.distinct,
            "read_amplification": round(cost.amplification, 4),
        },
        "memory": None if plan.memory is None else {"bytes": plan.memory, "fits": plan.fits},
        "worst_ranks": [*cost.worst],
        "written_bytes": {str(rank): size for rank, size in cost.written.items()},
        "ranks": [
            {"rank": rank, **{name: int(column[kind]) for name, column in columns.items()}, "files": files[kind]}
            for rank, kind in enumerate(cost.kind.tolist())
        ],
        "nodes": [
            {"node": number, "ranks": node.ranks, "bytes": node.bytes, "files": node.files, "absent": node.absent}
            for number, node in enumerate(plan.nodes)
        ],
        "astray": [*plan.astray],
    }
    return json.dumps(document, indent=2) + "\n"


def _constraint(item: Constraint) -> dict[str, Any]:
    return {"effect": item.effect, "sentence": item.sentence, "keys": [*item.keys]}
