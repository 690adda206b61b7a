from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.chunks.missing import absent_ranks
from ckptlint.analysis.layers.experts import owners_note
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.geometry.writers import ranks_of_chunks
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import named_ranks, numbered
from ckptlint.model.tiling import distinct
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("EXP003", "expert-axis-coverage", Severity.INFO, whole=True)
def expert_axis_coverage(ckpt: Checkpoint) -> Iterator[Finding]:
    """A hole in stacked expert weights is exactly a run of whole experts.

    What it checks:
        Where GEO004 finds a hole: whether every missing region is a run of whole experts.
    Why it matters:
        This points to a lost expert-parallel rank.
    Usual causes:
        replica_id lacks the tensor- or expert-parallel rank, or expert-parallel ranks claimed the same experts.
    How to fix:
        Put the rank into replica_id, or give each rank its own offset on the expert axis, and save again.
    See:
        megatron.core.transformer.moe.experts.GroupedMLP.sharded_state_dict
    """
    stacked = [param for param in inventory_of(ckpt).params if param.expert_axis is not None]
    if not stacked:
        raise NotApplicable("no experts are stacked on an axis")
    for param in stacked:
        if experts := _missing_experts(param):
            axis = param.expert_axis or 0
            total = param.tensor.global_shape[axis]
            absences = [absent_ranks(ckpt, param.tensor, region) for region in param.tensor.tiling.coverage.missing]
            ranks = tuple(sorted({rank for absent in absences if absent for rank in absent.ranks}))
            owners = owners_note(ckpt, experts, total)
            writers = _too_many_writers(ckpt, param.tensor, total, len(experts)) if owners else ()
            yield Finding(
                f"the hole{{of}} is exactly {numbered('expert', experts)} of {total}",
                at=Location(param.tensor, ranks=writers or ranks),
                identity=tuple(map(str, sorted(experts))),
                kind="written twice" if writers else "",
                notes=owners,
                hint="compare replica_id and the expert offsets of "
                + (named_ranks(ranks) + " with the other ranks'" * (len(ranks) == 1) if ranks else "all ranks"),
            )


def _too_many_writers(ckpt: Checkpoint, tensor: Tensor, total: int, missing: int) -> tuple[int, ...]:
    """The ranks whose files hold the other experts, where more ranks wrote these than own them."""
    world = ckpt.topology.get("world")
    ranks = distinct(ranks_of_chunks(ckpt, tensor)[tensor.chunks.record >= 0])
    if world is None or world.source == "files" or len(ranks) < 2 or ranks[0] < 0:
        return ()
    return tuple(ranks.tolist()) if len(ranks) * total > world.size * (total - missing) else ()


def _missing_experts(param: Param) -> set[int]:
    """The experts that are missing whole, when nothing else is missing; the layer axis aside."""
    coverage = param.tensor.tiling.coverage
    if not coverage.missing or not coverage.exact or param.expert_axis is None:
        return set()
    shape = param.tensor.global_shape
    experts: set[int] = set()
    for region in coverage.missing:
        if any(region.sizes[axis] != shape[axis] for axis in param.own_axes):
            return set()
        start = region.offsets[param.expert_axis]
        experts.update(range(start, start + region.sizes[param.expert_axis]))
    return experts
