"""What a checkpoint is, in a few numbers: its parameters, its parts, what it counts, and the model it is of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptlint.analysis.quantised import quantisation
from ckptlint.model import Checkpoint
from ckptlint.model.text import printable
from ckptlint.numerics.settings import is_number, optimizer_settings
from ckptlint.vocabulary.config_fields import ADAPTER_CONFIG, is_scalar
from ckptlint.vocabulary.dtypes import FLOATS, nbytes
from ckptlint.vocabulary.keys import COMPUTED, COPIES, MASTER_COPIES, MOMENTS, Key, is_token_table, parse, state_name

_STATES = MOMENTS - {"param"} | {"step"}
"""Last parts of the names of optimizer states, whose other names parameters may have."""

_ONE_CODE_EACH = ("int8", "float8")
"""Dtypes of codes of which each is one element of its weight; others hold several, how many no file need say."""


class Parameters(NamedTuple):
    """How many parameters a checkpoint holds.

    Attributes:
        by_dtype: elements of the weights.
        packed: weights that are not counted, since an element of theirs is less than one that is stored.
        are_masters: whether an optimizer's master copies were counted, as no other weights are there.
    """

    by_dtype: Counter[str]
    packed: int
    are_masters: bool


def parameters_of(ckpt: Checkpoint) -> Parameters:
    """The parameters of the model, each once.

    States of an optimizer with its master copies, second copies of the model, buffers and the scales of quantised
    weights are none; a head that its configuration ties to the embedding, and a key that shares its bytes with another
    in a file of torch's, is no further one. Where nothing but master copies is stored, these are counted.
    """
    weights = quantisation(ckpt).weights
    codes = {weight.codes.fqn: weight.codes.dtype.startswith(_ONE_CODE_EACH) for weight in weights}
    scales = {tensor.fqn for weight in weights for tensor in weight.parts.values()}
    said = ckpt.declared
    is_tied = ("tied" in said and said["tied"].value is True) or ("untied" in said and said["untied"].value is False)
    tables = {tensor.global_shape for tensor in ckpt.tensors.values() if is_token_table(parse(tensor.fqn))}
    counted, seen = Counter[str](), set[tuple[tuple[int, ...], tuple[str, int, int]]]()
    for tensor in ckpt.tensors.values():
        key = parse(tensor.fqn)
        is_buffer = key.path.rpartition(".")[2] in COMPUTED or tensor.fqn in scales
        if _part(key) != "model" or is_buffer or not codes.get(tensor.fqn, tensor.dtype in FLOATS):
            continue
        if is_tied and key.function == "output" and not key.block and tensor.global_shape in tables:
            continue
        if ckpt.storages is not None and len(tensor.chunks) == 1 and tensor.chunks.record[0] >= 0:
            place = tensor.global_shape, ckpt.byte_range_of(int(tensor.chunks.record[0]))
            if place in seen:
                continue
            seen.add(place)
        counted[tensor.dtype] += tensor.volume
    packed = sum(not is_counted for is_counted in codes.values())
    masters = () if counted or packed else ckpt.tensors.values()
    for tensor in masters:
        if state_name(tensor.fqn) in MASTER_COPIES:
            counted[tensor.dtype] += tensor.volume
    return Parameters(counted, packed, bool(masters))


def _part(key: Key) -> str:
    if key.kind == "optimizer" or key.path.rpartition(".")[2] in _STATES:
        return "optimizer"
    return "other" if key.kind == "runtime" else next((name for name in key.scope if name in COPIES), "model")


def tensors_by_part(ckpt: Checkpoint) -> dict[str, dict[str, tuple[int, int]]]:
    """Part -> dtype -> how many tensors and bytes: model or adapter, second copies by name, optimizer, others."""
    model = "adapter" if ckpt.config is not None and ckpt.config.file.endswith(ADAPTER_CONFIG) else "model"
    parts: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    tensors = [(_part(parse(tensor.fqn)), tensor) for tensor in ckpt.tensors.values()]
    tensors += [("optimizer", tensor) for states in ckpt.optimizers for tensor in states.tensors.values()]
    for part, tensor in tensors:
        sizes = parts[model if part == "model" else part]
        count, size = sizes.get(tensor.dtype, (0, 0))
        sizes[tensor.dtype] = count + 1, size + (nbytes(tensor.dtype, tensor.volume) or 0)
    return parts


def values_of(ckpt: Checkpoint) -> dict[str, list[Any]]:
    """Name -> the values that it has in the checkpoint: steps, rates and other numbers that are cheap to read."""
    values: dict[str, list[Any]] = {}
    for name, value in _values(ckpt):
        if value is not None and value not in values.setdefault(name, []):
            values[name].append(value)
    return values


def _values(ckpt: Checkpoint) -> Iterator[tuple[str, Any]]:
    for of in (ckpt, *ckpt.optimizers):
        for claim in of.claims:
            yield "optimizer step" if parse(claim.source).kind == "optimizer" else claim.source, claim.step
    for name, value in ckpt.common.values.items() if ckpt.common is not None else ():
        if is_number(value):
            yield printable(str(name)), value
    for group in (group for of in (ckpt, *ckpt.optimizers) for group in optimizer_settings(of)):
        yield from (("lr", group.lr), ("weight_decay", group.weight_decay), ("betas", group.betas))
    for name, value in ckpt.object_values.items():
        if is_number(value):
            is_setting = parse(name).kind == "optimizer" or "param_groups" in name
            yield name.rpartition(".")[2] if is_setting else name, value


def description_of(ckpt: Checkpoint) -> tuple[str, Mapping[str, Any]]:
    """File and fields of what a configuration says of the model, or of the adapter; ("", {}) without one."""
    config = ckpt.config
    values = config.values if config is not None else {}
    if config is not None and config.file.endswith(ADAPTER_CONFIG):
        names = {"peft_type": "type", "r": "r", "lora_alpha": "alpha", "base_model_name_or_path": "base model"}
        fields = {shown: values.get(name) for name, shown in names.items()}
        fields["layers"] = config.base_layers or None
        source = config.file
    else:
        fields = {"type": values.get("model_type")}
        names = {"layers": "layers", "hidden": "hidden size", "experts": "experts", "vocab": "vocabulary"}
        said = {shown: ckpt.declared[name] for name, shown in names.items() if name in ckpt.declared}
        fields |= {shown: of.value for shown, of in said.items()}
        source = next((of.source for of in said.values()), config.file if config is not None else "")
    fields = {name: value for name, value in fields.items() if is_scalar(value) and value != ""}
    return (source, fields) if fields else ("", {})
