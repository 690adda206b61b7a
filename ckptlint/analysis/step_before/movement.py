"""How far each weight moved since the step before, as one figure a weight, by its kind and its layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import median

import numpy as np

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.step_before.leaps import ALIKE, LEAST_ELEMENTS, OTHER, kinds_of
from ckptlint.model import Checkpoint
from ckptlint.model.tiling import distinct
from ckptlint.vocabulary.keys import MOMENTS, layer_number, role

_SCALED = 0.5  # change of a weight that is half as large


@dataclass(frozen=True, slots=True)
class Movement:
    """How far a weight moved.

    Attributes:
        layer: its number, None outside of the layers.
        kind: its name without the numbers of layers and experts.
        change: norm of the difference relative to that of the old one; 0 for one that did not move.
        cosine: of the angle between both.
        is_trained: whether the optimizer holds state for it.
        is_matrix: whether it has several axes and elements enough for its angle to count.
    """

    fqn: str
    layer: int | None
    kind: str
    change: float
    cosine: float
    is_trained: bool
    is_matrix: bool

    @classmethod
    def of(cls, fqn: str, shape: tuple[int, ...], change: float, cosine: float, is_trained: bool) -> Movement:
        """The movement of the weight of a key."""
        is_matrix = len(shape) > 1 and int(np.prod(shape)) >= LEAST_ELEMENTS
        return cls(fqn, layer_number(fqn), role(fqn), change, cosine, is_trained, is_matrix)


def movements_of(ckpt: Checkpoint) -> list[Movement]:
    """The movement of each weight by the elements that were drawn; [] without a step before that was read."""
    table = ckpt.changes
    if table is None:
        return []
    trained = trained_weights(ckpt)
    rows = np.flatnonzero(kinds_of(table, "weight") & (table.was > 0) & np.isfinite(table.was) & np.isfinite(table.now))
    movements = []
    for follow in distinct(table.follow[rows]).tolist():
        chunks = rows[table.follow[rows] == follow]
        # the drawn elements of a chunk stand for all of it
        tensor = ckpt.tensors[table.follows[follow].key]
        count = np.prod(tensor.tiling.sizes[table.chunk[chunks]], axis=1, dtype=np.float64)
        now, was = table.now[chunks], table.was[chunks]
        apart = float((count * (table.change[chunks] * was) ** 2).sum())
        products = now * now, was * was, now * was * np.nan_to_num(table.cosine[chunks])
        squares = [float((count * product).sum()) for product in products]
        cosine = squares[2] / sqrt(squares[0] * squares[1]) if squares[0] else 0.0
        movements.append(
            Movement.of(tensor.fqn, tensor.global_shape, sqrt(apart / squares[1]), cosine, tensor.fqn in trained)
        )
    return movements


def trained_weights(ckpt: Checkpoint) -> frozenset[str]:
    """The keys of the weights for which the optimizer holds state."""
    states = (state for state in inventory_of(ckpt).states if state.what in MOMENTS)
    return frozenset(param.tensor.fqn for state in states for param in state.params)


def astray(movements: Collection[Movement]) -> list[Movement]:
    """The matrices that point elsewhere, or are scaled, where most others hardly turned; the furthest first."""
    matrices = [movement for movement in movements if movement.is_matrix and isfinite(movement.cosine)]
    if not matrices or median(movement.cosine for movement in matrices) < ALIKE:
        return []
    # of one that hardly turned, so large a change is one of scale
    far = [
        movement
        for movement in matrices
        if movement.cosine < OTHER or (movement.cosine > ALIKE and movement.change >= _SCALED)
    ]
    return sorted(far, key=lambda movement: -movement.change)


def short_names(kinds: Collection[str]) -> dict[str, str]:
    """The shortest ending of each kind that no other one has."""
    stems = {kind: kind.removesuffix(".weight") for kind in kinds}
    names = {}
    for kind, stem in stems.items():
        words = stem.split(".")
        endings = (".".join(words[start:]) for start in range(len(words) - 1, -1, -1))
        clear = (end for end in endings if end.strip("*.") and not end.startswith("*"))
        ends = (end for end in clear if sum(f".{rival}".endswith(f".{end}") for rival in stems.values()) == 1)
        names[kind] = next(ends, kind)
    return names
