"""A checkpoint as the rules see it, the run folder around it, and what could not be taken at face value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.facts import Facts, fact
from ckptlint.model.files import FileTable
from ckptlint.model.lost_files import LostFiles
from ckptlint.model.payload import ChangeTable, PairTable, PayloadTable
from ckptlint.model.ranks.files import RankFileSet, StorageTable
from ckptlint.model.ranks.job import RankFinding, RankTable
from ckptlint.model.ranks.plans import SavePlans
from ckptlint.model.reference import AxisSize, Declared, ModelConfig, Reference, Seal
from ckptlint.model.tensors import ByteObject, ObjectTable, RecordTable, Tensor, empty_objects, empty_records


class CommonState(NamedTuple):
    """The values every rank shares (arguments, iteration, parameter groups)."""

    source: str  # the file or entry they came from, relative to the checkpoint
    values: dict[Any, Any]  # as stored; classes of the training code are inert `safe_pickle.Node`s


@dataclass(frozen=True, slots=True, eq=False)
class WeightIndex:
    """A `*.safetensors.index.json`, which says in which file each key is.

    Attributes:
        places: key -> name of the file, both printable.
        total_size: bytes of all tensors as it says, None when it does not.
        absent: the files that are not there, or lie outside of the folder.
        unread: these, and the files whose header could not be read.
        is_stale: whether it is left from an earlier save: none of its files is there, and none is a file of this model.

    Source: huggingface_hub `split_torch_state_dict_into_shards`; torch.distributed.checkpoint.hf_storage
    """

    file: str
    places: dict[str, str]
    total_size: int | None = None
    absent: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    is_stale: bool = False


StepState = Literal["complete", "unfinished", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The run folder that a step is in.

    Attributes:
        step: the number in the step folder's own name (`iter_0000010`).
        steps: the numbers of all step folders there, in order.
        newest_complete: the highest of them that has the marks of a finished save, None when none has.
        tracker: the step that the tracker names, or `release`; None without one.
        tracked: what is there; `unknown` for formats that ckptlint does not read.
        prefix, digits: how step folders are named.
        holds: what the tracker holds of a step: its `number`, the name of its `folder`, or it is a `link` to that.
        is_asked: whether the run was named, and this is its newest step: then faults of the tracker are reported.
        saved: the step that a train state in the step folder holds, None without one.
        not_looked_at: why the run folder could not be looked at, "" where it could.

    Source: megatron.training.checkpointing.get_checkpoint_name, read_metadata
    """

    step: int
    steps: tuple[int, ...] = ()
    newest_complete: int | None = None
    tracker: int | Literal["release"] | None = None
    tracked: StepState = "unknown"
    not_looked_at: str = ""
    prefix: str = "iter_"
    digits: int = 7
    tracker_file: str = "latest_checkpointed_iteration.txt"
    holds: str = "number"
    is_asked: bool = False
    saved: int | None = None

    def tracking(self, step: int) -> str:
        """What to do so that the tracker names a step, as an order."""
        if self.holds == "link":
            return f"point {self.tracker_file} to {self.folder_of(step)}"
        return f"write {self.folder_of(step) if self.holds == 'folder' else step} into {self.tracker_file}"

    def folder_of(self, step: int | str) -> str:
        """The name of a step's folder."""
        return step if isinstance(step, str) else f"{self.prefix}{step:0{self.digits}d}"


class StepClaim(NamedTuple):
    """A number in a checkpoint that counts steps.

    Attributes:
        source: the key, or the file, that holds it, printable.
        uncounted: how many of these steps the counter in the folder's name may have left out; None where one line of
            code writes both, or nothing is known.
    """

    source: str
    step: int
    uncounted: int | None = None


