from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.analysis.optimizer.fit import (
    PAIR,
    MomentPair,
    elementwise_states,
    is_whole,
    mismatched_params,
    moment_pairs,
    same_chunks,
)
from ckptlint.analysis.optimizer.inventory import OptimizerState, Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural, shape_text
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Note, Severity, rule

_OTHER = {PAIR[0]: PAIR[1], PAIR[1]: PAIR[0]}
_EXPECTED = frozenset((*PAIR, "max_exp_avg_sq", "step", "param", "fp32_param", "main_param", "master_param"))


@rule("OPT002", "moment-siblings", Severity.ERROR, whole=True)
def moment_siblings(ckpt: Checkpoint) -> Iterator[Finding]:
    """exp_avg and exp_avg_sq of one parameter differ, or one of them is missing.

    What it checks:
        The two have one shape, and neither is stored alone unless the same parameter of other layers has one alone too.
        It is a warning if only the chunks differ and both are whole, or if only other roles show that both belong
        there. If all parameters of a shape or role deviate alike, a different shape is a warning, and different chunks
        or a single moment are info. Parameters that OPT001 reports, holes (GEO004), scalars, factored and quantised
        states are left out.
    Why it matters:
        Both are created and sharded together, so a difference shows that one is wrong, and a resume continues with
        moments of other elements or from zero.
    Usual causes:
        A write stopped midway; a state was transposed; one rank had not created its state yet; one rank's offset
        collided with another's.
    How to fix:
        Save again from the job; without it, reset the state of these parameters.
    See:
        torch.optim.AdamW
    """
    if not any(state.what in PAIR for state in inventory_of(ckpt).states):
        raise NotApplicable("the optimizer keeps neither exp_avg nor exp_avg_sq")
    pairs = moment_pairs(ckpt)
    yield from _shapes(pairs)
    yield from _chunks(pairs)
    if ckpt.is_sound:
        yield from _missing_moments(ckpt)


def _shapes(pairs: list[MomentPair]) -> Iterator[Finding]:
    """Findings on moments of one parameter with different shapes; a warning if all pairs of this shape differ."""
    peers = grouped((pair.param.tensor.global_shape, pair) for pair in pairs)
    for shape, members in peers.items():
        odd = [pair for pair in members if pair.differs]
        # A fault of a rank or a write hits some parameters of a shape. If it hits all of them, the optimizer may keep
        # a factored or projected moment in its own shape, so this is no longer certain.
        pattern = len(odd) == len(members) > 1
        for pair in odd:
            wrong, right = (pair.first, pair.second) if _fits(pair.second, shape) else (pair.second, pair.first)
            has, sibling = shape_text(wrong.tensor.global_shape), shape_text(right.tensor.global_shape)
            agrees = f"; {right.what} agrees with it" if _fits(right, shape) else "; neither agrees with it"
            yield Finding(
                f"moment{{of}} is {has}, but its sibling {right.what} is {sibling}",
                at=Location(wrong.tensor),
                confidence="likely" if pattern else "certain",
                notes=(
                    _parameter(pair.param, agrees),
                    ("chunks", f"{_count(wrong.tensor)} of {wrong.what}, {_count(right.tensor)} of {right.what}"),
                    ("differ", f"{len(odd)} of {len(members)} parameters of this shape"),
                ),
                hint=f"drop {wrong.what} of this parameter or save it again: a resume applies it to other elements",
            )


def _chunks(pairs: list[MomentPair]) -> Iterator[Finding]:
    """Pairs of one shape that are split into different chunks; the GEO rules report holes and overlaps."""
    same = [pair for pair in pairs if not pair.differs]
    split = [pair for pair in same if max(_count(pair.first.tensor), _count(pair.second.tensor)) > 1]
    odd = [pair for pair in split if not same_chunks(pair.first.tensor.tiling, pair.second.tensor.tiling)]
    for pair in odd:
        a, b = pair.first.tensor, pair.second.tensor
        if not (is_whole(a.tiling) and is_whole(b.tiling)):
            continue
        boxes = [tensor.tiling.box(int(tensor.tiling.live.argmax())) for tensor in (a, b)]
        first = f"{PAIR[0]} {boxes[0]}, {PAIR[1]} {boxes[1]}"
        yield Finding(
            f"moment{{of}} is split differently from its sibling {PAIR[0]}: {plural(_count(b), 'chunk')} against "
            f"{_count(a)}",
            at=Location(b),
            # No element is lost, so never an error. All second moments cut alike is how this job wraps them.
            severity=Severity.INFO if len(odd) == len(split) > 1 else Severity.WARNING,
            notes=(_parameter(pair.param, f", {_count(pair.param.tensor)} chunks"), ("first chunks", first)),
            why="both are sharded together, so one of them took a different path; every element is stored",
            hint="compare how the ranks wrapped the two before they wrote them",
        )


def _missing_moments(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on parameters with one of the two moments, while others have both."""
    states_of: dict[Param, set[str]] = defaultdict(set)
    for state in inventory_of(ckpt).states:
        for param in state.params:
            states_of[param].add(state.what)
    known = {(state.param, state.what): state for state in elementwise_states(ckpt) if state.param is not None}
    both: dict[tuple[tuple[str, ...], str], int] = defaultdict(int)
    alone: dict[tuple[tuple[str, ...], str], list[OptimizerState]] = defaultdict(list)
    left_out = mismatched_params(ckpt)
    for param, names in states_of.items():
        group = param.key.scope, param.key.role
        has = [name for name in PAIR if name in names]
        if len(has) == 2:
            both[group] += 1
        # A state that Adam does not have shows another optimizer: Adafactor keeps the second moment of a matrix
        # factored, under names of its own, and that of a vector in full.
        elif len(has) == 1 and names <= _EXPECTED and param not in left_out and (param, has[0]) in known:
            alone[group].append(known[param, has[0]])
    # The best witness is the same parameter of another layer. Without one, most parameters must have both: Lion keeps
    # exp_avg alone.
    is_usual = 2 * sum(both.values()) > len(states_of)
    for group, members in alone.items():
        if not both[group] and not is_usual:
            continue
        confidence: Confidence = "certain" if both[group] else "possible" if len(members) > 1 else "likely"
        shared = sum(both.values())
        peers = f"{shared} of {len(states_of)} parameters with state have both, but none of the role {group[1]}"
        if siblings := both[group]:
            peers = f"{siblings} other parameter{'s' if siblings > 1 else ''} of the role {group[1]} have both"
        for state in members:
            absent = _OTHER[state.what]
            yield Finding(
                f"moment{{of}} is stored without its sibling {absent}",
                at=Location(state.tensor),
                identity=(absent,),
                confidence=confidence,
                notes=(("others", peers),),
                why=f"a strict load fails on the missing key; any other resumes with {absent} at zero",
                hint="save again once every state exists; without the job, reset both moments of this parameter",
                group=f"{group} {absent}",
                inferred_from="the same parameter of other layers" if both[group] else "the other parameters",
            )


def _fits(state: OptimizerState, shape: tuple[int, ...]) -> bool:
    return state.tensor.global_shape == shape


def _count(tensor: Tensor) -> int:
    return int(tensor.tiling.live.sum())


def _parameter(param: Param, more: str) -> Note:
    return "parameter", f"{param.tensor.fqn}: {shape_text(param.tensor.global_shape)}{more}"
