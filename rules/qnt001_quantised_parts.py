from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, takewhile

from ckptlint.analysis.quantised import Quantisation, QuantisedWeight, quantisation, stored_otherwise
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import first_names, fold_names, join_words, plural, verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS, INTEGERS
from ckptlint.vocabulary.keys import NEVER_ZERO, parse, role
from ckptlint.vocabulary.schemes import Part, Scheme, leaf_of, named

_SHOWN = 6


@rule("QNT001", "quantised-parts", Severity.ERROR, whole=True)
def quantised_parts(ckpt: Checkpoint) -> Iterator[Finding]:
    """A quantised weight is stored without its scale, or a scale without its weight.

    What it checks:
        Codes of a known scheme (FP8, MXFP8, int8, packed integers, NVFP4, MXFP4, GPTQ, AWQ, bitsandbytes, torchao, MLX)
        have every tensor that the scheme needs: `weight_scale`, `qzeros`, `absmax`. Scales have codes, not a weight in
        full precision. Zero points are there if the configuration says `symmetric: false`. A scale of activations
        (`input_scale`) is there for all weights of one role, or for none. That a scheme is used is known from the
        configuration, or from other weights that are stored in it whole; if neither says so, a missing part is a
        warning. So is an integer weight of an export that declares no quantisation, with no other tensor beside it.
    Why it matters:
        Codes without a scale are numbers that mean nothing. Some loaders stop; others take 1, or what is in memory.
    Usual causes:
        A filter or a converter that knows only `weight`, an export that lost a rank's experts, or an expert that saw no
        token while the scales of activations were measured.
    How to fix:
        Export the model again from the weights that it was quantised from.
    See:
        vllm-project/vllm#45212, sgl-project/sglang#23625, NVIDIA/Model-Optimizer#2038
    """
    stored = quantisation(ckpt)
    # Only a configuration can say that nothing is quantised. Training checkpoints, and bases that bitsandbytes stores
    # elsewhere, hold integers for reasons of their own.
    is_plain = ckpt.is_export and ckpt.config is not None and stored.declared is None
    integers = _integer_weights(ckpt, stored) if is_plain else []
    if not stored.weights and not stored.alone and not integers:
        raise NotApplicable("no weight is stored quantised")
    if keys := tuple(tensor.fqn for tensor in integers):
        dtypes = join_words(sorted({tensor.dtype for tensor in integers}))
        yield Finding(
            f"{plural(len(keys), 'weight', 'is')} stored in {dtypes} without a scale, and no quantisation is declared",
            at=Location(integers[0]),
            identity=keys[1:],
            keys=keys[1:],
            confidence="likely",
            notes=(("weights", first_names(fold_names(keys), _SHOWN)),),
            why="layer weights are not integers, so a load uses codes or rounded values as weights",
            hint="export the model again in a floating dtype, or with the scales of the codes",
            group="without meaning",
        )
    yield from _missing(ckpt, stored)
    for scheme, scales in stored.alone.items():
        yield from _scales_alone(ckpt, scheme, scales)


def _integer_weights(ckpt: Checkpoint, stored: Quantisation) -> list[Tensor]:
    """Layer weights of an integer dtype, with no scale or other tensor beside them."""
    known = {weight.codes.fqn for weight in stored.weights}
    roles = {role(tensor.fqn) for tensor in ckpt.tensors.values() if tensor.dtype in FLOATS}
    candidates = (tensor for tensor in ckpt.tensors.values() if _is_integer_weight(tensor, roles))
    weights = [tensor for tensor in candidates if tensor.fqn not in known]
    all_keys = sorted({*ckpt.tensors, *(entry.fqn for entry in ckpt.byte_objects)}) if weights else []
    # Any further key may be a scale under a name that ckptlint does not know, so such a weight is not reported.
    return [tensor for tensor in weights if not _has_others_beside(tensor.fqn.removesuffix(".weight"), all_keys)]


def _is_integer_weight(tensor: Tensor, roles: set[str]) -> bool:
    """Whether it is an integer weight of a layer, an embedding or a head; what has a role of floats is one, too."""
    key = parse(tensor.fqn)
    is_weight = tensor.dtype in INTEGERS and len(tensor.global_shape) > 1 and key.path.endswith(".weight")
    return is_weight and (key.function in (*NEVER_ZERO, "attn_out", "mlp_out") or role(tensor.fqn) in roles)


def _has_others_beside(module: str, sorted_keys: list[str]) -> bool:
    """Whether a key other than the weight and the bias starts with this module's name."""
    rest = islice(sorted_keys, bisect_left(sorted_keys, module), None)
    beside = takewhile(lambda key: key.startswith(module), rest)
    return any(key not in (f"{module}.weight", f"{module}.bias") for key in beside)


