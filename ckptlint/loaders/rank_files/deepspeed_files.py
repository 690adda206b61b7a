"""The files of a DeepSpeed tag: what their names count, and the values in them that say how the rest is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptlint.formats.torch_file import TorchFile, number_in, ranges_of
from ckptlint.loaders.rank_files.onto import read_file
from ckptlint.model import Problem, RankFile, StoredFile
from ckptlint.model.stored import StoredTensor
from ckptlint.storage.folder import READABLE, Folder

Shapes = list[dict[str, tuple[int, ...]]]
"""For each group of parameters: name -> shape."""

_NAMES = (
    ("optimizer", re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")),
    ("model", re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("model", re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("layer", re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt")),
    (
        "expert",
        re.compile(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    ),
    ("expert optimizer", re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")),
)  # fmt: skip
"""Kinds of files and what their names count; `zero_pp_rank` counts data parallel ranks.

Source:
    deepspeed.runtime.engine (0.14 - 0.19): `_get_zero_ckpt_name`, `_get_ckpt_name`, `_get_expert_ckpt_name`,
    `_get_optimizer_ckpt_name`; deepspeed.runtime.pipe.module: `ckpt_layer_path`
"""


def file_of(name: str) -> RankFile | None:
    """What a file is by its name; None for one that is none of DeepSpeed's.

    >>> file_of("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").numbers
    {'dp': 3, 'mp': 0}
    """
    for kind, pattern in _NAMES:
        if match := pattern.fullmatch(name):
            numbers = {what: int(number) for what, number in match.groupdict().items() if number is not None}
            return RankFile(name, kind, numbers)
    return None


@dataclass(slots=True)
class Source:
    """A file of the tag that was read.

    Attributes:
        file: what its name says.
        number: its row among the payload files.
        found: what it holds.
        steps: those that the optimizer in it counted.
    """

    file: RankFile
    number: int
    found: TorchFile
    steps: frozenset[int] = frozenset()

    @property
    def root(self) -> dict[Any, Any]:
        """Its value."""
        return self.found.root if isinstance(self.found.root, dict) else {}

    @property
    def state(self) -> dict[Any, Any]:
        """The state dict of the optimizer in it."""
        inner = self.root.get("optimizer_state_dict")
        return inner if isinstance(inner, dict) else {}


@dataclass(slots=True)
class Tag:
    """The files of a tag.

    Attributes:
        files: all that are there, read or not.
        sources: those that were read.
        stored: the payload files, in the order of the sources' numbers.
        problems: what stood in the way of reading the others.
    """

    files: list[RankFile]
    sources: list[Source]
    stored: list[StoredFile]
    problems: list[Problem]

    def of(self, *kinds: str) -> Iterator[Source]:
        """The sources of these kinds."""
        return (source for source in self.sources if source.file.kind in kinds)


def read_tag(folder: Folder, look_at_files: bool) -> Tag:
    """The files of a tag that have names of DeepSpeed's, in the order of what their names count."""
    named = [file for name in folder.files_beside() if (file := file_of(name)) is not None]
    tag = Tag([], [], [], [])
    for number, file in enumerate(sorted(named, key=lambda file: (_ORDER[file.kind], *file.numbers.values()))):
        state, size = folder.look_at(file.name)
        shown = state if look_at_files else "unchecked"
        tag.stored.append(StoredFile(file.name, file.name, size if look_at_files else None, shown, True))
        found = read_file(folder, file.name, tag.problems) if state in READABLE and size is not None else None
        if found is not None and not isinstance(found.root, dict):
            found = None
        tag.files.append(file if found is not None else replace(file, is_read=False))
        if found is not None:
            source = Source(file, number, found)
            source.steps = frozenset(_steps(folder, source)) if file.kind == "optimizer" else frozenset()
            tag.sources.append(source)
    return tag


_ORDER = {"model": 0, "layer": 1, "expert": 2, "optimizer": 3, "expert optimizer": 4}


# ---------------------------------------------------------------- values


def count_of(value: Any) -> int:
    """A positive number of ranks or elements; 0 for anything else."""
    return value if type(value) is int and 0 < value < 2**31 else 0


def partition_counts(state: dict[Any, Any]) -> tuple[int, ...]:
    """Over how many ranks each group is cut; () where nothing says."""
    counts = state.get("partition_count")
    found = counts if isinstance(counts, (list, tuple)) else (counts,)
    return tuple(found) if found and all(map(count_of, found)) else ()


def configured_stage(root: dict[Any, Any]) -> int | None:
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0 if isinstance(config, dict) else None
    return stage if type(stage) is int and 0 <= stage <= 3 else None


def zero_stage(state: dict[Any, Any]) -> int | None:
    """The stage that an optimizer's file says it is of: a number, or an enum's member."""
    stage = state.get("zero_stage")
    value = stage if type(stage) is int else (getattr(stage, "args", ()) or (None,))[0]
    return value if type(value) is int and 0 <= value <= 3 else None


def shapes_of(root: dict[Any, Any]) -> Shapes | None:
    """The trained parameters of each group, None where the file does not list them: with experts before 0.18."""
    groups = root.get("param_shapes")
    if isinstance(groups, dict):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    found = [
        {str(fqn): shape for fqn, value in group.items() if (shape := as_shape(value)) is not None} for group in groups
    ]
    return found if [*map(len, found)] == [*map(len, groups)] else None


def as_shape(value: Any) -> tuple[int, ...] | None:
    """A shape as the pickle gives it."""
    args = getattr(value, "args", ())
    value = args[0] if args else value
    sizes = tuple(value) if isinstance(value, (list, tuple)) else None
    return (
        sizes
        if sizes is not None and all(type(n) is int and 0 <= n < 2**62 for n in sizes) and prod(sizes) < 2**62
        else None
    )


def moments_of(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The optimizer's own states of each flat group, in their order.

    An elastic save lists them; others number them as torch does.
    """
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if isinstance(base, list):
        entries = dict(enumerate(base))
    else:
        entries = base.get("state", {}) if isinstance(base, dict) else {}
    if not isinstance(entries, dict) or not all(type(number) is int for number in entries):
        return []
    return [entry if isinstance(entry, dict) else {} for _, entry in sorted(entries.items())]


def _steps(folder: Folder, source: Source) -> Iterator[int]:
    """What the groups of an optimizer counted: in their states, or in the settings of each group."""
    base = source.state.get("base_optimizer_state", source.state.get("optimizer_state_dict"))
    settings = base.get("param_groups") if isinstance(base, dict) else None
    groups = [group for group in settings if isinstance(group, dict)] if isinstance(settings, list) else []
    for entry in [*moments_of(source.state)[:_COUNTED], *groups]:
        step = entry.get("step")
        if type(step) is int:
            yield step
        elif (
            isinstance(step, StoredTensor)
            and (value := number_in(ranges_of(folder, source.file.name), source.found, step)) is not None
        ):
            yield value


_COUNTED = 4  # groups whose count is read; stage 3 has many, all stepped at once
