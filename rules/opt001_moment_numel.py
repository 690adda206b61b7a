from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from ckptlint.analysis.optimizer.fit import PAIR, StateMismatch, elementwise_states, moment_pairs, state_mismatches
from ckptlint.analysis.optimizer.inventory import OptimizerState
from ckptlint.geometry.writers import saved_by
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import named_ranks, ranges, shape_text
from ckptlint.rule import Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.keys import MASTER_COPIES

_FILES = 4
_MADE_LIKE = frozenset((*PAIR, "max_exp_avg_sq", *MASTER_COPIES))


@rule("OPT001", "moment-numel", Severity.ERROR, needs=("params", "states"))
def moment_numel(ckpt: Checkpoint) -> Iterator[Finding]:
    """A moment or master weight has more or fewer elements than its parameter.

    What it checks:
        exp_avg, exp_avg_sq, momentum_buffer, the master weights and the like have as many elements as their parameter,
        in whatever shape; the halves of a fused weight count together. It is a warning if only the shape differs at an
        equal number of axes. Scalars, factored and quantised states, flat parameters and buckets are left out. If all
        parameters of a shape deviate alike, it is only info, for the optimizer may be unknown; that all states are one
        1/k, of several shapes, is an error if vectors are among them, else a warning. Adam's moments and master weights
        stay a warning when all are transposed.
    Why it matters:
        DCP loads a state of the recorded size without comparing it with the parameter, so part of the moments, or those
        of other elements, are applied.
    Usual causes:
        A rank saved its local tensor under a shared key; the expert axis was not restored before saving; the index map
        is stale; bucket padding was kept.
    How to fix:
        Save the state with the parameter's placement. For this checkpoint, reset the state of these parameters, or go
        back to a step that passes.
    See:
        torch.distributed.checkpoint.state_dict.get_optimizer_state_dict
    """
    for misfit in state_mismatches(ckpt):
        yield from (_misfit_finding(ckpt, misfit, state) for state in misfit.states)
    yield from _transposed_states(ckpt)


def _misfit_finding(ckpt: Checkpoint, misfit: StateMismatch, state: OptimizerState) -> Finding:
    ratio = f"{misfit.quotient} of them" if misfit.quotient < 1 else f"{misfit.quotient} times as many"
    elements = f"{misfit.elements:,} {'elements' if len(misfit.states) == 1 else 'with its other half'}"
    lead = misfit.params[0]
    ranks = saved_by(ckpt, state.tensor)
    source = "the sizes of the mesh axes" if misfit.axes else "the same share of every other state"
    # A lost shard hits some parameters of a shape. Deviation of all of them may be an unknown optimizer's own form
    # (GaLore projects each moment), and a ratio that only inferred axes explain may be chance.
    return Finding(
        f"state{{of}} has {elements}, but its parameter has {misfit.expected:,}: {ratio}",
        at=Location(state.tensor, ranks=ranks),
        confidence="possible" if misfit.is_pattern else "likely" if misfit.is_inferred else "certain",
        notes=tuple(_notes(ckpt, misfit, state)),
        hint=_hint(misfit, ranks),
        inferred_from=source if misfit.is_inferred and not misfit.is_pattern else "",
        group=f"{lead.key.scope} {lead.key.role} {misfit.elements}/{misfit.expected}",
        kind=_kind(misfit),
    )


def _kind(misfit: StateMismatch) -> str:
    """`part` if the state is one rank's shard, `short` if it only has fewer elements, "" if it has more."""
    # A short vector proves no shard: its parameter may be a replica whose copies were recorded as shards.
    if misfit.quotient >= 1:
        return ""
    is_matrix = all(len(param.own_shape) > 1 for param in misfit.params)
    return "part" if is_matrix and (misfit.axes or misfit.is_local) else "short"


