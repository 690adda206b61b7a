"""In which order the rows of tensors lie in another one, and whether a conversion is known to make that order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptlint.model.layout import IntArray
from ckptlint.model.text import plural
from ckptlint.seals.digests import Words

_INTERLEAVED = "the two halves of each head interleaved"
_EVEN_FIRST = "each head's even rows first, then the odd ones"
_ATTENTION = ("q", "k", "v")
_HALVES = ("gate", "up")
_ROLES = {
    "q": re.compile(r"(?:^|[._])(?:w?q|q_?proj|query|to_q)(?=[._]|$)"),
    "k": re.compile(r"(?:^|[._])(?:w?k|k_?proj|key|to_k)(?=[._]|$)"),
    "v": re.compile(r"(?:^|[._])(?:w?v|v_?proj|value|to_v)(?=[._]|$)"),
    "gate": re.compile(r"(?:^|[._])(?:w1|gate_?proj|linear_fc1_gate)(?=[._]|$)"),
    "up": re.compile(r"(?:^|[._])(?:w3|up_?proj|linear_fc1_up)(?=[._]|$)"),
}
"""What names call the parts that are put together.

Source:
    transformers 5.23 (q_proj, gate_proj, up_proj), torchtitan and Llama (wq, wk, wv; w1 gates, w3 goes up)
"""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows.

    Attributes:
        is_known: whether a conversion is known to make it.
        text: it in words.
        notes: the first rows that lie elsewhere, where no words describe it.
    """

    is_known: bool
    text: str
    notes: tuple[str, ...] = ()


def order_of(parts: Sequence[tuple[str, Words]], whole: Words) -> Order:
    """The order of the rows of some tensors, taken one after the other, in one that holds the same rows.

    Args:
        parts: name and words of the rows of each.
        whole: words of the rows of the other.
    """
    joined = np.concatenate([words for _, words in parts])
    source = _sources(joined, whole)
    if source is None:
        return Order(False, "some rows are alike, so their order cannot be told")
    if len(parts) == 1:
        return _within(source)
    return _of_parts(parts, source)


def _sources(joined: Words, whole: Words) -> IntArray | None:
    """int64 [rows], from which row of the parts each row of the whole is; None where rows are alike."""
    order = np.argsort(joined, kind="stable")
    ordered = joined[order]
    if (ordered[1:] == ordered[:-1]).any():
        return None
    return order[np.searchsorted(ordered, whole)]


def _within(source: IntArray) -> Order:
    """The order of one tensor's rows in another one."""
    rows = len(source)
    for size in _head_sizes(rows):
        halves = np.arange(size).reshape(2, size // 2).T.reshape(-1)  # 0, size / 2, 1, size / 2 + 1, ...
        for text, head in ((_INTERLEAVED, halves), (_EVEN_FIRST, np.argsort(halves))):
            if np.array_equal(source.reshape(-1, size), head + np.arange(0, rows, size)[:, None]):
                return Order(True, f"{text} ({size} rows a head)")
    if source[0] and np.array_equal(source, (np.arange(rows) + source[0]) % rows):
        return Order(False, f"shifted by {int(source[0]):,} rows")
    moved = np.flatnonzero(source != np.arange(rows))
    first = ", ".join(f"row {int(row):,} was row {int(source[row]):,}" for row in moved[:3])
    return Order(False, "in an order that no known conversion makes", (first,) if first else ())


def _head_sizes(rows: int) -> list[int]:
    return [size for size in range(4, min(rows, 512) + 1, 2) if rows % size == 0]


def _of_parts(parts: Sequence[tuple[str, Words]], source: IntArray) -> Order:
    """The order in which several tensors lie in one: one after the other, or in groups."""
    starts = np.cumsum([0, *(len(words) for _, words in parts)])
    part = np.searchsorted(starts, source, side="right") - 1
    inside = source - starts[part]
    begins = np.concatenate([[0], np.flatnonzero((np.diff(part) != 0) | (np.diff(inside) != 1)) + 1])
    if any((np.diff(inside[part == number]) != 1).any() for number in range(len(parts))):
        return Order(False, "in an order that no known conversion makes", (f"{plural(len(begins), 'run')} of rows",))
    runs = part[begins].tolist()
    cycle = list(dict.fromkeys(runs))
    groups, rest = divmod(len(runs), len(cycle))
    lengths = np.diff(np.concatenate([begins, [len(source)]]))
    is_regular = not rest and runs == cycle * groups and (lengths.reshape(groups, -1) == lengths[: len(cycle)]).all()
    if not is_regular:
        return Order(False, "in an order that no known conversion makes", (f"{plural(len(begins), 'run')} of rows",))
    named = [_role_of(parts[number][0]) for number in cycle]
    known = [role for role in (*_ATTENTION, *_HALVES) if role in named]
    text = "one after the other" if groups == 1 else f"in {groups:,} groups"
    if all(named):
        each = len(named) // len(known)
        is_known = _is_ascending(cycle, named) and named in (
            known * each,
            [role for role in known for _ in range(each)],
        )
        text = f"{' and '.join(known)} of each expert in turn" if each > 1 and named == known * each else text
    else:
        is_known = cycle == sorted(cycle)
    if not is_known:
        return Order(False, f"{text}, but {', '.join(name or '?' for name in named)} in this order")
    return Order(True, text)


def _is_ascending(cycle: Sequence[int], named: Sequence[str]) -> bool:
    """Whether the parts of each role come in the order of their numbers."""
    return all(
        (own := [number for number, role in zip(cycle, named, strict=True) if role == name]) == sorted(own)
        for name in {*named}
    )


def _role_of(name: str) -> str:
    return next((role for role, pattern in _ROLES.items() if pattern.search(name)), "")
