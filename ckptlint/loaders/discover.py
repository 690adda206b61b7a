"""Which checkpoints a path means: one bounded walk tells units by content, and steps by numbered siblings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isclose
from operator import itemgetter
from pathlib import PurePath
from typing import Literal

from ckptlint.errors import AccessError, NothingToCheckError, UnknownLayoutError
from ckptlint.loaders.layouts import Found, layouts, recognise
from ckptlint.loaders.layouts.unsupported import unsupported
from ckptlint.loaders.rank_files.megatron_keys import is_rank_folder, legacy_file
from ckptlint.loaders.safetensors import groups
from ckptlint.loaders.siblings import series
from ckptlint.model.facts import fact
from ckptlint.model.text import plural, printable, some
from ckptlint.sandbox import one_budget
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.locate import folder_at
from ckptlint.vocabulary.frameworks import family_of, holds_no_state, is_newest, is_part, may_be_pickle, step_number
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA

_UNIVERSAL = "_universal"  # what deepspeed.checkpoint.ds_to_universal makes of a step, beside it
_NUMBERS = re.compile(r"[\d.]+")
_SIBLINGS_TRIED = 16
_LIKE = 0.01  # by which the largest files of two steps differ: what is pickled with the tensors varies
_DEPTH = 6  # folders below the one that the user named: a run, its step, a role, its weights, their counter
_MOST_FOLDERS = 4096  # that one walk lists
_MOST_HEADS = 16  # files of a folder whose first bytes are looked at

Steps = Literal["newest", "all", "none"]
"""Which of the steps in a folder are meant."""


def is_alike(name: str, other: str) -> bool:
    """Whether two folders are named alike but for their numbers."""
    return _NUMBERS.sub("", name) == _NUMBERS.sub("", other)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run: a folder, or one file that holds a whole state.

    Attributes:
        number: the step that its name carries.
        run: the folder around it.
        name: its own name there, raw.
    """

    number: int
    run: Folder
    name: str

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, not one file."""
        return not self.run.has(self.name)

    @property
    def folder(self) -> Folder:
        """The step's folder; of a file the run's, with that file alone in view.

        Raises:
            AccessError: it is a link out of the run that leads to no checkpoint.
        """
        if not self.is_folder:
            return self.run.only(self.name)
        found = sub_folder(self.run, self.name)
        if found is None:
            raise AccessError(astray(self.run, self.name))
        return found


def steps_of(run: Folder) -> list[Step]:
    """The steps that lie directly in a folder, the newest first; of two with one number the one that sorts later.

    Raises:
        AccessError: the folder could not be listed.
    """
    return [Step(number, run, name) for name, number in _numbered(run).items()]


@fact
def _numbered(folder: Folder) -> dict[str, int]:
    """Name -> number of the steps that lie directly in a folder, the newest first.

    A file that is called the last one (`last.ckpt`) is at least as new as the others, and what a resume takes.
    """
    files = [name for name in folder.files_beside() if may_be_pickle(name)]
    names = [*folder.folders(), *files]
    numbers = {name: number for name in names if (number := step_number(name)) is not None} or _unlisted(folder)
    newest = max(numbers.values(), default=0)
    numbers |= dict.fromkeys(filter(is_newest, files), newest)
    return dict(sorted(numbers.items(), key=lambda item: (item[1], is_newest(item[0]), item[0]), reverse=True))


def _unlisted(folder: Folder) -> dict[str, int]:
    """The same of names that no framework is known to give: folders with a checkpoint in each, or files with a whole
    state in each; those of ranks and of parts of one state differ in their keys.
    """
    if recognise(folder) is not None or groups(folder):
        return {}
    for numbers in series(name for name in folder.folders() if not _is_place(folder, name)):
        oldest = sorted(numbers, key=numbers.__getitem__)[:_SIBLINGS_TRIED]
        held = islice((parts for name in oldest if (parts := components(folder.sub(name)))), 2)
        bulks = [_bulk(parts[0].folder) for parts in held]  # the newest may be unfinished
        if len(bulks) == 2 and bulks[0][:2] == bulks[1][:2] and isclose(bulks[0][2], bulks[1][2], rel_tol=_LIKE):
            return numbers
    files = [name for name in folder.files_beside() if may_be_pickle(name) and family_of(name) is None]
    sure = [*series(files)]
    for numbers in [*sure, *(others for others in series(files, from_any=True) if others not in sure)]:
        if _are_states(folder, sorted(numbers, key=numbers.__getitem__)[:2], numbers not in sure):
            return numbers
    return {"release": 0} if "release" in folder.folders() else {}


def _bulk(folder: Folder) -> tuple[str, int, int]:
    """The largest file: its name without numbers, how many are called so, its bytes; sizes of one model differ"""
    sizes: dict[str, list[int]] = defaultdict(list)
    for name in folder.files():
        sizes[_NUMBERS.sub("", name)].append(folder.size(name))
    name, largest = max(((name, max(held)) for name, held in sizes.items()), key=itemgetter(1), default=("", 0))
    return name, len(sizes[name]), largest


def _is_place(folder: Folder, name: str) -> bool:
    """Whether a folder is by its name a place in a step or beside it, or not in this folder at all."""
    is_known = name.startswith(".") or is_rank_folder(name) or is_part(name) or holds_no_state(name)
    return is_known or bool(folder.outside(name))


def runs_below(folder: Folder, levels: int = 3) -> list[tuple[str, Folder]]:
    """The folders that hold steps, each with its place below the folder: itself (""), or all below it that do.

    Links out of the folder are not followed.

    Args:
        levels: how many floors below the folder are looked at.
    """
    if steps_of(folder):
        return [("", folder)]
    if not levels:
        return []
    inner = [name for name in folder.folders() if not name.startswith(".") and not folder.outside(name)]
    below = [(name, runs_below(folder.sub(name), levels - 1)) for name in inner]
    return [(f"{name}/{place}".rstrip("/"), run) for name, runs in below for place, run in runs]


def find_checkpoints(folder: Folder, all_steps: bool) -> list[Found]:
    """The checkpoints that a path means: the folder itself, its newest step, or the parts of a step.

    Args:
        folder: what the user named.
        all_steps: every step of a run folder instead of the newest one.

    Raises:
        NothingToCheckError: there is none.
        UnknownLayoutError: there is payload, and no layout that is known.
        AccessError: a folder could not be listed, or the newest step is a link that is not followed.
    """
    walk = _Walk()
    found = walk.units(folder, "all" if all_steps else "newest", _DEPTH)
    if not found and (name := _lone_state(folder)) is not None:
        return [Found.at(folder.only(name))]
    if not found:
        if folder.unseen:
            hint = f"name the checkpoint folder itself, {folder.unseen}"
            raise NothingToCheckError(f"no .metadata under {folder.display}: {hint}")
        if held := walk.payload(folder):
            raise UnknownLayoutError(
                f"{held} holds weights or other state, and ckptlint does not know how these files belong together: "
                "name one of them to have it read by itself"
            )
        raise NothingToCheckError(
            f"no checkpoint under {folder.display}: looked for .metadata, __N.metadata, *.distcp, *.safetensors, files "
            "of torch.save, step folders (iter_*, step-*, step_*, global_step_*, checkpoint-*) and component folders"
        )
    if walk.passed:
        sentence = f"{plural(walk.passed, 'folder')} below {folder.display} lie too deep or are too many to look into"
        found[0] = replace(found[0], strays=(*found[0].strays, sentence))
    places = {place.place for part in found for place in (part.folder, *part.accounts_for)}
    return [replace(part, told=tuple(sorted(places))) for part in found]


def components(folder: Folder) -> list[Found]:
    """The checkpoints that lie in a folder itself, each in a view that hides the others; [] where none does.

    A folder holds several where safetensors of one model lie beside those of another, or beside a DCP checkpoint.
    """
    found = groups(folder)
    if not found:
        return [Found.at(folder)] if recognise(folder) else []
    weights = [name for group in found for name in (*group.files, group.index)]
    rest = folder.without(weights, "")
    other = recognise(rest)
    # of a model that lies there in both forms loaders take the safetensors
    parts = [rest] if other is not None and other.kind not in ("unsupported", "torch") else []
    if not parts and len(found) == 1:
        return [Found.at(folder)]
    described = [name for name in (folder.files() if parts else ()) if _is_dcp(name)]
    for group in found:
        hidden = {*weights, *described} - {*group.files, group.index}
        parts.append(folder.without(hidden, group.label))
    return [Found.at(parts[0]), *map(Found, parts[1:])]


def _is_dcp(name: str) -> bool:
    known = (METADATA, f"{METADATA}.tmp", "common.pt", "metadata.json")
    return name in known or name.endswith(".distcp") or bool(RANK_METADATA.fullmatch(name))


@dataclass(slots=True)
class _Walk:
    """One walk over what lies below a path.

    Attributes:
        left: folders that may still be listed.
        passed: folders that were not looked into, since there are too many.
    """

    left: int = _MOST_FOLDERS
    passed: int = 0

    def units(self, folder: Folder, steps: Steps, levels: int, in_step: bool = False) -> list[Found]:
        """The checkpoints in a folder and below it.

        Args:
            levels: how many floors below the folder are looked at.
            in_step: whether it lies in a step: one name with a number is a place there, several are steps again.
        """
        if self.left <= 0:
            self.passed += 1
            return []
        self.left -= 1
        own = components(folder)
        if not levels or (own and _is_kind(own[0].folder, "unsupported")):
            return own
        numbered = _numbered(folder)
        if own:  # a model is what its folder means; the steps of the run that made it lie beside it
            return own + self._beside(folder, list(numbered), "all" if steps == "all" else "none", levels)
        are_steps = len({*numbered, *(name for name in folder.folders() if name == "release")}) > in_step
        if are_steps and steps != "none" and (found := self._steps(folder, numbered, steps, levels, in_step)):
            return found
        left_out = {name for name in numbered if are_steps and not (steps == "none" and _is_part(folder, name))}
        inner = [name for name in _inner(folder) if name not in left_out and not (in_step and holds_no_state(name))]
        return _accounted(self._below(folder, inner, steps, levels, in_step), folder)

    def _beside(self, folder: Folder, numbered: list[str], steps: Steps, levels: int) -> list[Found]:
        """The checkpoints below one: parts of its step, other models, steps of its run where they are asked for."""
        told = unsupported(folder)
        but = {*numbered, *([told.file] if told else [])}
        is_step = step_number(folder.name) is not None
        inner = [name for name in _inner(folder) if name not in but and not (is_step and holds_no_state(name))]
        # DeepSpeed writes its part of a step into a folder that is named like a step
        inner += [name for name in numbered if name in folder.folders() and (steps == "all" or _is_part(folder, name))]
        is_dcp = not groups(folder)  # the metadata may name payload in sub-folders: these are no saves of their own
        found = self._below(folder, inner, steps, levels, in_step=True)
        return [
            unit for unit in found if not _is_kind(unit.folder, "incomplete") or not (is_dcp or _is_bare(unit.folder))
        ]

    def _steps(self, folder: Folder, numbers: dict[str, int], steps: Steps, levels: int, in_step: bool) -> list[Found]:
        found: list[Found] = []
        unfinished: list[Folder] = []
        strays: list[str] = []
        for name in dict.fromkeys([*numbers, *(name for name in folder.folders() if name == "release")]):
            step = folder.only(name) if folder.has(name) else sub_folder(folder, name)
            if step is None:
                strays.append(astray(folder, name))
                if steps == "newest":  # it is what the folder means, and an older one is no answer
                    break
                continue
            inside = self._at(folder, name, step, steps, levels)
            if inside and f"{name}{_UNIVERSAL}" in folder.folders():
                inside += self._below(folder, [name + _UNIVERSAL], steps, 1, in_step=True)
            path = f"{folder.display.rstrip('/')}/{printable(name)}"
            found += [unit if unit.step else replace(unit, step=(path, numbers.get(name, 0))) for unit in inside]
            unfinished += [] if inside else [step]
            if found and steps == "newest":
                break
        if found or any(not step.entries for step in unfinished):
            # a newer step without a checkpoint in it is no reason to pass an older one
            others = [Found.at(step) for step in unfinished]
            found = found + others if steps == "all" else others[:1] or found
            found = _accounted(found, folder) if in_step or step_number(folder.name) is not None else found
            for name in folder.folders():
                if is_part(name) and name not in numbers and not folder.outside(name):
                    found = _accounted(found, folder.sub(name))  # state that a run has once, of its newest step
            if steps == "newest" and (guessed := [name for name in numbers if step_number(name) is None][1:]):
                named = some(map(printable, guessed))
                strays.append(f"whether {named} pass: by their numbers they are older steps (--all-steps checks them)")
            return [replace(found[0], strays=(*found[0].strays, *strays), of_run=not in_step), *found[1:]]
        if strays:
            raise AccessError("; ".join(strays))
        return []

    def _below(self, folder: Folder, names: Iterable[str], steps: Steps, levels: int, in_step: bool) -> list[Found]:
        inner = ((name, sub) for name in names if (sub := sub_folder(folder, name)) is not None)
        return [unit for name, sub in inner for unit in self._at(folder, name, sub, steps, levels, in_step)]

    def _at(
        self, folder: Folder, name: str, sub: Folder, steps: Steps, levels: int, in_step: bool = True
    ) -> list[Found]:
        """The checkpoints in a sub-folder; in none of its own where it is a link to a folder of another name."""
        target = folder.outside(name)
        other = PurePath(target).name
        found = self.units(
            sub, steps, 0 if target and other != name and step_number(other) is None else levels - 1, in_step
        )
        if not target:
            return found
        return [
            replace(unit, linked_to=printable(target)) if unit.folder.place == sub.place else unit for unit in found
        ]

    def payload(self, folder: Folder, levels: int = _DEPTH) -> str:
        """A place below a folder where files hold state by their first bytes, with one of them; "" without one."""
        self.left -= 1
        names = sorted(folder.files_beside(), key=folder.size, reverse=True)[:_MOST_HEADS]
        held = [
            name for name in names if folder.look_at(name)[0] in READABLE and _holds_state(folder.head(name, _HEAD))
        ]
        if held:
            return f"{folder.display.rstrip('/')}/{printable(held[0])}"
        inner = (sub for name in _inner(folder) if levels and (sub := sub_folder(folder, name)) is not None)
        return next((found for sub in inner if self.left > 0 and (found := self.payload(sub, levels - 1))), "")


def _inner(folder: Folder) -> list[str]:
    """The folders to look into; those that hold logs by their names last."""
    names = [name for name in folder.folders() if not (name.startswith(".") or is_rank_folder(name))]
    return sorted(names, key=holds_no_state)


def _accounted(found: list[Found], folder: Folder) -> list[Found]:
    """The same checkpoints; the files of the folder around them are told with the first."""
    return [replace(unit, accounts_for=(*unit.accounts_for, folder)) for unit in found[:1]] + found[1:]


def _is_part(folder: Folder, name: str) -> bool:
    """Whether a folder that is named like a step is DeepSpeed's part of the one that it lies in."""
    sub = sub_folder(folder, name)
    return sub is not None and _is_kind(sub, "unsupported", "deepspeed", "deepspeed-universal")


