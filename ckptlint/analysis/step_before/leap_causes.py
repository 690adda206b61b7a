"""What leapt chunks have become, in words; and whether weights and moments leapt together."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from ckptlint.analysis.layers.odd_ones import param_keys
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.step_before.leaps import Leap, keys_of, leapt_moments, leapt_weights, ranks_of, tensor_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.model import ChangeTable, Checkpoint, Origin
from ckptlint.model.facts import fact
from ckptlint.model.text import plural
from ckptlint.model.tiling import distinct
from ckptlint.numerics.origins import LEAST_ELEMENTS
from ckptlint.rule import NotApplicable
from ckptlint.vocabulary.keys import Key, parse

_MANY = 0.75  # share of the chunks looked at that have to hold the same kind of thing
_ALIKE = 1.2  # ratio up to which scales are one
_MOST = 0.5  # share of their parameters that weights and moments must have in common to have leapt together


class Exchange(NamedTuple):
    """Who holds what.

    Attributes:
        noun: `expert`, `layer`, `rank`, or "" for tensors with names of their own.
        now: who holds it; was: whose it was in the step before.
        where: ` of layer 2` for experts, ` in 3 of 9 tensors` for ranks, or for experts of which others did not leap.
    """

    noun: str
    now: str
    was: str
    where: str = ""


def cause_of(ckpt: Checkpoint, table: ChangeTable, leap: Leap, what: str) -> str:
    """What leapt chunks (`weights`, `moments`, or both) are, as a sentence; "" where many are not known."""
    rows = [row for row in leap.rows.tolist() if row in table.origins]
    # few updates change a first moment so much that it is like nothing of the step before
    rows = [row for row in rows if table.follows[table.follow[row]].kind != "first"] or rows
    kinds = Counter(table.origins[row].kind for row in rows)
    kind, count = max(kinds.items(), key=lambda item: item[1], default=("unknown", 0))
    if kind == "unknown" or count < _MANY * len(rows):
        return ""
    of_kind = [row for row in rows if table.origins[row].kind == kind]
    sentence = _sentence(ckpt, table, leap, of_kind, what)
    return sentence and sentence + ("" if count == len(rows) else f", in {count:,} of {len(rows):,} chunks looked at")


def _sentence(ckpt: Checkpoint, table: ChangeTable, leap: Leap, rows: list[int], what: str) -> str:
    """What chunks with one kind of origin are; "" where their scales differ."""
    kind, older = table.origins[rows[0]].kind, older_name(ckpt)
    if kind == "other tensor":
        return _exchanged(_between_tensors(ckpt, table, leap, rows), what, older)
    if kind == "other chunk":
        between = _between_experts(ckpt, table, leap, rows) or _between_ranks(ckpt, table, leap, rows)
        return _exchanged(between, what, older)
    if kind == "scaled":
        scales = sorted(table.origins[row].scale for row in rows)
        scale = scales[len(scales) // 2]
        if scales[0] * scales[-1] < 0 or max(map(abs, scales)) > _ALIKE * min(map(abs, scales)):
            return ""
        times = "the negative of" if -_ALIKE < scale < -1 / _ALIKE else f"{scale:.3g} times"
        return f"the {what} of {leap.title} are {times} those of {older}"
    if kind == "transposed":
        return f"the {what} of {leap.title} are those of {older} transposed"
    return f"the {what} of {leap.title} have their {kind} in another order than in {older}"


@fact
def moments_that_leapt_along(ckpt: Checkpoint) -> Leap | None:
    """The moments that leapt with the weights, of the same parameters and the same rank; None where others did."""
    (weights, _), moments = leapt_weights(ckpt), None
    with suppress(NotApplicable):
        moments = leapt_moments(ckpt)
    if ckpt.changes is None or weights is None or moments is None or weights.rank != moments.rank:
        return None
    both = set(keys_of(ckpt.changes, weights.rows)), params_of(ckpt, moments)
    return moments if len(both[0] & both[1]) > _MOST * max(map(len, both)) else None


def params_of(ckpt: Checkpoint, leap: Leap) -> set[str]:
    """The keys of the parameters whose moments leapt."""
    assert ckpt.changes is not None
    keys = {*keys_of(ckpt.changes, leap.rows)}
    states = inventory_of(ckpt).states
    return {state.param.tensor.fqn for state in states if state.tensor.fqn in keys and state.param is not None}


def copied_from_here(table: ChangeTable, leap: Leap) -> tuple[str, ...]:
    """The keys of a leap that hold another tensor's numbers, which that tensor still has."""
    pairs = {(table.follows[table.follow[row]].key, table.origins.get(row, Origin()).key) for row in leap.rows.tolist()}
    leapt = {key for key, _ in pairs}
    return tuple(sorted({key for key, source in pairs if source and source not in leapt}))


