from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ckptlint.analysis.fit.judgement import foreign_sizes, has_known_config
from ckptlint.analysis.fit.trusted_config import Contradiction, LayerCount, contradictions, is_defined, layer_counts
from ckptlint.model import Checkpoint
from ckptlint.model.text import gaps, ranges
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.mesh import axes_of_size

_MODEL_SIZES = ("layers", "hidden", "experts")


@rule("COM008", "layer-count", Severity.ERROR, whole=True)
def layer_count(ckpt: Checkpoint) -> Iterator[Finding]:
    """A block stores more or fewer layers than the job declared, or the declared sizes belong to another job.

    What it checks:
        The main block has as many layers, numbered in the keys or stacked on an axis, as the arguments,
        `run_config.yaml` or `config.json` declare. Encoder and decoder have numbers of their own, and a block with a
        part of its own in the configuration (`encoder_config`) is counted by that. More layers than declared are a
        warning. In the `config.json` of an unknown model, the number may count something else: without a hole
        in the numbers of the layers that is info. Where CFG001 knows every layer from a configuration, layers are not
        counted here.

        If two or more declared sizes (layers, hidden size, experts, mesh axes, world size) contradict what is stored,
        that is one warning, or info if only the mesh differs, and all other rules ignore what was declared. For a
        Megatron model whose tensors all follow from its arguments (CFG003), two sizes of any kind are enough.
    Why it matters:
        Whole stages are absent or hidden under the keys of another stage, so their layers keep whatever was in memory.
    Usual causes:
        Every pipeline stage numbered its layers from 0; a stage did not save; the arguments belong to another job.
    How to fix:
        Number layers across all stages and save all stages. If the arguments are another job's, give the sizes by hand.
    See:
        megatron.core.transformer.transformer_layer.get_transformer_layer_offset
    """
    if not ckpt.declared:
        raise NotApplicable("no configuration declares a number of layers")
    for foreign in (contradictions(ckpt), foreign_sizes(ckpt)):
        if len(foreign) >= 2:
            yield _foreign(ckpt, foreign)
            return
    if has_known_config(ckpt):
        raise NotApplicable("CFG001 and CFG002 compare every layer with the configuration")
    counts = layer_counts(ckpt)
    if not counts:
        raise NotApplicable("no declared number of layers belongs to a block here")
    for count in counts:
        if not count.agrees:
            yield _finding(ckpt, count)


def _finding(ckpt: Checkpoint, count: LayerCount) -> Finding:
    declared = int(count.declared.value)
    stages = layers = share = ""
    if count.stages:
        stages = f"{', '.join(map(str, count.stages))} layers under {len(count.stages)} prefixes"
    elif count.numbers:
        lost = gaps(count.numbers, declared)
        layers = f"{ranges(count.numbers)} stored" + (f", {lost} missing" if lost else "")
    else:
        layers = f"{count.stored} stacked on dim 0 of {count.lead.key.fqn}"
    ratio = Fraction(count.stored, declared)
    axes = axes_of_size(ckpt.topology, ratio.denominator) if ratio.numerator == 1 else []
    if ratio.numerator == 1 and ratio.denominator > 1:
        share = " = ".join([f"{count.stored}/{declared}", f"{ratio}", *(f"1/{axis}" for axis in axes)])
    if "pp" in axes:
        hint = "number layers across all stages and save again: each pipeline stage probably started at 0"
    elif count.stored < declared:
        hint = "compare with the keys of an earlier step; after loading, missing layers keep whatever was in memory"
    else:
        hint = "set the number of layers to the stored one, or find out which job wrote the configuration"
    stored = "1 layer is" if count.stored == 1 else f"{count.stored} layers are"
    # Of an unknown type of model only a hole in the numbers shows, besides the declared number, that layers are lost.
    is_certain = is_defined(ckpt, count.declared) or (bool(count.numbers) and count.numbers[-1] >= count.stored)
    why = "a model of the declared size loads without the extra layers" if count.stored > declared else ""
    if not is_certain:
        why = f"ckptlint does not know this model: its configuration may count something else than {count.block}"
    return Finding(
        f"{stored} stored under {count.block}, but {count.declared.source} declares {declared}",
        at=Location(count.block, label=ckpt.metadata_file),
        severity=Severity.INFO if not is_certain else Severity.WARNING if count.stored > declared else None,
        why=why,
        notes=(("stages", stages), ("layers", layers), ("ratio", share)),
        hint=hint,
        inferred_from=f"the {'numbers in the keys' if count.numbers or count.stages else 'shapes'} of {count.block}",
        kind="one stage" if "pp" in axes else "",
    )


def _foreign(ckpt: Checkpoint, foreign: tuple[Contradiction, ...]) -> Finding:
    """The finding that several declared sizes are wrong at once, so that they belong to another job."""
    sources = sorted({item.declared.source for item in foreign})
    of_model = [item for item in foreign if item.name in _MODEL_SIZES or item in foreign_sizes(ckpt)]
    is_known = all(is_defined(ckpt, item.declared) for item in foreign)
    whose = "another model" if of_model else "a job with another mesh"
    shown = ", ".join(f"{item.name} {item.declared.value} (stored: {item.stored})" for item in foreign)
    return Finding(
        f"{' and '.join(sources)} {'belongs' if len(sources) == 1 and sources[0] != 'args' else 'belong'} to {whose}: "
        f"{shown}",
        at=Location(file=ckpt.common.source if sources == ["args"] and ckpt.common is not None else sources[0]),
        identity=tuple(item.name for item in foreign),
        severity=Severity.WARNING if of_model and is_known else Severity.INFO,
        why="loading with the sizes in the checkpoint builds that other model"
        if of_model
        else "nothing that follows from the declared sizes could be checked",
        notes=tuple((item.name, f"{item.stored} in {item.shown_by}") for item in foreign),
        hint="pass the right sizes when you load; the other rules ignored the declared ones",
        inferred_from=f"{len(foreign)} declared sizes that contradict what is stored",
    )
