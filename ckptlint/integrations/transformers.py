"""For the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from ckptlint.integrations.saved import check_saved, log, require, stops_alone


class CheckpointLint(TrainerCallback):
    """Checks each checkpoint once it is saved: `Trainer(..., callbacks=[CheckpointLint()])`.

    `on_fault="stop"` ends the training. Everything else is as in `check_saved`. The Trainer has rotated its checkpoints
    by then, and has begun to push: `save_total_limit=1` has removed the step before.

    Raises:
        ConfigError: `on_fault` is unknown, or is `stop` in a job of several ranks.

    Source: transformers 5.23 transformers.Trainer._maybe_log_save_evaluate, Trainer._save_checkpoint: on_save comes
    after `trainer_state.json` and the rotation, without a barrier after the random states of the other ranks
    """

    def __init__(self, on_fault: Literal["warn", "stop", "raise"] = "warn", **options: Any) -> None:
        require(on_fault, ("warn", "stop", "raise"))
        self.stops = on_fault == "stop"
        self.options = options | {"on_fault": "warn" if self.stops else on_fault}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse to stop one rank of several."""
        if self.stops:
            stops_alone(args.world_size)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check on rank 0."""
        if not state.is_world_process_zero:
            return
        if state.is_hyper_param_search:
            log.warning("ckptlint does not check the saves of a hyperparameter search")
            return
        saved = check_saved(Path(args.output_dir, f"checkpoint-{state.global_step}"), **self.options)
        if self.stops and saved.verdict != "pass":
            control.should_training_stop = True
