"""Matches tensors of two sides: by name, by known renamings, then by content under any name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np

from ckptlint.comparing.pairs.canonical import Heads, in_one_order
from ckptlint.comparing.values.match import Match, Side, Sides
from ckptlint.model.text import NUMBER
from ckptlint.seals.digests import MASK, Words
from ckptlint.seals.row_hashes import can_be_rounded, digest, matrix, multiset
from ckptlint.vocabulary.keys import layer_number, parse
from ckptlint.vocabulary.namings import StoredRoles, is_bias, roles_of

_RolesOfBoth = tuple[StoredRoles | None, StoredRoles | None]
_Key = Callable[[Side, str], object]

_MOST_PARTS = 4  # most roles fused into one tensor, such as query, key, value and a gate
_MOST_ROLES = 16  # most roles of a layer whose combinations are tried


def matches(old: Sides, new: Sides, renamed: Mapping[str, str], heads: Heads, vocabulary: int) -> list[Match]:
    """The matches between the tensors of both sides.

    Reordered rows prove nothing, unless the namings of both sides demand the order; `in_one_order` has then undone it.

    Args:
        renamed: old key -> new key of tensors that are known to be the same.
        vocabulary: smaller number of tokens that the configurations declare; 0 where unknown.
    """
    if old.keys() != new.keys():
        old, new = in_one_order(old, new, heads)
    by_key = [_pair(side, new[name], vocabulary) for name, side in old.items() if name in new]
    left_old = {name: side for name, side in old.items() if name not in new}
    left_new = {name: side for name, side in new.items() if name not in old}
    known = {name: new_name for name, new_name in renamed.items() if name in left_old and new_name in left_new}
    # Conventions order rows differently, and a name may mean another weight there. So a renamed pair that is not equal
    # is first searched by content, and reported as differing only if nothing else holds it.
    pairs = [_pair(left_old[name], left_new[new_name], vocabulary) for name, new_name in known.items()]
    by_name = [match for match in pairs if match.is_proven]
    by_content = list(_by_content(_without(left_old, by_name), _without(left_new, by_name), vocabulary))
    paired = [*by_name, *by_content]
    left_old, left_new = _without(left_old, paired), _without(left_new, paired)
    differing = [match for match in pairs if match.old[0] in left_old and match.new[0] in left_new]
    left_old, left_new = _without(left_old, differing), _without(left_new, differing)
    alone = [Match("absent" if side.is_read else "unread", (name,), (), False) for name, side in left_old.items()]
    alone += [Match("absent" if side.is_read else "unread", (), (name,), False) for name, side in left_new.items()]
    return _under_right_names([*by_key, *paired, *differing, *alone], (old, new))


def _without(sides: Sides, pairs: Iterable[Match]) -> dict[str, Side]:
    """The tensors that no match names."""
    gone = {name for match in pairs for name in (*match.old, *match.new)}
    return {name: side for name, side in sides.items() if name not in gone}


_FEW = 0.01  # largest share of values that rounding may make zero: float16 has none below 6e-8, and weights have few


def common(first: Side, second: Side) -> str:
    """The dtype in which both are comparable; "" without one."""
    if first.dtype == second.dtype:
        return first.dtype
    for wide, narrow in ((first, second), (second, first)):
        if can_be_rounded(wide.dtype, narrow.dtype) and narrow.dtype in wide.hashes:
            return narrow.dtype
    return ""


def _pair(old: Side, new: Side, vocabulary: int) -> Match:
    """The match of two tensors that should be equal by their names."""
    names = (old.fqn,), (new.fqn,)
    if not (old.is_read and new.is_read):
        return Match("unread", *names, False)
    dtype = common(old, new)
    if not dtype:
        return Match("differ", *names, False, f"{old.dtype} and {new.dtype}: no rounding leads from one to the other")
    a, b = old.hashes[dtype], new.hashes[dtype]
    if matrix(a.shape) == matrix(b.shape) and np.array_equal(a.rows, b.rows):
        return _alike(old, new)
    if _may_be_padded(old) and _may_be_padded(new) and a.shape[1:] == b.shape[1:] and len(a.rows) != len(b.rows):
        few = min(len(a.rows), len(b.rows))
        if np.array_equal(a.rows[:few], b.rows[:few]):
            more = f"{abs(len(a.rows) - len(b.rows)):,} more rows in the {'new' if len(b.rows) > few else 'old'} one"
            return Match("padded", *names, old.fqn != new.fqn and 0 < vocabulary <= few, more)
    return Match("differ", *names, False, f"stored {old.moved or new.moved}" if old.moved or new.moved else "")


def _alike(old: Side, new: Side) -> Match:
    """The match of two tensors with equal rows in one order."""
    names, what = ((old.fqn,), (new.fqn,)), old.moved or new.moved
    if what:
        return Match("transposed" if what == "transposed" else "reordered", *names, True, what)
    if old.dtype != new.dtype:
        wide, dtype = (old, new.dtype) if new.dtype in old.hashes else (new, old.dtype)
        zeros, full = wide.hashes[dtype].zeros, wide.hashes[wide.dtype]
        lost, of = zeros - full.zeros, full.count - full.zeros
        if lost > _FEW * of:
            why = f"{old.dtype} -> {new.dtype}: rounding makes {lost:,} of {of:,} values zero"
            return Match("differ", *names, False, why)
        return Match("rounded", *names, True, f"{old.dtype} -> {new.dtype}")
    return Match("renamed" if old.fqn != new.fqn else "equal", *names, True)


def _may_be_padded(side: Side) -> bool:
    """Whether it is a matrix outside the layers, like embeddings and heads of a vocabulary."""
    key = parse(side.fqn)
    return len(side.shape) == 2 and key.layer is None and not key.is_stacked


# ---------------------------------------------------------------- by content


def _by_content(old: Sides, new: Sides, vocabulary: int) -> Iterator[Match]:
    """Matches by content for tensors without a match by name."""
    old = {name: side for name, side in old.items() if side.is_read}
    new = {name: side for name, side in new.items() if side.is_read}
    longer = partial(_longer, vocabulary=vocabulary)
    # From the strictest relation to the loosest, each on what is left: rows in any order, tried first, would also match
    # tensors that are equal.
    for find in (_same, _turned, _joined, _taken_apart, _in_other_order, longer):
        paired = list(find(old, new))
        yield from paired
        old, new = _without(old, paired), _without(new, paired)


def _same(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors with the same rows in the same order."""

    def content(side: Side, dtype: str) -> object:
        return matrix(side.hashes[dtype].shape), digest(side.hashes[dtype].rows)

    for side, counterpart, _ in _counterparts(old, new, content, content):
        yield _alike(side, counterpart)


