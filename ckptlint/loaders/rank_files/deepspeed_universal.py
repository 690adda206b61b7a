"""DeepSpeed's universal form: one folder for each parameter, one file for each of its states, and the model states."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptlint.formats.torch_file import TorchFile, number_in, ranges_of
from ckptlint.loaders.rank_files.deepspeed import add_model, assembled
from ckptlint.loaders.rank_files.deepspeed_files import Tag, read_tag, shapes_of
from ckptlint.loaders.rank_files.deepspeed_grid import grid_facts_of, note
from ckptlint.loaders.readers.torch_files import Columns
from ckptlint.model import Checkpoint, Misfit, Problem, RankFile
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder

_STATES = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt")
_STATE_NAMES = {"fp32.pt": "fp32_param", "exp_avg.pt": "exp_avg", "exp_avg_sq.pt": "exp_avg_sq"}
_REST = "optimizer_state.pt"


def read_universal(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The checkpoint in a folder that `ds_to_universal` made; raises AccessError where a read is refused.

    Source: deepspeed.checkpoint.ds_to_universal (0.14 - 0.19)
    """
    tag = read_tag(folder, look_at_files)
    grid_facts, columns = grid_facts_of(tag), Columns()
    wanted, joined, source = _parameters(tag)
    states = list(_states(folder, tag))
    for state in states:
        if state.torch_file is not None and state.tensor is not None and state.name in _STATE_NAMES:
            key, tensor = f"optimizer.state.{_STATE_NAMES[state.name]}.{state.fqn}", state.tensor
            is_flat = tensor.shape != wanted.get(state.fqn, tensor.shape)
            columns.add(key, tensor, state.number, state.torch_file, is_flat=is_flat)
    add_model(columns, tag, grid_facts)
    note(tag, grid_facts)
    steps = [(state.step, state.file) for state in states if state.step is not None]
    tag.statements.note_if_different("step", steps, among="state")
    tag.statements.misfits += _misfits(states, {fqn: wanted[fqn] for fqn in wanted.keys() - joined}, source)
    bare = {*folder.sub("zero").folders()} - {state.fqn for state in states}
    made = assembled(tag, grid_facts, columns, {source: [*_expected(wanted, states, bare)]})
    problems = [*made.problems]
    if "tmp" in folder.folders():  # deepspeed.checkpoint.ds_to_universal: `tmp` is removed at the end
        sentence = "tmp/ is still there: the conversion to the universal form never finished"
        why = "ds_to_universal removes it last, unless it ran with --keep_temp_folder"
        hint = "convert the checkpoint again into a new folder"
        problems.append(Problem("incomplete", "tmp", sentence, why=why, hint=hint))
    return replace(made, format="deepspeed-universal", problems=problems, metadata_file="zero")


def _parameters(tag: Tag) -> tuple[dict[str, tuple[int, ...]], set[str], str]:
    """The parameters that were trained and their shapes, those that several ranks list a part of, and who lists them.

    The parts of tensor parallel ranks were joined, and a vocabulary loses its padding.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    several: Counter[str] = Counter()
    sources = []
    for source in tag.of("model"):
        for group in shapes_of(source.root) or ():
            several.update(group.keys() if source.file.numbers.get("dp", 0) == 0 else ())
            wanted |= group
            sources.append(f"param_shapes of {source.file.name}")
    return wanted, {fqn for fqn, count in several.items() if count > 1}, (sources or [""])[0]


@dataclass(frozen=True, slots=True)
class _State:
    """A file of one state of a parameter: its name, path and row among the payload files, and what was read of it.

    `step` is what it counts, None for another state.
    """

    fqn: str
    name: str
    file: str
    number: int
    torch_file: TorchFile | None
    tensor: StoredTensor | None
    step: int | None

    @property
    def is_padded(self) -> bool:
        """Whether it says that its rows are not those of the parameter."""
        root = self.torch_file.root if self.torch_file is not None and isinstance(self.torch_file.root, dict) else {}
        return "vocab_tensor" in root or any(str(key).startswith("parameter_with") for key in root)


def _states(folder: Folder, tag: Tag) -> Iterator[_State]:
    """The states of all parameters; their files join those of the tag."""
    zero = folder.sub("zero")
    for fqn in zero.folders():
        for name in zero.sub(fqn).files() if not zero.escapes_to(fqn) else ():
            if name in _STATES:
                yield _state(folder, tag, fqn, name)
    if zero.has(_REST):
        tag.files.open(f"zero/{_REST}", "optimizer", {}, "state", lambda root: True)


def _state(folder: Folder, tag: Tag, fqn: str, name: str) -> _State:
    path = f"zero/{fqn}/{name}"
    opened = tag.files.open(path, "state", {}, "tensor", lambda root: name == "step.pt" or _tensor(root) is not None)
    pickled = None if opened is None else opened.torch_file
    tensor, step = (None, None) if pickled is None else (_tensor(pickled.root), pickled.root)
    if pickled is not None and tensor is not None and name == "step.pt":
        step = number_in(ranges_of(folder, path), pickled, tensor)
    is_step = name == "step.pt" and type(step) is int
    if pickled is not None and (inside := f"{pickled.prefix}.pt") in _STATES and inside != name:
        tag.statements.other_name(printable(path), inside)
    return _State(fqn, name, printable(path), len(tag.files.stored) - 1, pickled, tensor, step if is_step else None)


def _tensor(root: Any) -> StoredTensor | None:
    value = root.get("param") if isinstance(root, dict) else root
    return value if isinstance(value, StoredTensor) else None


def _expected(wanted: Collection[str], states: list[_State], bare: set[str]) -> Iterator[RankFile]:
    """A folder for each parameter, with the states in it that most of the others have; weights in a bare folder."""
    there: dict[str, set[str]] = defaultdict(set)
    for state in states:
        there[state.fqn].add(state.name)
    names = Counter(name for fqn in wanted for name in there.get(fqn, ()))
    usual = [name for name in _STATES if 2 * names[name] > len(wanted)]
    for fqn in wanted:
        for name in usual if fqn in there else ("",):
            yield RankFile(printable(f"zero/{fqn}/{name}"), "state", {})
    yield from (RankFile(printable(f"zero/{fqn}/fp32.pt"), "state", {}) for fqn in sorted(bare.difference(wanted)))
    yield RankFile(f"zero/{_REST}", "optimizer", {})


def _misfits(states: list[_State], wanted: Mapping[str, tuple[int, ...]], source: str) -> Iterator[Misfit]:
    """States that are not as large as their parameter, or the fp32 weights beside them where those have other rows."""
    weights = (state for state in states if state.name == "fp32.pt")
    masters = {state.fqn: state.tensor.shape for state in weights if state.tensor is not None}
    padded = {state.fqn for state in states if state.is_padded}
    for state in states:
        if state.tensor is None or state.name not in _STATE_NAMES:
            continue
        because, shape = f"{source} gives this shape", wanted.get(state.fqn)
        if shape is None or state.fqn in padded:
            because, shape = "fp32.pt beside it has this shape", masters.get(state.fqn)
        if shape is not None and prod(state.tensor.shape) != prod(shape):
            stored, expected = f"{[*state.tensor.shape]}", f"{[*shape]}"
            yield Misfit(printable(state.fqn), state.file, stored, expected, because, "state")
