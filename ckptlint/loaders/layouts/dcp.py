"""What torch.distributed.checkpoint and Megatron-Core write: `.metadata`, or one of each rank, and payload files."""

from __future__ import annotations

import pickle
from functools import partial

from ckptlint.errors import LimitError
from ckptlint.formats.pickles.safe_pickle import SIZE_LIMIT, asks_for_names
from ckptlint.formats.pointers import pointer_in
from ckptlint.loaders.layouts import Evidence, Layout
from ckptlint.loaders.readers.common_state import COMMON_FILE
from ckptlint.loaders.readers.dcp.folder import read_dcp
from ckptlint.loaders.readers.dcp.megatron import CONFIG_FILE
from ckptlint.model import StepState
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.litter import is_system_file
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA

_TEXT_LIMIT = 1024**2
_TRAIN_STATE = "train_state.pt"
_RESTORE = {"dcp": "restore .metadata from where it was written, or use another step"}


def _metadata_bytes(folder: Folder) -> int:
    """Bytes of the pickles that describe a DCP checkpoint."""
    inputs = [
        name for name in folder.files_beside() if name in (METADATA, COMMON_FILE) or RANK_METADATA.fullmatch(name)
    ]
    return sum(min(folder.entries[name].size, SIZE_LIMIT) for name in inputs)


def _is_metadata(folder: Folder) -> bool:
    """Whether a `.metadata` without payload files is DCP's: Flutter projects keep a text file of that name."""
    start = folder.head(METADATA, 4096)
    if not start or start[:1] == b"\x80" or pointer_in(start) or folder.has("metadata.json"):
        return True
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start < len(start) - 4
    try:  # whether it is a pickle of protocol 0 that would call something; one that is too much work counts too
        data = folder.read(METADATA, _TEXT_LIMIT)
        if data.count(b"\n") < 2 and pickle.STACK_GLOBAL not in data:  # GLOBAL and INST end two lines
            return False
        return isolated(partial(asks_for_names, data), len(data))
    except LimitError:
        return True


def has_payload(folder: Folder) -> str:
    """A payload file of the folder, "" without one."""
    if plain := folder.entries.payload[:1].tolist():
        return str(plain[0].decode())
    return next((name for name in folder.files_beside() if name.endswith(".distcp") and not is_system_file(name)), "")


def _whole(folder: Folder) -> Evidence | None:
    if METADATA not in folder.files_beside():
        return None
    is_one = has_payload(folder) or _is_metadata(folder) or folder.not_looked_at  # unlisted payload may be there
    return Evidence(METADATA) if is_one else None


def _state(folder: Folder) -> StepState:
    """`metadata.json` ends the saves that have a `common.pt`; fsdp_dtensor and torch_dcp have neither.

    Of a torch_dist step of Megatron-Core >= 0.19 without `metadata.json` this says `complete`: only its keys would
    tell.
    """
    is_begun = folder.has(COMMON_FILE) and not folder.has(CONFIG_FILE)
    return "complete" if folder.head(METADATA, 1) == b"\x80" and not is_begun else "unfinished"


LAYOUTS = (
    Layout(
        kind="dcp",
        order=10,
        formats={
            "dcp": "DCP",
            "torch_dist": "Megatron torch_dist",
            "fsdp_dtensor": "Megatron fsdp_dtensor",
            "torch_dcp": "Megatron torch_dcp",
        },
        recognise=_whole,
        read=lambda place, look_at_files: read_dcp(place.folder, look_at_files),
        input_bytes=_metadata_bytes,
        state=_state,
        marks=(METADATA,),
        train_state=_TRAIN_STATE,
        restore=_RESTORE,
    ),
    Layout(
        kind="per-rank",
        order=20,
        formats={"dcp-per-rank": "DCP, one metadata file per rank"},
        recognise=lambda folder: next(map(Evidence, filter(RANK_METADATA.fullmatch, folder.files_beside())), None),
        read=lambda place, look_at_files: read_dcp(place.folder, look_at_files),
        input_bytes=_metadata_bytes,
        marks=("__0.metadata",),
        train_state=_TRAIN_STATE,
        restore=_RESTORE,
    ),
)
