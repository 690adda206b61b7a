"""The quantised weights of a checkpoint: their stored tensors, and the quantisation that the configuration declares."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from typing import Any, NamedTuple

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.facts import fact
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.config_fields import QUANTISATION
from ckptlint.vocabulary.dtypes import FLOATS, ITEM_BITS
from ckptlint.vocabulary.keys import parse, role
from ckptlint.vocabulary.schemes import Part, Scheme, named, quantised_weight, quantised_weights, schemes, weight_of

WIDE = frozenset(dtype for dtype in FLOATS if ITEM_BITS[dtype] > 8)
"""Dtypes of weights that are not quantised."""

_BARE = "{weight}"
_PLAIN = lazy_pattern(r"[\w./*\-]+")
_NOTHING = lazy_pattern(r"(?!)")
_IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "llm_int8_skip_modules")
_CACHE_BITS = {"fp8": 8, "int8": 8, "nvfp4": 4}  # nvidia-modelopt 0.47: kv_cache_quant_algo
_UNFINISHED = ("initialized", "calibration", "frozen")  # compressed-tensors 0.20: weights are not compressed yet


class Declaration(NamedTuple):
    """The quantisation that a configuration declares.

    Attributes:
        file: name of the declaring file.
        words: the scheme, as written in that file.
        schemes: the matching schemes; empty where none is known.
        options: settings of each group of weights: bits, group size, rows (`tall`) and columns (`wide`) of a block,
            bits of the KV cache, strategy, symmetry.
        ignored: `fnmatch` patterns or name parts of modules that stay unquantised.
        patterns: these patterns in one expression, since a list may name a module of every layer.
        is_exact: whether every group and every pattern was understood.
        beside: the declaration in ModelOpt's own file, where config.json has one too.
    """

    file: str
    words: str
    schemes: tuple[Scheme, ...]
    options: tuple[Mapping[str, Any], ...] = ()
    ignored: frozenset[str] = frozenset()
    patterns: re.Pattern[str] = _NOTHING
    is_exact: bool = True
    beside: Declaration | None = None

    def asks_for(self, part: Part) -> bool | None:
        """Whether all weights have this part (True) or none (False); None where the declaration leaves it open."""
        answers = {
            tuple(options.get(name) == value for name, value in part.declared.items()) for options in self.options
        }
        is_open = any(name not in options for name in part.declared for options in self.options)
        return None if is_open or not part.declared or len(answers) != 1 else all(next(iter(answers)))

    def names(self, module: str) -> bool:
        """Whether the ignore list names this module, exactly or by a pattern of its full name."""
        words = module.split(".")
        ends = (".".join(words[start:]) for start in range(len(words)))
        return not self.ignored.isdisjoint(ends) or bool(self.patterns.match(module))

    def ignores(self, name: str) -> bool:
        """Whether the ignore list may cover a name, including by substring."""
        is_listed = name in self.ignored or bool(self.patterns.match(name))
        return is_listed or any(entry in name for entry in self.ignored)


class QuantisedWeight(NamedTuple):
    """A weight that is stored quantised.

    Attributes:
        weight: the key that it has unquantised.
        codes: the tensor that holds its codes.
        parts: scales, zero points and other tensors stored with it.
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
    """All quantised weights of a checkpoint.

    Attributes:
        known: schemes that are declared, or that at least one complete weight uses.
        alone: scheme -> key of a needed part -> key of its weight, whose codes are not stored.
    """

    declared: Declaration | None
    weights: list[QuantisedWeight]
    known: frozenset[Scheme]
    alone: Mapping[Scheme, dict[str, str]] = field(default_factory=dict)


