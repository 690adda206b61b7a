from __future__ import annotations

from collections.abc import Iterator
from math import exp, log, sqrt
from statistics import median

import numpy as np

from ckptlint.analysis.layers.odd_ones import sees_all
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.model.tiling import IntArray, distinct
from ckptlint.numerics.chunks import ChunkNumbers, Floats, chunk_numbers
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import SQUARES

_LEAST_TENSORS, _LEAST_RANKS, _LEAST_ELEMENTS = 8, 3, 16
_FAR, _NEAR, _SPREAD = log(1.8), log(1.3), log(1.25)  # of logarithms of ratios of root mean squares
_NEARLY_ALL = 0.8
_ERRORS = 6.0  # standard errors of a median, beyond which it is no chance
_OF_MEDIAN = 1.25  # the standard error of a median is that of a mean times this


@rule("PAY018", "scaled-rank", Severity.WARNING, depth=Depth.DATA)
def scaled_rank(ckpt: Checkpoint) -> Iterator[Finding]:
    """The values of one rank are k times as large as those of the other ranks, in nearly all tensors.

    What it checks:
        Of three or more ranks that share eight or more matrices, the root mean square of each rank's chunks is that of
        the others' chunks of the same tensor: in weights, first and second moments. A rank is named where four of five
        of its chunks have the same ratio, far from 1, and the other ranks are near 1: the ratios may spread as those of
        the other ranks do, if the median is six standard errors from 1. Experts and tables of tokens are
        left out, and the moments of a rank whose second moments are below 0: they are other numbers (OPT010).
    Why it matters:
        A part of every matrix is scaled: the model computes something else after a load.
    Usual causes:
        A rank averaged or reduced once too often, unscaled its gradients twice, or loaded with another scale.
    How to fix:
        Take the rank's part from another step.
    See:
        torch.distributed.ReduceOp
    """
    numbers = chunk_numbers(ckpt)
    if len(distinct(numbers.rank[numbers.rank >= 0])) < _LEAST_RANKS:
        raise NotApplicable("fewer than three ranks saved")
    is_seen = [len(tensor.global_shape) > 1 and sees_all(tensor.fqn) for tensor in numbers.tensors]
    is_judged = np.array(is_seen, bool)[numbers.tensor]
    is_judged &= (numbers.rank >= 0) & (numbers.elements >= _LEAST_ELEMENTS) & (numbers.rms > 0)
    is_below = (numbers.column("negatives") > 0) & numbers.are_state(*SQUARES)
    is_judged &= numbers.are_state("") | ~np.isin(numbers.rank, numbers.rank[is_below])
    for state in dict.fromkeys(numbers.states):
        rows = np.flatnonzero(is_judged & numbers.are_state(state))
        all_medians = _medians(numbers, rows)
        if len(all_medians) < _LEAST_RANKS:
            continue
        rank, (middle, mine, of_rank) = max(all_medians.items(), key=lambda item: abs(item[1][0]))
        # beside one that is scaled, the others are not what they are among themselves
        others = _medians(numbers, rows[numbers.rank[rows] != rank])
        if abs(middle) <= _FAR or len(others) < _LEAST_RANKS - 1:
            continue
        of_others = np.concatenate([ratios - median for median, _, ratios in others.values()])
        usual = float(np.sqrt(np.mean(of_others**2)))
        is_alike = float((np.abs(of_rank - middle) < max(_SPREAD, 2 * usual)).mean()) >= _NEARLY_ALL
        is_sure = is_alike and abs(middle) > _ERRORS * _OF_MEDIAN * usual / sqrt(len(mine))
        near = max(_NEAR, abs(middle) / 4)  # of moments, which differ more from rank to rank
        if is_sure and all(abs(median) < near for median, _, _ in others.values()):
            tensor, chunk = numbers.tensors[int(numbers.tensor[mine[0]])], int(numbers.chunk[mine[0]])
            names = [numbers.tensors[number].fqn for number in distinct(numbers.tensor[mine]).tolist()]
            what = state or "weights"
            yield Finding(
                f"the {what} of rank {rank} are {exp(middle):.3g} times as large as those of the other ranks, in "
                f"{plural(len(mine), 'tensor')}",
                at=Location.of_chunk(ckpt, tensor, chunk, rank),
                identity=(f"rank {rank}", what),
                keys=tuple(names),
                hint=f"take the part of rank {rank} from another step, and look for a sum that should be a mean",
            )


def _medians(numbers: ChunkNumbers, rows: IntArray) -> dict[int, tuple[float, IntArray, Floats]]:
    """Rank -> median of the ratios of its chunks, these rows, and their ratios; of ranks with enough of them."""
    ratios, medians = _ratios(numbers, rows), dict[int, tuple[float, IntArray, Floats]]()
    for rank in distinct(numbers.rank[rows]).tolist():
        is_mine = (numbers.rank[rows] == rank) & np.isfinite(ratios)
        if is_mine.sum() >= _LEAST_TENSORS:
            medians[rank] = median(ratios[is_mine].tolist()), rows[is_mine], ratios[is_mine]
    return medians


def _ratios(numbers: ChunkNumbers, rows: IntArray) -> Floats:
    """float64 [k], logarithm of each chunk's root mean square over the median of the tensor's other ranks."""
    ratios = np.full(len(rows), np.nan)
    rms = numbers.rms
    order = np.argsort(numbers.tensor[rows], kind="stable")
    cuts = np.flatnonzero(np.diff(numbers.tensor[rows][order])) + 1
    for mine in np.split(order, cuts) if len(order) else ():
        for at in mine.tolist():
            others = rows[mine][numbers.rank[rows[mine]] != numbers.rank[rows[at]]]
            if len(others):
                ratios[at] = log(float(rms[rows[at]]) / median(rms[others].tolist()))
    return ratios
