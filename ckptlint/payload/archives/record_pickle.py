"""Decodes the `data.pkl` of a record: dtype, shape and storage of a tensor, or the length of an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import Opaque, Unpickled, read_state
from ckptlint.formats.torch_file import record_content, stored_tensor, subclass_form
from ckptlint.model import RecordContent
from ckptlint.sandbox import isolated

_VALUE_LIMIT = 4096
_DEPTH_LIMIT = 16
_NO_NAMES = Unpickled(None)


class Decoded(NamedTuple):
    """A `data.pkl` after the safe reader: content (None for none), refused and unknown names, why it is unreadable."""

    content: RecordContent | None
    unpickled: Unpickled = _NO_NAMES
    error: UnreadableError | None = None


def decode(pickles: Sequence[bytes]) -> list[Decoded]:
    """Decode pickles in a child process, which may crash or hang; a failed batch is halved and retried."""
    if not pickles:
        return []
    try:
        return isolated(lambda: [*map(_one, pickles)], sum(map(len, pickles)))
    except LimitError as error:
        if len(pickles) == 1:
            return [Decoded(None, error=error)]
        middle = len(pickles) // 2
        return decode(pickles[:middle]) + decode(pickles[middle:])


def _one(data: bytes) -> Decoded:
    try:
        unpickled = read_state(data)
    except UnreadableError as error:
        return Decoded(None, error=error)
    content = None if unpickled.root is None and unpickled.refused else root_content(unpickled.root)
    return Decoded(content, Unpickled(None, unpickled.refused, unpickled.unknown))


def root_content(root: Any) -> RecordContent:
    """The root of a record's pickle in words."""
    if isinstance(root, Opaque):
        tensor = stored_tensor(root)
        if tensor is not None:
            return record_content(tensor)
        shape, strides = subclass_form(root)
        return RecordContent("subclass", shape=shape, strides=strides)
    length = len(root) if isinstance(root, list) else -1
    return RecordContent("object", length=length, value=root if _is_small(root, [_VALUE_LIMIT]) else ...)


def _is_small(value: Any, budget: list[int], depth: int = 0) -> bool:
    """Whether a value is made of few lists, dicts, tuples, numbers and texts, so that it may leave this process."""
    budget[0] -= 1
    if budget[0] < 0 or depth > _DEPTH_LIMIT:
        return False
    if type(value) in (list, tuple):
        return all(_is_small(item, budget, depth + 1) for item in value)
    if type(value) is dict:
        return all(_is_small(item, budget, depth + 1) for pair in value.items() for item in pair)
    if type(value) is int:
        return abs(value) < 2**63
    return value is None or type(value) in (bool, float) or (isinstance(value, str) and len(value) <= _VALUE_LIMIT)
