"""Which tensors of two sides hold the same: by name, by known renamings, then by content whatever they are called."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from ckptlint.analysis.same_values.facts import Match, Side
from ckptlint.analysis.same_values.orders import order_of, role_of
from ckptlint.seals.digests import MASK
from ckptlint.seals.words import can_be_rounded, digest, matrix, multiset
from ckptlint.vocabulary.keys import parse, role

Sides = Mapping[str, Side]

_MOST_PARTS = 4  # roles that are put together into one tensor, such as query, key, value and a gate
_MOST_ROLES = 16  # of one layer, of which any few are tried
_NUMBER = re.compile(r"\d+")


def matches(old: Sides, new: Sides, renamed: Mapping[str, str]) -> list[Match]:
    """What each tensor of both sides has to do with those of the other.

    Args:
        renamed: key of the old side -> key of the new one that is known to mean the same.
    """
    found = [_pair(side, new[name]) for name, side in old.items() if name in new]
    left_old = {name: side for name, side in old.items() if name not in new}
    left_new = {name: side for name, side in new.items() if name not in old}
    known = {name: other for name, other in renamed.items() if name in left_old and other in left_new}
    # between conventions rows may be ordered otherwise: what is not equal is looked for by content before it differs
    by_name = [match for name, other in known.items() if (match := _pair(left_old[name], left_new[other])).is_proven]
    by_content = _by_content(_without(left_old, by_name), _without(left_new, by_name))
    told = [*by_name, *by_content]
    left_old, left_new = _without(left_old, told), _without(left_new, told)
    differing = [
        _pair(left_old[name], left_new[other])
        for name, other in known.items()
        if name in left_old and other in left_new
    ]
    left_old, left_new = _without(left_old, differing), _without(left_new, differing)
    alone = [Match("absent" if side.is_read else "unread", (name,), (), False) for name, side in left_old.items()]
    alone += [Match("absent" if side.is_read else "unread", (), (name,), False) for name, side in left_new.items()]
    return _under_right_names(_in_one_order([*found, *told, *differing, *alone]))


def _without(sides: Sides, told: Iterable[Match]) -> dict[str, Side]:
    """The tensors that no match names."""
    gone = {name for match in told for name in (*match.old, *match.new)}
    return {name: side for name, side in sides.items() if name not in gone}


def common(first: Side, second: Side) -> str:
    """The dtype in which both can be compared, "" where there is none."""
    if first.dtype == second.dtype:
        return first.dtype
    for wide, narrow in ((first, second), (second, first)):
        if can_be_rounded(wide.dtype, narrow.dtype) and narrow.dtype in wide.words:
            return narrow.dtype
    return ""


def _pair(old: Side, new: Side) -> Match:
    """Two tensors that the names say are one."""
    names = (old.fqn,), (new.fqn,)
    if not (old.is_read and new.is_read):
        return Match("unread", *names, False)
    dtype = common(old, new)
    if not dtype:
        return Match("differ", *names, False, f"{old.dtype} and {new.dtype}: no rounding leads from one to the other")
    a, b = old.words[dtype], new.words[dtype]
    if matrix(a.shape) == matrix(b.shape) and np.array_equal(a.rows, b.rows):
        is_renamed = old.fqn != new.fqn
        if old.dtype != new.dtype:
            return Match("rounded", *names, True, f"{old.dtype} -> {new.dtype}")
        return Match("renamed" if is_renamed else "equal", *names, True)
    if _may_be_padded(old) and _may_be_padded(new) and a.shape[1:] == b.shape[1:] and len(a.rows) != len(b.rows):
        few = min(len(a.rows), len(b.rows))
        if np.array_equal(a.rows[:few], b.rows[:few]):
            more = f"{abs(len(a.rows) - len(b.rows)):,} more rows in the {'new' if len(b.rows) > few else 'old'} one"
            return Match("padded", *names, old.fqn != new.fqn, more)
    return Match("differ", *names, False)


def _may_be_padded(side: Side) -> bool:
    """Whether it is a matrix outside of the layers, as embeddings and heads of a vocabulary are."""
    key = parse(side.fqn)
    return len(side.shape) == 2 and key.layer is None and not key.is_stacked


# ---------------------------------------------------------------- by content


def _by_content(old: Sides, new: Sides) -> Iterator[Match]:
    """The tensors that no name pairs; each is told once."""
    old = {name: side for name, side in old.items() if side.is_read}
    new = {name: side for name, side in new.items() if side.is_read}
    for find in (_same, _turned, _put_together, _taken_apart, _in_other_order, _longer):
        told = list(find(old, new))
        yield from told
        old, new = _without(old, told), _without(new, told)


def _same(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors with the same rows in the same order; of several with one content as many as the other side has."""
    where: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, side in new.items():
        for dtype, words in side.words.items():
            where[dtype, matrix(words.shape), digest(words.rows)].append(name)
    wanted: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, side in old.items():
        for dtype, words in side.words.items():
            place = dtype, matrix(words.shape), digest(words.rows)
            if any(common(side, new[other]) == dtype for other in where.get(place, ())):
                wanted[place].append(name)
    taken: set[str] = set()
    for key, names in wanted.items():
        names = [name for name in names if name not in taken]
        others = [other for other in where[key] if f"new {other}" not in taken]
        if any(old[name].is_dull for name in names) and len(names) != len(others):
            continue  # constant and tiny tensors fit anywhere
        for name, other in zip(sorted(names, key=_order), sorted(others, key=_order), strict=False):
            taken |= {name, f"new {other}"}
            a, b = old[name], new[other]
            if a.dtype != b.dtype:
                yield Match("rounded", (name,), (other,), True, f"{a.dtype} -> {b.dtype}")
            else:
                yield Match("renamed", (name,), (other,), True)


