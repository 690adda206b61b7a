"""The files of a DeepSpeed tag: what their names count, and the values in them that say how the rest is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptlint.formats.torch_file import number_in, ranges_of
from ckptlint.loaders.rank_files.statements import Statements, checksums
from ckptlint.loaders.readers.sets import file_of
from ckptlint.loaders.readers.torch_files import OpenedFile, SetFiles, is_dict
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder

ShapeLists = list[dict[str, tuple[int, ...]]]  # for each group of parameters: name -> shape


@dataclass(frozen=True, slots=True)
class Source(OpenedFile):
    """A file of the tag that was read, and the steps that the optimizer in it counted."""

    steps: frozenset[int] = frozenset()

    @property
    def root(self) -> dict[Any, Any]:
        return dict_of(self.torch_file.root)

    @property
    def state(self) -> dict[Any, Any]:
        return dict_of(self.root.get("optimizer_state_dict"))


@dataclass(slots=True)
class Tag:
    """The files of a tag: all, those read that are no copies of another, and what these say of what they share."""

    files: SetFiles
    sources: list[Source] = field(default_factory=list)
    statements: Statements = field(default_factory=Statements)

    def of(self, *kinds: str) -> Iterator[Source]:
        return (source for source in self.sources if source.file.kind in kinds)


def read_tag(folder: Folder, look_at_files: bool) -> Tag:
    """The files of a tag that have names of DeepSpeed's, in the order of what their names count."""
    named = [file for name in folder.files_beside() if (file := file_of(name)) is not None]
    tag = Tag(SetFiles(folder, look_at_files))
    alike: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for file in sorted(named, key=lambda file: (_ORDER[file.kind], *file.numbers.values())):
        if (opened := tag.files.open(file.name, file.kind, file.numbers, "dict", is_dict)) is not None:
            source = Source(opened.file, opened.number, opened.torch_file)
            steps = frozenset(_steps(folder, source)) if file.kind == "optimizer" else frozenset()
            tag.sources.append(replace(source, steps=steps))
            alike[checksums(opened.torch_file)].append(file.name)
    for source in tag.sources:  # torch.save keeps the name of a file inside its archive
        file, sums = source.file, checksums(source.torch_file)
        inside = file_of(f"{source.torch_file.prefix}.pt")
        if inside is not None and inside.identity != file.identity:
            same = [twin for twin in alike[sums][:2] if twin != file.name and sums]
            tag.statements.other_name(file.name, inside.name, same[0] if same else "")
    copies = tag.statements.elsewhere()
    tag.sources = [source for source in tag.sources if source.label not in copies]
    return tag


_ORDER = {"model": 0, "layer": 1, "expert": 2, "optimizer": 3, "expert optimizer": 4}


def dict_of(value: Any) -> dict[Any, Any]:
    """A dict as it is; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def count_of(value: Any) -> int:
    """A positive number of ranks or elements; 0 for anything else."""
    return value if type(value) is int and 0 < value < 2**31 else 0


def partition_counts(state: dict[Any, Any]) -> tuple[int, ...]:
    """Over how many ranks each group is cut; () where nothing says."""
    counts = state.get("partition_count")
    per_group = counts if isinstance(counts, (list, tuple)) else (counts,)
    return tuple(per_group) if per_group and all(map(count_of, per_group)) else ()


def version_of(root: dict[Any, Any]) -> str:
    """The version of DeepSpeed that wrote a file, printable; "" where it does not say."""
    version = root.get("ds_version")
    return printable(version[:32]) if isinstance(version, str) else ""


def configured_stage(root: dict[Any, Any]) -> int | None:
    stage = dict_of(dict_of(root.get("ds_config")).get("zero_optimization")).get("stage")
    return stage if type(stage) is int and 0 <= stage <= 3 else None


def zero_stage(state: dict[Any, Any]) -> int | None:
    """The stage that an optimizer's file says it is of: a number, or an enum's member."""
    stage = state.get("zero_stage")
    value = stage if type(stage) is int else (getattr(stage, "args", ()) or (None,))[0]
    return value if type(value) is int and 0 <= value <= 3 else None


def shapes_of(root: dict[Any, Any]) -> ShapeLists | None:
    """The trained parameters of each group, None where the file does not list them: with experts before 0.18."""
    groups = root.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    shapes = [
        {str(fqn): shape for fqn, value in group.items() if (shape := as_shape(value)) is not None} for group in groups
    ]
    return shapes if [*map(len, shapes)] == [*map(len, groups)] else None


def as_shape(value: Any) -> tuple[int, ...] | None:
    """A shape as the pickle gives it."""
    args = getattr(value, "args", ())
    value = args[0] if args else value
    sizes = tuple(value) if isinstance(value, (list, tuple)) else None
    if sizes is None or not all(type(n) is int and 0 <= n < 2**62 for n in sizes) or prod(sizes) >= 2**62:
        return None
    return sizes


def moments_of(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The optimizer's states of each flat group, in order: an elastic save lists them, others number them."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    entries = dict(enumerate(base)) if isinstance(base, list) else dict_of(dict_of(base).get("state"))
    if not all(type(number) is int for number in entries):
        return []
    return [dict_of(entry) for _, entry in sorted(entries.items())]


def _steps(folder: Folder, source: Source) -> Iterator[int]:
    """Step counts of the optimizer groups, from their states or from the settings of each group."""
    base = source.state.get("base_optimizer_state", source.state.get("optimizer_state_dict"))
    settings = dict_of(base).get("param_groups")
    groups = [dict_of(group) for group in settings] if isinstance(settings, list) else []
    for entry in [*moments_of(source.state)[:_COUNTED], *groups]:
        step = number_in(ranges_of(folder, source.file.name), source.torch_file, entry.get("step"))
        if step is not None:
            yield step


_COUNTED = 4  # groups whose count is read; stage 3 has many, all stepped at once
