"""The operators: each does to a healthy checkpoint what some bug, torn copy or edit does."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from mutants import Kind, Mutant, Operator, Save, edited, megatron_names, read_header, read_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from ckptlint.depth import Depth

OPERATORS: list[Operator] = []

HOLES = "GEO004 GEO005 GEO006 EXP003 PAY006"
SHAPES = (
    "CFG001 CFG003 CFG006 SHP001 SHP002 SHP003 SHP004 SHP005 SHP008 SHP009 EXP001 EXP002 EXP004 EXP005 OPT001 OPT002 "
    "OPT005 OPT006 COM008 COM010 NAM001"
)
FILES = "PAY003 PAY004 PAY006 PAY008 PAY009 PAY013 SAF002 COM001 COM004"

UNPROVOKED = {
    "no operator edits a configuration or adds to a model: tests/corpus": "CFG002 CFG004 CFG005 CFG007 CFG008",
    "no operator changes the plan, the objects or the optimizer in such a way": (
        "COM006 COM007 COM011 COM012 OBJ001 OBJ003 OBJ004 OBJ006 OPT004 OPT007 OPT008 OPT009 OPT014 OPT015 "
        "NAM002 SHP007"
    ),
    "no operator changes numbers: tests/numbers does": (
        "OPT010 OPT011 OPT012 OPT013 PAY016 PAY017 PAY018 PAY019 PAY020 RUN007 RUN008 RUN009"
    ),
    "files keep their times and the optimizer its steps": "RUN006",
    "no healthy checkpoint here is quantised": "QNT001 QNT002 QNT003 QNT004",
    "no healthy checkpoint here is a set of rank files": ("RNK001 RNK002 RNK003 RNK004 RNK005 RNK006 RNK007 RNK008"),
    "the check has no reference, seal or step before": (
        "LIV301 LIV302 LIV305 REF001 REF002 REF003 REF004 RUN001 RUN002 RUN003 RUN004 RUN005"
    ),
    "fuzzing and tests/formats make such files": "SAF001 SAF003 SAF004",
    "about ckptlint itself": "LNT001 LNT002",
}
"""Why no operator provokes them -> codes of rules on saved files."""

Mutants = Callable[[Save], Iterator[Mutant]]
Offsets = tuple[int, ...]


def operator(name: str, depth: Depth, codes: str, kind: Kind = "metadata") -> Callable[[Mutants], Mutants]:
    """Add a function that yields mutants to the operators, with the rules that may speak of them."""

    def add(mutants: Mutants) -> Mutants:
        OPERATORS.append(Operator(name, depth, frozenset(codes.split()), mutants, kind))
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
    """Take out entries as if no rank had held them: chunks, storage, plans, and their bytes where they are apart."""
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


def put_otherwise(save: Save, shift: int, growth: int) -> Iterator[Mutant]:
    """Every chunk, on one axis at another place or of another size."""
    for fqn, i, offsets, sizes in chunks(save):
        for axis in range(len(sizes)):
            place = fqn, i, moved(offsets, axis, shift), moved(sizes, axis, growth)
            change = edited(lambda m, step, a=place: put(m, *a))
            yield Mutant(f"chunk {i} of {fqn}, axis {axis}", (fqn,), change)


@operator("shift a chunk by one", "metadata", f"{HOLES} GEO001 GEO003 GEO007 PAY001")
def shift_chunk(save: Save) -> Iterator[Mutant]:
    yield from put_otherwise(save, 1, 0)


@operator("grow a chunk by one", "metadata", "GEO001 GEO003 PAY007")
def grow_chunk(save: Save) -> Iterator[Mutant]:
    yield from put_otherwise(save, 0, 1)


@operator("shrink a chunk by one", "metadata", f"{HOLES} PAY007")
def shrink_chunk(save: Save) -> Iterator[Mutant]:
    yield from put_otherwise(save, 0, -1)


@operator("move a cut by one", "headers", "PAY007 PAY009 GEO008 EXP003 OPT002")
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


@operator("swap the storage of two chunks", "headers", "PAY004 PAY007 PAY009 PAY010 PAY013")
def swap_storage(save: Save) -> Iterator[Mutant]:
    rows = list(chunks(save))
    for n, (fqn, _, offsets, sizes) in enumerate(rows):
        for other, _, there, extent in rows[n + 1 : n + 4]:
            a, b = MetadataIndex(fqn, torch.Size(offsets)), MetadataIndex(other, torch.Size(there))
            dtypes = [save.tensors[key].properties.dtype for key in (fqn, other)]
            if in_safetensors(save) and len({save.metadata.storage_data[i].relative_path for i in (a, b)}) == 1:
                continue  # there a tensor is found by its key

            def change(m: Metadata, step: Path, a: MetadataIndex = a, b: MetadataIndex = b) -> None:
                m.storage_data[a], m.storage_data[b] = m.storage_data[b], m.storage_data[a]

            # safetensors say beside the bytes whose they are
            is_same = not in_safetensors(save) and record(save, a) == record(save, b)
            legal = "the two records hold the same bytes" if is_same else ""
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


def first_axis(fqn: str) -> int:
    """The first axis that is the weight's own: the one before it counts layers where these have no numbers."""
    return 1 if re.search(r"\blayers\.[a-z]", fqn) else 0


