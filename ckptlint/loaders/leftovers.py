"""What is missing from a folder or lies beside its checkpoint: lost ranks, marks of unfinished saves, other formats."""

from __future__ import annotations

from ckptlint.errors import CkptlintError
from ckptlint.loaders.common_state import COMMON_FILE
from ckptlint.loaders.discover import newest_readable_step
from ckptlint.loaders.recognise import METADATA, PAYLOAD_RANK, RANK_METADATA, Recognised, unsupported, unsupported_hint
from ckptlint.model import Problem
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder


def rank_files(folder: Folder) -> list[str]:
    numbered = {name: int(match[1]) for name in folder.files() if (match := RANK_METADATA.fullmatch(name))}
    return sorted(numbered, key=lambda name: numbered[name])


def lost_ranks(folder: Folder) -> tuple[str, list[Problem]]:
    """Why per-rank metadata is partial ("" when it is whole) and the problem to report for it."""
    present = {int(m[1]) for name in folder.files() if (m := RANK_METADATA.fullmatch(name))}
    payload = {int(m[1]) for name in folder.files() if (m := PAYLOAD_RANK.fullmatch(name))}
    lost = sorted(set(range(max(present | payload) + 1)) - present)
    if not lost:
        return "", []
    names = ", ".join(f"__{rank}.metadata" for rank in lost[:8]) + (", ..." if len(lost) > 8 else "")
    problem = Problem(
        "incomplete",
        names,
        f"{names} missing: the other {len(present)} ranks wrote theirs",
        why="with use_collectives=False each rank describes only its own chunks, so what these ranks held is lost",
        hint="copy the files again from the node of these ranks, or go back to a complete step",
    )
    return f"the metadata of {len(lost)} of {len(lost) + len(present)} ranks is missing", [problem]


def leftover_files(folder: Folder) -> list[Problem]:
    entries, problems = folder.entries, []
    temporary = ".metadata.tmp"
    if temporary in entries and METADATA in entries and entries[temporary].mtime > entries[METADATA].mtime:
        problems.append(
            Problem(
                "incomplete",
                temporary,
                f"{temporary} is newer than {METADATA}: a later save into this folder did not finish",
                why="its payload files may have replaced the ones that .metadata describes",
                hint="use another step, or save again into an empty folder",
            )
        )
    if METADATA in entries and any(RANK_METADATA.fullmatch(name) for name in entries):
        name = next(name for name in entries if RANK_METADATA.fullmatch(name))
        problems.append(Problem("note", name, f"{name} lies beside {METADATA} and belongs to another save"))
    for name in (METADATA, COMMON_FILE):
        if folder.has(name) and folder.look_at(name)[0] == "link-outside":
            sentence = f"{name} is a link to a file outside the checkpoint"
            why = "model caches link to their files; elsewhere it may describe another checkpoint"
            problems.append(Problem("note", name, sentence, why=why))
    return problems


def unfinished_marks(folder: Folder) -> list[Problem]:
    """The mark by which NeMo 2 and xtuner say that a save is still running or was broken off.

    Source:
        nemo.lightning.pytorch.callbacks.ModelCheckpoint (8cfedd72): an empty file `<name>-unfinished` beside the folder
        `<name>`, removed at the end; xtuner (b934f462): `<name>.incomplete`, renamed at the end
    """
    step = folder.parent if folder.name in ("weights", "hf_weights") else folder
    is_nemo = step is not folder or "=" in folder.name  # `...-step=10-last`; else nothing around it is listed for this
    beside = step.parent if step is not None and is_nemo else None
    marker = f"{step.name}-unfinished" if step is not None else ""
    try:
        is_marked = beside is not None and beside.has(marker)
    except CkptlintError:
        is_marked = False
    if folder.name.endswith(".incomplete"):
        is_marked, marker = True, folder.name
    if not is_marked:
        return []
    name = printable(marker)
    sentence = f"{name} says that this save did not reach its end"
    hint = other_step(folder) or "wait for the save to end, or use an earlier checkpoint"
    return [Problem("incomplete", name, sentence, why="the writer removes the mark last", hint=hint)]


def unread_beside(folder: Folder) -> list[Problem]:
    other = unsupported(folder)
    return [] if other is None else [unsupported_problem(other, beside=True)]


def unsupported_problem(found: Recognised, beside: bool = False) -> Problem:
    sentence = f"{found.evidence} shows a checkpoint of {found.name}, which ckptlint does not check"
    hint = unsupported_hint(found.name)
    return Problem("unsupported", found.evidence, sentence, hint=hint, blocks=not beside, beside=beside)


def other_step(folder: Folder) -> str:
    step = newest_readable_step(folder)
    return f"the newest other step here whose metadata reads is {printable(step)}" if step else ""
