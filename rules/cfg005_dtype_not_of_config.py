from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.judgement import Fit, OtherDtype, fit_of, implied_bytes, kept_in_float32, other_dtypes
from ckptlint.analysis.fit.wording import doubt_note
from ckptlint.analysis.layers.outliers import dtype_outliers
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, human_bytes, plural
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import parse

_SHARE = 0.25
_LEAST = 0.01  # biases and norms that a library keeps in float32


@rule("CFG005", "dtype-not-of-config", Severity.WARNING)
def dtype_not_of_config(ckpt: Checkpoint) -> Iterator[Finding]:
    """Tensors are stored in a different dtype from the declared one.

    What it checks:
        Each float tensor of an export has the `dtype` (or `torch_dtype`) of the `config.json` beside it. It is a
        warning if other tensors add a quarter or more to the model's bytes or take as much from them, or if norms are
        float64. It is info for a few others, such as routers kept in float32, from 1% of the bytes on. Quantised
        models, training checkpoints and variants (`model.fp16.safetensors`) are left out, and a model beside a variant
        whose dtype is the declared one. It is info if a router's bias is in 16 bits and transformers loads it in
        float32 for this class.
    Why it matters:
        A wider dtype wastes space; a narrower one has lost the declared precision.
    Usual causes:
        Master weights were saved, or the model was not cast before the export.
    How to fix:
        Cast the model to the declared dtype and export again, or declare the stored one.
    See:
        transformers.PreTrainedModel.save_pretrained
    """
    fit = fit_of(ckpt)
    if fit.expected.dtype is None or not fit.is_export:
        raise NotApplicable("no dtype is declared for these files")
    if any(name.count(".") > 1 for name in ckpt.files.names):
        raise NotApplicable("the configuration describes the model without a variant in its name")
    if ckpt.declared_variant:  # the last export wrote the configuration, for its own dtype
        raise NotApplicable(f"the declared dtype is that of {ckpt.declared_variant} beside it")
    for item in other_dtypes(ckpt, fit):
        if item.dtype == "float32" and kept_in_float32(ckpt).issuperset(item.names):
            continue
        norms = {name for name in item.names if parse(name).function == "norm"}
        # SHP002 reports single layers
        is_double = item.dtype == "float64" and not norms <= {
            outlier.param.tensor.fqn for outlier in dtype_outliers(ckpt)
        }
        if is_double or item.declared >= _LEAST * implied_bytes(fit):
            yield _finding(ckpt, fit, item, is_double)
    yield from _rounded_biases(ckpt, fit)


def _rounded_biases(ckpt: Checkpoint, fit: Fit) -> Iterator[Finding]:
    """A finding on routers' biases in 16 bits, unless there are tensors to compare with: REF002 then tells the loss."""
    biases = sorted(name for name in kept_in_float32(ckpt) if name.endswith(("_bias", "gate.bias")))
    biases = [name for name in biases if ckpt.tensors[name].dtype in ("bfloat16", "float16")]
    if not biases or (ckpt.reference is not None and ckpt.reference.tensors):
        return
    names, dtype = fold_names(biases), ckpt.tensors[biases[0]].dtype
    yield Finding(
        f"{names[0]} is {dtype}, and {fit.expected.model_class} keeps it in float32",
        at=Location(ckpt.tensors[biases[0]], label=f"{ckpt.metadata_file}, compared with {fit.place}"),
        identity=("rounded bias", dtype),
        severity=Severity.INFO,
        why="a router learns it in small steps and chooses experts by it: 16 bits may choose others",
        notes=(("tensors", first_names(names, noun="pattern") if len(names) > 1 else ""),),
        hint="check with --expect the training checkpoint whether it lost bits there",
    )


def _finding(ckpt: Checkpoint, fit: Fit, item: OtherDtype, is_double: bool) -> Finding:
    size = implied_bytes(fit)
    is_loud = (is_double or abs(item.extra) >= _SHARE * size) and not fit.doubt
    names = fold_names(item.names)
    subject = f"{names[0]} is" if len(item.names) == 1 else f"{plural(len(item.names), 'tensor')} are"
    cost = f"{human_bytes(abs(item.extra))} {'more' if item.extra > 0 else 'less'} than the {human_bytes(size)} of"
    return Finding(
        f"{subject} {item.dtype}, but {fit.expected.source} declares {fit.expected.dtype}",
        at=Location(label=f"{ckpt.metadata_file}, compared with {fit.place}"),
        identity=(item.dtype, str(fit.expected.dtype)),
        severity=None if is_loud else Severity.INFO,
        notes=(
            doubt_note(fit.doubt),
            ("bytes", f"{cost} the model in {fit.expected.dtype}"),
            ("tensors", first_names(names, noun="pattern") if len(item.names) > 1 else ""),
        ),
        hint="cast the model before the export, or declare the stored dtype" if is_loud else "",
    )
