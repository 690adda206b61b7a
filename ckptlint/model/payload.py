"""What the records of the payload say about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import inf, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.depth import Depth
from ckptlint.model.stored import extent


class RecordState(IntEnum):
    """Whether a record was opened, or why not."""

    READ = 0
    UNSAMPLED = 1  # left out of what is read of it all
    TRANSFORMED = 2  # went through a stream transform such as zstd
    RAW = 3  # bytes without a container, as dlrover writes them
    ELSEWHERE = 4  # its file or range is damaged: PAY003, PAY004, PAY005, PAY007
    UNREADABLE = 5  # no readable container: PAY013


@dataclass(frozen=True, slots=True)
class RecordContent:
    """What a record says it holds; many records share one.

    Attributes:
        form: a plain `tensor`, a `subclass` of torch.Tensor or a tensor in another layout, or any other `object`.
        dtype: of a tensor, torch's name, or `unknown`.
        shape, strides: of a tensor, in elements; of a subclass those of the plain tensor inside, its own where it
            holds several, () when unknown.
        offset: its first element in the storage.
        key: name of the storage's member (`data/0`).
        length: elements of a list, -1 for anything else.
        value: the content itself, for the few objects that rules read; `...` where it was not kept.
        declared_offsets: the offsets at which its writer said it is in the whole tensor; None where it said nothing.
    """

    form: Literal["tensor", "subclass", "object"]
    dtype: str = "unknown"
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    key: str = ""
    length: int = -1
    value: Any = ...
    declared_offsets: tuple[int, ...] | None = None

    @property
    def volume(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of the storage from the tensor's first to its last."""
        return extent(self.shape, self.strides)


class Damage(NamedTuple):
    """A member whose bytes differ from its checksum, or a record whose archive is gone.

    Attributes:
        record: row in `Checkpoint.records`; -1 for a member of a file beside them, or a whole file in `integrity.json`.
        member: the member, "" for a whole record or file.
        recorded, computed: the checksums as text, "" where there are none left; `computed` is `absent` for a file that
            is not there, `unlisted` for one that a list of the user does not have.
        zeros: bytes of the record in blocks of 512 that hold nothing but zeros.
    """

    record: int
    file: str
    member: str
    recorded: str
    computed: str
    zeros: int = 0


class OddValues(NamedTuple):
    """A tensor in an optimizer's file beside the records that holds NaN, infinity, or a square below 0.

    Attributes:
        file: the file, relative to the checkpoint.
        param: the parameter, as the file numbers or names it; state: the name of its state (`exp_avg`).
        nan, plus_inf, minus_inf: how many of them.
        negatives: finite numbers below 0, of a state that sums squares; 0 for any other.
        elements: of the tensor.
    """

    file: str
    param: str
    state: str
    nan: int
    plus_inf: int
    minus_inf: int
    negatives: int
    elements: int


def _row(*columns: tuple[type[np.generic], tuple[str, ...]]) -> np.dtype[np.void]:
    return np.dtype([(name, kind) for kind, names in columns for name in names])


_PAYLOAD_ROW = _row(
    (np.int64, ("stored", "start", "size", "crc", "nan", "plus_inf", "minus_inf", "first")),
    (np.int64, ("zeros", "edge_zeros", "denormals", "negatives")),
    (np.uint64, ("used_bits", "digest")),
    (np.float64, ("least", "most", "squares")),
    (np.int32, ("content", "storages", "equal_group")),
    (np.int8, ("state",)),
    (np.bool_, ("rows_alike", "constant", "scanned", "masks", "one_value", "digested", "unsummed")),
)
_UNREAD = dict.fromkeys(("content", "start", "crc", "equal_group", "first"), -1.0)
_UNREAD |= {"state": RecordState.ELSEWHERE, "least": inf, "most": -inf}


class _RowTable:
    """A table whose columns are attributes."""

    __slots__ = ()
    rows: npt.NDArray[np.void]

    def __getattr__(self, column: str) -> npt.NDArray[Any]:
        if column == "rows" or column not in (self.rows.dtype.names or ()):  # a copy has no rows at first
            raise AttributeError(column)
        return self.rows[column]


