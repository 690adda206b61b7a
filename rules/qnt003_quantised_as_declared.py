from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.fit.trusted_config import is_defined, number, trusted
from ckptlint.analysis.quantised import WIDE, Declaration, Quantisation, QuantisedWeight, quantisation
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import first_names, fold_names, join_words, plural, verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import numbers_in, parse, role
from ckptlint.vocabulary.schemes import leaf_of

_SHOWN = 6
_LINEAR = frozenset({"q", "k", "v", "qkv", "attn_out", "mlp_in", "mlp_out"})


@rule("QNT003", "quantised-as-declared", Severity.ERROR, whole=True)
def quantised_as_declared(ckpt: Checkpoint) -> Iterator[Finding]:
    """The configuration declares another quantisation than the one that is stored.

    What it checks:
        A declared scheme is the stored one: some weights have it, and none has another. No module that is named among
        those left out is quantised, and no zero point is stored where `symmetric` is true. A weight in full precision
        is one that the configuration leaves out (`ignore`, `exclude_modules` and the like), or no layer has it
        quantised. Weights that are stored quantised are declared, where a library builds the model from the
        configuration. ModelOpt's two files declare the same. Schemes and patterns that ckptlint does not know are not
        judged. It is info where the library quantises nothing of the model type (Falcon under bitsandbytes).
    Why it matters:
        The loader builds the layers that the configuration declares. It stops, or reads codes as weights.
    Usual causes:
        A configuration copied from another export, a model saved after it was dequantised, or a converter that left
        some layers as they were.
    How to fix:
        Put the configuration right, or export again.
    See:
        transformers.quantizers.auto.AutoQuantizationConfig
    """
    stored = quantisation(ckpt)
    declared = stored.declared
    if declared is None:
        if not (stored.weights and ckpt.is_export and ckpt.config is not None and ckpt.config.file == "config.json"):
            raise NotApplicable("no quantisation is declared")
        if complete := [weight for weight in stored.weights if weight.parts and not any(weight.lacks())]:
            yield _finding(
                f"{plural(len(complete), 'weight', 'is')} stored in {_titles(complete)}, but "
                "config.json declares no quantisation",
                [weight.codes for weight in complete],
                why="the loader builds a model without scales, and uses the codes as weights",
                hint="restore quantization_config in config.json",
            )
        return
    findings = [*_differences(ckpt, stored, declared)] if declared.schemes else []
    yield from findings or _declared_twice(stored, declared)


def _declared_twice(stored: Quantisation, declared: Declaration) -> Iterator[Finding]:
    """A finding if ModelOpt's file and the configuration declare different things.

    Source: nvidia-modelopt 0.47 export_hf_checkpoint writes `quantization_config` from what it writes into the file;
    of the two vLLM reads the configuration first, TensorRT-LLM the file
    """
    if (beside := declared.beside) is None:
        return
    differing = [(declared.words, beside.words)] if declared.words.casefold() != beside.words.casefold() else []
    for name, title in (("group", "groups of {}"), ("cache_bits", "a KV cache of {} bits")):
        sizes = [
            {options[name] for options in declaration.options if name in options} for declaration in (declared, beside)
        ]
        if all(len(stated) == 1 for stated in sizes) and sizes[0] != sizes[1]:
            differing.append((title.format(*sizes[0]), title.format(*sizes[1])))
    modules = [weight.weight.removesuffix(".weight") for weight in stored.weights if weight.parts]
    left = [module for module in modules if beside.names(module) and not declared.names(module)]
    differing += [(f"{module} as quantised", "it as not quantised") for module in left[:1]]
    if differing:
        yield Finding(
            f"{declared.file} declares {join_words([a for a, _ in differing])}, but {beside.file} declares "
            f"{join_words([b for _, b in differing])}",
            at=Location(file=beside.file),
            identity=("declared twice",),
            why="vLLM reads the first, TensorRT-LLM the second: one of them decodes the codes with the wrong scheme",
            hint="restore both files from one export",
        )


