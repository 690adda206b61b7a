from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckptlint.analysis.fit.key_matching import KeyComparison, KeyEntry, match_keys
from ckptlint.model import Checkpoint
from ckptlint.model.text import human_bytes, verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, require, rule
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.mesh import axes_of_size

_FACTORS = tuple(2**power for power in range(1, 13))
_TOLERANCE = 50  # one part in so many: 2 %
_LEAST_KEYS = 2
_SHOWN = 6


@dataclass(slots=True)
class _Sum:
    """Bytes of one part of the state on both sides, at the dtypes of the reference."""

    expected: int = 0
    stored: int = 0
    keys: int = 0

    def factor(self) -> int | None:
        """The power of two by which the expected bytes exceed the stored ones; None if none fits."""
        if not self.stored or self.keys < _LEAST_KEYS:
            return None
        return next((k for k in _FACTORS if _TOLERANCE * abs(self.stored * k - self.expected) <= self.expected), None)


@rule("REF003", "bytes-ratio", Severity.WARNING, whole=True, expects=True, needs=("reference tensors",))
def bytes_ratio(ckpt: Checkpoint) -> Iterator[Finding]:
    """The state, or a part of it, has only a half, a quarter or an eighth of the reference's bytes.

    What it checks:
        With --expect, the model, the optimizer, each block and its experts do not have 1/2, 1/4, 1/8, ... of the bytes
        of the same keys in the reference, within 2 %. Holes do not count as stored; experts that are missing beside
        others count as expected. Both sides are counted in the reference's dtypes, so precision makes no difference.
    Why it matters:
        A drop by a power of two usually means a lost mesh axis: the save kept only one rank's part of several.
    Usual causes:
        The replica id or the placement lacks an axis of the mesh, and the ranks along it count as copies of each other.
    How to fix:
        Read the findings on the keys themselves (GEO004, EXP003, OBJ001, REF001, REF002), repair the placements and
        save again.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor (replica_id)
    """
    reference = require(ckpt.reference)
    comparison = match_keys(ckpt, reference)
    if 2 * len(comparison.unpaired_expected) > comparison.expected.total():
        raise NotApplicable("the reference uses another naming scheme")
    sums = _sums(ckpt, comparison)
    if not sums:
        raise NotApplicable("the reference gives no shapes, or shares no key with this checkpoint")
    whole: dict[str, _Sum] = defaultdict(_Sum)
    for (kind, _), group in sums.items():
        whole[kind].expected += group.expected
        whole[kind].stored += group.stored
        whole[kind].keys += group.keys
    for kind, total in whole.items():
        groups = {label: group for (of, label), group in sums.items() if of == kind}
        if (factor := total.factor()) is not None and len(groups) > 1:
            yield _finding(ckpt, f"the {kind}", kind, total, factor, groups)
            continue
        for label, group in groups.items():
            if (factor := group.factor()) is not None:
                yield _finding(ckpt, label, f"{kind} {label}", group, factor, {})


def _sums(ckpt: Checkpoint, comparison: KeyComparison) -> dict[tuple[str, str], _Sum]:
    """(kind, part of the state) -> bytes; a tensor counts once, in however many pairs it is."""
    sums: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
    counted: set[str] = set()
    # absent layers are REF001's; absent experts beside others of their layer are what a lost axis leaves
    places = {(pair.expected.family, pair.expected.key.layer) for pair in comparison.pairs}
    experts = [lone.entry for lone in comparison.absent if lone.entry.key.expert is not None]
    absent = [entry for entry in experts if (entry.family, entry.key.layer) in places]
    for entry in [*(pair.expected for pair in comparison.pairs), *absent]:
        bits = ITEM_BITS.get(entry.dtype or "")
        if entry.shape is not None and bits is not None and entry.fqn not in counted:
            counted.add(entry.fqn)
            group = sums[entry.kind, _label(entry)]
            group.expected += prod(entry.shape) * bits // 8
            group.keys += 1
    known, counted = counted, set()
    for pair in comparison.pairs:
        if pair.expected.fqn in known and pair.stored.fqn not in counted:
            counted.add(pair.stored.fqn)
            bits = ITEM_BITS[pair.expected.dtype or ""]
            tensor = ckpt.tensors[pair.stored.fqn]
            lost = tensor.tiling.coverage.missing_volume if tensor.is_sound else 0
            sums[pair.expected.kind, _label(pair.expected)].stored += (tensor.volume - lost) * bits // 8
    return dict(sums)


def _label(entry: KeyEntry) -> str:
    """The name of the group an entry is counted in: its block, the experts of it, or the key's first part."""
    key = entry.key
    where = ".".join((*entry.family[2], key.block or key.path.partition(".")[0]))
    return f"the experts of {where}" if key.in_experts else where


def _finding(ckpt: Checkpoint, subject: str, name: str, total: _Sum, factor: int, groups: dict[str, _Sum]) -> Finding:
    """The finding on a part of the model that is a whole factor smaller than the reference."""
    odd = sorted(groups.items(), key=lambda item: item[1].stored - item[1].expected)
    odd = [(label, inner) for label, inner in odd if inner.stored != inner.expected]
    sizes = [f"{label} {human_bytes(inner.stored)} of {human_bytes(inner.expected)}" for label, inner in odd]
    names = axes_of_size(ckpt.topology, factor)
    mesh = f"{', '.join(names)} {verb(len(names), 'has')} size {factor}" if names else ""
    stored, expected = human_bytes(total.stored), human_bytes(total.expected)
    hold = "hold" if subject.startswith("the experts") else "holds"
    return Finding(
        f"{subject} {hold} {stored}, 1/{factor} of the {expected} in the reference",
        at=Location(label=f"{ckpt.metadata_file}, compared with {require(ckpt.reference).source}"),
        identity=(name, str(factor)),
        notes=(
            ("counted", f"{total.stored:,} and {total.expected:,} bytes, in the dtypes of the reference"),
            ("parts", ", ".join(sizes[:_SHOWN])),
            ("mesh", mesh),
        ),
        hint="check that the replica id and the placement of these tensors name every axis of the mesh",
        inferred_from=f"the bytes of {total.keys:,} keys that the reference has too",
    )
