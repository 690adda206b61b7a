"""Which checkpoints a path means: one bounded walk finds units by content, and steps by numbered siblings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import Literal

from ckptlint.errors import AccessError, CkptlintError, NothingToCheckError, UnknownLayoutError
from ckptlint.grouping import grouped
from ckptlint.loaders.layouts import CheckpointPlace, recognise
from ckptlint.loaders.layouts.unsupported import unsupported
from ckptlint.loaders.rank_files.megatron_keys import is_rank_folder, legacy_file
from ckptlint.loaders.readers.safetensors import groups
from ckptlint.loaders.run.finished import is_unfinished_name
from ckptlint.loaders.run.folder import is_named_step
from ckptlint.loaders.run.siblings import series
from ckptlint.loaders.run.steps import (
    alike_steps,
    checkpoints_in,
    components,
    is_dcp_file,
    not_followed,
    numbered_steps,
    numberless,
    sub_folder,
)
from ckptlint.model.text import first_names, plural, printable
from ckptlint.sandbox import one_budget
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.locate import folder_at
from ckptlint.vocabulary.frameworks import (
    beside_step,
    family_of,
    holds_no_state,
    is_part,
    may_be_pickle,
    number_of,
    step_number,
)
from ckptlint.vocabulary.litter import is_system_file

_DEEPSPEED = ("unsupported", "deepspeed", "deepspeed-universal")  # kinds of what it writes into a step of others
_UNIVERSAL = "_universal"  # what deepspeed.checkpoint.ds_to_universal makes of a step, beside it
_DEPTH = 6  # folders below the one that the user named: a run, its step, a role, its weights, their counter
_MOST_FOLDERS = 4096  # that one walk lists
_OTHERS = 4  # steps beside one that are asked whether they hold checkpoints
_MOST_HEADS = 16  # files of a folder whose first bytes are looked at
_MOST_EMPTY = 16  # files that are named where nothing else is there

WhichSteps = Literal["newest", "all", "none"]  # which of the steps in a folder are meant


def find_checkpoints(folder: Folder, all_steps: bool) -> list[CheckpointPlace]:
    """The checkpoints that a path means: the folder itself, its newest step (or all), or the parts of a step.

    Raises NothingToCheckError for none, UnknownLayoutError for payload of no known layout, and AccessError where a
    folder cannot be listed or the newest step is a link that is not followed.
    """
    walk = _Walk()
    units = walk.units(folder, "all" if all_steps else "newest", _DEPTH)
    if not units:
        if folder.not_looked_at:
            hint = "name the checkpoint folder itself, since a web server does not list what it has"
            raise NothingToCheckError(f"no checkpoint at {folder.display}: {hint}")
        payload = next((file.display for file in walk.files(folder, _states)), "")
        is_empty_step = is_named_step(folder.name) and not folder.entries
        if _lost_model(folder) or _others_hold_checkpoints(folder) if payload else is_empty_step:
            units = [CheckpointPlace.at(folder)]
        elif payload:
            raise UnknownLayoutError(
                f"{payload} holds weights or other state, and ckptlint does not know how these files belong together: "
                "name one of them to read it alone"
            )
        elif empty := [*islice(walk.files(folder, _empty), _MOST_EMPTY)]:
            return [CheckpointPlace.at(file) for file in empty]
        else:
            raise NothingToCheckError(
                f"no checkpoint under {folder.display}: looked for .metadata, __N.metadata, *.distcp, *.safetensors, "
                "files of torch.save, step folders (iter_*, step-*, step_*, global_step_*, checkpoint-*) and component "
                "folders"
            )
    if walk.passed:
        sentence = f"{plural(walk.passed, 'folder')} below {folder.display} lie too deep or are too many to look into"
        units[0] = replace(units[0], not_followed=(*units[0].not_followed, sentence))
    places = frozenset(place.place for unit in units for place in (unit.folder, *unit.reports_for))
    around: set[str] = set()  # the places of all folders around these
    for place in places:
        while (place := place.rpartition("/")[0]) and place not in around:
            around.add(place)
    number = None if folder.name.isdecimal() else step_number(folder.name)  # a number alone may be a year
    at = None if number is None else (folder.display, number)
    return [replace(unit, claimed=places, around_claimed=frozenset(around), step=unit.step or at) for unit in units]


def _lost_model(step: Folder) -> bool:
    """Whether a step's files are all known, an optimizer's among them, and none can hold a model."""
    if not is_named_step(step.name) or has_twin(step) or step.folders():
        return False
    families = [*map(family_of, step.files())]
    is_known = all(family is not None and family.part != "model" for family in families)
    has_optimizer = any(family is not None and family.part == "optimizer" for family in families)
    return is_known and has_optimizer and any(_states(step))


def has_twin(step: Folder) -> bool:
    """Whether the run is one part of a job's saves: by its name, or as another part beside it has the same step."""
    run = step.parent
    if run is None or run.parent is None:
        return run is not None and is_part(run.name)
    siblings = (sub_folder(run.parent, name) for name in run.parent.folders() if name != run.name and is_part(name))
    return is_part(run.name) or any(sub is not None and step.name in sub.folders() for sub in siblings)


