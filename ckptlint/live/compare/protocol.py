"""Which collectives a check runs, in which order, and what goes in: the schedule depends on reduced values alone.

    S0   MAX of 9 words                   failures, settings, sizes
    S1   SUM of 3 * BUCKETS + table       the fingerprints; the table again and larger when it overflowed
    S1b  MAX of BUCKETS                   what each holder makes of the table; a healthy check ends here
    S2   MAX of sizes, one gather         only for bad buckets: their records, which every rank then compares; chunks
                                          that placements give to one rank alone are hashed just before
    S3   a few broadcasts of digests      only for copies that differ: where they do so first

Everything that can fail has happened before: its failure is a word of S0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckptlint.analysis.ranks.rank_chunks import ChunkCopies, cells, condensed, digest_groups
from ckptlint.analysis.step_before.step_change import StoredKey
from ckptlint.analysis.step_before.step_change import changes as step_changes
from ckptlint.grouping import grouped
from ckptlint.live.compare import fingerprints as fp
from ckptlint.live.compare.difference import first_difference, text_in
from ckptlint.live.compare.group import RankGroup
from ckptlint.model import RankFinding, RankTable
from ckptlint.model.text import first_names, plural, printable
from ckptlint.model.tiling import BoolArray, IntArray
from ckptlint.seals.digests import Words

if TYPE_CHECKING:
    from ckptlint.live.collect.extract import RankChunk

VERSION = 5
"""Of the words on the wire: ranks of different versions do not compare."""

GATHER_LIMIT = 2**28
"""Bytes of records that a rank receives, about; the bad buckets beyond are named as not compared."""

_TEXT_LIMIT = 1024
_NAMED = 64
_UNCOMPARED = 8  # keys that are named
_ROW_WORDS = 9
_SHIFT_LIMIT = 20
_COMPARED = 8  # kinds of copies that differ of which one each is looked into


@dataclass(frozen=True, slots=True)
class RankInput:
    """What one rank brings to a check.

    Attributes:
        rows: what it holds.
        findings: what it found by itself.
        settings: 56-bit hash of all that must be the same on all ranks.
        tag: 56-bit hash of what is checked.
        failure: why this rank could not bring anything; "" normally.
        has_digests: whether contents could be hashed.
        uncompared: keys whose contents were not compared.
        milliseconds: that making it took.
        contents: what each row holds; empty where contents are not compared.
        late_digests: of rows that no placement says are copies, once they turn out to be; raises nothing. None where
            contents are not compared.
        error: what `failure` describes.
        expect: the keys that must be held somewhere, and no others; without it the last check is compared with.
    """

    rows: fp.Records
    findings: tuple[RankFinding, ...]
    settings: int
    tag: int
    failure: str = ""
    has_digests: bool = True
    uncompared: Sequence[str] = ()
    milliseconds: int = 0
    contents: Sequence[Any] = ()
    late_digests: Callable[[IntArray], Words] | None = None
    error: BaseException | None = None
    expect: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Memory:
    """What a job remembers from check to check, the same on all ranks but for `of_rank`.

    Attributes:
        cells: of the table, as many as the last check needed.
        shift: one chunk in 2^shift is compared with its copies, where all would overflow the largest table.
        salt: of the table's keys; another one after a needless alarm, which two keys of one number had caused.
        turn: number of checks so far; chooses the sample.
        reference: the keys of the last check; None when not known.
        of_rank: what this rank held in it.
    """

    cells: int = fp.LEAST_CELLS
    shift: int = 0
    salt: int = 0
    turn: int = 0
    reference: fp.Peeled | None = None
    of_rank: tuple[fp.Records, fp.Entries] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What all ranks know after a check; the same on all of them.

    Attributes:
        table: the records of suspicious keys, and all findings.
        common: the keys that any rank holds; None when not all came out of the table.
        seconds: that the slowest rank took for its own part.
    """

    table: RankTable
    common: fp.Peeled | None
    seconds: float


