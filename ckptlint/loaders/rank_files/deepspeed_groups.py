"""Locates the parts of parameters in the flat groups of ZeRO.

A group of parameters is concatenated and cut over the ranks. Stages 1 and 2 cut the whole group, padded to a multiple
of twice the number of ranks. Stage 3 cuts each parameter separately into equal parts, and pads the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptlint.grouping import grouped
from ckptlint.loaders.rank_files.deepspeed_files import Source, Tag, dict_of, moments_of, partition_counts, shapes_of
from ckptlint.loaders.readers.torch_files import Columns
from ckptlint.model.ranks.flat_groups import FlatGroup, FlatPart, Shapes
from ckptlint.model.stored import StoredTensor
from ckptlint.patterns import lazy_pattern

EXPERT = lazy_pattern(r"(.*deepspeed_experts\.)(\d{1,6})(\..*)")


@dataclass(slots=True)
class Cut:
    """Groups of parameters as the files hold them, and the pieces cut from them, each one-dimensional.

    `unplaced` are the keys that would exceed their flat tensor, and files with groups whose lengths do not add up.
    """

    columns: Columns
    groups: list[FlatGroup] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)

    def add(
        self, fqn: str, numel: int, offset: int, flat: StoredTensor, start: int, count: int, source: Source
    ) -> None:
        """Add a slice of a flat tensor, unless it is empty."""
        if start + count > flat.shape[0]:
            self.unplaced.append(fqn)
        elif count:
            tensor = replace(flat, shape=(count,), strides=(1,), offset=flat.offset + start)
            self.columns.add(fqn, tensor, source.number, source.torch_file, (numel,), (offset,), is_flat=True)


def flat_groups(tag: Tag, tp: int, columns: Columns) -> Cut:
    """The groups of all optimizer files of a tag, whose pieces join the columns; `tp` ranks share each name."""
    by_mp = grouped((source.file.numbers["mp"], source) for source in tag.of("optimizer"))
    experts = _local_experts(tag)
    cut = Cut(columns)
    first_mp: dict[str, int] = {}
    for mp, sources in sorted(by_mp.items()):
        owner, first = owner_of(mp, tp), len(columns.rows)
        models = [source for source in tag.of("model") if source.file.numbers["mp"] == mp]
        if any(_BY_PARAMETER in source.state for source in sources):
            _cut_parameters(cut, sources, models, owner)
        else:
            _cut_groups(cut, sources, models, owner, experts)
        # A tied parameter is in the groups of the first and the last stage (pipe_tied_z1): the first counts.
        for number, row in enumerate(columns.rows[first:], first):
            if first_mp.setdefault(row.fqn, mp) != mp:
                columns.rows[number] = row._replace(offsets=None)
    return cut


def _local_experts(tag: Tag) -> dict[str, int]:
    """Name prefix of a layer of experts -> number of experts on each rank."""
    numbers: dict[str, int] = defaultdict(int)
    for source in tag.of("optimizer"):
        slices = source.state.get("param_slice_mappings")
        for group in slices if isinstance(slices, list) else ():
            for fqn in group if isinstance(group, dict) else ():
                if match := EXPERT.fullmatch(str(fqn)):
                    numbers[match[1]] = max(numbers[match[1]], int(match[2]) + 1)
    return numbers


def _part(source: Source, key: str, number: int, index: int, ranks: int, moments: Mapping[str, Any]) -> FlatPart:
    """A file's part of group `number`, with its weights under `key`."""

    def read(key: str) -> Any:
        values = source.state.get(key)
        return values[number] if isinstance(values, list) and number < len(values) else None

    slices, padding, between = read("param_slice_mappings"), read("group_paddings"), read("param_alignment_paddings")
    padding = padding if type(padding) is int and padding >= 0 else None
    return FlatPart(
        source.file.name,
        number,
        index,
        ranks,
        weights=_flat(read(key)),
        moments={what: flat for what, value in moments.items() if (flat := _flat(value)) is not None},
        slices={str(fqn): span for fqn, value in slices.items() if (span := _slice(value)) is not None}
        if isinstance(slices, dict)
        else None,
        padding=padding,
        between=sum(n for n in between if type(n) is int) if isinstance(between, list) else 0,
        # Known cases that keep the padding: the BF16 optimizer, which states no stage (z1_bf16_optimizer_2r), and
        # versions that list no paddings.
        is_stripped="zero_stage" in source.state and padding is not None,
    )


