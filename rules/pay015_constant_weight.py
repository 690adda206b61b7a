from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptlint.analysis.optimizer.inventory import Param, inventory_of, is_weight, moments_of, siblings
from ckptlint.depth import Depth
from ckptlint.geometry.writers import saved_by
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
_MORE = 16  # a torn weight has this many times the share of zeros of any other
_MOST_TORN = 2  # weights that one lost stretch of a file runs through
_NAMES = 3  # least names of weights for the finding that a whole model holds one value
_FROM_ZERO = ("q", "output")  # functions that muP initialises with zeros
_BY_NAME = ("norm", "pos", "adapt")  # names of modules that start with one value: norms, positions, adapters
_SHOWN = 3
_WHOLE = "every weight in this file is zeros"
_HINT = "copy the file again from where it was written, or compare the values with those of an earlier step"


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A weight of one layer and expert, or of the few experts that share a chunk."""

    param: Param
    rows: IntArray  # of its chunks in the tensor
    value: float  # the magnitude of all its values if there is only one, else -1

    @property
    def records(self) -> IntArray:
        return self.param.tensor.chunks.record[self.rows]


@rule("PAY015", "constant-weight", Severity.ERROR, depth=Depth.DATA, yields_to=("RUN007",))
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
        Pages of the file never reached the disk, a rank saved before it had loaded its weights, or a parameter left
        the meta device and was never initialised.
    How to fix:
        Go back to a step where the weight has values, or copy the file again.
    See:
        torch.nn.Module.to_empty
    """
    payload = require(ckpt.payload)
    is_read = payload.scanned.copy()
    is_read[[damage.record for damage in payload.damages if damage.record >= 0]] = False  # PAY012 reports it
    different = {} if misfit(ckpt) else compare_with_seal(ckpt).different  # LIV302 reports it
    judged = [param for param in inventory_of(ckpt).params if _is_judged(param) and param.tensor.fqn not in different]
    is_odd = is_read & (payload.one_value | (payload.zeros >= _HALF_PAGE // 8))
    if not any(is_odd[param.tensor.chunks.record[_live_rows(param)]].any() for param in judged):
        return
    groups = [
        [weight for param in members for weight in _weights_of(payload, is_read, param)]
        for members in siblings(judged).values()
    ]
    all_weights = [weight for peers in groups for weight in peers]
    if (
        len(groups) >= _NAMES
        and len(all_weights) >= len(judged)
        and {weight.value for weight in all_weights} == {max(all_weights[0].value, 0)}
    ):
        yield _constant_model(ckpt, all_weights)
        return
    yield from _constant_names(ckpt, groups)
    is_zero = is_read & payload.one_value & (payload.most == 0)
    dead = _files_of_zeros(ckpt, is_zero, judged)
    added = _added_layers(groups)
    for peers in groups:
        yield from _constant_weights(ckpt, peers, added, dead)
        yield from _zero_chunks(ckpt, is_zero, peers, dead)
    torn = [item for peers in groups for item in _with_pages(payload, is_read, peers)]
    for weight, zeros, usual in torn:
        yield _page_finding(ckpt, weight, zeros, usual, len(torn))


def _is_judged(param: Param) -> bool:
    shape, name = param.own_shape, param.tensor.fqn
    is_large = is_weight(param) and min(shape) > 1 and shape[0] * shape[1] >= _LEAST_ELEMENTS
    return is_large and not is_adapter(param.key) and not any(word in name for word in _BY_DESIGN)


def _live_rows(param: Param) -> IntArray:
    return np.flatnonzero(param.tensor.tiling.live & (param.tensor.chunks.record >= 0))


def _weights_of(payload: PayloadTable, is_read: BoolArray, param: Param) -> Iterator[_Weight]:
    """The weights of single layers and experts in a parameter, without those of which too little was read."""
    rows, tiling = _live_rows(param), param.tensor.tiling
    stacked = [axis for axis in (param.layer_axis, param.expert_axis) if axis is not None]
    order = rows[np.lexsort((rows, *(tiling.offsets[rows, axis] for axis in stacked)))]
    cuts = np.flatnonzero((tiling.offsets[order[1:]] != tiling.offsets[order[:-1]])[:, stacked].any(axis=1)) + 1
    for weight_rows in np.split(order, cuts) if len(order) else ():
        records = param.tensor.chunks.record[weight_rows]
        read = records[is_read[records]]
        magnitudes = payload.most[read]
        # Two values in what was read settle it; that all are one value is known only if every chunk was read.
        if not payload.one_value[read].all() or (magnitudes != magnitudes[:1]).any():
            yield _Weight(param, weight_rows, -1.0)
        elif len(read) == len(weight_rows):
            yield _Weight(param, weight_rows, float(magnitudes[0]))


def _files_of_zeros(ckpt: Checkpoint, is_zero: BoolArray, params: Sequence[Param]) -> frozenset[int]:
    """Numbers of the files with weights of at least two roles that hold only zeros."""
    # Weights of several roles do not become zero together: the bytes of the file were lost, or its rank never loaded.
    alive: set[int] = set()
    roles: dict[int, set[str]] = defaultdict(set)
    for param in params:
        records = param.tensor.chunks.record[_live_rows(param)]
        files, zero = ckpt.records.file[records], is_zero[records]
        alive.update(distinct(files[~zero]).tolist())
        for file in distinct(files[zero]).tolist():
            roles[file].add(param.key.role)
    return frozenset(file for file, names in roles.items() if len(names) > 1 and file not in alive)


# ---------------------------------------------------------------- whole weights


def _constant_weights(
    ckpt: Checkpoint, peers: Sequence[_Weight], added: frozenset[tuple[object, ...]], dead: frozenset[int]
) -> Iterator[Finding]:
    """Findings on weights with one value, whose peers in other layers or experts hold several."""
    odd, usual = [weight for weight in peers if weight.value >= 0], [weight for weight in peers if weight.value < 0]
    if not odd or not usual:
        return
    payload = require(ckpt.payload)
    numbers = [weight.param.key.layer for weight in peers if weight.param.key.layer is not None]
    ends = {min(numbers), max(numbers)} if numbers else set()
    records = np.concatenate([weight.records for weight in usual])
    records = records[payload.scanned[records]]
    span = f"{payload.least[records].min():.3g} to {payload.most[records].max():.3g}"
    zeros = int(payload.zeros[records].sum())
    holds = f"{plural(len(usual), 'weight')} of this name: magnitudes from {span}, {plural(zeros, 'zero')}"
    for weight in odd:
        box = _box_around(weight)
        where = "" if box.volume == weight.param.tensor.volume else f" in {box}"
        file_note = _WHOLE if not weight.value and dead.issuperset(ckpt.records.file[weight.records].tolist()) else ""
        what = "0" if not weight.value else f"the same, {weight.value:.3g} in magnitude"
        doubt = _doubt(ckpt, peers, weight)
        if not doubt and _layer(weight) in added:
            doubt = "only the two output projections of this layer are zeros: an added layer starts like this"
        if not doubt and len(odd) > len(usual):
            doubt = f"{len(odd)} of {len(peers)} weights of this name hold one value"
        if not doubt and weight.param.key.function == "other" and weight.param.key.layer in ends:
            doubt = "the first and the last layer may have parts that nothing uses or changes"
        message = f"every value{where}{{of}} is {what}; other weights of this name hold several values"
        yield _finding(ckpt, weight, message, doubt, others=holds, file_note=file_note)


def _constant_model(ckpt: Checkpoint, peers: Sequence[_Weight]) -> Finding:
    first = peers[0]
    what = "0" if not first.value else f"one value, {first.value:.3g} in magnitude"
    message = f"all {len(peers):,} weight matrices are {what}: convert or save the model again"
    file_note = "no model starts with one value everywhere, and no training leads to it"
    finding = _finding(ckpt, first, message, _doubt(ckpt, peers, first), file_note=file_note)
    return replace(finding, why="the model computes nothing, and no checksum shows it: the records are whole")


def _constant_names(ckpt: Checkpoint, groups: Sequence[Sequence[_Weight]]) -> Iterator[Finding]:
    """Findings on weights that hold one value in every layer, although no model starts so and other matrices vary."""
    all_weights = [weight for peers in groups for weight in peers]
    varying = sum(weight.value < 0 for weight in all_weights)
    tables = {weight.param.own_shape[0] for weight in all_weights if is_token_table(weight.param.key)}
    constant = [peers for peers in groups if peers and all(weight.value >= 0 for weight in peers)]
    sides = Counter(side for weight in all_weights for side in {*weight.param.own_shape})
    constant = [peers for peers in constant if _must_vary(peers[0], tables, sides.most_common(1)[0][0])]
    is_most = sum(map(len, constant)) > varying
    for peers in constant if varying else ():
        first, function = peers[0], peers[0].param.key.function
        # muP starts queries and heads with zeros, so zeros there count only after training.
        if function in _FROM_ZERO and not first.value and not _is_trained(ckpt):
            continue
        doubt = _doubt(ckpt, all_weights, first) or "so are most of the weights" * is_most
        what = "0" if not first.value else f"the same, {first.value:.3g} in magnitude"
        also = f", and so in all {len(peers)} weights of this name" if len(peers) > 1 else ""
        message = f"every value{{of}} is {what}{also}; {plural(varying, 'other weight')} of the model vary"
        finding = _finding(ckpt, first, message, doubt, others="no model starts with one value here")
        yield replace(finding, inferred_from="the other weights of the model")


def _must_vary(weight: _Weight, tables: set[int], hidden: int) -> bool:
    """Whether no initialisation gives this weight one value; the head of a text model is as long as its `tables`."""
    key, (rows, columns) = weight.param.key, weight.param.own_shape
    is_plain = key.in_experts or key.path.rpartition(".")[2].rstrip("0123456789") == "weight"
    if not is_plain or any(word in key.path for word in _BY_NAME):
        return False
    # A projection into the size that most matrices share from fewer features is an adapter, which starts as zeros.
    if key.function == "mlp_in" and rows == hidden > columns:
        return False
    if is_token_table(key):
        return True
    if key.function in ("embedding", "output"):
        return not key.block and rows in tables
    return key.function in NEVER_ZERO or (weight.value > 0 and key.function in ("attn_out", "mlp_out"))


def _is_trained(ckpt: Checkpoint) -> bool:
    """Whether some norm or some moment holds more than one value."""
    payload = require(ckpt.payload)
    norms = [param.tensor for param in inventory_of(ckpt).params if param.key.function == "norm"]
    moments = [state.tensor for states in moments_of(ckpt).values() for state in states]
    return any(
        bool((payload.scanned & ~payload.one_value)[tensor.chunks.record[tensor.chunks.record >= 0]].any())
        for tensor in (*norms, *moments)
    )


def _layer(weight: _Weight) -> tuple[object, ...]:
    return weight.param.key.scope, weight.param.key.block, weight.param.key.layer


def _added_layers(groups: Sequence[Sequence[_Weight]]) -> frozenset[tuple[object, ...]]:
    """The layers whose output projections, and only these, are zeros."""
    # Methods that deepen a trained model insert layers so: they add nothing to the residual stream at first.
    zero: dict[tuple[object, ...], set[str]] = defaultdict(set)
    nonzero: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for weight in (weight for peers in groups for weight in peers):
        (nonzero if weight.value else zero)[_layer(weight)].add(weight.param.key.function)
    outputs = {"attn_out", "mlp_out"}
    return frozenset(
        layer for layer, functions in zero.items() if functions == outputs and not outputs & nonzero[layer]
    )


def _box_around(weight: _Weight) -> Box:
    tiling = weight.param.tensor.tiling
    low = tiling.offsets[weight.rows].min(axis=0)
    high = (tiling.offsets + tiling.sizes)[weight.rows].max(axis=0)
    return Box(tuple(low.tolist()), tuple((high - low).tolist()))


def _doubt(ckpt: Checkpoint, peers: Sequence[_Weight], weight: _Weight) -> str:
    """Why one value may be right here, such as an untrained weight; "" without such a reason."""
    if ckpt.common_value("iteration") == 0:
        return "nothing was trained yet: iteration 0"
    if declares_pruning(ckpt.config.values if ckpt.config else {}):
        return "the configuration says that weights are pruned"
    payload, moments = require(ckpt.payload), moments_of(ckpt)
    if weight.param.tensor.fqn not in moments:
        others = any(peer.param.tensor.fqn in moments for peer in peers)
        return "it has no optimizer state, unlike the others: it may not be trained" if others else ""
    boxes = {weight.param.tensor.tiling.box(row) for row in weight.rows.tolist()}
    for state in moments[weight.param.tensor.fqn]:
        tiling, records = state.tensor.tiling, state.tensor.chunks.record
        same_boxes = [r for row, r in enumerate(records.tolist()) if r >= 0 and tiling.box(row) in boxes]
        if not same_boxes or not (payload.scanned[same_boxes] & (payload.most[same_boxes] == 0)).all():
            return ""
    return "its moments are zeros too: it may not be trained"


# ---------------------------------------------------------------- single chunks


def _zero_chunks(
    ckpt: Checkpoint, is_zero: BoolArray, peers: Sequence[_Weight], dead: frozenset[int]
) -> Iterator[Finding]:
    """Findings on chunks of zeros in weights that hold other values too."""
    mixed = [(weight, is_zero[weight.records]) for weight in peers if weight.value < 0]
    if not any(zero.any() for _, zero in mixed):
        return
    # Zeros at one box in most layers are how the model is built (padded heads); at one box in few layers, a lost shard.
    # A rank that never received its weights has zeros everywhere, which its file of zeros shows.
    holds: Counter[Box] = Counter()
    empty: Counter[Box] = Counter()
    zeros = {}
    for weight, zero in mixed:
        tiling, axes = weight.param.tensor.tiling, list(weight.param.own_axes)
        starts, sizes = (column[weight.rows][:, axes].tolist() for column in (tiling.offsets, tiling.sizes))
        boxes = [*map(Box, map(tuple, starts), map(tuple, sizes))]
        holds.update(boxes)
        empty.update(boxes[i] for i in np.flatnonzero(zero).tolist())
        zeros[weight] = {int(weight.rows[i]): boxes[i] for i in np.flatnonzero(zero).tolist()}
    for weight, zero_boxes in zeros.items():
        files = ckpt.records.file[weight.param.tensor.chunks.record]
        rows = [
            row
            for row, box in zero_boxes.items()
            if (2 * empty[box] <= holds[box] or holds[box] == 1 or int(files[row]) in dead)
            and box.volume >= _LEAST_ELEMENTS
            and min(box.sizes) > 1
        ]
        if rows and not weight.param.key.block:
            rows = _without_padding(weight.param, rows, zero_boxes)
        if rows:
            yield _chunk_finding(ckpt, peers, weight, np.array(rows), dead)


def _without_padding(param: Param, rows: Sequence[int], zeros: dict[int, Box]) -> list[int]:
    """The chunks of zeros that are not at the end of a table: a vocabulary is padded with rows of zeros."""
    tiling = param.tensor.tiling
    live = np.flatnonzero(tiling.live)
    others = live[~np.isin(live, list(zeros))]
    end = int((tiling.offsets + tiling.sizes)[others, 0].max())
    return [row for row in rows if int(tiling.offsets[row, 0]) < end]


def _chunk_finding(
    ckpt: Checkpoint, peers: Sequence[_Weight], weight: _Weight, rows: IntArray, dead: frozenset[int]
) -> Finding:
    chunks, tiling = replace(weight, rows=rows), weight.param.tensor.tiling
    box = tiling.box(int(rows[0]))
    where = f"chunk {box}{{of}} holds" if len(rows) == 1 else f"{len(rows):,} chunks{{of}}, the first {box}, hold"
    file_note = _WHOLE if dead.issuperset(ckpt.records.file[chunks.records].tolist()) else ""
    doubt = "" if file_note else _doubt(ckpt, peers, chunks)
    if not doubt and not weight.param.key.block and int(tiling.sizes[rows, 0].sum()) < _TOKENS:
        doubt = "these few rows may belong to tokens that never occurred"
    others = len(weight.rows) - len(rows)
    message = f"{where} only zeros, unlike its {plural(others, 'other chunk')}"
    finding = _finding(ckpt, chunks, message, doubt, file_note=file_note)
    at = replace(finding.at, region=box, ranks=saved_by(ckpt, weight.param.tensor, rows))
    is_sure = not doubt and (file_note or (weight.param.key.block and len(peers) > 1))
    confidence = "certain" if is_sure else finding.confidence
    return replace(finding, at=at, confidence=confidence, inferred_from="the other chunks of the tensor")


# ---------------------------------------------------------------- pages


def _with_pages(
    payload: PayloadTable, is_read: BoolArray, peers: Sequence[_Weight]
) -> list[tuple[_Weight, int, float]]:
    """(weight, number of zeros, largest share of zeros in its peers) for weights that lost half a page or more."""
    # A lost page leaves thousands of exact zeros in one weight. Trained weights have next to none, pruned ones have
    # them everywhere: so at least as many peers, and three, must have far fewer.
    mixed = [weight for weight in peers if weight.value < 0]
    zeros, volume = np.zeros(len(mixed), np.int64), np.zeros(len(mixed))
    for number, weight in enumerate(mixed):
        records = weight.records
        zeros[number] = payload.zeros[records[is_read[records] & ~payload.one_value[records]]].sum()
        volume[number] = weight.param.tensor.tiling.sizes[weight.rows].prod(axis=1).sum()
    items = np.array([ITEM_BITS[weight.param.tensor.dtype] for weight in mixed]) // 8
    is_torn, share = zeros * items >= _HALF_PAGE, zeros / volume
    others = share[~is_torn]
    if not is_torn.any() or len(others) < max(_WITNESSES, int(is_torn.sum())):
        return []
    usual = float(others.max())
    if usual > _FEW_ZEROS or share[is_torn].min() < _MORE * usual:
        return []
    return [(mixed[number], int(zeros[number]), usual) for number in np.flatnonzero(is_torn).tolist()]


def _page_finding(ckpt: Checkpoint, weight: _Weight, zeros: int, usual: float, count: int) -> Finding:
    doubt = _doubt(ckpt, [weight], weight)
    if not doubt and count > _MOST_TORN:
        doubt = f"so do {count - 1:,} weights of other names or layers: they may be pruned"
    volume = _box_around(weight).volume
    message = f"{zeros:,} of {volume:,} values{{of}} are 0; other weights of this name have next to none"
    others = f"at most {usual:.2g} of their values are 0" if usual else "none of their values is 0"
    return _finding(ckpt, weight, message, doubt, others=others)


def _finding(
    ckpt: Checkpoint, weight: _Weight, message: str, doubt: str, *, others: str = "", file_note: str = ""
) -> Finding:
    tensor, rows = weight.param.tensor, tuple(weight.rows[:16].tolist())
    names = list(dict.fromkeys(ckpt.chunk_file(tensor, int(row)) for row in weight.rows))
    file, start, length = ckpt.byte_range_of(int(weight.records[0]))
    files = join_words(at_most(names, _SHOWN)) if len(names) > 1 else ""
    return Finding(
        message,
        at=Location(tensor, region=_box_around(weight), rows=rows, file=file, byte_range=(start, length)),
        confidence="possible" if doubt else "certain" if file_note else "likely",
        notes=(("others", others), ("file", file_note), ("doubt", doubt), ("files", files)),
        hint="" if doubt else _HINT,
        inferred_from="the other weights of this name",
        group=f"{names}",
    )
