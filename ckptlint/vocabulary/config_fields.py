"""The names of settings in configurations and arguments, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptlint.model import Declared

MODEL_CONFIG, ADAPTER_CONFIG, MISTRAL_CONFIG = "config.json", "adapter_config.json", "params.json"
"""What transformers, peft and mistral-inference keep beside the weights that it describes."""

GENERATION_CONFIG = "generation_config.json"
"""What transformers generates by, beside the configuration of the model."""

QUANTISATION = ("quantization_config", "compression_config", "quantization")
"""Fields of a model's configuration that say how its weights are quantised."""

_PRUNING = ("sparsity_config", "pruned_heads")
"""Fields that say what is pruned: of compressed-tensors 0.17, and of transformers 4."""

QUANTISATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside the configuration that say it, and the method that they are of."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "vpp": ("virtual_pipeline_model_parallel_size",),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "dp": ("data_parallel_size",),
    "world": ("world_size",),
    "layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "encoder_layers": ("encoder_num_layers",),
    "decoder_layers": ("decoder_num_layers",),
    "mtp_layers": ("mtp_num_layers", "num_nextn_predict_layers"),
    "hybrid_pattern": ("hybrid_override_pattern", "hybrid_layer_pattern"),
    "heterogeneous": ("heterogeneous_layers_config_path", "block_configs"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("ffn_hidden_size", "intermediate_size", "n_inner"),
    "moe_ffn": ("moe_ffn_hidden_size", "moe_intermediate_size"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_groups": ("num_query_groups", "num_key_value_heads"),
    "head_dim": ("kv_channels", "head_dim"),
    "kv_rank": ("kv_lora_rank",),
    "experts": ("num_experts", "num_moe_experts", "n_routed_experts", "num_local_experts"),
    "moe_upcycled": ("moe_use_upcycling",),
    "vocab": ("vocab_size",),
    "padded_vocab": ("padded_vocab_size",),
    "vocab_divisor": ("make_vocab_size_divisible_by",),
    "untied": ("untie_embeddings_and_output_weights",),
    "tied": ("tie_word_embeddings", "share_embeddings_and_output_weights"),
    "gated": ("swiglu", "gated_linear_unit"),
    "save_optim": ("save_optim",),
    "no_save_optim": ("no_save_optim",),
    "finetune": ("finetune",),
    "data_parallel_random_init": ("data_parallel_random_init",),
    "attention_dropout": ("attention_dropout", "attention_probs_dropout_prob"),
    "hidden_dropout": ("hidden_dropout", "hidden_dropout_prob"),
    "router_jitter": ("moe_input_jitter_eps", "router_jitter_noise"),
}
"""Canonical name -> the names that frameworks use, first match wins.

Source: megatron.training.arguments and megatron.core.transformer.TransformerConfig (0.19), transformers config.json
"""

_SECTIONS = (
    *("model", "text_config", "language_model", "llm_config", "checkpoint", "rng", "optimizer", "tokenizer"),
    "comm_overlap",  # megatron.bridge.training.config.set_data_parallel_size: `data_parallel_size`, which a save writes
)


def read_declared(sources: Iterable[tuple[str, Any]]) -> dict[str, Declared]:
    """Canonical name -> value and source; the first source that has a value wins.

    Args:
        sources: the name of each source (`args`, `run_config`, `config.json`) and its mapping or inert object; sections
            of a nested configuration (`model`, `text_config`) count as part of it.
    """
    declared: dict[str, Declared] = {}
    for source, node in sources:
        values = attributes(node)
        layers = [values, *(attributes(values[name]) for name in _SECTIONS if name in values)]
        for canonical, names in _NAMES.items():
            value = next((section[n] for section in layers for n in names if is_scalar(section.get(n))), None)
            if value is not None and canonical not in declared:
                declared[canonical] = Declared(value, source)
    return declared


def declares_pruning(values: Mapping[str, Any]) -> bool:
    """Whether a configuration, or its section on quantisation, says that weights are pruned."""
    sections = [values, *(attributes(values.get(name)) for name in QUANTISATION)]
    return any(section.get(name) for section in sections for name in _PRUNING)


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of an inert object (argparse.Namespace), or the dict itself; {} for anything else."""
    state = getattr(node, "state", node)
    return {k: v for k, v in state.items() if isinstance(k, str)} if isinstance(state, dict) else {}


def is_scalar(value: Any) -> bool:
    """Whether a value is a number, a text or a flag."""
    return isinstance(value, (bool, int, float, str))
