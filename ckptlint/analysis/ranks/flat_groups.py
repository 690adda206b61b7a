"""Whether the flat groups of ZeRO are as long as their parameters need, and hold each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import prod

from ckptlint.model import Checkpoint, Misfit
from ckptlint.model.facts import fact
from ckptlint.model.ranks.flat_groups import FlatGroup, FlatPart
from ckptlint.model.text import printable

_ALIGNMENT = 2  # elements for each rank, deepspeed.runtime.zero.stage_1_and_2 `nccl_start_alignment_factor`


@fact
def misfits(ckpt: Checkpoint) -> list[Misfit]:
    """Misfits in the flat groups of a DeepSpeed checkpoint."""
    if ckpt.rank_files is None:
        return []
    misfits_of_groups = list[Misfit]()
    for group in ckpt.rank_files.flat_groups:
        if group.is_by_parameter:
            misfits_of_groups += _shares(group)
            continue
        for part in group.parts:
            misfits_of_groups += islice(_lengths(group, part), 1)  # one follows from the other
        misfits_of_groups += _names(group)
    return [*misfits_of_groups, *ckpt.rank_files.misfits]


def padded_part(elements: int, ranks: int, index: int) -> tuple[int, int]:
    """Elements of one rank's part of a group of stages 1 and 2, and how many of them are padding.

    >>> padded_part(13, 4, 2), padded_part(13, 4, 3)
    ((4, 0), (4, 3))
    """
    length = -(-elements // (_ALIGNMENT * ranks)) * _ALIGNMENT
    return length, min(max((index + 1) * length - elements, 0), length)


def _lengths(group: FlatGroup, part: FlatPart) -> Iterator[Misfit]:
    """The lengths of one rank's part of a group of stages 1 and 2 that do not fit."""
    what = f"group {part.number}"

    def odd(stored: int, expected: int, because: str, kind: str = "length", at: str = what) -> Misfit:
        return Misfit(at, part.file, f"{stored:,}", f"{expected:,}", because, kind)

    if part.weights is None:
        yield Misfit(what, part.file, "no fp32 weights", "a flat tensor", "partition_count lists this group", "length")
        return
    length = part.weights.shape[0]
    for shapes in group.shapes:
        elements = sum(map(prod, shapes.values())) + part.between
        whole, padding = padded_part(elements, part.ranks, part.index)
        because = f"the parameters in {group.listed} have {elements:,} elements, over {part.ranks} ranks"
        if part.padding not in (None, padding):
            yield odd(part.padding, padding, because, "padding")
        if length != whole - padding and (part.is_stripped or length != whole):
            yield odd(length, whole - padding, because)
    end = max((start + count for start, count in (part.slices or {}).values()), default=0)
    if end > length:
        yield odd(length, end, "param_slice_mappings ends there")
    padded = length + (part.padding or 0)
    for name, moment in part.moments.items():
        if moment.shape[0] not in (length, padded):
            because = "the fp32 weights and their padding have as many"
            yield odd(moment.shape[0], padded, because, at=f"{name} of {what}")


def _names(group: FlatGroup) -> Iterator[Misfit]:
    """Parameters that no rank holds a slice of, and slices of parameters that are not listed."""
    if not group.is_whole or any(part.slices is None for part in group.parts):
        return
    there = {fqn: part.file for part in reversed(group.parts) for fqn in part.slices or ()}
    file, what = group.parts[0].file, f"group {group.parts[0].number}"
    for shapes in group.shapes:
        because = f"{group.listed} lists it in {what}"
        for fqn in (fqn for fqn, shape in shapes.items() if fqn not in there and prod(shape) > 0):
            yield Misfit(printable(fqn), file, "no slice", "one on any rank", because, "slice")
        because = f"param_slice_mappings has it in {what}"
        for fqn in there.keys() - shapes.keys():
            yield Misfit(printable(fqn), there[fqn], "a slice", f"none, as in {group.listed}", because, "slice")


def _shares(group: FlatGroup) -> Iterator[Misfit]:
    """The groups of a rank of stage 3 that are not as long as its shares, or else moments that are not as long."""
    parts, needs = group.parts, group.shares
    lengths = [part.weights.shape[0] for part in parts if part.weights is not None]
    if sum(lengths) != sum(needs):
        odd = [i for i, length in enumerate(lengths) if length != needs[i]] if len(lengths) == len(needs) else []
        stored, need = (sum(values[i] for i in odd) if odd else sum(values) for values in (lengths, needs))
        what = ", ".join(f"group {i}" for i in odd) or "the groups together"
        because = f"each parameter in {group.listed} is split over {parts[0].ranks} ranks, its last part padded"
        yield Misfit(what, parts[0].file, f"{stored:,}", f"{need:,}", because, "length")
        return
    for part, length in zip(parts, lengths, strict=True):
        for name, moment in part.moments.items():
            if moment.shape[0] != length:
                what, because = f"{name} of group {part.number}", "the fp32 weights have as many"
                yield Misfit(what, part.file, f"{moment.shape[0]:,}", f"{length:,}", because, "length")
