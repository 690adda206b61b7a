"""The flat groups of ZeRO: which part of which parameter lies where in them, and whether their lengths add up.

A group of parameters is laid end to end and cut over the ranks. Stages 1 and 2 cut the whole, padded to twice as many
elements as there are ranks; stage 3 cuts each parameter by itself, into equal parts of which the last is padded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptlint.loaders.rank_files.deepspeed_files import (
    Shapes,
    Source,
    count_of,
    moments_of,
    partition_counts,
    shapes_of,
)
from ckptlint.loaders.rank_files.onto import Part
from ckptlint.model import Misfit
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable

MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT = 2  # elements for each rank, deepspeed.runtime.zero.stage_1_and_2 `nccl_start_alignment_factor`
EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d{1,6})(\..*)")


@dataclass(slots=True)
class Groups:
    """What the flat groups of a tag hold.

    Attributes:
        parts: the pieces of parameters and of their moments, each one-dimensional.
        misfits: lengths that are not what the parameters need.
    """

    parts: list[Part] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Member:
    """One rank's part of a group of stages 1 and 2.

    Attributes:
        index: its place among the ranks that the group is cut over.
        number: of the group.
    """

    source: Source
    index: int
    number: int

    @property
    def flat(self) -> StoredTensor | None:
        """The fp32 weights."""
        flats = self.source.state.get("single_partition_of_fp32_groups")
        return _flat(flats[self.number]) if isinstance(flats, list) and self.number < len(flats) else None

    @property
    def slices(self) -> dict[str, tuple[int, int]] | None:
        """Name -> (first element in the group's part, elements); None where the file does not say."""
        found = self.source.state.get("param_slice_mappings")
        own = found[self.number] if isinstance(found, list) and self.number < len(found) else None
        if not isinstance(own, dict):
            return None
        slices = {str(fqn): _slice(value) for fqn, value in own.items()}
        return {fqn: value for fqn, value in slices.items() if value is not None}

    @property
    def padding(self) -> int | None:
        """The elements at its end that belong to no parameter, as it says itself."""
        found = self.source.state.get("group_paddings")
        value = found[self.number] if isinstance(found, list) and self.number < len(found) else None
        return value if type(value) is int and value >= 0 else None

    @property
    def part(self) -> int:
        """Elements of a rank's part of the group, its padding included."""
        lengths = [moment.shape[0] for moment in self.moments.values()]
        return max(lengths or [0 if self.flat is None else self.flat.shape[0] + (self.padding or 0)])

    @property
    def between(self) -> int:
        """Elements of padding between parameters."""
        found = self.source.state.get("param_alignment_paddings")
        own = found[self.number] if isinstance(found, list) and self.number < len(found) else None
        return sum(n for n in own if type(n) is int) if isinstance(own, list) else 0

    @property
    def moments(self) -> dict[str, StoredTensor]:
        """exp_avg and the like, those that have an element for each of the group's."""
        entries = moments_of(self.source.state)
        own = entries[self.number] if self.number < len(entries) else {}
        return {what: flat for what, value in own.items() if (flat := _flat(value)) is not None}


def _flat(value: Any) -> StoredTensor | None:
    return value if isinstance(value, StoredTensor) and len(value.shape) == 1 else None


def _slice(value: Any) -> tuple[int, int] | None:
    """First element and number of elements of a `fragment_address`."""
    state = getattr(value, "state", None)
    start, count = (state.get("start"), state.get("numel")) if isinstance(state, dict) else (None, None)
    if type(start) is int and type(count) is int and 0 <= start < 2**62 and 0 <= count < 2**62:
        return start, count
    return None


def padded_part(elements: int, ranks: int, index: int) -> tuple[int, int]:
    """Elements of one rank's part of a group of stages 1 and 2, and how many of them are padding.

    >>> padded_part(13, 4, 2), padded_part(13, 4, 3)
    ((4, 0), (4, 3))
    """
    part = -(-elements // (_ALIGNMENT * ranks)) * _ALIGNMENT
    return part, min(max((index + 1) * part - elements, 0), part)


def flat_groups(sources: list[Source], tp: int, experts: Mapping[str, int]) -> Groups:
    """The groups of all optimizer files of a tag.

    Args:
        sources: the files that were read.
        tp: how many ranks hold parts of one tensor under one name.
        experts: for each layer of experts, by the start of their names, how many of them a rank holds.
    """
    groups = Groups()
    by_mp: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        if source.file.kind == "optimizer":
            by_mp[source.file.numbers["mp"]].append(source)
    held: dict[str, int] = {}
    for mp, own in sorted(by_mp.items()):
        owner = f"mp_rank_{mp % tp:02d}." if tp > 1 else ""
        models = [s for s in sources if s.file.kind == "model" and s.file.numbers["mp"] == mp]
        made = Groups()
        if any("fp32_flat_groups" in source.state for source in own):
            _cut_parameters(own, models, owner, made)
        else:
            _cut_groups(own, models, owner, experts, made)
        # a tied parameter is in the groups of several pipeline stages
        groups.parts += [
            part if held.setdefault(part.fqn, mp) == mp else part._replace(offsets=None) for part in made.parts
        ]
        groups.misfits += made.misfits
    return groups


# ---------------------------------------------------------------- stages 1 and 2


def _cut_groups(own: list[Source], models: list[Source], owner: str, experts: Mapping[str, int], made: Groups) -> None:
    counts = next((counts for source in own if (counts := partition_counts(source.state))), ())
    lists = {source.file.name: groups for source in models if (groups := shapes_of(source.root)) is not None}
    listed, shapes = next(iter(lists.items()), ("", []))
    for number, ranks in enumerate(counts):
        parallel = max(max(counts) // ranks, 1)
        wanted = shapes[number] if number < len(shapes) else None
        for ep, members in _members(own, number, ranks, parallel):
            whole = len(members) == ranks
            _judge_lengths(members, wanted, ranks, listed, made)
            _judge_names(members, wanted, whole, listed, made)
            local = experts if parallel > 1 else {}
            made.parts += _pieces(members, wanted or _sums(members), owner, ep, local, whole)


def _members(own: list[Source], number: int, ranks: int, parallel: int) -> Iterator[tuple[int, list[_Member]]]:
    """The ranks that one copy of a group is cut over, for each set of experts: those that lie `parallel` apart.

    Source:
        deepspeed.utils.groups._create_expert_and_data_parallel
    """
    found: dict[int, list[_Member]] = defaultdict(list)
    for source in own:
        index, ep = divmod(source.file.numbers["dp"], parallel)
        if index < ranks:
            found[ep].append(_Member(source, index, number))
    yield from found.items()


def _judge_lengths(
    members: list[_Member], wanted: dict[str, tuple[int, ...]] | None, ranks: int, listed: str, made: Groups
) -> None:
    """Each rank's part of a group: its length and padding, and those of the moments; one misfit for each file."""
    elements = None if wanted is None else sum(prod(shape) for shape in wanted.values())
    for member in members:
        found = _misfit(member, elements, ranks, listed)
        if found is not None:
            what, stored, expected, because, kind = found
            made.misfits.append(Misfit(what, member.source.file.name, stored, expected, because, kind))


def _misfit(member: _Member, elements: int | None, ranks: int, listed: str) -> tuple[str, str, str, str, str] | None:
    """(where, stored, expected, why, what of) of the first length that does not fit."""
    flat, padding, what = member.flat, member.padding, f"group {member.number}"
    if flat is None:
        return what, "no fp32 weights", "a flat tensor", "partition_count lists this group", "length"
    length = flat.shape[0]
    if elements is not None:
        part, pad = padded_part(elements + member.between, ranks, member.index)
        because = f"the parameters in {listed} have {elements + member.between:,} elements, over {ranks} ranks"
        if padding is not None and padding != pad:
            return what, f"{padding:,}", f"{pad:,}", because, "padding"
        # the BF16 optimizer, which names no stage, keeps the padding, and so did versions that list none
        is_stripped = "zero_stage" in member.source.state and padding is not None
        if length != part - pad and (is_stripped or length != part):
            return what, f"{length:,}", f"{part - pad:,}", because, "length"
    end = max((start + count for start, count in (member.slices or {}).values()), default=0)
    if end > length:
        return what, f"{length:,}", f"{end:,}", "param_slice_mappings ends there", "length"
    for name, moment in member.moments.items():
        if moment.shape[0] not in (length, length + (padding or 0)):
            because = "the fp32 weights and their padding have as many"
            return f"{name} of {what}", f"{moment.shape[0]:,}", f"{length + (padding or 0):,}", because, "length"
    return None


def _judge_names(
    members: list[_Member], wanted: dict[str, tuple[int, ...]] | None, whole: bool, listed: str, made: Groups
) -> None:
    """Parameters that no rank holds a slice of, and slices of parameters that are not listed."""
    slices = [member.slices for member in members]
    if wanted is None or not whole or any(own is None for own in slices):
        return
    there = {fqn: member for member in reversed(members) for fqn in member.slices or ()}
    file, what = members[0].source.file.name, f"group {members[0].number}"
    for fqn, sizes in wanted.items():
        if fqn not in there and prod(sizes) > 0:
            because = f"{listed} lists it in {what}"
            made.misfits.append(Misfit(printable(fqn), file, "no slice", "one on any rank", because, "slice"))
    for fqn in there.keys() - wanted.keys():
        name, because = there[fqn].source.file.name, f"param_slice_mappings has it in {what}"
        made.misfits.append(Misfit(printable(fqn), name, "a slice", f"none, as in {listed}", because, "slice"))


def _sums(members: list[_Member]) -> dict[str, tuple[int, ...]]:
    """How many elements of each parameter the ranks hold together, where no file lists shapes."""
    sums: dict[str, int] = defaultdict(int)
    for member in members:
        for fqn, (_, count) in (member.slices or {}).items():
            sums[fqn] += count
    return {fqn: (count,) for fqn, count in sums.items()}


def _pieces(
    members: list[_Member],
    wanted: dict[str, tuple[int, ...]],
    owner: str,
    ep: int,
    experts: Mapping[str, int],
    whole: bool,
) -> Iterator[Part]:
    """Each rank's slices: one after the other in the order of ranks; around lost ones by place in the group."""
    at = dict.fromkeys(wanted, 0) if whole else {}
    starts = {} if whole else _starts(members, wanted)
    for member in members:
        flat, moments = member.flat, member.moments
        for fqn, (start, count) in (member.slices or {}).items():
            if flat is None or fqn not in (wanted if whole else starts):
                continue
            if whole:
                offset = at[fqn]
                at[fqn] += count
            else:
                offset = member.index * member.part + start - starts[fqn]
            named = owner + expert_name(fqn, ep, experts)
            for what, tensor in {"fp32_param": flat, **moments}.items():
                state = f"optimizer.state.{what}.{named}"
                if piece := _piece(state, prod(wanted[fqn]), (offset,), tensor, start, count, member.source):
                    yield piece


def _starts(members: list[_Member], wanted: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Where parameters begin in their group, told by the ranks that hold the first or the last of their elements."""
    starts: dict[str, int] = {}
    for member in members:
        first = member.index * member.part
        for fqn, (start, count) in (member.slices or {}).items():
            if start or not member.index:
                starts[fqn] = first + start
            elif fqn in wanted and start + count < member.part:
                starts.setdefault(fqn, first + start + count - prod(wanted[fqn]))
    return {fqn: start for fqn, start in starts.items() if fqn in wanted}


def expert_name(fqn: str, ep: int, experts: Mapping[str, int]) -> str:
    """The name of an expert's parameter, numbered over all ranks; each rank counts its own from 0."""
    match = EXPERT.fullmatch(fqn)
    if match is None or match[1] not in experts:
        return fqn
    return f"{match[1]}{ep * experts[match[1]] + int(match[2])}{match[3]}"


def _piece(
    fqn: str, numel: int, offsets: tuple[int, ...] | None, flat: StoredTensor, start: int, count: int, source: Source
) -> Part | None:
    """A slice of a flat tensor; None where that ends before it, or of no elements."""
    if not count or start + count > flat.shape[0]:
        return None
    tensor = replace(flat, shape=(count,), strides=(1,), offset=flat.offset + start)
    place = source.found.storages.get(flat.key)
    return Part(fqn, flat.dtype, (numel,), offsets, tensor, source.number, place, is_flat=True)


# ---------------------------------------------------------------- stage 3


def _cut_parameters(own: list[Source], models: list[Source], owner: str, made: Groups) -> None:
    """The parts of stage 3: of n elements over p ranks each has ceil(n / p), whatever the groups are."""
    by_dp = {source.file.numbers["dp"]: source for source in models}
    for source in own:
        model = by_dp.get(source.file.numbers["dp"]) or next(iter(models), None)
        shapes = shapes_of(model.root) if model is not None else None
        ranks = next(iter(partition_counts(source.state)), 0)
        flats = source.state.get("fp32_flat_groups")
        tensors = [_flat(value) for value in flats] if isinstance(flats, list) else []
        if model is None or shapes is None or not ranks or not tensors or None in tensors:
            continue
        groups = [tensor for tensor in tensors if tensor is not None]
        if _fits(source, groups, shapes, ranks, model.file.name, made):
            made.parts += _shares(source, groups, shapes, ranks, owner)
    for source in models:
        made.parts += _frozen(source, owner, ranks_of(own))


def ranks_of(own: list[Source]) -> int:
    """Over how many ranks the parameters are cut."""
    return next((counts[0] for source in own if (counts := partition_counts(source.state))), 0)


def _fits(source: Source, groups: list[StoredTensor], shapes: Shapes, ranks: int, listed: str, made: Groups) -> bool:
    """Whether the groups of a rank are as long as its parts of the parameters, and the moments as long as they are."""
    file, lengths = source.file.name, [group.shape[0] for group in groups]
    needs = [sum(-(-prod(shape) // ranks) for shape in group.values()) for group in shapes]
    if sum(lengths) != sum(needs):
        because = f"each parameter in {listed} is split over {ranks} ranks, its last part padded"
        pairs = zip(lengths, needs, strict=True) if len(lengths) == len(needs) else ()
        odd = [f"group {i}" for i, (length, need) in enumerate(pairs) if length != need]
        what = ", ".join(odd) or "the groups together"
        stored = sum(length for i, length in enumerate(lengths) if not odd or f"group {i}" in odd)
        need = sum(need for i, need in enumerate(needs) if not odd or f"group {i}" in odd)
        made.misfits.append(Misfit(what, file, f"{stored:,}", f"{need:,}", because, "length"))
        return False
    fits = True
    for number, (length, entry) in enumerate(zip(lengths, moments_of(source.state), strict=False)):
        for name, value in entry.items():
            moment = _flat(value)
            if moment is not None and moment.shape[0] != length:
                what, because = f"{name} of group {number}", "the fp32 weights have as many"
                made.misfits.append(Misfit(what, file, f"{moment.shape[0]:,}", f"{length:,}", because, "length"))
                fits = False
    return fits


def _shares(source: Source, groups: list[StoredTensor], shapes: Shapes, ranks: int, owner: str) -> Iterator[Part]:
    rank, entries = source.file.numbers["dp"] % ranks, moments_of(source.state)
    number = start = 0
    for fqn, shape in ((fqn, shape) for group in shapes for fqn, shape in group.items()):
        numel = prod(shape)
        share = -(-numel // ranks)
        while share and number < len(groups) and start == groups[number].shape[0]:
            number, start = number + 1, 0
        if number < len(groups) and start + share <= groups[number].shape[0]:
            moments = entries[number] if number < len(entries) else {}
            held = {what: flat for what, value in moments.items() if (flat := _flat(value)) is not None}
            first = min(rank * share, numel)
            count = min(share, numel - first)
            names = {"": groups[number], **{f"optimizer.state.{what}.": flat for what, flat in held.items()}}
            for what, flat in names.items():
                if piece := _piece(f"{what}{owner}{fqn}", numel, (first,), flat, start, count, source):
                    yield piece
        start += share


def _frozen(source: Source, owner: str, ranks: int) -> Iterator[Part]:
    """The parts of parameters that are not trained."""
    fragments, shapes = source.root.get("frozen_param_fragments"), source.root.get("frozen_param_shapes")
    if not isinstance(fragments, dict) or not isinstance(shapes, dict) or not count_of(ranks):
        return
    [listed] = shapes_of({"param_shapes": shapes}) or [{}]
    for fqn, shape in listed.items():
        tensor = _flat(fragments.get(fqn))
        numel, rank = prod(shape), source.file.numbers.get("dp", 0) % ranks
        share = -(-numel // ranks)
        first = min(rank * share, numel)
        if tensor is not None and tensor.shape[0] == share:
            piece = _piece(f"{owner}{fqn}", numel, (first,), tensor, 0, min(share, numel - first), source)
            if piece is not None:
                yield piece
