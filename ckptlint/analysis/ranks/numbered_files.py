"""Sets of files that differ in one number, their own or their folder's, and how many ranks a checkpoint states."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import reduce
from math import gcd, inf, prod
from typing import Literal, NamedTuple

from ckptlint.analysis.fit.trusted_config import contradictions, main_params, number, trusted
from ckptlint.geometry.writers import ranks_of_files
from ckptlint.model import Checkpoint, StepFile
from ckptlint.model.facts import fact
from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.frameworks import family_of, may_be_pickle, number_of, step_number, world
from ckptlint.vocabulary.mesh import AXES

PAYLOAD = "the payload files"
"""Name of the witness that gives only a lower bound: ranks after the last payload file may exist."""

_NUMBER = lazy_pattern(r"\d+")
_COUNTER = lazy_pattern(r"_\d+(?=\.\w+$)")
_OF_MANY = lazy_pattern(r"\d[-_]of[-_]\d")  # parts of one state, which an index or their count describes
_OTHER_AXES = ("mp", "local", r"e(xpert[-_.]?)?dp", r"dp[-_.]?(cp|shard|replicate)", r"[a-z]+[-_.]?parallel")
_AXES = "|".join([*(axis for axis in AXES if axis != "world"), *_OTHER_AXES])
_JOB = ("args", "run_config")  # what a job writes about itself at each save
_RANK_FOLDER = lazy_pattern(r"(.*rank[-_.]?)(\d{1,9})", re.IGNORECASE)
_IN_FOLDER = -2  # in place of the place of the number in a file's name: the folder has it
_RANK = lazy_pattern(rf"(?:.*?[^a-z])??(?P<axis>{_AXES})?[-_.]?rank[-_.]?", re.IGNORECASE | re.DOTALL)


class NumberedFiles(NamedTuple):
    """A set of files.

    Attributes:
        pattern: path with `{}` in place of the number, which may be that of a folder (`rank_{}/distrib_optim.pt`).
        what: name of their content.
        counts: meaning of the number; "" where unknown.
        axis: mesh axis that the number counts; `world` for all ranks of the job.
        files: number -> file.
    """

    pattern: str
    what: str
    counts: Literal["rank", "object", ""]
    axis: str
    files: dict[int, StepFile]

    def stride(self, total: int) -> tuple[int, int]:
        """(lowest number, distance): over 1 where one rank of each node writes, and for two files divides `total`."""
        numbers = sorted(self.files)
        step = reduce(gcd, (number - numbers[0] for number in numbers[1:]), 0) or 1
        repeats = len(numbers) > 2 or (numbers[0] < step and total % step == 0)
        return (numbers[0] % step, step) if repeats else (0, 1)


@fact
def numbered_files(ckpt: Checkpoint) -> list[NumberedFiles]:
    """The sets that may count ranks or objects: of state that can be pickled, not of logs, and not steps."""
    groups: dict[tuple[str, int], dict[int, StepFile]] = defaultdict(dict)
    sets = []
    for file in ckpt.step_files:
        folder, slash, name = file.name.rpartition("/")
        if (of_rank := _RANK_FOLDER.fullmatch(folder)) and _is_state(name):
            groups[f"{of_rank[1]}{{}}/{name}", _IN_FOLDER][int(of_rank[2])] = file
        if counted := number_of(name):
            number = counted[1]
            at = next(match for match in _NUMBER.finditer(name) if int(match[0]) == number)
            groups[folder + slash + _with_hole(name, at), -1][number] = file
        elif _is_state(name) and not _OF_MANY.search(name):
            for place, match in enumerate(_NUMBER.finditer(name)):
                if len(match[0]) <= 9:
                    groups[folder + slash + _with_hole(name, match), place][int(match[0])] = file
    for (pattern, place), files in groups.items():
        name = next(iter(files.values())).name.rpartition("/")[2]
        if place == _IN_FOLDER:
            rank = _RANK.fullmatch(pattern.partition("{}")[0].rpartition("/")[2])
            if rank and len(files) > 1:
                axis = (rank["axis"] or "world").lower()
                sets.append(NumberedFiles(pattern, f"{name} file", "rank", axis, files))
        elif counted := number_of(name):
            counted_by = counted[0].counted_by
            counts, axis = (counted_by, "world") if counted_by != "dp rank" else ("rank", "dp")
            sets.append(NumberedFiles(pattern, counted[0].name, counts, axis, files))
        elif len(files) > 1:
            before = pattern.rpartition("/")[2].partition("{}")[0]
            rank = _RANK.fullmatch(before)
            family = family_of(name)
            what = family.name if family is not None else f"{before.rstrip('-_.')} file"
            axis = (rank["axis"] or "world").lower() if rank else "world"
            sets.append(NumberedFiles(pattern, what, "rank" if rank else "", axis, files))
    return sets


def is_one_of_several(ckpt: Checkpoint, name: str) -> bool:
    """Whether a file holds one object of several that count by themselves: the first of them has no number.

    Source: accelerate.checkpointing.save_accelerator_state (`optimizer.bin`, `optimizer_1.bin`)
    """
    first = _COUNTER.sub("", name)
    return first != name and any(file.name == first for file in ckpt.step_files)


def _with_hole(name: str, match: re.Match[str]) -> str:
    return f"{name[: match.start()]}{{}}{name[match.end() :]}"


def _is_state(name: str) -> bool:
    """Whether a file may hold a state that a resume reads, and its name is not that of a step."""
    family, stem = family_of(name), name.rpartition(".")[0]
    is_read = may_be_pickle(name) if family is None else family.content == "pickle"
    return is_read and step_number(stem) is None and step_number(name) is None


def stated_ranks(ckpt: Checkpoint, numbered: NumberedFiles) -> dict[str, int]:
    """Witness -> number of ranks that it gives for the axis of a set; for `world` also witnesses that are not exact."""
    stated = exact_ranks(ckpt, numbered.axis)
    most = max(stated.values(), default=inf)
    if numbered.axis != "world":
        return stated
    if payload := _payload_ranks(ckpt):
        stated[PAYLOAD] = payload
    if (mesh := ckpt.topology.get("world")) is not None and mesh.source == "metadata":
        stated["the mesh"] = mesh.size
    for sibling in numbered_files(ckpt):
        ranks = len(sibling.files)
        is_whole = 1 < ranks <= most and sorted(sibling.files) == list(range(ranks))  # of more is another job's
        if sibling is not numbered and sibling.counts == "rank" and sibling.axis == "world" and is_whole:
            stated[sibling.pattern.replace("{}", "*")] = ranks
    return stated


def exact_ranks(ckpt: Checkpoint, axis: str) -> dict[str, int]:
    """Witness -> exact number of ranks in all (`world`) or along `dp`; {} for other axes.

    Payload files and save plans do not count, since not all ranks save. Arguments that the metadata or the payload
    contradicts do not count either.

    Source: megatron.training.arguments.validate_args: its `data_parallel_size` counts ranks that share weights
    (`gtp_weight_remat_size`) once, though each reads data of its own (Megatron-LM#7413);
    megatron.bridge.training.config: `data_parallel_size` is 1 where a job trains several models, and that of one of its
    parts with `use_dist_train`
    """
    stated, mesh = {}, ckpt.topology.get("world")
    if axis == "world" and mesh is not None and any(f.ranks and f.file == mesh.source for f in world().written_last):
        stated[mesh.source] = mesh.size  # in a file that the framework writes to state it
    mesh = None if mesh is None or mesh.source != "metadata" or ckpt.save_plans is not None else mesh
    if axis == "world" and mesh is not None:
        stated["the mesh"] = mesh.size
    job = {name: item for name, item in trusted(ckpt).items() if item.source in _JOB}
    ranks, dp, *model = (number(job, name) for name in ("world", "dp", "tp", "pp", "cp"))
    if any(known.name in AXES for known in contradictions(ckpt)) or _payload_ranks(ckpt) > (ranks or inf):
        return stated
    if axis == "world" and ranks:
        stated[job["world"].source] = ranks
    elif axis == "dp" and main_params(ckpt):
        per_rank = prod(size or 0 for size in model)
        totals = {job["world"].source: ranks} if ranks else {"the mesh": mesh.size} if mesh is not None else {}
        for who, size in totals.items():
            if per_rank and size % per_rank == 0:
                stated[f"{who} (world_size by tp, pp and cp)"] = size // per_rank
        if not ranks and dp and dp > 1:
            stated[job["dp"].source] = dp
        if len({*stated.values()}) > 1:  # a part of the job alone reads this data
            return {}
    return stated


def _payload_ranks(ckpt: Checkpoint) -> int:
    """One more than the last rank that wrote payload, by the names of its files; 0 where they name none."""
    return int(ranks_of_files(ckpt).max(initial=-1)) + 1
