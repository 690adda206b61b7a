"""RNK008: a Megatron rank's optimizer fits the model beside it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_SENTENCES = {
    "length": "{at} in {file} have {stored} elements instead of {expected}",
    "state": "{at} in {file} is {stored} instead of {expected}",
    "count": "{file} holds {stored} instead of {expected}",
}


@rule("RNK008", "optimizer-of-rank", Severity.ERROR)
def optimizer_of_rank(ckpt: Checkpoint) -> Iterator[Finding]:
    """The optimizer in a rank's file of Megatron's older form does not fit the model of that rank.

    What it checks:
        The buffers of the distributed optimizer (`distrib_optim.pt`) are as long as they say (`numel_unpadded`), and as
        the parameters of the rank need, up to the gaps that rounding to 64 elements leaves. Without it there is an fp32
        copy for each parameter, and each moment has the shape of its copy. An optimizer that
        holds other parameters than the model is no finding where all ranks are so: the job may train or save a part.
    Why it matters:
        A load stops, or gives parameters the moments of others.
    Usual causes:
        A file of another save or of another rank, a model that was changed before the save.
    How to fix:
        Take both files of the rank from one save, or go back one step.
    See:
        megatron.core.optimizer.DistributedOptimizer.get_parameter_state_dp_zero
    """
    if ckpt.rank_files is None or ckpt.format != "megatron-legacy":
        raise NotApplicable("no files of Megatron's older form")
    for item in ckpt.rank_files.misfits:
        if item.what in _SENTENCES:
            sentence = _SENTENCES[item.what]
            yield Finding(
                sentence.format(at=item.fqn, file=item.file, stored=item.stored, expected=item.expected),
                at=Location(file=item.file),
                missing=(item.file, item.fqn),
                notes=(("because", item.because),),
                alike=f"{item.what} {item.file}",
            )