def _turned(old: Sides, new: Sides) -> Iterator[Match]:
    """Matrices that are transposes of each other."""

    def rows(side: Side, dtype: str) -> object:
        return None if side.is_dull else digest(side.hashes[dtype].rows)

    def columns(side: Side, dtype: str) -> object:
        hashes = side.hashes[dtype].columns
        return None if side.is_dull or len(hashes) != 1 else digest(hashes[0])

    for side, counterpart, _ in _counterparts(old, new, rows, columns):
        yield Match("transposed", (side.fqn,), (counterpart.fqn,), False, "the names do not suggest that")


def _counterparts(old: Sides, new: Sides, key: _Key, other_key: _Key) -> Iterator[tuple[Side, Side, str]]:
    """(tensor, counterpart, dtype) of tensors with equal keys; None is no key."""
    groups: dict[tuple[str, object], tuple[list[Side], list[Side]]] = defaultdict(lambda: ([], []))
    for number, sides, key_of in ((0, old, key), (1, new, other_key)):
        for side in sides.values():
            for dtype in side.hashes:
                if (group_key := key_of(side, dtype)) is not None:
                    groups[dtype, group_key][number].append(side)
    taken: tuple[set[str], set[str]] = set(), set()
    for (dtype, _), (mine, others) in groups.items():
        others = [side for side in others if side.fqn not in taken[1]]
        mine = [side for side in mine if side.fqn not in taken[0] and any(common(side, o) == dtype for o in others)]
        if any(side.is_dull for side in mine) and len(mine) != len(others):
            continue  # constant and tiny tensors are equal by chance
        for side, counterpart in _paired(mine, others, dtype):
            taken[0].add(side.fqn)
            taken[1].add(counterpart.fqn)
            yield side, counterpart, dtype


def _paired(old: list[Side], new: list[Side], dtype: str) -> Iterator[tuple[Side, Side]]:
    """Pair tensors comparable in a dtype: those with equal roles first, then by the order of their names."""
    old, new = (sorted(sides, key=lambda side: _order(side.fqn)) for sides in (old, new))
    for by_role in (True, False):
        for side in [*old]:
            roles = side.stored_as.roles if side.stored_as else None
            fitting = (counterpart for counterpart in new if common(side, counterpart) == dtype)
            if by_role:
                fitting = (
                    counterpart
                    for counterpart in fitting
                    if counterpart.stored_as and counterpart.stored_as.roles == roles
                )
            if (counterpart := next(fitting, None)) is not None:
                old.remove(side)
                new.remove(counterpart)
                yield side, counterpart


def _order(name: str) -> tuple[list[int], str]:
    return [int(number) for number in NUMBER.findall(name)], name


def _taken_apart(old: Sides, new: Sides) -> Iterator[Match]:
    """Old tensors whose rows are split over several new ones."""
    for match in _joined(new, old):
        yield replace(match, relation="split", old=match.new, new=match.old)


