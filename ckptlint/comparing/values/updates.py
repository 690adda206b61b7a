"""Whether two sides are steps of a run, and how far each weight moved between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.step_before.movement import Movement, trained_weights
from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.comparing.values.match import Match, Side

_LEAST = 4  # weights that moved all over, from which on two sides are steps of a run


def movements(
    matches: Sequence[Match], sides: Sequence[OpenedCheckpoint], tensors: Mapping[str, Side]
) -> list[Movement]:
    """The movement of each weight if most weights changed everywhere, as between two steps of a run; else []."""
    weights = {param.tensor.fqn for opened in sides for param in inventory_of(opened.ckpt).params}
    trained = frozenset[str]().union(*(trained_weights(opened.ckpt) for opened in sides))
    pairs = [match for match in matches if match.old == match.new and match.old and match.old[0] in weights]
    moved = [match for match in pairs if match.relation == "differ" and not match.notes and isfinite(match.change)]
    if len(moved) < _LEAST or 2 * len(moved) < len(pairs):
        return []
    changes = [(match.old[0], match.change, match.cosine) for match in moved]
    changes += [(match.old[0], 0.0, 1.0) for match in pairs if match.relation == "equal"]
    return [Movement.of(name, tensors[name].shape, change, cosine, name in trained) for name, change, cosine in changes]
