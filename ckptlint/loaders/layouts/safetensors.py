"""Safetensors: a model with or without its index, an adapter, the shards of torch's own writer."""

from __future__ import annotations

from ckptlint.loaders.layouts import Layout
from ckptlint.loaders.layouts.torch_files import set_of
from ckptlint.loaders.readers.safetensors import NUMBERED, SHARD, groups, header_bytes, read_safetensors
from ckptlint.model import StepState
from ckptlint.storage.folder import Folder


def _state(folder: Folder) -> StepState:
    """The index of a Hugging Face model is written after its files."""
    if any(name.endswith(".safetensors.index.json") for name in folder.files_beside()):
        return "complete"
    return "unfinished" if any(map(_is_part, folder.files_beside())) else "unknown"


def _is_part(name: str) -> bool:
    """Whether a file is one of several of a model that is loaded by an index."""
    match = NUMBERED.fullmatch(name)
    return match is not None and int(match["n"]) > 1 and not SHARD.fullmatch(name) and match["stem"] != "consolidated"


LAYOUTS = (
    Layout(
        kind="safetensors",
        order=50,
        formats={"safetensors": "Hugging Face safetensors", "dcp-safetensors": "DCP, one safetensors file per rank"},
        recognise=set_of(groups),
        read=lambda place, look_at_files: read_safetensors(place.folder, look_at_files, bool(place.reports_for)),
        input_bytes=header_bytes,
        state=_state,
        marks=("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
        describes_itself=True,
    ),
)
