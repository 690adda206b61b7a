"""Megatron-LM's older form (`--ckpt-format torch`): for each model parallel rank a folder with a file of its own.

A file holds the rank's part of the model, with layers numbered from 0 in each pipeline stage, the arguments of the job,
and the optimizer: fp32 copies and moments by number, or (`distrib_optim.pt` beside it) in flat buffers.

Source: megatron/training/checkpointing.py (Megatron-LM core_v0.12 - core_v0.16), megatron.core.optimizer
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, takewhile
from math import prod
from typing import Any, NamedTuple

from ckptlint.grouping import grouped
from ckptlint.loaders.optimizer_state import param_groups_in
from ckptlint.loaders.rank_files.megatron_keys import (
    MODEL_FILES,
    OPTIMIZER_FILE,
    Axis,
    GridCoordinate,
    Sizes,
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
from ckptlint.loaders.rank_files.statements import Statements, checksum, checksums
from ckptlint.loaders.readers.common_state import read_configs
from ckptlint.loaders.readers.plain import walked
from ckptlint.loaders.readers.torch_files import Columns, OpenedFile, SetFiles, is_dict
from ckptlint.model import Checkpoint, CommonState, Misfit, Problem, RankFile, empty_objects
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import first_names, plural, printable, shape_text, verb
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.config_fields import attributes, is_scalar
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
"""Arguments that are equal on all ranks of a job."""
_STATES = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_HALF = ("bfloat16", "float16")  # dtypes of weights with an fp32 copy in the optimizer
_ALIGNED = 64  # elements, to which the start of each parameter in a buffer is rounded up
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")  # stored with the model, and no parameters
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_ENCODERS = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")  # with ranks of their own
_SHOWN = 8


def read_legacy(folder: Folder, look_at_files: bool) -> Checkpoint:
    """The ranks' files in a step's folder; raises AccessError where a read is refused."""
    files = SetFiles(folder, look_at_files)
    ranks = [_opened(files, name) for name in rank_folders(folder)]
    sizes, source = _sizes(ranks)
    axes = [("tp", sizes.tp), ("pp", sizes.pp), *([("ep", sizes.ep)] if sizes.ep > 1 else [])]
    grid_text = " x ".join(f"{axis} {size}" for axis, size in axes)
    coordinates = {rank.folder: place_of(rank.folder, sizes) for rank in ranks}
    if outside := [rank.folder for rank in ranks if coordinates[rank.folder] is None]:
        beyond = ", ".join(outside[:_SHOWN])
        sentence = f"ckptlint did not read the folders of ranks beyond {grid_text}: {beyond}"
        why = "they are probably left from another job's save into this folder"
        files.problems.append(Problem("note", outside[0], sentence, why=why))
    placed = ((coordinates[rank.folder], rank) for rank in ranks if rank.model is not None)
    known = {coordinate: rank for coordinate, rank in placed if coordinate is not None}
    reader = _RankReader(sizes, {**known})
    reader.read()
    for i, file in enumerate(files.files):
        if (coordinate := coordinates[file.name.rpartition("/")[0]]) is not None:
            files.files[i] = replace(file, numbers=_numbers(coordinate, sizes))
    rank_files = reader.statements.of(files.files, {f"{grid_text} in {source}": [*_expected(sizes, ranks)]})
    lost = sum(map(len, rank_files.missing.values()))
    used = next((rank.model for rank in reader.ranks.values() if rank.model is not None), None)
    stated = used.torch_file.root if used else {}
    common = CommonState(used.label, {name: stated[name] for name in _COMMON if name in stated}) if used else None
    declared, config, config_problems = read_configs(folder, common)
    short = lost + sum(not file.is_read for file in files.files) + len(known) - len(reader.ranks)
    labels = [file.name for file in files.files]
    partial = f"{short} of {len(labels) + lost} rank files {verb(short, 'is')} missing or unusable" if short else ""
    problems = files.problems
    if used is None:
        sentence = f"no rank has a {MODEL_FILES[0]} beside {', '.join(labels[:_SHOWN])}"
        why = "that file holds each rank's model: the save never finished, or the copy left it out"
        problems = problems or [Problem("incomplete", labels[0], sentence, why=why)]
        problems = [replace(problem, blocks=True) for problem in problems]
    return files.checkpoint(
        reader.columns,
        rank_files,
        format="megatron-legacy",
        common=common,
        declared=declared,
        config=config,
        topology=read_topology(declared, empty_objects(), None),
        problems=problems + reader.notes + config_problems,
        readable=used is not None,
        partial_because=partial,
        metadata_file=labels[0] if len(labels) == 1 else f"{labels[0]} .. {labels[-1]}",
    )


@dataclass(slots=True)
class _Rank:
    """The folder of a rank, Megatron's files in it, and what those hold that could be read."""

    folder: str
    there: list[str]
    model: OpenedFile | None = None
    optimizer: OpenedFile | None = None

    @property
    def root(self) -> dict[Any, Any]:
        """The value of its model file; {} without one."""
        return self.model.torch_file.root if self.model is not None else {}

    @property
    def label(self) -> str:
        return self.model.label if self.model is not None else ""

    @property
    def args(self) -> dict[str, Any]:
        return attributes(self.root.get("args"))


