"""Opening a path: recognise what it holds, read it safely, return the model that every rule sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickle_columns import WORTHWHILE
from ckptlint.formats.pickle_rows import Buffer
from ckptlint.formats.safe_pickle import SIZE_LIMIT, Node, Opaque, Unpickled, paused_gc, read_metadata
from ckptlint.loaders.common_state import (
    COMMON_ENTRY,
    COMMON_FILE,
    OWN_ENTRIES,
    Location,
    is_counter,
    read_claims,
    read_common,
    read_configs,
    read_objects,
)
from ckptlint.loaders.dcp import Description, describe, state_of
from ckptlint.loaders.discover import components, steps_of
from ckptlint.loaders.megatron import (
    CONFIG_FILE,
    describing_objects,
    dialect,
    missing_marks,
    read_config,
    split_objects,
)
from ckptlint.loaders.problems import from_error, from_refusals
from ckptlint.loaders.rank_files.megatron_keys import legacy_bytes
from ckptlint.loaders.rank_files.sets import input_bytes
from ckptlint.loaders.recognise import METADATA, PAYLOAD_RANK, RANK_METADATA, LayoutKind, Recognised, recognise
from ckptlint.loaders.run_folder import read_run, read_train_state
from ckptlint.loaders.safetensors import header_bytes, read_safetensors
from ckptlint.loaders.save_plans import read_plans
from ckptlint.loaders.step_files import (
    leftover_files,
    lost_ranks,
    other_step,
    rank_files,
    unfinished_marks,
    unread_beside,
    unsupported_problem,
    with_step_files,
)
from ckptlint.model import FILE_STATES, Checkpoint, Declared, FileTable, Format, Problem, RunFolder, StoredFile
from ckptlint.model.files import Names
from ckptlint.model.layout import IntArray
from ckptlint.model.text import plural, printable
from ckptlint.sandbox import isolated, one_budget
from ckptlint.storage.folder import Folder
from ckptlint.storage.listing import is_plain
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.litter import is_litter
from ckptlint.vocabulary.mesh import read_topology
from ckptlint.vocabulary.step_files import family_of

_RENAMED = "the writer renames a finished file into place, so an interrupted copy or a full disk truncated it"
_OTHER_CONTENT = "torch reads a pickle there, so another program wrote this file or a copy replaced it"
_DESCRIBES_ITSELF: Mapping[LayoutKind, Format] = {
    "safetensors": "safetensors",
    "torch": "torch",
    "verl": "verl",
    "deepspeed": "deepspeed",
    "deepspeed-universal": "deepspeed-universal",
    "megatron-legacy": "megatron-legacy",
}
"""Kinds whose files describe their own tensors, and their formats."""
_BYTECHECKPOINT = "bytecheckpoint."
_NO_METADATA = {"dangling-link": "is a broken link", "not-a-file": "is not a regular file"}
_WRITTEN_LAST = "the writer writes it last, after all payload files, so the save or the copy never finished"
_RESTORE = "restore .metadata from where it was written, or use another step"


@one_budget()
def open_checkpoint(folder: Folder, look_at_files: bool = True) -> Checkpoint:
    """Read one checkpoint folder, in a child process under limits.

    Args:
        folder: a folder that `find` returned.
        look_at_files: whether to stat payload files (depth `files`), not only read the metadata.

    Raises:
        AccessError: the operating system refused a read; damage and malice become problems instead.
        ReaderError: ckptlint itself made a mistake.
    """
    ckpt = _open(folder, look_at_files)
    times, finished = _times(folder, ckpt)
    ckpt = replace(ckpt, written=folder.newest, times=times, finished=finished)
    if folder.linked_to:
        sentence = f"{printable(folder.name)} is a link to {folder.linked_to}, outside the run"
        note = Problem("note", ckpt.metadata_file, sentence, why="a cleanup or another save there changes this step")
        ckpt = replace(ckpt, problems=[*ckpt.problems, note])
    ckpt = replace(ckpt, unseen=(*ckpt.unseen, *folder.strays))
    return with_step_files(folder, ckpt) if look_at_files else ckpt


def _times(folder: Folder, ckpt: Checkpoint) -> tuple[npt.NDArray[np.float64], float]:
    """When the payload files were written, where files of two saves may lie there; and when `.metadata` was."""
    entries = folder.entries
    finished = entries[METADATA].mtime if METADATA in entries else 0.0
    is_torn = 0 < finished < entries.newest_payload
    if not is_torn and ckpt.format not in ("dcp-safetensors", "dcp-per-rank"):
        return np.zeros(0), finished
    names = list(ckpt.files.names)
    at = entries.positions(names)
    times = np.where(at >= 0, entries.mtime[at], 0.0) if len(entries.mtime) else np.zeros(len(names))
    for row in np.flatnonzero(at < 0).tolist():
        entry = entries.others.get(names[row])
        times[row] = entry.mtime if entry is not None and not entry.is_link else 0.0  # a link has times of its own
    return times, finished


def _open(folder: Folder, look_at_files: bool) -> Checkpoint:
    found = recognise(folder)
    if not folder.entries:
        return read_checkpoint(folder, look_at_files)
    size = _metadata_bytes(folder) if found is None else LAYOUTS[found.kind].input_bytes(folder)
    try:
        return isolated(partial(read_checkpoint, folder, look_at_files), size)
    except LimitError as error:
        describes_itself = found is not None and found.kind in _DESCRIBES_ITSELF
        label = printable(found.evidence) if found and describes_itself else METADATA
        problem = from_error(error, label, blocks=True, hint=other_step(folder))
        return Checkpoint(
            folder.display,
            _DESCRIBES_ITSELF[found.kind] if found and describes_itself else "dcp",
            problems=[problem],
            readable=False,
            files=_listed(folder),
            metadata_file=label,
        )


def read_checkpoint(folder: Folder, look_at_files: bool = True) -> Checkpoint:
    """The same in this process, where a crafted file may crash, starve or stall it."""
    found = recognise(folder)
    if found is None:
        held = "holds no checkpoint" if folder.entries else "is empty"
        return _unfinished(folder, f"the newest step's folder {held}", "")
    with paused_gc():
        return LAYOUTS[found.kind].read(folder, found, look_at_files)


def _metadata_bytes(folder: Folder) -> int:
    """Bytes of the pickles that describe a DCP checkpoint."""
    inputs = [
        name for name in folder.files_beside() if name in (METADATA, COMMON_FILE) or RANK_METADATA.fullmatch(name)
    ]
    return sum(min(folder.entries[name].size, SIZE_LIMIT) for name in inputs)


def _torch_reader(kind: LayoutKind) -> Callable[[Folder, bool], Checkpoint]:
    """What reads a kind of files of torch.save; imported here, since a folder needs one of them and most need none."""
    if kind == "verl":
        from ckptlint.loaders.rank_files.verl import read_verl as read
    elif kind == "deepspeed":
        from ckptlint.loaders.rank_files.deepspeed import read_deepspeed as read
    elif kind == "deepspeed-universal":
        from ckptlint.loaders.rank_files.deepspeed_universal import read_universal as read
    elif kind == "megatron-legacy":
        from ckptlint.loaders.rank_files.megatron_legacy import read_legacy as read
    else:
        from ckptlint.loaders.rank_files.plain import read_weights as read
    return read


def _open_torch(folder: Folder, found: Recognised, look_at_files: bool) -> Checkpoint:
    ckpt = _torch_reader(found.kind)(folder, look_at_files)
    problems = ckpt.problems + unread_beside(folder) + unfinished_marks(folder)
    return replace(ckpt, run=read_run(folder), problems=problems)


def _universal_bytes(folder: Folder) -> int:
    from ckptlint.loaders.rank_files.deepspeed_universal import universal_bytes

    return universal_bytes(folder)


def _open_safetensors(folder: Folder, _found: Recognised, look_at_files: bool) -> Checkpoint:
    ckpt = read_safetensors(folder, look_at_files)
    problems = ckpt.problems + unread_beside(folder) + unfinished_marks(folder)
    return replace(ckpt, run=read_run(folder), problems=problems)


# ---------------------------------------------------------------- DCP folders


def _open_dcp(folder: Folder, found: Recognised, look_at_files: bool) -> Checkpoint:
    problems: list[Problem] = []
    names = [METADATA] if found.kind == "dcp" else rank_files(folder)
    unpickled = [(name, _read_metadata(folder, name, problems)) for name in names]
    roots = [part.root for _, part in unpickled if part is not None and part.root is not None]
    label = METADATA if found.kind == "dcp" else f"{names[0]} .. {names[-1]}"
    if roots and isinstance(roots[0], Opaque) and roots[0].module.startswith(_BYTECHECKPOINT):
        found = Recognised("unsupported", "ByteCheckpoint", METADATA)
        problems.append(unsupported_problem(found))
        return Checkpoint(folder.display, "unsupported", problems=problems, readable=False)
    described: Description | None = None
    if roots:
        try:
            described = describe(roots, label)
        except UnreadableError as error:
            if not problems:  # a refused root was reported already
                problems.append(from_error(error, label, blocks=True))
    if described is None:
        problems = [replace(p, blocks=True, hint=p.hint or other_step(folder) or _RESTORE) for p in problems]
        if any(p.kind == "unreadable" for p in problems):
            problems += unread_beside(folder)
        return Checkpoint(
            folder.display, "dcp", problems=problems, readable=False, metadata_file=label, files=_listed(folder)
        )
    return _assemble(folder, found, described, roots[0], label, problems, look_at_files)


def _assemble(
    folder: Folder,
    found: Recognised,
    described: Description,
    root: Node,
    label: str,
    problems: list[Problem],
    look_at_files: bool,
) -> Checkpoint:
    objects, byte_objects = split_objects(described.byte_records)
    config, config_problem = read_config(folder)
    format_ = dialect(described, root.name, config, folder, objects)
    keys = described.byte_records.keys()
    if config_problem and format_ == "torch_dist":
        problems.append(config_problem)
    problems += described.problems
    problems += missing_marks(format_, config, config_problem is not None, folder, keys)
    partial = ""
    if found.kind == "per-rank":
        format_ = "dcp-per-rank"
        partial, lost = lost_ranks(folder)
        problems += lost
    if found.kind == "dcp":
        problems += _unsafe_beside(folder)
    problems += unread_beside(folder) + leftover_files(folder) + unfinished_marks(folder)
    common, common_problems = read_common(folder, _locations(described, {COMMON_ENTRY, *OWN_ENTRIES}))
    values, object_problems = read_objects(folder, _locations(described, describing_objects(objects)))
    problems += common_problems + object_problems
    # over a network no record is fetched at the depths that do not ask for it
    counters = {fqn for fqn in (*keys, *described.tensors) if is_counter(fqn)} if folder.is_near else set()
    claims, claim_problems = read_claims(folder, _locations(described, counters, of_tensors=True))
    problems += claim_problems
    plans = read_plans(described.extras.get("all_local_plans"))
    files, locates = _files(folder, described, look_at_files)
    declared, model_config, config_problems = read_configs(folder, common)
    if config and isinstance(backend := config.get("sharded_backend"), str):
        declared["sharded_backend"] = Declared(backend, CONFIG_FILE)
    saved, state_problems = read_train_state(folder)
    problems += config_problems + state_problems
    run = read_run(folder)
    ranks = {int(match[1]) for path in described.paths if (match := PAYLOAD_RANK.search(path))}
    return Checkpoint(
        path=folder.display,
        format=format_,
        writer=_writer(described, root, format_),
        tensors=described.tensors,
        objects=objects,
        byte_objects=byte_objects,
        records=described.records,
        files=files,
        save_plans=plans,
        common=common,
        declared=declared,
        config=model_config,
        object_values=values,
        run=None if run is None else replace(run, saved=saved),
        claims=claims,
        topology=read_topology(declared, objects, plans, ranks),
        problems=problems,
        partial=partial,
        locates_bytes=locates,
        metadata_file=label,
        unseen=_unseen(folder, run, files if look_at_files else FileTable.of([])),
    )


def _unseen(folder: Folder, run: RunFolder | None, files: FileTable) -> tuple[str, ...]:
    """What could not be looked at and would be no finding if it could."""
    unchecked = int(files.are("unchecked").sum())
    sizes = f"the server does not give the size of {unchecked} of {len(files)} payload files" if unchecked else ""
    return tuple(sentence for sentence in (folder.unseen, run.unseen if run else "", sizes) if sentence)


def _read_metadata(folder: Folder, name: str, problems: list[Problem]) -> Unpickled | None:
    try:
        unpickled = read_metadata(_content(folder, name))
    except UnreadableError as error:
        why = _RENAMED if error.position else _OTHER_CONTENT if folder.size(name) else _WRITTEN_LAST
        problems.append(from_error(error, name, why="" if isinstance(error, LimitError) else why))
        return None
    if isinstance(unpickled.root, Opaque) and unpickled.root.module.startswith(_BYTECHECKPOINT):
        own = tuple(refused for refused in unpickled.refused if not refused.target.startswith(_BYTECHECKPOINT))
        problems += from_refusals(replace(unpickled, refused=own), name)
        return unpickled
    problems += from_refusals(unpickled, name)
    if not unpickled.refused:
        try:
            state_of(unpickled.root, "Metadata")
        except UnreadableError as error:
            problems.append(from_error(error, name, why="torch writes a Metadata object there"))
    return unpickled


def _content(folder: Folder, name: str) -> bytes | Buffer:
    """A metadata file; a large one as a buffer, since a copy of it may be hundreds of megabytes."""
    if (size := folder.size_within(name, SIZE_LIMIT)) < WORTHWHILE:
        return folder.read(name, SIZE_LIMIT)
    buffer = Buffer(folder.blocks(name), size + 1)
    return buffer if buffer.end <= size else folder.read(name, SIZE_LIMIT)  # it was written anew meanwhile


def _unsafe_beside(folder: Folder) -> list[Problem]:
    """What the metadata of single ranks asks for: torch reads it where `.metadata` is lost.

    One that cannot be read describes nothing, and is the note of a file that belongs to another save.
    """
    problems = []
    for name in rank_files(folder):
        try:
            found = read_metadata(folder.read(name, SIZE_LIMIT))
        except UnreadableError:
            continue
        problems += [replace(problem, blocks=False) for problem in from_refusals(found, name)]
    return problems


def _locations(described: Description, wanted: set[str], of_tensors: bool = False) -> dict[str, Location]:
    """Where the records of these entries lie; of tensors, where asked for, those that are one chunk."""
    table = described.records
    rows = {fqn: described.byte_records[fqn] for fqn in wanted & described.byte_records.keys()}
    names = wanted if of_tensors else ()
    tensors = [tensor for fqn in names if (tensor := described.tensors.get(fqn)) is not None]
    rows |= {tensor.fqn: int(tensor.chunks.record[0]) for tensor in tensors if len(tensor.chunks) == 1}
    return {
        fqn: (described.paths[int(table.file[row])], int(table.byte_offset[row]), int(table.byte_length[row]))
        for fqn, row in rows.items()
        if row >= 0 and is_safe(described.paths[int(table.file[row])])
    }


def _files(folder: Folder, described: Description, look: bool) -> tuple[FileTable, bool]:
    """The payload files, in the order of `RecordTable.file` and then those nobody names; and `locates_bytes`."""
    paths = described.paths
    raw = {row: path if is_safe(path) else None for row, path in enumerate(paths) if not is_plain(path)}
    names = list(paths)
    for row in raw:
        names[row] = printable(paths[row])
    unchecked = np.full(len(paths), FILE_STATES.index("unchecked"), np.uint8)
    named = FileTable(Names.of(names), np.full(len(paths), -1, np.int64), unchecked, np.ones(len(paths), bool), raw, {})
    if not look:
        return named, True
    found = folder.looks_at(paths)
    named = replace(named, state=found.state, size=found.size)
    elsewhere = [paths[row] for row in np.flatnonzero(found.at < 0).tolist()]
    known = {str(PurePosixPath(path)) if "/" in path else path for path in elsewhere}
    for row in np.flatnonzero(named.are("absent", "other-case")).tolist():
        known.add(folder.other_case(paths[row]) or "")
        if instead := folder.instead(paths[row]):
            named.instead[row] = instead
    others = _listed(folder, known, found.at[found.at >= 0])
    return named.followed_by(others), not _shares_offsets(folder, described, look)


def _listed(folder: Folder, known: Collection[str] = (), rows: IntArray | None = None) -> FileTable:
    """The payload files that lie in the folder, but for those known by name, or by row in the listing's payload."""
    listing = folder.entries.without(known, rows)
    others = [
        StoredFile(printable(name), name, entry.size, "ok", False)
        for name, entry in listing.others.items()
        if name.endswith(".distcp") and not entry.is_folder and not is_litter(name)
    ]
    names = listing.payload_names()
    none, flags = np.zeros(len(names), np.uint8), np.zeros(len(names), bool)
    return FileTable(Names.of(names), listing.size, none, flags, {}, {}).followed_by(FileTable.of(others))


