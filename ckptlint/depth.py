"""How deep a checkpoint is read."""

from __future__ import annotations

from enum import StrEnum


class Depth(StrEnum):
    """The depths in order; each reads what the one before reads, and more."""

    METADATA = "metadata"
    FILES = "files"
    HEADERS = "headers"
    DATA = "data"

    def reaches(self, needed: Depth) -> bool:
        """Whether all that `needed` reads is read.

        >>> Depth.HEADERS.reaches(Depth.FILES), Depth.METADATA.reaches(Depth.FILES)
        (True, False)
        """
        return _ORDER[self] >= _ORDER[needed]

    @property
    def looks_at_files(self) -> bool:
        """Whether names and sizes of payload files are looked at."""
        return self.reaches(Depth.FILES)

    @property
    def opens_records(self) -> bool:
        """Whether each record is opened."""
        return self.reaches(Depth.HEADERS)

    @property
    def reads_all(self) -> bool:
        """Whether every byte is read."""
        return self.reaches(Depth.DATA)


_ORDER = {depth: number for number, depth in enumerate(Depth)}  # asked for each rule of each checkpoint
