"""Files that torch.save wrote, one for each rank, layer or expert: which there are, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.payload import RecordContent
from ckptlint.model.ranks.flat_groups import FlatGroup
from ckptlint.model.tiling import IntArray


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of a set.

    Attributes:
        name: its path relative to the checkpoint, printable.
        kind: what the files of its kind hold (`model`, `optimizer`, `layer`, ...).
        numbers: what its name counts, by name: `{"rank": 3}`, `{"mp": 0, "dp": 1}`.
        is_read: whether its content is known; a file that is not has a problem of its own.
        inside: the other name or rank that it was saved under, as its content tells; "" for none.
        same_as: a file of the set with the same bytes in all its storages, where `inside` says another name.
        is_stated: whether the content states that rank itself; otherwise only the folder inside the archive does, and
            a file may have been renamed.
    """

    name: str
    kind: str
    numbers: Mapping[str, int]
    is_read: bool = True
    inside: str = ""
    same_as: str = ""
    is_stated: bool = False

    @property
    def identity(self) -> tuple[object, ...]:
        """What it is in the grid, however its name begins."""
        return (self.kind, *sorted(self.numbers.items())) if self.numbers else (self.kind, self.name)


class Statement(NamedTuple):
    """What a file states of something on which files must agree."""

    what: str  # that, as a noun (`step`, `partition count`, `placements`)
    value: str  # as text
    file: str
    among: str = ""  # what the files share that are compared with each other, "" where all are
    fqn: str = ""  # the key that it concerns, "" where it is one thing for the whole file


class Misfit(NamedTuple):
    """A tensor of one file that is not what the files beside it imply."""

    fqn: str
    file: str
    stored: str  # what is there, as text
    expected: str  # what would be
    because: str  # from what that follows
    what: str = "shape"  # of what the two are (`shape`, `length`)


@dataclass(frozen=True, slots=True)
class RankFileSet:
    """The files of a checkpoint that is a set of them, and what they say.

    Attributes:
        files: those that are there.
        expected: from where the grid is (`the world size 4 in their names`) -> the files that it has.
        statements: what the files state on which others must agree; where all agree it may be left out.
        misfits: tensors that are not what mesh, placements or sums imply.
        flat_groups: the groups of parameters that DeepSpeed's ZeRO cut over the ranks.
    """

    files: tuple[RankFile, ...]
    expected: Mapping[str, tuple[RankFile, ...]] = field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    flat_groups: tuple[FlatGroup, ...] = ()

    @property
    def missing(self) -> dict[str, list[RankFile]]:
        """From where the grid is -> the files of it that are not there."""
        there = {file.identity for file in self.files}
        absent = {grid: [file for file in files if file.identity not in there] for grid, files in self.expected.items()}
        return {grid: files for grid, files in absent.items() if files}


@dataclass(frozen=True, slots=True, eq=False)
class StorageTable:
    """In which storages of torch's archives the records lie; row i is record i of `Checkpoint.records`.

    Attributes:
        header: int64 [m], first byte of the local header of its member; -1 in a file without members.
        start: int64 [m], first byte of its data, as torch aligns it.
        size: int64 [m], bytes of its data; 0 for a tensor without elements.
        crc: int64 [m], CRC-32 as recorded, 0 without one.
        names: the raw name of each member.
        content: int32 [m], position in `contents`.
        contents: what the pickles say of the tensors.
    """

    header: IntArray
    start: IntArray
    size: IntArray
    crc: IntArray
    names: list[bytes] = field(repr=False)
    content: npt.NDArray[np.int32]
    contents: list[RecordContent]
