from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptlint.analysis.inventory import Bucket, dp_group, inventory_of
from ckptlint.analysis.optimizer_fit import PAIR
from ckptlint.analysis.trusted_config import trusted_topology
from ckptlint.model import AxisSize, Checkpoint
from ckptlint.model.text import ranges, verb
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule

_NUMEL = "per_bucket_numel"
_UNPADDED = "per_bucket_numel_unpadded"
_BUCKET = re.compile(r"gbuf_idx_(?P<gbuf>\d{1,9})\.dtype_\((?P<types>[^)]*)\)\.bucket_idx_(?P<bucket>\d{1,9})\.")
_EXACT = ("metadata", "args", "run_config", "config.json")

_MOST = 2**16  # groups of a job


@dataclass(frozen=True, slots=True)
class _Kind:
    """How many groups a chain should have.

    Attributes:
        per_stage: groups of one pipeline stage; their numbers follow each other.
        formula: where the number comes from, with the factors.
    """

    name: str
    per_stage: int
    stages: int
    formula: str

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
        part = dp_group(key)
        if part is not None:
            recorded[part[0]][part[2]].add(part[1])
    sizes = trusted_topology(ckpt)
    has_experts = any(param.key.in_experts for param in inventory_of(ckpt).params)
    for chain, found in groups.items():
        yield from _set(chain, found, _kinds(chain, sizes, has_experts), sizes)
        yield from _records(chain, found, recorded[chain])
        yield from _moments([bucket for bucket in inventory_of(ckpt).buckets if bucket.chain == chain])
    yield from _lengths(ckpt)


def _kinds(chain: tuple[str, ...], sizes: Mapping[str, AxisSize], has_experts: bool) -> list[_Kind]:
    """What the chain may be: dense layers, or experts where there are any; [] when the mesh is not known.

    The modules of a multimodal job have meshes of their own, which the arguments do not describe.
    """
    if not {"tp", "pp"} <= sizes.keys() or any(part.startswith("mimo.") for part in chain):
        return []
    tp, pp = sizes["tp"].size, sizes["pp"].size
    kinds = [_Kind("dense", tp, pp, f"tp {tp} x pp {pp}")]
    if has_experts:
        ep = sizes["ep"].size if "ep" in sizes else 1
        etp = sizes["etp"].size if "etp" in sizes else tp
        kinds.append(_Kind("expert", etp * ep, pp, f"etp {etp} x ep {ep} x pp {pp}"))
    return kinds if all(kind.count <= _MOST for kind in kinds) else []


def _set(
    chain: tuple[str, ...], found: Mapping[int, str], kinds: list[_Kind], sizes: Mapping[str, AxisSize]
) -> Iterator[Finding]:
    """What is wrong with the numbers of the groups of one optimizer: gaps, or another count than the mesh has."""
    numbers = sorted(found)
    name = ".".join(chain) or "the optimizer"
    if any(numbers == list(range(kind.count)) for kind in kinds):
        return
    if not kinds:
        missing = sorted(set(range(numbers[-1])) - set(numbers)) if numbers[-1] < _MOST else []
        if missing:
            yield _finding(name, found, missing, f"numbered up to {numbers[-1]}", None, Severity.WARNING, ())
        return
    kind = min(kinds, key=lambda kind: abs(kind.count - len(numbers)))
    fitting = [k for k in kinds if numbers[-1] < k.count and not _is_partial(numbers, k)]
    severity = None
    if fitting:
        kind = fitting[0]
        # the dense parameters come first in a chained optimizer; after them may be the experts'
        severity = Severity.INFO if len(kinds) > 1 and chain[-1:] != ("chained_0",) else Severity.WARNING
    missing = sorted(set(range(kind.count)) - set(numbers))
    is_known = all(sizes[axis].source in _EXACT for axis in ("tp", "pp", "ep", "etp") if axis in sizes)
    if not is_known:
        severity = severity or Severity.WARNING
    sources = ", ".join(f"{a} from {sizes[a].source}" for a in ("tp", "pp", "ep", "etp") if a in sizes)
    expected = [f"{k.count} for {k.name} parameters ({k.formula})" for k in kinds]
    notes = (("mesh", f"{' or '.join(expected)}; {sources}"),)
    finding = _finding(name, found, missing, f"but the mesh has {kind.count}", kind, severity, notes)
    yield finding if is_known else replace(finding, inferred_from=f"the mesh: {sources}")


