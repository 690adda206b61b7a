"""Whole states in files of torch.save: `pytorch_model.bin` and its parts, Lightning's `.ckpt`, full state dicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ckptlint.errors import ForeignError, LimitError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import Opaque
from ckptlint.formats.torch_file import TorchFile, read_torch_file
from ckptlint.grouping import grouped
from ckptlint.loaders.problems import optimizer_never_written
from ckptlint.loaders.readers.common_state import read_configs
from ckptlint.loaders.readers.model_files import read_set
from ckptlint.loaders.readers.sets import PICKLE_SHARE, FileSet
from ckptlint.loaders.readers.torch_files import Columns, damaged, optimizer_in, read_file
from ckptlint.model import Checkpoint, Problem, StepClaim, StepFile
from ckptlint.model.stored import StoredDTensor, StoredShards, StoredTensor
from ckptlint.model.text import first_names, plural, printable
from ckptlint.patterns import lazy_pattern
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.frameworks import family_of, is_counter, may_be_pickle
from ckptlint.vocabulary.keys import numbers_in
from ckptlint.vocabulary.litter import is_system_file

_OPTIMIZER = {"state", "param_groups"}  # torch.optim.Optimizer.state_dict
_META = lazy_pattern(r"consolidated\.\d{1,3}\.pth")
_MOST_STATES = 64  # files of a folder that are judged each by itself
_NUMBERS = lazy_pattern(r"\d+")
_EPOCHS = ("epoch", "iteration", "iter")
_SCHEDULER = lazy_pattern(r"(lr_)?schedulers?(_states?|_state_dict)?")
_STATES = ("state_dict", "model", "module", "model_state_dict", "model_state")


def read_named(folder: Folder, name: str, look_at_files: bool) -> Checkpoint | None:
    """The state in a file that the user named or that is alone; None without weights, or for no file of torch's."""
    try:
        torch_file = read_torch_file(folder, name)
    except UnreadableError as error:
        if isinstance(error, ForeignError) or not (folder.size(name) or may_be_pickle(name)):
            return None
        return read_states(folder, FileSet([name]), look_at_files)  # reports that it is empty, cut or damaged
    if not holds_weights(torch_file.root):
        return None
    ckpt = read_states(folder, FileSet([name]), look_at_files)
    label = printable(name)
    optimizers = torch_file.root.get("optimizer_states", [torch_file.root.get("optimizer")])
    optimizers = optimizers if isinstance(optimizers, list) else []
    stems = ["optimizer"] if len(optimizers) == 1 else [f"optimizer.{number}" for number in range(len(optimizers))]
    named = zip(optimizers, stems, strict=True)
    states = [made for state, stem in named if (made := optimizer_in(folder, name, label, torch_file, state, stem))]
    size = folder.stat(name)[1] or 0
    beside = tuple(StepFile(label, "optimizer state", "read", size, optimizer=state) for state, _ in states)
    step = torch_file.root.get("global_step")
    claims = (StepClaim(f"global_step of {label}", step),) if type(step) is int and step >= 0 else ()
    problems = [*ckpt.problems, *_never_written(folder, label, torch_file.root)]
    return replace(ckpt, step_files=beside, claims=claims, problems=problems)


def _never_written(folder: Folder, label: str, root: dict[Any, Any]) -> Iterator[Problem]:
    """That a job stepped and its file has a scheduler and no optimizer, which lies in no file beside it either.

    Source: lightning 2.6, CheckpointConnector.dump_checkpoint: weights alone are saved without `lr_schedulers` too
    """
    counters = (step for name, step in root.items() if is_counter(str(name)) or name in _EPOCHS[1:])
    steps = max((step for step in counters if type(step) is int), default=0)
    has_scheduler = any(value for name, value in root.items() if _SCHEDULER.fullmatch(str(name)))
    states = {str(name): value for name, value in root.items() if "optim" in str(name).lower()}
    names = [*states, *(["optimizer_states"] if "pytorch-lightning_version" in root and not states else ())]
    whole = folder.parent.sub(folder.name) if folder.is_one_file and folder.parent is not None else folder
    is_apart = any("optim" in name.lower() for name in whole.files_beside())
    if steps > 0 and names and not any(states.values()) and not is_apart and has_scheduler:
        how = "is not there" if not states else "is None" if states[names[0]] is None else "is empty"
        yield optimizer_never_written(label, steps, f"{printable(names[0])} in {label} {how}")


