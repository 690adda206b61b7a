"""Numbers that show, once summed over all ranks, under which keys the ranks do not fit together.

They only choose what to look at: a finding comes from the exact comparison of the records of a bad bucket, so chance
may hide a fault (2^-40 or less) and never makes one up. All words are unsigned modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil, log
from typing import TYPE_CHECKING

import numpy as np

from ckptlint.model.tiling import BoolArray, IntArray
from ckptlint.seals.digests import GOLD, Words, mix

if TYPE_CHECKING:
    from ckptlint.live.collect.extract import RankChunk

BUCKETS = 4096
"""Keys share so many buckets; the words of a bucket say whether any of its keys is suspicious."""

CELL_WORDS = 5
LEAST_CELLS, MOST_CELLS = 3 * 2**14, 3 * 2**18
"""Cells of the table: 1.9 MiB at first, 30 MiB at most, for half a million keys."""

LOAD = 0.75
"""Keys per cell up to which all of them come out of the table again; at 0.85 it stalls (simulated, three places)."""

_KEY_BITS = 44


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """What this rank holds, as columns; row i is one chunk or object.

    Attributes:
        fqns: [n] names as they are.
        key: uint64 [n], hash of the name.
        is_object: bool [n].
        dtypes: [n] names; "" for objects.
        ndim: int64 [n].
        offsets, sizes, global_shape: int64 [n, d], d the largest number of axes here; padded with 0, 1, 1.
        replica: int64 [n], 0 the copy that is written, n > 0 a further one, -1 undeclared.
        copies: int64 [n], ranks that hold the chunk by its placements; 0 unknown.
        strict: bool [n], the writer's rules allow one owner only.
        digest: uint64 [n], of the contents; 0 where they are not compared.
        view: uint64 [n], hash of the rank's own view of all shards; 0 for none.
        flawed: bool [n], rows about which the rank itself has a finding.
    """

    fqns: list[str]
    key: Words
    is_object: BoolArray
    dtypes: list[str]
    ndim: IntArray
    offsets: IntArray
    sizes: IntArray
    global_shape: IntArray
    replica: IntArray
    copies: IntArray
    strict: BoolArray
    digest: Words
    view: Words
    flawed: BoolArray

    def __len__(self) -> int:
        return len(self.fqns)

    @property
    def bucket(self) -> IntArray:
        """int64 [n], the bucket of each row's key."""
        return (self.key % np.uint64(BUCKETS)).astype(np.int64)

    @property
    def is_live(self) -> BoolArray:
        """bool [n], whether the row holds an element. Empty chunks may share offsets, so they take part in nothing."""
        return np.asarray((self.sizes > 0).all(axis=1))

    @property
    def is_origin(self) -> BoolArray:
        """bool [n], whether the chunk is the one at the tensor's first element."""
        return np.asarray(self.is_live & (self.offsets == 0).all(axis=1))


def hashed(text: str | bytes) -> int:
    """The first 8 bytes of BLAKE2b, little-endian."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def chunk_rows(rank_chunks: Sequence[RankChunk], digests: Sequence[int] | Words, keys: dict[str, int]) -> Records:
    """Columns of what was extracted; the digests are 0 where contents are not to be compared.

    Hashes of names are looked up in `keys`, and new ones added to it.
    """
    fqns = [item.fqn for item in rank_chunks]
    keys.update((fqn, hashed(fqn)) for fqn in fqns if fqn not in keys)
    ndim = np.array([len(item.shape) for item in rank_chunks], np.int64)
    width = int(ndim.max(initial=0))

    def padded(rows: list[tuple[int, ...]], value: int) -> IntArray:
        out = np.full((len(rows), width), value, np.int64)
        for count in np.flatnonzero(np.bincount(ndim, minlength=1)).tolist():
            at = np.flatnonzero(ndim == count)
            if count:
                out[at, :count] = [rows[i] for i in at.tolist()]
        return out

    return Records(
        fqns=fqns,
        key=np.array([keys[fqn] for fqn in fqns], np.uint64),
        is_object=np.array([item.kind == "object" for item in rank_chunks], bool),
        dtypes=[item.dtype for item in rank_chunks],
        ndim=ndim,
        offsets=padded([item.offsets for item in rank_chunks], 0),
        sizes=padded([item.sizes for item in rank_chunks], 1),
        global_shape=padded([item.shape for item in rank_chunks], 1),
        replica=np.array([item.replica for item in rank_chunks], np.int64),
        copies=np.array([item.copies for item in rank_chunks], np.int64),
        strict=np.array([item.writer == "mcore" for item in rank_chunks], bool),
        digest=np.array(digests, np.uint64),
        view=np.array([hashed(item.view) if item.view else 0 for item in rank_chunks], np.uint64),
        flawed=np.array([bool(item.problems) for item in rank_chunks], bool),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Hashes of the rows of some records, all uint64 [n].

    Attributes:
        seed: of what all holders of a key must share: key, kind, dtype, global shape and its number of axes.
        meta: the same with the rank's own view of all shards.
        chunk: of the seed and the chunk's place.
        content: of the chunk and its contents.
    """

    seed: Words
    meta: Words
    chunk: Words
    content: Words


