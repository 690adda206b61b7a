"""What frameworks call their steps, parts, trackers, marks and side files: one TOML file each, read strictly and once.

What the names mean is data here; what is there is known by content. Without an entry the generic reading stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.litter import is_system_file
from ckptlint.vocabulary.strict_toml import made_of, own_file, toml_table

Content = Literal["pickle", "perhaps pickle", "json", "other"]
"""How a file is read: as a pickle, alone or in an archive of torch.save, or if it is one; as JSON; not at all."""
Holds = Literal["number", "folder", "train state", "link"]
"""What a tracker holds: the number of a step, its folder's name, a pickled state with a `step`; or it is a link."""
Where = Literal["inside", "beside", "name"]
"""Where a mark is: in the step, beside it under `{step}` and what follows, or as the end of the step's own name."""
Counted = Literal["", "rank", "dp rank", "object"]

LAST = "common"
"""The file whose patterns are asked after those of all others."""


class Steps(NamedTuple):
    """How steps are called.

    Attributes:
        pattern: matches their whole names; its first group is the number.
        digits: to how many the number is padded, 0 for as many as it has.
        tracked: whether a run of them always has a tracker.
        tracker: the file without which the trainer starts over, "" where it looks for the newest step by itself.
        holding: folders of which a step has one where that trainer wrote it; none where the name alone says so.
        beside: folders beside the steps, in which a folder of a step's own name holds more files of it.
        source: library and version.
    """

    pattern: re.Pattern[str]
    source: str
    digits: int = 0
    tracked: bool = False
    tracker: str = ""
    holding: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


class Tracker(NamedTuple):
    """A file beside the steps that names one of them."""

    file: str
    holds: Holds
    source: str


class Family(NamedTuple):
    """Files that trainers write for one purpose.

    Attributes:
        name: what they hold, as reports call it.
        content: how they are read.
        pattern: matches their whole names; its group `number`, where it has one, counts them.
        counted_by: what the number counts, where a finished save has all of them from 0 on.
        part: the part of a step that they hold, of `vocabulary.parts.PARTS`.
        step: the entry of the state in them that counts steps.
        idle: whether no load asks for them: logs, code, texts.
    """

    name: str
    content: Content
    pattern: re.Pattern[str]
    source: str = ""
    counted_by: Counted = ""
    part: str = ""
    step: str = ""
    idle: bool = False


class Mark(NamedTuple):
    """What is there from the beginning of a save to its end, and says that it never finished.

    Attributes:
        file: its name, `{step}` in it for that of the step's folder.
        above: folders inside a step for which the mark of the step counts.
        only: matches the names of the steps that have it.
    """

    file: str
    where: Where
    source: str
    above: tuple[str, ...] = ()
    only: re.Pattern[str] = lazy_pattern(".*")


class WrittenLast(NamedTuple):
    """A file that is written last, and may be JSON that names every part of the folder that it is in.

    Attributes:
        entries: the key of an object part -> what is said of it.
        path: the key under which that says where the part is, relative to the folder.
        beside: files and folders of which any shows that the file belongs there.
        parts: files and folders that a save with this file always has, since a resume reads each.
        by_run: whether some versions write none, so that only one in the step before shows that this one lacks it.
        ranks: the keys under which, one in the other, it says how many ranks wrote.
        only: matches the names of the folders that it is in.
    """

    file: str
    beside: tuple[str, ...]
    source: str
    by_run: bool = False
    entries: str = ""
    path: str = ""
    parts: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    only: re.Pattern[str] = lazy_pattern(".*")


class Counter(NamedTuple):
    """A number in a step that is the folder's own: the library takes both from one counter."""

    framework: str
    prefix: str
    entry: re.Pattern[str]
    source: str


