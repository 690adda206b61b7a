"""The train state of Megatron-Bridge: the step that it counts, in a torch.save archive of scalars."""

from __future__ import annotations

import io
import zipfile
from typing import Any

from ckptlint.errors import UnreadableError
from ckptlint.formats.safe_pickle import Opaque, read_state
from ckptlint.formats.torch_archive import read_pickle_member
from ckptlint.loaders.problems import from_error, from_refusals
from ckptlint.model import Problem
from ckptlint.storage.folder import Folder

TRAIN_STATE = "train_state.pt"
_LIMIT = 16 * 1024**2


def read_train_state(folder: Folder, name: str = TRAIN_STATE) -> tuple[int | None, list[Problem]]:
    """The step that a train state holds, None where there is none, and what stood in the way of reading it.

    Source:
        megatron.bridge.training.state.TrainState.state_dict: `step` as an int32 tensor without axes
    """
    if not folder.has(name):
        return None, []
    try:
        data = folder.read(name, _LIMIT)
        state = read_state(read_pickle_member(io.BytesIO(data)))
    except UnreadableError as error:
        return None, [from_error(error, name)]
    value = state.root.get("step") if isinstance(state.root, dict) else None
    step = value if isinstance(value, int) and not isinstance(value, bool) else _scalar(value, data)
    return step, from_refusals(state, name, "data.pkl of ")


def _scalar(value: Any, data: bytes) -> int | None:
    """The integer of a tensor without axes that the archive holds."""
    try:
        storage, offset, shape = value.args[:3]
        _, kind, key, *_ = storage.args[0]
        if not isinstance(kind, type) or not issubclass(kind, Opaque) or (offset, shape) != (0, ()):
            return None
        if kind.name not in ("IntStorage", "LongStorage"):
            return None
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            member = next(
                m for m in archive.infolist() if m.filename.endswith(f"/data/{key}") and m.file_size in (4, 8)
            )
            return int.from_bytes(archive.read(member), "little", signed=True)
    except (AttributeError, TypeError, ValueError, IndexError, StopIteration, zipfile.BadZipFile):
        return None
