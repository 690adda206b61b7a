"""Operators that damage the later of two steps, whatever the layouts of both; and healthy changes of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from damages import MOMENTS, Save, Values, rounded

from ckptlint.vocabulary.keys import MASTER_COPIES

Place = tuple[str, str]
"""Path of a parameter, and the name of a state, "" for the weight."""


class Pair(NamedTuple):
    """Two steps of a run.

    Attributes:
        now: the later one, which an operator changes.
        was: what the one before holds, whole.
        rows: the chunks of `now` of each tensor; of a weight with a master copy those of the copy.
        rounded: pairs of chunks, of a master copy and of the weight that is rounded from it.
        layout: of `now`.
    """

    now: Save
    was: dict[Place, Values]
    rows: dict[Place, list[int]]
    rounded: list[tuple[int, int]]
    layout: str


STACKED = "experts.experts."
"""What stands in Megatron's name of a tensor whose first axis is the experts."""
Damage = Callable[[Pair, random.Random], str]


class Operator(NamedTuple):
    """A damage.

    Attributes:
        codes: of which exactly one has to tell it.
        words: that its sentence has to hold, a regular expression; "" where nothing more can be known.
    """

    damage: Damage
    codes: frozenset[str]
    words: str


OPERATORS: dict[str, Operator] = {}


def operator(codes: str, words: str = "") -> Callable[[Damage], Damage]:
    def add(damage: Damage) -> Damage:
        OPERATORS[damage.__name__] = Operator(damage, frozenset(codes.split()), words)
        return damage

    return add


def pair_of(now: Save, was: Save, layout: str) -> Pair:
    older = rows_of(was)
    masters = {(now.chunks[row].param, now.chunks[row].box): row for state in MASTER_COPIES for row in now.rows(state)}
    weights = [(masters.get((now.chunks[row].param, now.chunks[row].box), row), row) for row in now.rows("")]
    pairs = [(master, row) for master, row in weights if master != row]
    return Pair(now, {place: whole(was, older[place]) for place in older}, rows_of(now), pairs, layout)


def rows_of(save: Save) -> dict[Place, list[int]]:
    """The chunks of each weight, or of its master copy, and of each moment."""
    rows: dict[Place, list[int]] = defaultdict(list)
    with_master = {save.chunks[row].param for state in MASTER_COPIES for row in save.rows(state)}
    for row, chunk in enumerate(save.chunks):
        state = "" if chunk.state in MASTER_COPIES else chunk.state
        if chunk.key is not None and state in ("", *MOMENTS) and (chunk.state or chunk.param not in with_master):
            rows[chunk.param.removeprefix("model."), state].append(row)
    return rows


def round_masters(pair: Pair) -> None:
    """Make the weights those of their master copies, where these changed."""
    for master, row in pair.rounded:
        if not np.array_equal(pair.now.values[master], pair.now.before[master]):
            pair.now.values[row] = pair.now.values[master].copy()


def whole(save: Save, rows: list[int]) -> Values:
    boxes = [save.chunks[row].box for row in rows]
    made = np.full(np.max([box.ends for box in boxes], axis=0), np.nan)
    for row, box in zip(rows, boxes, strict=True):
        made[inside(box)] = save.values[row].reshape(box.sizes)
    assert np.isfinite(made).all()
    return made


def inside(box: object) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in zip(box.offsets, box.ends, strict=True))  # type: ignore[attr-defined]


def now_of(pair: Pair, place: Place) -> Values:
    return whole(pair.now, pair.rows[place])


def put(pair: Pair, place: Place, made: Values, rank: int | None = None) -> None:
    """Write a tensor, or one rank's chunks of it."""
    for row in pair.rows[place]:
        if rank in (None, pair.now.chunks[row].rank):
            pair.now.values[row] = np.float32(made[inside(pair.now.chunks[row].box)]).astype(np.float64).reshape(-1)


