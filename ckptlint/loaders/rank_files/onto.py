"""From what the pickles of torch files say to the tensors, records and storages of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.torch_file import Storage, TorchFile, read_torch_file, record_content
from ckptlint.loaders.problems import from_error, from_refusals
from ckptlint.model import (
    Checkpoint,
    ChunkTable,
    FileState,
    FileTable,
    MalformedChunk,
    Problem,
    RankFile,
    RankFileSet,
    RecordContent,
    RecordTable,
    StoredFile,
    Tensor,
)
from ckptlint.model.cover import Budget
from ckptlint.model.layout import Layout
from ckptlint.model.rank_files import StorageTable
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.dtypes import ITEM_BITS

_NOWHERE = Storage(b"", -1, 0, 0, 0)


class Part(NamedTuple):
    """A tensor of one file.

    Attributes:
        fqn: the key, raw.
        dtype, shape: of the whole tensor that it is a part of.
        offsets: where it lies in that; None for a copy of what another file holds, or one whose place is not known.
        tensor: what is stored.
        file: number of its file.
        place: its storage, None where the file has none of that name.
        is_flat: whether it is a piece of a tensor that was made one-dimensional.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    tensor: StoredTensor
    file: int
    place: Storage | None
    is_flat: bool = False


@dataclass(slots=True)
class Columns:
    """The parts of a checkpoint, and what is made of them."""

    parts: list[Part] = field(default_factory=list)

    def add(self, fqn: str, tensor: StoredTensor, file: int, found: TorchFile) -> None:
        """A tensor that lies whole in one file."""
        offsets = (0,) * len(tensor.shape)
        self.parts.append(Part(fqn, tensor.dtype, tensor.shape, offsets, tensor, file, found.storages.get(tensor.key)))

    def made(self) -> tuple[dict[str, Tensor], RecordTable, StorageTable]:
        """Tensors by their printable keys, their records, and where these lie; row i is part i."""
        number = {fqn: i for i, fqn in enumerate(dict.fromkeys(part.fqn for part in self.parts))}
        rows: dict[str, list[int]] = {fqn: [] for fqn in number}
        for row, part in enumerate(self.parts):
            rows[part.fqn].append(row)
        layouts: dict[tuple[object, ...], Layout] = {}
        budget = Budget()
        tensors = [self._tensor(fqn, own, layouts, budget) for fqn, own in rows.items()]
        places = [part.place or _NOWHERE for part in self.parts]
        spans = [_span(part.tensor, place) for part, place in zip(self.parts, places, strict=True)]
        count = len(self.parts)
        owned = np.fromiter((part.offsets is not None for part in self.parts), bool, count)
        records = RecordTable(
            fqns=[printable(fqn) for fqn in number],
            fqn=np.fromiter((number[part.fqn] for part in self.parts), np.int32, count),
            file=np.fromiter((part.file for part in self.parts), np.int32, count),
            byte_offset=np.array([start for start, _ in spans], np.int64),
            byte_length=np.array([length for _, length in spans], np.int64),
            transformed=np.zeros(count, bool),
            owned=owned,
            strays=dict.fromkeys(np.flatnonzero(~owned).tolist()),
        )
        contents: dict[RecordContent, int] = {}
        content = [contents.setdefault(record_content(part.tensor), len(contents)) for part in self.parts]
        storages = StorageTable(
            header=np.array([place.header for place in places], np.int64),
            start=np.array([place.start for place in places], np.int64),
            size=np.array([place.size for place in places], np.int64),
            crc=np.array([place.crc for place in places], np.int64),
            names=[place.name for place in places],
            content=np.array(content, np.int32),
            contents=list(contents),
        )
        return {tensor.fqn: tensor for tensor in tensors}, records, storages

    def _tensor(self, fqn: str, rows: list[int], layouts: dict[tuple[object, ...], Layout], budget: Budget) -> Tensor:
        first = self.parts[rows[0]]
        axes = len(first.shape)
        placed = [row for row in rows if self.parts[row].offsets is not None]
        fitting = [row for row in placed if len(self.parts[row].tensor.shape) == axes]
        others = [row for row in placed if len(self.parts[row].tensor.shape) != axes]
        offsets = np.array([self.parts[row].offsets for row in fitting], np.int64).reshape(len(fitting), axes)
        sizes = np.array([self.parts[row].tensor.shape for row in fitting], np.int64).reshape(len(fitting), axes)
        key: tuple[object, ...] = (first.shape, len(fitting), offsets.tobytes(), sizes.tobytes())
        record = np.array(fitting, np.int64)
        if not placed:  # nothing is said of where its parts lie
            key = (first.shape,)
            offsets, sizes = np.zeros((1, axes), np.int64), np.array([first.shape], np.int64).reshape(1, axes)
            record = np.array([-1], np.int64)
        layout = layouts.setdefault(key, Layout(first.shape, offsets, sizes, budget))
        return Tensor(
            fqn=printable(fqn),
            dtype=first.dtype,
            global_shape=first.shape,
            chunks=ChunkTable(layout, record),
            malformed=tuple(
                MalformedChunk(self.parts[row].offsets or (), self.parts[row].tensor.shape, row) for row in others
            ),
            is_flattened=first.is_flat,
        )


