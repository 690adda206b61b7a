"""Which tensors follow from each other: an optimizer's moments, and weights with their master copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.optimizer.inventory import inventory_of, optimizer_parts, split_state
from ckptlint.model import Checkpoint, Pair, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.payload import PairLaw
from ckptlint.model.tiling import BoolArray, IntArray, distinct
from ckptlint.numerics.chunks import ranks_by_file
from ckptlint.numerics.draw import touching
from ckptlint.numerics.settings import optimizer_settings
from ckptlint.vocabulary.dtypes import ENCODINGS
from ckptlint.vocabulary.keys import MASTER_COPIES, parse, state_name

Betas = tuple[float, float] | None

_FOLLOWS: dict[str, tuple[str, PairLaw]] = {
    "exp_avg": ("exp_avg_sq", "moments"),
    "max_exp_avg_sq": ("exp_avg_sq", "maximum"),
}
_OFTEN, _SELDOM = 0.001, 0.02  # share of elements that break the law where it does not hold; of chunks where it does
LEAST_JUDGED = 5  # chunks that are compared


@fact
def pairs_of(ckpt: Checkpoint) -> tuple[Pair, ...]:
    """The pairs of tensors of as many elements; moments are paired by keys that differ in the state's name alone."""
    return (*_states(ckpt), *_copies(ckpt))


def _states(ckpt: Checkpoint) -> Iterator[Pair]:
    groups = optimizer_settings(ckpt)
    everywhere, by_path = {group.betas for group in groups}, dict[str, set[Betas]]()
    for group in groups:
        for name in group.params:
            by_path.setdefault(parse(str(name)).path, set()).add(group.betas)
    for tensor in ckpt.sound_tensors():
        words = tensor.fqn.split(".")
        for name, (partner, law) in _FOLLOWS.items():
            at = len(words) - 1 - words[::-1].index(name) if state_name(tensor.fqn) == name else -1
            second = ckpt.tensors.get(".".join([*words[:at], partner, *words[at + 1 :]])) if at >= 0 else None
            if second is not None and second.is_sound and second.global_shape == tensor.global_shape:
                # the betas of the groups that list the parameter; where none names it, those of all
                named = split_state(optimizer_parts(parse(tensor.fqn))[1].removeprefix("state."))
                betas = by_path.get(parse(named[1]).path, everywhere) if named is not None else everywhere
                known = next(iter(betas)) if law == "moments" and len(betas) == 1 else None
                yield Pair(law, tensor.fqn, second.fqn, known)


def _copies(ckpt: Checkpoint) -> Iterator[Pair]:
    for state in inventory_of(ckpt).states:
        param = state.param
        if param is None or state.what not in MASTER_COPIES or param.tensor.dtype not in ENCODINGS:
            continue
        # DeepSpeed stores it as the one row that it is in its flat group
        if state.tensor.global_shape in (param.tensor.global_shape, (param.tensor.volume,)):
            yield Pair("copy", param.tensor.fqn, state.tensor.fqn)


def breaking(ckpt: Checkpoint, law: PairLaw) -> IntArray:
    """Rows of `Checkpoint.pairs` that break a law which nearly all others keep; none where it is not theirs.

    Another optimizer breaks it in the same way in all ranks, and in tensors of as many axes. So a row counts where four
    of five tensors like it keep the law, or where other ranks keep it: copies of one tensor are on all ranks, and the
    two of a pair may have been saved by two of them.
    """
    pairs = ckpt.pairs
    if pairs is None or not (pairs.odd > 0).any():
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(np.array([pair.law == law for pair in pairs.pairs], bool)[pairs.pair])
    tensors = [ckpt.tensors[pair.first] for pair in pairs.pairs]
    is_odd = pairs.odd[rows] > _OFTEN * pairs.drawn[rows]
    if not is_odd.any():
        return np.zeros(0, np.int64)
    axes = np.array([len(tensor.global_shape) for tensor in tensors])[pairs.pair[rows]]
    ranks = [
        ranks_of_both(ckpt, tensors[pair], chunk, ckpt.tensors[pairs.pairs[pair].second])
        for pair, chunk in zip(pairs.pair[rows].tolist(), pairs.chunk[rows].tolist(), strict=True)
    ]
    of_first, of_second = np.array(ranks, np.int64).reshape(-1, 2).T
    is_lone = _of_few(is_odd, axes) | _of_rank(is_odd, of_first) | _of_rank(is_odd, of_second)
    return np.asarray(rows[is_odd & is_lone])


def breaking_share(ckpt: Checkpoint, law: PairLaw) -> float:
    """Share of the chunks of this step alone that break a law; 0 where none were compared."""
    pairs = ckpt.pairs
    if pairs is None or not len(pairs.rows):
        return 0.0
    rows = np.flatnonzero(np.array([pair.law == law for pair in pairs.pairs], bool)[pairs.pair])
    return float((pairs.odd[rows] > _OFTEN * pairs.drawn[rows]).mean()) if len(rows) else 0.0


@fact
def moments_that_do_not_fit(ckpt: Checkpoint) -> frozenset[tuple[str, int]]:
    """Keys of first and second moments, with the row of a chunk, of which OPT011 says that they do not fit."""
    places = set[tuple[str, int]]()
    for row in breaking(ckpt, "moments").tolist():
        pairs = ckpt.pairs
        assert pairs is not None  # a row is of them
        pair, chunk = pairs.pairs[int(pairs.pair[row])], int(pairs.chunk[row])
        places |= {(pair.first, chunk), (pair.second, chunk)}
    return frozenset(places)


def ranks_of_both(ckpt: Checkpoint, first: Tensor, chunk: int, second: Tensor) -> tuple[int, int]:
    """The ranks that saved a chunk of a first tensor, and what of a second lies there; -1 for none, or several."""
    records = first.chunks.record[[chunk]], second.chunks.record[touching(second, first, chunk)]
    (rank,), others = ({*ranks_by_file(ckpt)[ckpt.records.file[record]].tolist()} for record in records)
    return rank, others.pop() if len(others) == 1 else -1


def _of_few(is_odd: BoolArray, axes: IntArray) -> BoolArray:
    """Whether few chunks of tensors with as many axes are odd."""
    few = np.zeros(len(is_odd), bool)
    for count in distinct(axes).tolist():
        alike = axes == count
        few[alike] = alike.sum() >= LEAST_JUDGED and 5 * is_odd[alike].sum() <= alike.sum()
    return few


def _of_rank(is_odd: BoolArray, rank: IntArray) -> BoolArray:
    """Whether a chunk is of a rank with odd ones, while others have next to none."""
    shares = {number: float(is_odd[rank == number].mean()) for number in distinct(rank[rank >= 0]).tolist()}
    good = [number for number, share in shares.items() if share <= _SELDOM and (rank == number).sum() >= LEAST_JUDGED]
    bad = [number for number, share in shares.items() if share > _SELDOM]
    return np.isin(rank, bad) & (len(good) >= max(len(bad), 1))
