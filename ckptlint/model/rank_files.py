"""Files that torch.save wrote, one for each rank, layer or expert: which there are, and what they say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptlint.model.flat_groups import FlatGroup
from ckptlint.model.layout import IntArray
from ckptlint.model.payload import RecordContent


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of a set.

    Attributes:
        name: its path relative to the checkpoint, printable.
        kind: what the files of its kind hold (`model`, `optimizer`, `layer`, ...).
        numbers: what its name counts, by name: `{"rank": 3}`, `{"mp": 0, "dp": 1}`.
        is_read: whether its content is known; a file that is not has a problem of its own.
    """

    name: str
    kind: str
    numbers: Mapping[str, int]
    is_read: bool = True


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Files of one set that say different things of what they must agree on.

    Attributes:
        what: it, as a noun (`mesh`, `placements`, `step`, `content`).
        says: (value as text, names of the files that say it), the most files first.
        fqns: the keys concerned; () where it is one thing for the whole file.
        is_sure: whether no honest save looks so.
    """

    what: str
    says: tuple[tuple[str, tuple[str, ...]], ...]
    fqns: tuple[str, ...] = ()
    is_sure: bool = True


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor of one file that is not what the facts beside it imply.

    Attributes:
        fqn, file: which tensor, and where.
        stored, expected: what is there, and what would be, as text.
        because: from what that follows.
        what: of what the two are (`shape`, `length`).
    """

    fqn: str
    file: str
    stored: str
    expected: str
    because: str
    what: str = "shape"


@dataclass(frozen=True, slots=True)
class OtherName:
    """A file whose content names another file, or another rank, than its own name does.

    Attributes:
        file: its name.
        inside: what the content says, as text.
        same_as: a file of the set with the same bytes in all its storages, "" without one.
        is_sure: whether the content states the rank itself; otherwise only the folder inside the archive does, and a
            file may have been renamed.
    """

    file: str
    inside: str
    same_as: str = ""
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class RankFileSet:
    """The files of a checkpoint that is a set of them.

    Attributes:
        files: those that are there.
        lost: those of the grid that are not.
        grid: where the grid is from, as a phrase (`the world size 4 in their names`).
        disagreements: what files say differently that must say the same.
        misfits: tensors that are not what mesh, placements or sums imply.
        other_names: files whose content belongs under another name.
        flat_groups: the groups of parameters that DeepSpeed's ZeRO cut over the ranks.
    """

    files: tuple[RankFile, ...]
    lost: tuple[RankFile, ...] = ()
    grid: str = ""
    disagreements: tuple[Disagreement, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    other_names: tuple[OtherName, ...] = ()
    flat_groups: tuple[FlatGroup, ...] = ()


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
