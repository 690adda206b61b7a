"""Names of the files of torch.distributed.checkpoint.

Source:
    torch.distributed.checkpoint.filesystem (1.13 - 2.13): `_metadata_fn`, `_FileSystem`, `DEFAULT_SUFFIX`
"""

from __future__ import annotations

import re

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__([0-9]{1,9})\.metadata")
PAYLOAD_RANK = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp$")
UNFINISHED_METADATA = ".metadata.tmp"
"""Renamed to `.metadata` as the last act of a save."""
WRITTEN_LAST = "the writer writes it last, after all payload files, so the save or the copy never finished"
"""Why `.metadata` is absent, or empty."""
