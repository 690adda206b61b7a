"""What a checkpoint is to every rule, whoever wrote it: tensors, objects, records, files, plans, common state.

Chunks and records are rows of arrays; Python objects for them exist only inside findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptlint.model.layout import IntArray, Layout

Format = Literal[
    "dcp",
    "dcp-per-rank",
    "torch_dist",
    "fsdp_dtensor",
    "torch_dcp",
    "safetensors",
    "dcp-safetensors",
    "live",
    "incomplete",
    "unsupported",
]

ITEM_BITS: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"), 8),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 16),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 32),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 64),
    "complex128": 128,
}
"""Bits per element of the dtypes whose payload size is certain.

Source: torch 2.13 `torch.dtype.itemsize`. Packed and quantised dtypes (float4_e2m1fn_x2, int1-7, quint4x2, ...) are
left out on purpose: no size check is made for them.
"""


STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Storage classes of torch -> dtypes; the others lie in an UntypedStorage."""

RANK_LIMIT = 64
"""More axes than any tensor has."""

KEY_LIMIT = 4096
"""More characters than any key has."""


def printable(text: str) -> str:
    r"""The text with every character that a terminal may act on as a visible escape; no two texts become equal.

    Control characters, line separators, bidirectional overrides, zero-width characters and lone surrogates are
    escaped, and so is the backslash itself.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of one tensor; row i is chunk i.

    Attributes:
        layout: offsets and sizes, shared by all tensors that are cut alike.
        record: int64 [n], row of the chunk's stored bytes in `Checkpoint.records`; -1 when no storage entry exists.

    Source:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """

    layout: Layout
    record: IntArray

    def __len__(self) -> int:
        return len(self.record)


@dataclass(frozen=True, slots=True)
class MalformedChunk:
    """A chunk that fits no table: its offsets and sizes have other lengths than the tensor's shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    record: int


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A stored tensor.

    Attributes:
        fqn: the key, made printable.
        dtype: torch's name without the module (`bfloat16`), or `unknown`.
        global_shape: extent of each axis, in elements, as the metadata gives it.
        chunks: the chunks whose rank fits the shape.
        malformed: the others.
        is_flattened: Megatron-Core <= 0.15 stored an N-D tensor as `[X/x, Y/y, x*y]`.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: ChunkTable
    malformed: tuple[MalformedChunk, ...] = ()
    is_flattened: bool = False

    @property
    def layout(self) -> Layout:
        """Where the chunks lie."""
        return self.chunks.layout

    @property
    def volume(self) -> int:
        """Elements of the global shape."""
        return prod(self.global_shape)

    @property
    def is_representable(self) -> bool:
        """Whether shape and volume fit int64, which torch and the box arithmetic need."""
        return (
            len(self.global_shape) <= RANK_LIMIT
            and all(0 <= size < 2**62 for size in self.global_shape)
            and self.volume < 2**63
        )

    @property
    def is_sound(self) -> bool:
        """Whether the chunks can be compared with the shape at all; False leaves the tensor to GEO002 or SAF003."""
        return self.is_representable and not self.malformed

    def nbytes(self, elements: int) -> int | None:
        """Payload bytes of so many elements; None for dtypes of uncertain size."""
        bits = ITEM_BITS.get(self.dtype)
        return None if bits is None else elements * bits // 8


@dataclass(frozen=True, slots=True)
class ShardedObject:
    """One shard of a Megatron-Core ShardedObject, read from its key `{key}/shard_{offset}_{shape}`.

    Attributes:
        fqn: the whole entry name.
        key: the part before `/shard_`.
        offset: place in the grid of objects.
        shape: the grid of objects.
        record: row in `Checkpoint.records`, -1 without a storage entry.

    Source:
        megatron.core.dist_checkpointing.mapping.ShardedObject.unique_key
    """

    fqn: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    record: int


@dataclass(frozen=True, slots=True)
class ByteObject:
    """A DCP bytes entry that is no ShardedObject (torch BytesStorageMetadata)."""

    fqn: str
    record: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """The storage entries of the metadata as columns; row i is one stored record.

    Attributes:
        fqns: the distinct names, printable, in order of first use.
        fqn: int32 [m], position in `fqns`.
        file: int32 [m], position in `Checkpoint.files`.
        byte_offset: int64 [m], first byte of the record in its file.
        byte_length: int64 [m], bytes of the record, archive framing included.
        transformed: bool [m], whether the bytes went through a stream transform (`stream.zstd/1`).
        owned: bool [m], whether a chunk, object or bytes entry refers to the record.
        strays: row -> the offsets it is filed under (None for bytes), for the rows that nothing refers to.

    Source:
        torch.distributed.checkpoint.filesystem._StorageInfo, torch.distributed.checkpoint.metadata.MetadataIndex
    """

    fqns: list[str]
    fqn: npt.NDArray[np.int32]
    file: npt.NDArray[np.int32]
    byte_offset: IntArray
    byte_length: IntArray
    transformed: npt.NDArray[np.bool_]
    owned: npt.NDArray[np.bool_]
    strays: dict[int, tuple[int, ...] | None]

    def __len__(self) -> int:
        return len(self.fqn)

    def name(self, row: int) -> str:
        """The entry name of a record."""
        return self.fqns[int(self.fqn[row])]


FileState = Literal[
    "ok", "absent", "unsafe-path", "not-a-file", "link-outside", "dangling-link", "other-case", "unchecked"
]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A payload file that the metadata names or that lies in the folder.

    Attributes:
        name: path relative to the checkpoint, printable.
        path: the same, raw; None when it must not be opened.
        size: bytes; None when the file was not looked at.
        state: what was found. `unsafe-path` is absolute or leaves the folder and was not opened; `link-outside` is a
            link to a regular file elsewhere, `dangling-link` leads nowhere; `other-case` lies there under a name of
            another case, which the file system ignores; `unchecked` when depth or storage did not allow a look.
        referenced: whether a storage entry names it.
        instead: what lies there in its place, as a sentence.
    """

    name: str
    path: str | None
    size: int | None
    state: FileState
    referenced: bool
    instead: str = ""


