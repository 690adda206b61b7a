"""Names of tensors: what a key means whoever wrote it, its role among its siblings, and ranges of numbers.

`parse` strips wrappers and takes a name apart; `role` alone replaces numbers and is what findings are grouped by.

>>> key = parse("model.module.decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight")
>>> key.block, key.layer, key.expert, key.role, key.function
('decoder.layers', 3, 12, 'decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight', 'mlp_in')
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from ckptlint.model.text import NUMBER
from ckptlint.patterns import lazy_pattern


def role(fqn: str) -> str:
    """The name with the numbers of layers, experts and groups replaced by `*`."""
    return NUMBER.sub("*", fqn)


def numbers_in(fqn: str) -> tuple[int, ...]:
    """The numbers that `role` takes out, in order; one of thousands of digits, which Python refuses, counts as 0."""
    return tuple(int(number) if len(number) < 18 else 0 for number in NUMBER.findall(fqn))


KeyKind = Literal["model", "optimizer", "runtime"]

_Attention = Literal["qkv", "q", "k", "v", "attn_out", "linear_attn"]
KeyFunction = Literal[_Attention, "embedding", "output", "router", "norm", "mlp_in", "mlp_out", "other"]

WRAPPERS = frozenset({"app", "state", "model", "module"})
"""Leading parts that say nothing about the parameter."""

COPIES = frozenset({"ema", "ema_model", "model_ema", "teacher", "ref_model", "target"})
"""Leading parts of a second copy of the model."""

WRAPPING = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts that a wrapper puts into the names of what it wraps."""

_STAGE = lazy_pattern(r"model\d+|model_pp\d+|mp_rank_\d+|chained_\d+")
_LAYER_WORDS = frozenset(
    {"layers", "h", "blocks", "block", "layer"}
    | {"double_blocks", "single_blocks", "transformer_blocks", "single_transformer_blocks"}
)
_EXPERT_WORDS = frozenset({"experts", "local_experts", "deepspeed_experts"})

_RUNTIME = lazy_pattern(
    r"(rng_state|rerun_state_machine_state|dataloader\w*|lr_scheduler|opt_param_scheduler|train_state|args|iteration|"
    r"checkpoint_version|num_floating_point_operations_so_far|common_state|scheduler|train)([./].*)?"
)

_OPTIMIZER = lazy_pattern(r"(optim|optimizer|opt|optimizers)(_?\d+)?")
_SHORT_NUMBER = lazy_pattern(r"[0-9]{1,9}")
_NUMBERED_WEIGHT = lazy_pattern(r"(weight|bias)([0-9]{1,9})")
_COMPONENTS = frozenset({"query", "key", "value", "z", "beta", "alpha"})

_TOKEN_TABLES = (["shared"], ["embed_in"], ["embeddings"], ["additional_embedding"])

_CLASSES: dict[str, KeyFunction] = {
    **dict.fromkeys(("word_embeddings", "embed_tokens", "tok_embeddings"), "embedding"),
    **dict.fromkeys(("wte", "embed", "token_embedding"), "embedding"),
    **dict.fromkeys(("output_layer", "lm_head", "head", "output"), "output"),
    **dict.fromkeys(("router", "expert_bias", "e_score_correction_bias"), "router"),
    **dict.fromkeys(("linear_qkv", "qkv_proj", "c_attn", "query_key_value", "wqkv", "qkv"), "qkv"),
    **dict.fromkeys(("q_proj", "wq", "q", "linear_q", "q_b_proj"), "q"),
    **dict.fromkeys(("k_proj", "wk", "k", "linear_k"), "k"),
    **dict.fromkeys(("v_proj", "wv", "v", "linear_v"), "v"),
    **dict.fromkeys(("linear_proj", "o_proj", "wo", "out_proj"), "attn_out"),
    **dict.fromkeys(("linear_fc1", "gate_up_proj", "gate_and_up_projs", "w13", "gate_proj", "up_proj"), "mlp_in"),
    **dict.fromkeys(("w1", "w3", "fc1", "gate_up", "up"), "mlp_in"),
    **dict.fromkeys(("linear_fc2", "down_proj", "down_projs", "w2", "fc2", "down"), "mlp_out"),
    **dict.fromkeys(("in_proj", "conv1d", "A_log", "dt_bias"), "linear_attn"),
}

NEVER_ZERO: frozenset[KeyFunction] = frozenset({"q", "k", "v", "qkv", "mlp_in", "embedding", "output"})
"""What no model starts with one value in; projections back into the residual stream do in some.

Source: transformers 5.23: 527 types, freshly initialised; Tensor Programs V (muP), where q and output may start as
zeros
"""

