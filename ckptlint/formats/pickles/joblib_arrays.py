"""Pickles of joblib without the bytes of the arrays that it writes between their opcodes."""

from __future__ import annotations

import pickle
from contextlib import suppress
from math import prod
from typing import Any

from ckptlint.formats.pickles.refusals import Tracer
from ckptlint.formats.pickles.stand_ins import HAS_OBJECTS, Opaque, numpy_bytes

MARK = b"NumpyArrayWrapper"
"""The name that every pickle with such arrays holds."""


class _Cutter(Tracer):
    """Steps over the bytes behind each object that stands for an array, and notes where they are."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, strict=False)
        self.cuts: list[tuple[int, int]] = []

    def load_build(self) -> None:
        """Fill an object; the bytes of an array follow it."""
        super().load_build()  # type: ignore[misc]
        made = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(made, Opaque) and (made.module, made.name) == ("joblib.numpy_pickle", MARK.decode()):
            start = self.file.tell()
            padding = 1 + self.file.read(1)[0] if made.state.get("numpy_array_alignment_bytes") is not None else 0
            self.file.seek(start + padding + _size(made.state))
            self.cuts.append((start, self.file.tell()))


_Cutter.dispatch = Tracer.dispatch | {pickle.BUILD[0]: _Cutter.load_build}  # type: ignore[assignment]


def _size(state: dict[str, Any]) -> int:
    """Bytes of the array; for one of objects, which a pickle follows, there is no such number."""
    dtype = state["dtype"]
    if dtype.args[0] == "O8" or (dtype.state and dtype.state[7] & HAS_OBJECTS):
        raise pickle.UnpicklingError("an array of objects")
    return int(prod(state["shape"])) * numpy_bytes(dtype)


def without_arrays(data: bytes) -> bytes:
    """The opcodes alone, as far as they can be followed.

    Source:
        joblib 1.6, joblib/numpy_pickle.py, NumpyArrayWrapper.write_array
    """
    cutter = _Cutter(data)
    with suppress(Exception):  # a crafted stream can raise anything: what is left then does not decode
        cutter.load()
    starts, ends = zip(*cutter.cuts, strict=True) if cutter.cuts else ((), ())
    return b"".join(data[start:end] for start, end in zip((0, *ends), (*starts, len(data)), strict=True))
