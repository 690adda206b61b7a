"""Which ranks wrote chunks, by the names of their files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.tiling import IntArray, distinct
from ckptlint.vocabulary.metadata_files import rank_of


@fact
def ranks_of_files(ckpt: Checkpoint) -> IntArray:
    """int64 [n], `rank_of` each payload file; -1 where the name has none."""
    ranks = (rank_of(name) for name in ckpt.files.names)
    return np.fromiter((-1 if rank is None else rank for rank in ranks), np.int64, len(ckpt.files))


def ranks_of_chunks(ckpt: Checkpoint, tensor: Tensor, rows: Sequence[int] | IntArray | None = None) -> IntArray:
    """int64 [n], the rank that wrote each of these chunks (all without `rows`); -1 where nothing says it."""
    records = tensor.chunks.record if rows is None else tensor.chunks.record[np.asarray(rows, np.int64)]
    ranks: IntArray = np.full(len(records), -1, np.int64)
    is_stored = records >= 0
    ranks[is_stored] = ranks_of_files(ckpt)[ckpt.records.file[records[is_stored]]]
    return ranks


def saved_by(ckpt: Checkpoint, tensor: Tensor, rows: Sequence[int] | IntArray | None = None) -> tuple[int, ...]:
    """The ranks whose files hold these chunks (all without `rows`), where file names contain a rank."""
    ranks = distinct(ranks_of_chunks(ckpt, tensor, rows))
    return tuple(ranks[ranks >= 0].tolist())
