from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from ckptlint.analysis.fit.key_matching import KeyComparison, KeyEntry, LoneKeys, match_keys
from ckptlint.analysis.fit.trusted_config import flag
from ckptlint.model import Checkpoint, Reference
from ckptlint.model.text import first_names, fold_names, plural, ranges, shape_text
from ckptlint.rule import Finding, Location, Severity, require, rule
from ckptlint.vocabulary.keys import COMPUTED
from ckptlint.vocabulary.schemes import quantised_weight

_SHOWN = 6
_YIELDS_TO = ("CFG001", "CFG002")
_KINDS = {"model": "parameters of the model", "copy": "the second copy of the model", "optimizer": "optimizer state"}


@rule(
    "REF001", "key-diff", Severity.ERROR, whole=True, expects=True, needs=("reference tensors",), yields_to=_YIELDS_TO
)
def key_diff(ckpt: Checkpoint) -> Iterator[Finding]:
    """Keys differ from those of the reference.

    What it checks:
        With --expect, every parameter of the reference is stored here. Missing optimizer state, a missing second copy
        of the model, and keys that the reference does not have are warnings. Keys are compared without wrappers, and
        stacked layers and experts with numbered ones; keys that may mean the same in another naming scheme are listed
        as info, never called missing. Keys that CFG001 and CFG002 report are left to them.
    Why it matters:
        A load that is not strict leaves missing parameters at their initial values and raises no error.
    Usual causes:
        Only one group of ranks gathered keys, a pipeline stage or the ranks of some experts never saved, a key map or a
        filter differs from rank to rank, or the model has another configuration.
    How to fix:
        Compare the keys that each rank passes to save with the reference and save again from the job, or go back to a
        step that has them.
    See:
        torch.distributed.checkpoint.DefaultLoadPlanner (allow_partial_load), `ckptlint manifest`
    """
    reference = require(ckpt.reference)
    comparison = match_keys(ckpt, reference)
    yield from _lacking_kinds(ckpt, reference, comparison)
    extents = _extents(comparison.absent)
    counts = Counter(lone.entry.kind for lone in comparison.absent if not lone.part).items()
    of_kinds = [f"{count:,} of {comparison.expected[kind]:,} keys of the {_KINDS[kind]}" for kind, count in counts]
    for lone in comparison.absent:
        yield _finding(ckpt, lone, extents, of_kinds, is_absent=True)
    extents = _extents(comparison.added)
    for lone in comparison.added:
        yield _finding(ckpt, lone, extents, [], is_absent=False)
    if comparison.unpaired_expected or comparison.unpaired_stored:
        yield _unpaired(ckpt, reference, comparison)


def _lacking_kinds(ckpt: Checkpoint, reference: Reference, comparison: KeyComparison) -> Iterator[Finding]:
    """Findings on a kind of state that is not stored at all: never an error, as jobs often leave it out on purpose."""
    saves = {"save_optim": False, "no_save_optim": True}
    left_out = next((name for name, value in saves.items() if flag(ckpt.declared, name) is value), "")
    for kind in sorted(comparison.lacking):
        reason, hint = "", "if the job leaves it out on purpose, compare with a step or a manifest without it"
        if kind == "model":
            reason, hint = "the folder is named for the optimizer and holds only its state", ""
        elif kind == "optimizer" and left_out:
            reason, hint = f"the job is configured not to save it ({left_out})", ""
        count = comparison.expected[kind]
        yield Finding(
            f"no part of the {_KINDS[kind]} is stored here; the reference has {plural(count, 'such key')}",
            at=Location(label=_place(ckpt, reference)),
            severity=Severity.INFO if reason else Severity.WARNING,
            why="a load that needs this part fails or starts it from scratch",
            notes=(("because", reason),),
            hint=hint,
        )


