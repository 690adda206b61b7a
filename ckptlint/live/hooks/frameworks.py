"""Hooks of trainers that save whole copies of the model; those that save through DCP need only `patch_dcp`."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

from ckptlint.live.hooks.dcp import check_save


def accelerate_hook(models: Sequence[Any], weights: Sequence[Mapping[str, Any]], output_dir: str) -> None:
    """For `accelerator.register_save_state_pre_hook`: data-parallel ranks hold equal copies of the model.

    With FSDP, accelerate saves through DCP before it calls this hook, and passes no weights: use `patch_dcp`.

    Source: accelerate 1.15 accelerate.Accelerator.save_state
    """
    check_save({"models": list(weights)}, output_dir, ignore=_buffers(models))


class LightningCheck:
    """Mixin for a Lightning Callback: all data-parallel ranks hold the same model and optimizer states at a save.

    `class Check(LightningCheck, Callback): ...` and `Trainer(callbacks=[Check()])`. Strategies that save through DCP
    (FSDPStrategy, ModelParallelStrategy) need `patch_dcp` instead.

    Source: lightning 2.6 lightning.pytorch.callbacks.Callback.on_save_checkpoint
    """

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Called on all ranks before rank 0 writes."""
        state = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
        check_save(state, f"step {trainer.global_step}", ignore=_buffers([pl_module]))


def _buffers(models: Sequence[Any]) -> list[str]:
    """Patterns of the keys of buffers: ranks keep running statistics of their own data, and only one is saved."""
    return [f"*{glob.escape(name)}" for model in models for name, _ in model.named_buffers()]
