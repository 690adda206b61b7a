"""What comes out of a plan: whether the checkpoint loads there, what keeps it from it, what each rank reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Effect = Literal["fails", "drops", "note"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """Something that a load refuses, leaves out, or that its user should know.

    Attributes:
        effect: `fails` the load raises; `drops` it loads and something is lost; `note` neither.
        sentence: what and why, without the keys.
        keys: the keys concerned, printable.
        source: where the library says so (library, version, file or function).
        guessed: whether it rests on something that the checkpoint does not say.
    """

    effect: Effect
    sentence: str
    keys: tuple[str, ...] = ()
    source: str = ""
    guessed: bool = False
