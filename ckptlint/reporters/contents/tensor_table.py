"""The tensors of a checkpoint as a table that fits the terminal: layers, moments and an optimizer's scalars folded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from math import prod

from ckptlint.grouping import grouped
from ckptlint.model import Tensor
from ckptlint.model.text import fold_names, human_bytes, join_words, shape_text
from ckptlint.patterns import lazy_pattern
from ckptlint.reporters.style import Style, aligned, cut
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.keys import MOMENTS, parse, role

_FRAME = lazy_pattern(r"\d+|\.")
_SHORTENED = lazy_pattern(r"(?<![^\W\d])[^\W\d]+\.\.\.[^\W\d]+")
_SHORTEST = len("ab...yz")


def tensor_table(tensors: Sequence[Tensor], one_dtype: bool, style: Style) -> Iterator[str]:
    """A line for all tensors of one role, dtype and shape; last ones: for chunks if none is cut, and on what `*` is."""
    # of a scalar `*` stands for whose it is, else for which moment
    names_of_role = ("*." + t.fqn.rpartition(".")[2] if _is_scalar(t) else starred(t.fqn) for t in tensors)
    looks = ((role(name), t.dtype, t.global_shape) for name, t in zip(names_of_role, tensors, strict=True))
    rows, moments, is_star = list[list[str]](), set[str](), False
    for members in grouped(zip(looks, tensors, strict=True)).values():
        names, moment_names = folded([tensor.fqn for tensor in members])
        times = max(len(moment_names), 1)
        if _is_scalar(members[0]) and len(members) > 1:
            names, times, is_star = [_glob([tensor.fqn for tensor in members])], len(members), True
        moments |= moment_names
        first = members[0]
        shape = shape_text(first.global_shape)
        size = size_text(nbytes(first.dtype, first.volume))
        cells = [first.dtype, f"{times:,} x {shape}" if times > 1 else shape, chunks_text(members), size]
        rows += [[name, *cells] for name in names]
    is_whole = all(row[3] == "1" for row in rows)
    shown = [0, *([] if one_dtype else [1]), 2, *([] if is_whole else [3]), 4]
    lines = ([row[i] for i in shown] for row in [["tensor", "dtype", "shape", "chunks", "size each"], *rows])
    yield from fitted(next(lines), [*lines], style.width)
    if is_whole:
        yield "each tensor is one chunk"
    yield from meaning_of_star(moments, style, "; of scalars, a parameter" if is_star else "")


def folded(fqns: Sequence[str]) -> tuple[list[str], set[str]]:
    """Names folded over numbers, and over moments where all have the same ones: `*` is any of those that are returned.

    >>> folded(["optimizer.state.0.w.exp_avg", "optimizer.state.0.w.exp_avg_sq"])[0]
    ['optimizer.state.0.w.*']
    """
    moment_names, names = {word for fqn in fqns for word in fqn.split(".") if word in MOMENTS}, {*map(starred, fqns)}
    if len(moment_names) < 2 or len({*fqns}) != len(moment_names) * len(names):
        return fold_names(fqns), set()
    return fold_names(map(starred, fqns)), moment_names


def starred(fqn: str) -> str:
    """The name, of an optimizer's state with `*` for which moment it is."""
    if parse(fqn).kind != "optimizer":
        return fqn
    return ".".join("*" if word in MOMENTS else word for word in fqn.split("."))


def meaning_of_star(moments: Collection[str], style: Style, others: str = "") -> list[str]:
    """The line that says which moments `*` stands for; none for none."""
    return style.wrap(f"* is {join_words(sorted(moments), 'or')}{others}", "  ", "") if moments else []


def fitted(heads: list[str], rows: list[list[str]], width: int) -> Iterator[str]:
    """A table of whole names, which can be copied: one that does not fit has a line alone."""
    others = [*zip(*(row[1:] for row in [heads, *rows]), strict=True)]
    room = max(width - sum(2 + max(map(len, column)) for column in others), len(heads[0]))
    cells = [row if len(row[0]) <= room else ["", *row[1:]] for row in rows]
    head, *lines = aligned(heads, cells)
    yield head
    for row, cell, line in zip(rows, cells, lines, strict=True):
        if row is not cell:
            yield cut(row[0])
        yield line


def degrees(tensor: Tensor) -> tuple[int, ...] | None:
    """Into how many distinct intervals each axis is cut; None where chunks and shape cannot be compared."""
    if not tensor.is_sound:
        return None
    return tuple(len(tensor.tiling.intervals(axis)) for axis in range(len(tensor.global_shape)))


def chunk_count(tensor: Tensor) -> int:
    """How many chunks the metadata names for a tensor, those that do not fit its shape included."""
    return len(tensor.chunks) + len(tensor.malformed)


def fitting(name: str, width: int) -> str:
    """A name shortened to a width, whole where it would lose digits or be hard to read."""
    short = cut(name, width)
    # with the dots and digits of the whole one, and four letters of each word
    is_kept = _FRAME.findall(name) == _FRAME.findall(short.replace("...", ""))
    is_clear = is_kept and all(len(word) >= _SHORTEST for word in _SHORTENED.findall(short))
    return short if is_clear else cut(name)


def chunks_text(tensors: Sequence[Tensor]) -> str:
    """How many chunks each tensor has; into how many intervals each axis is cut where that says it, or differs.

    `4x1` are four chunks on the first of two axes, `4 (3x1)` are four of which one is empty or a second copy.
    """
    counts, cuts = {*map(chunk_count, tensors)}, {*map(degrees, tensors)}
    if len(counts) > 1:
        return f"{min(counts):,} to {max(counts):,}"
    (count,), intervals = counts, cuts.pop()
    if count == 1 or cuts or not intervals:
        return f"{count:,}"
    text = "x".join(map(str, intervals))
    return text if prod(intervals) == count else f"{count:,} ({text})"


def size_text(size: int | None) -> str:
    """A size in bytes, `?` where it is not known."""
    return "?" if size is None else human_bytes(size)


def _is_scalar(tensor: Tensor) -> bool:
    return not tensor.global_shape and parse(tensor.fqn).kind == "optimizer"


def _glob(names: Sequence[str]) -> str:
    """The parts that names have in common at both ends, `*` for what is between.

    >>> _glob(["optimizer.state.head.weight.step", "optimizer.state.scale.step"])
    'optimizer.state.*.step'
    """
    paths = [name.split(".") for name in names]
    first = _shared(paths)
    last = _shared([tail[len(first) :][::-1] for tail in paths])
    return ".".join([*first, "*", *reversed(last)])


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all begin with."""
    return [same[0] for same in takewhile(lambda same: len({*same}) == 1, zip(*paths, strict=False))]
