"""The pictures of the HTML report, as SVG: chunk maps, strips of whole tensors, chunk graphs of one axis.

Every function returns markup whose texts are escaped. Colours and hatching come from the classes, in `report.css`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from ckptlint.geometry.chunk_map import Grid, MapCell, axis_label, fixed_label
from ckptlint.geometry.record_states import NOT_CHECKED, STATES, StateArray, chunk_states
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural
from ckptlint.model.tiling import Box, Tiling
from ckptlint.reporters.style import cut
from ckptlint.vocabulary.metadata_files import rank_of

if TYPE_CHECKING:
    import networkx as nx

_DIGIT = 7  # of the 12 px font, rounded up
_STRIP_WIDTH = 1000
_CUT_LIMIT = 200
_RUN_LIMIT = 64
_NODE_LIMIT = 5
_NODE, _LINK, _LANE = 84, 56, 52
_CELL, _BAR = 8, 96

CELL_KINDS = ("nothing", "held", "overlap", "unchecked", "lost-failed", "lost-cut", "lost-missing", "partly")
"""The classes of `ranks.STATE_NAMES`, in the same order."""


def chunk_map(ckpt: Checkpoint, grid: Grid, marked: Iterable[Box]) -> str:
    """The grid of a finding: one rectangle per cell, what the finding is about outlined."""
    columns, rows = _labels(grid.columns), _labels(grid.rows)
    states = chunk_states(ckpt, grid.tensor)
    width = max(72, *(len(label) * _DIGIT + 12 for label in columns))
    height = 48 if grid.down is None else 36
    left = len(columns[0]) * _DIGIT // 2 + 6
    if grid.down is not None:
        left = max(left, max(map(len, rows)) * _DIGIT + 12)
    top = 42
    total = left + width * len(grid.columns) + len(columns[-1]) * _DIGIT // 2 + 6
    bottom = top + height * len(grid.rows)
    across = axis_label(ckpt, grid, grid.across)
    caption = f"{across} →" if grid.down is None else f"{axis_label(ckpt, grid, grid.down)} down, {across} across"
    tags = [_text(caption + fixed_label(grid), left, 13, "axis")]
    tags += [_text(label, left + i * width, top - 7, "cut") for i, label in enumerate(columns)]
    if grid.down is not None:
        tags += [_text(label, left - 8, top + i * height + 4, "cut side") for i, label in enumerate(rows)]
    counts = dict.fromkeys(("gap", "overlap", "outside"), 0)
    for r, c in product(range(len(grid.rows)), range(len(grid.columns))):
        kind = _cell_kind(grid, states, r, c)
        counts[kind] = counts.get(kind, 0) + 1
        x, y = left + c * width, top + r * height
        title = _tag("title", escape(_cell_title(ckpt, grid, states, r, c, kind)))
        tags.append(_tag("rect", title, class_=kind, x=x, y=y, width=width, height=height))
        if name := _cell_name(grid, r, c):
            tags.append(_text(name, x + width // 2, y + height // 2 + 4, "name"))
    solid, dashed = _edges(grid, left, top, width, height)
    tags.append(_tag("path", class_="boundary", d=dashed) if dashed else "")
    tags.append(_tag("path", class_="edge", d=solid))
    for c, r, wide, tall in filter(None, (_outline(grid, box) for box in marked)):
        x, y = left + c * width, top + r * height
        tags.append(_tag("rect", class_="region", x=x, y=y, width=wide * width, height=tall * height))
    amounts = [plural(n, f"{kind.removeprefix('lost-')} cell") for kind, n in counts.items() if n and kind != "ok"]
    label = f"Chunk map of {cut(grid.tensor.fqn)}: {', '.join(amounts) or 'every cell is held once'}"
    return _svg("".join(tags), total, bottom + 8, "map", label)


def region_kind(tiling: Tiling, region: Box) -> str:
    """What a region of a finding is: in no chunk, in several, or in one (`mark`)."""
    if any(a < 0 or b > size for a, b, size in zip(region.offsets, region.ends, tiling.shape, strict=True)):
        return "mark"
    holders = tiling.touching(region)
    boxes = [tiling.box(row) for row in holders[:_RUN_LIMIT]]
    holding = [box for box in boxes if box.intersect(region) == region]
    return "gap" if not holders else "overlap" if len(holding) > 1 else "mark"


def strip(tiling: Tiling, axis: int, marks: Iterable[tuple[int, int, str]], label: str) -> str:
    """A whole tensor on one line, in true proportion: chunks along one axis, and marks (start, stop, class)."""
    size = tiling.shape[axis]
    starts, stops = np.clip(tiling.intervals(axis), 0, size).T
    runs, tags = _runs(starts, stops), [_tag("title", escape(label))]
    if runs != [(0, size)]:
        tags.append(_tag("rect", class_="gap", width=_STRIP_WIDTH, height=10))
    tags += [_bar(low, high, size, "ok") for low, high in runs]
    tags += [_bar(max(low, 0), min(high, size), size, kind) for low, high, kind in marks]
    cuts = np.unique(np.concatenate([starts, stops]))
    cuts = cuts[(cuts > 0) & (cuts < size)]
    if len(cuts) <= _CUT_LIMIT:
        path = "".join(f"M{round(int(cut) * _STRIP_WIDTH / size, 1):g} 0v10" for cut in cuts)
        tags.append(_tag("path", class_="edge", d=path) if path else "")
    view = {"viewBox": f"0 0 {_STRIP_WIDTH} 10", "preserveAspectRatio": "none"}
    return _tag("svg", "".join(tags), class_="strip", role="img", aria_label=label, **view)


def lost_marks(tensor: Tensor, states: StateArray, axis: int) -> list[tuple[int, int, str]]:
    """The marks of a strip where bytes are lost: a chunk that another one repeats is lost only with it."""
    tiling = tensor.tiling
    if not (states > NOT_CHECKED).any():
        return []
    boxes, same = np.unique(np.hstack([tiling.offsets, tiling.sizes]), axis=0, return_inverse=True)
    best = np.full(len(boxes), len(STATES), np.uint8)
    np.minimum.at(best, same.ravel(), states)
    starts, stops = boxes[:, axis], boxes[:, axis] + boxes[:, axis + len(tiling.shape)]
    marks = []
    for state in range(NOT_CHECKED + 1, len(STATES)):
        order = np.flatnonzero(best == state)[np.argsort(starts[best == state], kind="stable")]
        marks += [(low, high, f"lost-{STATES[state]}") for low, high in _runs(starts[order], stops[order])]
    return marks


def axis_chain(
    ckpt: Checkpoint, tensor: Tensor, graph: nx.DiGraph[tuple[int, int]], region: Box, axis: int, label: str
) -> str:
    """The chunk graph of one axis around a region: nodes are intervals, edges links, a missing link is dashed."""
    nodes = sorted(graph)
    near = [i for i, (a, b) in enumerate(nodes) if a <= region.ends[axis] and b >= region.offsets[axis]] or [0]
    low = max(0, min(near[0], len(nodes) - _NODE_LIMIT))
    shown = nodes[low : low + _NODE_LIMIT]
    boxes = _Boxes(graph.graph["size"], low, shown, len(nodes) - low - len(shown))
    links = {(boxes.place(a), boxes.place(b)) for a, b in graph.edges}
    links |= {(0, boxes.place(node)) for node in nodes if node[0] == 0}
    links |= {(boxes.place(node), boxes.last) for node in nodes if node[1] == boxes.size}
    tags = [boxes.link(a, b) for a, b in sorted(links) if a != b]
    for start, stop in _missing_links(nodes, boxes.size):
        before = max((boxes.place(node) for node in nodes if node[1] == start), default=0)
        after = min((boxes.place(node) for node in nodes if node[0] == stop), default=boxes.last)
        if before != after:
            tags.append(boxes.link(before, after, f"{start}:{stop}"))
    states = chunk_states(ckpt, tensor)
    rows = [graph.nodes[node]["rows"] for node in shown]
    tags += boxes.drawn([(*_node_texts(ckpt, tensor, row), _lost_kind(states[row])) for row in rows])
    return _svg("".join(tags), boxes.width, boxes.height, "chain", label)


def matrix_heads(heads: Sequence[str]) -> str:
    """The lines above the rows of a matrix, each character above its cell."""
    texts = []
    for y, head in zip((11, 26), heads, strict=True):
        at = [i for i, letter in enumerate(head) if letter != " "]
        x = " ".join(str(_CELL * i) for i in at)
        texts.append(_tag("text", escape("".join(head[i] for i in at)), x=x, y=y))
    return _svg("".join(texts), _CELL * len(heads[0]), 30, "cells", " ".join(" ".join(heads).split()))


def matrix_row(states: Sequence[int], label: str) -> str:
    """The cells of one row of a matrix, those of one state as one path; states are positions in `CELL_KINDS`."""
    paths = dict.fromkeys(CELL_KINDS, "")
    for state, run in groupby(range(len(states)), key=lambda i: states[i]):
        at = list(run)
        if state >= 0:
            width = _CELL * len(at)
            paths[CELL_KINDS[state]] += f"M{_CELL * at[0]} 0h{width}v12h-{width}z"
    drawn = [_tag("path", class_=kind, d=path) for kind, path in paths.items() if path]
    wide = _CELL * len(states)
    drawn += [_tag("rect", _tag("title", escape(label)), class_="grid", width=wide, height=12)]
    return _svg("".join(drawn), wide, 12, "cells", label)


def size_bar(shares: Sequence[tuple[str, float]], label: str) -> str:
    """A bar of parts, each a class and its share of the largest bar."""
    tags, x = [_tag("title", escape(label))], 0.0
    for kind, share in shares:
        tags.append(_tag("rect", class_=kind, x=f"{x:.4g}", width=f"{_BAR * share:.4g}", height=12))
        x += _BAR * share
    return _svg("".join(tags), _BAR, 12, "size", label)


# ---------------------------------------------------------------- parts of a map


def _lost_kind(states: StateArray) -> str:
    """The class of what some chunks hold: `lost-` and the best of their states, "" where one may be there."""
    best = int(states.min(initial=len(STATES)))
    return f"lost-{STATES[best]}" if NOT_CHECKED < best < len(STATES) else ""


def _cell_kind(grid: Grid, states: StateArray, row: int, column: int) -> str:
    """The class of a cell: `ok`, `gap`, `overlap`, `outside` of the tensor, `folded`, or how its bytes are lost."""
    holders = grid.holders[row][column]
    if holders is None:
        return "folded"
    if not grid.inside[row][column]:
        return "outside"
    return _lost_kind(states[holders]) or (("gap", "ok")[len(holders)] if len(holders) < 2 else "overlap")


def _cell_name(grid: Grid, row: int, column: int) -> str:
    holders = grid.holders[row][column]
    if holders is None:
        return f"… {grid.columns[column].folded or grid.rows[row].folded} …"
    return "".join(grid.legend[i] for i in holders[:3]) + ("+" if len(holders) > 3 else "")


def _cell_title(ckpt: Checkpoint, grid: Grid, states: StateArray, row: int, column: int, kind: str) -> str:
    if kind == "folded":
        return f"{grid.columns[column].folded or grid.rows[row].folded} cells between cuts, left out of the picture"
    drawn = {grid.across: grid.columns[column]} | ({} if grid.down is None else {grid.down: grid.rows[row]})
    slices = [
        f"{drawn[axis].start}:{drawn[axis].stop}" if axis in drawn else str(grid.fixed.get(axis, ":"))
        for axis in range(len(grid.tensor.global_shape))
    ]
    holders = grid.holders[row][column] or []
    head = {"gap": "in no chunk", "overlap": f"in {len(holders)} chunks", "outside": "outside the tensor"}.get(kind, "")
    lines = [f"[{', '.join(slices)}]" + (f" {head}" if head else "")]
    for holder in holders[:4]:
        file, state = ckpt.chunk_file(grid.tensor, holder), int(states[holder])
        where = (cut(file) or "stored nowhere") + f" ({STATES[state]})" * (state > NOT_CHECKED)
        rank = "" if (number := rank_of(file)) is None else f", rank {number}"
        lines.append(f"chunk {grid.legend[holder]} {grid.tensor.tiling.box(holder)} {where}{rank}")
    return "\n".join(lines)


def _edges(grid: Grid, left: int, top: int, width: int, height: int) -> tuple[str, str]:
    """Paths of the lines around chunks, and of the cuts that run through one."""
    rows, columns = len(grid.rows), len(grid.columns)
    solid = [f"M{left} {top}h{columns * width}v{rows * height}h{-columns * width}z"]
    dashed = []
    for r, c in product(range(rows), range(columns)):
        x, y = left + c * width, top + r * height
        below, beside = ((r + 1, c), f"M{x} {y + height}h{width}"), ((r, c + 1), f"M{x + width} {y}v{height}")
        for (row, column), line in (beside, below):
            if row == rows or column == columns:
                continue
            here, there = grid.holders[r][c], grid.holders[row][column]
            if here != there or here is None or grid.inside[r][c] != grid.inside[row][column]:
                solid.append(line)
            elif here:
                dashed.append(line)
    return "".join(solid), "".join(dashed)


def _outline(grid: Grid, region: Box) -> tuple[int, int, int, int] | None:
    """First column, first row, columns and rows of the cells in a region; None for no part, or all, of the map."""
    across = _within(grid.columns, region.offsets[grid.across], region.ends[grid.across])
    down = [0] if grid.down is None else _within(grid.rows, region.offsets[grid.down], region.ends[grid.down])
    if not across or not down or (len(across), len(down)) == (len(grid.columns), len(grid.rows)):
        return None
    return across[0], down[0], across[-1] - across[0] + 1, down[-1] - down[0] + 1


def _within(cells: list[MapCell], start: int, stop: int) -> list[int]:
    return [i for i, cell in enumerate(cells) if not cell.folded and cell.start < stop and cell.stop > start]


def _labels(cells: list[MapCell]) -> list[str]:
    return [f"{cell.start:,}" for cell in cells] + [f"{cells[-1].stop:,}"]


# ---------------------------------------------------------------- parts of a strip


def _runs(starts: np.ndarray, stops: np.ndarray) -> list[tuple[int, int]]:
    """The stretches that intervals, in order of start, cover together; the last one takes up all beyond a limit."""
    if not len(starts):
        return []
    reach = np.maximum.accumulate(stops)
    first = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
    lows = starts[first].tolist()
    highs = reach[np.append(first[1:], len(starts)) - 1].tolist()
    if len(lows) > _RUN_LIMIT:
        lows, highs = lows[:_RUN_LIMIT], [*highs[: _RUN_LIMIT - 1], highs[-1]]
    return list(zip(lows, highs, strict=True))


def _bar(start: int, stop: int, size: int, kind: str) -> str:
    """A part of a strip, wide enough to be seen."""
    width = max((stop - start) * _STRIP_WIDTH / size, 4 if kind != "ok" else 0)
    x = min(start * _STRIP_WIDTH / size, _STRIP_WIDTH - width)
    return _tag("rect", class_=kind, x=f"{x:.4g}", width=f"{width:.4g}", height=10)


# ---------------------------------------------------------------- parts of a graph


class _Boxes:
    """Where the boxes of an axis graph stand: the start, what is before, the intervals shown, the rest, the end."""

    def __init__(self, size: int, before: int, shown: Sequence[tuple[int, int]], after: int) -> None:
        self.size, self.before, self.shown, self.after = size, before, shown, after
        lead, rear = int(before > 0), int(after > 0)
        self.last = lead + len(shown) + rear + 1
        self._index = {node: i + 1 + lead for i, node in enumerate(shown)}
        lanes: list[int] = []  # below each other, for intervals that share elements
        self._lane = [0] * (self.last + 1)
        for node in shown:
            lane = next((i for i, stop in enumerate(lanes) if stop <= node[0]), len(lanes))
            lanes[lane : lane + 1] = [node[1]]
            self._lane[self._index[node]] = lane
        longest = max((len(f"{a}:{b}") for a, b in shown), default=0)
        self._box = max(_NODE, longest * _DIGIT + 12)
        end = max(20, len(str(size)) * _DIGIT + 10)
        self._widths = [20, *[self._box] * (self.last - 1), end]
        self._left = [4 + sum(self._widths[:i]) + _LINK * i for i in range(self.last + 1)]
        self.width = self._left[-1] + end + 4
        self.height = 20 + _LANE * max(len(lanes), 1)

    def place(self, node: tuple[int, int]) -> int:
        """The position of the box that stands for an interval."""
        if node in self._index:
            return self._index[node]
        return 1 if self.shown and node < self.shown[0] else self.last - 1

    def middle(self, i: int) -> int:
        """The height of a box's middle."""
        return 34 + _LANE * self._lane[i]

    def link(self, a: int, b: int, missing: str = "") -> str:
        """An edge between two boxes; a missing one is dashed and says what would be there."""
        x, y, to_x, to_y = self._left[a] + self._widths[a], self.middle(a), self._left[b], self.middle(b)
        bend = (x + to_x) // 2
        path = f"M{x} {y}H{to_x}" if y == to_y else f"M{x} {y}C{bend} {y} {bend} {to_y} {to_x} {to_y}"
        if not missing:
            return _tag("path", class_="link", d=path)
        title = _tag("title", escape(f"{missing} is in no chunk"))
        return _tag("path", title, class_="link missing", d=path) + _text(
            missing, (x + to_x) // 2, min(y, to_y) - 8, "absent"
        )

    def drawn(self, texts: Sequence[tuple[str, str, str]]) -> list[str]:
        """All boxes; texts are the second line, the tooltip and the lost kind of each interval that is shown."""
        tags = [self._box_at(0, "0", "", "end", "start of the dim")]
        if self.before:
            tags.append(self._box_at(1, "…", f"{self.before} more", "folded", "intervals before, left out"))
        for node, (line, title, lost) in zip(self.shown, texts, strict=True):
            shares = any(span != node and span[0] < node[1] and node[0] < span[1] for span in self.shown)
            kind = lost or ("shared" if shares else "ok")
            tags.append(self._box_at(self._index[node], f"{node[0]}:{node[1]}", line, kind, title))
        if self.after:
            tags.append(self._box_at(self.last - 1, "…", f"{self.after} more", "folded", "intervals after, left out"))
        return [*tags, self._box_at(self.last, str(self.size), "", "end", "end of the dim")]

    def _box_at(self, i: int, name: str, line: str, kind: str, title: str) -> str:
        x, y, width = self._left[i], self.middle(i), self._widths[i]
        half = 18 if line else 11
        box = {"x": x, "y": y - half, "width": width, "height": 2 * half, "rx": 5}
        texts = _text(name, x + width // 2, y - 2 if line else y + 4, "name")
        if line:
            texts += _text(line, x + width // 2, y + 12, "line")
        return _tag("rect", _tag("title", escape(title)), class_=f"node {kind}", **box) + texts


def _missing_links(nodes: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The stretches of the axis between 0 and its size that no interval covers, at most 64."""
    if not nodes:
        return [(0, size)]
    starts, stops = np.array(nodes, np.int64).T
    covered = [(0, 0), *_runs(starts, stops), (size, size)]
    return [(a[1], b[0]) for a, b in pairwise(covered) if a[1] < b[0]]


def _node_texts(ckpt: Checkpoint, tensor: Tensor, rows: list[int]) -> tuple[str, str]:
    files = list(dict.fromkeys(ckpt.chunk_file(tensor, row) for row in rows[:64]))
    ranks = {rank_of(file) for file in files}
    rank = ranks.pop() if len(ranks) == 1 and len(rows) <= 64 else None
    line = plural(len(rows), "chunk") if rank is None else f"rank {rank}"
    more = ", ..." if len(files) > 6 or len(rows) > 64 else ""
    return line, f"{plural(len(rows), 'chunk')}: {', '.join(cut(file) or 'stored nowhere' for file in files[:6])}{more}"


# ---------------------------------------------------------------- markup


def _svg(content: str, width: int, height: int, class_: str, label: str) -> str:
    size: dict[str, str | int] = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    return _tag("svg", content, class_=class_, role="img", aria_label=label, **size)


def _text(text: str, x: int, y: int, class_: str) -> str:
    return _tag("text", escape(text), class_=class_, x=x, y=y)


def _tag(element: str, content: str = "", **attributes: str | int) -> str:
    """An element around markup; in names of attributes `_` stands for `-`, and at the end for nothing."""
    names = (name.rstrip("_").replace("_", "-") for name in attributes)
    listed = "".join(f' {n}="{escape(str(v))}"' for n, v in zip(names, attributes.values(), strict=True))
    return f"<{element}{listed}>{content}</{element}>" if content else f"<{element}{listed}/>"
