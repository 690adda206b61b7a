"""GEO004: every element of a tensor is stored in some chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckptlint.boxes import Box
from ckptlint.graph import absent_writer_hint, mesh_note, place_of
from ckptlint.model import Checkpoint, Tensor
from ckptlint.rule import Finding, NotApplicable, Note, Severity, rule
from ckptlint.topology import attributes

_SHOWN = 3
_BUCKET = ".bucket_idx_"


@rule("GEO004", "coverage-hole", Severity.ERROR)
def coverage_hole(ckpt: Checkpoint) -> Iterator[Finding]:
    """Part of a tensor's global shape is in no chunk.

    What it checks:
        Every index of the global shape lies in at least one chunk. A warning in the buckets of Megatron-Core's
        distributed optimizer where the common state declares padding, which is not stored and not decoded here.
    Why it matters:
        A load leaves this region as it was in memory and raises nothing.
    Usual causes:
        One rank's state dict lacked the tensor, a mesh axis was lost from its placements, padding was not declared, or
        the plan of an earlier save was reused.
    How to fix:
        Repair the placements and save again from the job, or go back to a step that passes.
    See:
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
    """
    if ckpt.partial:
        raise NotApplicable(ckpt.partial)
    padded = _declares_padding(ckpt)
    for tensor in ckpt.sound_tensors():
        coverage = tensor.layout.coverage
        if not coverage.missing or not tensor.layout.live.any():
            continue
        for number, region in enumerate(coverage.missing[:_SHOWN]):
            yield Finding(
                _sentence(region, tensor.global_shape),
                fqn=tensor.fqn,
                tensor=tensor,
                region=region,
                rows=_neighbours(tensor, region),
                severity=Severity.WARNING if padded and _BUCKET in tensor.fqn else None,
                notes=_total(tensor) if number == 0 else (),
                explain=partial(_explain, ckpt, tensor, region),
                alike=place_of(tensor.layout, region),
            )


def _declares_padding(ckpt: Checkpoint) -> bool:
    """Whether the common state says that some ranges of the optimizer's buckets are padding.

    Source:
        `content_metadata` of a development branch of Megatron-Core; no release writes such a declaration yet
    """
    content = attributes(ckpt.common.values.get("content_metadata")) if ckpt.common else {}
    return any("padding" in key for key in content)


def _sentence(region: Box, shape: tuple[int, ...]) -> str:
    """Rows where the region spans all other axes, the whole box otherwise.

    >>> _sentence(Box((8, 0), (4, 8)), (16, 8)), _sentence(Box((8, 0), (4, 4)), (16, 8))
    ('rows 8:12{of} are in no chunk', '[8:12, 0:4]{of} is in no chunk')
    """
    if not shape:
        return "the only element{of} is in no chunk"
    if region.sizes[1:] != shape[1:]:
        return f"{region}{{of}} is in no chunk"
    noun = "elements" if len(shape) == 1 else "rows"
    return f"{noun} {region.offsets[0]}:{region.ends[0]}{{of}} are in no chunk"


def _total(tensor: Tensor) -> tuple[Note, ...]:
    coverage = tensor.layout.coverage
    covered = 1 - coverage.missing_volume / tensor.volume
    more = f", in {len(coverage.missing)} regions" if len(coverage.missing) > 1 else ""
    percent = f"{covered:.1%}"
    if percent in ("0.0%", "100.0%"):
        percent = "almost all" if covered > 0.5 else "almost none"
    lost = "1 element is" if coverage.missing_volume == 1 else f"{coverage.missing_volume:,} elements are"
    return (("covered", f"{percent} of the tensor; {lost} missing{more}"),)


def _neighbours(tensor: Tensor, region: Box) -> tuple[int, ...]:
    """Rows of the chunks that touch the region from outside."""
    shape = tensor.global_shape
    low = tuple(max(0, start - 1) for start in region.offsets)
    high = tuple(min(extent, stop + 1) for stop, extent in zip(region.ends, shape, strict=True))
    grown = Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))
    return tuple(tensor.layout.touching(grown)[:16])


def _explain(ckpt: Checkpoint, tensor: Tensor, region: Box) -> tuple[Note, ...]:
    return (("mesh", mesh_note(ckpt, tensor, region)), ("hint", absent_writer_hint(ckpt, tensor, region)))
