"""The regular row runs of a metadata pickle: read as columns, and never as anything else than the pickle says."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickles import CF, CM, CP, MT, Call, Size, dumped, name_of, new
from support import REAL, SWEEP, examples

from ckptlint.errors import CkptlintError, LimitError
from ckptlint.formats.pickles import columns as pickle_columns
from ckptlint.formats.pickles import rows as pickle_rows
from ckptlint.formats.pickles import safe_pickle as unpickle
from ckptlint.formats.pickles.columns import scan
from ckptlint.formats.pickles.rows import Buffer
from ckptlint.formats.pickles.safe_pickle import Opaque, read_metadata
from ckptlint.loaders.readers.dcp.metadata import describe
from ckptlint.loaders.readers.dcp.save_plans import read_plans
from ckptlint.sandbox import isolated

NEVER = 1 << 60
METADATA = sorted(REAL.rglob("*.metadata"))[:: 1 if SWEEP else 4]


def read(data: bytes, worthwhile: int) -> Any:
    """What the file describes, what was refused, or the error; read as columns from so many bytes on."""
    kept = unpickle.WORTHWHILE
    unpickle.WORTHWHILE = worthwhile
    try:
        found = read_metadata(Buffer([data], len(data)) if worthwhile == 0 else data)
        if found.refused:
            return [refused.target for refused in found.refused]
        described = describe([found.root])
        return described, read_plans(described.extras.pop("all_local_plans", None))
    except CkptlintError as error:
        return type(error), str(error)
    finally:
        unpickle.WORTHWHILE = kept


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal values in equal order, arrays and stand-ins included."""
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other), where
    elif is_dataclass(one) and not isinstance(one, type):
        for part in fields(one):
            assert_same(getattr(one, part.name), getattr(other, part.name), f"{where}.{part.name}")
    elif isinstance(one, Opaque):
        assert (one.module, one.name) == (other.module, other.name), where
        assert_same([one.args, one.state, one.items], [other.args, other.state, other.items], where)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()), where)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{number}]")
    else:
        assert one == other, where


def assert_read_alike(data: bytes) -> None:
    """With columns and without, the same is read."""
    assert_same(read(data, 0), read(data, NEVER))


# ---------------------------------------------------------------- what is read


@pytest.mark.sweep
def test_every_real_file_says_the_same_both_ways() -> None:
    wrong = []
    for path in METADATA:
        try:
            assert_read_alike(path.read_bytes())
        except Exception as error:
            wrong.append(f"{path}: {error!r}")
    assert METADATA and not wrong, "\n".join(wrong)


@pytest.mark.sweep
@pytest.mark.parametrize("block", [1 << 20, 1000])
def test_a_scanned_buffer_gives_every_real_file_back(block: int) -> None:
    wrong, with_row_runs = [], 0
    for path in METADATA:
        data = path.read_bytes()
        buffer = Buffer((data[start : start + block] for start in range(0, len(data), block)), len(data))
        before = bytes(buffer)
        found = scan(buffer)
        if before != data or bytes(buffer) != data or (found is not None and buffer.end >= len(data)):
            wrong.append(
                f"{path}: {len(before)} and {len(bytes(buffer))} bytes of {len(data)}, rows until {buffer.end}"
            )
        with_row_runs += found is not None
    assert not wrong, "\n".join(wrong)
    assert with_row_runs > len(METADATA) / 2


@pytest.mark.parametrize("cut", [0, 1, 11, 12, 500, 70_000])
def test_a_buffer_with_broken_frames_is_left_alone(cut: int) -> None:
    data = dumped(large(800))[: cut or None] + b"rest"
    buffer = Buffer([data, b""], len(data) + 7)
    assert scan(buffer) is None and bytes(buffer) == data


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    return new(CM, "ChunkStorageMetadata", offsets=Size(offsets), sizes=Size(sizes))


