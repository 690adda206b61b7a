from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_sets import compared
from ckptlint.model import Checkpoint, Misfit
from ckptlint.rule import Confidence, Finding, Location, Severity, require, rule

_SENTENCES = {
    "length": "{at} in {file} have {stored} elements instead of {expected}",
    "sum": "{at} in {file} have {stored} elements instead of {expected}",
    "state": "{at} in {file} is {stored} instead of {expected}",
    "count": "{file} holds {stored} instead of {expected}",
}


@rule("RNK008", "optimizer-of-rank", Severity.ERROR, needs=("rank files", "no DeepSpeed"))
def optimizer_of_rank(ckpt: Checkpoint) -> Iterator[Finding]:
    """The optimizer in a rank's file does not fit the model of that rank.

    What it checks:
        In Megatron's older format the buffers of the distributed optimizer (`distrib_optim.pt`) are as long as they say
        (`numel_unpadded`) and as the rank's parameters need, apart from rounding to 64 elements. Without it there is an
        fp32 copy of each parameter, and each moment has the shape of its copy. In verl's files the optimizer lists as
        many parameters as the model has, or as it has adapters. It is only info if the optimizers of all ranks know
        fewer parameters than the model: the job may train or save only a part.
    Why it matters:
        A load stops, or gives parameters the moments of other parameters.
    Usual causes:
        A file of another save or of another rank, or a model that changed before the save.
    How to fix:
        Take both files of the rank from one save, or go back one step.
    See:
        megatron.core.optimizer.DistributedOptimizer.get_parameter_state_dp_zero
    """
    fewer = compared(ckpt).of_a_part
    reported_as_part = set(fewer)
    for item in require(ckpt.rank_files).misfits:
        if item.what in _SENTENCES and item not in reported_as_part:
            yield _finding(item, "certain", "take both files of this rank from one save, or go back one step")
    if fewer:  # one cause, reported for the first file
        hint = "check whether the job freezes the rest: all ranks show the same, and no file says so"
        yield _finding(fewer[0], "possible", hint)


def _finding(item: Misfit, confidence: Confidence, hint: str) -> Finding:
    return Finding(
        _SENTENCES[item.what].format(at=item.fqn, file=item.file, stored=item.stored, expected=item.expected),
        at=Location(file=item.file),
        identity=(item.file, item.fqn),
        confidence=confidence,
        notes=(("because", item.because),),
        hint=hint,
        group=f"{item.what} {item.file}",
    )
