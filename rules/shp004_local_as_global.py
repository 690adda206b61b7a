from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from ckptlint.analysis.fit.key_matching import is_confirmed, reference_shapes
from ckptlint.analysis.fit.trusted_config import knows_mesh, mesh_axes, number, trusted
from ckptlint.analysis.layers.hidden_size import Hidden, hidden_params
from ckptlint.analysis.layers.outliers import local_factor, shape_outliers
from ckptlint.analysis.layers.projections import (
    ProjectionFamily,
    axis_factor,
    families,
    fused_factors,
    inner_size,
    is_width,
    short_name,
)
from ckptlint.analysis.optimizer.inventory import Param, inventory_of, is_weight
from ckptlint.geometry.chunk_graph import axis_name
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names
from ckptlint.rule import Confidence, Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.keys import is_adapter, module_path

_WITNESSES = 3  # tensors with a hidden axis: the odd one, and two others that agree with the job
_REPLICATED = ("norm", "router")
_ROW_PARALLEL = ("attn_out", "mlp_out")


class Local(NamedTuple):
    """An axis that is k times too short (one rank's part), or k times too long (k copies of a replica)."""

    param: Param
    axis: int
    expected: int
    basis: str  # where the expected size comes from
    cause: str  # the evidence for k: a mesh axis of this size, or the number of shards
    confidence: Confidence = "likely"  # if the expected size is inferred

    @property
    def size(self) -> int:
        """The size that is recorded."""
        return self.param.tensor.global_shape[self.axis]


@rule("SHP004", "local-as-global", Severity.ERROR, whole=True, needs=("params",), yields_to=("CFG003",))
def local_as_global(ckpt: Checkpoint) -> Iterator[Finding]:
    """The metadata records one rank's part as the whole tensor, or the copies of a replica as shards.

    What it checks:
        No dim is exactly k times too short, where k is the size of a mesh axis or follows from the shards of a partner.
        For biases of row-parallel layers, norms and routers it is not k times too long either. If the reference or the
        job's arguments give the right size, that is an error, and so it is if the same tensor in other layers and a
        partner in this layer both do. One of these alone is a warning: a bias and its weight, the two projections of an
        MLP, the parts of an attention, the other layers. Vocabularies, the number of experts and latent
        attention are left out.
    Why it matters:
        No file holds the rows of the other ranks, although every element of the recorded shape is stored.
    Usual causes:
        A sharded parameter that does not say so (partition_dim, a placement), a sharding rule that matches a replicated
        parameter, or a size that was multiplied twice.
    How to fix:
        Declare the dim on which the parameter is sharded, and save again from the job.
    See:
        torch.distributed.tensor.DTensor.from_local
    """
    siblings = {(local.param, local.axis, local.expected) for local in _from_siblings(ckpt)}
    first_by_key: dict[str, Local] = {}
    for source in _SOURCES:
        for local in source(ckpt):
            # A reference that has this very shape outweighs every inference.
            if source is _from_reference or not is_confirmed(ckpt, local.param):
                # A size that does not fit may be the partner's fault, or an unusual layer. The same tensor in other
                # layers and the partner in this layer are independent: if both agree, it is certain.
                is_sure = source is not _from_siblings and (local.param, local.axis, local.expected) in siblings
                sure = local._replace(confidence="certain") if is_sure else local
                first_by_key.setdefault(local.param.tensor.fqn, sure)
    for local in first_by_key.values():
        size, expected, tensor = local.size, local.expected, local.param.tensor
        shards = axis_factor(tensor, local.axis)
        k = max(size, expected) // min(size, expected)
        if size < expected:
            numbers = f"{expected:,} = {k} x {size:,}"
            note = ("lost", f"no file holds the other {expected - size:,} of {expected:,} on dim {local.axis}")
            hint = f"declare dim {local.axis} as sharded and save again from the job; this step does not hold the rest"
        else:
            numbers = f"{size:,} = {k} x {expected:,}"
            note = ("copies", f"the copies of {k} ranks lie end to end on dim {local.axis}")
            hint = "declare it replicated on that axis and save again; if all copies are equal, the first is the tensor"
        yield Finding(
            f"dim {local.axis}{{of}} is {size:,} where {expected:,} fits {local.basis}; {numbers}, and {local.cause}",
            at=Location(tensor),
            kind="part" if size < expected else "copies",
            confidence=local.confidence,
            why="" if size < expected else "a replica that was saved as shards loads with the wrong shape",
            notes=(note, ("mesh", f"{axis_name(ckpt, local.axis, shards)} is {_split(shards)}")),
            explain=partial(_files, ckpt, local),
            hint=hint,
            inferred_from=f"the size of {local.basis}" if local.confidence == "likely" else "",
            group=f"{short_name(local.param)} {numbers} {local.basis}",
        )


