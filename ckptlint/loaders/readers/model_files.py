"""The files of one model, with or without an index that says which key is in which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptlint.errors import UnreadableError
from ckptlint.formats.safetensors_header import HEADER_LIMIT
from ckptlint.formats.strict_json import checked_key, is_size, json_object
from ckptlint.loaders.problems import from_error
from ckptlint.model import FileState, FileTable, Problem, StoredFile, WeightIndex
from ckptlint.model.text import plural, printable, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.paths import is_safe

_WHOLE = lazy_pattern(r"(pytorch_)?model(\.\w+)?\.(safetensors|bin)")


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The files of a model, read; `names` are raw, in the order of their numbers, as `files` has them.

    Attributes:
        label: what they are reported under.
        places: raw key -> raw file name as the index says, None without an index; index: the same, printable.
        is_readable: whether one of the files was read.
        partial_because: why they are not the whole model; "" if they are.
    """

    names: list[str]
    files: FileTable
    label: str
    places: dict[str, str] | None
    index: WeightIndex | None
    problems: list[Problem]
    is_readable: bool
    partial_because: str


def read_set(
    folder: Folder,
    file_names: Sequence[str],
    index: str,
    look_at_files: bool,
    read: Callable[[int, str, int, list[Problem]], bool],
) -> ModelSet:
    """The files of a model, each of them read, and those that its index ("" for none) names beside them.

    `read` reads a file of this number, name and size, notes problems, and says whether it could.
    """
    problems: list[Problem] = []
    places, total = read_index(folder, index, problems)
    stale = is_stale(folder, file_names, places)
    names = list(dict.fromkeys((*file_names, *({} if stale else places or {}).values())))
    files: list[StoredFile] = []
    unread: list[str] = []
    absent: list[str] = []
    for number, name in enumerate(names):
        file, size = looked_at(folder, name, look_at_files)
        files.append(file)
        if size is None:
            absent.append(file.name)
        elif not read(number, name, size, problems):
            unread.append(file.name)
    unread += absent
    by_index = "" if stale else index
    label = printable(by_index or (names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"))
    is_readable = len(unread) < len(names)
    if not is_readable:
        problems = [replace(problem, blocks=True) for problem in problems] or [_no_files(label, files, absent)]
    lack = f"files of this model {verb(len(unread), 'is')} missing or unreadable"
    partial = f"{len(unread)} of {len(files)} {lack}" if unread else ""
    table = None
    if places is not None:
        by_key = {printable(key): printable(name) for key, name in places.items()}
        table = WeightIndex(printable(index), by_key, total, frozenset(absent), frozenset(unread), stale)
    return ModelSet(names, FileTable.of(files), label, places, table, problems, is_readable, partial)


def looked_at(folder: Folder, name: str, look_at_files: bool) -> tuple[StoredFile, int | None]:
    """A payload file, with state and size where files are to be looked at; its size where it can be read."""
    state, size = folder.stat(name)
    shown: FileState = state if look_at_files else "unchecked"
    path = name if is_safe(name) else None
    instead = folder.absent_hint(name) if state == "dangling-link" else ""
    file = StoredFile(printable(name), path, size if look_at_files else None, shown, True, instead)
    return file, size if state in READABLE else None


def read_index(folder: Folder, index: str, problems: list[Problem]) -> tuple[dict[str, str] | None, int | None]:
    """Raw key -> raw file name, and the bytes of all tensors; None for what is not said or cannot be read."""
    if not index:
        return None, None
    try:
        places, about = weight_map(folder, index)
    except UnreadableError as error:
        why = "loaders use it to find the file of each key"
        hint = "write the index again from the headers of the files"
        problems.append(from_error(error, printable(index), why=why, hint=hint))
        return None, None
    total = about.get("total_size") if isinstance(about, dict) else None
    if isinstance(total, float) and total.is_integer():  # transformers wrote it so for some years
        total = int(total)
    return places, total if is_size(total) else None


def weight_map(folder: Folder, index: str) -> tuple[dict[str, str], Any]:
    """Raw key -> raw file name, and what an index says of itself; raises UnreadableError, to be put behind its name."""
    document = json_object(folder.read(index, HEADER_LIMIT))
    places = document.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UnreadableError("has no weight_map from names to files")
    return {checked_key(name): file for name, file in places.items()}, document.get("metadata")


def is_stale(folder: Folder, files: Sequence[str], places: Mapping[str, str] | None) -> bool:
    """Whether nothing that an index names is there, beside the whole model that transformers looks for first.

    Source: transformers 5.23 modeling_utils: save_pretrained removes the shards of an earlier save, and leaves their
    index
    """
    if not places or len(files) != 1 or not _WHOLE.fullmatch(files[0]):
        return False
    return all(folder.stat(name)[0] == "absent" for name in {*places.values()})


def _no_files(label: str, files: Sequence[StoredFile], absent: list[str]) -> Problem:
    """That nothing of what an index names is there."""
    what = f"{plural(len(absent), 'file')}, and none of them is there" if absent else "no file"
    why = "a writer writes the index after the files, so they were deleted, or a copy left them out"
    copied = "copy the files from where the index came from; if they are not there, the index is of another export"
    hint = next((file.instead for file in files if file.instead), copied)
    return Problem("incomplete", label, f"{label} names {what}", why=why, hint=hint, blocks=True)
