"""DeepSpeed's universal form: one folder for each parameter, one file for each of its states, and the model states."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from math import prod

from ckptlint.formats.torch_file import TorchFile, number_in, ranges_of
from ckptlint.loaders.rank_files.deepspeed import add_model, named
from ckptlint.loaders.rank_files.deepspeed_files import Tag, read_tag, shapes_of
from ckptlint.loaders.rank_files.deepspeed_grid import disagreements, facts_of, other_names
from ckptlint.loaders.rank_files.onto import Columns, Part, read_file
from ckptlint.model import (
    Checkpoint,
    FileTable,
    Misfit,
    Problem,
    RankFile,
    RankFileSet,
    Said,
    StoredFile,
)
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.paths import is_safe

_STATES = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt")
_STATE_NAMES = {"fp32": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_REST = "optimizer_state.pt"


def read_universal(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The checkpoint in a folder that `ds_to_universal` made.

    Raises:
        AccessError: the operating system refused a read.

    Source:
        deepspeed.checkpoint.ds_to_universal (0.14 - 0.19)
    """
    tag = read_tag(folder, look_at_files)
    facts, columns = facts_of(tag), Columns()
    states = _States(folder, tag, columns, look_at_files)
    states.read()
    lost, misfits = states.lost(), states.misfits()
    add_model(columns, tag, facts)
    told = disagreements(tag, facts) + states.steps()
    unread = [file for file in tag.files if not file.is_read]
    partial = ""
    if unread or lost:
        partial = f"{len(unread) + len(lost)} of {len(tag.files) + len(lost)} files of this form are missing or unread"
    elif misfits:
        partial = "the files of this form contradict each other"
    tensors, records, storages = columns.made()
    readable = any(file.is_read for file in tag.files)
    return Checkpoint(
        path=folder.display,
        format="deepspeed-universal",
        writer=facts.writer,
        tensors=tensors,
        records=records,
        storages=storages,
        files=FileTable.of(tag.stored),
        declared=facts.declared,
        claims=facts.claims,
        problems=[
            *(tag.problems if readable else [replace(problem, blocks=True) for problem in tag.problems]),
            *_left_over(folder),
        ],
        readable=readable,
        partial=partial,
        metadata_file="zero",
        rank_files=RankFileSet(
            tuple(named(tag.files, other_names(tag))),
            {states.source: (*tag.files, *lost)},
            said=tuple(told),
            misfits=tuple(misfits),
        ),
    )


