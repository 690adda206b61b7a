"""The run folder around a step: which step its tracker names, and which of its steps were finished."""

from __future__ import annotations

import re

from ckptlint.errors import CkptlintError
from ckptlint.loaders.common import COMMON_FILE
from ckptlint.loaders.megatron import CONFIG_FILE
from ckptlint.loaders.recognise import METADATA, RANK_METADATA
from ckptlint.model import RunFolder, StepState
from ckptlint.storage import Folder

TRACKER = "latest_checkpointed_iteration.txt"
_UNSEEN = "the other steps of its run and their tracker were not looked at"
_STEP = re.compile(r"iter_(\d{7,})")


def read_run(folder: Folder) -> RunFolder | None:
    """What lies around a step folder; None when its name is no step's of Megatron-LM or the run cannot be looked at.

    Only the tracked step and the newest ones are looked into, down to the first that was finished.

    Source:
        megatron.training.checkpointing: `iter_%07d` and, written last, `latest_checkpointed_iteration.txt`
    """
    own, parent = _STEP.fullmatch(folder.name), folder.parent
    if own is None:
        return None
    if parent is None:
        return RunFolder(int(own[1]), unseen=_UNSEEN)
    try:
        steps = {int(match[1]): name for name in parent.folders() if (match := _STEP.fullmatch(name))}
        tracker = _tracker(parent)
        newest = next((n for n in sorted(steps, reverse=True) if _state(parent.sub(steps[n])) == "complete"), None)
        tracked: StepState = "unknown"
        if tracker is not None:
            tracked = _state(parent.sub(steps[tracker])) if tracker in steps else "absent"
    except CkptlintError as error:
        return RunFolder(int(own[1]), unseen=f"{_UNSEEN}: {error}")
    return RunFolder(int(own[1]), tuple(sorted(steps)), newest, tracker, tracked)


def _tracker(parent: Folder) -> int | None:
    if not parent.has(TRACKER):
        return None
    text = parent.head(TRACKER, 64).strip()
    return int(text) if re.fullmatch(rb"\d{1,18}", text) else None


def _state(step: Folder) -> StepState:
    """Whether a step has what is written last.

    `metadata.json` ends the saves that have a `common.pt`; fsdp_dtensor and torch_dcp have neither. Of a torch_dist
    step of Megatron-Core >= 0.19 without `metadata.json` this says `complete`: only its keys would tell.
    """
    names = step.files()
    if METADATA in names:
        whole = step.head(METADATA, 1) == b"\x80" and (CONFIG_FILE in names or COMMON_FILE not in names)
        return "complete" if whole else "unfinished"
    if any(RANK_METADATA.fullmatch(name) or name.startswith("mp_rank_") for name in step.entries):
        return "unknown"
    started = COMMON_FILE in names or any(name.endswith(".distcp") for name in names) or not step.entries
    return "unfinished" if started else "unknown"
