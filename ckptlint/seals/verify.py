"""The payload of a checkpoint against its seal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptlint.model import Checkpoint, RecordState, Seal, SealEntry, Tensor
from ckptlint.seals.digests import ALGORITHM
from ckptlint.seals.file import SEAL


class SealComparison(NamedTuple):
    """What a seal says of the payload."""

    equal: int  # tensors that hold what was sealed
    different: dict[str, int]  # key -> the digest of what its tensor holds, where it is another one
    unknown: dict[str, list[str]]  # reason -> the keys that could not be compared for it


def misfit(ckpt: Checkpoint) -> str:
    """Why the seal is not about this checkpoint, or ""."""
    return misfit_of(ckpt.seal, ckpt.metadata_hash)


def misfit_of(seal: Seal | None, metadata: str) -> str:
    """Why a seal is not about the checkpoint whose metadata has this hash, or ""."""
    if seal is None:
        return f"there is no {SEAL}"
    if seal.algorithm != ALGORITHM:
        return f"{seal.algorithm!r} made its digests, but this version knows only {ALGORITHM!r}"
    belongs, this = (
        f"a .metadata with the BLAKE2b {name[:12]}..." if name else "a checkpoint without .metadata"
        for name in (seal.metadata, metadata)
    )
    return "" if seal.metadata == metadata else f"it belongs to {belongs}, but this is {this}"


def sealed_tensors(ckpt: Checkpoint) -> Iterator[Tensor]:
    """The tensors whose digest can tell whether they hold what was sealed, once all their records are read."""
    for fqn, entry in ckpt.seal.entries.items() if ckpt.seal else ():
        if (tensor := ckpt.tensors.get(fqn)) is not None and not _obstacle(tensor, entry):
            yield tensor


def compare_with_seal(ckpt: Checkpoint) -> SealComparison:
    """The payload against a seal that fits; nothing is equal for want of a look."""
    seal, payload = ckpt.seal, ckpt.payload
    equal, different = 0, {}
    unknown: dict[str, list[str]] = {}
    assert seal is not None and payload is not None
    for fqn, entry in seal.entries.items():
        tensor = ckpt.tensors.get(fqn)
        reason = "not stored here" if tensor is None else _obstacle(tensor, entry)
        if tensor is not None and not reason:
            records = tensor.chunks.record[tensor.tiling.live]
            if not payload.digested[records].all():
                is_left_out = (payload.state[records] == RecordState.UNSAMPLED).any()
                unread = "the records were not read, or hold no plain tensor of the chunk's dtype and shape"
                reason = "left out by --sample" if is_left_out else unread
            elif (digest := int(payload.digest[records].sum())) != entry.digest:
                different[fqn] = digest
            else:
                equal += 1
        if reason:
            unknown.setdefault(reason, []).append(fqn)
    for fqn, why in seal.skipped.items():
        unknown.setdefault(f"not sealed by the job ({why})", []).append(fqn)
    if others := [fqn for fqn in ckpt.tensors if fqn not in seal.entries and fqn not in seal.skipped]:
        unknown["not in the seal"] = others
    return SealComparison(equal, different, unknown)


def _obstacle(tensor: Tensor, entry: SealEntry) -> str:
    """Why a tensor cannot be compared with its entry whatever its records hold, or ""."""
    if tensor.global_shape != entry.shape:
        return "sealed with another shape"
    if tensor.dtype != entry.dtype:
        return "sealed with another dtype"
    if not tensor.is_tiled or (tensor.chunks.record[tensor.tiling.live] < 0).any():
        return "its chunks do not tile it"
    return ""
