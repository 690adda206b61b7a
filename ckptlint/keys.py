"""Names of tensors: the role a name plays once layer and expert numbers are taken out, and ranges of numbers.

>>> role("model.layers.3.mlp.experts.12.w1.weight")
'model.layers.*.mlp.experts.*.w1.weight'
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

_NUMBER = re.compile(r"(?<![^./(_])\d+(?![^./)_,])|(?<=\bweight)\d+$|(?<=\bbias)\d+$")


def role(fqn: str) -> str:
    """The name with the numbers of layers, experts and groups replaced by `*`."""
    return _NUMBER.sub("*", fqn)


def numbers(fqn: str) -> tuple[int, ...]:
    """The numbers that `role` takes out, in order."""
    return tuple(int(number) for number in _NUMBER.findall(fqn))


def ranges(values: Iterable[int]) -> str:
    """Numbers as inclusive ranges.

    >>> ranges([0, 1, 2, 4, 5, 9])
    '0-2,4-5,9'
    """
    parts: list[list[int]] = []
    for value in sorted(set(values)):
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def braces(fqns: Iterable[str]) -> list[str]:
    """Names of one role folded into as few as possible, the numbers that vary as ranges.

    >>> braces(["layers.0.w", "layers.1.w", "layers.3.w"])
    ['layers.{0-1,3}.w']
    """
    by_role: dict[str, list[tuple[int, ...]]] = {}
    for fqn in fqns:
        by_role.setdefault(role(fqn), []).append(numbers(fqn))
    folded = []
    for name, rows in by_role.items():
        for columns in _products(sorted(set(rows))):
            folded.append(_fill(name, [ranges(c) if len(c) == 1 else "{" + ranges(c) + "}" for c in columns]))
    return folded


def _products(rows: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """The rows as full products of columns: any other pattern would name tensors that are not meant."""
    columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
    if prod(map(len, columns)) == len(rows):
        return [columns]
    varying = next(i for i, column in enumerate(columns) if len(column) > 1)
    return [
        product for value in columns[varying] for product in _products([row for row in rows if row[varying] == value])
    ]


def _fill(pattern: str, values: list[str]) -> str:
    parts = pattern.split("*")
    if len(parts) != len(values) + 1:  # the name itself holds an asterisk
        return pattern
    return "".join(part + value for part, value in zip(parts, [*values, ""], strict=True))