@fact
def quantisation(ckpt: Checkpoint) -> Quantisation:
    """The quantised weights; empty without any and without a declaration."""
    declared = _declaration(ckpt)
    # asked before the schemes are read, in which wide codes have parts below them
    tensors = ckpt.tensors
    may_be_codes = (tensor.dtype not in WIDE or key.rpartition(".")[0] in tensors for key, tensor in tensors.items())
    if declared is None and not any(may_be_codes):
        return Quantisation(None, [], frozenset())
    with_parts = quantised_weights(ckpt.tensors)
    few = (tensor for key, tensor in ckpt.tensors.items() if key in with_parts or tensor.dtype not in WIDE)
    candidates = {tensor.fqn: key_candidates for tensor in few if (key_candidates := list(_candidates(ckpt, tensor)))}
    with_any = [weight for key_candidates in candidates.values() for weight in key_candidates if weight.parts]
    complete = Counter(weight.scheme for weight in with_any if not any(weight.lacks()))
    if not candidates and declared is None:
        return Quantisation(None, [], frozenset())
    expected = declared.schemes if declared else ()
    roles = {role(weight.weight) for weight in with_any}
    weights = []
    for key_candidates in candidates.values():
        # Codes alone do not name their scheme: FP8, int8 and packed int4 share dtypes. The fullest set of parts
        # decides, then the declaration, then what most complete weights use, so that one lost scale does not change the
        # scheme of a weight.
        best = max(
            key_candidates,
            key=lambda weight: (_rank(weight), weight.scheme in expected, complete[weight.scheme], len(weight.parts)),
        )
        # Codes without any part are a weight only under a scheme that is declared or complete elsewhere. Other integer
        # tensors (QNT001: "whole numbers with scales of another name beside them, and buffers of indices") stay
        # unjudged.
        is_weight = best.weight.endswith("weight") or role(best.weight) in roles
        is_sure = best.scheme in expected or complete[best.scheme]
        if best.parts or (is_weight and is_sure):
            weights.append(best)
    known = frozenset(complete) | frozenset(expected)
    used = {named(name, weight.weight) for weight in weights for part in weight.scheme.parts for name in part.names}
    used |= {weight.codes.fqn for weight in weights}
    return Quantisation(
        declared, weights, known, _alone(ckpt, known, used, {role(weight.weight) for weight in weights})
    )


def _rank(weight: QuantisedWeight) -> int:
    """2 if all needed parts of the scheme are stored, 1 if some parts are, 0 for none."""
    return 0 if not weight.parts else 1 if any(weight.lacks()) else 2


def _candidates(ckpt: Checkpoint, tensor: Tensor) -> Iterator[QuantisedWeight]:
    """The weights whose codes a tensor may be, one for each scheme with such a dtype."""
    for scheme in _by_dtype().get(tensor.dtype, ()):
        if len(tensor.global_shape) < len(scheme.axes):
            continue
        weight = weight_of(tensor.fqn, scheme.weight)
        if not weight or (scheme.weight == _BARE and quantised_weight(weight)):
            continue
        stored = ((part, _stored(ckpt, part, weight)) for part in scheme.parts)
        parts = {part: tensor_of_part for part, tensor_of_part in stored if tensor_of_part is not None}
        if parts or tensor.dtype not in WIDE:
            yield QuantisedWeight(weight, tensor, scheme, parts)


@cache
def _by_dtype() -> dict[str, list[Scheme]]:
    return grouped((dtype, scheme) for scheme in schemes() for dtype in scheme.dtypes)


def _stored(ckpt: Checkpoint, part: Part, weight: str) -> Tensor | None:
    """The stored tensor of a part; None where it is absent or its dtype fits no such part."""
    for name in part.names:
        tensor = ckpt.tensors.get(named(name, weight))
        dtypes = part.common.get(name, part.dtypes)
        if tensor is not None and (not dtypes or tensor.dtype in dtypes):
            return tensor
    return None


def stored_otherwise(ckpt: Checkpoint, part: Part, weight: QuantisedWeight) -> Tensor | None:
    """The tensor under the name of a part whose dtype no such part has; None without one."""
    if part in weight.parts:
        return None
    keys = (named(name, weight.weight) for name in part.names if name not in part.common)
    return next((ckpt.tensors[key] for key in keys if key in ckpt.tensors), None)


