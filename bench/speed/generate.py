"""Writes `.metadata` files of any size with torch's own classes: python bench/speed/generate.py KIND CHUNKS FOLDER.

KIND: fsdp (axis 0 over 1,024 ranks), tp-fsdp (axes 1 and 0 over 8 x 128), moe (experts x columns, 256 x 64 for each
tensor), flat (uneven flat optimizer shards over 512 ranks), mcore (with the plans of 512 ranks), objects
(ShardedObjects), holes (fsdp, of which each tensor lacks the chunk of another rank), files (fsdp, each chunk in a file
of its own). CHUNKS is the number of chunks, or of objects. Payload is written for files only, as files of the right
length without content: check the others with --depth metadata.

What ranks send to the coordinator goes through pickle here too, so strings are shared in the file as in a real save: a
name is spelled once for each rank, a path once for each file.

fsdp with more than 2 million chunks is written opcode by opcode, since torch's objects would need tens of gigabytes;
first a small one, of which `pickle.loads` must give what torch's classes give.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Cut = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""A tensor: name, global shape, and for each rank the offsets and sizes of its chunk."""

STREAM_FROM = 2_000_000
FRAME = 64 * 1024
BATCH = 1000  # items of a list or dict that one opcode takes
ROWS, COLUMNS, ITEM = 8, 4096, 4


