"""Pairs the keys of a checkpoint with those of its reference, and lists those that surely have no partner.

Wrapper words are ignored, and numbers of layers and experts are compared apart from the path, so that stacked layers
pair with numbered ones. Two naming schemes of one model (Hugging Face and Megatron-Core) share few names, so none of
their keys counts as absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import PurePath
from typing import Literal, NamedTuple

from ckptlint.analysis.fit.judgement import judged_shapes
from ckptlint.analysis.optimizer.inventory import Param, optimizer_parts, split_state
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Reference
from ckptlint.model.cover import Shape
from ckptlint.model.facts import fact
from ckptlint.model.text import ranges
from ckptlint.vocabulary.keys import COPIES, MASTER_COPIES, Key, parse

EntryKind = Literal["model", "copy", "optimizer"]
KeyFamily = tuple[EntryKind, str, tuple[str, ...], str]
Slot = tuple[object, ...]
Form = tuple[str, str]
_PACKED = frozenset({"uint8", "int8", "float4_e2m1fn_x2"})
_SLOT_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class KeyEntry:
    """A tensor of the checkpoint or of its reference.

    Attributes:
        shape: global shape in elements; None where unknown or beyond 64 bits.
        key: the parsed key of the parameter, also for an optimizer state.
        family: (kind, optimizer state, scope, path without numbers): equal in all layers and experts.
    """

    fqn: str
    dtype: str | None
    shape: Shape | None
    key: Key
    family: KeyFamily

    @property
    def kind(self) -> EntryKind:
        """Whether it belongs to the model, to a second copy of it, or to the optimizer."""
        return self.family[0]

    @property
    def form(self) -> Form:
        """Position of (layers, experts): `number` in the name, `axis` of the tensor, or "" for neither."""
        key = self.key
        layer = "number" if key.layer is not None else "axis" if key.is_stacked else ""
        expert = "number" if key.expert is not None else "axis" if key.in_experts else ""
        return layer, expert


class KeyPair(NamedTuple):
    """A tensor of the reference and its stored counterpart; shapes cover the part that both have.

    Attributes:
        alike: whether both stack or number layers and experts alike, so that the global shapes are comparable.
    """

    expected: KeyEntry
    stored: KeyEntry
    expected_shape: Shape | None
    stored_shape: Shape | None
    alike: bool = True


class LoneKeys(NamedTuple):
    """A tensor without a counterpart on the other side.

    Attributes:
        part: the unmatched layers or experts of a stacked tensor, as text; "" for the whole tensor.
    """

    entry: KeyEntry
    part: str = ""


@dataclass(frozen=True, eq=False)
class KeyComparison:
    """The result of pairing a checkpoint with its reference.

    Attributes:
        expected: number of reference keys of each kind.
        absent, added: tensors that only the reference, or only the checkpoint has.
        unpaired_expected, unpaired_stored: names on one side that may be the other side's under another name.
        lacking: kinds of keys that the reference has and the checkpoint lacks entirely.
    """

    expected: Counter[EntryKind] = field(default_factory=Counter)
    pairs: list[KeyPair] = field(default_factory=list)
    absent: list[LoneKeys] = field(default_factory=list)
    added: list[LoneKeys] = field(default_factory=list)
    unpaired_expected: list[str] = field(default_factory=list)
    unpaired_stored: list[str] = field(default_factory=list)
    lacking: set[EntryKind] = field(default_factory=set)


@fact
def match_keys(ckpt: Checkpoint, reference: Reference) -> KeyComparison:
    """Pair the keys of both sides, except runtime state and flat optimizer buckets."""
    result = KeyComparison()
    expected = _families(_entry(fqn, dtype, shape) for fqn, (dtype, shape) in reference.tensors.items())
    stored = _families(
        _entry(t.fqn, None if t.dtype == "unknown" else t.dtype, t.global_shape if t.is_representable else None)
        for t in ckpt.tensors.values()
    )
    in_bytes = {entry.fqn for entry in ckpt.byte_objects} | ckpt.objects.keys.keys()
    for family, entries in expected.items():
        expected[family] = [entry for entry in entries if not _lies_in(entry.fqn, in_bytes)]
        result.expected[family[0]] += len(expected[family])
    kinds: tuple[EntryKind, ...] = ("model", "copy", "optimizer")
    for kind in kinds:
        mine = {family: entries for family, entries in stored.items() if family[0] == kind}
        theirs = {family: entries for family, entries in expected.items() if family[0] == kind and entries}
        if theirs and _holds_none(ckpt, kind, mine):
            result.lacking.add(kind)
        elif theirs and (mine or kind != "optimizer"):  # an optimizer in flat buckets names no parameter
            _compare_kind(result, theirs, mine)
    return result


def _families(entries: Iterable[KeyEntry | None]) -> dict[KeyFamily, list[KeyEntry]]:
    return grouped((entry.family, entry) for entry in entries if entry is not None)


def _entry(fqn: str, dtype: str | None, shape: Shape | None) -> KeyEntry | None:
    """None for what is not compared: runtime state, flat buckets, states that name their parameter by number."""
    key = parse(fqn)
    scope, what, kind = key.scope, "", "model"
    if key.kind == "optimizer":
        scope, rest = optimizer_parts(key)
        named = split_state(rest.removeprefix("state.")) if rest.startswith("state.") else None
        if named is None:
            return None
        what, kind, key = "param" if named[0] in MASTER_COPIES else named[0], "optimizer", parse(named[1])
        # chains are counted through and shift when a kind of parameter joins or leaves
        scope = tuple(name for name in (*scope, *key.scope) if not name.startswith("chained"))
    if key.kind != "model" or key.path.endswith("_flat_param"):
        return None
    of: EntryKind = "optimizer" if kind == "optimizer" else "copy" if COPIES & set(scope) else "model"
    return KeyEntry(fqn, dtype, shape, key, (of, what, scope, _path(key)))


def _path(key: Key) -> str:
    """The path without the numbers of layers and experts, however a writer spells the place of the experts.

    >>> [_path(parse(name)) for name in ("layers.3.experts.local_experts.7.fc1.weight", "layers.experts.fc1.weight2")]
    ['layers.experts.fc1', 'layers.experts.fc1']
    """
    words = [word for word in key.role.split(".") if word != "*"]
    if key.in_experts:
        words = ["experts" if word == "local_experts" else word for word in words]
        words = [word for i, word in enumerate(words) if word != "experts" or words[i - 1 : i] != ["experts"]]
        words[-1] = words[-1].rstrip("*")
        if words[-1] == "weight":
            words.pop()
    return ".".join(words)


def _lies_in(fqn: str, names: set[str]) -> bool:
    """Whether an entry of bytes holds the key, itself or in a dict that was stored whole."""
    words = fqn.split(".") if names else []
    return any(".".join(words[:stop]) in names for stop in range(1, len(words) + 1))


def _holds_none(ckpt: Checkpoint, kind: EntryKind, mine: Mapping[KeyFamily, list[KeyEntry]]) -> bool:
    """Whether the checkpoint holds no key of a kind, and saving it elsewhere is usual."""
    if mine:
        return False
    has_optimizer = any(parse(fqn).kind == "optimizer" for fqn in ckpt.tensors)
    if kind == "optimizer":
        return not has_optimizer
    # An optimizer in a folder of its own (named optim...) has no weights by design; a folder with both kinds that lost
    # its weights must still report them.
    return kind == "copy" or (has_optimizer and "optim" in PurePath(ckpt.path).name)


# ---------------------------------------------------------------- one kind of keys


def _compare_kind(
    result: KeyComparison, expected: dict[KeyFamily, list[KeyEntry]], stored: dict[KeyFamily, list[KeyEntry]]
) -> None:
    """Compare the key families of one kind: shared ones, then those that were renamed, then what is left on a side."""
    shared = [family for family in expected if family in stored]
    lost = {family: entries for family, entries in expected.items() if family not in stored}
    extra = {family: entries for family, entries in stored.items() if family not in expected}
    for family in shared:
        theirs, mine = expected[family], stored[family]
        forms = {entry.form for entry in theirs}, {entry.form for entry in mine}
        if forms[0] == forms[1]:
            _compare_places(result, theirs, mine)
        elif len(forms[0]) == len(forms[1]) == 1:
            _compare_slots(result, theirs, mine, (forms[0].pop(), forms[1].pop()))
        else:
            _leave_open(result, theirs, mine)
    # Two naming schemes share a few names by chance (norms, biases). Below half, no key is called absent: assumed
    # rather than derived, since a wrong "absent" is an error and a missed one stays visible as an unpaired name.
    if 2 * len(shared) < min(len(expected), len(stored)):
        lost_open, extra_open = set(lost), set(extra)
    else:
        lost_open, extra_open = _renamed(lost, extra)
    result.absent.extend(LoneKeys(e) for family, entries in lost.items() if family not in lost_open for e in entries)
    result.added.extend(LoneKeys(e) for family, entries in extra.items() if family not in extra_open for e in entries)
    result.unpaired_expected.extend(sorted(e.fqn for family in lost_open for e in lost[family]))
    result.unpaired_stored.extend(sorted(e.fqn for family in extra_open for e in extra[family]))


def _renamed(
    lost: Mapping[KeyFamily, list[KeyEntry]], extra: Mapping[KeyFamily, list[KeyEntry]]
) -> tuple[set[KeyFamily], set[KeyFamily]]:
    """Families of one side that may be families of the other, renamed, split or fused: with one function, and room."""
    room = grouped(((bool(entries[0].key.block), _function(entries[0])), family) for family, entries in extra.items())

    @cache
    def near(inside: bool, function: str) -> tuple[list[KeyFamily], int | None]:
        """The added families that may have this function, and their elements in all."""
        functions = (function, "other") if function != "other" else [name for block, name in room if block == inside]
        families = [family for name in functions for family in room.get((inside, name), ())]
        return families, _volume(entry for family in families for entry in extra[family])

    lost_open: set[KeyFamily] = set()
    used: set[tuple[bool, str]] = set()
    for family, entries in lost.items():
        sort = bool(entries[0].key.block), _function(entries[0])
        families, there = near(*sort)
        wanted = _volume(entries)
        # Half, because a padded vocabulary, fused projections or packed codes change the number of elements; a family
        # that was dropped finds far less room. Unknown sizes leave the question open.
        if families and (wanted is None or there is None or 2 * there >= wanted):
            lost_open.add(family)
            used.add(sort)
    extra_open = {family for sort in used for family in near(*sort)[0]}
    return lost_open, extra_open


def _function(entry: KeyEntry) -> str:
    """The function of a parameter; query, key and value count as one, since they may be fused."""
    return "qkv" if entry.key.function in ("q", "k", "v") else entry.key.function


def _volume(entries: Iterable[KeyEntry]) -> int | None:
    """Elements of a family; None where a shape is unknown or a dtype packs several values into one element."""
    total = 0
    for entry in entries:
        if entry.shape is None or entry.dtype in _PACKED:
            return None
        total += prod(entry.shape)
    return total


# ---------------------------------------------------------------- one family


def _compare_places(result: KeyComparison, expected: list[KeyEntry], stored: list[KeyEntry]) -> None:
    """Pair entries by their layer and expert numbers."""
    theirs = {(e.key.layer, e.key.expert): e for e in expected}
    mine = {(e.key.layer, e.key.expert): e for e in stored}
    if len(theirs) == len(expected) and len(mine) == len(stored):
        result.absent.extend(LoneKeys(e) for place, e in theirs.items() if place not in mine)
        result.added.extend(LoneKeys(e) for place, e in mine.items() if place not in theirs)
        pairs = [(e, mine[place]) for place, e in theirs.items() if place in mine]
    else:
        # Tied weights give one layer two keys (exports save both). Only equal names are sure to be the same parameter.
        named = {e.fqn: e for e in stored}
        pairs = [(e, named[e.fqn]) for e in expected if e.fqn in named]
        paired = {e.fqn for e, _ in pairs}
        _leave_open(result, *([e for e in side if e.fqn not in paired] for side in (expected, stored)))
    result.pairs.extend(KeyPair(e, m, e.shape, m.shape) for e, m in pairs)


def _compare_slots(
    result: KeyComparison, expected: list[KeyEntry], stored: list[KeyEntry], forms: tuple[Form, Form]
) -> None:
    """Pair stacked layers or experts of one side with numbered ones of the other."""
    theirs, mine = _slots(expected, *forms), _slots(stored, *forms[::-1])
    pairs: list[KeyPair] = []
    if theirs is not None and mine is not None:
        common = [slot for slot in theirs if slot in mine]
        pairs = [KeyPair(theirs[s][0], mine[s][0], theirs[s][1], mine[s][1], alike=False) for s in common]
    known = [p for p in pairs if p.expected_shape is not None and p.stored_shape is not None]
    if not pairs or any(len(p.expected_shape or ()) != len(p.stored_shape or ()) for p in known):
        _leave_open(result, expected, stored)
        return
    result.pairs.extend(pairs)
    result.absent.extend(_singles(theirs or {}, mine or {}))
    result.added.extend(_singles(mine or {}, theirs or {}))


def _leave_open(result: KeyComparison, expected: Iterable[KeyEntry], stored: Iterable[KeyEntry]) -> None:
    result.unpaired_expected.extend(entry.fqn for entry in expected)
    result.unpaired_stored.extend(entry.fqn for entry in stored)


Slots = dict[Slot, tuple[KeyEntry, Shape | None]]


def _slots(entries: list[KeyEntry], form: Form, opposite: Form) -> Slots | None:
    """The entries by (layer, expert), a stacked axis split where the other side has numbers; None where impossible."""
    opens = [mine == "axis" and theirs == "number" for mine, theirs in zip(form, opposite, strict=True)]
    if any(
        mine != theirs and {mine, theirs} != {"axis", "number"} for mine, theirs in zip(form, opposite, strict=True)
    ):
        return None
    axes = [axis for axis, is_open in ((0, opens[0]), (int(form[0] == "axis"), opens[1])) if is_open]
    slots: Slots = {}
    for entry in entries:
        shape, sizes = entry.shape, [1, 1]
        if axes:
            if shape is None or len(shape) <= max(axes):
                return None
            sizes = [shape[0] if opens[0] else 1, shape[axes[-1]] if opens[1] else 1]
            shape = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        if len(slots) + prod(sizes) > _SLOT_LIMIT:
            return None
        for layer in range(sizes[0]):
            for expert in range(sizes[1]):
                slot = layer if opens[0] else entry.key.layer, expert if opens[1] else entry.key.expert
                if slot in slots:
                    return None
                slots[slot] = entry, shape
    return slots


def _singles(mine: Slots, others: Slots) -> list[LoneKeys]:
    """Tensors of one side without a counterpart; of a stacked tensor only the unmatched layers or experts."""
    places = grouped((entry, slot) for slot, (entry, _) in mine.items() if slot not in others)
    return [LoneKeys(entry, _part(slots, entry)) for entry, slots in places.items()]


def _part(slots: list[Slot], entry: KeyEntry) -> str:
    layers = {layer for layer, _ in slots if isinstance(layer, int)} if entry.key.layer is None else set()
    experts = {expert for _, expert in slots if isinstance(expert, int)} if entry.key.expert is None else set()
    texts = [f"{word} {ranges(numbers)}" for word, numbers in (("layers", layers), ("experts", experts)) if numbers]
    return ", ".join(texts)


@fact
def reference_shapes(ckpt: Checkpoint) -> dict[str, Shape]:
    """Stored key -> its shape in the reference, for tensors of the model."""
    if ckpt.reference is None:
        return {}
    return {
        pair.stored.fqn: pair.expected_shape
        for pair in match_keys(ckpt, ckpt.reference).pairs
        if pair.alike and pair.stored.kind == "model" and pair.expected_shape is not None
    }


def is_confirmed(ckpt: Checkpoint, param: Param) -> bool:
    """Whether the reference confirms the shape of a tensor, or the configuration decides it (CFG003)."""
    name = param.tensor.fqn
    return reference_shapes(ckpt).get(name) == param.tensor.global_shape or name in judged_shapes(ckpt)
