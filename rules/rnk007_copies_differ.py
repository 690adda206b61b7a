from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_sets import compared
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN = 6
_OF = {
    "content": "all ranks hold this tensor whole",
    "content of copies": "a replicated mesh axis holds several copies",
    "content of other meshes": "each of several groups of ranks holds a copy",
}


@rule("RNK007", "copies-differ", Severity.WARNING, needs=("rank files",))
def copies_differ(ckpt: Checkpoint) -> Iterator[Finding]:
    """The copies of a tensor in the files of several ranks differ.

    What it checks:
        Plain tensors (buffers) that each rank's file holds whole, and shards that a replicated mesh axis (HSDP) holds
        more than once, have equal CRC-32s in the directories of the archives; no tensor is read. It is only info for
        tensors on some axes of the mesh, such as norms beside tensor-parallel weights, whose copies may drift. Tensors
        that share a storage with others are not compared.
    Why it matters:
        A merge keeps one of the copies: the other ranks trained with other values, or one file is damaged.
    Usual causes:
        A buffer that each rank changes for itself, ranks that drifted apart, or a file of another save.
    How to fix:
        Find the first step at which the ranks differ, and resume from the one before it. A rank's own counters may be
        meant.
    See:
        verl#7612, verl/model_merger/fsdp_model_merger.py
    """
    for item in compared(ckpt).copies:
        files = item.says[-1][1]
        for fqn in item.fqns:
            yield Finding(
                f"the copy{{of}} in {first_names(files, _SHOWN)} differs from the copies in other files: "
                f"{_OF[item.what]}",
                at=Location(ckpt.tensors[fqn], file=files[0]) if fqn in ckpt.tensors else Location(fqn, file=files[0]),
                identity=files,
                confidence="certain" if item.is_sure else "possible",
                hint="find the first step at which the copies differ, and resume from the one before it",
                notes=(
                    ("copies", "; ".join(f"{value} in {fold_names(copies)[0]}" for value, copies in item.says[:4])),
                ),
                group=f"{item.what} {files[0]}",
            )
