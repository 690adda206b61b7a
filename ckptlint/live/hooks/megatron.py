"""Hook into Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptlint.live.api import checked_options
from ckptlint.live.hooks.dcp import Undo, check_save, patch
from ckptlint.model.text import texts

MEGATRON_UNEQUAL = ("*param_groups*", "*rerun_state_machine*")
"""Keys of Megatron's common state that differ between pipeline stages by design."""


def patch_mcore(**options: Any) -> Undo:
    """From now on check before every `megatron.core.dist_checkpointing.save`; see `live.check`.

    Megatron-LM and Megatron-Bridge call it as an attribute of the module, which this replaces. It checks the state as
    the trainer passes it: with all replicas, and with factories built once more for the check. Of the common state,
    which only rank 0 saves, `UNEQUAL` below is not compared.

    Raises:
        ImportError: megatron-core is not installed.

    Source: megatron-core 0.16 megatron.core.dist_checkpointing.serialization.save
    """
    from megatron.core import dist_checkpointing

    options = checked_options(options)
    options["ignore"] = (*MEGATRON_UNEQUAL, *texts(options.get("ignore", ())))

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(sharded_state_dict: Mapping[Any, Any], checkpoint_dir: Any, *args: Any, **arguments: Any) -> Any:
            check_save(sharded_state_dict, checkpoint_dir, resolve_stateful=False, **options)
            return original(sharded_state_dict, checkpoint_dir, *args, **arguments)

        return save

    return patch(dist_checkpointing, "save", checked)
