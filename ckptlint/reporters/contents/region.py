"""A region of one tensor: which chunks hold it, and what nobody holds (`ckptlint show PATH 'KEY[128:256, :]'`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import numpy as np

from ckptlint.errors import ConfigError
from ckptlint.geometry.record_states import NOT_CHECKED, STATES, StateArray, chunk_states
from ckptlint.geometry.writers import ranks_of_chunks
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import byte_span, first_names, human_bytes, plural, printable
from ckptlint.model.tiling import Box, Coverage, IntArray, Tiling
from ckptlint.patterns import lazy_pattern
from ckptlint.reporters.style import aligned, cut
from ckptlint.vocabulary.dtypes import nbytes

_SLICED = lazy_pattern(r"(.+)\[([-\d:,.\s]*)\]")
_ITEM = lazy_pattern(r"(-?\d{1,18})?(?:\s*(:)\s*(-?\d{1,18})?)?")
_LISTED = 32


@dataclass(frozen=True, slots=True, eq=False)
class StoredRegion:
    """Who holds a region of a tensor.

    Attributes:
        rows: int64 [n], the chunks that touch it.
        states: uint8 [n], the position of each in `record_states.STATES`.
        missing: what of it is in no chunk.
        lost: what of it is in no chunk whose bytes are there.
    """

    ckpt: Checkpoint
    tensor: Tensor
    region: Box
    rows: IntArray
    states: StateArray
    missing: Coverage
    lost: Coverage


def region_asked(checkpoints: Sequence[Checkpoint], text: str) -> list[StoredRegion]:
    """Who holds `KEY[slices]`, in each checkpoint that has the key, or ConfigError; none for no slice of a key."""
    match = _SLICED.fullmatch(text)
    names = dict.fromkeys((match[1], printable(match[1]))) if match else {}
    regions = []
    for ckpt, name in ((ckpt, name) for ckpt in checkpoints for name in names if name in ckpt.tensors):
        tensor = ckpt.tensors[name]
        if not tensor.is_sound:
            raise ConfigError(f"the chunks of {tensor.fqn} do not fit its shape: run `ckptlint {ckpt.path}`")
        region = parse_region(tensor, match[2] if match else "")
        rows = np.array(tensor.tiling.touching(region), np.int64)
        states = chunk_states(ckpt, tensor)[rows]
        missing, lost = (_left_out(tensor, region, chunk_rows) for chunk_rows in (rows, rows[states <= NOT_CHECKED]))
        regions.append(StoredRegion(ckpt, tensor, region, rows, states, missing, lost))
    return regions


def _left_out(tensor: Tensor, region: Box, rows: IntArray) -> Coverage:
    """What some chunks leave out of a region."""
    tiling = tensor.tiling
    low, high = np.array(region.offsets, np.int64), np.array(region.ends, np.int64)
    starts = np.maximum(tiling.offsets[rows], low)
    ends = np.minimum(tiling.offsets[rows] + tiling.sizes[rows], high)
    coverage = Tiling(region.sizes, starts - low, ends - starts, tiling.budget).coverage
    shifted = (Box(tuple(map(add, box.offsets, region.offsets)), box.sizes) for box in coverage.missing)
    return replace(coverage, missing=tuple(shifted))


def parse_region(tensor: Tensor, slices: str) -> Box:
    """The region that slices as Python writes them mean, a single index a slice of one; else ConfigError."""
    shape, items = tensor.global_shape, [item.strip() for item in slices.split(",")]
    if "..." in items:
        at = items.index("...")
        items[at : at + 1] = [":"] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        raise ConfigError(f"{tensor.fqn} has {plural(len(shape), 'dim')}, and [{slices}] has {len(items)}")
    spans = []
    for axis, (size, item) in enumerate(zip(shape, [*items, *[":"] * (len(shape) - len(items))], strict=True)):
        match = _ITEM.fullmatch(item.strip())
        if match is None or not (match[1] or match[2]):
            raise ConfigError(f"[{slices}] is not a slice: write [128:256, :], [-4:], [7] or [..., 0:8]")
        low, high = (int(match[i]) + size * match[i].startswith("-") if match[i] else None for i in (1, 3))
        start = low or 0
        stop = (size if high is None else high) if match[2] else start + 1
        if not 0 <= start < stop <= size:
            what = "outside" if not 0 <= start <= stop <= size or start == size else "an empty slice of"
            raise ConfigError(f"{item} is {what} dim {axis} of {tensor.fqn}, which has {plural(size, 'element')}")
        spans.append((start, stop - start))
    return Box(tuple(start for start, _ in spans), tuple(size for _, size in spans))


def as_text(stored: StoredRegion) -> Iterator[str]:
    """The chunks with file, rank, bytes and state, those that are lost first, then what nobody holds."""
    ckpt, tensor, region = stored.ckpt, stored.tensor, stored.region
    count = nbytes(tensor.dtype, region.volume)
    size = "" if count is None else f", {human_bytes(count)}"
    yield f"{tensor.fqn} {region}  {tensor.dtype}, {region.volume:,} of {plural(tensor.volume, 'element')}{size}"
    ranks = ranks_of_chunks(ckpt, tensor)
    table, order = [], np.argsort(stored.states <= NOT_CHECKED, kind="stable")[:_LISTED].tolist()
    for row, state in zip(stored.rows[order].tolist(), stored.states[order].tolist(), strict=True):
        box, record = tensor.tiling.box(row), int(tensor.chunks.record[row])
        file, start, length = ckpt.byte_range_of(record) if record >= 0 else ("stored nowhere", 0, 0)
        rank = ranks[row]
        place = [cut(file), "-" if rank < 0 else str(rank), byte_span(start, length) if record >= 0 else "-"]
        table.append([str(box.intersect(region)), str(box), *place, STATES[state]])
    if table:
        yield from aligned(["holds", "of chunk", "file", "rank", "bytes", "state"], table)
    if len(stored.rows) > _LISTED:
        yield f"and {plural(len(stored.rows) - _LISTED, 'more chunk')}; --format json has all"
    if stored.missing.missing_volume:
        yield f"nobody holds {first_names(map(str, stored.missing.missing), 4, 'region')}: {_elements(stored.missing)}"
    if stored.lost.missing_volume > stored.missing.missing_volume:
        yield f"not to be loaded: {first_names(map(str, stored.lost.missing), 4, 'region')}, {_elements(stored.lost)}"


def as_json(stored: StoredRegion) -> dict[str, Any]:
    """The same as plain values; `chunks` are positions in the `tiling` of the tensor."""
    return {
        "key": stored.tensor.fqn,
        "region": _bounds(stored.region),
        "chunks": stored.rows.tolist(),
        "missing": [*map(_bounds, stored.missing.missing)],
        "missing_elements": stored.missing.missing_volume,
        "lost": [*map(_bounds, stored.lost.missing)],
        "lost_elements": stored.lost.missing_volume,
    }


def _bounds(box: Box) -> list[tuple[int, int]]:
    return [*zip(box.offsets, box.ends, strict=True)]


def _elements(coverage: Coverage) -> str:
    return ("" if coverage.exact else "at least ") + plural(coverage.missing_volume, "element")
