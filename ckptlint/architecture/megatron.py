"""What the arguments of a Megatron job say every tensor of its model must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ckptlint.architecture.expected import Expected, ExpectedTensor, NoTable
from ckptlint.architecture.expressions import LARGEST, ExpressionError, large
from ckptlint.architecture.tables import MOST_KEYS, entry, expand, picked, rows_of
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern

LayerNaming = Literal["stacked", "numbered", "split"]
"""How the layers are named: one key for all of them, a key each, or a key for each expert and half of a projection."""

_NAMINGS: Mapping[LayerNaming, str] = {
    "stacked": "stacked layers",
    "numbered": "numbered layers",
    "split": "numbered layers, experts and halves apart",
}
_CLASSES = {"gpt": "Megatron's GPTModel", "hybrid": "Megatron's hybrid model"}
_CHOICE = lazy_pattern(r"\(([^()]+) if (\w+) else ([^()]+)\)")
_STACKED = lazy_pattern(r"decoder\.layers\.\D")
_SPLIT = lazy_pattern(r"experts\.\d+\.|linear_fc1\.(?:weight|bias)_[wv]$")

_STACKED_EXPERTS = lazy_pattern(r"(?P<home>.*\.experts\.)experts\.linear_fc(?P<fc>[12])\.(?P<what>weight|bias)")
_LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

TABLE_FILE = "megatron.json"
"""The data file: `""` -> what it was made with; `gpt`, `hybrid` -> ranges, rows, forms (bench/tables)."""

_BRIDGE = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu", "seq_length": "max_position_embeddings"}
"""Names of Megatron-Bridge's providers -> Megatron-LM's; `share_embeddings_and_output_weights` is turned as well."""

_SIZES: Mapping[str, int | None] = {
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "num_experts": 0,
    "moe_shared_expert_intermediate_size": 0,
    "moe_latent_size": 0,
    "q_lora_rank": 0,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "mtp_num_layers": 0,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": 0,
}
"""Sizes and what Megatron-LM takes without them, 0 for none; None where there is no model without them.

