"""Checks whether the new side is the old one with an adapter merged in, by the expected values of each target.

Source: peft 0.21 (tuners.lora.layer, tuners.lora.variants: LoRA, rsLoRA, DoRA, ParamWrapper; modules_to_save;
trainable_token_indices)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from ckptlint.architecture.adapters import BASE_LAYER, PREFIX, AdapterConfig, Factors, factors_of, read_adapter_config
from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.comparing.values.match import Match
from ckptlint.comparing.values.rows import compare_rows, row_ranges
from ckptlint.depth import Depth
from ckptlint.errors import ConfigError
from ckptlint.grouping import grouped
from ckptlint.model.cover import Shape
from ckptlint.numerics.distance import ROUNDING
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import default_reading
from ckptlint.payload.tensor_bytes import BytesByKey, Matrix, TensorBytes
from ckptlint.seals.row_hashes import matrix
from ckptlint.vocabulary.keys import parse, role

_PRODUCT = 4e-6  # relative error of a float32 dot product, by the norms of both vectors
_ALIKE = 0.9  # least cosine between the actual change and the adapter's for which it counts as that change
_ONE = np.ones((1, 1), np.float32)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of a target, from `first` on, to which the adapter adds `left @ right`, scaled."""

    first: int
    left: Matrix
    right: Matrix


@dataclass(frozen=True, slots=True)
class _Target:
    """The change that an adapter makes to one tensor of the base.

    Attributes:
        fqn: key on the old side.
        shape: shape that divides the tensor into rows.
        magnitudes: norms of rows (`axis` 0) or columns (1) after the change (DoRA); None without them.
    """

    fqn: str
    shape: Shape
    blocks: tuple[_Block, ...]
    magnitudes: Matrix | None = None
    axis: int = 0


class _Expected(NamedTuple):
    """Expected rows, allowed absolute error of each element, and the rows of the base."""

    values: Matrix
    allowed: Matrix
    base: Matrix | float = 0.0


@dataclass(slots=True)
class _Change:
    """Sums over the elements of a tensor: squares of the actual and the expected change, and their product.

    Attributes:
        far: elements that differ from the expected value by more than rounding explains.
    """

    far: int = 0
    actual: float = 0.0
    expected: float = 0.0
    both: float = 0.0

    def see(self, _: int, wanted: _Expected, new: Matrix) -> None:
        """Add some rows of the new side and their expected values."""
        with np.errstate(all="ignore"):
            expected, actual = (wanted.values - wanted.base).reshape(-1), (new - wanted.base).reshape(-1)
            self.far += int(np.count_nonzero(~(np.abs(new - wanted.values) <= wanted.allowed)))
            self.actual += float(actual @ actual)
            self.expected += float(expected @ expected)
            self.both += float(actual @ expected)


@dataclass(slots=True)
class _Adapter:
    """An adapter, read as far as its headers."""

    places: BytesByKey
    config: AdapterConfig
    used: set[str] = field(default_factory=set)


def with_merges(
    pairs: Sequence[Match], places: tuple[BytesByKey, BytesByKey], adapter: Sequence[OpenedCheckpoint]
) -> list[Match]:
    """The matches, with targets of a LoRA adapter (else ConfigError) judged by expected values, and its unused keys."""
    opened = _opened(adapter)
    by_key = {match.old[0]: match for match in pairs if len(match.old) == len(match.new) == 1}
    judged: dict[str, Match] = {}
    for options in _targets(opened, places[0]):
        judgements = []
        for target in options:
            if target.fqn in by_key and target.fqn not in judged:
                match = by_key[target.fqn]
                judgements.append(_judge(match, target, places[0][match.old[0]], places[1][match.new[0]]))
                if judgements[-1].is_proven:
                    break
        if judgements:
            best = judgements[-1] if judgements[-1].is_proven else judgements[0]
            judged[best.old[0]] = best
    for key, fqn, expected in _saved(opened, places[0]):
        if fqn in by_key:
            opened.used.add(key)
            judged[fqn] = _replaced(by_key[fqn], expected, places[1][by_key[fqn].new[0]])
    matches = []
    for match in pairs:
        if match.old and match.old[0] in judged:
            match = judged[match.old[0]]
        elif match.relation == "differ":
            match = replace(match, notes=(*match.notes, "the adapter has nothing for it, so it should be equal"))
        matches.append(match)
    what = "the adapter holds it, and the base has nothing that it fits"
    left = sorted(opened.places.keys() - opened.used)
    return matches + [Match("unmerged", (key,), (), False, what) for key in left]


