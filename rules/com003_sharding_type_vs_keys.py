from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from ckptlint.analysis.optimizer.inventory import dp_group, inventory_of
from ckptlint.analysis.optimizer.records import Module, content_metadata, optimizer_module, optimizer_records
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_Form = Literal["buckets", "states", "torch states", "one object"]

_WORDS: dict[_Form, str] = {
    "buckets": "dp_group_idx_N.gbuf_idx_*",
    "states": "optimizer.state.<what>.<parameter>",
    "torch states": "optimizer.state.<parameter>.<what>",
    "one object": "dp_group_idx_N.param_state",
}
_FORMS: dict[str, _Form] = {
    "dp_reshardable": "buckets",
    "fully_sharded_bucket_space": "buckets",
    "fully_reshardable": "states",
    "fully_sharded_model_space": "states",
    "dp_zero_gather_scatter": "one object",
    "fsdp_dtensor": "torch states",
}


@rule("COM003", "sharding-type-vs-keys", Severity.ERROR, needs=("Megatron-Core",))
def sharding_type_vs_keys(ckpt: Checkpoint) -> Iterator[Finding]:
    """The optimizer's keys do not have the form that its sharding type asks for.

    What it checks:
        The sharding type in `content_metadata`, in the common state or in an object of the module fits its keys:
        dp_reshardable and fully_sharded_bucket_space have `dp_group_idx_N.gbuf_idx_*`; fully_reshardable and
        fully_sharded_model_space have `optimizer.state.<what>.<parameter>`; dp_zero_gather_scatter has
        `dp_group_idx_N.param_state`; fsdp_dtensor has `optimizer.state.<parameter>.<what>`. Prefixes of chains and
        modules do not count; a module without optimizer keys is not judged.
    Why it matters:
        The loader picks its code path by the sharding type, and finds none of the keys that it needs.
    Usual causes:
        The type was replaced by a default or by another module's, or a conversion changed the format but not the type.
    How to fix:
        Set the type that the keys show, in the place named, and load again.
    See:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_state_dict
    """
    forms = _forms(ckpt)
    if not forms:
        raise NotApplicable("there are no optimizer keys")
    declared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in forms:
        general = content_metadata(ckpt).get("distrib_optim_sharding_type")
        if isinstance(general, str):
            declared[name, general].append("content_metadata")
        for record in optimizer_records(ckpt):
            is_type = record.kind == "param_state_sharding_type" and isinstance(record.value, str)
            if is_type and record.module.covers(Module(name)):
                declared[name, record.value].append(record.place)
    if not declared:
        raise NotApplicable("no sharding type is declared")
    for (name, declared_type), places in declared.items():
        wanted = _FORMS.get(declared_type)
        if wanted is None or forms[name].get(wanted):
            continue
        stored, count = max(forms[name].items(), key=lambda item: item[1])
        file = places[0].partition(": ")[0]
        if file == "content_metadata":
            file = ckpt.common.source if ckpt.common is not None else ""
        of = f" of mimo.{name}" if name else ""
        fitting = " or ".join(kind for kind, form in _FORMS.items() if form == stored)
        yield Finding(
            f"sharding type {declared_type}{of} needs keys {_WORDS[wanted]}, but all {count:,} are {_WORDS[stored]}",
            at=Location(file=file, label=", ".join(places[:4])),
            identity=(declared_type, name),
            notes=(("keys", ", ".join(f"{_WORDS[form]}: {forms[name].get(form, 0):,}" for form in (wanted, stored))),),
            hint=f"set the type to {fitting}, which matches these keys, and load again",
        )


def _forms(ckpt: Checkpoint) -> dict[str, dict[_Form, int]]:
    """Module name -> how many optimizer keys have each form."""
    counts: dict[str, dict[_Form, int]] = defaultdict(lambda: defaultdict(int))
    for state in inventory_of(ckpt).states:
        is_megatron_order = f"state.{state.what}." in state.tensor.fqn
        counts[optimizer_module(state.chain).name]["states" if is_megatron_order else "torch states"] += 1
    for bucket in inventory_of(ckpt).buckets:
        counts[optimizer_module(bucket.chain).name]["buckets"] += 1
    for key, _, rows in ckpt.objects.rows_by_grid():
        group = dp_group(key)
        if group is not None and group[2] == "param_state":
            counts[optimizer_module(group[0]).name]["one object"] += len(rows)
    return counts
