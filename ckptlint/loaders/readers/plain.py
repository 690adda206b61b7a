"""Whole states in files of torch.save: `pytorch_model.bin` and its parts, Lightning's `.ckpt`, full state dicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckptlint.errors import ForeignError, LimitError, ScriptError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import Opaque
from ckptlint.formats.torch_file import TorchFile, read_torch_file
from ckptlint.loaders.optimizer_state import optimizer_file
from ckptlint.loaders.rank_files.onto import Columns, damaged, read_file
from ckptlint.loaders.rank_files.sets import PICKLE_SHARE, FileSet, weight_sets
from ckptlint.loaders.readers.common_state import read_configs
from ckptlint.loaders.readers.model_files import read_set
from ckptlint.model import (
    Checkpoint,
    Problem,
    StepClaim,
    StepFile,
)
from ckptlint.model.stored import StoredDTensor, StoredShards, StoredTensor
from ckptlint.model.text import plural, printable, some
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.dtypes import FLOATS
from ckptlint.vocabulary.frameworks import family_of, is_counter, may_be_pickle
from ckptlint.vocabulary.litter import is_litter

_OPTIMIZER = {"state", "param_groups"}  # torch.optim.Optimizer.state_dict
_META = re.compile(r"consolidated\.\d{1,3}\.pth")
_EPOCHS = ("epoch", "iteration", "iter")
_STATES = ("state_dict", "model", "module", "model_state_dict", "model_state")


def read_weights(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The first set of whole states in a folder.

    Args:
        look_at_files: whether to look at the sizes of files (depth `files`); their pickles are read in any case.

    Raises:
        AccessError: the operating system refused a read.
    """
    return read_states(folder, weight_sets(folder)[0], look_at_files)


def read_named(folder: Folder, name: str, look_at_files: bool) -> Checkpoint | None:
    """The state in a file that was named by the user or is alone in its folder.

    None where it holds no weights, or is no file of torch's.
    """
    try:
        found = read_torch_file(folder, name)
    except UnreadableError as error:
        if isinstance(error, ForeignError) and (folder.size(name) or not may_be_pickle(name)):
            return None
        return read_states(folder, FileSet([name]), look_at_files)  # reports that it is empty, cut or damaged
    if not holds_weights(found.root):
        return None
    ckpt = read_states(folder, FileSet([name]), look_at_files)
    label = printable(name)
    optimizers = found.root.get("optimizer_states", [found.root.get("optimizer")])
    states = [made for state in _listed(optimizers) if (made := optimizer_file(state)) is not None]
    size = folder.look_at(name)[1] or 0
    beside = tuple(StepFile(label, "optimizer state", "read", size, optimizer=state) for state in states)
    step = found.root.get("global_step")
    claims = (StepClaim(f"global_step of {label}", step),) if type(step) is int and step >= 0 else ()
    return replace(ckpt, step_files=beside, claims=claims)


def lone_state(folder: Folder) -> str | None:
    """The one file in a folder that may hold weights, where it does; None for any other folder.

    Of Meta's models, which have a `consolidated.NN.pth` for each rank, that is a file of one rank that holds all.
    """
    names = [name for name in folder.files_beside() if may_be_pickle(name)]
    names = [name for name in names if family_of(name) is None or _META.fullmatch(name)]
    if len(names) != 1 or is_litter(names[0]) or folder.look_at(names[0])[0] not in READABLE:
        return None

    def holds() -> bool:
        try:
            found = read_torch_file(folder, names[0])
            is_whole = not _META.fullmatch(names[0]) or _has_square_outputs(found.root)
            return bool(found.unpickled.refused) or (holds_weights(found.root) and is_whole)
        except UnreadableError as error:
            return isinstance(error, ScriptError)

    try:
        return names[0] if isolated(holds, min(folder.size(names[0]), PICKLE_SHARE)) else None
    except LimitError:
        return None


def _has_square_outputs(root: Any) -> bool:
    """Whether each `wo` is square: in Meta's models it is, and that of one rank of several has a part of its columns.

    Source:
        meta-llama/llama-models: models.llama3.model.Attention, `head_dim` is `dim // n_heads`
    """
    state = root if isinstance(root, dict) else {}
    outputs = [value for fqn, value in walked(state) if fqn.endswith("attention.wo.weight")]
    shapes = [value.shape for value in outputs if isinstance(value, StoredTensor)]
    return bool(shapes) and all(len({*shape}) == 1 for shape in shapes)


