"""Names of the files of torch.distributed.checkpoint.

Source: torch.distributed.checkpoint.filesystem (1.13 - 2.13): `_metadata_fn`, `_FileSystem`, `DEFAULT_SUFFIX`
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptlint.patterns import lazy_pattern

METADATA = ".metadata"
RANK_METADATA = lazy_pattern(r"__([0-9]{1,9})\.metadata")
UNFINISHED_METADATA = ".metadata.tmp"
"""Renamed to `.metadata` as the last act of a save."""
WRITTEN_LAST = "the writer writes it last, after all payload files, so the save or the copy never finished"
"""Why `.metadata` is absent, or empty."""

_PAYLOAD = lazy_pattern(r"__([0-9]{1,9})_[0-9]+\.distcp$")
_SHARD = lazy_pattern(r"shard-([0-9]{5,9})-model-[0-9]+-of-[0-9]+\.safetensors")


def rank_of(file: str) -> int | None:
    """The plan index in a payload file's name; the saving rank unless a group of ranks saved (HSDP).

    >>> rank_of("__3_0.distcp"), rank_of("step5__2_1.distcp"), rank_of("w.bin")
    (3, 2, None)
    >>> rank_of("shard-00004-model-00001-of-00002.safetensors")
    3
    """
    if match := _PAYLOAD.search(file):
        return int(match[1])
    return int(match[1]) - 1 if (match := _SHARD.fullmatch(file)) else None


def ranks_in(files: Iterable[str]) -> tuple[int, ...]:
    """The ranks in the names of payload files, each once, in order."""
    return tuple(sorted({rank for name in files if (rank := rank_of(name)) is not None}))
