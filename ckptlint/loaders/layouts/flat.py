"""FSDP's local state dicts: one torch file per rank, with the rank in its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.loaders.layouts import CheckpointPlace, Evidence, FixedAxes, Layout
from ckptlint.loaders.readers.sets import flat_name, flat_sets, input_bytes
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import join_words, printable, verb
from ckptlint.storage.folder import Folder

_POINTER = "last_checkpoint.rank_"


def _evidence(folder: Folder) -> Evidence | None:
    """Names that count ranks, and sharded tensors in the first file of the newest save."""
    file_set = next(iter(flat_sets(folder)), None)
    if file_set is None:
        return None
    from ckptlint.loaders.rank_files.verl import writer_of

    if (writer := writer_of(folder, file_set.files[0])) is None:
        return None
    is_counted = "rank" in file_set.files[0] or flat_name(file_set.files[0])[1] in (0, writer)
    return Evidence(printable(file_set.files[0])) if is_counted else None


def _read(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.verl import read_flat

    ckpt = read_flat(place.folder, look_at_files)
    return replace(ckpt, problems=[*ckpt.problems, *_pointers(place.folder)])


def _pointers(folder: Folder) -> Iterator[Problem]:
    """Ranks that find no save: what names the file of each rank is missing, or names none that is there.

    Source: dinov2.fsdp.FSDPCheckpointer.has_checkpoint, get_checkpoint_file: `last_checkpoint.rank_N` holds the file's
    name
    """
    ranks = [flat_name(name)[1] for name in flat_sets(folder)[0].files]
    names = [f"{_POINTER}{rank}" for rank in ranks]
    if not any(map(folder.has, names)):
        return
    lost = [name for name in names if not folder.has(name) or not folder.has(folder.short_text(name))]
    if lost:
        sentence = f"{join_words(lost)} {verb(len(lost), 'names')} no file that is there"
        why = "a rank that finds no name there starts anew, and the others resume"
        hint = "write the name of the rank's newest file into it"
        yield Problem("incomplete", lost[0], sentence, why=why, hint=hint, outside_checkpoint=True)


LAYOUTS = (
    Layout(
        kind="flat",
        order=86,
        formats={"fsdp-ranks": "FSDP, one torch file per rank"},
        recognise=_evidence,
        read=_read,
        input_bytes=input_bytes(flat_sets),
        describes_itself=True,
        fixed=(
            FixedAxes(
                ("world",),
                "each rank reads the file of its own number, which holds its part of FSDP's flat parameters: {saved:,} "
                "rank{s} saved, the job has {asked:,}",
                source="torch 2.13, FullyShardedDataParallel with StateDictType.LOCAL_STATE_DICT",
            ),
        ),
    ),
)
