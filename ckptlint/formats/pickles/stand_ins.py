"""What a pickle gets in place of the names it asks for: inert stand-ins that tell when they are misused.

Each (module, name) becomes a class that keeps what it is given and does nothing. It holds every call, every state and
every item against the table of `names` while the C unpickler runs, in the order and with the arguments that the
real names would see, and reports anything that no real file has.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Literal

from ckptlint.formats.pickles import names
from ckptlint.formats.pickles.names import CallRow, Fits, Pair, always, never
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.dtypes import ALIASES, TORCH_NAME
from ckptlint.vocabulary.metadata_classes import METADATA_CLASSES, METADATA_ENUMS

Fault = Literal["named", "called", "unknown", "filled", "arguments", "state", "items", "result"]
"""What is wrong: a name that is refused, or is refused and called; one that nobody knows and that is called, or filled
with more than data; a known one whose arguments, state or items no real file has; or what it gave is called or filled
as if it were a function.
"""


class Node(list[Any]):
    """A stand-in for one of the metadata classes: a list whose only element is the state the pickle gave.

    A list because BUILD then runs in C (`__setstate__` is `list.append`), which halves the time of a large file.
    Hashed by identity: a dict keyed by nodes keeps every entry, equal ones too.
    """

    __slots__ = ()
    kind = ""  # the class it stands for, as torch calls it
    name = ""  # the class as the pickle names it
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]


class Named(type):
    """The class of stand-in classes, so that a class kept as a value can be sent on by its name."""

    module: str
    name: str
    sort: str  # the word of the table for the name itself
    members: bool
    call: Fits
    tell: Callable[[Fault], None]
    fault: Fault
    give: Callable[..., Any] | None  # what makes something else of a call that is as it may be
    __getinitargs__ = None  # with it OBJ and INST without arguments are a call here too, as they are of a function

    def __call__(cls, *args: Any) -> Any:
        if not cls.call(args):
            cls.tell(cls.fault)
        elif cls.give is not None:
            return cls.give(cls, *args)
        return _made(cls, args)

    # BUILD sets attributes of the class itself, and the others call what it has of that name
    __setstate__ = append = extend = add = property(lambda cls: lambda *_: cls.tell("state"))


class Opaque(metaclass=Named):
    """A stand-in for any other name: keeps module, name, arguments, state and items, and does nothing."""

    __slots__ = ("args", "items", "state")
    module = ""
    name = ""
    sort = ""
    gives = ""
    give = None
    call: Fits = staticmethod(always)
    new: Fits = staticmethod(always)
    fits: Fits = staticmethod(always)
    holds: Fits = staticmethod(always)
    agrees: Callable[[tuple[Any, ...], Any], bool] = staticmethod(lambda args, state: True)
    touches = True
    has_items = True
    members = False
    fault: Fault = "arguments"
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    @staticmethod
    def tell(fault: Fault) -> None:
        """Report a fault to the reader of the pickle."""

    def __new__(cls, *args: Any, **options: Any) -> Opaque:
        """The object that NEWOBJ makes, without a call of its class."""
        if options or not cls.new(args):
            cls.tell(cls.fault)
        return _made(cls, args)

    def __setstate__(self, state: Any) -> None:
        # once, as pickle writes it: a second time an attribute of this name would be called
        is_attribute = type(self.items) is _Pairs and any(key == "__setstate__" for key, _ in self.items)
        if self.state is not None or is_attribute or not self.agrees(self.args, state):
            self.tell("state")
        elif not self.fits(state):
            self._tell_of(state, "state")
        self.state = state

    def _tell_of(self, value: Any, fault: Fault) -> None:
        """A user may vouch for an unknown class, but not for a partial."""
        self.tell("filled" if self.fault == "unknown" and not is_armed(value) else fault)

    def append(self, item: Any) -> None:
        """Keep a list item of a subclass of list."""
        self.extend([item])

    def extend(self, items: Any) -> None:
        """Keep the list items of a subclass of list; after BUILD, or in a dict, an attribute of this name is called."""
        if not self.has_items or self.state is not None or type(self.items) is _Pairs:
            self.tell("items")
        elif not self.holds(items):
            self._tell_of(items, "items")
        self.items.extend(items)

    def add(self, item: Any) -> None:
        """Refused: a set is not filled like this, so `add` would be an attribute of the object."""
        self.tell("items")

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.has_items or self.state is not None:
            self.tell("items")
        elif not self.holds([key, value]):
            self._tell_of([key, value], "items")
        if type(self.items) is list:
            self.items = _Pairs(self.items)
        self.items.append((key, value))

    def __call__(self, *args: Any) -> Any:
        self.tell("result")
        return self

    def __repr__(self) -> str:
        return printable(f"<{self.module}.{self.name}>")

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.module, self.name, self.args, self.state, self.items)


class _Pairs(list[Any]):
    """The dict items of an object."""

    __slots__ = ()


class Dict(dict[Any, Any]):
    """An OrderedDict as stored: its items, without attributes."""

    __slots__ = ("is_built",)

    @staticmethod
    def tell(fault: Fault) -> None:
        """Report a fault to the reader of the pickle."""

    def __setstate__(self, state: Any) -> None:
        if hasattr(self, "is_built"):
            self.tell("state")
        self.is_built = True

    def extend(self, items: Any) -> None:
        """Refused: a dict has no list items, so `extend` would be an attribute of the object."""
        self.tell("items")

    append = add = extend

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def _made(cls: Any, args: tuple[Any, ...]) -> Opaque:
    self: Opaque = object.__new__(cls)
    self.args, self.state, self.items = args, None, []
    return self


def opaque(module: str, name: str, **members: Any) -> type[Opaque]:
    """A stand-in class of this name; `give`, where it is among the members, says what a call makes."""
    functions = {key: staticmethod(value) for key, value in members.items() if callable(value)}
    body = {"__slots__": (), "module": module, "name": name, **members, **functions}
    return Named("Opaque", (Opaque,), body)  # type: ignore[return-value]


def _remade(module: str, name: str, args: tuple[Any, ...], state: Any, items: list[Any]) -> Opaque:
    """A stand-in as it left the process that read it."""
    made = opaque(module, name)(*args)
    made.state, made.items = state, items
    return made


copyreg.pickle(Named, lambda cls: (opaque, (cls.module, cls.name)))


# ---------------------------------------------------------------- the names of `.metadata`

_PLAIN = {("builtins", name) for name in ("set", "frozenset", "bytearray", "complex", "list", "dict")} | {
    ("_codecs", "encode")
}
"""What bytes and sets are pickled as; the rest of the table is refused in `.metadata`."""


class NoText(str):
    """The text of a path, a dtype or a layout. As a key it is not that text."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((NoText, str(self)))


