"""LIV301: all nodes of a job see the same files."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV301", "nodes-see-different-files", Severity.ERROR, always=True)
def nodes_see_different_files(ckpt: Checkpoint) -> Iterator[Finding]:
    """The nodes of a job do not see the same checkpoint under one path.

    What it checks:
        With `ckptlint live`, every rank lists the folder and hashes the metadata files: names, sizes and hashes are the
        same on all. With --every-node the bytes that each node reads are compared too. What one process sees is not
        judged.
    Why it matters:
        Ranks that load on different nodes load different values, or some of them fail while the others wait.
    Usual causes:
        A network file system whose other clients have not seen the last writes yet, a path that is local to each node,
        a copy that did not reach all of them, stale pages in a cache.
    How to fix:
        Wait (--settle), mount one file system on all nodes, or copy again to the nodes that are named.
    See:
        `ckptlint live --help`
    """
    yield from map(Finding.of_problem, ckpt.problems_of("view"))
