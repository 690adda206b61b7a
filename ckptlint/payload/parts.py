"""Results of one process's share of the records, and joining the shares into one checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.geometry.record_states import needed_bytes
from ckptlint.loaders.problems import from_refusals
from ckptlint.model import Checkpoint, Damage, PayloadTable, Problem, RecordContent, RecordState, empty_payload
from ckptlint.model.text import first_names, plural, printable, unknown_classes
from ckptlint.model.tiling import IntArray
from ckptlint.payload.archives.record_pickle import Decoded, decode
from ckptlint.payload.identical import find_same
from ckptlint.payload.reading import ReadOptions
from ckptlint.payload.records import path_of
from ckptlint.payload.stream import BLOCK
from ckptlint.storage.folder import Folder

EXAMINED = 64  # most damaged records whose zero bytes are counted

_PENDING_LIMIT = 32 * 1024**2
_SHORT = 1_024
_SECTOR = 512
_NAMED = 4


@dataclass(slots=True, eq=False)
class PartialRead:
    """The results of one process's share of the records.

    Attributes:
        rows, table, sums: k rows of the share, int64; their payload table; checksums of the bytes read, int64.
        keys: an identity for each content of the table, equal across processes for equal contents.
        decoded: key -> decoded `data.pkl`.
        broken: file -> (row, error) of each unreadable record.
    """

    rows: IntArray
    table: PayloadTable
    sums: IntArray
    keys: list[bytes] = field(default_factory=list)
    decoded: dict[bytes, Decoded] = field(default_factory=dict)
    broken: dict[int, list[tuple[int, UnreadableError]]] = field(default_factory=lambda: defaultdict(list))
    damages: list[Damage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def by_content(table: PayloadTable) -> Iterator[tuple[int, IntArray]]:
    """Each content number in use, with the rows of its records."""
    order = np.argsort(table.content, kind="stable")
    bounds = np.searchsorted(table.content[order], np.arange(len(table.contents) + 1))
    for number in range(len(table.contents)):
        if bounds[number] < bounds[number + 1]:
            yield number, order[bounds[number] : bounds[number + 1]]


class Contents:
    """Numbers the distinct `data.pkl`s, and keeps their bytes until they are decoded."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.decoded: list[Decoded] = []
        self._pending: list[bytes] = []
        self._names: list[str | None] = []
        self._bytes = 0

    def number(self, pickle: bytes, storages: Sequence[str], contents: list[RecordContent]) -> int:
        """The number of a record's content, whose tensor data is in these members; a new one is decoded later."""
        # Thousands of records share one pickle, so it is decoded once. The storage it refers to is part of its
        # identity: an archive that lost its data member has the same pickle and must still be an error.
        name = storages[0] if len(storages) == 1 else None if storages else ""
        number = self.numbers.setdefault(_key(pickle + (name or "-").encode()), len(self.numbers))
        if number == len(self._names):
            self._pending.append(pickle)
            self._names.append(name)
            self._bytes += len(pickle)
            if self._bytes > _PENDING_LIMIT:
                self.decode(contents)
        return number

    def decode(self, contents: list[RecordContent]) -> None:
        for name, decoded_pickle in zip(self._names[len(self.decoded) :], decode(self._pending), strict=True):
            content = decoded_pickle.content
            is_lost = content is not None and name is not None and content.key not in ("", name)
            if content is not None and is_lost and (name or content.volume):
                error = UnreadableError(f"has a data.pkl that refers to {printable(content.key)}, which is missing", 0)
                decoded_pickle = decoded_pickle._replace(error=error)
            self.decoded.append(decoded_pickle)
            contents.append(content or RecordContent("object"))
        self._pending, self._bytes = [], 0


def _key(identity: bytes) -> bytes:
    """A short key of long ones, as of objects; no pickle starts with `b`."""
    if len(identity) <= _SHORT:
        return identity
    from hashlib import blake2b  # it loads a library of its own

    return b"blake2b " + blake2b(identity, digest_size=16).digest()