def exchange(pair: Pair, one: Place, other: Place) -> None:
    held = now_of(pair, one), now_of(pair, other)
    put(pair, one, held[1])
    put(pair, other, held[0])


def matrices(pair: Pair, least: int = 16) -> list[str]:
    """The weights with two axes of 16 or more."""
    return sorted(name for name, state in pair.rows if not state and min(pair.was[name, ""].shape, default=0) >= least
                  and pair.was[name, ""].ndim == 2)  # fmt: skip


def squares(pair: Pair) -> list[str]:
    return [name for name in matrices(pair) if len(set(pair.was[name, ""].shape)) == 1]


def a_rank(pair: Pair, draw: random.Random) -> int:
    """A rank that saved chunks of tensors which others saved chunks of too, -1 for none."""
    ranks = set[int]()
    for rows in pair.rows.values():
        of = {pair.now.chunks[row].rank for row in rows}
        ranks |= of if len(of) > 1 else set()
    return draw.choice(sorted(ranks - {-1})) if ranks - {-1} else -1


def noise(draw: random.Random, like: Values) -> Values:
    return np.random.default_rng(draw.randrange(1 << 30)).normal(0, like.std(), like.shape)


# ---------------------------------------------------------------- parts that stayed behind


def stale(pair: Pair, draw: random.Random, *states: str) -> str:
    if (rank := a_rank(pair, draw)) < 0:
        return ""
    for place in pair.rows:
        if place[1] in states:
            put(pair, place, pair.was[place], rank)
    for master, row in pair.rounded if "" in states else ():  # the master copy may be in the file of another rank
        chunk = pair.now.chunks[row]
        if chunk.rank == rank and pair.now.chunks[master].rank != rank:
            was = pair.was[chunk.param.removeprefix("model."), ""]
            pair.now.values[row] = np.float32(was[inside(chunk.box)]).astype(np.float64).reshape(-1)
    return f"rank {rank}"


@operator("RUN009", r"the weights (and states )?of rank \d are those of")
def stale_weights_of_a_rank(pair: Pair, draw: random.Random) -> str:
    return stale(pair, draw, "")


@operator("RUN009", r"moments of rank \d are those of")
def stale_moments_of_a_rank(pair: Pair, draw: random.Random) -> str:
    return stale(pair, draw, *MOMENTS)


@operator("RUN009", r"the weights and first moments and second moments (and states )?of rank \d are those of")
def stale_rank(pair: Pair, draw: random.Random) -> str:
    return stale(pair, draw, "", *MOMENTS)


@operator("RUN009", "all moments are those of")
def stale_moments(pair: Pair, draw: random.Random) -> str:
    for place in pair.rows:
        if place[1]:
            put(pair, place, pair.was[place])
    return "all"


# ---------------------------------------------------------------- parts in each other's place


@operator("RUN007", "ranks? .* (are exchanged|are those of)")
def chunks_exchanged_between_ranks(pair: Pair, draw: random.Random) -> str:
    for name in draw.sample(matrices(pair), len(matrices(pair))):
        rows = [row for row in pair.rows[name, ""] if pair.now.chunks[row].elements >= 64]
        if len(rows) > 1:
            one, other = draw.sample(rows, 2)
            values = pair.now.values
            if len(values[one]) == len(values[other]):
                values[one], values[other] = values[other], values[one]
                return name
    return ""


def experts_exchanged(pair: Pair, draw: random.Random, *states: str) -> str:
    names = sorted({name.partition(".experts.")[0] for name, _ in pair.rows if ".experts." in name})
    if not names:
        return ""
    stem, (one, other) = draw.choice(names), draw.sample(range(3), 2)
    for name, state in pair.rows:
        if name.startswith(f"{stem}.{STACKED}") and state in states:
            values = now_of(pair, (name, state))
            values[[one, other]] = values[[other, one]]
            put(pair, (name, state), values)
        if name.startswith(f"{stem}.experts.{one}.") and state in states:
            there = name.replace(f".experts.{one}.", f".experts.{other}.")
            exchange(pair, (name, state), (there, state))
    return f"{stem} {one} {other}"


