"""Findings on elements in no chunk or in several, shared by the rules for files and for running jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations

from ckptlint.analysis.chunks.missing import Absent, absent_hint, absent_ranks, rank_note, ranks_with_entries
from ckptlint.analysis.chunks.two_saves import saves_hint, saves_note
from ckptlint.errors import BudgetError
from ckptlint.geometry.chunk_graph import mesh_note, place_on_mesh
from ckptlint.geometry.writers import saved_by
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import first_few, join_words, plural, shape_text, span, verb
from ckptlint.model.tiling import Box
from ckptlint.rule import Finding, Location, Note, Severity

_SHOWN = 3
_PAIR_LIMIT = 64
_STOPPED = "the search stopped there, since the chunks are too tangled to count all"


def overlaps(ckpt: Checkpoint) -> Iterator[Finding]:
    """Chunks of a tensor with different offsets that share elements; one finding for each tensor."""
    unsure: list[Tensor] = []
    for tensor in ckpt.sound_tensors():
        coverage = tensor.tiling.coverage
        if not coverage.doubled:
            unsure += [tensor] * (not coverage.exact)
            continue
        pairs = list(_pairs(tensor))
        if not pairs:
            continue
        region, first, second = pairs[0]
        message = f"2 chunks{{of}} both hold {region}"
        if len(pairs) > 1:
            count = f"{len(pairs)}{'+' if len(pairs) >= _PAIR_LIMIT else ''}"
            message = f"{count} pairs of chunks{{of}} overlap, the first in {region}"
        yield Finding(
            message,
            at=Location(tensor, region=region, rows=(first, second), ranks=saved_by(ckpt, tensor, (first, second))),
            notes=(*_sizes(ckpt, tensor, first, second), ("two saves", saves_note(ckpt))),
            hint=saves_hint(ckpt) or _odd_one(ckpt, tensor, first, second),
        )
    _admit(unsure, "overlaps")


def holes(ckpt: Checkpoint, padded: str | None = None) -> Iterator[Finding]:
    """Regions in no chunk, at most three for each tensor with any chunk; in keys with `padded` they are warnings."""
    unsure: list[Tensor] = []
    for tensor in ckpt.sound_tensors():
        coverage = tensor.tiling.coverage
        if not coverage.missing_volume or not tensor.tiling.live.any():
            unsure += [tensor] * (not coverage.exact)
            continue
        severity = Severity.WARNING if padded and padded in tensor.fqn else None
        if not coverage.missing:
            lost = coverage.missing_volume
            message = f"part{{of}} is missing: at least {plural(lost, 'element')}"
            yield Finding(message, at=Location(tensor), severity=severity, notes=_total(tensor))
        for number, region in enumerate(coverage.missing[:_SHOWN]):
            absent = absent_ranks(ckpt, tensor, region)
            ranks = absent.ranks if absent else ()
            yield Finding(
                _sentence(region, tensor.global_shape),
                at=Location(tensor, region=region, rows=_neighbours(tensor, region), ranks=ranks),
                kind=_kind(ckpt, absent),
                severity=severity,
                notes=_total(tensor) if number == 0 else (),
                explain=partial(_explain, ckpt, tensor, region),
                group=place_on_mesh(tensor.tiling, region),
            )
    _admit(unsure, "holes")


def _admit(unsure: list[Tensor], what: str) -> None:
    """Raise BudgetError if the search in some tensors stopped before it had an answer."""
    if unsure:
        names = first_few([tensor.fqn for tensor in unsure])
        raise BudgetError(f"the chunks of {names} are too tangled to tell whether there are {what}")


def _pairs(tensor: Tensor) -> Iterator[tuple[Box, int, int]]:
    """The common part and the two rows of each overlapping pair with different offsets, at most `_PAIR_LIMIT`."""
    pairs_seen: set[tuple[int, int]] = set()
    tiling = tensor.tiling
    tensor_box = Box((0,) * len(tiling.shape), tiling.shape)
    for region in tiling.coverage.doubled:
        for pair in combinations(tiling.touching(region)[:_PAIR_LIMIT], 2):
            if len(pairs_seen) >= _PAIR_LIMIT:
                return
            first, second = tiling.box(pair[0]), tiling.box(pair[1])
            common = first.intersect(second)
            if pair not in pairs_seen and common is not None and first.offsets != second.offsets:
                pairs_seen.add(pair)
                yield common.intersect(tensor_box) or common, *pair


def _sizes(ckpt: Checkpoint, tensor: Tensor, first: int, second: int) -> tuple[Note, ...]:
    coverage = tensor.tiling.coverage
    stored = f"{plural(coverage.doubled_volume, 'element', 'is')} stored more than once"
    boxes = " and ".join(
        f"{tensor.tiling.box(row)} in {ckpt.chunk_file(tensor, row) or 'no file'}" for row in (first, second)
    )
    return (("chunks", f"{boxes}; {stored}" if coverage.exact else f"{boxes}; at least {stored}: {_STOPPED}"),)


def _odd_one(ckpt: Checkpoint, tensor: Tensor, *rows: int) -> str:
    """Hint on whose chunk to inspect: the only one of its size, or else both of the overlapping chunks."""
    sizes = tensor.tiling.sizes
    for row in rows if len(sizes) >= 4 else ():
        same = int((sizes == sizes[row]).all(axis=1).sum())
        others = {tuple(size) for i, size in enumerate(sizes.tolist()) if i != row}
        if same == 1 and len(others) == 1:
            size, usual = shape_text(sizes[row].tolist()), shape_text(others.pop())
            where = ckpt.chunk_file(tensor, row) or "no file"
            return f"look at who wrote {where}: its chunk has sizes {size}, the {len(sizes) - 1} other chunks {usual}"
    files = list(dict.fromkeys(name for row in rows if (name := ckpt.chunk_file(tensor, row))))
    return f"compare the offsets of this key on the ranks that wrote {join_words(files)}" if files else ""


def _sentence(region: Box, shape: tuple[int, ...]) -> str:
    """Rows where the region spans all other axes, the whole box otherwise.

    >>> _sentence(Box((8, 0), (4, 8)), (16, 8)), _sentence(Box((8, 0), (4, 4)), (16, 8))
    ('rows 8-11{of} are missing', '[8:12, 0:4]{of} is missing')
    """
    if not shape:
        return "the only element{of} is missing"
    if region.sizes[1:] != shape[1:]:
        return f"{region}{{of}} is missing"
    rows = ("element" if len(shape) == 1 else "row") + "s" * (region.sizes[0] > 1)
    return f"{rows} {span(region.offsets[0], region.ends[0])}{{of}} {verb(region.sizes[0], 'is')} missing"


def _total(tensor: Tensor) -> tuple[Note, ...]:
    coverage = tensor.tiling.coverage
    covered = 1 - coverage.missing_volume / tensor.volume
    more = f", in {len(coverage.missing)} regions" if len(coverage.missing) > 1 else ""
    percent = f"{covered:.1%}"
    if percent in ("0.0%", "100.0%"):
        percent = "almost all" if covered > 0.5 else "almost none"
    lost = plural(coverage.missing_volume, "element", "is")
    if not coverage.exact:
        return (("covered", f"at most {percent} of the tensor; at least {lost} missing{more}: {_STOPPED}"),)
    return (("covered", f"{percent} of the tensor; {lost} missing{more}"),)


def _kind(ckpt: Checkpoint, absent: Absent | None) -> str:
    """Text on what the rank of a missing part saved instead; "" where no single rank is known."""
    if absent is None or len(absent.ranks) != 1:
        return ""
    if absent.instead:
        return "part of another"
    return "has other entries" if absent.ranks[0] in ranks_with_entries(ckpt) else "no entry"


def _neighbours(tensor: Tensor, region: Box) -> tuple[int, ...]:
    """Rows of the chunks that touch the region from outside."""
    low = tuple(max(0, start - 1) for start in region.offsets)
    sides = zip(low, region.ends, tensor.global_shape, strict=True)
    grown = Box(low, tuple(min(extent, stop + 1) - start for start, stop, extent in sides))
    return tuple(tensor.tiling.touching(grown)[:16])


def _explain(ckpt: Checkpoint, tensor: Tensor, region: Box) -> tuple[Note, ...]:
    absent = absent_ranks(ckpt, tensor, region)
    mesh, hint = mesh_note(ckpt, tensor, region), absent_hint(ckpt, tensor, region)
    return ("mesh", mesh), ("rank", rank_note(absent)), ("hint", hint)
