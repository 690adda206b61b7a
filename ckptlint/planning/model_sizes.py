"""Sizes of a model that a job does not divide, by what `config.json` says of the model and by who refuses that.

What every framework named here refuses is a refusal; what some of them take is a note that names both. An odd
vocabulary is neither: vLLM, SGLang and Megatron-Core pad it, transformers cuts it unevenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptlint.analysis.fit.trusted_config import number, trusted
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.planning.outcome import Constraint
from ckptlint.vocabulary.config_fields import QUANTISATION, attributes
from ckptlint.vocabulary.keys import parse

_ALL = "transformers, vLLM, SGLang and Megatron-Core refuse that"
_HEADS = "transformers 5.23, first forward with tp_plan='auto'; vLLM, QKVParallelLinear; SGLang, models"
_PARTS = "vLLM, layers/linear.py: divide; SGLang, layers/moe: FusedMoE"
_BLOCKS = "vLLM, layers/quantization: create_weights of fp8, gptq and awq"


def undivided(ckpt: Checkpoint, to: Mapping[str, int]) -> Iterator[Constraint]:
    """What the declared sizes of a model, in any format but Megatron-Core's, keep a job of these axis sizes from.

    Source: transformers 5.23, loaded with `tp_plan="auto"`: heads and KV heads must divide, all else is cut unevenly.
    vLLM (config/model.py, verify_with_parallel_config), SGLang, megatron-core 0.19 (TransformerConfig)
    """
    declared = trusted(ckpt)
    tp, pp, ep = (to.get(axis, 1) for axis in ("tp", "pp", "ep"))
    heads, groups, experts, layers = (number(declared, name) for name in ("heads", "kv_groups", "experts", "layers"))
    is_latent = "kv_rank" in declared  # multi-head latent attention stores one compressed head for all KV heads
    if heads and heads % tp:
        what = plural(heads, "attention head", "does")
        yield Constraint("fails", f"{what} not divide by tp {tp}: {_ALL}", source=_HEADS)
    elif groups and groups % tp and not is_latent:
        what = plural(groups, "KV head", "does")
        if tp % groups:
            yield Constraint("fails", f"{what} not divide by tp {tp}: {_ALL}", source=_HEADS)
        else:
            copies = "vLLM, SGLang and Megatron-Core (0.16 on) give several ranks the same head, transformers refuses"
            yield Constraint("note", f"{what} not divide by tp {tp}: {copies}", source=_HEADS)
    yield from _feed_forward(ckpt, tp, to.get("etp", 1 if ep > 1 else tp))
    if experts and experts % ep:
        taken = "Megatron-Core and SGLang refuse that, vLLM spreads them unevenly"
        yield Constraint("note", f"{plural(experts, 'expert', 'does')} not divide by ep {ep}: {taken}")
    if layers and layers % pp and not {"hybrid_pattern", "heterogeneous"} & declared.keys():
        taken = "Megatron-Core refuses that unless the job names an uneven cut, vLLM and torchtitan cut unevenly"
        yield Constraint("note", f"{plural(layers, 'layer', 'does')} not divide by pp {pp}: {taken}")


def _feed_forward(ckpt: Checkpoint, tp: int, etp: int) -> Iterator[Constraint]:
    """Notes on feed-forward layers, dense ones and experts, of which a rank would hold no whole rows or blocks."""
    # a configuration may declare a size that no layer has, as where all layers have experts: only stored ones count
    stored: dict[bool, set[int]] = {False: set(), True: set()}
    for key, tensor in ckpt.tensors.items():
        name = parse(key)
        if name.function in ("mlp_in", "mlp_out"):
            stored[name.in_experts].update(tensor.global_shape)
    block = _block(ckpt)
    for in_experts, ranks in ((False, tp), (True, etp)):
        sizes = {number(trusted(ckpt), name) for name in ("ffn", "moe_ffn")}
        for size in sorted(size for size in sizes if size and {size, 2 * size} & stored[in_experts]):
            what = f"the {size:,} rows of {'an expert' if in_experts else 'a feed-forward layer'}"
            by = f"{'etp' if in_experts and ranks != tp else 'tp'} {ranks}"
            if size % ranks:
                taken = "vLLM, SGLang and Megatron-Core refuse that, transformers cuts them unevenly"
                yield Constraint("note", f"{what} do not divide by {by}: {taken}", source=_PARTS)
            elif ranks > 1 and block and size // ranks % block:
                why = f"no whole blocks of {block} with a scale: vLLM and SGLang refuse that"
                yield Constraint("note", f"{what} are {size // ranks:,} for each rank of {by}, {why}", source=_BLOCKS)


def _block(ckpt: Checkpoint) -> int:
    """Rows of a quantised weight that share a scale; 0 where none are declared."""
    values = ckpt.config.values if ckpt.config is not None else {}
    for section in (attributes(values.get(name)) for name in QUANTISATION):
        shape, group = section.get("weight_block_size"), section.get("group_size")
        rows = shape[0] if isinstance(shape, (list, tuple)) and shape else group
        if section.get("quant_method") in ("fp8", "gptq", "awq") and isinstance(rows, int) and rows > 0:
            return rows
    return 0
