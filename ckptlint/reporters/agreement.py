"""What a pass compared with something from elsewhere: hashes of files, a seal, a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckptlint.analysis.fit.key_matching import match_keys
from ckptlint.lint.report import CheckpointReport, Report
from ckptlint.model import Checkpoint, PayloadTable
from ckptlint.seals.verify import compare_with_seal, misfit


def agreement(report: Report) -> str:
    """Sentences on how many files and tensors match what they were compared with, and what was not; "" for nothing."""
    counts = Counter[tuple[str, str]]()
    for part in report.checkpoints:
        for key, count in _matches(part):
            counts[key] += count
    commands = dict.fromkeys(
        part.checkpoint.payload.verifying for part in report.checkpoints if part.checkpoint.payload
    )
    unverified = [f"Who signed was not verified: `{command} PATH` does that." for command in commands if command]
    matches = [
        f"1 {noun} matches {what or 'its hash'}."
        if count == 1
        else f"{count:,} {noun}s match {what or 'their hashes'}."
        for (noun, what), count in counts.items()
        if count
    ]
    return " ".join([*matches, *unverified])


def _matches(part: CheckpointReport) -> Iterator[tuple[tuple[str, str], int]]:
    """Each noun and what it matches ("" for hashes), with how many of the checkpoint do."""
    ckpt = part.checkpoint
    if ckpt.payload is not None and "PAY012" in part.passed:
        yield ("file", ""), len(ckpt.payload.matched)
    if ckpt.payload is not None and "LIV302" in part.passed and not misfit(ckpt):
        step = f" of step {ckpt.seal.step}" if ckpt.seal and ckpt.seal.step is not None else ""
        yield ("tensor", f"the seal{step}"), compare_with_seal(ckpt).equal
    if ckpt.reference is not None and {"REF001", "REF002"} <= {*part.passed}:
        names = dict[str, set[str]]()
        for pair in match_keys(ckpt, ckpt.reference).pairs:
            wanted = (pair.expected_shape, pair.stored_shape), (pair.expected.dtype, pair.stored.dtype)
            if all(expected in (None, stored) for expected, stored in wanted):
                said = [
                    word for word, (expected, _) in zip(("shape", "dtype"), wanted, strict=True) if expected is not None
                ]
                names.setdefault(", ".join(["name", *said]), set()).add(pair.stored.fqn)
        for how, keys in names.items():
            yield ("tensor", f"{ckpt.reference.source} ({how})"), len(keys)


def is_verified(ckpt: Checkpoint, payload: PayloadTable) -> npt.NDArray[np.bool_]:
    """For each record whether the hash of its file, or the seal, tells of changed bytes."""
    matched = {*payload.matched}
    files = [i for i, file in enumerate(ckpt.files) if file.name in matched]
    return np.isin(ckpt.records.file, files) | (payload.digested & (not misfit(ckpt)))
