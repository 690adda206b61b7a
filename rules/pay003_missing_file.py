from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.depth import Depth
from ckptlint.geometry.writers import ranks_of_files
from ckptlint.model import FILE_STATES, Checkpoint, FileState
from ckptlint.model.lost_files import by_node
from ckptlint.model.text import at_most, first_names, plural, ranges
from ckptlint.model.tiling import distinct
from ckptlint.rule import MOST_KEYS, Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.metadata_files import rank_of, ranks_in

_SENTENCES: dict[FileState, tuple[str, str]] = {
    "absent": ("is missing", "are missing"),
    "unsafe-path": (
        "has a path that leaves the checkpoint; not opened",
        "have paths that leave the checkpoint; not opened",
    ),
    "not-a-file": ("is not a regular file", "are not regular files"),
    "link-outside": ("is a link to a file outside the checkpoint", "are links to files outside the checkpoint"),
    "dangling-link": ("is a broken link", "are broken links"),
    "other-case": ("is there only in other letter case", "are there only in other letter case"),
}
"""State -> the verb for one file, and for several."""
_HINTS: dict[FileState, str] = {
    "unsafe-path": "do not load this folder: a load would open these paths",
    "not-a-file": "copy the payload again from where the checkpoint was written",
    "dangling-link": "copy the files themselves, not the links to them",
}
_OTHER_CASE = "it loads here, but not after a copy to a file system or store that distinguishes upper and lower case"


@rule("PAY003", "missing-file", Severity.ERROR, depth=Depth.FILES)
def missing_file(ckpt: Checkpoint) -> Iterator[Finding]:
    """A payload file that the metadata names is missing, or its path leaves the checkpoint.

    What it checks:
        The path of every storage entry names a regular file inside the folder. It is only info if the path is a link
        to a regular file outside, as model caches have, or if the file system finds the file only because it ignores
        case. If a store does not list its files, nothing is judged, and the report says so.
    Why it matters:
        No tensor with a chunk in a missing file can be loaded.
    Usual causes:
        Each node saved to its own disk, a copy or upload was partial, a cleanup removed files by name, or a copy
        changed the case of names or joined them with `//`.
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
        keys = sorted(
            dict.fromkeys(table.name(row) for row in rows.tolist()), key=lambda key: parse(key).kind != "model"
        )
        of_model, of_optimizer = (sum(parse(key).kind == kind for key in keys) for kind in ("model", "optimizer"))
        kinds = f"parts of {plural(of_model, 'weight')} and {of_optimizer:,} of the optimizer: "
        there = list(dict.fromkeys(filter(None, map(ckpt.files.instead.get, numbers.tolist()))))
        instead = "; ".join(at_most(there, 3, before="and ")) + " like that" * (len(there) > 3)
        count = names[0] if len(names) == 1 else f"{len(names)} of {len(used)} payload files"
        label = f"{ckpt.metadata_file}: {first_names(names, 6)}"
        verb = _SENTENCES[state][len(names) > 1]
        yield Finding(
            f"{count} {verb}: {filed:,} {'entry' if filed == 1 else 'entries'}, {lost:,} bytes",
            at=Location(file=names[0], label=label, ranks=ranks_in(names)),
            identity=tuple(names),
            keys=tuple(keys[:MOST_KEYS]),
            files=tuple(names[1:]),
            lost_files=by_node({name: rank_of(name) for name in names}, _ranks_there(ckpt))
            if state == "absent"
            else (),
            kind=state,
            severity=Severity.INFO if state in ("link-outside", "other-case") else None,
            why=_OTHER_CASE if state == "other-case" else "",
            notes=(("keys", kinds * bool(of_model and of_optimizer) + first_names(keys)),),
            hint=instead or (_pattern(ckpt, names) if state == "absent" else _HINTS.get(state, "")),
        )


def _ranks_there(ckpt: Checkpoint) -> set[int]:
    return {*ranks_of_files(ckpt)[ckpt.files.are("ok")].tolist()} - {-1}


def _pattern(ckpt: Checkpoint, names: list[str]) -> str:
    """The hint, by the pattern in the rank numbers of the missing files."""
    lost = {*ranks_in(names)} - _ranks_there(ckpt)
    if not lost:
        return f"copy the missing {'file' if len(names) == 1 else 'files'} again from where the checkpoint was written"
    low, high = min(lost), max(lost)
    if len(lost) > 1 and high - low + 1 == len(lost) and low % len(lost) == 0:
        return f"copy the files of ranks {ranges(lost)}, probably one whole node, from there: none of them is here"
    if len(lost) > 1:
        return f"copy the files of ranks {ranges(lost)} from the nodes that wrote them: none of them is here"
    return f"copy the files of rank {ranges(lost)} from the node that wrote them: none of them is here"
