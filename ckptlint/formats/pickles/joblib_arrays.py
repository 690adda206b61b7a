"""Pickles of joblib without the bytes of the arrays that it writes between their opcodes."""

from __future__ import annotations

import pickle
import pickletools
from contextlib import suppress
from math import prod
from typing import Any

from ckptlint.formats.pickles.refusals import Tracer
from ckptlint.formats.pickles.stand_ins import HAS_OBJECTS, Opaque, numpy_bytes

_FRAME_SIZE = 9  # bytes of the opcode that begins one

_MODULES = ("joblib.numpy_pickle", "sklearn.externals.joblib.numpy_pickle")  # the latter in scikit-learn < 0.23

MARK = b"NumpyArrayWrapper"
"""The name that every pickle with such arrays holds."""


class _Cutter(Tracer):
    """Steps over the bytes behind each object that stands for an array, and notes where they are."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, strict=False)
        self.cuts: list[tuple[int, int, bool]] = []

    def load_build(self) -> None:
        """Fill an object; the bytes of an array follow it."""
        super().load_build()  # type: ignore[misc]
        made = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(made, Opaque) and made.module in _MODULES and made.name == MARK.decode():
            start, dtype = self.file.tell(), made.state["dtype"]
            has_objects = dtype.args[0] == "O8" or bool(dtype.state and dtype.state[7] & HAS_OBJECTS)
            if has_objects:  # which follow as a pickle of their own
                opcodes: list[tuple[Any, Any, Any]] = [*pickletools.genops(self.file)]
                ends = [at + _FRAME_SIZE + size for opcode, size, at in opcodes if opcode.name == "FRAME"]
                if max(ends, default=0) > self.file.tell():
                    raise pickle.UnpicklingError("a frame that reaches beyond its pickle: readers go on elsewhere")
            else:
                padding = 1 + self.file.read(1)[0] if made.state.get("numpy_array_alignment_bytes") is not None else 0
                self.file.seek(start + padding + int(prod(made.state["shape"])) * numpy_bytes(dtype))
            self.cuts.append((start, self.file.tell(), has_objects))


_Cutter.dispatch = Tracer.dispatch | {pickle.BUILD[0]: _Cutter.load_build}  # type: ignore[assignment]


def without_arrays(data: bytes) -> tuple[bytes, list[bytes]]:
    """The opcodes alone, as far as they can be followed, and the pickles that stood in place of arrays of objects.

    Source: joblib 1.6, joblib/numpy_pickle.py, NumpyArrayWrapper.write_array
    """
    cutter = _Cutter(data)
    with suppress(Exception):  # a crafted stream can raise anything: what is left then does not decode
        cutter.load()
    starts, ends, _ = zip(*cutter.cuts, strict=True) if cutter.cuts else ((), (), ())
    opcodes = b"".join(data[start:end] for start, end in zip((0, *ends), (*starts, len(data)), strict=True))
    return opcodes, [data[start:end] for start, end, is_pickle in cutter.cuts if is_pickle]
