"""From what the pickles of torch files say to the tensors, records and storages of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

from ckptlint.errors import LimitError, ScriptError, UnreadableError
from ckptlint.formats.torch_file import Storage, TorchFile, number_in, ranges_of, read_torch_file, record_content
from ckptlint.loaders.optimizer_state import optimizer_file, param_groups_in, settings_of
from ckptlint.loaders.problems import from_error, from_refusals, of_format
from ckptlint.loaders.readers.model_files import looked_at
from ckptlint.loaders.readers.rows import Row, tables
from ckptlint.model import (
    Checkpoint,
    FileTable,
    OptimizerFile,
    Problem,
    RankFile,
    RankFileSet,
    RecordContent,
    StepClaim,
    StoredFile,
)
from ckptlint.model.ranks.files import StorageTable
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ITEM_BITS

_NOWHERE = Storage(b"", -1, 0, 0, 0)
_COUNTED = 1_024  # parameters of an optimizer whose steps are read


@dataclass(slots=True)
class Columns:
    """What the files of a checkpoint hold of its tensors; row i is what one file holds of one tensor."""

    rows: list[Row] = field(default_factory=list)
    places: list[Storage] = field(default_factory=list)
    contents: list[RecordContent] = field(default_factory=list)

    def add(
        self,
        fqn: str,
        tensor: StoredTensor,
        file: int,
        torch_file: TorchFile,
        shape: tuple[int, ...] | None = None,
        offsets: tuple[int, ...] | None = (),
        is_flat: bool = False,
        dtype: str = "",
    ) -> None:
        """A tensor in the file of this number; attributes of `Row` that are not given are the tensor's own."""
        if shape is None:
            shape, offsets = tensor.shape, None if offsets is None else (0,) * len(tensor.shape)
        place = torch_file.storages.get(tensor.key, _NOWHERE)
        span = _span(tensor, place)
        self.rows.append(Row(fqn, dtype or tensor.dtype, shape, offsets, tensor.shape, file, *span, is_flat))
        self.places.append(place)
        self.contents.append(record_content(tensor))

    def made(self) -> dict[str, Any]:
        """The attributes of a checkpoint that come of the rows: tensors by printable keys, records, storages."""
        tensors, records = tables(self.rows, np.array([row.offsets is not None for row in self.rows], bool))
        contents: dict[RecordContent, int] = {}
        content = [contents.setdefault(content_of_row, len(contents)) for content_of_row in self.contents]
        storages = StorageTable(
            header=np.array([place.header for place in self.places], np.int64),
            start=np.array([place.start for place in self.places], np.int64),
            size=np.array([place.size for place in self.places], np.int64),
            crc=np.array([place.crc for place in self.places], np.int64),
            names=[place.name for place in self.places],
            content=np.array(content, np.int32),
            contents=list(contents),
        )
        return {"tensors": tensors, "records": records, "storages": storages}


