"""Megatron-LM's older form (`--ckpt-format torch`): for each model parallel rank a folder with a file of its own.

A file holds the rank's part of the model, with layers numbered from 0 in each pipeline stage, the arguments of the job,
and the optimizer: fp32 copies and moments by number, or (`distrib_optim.pt` beside it) in flat buffers.

Source:
    megatron/training/checkpointing.py (Megatron-LM core_v0.12 - core_v0.16), megatron.core.optimizer
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptlint.formats.torch_file import TorchFile
from ckptlint.loaders.common_state import read_configs
from ckptlint.loaders.rank_files.megatron_keys import (
    MODEL_FILES,
    OPTIMIZER_FILE,
    Axis,
    Place,
    Sizes,
    args_of,
    cut_axis,
    even_share,
    folder_of,
    grid,
    halves,
    is_expert,
    is_halved,
    layer_of,
    offsets_of,
    place_of,
    rank_folders,
    sizes_by_names,
    sizes_of,
    view,
    with_global_expert,
    with_layer,
)
from ckptlint.loaders.rank_files.onto import Columns, Part, damaged, read_file
from ckptlint.loaders.rank_files.plain import walked
from ckptlint.model import (
    Checkpoint,
    CommonState,
    FileState,
    FileTable,
    Misfit,
    OtherName,
    Problem,
    RankFile,
    RankFileSet,
    Said,
    StoredFile,
    empty_objects,
)
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import plural, printable, shape_text
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.config_fields import is_plain
from ckptlint.vocabulary.mesh import read_topology

_COMMON = ("args", "checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")
_COMPARED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "world_size",
    "data_parallel_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "group_query_attention", "num_query_groups", "kv_channels", "padded_vocab_size", "vocab_size",
    "make_vocab_size_divisible_by", "max_position_embeddings", "position_embedding_type", "normalization", "swiglu",
    "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_layer_freq", "qk_layernorm", "multi_latent_attention", "mtp_num_layers", "bf16", "fp16",
    "use_distributed_optimizer", "optimizer", "consumed_train_samples", "seed", "lr", "global_batch_size",
    "checkpoint_version",
)  # fmt: skip
"""What all ranks of a job are given alike."""
_STATES = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_HALF = ("bfloat16", "float16")  # of which the optimizer keeps copies in fp32
_ALIGNED = 64  # elements, to which the start of each parameter in a buffer is rounded up
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")  # stored with the model, and no parameters
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_SHOWN = 8

Shape = tuple[int, ...]


def read_legacy(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The ranks' files in a step's folder.

    Raises:
        AccessError: the operating system refused a read.
    """
    problems: list[Problem] = []
    ranks, stored, files = _read_all(folder, look_at_files, problems)
    sizes, source = _sizes(ranks)
    places = {rank.folder: place_of(rank.folder, sizes) for rank in ranks}
    outside = [rank for rank in ranks if places[rank.folder] is None]
    if outside:
        problems.append(_leftover(outside, sizes))
    reading = _Reading(sizes)
    for rank in ranks:
        if (place := places[rank.folder]) is not None and rank.model is not None:
            reading.ranks[place] = rank
    reading.judge()
    lost = _lost(sizes, ranks)
    used = list(reading.ranks.values())
    common = None
    if used:
        first = used[0]
        values = {name: first.model.root[name] for name in _COMMON if first.model and name in first.model.root}
        common = CommonState(first.label, values)
    declared, config, config_problems = read_configs(folder, common)
    unread = sum(not file.is_read for file in files)
    short = len(lost) + unread + reading.left_out
    tensors, records, storages = reading.columns.made()
    labels = [file.name for file in files]
    if not used:
        problems = [replace(problem, blocks=True) for problem in problems] or [_no_models(labels)]
    return Checkpoint(
        path=folder.display,
        format="megatron-legacy",
        tensors=tensors,
        records=records,
        storages=storages,
        files=FileTable.of(stored),
        common=common,
        declared=declared,
        config=config,
        topology=read_topology(declared, empty_objects(), None),
        problems=problems + reading.notes + config_problems,
        readable=bool(used),
        partial=f"{short} of {len(files) + len(lost)} rank files are missing or unusable" if short else "",
        metadata_file=labels[0] if len(labels) == 1 else f"{labels[0]} .. {labels[-1]}",
        rank_files=RankFileSet(
            tuple(files),
            (*files, *lost),
            f"{_grid_text(sizes)} in {source}",
            tuple(reading.disagreements),
            tuple(reading.misfits),
            tuple(reading.other_names),
        ),
    )


