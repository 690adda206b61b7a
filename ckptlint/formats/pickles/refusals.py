"""Where a pickle does what it must not: the byte of the opcode that names, calls or fills what is refused.

The C unpickler does not say where it is. A pickle in which something is refused is therefore read a second time, by the
unpickler that is written in Python, over the same stand-ins.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ckptlint.formats.pickles.names import Pair
from ckptlint.formats.pickles.stand_ins import Fault, StandIns
from ckptlint.model.text import printable

_WALK_LIMIT = 64 * 1024**2
_OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_MISUSE: dict[Fault, str] = {
    "filled": "with a function, a class or an object of another package",
    "arguments": "with arguments that no real file has",
    "state": "with a state that no real file has",
    "items": "with items that no real file has",
    "result": "again, by what it made",
}


class Refused(NamedTuple):
    """A name the pickle may not ask for, or not in this way.

    `position` is the byte offset of the opcode that names it, or that calls or fills it where that is the fault; -1
    when it is too far into the file to be looked for.
    """

    target: str  # `module.name`, printable
    position: int
    called: bool  # an opcode would call it
    trace: tuple[str, ...]  # the opcodes concerned, one line each
    unknown: bool = False  # nobody knows what it does when it is called, or with what it is filled
    nested: bool = False  # it stands in a pickle inside bytes; the position counts from the start of that one
    misuse: str = ""  # how a known name is called that no real file calls so, or with what an unknown one is filled


class Tracer(StandIns, pickle._Unpickler):
    """The unpickler in Python, which knows at which opcode it is."""

    def __init__(self, data: bytes, strict: bool) -> None:
        self.file = io.BytesIO(data)
        self.opcode = (0, "")
        self.named: dict[Pair, tuple[int, str]] = {}
        super().__init__(self.file, strict)

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name, whose first place is noted."""
        self.named.setdefault((module, name), self.opcode)
        return super().find_class(module, name)

    def tell(self, key: Pair, fault: Fault) -> None:
        """Note that a name is misused, and where."""
        self.faults.setdefault((key, fault), self.opcode)

    def load_frame(self) -> None:
        """Read on in the file itself, whose position then is that of the opcode."""
        self.file.read(8)


def _noting(code: int, handler: Callable[[Any], None]) -> Callable[[Any], None]:
    def noted(self: Tracer) -> None:
        self.opcode = (self.file.tell() - 1, _OPCODES[code])
        handler(self)

    return noted


_HANDLERS: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch | {pickle.FRAME[0]: Tracer.load_frame}
Tracer.dispatch = {code: _noting(code, handler) for code, handler in _HANDLERS.items()}


def refusal_text(data: bytes, strict: bool, faults: list[tuple[Pair, Fault]]) -> tuple[Refused, ...]:
    """Each fault that was found in a pickle, by where it stands in it."""
    if not faults:
        return ()
    tracer = Tracer(data[:_WALK_LIMIT], strict)
    with suppress(Exception):  # a crafted stream can raise anything: what was found up to here still stands
        tracer.load()
    made: dict[Pair, Refused] = {}
    for key, fault in faults:  # of a name, what was found first
        named, act = tracer.named.get(key), tracer.faults.get((key, "called" if fault == "named" else fault))
        place = named if fault in ("named", "unknown") else act
        trace = []
        if named:
            trace.append(f"0x{named[0]:04x}  {named[1]:<12}  {printable(key[0])} {printable(key[1])}")
        if act:
            trace.append(f"0x{act[0]:04x}  {act[1]:<12}  <- would {'fill' if fault == 'filled' else 'call'} it")
        target, called = printable(".".join(key)), fault != "named" or act is not None
        position, misuse = place[0] if place else -1, _MISUSE.get(fault, "")
        is_unknown = fault in ("unknown", "filled")
        made.setdefault(key, Refused(target, position, called, tuple(trace), is_unknown, misuse=misuse))
    return tuple(sorted(made.values(), key=lambda refusal: refusal.position if refusal.position >= 0 else len(data)))
