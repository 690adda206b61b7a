from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptlint.analysis.inventory import Param, inventory_of, is_weight, moments_of, siblings
from ckptlint.depth import Depth
from ckptlint.geometry.chunk_graph import rank_of
from ckptlint.model import Checkpoint, PayloadTable
from ckptlint.model.text import at_most, join_words, plural
from ckptlint.model.tiling import BoolArray, Box, IntArray, distinct
from ckptlint.rule import Finding, Location, Severity, require, rule
from ckptlint.seals.verify import compare_with_seal, misfit
from ckptlint.vocabulary.config_fields import declares_pruning
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.keys import NEVER_ZERO, is_adapter, is_token_table

_BY_DESIGN = ("mask", "scale", "rotary", "rope", "freq", "zero", "buffer")
_LEAST_ELEMENTS = 64
_TOKENS = 128
_HALF_PAGE = 2048  # bytes: a page of 4 KiB that was lost may lie across two weights
_WITNESSES = 3
_FEW_ZEROS = 0.001  # share of the values, of weights that are not pruned
_MORE = 16  # times the share of zeros in any other
_MOST_TORN = 2  # weights that one lost stretch of a file runs through
_NAMES = 3  # of weights, in a model that holds one value everywhere
_FROM_ZERO = ("q", "output")  # what muP starts with zeros in
_BY_NAME = ("norm", "pos", "adapt")  # in names: what is set to one value by its name, positions, adapters
_SHOWN = 3
_WHOLE = "every weight in this file is zeros"
_HINT = "copy the file again from where it was written, or compare the values with those of an earlier step"


_Layer = tuple[tuple[str, ...], str, int | None]
"""Scope, block and number of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A weight of one layer and expert, or of the few experts that are stored in one chunk.

    Attributes:
        rows: its chunks.
        value: the magnitude of all its values where there is only one, -1 where there are several.
    """

    param: Param
    rows: IntArray
    value: float