def _others_hold_checkpoints(step: Folder) -> bool:
    """Whether a folder is a step, and one of the nearest others that are named alike holds a checkpoint."""
    run = step.parent
    if run is None or not is_named_step(step.name):
        return False
    siblings = islice((sibling.folder for sibling in alike_steps(run, step.name) if sibling.name != step.name), _OTHERS)
    return any(_Walk().units(sibling, "newest", _DEPTH) for sibling in siblings)


@dataclass(slots=True)
class _Walk:
    """One walk below a path: how many folders may still be listed, and how many were too many to look into."""

    left: int = _MOST_FOLDERS
    passed: int = 0

    def units(self, folder: Folder, steps: WhichSteps, levels: int, in_step: bool = False) -> list[CheckpointPlace]:
        """The checkpoints in a folder and so many floors below it; a single number in a step is a place there."""
        if self.left <= 0:
            self.passed += 1
            return []
        self.left -= 1
        parts = components(folder)
        if not levels or (parts and _is_kind(parts[0].folder, "unsupported")):
            return parts
        numbered = numbered_steps(folder)
        if parts:  # a model is what its folder means; the steps of the run that made it lie beside it
            # payload of a DCP checkpoint may lie in folders that are named like steps
            is_model = _is_kind(parts[0].folder, "safetensors", "torch") and step_number(folder.name) is None
            is_run = is_model and not in_step and steps != "none"
            if is_run:  # the files of the steps are no files of the model
                views = (
                    place.without([name for name in numbered if place.has(name)], place.part)
                    for place in parts[0].reports_for
                )
                parts[0] = replace(parts[0], reports_for=tuple(views))
            apart = [] if is_run else [*numbered]
            parts += self._beside(folder, [*numbered], apart, "all" if steps == "all" else "none", levels)
            if is_run:
                saves = {name: n for name, n in numbered.items() if not _holds_any(folder, name, parts)}
                parts += self._newest(folder, saves, steps, levels)
            notes = [] if in_step else _not_read(folder, numbered, parts)
            return [replace(parts[0], not_followed=(*parts[0].not_followed, *notes)), *parts[1:]]
        are_steps = len({*numbered, *(name for name in folder.folders() if name == "release")}) > in_step
        if are_steps and steps != "none" and (units := self._steps(folder, numbered, steps, levels, in_step)):
            return units
        left_out = {name for name in numbered if are_steps and not (steps == "none" and _is_part(folder, name))}
        inner = [name for name in _inner(folder) if name not in left_out and not (in_step and holds_no_state(name))]
        units = self._below(folder, inner, steps, levels, in_step)
        if in_step or step_number(folder.name) is not None:  # a file of torch.save is one of the step's own
            units = [unit for unit in units if not _is_kind(unit.folder, "file")] or units
        is_log = levels < _DEPTH and holds_no_state(folder.name)
        return _accounted(units, folder) or ([] if is_log else checkpoints_in(folder))

    def _beside(
        self, folder: Folder, numbered: list[str], parts: list[str], steps: WhichSteps, levels: int
    ) -> list[CheckpointPlace]:
        """The checkpoints below one: parts of its step, other models.

        What is named like a step is not looked into, but for its `parts`: DeepSpeed's, or all where all steps are asked
        for.
        """
        evidence = unsupported(folder)
        but = {*numbered, *([evidence.file] if evidence else [])}
        is_step = step_number(folder.name) is not None
        inner = [name for name in _inner(folder) if name not in but and not (is_step and holds_no_state(name))]
        inner = [name for name in inner if folder.inner_target(name) not in numbered]  # it is looked at as a step
        # DeepSpeed writes its part of a step into a folder that is named like a step
        inner += [name for name in parts if name in folder.folders() and (steps == "all" or _is_part(folder, name))]
        is_dcp = not groups(folder)  # the metadata may name payload in sub-folders: these are no saves of their own
        hidden = ("incomplete", "file") if is_dcp else ("file",)  # a file of torch.save is one of the step's own
        units = self._below(folder, inner, steps, levels, in_step=True)
        return [unit for unit in units if not (_is_kind(unit.folder, *hidden) or _is_bare(unit.folder))]

    def _steps(
        self, folder: Folder, numbers: dict[str, int], steps: WhichSteps, levels: int, in_step: bool
    ) -> list[CheckpointPlace]:
        """The checkpoints of the steps of a run: the newest of each series that is finished, or all."""
        units = self._newest(folder, numbers, steps, levels)
        if units and all(unit.refused for unit in units):
            raise AccessError("; ".join(unit.refused for unit in units))
        if not units:
            return []
        notes: list[str] = []
        if not in_step:
            beside = {place for name in numbers for place in beside_step(name)}
            known = {*numbers, *beside, "release"}
            others = [name for name in _inner(folder) if name not in known and _UNIVERSAL not in name]
            others = [name for name in others if not (is_part(name) or holds_no_state(name) or folder.target(name))]
            unfinished = [*filter(is_unfinished_name, others)]
            others = [name for name in others if name not in unfinished]
            units += self._below(folder, others, steps, levels, in_step)
            notes += [f"what {printable(name)} holds: its save never finished" for name in unfinished]
        notes += _not_read(folder, numbers, units) if steps == "newest" else []
        around = folder if in_step or step_number(folder.name) is not None else _newest_of_series(folder, numbers)
        units = _accounted(units, around)
        for name in folder.folders():
            if is_part(name) and name not in numbers and not folder.escapes_to(name):
                units = _accounted(units, folder.sub(name))  # state that a run has once, of its newest step
        return [replace(units[0], not_followed=(*units[0].not_followed, *notes), of_run=not in_step), *units[1:]]

    def _newest(self, folder: Folder, numbers: dict[str, int], steps: WhichSteps, levels: int) -> list[CheckpointPlace]:
        """The checkpoints of the newest step of each series, or of all steps."""
        alike = grouped((re.sub("[-_]", "", numberless(name)), name) for name in numbers)
        if "release" in folder.folders() and "release" not in numbers:  # older than all that have a number
            alike.setdefault(next(iter(alike), "release"), []).append("release")
        units: list[CheckpointPlace] = []
        for names in alike.values():
            units += self._series(folder, {name: numbers.get(name, 0) for name in names}, steps, levels)
        return units

    def _series(self, folder: Folder, numbers: dict[str, int], steps: WhichSteps, levels: int) -> list[CheckpointPlace]:
        """The checkpoints in steps that are named alike, the newest first, or in the newest."""
        units: list[CheckpointPlace] = []
        unfinished: list[CheckpointPlace] = []
        gone = folder.entries.strange
        for name in numbers:
            step = folder.only(name) if folder.has(name) or name in gone else sub_folder(folder, name)
            if step is None:  # where it is the newest, it is what the folder means, and an older one is no answer
                at = f"{folder.display.rstrip('/')}/{printable(name)}", numbers[name]
                units.append(CheckpointPlace(folder.only(name), step=at, refused=not_followed(folder, name)))
                if steps == "newest":
                    break
                continue
            inside = self._at(folder, name, step, steps, levels)
            if inside and f"{name}{_UNIVERSAL}" in folder.folders():
                inside += self._below(folder, [name + _UNIVERSAL], steps, 1, in_step=True)
            at = step.display, numbers[name]
            units += [unit if unit.step else replace(unit, step=at) for unit in inside]
            unfinished += [] if inside else [replace(CheckpointPlace.at(step), step=at)]
            if units and steps == "newest":
                break
        if not units and all(unit.folder.entries and not _lost_model(unit.folder) for unit in unfinished[:1]):
            return []  # what it holds, nobody knows
        # a newer step without a checkpoint in it is no reason to pass an older one
        return units + unfinished if steps == "all" else unfinished[:1] or units

    def _below(
        self, folder: Folder, names: Iterable[str], steps: WhichSteps, levels: int, in_step: bool
    ) -> list[CheckpointPlace]:
        inner = ((name, sub) for name in names if (sub := sub_folder(folder, name)) is not None)
        return [unit for name, sub in inner for unit in self._at(folder, name, sub, steps, levels, in_step)]

    def _at(
        self, folder: Folder, name: str, sub: Folder, steps: WhichSteps, levels: int, in_step: bool = True
    ) -> list[CheckpointPlace]:
        """The checkpoints in a sub-folder; in none of its own where it is a link to a folder of another name."""
        target = folder.escapes_to(name)
        target_name = PurePath(target).name
        is_elsewhere = target and target_name != name and step_number(target_name) is None
        units = self.units(sub, steps, 0 if is_elsewhere else levels - 1, in_step)
        if not target:
            return units
        link = printable(target)
        return [replace(unit, linked_to=link) if unit.folder.place == sub.place else unit for unit in units]

    def files(self, folder: Folder, names: Callable[[Folder], Iterable[str]], levels: int = _DEPTH) -> Iterator[Folder]:
        """The files of these names in a folder and below it, each in a view that hides the others."""
        self.left -= 1
        yield from map(folder.only, names(folder))
        for name in _inner(folder) if levels else ():
            if self.left > 0 and (sub := sub_folder(folder, name)) is not None:
                yield from self.files(sub, names, levels - 1)


