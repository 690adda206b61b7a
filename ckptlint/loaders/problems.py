"""How what went wrong while reading becomes a problem that a SAF rule reports."""

from __future__ import annotations

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.safe_pickle import Unpickled
from ckptlint.model import Problem, ProblemKind

_SENDER = "do not open this folder with torch.load or dcp.load; report it to whoever gave it to you"


def from_error(error: UnreadableError, file: str, blocks: bool = False, hint: str = "", why: str = "") -> Problem:
    """A file that could not be read, or not within the limits."""
    kind: ProblemKind = "limit" if isinstance(error, LimitError) else "unreadable"
    return Problem(kind, file, f"{file} {error}", hint=hint, why=why, blocks=blocks)


def from_refusals(unpickled: Unpickled, file: str, where: str = "") -> list[Problem]:
    """One problem per name that the pickle may not ask for, and one note for all classes nobody knows."""
    problems = []
    for refused in unpickled.refused:
        act = "asks to call" if refused.called else "names"
        at = f" at byte {refused.position:,}" if refused.position >= 0 else ""
        problems.append(
            Problem(
                "unsafe",
                file,
                f"{where}{file} {act} {refused.target}{at}; ckptlint read the opcodes and did not run it",
                detail=refused.trace,
                hint=_SENDER,
                why="torch reads this file with a plain pickle load, so opening the folder runs what it names",
                blocks=unpickled.root is None,
            )
        )
    if unpickled.unknown:
        names = ", ".join(unpickled.unknown[:8]) + (", ..." if len(unpickled.unknown) > 8 else "")
        problems.append(
            Problem("note", file, f"{where}{file} holds {len(unpickled.unknown)} classes unknown to ckptlint: {names}")
        )
    return problems
