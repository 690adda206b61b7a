from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from math import prod

from ckptlint.analysis.fit.judgement import has_known_config, kept_in_float32, shapes_reported
from ckptlint.analysis.fit.key_matching import KeyComparison, KeyPair, match_keys
from ckptlint.analysis.fit.trusted_config import contradictions, main_params, number
from ckptlint.model import Checkpoint, Declared, Reference
from ckptlint.model.cover import Shape
from ckptlint.model.text import shape_text, verb
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule
from ckptlint.vocabulary.mesh import axes_of_size

_WORDS = {
    "layers": "layers",
    "hidden": "hidden units",
    "experts": "experts",
    "heads": "heads",
    "vocab": "vocabulary rows",
}
_FROM_CHECKPOINT = ("hybrid_pattern", "mtp_layers", "heterogeneous")


@rule("REF002", "shape-dtype-diff", Severity.ERROR, expects=True, yields_to=("CFG003",))
def shape_dtype_diff(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's shape or dtype differs from the reference.

    What it checks:
        With --expect, every key that both sides have has the same global shape (error) and dtype (warning), and the
        counts that a config.json declares match: layers, hidden units, heads, experts, vocabulary rows (warning).
        Chunks may differ. Shapes that CFG003 reports are left to it.
    Why it matters:
        A load fails on another shape, and converts another dtype without an error.
    Usual causes:
        The placements lost a mesh axis, so that one rank's part counts as the whole; two sharded dims were swapped; the
        end of a tensor was cut off; somebody changed the dtype of the export.
    How to fix:
        Find the first step that differs, repair the placements, and save again from the job.
    See:
        `ckptlint explain SHP003`, `ckptlint explain SHP004`
    """
    reference = ckpt.reference
    if reference is None or not (reference.tensors or reference.declared):
        raise NotApplicable("the reference gives no shapes")
    comparison = match_keys(ckpt, reference)
    has_wrong_shape = False
    pairs: dict[tuple[object, ...], KeyPair] = {}  # numbered layers against one stacked tensor give many alike
    for pair in comparison.pairs:
        pairs.setdefault((pair.stored.fqn, pair.expected_shape, pair.expected.dtype), pair)
    for pair in pairs.values():
        if pair.expected_shape is not None and pair.stored_shape is not None and _differs(ckpt, pair):
            has_wrong_shape = True
            yield _shape_finding(ckpt, reference, pair)
        if None not in (pair.expected.dtype, pair.stored.dtype) and pair.expected.dtype != pair.stored.dtype:
            yield _dtype_finding(ckpt, reference, pair)
    # Counts are read from shapes: beside a wrong shape they would report the same fault once more.
    if not has_wrong_shape and not _declares_the_same(ckpt, reference):
        yield from _wrong_counts(ckpt, reference, comparison)


def _declares_the_same(ckpt: Checkpoint, reference: Reference) -> bool:
    """Whether reference and own configuration declare the same counts, so that the CFG rules check them already."""
    shared = [name for name in reference.declared if name in _WORDS]
    return has_known_config(ckpt) and all(
        name in ckpt.declared and ckpt.declared[name].value == reference.declared[name].value for name in shared
    )


def _differs(ckpt: Checkpoint, pair: KeyPair) -> bool:
    """Whether two shapes differ by more than the form in which a writer stores the same elements."""
    expected, stored = pair.expected_shape or (), pair.stored_shape or ()
    if expected == stored:
        return False
    if prod(expected) != prod(stored):
        return True
    if pair.stored.kind == "optimizer" and (len(expected) != len(stored) or ckpt.tensors[pair.stored.fqn].is_flattened):
        return False  # Megatron-Core <= 0.15 flattened states to the grid of their shards, which resharding changes
    # Writers differ in whether a stack of experts is transposed; numbered experts beside it cannot tell which is right.
    return pair.alike or sorted(expected) != sorted(stored)


def _shape_finding(ckpt: Checkpoint, reference: Reference, pair: KeyPair) -> Finding:
    expected, stored = pair.expected_shape or (), pair.stored_shape or ()
    each = "" if pair.alike else " for each layer or expert"
    padding = _padding_reason(ckpt, pair)
    return Finding(
        f"the shape{{of}} is {shape_text(stored)}{each}, the reference has {shape_text(expected)}",
        at=Location(ckpt.tensors[pair.stored.fqn], label=_label(ckpt, reference, pair)),
        severity=Severity.INFO if padding else None,
        why="a load fails on this tensor; a planner that does not compare sizes fills only part of it",
        notes=(("because", padding), *_ratios(expected, stored), *_relation(ckpt, expected, stored)),
        hint="" if padding else "find the first step with this shape, and what changed in the job before it",
        is_apart=shapes_reported(ckpt).get(pair.stored.fqn) != expected,
    )


def _padding_reason(ckpt: Checkpoint, pair: KeyPair) -> str:
    """The reason if the number of vocabulary rows is the padded one that the job declares; "" otherwise."""
    expected, stored = pair.expected_shape or (), pair.stored_shape or ()
    is_table = pair.stored.key.function in ("embedding", "output") and stored and expected[1:] == stored[1:]
    padded = number(ckpt.declared, "padded_vocab")
    if is_table and padded == stored[0]:
        return f"the job declares {padded:,} padded vocabulary rows, which depend on the tensor-parallel size"
    return ""


def _ratios(expected: Shape, stored: Shape) -> tuple[Note, ...]:
    if len(expected) != len(stored):
        axes = f"{len(stored)} dims instead of {len(expected)}"
        return (("ratio", f"{axes}, {prod(stored):,} elements instead of {prod(expected):,}"),)
    dims = []
    for axis, (a, b) in enumerate(zip(stored, expected, strict=True)):
        share = Fraction(a, b or 1)
        times = f" = {share if share.denominator < 1000 else f'{float(share):.3f}'} x" if a and b else ""
        dims += [f"dim {axis}: {a:,} instead of {b:,}{times}"] if a != b else []
    return (("ratio", "; ".join(dims)),)


def _relation(ckpt: Checkpoint, expected: Shape, stored: Shape) -> tuple[Note, ...]:
    """A note on the sharding fault that would give this shape; () if none fits."""
    # At equal volume two dims were swapped or transposed. In one dim alone, 1/k is one rank's shard and k times are
    # copies side by side. Other ratios (a cut end, another model) have no such explanation.
    axes = [axis for axis, (a, b) in enumerate(zip(stored, expected, strict=False)) if a != b]
    if len(expected) != len(stored) or 0 in expected or 0 in stored:
        return ()
    text, factor = "", Fraction(1)
    if len(axes) == 2 and prod(expected) == prod(stored):
        long, short = sorted(axes, key=lambda axis: Fraction(expected[axis], stored[axis]))
        factor = Fraction(stored[long], expected[long])
        is_transposed = (stored[long], stored[short]) == (expected[short], expected[long])
        how = "transposed, or the sharded dims swapped" if is_transposed else "the sharded dims were swapped"
        text = f"dim {long} is {factor} times as long, dim {short} 1/{factor}, at equal volume: {how} (SHP003)"
    elif len(axes) == 1:
        factor = Fraction(stored[axes[0]], expected[axes[0]])
        text = f"dim {axes[0]} is {factor} times as long: copies saved as shards (SHP004)"
        if factor.numerator == 1:
            factor = 1 / factor
            text = f"dim {axes[0]} is 1/{factor}: one rank's shard saved as the whole (SHP004)"
    if not text or factor.denominator != 1:
        return ()
    names = axes_of_size(ckpt.topology, int(factor))
    sizes = f"; {', '.join(names)} {verb(len(names), 'has')} size {factor}" if names else ""
    return (("relation", f"{text}{sizes}"),)


def _dtype_finding(ckpt: Checkpoint, reference: Reference, pair: KeyPair) -> Finding:
    """One group for each change of dtype; those that the model's class would not make are a group of their own."""
    is_kept = pair.expected.dtype == "float32" and pair.stored.fqn in kept_in_float32(ckpt)
    return Finding(
        f"the dtype{{of}} is {pair.stored.dtype}, the reference has {pair.expected.dtype}",
        at=Location(ckpt.tensors[pair.stored.fqn], label=_label(ckpt, reference, pair)),
        severity=Severity.WARNING,
        why="transformers keeps it in float32 whatever the dtype of the model, and its lost bits stay lost"
        if is_kept
        else "a load converts the values without an error, and lost precision stays lost",
        hint="export it again in float32"
        if is_kept
        else "if the change was intended, pass --expect a reference of the same precision",
        is_apart=True,
        group=f"dtype {pair.stored.kind} {pair.stored.dtype} {pair.expected.dtype}{' kept' if is_kept else ''}",
    )


def _wrong_counts(ckpt: Checkpoint, reference: Reference, comparison: KeyComparison) -> Iterator[Finding]:
    """Findings on counts that the reference declares and the tensors, or the job's own arguments, contradict."""
    if not reference.declared:
        return
    # How layers are counted depends on the job (hybrid patterns, prediction layers), so these fields are the job's own.
    stated = {name: ckpt.declared[name] for name in _FROM_CHECKPOINT if name in ckpt.declared}
    differing: dict[str, tuple[Declared, int, str]] = {
        item.name: (item.declared, item.stored, f"counted from {item.shown_by}")
        for item in contradictions(replace(ckpt, declared={**stated, **reference.declared}))
    }
    heads = number(ckpt.declared, "heads")
    if heads is not None and number(reference.declared, "heads") not in (None, heads):
        differing["heads"] = (reference.declared["heads"], heads, f"declared in {ckpt.declared['heads'].source}")
    rows = {
        p.tensor.global_shape[0] for p in main_params(ckpt) if p.key.function == "embedding" and len(p.own_shape) == 2
    }
    vocabulary = number(reference.declared, "vocab")
    if len(rows) == 1 and vocabulary is not None and max(rows) < vocabulary:  # more rows are padding
        differing["vocab"] = (reference.declared["vocab"], max(rows), "counted from the embedding")
    if any(lone.entry.key.layer is not None for lone in [*comparison.absent, *comparison.added]):
        differing.pop("layers", None)  # REF001 names the layers
    for name, (declared, count, source) in differing.items():
        if name in _WORDS:
            wanted = int(declared.value)
            yield Finding(
                f"{count:,} {_WORDS[name]} here, {wanted:,} in the reference",
                at=Location(label=_label(ckpt, reference)),
                severity=Severity.WARNING,
                why="the checkpoint belongs to another model, or part of it is lost",
                notes=(("source", f"{count:,} is {source}, {wanted:,} is in {declared.source}"),),
                hint="compare with the configuration that the job started with",
            )


def _label(ckpt: Checkpoint, reference: Reference, pair: KeyPair | None = None) -> str:
    place = f"{ckpt.metadata_file}, compared with {reference.source}"
    return place if pair is None or pair.expected.fqn == pair.stored.fqn else f"{place}: {pair.expected.fqn}"