_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks|block|layer))\.(\d+)\.")
_HIDDEN_NORM = re.compile(r"decoder\..*\b((input|post_attention|pre_mlp|final)_layernorm\.|layer_norm_)weight")


def lonely(save: Save, fqn: str, transposed: bool = False) -> str:
    """Why a tensor's shape may be any; empty where two siblings in other layers or an optimizer state tell it.

    A state does not where fewer than two other parameters show that states are as long as their parameter.

    Args:
        transposed: whether the number of elements is as before, so that a flattened state tells nothing.
    """
    layer = _LAYER.match(fqn)
    role = re.compile(re.escape(fqn[: layer.end(1)]) + r"\.\d+\." + re.escape(fqn[layer.end() :]) if layer else "(?!)")
    path = re.sub(r"^(model\.|module\.)+", "", fqn)
    shapes = {key: len(tensor.size) for key, tensor in save.tensors.items() if key != fqn}
    siblings = sum(role.fullmatch(key) is not None for key in shapes)
    states = [key for key in shapes if "optim" in key and f".{path}" in key and not nameless(key)]
    axes = len(save.tensors[fqn].size)
    if siblings > 1 or (len(parts_of_states(save)) > 2 and any(not transposed or shapes[s] == axes for s in states)):
        return ""
    return "neither two siblings in other layers nor an optimizer state give its shape"


def is_hidden_norm(save: Save, fqn: str) -> bool:
    """Whether it is a norm as long as the arguments' hidden size, and so are another one and the embedding."""
    args = read_common(save.step).get("args") if (save.step / "common.pt").exists() else None
    norms = [tensor.size[-1] for key, tensor in save.tensors.items() if _HIDDEN_NORM.fullmatch(key)]
    tables = [tensor.size[-1] for key, tensor in save.tensors.items() if key == "embedding.word_embeddings.weight"]
    is_shown = len(norms) > 1 and len(tables) == 1 and {*norms, *tables} == {getattr(args, "hidden_size", None)}
    return is_shown and _HIDDEN_NORM.fullmatch(fqn) is not None