class RecordState(IntEnum):
    """Whether a record was opened, or why not."""

    READ = 0
    UNSAMPLED = 1  # left out by --sample
    TRANSFORMED = 2  # went through a stream transform such as zstd
    RAW = 3  # bytes without a container, as dlrover writes them
    ELSEWHERE = 4  # its file or range is damaged: PAY003, PAY004, PAY005, PAY007
    UNREADABLE = 5  # no readable container: PAY013


@dataclass(frozen=True, slots=True)
class Content:
    """What a record says it holds; many records share one.

    Attributes:
        form: a plain `tensor`, a `subclass` of torch.Tensor or a tensor in another layout, or any other `object`.
        dtype: of a tensor, torch's name, or `unknown`.
        shape, strides: of a tensor, in elements; of a subclass those of the plain tensor inside, () when unknown.
        offset: its first element in the storage.
        key: name of the storage's member (`data/0`).
        length: elements of a list, -1 for anything else.
        value: the content itself, for the few objects that rules read.
        place: the offsets at which its writer said it lies in the whole tensor; None where it said nothing.
    """

    form: Literal["tensor", "subclass", "object"]
    dtype: str = "unknown"
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    key: str = ""
    length: int = -1
    value: Any = None
    place: tuple[int, ...] | None = None

    @property
    def volume(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of the storage from the tensor's first to its last."""
        if not self.volume:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Damage:
    """A member whose bytes differ from its checksum, or a record whose archive is gone.

    Attributes:
        record: row in `Checkpoint.records`; -1 for a whole file in `integrity.json`.
        file: its file.
        member: the member, "" for a whole record or file.
        recorded, computed: the checksums as text, "" where there are none left.
        zeros: bytes of the 4 KiB pages of the record that hold nothing but zeros.
    """

    record: int
    file: str
    member: str
    recorded: str
    computed: str
    zeros: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PayloadTable:
    """What the records themselves say; row i is record i of `Checkpoint.records`.

    Attributes:
        state: int8 [m], a `RecordState`; the other columns mean something where it is READ.
        content: int32 [m], position in `contents`.
        contents: the distinct contents.
        storages: int32 [m], members that hold tensor data.
        stored: int64 [m], bytes of all of them.
        start: int64 [m], first byte in its file of the storage that the content names; -1 without one.
        size: int64 [m], bytes of that storage.
        crc: int64 [m], its CRC-32 as recorded, -1 where the writer stored none.
        same: int32 [m], equal for records whose storages hold the same bytes (length, CRC-32 and up to 1 KiB of
            samples agree); -1 for all others. Looked for among the chunks of one tensor and one layer's experts.
        constant: bool [m], whether all samples taken hold one value; False where none were taken.
        scanned: bool [m], whether the values were looked at (depth `data`).
        nan, plus_inf, minus_inf: int64 [m], how many of them.
        first: int64 [m], position of the first of them in the storage, in elements, or -1.
        masks: bool [m], whether all values are 0 or -Inf.
        damages: checksums that do not match (depth `data`).
        digest: uint64 [m], of the elements at their places in the whole tensor (`digests.elem_digest`).
        digested: bool [m], whether there is one: at depth `data`, where a seal asks for it.
        unlisted: payload files that `integrity.json` leaves out.
        depth: how deep the records were read.
        sample: what was read of all records (`5% of the records (12 of 240), seed 7`), "" for all of them.
    """

    state: npt.NDArray[np.int8]
    content: npt.NDArray[np.int32]
    contents: list[Content]
    storages: npt.NDArray[np.int32]
    stored: IntArray
    start: IntArray
    size: IntArray
    crc: IntArray
    same: npt.NDArray[np.int32]
    constant: npt.NDArray[np.bool_]
    scanned: npt.NDArray[np.bool_]
    nan: IntArray
    plus_inf: IntArray
    minus_inf: IntArray
    first: IntArray
    masks: npt.NDArray[np.bool_]
    digest: npt.NDArray[np.uint64]
    digested: npt.NDArray[np.bool_]
    damages: tuple[Damage, ...] = ()
    unlisted: tuple[str, ...] = ()
    depth: Literal["headers", "data"] = "headers"
    sample: str = ""

    def of(self, record: int) -> Content | None:
        """What a record holds, None when it was not read or does not exist."""
        if record < 0 or self.state[record] != RecordState.READ:
            return None
        return self.contents[int(self.content[record])]


@dataclass(frozen=True, slots=True, eq=False)
class WriterTable:
    """What every rank planned to write, before deduplication; row i is one planned item.

    Advisory: a save from cached metadata repeats an older plan.

    Attributes:
        world_size: number of plans.
        fqns: the distinct names, printable.
        fqn: int32 [m], position in `fqns`.
        rank: int32 [m], the saving rank.
        is_bytes: bool [m], a bytes entry, without offsets.
        offsets: int64 [m, d], padded with -1 behind the tensor's rank.
        sizes: int64 [m, d], likewise.
        dtypes: the distinct dtypes; dtype: int16 [m], position in it, -1 for bytes.
        global_shape: int64 [m, d], likewise padded.

    Source:
        `all_local_plans`, megatron.core.dist_checkpointing.strategies.state_dict_saver (>= 0.11) and NVRx
    """

    world_size: int
    fqns: list[str]
    fqn: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    is_bytes: npt.NDArray[np.bool_]
    offsets: IntArray
    sizes: IntArray
    dtypes: list[str]
    dtype: npt.NDArray[np.int16]
    global_shape: IntArray

    def __len__(self) -> int:
        return len(self.fqn)


@dataclass(frozen=True, slots=True)
class Remark:
    """What a rank of a running job found in its own state, or what came of comparing it with the others.

    Attributes:
        rank: who found it; -1 for all.
        fqn: the key concerned, printable; "" for none.
        code: the rule whose finding it is.
        text: one sentence, `{of}` as in a finding.
        level: its severity where the evidence is weaker than the rule's own.
        voids: what says nothing because of it: the chunks of the key, or the whole check.
    """

    rank: int
    fqn: str
    code: str
    text: str
    level: Literal["", "info", "warning"] = ""
    voids: Literal["", "chunks", "check"] = ""


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """What the ranks of a running job hold under the keys that were compared; row i is one chunk or object of one rank.

    Attributes:
        world_size: number of ranks.
        keys: how many keys there are in all, 0 when not known; the table holds the suspicious ones alone.
        fqns: the distinct names, printable.
        fqn: int32 [m], position in `fqns`.
        rank: int32 [m], the holding rank.
        is_object: bool [m], a value that is no tensor, or a shard of a ShardedObject.
        dtypes: the distinct dtypes; dtype: int16 [m], position in it, -1 for objects.
        ndim: int8 [m], number of axes; 1 for a plain object.
        offsets: int64 [m, d], padded with 0 behind `ndim`.
        sizes: int64 [m, d], padded with 1.
        global_shape: int64 [m, d], padded with 1.
        replica: int64 [m], 0 the copy that is written, n > 0 a further one, -1 nobody declared who writes.
        copies: int32 [m], how many ranks hold the chunk by its placements; 0 when they do not say.
        strict: bool [m], whether the writer's rules allow one owner only (Megatron-Core).
        digest: int64 [m], of the contents; 0 when they were not compared.
        view: int64 [m], hash of the rank's own view of all shards (FSDP1); 0 for none.
        remarks: what is known beside that.
    """

    world_size: int
    keys: int
    fqns: list[str]
    fqn: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    is_object: npt.NDArray[np.bool_]
    dtypes: list[str]
    dtype: npt.NDArray[np.int16]
    ndim: npt.NDArray[np.int8]
    offsets: IntArray
    sizes: IntArray
    global_shape: IntArray
    replica: IntArray
    copies: npt.NDArray[np.int32]
    strict: npt.NDArray[np.bool_]
    digest: IntArray
    view: IntArray
    remarks: tuple[Remark, ...] = ()

    def __len__(self) -> int:
        return len(self.fqn)


@dataclass(frozen=True, slots=True)
class CommonState:
    """The values every rank shares (arguments, iteration, parameter groups).

    Attributes:
        source: the file or entry they came from, relative to the checkpoint.
        values: a dict as stored; classes of the training code are inert `unpickle.Node`s.
    """

    source: str
    values: dict[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class WeightIndex:
    """A `*.safetensors.index.json`, which says in which file each key lies.

    Attributes:
        file: its name.
        places: key -> name of the file, both printable.
        total_size: bytes of all tensors as it says, None when it does not.
        absent: the files that are not there, or lie outside of the folder.
        unread: these, and the files whose header could not be read.

    Source:
        huggingface_hub `split_torch_state_dict_into_shards`; torch.distributed.checkpoint.hf_storage
    """

    file: str
    places: dict[str, str]
    total_size: int | None = None
    absent: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()


StepState = Literal["complete", "unfinished", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The run folder that a step lies in.

    Attributes:
        step: the number in the step folder's own name (`iter_0000010`).
        steps: the numbers of all step folders there, in order.
        newest_complete: the highest of them that has the marks of a finished save, None when none has.
        tracker: the step that the tracker names, or `release`; None without one.
        tracked: what lies there; `unknown` for formats that ckptlint does not read.
        prefix, digits: how step folders are named.
        tracker_file: name of the tracker.
        saved: the step that a train state in the step folder holds, None without one.
        unseen: why the run folder could not be looked at, "" where it could.

    Source:
        megatron.training.checkpointing.get_checkpoint_name, read_metadata
    """

    step: int
    steps: tuple[int, ...] = ()
    newest_complete: int | None = None
    tracker: int | Literal["release"] | None = None
    tracked: StepState = "unknown"
    unseen: str = ""
    prefix: str = "iter_"
    digits: int = 7
    tracker_file: str = "latest_checkpointed_iteration.txt"
    saved: int | None = None

    def folder_of(self, step: int | str) -> str:
        """The name of a step's folder."""
        return step if isinstance(step, str) else f"{self.prefix}{step:0{self.digits}d}"


@dataclass(frozen=True, slots=True)
class AxisSize:
    """The size of a parallel axis and where it was read.

    Attributes:
        source: `metadata` (counted), `args`, `run_config` or `config.json` (declared), `files` (a lower bound from
            payload file names), `inferred`.
    """

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class Declared:
    """A number, text or flag that the job said about itself, and where: `args`, `run_config`, `config.json`."""

    value: int | float | str
    source: str


ProblemKind = Literal[
    "unsafe", "unreadable", "limit", "unsupported", "incomplete", "container", "note", "crashed", "unused", "view"
]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a loader could not take at face value; a SAF or COM rule turns it into a finding.

    Attributes:
        kind: `unsafe` SAF001, `unreadable` SAF002, `limit` SAF003, `unsupported` SAF004, `incomplete` COM001,
            `container` PAY013, `note` an info of SAF001, `crashed` LNT002 (made by the engine),
            `unused` LNT001 (made where ignores are applied), `view` LIV301 (made by `ckptlint live`).
        file: the file it lies in, relative to the checkpoint.
        message: one sentence.
        detail: lines shown below it (the opcodes of a refused call).
        hint: what to do.
        fqn: the key concerned, if one is.
        blocks: whether the description of the tensors, or of a file's tensors, is missing because of it.
        beside: whether the unsupported thing lies beside a checkpoint that is checked.
    """

    kind: ProblemKind
    file: str
    message: str
    detail: tuple[str, ...] = ()
    hint: str = ""
    why: str = ""
    fqn: str | None = None
    blocks: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True)
class SealEntry:
    """What a tensor held when the checkpoint was sealed.

    Attributes:
        shape: of the whole tensor, in elements.
        digest: of all its elements (`digests.elem_digest`), whatever the sharding.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What `ckptlint.seal.json` says of the contents, as the saving job had them.

    Attributes:
        algorithm: of the digests; the entries of an unknown one are not read.
        metadata: BLAKE2b of the `.metadata` that it belongs to, 32 hexadecimal digits; "" for none.
        entries: key, printable -> what its tensor held.
        skipped: key, printable -> why it was not sealed.
        step: of the job, None where it did not say.
        version: of the ckptlint that wrote it.
    """

    algorithm: str
    metadata: str
    entries: dict[str, SealEntry]
    skipped: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    version: str = ""


ReferenceKind = Literal["manifest", "safetensors", "index", "Hugging Face folder", "checkpoint"]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What a checkpoint is expected to hold (`--expect`).

    Attributes:
        source: the path as the user gave it, printable.
        kind: what lies there.
        tensors: name, printable -> dtype and global shape, each None where the reference does not say; empty when only
            a config.json is at hand.
        declared: what its config.json says about the model, by canonical name (`topology.read_declared`).
        parts: the components of a checkpoint (`model`, `optim`) by folder name; empty when it is one folder.
    """

    source: str
    kind: ReferenceKind
    tensors: dict[str, tuple[str | None, tuple[int, ...] | None]]
    declared: dict[str, Declared] = field(default_factory=dict)
    parts: dict[str, Reference] = field(default_factory=dict)

    def part(self, name: str) -> Reference:
        """The component to compare with a folder of this name, or the whole."""
        return self.parts.get(name, self)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One checkpoint folder as the rules see it.

    Attributes:
        path: as the user gave it, printable.
        format: the dialect.
        writer: the oldest library that writes what was found (`torch >= 2.9`): a lower bound, not a fact.
        readable: whether the tensors were described at all; rules other than SAF and COM001 need it.
        partial: why the metadata describes only part of the save, or "".
        locates_bytes: whether offset and length of a record say where its bytes lie; not in the SAFETENSORS mode of
            torch's FileSystemWriter (>= 2.8), where all tensors of a file share one offset.
        declared: what the job said about itself, by canonical name (`topology.read_declared`).
        object_values: entry name -> content of the optimizer objects that describe their module (parameter groups,
            sharding type), one for each kind and module.
        run: the run folder that the step lies in; None outside of one.
        index: what says in which safetensors file each key lies; None without one.
        reference: what the user expects it to hold; None without `--expect`.
        unseen: what could not be looked at without making the verdict incomplete, as sentences.
        payload: what the records say; None below depth `headers`.
        seal: what the saving job sealed; None without a seal, and below depth `data`.
        metadata_hash: BLAKE2b of `.metadata`, as a seal names it; "" without either.
        ranks: what the ranks of a running job hold; None for files.
        remarks: what the ranks found themselves and the rule that runs has to tell; the engine hands each its own.
    """

    path: str
    format: Format
    writer: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: list[ShardedObject] = field(default_factory=list)
    byte_objects: list[ByteObject] = field(default_factory=list)
    records: RecordTable = field(default_factory=lambda: empty_records())
    files: list[StoredFile] = field(default_factory=list)
    writers: WriterTable | None = None
    common: CommonState | None = None
    declared: dict[str, Declared] = field(default_factory=dict)
    object_values: dict[str, Any] = field(default_factory=dict)
    run: RunFolder | None = None
    index: WeightIndex | None = None
    topology: dict[str, AxisSize] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True
    partial: str = ""
    locates_bytes: bool = True
    metadata_file: str = ".metadata"
    reference: Reference | None = None
    unseen: tuple[str, ...] = ()
    payload: PayloadTable | None = None
    seal: Seal | None = None
    metadata_hash: str = ""
    ranks: RankTable | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron-Core's own planner wrote it: entries follow its key scheme, plans its dedup."""
        return self.format == "torch_dist"

    @property
    def is_safetensors(self) -> bool:
        """Whether a record is the bare bytes of its tensor, described by the header of the file that it lies in."""
        return self.format in ("safetensors", "dcp-safetensors")

    def sound_tensors(self) -> Iterator[Tensor]:
        """The tensors that geometry rules can judge."""
        return (tensor for tensor in self.tensors.values() if tensor.is_sound)

    def problems_of(self, *kinds: ProblemKind) -> Iterator[Problem]:
        """The problems of these kinds, in the order in which they were found."""
        return (problem for problem in self.problems if problem.kind in kinds)

    @cached_property
    def is_sound(self) -> bool:
        """Whether geometry rules can judge every tensor; otherwise it is not known which are stored."""
        return all(tensor.is_sound for tensor in self.tensors.values())

    def chunk_file(self, tensor: Tensor, row: int) -> str:
        """Name of the file that holds a chunk, or "" without a storage entry."""
        record = int(tensor.chunks.record[row])
        return "" if record < 0 else self.files[int(self.records.file[record])].name

    def place(self, record: int) -> tuple[str, int, int]:
        """File name, byte offset and byte length of a record."""
        table = self.records
        return self.files[int(table.file[record])].name, int(table.byte_offset[record]), int(table.byte_length[record])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all payload files that were looked at."""
        return sum(file.size or 0 for file in self.files)


def empty_payload(count: int, depth: Literal["headers", "data"]) -> PayloadTable:
    """A table for so many records, none of which was read."""

    def minus() -> IntArray:
        return np.full(count, -1, np.int64)

    def zero() -> IntArray:
        return np.zeros(count, np.int64)

    def no() -> npt.NDArray[np.bool_]:
        return np.zeros(count, bool)

    return PayloadTable(
        state=np.full(count, RecordState.ELSEWHERE, np.int8),
        content=np.full(count, -1, np.int32),
        contents=[],
        storages=np.zeros(count, np.int32),
        stored=zero(),
        start=minus(),
        size=zero(),
        crc=minus(),
        same=np.full(count, -1, np.int32),
        constant=no(),
        scanned=no(),
        nan=zero(),
        plus_inf=zero(),
        minus_inf=zero(),
        first=minus(),
        masks=no(),
        digest=np.zeros(count, np.uint64),
        digested=no(),
        depth=depth,
    )


def empty_records() -> RecordTable:
    """A table without rows."""
    none = np.zeros(0, np.int64)
    flags = np.zeros(0, bool)
    return RecordTable([], none.astype(np.int32), none.astype(np.int32), none, none, flags, flags, {})
