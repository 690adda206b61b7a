from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ckptlint.analysis.fit.trusted_config import MAIN_BLOCKS, flag, main_params, number, trusted, trusted_topology
from ckptlint.analysis.layers.projections import axis_factor, families, short_name
from ckptlint.analysis.optimizer.inventory import Param
from ckptlint.analysis.optimizer.records import content_metadata
from ckptlint.geometry.writers import ranks_of_chunks
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_few, plural, ranges
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.keys import module_path

_STARTS = 8


@rule("SHP006", "glu-chunk-pattern", Severity.WARNING, needs=("Megatron-Core",))
def glu_chunk_pattern(ckpt: Checkpoint) -> Iterator[Finding]:
    """A gated projection is not split into two chunks for each tensor-parallel rank.

    What it checks:
        In torch_dist every tensor-parallel rank stores its part of gate and of up, so a fused linear_fc1 has twice as
        many shards as there are ranks. The rule runs only if the job says that the projection is gated, how wide it is
        and that the halves have no keys of their own, and if linear_fc2 has one shard for each rank.
    Why it matters:
        Gate and up are interleaved: the projection loads correctly on the number of ranks that saved it, and wrongly on
        any other.
    Usual causes:
        The job took shards of FSDP2 for the halves of a gated projection, or saved a gated projection as a plain one.
    How to fix:
        Save again from the job, with sharding that knows the two halves (fsdp_dtensor, or singleton_local_shards).
    See:
        megatron.core.transformer.mlp.apply_swiglu_sharded_factory
    """
    declared, topology = trusted(ckpt), trusted_topology(ckpt)
    if not flag(declared, "gated") or content_metadata(ckpt).get("singleton_local_shards") is not False:
        raise NotApplicable("the job does not say that projections are gated and stored fused")
    hidden, ffn = number(declared, "hidden"), number(declared, "ffn")
    if hidden is None or ffn is None or "tp" not in topology:
        raise NotApplicable("the job does not state the width of its projections and its tensor-parallel size")
    tp = topology["tp"].size
    described = set(main_params(ckpt))
    for family in families(ckpt):
        first, second = family.weights.get("mlp_in", []), family.weights.get("mlp_out", [])
        if len(first) != 1 or len(second) != 1 or not described.issuperset((first[0], second[0])):
            continue
        fc1, fc2 = first[0], second[0]
        shapes = (fc1.own_shape, fc2.own_shape)
        if not _is_dense(fc1) or shapes != ((2 * ffn, hidden), (hidden, ffn)):
            continue
        if not fc1.tensor.tiling.is_grid or axis_factor(fc2.tensor, fc2.own_axes[1]) != tp:
            continue
        places = axis_factor(fc1.tensor, fc1.own_axes[0])
        # one rank that stores the whole tensor in one piece interleaves nothing
        if places != 2 * tp and not (places == tp == 1):
            yield _finding(ckpt, fc1, fc2, tp, places)


def _is_dense(param: Param) -> bool:
    key = param.key
    is_main = key.block in MAIN_BLOCKS and not key.in_experts and "shared" not in key.path
    return is_main and module_path(key)[-2:] == ("mlp", "linear_fc1") and not key.component


def _finding(ckpt: Checkpoint, fc1: Param, fc2: Param, tp: int, places: int) -> Finding:
    axis = fc1.own_axes[0]
    starts = [f"{int(start):,}" for start in fc1.tensor.tiling.intervals(axis)[: _STARTS + 1, 0]]
    source = trusted_topology(ckpt)["tp"].source
    return Finding(
        f"dim {axis}{{of}} has {plural(places, 'shard')} where gate and up need {2 * tp} = 2 x tp {tp}",
        at=Location(fc1.tensor),
        notes=(
            ("starts", first_few(starts, _STARTS)),
            ("expected", f"gate and up of {plural(tp, 'tensor-parallel rank')} (tp from {source})"),
            ("partner", f"{fc2.tensor.fqn} has {plural(tp, 'shard')} on dim {fc2.own_axes[1]}"),
        ),
        explain=partial(_writers, ckpt, fc1, axis),
        hint="load it on the number of ranks that saved it, and save it again with gate and up as separate halves",
        inferred_from=f"tp {tp} and the shards of {short_name(fc2)}",
    )


def _writers(ckpt: Checkpoint, param: Param, axis: int) -> tuple[Note, ...]:
    """A note on ranks that own two chunks half the tensor apart, as when one shard was taken for two halves."""
    tensor = param.tensor
    starts: dict[int, list[int]] = {}
    rows = np.flatnonzero(tensor.tiling.live)[:1024]
    for row, rank in zip(rows.tolist(), ranks_of_chunks(ckpt, tensor, rows).tolist(), strict=True):
        if rank >= 0:
            starts.setdefault(rank, []).append(int(tensor.tiling.offsets[row, axis]))
    half = tensor.global_shape[axis] // 2
    paired = [rank for rank, rows_of in starts.items() if len(rows_of) == 2 and max(rows_of) - min(rows_of) == half]
    if len(paired) < 2 or len(paired) < len(starts):
        return ()
    return (("writers", f"ranks {ranges(paired)} own two chunks each, {half:,} rows apart"),)
