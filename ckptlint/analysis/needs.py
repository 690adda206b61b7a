"""Preconditions of rules on a checkpoint, with a sentence for each."""

from __future__ import annotations

from collections.abc import Callable

from ckptlint.analysis.fit.judgement import has_known_config
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.quantised import quantisation
from ckptlint.model import Checkpoint
from ckptlint.vocabulary.keys import SQUARES, state_name

NEEDS: dict[str, tuple[Callable[[Checkpoint], object], str]] = {
    "Megatron-Core": (lambda ckpt: ckpt.is_torch_dist, "this is no checkpoint of Megatron-Core's torch_dist"),
    "ShardedObjects": (lambda ckpt: ckpt.is_torch_dist and len(ckpt.objects), "there are no ShardedObjects"),
    "checksums": (
        lambda ckpt: ckpt.payload and (ckpt.payload.crc > 0).any(),
        "the records hold no checksums to compare",
    ),
    "export": (lambda ckpt: ckpt.is_export, "these are no files that a library loads a model from"),
    "offsets": (
        lambda ckpt: ckpt.locates_bytes,
        "in the safetensors serialisation no offset and length say where the bytes of a tensor lie",
    ),
    "no DeepSpeed": (
        lambda ckpt: not ckpt.format.startswith("deepspeed"),
        "DeepSpeed lists its parameters, and RNK005 compares the files with that list",
    ),
    "no model config": (lambda ckpt: not has_known_config(ckpt), "CFG001 compares every key with the configuration"),
    "no safetensors": (lambda ckpt: not ckpt.is_safetensors, "PAY013 reports what is wrong in a safetensors header"),
    "no torch file": (
        lambda ckpt: ckpt.storages is None,
        "PAY013 reports what is wrong in the storages of a torch file",
    ),
    "params": (lambda ckpt: inventory_of(ckpt).params, "no key is that of a parameter"),
    "quantised weights": (lambda ckpt: quantisation(ckpt).weights, "no weight is stored quantised"),
    "rank files": (lambda ckpt: ckpt.rank_files is not None, "no set of rank files"),
    "reference tensors": (lambda ckpt: ckpt.reference and ckpt.reference.tensors, "the reference names no tensors"),
    "moments": (
        lambda ckpt: (
            any(file.optimizer is not None for file in ckpt.step_files)
            or any(state_name(fqn) in SQUARES for fqn in ckpt.tensors)
        ),
        "no tensor holds second moments",
    ),
    "pairs": (lambda ckpt: ckpt.pairs is not None, "tensors are compared where all records are read, and not a sample"),
    "sound": (lambda ckpt: ckpt.is_sound, "some tensors cannot be judged, so it is not known what is stored"),
    "states": (lambda ckpt: inventory_of(ckpt).states, "no optimizer state names its parameter"),
    "step before": (lambda ckpt: ckpt.before, "there is no older step to compare with"),
    "whole step before": (
        lambda ckpt: ckpt.before and not ckpt.before.partial_because,
        "the metadata of the step before describes only part of its save",
    ),
}
"""Word -> whether a checkpoint has it, and what the report says of one that does not."""
