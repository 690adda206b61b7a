"""Reads the payload at depths `headers` and `data`, and compares the records with the metadata.

One thread reads each payload file: at depth `headers` both ends of each record, at depth `data` all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.geometry.record_states import needed_bytes
from ckptlint.loaders.problems import from_error
from ckptlint.model import Checkpoint, Damage, RecordContent, RecordState, StorageTable, Tensor, empty_payload
from ckptlint.model.payload import plain_content
from ckptlint.model.text import plural
from ckptlint.model.tiling import IntArray, distinct
from ckptlint.payload.archives.members import (
    bare_content,
    member_starts,
    members_and_views,
    members_of,
    scans_of,
    with_bare_tensors,
)
from ckptlint.payload.archives.record_headers import (
    AlikeRecords,
    ArchiveMember,
    Forms,
    Headers,
    RecordPlace,
    read_headers,
)
from ckptlint.payload.archives.whole import compare_archives
from ckptlint.payload.integrity import compare_others, differs, not_expected, recorded_sums, verifying
from ckptlint.payload.parts import EXAMINED, Contents, PartialRead, by_content, join, zero_bytes
from ckptlint.payload.reading import ReadOptions, hashes_of
from ckptlint.payload.records import by_file, file_sizes, is_bare, path_of
from ckptlint.payload.safetensors_blob import read_blob
from ckptlint.payload.stream import BLOCK, Members, Meter, Streamed, stream
from ckptlint.payload.values import VALUE_COLUMNS
from ckptlint.progress import advance
from ckptlint.seals.file import SEAL, metadata_hash, read_seal
from ckptlint.seals.row_hashes import RowHashes, digest
from ckptlint.seals.verify import misfit, sealed_tensors
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ENCODINGS, INTEGERS

if TYPE_CHECKING:
    from concurrent.futures import Future

_TICK = 0.1
_TOGETHER = 512  # records that one thread reads before it takes others
_NO_SEAL = "the tensors are not compared with what was sealed"
_NEW_SEAL = "copy the seal again from where it was written, or remove it"
Gatherers = Mapping[str, tuple[RowHashes, ...]]
_T = TypeVar("_T")


def read_payload(folder: Folder, ckpt: Checkpoint, how: ReadOptions, hashes: Gatherers | None = None) -> Checkpoint:
    """The checkpoint with its `payload` table, and with a problem for each unreadable record.

    `hashes` collects the row hashes of each key at depth `data`, once for each dtype it is rounded to. Raises
    AccessError where a read is refused, and KeyboardInterrupt, whose argument says in a sentence what was covered.
    """
    reader = Reader(folder, ckpt, how, hashes=hashes)
    share = reader.part()
    return join(folder, reader.ckpt, how, [share])


class Reader:
    """Reads the payload of one checkpoint, or this process's share of it: rows of `Checkpoint.records`, ascending.

    One of several processes `leads`: it also reads the files without records.
    """

    def __init__(
        self,
        folder: Folder,
        ckpt: Checkpoint,
        how: ReadOptions,
        share: IntArray | None = None,
        leads: bool = True,
        hashes: Gatherers | None = None,
    ) -> None:
        self.folder, self.ckpt, self.how, self.leads = folder, ckpt, how, leads
        folder.is_read_whole = folder.is_read_whole or how.reads_whole
        count = len(ckpt.records)
        rows = np.arange(count) if share is None else share
        self.result = PartialRead(rows, empty_payload(count, how.depth), np.zeros(count, np.int64))
        self.contents = Contents()
        self.needed, self.is_tensor = needed_bytes(ckpt)
        self.members: dict[int, list[Members]] = {}  # file -> its readings
        self.sealed: set[str] = set()
        self.hashes = hashes_of(ckpt, how) if hashes is None else hashes
        self.chunks: dict[int, tuple[Tensor, int]] = {}
        self.matched: list[str] = []
        self.meter = Meter()

    def part(self) -> PartialRead:
        """Read the share; raises AccessError and KeyboardInterrupt as `read_payload`."""
        result, contents = self.result, self.contents
        rows, sample = self._choose()
        of_files: dict[str, Any] = {}
        try:
            if self.ckpt.storages is None:
                self._read_headers(rows)
            else:
                self._read_members(rows, self.ckpt.storages)
            if not self.ckpt.locates_bytes:
                self._read_blobs()
            if self.how.depth.reads_all:
                self._read_seal()
                self._find_chunks()
                recorded, left_out, problems = (
                    ({}, {}, []) if sample else recorded_sums(self.folder, self.ckpt, self.how.sums or {})
                )
                result.problems += problems
                self._read_data(recorded)
                if self.leads and not sample:
                    damages, bare, odd_values, beside, problems = compare_archives(self.folder, self.ckpt)
                    of_files |= {"bare": bare, "odd_values": odd_values, "beside": beside}
                    result.damages += damages
                    result.problems += problems
                if self.leads:
                    damages, matched = compare_others(self.folder, self.ckpt, recorded)
                    result.damages += damages
                    self.matched += matched
                    result.damages += not_expected(self.ckpt, self.how.sums) if self.how.sums else []
                    of_files["unlisted"] = left_out
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._covered()) from None
        finally:
            self.meter.stop.set()  # threads that still run have nobody to read for
        hashes_of_key = {
            fqn: {hashes.dtype: hashes.rows for hashes in self.hashes[fqn] if hashes.is_whole}
            for fqn in self.how.digests
            if fqn in self.hashes
        }
        table = replace(
            result.table,
            rows=result.table.rows if len(result.rows) == len(self.ckpt.records) else result.table.rows[result.rows],
            matched=tuple(self.matched),
            verifying=verifying(self.folder) if self.how.depth.reads_all and self.leads else "",
            sample=sample,
            **of_files,
            values={
                fqn: {dtype: digest(rows) for dtype, rows in by_dtype.items()}
                for fqn, by_dtype in hashes_of_key.items()
            },
            row_hashes={fqn: by_dtype for fqn, by_dtype in hashes_of_key.items() if fqn in self.how.rows},
        )
        keys = [*contents.numbers, *(repr(content).encode() for content in table.contents[len(contents.numbers) :])]
        decoded = dict(zip(contents.numbers, contents.decoded, strict=True))
        return replace(result, table=table, sums=result.sums[result.rows], keys=keys, decoded=decoded)

    # ------------------------------------------------------------ which records

    def _choose(self) -> tuple[IntArray, str]:
        """The records to read, and a description of the sample if the user asked for one, else ""."""
        records, state = self.ckpt.records, self.result.table.state
        size = file_sizes(self.ckpt)[records.file]
        inside = (records.byte_offset >= 0) & (records.byte_length > 0)
        inside &= records.byte_length <= size - records.byte_offset
        state[inside & records.transformed] = RecordState.TRANSFORMED
        inside &= ~records.transformed
        if not self.ckpt.locates_bytes:
            inside &= ~self.is_tensor
        # dlrover writes raw bytes without an archive (PAY009: "raw bytes, as dlrover writes them"). Only lengths that
        # all match the chunks show that form; a single odd record is a damaged archive instead.
        elif self.ckpt.is_safetensors or (self.ckpt.storages is None and is_bare(self.ckpt, self.needed)):
            bare = inside & (self.is_tensor | self.ckpt.is_safetensors)  # duplicate keys have no tensor here
            state[bare] = RecordState.RAW
            inside &= ~bare
        rows = np.flatnonzero(inside)
        is_shared = np.zeros(len(records), bool)
        is_shared[self.result.rows] = True
        if self.how.wanted is not None and len(drawn := np.intersect1d(rows, self.how.wanted)) < len(rows):
            sample = f"headers and some numbers of {len(drawn):,} of {plural(len(rows), 'record')}"
        elif self.how.percent is not None and len(rows):
            count = max(1, round(len(rows) * self.how.percent / 100))
            drawn = np.sort(np.random.default_rng(self.how.seed).choice(rows, count, replace=False))
            sample = f"{self.how.percent:g}% of the records ({count:,} of {len(rows):,}), seed {self.how.seed}"
        else:
            return rows[is_shared[rows]], ""
        state[rows] = RecordState.UNSAMPLED
        return drawn[is_shared[drawn]], sample

    # ------------------------------------------------------------ depth `headers`

    def _read_headers(self, rows: IntArray) -> None:
        """Read the headers of records, file by file, and fill the columns on their content."""
        records = self.ckpt.records
        self.meter = Meter("records", len(rows))
        forms: Forms = {}
        tasks = {
            file: partial(self._file_headers, path_of(self.ckpt, file), self._places(mine), forms)
            for file, mine in by_file(rows, records.file, records.byte_offset).items()
        }
        # a file that few records are read of takes less time than to hand it to a thread; each still has some to do
        few = min(_TOGETHER * len(tasks) // max(len(rows), 1), len(tasks) // (8 * self.how.jobs))
        contents, table = self.contents, self.result.table
        several: dict[int, tuple[ArchiveMember, ...]] = {}
        for file, headers in self._run(tasks, max(few, 1)):
            self.result.broken[file] += headers.broken
            for record in headers.records:
                members = _storages(record.parts)
                names = [member.name for member in members]
                table.content[record.row] = contents.number(record.pickle, names, table.contents)
                self._place(record.row, members)
                if len(members) > 1 and self.is_tensor[record.row]:
                    several[record.row] = members
            for group in headers.alike:
                several |= self._place_alike(group)
            if self.how.depth.reads_all:
                self.members[file] = [members_of(headers.records, headers.alike)]
        contents.decode(table.contents)
        self._place_decoded(several)

    def _read_members(self, rows: IntArray, stored: StorageTable) -> None:
        """Read the local headers of the archive members that hold tensors of torch files."""
        table, records = self.result.table, self.ckpt.records
        table.contents.extend(stored.contents)
        self.meter = Meter("records", len(rows))
        tasks = {
            file: partial(member_starts, self.folder, self.ckpt, file, mine, stored, self.meter)
            for file, mine in by_file(rows, records.file, stored.start).items()
        }
        for file, (starts, broken) in self._run(tasks):
            self.result.broken[file] += broken
            mine = np.array([*starts], np.int64)
            table.state[mine], table.storages[mine] = RecordState.READ, 1
            table.content[mine], table.start[mine] = stored.content[mine], [*starts.values()]
            table.size[mine] = table.stored[mine] = stored.size[mine]
            # A CRC of 0 means that the writer switched checksums off (PAY012: "checksums switched off"), unless the
            # member is empty.
            table.crc[mine] = np.where((stored.crc[mine] > 0) | (stored.size[mine] == 0), stored.crc[mine], -1)
            if self.how.depth.reads_all:
                self.members[file] = members_and_views(table, stored, mine)

    def _places(self, rows: IntArray) -> list[RecordPlace]:
        records = self.ckpt.records
        columns = (rows, records.byte_offset[rows], records.byte_length[rows])
        return [RecordPlace(*place) for place in zip(*(column.tolist() for column in columns), strict=True)]

    def _file_headers(self, path: str, places: list[RecordPlace], forms: Forms) -> Headers:
        headers = Headers()
        for batch in read_headers(self.folder, path, places, forms):
            headers.records += batch.records
            headers.alike += batch.alike
            headers.broken += batch.broken
            self.meter.add(len(batch))
            if self.meter.stop.is_set():
                break
        return headers

    def _place(self, row: int, members: tuple[ArchiveMember, ...]) -> None:
        table = self.result.table
        table.state[row] = RecordState.READ
        table.storages[row] = len(members)
        table.stored[row] = sum(member.size for member in members)
        if members:
            _, start, size, crc = members[0]
            table.start[row], table.size[row] = start, size
            table.crc[row] = crc if crc or not size else -1

    def _place_alike(self, group: AlikeRecords) -> dict[int, tuple[ArchiveMember, ...]]:
        """Place many records of one layout at once; returns the members of tensors with several storages."""
        table, rows = self.result.table, group.rows
        data_members = [number for number, name in enumerate(group.names) if name.startswith("data/")]
        names = [group.names[number] for number in data_members]
        table.content[rows] = [self.contents.number(pickle, names, table.contents) for pickle in group.pickles]
        table.state[rows], table.storages[rows] = RecordState.READ, len(data_members)
        table.stored[rows] = group.size[data_members].sum()
        if data_members:
            crc, size = group.crc[:, data_members[0]], group.size[data_members[0]]
            table.start[rows], table.size[rows] = group.offset + group.start[data_members[0]], size
            table.crc[rows] = np.where((crc > 0) | (size == 0), crc, -1)
        wanted = np.flatnonzero(self.is_tensor[rows]).tolist() if len(data_members) > 1 else ()
        return {int(rows[at]): _storages(group.parts(at)) for at in wanted}

    def _place_decoded(self, several: Mapping[int, tuple[ArchiveMember, ...]]) -> None:
        """Place tensors with several storages by their decoded pickle, and mark records whose pickle is unreadable."""
        table = self.result.table
        for row, members in several.items():
            content = table.of(row)
            named = [member for member in members if content is not None and member.name == content.key]
            self._place(row, (*named, *(member for member in members if member not in named)))
        for number, rows in by_content(table):
            decoded = self.contents.decoded[number]
            if decoded.content is None or decoded.error is not None:
                table.state[rows] = RecordState.UNREADABLE
            if decoded.error is not None:
                for row in rows.tolist():
                    self.result.broken[int(self.ckpt.records.file[row])].append((row, decoded.error))

    def _read_blobs(self) -> None:
        """Read the safetensors headers of files that hold all their tensors in one blob."""
        table, records = self.result.table, self.ckpt.records
        rows = self.result.rows[self.is_tensor[self.result.rows]]
        for file, mine in by_file(rows, records.file, records.byte_offset).items():
            path, size = self.ckpt.files[file].path, self.ckpt.files[file].size
            if path is None or size is None:
                continue
            start = int(records.byte_offset[mine[0]])
            try:
                tensors_by_name = read_blob(self.folder, path, start, size)
            except UnreadableError as error:
                self.result.broken[file] += [(row, error) for row in mine.tolist()]
                continue
            for row in mine.tolist():
                if (tensor := tensors_by_name.get(records.name(row))) is None:
                    unlisted = UnreadableError("is not listed in the safetensors header", start)
                    self.result.broken[file].append((row, unlisted))
                    continue
                content, table.start[row], table.size[row] = tensor
                table.stored[row], table.storages[row] = table.size[row], 1
                table.state[row], table.content[row] = RecordState.READ, len(table.contents)
                table.contents.append(content)
            if self.how.depth.reads_all:
                self._add_bare(file, mine[table.state[mine] == RecordState.READ])

    # ------------------------------------------------------------ depth `data`

    def _read_seal(self) -> None:
        """Read the seal beside the checkpoint, and collect the tensors whose digests it needs."""
        try:
            seal = read_seal(self.folder)
        except UnreadableError as error:
            self.result.problems.append(from_error(error, SEAL, hint=_NEW_SEAL, why=_NO_SEAL))
            return
        if seal is None:
            return
        self.ckpt = replace(self.ckpt, seal=seal, metadata_hash=metadata_hash(self.folder))
        if not misfit(self.ckpt):
            self.sealed = {tensor.fqn for tensor in sealed_tensors(self.ckpt)}

    def _find_chunks(self) -> None:
        """Find the records whose chunk must be known: sealed, hashed row by row, or raw bytes of numbers."""
        table, records = self.result.table, self.ckpt.records
        is_raw = table.state == RecordState.RAW
        looks = bool(is_raw.any()) and self.how.percent is None
        for tensor in self.ckpt.sound_tensors() if looks or self.sealed or self.hashes else ():
            record = tensor.chunks.record
            is_wanted = tensor.tiling.live & (record >= 0)
            if tensor.fqn not in self.sealed and tensor.fqn not in self.hashes:
                if not looks or tensor.dtype not in ENCODINGS.keys() | INTEGERS:
                    continue
                is_wanted &= is_raw[record]
            for row in np.flatnonzero(is_wanted).tolist():
                self.chunks[int(record[row])] = tensor, row
        copies = {row: plain_content(*copy) for row, copy in records.copies.items()} if looks else {}
        wanted = np.array([*self.chunks, *copies], np.int64)
        raw = np.intersect1d(self.result.rows, wanted, assume_unique=True)
        numbers: dict[RecordContent, int] = {}
        for file, rows in by_file(raw[is_raw[raw]], records.file, records.byte_offset).items():
            table.start[rows], table.size[rows] = records.byte_offset[rows], records.byte_length[rows]
            contents = [copies.get(row) or bare_content(*self.chunks[row]) for row in rows.tolist()]
            table.content[rows] = [
                numbers.setdefault(content, len(table.contents) + len(numbers)) for content in contents
            ]
            table.storages[rows] = 1
            self._add_bare(file, rows)
        table.contents.extend(numbers)

    def _add_bare(self, file: int, rows: IntArray) -> None:
        """Add tensors stored as raw bytes to the readings of a file."""
        first, *others = self.members.get(file, [members_of([])])
        self.members[file] = [with_bare_tensors(first, self.result.table, rows), *others]

    def _read_data(self, recorded: Mapping[str, str]) -> None:
        """Stream every file; `recorded` (see `recorded_sums`) names those to hash as a whole."""
        sizes, result = file_sizes(self.ckpt).tolist(), self.result
        mine = set(distinct(self.ckpt.records.file[result.rows]).tolist())
        others = set(distinct(self.ckpt.records.file).tolist()) - mine
        whole_sizes = {
            i: sizes[i]
            for i, file in enumerate(self.ckpt.files)
            # Exactly one process hashes each whole file: the one that reads its records, or the leader for a file that
            # nobody reads.
            if file.path in recorded and sizes[i] >= 0 and (i in mine or (self.leads and i not in others))
        }
        files = sorted(self.members.keys() | whole_sizes.keys())
        tasks, total = {}, 0
        for i in files:
            readings = self.members.setdefault(i, [members_of([])])
            total += whole_sizes.get(i, int(readings[0].size.sum()))
            threads = 1 + max(self.how.jobs // len(files), 1)
            tasks[i] = partial(self._file_data, path_of(self.ckpt, i), readings, whole_sizes.get(i), threads)
        self.meter = Meter("bytes", total)
        for file, seen in self._run(tasks):
            readings = self.members.pop(file)
            first = readings[0]  # the others are further tensors in its storages
            result.table.unsummed[first.row[(first.crc <= 0) & (first.size > 0)]] = True
            for members, of_members in zip(readings, seen, strict=True):
                result.damages += self._mismatches(file, members, of_members, recorded)

    def _file_data(self, path: str, readings: Sequence[Members], size: int | None, threads: int) -> list[Streamed]:
        """The result of each reading of the file; the first covers the whole file where `size` is given."""
        seen = []
        only = self.how.hashes_only
        for members in readings:
            scans = scans_of(self.result.table, members, self.chunks, self.sealed, self.hashes, only)
            seen.append(stream(self.folder, path, members, scans, size, self.meter, threads, only))
            size = None
        return seen

    def _mismatches(self, file: int, members: Members, seen: Streamed, sums: Mapping[str, str]) -> list[Damage]:
        """Fill the value columns, and return checksum mismatches."""
        table = self.result.table
        scanned = members.row[np.array([*seen.values], np.int64)]
        table.scanned[scanned] = True
        for column in VALUE_COLUMNS:
            table.rows[column][scanned] = [getattr(values, column) for values in seen.values.values()]
        for member, found_digest in seen.digests.items():
            row = int(members.row[member])
            table.digest[row], table.digested[row] = found_digest, True
        np.bitwise_xor.at(self.result.sums, members.row, seen.crc)
        is_raw = table.state[members.row] == RecordState.RAW
        table.crc[members.row[is_raw]] = seen.crc[is_raw]
        name = self.ckpt.files[file].name
        bad = np.flatnonzero((seen.crc != members.crc) & (members.crc > 0))
        damages = []
        for turn, i in enumerate(bad.tolist()):
            row, named = int(members.row[i]), members.names[int(members.name[i])]
            zeros = zero_bytes(self.folder, self.ckpt, row) if turn < EXAMINED else 0
            damages.append(Damage(row, name, named, f"CRC-32 {members.crc[i]:08x}", f"{seen.crc[i]:08x}", zeros))
        recorded = sums.get(self.ckpt.files[file].path or "")
        if recorded is not None and seen.sha256:
            if differs(seen.sha256, recorded):
                damages.append(Damage(-1, name, "", recorded, seen.sha256))
            else:
                self.matched.append(name)
        return damages

    # ------------------------------------------------------------ threads, problems

    def _run(self, tasks: Mapping[int, Callable[[], _T]], together: int = 1) -> Iterator[tuple[int, _T]]:
        """Results in order of completion; at most 2 x jobs lots are queued, so that results do not pile up.

        A thread does a lot of so many tasks `together`. All stop when the caller, the user or an error ends the
        iteration.
        """
        if self.folder.is_near and file_sizes(self.ckpt)[[*tasks]].sum() <= BLOCK:  # read before threads have started
            yield from ((file, task()) for file, task in tasks.items())
            return
        from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

        def done_lot(lot: Iterable[tuple[int, Callable[[], _T]]]) -> list[tuple[int, _T]]:
            return [(file, task()) for file, task in lot]

        waiting = iter(tasks.items())
        lots = iter(lambda: [*islice(waiting, together)], [])
        with ThreadPoolExecutor(self.how.jobs) as pool:
            going: set[Future[list[tuple[int, _T]]]] = set()
            try:
                while True:
                    going |= {pool.submit(done_lot, lot) for lot in islice(lots, 2 * self.how.jobs - len(going))}
                    if not going:
                        return
                    done, _ = wait(going, _TICK, FIRST_COMPLETED)
                    advance(self.meter.unit, self.meter.done, self.meter.total)
                    going -= done
                    for future in done:
                        yield from future.result()
            finally:
                self.meter.stop.set()
                for future in going:
                    future.cancel()

    def _covered(self) -> str:
        done, total = self.meter.done, self.meter.total
        if self.meter.unit == "records":
            return f"interrupted after the headers of {done:,} of {total:,} records; no tensor bytes were checked"
        share = f" ({done / total:.0%})" if total else ""
        count = len(self.result.damages)
        bad = f"{count:,} checksums do not match" if count else "no damage was found"
        return f"interrupted after {done:,} of {total:,} bytes{share} of {self.ckpt.path} were checked; {bad} so far"


def _storages(members: Iterable[ArchiveMember]) -> tuple[ArchiveMember, ...]:
    """The members with tensor data."""
    return tuple(member for member in members if member.name.startswith("data/"))