def _inner(folder: Folder) -> list[str]:
    """The folders to look into; those that hold logs by their names last."""
    names = [name for name in folder.folders() if not (name.startswith(".") or is_rank_folder(name))]
    return sorted(names, key=holds_no_state)


def _accounted(places: list[CheckpointPlace], folder: Folder) -> list[CheckpointPlace]:
    """The same checkpoints; the files of the folder around them are reported with the first that a job resumes from."""
    exports = ("safetensors", "torch", "file", "incomplete", "lost", "unsupported")
    first = next((n for n, unit in enumerate(places) if not (unit.refused or _is_kind(unit.folder, *exports))), 0)
    return [
        replace(unit, reports_for=(*unit.reports_for, folder)) if number == first else unit
        for number, unit in enumerate(places)
    ]


def _not_read(folder: Folder, steps: Iterable[str], places: list[CheckpointPlace]) -> list[str]:
    """What is said of the steps in a folder that none of the checkpoints is, or lies in."""
    late = [name for name in steps if not _holds_any(folder, name, places)]
    verb, them = ("passes", "it") if len(late) == 1 else ("pass", "them")
    count, named = plural(len(late), "other step"), first_names([*map(printable, late)])
    return [f"whether {count} {verb}: {named} (`ckptlint RUN_DIR --all-steps` checks {them})"] if late else []


