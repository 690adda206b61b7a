"""The steps that lie in a folder, the checkpoints in a folder itself, and which links out of a run are followed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from math import isclose
from operator import itemgetter
from pathlib import PurePath
from typing import NamedTuple

from ckptlint.errors import AccessError, NothingToCheckError
from ckptlint.grouping import grouped
from ckptlint.loaders.layouts import CheckpointPlace, layouts, recognise
from ckptlint.loaders.rank_files.megatron_keys import is_rank_folder
from ckptlint.loaders.readers.plain import are_states, states_apart
from ckptlint.loaders.readers.safetensors import groups
from ckptlint.loaders.run.siblings import series
from ckptlint.model.facts import fact
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.locate import folder_at
from ckptlint.storage.paths import shown
from ckptlint.vocabulary.frameworks import family_of, holds_no_state, is_newest, is_part, may_be_pickle, step_number
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA

_NUMBERS = lazy_pattern(r"[\d.]+")
_SIBLINGS_TRIED = 16
_LIKE = 0.01  # by which the largest files of two steps differ: what is pickled with the tensors varies


def numberless(name: str) -> str:
    """A name without its numbers, which the steps of one series share."""
    return _NUMBERS.sub("", name)


def is_alike(name: str, other: str) -> bool:
    """Whether two folders are named alike but for their numbers."""
    return numberless(name) == numberless(other)


class Step(NamedTuple):
    """A step of a run, a folder or one file with a whole state: its number, the folder around it, its raw name."""

    number: int
    run: Folder
    name: str

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, not one file or a link that leads nowhere."""
        return not (self.run.has(self.name) or self.run.lost_link(self.name))

    @property
    def folder(self) -> Folder:
        """The step's folder; of a file the run's, with that file alone in view.

        Raises AccessError for a link out of the run that leads to no checkpoint.
        """
        if not self.is_folder:
            return self.run.only(self.name)
        if (inner := sub_folder(self.run, self.name)) is None:
            raise AccessError(not_followed(self.run, self.name))
        return inner


def run_at(path: str) -> Folder:
    """The folder that a path means, in which or below which steps are looked for.

    Raises NothingToCheckError for nothing, a file, or a web server, which does not list; and as `folder_at`.
    """
    folder, file = folder_at(path)
    if file:
        raise NothingToCheckError(f"{shown(path)} is a file: name the run folder that holds the steps")
    if folder.not_looked_at:
        how = f"check each by its own URL, as in `ckptlint {shown(path).rstrip('/')}/step-100`"
        raise NothingToCheckError(f"a web server does not list the steps of {shown(path)}: {how}")
    return folder


def steps_of(run: Folder) -> list[Step]:
    """The steps that lie directly in a folder, the newest first; of two with one number the one that sorts later.

    Raises AccessError where the folder cannot be listed.
    """
    return [Step(number, run, name) for name, number in numbered_steps(run).items()]


def older_steps(run: Folder, like: str, number: int) -> Sequence[Step]:
    """The steps of `alike_steps` with a smaller number."""
    alike = alike_steps(run, like)
    return alike[bisect_right(alike, -number, key=lambda step: -step.number) :]


def older_file(run: Folder, like: str) -> str:
    """The newest file that is a step older than this one and named alike; "" for none.

    Its name is that of a step but for the ending: the numbers of others may be seeds or ranks of an adapter.
    """
    numbers = numbered_steps(run) if {step_number(like), step_number(PurePath(like).stem)} != {None} else {}
    older = (name for name, number in numbers.items() if run.has(name) and number < numbers.get(like, 0))
    return next((name for name in older if numberless(name) == numberless(like)), "")


def alike_steps(run: Folder, like: str) -> Sequence[Step]:
    """The folders of `steps_of` that are named like this one, but for those that `sub_folder` does not follow."""
    return _of_form(run, numberless(like))


@fact
def _of_form(run: Folder, form: str) -> tuple[Step, ...]:
    alike = (step for step in steps_of(run) if numberless(step.name) == form)
    return tuple(step for step in alike if step.is_folder and is_followed(run, step.name))


@fact
def numbered_steps(folder: Folder) -> dict[str, int]:
    """Name -> number of the steps that lie directly in a folder, the newest first.

    A file that is called the last one (`last.ckpt`) is at least as new as the others, and what a resume takes. A link
    that leads nowhere is a step too: one that is lost.
    """
    files = [name for name in folder.files_beside() if may_be_pickle(name)]
    names = [*folder.folders(), *files]
    numbers = {name: number for name in names if (number := step_number(name)) is not None} or _unlisted(folder)
    newest = max(numbers.values(), default=0)
    numbers |= dict.fromkeys(filter(is_newest, files), newest)
    links = {name: step_number(name) for name in folder.entries.strange if folder.lost_link(name)}
    numbers |= {name: number for name, number in links.items() if number is not None}
    return dict(sorted(numbers.items(), key=lambda item: newness(item[1], item[0]), reverse=True))


def newness(number: int, name: str) -> tuple[int, bool, str]:
    """What orders the steps of a run, the oldest first; of two with one number the one that sorts later is newer."""
    return number, is_newest(name), name


