"""RNK005: the flat groups of DeepSpeed's ZeRO hold the parameters that they should, and no more."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint, Misfit
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_SENTENCES = {
    "length": "{at} of {file} has {stored} elements instead of {expected}",
    "padding": "{at} of {file} says that {stored} of its elements are padding, and {expected} are",
    "slice": "{file} has {stored}{{of}} instead of {expected}",
    "weight": "{file} holds {stored}{{of}} instead of {expected}",
    "state": "{file} is {stored}{{of}} instead of {expected}",
    "rank": "{file} is of {stored}, and there are the ranks {expected}",
}
_OF_KEYS = ("slice", "weight", "state")


@rule("RNK005", "flat-groups", Severity.ERROR)
def flat_groups(ckpt: Checkpoint) -> Iterator[Finding]:
    """A flat group of DeepSpeed's ZeRO is longer or shorter than its parameters need.

    What it checks:
        Stages 1 and 2 lay the parameters of a group end to end, pad them to twice as many elements as there are ranks
        and cut that evenly: each rank's part, the padding that it states, and the moments beside it have the lengths
        that follow from `param_shapes` and `partition_count`, and every parameter has its slices and its weight, the
        gate of experts as many rows as there are experts. Stage 3 cuts each
        parameter by itself, rounded up: the groups of each rank together are as long as its shares, and moments as long
        as their group. In the universal form each state is as large as its parameter. No file is of a rank beyond the
        ranks that the files count.
    Why it matters:
        All that lies after the wrong place is taken for part of another parameter, or a load stops.
    Usual causes:
        A file of another save or of another number of GPUs, a model that was changed before the save, files that were
        edited or merged by hand.
    How to fix:
        Take all files from one save, or go back one step.
    See:
        deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.zero.stage3, deepspeed.utils.zero_to_fp32
    """
    if ckpt.rank_files is None or not ckpt.format.startswith("deepspeed"):
        raise NotApplicable("no files of DeepSpeed")
    for item in ckpt.rank_files.misfits:
        if item.what in _SENTENCES:
            yield _finding(item)


def _finding(item: Misfit) -> Finding:
    sentence = _SENTENCES[item.what].format(at=item.fqn, file=item.file, stored=item.stored, expected=item.expected)
    return Finding(
        sentence,
        at=Location(item.fqn if item.what in _OF_KEYS else None, file=item.file),
        missing=(item.fqn, item.file),
        notes=(("because", item.because),),
        alike=f"{item.what} {item.because}",
    )
