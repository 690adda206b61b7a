"""LIV101 to LIV111: faults that a rank finds in its own state before a save.

Each rank judges its tensors in memory, where no checkpoint exists yet, and sends sentences. The rules here decide
nothing: they give the pages, the severities and one finding for equal sentences of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV101", "shard-shape-mismatch", Severity.ERROR, live=True)
def shard_shape_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's local tensor does not have the size that its placements give it.

    What it checks:
        The shape of the local tensor equals the size of the chunk that the save records for it.
    Why it matters:
        The save writes the local tensor at offsets that belong to another size. A load then puts rows in the wrong
        places.
    Usual causes:
        DTensor.from_local without shape and stride for an uneven split; code that replaced the local tensor.
    How to fix:
        Give from_local the global shape and stride, or distribute the tensor again.
    See:
        torch.distributed.tensor.DTensor.from_local
    """
    yield from reported(ckpt)


@rule("LIV102", "shard-not-a-box", Severity.ERROR, live=True)
def shard_not_a_box(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's shard is not one box of the tensor.

    What it checks:
        The rows that the placements give a rank are contiguous on every axis.
    Why it matters:
        A checkpoint stores boxes, so only the first run of rows in a strided shard gets the right offset.
    Usual causes:
        Two mesh axes split one tensor axis, and not in the order of the mesh ([Shard(0), _StridedShard(0)]).
    How to fix:
        Before the save, redistribute to placements that follow the order of the mesh.
    See:
        torch.distributed.tensor.placement_types._StridedShard
    """
    yield from reported(ckpt)


@rule("LIV103", "chunk-override-broken", Severity.ERROR, live=True)
def chunk_override_broken(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's own chunk list is missing, or contradicts its write items.

    What it checks:
        A tensor that is not split as its placements say has both `__create_chunk_list__` and `__create_write_items__`,
        and the two agree.
    Why it matters:
        With no valid list the save uses the offsets of an even split. A load then puts rows in the wrong places.
    Usual causes:
        `detach()`, `clone()`, or `to_local()` followed by `from_local`, on an uneven DTensor of Megatron-FSDP: the new
        tensor lacks the two attributes.
    How to fix:
        Save the state dict that the framework returned, or copy the two attributes to the new local tensor.
    See:
        megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor
    """
    yield from reported(ckpt)


@rule("LIV104", "override-contradicts-placement", Severity.WARNING, live=True)
def override_contradicts_placement(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's own chunk list splits an axis that no placement shards.

    What it checks:
        Where the chunk list holds less than the whole axis, some placement shards that axis.
    Why it matters:
        One of the two is wrong, and the save follows the chunk list.
    Usual causes:
        Code transposed the tensor, or changed its placements, after it had attached the chunk list.
    How to fix:
        Attach the chunk list again after the change.
    See:
        torch.distributed.checkpoint.planner_helpers._create_chunk_list
    """
    yield from reported(ckpt)


@rule("LIV105", "local-chunk-out-of-bounds", Severity.ERROR, live=True)
def local_chunk_out_of_bounds(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's chunk reaches outside the tensor.

    What it checks:
        Offsets are not negative, offsets plus sizes stay within the global shape, and all three have the same number of
        axes.
    Why it matters:
        torch refuses the save, or a load fails on this tensor.
    Usual causes:
        The code computes the global shape from other parallel sizes than the offsets.
    How to fix:
        Correct the offsets or the global shape in the sharding code.
    See:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """
    yield from reported(ckpt)


@rule("LIV106", "partial-placement", Severity.ERROR, live=True)
def partial_placement(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor of partial sums is about to be saved.

    What it checks:
        No placement is Partial.
    Why it matters:
        The save would write one rank's summand instead of the value.
    Usual causes:
        Somebody took the tensor out of a computation before its reduction.
    How to fix:
        Redistribute it to Replicate or Shard first.
    See:
        torch.distributed.tensor.placement_types.Partial
    """
    yield from reported(ckpt)


@rule("LIV107", "payload-dtype-mismatch", Severity.ERROR, live=True)
def payload_dtype_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's data has a different dtype from the one it declares.

    What it checks:
        The dtype of the local data equals that of the sharded tensor around it.
    Why it matters:
        The metadata names one dtype and the bytes have another.
    Usual causes:
        Code cast the data and kept the old ShardedTensor around it.
    How to fix:
        Build the ShardedTensor again from the cast data.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor
    """
    yield from reported(ckpt)


@rule("LIV108", "fqn-collision", Severity.ERROR, live=True)
def fqn_collision(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two values of one rank have the same key.

    What it checks:
        Joined by dots, every path through the state dict gives a key of its own.
    Why it matters:
        One of the two silently overwrites the other.
    Usual causes:
        A key contains a dot, or a mapping has a number both as text and as a number.
    How to fix:
        Rename one of them.
    See:
        torch.distributed.checkpoint._nested_dict.flatten_state_dict
    """
    yield from reported(ckpt)


@rule("LIV109", "state-not-sharded", Severity.WARNING, live=True)
def state_not_sharded(ckpt: Checkpoint) -> Iterator[Finding]:
    """The state of a sharded parameter is a plain tensor of the local size.

    What it checks:
        Where a parameter is a DTensor with several shards, its moments are DTensors too.
    Why it matters:
        Each rank saves its own slice under one key as if it were the whole. One slice survives.
    Usual causes:
        The optimizer was built from local tensors, or a library that does not know DTensor made its state.
    How to fix:
        Make the state a DTensor with the parameter's mesh and placements.
    See:
        NVIDIA TransformerEngine issue 2795
    """
    yield from reported(ckpt)


@rule("LIV110", "fragmentation-mismatch", Severity.ERROR, live=True)
def fragmentation_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A Megatron ShardedTensor does not fit the grid that it declares.

    What it checks:
        On a regular grid each offset is a multiple of the local size, and the number of fragments times the local size
        is the global size.
    Why it matters:
        The save writes chunks that overlap or leave holes.
    Usual causes:
        The code computes axis_fragmentations from other parallel sizes than the local shape.
    How to fix:
        Make the tensor with ShardedTensor.from_rank_offsets.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor
    """
    yield from reported(ckpt)


@rule("LIV111", "freed-memory", Severity.ERROR, live=True)
def freed_memory(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor has no memory any more.

    What it checks:
        The storage of each tensor has room for its elements. ckptlint does not read a tensor whose storage has not.
    Why it matters:
        A save that reads such a tensor ends the process, or writes a file that no load accepts.
    Usual causes:
        The state holds parameters themselves while FSDP1 has freed them (`untyped_storage().resize_(0)`), or a buffer
        that was moved to another place.
    How to fix:
        Save what `state_dict()` of the model returns under its state dict type, which gathers the parameters first.
    See:
        torch.distributed.fsdp._flat_param
    """
    yield from reported(ckpt)
