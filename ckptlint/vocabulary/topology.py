"""What the job said about itself and what the checkpoint shows of it: axis and model sizes, each with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptlint.model import AxisSize, Declared, ShardedObject, WriterTable

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "world")

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

Source:
    megatron.training.arguments and megatron.core.transformer.TransformerConfig (0.19), transformers config.json
"""

_SECTIONS = ("model", "text_config", "language_model", "llm_config", "checkpoint", "rng", "optimizer", "tokenizer")


def read_declared(sources: Iterable[tuple[str, Any]]) -> dict[str, Declared]:
    """Canonical name -> value and source; the first source that has a value wins.

    Args:
        sources: the name of each source (`args`, `run_config`, `config.json`) and its mapping or inert object; sections
            of a nested configuration (`model`, `text_config`) count as part of it.
    """
    found: dict[str, Declared] = {}
    for source, node in sources:
        values = attributes(node)
        layers = [values, *(attributes(values[name]) for name in _SECTIONS if name in values)]
        for canonical, names in _NAMES.items():
            value = next((part[n] for part in layers for n in names if is_plain(part.get(n))), None)
            if value is not None and canonical not in found:
                found[canonical] = Declared(value, source)
    return found


def read_topology(
    declared: Mapping[str, Declared],
    objects: Iterable[ShardedObject],
    writers: WriterTable | None,
    ranks: Iterable[int] = (),
) -> dict[str, AxisSize]:
    """Axis -> size and source: what the metadata counts (`metadata`) beats what the job declared, guesses come last.

    Args:
        ranks: the numbers in payload file names; the highest is a lower bound of the world size (`files`).

    Source:
        `rng_state` has the shape (PP, TP), with EP as a third axis since 2026; `rerun_state_machine_state` has one
        object per rank; `all_local_plans` one plan per rank (Megatron-Core)
    """
    sizes: dict[str, AxisSize] = {}
    for axis in AXES:
        item = declared.get(axis)
        if item is not None and isinstance(item.value, int) and 0 < item.value < 2**31 and item.value is not True:
            sizes[axis] = AxisSize(item.value, item.source)
    for obj in objects:
        if obj.key == "rng_state" and len(obj.shape) in (2, 3):
            for axis, size in zip(("pp", "tp", "ep"), obj.shape, strict=False):
                sizes[axis] = AxisSize(size, "metadata")
        elif obj.key == "rerun_state_machine_state" and len(obj.shape) == 1:
            sizes["world"] = AxisSize(obj.shape[0], "metadata")
    if writers is not None:
        sizes["world"] = AxisSize(writers.world_size, "metadata")
    numbers = list(ranks)
    if "world" not in sizes and numbers:
        sizes["world"] = AxisSize(max(numbers) + 1, "files")
    if "dp" not in sizes and {"world", "tp", "pp"} <= sizes.keys() and sizes["world"].source != "files":
        model_parallel = sizes["tp"].size * sizes["pp"].size * (sizes["cp"].size if "cp" in sizes else 1)
        if sizes["world"].size % model_parallel == 0:
            sizes["dp"] = AxisSize(sizes["world"].size // model_parallel, "inferred")
    return sizes


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of an inert object (argparse.Namespace), or the dict itself; {} for anything else."""
    state = getattr(node, "state", node)
    return {k: v for k, v in state.items() if isinstance(k, str)} if isinstance(state, dict) else {}


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a flag."""
    return isinstance(value, (bool, int, float, str))


def axes_of_size(topology: Mapping[str, AxisSize], size: int) -> list[str]:
    """Names of the axes that have this size, in the order tp, pp, cp, ep, etp, dp; guesses and world left out."""
    return [
        axis
        for axis in AXES
        if axis not in ("world", "vpp") and axis in topology and topology[axis].size == size and size > 1
    ]
