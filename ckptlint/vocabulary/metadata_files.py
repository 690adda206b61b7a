"""Names of the files of torch.distributed.checkpoint.

Source:
    torch.distributed.checkpoint.filesystem (1.13 - 2.13): `_metadata_fn`, `_FileSystem`, `DEFAULT_SUFFIX`
"""

from __future__ import annotations

from ckptlint.patterns import lazy_pattern

METADATA = ".metadata"
RANK_METADATA = lazy_pattern(r"__([0-9]{1,9})\.metadata")
PAYLOAD_RANK = lazy_pattern(r"__([0-9]{1,9})_[0-9]+\.distcp$")
UNFINISHED_METADATA = ".metadata.tmp"
"""Renamed to `.metadata` as the last act of a save."""
WRITTEN_LAST = "the writer writes it last, after all payload files, so the save or the copy never finished"
"""Why `.metadata` is absent, or empty."""