def _differences(ckpt: Checkpoint, stored: Quantisation, declared: Declaration) -> Iterator[Finding]:
    """Findings on weights in full precision or in another scheme than the declared one."""
    wide = [
        tensor
        for tensor in ckpt.tensors.values()
        if len(tensor.global_shape) > 1 and tensor.dtype in WIDE and tensor.fqn.endswith(".weight")
    ]
    says = f"{declared.file} declares {declared.words}"
    if not stored.weights:
        linear = [tensor for tensor in wide if _is_linear(tensor) and not declared.ignores(_module(tensor))]
        if linear and not stored.alone and declared.is_exact:
            kind = "" if ckpt.config is None else str(ckpt.config.values.get("model_type"))
            is_left = all(kind in scheme.passed_over for scheme in declared.schemes)
            finding = _finding(
                f"{says}, but no weight is stored in it",
                linear[:1],
                why=f"the library quantises nothing in {kind}, because its layers use their own class"
                if is_left
                else "the loader looks for codes and scales, but finds weights in full precision",
                hint="remove quantization_config from the configuration if the weights should stay in full precision",
            )
            yield replace(finding, severity=Severity.INFO) if is_left else finding
        return
    yield from _contradicted(stored, declared, says)
    others = [weight for weight in stored.weights if weight.scheme not in declared.schemes]
    if others and declared.is_exact:
        message = f"{says}, but {plural(len(others), 'weight', 'is')} stored in {_titles(others)}"
        why = "the loader decodes the codes with the wrong scheme, or stops"
        yield _finding(
            message, [weight.codes for weight in others], why=why, hint="restore the configuration of this export"
        )
        return
    # Draft layers come after the declared ones, and exports often leave them in full precision.
    layers = number(trusted(ckpt), "layers") if is_defined(ckpt, ckpt.declared.get("layers")) else None
    ends: dict[str, int] = defaultdict(lambda: layers or 0)
    for weight in stored.weights:
        ends[role(weight.weight)] = max([ends[role(weight.weight)], *numbers_in(weight.weight)[:1]])
    left = [tensor for tensor in wide if role(tensor.fqn) in ends and not declared.ignores(_module(tensor))]
    left = [tensor for tensor in left if any(n < ends[role(tensor.fqn)] for n in numbers_in(tensor.fqn)[:1])]
    if left and declared.is_exact:
        yield _finding(
            f"{says} and other layers use it, but {plural(len(left), 'weight')} "
            f"{verb(len(left), 'is')} stored in {join_words(sorted({t.dtype for t in left}))}",
            left,
            why="the loader builds these layers quantised too, but finds neither codes nor scales",
            hint="export again, or list these modules as not quantised in the configuration",
        )


def _contradicted(stored: Quantisation, declared: Declaration, says: str) -> Iterator[Finding]:
    """Findings on quantised modules that the declaration leaves out, and on parts that it rules out."""
    left_out = [
        weight for weight in stored.weights if weight.parts and declared.names(weight.weight.removesuffix(".weight"))
    ]
    if left_out:
        yield _finding(
            f"{declared.file} leaves {plural(len(left_out), 'module')} out of the quantisation, but "
            f"{'it is' if len(left_out) == 1 else 'they are'} stored in {_titles(left_out)}",
            [weight.codes for weight in left_out],
            why="the loader builds these modules in full precision, without room for their scales",
            hint="remove these modules from the list in the configuration",
        )
    over = [part for scheme in declared.schemes for part in scheme.parts if declared.asks_for(part) is False]
    for part in over:
        if with_part := [weight for weight in stored.weights if part in weight.parts]:
            words = " and ".join(f"not {name} {value}" for name, value in part.declared.items())
            yield _finding(
                f"{says}, {words}, but {plural(len(with_part), 'weight')} "
                f"{verb(len(with_part), 'has')} a {leaf_of(part)}",
                [weight.parts[part] for weight in with_part],
                why="a loader that follows the configuration ignores it, so the values are shifted",
                hint="restore the configuration that the model was exported with",
            )


def _module(tensor: Tensor) -> str:
    return tensor.fqn.removesuffix(".weight")


def _is_linear(tensor: Tensor) -> bool:
    """Whether the tensor is the weight of a linear layer of attention or MLP, which every quantiser quantises.

    Source: transformers 5.23 pytorch_utils.Conv1D: c_attn, c_fc, c_proj of GPT-2 and its kin; most quantisers pass
    """
    key = parse(tensor.fqn)
    is_matrix = len(tensor.global_shape) == 2  # a convolution of one pixel has the names of a linear layer
    is_known = key.function in _LINEAR and not _module(tensor).rpartition(".")[2].startswith("c_")
    return is_matrix and bool(key.block) and is_known


def _titles(weights: list[QuantisedWeight]) -> str:
    return join_words(list(dict.fromkeys(weight.scheme.title for weight in weights)))


def _finding(message: str, tensors: list[Tensor], why: str, hint: str) -> Finding:
    keys = [tensor.fqn for tensor in tensors]
    more, notes = tuple(keys[1:]), (("weights", first_names(fold_names(keys), _SHOWN) if len(keys) > 1 else ""),)
    return Finding(message, at=Location(tensors[0]), identity=more, keys=more, notes=notes, why=why, hint=hint)
