"""The chunk map of a finding: a grid cut only where a chunk starts or ends, drawn as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from ckptlint.geometry.record_states import NOT_CHECKED, STATES, THERE, StateArray, chunk_states
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import human_bytes, plural
from ckptlint.model.tiling import Box, distinct
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.mesh import axes_of_size

CELL_LIMIT = 8
_CONTEXT = 2
MARKS = dict(zip(STATES, " ?!%/", strict=True))


@dataclass(frozen=True, slots=True)
class MapCell:
    """One cell of an axis: [start, stop), or `folded` cells in one."""

    start: int
    stop: int
    folded: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """What to draw: at most two axes of a tensor around a region.

    Attributes:
        down: the axis drawn downward, None for a strip.
        across: the axis drawn across.
        fixed: axis -> the index at which the axes that are not drawn were cut.
        rows, columns: the cells of the two axes; a strip has one row.
        holders: [row][column] -> rows of the tensor's chunk table that hold the cell; None where folded or outside.
        inside: [row][column] -> whether the cell is inside the tensor.
        legend: chunk row -> letter, in the order the chunks appear.
    """

    tensor: Tensor
    down: int | None
    across: int
    fixed: dict[int, int]
    rows: list[MapCell]
    columns: list[MapCell]
    holders: list[list[list[int] | None]]
    inside: list[list[bool]]
    legend: dict[int, str]


def make_grid(tensor: Tensor, region: Box | None, cells: int = CELL_LIMIT) -> Grid | None:
    """The grid around a region, or around the origin; None for a tensor without axes or chunks to compare."""
    tiling, shape = tensor.tiling, tensor.global_shape
    if not shape or not tensor.is_sound:
        return None
    region = region or Box((0,) * len(shape), shape)
    offsets, ends = tiling.offsets[tiling.live], (tiling.offsets + tiling.sizes)[tiling.live]
    bounds = zip(offsets.T, ends.T, shape, region.offsets, region.ends, strict=True)
    cuts = [distinct(np.concatenate([starts, stops, [0, *more]])).tolist() for starts, stops, *more in bounds]
    narrow = [a for a in range(len(shape)) if (region.offsets[a], region.ends[a]) != (0, shape[a])]
    cut = [a for a in range(len(shape)) if len(cuts[a]) > 2]
    axes = sorted(sorted(cut, key=lambda a: (a not in narrow, -len(cuts[a])))[:2]) or [0]
    across, down = axes[-1], axes[0] if len(axes) == 2 else None
    fixed = {a: max(0, region.offsets[a]) for a in range(len(shape)) if a not in axes and len(cuts[a]) > 2}

    near = np.flatnonzero(tiling.live)
    for axis, index in fixed.items():
        near = near[(tiling.offsets[near, axis] <= index) & (index < (tiling.offsets + tiling.sizes)[near, axis])]
    columns = _fold(cuts[across], region.offsets[across], region.ends[across], cells)
    rows = [MapCell(0, 1)] if down is None else _fold(cuts[down], region.offsets[down], region.ends[down], cells)
    legend: dict[int, str] = {}
    holders: list[list[list[int] | None]] = []
    inside: list[list[bool]] = []
    for row in rows:
        holders.append([])
        inside.append([])
        for column in columns:
            drawn = [(across, column)] + ([] if down is None else [(down, row)])
            inside[-1].append(all(cell.start >= 0 and cell.stop <= shape[a] for a, cell in drawn))
            if row.folded or column.folded:
                holders[-1].append(None)
                continue
            holding = near
            for axis, cell in drawn:
                stops = tiling.offsets[holding, axis] + tiling.sizes[holding, axis]
                holding = holding[(tiling.offsets[holding, axis] <= cell.start) & (stops >= cell.stop)]
            holders[-1].append([int(i) for i in holding])
            for i in holding.tolist():
                legend.setdefault(i, _letter(len(legend)))
    return Grid(tensor, down, across, fixed, rows, columns, holders, inside, legend)


def marked_boxes(tensor: Tensor, region: Box, rows: Sequence[int]) -> list[Box]:
    """What the map of a finding marks: its region, or all chunks of `rows` if that is one and no two overlap."""
    boxes = dict.fromkeys(tensor.tiling.box(row) for row in rows if 0 <= row < len(tensor.chunks))
    is_apart = not any(a.intersect(b) for a, b in combinations(boxes, 2))
    return [*boxes] if region in boxes and is_apart else [region]


def draw(
    ckpt: Checkpoint,
    grid: Grid,
    region: Box | None,
    ascii_only: bool,
    width: int = 76,
    paint: Callable[[str], str] = str,
    rows: Sequence[int] = (),
) -> list[str]:
    """The lines of a chunk map; cells are folded until none is longer than `width`.

    What `marked_boxes` names is marked below the map.

    A chunk whose bytes are not there is filled with the mark of its state, `paint` colours it, and the legend names it.
    """
    marked = [] if region is None else marked_boxes(grid.tensor, region, rows)
    for cells in range(CELL_LIMIT - 1, 2, -1):
        lines = _drawn(ckpt, grid, marked, ascii_only, width, str)
        narrower = make_grid(grid.tensor, region, cells) if max(map(len, lines)) > width else None
        if narrower is None:
            break
        grid = narrower
    return _drawn(ckpt, grid, marked, ascii_only, width, paint)


def _drawn(
    ckpt: Checkpoint, grid: Grid, marked: Sequence[Box], ascii_only: bool, width: int, paint: Callable[[str], str]
) -> list[str]:
    """The lines of a map: labels, a row of cells for each interval, and the legend."""
    columns, rows = _labels(grid.columns), _labels(grid.rows)
    side = 0 if grid.down is None else max(map(len, rows)) + 1
    pad, room = " " * side, (width - side - 2) // len(grid.columns) - 1
    cell = max(*map(len, columns), min(8, room), 3)
    states = chunk_states(ckpt, grid.tensor)
    across = axis_label(ckpt, grid, grid.across)
    names = f"{across} ->" if grid.down is None else f"{pad}{axis_label(ckpt, grid, grid.down)} down, {across} across"
    lines = [names + fixed_label(grid), (pad + "".join(label.ljust(cell + 1) for label in columns)).rstrip()]
    bar, dash = ("|", "-") if ascii_only else ("│", "─")
    top, middle, bottom = ("+++",) * 3 if ascii_only else ("┌┬┐", "├┼┤", "└┴┘")
    for row, corners in enumerate([top, *[middle] * (len(grid.rows) - 1), bottom]):
        label = f"{rows[row]:>{side - 1}} " if side else ""
        lines.append(label + corners[0] + corners[1].join([dash * cell] * len(grid.columns)) + corners[2])
        if row < len(grid.rows):
            cells = [_cell_text(grid, states, row, column, cell, paint) for column in range(len(grid.columns))]
            lines.append(pad + bar + bar.join(cells) + bar)
    if grid.down is None and marked:
        lines += _marker(grid, marked, cell, width)
    if any(not all(row) for row in grid.inside):
        lines.append("x outside the tensor")
    return lines + _legend_lines(ckpt, grid, states, width, paint)


def axis_label(ckpt: Checkpoint, grid: Grid, axis: int) -> str:
    """The axis with its factor and mesh name, where exactly one mesh axis has as many places.

    Stacked layers or experts, each stored by itself, are as many as there are, whatever the mesh.
    """
    count = len(grid.tensor.tiling.intervals(axis))
    names = axes_of_size(ckpt.topology, count) if count < grid.tensor.global_shape[axis] else []
    return f"dim {axis} x {count} ({names[0]})" if len(names) == 1 else f"dim {axis}"


def _fold(cuts: list[int], start: int, stop: int, limit: int) -> list[MapCell]:
    """The cells between the cuts; more than `limit` are folded but for the neighbourhood of [start, stop)."""
    cells = [MapCell(a, b) for a, b in pairwise(cuts)]
    if len(cells) <= limit:
        return cells
    touched = [i for i, cell in enumerate(cells) if cell.start < stop and cell.stop > start] or [0]
    if len(touched) == len(cells):
        touched = [0]
    low = max(0, touched[0] - _CONTEXT)
    high = min(len(cells), low + limit - (low > 0) - 1)
    low = max(0, min(low, high - limit + 2)) if high == len(cells) else low
    folded = []
    if low > 0:
        folded.append(MapCell(cells[0].start, cells[low].start, low))
    folded += cells[low:high]
    if high < len(cells):
        folded.append(MapCell(cells[high].start, cells[-1].stop, len(cells) - high))
    return folded


def _letter(number: int) -> str:
    """A to Z, AA to ZZ, and so on.

    >>> _letter(25), _letter(26), _letter(701), _letter(702)
    ('Z', 'AA', 'ZZ', 'AAA')
    """
    rest, place = divmod(number, 26)
    return (_letter(rest - 1) if rest else "") + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place]


def _labels(cells: list[MapCell]) -> list[str]:
    return [str(cell.start) for cell in cells] + [str(cells[-1].stop)]


def _cell_text(grid: Grid, states: StateArray, row: int, column: int, width: int, paint: Callable[[str], str]) -> str:
    holding = grid.holders[row][column]
    if holding is None:
        return f"..{grid.columns[column].folded or grid.rows[row].folded}.."[:width].center(width)
    name = "".join(grid.legend[i] for i in holding[:3]) + ("+" if len(holding) > 3 else "")
    if not grid.inside[row][column]:
        return (name or "").center(width, "x")
    if not holding:
        return "." * width
    if (best := states[holding].min()) > NOT_CHECKED:
        return paint(name.center(width, MARKS[STATES[best]]))
    return name.center(width, "#") if len(holding) > 1 else name.center(width)


def fixed_label(grid: Grid) -> str:
    """Where the axes that are not drawn were cut, as the end of a caption; "" when none was."""
    at = ", ".join(f"dim {axis} = {index}" for axis, index in grid.fixed.items())
    return f", at {at}" if at else ""


def _marker(grid: Grid, marked: Sequence[Box], cell: int, width: int) -> list[str]:
    """Carets below the cells of the regions, and how much these are, beside them where there is room."""
    spans = [(box.offsets[grid.across], box.ends[grid.across]) for box in marked]
    cells = [(i, column) for i, column in enumerate(grid.columns) if not column.folded]
    under = {i for i, column in cells if any(column.start < stop and column.stop > start for start, stop in spans)}
    volume = sum(box.volume for box in marked)
    elements = f"{volume:,} elements"
    count = nbytes(grid.tensor.dtype, volume)
    size = elements if count is None else f"{elements}, {human_bytes(count)}"
    if not under or (0, grid.tensor.global_shape[grid.across]) in spans:
        return [size]
    below = ("^" * cell + ("^" if {i, i + 1} <= under else " ") if i in under else " " * (cell + 1)
             for i in range(max(under) + 1))  # fmt: skip
    carets = " " + "".join(below).rstrip()
    beside = f"{carets} {size}"
    return [beside] if len(beside) <= width else [carets, size]


def _legend_lines(
    ckpt: Checkpoint, grid: Grid, states: StateArray, width: int, paint: Callable[[str], str]
) -> list[str]:
    """Which letter is which file; chunks that are lost each on a line."""
    files = {row: ckpt.chunk_file(grid.tensor, row) or "stored nowhere" for row in grid.legend}
    items = {row: f"{letter} {files[row]}" for row, letter in grid.legend.items()}
    lines = ["   ".join(line) for line in _in_lines([items[row] for row in items if states[row] <= NOT_CHECKED], width)]
    if len(lines) > 3:
        lines = [*lines[:3], f"and {len(grid.legend)} chunks in all"]
    for state in np.unique(states[states > THERE]).tolist():
        is_lost, rows = state > NOT_CHECKED, np.flatnonzero(states == state).tolist()
        head = f"{MARKS[STATES[state]]} " * is_lost + f"{STATES[state]}: "
        shown = _in_lines([items[row] for row in rows if is_lost and row in items], width - len(head) - 16)[:1]
        left = len(rows) - sum(map(len, shown))
        more = [plural(left, "more chunk" if shown else "chunk")] if left else []
        lines.append(paint(head + " and ".join([*map("   ".join, shown), *more])))
    return lines


def _in_lines(items: list[str], width: int) -> list[list[str]]:
    """The items of each line, three spaces apart, where no line is longer than a width."""
    lines: list[list[str]] = []
    for item in items:
        if lines and len("   ".join([*lines[-1], item])) <= width:
            lines[-1].append(item)
        else:
            lines.append([item])
    return lines
