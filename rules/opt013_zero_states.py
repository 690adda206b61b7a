from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.layers.odd_ones import odd_ones, sees_all
from ckptlint.analysis.optimizer.beside import of_each
from ckptlint.analysis.optimizer.pairs import moments_that_do_not_fit
from ckptlint.analysis.optimizer.records import highest_step
from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural, verb
from ckptlint.numerics.chunks import chunk_numbers
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import parse

_DUMMY = 1  # steps that torch counts for the state of an optimizer that never stepped
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")


@rule("OPT013", "zero-states", Severity.ERROR, depth=Depth.DATA, needs=("moments",), yields_to=("RUN008",))
def zero_states(ckpt: Checkpoint) -> Iterator[Finding]:
    """All optimizer state of one rank, or of one layer, is zero, unlike that of the others.

    What it checks:
        No rank of which four or more tensors are judged holds zeros in nine of ten of its chunks of a state (`exp_avg`,
        `exp_avg_sq`, `momentum_buffer`, `square_avg`) while other chunks of the same tensors are not zero; and no layer
        among three or more. Experts and tables of tokens are left out: what no token reached has zeros. It is an error
        if first and second moments are zero together, else a warning, unless OPT011 tells of them.

        It is a warning if all moments are zero, all counters say 1 and the job is further: torch makes this state for
        an optimizer that never stepped.
    Why it matters:
        A resume continues that part with zero moments: its first steps are many times too large.
    Usual causes:
        A rank saved before it had loaded its optimizer, or its state was offloaded; a load left buffers unfilled.
    How to fix:
        Go back to a step whose states are whole, or warm up again.
    See:
        torch.optim.Adam, torch.distributed.checkpoint.state_dict.get_optimizer_state_dict
    """
    yield from of_each(ckpt, _zero)


def _zero(ckpt: Checkpoint) -> Iterator[Finding]:
    moments, counters = _never_stepped(ckpt)
    if moments:
        yield Finding(
            f"all {len(moments):,} moments are zero and {plural(len(counters), 'counter')} of the optimizer "
            f"{verb(len(counters), 'says')} 1, but the job is at step {highest_step(ckpt):,}",
            at=Location(moments[0]),
            identity=("never stepped",),
            severity=Severity.WARNING,
            kind="never stepped",
            why="torch makes this state for an optimizer that never stepped: another one trained, or none did",
            hint="look whether the weights changed at all, and save the optimizer that steps",
        )
    numbers = chunk_numbers(ckpt)
    is_seen = np.array([sees_all(tensor.fqn) for tensor in numbers.tensors], bool)[numbers.tensor]
    is_zero = numbers.most == 0
    odds = ((state, odd_ones(ckpt, is_seen & numbers.are_state(state), is_zero)) for state in _STATES)
    by_title = grouped((odd.title, (state, odd)) for state, of_state in odds for odd in of_state)
    for title, members in by_title.items():
        rows = np.concatenate([odd.rows for _, odd in members])
        places = [(numbers.tensors[int(numbers.tensor[row])].fqn, int(numbers.chunk[row])) for row in rows.tolist()]
        of_opt011 = moments_that_do_not_fit(ckpt).intersection(places) if len(members) == 1 else ()
        if 2 * len(of_opt011) > len(places):
            continue
        judged = sum(odd.judged for _, odd in members)
        first = int(rows[0])
        tensor, chunk = numbers.tensors[int(numbers.tensor[first])], int(numbers.chunk[first])
        states = " and ".join(state for state, _ in members)
        yield Finding(
            f"{states} of {title} are zero in {len(rows):,} of {plural(judged, 'chunk')}; those of the others are not",
            at=Location.of_chunk(ckpt, tensor, chunk, members[0][1].rank),
            identity=(title,),
            keys=tuple(dict.fromkeys(fqn for fqn, _ in places)),
            confidence="certain" if len(members) > 1 else "likely",
            hint="go back to a step whose states are whole, or load without the optimizer and warm up again",
        )


def _never_stepped(ckpt: Checkpoint) -> tuple[list[Tensor], list[Tensor]]:
    """All moments and all counters, if those are zero and these say 1 at a later step; none otherwise."""
    moments = [tensor for key, tensor in ckpt.tensors.items() if key.endswith((".exp_avg", ".exp_avg_sq"))]
    scalars = (tensor for key, tensor in ckpt.tensors.items() if key.endswith(".step") and tensor.volume == 1)
    counters, payload = [tensor for tensor in scalars if parse(tensor.fqn).kind == "optimizer"], ckpt.payload
    if payload is None or not moments or not counters or highest_step(ckpt) <= _DUMMY:
        return [], []
    rows = [np.concatenate([tensor.chunks.record for tensor in tensors]) for tensors in (moments, counters)]
    if any((records < 0).any() or not payload.scanned[records].all() for records in rows):
        return [], []
    is_new = (payload.most[rows[0]] == 0).all() and (payload.most[rows[1]] == _DUMMY).all()
    return (moments, counters) if is_new else ([], [])
