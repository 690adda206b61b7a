from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from ckptlint.analysis.optimizer.inventory import OptimizerState, inventory_of
from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, PayloadTable, RecordContent, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.text import plural
from ckptlint.model.tiling import IntArray
from ckptlint.rule import Finding, Location, Severity, require, rule
from ckptlint.vocabulary.keys import MOMENTS, Key, parse
from ckptlint.vocabulary.schemes import quantised_weight

_HARMLESS = ("mask", "min_val", "max_val", "amax")
_BUFFERS = ("inv_freq", "freqs", "rotary", "running_", "position_ids", "_buffer", "observer", "amax", "scale_inv")
_WEIGHTS = ("weight", "bias", "scale")
_SHOWN = 3
_NEXT_STEP = "the next step of the optimizer writes them into the weights"
_NEWEST_WITHOUT = (
    "`ckptlint latest RUN --depth data` names the newest step without them; the loss after that step shows whether the "
    "run diverged"
)


@rule("PAY011", "non-finite-values", Severity.ERROR, depth=Depth.DATA)
def non_finite_values(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor holds NaN or infinity.

    What it checks:
        Every value of every floating tensor, fp8 included, is finite. It is an error for what is named weight, bias or
        scale, has a known function or is trained by an optimizer, and a warning for other tensors of the model. In a
        moment or a master copy of the shape of its parameter, in the file of an optimizer beside the model too, NaN is
        an error and infinity a warning; info where a weight holds NaN as well. It is only info for other optimizer
        state, whose padding may be uninitialised memory, for buffers, and for other scalars (`best = inf`). Running
        statistics of batch norms count as moments. Masks, tensors that hold only 0 and -Inf, and views with gaps
        between their elements are left out.
    Why it matters:
        The next forward pass spreads them over the whole model.
    Usual causes:
        The run diverged, a race while tensors were staged to the host, a lost memory page.
    How to fix:
        Go back to a step without them.
    See:
        torch.isfinite
    """
    payload = require(ckpt.payload)
    bad = payload.nan + payload.plus_inf + payload.minus_inf > 0
    bad_rows: list[tuple[Tensor, IntArray]] = []
    for tensor in ckpt.tensors.values() if bad.any() else ():
        rows = np.flatnonzero(tensor.chunks.record >= 0)
        rows = rows[bad[tensor.chunks.record[rows]]]
        if len(rows) and not _is_mask(payload, tensor):
            bad_rows.append((tensor, rows))
    with_nan = {tensor.fqn for tensor, rows in bad_rows if payload.nan[tensor.chunks.record[rows]].any()}
    yield from (_finding(ckpt, payload, tensor, rows, with_nan) for tensor, rows in bad_rows)
    yield from _file_findings(payload, bool(with_nan & {param.tensor.fqn for param in inventory_of(ckpt).params}))


def _file_findings(payload: PayloadTable, model_has_nan: bool) -> Iterator[Finding]:
    """One finding for each file of an optimizer and each state in it that holds NaN or infinity."""
    odd = (item for item in payload.odd_values if item.nan + item.plus_inf + item.minus_inf)  # others are OPT010's
    groups = grouped(((item.file, item.state), item) for item in odd)
    for (file, state), items in groups.items():
        nan, infinite = sum(item.nan for item in items), sum(item.plus_inf + item.minus_inf for item in items)
        counts = " and ".join(f"{count:,} {name}" for count, name in ((nan, "NaN"), (infinite, "Inf")) if count)
        first, more = items[0].param, f" and {plural(len(items) - 1, 'more parameter')}" if len(items) > 1 else ""
        yield Finding(
            f"{counts} in {state} of parameter {first}{more}",
            at=Location(file=file),
            identity=(state,),
            severity=_state_severity(nan > 0, model_has_nan) if state in MOMENTS else Severity.INFO,
            why=_NEXT_STEP if state in MOMENTS else "",
            hint=_NEWEST_WITHOUT,
            group=f"{file} {state}",
        )


def _state_severity(is_nan: bool, weight_has_nan: bool) -> Severity:
    """The severity of NaN or infinity in a moment or master copy with one element per element of its parameter."""
    # NaN spreads into the weight at the next step. An infinite second moment only stops the updates of its elements.
    # If the weight holds NaN already, the weight's own finding is enough.
    return Severity.INFO if weight_has_nan else Severity.ERROR if is_nan else Severity.WARNING


def _is_mask(payload: PayloadTable, tensor: Tensor) -> bool:
    if tensor.fqn.rpartition(".")[2].endswith(_HARMLESS):
        return True
    records = tensor.chunks.record[tensor.chunks.record >= 0]
    return bool((payload.masks | ~payload.scanned)[records].all())


def _finding(
    ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor, rows: IntArray, with_nan: Collection[str]
) -> Finding:
    records = tensor.chunks.record[rows]
    record, key = int(records[0]), parse(tensor.fqn)
    box = tensor.tiling.box(int(rows[0]))
    chunk = f"chunk {box}" if box.sizes else "the value"
    where = chunk if len(rows) == 1 else f"{len(rows):,} of {len(tensor.chunks):,} chunks"
    content = payload.of(record)
    index = None if content is None else _index(content, int(payload.first[record]))
    at = "" if not index else f", the first at {[o + i for o, i in zip(box.offsets, index, strict=True)]}"
    texts = (f"{ckpt.chunk_file(tensor, int(r))}: {_counts(payload, np.array([n]))} in {tensor.tiling.box(int(r))}"
             for r, n in zip(rows[:_SHOWN], records, strict=False))  # fmt: skip
    more = f", and {plural(len(rows) - _SHOWN, 'more chunk')}" if len(rows) > _SHOWN else ""
    is_whole = int((payload.nan + payload.plus_inf + payload.minus_inf)[records].sum()) == tensor.volume
    file, start, length = ckpt.byte_range_of(record)
    return Finding(
        f"{_counts(payload, records)} in {where}{{of}}{at}",
        at=Location(tensor, region=box, rows=tuple(rows[:16].tolist()), file=file, byte_range=(start, length)),
        severity=_severity(ckpt, tensor, key, with_nan),
        why=_NEXT_STEP if key.kind == "optimizer" else "",
        notes=(("chunks", "; ".join(texts) + more),),
        hint="check the source weights with --depth data, then export the model again"
        if ckpt.is_export or quantised_weight(tensor.fqn)
        else _NEWEST_WITHOUT,
        group=f"{key.kind} {'no value left' if is_whole else key.role or key.path.rpartition('.')[2]}",
    )


@fact
def _moments(ckpt: Checkpoint) -> dict[str, OptimizerState]:
    """Key -> state, for moments and master copies, which have one element per element of their parameter."""
    return {state.tensor.fqn: state for state in inventory_of(ckpt).states if state.what in MOMENTS}


def _severity(ckpt: Checkpoint, tensor: Tensor, key: Key, with_nan: Collection[str]) -> Severity:
    # Not every infinity is a fault: the best loss so far starts as one, and the padding of a flat state is memory that
    # nobody initialised. It is an error only where the name, the function or an optimizer shows a weight.
    if quantised_weight(tensor.fqn):
        return Severity.ERROR
    if key.kind == "optimizer":
        state = _moments(ckpt).get(tensor.fqn)
        param = state.param.tensor if state is not None and state.param is not None else None
        if param is not None and param.global_shape == tensor.global_shape:
            return _state_severity(tensor.fqn in with_nan, param.fqn in with_nan)
    if key.kind == "model" and tensor.fqn.endswith(("running_mean", "running_var")):  # evaluations use them
        return _state_severity(tensor.fqn in with_nan, weight_has_nan=False)
    if key.kind != "model" or any(name in tensor.fqn for name in _BUFFERS):
        return Severity.INFO
    if tensor.fqn.endswith(_WEIGHTS) or (key.function != "other" and tensor.global_shape):
        return Severity.ERROR
    if any(param.tensor is tensor for state in inventory_of(ckpt).states for param in state.params):
        return Severity.ERROR
    return Severity.WARNING if tensor.global_shape else Severity.INFO


def _counts(payload: PayloadTable, records: IntArray) -> str:
    columns = ((payload.nan, "NaN"), (payload.plus_inf, "+Inf"), (payload.minus_inf, "-Inf"))
    counted = ((int(column[records].sum()), name) for column, name in columns)
    return " and ".join(f"{count:,} {name}" for count, name in counted if count)


def _index(content: RecordContent, position: int) -> tuple[int, ...]:
    """The index in the tensor of the element at `position` of its storage; the tensor must have no gaps."""
    rest = position - content.offset
    index = [0] * len(content.shape)
    for axis in sorted(range(len(index)), key=lambda axis: -content.strides[axis]):
        if content.shape[axis] > 1 and content.strides[axis]:
            index[axis], rest = divmod(rest, content.strides[axis])
    return tuple(index)
