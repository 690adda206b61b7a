from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.flat_groups import misfits
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_SENTENCES = {
    "length": "{at} of {file} has {stored} elements instead of {expected}",
    "padding": "{at} of {file} says that {stored} of its elements are padding, but {expected} are",
    "slice": "{file} has {stored}{{of}} instead of {expected}",
    "weight": "{file} holds {stored}{{of}} instead of {expected}",
    "state": "{file} is {stored}{{of}} instead of {expected}",
    "rank": "{file} belongs to {stored}, but there are only the ranks {expected}",
}
_OF_KEYS = ("slice", "weight", "state")


@rule("RNK005", "flat-groups", Severity.ERROR)
def flat_groups(ckpt: Checkpoint) -> Iterator[Finding]:
    """A flat group of DeepSpeed's ZeRO is longer or shorter than its parameters need.

    What it checks:
        Stages 1 and 2 lay the parameters of a group end to end, pad them to a multiple of twice the number of ranks and
        split them evenly. Each rank's part, its stated padding and its moments have the lengths that `param_shapes` and
        `partition_count` imply; every parameter has its slices and its weight, and the gate of experts one row for each
        expert. Stage 3 splits each parameter by itself, rounded up: the groups of a rank are as long as its shares,
        and moments as long as their group. In the universal form each state is as large as its parameter. No file
        belongs to a rank beyond those that the files count.
    Why it matters:
        A load reads everything after the wrong element as part of another parameter, or stops.
    Usual causes:
        A file of another save or of another number of GPUs, a model that changed before the save, files that somebody
        edited or merged by hand.
    How to fix:
        Take all files from one save, or go back one step.
    See:
        deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.zero.stage3, deepspeed.utils.zero_to_fp32
    """
    if ckpt.rank_files is None or not ckpt.format.startswith("deepspeed"):
        raise NotApplicable("no files of DeepSpeed")
    for item in misfits(ckpt):
        if item.what in _SENTENCES:
            words = {"at": item.fqn, "file": item.file, "stored": item.stored, "expected": item.expected}
            yield Finding(
                _SENTENCES[item.what].format(**words),
                at=Location(item.fqn if item.what in _OF_KEYS else None, file=item.file),
                identity=(item.fqn, item.file),
                notes=(("because", item.because),),
                hint="take all files from the same save, or go back one step",
                group=f"{item.what} {item.because}",
            )
