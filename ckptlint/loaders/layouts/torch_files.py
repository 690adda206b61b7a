"""Whole states in files of torch.save: `pytorch_model.bin` and its parts, full state dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptlint.loaders.layouts import Evidence, Layout
from ckptlint.loaders.readers.plain import read_states
from ckptlint.loaders.readers.sets import FileSet, input_bytes, weight_sets
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder


def set_of(sets: Callable[[Folder], Sequence[FileSet]]) -> Callable[[Folder], Evidence | None]:
    """What shows that a folder holds a set of files of a kind."""

    def evidence(folder: Folder) -> Evidence | None:
        file_set = next(iter(sets(folder)), None)
        return None if file_set is None else Evidence(printable((file_set.files or [file_set.index])[0]))

    return evidence


LAYOUTS = (
    Layout(
        kind="torch",
        order=85,
        formats={"torch": "torch.save"},
        recognise=set_of(weight_sets),
        read=lambda place, look_at_files: read_states(place.folder, weight_sets(place.folder)[0], look_at_files),
        input_bytes=input_bytes(weight_sets),
        marks=("pytorch_model.bin", "pytorch_model.bin.index.json"),
        describes_itself=True,
    ),
)
