"""Formats that ckptlint knows by name and does not check."""

from __future__ import annotations

import re
from contextlib import suppress

from ckptlint.errors import CkptlintError
from ckptlint.loaders.layouts import CheckpointPlace, Evidence, Layout, recognise
from ckptlint.loaders.problems import of_format
from ckptlint.loaders.rank_files.megatron_keys import is_rank_folder, legacy_file
from ckptlint.loaders.readers.dcp.megatron import CONFIG_FILE, read_config
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.frameworks import world
from ckptlint.vocabulary.litter import is_system_file

_ZARR = "zarr (Megatron-Core <= 0.15)"


def unsupported(folder: Folder) -> Evidence | None:
    """A known format that ckptlint does not check, or None."""
    files = [name for name in folder.files_beside() if not (name.endswith(".distcp") or is_system_file(name))]
    folders = [name for name in folder.folders() if not (is_rank_folder(name) and legacy_file(folder))]
    for known in world().unread:
        file = None if known.alone else _first(files, known.files) or _first(folders, known.folders)
        if file is not None:
            return Evidence(printable(file), known.name)
    file = CONFIG_FILE if backend(folder) == "zarr" else _zarr(folder)
    return None if file is None else Evidence(printable(file), _ZARR)


def unread_beside(folder: Folder) -> list[Problem]:
    """A format in the folder of a checkpoint that is not read."""
    evidence = unsupported(folder)
    if (file := legacy_file(folder)) and (recognised := recognise(folder)) and recognised.kind != "megatron-legacy":
        evidence = Evidence(printable(file.partition("/")[0]), "Megatron-LM legacy torch")
    return [] if evidence is None else [of_format(*evidence, outside_checkpoint=True)]


def backend(folder: Folder) -> str | None:
    """The backend that Megatron-Core's `metadata.json` names."""
    backend = read_config(folder)[0].get("sharded_backend")
    return backend if isinstance(backend, str) else None


def _first(names: list[str], pattern: re.Pattern[str] | None) -> str | None:
    return None if pattern is None else next((name for name in names if pattern.fullmatch(name)), None)


def _zarr(folder: Folder) -> str | None:
    for name in folder.folders()[:8]:
        with suppress(CkptlintError):
            if not folder.escapes_to(name) and folder.sub(name).has(".zarray"):
                return f"{name}/.zarray"
    return None


def _paddle(folder: Folder) -> Evidence | None:
    """Its payload files are called as DCP's are, so it is asked for before a DCP save that lost its metadata."""
    paddle = next(known for known in world().unread if known.name == "PaddlePaddle")
    file = _first([name for name in folder.files_beside() if not is_system_file(name)], paddle.files)
    return None if file is None else Evidence(file, paddle.name)


def _any(folder: Folder) -> Evidence | None:
    if (evidence := unsupported(folder)) is not None:
        return evidence
    names = [name for name in folder.files_beside() if not is_system_file(name)]
    for known in world().unread:
        is_bare = folder.is_one_file or not folder.folders() or _first(folder.folders(), known.folders)
        if known.alone and is_bare and (packed := _first(names, known.files)):
            return Evidence(printable(packed), known.name)
    return None


def _read(place: CheckpointPlace, _look_at_files: bool) -> Checkpoint:
    assert place.recognised is not None
    problem = of_format(*place.recognised.evidence)
    return Checkpoint(place.folder.display, "unsupported", problems=[problem], readable=False)


LAYOUTS = tuple(
    Layout(
        kind="unsupported",
        order=order,
        formats={"unsupported": "not supported"},
        recognise=recognised,
        read=_read,
        input_bytes=lambda _folder: 0,
        looks_around=False,
    )
    for order, recognised in ((30, _paddle), (90, _any))
)
