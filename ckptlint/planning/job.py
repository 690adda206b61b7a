"""What a job asks for: which rank wants which part of which tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from ckptlint.model.tiling import IntArray
from ckptlint.planning.outcome import Constraint


@dataclass(frozen=True, eq=False)
class Target:
    """What the ranks of a job want of one tensor: the distinct boxes, and which rank wants which.

    Ranks that hold the same part share a box. Tensors that are cut alike share one target.

    Attributes:
        shape: global shape of the tensor, in elements.
        offsets, sizes: int64 [k, d], the boxes; a size of 0 is legal.
        rank, box: int64 [m], rank `rank[i]` wants box `box[i]`, by rank; a rank may want several boxes, or none.
    """

    shape: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    rank: IntArray
    box: IntArray

    @classmethod
    def of_ranks(cls, shape: tuple[int, ...], rank: IntArray, offsets: IntArray, sizes: IntArray) -> Target:
        """The target in which rank `rank[i]` wants the box at `offsets[i]` of `sizes[i]`."""
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
        """The target in which each of these ranks wants the whole tensor."""
        whole = np.array([shape], np.int64).reshape(1, len(shape))
        return cls(shape, np.zeros_like(whole), whole, ranks, np.zeros(len(ranks), np.int64))

    @cached_property
    def content(self) -> tuple[object, ...]:
        """What two targets that ask for the same have in common."""
        return (self.shape, *(array.tobytes() for array in (self.offsets, self.sizes, self.rank, self.box)))


@dataclass(frozen=True, slots=True, eq=False)
class TensorRequest:
    """What a job asks for under one key. Ranks that want other shapes under it have a request of their own.

    Attributes:
        dtype: that the job holds it in; None where it takes what is stored.
        target: the parts of a tensor; None for an object.
        ranks: int64, the ranks that ask, in order; of a tensor those without a part of it, too.
    """

    key: str
    dtype: str | None
    target: Target | None
    ranks: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The ranks of a job and what they want.

    Attributes:
        form: `exact`, as the job's own code says, or `quick`, as sizes of axes imply.
        to: what the user named: `dp=8,tp=2`, or a function.
        world: how many ranks.
        requests: in the order in which a load goes through them.
        constraints: what follows from the sizes alone, and what was guessed.
    """

    form: Literal["exact", "quick"]
    to: str
    world: int
    requests: list[TensorRequest] = field(default_factory=list)
    constraints: tuple[Constraint, ...] = ()