def _shares_offsets(folder: Folder, described: Description, look: bool) -> bool:
    """Whether the tensors of each file share one offset, at which a safetensors header starts.

    Where every file is lost or empty, two entries at one offset tell.

    Source:
        torch.distributed.checkpoint.filesystem (>= 2.8), SerializationFormat.SAFETENSORS
    """
    table = described.records
    tensor_rows = np.flatnonzero(described.has_offset)
    if not look or not len(tensor_rows):
        return False
    files, offsets = table.file[tensor_rows], table.byte_offset[tensor_rows]
    order = np.argsort(files, kind="stable")
    files, offsets = files[order], offsets[order]
    starts = np.flatnonzero(np.concatenate([[True], files[1:] != files[:-1]]))
    if (np.minimum.reduceat(offsets, starts) != np.maximum.reduceat(offsets, starts)).any():
        return False
    judged = 0
    full = files[table.byte_length[tensor_rows][order] > 0]
    shares = bool((full[1:] == full[:-1]).any())
    for start in starts.tolist():
        path, offset = described.paths[int(files[start])], int(offsets[start])
        state, size = folder.look_at(path)
        if state != "ok" or not 0 <= offset < (size or 0):
            continue  # lost, cut or damaged: the other files tell
        head = folder.read_range(path, offset, 9)
        if head[:4] == b"PK\3\4":
            return False
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
            return True
        judged += 1
        if judged == 4:
            break
    return shares and not judged