COMPUTED = frozenset(
    {"inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "freqs_cis", "position_ids", "token_type_ids"}
    | {"masked_bias", "attn_mask", "causal_mask", "relative_position_index", "embed_positions.weights", "_extra_state"}
    | {"num_batches_tracked", "running_mean", "running_var", "num_updates"}
)
"""Last parts of the names of buffers that a module computes from its configuration, or counts in."""

MASTER_COPIES = ("param", "fp32_param", "main_param", "master_param")

MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", *MASTER_COPIES})
"""States that have one element per element of their parameter."""

SQUARES = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "square_avg", "sum", "exp_inf"}
    | {"variance", "row_var", "col_var"}
)
"""States that are sums, means or maxima of squares or magnitudes.

Source: torch.optim: Adam, NAdam, RAdam, RMSprop, Adadelta, Adagrad, Adamax, Adafactor; Adafactor of transformers,
fairseq
"""

_QUANTISED_STATES = {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"}
STATE_NAMES = MOMENTS | SQUARES | _QUANTISED_STATES | {"step", "exp_avg_diff", "grad_avg", "acc_delta", "momentum"}
"""The names of states, which tell them from the path of their parameter."""


class Key(NamedTuple):
    """A key taken apart.

    Attributes:
        fqn: the name as stored.
        kind: part of the model, of the optimizer, or runtime state that no shape rule concerns.
        scope: what was stripped and separates name spaces: pipeline stage (`model1`), optimizer chain (`chained_0`),
            module of a multimodal job (`mimo.vision`), second copy (`ema`).
        path: the name without wrappers and scope; of an optimizer key the part after `optimizer.`.
        block: the path up to and with the word before the layer number (`decoder.layers`); "" outside of layers.
        layer: the layer's number, None where layers are stacked or there is none.
        expert: the expert's number, None where experts are stacked or there is none.
        in_experts: whether the parameter belongs to routed experts (never to a shared one).
        component: the half or part of a fused weight that this is: `w`, `v`, `query`, ...; "" otherwise.
        role: the path with the numbers of layer and expert replaced by `*`.
        function: what the parameter does, known by its last parts; `other` when unknown.
    """

    fqn: str
    kind: KeyKind
    scope: tuple[str, ...]
    path: str
    block: str = ""
    layer: int | None = None
    expert: int | None = None
    in_experts: bool = False
    component: str = ""
    role: str = ""
    function: KeyFunction = "other"

    @property
    def is_stacked(self) -> bool:
        """Whether the name has a layer word and no number after it: layers may be stacked on an axis."""
        return self.layer is None and bool(self.block)


@lru_cache(maxsize=1 << 17)
def parse(fqn: str) -> Key:
    """A name taken apart; names of optimizer states are only recognised, `inventory` maps them to parameters."""
    words = [word for word in fqn.split(".") if word not in WRAPPING]
    scope: list[str] = []
    while len(words) > 1:
        if words[0] == "mimo" and len(words) > 2:
            scope.append(f"mimo.{words[1]}")
            words = words[2:]
        elif words[0] in COPIES or _STAGE.fullmatch(words[0]):
            scope.append(words.pop(0))
        elif words[0] in WRAPPERS:
            words = words[1:]
        else:
            break
    path = ".".join(words)
    if _RUNTIME.fullmatch(path) or path.endswith("_extra_state") or "_extra_state/" in path:
        return Key(fqn, "runtime", tuple(scope), path)
    if _OPTIMIZER.fullmatch(words[0]) and len(words) > 1:
        return Key(fqn, "optimizer", tuple(scope), path)
    return _model_key(fqn, tuple(scope), words)


def _model_key(fqn: str, scope: tuple[str, ...], words: list[str]) -> Key:
    """What a model's key says: block, layer, expert, function and component, word by word."""
    layer = expert = None
    block = ""
    in_experts = False
    shown = list(words)
    for i, word in enumerate(words):
        number = words[i + 1] if i + 1 < len(words) and _SHORT_NUMBER.fullmatch(words[i + 1]) else None
        if word in _LAYER_WORDS and not block and (number is not None or word == "layers"):
            block = ".".join(words[: i + 1])
            if number is not None:
                layer, shown[i + 1] = int(number), "*"
        elif word in _EXPERT_WORDS:
            in_experts = True
            if number is not None and expert is None:
                expert, shown[i + 1] = int(number), "*"
    last = words[-1]
    if in_experts and expert is None and (match := _NUMBERED_WEIGHT.fullmatch(last)):
        expert, shown[-1], last = int(match[2]), f"{match[1]}*", match[1]
    component = last if last in _COMPONENTS and len(words) > 1 else ""
    if last.endswith(("_w", "_v")) and last[:-2].startswith(("weight", "bias")):
        component = last[-1]
    path, role_, function = ".".join(words), ".".join(shown), _function_of(words, in_experts)
    return Key(fqn, "model", scope, path, block, layer, expert, in_experts, component, role_, function)


def _function_of(all_words: list[str], in_experts: bool) -> KeyFunction:
    """What a parameter does, by the last of its parts that says so."""
    words = [word for word in all_words if not word.isdecimal()]
    if not words:
        return "other"
    tail = words[-1]
    if "layer_norm" in tail or tail.startswith(("ln_", "norm")):
        return "norm"
    names = words[-1:] if tail in _CLASSES else words[-3:-1] if tail in _COMPONENTS else words[-2:-1]
    for name in reversed(names):
        if name == "gate":  # of a mixture of experts; the gate of a gated unit is gate_proj
            return "router" if not in_experts else "other"
        if "norm" in name or name.startswith("ln_"):
            return "norm"
        if name == "c_fc":
            return "mlp_in"
        if name == "c_proj":
            return "mlp_out" if "mlp" in words else "attn_out"
        if name in _CLASSES:
            return _CLASSES[name]
    return "other"


_HALF = lazy_pattern(r"(^|\.)(gate_proj|up_proj|w1|w3)\.weight$")


def gated_role(key: Key) -> str:
    """The role of a weight of a gated unit, the same for gate and up; "" for all others.

    >>> gated_role(parse("layers.0.mlp.up_proj.weight")), gated_role(parse("layers.0.mlp.up_proj.lora_A.weight"))
    ('layers.*.mlp.half', '')
    """
    return _HALF.sub(r"\1half", key.role) if _HALF.search(key.role) else ""


Block = tuple[tuple[str, ...], str]
"""The module of a multimodal job, and the path up to the layer number."""

_ADAPTER = lazy_pattern(r"lora|adapter|dora|ia3|prompt|prefix_tuning|boft|oft_", re.IGNORECASE)


def block_of(key: Key) -> Block:
    """The block that a parameter's layer belongs to, whatever pipeline stage wrote it."""
    return modules_of(key), key.block


def modules_of(key: Key) -> tuple[str, ...]:
    """The module of a multimodal job that a key belongs to."""
    return tuple(name for name in key.scope if name.startswith("mimo."))


def module_path(key: Key) -> tuple[str, ...]:
    """The path of the module that owns a parameter, its last part the module's own name.

    >>> from ckptlint.vocabulary.keys import parse
    >>> module_path(parse("decoder.layers.3.mlp.linear_fc1.weight_w")), module_path(parse("layers.0.experts.down_proj"))
    (('decoder', 'layers', '3', 'mlp', 'linear_fc1'), ('layers', '0', 'experts', 'down_proj'))
    """
    words = key.path.split(".")
    while len(words) > 1 and (words[-1].startswith(("weight", "bias")) or words[-1] == key.component):
        del words[-1]
    return tuple(words)


def layer_number(fqn: str) -> int | None:
    """The number of the layer in a key, or else its first number; None without one."""
    return layer if (layer := parse(fqn).layer) is not None else next(iter(numbers_in(fqn)), None)


def inside_layer(key: Key) -> tuple[str, ...]:
    """The parts of a path after the layer number."""
    before = len(key.block.split(".")) if key.block else 0
    return tuple(key.path.split(".")[before + (key.layer is not None) :])


def is_token_table(key: Key) -> bool:
    """Whether it is the name of an embedding of tokens."""
    return not key.block and (key.function == "embedding" or key.path.split(".")[-2:-1] in _TOKEN_TABLES)


def is_adapter(key: Key) -> bool:
    """Whether a parameter belongs to a low-rank or other adapter, which some layers have and others have not."""
    return bool(_ADAPTER.search(key.path))


def state_name(fqn: str) -> str:
    """The name of the state in the key of an optimizer: its last part, or the one after `state`; "" for any other key.

    >>> state_name("optimizer.state.layers.0.w.exp_avg"), state_name("optimizer.state.exp_avg.layers.0.w")
    ('exp_avg', 'exp_avg')
    >>> state_name("optimizer.state.layers.0.w.exp_avg.codes")
    ''
    """
    words = fqn.split(".") if parse(fqn).kind == "optimizer" else [""]
    after = words[words.index("state") + 1] if "state" in words[:-1] else ""
    return next((word for word in (words[-1], after) if word in STATE_NAMES), "")
