from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import prod

from ckptlint.analysis.fit.judgement import Fit, ShapeDifference, fit_of
from ckptlint.analysis.fit.wording import doubt_note, field_text
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, plural, shape_text, verb
from ckptlint.rule import MOST_KEYS, Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.mesh import axes_of_size

_GROUPS = 6
_SMALL = 8  # kernels, channels of an image and the like


@rule("CFG003", "shape-not-of-config", Severity.ERROR)
def shape_not_of_config(ckpt: Checkpoint) -> Iterator[Finding]:
    """Tensors do not have the shape that the model's configuration implies.

    What it checks:
        Each tensor has the number of dims, and the size of each, that the fields of the `config.json` beside the files
        give, or the arguments of a Megatron job. It is only info if embedding and head of a training checkpoint alike
        hold more rows than the declared vocabulary, if the configuration names code of its own, or if the expected size
        follows from no field, or from one that it leaves open. Quantised weights are left out. A shape in a layer for
        multi-token prediction that no other layer has is a warning.
    Why it matters:
        Loading fails on a different shape, or fills part of the tensor and leaves the rest as it was in memory.
    Usual causes:
        ZeRO-3 or FSDP left one rank's part, or nothing, in place of the whole tensor; replicas were joined as if they
        were shards; padding was kept; the configuration belongs to another model.
    How to fix:
        Gather the tensors before the save, and export again; or correct the wrong field.
    See:
        `ckptlint explain SHP004`
    """
    fit = fit_of(ckpt)
    groups = grouped((_cause(ckpt, item), item) for item in fit.shapes)
    # One fault changes shapes in one or two ways. Many ways at once mean another model's configuration.
    if len(groups) > _GROUPS:
        lead, doubt = fit.shapes[0], _shared_doubt(fit, fit.shapes)
        keys, compared = tuple(item.tensor.fqn for item in fit.shapes[:MOST_KEYS]), len(fit.pairing.stored)
        yield Finding(
            f"{len(fit.shapes):,} of {plural(compared, 'tensor')} have shapes different from {fit.expected.source}: "
            f"{lead.tensor.fqn} is {shape_text(lead.tensor.global_shape)} instead of {shape_text(lead.expected.shape)}",
            at=Location(lead.tensor, label=f"{ckpt.metadata_file}, compared with {fit.place}"),
            identity=keys,
            keys=keys,
            confidence="possible" if doubt else "certain",
            why=_consequence(fit),
            notes=(doubt_note(doubt), ("tensors", _patterns(fit.shapes))),
            hint="use the configuration of the job that wrote the tensors: this one probably belongs to another model",
        )
    else:
        for items in groups.values():
            yield _finding(ckpt, fit, items)
    if fit.grown:
        yield _grown(ckpt, fit)
    for item in fit.mtp_shapes:
        yield Finding(
            f"{item.tensor.fqn} of a layer for multi-token prediction is {shape_text(item.tensor.global_shape)}, but "
            f"{item.name} is {shape_text(item.expected.shape)}",
            at=Location(item.tensor, label=f"{ckpt.metadata_file}, compared with the layer most like it"),
            confidence="possible" if fit.doubt else "likely",
            hint="copy the whole layer from the source checkpoint, or leave the whole layer out",
            group="shapes of prediction",
        )


def _cause(ckpt: Checkpoint, item: ShapeDifference) -> tuple[object, ...]:
    """A key that tensors share if they differ in the same way: empty, transposed, one rank's part, or a size."""
    # A rank's part shows as different sizes in different tensors, so it is recognised by its factor. Everything else
    # counts as one cause only if the same dim has the same expected and stored size.
    stored, expected = item.tensor.global_shape, item.expected.shape
    if _is_empty(item):
        return ("empty",)
    if not item.axes:
        return ("axes", len(stored), len(expected), len(stored) == 1)
    if _is_transposed(item):
        return ("transposed",)
    if axis_size := _lost_axis_size(ckpt, item):
        return ("part", axis_size)
    return tuple((_dim(item, axis), expected[axis], stored[axis]) for axis in item.axes)