def _unsupported(folder: Folder, found: Recognised, _look_at_files: bool) -> Checkpoint:
    return Checkpoint(folder.display, "unsupported", problems=[unsupported_problem(found)], readable=False)


def _named_file(folder: Folder, found: Recognised, look_at_files: bool) -> Checkpoint:
    """A file by itself: a whole state, or one that belongs to no checkpoint; that is told with the step files."""
    from ckptlint.loaders.rank_files.plain import read_named

    if (ckpt := read_named(folder, folder.part, look_at_files)) is not None:
        return ckpt
    family = family_of(folder.part)
    kind = f" (by its name: {family.name})" if family is not None else ""
    sentence = f"{found.evidence} is not a checkpoint that ckptlint checks{kind}"
    problem = Problem("unsupported", found.evidence, sentence, hint=_folder_to_name(folder), blocks=True)
    return Checkpoint(folder.display, "unsupported", problems=[problem], readable=False, metadata_file=found.evidence)


def _folder_to_name(folder: Folder) -> str:
    """Which folder to give instead of a file in it."""
    whole = None if folder.parent is None else folder.parent.sub(folder.name)
    place = folder.display.removesuffix(folder.part).rstrip("/") or "."
    if whole is not None and steps_of(whole):
        return f"name the run folder, {place}, or one of the steps in it"
    if whole is not None and components(whole):
        return f"name the folder of the checkpoint, {place}"
    return "name the folder of the checkpoint, the one that holds .metadata, *.safetensors or rank files"


