"""The operators: each does to a healthy checkpoint what some bug, torn copy or edit does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mutants import Mutant, Operator, Save, edited, megatron_names
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from ckptlint.rule import Depth

OPERATORS: list[Operator] = []

HOLES = "GEO004 GEO005 GEO006 EXP003 PAY006"
SHAPES = "SHP001 SHP002 SHP003 SHP004 SHP005 SHP008 EXP001 EXP004 OPT001 OPT002 OPT006 COM008 COM010 NAM001"

Mutants = Callable[[Save], Iterator[Mutant]]
Offsets = tuple[int, ...]


def operator(name: str, depth: Depth, codes: str) -> Callable[[Mutants], Mutants]:
    """Add a function that yields mutants to the operators, with the rules that may speak of them."""

    def add(mutants: Mutants) -> Mutants:
        OPERATORS.append(Operator(name, depth, frozenset(codes.split()), mutants))
        return mutants

    return add


def chunks(save: Save, least: int = 1) -> Iterator[tuple[str, int, Offsets, Offsets]]:
    """Key, number, offsets and sizes of every chunk that is not empty, of tensors with at least so many of them."""
    for fqn, tensor in save.tensors.items():
        live = [i for i, chunk in enumerate(tensor.chunks) if 0 not in chunk.sizes]
        if len(live) >= least:
            for i in live:
                yield fqn, i, tuple(tensor.chunks[i].offsets), tuple(tensor.chunks[i].sizes)


def put(metadata: Metadata, fqn: str, number: int, offsets: Iterable[int], sizes: Iterable[int]) -> None:
    """Give a chunk another place or size; its storage entry goes along."""
    tensor: Any = metadata.state_dict_metadata[fqn]
    stored = metadata.storage_data.pop(MetadataIndex(fqn, tensor.chunks[number].offsets))
    tensor.chunks[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    metadata.storage_data[MetadataIndex(fqn, tensor.chunks[number].offsets, number)] = stored


def moved(values: Offsets, axis: int, by: int) -> Offsets:
    """The numbers, one of them changed."""
    return (*values[:axis], values[axis] + by, *values[axis + 1 :])


def forget(metadata: Metadata, step: Path, is_gone: Callable[[str, Offsets | None], bool]) -> None:
    """Take entries out as if no rank had ever held them: chunks, storage, plans, and their bytes where they are apart."""
    for fqn, entry in list(metadata.state_dict_metadata.items()):
        tensor: Any = entry
        if hasattr(entry, "chunks"):
            tensor.chunks = [chunk for chunk in tensor.chunks if not is_gone(fqn, tuple(chunk.offsets))]
        if is_gone(fqn, None):
            del metadata.state_dict_metadata[fqn]
            if metadata.planner_data:
                metadata.planner_data.pop(fqn, None)
    for plan in getattr(metadata, "all_local_plans", None) or ():
        plan.items[:] = [item for item in plan.items if not _gone(is_gone, item.index)]
    gone = {index: info for index, info in metadata.storage_data.items() if _gone(is_gone, index)}
    kept = {index: info for index, info in metadata.storage_data.items() if index not in gone}
    for name in {info.relative_path for info in gone.values()}:
        rows = [(info.offset, index) for index, info in kept.items() if info.relative_path == name]
        rows.sort(key=lambda row: row[0])
        if rows and rows[-1][0] == 0 and len(rows) > 1:  # safetensors: one header for all
            continue
        data, packed = (step / name).read_bytes(), b""
        for start, index in rows:
            kept[index] = replace(kept[index], offset=len(packed))
            packed += data[start : start + kept[index].length]
        (step / name).write_bytes(packed)
    metadata.storage_data = kept


def _gone(is_gone: Callable[[str, Offsets | None], bool], index: MetadataIndex) -> bool:
    return is_gone(index.fqn, None) or (index.offset is not None and is_gone(index.fqn, tuple(index.offset)))


def without(keys: set[str]) -> Callable[[Path], None]:
    """An edit: nobody saved these keys."""
    return edited(lambda metadata, step: forget(metadata, step, lambda fqn, offsets: fqn in keys))


# ---------------------------------------------------------------- chunks


@operator("drop a chunk", "metadata", HOLES)
def drop_chunk(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, _ in chunks(save):
        change = edited(lambda m, step, fqn=fqn, at=offsets: forget(m, step, lambda key, o: (key, o) == (fqn, at)))
        yield Mutant(f"chunk {i} of {fqn}", (fqn,), change)


@operator("drop the storage entry of a chunk", "metadata", "PAY001 PAY006")
def drop_storage(save: Save) -> Iterator[Mutant]:
    for index in save.metadata.storage_data:
        entry: Any = save.metadata.state_dict_metadata[index.fqn]
        if all(0 not in c.sizes for c in getattr(entry, "chunks", ()) if c.offsets == index.offset):
            yield Mutant(f"{index}", (index.fqn,), edited(lambda m, step, index=index: m.storage_data.pop(index)))


@operator("drop a chunk, not its storage entry", "metadata", f"{HOLES} PAY002")
def drop_plan(save: Save) -> Iterator[Mutant]:
    for fqn, i, _, _ in chunks(save):
        change = edited(lambda m, step, fqn=fqn, i=i: m.state_dict_metadata[fqn].chunks.pop(i))
        yield Mutant(f"chunk {i} of {fqn}", (fqn,), change)


@operator("duplicate a chunk", "metadata", "GEO007")
def duplicate_chunk(save: Save) -> Iterator[Mutant]:
    for fqn, i, _, _ in chunks(save):

        def change(m: Metadata, step: Path, fqn: str = fqn, i: int = i) -> None:
            tensor: Any = m.state_dict_metadata[fqn]
            tensor.chunks.append(tensor.chunks[i])

        yield Mutant(f"chunk {i} of {fqn}", (fqn,), edited(change))


@operator("shift a chunk by one", "metadata", f"{HOLES} GEO001 GEO003 GEO007 PAY001")
def shift_chunk(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, sizes in chunks(save):
        for axis in range(len(sizes)):
            change = edited(lambda m, step, a=(fqn, i, moved(offsets, axis, 1), sizes): put(m, *a))
            yield Mutant(f"chunk {i} of {fqn}, axis {axis}", (fqn,), change)


@operator("grow a chunk by one", "metadata", "GEO001 GEO003 PAY007")
def grow_chunk(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, sizes in chunks(save):
        for axis in range(len(sizes)):
            change = edited(lambda m, step, a=(fqn, i, offsets, moved(sizes, axis, 1)): put(m, *a))
            yield Mutant(f"chunk {i} of {fqn}, axis {axis}", (fqn,), change)


@operator("shrink a chunk by one", "metadata", f"{HOLES} PAY007")
def shrink_chunk(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, sizes in chunks(save):
        for axis in range(len(sizes)):
            change = edited(lambda m, step, a=(fqn, i, offsets, moved(sizes, axis, -1)): put(m, *a))
            yield Mutant(f"chunk {i} of {fqn}, axis {axis}", (fqn,), change)


@operator("move a cut by one", "headers", "PAY007 PAY009 GEO008 EXP003")
def move_cut(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, sizes in chunks(save, 2):
        for axis, offset in enumerate(offsets):
            for j, before in enumerate(save.tensors[fqn].chunks):
                others = [k for k in range(len(sizes)) if k != axis]
                same = all((before.offsets[k], before.sizes[k]) == (offsets[k], sizes[k]) for k in others)
                if same and sizes[axis] > 1 and 0 < before.offsets[axis] + before.sizes[axis] == offset:

                    def change(m: Metadata, step: Path, at: Any = (fqn, i, j, axis, offsets, sizes)) -> None:
                        fqn, i, j, axis, offsets, sizes = at
                        tensor: Any = m.state_dict_metadata[fqn]
                        size = moved(tuple(tensor.chunks[j].sizes), axis, 1)
                        put(m, fqn, j, tensor.chunks[j].offsets, size)
                        put(m, fqn, i, moved(offsets, axis, 1), moved(sizes, axis, -1))

                    yield Mutant(f"{fqn} at {offset} of axis {axis}", (fqn,), edited(change), unseen=opaque(save))


@operator("give a chunk another number of axes", "metadata", "GEO002")
def change_rank(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, sizes in chunks(save):
        for what, at in (("offsets", ((0, *offsets), sizes)), ("sizes", (offsets, (1, *sizes)))):
            change = edited(lambda m, step, a=(fqn, i, *at): put(m, *a))
            yield Mutant(f"chunk {i} of {fqn}: an axis more in its {what}", (fqn,), change)


def opaque(save: Save) -> str:
    """Why the records of a checkpoint tell nothing; empty when they can be read."""
    infos = save.metadata.storage_data.values()
    is_stream = any(getattr(info, "transform_descriptors", None) for info in infos)
    return "records behind a stream transform are not opened" if is_stream else ""


def record(save: Save, index: MetadataIndex) -> bytes:
    """The bytes of a record."""
    info = save.metadata.storage_data[index]
    with (save.step / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return file.read(info.length)


def in_safetensors(save: Save) -> bool:
    """Whether the payload files are safetensors: a record is then found by its key, not by its place."""
    return any((save.step / name).read_bytes()[8:9] == b"{" for name in save.payload)


@operator("swap the storage of two chunks", "headers", "PAY007 PAY009 PAY010")
def swap_storage(save: Save) -> Iterator[Mutant]:
    rows = list(chunks(save))
    for n, (fqn, _, offsets, sizes) in enumerate(rows):
        for other, _, there, extent in rows[n + 1 : n + 4]:
            a, b = MetadataIndex(fqn, torch.Size(offsets)), MetadataIndex(other, torch.Size(there))
            dtypes = [save.tensors[key].properties.dtype for key in (fqn, other)]
            if in_safetensors(save) and save.metadata.storage_data[a] == save.metadata.storage_data[b]:
                continue  # nothing changes

            def change(m: Metadata, step: Path, a: MetadataIndex = a, b: MetadataIndex = b) -> None:
                m.storage_data[a], m.storage_data[b] = m.storage_data[b], m.storage_data[a]

            legal = "the two records hold the same bytes" if record(save, a) == record(save, b) else ""
            alike = sizes == extent and dtypes[0] == dtypes[1]
            unseen = "both records have the shape and dtype of either chunk" if alike else opaque(save)
            about = f"{fqn} {offsets} with {other} {there}"
            yield Mutant(about, (fqn, other), edited(change), legal, unseen)


# ---------------------------------------------------------------- shapes


def resize(metadata: Metadata, fqn: str, shape: Iterable[int]) -> None:
    """Give a tensor another global shape."""
    tensor: Any = metadata.state_dict_metadata[fqn]
    tensor.size = torch.Size(shape)


@operator("double or halve a global dimension", "metadata", f"{HOLES} GEO001 {SHAPES}")
def scale_dim(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        for axis, extent in enumerate(tensor.size):
            for size in {extent * 2, extent // 2} - {extent}:
                if 0 not in tensor.size:
                    shape = moved(tuple(tensor.size), axis, size - extent)
                    change = edited(lambda m, step, fqn=fqn, shape=shape: resize(m, fqn, shape))
                    yield Mutant(f"{fqn}: axis {axis} from {extent} to {size}", (fqn,), change)


@operator("swap two dimensions of the global shape", "metadata", f"{HOLES} GEO001 {SHAPES}")
def swap_dims(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        shape = tuple(tensor.size)
        if len(shape) > 1 and shape[-1] != shape[-2] and 0 not in shape:
            swapped = (*shape[:-2], shape[-1], shape[-2])
            yield Mutant(fqn, (fqn,), edited(lambda m, step, fqn=fqn, shape=swapped: resize(m, fqn, shape)))


@operator("transpose a tensor and its chunks, not its records", "headers", f"PAY009 PAY007 {SHAPES}")
def transpose(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        shape = tuple(tensor.size)
        if len(shape) < 2 or 0 in shape or all(c.sizes[-1] == c.sizes[-2] for c in tensor.chunks):
            continue

        def change(m: Metadata, step: Path, fqn: str = fqn) -> None:
            tensor: Any = m.state_dict_metadata[fqn]
            old = [(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks]
            stored = [m.storage_data.pop(MetadataIndex(fqn, c.offsets), None) for c in tensor.chunks]
            resize(m, fqn, (*tensor.size[:-2], tensor.size[-1], tensor.size[-2]))
            for i, row in enumerate(old):
                offsets, sizes = (torch.Size((*v[:-2], v[-1], v[-2])) for v in row)
                tensor.chunks[i] = ChunkStorageMetadata(offsets, sizes)
                if stored[i] is not None:
                    m.storage_data[MetadataIndex(fqn, offsets, i)] = stored[i]

        yield Mutant(fqn, (fqn,), edited(change), unseen=opaque(save))


def grid_axis(tensor: Any) -> int | None:
    """The axis on which a tensor is cut into equal parts, when there is one and it alone is cut."""
    sizes = {tuple(chunk.sizes) for chunk in tensor.chunks}
    cut = [axis for axis in range(len(tensor.size)) if len({chunk.offsets[axis] for chunk in tensor.chunks}) > 1]
    return cut[0] if len(sizes) == 1 and len(cut) == 1 else None


def lay_out(m: Metadata, fqn: str, shape: Iterable[int], places: list[Offsets]) -> None:
    """Give a tensor's chunks, in their order, new offsets below a new shape."""
    tensor: Any = m.state_dict_metadata[fqn]
    stored = [m.storage_data.pop(MetadataIndex(fqn, chunk.offsets)) for chunk in tensor.chunks]
    resize(m, fqn, shape)
    for i, offsets in enumerate(places):
        tensor.chunks[i] = replace(tensor.chunks[i], offsets=torch.Size(offsets))
        m.storage_data[MetadataIndex(fqn, torch.Size(offsets), i)] = stored[i]