class _States:
    """The files of the parameters' states.

    Attributes:
        source: the file that lists the parameters, as a phrase.
        wanted: the parameters that were trained, and their shapes.
        sizes: parameter -> state -> the tensor.
    """

    def __init__(self, folder: Folder, tag: Tag, columns: Columns, look_at_files: bool) -> None:
        self.folder, self.tag, self.columns, self.look = folder, tag, columns, look_at_files
        self.wanted: dict[str, tuple[int, ...]] = {}
        self.source = ""
        several: Counter[str] = Counter()
        for source in tag.of("model"):
            for group in shapes_of(source.root) or ():
                several.update(group.keys() if source.file.numbers.get("dp", 0) == 0 else ())
                self.wanted |= group
                self.source = self.source or f"param_shapes of {source.file.name}"
        # the parts of tensor parallel ranks were joined, and a vocabulary loses its padding
        self.joined = {fqn for fqn, count in several.items() if count > 1}
        self.sizes: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        self.there: dict[str, set[str]] = defaultdict(set)
        self.counted: dict[int, list[str]] = defaultdict(list)
        self.is_padded: set[str] = set()

    def read(self) -> None:
        zero = self.folder.sub("zero")
        for fqn in zero.folders():
            inside = zero.sub(fqn) if not zero.outside(fqn) else None
            for name in inside.files() if inside is not None else ():
                if name in _STATES:
                    self._read_state(fqn, name, inside.size(name) if inside is not None else 0)
        if zero.has(_REST):
            self._listed(f"zero/{_REST}", zero.size(_REST), self._open(f"zero/{_REST}") is not None, "optimizer")

    def _read_state(self, fqn: str, name: str, size: int) -> None:
        path = f"zero/{fqn}/{name}"
        self.there[fqn].add(name)
        found = self._open(path)
        tensor = None
        if found is not None:
            root = found.root
            value = root.get("param") if isinstance(root, dict) else root
            tensor = value if isinstance(value, StoredTensor) else None
            if isinstance(root, dict) and (
                "vocab_tensor" in root or any(str(key).startswith("parameter_with") for key in root)
            ):
                self.is_padded.add(fqn)
        number = self._listed(path, size, tensor is not None or name == "step.pt", "state")
        if found is None:
            return
        if tensor is None:
            if name != "step.pt":
                label = printable(path)
                problem = Problem("container", label, f"{label} holds no tensor", why="a load of this form stops there")
                self.tag.problems.append(problem)
            elif type(found.root) is int:
                self.counted[found.root].append(printable(path))
            return
        if name == "step.pt":
            if (step := number_in(ranges_of(self.folder, path), found, tensor)) is not None:
                self.counted[step].append(printable(path))
            return
        what = name.removesuffix(".pt")
        self.sizes[fqn][what] = tensor
        key = f"optimizer.state.{_STATE_NAMES[what]}.{fqn}"
        place, is_flat = found.storages.get(tensor.key), tensor.shape != self.wanted.get(fqn, tensor.shape)
        self.columns.parts.append(
            Part(key, tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor, number, place, is_flat)
        )

    def _open(self, path: str) -> TorchFile | None:
        return read_file(self.folder, path, self.tag.problems) if self.folder.look_at(path)[0] in READABLE else None

    def _listed(self, path: str, size: int, is_read: bool, kind: str) -> int:
        """The row of a file among the payload files."""
        label, state = printable(path), self.folder.look_at(path)[0]
        shown = state if self.look else "unchecked"
        self.tag.stored.append(
            StoredFile(label, path if is_safe(path) else None, size if self.look else None, shown, True)
        )
        self.tag.files.append(RankFile(label, kind, {}, is_read))
        return len(self.tag.stored) - 1

    def lost(self) -> tuple[RankFile, ...]:
        """The parameters without a folder, and those without a state that the others have."""
        common = Counter(name for fqn in self.wanted for name in self.there.get(fqn, ()))
        usual = [name for name in _STATES if 2 * common[name] > len(self.wanted)]
        found = []
        for fqn in self.wanted:
            if fqn not in self.there:
                found.append(RankFile(printable(f"zero/{fqn}/"), "state", {}))
                continue
            missing = [name for name in usual if name not in self.there[fqn]]
            found += [RankFile(printable(f"zero/{fqn}/{name}"), "state", {}) for name in missing]
        if not self.folder.sub("zero").has(_REST):
            found.append(RankFile(f"zero/{_REST}", "optimizer", {}))
        return tuple(found)

    def misfits(self) -> list[Misfit]:
        """States that are not as large as their parameter."""
        found = []
        for fqn, states in self.sizes.items():
            shape = self.wanted.get(fqn)
            judged = shape is not None and fqn not in self.joined and fqn not in self.is_padded
            master = states.get("fp32")
            for what, tensor in states.items():
                file = printable(f"zero/{fqn}/{what}.pt")
                elements = prod(tensor.shape)
                if judged and shape is not None and elements != prod(shape):
                    expected, because = f"{list(shape)}", f"{self.source} gives this shape"
                elif not judged and master is not None and elements != prod(master.shape):
                    expected, because = f"{list(master.shape)}", "fp32.pt beside it has this shape"
                else:
                    continue
                found.append(Misfit(printable(fqn), file, f"{list(tensor.shape)}", expected, because, "state"))
        return found

    def steps(self) -> list[Said]:
        """The steps that the parameters counted, where they differ."""
        if len(self.counted) < 2:
            return []
        return [Said("step", str(step), file) for step, files in self.counted.items() for file in files]


def _left_over(folder: Folder) -> list[Problem]:
    """What a conversion that was interrupted leaves.

    Source:
        deepspeed.checkpoint.ds_to_universal: `tmp` is removed at the end
    """
    if "tmp" not in folder.folders():
        return []
    sentence = "tmp/ is still there: the conversion to the universal form never finished"
    why = "ds_to_universal removes it last, unless it ran with --keep_temp_folder"
    return [Problem("incomplete", "tmp", sentence, why=why, hint="convert the checkpoint again into a new folder")]
