from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import config_fit
from ckptlint.analysis.optimizer.inventory import Param, inventory_of, siblings
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, plural, shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import is_adapter, role

_SHOWN = 6


@rule("GEO006", "empty-chunk-list", Severity.ERROR, whole=True)
def empty_chunk_list(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor is listed, but no chunk holds any of it.

    What it checks:
        A tensor whose global shape has elements has at least one chunk with elements. A scalar needs its one chunk. No
        weight has the shape [0] where other weights of the model have elements, and none is empty in another way where
        most of the same name in other layers are not. Adapters are CFG006's, and models that the configuration
        describes CFG003's.
    Why it matters:
        The key loads as if it were there, and nothing is read.
    Usual causes:
        No rank considered itself the writer, because the main replica was elected in the wrong group. ZeRO-3 held the
        parameters in parts, and left a placeholder of shape [0] for each.
    How to fix:
        Elect the main replica in the right group, or gather the parameters, and save again.
    See:
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
    """
    stored = {role(tensor.fqn) for tensor in ckpt.sound_tensors() if tensor.tiling.live.any()}
    for tensor in ckpt.sound_tensors():
        if tensor.volume and not tensor.tiling.live.any():
            count = "its chunk list is empty" if not len(tensor.chunks) else "all its chunks are empty"
            yield Finding(
                f"no part{{of}} is stored: {count}",
                at=Location(tensor),
                hint="compare with the same tensor of another layer, which has chunks"
                if role(tensor.fqn) in stored
                else "check which rank is elected to write it (replica_id): none was",
            )
    if empty := _without_elements(ckpt):
        keys = [param.tensor.fqn for param in empty]
        yield Finding(
            f"{plural(len(keys), 'weight', 'is')} empty, unlike the model's other weights: "
            f"{keys[0]} is {shape_text(empty[0].tensor.global_shape)}",
            at=Location(empty[0].tensor),
            identity=tuple(keys[1:]),
            keys=tuple(keys[1:]),
            kind="empty",
            notes=(("weights", first_names(fold_names(keys), _SHOWN)),),
            hint="gather the parameters before the save (deepspeed.zero.GatheredParameters): ZeRO-3 leaves such "
            "placeholders",
        )


def _without_elements(ckpt: Checkpoint) -> list[Param]:
    """Weights without any element that a model with other non-empty weights needs."""
    if not isinstance(config_fit(ckpt), str):
        return []
    params = [
        param for param in inventory_of(ckpt).params if param.tensor.dtype in FLOATS and not is_adapter(param.key)
    ]
    weights = {param for param in params if param.key.path.rpartition(".")[2] == "weight"}
    if not any(param.tensor.volume and len(param.own_shape) > 1 for param in weights):
        return []
    empty = {param for param in weights if param.tensor.global_shape == (0,)}
    for alike in siblings(weights).values():
        none = [param for param in alike if not param.tensor.volume]
        empty.update(none if 2 * len(none) < len(alike) else ())
    return [param for param in params if param in empty]