def _opened(files: SetFiles, name: str) -> _Rank:
    there = files.folder.sub(name).files_beside()
    rank = _Rank(name, [inner for inner in (*MODEL_FILES, OPTIMIZER_FILE) if inner in there])
    if rank.there and rank.there[0] in MODEL_FILES:
        rank.there = [inner for inner in rank.there if inner in (rank.there[0], OPTIMIZER_FILE)]
        rank.model = files.open(f"{name}/{rank.there[0]}", "model", {}, "state of a model", _is_state)
    if OPTIMIZER_FILE in rank.there:
        path, holds = f"{name}/{OPTIMIZER_FILE}", "state of an optimizer"
        rank.optimizer = files.open(path, "optimizer", {}, holds, lambda root: isinstance(root, (dict, list)))
    return rank


def _is_state(root: Any) -> bool:
    return is_dict(root) and any(is_dict(root.get(name)) for name in ("model", "model0"))


def _sizes(ranks: list[_Rank]) -> tuple[Sizes, str]:
    """The parallel sizes of the job and their source: sizes with a complete grid first, then the most frequent."""
    stated = [job_sizes for rank in ranks if (job_sizes := sizes_of(rank.args)) is not None]
    if not stated:
        return sizes_by_names([rank.folder for rank in ranks]), "the names of the folders"
    # A folder may hold ranks of two jobs. Sizes whose whole grid is here win over more frequent ones: leftovers of a
    # larger job can outnumber the ranks of the one that saved last.
    times = Counter(stated)
    there = {rank.folder for rank in ranks if rank.there and rank.there[0] in MODEL_FILES}
    return max(times, key=lambda sizes: (set(grid(sizes)) <= there, times[sizes])), "the arguments of the job"


def _numbers(place: GridCoordinate, sizes: Sizes) -> dict[str, int]:
    """The numbers of a rank along each axis with more than one rank."""
    return {axis: getattr(place, axis) for axis in ("tp", "pp", "ep") if getattr(sizes, axis) > 1}


def _expected(sizes: Sizes, ranks: list[_Rank]) -> Iterator[RankFile]:
    there = {rank.folder: rank for rank in ranks}
    usual = Counter(rank.there[0] for rank in ranks if rank.there and rank.there[0] in MODEL_FILES)
    model = usual.most_common(1)[0][0] if usual else MODEL_FILES[0]
    for name, place in grid(sizes).items():
        numbers, rank = _numbers(place, sizes), there.get(name) or _Rank(name, [])
        file = next((inner for inner in rank.there if inner in MODEL_FILES), model)
        yield RankFile(f"{name}/{file}", "model", numbers)
        is_apart = rank.args.get("use_distributed_optimizer") is True and rank.root.get("optimizer")
        if OPTIMIZER_FILE in rank.there or is_apart:
            yield RankFile(f"{name}/{OPTIMIZER_FILE}", "optimizer", numbers)


class _RankTensor(NamedTuple):
    place: GridCoordinate
    tensor: StoredTensor
    file: OpenedFile