def _is_bare(folder: Folder) -> bool:
    """Whether nothing but side state lies there: Megatron's `common.pt` beside an export, as ms-swift writes it."""
    found = recognise(folder)
    return found is not None and found.evidence.file in ("common.pt", "metadata.json") and len(folder.files()) <= 2


def _is_kind(folder: Folder, *kinds: str) -> bool:
    found = recognise(folder)
    return found is not None and found.kind in kinds


_HEAD = 512
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that torch < 1.6 starts its files with


def _holds_state(head: bytes) -> bool:
    """Whether these are the first bytes of a file of torch.save."""
    return head.startswith(_LEGACY) or (head.startswith(b"PK\3\4") and b"/data.pkl" in head)


def sub_folder(folder: Folder, name: str) -> Folder | None:
    """A sub-folder; None for a link out of the folder that leads to no checkpoint, such as `iter_0000099 -> /`.

    Steps and components that lie on another disk are links to a folder that is called so there too, or that has
    metadata itself. For metadata only its names are looked for: what else lies outside is never listed.
    """
    target = folder.outside(name)
    if not target:
        return folder.sub(name)
    is_step = PurePath(target).name == name or (
        step_number(name) is not None and step_number(PurePath(target).name) is not None
    )
    if is_step or any(folder.look_at(f"{name}/{mark}")[0] in READABLE for row in layouts() for mark in row.marks):
        return folder.sub(name)
    return None