def _order(name: str) -> tuple[list[int], str]:
    return [int(number) for number in _NUMBER.findall(name)], name


def _turned(old: Sides, new: Sides) -> Iterator[Match]:
    """Matrices of which one is the other's transpose."""
    where: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, side in new.items():
        for dtype, words in side.words.items():
            if len(words.columns) == 1 and not side.is_dull:
                where[dtype, digest(words.columns[0])].append(name)
    for name, side in old.items():
        for dtype, words in side.words.items():
            others = where.get((dtype, digest(words.rows)), []) if len(words.columns) == 1 else []
            fitting = [other for other in others if common(side, new[other]) == dtype]
            if fitting and not side.is_dull:
                others.remove(fitting[0])
                yield Match("transposed", (name,), (fitting[0],), True)
                break


def _put_together(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors of the new side that hold all rows of several old ones."""
    yield from _joined(old, new, "joined")


def _taken_apart(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors of the old side whose rows several new ones hold."""
    for match in _joined(new, old, "split"):
        yield Match("split", match.new, match.old, match.is_proven, match.what, match.notes)


def _joined(parts: Sides, wholes: Sides, relation: str) -> Iterator[Match]:
    groups: dict[tuple[object, ...], dict[str, list[Side]]] = defaultdict(lambda: defaultdict(list))
    for side in parts.values():
        for dtype in side.words:
            for expert in {None, parse(side.fqn).expert}:
                groups[_layer(side.fqn), expert, dtype, side.columns][role(side.fqn)].append(side)
    gone: set[str] = set()
    for whole in wholes.values():
        if whole.is_dull:
            continue
        for dtype, words in whole.words.items():
            roles = groups.get((_layer(whole.fqn), parse(whole.fqn).expert, dtype, whole.columns), {})
            rows, wanted = len(words.rows), multiset(words.rows)
            found = next(_adding_up(roles, whole, dtype, rows, wanted, gone), None)
            if found is not None:
                gone |= {side.fqn for side in found}
                order = order_of([(side.fqn, side.words[dtype].rows) for side in found], words.rows)
                names = tuple(side.fqn for side in found)
                yield Match("joined", names, (whole.fqn,), order.is_known, order.text, order.notes)
                break


def _adding_up(
    roles: Mapping[str, list[Side]], whole: Side, dtype: str, rows: int, wanted: int, gone: Collection[str]
) -> Iterator[list[Side]]:
    """The parts of a few roles that have so many rows together, and the same ones."""
    sums = []
    for members in roles.values():
        own = [side for side in members if side.fqn not in gone and common(side, whole) == dtype]
        if own:
            count = sum(len(side.words[dtype].rows) for side in own)
            sums.append((own, count, sum(multiset(side.words[dtype].rows) for side in own) & MASK))
    for number in range(1, min(_MOST_PARTS, len(sums)) + 1):
        for some in combinations(sums[:_MOST_ROLES], number):
            is_several = number > 1 or len(some[0][0]) > 1
            if is_several and sum(item[1] for item in some) == rows and sum(item[2] for item in some) & MASK == wanted:
                yield [side for item in some for side in sorted(item[0], key=lambda side: _order(side.fqn))]


def _in_other_order(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors with the same rows, in another order."""
    where: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, side in new.items():
        for dtype, words in side.words.items():
            if not side.is_dull:
                where[dtype, side.columns, len(words.rows), multiset(words.rows)].append(name)
    for name, side in old.items():
        for dtype, words in side.words.items():
            others = where.get((dtype, side.columns, len(words.rows), multiset(words.rows)), [])
            fitting = [other for other in others if common(side, new[other]) == dtype]
            if fitting and not side.is_dull:
                others.remove(fitting[0])
                order = order_of([(name, words.rows)], new[fitting[0]].words[dtype].rows)
                yield Match("reordered", (name,), (fitting[0],), order.is_known, order.text, order.notes)
                break


def _longer(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors of which one has the rows of the other and more after them: a padded vocabulary."""
    taken: set[str] = set()
    for side in old.values():
        for other in new.values():
            if other.fqn in taken or side.is_dull or other.is_dull or side.columns != other.columns:
                continue
            match = _pair(side, other)
            if match.relation == "padded":
                taken.add(other.fqn)
                yield match
                break


def _layer(name: str) -> int | None:
    """The number of the layer in a name, None without one."""
    layer = parse(name).layer
    return layer if isinstance(layer, int) else next((int(number) for number in _NUMBER.findall(name)), None)


# ---------------------------------------------------------------- the whole


def _in_one_order(found: Iterable[Match]) -> list[Match]:
    """The matches; an order is proven where all layers have the same one."""
    told = list(found)
    orders: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for match in told:
        orders[_kind(match)].add(match.what)
    return [
        replace(match, is_proven=False, notes=(*match.notes, "other layers have another order"))
        if match.relation in ("joined", "split", "reordered") and len(orders[_kind(match)]) > 1
        else match
        for match in told
    ]


def _kind(match: Match) -> tuple[str, ...]:
    """What the matches of all layers share."""
    return match.relation, *dict.fromkeys(map(role, match.old)), "", *dict.fromkeys(map(role, match.new))


def _under_right_names(found: Sequence[Match]) -> list[Match]:
    """The matches; what lies under the name of another weight, as names or the other layers say, is no conversion.

    Values are paired whatever they are called. So a key and a value projection that were exchanged, or two layers, make
    a pair each; their names tell that they are no conversion.
    """
    alone = [match for match in found if match.is_proven and match.old != match.new and match.old and match.new]
    layers = Counter(distance for match in alone if (distance := _distance(match)) is not None)
    usual = layers.most_common(1)[0][0] if layers else 0
    roles: dict[tuple[str, ...], Counter[tuple[str, ...]]] = defaultdict(Counter)
    for match in alone:
        roles[_roles(match.old)][_roles(match.new)] += 1
    made = []
    for match in found:
        if match.is_proven and match.old != match.new and match.old and match.new:
            (most, count), *others = roles[_roles(match.old)].most_common(2)
            is_odd = _roles(match.new) != most or (others and others[0][1] == count)
            if is_odd or _distance(match) not in (None, usual) or not _may_be_one(match):
                match = replace(match, relation="exchanged", is_proven=False)
        made.append(match)
    return made


def _distance(match: Match) -> int | None:
    """By how much the numbers of the layers differ, None outside of them; experts have the same number."""
    old, new = ({parse(name).layer for name in names} for names in (match.old, match.new))
    experts = [{parse(name).expert for name in names} for names in (match.old, match.new)]
    if len(experts[0]) == len(experts[1]) == 1 and None not in experts[0] | experts[1] and experts[0] != experts[1]:
        return _FAR
    if len(old) != 1 or len(new) != 1 or None in old | new:
        return None
    return (new.pop() or 0) - (old.pop() or 0)


_FAR = 2**62  # no distance of layers


def _roles(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(role, names)))


def _may_be_one(match: Match) -> bool:
    """Whether the names of one tensor on each side may mean the same: no embedding is a head, no key a value."""
    if len(match.old) != 1 or len(match.new) != 1:
        return True
    for said in (role_of, lambda name: parse(name).function):
        old, new = said(match.old[0]), said(match.new[0])
        if old in _DISTINCT and new in _DISTINCT and old != new:
            return False
    return True


_DISTINCT = frozenset({"q", "k", "v", "gate", "up", "embedding", "output"})
