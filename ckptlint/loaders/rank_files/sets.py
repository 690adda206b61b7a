"""Which files of torch.save belong together, told from their names alone.

A kind of set is one row of `KINDS` here, one module beside this one that reads it, and one row of
`loaders.checkpoint.LAYOUTS`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ckptlint.model.facts import fact
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.litter import is_litter

SetKind = Literal["torch", "verl", "flat", "deepspeed", "deepspeed-universal", "megatron-legacy"]


@dataclass(slots=True)
class FileSet:
    """Files that are one checkpoint together.

    Attributes:
        kind: which loader reads them.
        files: names, in order.
        index: name of the index, "" without one.
    """

    kind: SetKind
    files: list[str] = field(default_factory=list)
    index: str = ""


_WEIGHTS = re.compile(
    r"(?P<stem>(?:diffusion_)?pytorch_model(?:_fsdp)?(?:_\d{1,3})?|adapter_model)"
    r"(?P<part>-(?P<k>\d{1,9})-of-(?P<n>\d{1,9}))?"
    r"(?P<variant>\.[^-.]+)?\.bin"
)
_INDEX = re.compile(r"(?P<stem>.+)\.bin\.index(?P<variant>\.[^.]+)?\.json")


_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
PICKLE_SHARE = 4 * 1024**2
"""Bytes of pickle and directory that are expected of a file, at most."""


def input_bytes(folder: Folder) -> int:
    """Bytes of pickles and directories that are read of the sets in a folder, at most."""
    return sum(min(folder.entries[name].size, PICKLE_SHARE) for own in file_sets(folder) for name in own.files)


def verl_name(name: str) -> tuple[str, int, int]:
    """(kind, world size, rank) of a file of verl's; ("", 0, -1) for other names."""
    match = _VERL.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else ("", 0, -1)


_FLAT = re.compile(r"((?:.*\D)?)(\d{1,6})\.pth?")


def flat_name(name: str) -> tuple[str, int]:
    """(what stands before the rank, rank) of a file that may be of one rank of FSDP's; ("", -1) for other names.

    >>> flat_name("model_0012499.rank_3.pth")
    ('model_0012499.rank_', 3)
    """
    match = _FLAT.fullmatch(name)
    return (match[1], int(match[2])) if match and not verl_name(name)[0] else ("", -1)


def has_all_ranks(names: list[str]) -> bool:
    """Whether verl's files of one world size have one of every rank, of each kind that is there."""
    kinds = Counter(kind for kind, _, _ in map(verl_name, names))
    return set(kinds.values()) == {verl_name(names[0])[1]}


@fact
def file_sets(folder: Folder) -> list[FileSet]:
    """The sets of torch files in a folder, that which a loader takes first in front."""
    names = [name for name in folder.files_beside() if not is_litter(name)]
    return [found for find in KINDS for found in find(names)]


def _weights(names: list[str]) -> list[FileSet]:
    """`pytorch_model.bin`, or its parts with their index.

    Source:
        transformers (WEIGHTS_NAME, WEIGHTS_INDEX_NAME), diffusers, peft, accelerate
    """
    found: dict[str, FileSet] = {}
    matches = [(name, match) for name in names if (match := _WEIGHTS.fullmatch(name))]
    for name, match in matches:
        key = match["stem"] + (match["variant"] or "") + ("-" if match["part"] else "")
        found.setdefault(key, FileSet("torch")).files.append(name)
    for name in names:
        if match := _INDEX.fullmatch(name):
            key = match["stem"] + (match["variant"] or "")
            own = found.get(f"{key}-") or found.setdefault(key, FileSet("torch"))
            own.index = name
    return sorted(found.values(), key=lambda own: not own.files[:1] or not own.files[0].startswith("pytorch_model"))


def _verl(names: list[str]) -> list[FileSet]:
    """The files of each world size, by rank."""
    found: dict[int, list[tuple[str, int, str]]] = {}
    for name in names:
        kind, world, rank = verl_name(name)
        if 0 <= rank < world:
            found.setdefault(world, []).append((kind, rank, name))
    order = ("model", "optim", "extra_state")
    return [
        FileSet("verl", [name for *_, name in sorted(own, key=lambda item: (order.index(item[0]), item[1]))])
        for own in found.values()
    ]


_DEEPSPEED = re.compile(
    r"([a-z0-9]+_)?zero_pp_rank_\d+_mp_rank_\d+_?(model|optim)_states\.pt|mp_rank_\d+_model_states\.pt"
    r"|layer_\d+(-model_\d+)?-model_states\.pt|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt"
    r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)


def _deepspeed(names: list[str]) -> list[FileSet]:
    """What DeepSpeed's engine writes into the folder of a tag.

    Source:
        deepspeed.runtime.engine (0.14 - 0.19)
    """
    found = [name for name in names if _DEEPSPEED.fullmatch(name)]
    return [FileSet("deepspeed", found)] if found else []


def _flat(names: list[str]) -> list[FileSet]:
    """The files of each save, by rank; the newest save first.

    Source:
        dinov2.fsdp.FSDPCheckpointer (2023-04), fvcore.common.checkpoint.PeriodicCheckpointer: `model_final` is the last
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        save, rank = flat_name(name)
        if save:
            found.setdefault(save, []).append((rank, name))
    newest = sorted(found, key=lambda save: ("final" in save, len(save), save), reverse=True)
    return [FileSet("flat", [name for _, name in sorted(found[save])]) for save in newest]


KINDS: tuple[Callable[[list[str]], list[FileSet]], ...] = (_verl, _deepspeed, _weights, _flat)
