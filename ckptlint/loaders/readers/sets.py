"""Which files of torch.save belong together, known from their names alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptlint.grouping import grouped
from ckptlint.model import RankFile
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.litter import is_system_file

PICKLE_SHARE = 4 * 1024**2  # bytes of pickle and directory that are expected of a file, at most


@dataclass(slots=True)
class FileSet:
    """Files that are one checkpoint together, by their names in order, and the name of their index, "" without one."""

    files: list[str] = field(default_factory=list)
    index: str = ""


Sets = Callable[[Folder], list[FileSet]]  # the sets of one kind in a folder, that which a loader takes first in front


def input_bytes(sets: Sets) -> Callable[[Folder], int]:
    """Bytes of pickles and directories that are read of the sets in a folder, at most."""
    return lambda folder: sum(
        min(folder.entries[name].size, PICKLE_SHARE) for file_set in sets(folder) for name in file_set.files
    )


def _names(folder: Folder) -> list[str]:
    return [name for name in folder.files_beside() if not is_system_file(name)]


_WEIGHTS = lazy_pattern(
    r"(?P<stem>(?:diffusion_)?pytorch_model(?:_fsdp)?(?:_\d{1,3})?|adapter_model)"
    r"(?P<part>-(?P<k>\d{1,9})-of-(?P<n>\d{1,9}))?"
    r"(?P<variant>\.[^-.]+)?\.bin"
)
_INDEX = lazy_pattern(r"(?P<stem>.+)\.bin\.index(?P<variant>\.[^.]+)?\.json")


def weight_sets(folder: Folder) -> list[FileSet]:
    """`pytorch_model.bin`, or its parts with their index.

    Source: transformers (WEIGHTS_NAME, WEIGHTS_INDEX_NAME), diffusers, peft, accelerate
    """
    names, sets = _names(folder), dict[str, FileSet]()
    matches = [(name, match) for name in names if (match := _WEIGHTS.fullmatch(name))]
    for name, match in matches:
        key = match["stem"] + (match["variant"] or "") + ("-" if match["part"] else "")
        sets.setdefault(key, FileSet()).files.append(name)
    for name in names:
        if match := _INDEX.fullmatch(name):
            key = match["stem"] + (match["variant"] or "")
            file_set = sets.get(f"{key}-") or sets.setdefault(key, FileSet())
            file_set.index = name
    return sorted(
        sets.values(), key=lambda file_set: not file_set.files[:1] or not file_set.files[0].startswith("pytorch_model")
    )


_VERL = lazy_pattern(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")


def verl_name(name: str) -> tuple[str, int, int]:
    """(kind, world size, rank) of a file of verl's; ("", 0, -1) for other names."""
    match = _VERL.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else ("", 0, -1)


def has_all_ranks(names: list[str]) -> bool:
    """Whether verl's files of one world size have one of every rank, of each kind that is there."""
    kinds = Counter(kind for kind, _, _ in map(verl_name, names))
    return set(kinds.values()) == {verl_name(names[0])[1]}


def verl_sets(folder: Folder) -> list[FileSet]:
    """The files of each world size, by rank."""
    order = ("model", "optim", "extra_state")
    named = [(*verl_name(name), name) for name in _names(folder)]
    by_world = grouped(
        (world, (order.index(kind), rank, name)) for kind, world, rank, name in named if 0 <= rank < world
    )
    return [FileSet([name for *_, name in sorted(of_world)]) for of_world in by_world.values()]


_FLAT = lazy_pattern(r"((?:.*\D)?)(\d{1,6})\.pth?")


def flat_name(name: str) -> tuple[str, int]:
    """(what stands before the rank, rank) of a file that may be of one rank of FSDP's; ("", -1) for other names.

    >>> flat_name("model_0012499.rank_3.pth")
    ('model_0012499.rank_', 3)
    """
    match = _FLAT.fullmatch(name)
    return (match[1], int(match[2])) if match and not verl_name(name)[0] else ("", -1)


def flat_sets(folder: Folder) -> list[FileSet]:
    """The files of each save, by rank; the newest save first.

    Source: dinov2.fsdp.FSDPCheckpointer (2023-04), fvcore.common.checkpoint.PeriodicCheckpointer: `model_final` is the
    last
    """
    named = [(*flat_name(name), name) for name in _names(folder)]
    by_save = grouped((save, (rank, name)) for save, rank, name in named if save)
    newest = sorted(by_save, key=lambda save: ("final" in save, len(save), save), reverse=True)
    return [FileSet([name for _, name in sorted(by_save[save])]) for save in newest]


_NAMES = (
    ("optimizer", lazy_pattern(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")),
    ("model", lazy_pattern(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("model", lazy_pattern(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("layer", lazy_pattern(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt")),
    ("expert", lazy_pattern(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("expert optimizer", lazy_pattern(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")),
)  # fmt: skip
"""Kinds of files and what their names count; `zero_pp_rank` counts data parallel ranks.

Source: deepspeed.runtime.engine (0.14 - 0.19): `_get_zero_ckpt_name`, `_get_ckpt_name`, `_get_expert_ckpt_name`,
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


def deepspeed_sets(folder: Folder) -> list[FileSet]:
    """What DeepSpeed's engine writes into the folder of a tag."""
    files = [name for name in _names(folder) if file_of(name) is not None]
    return [FileSet(files)] if files else []
