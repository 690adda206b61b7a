"""Reads what the records of a checkpoint hold, and draws elements from tensors that follow from each other."""

from __future__ import annotations

from dataclasses import replace

from ckptlint.analysis.pairs import pairs_of
from ckptlint.model import Checkpoint
from ckptlint.numbers.draw import draw_pairs
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import ReadOptions
from ckptlint.storage.folder import Folder

_OF_CHUNK, _CHUNKS = 65_536, 16_384  # elements and chunks that are drawn at depth `data`
_OF_CHUNK_BY_HEADERS, _CHUNKS_BY_HEADERS = 4_096, 2_048


def read_records(folder: Folder, ckpt: Checkpoint, how: ReadOptions) -> Checkpoint:
    """The checkpoint with `payload`, and with `pairs` where all records were asked for.

    Raises:
        AccessError, KeyboardInterrupt: as `read_payload`.
    """
    ckpt = read_payload(folder, ckpt, how)
    if how.percent is not None:
        return ckpt
    per_chunk, most = (_OF_CHUNK, _CHUNKS) if how.depth.reads_all else (_OF_CHUNK_BY_HEADERS, _CHUNKS_BY_HEADERS)
    return replace(ckpt, pairs=draw_pairs(folder, ckpt, pairs_of(ckpt), per_chunk, most))