def _span(tensor: StoredTensor, place: Storage) -> tuple[int, int]:
    """First byte and length of a tensor in its file, from its first element to its last."""
    bits = ITEM_BITS.get(tensor.dtype)
    start, length = (0, place.size) if bits is None else (tensor.offset * bits // 8, tensor.extent * bits // 8)
    if start + length > place.size:  # reported as a fault of the file
        return place.start, place.size
    return place.start + start, length


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file of a set that was read: what its name says, its number among the payload files, what it holds."""

    file: RankFile
    number: int
    torch_file: TorchFile

    @property
    def label(self) -> str:
        """Its name, printable."""
        return self.file.name


@dataclass(slots=True)
class SetFiles:
    """The files of a set, as they are opened one after the other, and what stood in the way of reading them.

    `files` are those that are there, read or not, `stored` the payload files in the order of their numbers.
    """

    folder: Folder
    look_at_files: bool
    files: list[RankFile] = field(default_factory=list)
    stored: list[StoredFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    param_groups: list[tuple[str, Mapping[Any, Any]]] = field(default_factory=list)

    def open(
        self, path: str, kind: str, numbers: Mapping[str, int], holds: str, is_that: Callable[[Any], bool]
    ) -> OpenedFile | None:
        """Opens a file; None, and a problem, where it cannot be read, or `is_that` denies that it `holds` that."""
        file, size = looked_at(self.folder, path, self.look_at_files)
        self.stored.append(file)
        label = file.name
        torch_file = None if size is None else read_file(self.folder, path, self.problems)
        if torch_file is not None and not is_that(torch_file.root):
            self.problems.append(damaged(label, f"{label} holds no {holds}"))
            torch_file = None
        self.files.append(RankFile(label, kind, numbers, torch_file is not None))
        if torch_file is None:
            return None
        groups = [(place, settings_of(group)) for place, group in param_groups_in(label, torch_file.root)]
        kinds = {(repr(group.get("step")), *map(str, group)) for _, group in groups if group["params"] != []}
        if not self.param_groups or len(kinds) > 1:  # those of all ranks have the same settings
            self.param_groups += groups
        return OpenedFile(self.files[-1], len(self.stored) - 1, torch_file)

    def checkpoint(self, columns: Columns, rank_files: RankFileSet, **more: Any) -> Checkpoint:
        """The checkpoint that lies in the files; `more` are attributes that its layout adds."""
        return Checkpoint(
            path=self.folder.display,
            files=FileTable.of(self.stored),
            rank_files=rank_files,
            param_groups=tuple(self.param_groups),
            **columns.made(),
            **more,
        )


def optimizer_in(
    folder: Folder, name: str, label: str, file: TorchFile, state: Any, stem: str = "optimizer"
) -> tuple[OptimizerFile, int | None] | None:
    """The state dict of an optimizer in a file, with its states as tensors, and its steps; None for another form.

    `label` is the file's printable path from the checkpoint; `stem` stands before the keys of the states, where a file
    holds several.
    """
    made = optimizer_file(state)
    if made is None:
        return None
    of_params = (of_param for of_param in state["state"].values() if isinstance(of_param, dict))
    # torch.optim.Adam (torch 1.13 to 2.13): `step` of each parameter, a tensor of one element
    counts = (of_param.get("step") for of_param in islice(of_params, _COUNTED))
    numbers = [number_in(ranges_of(folder, name), file, count) for count in counts]
    step, columns = max((number for number in numbers if number is not None), default=None), Columns()
    for param, of_param in state["state"].items():
        for what, value in of_param.items() if isinstance(of_param, dict) else ():
            if isinstance(value, StoredTensor):
                columns.add(f"{stem}.state.{param}.{what}", value, 0, file)
    states = Checkpoint(
        path=label,
        format="torch",
        **columns.made(),
        files=FileTable.of([StoredFile(label, name, file.size, "ok", True)]),
        claims=() if step is None else (StepClaim("optimizer.state.step", step),),
        param_groups=tuple((f"{label}: param_groups[{number}]", group) for number, group in enumerate(made.groups)),
    )
    return replace(made, states=states), step


def is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether a value is a dict, which most files hold."""
    return isinstance(value, dict)


def read_file(folder: Folder, name: str, problems: list[Problem]) -> TorchFile | None:
    """Reads a torch file; None, and a problem, where it cannot be read or holds nothing."""
    label = printable(name)
    try:
        file = read_torch_file(folder, name)
    except LimitError as error:
        problems.append(from_error(error, label))
        return None
    except ScriptError:
        problems.append(of_format(label, "TorchScript"))
        return None
    except UnreadableError as error:
        problems.append(damaged(label, f"{label} {error}", error.position))
        return None
    problems += [replace(problem, blocks=False) for problem in from_refusals(file.unpickled, label, "data.pkl of ")]
    problems += [damaged(label, f"{label} {sentence}", at) for sentence, at in file.faults]
    return None if file.unpickled.root is None else file


def damaged(file: str, sentence: str, position: int | None = None) -> Problem:
    """A torch file that is cut or contradicts itself."""
    detail = () if position is None else (f"byte {position:,} of {file}",)
    why = "torch.load refuses the file, or fills tensors with other bytes"
    hint = "copy the file again from where it was written, or go back one step"
    return Problem("container", file, sentence, detail=detail, why=why, hint=hint)
