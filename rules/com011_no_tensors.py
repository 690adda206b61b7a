from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("COM011", "no-tensors", Severity.ERROR, whole=True, needs=("export",))
def no_tensors(ckpt: Checkpoint) -> Iterator[Finding]:
    """A file of weights holds no tensor.

    What it checks:
        The files of a model or adapter, safetensors or of torch.save, together name at least one tensor. One rank's
        shard may be empty. DCP checkpoints are not judged, since jobs also save states that hold only objects.
    Why it matters:
        The file loads without an error, and the model keeps its initial values.
    Usual causes:
        An adapter was saved from parameters that ZeRO-3 or FSDP had sharded away, or a filter of keys matched none.
    How to fix:
        Gather the parameters before the save, and save again.
    See:
        peft.utils.save_and_load.get_peft_model_state_dict
    """
    if not ckpt.tensors:
        file = ckpt.metadata_file
        hint = "gather the parameters before the save, and save again"
        yield Finding(f"{file} holds no tensors", at=Location(file=file), identity=("tensors",), hint=hint)
