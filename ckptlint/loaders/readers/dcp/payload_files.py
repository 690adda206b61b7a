"""The payload files of a DCP checkpoint: those that the metadata names, and those that nobody names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from ckptlint.formats.pointers import POINTER_LIMIT, pointer_in
from ckptlint.loaders.readers.dcp.metadata import Description
from ckptlint.model import FILE_STATES, FileTable, Problem, RecordTable, StoredFile
from ckptlint.model.files import Names
from ckptlint.model.text import first_names, printable, verb
from ckptlint.model.tiling import IntArray
from ckptlint.storage.folder import Folder
from ckptlint.storage.listing import is_plain
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.litter import is_system_file

_HEAD, _MOST_HEADS = 64, 4096


def payload_files(folder: Folder, described: Description, look: bool) -> tuple[FileTable, bool]:
    """The payload files, in the order of `RecordTable.file` and then those nobody names; and `locates_bytes`."""
    paths = described.paths
    raw = {row: path if is_safe(path) else None for row, path in enumerate(paths) if not is_plain(path)}
    names = list(paths)
    for row in raw:
        names[row] = printable(paths[row])
    unchecked = np.full(len(paths), FILE_STATES.index("unchecked"), np.uint8)
    named = FileTable(Names.of(names), np.full(len(paths), -1, np.int64), unchecked, np.ones(len(paths), bool), raw, {})
    if not look:
        return named, True
    state, size, at = folder.stat_many(paths)
    named = replace(named, state=state, size=size)
    elsewhere = [paths[row] for row in np.flatnonzero(at < 0).tolist()]
    known = {str(PurePosixPath(path)) if "/" in path else path for path in elsewhere}
    for row in np.flatnonzero(named.are("absent", "other-case", "dangling-link")).tolist():
        known.add(folder.other_case(paths[row]) or "")
        if instead := folder.absent_hint(paths[row]):
            named.instead[row] = instead
    for row, name in renamed_files(folder, named, described.records).items():
        named.instead.setdefault(row, f"{printable(name)} has the size of the missing {named.names[row]}: rename it")
    named.instead.update(_pointers(folder, named))
    others = file_table(folder, known, at[at >= 0])
    return named.followed_by(others), not _shares_offsets(folder, described)


def renamed_files(folder: Folder, files: FileTable, records: RecordTable) -> dict[int, str]:
    """Row of an absent file -> the file beside it that differs in its ending alone and has its size, where one does."""
    absent = files.are("absent") & files.referenced
    if not absent.any():
        return {}
    beside: dict[tuple[str, int], str] = {}
    for name in folder.files_beside():
        beside.setdefault((name.partition(".")[0], folder.entries[name].size), name)
    ends = np.zeros(len(files), np.int64)
    np.maximum.at(ends, records.file, records.byte_offset + records.byte_length)
    places = {row: (files.names[row].partition(".")[0], int(ends[row])) for row in np.flatnonzero(absent).tolist()}
    return {row: beside[place] for row, place in places.items() if place[0] and place[1] > 0 and place in beside}


def _pointers(folder: Folder, files: FileTable) -> dict[int, str]:
    """Row of a file that holds the path of a link or git's pointer -> the end of a sentence that says so."""
    if not folder.is_near:
        return {}
    rows = np.flatnonzero(files.are("ok") & (files.size > 0) & (files.size <= POINTER_LIMIT))[:_MOST_HEADS].tolist()
    heads = folder.heads([files[row].path or "" for row in rows], POINTER_LIMIT)
    return {row: pointer for row, head in zip(rows, heads, strict=True) if head and (pointer := pointer_in(head))}


def hollow_files(folder: Folder, files: FileTable) -> list[Problem]:
    """That payload files start with zeros, as no record does; of the first 4,096, and of none over a network."""
    rows = np.flatnonzero(files.are("ok") & files.referenced & (files.size > 0))
    rows = rows[: _MOST_HEADS if folder.is_near else 0]
    paths = [path for row in rows.tolist() if (path := files[row].path or "").endswith(".distcp")]
    heads = zip(paths, folder.heads(paths, _HEAD), strict=True)
    hollow = [printable(path) for path, head in heads if head and not head.strip(b"\0")]
    if not hollow:
        return []
    sentence = f"{first_names(hollow)} {verb(len(hollow), 'starts')} with zero bytes instead of a record"
    why = "the file system or a copy lost what was written there, so a load fails or takes zeros"
    hint = "copy the file again from where it was written, or go back one step"
    return [Problem("container", hollow[0], sentence, why=why, hint=hint)]


def file_table(folder: Folder, known: Collection[str] = (), rows: IntArray | None = None) -> FileTable:
    """The payload files that lie in the folder, but for those known by name, or by row in the listing's payload."""
    listing = folder.entries.without(known, rows)
    sizes = {name: entry.size for name, entry in listing.others.items() if not entry.is_folder}
    payload = [name for name in sizes if name.endswith(".distcp") and not is_system_file(name)]
    others = [StoredFile(printable(name), name, sizes[name], "ok", False) for name in payload]
    names = listing.payload_names()
    none, flags = np.zeros(len(names), np.uint8), np.zeros(len(names), bool)
    return FileTable(Names.of(names), listing.size, none, flags, {}, {}).followed_by(FileTable.of(others))


def _shares_offsets(folder: Folder, described: Description) -> bool:
    """Whether the tensors of each file share one offset, at which a safetensors header starts.

    Where every file is lost or empty, two entries at one offset show it.

    Source: torch.distributed.checkpoint.filesystem (>= 2.8), SerializationFormat.SAFETENSORS
    """
    table = described.records
    tensor_rows = np.flatnonzero(described.has_offset)
    if not len(tensor_rows):
        return False
    files, offsets = table.file[tensor_rows], table.byte_offset[tensor_rows]
    order = np.argsort(files, kind="stable")
    files, offsets = files[order], offsets[order]
    starts = np.flatnonzero(np.concatenate([[True], files[1:] != files[:-1]]))
    if (np.minimum.reduceat(offsets, starts) != np.maximum.reduceat(offsets, starts)).any():
        return False
    judged = 0
    full = files[table.byte_length[tensor_rows][order] > 0]
    shares = bool((full[1:] == full[:-1]).any())
    for start in starts.tolist():
        path, offset = described.paths[int(files[start])], int(offsets[start])
        state, size = folder.stat(path)
        if state != "ok" or not 0 <= offset < (size or 0):
            continue  # lost, cut or damaged: the other files show it
        head = folder.read_range(path, offset, 9)
        if head[:4] == b"PK\3\4":
            return False
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
            return True
        judged += 1
        if judged == 4:
            break
    return shares and not judged
