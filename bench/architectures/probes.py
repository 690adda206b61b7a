"""Configurations of a model type with sizes that no two fields share by accident, and the tensors of their models.

A configuration is a flat mapping, names with dots into sections. Models are built on the meta device: sizes cost
nothing, only the numbers of layers and experts are kept small.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

Flat = dict[str, Any]
Form = dict[str, tuple[tuple[int, ...], str]]
"""Key -> shape, and "" or `tied` or `buffer`."""

IRRELEVANT = re.compile(
    r"(^|\.)(_|.*token_id|.*token_index|.*_ids?$|dtype|torch_dtype|transformers_version|architectures|output_|return_dict|"
    r"use_cache|.*dropout|.*drop|rope_parameters|rope_scaling|rope_theta|initializer|.*_eps|.*epsilon|"
    r"model_type|is_decoder|chunk_size_feed|label2id|problem_type|max_length|task_specific|.*coef|.*_std$|"
    r".*(router|balance).*_loss|finetuning_task|num_labels$)"
)

LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_decoder_layers|num_encoder_layers|depth|"
    r"num_global_layers|num_hidden_groups)$"
)
HEADS = re.compile(
    r"^(num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads|attention_heads|"
    r"mamba_n_heads|mamba_num_heads|linear_num_value_heads|n_mamba_heads|num_lightning_heads)$"
)
GROUPS = re.compile(r"^(num_key_value_heads|num_kv_heads|n_head_kv|linear_num_key_heads)$")
HIDDEN = re.compile(r"^(hidden_size|n_embd|d_model|dim|embed_dim|hidden_dim|embedding_size|word_embed_proj_dim)$")
HEAD_DIM = re.compile(r"^(.*head_dim|d_kv|kv_channels|mamba_d_head|linear_(key|value)_head_dim|attention_head_size)$")
RANK = re.compile(r"^(.*lora_rank|.*lora_dim)$")
WIDTH = re.compile(
    r"^(.*intermediate_size.*|.*ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|.*out_hidden_size|projection_dim)$"
)
VOCABULARY = re.compile(r"^(.*vocab_size.*)$")
EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_moe_experts)$")
LAYER_TYPES = re.compile(r"^(layer_types|layers_block_type|mlp_layer_types|block_types|layer_block_types)$")
LAYER_LIST = re.compile(r"^(mlp_only_layers|.*_layers|.*_indices|.*_indexes|.*layer_ids)$")


def flat(nested: Mapping[str, Any], prefix: str = "") -> Flat:
    """Sections taken apart; `id2label` and empty mappings stay whole."""
    found: Flat = {}
    for name, value in nested.items():
        if isinstance(value, dict) and name.endswith("config") and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def nested(config: Flat) -> dict[str, Any]:
    """The opposite of `flat`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        *sections, last = name.split(".")
        part = found
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = value
    return found


@dataclass
class Kind:
    """A model type as the probes are drawn.

    Attributes:
        model_type: of its configuration class.
        fixed: field -> value in every probe.
        choices: field -> the values that probes take.
        derived: field -> what it must be for the others.
        layered: list of a word per layer that every configuration gives -> the words.
        spelled: such a list -> the words and letters of older configurations, with those of today.
        extra: fields that the class does not declare, found by `huggingface.undeclared`.
        known: what was found to matter for the first class.
    """

    model_type: str
    fixed: Flat = field(default_factory=dict)
    choices: dict[str, list[Any]] = field(default_factory=dict)
    derived: dict[str, Callable[[Flat], Any]] = field(default_factory=dict)
    layered: dict[str, list[str]] = field(default_factory=dict)
    spelled: dict[str, dict[str, str]] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    known: dict[str, list[Any]] = field(default_factory=dict)

    def config(self, values: Flat) -> Any:
        """The configuration that a config.json with these values gives."""
        document = nested(values) | {"model_type": self.model_type}
        return transformers.CONFIG_MAPPING[self.model_type].from_dict(document)

    def consistent(self, values: Flat) -> Flat:
        """The values with those that follow from others."""
        return values | {name: follow(values) for name, follow in self.derived.items()}

    def sections(self) -> Flat:
        """The model types of its sections, as its class has them by default."""
        return {n: v for n, v in self.defaults().items() if n.endswith(".model_type")}

    def defaults(self) -> Flat:
        return flat(transformers.CONFIG_MAPPING[self.model_type]().to_dict())

    def draw(self, rng: random.Random, fields: Iterable[str] = ()) -> Flat:
        """Values for all fields whose name tells what they count, and for these lists with an item per layer."""
        defaults = self.defaults()
        values: Flat = self.sections() | self.fixed
        for name, value in defaults.items():  # ids within the smallest vocabulary
            if name.endswith(("token_id", "padding_idx", "token_index")) and type(value) is int and value > 200:
                values[name] = 7
        by_section: dict[str, list[str]] = {}
        for name in defaults:
            by_section.setdefault(name.rpartition(".")[0], []).append(name)
        for names in by_section.values():
            values |= self._section(rng, names, defaults, values)
        for name, options in self.choices.items():
            values[name] = rng.choice(options)
        layers = {name.rpartition(".")[0]: v for name, v in values.items() if LAYERS.match(name.rpartition(".")[2])}
        for name, value in defaults.items():
            section, _, last = name.rpartition(".")
            if name in fields and LAYER_TYPES.match(last) and isinstance(value, list) and section in layers:
                kinds = sorted(set(value), key=str)
                values[name] = [rng.choice(kinds) for _ in range(layers[section])]
        for name, words in self.layered.items():
            count = layers.get(name.rpartition(".")[0]) or rng.randint(4, 7)
            values[name] = [rng.choice(words) for _ in range(count)]
        return {n: v for n, v in values.items() if v != "absent"}

    def _section(self, rng: random.Random, names: list[str], defaults: Flat, fixed: Flat) -> Flat:
        values: Flat = {}
        heads = 1
        groups = rng.choice([2, 3, 4, 5])
        for name in names:
            last = name.rpartition(".")[2]
            default = defaults[name]
            if name in fixed:
                if HEADS.match(last) and isinstance(fixed[name], int):
                    heads = math.lcm(heads, fixed[name])
                continue
            if isinstance(default, bool) or not isinstance(default, (int, type(None))):
                continue
            if default is None and not (GROUPS.match(last) or last == "head_dim" or last == "n_inner"):
                continue
            if LAYERS.match(last):
                values[name] = rng.choice([3, 4, 5, 6, 7])
            elif GROUPS.match(last):
                values[name] = groups
            elif HEADS.match(last):
                values[name] = groups * rng.choice([1, 2, 3])
                heads = math.lcm(heads, values[name])
            elif HEAD_DIM.match(last):
                values[name] = 2 * rng.choice([4, 6, 8, 10, 12, 14, 18, 20, 22, 26, 28, 34])
            elif RANK.match(last):
                values[name] = rng.choice([11, 13, 17, 19, 23, 29, 31, 37])
            elif WIDTH.match(last):
                values[name] = 2 * rng.choice([41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107])
            elif VOCABULARY.match(last):
                values[name] = rng.randrange(301, 1999)
            elif EXPERTS.match(last):
                values[name] = rng.choice([4, 5, 6, 7, 9])
        for name in names:
            last = name.rpartition(".")[2]
            if HIDDEN.match(last) and name not in fixed and isinstance(defaults[name], int):
                values[name] = heads * 8 * rng.choice([5, 7, 11, 13, 17, 19, 23, 29])
        return values


