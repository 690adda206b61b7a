"""Sets of files beside the tensors whose names differ in one number, and how many ranks a checkpoint states."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Literal

from ckptlint.model import AxisSize, Checkpoint, StepFile
from ckptlint.model.facts import fact
from ckptlint.vocabulary.frameworks import family_of, may_be_pickle, number_of, step_number, world
from ckptlint.vocabulary.mesh import AXES
from ckptlint.vocabulary.metadata_files import PAYLOAD_RANK

PAYLOAD = "the payload files"
"""Who states the ranks up to the last that wrote payload: there may be more of them."""

_NUMBER = re.compile(r"\d+")
_COUNTER = re.compile(r"_\d+(?=\.\w+$)")
_OF_MANY = re.compile(r"\d+[-_]of[-_]\d+")  # parts of one state, which an index or their count describes
_AXES = "|".join([*(axis for axis in AXES if axis != "world"), "mp", "local"])
_RANK = re.compile(rf"(?:.*?[^a-z])?(?P<axis>{_AXES})?[-_.]?rank[-_.]?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class NumberedFiles:
    """A set of files.

    Attributes:
        pattern: their path with `{}` for the number.
        what: what they hold.
        counts: what the number counts; "" where nothing says.
        is_global: whether it counts all ranks of the job, not those along one axis.
        files: number -> file.
    """

    pattern: str
    what: str
    counts: Literal["rank", "object", ""]
    is_global: bool
    files: dict[int, StepFile]

    def stride(self, total: int) -> tuple[int, int]:
        """The lowest number and the distance of the others: more than 1 where one rank of each node or group writes.

        Two files have one distance, which repeats only where it divides all ranks: `total` says how many there are.
        """
        numbers = sorted(self.files)
        step = reduce(gcd, (number - numbers[0] for number in numbers[1:]), 0) or 1
        repeats = len(numbers) > 2 or (numbers[0] < step and total % step == 0)
        return (numbers[0] % step, step) if repeats else (0, 1)


@fact
def numbered_files(ckpt: Checkpoint) -> list[NumberedFiles]:
    """The sets that may count ranks or objects: of state that can be pickled, not of logs, and not steps."""
    groups: dict[tuple[str, int], dict[int, StepFile]] = defaultdict(dict)
    found = []
    for file in ckpt.step_files:
        folder, slash, name = file.name.rpartition("/")
        if counted := number_of(name):
            number = counted[1]
            at = next(match for match in _NUMBER.finditer(name) if int(match[0]) == number)
            groups[folder + slash + _with_hole(name, at), -1][number] = file
        elif _is_state(name) and not _OF_MANY.search(name):
            for place, match in enumerate(_NUMBER.finditer(name)):
                if len(match[0]) <= 9:
                    groups[folder + slash + _with_hole(name, match), place][int(match[0])] = file
    for (pattern, _), files in groups.items():
        name = next(iter(files.values())).name.rpartition("/")[2]
        if counted := number_of(name):
            own = counted[0].counted_by
            counts = own if own != "dp rank" else "rank"
            found.append(NumberedFiles(pattern, counted[0].name, counts, own != "dp rank", files))
        elif len(files) > 1:
            before = pattern.rpartition("/")[2].partition("{}")[0]
            rank = _RANK.fullmatch(before)
            family = family_of(name)
            what = family.name if family is not None else f"{before.rstrip('-_.')} file"
            is_global = rank is not None and not rank["axis"]
            found.append(NumberedFiles(pattern, what, "rank" if rank else "", is_global, files))
    return found


def is_one_of_several(ckpt: Checkpoint, name: str) -> bool:
    """Whether a file holds one object of several that count by themselves: the first of them has no number.

    Source:
        accelerate.checkpointing.save_accelerator_state (`optimizer.bin`, `optimizer_1.bin`)
    """
    first = _COUNTER.sub("", name)
    return first != name and any(file.name == first for file in ckpt.step_files)


def _with_hole(name: str, match: re.Match[str]) -> str:
    return f"{name[: match.start()]}{{}}{name[match.end() :]}"


def _is_state(name: str) -> bool:
    """Whether a file may hold a state that a resume reads, and its name is not that of a step."""
    family, stem = family_of(name), name.rpartition(".")[0]
    is_read = may_be_pickle(name) if family is None else family.content == "pickle"
    return is_read and step_number(stem) is None and step_number(name) is None


def inventory_of(ckpt: Checkpoint) -> AxisSize | None:
    """How many ranks wrote, where a file that the framework writes for this says so."""
    size = ckpt.topology.get("world")
    is_said = size is not None and any(known.ranks and known.file == size.source for known in world().inventories)
    return size if is_said else None


def stated_ranks(ckpt: Checkpoint, without: NumberedFiles) -> dict[str, int]:
    """How many ranks the job had, by who says so: payload files, the mesh, and other whole sets of all ranks."""
    names: Iterable[str] = ckpt.files.names
    payload = max((int(match[1]) for name in names if (match := PAYLOAD_RANK.search(name))), default=-1) + 1
    stated = {PAYLOAD: payload} if payload else {}
    if (mesh := ckpt.topology.get("world")) is not None and mesh.source == "metadata":
        stated["the mesh"] = mesh.size
    if (inventory := inventory_of(ckpt)) is not None:
        stated[inventory.source] = inventory.size
    for other in numbered_files(ckpt):
        is_whole = sorted(other.files) == list(range(len(other.files)))
        if other is not without and other.counts == "rank" and other.is_global and is_whole and len(other.files) > 1:
            stated[other.pattern.replace("{}", "*")] = len(other.files)
    return stated