def _holds_any(folder: Folder, name: str, units: list[CheckpointPlace]) -> bool:
    """Whether one of the checkpoints is a step of this name, or lies in it."""
    if folder.has(name) or name in folder.entries.strange:
        return any(unit.folder.part == name and unit.folder.place == folder.place for unit in units)
    inside = f"{folder.sub(name).place}/"
    return any(f"{unit.folder.place}/".startswith(inside) for unit in units)


def _linked_step(folder: Folder) -> Folder:
    """The step of the same run that a link leads to, as `latest.good -> checkpoint-12`; the folder itself otherwise."""
    with suppress(CkptlintError):  # what is around it may be closed
        name = folder.parent.inner_target(folder.name) if folder.parent is not None else ""
        if folder.parent is not None and step_number(folder.name) is None and step_number(name) is not None:
            return folder.parent.sub(name)
    return folder


def _newest_of_series(run: Folder, steps: Collection[str]) -> Folder:
    """A run with those of its own files in view that a resume from its newest step may read: `optimizer_300.pt`."""
    names = [name for name in run.files_beside() if may_be_pickle(name)]
    counted = [numbers for numbers in series(n for n in names if not number_of(n)) if numbers.keys() - steps]
    older = {name for numbers in counted for name, number in numbers.items() if number < max(numbers.values())}
    return run.without({*run.entries, *run.entries.strange} - ({*names} - {*steps} - older), "")


def _is_part(folder: Folder, name: str) -> bool:
    """Whether a folder that is named like a step is DeepSpeed's part of the one that it is in."""
    return (sub := sub_folder(folder, name)) is not None and _is_kind(sub, *_DEEPSPEED)