def model(class_name: str, config: Any) -> Any:
    """The model on the meta device."""
    with torch.device("meta"):
        return getattr(transformers, class_name)._from_config(config)


def forms(built: Any) -> dict[str, Form]:
    """The tensors of a model under the names of its state_dict and of save_pretrained; one form where they agree."""
    state = dict(built.state_dict())
    tied = set(built.all_tied_weights_keys)
    skipped = [re.compile(pattern) for pattern in built._keys_to_ignore_on_save or ()]
    buffers = {name for name, _ in built.named_buffers()}
    weights = {k: v for k, v in state.items() if k not in buffers}
    untied = {k: v for k, v in state.items() if k not in tied and not any(p.search(k) for p in skipped)}
    all_saved = _saved(built, state)
    weights_saved = all_saved if len(weights) == len(state) else _saved(built, weights)
    untied_saved = all_saved if len(untied) == len(state) else _saved(built, untied)

    def why(key: str, weights: Any, untied: Any) -> str:
        return "buffer" if key not in weights else "" if key in untied else "tied"

    saved = {k: (tuple(v.shape), why(k, weights_saved, untied_saved)) for k, v in all_saved.items()}
    memory = {k: (tuple(v.shape), why(k, weights, untied)) for k, v in state.items()}
    found = {"saved": saved} | ({"in memory": memory} if memory != saved else {})
    if type(built).__name__.endswith("ForConditionalGeneration") and (renamed := older_names(built, all_saved)):
        found["saved by older versions"] = {renamed[key]: value for key, value in saved.items()}
    return found


def older_names(built: Any, saved: dict[str, Any]) -> dict[str, str]:
    """Key of save_pretrained -> the key that files of older versions hold; {} where they are the same.

    A model that was loaded from such a file is saved in its names again.
    """
    built._weight_conversions = get_model_conversion_mapping(built, add_legacy=False) or None
    before = list(_saved(built, dict(built.state_dict())))
    del built._weight_conversions
    renamed = dict(zip(saved, before, strict=True)) if len(before) == len(saved) else {}
    return renamed if set(before) != set(saved) and len(set(before)) == len(before) else {}


def in_memory(built: Any) -> dict[str, Form]:
    """The names and shapes alone, in a fraction of the time."""
    tied = built.all_tied_weights_keys
    return {"in memory": {k: (tuple(v.shape), "tied" if k in tied else "") for k, v in built.state_dict().items()}}


def _saved(built: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in revert_weight_conversion(built, state).items() if hasattr(v, "shape")}


def alternatives(name: str, value: Any, kind: Kind) -> Iterator[Any]:
    """Other values of a field that could change the tensors."""
    if name in kind.choices:
        yield from (v for v in kind.choices[name] if v != value)
        return
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (
            value + 1,
            value * 2,
            value + 2,
            value * 3,
            *([value - 1] if value > 1 else ()),
            *([value // 2] if value > 3 else ()),
        )
        yield from ([0] if value == 1 else [])
        yield None
    elif isinstance(value, float):
        yield from (value + 1.0, value * 2)
    elif isinstance(value, list):
        if LAYER_TYPES.match(name.rpartition(".")[2]):
            yield value[::-1]
            yield from ([item] * len(value) for item in sorted(set(kind.defaults().get(name) or value), key=str))
        elif value and all(isinstance(item, int) for item in value):
            yield [item + 1 for item in value]
            yield [item * 2 for item in value]
        elif not value and LAYER_LIST.match(name.rpartition(".")[2]):
            yield [0]
            yield [1, 2]
            yield [0, 2]
    elif value is None and LAYER_LIST.match(name.rpartition(".")[2]):
        yield [0]
        yield [1, 2]
        yield [0, 2]
    elif value is None:
        yield from (6, 24, True)
