from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.lost_files import by_node
from ckptlint.model.text import first_names, ranges, verb
from ckptlint.rule import Finding, Location, Severity, require, rule

_SHOWN = 6


@rule("RNK001", "missing-rank-file", Severity.ERROR, needs=("rank files",))
def missing_rank_file(ckpt: Checkpoint) -> Iterator[Finding]:
    """A file of a set of per-rank torch files is missing.

    What it checks:
        File names and contents say how many ranks (layers, experts, stages) wrote the set; each of them has a file of
        every kind that any of them has. It is only a warning if just the random state of a rank is missing. A file that
        is there but cannot be read is left to PAY013, SAF001 and SAF002.
    Why it matters:
        No other file holds these shards: a load stops, or a merge joins the remaining files without them.
    Usual causes:
        Each node saved to its own disk and one was not copied, a rank died while it wrote, or an upload broke off.
    How to fix:
        Copy the file from the node that wrote it, or go back to a complete step.
    See:
        deepspeedai/DeepSpeed#2319, verl FSDPCheckpointManager
    """
    rank_files = require(ckpt.rank_files)
    missing = rank_files.missing
    groups = grouped((file.kind, file) for file in chain.from_iterable(missing.values()))
    for kind, files in groups.items():
        there = sum(file.kind == kind for file in rank_files.files)
        numbers = {name: {file.numbers[name] for file in files} for name in files[0].numbers}
        of = "".join(f", {name} {ranges(ranks)}" for name, ranks in numbers.items()).replace(",", ":", 1)
        names = first_names((file.name for file in files), _SHOWN)
        it = "it" if len(files) == 1 else "them"
        label = f"{there:,} of {len(files) + there:,} {kind} files {verb(there, 'is')} there"
        ranks_there = {file.numbers.get("rank", -1) for file in rank_files.files if file.kind == kind}
        yield Finding(
            f"{files[0].name} is missing"
            if len(files) == 1
            else f"{len(files):,} of {len(files) + there:,} {kind} files are missing{of}",
            at=Location(file=files[0].name, label=label, ranks=tuple(sorted(numbers.get("rank", ())))),
            identity=tuple(file.name for file in files),
            lost_files=by_node({file.name: file.numbers.get("rank") for file in files}, ranks_there - {-1}),
            severity=Severity.WARNING if kind == "random state" else None,
            notes=(("files", names if len(files) > 1 else ""), ("because", ", ".join(missing))),
            hint=f"copy {it} from the node that wrote {it}, or go back to a complete step",
            group=kind,
        )
