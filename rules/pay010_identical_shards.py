from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ckptlint.analysis.fit.trusted_config import flag, number, trusted, trusted_topology
from ckptlint.analysis.optimizer.inventory import inventory_of, moments_of
from ckptlint.depth import Depth
from ckptlint.geometry.writers import saved_by
from ckptlint.model import Checkpoint, PayloadTable, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.text import ranges
from ckptlint.rule import Confidence, Finding, Location, Note, Severity, require, rule
from ckptlint.vocabulary.keys import Key, gated_role, parse
from ckptlint.vocabulary.metadata_files import rank_of

_SHOWN = 3
_HINTS = {
    True: "compare the experts with an earlier step, and reload the repeated ones from it",
    False: "check whether the parameter should be Replicate on this axis; if so, load one copy of it",
}
_BUILT = "every layer repeats it, so ignore this if the model was built so"
_INFERRED = "equal lengths, CRC-32s and samples"
_UNTRAINED = "ignore this if the tensor still has its initial values"


@rule("PAY010", "identical-shards", Severity.ERROR, depth=Depth.HEADERS, needs=("checksums",), yields_to=("PAY020",))
def identical_shards(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two chunks of a tensor, two experts of a layer, or gate and up of an MLP hold the same data.

    What it checks:
        No two chunks of a floating tensor, and no two experts of a layer, agree in length, CRC-32 and up to 1 KiB of
        samples: a warning. With `--depth data` no two experts of an export do, and it is an error if its `up_proj`
        repeats its `gate_proj`. If all experts repeat, alike in every layer of an export, it is info: built so.
        What may repeat is left out: fewer than 64 elements, one repeated value, rows that are all alike, views of a
        larger storage, records without a CRC, flat optimizer buckets, attention heads that ranks share, experts
        upcycled from a dense model. It is only info if nothing shows that the model was trained (iteration 0, moments
        or norms of one value, all seeded alike), and for optimizer state unless its parameter repeats in the same
        shards: a summed loss gives equal gradients.
    Why it matters:
        A trained weight does not repeat itself, so either a replica was saved as shards, or one rank held its peer's
        shard.
    Usual causes:
        A sharding rule that matches a replicated parameter, a load that gave a rank its peer's shard, experts seeded
        alike.
    How to fix:
        Declare the placement Replicate, or take the experts from a good step.
    See:
        torch.distributed.tensor.placement_types.Replicate
    """
    payload = require(ckpt.payload)
    experts: dict[tuple[object, ...], list[tuple[Key, Tensor, int]]] = defaultdict(list)
    halves: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in ckpt.sound_tensors():
        numbers = _numbers(payload, tensor)
        if not (numbers >= 0).any():
            continue
        key = parse(tensor.fqn)
        param = _parameters(ckpt).get(tensor.fqn, tensor)  # OPT001 and OPT002 report states of other shapes
        if "gbuf_idx_" in tensor.fqn or _may_repeat(ckpt, key) or param.global_shape != tensor.global_shape:
            continue
        if pairs := _unexplained(payload, tensor, numbers):
            yield _chunks(ckpt, payload, tensor, pairs)
        else:
            if key.expert is not None:
                experts[key.scope, key.layer, key.role].append((key, tensor, int(numbers.max())))
            if ckpt.is_safetensors and gated_role(key):
                halves[key.scope, key.layer, gated_role(key), key.expert, int(numbers.max())].append(tensor)
    pairs_of = {unit: _expert_pairs(members) for unit, members in experts.items()}
    numbers_of = {unit: tuple((expert, earlier) for _, expert, earlier in pairs) for unit, pairs in pairs_of.items()}
    same_numbers = Counter((scope, role, pairs) for (scope, _, role), pairs in numbers_of.items())
    weights = Counter[tuple[object, ...]]((p.key.scope, p.key.layer, p.key.role) for p in inventory_of(ckpt).params)
    layers = Counter((scope, role) for scope, _, role in weights)
    for (scope, layer, role), repeats in pairs_of.items():
        # Exports of mixtures that were built from dense models hold equal experts by design: all of a layer, or each of
        # them as often as the others in every layer. A bad map of experts strikes some of them, in each layer alike.
        copies = Counter(earlier for _, _, earlier in repeats)
        are_alike = len(set(copies.values())) == 1 and len(repeats) + len(copies) == weights[scope, layer, role]
        is_built = ckpt.is_safetensors and are_alike
        if repeats and not (is_built and len(copies) == 1):
            is_built &= same_numbers[scope, role, numbers_of[scope, layer, role]] == layers[scope, role] > 1
            yield _experts(ckpt, payload, repeats, is_built)
    for tensors in halves.values():
        if len({parse(tensor.fqn).role for tensor in tensors}) == 2:
            yield _halves(ckpt, payload, tensors)


def _numbers(payload: PayloadTable, tensor: Tensor) -> np.ndarray:
    """For each chunk the number of the group of records with its bytes; -1 if no other record has them."""
    records = tensor.chunks.record
    return np.where(records >= 0, payload.equal_group[records], -1) if len(records) else np.zeros(0, np.int32)


def _unexplained(payload: PayloadTable, tensor: Tensor, numbers: np.ndarray) -> list[tuple[int, int]]:
    """(chunk, earlier chunk with the same data) in order, where rows that are all alike do not explain it."""
    first: dict[int, int] = {}
    pairs = [(row, first.setdefault(int(numbers[row]), row)) for row in np.flatnonzero(numbers >= 0).tolist()]
    # Where each row has the same values, any two chunks of the same columns are equal. Real cases: `A_log` of Mamba,
    # which is initialised row by row, and moments under a loss that is a plain sum.
    rows_alike = payload.rows_alike[tensor.chunks.record]
    offsets = tensor.tiling.offsets
    pairs = [(a, b) for a, b in pairs if a != b]
    return [(a, b) for a, b in pairs if not (rows_alike[a] and (offsets[a, 1:] == offsets[b, 1:]).all())]


def _may_repeat(ckpt: Checkpoint, key: Key) -> bool:
    """Whether the model is meant to have equal shards: kv heads that several ranks share, upcycled experts."""
    declared = trusted(ckpt)
    # With fewer kv heads than tensor-parallel ranks, several ranks hold one head. Without both numbers that cannot be
    # ruled out, so nothing is said of any k, v or qkv.
    if key.function in ("k", "v", "qkv"):
        groups, tp = number(declared, "kv_groups"), trusted_topology(ckpt).get("tp")
        return groups is None or tp is None or groups < tp.size
    return key.in_experts and flag(declared, "moe_upcycled") is True


def _chunks(ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor, pairs: list[tuple[int, int]]) -> Finding:
    row, earlier = pairs[0]
    box, earlier_box = tensor.tiling.box(row), tensor.tiling.box(earlier)
    rows = [member for pair in pairs for member in pair]
    at = Location.of_chunk(ckpt, tensor, row)
    record = int(tensor.chunks.record[row])
    what = f"chunk {box}{{of}} repeats chunk {earlier_box}"
    if len(pairs) > 1:
        count = f"{len(pairs):,} of {len(tensor.chunks):,} chunks"
        what = f"{count}{{of}} repeat another one, the first: {box} repeats {earlier_box}"
    more = f" and {len(pairs) - _SHOWN:,} more" if len(pairs) > _SHOWN else ""
    listed = "; ".join(f"{_files(ckpt, tensor, a)} repeats {_files(ckpt, tensor, b)}" for a, b in pairs[:_SHOWN])
    confidence = _confidence(ckpt, payload, tensor, pairs)
    key = parse(tensor.fqn)
    why, hint = "", _HINTS[key.in_experts]
    if confidence == "possible":
        why, hint = _state_advice(ckpt, payload, tensor, row, earlier) if key.kind == "optimizer" else ("", _UNTRAINED)
    return Finding(
        what,
        at=replace(at, rows=(row, earlier), ranks=saved_by(ckpt, tensor, rows)),
        severity=Severity.WARNING,
        confidence=confidence,
        why=why,
        notes=(_evidence(payload, record), ("chunks", listed + more)),
        hint=hint,
        inferred_from=_INFERRED,
        group=f"chunks {pairs}",
        is_apart=True,
    )


def _state_advice(ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor, row: int, earlier: int) -> tuple[str, str]:
    """(why, hint) of a finding on two equal chunks of an optimizer state."""
    param = _parameters(ckpt).get(tensor.fqn)
    if param is None:
        return "", "compare with the parameter's shards in another checkpoint: this one lacks the parameter"
    boxes = tensor.tiling.box(row), tensor.tiling.box(earlier)
    records = [int(param.chunks.record[i]) for i in range(len(param.chunks)) if param.tiling.box(i) in boxes]
    sums = {int(payload.crc[record]) for record in records if record >= 0 and payload.crc[record] > 0}
    if len(sums) < len(boxes):
        return "", "compare the gradients of the two ranks: the parameter's shards do not show if states may repeat"
    return (
        "the parameter's shards differ, so it is really split; only equal gradients (a summed loss) make states equal",
        "compare the gradients of the two ranks, unless the loss is a plain sum, as in a toy model",
    )


_Pairs = list[tuple[Tensor, int, int]]
"""(weight of an expert, number of this expert, number of the earlier expert with the same bytes)."""


def _expert_pairs(members: list[tuple[Key, Tensor, int]]) -> _Pairs:
    members.sort(key=lambda member: member[0].expert or 0)
    first: dict[int, int] = {}
    pairs = [(tensor, key.expert or 0, first.setdefault(group, key.expert or 0)) for key, tensor, group in members]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _experts(ckpt: Checkpoint, payload: PayloadTable, pairs: _Pairs, is_built: bool) -> Finding:
    tensor = pairs[0][0]
    repeating, repeated = ranges(p[1] for p in pairs), ranges(p[2] for p in pairs)
    record = int(tensor.chunks.record.max())
    names = ("experts", "repeat") if len(pairs) > 1 else ("expert", "repeats")
    return Finding(
        f"{names[0]} {repeating} {names[1]} {names[0]} {repeated}: the same data in {tensor.fqn}",
        at=Location(tensor, file=ckpt.byte_range_of(record)[0]),
        identity=(repeating,),
        severity=Severity.WARNING,
        confidence=(confidence := "possible" if is_built else _confidence(ckpt, payload, tensor)),
        notes=(_evidence(payload, record),),
        hint=_BUILT if is_built else _UNTRAINED if confidence == "possible" else _HINTS[True],
        inferred_from=_INFERRED,
        group=f"experts {repeating} {repeated}",
    )


def _halves(ckpt: Checkpoint, payload: PayloadTable, tensors: list[Tensor]) -> Finding:
    gate, up = sorted(tensors, key=lambda tensor: tensor.fqn)
    record = int(up.chunks.record[0])
    confidence = _confidence(ckpt, payload, up)
    return Finding(
        f"{up.fqn} repeats {gate.fqn}",
        at=Location(up, file=ckpt.byte_range_of(record)[0]),
        confidence=confidence,
        notes=(_evidence(payload, record),),
        why="gate and up are multiplied with each other, and training never makes them equal",
        hint=_UNTRAINED if confidence == "possible" else "export the model again",
        inferred_from=_INFERRED,
        group="gate and up",
        is_apart=True,
    )


def _files(ckpt: Checkpoint, tensor: Tensor, row: int) -> str:
    file = ckpt.chunk_file(tensor, row)
    rank = rank_of(file)
    return f"{tensor.tiling.box(row)} ({file if rank is None else f'rank {rank}'})"


def _evidence(payload: PayloadTable, record: int) -> Note:
    size, crc = int(payload.size[record]), int(payload.crc[record])
    return "evidence", f"{size:,} bytes with CRC-32 {crc:08x} and equal samples in both"


def _confidence(
    ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor, pairs: Sequence[tuple[int, int]] = ()
) -> Confidence:
    """`possible` where equal bytes may come from the initialisation or from equal gradients, else `certain`."""
    # Equal shards are a fault only if training or unlike seeds should have made them differ. Witnesses, in order of
    # trust: iteration 0, the weight's own moments, norms (which start as ones), a later iteration, other weights.
    step = None if ckpt.run is None else ckpt.run.step
    iteration = step if ckpt.common is None else ckpt.common.values.get("iteration", step)
    if iteration == 0:
        return "possible"
    if parse(tensor.fqn).kind == "optimizer":
        param = _parameters(ckpt).get(tensor.fqn)
        repeats = param is not None and _parameter_repeats(payload, param, tensor, pairs)
        return _confidence(ckpt, payload, param, pairs) if param is not None and repeats else "possible"
    if (moments := _moments(ckpt, payload, tensor)) is not None:
        return "certain" if moments else "possible"
    norms = _norms_are_constant(ckpt, payload)
    if norms or tensor.fqn in _experts_seeded_alike(ckpt, payload):
        return "possible"
    is_trained = norms is False or isinstance(iteration, int) or parse(tensor.fqn).in_experts
    differing = _unseeded_weights(ckpt, payload)
    return "certain" if is_trained or len(differing) > (tensor.fqn in differing) else "possible"


@fact
def _parameters(ckpt: Checkpoint) -> dict[str, Tensor]:
    """Key of an optimizer state -> its parameter, for states of exactly one parameter."""
    return {state.tensor.fqn: state.param.tensor for state in inventory_of(ckpt).states if state.param is not None}


def _parameter_repeats(payload: PayloadTable, param: Tensor, tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether the parameter's chunks at the boxes of these pairs are equal too."""
    numbers = _numbers(payload, param)
    boxes = {tensor.tiling.box(row) for pair in pairs for row in pair}
    rows = {box: i for i in range(len(param.chunks)) if (box := param.tiling.box(i)) in boxes}
    places = [[rows.get(tensor.tiling.box(row), -1) for row in pair] for pair in pairs]
    return all(min(a, b) >= 0 and 0 <= numbers[a] == numbers[b] for a, b in places)


@fact
def _unseeded_weights(ckpt: Checkpoint, payload: PayloadTable) -> frozenset[str]:
    """Keys of weights whose chunks all differ, which shows that the ranks were not seeded alike."""
    fqns = set()
    for param in inventory_of(ckpt).params:
        records = param.tensor.chunks.record
        read = records[records >= 0]
        read = read[(payload.start[read] >= 0) & (payload.crc[read] > 0)]
        is_judged = len(read) > 1 and len(param.own_shape) > 1 and not payload.constant[read].any()
        if is_judged and (payload.equal_group[read] < 0).all():
            fqns.add(param.tensor.fqn)
    return frozenset(fqns)


def _moments(ckpt: Checkpoint, payload: PayloadTable, tensor: Tensor) -> bool | None:
    """Whether the parameter's moments hold more than one value; None if no moment was read."""
    moments = [state.tensor for state in moments_of(ckpt).get(tensor.fqn, ()) if state.param is not None]
    records = np.concatenate([np.zeros(0, np.int64), *(moment.chunks.record for moment in moments)])
    read = records[records >= 0]
    read = read[payload.state[read] == 0]
    return not payload.constant[read].all() if len(read) else None


@fact
def _norms_are_constant(ckpt: Checkpoint, payload: PayloadTable) -> bool | None:
    """Whether each norm holds a single value; None if no norm can be judged."""
    # A norm whose chunks repeat was seeded alike on all ranks: it may vary and still show no training.
    norms = []
    for param in inventory_of(ckpt).params:
        is_norm = param.key.function == "norm" and param.tensor.fqn.endswith("weight")
        if is_norm and (_numbers(payload, param.tensor) < 0).all():
            records = param.tensor.chunks.record
            norms += [bool(payload.constant[r]) for r in records.tolist() if r >= 0 and payload.start[r] >= 0]
    return all(norms) if norms else None


@fact
def _experts_seeded_alike(ckpt: Checkpoint, payload: PayloadTable) -> frozenset[str]:
    """Keys of the routed experts' weights, if every chunk of all of them is stored twice; empty otherwise."""
    # A lost or swapped rank repeats some experts. If all are stored twice, the ranks were seeded alike.
    weights = [param.tensor for param in inventory_of(ckpt).params if param.key.in_experts and len(param.own_shape) > 1]
    is_all = all((_numbers(payload, weight) >= 0).all() for weight in weights)
    return frozenset(weight.fqn for weight in weights) if is_all else frozenset()