def exchange(group: RankGroup, local: RankInput, memory: Memory) -> Outcome:
    """Run the collectives of one check; raises GroupBroken where one did not finish in time."""
    opening = _opening(group, local)
    seconds = int(opening[7]) / 1000
    if opening[0]:
        failed = group.world - int(opening[0])
        text = f"rank {failed} could not read its own state: {_sentence(group, local.failure, failed)}"
        return Outcome(voided(group.world, "LIV210", text, failed), None, seconds)
    if differ := [name for name, at in (("settings", 2), ("tags", 4)) if opening[at] != -opening[at + 1]]:
        text = f"nothing was compared: the {' and '.join(differ)} of this check differ between ranks"
        return Outcome(voided(group.world, "LIV212", text), None, seconds)
    has_digests, (uncompared, place) = not opening[6], divmod(int(opening[8]), group.world)
    names = _sentence(group, _names(local.uncompared), group.world - 1 - place) if uncompared and has_digests else ""
    marks = fp.marks(local.rows, has_digests)
    by_key, by_chunk = fp.entries(local.rows, marks, memory.salt)
    words, peeled = _fingerprints(group, fp.tiling(local.rows, marks), by_key, by_chunk, memory)
    suspicious = np.zeros(fp.BUCKETS, np.int64)
    bucket = local.rows.bucket
    suspicious[bucket[fp.torn(local.rows, marks)]] = 1
    for mine in (by_key, by_chunk):
        suspicious[bucket[mine.row[fp.disagreeing(mine, peeled)]]] = 1
    bad = (words != 0).any(axis=0) | (group.reduce(suspicious, "max") > 0)

    common = None if peeled.unresolved else fp.keys_of(peeled)
    findings = _reservations(has_digests, uncompared, names, memory.shift, peeled.unresolved)
    is_changed, changes = _changes(local.rows, by_key, common, memory, local.expect)
    shares: list[_Part] = []
    if bad.any() or is_changed:
        if has_digests:
            local = replace(local, rows=_with_late_digests(local, bad))
        shares, left = _gathered(group, local, changes, np.flatnonzero(bad), int(opening[1]))
        if left:
            text = f"{left:,} more groups of keys look wrong: too many to compare in one check"
            findings.append(RankFinding(-1, "", "LIV213", text))
    memory.turn += 1
    memory.reference, memory.of_rank = common, (local.rows, by_key)
    count = 0 if common is None else len(common.key)
    table = condensed(_table(group.world, count, shares, tuple(findings)))
    return Outcome(replace(table, differences=_differences(group, local, table)), common, seconds)


def _opening(group: RankGroup, local: RankInput) -> IntArray:
    """S0, nine words."""
    words = [
        group.world - group.rank if local.failure else 0,  # the lowest rank that failed
        local.rows.offsets.shape[1],
        *(local.settings, -local.settings, local.tag, -local.tag),  # both ways: opposite maxima where all share them
        not local.has_digests,
        local.milliseconds,
        len(local.uncompared) * group.world + group.world - 1 - group.rank,  # and the lowest rank that left out as many
    ]
    return group.reduce(np.array(words, np.int64), "max")


def _sentence(group: RankGroup, text: str, source: int) -> str:
    """The text of one rank, on all ranks."""
    data = text.encode("utf-8", "backslashreplace")[:_TEXT_LIMIT].ljust(_TEXT_LIMIT, b"\0")
    return text_in(group.broadcast(np.frombuffer(data, np.int64), source))


def _names(fqns: Sequence[str]) -> str:
    """The first keys, as many as a sentence takes."""
    for count in range(_UNCOMPARED, 0, -1):
        if len(text := first_names(fqns, count).encode("utf-8", "backslashreplace")) <= _TEXT_LIMIT:
            return text.decode()
    return f"{fqns[0][: _TEXT_LIMIT // 8]}..."


def _fingerprints(
    group: RankGroup, tiling: Words, by_key: fp.Entries, by_chunk: fp.Entries, memory: Memory
) -> tuple[Words, fp.Peeled]:
    """S1: the summed words of the buckets, and what came out of the table."""

    def cells() -> Words:
        return fp.table((by_key, fp.sample(by_chunk, memory.shift, memory.turn)), memory.cells)

    words = np.concatenate([tiling.reshape(-1), cells().reshape(-1)])
    summed = group.reduce(words.view(np.int64), "sum").view(np.uint64)
    peeled = fp.peel(summed[tiling.size :].reshape(-1, fp.CELL_WORDS))
    while peeled.unresolved:
        wanted = 3 * ceil(max(peeled.estimate / fp.LOAD, 2 * memory.cells) / 3)
        if memory.cells < fp.MOST_CELLS:
            memory.cells = min(fp.MOST_CELLS, wanted)
        elif memory.shift < _SHIFT_LIMIT:
            memory.shift += max(1, ceil(log2(peeled.estimate / fp.LOAD / memory.cells)))
        else:
            break
        again = group.reduce(cells().reshape(-1).view(np.int64), "sum").view(np.uint64)
        peeled = fp.peel(again.reshape(-1, fp.CELL_WORDS))
    return summed[: tiling.size].reshape(tiling.shape), peeled


