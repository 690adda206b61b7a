"""The flat groups of DeepSpeed's ZeRO: parameters laid end to end in one vector, and cut over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ckptlint.model.stored import StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter -> shape, in the order in which they lie."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """What one file holds of a group.

    Attributes:
        number: of the group in the file.
        index, ranks: its place among the ranks that the group is cut over, and how many these are.
        weights: in fp32; None where they are not there, or not one-dimensional.
        moments: `exp_avg` and the like; the one-dimensional ones.
        slices: parameter -> (first element in this part, elements); None where the file does not say.
        padding: elements at its end that belong to no parameter, as the file says; None where it does not.
        between: elements of padding between the group's parameters, as the file says.
        is_stripped: whether the weights are surely without that padding; otherwise they may have it.
    """

    file: str
    number: int
    index: int
    ranks: int
    weights: StoredTensor | None
    moments: Mapping[str, StoredTensor]
    slices: Mapping[str, tuple[int, int]] | None = None
    padding: int | None = None
    between: int = 0
    is_stripped: bool = False

    @property
    def length(self) -> int:
        """Elements of the part, its padding included."""
        elements = 0 if self.weights is None else self.weights.shape[0] + (self.padding or 0)
        return max([moment.shape[0] for moment in self.moments.values()] or [elements])

    @property
    def is_even(self) -> bool:
        """Whether the moments are as long as the weights."""
        return all(self.weights is not None and flat.shape == self.weights.shape for flat in self.moments.values())


@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """Parts that belong together, and the parameters in them.

    Attributes:
        parts: stages 1 and 2: those of the ranks that one group is cut over; stage 3: all groups of one rank.
        shapes: the parameters, a list for each group; () where no file lists them.
        listed: the file that lists them.
        is_by_parameter: whether each parameter is cut by itself (stage 3).
    """

    parts: tuple[FlatPart, ...]
    shapes: tuple[Shapes, ...]
    listed: str
    is_by_parameter: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have their part here."""
        return len(self.parts) == self.parts[0].ranks

    @property
    def shares(self) -> list[int]:
        """Elements of one rank's equal parts of the parameters of each list, each of them rounded up."""
        ranks = self.parts[0].ranks
        return [sum(-(-prod(shape) // ranks) for shape in shapes.values()) for shapes in self.shapes]