@operator("RUN007", r"the weights of experts \d and \d of layer \d are exchanged")
def weights_of_experts_exchanged(pair: Pair, draw: random.Random) -> str:
    return experts_exchanged(pair, draw, "")


@operator("RUN007", r"the weights and moments of experts \d and \d of layer \d are exchanged")
def experts_exchanged_with_moments(pair: Pair, draw: random.Random) -> str:
    return experts_exchanged(pair, draw, "", *MOMENTS)


@operator("RUN008", r"the moments of experts \d and \d of layer \d are exchanged")
def moments_of_experts_exchanged(pair: Pair, draw: random.Random) -> str:
    return experts_exchanged(pair, draw, *MOMENTS)


def layers_exchanged(pair: Pair, draw: random.Random, *states: str) -> str:
    """Two layers with the same tensors."""
    members: dict[str, set[str]] = defaultdict(set)
    for name, _ in pair.rows:
        stem, _, rest = name.partition("layers.")
        if rest:
            members[f"{stem}layers.{rest.partition('.')[0]}"].add(rest.partition(".")[2])
    pairs = [(a, b) for a in members for b in members if a < b and members[a] == members[b]]
    one, other = draw.choice(pairs)
    for state in states:
        for name in members[one]:
            exchange(pair, (f"{one}.{name}", state), (f"{other}.{name}", state))
    return f"{one} {other}"


@operator("RUN007", r"the weights and moments of layers \d and \d are exchanged")
def layers_exchanged_with_moments(pair: Pair, draw: random.Random) -> str:
    return layers_exchanged(pair, draw, "", *MOMENTS)


@operator("RUN007", r"the weights of layers \d and \d are exchanged")
def weights_of_layers_exchanged(pair: Pair, draw: random.Random) -> str:
    return layers_exchanged(pair, draw, "")


@operator("RUN008")  # first moments of few updates are like nothing of the step before
def moments_of_layers_exchanged(pair: Pair, draw: random.Random) -> str:
    return layers_exchanged(pair, draw, *MOMENTS)


@operator("RUN007", r"the weights of \S+ and \S+ are exchanged")
def keys_and_values_exchanged(pair: Pair, draw: random.Random) -> str:
    names = [name for name, state in pair.rows if "k_proj" in name and not state]
    if not names:
        return ""
    name = draw.choice(names)
    exchange(pair, (name, ""), (name.replace("k_proj", "v_proj"), ""))
    return name


@operator("RUN007 PAY020", "are those of")
def an_expert_of_the_step_before_over_another(pair: Pair, draw: random.Random) -> str:
    names = sorted(name for name, state in pair.rows if f".{STACKED}" in name and not state)
    if names:
        stem = draw.choice(names).partition(STACKED)[0]
        for name in (name for name in names if name.startswith(stem)):
            values = now_of(pair, (name, ""))
            values[0] = pair.was[name, ""][1]
            put(pair, (name, ""), values)
        return stem
    names = sorted(name for name, state in pair.rows if ".experts.0." in name and not state)
    stem = draw.choice(names).partition(".experts.")[0]
    for name in (name for name in names if name.startswith(f"{stem}.")):
        put(pair, (name, ""), pair.was[name.replace(".experts.0.", ".experts.1."), ""])
    return stem


# ---------------------------------------------------------------- one tensor that is another thing


def changed(pair: Pair, name: str, change: Callable[[Values], Values], state: str = "") -> str:
    put(pair, (name, state), change(now_of(pair, (name, state))))
    return name


@operator("RUN007", "transposed")
def a_square_transposed(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(squares(pair)), np.transpose)


