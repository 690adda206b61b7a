"""Which rank or file holds which layers and parts, as text: a mark for each, equal rows folded (`show --ranks`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.analysis.ranks.contents import CELL_STATES, Column, RankContents
from ckptlint.geometry.chunk_map import MARKS
from ckptlint.grouping import grouped
from ckptlint.model.text import first_names, fold_names, human_bytes, named_ranks, plural, ranges, verb
from ckptlint.reporters.style import Style, cut

_LETTERS = {"embedding": "e", "stack": "s", "norm": "n", "head": "h", "rest": "o"}
_WORDS = {"e": "embedding", "s": "stacked layers", "n": "norms outside of layers", "h": "head", "o": "others"}
_SHORT = {"embedding": "embedding", "stack": "stacked", "norm": "norms", "head": "head", "rest": "others"}
_NAME, _SIZES, _ROWS = 28, 26, 40  # characters, characters, lines
STATE_NAMES = (*CELL_STATES, "some of these layers")
_PARTLY = len(CELL_STATES)
_LOST = CELL_STATES.index("failed")

Run = list[int]
"""The numbers of the columns that share a mark."""

Section = tuple[str, str, list[Run | None]]
"""Its name, what stands above its marks, and what each mark is of; None where the text above is longer."""


def matrix(contents: RankContents, style: Style) -> Iterator[str]:
    """The lines: a header, a row for all ranks or files that look the same, a legend, and what stands out in words."""
    if not contents.columns:
        yield "no file holds any tensor of the metadata"
        return
    shown, left = folded(contents)
    side = max(len(label) for label, _ in shown)
    room = style.width - side - 2
    bands = _bands(contents.columns, room, len(shown))
    marks = dict(enumerate((".#" if style.ascii_only else "·■") + "2" + "".join(MARKS.values())[1:] + "+")) | {-1: " "}
    pad = " " * (side + 2)
    used: set[int] = set()
    legends = dict[str, None]()
    for band in bands:
        is_last = band is bands[-1]
        heads, places, legend = places_of([contents.columns[i] for i in band], room - (_SIZES - 2) * is_last, True)
        legends[legend] = None
        yield from [(pad + heads[0]).rstrip()] if band else []
        yield f"{pad}{heads[1]}{'       size  model  optim' * is_last}".rstrip()
        for label, rows in shown:
            cells = cells_of(contents, rows[0], [run and [band[i] for i in run] for run in places])
            used.update(cells)
            drawn = re.sub(r"[!%/]+", lambda match: style.lost(match[0]), "".join(marks[cell] for cell in cells))
            size, *shares = sizes_of(contents, rows)
            sizes = f" {size:>10}{''.join(f'{share:>7}' for share in shares)}"
            yield f"{label:<{side}}  {drawn}{sizes * is_last}".rstrip()
        if not is_last:
            yield ""
    if left:
        yield f"and {plural(left, 'more row')} that differ; --format json has all"
    yield ""
    yield from (line for legend in legends if legend for line in style.wrap(legend, "  ", ""))
    yield from style.wrap("   ".join(f"{marks[i]} {STATE_NAMES[i]}" for i in sorted(used) if i >= 0), "  ", "")
    yield from (line for sentence in sentences(contents) for line in style.wrap(sentence, "  ", ""))


def as_json(contents: RankContents) -> dict[str, Any]:
    """The matrix as plain values; `cells` has for each state the numbers of the columns, all others are `nothing`."""
    rows = []
    starts = contents.starts
    for row, name in enumerate(contents.names):
        places = range(starts[row], starts[row + 1])
        cells = grouped((CELL_STATES[contents.state[at]], int(contents.column[at])) for at in places)
        size, factor = int(contents.size[row]), round(float(contents.factor[row]), 3)
        rows.append(
            {
                "name": name,
                "rank": None if contents.ranks[row] < 0 else int(contents.ranks[row]),
                "files": contents.files[row],
                "bytes": None if size < 0 else size,
                "model_bytes": int(contents.model[row]),
                "optimizer_bytes": int(contents.optimizer[row]),
                "times_median": factor,
                "cells": cells,
            }
        )
    columns = [
        {"section": c.section, "place": c.place, "block": c.block, "layer": None if c.layer < 0 else c.layer}
        for c in contents.columns
    ]
    lost = [{"row": row, "file": file, "state": CELL_STATES[state]} for row, file, state in contents.lost]
    return {"columns": columns, "rows": rows, "lost": lost, "chunks_in_no_file": contents.unfiled}


# ---------------------------------------------------------------- rows


def folded(contents: RankContents) -> tuple[list[tuple[str, list[int]]], int]:
    """Label and numbers of the rows that look the same, and how many more there are; the lost ones first if many."""
    groups = _alike(contents)
    shown = sorted(groups, key=lambda rows: not _is_lost(contents, rows[0]))[:_ROWS] if len(groups) > _ROWS else groups
    return [(_label(contents, rows), rows) for rows in shown], len(groups) - len(shown)


def cells_of(contents: RankContents, row: int, places: Sequence[Run | None]) -> list[int]:
    """For each place across its position in `STATE_NAMES`; -1 between two sections."""
    states = _states(contents, row)
    return [-1 if run is None else _merged(states[run]) for run in places]


def _alike(contents: RankContents) -> list[list[int]]:
    is_off, starts = contents.out_of_balance, contents.starts

    def look(row: int) -> tuple[object, ...]:
        cells = slice(starts[row], starts[row + 1])
        return contents.column[cells].tobytes(), contents.state[cells].tobytes(), is_off[row], contents.size[row] < 0

    return [*grouped((look(row), row) for row in range(len(contents.names))).values()]


def _states(contents: RankContents, row: int) -> npt.NDArray[np.uint8]:
    states = np.zeros(len(contents.columns), np.uint8)
    cells = slice(contents.starts[row], contents.starts[row + 1])
    states[contents.column[cells]] = contents.state[cells]
    return states


def _is_lost(contents: RankContents, row: int) -> bool:
    return bool((_states(contents, row) >= _LOST).any())


def _label(contents: RankContents, rows: Sequence[int]) -> str:
    if (contents.ranks[rows] >= 0).all():
        return cut(named_ranks(contents.ranks[rows].tolist()), _NAME)
    names = fold_names(contents.names[row] for row in rows)
    return first_names((cut(name, _NAME - 6 * (len(names) > 1)) for name in names), 1)


def sizes_of(contents: RankContents, rows: Sequence[int]) -> tuple[str, ...]:
    """The median size of rows, and the shares of model and optimizer; one word where no size is known."""
    size = contents.size[rows]
    if size[0] < 0:
        return ("missing" if _is_lost(contents, rows[0]) else "unknown",)
    about = "~" if len({human_bytes(int(count)) for count in size}) > 1 else ""
    total = max(int(size.sum()), 1)
    shares = (f"{int(sizes[rows].sum()) / total:.0%}" for sizes in (contents.model, contents.optimizer))
    return about + human_bytes(int(np.median(size))), *shares


# ---------------------------------------------------------------- columns


def _bands(columns: Sequence[Column], room: int, rows: int) -> list[list[int]]:
    """The numbers of the columns of each table, one below the other, so that names fit above the marks."""
    # the last has room for sizes; one table where all fit, some section fits nowhere, or the lines are too many
    bands: list[list[int]] = [[]]
    for _, section in groupby(range(len(columns)), key=lambda i: columns[i].section):
        numbers = [*section]
        if not _fits(columns, numbers, room):
            return [[*range(len(columns))]]
        bands = [*bands[:-1], bands[-1] + numbers] if _fits(columns, bands[-1] + numbers, room) else [*bands, numbers]
    bands += [[]] * (not _fits(columns, bands[-1], room - _SIZES + 2))
    return bands if len(bands) * rows <= _ROWS else [[*range(len(columns))]]


def _fits(columns: Sequence[Column], numbers: Sequence[int], room: int) -> bool:
    sections, per = _sections([columns[i] for i in numbers], room, True)
    return per == 1 and sum(_wide(section, 20) for section in sections) <= room


def places_of(columns: Sequence[Column], wide: int, in_words: bool) -> tuple[tuple[str, str], list[Run | None], str]:
    """The two lines above the matrix, in words where they fit, the columns at each place, and what the letters mean."""
    sections, per = _sections(columns, wide, in_words)
    if in_words and sum(_wide(section, 4) for section in sections) > wide:
        return places_of(columns, wide, False)
    title = next((most for most in range(20, 4, -1) if sum(_wide(section, most) for section in sections) <= wide), 4)
    heads, places = ["", ""], list[Run | None]()
    for name, head, runs in sections:
        width = _wide((name, head, runs), title)
        heads = [heads[0] + cut(name, width - 1).ljust(width), heads[1] + head.ljust(width)]
        places += [*runs, *[None] * (width - len(runs))]
    is_cut = any(len(name) >= _wide((name, head, runs), title) for name, head, runs in sections)
    return (heads[0][:-1], heads[1][:-1]), places[:-1], _legend(columns, sections, per, is_cut, in_words)


def _sections(columns: Sequence[Column], room: int, in_words: bool) -> tuple[list[Section], int]:
    """The sections, and how many layers share a mark so that all fit; a mark is of the same layers in each section."""
    layers = grouped(sorted({(column.block, column.layer) for column in columns if column.layer >= 0}))
    number = {column: i for i, column in enumerate(columns)}
    kinds = [*dict.fromkeys((column.section, column.place, column.block) for column in columns)]
    most = sum(len(layers[block]) for _, place, block in kinds if place == "layer")
    names = [*dict.fromkeys(name for name, _, _ in kinds)]
    others = sum(place != "layer" for _, place, _ in kinds)
    per = ceil(most / max(room - others - 2 * len(names), len(names))) or 1
    sections = []
    for name in names:
        head, runs = "", list[Run | None]()
        for _, place, block in (kind for kind in kinds if kind[0] == name):
            if in_words:
                head += " " * bool(head)
                runs += [None] * (len(head) - len(runs))
            if place != "layer":
                head += _SHORT[place] if in_words else _LETTERS[place]
                runs.append([number[Column(name, place, block)]])
                continue
            marks = [layers[block][start : start + per] for start in range(0, len(layers[block]), per)]
            columns_of_mark = ([Column(name, place, block, layer) for layer in mark] for mark in marks)
            runs += [[number[column] for column in mark if column in number] for mark in columns_of_mark]
            first, last = str(marks[0][0]), str(marks[-1][-1])
            last = last if len(marks) > len(first) + len(last) else ""
            name_of = block if len(layers) > 1 else block.rpartition(".")[2]
            span = f"{name_of} {ranges(layers[block])}".ljust(len(marks))
            head += span if in_words else (first + last.rjust(len(marks) - len(first)))[: len(marks)]
        sections.append((name, head, runs))
    return sections, per


def _wide(section: Section, title: int) -> int:
    name, head, runs = section
    return max(len(runs), len(head), min(len(name), title)) + 1


def _legend(columns: Sequence[Column], sections: Sequence[Section], per: int, is_cut: bool, in_words: bool) -> str:
    blocks = grouped((column.block, column.layer) for column in columns if column.layer >= 0)
    places = {column.place for column in columns}
    texts = [f"{letter} {_WORDS[letter]}" for place, letter in _LETTERS.items() if place in places and not in_words]
    said = "" if in_words else "digits "
    named = (f"{said}{cut(block)} {ranges(layers)}" for block, layers in blocks.items())
    texts += named if said or per > 1 or any("." in block for block in blocks) else ()
    names = f"columns: {', '.join(name for name, _, _ in sections)}; " * is_cut + "above the marks: " * (not in_words)
    return (names + ", ".join(texts)).removesuffix("; ") + (f" ({per} layers a mark)" if per > 1 else "")


def _merged(states: npt.NDArray[np.uint8]) -> int:
    worst = int(states.max(initial=0))
    return _PARTLY if worst < _LOST and worst and not states.all() else worst


# ---------------------------------------------------------------- words


def sentences(contents: RankContents) -> Iterator[str]:
    """What stands out: what is lost, who is out of balance, what nobody holds."""
    for state in range(_LOST, len(CELL_STATES)):
        if files := {name: row for row, name, lost_state in contents.lost if lost_state == state}:
            rows = [*dict.fromkeys(files.values())]
            of = f"of {_label(contents, rows)}: " if (contents.ranks[rows] >= 0).all() else ""
            yield f"{CELL_STATES[state]} {of}{first_names(map(cut, files), 3)}"
    odd = np.flatnonzero(contents.out_of_balance)
    furthest = odd[np.argsort(-np.abs(np.log(contents.factor[odd])), kind="stable")].tolist()
    factors = grouped((f"{contents.factor[row]:.1f}", row) for row in furthest)
    for factor, rows in [*factors.items()][:4]:
        its = "its" if len(rows) == 1 else "their"
        yield f"{_label(contents, rows)} {verb(len(rows), 'has')} {factor} times the median size of {its} kind"
    if left := sum(map(len, [*factors.values()][4:])):
        yield f"and {plural(left, 'more row')} more than 20 % off the median"
    for section, lacking in contents.without().items():
        blocks = dict.fromkeys(column.block for column in lacking)
        where = (f"{block} {ranges(c.layer for c in lacking if c.block == block)}" for block in blocks)
        yield f"no {section} for {', '.join(where)}"
    if contents.unfiled:
        yield f"{plural(contents.unfiled, 'chunk')} in no file"