def _is_partial(numbers: list[int], kind: _Kind) -> bool:
    """Whether some stage has a part of its groups only: no stage without parameters explains that."""
    stages: dict[int, int] = defaultdict(int)
    for number in numbers:
        stages[number // kind.per_stage] += 1
    return any(count != kind.per_stage for count in stages.values())


def _finding(
    name: str,
    found: Mapping[int, str],
    missing: list[int],
    expected: str,
    kind: _Kind | None,
    severity: Severity | None,
    notes: tuple[Note, ...],
) -> Finding:
    """The finding on the groups of an optimizer, at the first key beside a gap."""
    numbers = sorted(found)
    extra = [number for number in numbers if kind is not None and number >= kind.count]
    odd = f"{ranges(missing)} {verb(len(missing), 'is')} missing" if missing else f"{ranges(extra)} too many"
    if missing and extra:
        odd += f", {ranges(extra)} too many"
    stages = ""
    if kind is not None and missing and kind.stages > 1:
        stages = ranges(number // kind.per_stage for number in missing)
    where: tuple[Note, ...] = (("stage", f"the missing groups belong to pipeline stage {stages}"),) if stages else ()
    return Finding(
        f"{name} has buckets of dp groups {ranges(numbers)}, {expected}: {odd}",
        at=Location(found[numbers[0]]),
        identity=tuple(map(str, missing or extra)),
        severity=severity,
        notes=(*notes, *where),
        hint="check what the ranks of the missing groups wrote: two groups under one number overwrite each other",
    )


def _records(chain: tuple[str, ...], found: Mapping[int, str], recorded: Mapping[str, set[int]]) -> Iterator[Finding]:
    """Groups without a record that as many others have, or with the unpadded bucket sizes and without the padded."""
    for name in sorted({_NUMEL, *recorded}):
        having = recorded.get(name, set()) & set(found)
        lacking = sorted(set(found) - having)
        other = name if having or name != _NUMEL else _UNPADDED
        witness = recorded.get(other, set()) & set(found)
        if lacking and len(lacking) <= len(witness):
            yield Finding(
                f"{_groups(lacking)} buckets but no {name}, "
                + (
                    f"which {_groups(sorted(witness))}"
                    if having
                    else f"though they have {other}"
                    if len(lacking) > 1
                    else f"though it has {other}"
                ),
                at=Location(found[lacking[0]]),
                identity=tuple(f"dp_group_idx_{number}.{name}" for number in lacking),
                notes=(("chain", ".".join(chain) or "the optimizer without a chain"),),
                why="the loader asks for the record of every group, and a strict load fails on the missing key",
                hint="find the rank that should have written the record, in the plans or the log of the save",
                inferred_from="the records of the other groups" if having else "",
            )


def _groups(numbers: list[int]) -> str:
    return f"dp groups {ranges(numbers)} have" if len(numbers) > 1 else f"dp group {numbers[0]} has"


def _moments(buckets: list[Bucket]) -> Iterator[Finding]:
    """Buckets with one of Adam's two moments, where most of their chain have both."""
    homes: dict[str, dict[str, Bucket]] = defaultdict(dict)
    for bucket in buckets:
        homes[bucket.tensor.fqn.removesuffix(f".{bucket.what}")][bucket.what] = bucket
    both = [home for home, there in homes.items() if all(what in there for what in PAIR)]
    alone = [(home, what) for home, there in homes.items() if home not in both for what in PAIR if what in there]
    for home, what in alone if len(alone) <= len(both) else ():
        absent = next(other for other in PAIR if other != what)
        yield Finding(
            f"bucket{{of}} has no {absent}, unlike {len(both)} other bucket{'s' * (len(both) > 1)} of the chain",
            at=Location(homes[home][what].tensor),
            identity=(f"{home}.{absent}",),
            why="the loader asks for both moments of every bucket, and a strict load fails on the missing key",
            hint="find the rank that should have written it, in the plans or the log of the save",
            inferred_from="the other buckets of the chain",
        )


def _lengths(ckpt: Checkpoint) -> Iterator[Finding]:
    """Buckets whose length differs from the one recorded for them; padding counts for nothing in dp_reshardable.

    Source:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer: a list by buffer of {(dtypes): [bucket sizes]}
    """
    recorded = {}
    payload = ckpt.payload
    for key, _, rows in ckpt.objects.rows_by_grid():
        part = dp_group(key)
        if payload is None or part is None or part[2] != _UNPADDED:
            continue
        for record in ckpt.objects.record[rows].tolist():
            if (content := payload.of(record)) is not None and content.length == 1:
                recorded[part[0], part[1]] = content.value
    for bucket in inventory_of(ckpt).buckets:
        if (bucket.chain, bucket.group) not in recorded or len(bucket.tensor.global_shape) != 1:
            continue
        expected = _recorded(recorded[bucket.chain, bucket.group], bucket.tensor.fqn)
        found = bucket.tensor.global_shape[0]
        if expected is not None and expected != found:
            yield Finding(
                f"bucket{{of}} has {found:,} elements, but its record of {_UNPADDED} says {expected:,}",
                at=Location(bucket.tensor),
                identity=(_UNPADDED,),
                why="the two come from different groups or modules: one of them overwrote the other's key",
                hint="look for a second optimizer that writes under the same dp_group_idx",
                group=f"{'.'.join(bucket.chain)} {bucket.group} {found} {expected}",
            )


def _recorded(value: object, fqn: str) -> int | None:
    """The recorded length of a bucket, None where the record has another form."""
    place = _BUCKET.search(fqn)
    try:
        buffers = value[0][int(place["gbuf"])]  # type: ignore[index]
        size = next(sizes[int(place["bucket"])] for types, sizes in buffers.items() if _key(types) == place["types"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError, AttributeError, StopIteration):
        return None
    return size if type(size) is int else None


def _key(types: object) -> str:
    """The dtypes of a buffer as its key spells them."""
    return ", ".join(f"torch.{name}" for name in types) if isinstance(types, tuple) else ""
