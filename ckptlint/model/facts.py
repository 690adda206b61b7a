"""What follows from a checkpoint or a tiling, worked out once and kept on the object itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Facts(dict[Hashable, Any]):
    """What was worked out about an object; a copy or a pickle of it works it out anew."""

    def __reduce__(self) -> tuple[type[Facts], tuple[()]]:
        return Facts, ()


class HasFacts(Protocol):
    """An object that keeps what was worked out about it."""

    @property
    def facts(self) -> Facts:
        """(function, further arguments) -> its result."""


Subject = TypeVar("Subject", bound=HasFacts)
Result = TypeVar("Result")
More = ParamSpec("More")


def fact(work: Callable[Concatenate[Subject, More], Result]) -> Callable[Concatenate[Subject, More], Result]:
    """The function, called once for each subject and further (hashable, positional) arguments.

    The result lives as long as its subject: nothing holds a checkpoint that its caller has let go.
    """

    @wraps(work)
    def kept(subject: Subject, /, *more: More.args, **named: More.kwargs) -> Result:
        key = (work, *more)
        if key not in subject.facts:
            subject.facts[key] = work(subject, *more, **named)
        result: Result = subject.facts[key]
        return result

    return kept
