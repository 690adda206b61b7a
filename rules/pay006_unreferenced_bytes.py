from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ckptlint.analysis.chunks.missing import unnamed_bytes
from ckptlint.analysis.ranks.save_plans import duplicates, planned_by
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.facts import fact
from ckptlint.model.text import at_most, byte_span, first_names, human_bytes, join_words
from ckptlint.model.tiling import distinct
from ckptlint.rule import Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.metadata_files import rank_of

_SHOWN = 3
_HEADER_ALONE = 512
"""More than the safetensors header of a rank without tensors; torch 2.13 writes 88 bytes."""


@rule("PAY006", "unreferenced-bytes", Severity.WARNING, depth=Depth.FILES, whole=True)
def unreferenced_bytes(ckpt: Checkpoint, min_bytes: int = 64) -> Iterator[Finding]:
    """No tensor or object claims some bytes of a payload file.

    What it checks:
        The entries of each `.distcp` file cover it from its first to its last byte, except for gaps below 64 bytes
        (option `min-bytes`), and a file that no entry names is empty. In the safetensors serialisation entries have no
        byte offsets, so only files that no entry names count, unless they hold a header alone. It is only info if the
        plans of all ranks show a second writer: OBJ001 reports it, or it is a replica. Files with entries that PAY004
        calls damaged are left to it, files that begin with zeros to PAY013.
    Why it matters:
        A rank wrote these bytes, but no load will read them. Where each rank plans for itself (Megatron-Core, NVRx)
        two ranks may write one key; the metadata keeps one entry, and what the other rank held is lost.
    Usual causes:
        Two ranks were main replica of one tensor or object (OBJ001), the metadata lost an entry (GEO004), or another
        save left its files.
    How to fix:
        If a tensor lacks exactly as many bytes, restore the original .metadata. If two ranks wrote one key, give the
        second one the missing mesh axis or prefix. Delete leftovers before you save into a used folder.
    See:
        megatron.core.dist_checkpointing.strategies.state_dict_saver
    """
    # A gap below 64 bytes is taken for the alignment of a writer. Where entries give no byte offsets, a file counts
    # as a whole, and a rank without tensors writes a file that holds nothing but a header.
    table, least = ckpt.records, max(min_bytes, 1 if ckpt.locates_bytes else _HEADER_ALONE)
    duplicating, number = _duplicating_ranks(ckpt), {name: i for i, name in enumerate(ckpt.files.names)}
    lengths = set(distinct(table.byte_length).tolist())
    zeros = {problem.file for problem in ckpt.problems_of("container") if not problem.detail}
    for name, gaps in unnamed_bytes(ckpt, least).items():
        if name in zeros:
            continue
        file, size = ckpt.files[number[name]], int(ckpt.files.size[number[name]])
        total = sum(stop - start for start, stop in gaps)
        start, stop = gaps[0]
        what = f"{total:,} bytes of {file.name} ({total / size:.1%})"
        if not file.referenced:
            what = f"{file.name}, which holds {human_bytes(size)}"
        spans = first_names((byte_span(start, stop - start) for start, stop in gaps), _SHOWN, "gap")
        # The plans show what a duplicating rank wrote, so the lengths of its gaps are no evidence of a lost entry.
        is_duplicating = rank_of(file.name) in duplicating
        by_length = _missing_lengths(ckpt) if ckpt.locates_bytes and not is_duplicating else {}
        lost = [(start, by_length[stop - start]) for start, stop in gaps if stop - start in by_length]
        texts = [f"the bytes from {start:,} on are as long as the missing record of {fqn}" for start, fqn in lost]
        keys = [fqn for _, fqn in lost]
        # where each gap is as long as some record, only entries may be lost
        kind = "records" if all(stop - start in lengths for start, stop in gaps) else "inside"
        yield Finding(
            f"no tensor or object claims {what}",
            at=Location(file=file.name, byte_range=(start, stop - start), label=f"{file.name}: bytes {spans}"),
            identity=(file.name,),
            kind=kind if file.referenced else "whole file",
            severity=Severity.INFO if is_duplicating else None,
            group=("gaps" if file.referenced else "unnamed") + " ".join(keys),
            why="the bytes of the missing part are probably here; without their entry no load finds them"
            if lost
            else "",
            notes=(("record", "; ".join(at_most(texts, _SHOWN, before="and "))),),
            explain=partial(_planned_elsewhere, ckpt, file.name),
            inferred_from=f"the length of the other records of {join_words(keys[:_SHOWN])}" if lost else "",
            hint="compare .metadata with the original: either it lost an entry, or this rank saved its part under the "
            "offsets of another rank"
            if lost
            else _hint(is_named=file.referenced, is_duplicating=is_duplicating),
        )


def _hint(is_named: bool, is_duplicating: bool) -> str:
    if is_duplicating:
        return "compare the plans of the ranks: this rank also wrote keys whose entry names another rank's file"
    if is_named:
        return "list the keys that this file's rank passed to save, and find the one without an entry"
    return "delete the file if it is left from another save into this folder; compare its time with .metadata's"


@fact
def _missing_lengths(ckpt: Checkpoint) -> dict[int, str]:
    """Length of a missing record in bytes -> key of the one tensor that lacks a record of this length."""
    # The length of a lost record is known from a chunk of the same tensor with as many elements: both have the same
    # dtype and framing. If two tensors lack records of one length, nothing says whose bytes these are.
    table = ckpt.records
    tensors_by_length: dict[int, set[str]] = {}
    for tensor in ckpt.sound_tensors():
        tiling, records = tensor.tiling, tensor.chunks.record
        stored = tiling.live & (records >= 0)
        volumes = [box.volume for box in tiling.coverage.missing] if tiling.coverage.missing_volume else []
        volumes += [tiling.box(row).volume for row in np.flatnonzero(tiling.live & (records < 0))[:_SHOWN].tolist()]
        if not volumes or not stored.any():
            continue
        rows = np.flatnonzero(stored)
        peers = rows[np.isin(tiling.sizes[rows].prod(axis=1), volumes)]
        for length in distinct(table.byte_length[records[peers]]).tolist():
            tensors_by_length.setdefault(length, set()).add(tensor.fqn)
    return {length: next(iter(fqns)) for length, fqns in tensors_by_length.items() if len(fqns) == 1}


def _duplicating_ranks(ckpt: Checkpoint) -> set[int]:
    """The ranks that planned what others planned too (NVRx writes every copy); empty without plans of this state."""
    plans = ckpt.save_plans
    # Plans with other keys belong to another state (an older save into this folder), and explain nothing here.
    if plans is None or set(plans.fqns) != set(ckpt.records.fqns):
        return set()
    return {rank for duplicate in duplicates(plans) for rank in duplicate.ranks}


def _planned_elsewhere(ckpt: Checkpoint, name: str) -> tuple[Note, ...]:
    """A note with the keys that the file's rank planned to write but whose entries point to another rank's file."""
    rank = rank_of(name)
    if ckpt.save_plans is None or rank is None:
        return ()
    stored = {ckpt.records.name(r) for r in range(len(ckpt.records)) if rank_of(ckpt.byte_range_of(r)[0]) == rank}
    lost = sorted(planned_by(ckpt.save_plans, rank) & set(ckpt.records.fqns) - stored)
    text = f"rank {rank} also planned {first_names(lost, _SHOWN)}, which another rank stored"
    return (("planned", text),) if lost else ()