@operator("keep the old Shard after a transpose", "metadata", SHAPES)
def old_shard(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        axis = grid_axis(tensor)
        if axis is None or len(tensor.size) < 2:
            continue
        size, count = tuple(tensor.chunks[0].sizes), len(tensor.chunks)
        other = axis - 1 if axis == len(size) - 1 else axis + 1
        shape = moved(moved(size, axis, 0), other, size[other] * (count - 1))
        order = sorted(range(count), key=lambda i, t=tensor, a=axis: t.chunks[i].offsets[a])
        places = [moved((0,) * len(size), other, order.index(i) * size[other]) for i in range(count)]
        if shape != tuple(tensor.size):
            change = edited(lambda m, step, a=(fqn, shape, places): lay_out(m, *a))
            yield Mutant(f"{fqn}: {tuple(tensor.size)} becomes {shape}", (fqn,), change)


def keep_first(m: Metadata, step: Path, fqn: str) -> None:
    """Record the first chunk of a tensor as the whole."""
    tensor: Any = m.state_dict_metadata[fqn]
    first = min((chunk for chunk in tensor.chunks if 0 not in chunk.sizes), key=lambda chunk: tuple(chunk.offsets))
    shape = first.sizes
    forget(m, step, lambda key, offsets: key == fqn and offsets is not None and offsets != tuple(first.offsets))
    resize(m, fqn, shape)


def is_moment(fqn: str) -> bool:
    return "exp_avg" in fqn or "momentum" in fqn


@operator("record one shard of a weight as the whole", "metadata", SHAPES)
def local_as_global(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        if len([c for c in tensor.chunks if 0 not in c.sizes]) > 1 and "optim" not in fqn:
            yield Mutant(fqn, (fqn,), edited(lambda m, step, fqn=fqn: keep_first(m, step, fqn)))


@operator("record one shard of a moment as the whole", "metadata", SHAPES)
def local_moment(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        if len([c for c in tensor.chunks if 0 not in c.sizes]) > 1 and is_moment(fqn):
            yield Mutant(fqn, (fqn,), edited(lambda m, step, fqn=fqn: keep_first(m, step, fqn)))


@operator("record k replicas as k shards", "headers", f"{SHAPES} PAY010")
def stacked_replicas(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        if len(tensor.chunks) != 1 or not tensor.size or 0 in tensor.size or in_safetensors(save):
            continue

        def change(m: Metadata, step: Path, fqn: str = fqn) -> None:
            tensor: Any = m.state_dict_metadata[fqn]
            [chunk], shape = tensor.chunks, tuple(tensor.size)
            info = m.storage_data[MetadataIndex(fqn, chunk.offsets)]
            file = step / info.relative_path
            data = file.read_bytes()
            file.write_bytes(data + data[info.offset : info.offset + info.length])
            offsets = torch.Size(moved((0,) * len(shape), 0, shape[0]))
            tensor.chunks.append(replace(chunk, offsets=offsets))
            m.storage_data[MetadataIndex(fqn, offsets, 1)] = replace(info, offset=len(data))
            resize(m, fqn, moved(shape, 0, shape[0]))

        yield Mutant(fqn, (fqn,), edited(change), unseen=opaque(save))


@operator("another dtype in the metadata", "headers", f"PAY007 PAY009 {SHAPES}")
def wrong_dtype(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        for dtype in {torch.float32, torch.bfloat16, torch.float16} - {tensor.properties.dtype}:
            if 0 not in tensor.size:

                def change(m: Metadata, step: Path, fqn: str = fqn, dtype: torch.dtype = dtype) -> None:
                    tensor: Any = m.state_dict_metadata[fqn]
                    tensor.properties.dtype = dtype

                yield Mutant(f"{fqn}: {dtype}", (fqn,), edited(change), unseen=opaque(save))


# ---------------------------------------------------------------- keys

_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks|block|layer))\.(\d+)\.")
_EXPERT = re.compile(r"(.*\bexperts)\.(?:.*\b(?:weight|bias))?(\d+)(?:\.|$)")


def numbered(save: Save, pattern: re.Pattern[str]) -> dict[str, dict[int, set[str]]]:
    """Block -> number -> keys, of layers or experts that are stored one by one; optimizer keys count to their model."""
    found: dict[str, dict[int, set[str]]] = {}
    for fqn in save.metadata.state_dict_metadata:
        match = pattern.match(re.sub(r"^optim\w*\.(state\.)?((exp_avg|exp_avg_sq|param|fp32_param)\.)?", "model.", fqn))
        if match:
            block = re.sub(r"^(model\.)+", "", match[1])
            found.setdefault(block, {}).setdefault(int(match[2]), set()).add(fqn)
    return found


@operator("drop a layer", "metadata", "SHP001 SHP008 COM008 OPT003 OBJ002 PAY006")
def drop_layer(save: Save) -> Iterator[Mutant]:
    for block, layers in numbered(save, _LAYER).items():
        for number, keys in sorted(layers.items())[:-1] if len(layers) > 1 else ():
            yield Mutant(f"layer {number} of {block}", (block, *keys), without(keys))


@operator("drop an expert", "metadata", "EXP001 EXP002 EXP004 OPT003 PAY006")
def drop_expert(save: Save) -> Iterator[Mutant]:
    for block, experts in numbered(save, _EXPERT).items():
        for number, keys in sorted(experts.items()) if len(experts) > 1 else ():
            yield Mutant(f"expert {number} of {block}", (block, *keys), without(keys))


@operator("drop the experts of the last EP rank", "metadata", f"EXP001 EXP002 EXP004 OPT003 {HOLES}")
def drop_ep_rank(save: Save) -> Iterator[Mutant]:
    blocks = numbered(save, _EXPERT)
    gone = {key for e in blocks.values() if len(e) > 1 for n, keys in e.items() if n >= len(e) / 2 for key in keys}
    if gone:
        yield Mutant("experts one by one", tuple(gone | set(blocks)), without(gone))
    stacked = {
        fqn: max(c.offsets[axis] for c in tensor.chunks)
        for fqn, tensor in save.tensors.items()
        if re.search(r"\bexperts\b", fqn) and (axis := 1 if "layers.mlp" in fqn else 0) < len(tensor.size)
        if len({c.offsets[axis] for c in tensor.chunks}) > 1
    }
    if stacked:

        def change(m: Metadata, step: Path) -> None:
            axes = {fqn: 1 if "layers.mlp" in fqn else 0 for fqn in stacked}
            forget(m, step, lambda fqn, at: at is not None and fqn in stacked and at[axes[fqn]] == stacked[fqn])

        yield Mutant("experts on an axis", tuple(stacked), edited(change))


@operator("drop a moment", "metadata", "OPT002 OPT003 PAY006")
def drop_moment(save: Save) -> Iterator[Mutant]:
    for fqn in save.tensors:
        if re.search(r"\bexp_avg(_sq)?\b", fqn):
            yield Mutant(fqn, (fqn,), without({fqn}))


@operator("drop a ShardedObject", "metadata", "OBJ002 OPT005 COM004 COM001 PAY006")
def drop_object(save: Save) -> Iterator[Mutant]:
    for fqn in save.metadata.state_dict_metadata:
        if match := re.search(r"/shard_[\d.]+_([\d.]+)$", fqn):
            yield Mutant(fqn, (fqn, fqn[: match.start()]), without({fqn}))


@operator("a key without its prefix", "metadata", "NAM001 OPT003 SHP001 SHP008 COM008")
def lost_prefix(save: Save) -> Iterator[Mutant]:
    for fqn in save.tensors:
        short = fqn.partition(".")[2]
        if short and short not in save.metadata.state_dict_metadata and "optim" not in fqn:

            def change(m: Metadata, step: Path, fqn: str = fqn, short: str = short) -> None:
                m.state_dict_metadata[short] = m.state_dict_metadata.pop(fqn)
                if m.planner_data:
                    m.planner_data[short] = tuple(m.planner_data.pop(fqn))[1:]
                for index in [index for index in m.storage_data if index.fqn == fqn]:
                    m.storage_data[replace(index, fqn=short)] = m.storage_data.pop(index)

            yield Mutant(fqn, (fqn, short), edited(change))


# ---------------------------------------------------------------- files and byte ranges


def on_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """An edit of one file's bytes."""
    return lambda step: (step / name).write_bytes(change((step / name).read_bytes()))  # type: ignore[func-returns-value]


@operator("drop a payload file", "files", "PAY003 PAY008")
def drop_file(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        yield Mutant(name, (name,), lambda step, name=name: (step / name).unlink())


@operator("truncate a payload file", "files", "PAY004 PAY013")
def truncate_file(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        for share in (0.0, 0.5, 0.99):
            yield Mutant(f"{name} to {share:.0%}", (name,), on_file(name, lambda b, s=share: b[: int(len(b) * s)]))


@operator("swap two payload files", "headers", "PAY004 PAY006 PAY007 PAY009 PAY013")
def swap_files(save: Save) -> Iterator[Mutant]:
    for n, first in enumerate(save.payload):
        for second in save.payload[n + 1 :]:
            one, two = ((save.step / name).read_bytes() for name in (first, second))

            def edit(step: Path, names: Any = (first, second, one, two)) -> None:
                first, second, one, two = names
                (step / first).write_bytes(two)
                (step / second).write_bytes(one)

            unseen = "the files hold records of the same shapes at the same places" if len(one) == len(two) else ""
            yield Mutant(f"{first} with {second}", (first, second), edit, unseen=unseen)


def relocated(index: MetadataIndex, **fields: Any) -> Callable[[Path], None]:
    """An edit of one storage entry."""
    return edited(lambda m, step: m.storage_data.update({index: replace(m.storage_data[index], **fields)}))


@operator("a byte range behind the end", "files", "PAY004 PAY005 PAY006 PAY013")
def dangling(save: Save) -> Iterator[Mutant]:
    for index, info in save.metadata.storage_data.items():
        if info.length:
            size = (save.step / info.relative_path).stat().st_size
            yield Mutant(f"{index}", (index.fqn, info.relative_path), relocated(index, offset=size - info.length + 1))


@operator("a byte range of the record before", "files", "PAY004 PAY005 PAY006")
def overlapping(save: Save) -> Iterator[Mutant]:
    for index, info in save.metadata.storage_data.items():
        if info.length and info.offset:
            change = relocated(index, offset=info.offset - min(200, info.offset))
            yield Mutant(f"{index}", (index.fqn, info.relative_path), change)


@operator("a path that leaves the folder", "files", "PAY003 PAY006 PAY008")
def escaping(save: Save) -> Iterator[Mutant]:
    for index, info in save.metadata.storage_data.items():
        for path in (f"../{info.relative_path}", f"/tmp/{info.relative_path}"):
            yield Mutant(f"{index} at {path}", (index.fqn, info.relative_path), relocated(index, relative_path=path))


@operator("flip a bit of stored values", "data", "PAY011 PAY012")
def flip_values(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, _ in chunks(save):
        index = MetadataIndex(fqn, torch.Size(offsets))
        data, info = record(save, index), save.metadata.storage_data[index]
        at = data.find(b"/data/0")
        if at > 0 and not opaque(save):
            name_end = at + len("/data/0")
            start = name_end + int.from_bytes(data[name_end - len("archive/data/0") - 2 : name_end - len("archive/data/0")], "little")
            at = info.offset + start
            yield Mutant(f"chunk {i} of {fqn}", (fqn,), on_file(info.relative_path, lambda b, at=at: flipped(b, at)))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@operator("zero the last page of a payload file", "data", "PAY012 PAY013 PAY011")
def zero_page(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        size = min(512, (save.step / name).stat().st_size // 2)
        yield Mutant(name, (name,), on_file(name, lambda b, size=size: b[:-size] + bytes(size)), unseen=opaque(save))


@operator("a payload file of another step", "files", "PAY006")
def stale_file(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        yield Mutant(name, ("__99_0.distcp",), lambda step, name=name: (step / "__99_0.distcp").write_bytes((step / name).read_bytes()))


@operator("a save that did not end", "files", "COM001 SAF002")
def unfinished(save: Save) -> Iterator[Mutant]:
    yield Mutant(".metadata absent", (".metadata",), lambda step: (step / ".metadata").unlink())
    yield Mutant(".metadata at half", (".metadata",), on_file(".metadata", lambda data: data[: len(data) // 2]))
    yield Mutant(".metadata empty", (".metadata",), on_file(".metadata", lambda data: b""))
    if (save.step / "metadata.json").exists():
        yield Mutant("metadata.json absent", ("metadata.json",), lambda step: (step / "metadata.json").unlink())


# ---------------------------------------------------------------- common state


def read_common(step: Path) -> Any:
    """The common state of a checkpoint whose writer keeps it in `common.pt` (Megatron-Core <= 0.18)."""
    with megatron_names():
        return torch.load(step / "common.pt", weights_only=False)


def common(save: Save, about: str, change: Callable[[Any], None], names: tuple[str, ...] = (), **why: str) -> Mutant:
    """A mutant whose common state was changed and written by torch again."""

    def edit(step: Path) -> None:
        state = read_common(step)
        change(state)
        with megatron_names():
            torch.save(state, step / "common.pt")

    return Mutant(about, names, edit, **why)


def has_common(save: Save) -> bool:
    return (save.step / "common.pt").exists()


@operator("another iteration in the common state", "metadata", "COM002")
def wrong_iteration(save: Save) -> Iterator[Mutant]:
    if has_common(save) and "iteration" in read_common(save.step):
        yield common(save, "iteration + 10", lambda state: state.update(iteration=state["iteration"] + 10))
