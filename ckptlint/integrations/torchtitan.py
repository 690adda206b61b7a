"""For torchtitan."""

from __future__ import annotations

from typing import Any

from ckptlint.integrations.saved import OnFault, Undo, after, check_saved, require
from ckptlint.live.api import rank_and_world


def check_saves(manager: Any, on_fault: OnFault = "warn", **options: Any) -> Undo:
    """From now on check each step that a CheckpointManager has saved; see `check_saved`. Returns what undoes it.

    An asynchronous save is checked when the manager has waited for it: before the next save, and at `close`. A last
    step that holds the model alone is no step to resume from: it is checked, and `latest.good` does not move.

    Raises:
        ConfigError: `on_fault` is unknown.

    Source: torchtitan 0.3 torchtitan.components.checkpointer.dcp.CheckpointManager._save, base.BaseCheckpointManager
    """
    require(on_fault)
    if rank_and_world()[0]:
        return lambda: None
    pending: list[int] = []

    def check(step: int, **of_step: Any) -> None:
        check_saved(manager._create_checkpoint_id(step), on_fault=on_fault, **options | of_step)

    def saved(is_saved: bool, curr_step: int, last_step: bool = False) -> None:
        if is_saved and manager.save_future is not None:
            pending.append(curr_step)
        elif is_saved:
            check(curr_step, **{"keep_good": False} if last_step and manager.last_save_model_only else {})

    def waited(_: None) -> None:
        while pending:
            check(pending.pop())

    undos = (
        after(manager, "maybe_wait_for_saving", waited),
        after(manager, "save", saved),
        after(manager, "close", lambda _: manager.maybe_wait_for_saving()),
    )

    def undo_all() -> None:
        for undo in undos:
            undo()

    return undo_all