def cuts(kind: str, chunks: int) -> Iterator[Cut]:
    """The tensors of a kind that together have about so many chunks."""
    if kind in ("fsdp", "holes", "files"):
        for number, name in enumerate(names(chunks // 1024)):
            lost = {number % 1024} if kind == "holes" else {}
            extents = [((ROWS * r, 0), (ROWS, COLUMNS)) for r in range(1024) if r not in lost]
            yield name, (ROWS * 1024, COLUMNS), extents
    elif kind == "tp-fsdp":
        for name in names(chunks // 1024):
            grid = [((16 * d, 512 * t), (16, 512)) for t in range(8) for d in range(128)]
            yield name, (16 * 128, 512 * 8), grid
    elif kind == "moe":
        for layer in range(max(chunks // (256 * 64), 1)):
            grid = [((e, 0, 64 * i), (1, 7168, 64)) for e in range(256) for i in range(64)]
            yield f"layers.{layer}.mlp.experts.gate_up_proj", (256, 7168, 64 * 64), grid
    else:
        for number, name in enumerate(names(chunks // 512)):
            total = 512 * 70_000 + 37 * number + 1
            edges = [total * r // 512 for r in range(513)]
            yield f"optimizer.state.exp_avg.{name}", (total,), [((a,), (b - a,)) for a, b in pairwise(edges)]


def names(count: int) -> list[str]:
    """Parameter names of a Llama-like model, so many or fewer: whole layers."""
    kinds = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2"]
    return [f"model.layers.{i // 6}.{kinds[i % 6]}.weight" for i in range(max(count - count % 6, 6))]


def metadata(kind: str, chunks: int) -> Metadata:
    """The metadata as the coordinator holds it when it writes it."""
    if kind == "objects":
        return objects(chunks)
    described, results, plans = {}, {}, {}
    position: dict[int, int] = {}
    for name, shape, extents in cuts("flat" if kind == "mcore" else kind, chunks):
        pieces = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in extents]
        properties = TensorProperties(dtype=torch.float32)
        size = torch.Size(shape)
        described[name] = TensorStorageMetadata(properties, size, pieces)
        for rank, piece in enumerate(pieces):
            length = piece.sizes.numel() * ITEM + 1600
            start = position.get(rank, 0)
            position[rank] = start + length
            index = MetadataIndex(name, piece.offsets, rank)
            results.setdefault(rank, []).append((index, start, length))
            if kind == "mcore":
                item = WriteItem(
                    MetadataIndex(name, piece.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(piece, properties if rank == 0 else TensorProperties(), size),
                )
                plans.setdefault(rank, []).append(item)
    stored = {}
    for rank, of_rank in results.items():
        path = f"__{rank}_0.distcp"
        sent = [(index, _StorageInfo(path, start, length)) for index, start, length in of_rank]
        if kind == "files":
            numbered = enumerate(of_rank)
            sent = [(i, _StorageInfo(f"__{rank}_{number}.distcp", 0, length)) for number, (i, _, length) in numbered]
        stored.update(pickle.loads(pickle.dumps(sent)))
    whole = Metadata(described, {name: tuple(name.split(".", 1)) for name in described}, stored, meta(), "1.0.0")
    if kind == "mcore":
        whole.all_local_plans = [SavePlan(items) for items in plans.values()]
    return whole


def objects(count: int) -> Metadata:
    """ShardedObjects only: `_extra_state` of 1,000 layers or more, spread over the ranks."""
    keys = [f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{i}_{count}" for i in range(count)]
    stored = {}
    for rank in range(512):
        path = f"__{rank}_0.distcp"
        sent = [(MetadataIndex(key), _StorageInfo(path, 700 * n, 700)) for n, key in enumerate(keys[rank::512])]
        stored.update(pickle.loads(pickle.dumps(sent)))
    return Metadata({key: BytesStorageMetadata() for key in keys}, {}, stored, meta())


def meta() -> StorageMeta:
    """What FileSystemWriter leaves about the save."""
    return StorageMeta(checkpoint_id="/checkpoints/bench", save_id="00000000-0000-4000-8000-000000000000")


# ---------------------------------------------------------------- as a stream


class _Stream:
    """The opcodes of a pickle of protocol 4, in frames; classes, attribute names and enum members by reference."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.frame, self.memo = file, bytearray(), 0
        self.known: dict[str, int] = {}
        self.keeping = False  # what is put is told first; no frame may end
        self.met: set[int] = set()
        self.same: dict[int, tuple[bytes, int]] = {}
        file.write(b"\x80\x04")

    def put(self, opcodes: bytes) -> None:
        self.frame += opcodes

    def kept(self, write: Callable[[], None]) -> tuple[bytes, int]:
        """The opcodes that `write` puts, which names nothing anew, and the memo entries they make; nothing is put."""
        start, memo, named = len(self.frame), self.memo, len(self.known)
        self.keeping = True
        write()
        self.keeping = False
        opcodes, made = bytes(self.frame[start:]), self.memo - memo
        assert named == len(self.known) and start + len(opcodes) == len(self.frame)
        self.memo = memo
        del self.frame[start:]
        return opcodes, made

    def again(self, key: int, write: Callable[[], None]) -> None:
        """What `write` puts, kept under a key once it names nothing anew."""
        if key in self.same:
            opcodes, made = self.same[key]
            self.frame += opcodes
            self.memo += made
        elif key in self.met:
            self.same[key] = self.kept(write)
            self.again(key, write)
        else:
            self.met.add(key)
            write()

    def flush(self) -> None:
        self.file.write(b"\x95" + struct.pack("<Q", len(self.frame)) + self.frame)
        self.frame.clear()

    def memoize(self, name: str = "") -> None:
        self.put(b"\x94")
        if name:
            self.known[name] = self.memo
        self.memo += 1

    def get(self, name: str) -> bool:
        """Whether something of this name is in the memo; it is pushed if so."""
        index = self.known.get(name, -1)
        if index >= 0:
            self.put(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))
        return index >= 0

    def integer(self, value: int) -> None:
        if value < 256:
            self.put(b"K" + bytes([value]))
        elif value < 65536:
            self.put(b"M" + struct.pack("<H", value))
        elif value < 2**31:
            self.put(b"J" + struct.pack("<i", value))
        else:
            width = value.bit_length() // 8 + 1
            self.put(b"\x8a" + bytes([width]) + value.to_bytes(width, "little"))

    def text(self, text: str, name: str = "") -> None:
        if not name or not self.get(name):
            data = text.encode()
            self.put(b"\x8c" + bytes([len(data)]) + data)
            self.memoize(name)

    def cls(self, module: str, name: str) -> None:
        if not self.get(f"{module}.{name}"):
            self.text(module, f"module {module}")
            self.text(name)
            self.put(b"\x93")
            self.memoize(f"{module}.{name}")

    def size(self, values: tuple[int, ...]) -> None:
        self.cls("torch", "Size")
        for value in values:
            self.integer(value)
        self.put(bytes([0x84 + len(values)]))
        self.memoize()
        self.reduce()

    def reduce(self, name: str = "") -> None:
        self.put(b"\x85")
        self.memoize()
        self.put(b"R")
        self.memoize(name)

    def obj(self, module: str, name: str, attributes: dict[str, Callable[[], None]]) -> None:
        self.cls(module, name)
        self.put(b")\x81")
        self.memoize()
        self.dict((partial(self.text, key, f"attribute {key}"), value) for key, value in attributes.items())
        self.put(b"b")

    def dict(self, items: Iterable[tuple[Callable[[], None], Callable[[], None]]]) -> None:
        self.put(b"}")
        self.memoize()
        self.batches(b"u", items)

    def list(self, items: Iterable[Callable[[], None]]) -> None:
        self.put(b"]")
        self.memoize()
        self.batches(b"e", ((item,) for item in items))

    def batches(self, opcode: bytes, items: Iterable[tuple[Callable[[], None], ...]]) -> None:
        number = -1
        for number, item in enumerate(items):
            if number % BATCH == 0:
                self.put(opcode + b"(" if number else b"(")
            for part in item:
                part()
            if len(self.frame) >= FRAME and not self.keeping:
                self.flush()
        if number >= 0:
            self.put(opcode)


def write_stream(tensors: int, file: BinaryIO, ranks: int = 1024) -> None:
    """The kind fsdp: `pickle.loads` of it equals `metadata("fsdp", ...)`."""
    out = _Stream(file)
    here = "torch.distributed.checkpoint.metadata"
    length = ROWS * COLUMNS * ITEM + 1600
    all_names = names(tensors)
    tensors = len(all_names)

    def properties() -> None:
        out.cls(here, "TensorProperties")
        out.put(b")\x81")
        out.memoize()
        out.put(b"(")
        out.cls("torch", "float32")
        if not out.get("strided"):
            out.cls("torch.serialization", "_get_layout")
            out.text("torch.strided")
            out.reduce("strided")
        out.put(b"\x89")
        if not out.get("contiguous"):
            out.cls(here, "_MEM_FORMAT_ENCODING")
            out.integer(0)
            out.reduce("contiguous")
        out.put(b"\x89t")
        out.memoize()
        out.put(b"b")

    def chunk(rank: int) -> None:
        extents = {"offsets": partial(out.size, (ROWS * rank, 0)), "sizes": partial(out.size, (ROWS, COLUMNS))}
        out.obj(here, "ChunkStorageMetadata", extents)

    def tensor() -> None:
        chunks = (partial(out.again, rank, partial(chunk, rank)) for rank in range(ranks))
        size = partial(out.size, (ROWS * ranks, COLUMNS))
        attributes = {"properties": properties, "size": size, "chunks": partial(out.list, chunks)}
        out.obj(here, "TensorStorageMetadata", attributes)

    def index(name: str, rank: int) -> None:
        offset = partial(out.size, (ROWS * rank, 0))
        attributes = {"fqn": partial(out.text, name), "index": partial(out.integer, rank), "offset": offset}
        out.obj(here, "MetadataIndex", attributes)

    def info(rank: int, first: int) -> None:
        path = partial(out.text, f"__{rank}_0.distcp", f"path {rank}")
        start, size = partial(out.integer, first), partial(out.integer, length)
        attributes = {"relative_path": path, "offset": start, "length": size}
        out.obj("torch.distributed.checkpoint.filesystem", "_StorageInfo", attributes)

    def path_of(name: str) -> None:
        out.text("model")
        out.text(name.split(".", 1)[1])
        out.put(b"\x86")
        out.memoize()

    def stored() -> None:
        """A dict of records: of each rank the first, from which the opcodes of its others are told."""
        out.put(b"}")
        out.memoize()
        sample, far = "sample name of a tensor", 123_456_789
        spelled = [b"\x8c" + bytes([len(name)]) + name.encode() + b"\x94" for name in (*all_names, sample)]
        starts = [out.kept(partial(out.integer, start))[0] for start in (*range(0, tensors * length, length), far)]
        done = 0
        for rank in range(ranks):
            at = 0
            while at < tensors:
                if done % BATCH == 0:
                    out.put(b"u(" if done else b"(")
                count = min(tensors - at, BATCH - done % BATCH) if at else 1
                if at == 0:
                    index(all_names[0], rank)
                    info(rank, 0)
                    opcodes, made = out.kept(lambda rank=rank: (index(sample, rank), info(rank, far)))
                    head, rest = opcodes.split(spelled[-1])
                    middle, tail = rest.split(starts[-1])
                else:
                    rows = zip(spelled[at : at + count], starts[at : at + count], strict=True)
                    out.put(b"".join(head + name + middle + start + tail for name, start in rows))
                    out.memo += count * made
                at, done = at + count, done + count
                if len(out.frame) >= FRAME:
                    out.flush()
        out.put(b"u")

    root = {
        "state_dict_metadata": lambda: out.dict((partial(out.text, name), tensor) for name in all_names),
        "planner_data": lambda: out.dict((partial(out.text, name), partial(path_of, name)) for name in all_names),
        "storage_data": stored,
        "storage_meta": partial(out.put, b"N"),
        "version": partial(out.text, "1.0.0"),
    }
    out.obj(here, "Metadata", root)
    out.put(b".")
    out.flush()


def check_stream() -> None:
    """That a small stream and torch's own pickle mean the same."""
    buffer = io.BytesIO()
    write_stream(6, buffer)
    expected = metadata("fsdp", 6 * 1024)
    expected.storage_meta = None
    assert pickle.loads(buffer.getvalue()) == expected


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["fsdp", "tp-fsdp", "moe", "flat", "mcore", "objects", "holes", "files"])
    parser.add_argument("chunks", type=int)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    generate(arguments.kind, arguments.chunks, arguments.folder)


def generate(kind: str, chunks: int, folder: Path) -> None:
    """Write `.metadata`, and what else makes the folder one of its format."""
    with (folder / ".metadata").open("wb") as file:
        if kind == "fsdp" and chunks > STREAM_FROM:
            check_stream()
            write_stream(chunks // 1024, file)
        else:
            whole = metadata(kind, chunks)
            pickle.dump(whole, file)
            for info in whole.storage_data.values() if kind == "files" else ():
                with (folder / info.relative_path).open("wb") as payload:
                    payload.write(b"PK\3\4"[: info.length])
                    payload.truncate(info.length)
    if kind in ("mcore", "objects"):
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        torch.save({"iteration": 10}, folder / "common.pt")


if __name__ == "__main__":
    main()
