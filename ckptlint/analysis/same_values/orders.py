"""In which order the rows of tensors lie in another one, and whether a conversion is known to make that order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from ckptlint.model.layout import IntArray
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
    known = _within(parts[0][1], whole) if len(parts) == 1 else next(_of_parts(parts, whole), None)
    return known or _unknown(np.concatenate([words for _, words in parts]), whole)


def _unknown(joined: Words, whole: Words) -> Order:
    """An order that no conversion makes, in words."""
    order = np.argsort(joined, kind="stable")
    ordered = joined[order]
    if (ordered[1:] == ordered[:-1]).any():
        return Order(False, "in an order that no known conversion makes, some rows being alike")
    source: IntArray = order[np.searchsorted(ordered, whole)]
    rows = len(source)
    if source[0] and np.array_equal(source, (np.arange(rows) + source[0]) % rows):
        return Order(False, f"shifted by {int(source[0]):,} rows")
    first = ", ".join(
        f"row {int(row):,} was row {int(source[row]):,}" for row in np.flatnonzero(source != np.arange(rows))[:3]
    )
    return Order(False, "in an order that no known conversion makes", (first,) if first else ())


def _within(own: Words, whole: Words) -> Order | None:
    """The known order of one tensor's rows in another one."""
    for size in _head_sizes(len(own)):
        for text, head in _orders_of_heads(size):
            if np.array_equal(own.reshape(-1, size)[:, head].reshape(-1), whole):
                return Order(True, f"{text} ({size} rows a head)")
    return None


def _orders_of_heads(size: int) -> tuple[tuple[str, IntArray], ...]:
    """In which order rope takes the rows of a head, in words and as rows."""
    halves = np.arange(size).reshape(2, size // 2).T.reshape(-1)  # 0, size / 2, 1, size / 2 + 1, ...
    return (_INTERLEAVED, halves), (_EVEN_FIRST, np.argsort(halves))


def _head_sizes(rows: int) -> list[int]:
    return [size for size in range(4, min(rows, 512) + 1, 2) if rows % size == 0]


def _of_parts(parts: Sequence[tuple[str, Words]], whole: Words) -> Iterator[Order]:
    """The known orders in which several tensors lie in one: one after the other, in groups, with the heads of rope."""
    named = [role_of(name) for name, _ in parts]
    known = [role for role in (*_ATTENTION, *_HALVES) if role in named]
    common = gcd(*(len(words) for _, words in parts))
    groups = [count for count in range(1, common + 1) if common % count == 0]
    for sequence, told in _sequences(named, known):
        words = [parts[number][1] for number in sequence]
        for count in groups:
            text = told or ("one after the other" if count == 1 else f"in {count:,} groups")
            if _fits(words, count, whole):
                yield Order(True, text)
            if "q" not in known or len(known) < len(named):
                continue
            turned = [number for number, part in enumerate(sequence) if named[part] in ("q", "k")]
            for size in _head_sizes(gcd(*(len(words[number]) for number in turned))):
                for said, head in _orders_of_heads(size):
                    if whole[1] != words[0][head[1]]:
                        continue  # the first head is that of the first query
                    other = [
                        own.reshape(-1, size)[:, head].reshape(-1) if number in turned else own
                        for number, own in enumerate(words)
                    ]
                    if _fits(other, count, whole):
                        yield Order(True, f"{text}, {said} ({size} rows a head)")


def _sequences(named: Sequence[str], known: Sequence[str]) -> Iterator[tuple[list[int], str]]:
    """In which sequence the parts may lie: numbers of parts, and what is to be said of it."""
    if not all(named):
        yield [*range(len(named))], ""
        return
    of_each = [[number for number, role in enumerate(named) if role == wanted] for wanted in known]
    yield [number for own in of_each for number in own], ""
    if len({len(own) for own in of_each}) == 1 and len(of_each[0]) > 1:
        in_turn = [number for own in zip(*of_each, strict=True) for number in own]
        yield in_turn, f"{' and '.join(known)} of each expert in turn"


def _fits(words: Sequence[Words], groups: int, whole: Words) -> bool:
    """Whether parts that are cut into groups lie in the whole, a group of each at a time."""
    each = len(words[0]) // groups
    if not np.array_equal(words[0][:each], whole[:each]):
        return False
    return np.array_equal(np.concatenate([own.reshape(groups, -1) for own in words], axis=1).reshape(-1), whole)


def role_of(name: str) -> str:
    """Which part of a fused weight a name says it is: q, k, v, gate, up; "" for none of these."""
    return next((role for role, pattern in _ROLES.items() if pattern.search(name)), "")
