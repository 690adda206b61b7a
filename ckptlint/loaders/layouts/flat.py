"""FSDP's local state dicts: one torch file per rank, with the rank in its name."""

from __future__ import annotations

from ckptlint.loaders.layouts import Evidence, Fixed, Found, Layout
from ckptlint.loaders.layouts.torch_files import opened_files
from ckptlint.loaders.rank_files.sets import flat_name, flat_sets, input_bytes
from ckptlint.model import Checkpoint
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder


def _evidence(folder: Folder) -> Evidence | None:
    """Names that count ranks, and sharded tensors in the first file of the newest save."""
    from ckptlint.loaders.rank_files.verl import writer_of

    own = next(iter(flat_sets(folder)), None)
    writer = None if own is None else writer_of(folder, own.files[0])
    if own is None or writer is None:
        return None
    is_counted = "rank" in own.files[0] or flat_name(own.files[0])[1] in (0, writer)
    return Evidence(printable(own.files[0])) if is_counted else None


def _read(found: Found, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.verl import read_flat

    return opened_files(found, read_flat(found.folder, look_at_files))


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
            Fixed(
                ("world",),
                "each rank reads the file of its own number, which holds its part of FSDP's flat parameters: {saved:,} "
                "rank{s} saved, the job has {asked:,}",
                source="torch 2.13, FullyShardedDataParallel with StateDictType.LOCAL_STATE_DICT",
            ),
        ),
    ),
)
