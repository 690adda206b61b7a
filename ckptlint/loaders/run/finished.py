"""Whether a save was finished: what is written last, and marks of one that still runs; and which other step was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from ckptlint.errors import CkptlintError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.layouts import recognise
from ckptlint.loaders.problems import optimizer_never_written
from ckptlint.loaders.readers.common_state import COMMON_FILE
from ckptlint.loaders.readers.dcp.megatron import CONFIG_FILE
from ckptlint.loaders.run.bare_parts import CONFIG, bare_parts
from ckptlint.loaders.run.steps import folder_below, older_steps, steps_of, sub_folder
from ckptlint.model import AxisSize, Problem, StepState
from ckptlint.model.text import join_words, printable
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.folder import Folder
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.frameworks import Mark, WrittenLast, family_of, holds_no_state, is_part, step_number, world
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA

_TRAINER = "trainer_state.json"
_LEVELS = 5  # folders between a part and its step
_STEPS_TRIED = 16
_OLDER = 8  # steps that one is compared with
_OLDEST = 64  # steps among which these are looked for: a run may hold thousands that never finished
_NUMBERS = lazy_pattern(r"\d+")
_SHARDED = lazy_pattern(r"-\d+-of-\d+(?=\.\w+$)|\.index\.json$")
_LAST_FILE_LIMIT = 1024**2
_MOST_RANKS = 2**31


def step_state(step: Folder, levels: int = _LEVELS) -> StepState:
    """Whether a step, or each of its parts, has what its layout writes last."""
    recognised = recognise(step)
    state: StepState = recognised.layout.state(step) if recognised else "unknown" if step.entries else "unfinished"
    if state == "unfinished" or _marks(step) or any(_lacking(step)) or any(bare_parts(step)):
        return "unfinished"
    if state == "complete":
        return state
    parts = [sub_folder(step, name) for name in step.folders() if is_part(name)] if levels else []
    states = {step_state(part, levels - 1) for part in parts if part is not None}
    if "unfinished" in states:
        return "unfinished"
    return "complete" if "complete" in states else "unknown"


def unfinished_marks(folder: Folder, blocks: bool = False) -> list[Problem]:
    """The marks by which frameworks say that a save runs or was broken off; `blocks` where nothing else was read."""
    by_name = is_unfinished_name(folder.name)
    why = "the writer renames the folder last" if by_name else "the writer removes this mark last"
    hint = other_step(folder) or "wait for the save to finish, or use an earlier checkpoint"
    return [
        Problem("incomplete", name, f"{name} says that this save never finished", why=why, hint=hint, blocks=blocks)
        for name in _marks(folder)
    ]


def _marks(folder: Folder) -> list[str]:
    """The marks of an unfinished save that are there, printable."""
    return sorted({name for mark in world().unfinished if (name := _mark(folder, mark))})


def _mark(folder: Folder, mark: Mark) -> str:
    """The mark, printable, where it is there; "" otherwise."""
    try:
        if mark.where == "inside":
            return printable(mark.file) if any(place.has(mark.file) for place in _up_to_step(folder)) else ""
        if mark.where == "name":
            return printable(folder.name) if _is_named_by(mark, folder.name) else ""
        step = folder.parent if folder.name in mark.above else folder
        if step is None or not (step is not folder or mark.only.fullmatch(step.name)):
            return ""  # nothing around it is listed for this
        name = mark.file.replace("{step}", step.name)
        return printable(name) if step.parent is not None and step.parent.has(name) else ""
    except CkptlintError:
        return ""


def is_unfinished_name(folder: str) -> bool:
    """Whether a folder of this name is one that a framework renames at the end of a save, and no resume takes before.

    >>> is_unfinished_name("step_30.tmp"), is_unfinished_name("step_30")
    (True, False)
    """
    return any(mark.where == "name" and _is_named_by(mark, folder) for mark in world().unfinished)


def _is_named_by(mark: Mark, name: str) -> bool:
    return name.endswith(mark.file) and mark.only.fullmatch(name) is not None


def missing_parts(folder: Folder) -> list[Problem]:
    """A file written last that is lost or names what the folder lacks, parts without weights, what older steps have."""
    lacking, bare = list(_lacking(folder)), list(bare_parts(folder))
    whole = folder if folder.parent is None else folder.parent.sub(folder.name)  # a view hides other models
    files, holders = lacking_files(whole, _steps_before(folder))
    files = [name for name in files if name not in {label for label, *_ in lacking}]
    hollow = _hollow(folder)
    advice = other_step(folder) if lacking or bare or files or hollow else ""
    hint = advice or "copy it from where it was written, or use another step"
    problems = [Problem("incomplete", label, sentence, why=why, hint=hint) for label, sentence, why in lacking]
    if files:
        odd = whole.entries.strange
        names = [f"file {name} (it is {odd[name]})" if name in odd else name for name in files]
        sentence = f"the step has no {join_words(names, 'or')}, which {holders}"
        why = "a load fails, or a resume goes on without it and says so at most in a log"
        copied = "copy what is missing from where it was written, or ignore this if it is no longer saved"
        lost = Problem("incomplete", files[0], sentence, why=why, hint=advice or copied, outside_checkpoint=True)
        problems.append(lost)
    scheduler = _without_optimizer(folder)
    if scheduler and not any("optim" in name for name in files):
        steps = step_number(folder.name) or 0 if folder.has(_TRAINER) else 0  # accelerate may count saves
        lack = "no file or folder of the step holds an optimizer"
        problems.append(optimizer_never_written(scheduler, steps, lack))
    for tracker in world().trackers if step_number(folder.name) is not None else ():
        named = folder.short_text(tracker.file) if folder.has(tracker.file) else ""
        if tracker.holds == "folder" and step_number(named) is not None and named not in folder.folders():
            sentence = f"{tracker.file} names {printable(named)}, and no such folder is in the step"
            why = "a resume of the engine looks for its optimizer and its weights there"
            problems.append(Problem("incomplete", tracker.file, sentence, why=why, hint=hint, outside_checkpoint=True))
    for name in hollow:
        why = "a save makes a part's folder to write into it, so the save or the copy lost what it held"
        sentence = f"the folder {name} is empty"
        problem = Problem("incomplete", name, sentence, why=why, hint=hint, outside_checkpoint=True, of_empty_part=True)
        problems.append(problem)
    for part in bare:
        sentence = f"{part.name} holds the configuration of {part.model} and no weights"
        why = f"{part.named_by}, so the save or the copy lost the weights of this part"
        hint = advice or "copy the weights from where they were written"
        problems.append(Problem("incomplete", part.name, sentence, why=why, hint=hint))
    return problems


def _without_optimizer(step: Folder) -> str:
    """The scheduler that transformers' Trainer or accelerate saved after a step without an optimizer; "" for none.

    Source: transformers 5.23: Trainer._save_optimizer_and_scheduler writes both or none; accelerate 1.15:
    save_accelerator_state; those of FSDP and DeepSpeed are folders, `optimizer_0`, `global_step10`, `pytorch_model`
    """
    if step.is_one_file or not step_number(step.name):
        return ""
    scheduler = next((name for name in ("scheduler.pt", "scheduler.bin") if step.has(name)), "")
    if not scheduler or step.has(_TRAINER) != (scheduler[-1] == "t"):
        return ""
    names = (*step.files_beside(), *step.entries.strange, *step.folders())
    is_there = any("optim" in name or step_number(name) is not None for name in names)
    return "" if is_there or "pytorch_model" in step.folders() else scheduler


def _hollow(step: Folder) -> list[str]:
    """The folders of parts in which nothing lies, printable, of a step that is not whole by itself."""
    if step.is_one_file or not (is_part(step.name) or step_number(step.name) is not None):
        return []
    if (recognised := recognise(step)) is not None and recognised.layout.state(step) == "complete":
        return []
    return [printable(name) for name in step.folders() if is_part(name) and _is_empty(step, name)]


def _is_empty(step: Folder, name: str) -> bool:
    sub = sub_folder(step, name)
    return sub is not None and not (sub.entries or sub.folders())


def lacking_files(step: Folder, older: Iterable[Folder], kinds_of: int = 1) -> tuple[list[str], str]:
    """The files that a step lacks beside older ones of its kind, printable, and who has them, as the end of a sentence.

    One older step (the nearest come first) is enough for a kind of state, for a mark, a model's configuration or a
    whole folder of known state, and for a model of which only an export is left; `kinds_of` steps say which kinds there
    are. Any other file must be in all of several older steps. Steps whose save did not finish say nothing.
    """
    try:
        near = islice(older, _OLDEST)
        finished = [*islice((folder for folder in near if step_state(folder) != "unfinished"), _OLDER)]
        if not finished:
            return [], ""  # the step is not listed again for nothing
        there = _files_of_state(step)
        kinds = {*map(_kind, there.values())}
        for folder in finished[:kinds_of]:
            before = _files_of_state(folder)
            lost = [name for name in before.values() if (kind := _kind(name)) and kind not in kinds]
            if lost := lost or _model_beside_export(there, before):
                return sorted(map(printable, lost)), f"{printable(folder.name)} has"
        first, *others = map(_files_of_state, finished)
        beside = first.values()
        # Of Megatron-Core: an export, which has no `.metadata`, needs no `metadata.json`. Beside that the common state
        # is `common.pt` or, from 0.19 on, an entry of `.metadata`, which `readers.megatron.missing_marks` looks for.
        is_judged_alone = {CONFIG_FILE: not step.has(METADATA), COMMON_FILE: step.has(CONFIG_FILE)}
        lost = [
            name
            for pattern, name in first.items()
            if pattern not in there
            and all(pattern in names for names in others)
            and (others or _is_in_all(name, beside) or _is_of_lost_folder(name, step, beside))
            and not is_judged_alone.get(name)
        ]
        holders = "all older steps have" if others else f"{printable(finished[0].name)} has"
        return sorted(map(printable, lost)), holders
    except CkptlintError:
        return [], ""


def _files_of_state(step: Folder) -> dict[str, str]:
    """What the names of one thing share in all steps -> a file of state in the step or a folder of it."""
    inner = [name for name in step.folders() if not (holds_no_state(name) or step_number(name) is not None)]
    subs = [(name, sub_folder(step, name)) for name in inner] if step.is_near else []
    names = [*step.files_beside(), *(f"{name}/{file}" for name, sub in subs if sub for file in sub.files_beside())]
    return {_NUMBERS.sub("0", _SHARDED.sub("", name)): name for name in names if _is_of_state(name)}


def _is_of_state(path: str) -> bool:
    """Whether a file is of what trainers write with each save: no text, log, code or settings that a run may drop.

    But for a model's configuration, without which nothing builds the model, and that of a Megatron-Core save. Nor
    metadata of a format: the last step of a run may be an export.
    """
    name = path.rpartition("/")[2]
    family = family_of(name)
    is_state = family is None or family.content != "other" or family.name in ("mark", "checksums") or _is_config(path)
    return is_state and name != METADATA and RANK_METADATA.fullmatch(name) is None


def _kind(path: str) -> str:
    """The kind of state that a file beside the model holds by its name; "" for all else."""
    family = None if "/" in path else family_of(path)
    return "" if family is None or family.content == "other" or family.part == "model" else family.name


def _model_beside_export(there: dict[str, str], before: dict[str, str]) -> list[str]:
    """The weights that lie beside the state of an older step, where a step has that state and weights in exports alone.

    No resume reads an export. That a step has no weights at all is said by `loaders.step_parts.lost_model`. A new file
    beside the state may hold them under another name.
    """
    beside = [pattern for pattern in there if "/" not in pattern]
    folders = {path.rpartition("/")[0] for path in there.values() if _holds_weights(path)}
    if not folders or "" in folders or not beside or any(pattern not in before for pattern in beside):
        return []
    if any(f"{folder}/{CONFIG}" not in there.values() for folder in folders):
        return []
    return [path for path in before.values() if "/" not in path and _holds_weights(path)]


def _holds_weights(path: str) -> bool:
    family = family_of(path.rpartition("/")[2])
    return path.endswith(".safetensors") or (family is not None and family.part == "model")


def _is_in_all(path: str, beside: Iterable[str]) -> bool:
    """Whether a run whose one step has the file writes it with all: a mark, a configuration.

    The configuration beside weights in a folder of theirs is part of an export, which somebody makes of one step,
    unless the folder has the mark of a finished save.
    """
    family, folder = family_of(path), path.rpartition("/")[0]
    others = [name.removeprefix(f"{folder}/") for name in beside if name.startswith(f"{folder}/")]
    is_marked = any(known.file in others for known in world().written_last)
    is_export = folder != "" and not is_marked and any(not _is_config(name) for name in others)
    return (_is_config(path) and not is_export) or (family is not None and family.name == "mark")


def _is_of_lost_folder(path: str, step: Folder, beside: Iterable[str]) -> bool:
    """Whether a file is state by its name and lies in a folder of a step's state that another step lacks, or has empty.

    No export, which somebody makes of one step, and no part, which is compared by itself. A folder of results or of
    unknown files may be written now and then.
    """
    folder, _, name = path.rpartition("/")
    if not folder or is_part(folder) or (folder in step.folders() and not _is_empty(step, folder)):
        return False
    is_export = any(_holds_weights(file) for file in beside if file.startswith(f"{folder}/"))
    family = family_of(name)
    return family is not None and family.content == "pickle" and not is_export and f"{folder}/{CONFIG}" not in beside


def _is_config(path: str) -> bool:
    return path.rpartition("/")[2] == CONFIG or path == CONFIG_FILE


def _lacking(folder: Folder) -> Iterator[tuple[str, str, str]]:
    """(what is missing, where that is known from as a sentence, why that matters)."""
    for known in world().written_last:
        if folder.is_one_file or not known.only.fullmatch(folder.name):
            continue  # of a file that is named by itself nothing else is in view
        if known.file in folder.entries.strange or known.file in folder.folders():
            continue  # reported with the step's files
        if not folder.has(known.file):
            why = "the writer writes it last, so the save or the copy never finished"
            there = [path for path in known.beside if _lies_below(folder, path)]
            before = next(_steps_before(folder), None) if there and known.by_run else None
            if there and (not known.by_run or (before is not None and before.has(known.file))):
                too = f", and {printable(before.name)} has one" if before is not None else ""
                yield known.file, f"{known.file} is missing beside {join_words(there)}{too}", why
            continue
        for part in known.parts:
            if not _lies_below(folder, part):
                why = "the writer writes both with every save, and a resume reads each"
                yield part, f"{part} is missing beside {known.file}", why
        parts = _stated(folder, known).get(known.entries)
        for name, stated in parts.items() if isinstance(parts, dict) else ():
            path = stated.get(known.path) if isinstance(stated, dict) else None
            if isinstance(path, str) and is_safe(path) and not _lies_below(folder, path):
                label = printable(path)
                sentence = f"{known.file} names {printable(str(name))} in {label}, and nothing lies there"
                yield label, sentence, "a load reads it from there, so the save lost a part, or the copy left it out"


def stated_world(folder: Folder) -> AxisSize | None:
    """How many ranks wrote the step, as the file that is written last says; None where none does."""
    for known in world().written_last:
        if known.ranks and known.only.fullmatch(folder.name) and folder.has(known.file):
            stated: Any = _stated(folder, known)
            for key in known.ranks:
                stated = stated.get(key) if isinstance(stated, dict) else None
            if isinstance(stated, int) and 0 < stated < _MOST_RANKS and stated is not True:
                return AxisSize(stated, known.file)
    return None


def _stated(folder: Folder, known: WrittenLast) -> dict[str, Any]:
    """What such a file of JSON states; {} for others and a damaged one, which is reported with the step's files."""
    return read_json(folder, known.file, _LAST_FILE_LIMIT)[0] if known.entries or known.ranks else {}


