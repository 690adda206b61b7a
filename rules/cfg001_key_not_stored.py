from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.fit.judgement import BadConfig, Fit, config_fit, fit_of, implied_bytes, numbered_layer
from ckptlint.analysis.fit.wording import core_note, doubt_note, field_text, keys_in_words, model_name, whole_layers
from ckptlint.formats.strict_json import is_size
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, human_bytes, join_words, numbered, plural, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import MOST_KEYS, Finding, Location, Severity, require, rule

_PER_LAYER = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
_TABLE, _PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_EXPERT = lazy_pattern(r"experts\.(\d{1,9})\.")


@rule("CFG001", "key-not-stored", Severity.ERROR, whole=True)
def key_not_stored(ckpt: Checkpoint) -> Iterator[Finding]:
    """Tensors that the model's configuration implies are not stored.

    What it checks:
        Every tensor of the model that the `config.json` beside the files declares, or the arguments of a Megatron job
        (`args` in the common state, `run_config.yaml`), is stored. Tables made from transformers and megatron-core say
        which tensors these are. Tied heads, buffers that are not learned, scales of quantised weights and adapters are
        optional, and so is all that a model without its head lacks. A layer for multi-token prediction has all that the
        layer most like it has, and a lack is a warning if none is declared. If some are declared and none is
        stored, it is a warning, or info for the one that classes of transformers declare by themselves and never
        save. A whole tower is a warning if the configuration has a section for it and nothing else is absent, info if
        the name of the folder or the class is that of a part. It is only info, too, if the configuration names code of
        its own or leaves a field open that decides (in a training checkpoint: any).
        A text, a fraction, a list, a null or a negative number in the place of a size is an error by itself, where the
        library builds no model from it.
    Why it matters:
        A load that is not strict leaves absent parameters at their initial values and raises no error.
    Usual causes:
        An export lost shards and wrote its index from the others; only one rank's part was saved; a filter
        or map of keys dropped a role; an untied head was treated as tied.
    How to fix:
        Export again from the training checkpoint, or correct the wrong field.
    See:
        transformers.PreTrainedModel.from_pretrained (output_loading_info)
    """
    if isinstance(fault := config_fit(ckpt), BadConfig):
        why = "a load stops at it, and what should be stored is not known"
        hint = "correct the field, or take the configuration from where the model came from"
        yield Finding(f"{fault}", at=Location(label=require(ckpt.config).file), why=why, hint=hint)
        return
    if lost := _lost_table(ckpt):
        yield lost  # of models that have no table of keys, of which `fit_of` says nothing
    fit = fit_of(ckpt)
    doubts = grouped((fit.doubt_that_exists(name), name) for name in fit.missing)
    for doubt, missing in doubts.items():
        yield _finding(ckpt, replace(fit, missing=missing), doubt)
    for tower in fit.absent_towers:
        # A text model is often saved without its vision tower. Where the configuration has a section for the tower and
        # everything else is stored, it was more probably lost; with other losses, those are the finding.
        is_lost = tower in fit.lost_towers and not fit.missing
        yield Finding(
            f"no tensor of {tower} is stored, but {model_name(fit)} has this part",
            at=Location(tower, label=f"{ckpt.metadata_file}, compared with {fit.place}"),
            severity=Severity.WARNING if is_lost else Severity.INFO,
            why=_consequence(fit, 2) if is_lost else "the parts of such a model are often saved separately",
        )
    yield from _prediction_layers(ckpt, fit)


def _lost_table(ckpt: Checkpoint) -> Finding | None:
    """A finding if the table of each layer is lost. Source: transformers gemma3n.modeling_gemma3n.Gemma3nTextModel"""
    sections = dict(ckpt.config.sections()) if ckpt.config is not None else {}
    sizes = {place: [section.get(name) for name in _PER_LAYER] for place, section in sections.items()}
    declared = [place for place, pair in sizes.items() if all(is_size(size) and size for size in pair)]
    beside = next((key for key in ckpt.tensors if _PROJECTION in key), "")
    if not declared or not beside or any(_TABLE in key for key in ckpt.tensors):
        return None
    key = f"{beside.partition(_PROJECTION)[0]}{_TABLE}.weight"
    return Finding(
        f"{key} is not stored, but {declared[0]} declares its sizes and {beside} is stored",
        at=Location(key, label=f"{ckpt.metadata_file}, compared with {declared[0]}"),
        why="from_pretrained starts it untrained and only warns",
        notes=(("declared", join_words(_PER_LAYER)),),
        hint="export again from the training checkpoint",
    )


