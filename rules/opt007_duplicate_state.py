from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.analysis.chunks.checksums import chunk_sums
from ckptlint.analysis.optimizer.inventory import OptimizerState, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.keys import MASTER_COPIES


@rule("OPT007", "duplicate-state", Severity.WARNING, needs=("states",))
def duplicate_state(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two optimizer entries hold the same state of one parameter.

    What it checks:
        Within one optimizer and chain, no two entries lead to the same state of the same parameter once wrappers are
        stripped, and no parameter has two master copies (param, fp32_param, main_param, master_param) of equal length
        and dtype. From depth headers on, the message says whether the checksums of the two are equal.
    Why it matters:
        A loader reads one of the two, the other goes stale, and every step stores these bytes twice.
    Usual causes:
        An offloading wrapper and the inner optimizer both export the master weights, one of them under a wrapper's
        prefix.
    How to fix:
        Skip the duplicate entry when the state is packed.
    See:
        megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer
    """
    states = inventory_of(ckpt).states
    seen: dict[tuple[object, ...], list[OptimizerState]] = defaultdict(list)
    for state in states:
        if state.tensor.volume > 1:
            optimizer = state.tensor.fqn.partition(".state.")[0]
            entry = optimizer, state.chain, state.scope, state.path, state.what, state.tensor.volume
            seen[entry].append(state)
    doubled = [(first, second) for group in seen.values() for first, *rest in [group] for second in rest]
    doubled += _second_masters(list(dict.fromkeys(group[0] for group in seen.values())))
    total = sum(nbytes(second.tensor.dtype, second.tensor.volume) or 0 for _, second in doubled)
    for first, second in doubled:
        yield _finding(first, second, total, len(doubled), _compared(ckpt, first, second))


def _second_masters(states: list[OptimizerState]) -> list[tuple[OptimizerState, OptimizerState]]:
    masters = grouped(
        ((state.param, state.chain, state.tensor.volume, state.tensor.dtype), state)
        for state in states
        if state.what in MASTER_COPIES and state.param is not None
    )
    return [(group[0], second) for group in masters.values() for second in group[1:] if second.what != group[0].what]


def _compared(ckpt: Checkpoint, first: OptimizerState, second: OptimizerState) -> str:
    """Whether the records of the two states are equal, as text; "" if that is not known."""
    a, b = (chunk_sums(ckpt, state.tensor) for state in (first, second))
    if a is None or b is None or a.shape != b.shape or (a[:, :-2] != b[:, :-2]).any():
        return ""
    equal = (a == b).all(axis=1)
    return ", with the same values" if equal.all() else f", and {int((~equal).sum()):,} of {len(a):,} chunks differ"


def _finding(first: OptimizerState, second: OptimizerState, total: int, count: int, compared: str) -> Finding:
    tensor = second.tensor
    prefixes = " ".join(state.tensor.fqn.partition(state.path)[0] for state in (first, second))
    return Finding(
        f"state{{of}} is a second copy: its parameter already has {first.what}{compared}",
        at=Location(tensor),
        notes=(
            ("first", f"{first.tensor.fqn}: {first.tensor.dtype} {shape_text(first.tensor.global_shape)}"),
            ("second", f"{tensor.fqn}: {tensor.dtype} {shape_text(tensor.global_shape)}, {tensor.volume:,} elements"),
            ("twice", f"{total:,} bytes in {count} tensor{'s' if count > 1 else ''} of this checkpoint"),
        ),
        hint="find out which of the two your loader reads, and stop exporting the other",
        group=f"{first.chain} {first.what} {second.what} {prefixes} {compared}",
    )