def _incomplete(folder: Folder, found: Recognised, _look_at_files: bool) -> Checkpoint:
    payload = len(_listed(folder))
    evidence = plural(payload, "payload file") if payload else printable(found.evidence)
    count = payload or 1
    if folder.has(".metadata.tmp") and evidence != ".metadata.tmp":
        evidence, count = f"{evidence} and .metadata.tmp", 2
    state = _NO_METADATA.get(folder.look_at(METADATA)[0], "is missing")
    return _unfinished(folder, f"{METADATA} {state}, {evidence} {'is' if count == 1 else 'are'} there", METADATA)


def _unfinished(folder: Folder, sentence: str, file: str) -> Checkpoint:
    problem = Problem(
        "incomplete",
        file or folder.display,
        sentence,
        why=_WRITTEN_LAST if file else "a save began this step and never wrote it",
        hint=other_step(folder)
        or "copy it from where it was written, if the copy left it out (dot files are easy to miss)",
        blocks=True,
    )
    problems = [problem]
    _, config_problem = read_config(folder)
    if config_problem:
        problems.append(config_problem)
    common, common_problems = read_common(folder, {})
    return Checkpoint(
        folder.display,
        "incomplete",
        files=_listed(folder),
        common=common,
        problems=problems + common_problems,
        readable=False,
    )


