"""Statistics of each chunk that was read, beside what tensor it is of and which rank saved it, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.geometry.writers import ranks_of_files
from ckptlint.model import Checkpoint, PayloadTable, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.tiling import BoolArray, IntArray
from ckptlint.vocabulary.dtypes import ENCODINGS
from ckptlint.vocabulary.keys import parse, state_name

_ALIGNED = 64

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkNumbers:
    """The chunks of floating tensors whose values were read; row i is one chunk.

    Attributes:
        states: for each tensor the name of its state, `other` for an unknown one, "" for a weight or buffer.
        tensor: int64 [n], position in `tensors`; chunk: row in its table of chunks.
        record: int64 [n], row in `Checkpoint.records`.
        rank: int64 [n], rank that saved it, as the name of its file says; -1 where it says nothing.
        elements: int64 [n], numbers in it.
    """

    tensors: list[Tensor]
    states: list[str]
    tensor: IntArray
    chunk: IntArray
    record: IntArray
    rank: IntArray
    elements: IntArray
    payload: PayloadTable

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the payload table, for each chunk."""
        return np.asarray(getattr(self.payload, name)[self.record])

    @property
    def most(self) -> Floats:
        """float64 [n], the largest magnitude; 0 without a finite number."""
        return np.asarray(np.maximum(self.column("most"), 0.0))

    @property
    def rms(self) -> Floats:
        """float64 [n], the root of the mean square."""
        return np.asarray(np.sqrt((self.column("squares") + self.most**2) / np.maximum(self.elements, 1)))

    def are_state(self, *names: str) -> BoolArray:
        """bool [n], whether a chunk is of a state with one of these names; "" is a weight."""
        return np.array([state in names for state in self.states], bool)[self.tensor]


@fact
def chunk_numbers(ckpt: Checkpoint) -> ChunkNumbers:
    """The chunks whose values were read and match their checksum; empty below depth `data`."""
    payload, tensors, none = ckpt.payload, list[Tensor](), np.zeros(0, np.int64)
    columns = [(none, none, none, none)]
    assert payload is not None
    is_read = payload.scanned.copy()
    is_read[[damage.record for damage in payload.damages if damage.record >= 0]] = False
    for tensor in ckpt.sound_tensors() if is_read.any() else ():
        encoding, record = ENCODINGS.get(tensor.dtype), tensor.chunks.record
        if encoding is None or encoding.unsigned or encoding.parts > 1:
            continue
        rows = np.flatnonzero(tensor.tiling.live & (record >= 0) & ~may_be_padding(tensor))
        rows = rows[is_read[record[rows]]]
        if len(rows):
            columns.append((np.full(len(rows), len(tensors)), rows, record[rows], tensor.tiling.sizes[rows].prod(1)))
            tensors.append(tensor)
    number, chunk, record, elements = map(np.concatenate, zip(*columns, strict=True))
    rank = ranks_by_file(ckpt)[ckpt.records.file[record]] if len(record) else none
    states = ["" if parse(t.fqn).kind == "model" else state_name(t.fqn) or "other" for t in tensors]
    return ChunkNumbers(tensors, states, number, chunk, record, rank, elements, payload)


def may_be_padding(tensor: Tensor) -> BoolArray:
    """bool [n], the chunks of a flat bucket that may lie between or after its parameters, in memory nobody wrote.

    Source: megatron.core.distributed.param_and_grad_buffer 0.16: a parameter starts at a multiple of 64 elements, a
    bucket ends at one of the ranks, 128, or 2^16
    """
    is_padding = np.zeros(len(tensor.chunks), bool)
    if "gbuf_idx_" in tensor.fqn and len(tensor.global_shape) == 1:
        ends = tensor.tiling.offsets[:, 0] + tensor.tiling.sizes[:, 0]
        is_padding = (tensor.tiling.sizes[:, 0] < _ALIGNED) | (ends == tensor.global_shape[0])
    return is_padding


@fact
def ranks_by_file(ckpt: Checkpoint) -> IntArray:
    """int64 [n], for each file the rank that saved it, -1 where nothing says so.

    Source: deepspeed.runtime.engine.DeepSpeedEngine._get_zero_ckpt_name: `zero_pp_rank_<data
    parallel>_mp_rank_<model>`, in which the data parallel rank is the rank of the job where there is no model
    parallelism
    """
    ranks, files = ranks_of_files(ckpt).copy(), () if ckpt.rank_files is None else ckpt.rank_files.files
    is_cut_by_model = any(file.numbers.get("mp") for file in files)
    names = ("rank",) if is_cut_by_model else ("rank", "dp")
    known = {file.name: file.numbers[name] for file in files for name in names if name in file.numbers}
    for number, name in enumerate(ckpt.files.names if known else ()):
        ranks[number] = known.get(name, ranks[number])
    return ranks