def marks(rows: Records, with_contents: bool) -> Marks:
    """The hashes of the rows."""
    names = {name: hashed(f"dtype {name}") for name in set(rows.dtypes)}
    dtype = np.array([names[name] for name in rows.dtypes], np.uint64)
    kind = mix(dtype + rows.ndim.astype(np.uint64) * np.uint64(2) + rows.is_object.astype(np.uint64))
    seed = mix(rows.key ^ kind)
    for axis in range(rows.offsets.shape[1]):
        seed = np.where(rows.ndim > axis, mix(seed ^ rows.global_shape[:, axis].astype(np.uint64)), seed)
    chunk = seed
    for axis in range(rows.offsets.shape[1]):
        place = mix(mix(chunk ^ rows.offsets[:, axis].astype(np.uint64)) + rows.sizes[:, axis].astype(np.uint64))
        chunk = np.where(rows.ndim > axis, place, chunk)
    digest = rows.digest if with_contents else np.zeros_like(rows.digest)
    meta = np.where(rows.view != 0, mix(seed ^ rows.view), seed)
    return Marks(seed, meta, chunk, mix(chunk ^ mix(digest)))


def tiling(rows: Records, marks: Marks) -> Words:
    """uint64 [3, BUCKETS], words that are 0 once summed over all ranks, where all is well.

    The first adds the measure of each written chunk, and takes off that of the whole tensor for each chunk at its
    origin. The measure of a box is the sum over its cells of a product of g(i), a random function of a position on each
    axis. So chunks that cover the tensor as often as there are chunks at its origin cancel; others do by chance alone.
    The second counts what the ranks found by themselves. The third compares the contents of copies whose number is
    known: the written copy counts against the others.
    """
    words = np.zeros((3, BUCKETS), np.uint64)
    bucket = rows.bucket
    box, whole = np.ones((2, len(rows)), np.uint64)
    for axis in range(rows.offsets.shape[1]):
        base = mix(marks.seed + np.uint64(axis + 1))
        has_axis = rows.ndim > axis
        low, size = rows.offsets[:, axis], rows.sizes[:, axis]
        box = np.where(has_axis, box * (_at(base, low + size) - _at(base, low)), box)
        whole = np.where(has_axis, whole * (_at(base, rows.global_shape[:, axis]) - _at(base, 0 * low)), whole)
    written = rows.is_live & (rows.replica <= 0)
    measure = (box - np.where(rows.is_origin, whole, np.uint64(0))) * (marks.seed | np.uint64(1))
    np.add.at(words[0], bucket[written], measure[written])
    np.add.at(words[1], bucket[rows.flawed], np.uint64(1))
    known = rows.is_live & (rows.copies > 1)
    weight = np.where(rows.replica == 0, np.uint64(1) - rows.copies.astype(np.uint64), np.uint64(1))
    np.add.at(words[2], bucket[known], (marks.content * weight)[known])
    return words


def _at(base: Words, position: IntArray) -> Words:
    return mix(base ^ mix(position.astype(np.uint64)))


