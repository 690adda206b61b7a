from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from ckptlint.analysis.chunks.checksums import chunk_sums
from ckptlint.analysis.fit.judgement import config_fit, has_known_config
from ckptlint.analysis.fit.trusted_config import flag, is_defined, trusted, trusted_topology
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.mesh import axes_of_size

_MOST = 0.8
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@rule("NAM001", "alias-mismatch", Severity.ERROR)
def alias_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two keys name one parameter but differ in shape, or a key lacks the wrapper of its layer.

    What it checks:
        Keys that become equal once wrappers (`_orig_mod.`, `module.`) are stripped have equal global shapes; if they
        do, it is only info. Where only a leading wrapper differs, half of the keys below each must have such a twin. It
        is a warning if embedding and output layer differ in shape or values although the configuration ties them, an
        error for values in an export, and a warning if a few keys of a block of layers begin with different wrappers
        (`model.`, none) from most keys of the block and from others of their layer. Keys of different stages, modules,
        chains or copies of the model are no twins.
    Why it matters:
        One of the two keys bypassed the sharding rule, and a loader may take either. A key that lacks its wrapper is
        not found.
    Usual causes:
        The placement mapping lacks the name of a wrapper.
    How to fix:
        Register the placement for every alias, and save the parameter under one key.
    """
    if not has_known_config(ckpt):  # CFG001 names a key that stands under another name than the model's
        yield from _odd_wrappers(ckpt)
    by_path = grouped(((param.key.scope, param.key.path), param) for param in inventory_of(ckpt).params)
    twins = [(first, twin) for group in by_path.values() for first, *rest in [group] for twin in rest]
    key_counts = Counter(_prefix(param) for param in inventory_of(ckpt).params) if twins else Counter[str]()
    twin_counts = Counter((_prefix(a), _prefix(b)) for a, b in twins)
    for first, second in twins:
        # Two unrelated dicts may share a short name (`step`, `weight`) by chance. Two prefixes are taken for wrappers
        # of one module only if half of the keys under the larger one have a twin.
        a, b = _prefix(first), _prefix(second)
        if a == b or 2 * twin_counts[a, b] >= max(key_counts[a], key_counts[b]):
            yield _alias(ckpt, first, second)
    yield from _tied_weights(ckpt)


def _odd_wrappers(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on keys with another prefix than 80% of the keys of their block, and than other keys of their layer."""
    blocks = grouped(
        ((param.key.scope, param.key.block), param) for param in inventory_of(ckpt).params if param.key.block
    )
    for params in blocks.values():
        # A key map that misses one name leaves a few keys without the prefix of their block. That the majority is
        # right is assumed. A whole layer with another prefix is no fault: a draft model has one of its own.
        (usual, count), *others = Counter(map(_prefix, params)).most_common()
        if not others or count < _MOST * len(params):
            continue
        layers = {param.key.layer for param in params if _prefix(param) == usual}
        for param in params:
            expected = f"{usual}.{param.key.path}".removeprefix(".")
            if _prefix(param) != usual and param.key.layer in layers and expected not in ckpt.tensors:
                yield Finding(
                    f"key{{of}} should be {expected}: {count} of {len(params)} keys of its block start this way",
                    at=Location(param.tensor),
                    identity=(expected,),
                    confidence="likely",
                    why="a loader that asks for the whole key finds nothing and leaves the parameter as it was",
                    hint="look for a key mapping that misses this name, and save again",
                    inferred_from=f"{count} of {len(params)} keys of its block",
                )


def _prefix(param: Param) -> str:
    """The leading part of the key, without inner wrappers such as `_orig_mod`, which never change what a key means."""
    words = [word for word in param.tensor.fqn.split(".") if word not in _INNER]
    return ".".join(words[: len(words) - param.key.path.count(".") - 1])


