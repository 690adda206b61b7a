from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import first_few
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.mesh import axes_of_size

_FEW = 5
_MOST = 0.8


@rule("GEO005", "coverage-fraction-hint", Severity.INFO, whole=True)
def coverage_fraction_hint(ckpt: Checkpoint) -> Iterator[Finding]:
    """Exactly 1/k of the tensors with holes is stored, and k is the size of a mesh axis.

    What it checks:
        Where GEO004 fires: whether the stored share is exactly 1/k, with k the size of a known parallel axis, or the
        same k for most of five or more tensors with holes.
    Why it matters:
        The fraction shows which mesh axis the placement lost.
    Usual causes:
        The placement or mesh lacks that axis, or only one rank of the axis was elected as writer.
    How to fix:
        Add the axis to the placement, and save again.
    """
    coverages = [(tensor, tensor.tiling.coverage) for tensor in ckpt.sound_tensors() if tensor.tiling.live.any()]
    holed = [tensor for tensor, coverage in coverages if coverage.missing_volume and coverage.exact]
    by_factor: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in holed:
        covered = tensor.volume - tensor.tiling.coverage.missing_volume
        if covered and tensor.volume % covered == 0:
            by_factor[tensor.volume // covered].append(tensor)
    for factor, tensors in sorted(by_factor.items()):
        axes = axes_of_size(ckpt.topology, factor)
        if not axes and (len(holed) < _FEW or len(tensors) < _MOST * len(holed)):
            continue
        named = f"the same share in {len(tensors)} of {len(holed)} tensors with holes"
        if axes:
            named = f"and {factor} is the size of {' and '.join(axes)}"
        whose = "the tensor with a hole" if len(tensors) == 1 else f"each of {len(tensors)} tensors with holes"
        lost = f"{' or '.join(axes)} axis" if axes else f"mesh axis of size {factor}"
        keys = first_few([tensor.fqn for tensor in tensors], 4)
        yield Finding(
            f"exactly 1/{factor} of {whose} is stored, {named}",
            at=Location(label=f"{ckpt.metadata_file}: {keys}"),
            identity=(f"1/{factor}", *(tensor.fqn for tensor in tensors)),
            keys=tuple(tensor.fqn for tensor in tensors),
            hint=f"look at the placements of these tensors: one probably dropped the {lost}",
            inferred_from="the stored share and the sizes of the mesh axes" if axes else "the stored share",
        )
