"""Which rank or file holds which layers and parts, as text: a mark for each, equal rows folded (`show --ranks`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.analysis.holdings import CELL_STATES, Column, Holdings
from ckptlint.geometry.chunk_map import MARKS
from ckptlint.model.text import braces, human_bytes, named_ranks, plural, ranges, some
from ckptlint.reporters.style import Style, cut

_LETTERS = {"embedding": "e", "stack": "s", "norm": "n", "head": "h", "rest": "o"}
_WORDS = {"e": "embedding", "s": "stacked layers", "n": "norms outside of layers", "h": "head", "o": "others"}
_NAME, _SIZES, _ROWS = 28, 26, 40  # characters, characters, lines
_PARTLY = len(CELL_STATES)
_LOST = CELL_STATES.index("failed")

Run = list[int]
"""The numbers of the columns that share a mark."""


def matrix(held: Holdings, style: Style) -> Iterator[str]:
    """The lines: a header, a row for all ranks or files that look the same, a legend, and what stands out in words."""
    groups = _alike(held)
    shown = sorted(groups, key=lambda rows: not _is_lost(held, rows[0]))[:_ROWS] if len(groups) > _ROWS else groups
    labels = [_label(held, rows) for rows in shown]
    side = max(map(len, labels), default=0)
    wide = style.width - side - _SIZES
    sections = _sections(held.columns, wide)
    title = next((t for t in range(20, 3, -1) if sum(_wide(section, t) for section in sections) <= wide), 4)
    room = [_wide(section, title) - 1 for section in sections]
    marks = dict(enumerate((".#" if style.ascii_only else "·■") + "2" + "".join(MARKS.values())[1:] + "+"))
    pad = " " * (side + 2)
    yield pad + " ".join(cut(name, width).ljust(width) for (name, _), width in zip(sections, room, strict=True))
    letters = (_heads(held.columns, runs).ljust(width) for (_, runs), width in zip(sections, room, strict=True))
    yield f"{pad}{' '.join(letters)}       size  model  optim"
    used: set[int] = set()
    for rows, label in zip(shown, labels, strict=True):
        states = _states(held, rows[0])
        cells = [[_merged(states[run]) for run in runs] for _, runs in sections]
        used.update(*cells)
        texts = ("".join(map(marks.get, own)).ljust(width) for own, width in zip(cells, room, strict=True))  # type: ignore[arg-type]
        drawn = re.sub(r"[!%/]+", lambda found: style.lost(found[0]), " ".join(texts))
        yield f"{label:<{side}}  {drawn} {_sizes(held, rows)}"
    if len(groups) > _ROWS:
        yield f"and {plural(len(groups) - _ROWS, 'more row')} that differ; --format json has all"
    yield ""
    yield from style.wrap(
        _legend(
            held.columns, sections, any(len(name) > width for (name, _), width in zip(sections, room, strict=True))
        ),
        "  ",
        "",
    )
    names = dict(enumerate((*CELL_STATES, "some of these layers")))
    yield from style.wrap("   ".join(f"{marks[state]} {names[state]}" for state in sorted(used)), "  ", "")
    yield from (line for sentence in _sentences(held) for line in style.wrap(sentence, "  ", ""))


def as_json(held: Holdings) -> dict[str, Any]:
    """The matrix as plain values; `cells` has for each state the numbers of the columns, all others are `nothing`."""
    rows = []
    for row, name in enumerate(held.names):
        cells: dict[str, list[int]] = {}
        for at in range(held.starts[row], held.starts[row + 1]):
            cells.setdefault(CELL_STATES[held.state[at]], []).append(int(held.column[at]))
        size, factor = int(held.size[row]), round(float(held.factor[row]), 3)
        rows.append(
            {
                "name": name,
                "rank": None if held.ranks[row] < 0 else int(held.ranks[row]),
                "files": held.files[row],
                "bytes": None if size < 0 else size,
                "model_bytes": int(held.model[row]),
                "optimizer_bytes": int(held.optimizer[row]),
                "times_median": factor,
                "cells": cells,
            }
        )
    columns = [
        {"section": c.section, "place": c.place, "block": c.block, "layer": None if c.layer < 0 else c.layer}
        for c in held.columns
    ]
    lost = [{"row": row, "file": file, "state": CELL_STATES[state]} for row, file, state in held.lost]
    return {"columns": columns, "rows": rows, "lost": lost, "chunks_in_no_file": held.unfiled}


# ---------------------------------------------------------------- rows


def _alike(held: Holdings) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for row, (start, stop) in enumerate(zip(held.starts, held.starts[1:], strict=False)):
        cells = held.column[start:stop].tobytes(), held.state[start:stop].tobytes()
        found.setdefault((cells, held.out_of_balance[row], held.size[row] < 0), []).append(row)
    return list(found.values())


def _states(held: Holdings, row: int) -> npt.NDArray[np.uint8]:
    states = np.zeros(len(held.columns), np.uint8)
    cells = slice(held.starts[row], held.starts[row + 1])
    states[held.column[cells]] = held.state[cells]
    return states


def _is_lost(held: Holdings, row: int) -> bool:
    return bool((_states(held, row) >= _LOST).any())


def _label(held: Holdings, rows: Sequence[int]) -> str:
    if (held.ranks[rows] >= 0).all():
        return cut(named_ranks(held.ranks[rows].tolist()), _NAME)
    return some((cut(name, _NAME) for name in braces(held.names[row] for row in rows)), 1)


def _sizes(held: Holdings, rows: Sequence[int]) -> str:
    size = held.size[rows]
    if size[0] < 0:
        return f"{'missing' if _is_lost(held, rows[0]) else 'unknown':>10}"
    about = "~" if len({human_bytes(int(each)) for each in size}) > 1 else ""
    total = max(int(size.sum()), 1)
    share = (f"{int(part[rows].sum()) / total:>7.0%}" for part in (held.model, held.optimizer))
    return f"{about + human_bytes(int(np.median(size))):>10}{''.join(share)}"


# ---------------------------------------------------------------- columns


def _sections(columns: Sequence[Column], room: int) -> list[tuple[str, list[Run]]]:
    """Each section with the columns of its marks: so many layers in one that the marks fit."""
    layers = sum(column.layer >= 0 for column in columns)
    names = [*dict.fromkeys(column.section for column in columns)]
    per = ceil(layers / max(room - (len(columns) - layers) - len(names), len(names), 1)) or 1
    found: list[tuple[str, list[Run]]] = []
    for name in names:
        runs: list[Run] = []
        own = [number for number, column in enumerate(columns) if column.section == name]
        for _, group in groupby(own, key=lambda number: (columns[number].place, columns[number].block)):
            alike = [*group]
            runs += [alike[start : start + per] for start in range(0, len(alike), per)]
        found.append((name, runs))
    return found


def _wide(section: tuple[str, list[Run]], title: int) -> int:
    return max(len(section[1]), min(len(section[0]), title)) + 1


def _heads(columns: Sequence[Column], runs: Sequence[Run]) -> str:
    """A letter above each mark, and above those of layers the first and the last number where there is room."""
    text = ""
    for _, group in groupby(runs, key=lambda run: (columns[run[0]].place, columns[run[0]].block)):
        own = [*group]
        first, last = columns[own[0][0]], str(columns[own[-1][-1]].layer)
        head = _LETTERS.get(first.place) or str(first.layer)
        text += (head + last.rjust(len(own) - len(head)) if len(own) > len(head) + len(last) else head)[: len(own)]
    return text


def _legend(columns: Sequence[Column], sections: Sequence[tuple[str, list[Run]]], trimmed: bool) -> str:
    blocks: dict[str, set[int]] = {}
    for column in columns:
        if column.layer >= 0:
            blocks.setdefault(column.block, set()).add(column.layer)
    per = max((len(run) for _, runs in sections for run in runs), default=1)
    parts = [
        f"{letter} {_WORDS[letter]}"
        for letter in _LETTERS.values()
        if letter in {_LETTERS.get(c.place) for c in columns}
    ]
    parts += [f"{cut(block)} {ranges(layers)}" for block, layers in blocks.items()]
    many = f" ({per} layers a mark)" if per > 1 else ""
    return (
        ("columns: " + ", ".join(name for name, _ in sections) + "; each: " if trimmed else "")
        + ", ".join(parts)
        + many
    )


def _merged(states: npt.NDArray[np.uint8]) -> int:
    worst = int(states.max())
    return _PARTLY if worst < _LOST and worst and not states.all() else worst


# ---------------------------------------------------------------- words


def _sentences(held: Holdings) -> Iterator[str]:
    for state in range(_LOST, len(CELL_STATES)):
        if files := {name: row for row, name, own in held.lost if own == state}:
            rows = [*dict.fromkeys(files.values())]
            of = f"of {_label(held, rows)}: " if (held.ranks[rows] >= 0).all() else ""
            yield f"{CELL_STATES[state]} {of}{some(map(cut, files), 3)}"
    odd = np.flatnonzero(held.out_of_balance)
    for row in odd[np.argsort(-np.abs(np.log(held.factor[odd])), kind="stable")][:4].tolist():
        yield f"{held.names[row]} has {held.factor[row]:.1f} times the bytes that are usual for its like"
    if len(odd) > 4:
        yield f"and {plural(len(odd) - 4, 'more row')} more than 20 % off the median of their like"
    for section, lacking in held.without().items():
        blocks = dict.fromkeys(column.block for column in lacking)
        where = (f"{block} {ranges(c.layer for c in lacking if c.block == block)}" for block in blocks)
        yield f"no {section} for {', '.join(where)}"
    if held.unfiled:
        yield f"{plural(held.unfiled, 'chunk')} in no file"
