"""Pairs stored names with those that a configuration implies, and finds the naming scheme that they follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from ckptlint.vocabulary.keys import WRAPPING, role

if TYPE_CHECKING:
    from ckptlint.architecture.expected import Expected

INNER_WORDS = WRAPPING | {"_forward_module"}
"""Words that a wrapper inserts anywhere in the names below the wrapped module."""

WRAPPER_WORDS = INNER_WORDS | {"module", "base_model", "state_dict", "app"}
"""The inner words, and prefixes of a model that was wrapped as a whole."""

_BETWEEN = INNER_WORDS | {"module"}  # DataParallel's, which some models have as a name of their own
_MIXED = {"base_layer"}  # of an adapter that was not merged
_DEPTH = 6  # most name parts of a prefix
# Assumed: a damaged or partial export still shares half of its roles with its configuration, and a naming scheme that
# no table knows shares fewer (CFG001: "names of another scheme: CFG004 says so").
_LEAST = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """The names of a checkpoint and one of the namings that its configuration implies.

    Attributes:
        stored: expected key -> its stored key.
        unknown: stored keys without an expected one.
        carried: extra words in stored keys (`_orig_mod.`) -> number of keys with them.
        base: first part of the expected keys that all stored ones lack: a base model saved without its head.
        prefix: extra prefix of most stored keys, as stored.
        odd: expected keys whose stored key lacks that prefix.
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
        """Whether at least half of the roles of the smaller side occur on the other side."""
        paired = {role(name) for name in self.stored}
        wanted = {role(name) for name, tensor in self.expected.tensors.items() if tensor.needed or name in self.stored}
        unknown = {role(name) for name in self.unknown}
        return len(paired) >= _LEAST * min(len(wanted), len(paired | unknown)) and bool(paired)


def best_pairing(forms: Iterable[Expected], names: Sequence[str]) -> Pairing:
    """The pairing with the most stored keys; among equals the smallest model, then the fewest extra words."""
    return max(
        (_paired(form, names) for form in forms),
        key=lambda pairing: (len(pairing.stored), -len(pairing.expected.tensors), -pairing.carried.total()),
    )


def _paired(form: Expected, names: Sequence[str]) -> Pairing:
    """Pair the keys with one naming: exact names first, then without wrapper words, then below a common prefix."""
    wanted = form.tensors
    stored = {name: name for name in names if name in wanted}
    rest = [name for name in names if name not in wanted]
    if not rest or len(stored) == len(wanted):
        return Pairing(form, stored, rest)
    carried: Counter[str] = Counter()
    paired, unknown = _pair(form, rest, stored, bare_name)  # words inside of names
    for name in paired:
        carried.update(f"{word}." for word in dict.fromkeys(name.split(".")) if word in _BETWEEN)
    base = words = ""
    odd: tuple[str, ...] = ()
    if unknown and len(stored) < len(wanted):
        # The order decides: a prefix explains all keys at once, a doubled part or a lost base only some. Each guess is
        # made only on what the surer ones left, so that one stored key never stands for two expected ones.
        prefix, words = _prefix(form, unknown, stored)
        if prefix:
            odd = tuple(stored)
            _, unknown = _pair(form, unknown, stored, lambda name: _below(prefix, name))
            carried[words] += len(rest) - len(unknown)
        else:
            paired, unknown = _pair(form, unknown, stored, _once)
            for name in paired:
                carried.update(
                    {f"{word}.{word}." for word, following in pairwise(name.split(".")) if word == following}
                )
            base = _base(form, unknown, stored)
            _, unknown = _pair(form, unknown, stored, lambda name: f"{base}.{name}" if base else "")
    return Pairing(form, stored, unknown, carried, base, words, odd)


def bare_name(name: str) -> str:
    """A name without wrapper words; a leading `module` is a prefix and stays.

    >>> bare_name("layers.0._orig_mod.up.weight"), bare_name("layers.0.module.up.weight")
    ('layers.0.up.weight', 'layers.0.up.weight')
    """
    first, *words = name.split(".")
    kept = [word for word in words if word not in _BETWEEN and word not in _MIXED]
    return ".".join(kept if first in INNER_WORDS else [first, *kept])


def _bare(name: str) -> list[str]:
    return [word for word in name.split(".") if word not in INNER_WORDS and word not in _MIXED]


def _prefix(form: Expected, names: list[str], stored: dict[str, str]) -> tuple[tuple[str, ...], str]:
    """The prefix that most names with any prefix share, without wrapper words; and its stored spelling."""
    votes: Counter[tuple[str, ...]] = Counter()
    shown: dict[tuple[str, ...], str] = {}
    for name in names:
        words = _bare(name)
        for start in range(1, min(len(words), _DEPTH)):
            tail = ".".join(words[start:])
            if tail in form.tensors and tail not in stored:
                before = tuple(words[:start])
                votes[before] += 1
                shown.setdefault(before, _as_stored(name, before))
                break
    if not votes:
        return (), ""
    best, count = votes.most_common(1)[0]
    return (best, shown[best]) if count >= _LEAST * votes.total() and count > len(stored) else ((), "")


def _as_stored(name: str, before: tuple[str, ...]) -> str:
    """The start of a name up to the last of these parts, including wrapper words between them."""
    words, wanted = name.split("."), list(before)
    for count, word in enumerate(words, 1):
        if wanted and word == wanted[0]:
            wanted.pop(0)
        if not wanted and (count == len(words) or words[count] not in INNER_WORDS):
            return ".".join(words[:count]) + "."
    return ".".join(before) + "."


def _pair(
    form: Expected, names: list[str], stored: dict[str, str], expected: Callable[[str], str]
) -> tuple[list[str], list[str]]:
    """Pair each name with the expected key that it may stand for, where that is free; (paired names, other names)."""
    paired, left = list[str](), list[str]()
    for name in names:
        key = expected(name)
        is_free = key in form.tensors and key not in stored
        if is_free:
            stored[key] = name
        (paired if is_free else left).append(name)
    return paired, left


def _once(name: str) -> str:
    """A name without the second of two equal parts in a row (`encoder.encoder.`)."""
    return ".".join(word for word, _ in groupby(name.split(".")))


def _below(prefix: tuple[str, ...], name: str) -> str:
    """What follows a prefix in a name without wrapper words; "" for a name without the prefix."""
    words = _bare(name)
    return ".".join(words[len(prefix) :]) if tuple(words[: len(prefix)]) == prefix else ""


def _base(form: Expected, names: list[str], stored: dict[str, str]) -> str:
    """The first part of the expected names that most stored ones lack; "" without one."""
    votes = {
        first: sum(f"{first}.{name}" in form.tensors for name in names)
        for first, _ in Counter(name.partition(".")[0] for name in form.tensors).most_common(4)
    }
    first = max(votes, key=lambda name: votes[name], default="")
    return first if votes.get(first, 0) > max(len(stored), _LEAST * len(names) / 2) else ""
