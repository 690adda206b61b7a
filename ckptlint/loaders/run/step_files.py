"""The files of a step beside its tensors: each is read, known by its name, or named; and what is missing there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from os.path import relpath
from pathlib import PurePath
from typing import Any

from ckptlint.errors import AccessError, CkptlintError, ForeignError, LimitError, ScriptError, UnreadableError
from ckptlint.formats.content import HEAD, FileContent, file_content, is_packed, is_pickled, pickles_in
from ckptlint.formats.pickles.safe_pickle import read_metadata, read_state
from ckptlint.formats.torch_file import TorchFile, read_torch_file, read_torch_stream
from ckptlint.formats.torch_legacy import is_tar
from ckptlint.loaders.code_beside import code_beside
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.loaders.problems import from_error, from_torch_file
from ckptlint.loaders.readers.common_state import COMMON_FILE, RUN_CONFIG
from ckptlint.loaders.readers.dcp.megatron import CONFIG_FILE
from ckptlint.loaders.readers.dcp.payload_files import renamed_files
from ckptlint.loaders.readers.torch_files import optimizer_in
from ckptlint.loaders.run.finished import missing_parts, stated_world
from ckptlint.loaders.run.steps import is_alike, steps_of, sub_folder
from ckptlint.model import Checkpoint, Problem, StepFile, StepFileState
from ckptlint.model.text import first_few, plural, printable, verb
from ckptlint.patterns import lazy_pattern
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
from ckptlint.vocabulary.litter import is_system_file
from ckptlint.vocabulary.metadata_files import METADATA, RANK_METADATA

_PLAIN_LIMIT = 64 * 1024**2
_BYTES_LIMIT = 4 * 1024**3  # that are read of all these files together
_LEAST = 64 * 1024  # as which the smallest file counts
_NUMBERS = lazy_pattern(r"\d+")
_ZIP_END = 2**17  # bytes in which every reader looks for the end record of a zip file
_HEADS = {True: 2**14, False: 2**8}  # files of a step whose first bytes are looked at, near and over a network
_FOLDERS = {True: 2**10, False: 2**5}  # that are listed below those whose files are reported one by one
_SHOWN = 8
_RESUME = "a resume from this step reads it"
_AGAIN = "copy it again from where it was written, or use another step"
_KEPT = ("unsafe", "unread", "limit")  # kinds of problems that count whatever the file is
_PAYLOAD = ".distcp"  # many archives in one file
_TEXTS = (CONFIG_FILE, RUN_CONFIG, "config.json", "fsdp_config.json")
_READ_ELSEWHERE = (COMMON_FILE, *_TEXTS)
_LEVELS = 3  # of parts of a step inside each other, and the folder around it
_ELSEWHERE = Family("a folder elsewhere", "other", lazy_pattern(""))


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A file of the step, or a folder there, by its name in the folder where it is.

    Attributes:
        label: its path from the checkpoint, printable; of a folder whose files are not reported it ends in `/`.
        what: why it cannot be opened, in words; "" for files, and folders whose files are not reported.
        is_below: whether it is in a folder whose files are not reported one by one.
        is_read: whether a loader has read it already.
        content: what its first bytes say, where its name does not say that it is opened.
    """

    folder: Folder
    name: str
    label: str
    family: Family | None
    size: int = 0
    what: str = ""
    is_below: bool = False
    is_read: bool = False
    content: FileContent | None = None

    @property
    def is_opened(self) -> bool:
        """Whether the safe reader opens a file of this name and first bytes, here or in a loader."""
        if self.content is not None:
            return True
        if self.is_below or self.label.endswith("/"):
            return False
        if self.family is None:
            return may_be_pickle(self.name)
        return self.family.content != "other" or self.label in _READ_ELSEWHERE

    @property
    def is_wanted(self) -> bool:
        """Whether a load, or a reader of ckptlint, asks for a file of this name."""
        return self.is_opened or self.label == METADATA or (self.family is not None and not self.family.idle)

    @property
    def alike(self) -> tuple[str, str]:
        """A key that is equal for files whose names differ in numbers alone."""
        return self.folder.place, _NUMBERS.sub("0", self.name)

    @property
    def input_bytes(self) -> int:
        return max(min(self.size, _PLAIN_LIMIT), _LEAST)

    def reported(self, state: StepFileState = "unknown", step: int | None = None) -> StepFile:
        """How it is reported; as known by its name, or read by a loader, where it was not read here."""
        if state == "unknown":
            state = "read" if self.is_read else "known" if self.family is not None else "unknown"
        like = steps_like(self.folder.name) if self.family is not None and self.family.content == "json" else None
        folder_step = step_number(self.folder.name) if like is not None and like[0] == "checkpoint-" else None
        return StepFile(self.label, self.family.name if self.family else "", state, self.size, step, folder_step)


