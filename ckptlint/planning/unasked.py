"""What a job leaves behind as a whole: parts and layers of a checkpoint of which no rank asks for anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from typing import TypeVar

from ckptlint.model import Checkpoint
from ckptlint.model.text import listed, plural, ranges
from ckptlint.planning.job import Job
from ckptlint.planning.outcome import Constraint
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.parts import part_of_key

_GIVEN_UP = {"optimizer": "optim", "scheduler": "optim", "rng": "rng"}
_LAYERS = 6  # stacks of layers that are named
_Group = TypeVar("_Group", bound=Hashable)


def unasked(ckpt: Checkpoint, job: Job, give_up: Collection[str] = ()) -> Iterator[Constraint]:
    """The parts, and the layers of parts that are asked for, of which no rank of a job asks for any key.

    Args:
        job: of the exact form; the quick one takes all to be asked for.
        give_up: `optim`, `rng`: what the job does without, which is a note and no loss.
    """
    asked = {wish.key for wish in job.wishes}
    stored = [*ckpt.tensors, *(item.fqn for item in ckpt.objects), *(item.fqn for item in ckpt.byte_objects)]
    parts = _left_out(stored, asked, part_of_key)
    for name, keys in parts.items():
        option = _GIVEN_UP.get(name, "")
        if option in give_up:
            yield Constraint("note", f"no rank asks for the {name} (--no-load-{option})", tuple(keys))
        else:
            meant = f"; --no-load-{option} says that this is meant" if option else ""
            yield Constraint("drops", f"no rank asks for the {name}{meant}", tuple(keys))
    layers = _left_out((key for key in stored if part_of_key(key) not in parts), asked, _layer)
    if layers:
        stacks: dict[str, list[int]] = defaultdict(list)
        for _, block, number in layers:
            stacks[block].append(number)
        named = [f"{'layer' if len(own) == 1 else 'layers'} {ranges(own)} of {block}" for block, own in stacks.items()]
        more = [plural(len(named) - _LAYERS, "more stack")] if len(named) > _LAYERS else []
        lost = tuple(key for keys in layers.values() for key in keys)
        yield Constraint("drops", f"no rank asks for {listed([*named[:_LAYERS], *more])}", lost)


def _left_out(
    stored: Iterable[str], asked: Set[str], group_of: Callable[[str], _Group | None]
) -> dict[_Group, list[str]]:
    """The groups of keys of which none is asked for."""
    groups: dict[_Group, list[str]] = defaultdict(list)
    for key in stored:
        if (group := group_of(key)) is not None:
            groups[group].append(key)
    return {group: keys for group, keys in groups.items() if asked.isdisjoint(keys)}


def _layer(fqn: str) -> tuple[tuple[str, ...], str, int] | None:
    key = parse(fqn)
    return None if key.kind != "model" or key.layer is None else (key.scope, key.block, key.layer)
