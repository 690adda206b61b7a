"""The quantised weights of a checkpoint: how each is stored, and what the configuration says of it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.vocabulary.config_fields import QUANTISATION
from ckptlint.vocabulary.dtypes import FLOATS, ITEM_BITS
from ckptlint.vocabulary.keys import parse, role
from ckptlint.vocabulary.schemes import Part, Scheme, named, quantised_weight, quantised_weights, schemes, weight_of

WIDE = frozenset(dtype for dtype in FLOATS if ITEM_BITS[dtype] > 8)
"""Dtypes of weights that are not quantised."""

_BARE = "{weight}"
_PLAIN = re.compile(r"[\w./*\-]+")
_IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "llm_int8_skip_modules")
_CACHE_BITS = {"fp8": 8, "int8": 8, "nvfp4": 4}  # nvidia-modelopt 0.47: kv_cache_quant_algo
_UNFINISHED = ("initialized", "calibration", "frozen")  # compressed-tensors 0.20: weights are not compressed yet


class Declaration(NamedTuple):
    """What the configuration says of the quantisation.

    Attributes:
        file: where it says so.
        words: the scheme as it stands there.
        schemes: those that it means; empty where it means none that is known.
        options: of each group of weights, by name: bits, group, tall, wide, bits of the KV cache; its strategy; whether
            it is symmetric.
        ignored: patterns (`fnmatch`) and parts of names of modules that are not quantised.
        is_exact: whether nothing of it is left open: every group and every pattern was understood.
        beside: what ModelOpt's own file says, where the configuration says something, too.
    """

    file: str
    words: str
    schemes: tuple[Scheme, ...]
    options: tuple[Mapping[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()
    is_exact: bool = True
    beside: Declaration | None = None

    def asks_for(self, part: Part) -> bool | None:
        """Whether all weights have a part (True) or none has (False); None where nothing of it is declared."""
        answers = {
            tuple(options.get(name) == value for name, value in part.declared.items()) for options in self.options
        }
        is_open = any(name not in options for name in part.declared for options in self.options)
        return None if is_open or not part.declared or len(answers) != 1 else all(next(iter(answers)))

    def names(self, module: str) -> bool:
        """Whether a module stands among those left as they were, under its name or a pattern of the whole name."""
        return any(fnmatchcase(module, entry) or module.endswith(f".{entry}") for entry in self.ignored)

    def ignores(self, name: str) -> bool:
        """Whether a module, or all with such a name, is left as it was."""
        return any(entry in name or fnmatchcase(name, entry) for entry in self.ignored)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A weight that is stored quantised.

    Attributes:
        weight: the key that it has unquantised.
        codes: the tensor that holds its codes.
        parts: what is stored with it.
    """

    weight: str
    codes: Tensor
    scheme: Scheme
    parts: Mapping[Part, Tensor]

    def lacks(self) -> Iterator[Part]:
        """The needed parts that are not stored."""
        return (part for part in self.scheme.parts if part.needed and part not in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Quantisation:
    """The quantised weights, and what is left over.

    Attributes:
        known: schemes of which a whole weight is stored, or that are declared.
        alone: scheme -> key of a needed part -> the weight's key, where no codes of it are stored.
    """

    declared: Declaration | None
    weights: list[QuantisedWeight]
    known: frozenset[Scheme]
    alone: Mapping[Scheme, dict[str, str]] = field(default_factory=dict)


@fact
def quantisation(ckpt: Checkpoint) -> Quantisation:
    """How the weights are quantised; without any and without a declaration there is nothing in it."""
    declared = _declaration(ckpt)
    with_parts = quantised_weights(ckpt.tensors)
    few = (tensor for key, tensor in ckpt.tensors.items() if key in with_parts or tensor.dtype not in WIDE)
    candidates = {tensor.fqn: key_candidates for tensor in few if (key_candidates := list(_candidates(ckpt, tensor)))}
    complete = Counter(
        one.scheme
        for key_candidates in candidates.values()
        for one in key_candidates
        if one.parts and not [*one.lacks()]
    )
    if not candidates and declared is None:
        return Quantisation(None, [], frozenset())
    expected = declared.schemes if declared else ()
    roles = {role(one.weight) for key_candidates in candidates.values() for one in key_candidates if one.parts}
    weights = []
    for key_candidates in candidates.values():
        best = max(
            key_candidates, key=lambda one: (_rank(one), one.scheme in expected, complete[one.scheme], len(one.parts))
        )
        is_weight = best.weight.endswith("weight") or role(best.weight) in roles
        is_sure = best.scheme in expected or complete[best.scheme]
        if best.parts or (is_weight and is_sure):
            weights.append(best)
    known = frozenset(complete) | frozenset(expected)
    used = {named(name, one.weight) for one in weights for part in one.scheme.parts for name in part.names}
    used |= {one.codes.fqn for one in weights}
    return Quantisation(declared, weights, known, _alone(ckpt, known, used, {role(one.weight) for one in weights}))


def _rank(one: QuantisedWeight) -> int:
    """How well the stored parts fit a scheme: all that it needs, some, or none."""
    return 0 if not one.parts else 1 if any(one.lacks()) else 2


def _candidates(ckpt: Checkpoint, tensor: Tensor) -> Iterator[QuantisedWeight]:
    """What a tensor may be the codes of: a weight in each scheme that has such codes."""
    for scheme in _by_dtype().get(tensor.dtype, ()):
        if len(tensor.global_shape) < len(scheme.axes):
            continue
        weight = weight_of(tensor.fqn, scheme.weight)
        if not weight or (scheme.weight == _BARE and quantised_weight(weight)):
            continue
        parts = {
            part: tensor_of_part for part in scheme.parts if (tensor_of_part := _stored(ckpt, part, weight)) is not None
        }
        if parts or tensor.dtype not in WIDE:
            yield QuantisedWeight(weight, tensor, scheme, parts)


@cache
def _by_dtype() -> dict[str, list[Scheme]]:
    schemes_by_dtype: dict[str, list[Scheme]] = defaultdict(list)
    for scheme in schemes():
        for dtype in scheme.dtypes:
            schemes_by_dtype[dtype].append(scheme)
    return schemes_by_dtype


def _stored(ckpt: Checkpoint, part: Part, weight: str) -> Tensor | None:
    """A part of a weight, where it has a dtype that it may have."""
    for name in part.names:
        tensor = ckpt.tensors.get(named(name, weight))
        dtypes = part.common.get(name, part.dtypes)
        if tensor is not None and (not dtypes or tensor.dtype in dtypes):
            return tensor
    return None


def stored_otherwise(ckpt: Checkpoint, part: Part, one: QuantisedWeight) -> Tensor | None:
    """What is stored under the name of a part of a weight, in a dtype that no such part has."""
    if part in one.parts:
        return None
    keys = (named(name, one.weight) for name in part.names if name not in part.common)
    return next((ckpt.tensors[key] for key in keys if key in ckpt.tensors), None)


def _alone(
    ckpt: Checkpoint, known: frozenset[Scheme], used: set[str], roles: set[str]
) -> Mapping[Scheme, dict[str, str]]:
    """Parts that nothing has but a weight of a known scheme, whose codes are not stored.

    Args:
        used: the keys of weights and of their parts.
        roles: of the weights that are stored quantised.
    """
    keys_by_scheme: dict[Scheme, dict[str, str]] = defaultdict(dict)
    needed = [
        (scheme, part, name)
        for scheme in sorted(known, key=lambda scheme: scheme.name)
        for part in scheme.parts
        if part.needed
        for name in part.names
    ]
    for key, tensor in ckpt.tensors.items():
        if key in used:
            continue
        for scheme, part, name in needed:
            weight = weight_of(key, name)
            if not weight or quantised_weight(weight):
                continue
            if tensor.dtype not in part.common.get(name, (tensor.dtype,)):
                continue
            if role(weight) in roles or _is_of_a_weight(tensor, weight, scheme):
                keys_by_scheme[scheme][key] = weight
                break
    return keys_by_scheme


def _is_of_a_weight(scale: Tensor, weight: str, scheme: Scheme) -> bool:
    """Whether what a scale belongs to by its name is a weight.

    An attention layer has scales of its KV cache, which are called `k_scale` as if there were a weight `k`
    (compressed-tensors, Quark, ModelOpt, vLLM). They are one number, or one for each head; a cache is of no expert.
    """
    if scheme.weight != _BARE or weight.endswith("weight") or parse(weight).in_experts:
        return True
    return sum(size > 1 for size in scale.global_shape) > 1


# ---------------------------------------------------------------- shapes


def misfit(one: QuantisedWeight, part: Part, declared: Declaration | None) -> str:
    """The shape that a part should have, as text, where it has another; "" where it fits or nobody knows."""
    lead = one.codes.global_shape[: -len(one.scheme.axes)]
    sizes = _sizes(one)
    shape = one.parts[part].global_shape
    groups = declared.options if declared is not None and one.scheme in declared.schemes else ()
    wanted: list[tuple[int | None, ...]] = []
    for options in groups or ({},):
        stated: dict[str, Any] = {**options, **sizes}
        for name, text in one.scheme.sizes.items():
            if (size := _size(text, stated)) is not None:
                stated[name] = size
        strategy = options.get("strategy")
        for kind, shapes in part.shapes.items():
            if kind == strategy or strategy not in part.shapes:
                wanted += (tuple(_size(text, stated) for text in texts) for texts in shapes)
    for sizes_wanted in wanted:
        for before in {lead, ()}:
            full = (*before, *sizes_wanted)
            if len(full) == len(shape) and all(a in (None, b) for a, b in zip(full, shape, strict=True)):
                return ""
    if not wanted:
        return ""
    return " or ".join(dict.fromkeys(f"[{', '.join(map(str, (*lead, *w)))}]" for w in wanted if None not in w))


def _sizes(one: QuantisedWeight) -> dict[str, int]:
    """The axes of the codes of a weight, and the bytes of each code."""
    shape = one.codes.global_shape[-len(one.scheme.axes) :]
    return {**dict(zip(one.scheme.axes, shape, strict=True)), "item": ITEM_BITS.get(one.codes.dtype, 8) // 8}


def in_other_blocks(weights: list[QuantisedWeight]) -> Iterator[tuple[QuantisedWeight, Part, str]]:
    """Weights with a scale for each block of another size than most have; the part, and the shape that it should be."""
    fits: dict[Part, list[tuple[QuantisedWeight, set[str]]]] = defaultdict(list)
    for one in weights:
        for part, tensor in one.parts.items():
            texts = {text for (text,) in part.shapes.get("same_block", ())}
            fits[part].append((one, {text for text in texts if (_size(text, _sizes(one)),) == tensor.global_shape}))
    for part, alike in fits.items():
        (usual, count), *_ = Counter(text for _, texts in alike for text in texts).most_common(1) or [("", 0)]
        for one, texts in alike if 2 * count > len(alike) else ():
            if texts and usual not in texts:
                yield one, part, f"[{_size(usual, _sizes(one))}] as in most others"


def _size(text: str, sizes: Mapping[str, Any]) -> int | None:
    """The value of an expression; None where a size in it is not known."""
    from ckptlint.architecture.expressions import ExpressionError, parse_expression, whole

    try:
        return whole(parse_expression(text), sizes)
    except ExpressionError:
        return None


# ---------------------------------------------------------------- what is declared


def _declaration(ckpt: Checkpoint) -> Declaration | None:
    values = ckpt.config.values if ckpt.config is not None else {}
    text = values.get("text_config")
    for section in (values, text if isinstance(text, dict) else {}):
        for name in QUANTISATION:
            config = section.get(name)
            if isinstance(config, dict) and ckpt.config is not None and (method := _method(config)):
                return _understood(str(config.get("_file") or ckpt.config.file), method, config)
    return None


def _method(found: Mapping[str, Any]) -> str:
    """`quant_method`; of the forms that do not name one, what they are."""
    method = found.get("quant_method")
    if isinstance(method, str) and method:
        return method
    return "modelopt" if found.get("quant_algo") else "mlx" if {"bits", "group_size"} <= found.keys() else ""


def _understood(file: str, method: str, config: Mapping[str, Any]) -> Declaration:
    """What a quantisation config declares: schemes, options of each group, and what it leaves unquantised."""
    groups = config.get("config_groups")
    parts = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else [config]
    meant: dict[Scheme, None] = {}
    options, words, is_exact = [], [], config.get("quantization_status") not in _UNFINISHED
    for group in parts:
        weights = group.get("weights")
        of_weights = weights if isinstance(weights, dict) else group
        stated = {**config, **of_weights, "quant_method": method, "format": group.get("format") or config.get("format")}
        settings = {name: str(value).casefold() for name, value in stated.items() if isinstance(value, (str, bool))}
        declared_schemes = [
            scheme for scheme in schemes() if any(_is_meant(settings, wanted) for wanted in scheme.declared)
        ]
        meant |= dict.fromkeys(declared_schemes)
        is_exact &= bool(declared_schemes)
        options.append(_options(of_weights, config))
        words.append(str(stated.get("quant_algo") or stated["format"] or method))
    ignored, is_plain = _ignored(config)
    title = ", ".join(dict.fromkeys(words))[:60] or method[:60]
    other = config.get("_beside")
    beside = _understood(str(other.get("_file")), "modelopt", other) if isinstance(other, dict) else None
    return Declaration(file, title, tuple(meant), tuple(options), ignored, is_exact and is_plain, beside)


def _is_meant(facts: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(facts.get(name) == value.casefold() for name, value in wanted.items())


def _options(weights: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Bits, group, rows and columns of a block, and strategy, by our names."""
    if found.get("dynamic") and isinstance(found["dynamic"], dict):  # gptqmodel: other sizes for some modules
        return {}
    block = weights.get("block_structure") or found.get("weight_block_size")
    stated = {**found, **weights}
    options = {"bits": stated.get("num_bits", stated.get("bits", stated.get("w_bit")))}
    options["group"] = stated.get("group_size", stated.get("q_group_size"))
    cache, algo = stated.get("kv_cache_scheme"), stated.get("kv_cache_quant_algo")
    options["cache_bits"] = cache.get("num_bits") if isinstance(cache, dict) else _CACHE_BITS.get(str(algo).casefold())
    if isinstance(block, list) and len(block) == 2:
        options |= {"tall": block[0], "wide": block[1], "strategy": "block"}
    options = {name: value for name, value in options.items() if name == "strategy" or _is_count(value)}
    if isinstance(symmetric := weights.get("symmetric"), bool):
        options["symmetric"] = str(symmetric).lower()
    if isinstance(strategy := weights.get("strategy"), str):
        options["strategy"] = "group" if strategy == "tensor_group" else strategy
    return options


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ignored(found: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The modules that a configuration leaves unquantised, and whether all of the patterns mean something here.

    A pattern that is more than text and `.*` is never run.
    """
    entries: list[object] = []
    for name in _IGNORED:
        if isinstance(listed := found.get(name), list):
            entries += listed
    if isinstance(dynamic := found.get("dynamic"), dict):
        entries += [f"re:{name[2:]}" for name in dynamic if isinstance(name, str) and name.startswith("-:")]
    kept, is_plain = [], True
    for entry in entries:
        text = entry if isinstance(entry, str) else ""
        if text.startswith("re:"):
            text = text[3:].removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
        if _PLAIN.fullmatch(text):
            kept.append(text)
        else:
            is_plain = False
    return tuple(kept), is_plain