def _highest_step(rank: _Rank) -> int | None:
    """The step of the optimizer's groups, of which OPT014 compares those of one rank; None where they count none."""
    groups = [group for _, group in param_groups_in("", rank.root.get("optimizer")) if group.get("params") != []]
    return max((int(step) for group in groups if isinstance(step := group.get("step"), (int, float))), default=None)


RankTensorsByName = dict[str, list[_RankTensor]]
_Tensors = dict[str, StoredTensor]  # of one rank, by their names in the full model
_ByStage = dict[tuple[int, int], int]  # chunk and stage -> a number of layers


@dataclass(slots=True)
class _RankReader:
    """Reads the files of the ranks in use, compares their statements and places their parts.

    `states` has them by state of the optimizer and parameter; `unplaced` are the files whose optimizer does not show
    which state belongs to which parameter.
    """

    sizes: Sizes
    ranks: dict[GridCoordinate, _Rank]
    columns: Columns = field(default_factory=Columns)
    statements: Statements = field(default_factory=Statements)
    states: dict[str, RankTensorsByName] = field(
        default_factory=lambda: {what: defaultdict(list) for what in _STATES.values()}
    )
    unplaced: list[str] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        """Fill all columns and statements; unusable ranks are removed."""
        self._arguments()
        steps = [(rank.root.get("iteration"), rank.label) for rank in self.ranks.values()]
        self.statements.note_if_different("step", [item for item in steps if type(item[0]) is int], text="{:,}".format)
        if len({step for step, _ in steps}) == 1:
            counted = [(step, rank.label) for rank in self.ranks.values() if (step := _highest_step(rank)) is not None]
            self.statements.note_if_different("step", counted, text="{:,}".format)
        self._names()
        self._presence()
        self.args = next((rank.args for rank in self.ranks.values()), {})
        offsets = self._offsets()
        model: RankTensorsByName = defaultdict(list)
        for coordinate, rank in self.ranks.items():
            tensors = self._tensors(coordinate, rank, offsets)
            for key, tensor in tensors.items():
                assert rank.model is not None
                model[key].append(_RankTensor(coordinate, tensor, rank.model))
            self._optimizer(coordinate, rank, tensors)
        self._tied(model)
        for key, copies in model.items():
            self._add(key, key, copies)
        self._add_states()

    def _add_states(self) -> None:
        """Add the optimizer states if all are complete and certain; rules would take a part of them for the whole."""
        if self.unplaced and not self.statements.misfits:
            names = list(dict.fromkeys(self.unplaced))
            sentence = f"ckptlint did not judge the optimizer state in {', '.join(names[:_SHOWN])}"
            why = "the file does not say which state belongs to which parameter"
            self.notes.append(Problem("note", names[0], sentence, why=why))
        are_whole = [self._is_whole(key, copies) for by_key in self.states.values() for key, copies in by_key.items()]
        if self.unplaced or not all(are_whole):
            return
        for what, by_key in self.states.items():
            for key, copies in by_key.items():
                self._add(f"optimizer.state.{what}.{key}", key, copies)

    def _is_whole(self, key: str, copies: list[_RankTensor]) -> bool:
        """Whether all parts of a tensor are present, with one shape."""
        ways = self.sizes.etp if is_expert(key) else self.sizes.tp
        ranks = {item.place.etp if is_expert(key) else item.place.tp for item in copies}
        return len(ranks) == ways and len({item.tensor.shape for item in copies}) == 1

    def _misfit(self, at: str, file: str, stored: str, expected: str, because: str, what: str) -> None:
        self.statements.misfits.append(Misfit(at, file, stored, expected, because, what))

    def _arguments(self) -> None:
        """Compare the arguments of all ranks; ranks with other parallel sizes are removed."""
        stated = {
            coordinate: {
                name: value
                for name, value in ({"checkpoint_version": rank.root.get("checkpoint_version")} | rank.args).items()
                if name in _COMPARED and (is_scalar(value) or value is None)
            }
            for coordinate, rank in self.ranks.items()
            if rank.args
        }
        shared = [name for name in _COMPARED if all(name in arguments for arguments in stated.values())]
        names = [name for name in shared if len({repr(arguments[name]) for arguments in stated.values()}) > 1]
        shown = [
            (first_names(f"{name} {printable(str(arguments[name]))}" for name in names), self.ranks[coordinate].label)
            for coordinate, arguments in stated.items()
        ]
        self.statements.note_if_different("set of arguments", shown)
        for coordinate in stated if names else ():
            if sizes_of(self.ranks[coordinate].args) not in (None, self.sizes):
                del self.ranks[coordinate]

    def _names(self) -> None:
        """Compare the rank of each folder with the rank that wrote its file, by arguments or by bytes."""
        world, writers = 0, {}
        for coordinate, rank in self.ranks.items():
            if type(number := rank.args.get("rank")) is int and number >= 0:
                writers[coordinate] = number
                stated = rank.args.get("world_size")
                world = stated if type(stated) is int else 0
        first: dict[tuple[tuple[int, int], ...], GridCoordinate] = {}
        for coordinate, rank in list(self.ranks.items()):
            sums = _checksums(rank)
            if sums and (twin := first.setdefault(sums, coordinate)) is not coordinate:
                self.statements.other_name(rank.label, self.ranks[twin].folder, self.ranks[twin].label)
                del self.ranks[coordinate]
                writers.pop(coordinate, None)
        # A converter writes all files as one rank, and encoders of their own sizes shift the ranks of the rest.
        has_encoders = any(rank.args.get(name) for rank in self.ranks.values() for name in _ENCODERS)
        if len(writers) < 2 or len(set(writers.values())) < len(writers) or has_encoders:
            return
        for coordinate, number in writers.items():
            tp, pp = number % self.sizes.tp, coordinate.pp
            per_stage = world // self.sizes.pp
            if per_stage and world % self.sizes.pp == 0 and not self.ranks[coordinate].args.get("use_tp_pp_dp_mapping"):
                # Stages are outermost in the usual order of ranks, so the stage follows from the rank;
                # use_tp_pp_dp_mapping changes that order, and only the tensor-parallel number remains known.
                pp = number // per_stage
            if (tp, pp) != (coordinate.tp, coordinate.pp):
                inside = folder_of(GridCoordinate(tp, pp, coordinate.ep), self.sizes)
                self.statements.other_name(self.ranks[coordinate].label, f"rank {number}, {inside}")

    def _presence(self) -> None:
        """Compare which ranks of a stage have optimizer state; a stage without trained weights may have none.

        Source: megatron.training.checkpointing.generate_state_dict (core_v0.16): none of a stub optimizer
        """
        has = {at: rank.optimizer is not None or bool(rank.root.get("optimizer")) for at, rank in self.ranks.items()}
        states = ((at.pp, ("there" if has[at] else "missing", rank.label)) for at, rank in self.ranks.items())
        for of_stage in grouped(states).values():
            self.statements.note_if_different("optimizer state", of_stage)

    # ------------------------------------------------------------ names

    def _offsets(self) -> dict[str, _ByStage]:
        """Block of layers -> (chunk, stage) -> layers before it."""
        counts: dict[str, _ByStage] = defaultdict(dict)
        for coordinate, rank in self.ranks.items():
            for chunk, key, _ in _chunks(rank):
                if (layer := layer_of(key)) is not None:
                    block, number = layer
                    layers = counts[block]
                    layers[chunk, coordinate.pp] = max(layers.get((chunk, coordinate.pp), 0), number + 1)
        share = even_share(self.args, self.sizes)
        return {block: offsets_of(layers, share, self.sizes) for block, layers in counts.items() if "mtp" not in block}

    def _tensors(self, place: GridCoordinate, rank: _Rank, offsets: dict[str, _ByStage]) -> _Tensors:
        """The tensors of a rank under their names in the full model."""
        experts = self.args.get("num_experts")
        local = experts // self.sizes.ep if type(experts) is int and experts % self.sizes.ep == 0 else 0
        rank_tensors = {}
        for chunk, key, tensor in _chunks(rank):
            if (layer := layer_of(key)) is not None:
                block, number = layer
                key = with_layer(key, number + offsets.get(block, {}).get((chunk, place.pp), 0))
            rank_tensors[with_global_expert(key, place, local)] = tensor
        return rank_tensors

    # ------------------------------------------------------------ optimizer

    def _optimizer(self, place: GridCoordinate, rank: _Rank, tensors: _Tensors) -> None:
        """Collect the optimizer states of a rank under their parameters' names, where these are certain."""
        params = {key: value for key, value in tensors.items() if not key.rpartition(".")[2].startswith(_BUFFERS)}
        saved = rank.root.get("optimizer")
        for state in saved if isinstance(saved, list) else [saved]:
            if is_dict(state) and isinstance(state.get("fp32_from_fp16_params"), list):
                self._copies(place, rank, params, state)
            elif is_dict(state) and state.get("state"):  # of a job in fp32
                self.unplaced.append(rank.label)
        if rank.optimizer is not None:
            self._buffers(place, rank, params, rank.optimizer)

    def _copies(self, place: GridCoordinate, rank: _Rank, params: _Tensors, saved: dict[Any, Any]) -> None:
        """Collect fp32 copies, stored in groups, and their moments, stored by number.

        Source: megatron.core.optimizer.Float16OptimizerWithFloat16Params.state_dict; groups are made by weight decay,
        which biases and vectors do not have, and keep the order of the model
        """
        inner = saved.get("optimizer")
        groups = inner.get("param_groups") if is_dict(inner) else None
        moments = inner.get("state") if is_dict(inner) else None
        copies = saved["fp32_from_fp16_params"]
        if not isinstance(groups, list) or not is_dict(moments) or len(groups) != len(copies):
            return
        number = 0
        for group, tensors in zip(groups, copies, strict=True):
            if not is_dict(group) or not isinstance(tensors, list):
                return
            decays, of_experts = bool(group.get("wd_mult", 1.0)), bool(group.get("is_expert_parallel"))
            chosen = [
                key
                for key, param in params.items()
                if param.dtype in _HALF
                and (len(param.shape) > 1 and not key.endswith(".bias")) is decays
                and (is_expert(key) and self.sizes.ep > 1) is of_experts
            ]
            # Groups name no parameters. Known: they keep model order, split by weight decay and experts. Assumed: if
            # every shape in a group agrees, so does the order.
            shapes = [tensor.shape if isinstance(tensor, StoredTensor) else None for tensor in tensors]
            is_known = shapes == [params[key].shape for key in chosen]
            if not is_known:
                self.unplaced.append(rank.label)
            if not is_known and len(shapes) < len(chosen):
                of_key = f"fp32 copies of {plural(len(shapes), 'parameter')}"
                because = "the model beside them has as many"
                self._misfit("", rank.label, of_key, f"{len(chosen):,}", because, "count")
            for position, tensor in enumerate(tensors, number):
                state = moments.get(position)
                moments_of = {what: state.get(what) for what in ("exp_avg", "exp_avg_sq")} if is_dict(state) else {}
                for what, value in ({"fp32_param": tensor} | moments_of).items():
                    if not isinstance(value, StoredTensor):
                        continue
                    if isinstance(tensor, StoredTensor) and value.shape != tensor.shape:
                        because = f"the fp32 copy of parameter {position} beside it has this shape"
                        stored, wanted = shape_text(value.shape), shape_text(tensor.shape)
                        self._misfit(f"{what} of parameter {position}", rank.label, stored, wanted, because, "state")
                    elif is_known and rank.model is not None:
                        self.states[what][chosen[position - number]].append(_RankTensor(place, value, rank.model))
            number += len(tensors)

    def _buffers(self, place: GridCoordinate, rank: _Rank, params: _Tensors, file: OpenedFile) -> None:
        """Collect states from flat buffers, at the offsets that the parameters have in their own shared buffer.

        Source: megatron.core.optimizer.DistributedOptimizer.get_parameter_state_dp_zero,
        megatron.core.distributed.param_and_grad_buffer
        """
        groups = grouped(((param.dtype, param.key), key) for key, param in params.items())
        # No file names the parameters of a buffer. But the weights are views of a buffer with the same layout, so their
        # storage gives the offsets. Weights that each have their own storage (cloned) leave the file unplaced.
        shared = [
            (dtype, names)
            for (dtype, _), names in groups.items()
            if params[names[0]].length > prod(params[names[0]].shape)
        ]
        for dtype, entry in _entries(file.torch_file.root):
            numel = entry.get("numel_unpadded")
            if type(numel) is not int:
                continue
            flats = {what: flat for what, flat in entry.items() if what in _STATES and isinstance(flat, StoredTensor)}
            odd = {what: tensor for what, tensor in flats.items() if tensor.shape != (numel,)}
            for what, tensor in odd.items():
                stored, because = f"{prod(tensor.shape):,}", "numel_unpadded beside it says so"
                self._misfit(f"the values of {what}", file.label, stored, f"{numel:,}", because, "length")
            starts = None
            for names in [names for own_dtype, names in shared if own_dtype == dtype]:
                if (starts := _starts([params[name] for name in names], numel)) is not None:
                    shared.remove((dtype, names))
                    break
            if starts is None or odd:
                self.unplaced.append(file.label)
                continue
            for name, start in zip(names, starts, strict=True):
                for what, flat in flats.items():
                    state = view(flat, start, params[name].shape)
                    if state is not None:
                        self.states[_STATES[what]][name].append(_RankTensor(place, state, file))
        self._sums(rank, file, params.values())

    def _sums(self, rank: _Rank, file: OpenedFile, tensors: Collection[StoredTensor]) -> None:
        """Check that the buffers of a dtype are as long as its parameters, plus at most the alignment gaps."""
        root = file.torch_file.root
        if isinstance(root, list) and any(state is None for state in root):
            return  # another rank's file holds a part
        elements: Counter[str] = Counter()
        for dtype, entry in _entries(root):
            elements[dtype] += entry["numel_unpadded"] if type(entry.get("numel_unpadded")) is int else 0
        for dtype, numel in elements.items():
            sizes = [prod(tensor.shape) for tensor in tensors if tensor.dtype == dtype]
            least, most = sum(sizes), sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
            if sizes and not least <= numel <= most:
                expected = f"{least:,}" if least == most else f"{least:,} to {most:,}"
                because = f"the sizes of {plural(len(sizes), f'{dtype} parameter')} in {rank.label} add up to it"
                self._misfit(f"the buffers of {dtype} parameters", file.label, f"{numel:,}", expected, because, "sum")

    # ------------------------------------------------------------ placing

    def _tied(self, model: RankTensorsByName) -> None:
        """Compare a tied head on the last stage with the embedding on the first: their bytes must be equal."""
        if self.args.get("untie_embeddings_and_output_weights") is not False or self.sizes.pp == 1:
            return
        for head in model.get(_HEAD, ()):
            same = [item for item in model.get(_EMBEDDING, ()) if item.place.tp == head.place.tp]
            if same and same[0].tensor.shape == head.tensor.shape:
                self._compare(_HEAD, [same[0], head], "content of copies")

    def _add(self, fqn: str, key: str, copies: list[_RankTensor]) -> None:
        """Add the parts of a tensor, with offsets where these are certain."""
        expert = is_expert(key)
        ways = self.sizes.etp if expert else self.sizes.tp
        axis = cut_axis(key)
        first = copies[0].tensor
        self.statements.note_if_different("dtype", [(item.tensor.dtype, item.file.label) for item in copies], fqn)
        if axis == "unknown" and ways > 1:
            axis = _axis_by_bytes(copies)
        shapes = [(item.tensor.shape, item.file.label) for item in copies]
        is_alike = axis == "unknown" or self.statements.note_if_different("local shape", shapes, fqn, text=shape_text)
        if ways == 1 or not isinstance(axis, int) or not first.shape:
            if is_alike and axis != "unknown" and fqn == key:
                self._compare(fqn, copies)
            is_one = is_alike and len({shape for shape, _ in shapes}) == 1
            # other ranks may hold other parts, in an order that is not known: then its shape says nothing of the whole
            is_cut = axis == "unknown" and len(copies) > 1
            for copy, (_, tensor, file) in enumerate(copies):
                offsets = (0,) * len(first.shape) if is_one and copy == 0 else None
                self.columns.add(fqn, tensor, file.number, file.torch_file, first.shape, offsets, is_cut)
            return
        by_rank = grouped((item.place.etp if expert else item.place.tp, item) for item in copies)
        is_sound = is_alike and axis < len(first.shape) and set(by_rank) == set(range(ways))
        shape = tuple(size * ways if i == axis else size for i, size in enumerate(first.shape))
        for rank in sorted(by_rank):
            for copy, item in enumerate(by_rank[rank]):
                placed = is_sound and copy == 0
                cut = placed and axis == 0 and is_halved(key, self.args) and item.tensor.shape[0] % 2 == 0
                pieces = list(halves(item.tensor)) if cut else [item.tensor]
                for half, piece in enumerate(pieces):
                    begin = rank * piece.shape[axis] + (half * shape[axis] // 2 if cut else 0) if placed else 0
                    offsets = tuple(begin if i == axis else 0 for i in range(len(shape)))
                    file = item.file
                    self.columns.add(fqn, piece, file.number, file.torch_file, shape, offsets if placed else None)

    def _compare(self, fqn: str, copies: list[_RankTensor], what: str = "content of other meshes") -> None:
        sums = [(checksum(item.tensor, item.file.torch_file), item.file.label) for item in copies]
        self.statements.copies(what, [sums], fqn)


def _chunks(rank: _Rank) -> Iterator[tuple[int, str, StoredTensor]]:
    """Chunk, key and tensor of a rank's model, without extra states; several chunks under interleaved pipelining."""
    root = rank.root
    numbered = takewhile(lambda name: is_dict(root.get(name)), (f"model{number}" for number in count()))
    for chunk, name in enumerate(["model"] if is_dict(root.get("model")) else numbered):
        for key, value in walked(root[name], levels=6):
            if isinstance(value, StoredTensor) and not key.endswith("_extra_state"):
                yield chunk, key, value


def _checksums(rank: _Rank) -> tuple[tuple[int, int], ...]:
    """Checksums of the storages of the rank's matrices; () where equality would prove no copy.

    Freshly initialised matrices may all hold one constant. So more than half of the checksums must be distinct.
    """
    if rank.model is None:
        return ()
    keys = dict.fromkeys(tensor.key for _, _, tensor in _chunks(rank) if len(tensor.shape) > 1)
    sums = checksums(rank.model.torch_file, keys)
    return sums if len(sums) == 1 or 2 * len(set(sums)) > len(sums) else ()


def _entries(root: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(dtype of the parameters, buffer) of a `distrib_optim.pt`; a list holds one dict for each optimizer."""
    for state in root if isinstance(root, list) else [root]:
        for buffers in state.values() if isinstance(state, dict) else ():
            for dtypes, entry in buffers.items() if isinstance(buffers, dict) else ():
                if isinstance(entry, dict):
                    dtype = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
                    yield str(dtype), entry


def _starts(tensors: list[StoredTensor], numel: int) -> list[int] | None:
    """Offsets of tensors, views of one buffer, after the gaps between its buckets are removed.

    None where uncertain: with several buckets, every parameter but the last must end at a multiple of 64 elements.
    """
    ends = [tensor.offset + prod(tensor.shape) for tensor in tensors]
    if max(ends) == numel:
        return [tensor.offset for tensor in tensors]
    order = sorted(range(len(tensors)), key=lambda i: tensors[i].offset)
    counts = [prod(tensors[i].shape) for i in order]
    if sum(counts) != numel or any(elements % _ALIGNED for elements in counts[:-1]):
        return None
    starts = dict(zip(order, accumulate(counts, initial=0), strict=False))
    return [starts[i] for i in range(len(tensors))]


def _axis_by_bytes(copies: list[_RankTensor]) -> Axis:
    """The axis of a parameter with an unknown name: `whole` if all ranks hold the same bytes, else `unknown`."""
    places = [(item.tensor.shape, item.file.torch_file.storages.get(item.tensor.key)) for item in copies]
    contents = {(shape, place.crc if place else 0) for shape, place in places}
    return "whole" if len(contents) == 1 and all(crc for _, crc in contents) else "unknown"
