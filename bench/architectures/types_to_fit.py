"""The model types that get a table, the classes of each, and what a probe of it must heed."""

from __future__ import annotations

from probes import Kind
from transformers.models.auto import modeling_auto as auto

_MAPPINGS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
_OF_ENCODERS = (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES)

ALL = """
llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt stablelm starcoder2
olmo olmo2 olmo3 cohere cohere2 granite smollm3 glm glm4 exaone4 nemotron ernie4_5 gpt_bigcode codegen biogpt xglm seed_oss
hunyuan_v1_dense arcee apertus helium diffllama lfm2 ministral3 persimmon
mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 olmoe granitemoe phimoe dbrx glm4_moe gpt_oss ernie4_5_moe dots1 minimax
minimax_m2 hunyuan_v1_moe flex_olmo jetmoe longcat_flash lfm2_moe glm4_moe_lite
jamba bamba zamba zamba2 falcon_h1 nemotron_h granitemoehybrid qwen3_next mamba mamba2 falcon_mamba rwkv recurrent_gemma xlstm
t5 mt5 umt5 bart mbart pegasus marian m2m_100 whisper blenderbot switch_transformers longt5 led speech_to_text
bert roberta xlm-roberta distilbert deberta deberta-v2 electra albert modernbert camembert mpnet esm nomic_bert eurobert
vit deit beit dinov2 clip clip_text_model clip_vision_model siglip siglip_text_model siglip_vision_model
wav2vec2 hubert
llava llava_next llava_onevision qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe internvl mllama paligemma gemma3 gemma3n idefics2 idefics3
smolvlm mistral3 llama4 llama4_text aya_vision pixtral video_llava vipllava qwen2_audio blip-2 kimi_k25 glm4v qwen3_5 qwen3_5_moe
gemma4 gemma4_text qwen3_5_text qwen3_5_moe_text qwen2_vl_text qwen2_5_vl_text qwen3_vl_text mllama_text_model
""".split()


def CLASSES(model_type: str) -> list[str]:
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
    return found


KINDS: dict[str, Kind] = {kind.model_type: kind for kind in (
    Kind("qwen3_moe", choices={"mlp_only_layers": [[], [0], [1], [0, 2]], "decoder_sparse_step": [1, 2]}),
    Kind("qwen2_moe", choices={"mlp_only_layers": [[], [0], [1], [0, 2]], "decoder_sparse_step": [1, 2]}),
    Kind("deepseek_v3", choices={"first_k_dense_replace": [0, 1, 2], "n_group": [1], "topk_group": [1], "num_experts_per_tok": [2], "q_lora_rank": [None, 11, 13, 17]}),
    Kind("deepseek_v2", choices={"first_k_dense_replace": [0, 1, 2], "n_group": [1], "topk_group": [1], "num_experts_per_tok": [2], "q_lora_rank": [None, 11, 13, 17]}),
)}