def tensor(shape: tuple[int, ...], chunks: list[Any]) -> Any:
    return new(CM, "TensorStorageMetadata", properties=None, size=Size(shape), chunks=chunks)


def record(fqn: str, offset: Any, path: str, start: int, hint: int | None, length: int = 100) -> tuple[Any, Any]:
    state = {"fqn": fqn, "index": hint} | ({} if offset is None else {"offset": offset})
    return new(CM, "MetadataIndex", **state), new(CF, "_StorageInfo", relative_path=path, offset=start, length=length)


def metadata(tensors: dict[str, Any], stored: dict[Any, Any]) -> Any:
    return new(CM, "Metadata", state_dict_metadata=tensors, planner_data=None, storage_data=stored, storage_meta=None)


def entry() -> Any:
    return new(CM, "BytesStorageMetadata")


def objects(count: int, names: tuple[str, ...] = ()) -> Any:
    """Bytes entries around one tensor, with a map of keys that refers to each, and one of their records that does."""
    keys = [f"layers._extra_state/shard_{number}_{count}" for number in range(count)] + [*names]
    described = {key: entry() for key in keys[: count // 2]}
    described["käse"] = tensor((2,), [chunk((0,), (1,)), chunk((1,), (1,))])
    described |= {key: entry() for key in keys[count // 2 :]}
    stored = {}
    for number, key in enumerate(reversed(keys)):
        spelled = key if number == 1 else key[:1] + key[1:]
        index, info = record(spelled, None, f"__{number % 4}_0.distcp", number << 20, None)
        stored[index] = info
    root = metadata(described, stored)
    vars(root)["planner_data"] = {key: (key,) for key in described}
    return root


def large(ranks: int = 2500, names: tuple[str, ...] = ("layers.0.weight", "käse", "n" * 300)) -> Any:
    """Tensors cut along axis 0, with batches, frames, offsets of every width and byte offsets beyond 2 GiB."""
    tensors = {name: tensor((40 * ranks, 7), [chunk((40 * r, 0), (40, 7)) for r in range(ranks)]) for name in names}
    stored = {}
    for rank in range(ranks):
        path = f"__{rank}_0.distcp"
        for number, name in enumerate(names):
            spelled = name[:1] + name[1:]  # every rank spells its names anew
            key, info = record(spelled, Size((40 * rank, 0)), path, number << 31, rank)
            stored[key] = info
    return metadata(tensors, stored)


def test_a_large_file_is_read_as_columns() -> None:
    data = dumped(large())
    found = scan(data)
    assert found is not None
    assert sum(row_run.count for row_run in found.row_runs) == 4 * 3 * 2500 // 2 - 1 - 1  # but the two first rows
    assert len(found.pickle) < len(data) / 20
    assert_read_alike(data)
    described, _ = read(data, 0)
    assert described.records.owned.all() and len(described.paths) == 2500
    assert described.records.byte_offset.max() == 2 << 31


def test_columns_widen_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_columns, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(pickle_rows, "ROWS_AT_ONCE", 64)
    assert_read_alike(dumped(large(700)))
    rows = [chunk((1 << row // 8, 0), (1, 1 << row // 16)) for row in range(440)]
    stored = dict(record("a", Size((1 << row // 8, 0)), "__0_0.distcp", 1 << row // 8, row % 300) for row in range(440))
    data = dumped(metadata({"a": tensor((1 << 60, 1), rows)}, stored))
    assert scan(data) is not None
    assert_read_alike(data)


@pytest.mark.parametrize("name", ["a\0b", "\0", "\ud800", ""])
def test_a_name_that_is_no_plain_text(name: str) -> None:
    assert_read_alike(dumped(large(300, (name, "b"))))


def test_bytes_entries_are_read_as_columns() -> None:
    data = dumped(objects(3000, ("x" * 255, "y" * 256, "z")))
    found = scan(data)
    assert found is not None and len(found.pickle) < len(data) / 2
    kinds = [table.attributes for table in found.tables for run in found.row_runs if run.table is table]
    assert kinds.count((0,)) >= 3000 // 1000
    assert_read_alike(data)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", "\x85)\x81\x94", "layers._extra_state/shard_0_30"])
def test_a_bytes_entry_of_any_name(name: str) -> None:
    assert_read_alike(dumped(objects(30, (name,))))


def test_a_key_that_is_there_twice_is_one_entry() -> None:
    """The tensor `a` becomes a bytes entry, or the bytes entry `a` a tensor, where it stood first."""
    first, second = opcodes_of(dumped(objects(6))), b"shard_4_6"
    for old in (b"shard_1_6", b"shard_3_6", b"shard_5_6"):
        assert_read_alike(framed(first.replace(b"shard_0_6", old)))
        assert_read_alike(framed(first.replace(b"\x8c\x05k\xc3\xa4se", b"\x8c\x1dlayers._extra_state/" + old, 1)))
        assert_read_alike(framed(first.replace(second, old)))


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Metadata with tensors of mixed ranks, shared and repeated objects, holes in what is written down."""
    texts = st.sampled_from(["a.weight", "b", "käse", "x" * 300])
    extents = st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**61, 2**62, 2**64, -1, True])
    tensors, offsets = {}, []
    for name in draw(st.lists(texts, unique=True, max_size=3)):
        rank = draw(st.integers(0, 5))
        chunks = []
        for _ in range(draw(st.integers(0, 6))):
            extent = st.lists(extents, min_size=rank, max_size=rank + draw(st.integers(0, 1))).map(tuple)
            chunks.append(chunk(draw(extent), draw(extent)))
            offsets.append(vars(chunks[-1])["offsets"])
        if chunks and draw(st.booleans()):
            chunks.append(chunks[0])
        tensors[name] = tensor((5,) * rank, chunks)
    for name in draw(st.lists(st.sampled_from(["o/shard_0_2", "o/shard_1_2", "käse.x", "y" * 300, "z"]), unique=True)):
        tensors[name] = entry()
    stored = {}
    paths = [f"__{rank}_0.distcp" for rank in range(3)]
    fresh = st.lists(extents, max_size=5).map(lambda sizes: Size(tuple(sizes)))
    for _ in range(draw(st.integers(0, 12))):
        offset = draw(st.one_of(st.none(), fresh, st.sampled_from(offsets) if offsets else st.none()))
        start, hint = draw(extents), draw(st.one_of(st.none(), st.integers(-1, 4)))
        spelled = draw(st.one_of(texts, st.sampled_from([*tensors, "b"])))
        key, info = record(spelled, offset, draw(st.sampled_from(paths)), start, hint)
        if draw(st.integers(0, 9)) == 0:
            vars(info)["transform_descriptors"] = draw(st.sampled_from([None, ["zstd"]]))
        stored[key] = info
    return metadata(tensors, stored)


@settings(max_examples=examples(12, 300))
@given(trees())
def test_random_metadata_says_the_same_both_ways(root: Any) -> None:
    assert_read_alike(dumped(root))


# ---------------------------------------------------------------- plans


LAYOUT = Call(name_of("torch.serialization", "_get_layout"), "torch.strided")
FORMAT = Call(name_of(CM, "_MEM_FORMAT_ENCODING"), 0)


def properties(dtype: str) -> Any:
    """A TensorProperties, whose state is a tuple, with a dtype, a layout and a member of an enum that all share."""
    return new(CM, "TensorProperties", raw_state=(name_of("torch", dtype), LAYOUT, False, FORMAT, False))


KINDS = {number: Call(name_of(CP, "WriteItemType"), number) for number in (1, 2, 3)}


def item(fqn: str, piece: Any, held: Any, size: Any, offset: Any = None, kind: int = 2) -> Any:
    """A WriteItem of a tensor's chunk."""
    index = new(CM, "MetadataIndex", fqn=fqn, index=None, offset=vars(piece)["offsets"] if offset is None else offset)
    data = new(CP, "TensorWriteData", chunk=piece, properties=held, size=size)
    return new(CP, "WriteItem", index=index, type=KINDS[kind], bytes_io_data=None, tensor_data=data)


def bytes_item(fqn: str) -> Any:
    index = new(CM, "MetadataIndex", fqn=fqn, index=None)
    return new(CP, "WriteItem", index=index, type=KINDS[3], bytes_io_data=None, tensor_data=None)


def plan(items: list[Any]) -> Any:
    return new(CP, "SavePlan", items=items, storage_data=None, planner_data=None, usable=True)


def planned(ranks: int, names: tuple[str, ...] = ("layers.0.weight", "layers.1.weight")) -> Any:
    """Metadata whose ranks each planned a chunk of every tensor, an object, and a copy that was dropped."""
    tensors, plans = {}, [list[Any]() for _ in range(ranks)]
    for name in names:
        chunks = [chunk((40 * rank, 0), (40, 7)) for rank in range(ranks)]
        tensors[name] = tensor((40 * ranks, 7), chunks)
        first = vars(tensors[name])["properties"] = properties("bfloat16")
        for rank, of_rank in enumerate(plans):
            held = first if rank == 0 else properties("bfloat16")
            spelled = name if rank < 2 else name[:1] + name[1:]
            size = vars(tensors[name])["size"] if rank < 3 else Size((40 * ranks, 7))
            of_rank.append(item(spelled, chunks[rank], held, size))
            of_rank.append(bytes_item(f"{name}._extra_state/shard_{rank}_{ranks}"))
            of_rank.append(item(f"{spelled}.copy", chunk((0, 0), (40 * ranks, 7)), held, size))
    stored = {}
    for rank in range(ranks):
        for name in names:
            key, info = record(name, Size((40 * rank, 0)), f"__{rank}_0.distcp", rank << 31, rank)
            stored[key] = info
    root = metadata(tensors, stored)
    vars(root)["all_local_plans"] = [plan(items) for items in plans]
    return root


def test_plans_are_read_as_columns() -> None:
    data = dumped(planned(600))
    found = scan(data)
    assert found is not None
    plans = found.tables[-1]
    assert sum(run.count for run in found.row_runs if run.table is plans) > 600 * 6 - 20
    assert_read_alike(data)
    _, read_as = read(data, 0)
    assert read_as.world_size == 600 and len(read_as) == 600 * 6
    assert read_as.is_bytes.sum() == 600 * 2 and read_as.dtypes == ["bfloat16"]
    assert read_as.offsets[read_as.rank == 7].tolist() == [[280, 0], [-1, -1], [0, 0]] * 2


@st.composite
def trees_with_plans(draw: st.DrawFn) -> Any:
    """Metadata with plans whose chunks, sizes, properties and keys are shared, repeated, odd or absent."""
    root = draw(trees())
    tensors = vars(root)["state_dict_metadata"]
    chunks = [one for each in tensors.values() for one in vars(each).get("chunks", ())]
    held = [properties(dtype) for dtype in ("float32", "bfloat16")]
    sizes = [vars(each)["size"] for each in tensors.values() if "size" in vars(each)]
    extents = st.sampled_from([0, 1, 255, 256, 2**31, 2**62, -1])
    fresh = st.lists(extents, max_size=4).map(lambda found: Size(tuple(found)))
    texts = st.sampled_from([*tensors, "b", "size", "x" * 300, "index"])
    own = st.builds(chunk, fresh.map(tuple), fresh.map(tuple))
    made: list[Any] = []

    def of_plan() -> list[Any]:
        items = []
        for _ in range(draw(st.integers(0, 8))):
            if draw(st.integers(0, 3)) == 0:
                items.append(bytes_item(draw(texts)))
                continue
            piece = draw(st.one_of(st.sampled_from(chunks), own) if chunks else own)
            size = draw(st.one_of(st.sampled_from(sizes), fresh) if sizes else fresh)
            shared = draw(st.one_of(st.sampled_from(held), st.builds(properties, st.sampled_from(["float32", "int8"]))))
            items.append(item(draw(texts), piece, shared, size, kind=draw(st.integers(1, 3))))
            if draw(st.integers(0, 5)) == 0:
                chunks.append(piece)
            odd = draw(st.integers(0, 40))
            if odd == 0:
                vars(items[-1])["bytes_io_data"] = new(CP, "BytesIOWriteData", nbytes=5)
            elif odd == 1:
                vars(items[-1])["tensor_data"] = vars(draw(st.sampled_from(made or items[-1:])))["tensor_data"]
            elif odd == 2:
                vars(vars(items[-1])["tensor_data"])["properties"] = None
            elif odd == 3:
                items.append(draw(st.sampled_from(items)))
        made.extend(items)
        return items

    vars(root)["all_local_plans"] = [plan(of_plan()) for _ in range(draw(st.integers(0, 4)))]
    return root


@settings(max_examples=examples(12, 300))
@given(trees_with_plans())
def test_random_plans_say_the_same_both_ways(root: Any) -> None:
    assert_read_alike(dumped(root))


@pytest.mark.parametrize("module", [CP, MT])
def test_a_plan_of_megatron_is_a_plan(module: str) -> None:
    root = planned(40)
    for one in vars(root)["all_local_plans"]:
        one.__class__ = name_of(module, "SavePlan" if module == CP else "MCoreSavePlan")
    data = dumped(root)
    assert read(data, 0)[1] is not None
    assert_read_alike(data)


# ---------------------------------------------------------------- what is made to deceive


def framed(opcodes: bytes) -> bytes:
    """A pickle of one frame around these opcodes."""
    return b"\x80\x04\x95" + struct.pack("<Q", len(opcodes)) + opcodes


def opcodes_of(data: bytes) -> bytes:
    """The opcodes of a pickle without its frames."""
    parts, at = [], 2
    while at < len(data):
        length = struct.unpack_from("<Q", data, at + 1)[0]
        parts.append(data[at + 9 : at + 9 + length])
        at += 9 + length
    return b"".join(parts)


SMALL = opcodes_of(dumped(large(4, ("w", "v"))))
SMALL_PLANS = opcodes_of(dumped(planned(4, ("w",))))
SMALL_OBJECTS = opcodes_of(dumped(objects(8)))


def edits(seed: int, number: int) -> Iterator[bytes]:
    """Small pickles with a byte changed, removed or put in, or a part repeated or left out."""
    choose = random.Random(seed)
    opcodes = b"0123()]}NKMJhjqrtleaesubR\x81\x85\x86\x87\x8c\x90\x93\x94\x95Qc.\x88\x89\x8a"
    for _ in range(number):
        edited = bytearray(choose.choice([SMALL, SMALL_PLANS, SMALL_OBJECTS]))
        for _ in range(choose.randint(1, 2)):
            at, kind = choose.randrange(len(edited)), choose.randrange(5)
            if kind == 0:
                edited[at] = choose.randrange(256)
            elif kind == 1:
                edited[at] = choose.choice(opcodes)
            elif kind == 2:
                edited[at:at] = bytes([choose.choice(opcodes)])
            elif kind == 3:
                del edited[at : at + choose.randint(1, 60)]
            else:
                edited[at:at] = edited[at - choose.randint(0, 60) : at]
        yield framed(bytes(edited))


def differing(seed: int) -> list[bytes]:
    """The edited pickles that are read differently."""
    found = []
    for data in edits(seed, examples(80, 400)):
        try:
            assert_read_alike(data)
        except AssertionError:
            found.append(data)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(examples(1, 8)))
def test_an_edited_pickle_says_the_same_both_ways(seed: int) -> None:
    # under limits: an edit may ask the unpickler for gigabytes
    assert isolated(partial(differing, seed), 64 * 1024**2) == []


CLASS = b"\x8c\x14ChunkStorageMetadata\x94"


ENTRIES = SMALL_OBJECTS.index(b"\x8c\x1dlayers._extra_state/shard_1")


def row_run_end() -> int:
    """Where the first row run of `SMALL` ends: at the APPENDS of the first list of chunks."""
    return SMALL.index(b"ube", SMALL.index(CLASS)) + 2


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize(
    "inserted",
    [
        b"0",  # POP: the last chunk is dropped
        b"2",  # DUP: it is there twice
        b"1(",  # POP_MARK: all are dropped
        b"a",  # APPEND: the last becomes an item of the one before
        b"Nb",  # BUILD with None as its state
        b"}b",
        b"\x85",  # TUPLE1
        b"\x86",
        b"N\x86",
        b"s",
        b"\x94",  # one more memo entry
        b"N0",
        b"\x94h\x00",
        b"Q",  # BINPERSID
        b"NQ",
        b"(J\x00\x00\x00\x00tQ",
        b"h\x20",  # a chunk of the row run by reference
        b"h\x2a",
        b"e]\x94(",
    ],
)
def test_opcodes_after_a_row_run(inserted: bytes) -> None:
    at = row_run_end()
    assert_read_alike(framed(SMALL[:at] + inserted + SMALL[at:]))
    records = SMALL_OBJECTS.index(b"_StorageInfo") + 100
    for start in (ENTRIES, records):
        for at in range(start + len(inserted) % 3, start + 120, 3):
            assert_read_alike(framed(SMALL_OBJECTS[:at] + inserted + SMALL_OBJECTS[at:]))


def test_a_row_inside_of_a_text_is_a_text() -> None:
    start = SMALL.index(CLASS)
    first = SMALL.index(b"ub", start) + 2
    rows = SMALL[first : row_run_end()]
    for text in (b"X" + struct.pack("<I", len(rows)) + rows, b"B" + struct.pack("<I", len(rows)) + rows):
        assert_read_alike(framed(SMALL[:first] + text + SMALL[first:]))


def test_a_frame_may_begin_inside_of_a_row_but_not_inside_of_an_opcode() -> None:
    first = SMALL.index(b"ub", SMALL.index(CLASS)) + 2
    places = [(SMALL, at) for at in range(first, row_run_end())]
    places += [(SMALL_OBJECTS, at) for at in range(ENTRIES - 10, ENTRIES + 120)]
    for whole, at in places:
        head, tail = whole[:at], whole[at:]
        data = b"\x80\x04" + b"".join(b"\x95" + struct.pack("<Q", len(part)) + part for part in (head, tail))
        assert_read_alike(data)


def test_a_class_that_is_none_of_torch_is_refused() -> None:
    root = large(4, ("w",))
    data = dumped(root).replace(b"\x8c\x14ChunkStorageMetadata", b"\x8c\x14ChunkStorageMetabata")
    assert_read_alike(data)
    data = dumped(root).replace(b"torch.distributed.checkpoint.metadata", b"torch.distributed.checkpoint.metabata")
    assert_read_alike(data)
    assert isinstance(read(data, 0), list)
    for kind in (b"BytesStorageMetabata", b"TensorProperties\x94\x8c\x02"):
        assert_read_alike(dumped(objects(8)).replace(b"BytesStorageMetadata", kind))


@pytest.mark.forks
def test_an_answer_that_is_nested_too_deeply_is_a_limit() -> None:
    def work() -> Any:
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        return [np.zeros(1 << 20), nested]  # the first part is sent before the second fails

    with pytest.raises(LimitError, match=r"^is nested too deeply$"):
        isolated(work, 0)
