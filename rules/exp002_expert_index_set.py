from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.trusted_config import number, trusted
from ckptlint.analysis.layers.experts import moe_layers, owners_note
from ckptlint.model import Checkpoint
from ckptlint.model.text import gaps, ranges, verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.schemes import quantised_weight

_LIMIT = 100_000  # no layer has as many experts, but a key may claim any number


@rule(
    "EXP002", "expert-index-set", Severity.ERROR, whole=True, needs=("sound", "no model config"), yields_to=("QNT001",)
)
def expert_index_set(ckpt: Checkpoint) -> Iterator[Finding]:
    """Expert numbers are missing in a layer.

    What it checks:
        The expert numbers in a layer's keys run from 0 to the largest one, or to as many as its router has rows, and
        are the same for all weights of the experts. If the job declares as many experts as are stored, further rows of
        the router and further experts of other weights do not count. It is only info where EXP001 already counts the
        missing experts.
    Why it matters:
        The missing experts keep their initial values after loading.
    Usual causes:
        One writer was elected for several expert-parallel ranks; ranks did not save; a pipeline stage was lost.
    How to fix:
        Let one rank of each expert-parallel group write, and save again.
    See:
        megatron.core.transformer.moe.experts.SequentialMLP.sharded_state_dict
    """
    layers = [layer for layer in moe_layers(ckpt) if any(role.numbers for role in layer.roles)]
    if not layers:
        raise NotApplicable("no experts are numbered in names")
    for layer in layers:
        stored = [role for role in layer.roles if role.numbers]
        union = set().union(*(role.numbers for role in stored))
        declared = number(trusted(ckpt), "experts")  # the router has rows of zero experts besides
        of_rows, rest = divmod(layer.rows or 0, stored[0].per_key)
        is_router_right = declared != layer.count and not rest
        keys = min(max(max(union) + 1, of_rows if is_router_right else 0), _LIMIT)
        for role in stored:
            present, count = set(role.numbers), keys - sum(n < keys for n in role.numbers)
            if count and role.numbers != tuple(range(declared or 0)):
                # the tail alone is missing everywhere: that is what EXP001 counts
                is_tail = layer.rows is not None and role.numbers == tuple(range(len(present)))
                others = (item for item in stored if item is not role)
                experts = ((p.tensor.fqn, p.key.expert) for item in others for p in item.params)
                partners = tuple(fqn for fqn, n in experts if n is not None and n < keys and n not in present)
                same = all(set(r.numbers) == present for r in stored)
                missing = gaps(role.numbers, keys)
                yield Finding(
                    f"{'expert' if count == 1 else 'experts'} {missing} of {keys}{{of}} {verb(count, 'is')} missing; "
                    f"{ranges(role.numbers)} {verb(len(role.numbers), 'is')} stored",
                    at=Location(role.params[0].tensor),
                    identity=(missing,),
                    severity=Severity.INFO if is_tail and same else None,
                    notes=owners_note(ckpt, (n for n in range(keys) if n not in present), keys),
                    hint="check which ranks should write these experts: none of them did",
                    inferred_from="the rows of the router"
                    if keys > max(union) + 1
                    else "the numbers of the other experts",
                    partners=partners,
                    is_apart=not quantised_weight(role.params[0].tensor.fqn),
                )
