"""GEO005: an exact fraction that is covered names the lost mesh axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.model import Checkpoint, Tensor
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.mesh import axes_of_size

_FEW = 5
_MOST = 0.8


@rule("GEO005", "coverage-fraction-hint", Severity.INFO, whole=True)
def coverage_fraction_hint(ckpt: Checkpoint) -> Iterator[Finding]:
    """Tensors with holes are covered by exactly 1/k, and k is the size of a mesh axis.

    What it checks:
        Where GEO004 fires: whether the covered share is exactly 1/k, with k the size of a known parallel axis, or the
        same k for most of five or more tensors with holes.
    Why it matters:
        An exact fraction says which mesh axis the placement lost.
    Usual causes:
        A placement or mesh without that axis; only one rank of the axis was taken for a writer.
    How to fix:
        Add the axis to the placement, and save again.
    """
    coverages = [(tensor, tensor.layout.coverage) for tensor in ckpt.sound_tensors() if tensor.layout.live.any()]
    holed = [tensor for tensor, coverage in coverages if coverage.missing_volume and coverage.exact]
    by_factor: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in holed:
        covered = tensor.volume - tensor.layout.coverage.missing_volume
        if covered and tensor.volume % covered == 0:
            by_factor[tensor.volume // covered].append(tensor)
    for factor, tensors in sorted(by_factor.items()):
        axes = axes_of_size(ckpt.topology, factor)
        if not axes and (len(holed) < _FEW or len(tensors) < _MOST * len(holed)):
            continue
        named = f"the size of {' and '.join(axes)}" if axes else f"the same in {len(tensors)} of {len(holed)} tensors"
        keys = ", ".join(tensor.fqn for tensor in tensors[:4]) + (", ..." if len(tensors) > 4 else "")
        yield Finding(
            f"exactly 1/{factor} of {len(tensors)} tensors with holes is stored, and {factor} is {named}",
            at=Location(label=f"{ckpt.metadata_file}: {keys}"),
            missing=(f"1/{factor}", *(tensor.fqn for tensor in tensors)),
            hint=f"look for a placement that lost the {' or '.join(axes) or f'mesh axis of size {factor}'}",
        )