def _steps_before(folder: Folder) -> Iterator[Folder]:
    """The steps of the same run before this one that are folders named alike, the nearest first."""
    number, parent = step_number(folder.name), folder.parent
    with suppress(CkptlintError):
        if number is not None and parent is not None:
            yield from (parent.sub(step.name) for step in older_steps(parent, folder.name, number))


def _lies_below(folder: Folder, path: str) -> bool:
    """Whether a file, or a folder that is not empty, is at a relative path."""
    *above, last = path.rstrip("/").split("/")
    if (around := folder_below(folder, above)) is None:
        return False
    below = folder_below(around, [last])
    return bool(below.entries) if below is not None else around.has(last)


def _up_to_step(folder: Folder) -> Iterator[Folder]:
    """The folder, and those around it up to the step that it is a part of."""
    yield folder
    while is_part(folder.name) and folder.parent is not None:
        folder = folder.parent
        if not (is_part(folder.name) or step_number(folder.name) is not None):
            return
        yield folder


def other_step(folder: Folder) -> str:
    """Where to find another step, as advice; "" where the run's newest few others did not finish either."""
    *_, name = _up_to_step(folder)
    number, parent = step_number(name.name), name.parent
    if number is None or parent is None:
        return ""
    with suppress(CkptlintError):
        others = (step for step in steps_of(parent) if step.number != number)
        for step in islice(others, _STEPS_TRIED):
            there = sub_folder(parent, step.name) if step.is_folder else None
            if there is not None and step_state(there) == "complete":
                return "use another step: `ckptlint latest RUN_DIR` prints the newest that passes"
    return ""