def astray(folder: Folder, name: str) -> str:
    """What is said of a link that `sub_folder` does not follow."""
    link = f"{folder.display.rstrip('/')}/{printable(name)}"
    return f"{link} is a link to {printable(folder.outside(name))}, outside the run; ckptlint did not follow it"


_WEIGHTS = (".safetensors", ".safetensors.index.json")


def _lone_state(folder: Folder) -> str | None:
    from ckptlint.loaders.rank_files.plain import lone_state

    return lone_state(folder)


def _are_states(folder: Folder, names: Sequence[str], grow: bool) -> bool:
    from ckptlint.loaders.rank_files.plain import are_states

    return are_states(folder, names, grow)


@one_budget()
def find(path: str, all_steps: bool = False) -> list[Found]:
    """The checkpoints that a path means.

    A file of a checkpoint stands for its folder, safetensors for their own model there, any other file for itself.

    Raises:
        NothingToCheckError: there is none.
        UnknownLayoutError: there is payload, and no layout that is known.
        AccessError: a folder could not be listed, or a step is a link out of the run.
        ConfigError: a URL that cannot be read here.
    """
    folder, name = folder_at(path)
    if is_rank_folder(folder.name) and folder.parent is not None and legacy_file(folder.parent):
        return [Found.at(folder.parent)]
    if name.endswith(_WEIGHTS) and (own := [part for part in components(folder) if part.folder.has(name)]):
        return own
    if not name:
        return find_checkpoints(folder, all_steps)
    if name.endswith(_WEIGHTS) or _is_dcp(name):
        try:
            return find_checkpoints(folder, all_steps)
        except NothingToCheckError:
            if folder.unseen:
                raise
            raise NothingToCheckError(
                f"{printable(name)} in {folder.display} belongs to no checkpoint: neither .metadata nor payload nor "
                "*.safetensors lie beside it; name the folder that holds them, or the run folder above it"
            ) from None
    return [Found.at(folder.only(name))]