def _flat(value: Any) -> StoredTensor | None:
    return value if isinstance(value, StoredTensor) and len(value.shape) == 1 else None


def _slice(value: Any) -> tuple[int, int] | None:
    """First element and number of elements of a `fragment_address`."""
    state = getattr(value, "state", None)
    start, count = (state.get("start"), state.get("numel")) if isinstance(state, dict) else (None, None)
    if type(start) is int and type(count) is int and 0 <= start < 2**62 and 0 <= count < 2**62:
        return start, count
    return None


def owner_of(mp: int, tp: int) -> str:
    """Prefix that distinguishes the parts of tensor parallel ranks, whose keys are equal; "" without such ranks."""
    return f"mp_rank_{mp % tp:02d}." if tp > 1 else ""


# ---------------------------------------------------------------- stages 1 and 2


def _cut_groups(
    made: Cut, optimizers: list[Source], models: list[Source], owner: str, experts: Mapping[str, int]
) -> None:
    """Add each group; groups of experts exist once per set of experts, over every `parallel`-th rank.

    Source: deepspeed.utils.groups._create_expert_and_data_parallel
    """
    counts = next((counts for source in optimizers if (counts := partition_counts(source.state))), ())
    lists = {source.file.name: groups for source in models if (groups := shapes_of(source.root)) is not None}
    listed, shapes = next(iter(lists.items()), ("", []))
    sources = {source.file.name: source for source in optimizers}
    for number, ranks in enumerate(counts):
        parallel = max(max(counts) // ranks, 1)
        sets: dict[int, list[FlatPart]] = defaultdict(list)
        for source in optimizers:
            index, ep = divmod(source.file.numbers["dp"], parallel)
            if index < ranks:
                entries = moments_of(source.state)[number : number + 1] or [{}]
                sets[ep].append(_part(source, "single_partition_of_fp32_groups", number, index, ranks, entries[0]))
        for ep, pieces in sets.items():
            group = FlatGroup(tuple(pieces), tuple(shapes[number : number + 1]), listed)
            first = {fqn: ep * count for fqn, count in experts.items()} if parallel > 1 else {}
            made.groups.append(group)
            _pieces(made, group, sources, owner, first)


def _pieces(made: Cut, group: FlatGroup, sources: Mapping[str, Source], owner: str, first: Mapping[str, int]) -> None:
    """Add each rank's slices to the columns; `first` is the number of the first expert here by its layer's prefix."""
    # With all ranks, slices follow each other in rank order and padding between parameters does not matter. With a
    # lost rank only the position in the group places a slice.
    wanted = next(iter(group.shapes), None) or _sums(group)
    at = dict.fromkeys(wanted, 0) if group.is_whole else _starts(group, wanted)
    for piece in group.parts:
        for fqn, (start, count) in (piece.slices or {}).items():
            if piece.weights is None or fqn not in at:
                continue
            offset = at[fqn] if group.is_whole else piece.index * piece.length + start - at[fqn]
            at[fqn] += count if group.is_whole else 0
            named = owner + expert_name(fqn, first)
            for what, tensor in {"fp32_param": piece.weights, **piece.moments}.items():
                key = f"optimizer.state.{what}.{named}"
                made.add(key, prod(wanted[fqn]), offset, tensor, start, count, sources[piece.file])


def _sums(group: FlatGroup) -> Shapes:
    """Parameter -> (elements on all ranks,), for tags without listed shapes."""
    sums: dict[str, int] = defaultdict(int)
    for piece in group.parts:
        for fqn, (_, count) in (piece.slices or {}).items():
            sums[fqn] += count
    return {fqn: (count,) for fqn, count in sums.items()}


def _starts(group: FlatGroup, wanted: Shapes) -> dict[str, int]:
    """Parameter -> its first element in the group, derived from a rank that holds its first or last element."""
    starts: dict[str, int] = {}
    for piece in group.parts:
        first = piece.index * piece.length
        for fqn, (start, count) in (piece.slices or {}).items():
            if start or not piece.index:
                starts[fqn] = first + start
            elif fqn in wanted and start + count < piece.length:
                starts.setdefault(fqn, first + start + count - prod(wanted[fqn]))
    return {fqn: start for fqn, start in starts.items() if fqn in wanted}


def expert_name(fqn: str, first: Mapping[str, int]) -> str:
    """The name of an expert's parameter, numbered over all ranks."""
    match = EXPERT.fullmatch(fqn)
    if match is None or match[1] not in first:
        return fqn
    return f"{match[1]}{first[match[1]] + int(match[2])}{match[3]}"


# ---------------------------------------------------------------- stage 3

_BY_PARAMETER = "fp32_flat_groups"


def _cut_parameters(made: Cut, sources: list[Source], models: list[Source], owner: str) -> None:
    """Add the parts of stage 3: each of p ranks has ceil(n / p) of n elements, in any group."""
    by_dp = {source.file.numbers["dp"]: source for source in models}
    for source in sources:
        model = by_dp.get(source.file.numbers["dp"]) or next(iter(models), None)
        shapes = shapes_of(model.root) if model is not None else None
        ranks = next(iter(partition_counts(source.state)), 0)
        flats = source.state.get(_BY_PARAMETER)
        if model is None or shapes is None or not ranks or not isinstance(flats, list) or not flats:
            continue
        entries = moments_of(source.state)
        entries += [{}] * (len(flats) - len(entries))
        index = source.file.numbers["dp"] % ranks
        pieces = [_part(source, _BY_PARAMETER, i, index, ranks, entries[i]) for i in range(len(flats))]
        if all(piece.weights for piece in pieces):
            group = FlatGroup(tuple(pieces), tuple(shapes), model.file.name, is_by_parameter=True)
            made.groups.append(group)
            _shares(made, group, source, owner)
    ranks = next((counts[0] for source in sources if (counts := partition_counts(source.state))), 0)
    for source in models:
        _frozen(made, source, owner, ranks)


def _shares(made: Cut, group: FlatGroup, source: Source, owner: str) -> None:
    """Add the parts of parameters in order; nothing is placed where the lengths do not add up."""
    pieces, ranks = group.parts, group.parts[0].ranks
    if sum(piece.length for piece in pieces) != sum(group.shares) or not all(piece.is_even for piece in pieces):
        made.unplaced.append(source.label)
        return
    number = start = 0
    for fqn, shape in ((fqn, shape) for shapes in group.shapes for fqn, shape in shapes.items()):
        share = -(-prod(shape) // ranks)
        while share and number < len(pieces) and start == pieces[number].length:
            number, start = number + 1, 0
        if number < len(pieces) and start + share <= pieces[number].length:
            flats = {"": pieces[number].weights, **pieces[number].moments}
            for what, flat in ((what, flat) for what, flat in flats.items() if flat is not None):
                key = f"optimizer.state.{what}.{owner}{fqn}" if what else f"{owner}{fqn}"
                _share(made, key, shape, pieces[number].index, ranks, flat, start, source)
        start += share


def _frozen(made: Cut, source: Source, owner: str, ranks: int) -> None:
    fragments = dict_of(source.root.get("frozen_param_fragments"))
    [listed] = shapes_of({"param_shapes": dict_of(source.root.get("frozen_param_shapes"))}) or [{}]
    for fqn, shape in listed.items() if ranks else ():
        flat = _flat(fragments.get(fqn))
        if flat is not None and flat.shape[0] == -(-prod(shape) // ranks):
            _share(made, f"{owner}{fqn}", shape, source.file.numbers.get("dp", 0) % ranks, ranks, flat, 0, source)


def _share(
    made: Cut, key: str, shape: tuple[int, ...], index: int, ranks: int, flat: StoredTensor, start: int, source: Source
) -> None:
    """Add one rank's part of a parameter, without the padding of the last ranks."""
    numel = prod(shape)
    share = -(-numel // ranks)
    first = min(index * share, numel)
    made.add(key, numel, first, flat, start, min(share, numel - first), source)
