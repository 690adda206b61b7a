"""For the Trainer of Lightning."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from ckptlint.integrations.saved import Undo, after, check_saved, require, stops_alone


class CheckpointLint(Callback):
    """Checks each checkpoint once it is saved, by whatever callback: `Trainer(callbacks=[CheckpointLint()])`.

    `on_fault="stop"` ends the training. Everything else is as in `check_saved`. A save of AsyncCheckpointIO is checked
    in its thread once it is written.

    Raises:
        ConfigError: `on_fault` is unknown, or is `stop` in a job of several ranks.

    Source: lightning 2.6 lightning.pytorch.Trainer.save_checkpoint, which ends with a barrier: no hook of a callback
    comes after ModelCheckpoint's own, which are the last
    """

    def __init__(self, on_fault: Literal["warn", "stop", "raise"] = "warn", **options: Any) -> None:
        require(on_fault, ("warn", "stop", "raise"))
        self.stops = on_fault == "stop"
        self.options = options | {"on_fault": "warn" if self.stops else on_fault}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """From now on check after each save."""
        if self.stops:
            stops_alone(trainer.world_size)
        self.undo: Undo = lambda: None
        if not trainer.is_global_zero:
            return

        def check(path: Any) -> None:
            if check_saved(path, **self.options).verdict != "pass" and self.stops:
                trainer.should_stop = True

        io = getattr(trainer.strategy, "_checkpoint_io", None)  # FSDPStrategy refuses to name one
        if isinstance(io, AsyncCheckpointIO):
            writer = trainer.strategy.checkpoint_io.checkpoint_io
            self.undo = after(writer, "save_checkpoint", lambda _, checkpoint, path, *rest, **named: check(path))
        else:
            self.undo = after(trainer, "save_checkpoint", lambda _, filepath, *rest, **named: check(filepath))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """No longer check."""
        self.undo()
