"""Finds whole parts and layers of a checkpoint that no rank of a job requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from typing import TypeVar

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import join_words, numbered, plural
from ckptlint.planning.job import Job
from ckptlint.planning.outcome import Constraint
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.parts import part_of_key

_OF_PART = {"model": "", "optimizer": " in the optimizer"}
_LAYERS = 6  # stacks of layers that are named
_Group = TypeVar("_Group", bound=Hashable)


def unrequested_keys(ckpt: Checkpoint, job: Job) -> Iterator[Constraint]:
    """The parts without any requested key, and the layers without one in parts that an exact job requests.

    A whole part besides the model is a note, since a job may load only the weights. Single layers are a loss.
    """
    asked = {request.key for request in job.requests}
    stored = [*ckpt.tensors, *(item.fqn for item in ckpt.objects), *(item.fqn for item in ckpt.byte_objects)]
    parts = _left_out(stored, asked, part_of_key)
    for name, keys in parts.items():
        yield Constraint("drops" if name == "model" else "note", f"no rank asks for the {name}", tuple(keys))
    params = {
        state.tensor.fqn: state.params[0].key if state.params else parse(state.path)
        for state in inventory_of(ckpt).states
        if state.params or state.path
    }

    def layer(fqn: str) -> tuple[str, tuple[str, ...], str, int] | None:
        key = params.get(fqn) or parse(fqn)
        part = "optimizer" if fqn in params else key.kind
        return None if key.kind != "model" or key.layer is None else (part, key.scope, key.block, key.layer)

    layers = _left_out((key for key in stored if part_of_key(key) not in parts), asked, layer)
    if layers:
        stacks = grouped(((block, part), number) for part, _, block, number in layers).items()
        named = [f"{numbered('layer', numbers)} of {block}{_OF_PART[part]}" for (block, part), numbers in stacks]
        more = [plural(len(named) - _LAYERS, "more stack")] if len(named) > _LAYERS else []
        lost = tuple(key for keys in layers.values() for key in keys)
        yield Constraint("drops", f"no rank asks for {join_words([*named[:_LAYERS], *more])}", lost)


def _left_out(
    stored: Iterable[str], asked: Set[str], group_of: Callable[[str], _Group | None]
) -> dict[_Group, list[str]]:
    """The groups of keys without any requested key."""
    groups = grouped((group_of(key), key) for key in stored)
    return {group: keys for group, keys in groups.items() if group is not None and asked.isdisjoint(keys)}