def _is_bare(folder: Folder) -> bool:
    """Whether it holds nothing but side state: Megatron's `common.pt` beside an export, as ms-swift writes it."""
    recognised = recognise(folder) if _is_kind(folder, "incomplete") else None
    return (
        recognised is not None
        and recognised.evidence.file in ("common.pt", "metadata.json")
        and len(folder.files()) <= 2
    )


def _is_kind(folder: Folder, *kinds: str) -> bool:
    recognised = recognise(folder)
    return recognised is not None and recognised.kind in kinds


_HEAD = 512
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that torch < 1.6 starts its files with


def _states(folder: Folder) -> Iterator[str]:
    """The files of a folder that start like one of torch.save."""
    for name in sorted(folder.files_beside(), key=folder.size, reverse=True)[:_MOST_HEADS]:
        head = folder.head(name, _HEAD) if folder.stat(name)[0] in READABLE else b""
        if head.startswith(_LEGACY) or (head.startswith(b"PK\3\4") and b"/data.pkl" in head):
            yield name


def _empty(folder: Folder) -> Iterator[str]:
    """The files of a folder that have the ending of a checkpoint and no bytes."""
    names = (name for name in folder.files_beside() if may_be_pickle(name) and not is_system_file(name))
    return (name for name in names if not folder.size(name))


_WEIGHTS = (".safetensors", ".safetensors.index.json")


def holds_at_most(paths: Iterable[str], all_steps: bool, most: int) -> bool:
    """Whether the checkpoints of these paths are on a file system and hold at most so many bytes; no if unlisted."""
    left = most
    try:
        for path in paths:
            with suppress(NothingToCheckError):  # it adds nothing to read
                for place in find(path, all_steps):
                    left -= _bytes_within(place.folder, left)
                    if left < 0 or not place.folder.is_near:
                        return False
    except CkptlintError:
        return False
    return left >= 0


def _bytes_within(folder: Folder, most: int, levels: int = _DEPTH) -> int:
    """The bytes of all files in a folder and below it; once there are more than `most`, those that were counted."""
    total = int(folder.entries.size.sum()) + sum(entry.size for entry in folder.entries.others.values())
    for name in folder.folders() if levels else ():
        if total > most:
            break
        if not folder.escapes_to(name):
            total += _bytes_within(folder.sub(name), most - total, levels - 1)
    return total


def find(path: str, all_steps: bool = False) -> list[CheckpointPlace]:
    """The checkpoints that a path means.

    A file of a checkpoint stands for its folder, its configuration and the state beside its weights too; safetensors
    stand for their own model there, any other file for itself. Raises as `find_checkpoints`, and ConfigError for a URL
    that cannot be read here.
    """
    return find_at(*folder_at(path), all_steps)


@one_budget()
def find_at(folder: Folder, name: str, all_steps: bool = False) -> list[CheckpointPlace]:
    """As `find`, from a folder on; `name` is the file in it that was named, "" for the folder itself."""
    folder = _linked_step(folder)
    if is_rank_folder(folder.name) and folder.parent is not None and legacy_file(folder.parent):
        return [CheckpointPlace.at(folder.parent)]
    if name.endswith(_WEIGHTS) and (parts := [part for part in components(folder) if part.folder.has(name)]):
        return parts
    if not name:
        return find_checkpoints(folder, all_steps)
    if step := _step_around(folder, name, all_steps):
        return step
    if name.endswith(_WEIGHTS) or is_dcp_file(name):
        try:
            return find_checkpoints(folder, all_steps)
        except NothingToCheckError:
            if folder.not_looked_at:
                raise
            raise NothingToCheckError(
                f"{printable(name)} in {folder.display} belongs to no checkpoint: neither .metadata nor payload nor "
                "*.safetensors lie beside it; name the folder that holds them, or the run folder above it"
            ) from None
    return [CheckpointPlace.at(folder.only(name))]


def _step_around(folder: Folder, name: str, all_steps: bool) -> list[CheckpointPlace]:
    """What a settings file or a file of side state means: the checkpoint beside it; [] where none is."""
    family = family_of(name)
    if family is None or (family.content == "other" and not name.endswith(".json")) or not folder.has(name):
        return []
    if parts := components(folder):
        return parts
    if step_number(folder.name) is not None:
        with suppress(NothingToCheckError, UnknownLayoutError):
            return find_checkpoints(folder, all_steps)
    return []
