"""The requests of a job: which rank needs which part of which tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from ckptlint.model.tiling import IntArray
from ckptlint.planning.outcome import Constraint


@dataclass(frozen=True, eq=False)
class Target:
    """The parts of one tensor that the ranks of a job need: distinct boxes, and the ranks of each.

    Ranks with the same part share a box. Tensors with the same cuts share one target.

    Attributes:
        shape: global shape of the tensor, in elements.
        offsets, sizes: int64 [k, d], the boxes; a size of 0 is legal.
        rank, box: int64 [m], rank `rank[i]` needs box `box[i]`, sorted by rank; a rank may need several boxes, or none.
    """

    shape: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    rank: IntArray
    box: IntArray

    @classmethod
    def of_ranks(cls, shape: tuple[int, ...], rank: IntArray, offsets: IntArray, sizes: IntArray) -> Target:
        """The target in which rank `rank[i]` needs the box at `offsets[i]` of `sizes[i]`."""
        both = np.concatenate([offsets, sizes], axis=1)
        if not both.shape[1]:
            boxes, box = both[: min(len(both), 1)], np.zeros(len(rank), np.int64)
        else:
            boxes, box = np.unique(both, axis=0, return_inverse=True)
        order = np.argsort(rank, kind="stable")
        axes = len(shape)
        return cls(shape, boxes[:, :axes], boxes[:, axes:], rank[order], box.reshape(-1)[order].astype(np.int64))

    @classmethod
    def replicated(cls, shape: tuple[int, ...], ranks: IntArray) -> Target:
        """The target in which each of these ranks needs the whole tensor."""
        whole = np.array([shape], np.int64).reshape(1, len(shape))
        return cls(shape, np.zeros_like(whole), whole, ranks, np.zeros(len(ranks), np.int64))

    @cached_property
    def content(self) -> tuple[object, ...]:
        """A hashable value that equal targets share."""
        return (self.shape, *(array.tobytes() for array in (self.offsets, self.sizes, self.rank, self.box)))


@dataclass(frozen=True, slots=True, eq=False)
class TensorRequest:
    """The request of a job for one key. Ranks that need another shape under the same key have their own request.

    Attributes:
        dtype: dtype in the job; None where the job takes the stored one.
        target: the parts of a tensor; None for an object.
        ranks: int64, the ranks that ask, ascending, including ranks with an empty part.
    """

    key: str
    dtype: str | None
    target: Target | None
    ranks: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The ranks of a job and their requests.

    Attributes:
        form: `exact`, as the job's own code says, or `quick`, as sizes of axes imply.
        to: what the user named: `dp=8,tp=2`, or a function.
        requests: in the order in which a load asks for them.
        constraints: obstacles that follow from the sizes alone, and assumptions.
    """

    form: Literal["exact", "quick"]
    to: str
    world: int
    requests: list[TensorRequest] = field(default_factory=list)
    constraints: tuple[Constraint, ...] = ()
