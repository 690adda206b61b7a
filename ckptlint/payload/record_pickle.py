"""What the `data.pkl` of a record says it holds: dtype, shape and storage of a tensor; of an object its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.safe_pickle import Opaque, Unpickled, read_state
from ckptlint.formats.sandbox import isolated
from ckptlint.model import RANK_LIMIT, RecordContent
from ckptlint.model.text import printable
from ckptlint.vocabulary.dtypes import STORAGES

_PLAIN = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_VALUE_LIMIT = 4096
_DEPTH_LIMIT = 16
_CRASHES = 4


@dataclass(frozen=True, slots=True)
class Decoded:
    """A `data.pkl` after the safe reader.

    Attributes:
        content: what it holds; None when it could not be read or a refused name left nothing.
        unpickled: the names that must not be there and those nobody knows, without the object itself.
        error: why it could not be read.
    """

    content: RecordContent | None
    unpickled: Unpickled = Unpickled(None)  # noqa: RUF009  frozen
    error: UnreadableError | None = None


def decode(pickles: Sequence[bytes]) -> list[Decoded]:
    """What each pickle says, read in a child process that may crash, starve or loop."""
    return _decode(pickles, [_CRASHES])


def _decode(pickles: Sequence[bytes], crashes: list[int]) -> list[Decoded]:
    if not pickles:
        return []
    if not crashes[0]:  # each crash may cost the whole time limit
        return [Decoded(None, error=LimitError("was not read: one like it crashes the reader"))] * len(pickles)
    try:
        return isolated(partial(_all, pickles), sum(map(len, pickles)))
    except LimitError as error:
        if len(pickles) == 1:
            crashes[0] -= 1
            return [Decoded(None, error=error)]
        middle = len(pickles) // 2
        return _decode(pickles[:middle], crashes) + _decode(pickles[middle:], crashes)


def _all(pickles: Sequence[bytes]) -> list[Decoded]:
    return [_one(data) for data in pickles]


def _one(data: bytes) -> Decoded:
    try:
        found = read_state(data)
    except UnreadableError as error:
        return Decoded(None, error=error)
    content = None if found.root is None and found.refused else content_of(found.root)
    return Decoded(content, Unpickled(None, found.refused, found.unknown))


def content_of(root: Any) -> RecordContent:
    """The root of a record's pickle in words.

    Source:
        torch._utils._rebuild_tensor_v2 and _v3 (the latter with the dtype as seventh argument, for dtypes without a
        storage class of their own), torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_parameter
    """
    if isinstance(root, Opaque):
        return _tensor(root) or RecordContent("subclass")
    if not isinstance(root, list):
        return RecordContent("object")
    return RecordContent("object", length=len(root), value=root if _is_small(root, [_VALUE_LIMIT]) else None)


def _tensor(node: Opaque) -> RecordContent | None:
    """The plain tensor that a call rebuilds, or that lies inside a parameter or a subclass; None for other calls."""
    form: Literal["tensor", "subclass"] = "tensor"
    if f"{node.module}.{node.name}" == "torch._utils._rebuild_parameter" and node.args:
        if not isinstance(node.args[0], Opaque):
            return None
        node = node.args[0]
    name, args = f"{node.module}.{node.name}", node.args
    if name == "torch._tensor._rebuild_from_type_v2" and len(args) >= 3 and isinstance(args[2], tuple):
        inner = args[0]
        if not (isinstance(inner, type) and issubclass(inner, Opaque)):
            return None
        form, name, args = "subclass", f"{inner.module}.{inner.name}", args[2]
    if name not in _PLAIN or len(args) < 5:
        return None
    storage, offset, shape, strides = args[:4]
    pid = storage.args[0] if isinstance(storage, Opaque) and storage.args else None
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
        return None
    if not _counts((offset,)) or not _counts(shape) or not _counts(strides) or len(shape) != len(strides):
        return None
    kind = pid[1].name if isinstance(pid[1], type) and issubclass(pid[1], Opaque) else ""
    dtype = STORAGES.get(kind, "unknown")
    if name == _PLAIN[1] and len(args) >= 7 and isinstance(args[6], str):
        dtype = printable(args[6])
    return RecordContent(form, dtype, shape, strides, offset, f"data/{pid[2]}")


def _counts(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= RANK_LIMIT
        and all(type(value) is int and 0 <= value < 2**62 for value in values)
    )


def _is_small(value: Any, budget: list[int], depth: int = 0) -> bool:
    """Whether a value is made of few lists, dicts, tuples, numbers and texts, so that it may leave this process."""
    budget[0] -= 1
    if budget[0] < 0 or depth > _DEPTH_LIMIT:
        return False
    if type(value) in (list, tuple):
        return all(_is_small(part, budget, depth + 1) for part in value)
    if type(value) is dict:
        return all(_is_small(part, budget, depth + 1) for pair in value.items() for part in pair)
    if type(value) is int:
        return abs(value) < 2**63
    return value is None or type(value) in (bool, float) or (type(value) is str and len(value) <= _VALUE_LIMIT)