def in_one_chunk(pair: Pair, names: list[str]) -> list[str]:
    """Those of which one chunk holds all: of a chunk with a few lines nobody sees that they are of other chunks."""
    return [name for name in names if len(pair.rows[name, ""]) == 1]


@operator("RUN007", "rows in another order")
def rows_shifted(pair: Pair, draw: random.Random) -> str:
    names = in_one_chunk(pair, matrices(pair))
    return changed(pair, draw.choice(names), lambda values: np.roll(values, 1, axis=0)) if names else ""


@operator("RUN007", "columns in another order")
def columns_reversed(pair: Pair, draw: random.Random) -> str:
    names = in_one_chunk(pair, matrices(pair))
    return changed(pair, draw.choice(names), np.fliplr) if names else ""


@operator("RUN007", "rows in another order")
def rows_reversed_in_each_chunk(pair: Pair, draw: random.Random) -> str:
    names = [name for name in matrices(pair) if all(pair.now.chunks[row].box.sizes[1] >= 16
             and pair.now.chunks[row].box.sizes[0] > 1 for row in pair.rows[name, ""])]  # fmt: skip
    if not names:
        return ""
    name = draw.choice(names)
    for row in pair.rows[name, ""]:
        lines = pair.now.values[row].reshape(pair.now.chunks[row].box.sizes)
        pair.now.values[row] = lines[::-1].reshape(-1).copy()
    return name


@operator("RUN007")
def lines_shuffled_over_chunks(pair: Pair, draw: random.Random) -> str:
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    return changed(pair, draw.choice(matrices(pair)), lambda values: numbers.permuted(values, axis=draw.randrange(2)))


@operator("RUN007", r"(3\.9\d?|4(\.[012]\d?)?) times")
def a_tensor_times_4(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(matrices(pair)), lambda values: values * 4)


@operator("RUN007", r"(3\.9\d?|4(\.[012]\d?)?) times")
def all_matrices_times_4(pair: Pair, draw: random.Random) -> str:
    for name in matrices(pair):
        changed(pair, name, lambda values: values * 4)
    return "all"


@operator("RUN007", "the negative of")
def a_sign_flipped(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(matrices(pair)), np.negative)


@operator("RUN007 PAY016", "")
def one_element_of_4(pair: Pair, draw: random.Random) -> str:
    row = draw.choice([row for name in matrices(pair) for row in pair.rows[name, ""]])
    pair.now.values[row][draw.randrange(len(pair.now.values[row]))] = 4.0
    return pair.now.chunks[row].fqn


@operator("RUN007")
def a_tensor_of_another_run(pair: Pair, draw: random.Random) -> str:
    """Another run numbers its hidden units in another order on both sides."""
    numbers = np.random.default_rng(draw.randrange(1 << 30))

    def foreign(values: Values) -> Values:
        return values[numbers.permutation(values.shape[0])][:, numbers.permutation(values.shape[1])]

    return changed(pair, draw.choice(matrices(pair)), foreign)


@operator("RUN007")
def a_tensor_initialised_anew(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(matrices(pair)), lambda values: noise(draw, values))


@operator("RUN007")
def noise_in_a_rank(pair: Pair, draw: random.Random) -> str:
    if (rank := a_rank(pair, draw)) < 0:
        return ""
    for name in matrices(pair):
        values = now_of(pair, (name, ""))
        put(pair, (name, ""), values + noise(draw, values), rank)
    return f"rank {rank}"


@operator("RUN007 PAY015")
def a_tensor_of_zeros(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(matrices(pair)), np.zeros_like)


@operator("RUN007 PAY018")
def weights_of_a_rank_times_4(pair: Pair, draw: random.Random) -> str:
    if (rank := a_rank(pair, draw)) < 0:
        return ""
    for name in matrices(pair):
        put(pair, (name, ""), now_of(pair, (name, "")) * 4, rank)
    return f"rank {rank}"


