"""The files of a step beside its tensors: each is read, known by its name, or named; and what is missing there."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby, islice
from os.path import relpath
from typing import Any

from ckptlint.errors import AccessError, CkptlintError, ForeignError, LimitError, UnreadableError
from ckptlint.formats.content import HEAD, FileContent, file_content, is_pickled, pickles_in
from ckptlint.formats.pickles.safe_pickle import read_metadata, read_state
from ckptlint.formats.torch_file import TorchFile, number_in, ranges_of, read_torch_bytes, read_torch_file
from ckptlint.loaders.code_beside import code_beside
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.layouts import Found
from ckptlint.loaders.optimizer_state import optimizer_file
from ckptlint.loaders.problems import from_error, from_torch_file
from ckptlint.loaders.readers.common_state import COMMON_FILE, RUN_CONFIG
from ckptlint.loaders.readers.megatron import CONFIG_FILE
from ckptlint.loaders.run.finished import missing_parts, stated_world
from ckptlint.loaders.run.steps import is_alike, steps_of, sub_folder
from ckptlint.model import Checkpoint, Problem, StepFile, StepFileState
from ckptlint.model.lost_files import by_node
from ckptlint.model.text import plural, printable
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.listing import is_plain
from ckptlint.vocabulary.frameworks import (
    OTHER_STEP,
    Family,
    beside_step,
    family_of,
    holds_no_state,
    may_be_pickle,
    step_number,
    steps_like,
)
from ckptlint.vocabulary.litter import is_litter
from ckptlint.vocabulary.metadata_files import METADATA, PAYLOAD_RANK, RANK_METADATA, UNFINISHED_METADATA

_PLAIN_LIMIT = 64 * 1024**2
_BYTES_LIMIT = 4 * 1024**3  # that are read of all these files together
_LEAST = 64 * 1024  # as which the smallest file counts
_NUMBERS = re.compile(r"\d+")
_ZIP_END = 2**17  # bytes in which every reader looks for the end record of a zip file
_HEADS = {True: 2**14, False: 2**8}  # files of a step whose first bytes are looked at, near and over a network
_FOLDERS = {True: 2**10, False: 2**5}  # that are listed below those whose files are told one by one
_SHOWN = 8
_LISTED = 2**16
_APART = 2.0  # seconds between the files of one save and those of a later one, at least
_MOMENTS = 64  # parameters of an optimizer whose steps are read
_RESUME = "a resume from this step reads it"
_KEPT = ("unsafe", "unread", "limit")  # kinds of problems that count whatever the file is
_PAYLOAD = ".distcp"  # many archives in one file
_TEXTS = (CONFIG_FILE, RUN_CONFIG, "config.json", "fsdp_config.json")
_READ_ELSEWHERE = (COMMON_FILE, *_TEXTS)


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of the step.

    Attributes:
        folder: where it lies.
        name: its name there.
        label: its path from the checkpoint, printable; of a folder whose files are not told it ends in `/`.
        what: what lies there that cannot be opened, in words; "" for files, and folders whose files are not told.
        is_below: whether it lies in a folder whose files are not told one by one.
        content: what its first bytes say, where its name does not tell that it is opened.
    """

    folder: Folder
    name: str
    label: str
    family: Family | None
    size: int = 0
    what: str = ""
    is_below: bool = False
    content: FileContent | None = None


_Read = tuple[StepFile, list[Problem]]


