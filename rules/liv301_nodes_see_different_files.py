from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV301", "nodes-see-different-files", Severity.ERROR, always=True)
def nodes_see_different_files(ckpt: Checkpoint) -> Iterator[Finding]:
    """The nodes of a job do not see the same checkpoint under one path.

    What it checks:
        With `ckptlint live`, every rank lists the folder and hashes the metadata files: names, sizes and hashes are the
        same on all. With --every-node it also compares the bytes that each node reads. A single process cannot check
        this.
    Why it matters:
        Ranks on different nodes load different values, or some ranks fail while the others wait.
    Usual causes:
        Other clients of a network file system do not see the last writes yet, the path is local to each node, a copy
        did not reach all nodes, or a cache is stale.
    How to fix:
        Wait (--settle), mount one file system on all nodes, or copy again to the named nodes.
    See:
        `ckptlint live --help`
    """
    yield from map(Finding.of_problem, ckpt.problems_of("view"))