class Unread(NamedTuple):
    """A format that ckptlint knows by its files and does not read.

    Attributes:
        files, folders: match whole names of files and folders that show it; without either it is known by content.
        alone: whether a file is a model by itself, or shows it beside one of `folders`, where nothing else is known.
        hint: what to do with it.
    """

    name: str
    source: str
    files: re.Pattern[str] | None = None
    folders: re.Pattern[str] | None = None
    alone: bool = False
    hint: str = "name the folder of a DCP or torch_dist checkpoint, or convert this one"


class World(NamedTuple):
    """All files together, in the order of their names, `common.toml` last.

    Attributes:
        newest: match names of files that hold the newest step, and do not say which it is.
        parts: match folders that hold one part of a step.
        roles: match folders around the parts of a step, one for each model of a job.
        models: folders in a step where the configuration of its model may lie.
        no_state: match folders that hold logs, code or pictures, not a part of the step.
        keys: part -> matches keys that belong to it.
        counters: match entries that count steps.
        storage_writers: modules with their own copy of torch's `_StorageInfo`, which their `.metadata` names.
    """

    steps: tuple[Steps, ...] = ()
    newest: tuple[re.Pattern[str], ...] = ()
    parts: tuple[re.Pattern[str], ...] = ()
    roles: tuple[re.Pattern[str], ...] = ()
    models: tuple[str, ...] = ()
    trackers: tuple[Tracker, ...] = ()
    files: tuple[Family, ...] = ()
    unfinished: tuple[Mark, ...] = ()
    written_last: tuple[WrittenLast, ...] = ()
    no_state: tuple[re.Pattern[str], ...] = ()
    keys: Mapping[str, re.Pattern[str]] = MappingProxyType({})
    counters: tuple[re.Pattern[str], ...] = ()
    storage_writers: tuple[str, ...] = ()
    one_counter: tuple[Counter, ...] = ()
    unread: tuple[Unread, ...] = ()


@cache
def world() -> World:
    """What all files say; raises OwnFileError, with file and entry, where one is not as this module has it."""
    paths = sorted(Path(__file__).parent.glob("*.toml"), key=lambda path: (path.stem == LAST, path.name))
    return merged([own_file(path, partial(read_framework, path.name)) for path in paths])


def merged(worlds: list[World]) -> World:
    """Several files as one."""
    values: dict[str, Any] = dict.fromkeys(World._fields, ()) | {"keys": {}}
    for single in worlds:
        for name, known in values.items():
            value = getattr(single, name)
            values[name] = known | value if isinstance(known, dict) else known + value
    return World(**values)


def read_framework(name: str, text: str) -> World:
    """One file.

    Raises:
        ValueError: an entry that nobody knows, one that is missing, or a value of another form; with file and place.
    """
    table = toml_table(name, text)
    if not isinstance(table.pop("source", None), str):
        raise ValueError(f"{name}: source is missing: library, version and file that these names are from")
    read = made_of(World, name, table)
    for steps in read.steps:
        # in runs of other frameworks short numbers are ranks and parts: contents decide (run.steps._unlisted)
        if number := next((number for number in ("0", "7", "100") if steps.pattern.fullmatch(number)), ""):
            raise ValueError(f"{name}: the step pattern {steps.pattern.pattern!r} matches the bare number {number}")
    return read


# ---------------------------------------------------------------- what readers ask


@lru_cache(2**16)
def _step(name: str) -> tuple[Steps, re.Match[str]] | None:
    return next(((steps, match) for steps in world().steps if (match := steps.pattern.fullmatch(name))), None)


def step_number(name: str) -> int | None:
    """The step that a name carries, or None.

    >>> step_number("iter_0000010"), step_number("step-500"), step_number("model")
    (10, 500, None)
    """
    return int(matched[1][1]) if (matched := _step(name)) else None


def steps_like(name: str) -> tuple[str, Steps] | None:
    """What stands before the number in a name that is a word and a number, and the entry; None for other names.

    >>> steps_like("iter_0000010")[0], steps_like("epoch=0-step=4")
    ('iter_', None)
    """
    matched = _step(name)
    if matched is None:
        return None
    before = name[: matched[1].start(1)]
    is_plain = matched[1].end(1) == len(name) and not re.search(r"[\d=]", before)
    return (before, matched[0]) if before and is_plain else None


