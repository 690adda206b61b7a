"""How what went wrong while reading becomes a problem that a SAF rule reports."""

from __future__ import annotations

from ckptlint.errors import LimitError, ScriptError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import Unpickled
from ckptlint.formats.torch_file import TorchFile
from ckptlint.model import Problem, ProblemKind
from ckptlint.model.text import plural, unknown_classes
from ckptlint.vocabulary.frameworks import world
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA

_SENDER = "do not open this folder with torch.load or dcp.load, and find out who wrote this file"
_VOUCH = (
    "if this is your own code, write trusted-modules = [{}] below [rules.unsafe-pickle] in the settings; if not, "
    "do not load this file"
)
_OPENED = "torch reads this file with a plain pickle load, so opening the folder makes these calls"
_CALLS = "a plain pickle load of this file makes these calls"
_NAMED = "a plain pickle load imports the module of this name, and code that uses the value later may call it"
_CALLED = "a plain pickle load calls it, whatever it does"
_FILLED = "the class may call what it is filled with when it is loaded, and ckptlint does not know it"
_UNKNOWN = ", which ckptlint does not know"


def from_error(error: UnreadableError, file: str, blocks: bool = False, hint: str = "", why: str = "") -> Problem:
    """A file that could not be read, or not within the limits."""
    if isinstance(error, ScriptError):
        return Problem("unread", file, f"{file} {error}", why="ckptlint knows the format and does not judge it")
    kind: ProblemKind = "limit" if isinstance(error, LimitError) else "unreadable"
    return Problem(kind, file, f"{file} {error}", hint=hint, why=why, blocks=blocks)


def of_format(file: str, name: str, outside_checkpoint: bool = False) -> Problem:
    """That a format, as `unread.toml` calls it, is not checked; `outside_checkpoint` where one beside it is."""
    hint = next((known.hint for known in world().unread if known.name == name), "")
    sentence, blocks = f"{file} belongs to a format that ckptlint does not check: {name}", not outside_checkpoint
    return Problem("unsupported", file, sentence, hint=hint, blocks=blocks, outside_checkpoint=outside_checkpoint)


def optimizer_never_written(file: str, steps: int, lack: str) -> Problem:
    """That a job stepped and no optimizer is stored: a scheduler proves that it had one.

    0 steps are not known; `lack` says where it should be and is not, as the end of a sentence.
    """
    who = f"the job stepped {plural(steps, 'time')} and has" if steps else "the step has"
    why = "the optimizer was never written: a resume continues with zero moments"
    hint = "resume with the weights alone and warm up again, or use a step that has its optimizer"
    sentence = f"{who} a scheduler, but {lack}"
    return Problem("incomplete", file, sentence, why=why, hint=hint, outside_checkpoint=True)


def from_torch_file(torch_file: TorchFile, file: str, why: str = "") -> list[Problem]:
    """What a file of torch.save asks for that it may not, and what contradicts itself in it."""
    faults = [from_error(UnreadableError(sentence, at), file, why=why) for sentence, at in torch_file.faults]
    return from_refusals(torch_file.unpickled, file, "data.pkl of " if torch_file.prefix else "") + faults


def from_refusals(unpickled: Unpickled, file: str, where: str = "") -> list[Problem]:
    """One problem per name that the pickle may not ask for, and one note for all classes nobody knows."""
    problems = []
    packages = {refused.target.partition(".")[0] for refused in unpickled.refused if refused.unknown}
    vouch = _VOUCH.format(", ".join(f'"{package}"' for package in sorted(packages)))
    opened = _OPENED if file == METADATA or RANK_METADATA.fullmatch(file) else _CALLS
    for refused in unpickled.refused:
        is_filled = refused.unknown and refused.misuse
        act = "fills" if is_filled else "asks to call" if refused.called else "names"
        at = f" at byte {refused.position:,}" if refused.position >= 0 else ""
        inside = " of a pickle inside its bytes" if at else " in a pickle inside its bytes"
        way = f" {refused.misuse}" if refused.misuse else ""
        end = f"{way}; ckptlint did not run it" if refused.misuse or not refused.unknown else _UNKNOWN
        sentence = f"{where}{file} {act} {refused.target}{at}{inside if refused.nested else ''}{end}"
        why = _FILLED if is_filled else _CALLED if refused.unknown else opened if refused.called else _NAMED
        hint, blocks = vouch if refused.unknown else _SENDER, unpickled.root is None
        # what could not be read to its end stays a finding, whoever is trusted
        unknown = (refused.target,) if refused.unknown and not blocks else ()
        problems.append(
            Problem("unsafe", file, sentence, detail=refused.trace, hint=hint, why=why, blocks=blocks, unknown=unknown)
        )
    if unpickled.unknown:
        sentence = f"{where}{file} holds {unknown_classes(unpickled.unknown)}"
        problems.append(Problem("note", file, sentence, unknown=unpickled.unknown))
    return problems
