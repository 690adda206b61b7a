"""DeepSpeed's folder of a tag, and its universal form."""

from __future__ import annotations

from ckptlint.loaders.layouts import CheckpointPlace, Evidence, FixedAxes, Layout
from ckptlint.loaders.layouts.torch_files import set_of
from ckptlint.loaders.readers.sets import deepspeed_sets, input_bytes
from ckptlint.model import Checkpoint
from ckptlint.storage.folder import Folder

_TAG = input_bytes(deepspeed_sets)
_SMALL = 16 * 1024  # bytes of pickle in the four files of a parameter of the universal form


def _read(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.deepspeed import read_deepspeed

    return read_deepspeed(place.folder, look_at_files)


def _read_universal(place: CheckpointPlace, look_at_files: bool) -> Checkpoint:
    from ckptlint.loaders.rank_files.deepspeed_universal import read_universal

    return read_universal(place.folder, look_at_files)


def _universal(folder: Folder) -> Evidence | None:
    """A folder `zero` with one folder for each parameter."""
    if "zero" not in folder.folders() or folder.escapes_to("zero"):
        return None
    zero = folder.sub("zero")
    if zero.has("optimizer_state.pt"):
        return Evidence("zero/optimizer_state.pt")
    inner = [name for name in zero.folders()[:4] if not zero.escapes_to(name)]
    return next((Evidence(f"zero/{name}/fp32.pt") for name in inner if zero.sub(name).has("fp32.pt")), None)


LAYOUTS = (
    Layout(
        kind="deepspeed",
        order=80,
        formats={"deepspeed": "DeepSpeed ZeRO"},
        recognise=set_of(deepspeed_sets),
        read=_read,
        input_bytes=_TAG,
        # the tracker is written after all ranks; the grid shows lost ones
        state=lambda _folder: "complete",
        describes_itself=True,
        fixed=(
            FixedAxes(
                ("dp",),
                "DeepSpeed raises ZeRORuntimeException: {saved:,} data-parallel rank{s} saved, the job has {asked:,}; "
                "convert it with ds_to_universal.py, or load it without the optimizer states",
                source="deepspeed 0.19.8, DeepSpeedEngine._load_zero_checkpoint",
                only_with="optimizer",
            ),
        ),
        unsure_axes=("tp", "pp"),
    ),
    Layout(
        kind="deepspeed-universal",
        order=60,
        formats={"deepspeed-universal": "DeepSpeed universal"},
        recognise=_universal,
        read=_read_universal,
        input_bytes=lambda folder: _TAG(folder) + _SMALL * len(folder.sub("zero").folders()),
        describes_itself=True,
    ),
)