def beside_step(name: str) -> tuple[str, ...]:
    """The folders beside a step of this name, in which a folder of the same name holds more files of it.

    >>> beside_step("iter_0000010"), beside_step("step-500")
    (('energon',), ())
    """
    return matched[0].beside if (matched := _step(name)) else ()


def is_newest(name: str) -> bool:
    """Whether a file of this name holds the newest step of a run and does not say which it is."""
    return _matches(world().newest, name)


def is_part(folder: str) -> bool:
    """Whether a folder of this name holds a part of the step that it is in."""
    return _matches(world().parts, folder) or _matches(world().roles, folder)


def holds_no_state(folder: str) -> bool:
    """Whether a folder of this name holds logs, code or pictures, not a part of the step."""
    return _matches(world().no_state, folder)


def is_counter(entry: str) -> bool:
    """Whether an entry of this name counts steps.

    >>> is_counter("train_state.step"), is_counter("lr_scheduler.last_epoch"), is_counter("optimizer.state.w.step")
    (True, True, False)
    """
    return _matches(world().counters, entry)


def counts_moments(entry: str) -> bool:
    """Whether an entry of this name counts the steps that an optimizer made with one parameter.

    >>> counts_moments("optimizer.state.w.step"), counts_moments("train_state.step")
    (True, False)

    Source: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict; torch.optim.Adam
    """
    return entry.endswith(".step") and ".state." in f".{entry}"


def _matches(patterns: tuple[re.Pattern[str], ...], name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)


LITTER = Family("left by other tools", "other", lazy_pattern(""), idle=True)
OTHER_STEP = Family("another step", "other", lazy_pattern(""), idle=True)
"""Families that no pattern matches: `is_system_file` does, and the number in the name of a folder."""
_LAST = Family("mark", "other", lazy_pattern(""))  # what a framework writes last, and describes no further

_ENDING = r"\.(pt|pth|pkl|pickle|bin|ckpt|p|pck|joblib|sav|dill|jit|pth?\.tar)(\.(z|gz|bz2|xz|lzma|lz4|zst))?"
_PICKLES = lazy_pattern(f".+{_ENDING}", re.IGNORECASE | re.DOTALL)

WEIGHT_FILES = (
    r"\.metadata|__\d+\.metadata|[^/]+\.(distcp|safetensors|ckpt|pt|pth)|[^/]+\.(safetensors|bin)\.index\.json"
    r"|((diffusion_)?pytorch_(model|optim)|adapter_model|model|optimizer|scheduler|training_args)[^/]*\.bin|adapter_config\.json"
)
"""Names that hardly anything but a checkpoint's files has; `files` of .pre-commit-hooks.yaml, behind the path.

What else ends in .bin or .pkl may be data of any kind, and every program has a config.json.
"""


def family_of(name: str) -> Family | None:
    """The family that a file's name says, the path to it aside; None for a name that says nothing.

    >>> family_of("rng_state_3.pth").name, family_of("checkpoint.whatever"), family_of("README.pt")
    ('random state', None, None)
    """
    if is_system_file(name):
        return LITTER
    family = next((known for known in world().files if known.pattern.fullmatch(name)), None)
    if family is None and any(known.file == name for known in world().written_last):
        return _LAST
    return None if family is not None and family.content == "other" and may_be_pickle(name) else family


def number_of(name: str) -> tuple[Family, int] | None:
    """The family of a file that is one of a counted set, and its number."""
    family = family_of(name)
    match = family.pattern.fullmatch(name) if family is not None and family.counted_by else None
    return None if family is None or match is None else (family, int(match["number"]))


def may_be_pickle(name: str) -> bool:
    """Whether files are called so that `torch.load` or `pickle.load` reads."""
    return _PICKLES.fullmatch(name) is not None