def _finding(
    ckpt: Checkpoint, lone: LoneKeys, extents: dict[KeyEntry, str], missing: list[str], is_absent: bool
) -> Finding:
    """The finding on a key, or on some layers or experts of it, that only one side has."""
    entry, reference = lone.entry, require(ckpt.reference)
    what = " ".join(word for word in (entry.dtype, shape_text(entry.shape) if entry.shape is not None else "") if word)
    is_one = lone.part.rpartition(" ")[2].isdecimal() and "," not in lone.part
    subject = f"{lone.part}{{of}} {'is' if is_one else 'are'} not" if lone.part else "no part{of} is"
    message = f"{subject} in the reference; this checkpoint stores {what}"
    hint = "if the model changed on purpose, write a new manifest from this step with `ckptlint manifest`"
    if is_absent:
        message = f"{subject} stored here" + (f"; the reference has {what}" if what else ", but the reference names it")
        hint = "list the keys that each rank passes to save, and find the rank or stage that should save these"
    severity, reason = _severity(ckpt, reference, entry, is_absent)
    return Finding(
        message,
        at=Location(entry.fqn if is_absent else ckpt.tensors.get(entry.fqn, entry.fqn), label=_place(ckpt, reference)),
        severity=severity,
        identity=(lone.part,) if lone.part else (),
        why="" if is_absent else f"a strict load fails on unexpected {_KINDS[entry.kind]}",
        notes=(("because", reason), *(("missing", text) for text in missing)),
        hint="" if severity is Severity.INFO else hint,
        group=f"{is_absent} {extents.get(entry, '')}" if entry in extents else "",
    )


def _severity(ckpt: Checkpoint, reference: Reference, entry: KeyEntry, is_absent: bool) -> tuple[Severity | None, str]:
    """(severity, None for the rule's own; the reason if it is only info)."""
    # A loader fails on absent parameters alone. Computed buffers and scales come and go with the version of the
    # library or the precision of an export, and two folders that load alike may differ in them.
    last = entry.fqn.rpartition(".")[2]
    if last in COMPUTED:
        return Severity.INFO, f"{last} is a buffer that the model computes; newer versions do not store it"
    if quantised_weight(entry.fqn):
        return Severity.INFO, f"{last} belongs to quantised weights; the other side may store them in full precision"
    if entry.key.function == "output" and _is_tied(ckpt, reference, is_absent):
        return Severity.INFO, "the output layer shares the weight of the embedding"
    return None if is_absent and entry.kind == "model" else Severity.WARNING, ""


def _is_tied(ckpt: Checkpoint, reference: Reference, is_absent: bool) -> bool:
    declarations = (reference.declared, ckpt.declared)
    if any(flag(declared, "tied") is True or flag(declared, "untied") is False for declared in declarations):
        return True
    # safetensors refuses two names of one memory, so save_pretrained writes a tied weight once. A head that such a
    # reference lacks is assumed to be tied; one that it has was stored for a reason, and its absence counts.
    return not is_absent and reference.kind in ("safetensors", "index", "Hugging Face folder")


def _extents(lone_keys: Iterable[LoneKeys]) -> dict[KeyEntry, str]:
    """Entry -> block, layers and experts in which its role is absent: roles of one extent are reported together."""
    layers: dict[tuple[object, ...], set[int]] = defaultdict(set)
    experts: dict[tuple[object, ...], set[int]] = defaultdict(set)
    entries = [lone.entry for lone in lone_keys if not lone.part and lone.entry.key.layer is not None]
    for entry in entries:
        layers[entry.family].add(entry.key.layer or 0)
        if entry.key.expert is not None:
            experts[entry.family].add(entry.key.expert)
    numbers = {family: f"layers {ranges(layers[family])} experts {ranges(experts[family])}" for family in layers}
    return {entry: f"{entry.kind} {entry.family[2]} {entry.key.block} {numbers[entry.family]}" for entry in entries}


def _unpaired(ckpt: Checkpoint, reference: Reference, comparison: KeyComparison) -> Finding:
    """The finding that the two sides probably name their keys differently."""
    paired = len({pair.expected.fqn for pair in comparison.pairs})
    named = sum(count for kind, count in comparison.expected.items() if kind not in comparison.lacking)
    return Finding(
        f"{plural(len(comparison.unpaired_expected), 'key')} of the reference and "
        f"{plural(len(comparison.unpaired_stored), 'key')} here have no counterpart: the naming schemes may differ",
        at=Location(label=_place(ckpt, reference)),
        severity=Severity.INFO,
        why="ckptlint does not report a key as missing if it may be stored under another name",
        notes=(
            ("paired", f"{paired:,} of {named:,} keys of the reference"),
            ("expected", first_names(fold_names(comparison.unpaired_expected), _SHOWN, "pattern")),
            ("stored", first_names(fold_names(comparison.unpaired_stored), _SHOWN, "pattern")),
        ),
        hint="compare with a reference that uses the keys of this checkpoint, for example another step",
    )


def _place(ckpt: Checkpoint, reference: Reference) -> str:
    return f"{ckpt.metadata_file}, compared with {reference.source}"
