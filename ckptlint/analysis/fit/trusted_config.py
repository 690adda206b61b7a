"""Decides which declared values of the job a rule may trust, by comparing them with the stored tensors.

A converted checkpoint keeps the arguments of the job it came from, so declared sizes can belong to another model or to
another mesh. One contradiction is a finding about the checkpoint; two make the whole declared set worthless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import AxisSize, Checkpoint, Declared
from ckptlint.model.facts import fact
from ckptlint.vocabulary.config_fields import MODEL_CONFIG, read_declared

MAIN_BLOCKS = frozenset({
    "layers", "h", "decoder.layers", "encoder.layers", "transformer.h", "transformer.layers", "backbone.layers",
    "gpt_neox.layers", "language_model.layers", "language_model.model.layers", "language_model.decoder.layers",
    "language_model.encoder.layers",
})  # fmt: skip
"""The blocks whose layers the declared number of layers counts; towers, heads and draft models are not among them."""

_EMBEDDINGS = frozenset({"word_embeddings", "embed_tokens", "tok_embeddings", "wte"})

FINAL_NORMS = frozenset({"final_layernorm", "final_norm", "ln_f", "norm"})
"""Names of the norm after the last layer."""


class Contradiction(NamedTuple):
    """A declared value and what is stored instead.

    Attributes:
        name: canonical name of the value (`config_fields.read_declared`).
        stored: the value that the tensors show.
        shown_by: the tensors or objects that show it, in words.
    """

    name: str
    declared: Declared
    stored: int
    shown_by: str


class LayerCount(NamedTuple):
    """The layers of one block beside the declared number.

    Attributes:
        declared: the declared number for this block.
        stored: number of stored layers.
        numbers: stored layer numbers; empty where layers are stacked on an axis or each stage counts from 0.
        stages: layers of each stage prefix (`model_pp0`), where each stage counts from 0.
        agrees: whether `stored` fits `declared`, allowing for multi-token prediction layers and hybrid patterns.
        lead: a parameter of the block, for findings.
    """

    block: str
    declared: Declared
    stored: int
    numbers: tuple[int, ...]
    stages: tuple[int, ...]
    agrees: bool
    lead: Param


def trusted(ckpt: Checkpoint) -> Mapping[str, Declared]:
    """The declared values, or {} when two or more of them contradict what is stored: they belong to another job."""
    return {} if len(contradictions(ckpt)) >= 2 else ckpt.declared


def trusted_topology(ckpt: Checkpoint) -> Mapping[str, AxisSize]:
    """The axis sizes that may be relied on: only the counted ones where the declared values are not trusted."""
    if len(contradictions(ckpt)) < 2:
        return ckpt.topology
    return {axis: size for axis, size in ckpt.topology.items() if size.source == "metadata"}


def number(declared: Mapping[str, Declared], name: str) -> int | None:
    """A declared positive integer, or None."""
    item = declared.get(name)
    value = item.value if item is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def flag(declared: Mapping[str, Declared], name: str) -> bool | None:
    """A declared flag, or None."""
    item = declared.get(name)
    return item.value if item is not None and isinstance(item.value, bool) else None


def is_defined(ckpt: Checkpoint, declared: Declared | None) -> bool:
    """Whether it is known what a declared number counts.

    The arguments of Megatron and of Mistral have one meaning. In a `config.json` each type of model has its own: 72
    `layer_types` of `dory` (transformers 5.24) are 36 modules. Of an unknown type a number proves nothing.
    """
    return declared is None or declared.source != MODEL_CONFIG or is_known_model(ckpt)


@fact
def is_known_model(ckpt: Checkpoint) -> bool:
    """Whether type and class of the `config.json` are those of a model of transformers."""
    from ckptlint.architecture import huggingface

    return ckpt.config is not None and huggingface.is_known_model(ckpt.config.values)


@fact
def contradictions(ckpt: Checkpoint) -> tuple[Contradiction, ...]:
    """Every declared value that the tensors, objects or plans contradict."""
    structural: dict[str, tuple[int, str]] = {
        axis: (size.size, "the objects and plans in the metadata")
        for axis, size in ckpt.topology.items()
        if size.source == "metadata"
    }
    for count in layer_counts(ckpt):
        if not count.agrees and count.declared == ckpt.declared.get("layers"):
            structural["layers"] = (count.stored, f"the layers of {count.block}")
    structural |= _model_sizes(main_params(ckpt))
    return tuple(
        Contradiction(name, ckpt.declared[name], value, shown_by)
        for name, (value, shown_by) in structural.items()
        if (declared := number(ckpt.declared, name)) is not None and declared != value
    )


def main_params(ckpt: Checkpoint) -> list[Param]:
    """The parameters that the declared sizes describe; none where several modules share one set of arguments."""
    params = inventory_of(ckpt).params
    if ckpt.partial_because or any(name.startswith("mimo.") for param in params for name in param.key.scope):
        return []
    return params


@fact
def layer_counts(ckpt: Checkpoint) -> tuple[LayerCount, ...]:
    """The layers of each block that a declared number of layers describes."""
    by_name = grouped((param.key.block, param) for param in main_params(ckpt) if param.key.block in MAIN_BLOCKS)
    # audio models call a list of convolutions `encoder.layers` too
    blocks = {
        name: params
        for name, params in by_name.items()
        if any(param.key.function not in ("other", "norm") for param in params)
        or not any("conv" in param.key.path for param in params)
    }
    if "heterogeneous" in ckpt.declared or not ckpt.is_sound:
        return ()
    # One declared number describes one block, or both halves of an encoder-decoder. With other blocks (COM008: "a
    # vision tower beside a language model") nobody knows which of them it counts.
    if len(blocks) != 1 and blocks.keys() != {"encoder.layers", "decoder.layers"}:
        return ()
    wanted = {block: _declared_layers(ckpt, block, is_only=len(blocks) == 1) for block in blocks}
    counts = [_count(ckpt, block, blocks[block], declared) for block, declared in wanted.items() if declared]
    return tuple(count for count in counts if count is not None)


def _declared_layers(ckpt: Checkpoint, block: str, is_only: bool) -> Declared | None:
    """The declared number of layers of a block, from the config section of its prefix where one exists."""
    prefix, config = block.removesuffix(".layers"), ckpt.config
    name, declared = "layers" if is_only else f"{prefix}_layers", ckpt.declared
    if config is not None and (section := config.values.get(f"{prefix}_config") or config.values.get(prefix)):
        name, declared = "layers", read_declared([(config.file, section)])
    return declared[name] if number(declared, name) else None


def _count(ckpt: Checkpoint, block: str, params: list[Param], declared: Declared) -> LayerCount | None:
    """None when the block holds adapters alone, or when stacking cannot be distinguished from another leading axis."""
    if any(word in param.key.path for param in params for word in ("lora", "adapter")):
        return None
    stacked = {param.tensor.global_shape[0] for param in params if param.layer_axis == 0}
    numbered: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for param in params:
        if param.key.layer is not None:
            numbered[param.key.scope].add(param.key.layer)
    numbers = set().union(*numbered.values())
    stages: tuple[int, ...] = ()
    if stacked and not numbers:
        # Outside Megatron-Core a leading axis may as well be experts or kernels, so its size counts nothing.
        if not ckpt.is_torch_dist or len(stacked) > 1:
            return None
        layer_count = max(stacked)
    elif numbers and not stacked:
        layer_count = len(numbers)
        if len(numbered) > 1 and sum(map(len, numbered.values())) > layer_count:  # stages that all count from 0
            stages = tuple(len(found_there) for found_there in numbered.values())
            layer_count = sum(stages)
    else:
        return None
    agrees = layer_count in _accepted(ckpt.declared, int(declared.value))
    counted = () if stages else tuple(sorted(numbers))
    return LayerCount(block, declared, layer_count, counted, stages, agrees, params[0])


def _accepted(declared: Mapping[str, Declared], layers: int) -> set[int]:
    """The numbers of stored layers that agree with a declared one."""
    # One more layer is always accepted: DeepSeek-V3 stores its prediction layer in the same block, and a job may not
    # declare it (COM008: "layers for multi-token prediction in a block of their own and behind the others").
    accepted = {layers, layers + 1, layers + (number(declared, "mtp_layers") or 0)}
    pattern = declared.get("hybrid_pattern")
    if pattern is not None and isinstance(pattern.value, str):
        accepted.add(sum(symbol not in "/|" for symbol in pattern.value))
        accepted.add(sum(symbol != "|" for symbol in pattern.value.partition("/")[0]))
    return accepted


def _model_sizes(params: Iterable[Param]) -> dict[str, tuple[int, str]]:
    """Hidden size and number of experts, with their evidence, where all parameters agree on them."""
    hidden: dict[str, set[int]] = defaultdict(set)
    routers: set[tuple[int, ...]] = set()
    for param in params:
        key, words, shape = param.key, param.key.path.split("."), param.own_shape
        if key.function == "embedding" and len(shape) == 2 and _EMBEDDINGS & set(words):
            hidden["embedding columns"].add(shape[1])
        elif key.function == "norm" and len(shape) == 1 and not key.block and FINAL_NORMS & set(words[-2:-1]):
            hidden["final norm"].add(shape[0])
        elif key.function == "router" and len(shape) == 2 and key.block in MAIN_BLOCKS:
            routers.add(shape)
    sizes: dict[str, tuple[int, str]] = {}
    values = set().union(*hidden.values())
    # One witness may be the damaged tensor itself, so embedding and final norm must agree. A router may be stored as
    # [hidden, experts]: rows count experts only if the columns are known to be the hidden size.
    if len(values) == 1 and len(hidden) > 1:
        sizes["hidden"] = (values.pop(), " and ".join(hidden))
    if len(routers) == 1:
        rows, columns = routers.pop()
        if "hidden" in sizes and columns == sizes["hidden"][0] != rows:
            sizes["experts"] = (rows, "router rows")
    return sizes


def mesh_axes(ckpt: Checkpoint, factor: int) -> list[str]:
    """The axes of this size along which a tensor may have been split; a bound from file names is no axis."""
    sizes = trusted_topology(ckpt)
    known = ((axis, sizes[axis]) for axis in ("tp", "ep", "etp", "dp", "world") if axis in sizes)
    return [axis for axis, size in known if size.size == factor and size.source != "files"]


def knows_mesh(ckpt: Checkpoint) -> bool:
    """Whether the size of the tensor-parallel axis is known."""
    return "tp" in trusted_topology(ckpt)