@dataclass(frozen=True, slots=True, eq=False)
class PayloadTable(_RowTable):
    """What the records themselves say; row i is record i of `Checkpoint.records`.

    Attributes:
        rows: [m], the columns below, each an attribute of the table too.
        damages: checksums that do not match (depth `data`).
        matched: files, printable, whose SHA-256 is the recorded one (depth `data`).
        unlisted: payload file that a list of all files leaves out -> the list.
        verifying: the command that verifies who signed the files (depth `data`); "" without a signature.
        bare: files of torch.save beside the records that have bytes without a checksum (depth `data`).
        odd_values: of the tensors in the optimizer's files beside the records (depth `data`).
        beside: file and member of each such tensor -> the columns of its values.
        depth: how deep the records were read.
        sample: what was read of all records (`5% of the records (12 of 240), seed 7`), "" for all of them.
        values: key -> dtype -> digest of the tensor's elements in it, where these were wanted and read to the last.
        row_hashes: key -> dtype -> uint64 [rows], the hashes of the tensor's rows, where these were wanted.

    Columns:
        state: a `RecordState`; the other columns mean something where it is READ, or RAW with a `content`.
        content: position in `contents`.
        storages: members that hold tensor data.
        stored: bytes of all of them.
        start: first byte in its file of the storage that the content names; -1 without one.
        size: bytes of that storage.
        crc: its CRC-32 as recorded, -1 where the writer stored none; of a RAW record as computed (depth `data`).
        equal_group: equal for records whose storages hold the same bytes (length, CRC-32 and up to 1 KiB of samples
            agree); -1 for all others. Looked for among the chunks of one tensor, weights of one role, gate and up.
        rows_alike: whether all rows (axis 0) of a record with an `equal_group` hold the same, more than one value, as
            far as samples tell.
        constant: whether all samples taken hold one value; False where none were taken.
        scanned: whether the values were looked at (depth `data`).
        nan, plus_inf, minus_inf: how many of them.
        first: position of the first of them in the storage, in elements, or -1.
        masks: whether all values are 0 or -Inf.
        zeros: how many numbers are 0, of either sign; as with NaN, a complex element has two numbers.
        edge_zeros: the longer run of zeros of those at the beginning and at the end.
        denormals: how many others are less than the smallest normal number (1e-38 in bfloat16); not counted in float16
            and fp8, whose denormals are everyday numbers.
        least, most: magnitudes of the finite numbers; inf and -inf where there is none.
        one_value: whether all numbers are one finite value; False where none were looked at.
        squares: sum of the squares of the finite numbers but one of magnitude `most`; of many an estimate
        negatives: finite numbers below 0; of floats alone.
        used_bits: the bits that at least one finite number of 32 bits or more has, as its dtype writes it.
        digest: of the elements at their places in the whole tensor (`digests.elem_digest`).
        digested: whether there is one: at depth `data`, where a seal asks for it.
        unsummed: whether bytes of it were read that have no checksum (depth `data`).
    """

    rows: npt.NDArray[np.void]
    contents: list[RecordContent]
    damages: tuple[Damage, ...] = ()
    matched: tuple[str, ...] = ()
    unlisted: Mapping[str, str] = field(default_factory=dict)
    verifying: str = ""
    bare: tuple[str, ...] = ()
    odd_values: tuple[OddValues, ...] = ()
    beside: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    depth: Depth = Depth.HEADERS
    sample: str = ""
    values: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    row_hashes: Mapping[str, Mapping[str, npt.NDArray[np.uint64]]] = field(default_factory=dict)

    def of(self, record: int) -> RecordContent | None:
        """What a record holds, None when it was not read or does not exist."""
        # an int compares with an enum ten times as fast as a number of numpy's
        if record < 0 or int(self.rows["state"][record]) != RecordState.READ:
            return None
        return self.contents[int(self.rows["content"][record])]


def empty_payload(count: int, depth: Depth) -> PayloadTable:
    """A table for so many records, none of which was read."""
    rows = np.zeros(count, _PAYLOAD_ROW)
    for column, value in _UNREAD.items():
        rows[column] = value
    return PayloadTable(rows, [], depth=depth)


