"""Names in the files of Megatron's model parallel ranks: folders, layers, experts, and the axis that cuts each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from ckptlint.errors import LimitError
from ckptlint.loaders.readers.sets import PICKLE_SHARE
from ckptlint.model.facts import fact
from ckptlint.model.stored import StoredTensor
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_FILE = "distrib_optim.pt"
_FOLDER = lazy_pattern(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_MOST = 2**16  # most files of a grid
_LOOKED = 8  # most rank folders that are searched for a model file
_LAYER = lazy_pattern(r"(?P<block>(?:.*?\.)?layers)\.(?P<number>\d{1,6})(?P<rest>\..+)")
_EXPERT = lazy_pattern(r"(?P<home>.*\.local_experts\.)(?P<number>\d{1,6})(?P<rest>\..+)")
_NUMBERED_EXPERT = lazy_pattern(r"(?P<home>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<number>\d{1,6})(?P<rest>)")
_ROWS = lazy_pattern(
    r"(?:.*\.)?(?:word_embeddings\.weight|(?:output_layer|linear_(?:qkv|q|kv|fc1|q_proj|q_up_proj|kv_up_proj)"
    r"|query_key_value|dense_h_to_4h)\.(?:weight|bias))"
)
_COLUMNS = lazy_pattern(
    r".*\.(?:linear_proj|linear_fc2|mixer\.out_proj|(?:self|inter)_attention\.dense|dense_4h_to_h)\.weight"
)
_NORM = lazy_pattern(r"norm\w*(?:\.\w+)?")
_WHOLE = lazy_pattern(
    r".*(?:router|position_embeddings|tokentype_embeddings)(?:\.\w+)?"
    r"|.*\.(?:expert_bias|local_tokens_per_expert)"
    r"|.*\.(?:linear_proj|linear_fc2|dense|dense_4h_to_h)\.bias"
)
_MIXER_ROWS = lazy_pattern(r".*\.mixer\.(?:(?:in_proj|conv1d)\.(?:weight|bias)|A_log|D|dt_bias|norm\.weight)")
_HALVED = lazy_pattern(r".*\.(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)")
_UNEVEN = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "standalone_embedding_stage",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_split_rank",
    "hybrid_override_pattern", "hybrid_layer_pattern", "encoder_num_layers",
)  # fmt: skip
"""Arguments that give the pipeline stages different numbers of layers."""

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip

Axis = Literal["whole", "unknown"] | int


class Sizes(NamedTuple):
    """Parallel sizes of a job: tensor, pipeline, chunks of a stage, expert, and tensor parallel of the experts."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1


class GridCoordinate(NamedTuple):
    """A model parallel rank: its number along each axis."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0


def sizes_of(args: Mapping[str, Any]) -> Sizes | None:
    """The parallel sizes in the arguments; None where they are absent or impossible."""
    tp, pp, vpp, ep, etp = (args.get(name) for name in _SIZES)
    stated = tp, pp or 1, vpp or 1, ep or 1, tp if etp is None else etp
    sizes = [size for size in stated if type(size) is int and 0 < size <= _MOST]
    return Sizes(*sizes) if len(sizes) == len(stated) and sizes[0] * sizes[1] * sizes[3] * sizes[4] <= _MOST else None


@lru_cache(maxsize=4)  # it is asked for each folder of a job
def grid(sizes: Sizes) -> Mapping[str, GridCoordinate]:
    """Folder -> rank, for each rank that writes a file.

    With experts the first etp x ep ranks of each stage write, which hold all experts. If etp is smaller than tp, tensor
    and expert parallel ranks do not form a full grid.

    Source: megatron.training.checkpointing.get_checkpoint_name, save_checkpoint (`get_expert_data_parallel_rank`);
    megatron.core.parallel_state.RankGenerator: tensor parallel ranks are innermost
    """
    writers = sizes.etp * sizes.ep if sizes.ep > 1 else sizes.tp
    coordinates = [
        GridCoordinate(rank % sizes.tp, stage, rank // sizes.etp % sizes.ep, rank % sizes.etp)
        for stage in range(sizes.pp)
        for rank in range(writers)
    ]
    return {folder_of(coordinate, sizes): coordinate for coordinate in coordinates}


def folder_of(place: GridCoordinate, sizes: Sizes) -> str:
    """The folder of a rank."""
    stage = f"_{place.pp:03d}" if sizes.pp > 1 else ""
    return f"mp_rank_{place.tp:02d}{stage}" + (f"_{place.ep:03d}" if sizes.ep > 1 else "")


def is_rank_folder(name: str) -> bool:
    """Whether a folder is named like that of a model parallel rank.

    >>> is_rank_folder("mp_rank_00_001"), is_rank_folder("mp_rank_0")
    (True, False)
    """
    return _FOLDER.fullmatch(name) is not None


@fact
def rank_folders(folder: Folder) -> list[str]:
    """The folders of model parallel ranks of Megatron's in a step, in order."""
    return sorted(name for name in folder.folders() if is_rank_folder(name) and not folder.escapes_to(name))


def legacy_file(folder: Folder) -> str:
    """The first rank file of Megatron's older form; "" without one."""
    there = ((name, folder.sub(name).files_beside()) for name in rank_folders(folder)[:_LOOKED])
    files = (f"{name}/{file}" for name, inner in there for file in (*MODEL_FILES, OPTIMIZER_FILE) if file in inner)
    return next(files, "")