def _joined(pieces: Sides, wholes: Sides) -> Iterator[Match]:
    """Tensors that hold exactly the rows of several others."""
    groups: dict[tuple[object, ...], dict[tuple[str, ...], list[Side]]] = defaultdict(lambda: defaultdict(list))
    for side in pieces.values():
        for dtype in side.hashes:
            for expert in {None, parse(side.fqn).expert}:
                groups[layer_number(side.fqn), expert, dtype, side.columns][_roles([side.fqn])].append(side)
    gone: set[str] = set()
    for joined in wholes.values():
        if joined.is_dull:
            continue
        for dtype, hashes in joined.hashes.items():
            roles = groups.get((layer_number(joined.fqn), parse(joined.fqn).expert, dtype, joined.columns), {})
            rows, wanted = len(hashes.rows), multiset(hashes.rows)
            sides = next(_adding_up(roles, joined, dtype, rows, wanted, gone), None)
            if sides is not None:
                gone |= {side.fqn for side in sides}
                names = tuple(side.fqn for side in sides)
                yield Match("joined", names, (joined.fqn,), *_in_order(sides, joined, dtype))
                break


def _adding_up(
    roles: Mapping[tuple[str, ...], list[Side]], whole: Side, dtype: str, rows: int, wanted: int, gone: Collection[str]
) -> Iterator[list[Side]]:
    """Sets of parts, of a few roles, whose rows together are the wanted ones as a multiset."""
    sums = []
    for members in roles.values():
        addends = [side for side in members if side.fqn not in gone and common(side, whole) == dtype]
        of_part, of_whole = addends[0].stored_as if addends else None, whole.stored_as
        if addends and (not of_whole or not of_part or {*of_part.roles} <= {*of_whole.roles}):
            count = sum(len(side.hashes[dtype].rows) for side in addends)
            sums.append((addends, count, sum(multiset(side.hashes[dtype].rows) for side in addends) & MASK))
    for number in range(1, min(_MOST_PARTS, len(sums)) + 1):
        for some in combinations(sums[:_MOST_ROLES], number):
            is_several = number > 1 or len(some[0][0]) > 1
            if is_several and sum(item[1] for item in some) == rows and sum(item[2] for item in some) & MASK == wanted:
                yield [side for item in some for side in sorted(item[0], key=lambda side: _order(side.fqn))]


def _in_other_order(old: Sides, new: Sides) -> Iterator[Match]:
    """Tensors with equal rows in another order."""

    def content(side: Side, dtype: str) -> object:
        rows = side.hashes[dtype].rows
        return None if side.is_dull else (side.columns, len(rows), multiset(rows))

    for side, counterpart, dtype in _counterparts(old, new, content, content):
        yield Match(
            "reordered", (side.fqn,), (counterpart.fqn,), False, *_unknown(side.hashes[dtype].rows, counterpart, dtype)
        )


def _in_order(sides: Sequence[Side], whole: Side, dtype: str) -> tuple[bool, str, tuple[str, ...]]:
    """(whether the parts are in the order that the name of the whole demands, that order in words, notes)."""
    pieces: dict[tuple[int, tuple[str, ...]], Words] = {}
    for side in sides:
        slices = matrix(side.hashes[dtype].shape)[0]
        for number, rows in enumerate(side.hashes[dtype].rows.reshape(slices, -1)):
            expert = number if slices > 1 else parse(side.fqn).expert or 0
            pieces[expert, side.stored_as.roles if side.stored_as else ()] = rows
    roles = [whole.stored_as.roles] if whole.stored_as else []
    if len(pieces) != len({expert for expert, _ in pieces}):
        roles = [(role,) for role in roles[0]] if roles else []
    experts = sorted({expert for expert, _ in pieces})
    wanted = [(expert, piece_roles) for expert in experts for piece_roles in roles]
    if {*wanted} == pieces.keys():
        rows = np.concatenate([pieces[piece] for piece in wanted])
        if np.array_equal(rows, whole.hashes[dtype].rows):
            is_in_turn = len(roles) > 1 and len(experts) > 1
            how = f"{' and '.join(role for (role,) in roles)} of each expert in turn" if is_in_turn else ""
            return True, whole.moved or how or "one after the other", ()
    text, notes = _unknown(np.concatenate([side.hashes[dtype].rows for side in sides]), whole, dtype)
    return False, text, notes