def _grid_text(sizes: Sizes) -> str:
    axes = [("tp", sizes.tp), ("pp", sizes.pp)] + ([("ep", sizes.ep)] if sizes.ep > 1 else [])
    return " x ".join(f"{axis} {size}" for axis, size in axes)


# ---------------------------------------------------------------- which files there are


@dataclass(slots=True)
class _Rank:
    """The folder of a rank.

    Attributes:
        folder: its name.
        label: the path of its model file, printable.
        number: of that among the payload files.
        model: what that holds, None where it cannot be read.
        optimizer: the number and the content of `distrib_optim.pt`.
        has_model, has_optimizer: whether the files are there, read or not.
    """

    folder: str
    label: str = ""
    number: int = -1
    model: TorchFile | None = None
    optimizer: tuple[int, TorchFile] | None = None
    optimizer_label: str = ""
    has_model: bool = False
    has_optimizer: bool = False

    @property
    def args(self) -> dict[str, Any]:
        """The arguments in its file."""
        return args_of(self.model.root) if self.model is not None else {}


def _read_all(
    folder: Folder, look_at_files: bool, problems: list[Problem]
) -> tuple[list[_Rank], list[StoredFile], list[RankFile]]:
    ranks: list[_Rank] = []
    stored: list[StoredFile] = []
    files: list[RankFile] = []
    for name in rank_folders(folder):
        rank = _Rank(name)
        there = folder.sub(name).files_beside()
        for inner in (*MODEL_FILES, OPTIMIZER_FILE):
            if inner not in there or (rank.has_model and inner in MODEL_FILES):
                continue
            path = f"{name}/{inner}"
            label = printable(path)
            state, size = folder.look_at(path)
            shown: FileState = state if look_at_files else "unchecked"
            stored.append(StoredFile(label, path, size if look_at_files else None, shown, True))
            found = read_file(folder, path, problems) if state in READABLE else None
            is_model = inner in MODEL_FILES
            if found is not None and not (_is_state(found.root) if is_model else _is_optimizer(found.root)):
                problems.append(
                    damaged(label, f"{label} holds no state of {'a model' if is_model else 'an optimizer'}")
                )
                found = None
            files.append(RankFile(label, "model" if is_model else "optimizer", {}, found is not None))
            if is_model:
                rank.label, rank.number, rank.model, rank.has_model = label, len(stored) - 1, found, True
            else:
                rank.has_optimizer, rank.optimizer_label = True, label
                rank.optimizer = None if found is None else (len(stored) - 1, found)
        ranks.append(rank)
    return ranks, stored, files


def _is_state(root: Any) -> bool:
    return isinstance(root, dict) and any(isinstance(root.get(name), dict) for name in ("model", "model0"))


def _is_optimizer(root: Any) -> bool:
    return isinstance(root, (dict, list))


def _sizes(ranks: list[_Rank]) -> tuple[Sizes, str]:
    """The parallel sizes of the job and where they are from: those whose grid is whole, else those most files give."""
    said = [(rank.folder, found) for rank in ranks if (found := sizes_of(rank.args)) is not None]
    if not said:
        return sizes_by_names([rank.folder for rank in ranks]), "the names of the folders"
    count = Counter(sizes for _, sizes in said)
    there = {rank.folder for rank in ranks if rank.has_model}

    def weight(sizes: Sizes) -> tuple[bool, int]:
        return set(grid(sizes)) <= there, count[sizes]

    return max(count, key=weight), "the arguments of the job"