@rule("PAY015", "constant-weight", Severity.ERROR, depth=Depth.DATA)
def constant_weight(ckpt: Checkpoint) -> Iterator[Finding]:
    """A weight, or a whole shard of one, holds one repeated value, such as 0, unlike other weights.

    What it checks:
        No weight matrix is all zeros, or one value, while at least as many of the same name in other layers or experts
        are not; and no chunk is all zeros while the tensor's others are not, unless most weights like it have zeros
        there too. No weight holds as many zeros as fill half a page (2 KiB) while three or more of the same name have
        next to none. No query, key, value or first MLP projection, embedding of tokens or head holds one value in all
        layers while most matrices vary, and no output projection one but 0; queries and heads of zeros are judged if a
        norm or a moment shows training. Biases, norms, adapters, masks, scales, fewer than 64 elements and padding rows
        are left out. It is an error if all weight matrices, of three names or more, hold one value, and a warning for a
        whole weight outside of a file of zeros, for pages, and for rows of a table. It is info if it may be meant:
        iteration 0, declared pruning, no moments or moments of zeros, more than half of the weights constant, more than
        two weights with pages of zeros, only the output projections of a layer, an unusual part of the first or last
        layer, or under 128 rows of a table.
    Why it matters:
        The layer, expert or shard does nothing after a load, and no checksum shows it: the record is whole.
    Usual causes:
        Somebody uploaded zeros, pages of the file never reached the disk, a rank saved before it had loaded its
        weights, or a parameter left the meta device and was never initialised.
    How to fix:
        Go back to a step where the weight has values, or copy the file again.
    See:
        torch.nn.Module.to_empty
    """
    payload = require(ckpt.payload)
    is_read = payload.scanned.copy()
    is_read[[damage.record for damage in payload.damages if damage.record >= 0]] = False  # PAY012 reports it
    different = {} if misfit(ckpt) else compare_with_seal(ckpt).different  # LIV302 reports it
    weights = [param for param in inventory_of(ckpt).params if _is_judged(param) and param.tensor.fqn not in different]
    is_odd = is_read & (payload.one_value | (payload.zeros >= _HALF_PAGE // 8))
    if not any(is_odd[_records(param, _live(param))].any() for param in weights):
        return
    groups = [
        [part for param in members for part in _parts(payload, is_read, param)]
        for members in siblings(weights).values()
    ]
    every = [part for parts in groups for part in parts]
    if (
        len(groups) >= _NAMES
        and len(every) >= len(weights)
        and {part.value for part in every} == {max(every[0].value, 0)}
    ):
        yield _all_alike(ckpt, payload, every)
        return
    yield from _unlike_all_others(ckpt, payload, groups)
    dead = _files_of_zeros(ckpt, payload, is_read, weights)
    added = _added_layers(groups)
    for parts in groups:
        yield from _constant(ckpt, payload, parts, added, dead)
        yield from _zero_chunks(ckpt, payload, is_read, parts, dead)
    torn = [item for parts in groups for item in _with_pages(payload, is_read, parts)]
    for part, zeros, usual in torn:
        yield _page(ckpt, payload, part, zeros, usual, len(torn))


def _is_judged(param: Param) -> bool:
    shape, name = param.own_shape, param.tensor.fqn
    is_large = is_weight(param) and min(shape) > 1 and shape[0] * shape[1] >= _LEAST_ELEMENTS
    return is_large and not is_adapter(param.key) and not any(word in name for word in _BY_DESIGN)


def _live(param: Param) -> IntArray:
    return np.flatnonzero(param.tensor.tiling.live & (param.tensor.chunks.record >= 0))


def _records(param: Param, rows: IntArray) -> IntArray:
    return param.tensor.chunks.record[rows]


def _is_zero(payload: PayloadTable, is_read: BoolArray, param: Param, rows: IntArray) -> BoolArray:
    """Which of the chunks hold zeros alone."""
    records = _records(param, rows)
    return np.asarray((payload.most[records] == 0) & payload.one_value[records] & is_read[records])


def _parts(payload: PayloadTable, is_read: BoolArray, param: Param) -> Iterator[_Part]:
    """The parts of a parameter of which enough was read to tell whether they hold one value."""
    rows, layout = _live(param), param.tensor.tiling
    stacked = [axis for axis in (param.layer_axis, param.expert_axis) if axis is not None]
    order = rows[np.lexsort((rows, *(layout.offsets[rows, axis] for axis in stacked)))]
    cuts = np.flatnonzero((layout.offsets[order[1:]] != layout.offsets[order[:-1]])[:, stacked].any(axis=1)) + 1
    for part in np.split(order, cuts) if len(order) else ():
        records = _records(param, part)
        read = records[is_read[records]]
        magnitudes = payload.most[read]
        if not payload.one_value[read].all() or (magnitudes != magnitudes[:1]).any():
            yield _Part(param, part, -1.0)
        elif len(read) == len(part):
            yield _Part(param, part, float(magnitudes[0]))


def _files_of_zeros(
    ckpt: Checkpoint, payload: PayloadTable, is_read: BoolArray, weights: Sequence[Param]
) -> frozenset[int]:
    """The files in which the chunks of several kinds of weights lie and all are zeros, though others are not."""
    alive: set[int] = set()
    roles: dict[int, set[str]] = defaultdict(set)
    for param in weights:
        rows = _live(param)
        zero = _is_zero(payload, is_read, param, rows)
        files = ckpt.records.file[_records(param, rows)]
        alive.update(distinct(files[~zero]).tolist())
        for file in distinct(files[zero]).tolist():
            roles[file].add(param.key.role)
    return frozenset(file for file, names in roles.items() if len(names) > 1 and file not in alive)


# ---------------------------------------------------------------- whole weights


def _constant(
    ckpt: Checkpoint,
    payload: PayloadTable,
    parts: Sequence[_Part],
    added: frozenset[_Layer],
    dead: frozenset[int],
) -> Iterator[Finding]:
    """Weights that are one value, each judged beside the same weight of other layers."""
    odd, usual = [part for part in parts if part.value >= 0], [part for part in parts if part.value < 0]
    if not odd or not usual:
        return
    numbers = [part.param.key.layer for part in parts if part.param.key.layer is not None]
    ends = {min(numbers), max(numbers)} if numbers else set()
    records = np.concatenate([_records(part.param, part.rows) for part in usual])
    records = records[payload.scanned[records]]
    span = f"{payload.least[records].min():.3g} to {payload.most[records].max():.3g}"
    zeros = int(payload.zeros[records].sum())
    holds = f"{plural(len(usual), 'weight')} of this name: magnitudes from {span}, {plural(zeros, 'zero')}"
    for part in odd:
        tensor, box = part.param.tensor, _span(part)
        where = "" if box.volume == tensor.volume else f" in {box}"
        whole = _WHOLE if not part.value and _files(ckpt, part.param, part.rows) <= dead else ""
        what = "0" if not part.value else f"the same, {part.value:.3g} in magnitude"
        doubt = _doubt(ckpt, payload, parts, part, part.rows)
        if not doubt and _layer(part) in added:
            doubt = "only the two output projections of this layer are zeros: an added layer starts like this"
        if not doubt and len(odd) > len(usual):
            doubt = f"{len(odd)} of {len(parts)} weights of this name hold one value"
        if not doubt and part.param.key.function == "other" and part.param.key.layer in ends:
            doubt = "the first and the last layer may have parts that nothing uses or changes"
        yield _finding(
            ckpt,
            part.param,
            part.rows,
            f"every value{where}{{of}} is {what}; other weights of this name hold several values",
            box,
            (("others", holds), ("file", whole), ("doubt", doubt)),
        )


def _all_alike(ckpt: Checkpoint, payload: PayloadTable, parts: Sequence[_Part]) -> Finding:
    """The finding where every weight matrix of a model holds one and the same value."""
    first = parts[0]
    what = "0" if not first.value else f"the same, {first.value:.3g} in magnitude"
    message = f"every value{{of}} is {what}, as in all {len(parts):,} weight matrices"
    doubt = _doubt(ckpt, payload, parts, first, first.rows)
    whole = "no model starts with one value everywhere, and no training leads to it"
    return _finding(ckpt, first.param, first.rows, message, _span(first), (("file", whole), ("doubt", doubt)))


def _unlike_all_others(ckpt: Checkpoint, payload: PayloadTable, groups: Sequence[Sequence[_Part]]) -> Iterator[Finding]:
    """Weights that hold one value in every layer, where no model starts with it and the other matrices vary."""
    every = [part for parts in groups for part in parts]
    varying = sum(part.value < 0 for part in every)
    tables = {part.param.own_shape[0] for part in every if is_token_table(part.param.key)}
    constant = [parts for parts in groups if parts and all(part.value >= 0 for part in parts)]
    sides = Counter(side for part in every for side in {*part.param.own_shape})
    constant = [parts for parts in constant if _is_never_so(parts[0], tables, sides.most_common(1)[0][0])]
    is_most = sum(map(len, constant)) > varying
    for parts in constant if varying else ():
        first, function = parts[0], parts[0].param.key.function
        if function in _FROM_ZERO and not first.value and not _is_trained(ckpt, payload):
            continue
        doubt = _doubt(ckpt, payload, every, first, first.rows) or ("so are most of the weights" if is_most else "")
        what = "0" if not first.value else f"the same, {first.value:.3g} in magnitude"
        also = f", and so in all {len(parts)} weights of this name" if len(parts) > 1 else ""
        message = f"every value{{of}} is {what}{also}; {plural(varying, 'other weight')} of the model vary"
        notes = (("others", "no model starts with one value here"), ("file", ""), ("doubt", doubt))
        finding = _finding(ckpt, first.param, first.rows, message, _span(first), notes)
        yield replace(finding, inferred_from="the other weights of the model")


def _is_never_so(part: _Part, tables: set[int], hidden: int) -> bool:
    """Whether no model starts with one value in a weight.

    Args:
        tables: rows of the embeddings of tokens, which a head of a language model has too.
        hidden: the size that most matrices share; from fewer features into it leads an adapter, which starts as zeros.
    """
    key, (rows, columns) = part.param.key, part.param.own_shape
    is_plain = key.in_experts or key.path.rpartition(".")[2].rstrip("0123456789") == "weight"
    if not is_plain or any(word in key.path for word in _BY_NAME):
        return False
    if key.function == "mlp_in" and rows == hidden > columns:
        return False
    if is_token_table(key):
        return True
    if key.function in ("embedding", "output"):
        return not key.block and rows in tables
    return key.function in NEVER_ZERO or (part.value > 0 and key.function in ("attn_out", "mlp_out"))


def _is_trained(ckpt: Checkpoint, payload: PayloadTable) -> bool:
    """Whether some norm holds several values, or some moment another than 0."""
    inventory = inventory_of(ckpt)
    norms = [param.tensor for param in inventory.params if param.key.function == "norm"]
    moments = [state.tensor for states in moments_of(ckpt).values() for state in states]
    return any(
        bool((payload.scanned & ~payload.one_value)[tensor.chunks.record[tensor.chunks.record >= 0]].any())
        for tensor in (*norms, *moments)
    )


def _layer(part: _Part) -> _Layer:
    return part.param.key.scope, part.param.key.block, part.param.key.layer


def _added_layers(groups: Sequence[Sequence[_Part]]) -> frozenset[_Layer]:
    """The layers in which just the projections back into the residual stream, all of them, are zeros."""
    constant: dict[_Layer, set[str]] = defaultdict(set)
    moving: dict[_Layer, set[str]] = defaultdict(set)
    for part in (part for parts in groups for part in parts):
        (moving if part.value else constant)[_layer(part)].add(part.param.key.function)
    outputs = {"attn_out", "mlp_out"}
    return frozenset(layer for layer, found in constant.items() if found == outputs and not outputs & moving[layer])


def _span(part: _Part) -> Box:
    """The box around all chunks of a part."""
    layout = part.param.tensor.tiling
    low = layout.offsets[part.rows].min(axis=0)
    high = (layout.offsets + layout.sizes)[part.rows].max(axis=0)
    return Box(tuple(low.tolist()), tuple((high - low).tolist()))


def _doubt(ckpt: Checkpoint, payload: PayloadTable, parts: Sequence[_Part], part: _Part, rows: IntArray) -> str:
    """Why the values may be what they should be: those of an initialisation with zeros; "" where nothing says so."""
    if ckpt.common_value("iteration") == 0:
        return "nothing was trained yet: iteration 0"
    if declares_pruning(ckpt.config.values if ckpt.config else {}):
        return "the configuration says that weights are pruned"
    moments = moments_of(ckpt)
    if part.param.tensor.fqn not in moments:
        others = any(other.param.tensor.fqn in moments for other in parts)
        return "it has no optimizer state, unlike the others: it may not be trained" if others else ""
    boxes = {part.param.tensor.tiling.box(row) for row in rows.tolist()}
    for state in moments[part.param.tensor.fqn]:
        layout, records = state.tensor.tiling, state.tensor.chunks.record
        seen = [r for row, r in enumerate(records.tolist()) if r >= 0 and layout.box(row) in boxes]
        if not seen or not (payload.scanned[seen] & (payload.most[seen] == 0)).all():
            return ""
    return "its moments are zeros too: it may not be trained"


# ---------------------------------------------------------------- single chunks


def _zero_chunks(
    ckpt: Checkpoint, payload: PayloadTable, is_read: BoolArray, parts: Sequence[_Part], dead: frozenset[int]
) -> Iterator[Finding]:
    """Chunks of zeros in weights that hold other values too."""
    mixed = [(part, _is_zero(payload, is_read, part.param, part.rows)) for part in parts if part.value < 0]
    if not any(zero.any() for _, zero in mixed):
        return
    holds: Counter[Box] = Counter()
    empty: Counter[Box] = Counter()
    zeros = {}
    for part, zero in mixed:
        boxes = [_own_box(part.param, row) for row in part.rows.tolist()]
        holds.update(boxes)
        empty.update(boxes[i] for i in np.flatnonzero(zero).tolist())
        zeros[part] = {int(part.rows[i]): boxes[i] for i in np.flatnonzero(zero).tolist()}
    for part, found in zeros.items():
        files = ckpt.records.file[part.param.tensor.chunks.record]
        rows = [
            row
            for row, box in found.items()
            if (2 * empty[box] <= holds[box] or holds[box] == 1 or int(files[row]) in dead)
            and box.volume >= _LEAST_ELEMENTS
            and min(box.sizes) > 1
        ]
        if rows and not part.param.key.block:
            rows = _without_padding(part.param, rows, found)
        if rows:
            yield _chunks(ckpt, payload, parts, part, np.array(rows), dead)


def _own_box(param: Param, row: int) -> Box:
    """The place of a chunk in the weight of one layer or expert."""
    layout, axes = param.tensor.tiling, list(param.own_axes)
    return Box(tuple(layout.offsets[row, axes].tolist()), tuple(layout.sizes[row, axes].tolist()))


def _without_padding(param: Param, rows: Sequence[int], zeros: dict[int, Box]) -> list[int]:
    """The rows of a table's chunks that do not lie at its end: a vocabulary is padded with rows of zeros."""
    layout = param.tensor.tiling
    live = np.flatnonzero(layout.live)
    others = live[~np.isin(live, list(zeros))]
    end = int((layout.offsets + layout.sizes)[others, 0].max())
    return [row for row in rows if int(layout.offsets[row, 0]) < end]


def _chunks(
    ckpt: Checkpoint,
    payload: PayloadTable,
    parts: Sequence[_Part],
    part: _Part,
    rows: IntArray,
    dead: frozenset[int],
) -> Finding:
    """The finding on chunks that are one value in a tensor that is not."""
    layout = part.param.tensor.tiling
    box = layout.box(int(rows[0]))
    where = f"chunk {box}{{of}} holds" if len(rows) == 1 else f"{len(rows):,} chunks{{of}}, the first {box}, hold"
    whole = _WHOLE if _files(ckpt, part.param, rows) <= dead else ""
    doubt = "" if whole else _doubt(ckpt, payload, parts, part, rows)
    if not doubt and not part.param.key.block and int(layout.sizes[rows, 0].sum()) < _TOKENS:
        doubt = "these few rows may belong to tokens that never occurred"
    ranks = {rank_of(ckpt.chunk_file(part.param.tensor, int(row))) for row in rows}
    others = len(part.rows) - len(rows)
    message = f"{where} only zeros, unlike its {plural(others, 'other chunk')}"
    finding = _finding(ckpt, part.param, rows, message, box, (("file", whole), ("doubt", doubt)))
    at = replace(finding.at, ranks=tuple(sorted(rank for rank in ranks if rank is not None)))
    is_sure = not doubt and (whole or (part.param.key.block and len(parts) > 1))
    confidence = "certain" if is_sure else finding.confidence
    return replace(finding, at=at, confidence=confidence, inferred_from="the other chunks of the tensor")


# ---------------------------------------------------------------- pages


def _with_pages(payload: PayloadTable, is_read: BoolArray, parts: Sequence[_Part]) -> list[tuple[_Part, int, float]]:
    """The few weights with half a page of zeros among other values; how many, and the largest share in the others."""
    mixed = [part for part in parts if part.value < 0]
    zeros, volume = np.zeros(len(mixed), np.int64), np.zeros(len(mixed))
    for number, part in enumerate(mixed):
        records = _records(part.param, part.rows)
        zeros[number] = payload.zeros[records[is_read[records] & ~payload.one_value[records]]].sum()
        volume[number] = part.param.tensor.tiling.sizes[part.rows].prod(axis=1).sum()
    items = np.array([ITEM_BITS[part.param.tensor.dtype] for part in mixed]) // 8
    is_torn, share = zeros * items >= _HALF_PAGE, zeros / volume
    others = share[~is_torn]
    if not is_torn.any() or len(others) < max(_WITNESSES, int(is_torn.sum())):
        return []
    usual = float(others.max())
    if usual > _FEW_ZEROS or share[is_torn].min() < _MORE * usual:
        return []
    return [(mixed[number], int(zeros[number]), usual) for number in np.flatnonzero(is_torn).tolist()]


def _page(ckpt: Checkpoint, payload: PayloadTable, part: _Part, zeros: int, usual: float, count: int) -> Finding:
    box = _span(part)
    doubt = _doubt(ckpt, payload, [part], part, part.rows)
    if not doubt and count > _MOST_TORN:
        doubt = f"so do {count - 1:,} weights of other names or layers: they may be pruned"
    message = f"{zeros:,} of {box.volume:,} values{{of}} are 0; other weights of this name have next to none"
    others = f"at most {usual:.2g} of their values are 0" if usual else "none of their values is 0"
    notes = (("others", others), ("file", ""), ("doubt", doubt))
    return _finding(ckpt, part.param, part.rows, message, box, notes)


# ---------------------------------------------------------------- both


def _files(ckpt: Checkpoint, param: Param, rows: IntArray) -> set[int]:
    return {int(file) for file in ckpt.records.file[_records(param, rows)]}


def _finding(
    ckpt: Checkpoint, param: Param, rows: IntArray, message: str, box: Box, notes: tuple[tuple[str, str], ...]
) -> Finding:
    names = list(dict.fromkeys(ckpt.chunk_file(param.tensor, int(row)) for row in rows))
    record = int(param.tensor.chunks.record[rows[0]])
    file, start, length = ckpt.byte_range_of(record)
    return Finding(
        message,
        at=Location(param.tensor, region=box, rows=tuple(rows[:16].tolist()), file=file, byte_range=(start, length)),
        confidence="possible" if dict(notes)["doubt"] else "certain" if dict(notes)["file"] else "likely",
        notes=(*notes, ("files", join_words(at_most(names, _SHOWN)) if len(names) > 1 else "")),
        hint="" if dict(notes)["doubt"] else _HINT,
        inferred_from="the other weights of this name",
        group=f"{names}",
    )
