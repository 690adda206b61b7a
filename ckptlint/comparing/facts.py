"""What is known of the values of a tensor, and what two tensors have to do with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import nan, prod
from typing import Literal

from ckptlint.comparing.regions import TensorBytes
from ckptlint.model.cover import Shape
from ckptlint.seals.row_hashes import RowHashes, matrix
from ckptlint.vocabulary.namings import StoredRoles

Relation = Literal[
    "equal",
    "rounded",
    "renamed",
    "padded",
    "transposed",
    "reordered",
    "joined",
    "split",
    "merged",
    "quantised",
    "unmerged",
    "exchanged",
    "differ",
    "absent",
    "unread",
]
"""How tensors of both sides hang together; `joined` and `split` are seen from the old side."""

_FEW = 64  # elements of which other tensors may hold the same by chance


@dataclass(frozen=True, eq=False)
class Side:
    """A tensor of one side, and the hashes of what it holds.

    Attributes:
        hashes: dtype -> hashes of the elements as they are in it, its own first.
        stored_as: what its name says that it holds, None where no known naming has it.
        moved: how it is stored, in words, where its rows were brought into the order that the other side has.
        stored: where its bytes lie, None where it was not looked at.
    """

    fqn: str
    dtype: str
    shape: Shape
    hashes: Mapping[str, RowHashes]
    stored_as: StoredRoles | None = None
    moved: str = ""
    stored: TensorBytes | None = None

    @property
    def is_read(self) -> bool:
        """Whether every element was read, once."""
        return bool(self.hashes) and all(hashes.is_whole for hashes in self.hashes.values())

    @cached_property
    def is_dull(self) -> bool:
        """Whether others may hold the same by chance: few elements, or all rows alike."""
        hashes = self.hashes[self.dtype]
        if prod(self.shape) < _FEW:
            return True
        if hashes.columns.size:
            return bool(hashes.rows.min() == hashes.rows.max() and hashes.columns.min() == hashes.columns.max())
        rows = hashes.rows[:-1] if matrix(self.shape)[2] > 1 else hashes.rows  # the last one may be shorter
        return bool((rows == rows[0]).all())

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return matrix(self.hashes[self.dtype].shape)[2]


Sides = Mapping[str, Side]


@dataclass(frozen=True, slots=True)
class Match:
    """Tensors of both sides that hang together.

    Attributes:
        relation: how.
        old, new: the keys, one or several; () on a side that has none.
        is_proven: whether all values of the old ones are those of the new ones by what a conversion may do.
        what: it in words, of what the relation leaves open (`float32 -> bfloat16`).
        notes: further sentences: rows, ranks, files.
        change: of two that differ, the norm of the difference relative to that of the old one; NaN where it is unknown.
        cosine: of the angle between both.
    """

    relation: Relation
    old: tuple[str, ...]
    new: tuple[str, ...]
    is_proven: bool
    what: str = ""
    notes: tuple[str, ...] = ()
    change: float = nan
    cosine: float = nan