def _lost_axis_size(ckpt: Checkpoint, item: ShapeDifference) -> int:
    """The size of the mesh axis along which only one rank's part is stored; 0 if no axis explains the shape."""
    # Half of the layers of a stacked tensor is a lost stage, never a tensor-parallel part.
    stored, expected = item.tensor.global_shape, item.expected.shape
    if len(item.axes) != 1 or not ckpt.has_megatron_names or _dim(item, item.axes[0]) == "num_layers":
        return 0
    ratio = Fraction(stored[item.axes[0]], expected[item.axes[0]] or 1)
    return ratio.denominator if ratio.numerator == 1 and axes_of_size(ckpt.topology, ratio.denominator) else 0


def _is_empty(item: ShapeDifference) -> bool:
    return not prod(item.tensor.global_shape) and prod(item.expected.shape) > 0


def _is_transposed(item: ShapeDifference) -> bool:
    stored, expected = item.tensor.global_shape, item.expected.shape
    return len(item.axes) == 2 and len(set(expected)) > 1 and sorted(stored) == sorted(expected)


def _is_constant(item: ShapeDifference) -> bool:
    """Whether the sizes that differ come from numbers in the library's code, which other versions may change."""
    # Small numbers (kernels, channels of an image) are part of the architecture and stay as they are.
    if _is_empty(item) or not item.axes or not item.expected.dims:
        return False
    return all(_dim(item, axis).isdecimal() and int(_dim(item, axis)) > _SMALL for axis in item.axes)


def _dim(item: ShapeDifference, axis: int) -> str:
    return item.expected.dims[axis] if axis < len(item.expected.dims) else ""


def _finding(ckpt: Checkpoint, fit: Fit, items: list[ShapeDifference]) -> Finding:
    """One finding for tensors with the same cause: a factor, a transposition, padding, or another size."""
    lead = items[0]
    stored, expected = lead.tensor.global_shape, lead.expected.shape
    source, count, doubt = fit.expected.source, len(items), _shared_doubt(fit, items)
    shapes = f"{lead.tensor.fqn} is {shape_text(stored)}, but {source} gives {shape_text(expected)}"
    notes: tuple[Note, ...] = ()
    # the fields that give the expected shape, with their values
    words = {word for dim in lead.expected.dims for word in dim.replace("(", " ").replace(")", " ").split()}
    fields = ", ".join(field_text(fit, name) for name in fit.expected.fields if name in words)
    again = f"{'export' if fit.is_export else 'save'} again"
    hint = f"gather the whole tensor before the save, and {again}"
    if _is_empty(lead):
        message = shapes if count == 1 else f"{plural(count, 'tensor')} have a size of 0: {shapes}"
        hint = "gather the parameters before the save (stage3_gather_16bit_weights): ZeRO-3 leaves empty placeholders"
    elif not lead.axes:
        message = shapes if count == 1 else f"{plural(count, 'tensor')} have the wrong number of dims: {shapes}"
        share = Fraction(prod(stored), prod(expected) or 1)
        if share != 1:
            notes = (("ratio", f"{prod(stored):,} of {prod(expected):,} elements = {_times(share)}"),)
    elif _is_transposed(lead):
        message = shapes if count == 1 else f"{plural(count, 'tensor')} are transposed: {shapes}"
        hint = f"store them in the layout of the model's class, and {again}"
    else:
        # A whole multiple looks like replicas that were joined (verl#7610), 1/k like one rank's part. Any other ratio
        # fits no fault of sharding, so the configuration is suspected.
        message = _sizes_message(source, items)
        ratio = Fraction(stored[lead.axes[0]], expected[lead.axes[0]] or 1)
        dim = _dim(lead, lead.axes[0])
        notes = _relation(ckpt, dim, ratio) if len(lead.axes) == 1 else ()
        if ratio.denominator == 1:
            hint = f"save one of the copies instead of all, and {again}"
        if dim == "padded_vocab_size" and ratio > 1:
            hint = f"pad the vocabulary once, for all ranks together, and {again}"
        if ratio.numerator != 1 and ratio.denominator != 1:
            hint = "compare the configuration with that of the job that trained the model"
    return Finding(
        message,
        at=Location(lead.tensor, label=f"{ckpt.metadata_file}, compared with {fit.place}"),
        identity=tuple(item.tensor.fqn for item in items[:MOST_KEYS]),
        keys=tuple(item.tensor.fqn for item in items[:MOST_KEYS]),
        kind=cause if isinstance(cause := _cause(ckpt, lead)[0], str) else "size",
        confidence="possible" if doubt or _is_constant(lead) else "certain",
        why=_consequence(fit),
        notes=(doubt_note(doubt), ("tensors", _patterns(items)), *notes, ("fields", fields)),
        hint=hint,
        group=f"shape {_cause(ckpt, lead)}",
    )