def with_step_files(whole: Found, ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint with the other files of its step, and what is wrong with them or was not read.

    Each is opened in a child process of its own where reading all of them in one breaks a limit.

    Raises:
        AccessError: the operating system refused a read.
    """
    # what the loaders read, beside safetensors too; `_listed` leaves out plain payload of the folder itself
    parts = {name for name in ckpt.files.names if not is_plain(name)} | {METADATA}
    parts |= {ckpt.index.file} if ckpt.index else set()
    is_dcp = not (ckpt.is_safetensors or ckpt.storages is not None)
    names = (*_READ_ELSEWHERE, "train_state.pt") if is_dcp else _READ_ELSEWHERE
    names = (*names, *([ckpt.config.file] if ckpt.config is not None else []))
    parts |= {f"{name.rpartition('/')[0]}/" for name in parts if "/" in name}
    listed = [*_files_of(whole)]
    below, passed = _below(listed, whole)
    found = [item for item in listed if item.label not in parts]
    if is_dcp:  # whose metadata a loader has read, that of single ranks too
        found = [item for item in found if not RANK_METADATA.fullmatch(item.label)]
    found, late = _with_content(found, [item for item in below if item.label not in parts])
    wanted = [item for item in found if _is_opened(item)]
    shut = [item for item in wanted if item.what or item.folder.look_at(item.name)[0] not in READABLE]
    hidden = {*map(id, shut)}
    # those of known names first, for which the bytes always last
    opened = [item for item in wanted if (item.content or item.label not in names) and id(item) not in hidden]
    opened.sort(key=lambda item: item.family is None or item.content is not None)
    read = _read_within_limits(opened)
    told = {id(item): own for item, own in zip(opened, read, strict=False)}
    files, problems = (
        [],
        [*ckpt.problems, *(lack for place in whole.accounts_for for lack in missing_parts(place))],
    )
    whole_sets = {_alike(item) for item in opened[: len(read)] if told[id(item)][0].state == "read"}
    for item in found:
        file, own = told.get(id(item)) or (_told(item, _state_of(item, () if item.what else names)), [])
        file = replace(file, state="read") if item.content and item.label in names else file
        files += [] if item.is_below else [file]
        # what no name says to be a pickle should be one where files beside it are that differ in a number alone
        is_foreign = file.state != "read" and _alike(item) not in whole_sets
        problems += [problem for problem in own if not is_foreign or problem.kind in _KEPT]
    problems += [_unopened(item) for item in shut]
    if unread := opened[len(read) :]:
        problems.append(_left_out(unread))
    if late or passed:
        problems.append(_not_looked_at(late, passed))
    problems += code_beside(whole.folder)
    world = next((size for place in whole.accounts_for if (size := stated_world(place)) is not None), None)
    topology = {**ckpt.topology, "world": world} if world is not None else ckpt.topology
    return replace(ckpt, step_files=(*ckpt.step_files, *files), problems=problems, topology=topology)


def folders_beside(step: Folder) -> list[Folder]:
    """The folders beside a step that hold more files of it, by its name; [] where what lies around it cannot be listed.

    Raises:
        AccessError: such a folder cannot be listed.
    """
    places, run = beside_step(step.name), step.parent
    try:
        inside = run.folders() if places and run is not None else []
    except CkptlintError:
        inside = []
    around = [place for name in places if name in inside and run is not None and (place := sub_folder(run, name))]
    return [own for place in around if step.name in place.folders() and (own := sub_folder(place, step.name))]


def _below(found: list[_Found], whole: Found) -> tuple[list[_Found], list[str]]:
    """The files in folders whose files are not told one by one, the nearest first, and the folders passed over."""
    queue = deque(
        (item.folder.sub(item.name), item.label)
        for item in found
        if item.label.endswith("/") and item.family is None and not item.folder.outside(item.name)
    )
    files: list[_Found] = []
    passed: list[str] = []
    listed = 0
    while queue:
        folder, label = queue.popleft()
        if _is_claimed(folder.place, whole):
            continue
        try:
            if listed == _FOLDERS[folder.is_near]:
                raise AccessError
            listed += 1
            names, inner = folder.files_beside(), folder.folders()
        except AccessError:
            passed.append(label)
            continue
        files += [
            _Found(folder, name, label + printable(name), None, folder.entries[name].size, is_below=True)
            for name in names
        ]
        queue += [(folder.sub(name), f"{label}{printable(name)}/") for name in inner if not folder.outside(name)]
    return files, passed


def _with_content(found: list[_Found], below: list[_Found]) -> tuple[list[_Found], list[_Found]]:
    """The same files and those below that a loader may unpickle, by their first bytes; and those not looked at."""
    items = [item for item in [*found, *below] if item.size and not item.name.endswith(_PAYLOAD)]
    items = [item for item in items if not _is_opened(item) or item.label in _TEXTS]
    items.sort(key=lambda item: (item.is_below, item.family is not None))
    most = _HEADS[items[0].folder.is_near] if items else 0
    late, told = items[most:], dict[int, FileContent]()
    for _, group in groupby(items[:most], lambda item: id(item.folder)):
        own = list(group)
        for item, head in zip(own, own[0].folder.heads([item.name for item in own], HEAD), strict=True):
            if head is None:
                late.append(item)
            elif (content := file_content(head)) is not None:
                told[id(item)] = content
    looked = (replace(item, content=told[id(item)]) if id(item) in told else item for item in [*found, *below])
    return [item for item in looked if item.content or not item.is_below], late


def _files_of(whole: Found) -> Iterator[_Found]:
    """The files of the folders that a checkpoint accounts for, and of folders in them that are not told themselves.

    Folders whose files are not told are named: those further below, of other steps, of logs and code, behind links.
    """
    for place in whole.accounts_for:
        above = relpath(place.place, whole.folder.place)
        prefix = "" if above == "." else f"{above}/"
        yield from _listed(place, prefix, place.files_beside())
        several = len(steps_of(place)) > (step_number(place.name) is not None)
        for name in place.folders():
            label = f"{prefix}{name}/"
            if (family := family_of(name)) is not None and family.content != "other":
                yield _Found(place, name, printable(prefix + name), family, what="a folder")
            sub = None if holds_no_state(name) else sub_folder(place, name)
            if sub is None:
                yield _Found(place, name, printable(label), None)
            elif _is_claimed(sub.place, whole):
                continue
            elif step_number(name) is not None and (several or is_alike(name, place.name)):
                yield from (
                    [] if _is_claimed(f"{sub.place}/", whole) else [_Found(place, name, printable(label), OTHER_STEP)]
                )
            else:
                yield from _listed(sub, label, sub.files())
                for inner in sub.folders():
                    below = sub.sub(inner).place
                    if not _is_claimed(below, whole) and not _is_claimed(f"{below}/", whole):
                        yield _Found(sub, inner, printable(f"{label}{inner}/"), None)


def _is_claimed(place: str, whole: Found) -> bool:
    """Whether the files in a place are reported with a checkpoint; in one that ends in `/`, somewhere below it."""
    first = bisect_left(whole.claimed_places, place)
    found = whole.claimed_places[first] if first < len(whole.claimed_places) else ""
    return found.startswith(place) if place.endswith("/") else found == place


def _listed(folder: Folder, prefix: str, names: Collection[str]) -> Iterator[_Found]:
    for name in names:
        yield _Found(folder, name, printable(prefix + name), family_of(name), folder.entries[name].size)
    for name, what in folder.entries.strange.items():
        yield _Found(folder, name, printable(prefix + name), family_of(name), what=what)


def _is_opened(item: _Found) -> bool:
    """Whether the safe reader opens what is called so or starts so, here or in the loader that took it."""
    if item.content is not None:
        return True
    if item.is_below or item.label.endswith("/"):
        return False
    if item.family is None:
        return may_be_pickle(item.name)
    return item.family.content != "other" or item.label in _READ_ELSEWHERE


def _alike(item: _Found) -> tuple[str, str]:
    """What files share whose names differ in numbers alone."""
    return item.folder.place, _NUMBERS.sub("0", item.name)


def _unopened(item: _Found) -> Problem:
    what = item.what or "gone since the folder was listed"
    sentence = f"{item.label} is {what}, so ckptlint did not read it"
    return Problem("unread", item.label, sentence, why=f"{_RESUME}, and nobody knows what it finds there")


def _left_out(late: list[_Found]) -> Problem:
    names = ", ".join(item.label for item in late[:_SHOWN]) + (", ..." if len(late) > _SHOWN else "")
    sentence = f"{plural(len(late), 'file')} beside the tensors {'was' if len(late) == 1 else 'were'} not read: {names}"
    why = f"those before took the {_BYTES_LIMIT // 1024**3} GiB that are read of such files together"
    return Problem("unread", late[0].label, sentence, why=why, hint="name them one by one to have them judged")


def _not_looked_at(late: list[_Found], passed: list[str]) -> Problem:
    """What is said of files that are too many: a verdict without those of unknown names is incomplete."""
    names = [*(item.label for item in late), *passed]
    is_open = any(item.family is None and not item.is_below for item in late)
    what = " and ".join(plural(len(part), word) for part, word in ((late, "file"), (passed, "folder")) if part)
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    sentence = f"{what} beside the tensors {'was' if len(names) == 1 else 'were'} not looked at: {shown}"
    why = "they are too many or cannot be read, and nobody knows whether one of them is a pickle"
    return Problem("unread" if is_open else "note", names[0], sentence, why=why)


def _read_within_limits(opened: list[_Found]) -> list[_Read]:
    """What the files say, in their order, up to the one with which the bytes for all of them are used up."""
    if not opened:
        return []
    try:
        return isolated(partial(_read_all, opened, 0), min(sum(map(_input_bytes, opened)), _BYTES_LIMIT))[0]
    except LimitError:
        read: list[_Read] = []
        spent = 0
        for item in opened:
            if spent > _BYTES_LIMIT:
                break
            try:
                own, spent = isolated(partial(_read_all, [item], spent), _input_bytes(item))
                read += own
            except LimitError as error:
                read.append((_told(item, _state_of(item, ())), [from_error(error, item.label, why=_RESUME)]))
                spent += _input_bytes(item)
        return read


def _input_bytes(item: _Found) -> int:
    return max(min(item.size, _PLAIN_LIMIT), _LEAST)


def _state_of(item: _Found, elsewhere: Collection[str]) -> StepFileState:
    if item.label in elsewhere:
        return "read"
    return "known" if item.family is not None else "unknown"


def _told(item: _Found, state: StepFileState, step: int | None = None) -> StepFile:
    like = steps_like(item.folder.name) if item.family is not None and item.family.content == "json" else None
    folder_step = step_number(item.folder.name) if like is not None and like[0] == "checkpoint-" else None
    return StepFile(item.label, item.family.name if item.family else "", state, item.size, step, folder_step)


def _read_all(found: list[_Found], spent: int) -> tuple[list[_Read], int]:
    """What the files say, and how many bytes were spent then, of which `spent` were before."""
    told: list[_Read] = []
    for item in found:
        if spent > _BYTES_LIMIT:
            break
        folder, counts = _counted_reads(item.folder)
        told.append(_read(replace(item, folder=folder)))
        spent += max(sum(counts), _LEAST)
    return told, spent


def _counted_reads(folder: Folder) -> tuple[Folder, list[int]]:
    """The same folder, and the bytes of each read from it."""
    view, counts = copy(folder), list[int]()

    def spans(name: str, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        data = folder.spans(name, wanted)
        counts.append(sum(map(len, data)))
        return data

    view.__dict__["spans"] = spans
    return view, counts


def _read(item: _Found) -> _Read:
    """What a file says, and what is wrong with it; one whose name tells nothing need not be a pickle."""
    is_open = item.content is not None or item.family is None or item.family.content == "perhaps pickle"
    try:
        if not is_open and item.family is not None and item.family.content == "json":
            return _told(item, "read", _saved_step(item)), []
        files, is_inside = _pickled(item) if is_open else ([_torch_file(item)], False)
    except _NotToItsEndError as error:
        sentence = f"{item.label} starts as a pickle does and was not read to its end: it {error}"
        problem = Problem("unread", item.label, sentence, why=_RESUME)
        return _told(item, _state_of(item, ())), [] if _is_partial(item, error) else [problem]
    except UnreadableError as error:
        state = _state_of(item, ()) if is_open and isinstance(error, ForeignError) else "read"
        return _told(item, state), [from_error(error, item.label, why=_RESUME)]
    if not files:
        return _told(item, _state_of(item, ())), []
    root = files[-1].root
    is_optimizer = item.family is not None and item.family.name == "optimizer state"
    state = _state_of(item, ()) if is_inside else "read"  # of what is inside nobody compares checksums
    optimizer = optimizer_file(root) if is_optimizer else None
    step = _moments_step(item, files[-1]) if optimizer is not None and not is_inside else _counted(item, root)
    told = replace(_told(item, state, step), optimizer=optimizer)
    problems = [problem for found in files for problem in from_torch_file(found, item.label, why=_RESUME)]
    return told, [replace(problem, blocks=False) for problem in problems]


class _NotToItsEndError(UnreadableError):
    """What is a pickle by its first bytes could not be read to its end."""


def _pickled(item: _Found) -> tuple[list[TorchFile], bool]:
    """What the pickles in a file hold, [] where it holds none; and whether they are packed or in arrays of objects.

    Raises:
        _NotToItsEndError: it starts as one, and reading it to its end fails or takes too much.
        UnreadableError: it is not what its name promises.
    """
    folder, name = item.folder, item.name
    content = item.content or file_content(folder.read_range(name, 0, HEAD))
    try:
        if content == "perhaps pickle" and not is_pickled(folder.read_range(name, 0, _PLAIN_LIMIT), item.size):
            content = "packed"  # which may start with the same bytes
        if content in ("archive", "array", "packed"):
            with folder.open(name) as file:
                inside = [read_torch_bytes(data) for data in pickles_in(content, file, _PLAIN_LIMIT)]
            if inside or (item.content is not None and content != "archive"):
                return inside, True
    except UnreadableError as error:
        raise _NotToItsEndError(str(error), error.position) from None
    if content == "perhaps pickle" and item.size > _PLAIN_LIMIT:
        raise _NotToItsEndError(f"has {item.size:,} bytes, the limit is {_PLAIN_LIMIT:,}")
    try:
        return [_torch_file(item)], False
    except UnreadableError as error:
        is_foreign = isinstance(error, ForeignError) or content == "packed"
        if content in ("pickle", "perhaps pickle") or (item.content is not None and not is_foreign):
            raise _NotToItsEndError(str(error), error.position) from None
        if item.content is not None:
            return [], False  # a zip file of something else
        raise (ForeignError(f"is no pickle: it {error}") if content == "packed" else error) from None


def _torch_file(item: _Found) -> TorchFile:
    family = family_of(item.name)
    is_metadata = item.name == METADATA or (family is not None and family.name == "metadata of another save")
    return read_torch_file(item.folder, item.name, read_metadata if is_metadata else read_state)


def _is_partial(item: _Found, error: UnreadableError) -> bool:
    """Whether a file is by its name a copy that did not end, and by its bytes one that no loader reads to its end."""
    if not is_litter(item.name):
        return False
    tail = item.folder.read_range(item.name, max(item.size - _ZIP_END, 0), _ZIP_END)
    return error.position == item.size or (item.content == "archive" and b"PK\5\6" not in tail)


def _counted(item: _Found, root: Any) -> int | None:
    """The step in a pickled state of a trainer or a scheduler.

    Source:
        lightning 2.6 `meta.pt`, OLMo-core 3.0 `train/rankN.pt`: `global_step`; torch.optim.lr_scheduler: `last_epoch`
    """
    name = item.family.step if item.family else ""
    step = root.get(name) if name and isinstance(root, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _moments_step(item: _Found, found: TorchFile) -> int | None:
    """How many steps the parameters of an optimizer made that made the most, of the first ones.

    Source:
        torch.optim.Adam (torch 1.13 to 2.13): `step` of each parameter, a tensor of one element
    """
    states = (own.get("step") for own in found.root["state"].values() if isinstance(own, dict))
    numbers = [number_in(ranges_of(item.folder, item.name), found, step) for step in islice(states, _MOMENTS)]
    return max((number for number in numbers if number is not None), default=None)


def _saved_step(item: _Found) -> int | None:
    """The step in the JSON of a trainer's state.

    Source:
        transformers.trainer_callback.TrainerState: `global_step`, in `trainer_state.json`
    """
    if not item.size:
        raise UnreadableError("is empty (0 bytes)", 0)
    document, error = read_json(item.folder, item.name, _PLAIN_LIMIT)
    if error is not None:
        raise error
    name = item.family.step if item.family is not None and item.family.step else "global_step"
    step = document.get(name)
    return step if isinstance(step, int) and not isinstance(step, bool) else None


# ---------------------------------------------------------------- what is missing, and what else lies there


def rank_files(folder: Folder) -> list[str]:
    numbered = {name: int(match[1]) for name in folder.files_beside() if (match := RANK_METADATA.fullmatch(name))}
    return sorted(numbered, key=lambda name: numbered[name])


def lost_ranks(folder: Folder) -> tuple[str, list[Problem]]:
    """Why per-rank metadata is partial ("" when it is whole) and the problem to report for it."""
    present = {int(m[1]) for name in folder.files_beside() if (m := RANK_METADATA.fullmatch(name))}
    payload = {int(m[1]) for name in folder.files() if (m := PAYLOAD_RANK.fullmatch(name))}
    lost = max(present | payload) + 1 - len(present)
    if not lost:
        return "", []
    ranks = islice((rank for rank in count() if rank not in present), min(lost, _LISTED))
    missing = {f"__{rank}.metadata": rank for rank in ranks}
    names = ", ".join(islice(missing, _SHOWN)) + (", ..." if lost > _SHOWN else "")
    problem = Problem(
        "incomplete",
        names,
        f"{names} {'is' if lost == 1 else 'are'} missing; {plural(len(present), 'other rank')} wrote "
        f"{'its own' if len(present) == 1 else 'their own'}",
        why="with use_collectives=False each rank describes only its own chunks, so what these ranks held is lost",
        hint="copy the files again from the node of these ranks, or go back to a complete step",
        lost_files=by_node(missing, present),
    )
    return f"the metadata of {lost:,} of {lost + len(present):,} ranks is missing", [problem]


def leftover_files(folder: Folder) -> list[Problem]:
    entries, problems = folder.entries, []
    temporary = UNFINISHED_METADATA
    if temporary in entries and METADATA in entries and entries[temporary].mtime > entries[METADATA].mtime:
        sentence = f"{temporary} is newer than {METADATA}: a later save into this folder never finished"
        is_young = entries.mtime > entries[METADATA].mtime + _APART
        if is_young.any():
            why = f"its payload files replaced {'all' if is_young.all() else 'some'} of those that {METADATA} describes"
            hint = "use another step, or save again into an empty folder"
            # all of one save: torch loads them, if the layout stayed what it was
            problem = Problem("incomplete", temporary, sentence, why=why, hint=hint, beside=bool(is_young.all()))
        else:
            why = f"it replaced no payload file, so what {METADATA} describes is still there"
            problem = Problem("note", temporary, sentence, why=why)
        problems.append(problem)
    if METADATA in entries and (others := [name for name in entries.others if RANK_METADATA.fullmatch(name)]):
        name = others[0]
        problems.append(Problem("note", name, f"{name} lies beside {METADATA} and belongs to another save"))
    for name in (METADATA, COMMON_FILE):
        if folder.has(name) and folder.look_at(name)[0] == "link-outside":
            sentence = f"{name} is a link to a file outside the checkpoint"
            why = "in a model cache that is normal; elsewhere it may describe another checkpoint"
            problems.append(Problem("note", name, sentence, why=why))
    return problems
