"""SHP007: a tensor is cut where its siblings are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ckptlint.analysis.inventory import inventory_of, siblings
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import parse

_SHARE = 80
_MEMBERS = 5


@rule("SHP007", "writer-count-outlier", Severity.INFO, whole=True)
def writer_count_outlier(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor is one chunk while its siblings in other layers are cut into several.

    What it checks:
        A parameter or optimizer state with one chunk has no five siblings of the same role, and four fifths of the
        role, with more than one. Tensors that are smaller than the smallest chunk of the siblings are left out, as
        writers do not cut them.
    Why it matters:
        The tensor may have bypassed the sharding of its siblings, and then holds one rank's part only.
    Usual causes:
        A plain tensor among sharded ones, an expert or layer that was added by hand, a gathered copy.
    How to fix:
        Compare its shape with its siblings'; if it is smaller, see EXP001 and OPT001.
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
    if len(tensors) <= _MEMBERS:
        return
    counts = [int(tensor.layout.live.sum()) for tensor in tensors]
    cut = [(tensor, count) for tensor, count in zip(tensors, counts, strict=True) if count > 1]
    if len(cut) < _MEMBERS or 100 * len(cut) < _SHARE * len(tensors):
        return
    least = min(-(-tensor.volume // count) for tensor, count in cut)
    (usual, shape), members = Counter((count, tensor.global_shape) for tensor, count in cut).most_common(1)[0]
    for tensor, count in zip(tensors, counts, strict=True):
        if count != 1 or tensor.volume < max(least, 2):
            continue
        row = int(tensor.layout.live.argmax())
        yield Finding(
            f"tensor{{of}} is 1 chunk where {len(cut)} of {len(tensors)} of its role are cut into several",
            at=Location.of(tensor),
            notes=(
                ("grids", f"{shape_text(tensor.global_shape)} in 1 chunk, {shape_text(shape)} in {usual} ({members}x)"),
                ("written by", ckpt.chunk_file(tensor, row) or "no file"),
            ),
            hint="compare how this tensor is wrapped with its siblings",
        )
