from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptlint.analysis.fit.trusted_config import trusted_topology
from ckptlint.analysis.optimizer.fit import PAIR
from ckptlint.analysis.optimizer.inventory import Bucket, dp_group, inventory_of
from ckptlint.model import AxisSize, Checkpoint
from ckptlint.model.text import ranges, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule

_NUMEL = "per_bucket_numel"
_UNPADDED = "per_bucket_numel_unpadded"
_BUCKET = lazy_pattern(r"gbuf_idx_(?P<gbuf>\d{1,9})\.dtype_\((?P<types>[^)]*)\)\.bucket_idx_(?P<bucket>\d{1,9})\.")
_EXACT = ("metadata", "args", "run_config", "config.json")

_MOST = 2**16  # groups of a job


@dataclass(frozen=True, slots=True)
class _Kind:
    """The groups that a chain has if it is of this kind: dense or expert parameters."""

    name: str
    per_stage: int  # groups of one pipeline stage; their numbers follow each other
    stages: int
    formula: str  # the mesh axes that multiply to the count, with their sizes

    @property
    def count(self) -> int:
        return self.per_stage * self.stages


@rule("OPT005", "dp-group-set", Severity.ERROR, needs=("sound",), whole=True)
def dp_group_set(ckpt: Checkpoint) -> Iterator[Finding]:
    """The groups of the distributed optimizer's buckets do not match the mesh.

    What it checks:
        Per optimizer chain and module, the numbers after dp_group_idx_ are 0 to n-1, with n = tp x pp, or etp x ep x pp
        for the chain of the experts. Every group has the records (bucket sizes, param_groups, ...) and both moments
        that others of the chain have. Whole stages without a group are a warning, and info for a chain that may be the
        experts', since a stage of dense layers has none. If the mesh is inferred, it is a warning. From depth headers
        on, each bucket is as long as its record of unpadded sizes says.
    Why it matters:
        Two model-parallel groups wrote under one key, or one did not write, so its moments are lost.
    Usual causes:
        Modules have no key prefix of their own, or a group index was computed in the wrong process group.
    How to fix:
        Prefix the keys per module, and number over all model-parallel groups.
    See:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_state_dict
    """
    groups: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    for bucket in inventory_of(ckpt).buckets:
        groups[bucket.chain].setdefault(bucket.group, bucket.tensor.fqn)
    if not groups:
        raise NotApplicable("there are no buckets of a distributed optimizer")
    recorded: dict[tuple[str, ...], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for key in ckpt.objects.keys:
        if (parsed := dp_group(key)) is not None:
            chain, group, name = parsed
            recorded[chain][name].add(group)
    sizes = trusted_topology(ckpt)
    has_experts = any(param.key.in_experts for param in inventory_of(ckpt).params)
    for chain, group_keys in groups.items():
        yield from _group_findings(chain, group_keys, _kinds(chain, sizes, has_experts), sizes)
        yield from _missing_records(chain, group_keys, recorded[chain])
        yield from _missing_moments([bucket for bucket in inventory_of(ckpt).buckets if bucket.chain == chain])
    yield from _wrong_lengths(ckpt)


def _kinds(chain: tuple[str, ...], sizes: Mapping[str, AxisSize], has_experts: bool) -> list[_Kind]:
    """The kinds the chain may be of: dense, and experts; [] if its mesh is unknown, as of multimodal modules."""
    if not {"tp", "pp"} <= sizes.keys() or any(name.startswith("mimo.") for name in chain):
        return []
    tp, pp = sizes["tp"].size, sizes["pp"].size
    kinds = [_Kind("dense", tp, pp, f"tp {tp} x pp {pp}")]
    if has_experts:
        ep = sizes["ep"].size if "ep" in sizes else 1
        etp = sizes["etp"].size if "etp" in sizes else tp
        kinds.append(_Kind("expert", etp * ep, pp, f"etp {etp} x ep {ep} x pp {pp}"))
    return kinds if all(kind.count <= _MOST for kind in kinds) else []


def _group_findings(
    chain: tuple[str, ...], group_keys: Mapping[int, str], kinds: list[_Kind], sizes: Mapping[str, AxisSize]
) -> Iterator[Finding]:
    """Findings on the group numbers of one chain (-> key of the first bucket): gaps, or another count than the mesh."""
    numbers = sorted(group_keys)
    name = ".".join(chain) or "the optimizer"
    if any(numbers == list(range(kind.count)) for kind in kinds):
        return
    if not kinds:
        missing = sorted(set(range(numbers[-1])) - set(numbers)) if numbers[-1] < _MOST else []
        if missing:
            yield _finding(name, group_keys, missing, f"numbered up to {numbers[-1]}", None, Severity.WARNING, ())
        return
    # Keys do not say whether a chain is dense or of experts. It is taken for the kind that explains it best: one that
    # only whole stages are missing from, else the nearest count.
    kind = min(kinds, key=lambda kind: abs(kind.count - len(numbers)))
    fitting = [k for k in kinds if numbers[-1] < k.count and not _has_partial_stage(numbers, k)]
    severity = None
    if fitting:
        kind = fitting[0]
        # A whole stage without experts has no groups in their chain, which is no loss. Megatron-Core puts the dense
        # parameters first in a chained optimizer, so any chain but chained_0 may be the experts'.
        severity = Severity.INFO if len(kinds) > 1 and chain[-1:] != ("chained_0",) else Severity.WARNING
    missing = sorted(set(range(kind.count)) - set(numbers))
    is_known = all(sizes[axis].source in _EXACT for axis in ("tp", "pp", "ep", "etp") if axis in sizes)
    if not is_known:
        severity = severity or Severity.WARNING
    sources = ", ".join(f"{a} from {sizes[a].source}" for a in ("tp", "pp", "ep", "etp") if a in sizes)
    expected = [f"{k.count} for {k.name} parameters ({k.formula})" for k in kinds]
    notes = (("mesh", f"{' or '.join(expected)}; {sources}"),)
    finding = _finding(name, group_keys, missing, f"but the mesh has {kind.count}", kind, severity, notes)
    yield finding if is_known else replace(finding, inferred_from=f"the mesh: {sources}")


def _has_partial_stage(numbers: list[int], kind: _Kind) -> bool:
    """Whether some stage has only a part of its groups, which no stage without parameters explains."""
    return any(count != kind.per_stage for count in Counter(n // kind.per_stage for n in numbers).values())


def _finding(
    name: str,
    group_keys: Mapping[int, str],
    missing: list[int],
    expected: str,
    kind: _Kind | None,
    severity: Severity | None,
    notes: tuple[Note, ...],
) -> Finding:
    numbers = sorted(group_keys)
    extra = [number for number in numbers if kind is not None and number >= kind.count]
    odd = [f"{ranges(missing)} {verb(len(missing), 'is')} missing"] * bool(missing)
    odd += [f"{ranges(extra)} too many"] * (bool(extra) or not missing)
    where = ""
    if kind is not None and missing and kind.stages > 1:
        stages = ranges(number // kind.per_stage for number in missing)
        where = f"the missing groups belong to pipeline stage {stages}"
    return Finding(
        f"{name} has buckets of dp groups {ranges(numbers)}, {expected}: {', '.join(odd)}",
        at=Location(group_keys[numbers[0]]),
        identity=tuple(map(str, missing or extra)),
        severity=severity,
        notes=(*notes, ("stage", where)),
        hint="check what the ranks of the missing groups wrote: two groups under one number overwrite each other",
    )


def _missing_records(
    chain: tuple[str, ...], group_keys: Mapping[int, str], recorded: Mapping[str, set[int]]
) -> Iterator[Finding]:
    """Findings on a record that some groups lack and at least as many have."""
    for name in sorted({_NUMEL, *recorded}):
        having = recorded.get(name, set()) & set(group_keys)
        lacking = sorted(set(group_keys) - having)
        # Megatron-Core writes padded and unpadded bucket sizes together. If no group has the padded ones, the unpadded
        # ones are the witness that they were lost.
        witness_name = name if having or name != _NUMEL else _UNPADDED
        witness = recorded.get(witness_name, set()) & set(group_keys)
        # Which records a version writes is not known: where most groups lack one, it may be new or optional.
        if lacking and len(lacking) <= len(witness):
            they_have = "they have" if len(lacking) > 1 else "it has"
            although = f"which {_groups_have(sorted(witness))}" if having else f"though {they_have} {witness_name}"
            yield Finding(
                f"{_groups_have(lacking)} buckets but no {name}, {although}",
                at=Location(group_keys[lacking[0]]),
                identity=tuple(f"dp_group_idx_{number}.{name}" for number in lacking),
                notes=(("chain", ".".join(chain) or "the optimizer without a chain"),),
                why="the loader asks for the record of every group, and a strict load fails on the missing key",
                hint="find the rank that should have written the record, in the plans or the log of the save",
                inferred_from="the records of the other groups" if having else "",
            )


def _groups_have(numbers: list[int]) -> str:
    return f"dp groups {ranges(numbers)} have" if len(numbers) > 1 else f"dp group {numbers[0]} has"


def _missing_moments(buckets: list[Bucket]) -> Iterator[Finding]:
    """Findings on buckets with one of Adam's two moments, if at least as many of the chain have both."""
    by_prefix: dict[str, dict[str, Bucket]] = defaultdict(dict)
    for bucket in buckets:
        by_prefix[bucket.tensor.fqn.removesuffix(f".{bucket.what}")][bucket.what] = bucket
    stored = {prefix: [what for what in PAIR if what in states] for prefix, states in by_prefix.items()}
    both = [prefix for prefix, names in stored.items() if len(names) == 2]
    alone = [(prefix, names[0]) for prefix, names in stored.items() if len(names) == 1]
    for prefix, what in alone if len(alone) <= len(both) else ():
        absent = PAIR[what == PAIR[0]]
        yield Finding(
            f"bucket{{of}} has no {absent}, unlike {len(both)} other bucket{'s' * (len(both) > 1)} of the chain",
            at=Location(by_prefix[prefix][what].tensor),
            identity=(f"{prefix}.{absent}",),
            why="the loader asks for both moments of every bucket, and a strict load fails on the missing key",
            hint="find the rank that should have written it, in the plans or the log of the save",
            inferred_from="the other buckets of the chain",
        )


def _wrong_lengths(ckpt: Checkpoint) -> Iterator[Finding]:
    """Findings on buckets whose length differs from the unpadded length in their group's record.

    Source: megatron.core.optimizer.distrib_optimizer.DistributedOptimizer: a list by buffer of {(dtypes): [sizes]}
    """
    recorded = {}
    payload = ckpt.payload
    for key, _, rows in ckpt.objects.rows_by_grid():
        parsed = dp_group(key)
        if payload is None or parsed is None or parsed[2] != _UNPADDED:
            continue
        for record in ckpt.objects.record[rows].tolist():
            if (content := payload.of(record)) is not None and content.length == 1:
                recorded[parsed[0], parsed[1]] = content.value
    for bucket in inventory_of(ckpt).buckets:
        if (bucket.chain, bucket.group) not in recorded or len(bucket.tensor.global_shape) != 1:
            continue
        expected = _recorded_length(recorded[bucket.chain, bucket.group], bucket.tensor.fqn)
        length = bucket.tensor.global_shape[0]
        if expected is not None and expected != length:
            yield Finding(
                f"bucket{{of}} has {length:,} elements, but its record of {_UNPADDED} says {expected:,}",
                at=Location(bucket.tensor),
                identity=(_UNPADDED,),
                why="the two come from different groups or modules: one of them overwrote the other's key",
                hint="look for a second optimizer that writes under the same dp_group_idx",
                group=f"{'.'.join(bucket.chain)} {bucket.group} {length} {expected}",
            )


def _recorded_length(value: object, fqn: str) -> int | None:
    """The recorded length of a bucket in elements; None if the record has another form."""
    # The value comes from a pickle that anybody may have written, so every step of the way may fail.
    match = _BUCKET.search(fqn)
    try:
        buffers = value[0][int(match["gbuf"])]  # type: ignore[index]
        number = int(match["bucket"])  # type: ignore[index]
        names = {types: ", ".join(f"torch.{name}" for name in types) for types in buffers if isinstance(types, tuple)}
        size = next(buffers[types][number] for types, name in names.items() if name == match["types"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError, AttributeError, StopIteration):
        return None
    return size if type(size) is int else None
