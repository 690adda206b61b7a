"""FSDP's local state dicts: one torch file per rank, with the rank in its name."""

from __future__ import annotations

from ckptlint.loaders.layouts import Fixed, Found, Layout
from ckptlint.loaders.layouts.torch_files import opened, set_of
from ckptlint.loaders.rank_files.sets import input_bytes
from ckptlint.model import Checkpoint


def _read(found: Found, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.verl import read_flat

    return opened(found, read_flat(found.folder, look_at_files))


LAYOUTS = (
    Layout(
        kind="flat",
        order=86,
        formats={"fsdp-ranks": "FSDP, one torch file per rank"},
        recognise=set_of("flat"),
        read=_read,
        input_bytes=input_bytes,
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