def join(folder: Folder, ckpt: Checkpoint, how: ReadOptions, shares: Sequence[PartialRead]) -> Checkpoint:
    """The checkpoint with all shares joined; where two shares read one record, the first counts.

    Raises AccessError where a read is refused.
    """
    table, decoded, broken = _merged(len(ckpt.records), how, shares)
    problems = _refusals(ckpt, table, decoded)
    problems += [problem for share in shares for problem in share.problems]
    if not how.hashes_only:
        find_same(folder, ckpt, table)
    damages, unread = _broken(folder, ckpt, table, broken)
    of_shares = [damage for share in shares for damage in share.damages]
    payload = replace(
        table,
        damages=tuple(dict.fromkeys([*of_shares, *damages])),
        matched=tuple(name for share in shares for name in share.table.matched),
        unlisted={name: source for share in shares for name, source in share.table.unlisted.items()},
        verifying=next((share.table.verifying for share in shares if share.table.verifying), ""),
        bare=tuple(name for share in shares for name in share.table.bare),
        odd_values=tuple(item for share in shares for item in share.table.odd_values),
        beside={place: item for share in shares for place, item in share.table.beside.items()},
        sample=shares[0].table.sample,
        values=shares[0].table.values,
        row_hashes=shares[0].table.row_hashes,
    )
    is_all = how.depth.reads_all and not payload.sample  # only then were checksum lists and the seal compared
    step_files = tuple(
        replace(file, state="read") if is_all and file.family == "checksums" else file for file in ckpt.step_files
    )
    problems = [*ckpt.problems, *dict.fromkeys([*problems, *unread])]
    return replace(ckpt, payload=payload, problems=problems, step_files=step_files)


def _merged(
    count: int, how: ReadOptions, shares: Sequence[PartialRead]
) -> tuple[PayloadTable, dict[int, Decoded], dict[int, list[tuple[int, UnreadableError]]]]:
    """The table of all shares, what the `data.pkl`s are by the number of their content, and what is broken by file."""
    is_whole = len(shares) == 1 and len(shares[0].rows) == count
    table = shares[0].table if is_whole else empty_payload(count, how.depth)
    is_free = np.ones(count, bool)
    broken: dict[int, list[tuple[int, UnreadableError]]] = defaultdict(list)
    number: dict[bytes, int] = {}
    decoded: dict[int, Decoded] = {}
    contents: list[RecordContent] = []
    for share in shares:
        new = is_free[share.rows]
        at = share.rows[new]
        is_free[at] = False
        if not is_whole:
            table.rows[at] = share.table.rows[new]
        for key, content in zip(share.keys, share.table.contents, strict=True):
            if number.setdefault(key, len(contents)) == len(contents):
                contents.append(content)
        shift = np.array([*(number[key] for key in share.keys), -1], np.int32)  # -1, the last one, for no content
        table.content[at] = shift[share.table.content[new]]
        decoded |= {number[key]: pickled for key, pickled in share.decoded.items()}
        for file, faults in share.broken.items():
            known = {row for row, _ in broken[file]}
            broken[file] += [item for item in faults if item[0] not in known]
    table.contents[:] = contents
    return table, dict(sorted(decoded.items())), broken


def _refusals(ckpt: Checkpoint, table: PayloadTable, decoded: Mapping[int, Decoded]) -> list[Problem]:
    """Problems for the names in pickles that may not be there, and a note for those nobody knows."""
    problems: list[Problem] = []
    unknown: dict[str, int] = {}
    for number, rows in by_content(table):
        if number not in decoded:
            continue
        unpickled = decoded[number].unpickled
        first = int(rows[0])
        file, name = ckpt.byte_range_of(first)[0], ckpt.records.name(first)
        if not any(problem.kind == "unsafe" and problem.file == name for problem in ckpt.problems):
            more = f" and {plural(len(rows) - 1, 'more record')}" if len(rows) > 1 else ""
            refused = from_refusals(unpickled._replace(unknown=()), f"{file}{more}", f"data.pkl of {name} in ")
            problems += [replace(p, file=file, why=_LOADED, blocks=False) for p in refused]
        for cls in unpickled.unknown:
            unknown[cls] = unknown.get(cls, 0) + len(rows)
    if unknown:
        sentence = f"{sum(unknown.values()):,} records hold {unknown_classes(tuple(unknown))}"
        problems.append(Problem("note", "", sentence, unknown=tuple(unknown)))
    return problems