def states_apart(folder: Folder) -> list[str]:
    """The files of a folder that are a whole state each, by themselves; [] where they may be parts of one.

    Those that cannot be read are among them. Files whose names differ in numbers alone may be ranks, parts or steps:
    only where none of them can be read the last one stands for all. Of Meta's models, which have a
    `consolidated.NN.pth` for each rank, the file of one rank is a state where it holds all.
    """
    names = [name for name in folder.files_beside() if may_be_pickle(name) and not is_system_file(name)]
    names = [name for name in names if family_of(name) is None or _META.fullmatch(name)]
    names = [name for name in names if folder.stat(name)[0] in READABLE]
    if not 0 < len(names) <= _MOST_STATES:
        return []
    try:
        kinds = isolated(partial(_kinds_of, folder, names), sum(min(folder.size(name), PICKLE_SHARE) for name in names))
    except LimitError:
        return []
    states = (name for name in sorted(names, key=numbers_in) if kinds[name] != "other")
    alike = grouped((_NUMBERS.sub("0", name), name) for name in states).values()
    if any(len(members) > 1 and any(kinds[name] == "weights" for name in members) for members in alike):
        return []
    return sorted(members[-1] for members in alike)


def _kinds_of(folder: Folder, names: Sequence[str]) -> dict[str, Literal["weights", "nothing readable", "other"]]:
    """Name -> what a file holds, as far as its metadata says."""
    kinds: dict[str, Literal["weights", "nothing readable", "other"]] = {}
    for name in names:
        try:
            torch_file = read_torch_file(folder, name)
            is_whole = not _META.fullmatch(name) or _has_square_outputs(torch_file.root)
            is_model = bool(torch_file.unpickled.refused) or (holds_weights(torch_file.root) and is_whole)
            kinds[name] = "weights" if is_model else "other"
        except ForeignError:
            kinds[name] = "other"
        except UnreadableError:
            kinds[name] = "nothing readable"
    return kinds


def _has_square_outputs(root: Any) -> bool:
    """Whether each `wo` is square: in Meta's models it is, and that of one rank of several has a part of its columns.

    Source: meta-llama/llama-models: models.llama3.model.Attention, `head_dim` is `dim // n_heads`
    """
    state = root if isinstance(root, dict) else {}
    outputs = [value for fqn, value in walked(state) if fqn.endswith("attention.wo.weight")]
    shapes = [value.shape for value in outputs if isinstance(value, StoredTensor)]
    return bool(shapes) and all(len({*shape}) == 1 for shape in shapes)


def are_states(folder: Folder, names: Sequence[str], grow: bool) -> bool:
    """Whether files hold a whole state each, with the same keys, as far as the first two that can be read say.

    A counter beside the state must `grow` from file to file where asked, as it does not over ranks.
    """

    def said() -> bool:
        roots: list[Any] = []
        for name in names:
            with suppress(UnreadableError):
                roots.append(read_torch_file(folder, name).root)
            if len(roots) == 2:
                break
        if grow and not (len(roots) == 2 and _grows(roots)):
            return False
        keys = {frozenset(fqn for fqn, _ in walked(state_of(root) or {})) for root in roots if holds_weights(root)}
        return len(keys) == 1 and all(map(holds_weights, roots))

    try:
        return isolated(said, min(sum(map(folder.size, names)), len(names) * PICKLE_SHARE))
    except LimitError:
        return False


