from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.trusted_config import mesh_axes, number, trusted
from ckptlint.analysis.layers.experts import ExpertRole, MoeLayer, moe_layers
from ckptlint.geometry.writers import saved_by
from ckptlint.model import Checkpoint
from ckptlint.model.text import named_ranks, ranges, shape_text
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Note, Severity, rule

_HINTS = {
    True: "check that the router's placement is Replicate, as in other layers: it was probably saved as several copies",
    False: "save again with global expert numbers or the expert-parallel placement; the other experts are not stored",
}


@rule("EXP001", "experts-vs-router", Severity.ERROR, whole=True, needs=("no model config",))
def experts_vs_router(ckpt: Checkpoint) -> Iterator[Finding]:
    """A layer stores fewer experts than its router has rows.

    What it checks:
        In every layer with routed experts, the rows of the router (or the length of its bias) equal the number of
        stored experts: the size of the expert axis, or the numbered keys times the experts that each holds. If one
        stacked weight has all experts, the others have them too. It is a warning if the rows are no multiple of the
        experts, info if more experts are stored than the router has rows, and silent if the job declares as many
        experts as are stored (zero or redundant experts).
    Why it matters:
        The router sends tokens to experts that are not in the file; loading fills them with a peer's experts or with
        random values.
    Usual causes:
        Expert-parallel ranks saved local numbers under the same keys and deduplication kept one of each, or the
        placement dropped the expert mesh axis.
    How to fix:
        Number experts globally, or give the expert axis its expert-parallel placement, and save again.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    layers = [layer for layer in moe_layers(ckpt) if layer.rows is not None]
    if not layers:
        raise NotApplicable("there are no routed experts with a router")
    declared = number(trusted(ckpt), "experts")
    matching_rows = {layer.rows for layer in layers if layer.rows == layer.count}
    for layer in layers:
        assert layer.rows is not None and layer.router is not None
        if layer.rows == layer.count:
            yield from (_short(layer, role) for role in layer.roles if not role.numbers and role.count < layer.rows)
        if layer.rows == layer.count or declared == layer.count:
            continue
        yield _finding(ckpt, layer, layer.rows, layer.count in matching_rows)


def _short(layer: MoeLayer, role: ExpertRole) -> Finding:
    assert layer.router is not None
    [param] = role.params[:1]
    agree = [peer.role for peer in layer.roles if peer.count == layer.rows]
    return Finding(
        f"only {role.count} of {layer.rows} experts{{of}} are stored, but {agree[0]} has all of them",
        at=Location(param.tensor),
        identity=(str(layer.rows), str(role.count)),
        notes=(("router", f"{layer.router.key.fqn} {shape_text(layer.router.tensor.global_shape)}"),),
        hint="compare its placement with that of the other weights: it was probably recorded with one rank's shape",
        inferred_from=f"the router and {agree[0]}",
    )


def _finding(ckpt: Checkpoint, layer: MoeLayer, rows: int, router_is_odd: bool) -> Finding:
    """The finding on a layer; `router_is_odd` if other layers' routers have as many rows as it has experts."""
    assert layer.router is not None
    lead = max(layer.roles, key=lambda role: role.count).params[0]
    stored = layer.count
    shape = shape_text(layer.router.tensor.global_shape)
    notes: list[Note] = [("router", f"{layer.router.key.fqn} {shape} has {rows} rows")]
    for role in layer.roles:
        keys = f", keys {ranges(role.numbers)}" if role.numbers else ""
        notes.append(("stored", f"{role.role}: {role.count} experts{keys}"))
    ranks = tuple(sorted(set().union(*(saved_by(ckpt, p.tensor) for role in layer.roles for p in role.params))))
    notes += [("saved by", named_ranks(ranks))] if ranks else []
    confidence: Confidence = "certain"
    if rows < stored:
        confidence, sentence = "possible", f"{stored} experts{{of}} are stored, but the router has {rows} rows"
    elif rows % stored:
        confidence, sentence = "likely", f"only {stored} of {rows} experts{{of}} are stored"
    else:
        factor = rows // stored
        axes = mesh_axes(ckpt, factor)
        named = f", and {factor} is the size of {' and '.join(axes)}" if axes else ""
        sentence = f"only {stored} of {rows} experts{{of}} are stored: 1/{factor}{named}"
        if router_is_odd:
            confidence = "likely"
            sentence = f"the router has {rows} rows for {stored} experts{{of}}: {factor} times as many"
    return Finding(
        sentence,
        at=Location(lead.tensor, ranks=ranks),
        identity=(str(rows), str(stored)),
        confidence=confidence,
        notes=tuple(notes),
        hint=_HINTS[router_is_odd],
        inferred_from="the rows of the router",
    )
