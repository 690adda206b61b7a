"""Types of the comparison by values: a tensor with its hashes, and a match between tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan, prod
from typing import Any, Literal

from ckptlint.model.cover import Shape
from ckptlint.payload.tensor_bytes import TensorBytes
from ckptlint.seals.row_hashes import RowHashes, matrix
from ckptlint.vocabulary.namings import StoredRoles

Relation = Literal[
    "equal", "rounded", "renamed", "padded", "transposed", "reordered", "joined", "split", "merged", "quantised",
    "unmerged", "exchanged", "differ", "absent", "unread",
]  # fmt: skip
"""Relation between tensors of both sides; `joined` and `split` describe the step from old to new."""

_FEW = 64  # fewer elements may be equal in unrelated tensors


@dataclass(frozen=True, eq=False)
class Side:
    """A tensor of one side with hashes of its content.

    Attributes:
        hashes: dtype -> hashes of the elements in that dtype, its own dtype first.
        stored_as: roles that its name implies; None under an unknown naming.
        moved: its stored order in words, where the rows were reordered to match the other side; else "".
        stored: readable bytes; None where they were not examined.
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
        """Whether every element was read exactly once."""
        return bool(self.hashes) and all(hashes.is_whole for hashes in self.hashes.values())

    @cached_property
    def is_dull(self) -> bool:
        """Whether unrelated tensors may be equal by chance: few elements, or all rows equal."""
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
    """Tensors of both sides that belong together.

    Attributes:
        old, new: keys of either side; () where a side has none.
        is_proven: whether all values are equal up to what a legal conversion changes.
        what: details of the relation (`float32 -> bfloat16`).
        notes: further sentences on rows, ranks, files.
        change: norm of the difference divided by the norm of the old tensor; NaN where unknown.
        cosine: cosine of the angle between both; NaN where unknown.
    """

    relation: Relation
    old: tuple[str, ...]
    new: tuple[str, ...]
    is_proven: bool
    what: str = ""
    notes: tuple[str, ...] = ()
    change: float = nan
    cosine: float = nan

    def as_dict(self) -> dict[str, Any]:
        """The match as JSON has it; None for what is absent."""
        return {
            "relation": self.relation,
            "old": [*self.old],
            "new": [*self.new],
            "proven": self.is_proven,
            "what": self.what or None,
            "notes": [*self.notes],
            "change": self.change if isfinite(self.change) else None,
            "cosine": self.cosine if isfinite(self.cosine) else None,
        }
