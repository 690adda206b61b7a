"""Rows of a table from builds: names with indices, how far these count, sizes, and when a tensor exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import combinations
from typing import Any

from ckptlint.architecture.expressions import CONSTANTS, FUNCTIONS, ExpressionError, parse_expression

Env = dict[str, Any]
Place = tuple[int, tuple[int, ...]]
"""The number of a build, and the values of indices."""
FEWEST = 8
"""Builds that must have a tensor."""

INDEX = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"'[^']*'|[A-Za-z_][\w.]*")
_WORDS = frozenset({"and", "or", "not", "in", "if", "else", *FUNCTIONS, *CONSTANTS})


class NotTraced(Exception):  # noqa: N818  an answer, not an error
    """Raised where no table comes out; the reason in one sentence.

    Attributes:
        keys: the tensors that are not explained.
        rare: whether more builds would tell.
    """

    def __init__(self, why: str, keys: Iterable[str] = (), rare: bool = False) -> None:
        super().__init__(why)
        self.keys = tuple(keys)
        self.rare = rare


@cache
def names_in(text: str) -> tuple[str, ...]:
    """The fields and indices of an expression."""
    return tuple(n for n in _NAME.findall(text) if n not in _WORDS and not n.startswith("'"))


def cost(text: str) -> tuple[int, int, str]:
    return len(re.findall(r"[-+*/%<>=]+| and | or |not | in | if |\(\w", text)), len(text), text


@cache
def _function(text: str) -> Callable[[Env], Any]:
    return parse_expression(text).value


def value_of(text: str, env: Env) -> Any:
    """What an expression gives. Raises ExpressionError where it gives nothing."""
    return _function(text)(env)


class Domain:
    """Samples: environments of fields and indices, over which conditions are said.

    Attributes:
        envs: one a sample.
        asked: the fields that a condition may name.
    """

    def __init__(
        self, envs: Sequence[Env], asked: Iterable[str], indices: Sequence[str], guards: Iterable[str]
    ) -> None:
        self.envs = envs
        self.asked = [name for name in asked if all(name in env for env in envs)]
        self.indices = list(indices)
        self.guards = list(guards)
        self.full = (1 << len(envs)) - 1
        self._asked_for: dict[tuple[int, frozenset[str]], str | None] = {}

    def mask(self, text: str) -> int | None:
        try:
            return sum(1 << i for i, env in enumerate(self.envs) if value_of(text, env))
        except ExpressionError:
            return None

    @cached_property
    def fixed(self) -> set[str]:
        """The fields that have one value in all samples."""
        return {n for n in self.envs[0] if len({str(env.get(n)) for env in self.envs}) == 1}

    @cached_property
    def atoms(self) -> dict[int, str]:
        """Mask -> the simplest condition of one field that holds there."""
        found: dict[int, str] = {}
        for text in self._texts():
            mask = self.mask(text)
            if mask is None:
                continue
            opposite = _not(text)
            for m, t in ((mask, text), (self.full & ~mask, opposite)):
                if m not in (0, self.full) and (m not in found or cost(t) < cost(found[m])):
                    found[m] = t
        return found

    def _texts(self) -> Iterator[str]:
        yield from self.guards
        for name in self.asked:
            values = [env[name] for env in self.envs]
            known = {str(v): v for v in values if not isinstance(v, (list, dict))}
            if any(v is None for v in values):
                yield f"{name} == none"
            if any(isinstance(v, bool) for v in values):
                yield name
            for value in known.values():
                if isinstance(value, str):
                    yield f"{name} == '{value}'"
                elif type(value) is int and len(known) < 12:
                    yield f"{name} == {value}"
            ints = [v for v in values if type(v) in (int, float)]
            if ints and len(ints) == len(values):
                yield from (f"{name} > {c}" for c in (0, 1))
                for index in self.indices:
                    yield f"{index} >= {name}"
                    yield f"{index} > {name}"
                    if min(ints) > 0:
                        yield f"({index} + 1) % {name} == 0"
                        yield from (f"{index} % {name} == {c}" for c in (0, 1))
                        for other in self.asked:
                            if other != name and all(type(env[other]) is int for env in self.envs):
                                yield f"{index} % {name} == {other}"
                                yield f"{index} >= {other} - {name}"
            if any(isinstance(v, list) for v in values):
                yield f"{name} != none and len({name}) > 0" if None in values else f"len({name}) > 0"
                items = {i for v in values if isinstance(v, list) for i in v if isinstance(i, (str, int))}
                words = sorted(item for item in items if isinstance(item, str))
                yield from (f"'{word}' in {name}" for word in words)
                for index in self.indices:
                    if words:
                        yield from (f"{name}[{index}] == '{word}'" for word in words)
                    else:
                        yield f"{index} in {name}"
                        yield f"{name}[{index}]"
        for index in self.indices:
            yield f"{index} == 0"
            yield from (f"{index} == {name} - 1" for name in self.asked if all(type(e[name]) is int for e in self.envs))

    def condition(self, goal: int, fields: Iterable[str] = ()) -> str | None:
        """The simplest condition that holds on these samples alone, "" for all; None where the search ends without.

        Args:
            fields: those that it should name; others only where these do not suffice.
        """
        key = goal, frozenset(fields)
        if key not in self._asked_for:
            text = self._asked_for[key] = self._condition(goal, frozenset(fields))
            if text:  # a part of what comes next
                self.atoms.setdefault(goal, text)
                self.atoms.setdefault(self.full & ~goal, _not(text))
        return self._asked_for[key]

    def _condition(self, goal: int, fields: frozenset[str]) -> str | None:
        if goal == self.full:
            return ""
        own = {m: t for m, t in self.atoms.items() if fields.issuperset(set(names_in(t)) - set(self.indices))}
        for atoms in (own, self.atoms) if fields and len(own) < len(self.atoms) else (self.atoms,):
            if goal in atoms:
                return atoms[goal]
            for wanted, joint, opposite in ((goal, " and ", False), (self.full & ~goal, " or ", True)):
                around = [(m, t) for m, t in atoms.items() if not wanted & ~m]
                around.sort(key=lambda item: (item[0].bit_count(), cost(item[1])))
                for count, most in ((2, 300), (3, 50)):
                    found = []
                    for picked in combinations(around[:most], count):
                        mask = self.full
                        for m, _ in picked:
                            mask &= m
                        if mask == wanted:
                            found.append(
                                joint.join(
                                    sorted((_part(_not(t)) if opposite else _part(t) for _, t in picked), key=cost)
                                )
                            )
                    if found:
                        return min(found, key=cost)
            inside = {m: t for m, t in atoms.items() if not m & ~goal}
            few = sorted(atoms.items(), key=lambda item: cost(item[1]))[:150]
            for (m, a), (n, b) in combinations(few, 2):
                if m & n and not m & n & ~goal:
                    inside.setdefault(m & n, f"({_part(a)} and {_part(b)})")
            best = sorted(inside.items(), key=lambda item: -item[0].bit_count())[:200]
            pairs = [f"{_part(a)} or {_part(b)}" for (m, a), (n, b) in combinations(best, 2) if m | n == goal]
            if pairs:
                return min(pairs, key=cost)
        return None


def _not(text: str) -> str:
    for sign, other in (
        (" == ", " != "),
        (" != ", " == "),
        (" >= ", " < "),
        (" > ", " <= "),
        (" < ", " >= "),
        (" <= ", " > "),
    ):
        if text.count(sign) == 1 and " and " not in text and " or " not in text:
            return text.replace(sign, other)
    return text[4:] if text.startswith("not ") and " " not in text[4:] else f"not {_part(text)}"


def _part(text: str) -> str:
    return (
        f"({text})"
        if (" and " in text or " or " in text) and not (text[0] == "(" and text[-1] == ")" and text.count("(") == 1)
        else text
    )


# ---------------------------------------------------------------- rows


def rows_of(
    builds: Sequence[Any],
    form: str,
    names: dict[tuple[str, str, str], str],
    asked: list[str],
    affects: Callable[[str], set[str]],
    guards: Iterable[str],
) -> tuple[dict[str, str], list[list[Any]]]:
    """The ranges and rows of one form.

    Args:
        names: (word before an index, how far it counts, the indices before it) -> the index; grows.
        asked: the fields that a condition may name.
        affects: pattern of a key -> the fields whose change alone adds or removes it.
    """
    trees = [build.forms.get(form, build.forms["saved"]) for build in builds]
    ranges: dict[str, str] = {}
    patterns = _patterns(builds, trees, names, ranges)
    kinds: dict[tuple[str, int], list[dict[tuple[int, ...], tuple[tuple[int, ...], str]]]] = {}
    for b, tree in enumerate(trees):
        for key, (shape, state) in tree.items():
            pattern, indices = patterns[b][key]
            kinds.setdefault((pattern, len(shape)), [{} for _ in trees])[b][indices] = (shape, state)
    places: dict[tuple[str, ...], list[Place]] = {}
    domains: dict[Any, Domain] = {}

    def samples(outer: tuple[str, ...], values: dict[Place, Any]) -> tuple[Domain, tuple[str, ...], dict[Place, Any]]:
        """The samples over as few indices as tell the values apart."""
        for count in range(len(outer) + 1):
            few: dict[Place, Any] = {}
            if all(few.setdefault((b, at[:count]), value) == value for (b, at), value in values.items()):
                break
        first = outer[:count]
        key = first, tuple(few)
        if key not in domains:
            envs = [builds[b].env | dict(zip(first, at, strict=True)) for b, at in few]
            domains[key] = Domain(envs, asked, first, guards)
        return domains[key], first, few

    rows = []
    for (pattern, _), seen in kinds.items():
        outer = tuple(INDEX.findall(pattern))
        if outer not in places:
            places[outer] = [(b, at) for b in range(len(builds)) for at in _places(outer, ranges, builds[b].env)]
        here = [(b, at) for b, at in places[outer] if at in seen[b]]
        if len(here) != sum(map(len, seen)):
            raise NotTraced(f"{pattern} lies outside of its ranges", [pattern])
        if len({b for b, _ in here}) < FEWEST:
            raise NotTraced(f"{pattern} was seen too rarely", [pattern], rare=True)
        fields = affects(INDEX.sub("N", pattern))
        domain, _, few = samples(outer, {(b, at): at in seen[b] for b, at in places[outer]})
        exists = domain.condition(_mask(few.values()), fields)
        if exists is None:
            raise NotTraced(f"nothing tells when {pattern} exists", [pattern])
        dims = []
        for axis in range(len(seen[here[0][0]][here[0][1]][0])):
            domain, first, few = samples(outer, {(b, at): seen[b][at][0][axis] for b, at in here})
            texts = [_candidates(builds[b], size, first, at) for (b, at), size in few.items()]
            text = _size(domain, texts, list(few.values()), [builds[b] for b, _ in few])
            if text is None:
                raise NotTraced(f"axis {axis} of {pattern} is {sorted({*few.values()})[:6]}", [pattern])
            dims.append(text)
        domain, _, few = samples(outer, {(b, at): seen[b][at][1] for b, at in here})
        optional = ""
        if set(few.values()) == {"buffer"}:
            optional = "true"
        elif set(few.values()) != {""}:
            tied = domain.condition(_mask(few.values()), fields)
            if tied is None:
                raise NotTraced(f"nothing tells when {pattern} is tied", [pattern])
            optional = tied or "true"
        row: list[Any] = [pattern, dims]
        rows.append(row + ([exists, optional] if optional else [exists] if exists else []))
    return ranges, rows


def _mask(values: Iterable[object]) -> int:
    return sum(1 << i for i, value in enumerate(values) if value)


def _patterns(
    builds: Sequence[Any], trees: Sequence[dict[str, Any]], names: dict[Any, str], ranges: dict[str, str]
) -> Any:
    """For each build, key -> its pattern and indices."""
    patterns: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in trees]
    decided: dict[str, str | None] = {}
    pending = [[(key, key.split("."), 0, "", ()) for key in tree] for tree in trees]
    while any(pending):
        waiting: list[list[Any]] = []
        seen: dict[str, list[dict[tuple[int, ...], set[int]]]] = {}
        for b, items in enumerate(pending):
            waiting.append([])
            for key, words, at, prefix, indices in items:
                while at < len(words) and not words[at].isdigit():
                    prefix += f".{words[at]}" if prefix else words[at]
                    at += 1
                if at == len(words):
                    patterns[b][key] = (prefix, indices)
                    continue
                number = int(words[at])
                waiting[b].append((key, words, at, prefix, indices, number))
                seen.setdefault(prefix, [{} for _ in trees])[b].setdefault(indices, set()).add(number)
        for prefix, sets in seen.items():
            every = {frozenset(numbers) for by_outer in sets for numbers in by_outer.values()}
            if len(every) == 1 and len(next(iter(every))) <= 12:
                decided[prefix] = None
                continue
            outer = tuple(INDEX.findall(prefix))
            text = None
            common: set[str] | None = None
            for build, by_outer in zip(builds, sets, strict=True):
                for at, numbers in by_outer.items():
                    found = _candidates(build, max(numbers) + 1, outer, at)
                    common = found if common is None else common & found
            if common:
                text = min(common, key=cost)
            elif len(every) == 1:
                text = str(len(next(iter(every))))
            elif len(set().union(*every)) <= 12:
                decided[prefix] = None
                continue
            else:
                raise NotTraced(f"how far {prefix}.* counts", [prefix])
            word = re.sub(r"\W", "", prefix.rpartition(".")[2])
            word = {"h": "layer", "layers": "layer"}.get(word, word.removesuffix("s") if len(word) > 2 else word)
            known = (word, text, ",".join(outer))
            if known not in names:
                taken = {*names.values(), *builds[0].env}
                names[known] = next(n for n in (word, *(f"{word}{i}" for i in range(2, 99))) if n not in taken)
            decided[prefix] = names[known]
            ranges[names[known]] = text
        pending = [
            [
                (
                    key,
                    words,
                    at + 1,
                    f"{prefix}.{{{decided[prefix]}}}" if decided[prefix] else f"{prefix}.{number}",
                    (*indices, number) if decided[prefix] else indices,
                )
                for key, words, at, prefix, indices, number in items
            ]
            for items in waiting
        ]
    return patterns


def _places(
    outer: tuple[str, ...], ranges: dict[str, str], env: Env, done: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    if len(done) == len(outer):
        return [done]
    count = value_of(ranges[outer[len(done)]], env | dict(zip(outer, done, strict=False)))
    return [found for number in range(count) for found in _places(outer, ranges, env, (*done, number))]


def _candidates(build: Any, size: int, outer: Sequence[str], at: Sequence[int]) -> set[str]:
    """The expressions that give a size, an item of a list with an index for its number."""
    found = {text for text in build.texts(size) if all(name in build.env for name in names_in(text))}
    for index, number in zip(outer, at, strict=True):
        for text in list(found):
            for shift, word in ((0, index), (1, f"{index} + 1"), (-1, f"{index} - 1")):
                if f"[{number + shift}]" in text:
                    found.add(text.replace(f"[{number + shift}]", f"[{word}]"))
                if number + shift >= 0:
                    power = f"2 ** ({word})" if shift else f"2 ** {word}"
                    if number + shift == 0:
                        found.update(
                            f"{name} * {power}"
                            if text == name
                            else re.sub(rf"\b{re.escape(name)}\b", f"({name} * {power})", text)
                            for name in names_in(text)
                        )
                    elif f" * {2 ** (number + shift)}" in text:
                        found.add(re.sub(rf" \* {2 ** (number + shift)}\b", f" * {power}", text))
    return found


def _size(domain: Domain, texts: list[set[str]], sizes: list[int], builds: list[Any]) -> str | None:
    """The expression of an axis, over conditions where no one holds everywhere."""
    if len({*sizes}) == 1:
        return str(sizes[0])  # of a field that has one value in all builds nothing is known
    if common := set.intersection(*texts):
        return _simplest(domain, common)
    texts = [own | _composed(build, size) for own, build, size in zip(texts, builds, sizes, strict=True)]
    every = [*range(len(sizes))]
    return _split(domain, every, texts, sizes, 1) or _split(domain, every, texts, sizes, 2)


def _simplest(domain: Domain, texts: set[str]) -> str:
    """The simplest of expressions, one that names fields of one value only where no other is left."""
    return min(texts, key=lambda text: (not domain.fixed.isdisjoint(names_in(text)), cost(text)))


def _split(domain: Domain, where: list[int], texts: list[set[str]], sizes: list[int], depth: int) -> str | None:
    """An expression for some samples, chosen by at most so many conditions."""
    shared = {t for t in set.intersection(*(texts[i] for i in where)) if not domain.fixed.issuperset(names_in(t))}
    if shared:
        return _simplest(domain, shared)
    if len({sizes[i] for i in where}) == 1:
        return str(sizes[where[0]])
    sized = {
        name for i in where for text in texts[i] for name in names_in(text)
    }  # a size hangs on its own fields first
    atoms = sorted(domain.atoms.items(), key=lambda item: (sized.isdisjoint(names_in(item[1])), cost(item[1])))
    for mask, atom in atoms if depth else ():
        sides = [[i for i in where if mask >> i & 1], [i for i in where if not mask >> i & 1]]
        if all(sides):
            parts = [_split(domain, side, texts, sizes, 0) for side in sides]
            if None in parts and depth > 1 and parts != [None, None]:
                at = parts.index(None)
                parts[at] = _split(domain, sides[at], texts, sizes, depth - 1)
                parts[at] = parts[at] and f"({parts[at]})"
            if None not in parts:
                return f"{parts[0]} if {atom} else {parts[1]}"
    return None


def _composed(build: Any, size: int) -> set[str]:
    """What a conversion between forms makes of a computed size: a multiple, a part, a part rounded up."""
    found = set()
    for factor in (2, 3, 4, 8):
        found |= {f"{factor} * ({text})" for text in _known(build, size / factor)}
        found |= {f"({text}) // {factor}" for text in _known(build, size * factor)}
        found |= {
            f"ceil(({text}) / {factor})" for less in range(factor) for text in _known(build, size * factor - less)
        }
    return found


def _known(build: Any, size: float) -> set[str]:
    return _candidates(build, int(size), (), ()) if size == int(size) else set()