StepFileState = Literal["read", "known", "unknown"]


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """What an optimizer's state dict beside the tensors says.

    Attributes:
        params: the parameters that its groups list, in order, by number or by name.
        settings: the names of what its groups set.
        shapes: parameter -> name of each of its states that is a tensor -> shape.
        shapes_beside: of the tensors in other models of the step, which it may have trained too.
        storages: key of a storage in the archive -> parameter, state and dtype of the tensor that fills it.
        groups: the settings of each group, as stored; of its `params` only whether there are any.
        states: its states as tensors (`optimizer.state.0.exp_avg`) of a checkpoint that is this file alone; None where
            nobody knows where they lie.

    Source: torch.optim.Optimizer.state_dict; names in place of numbers: FullyShardedDataParallel.optim_state_dict
    """

    params: tuple[int | str, ...]
    settings: frozenset[str]
    shapes: dict[int | str, dict[str, tuple[int, ...]]]
    shapes_beside: tuple[tuple[int, ...], ...] = ()
    storages: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    groups: tuple[Mapping[Any, Any], ...] = ()
    states: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of the step that is neither metadata nor payload.

    Attributes:
        name: its path relative to the checkpoint, printable.
        family: what it holds (the families of `vocabulary.frameworks`), "" when its name says nothing.
        state: `read` and judged, `known` by its name and not judged, or `unknown`.
        step: the step that it says it was saved at, or how often a scheduler in it counted; None when it says none.
        folder_step: the step that the name of its folder must carry as well, None where another may stand there.
        optimizer: the state of an optimizer that it holds, None where it holds none or one of another form.
    """

    name: str
    family: str
    state: StepFileState
    size: int
    step: int | None = None
    folder_step: int | None = None
    optimizer: OptimizerFile | None = None


ProblemKind = Literal[
    "unsafe",
    "unreadable",
    "unread",
    "limit",
    "unsupported",
    "incomplete",
    "container",
    "note",
    "crashed",
    "unused",
    "view",
]


RULE_OF_PROBLEM = {
    "unsafe": "SAF001", "unreadable": "SAF002", "limit": "SAF003", "unsupported": "SAF004",
    "incomplete": "COM001", "container": "PAY013",
}  # fmt: skip
"""The rule that says what a loader could not take at face value, by the kind of problem."""
UNFINISHED = RULE_OF_PROBLEM["incomplete"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a loader could not take at face value; a SAF or COM rule turns it into a finding.

    Attributes:
        kind: one of `RULE_OF_PROBLEM`, or `unread` a warning of SAF002 that makes the verdict incomplete, `note` an
            info of SAF001, `crashed` LNT002 (made by the engine), `unused` LNT001 (made where ignores are applied),
            `view` LIV301 (made by `ckptlint live`).
        file: the file it is in, relative to the checkpoint.
        detail: lines shown below it (the opcodes of a refused call).
        fqn: the key concerned, if one is.
        blocks: whether the description of the tensors, or of a file's tensors, is missing because of it.
        outside_checkpoint: whether what is unsupported or unreadable is next to a checkpoint that loads without it.
        of_run: whether it is a fault of the run around a step, for which no step fails.
        of_empty_part: whether it says that a part's folder is empty, which the lost model of a step says better.
        unknown: the names it is about, where a user who knows their packages may vouch for them.
        lost_files: all files that are missing, by the ranks that wrote them.
    """

    kind: ProblemKind
    file: str
    message: str
    detail: tuple[str, ...] = ()
    hint: str = ""
    why: str = ""
    fqn: str | None = None
    blocks: bool = False
    outside_checkpoint: bool = False
    of_run: bool = False
    of_empty_part: bool = False
    unknown: tuple[str, ...] = ()
    lost_files: LostFiles = ()


class TokenFiles(NamedTuple):
    """What lies beside an export that knows tokens; nothing where files were not looked at."""

    generation: ModelConfig | None = None  # what transformers generates by
    highest: tuple[tuple[int, str], ...] = ()  # the highest ids of the tokenizer and their tokens, printable


class SaveTimes(NamedTuple):
    """When files of a checkpoint were written, in seconds since the epoch; 0 where nobody knows.

    Attributes:
        newest: the newest file of its folder.
        files: float64 [n], each of `Checkpoint.files`; empty where none is younger than `.metadata`, and on a store,
            which knows uploads alone.
        metadata: `.metadata`; 0 without one, and on a store.
    """

    newest: float = 0.0
    files: npt.NDArray[np.float64] = np.zeros(0)
    metadata: float = 0.0


