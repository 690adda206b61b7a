from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.analysis.fit.trusted_config import trusted_topology
from ckptlint.analysis.optimizer.inventory import optimizer_parts, split_state
from ckptlint.analysis.ranks.save_plans import Duplicate, duplicates
from ckptlint.model import Checkpoint, SavePlans
from ckptlint.model.text import first_names, join_words, named_ranks, numbered, shape_text
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.keys import Key, parse

_SHOWN = 4


_Shared = list[tuple[Duplicate, Key]]
"""Keys that several pipeline stages planned at the same offset, and the layer's keys, of one block."""


@rule("NAM002", "stage-local-names", Severity.WARNING)
def stage_local_names(ckpt: Checkpoint) -> Iterator[Finding]:
    """Pipeline stages planned different layers under the same number.

    What it checks:
        Where the plans of all ranks are stored and there are several stages, no two stages planned the same key of a
        numbered layer, or of its optimizer state, at the same offset while their shapes or the roles in that layer
        differ. Equal layers are left to OBJ001. Tied embeddings are no layers.
    Why it matters:
        One stage overwrites the other, so the layers or moments of all stages but one are lost.
    Usual causes:
        Each stage numbers its layers from 0, or optimizer parts were saved without a stage prefix.
    How to fix:
        Number the layers globally, or give every stage a prefix of its own.
    See:
        megatron.core.transformer.transformer_layer.get_transformer_layer_offset
    """
    if ckpt.save_plans is None:
        raise NotApplicable("the metadata holds no plans of the ranks")
    if set(ckpt.save_plans.fqns) != set(ckpt.records.fqns):
        raise NotApplicable("the plans belong to another state: their keys differ from the metadata's")
    sizes = trusted_topology(ckpt)
    stages = sizes["pp"].size if "pp" in sizes else 1
    if stages < 2 or ckpt.save_plans.world_size % stages:
        raise NotApplicable("there is one pipeline stage, or their number is not known")
    per_stage = ckpt.save_plans.world_size // stages
    groups: dict[tuple[str, tuple[int, ...]], _Shared] = defaultdict(list)
    for duplicate in duplicates(ckpt.save_plans):
        key = _layer_key(duplicate.fqn)
        touched = tuple(sorted({rank // per_stage for rank in duplicate.ranks}))
        if key is not None and len(touched) > 1:
            groups[f"{parse(duplicate.fqn).kind} {key.block}", touched].append((duplicate, key))
    if not groups:
        return
    roles = _roles(ckpt.save_plans, per_stage)
    for (_, touched), shared in groups.items():
        if evidence := _difference(ckpt.save_plans, shared, touched, roles):
            yield _finding(ckpt, shared, touched, evidence, per_stage)


def _layer_key(fqn: str) -> Key | None:
    """The key of the layer's parameter that a name or a state's name belongs to; None for anything else."""
    key = parse(fqn.partition("/shard_")[0])
    if key.kind == "optimizer":
        state = split_state(optimizer_parts(key)[1].removeprefix("state."))
        key = key if state is None else parse(state[1])
    return key if key.kind == "model" and key.layer is not None else None


def _roles(table: SavePlans, per_stage: int) -> dict[tuple[str, int, int], set[str]]:
    """(block, layer, stage) -> roles of the model that the stage planned there."""
    roles: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    keys = [parse(fqn) for fqn in table.fqns]
    for number, stage in set(zip(table.fqn.tolist(), (table.rank // per_stage).tolist(), strict=True)):
        key = keys[number]
        if key.kind == "model" and key.layer is not None:
            roles[key.block, key.layer, stage].add(key.role)
    return roles


def _difference(
    table: SavePlans, shared: _Shared, stages: tuple[int, ...], roles: dict[tuple[str, int, int], set[str]]
) -> tuple[Note, ...]:
    """A note that proves that the stages planned different layers under one name; () without such proof."""
    # Two stages may plan equal tensors (the tied embedding), which OBJ001 reports. Only another shape at the same
    # offset, or roles that one stage has and another lacks, show that two layers share a name.
    for duplicate, _ in shared:
        shapes = {tuple(v for v in table.global_shape[row].tolist() if v >= 0) for row in duplicate.rows}
        if len(shapes) > 1 and duplicate.offset is not None:
            return (("shapes", f"{duplicate.fqn}: {' and '.join(shape_text(shape) for shape in sorted(shapes))}"),)
    for _, key in shared:
        sets = [roles.get((key.block, key.layer or 0, stage), set()) for stage in stages]
        differing = {name for names in sets for name in names if any(name not in stage_roles for stage_roles in sets)}
        if differing and all(sets):
            odd = [(stage, sorted(names & differing)) for stage, names in zip(stages, sets, strict=True)]
            alone = [f"stage {stage} has {', '.join(names[:_SHOWN])}" for stage, names in odd if names]
            return (("roles", f"in layer {key.layer} {', '.join(alone)}; not all stages have these"),)
    return ()


def _finding(
    ckpt: Checkpoint, shared: _Shared, stages: tuple[int, ...], evidence: tuple[Note, ...], per_stage: int
) -> Finding:
    lead = shared[0][0]
    ranks = {rank for duplicate, _ in shared for rank in duplicate.ranks}
    texts = [named_ranks(range(stage * per_stage, (stage + 1) * per_stage)) for stage in stages]
    keys = list(dict.fromkeys(duplicate.fqn for duplicate, _ in shared))
    return Finding(
        f"pipeline stages {join_words([*map(str, stages)])} planned different layers under "
        f"{numbered('number', (key.layer or 0 for _, key in shared))}",
        at=Location(ckpt.tensors.get(lead.fqn, lead.fqn), ranks=tuple(sorted(ranks))),
        identity=tuple(keys),
        keys=tuple(keys),
        kind="stages",
        notes=(
            ("ranks", ", ".join(f"stage {stage} is {ranks}" for stage, ranks in zip(stages, texts, strict=True))),
            *evidence,
            ("shared", first_names(keys, _SHOWN)),
        ),
        hint=f"compare the layer offsets of {named_ranks(ranks)}; this checkpoint holds these layers of one stage only",
        inferred_from=f"the number of pipeline stages ({trusted_topology(ckpt)['pp'].source})",
    )