def _missing(ckpt: Checkpoint, stored: Quantisation) -> Iterator[Finding]:
    """Findings on weights without a part that their scheme needs, or that other weights of their role have."""
    lacking: dict[tuple[Scheme, Part], list[QuantisedWeight]] = defaultdict(list)
    by_role: dict[tuple[Scheme, str], list[QuantisedWeight]] = defaultdict(list)
    for weight in stored.weights:
        by_role[weight.scheme, role(weight.weight)].append(weight)
        absent = [part for part in weight.scheme.parts if part not in weight.parts]
        declared = [part for part in absent if _is_declared_part(stored, weight.scheme, part)]
        for part in (*weight.lacks(), *declared):
            if stored_otherwise(ckpt, part, weight) is None:  # QNT002 reports it
                lacking[weight.scheme, part].append(weight)
    # No scheme needs scales of activations, but calibration measures them for a whole role. An expert that saw no token
    # has none while its siblings do, and a loader fills the gap with an arbitrary number (Model-Optimizer#2038).
    for (scheme, _), peers in by_role.items():
        for part in filter(lambda part: part.uniform, scheme.parts):
            lost = [weight for weight in peers if part not in weight.parts]
            if len(lost) < len(peers):
                lacking[scheme, part] += lost
    together: dict[tuple[Scheme, frozenset[str]], tuple[list[QuantisedWeight], list[Part]]] = {}
    for (scheme, part), lost in lacking.items():
        if lost:
            keys = frozenset(weight.codes.fqn for weight in lost)
            together.setdefault((scheme, keys), (lost, []))[1].append(part)
    for (scheme, _), (lost, parts) in together.items():
        yield _lacking_finding(stored, scheme, lost, parts)


def _is_declared_part(stored: Quantisation, scheme: Scheme, part: Part) -> bool:
    """Whether the configuration requires a part that is optional in the scheme."""
    declared = stored.declared
    return declared is not None and scheme in declared.schemes and declared.asks_for(part) is True


def _lacking_finding(stored: Quantisation, scheme: Scheme, lost: list[QuantisedWeight], parts: list[Part]) -> Finding:
    total = sum(weight.scheme is scheme for weight in stored.weights)
    is_needed = any(part.needed or _is_declared_part(stored, scheme, part) for part in parts)
    is_declared = stored.declared is not None and scheme in stored.declared.schemes
    # Without a configuration the scheme is a guess from dtypes and names. One weight that has all its parts confirms
    # it (`known`); if every scale is gone, fp8 alone may as well be a dtype that somebody chose.
    is_sure = is_declared or (is_needed and scheme in stored.known)
    names = [_name(stored, scheme, part) for part in parts]
    keys = tuple(weight.codes.fqn for weight in lost)
    return Finding(
        f"{len(keys)} of {plural(total, 'weight')} in {scheme.title} {verb(len(keys), 'has')} no "
        f"{join_words(names, 'or')}" + ("" if is_needed else ", but their siblings do"),
        at=Location(lost[0].codes),
        identity=(*names, *keys),
        keys=keys,
        confidence="certain" if is_sure else "likely",
        notes=(("weights", first_names(fold_names(keys), _SHOWN)),),
        why="without a scale the codes mean nothing: a load stops, or uses some other number as the scale"
        if is_needed
        else "the loader allocates it for all of them, and keeps an arbitrary number where none is stored",
        hint="export the model again from the weights that it was quantised from",
        inferred_from="" if is_sure else "the names of the stored tensors",
        group=f"{scheme.name} {names}",
    )


def _name(stored: Quantisation, scheme: Scheme, part: Part) -> str:
    """The name that this checkpoint uses for a part of a scheme, or all usual names if it stores none."""
    used = next((weight for weight in stored.weights if weight.scheme is scheme and part in weight.parts), None)
    if used is None:
        return join_words([leaf_of(part, i) for i, name in enumerate(part.names) if name not in part.common], "or")
    return leaf_of(part, [named(name, used.weight) for name in part.names].index(used.parts[part].fqn))


def _scales_alone(ckpt: Checkpoint, scheme: Scheme, scales: dict[str, str]) -> Iterator[Finding]:
    """Scales whose weight is not stored, or is stored in full precision."""
    for is_wide in (True, False):
        keys = [key for key, weight in scales.items() if (weight in ckpt.tensors) == is_wide]
        weights = list(dict.fromkeys(scales[key] for key in keys))
        if not weights:
            continue
        many = len(weights) > 1
        yield Finding(
            f"{plural(len(weights), 'weight', 'is')} stored in {ckpt.tensors[weights[0]].dtype} "
            f"beside {'scales' if many else 'a scale'} for {scheme.title}"
            if is_wide
            else f"{plural(len(weights), 'weight')} in {scheme.title} {verb(len(weights), 'is')} lost: only "
            f"{'their scales are' if many else 'its scale is'} stored",
            at=Location(ckpt.tensors[weights[0]]) if is_wide else Location(weights[0]),
            identity=tuple(keys),
            keys=(*keys, *weights[1:]),
            notes=(("scales", first_names(fold_names(keys), _SHOWN)),),
            why="the loader treats the weight as codes and multiplies it by the scale"
            if is_wide
            else "a scale alone cannot restore the weight",
            hint="export the model again from the weights that it was quantised from",
            group=f"{scheme.name} alone {is_wide}",
        )
