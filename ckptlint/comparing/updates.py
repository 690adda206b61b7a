"""Measures how far each weight moved between two steps of a run, and finds weights that did not move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from ckptlint.analysis.inventory import inventory_of
from ckptlint.comparing.match import Match
from ckptlint.comparing.pairs.matching import layer_number
from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.vocabulary.keys import MOMENTS, role

_LEAST = 4  # weights that moved all over, from which on two sides are steps of a run


@dataclass(frozen=True, slots=True)
class Weights:
    """The keys of the weights of a side, and of those for which its optimizer holds state."""

    keys: frozenset[str]
    trained: frozenset[str]


@dataclass(frozen=True, slots=True)
class Update:
    """How far a weight moved.

    Attributes:
        layer: its number, None outside of the layers.
        kind: its name without the numbers of layers and experts.
        change: norm of the difference relative to that of the old one; 0 for one that did not move.
        cosine: of the angle between both.
        is_trained: whether the optimizer holds state for it.
    """

    fqn: str
    layer: int | None
    kind: str
    change: float
    cosine: float
    is_trained: bool


def weights_of(sides: Iterable[OpenedCheckpoint]) -> Weights:
    """The weights of a checkpoint."""
    keys: set[str] = set()
    trained: set[str] = set()
    for opened in sides:
        inventory = inventory_of(opened.ckpt)
        keys |= {param.tensor.fqn for param in inventory.params}
        trained |= {param.tensor.fqn for state in inventory.states if state.what in MOMENTS for param in state.params}
    return Weights(frozenset(keys), frozenset(trained))


def updates(matches: Sequence[Match], weights: Weights) -> list[Update]:
    """The update of each weight if most weights changed everywhere, as between two steps of a run; else []."""
    pairs = [match for match in matches if match.old == match.new and match.old and match.old[0] in weights.keys]
    moved = [match for match in pairs if match.relation == "differ" and not match.notes and isfinite(match.change)]
    if len(moved) < _LEAST or 2 * len(moved) < len(pairs):
        return []
    still = [match for match in pairs if match.relation == "equal"]
    return [
        Update(
            match.old[0],
            layer_number(match.old[0]),
            role(match.old[0]),
            change,
            cosine,
            match.old[0] in weights.trained,
        )
        for match, change, cosine in [
            *((match, match.change, match.cosine) for match in moved),
            *((match, 0.0, 1.0) for match in still),
        ]
    ]


def short_names(kinds: Collection[str]) -> dict[str, str]:
    """The shortest ending of each kind that no other one has."""
    names = {}
    for kind in kinds:
        parts = kind.removesuffix(".weight").split(".")
        endings = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        names[kind] = next(
            (
                end
                for end in endings
                if not end.startswith("*") and sum(_ends(other, end) for other in kinds) == 1 and end.strip("*.")
            ),
            kind,
        )
    return names


def _ends(kind: str, end: str) -> bool:
    stem = kind.removesuffix(".weight")
    return stem == end or stem.endswith(f".{end}")
