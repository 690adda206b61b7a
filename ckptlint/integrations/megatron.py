"""For Megatron-LM."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

from ckptlint.integrations.saved import OnFault, Undo, check_saved, require
from ckptlint.live.api import rank_and_world


def patch_megatron(on_fault: OnFault = "warn", **options: Any) -> Undo:
    """From now on check after each `save_checkpoint` of Megatron-LM; see `check_saved`. Returns what undoes it.

    An asynchronous save is checked as the last of its finalize functions, after the tracker (before it where a job also
    saves logits). Saves with `non_persistent_ckpt` are not checked, nor those of `--freeze-all-layers`, which write no
    weights.

    Raises:
        ConfigError: `on_fault` is unknown.
        ImportError: megatron.training cannot be imported.

    Source: Megatron-LM (d98e8a64) megatron.training.checkpointing.save_checkpoint, which ends with a barrier;
    training.py imports its name
    """
    require(on_fault)
    from megatron.training import checkpointing, get_args, training

    save, schedule = checkpointing.save_checkpoint, checkpointing.schedule_async_save
    parameters = inspect.signature(save)
    steps: list[Any] = []

    @wraps(save)
    def save_and_check(*args: Any, **named: Any) -> None:
        given = parameters.bind(*args, **named).arguments
        is_kept = not given.get("non_persistent_ckpt") and not getattr(get_args(), "freeze_all_layers", False)
        if is_kept and rank_and_world()[0] == 0:
            release = given.get("release", False)
            name = checkpointing.get_checkpoint_name
            steps[:] = [name(get_args().save, given["iteration"], release=release, return_base_dir=True)]
        save(*args, **named)
        while steps:
            check_saved(steps.pop(), on_fault=on_fault, **options)

    @wraps(schedule)
    def schedule_and_check(async_request: Any) -> None:
        while steps:
            async_request.add_finalize_fn(partial(check_saved, steps.pop(), on_fault=on_fault, **options))
        schedule(async_request)

    places = [module for module in (checkpointing, training) if getattr(module, "save_checkpoint", None) is save]

    def put(saves: Any, schedules: Any) -> None:
        for module in places:
            module.save_checkpoint = saves
        checkpointing.schedule_async_save = schedules

    put(save_and_check, schedule_and_check)
    return partial(put, save, schedule)