def are_states(folder: Folder, names: Sequence[str], grow: bool) -> bool:
    """Whether files hold a whole state each, with the same keys.

    Args:
        grow: whether a counter beside the state must grow from file to file, as it does not over ranks.
    """

    def keys() -> list[frozenset[str]]:
        roots = [read_torch_file(folder, name).root for name in names]
        if grow and not _grows(roots):
            return []
        return [frozenset(fqn for fqn, _ in walked(state_of(root) or {})) for root in roots if holds_weights(root)]

    try:
        found = isolated(keys, min(sum(map(folder.size, names)), len(names) * PICKLE_SHARE))
    except UnreadableError:
        return False
    return len(found) == len(names) and len({*found}) == 1


def _grows(roots: Sequence[Any]) -> bool:
    """Whether a count of steps or epochs becomes larger from each value to the next."""
    counts = [root if isinstance(root, dict) else {} for root in roots]
    names = [name for name in counts[0] if isinstance(name, str) and (is_counter(name) or name in _EPOCHS)]
    stated = ([value for count in counts if type(value := count.get(name)) is int] for name in names)
    return any(len(values) == len(counts) and sorted({*values}) == values for values in stated)


def holds_weights(root: Any) -> bool:
    """Whether a value is a state with numbers that a model could have: no optimizer's, and not random numbers alone.

    Source:
        lightning (`state_dict`), torch.optim.Optimizer.state_dict, transformers (`rng_state.pth`)
    """
    if not isinstance(root, dict) or root.keys() >= _OPTIMIZER:
        return False
    state = state_of(root)
    return any(getattr(value, "dtype", "") in FLOATS for _, value in walked(state or {}))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def read_states(folder: Folder, own: FileSet, look_at_files: bool) -> Checkpoint:
    """The same of a set that is known."""
    columns = Columns()

    def read(number: int, name: str, size: int, problems: list[Problem]) -> bool:
        found = read_file(folder, name, problems)
        return found is not None and add_state(columns, number, found, printable(name), problems)

    states = read_set(folder, own.files, own.index, look_at_files, read)
    tensors, records, storages = columns.made()
    is_model = not any(name.startswith("adapter_model") for name in states.names)
    is_export = bool(own.index) or any(re.fullmatch(r"pytorch_model(\.\w+)?\.bin", name) for name in states.names)
    declared, config, config_problems = read_configs(folder, None, is_model and is_export)
    return Checkpoint(
        path=folder.display,
        format="torch",
        tensors=tensors,
        records=records,
        storages=storages,
        files=states.files,
        declared=declared if is_model else {},
        config=config if is_model else None,
        index=states.index,
        problems=states.problems + config_problems,
        readable=states.is_readable,
        partial=states.partial,
        metadata_file=states.label,
    )


def add_state(columns: Columns, number: int, found: TorchFile, label: str, problems: list[Problem]) -> bool:
    """Add the tensors of a state; False when there is none.

    A state is a dict of tensors, alone or under one of the names that trainers give it, and of dicts of them.
    """
    state = state_of(found.root)
    if state is None:
        problems.append(damaged(label, f"{label} holds no dict of tensors"))
        return False
    if found.root.keys() >= _OPTIMIZER:
        sentence = f"{label} holds the state of an optimizer, not of a model"
        problems.append(Problem("container", label, sentence, why="a load finds none of the model's keys in it"))
        return False
    strange = []
    for fqn, value in walked(state):
        if isinstance(value, StoredTensor):
            columns.add(fqn, value, number, found)
        else:
            strange.append(printable(fqn))
    if strange:
        sentence = f"{label}: {plural(len(strange), 'tensor')} in a form that ckptlint does not read: {some(strange)}"
        problems.append(Problem("note", label, sentence))
    return True


def state_of(root: Any) -> dict[Any, Any] | None:
    """The dict of a state that holds the model's tensors; None without one."""
    if not isinstance(root, dict):
        return None
    for name in _STATES:
        inner = root.get(name)
        if isinstance(inner, dict) and any(map(_is_tensor, inner.values())):
            return inner
    return root


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
