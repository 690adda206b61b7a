"""For accelerate."""

from __future__ import annotations

from typing import Any

from ckptlint.integrations.saved import OnFault, Undo, after, check_saved, require


def check_saves(accelerator: Any, on_fault: OnFault = "warn", **options: Any) -> Undo:
    """From now on check after each `accelerator.save_state`; see `check_saved`. Returns what undoes it.

    With automatic names `latest.good` lies in the project folder: accelerate takes a number from every name in
    `checkpoints/`, and fails on one without.

    Raises:
        ConfigError: `on_fault` is unknown.

    Source: accelerate 1.15 accelerate.Accelerator.save_state, Accelerator.load_state: they return the folder, and end
    without a barrier after the random states of the other ranks
    """
    require(on_fault)
    if not accelerator.is_main_process:
        return lambda: None
    if accelerator.project_configuration.automatic_checkpoint_naming and options.get("keep_good", True) is True:
        options["keep_good"] = accelerator.project_dir
    return after(accelerator, "save_state", lambda folder, *_, **__: check_saved(folder, on_fault=on_fault, **options))
