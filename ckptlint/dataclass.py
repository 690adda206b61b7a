"""`dataclasses.dataclass`, made in a seventh of the time: a check makes some 180 classes before it reads anything."""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, fields
from dataclasses import dataclass as _with_fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

_put = object.__setattr__


def _is_frozen(self: Any, name: str, value: Any = None) -> None:
    raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be changed")


def _repr(self: Any) -> str:
    shown = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__qualname__}({shown})"


def _state(self: Any) -> list[Any]:
    return [getattr(self, item.name) for item in fields(self)]


def _restored(self: Any, state: list[Any]) -> None:
    for item, value in zip(fields(self), state, strict=True):
        _put(self, item.name, value)


def _init(own: tuple[Field[Any], ...], frozen: bool, is_followed: bool) -> Any:
    """What takes the fields; the one function of a class that is compiled."""
    known: dict[str, Any] = {"_put": _put, "_none": MISSING}
    arguments: dict[bool, list[str]] = {False: [], True: []}  # those by keyword alone are the second
    body = ["pass"]
    for item in own:
        name = value = item.name
        known[f"_default_{name}"] = item.default if item.default is not MISSING else item.default_factory
        if item.default is not MISSING:
            argument, value = f"{name}=_default_{name}", name if item.init else f"_default_{name}"
        elif item.default_factory is MISSING:
            argument = name
        else:
            made = f"_default_{name}()"
            argument, value = f"{name}=_none", f"{made} if {name} is _none else {name}" if item.init else made
        if item.init:
            arguments[bool(item.kw_only)].append(argument)
        if item.init or value != name:
            body.append(f"_put(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    body += ["self.__post_init__()"] * is_followed
    named = ["*", *arguments[True]] if arguments[True] else []
    exec(f"def __init__(self, {', '.join(arguments[False] + named)}):\n " + "\n ".join(body), known)  # noqa: S102  of names of fields alone, as the library does
    return known["__init__"]


def _late_init(made: Any, own: tuple[Field[Any], ...], frozen: bool) -> Any:
    """What compiles `__init__` in its own place for the first object: of most classes a check makes none."""

    def __init__(self: Any, *values: Any, **named: Any) -> None:  # noqa: N807  the name that it stands in for
        made.__init__ = _init(own, frozen, hasattr(made, "__post_init__"))
        made.__init__(self, *values, **named)

    return __init__


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, repr=True):  # noqa: A002  its names
        """As `dataclasses.dataclass` has it: fields, `replace`, pickles, equality and hashes are the same.

        That one compiles up to six functions for a class. Here all but `__init__` are shared.
        """

        def made_of(cls):
            given = set(vars(cls))
            cls.__doc__ = cls.__doc__ or cls.__name__  # else its signature is worked out, to stand there
            made = _with_fields(init=False, repr=False, eq=False, match_args=False, slots=slots)(cls)
            own = fields(made)
            methods = {"__init__": _late_init(made, own, frozen)}
            if repr:
                methods["__repr__"] = _repr
            if frozen:
                methods |= {"__setattr__": _is_frozen, "__delattr__": _is_frozen}
            if frozen and slots:
                methods |= {"__getstate__": _state, "__setstate__": _restored}
            if eq:
                compared = [item.name for item in own if item.compare]
                values = attrgetter(*compared) if compared else lambda self: ()
                methods["__eq__"] = lambda self, other: (
                    values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented
                )
                methods["__hash__"] = (lambda self: hash(values(self))) if frozen else None
            for name, method in methods.items():
                if name not in given:
                    setattr(made, name, method)
            return made

        return made_of if cls is None else made_of(cls)