def _prediction_layers(ckpt: Checkpoint, fit: Fit) -> Iterator[Finding]:
    """Findings on layers for multi-token prediction that lack tensors or are fewer than declared."""
    stored, declared = fit.mtp_layers
    if fit.mtp_lost:
        folded, count = fold_names(fit.mtp_lost), len(fit.mtp_lost)
        what = folded[0] if count == 1 else plural(count, "tensor")
        yield Finding(
            f"{what} of a multi-token-prediction layer {verb(count, 'is')} not stored, but its other tensors are",
            at=Location(fit.mtp_lost[0], label=f"{ckpt.metadata_file}, compared with the layer most like it"),
            identity=tuple(fit.mtp_lost[:MOST_KEYS]),
            keys=tuple(fit.mtp_lost[:MOST_KEYS]),
            confidence="possible" if fit.doubt else "certain" if declared > 0 else "likely",
            notes=(doubt_note(fit.doubt), ("missing", first_names(folded, noun="pattern"))),
            hint="copy the whole layer from the source checkpoint, or leave the whole layer out",
        )
    # Converters often drop these layers on purpose, but then all of them: only some stored is an error. Some classes
    # of transformers declare a layer that they never save, so none stored is no loss there.
    if stored < declared and (stored or not fit.missing):
        number = f"{stored} {verb(stored, 'is')}" if stored else "none is"
        yield Finding(
            f"{fit.expected.source} declares {plural(declared, 'multi-token-prediction layer')}, but {number} stored",
            at=Location(file=fit.expected.source),
            severity=None if stored else Severity.INFO if fit.mtp_by_class else Severity.WARNING,
            why="transformers declares this layer by itself and saves none; speculative decoding needs it"
            if fit.mtp_by_class and not stored
            else "the model runs without them, but speculative decoding needs them",
            hint="copy them from the source checkpoint, or declare only as many as are stored",
        )


def _finding(ckpt: Checkpoint, fit: Fit, doubt: str) -> Finding:
    """One finding for all keys that share a doubt; the message names their role, layers or experts if one fits."""
    missing, tensors = fit.missing, fit.expected.tensors
    needed = sum(tensor.needed for tensor in tensors.values())
    lost_layers = whole_layers(fit, set(missing))
    gone = {(block, number) for block, numbers in lost_layers.items() for number in numbers}
    of_layers = [name for name in missing if numbered_layer(name) in gone]
    reasons = {tensors[name].because for name in missing}
    because = reasons.pop() if len(reasons) == 1 else ()
    names, are = fold_names(map(fit.shown, missing)), verb(len(missing), "is")
    if because and len(names) == 1:
        fields = f"but {fit.expected.source} says {' and '.join(field_text(fit, name) for name in because)}"
        if because == ("tie_word_embeddings",):
            fields = f"but {fit.expected.source} does not tie it ({field_text(fit, because[0])})"
        message = f"{names[0]} {are} not stored, {fields}"
    elif experts := _experts_message(fit):
        message = experts
    elif len(names) == 1:
        message = f"{names[0]} {are} not stored, but {model_name(fit)} has {_them(len(missing))}"
    elif len(lost_layers) == 1 and len(names) == len(fold_names(of_layers)):
        ((block, numbers),) = lost_layers.items()
        layers = f"{numbered('layer', numbers)} of {fit.shown(block)} {verb(len(numbers), 'is')}"
        of_model = [name for name in fit.expected.fields if name.endswith(_LAYERS)]
        counts = tensors[missing[0]].counted or of_model
        declared = next((field_text(fit, name) for name in counts), "them")
        message = f"{layers} not stored, but {fit.expected.source} declares {declared}"
    else:
        message = f"{len(missing):,} of the {plural(needed, 'tensor')} of {model_name(fit)} {are} not stored"
    lost = implied_bytes(fit, missing)
    instead = f"the same modules hold {first_names(fold_names(fit.instead), noun='pattern')}" if fit.instead else ""
    return Finding(
        message,
        at=Location(fit.shown(missing[0]), label=f"{ckpt.metadata_file}, compared with {fit.place}"),
        identity=tuple(map(fit.shown, missing[:MOST_KEYS])),
        keys=tuple(map(fit.shown, missing[:MOST_KEYS])),
        confidence="possible" if doubt else "certain",
        why=_consequence(fit, len(missing)),
        notes=(
            doubt_note(doubt),
            ("missing", keys_in_words(fit, missing, lost_layers) if len(names) > 1 else ""),
            ("bytes", f"{human_bytes(lost)} of the model's {human_bytes(implied_bytes(fit))} are missing"),
            ("instead", instead),
            core_note(fit) if len(names) > 1 else ("declared", ""),
        ),
        hint=_hint(fit, because),
    )


def _experts_message(fit: Fit) -> str:
    """The message if only numbered experts are missing, the same in each layer (VeOmni#799); "" otherwise."""
    lost: dict[int, set[int]] = defaultdict(set)
    for name in fit.missing:
        at, expert = numbered_layer(name), _EXPERT.search(name)
        if at is None or expert is None:
            return ""
        lost[at[1]].add(int(expert[1]))
    if len(set(map(frozenset, lost.values()))) != 1:
        return ""
    numbers = next(iter(lost.values()))
    count = 1 + max(int(expert[1]) for expert in map(_EXPERT.search, fit.expected.tensors) if expert)
    experts = f"{numbered('expert', numbers)} of {count} {verb(len(numbers), 'is')}"
    return f"{experts} not stored in {numbered('layer', lost)}"


def _consequence(fit: Fit, count: int) -> str:
    return f"from_pretrained starts {_them(count)} untrained and only warns" if fit.is_export else ""


def _them(count: int) -> str:
    return "it" if count == 1 else "them"


def _hint(fit: Fit, because: tuple[str, ...]) -> str:
    if fit.instead and not fit.is_export:
        return "save again with the key names that the rest of the model uses"
    if fit.instead:
        return "map the stored keys to the names of this model and export again: another version named them"
    if because == ("tie_word_embeddings",):
        return "if the head shares the embedding, set tie_word_embeddings to true; otherwise export again with the head"
    if not fit.is_export:
        return "list the keys that each rank passes to save, and find the rank or stage that should save these"
    return "export again from the training checkpoint, and compare the number of tensors with the model's"
