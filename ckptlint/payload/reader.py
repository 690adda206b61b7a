"""Depths `headers` and `data`: what the records themselves say, next to what the metadata says about them.

Each payload file is read by one thread: at depth `headers` both ends of each record, at depth `data` then all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.torch_archive import LOCAL_SIZE, Member, data_start
from ckptlint.loaders.problems import from_error, from_refusals
from ckptlint.model import Checkpoint, Damage, Problem, RecordContent, RecordState, StorageTable, Tensor, empty_payload
from ckptlint.model.layout import IntArray, distinct
from ckptlint.model.text import printable, unknown_classes
from ckptlint.payload.archives import compare_archives
from ckptlint.payload.identical import find_same
from ckptlint.payload.integrity import INTEGRITY, blob_names, read_integrity
from ckptlint.payload.members import members_and_views, members_of, scans_of, with_bare_tensors
from ckptlint.payload.parts import Contents, ShareResult, by_content
from ckptlint.payload.reading import Reading
from ckptlint.payload.record_headers import AlikeRecords, ArchiveMember, Headers, RecordPlace, read_headers
from ckptlint.payload.record_pickle import Decoded
from ckptlint.payload.safetensors_blob import read_blob
from ckptlint.payload.stream import BLOCK, Members, Meter, Streamed, stream
from ckptlint.progress import tell
from ckptlint.seals.file import SEAL, metadata_hash, read_seal
from ckptlint.seals.verify import misfit, sealed_tensors
from ckptlint.seals.words import TensorWords, can_be_rounded, digest
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS, nbytes

_SECTOR = 512
_NAMED = 4
_EXAMINED = 64
_BLOB = "the name of its blob"
_TICK = 0.1
_OF_VALUES = ("nan", "plus_inf", "minus_inf", "first", "masks", "zeros", "denormals", "least", "most", "one_value")
_NO_SEAL = "copy the seal again from where it was written, or remove it; without it the contents are not compared"
T = TypeVar("T")


def read_payload(folder: Folder, ckpt: Checkpoint, how: Reading) -> Checkpoint:
    """The checkpoint with `payload`, and with the problems that its records are.

    Raises:
        AccessError: a read was refused.
        KeyboardInterrupt: the user interrupted the reading; its argument says in a sentence what was covered.
    """
    reader = Reader(folder, ckpt, how)
    return reader.join([reader.part()])


class Reader:
    """One reading of one checkpoint's payload, by this process or by several that each read a share.

    Args:
        share: int64 [k], ascending, the rows of `Checkpoint.records` to read; None for all.
        leads: whether this process also looks at what no record lies in; one of several does.
    """

    def __init__(
        self, folder: Folder, ckpt: Checkpoint, how: Reading, share: IntArray | None = None, leads: bool = True
    ) -> None:
        self.folder, self.ckpt, self.how, self.leads = folder, ckpt, how, leads
        self.share = np.arange(len(ckpt.records)) if share is None else share
        self.table = empty_payload(len(ckpt.records), how.depth)
        self.sums = np.zeros(len(ckpt.records), np.int64)
        self.contents = Contents()
        self.needed, self.is_tensor = _needed(ckpt)
        self.told = _told_already(ckpt, self.needed)
        self.broken: dict[int, list[tuple[int, UnreadableError]]] = defaultdict(list)
        self.problems: list[Problem] = []
        self.members: dict[int, Members] = {}
        self.views: dict[int, list[Members]] = {}
        self.sealed: dict[int, tuple[Tensor, int]] = {}
        self.raw: dict[int, tuple[Tensor, int]] = {}
        self.placed: dict[int, tuple[Tensor, int]] = {}
        self.words = {**how.words, **_words_for(ckpt, how)}
        self.meter = Meter()
        self.bare: tuple[str, ...] = ()
        self.phase = "records"
        self.bad = 0

    def part(self) -> ShareResult:
        """Read the share.

        Raises:
            AccessError, KeyboardInterrupt: as `read_payload`.
        """
        rows, sample = self._choose()
        damages: list[Damage] = []
        unlisted: tuple[str, ...] = ()
        try:
            if self.ckpt.storages is None:
                self._read_headers(rows)
            else:
                self._read_members(rows, self.ckpt.storages)
            if not self.ckpt.locates_bytes:
                self._read_blobs()
            if self.how.depth.reads_all:
                wanted, problems = (None, []) if sample else read_integrity(self.folder)
                self.problems += problems
                self._read_seal()
                self._place_words()
                self._read_raw()
                blobs = {} if sample else blob_names(self.folder)
                damages = self._read_data(_named(blobs, _BLOB) | _named(wanted or {}, INTEGRITY))
                if self.leads and not sample:
                    found, self.bare, problems = compare_archives(self.folder, self.ckpt)
                    damages += found
                    self.problems += problems
                if self.leads:
                    damages += self._other_files(_named(blobs, _BLOB) | _named(wanted or {}, INTEGRITY))
                if wanted is not None and self.leads:
                    unlisted = tuple(file.name for file in self.ckpt.files if file.path and file.path not in wanted)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._covered()) from None
        finally:
            self.meter.stop.set()  # threads that still run have nobody to read for
        is_whole = len(self.share) == len(self.ckpt.records)
        table = self.table if is_whole else replace(self.table, rows=self.table.rows[self.share])
        contents = self.contents
        keys = [*contents.numbers, *(repr(content).encode() for content in table.contents[len(contents.numbers) :])]
        decoded = dict(zip(contents.numbers, contents.decoded, strict=True))
        return ShareResult(
            self.share,
            table,
            keys,
            decoded,
            self.sums[self.share],
            self.broken,
            damages,
            unlisted,
            self.bare,
            self.problems,
            sample,
        )

    def join(self, parts: Sequence[ShareResult]) -> Checkpoint:
        """The checkpoint with what the parts saw; where two read one record, what the first saw.

        Raises:
            AccessError: a read was refused.
        """
        self.broken, self.problems = defaultdict(list), []
        decoded = self._merge(parts)
        self._tell_refusals(decoded)
        for part in parts:
            self.problems += part.problems
        damages = [damage for part in parts for damage in part.damages]
        if not self.how.words_only:
            find_same(self.folder, self.ckpt, self.table, self._path)
        damages += self._report_broken()
        payload = replace(
            self.table,
            damages=tuple(dict.fromkeys(damages)),
            unlisted=tuple(name for part in parts for name in part.unlisted),
            bare=tuple(name for part in parts for name in part.bare),
            sample=parts[0].sample,
            values={
                fqn: {words.dtype: digest(words.rows) for words in self.words[fqn] if words.is_whole}
                for fqn in self.how.digests
                if fqn in self.words
            },
            row_words={
                fqn: {words.dtype: words.rows for words in self.words[fqn] if words.is_whole}
                for fqn in self.how.rows
                if fqn in self.words
            },
        )
        return replace(self.ckpt, payload=payload, problems=[*self.ckpt.problems, *dict.fromkeys(self.problems)])

    def _merge(self, parts: Sequence[ShareResult]) -> dict[int, Decoded]:
        """Fill the table from the parts; returns what the `data.pkl`s are by the number of their content."""
        is_whole = len(parts) == 1 and len(parts[0].rows) == len(self.ckpt.records)
        self.table = parts[0].table if is_whole else empty_payload(len(self.ckpt.records), self.how.depth)
        is_free = np.ones(len(self.ckpt.records), bool)
        number: dict[bytes, int] = {}
        decoded: dict[int, Decoded] = {}
        contents: list[RecordContent] = []
        for part in parts:
            new = is_free[part.rows]
            at = part.rows[new]
            is_free[at] = False
            if self.table is not part.table:
                self.table.rows[at] = part.table.rows[new]
            for key, content in zip(part.keys, part.table.contents, strict=True):
                if number.setdefault(key, len(contents)) == len(contents):
                    contents.append(content)
            shift = np.array([*(number[key] for key in part.keys), -1], np.int32)  # -1, the last one, for no content
            self.table.content[at] = shift[part.table.content[new]]
            decoded |= {number[key]: found for key, found in part.decoded.items()}
            for file, found in part.broken.items():
                known = {row for row, _ in self.broken[file]}
                self.broken[file] += [item for item in found if item[0] not in known]
        self.table.contents[:] = contents
        return dict(sorted(decoded.items()))

    def _path(self, file: int) -> str:
        path = self.ckpt.files[file].path
        assert path is not None
        return path

    # ------------------------------------------------------------ which records

    def _choose(self) -> tuple[IntArray, str]:
        """The records to read, and which share of all they are when the user asked for one."""
        records, state = self.ckpt.records, self.table.state
        size = _file_sizes(self.ckpt)[records.file]
        inside = (records.byte_offset >= 0) & (records.byte_length > 0)
        inside &= records.byte_length <= size - records.byte_offset
        state[inside & records.transformed] = RecordState.TRANSFORMED
        inside &= ~records.transformed
        if not self.ckpt.locates_bytes:
            inside &= ~self.is_tensor
        elif self.ckpt.is_safetensors or (self.ckpt.storages is None and _is_raw(self.ckpt, self.needed)):
            bare = inside & (self.is_tensor | self.ckpt.is_safetensors)  # of two equal keys one is no tensor here
            state[bare] = RecordState.RAW
            inside &= ~bare
        rows = np.flatnonzero(inside)
        is_shared = np.zeros(len(records), bool)
        is_shared[self.share] = True
        if self.how.percent is None or not len(rows):
            return rows[is_shared[rows]], ""
        count = max(1, round(len(rows) * self.how.percent / 100))
        drawn = np.sort(np.random.default_rng(self.how.seed).choice(rows, count, replace=False))
        state[rows] = RecordState.UNSAMPLED
        return drawn[
            is_shared[drawn]
        ], f"{self.how.percent:g}% of the records ({count:,} of {len(rows):,}), seed {self.how.seed}"

    # ------------------------------------------------------------ depth `headers`

    def _read_headers(self, rows: IntArray) -> None:
        records = self.ckpt.records
        self.phase, self.meter = "records", Meter(total=len(rows))
        tasks = {
            file: partial(self._file_headers, self._path(file), self._places(mine))
            for file, mine in _by_file(rows, records.file, records.byte_offset).items()
        }
        contents = self.contents
        several: dict[int, tuple[ArchiveMember, ...]] = {}
        for file, found in self._run(tasks):
            self.broken[file] += found.broken
            for record in found.records:
                parts = _storages(record.parts)
                names = [part.name for part in parts]
                self.table.content[record.row] = contents.number(record.pickle, names, self.table.contents)
                self._place(record.row, parts)
                if len(parts) > 1 and self.is_tensor[record.row]:
                    several[record.row] = parts
            for group in found.alike:
                several |= self._place_alike(group)
            if self.how.depth.reads_all:
                self.members[file] = members_of(found.records, found.alike)
        contents.decode(self.table.contents)
        self._place_decoded(several)

    def _read_members(self, rows: IntArray, stored: StorageTable) -> None:
        """The headers of the members that tensors of torch files lie in, against what the directory said."""
        table, records = self.table, self.ckpt.records
        table.contents.extend(stored.contents)
        self.phase, self.meter = "records", Meter(total=len(rows))
        tasks = {
            file: partial(self._member_starts, self._path(file), mine, stored)
            for file, mine in _by_file(rows, records.file, stored.start).items()
        }
        for file, (found, broken) in self._run(tasks):
            self.broken[file] += broken
            mine = np.array([*found], np.int64)
            table.state[mine], table.storages[mine] = RecordState.READ, 1
            table.content[mine], table.start[mine] = stored.content[mine], [*found.values()]
            table.size[mine] = table.stored[mine] = stored.size[mine]
            table.crc[mine] = np.where((stored.crc[mine] > 0) | (stored.size[mine] == 0), stored.crc[mine], -1)
            if self.how.depth.reads_all:
                self.members[file], self.views[file] = members_and_views(table, stored, mine)

    def _member_starts(
        self, path: str, rows: IntArray, stored: StorageTable
    ) -> tuple[dict[int, int], list[tuple[int, UnreadableError]]]:
        """Record -> first byte of the data of its member; and the records whose member's header is damaged."""
        whole = {row: int(stored.start[row]) for row in rows.tolist() if stored.header[row] < 0}
        wanted = {int(stored.header[row]): row for row in rows.tolist() if row not in whole}
        spans = [(header, LOCAL_SIZE + len(stored.names[row])) for header, row in wanted.items()]
        starts: dict[int, int | UnreadableError] = {}
        for (header, row), data in zip(wanted.items(), self.folder.ranges(path, spans), strict=True):
            member = Member(stored.names[row], int(stored.crc[row]), int(stored.size[row]), header)
            try:
                starts[header] = data_start(data, member)
            except UnreadableError as error:
                position = header - int(self.ckpt.records.byte_offset[row])
                starts[header] = UnreadableError(str(error), position)
        broken = []
        for row in rows.tolist():
            start = whole.get(row, starts.get(int(stored.header[row])))
            if isinstance(start, int):
                whole[row] = start
            elif start is not None:
                broken.append((row, start))
        self.meter.add(len(rows))
        return whole, broken

    def _places(self, rows: IntArray) -> list[RecordPlace]:
        records = self.ckpt.records
        columns = (rows, records.byte_offset[rows], records.byte_length[rows])
        return [RecordPlace(*place) for place in zip(*(column.tolist() for column in columns), strict=True)]

    def _file_headers(self, path: str, places: list[RecordPlace]) -> Headers:
        whole = Headers()
        for part in read_headers(self.folder, path, places):
            whole.records += part.records
            whole.alike += part.alike
            whole.broken += part.broken
            self.meter.add(len(part))
            if self.meter.stop.is_set():
                break
        return whole

    def _place(self, row: int, parts: tuple[ArchiveMember, ...]) -> None:
        table = self.table
        table.state[row] = RecordState.READ
        table.storages[row] = len(parts)
        table.stored[row] = sum(part.size for part in parts)
        if parts:
            _, start, size, crc = parts[0]
            table.start[row], table.size[row] = start, size
            table.crc[row] = crc if crc or not size else -1

    def _place_alike(self, group: AlikeRecords) -> dict[int, tuple[ArchiveMember, ...]]:
        """The same of many records at once; returns the parts of the tensors that have several storages."""
        table, rows = self.table, group.rows
        own = [number for number, name in enumerate(group.names) if name.startswith("data/")]
        names = [group.names[number] for number in own]
        table.content[rows] = [self.contents.number(pickle, names, table.contents) for pickle in group.pickles]
        table.state[rows], table.storages[rows] = RecordState.READ, len(own)
        table.stored[rows] = group.size[own].sum()
        if own:
            crc, size = group.crc[:, own[0]], group.size[own[0]]
            table.start[rows], table.size[rows] = group.offset + group.start[own[0]], size
            table.crc[rows] = np.where((crc > 0) | (size == 0), crc, -1)
        wanted = np.flatnonzero(self.is_tensor[rows]).tolist() if len(own) > 1 else ()
        return {int(rows[at]): _storages(group.parts(at)) for at in wanted}

    def _place_decoded(self, several: Mapping[int, tuple[ArchiveMember, ...]]) -> None:
        """What the decoded pickles mean for the records that hold them."""
        table = self.table
        for row, parts in several.items():
            content = table.of(row)
            named = [part for part in parts if content is not None and part.name == content.key]
            self._place(row, (*named, *(part for part in parts if part not in named)))
        for number, rows in by_content(table):
            decoded = self.contents.decoded[number]
            if decoded.content is None or decoded.error is not None:
                table.state[rows] = RecordState.UNREADABLE
            if decoded.error is not None:
                for row in rows.tolist():
                    self.broken[int(self.ckpt.records.file[row])].append((row, decoded.error))

    def _tell_refusals(self, decoded: Mapping[int, Decoded]) -> None:
        """Problems for the names in pickles that may not be there, and a note for those nobody knows."""
        unknown: dict[str, int] = {}
        for number, rows in by_content(self.table):
            if number not in decoded:
                continue
            unpickled = decoded[number].unpickled
            first = int(rows[0])
            file, name = self.ckpt.byte_range_of(first)[0], self.ckpt.records.name(first)
            if not any(problem.kind == "unsafe" and problem.file == name for problem in self.ckpt.problems):
                more = f" and {len(rows) - 1:,} more records" if len(rows) > 1 else ""
                refused = from_refusals(replace(unpickled, unknown=()), f"{file}{more}", f"data.pkl of {name} in ")
                self.problems += [replace(p, file=file, why=_LOADED, blocks=False) for p in refused]
            for cls in unpickled.unknown:
                unknown[cls] = unknown.get(cls, 0) + len(rows)
        if unknown:
            sentence = f"{sum(unknown.values()):,} records hold {unknown_classes(tuple(unknown))}"
            self.problems.append(Problem("note", "", sentence, unknown=tuple(unknown)))

    def _read_blobs(self) -> None:
        """The safetensors headers of files whose tensors lie in one blob."""
        rows = self.share[self.is_tensor[self.share]]
        for file, mine in _by_file(rows, self.ckpt.records.file, self.ckpt.records.byte_offset).items():
            if self.ckpt.files[file].path is None or self.ckpt.files[file].size is None:
                continue
            try:
                self.members_of_blob(file, mine)
            except UnreadableError as error:
                self.broken[file] += [(row, error) for row in mine.tolist()]

    def members_of_blob(self, file: int, rows: IntArray) -> None:
        """Fill the columns of the records in one blob."""
        size = self.ckpt.files[file].size or 0
        start = int(self.ckpt.records.byte_offset[rows[0]])
        found = read_blob(self.folder, self._path(file), start, size)
        table = self.table
        for row in rows.tolist():
            item = found.get(self.ckpt.records.name(row))
            if item is None:
                self.broken[file].append((row, UnreadableError("is not listed in the safetensors header", start)))
                continue
            table.state[row] = RecordState.READ
            table.content[row] = len(table.contents)
            table.contents.append(item.content)
            table.storages[row] = 1
            table.stored[row] = table.size[row] = item.size
            table.start[row] = item.start
        if self.how.depth.reads_all:
            bare = rows[table.state[rows] == RecordState.READ]
            self.members[file] = with_bare_tensors(self.members.get(file), table, bare)

    # ------------------------------------------------------------ depth `data`

    def _read_seal(self) -> None:
        """The seal beside the checkpoint, and the records whose digests it asks for."""
        try:
            seal = read_seal(self.folder)
        except UnreadableError as error:
            self.problems.append(from_error(error, SEAL, hint=_NO_SEAL))
            return
        if seal is None:
            return
        self.ckpt = replace(self.ckpt, seal=seal, metadata_hash=metadata_hash(self.folder))
        if misfit(self.ckpt):
            return
        for tensor in sealed_tensors(self.ckpt):
            rows = np.flatnonzero(tensor.layout.live)
            for row, record in zip(rows.tolist(), tensor.chunks.record[rows].tolist(), strict=True):
                self.sealed[record] = tensor, row

    def _place_words(self) -> None:
        """The records of the tensors whose words are wanted."""
        for tensor in self.ckpt.sound_tensors() if self.words else ():
            rows = np.flatnonzero(tensor.layout.live & (tensor.chunks.record >= 0))
            for row, record in zip(rows.tolist(), tensor.chunks.record[rows].tolist(), strict=True):
                if tensor.fqn in self.words:
                    self.placed[record] = tensor, row

    def _read_raw(self) -> None:
        """The records without an archive whose tensor is of a floating dtype, or sealed: bare bytes of their chunk."""
        table, records = self.table, self.ckpt.records
        is_raw = table.state == RecordState.RAW
        for tensor in self.ckpt.sound_tensors() if is_raw.any() else ():
            rows = np.flatnonzero(tensor.layout.live & is_raw[tensor.chunks.record] & (tensor.chunks.record >= 0))
            for row, record in zip(rows.tolist(), tensor.chunks.record[rows].tolist(), strict=True):
                if (
                    record in self.sealed
                    or record in self.placed
                    or (tensor.dtype in ENCODINGS and self.how.percent is None)
                ):
                    self.raw[record] = tensor, row
        raw = np.intersect1d(self.share, np.array([*self.raw], np.int64))
        for file, rows in _by_file(raw, records.file, records.byte_offset).items():
            table.start[rows], table.size[rows] = records.byte_offset[rows], records.byte_length[rows]
            self.members[file] = with_bare_tensors(self.members.get(file), table, rows)

    def _read_data(self, wanted: Mapping[str, str]) -> list[Damage]:
        """Stream every file; `wanted` has those that are to be hashed as a whole, as `_named` gives them."""
        sizes = _file_sizes(self.ckpt).tolist()
        mine = set(distinct(self.ckpt.records.file[self.share]).tolist())
        others = set(distinct(self.ckpt.records.file).tolist()) - mine
        whole = {
            file.path: sizes[i]
            for i, file in enumerate(self.ckpt.files)
            if file.path in wanted and sizes[i] >= 0 and (i in mine or (self.leads and i not in others))
        }
        files = sorted(self.members.keys() | {i for i, file in enumerate(self.ckpt.files) if file.path in whole})
        tasks, total = {}, 0
        for i in files:
            members = self.members.get(i, members_of([]))
            size = whole.get(self.ckpt.files[i].path)
            total += int(members.size.sum()) if size is None else size
            threads = 1 + max(self.how.jobs // len(files), 1)
            parts = [members, *self.views.get(i, ())]
            tasks[i] = partial(self._file_data, self._path(i), parts, size, threads)
        self.phase, self.meter = "bytes", Meter(total=total)
        damages: list[Damage] = []
        for file, seen in self._run(tasks):
            parts = [self.members.pop(file, members_of([])), *self.views.pop(file, ())]
            first = parts[0]  # the others are further tensors in its storages
            self.table.unsummed[first.row[(first.crc <= 0) & (first.size > 0)]] = True
            for part, of_part in zip(parts, seen, strict=True):
                damages += self._mismatches(file, part, of_part, wanted)
            self.bad = len(damages)
        return damages

    def _file_data(self, path: str, parts: Sequence[Members], size: int | None, threads: int) -> list[Streamed]:
        """What each reading of the file saw; the first is of the whole file where its size is given."""
        found = []
        for turn, members in enumerate(parts):
            scans = scans_of(self.table, members, self.sealed, self.raw, self.placed, self.words, self.how.words_only)
            seen = stream(
                self.folder, path, members, scans, None if turn else size, self.meter, threads, self.how.words_only
            )
            found.append(seen)
        return found

    def _mismatches(self, file: int, members: Members, seen: Streamed, wanted: Mapping[str, str]) -> list[Damage]:
        """Fill the columns on values, and compare the checksums."""
        table = self.table
        scanned = members.row[np.array([*seen.values], np.int64)]
        table.scanned[scanned] = True
        for column in _OF_VALUES:
            table.rows[column][scanned] = [getattr(values, column) for values in seen.values.values()]
        for member, own in seen.digests.items():
            row = int(members.row[member])
            table.digest[row], table.digested[row] = own, True
        np.bitwise_xor.at(self.sums, members.row, seen.crc)
        name = self.ckpt.files[file].name
        bad = np.flatnonzero((seen.crc != members.crc) & (members.crc > 0))
        damages = [
            Damage(
                int(members.row[i]),
                name,
                members.names[int(members.name[i])],
                f"CRC-32 {members.crc[i]:08x}",
                f"{seen.crc[i]:08x}",
                self._zeros(int(members.row[i])) if turn < _EXAMINED else 0,
            )
            for turn, i in enumerate(bad.tolist())
        ]
        recorded = wanted.get(self.ckpt.files[file].path or "")
        if recorded is not None and seen.sha256 and seen.sha256 != recorded[8:72].strip():
            damages.append(Damage(-1, name, "", recorded, seen.sha256))
        return damages

    def _other_files(self, wanted: Mapping[str, str]) -> list[Damage]:
        """The files with a checksum that are absent, or are no payload and differ."""
        payload = {file.path for file in self.ckpt.files if file.path is not None and file.size is not None}
        damages = []
        for name, recorded in wanted.items():
            if name in payload:
                continue
            state, size = self.folder.look_at(name)
            if state not in ("ok", "link-outside") or size is None:
                damages.append(Damage(-1, printable(name), "", recorded, "absent"))
                continue
            seen = stream(self.folder, name, members_of([]), {}, size, Meter())
            if seen.sha256 != recorded[8:72].strip():
                damages.append(Damage(-1, printable(name), "", recorded, seen.sha256))
        return damages

    def _zeros(self, row: int) -> int:
        """Bytes in those sectors of a record that hold nothing but zeros."""
        file, offset, length = (int(c[row]) for c in (self.ckpt.records.file, self.ckpt.records.byte_offset,
                                                      self.ckpt.records.byte_length))  # fmt: skip
        count = 0
        for at in range(offset, offset + length, BLOCK):
            part = self.folder.read_range(self._path(file), at, min(BLOCK, offset + length - at))
            data = np.frombuffer(part[: len(part) - len(part) % _SECTOR], np.uint8).reshape(-1, _SECTOR)
            count += _SECTOR * int((~data.any(axis=1)).sum())
        return count

    # ------------------------------------------------------------ threads, problems

    def _run(self, tasks: Mapping[int, Callable[[], T]]) -> Iterator[tuple[int, T]]:
        """The results as they come; a few tasks wait at a time, so that results do not pile up.

        Threads are told to stop when the caller, the user or an error ends it.
        """
        waiting = iter(tasks.items())
        with ThreadPoolExecutor(self.how.jobs) as pool:
            going: dict[Future[T], int] = {}
            try:
                while True:
                    for file, task in islice(waiting, 2 * self.how.jobs - len(going)):
                        going[pool.submit(task)] = file
                    if not going:
                        return
                    done, _ = wait(going, _TICK, FIRST_COMPLETED)
                    tell(self.phase, self.meter.done, self.meter.total)
                    for future in done:
                        yield going.pop(future), future.result()
            finally:
                self.meter.stop.set()
                for future in going:
                    future.cancel()

    def _covered(self) -> str:
        done, total = self.meter.done, self.meter.total
        if self.phase == "records":
            return f"interrupted after the headers of {done:,} of {total:,} records; no tensor bytes were checked"
        share = f" ({done / total:.0%})" if total else ""
        bad = f"{self.bad:,} checksums do not match" if self.bad else "no damage was found"
        return f"interrupted after {done:,} of {total:,} bytes{share} of {self.ckpt.path} were checked; {bad} so far"

    def _report_broken(self) -> list[Damage]:
        """One problem per file and kind for the records that cannot be read; the zeros in them at depth `data`."""
        damages = []
        read = {problem.fqn for problem in self.ckpt.problems if problem.kind == "container" and problem.fqn}
        for file, broken in sorted(self.broken.items()):
            rows = [row for row, _ in broken]
            self.table.state[rows] = RecordState.UNREADABLE
            told = [row for row in rows if self.told[row]]
            self.table.state[told] = RecordState.ELSEWHERE
            for limits in (False, True):
                mine = [
                    (r, e)
                    for r, e in broken
                    if not self.told[r]
                    and self.ckpt.records.name(r) not in read
                    and isinstance(e, LimitError) is limits
                ]
                if mine:
                    self.problems.append(self._problem(file, mine))
            if self.how.depth.reads_all:
                name = self.ckpt.files[file].name
                zeros = ((row, self._zeros(row)) for row in rows[:_EXAMINED] if not self.told[row])
                damages += [Damage(row, name, "", "", "", count) for row, count in zeros if count]
        return damages

    def _problem(self, file: int, broken: Sequence[tuple[int, UnreadableError]]) -> Problem:
        row, error = min(broken, key=lambda item: int(self.ckpt.records.byte_offset[item[0]]))
        name, fqn = self.ckpt.files[file].name, self.ckpt.records.name(row)
        limit = isinstance(error, LimitError)
        at = "" if error.position is None else f", byte {int(self.ckpt.records.byte_offset[row]) + error.position:,}"
        fqns = list(dict.fromkeys(self.ckpt.records.name(r) for r, _ in broken))
        more = f" (and {len(broken) - 1:,} more records of this file)" if len(broken) > 1 else ""
        shown = ", ".join(fqns[:_NAMED]) + (f" and {len(fqns) - _NAMED:,} more" if len(fqns) > _NAMED else "")
        return Problem(
            "limit" if limit else "container",
            name,
            f"the record of {fqn} in {name} {error}{at}{more}",
            detail=(f"keys: {shown}",),
            hint="" if limit else "copy the file again from where it was written, or go back one step",
            fqn=fqn if len(fqns) == 1 else None,
        )


def _words_for(ckpt: Checkpoint, how: Reading) -> dict[str, tuple[TensorWords, ...]]:
    """What gathers the words of the tensors of which digests are wanted, in the dtypes that fit theirs."""
    found = {}
    for fqn, dtypes in how.digests.items():
        tensor = ckpt.tensors.get(fqn)
        if tensor is not None and tensor.is_tiled and ITEM_BITS.get(tensor.dtype, 4) % 8 == 0:
            fitting = [d for d in dtypes if d == tensor.dtype or can_be_rounded(tensor.dtype, d)]
            found[fqn] = tuple(TensorWords(tensor.global_shape, dtype, how.salt, False) for dtype in fitting)
    return found


_LOADED = "torch reads entries other than tensors with a full unpickler, so a load may run what they name"


def _needed(ckpt: Checkpoint) -> tuple[IntArray, np.ndarray]:
    """For each record the bytes of its chunk, -1 where they are not known; and whether it holds a chunk at all."""
    needed = np.full(len(ckpt.records), -1, np.int64)
    is_tensor = np.zeros(len(ckpt.records), bool)
    by_rank = defaultdict[int, list[Tensor]](list)
    for tensor in ckpt.tensors.values():
        by_rank[tensor.layout.sizes.shape[1]].append(tensor)
        if tensor.malformed:
            is_tensor[[chunk.record for chunk in tensor.malformed if chunk.record >= 0]] = True
    for tensors in by_rank.values():
        record = np.concatenate([tensor.chunks.record for tensor in tensors])
        sizes = np.concatenate([tensor.layout.sizes for tensor in tensors])
        known = [nbytes(tensor.dtype, 1) if tensor.is_sound else None for tensor in tensors]
        counts = [len(tensor.chunks) for tensor in tensors]
        item = np.repeat(np.array([-1 if size is None else size for size in known], np.int64), counts)
        volume = sizes.astype(float).prod(axis=1)
        fits = (record >= 0) & (item >= 0) & (sizes >= 0).all(axis=1) & (volume < 2**55)
        is_tensor[record[record >= 0]] = True
        needed[record[fits]] = sizes[fits].prod(axis=1) * item[fits]
    return needed, is_tensor


def _is_raw(ckpt: Checkpoint, needed: IntArray) -> bool:
    """Whether every tensor's record is exactly as long as its elements: then there is no archive around them.

    Source:
        dlrover.trainer.torch.flash_checkpoint.fsdp_engine and ByteCheckpoint write raw bytes
    """
    known = needed > 0
    return bool(known.any() and (needed[known] == ckpt.records.byte_length[known]).all())


def _told_already(ckpt: Checkpoint, needed: IntArray) -> np.ndarray:
    """The records whose range overlaps another one (PAY005) or is too short for the chunk (PAY007).

    None in the safetensors serialisation, where the tensors of a file share one offset, nor in torch files, of which
    tensors may share a storage: neither rule applies.
    """
    records = ckpt.records
    if not ckpt.locates_bytes or ckpt.storages is not None:
        return np.zeros(len(records), bool)
    told = np.asarray(records.byte_length < needed)
    if not len(records):
        return told
    order = np.lexsort((records.byte_offset, records.file))
    file, start = records.file[order], records.byte_offset[order]
    end = start + np.minimum(records.byte_length[order], np.iinfo(np.int64).max - np.maximum(start, 0))
    overlap = (file[1:] == file[:-1]) & (start[1:] < end[:-1])
    told[order[1:][overlap]] = True
    told[order[:-1][overlap]] = True
    return told


def _named(sums: Mapping[str, str], source: str) -> dict[str, str]:
    """File -> its checksum as text, and who says it."""
    return {name: f"SHA-256 {recorded:64} of {source}" for name, recorded in sums.items()}


def _file_sizes(ckpt: Checkpoint) -> IntArray:
    """Bytes of each file, -1 for one that is not to be opened."""
    sizes = np.where(ckpt.files.are(*READABLE), ckpt.files.size, -1)
    sizes[[row for row, path in ckpt.files.paths.items() if path is None]] = -1
    return sizes if len(sizes) else np.array([-1])


def _storages(parts: Iterable[ArchiveMember]) -> tuple[ArchiveMember, ...]:
    """The members that hold data."""
    return tuple(part for part in parts if part.name.startswith("data/"))


def _by_file(rows: IntArray, file: np.ndarray, offset: IntArray) -> dict[int, IntArray]:
    """The rows of each file in the order of their bytes."""
    rows = rows[np.lexsort((offset[rows], file[rows]))]
    parts = np.split(rows, np.flatnonzero(np.diff(file[rows])) + 1) if len(rows) else []
    return {int(file[part[0]]): part for part in parts}
