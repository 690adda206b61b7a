from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.analysis.fit.trusted_config import is_defined, number, trusted
from ckptlint.analysis.quantised import QuantisedWeight, in_other_blocks, misfit, quantisation, stored_otherwise
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import first_names, fold_names, join_words, plural, shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.schemes import Part, Scheme, leaf_of, named

_SHOWN = 6


@rule("QNT002", "quantised-shapes", Severity.ERROR, needs=("quantised weights",))
def quantised_shapes(ckpt: Checkpoint) -> Iterator[Finding]:
    """The scale of a quantised weight has a shape or a dtype that its scheme does not allow.

    What it checks:
        Scales, zero points and the order of groups are as large as the codes beside them and the declared group, block
        and bits imply, and have a dtype that the scheme knows. Codes of stacked experts are of as many as the router
        has rows, or the configuration says. What is not declared is not judged: one scale a tensor, row, group or block
        is allowed then.
    Why it matters:
        A load stops with a size mismatch, or reads the scales of other rows.
    Usual causes:
        Scales were transposed or cut with the weight, one rank's part was stored as the whole, or the configuration is
        of another quantisation.
    How to fix:
        Export the model again, or restore the configuration that it was exported with.
    See:
        compressed_tensors.quantization.QuantizationArgs
    """
    stored = quantisation(ckpt)
    wrong: dict[tuple[Scheme, Part, str], list[tuple[QuantisedWeight, Tensor, str]]] = defaultdict(list)
    for weight in stored.weights:
        for part in weight.scheme.parts:
            if (odd_tensor := stored_otherwise(ckpt, part, weight)) is not None:
                wrong[weight.scheme, part, "dtype"].append((weight, odd_tensor, join_words(part.dtypes[:3])))
            elif part in weight.parts and (wanted := misfit(weight, part, stored.declared)):
                wrong[weight.scheme, part, "shape"].append((weight, weight.parts[part], wanted))
    yield from _experts_differ(ckpt, stored.weights)
    for weight, part, wanted in in_other_blocks(stored.weights):
        wrong[weight.scheme, part, "shape"].append((weight, weight.parts[part], wanted))
    yield from _axes_differ(stored.weights, {id(case[0]) for cases in wrong.values() for case in cases})
    for (scheme, part, what), cases in wrong.items():
        weight, tensor, wanted = cases[0]
        keys = [case[1].fqn for case in cases]
        is_shape = what == "shape"
        has = f"has shape {shape_text(tensor.global_shape)}" if is_shape else f"is {tensor.dtype}"
        yield Finding(
            f"{_leaf(weight, tensor, part)} {has}, but {scheme.title} needs {wanted}"
            + (f"; the same in {plural(len(cases) - 1, 'other weight')}" if len(cases) > 1 else ""),
            at=Location(tensor),
            identity=(what, *keys[1:]),
            keys=tuple(keys[1:]),
            notes=(
                ("codes", f"{weight.codes.fqn}: {weight.codes.dtype} {shape_text(weight.codes.global_shape)}"),
                ("tensors", first_names(fold_names(keys), _SHOWN)),
            ),
            why="a load stops with a size mismatch, or uses the scales of other rows",
            hint="export the model again, or restore the configuration that it was exported with",
            group=f"{scheme.name} {leaf_of(part)} {what}",
        )


def _experts_differ(ckpt: Checkpoint, weights: list[QuantisedWeight]) -> Iterator[Finding]:
    """Findings on codes of stacked experts whose first axis is not the number of the router's rows.

    Source: transformers 5.23 models.gpt_oss: `mlp.experts.gate_up_proj` [experts, ...] beside `mlp.router.weight`
    [experts, hidden]; integrations.mxfp4 stores its codes as [experts, rows, groups, 16]
    """
    rows = {
        key.rpartition(".")[0]: tensor.global_shape[0]
        for key, tensor in ckpt.tensors.items()
        if key.endswith((".router.weight", ".gate.weight")) and len(tensor.global_shape) == 2
    }
    declared = number(trusted(ckpt), "experts") if is_defined(ckpt, ckpt.declared.get("experts")) else None
    for weight in weights:
        home, experts, name = weight.weight.rpartition(".experts.")
        shape = weight.codes.global_shape
        routers = [key for key in (f"{home}.router", f"{home}.gate") if key in rows]
        wanted, source = (rows[routers[0]], f"{routers[0]}.weight") if routers else (declared, "the configuration")
        if not experts or len(shape) != len(weight.scheme.axes) + 1 or wanted is None:
            continue
        if shape[0] not in (wanted, declared):  # as declared: a router may have rows for zero experts, too
            message = f"codes{{of}} cover {shape[0]} experts, but {source} has {wanted}"
            why = "the router sends tokens to experts that are not stored, or the load stops"
            hint = "export again with all experts: these probably come from one rank"
            yield Finding(message, at=Location(weight.codes), why=why, hint=hint, group=f"experts {name} {shape[0]}")


def _axes_differ(weights: list[QuantisedWeight], wrong: set[int]) -> Iterator[Finding]:
    """Scales of rows that lack the last axis, of size 1, that those of other weights have, or the reverse."""
    forms: dict[tuple[Scheme, Part], dict[int, list[tuple[QuantisedWeight, Tensor]]]] = defaultdict(dict)
    for weight in weights:
        for part, tensor in weight.parts.items():
            shape, rows = tensor.global_shape, weight.codes.global_shape[:-1]
            if shape in (rows, (*rows, 1)) and id(weight) not in wrong and rows[-1] > 1:
                forms[weight.scheme, part].setdefault(len(shape) - len(rows), []).append((weight, tensor))
    for (scheme, part), by_axes in forms.items():
        if len(by_axes) < 2:
            continue
        few, many = sorted(by_axes.values(), key=len)
        keys = [tensor.fqn for _, tensor in few]
        yield Finding(
            f"{_leaf(*few[0], part)} of {plural(len(few), 'weight')} in {scheme.title} has shapes such as "
            f"{shape_text(few[0][1].global_shape)}, and of {len(many)} others such as "
            f"{shape_text(many[0][1].global_shape)}",
            at=Location(few[0][1]),
            identity=("axes", *keys[1:]),
            keys=tuple(keys[1:]),
            notes=(("tensors", first_names(fold_names(keys), _SHOWN)),),
            why="an axis of size 1 was dropped on the way, and a load that compares shapes stops",
            hint="export the model again, with the axis kept",
        )


def _leaf(weight: QuantisedWeight, tensor: Tensor, part: Part) -> str:
    return next(leaf_of(part, i) for i, name in enumerate(part.names) if named(name, weight.weight) == tensor.fqn)