def _layout(_: Any, name: Any) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("torch.serialization._get_layout was given no name")
    return NoText(name.removeprefix("torch."))


def _path(_: Any, *words: Any) -> str:
    if not all(isinstance(word, str) for word in words):
        raise pickle.UnpicklingError("a path has parts that are not text")
    return NoText("/".join(words).replace("//", "/"))


_TEXTS: dict[Pair, Callable[..., str]] = {
    ("torch.serialization", "_get_layout"): _layout,
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")  # the second on Python 3.13
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""Names whose objects become texts."""


SCALARS = frozenset({bool, int, float, str, type(None)})
"""Types of values that hold no others, and no bytes."""


def raw_bytes(value: Any) -> bytes | None:
    """The bytes that a stand-in for bytes or a bytearray means; None where it is neither."""
    if isinstance(value, bytes):
        return value
    if getattr(type(value), "gives", "") not in ("bytes", "buffer"):
        return None
    data = value.args[0] if value.args else b""
    return data.encode("latin-1", "replace") if isinstance(data, str) else raw_bytes(data)


# ---------------------------------------------------------------- the names of one pickle

_CLASS_NAME = lazy_pattern(r"[A-Z](?=\w*[a-z])\w*")


class StandIns:
    """The stand-ins of one pickle: the part of an unpickler that answers for names.

    `strict` is for `.metadata`, whose list of names is closed; in a state classes of training code are inert values.
    """

    def __init__(self, file: Any, strict: bool) -> None:
        super().__init__(file)  # type: ignore[call-arg]
        self.faults: dict[tuple[Pair, Fault], tuple[int, str] | None] = {}
        self.unknown: dict[Pair, None] = {}  # names that nobody knows
        self.loaded: list[bytes] = []  # what is handed to a loader
        self._strict = strict
        self._has_acting = False
        # made anew for each pickle: a crafted BUILD can then damage nothing that outlives the read
        self._stand_ins: dict[Pair, Any] = {}
        self._storage: Any = None
        self._storages: dict[str, tuple[Any, ...]] = {}

    def tell(self, key: Pair, fault: Fault) -> None:
        """Note that a name is misused."""
        self.faults.setdefault((key, fault), None)

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name; nothing is imported or looked up."""
        return self._kept((module, name), self._stand_in)

    def _kept(self, key: Pair, make: Callable[[Pair], Any]) -> Any:
        if key not in self._stand_ins:
            self._stand_ins[key] = self._guarded(make(key))
        return self._stand_ins[key]

    def persistent_load(self, pid: Any) -> Any:
        """A storage of a tensor record as its description; `.metadata` has none.

        Of the class of a module, which files before torch 1.6 hold with its source, the class itself.

        Source: torch.serialization._legacy_save (torch 1.0 to 2.13)
        """
        if self._strict:
            raise pickle.UnpicklingError("a persistent id, which metadata does not have")
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Named):
            return pid[1]
        if self._storage is None:
            self._storage = self._inert(("torch", "storage"), gives="storage", fits=never, has_items=False)
        if type(pid) is tuple and not (names.call_table().storage(pid) and self._is_first(pid)):
            self.tell(("torch", "storage"), "arguments")
        return _made(self._storage, (pid,))

    def _is_first(self, pid: tuple[Any, ...]) -> bool:
        """Whether a storage is named as it was before: torch takes all from the first, and nothing to be on `meta`."""
        first = self._storages.setdefault(pid[2], pid)
        return pid[3] != "meta" and (pid[4] == 0 or (first[1], first[4]) == (pid[1], pid[4]))

    def _inert(self, key: Pair, **members: Any) -> type[Opaque]:
        return opaque(*key, tell=partial(self.tell, key), **members)

    def _stand_in(self, key: Pair) -> Any:
        """What stands for a class or function of this name: a node, an inert class, or a refusal."""
        module, name = key
        if (kind := METADATA_CLASSES.get(key)) and not self._strict:  # a second BUILD must be seen
            return self._inert(key, call=never, new=names.is_nothing, has_items=False, sort="type")
        if kind:
            return type("Node", (Node,), {"__slots__": (), "kind": kind, "name": name})
        if self._strict and key == ("torch", "Size"):
            return ().__add__  # takes a tuple and returns that same tuple, in C; anything else is a TypeError
        if module == "torch" and TORCH_NAME.fullmatch(name):
            return ALIASES.get(name, name) if self._strict else NoText(ALIASES.get(name, name))
        known = names.of_python_3(module, name)
        if known == ("builtins", "getattr"):
            return self._inert(key, give=self._member, new=never)
        if self._strict and known == ("collections", "OrderedDict"):
            return Dict
        if self._strict and known in _TEXTS:
            return self._inert(key, give=_TEXTS[known])
        if self._strict and key in METADATA_ENUMS:
            return self._inert(key, members=True)
        if row := names.call_table().rows.get(known) if not self._strict or known in _PLAIN else None:
            return self._listed(key, known, row)
        if self._strict or "refused" in (names.standing(*key), names.standing(*known)):
            self.tell(key, "named")
            return self._inert(key, call=never, new=never, fault="called", sort="refused")
        return self._unknown(key)

    def _listed(self, key: Pair, known: Pair, row: CallRow) -> type[Opaque]:
        """The stand-in for a name of the table, which accepts what its row says and nothing else."""
        members: dict[str, Any] = {
            "call": row.call, "new": row.new, "fits": row.state, "touches": row.touches, "has_items": row.items,
            "gives": row.gives, "sort": row.sort, "members": row.members,
        }  # fmt: skip
        if known in _TEXTS:
            members["give"] = _TEXTS[known]
        elif known == ("torch", "Size"):
            members["give"] = lambda _, sizes: sizes
        elif known == ("collections", "OrderedDict"):
            made = type("Dict", (Dict,), {"__slots__": (), "tell": staticmethod(partial(self.tell, key))})
            members["give"] = lambda _, *args: made(*args)
        elif known == ("functools", "partial"):
            members |= {"give": self._partial, "fits": partial(self._fits_partial, row.state), "touches": False}
        elif known == ("copyreg", "_reconstructor"):
            members["give"] = _reconstructed
        elif known[0] == "torch._tensor" or known[1] == "_rebuild_parameter_with_state":
            members["give"] = partial(_rebuilt, opaque(*key, tell=partial(self.tell, key), fits=never, has_items=False))
        elif known == ("numpy", "dtype"):
            members["agrees"] = _is_numpy_dtype
        elif row.gives == "storage":
            members["give"] = self._loaded
        return self._inert(key, **members)

    def _unknown(self, key: Pair) -> type[Opaque]:
        """The stand-in of a name that nobody knows: a class may be made and filled, as training code keeps its own."""
        self.unknown[key] = None
        is_data = partial(is_data_of, key[0].partition(".")[0])
        return self._inert(
            key,
            call=partial(names.may_call, *key),
            new=is_data if names.is_own_class(*key) else names.is_nothing,
            fits=is_data,
            holds=is_data,
            sort="type" if names.is_class(key[1]) else "stranger",
            fault="unknown",
            members=names.is_own_class(*key),
        )

    def _member(self, cls: Any, owner: Any, name: Any) -> Any:
        """`getattr` on a class: a class inside it, or a member of an enum, which cannot be called.

        Up to protocol 3 classes in classes are pickled so, and on Python 3.11.2 the members of enums. By their names
        the first are distinguished from the second.
        """
        if not isinstance(owner, Named) or type(name) is not str:
            cls.tell("arguments")
            return _made(cls, (owner, name))
        key = (owner.module, f"{owner.name}.{name}")
        is_unknown = (owner.module, owner.name) in self.unknown
        if not self._strict and key in names.call_table().rows:
            return self.find_class(*key)
        if is_unknown and _CLASS_NAME.fullmatch(name):
            return self._kept(key, self._unknown)
        if not owner.members:
            cls.tell("arguments")
        # of a class that nobody knows an attribute may be a method too
        sort, gives = ("stranger" if is_unknown and not name.isupper() else ""), ("" if is_unknown else "data")
        made = self._inert((owner.module, owner.name), call=never, fits=never, has_items=False, gives=gives, sort=sort)
        return _made(made, (name,))

    def _loaded(self, cls: Any, data: Any) -> Opaque:
        self.loaded.append(raw_bytes(data) or b"")
        return _made(cls, (data,))

    def _partial(self, cls: Any, function: Any) -> Opaque:
        self._note_acting(function)
        return _made(cls, (function,))

    def _fits_partial(self, shape: Fits, state: Any) -> bool:
        if not shape(state):
            return False
        self._note_acting(state[0])
        return True

    def _note_acting(self, function: Named) -> None:
        """From the first partial of something that may act, no object that is touched may hold one."""
        if not self._has_acting and function.sort != "function":
            self._has_acting = True
            for made in self._stand_ins.values():
                self._guarded(made)

    def _guarded(self, made: Any) -> Any:
        if self._has_acting and isinstance(made, Named):
            for name in ("call", "new", "fits") if made.touches else ("call", "new"):  # type: ignore[attr-defined]
                setattr(made, name, staticmethod(partial(_fits_unarmed, getattr(made, name))))
        return made


