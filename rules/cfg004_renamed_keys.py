from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import Fit, config_fit, expectations
from ckptlint.analysis.fit.pairing import INNER_WORDS, WRAPPER_WORDS, bare_name, best_pairing
from ckptlint.analysis.fit.trusted_config import contradictions
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Confidence, Finding, Location, Severity, rule
from ckptlint.vocabulary.config_fields import MODEL_CONFIG
from ckptlint.vocabulary.keys import role

_LEAST = 0.5
_PARTS = frozenset({"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
_LEADING = frozenset({"module", "base_model"})
_FILES = lazy_pattern(r"(model|pytorch_model)[.-].*(safetensors|bin)(\.index\.json)?")
_FILES_OF_DIFFUSERS = ("diffusion_pytorch_model", "pytorch_lora_weights")
_USUAL = 4  # times as many names of a role must have no wrapper
_ROLES = 3  # fewer roles with a wrapper's name may be a module of the model


@rule("CFG004", "renamed-keys", Severity.ERROR)
def renamed_keys(ckpt: Checkpoint) -> Iterator[Finding]:
    """The keys of an export still carry the name of a wrapper.

    What it checks:
        In a folder of exported weights no key carries more than the `config.json` beside it implies: `_orig_mod.` of
        torch.compile, `_fsdp_wrapped_module.`, `module.` of DataParallel, `base_model.model.` of peft, at the start or
        in the middle; nor a part of its name twice (`encoder.encoder.`). If the model is not known, these words in more
        than half of the keys are a warning. Training checkpoints may carry them, for their loaders take
        them off again, but not in a few layers alone. Files that diffusers loads by names carry none.

        Where transformers wrote `config.json`, and no code of the model's own is named there, some key is one of the
        model, and no other prefix (`policy.`) stands before the keys than those that transformers takes off.

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
    if ckpt.metadata_file.startswith(_FILES_OF_DIFFUSERS):
        yield from _diffusers_findings(ckpt)
        return
    if ckpt.format not in ("safetensors", "torch") or ckpt.config is None or ckpt.config.file != MODEL_CONFIG:
        yield from _wrapped_layers(ckpt)
        return
    unmerged = [key for key in ckpt.tensors if _PARTS.intersection(key.split("."))]
    # `kv_lora_rank` of latent attention declares no adapter.
    of_lora = [name for name in ckpt.config.values if "lora" in name and not name.endswith("lora_rank")]
    if unmerged and not of_lora and "auto_map" not in ckpt.config.values:
        yield Finding(
            f"{len(unmerged):,} of {len(ckpt.tensors):,} keys belong to an adapter that was not merged into the model",
            at=Location(label=ckpt.metadata_file),
            identity=("unmerged",),
            why="from_pretrained finds no weight for these modules, leaves them untrained and raises no error",
            notes=(("keys", first_names(fold_names(unmerged), noun="pattern")),),
            hint="save what merge_and_unload() returns, or save the adapter and its base model separately",
        )
        return
    fit = config_fit(ckpt)
    if isinstance(fit, Fit):
        yield from _wrappers_by_model(ckpt, fit)
    elif _matches_nothing(ckpt):
        yield Finding(
            f"none of {len(ckpt.tensors):,} keys belongs to model_type {ckpt.config.values['model_type']}",
            at=Location(label=ckpt.metadata_file),
            identity=("unknown",),
            notes=(("keys", first_names(fold_names(list(ckpt.tensors)), noun="pattern")),),
            why="from_pretrained finds no weight of the model, starts untrained and raises no error",
            hint="rename the keys to the library's names, or set model_type and architectures for this model",
        )
    else:
        counts = Counter(word for name in ckpt.tensors for word in _wrapper_words(name))
        word, count = next(iter(counts.most_common(1)), ("", 0))
        if count > _LEAST * len(ckpt.tensors) and count > 1:
            first = next(name for name in ckpt.tensors if word in _wrapper_words(name))
            yield _finding(ckpt, f"{word}.", count, len(ckpt.tensors), ckpt.metadata_file, first, "likely")
        else:
            yield from _wrapped_layers(ckpt)


def _is_of_transformers(ckpt: Checkpoint) -> bool:
    """Whether transformers wrote the configuration of its own model, and loads a file of this name."""
    values = ckpt.config.values if ckpt.config is not None else {}
    has_name = bool(_FILES.fullmatch(ckpt.metadata_file))
    return has_name and "transformers_version" in values and "auto_map" not in values


def _matches_nothing(ckpt: Checkpoint) -> bool:
    """Whether a file with at least half as many keys as the model holds none of the model's names."""
    forms = expectations(ckpt)
    if isinstance(forms, str) or not _is_of_transformers(ckpt) or len(contradictions(ckpt)) >= 2:
        return False
    least = min(sum(tensor.needed for tensor in form.tensors.values()) for form in forms)
    return 2 * len(ckpt.tensors) >= least and not best_pairing(forms, [*ckpt.tensors]).stored


def _diffusers_findings(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on wrappers' names in a file of diffusers, whose keys may start with the name of a component."""
    counts: Counter[str] = Counter()
    for name in ckpt.tensors:
        words = name.split(".")
        counts.update(INNER_WORDS.intersection(words) | {"module"}.intersection(words[:2]))
    for word, count in counts.items():
        shown = next(name for name in ckpt.tensors if word in name.split("."))
        yield _finding(ckpt, f"{word}.", count, len(ckpt.tensors), ckpt.metadata_file, shown, "certain")


def _wrapped_layers(ckpt: Checkpoint) -> Iterator[Finding]:
    """A finding on names with a wrapper inside, if most names of the same roles have none."""
    # A loader that takes wrappers off expects them in every layer or in none: only a layer or two is a fault.
    bare = {name: short for name in ckpt.tensors if (short := bare_name(name)) != name}
    if not bare:
        return
    usual = Counter(role(name) for name in ckpt.tensors if name not in bare)
    seldom = Counter(map(role, bare.values()))
    odd = [name for name, short in bare.items() if usual[role(short)] >= _USUAL * seldom[role(short)]]
    odd = [name for name in odd if bare[name] not in ckpt.tensors]
    if len({role(name) for name in odd}) >= _ROLES:
        word = next(each for each in odd[0].split(".") if each not in bare[odd[0]].split("."))
        yield _finding(ckpt, f"{word}.", len(odd), len(ckpt.tensors), ckpt.metadata_file, odd[0], "certain")


def _wrappers_by_model(ckpt: Checkpoint, fit: Fit) -> Iterator[Finding]:
    """Findings on extra words in the stored names, which fit the model's names without them."""
    total = len(fit.pairing.stored) + len(fit.pairing.unknown)
    for words, count in fit.pairing.carried.items():
        names = (pair for pair in fit.pairing.stored.items() if pair[0] != pair[1] and words in pair[1])
        shown = next((f"{stored} instead of {name}" for name, stored in names), "")
        prefix = words.removesuffix(".")
        is_known = prefix in fit.expected.prefixes or (words.count(".") == 1 and not _is_of_transformers(ckpt))
        is_base = prefix not in WRAPPER_WORDS and is_known
        if not is_base or any(name.startswith(words) for name in fit.expected.tensors):
            label = f"{ckpt.metadata_file}, compared with {fit.place}"
            yield _finding(ckpt, words, count, total, label, shown, "likely" if fit.doubt_of(()) else "certain")


def _wrapper_words(name: str) -> frozenset[str]:
    """The names of wrappers in a key: some count anywhere, others only as the first part."""
    words = name.split(".")
    return INNER_WORDS.intersection(words) | _LEADING.intersection(words[:1])


def _finding(
    ckpt: Checkpoint, words: str, count: int, total: int, label: str, shown: str, confidence: Confidence
) -> Finding:
    is_twice = words == words[: len(words) // 2] * 2
    which = f"all {total:,} keys contain" if count == total else f"{count:,} of {total:,} keys contain"
    return Finding(
        f"{which} `{words}`, " + ("a name part twice" if is_twice else "left by a model wrapper"),
        at=Location(label=label),
        identity=(words,),
        confidence=confidence,
        why="from_pretrained looks for the keys without it, finds none of them and starts untrained",
        notes=(("key", shown),),
        hint=f"write `{words[: len(words) // 2]}` once in every key of the files and the index"
        if is_twice
        else "save the unwrapped model, or strip this from every key in the files and the index",
    )
