"""The layouts of folders that ckptlint knows: one row for each kind, found by scanning the modules of this package.

A row says how a kind is recognised, read, counted, when a save of it is finished, and what a job that loads it must
have alike. A new layout is a module here with its row, a reader, and two fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import NamedTuple

from ckptlint.model import Checkpoint, StepState
from ckptlint.model.facts import fact
from ckptlint.storage.folder import Folder


class Evidence(NamedTuple):
    """A file that shows that a folder holds a layout, printable; the name of a format that is not read."""

    file: str
    name: str = ""


class FixedAxes(NamedTuple):
    """What a job must have as the job had that saved, or nothing is loaded.

    Attributes:
        axes: the axes of the mesh whose sizes must not change.
        sentence: why; `{saved}` and `{asked}` are the sizes, `{changes}` all that change.
        source: the library, its version, and the function that refuses.
        only_with: the kind of rank files without which it does not matter.
    """

    axes: tuple[str, ...]
    sentence: str
    source: str
    only_with: str = ""


class Layout(NamedTuple):
    """A kind of folder.

    Attributes:
        kind: its name.
        order: of several kinds whose marks lie in one folder the one with the lowest is taken.
        formats: the formats that its reader distinguishes -> how reports call them.
        recognise: what shows that a folder itself holds it, its sub-folders aside; None where nothing does.
        read: what was found, and whether to look at payload files -> the checkpoint; it may raise AccessError.
        input_bytes: how much of a folder is read for it, which bounds memory and time of the child that reads.
        state: whether a save into a folder was finished, as its marks say.
        marks: files that show the kind of a folder which must not be listed.
        describes_itself: whether its files describe their own tensors, without `.metadata`.
        looks_around: whether what surrounds it is looked at: its run, marks of its save, other formats beside it.
        train_state: a file in which the trainer keeps the step that it saved.
        restore: format -> what to do about one that cannot be used, where nothing around it can be used instead.
        fixed: what a job that loads it must have alike.
        unsure_axes: the axes of which nobody knows whether they may change.
    """

    kind: str
    order: int
    formats: Mapping[str, str]
    recognise: Callable[[Folder], Evidence | None]
    read: Callable[[CheckpointPlace, bool], Checkpoint]
    input_bytes: Callable[[Folder], int]
    state: Callable[[Folder], StepState] = lambda _folder: "unknown"
    marks: tuple[str, ...] = ()
    describes_itself: bool = False
    looks_around: bool = True
    train_state: str = ""
    restore: Mapping[str, str] = MappingProxyType({})
    fixed: tuple[FixedAxes, ...] = ()
    unsure_axes: tuple[str, ...] = ()


class Recognised(NamedTuple):
    """What a folder holds: the layout, and what shows it."""

    layout: Layout
    evidence: Evidence

    @property
    def kind(self) -> str:
        return self.layout.kind


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """A checkpoint that a path means: its folder, in a view that hides the other checkpoints there.

    Attributes:
        reports_for: the folders whose other files are reported with it: each file of a step is reported once.
        claimed: the places of all folders whose files are reported with a checkpoint of the same walk.
        around_claimed: the places of all folders around these.
        linked_to: where the link leads, out of its run, by which it was found; "" otherwise.
        not_followed: sentences on what next to it was not looked into.
        refused: why nothing of it may be read, one sentence: a step that is a link out of its run; "" otherwise.
        of_run: whether it is the newest step of a run that was asked for as a whole.
        step: path and number of the step that it is or belongs to, where all of that step was looked at.
    """

    folder: Folder
    reports_for: tuple[Folder, ...] = field(default=(), kw_only=True)
    claimed: frozenset[str] = field(default=frozenset(), kw_only=True)
    around_claimed: frozenset[str] = field(default=frozenset(), kw_only=True)
    linked_to: str = field(default="", kw_only=True)
    not_followed: tuple[str, ...] = field(default=(), kw_only=True)
    refused: str = field(default="", kw_only=True)
    of_run: bool = field(default=False, kw_only=True)
    step: tuple[str, int] | None = field(default=None, kw_only=True)

    @classmethod
    def at(cls, folder: Folder) -> CheckpointPlace:
        """The checkpoint in a folder that is one, with all files beside it."""
        return cls(folder, reports_for=(folder,))

    @property
    def display(self) -> str:
        """Its path or URL, safe to print."""
        return self.folder.display

    @property
    def recognised(self) -> Recognised | None:
        """What it holds; None for a step that holds nothing that is known."""
        return recognise(self.folder)


@cache
def layouts() -> tuple[Layout, ...]:
    """Every row, in the order in which they are asked."""
    # the rows import the readers of rank files when they read: at the top these would add 50 ms to every start
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return tuple(sorted((row for module in modules for row in module.LAYOUTS), key=lambda row: row.order))


def layout_of(format_: str) -> Layout | None:
    """The layout whose reader gives this format."""
    return next((row for row in layouts() if format_ in row.formats), None)


@fact
def recognise(folder: Folder) -> Recognised | None:
    """What a folder itself holds, its sub-folders aside; None when nothing here is known."""
    for row in layouts():
        if (evidence := row.recognise(folder)) is not None:
            return Recognised(row, evidence)
    return None
