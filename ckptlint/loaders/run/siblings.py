"""Names that are alike but for a number: the steps of a run, whatever its framework calls them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptlint.grouping import grouped
from ckptlint.patterns import lazy_pattern

_NUMBER = lazy_pattern(r"\d+(?:\.\d+)?")
_MOST = 2**40


def series(names: Iterable[str], from_any: bool = False) -> Iterator[dict[str, int]]:
    """Name -> number of those that differ in a number alone, for each set of two or more.

    Of several numbers that do, the one that becomes largest counts: epochs are fewer than steps. Decimal fractions are
    measures. Numbers that only count from 0 or 1 are parts of one thing, or two of a kind, but where a measure differs;
    they are given `from_any` start.

    >>> list(series(["3-0.51.ckpt", "12-0.42.ckpt", "model_0.pt", "model_1.pt"]))
    [{'3-0.51.ckpt': 3, '12-0.42.ckpt': 12}]
    >>> list(series(["ep0-ba30-rank0.pt", "ep1-ba60-rank0.pt"]))
    [{'ep0-ba30-rank0.pt': 30, 'ep1-ba60-rank0.pt': 60}]
    >>> list(series(["00--1.61.ckpt", "01--1.70.ckpt"]))
    [{'00--1.61.ckpt': 0, '01--1.70.ckpt': 1}]
    """
    for members in grouped((_NUMBER.sub("0", name), name) for name in names).values():
        columns = [*zip(*(_NUMBER.findall(name) for name in members), strict=True)]
        is_measured = any(len({*column}) > 1 and not any(map(str.isdecimal, column)) for column in columns)
        counted = [[int(text) for text in column] for column in columns if all(map(str.isdecimal, column))]
        apart = [column for column in counted if len({*column}) == len(column) > 1 and max(column) < _MOST]
        best = max(apart, key=max, default=[])
        if best and (from_any or is_measured or min(best) > 1 or max(best) - min(best) >= len(best)):
            yield dict(zip(members, best, strict=True))