_NO_TOKENS, _NO_TIMES = TokenFiles(), SaveTimes()


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """One checkpoint folder as the rules see it.

    Attributes:
        path: as the user gave it, printable.
        format: the dialect, as its row in `loaders.layouts` names it; `live` for a running job.
        writer: the oldest library that writes what was found (`torch >= 2.9`): a lower bound, not a fact.
        readable: whether the tensors were described at all; rules other than SAF and COM001 need it.
        partial_because: why the metadata describes only part of the save, or "".
        locates_bytes: whether offset and length of a record say where its bytes lie; not in the SAFETENSORS mode of
            torch's FileSystemWriter (>= 2.8), where all tensors of a file share one offset.
        declared: what the job said about itself, by canonical name (`config_fields.read_declared`).
        config: the configuration that a library builds the model from; None where none is with these tensors.
        declared_variant: the variant beside an export (`model.fp16.safetensors`) that has the dtype of `config`, or "".
        token_files: what lies beside an export that knows tokens.
        object_values: entry name -> content of the optimizer objects that describe their module (parameter groups,
            sharding type), one for each kind and module.
        run: the run folder that the step is in; None outside of one.
        claims: what entries of their own say of the step that was saved.
        step: path and number of the step that it is or is in, where its run was walked over; None elsewhere.
        before: the same part of the nearest older finished step of its run; None without one.
        changes: what its tensors are beside those of the step before; None where these were not read.
        step_files: the files of the step besides metadata and payload; empty where files were not looked at.
        index: what says in which safetensors file each key is; None without one.
        reference: what the user expects it to hold; None without `--expect`.
        not_looked_at: what could not be looked at without making the verdict incomplete, as sentences.
        param_groups: place and content of each group of parameters that an optimizer in a torch file keeps.
        payload: what the records say; None below depth `headers`.
        pairs: what tensors that follow from each other say of each other; None below depth `headers`.
        seal: what the saving job sealed; None without a seal, and below depth `data`.
        metadata_hash: BLAKE2b of `.metadata`, as a seal names it; "" without either.
        ranks: what the ranks of a running job hold; None for files.
        rank_files: the files of a checkpoint that is a set of torch files; None elsewhere.
        storages: in which storages of torch's archives the records lie; None where they are records of another kind.
        rank_findings: what the ranks found themselves for the rule that runs; the engine gives each rule its own.
    """

    path: str
    format: str
    title: str = ""
    writer: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: ObjectTable = field(default_factory=lambda: empty_objects())
    byte_objects: list[ByteObject] = field(default_factory=list)
    records: RecordTable = field(default_factory=lambda: empty_records())
    files: FileTable = field(default_factory=lambda: FileTable.of([]))
    save_plans: SavePlans | None = None
    common: CommonState | None = None
    declared: dict[str, Declared] = field(default_factory=dict)
    config: ModelConfig | None = None
    declared_variant: str = ""
    token_files: TokenFiles = _NO_TOKENS
    object_values: dict[str, Any] = field(default_factory=dict)
    run: RunFolder | None = None
    claims: tuple[StepClaim, ...] = ()
    step: tuple[str, int] | None = None
    before: Checkpoint | None = None
    changes: ChangeTable | None = None
    step_files: tuple[StepFile, ...] = ()
    index: WeightIndex | None = None
    topology: dict[str, AxisSize] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True
    partial_because: str = ""
    locates_bytes: bool = True
    metadata_file: str = ".metadata"
    reference: Reference | None = None
    not_looked_at: tuple[str, ...] = ()
    param_groups: tuple[tuple[str, Mapping[Any, Any]], ...] = ()
    payload: PayloadTable | None = None
    pairs: PairTable | None = None
    seal: Seal | None = None
    metadata_hash: str = ""
    times: SaveTimes = _NO_TIMES
    ranks: RankTable | None = None
    rank_files: RankFileSet | None = None
    storages: StorageTable | None = None
    rank_findings: tuple[RankFinding, ...] = ()
    facts: Facts = field(default_factory=Facts, init=False, repr=False)

    def __repr__(self) -> str:
        """One line: findings hold their checkpoint, and a traceback or a failed assertion prints every one of them."""
        return f"<Checkpoint {self.path}: {self.format}, {len(self.tensors)} tensors, {len(self.files)} files>"

    @property
    def is_torch_dist(self) -> bool:
        """Whether Megatron-Core's own planner wrote it: entries follow its key scheme, plans its dedup."""
        return self.format == "torch_dist"

    @property
    def has_megatron_names(self) -> bool:
        """Whether its model is named as Megatron-Core names it, and described by the arguments of its job."""
        return self.format in ("torch_dist", "megatron-legacy")

    @property
    def is_safetensors(self) -> bool:
        """Whether a record is the bare bytes of its tensor, described by the header of the file that it is in."""
        return self.format in ("safetensors", "dcp-safetensors")

    @property
    def is_export(self) -> bool:
        """Whether its files are those that a library loads a model from: safetensors, or whole files of torch.save."""
        return self.is_safetensors or self.format == "torch"

    @property
    def optimizers(self) -> list[Checkpoint]:
        """The states in files of an optimizer beside the tensors, one checkpoint for each optimizer."""
        files = (file.optimizer for file in self.step_files)
        return [optimizer.states for optimizer in files if optimizer is not None and optimizer.states is not None]

    @fact
    def sound_tensors(self) -> list[Tensor]:
        """The tensors that geometry rules can judge."""
        return [tensor for tensor in self.tensors.values() if tensor.is_sound]

    def problems_of(self, *kinds: ProblemKind) -> Iterator[Problem]:
        """The problems of these kinds, in the order in which they were found."""
        return (problem for problem in self.problems if problem.kind in kinds)

    @cached_property
    def is_sound(self) -> bool:
        """Whether geometry rules can judge every tensor; otherwise it is not known which are stored."""
        return all(tensor.is_sound for tensor in self.tensors.values())

    def common_value(self, name: str) -> Any:
        """An entry of the common state; None where there is none."""
        return None if self.common is None else self.common.values.get(name)

    def chunk_file(self, tensor: Tensor, row: int) -> str:
        """Name of the file that holds a chunk, or "" without a storage entry."""
        record = int(tensor.chunks.record[row])
        return "" if record < 0 else self.files.names[int(self.records.file[record])]

    def byte_range_of(self, record: int) -> tuple[str, int, int]:
        """File name, byte offset and byte length of a record."""
        table = self.records
        return self.files.names[int(table.file[record])], int(table.byte_offset[record]), int(table.byte_length[record])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all payload files that were looked at."""
        return sum(self.files.size[self.files.size > 0].tolist())


def with_optimizers(ckpt: Checkpoint, optimizers: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint with these in place of its `optimizers`, in their order."""
    rest = iter(optimizers)
    files = (
        replace(file, optimizer=replace(file.optimizer, states=next(rest)))
        if file.optimizer is not None and file.optimizer.states is not None
        else file
        for file in ckpt.step_files
    )
    return replace(ckpt, step_files=tuple(files))