def _reconstructed(cls: Any, made: Any, base: Any, state: Any) -> Opaque:
    """The object that `copyreg._reconstructor` makes, as NEWOBJ would."""
    if not made.new(()):
        made.tell(made.fault)
    if base.sort == "type" and not base.call((state,)):
        base.tell(base.fault)
    return _made(made, () if state is None else (state,))


def _rebuilt(attributed: type[Opaque], cls: Any, *args: Any) -> Opaque:
    """A tensor with attributes; with one that can be called, no call takes it."""
    if cls.sort != "rebuild" and not args[0].call(args[2]):
        args[0].tell(args[0].fault)
    states = args[3] if type(args[3]) is tuple else (args[3],)
    values = [value for state in states if type(state) is dict for value in state.values()]
    acts = any(isinstance(value, Named) or is_armed(value) for value in values)
    return _made(attributed if acts else cls, args)


HAS_OBJECTS = 3
"""The flags of a numpy dtype that has objects in it, of those that concern references."""

_OBJECT, _REFERENCES = 63, 7  # all flags of an object itself; those that concern references


def _is_numpy_dtype(args: tuple[Any, ...], state: Any) -> bool:
    """Whether the numbers that a dtype is filled with are those that numpy writes for it: it trusts them.

    Source: numpy 1.26 and 2.4, numpy/core/src/multiarray/descriptor.c, arraydescr_reduce and arraydescr_setstate
    """
    _, _, base, _, fields, size, alignment, flags, *_ = state
    kind = args[0][0] if isinstance(args[0], str) else "V"
    if kind not in "SUV":
        return bool((base, fields, size, alignment, flags) == (None, None, -1, -1, _OBJECT if kind == "O" else 0))
    inner = [(base[0], 0, prod(base[1]) if isinstance(base[1], tuple) else base[1])] if base else []
    for field in (fields or {}).values():
        if not (type(field) is tuple and len(field) in (2, 3) and type(field[1]) is int and field[1] >= 0):
            return False
        inner.append((field[0], field[1], 1))
    if any(getattr(type(dtype), "gives", "") != "numpy_dtype" or count < 0 for dtype, _, count in inner):
        return False
    is_long = size >= max((at + numpy_bytes(dtype) * count for dtype, at, count in inner), default=0)
    has_objects = any(dtype.args[0] == "O8" or (dtype.state and dtype.state[7] & HAS_OBJECTS) for dtype, _, _ in inner)
    is_own = not isinstance(args[0], str) or size == int(args[0][1:]) * (4 if kind == "U" else 1)
    return bool(is_own and is_long and flags & _REFERENCES == (HAS_OBJECTS if has_objects else 0))