def legacy_bytes(folder: Folder) -> int:
    """Upper bound of the bytes read from pickles and directories of Megatron's rank files."""
    subs = [folder.sub(name) for name in rank_folders(folder)]
    return sum(min(sub.entries[name].size, PICKLE_SHARE) for sub in subs for name in sub.files_beside())


def sizes_by_names(names: list[str]) -> Sizes:
    """The smallest grid that contains these folders, for use without arguments; a second number counts as a stage.

    Raises LimitError where it is larger than any job's.
    """
    numbers = [tuple(int(n) for n in match.groups() if n is not None) for n in names if (match := _FOLDER.fullmatch(n))]
    axes = [1 + max((of_name[i] for of_name in numbers if len(of_name) > i), default=0) for i in range(3)]
    if prod(axes) > _MOST:
        raise LimitError(f"lies in one of {prod(axes):,} rank folders, going by their names; the limit is {_MOST:,}")
    return Sizes(axes[0], axes[1], 1, axes[2], axes[0])


def place_of(name: str, sizes: Sizes) -> GridCoordinate | None:
    """The rank of a folder in a job of these sizes; None for a folder outside the grid."""
    if (known := grid(sizes).get(name)) is not None:
        return known
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    # `grid` follows the usual order of ranks. Assumed: another order gives other folders of the same job, so numbers
    # within the sizes are enough.
    tp, *others = (int(number) for number in match.groups() if number is not None)
    axes = [axis for axis in ("pp", "ep") if getattr(sizes, axis) > 1]
    if len(axes) != len(others) or tp >= sizes.tp:
        return None
    numbers = dict(zip(axes, others, strict=True))
    if any(number >= getattr(sizes, axis) for axis, number in numbers.items()):
        return None
    return GridCoordinate(tp, numbers.get("pp", 0), numbers.get("ep", 0), tp % sizes.etp)


def layer_of(key: str) -> tuple[str, int] | None:
    """(block of layers, number) of a key; numbers start at 0 in each stage and chunk. None outside layers."""
    match = _LAYER.fullmatch(key)
    return (match["block"], int(match["number"])) if match else None


def with_layer(key: str, number: int) -> str:
    """The key with another number of its layer."""
    match = _LAYER.fullmatch(key)
    return f"{match['block']}.{number}{match['rest']}" if match else key


def with_global_expert(key: str, place: GridCoordinate, local: int) -> str:
    """The key with its expert numbered over all ranks, of which each has `local` ones; 0 where that is unknown."""
    match = _EXPERT.fullmatch(key) or _NUMBERED_EXPERT.fullmatch(key)
    return f"{match['home']}{place.ep * local + int(match['number'])}{match['rest']}" if match and local else key


def is_expert(key: str) -> bool:
    """Whether a parameter belongs to routed experts, which differ on each expert parallel rank."""
    return ".experts." in key and "shared_experts" not in key


def even_share(args: Mapping[str, Any], sizes: Sizes) -> int:
    """Layers of each chunk of a stage; 0 where the arguments omit it or cut unevenly."""
    layers = args.get("num_layers")
    if type(layers) is not int or any(args.get(name) for name in _UNEVEN):
        return 0
    share, rest = divmod(layers, sizes.pp * sizes.vpp)
    return 0 if rest else share


def offsets_of(counts: Mapping[tuple[int, int], int], share: int, sizes: Sizes) -> dict[tuple[int, int], int]:
    """(chunk, stage) -> layers before its first, by those stored in each and the arguments' share (0: unknown)."""
    # Arguments help where the files of a stage are lost. But a stage with more layers than its share shows that the job
    # cut them unevenly in a way that the arguments do not name, and then only the stored numbers count.
    if share and max(counts.values(), default=0) > share:
        share = 0
    offsets, before = {}, 0
    for chunk in range(sizes.vpp):
        for stage in range(sizes.pp):
            offsets[chunk, stage] = before
            before += share or counts.get((chunk, stage), 0)
    return offsets


def cut_axis(key: str) -> Axis:
    """The axis on which tensor parallel ranks cut a parameter; `whole` if each holds all of it, `unknown` otherwise.

    Source: megatron.core.tensor_parallel.layers: ColumnParallelLinear and VocabParallelEmbedding cut rows,
    RowParallelLinear columns; those that use them: megatron.core.transformer (0.10 - 0.19), megatron.legacy.model
    """
    if is_expert(key):  # weight0, weight1: one for each expert of a rank
        key = key.rstrip("0123456789")
    if _MIXER_ROWS.fullmatch(key):
        return 0
    if _WHOLE.fullmatch(key) or _NORM.fullmatch(key, max(key.rfind("norm"), 0)):
        return "whole"
    if _ROWS.fullmatch(key):
        return 0
    return 1 if _COLUMNS.fullmatch(key) else "unknown"


def is_halved(key: str, args: Mapping[str, Any]) -> bool:
    """Whether the key is a gated projection in one weight: each rank holds a part of gate, then a part of up."""
    return (args.get("swiglu") is True or args.get("gated_linear_unit") is True) and bool(_HALVED.fullmatch(key))


def halves(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """The upper and the lower half of the rows."""
    rows = tensor.shape[0] // 2
    for half in range(2):
        begin = tensor.offset + half * rows * tensor.strides[0]
        yield replace(tensor, shape=(rows, *tensor.shape[1:]), offset=begin)


def view(flat: StoredTensor, start: int, shape: tuple[int, ...]) -> StoredTensor | None:
    """A view of this shape into a flat tensor, row by row; None where the flat one is too short."""
    if start < 0 or start + prod(shape) > flat.shape[0]:
        return None
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return replace(flat, shape=shape, strides=strides, offset=flat.offset + start)
