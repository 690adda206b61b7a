from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import byte_span
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Finding, Location, Severity, rule

_NEEDS = ("offsets", "no safetensors", "no torch file")
_SHOWN = 32
_EMBEDDING = lazy_pattern(r"(?:^|\.)(?:word_embeddings|embed_tokens|tok_embeddings|wte)\.weight$")
_OUTPUT = lazy_pattern(r"(?:^|\.)(?:output_layer|lm_head|head|output)\.weight$")


@rule("PAY005", "range-overlap-in-file", Severity.ERROR, depth=Depth.FILES, needs=_NEEDS)
def range_overlap_in_file(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two entries of a payload file share bytes.

    What it checks:
        The byte ranges of a file's storage entries do not overlap; empty ranges do not count. It is only a warning if
        an input embedding and an output layer, which may be tied, have exactly the same range.
    Why it matters:
        At least one of the two tensors reads bytes that belong to the other.
    Usual causes:
        Damaged or edited metadata, or two ranks that wrote to one file at the same time.
    How to fix:
        Save again. Check which of the two tensors is right before you use either.
    See:
        torch.distributed.checkpoint.filesystem._StorageInfo
    """
    table = ckpt.records
    rows = np.flatnonzero((table.byte_length > 0) & (table.byte_offset >= 0))
    order = rows[np.lexsort((table.byte_length[rows], table.byte_offset[rows], table.file[rows]))]
    if len(order) < 2:
        return
    file, start = table.file[order], table.byte_offset[order]
    stop = start + np.minimum(table.byte_length[order], np.iinfo(np.int64).max - start)
    # the furthest end so far within each file, and which entry has it: an overlap may span several neighbours
    changes = np.concatenate([[True], file[1:] != file[:-1]])
    holder = _running_argmax(stop, changes)
    hits = np.flatnonzero((file[1:] == file[:-1]) & (start[1:] < stop[holder[:-1]])) + 1
    for hit in hits[:_SHOWN].tolist():
        earlier = int(holder[hit - 1])
        first, second = int(order[earlier]), int(order[hit])
        names = table.name(first), table.name(second)
        shared = int(min(stop[hit], stop[earlier]) - start[hit])
        place = ckpt.files.names[int(file[hit])]
        spans = [byte_span(int(start[i]), int(stop[i] - start[i])) for i in (earlier, hit)]
        label = f"{place}: bytes {spans[0]} {names[0]}, {spans[1]} {names[1]}"
        is_same = start[hit] == start[earlier] and stop[hit] == stop[earlier]
        # an input embedding and an output layer, which models often share
        is_tied = any(_EMBEDDING.search(a) and _OUTPUT.search(b) for a, b in (names, names[::-1]))
        more = f" (the first of {len(hits):,} such pairs)" if hit == hits[0] and len(hits) > 1 else ""
        yield Finding(
            f"{shared:,} bytes of {place} belong to two entries: {names[0]} and {names[1]}{more}",
            at=Location(names[1], file=place, byte_range=(int(start[hit]), shared), label=label),
            identity=(names[0],),
            keys=(names[0],),
            severity=Severity.WARNING if is_same and is_tied else None,
            hint="compare both offsets with the file's other entries: records lie end to end, so one of them is wrong",
        )


def _running_argmax(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """For each position the index of the largest value since the last start, itself included."""
    group = np.cumsum(starts) - 1
    order = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    ranked = np.maximum.accumulate(order + group * len(values))
    at_rank = np.empty(len(values), np.int64)
    at_rank[order] = np.arange(len(values))
    return np.asarray(at_rank[ranked - group * len(values)])