def _split(shards: int) -> str:
    return "not split" if shards == 1 else f"split into {shards} shards"


def _files(ckpt: Checkpoint, local: Local) -> tuple[Note, ...]:
    tensor = local.param.tensor
    files = sorted({ckpt.chunk_file(tensor, row) for row in np.flatnonzero(tensor.tiling.live)[:64].tolist()} - {""})
    return (("written in", first_names(files)),)


def _mesh_text(ckpt: Checkpoint, k: int) -> str:
    axes = mesh_axes(ckpt, k)
    return f"{k} is the size of {' and '.join(axes)}" if axes else ""


def _cause(ckpt: Checkpoint, k: int, fewer: tuple[Param, int], more: tuple[Param, int]) -> str | None:
    """The evidence for a factor k, as text: a mesh axis of size k, or shards that differ by k; None without any."""
    # Models have ratios of 2 and 4 by design (output gates, wide values, grouped queries), so a ratio alone is never
    # enough. Numbers of shards count only while the mesh is unknown: a known mesh without such an axis refutes k.
    if text := _mesh_text(ckpt, k):
        return text
    mine, theirs = axis_factor(fewer[0].tensor, fewer[1]), axis_factor(more[0].tensor, more[1])
    return None if knows_mesh(ckpt) or theirs != k * mine else f"it is {_split(mine)}, its partner into {theirs}"


