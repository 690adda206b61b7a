"""The metadata files of a DCP save: those of its ranks, what is lost of them, and what another save left."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from operator import itemgetter

from ckptlint.errors import UnreadableError
from ckptlint.formats.pickles.safe_pickle import SIZE_LIMIT, read_metadata
from ckptlint.loaders.problems import from_refusals
from ckptlint.loaders.readers.common_state import COMMON_FILE
from ckptlint.model import Problem
from ckptlint.model.lost_files import by_node
from ckptlint.model.text import first_few, plural, verb
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA, UNFINISHED_METADATA, ranks_in

_SHOWN = 8
_LISTED = 2**16
_APART = 2.0  # seconds between the files of one save and those of a later one, at least


def rank_files(folder: Folder) -> dict[str, int]:
    """Name -> rank of the metadata files of ranks, in the order of these."""
    numbered = {name: int(match[1]) for name in folder.files_beside() if (match := RANK_METADATA.fullmatch(name))}
    return dict(sorted(numbered.items(), key=itemgetter(1)))


def lost_ranks(folder: Folder) -> tuple[str, list[Problem]]:
    """Why per-rank metadata is partial ("" when it is whole) and the problem to report for it."""
    present = {*rank_files(folder).values()}
    payload = {*ranks_in(folder.files())}
    lost = max(present | payload) + 1 - len(present)
    if not lost:
        return "", []
    ranks = islice((rank for rank in count() if rank not in present), min(lost, _LISTED))
    missing = {f"__{rank}.metadata": rank for rank in ranks}
    names = first_few([*missing], _SHOWN)
    wrote = f"{plural(len(present), 'other rank')} wrote {'its' if len(present) == 1 else 'their'} own"
    sentence = f"{names} {verb(lost, 'is')} missing; {wrote}"
    why = "with use_collectives=False each rank describes only its own chunks, so the chunks of these ranks are lost"
    hint = "copy the files again from the node of these ranks, or go back to a complete step"
    lost_files = by_node(missing, present)
    problem = Problem("incomplete", names, sentence, why=why, hint=hint, lost_files=lost_files)
    return f"the metadata of {lost:,} of {lost + len(present):,} ranks is missing", [problem]


def leftover_files(folder: Folder) -> list[Problem]:
    """Metadata files that another save left, and those that lie elsewhere."""
    entries, problems = folder.entries, []
    temporary = UNFINISHED_METADATA
    if temporary in entries and METADATA in entries and entries[temporary].mtime > entries[METADATA].mtime:
        sentence = f"{temporary} is newer than {METADATA}: a later save into this folder never finished"
        is_young = entries.mtime > entries[METADATA].mtime + _APART
        if is_young.any():
            is_all = bool(is_young.all())
            why = f"its payload files replaced {'all' if is_all else 'some'} of those that {METADATA} describes"
            hint = "use another step, or save again into an empty folder"
            # all of one save: torch loads them, if the layout stayed what it was
            problem = Problem("incomplete", temporary, sentence, why=why, hint=hint, outside_checkpoint=is_all)
        else:
            why = f"it replaced no payload file, so what {METADATA} describes is still there"
            problem = Problem("note", temporary, sentence, why=why)
        problems.append(problem)
    for name in [*filter(RANK_METADATA.fullmatch, entries.others)][:1] if METADATA in entries else ():
        problems.append(Problem("note", name, f"{name} lies beside {METADATA} and belongs to another save"))
    for name in (METADATA, COMMON_FILE):
        if folder.has(name) and folder.stat(name)[0] == "link-outside":
            sentence = f"{name} is a link to a file outside the checkpoint"
            why = "in a model cache that is normal; elsewhere it may describe another checkpoint"
            problems.append(Problem("note", name, sentence, why=why))
    return problems


def unsafe_leftovers(folder: Folder) -> list[Problem]:
    """What readable metadata of single ranks asks for, which torch reads where `.metadata` is lost."""
    problems = []
    for name in rank_files(folder):
        with suppress(UnreadableError):
            refusals = from_refusals(read_metadata(folder.read(name, SIZE_LIMIT)), name)
            problems += [replace(problem, blocks=False) for problem in refusals]
    return problems
