from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.optimizer.records import (
    Module,
    RecordKind,
    content_metadata,
    is_training_state,
    modules,
    optimizer_module,
    optimizer_records,
)
from ckptlint.model import Checkpoint
from ckptlint.model.text import join_words, plural, printable, verb
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, require, rule

_WORDS: dict[RecordKind, str] = {
    "param_groups": "parameter groups (param_groups)",
    "param_state_sharding_type": "sharding type (param_state_sharding_type)",
}


@rule("COM004", "optimizer-module-record", Severity.ERROR, needs=("Megatron-Core",), yields_to=("OBJ001",))
def optimizer_module_record(ckpt: Checkpoint) -> Iterator[Finding]:
    """An optimizer's state is stored without a record that its loader needs.

    What it checks:
        For each optimizer that has state tensors or buckets (the only one, each chain, each module of a multimodal job)
        the common state or an object holds its parameter groups and, for the distributed optimizer, its sharding type.
        It is a warning if another chain of the same module has the record, or if a module has parameter groups and only
        other modules have a sharding type, or if the states of several modules share parameter groups of no module
        (Megatron-LM#4791). States that a caller of the library saved without a training loop are not
        judged.
    Why it matters:
        Loading stops with a KeyError or a failed assertion for that optimizer.
    Usual causes:
        Only rank 0 keeps plain values, and it does not own the module; an empty dict was dropped on the way; somebody
        edited or filtered the common state.
    How to fix:
        Save the records as ShardedObjects of the module. To use this checkpoint, take them from another step of the
        same job, or load without the optimizer.
    See:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict
    """
    if not is_training_state(ckpt):
        raise NotApplicable("the common state is not there, or no training loop wrote it")
    common, optimizers = require(ckpt.common), modules(ckpt)
    if not optimizers:
        raise NotApplicable("there are no optimizer states")
    kept: dict[RecordKind, list[Module]] = {
        kind: [record.module for record in optimizer_records(ckpt) if record.kind == kind] for kind in _WORDS
    }
    for module, tensors in optimizers.items():
        absent = [kind for kind in _WORDS if not any(owner.covers(module) for owner in kept[kind])]
        lost = [kind for kind in absent if kind == "param_groups" or _is_distributed(ckpt, module, kept[kind])]
        if not lost:
            continue
        of = f" of {module.title}" if module.title else ""
        count = plural(len(tensors), "optimizer tensor") + of
        other_chains = all(any(owner.covers(Module(module.name)) for owner in kept[kind]) for kind in lost)
        yield Finding(
            f"{count} {verb(len(tensors), 'has')} no {' and no '.join(_WORDS[kind] for kind in lost)}",
            at=Location(file=common.source, label=f"{common.source} and {len(ckpt.objects):,} objects"),
            identity=(module.title, *lost),
            severity=Severity.WARNING if module.chain and other_chains else None,
            notes=_notes(ckpt, lost, kept),
            hint=_hint(ckpt, lost),
        )

    names = sorted({module.name for module in optimizers if module.name})
    groups = [record for record in optimizer_records(ckpt) if record.kind == "param_groups"]
    if len(names) > 1 and groups and not any(record.module.name for record in groups):
        yield Finding(
            f"the optimizer states of {join_words(names)} share the parameter groups in {groups[0].place}",
            at=Location(file=common.source, label=groups[0].place),
            identity=("shared", *names),
            severity=Severity.WARNING,
            why="each module has its own optimizer, but a load gives all of them the settings and steps of one",
            hint="load without the optimizer, or take the groups of the other modules from another save",
            partners=tuple(record.place for record in groups),
        )

    types = kept["param_state_sharding_type"]
    for module in dict.fromkeys(kept["param_groups"]):
        # tensors may carry no module in their keys (core < 0.19); the records alone then tell
        if types and module.name and module not in optimizers and not any(owner.covers(module) for owner in types):
            yield Finding(
                f"{module.title} has parameter groups but no sharding type, unlike other modules",
                at=Location(file=common.source, label=f"{common.source} and {len(ckpt.objects):,} objects"),
                identity=(module.title, "param_state_sharding_type"),
                severity=Severity.WARNING,
                notes=_notes(ckpt, ["param_state_sharding_type"], kept),
                hint=_hint(ckpt, ["param_state_sharding_type"]),
            )


def _is_distributed(ckpt: Checkpoint, module: Module, types: list[Module]) -> bool:
    """Whether the distributed optimizer wrote a module; no other has sharding types, and chains may be mixed.

    Source: `optimizer.state.param.` is of its fully_reshardable type, `fp32_param` of other optimizers as well;
    `distrib_optim_sharding_type` is set when `use_distributed_optimizer` is (megatron.training >= 0.13)
    """
    if not module.chain and (types or "distrib_optim_sharding_type" in content_metadata(ckpt)):
        return True
    chains = [bucket.chain for bucket in inventory_of(ckpt).buckets]
    chains += [state.chain for state in inventory_of(ckpt).states if state.what == "param"]
    return any(optimizer_module(chain) == module for chain in chains)


def _notes(ckpt: Checkpoint, lost: list[RecordKind], kept: dict[RecordKind, list[Module]]) -> tuple[Note, ...]:
    common = require(ckpt.common)
    optimizer, there = common.values.get("optimizer"), "it has no key optimizer"
    if isinstance(optimizer, dict):
        there = f"below its key optimizer: {', '.join(map(str, list(optimizer)[:6])) or 'nothing'}"
    names = {kind: sorted({owner.title or "an optimizer without a name" for owner in kept[kind]}) for kind in lost}
    stored = [(kind, f"stored for {', '.join(owners[:6])}") for kind, owners in names.items() if owners]
    return (common.source, there), *stored


def _hint(ckpt: Checkpoint, lost: list[RecordKind]) -> str:
    declared = content_metadata(ckpt).get("distrib_optim_sharding_type")
    if lost == ["param_state_sharding_type"] and isinstance(declared, str):
        return f"put {printable(declared)}, which content_metadata declares, into the common state beside param_groups"
    values = "take the values from another step of the same job"
    return f"{values}, or load without the optimizer (no_load_optim), which starts with fresh moments"
