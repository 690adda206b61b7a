from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ckptlint.analysis.optimizer.inventory import inventory_of, siblings
from ckptlint.geometry.writers import saved_by
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import parse

_SHARE = 80
_MEMBERS = 5


@rule("SHP007", "writer-count-outlier", Severity.INFO, whole=True)
def writer_count_outlier(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor is a single chunk, but its siblings in other layers are sharded.

    What it checks:
        A parameter or optimizer state with one chunk does not stand among at least five siblings, and four fifths of
        its role, with several. Tensors smaller than the siblings' smallest chunk are left out: writers do not split
        them.
    Why it matters:
        The tensor may have bypassed the sharding of its siblings, and then holds only one rank's part.
    Usual causes:
        A plain tensor among sharded ones, an expert or layer that somebody added by hand, or a gathered copy.
    How to fix:
        Compare its shape with its siblings'. If it is smaller, see EXP001 and OPT001.
    """
    inventory = inventory_of(ckpt)
    groups: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for name, params in siblings(inventory.params).items():
        groups[name] += [param.tensor for param in params]
    for state in inventory.states:
        groups[state.chain, state.scope, state.what, parse(state.path).role] += [state.tensor]
    for tensors in groups.values():
        yield from _outliers(ckpt, tensors)


def _outliers(ckpt: Checkpoint, tensors: list[Tensor]) -> Iterator[Finding]:
    """Findings on large tensors in one chunk, if most tensors of their role are split."""
    if len(tensors) <= _MEMBERS:
        return
    counts = [int(tensor.tiling.live.sum()) for tensor in tensors]
    cut = [(tensor, count) for tensor, count in zip(tensors, counts, strict=True) if count > 1]
    if len(cut) < _MEMBERS or 100 * len(cut) < _SHARE * len(tensors):
        return
    least = min(-(-tensor.volume // count) for tensor, count in cut)
    (usual, shape), members = Counter((count, tensor.global_shape) for tensor, count in cut).most_common(1)[0]
    for tensor, count in zip(tensors, counts, strict=True):
        if count != 1 or tensor.volume < max(least, 2):
            continue
        row = int(tensor.tiling.live.argmax())
        yield Finding(
            f"tensor{{of}} is 1 chunk, but {len(cut)} of {len(tensors)} of its role have several",
            at=Location(tensor, ranks=saved_by(ckpt, tensor, [row])),
            notes=(
                ("chunks", f"{shape_text(tensor.global_shape)} in 1, {shape_text(shape)} in {usual} ({members}x)"),
                ("written in", ckpt.chunk_file(tensor, row) or "no file"),
            ),
            hint="compare how the job wraps this tensor and its siblings",
            inferred_from=f"{len(cut)} other tensors of this role",
        )
