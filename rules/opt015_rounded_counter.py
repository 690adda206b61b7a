from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ckptlint.analysis.optimizer.records import highest_step
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import plural, verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import parse

_COUNTS_TO = {"bfloat16": 256, "float16": 2048}
"""A dtype of 16 bits -> up to where it holds every whole number."""


class _Counters(NamedTuple):
    """The step counters of a dtype in one file, or in the tensors of the checkpoint."""

    dtype: str
    total: int
    at: Location  # of the first
    highest: int  # the most that one of them says, rounded; 0 where that was not read


@rule("OPT015", "rounded-counter", Severity.WARNING)
def rounded_counter(ckpt: Checkpoint) -> Iterator[Finding]:
    """The step counters of an optimizer are in 16 bits, which round them.

    What it checks:
        `step` of a parameter's state is stored in bfloat16, which holds every whole number up to 256, or in float16,
        which does up to 2,048. It is a warning if the counter, the name of the step, a scheduler or another file says
        that the job is at this number or beyond, otherwise info. Moments in 16 bits are a choice and no finding.
    Why it matters:
        A rounded counter no longer grows by 1, so after a resume Adam corrects its bias for a wrong step. torch itself
        counts in float32.
    Usual causes:
        A script cast the whole state of the optimizer to the dtype of the model.
    How to fix:
        Set the counters to the true step in float32 before you resume, and cast only the moments.
    See:
        vllm-project/speculators#899
    """
    groups = [*_of_tensors(ckpt), *_of_files(ckpt)]
    if not groups:
        raise NotApplicable("no step counter is stored in 16 bits")
    for group in groups:
        limit, step = _COUNTS_TO[group.dtype], max(group.highest, highest_step(ckpt))
        is_rounded = step >= limit
        yield Finding(
            f"{plural(group.total, 'step counter')} {verb(group.total, 'is')} {group.dtype}, which counts to {limit:,}"
            + (f"; the job is at step {step:,}" if is_rounded else ""),
            at=group.at,
            identity=(group.at.file, group.dtype),
            severity=None if is_rounded else Severity.INFO,
            hint="set the counters to the true step in float32 before you resume",
        )


def _of_tensors(ckpt: Checkpoint) -> Iterator[_Counters]:
    by_dtype: dict[str, list[Tensor]] = {dtype: [] for dtype in _COUNTS_TO}
    for key, tensor in ckpt.tensors.items():
        if tensor.dtype in by_dtype and tensor.volume == 1 and key.endswith(".step") and parse(key).kind == "optimizer":
            by_dtype[tensor.dtype].append(tensor)
    for dtype, tensors in by_dtype.items():
        if tensors:
            yield _Counters(dtype, len(tensors), Location(tensors[0]), max(_value(ckpt, tensor) for tensor in tensors))


def _value(ckpt: Checkpoint, tensor: Tensor) -> int:
    """What a counter says; 0 where its record was not read."""
    records = tensor.chunks.record
    if ckpt.payload is None or (records < 0).any() or not ckpt.payload.scanned[records].all():
        return 0
    return int(ckpt.payload.most[records].max(initial=0))


def _of_files(ckpt: Checkpoint) -> Iterator[_Counters]:
    for file in ckpt.step_files:
        states = file.optimizer.storages.values() if file.optimizer is not None else ()
        for dtype, count in Counter(dtype for _, state, dtype in states if state == "step").items():
            if dtype in _COUNTS_TO:
                yield _Counters(dtype, count, Location(file=file.name), file.step or 0)