def _opened(adapter: Sequence[OpenedCheckpoint]) -> _Adapter:
    tensors: dict[str, TensorBytes] = {}
    config = None
    for side in adapter:
        ckpt = read_payload(side.folder, side.ckpt, default_reading(Depth.HEADERS))
        config = config or ckpt.config
        tensors |= {fqn: TensorBytes(side.folder, ckpt, tensor) for fqn, tensor in ckpt.tensors.items()}
    read = read_adapter_config(config.values) if config is not None else AdapterConfig()
    if read.kind != "LORA" or not factors_of(tensors):
        raise ConfigError("--adapter takes the folder of a LoRA adapter, with adapter_config.json and its factors")
    return _Adapter(tensors, read)


def _targets(adapter: _Adapter, base: BytesByKey) -> Iterator[list[_Target]]:
    """The possible targets of each module of the adapter: one tensor, or several where only shapes decide."""
    endings = {key.partition(".")[2]: key for key in base}  # of models that were saved below another name
    for factors in factors_of(adapter.places):
        if not {"A", "B"} <= factors.keys.keys():
            continue
        a, b = (adapter.places[factors.keys[name]].whole() for name in ("A", "B"))
        scale = None if a is None else adapter.config.scale_of(factors.base_module, _rank(a, factors, base, endings))
        if a is None or b is None or scale is None:
            continue
        options = list(_meant(factors, a, b * np.float32(scale), adapter, base, endings))
        if options:
            adapter.used |= {*factors.keys.values()}
            yield from ([option] if isinstance(option, _Target) else option for option in options)
        bias = factors.keys["B"].removesuffix("weight") + "bias"
        key = _key(f"{factors.base_module}.bias", base, endings)
        added = adapter.places[bias].whole() if bias in adapter.places else None
        if key and added is not None and base[key].shape == added.shape:
            adapter.used.add(bias)
            yield [_Target(key, (len(added), 1), (_Block(0, added[:, None] * np.float32(scale), _ONE),))]


def _home(module: str, base: BytesByKey) -> str:
    """The module of the experts under its name in the base, which may differ from the name in memory."""
    if any(f"{module}." in key for key in base):
        return module
    name = f".{module.rpartition('.')[2]}."
    homes = {key.partition(name)[0] + name[:-1] for key in base if name in key}
    layer = parse(f"{module}.weight").layer
    return next((home for home in sorted(homes) if parse(f"{home}.weight").layer == layer), module)


def _key(name: str, base: BytesByKey, endings: Mapping[str, str]) -> str:
    return name if name in base else endings.get(name.partition(".")[2], endings.get(name, ""))


def _experts(module: str, base: BytesByKey) -> dict[int, list[str]]:
    """Number of an expert -> its keys, where experts have separate keys below a module."""
    below = ((key.rpartition(f"{module}.")[2].partition(".")[0], key) for key in base if f"{module}." in key)
    return grouped((int(number), key) for number, key in below if number.isdecimal())


def _stacked(module: str, base: BytesByKey) -> list[str]:
    matrices = (key for key, place in base.items() if f"{module}." in key and len(place.shape) == 3)
    return [key for key in matrices if "." not in key.rpartition(f"{module}.")[2]]


def _rank(a: Matrix, factors: Factors, base: BytesByKey, endings: Mapping[str, str]) -> int:
    """The rank of one module's factors; those of experts are concatenated."""
    module = factors.base_module
    if _key(f"{module}.weight", base, endings):
        return len(a)
    module = _home(module, base)
    stacked = _stacked(module, base)
    count = base[stacked[0]].shape[0] if stacked else max(len(_experts(module, base)), 1)
    return len(a) // count


def _meant(
    factors: Factors, a: Matrix, b: Matrix, adapter: _Adapter, base: BytesByKey, endings: Mapping[str, str]
) -> Iterator[_Target | list[_Target]]:
    """The possible targets of factors (`b` is scaled): single targets, or a list with one right target."""
    module = factors.base_module
    key = _key(f"{module}.weight", base, endings)
    is_embedding = "lora_embedding" in factors.keys["A"]
    if not key:
        yield from _of_experts(_home(module, base), a, b, base)
        return
    shape = base[key].shape
    flat = a.reshape(len(a), -1), b.reshape(-1, b.shape[1])
    magnitudes = adapter.places[factors.keys["magnitude"]].whole() if "magnitude" in factors.keys else None
    magnitudes = None if magnitudes is None else magnitudes.reshape(-1)
    if is_embedding or (adapter.config.is_transposed and len(shape) == 2):
        if shape == (flat[0].shape[1], flat[1].shape[0]):
            yield _Target(key, shape, (_Block(0, flat[0].T, flat[1].T),), magnitudes, 1)
    elif shape and (shape[0], prod(shape[1:])) == (flat[1].shape[0], flat[0].shape[1]):
        yield _Target(key, (shape[0], prod(shape[1:])), (_Block(0, flat[1], flat[0]),), magnitudes)