def _between_tensors(ckpt: Checkpoint, table: ChangeTable, leap: Leap, rows: list[int]) -> list[Exchange]:
    """Between experts or layers, of which most tensors leapt; else between the tensors."""
    keys = param_keys(ckpt)
    exchanges = []
    for row in rows:
        now, was = table.follows[table.follow[row]].key, table.origins[row].key
        key_now, key_was = keys.get(now, parse(now)), keys.get(was, parse(was))
        exchange = Exchange("", now, was)
        if (key_now.role, key_now.scope) == (key_was.role, key_was.scope) and key_now.layer is not None:
            if key_now.layer == key_was.layer and key_now.expert != key_was.expert:
                exchange = Exchange("expert", str(key_now.expert), str(key_was.expert), f" of layer {key_now.layer}")
            elif key_now.layer != key_was.layer and key_now.expert == key_was.expert:
                exchange = Exchange("layer", str(key_now.layer), str(key_was.layer))
        if exchange.noun and not _is_most(ckpt, table, leap, key_now, exchange.noun):
            exchange = Exchange("", now, was)
        exchanges.append(exchange)
    return exchanges


def _is_most(ckpt: Checkpoint, table: ChangeTable, leap: Leap, param: Key, noun: str) -> bool:
    """Whether most of the tensors of the layer, or of its expert, that a parameter is of are among those that leapt."""
    keys, width = param_keys(ckpt), 3 if noun == "expert" else 2
    unit = (param.scope, param.layer, param.expert)[:width]
    leapt = {*table.follow[leap.rows].tolist()}
    kinds = {table.follows[follow].kind for follow in leapt}
    members = set[int]()
    for number in distinct(table.follow[table.drawn >= LEAST_ELEMENTS]).tolist():
        follow = table.follows[number]
        key = keys.get(follow.key, parse(follow.key))
        if follow.kind in kinds and (key.scope, key.layer, key.expert)[:width] == unit:
            members.add(number)
    return len(members & leapt) > _MOST * len(members)


def _between_experts(ckpt: Checkpoint, table: ChangeTable, leap: Leap, rows: list[int]) -> list[Exchange]:
    """Between experts that are stacked in one tensor, each in chunks of its own; none where chunks are other parts."""
    inventory, exchanges = inventory_of(ckpt), []
    params = {param.tensor.fqn: param for param in inventory.params}
    params |= {state.tensor.fqn: state.param for state in inventory.states if state.param is not None}
    leapt = {*keys_of(table, leap.rows)}
    kinds = {table.follows[follow].kind for follow in table.follow[leap.rows].tolist()}
    keys = (follow.key for follow in table.follows if follow.kind in kinds and follow.key in params)
    stacked = {key: params[key] for key in keys if params[key].expert_axis is not None}
    for row in rows:
        tensor = tensor_of(ckpt, table, int(table.follow[row]))
        now, was = (tensor.tiling.box(chunk) for chunk in (int(table.chunk[row]), table.origins[row].chunk))
        param, places = params.get(tensor.fqn), [*zip(now.offsets, was.offsets, strict=True)]
        axes = [axis for axis, (offset_now, offset_was) in enumerate(places) if offset_now != offset_was]
        if param is None or axes != [param.expert_axis] or now.sizes[axes[0]] != 1:
            return []
        layer = param.key.layer if param.layer_axis is None else now.offsets[param.layer_axis]
        home = param.key.scope, param.key.layer
        alike = {key for key, of in stacked.items() if (of.key.scope, of.key.layer) == home}
        is_most = layer is not None and len(alike & leapt) > _MOST * len(alike)
        where = f" of layer {layer}" if is_most else f" in {leap.title}"
        exchanges.append(Exchange("expert", str(now.offsets[axes[0]]), str(was.offsets[axes[0]]), where))
    return exchanges


def _between_ranks(ckpt: Checkpoint, table: ChangeTable, leap: Leap, rows: list[int]) -> list[Exchange]:
    ranks = ranks_of(ckpt, table)
    rank_of = dict(zip(zip(table.follow.tolist(), table.chunk.tolist(), strict=True), ranks.tolist(), strict=True))
    pairs = [(int(ranks[row]), rank_of.get((int(table.follow[row]), table.origins[row].chunk), -1)) for row in rows]
    if any(-1 in pair or pair[0] == pair[1] for pair in pairs):
        return [Exchange("", leap.title, "other parts")]
    where = "" if leap.title.startswith("rank ") else f" in {leap.title}"
    return [Exchange("rank", str(now), str(was), where) for now, was in pairs]


def _exchanged(exchanges: list[Exchange], what: str, older: str) -> str:
    """Exchanges as a sentence; those of one expert, layer or rank are one."""
    each = list(dict.fromkeys(exchanges))
    first, rest = each[0], {*each[1:]}
    back = Exchange(first.noun, first.was, first.now, first.where)
    if rest <= {back}:
        noun, nouns = (f"{first.noun} ", f"{first.noun}s ") if first.noun else ("", "")
        if rest:
            low, high = sorted((first.now, first.was), key=lambda name: (len(name), name))
            return f"the {what} of {nouns}{low} and {high}{first.where} are exchanged since {older}"
        return f"the {what} of {noun}{first.now}{first.where} are those of {noun}{first.was} in {older}"
    sentence = _exchanged([first], what, older)
    others = plural(len({exchange.now for exchange in rest} - {first.now}), f"other {first.noun or 'tensor'}", "holds")
    return f"{sentence}, and {others} another one's too"
