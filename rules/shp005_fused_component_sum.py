from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.fit.key_matching import is_confirmed
from ckptlint.analysis.fit.trusted_config import number
from ckptlint.analysis.layers.projections import ProjectionFamily, families, short_name
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.config_fields import read_declared
from ckptlint.vocabulary.keys import module_path, parse

_HALVES = {"w": "v", "v": "w"}
_SHARED = ("query", "key", "value")
"""The components that both the projection and the convolution of a linear attention have."""


@rule("SHP005", "fused-component-sum", Severity.WARNING, whole=True, needs=("params",), yields_to=("SHP002", "SHP004"))
def fused_component_sum(ckpt: Checkpoint) -> Iterator[Finding]:
    """The parts of one fused projection have sizes that do not fit together.

    What it checks:
        The halves `_w` and `_v` of a gated projection are both there, with one shape. In a linear attention query and
        key have equally many rows, and each component as many in the convolution as in the projection. In an attention
        with separate weights the query's rows are a multiple of the key's, and key and value have equally many if all
        heads have one size; a value head for each query head is info where the configuration declares so few key heads.
        Latent attention, and what SHP002 or SHP004 report, is left out.
    Why it matters:
        A load joins the components again, so rows end up in the wrong component, or the load fails on the size.
    Usual causes:
        The job split a global tensor by the sizes of one tensor-parallel rank, or a rank's part by the global sizes.
    How to fix:
        Split every tensor by its own sizes, and save again.
    See:
        megatron.core.transformer.mlp.apply_swiglu_sharded_factory
    """
    for source in (_halves, _components, _heads):
        for finding, params in source(ckpt):
            if not all(is_confirmed(ckpt, param) for param in params):
                yield replace(finding, partners=tuple(param.tensor.fqn for param in params))


Found = tuple[Finding, tuple[Param, ...]]


def _halves(ckpt: Checkpoint) -> Iterator[Found]:
    """Findings on halves of a gated projection that are alone, or of unequal shape."""
    by_path = {(param.key.scope, param.key.path): param for param in inventory_of(ckpt).params}
    for (scope, path), param in by_path.items():
        component = param.key.component
        if component not in _HALVES or param.key.function != "mlp_in":
            continue
        fused = path.removesuffix(f"_{component}")
        # A weight norm stores weight_g and weight_v, which are no halves.
        if (scope, fused) in by_path or (scope, f"{fused}_g") in by_path:
            continue
        wanted = f"{fused}_{_HALVES[component]}"
        partner = by_path.get((scope, wanted))
        if partner is None:
            if not any(parse(fqn).path == wanted for fqn in ckpt.tensors):  # that cannot be judged
                yield _lone_half(param, wanted), (param,)
        elif component == "w" and param.own_shape != partner.own_shape:
            yield _odd_half(param, partner), (param, partner)


def _lone_half(param: Param, wanted: str) -> Finding:
    name = wanted.rpartition(".")[2]
    return Finding(
        f"half{{of}} lacks its other half, {name}",
        at=Location(param.tensor),
        identity=(wanted,),
        keys=(wanted,),
        why="the missing half keeps its initial values, or the load fails",
        notes=(("halves", f"{param.key.path.rpartition('.')[2]} is {shape_text(param.own_shape)}, {name} is missing"),),
        hint="find out what drops the other half, and save both halves or the fused weight",
        inferred_from="the name of the stored half",
    )


def _odd_half(param: Param, partner: Param) -> Finding:
    name = partner.key.path.rpartition(".")[2]
    return Finding(
        f"half{{of}} is {shape_text(param.own_shape)}, but {name} is {shape_text(partner.own_shape)}",
        at=Location(param.tensor),
        notes=(
            ("other half", f"{partner.tensor.fqn}: {partner.tensor.dtype} {shape_text(partner.tensor.global_shape)}"),
        ),
        hint="split the fused weight in the middle, so that both halves are equal, and save again",
        inferred_from="the shape of the other half",
    )


def _components(ckpt: Checkpoint) -> Iterator[Found]:
    """Findings on components of a linear attention that must have equal rows and do not."""
    modules: dict[tuple[object, ...], dict[tuple[str, str], Param]] = defaultdict(dict)
    for param in inventory_of(ckpt).params:
        key = param.key
        module = module_path(key)
        if key.function == "linear_attn" and key.component in _SHARED and param.own_shape:
            what = key.path.split(".")[-2]  # weights and biases are split alike, but compared separately
            modules[key.scope, module[:-1], what][module[-1], key.component] = param
    for components in modules.values():
        pairs = [*_unequal_components(components)]
        if not pairs:
            continue
        # Nothing says which one is wrong. It is assumed to be the one that disagrees with most others; of two, the
        # shorter one, since a lost shard is more frequent than a copied one.
        involved = [param for pair in pairs for param in pair]
        odd = max(involved, key=lambda param: (involved.count(param), -param.own_shape[0]))
        partner = next(b if a is odd else a for a, b in pairs if odd in (a, b))
        yield _odd_component(odd, partner, components), tuple(involved)


