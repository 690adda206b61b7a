"""verl's FSDP workers: one torch file per rank, with the world size in its name."""

from __future__ import annotations

from ckptlint.loaders.layouts import CheckpointPlace, FixedAxes, Layout
from ckptlint.loaders.layouts.torch_files import set_of
from ckptlint.loaders.readers.sets import has_all_ranks, input_bytes, verl_sets
from ckptlint.model import Checkpoint, StepState
from ckptlint.storage.folder import Folder


def _read(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.verl import read_verl

    return read_verl(place.folder, look_at_files)


def _state(folder: Folder) -> StepState:
    """Of each kind of files that is there one has every rank."""
    sets = [file_set.files for file_set in verl_sets(folder)]
    return "complete" if any(map(has_all_ranks, sets)) else "unfinished"


LAYOUTS = (
    Layout(
        kind="verl",
        order=75,
        formats={"verl": "verl, one torch file per rank"},
        recognise=set_of(verl_sets),
        read=_read,
        input_bytes=input_bytes(verl_sets),
        state=_state,
        describes_itself=True,
        fixed=(
            FixedAxes(
                ("world",),
                "verl puts the world size into the name of each rank's file: {saved:,} rank{s} saved, the job has "
                "{asked:,}; merge the files first (python -m verl.model_merger)",
                source="verl 0.9.1, FSDPCheckpointManager.load_checkpoint",
            ),
        ),
    ),
)
