"""Records on optimizers besides their tensors: modules, parameter groups, sharding types.

Megatron-Core keeps these records in the common state, or in objects of each module where ranks hold different modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ckptlint.analysis.optimizer.inventory import inventory_of, optimizer_parts
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, ShardedObject, Tensor
from ckptlint.model.facts import fact
from ckptlint.vocabulary.keys import parse

RecordKind = Literal["param_groups", "param_state_sharding_type"]
_DEPTH = 12


class Module(NamedTuple):
    """An optimizer of its own: a chain of a chained optimizer, a module of a multimodal job, or the only one.

    Attributes:
        name: the module's name (`vision`), "" where there is only one.
        chain: number of the chain, "" where keys name none.
    """

    name: str = ""
    chain: str = ""

    @property
    def title(self) -> str:
        """Its name in a sentence; "" for the only one."""
        names = [f"mimo.{self.name}"] if self.name else []
        return " ".join([*names, f"chained_{self.chain}"] if self.chain else names)

    def covers(self, other: Module) -> bool:
        """Whether a record kept for this module also speaks for another; where names say nothing it does."""
        named = not (self.name and other.name) or self.name.startswith(other.name) or other.name.startswith(self.name)
        return named and (not (self.chain and other.chain) or self.chain == other.chain)


class OptimizerRecord(NamedTuple):
    """A record that a module needs besides its tensors.

    Attributes:
        place: where it is, for people: `common.pt: optimizer.1`, or the object's entry name.
        value: the list of groups or the type's name; None where the object was not read.
    """

    kind: RecordKind
    module: Module
    place: str
    value: Any


def modules(ckpt: Checkpoint) -> dict[Module, list[Tensor]]:
    """Each optimizer that has state tensors or buckets, with these."""
    inventory = inventory_of(ckpt)
    states = [(state.chain, state.tensor) for state in inventory.states]
    buckets = [(bucket.chain, bucket.tensor) for bucket in inventory.buckets]
    return grouped((optimizer_module(chain), tensor) for chain, tensor in states + buckets)


def optimizer_module(chain: tuple[str, ...]) -> Module:
    """The optimizer that a state or bucket of this chain belongs to."""
    names = [name.removeprefix("mimo.") for name in chain if name.startswith("mimo.")]
    chains = [name.removeprefix("chained_") for name in chain if name.startswith("chained_")]
    return Module(names[0] if names else "", chains[0] if chains else "")


def highest_step(ckpt: Checkpoint) -> int:
    """The highest step that the name of the step, an entry or a file beside the tensors states; 0 without any."""
    run = ckpt.run.step if ckpt.run is not None else 0
    return max(run, *(claim.step for claim in ckpt.claims), *(file.step or 0 for file in ckpt.step_files), 0)


def is_training_state(ckpt: Checkpoint) -> bool:
    """Whether the common state is one that a training loop wrote, not a caller of the library."""
    return ckpt.common is not None and bool({"args", "checkpoint_version"} & ckpt.common.values.keys())


def content_metadata(ckpt: Checkpoint) -> Mapping[str, Any]:
    """The flags that say how the state was laid out; {} before Megatron-Core 0.13."""
    flags = ckpt.common_value("content_metadata")
    return flags if isinstance(flags, dict) else {}


@fact
def optimizer_records(ckpt: Checkpoint) -> tuple[OptimizerRecord, ...]:
    """Every list of parameter groups and every sharding type, from the common state and from objects."""
    grids = (rows for key, _, rows in ckpt.objects.rows_by_grid() if parse(key).kind == "optimizer")
    shards = (ckpt.objects[row] for row in sorted(row for rows in grids for row in rows.tolist()))
    in_objects = [record for obj in shards if (record := _in_object(ckpt, obj))]
    if (common := ckpt.common) is None:
        return tuple(in_objects)
    names = ({module.name for module in modules(ckpt)} | {record.module.name for record in in_objects}) - {""}
    tops = ((top, value) for top, value in common.values.items() if top != "args")
    return (*(record for top, value in tops for record in _walk(common.source, (top,), value, names)), *in_objects)


def _walk(source: str, path: tuple[Any, ...], value: Any, names: set[str]) -> Iterator[OptimizerRecord]:
    """Source: `optimizer`, or `optimizer` by number of the chain, or by name of the module (Megatron-Core)"""
    kind: RecordKind
    last = path[-1]
    if last in ("param_groups", "param_state_sharding_type"):
        kind = last
        chains = [str(word) for word in path if str(word).isdecimal()]
        chains += [word.removeprefix("chained_") for word in path if re.fullmatch(r"chained_\d+", str(word))]
        named = [word for word in path if word in names]
        module = Module(named[0] if named else "", chains[0] if chains else "")
        yield OptimizerRecord(kind, module, f"{source}: {'.'.join(map(str, path[:-1]))}", value)
    elif len(path) < _DEPTH and isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, (str, int)):
                yield from _walk(source, (*path, key), item, names)
    elif len(path) < _DEPTH and isinstance(value, list):
        for item in value:
            if isinstance(item, (dict, list)):
                yield from _walk(source, (*path, "*"), item, names)


def _in_object(ckpt: Checkpoint, obj: ShardedObject) -> OptimizerRecord | None:
    key = parse(obj.key)
    if key.kind != "optimizer":
        return None
    chain, rest = optimizer_parts(key)
    last: Any = rest.rpartition(".")[2]
    value = ckpt.object_values.get(obj.fqn)
    if last in ("param_groups", "param_state_sharding_type"):
        return OptimizerRecord(last, optimizer_module(chain), obj.fqn, value)
    if last == "optimizer" and (not isinstance(value, dict) or "param_groups" in value):
        groups = value["param_groups"] if isinstance(value, dict) else None
        return OptimizerRecord("param_groups", optimizer_module(chain), obj.fqn, groups)
    return None
