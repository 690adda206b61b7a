from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from ckptlint.analysis.optimizer.inventory import Param, inventory_of, is_weight, moments_of
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, PayloadTable
from ckptlint.model.text import plural
from ckptlint.rule import Confidence, Finding, Location, Severity, require, rule

_HINTS: dict[Confidence, str] = {
    "certain": "take these weights from another step: their moments show that they were trained apart",
    "likely": "compare with the step before: if they differ there, take them from it",
    "possible": "ignore this if the model was built so, by stacking layers or from one expert",
}

_STEPS = (1000, 10)
"""Steps that move a trained weight for certain: in 16 bits small updates are rounded off, and a warm-up begins at 0."""

_Copy = tuple[Param, Param, list[int]]
"""The weight that comes first, the one that repeats it, and the chunks that do."""


@rule("PAY020", "copied-weight", Severity.ERROR, depth=Depth.HEADERS, needs=("checksums",))
def copied_weight(ckpt: Checkpoint) -> Iterator[Finding]:
    """The weights of a layer or expert are bit for bit those of another one.

    What it checks:
        No chunk of a weight agrees in length, CRC-32 and up to 1 KiB of samples with the same chunk of that weight in
        another layer, or in another expert whose moments differ. It is an error if their moments differ after ten
        steps, a thousand in 16 bits, a warning if the step is above 0 and no optimizer is stored, else info: layers of
        a model that was stacked from a smaller one, or is frozen, may be equal, and where each layer has a copy they
        share their weights. Layers that share their moments share the weight. Only matrices of 64 elements or more are
        judged, and no constants or rows that are all alike.
    Why it matters:
        The layer does the work of another one, and what it had learned is gone.
    Usual causes:
        A key was mapped to the wrong layer or expert; a rank loaded its neighbour's part.
    How to fix:
        Take the weights from a step where they differ.
    See:
        torch.distributed.checkpoint.state_dict.set_model_state_dict
    """
    payload = require(ckpt.payload)
    by_units: dict[tuple[str, str, Confidence], list[_Copy]] = defaultdict(list)
    all_copies = _copies(ckpt, payload)
    inventory = inventory_of(ckpt)
    layers = {param.key.layer for param in inventory.params if is_weight(param)} - {None}
    # A model whose layers share their weights has no layer without a copy; what a stored optimizer does not train may
    # be equal.
    has_twins = layers <= {param.key.layer for first, second, _ in all_copies for param in (first, second)}
    has_optimizer = inventory.states or inventory.numbered or inventory.buckets
    is_trained = _steps(ckpt) > 0 and not has_optimizer and not has_twins
    without_moments: Confidence = "likely" if is_trained else "possible"
    for first, second, chunks in all_copies:
        relation = _moments(ckpt, payload, first, second, chunks)
        is_one_layer = first.key.layer == second.key.layer  # whose experts PAY010 judges
        if relation == "same" or (is_one_layer and relation != "apart"):
            continue
        is_moved = relation == "apart" and _steps(ckpt) >= _STEPS[first.tensor.dtype in ("float32", "float64")]
        confidence: Confidence = "certain" if is_moved else without_moments
        by_units[_unit(first), _unit(second), confidence].append((first, second, chunks))
    for (source, copied, confidence), copies in by_units.items():
        yield _finding(ckpt, source, copied, confidence, copies)


def _copies(ckpt: Checkpoint, payload: PayloadTable) -> list[_Copy]:
    """Weights of one role with chunks that hold the same bytes in the same place."""
    by_content: dict[tuple[object, ...], list[tuple[Param, int]]] = defaultdict(list)
    for param in inventory_of(ckpt).params if (payload.equal_group >= 0).any() else ():
        tensor, record = param.tensor, param.tensor.chunks.record
        if (param.key.layer is None and param.key.expert is None) or not len(record) or not is_weight(param):
            continue
        is_equal = (record >= 0) & (payload.equal_group[record] >= 0) & ~payload.rows_alike[record]
        for chunk in np.flatnonzero(is_equal).tolist():
            place = param.key.scope, param.key.role, tensor.tiling.box(chunk)
            by_content[int(payload.equal_group[record[chunk]]), *place].append((param, chunk))
    copies: dict[tuple[str, str], _Copy] = {}
    for (first, _), *others in by_content.values():
        for param, chunk in others:
            names = first.tensor.fqn, param.tensor.fqn
            copies.setdefault(names, (first, param, []))[2].append(chunk)
    return [*copies.values()]


def _finding(ckpt: Checkpoint, source: str, copied: str, confidence: Confidence, copies: list[_Copy]) -> Finding:
    _, param, chunks = copies[0]
    tensor = param.tensor
    is_whole = len(chunks) == int(tensor.tiling.live.sum())
    share = "" if is_whole else f", in {len(chunks):,} of {plural(len(tensor.chunks), 'chunk')}"
    more = f" and {plural(len(copies) - 1, 'more weight')} are" if len(copies) > 1 else " is"
    apart = ", though their moments differ" if confidence == "certain" else ""
    return Finding(
        f"{tensor.fqn}{more} bit for bit as in {source}{share}{apart}",
        at=replace(Location.of_chunk(ckpt, tensor, chunks[0]), rows=tuple(chunks[:16])),
        identity=(source, copied),
        keys=tuple(copy.tensor.fqn for _, copy, _ in copies),
        confidence=confidence,
        hint=_HINTS[confidence],
        inferred_from="equal lengths, CRC-32s and samples",
        partners=tuple(first.tensor.fqn for first, _, _ in copies),
        group=f"copied {confidence}",
    )


def _unit(param: Param) -> str:
    layer = f"layer {param.key.layer}" if param.key.layer is not None else ""
    expert = f"expert {param.key.expert}" if param.key.expert is not None else ""
    return f"{expert} of {layer}" if layer and expert else layer or expert


def _moments(
    ckpt: Checkpoint, payload: PayloadTable, first: Param, second: Param, chunks: list[int]
) -> Literal["same", "apart", "none"]:
    """Whether the moments of two weights hold the same bytes in these chunks, others, or are not there."""
    sums: list[dict[tuple[str, int], int]] = [{}, {}]
    for of_weight, param in zip(sums, (first, second), strict=True):
        for state in moments_of(ckpt).get(param.tensor.fqn, ()):
            record = state.tensor.chunks.record
            if len(record) == len(param.tensor.chunks) and payload.crc[record[chunks]].min() > 0:
                of_weight |= {(state.what, chunk): int(payload.crc[record[chunk]]) for chunk in chunks}
    shared = sums[0].keys() & sums[1].keys()
    if not shared:
        return "none"
    return "same" if all(sums[0][place] == sums[1][place] for place in shared) else "apart"


def _steps(ckpt: Checkpoint) -> int:
    """Steps that were trained, as the run or a counter in the checkpoint says; 0 where nothing does."""
    named = ckpt.run.step if ckpt.run is not None else 0
    return max([named or 0, *(claim.step for claim in ckpt.claims)])