def _alias(ckpt: Checkpoint, first: Param, second: Param) -> Finding:
    """The finding on two names of one weight; it does not say which shape is right."""
    a, b = first.tensor, second.tensor
    equal = a.global_shape == b.global_shape
    if a.volume < b.volume:
        a, b = b, a
    # A counter is a scalar in one dict and has one element in another: same value, so never an error.
    is_scalar = a.volume <= 1
    shapes = f" but differ: {shape_text(b.global_shape)} and {shape_text(a.global_shape)}"
    share = Fraction(b.volume, a.volume) if a.volume else Fraction(1)
    note = f", {share} of the elements" if share != 1 else ""
    axes = axes_of_size(trusted_topology(ckpt), share.denominator) if share.numerator == 1 else []
    note += "".join(f" = 1/{axis}" for axis in axes)
    return Finding(
        f"two keys name one parameter{f', both {shape_text(b.global_shape)}' if equal else shapes}",
        at=Location(b),
        identity=(a.fqn,),
        severity=Severity.INFO if equal or is_scalar else None,
        notes=(
            ("other key", f"{a.fqn}: {a.dtype} {shape_text(a.global_shape)}"),
            ("this key", f"{b.fqn}: {b.dtype} {shape_text(b.global_shape)}{note}"),
        ),
        why="the parameter is stored twice, and a loader may take either copy" if equal else "",
        hint="" if equal else "find out which of the two your loader asks for; the smaller is probably one rank's part",
        inferred_from="the two keys, which are equal without wrappers",
    )


def _tied_weights(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on an embedding and an output layer that differ although the configuration ties them."""
    declared = trusted(ckpt)
    name = "tied" if flag(declared, "tied") else "untied" if flag(declared, "untied") is False else ""
    if not name:
        return
    fit, needed = config_fit(ckpt), set[str]()
    # Multimodal configurations have the field at the top and in `text_config`, and classes differ in which they read.
    values = ckpt.config.values if ckpt.config is not None and ckpt.is_export else {}
    levels = [values, *(section for section in values.values() if isinstance(section, dict))]
    by_config = {bool(level["tie_word_embeddings"]) for level in levels if "tie_word_embeddings" in level}
    if not isinstance(fit, str):  # a class that needs both ties neither
        needed = {key for name, key in fit.pairing.stored.items() if fit.expected.tensors[name].needed}
    by_scope: dict[tuple[str, ...], dict[str, list[Param]]] = defaultdict(lambda: defaultdict(list))
    for param in inventory_of(ckpt).params:
        if param.key.function in ("embedding", "output") and param.key.path.endswith(".weight") and not param.key.block:
            by_scope[param.key.scope][param.key.function].append(param)
    for by_function in by_scope.values():
        if len(by_function["embedding"]) != 1 or len(by_function["output"]) != 1:
            continue
        a, b = by_function["embedding"][0].tensor, by_function["output"][0].tensor
        # Of another width it is no output layer of this vocabulary (a value head, a head of classes).
        if len(a.global_shape) != 2 or a.global_shape[1:] != b.global_shape[1:]:
            continue
        same_shape = a.global_shape == b.global_shape
        if (same_shape and not _values_differ(ckpt, a, b)) or {a.fqn, b.fqn} <= needed:
            continue
        shapes = f": {shape_text(a.global_shape)} and {shape_text(b.global_shape)}"
        quotient = f"{Fraction(b.global_shape[0], a.global_shape[0])} of its rows" if a.volume else "no rows"
        yield Finding(
            f"embedding and output layer are tied but differ{' in their values' if same_shape else shapes}",
            at=Location(b),
            identity=(a.fqn,),
            # An unknown class may tie nothing, whatever its configuration inherits.
            severity=None if is_defined(ckpt, declared[name]) and by_config != {True, False} else Severity.INFO,
            confidence="certain" if same_shape and by_config == {True} else "likely",
            notes=(
                ("other key", f"{a.fqn}: {a.dtype} {shape_text(a.global_shape)}"),
                ("this key", f"{b.fqn}: {b.dtype} {shape_text(b.global_shape)}"),
                ("quotient", "" if same_shape else quotient),
                ("tied by", f"{declared[name].source}"),
            ),
            why="they are one weight, so what you load depends on which of the two is read",
            hint="find out which of the two was trained, and store that one alone, or untie them in the configuration"
            if same_shape
            else "check the padding of the vocabulary and the placement of both, or untie them in the configuration",
        )


def _values_differ(ckpt: Checkpoint, a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and cut differ in the bytes of a chunk, by records that hold nothing else."""
    first, second = chunk_sums(ckpt, a), chunk_sums(ckpt, b)
    if a.dtype != b.dtype or first is None or second is None or not np.array_equal(first[:, :-1], second[:, :-1]):
        return False
    return bool(first[:, -2].sum() == nbytes(a.dtype, a.volume) and (first[:, -1] != second[:, -1]).any())