def _notes(ckpt: Checkpoint, misfit: StateMismatch, state: OptimizerState) -> Iterator[Note]:
    for param in misfit.params:
        yield "parameter", f"{param.tensor.fqn}: {_described(param.tensor)}"
    if misfit.axes:
        numerator = "1/" if misfit.quotient < 1 else ""
        shares = [f"{numerator}{axis} ({source})" for axis, source in misfit.axes]
        yield "ratio", " = ".join([f"{misfit.quotient}", *shares])
    if misfit.is_local:
        yield "part", "the state is as long as one chunk of the parameter, which is what one rank holds"
    if misfit.is_pattern:
        yield "pattern", "every parameter of this shape deviates alike: perhaps an optimizer unknown to ckptlint"
    files = sorted({ckpt.chunk_file(state.tensor, row) for row in range(min(len(state.tensor.chunks), _FILES))} - {""})
    yield "stored in", ", ".join(files) + (" and others" if len(state.tensor.chunks) > _FILES else "")


def _hint(misfit: StateMismatch, ranks: tuple[int, ...]) -> str:
    if misfit.quotient < 1 and (misfit.axes or misfit.is_local):
        whose = f"the part of {named_ranks(ranks)} alone" if len(ranks) == 1 else "one rank's part"
        return f"wrap the state with its parameter's placement and save again: this is probably {whose}"
    if misfit.is_pattern:
        return "compare with a state of the same optimizer that is known to be correct"
    return "do not resume with this state: drop it, or take it from a step that passes"


def _described(tensor: Tensor) -> str:
    chunks = int(tensor.tiling.live.sum())
    shape = shape_text(tensor.global_shape)
    return f"{tensor.dtype} {shape}, {tensor.volume:,} elements in {chunks} chunk{'s' if chunks != 1 else ''}"


def _transposed_states(ckpt: Checkpoint) -> Iterator[Finding]:
    """States as large as their parameter in another shape of as many axes (OPT002: moments that differ in shape)."""
    reported = {pair.param for pair in moment_pairs(ckpt) if pair.differs}
    members = grouped(
        ((param.tensor.global_shape, state.what), (state, param))
        for state in elementwise_states(ckpt)
        if (param := state.param) is not None and not (state.what in PAIR and param in reported)
    )
    shapes = Counter((param, state.tensor.global_shape) for pairs in members.values() for state, param in pairs)
    for (expected, what), pairs in members.items():
        odd = [(state, param) for state, param in pairs if _is_reshaped(state.tensor, expected)]
        # Adam creates its moments with zeros_like(parameter), so a transposed one is a fault even if all of them are.
        # Another optimizer may keep its states in a shape of its own.
        pattern = len(odd) == len(pairs) and len(odd) > 1 and what not in _MADE_LIKE
        layers = [param.key.layer for _, param in pairs if param.key.layer is not None]
        where = f" (layers {ranges(layers)})" if layers else ""
        differ = f"{len(odd)} of {len(pairs)} parameters of this shape{where}" if len(pairs) > 1 else ""
        for state, param in odd:
            shape = state.tensor.global_shape
            hint = "check how this state was gathered: save it in the shape of its parameter"
            if (count := shapes[param, shape]) > 1:
                hint = f"check the shape of the parameter: {count} of its states have this shape"
            word = "is transposed" if shape == expected[::-1] else "has a different shape"
            yield Finding(
                f"state{{of}} {word}: {shape_text(shape)} for a parameter of {shape_text(expected)}",
                at=Location(state.tensor),
                confidence="possible" if pattern else "likely",
                notes=(("parameter", f"{param.tensor.fqn}: {_described(param.tensor)}"), ("differ", differ)),
                why="the number of elements is right, so it loads, and each element gets the moments of another",
                hint=hint,
                group=f"{param.key.scope} {param.key.role} {shape} {expected}",
            )


def _is_reshaped(tensor: Tensor, expected: tuple[int, ...]) -> bool:
    shape = tensor.global_shape
    same_size = len(shape) == len(expected) and tensor.volume == prod(expected)
    return same_size and shape != expected and not tensor.is_flattened