def _grows(roots: Sequence[Any]) -> bool:
    """Whether a count of steps or epochs becomes larger from each value to the next."""
    counts = [root if isinstance(root, dict) else {} for root in roots]
    names = [name for name in counts[0] if isinstance(name, str) and (is_counter(name) or name in _EPOCHS)]
    stated = ([value for count in counts if type(value := count.get(name)) is int] for name in names)
    return any(len(values) == len(counts) and sorted({*values}) == values for values in stated)


def holds_weights(root: Any) -> bool:
    """Whether a value is a state with numbers that a model could have: no optimizer's, and not random numbers alone.

    Source: lightning (`state_dict`), torch.optim.Optimizer.state_dict, transformers (`rng_state.pth`)
    """
    if not isinstance(root, dict) or root.keys() >= _OPTIMIZER:
        return False
    state = state_of(root)
    return any(getattr(value, "dtype", "") in FLOATS for _, value in walked(state or {}))


def read_states(folder: Folder, file_set: FileSet, look_at_files: bool) -> Checkpoint:
    """The whole states in a set of files; their pickles are read whether or not their sizes are looked at."""
    columns = Columns()

    def read(number: int, name: str, size: int, problems: list[Problem]) -> bool:
        torch_file = read_file(folder, name, problems)
        return torch_file is not None and add_state(columns, number, torch_file, printable(name), problems)

    states = read_set(folder, file_set.files, file_set.index, look_at_files, read)
    is_model = not any(name.startswith("adapter_model") for name in states.names)
    is_export = bool(file_set.index) or any(re.fullmatch(r"pytorch_model(\.\w+)?\.bin", name) for name in states.names)
    declared, config, config_problems = read_configs(folder, None, is_model and is_export)
    return Checkpoint(
        path=folder.display,
        format="torch",
        **columns.made(),
        files=states.files,
        declared=declared if is_model else {},
        config=config if is_model else None,
        index=states.index,
        problems=states.problems + config_problems,
        readable=states.is_readable,
        partial_because=states.partial_because,
        metadata_file=states.label,
    )


def add_state(columns: Columns, number: int, file: TorchFile, label: str, problems: list[Problem]) -> bool:
    """Add the tensors of a state; False when there is none.

    A state is a dict of tensors, alone or under one of the names that trainers give it, and of dicts of them.
    """
    state = state_of(file.root)
    if state is None:
        problems.append(damaged(label, f"{label} holds no dict of tensors"))
        return False
    if file.root.keys() >= _OPTIMIZER:
        sentence = f"{label} holds the state of an optimizer, not of a model"
        problems.append(Problem("container", label, sentence, why="a load finds none of the model's keys in it"))
        return False
    strange = []
    for fqn, value in walked(state):
        if isinstance(value, StoredTensor):
            columns.add(fqn, value, number, file)
        else:
            strange.append(printable(fqn))
    if strange:
        what = f"{plural(len(strange), 'tensor')} in a form that ckptlint does not read"
        problems.append(Problem("note", label, f"{label}: {what}: {first_names(strange)}"))
    return True


def state_of(root: Any) -> dict[Any, Any] | None:
    """The dict of a state that holds the model's tensors; None without one."""
    if not isinstance(root, dict):
        return None
    inner = (value for name in _STATES if isinstance(value := root.get(name), dict))
    return next((state for state in inner if any(map(_is_tensor, state.values()))), root)


def walked(state: dict[Any, Any], prefix: str = "", levels: int = 3) -> Iterator[tuple[str, Any]]:
    """The tensors of a state by their keys; those in dicts inside it with the names of these before theirs."""
    for key, value in state.items():
        fqn = f"{prefix}{key}"
        if _is_tensor(value):
            yield fqn, value
        elif isinstance(value, dict) and levels:
            yield from walked(value, f"{fqn}.", levels - 1)


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, one that is described here or one in a layout that is not (sparse, quantised)."""
    if isinstance(value, (StoredTensor, StoredDTensor, StoredShards)):
        return True
    return isinstance(value, Opaque) and value.module in _REBUILDS and value.name.startswith("_rebuild_")


_REBUILDS = ("torch._utils", "torch._tensor")