def _alone(
    ckpt: Checkpoint, known: frozenset[Scheme], used: set[str], roles: set[str]
) -> Mapping[Scheme, dict[str, str]]:
    """Parts that only a weight of a known scheme can have, whose codes are not stored; `used` are keys of others."""
    keys_by_scheme: dict[Scheme, dict[str, str]] = defaultdict(dict)
    needed = [
        (scheme, part, name)
        for scheme in sorted(known, key=lambda scheme: scheme.name)
        for part in scheme.parts
        if part.needed
        for name in part.names
    ]
    for key, tensor in ckpt.tensors.items():
        for scheme, part, name in needed if key not in used else ():
            weight = weight_of(key, name)
            is_scale = tensor.dtype in part.common.get(name, (tensor.dtype,))
            if not weight or quantised_weight(weight) or not is_scale:
                continue
            if role(weight) in roles or _is_of_a_weight(tensor, weight, scheme):
                keys_by_scheme[scheme][key] = weight
                break
    return keys_by_scheme


def _is_of_a_weight(scale: Tensor, weight: str, scheme: Scheme) -> bool:
    """Whether the name of a scale refers to a weight.

    An attention layer has scales of its KV cache, which are called `k_scale` as if there were a weight `k`
    (compressed-tensors, Quark, ModelOpt, vLLM). They hold one number, or one per head, and never belong to an expert.
    """
    if scheme.weight != _BARE or weight.endswith("weight") or parse(weight).in_experts:
        return True
    return sum(size > 1 for size in scale.global_shape) > 1


# ---------------------------------------------------------------- shapes


def misfit(weight: QuantisedWeight, part: Part, declared: Declaration | None) -> str:
    """The expected shape of a part as text, where the stored one differs; "" where it fits or is unknown."""
    lead = weight.codes.global_shape[: -len(weight.scheme.axes)]
    sizes = _sizes(weight)
    shape = weight.parts[part].global_shape
    groups = declared.options if declared is not None and weight.scheme in declared.schemes else ()
    wanted: list[tuple[int | None, ...]] = []
    for options in groups or ({},):
        stated: dict[str, Any] = {**options, **sizes}
        for name, text in weight.scheme.sizes.items():
            if (size := _size(text, stated)) is not None:
                stated[name] = size
        strategy = options.get("strategy")
        for kind, shapes in part.shapes.items():
            if kind == strategy or strategy not in part.shapes:
                wanted += (tuple(_size(text, stated) for text in texts) for texts in shapes)
    for sizes_wanted in wanted:
        # Experts may be stacked before the axes of the codes, and some writers keep one scale for the whole stack: both
        # the stacked and the bare shape are legal (QNT002: "scales of experts in one tensor").
        for before in {lead, ()}:
            full = (*before, *sizes_wanted)
            if len(full) == len(shape) and all(a in (None, b) for a, b in zip(full, shape, strict=True)):
                return ""
    if not wanted:
        return ""
    return " or ".join(dict.fromkeys(f"[{', '.join(map(str, (*lead, *w)))}]" for w in wanted if None not in w))


