"""Expressions and conditions that explain what probes showed: a search over products and sums of fields.

A sample is one probe, or one index tuple of one probe; its environment gives the value of every field, flat, and of the
indices. A result is a text that `ckptlint.architecture.expressions` evaluates to the observed value on every sample.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, permutations
from typing import Any

Env = dict[str, Any]

CONSTANTS = (2, 3, 4, 5, 6, 8)
DIVISORS = (2, 3, 4, 8, 16, 32)


def _cost(text: str) -> tuple[int, int, str]:
    signs = sum(text.count(sign) for sign in ("*", "+", " - ", "//", " if ", " == ", " != ", "<", ">", "%"))
    return (signs, len(text), text)


class Samples:
    """Environments, and what can be said over them."""

    def __init__(self, envs: Sequence[Env], fields: Iterable[str], indices: Sequence[str] = ()) -> None:
        self.envs = envs
        self.fields = sorted(fields)
        self.indices = list(indices)

    def column(self, name: str) -> list[Any]:
        return [env.get(name) for env in self.envs]

    # ------------------------------------------------------------ sizes

    @cached_property
    def _sizes(self) -> dict[tuple[int, ...], str]:
        """Vector of a field, or of an item of a list -> its name."""
        found: dict[tuple[int, ...], str] = {}

        def add(values: Sequence[Any], text: str) -> None:
            if all(isinstance(v, (int, float)) and v == int(v) for v in values):
                vector = tuple(int(v) for v in values)
                if any(isinstance(v, float) for v in values):
                    text = f"int({text})"
                if vector not in found or _cost(text) < _cost(found[vector]):
                    found[vector] = text

        for name in self.fields:
            values = self.column(name)
            if all(isinstance(v, bool) for v in values):
                if len(set(values)) > 1:
                    add([1 + v for v in values], f"(1 + {name})")
            elif all(isinstance(v, (int, float)) for v in values):
                add(values, name)
            elif all(isinstance(v, (list, str, dict)) for v in values):
                add([len(v) for v in values], f"len({name})")
                if all(isinstance(v, list) for v in values):
                    for index in self.indices:
                        at = [env[index] for env in self.envs]
                        if all(i < len(v) for v, i in zip(values, at, strict=True)):
                            add([v[i] for v, i in zip(values, at, strict=True)], f"{name}[{index}]")
                    for i in (0, 1, 2, 3, -1):
                        if all(-len(v) <= i < len(v) for v in values):
                            add([v[i] for v in values], f"{name}[{i}]".replace("-1", f"len({name}) - 1"))
        for (v, a), (w, b) in permutations(list(found.items()), 2):
            if a.rpartition(".")[0] == b.rpartition(".")[0] and all(
                y > 1 and x % y == 0 for x, y in zip(v, w, strict=True)
            ):
                add([x // y for x, y in zip(v, w, strict=True)], f"({a} // {b})")
        return found

    @cached_property
    def _weights(self) -> list[int]:
        draw = random.Random(len(self.envs))
        return [draw.getrandbits(120) for _ in self.envs]

    def _mark(self, vector: Iterable[int]) -> int:
        """A number for a vector: that of a sum is the sum of theirs, and no two vectors share one by chance."""
        return sum(map(operator.mul, vector, self._weights))

    @cached_property
    def _marked(self) -> dict[int, str]:
        return {self._mark(vector): text for vector, text in self._products.items()}

    @cached_property
    def _few(self) -> list[tuple[int, str]]:
        """What sums of three are made of."""
        short = [(m, t) for m, t in self._marked.items() if _cost(t)[0] <= 2 and "//" not in t]
        return sorted(short, key=lambda item: _cost(item[1]))[:500]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], str | None]:
        return {}

    @cached_property
    def _products(self) -> dict[tuple[int, ...], str]:
        found = dict(self._sizes)
        base = list(self._sizes.items())

        def add(vector: tuple[int, ...], text: str) -> None:
            if vector not in found or _cost(text) < _cost(found[vector]):
                found[vector] = text

        for v, name in base:
            for c in CONSTANTS:
                add(tuple(c * a for a in v), f"{c} * {name}")
            for c in DIVISORS:
                add(tuple(a // c for a in v), f"{name} // {c}")
                add(tuple(-(-a // c) for a in v), f"({name} + {c - 1}) // {c}")
            add(tuple(2 * a // 3 for a in v), f"2 * {name} // 3")
            add(tuple(a * a for a in v), f"{name} * {name}")
        pairs = []
        for (v, a), (w, b) in combinations(base, 2):
            product = tuple(x * y for x, y in zip(v, w, strict=True))
            add(product, f"{a} * {b}")
            pairs.append((product, f"{a} * {b}"))
            for c in (2, 3, 4):
                add(tuple(c * x for x in product), f"{c} * {a} * {b}")
        for v, a in base:
            for w, b in base:
                if a != b and all(w):
                    quotient = tuple(x // y for x, y in zip(v, w, strict=True))
                    add(quotient, f"{a} // {b}")
                    if a.rpartition(".")[0] == b.rpartition(".")[0]:
                        add(tuple(x * x for x in quotient), f"({a} // {b}) * ({a} // {b})")
        for v, a in pairs:
            for w, b in base:
                if all(w):
                    add(tuple(x // y for x, y in zip(v, w, strict=True)), f"{a} // {b}")
                if len(base) <= 40:
                    add(tuple(x * y for x, y in zip(v, w, strict=True)), f"{a} * {b}")
                for u, c in base if len(base) <= 12 else ():
                    add(tuple(x * y * z for x, y, z in zip(v, w, u, strict=True)), f"{a} * {b} * {c}")
        return found

    def size(self, target: Sequence[int]) -> str | None:
        """The shortest expression whose value is this on every sample; None where the search ends without one."""
        goal = tuple(target)
        if goal not in self._known:
            self._known[goal] = self._search(goal)
        return self._known[goal]

    def _search(self, goal: tuple[int, ...]) -> str | None:
        if len(set(goal)) == 1:
            return str(goal[0])
        if goal in self._products:
            return self._products[goal]
        found, mark, one = self._marked, self._mark(goal), self._mark([1] * len(goal))
        best = []
        for c in (1, 2, 3, 4, 8, 16, 100, 101):
            best += [f"{found[mark - c * one]} + {c}"] if mark - c * one in found else []
            best += [f"{found[mark + c * one]} - {c}"] if mark + c * one in found else []
        for other, text in found.items():
            if mark - other in found:
                best.append(f"{text} + {found[mark - other]}")
            if mark + other in found and "//" not in text:
                best.append(f"{found[mark + other]} - {text}")
        if best:
            return min(best, key=_cost)
        for (m, a), (n, b) in combinations(self._few, 2):
            if mark - m - n in found:
                best.append(f"{a} + {b} + {found[mark - m - n]}")
        if best:
            return min(best, key=_cost)
        for c in (8, 16, 32, 64, 128):
            for vector, text in self._products.items():
                if tuple(-(-x // c) * c for x in vector) == goal:
                    best.append(f"({text} + {c - 1}) // {c} * {c}")
        for vector, text in self._sizes.items():
            times = {divmod(y, x) for x, y in zip(vector, goal, strict=True)} if all(vector) else set()
            if len(times) == 1 and not max(times)[1]:
                best.append(f"{max(times)[0]} * {text}")
        if best:
            return min(best, key=_cost)
        short = [(v, t) for v, t in self._products.items() if _cost(t)[0] <= 2]
        for unit, name in self._sizes.items():
            if all(c > 1 and not y % c for c, y in zip(unit, goal, strict=True)):
                for vector, text in short:
                    if all(-(-x // c) * c == y for x, c, y in zip(vector, unit, goal, strict=True)):
                        best.append(f"({text} + {name} - 1) // {name} * {name}")
        return min(best, key=_cost) if best else None

    def split_size(self, target: Sequence[int], deeper: int = 1) -> str | None:
        """As `size`, or one of several expressions, as conditions decide."""
        if text := self.size(target):
            return text
        choices = sorted(self._atoms.items(), key=lambda item: _cost(item[1]))
        for mask, condition in [choice for choice in choices if " > " not in choice[1] and " <= " not in choice[1]][
            :60
        ]:
            sides = [[i for i in range(len(target)) if bool(mask >> i & 1) is side] for side in (True, False)]
            if any(len(side) < 3 for side in sides):
                continue
            parts = [Samples([self.envs[i] for i in side], self.fields, self.indices) for side in sides]
            goals = [[target[i] for i in side] for side in sides]
            texts = [part.size(goal) for part, goal in zip(parts, goals, strict=True)]
            if deeper and texts.count(None) == 1:
                at = texts.index(None)
                texts[at] = parts[at].split_size(goals[at], deeper - 1)
            if None not in texts:
                return f"({texts[0]}) if {condition} else ({texts[1]})"
        return None

    # ------------------------------------------------------------ conditions

    @cached_property
    def _atoms(self) -> dict[int, str]:
        """Mask of the samples where it holds -> the shortest simple condition."""
        found: dict[int, str] = {}
        full = (1 << len(self.envs)) - 1

        def add(values: Iterable[object], text: str, opposite: str) -> None:
            mask = sum(1 << i for i, v in enumerate(values) if v)
            if 0 < mask < full:
                for m, t in ((mask, text), (full & ~mask, opposite)):
                    if m not in found or _cost(t) < _cost(found[m]):
                        found[m] = t

        for name in self.fields:
            values = self.column(name)
            kinds = {type(v) for v in values}
            if kinds <= {bool, type(None)} or type(None) in kinds or (kinds == {int} and 0 in values):
                add(values, name, f"not {name}")
            if kinds == {list}:
                add(values, name, f"not {name}")
            if str in kinds:
                for text in sorted({v for v in values if isinstance(v, str)}):
                    add([v == text for v in values], f"{name} == '{text}'", f"{name} != '{text}'")
            if kinds == {int} and len(set(values)) < len(values):
                for number in {0, 1, 2} & set(values):
                    add([v == number for v in values], f"{name} == {number}", f"{name} != {number}")
                    add([v > number for v in values], f"{name} > {number}", f"{name} <= {number}")
            for index in self.indices:
                at = [env[index] for env in self.envs]
                self._index_atoms(add, name, values, index, at)
        for index in self.indices:
            at = [env[index] for env in self.envs]
            for c in range(4):
                add([i == c for i in at], f"{index} == {c}", f"{index} != {c}")
                add([i < c for i in at], f"{index} < {c}", f"{index} >= {c}")
            for c in (2, 3):
                for r in range(c):
                    add([i % c == r for i in at], f"{index} % {c} == {r}", f"{index} % {c} != {r}")
        sizes = [(n, self.column(n)) for n in self.fields]
        sizes = [(n, v) for n, v in sizes if all(type(x) is int for x in v)]
        if len(sizes) <= 40:
            for (a, v), (b, w) in combinations(sizes, 2):
                add([x == y for x, y in zip(v, w, strict=True)], f"{a} == {b}", f"{a} != {b}")
        return found

    def _index_atoms(self, add: Any, name: str, values: list[Any], index: str, at: list[int]) -> None:
        pairs = list(zip(values, at, strict=True))
        if all(isinstance(v, (list, type(None))) for v in values):
            add([v is not None and i in v for v, i in pairs], f"{index} in {name}", f"{index} not in {name}")
        if all(isinstance(v, (list, str)) and i < len(v) for v, i in pairs):
            for item in sorted({v[i] for v, i in pairs if isinstance(v[i], (str, int))}, key=str)[:8]:
                text = item if isinstance(item, int) else f"'{item}'"
                if isinstance(item, bool):
                    add([v[i] is True for v, i in pairs], f"{name}[{index}]", f"not {name}[{index}]")
                    continue
                add([v[i] == item for v, i in pairs], f"{name}[{index}] == {text}", f"{name}[{index}] != {text}")
        if all(type(v) is int for v in values):
            add([i < v for v, i in pairs], f"{index} < {name}", f"{index} >= {name}")
            add([i == v for v, i in pairs], f"{index} == {name}", f"{index} != {name}")
            add([i == v - 1 for v, i in pairs], f"{index} == {name} - 1", f"{index} != {name} - 1")
            if all(v > 0 for v in values):
                for shift in (0, 1):
                    term = f"({index} + 1)" if shift else index
                    add([(i + shift) % v == 0 for v, i in pairs], f"{term} % {name} == 0", f"{term} % {name} != 0")
                for other in self.fields:
                    offsets = self.column(other)
                    if other != name and all(type(o) is int for o in offsets):
                        met = [i % v == o for (v, i), o in zip(pairs, offsets, strict=True)]
                        add(met, f"{index} % {name} == {other}", f"{index} % {name} != {other}")
            for other in self.fields:
                lower = self.column(other)
                if other != name and all(type(o) is int for o in lower):
                    met = [i < v - o for (v, i), o in zip(pairs, lower, strict=True)]
                    add(met, f"{index} < {name} - {other}", f"{index} >= {name} - {other}")

    def condition(self, target: Sequence[bool]) -> str | None:
        """The shortest condition that holds on these samples alone, "" for all; None where the search ends without."""
        full = (1 << len(self.envs)) - 1
        goal = sum(1 << i for i, v in enumerate(target) if v)
        if goal == full:
            return ""
        if goal in self._atoms:
            return self._atoms[goal]
        for wanted, joint in ((goal, " and "), (full & ~goal, " or ")):
            if text := self._joined(wanted, full, joint):
                return text
        # (a and b) or (c and d) ...: cover the goal by what lies within it
        inside = {m: t for m, t in self._atoms.items() if not m & ~goal}
        atoms = sorted(self._atoms.items(), key=lambda item: _cost(item[1]))[:600]
        for (m, a), (n, b) in combinations(atoms, 2):
            if m & n and not m & n & ~goal and m & n not in inside:
                inside[m & n] = f"({a} and {b})"
        return min(
            (f"{a} or {b}" for (m, a), (n, b) in _pairs(inside, goal)),
            key=_cost,
            default=None,
        )

    def _joined(self, goal: int, full: int, joint: str) -> str | None:
        """Two or three simple conditions that hold together on the goal alone; for `or`, their opposites do."""
        around = [(m, t) for m, t in self._atoms.items() if not goal & ~m]
        around.sort(key=lambda item: (item[0].bit_count(), _cost(item[1])))

        def text(masks: Iterable[int]) -> str:
            return joint.join(sorted((self._atoms[m if joint == " and " else full & ~m] for m in masks), key=_cost))

        found = [text((m, n)) for (m, _), (n, _) in combinations(around, 2) if m & n == goal]
        if not found:
            found = [text((m, n, o)) for (m, _), (n, _), (o, _) in combinations(around[:60], 3) if m & n & o == goal]
        return min(found, key=_cost) if found else None


def _pairs(inside: dict[int, str], goal: int) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    items = sorted(inside.items(), key=lambda item: -item[0].bit_count())[:1500]
    return (pair for pair in combinations(items, 2) if pair[0][0] | pair[1][0] == goal)
