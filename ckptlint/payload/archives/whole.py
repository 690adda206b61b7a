"""Depth `data`: the files of torch.save whose members no record stands for: their checksums, an optimizer's values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.formats.torch_archive import LOCAL_SIZE, data_start, read_archive
from ckptlint.formats.torch_file import ranges_of
from ckptlint.loaders.problems import from_error
from ckptlint.model import Checkpoint, Damage, OddValues, Problem
from ckptlint.payload.stream import Members, Meter, Scan, stream
from ckptlint.payload.values import VALUE_COLUMNS
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS
from ckptlint.vocabulary.keys import SQUARES

_UNREAD = ("unreadable", "container", "limit")
_TEXT = (".json", ".yaml", ".yml", ".txt")
Beside = dict[tuple[str, str], dict[str, Any]]


def compare_archives(
    folder: Folder, ckpt: Checkpoint
) -> tuple[list[Damage], tuple[str, ...], tuple[OddValues, ...], Beside, list[Problem]]:
    """Members that do not match their checksums, files that have none, values that cannot be, all values, lost files.

    The values are those of an optimizer, as `PayloadTable.beside` has them. A storage of a rank file that has a record
    is checked with that record, not here. Raises AccessError where a read is refused.
    """
    covered: dict[str, set[int]] = {}  # file -> first bytes of the local headers of the members that records stand for
    opened: list[str] = []  # the files that were read as files of torch.save
    if ckpt.storages is not None:
        for number, header in zip(ckpt.records.file.tolist(), ckpt.storages.header.tolist(), strict=True):
            covered.setdefault(ckpt.files[number].name, set()).add(header)
        opened = [file.name for file in ckpt.files if file.path is not None and file.state in READABLE]
    opened += [file.name for file in ckpt.step_files if file.state == "read" and not file.name.endswith(_TEXT)]
    reported = {problem.file for problem in ckpt.problems if problem.kind in _UNREAD}
    damages: list[Damage] = []
    bare: list[str] = []
    odd_values: list[OddValues] = []
    beside: Beside = {}
    optimizers: dict[str, dict[str, tuple[str, str, str]]] = {}
    for file in ckpt.step_files:  # one may hold several
        optimizers.setdefault(file.name, {}).update({} if file.optimizer is None else file.optimizer.storages)
    problems: list[Problem] = []
    for label in dict.fromkeys(opened):
        if label in reported:
            continue
        try:
            place, name = place_beside(folder, label)
            if place.head(name, 4) == b"PK\3\4":
                skipped, tensors = covered.get(label, ()), optimizers.get(label, {})
                differing, values, columns, is_bare = _compare(place, name, label, skipped, tensors)
                beside |= columns
                damages += differing
                odd_values += values
            else:
                is_bare = label not in covered  # the records of an older file have no checksum either
            bare += [label] if is_bare else []
        except UnreadableError as error:
            problems.append(from_error(error, label))
    return damages, tuple(bare), tuple(odd_values), beside, problems


def place_beside(folder: Folder, label: str) -> tuple[Folder, str]:
    """The folder that a file of the step is in, and its name there; raises UnreadableError where it is gone."""
    *folders, name = PurePosixPath(label).parts
    for entry in folders:
        above = folder.parent if entry == ".." else folder.sub(entry)
        if above is None:
            break
        folder = above
    if not folder.has(name) and folder.parent is not None:
        folder = folder.parent.sub(folder.name)  # a view of one file hides those beside it
    if not folder.has(name):
        raise UnreadableError("is gone, or its name does not lead back to it: its bytes were not compared")
    return folder, name


def _compare(
    folder: Folder, name: str, label: str, covered: Collection[int], tensors: Mapping[str, tuple[str, str, str]]
) -> tuple[list[Damage], list[OddValues], Beside, bool]:
    """Members that do not match, tensors with values that cannot be, all values, whether a member has no checksum.

    `tensors` has the parameter, state and dtype of what a storage holds.
    """
    read = ranges_of(folder, name)
    archive = read_archive(read, folder.size(name))
    pairs = zip(archive.members, archive.limits, strict=True)
    rest = [(member, limit) for member, limit in pairs if member.header not in covered]
    headers = read([(member.header, LOCAL_SIZE + len(member.name)) for member, _ in rest])
    starts = [data_start(header, *of_member) for header, of_member in zip(headers, rest, strict=True)]
    columns = starts, [member.size for member, _ in rest], [member.crc for member, _ in rest]
    start, size, crc = (np.array(column, np.int64) for column in columns)
    names = [member.short for member, _ in rest]
    members = Members(np.zeros_like(start), start, size, crc, np.arange(len(start)), names)
    scans = {}
    for number, short in enumerate(names):
        dtype = tensors.get(short.removeprefix("data/"), ("", "", ""))[2]
        if dtype in ENCODINGS and (item := ITEM_BITS[dtype] // 8):
            scans[number] = Scan(dtype, 0, int(size[number]) // item, item, True)
    results = stream(folder, name, members, scans, None, Meter())
    bad = np.flatnonzero((results.crc != crc) & (crc > 0)).tolist()
    damages = [Damage(-1, label, names[i], f"CRC-32 {crc[i]:08x}", f"{results.crc[i]:08x}") for i in bad]
    values, beside = [], Beside()
    for i, seen in results.values.items():
        param, state, _ = tensors[names[i].removeprefix("data/")]
        beside[label, names[i]] = {column: getattr(seen, column) for column in VALUE_COLUMNS}
        counts = seen.nan, seen.plus_inf, seen.minus_inf, seen.negatives if state in SQUARES else 0
        values += [OddValues(label, param, state, *counts, scans[i].count)] if any(counts) else []
    return damages, values, beside, bool(((crc == 0) & (size > 0)).any())