def _if_too_short(
    ckpt: Checkpoint, param: Param, small: int, partner: Param, partner_axis: int, factor: int = 1
) -> Iterator[Local]:
    """Yields a Local if axis `small` of a weight is 1/k of axis `partner_axis` of its partner, times `factor`."""
    axis, its = param.own_axes[small], partner.own_axes[partner_axis]
    size, expected = param.own_shape[small], factor * partner.own_shape[partner_axis]
    if not 0 < size < expected or expected % size:
        return
    cause = _cause(ckpt, expected // size, (param, axis), (partner, its))
    if cause is not None:
        yield Local(param, axis, expected, short_name(partner), cause)


def _from_reference(ckpt: Checkpoint) -> Iterator[Local]:
    """Axes that are 1/k of the reference's, or k times as long if the parameter is replicated."""
    shapes = reference_shapes(ckpt)
    for param in inventory_of(ckpt).params if shapes else ():
        # Rows of a vocabulary follow its padding, and other numbers of layers or experts are another model: REF002.
        shape, full = param.tensor.global_shape, shapes.get(param.tensor.fqn)
        if full is None or len(full) != len(shape) or param.key.function in ("embedding", "output"):
            continue
        differing = [axis for axis in param.own_axes if shape[axis] != full[axis]]
        others = [axis for axis in range(len(shape)) if shape[axis] != full[axis] and axis not in param.own_axes]
        if others or len(differing) != 1 or not min(shape[differing[0]], full[differing[0]]):
            continue
        (axis,) = differing
        size, expected = shape[axis], full[axis]
        k = max(size, expected) // min(size, expected)
        if max(size, expected) % min(size, expected) or (size > expected and not _is_replicated(param)):
            continue
        mesh = _mesh_text(ckpt, k)
        if ckpt.reference is not None and (mesh or not knows_mesh(ckpt)):
            cause = mesh or f"it is {_split(axis_factor(param.tensor, axis))}"
            yield Local(param, axis, expected, f"the reference {ckpt.reference.source}", cause, "certain")


def _is_replicated(param: Param) -> bool:
    is_bias = param.key.path.rpartition(".")[2].startswith("bias")
    return (
        param.key.function in _REPLICATED
        or (is_bias and param.key.function in _ROW_PARALLEL)
        or "hc_head" in param.key.path
    )


def _from_biases(ckpt: Checkpoint) -> Iterator[Local]:
    """Biases whose length is the size of neither axis of their weight."""
    pairs: dict[tuple[object, ...], dict[str, Param]] = defaultdict(dict)
    for param in inventory_of(ckpt).params:
        last = param.key.path.rpartition(".")[2]
        word = next((word for word in ("weight", "bias") if last.startswith(word)), "")
        if word and param.key.function not in ("embedding", "output", "norm") and not is_adapter(param.key):
            pairs[param.key.scope, module_path(param.key), last.removeprefix(word)][word] = param
    for pair in pairs.values():
        if len(pair) < 2 or len(pair["bias"].own_shape) != 1 or not is_weight(pair["weight"]):
            continue
        bias, weight = pair["bias"], pair["weight"]
        if bias.tensor.dtype not in FLOATS or bias.own_shape[0] in weight.own_shape:
            continue
        # A Linear stores [out, in], the Conv1D of GPT-2 [in, out]; names do not say which, so both are tried.
        yield from next((shorts for out in (0, 1) if (shorts := [*_if_too_short(ckpt, bias, 0, weight, out)])), [])
        yield from _copied_bias(ckpt, bias, weight)


def _copied_bias(ckpt: Checkpoint, bias: Param, weight: Param) -> Iterator[Local]:
    size, rows = bias.own_shape[0], weight.own_shape[0]
    if not _is_replicated(bias) or not rows or size <= rows or size % rows:
        return
    k = size // rows
    if (cause := _cause(ckpt, k, (weight, weight.own_axes[0]), (bias, bias.own_axes[0]))) is not None:
        yield Local(bias, bias.own_axes[0], rows, short_name(weight), cause)


def _from_parts(ckpt: Checkpoint) -> Iterator[Local]:
    """Components of a linear attention with fewer rows than their partners."""
    # By design, query and key have equal rows, and a component has the same rows in projection and convolution. The
    # real case is a convolution of one TP rank beside a whole projection (Megatron-LM#4799).
    modules: dict[tuple[object, ...], dict[tuple[str, str], Param]] = defaultdict(dict)
    for param in inventory_of(ckpt).params:
        if param.key.function == "linear_attn" and param.key.component and param.own_shape:
            module = module_path(param.key)
            modules[param.key.scope, module[:-1]][module[-1], param.key.component] = param
    for components in modules.values():
        for (name, component), param in components.items():
            partners = [("in_proj" if name == "conv1d" else "conv1d", component)]
            if component in ("query", "key"):
                partners.insert(0, (name, "key" if component == "query" else "query"))
            for partner in partners:
                if partner in components:
                    yield from _if_too_short(ckpt, param, 0, components[partner], 0)


def _from_partners(ckpt: Checkpoint) -> Iterator[Local]:
    """Axes that are a factor too short for the partner projection of the same family."""
    declared = {number(trusted(ckpt), name) for name in ("ffn", "moe_ffn")} - {None}
    for family in families(ckpt):
        if family.hidden is None or family.is_latent:
            continue
        for first in family.weights.get("mlp_in", []):
            for second in family.weights.get("mlp_out", []):
                for local in _mlp_inner(ckpt, family.hidden, first, second):
                    # A fused gate and up has twice the declared size.
                    is_declared = declared & {local.expected, local.expected // 2}
                    basis = f"{local.basis} and the job's arguments"
                    yield local._replace(basis=basis, confidence="certain") if is_declared else local
                yield from _hidden_axis(ckpt, family.hidden, first, second)
                yield from _hidden_axis(ckpt, family.hidden, second, first)
        for short, long in (("q", "attn_out"), ("k", "v"), ("v", "k")):
            for param in family.weights.get(short, []):
                for partner in family.weights.get(long, []):
                    yield from _attention_inner(ckpt, family.hidden, param, partner)


def _mlp_inner(ckpt: Checkpoint, hidden: Hidden, first: Param, second: Param) -> Iterator[Local]:
    """The inner axis of two projections of an MLP."""
    widths = inner_size(first, hidden.size), inner_size(second, hidden.size)
    if None in widths or is_width(first, widths[0] or 0, second, widths[1] or 0):
        return
    axis, second_axis = _inner_axis(first, hidden), _inner_axis(second, hidden)
    for factor in fused_factors(first):
        yield from _if_too_short(ckpt, first, axis, second, second_axis, factor)
    if len(fused_factors(first)) == 1:
        yield from _if_too_short(ckpt, second, second_axis, first, axis)


def _hidden_axis(ckpt: Checkpoint, hidden: Hidden, param: Param, partner: Param) -> Iterator[Local]:
    """The hidden axis of a projection whose inner axis fits its partner, but which has no axis of the hidden size."""
    width = inner_size(partner, hidden.size)
    if width is None or hidden.size in param.own_shape or 0 in param.own_shape:
        return
    for axis, inner in enumerate(reversed(param.own_shape)):
        k, rest = divmod(hidden.size, param.own_shape[axis])
        cause = _mesh_text(ckpt, k)
        if not rest and cause and is_width(param, inner, partner, width):
            basis = f"{short_name(partner)} and {hidden}"
            confidence: Confidence = "certain" if hidden.declared else "likely"
            yield Local(param, param.own_axes[axis], hidden.size, basis, cause, confidence)


def _attention_inner(ckpt: Checkpoint, hidden: Hidden, param: Param, partner: Param) -> Iterator[Local]:
    """The inner axis of a query, key or value that is too short for its partner."""
    # Query and value heads may differ in size (gated linear attention has values twice as wide), so the numbers of
    # shards must differ by the same factor as the sizes.
    mine, theirs = inner_size(param, hidden.size), inner_size(partner, hidden.size)
    if mine is None or theirs is None or not 0 < mine < theirs or theirs % mine:
        return
    axis, partner_axis = _inner_axis(param, hidden), _inner_axis(partner, hidden)
    shards = (
        axis_factor(param.tensor, param.own_axes[axis]),
        axis_factor(partner.tensor, partner.own_axes[partner_axis]),
    )
    if shards[1] == theirs // mine * shards[0]:
        yield from _if_too_short(ckpt, param, axis, partner, partner_axis)


def _inner_axis(param: Param, hidden: Hidden) -> int:
    """The axis that is not of the hidden size; if both are, the inner one by the convention [out, in]."""
    first, second = param.own_shape
    if first == second:
        return 1 if param.key.function in _ROW_PARALLEL else 0
    return 1 if first == hidden.size else 0


def _from_siblings(ckpt: Checkpoint) -> Iterator[Local]:
    """Axes that are 1/k of the size that the same tensor has in other layers."""
    for item in shape_outliers(ckpt):
        if (axis_and_factor := local_factor(ckpt, item)) is not None:
            axis, k = axis_and_factor
            size = k * item.param.tensor.global_shape[axis]
            yield Local(item.param, axis, size, f"layers {item.agreeing}", _mesh_text(ckpt, k))


def _from_arguments(ckpt: Checkpoint) -> Iterator[Local]:
    """Both projections of a dense MLP, if they fit each other and have 1/k of the declared inner size."""
    # If one rank saved both projections, neither contradicts the other: only the job's arguments show the loss. They
    # must be Megatron's own, where ffn_hidden_size has one meaning, and of a model whose layers are all alike.
    item = trusted(ckpt).get("ffn")
    ffn = number(trusted(ckpt), "ffn")
    if item is None or ffn is None or item.source not in ("args", "run_config") or "heterogeneous" in ckpt.declared:
        return
    for family in families(ckpt):
        first, second = family.weights.get("mlp_in", []), family.weights.get("mlp_out", [])
        if len(first) != 1 or len(second) != 1 or not _is_dense(family) or family.hidden is None:
            continue
        inner = inner_size(second[0], family.hidden.size)
        width = inner_size(first[0], family.hidden.size)
        if not inner or width not in (inner, 2 * inner) or inner >= ffn or ffn % inner:
            continue
        if cause := _mesh_text(ckpt, ffn // inner):
            for param, size in ((first[0], ffn * width // inner), (second[0], ffn)):
                axis = param.own_axes[_inner_axis(param, family.hidden)]
                yield Local(param, axis, size, f"ffn_hidden_size {ffn:,} of {item.source}", cause, "certain")


def _from_hidden(ckpt: Checkpoint) -> Iterator[Local]:
    """The one norm whose length is k times or 1/k of the declared hidden size, if all other tensors have that size."""
    item, size = trusted(ckpt).get("hidden"), number(trusted(ckpt), "hidden")
    witnesses = hidden_params(ckpt)
    odd = [param for param in witnesses if param.own_shape[-1] != size]
    # Arguments of another job contradict many tensors; a fault contradicts one.
    is_judged = len(odd) == 1 and len(witnesses) >= _WITNESSES and odd[0].key.function == "norm"
    if item is None or size is None or not is_judged:
        return
    (param,), axis = odd, odd[0].own_axes[0]
    length = param.own_shape[0]
    k, rest = divmod(max(length, size), min(length, size) or 1)
    shards = axis_factor(param.tensor, axis)
    mesh = _mesh_text(ckpt, k)
    if rest or not length or not (mesh or (length > size and shards == k)):
        return
    cause = mesh or f"it is {_split(shards)}"
    basis = f"hidden_size of {item.source} and {len(witnesses) - 1} other tensors"
    yield Local(param, axis, size, basis, cause, "certain")


def _is_dense(family: ProjectionFamily) -> bool:
    """Whether the MLP is no expert, and lies in the block whose sizes the arguments declare."""
    hidden = family.hidden
    keys = [param.key for weights in family.weights.values() for param in weights]
    return hidden is not None and bool(hidden.declared) and not any(k.in_experts or "shared" in k.path for k in keys)


_SOURCES = (_from_reference, _from_biases, _from_parts, _from_partners, _from_siblings, _from_arguments, _from_hidden)
"""Sources of expected sizes, the most trusted first; the first that gives a tensor's size decides."""