def _sizes_message(source: str, items: list[ShapeDifference]) -> str:
    """The message if the number of axes is right and some sizes differ."""
    lead = items[0]
    stored, expected = lead.tensor.global_shape, lead.expected.shape
    axis = lead.axes[0]
    dim = _dim(lead, axis)
    wanted = f"{dim} = {expected[axis]}" if dim and dim != str(expected[axis]) else str(expected[axis])
    ratio = _times(Fraction(stored[axis], expected[axis] or 1))
    if len({_dim(item, item.axes[0]) for item in items}) > 1:
        shapes = f"{lead.tensor.fqn} is {shape_text(stored)} instead of {shape_text(expected)}"
        return f"{plural(len(items), 'tensor')} have {ratio} of the size that {source} gives: {shapes}"
    if len(items) == 1 or len(lead.axes) > 1:
        is_named = any(not dim.isdecimal() for dim in lead.expected.dims)
        dims = f" = [{', '.join(lead.expected.dims)}]" if is_named else ""
        more = f", and {plural(len(items) - 1, 'other')} like it" if len(items) > 1 else ""
        tail = f": {ratio}" if len(lead.axes) == 1 else ""
        shapes = f"{lead.tensor.fqn} is {shape_text(stored)}, but {source} gives {shape_text(expected)}"
        return f"{shapes}{dims}{tail}{more}"
    return f"{plural(len(items), 'tensor')} have size {stored[axis]}, but {source} gives {wanted}: {ratio}"


def _times(ratio: Fraction) -> str:
    if ratio.denominator == 1:
        return f"{ratio} times"
    return str(ratio) if ratio.denominator < 1000 else f"{float(ratio):.4f}"


def _relation(ckpt: Checkpoint, dim: str, ratio: Fraction) -> tuple[Note, ...]:
    """A note on the usual cause of a ratio k or 1/k between stored and expected size; () for other ratios."""
    factor = max(ratio.numerator, ratio.denominator)
    if min(ratio.numerator, ratio.denominator) != 1 or dim == "num_layers":
        return ()
    axes = axes_of_size(ckpt.topology, factor)
    mesh = f"; {' and '.join(axes)} {verb(len(axes), 'has')} size {factor}" if axes else ""
    what = "looks like one rank's shard saved as the whole" if ratio < 1 else "looks like replicas saved as shards"
    if dim == "padded_vocab_size" and ratio > 1:
        return (("relation", f"rows already padded were padded or multiplied again{mesh}"),)
    if dim.startswith("(1 + swiglu)") and ratio == Fraction(1, 2) and "tp" not in axes:
        return (("relation", "one of the two halves of a gated projection"),)
    return (("relation", f"{what} ({factor} ranks{mesh})"),)


def _consequence(fit: Fit) -> str:
    return "from_pretrained refuses a tensor of a different size" if fit.is_export else ""


def _patterns(items: list[ShapeDifference]) -> str:
    return first_names(fold_names(item.tensor.fqn for item in items), noun="pattern") if len(items) > 1 else ""


def _shared_doubt(fit: Fit, items: list[ShapeDifference]) -> str:
    """Why all these shapes may be right after all; "" if at least one cannot."""
    # Tensors of one cause are wrong or right together, so one shape that no open field explains settles all.
    doubts = [fit.doubt if _is_empty(item) else fit.doubt_of_shape(item.name, item.axes) for item in items]
    return doubts[0] if all(doubts) else ""


def _grown(ckpt: Checkpoint, fit: Fit) -> Finding:
    field = next(name for name in fit.expected.fields if name.endswith("vocab_size"))
    declared, doubt = fit.expected.fields[field], fit.doubt_of([field])
    return Finding(
        f"the embedding has {fit.grown} rows, but {fit.expected.source} declares a vocabulary of {declared}",
        at=Location(label=f"{ckpt.metadata_file}, compared with {fit.place}"),
        identity=("vocab_size", str(fit.grown)),
        severity=None if fit.is_export else Severity.INFO,
        confidence="possible" if doubt else "certain",
        why=_consequence(fit) or "these are added tokens or padding; a loader that compares sizes refuses them",
        notes=(doubt_note(doubt),),
        hint=f"set {field} to {fit.grown} if the tokenizer has these tokens; otherwise trim the rows to {declared}",
    )