PairLaw = Literal["moments", "maximum", "copy"]
"""What an element of the second tensor must be to that of the first: a square that bounds it, at most it, the same."""


class Pair(NamedTuple):
    """Two tensors of one shape of which one follows from the other, element by element.

    Attributes:
        law: how.
        first, second: their keys: first and second moment; largest second moment and second; weight and its master.
        betas: of the moments; None where they are not known.
    """

    law: PairLaw
    first: str
    second: str
    betas: tuple[float, float] | None = None


PAIR_ROW = _row((np.int32, ("pair", "chunk")), (np.int64, ("drawn", "odd", "begin", "end")), (np.float64, ("worst",)))


@dataclass(frozen=True, slots=True, eq=False)
class PairTable(_RowTable):
    """Elements that were drawn from both tensors of pairs, by chunk of the first tensor.

    Attributes:
        rows: [n], the columns below, each an attribute of the table too.
        chunks: chunks that could have been drawn.
        unread: a pair -> why it could not be drawn from.

    Columns:
        pair: position in `pairs`; chunk: row of the first tensor's chunk.
        drawn: elements looked at in both; odd: those that break the law.
        worst: of these, the largest ratio of what is there to what the law allows; 0 without one.
        begin, end: the rows of the first axis, in the whole tensor, between which they lie.
    """

    pairs: list[Pair]
    rows: npt.NDArray[np.void]
    chunks: int = 0
    unread: Mapping[Pair, str] = field(default_factory=dict)


class Follow(NamedTuple):
    """A tensor that is compared with itself in the step before.

    Attributes:
        kind: a weight, or the first or second moment of Adam, or any other state.
        key: its key, the same in both steps.
        second: key of the second moment beside a first one, "" otherwise.
        betas: of its moments, the smaller ones of both steps; None where they are not known.
        updates: of the optimizer between the steps; 0 where not known.
        reach: how far so many updates can move an element; inf where not known.
        decay: share of the element that decay may take off on top.
    """

    kind: Literal["weight", "first", "second", "other"]
    key: str
    second: str = ""
    betas: tuple[float, float] | None = None
    updates: int = 0
    reach: float = inf
    decay: float = 0.0


OriginKind = Literal["unknown", "other tensor", "other chunk", "transposed", "scaled", "rows", "columns"]


class Origin(NamedTuple):
    """What a chunk that does not continue itself holds of the step before.

    Attributes:
        kind: another tensor, or another chunk of the same one; itself, but transposed, times a number, or with its rows
            or columns in another order; or nothing that is known.
        key: of the other tensor; chunk: row of the other chunk.
        scale: the number.
    """

    kind: OriginKind = "unknown"
    key: str = ""
    chunk: int = -1
    scale: float = 1.0


CHANGE_ROW = _row(
    (np.int32, ("follow", "chunk")),
    (np.int64, ("drawn", "same", "odd")),
    (np.float64, ("now", "was", "cosine", "change", "worst")),
    (np.bool_, ("short_was",)),
)


@dataclass(frozen=True, slots=True, eq=False)
class ChangeTable(_RowTable):
    """Elements of this step beside those at their places in the step before, by chunk of this step.

    Attributes:
        rows: [n], the columns below, each an attribute of the table too.
        chunks: chunks that could have been drawn.
        origins: row of a chunk that does not continue itself -> what it holds, as far as these were looked at.

    Columns:
        follow: position in `follows`; chunk: row of its chunk.
        drawn: elements looked at; same: those that did not change by a bit.
        now, was: root mean squares; cosine: of the angle between both, NaN for zeros.
        change: root mean square of the difference over that of the step before; NaN where that is 0.
        odd: elements that no optimizer of these settings can have moved so: see `laws`; worst: how far beyond.
        short_was: whether the low 16 bits of float32 were zero in all of them in the step before.
    """

    follows: list[Follow]
    rows: npt.NDArray[np.void]
    chunks: int = 0
    origins: Mapping[int, Origin] = field(default_factory=dict)


@lru_cache(1024)
def plain_content(dtype: str, sizes: tuple[int, ...]) -> RecordContent:
    """The content of a record with raw bytes in C order."""
    return RecordContent("tensor", dtype, sizes, tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes))))