def numpy_bytes(made: Opaque) -> int:
    """Size of an element of a dtype in bytes."""
    if made.state and made.state[5] >= 0:
        return int(made.state[5])
    return int(made.args[0][1:]) * (4 if made.args[0][0] == "U" else 1) if isinstance(made.args[0], str) else 0


_PURE = ("function", "container", "constant")  # what a name stands for that whoever calls it may call


def is_data_of(package: str, value: Any) -> bool:
    """Whether a value is plain data at every depth; unknown code may get nothing else.

    No function but pure ones of the table, no class, and no object but those of the table and of the package itself. An
    object of the table may hold a class of the table: it is known what it does with it.
    """
    stack, seen = [(value, False)], set()
    while stack:
        item, is_inside = stack.pop()
        if isinstance(item, Named):
            is_known = item.sort not in ("", "refused") and item.fault != "unknown"
            if item.sort not in _PURE and not (is_inside and is_known):
                return False
        elif isinstance(item, (list, tuple, dict, set, frozenset, Opaque)) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Opaque):
                is_strange = item.fault == "unknown"
                is_other = is_strange and item.module.partition(".")[0] != package
                if is_other or item.sort == "stranger" or (item.module, item.name) == ("functools", "partial"):
                    return False
                stack += [(inner, not is_strange) for inner in (item.args, item.state, item.items)]
            else:
                held = [*item.keys(), *item.values()] if isinstance(item, dict) else item
                stack += [(inner, is_inside) for inner in held]
    return True


def _fits_unarmed(shape: Fits, value: Any) -> bool:
    return shape(value) and not is_armed(value)


def is_armed(value: Any) -> bool:
    """Whether something in a value is a partial of more than a function that the table knows to be pure."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if id(item) in seen or not isinstance(item, (list, tuple, dict, Opaque)):
            continue
        seen.add(id(item))
        if isinstance(item, Opaque):
            is_partial = (item.module, item.name) == ("functools", "partial")
            state = item.state if type(item.state) is tuple else ()
            if is_partial and any(getattr(arg, "sort", "") != "function" for arg in item.args + state[:1]):
                return True
            stack += [item.args, item.state, item.items]
        else:
            held = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            if not SCALARS.issuperset(map(type, held)):  # each tensor holds its mesh, and that all ranks of the job
                stack += held
    return False