def _unknown(rows: Words, whole: Side, dtype: str) -> tuple[str, tuple[str, ...]]:
    """(unexpected order of rows in a whole in words, notes)."""
    text = f"in an order that {'the names do not suggest' if whole.stored_as else 'no known conversion makes'}"
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    if (ordered[1:] == ordered[:-1]).any():
        return f"{text}, some rows being alike", ()
    source = order[np.searchsorted(ordered, whole.hashes[dtype].rows)]
    if source[0] and np.array_equal(source, (np.arange(len(source)) + source[0]) % len(source)):
        return f"shifted by {int(source[0]):,} rows", ()
    first = [int(row) for row in np.flatnonzero(source != np.arange(len(source)))[:3]]
    notes = [", ".join(f"row {row:,} was row {int(source[row]):,}" for row in first)] if first else []
    return text, (*notes, *([f"the names suggest: {whole.moved}"] if whole.moved else []))


def _longer(old: Sides, new: Sides, vocabulary: int) -> Iterator[Match]:
    """Tensors with the rows of the other and more after them: a padded vocabulary."""
    taken: set[str] = set()
    for side in old.values():
        for counterpart in new.values():
            if counterpart.fqn in taken or side.is_dull or counterpart.is_dull or side.columns != counterpart.columns:
                continue
            match = _pair(side, counterpart, vocabulary)
            if match.relation == "padded":
                taken.add(counterpart.fqn)
                yield match
                break


# ---------------------------------------------------------------- the whole


def _under_right_names(matches: Sequence[Match], sides: tuple[Sides, Sides]) -> list[Match]:
    """The matches, where equal contents under the name of another weight become `exchanged`.

    Matching by content ignores names; they, or the other layers, show that no conversion made such a pair.
    """
    alone = [match for match in matches if match.is_proven and match.old != match.new]
    layers = Counter(distance for match in alone if (distance := _distance(match)) is not None)
    # Some conversions shift all layers by one distance, which is legal. Without a majority the legal distance is 0.
    usual = next((far for far, count in layers.most_common(1) if 2 * count > layers.total()), 0)
    roles: dict[tuple[str, ...], Counter[tuple[str, ...]]] = defaultdict(Counter)
    for match in alone:
        roles[_roles(match.old)][_roles(match.new)] += 1
    judged = []
    for match in matches:
        if match.is_proven and match.old != match.new:
            counts = roles[_roles(match.old)]
            most = [role for role, count in counts.items() if count == max(counts.values())]
            roles_of_both = sides[0][match.old[0]].stored_as, sides[1][match.new[0]].stored_as
            is_odd = _roles(match.new) not in most or (len(most) > 1 and None in roles_of_both)
            if is_odd or _distance(match) not in (None, usual) or not _may_be_one(match, roles_of_both):
                match = replace(match, relation="exchanged", is_proven=False, what=_holds(match, roles_of_both))
        judged.append(match)
    return judged


def _holds(match: Match, roles_of_both: _RolesOfBoth) -> str:
    """Text on the layer, expert or role that holds the old content now; "" where names show none."""
    old, new = parse(match.old[0]), parse(match.new[0])
    if None not in (old.layer, new.layer) and old.layer != new.layer:
        return f"layer {new.layer} holds what was layer {old.layer}"
    if None not in (old.expert, new.expert) and old.expert != new.expert:
        return f"expert {new.expert} holds what was expert {old.expert}"
    was, now = roles_of_both
    return f"{' and '.join(now.roles)} holds what was {' and '.join(was.roles)}" if was and now and was != now else ""


def _distance(match: Match) -> int | None:
    """New minus old layer number; None outside layers, `_FAR` where the experts differ."""
    old, new = ({parse(name).layer for name in names} for names in (match.old, match.new))
    experts = [{parse(name).expert for name in names} for names in (match.old, match.new)]
    if len(experts[0]) == len(experts[1]) == 1 and None not in experts[0] | experts[1] and experts[0] != experts[1]:
        return _FAR
    if len(old) != 1 or len(new) != 1 or None in old | new:
        return None
    return (new.pop() or 0) - (old.pop() or 0)


_FAR = 2**62  # no distance of layers


def _roles(names: Sequence[str]) -> tuple[str, ...]:
    """The roles of the names, without layer and expert numbers; later numbers distinguish components and stay."""
    return tuple(dict.fromkeys(key.role if (key := parse(name)).block else NUMBER.sub("*", name, 1) for name in names))


def _may_be_one(match: Match, roles_of_both: _RolesOfBoth) -> bool:
    """Whether single tensors may be the same by their names: no embedding is a head, no key a value."""
    if len(match.old) != 1 or len(match.new) != 1:
        return True
    (old,), (new,) = match.old, match.new
    if roles_of_both[0] and roles_of_both[1]:
        return roles_of_both[0].roles == roles_of_both[1].roles and is_bias(old) == is_bias(new)
    likely = roles_of(old), roles_of(new)
    functions = {parse(old).function, parse(new).function}
    return not (likely[0] and likely[1] and not likely[0] & likely[1]) and functions != {"embedding", "output"}