def _reservations(has_digests: bool, uncompared: int, names: str, shift: int, unresolved: int) -> list[RankFinding]:
    """What this check did not compare."""
    texts = []
    if not has_digests:
        texts.append("contents were not compared: a rank ran out of memory for their digests")
    elif uncompared:
        texts.append(f"the contents of up to {plural(uncompared, 'value')} per rank were not compared: {names}")
    if shift:
        texts.append(f"this check compared one chunk in {2**shift:,} with its copies; later checks take others")
    if unresolved:
        texts.append("the holders of some keys were not compared: there are too many keys for one check")
    return [RankFinding(-1, "", "LIV213", text) for text in texts]


# ---------------------------------------------------------------- S2: the records of suspicious keys


def _with_late_digests(local: RankInput, bad: BoolArray) -> fp.Records:
    """The rows, those of bad buckets with digests too: a mesh that is not all of the job may hide a copy elsewhere."""
    rows = local.rows
    at = np.flatnonzero(bad[rows.bucket] & rows.is_live & (rows.copies == 1))
    if local.late_digests is None or not len(at):
        return rows
    digest = rows.digest.copy()
    digest[at] = local.late_digests(at)
    return replace(rows, digest=digest)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one rank sent: names, dtypes and findings, and its rows as words."""

    rank: int
    fqns: list[str]
    dtypes: list[str]
    findings: list[RankFinding]
    rows: IntArray


def _gathered(
    group: RankGroup, local: RankInput, changes: Sequence[RankFinding], bad: IntArray, width: int
) -> tuple[list[_Part], int]:
    """The records in bad buckets of all ranks, and how many buckets had to be left out."""
    by_fqn = grouped((finding.fqn, finding) for finding in local.findings)
    bucket = local.rows.bucket
    by_bucket = np.argsort(bucket, kind="stable")
    ends = np.searchsorted(bucket[by_bucket], [bad, bad + 1]).T.tolist()
    mine = [by_bucket[low:high] for low, high in ends]
    texts = [_text(local.rows, rows, by_fqn) for rows in mine] + [_line([], [], changes[:_NAMED])]
    counts = np.array([len(rows) for rows in mine] + [0], np.int64)
    sizes = group.reduce(np.concatenate([counts, np.array([len(text) for text in texts], np.int64)]), "max")
    row_words = _ROW_WORDS + 3 * width
    needed = sizes[: len(texts)] * row_words * 8 + sizes[len(texts) :]
    # the changes come last and always go; of the buckets as many as fit, one at least
    fits = np.cumsum(needed[:-1]) * group.world <= GATHER_LIMIT
    taken = max(1, int(fits.sum())) if len(bad) else 0
    chosen = [*range(taken), len(bad)]
    data = b"".join(texts[i] for i in chosen)
    rows = _words(local.rows, np.concatenate([np.zeros(0, np.int64), *mine[:taken]]), width)
    room_rows, room_text = int(sizes[chosen].sum()), int(sizes[[i + len(texts) for i in chosen]].sum())
    buffer = np.zeros(2 + room_rows * row_words + -(-room_text // 8), np.int64)
    buffer[:2] = len(rows), len(data)
    buffer[2 : 2 + rows.size] = rows.reshape(-1)
    buffer[2 + room_rows * row_words :].view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    shares = []
    for rank, words in enumerate(group.gather(buffer)):
        rank_rows = words[2 : 2 + int(words[0]) * row_words].reshape(-1, row_words)
        text = words[2 + room_rows * row_words :].tobytes()[: int(words[1])]
        shares.append(_part(rank, rank_rows, text))
    return shares, len(bad) - taken


def _text(rows: fp.Records, at: IntArray, by_fqn: Mapping[str, list[RankFinding]]) -> bytes:
    """Names, dtypes and findings of a bucket, in the order in which `_words` counts on."""
    fqns = [rows.fqns[i] for i in at.tolist()]
    findings = [finding for fqn in dict.fromkeys(fqns) for finding in by_fqn.get(fqn, ())]
    return _line(fqns, [rows.dtypes[i] for i in at.tolist()], findings)


def _line(fqns: list[str], dtypes: list[str], findings: Sequence[RankFinding]) -> bytes:
    sent = [
        [finding.rank, finding.fqn, finding.code, finding.text, finding.level, finding.voids] for finding in findings
    ]
    return (json.dumps([fqns, dtypes, sent]) + "\n").encode() if fqns or sent else b""


def _words(rows: fp.Records, at: IntArray, width: int) -> IntArray:
    """int64 [k, 9 + 3 * width], the rows as they travel."""
    pad = ((0, 0), (0, width - rows.offsets.shape[1]))
    columns_of_boxes = ((rows.offsets, 0), (rows.sizes, 1), (rows.global_shape, 1))
    boxes = [np.pad(column[at], pad, constant_values=fill) for column, fill in columns_of_boxes]
    plain = (rows.is_object, rows.ndim, rows.replica, rows.copies, rows.strict, rows.digest, rows.view, rows.flawed)
    columns = [column[at].astype(np.uint64).view(np.int64) for column in plain]
    return np.concatenate([np.stack([*columns, 0 * at], axis=1), *boxes], axis=1)


def _part(rank: int, rows: IntArray, text: bytes) -> _Part:
    share = _Part(rank, [], [], [], rows)
    for line in text.splitlines():
        names, kinds, sent = json.loads(line)
        share.fqns.extend(map(printable, names))
        share.dtypes.extend(kinds)
        for who, fqn, code, sentence, level, voids in sent:
            share.findings.append(RankFinding(who, printable(fqn), code, printable(sentence), level, voids))
    return share


def no_table(world: int, *findings: RankFinding) -> RankTable:
    """A table without rows, for a check that compared nothing."""
    return _table(world, 0, [], findings)


def voided(world: int, code: str, text: str, rank: int = -1) -> RankTable:
    """A table without rows, and the finding that says why."""
    return no_table(world, RankFinding(rank, "", code, text, voids="check"))


def table_of(chunks_by_rank: Sequence[Sequence[RankChunk]]) -> RankTable:
    """What the ranks hold, one list of chunks for each, as a table for the rules; nothing of it was compared."""
    every = [fp.chunk_rows(items, [0] * len(items), {}) for items in chunks_by_rank]
    width = max((rows.offsets.shape[1] for rows in every), default=0)
    shares = [
        _Part(rank, [printable(fqn) for fqn in rows.fqns], rows.dtypes, [], _words(rows, np.arange(len(rows)), width))
        for rank, rows in enumerate(every)
    ]
    return _table(len(chunks_by_rank), 0, shares, ())


def _table(world: int, keys: int, shares: Sequence[_Part], findings: tuple[RankFinding, ...]) -> RankTable:
    """The rows that all ranks sent as one table, names and dtypes numbered anew."""
    fqns = sorted({fqn for share in shares for fqn in share.fqns})
    dtypes = sorted({dtype for share in shares for dtype in share.dtypes} - {""})
    place = {fqn: i for i, fqn in enumerate(fqns)}
    kind = {dtype: i for i, dtype in enumerate(dtypes)} | {"": -1}
    rows = np.concatenate([share.rows for share in shares]) if shares else np.zeros((0, _ROW_WORDS), np.int64)
    width = (rows.shape[1] - _ROW_WORDS) // 3
    offsets, sizes, shape = (rows[:, _ROW_WORDS + i * width : _ROW_WORDS + (i + 1) * width] for i in range(3))
    return RankTable(
        world_size=world,
        keys=keys,
        fqns=fqns,
        fqn=np.array([place[fqn] for share in shares for fqn in share.fqns], np.int32),
        rank=np.array([share.rank for share in shares for _ in share.fqns], np.int32),
        is_object=rows[:, 0].astype(bool),
        dtypes=dtypes,
        dtype=np.array([kind[dtype] for share in shares for dtype in share.dtypes], np.int16),
        ndim=rows[:, 1].astype(np.int8),
        offsets=offsets,
        sizes=sizes,
        global_shape=shape,
        replica=rows[:, 2],
        copies=rows[:, 3].astype(np.int32),
        strict=rows[:, 4].astype(bool),
        digest=rows[:, 5],
        view=rows[:, 6],
        findings=(*findings, *dict.fromkeys(finding for share in shares for finding in share.findings)),
    )


# ---------------------------------------------------------------- S3: where copies differ


def _differences(group: RankGroup, local: RankInput, table: RankTable) -> dict[tuple[str, str], str]:
    """Where the copies of a chunk differ first, for one chunk of each split of the ranks."""
    texts: dict[tuple[str, str], str] = {}
    looked: set[str] = set()
    for cell in cells(table) if (table.digest != 0).any() else ():
        groups = digest_groups(table, cell)
        split = str([table.rank[rows].tolist() for rows in groups])
        if len(groups) < 2 or split in looked or len(looked) == _COMPARED:
            continue
        looked.add(split)
        low, high = sorted(int(table.rank[rows[0]]) for rows in groups)[:2]
        is_object = bool(table.is_object[cell.rows[0]])
        mine = _content_at(local, cell) if group.rank in (low, high) else None
        texts[cell.fqn, str(cell.box)] = first_difference(group, (low, high), mine, None if is_object else cell.box)
    return texts


def _content_at(local: RankInput, cell: ChunkCopies) -> Any:
    """What this rank holds of a chunk."""
    rows, width = local.rows, len(cell.box.sizes)
    for i, fqn in enumerate(rows.fqns if local.contents else ()):
        if fqn == cell.fqn or printable(fqn) == cell.fqn:
            place = tuple(rows.offsets[i, :width].tolist()), tuple(rows.sizes[i, :width].tolist())
            if place == (cell.box.offsets, cell.box.sizes):
                return local.contents[i]
    return None


# ---------------------------------------------------------------- keys that vanished, appeared or changed


def _changes(
    rows: fp.Records, by_key: fp.Entries, common: fp.Peeled | None, memory: Memory, expect: Mapping[str, Any] | None
) -> tuple[bool, list[RankFinding]]:
    """Whether the keys are not those expected, or of the last check, and what this rank can say about it.

    Another state dict than in the last check is no change of it: half of its keys must be there again.
    """
    if common is None:
        return False, []
    if expect is not None:
        wanted = fp.numbers(expect, memory.salt)
        is_here = np.isin(wanted, common.key)
        gone = [fqn for fqn, here in zip(expect, is_here, strict=True) if not here]
        new = _named(rows, by_key, common.key[~np.isin(common.key, wanted)])
        texts = [(fqn, "no rank holds any part{of}, but you expect it") for fqn in gone]
        texts += [(fqn, f"{what}{{of}} is not among the expected keys") for fqn, what in new.items()]
        findings = [RankFinding(-1, fqn, "LIV208", text) for fqn, text in texts]
        return not is_here.all() or len(common.key) > len(wanted), findings
    before = memory.reference
    if before is None or memory.of_rank is None or not len(before.key):
        return False, []
    stays = np.isin(before.key, common.key)
    if stays.sum() * 2 < len(before.key):
        return False, []
    added = common.key[~np.isin(common.key, before.key)]
    at = np.minimum(np.searchsorted(before.key, common.key), len(before.key) - 1)
    is_other = (before.key[at] == common.key) & (before.count[at] == common.count) & (before.value[at] != common.value)
    if not (len(added) or not stays.all() or is_other.any()):
        return False, []
    lost, came = _named(*memory.of_rank, before.key[~stays]), _named(rows, by_key, added)
    changed = _named(rows, by_key, common.key[is_other])
    described_before, described = _named(*memory.of_rank, before.key), _named(rows, by_key, common.key)
    # what went to another rank, or came from one, stays
    was = {fqn: what for fqn, what in (described | described_before).items() if fqn not in came}
    now = {fqn: what for fqn, what in (described_before | described).items() if fqn not in lost}
    findings = []
    for change in step_changes(was, now):
        concerned = {"gone": lost, "new": came}.get(change.kind, changed)
        level: Literal["info", "warning"] = "warning" if change.is_partial and change.kind != "new" else "info"
        text = change.sentence("held by any rank now", "the state of the last check")
        findings += [RankFinding(-1, fqn, "LIV208", text, level) for fqn in change.fqns if fqn in concerned]
    return True, findings


def _named(rows: fp.Records, by_key: fp.Entries, numbers: Words) -> dict[str, StoredKey]:
    """Which of these keys this rank holds -> dtype and global shape."""
    at = by_key.row[np.isin(by_key.key, numbers)]
    return {
        rows.fqns[i]: StoredKey(rows.dtypes[i] or "object", tuple(rows.global_shape[i, : rows.ndim[i]].tolist()))
        for i in at.tolist()
    }
