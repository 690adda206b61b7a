"""What the files of a step are that lie beside its tensors, told by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ckptlint.vocabulary.litter import is_litter

Content = Literal["pickle", "perhaps pickle", "json", "other"]
"""How a file is read: as a pickle, alone or in an archive of torch.save, or if it is one; as JSON; not at all."""


@dataclass(frozen=True, slots=True)
class Family:
    """Files that trainers write for one purpose.

    Attributes:
        name: what they hold, as reports call it.
        content: how they are read.
        pattern: matches their whole names; its group `number`, where it has one, counts them.
        counted_by: what the number counts, `rank` or `object`, where a finished save has all of them from 0 on.
    """

    name: str
    content: Content
    pattern: re.Pattern[str]
    counted_by: str = ""


def _family(name: str, content: Content, pattern: str, counted_by: str = "") -> Family:
    return Family(name, content, re.compile(pattern), counted_by)


FAMILIES = (
    # accelerate.checkpointing (1.15), transformers.trainer (5.x), torch_xla
    _family("random state", "pickle", r"(rng_state|random_states)_(?P<number>\d{1,9})\.(pth|pkl)", "rank"),
    _family("random state", "pickle", r"rng_state\.pth"),
    _family("optimizer state", "pickle", r"optimizer(_\d+)?\.(pt|bin)"),
    _family("scheduler state", "pickle", r"scheduler(_\d+)?\.(pt|bin)"),
    _family("loss scaler", "pickle", r"scaler\.pt"),
    _family("training arguments", "pickle", r"training_args\.bin"),
    _family("sampler state", "pickle", r"sampler(_\d+)?\.bin"),
    _family("dataloader state", "pickle", r"dl_state_dict(_\d+)?\.bin|(train_)?dataloader[\w.-]*\.pt|data\.pt"),
    _family("custom object", "pickle", r"custom_checkpoint_(?P<number>\d{1,9})\.pkl", "object"),
    # Lightning's sharded strategies; Megatron-Bridge; prime-rl, OLMo-core
    _family("trainer state", "pickle", r"meta\.pt|(latest_)?train_state\.pt|(progress|trainer_state)\.pt|rank\d+\.pt"),
    _family(
        "weights, pickled",
        "pickle",
        r"(diffusion_)?pytorch_model(_fsdp)?(_\d+)?(\.\w+)?\.bin|adapter_model\.bin|consolidated\.\d+\.pth|value_head\.bin",
    ),
    # SAF004 names the format
    _family("weights, pickled", "perhaps pickle", r"(diffusion_)?(pytorch_)?model[\w.-]*-\d{5}-of-\d{5}[\w.-]*\.bin"),
    _family("metadata of another save", "perhaps pickle", r"(__\d{1,9})?\.metadata(\.tmp|\.bck)?"),
    _family("trainer state", "json", r"trainer_state\.json"),
    _family("checksums", "other", r"integrity\.json|ckptlint\.seal\.json|(sha256|md5)sums?(\.txt)?"),
    _family(
        "tokenizer",
        "other",
        r"tokenizer[\w.-]*\.(json|model(\.v\d+)?|txt)|special_tokens_map\.json|added_tokens\.json|vocab[\w.-]*\.(json|txt)"
        r"|merges\.txt|.*\.(tiktoken|spm|bpe|vocab)|(spiece|sentencepiece[\w.]*|spm)\.model|chat_template\.\w+",
    ),
    _family("log", "other", r"events\.out\.tfevents\..*|.*\.(log|csv|tsv|jsonl|out|err)|.*_results\.json"),
    _family("code", "other", r".*\.(py|sh|ipynb|cu|cpp|h)"),
    _family(
        "weights in another format",
        "other",
        r".*\.(h5|msgpack|onnx(_data)?|gguf|ggml|ot|tflite|mlmodel|pdparams|npz)|.*\.index(\.[\w-]+)?\.json",
    ),
    _family(
        "tracker", "other", r"latest(_checkpointed_iteration\.txt|_universal)?|(dlrover_latest|newest_checkpoint)\.txt"
    ),
    _family("settings", "other", r".*\.(json5?|ya?ml|toml|ini|cfg|args|hydra)"),
    _family(
        "text",
        "other",
        r"(README|LICENSE|LICENCE|NOTICE|COPYING|USE_POLICY|CHANGELOG)([._-].*)?|.*\.(md|txt|rst|pdf|html|jinja2?)"
        r"|.*\.(png|jpe?g|gif|svg|webp|bib|cff)|\.git(attributes|ignore|keep|modules)",
    ),
    _family("mark", "other", r"_SUCCESS|\.?(done|complete|finished|success)|\.validated|.*-unfinished"),
)

LITTER = _family("left by other tools", "other", "")
OTHER_STEP = _family("another step", "other", "")
"""Families that no pattern tells: `is_litter` does, and the number in the name of a folder."""

_PICKLES = re.compile(r".+\.(pt|pth|pkl|pickle|bin|ckpt|p|pck|joblib|dill)", re.IGNORECASE | re.DOTALL)
_FOLDERS = re.compile(
    r"\.(?!hf_metadata).+|runs?|logs?|wandb|tensorboard|tb_logs|mlruns|lightning_logs|__pycache__|code|src|assets|images|figures"
)


def family_of(name: str) -> Family | None:
    """The family that a file's name tells, the path to it aside; None for a name that tells nothing.

    >>> family_of("rng_state_3.pth").name, family_of("checkpoint.whatever"), family_of("README.pt")
    ('random state', None, None)
    """
    if is_litter(name):
        return LITTER
    found = next((family for family in FAMILIES if family.pattern.fullmatch(name)), None)
    return None if found is not None and found.content == "other" and may_be_pickle(name) else found


def number_of(name: str) -> tuple[Family, int] | None:
    """The family of a file that is one of a counted set, and its number."""
    family = family_of(name)
    match = family.pattern.fullmatch(name) if family is not None and family.counted_by else None
    return None if family is None or match is None else (family, int(match["number"]))


def may_be_pickle(name: str) -> bool:
    """Whether files are called so that `torch.load` or `pickle.load` reads."""
    return _PICKLES.fullmatch(name) is not None


def holds_no_state(folder: str) -> bool:
    """Whether a folder of this name holds logs, code or pictures, not a part of the step."""
    return _FOLDERS.fullmatch(folder) is not None
