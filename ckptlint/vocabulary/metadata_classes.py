"""What the classes are called that the writers of `.metadata` pickle, from torch 1.13 on."""

from __future__ import annotations

from collections.abc import Mapping

from ckptlint.vocabulary.frameworks import world

_CHECKPOINT = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_PACKAGES = (_CHECKPOINT, f"{_OLD}.checkpoint")  # torch 1.13 wrote the second
_STORED = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_PLANNED = ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
_STORAGE_WRITERS = (*(f"{package}.filesystem" for package in _PACKAGES), *world().storage_writers)

METADATA_CLASSES: Mapping[tuple[str, str], str] = {
    **{(f"{package}.metadata", name): name for package in _PACKAGES for name in _STORED},
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): "TensorProperties",
    (f"{_OLD}.sharded_tensor.metadata", "TensorProperties"): "TensorProperties",  # torch <= 2.2
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): "StorageMeta",
    **{(module, name): name for module in _STORAGE_WRITERS for name in ("_StorageInfo", "_StoragePrefix")},
    **{(f"{_CHECKPOINT}.planner", name): name for name in _PLANNED},
    (_MCORE, "MCoreMetadata"): "Metadata",  # megatron-core 0.15 and 0.16.0rc0
    (_MCORE, "MCoreSavePlan"): "SavePlan",  # megatron-core 0.11 - 0.15
}
"""Classes of `.metadata` by module and name, and what torch calls each of them today."""

METADATA_ENUMS = {
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_OLD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.planner", "WriteItemType"),
}
"""Its enums."""
