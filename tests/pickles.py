"""Pickles made by hand: opcode by opcode, or of objects whose classes are not there."""

from __future__ import annotations

import pickle
import struct
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

CM = "torch.distributed.checkpoint.metadata"
CF = "torch.distributed.checkpoint.filesystem"
CP = "torch.distributed.checkpoint.planner"
MT = "megatron.core.dist_checkpointing.strategies.torch"


# ---------------------------------------------------------------- pickles opcode by opcode


def text(value: str) -> bytes:
    """The opcode that pushes a text, in the form of protocol 2."""
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """The opcode that pushes an integer of any size."""
    data = pickle.encode_long(value)
    return pickle.LONG4 + struct.pack("<i", len(data)) + data


def named(module: str, name: str, protocol: int = 2) -> bytes:
    """The opcodes that ask for a module's name."""
    if protocol >= 4:
        return text(module) + text(name) + pickle.STACK_GLOBAL
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def stream(*parts: bytes, protocol: int = 2) -> bytes:
    """A whole pickle around the opcodes."""
    return pickle.PROTO + bytes([protocol]) + b"".join(parts) + pickle.STOP


def write_zip(path: Path, data: bytes, prefix: str | None = None) -> Path:
    """A torch.save archive around a `data.pkl`."""
    prefix = path.stem if prefix is None else prefix
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{prefix}/data.pkl", data)
        archive.writestr(f"{prefix}/version", "3\n")
    return path


# ---------------------------------------------------------------- pickles of objects whose classes are not there

_names: dict[tuple[str, str], type] = {}


def name_of(module: str, name: str) -> type:
    """A class that pickles as `module.name`; its instances pickle by NEWOBJ and BUILD."""
    if (module, name) not in _names:
        members = {
            "stands_for": (module, name),
            "__getstate__": lambda self: vars(self).get("raw_state", vars(self)) or None,
        }
        _names[module, name] = type(name, (), members)
    return _names[module, name]


class Size(tuple[int, ...]):
    """Pickles as a torch.Size."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return name_of("torch", "Size"), (tuple(self),)


class Call:
    """Pickles as the call of a name: REDUCE."""

    def __init__(self, function: type, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def new(module: str, name: str, **state: Any) -> Any:
    """An object of a class that is not there, with these attributes; `raw_state` is given to BUILD as it is."""
    made = name_of(module, name)()
    made.__dict__.update(state)
    return made


class _Pickler(pickle._Pickler):
    """The pickler of the standard library, which takes the name of a stand-in class at its word."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        key = vars(obj).get("stands_for") if isinstance(obj, type) else None
        if key is None:
            super().save_global(obj, name)
        elif self.proto >= 4:
            self.save(key[0])
            self.save(key[1])
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)
        else:
            self.write(pickle.GLOBAL + f"{key[0]}\n{key[1]}\n".encode())
            self.memoize(obj)

    dispatch = pickle._Pickler.dispatch | {type: lambda self, obj: self.save_global(obj)}


def dumped(value: Any, protocol: int = 4) -> bytes:
    """The pickle of an object made with `new`, `Size`, `Call` and built-in values."""
    file = BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


TRACE: Path | None = None


def payload(*arguments: Any) -> Any:
    """What a malicious pickle calls through a name that can truly be imported; it leaves a trace."""
    if TRACE is not None:
        TRACE.write_text(repr(arguments))
    return payload
