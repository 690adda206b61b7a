"""Which checkpoints a path means: itself, its components, the steps of a run."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

from ckptlint.errors import AccessError, CkptlintError, NothingToCheckError
from ckptlint.loaders.rank_files.megatron_keys import is_rank_folder, legacy_file
from ckptlint.loaders.recognise import METADATA, RANK_METADATA, LayoutKind, recognise, unsupported
from ckptlint.loaders.safetensors import groups
from ckptlint.model.facts import fact
from ckptlint.model.text import printable
from ckptlint.sandbox import one_budget
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.locate import folder_at
from ckptlint.vocabulary.step_files import holds_no_state

STEP = re.compile(
    r"(?:iter_|iteration_|step[-_]?|global_step_?|checkpoint[-_]|epoch_\d+_step_|ep\d+-ba|(?:.*-)?step=)(\d+)"
    r"(?:-v\d+|-(?:consumed_samples|val_loss|train_loss)=[\d.]+)*(?:-last)?(?:\.ckpt)?|(\d{4,})"
)

COMPONENT = re.compile(
    r"consolidated|dist_ckpt|hf_weights|huggingface|model|model_and_optim|optim|sharded|trainer|weights|"
    r"optimizer(_\d+)?|pytorch_model_fsdp_\d+"
)
"""Folders that hold one part of a step: of torch, accelerate, Automodel, NeMo, OLMo-core, prime-rl, verl, xtuner."""


_UNIVERSAL = "_universal"  # what deepspeed.checkpoint.ds_to_universal makes of a step, beside it

_DESCRIBES = (
    METADATA, "__0.metadata", "common.pt", "model.safetensors", "model.safetensors.index.json",
    "adapter_model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_STEPS_TRIED = 16
_DEPTH_LIMIT, _FOLDERS_LIMIT = 4, 64  # how deep, and how many folders of a step are listed for formats not read


def step_number(name: str) -> int | None:
    """The step that a folder name carries, or None.

    >>> step_number("iter_0000010"), step_number("step-500"), step_number("model")
    (10, 500, None)
    """
    match = STEP.fullmatch(name)
    return int(match[1] or match[2]) if match else None


@dataclass(frozen=True, slots=True)
class Step:
    """A step folder of a run.

    Attributes:
        number: the step that its name carries.
        run: the folder around it.
        name: its own name there, raw.
    """

    number: int
    run: Folder
    name: str

    @property
    def folder(self) -> Folder:
        """The step's folder.

        Raises:
            AccessError: it is a link out of the run that leads to no checkpoint.
        """
        found = sub_folder(self.run, self.name)
        if found is None:
            raise AccessError(astray(self.run, self.name))
        return found


def steps_of(run: Folder) -> list[Step]:
    """The steps that lie directly in a folder, the newest first; of two with one number the one that sorts later.

    Raises:
        AccessError: the folder could not be listed.
    """
    steps = [Step(number, run, name) for name in run.folders() if (number := step_number(name)) is not None]
    return sorted(steps, key=lambda step: (step.number, step.name), reverse=True)


@fact
def _numbered(folder: Folder) -> dict[str, int]:
    """Name -> number of the steps that lie directly in a folder, the newest first."""
    numbers = {name: number for name in folder.folders() if (number := step_number(name)) is not None}
    return dict(sorted(numbers.items(), key=lambda item: item[1], reverse=True))


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


def find_checkpoints(folder: Folder, all_steps: bool) -> list[Folder]:
    """The checkpoint folders that a path means: itself, its newest step, or its components.

    Args:
        folder: what the user named.
        all_steps: every step of a run folder instead of the newest one.

    Raises:
        NothingToCheckError: there is none.
    """
    found = _find(folder, all_steps, levels=3)
    if not found and (name := _lone_state(folder)) is not None:
        return [folder.only(name)]
    if not found and folder.unseen:
        hint = f"name the checkpoint folder itself, {folder.unseen}"
        raise NothingToCheckError(f"no .metadata under {folder.display}: {hint}")
    if not found:
        raise NothingToCheckError(
            f"no checkpoint under {folder.display}: looked for .metadata, __N.metadata, *.distcp, *.safetensors, files "
            "of torch.save, step folders (iter_*, step-*, step_*, global_step_*, checkpoint-*) and component folders"
        )
    places = tuple(sorted({part.place for part in found}))
    return [part.judged_with(places) for part in found]


def components(folder: Folder) -> list[Folder]:
    """The checkpoints that lie in a folder itself, each as a view of it that hides the others; [] where none does.

    A folder holds several where safetensors of one model lie beside those of another, or beside a DCP checkpoint.
    """
    found = groups(folder)
    if not found:
        return [folder] if recognise(folder) else []
    weights = [name for group in found for name in (*group.files, group.index)]
    rest = folder.without(weights, "")
    other = recognise(rest)
    # of a model that lies there in both forms loaders take the safetensors
    parts = [rest] if other is not None and other.kind not in ("unsupported", "torch") else []
    if not parts and len(found) == 1:
        return [folder]
    described = [name for name in (folder.files() if parts else ()) if _is_dcp(name)]
    for group in found:
        hidden = {*weights, *described} - {*group.files, group.index}
        parts.append(folder.without(hidden, group.label))
    return [parts[0], *(part.accounting_for() for part in parts[1:])]


def _is_dcp(name: str) -> bool:
    known = (METADATA, f"{METADATA}.tmp", "common.pt", "metadata.json")
    return name in known or name.endswith(".distcp") or bool(RANK_METADATA.fullmatch(name))


def _find(folder: Folder, all_steps: bool, levels: int) -> list[Folder]:
    own = components(folder)
    if levels == 0 or (own and _is_kind(own[0], "unsupported")):
        return own
    numbered = _numbered(folder)
    if own:  # a model is what its folder means; the steps of the run that made it lie beside it
        told = unsupported(folder)
        beside = _nested(folder, {*numbered, *([told.evidence] if told else [])})
        if not groups(folder):  # the metadata may name payload in sub-folders: these are no saves of their own
            beside = [part for part in beside if not _is_kind(part, "incomplete")]
        for name in numbered:
            sub = sub_folder(folder, name)
            # DeepSpeed writes its part of a step into a folder that is named like a step
            if sub is not None and (all_steps or _is_kind(sub, "unsupported", "deepspeed")):
                beside += _find(sub, all_steps, _levels(sub, levels))
        return own + beside + _unread_below(folder, own + beside)
    steps = [*numbered] + [name for name in folder.folders() if name == "release"]
    found: list[Folder] = []
    unfinished: list[Folder] = []
    strays: list[str] = []
    for name in steps:
        step = sub_folder(folder, name)
        if step is None:
            strays.append(astray(folder, name))
            if not all_steps:  # the newest step is what the folder means, and an older one is no answer
                break
            continue
        inside = _find(step, all_steps, _levels(step, levels))
        if inside and f"{name}{_UNIVERSAL}" in folder.folders() and (twin := sub_folder(folder, name + _UNIVERSAL)):
            inside = inside + _find(twin, all_steps, 0)
        (found if inside else unfinished).extend(inside or [step])
        if found and not all_steps:
            break
    if found or any(not step.entries for step in unfinished):
        # a newer step without a checkpoint in it is no reason to pass an older one
        found = found + unfinished if all_steps else unfinished[:1] or found
        if step_number(folder.name) is not None:  # DeepSpeed's part of a step, without weights beside it
            found[0] = found[0].accounting_for(*found[0].accounts_for, folder)
        return [found[0].beside(strays), *found[1:]]
    if strays:
        raise AccessError("; ".join(strays))
    found = _nested(folder, (), all_steps, levels - 1)
    if not found:
        return []
    found += _unread_below(folder, found) if step_number(folder.name) is not None else []
    return [found[0].accounting_for(*found[0].accounts_for, folder), *found[1:]]


def _levels(sub: Folder, levels: int) -> int:
    """How deep to look into a step: where it is a link to a folder of another name, into none of its sub-folders."""
    return 0 if sub.linked_to and step_number(PurePath(sub.linked_to).name) is None else levels - 1


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
    if is_step or any(folder.look_at(f"{name}/{mark}")[0] in READABLE for mark in _DESCRIBES):
        return folder.sub(name).behind_link(printable(target))
    return None


def astray(folder: Folder, name: str) -> str:
    """What is said of a link that `sub_folder` does not follow."""
    link = f"{folder.display.rstrip('/')}/{printable(name)}"
    return f"{link} is a link to {printable(folder.outside(name))}, outside the run; ckptlint did not follow it"


def _nested(folder: Folder, but: Collection[str], all_steps: bool = False, levels: int = 0) -> list[Folder]:
    """The checkpoints in sub-folders, one level further in folders that are named like a component, and of whole runs.

    Args:
        but: names of sub-folders that are told otherwise.
        levels: how deep to look into the runs among the sub-folders.
    """
    found: list[Folder] = []
    for name in folder.folders():
        if name.startswith(".") or name in but or is_rank_folder(name):
            continue
        sub = sub_folder(folder, name)
        if sub is None:
            continue
        inside = components(sub)
        found += inside
        if not inside or groups(sub):
            deeper = [sub_folder(sub, inner) for inner in sub.folders() if COMPONENT.fullmatch(inner)]
            further = [part for inner in deeper if inner is not None for part in components(inner)]
            found += further
            if levels and not (inside or further) and any(step_number(inner) is not None for inner in sub.folders()):
                found += _find(sub, all_steps, levels)
    return found


def _unread_below(step: Folder, found: list[Folder]) -> list[Folder]:
    """The folders of formats that are not read, wherever they lie in a step, without those that were found before."""
    known = {part.display for part in found} | {step.display}
    strange: list[Folder] = []
    places = deque([(step, 0)])
    for _ in range(_FOLDERS_LIMIT):
        if not places:
            break
        place, depth = places.popleft()
        if depth and place.display not in known and _is_kind(place, "unsupported", "deepspeed", "deepspeed-universal"):
            strange.append(place)
        elif depth < _DEPTH_LIMIT and (depth == 0 or place.display not in known):
            inner = [name for name in place.folders() if not holds_no_state(name) and not place.outside(name)]
            # steps beside a model are others of its run
            places += [(place.sub(name), depth + 1) for name in inner if depth or step_number(name) is None]
    return strange


def _is_kind(folder: Folder, *kinds: LayoutKind) -> bool:
    found = recognise(folder)
    return found is not None and found.kind in kinds


def newest_readable_step(folder: Folder) -> str | None:
    """Name of the newest other step of the same run that has metadata, or None; the newest few are looked at."""
    number, parent = step_number(folder.name), folder.parent
    if number is None or parent is None:
        return None
    try:
        others = (name for name, other in _numbered(parent).items() if other != number)
        for name in islice(others, _STEPS_TRIED):
            step = sub_folder(parent, name)
            if step is not None and step.has(METADATA) and step.head(METADATA, 1) == b"\x80":
                return name
    except CkptlintError:
        return None
    return None


_WEIGHTS = (".safetensors", ".safetensors.index.json")


def _lone_state(folder: Folder) -> str | None:
    from ckptlint.loaders.rank_files.plain import lone_state

    return lone_state(folder)


@one_budget()
def find(path: str, all_steps: bool = False) -> list[Folder]:
    """The checkpoint folders that a path means.

    A file of a checkpoint stands for its folder, safetensors for their own model there, any other file for itself.

    Raises:
        NothingToCheckError: there is none.
        AccessError: a folder could not be listed, or a step is a link out of the run.
        ConfigError: a URL that cannot be read here.
    """
    folder, name = folder_at(path)
    if is_rank_folder(folder.name) and folder.parent is not None and legacy_file(folder.parent):
        return [folder.parent]
    if name.endswith(_WEIGHTS) and (own := [part for part in components(folder) if part.has(name)]):
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
    return [folder.only(name)]