def _span(tensor: StoredTensor, place: Storage) -> tuple[int, int]:
    """First byte and length of a tensor in its file, from its first element to its last."""
    bits = ITEM_BITS.get(tensor.dtype)
    if bits is None:
        return place.start, place.size
    start, length = tensor.offset * bits // 8, tensor.extent * bits // 8
    if start + length > place.size:  # told as a fault of the file
        return place.start, place.size
    return place.start + start, length


@dataclass(frozen=True, slots=True)
class Opened:
    """A file of a set that was read: what its name says, its number among the payload files, what it holds."""

    file: RankFile
    number: int
    found: TorchFile

    @property
    def label(self) -> str:
        """Its name, printable."""
        return self.file.name


@dataclass(slots=True)
class SetFiles:
    """The files of a set, as they are opened one after the other.

    Attributes:
        look_at_files: whether to tell the sizes of files.
        files: those that are there, read or not.
        stored: the payload files, in the order of their numbers.
        problems: what stood in the way of reading them.
    """

    folder: Folder
    look_at_files: bool
    files: list[RankFile] = field(default_factory=list)
    stored: list[StoredFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def open(
        self, path: str, kind: str, numbers: Mapping[str, int], holds: str, is_that: Callable[[Any], bool]
    ) -> Opened | None:
        """A file; None, and a problem, where it cannot be read or holds another thing.

        Args:
            kind, numbers: of the `RankFile`.
            holds: what it must hold, as a noun.
            is_that: whether a value is such.
        """
        label = printable(path)
        state, size = self.folder.look_at(path)
        shown: FileState = state if self.look_at_files else "unchecked"
        name = path if is_safe(path) else None
        self.stored.append(StoredFile(label, name, size if self.look_at_files else None, shown, True))
        found = read_file(self.folder, path, self.problems) if state in READABLE else None
        if found is not None and not is_that(found.root):
            self.problems.append(damaged(label, f"{label} holds no {holds}"))
            found = None
        self.files.append(RankFile(label, kind, numbers, found is not None))
        return None if found is None else Opened(self.files[-1], len(self.stored) - 1, found)

    def checkpoint(self, columns: Columns, rank_files: RankFileSet, **more: Any) -> Checkpoint:
        """The checkpoint that the files make.

        Args:
            more: further attributes of it.
        """
        tensors, records, storages = columns.made()
        return Checkpoint(
            path=self.folder.display,
            tensors=tensors,
            records=records,
            storages=storages,
            files=FileTable.of(self.stored),
            rank_files=rank_files,
            **more,
        )


def is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether a value is a dict, which most files hold."""
    return isinstance(value, dict)


def read_file(folder: Folder, name: str, problems: list[Problem]) -> TorchFile | None:
    """A torch file; None, and a problem, where it cannot be read or nothing of it is left."""
    label = printable(name)
    try:
        found = read_torch_file(folder, name)
    except LimitError as error:
        problems.append(from_error(error, label))
        return None
    except UnreadableError as error:
        problems.append(damaged(label, f"{label} {error}", error.position))
        return None
    problems += problems_of(label, found)
    return None if found.unpickled.root is None else found


def problems_of(file: str, found: TorchFile) -> list[Problem]:
    """What a torch file asks for that it may not, and what contradicts itself in it."""
    told = [replace(problem, blocks=False) for problem in from_refusals(found.unpickled, file, "data.pkl of ")]
    return told + [damaged(file, f"{file} {sentence}", at) for sentence, at in found.faults]


def damaged(file: str, sentence: str, position: int | None = None) -> Problem:
    """A torch file that is cut or contradicts itself."""
    return Problem(
        "container",
        file,
        sentence,
        detail=() if position is None else (f"byte {position:,} of {file}",),
        why="torch.load refuses the file, or fills tensors with other bytes",
        hint="copy the file again from where it was written, or go back one step",
    )
