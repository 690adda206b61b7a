"""CFG004: no wrapper is left in the keys of an export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import Fit, config_fit
from ckptlint.analysis.fit.pairing import INNER_WORDS, WRAPPER_WORDS
from ckptlint.model import Checkpoint
from ckptlint.model.text import braces, some
from ckptlint.rule import Confidence, Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.config_fields import MODEL_CONFIG

_LEAST = 0.5
_PARTS = frozenset({"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
_LEADING = frozenset({"module", "base_model"})


@rule("CFG004", "renamed-keys", Severity.ERROR)
def renamed_keys(ckpt: Checkpoint) -> Iterator[Finding]:
    """The keys of an export still carry the name of a wrapper.

    What it checks:
        In a folder of exported weights no key carries more than the `config.json` beside it implies: `_orig_mod.` of
        torch.compile, `_fsdp_wrapped_module.`, `module.` of DataParallel, `base_model.model.` of peft, at the start or
        in the middle; nor a part of its name twice (`encoder.encoder.`). If the model is not known, these words in more
        than half of the keys are a warning. Training checkpoints may carry them: their loaders take them off again.

        No key belongs to an adapter that was not merged (`base_layer`, `lora_A`), unless the configuration has fields
        about `lora`, or code of its own.
    Why it matters:
        A loader finds none of the keys it looks for, keeps the initial values and raises no error.
    Usual causes:
        The state dict was taken from the wrapper instead of the model inside it, or a conversion renamed keys twice.
    How to fix:
        Save the wrapped model itself (`model._orig_mod`, `accelerator.unwrap_model`), or strip the wrapper's name from
        the keys. Merge an adapter with `merge_and_unload()` first.
    See:
        torch.distributed.checkpoint.state_dict.get_model_state_dict, huggingface/transformers#46650
    """
    if ckpt.format not in ("safetensors", "torch") or ckpt.config is None or ckpt.config.file != MODEL_CONFIG:
        raise NotApplicable("these are no files that a library loads by a configuration")
    unmerged = [key for key in ckpt.tensors if _PARTS.intersection(key.split("."))]
    if unmerged and not any(map(_speaks_of_adapters, ckpt.config.values)):
        yield _unmerged(ckpt, unmerged)
        return
    fit = config_fit(ckpt)
    if isinstance(fit, Fit):
        yield from _certain(ckpt, fit)
    else:
        yield from _likely(ckpt)


def _speaks_of_adapters(field: str) -> bool:
    """Whether a field says that adapters belong to the model; ranks of latent attention (`kv_lora_rank`) do not."""
    return field == "auto_map" or ("lora" in field and not field.endswith("lora_rank"))


def _unmerged(ckpt: Checkpoint, keys: list[str]) -> Finding:
    return Finding(
        f"{len(keys):,} of {len(ckpt.tensors):,} keys belong to an adapter that was not merged into the model",
        at=Location(label=ckpt.metadata_file),
        identity=("unmerged",),
        why="from_pretrained finds no weight for these modules, leaves them untrained and raises no error",
        notes=(("keys", some(braces(keys), noun="pattern")),),
        hint="save what merge_and_unload() returns, or save the adapter and its base model apart",
    )


def _certain(ckpt: Checkpoint, fit: Fit) -> Iterator[Finding]:
    total = len(fit.pairing.stored) + len(fit.pairing.unknown)
    for words, count in fit.pairing.carried.items():
        shown = next(
            (
                f"{stored} for {name}"
                for name, stored in fit.pairing.stored.items()
                if stored != name and words in stored
            ),
            "",
        )
        is_base = (
            words.strip(".") not in WRAPPER_WORDS
            and words.count(".") == 1
            and not any(name.startswith(words) for name in fit.expected.tensors)
        )
        if not is_base:  # a base model takes the names of a model with a head as well
            label = f"{ckpt.metadata_file}, compared with {fit.place}"
            yield _finding(ckpt, words, count, total, label, shown, "likely" if fit.doubt_of(()) else "certain")


def _likely(ckpt: Checkpoint) -> Iterator[Finding]:
    counts = Counter(word for name in ckpt.tensors for word in _words(name))
    for word, count in counts.most_common(1):
        if count > _LEAST * len(ckpt.tensors) and count > 1:
            first = next(name for name in ckpt.tensors if word in _words(name))
            yield _finding(ckpt, f"{word}.", count, len(ckpt.tensors), ckpt.metadata_file, first, "likely")


def _words(name: str) -> frozenset[str]:
    """The words of wrappers in a name: some anywhere, others only where they stand first."""
    parts = name.split(".")
    return INNER_WORDS.intersection(parts) | _LEADING.intersection(parts[:1])


def _finding(
    ckpt: Checkpoint, words: str, count: int, total: int, label: str, shown: str, confidence: Confidence
) -> Finding:
    is_twice = words == words[: len(words) // 2] * 2
    which = f"all {total:,} keys carry" if count == total else f"{count:,} of {total:,} keys carry"
    return Finding(
        f"{which} `{words}`, " + ("a part of a name twice" if is_twice else "which a wrapper of the model left there"),
        at=Location(label=label),
        identity=(words,),
        confidence=confidence,
        why="from_pretrained looks for the keys without it, finds none of them and starts untrained",
        notes=(("key", shown),),
        hint=f"write `{words[: len(words) // 2]}` once in every key of the files and the index"
        if is_twice
        else "save the model inside the wrapper, or strip this from every key in the files and the index",
    )
