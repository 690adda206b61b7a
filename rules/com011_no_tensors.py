"""COM011: a file of weights holds weights."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("COM011", "no-tensors", Severity.ERROR, whole=True)
def no_tensors(ckpt: Checkpoint) -> Iterator[Finding]:
    """The files of a model or an adapter, safetensors or of torch.save, hold no tensor.

    What it checks:
        The files of a model together name at least one tensor. One rank's shard may be empty. A DCP
        checkpoint without tensors is none of its business: jobs save states that hold objects alone.
    Why it matters:
        The file loads without an error, and the model keeps what it was initialised with.
    Usual causes:
        An adapter saved from parameters that ZeRO-3 or FSDP had sharded away, a filter of keys that matched none.
    How to fix:
        Gather the parameters before the save, and save again.
    See:
        peft.utils.save_and_load.get_peft_model_state_dict
    """
    if not ckpt.is_export:
        raise NotApplicable("no files of weights")
    if not ckpt.tensors:
        file = ckpt.metadata_file
        yield Finding(f"{file} holds no tensors", at=Location(file=file), missing=("tensors",))
