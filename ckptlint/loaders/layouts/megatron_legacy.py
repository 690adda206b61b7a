"""Megatron-LM's older form: a folder for each model parallel rank."""

from __future__ import annotations

from ckptlint.formats.torch_archive import END_SIZE
from ckptlint.loaders.layouts import CheckpointPlace, Evidence, FixedAxes, Layout
from ckptlint.loaders.rank_files.megatron_keys import MODEL_FILES, legacy_bytes, legacy_file, rank_folders
from ckptlint.model import Checkpoint, StepState
from ckptlint.storage.folder import Folder


def _read(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.megatron_legacy import read_legacy

    return read_legacy(place.folder, look_at_files)


def _state(folder: Folder) -> StepState:
    return "complete" if all(_is_written(folder.sub(name)) for name in rank_folders(folder)) else "unfinished"


def _is_written(rank: Folder) -> bool:
    """Whether the model file of a rank has its end; files of torch < 1.6 have no mark there."""
    file = next((file for file in MODEL_FILES if rank.has(file)), None)
    if file is None or rank.head(file, 4) != b"PK\3\4":
        return file is not None and rank.size(file) > 0
    return b"PK\5\6" in rank.read_range(file, max(rank.size(file) - END_SIZE, 0), END_SIZE)


LAYOUTS = (
    Layout(
        kind="megatron-legacy",
        order=70,
        formats={"megatron-legacy": "Megatron-LM legacy torch"},
        recognise=lambda folder: Evidence(file) if (file := legacy_file(folder)) else None,
        read=_read,
        input_bytes=legacy_bytes,
        state=_state,
        describes_itself=True,
        fixed=(
            FixedAxes(
                ("tp", "pp", "vpp", "ep"),
                "each model-parallel rank reads the folder of its own numbers, and these change ({changes}): convert "
                "the checkpoint with Megatron-LM's tools/checkpoint/convert.py",
                source="Megatron-LM 0.16.1, get_checkpoint_name",
            ),
        ),
    ),
)