def _broken(
    folder: Folder, ckpt: Checkpoint, table: PayloadTable, broken: Mapping[int, list[tuple[int, UnreadableError]]]
) -> tuple[list[Damage], list[Problem]]:
    """The zeros in the records that cannot be read, at depth `data`; and a problem per file and kind."""
    damages: list[Damage] = []
    problems: list[Problem] = []
    is_reported = _reported(ckpt) if any(broken.values()) else np.zeros(0, bool)
    read = {problem.fqn for problem in ckpt.problems if problem.kind == "container" and problem.fqn}
    for file, errors in sorted(broken.items()):
        rows = np.array([row for row, _ in errors], np.int64)
        table.state[rows] = np.where(is_reported[rows], RecordState.ELSEWHERE, RecordState.UNREADABLE)
        new = [item for item in errors if not is_reported[item[0]] and ckpt.records.name(item[0]) not in read]
        for limits in (False, True):
            if of_kind := [item for item in new if isinstance(item[1], LimitError) is limits]:
                problems.append(_problem(ckpt, file, of_kind))
        if table.depth.reads_all:
            name = ckpt.files[file].name
            zeros = ((row, zero_bytes(folder, ckpt, row)) for row, _ in errors[:EXAMINED] if not is_reported[row])
            damages += [Damage(row, name, "", "", "", count) for row, count in zeros if count]
    return damages, problems


def _problem(ckpt: Checkpoint, file: int, broken: Sequence[tuple[int, UnreadableError]]) -> Problem:
    """The problem of a file whose records could not be read, at the first of them."""
    row, error = min(broken, key=lambda item: int(ckpt.records.byte_offset[item[0]]))
    name, fqn = ckpt.files[file].name, ckpt.records.name(row)
    at = "" if error.position is None else f", byte {int(ckpt.records.byte_offset[row]) + error.position:,}"
    fqns = list(dict.fromkeys(ckpt.records.name(r) for r, _ in broken))
    more = f" (and {plural(len(broken) - 1, 'more record')} of this file)" if len(broken) > 1 else ""
    sentence, detail = f"the record of {fqn} in {name} {error}{at}{more}", (f"keys: {first_names(fqns, _NAMED)}",)
    only = fqn if len(fqns) == 1 else None
    if isinstance(error, LimitError):
        return Problem("limit", name, sentence, detail=detail, fqn=only)
    hint = "copy the file again from where it was written, or go back one step"
    return Problem("container", name, sentence, detail=detail, hint=hint, fqn=only)


_LOADED = "torch reads entries other than tensors with a full unpickler, so a load may run what they name"


def _reported(ckpt: Checkpoint) -> np.ndarray:
    """The records whose range overlaps another one (PAY005) or is too short for the chunk (PAY007).

    None in the safetensors serialisation, where the tensors of a file share one offset, nor in torch files, of which
    tensors may share a storage: neither rule applies.
    """
    records = ckpt.records
    if not ckpt.locates_bytes or ckpt.storages is not None:
        return np.zeros(len(records), bool)
    is_reported = np.asarray(records.byte_length < needed_bytes(ckpt)[0])
    order = np.lexsort((records.byte_offset, records.file))
    file, start = records.file[order], records.byte_offset[order]
    end = start + np.minimum(records.byte_length[order], np.iinfo(np.int64).max - np.maximum(start, 0))
    overlap = (file[1:] == file[:-1]) & (start[1:] < end[:-1])
    is_reported[order[1:][overlap]] = True
    is_reported[order[:-1][overlap]] = True
    return is_reported


def zero_bytes(folder: Folder, ckpt: Checkpoint, row: int) -> int:
    """Bytes in those sectors of a record that hold nothing but zeros."""
    records = ckpt.records
    file, offset, length = int(records.file[row]), int(records.byte_offset[row]), int(records.byte_length[row])
    count = 0
    for at in range(offset, offset + length, BLOCK):
        block = folder.read_range(path_of(ckpt, file), at, min(BLOCK, offset + length - at))
        data = np.frombuffer(block[: len(block) - len(block) % _SECTOR], np.uint8).reshape(-1, _SECTOR)
        count += _SECTOR * int((~data.any(axis=1)).sum())
    return count
