"""Separates the files of two saves in one folder, by their times or by their names."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.text import join_words, plural
from ckptlint.model.tiling import Coverage, IntArray, Tiling, distinct
from ckptlint.patterns import lazy_pattern

_TENSORS, _ROWS, _NAMED = 64, 16, 2
_APART = 2.0  # least seconds between two saves; assumed: files of one small save are closer
_PAUSE, _LONGER = 60.0, 4.0  # seconds that node clocks may differ; least ratio of pause to save time
_COPIED = 1e6  # bytes/s of a slow copy
_COUNT = lazy_pattern(r"-of-(\d+)\.safetensors$")


class FilesOfSave(NamedTuple):
    """The files of one of two saves.

    Attributes:
        written: time of the last write, seconds since the epoch; 0 where unknown.
        is_complete: whether they alone hold every element of the shared tensors exactly once.
    """

    files: tuple[str, ...]
    written: float
    is_complete: bool


@fact
def two_saves(ckpt: Checkpoint) -> tuple[FilesOfSave, FilesOfSave] | None:
    """The newer and the older save in this folder, if at least one is complete by itself; None without two saves."""
    # in other formats a file does not describe its own content, and leftovers of an older save are not read
    if ckpt.format not in ("dcp-safetensors", "dcp-per-rank"):
        return None
    pairs, shared = _conflicts(ckpt)
    if not pairs:
        return None
    used = set(distinct(ckpt.records.file).tolist())
    # Times are tried first, totals in names second; a copy of the folder loses the times. Neither proves two saves: a
    # division counts only if every conflict falls between its halves and one half alone covers all shared tensors.
    for older in (_older_by_time(ckpt, used), _older_by_count(ckpt, used)):
        if not older or any((a in older) == (b in older) for a, b in pairs):
            continue
        newer_save, older_save = (_of_save(ckpt, files, shared) for files in (used - older, older))
        if newer_save.is_complete or older_save.is_complete:
            return newer_save, older_save
    return None


def _conflicts(ckpt: Checkpoint) -> tuple[set[tuple[int, int]], list[Tensor]]:
    """Pairs of files (rows) that both hold some element, and the tensors with such elements."""
    pairs: set[tuple[int, int]] = set()
    shared = []
    for tensor in ckpt.sound_tensors():
        tiling = tensor.tiling
        if not (tiling.duplicates or tiling.coverage.doubled):
            continue
        rows = [*tiling.duplicates]
        for region in tiling.coverage.doubled:
            rows += combinations(tiling.touching(region)[:_ROWS], 2)
        records = tensor.chunks.record
        for a, b in rows:
            if records[a] >= 0 and records[b] >= 0 and tiling.box(a).intersect(tiling.box(b)) is not None:
                pairs.add((int(ckpt.records.file[records[a]]), int(ckpt.records.file[records[b]])))
        shared.append(tensor)
        if len(shared) == _TENSORS:
            break
    return pairs, shared


def _older_by_time(ckpt: Checkpoint, used: set[int]) -> set[int]:
    """The files written before the longest pause between consecutive files; empty where it is shorter than 2 s."""
    times = sorted((_time(ckpt, number), number) for number in used)
    pauses = np.diff([moment for moment, _ in times])
    if not len(pauses) or times[0][0] <= 0 or pauses.max() < _APART:
        return set()
    return {number for _, number in times[: int(pauses.argmax()) + 1]}


def _older_by_count(ckpt: Checkpoint, used: set[int]) -> set[int]:
    """The older files of two that have different totals in their names (`-of-00002`); empty without two totals."""
    totals = ((_COUNT.search(ckpt.files.names[number]), number) for number in used)
    by_count = grouped((match[1] if match else "", number) for match, number in totals)
    if len(by_count) != 2:
        return set()
    return set(min(by_count.values(), key=lambda files: _written(ckpt, files)))


def _written(ckpt: Checkpoint, files: Iterable[int]) -> float:
    return max(_time(ckpt, number) for number in files)


def _time(ckpt: Checkpoint, file: int) -> float:
    return float(ckpt.times.files[file]) if len(ckpt.times.files) else 0.0


def _of_save(ckpt: Checkpoint, files: set[int], shared: list[Tensor]) -> FilesOfSave:
    names = tuple(sorted(ckpt.files.names[number] for number in files))
    numbers = np.array(sorted(files), np.int64)
    return FilesOfSave(names, _written(ckpt, files), all(_tiles(ckpt, tensor, numbers) for tensor in shared))


def _tiles(ckpt: Checkpoint, tensor: Tensor, files: IntArray) -> bool:
    """Whether these files alone hold every element of a tensor exactly once."""
    record = tensor.chunks.record
    kept = (record >= 0) & np.isin(ckpt.records.file[record], files)
    tiling = tensor.tiling
    held = Tiling(tiling.shape, tiling.offsets[kept], tiling.sizes[kept])
    return not len(held.outside) and not held.duplicates and held.coverage == Coverage()


class Replaced(NamedTuple):
    """Files that a later save may have overwritten, since they are much younger than `.metadata` and all others.

    Attributes:
        files: rows of `Checkpoint.files`.
        pause: seconds from `.metadata` to the first of these files.
    """

    files: tuple[int, ...]
    pause: float


@fact
def replaced_files(ckpt: Checkpoint) -> Replaced | None:
    """The files of a later save that died before it wrote `.metadata`; None where times show no such save.

    A save writes `.metadata` last, so a younger file comes from another save, or from a copy that set new times. A copy
    leaves no long pause: the pause must exceed clock skew, four times the duration of either group of files, and the
    time that a slow copy needs for the largest young file.
    """
    used = distinct(ckpt.records.file)
    if not len(ckpt.times.files) or not ckpt.times.metadata or not (ckpt.times.files[used] > 0).all():
        return None
    times = ckpt.times.files[used]
    young = times > ckpt.times.metadata + _APART
    if not young.any() or young.all():
        return None
    pause = float(times[young].min()) - ckpt.times.metadata
    took = max(ckpt.times.metadata - float(times[~young].min()), float(np.ptp(times[young])))
    largest = int(ckpt.files.size[used[young]].max())
    if pause < max(_PAUSE, _LONGER * took, largest / _COPIED):
        return None
    return Replaced(tuple(used[young].tolist()), pause)


def saves_note(ckpt: Checkpoint) -> str:
    """Sentence on the two saves; "" without them."""
    texts = []
    for save in two_saves(ckpt) or ():
        state = "complete by themselves" if save.is_complete else "not complete"
        when = time.strftime(" written %Y-%m-%d %H:%M:%S", time.localtime(save.written)) if save.written else ""
        texts.append(f"{plural(len(save.files), 'file')}{when}, {state} ({_names(save)})")
    return "; ".join(texts)


def saves_hint(ckpt: Checkpoint) -> str:
    """Hint for files of two saves; "" without them."""
    saves = two_saves(ckpt)
    if saves is None:
        return ""
    newer, older = saves
    if newer.is_complete and older.is_complete:
        return f"these are files of two saves: keep one and move the other away; the older is {_names(older)}"
    if newer.is_complete:
        return f"move {_names(older)} away: these files are left from an older save, and the newer one is complete"
    return f"save again into an empty folder, or move {_names(newer)} away: this newer save is not complete"


def _names(save: FilesOfSave) -> str:
    return join_words(save.files) if len(save.files) <= _NAMED else f"{save.files[0]} .. {save.files[-1]}"
