"""Whole states in files of torch.save: `pytorch_model.bin` and its parts, full state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckptlint.formats.torch_file import StoredTensor, TorchFile, is_tensor
from ckptlint.loaders.common_state import read_configs
from ckptlint.loaders.rank_files.onto import Columns, damaged, read_file, some
from ckptlint.loaders.rank_files.sets import FileSet, file_sets
from ckptlint.loaders.safetensors import no_files, read_index, weight_index
from ckptlint.model import Checkpoint, FileState, FileTable, Problem, StoredFile
from ckptlint.model.text import printable
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.paths import is_safe

_STATES = ("state_dict", "model", "module", "model_state_dict", "model_state")


def read_weights(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The first set of whole states in a folder.

    Args:
        look_at_files: whether to tell the sizes of files (depth `files`); their pickles are read in any case.

    Raises:
        AccessError: the operating system refused a read.
    """
    return read_states(folder, file_sets(folder)[0], look_at_files)


def read_states(folder: Folder, own: FileSet, look_at_files: bool) -> Checkpoint:
    """The same of a set that is known."""
    problems: list[Problem] = []
    places, total = read_index(folder, own.index, problems)
    names = list(dict.fromkeys((*own.files, *(places or {}).values())))
    columns = Columns()
    files: list[StoredFile] = []
    absent: list[str] = []
    unread: list[str] = []
    for number, name in enumerate(names):
        state, size = folder.look_at(name)
        shown: FileState = state if look_at_files else "unchecked"
        label = printable(name)
        files.append(StoredFile(label, name if is_safe(name) else None, size if look_at_files else None, shown, True))
        if state not in READABLE or size is None:
            absent.append(label)
            continue
        found = read_file(folder, name, problems)
        if found is None or not add_state(columns, number, found, label, problems):
            unread.append(label)
    unread += absent
    label = printable(own.index or (names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"))
    readable = len(unread) < len(names)
    if not readable:
        problems = [replace(problem, blocks=True) for problem in problems] or [no_files(label, absent)]
    tensors, records, storages = columns.made()
    declared, config, config_problems = read_configs(folder, None)
    is_model = not any(name.startswith("adapter_model") for name in names)
    return Checkpoint(
        path=folder.display,
        format="torch",
        tensors=tensors,
        records=records,
        storages=storages,
        files=FileTable.of(files),
        declared=declared if is_model else {},
        config=config if is_model else None,
        index=None if places is None else weight_index(printable(own.index), places, total, absent, unread),
        problems=problems + (config_problems if is_model else []),
        readable=readable,
        partial=f"{len(unread)} of {len(files)} files of this model are absent or cannot be read" if unread else "",
        metadata_file=label,
    )


def add_state(columns: Columns, number: int, found: TorchFile, label: str, problems: list[Problem]) -> bool:
    """Add the tensors of a state; False when there is none.

    A state is a dict of tensors, alone or under one of the names that trainers give it, and of dicts of them.
    """
    state = state_of(found.root)
    if state is None:
        problems.append(damaged(label, f"{label} holds no dict of tensors"))
        return False
    strange = []
    for fqn, value in walked(state):
        if isinstance(value, StoredTensor):
            columns.add(fqn, value, number, found)
        else:
            strange.append(printable(fqn))
    if strange:
        sentence = f"{label}: {len(strange):,} tensors are stored in a form that is not read: {some(strange)}"
        problems.append(Problem("note", label, sentence))
    return True


def state_of(root: Any) -> dict[Any, Any] | None:
    """The dict of a state that holds the model's tensors; None without one."""
    if not isinstance(root, dict):
        return None
    for name in _STATES:
        inner = root.get(name)
        if isinstance(inner, dict) and any(map(is_tensor, inner.values())):
            return inner
    return root


def walked(state: dict[Any, Any], prefix: str = "", levels: int = 3) -> Iterator[tuple[str, Any]]:
    """The tensors of a state by their keys; those in dicts inside it with the names of these before theirs."""
    for key, value in state.items():
        fqn = f"{prefix}{key}"
        if is_tensor(value):
            yield fqn, value
        elif isinstance(value, dict) and levels:
            yield from walked(value, f"{fqn}.", levels - 1)
