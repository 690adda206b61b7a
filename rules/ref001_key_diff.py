"""REF001: the keys of the reference are there."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from ckptlint.analysis.fit.judgement import told_keys
from ckptlint.analysis.key_matching import KeyComparison, KeyEntry, LoneKeys, match_keys
from ckptlint.analysis.trusted_config import flag
from ckptlint.model import Checkpoint, Reference
from ckptlint.model.text import braces, ranges
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule

_COMPUTED = frozenset({"inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "freqs_cis", "position_ids"})
_QUANTISED = re.compile(r".*_(scale|scale_inv|scales|amax|zero_point)|scale|qweight|qzeros|g_idx")
_SHOWN = 6
_KINDS = {"model": "parameters of the model", "copy": "the second copy of the model", "optimizer": "optimizer state"}


@rule("REF001", "key-diff", Severity.ERROR, whole=True, expects=True)
def key_diff(ckpt: Checkpoint) -> Iterator[Finding]:
    """Keys differ from those of the reference.

    What it checks:
        With --expect, every parameter of the reference is stored here. A warning for optimizer state and second copies
        of the model that are missing, and for keys that the reference does not have. Names are compared without
        wrappers, and stacked layers and experts with numbered ones; names that may mean the same in another scheme are
        listed as an info, never called missing. Silent on keys of which CFG001 and CFG002 tell.
    Why it matters:
        A load that is not strict leaves absent parameters at their initial values and raises nothing.
    Usual causes:
        Keys were gathered over one group of ranks only, a pipeline stage or the ranks of some experts did not save, a
        name map or a filter differs from rank to rank, or the model was built from another configuration.
    How to fix:
        Compare the keys that each rank passes to save with the reference, save again from the job, or go back to a step
        that has them.
    See:
        torch.distributed.checkpoint.DefaultLoadPlanner (allow_partial_load), `ckptlint manifest`
    """
    reference = ckpt.reference
    if reference is None or not reference.tensors:
        raise NotApplicable("the reference names no tensors")
    found = match_keys(ckpt, reference)
    yield from _lacking(ckpt, reference, found)
    shared = _same_places(found.absent)
    counted = _counted(found)
    for single in found.absent:
        yield _finding(ckpt, reference, single, shared, counted, is_absent=True)
    shared = _same_places(found.added)
    for single in found.added:
        yield _finding(ckpt, reference, single, shared, (), is_absent=False)
    if found.unpaired_expected or found.unpaired_stored:
        yield _unpaired(ckpt, reference, found)


def _lacking(ckpt: Checkpoint, reference: Reference, found: KeyComparison) -> Iterator[Finding]:
    """The parts of the state that are absent as a whole, which is often meant."""
    saves = {"save_optim": False, "no_save_optim": True}
    left_out = next((name for name, value in saves.items() if flag(ckpt.declared, name) is value), "")
    for kind in sorted(found.lacking):
        reason, hint = "", "if it was left out on purpose, compare with a step or a manifest without it"
        if kind == "model":
            reason, hint = "the folder is named for the optimizer and holds its state alone", ""
        elif kind == "optimizer" and left_out:
            reason, hint = f"the job declares that it does not save it ({left_out})", ""
        count = found.expected[kind]
        yield Finding(
            f"nothing of the {_KINDS[kind]} is stored here; the reference has {count:,} key{'s' * (count > 1)} of it",
            at=Location(label=_place(ckpt, reference)),
            severity=Severity.INFO if reason else Severity.WARNING,
            why="a load that wants this part fails or starts it anew",
            notes=(("because", reason),),
            hint=hint,
        )


def _finding(
    ckpt: Checkpoint,
    reference: Reference,
    single: LoneKeys,
    shared: dict[KeyEntry, str],
    notes: tuple[Note, ...],
    is_absent: bool,
) -> Finding:
    entry = single.entry
    what = " ".join(part for part in (entry.dtype, _shape(entry)) if part)
    if is_absent:
        subject = f"{single.part}{{of}} {'is' if _is_one(single.part) else 'are'} not" if single.part else ""
        tail = f"; the reference has {what}" if what else ", and the reference names it"
        message = f"{subject} stored here{tail}" if subject else f"nothing{{of}} is stored here{tail}"
    else:
        subject = f"{single.part}{{of}} {'is' if _is_one(single.part) else 'are'} not" if single.part else ""
        message = f"{subject or 'nothing{of} is'} in the reference; stored here: {what}"
    severity, reason = _level(ckpt, reference, entry, is_absent)
    kind = _KINDS[entry.kind]
    return Finding(
        message,
        at=Location(entry.fqn, None if is_absent else ckpt.tensors.get(entry.fqn), label=_place(ckpt, reference)),
        severity=severity,
        missing=(single.part,) if single.part else (),
        why="" if is_absent else f"a strict load fails on {kind} that it does not expect",
        notes=(("because", reason), *notes),
        hint="" if severity is Severity.INFO else _hint(is_absent),
        alike=f"{is_absent} {shared.get(entry, '')}" if entry in shared else "",
        told_by=told_keys(ckpt).get(entry.fqn, ""),
    )


def _hint(is_absent: bool) -> str:
    if is_absent:
        return "list the keys that each rank passes to save and look for the rank or stage that held these"
    return "if the model was changed on purpose, write a new manifest from this step with `ckptlint manifest`"


def _level(ckpt: Checkpoint, reference: Reference, entry: KeyEntry, is_absent: bool) -> tuple[Severity | None, str]:
    """The severity, and why it is only an info."""
    last = entry.fqn.rpartition(".")[2]
    if last in _COMPUTED:
        return Severity.INFO, f"{last} is a buffer that the model computes; newer versions do not store it"
    if _QUANTISED.fullmatch(last):
        return Severity.INFO, f"{last} goes with quantised weights; the other side may hold them in full precision"
    if entry.key.function == "output" and _is_tied(ckpt, reference, is_absent):
        return Severity.INFO, "the output layer shares the weight of the embedding"
    return None if is_absent and entry.kind == "model" else Severity.WARNING, ""


def _is_tied(ckpt: Checkpoint, reference: Reference, is_absent: bool) -> bool:
    """Whether the output layer is the embedding: declared, or safetensors, which never hold one tensor twice."""
    for declared in (reference.declared, ckpt.declared):
        if flag(declared, "tied") is True or flag(declared, "untied") is False:
            return True
    return not is_absent and reference.kind in ("safetensors", "index", "Hugging Face folder")


def _same_places(singles: Iterable[LoneKeys]) -> dict[KeyEntry, str]:
    """Entry -> where its role is concerned, which roles of one cause have in common: block, layers, experts."""
    layers: dict[tuple[object, ...], set[int]] = defaultdict(set)
    experts: dict[tuple[object, ...], set[int]] = defaultdict(set)
    entries = [single.entry for single in singles if not single.part and single.entry.key.layer is not None]
    for entry in entries:
        layers[entry.family].add(entry.key.layer or 0)
        if entry.key.expert is not None:
            experts[entry.family].add(entry.key.expert)
    places = {
        family: f"layers {ranges(numbers)} experts {ranges(experts.get(family, ()))}"
        for family, numbers in layers.items()
    }
    return {entry: f"{entry.kind} {entry.family[2]} {entry.key.block} {places[entry.family]}" for entry in entries}


def _counted(found: KeyComparison) -> tuple[Note, ...]:
    """How many keys of each kind are missing."""
    missing = Counter(single.entry.kind for single in found.absent if not single.part)
    return tuple(
        ("missing", f"{count:,} of {found.expected[kind]:,} keys of the {_KINDS[kind]}")
        for kind, count in missing.items()
    )


def _unpaired(ckpt: Checkpoint, reference: Reference, found: KeyComparison) -> Finding:
    paired = len({pair.expected.fqn for pair in found.pairs})
    named = sum(count for kind, count in found.expected.items() if kind not in found.lacking)
    return Finding(
        f"{len(found.unpaired_expected):,} names of the reference and {len(found.unpaired_stored):,} names here cannot "
        "be paired: they may mean the same in another naming scheme",
        at=Location(label=_place(ckpt, reference)),
        severity=Severity.INFO,
        why="nothing is called missing where names differ by their scheme",
        notes=(
            ("paired", f"{paired:,} of {named:,} keys of the reference"),
            ("expected", _listed(found.unpaired_expected)),
            ("stored", _listed(found.unpaired_stored)),
        ),
        hint="compare with a reference that uses the names of this checkpoint, for example another step",
    )


def _listed(fqns: list[str]) -> str:
    names = braces(dict.fromkeys(fqns))
    more = f", and {len(names) - _SHOWN:,} more patterns" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _place(ckpt: Checkpoint, reference: Reference) -> str:
    return f"{ckpt.metadata_file}, compared with {reference.source}"


def _shape(entry: KeyEntry) -> str:
    return "" if entry.shape is None else "[" + ", ".join(map(str, entry.shape)) + "]"


def _is_one(part: str) -> bool:
    return part.rpartition(" ")[2].isdecimal() and "," not in part