def _sizes(weight: QuantisedWeight) -> dict[str, int]:
    """Sizes of the axes of the codes by name, and `item`: bytes of one code."""
    shape = weight.codes.global_shape[-len(weight.scheme.axes) :]
    return {**dict(zip(weight.scheme.axes, shape, strict=True)), "item": ITEM_BITS.get(weight.codes.dtype, 8) // 8}


def in_other_blocks(weights: list[QuantisedWeight]) -> Iterator[tuple[QuantisedWeight, Part, str]]:
    """Weights whose block size differs from that of most weights: (weight, part, expected shape as text)."""
    fits: dict[Part, list[tuple[QuantisedWeight, set[str]]]] = defaultdict(list)
    for weight in weights:
        for part, tensor in weight.parts.items():
            texts = {text for (text,) in part.shapes.get("same_block", ())}
            fits[part].append(
                (weight, {text for text in texts if (_size(text, _sizes(weight)),) == tensor.global_shape})
            )
    for part, alike in fits.items():
        # No file declares the block size here, and a short absmax fits a larger block. Only a majority of the weights
        # shows the real size (QNT002: "4 bits of bitsandbytes: half of absmax is lost in one layer of three").
        (usual, count), *_ = Counter(text for _, texts in alike for text in texts).most_common(1) or [("", 0)]
        for weight, texts in alike if 2 * count > len(alike) else ():
            if texts and usual not in texts:
                yield weight, part, f"[{_size(usual, _sizes(weight))}] as in most others"


def _size(text: str, sizes: Mapping[str, Any]) -> int | None:
    """The value of an expression over sizes; None where it uses an unknown size."""
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


def _method(config: Mapping[str, Any]) -> str:
    """`quant_method`, or the method that the fields imply where it is absent; "" for neither."""
    method = config.get("quant_method")
    if isinstance(method, str) and method:
        return method
    return "modelopt" if config.get("quant_algo") else "mlx" if {"bits", "group_size"} <= config.keys() else ""


def _understood(file: str, method: str, config: Mapping[str, Any]) -> Declaration:
    """Parse a quantisation config into schemes, options of each group and ignored modules."""
    groups = config.get("config_groups")
    configs = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else [config]
    meant: dict[Scheme, None] = {}
    options, words, is_exact = [], [], config.get("quantization_status") not in _UNFINISHED
    for group in configs:
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
    config_beside = config.get("_beside")
    beside = (
        _understood(str(config_beside.get("_file")), "modelopt", config_beside)
        if isinstance(config_beside, dict)
        else None
    )
    patterns = re.compile("|".join(translate(entry) for entry in ignored if "*" in entry) or _NOTHING.pattern)
    is_exact &= is_plain
    return Declaration(file, title, tuple(meant), tuple(options), ignored, patterns, is_exact, beside)


def _is_meant(stated: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(stated.get(name) == value.casefold() for name, value in wanted.items())


def _options(weights: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of one group of weights under ckptlint's names (see `Declaration.options`)."""
    if config.get("dynamic") and isinstance(config["dynamic"], dict):  # gptqmodel: other sizes for some modules
        return {}
    block = weights.get("block_structure") or config.get("weight_block_size")
    stated = {**config, **weights}
    options = {"bits": stated.get("num_bits", stated.get("bits", stated.get("w_bit")))}
    options["group"] = stated.get("group_size", stated.get("q_group_size"))
    cache, algo = stated.get("kv_cache_scheme"), stated.get("kv_cache_quant_algo")
    options["cache_bits"] = cache.get("num_bits") if isinstance(cache, dict) else _CACHE_BITS.get(str(algo).casefold())
    if isinstance(block, list) and len(block) == 2:
        options |= {"tall": block[0], "wide": block[1], "strategy": "block"}
    counts = {name for name, value in options.items() if type(value) is int and value > 0}  # a flag is no count
    options = {name: value for name, value in options.items() if name in counts | {"strategy"}}
    if isinstance(symmetric := weights.get("symmetric"), bool):
        options["symmetric"] = str(symmetric).lower()
    if isinstance(strategy := weights.get("strategy"), str):
        options["strategy"] = "group" if strategy == "tensor_group" else strategy
    return options


def _ignored(config: Mapping[str, Any]) -> tuple[frozenset[str], bool]:
    """The modules that a configuration leaves unquantised, and whether every pattern was understood.

    Regular expressions come from an untrusted file and are never run: only plain text and `.*` are understood.
    """
    entries: list[object] = [entry for name in _IGNORED if isinstance(config.get(name), list) for entry in config[name]]
    if isinstance(dynamic := config.get("dynamic"), dict):
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
    return frozenset(kept), is_plain