@operator("keep the old Shard after a transpose", "metadata", SHAPES)
def old_shard(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        axis = grid_axis(tensor)
        if axis is None or axis < len(tensor.size) - 2 or first_axis(fqn) > len(tensor.size) - 2:
            continue
        size, count = tuple(tensor.chunks[0].sizes), len(tensor.chunks)
        other = 2 * len(size) - 3 - axis
        shape = moved(size, other, size[other] * (count - 1))
        order = sorted(range(count), key=lambda i, t=tensor, a=axis: t.chunks[i].offsets[a])
        places = [moved((0,) * len(size), other, order.index(i) * size[other]) for i in range(count)]
        if shape != tuple(tensor.size):
            change = edited(lambda m, step, a=(fqn, shape, places): lay_out(m, *a))
            about = f"{fqn}: {tuple(tensor.size)} becomes {shape}"
            yield Mutant(about, (fqn,), change, unseen=lonely(save, fqn, transposed=True))


def keep_first(m: Metadata, step: Path, fqn: str) -> None:
    """Record the first chunk of a tensor as the whole."""
    tensor: Any = m.state_dict_metadata[fqn]
    first = min((chunk for chunk in tensor.chunks if 0 not in chunk.sizes), key=lambda chunk: tuple(chunk.offsets))
    shape = first.sizes
    forget(m, step, lambda key, offsets: key == fqn and offsets is not None and offsets != tuple(first.offsets))
    resize(m, fqn, shape)


def nameless(fqn: str) -> str:
    """Why a state's parameter is not known."""
    is_id = re.search(r"\bstate\.\d+\.\w+$|bucket_idx", fqn)
    return "buckets and numbered states name no parameter to compare with" if is_id else ""


def is_moment(fqn: str) -> bool:
    """Whether a key is a state with one element per element of its parameter."""
    return "exp_avg" in fqn or "momentum" in fqn


@operator("record one shard of a weight as the whole", "metadata", SHAPES)
def local_as_global(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        if len([c for c in tensor.chunks if 0 not in c.sizes]) > 1 and "optim" not in fqn:
            change = edited(lambda m, step, fqn=fqn: keep_first(m, step, fqn))
            yield Mutant(fqn, (fqn,), change, unseen=lonely(save, fqn))


@operator("record one shard of a moment as the whole", "metadata", SHAPES)
def local_moment(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        if len([c for c in tensor.chunks if 0 not in c.sizes]) > 1 and is_moment(fqn):
            change = edited(lambda m, step, fqn=fqn: keep_first(m, step, fqn))
            yield Mutant(fqn, (fqn,), change, unseen=nameless(fqn))


@operator("record k replicas as k shards", "headers", f"{SHAPES} PAY010")
def stacked_replicas(save: Save) -> Iterator[Mutant]:
    for fqn, tensor in save.tensors.items():
        axis = first_axis(fqn)
        if len(tensor.chunks) != 1 or len(tensor.size) <= axis or 0 in tensor.size or "rng" in fqn:
            continue
        if in_safetensors(save) or opaque(save):
            continue

        def change(m: Metadata, step: Path, fqn: str = fqn, axis: int = axis) -> None:
            tensor: Any = m.state_dict_metadata[fqn]
            [chunk], shape = tensor.chunks, tuple(tensor.size)
            info = m.storage_data[MetadataIndex(fqn, chunk.offsets)]
            file = step / info.relative_path
            data = file.read_bytes()
            file.write_bytes(data + data[info.offset : info.offset + info.length])
            offsets = torch.Size(moved((0,) * len(shape), axis, shape[axis]))
            tensor.chunks.append(replace(chunk, offsets=offsets))
            m.storage_data[MetadataIndex(fqn, offsets, 1)] = replace(info, offset=len(data))
            resize(m, fqn, moved(shape, axis, shape[axis]))

        unseen = "" if is_hidden_norm(save, fqn) else lonely(save, fqn)
        yield Mutant(fqn, (fqn,), edited(change), unseen=unseen)


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


@operator("drop a layer", "metadata", "CFG001 SHP001 SHP008 COM008 OPT003 OBJ002 PAY006")
def drop_layer(save: Save) -> Iterator[Mutant]:
    for block, layers in numbered(save, _LAYER).items():
        for number, keys in sorted(layers.items())[:-1] if len(layers) > 1 else ():
            modules = {key.partition(f".{number}.")[2].split(".")[0] for key in keys}
            unseen = "the upper layers alone are a legal save, so a lost layer 0 is an info" if not number else ""
            if len(modules - {"weight", "bias"}) < 2:
                unseen = "a list with one weight per number may skip numbers, since activations take some"
            names = (block.rpartition(".")[2], *keys)
            yield Mutant(f"layer {number} of {block}", names, without(keys), unseen=unseen)


@operator("drop an expert", "metadata", "CFG001 EXP001 EXP002 EXP004 OPT003 PAY006")
def drop_expert(save: Save) -> Iterator[Mutant]:
    for block, experts in numbered(save, _EXPERT).items():
        for number, keys in sorted(experts.items()) if len(experts) > 1 else ():
            yield Mutant(f"expert {number} of {block}", (block, *keys), without(keys))


@operator("drop the experts of the last EP rank", "metadata", f"CFG001 EXP001 EXP002 EXP004 OPT003 {HOLES}")
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


def parts_of_states(save: Save) -> dict[str, dict[str, str]]:
    """What names a parameter's state -> moment -> key, of the two moments that Adam keeps."""
    found: dict[str, dict[str, str]] = {}
    for fqn in save.tensors:
        if match := re.search(r"\bexp_avg(_sq)?\b(?!\.\w+$)|\bexp_avg(_sq)?$", fqn):
            found.setdefault(fqn[: match.start()] + "*" + fqn[match.end() :], {})[match[0]] = fqn
    return found


def one_moment(save: Save, keys: dict[str, str]) -> str:
    """Why this optimizer may keep one of the two moments alone."""
    names = {re.sub(r"\bexp_avg(_sq)?\b", "*", fqn): None for fqn in keys.values()}
    start, _, end = next(iter(names)).partition("*")
    pair = [tuple(save.tensors[fqn].size) for fqn in keys.values()]
    beside = {fqn[len(start) :].split(".")[0] for fqn in save.tensors if not end and fqn.startswith(start)}
    if beside - {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"} or pair[0] != pair[1]:
        return "states beside the moments, or moments of unlike shapes, are of an optimizer that may keep one alone"
    owners = {fqn.rpartition(".")[0] for fqn in save.tensors if re.match(r"optim\w*\.state\.", fqn)}
    if not end and 2 * len([1 for stem in parts_of_states(save).values() if len(stem) == 2]) < len(owners):
        return "most parameters have other states"
    return ""


@operator("drop one of two moments", "metadata", "OPT002 OPT003 OPT005 PAY006")
def drop_moment(save: Save) -> Iterator[Mutant]:
    states = parts_of_states(save)
    both = {stem: keys for stem, keys in states.items() if len(keys) == 2}
    for keys in both.values():
        for fqn in keys.values():
            unseen = nameless(fqn) or one_moment(save, keys) or ""
            if len(both) < 3:
                unseen = "fewer than two other parameters show that both belong there"
            yield Mutant(fqn, tuple(keys.values()), without({fqn}), unseen=unseen)


@operator("drop a ShardedObject", "metadata", "OBJ002 OPT005 COM004 COM001 PAY006")
def drop_object(save: Save) -> Iterator[Mutant]:
    for fqn in save.metadata.state_dict_metadata:
        if match := re.search(r"/shard_[\d.]+_([\d.]+)$", fqn):
            is_only = set(match[1].split(".")) == {"1"}
            unseen = "the only shard of its key: a job without this object is legal" if is_only else ""
            names = (fqn, fqn[: match.start()], ".".join(fqn[: match.start()].split(".")[-2:]))
            yield Mutant(fqn, names, without({fqn}), unseen=unseen)


@operator("a key without its prefix", "metadata", "CFG006 CFG001 NAM001 OPT003 SHP001 SHP005 SHP008 COM008")
def lost_prefix(save: Save) -> Iterator[Mutant]:
    for fqn in save.tensors:
        short = fqn.partition(".")[2]
        if not short or short in save.metadata.state_dict_metadata or "optim" in fqn:
            continue
        layer = _LAYER.match(fqn)
        mates = [key for key in save.tensors if layer and key.startswith(f"{layer[1]}.{layer[2]}.")]
        unseen = "" if len(mates) > 4 else "keys outside layers, or in layers with few weights, may begin with anything"
        if not unseen and not fqn.startswith(("model.", "module.")) and lonely(save, fqn):
            unseen = "the word is part of the names of the model, and no two other layers have a key of this role"

        def change(m: Metadata, step: Path, fqn: str = fqn, short: str = short) -> None:
            m.state_dict_metadata[short] = m.state_dict_metadata.pop(fqn)
            if m.planner_data:
                path = tuple(m.planner_data.pop(fqn))[1:]
                m.planner_data[short] = path if ".".join(map(str, path)) == short else (short,)
            for index in [index for index in m.storage_data if index.fqn == fqn]:
                m.storage_data[replace(index, fqn=short)] = m.storage_data.pop(index)

        yield Mutant(fqn, (fqn, short), edited(change), unseen=unseen)


# ---------------------------------------------------------------- files and byte ranges


def on_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """An edit of one file's bytes."""
    return lambda step: (step / name).write_bytes(change((step / name).read_bytes()))


@operator("drop a payload file", "files", FILES)
def drop_file(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        yield Mutant(name, (name,), lambda step, name=name: (step / name).unlink())


def truncated(save: Save, depth: str) -> Iterator[Mutant]:
    """Payload files with their first part alone."""
    for name in save.payload:
        infos = [info for info in save.metadata.storage_data.values() if info.relative_path == name]
        for share in (0.0, 0.5, 0.99):
            kept = int((save.step / name).stat().st_size * share)
            is_slack = depth == "files" and in_safetensors(save) and kept >= 10 + sum(info.length for info in infos)
            unseen = "the cut is no longer than a header, which is not read at this depth" if is_slack else ""
            change = on_file(name, lambda data, kept=kept: data[:kept])
            yield Mutant(f"{name} to {share:.0%}", (name,), change, unseen=unseen)


@operator("truncate a payload file", "files", FILES)
def truncate_file(save: Save) -> Iterator[Mutant]:
    yield from truncated(save, "files")


@operator("truncate a payload file, headers read", "headers", FILES)
def truncate_read(save: Save) -> Iterator[Mutant]:
    yield from truncated(save, "headers")


@operator("swap two payload files", "headers", f"{FILES} PAY005 PAY007 PAY010 OPT005")
def swap_files(save: Save) -> Iterator[Mutant]:
    for n, first in enumerate(save.payload):
        for second in save.payload[n + 1 :]:
            one, two = ((save.step / name).read_bytes() for name in (first, second))

            def edit(step: Path, names: Any = (first, second, one, two)) -> None:
                first, second, one, two = names
                (step / first).write_bytes(two)
                (step / second).write_bytes(one)

            unseen = "the files hold records of the same shapes at the same offsets" if len(one) == len(two) else ""
            legal = "the files are equal" if one == two else ""
            yield Mutant(f"{first} with {second}", (first, second), edit, legal, unseen)


def relocated(index: MetadataIndex, **fields: Any) -> Callable[[Path], None]:
    """An edit of one storage entry."""
    return edited(lambda m, step: m.storage_data.update({index: replace(m.storage_data[index], **fields)}))


@operator("a byte range after the end", "files", f"{FILES} PAY005")
def dangling(save: Save) -> Iterator[Mutant]:
    for index, info in save.metadata.storage_data.items():
        if info.length:
            size = (save.step / info.relative_path).stat().st_size
            yield Mutant(f"{index}", (index.fqn, info.relative_path), relocated(index, offset=size - info.length + 1))


@operator("a byte range of the record before", "files", f"{FILES} PAY005")
def overlapping(save: Save) -> Iterator[Mutant]:
    for index, info in save.metadata.storage_data.items():
        if info.length and info.offset:
            change = relocated(index, offset=info.offset - min(200, info.offset))
            is_keyed = in_safetensors(save) and index.fqn in save.tensors
            unseen = "a tensor of a safetensors file is found by its key, not by its offset" if is_keyed else ""
            yield Mutant(f"{index}", (index.fqn, info.relative_path), change, unseen=unseen)


@operator("a path that leaves the folder", "files", FILES)
def escaping(save: Save) -> Iterator[Mutant]:
    for index, info in save.metadata.storage_data.items():
        for path in (f"../{info.relative_path}", f"/tmp/{info.relative_path}"):
            yield Mutant(f"{index} at {path}", (index.fqn, info.relative_path), relocated(index, relative_path=path))


@operator("flip a bit of stored values", "data", "PAY011 PAY012")
def flip_values(save: Save) -> Iterator[Mutant]:
    for fqn, i, offsets, _ in chunks(save):
        index = MetadataIndex(fqn, torch.Size(offsets))
        info = save.metadata.storage_data[index]
        data = (save.step / info.relative_path).read_bytes()[info.offset :]
        is_container = data[8:9] == b"{"
        if is_container:
            start = int.from_bytes(data[:8], "little") + 8
            at = info.offset + start + json.loads(data[8:start])[fqn]["data_offsets"][0]
        elif opaque(save):
            at = info.offset + info.length // 2
        else:
            members = zipfile.ZipFile(BytesIO(data[: info.length])).infolist()
            name = next((member.header_offset + 30 for member in members if "/data/" in member.filename), None)
            if name is None:  # an object under a tensor's key
                continue
            at = info.offset + name + sum(int.from_bytes(data[name - k : name - k + 2], "little") for k in (2, 4))
        unseen = "safetensors carry no checksum" if is_container else opaque(save)
        change = on_file(info.relative_path, lambda b, at=at: b[:at] + bytes([b[at] ^ 1]) + b[at + 1 :])
        yield Mutant(f"chunk {i} of {fqn}", (fqn,), change, unseen=unseen)


@operator("zero the end of a payload file", "data", f"{FILES} CFG006 PAY011 PAY012 PAY015")
def zero_page(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        size = min(512, (save.step / name).stat().st_size // 2)
        unseen = "safetensors carry no checksum" if in_safetensors(save) else opaque(save)
        change = on_file(name, lambda data, size=size: data[:-size] + bytes(size))
        yield Mutant(name, (name,), change, unseen=unseen)


@operator("a payload file of another step", "files", "PAY006")
def stale_file(save: Save) -> Iterator[Mutant]:
    for name in save.payload:
        if (save.step / name).stat().st_size > 512:
            yield Mutant(name, ("__99_0.distcp",), lambda step, name=name: copy(step / name, step / "__99_0.distcp"))


@operator("a save that never finished", "files", "COM001 SAF002")
def unfinished(save: Save) -> Iterator[Mutant]:
    yield Mutant(".metadata absent", (".metadata",), lambda step: (step / ".metadata").unlink())
    yield Mutant(".metadata at half", (".metadata",), on_file(".metadata", lambda data: data[: len(data) // 2]))
    yield Mutant(".metadata empty", (".metadata",), on_file(".metadata", lambda data: b""))
    if save.payload:

        def later(step: Path) -> None:
            moved = (step / ".metadata").stat().st_mtime + 5
            os.utime(step / save.payload[0], (moved, moved))
            (step / ".metadata.tmp").write_bytes(b"")
            os.utime(step / ".metadata.tmp", (moved, moved))

        yield Mutant("a later .metadata.tmp, and a file replaced", (".metadata.tmp",), later)
    if (save.step / "metadata.json").exists():
        yield Mutant("metadata.json absent", ("metadata.json",), lambda step: (step / "metadata.json").unlink())


# ---------------------------------------------------------------- common state


def read_common(step: Path) -> Any:
    """The common state of a checkpoint whose writer keeps it in `common.pt` (Megatron-Core <= 0.18)."""
    with megatron_names():
        return torch.load(step / "common.pt", weights_only=False)


def common(about: str, change: Callable[[Any], object]) -> Mutant:
    """A mutant whose common state was changed and written by torch again."""

    def edit(step: Path) -> None:
        state = read_common(step)
        change(state)
        with megatron_names():
            torch.save(state, step / "common.pt")

    return Mutant(about, (), edit)


def common_states(*names: str, inside: str = "args") -> Callable[[Save], Iterator[tuple[str, Any]]]:
    """Those of these names that the arguments, or another part of the common state, have, with their values."""

    def found(save: Save) -> Iterator[tuple[str, Any]]:
        if (save.step / "common.pt").exists():
            part = read_common(save.step).get(inside)
            values = part if isinstance(part, dict) else vars(part) if part is not None else {}
            yield from ((name, values[name]) for name in names if values.get(name) is not None)

    return found


def argument(name: str, value: Any) -> Callable[[Any], None]:
    """A change of one argument."""
    return lambda state: setattr(state["args"], name, value)


@operator("another iteration in the common state", "metadata", "COM002")
def wrong_iteration(save: Save) -> Iterator[Mutant]:
    if (save.step / "common.pt").exists() and "iteration" in read_common(save.step):
        yield common("iteration + 10", lambda state: state.update(iteration=state["iteration"] + 10))


@operator(
    "double a size in the arguments", "metadata", "CFG001 CFG003 COM008 COM010 EXP001 SHP004 OPT005 OBJ005 SHP006"
)
def wrong_size(save: Save) -> Iterator[Mutant]:
    sizes = ("num_layers", "hidden_size", "num_experts", "padded_vocab_size", "num_attention_heads")
    for name, value in common_states(*sizes)(save):
        unseen = "one size alone may be a later job's: the tensors are what is loaded, and a wrong size fails there"
        if name == "num_layers":
            args = read_common(save.step)["args"]
            is_shared = any(fqn.startswith("mimo.") for fqn in save.tensors)
            unseen = "several modules share one set of arguments" if is_shared else ""
            if getattr(args, "hybrid_override_pattern", None) or getattr(args, "hybrid_layer_pattern", None):
                unseen = "the hybrid pattern gives the layers one by one"
        mutant = common(f"{name} {value} becomes {2 * value}", argument(name, 2 * value))
        yield replace(mutant, unseen=unseen)


@operator("double a mesh axis in the arguments", "metadata", "COM008 OPT005 OBJ005 SHP006")
def wrong_mesh(save: Save) -> Iterator[Mutant]:
    axes = (f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert"))
    for name, value in common_states(*axes, "world_size")(save):
        mutant = common(f"{name} {value} becomes {2 * value}", argument(name, 2 * value))
        yield replace(mutant, unseen="torch_dist is resharded on loading, so the mesh in the arguments decides nothing")


@operator("another sharding type of the optimizer", "metadata", "COM003 COM004")
def wrong_type(save: Save) -> Iterator[Mutant]:
    kinds = {"dp_reshardable", "fully_reshardable", "fully_sharded_model_space"}
    key = "distrib_optim_sharding_type"
    for _, value in common_states(key, inside="content_metadata")(save):
        if any("optimizer." in fqn for fqn in save.tensors):
            same = {"fully_reshardable", "fully_sharded_model_space"}
            for kind in sorted(kinds - {value} - (same if value in same else set())):
                yield common(
                    f"{value} becomes {kind}", lambda state, kind=kind: state["content_metadata"].update({key: kind})
                )


@operator("flip a layout flag of the content metadata", "metadata", "COM009 SHP006")
def wrong_flag(save: Save) -> Iterator[Mutant]:
    flags = ("singleton_local_shards", "non_homogeneous_layers", "chained_optim_avoid_prefix")
    for name, value in common_states(*flags, inside="content_metadata")(save):

        def change(state: Any, name: str = name, value: bool = value) -> None:
            state["content_metadata"][name] = not value

        is_numbered = name == "non_homogeneous_layers" and value
        unseen = "layers of several kinds are numbered without the flag" if is_numbered else ""
        yield replace(common(f"{name} becomes {not value}", change), unseen=unseen)


@operator("another step in the tracker", "metadata", "COM002")
def wrong_tracker(save: Save) -> Iterator[Mutant]:
    name = "latest_checkpointed_iteration.txt"
    if (save.step.parent / name).exists():
        yield Mutant(name, (name,), lambda step: (step.parent / name).write_text("20"), of_run=True)


_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


@operator("drop the param_groups", "metadata", "COM004")
def no_groups(save: Save) -> Iterator[Mutant]:
    for _, value in common_states("optimizer", inside="optimizer")(save):
        if "param_groups" in value:
            yield common("param_groups", lambda state: state["optimizer"]["optimizer"].pop("param_groups"))


@operator("make two param_groups look the same", "metadata", "COM005")
def merged_groups(save: Save) -> Iterator[Mutant]:
    for _, value in common_states("optimizer", inside="optimizer")(save):
        groups = value.get("param_groups", [])
        if len(groups) > 1 and "wd_mult" in groups[0]:

            def change(state: Any) -> None:
                first, second, *_ = state["optimizer"]["optimizer"]["param_groups"]
                second |= {name: first[name] for name in _IDENTITY if name in first}
                second["max_lr"] = 2 * (first.get("max_lr") or first.get("lr") or 1.0)

            yield common("the second group is identified as the first, with its own learning rate", change)


# ---------------------------------------------------------------- metadata and files that do not belong together


@operator("the metadata of another step", "files", FILES + " PAY005")
def other_step(save: Save) -> Iterator[Mutant]:
    infos = save.metadata.storage_data
    if getattr(save.metadata.storage_meta, "save_id", None):

        def same(m: Metadata, step: Path) -> None:
            m.storage_meta.save_id = "11111111-0000-4000-8000-000000000000"  # type: ignore[union-attr]

        yield Mutant(
            "the same layout", (), edited(same), unseen="the metadata of two steps differ in their save id alone"
        )
    states = {fqn for fqn in save.metadata.state_dict_metadata if is_moment(fqn)}
    if states and not in_safetensors(save):

        def before(m: Metadata, step: Path) -> None:
            files = {info.relative_path: (step / info.relative_path).read_bytes() for info in infos.values()}
            forget(m, step, lambda fqn, offsets: fqn in states)
            for name, data in files.items():
                (step / name).write_bytes(data)

        yield Mutant("a step before the first of the optimizer", tuple(save.payload), edited(before))
    if not in_safetensors(save) and save.payload:

        def wider(m: Metadata, step: Path) -> None:
            index = max(m.storage_data, key=lambda index: m.storage_data[index].length)
            m.storage_data[index] = replace(m.storage_data[index], relative_path="__99_0.distcp", offset=0)

        yield Mutant("a step of more ranks", ("__99_0.distcp",), edited(wider))


@operator("a payload file that is a link elsewhere", "files", FILES)
def linked(save: Save) -> Iterator[Mutant]:
    for name in save.payload:

        def link(step: Path, name: str = name, target: str = "../gone") -> None:
            (step / name).unlink()
            (step / name).symlink_to(target)

        for target in ("../gone", name, "/dev/null", ".."):
            yield Mutant(f"{name} to {target}", (name,), lambda step, n=name, t=target: link(step, n, t))

        def elsewhere(step: Path, name: str = name) -> None:
            (step / name).rename(step.parent / f"moved{name}")
            (step / name).symlink_to(f"../moved{name}")

        yield Mutant(f"{name} to the file itself", (), elsewhere, "model caches link to their files")


# ---------------------------------------------------------------- headers of safetensors files

_HEADER = "GEO001 GEO002 GEO003 GEO004 GEO007 GEO008 SHP002 PAY004 PAY007 PAY009 PAY013 PAY014 SAF002"


def on_header(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """An edit of the header of a safetensors file."""

    def edit(step: Path) -> None:
        data = (step / name).read_bytes()
        header = read_header(step / name)
        change(header)
        text = json.dumps(header).encode()
        payload = data[8 + int.from_bytes(data[:8], "little") :]
        (step / name).write_bytes(len(text).to_bytes(8, "little") + text + payload)

    return edit


def header_entries(save: Save) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, key and entry of every tensor that is not empty."""
    for path in sorted(save.step.glob("*.safetensors")):
        for key, entry in read_header(path).items():
            if key != "__metadata__" and 0 not in entry["shape"]:
                yield path.name, key, entry


def alone(save: Save, key: str) -> str:
    """Why a header may say what it likes of a key."""
    count = sum(other == key for _, other, _ in header_entries(save))
    return "the header alone describes the tensor, and its bytes fit" if count == 1 else ""


@operator("another dtype in a safetensors header", "metadata", _HEADER, "headers")
def header_dtype(save: Save) -> Iterator[Mutant]:
    for name, key, entry in header_entries(save):
        for dtype in {"F16", "F64", "I32"} - {entry["dtype"]}:
            unseen = alone(save, key) if int(dtype[1:]) == int(entry["dtype"].lstrip("BFI")) else ""
            change = on_header(name, lambda header, key=key, dtype=dtype: header[key].update(dtype=dtype))
            yield Mutant(f"{key} in {name}: {dtype}", (key, name), change, unseen=unseen)


@operator("another shape in a safetensors header", "metadata", _HEADER, "headers")
def header_shape(save: Save) -> Iterator[Mutant]:
    for name, key, entry in header_entries(save):
        shape = entry["shape"]
        for other in ([2 * shape[0], *shape[1:]], shape[::-1], [1, *shape]):
            if other != shape:
                unseen = "" if other[0] == 2 * shape[0] else alone(save, key)
                change = on_header(name, lambda header, key=key, shape=other: header[key].update(shape=shape))
                yield Mutant(f"{key} in {name}: {other}", (key, name), change, unseen=unseen)


@operator("other data_offsets in a safetensors header", "metadata", _HEADER, "headers")
def header_offsets(save: Save) -> Iterator[Mutant]:
    for name, key, entry in header_entries(save):
        begin, end = entry["data_offsets"]
        for span in ([begin, end + 4], [begin + 4, end], [begin + 4, end + 4], [end, begin]):
            change = on_header(name, lambda header, key=key, span=span: header[key].update(data_offsets=span))
            yield Mutant(f"{key} in {name}: {span}", (key, name), change)


@operator("other saved_offsets in a safetensors header", "metadata", _HEADER, "headers")
def header_places(save: Save) -> Iterator[Mutant]:
    for name, key, entry in header_entries(save):
        info = json.loads(read_header(save.step / name).get("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for axis in range(len(entry["shape"])) if key in info else ():
            offsets = moved(tuple(info[key]["saved_offsets"]), axis, 1)

            def change(header: dict[str, Any], key: str = key, offsets: Offsets = offsets) -> None:
                places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
                places[key]["saved_offsets"] = list(offsets)
                header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)

            yield Mutant(f"{key} in {name}: {list(offsets)}", (key, name), on_header(name, change))


# ---------------------------------------------------------------- metadata of single ranks


@operator(
    "the metadata of one rank is damaged", "files", f"{FILES} {HOLES} GEO001 GEO003 PAY001 PAY005 PAY007", "ranks"
)
def one_rank(save: Save) -> Iterator[Mutant]:
    for path in sorted(save.step.glob("__*.metadata")):
        name = path.name
        yield Mutant(f"{name} absent", (name,), lambda step, name=name: (step / name).unlink())
        yield Mutant(f"{name} at half", (name,), on_file(name, lambda data: data[: len(data) // 2]))
        metadata = read_metadata(save.step, name)
        for fqn, entry in metadata.state_dict_metadata.items():
            tensor: Any = entry
            if not hasattr(entry, "chunks") or 0 in tensor.chunks[0].sizes:
                continue
            offsets, sizes = (tuple(v) for v in (tensor.chunks[0].offsets, tensor.chunks[0].sizes))
            doubled = (2 * tensor.size[0], *tensor.size[1:])
            index, place = MetadataIndex(fqn, tensor.chunks[0].offsets), (fqn, 0, moved(offsets, 0, 1), sizes)
            dropped = edited(lambda m, step, index=index: m.storage_data.pop(index), name)
            shifted = edited(lambda m, step, place=place: put(m, *place), name)
            resized = edited(lambda m, step, fqn=fqn, shape=doubled: resize(m, fqn, shape), name)
            for what, edit in (("no storage entry", dropped), ("shifted", shifted), ("doubled", resized)):
                named = fqn, name.replace(".metadata", "_0.distcp")
                yield Mutant(f"{fqn} of {name}: {what}", named, edit)


# ---------------------------------------------------------------- what is legal


LEGAL = "written differently, the same checkpoint"


@operator("write the metadata in another order", "data", "")
def reordered(save: Save) -> Iterator[Mutant]:
    def change(m: Metadata, step: Path) -> None:
        m.state_dict_metadata = dict(reversed(m.state_dict_metadata.items()))
        m.storage_data = {replace(index, index=None): info for index, info in reversed(m.storage_data.items())}
        for entry in m.state_dict_metadata.values():
            tensor: Any = entry
            if hasattr(entry, "chunks"):
                tensor.chunks.reverse()

    yield Mutant("entries, chunks and storage reversed, no index hints", (), edited(change), LEGAL)


@operator("all records in one file", "data", "")
def one_file(save: Save) -> Iterator[Mutant]:
    if in_safetensors(save) or not save.payload:
        return

    def change(m: Metadata, step: Path) -> None:
        data = {name: (step / name).read_bytes() for name in save.payload}
        starts = {name: sum(map(len, list(data.values())[:n])) for n, name in enumerate(data)}
        for name in data:
            (step / name).unlink()
        (step / "__0_0.distcp").write_bytes(b"".join(data.values()))
        for index, info in m.storage_data.items():
            start = starts.get(info.relative_path, 0)
            m.storage_data[index] = replace(info, relative_path="__0_0.distcp", offset=info.offset + start)

    yield Mutant("__0_0.distcp", (), edited(change), LEGAL)


@operator("a parameter without any state", "metadata", "")
def never_stepped(save: Save) -> Iterator[Mutant]:
    is_listed = any("param_to_group_meta" in fqn for fqn in save.metadata.state_dict_metadata)
    for stem in parts_of_states(save):
        start, _, end = stem.partition("*")
        keys = {fqn for fqn in save.metadata.state_dict_metadata if fqn.startswith(start) and fqn.endswith(end)}
        if not end and not re.search(r"bucket_idx|\bstate\.\d+\.$", start) and not is_listed:
            yield Mutant(stem, (), without(keys), "frozen, or an expert that was never chosen")


@operator("an export without the optimizer", "metadata", "")
def exported(save: Save) -> Iterator[Mutant]:
    keys = {fqn for fqn in save.metadata.state_dict_metadata if re.match(r"optim\w*\.", fqn)}
    others = set(save.metadata.state_dict_metadata) - keys
    if keys and others and not any((save.step / name).exists() for name in ("common.pt", "run_config.yaml")):
        yield Mutant("every optimizer key", (), without(keys), "weights for inference")
