from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import Fit, fit_of
from ckptlint.analysis.fit.wording import core_note, doubt_note, model_name
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, human_bytes, plural, verb
from ckptlint.rule import MOST_KEYS, Finding, Location, Severity, rule
from ckptlint.vocabulary.dtypes import nbytes


@rule("CFG002", "key-not-in-model", Severity.WARNING, whole=True)
def key_not_in_model(ckpt: Checkpoint) -> Iterator[Finding]:
    """Tensors are stored that the configured model does not have.

    What it checks:
        Every stored tensor belongs to the model that the `config.json` beside it declares, or the arguments of a
        Megatron job. Layers and experts beyond the declared number, and biases of weights that have none, are a
        warning; whole modules that the model does not know, such as a custom head, are info. Buffers, scales of
        quantised weights, adapters, second copies and keys that stand where CFG001 misses others are left out, and so
        are layers for multi-token prediction, but where 0 are declared: a warning.
    Why it matters:
        A loader ignores keys that its model does not have, so part of the trained weights has no effect.
    Usual causes:
        The configuration belongs to another run; a field was changed by hand; the class in use lacks a fused or added
        module.
    How to fix:
        Correct the field that decides over these tensors, or load with the class that has them.
    See:
        transformers.PreTrainedModel.from_pretrained (output_loading_info)
    """
    fit = fit_of(ckpt)
    if fit.beyond:
        yield _finding(ckpt, fit, fit.beyond, is_beyond=True)
    if fit.foreign:
        yield _finding(ckpt, fit, fit.foreign, is_beyond=False)
    stored, declared = fit.mtp_layers
    if stored > declared == 0:
        yield Finding(
            f"{fit.expected.source} declares 0 multi-token-prediction layers, but {stored} {verb(stored, 'is')} stored",
            at=Location(file=fit.expected.source),
            identity=("prediction",),
            kind="prediction",
            why="a server that skips the declared ones takes these for layers of the model and stops, or drops them",
            hint="declare as many as are stored, or leave them out",
        )


def _finding(ckpt: Checkpoint, fit: Fit, names: list[str], is_beyond: bool) -> Finding:
    folded = fold_names(names)
    size = sum(nbytes(t.dtype, t.volume) or 0 for t in map(ckpt.tensors.__getitem__, names))
    subject = f"{folded[0]} is" if len(names) == 1 else f"{plural(len(names), 'tensor')} are"
    return Finding(
        f"{subject} stored, but {model_name(fit)} does not have {'it' if len(names) == 1 else 'them'}",
        at=Location(names[0], label=f"{ckpt.metadata_file}, compared with {fit.place}"),
        identity=tuple(names[:MOST_KEYS]),
        keys=tuple(names[:MOST_KEYS]),
        confidence="certain" if is_beyond and not fit.doubt_of(fit.open) else "possible",
        why="from_pretrained ignores them and only warns" if fit.is_export else "",
        notes=(
            doubt_note(fit.doubt_of(fit.open)),
            ("keys", first_names(folded, noun="pattern") if len(names) > 1 else ""),
            ("bytes", f"{human_bytes(size)} outside the model"),
            core_note(fit),
        ),
        hint="compare the configuration with that of the job that trained the model" if is_beyond else "",
    )
