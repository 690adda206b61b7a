"""PAY003: every file that the metadata names is there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.depth import Depth
from ckptlint.geometry.chunk_graph import rank_of, ranks_of_files
from ckptlint.model import FILE_STATES, Checkpoint, FileState
from ckptlint.model.layout import IntArray, distinct
from ckptlint.model.text import ranges
from ckptlint.rule import Finding, Location, Severity, rule

_SENTENCES: dict[FileState, str] = {
    "absent": "missing",
    "unsafe-path": "named by a path that leaves the checkpoint; not opened",
    "not-a-file": "no regular file",
    "link-outside": "a link to a file outside the checkpoint",
    "dangling-link": "a link that leads nowhere",
    "other-case": "there only under a name of another case",
}
_OTHER_CASE = "it loads here, and is missing once it is copied to a file system or store that minds case"


@rule("PAY003", "missing-file", Severity.ERROR, needs=Depth.FILES)
def missing_file(ckpt: Checkpoint) -> Iterator[Finding]:
    """A payload file that the metadata names is missing, or its path leaves the checkpoint.

    What it checks:
        The relative path of every storage entry names a regular file inside the folder. A link to a regular file
        outside is a note, since model caches link to blobs; so is a name that a file system finds only because it
        ignores case. What a store does not tell is not judged, and the report says so.
    Why it matters:
        The tensors with chunks in these files cannot be loaded.
    Usual causes:
        Node-local file systems (each node kept its own ranks' files), a partial copy or upload, cleaning by name, a
        copy that changed the case of names or joined them with `//`.
    How to fix:
        Copy the files of all nodes into one folder, or go back to a complete step.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemReader
    """
    table = ckpt.records
    used = distinct(table.file)
    states = ckpt.files.state[used]
    for state in dict.fromkeys(FILE_STATES[number] for number in states.tolist()):
        if state not in _SENTENCES:
            continue
        numbers = used[states == FILE_STATES.index(state)]
        names = [ckpt.files.names[number] or '""' for number in numbers.tolist()]
        rows = np.flatnonzero(np.isin(table.file, numbers))
        filed, lost = len(rows), sum(length for length in table.byte_length[rows].tolist() if length > 0)
        keys = list(dict.fromkeys(table.name(row) for row in rows.tolist()))
        count = names[0] if len(names) == 1 else f"{len(names)} of {len(used)} payload files"
        verb = "is" if len(names) == 1 else "are"
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield Finding(
            f"{count} {verb} {_SENTENCES[state]}: {filed:,} {'entry' if filed == 1 else 'entries'}, {lost:,} bytes",
            at=Location(file=names[0], label=f"{ckpt.metadata_file}: {shown}"),
            missing=tuple(names),
            kind=state,
            severity=Severity.INFO if state in ("link-outside", "other-case") else None,
            why=_OTHER_CASE if state == "other-case" else "",
            notes=(("keys", ", ".join(keys[:4]) + (f" and {len(keys) - 4:,} more" if len(keys) > 4 else "")),),
            hint=_instead(ckpt, numbers) or (_pattern(ckpt, names) if state == "absent" else ""),
        )


def _instead(ckpt: Checkpoint, numbers: IntArray) -> str:
    """What lies there in place of the files."""
    sentences = list(dict.fromkeys(filter(None, map(ckpt.files.instead.get, numbers.tolist()))))
    return "; ".join(sentences[:3]) + (f"; and {len(sentences) - 3} more like that" if len(sentences) > 3 else "")


def _pattern(ckpt: Checkpoint, names: list[str]) -> str:
    """What the numbers of the missing files have in common."""
    lost = {rank for name in names if (rank := rank_of(name)) is not None}
    lost -= set(ranks_of_files(ckpt)[ckpt.files.are("ok")].tolist())
    if not lost:
        return ""
    low, high = min(lost), max(lost)
    whole_node = len(lost) > 1 and high - low + 1 == len(lost) and low % len(lost) == 0
    if whole_node:
        return f"ranks {ranges(lost)} have no file at all: looks like every file of one node"
    return f"rank{'s' if len(lost) > 1 else ''} {ranges(lost)} {'have' if len(lost) > 1 else 'has'} no file at all"