def _no_models(labels: list[str]) -> Problem:
    sentence = f"no rank has a {MODEL_FILES[0]} beside {', '.join(labels[:_SHOWN])}"
    why = "that file holds each rank's model: the save never finished, or the copy left it out"
    return Problem("incomplete", labels[0], sentence, why=why, blocks=True)


def _leftover(outside: list[_Rank], sizes: Sizes) -> Problem:
    names = [rank.folder for rank in outside]
    return Problem(
        "note",
        names[0],
        f"ckptlint did not read the folders of ranks beyond {_grid_text(sizes)}: {', '.join(names[:_SHOWN])}",
        why="they are probably left from another job's save into this folder",
    )


def _lost(sizes: Sizes, ranks: list[_Rank]) -> list[RankFile]:
    """The files of the grid that are not there."""
    there = {rank.folder: rank for rank in ranks}
    usual = Counter(rank.label.rpartition("/")[2] for rank in ranks if rank.has_model)
    model = usual.most_common(1)[0][0] if usual else MODEL_FILES[0]
    lost = []
    for name, place in grid(sizes).items():
        axes = {"tp": sizes.tp, "pp": sizes.pp, "ep": sizes.ep}
        numbers = {axis: getattr(place, axis) for axis, size in axes.items() if size > 1}
        rank = there.get(name)
        if rank is None or not rank.has_model:
            lost.append(RankFile(f"{name}/{model}", "model", numbers))
        if rank is not None and not rank.has_optimizer and _needs_optimizer(rank):
            lost.append(RankFile(f"{name}/{OPTIMIZER_FILE}", "optimizer", numbers))
    return lost


def _needs_optimizer(rank: _Rank) -> bool:
    """Whether a rank's model file says that the states of its optimizer lie beside it."""
    root = rank.model.root if rank.model is not None else {}
    return rank.args.get("use_distributed_optimizer") is True and bool(root.get("optimizer"))


# ---------------------------------------------------------------- the ranks against each other


@dataclass(slots=True)
class _Held:
    """What one rank holds of a tensor."""

    place: Place
    tensor: StoredTensor
    number: int
    found: TorchFile
    label: str


Held = dict[str, list[_Held]]