# ---------------------------------------------------------------- what holders of one key agree on


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What this rank puts into the table.

    Attributes:
        key: uint64 [k], 44 bits of a hash; the last one is 1 for a chunk, 0 for a key.
        value: uint64 [k], what all holders must share.
        mains: uint64 [k], 1 for a declared owner.
        wants_owner: bool [k], whether exactly one owner must be among the holders.
        row: int64 [k], the row of the records.
    """

    key: Words
    value: Words
    mains: Words
    wants_owner: BoolArray
    row: IntArray


def entries(rows: Records, marks: Marks, salt: int) -> tuple[Entries, Entries]:
    """One entry for each key held here, and one for each chunk that an unknown number of other ranks holds too."""
    declared = rows.replica >= 0
    _, first = np.unique(rows.key, return_index=True)
    origin_owner = rows.is_origin & (rows.replica == 0)
    place = np.searchsorted(rows.key[first], rows.key)
    mains = np.bincount(place[origin_owner], minlength=len(first)).astype(np.uint64)
    # of empty tensors nobody owns the origin; a key with an undeclared chunk says nothing of owners
    filled = (rows.global_shape[first] > 0).all(axis=1)
    settled = np.bincount(place[~declared], minlength=len(first)) == 0
    by_key = Entries(_short(rows.key[first], salt, 0), marks.meta[first], mains, filled & settled, first)
    at = np.flatnonzero(rows.is_live & (rows.copies == 0))
    owned = (rows.replica[at] == 0).astype(np.uint64)
    return by_key, Entries(_short(marks.chunk[at], salt, 1), marks.content[at], owned, declared[at], at)


def _short(key: Words, salt: int, family: int) -> Words:
    salted = mix(key ^ mix(np.array([salt], np.uint64))) >> np.uint64(64 - _KEY_BITS)
    return (salted & ~np.uint64(1)) | np.uint64(family)


def numbers(fqns: Iterable[str], salt: int) -> Words:
    """uint64 [k], what these keys are called in the table."""
    return _short(np.array([hashed(fqn) for fqn in fqns], np.uint64), salt, 0)


def sample(mine: Entries, shift: int, turn: int) -> Entries:
    """One entry in 2^shift, others in another turn."""
    if shift == 0:
        return mine
    chosen = (mine.key >> np.uint64(1)) % np.uint64(2**shift) == np.uint64(turn % 2**shift)
    return Entries(mine.key[chosen], mine.value[chosen], mine.mains[chosen], mine.wants_owner[chosen], mine.row[chosen])


def _places(key: Words, cells: int) -> IntArray:
    """int64 [3, k], the cells of each key, one in each third of the table."""
    third = cells // 3
    steps = np.arange(1, 4, dtype=np.uint64)[:, None]
    spread = (mix(key[None] + steps * np.uint64(GOLD)) % np.uint64(third)).astype(np.int64)
    return spread + np.arange(3)[:, None] * third


def table(groups: Sequence[Entries], cells: int) -> Words:
    """uint64 [cells, 5]: per cell the number of entries and the sums of key, check, value and owners."""
    out = np.zeros((cells, CELL_WORDS), np.uint64)
    for mine in groups:
        columns = np.stack([np.ones_like(mine.key), mine.key, mix(mine.key), mine.value, mine.mains], axis=1)
        for places in _places(mine.key, cells):
            np.add.at(out, places, columns)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Peeled:
    """What came out of the summed table, the same on all ranks.

    Attributes:
        key: uint64 [k], ascending.
        count: uint64 [k], holders.
        value: uint64 [k], sum of the holders' values.
        mains: uint64 [k], sum of the owners.
        unresolved: entries that did not come out.
        estimate: how many keys the table holds by its empty cells.
    """

    key: Words
    count: Words
    value: Words
    mains: Words
    unresolved: int
    estimate: int


def peel(summed: Words) -> Peeled:
    """Take the keys out of a table: a cell with one key gives it away, and without it other cells have one."""
    cells, third = summed.copy(), len(summed) // 3
    empty = max(1, int((cells[:third, 0] == 0).sum()))
    peeled = []
    live = np.flatnonzero(cells[:, 0])
    while len(live):
        count, total, check = cells[live, 0], cells[live, 1], cells[live, 2]
        key = total // count
        pure = (key * count == total) & (key < np.uint64(2**_KEY_BITS)) & (check == count * mix(key))
        at = live[pure]
        at = at[(_places(key[pure], len(cells)) == at).any(axis=0)]
        if len(at) == 0:
            break
        _, first = np.unique(cells[at, 1] // cells[at, 0], return_index=True)
        rows = cells[at[first]]
        rows[:, 1] //= rows[:, 0]
        peeled.append(rows)
        whole = np.stack([rows[:, 0], rows[:, 0] * rows[:, 1], *rows.T[2:]], axis=1)
        for places in _places(rows[:, 1], len(cells)):
            np.subtract.at(cells, places, whole)
        live = np.flatnonzero(cells[:, 0])
    rows = np.concatenate(peeled) if peeled else np.zeros((0, CELL_WORDS), np.uint64)
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    estimate = ceil(-third * log(empty / third)) if third else 0
    return Peeled(rows[:, 1], rows[:, 0], rows[:, 3], rows[:, 4], len(live), estimate)


def keys_of(peeled: Peeled) -> Peeled:
    """The keys alone, without the chunks."""
    at = (peeled.key & np.uint64(1)) == 0
    return replace(peeled, key=peeled.key[at], count=peeled.count[at], value=peeled.value[at], mains=peeled.mains[at])


def torn(rows: Records, marks: Marks) -> BoolArray:
    """bool [n], rows that do not share what the first row of their key says, on this rank alone."""
    _, first, place = np.unique(rows.key, return_index=True, return_inverse=True)
    return np.asarray(marks.meta[first][place.reshape(-1)] != marks.meta)


def disagreeing(mine: Entries, peeled: Peeled) -> BoolArray:
    """bool [k], whether an entry of this rank is at odds with other holders; False where that is not known."""
    if len(peeled.key) == 0:
        return np.zeros(len(mine.key), bool)
    place = np.minimum(np.searchsorted(peeled.key, mine.key), len(peeled.key) - 1)
    bad = peeled.value[place] != peeled.count[place] * mine.value
    bad |= mine.wants_owner & (peeled.mains[place] != 1)
    return np.asarray((peeled.key[place] == mine.key) & bad)
