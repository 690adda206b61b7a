"""The names that are stored beside those that a configuration implies: which of its namings they follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from ckptlint.vocabulary.keys import WRAPPING, role

if TYPE_CHECKING:
    from ckptlint.architecture.expected import Expected

INNER_WORDS = WRAPPING | {"_forward_module"}
"""What wrappers of a module leave in the names of all that it holds, wherever it is."""

WRAPPER_WORDS = INNER_WORDS | {"module", "base_model", "state_dict", "app"}
"""These, and what stands before the names of a model that was wrapped as a whole."""

_BETWEEN = INNER_WORDS | {"module"}  # DataParallel's, which some models have as a name of their own
_MIXED = {"base_layer"}  # of an adapter that was not merged
_DEPTH = 6
_LEAST = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """The names of a checkpoint and one of the namings that its configuration implies.

    Attributes:
        stored: expected key -> the key that is stored for it.
        unknown: the stored keys that stand for none.
        carried: what keys carry besides their expected name (`_orig_mod.`) -> how many do.
        base: what the expected keys begin with and no stored one does: a model saved without its head.
        prefix: what stands before the expected name in most of the stored ones, as they have it.
        odd: expected keys that are stored without that prefix.
    """

    expected: Expected
    stored: dict[str, str]
    unknown: list[str]
    carried: Counter[str] = field(default_factory=Counter)
    base: str = ""
    prefix: str = ""
    odd: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether at least half of the roles of either side are in the other."""
        paired = {role(name) for name in self.stored}
        wanted = {role(name) for name, tensor in self.expected.tensors.items() if tensor.needed or name in self.stored}
        unknown = {role(name) for name in self.unknown}
        return len(paired) >= _LEAST * min(len(wanted), len(paired | unknown)) and bool(paired)


def best_pairing(forms: Iterable[Expected], names: Sequence[str]) -> Pairing:
    """The naming that most of the stored names follow; of equals the one that lacks least."""
    return max(
        (_paired(form, names) for form in forms),
        key=lambda pairing: (len(pairing.stored), -len(pairing.expected.tensors), -pairing.carried.total()),
    )


def _paired(form: Expected, names: Sequence[str]) -> Pairing:
    """The names of a form and the stored keys that mean them: as they are, without wrappers' words, below a prefix."""
    wanted = form.tensors
    stored = {name: name for name in names if name in wanted}
    rest = [name for name in names if name not in wanted]
    if not rest or len(stored) == len(wanted):
        return Pairing(form, stored, rest)
    carried: Counter[str] = Counter()
    unknown = []
    for name in rest:  # words inside of names
        parts = name.split(".")
        bare = bare_name(name)
        if bare != name and bare in wanted and bare not in stored:
            stored[bare] = name
            carried.update(f"{part}." for part in dict.fromkeys(parts) if part in _BETWEEN)
        else:
            unknown.append(name)
    base = words = ""
    odd: tuple[str, ...] = ()
    if unknown and len(stored) < len(wanted):
        prefix, words = _prefix(form, unknown, stored)
        if prefix:
            odd = tuple(stored)
            unknown = _strip(form, unknown, stored, prefix)
            carried[words] += len(rest) - len(unknown)
        else:
            unknown = _once(form, unknown, stored, carried)
            base = _base(form, unknown, stored)
            unknown = _join(form, unknown, stored, base)
    return Pairing(form, stored, unknown, carried, base, words, odd)


def bare_name(name: str) -> str:
    """A name without what a wrapper may have put into it; a `module` before the whole name is a prefix.

    >>> bare_name("layers.0._orig_mod.up.weight"), bare_name("layers.0.module.up.weight")
    ('layers.0.up.weight', 'layers.0.up.weight')
    """
    first, *parts = name.split(".")
    kept = [part for part in parts if part not in _BETWEEN and part not in _MIXED]
    return ".".join(kept if first in INNER_WORDS else [first, *kept])


def _bare(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in INNER_WORDS and part not in _MIXED]


def _prefix(form: Expected, names: list[str], stored: dict[str, str]) -> tuple[tuple[str, ...], str]:
    """What stands before most of the names that have it at all, and how it reads in them."""
    votes: Counter[tuple[str, ...]] = Counter()
    shown: dict[tuple[str, ...], str] = {}
    for name in names:
        parts = _bare(name)
        for start in range(1, min(len(parts), _DEPTH)):
            tail = ".".join(parts[start:])
            if tail in form.tensors and tail not in stored:
                before = tuple(parts[:start])
                votes[before] += 1
                shown.setdefault(before, _as_stored(name, before))
                break
    if not votes:
        return (), ""
    best, count = votes.most_common(1)[0]
    return (best, shown[best]) if count >= _LEAST * votes.total() and count > len(stored) else ((), "")


def _as_stored(name: str, before: tuple[str, ...]) -> str:
    """The start of a name that ends with the last of some parts, wrappers between them included."""
    parts, wanted = name.split("."), list(before)
    for count, part in enumerate(parts, 1):
        if wanted and part == wanted[0]:
            wanted.pop(0)
        if not wanted and (count == len(parts) or parts[count] not in INNER_WORDS):
            return ".".join(parts[:count]) + "."
    return ".".join(before) + "."


def _strip(form: Expected, names: list[str], stored: dict[str, str], prefix: tuple[str, ...]) -> list[str]:
    """Pair what has the prefix; the names that are left over."""
    left = []
    for name in names:
        parts = _bare(name)
        tail = ".".join(parts[len(prefix) :])
        if tuple(parts[: len(prefix)]) == prefix and tail in form.tensors and tail not in stored:
            stored[tail] = name
        else:
            left.append(name)
    return left


def _once(form: Expected, names: list[str], stored: dict[str, str], carried: Counter[str]) -> list[str]:
    """Pair what has a part of its name twice (`encoder.encoder.`); the names that are left over."""
    left = []
    for name in names:
        parts = name.split(".")
        single = ".".join(part for part, _ in groupby(parts))
        if single != name and single in form.tensors and single not in stored:
            stored[single] = name
            carried.update({f"{part}.{part}." for part, other in pairwise(parts) if part == other})
        else:
            left.append(name)
    return left


def _base(form: Expected, names: list[str], stored: dict[str, str]) -> str:
    """The first part of the expected names that most stored ones lack, "" where there is none."""
    votes = {
        first: sum(f"{first}.{name}" in form.tensors for name in names)
        for first, _ in Counter(name.partition(".")[0] for name in form.tensors).most_common(4)
    }
    first = max(votes, key=lambda name: votes[name], default="")
    return first if votes.get(first, 0) > max(len(stored), _LEAST * len(names) / 2) else ""


def _join(form: Expected, names: list[str], stored: dict[str, str], base: str) -> list[str]:
    left = []
    for name in names:
        whole = f"{base}.{name}"
        if base and whole in form.tensors and whole not in stored:
            stored[whole] = name
        else:
            left.append(name)
    return left