@operator("PAY017")
def low_bits_lost_in_a_rank(pair: Pair, draw: random.Random) -> str:
    if pair.rounded or (rank := a_rank(pair, draw)) < 0:
        return ""
    for place in pair.rows:
        if not place[1]:
            put(pair, place, rounded(now_of(pair, place)), rank)
    return f"rank {rank}"


# ---------------------------------------------------------------- moments


@operator("OPT011 OPT013 RUN008")
def moments_zeroed_in_a_rank(pair: Pair, draw: random.Random) -> str:
    if (rank := a_rank(pair, draw)) < 0:
        return ""
    for place in pair.rows:
        if place[1]:
            put(pair, place, np.zeros_like(pair.was[place]), rank)
    return f"rank {rank}"


@operator("OPT011 OPT013 RUN008")
def squares_zeroed_in_a_rank(pair: Pair, draw: random.Random) -> str:
    if (rank := a_rank(pair, draw)) < 0:
        return ""
    for place in pair.rows:
        if place[1] == "exp_avg_sq":
            put(pair, place, np.zeros_like(pair.was[place]), rank)
    return f"rank {rank}"


@operator("OPT010 RUN008")
def moments_exchanged_in_a_tensor(pair: Pair, draw: random.Random) -> str:
    name = draw.choice(matrices(pair))
    exchange(pair, (name, "exp_avg"), (name, "exp_avg_sq"))
    return name


@operator("RUN008 OPT011")
def squares_of_a_tensor_shifted(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(matrices(pair)), lambda values: np.roll(values, 1, axis=0), "exp_avg_sq")


@operator("RUN008 OPT011")
def squares_of_a_tensor_tiny(pair: Pair, draw: random.Random) -> str:
    return changed(pair, draw.choice(matrices(pair)), lambda values: values * 1e-3, "exp_avg_sq")


@operator("RUN008 OPT011")
def moments_of_another_run(pair: Pair, draw: random.Random) -> str:
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    name = draw.choice(matrices(pair))
    shape = pair.was[name, ""].shape
    order = numbers.permutation(shape[0])[:, None], numbers.permutation(shape[1])[None]
    for state in MOMENTS:
        changed(pair, name, lambda values: values[order], state)
    return name


# ---------------------------------------------------------------- what is healthy

HEALTHY: dict[str, Damage] = {}


def healthy(change: Damage) -> Damage:
    HEALTHY[change.__name__] = change
    return change


@healthy
def as_it_is(pair: Pair, draw: random.Random) -> str:
    return "all"


@healthy
def a_frozen_tensor(pair: Pair, draw: random.Random) -> str:
    name = draw.choice(matrices(pair))
    for state in ("", *MOMENTS):
        put(pair, (name, state), pair.was[name, state])
    return name


@healthy
def a_frozen_layer(pair: Pair, draw: random.Random) -> str:
    layer = draw.randrange(4)
    for place in pair.rows:
        if f"layers.{layer}." in place[0]:
            put(pair, place, pair.was[place])
    return f"layer {layer}"


@healthy
def an_expert_that_no_token_reached(pair: Pair, draw: random.Random) -> str:
    expert = draw.randrange(3)
    for place in pair.rows:
        if f".{STACKED}" in place[0]:
            values = now_of(pair, place)
            values[expert] = pair.was[place][expert]
            put(pair, place, values)
        elif f".experts.{expert}." in place[0]:
            put(pair, place, pair.was[place])
    return f"expert {expert}"


@healthy
def low_rate(pair: Pair, draw: random.Random) -> str:
    for place in pair.rows:
        if not place[1]:
            put(pair, place, pair.was[place] + (now_of(pair, place) - pair.was[place]) * 1e-3)
    return "all"


@healthy
def one_norm_times_1_005(pair: Pair, draw: random.Random) -> str:
    name = draw.choice(sorted(name for name, state in pair.rows if not state and name.endswith("norm.weight")))
    return changed(pair, name, lambda values: values * 1.005)