def _unequal_components(params: dict[tuple[str, str], Param]) -> Iterator[tuple[Param, Param]]:
    """Pairs of components that must have equal rows and do not."""
    ratios = {}
    for name in ("in_proj", "conv1d"):
        query, key = params.get((name, "query")), params.get((name, "key"))
        if query and key and query.own_shape[0]:
            ratios[name] = (query, key)
    # Where the key is a multiple of the query in both tensors it holds several copies (a product of delta rules).
    copies = [key.own_shape[0] % query.own_shape[0] == 0 for query, key in ratios.values()]
    counts = {key.own_shape[0] // query.own_shape[0] for query, key in ratios.values()}
    if not (len(counts) == 1 and all(copies)):
        yield from ((q, k) for q, k in ratios.values() if q.own_shape[0] != k.own_shape[0])
    for component in _SHARED:
        first, second = params.get(("in_proj", component)), params.get(("conv1d", component))
        if first and second and first.own_shape[0] != second.own_shape[0]:
            yield first, second


def _odd_component(odd: Param, partner: Param, params: dict[tuple[str, str], Param]) -> Finding:
    table = grouped((name, f"{component} {param.own_shape[0]:,}") for (name, component), param in params.items())
    return Finding(
        f"component{{of}} has {odd.own_shape[0]:,} rows, but {short_name(partner)} has {partner.own_shape[0]:,}",
        at=Location(odd.tensor),
        notes=tuple((f"{name} rows", ", ".join(cells)) for name, cells in table.items()),
        hint="split it again: query and key need equal rows, and each component the same in conv1d and in_proj",
        inferred_from="the rows of the other components",
    )


def _heads(ckpt: Checkpoint) -> Iterator[Found]:
    """Findings on key and value with different rows, and on query rows that are no multiple of the key's."""
    for family in families(ckpt):
        projections = [family.weights.get(cls, []) for cls in ("q", "k", "v")]
        if not family.is_latent and all(len(members) == 1 for members in projections):
            query, key, value = (members[0] for members in projections)
            if len({param.own_shape[1] for param in (query, key, value)}) == 1:
                yield from ((finding, (query, key, value)) for finding in _misfits(ckpt, family, query, key, value))


def _misfits(ckpt: Checkpoint, family: ProjectionFamily, query: Param, key: Param, value: Param) -> Iterator[Finding]:
    rows = {name: param.own_shape[0] for name, param in (("query", query), ("key", key), ("value", value))}
    notes: tuple[Note, ...] = (("rows", ", ".join(f"{name} {size:,}" for name, size in rows.items())),)
    out = family.weights.get("attn_out", [])
    # Key and value heads may differ in size, but then the output projection is not as wide as the query: only a square
    # fit shows that all heads have one size. Output gates and latent attention fail this test too.
    is_plain = len(out) == 1 and out[0].own_shape == (query.own_shape[1], rows["query"])
    if rows["key"] != rows["value"] and is_plain:
        odd, fitting = (key, value) if rows["query"] % (rows["key"] or 1) else (value, key)
        finding = Finding(
            f"weight{{of}} has {odd.own_shape[0]:,} rows, but {short_name(fitting)} has {fitting.own_shape[0]:,}",
            at=Location(odd.tensor),
            notes=(*notes, ("head size", f"one for all, because {short_name(out[0])} has {rows['query']:,} columns")),
            hint="check how the job split the fused weight: key and value have the same number of heads",
            inferred_from="the rows of query, key and value",
        )
        place = _where_declared(ckpt, rows["query"], rows["key"]) if rows["query"] == rows["value"] else None
        if place:
            # Nemotron's diarization model has a value head for each query head, whatever the configuration says.
            hint = "check that the model has as many value heads as query heads; otherwise split the fused weight again"
            more = (*finding.notes, ("key heads", f"as few as {place} declares"))
            finding = replace(finding, severity=Severity.INFO, notes=more, hint=hint)
        yield finding
    elif rows["key"] and rows["query"] % rows["key"]:
        yield Finding(
            f"query{{of}} has {rows['query']:,} rows, not a multiple of the {rows['key']:,} of {short_name(key)}",
            at=Location(query.tensor),
            notes=notes,
            hint="check how the job split the fused weight: each key head serves a whole number of query heads",
            inferred_from="the rows of query, key and value",
        )


def _where_declared(ckpt: Checkpoint, query_rows: int, key_rows: int) -> str | None:
    """The section of the configuration that declares key heads and heads in the ratio of these rows; None without."""
    for place, values in ckpt.config.sections() if ckpt.config else ():
        declared = read_declared([(place, values)])
        heads, groups = number(declared, "heads"), number(declared, "kv_groups")
        if heads and groups and groups < heads and heads * key_rows == groups * query_rows:
            return place
    return None
