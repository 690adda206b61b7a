"""The model types that get a table, the classes of each, and what a probe of it must heed."""

from __future__ import annotations

from probes import Flat, Kind
from transformers.models.auto import modeling_auto as auto

_MAPPINGS = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    auto.MODEL_FOR_CTC_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
    auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
)
_OF_ENCODERS = (
    auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
)

ALL = [
    "qwen2_vl",
    "mixtral",
    "phi",
    "falcon",
    "mistral3",
    "gemma3",
    "qwen3_vl",
    "smollm3",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen2_5_vl",
    "t5",
    "bart",
    "whisper",
    "bert",
    "roberta",
    "distilbert",
    "vit",
    "clip",
    "siglip",
    "modernbert",
    "stablelm",
    "starcoder2",
    "olmo2",
    "olmoe",
    "cohere",
    "granitemoe",
    "gpt_oss",
    "glm4_moe",
    "bamba",
    "jamba",
    "mamba",
    "mamba2",
    "nemotron_h",
    "zamba2",
    "falcon_h1",
    "granitemoehybrid",
    "deepseek_v2",
    "phimoe",
    "dbrx",
    "llava",
    "llava_next",
    "llava_onevision",
    "internvl",
    "mllama",
    "paligemma",
    "idefics3",
    "smolvlm",
    "llama4",
    "qwen3_vl_moe",
    "clip_text_model",
    "clip_vision_model",
    "siglip_text_model",
    "siglip_vision_model",
    "llama4_text",
    "mbart",
    "pegasus",
    "marian",
    "m2m_100",
    "mt5",
    "electra",
    "deberta",
    "deberta-v2",
    "xlm-roberta",
    "albert",
    "gpt_neo",
    "gptj",
    "mpt",
    "olmo",
    "olmo3",
    "cohere2",
    "granite",
    "glm",
    "glm4",
    "exaone4",
    "nemotron",
    "ernie4_5",
    "gpt_bigcode",
    "codegen",
    "biogpt",
    "seed_oss",
    "hunyuan_v1_dense",
    "arcee",
    "apertus",
    "lfm2",
    "ministral3",
    "ernie4_5_moe",
    "dots1",
    "minimax",
    "minimax_m2",
    "lfm2_moe",
    "glm4_moe_lite",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "gemma3n",
    "gemma4",
    "gemma4_text",
    "qwen3_5_text",
    "switch_transformers",
    "led",
    "speech_to_text",
    "camembert",
    "mpnet",
    "esm",
    "deit",
    "dinov2",
    "pixtral",
    "glm4v",
    "video_llava",
    "qwen2_audio",
    "wav2vec2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "opt",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "bloom",
    "bitnet",
    "deepseek_v32",
    "exaone_moe",
    "flex_olmo",
    "glm_moe_dsa",
    "helium",
    "hubert",
    "hunyuan_v1_moe",
    "jetmoe",
    "layoutlmv3",
    "longformer",
    "ministral",
    "mistral4",
    "modernbert-decoder",
    "nanochat",
    "nomic_bert",
    "siglip2",
    "t5gemma",
    "umt5",
    "vaultgemma",
    "wavlm",
]


_LATENT_EXPERTS = {
    "first_k_dense_replace": [0, 1, 2],
    "n_group": [1],
    "topk_group": [1],
    "num_experts_per_tok": [2],
    "q_lora_rank": [None, 11, 13, 17],
}


_TILES = {"vision_config.image_size": 560, "vision_config.patch_size": 14, "vision_config.max_num_tiles": 4}
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_SPELLED = {"layers_block_type": {"mamba": "linear_attention", "attention": "full_attention"} | _LETTERS}


def classes_of(model_type: str) -> list[str]:
    """The usual class first."""
    import transformers

    found: list[str] = []
    encoder = model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    for mapping in _MAPPINGS:
        if mapping in _OF_ENCODERS and not encoder:
            continue
        names = mapping.get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in found and hasattr(transformers, name):
                found.append(name)
    encoders = [name.removesuffix("Model") + "EncoderModel" for name in found if name.endswith("Model")]
    return found + [name for name in encoders if hasattr(transformers, name)]


def _expanded(values: Flat) -> int:
    return int(values.get("mamba_expand", 2) * values["hidden_size"])


KINDS: dict[str, Kind] = {
    kind.model_type: kind
    for kind in (
        Kind("bamba", derived={"mamba_d_head": lambda v: _expanded(v) // v["mamba_n_heads"]}),
        Kind("granitemoehybrid", derived={"mamba_d_head": lambda v: _expanded(v) // v["mamba_n_heads"]}),
        Kind("falcon_h1", derived={"mamba_d_ssm": lambda v: v["mamba_n_heads"] * v["mamba_d_head"]}),
        Kind("mamba2", derived={"head_dim": lambda v: v.get("expand", 2) * v["hidden_size"] // v["num_heads"]}),
        Kind("dbrx", choices={"attn_config.rope_theta": [10000.0, 500000.0]}),
        Kind("dots1", choices=_LATENT_EXPERTS | {"n_shared_experts": [1, 2, 3], "n_routed_experts": [4, 5, 6, 7]}),
        Kind("esm", choices={"vocab_size": [33, 41, 57, 77]}),
        Kind("gpt_neo", derived={"attention_types": lambda v: [[["global"], v["num_layers"]]]}),
        Kind("internvl", fixed={"downsample_ratio": 0.5}),
        Kind("lfm2", fixed={"block_ffn_dim_multiplier": 1.0}),
        Kind("lfm2_moe", layered={"layer_types": ["full_attention", "conv"]}),
        Kind("mllama", fixed=_TILES),
        Kind("nemotron_h", layered={"layers_block_type": sorted({*_LETTERS.values()})}, spelled=_SPELLED),
        Kind("zamba", layered={"layers_block_type": ["linear_attention", "hybrid"]}, spelled=_SPELLED),
        Kind("zamba2", layered={"layers_block_type": ["linear_attention", "hybrid"]}, spelled=_SPELLED),
        Kind("qwen3_moe", choices={"mlp_only_layers": [[], [0], [1], [0, 2]], "decoder_sparse_step": [1, 2]}),
        Kind("qwen2_moe", choices={"mlp_only_layers": [[], [0], [1], [0, 2]], "decoder_sparse_step": [1, 2]}),
        Kind("deepseek_v3", choices=_LATENT_EXPERTS),
        Kind("deepseek_v2", choices=_LATENT_EXPERTS),
    )
}
