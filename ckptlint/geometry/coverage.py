"""What lies in no chunk and what lies in two: the findings that files and running jobs share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations

from ckptlint.errors import BudgetError
from ckptlint.geometry.chunk_graph import absent_writer, absent_writer_hint, mesh_note, place_of, ranks_with_entries
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.layout import Box
from ckptlint.rule import Finding, Location, Note, Severity

_SHOWN = 3
_PAIR_LIMIT = 64
_STOPPED = "the search stopped there, the chunks are too tangled to tell all"


def overlaps(ckpt: Checkpoint) -> Iterator[Finding]:
    """Chunks of a tensor with different offsets that share elements; one finding for each tensor."""
    unsure: list[Tensor] = []
    for tensor in ckpt.sound_tensors():
        coverage = tensor.layout.coverage
        if not coverage.doubled:
            unsure += [tensor] * (not coverage.exact)
            continue
        pairs = list(_pairs(tensor))
        if not pairs:
            continue
        region, first, second = pairs[0]
        count = f"{len(pairs)}{'+' if len(pairs) >= _PAIR_LIMIT else ''} pairs" if len(pairs) > 1 else "2 chunks"
        verb = f"{count}{{of}} overlap, first in {region}" if len(pairs) > 1 else f"{count}{{of}} both hold {region}"
        yield Finding(
            verb,
            at=Location.of(tensor, region=region, rows=(first, second)),
            notes=_sizes(ckpt, tensor, first, second),
            hint=_odd_one(ckpt, tensor, first, second),
        )
    _admit(unsure, "overlaps")


def holes(ckpt: Checkpoint, padded: str | None = None) -> Iterator[Finding]:
    """Regions of a tensor in no chunk, at most three for each tensor; a tensor without any chunk is left out.

    Args:
        padded: part of the keys whose holes may be padding, which is then a warning.
    """
    unsure: list[Tensor] = []
    for tensor in ckpt.sound_tensors():
        coverage = tensor.layout.coverage
        if not coverage.missing_volume or not tensor.layout.live.any():
            unsure += [tensor] * (not coverage.exact)
            continue
        severity = Severity.WARNING if padded and padded in tensor.fqn else None
        if not coverage.missing:
            lost = coverage.missing_volume
            message = f"part{{of}} is in no chunk: at least {lost:,} element{'s' if lost > 1 else ''}"
            yield Finding(message, at=Location.of(tensor), severity=severity, notes=_total(tensor))
        for number, region in enumerate(coverage.missing[:_SHOWN]):
            owner = absent_writer(ckpt, tensor, region)
            yield Finding(
                _sentence(region, tensor.global_shape),
                at=Location.of(
                    tensor,
                    region=region,
                    rows=_neighbours(tensor, region),
                    ranks=() if owner is None else (owner,),
                ),
                kind="" if owner is None else "has other entries" if owner in ranks_with_entries(ckpt) else "no entry",
                severity=severity,
                notes=_total(tensor) if number == 0 else (),
                explain=partial(_explain, ckpt, tensor, region),
                alike=place_of(tensor.layout, region),
            )
    _admit(unsure, "holes")


def _admit(unsure: list[Tensor], what: str) -> None:
    """Say that a search was stopped before it found, or could rule out, what it looked for."""
    if unsure:
        names = ", ".join(tensor.fqn for tensor in unsure[:3]) + (", ..." if len(unsure) > 3 else "")
        raise BudgetError(f"the chunks of {names} are too tangled to tell whether there are {what}")


def _pairs(tensor: Tensor) -> Iterator[tuple[Box, int, int]]:
    """The common part and the two rows of each overlapping pair with different offsets, at most `_PAIR_LIMIT`."""
    seen: set[tuple[int, int]] = set()
    layout = tensor.layout
    whole = Box((0,) * len(layout.shape), layout.shape)
    for region in layout.coverage.doubled:
        for pair in combinations(layout.touching(region)[:_PAIR_LIMIT], 2):
            if len(seen) >= _PAIR_LIMIT:
                return
            first, second = layout.box(pair[0]), layout.box(pair[1])
            common = first.intersect(second)
            if pair not in seen and common is not None and first.offsets != second.offsets:
                seen.add(pair)
                yield common.intersect(whole) or common, *pair


def _sizes(ckpt: Checkpoint, tensor: Tensor, first: int, second: int) -> tuple[Note, ...]:
    coverage = tensor.layout.coverage
    volume = f"{coverage.doubled_volume:,} elements"
    boxes = " and ".join(
        f"{tensor.layout.box(row)} in {ckpt.chunk_file(tensor, row) or 'no file'}" for row in (first, second)
    )
    if not coverage.exact:
        return (("chunks", f"{boxes}; at least {volume} are held more than once: {_STOPPED}"),)
    return (("chunks", f"{boxes}; {volume} are held more than once"),)


def _odd_one(ckpt: Checkpoint, tensor: Tensor, *rows: int) -> str:
    """Which of the chunks differs in size from all its peers."""
    sizes = tensor.layout.sizes
    if len(sizes) < 4:
        return ""
    for row in rows:
        same = int((sizes == sizes[row]).all(axis=1).sum())
        others = {tuple(size) for i, size in enumerate(sizes.tolist()) if i != row}
        if same == 1 and len(others) == 1:
            own, peers = list(tensor.layout.box(row).sizes), list(others.pop())
            where = ckpt.chunk_file(tensor, row) or "no file"
            return f"the chunk in {where} has sizes {own}, its {len(sizes) - 1} peers {peers}"
    return ""


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
    if not coverage.exact:
        return (("covered", f"at most {percent} of the tensor; at least {lost} missing{more}: {_STOPPED}"),)
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
