"""What a chunk holds of the step before where it does not continue it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from ckptlint.model import ChangeTable, Origin, Tensor
from ckptlint.model.payload import OriginKind
from ckptlint.model.tiling import Box, IntArray, distinct
from ckptlint.numerics.chunks import Floats
from ckptlint.numerics.draw import Elements, drawn_places

_CHUNKS, _READS = 64, 4_096  # chunks that are looked at, and parts of the step before that they are compared with
_ELEMENTS = 1_024  # of a chunk that are compared
_SCATTERED = 256  # of these, where each may cost a read
LEAST_ELEMENTS = 64  # whose likeness counts
_LIKE, _SAME = 0.9, 0.95  # likeness to another part, and to itself
_WHOLE, _LINE, _LINES = 65_536, 16, 2_048  # elements of a chunk whose rows are compared, of a row at least, and rows
_SCALE = 1.1  # numbers this much larger, or smaller, are scaled


def origins_of(now: Elements, was: Elements, table: ChangeTable, rows: IntArray) -> dict[int, Origin]:
    """Row of the table -> what its chunk holds, for some of the rows: at equal distances, not of tiny chunks.

    Raises:
        AccessError: a read was refused.
    """
    rows = rows[table.drawn[rows] >= LEAST_ELEMENTS]
    if len(rows) > _CHUNKS:
        rows = rows[np.linspace(0, len(rows) - 1, _CHUNKS).astype(np.int64)]
    return {row: _origin(now, was, table, row, _READS // len(rows)) for row in rows.tolist()}


def _origin(now: Elements, was: Elements, table: ChangeTable, row: int, most: int) -> Origin:
    """The candidate that a chunk is by far the most like; unknown where none is."""
    follow, chunk = int(table.follow[row]), int(table.chunk[row])
    tensor = now.ckpt.tensors[table.follows[follow].key]
    older, box = was.ckpt.tensors[tensor.fqn], tensor.tiling.box(chunk)
    at = drawn_places(box.volume, _ELEMENTS)
    here, before = now.read(tensor, tensor, chunk, at), was.read(older, tensor, chunk, at)
    if here is None or before is None:
        return Origin()
    itself = abs(_likeness(here, before))
    if itself > _SAME:
        scale = float(np.dot(here, before) / np.dot(before, before))
        return Origin("scaled", scale=scale) if not 1 / _SCALE < scale < _SCALE else Origin()
    hits = [(itself, Origin())]
    for origin in islice(_candidates(table, now, follow, chunk), most):
        if origin.kind == "other tensor":
            there = was.read(was.ckpt.tensors[origin.key], tensor, chunk, at)
        else:
            there = was.read(older, tensor, origin.chunk, at)
        hits += [(_likeness(here, there), origin)] if there is not None else []
    if len(box.sizes) == 2 and len(set(tensor.global_shape)) == 1:
        there = _transposed(was, older, box, at[:_SCATTERED])
        hits += [(_likeness(here[:_SCATTERED], there), Origin("transposed"))] if there is not None else []
    (best, origin), (second, _) = sorted([*hits, (0.0, Origin())], key=lambda hit: hit[0], reverse=True)[:2]
    if best > _LIKE and 1 - best < (1 - second) / 2:
        return origin
    return Origin(_reordered(now, was, (tensor, older), chunk))


def _candidates(table: ChangeTable, now: Elements, follow: int, chunk: int) -> Iterator[Origin]:
    """Other chunks of a tensor, and other tensors of its shape and kind, the nearest first."""
    key, is_weight = table.follows[follow].key, table.follows[follow].kind == "weight"
    tensor = now.ckpt.tensors[key]
    kin = [i for i, known in enumerate(table.follows) if i != follow and (known.kind == "weight") == is_weight]
    alike = [i for i in kin if now.ckpt.tensors[table.follows[i].key].global_shape == tensor.global_shape]
    tiling = tensor.tiling
    chunks = np.flatnonzero(tiling.live & (tiling.sizes == tiling.sizes[chunk]).all(axis=1)).tolist()
    tensors = (Origin("other tensor", table.follows[i].key) for i in sorted(alike, key=lambda i: abs(i - follow)))
    inside = (Origin("other chunk", chunk=i) for i in sorted(chunks, key=lambda i: abs(i - chunk)) if i != chunk)
    return chain(islice(inside, _READS // _CHUNKS // 2), tensors)


def _transposed(was: Elements, older: Tensor, box: Box, at: IntArray) -> Floats | None:
    """float64 [k], the elements of a square matrix with row and column exchanged."""
    places = np.stack(np.unravel_index(at, box.sizes), axis=1) + np.array(box.offsets, np.int64)
    order = np.lexsort(places.T)
    numbers = was.read_places(older, places[order][:, ::-1])
    if numbers is None:
        return None
    there = np.empty(len(at), np.float64)
    there[order] = numbers
    return there


def _likeness(first: Floats, second: Floats) -> float:
    """The correlation of numbers; of their logarithms where none is negative, as second moments are of many sizes."""
    used = np.isfinite(first) & np.isfinite(second)
    if first.min() >= 0 and second.min() >= 0:
        used &= (first > 0) & (second > 0)
        first, second = (
            np.log(first, where=used, out=np.zeros(len(first))),
            np.log(second, where=used, out=np.zeros(len(first))),
        )
    if used.sum() < LEAST_ELEMENTS:
        return 0.0
    first, second = (numbers[used] - numbers[used].mean() for numbers in (first, second))
    size = float(np.sqrt(np.dot(first, first) * np.dot(second, second)))
    return float(np.dot(first, second)) / size if size > 0 else 0.0


def _reordered(now: Elements, was: Elements, tensors: tuple[Tensor, Tensor], chunk: int) -> OriginKind:
    """Whether a chunk has its rows, or its columns, in another order: each is like another one, and no two like one."""
    tensor, older = tensors
    box = tensor.tiling.box(chunk)
    if len(box.sizes) < 2 or box.volume > _WHOLE:
        return "unknown"
    at = np.arange(box.volume)
    here, before = now.read(tensor, tensor, chunk, at), was.read(older, tensor, chunk, at)
    if here is None or before is None:
        return "unknown"
    shape = box.sizes[0], -1
    if _is_shuffled(here.reshape(shape), before.reshape(shape)):
        return "rows"
    is_matrix = len(box.sizes) == 2
    return "columns" if is_matrix and _is_shuffled(here.reshape(shape).T, before.reshape(shape).T) else "unknown"


def _is_shuffled(now: Floats, was: Floats) -> bool:
    if not 2 <= len(now) <= _LINES or now.shape[1] < _LINE or not (np.isfinite(now).all() and np.isfinite(was).all()):
        return False
    with np.errstate(invalid="ignore", divide="ignore"):
        lines = [matrix - matrix.mean(axis=1, keepdims=True) for matrix in (now, was)]
        now, was = (centred / np.linalg.norm(centred, axis=1, keepdims=True) for centred in lines)
    likeness = np.nan_to_num(now @ was.T)
    nearest = likeness.argmax(axis=1)
    is_like = likeness.max(axis=1) > _LIKE
    return bool(is_like.all() and len(distinct(nearest)) == len(nearest) and (nearest != np.arange(len(nearest))).any())
