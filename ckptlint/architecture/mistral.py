"""Models in Mistral's own format: what `params.json` says every tensor of `consolidated*.safetensors` must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ckptlint.architecture.expected import Expected, ExpectedTensor, NoTable

_MADE_WITH = "mistral-inference 1.6.0"
_KEY_LIMIT = 100_000
_SIZE_LIMIT = 2**31

_SIZES = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size")
_MOE = ("num_experts", "num_experts_per_tok")
_VISION = (
    "hidden_size",
    "num_channels",
    "image_size",
    "patch_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_POSITIONS = {"rope_theta", "rope_scaling", "yarn", "llama_4_scaling", "max_seq_len", "max_position_embeddings"}
_RUN = {"norm_eps", "max_batch_size", "sliding_window", "_sliding_window", "causal", "model_type"}
_ELSEWHERE = {*_POSITIONS, *_RUN, "use_biases", "tied_embeddings", "moe", "vision_encoder", "lora"}
_IMAGES = {"rope_theta", "image_token_id", "image_break_token_id", "image_end_token_id", "max_image_size"}
_PROJECTOR = {"adapter_bias", "spatial_merge_size", "add_pre_mm_projector_layer_norm", "mm_projector_id"}
"""Fields that give no tensor its size, or that are looked at on their own; any other may change the model."""

NamedTensors = Iterator[tuple[str, ExpectedTensor]]


def mistral_models(params: Mapping[str, Any], source: str = "params.json") -> tuple[Expected, ...]:
    """The tensors of the model that a `params.json` declares, under the one naming there is.

    Raises:
        NoTable: a field that decides about tensors is missing, has no size as its value, or is not known here.

    Source: mistral_inference 1.6 (transformer.Transformer, transformer_layers, moe, vision_encoder); `tied_embeddings`
    as vLLM reads it
    """
    if params.get("model_type", "transformer") != "transformer" or params.get("lora") or params.get("use_biases"):
        raise NoTable(f"{source} describes a model other than a plain transformer")
    sizes = _read(params, _SIZES, _ELSEWHERE, source)
    moe, vision = params.get("moe"), params.get("vision_encoder")
    experts = 0 if moe is None else _read(moe, _MOE, set(), f"{source}: moe")["num_experts"]
    keys = sizes["n_layers"] * (6 + (1 + 3 * experts if experts else 3))
    if vision is not None:
        towers = _read(vision, _VISION, _IMAGES | _PROJECTOR, f"{source}: vision_encoder")
        keys += towers["num_hidden_layers"] * 9
    if keys > _KEY_LIMIT:
        raise NoTable(f"{source} describes {keys:,} tensors, more than the {_KEY_LIMIT:,} that are looked at")
    tensors = dict(_language(sizes, experts, params.get("tied_embeddings") is True))
    if vision is not None:
        tensors |= dict(_vision(vision, towers, sizes["dim"]))
    fields = {**sizes, "tied_embeddings": params.get("tied_embeddings", False)}
    fields |= {f"moe.{name}": moe[name] for name in _MOE} if moe is not None else {}
    fields |= {f"vision_encoder.{name}": size for name, size in towers.items()} if vision is not None else {}
    return (Expected(source, "mistral", "saved", tensors, fields, made_with=_MADE_WITH),)


def _language(sizes: Mapping[str, int], experts: int, tied: bool) -> NamedTensors:
    """The tensors of the language model, as `params.json` sizes them."""
    table = _tensor(sizes, "vocab_size", "dim")
    yield "tok_embeddings.weight", table
    for layer in range(sizes["n_layers"]):
        home = f"layers.{layer}."
        for name, heads in (("wq", "n_heads"), ("wk", "n_kv_heads"), ("wv", "n_kv_heads"), ("wo", "n_heads")):
            dims = (f"{heads} * head_dim", "dim")
            dims = dims[::-1] if name == "wo" else dims
            yield f"{home}attention.{name}.weight", _tensor(sizes, *dims, because=("n_layers",))
        for name in ("attention_norm", "ffn_norm"):
            yield f"{home}{name}.weight", _tensor(sizes, "dim", because=("n_layers",))
        because: tuple[str, ...] = ("n_layers",)
        mlps = [f"{home}feed_forward."]
        if experts:
            because = ("moe.num_experts", "n_layers")
            gate = ExpectedTensor((experts, sizes["dim"]), dims=("moe.num_experts", "dim"), because=("moe", "n_layers"))
            yield f"{home}feed_forward.gate.weight", gate
            mlps = [f"{home}feed_forward.experts.{expert}." for expert in range(experts)]
        up = _tensor(sizes, "hidden_dim", "dim", because=because)
        down = _tensor(sizes, "dim", "hidden_dim", because=because)
        for mlp in mlps:
            for name, tensor in (("w1", up), ("w2", down), ("w3", up)):
                yield f"{mlp}{name}.weight", tensor
    yield "norm.weight", _tensor(sizes, "dim")
    yield "output.weight", ExpectedTensor(table.shape, not tied, table.dims, ("tied_embeddings",))


def _vision(vision: Mapping[str, Any], sizes: Mapping[str, int], dim: int) -> NamedTensors:
    """The tensors of the vision encoder and of its adapter to the language model."""
    both = {**{f"vision_encoder.{name}": size for name, size in sizes.items()}, "dim": dim}
    hidden, inner = "vision_encoder.hidden_size", "vision_encoder.intermediate_size"
    patch = "vision_encoder.patch_size"
    because = ("vision_encoder",)
    patches = _tensor(both, hidden, "vision_encoder.num_channels", patch, patch, because=because)
    yield "vision_encoder.patch_conv.weight", patches
    yield "vision_encoder.ln_pre.weight", _tensor(both, hidden, because=because)
    for layer in range(sizes["num_hidden_layers"]):
        home = f"vision_encoder.transformer.layers.{layer}."
        number = ("vision_encoder.num_hidden_layers",)
        for name in ("wq", "wk", "wv", "wo"):
            yield f"{home}attention.{name}.weight", _tensor(both, hidden, hidden, because=number)
        for name in ("attention_norm", "ffn_norm"):
            yield f"{home}{name}.weight", _tensor(both, hidden, because=number)
        for name, rows, columns in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
            yield f"{home}feed_forward.{name}.weight", _tensor(both, rows, columns, because=number)
    yield "vision_language_adapter.w_in.weight", _tensor(both, "dim", hidden, because=because)
    yield "vision_language_adapter.w_out.weight", _tensor(both, "dim", "dim", because=because)
    for name in ("w_in", "w_out") if vision.get("adapter_bias", True) else ():
        bias = _tensor(both, "dim", because=("vision_encoder.adapter_bias",))
        yield f"vision_language_adapter.{name}.bias", bias
    if vision.get("add_pre_mm_projector_layer_norm"):
        reason = ("vision_encoder.add_pre_mm_projector_layer_norm",)
        yield "pre_mm_projector_norm.weight", _tensor(both, hidden, because=reason)
    if vision.get("mm_projector_id") == "patch_merge":
        merge = "vision_encoder.spatial_merge_size"
        both[merge] = _read(vision, ("spatial_merge_size",), set(vision), "vision_encoder")["spatial_merge_size"]
        reason = ("vision_encoder.mm_projector_id",)
        merging = _tensor(both, hidden, f"{hidden} * {merge} * {merge}", because=reason)
        yield "patch_merger.merging_layer.weight", merging


def _tensor(sizes: Mapping[str, int], *dims: str, because: tuple[str, ...] = ()) -> ExpectedTensor:
    """A tensor whose axes are fields, or products of some."""
    return ExpectedTensor(tuple(prod(sizes[field] for field in dim.split(" * ")) for dim in dims), True, dims, because)


def _read(params: Any, names: tuple[str, ...], beside: set[str], source: str) -> dict[str, int]:
    """The values of fields that are sizes; refuses any that are neither among these nor known beside them."""
    if not isinstance(params, Mapping):
        raise NoTable(f"{source} holds no fields")
    if unknown := sorted(str(name)[:60] for name in params.keys() - beside - {*names} if params[name] is not None):
        raise NoTable(f"{source} has the field {unknown[0]!r}, which the table does not know")
    for name in names:
        value = params.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _SIZE_LIMIT:
            raise NoTable(f"{source} gives no size for {name}")
    return {name: params[name] for name in names}