def _of_experts(module: str, a: Matrix, b: Matrix, base: BytesByKey) -> Iterator[_Target | list[_Target]]:
    """The possible targets of factors for many experts: tensors with all experts, or one tensor for each."""
    stacked = [(key, base[key].shape) for key in _stacked(module, base)]
    options = []
    for key, shape in stacked:
        count, height, width = shape
        if len(a) % count or not count:
            continue
        pairs = _of_each(a, b, count)
        if (height, width) == (len(b), a.shape[1]):
            options.append(_Target(key, shape, tuple(_Block(e * height, *pair) for e, pair in enumerate(pairs))))
        if (height, width) == (a.shape[1], len(b)):
            blocks = tuple(_Block(e * height, right.T, left.T) for e, (left, right) in enumerate(pairs))
            options.append(_Target(key, shape, blocks))
    if options:
        yield options
    experts = _experts(module, base)
    if stacked or not experts or [*sorted(experts)] != [*range(len(experts))] or len(a) % len(experts):
        return
    for number, (left, right) in enumerate(_of_each(a, b, len(experts))):
        sizes = [(key, base[key].shape) for key in sorted(experts[number], key=_gate_first)]
        full_keys = [key for key, shape in sizes if shape == (len(left), right.shape[1])]
        outs = [key for key, _ in sizes if parse(key).function == "mlp_out"]
        halves = [key for key, shape in sizes if shape == (len(left) // 2, right.shape[1]) and key not in outs]
        # With square weights shapes decide nothing. Gate and up are fused in memory and have wider factors, so factors
        # of this width belong to the output projection.
        if len(full_keys) > len(outs) + 1:
            full_keys = outs or full_keys
        if full_keys:
            yield [_Target(key, base[key].shape, (_Block(0, left, right),)) for key in full_keys]
        elif len(halves) == 2:
            for key, half in zip(halves, np.split(left, 2), strict=True):
                yield _Target(key, base[key].shape, (_Block(0, half, right),))


def _gate_first(key: str) -> tuple[bool, str]:
    key_role = role(key)
    return not ("gate" in key_role or "w1" in key_role), key_role


def _of_each(a: Matrix, b: Matrix, count: int) -> list[tuple[Matrix, Matrix]]:
    """(left, right) of each expert: A is [experts * rank, in], B [out, rank * experts] with the experts fastest."""
    lefts, rights = b.reshape(len(b), -1, count), a.reshape(count, -1, a.shape[1])
    return [(lefts[:, :, number], rights[number]) for number in range(count)]


# ---------------------------------------------------------------- judging


def _judge(match: Match, target: _Target, old: TensorBytes, new: TensorBytes) -> Match:
    """The match of a target, by its expected values."""
    dtype = new.tensor.dtype
    can_be_judged = match.relation in ("equal", "rounded", "renamed", "differ")
    if not can_be_judged or dtype not in ROUNDING or old.tensor.dtype not in ROUNDING:
        return match
    factor = _factors(target, old) if target.axis else None
    epsilon = 2 * max(ROUNDING[name] for name in ("float32", old.tensor.dtype, dtype))  # computed in float32
    change = _Change()
    for block in target.blocks:
        expected = partial(_merged, old, target, block, epsilon, factor)
        rows = row_ranges(block.first, block.first + len(block.left), block.right.shape[1])
        if not compare_rows(rows, expected, partial(new.numbers, shape=target.shape), change.see):
            return replace(match, notes=(*match.notes, "not compared with the adapter: its rows cannot be read"))
    return _verdict(match, change, target)


def _factors(target: _Target, old: TensorBytes) -> Matrix | None:
    """float32 [columns], DoRA's factors: magnitude divided by the norm of the column after the change."""
    if target.magnitudes is None:
        return None
    block = target.blocks[0]
    squares = np.zeros(block.right.shape[1])
    for first, last in row_ranges(0, len(block.left), block.right.shape[1]):
        values = old.numbers(first, last, target.shape)
        if values is None:
            return None
        squares += np.square(values + block.left[first:last] @ block.right, dtype=np.float64).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(target.magnitudes / np.sqrt(squares), np.float32)


def _merged(
    old: TensorBytes, target: _Target, block: _Block, epsilon: float, factor: Matrix | None, first: int, last: int
) -> _Expected | None:
    """Expected rows: the base plus the product of a block."""
    base = old.numbers(first, last, target.shape)
    if base is None:
        return None
    rows = slice(first - block.first, last - block.first)
    left = block.left[rows]
    with np.errstate(all="ignore"):
        added = left @ block.right
        expected = base + added
        if target.magnitudes is not None:
            if factor is None:
                factor = (target.magnitudes[rows] / np.linalg.norm(expected, axis=1))[:, None]
            expected = expected * factor
            epsilon = 4 * epsilon
        errors = _PRODUCT * np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(block.right, axis=0)
        return _Expected(expected, epsilon * (np.abs(expected) + 2 * np.abs(added)) + errors, base)


def _verdict(match: Match, change: _Change, target: _Target) -> Match:
    """Whether a weight is the base with the adapter merged into it, not at all, twice, or by another factor."""
    volume = prod(target.shape)
    if not change.far:
        return replace(match, relation="merged", is_proven=True, what="", notes=())
    times = change.both / change.expected if change.expected else 0.0
    alike = change.both / sqrt(change.actual * change.expected) if change.expected and change.actual else 0.0
    # The factor names the likely mistake: 2 for an adapter merged twice, another for a lost scale. Assumed: rounding of
    # the new side stays within 2 %, and below a cosine of 0.9 the change is no multiple of the adapter.
    if not change.actual:
        what = "the adapter changes it, and it holds the base's values"
    elif alike > _ALIKE and abs(times - 1) > 0.02:
        what = f"holds {times:.3g} times what the adapter adds"
    elif alike < -_ALIKE:
        what = f"the adapter was taken off, {-times:.3g} times, not added"
    elif alike > _ALIKE:
        what = f"{change.far:,} of {volume:,} elements are not the base with the adapter merged in"
    else:
        what = f"changed, but not as the adapter says (cosine of both changes {alike:.2f})"
    return replace(match, relation="unmerged", is_proven=False, what=what, notes=())


_Rows = Callable[[int, int], Matrix | None]


def _saved(adapter: _Adapter, base: BytesByKey) -> Iterator[tuple[str, str, _Rows]]:
    """(adapter key, base key, expected rows) of what it replaces: modules_to_save, biases, trainable_token_indices."""
    endings = {key.partition(".")[2]: key for key in base}
    for key in sorted(adapter.places.keys() - adapter.used):
        if f"{BASE_LAYER}.weight" in key:  # the base's own, which peft saves beside trained embeddings
            adapter.used.add(key)
            continue
        name, kept = key.removeprefix(PREFIX).replace(f"{BASE_LAYER}.", "."), adapter.places[key]
        if name.endswith(_TOKENS):
            fqn, rows = _key(f"{name.removesuffix(_TOKENS)}.weight", base, endings), kept.whole()
            if fqn and rows is not None and len(rows) == len(adapter.config.tokens):
                yield key, fqn, partial(_with_tokens, base[fqn], dict(zip(adapter.config.tokens, rows, strict=True)))
        elif (fqn := _key(name, base, endings)) and base[fqn].shape == kept.shape:
            yield key, fqn, kept.numbers


_TOKENS = ".token_adapter.trainable_tokens_delta"


def _with_tokens(base: TensorBytes, tokens: Mapping[int, Matrix], first: int, last: int) -> Matrix | None:
    rows = base.numbers(first, last)
    for token, row in tokens.items():
        if rows is not None and first <= token < last and row.shape == rows.shape[1:]:
            rows[token - first] = row
    return rows


def _replaced(match: Match, kept: _Rows, new: TensorBytes) -> Match:
    """The match of a tensor that the adapter holds whole."""
    dtype = new.tensor.dtype
    epsilon = 2 * max(ROUNDING[name] for name in ("float32", dtype)) if dtype in ROUNDING else 0.0

    def expected(first: int, last: int) -> _Expected | None:
        wanted = kept(first, last)
        return None if wanted is None else _Expected(wanted, np.float32(epsilon) * np.abs(wanted))

    slices, per, width = matrix(new.shape)
    change = _Change()
    rows = takewhile(lambda _: not change.far, row_ranges(0, slices * per, width))
    if not compare_rows(rows, expected, new.numbers, change.see):
        return replace(match, is_proven=False, notes=(*match.notes, "not compared with the adapter: not readable"))
    if change.far:
        what = "differs from the copy in the adapter (modules_to_save)"
        return replace(match, relation="unmerged", is_proven=False, what=what, notes=())
    return replace(match, relation="merged", is_proven=True, what="taken from the adapter whole", notes=())
