"""The mixture-of-experts layers of a checkpoint: numbers of experts that routers expect, and stored experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from ckptlint.analysis.fit.trusted_config import trusted_topology
from ckptlint.analysis.layers.hidden_size import hidden_sizes
from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.facts import fact
from ckptlint.model.text import ranges
from ckptlint.rule import Note
from ckptlint.vocabulary.keys import Block, block_of

_EXPERTS = ("experts", "local_experts")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRole:
    """The weights of one role (`linear_fc1.weight`) over the experts of one layer.

    Attributes:
        params: one stacked parameter, or one for each numbered key.
        numbers: the expert numbers in the keys, sorted; empty for a stacked parameter.
        per_key: experts that one numbered key holds: more than 1 where expert-parallel ranks were concatenated.
    """

    role: str
    params: list[Param]
    numbers: tuple[int, ...]
    per_key: int = 1

    @property
    def count(self) -> int:
        """Number of stored experts."""
        first = self.params[0]
        if first.expert_axis is not None:
            return first.tensor.global_shape[first.expert_axis]
        return len(self.numbers) * self.per_key


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer:
    """The routed experts of one layer, or of all layers where they are stacked.

    Attributes:
        router: parameter whose rows count the experts; None without one.
        rows: number of experts by the router, or by its bias; None where unknown.
    """

    block: Block
    layer: int | None
    router: Param | None
    rows: int | None
    roles: tuple[ExpertRole, ...]

    @property
    def count(self) -> int:
        """The largest number of experts that any role stores."""
        return max(role.count for role in self.roles)


@fact
def moe_layers(ckpt: Checkpoint) -> tuple[MoeLayer, ...]:
    """The layers with routed experts whose number is known, in order of their keys."""
    hidden = hidden_sizes(ckpt)
    by_layer = grouped(
        ((block_of(param.key), param.key.scope, param.key.layer), param)
        for param in inventory_of(ckpt).params
        if param.key.block and not (param.key.is_stacked and param.layer_axis is None)
    )
    layers = []
    for (block, _, layer), params in by_layer.items():
        size = hidden[block].size if block in hidden else None
        if roles := _roles(params, size):
            paths = (param.key.path.split(".") for role in roles for param in role.params)
            shared = takewhile(lambda same: len({*same}) == 1 and same[0] not in _EXPERTS, zip(*paths, strict=False))
            home = ".".join(same[0] for same in shared)  # the module that holds all these experts
            # in the module that holds the experts, at most two levels below
            routers = [
                param
                for param in params
                if param.key.function == "router"
                and not param.key.in_experts
                and param.key.path.startswith(f"{home}.")
                and param.key.path.removeprefix(f"{home}.").count(".") <= 2
            ]
            rows = [(router, count) for router in routers if (count := _rows(router, size))]
            # A layer may hold other gates, such as that of a shared expert. If the candidates disagree, nothing shows
            # which of them counts these experts.
            router, expected = rows[0] if len({n for _, n in rows}) == 1 else (None, None)
            layers.append(MoeLayer(block, layer, router, expected, tuple(roles)))
    return tuple(layers)


def owners_note(ckpt: Checkpoint, numbers: Iterable[int], total: int) -> tuple[Note, ...]:
    """Note on the expert-parallel ranks that own exactly these experts; () where no ranks do."""
    size = trusted_topology(ckpt).get("ep")
    if size is None or size.size < 2 or total % size.size:
        return ()
    per_rank, experts = total // size.size, set(numbers)
    owners = {number // per_rank for number in experts}
    if experts != {number for number in range(total) if number // per_rank in owners}:
        return ()
    return (("mesh", f"exactly the experts of ep rank {ranges(owners)} of {size.size} (from {size.source})"),)


def _roles(params: list[Param], hidden: int | None) -> list[ExpertRole]:
    by_role: dict[str, list[Param]] = defaultdict(list)
    for param in params:
        is_expert = param.expert_axis is not None or (param.key.in_experts and param.key.expert is not None)
        if is_expert and param.key.function in ("mlp_in", "mlp_out") and len(param.own_shape) == 2:
            by_role[param.key.role].append(param)
    # The second projection maps to the hidden size. If its rows are a multiple instead, each numbered key holds the
    # experts of several ranks end to end (EXP001: "each numbered key holds the experts of two ranks, concatenated").
    per_key = 1
    for members in by_role.values():
        key, shape = members[0].key, members[0].own_shape
        if key.expert is not None and key.function == "mlp_out" and hidden and hidden not in shape[1:]:
            per_key = max(1, shape[0] // hidden) if shape[0] % hidden == 0 else 1
    roles = []
    for role, members in by_role.items():
        numbers = tuple(sorted({p.key.expert for p in members if p.key.expert is not None}))
        roles.append(ExpertRole(role, members, numbers, per_key if members[0].key.expert is not None else 1))
    return roles


def _rows(router: Param, hidden: int | None) -> int | None:
    """Number of experts by the shape of a router weight or bias; None where the shape shows none."""
    shape = router.own_shape
    if len(shape) == 1:
        return shape[0] if "scale" not in router.key.path else None
    if len(shape) != 2:
        return None
    return shape[1] if hidden == shape[0] else shape[0]  # some are stored as [hidden, experts]
