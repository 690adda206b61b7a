"""Compares the sizes of optimizer states with their parameters, for several rules.

One fault must be reported once, so this module also decides which rule leaves a fault to which other rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ckptlint.analysis.fit.trusted_config import trusted_topology
from ckptlint.analysis.optimizer.inventory import OptimizerState, Param, inventory_of
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.tiling import Coverage, Tiling
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.keys import MOMENTS
from ckptlint.vocabulary.mesh import AXES

PAIR = ("exp_avg", "exp_avg_sq")
"""The two moments that Adam creates and shards together."""

_COMPANION = lazy_pattern(r"absmax|scale|qmap|codes|quant")
_NO_FLOAT = ("int", "uint", "bool", "float8")
_EXACT = ("metadata", "args", "run_config", "config.json")


class StateMismatch(NamedTuple):
    """A state whose number of elements differs from that of its parameter.

    Attributes:
        params: the parameter, or all components that a fused state covers.
        states: the state, or the two halves of one parameter.
        elements: number of elements of the states together.
        expected: number of elements of the parameters together.
        axes: mesh axes whose size equals the quotient or its inverse, each with the source of that size.
        is_local: whether the state is as long as one of several chunks of the parameter.
        is_pattern: whether it looks like an unknown optimizer: all parameters of this shape show one quotient, and no
            evidence says that one rank's part was saved as the whole.
        is_inferred: whether the evidence for a lost part is weak: an inferred axis size, or matrices of several shapes
            (and no vector) that lack the same share.
    """

    params: tuple[Param, ...]
    states: tuple[OptimizerState, ...]
    elements: int
    expected: int
    axes: tuple[tuple[str, str], ...] = ()
    is_local: bool = False
    is_pattern: bool = False
    is_inferred: bool = False

    @property
    def quotient(self) -> Fraction:
        """Elements of the state per element of the parameter."""
        return Fraction(self.elements, self.expected)


@fact
def state_mismatches(ckpt: Checkpoint) -> list[StateMismatch]:
    """The elementwise states whose number of elements differs from that of their parameter."""
    states = elementwise_states(ckpt)
    halves: dict[tuple[Param, str, tuple[str, ...]], list[OptimizerState]] = defaultdict(list)
    misfits: list[tuple[tuple[OptimizerState, ...], int]] = []
    peers: dict[tuple[tuple[int, ...], str], set[Fraction]] = defaultdict(set)
    odd = Counter[tuple[tuple[int, ...], str]]()
    for state in states:
        if state.is_component:
            halves[state.params[0], state.what, state.chain].append(state)
            continue
        expected = sum(param.tensor.volume for param in state.params)
        peers[_peer(state)].add(Fraction(state.tensor.volume, expected))
        # of several components other than two halves some may have unknown names
        is_split = len(state.params) > 1 and not state.params[0].key.path.endswith(("_w", "_v"))
        if state.tensor.volume == expected or (is_split and state.tensor.volume > expected):
            continue
        odd[_peer(state)] += 1
        misfits.append(((state,), expected))
    for (param, _, _), both in halves.items():
        names = sorted(state.path[-2:] for state in both)
        if names == ["_v", "_w"] and sum(state.tensor.volume for state in both) != param.tensor.volume:
            misfits.append((tuple(both), param.tensor.volume))
    rank = _projected(state for misfit_states, _ in misfits for state in misfit_states)
    # Two explanations compete: a rank saved its part as the whole (megatron4623a), or an optimizer keeps smaller states
    # by design (GaLore). A deviation that is rare, or equals a chunk or a known mesh axis, is a fault.
    is_rare = 2 * len(misfits) < len(states)
    shapes = {shape for shape, _ in peers}
    shares = set[Fraction]().union(*peers.values())
    is_loss = len(shapes) > 1 and len(shares) == 1 and max(shares) < 1 == max(shares).numerator and not halves
    # Optimizers that project moments leave those of vectors whole, and give those of matrices one common size. So one
    # share below 1 for all shapes, vectors included, is a loss (OPT001: "every moment holds a quarter of its
    # parameter").
    has_vector = is_loss and any(len(shape) == 1 for shape in shapes)
    ranks = {_rank(misfit_states[0]) or misfit_states[0] for misfit_states, _ in misfits}
    is_loss = has_vector or (is_loss and len(ranks) > 1)
    result = []
    for misfit_states, expected in misfits:
        state = misfit_states[0]
        elements = sum(misfit.tensor.volume for misfit in misfit_states)
        quotient = Fraction(elements, expected)
        axes = _axes(ckpt, quotient)
        is_local = any(_is_one_chunk(state.tensor, param.tensor) for param in state.params)
        shared = len(peers[_peer(state)]) == 1 and (odd[_peer(state)] > 1 or not is_rare)
        weak = shared and not has_vector and not is_local and not any(source in _EXACT for _, source in axes)
        is_pattern = (weak and not axes and not is_loss) or (rank is not None and _rank(state) == rank)
        about = tuple(axes), is_local, is_pattern, weak and (bool(axes) or is_loss)
        result.append(StateMismatch(state.params, misfit_states, elements, expected, *about))
    return result


@fact
def mismatched_params(ckpt: Checkpoint) -> frozenset[Param]:
    """The parameters of all state mismatches, which OPT002 and OPT006 leave to OPT001."""
    return frozenset(param for misfit in state_mismatches(ckpt) for param in misfit.params)


@fact
def elementwise_states(ckpt: Checkpoint) -> list[OptimizerState]:
    """The states that must have exactly one element per element of their parameter.

    Excluded are scalars, states with other names (factored, per row), and quantised states, recognised by dtype or by
    a companion state of the same parameter (`*_absmax`, `*scale*`, `codes`).
    """
    states = inventory_of(ckpt).states
    quantised = {param for state in states if _COMPANION.search(state.what) for param in state.params}
    return [
        state
        for state in states
        if state.params
        and state.what in MOMENTS
        and state.tensor.volume > 1
        and _is_plain(state.tensor.dtype)
        and all(_is_plain(p.tensor.dtype) or p.tensor.dtype.startswith("float8") for p in state.params)
        and all(p.tensor.volume > 0 for p in state.params)
        and not quantised.intersection(state.params)
    ]


class MomentPair(NamedTuple):
    """The two moments of one parameter."""

    param: Param
    first: OptimizerState
    second: OptimizerState

    @property
    def differs(self) -> bool:
        """Whether the two have different shapes."""
        return self.first.tensor.global_shape != self.second.tensor.global_shape


@fact
def moment_pairs(ckpt: Checkpoint) -> list[MomentPair]:
    """exp_avg and exp_avg_sq of every parameter that has both as elementwise states of the right size."""
    left_out = mismatched_params(ckpt)
    by_param: dict[tuple[Param, tuple[str, ...]], dict[str, OptimizerState]] = defaultdict(dict)
    for state in elementwise_states(ckpt):
        if state.param is not None and state.what in PAIR and state.param not in left_out:
            by_param[state.param, state.chain].setdefault(state.what, state)
    return [MomentPair(param, *(of[what] for what in PAIR)) for (param, _), of in by_param.items() if len(of) == 2]


def same_chunks(a: Tiling, b: Tiling) -> bool:
    """Whether the live chunks of two tilings are the same boxes, in whatever order."""
    if a is b:
        return True
    left, right = (np.concatenate([x.offsets[x.live], x.sizes[x.live]], axis=1) for x in (a, b))
    if left.shape != right.shape:
        return False
    order_left, order_right = (np.lexsort(rows.T[::-1]) if rows.shape[1] else slice(None) for rows in (left, right))
    return bool((left[order_left] == right[order_right]).all())


def is_whole(tiling: Tiling) -> bool:
    """Whether the chunks cover the tensor exactly once, so that no GEO rule applies."""
    return tiling.is_grid or not (len(tiling.outside) or tiling.duplicates or tiling.coverage != Coverage())


def _is_plain(dtype: str) -> bool:
    return dtype in ITEM_BITS and not dtype.startswith(_NO_FLOAT)


def _peer(state: OptimizerState) -> tuple[tuple[int, ...], str]:
    return state.params[0].tensor.global_shape, state.what


def _is_one_chunk(state: Tensor, param: Tensor) -> bool:
    sizes = param.tiling.sizes[param.tiling.live]
    return len(sizes) > 1 and bool((sizes.prod(axis=1) == state.volume).any())


def _rank(state: OptimizerState) -> int | None:
    """Size of the state on the only axis on which it differs from its parameter; None where several differ."""
    sizes, expected = state.tensor.global_shape, state.param.tensor.global_shape if state.param is not None else ()
    if not len(sizes) == len(expected) == 2:
        return None
    differing = [a for a, b in zip(sizes, expected, strict=True) if a != b]
    return differing[0] if len(differing) == 1 else None


def _projected(odd: Iterable[OptimizerState]) -> int | None:
    """The projection rank of a low-rank optimizer (GaLore): one size for one axis of all states; None without one."""
    extents: dict[int | None, set[Fraction]] = defaultdict(set)
    for state in odd:
        rank = _rank(state)
        extents[rank].add(Fraction(state.tensor.volume, sum(param.tensor.volume for param in state.params)))
    ranks = [rank for rank in extents if rank is not None]
    # One size alone also fits a mesh axis. Only parameters of different sizes (several quotients) with states of one
    # size show a projection.
    return ranks[0] if len(ranks) == 1 and len(extents[ranks[0]]) > 1 else None


def _axes(ckpt: Checkpoint, quotient: Fraction) -> list[tuple[str, str]]:
    """Names and sources of the mesh axes whose size is the quotient or its inverse."""
    if 1 not in (quotient.numerator, quotient.denominator):
        return []
    factor = max(quotient.numerator, quotient.denominator)
    sizes = trusted_topology(ckpt)
    known = {axis: sizes[axis] for axis in AXES if axis != "vpp" and axis in sizes}
    return [(axis, size.source) for axis, size in known.items() if size.size == factor]