_Read = tuple[StepFile, list[Problem]]


def with_step_files(whole: CheckpointPlace, ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint with the other files of its step, and what is wrong with them or was not read.

    Each is opened in a child process of its own where reading all of them in one breaks a limit.
    """
    listed, step_files, opened, shut, late = _survey(whole, ckpt)
    read = dict(zip(opened, _read_within_limits(opened), strict=False))
    files: list[StepFile] = []
    lacks = [lack for place in whole.reports_for for lack in missing_parts(place)]
    problems = [*ckpt.problems, *lacks]
    if ckpt.format == "incomplete" and ckpt.problems and lacks:  # one loss: what is gone, and who has it
        first, *rest = ckpt.problems
        more = "; ".join(lack.message for lack in lacks)
        problems = [replace(first, message=f"{first.message}; {more}"), *rest]
    around = _run_around(whole.folder).place
    run = "" if around == whole.folder.place else around
    whole_sets = {item.alike for item, (file, _) in read.items() if file.state == "read"}
    for item in step_files:
        file, file_problems = read.get(item) or (item.reported(), [])
        files += [] if item.is_below else [file]
        # what no name says to be a pickle should be one where files beside it are that differ in a number alone
        is_foreign = file.state != "read" and item.alike not in whole_sets
        counted = [problem for problem in file_problems if not is_foreign or problem.kind in _KEPT]
        problems += [_of_run(problem) for problem in counted] if item.folder.place == run else counted
    said = {problem.file for problem in ckpt.problems}
    problems += [_unopened(item) for item in shut if item.label not in said]
    problems += _lost_links(step_files, ckpt)
    if unread := [item.label for item in opened[len(read) :]]:
        names = first_few(unread, _SHOWN)
        sentence = f"{plural(len(unread), 'file')} beside the tensors {verb(len(unread), 'was')} not read: {names}"
        why = f"those before took the {_BYTES_LIMIT // 1024**3} GiB that are read of such files together"
        problems.append(Problem("unread", unread[0], sentence, why=why, hint="pass them one by one to check them"))
    if late:
        problems.append(_not_looked_at(late))
    reported = {problem.file for problem in (*ckpt.problems, *problems)}
    problems += code_beside([(item.folder, item.name, item.label) for item in listed], reported)
    world = next((size for place in whole.reports_for if (size := stated_world(place)) is not None), None)
    topology = {**ckpt.topology, "world": world} if world is not None else ckpt.topology
    return replace(ckpt, step_files=(*ckpt.step_files, *files), problems=problems, topology=topology)


def folders_beside(step: Folder) -> list[Folder]:
    """The folders beside a step that hold more files of it, by its name; [] where what is around it cannot be listed.

    Raises AccessError where such a folder cannot be listed.
    """
    places, run = beside_step(step.name), step.parent
    try:
        inside = run.folders() if places and run is not None else []
    except CkptlintError:
        inside = []
    around = [place for name in places if name in inside and run is not None and (place := sub_folder(run, name))]
    return [sub for place in around if step.name in place.folders() and (sub := sub_folder(place, step.name))]


def _survey(whole: CheckpointPlace, ckpt: Checkpoint) -> tuple[list[_File], ...]:
    """What is beside the tensors of a checkpoint, apart from what the loaders took.

    All files and folders; those of the step, with those below folders that start as pickles do; of them those to read
    here, known names first, for which the bytes always last, and those that cannot be opened; what was not looked at:
    files, and folders below those whose files are not reported one by one.
    """
    # what the loaders read, beside safetensors too; `_listed` leaves out plain payload of the folder itself
    pairs = zip(ckpt.files.names, ckpt.files.referenced.tolist(), strict=True)
    unclaimed = [name for name, is_claimed in pairs if not is_claimed and name.endswith(_PAYLOAD)]
    taken = {name for name in ckpt.files.names if not is_plain(name)}.difference(unclaimed)
    taken |= {METADATA}.difference(whole.folder.entries.strange)
    taken |= {ckpt.index.file} if ckpt.index else set()
    unlisted = whole.folder.entries.positions([*ckpt.files.names]) < 0  # links are; what they lead to is payload too
    named = (name for name, is_link in zip(ckpt.files.names, unlisted.tolist(), strict=True) if is_link)
    taken |= {target for name in named if "/" not in name and (target := whole.folder.inner_target(name))}
    taken |= {f"{name.rpartition('/')[0]}/" for name in taken if "/" in name}
    is_dcp = not (ckpt.is_safetensors or ckpt.storages is not None)
    taken |= {*renamed_files(whole.folder, ckpt.files, ckpt.records).values()} if is_dcp else set()  # PAY003 names them
    read = {*_READ_ELSEWHERE, *(["train_state.pt"] if is_dcp else []), *([ckpt.config.file] if ckpt.config else [])}
    listed = [*_files_of(whole)]
    plain = [name for name in unclaimed if is_plain(name) and whole.folder.has(name)]  # rules of payload report them
    listed += [_File(whole.folder, name, name, None, whole.folder.size(name), is_below=True) for name in plain]
    below = [*_below(listed, whole)]
    all_files = [
        replace(item, is_read=item.label in read and not item.what)
        for item in [*listed, *below]
        # of a DCP checkpoint a loader has read the metadata, that of single ranks too
        if not {item.label, f"{item.label}/"} & taken and not (is_dcp and RANK_METADATA.fullmatch(item.label))
    ]
    files, late = _with_content(all_files)
    wanted = [item for item in files if item.is_opened]
    shut = {item: None for item in files if item.what and item.is_wanted}
    shut |= {item: None for item in wanted if item.folder.stat(item.name)[0] not in READABLE}
    opened = [item for item in wanted if (item.content or not item.is_read) and item not in shut]
    opened.sort(key=lambda item: item.family is None or item.content is not None)
    return all_files, files, opened, [*shut], late + [item for item in below if item.label.endswith("/")]


def _files_of(whole: CheckpointPlace) -> Iterator[_File]:
    """The files of the folders that a checkpoint accounts for, and of folders in them that are not reported themselves.

    Folders whose files are not reported are named: those further below, of other steps, of logs and code, behind links.
    """
    claimed, known = whole.claimed, whole.claimed | whole.around_claimed
    for place in whole.reports_for:
        above = relpath(place.place, whole.folder.place)
        prefix = "" if above == "." else f"{above}/"
        yield from _listed(place, prefix, place.files_beside())
        several = len(steps_of(place)) > (step_number(place.name) is not None)
        for name in place.folders():
            label = f"{prefix}{name}/"
            family, is_named_file = family_of(name), bool(PurePath(name).suffix)  # `.hydra` is a folder's name
            if family is not None and (family.content != "other" or (is_named_file and not family.idle)):
                yield _File(place, name, printable(prefix + name), family, what="a folder")
            is_idle = holds_no_state(name) and place.sub(name).place not in known
            sub = None if is_idle else sub_folder(place, name)
            if sub is None:
                yield _File(place, name, printable(label), None)
            elif sub.place in claimed:
                continue
            elif _is_step(place, name) and (several or is_alike(name, place.name)):
                if sub.place not in known:
                    yield _File(place, name, printable(label), OTHER_STEP)
            else:
                yield from _listed(sub, label, sub.files())
                for inner in sub.folders():
                    if sub.sub(inner).place not in known:
                        yield _File(sub, inner, printable(f"{label}{inner}/"), None)


def _is_step(run: Folder, name: str) -> bool:
    """Whether a folder is named like a step, or is a link to one in the same run."""
    return step_number(name) is not None or step_number(run.inner_target(name)) is not None


def _listed(folder: Folder, prefix: str, names: Collection[str]) -> Iterator[_File]:
    for name in names:
        yield _File(folder, name, printable(prefix + name), family_of(name), folder.entries[name].size)
    for name, what in folder.entries.strange.items():
        yield _File(folder, name, printable(prefix + name), family_of(name), what=what)


def _is_of_checkpoint(item: _File, whole: CheckpointPlace) -> bool:
    """Whether a link out of a folder may lead to state of the checkpoint alone, not to its run, to logs or code."""
    place, run = item.folder, _run_around(whole.folder)
    accounted = {folder.place for folder in whole.reports_for} - {whole.folder.place}
    is_run = place.place in accounted and step_number(place.name) is None and bool(steps_of(place))
    leads_back = PurePath(place.escapes_to(item.name)).is_relative_to(run.real)
    return not (is_run or leads_back or any(map(holds_no_state, item.label.split("/"))))


def _of_run(problem: Problem) -> Problem:
    """What is wrong with a file beside the steps, which load without it."""
    why = "it lies beside the steps, which load without it"
    hint = "copy it again from where it was written, or delete it"
    return replace(problem, why=why, hint=hint, of_run=True) if problem.kind == "unreadable" else problem


def _run_around(folder: Folder) -> Folder:
    """The run of a step, or of a part of one; any other folder itself."""
    step: Folder | None = folder
    for _ in range(_LEVELS):
        if step is not None and step_number(step.name) is None:
            step = step.parent
    run = None if step is None or step_number(step.name) is None else step.parent
    return folder if run is None else run


def _below(files: list[_File], whole: CheckpointPlace) -> Iterator[_File]:
    """The files in folders whose files are not reported one by one, the nearest first; and the folders passed over."""
    queue = deque(item for item in files if item.label.endswith("/") and item.family is None)
    listed = 0
    while queue:
        item = queue.popleft()
        folder = item.folder.sub(item.name)
        if item.folder.escapes_to(item.name):
            if _is_of_checkpoint(item, whole):
                label, what = item.label.removesuffix("/"), "a link to a folder outside of the checkpoint"
                yield replace(item, label=label, family=_ELSEWHERE, what=what)
            continue
        if folder.place in whole.claimed:
            continue
        try:
            if listed == _FOLDERS[folder.is_near]:
                raise AccessError
            listed += 1
            names, inner = folder.files(), folder.folders()
        except AccessError:
            yield replace(item, is_below=True)
            continue
        for name in names:
            yield _File(folder, name, item.label + printable(name), None, folder.entries[name].size, is_below=True)
        queue += [_File(folder, name, f"{item.label}{printable(name)}/", None) for name in inner]


def _with_content(files: list[_File]) -> tuple[list[_File], list[_File]]:
    """The same files, of those below folders the ones that a loader may unpickle; and those not looked at.

    Those that are named like such a file and are empty, start with zeros or are of no known content are among them, as
    files of the step.
    """
    items = [item for item in files if not item.is_opened or item.label in _TEXTS]
    hollow = {item for item in items if item.is_below and not item.size and may_be_pickle(item.name)}
    items = [item for item in items if item.size]
    items.sort(key=lambda item: (item.name.endswith(_PAYLOAD), item.is_below, item.family is not None))
    most = _HEADS[items[0].folder.is_near] if items else 0
    late, contents = items[most:], dict[_File, FileContent | None]()
    for folder, group in groupby(items[:most], lambda item: item.folder):
        members = list(group)
        for item, head in zip(members, folder.heads([item.name for item in members], HEAD), strict=True):
            if head is None:
                late.append(item)
            else:
                content = file_content(head) or ("archive" if item.name.endswith(".npz") else None)
                is_record = item.name.endswith(_PAYLOAD) and content in ("archive", "tar")  # of another save
                contents[item] = None if is_record else content
                if content is None and item.is_below and may_be_pickle(item.name):
                    hollow |= {item} if _says_pickle(item) or not head.strip(b"\0") else set()
    looked = (
        replace(item, content=contents.get(item), is_below=item.is_below and item not in hollow) for item in files
    )
    return [item for item in looked if item.content or not item.is_below], late


def _unopened(item: _File) -> Problem:
    what = item.what or "gone since the folder was listed"
    sentence = f"{item.label} is {what}, so ckptlint did not read it"
    why = f"{_RESUME}, and nobody knows what it finds there"
    if item.family is _ELSEWHERE:
        why = "nobody knows whether state of this step lies there, or code that a load runs"
    return Problem("unread", item.label, sentence, why=why)


def _lost_links(files: list[_File], ckpt: Checkpoint) -> Iterator[Problem]:
    """That links lead nowhere which are numbered as the files of a model are, or called as its index is."""
    if not (ckpt.is_safetensors or ckpt.storages is not None):  # the metadata says which files there are
        return
    alike = {_NUMBERS.sub("0", name) for name in ckpt.files.names if _NUMBERS.search(name)}
    for item in files:
        is_index = item.name.endswith(".index.json") and ckpt.index is None and len(ckpt.files) > 1
        if item.what and (is_index or item.alike[1] in alike) and (lost := item.folder.lost_link(item.name)):
            hint = "download it again, or copy with links followed"
            yield Problem("incomplete", item.label, lost, why="a load of the model fails or misses it", hint=hint)


def _not_looked_at(late: list[_File]) -> Problem:
    """What is reported of files that are too many: a verdict without those of unknown names is incomplete."""
    names = [item.label for item in late]
    is_open = any(item.family is None and (not item.is_below or may_be_pickle(item.name)) for item in late)
    folders = sum(name.endswith("/") for name in names)
    counts = ((len(names) - folders, "file"), (folders, "folder"))
    what = " and ".join(plural(count, noun) for count, noun in counts if count)
    sentence = f"{what} beside the tensors {verb(len(names), 'was')} not looked at: {first_few(names, _SHOWN)}"
    why = "they are too many or cannot be read, and nobody knows whether one of them is a pickle"
    return Problem("unread" if is_open else "note", names[0], sentence, why=why)


def _read_within_limits(opened: list[_File]) -> list[_Read]:
    """What the files say, in their order, up to the one with which the bytes for all of them are used up."""
    if not opened:
        return []
    try:
        size = min(sum(item.input_bytes for item in opened), _BYTES_LIMIT)
        return isolated(partial(_read_all, opened, 0), size)[0]
    except LimitError:
        read: list[_Read] = []
        spent = 0
        for item in opened:
            if spent > _BYTES_LIMIT:
                break
            try:
                content, spent = isolated(partial(_read_all, [item], spent), item.input_bytes)
                read += content
            except LimitError as error:
                read.append((item.reported(), [from_error(error, item.label, why=_RESUME)]))
                spent += item.input_bytes
        return read


def _read_all(files: list[_File], spent: int) -> tuple[list[_Read], int]:
    """What the files say, and how many bytes were spent then, of which `spent` were before."""
    read: list[_Read] = []
    for item in files:
        if spent > _BYTES_LIMIT:
            break
        before = item.folder.bytes_read
        read.append(_read(item))
        spent += max(item.folder.bytes_read - before, _LEAST)
    return read, spent


def _read(item: _File) -> _Read:
    """What a file says, and what is wrong with it; one whose name says nothing need not be a pickle."""
    is_open = item.content is not None or item.family is None or item.family.content == "perhaps pickle"
    try:
        if not is_open and item.family is not None and item.family.content == "json":
            document, error = read_json(item.folder, item.name, _PLAIN_LIMIT)
            if error is not None:
                raise error if item.size else UnreadableError("is empty (0 bytes)", 0)
            return item.reported("read", _step(item, document)), []
        files, is_inside = _pickled(item) if is_open else ([_torch_file(item)], False)
    except _NotToItsEndError as error:
        is_pickle = item.content in ("pickle", "perhaps pickle", None)
        kind = "starts as a pickle does" if is_pickle else "may hold pickles"
        sentence = f"{item.label} {kind} and was not read to its end: it {error}"
        problem = Problem("unread", item.label, sentence, why=_RESUME)
        return item.reported(), [] if _is_partial(item, error) else [problem]
    except UnreadableError as error:
        kinds = (ForeignError, ScriptError)
        is_other = is_open and (isinstance(error, kinds) or not may_be_pickle(item.name))
        hint = "" if isinstance(error, LimitError) else _AGAIN
        problem = from_error(error, item.label, hint=hint, why=_RESUME)
        if is_other and isinstance(error, ForeignError) and _says_pickle(item):
            problem = replace(problem, kind="unread", hint="")
        return item.reported("unknown" if is_other else "read"), [problem]
    if not files:
        return item.reported(), []
    root = files[-1].root
    # nothing else is opened by that name, so the state is not packed in another file
    is_optimizer = item.family is not None and item.family.name == "optimizer state"
    made = optimizer_in(item.folder, item.name, item.label, files[-1], root) if is_optimizer else None
    optimizer, step = made or (None, _step(item, root))
    # of what is inside nobody compares checksums
    file = replace(item.reported("unknown" if is_inside else "read", step), optimizer=optimizer)
    problems = [problem for torch_file in files for problem in from_torch_file(torch_file, item.label, why=_RESUME)]
    return file, [replace(problem, blocks=False) for problem in problems]


def _says_pickle(item: _File) -> bool:
    """Whether a file is called as pickles are; one whose ending is that of any data too must be packed besides."""
    is_any = item.name.lower().endswith(".bin")
    return may_be_pickle(item.name) and not (is_any and not is_packed(item.folder.read_range(item.name, 0, HEAD)))


class _NotToItsEndError(UnreadableError):
    """A file that begins as a pickle could not be read to its end."""


def _pickled(item: _File) -> tuple[list[TorchFile], bool]:
    """What the pickles in a file hold, [] where it holds none; and whether they are packed or in arrays of objects.

    Raises _NotToItsEndError where reading it to its end fails or takes too much, UnreadableError for a false name.
    """
    folder, name = item.folder, item.name
    head = folder.read_range(name, 0, HEAD)
    content, is_known = item.content or file_content(head), item.content is not None and not _says_pickle(item)
    try:
        if content == "perhaps pickle" and not is_pickled(folder.read_range(name, 0, _PLAIN_LIMIT), item.size):
            content = "tar" if is_tar(head) else "packed"  # which may start with the same bytes
        if content in ("array", "packed", "tar"):
            inside = _inside(item, content)
            if inside or content == "array" or is_known:
                return inside, True
    except UnreadableError as error:
        raise _NotToItsEndError(str(error), error.position) from None
    if content == "perhaps pickle" and item.size > _PLAIN_LIMIT:
        raise _NotToItsEndError(f"has {item.size:,} bytes, the limit is {_PLAIN_LIMIT:,}")
    try:
        whole = _torch_file(item)
        return [*(_inside(item, content) if content == "archive" else []), whole], False
    except (ScriptError, _NotToItsEndError):
        raise
    except UnreadableError as error:
        is_foreign = isinstance(error, ForeignError)
        if content == "archive" and is_foreign and ((inside := _inside(item, content)) or is_known):
            return inside, True  # a zip file of something else
        is_foreign = is_foreign or content == "packed"
        if content in ("pickle", "perhaps pickle") or (item.content is not None and not is_foreign):
            raise _NotToItsEndError(str(error), error.position) from None
        raise (ForeignError(f"is no pickle: it {error}") if content == "packed" else error) from None


def _inside(item: _File, content: FileContent) -> list[TorchFile]:
    """What the pickles inside a container hold; up to one that cannot be read, where those before are refused.

    Raises _NotToItsEndError where not all of it can be read.
    """
    inside: list[TorchFile] = []
    try:
        with item.folder.open(item.name) as file:
            for pickled in pickles_in(content, file, _PLAIN_LIMIT):
                try:
                    inside.append(read_torch_stream(pickled))
                except ForeignError:
                    pickled.seek(0)
                    if file_content(pickled.read(HEAD)) != "archive":
                        raise
    except UnreadableError as error:
        if not any(torch_file.unpickled.refused for torch_file in inside):
            raise _NotToItsEndError(str(error), error.position) from None
    return inside


def _torch_file(item: _File) -> TorchFile:
    family = family_of(item.name)
    is_metadata = item.name == METADATA or (family is not None and family.name == "metadata of another save")
    return read_torch_file(item.folder, item.name, read_metadata if is_metadata else read_state)


def _is_partial(item: _File, error: UnreadableError) -> bool:
    """Whether a file is by its name a copy that did not end, and by its bytes one that no loader reads to its end."""
    if not is_system_file(item.name):
        return False
    tail = item.folder.read_range(item.name, max(item.size - _ZIP_END, 0), _ZIP_END)
    return error.position == item.size or (item.content == "archive" and b"PK\5\6" not in tail)


def _step(item: _File, state: Any) -> int | None:
    """The step in the state of a trainer or a scheduler.

    Source: lightning 2.6 `meta.pt`, OLMo-core 3.0 `train/rankN.pt`, VeOmni `extra_state_rank_N.pt`: `global_step`;
    torch.optim.lr_scheduler: `last_epoch`
    """
    name = item.family.step if item.family else "global_step"
    step = state.get(name) if name and isinstance(state, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
