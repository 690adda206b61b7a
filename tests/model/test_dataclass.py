"""`ckptlint.dataclass` against the library's own: a class made by each behaves the same."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from ckptlint import dataclass as ours

OPTIONS = [
    {}, {"slots": True}, {"frozen": True, "slots": True}, {"frozen": True, "slots": True, "eq": False},
    {"frozen": True, "eq": False, "repr": False}, {"slots": True, "eq": False},
]  # fmt: skip


def both(**options: Any) -> tuple[type, type]:
    """The same class, made by the library and by ckptlint."""
    made = []
    for maker in (dataclasses.dataclass, ours.dataclass):

        class Point:
            x: int
            names: list[str] = dataclasses.field(default_factory=list, repr=False)
            y: float = 1.5
            seen: dict[str, int] = dataclasses.field(default_factory=dict, init=False, compare=False)
            turns: int = dataclasses.field(default=0, init=False)
            label: str = dataclasses.field(default="", kw_only=True)

            def total(self) -> float:
                return self.x + self.y

        made.append(maker(**options)(Point))
    return made[0], made[1]


def outcome(work: Any) -> Any:
    """What comes of it, or the name of the error."""
    try:
        return work()
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_as_the_library(options: dict[str, Any]) -> None:
    answers = []
    for kind in both(**options):
        one = kind(1, ["a"], label="b")
        if not options.get("eq", True):
            own = [one == one, hash(one) == hash(one), one == kind(1, ["a"], label="b")]
        else:
            own = [one == kind(1, ["a"], label="b"), one == kind(2), outcome(lambda one=one: hash(one)), one == 1]
        answers.append(
            [
                own, repr(one) if options.get("repr", True) else "", one.total(), kind(3).names,
                kind(3).names is kind(3).names, (one.seen, one.turns), dataclasses.asdict(one),
                dataclasses.astuple(dataclasses.replace(one, x=7)),
                outcome(lambda one=one: dataclasses.replace(one, seen={})),
                outcome(lambda one=one: setattr(one, "x", 2)), outcome(lambda one=one: delattr(one, "y")),
                outcome(lambda one=one: setattr(one, "other", 2)) is None, outcome(kind),
                outcome(lambda kind=kind: kind(1, [], 2.0, {}, "c")), str(inspect.signature(kind)).count(","),
                dataclasses.is_dataclass(one),
            ]
        )  # fmt: skip
    assert answers[0] == answers[1]


@ours.dataclass(frozen=True, slots=True)
class Part:
    """A part of a box."""

    name: str
    sizes: tuple[int, ...] = ()


@ours.dataclass(frozen=True, slots=True)
class Leaf(Part):
    """One with a colour of its own."""

    colour: str = "green"

    def __repr__(self) -> str:
        return f"<{self.name}>"


def test_pickles_and_hashes() -> None:
    leaf = Leaf("a", (1, 2), "red")
    assert pickle.loads(pickle.dumps(leaf)) == leaf
    assert {leaf: 1}[Leaf("a", (1, 2), "red")] == 1
    assert leaf != Part("a", (1, 2))
    assert repr(leaf) == "<a>"
    assert repr(Part("a")) == "Part(name='a', sizes=())"


def test_what_comes_after_is_called() -> None:
    @ours.dataclass(slots=True)
    class Sum:
        values: list[int]
        whole: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.whole = sum(self.values)

    assert Sum([1, 2]).whole == 3
