"""The tables of a data file: names of tensors with their sizes as expressions, expanded for given fields.

A data file is one JSON object with one entry per line, so that a reader parses the line that it needs and no other. A
name holds indices in braces, `model.layers.{layer}.mlp.experts.{expert}.up_proj.weight`; how far each one counts is an
expression too, which may use the indices before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptlint.architecture.expected import BadValue, ExpectedTensor, NoTable
from ckptlint.architecture.expressions import ExpressionError, SizeError, parse_expression, whole
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.strict_toml import own_file

MOST_KEYS = 2_000_000
"""Keys of the largest model that is expanded."""

_INDEX = lazy_pattern(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class TableRow:
    """The tensors of one kind.

    `optional` says when a tensor need not be stored although it is part of the model (`tie_word_embeddings`): "" never,
    `true` for a buffer that the model makes itself.
    """

    name: str  # with indices in braces
    dims: tuple[str, ...]  # the size of each axis
    exists: str = ""  # when the tensor is part of the model; "" for always; may use the indices
    optional: str = ""


def entry(file: str, key: str) -> Any:
    """The entry of a key in a data file beside this module (`megatron.json`); None without one.

    Raises:
        OwnFileError: the file is missing or broken.
    """
    line = _lines(file).get(key)
    return None if line is None else json.loads(line)


@lru_cache(maxsize=4)
def _lines(file: str) -> dict[str, str]:
    """Key -> the JSON of its value, not parsed."""
    return own_file(Path(__file__).with_name(file), _split)


def _split(text: str) -> dict[str, str]:
    if not (text.startswith("{") and text.rstrip().endswith("}")):
        raise ValueError("no JSON object, or the beginning of one")
    pairs = (line.split('":', 1) for line in text.splitlines() if line.startswith('"'))
    return {key[1:]: value.strip().rstrip(",") for key, value in pairs}


def rows_of(entries: Iterable[Sequence[Any]]) -> list[TableRow]:
    """The rows that a data file holds as `[name, dims]`, `[name, dims, exists]` or `[name, dims, exists, optional]`."""
    return [TableRow(name, tuple(dims), *rest) for name, dims, *rest in entries]


def picked(rows: Sequence[TableRow], numbers: str) -> Iterator[TableRow]:
    """The rows of one form, which lists them as `0-4 7`."""
    for run in numbers.split():
        first, _, last = run.partition("-")
        yield from rows[int(first) : int(last or first) + 1]


def expand(
    rows: Iterable[TableRow], ranges: Mapping[str, str], fields: Mapping[str, object], at_most: int = MOST_KEYS
) -> dict[str, ExpectedTensor]:
    """The tensors that the rows of one form of a model mean for given values of the fields.

    Args:
        ranges: index -> how far it counts from 0 (`layer` -> `num_hidden_layers`).
        fields: name of a field, with dots into sections -> its value, as untrusted as the file that it is from.
        at_most: keys, beyond which the configuration is refused before any work.

    Raises:
        NoTable: the values lead to no model, or to one of more keys.
    """
    at_most = min(at_most, MOST_KEYS)
    tensors: dict[str, ExpectedTensor] = {}
    plans = []
    steps = 0
    try:
        for plan in (_Plan(row, ranges) for row in rows):
            if not plan.everywhere or plan.everywhere.value(fields):
                steps += plan.steps(fields, at_most)
                plans.append(plan)
            if steps > 8 * at_most:
                raise NoTable(f"it implies more than {at_most:,} tensors")
        for plan in plans:
            plan.fill(tensors, fields, at_most)
    except ExpressionError as error:
        kind = BadValue if isinstance(error, SizeError) else NoTable
        raise kind(f"it describes no model: {error}") from None
    return tensors


class _Plan:
    """One row, taken apart."""

    def __init__(self, row: TableRow, ranges: Mapping[str, str]) -> None:
        pieces = _INDEX.split(row.name)
        self.row = row
        self.texts, self.indices = pieces[::2], pieces[1::2]
        self.ranges = [parse_expression(ranges[index]) for index in self.indices]
        self.dims = [parse_expression(dim) for dim in row.dims]
        exists = parse_expression(row.exists) if row.exists else None
        self.optional = parse_expression(row.optional) if row.optional else None
        depends = exists and not set(exists.names).isdisjoint(self.indices)
        self.here = exists if depends else None  # asked once for the indices that it names
        last = max((i for i, index in enumerate(self.indices) if exists and index in exists.names), default=-1)
        self.asked_at = last if self.here else -1
        self.everywhere = None if self.here else exists  # asked once
        self.counted = tuple(name for count in self.ranges for name in count.names if name not in self.indices)
        asked = (name for condition in (exists, self.optional) if condition for name in condition.names)
        self.because = tuple(name for name in asked if name not in self.indices)

    def steps(self, fields: Mapping[str, object], at_most: int) -> int:
        """An upper bound of the tensors of this row: the product of its ranges, of one that depends its first value."""
        values = dict(fields)
        total = 1
        for index, count in zip(self.indices, self.ranges, strict=True):
            values[index] = 0
            size = whole(count, values) if total else 0
            total *= size
            if total > 8 * at_most:
                raise NoTable(f"{count.text} is {size:,}, which implies more than {at_most:,} tensors")
        return total

    def fill(self, tensors: dict[str, ExpectedTensor], fields: Mapping[str, object], at_most: int) -> None:
        """Add the tensors of this row; stops with an error beyond the limit for all rows."""
        same = all(set(dim.names).isdisjoint(self.indices) for dim in self.dims)
        tensor = None
        for name, values in self._names(0, self.texts[0], dict(fields), iter(range(16 * at_most))):
            if name is None or len(tensors) >= at_most:
                raise NoTable(f"it implies more than {at_most:,} tensors")
            if tensor is None or not same:
                shape = tuple(whole(dim, values) for dim in self.dims)
                needed = not (self.optional and self.optional.value(values))
                tensor = ExpectedTensor(shape, needed, self.row.dims, self.because, self.counted)
            tensors[name] = tensor

    def _names(
        self, at: int, name: str, values: dict[str, object], steps: Iterator[int]
    ) -> Iterator[tuple[str | None, dict[str, object]]]:
        """Each name of the row that exists, from the index at this place on, with the fields and indices it stands
        for; None where the steps run out: each number of an index takes one."""
        if at == len(self.indices):
            yield name, values
            return
        after = self.texts[at + 1]
        for number in range(whole(self.ranges[at], values)):
            if next(steps, None) is None:
                yield None, values
                return
            values[self.indices[at]] = number
            if not (self.here and at == self.asked_at) or self.here.value(values):
                yield from self._names(at + 1, f"{name}{number}{after}", values, steps)