@dataclass(slots=True)
class _Reading:
    """What the files of all ranks say, held against each other."""

    sizes: Sizes
    ranks: dict[Place, _Rank] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)
    disagreements: list[Said] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    other_names: list[OtherName] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    left_out: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    def judge(self) -> None:
        """Fill everything but `ranks`, from which those that cannot be used are taken out."""
        self._arguments()
        self._iterations()
        self._names()
        self.args = next((rank.args for rank in self.ranks.values()), {})
        offsets = self._offsets()
        model: Held = defaultdict(list)
        states: dict[str, Held] = {what: defaultdict(list) for what in _STATES.values()}
        short: list[Misfit] = []
        for place, rank in self.ranks.items():
            own = self._tensors(place, rank, offsets)
            for key, tensor in own.items():
                model[key].append(_Held(place, tensor, rank.number, rank.model, rank.label))  # type: ignore[arg-type]
            self._optimizer(place, rank, own, states, short)
        self._tied(model)
        for key, held in model.items():
            self._add(key, key, held)
        # of a job that trains or saves a part only, all ranks are so
        if len({item.file for item in short}) < len(self.ranks):
            self.misfits += short
        self._states(states)

    def _states(self, states: Mapping[str, Held]) -> None:
        """Add the states of the optimizer where each of them is whole and certain; else rules would count a part."""
        if self.unplaced and not self.misfits:
            names = list(dict.fromkeys(self.unplaced))
            sentence = f"ckptlint did not judge the optimizer state in {', '.join(names[:_SHOWN])}"
            why = "the file does not say which state belongs to which parameter"
            self.notes.append(Problem("note", names[0], sentence, why=why))
        whole = [self._is_whole(key, held) for found in states.values() for key, held in found.items()]
        if self.unplaced or not all(whole):
            return
        for what, found in states.items():
            for key, held in found.items():
                self._add(f"optimizer.state.{what}.{key}", key, held)

    def _is_whole(self, key: str, held: list[_Held]) -> bool:
        """Whether all parts of a tensor are there, in one shape."""
        ways = self.sizes.etp if is_expert(key) else self.sizes.tp
        parts = {item.place.etp if is_expert(key) else item.place.tp for item in held}
        return len(parts) == ways and len({item.tensor.shape for item in held}) == 1

    def _disagree(
        self, what: str, says: Mapping[str, Iterable[str]], fqns: Iterable[str] = (), sure: bool = True
    ) -> None:
        groups = tuple((value, tuple(files)) for value, files in says.items())
        self.disagreements += [Said(what, groups, printable(fqn)) for fqn in fqns or [""]]

    def _arguments(self) -> None:
        """What the arguments of all ranks must say alike; ranks of other parallel sizes are left out."""
        said = {
            place: {
                name: value
                for name, value in ({"checkpoint_version": _root(rank).get("checkpoint_version")} | rank.args).items()
                if name in _COMPARED and (is_plain(value) or value is None)
            }
            for place, rank in self.ranks.items()
            if rank.args
        }
        names = [
            name
            for name in _COMPARED
            if len({repr(own[name]) for own in said.values() if name in own}) > 1
            and all(name in own for own in said.values())
        ]
        if not names:
            return
        says: dict[str, list[str]] = defaultdict(list)
        for place, own in said.items():
            shown = ", ".join(f"{name} {printable(str(own[name]))}" for name in names[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            says[shown + more].append(self.ranks[place].label)
        self._disagree("set of arguments", says)
        for place in list(said):
            if (own_sizes := sizes_of(self.ranks[place].args)) is not None and own_sizes != self.sizes:
                del self.ranks[place]
                self.left_out += 1

    def _iterations(self) -> None:
        says: dict[str, list[str]] = defaultdict(list)
        for rank in self.ranks.values():
            if type(step := _root(rank).get("iteration")) is int:
                says[f"{step:,}"].append(rank.label)
        if len(says) > 1:
            self._disagree("step", says)

    def _names(self) -> None:
        """Folders that hold the file of another rank: by the rank in its arguments, or by its bytes."""
        world, writers = 0, {}
        for place, rank in self.ranks.items():
            if type(number := rank.args.get("rank")) is int and number >= 0:
                writers[place] = number
                said = rank.args.get("world_size")
                world = said if type(said) is int else 0
        sums = {place: _checksums(rank) for place, rank in self.ranks.items()}
        first: dict[tuple[int, ...], Place] = {}
        for place, rank in list(self.ranks.items()):
            own = sums[place]
            if own and (other := first.setdefault(own, place)) is not place:
                inside = self.ranks[other].folder
                self.other_names.append(OtherName(rank.label, inside, self.ranks[other].label))
                del self.ranks[place]
                self.left_out += 1
                writers.pop(place, None)
        if len(writers) < 2 or len(set(writers.values())) < len(writers) or _has_ranks_of_encoders(self.ranks.values()):
            return  # a converter wrote them all, or ranks are counted otherwise
        for place, number in writers.items():
            tp, pp = number % self.sizes.tp, place.pp
            per_stage = world // self.sizes.pp
            if per_stage and world % self.sizes.pp == 0 and not self.ranks[place].args.get("use_tp_pp_dp_mapping"):
                pp = number // per_stage
            if (tp, pp) != (place.tp, place.pp):
                inside = folder_of(Place(tp, pp, place.ep), self.sizes)
                self.other_names.append(OtherName(self.ranks[place].label, f"rank {number}, {inside}"))

    # ------------------------------------------------------------ names

    def _offsets(self) -> dict[str, dict[tuple[int, int], int]]:
        """Block of layers -> (chunk, stage) -> layers before it."""
        counts: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        for place, rank in self.ranks.items():
            for chunk, key, _ in _chunks(rank):
                if (found := layer_of(key)) is not None:
                    block, number = found
                    own = counts[block]
                    own[chunk, place.pp] = max(own.get((chunk, place.pp), 0), number + 1)
        share = even_share(self.args, self.sizes)
        return {
            block: offsets_of(own, 0 if "mtp" in block else share, self.sizes) if "mtp" not in block else {}
            for block, own in counts.items()
        }

    def _tensors(
        self, place: Place, rank: _Rank, offsets: dict[str, dict[tuple[int, int], int]]
    ) -> dict[str, StoredTensor]:
        """The tensors of a rank under the names that they have in the whole model."""
        experts = self.args.get("num_experts")
        local = experts // self.sizes.ep if type(experts) is int and experts % self.sizes.ep == 0 else 0
        own = {}
        for chunk, key, tensor in _chunks(rank):
            if (found := layer_of(key)) is not None:
                block, number = found
                key = with_layer(key, number + offsets.get(block, {}).get((chunk, place.pp), 0))
            own[with_global_expert(key, place, local)] = tensor
        return own

    # ------------------------------------------------------------ optimizer

    def _optimizer(
        self, place: Place, rank: _Rank, own: dict[str, StoredTensor], states: dict[str, Held], short: list[Misfit]
    ) -> None:
        """The states of a rank's optimizer, under the names of the parameters where it is certain whose they are."""
        keys = [key for key in own if not key.rpartition(".")[2].startswith(_BUFFERS)]
        saved = _root(rank).get("optimizer")
        parts = saved if isinstance(saved, list) else [saved]
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get("fp32_from_fp16_params"), list):
                self._copies(place, rank, own, keys, part, states, short)
            elif isinstance(part, dict) and part.get("state"):  # of a job in fp32
                self.unplaced.append(rank.label)
        if rank.optimizer is not None:
            self._buffers(place, rank, own, keys, states, short)

    def _copies(
        self, place: Place, rank: _Rank, own: dict[str, StoredTensor], keys: list[str], part: dict[Any, Any],
        states: dict[str, Held], short: list[Misfit],
    ) -> None:  # fmt: skip
        """fp32 copies in groups, and the moments of each by number.

        Source:
            megatron.core.optimizer.Float16OptimizerWithFloat16Params.state_dict; groups are made by weight decay, which
            biases and vectors do not have, and keep the order of the model
        """
        inner = part.get("optimizer")
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        moments = inner.get("state") if isinstance(inner, dict) else None
        copies = part["fp32_from_fp16_params"]
        if not isinstance(groups, list) or not isinstance(moments, dict) or len(groups) != len(copies):
            return
        number = 0
        for group, tensors in zip(groups, copies, strict=True):
            if not isinstance(group, dict) or not isinstance(tensors, list):
                return
            decays, of_experts = bool(group.get("wd_mult", 1.0)), bool(group.get("is_expert_parallel"))
            chosen = [
                key
                for key in keys
                if own[key].dtype in _HALF
                and (len(own[key].shape) > 1 and not key.endswith(".bias")) is decays
                and (is_expert(key) and self.sizes.ep > 1) is of_experts
            ]
            shapes = [tensor.shape if isinstance(tensor, StoredTensor) else None for tensor in tensors]
            is_known = shapes == [own[key].shape for key in chosen]
            if not is_known:
                self.unplaced.append(rank.label)
            if not is_known and len(shapes) < len(chosen):
                what = f"fp32 copies of {plural(len(shapes), 'parameter')}"
                short.append(
                    Misfit("", rank.label, what, f"{len(chosen):,}", "the model beside them has as many", "count")
                )
            for position, tensor in enumerate(tensors):
                state = moments.get(number + position)
                found = {"fp32_param": tensor} | (
                    {what: state.get(what) for what in ("exp_avg", "exp_avg_sq")} if isinstance(state, dict) else {}
                )
                for what, value in found.items():
                    if not isinstance(value, StoredTensor):
                        continue
                    if isinstance(tensor, StoredTensor) and value.shape != tensor.shape:
                        because = f"the fp32 copy of parameter {number + position} beside it has this shape"
                        at = f"{what} of parameter {number + position}"
                        self.misfits.append(
                            Misfit(at, rank.label, shape_text(value.shape), shape_text(tensor.shape), because, "state")
                        )
                    elif is_known:
                        states[what][chosen[position]].append(
                            _Held(place, value, rank.number, rank.model, rank.label)  # type: ignore[arg-type]
                        )
            number += len(tensors)

    def _buffers(
        self, place: Place, rank: _Rank, own: dict[str, StoredTensor], keys: list[str], states: dict[str, Held],
        short: list[Misfit],
    ) -> None:  # fmt: skip
        """Flat buffers, in which the parameters lie as they do in the buffer that the model's tensors are views of.

        Source:
            megatron.core.optimizer.DistributedOptimizer.get_parameter_state_dp_zero,
            megatron.core.distributed.param_and_grad_buffer
        """
        assert rank.optimizer is not None
        number, found = rank.optimizer
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for key in keys:
            groups[own[key].dtype, own[key].key].append(key)
        shared = [
            (dtype, names) for (dtype, _), names in groups.items() if own[names[0]].length > prod(own[names[0]].shape)
        ]
        for dtype, entry in _entries(found.root):
            told = entry.get("numel_unpadded")
            flats = {
                what: tensor for what, tensor in entry.items() if what in _STATES and isinstance(tensor, StoredTensor)
            }
            for what, tensor in flats.items():
                if type(told) is int and tensor.shape != (told,):
                    self.misfits.append(
                        Misfit(
                            f"the values of {what}",
                            rank.optimizer_label,
                            f"{prod(tensor.shape):,}",
                            f"{told:,}",
                            "numel_unpadded beside it says so",
                            "length",
                        )
                    )
            if type(told) is not int:
                continue
            starts = None
            for names in [names for own_dtype, names in shared if own_dtype == dtype]:
                if (starts := _starts([own[name] for name in names], told)) is not None:
                    shared.remove((dtype, names))
                    break
            if starts is None or any(flat.shape != (told,) for flat in flats.values()):
                self.unplaced.append(rank.optimizer_label)
                continue
            for name, start in zip(names, starts, strict=True):
                for what, flat in flats.items():
                    part = view(flat, start, own[name].shape)
                    if part is not None:
                        states[_STATES[what]][name].append(_Held(place, part, number, found, rank.optimizer_label))
        self._sums(rank, own, keys, short)

    def _sums(self, rank: _Rank, own: dict[str, StoredTensor], keys: list[str], short: list[Misfit]) -> None:
        """All buffers of a dtype together are as long as the parameters, with the gaps that alignment leaves."""
        assert rank.optimizer is not None
        held: Counter[str] = Counter()
        for dtype, entry in _entries(rank.optimizer[1].root):
            held[dtype] += entry["numel_unpadded"] if type(entry.get("numel_unpadded")) is int else 0
        root = rank.optimizer[1].root
        if isinstance(root, list) and any(part is None for part in root):
            return  # another rank has gathered a part of it
        for dtype, numel in held.items():
            sizes = [prod(own[key].shape) for key in keys if own[key].dtype == dtype]
            least, most = sum(sizes), sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
            if sizes and not least <= numel <= most:
                expected = f"{least:,}" if least == most else f"{least:,} to {most:,}"
                because = f"the {plural(len(sizes), 'parameter')} of {dtype} in {rank.label} have as many"
                item = Misfit(
                    f"the buffers of {dtype} parameters",
                    rank.optimizer_label,
                    f"{numel:,}",
                    expected,
                    because,
                    "length",
                )
                short.append(item)

    # ------------------------------------------------------------ placing

    def _tied(self, model: Held) -> None:
        """The head of the last stage has the bytes of the embedding that it shares with the first."""
        if self.args.get("untie_embeddings_and_output_weights") is not False or self.sizes.pp == 1:
            return
        for head in model.get(_HEAD, ()):
            same = [item for item in model.get(_EMBEDDING, ()) if item.place.tp == head.place.tp]
            if same and same[0].tensor.shape == head.tensor.shape:
                self._compare(_HEAD, [same[0], head], "content of copies", sure=True)

    def _add(self, fqn: str, key: str, held: list[_Held]) -> None:
        """Add the parts of a tensor, each where it lies in the whole where that is certain."""
        expert = is_expert(key)
        ways = self.sizes.etp if expert else self.sizes.tp
        axis = cut_axis(key)
        by_part: dict[int, list[_Held]] = defaultdict(list)
        for item in held:
            by_part[item.place.etp if expert else item.place.tp].append(item)
        first = held[0].tensor
        shapes = {item.tensor.shape for item in held}
        dtypes: dict[str, list[str]] = defaultdict(list)
        for item in held:
            dtypes[item.tensor.dtype].append(item.label)
        if len(dtypes) > 1:
            self._disagree("dtype", dtypes, [fqn])
        if axis == "unknown" and ways > 1:
            axis = _told_by_bytes(held)
        if ways == 1 or axis == "whole" or axis == "unknown" or not first.shape:
            if axis != "unknown" and len(shapes) > 1:
                self._misfit(fqn, held)
            elif axis != "unknown" and fqn == key:
                self._compare(fqn, held)
            self._whole(fqn, held, is_placed=len(shapes) == 1, is_cut=axis == "unknown" and len(held) > 1)
            return
        assert isinstance(axis, int)
        if axis >= len(first.shape):
            self._whole(fqn, held, is_placed=False)
            return
        is_sound = len(shapes) == 1 and set(by_part) == set(range(ways))
        if len(shapes) > 1:
            self._misfit(fqn, held)
        shape = tuple(size * ways if i == axis else size for i, size in enumerate(first.shape))
        for part in sorted(by_part):
            for copy, item in enumerate(by_part[part]):
                placed = is_sound and copy == 0
                cut = axis == 0 and is_halved(key, self.args) and item.tensor.shape[0] % 2 == 0 and placed
                pieces = list(halves(item.tensor)) if cut else [item.tensor]
                for half, piece in enumerate(pieces):
                    begin = part * piece.shape[axis] + (half * shape[axis] // 2 if cut else 0)
                    offsets = tuple(begin if i == axis else 0 for i in range(len(shape)))
                    self._part(fqn, shape, offsets if placed else None, piece, item)

    def _whole(self, fqn: str, held: list[_Held], is_placed: bool, is_cut: bool = False) -> None:
        """Add a tensor as its first rank holds it.

        Args:
            is_cut: whether other ranks may hold other parts, in an order that is not known, so that its shape tells
                nothing of the whole.
        """
        for copy, item in enumerate(held):
            shape = held[0].tensor.shape
            offsets = (0,) * len(shape) if is_placed and copy == 0 else None
            self._part(fqn, shape, offsets, item.tensor, item, is_cut)

    def _part(
        self, fqn: str, shape: Shape, offsets: Shape | None, tensor: StoredTensor, item: _Held, is_cut: bool = False
    ) -> None:
        place = item.found.storages.get(tensor.key)
        self.columns.parts.append(Part(fqn, tensor.dtype, shape, offsets, tensor, item.number, place, is_cut))

    def _misfit(self, fqn: str, held: list[_Held]) -> None:
        """Parts of other shapes than most ranks have; without a majority, that they disagree."""
        count = Counter(item.tensor.shape for item in held)
        usual, most = count.most_common(1)[0]
        if list(count.values()).count(most) > 1:
            says: dict[str, list[str]] = defaultdict(list)
            for item in held:
                says[shape_text(item.tensor.shape)].append(item.label)
            self._disagree("local shape", says, [fqn])
            return
        for item in held:
            if item.tensor.shape != usual:
                because = f"{plural(most, 'other rank')} {'holds' if most == 1 else 'hold'} that shape"
                self.misfits.append(
                    Misfit(printable(fqn), item.label, shape_text(item.tensor.shape), shape_text(usual), because)
                )

    def _compare(self, fqn: str, held: list[_Held], what: str = "content of other meshes", sure: bool = False) -> None:
        """Copies on several ranks have equal checksums where the file has one for each."""
        says: dict[str, list[str]] = defaultdict(list)
        for item in held:
            place = item.found.storages.get(item.tensor.key)
            if place is not None and place.crc and item.tensor.extent == item.tensor.length:
                says[f"CRC-32 {place.crc:08x}"].append(item.label)
        if len(says) > 1:
            self._disagree(what, says, [fqn], sure)


# ---------------------------------------------------------------- one rank


def _has_ranks_of_encoders(ranks: Iterable[_Rank]) -> bool:
    """Whether the first ranks are those of an encoder, with parallel sizes of its own."""
    names = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
    return any(rank.args.get(name) for rank in ranks for name in names)


def _root(rank: _Rank) -> dict[Any, Any]:
    return rank.model.root if rank.model is not None else {}


def _chunks(rank: _Rank) -> Iterator[tuple[int, str, StoredTensor]]:
    """Chunk, key and tensor of a rank's model, without extra states; several chunks under interleaved pipelining."""
    root = _root(rank)
    names = ["model"] if isinstance(root.get("model"), dict) else []
    while not names or names[-1] != "model":
        if not isinstance(root.get(f"model{len(names)}"), dict):
            break
        names.append(f"model{len(names)}")
    for chunk, name in enumerate(names):
        for key, value in walked(root[name], levels=6):
            if isinstance(value, StoredTensor) and not key.endswith("_extra_state"):
                yield chunk, key, value


def _checksums(rank: _Rank) -> tuple[int, ...]:
    """The checksums of the storages that the rank's matrices lie in; () where they tell nothing.

    Ranks whose matrices are all alike hold what they were initialised with, a constant.
    """
    if rank.model is None:
        return ()
    keys = dict.fromkeys(tensor.key for _, _, tensor in _chunks(rank) if len(tensor.shape) > 1)
    found = [place.crc for key in keys if (place := rank.model.storages.get(key)) is not None]
    return tuple(found) if found and all(found) and (len(found) == 1 or 2 * len(set(found)) > len(found)) else ()


def _entries(root: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(dtype of the parameters, buffer) of a `distrib_optim.pt`; a list holds one dict for each optimizer."""
    for part in root if isinstance(root, list) else [root]:
        for buffers in part.values() if isinstance(part, dict) else ():
            for dtypes, entry in buffers.items() if isinstance(buffers, dict) else ():
                if isinstance(entry, dict):
                    dtype = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
                    yield str(dtype), entry


def _starts(tensors: list[StoredTensor], numel: int) -> list[int] | None:
    """Where tensors that are views of one buffer start in it once the gaps between its buckets are gone.

    None where that is not certain: more than one bucket, and a parameter that does not end at a multiple of 64.
    """
    ends = [tensor.offset + prod(tensor.shape) for tensor in tensors]
    if max(ends) == numel:
        return [tensor.offset for tensor in tensors]
    order = sorted(range(len(tensors)), key=lambda i: tensors[i].offset)
    counts = [prod(tensors[i].shape) for i in order]
    if sum(counts) != numel or any(count % _ALIGNED for count in counts[:-1]):
        return None
    starts, at = [0] * len(tensors), 0
    for i, count in zip(order, counts, strict=True):
        starts[i] = at
        at += count
    return starts


def _told_by_bytes(held: list[_Held]) -> Axis:
    """The axis of a parameter of unknown name: `whole` where all ranks hold the same bytes."""
    if len({item.tensor.shape for item in held}) == 1:
        sums = {place.crc if (place := item.found.storages.get(item.tensor.key)) else 0 for item in held}
        return "whole" if len(sums) == 1 and 0 not in sums else "unknown"
    return "unknown"