Source: megatron.training.arguments, megatron.core.transformer.TransformerConfig (0.19)
"""

_FLAGS: Mapping[str, bool] = {
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": False,
    "attention_output_gate": False,
}

_TEXTS: Mapping[str, tuple[str, frozenset[str]]] = {
    "normalization": ("LayerNorm", frozenset({"LayerNorm", "RMSNorm"})),
    "position_embedding_type": ("learned_absolute", frozenset({"learned_absolute", "rope", "mrope", "yarn", "none"})),
    "softmax_type": ("vanilla", frozenset({"vanilla"})),
}

_OTHER_MODELS = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_block_specs",
    "block_configs",
    "experimental_attention_variant",
    "linear_attention_type",
    "linear_attention_freq",
    "decoder_num_layers",
    "retro_add_retriever",
    "retro_project_dir",
    "use_legacy_models",
    "moe_use_upcycling",
    "export_kd_teacher_load",
    "export_te_mcore_model",
    "use_kitchen",
    "language_model_type",
    "vision_model_type",
    "vision_config",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "mtp_hybrid_override_pattern",
    "mtp_use_repeated_layer",
    "mla_down_proj_fusion",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
    "use_transformer_engine_op_fuser",
    "peft",
    "lora_dim",
    "lora_rank",
)
"""What makes another model, or other names of its tensors, and was not varied by the probes."""

_SPECS = ("mamba_stack_spec", "default_layer_spec", "transformer_engine_layer_spec", "local_layer_spec")
_LONGEST = 20_000  # layers of a list or a pattern


def megatron_models(
    args: Mapping[str, object], source: str = "args", naming: LayerNaming | None = None, at_most: int = MOST_KEYS
) -> tuple[Expected, ...]:
    """The model that the arguments of a Megatron job declare, once for each way in which its checkpoints name it.

    Keys are those of torch_dist without the prefix of a module. The names of norms are those of Transformer Engine, or
    those of the local implementation, and some changed with the version. Forms that do not differ here are one.

    Args:
        args: by name, untrusted: Megatron-LM's arguments, or the `model` section of Megatron-Bridge's run_config.yaml.
        naming: that of the checkpoint, where it is known: there are as many keys as layers and experts in others.
        at_most: tensors; arguments that imply more are refused before any work.

    Raises:
        NoTable: the arguments describe no model, or one that the table does not know; the reason in one sentence.

    Source: megatron-core; the versions are in `Expected.made_with`.
    """
    try:
        values = fields(args)
        kind = "hybrid" if values["hybrid_layer_pattern"] else "gpt"
        table = entry(TABLE_FILE, kind)
        rows = [replace(row, dims=tuple(_plain(dim, values) for dim in row.dims)) for row in rows_of(table["rows"])]
        # the local implementation of megatron-core 0.10 and 0.11 made a LayerNorm of what was declared an RMSNorm
        ignored = (r"norm[._]bias$",) if values["normalization"] == "RMSNorm" else ()
        models: dict[str, Expected] = {}
        for form in table["forms"]:
            if naming not in (None, form["naming"]) or (form["naming"] == "stacked" and not values["is_homogeneous"]):
                continue
            tensors = expand(picked(rows, form["rows"]), table["ranges"], values, at_most)
            if any(_are_alike(tensors, model.tensors) for model in models.values()):
                continue
            name = f"{_NAMINGS[form['naming']]}, {'Transformer Engine' if form['engine'] else 'local'}"
            if name in models:
                name = f"{name}, megatron-core {form['versions'][0]}"
            models[name] = Expected(
                source,
                f"megatron {kind}",
                name,
                tensors,
                values,
                made_with=entry(TABLE_FILE, "")["made_with"],
                model_class=_CLASSES[kind],
                ignored=ignored,
            )
        if not models:
            raise NoTable("they declare layers that differ, and the keys stack all layers")
    except (NoTable, ExpressionError) as error:
        raise NoTable(f"{source} of Megatron: {error}") from None
    return tuple(models.values())


def rank_models(args: Mapping[str, object], source: str = "args", at_most: int = MOST_KEYS) -> tuple[Expected, ...]:
    """The same under the names that the modules of each rank have, as `state_dict` gives them.

    torch_dist renames the norms of the local implementation to those of Transformer Engine, and stacks the experts.

    Raises:
        NoTable: as `megatron_models`.

    Source: megatron.core.models.gpt.gpt_layer_specs (`sharded_state_dict_keys_map`),
    megatron.core.transformer.moe.experts
    """
    models: list[Expected] = []
    for model in megatron_models(args, source, "numbered", at_most):
        engine, local = dict[str, ExpectedTensor](), dict[str, ExpectedTensor]()
        for key, tensor in model.tensors.items():
            engine |= _of_experts(key, tensor, "linear_fc{fc}.{what}{expert}")
            name = key
            for fused, apart in _LOCAL_NORMS.items():
                name = name.replace(fused, apart)
            local |= _of_experts(name, tensor, "local_experts.{expert}.linear_fc{fc}.{what}")
        for form, tensors in (("Transformer Engine", engine), ("local", local)):
            if (embedding := tensors.get(_EMBEDDING)) is not None and _HEAD not in tensors:
                # the last stage has a copy of its own of what it shares with the first
                tensors[_HEAD] = replace(embedding, needed=False, because=("untie_embeddings_and_output_weights",))
            if len(tensors) <= at_most and not any(_are_alike(tensors, before.tensors) for before in models):
                models.append(replace(model, form=f"the modules of each rank, {form} {len(models)}", tensors=tensors))
    return tuple(models)


def _of_experts(key: str, tensor: ExpectedTensor, form: str) -> dict[str, ExpectedTensor]:
    """A parameter by itself, or that of each expert where it is stacked."""
    match = _STACKED_EXPERTS.fullmatch(key)
    if match is None or not tensor.shape:
        return {key: tensor}
    expert_tensor = replace(tensor, shape=tensor.shape[1:], dims=tensor.dims[1:])
    return {match["home"] + form.format(expert=i, **match.groupdict()): expert_tensor for i in range(tensor.shape[0])}


def _are_alike(some: Mapping[str, ExpectedTensor], others: Mapping[str, ExpectedTensor]) -> bool:
    """Whether the keys and shapes are the same."""
    return some.keys() == others.keys() and all(tensor.shape == others[key].shape for key, tensor in some.items())


def layer_naming(names: Iterable[str]) -> LayerNaming:
    """How a checkpoint names its layers.

    >>> stacked, split = "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.weight_w"
    >>> layer_naming([stacked]), layer_naming([split])
    ('stacked', 'split')
    """
    naming: LayerNaming = "numbered"
    for name in names:
        if _SPLIT.search(name):
            return "split"
        if _STACKED.match(name):
            naming = "stacked"
    return naming


def _plain(dim: str, values: Mapping[str, object]) -> str:
    """A size for these values of the flags.

    >>> _plain("(2 if swiglu else 1) * ffn_hidden_size", {"swiglu": True})
    '2 * ffn_hidden_size'
    """
    while match := _CHOICE.search(dim):
        then, flag, otherwise = match.groups()
        chosen = then if values.get(flag) else otherwise
        dim = f"{dim[: match.start()]}{chosen}{dim[match.end() :]}".removeprefix("1 * ")
    return dim


def fields(args: Mapping[str, object]) -> dict[str, object]:
    """The values that the table asks for: as declared, or what Megatron-LM takes where they are left out.

    Sizes that are absent are 0, `moe_layer_freq` holds 0 or 1 for every layer, `hybrid_layer_pattern` the symbol of
    every layer, and `num_query_groups` counts the heads where queries are not grouped.

    Raises:
        NoTable: a value is of another kind, or makes a model that the table does not know.

    Source: megatron.training.arguments.validate_args, core_transformer_config_from_args (0.19)
    """
    given: dict[str, Any] = {_BRIDGE[name]: value for name, value in args.items() if name in _BRIDGE} | dict(args)
    given.setdefault("untie_embeddings_and_output_weights", given.get("share_embeddings_and_output_weights") is False)
    if others := [name for name in _OTHER_MODELS if given.get(name)]:
        raise NoTable(f"no table for models with {others[0]}")
    spec = _words(given.get("spec", given.get("transformer_layer_spec", given.get("mamba_stack_spec"))))
    if spec and not any(word in spec for word in _SPECS):
        raise NoTable(f"no table for the layers of {printable(spec[:60])}")
    values: dict[str, object] = {name: _size(given, name, default) for name, default in _SIZES.items()}
    values |= {name: _flag(given, name, default) for name, default in _FLAGS.items()}
    for name, (default, known) in _TEXTS.items():
        value = given.get(name)
        values[name] = default if value is None else value
        if not isinstance(values[name], str) or values[name] not in known:
            raise NoTable(f"no table for {name} {_shown(value)}")
    if values["moe_latent_size"] and values["add_bias_linear"]:
        raise NoTable("no table for moe_latent_size with add_bias_linear")
    hidden, heads = _number(values, "hidden_size"), _number(values, "num_attention_heads")
    values["kv_channels"] = _size(given, "kv_channels", 0) or hidden // max(heads, 1)
    narrow = 8 * hidden // 192 * 64 if values["swiglu"] else 4 * hidden
    values["ffn_hidden_size"] = _size(given, "ffn_hidden_size", 0) or narrow
    values["moe_ffn_hidden_size"] = _size(given, "moe_ffn_hidden_size", 0) or values["ffn_hidden_size"]
    grouped = _flag(given, "group_query_attention", "group_query_attention" not in given)
    values["num_query_groups"] = (_size(given, "num_query_groups", 0) if grouped else 0) or heads
    is_learned = values["position_embedding_type"] == "learned_absolute"
    values["max_position_embeddings"] = _size(given, "max_position_embeddings", None) if is_learned else 0
    values["padded_vocab_size"] = _vocabulary(given)
    values["hybrid_layer_pattern"] = _pattern(given)
    if values["hybrid_layer_pattern"]:
        values["num_layers"] = len(str(values["hybrid_layer_pattern"]))
    layers, freq = _number(values, "num_layers"), given.get("moe_layer_freq", 1)
    if layers > _LONGEST:
        raise NoTable(f"it implies {layers:,} layers")
    values["is_homogeneous"] = not values["hybrid_layer_pattern"] and freq in (None, 1)
    values["moe_layer_freq"] = _moe_layers(freq, layers) if values["num_experts"] else [0] * layers
    return values


def _words(spec: object) -> str:
    """A specification of layers as one text: module and name, a path in a mapping, or a class."""
    items = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, (list, tuple)) else [spec]
    return " ".join(item for item in list(items)[:10] if isinstance(item, str))[:1000] or ("it" if spec else "")


def _size(given: Mapping[str, object], name: str, default: int | None) -> int:
    value = given.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise NoTable(f"{name} is {_shown(value)}, which is no size")
    return value


def _flag(given: Mapping[str, object], name: str, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise NoTable(f"{name} is {_shown(value)}, which is no flag")
    return value


def _number(values: Mapping[str, object], name: str) -> int:
    value = values[name]
    return value if isinstance(value, int) else 0


def _vocabulary(given: Mapping[str, object]) -> int:
    """Rows of the embedding.

    Source: megatron.training.vocab_utils.calculate_padded_vocab_size; GPTModelProvider of Megatron-Bridge, which pads
    where `should_pad_vocab` says so
    """
    if given.get("padded_vocab_size") is not None:
        return _size(given, "padded_vocab_size", None)
    size = _size(given, "vocab_size", None)
    if "should_pad_vocab" in given and not _flag(given, "should_pad_vocab", False):
        return size
    step = _size(given, "make_vocab_size_divisible_by", 128) * _size(given, "tensor_model_parallel_size", 1)
    return -(-size // max(step, 1)) * max(step, 1)


def _pattern(given: Mapping[str, object]) -> str:
    """The symbol of every layer of a hybrid model; "" for others.

    Source: megatron.core.ssm.mamba_hybrid_layer_allocation; `|` ends a pipeline stage
    """
    pattern = given.get("hybrid_layer_pattern") or given.get("hybrid_override_pattern") or ""
    if not isinstance(pattern, str) or len(pattern) > _LONGEST:
        raise NoTable("its hybrid pattern is no short text")
    if not pattern and given.get("is_hybrid_model"):
        raise NoTable("no table for a hybrid model without a pattern")
    pattern = pattern.replace("|", "")
    if others := set(pattern) - set("M*-E"):
        raise NoTable(f"no table for layers {printable(' '.join(sorted(others))[:40])} of a hybrid model")
    return pattern


def _moe_layers(freq: object, layers: int) -> list[int]:
    """0 or 1 for every layer.

    Source: megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_layer_specs: every n-th layer from the first one on
    """
    if isinstance(freq, int) and not isinstance(freq, bool) and freq > 0:
        return [int(layer % freq == 0) for layer in range(layers)]
    if isinstance(freq, list) and len(freq) == layers and all(is_moe in (0, 1) for is_moe in freq):
        return [int(is_moe) for is_moe in freq]
    raise NoTable(f"moe_layer_freq is {_shown(freq)} for {layers:,} layers")


def _shown(value: object) -> str:
    """A value in few words, however large it is."""
    return large(value) or printable(repr(value)[:40])