# ---------------------------------------------------------------- who wrote it


def _writer(described: Description, root: Any, format_: str) -> str:
    """The oldest writer that leaves what was found; a lower bound, since later versions may write the same.

    Source:
        formats by version: torch 1.13 - 2.15, megatron-core 0.6 - 0.20
    """
    extras = described.extras
    if format_ == "torch_dist":
        if COMMON_ENTRY in described.byte_records:
            return "core >= 0.19"
        if "mcore_data" in extras:
            return "core 0.11-0.16" if "all_local_plans" in extras else "core 0.8-0.10"
        return "core >= 0.16" if "all_local_plans" in extras else "core"
    if described.version is not None:
        return "torch >= 2.9"
    if described.storage_meta is None:
        return "torch < 2.4"
    has_modules = isinstance(described.storage_meta, Node) and "modules" in (described.storage_meta or [{}])[0]
    return "torch >= 2.7" if has_modules else "torch >= 2.4"


@dataclass(frozen=True, slots=True)
class LayoutReader:
    """How a kind of folder is read.

    Attributes:
        read: the folder, what it was recognised as, and whether to look at payload files -> the checkpoint.
        input_bytes: how much of the folder is read for it, which bounds memory and time of the child that reads.
    """

    read: Callable[[Folder, Recognised, bool], Checkpoint]
    input_bytes: Callable[[Folder], int] = _metadata_bytes


LAYOUTS: Mapping[LayoutKind, LayoutReader] = {
    "dcp": LayoutReader(_open_dcp),
    "per-rank": LayoutReader(_open_dcp),
    "safetensors": LayoutReader(_open_safetensors, header_bytes),
    "torch": LayoutReader(_open_torch, input_bytes),
    "verl": LayoutReader(_open_torch, input_bytes),
    "deepspeed": LayoutReader(_open_torch, input_bytes),
    "deepspeed-universal": LayoutReader(_open_torch, _universal_bytes),
    "megatron-legacy": LayoutReader(_open_torch, legacy_bytes),
    "incomplete": LayoutReader(_incomplete),
    "unsupported": LayoutReader(_unsupported),
    "file": LayoutReader(_named_file, lambda folder: sum(folder.entries[name].size for name in folder.files_beside())),
}
"""What reads each kind of folder that `recognise` tells apart."""