def _unlisted(folder: Folder) -> dict[str, int]:
    """The same of names of no known framework: folders with a checkpoint each, or files with a whole state each.

    Files of ranks and of parts of one state differ in their keys.
    """
    is_model = bool(groups(folder))  # beside a model only files count: folders with a number may be its modules
    if recognise(folder) is not None and not is_model:
        return {}
    for numbers in series(name for name in folder.folders() if not (is_model or _is_place(folder, name))):
        oldest = sorted(numbers, key=numbers.__getitem__)[:_SIBLINGS_TRIED]
        parts_of_steps = islice((parts for name in oldest if (parts := checkpoints_in(folder.sub(name)))), 2)
        bulks = [_bulk(parts[0].folder) for parts in parts_of_steps]  # the newest may be unfinished
        if len(bulks) == 2 and bulks[0][:2] == bulks[1][:2] and isclose(bulks[0][2], bulks[1][2], rel_tol=_LIKE):
            return numbers
    files = [name for name in folder.files_beside() if may_be_pickle(name) and family_of(name) is None]
    sure = [*series(files)]
    for numbers in [*sure, *(others for others in series(files, from_any=True) if others not in sure)]:
        if are_states(folder, sorted(numbers, key=numbers.__getitem__)[:_SIBLINGS_TRIED], numbers not in sure):
            return numbers
    return {"release": 0} if "release" in folder.folders() and not is_model else {}


def _bulk(folder: Folder) -> tuple[str, int, int]:
    """The largest file: its name without numbers, how many are called so, its bytes; sizes of one model differ"""
    sizes = grouped((numberless(name), folder.size(name)) for name in folder.files())
    name, largest = max(((name, max(of_name)) for name, of_name in sizes.items()), key=itemgetter(1), default=("", 0))
    return name, len(sizes.get(name, ())), largest


def _is_place(folder: Folder, name: str) -> bool:
    """Whether a folder is by its name a place in a step or beside it, or not in this folder at all."""
    is_known = name.startswith(".") or is_rank_folder(name) or is_part(name) or holds_no_state(name)
    return is_known or bool(folder.escapes_to(name))


def runs_below(folder: Folder, levels: int = 3) -> list[tuple[str, Folder]]:
    """The folders that hold steps, each with its place below the folder: itself (""), or all of so many floors that do.

    Links out of the folder are not followed.
    """
    if steps_of(folder):
        return [("", folder)]
    if not levels:
        return []
    inner = [name for name in folder.folders() if not name.startswith(".") and not folder.escapes_to(name)]
    below = [(name, runs_below(folder.sub(name), levels - 1)) for name in inner]
    return [(f"{name}/{place}".rstrip("/"), run) for name, runs in below for place, run in runs]


def components(folder: Folder) -> list[CheckpointPlace]:
    """The checkpoints that lie in a folder itself, each in a view that hides the others; [] where none does.

    A folder holds several where safetensors of one model lie beside those of another, or beside a DCP checkpoint.
    """
    models = groups(folder)
    if not models:
        return [CheckpointPlace.at(folder)] if recognise(folder) else []
    weights = [name for group in models for name in (*group.files, group.index)]
    rest = folder.without(weights, "")
    recognised = recognise(rest)
    # of a model that is there in both forms loaders take the safetensors
    parts = [rest] if recognised is not None and recognised.kind not in ("unsupported", "torch", "lost") else []
    if not parts and len(models) == 1:
        return [CheckpointPlace.at(folder)]
    described = [name for name in (folder.files() if parts else ()) if is_dcp_file(name)]
    for group in models:
        hidden = {*weights, *described} - {*group.files, group.index}
        parts.append(folder.without(hidden, group.label))
    return [CheckpointPlace.at(parts[0]), *map(CheckpointPlace, parts[1:])]


@fact
def checkpoints_in(folder: Folder) -> list[CheckpointPlace]:
    """The same; where nothing is that is known, the files of torch.save that hold a whole state each."""
    if known := components(folder):
        return known
    names = states_apart(folder)
    first = [CheckpointPlace(folder.only(name), reports_for=(folder.without(names, ""),)) for name in names[:1]]
    return first + [CheckpointPlace(folder.only(name)) for name in names[1:]]


def is_dcp_file(name: str) -> bool:
    """Whether a file belongs to a DCP checkpoint by its name."""
    known = (METADATA, f"{METADATA}.tmp", "common.pt", "metadata.json")
    return name in known or name.endswith(".distcp") or bool(RANK_METADATA.fullmatch(name))


def sub_folder(folder: Folder, name: str) -> Folder | None:
    """A sub-folder; None for a link that is not followed."""
    return folder.sub(name) if is_followed(folder, name) else None


def folder_below(folder: Folder, names: Iterable[str]) -> Folder | None:
    """The folder at names that lie in each other; None where one is not there, or is a link that is not followed."""
    for name in names:
        below = sub_folder(folder, name) if name in folder.folders() else None
        if below is None:
            return None
        folder = below
    return folder


def is_followed(folder: Folder, name: str) -> bool:
    """Whether a name is no link out of the folder that leads to no checkpoint, such as `iter_0000099 -> /`.

    Steps and components that lie on another disk are links to a folder that is called so there too, or that has
    metadata itself. For metadata only its names are looked for: nothing else outside is ever listed.
    """
    target = folder.escapes_to(name)
    if target and PurePath(folder.real).is_relative_to(target):  # it leads back to what is around it
        return False
    if not target or PurePath(target).name == name:
        return True
    is_step = step_number(name) is not None and step_number(PurePath(target).name) is not None
    return is_step or any(folder.stat(f"{name}/{mark}")[0] in READABLE for row in layouts() for mark in row.marks)


def not_followed(folder: Folder, name: str) -> str:
    """What is reported of a link that `sub_folder` does not follow."""
    link = f"{folder.display.rstrip('/')}/{printable(name)}"
    return f"{link} is a link to {printable(folder.escapes_to(name))}, outside the run; ckptlint did not follow it"
