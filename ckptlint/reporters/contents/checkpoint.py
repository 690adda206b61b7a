"""What is in a checkpoint, without a verdict, as text and as JSON: `ckptlint show`."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import translate
from typing import Any

import numpy as np

from ckptlint.analysis.contents import description_of, parameters_of, tensors_by_part, values_of
from ckptlint.analysis.ranks.contents import rank_contents_of
from ckptlint.errors import ConfigError
from ckptlint.geometry.chunk_map import draw, make_grid
from ckptlint.geometry.record_states import MISSING, NOT_CHECKED, STATES, chunk_states, record_states
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import (
    JSON_ESCAPE,
    at_most,
    first_names,
    fold_names,
    inert,
    join_words,
    plural,
    printable,
    ranges,
    shape_text,
)
from ckptlint.patterns import lazy_pattern
from ckptlint.reporters.contents import ranks as by_rank
from ckptlint.reporters.contents import region
from ckptlint.reporters.contents.tensor_table import chunk_count, chunks_text, degrees, fitted, size_text, tensor_table
from ckptlint.reporters.full import header
from ckptlint.reporters.json_report import place_of, totals_of
from ckptlint.reporters.style import Style, cut
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.keys import role

SCHEMA = "ckptlint.show/1"
_FOLDED = lazy_pattern(r"\{(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\}")
_DEEPEST = 32  # a forged name may have thousands of dots
_LISTED, _VALUES = 12, 3

Branch = dict[str, "Branch | Tensor"]


def contents_text(checkpoints: Sequence[Checkpoint], pattern: str | None, tree: bool, ranks: bool, style: Style) -> str:
    """What is in the checkpoints, of keys that match a glob or `KEY[slices]`; ConfigError where nothing matches."""
    if ranks and (tree or pattern is not None):
        raise ConfigError("--ranks is about the whole checkpoint: leave out the pattern and --tree")
    regions = _region(checkpoints, pattern)
    if regions and tree:
        raise ConfigError("--tree is about whole tensors: leave out the slices")
    if regions:
        texts = ("\n".join([header(stored.ckpt, style), "", *region.as_text(stored)]) for stored in regions)
        return inert("\n\n".join(texts) + "\n")
    if ranks:
        blocks = (
            [header(ckpt, style), *_facts(ckpt, style, True, True), "", *by_rank.matrix(rank_contents_of(ckpt), style)]
            for ckpt in checkpoints
        )
        return inert("\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n")
    return inert(_tables(checkpoints, pattern, tree, style))


def contents_json(checkpoints: Sequence[Checkpoint], pattern: str | None, ranks: bool) -> str:
    """The same as JSON; with a glob every chunk of the tensors that match, with `ranks` who holds what."""
    if regions := _region(checkpoints, pattern):
        documents = [
            _checkpoint(stored.ckpt, stored.tensor.fqn) | {"region": region.as_json(stored)} for stored in regions
        ]
    else:
        _demand_match(checkpoints, pattern)
        documents = [
            _checkpoint(ckpt, pattern) | ({"ranks": by_rank.as_json(rank_contents_of(ckpt))} if ranks else {})
            for ckpt in checkpoints
        ]
    return inert(json.dumps({"schema": SCHEMA, "checkpoints": documents}, indent=2) + "\n", JSON_ESCAPE)


def _region(checkpoints: Sequence[Checkpoint], pattern: str | None) -> list[region.StoredRegion]:
    """Who holds the region that a pattern means; none where it is a glob: then tensors match it."""
    if pattern is None or (":" not in pattern and any(matching(ckpt, pattern) for ckpt in checkpoints)):
        return []
    return region.region_asked(checkpoints, pattern)


def matching(ckpt: Checkpoint, pattern: str | None) -> list[Tensor]:
    """The tensors whose name matches a glob, is the very text, or is folded in it (`h.{0-3}.w`); all without one."""
    tensors = list(ckpt.tensors.values())
    if pattern is None:
        return tensors
    names = (pattern, printable(pattern))  # as reports show it, or as the checkpoint has it
    glob = re.compile(translate(_FOLDED.sub("\0", pattern)).replace("\0", r"(\d+)"))
    folded = _FOLDED.findall(pattern)

    def is_meant(fqn: str) -> bool:
        like = glob.match(fqn)
        return fqn in names or (like is not None and all(map(_is_among, map(int, like.groups()), folded)))

    return [tensor for tensor in tensors if is_meant(tensor.fqn)]


def _is_among(number: int, folded: str) -> bool:
    """Whether a number is one of those that `ranges` wrote."""
    spans = (span.partition("-") for span in folded.split(","))
    return any(int(first) <= number <= int(last or first) for first, _, last in spans)


def _tables(checkpoints: Sequence[Checkpoint], pattern: str | None, tree: bool, style: Style) -> str:
    """Tensors folded over layers, or as a tree; chunk maps where a glob is given."""
    _demand_match(checkpoints, pattern)
    blocks = []
    for ckpt in checkpoints:
        tensors = matching(ckpt, pattern)
        lines = [header(ckpt, style), *_facts(ckpt, style, is_whole=pattern is None), ""]
        one_dtype = len({tensor.dtype for tensor in ckpt.tensors.values()}) == 1
        if not tensors:
            lines.append("no tensors")
        else:
            lines += _tree(tensors, style) if tree else tensor_table(tensors, one_dtype, style)
        if pattern is None:
            lines += _others(ckpt, style)
        else:
            for shown, alike in _alike(ckpt, tensors):
                lines += ["", *_map(ckpt, shown, alike, style)]
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks) + "\n"


def _demand_match(checkpoints: Sequence[Checkpoint], pattern: str | None) -> None:
    if pattern is not None and not any(matching(ckpt, pattern) for ckpt in checkpoints):
        raise ConfigError(no_tensor(checkpoints, pattern))


def no_tensor(checkpoints: Sequence[Checkpoint], name: str) -> str:
    """The sentence for a name or glob that no tensor has, with the nearest name."""
    names = [fqn for ckpt in checkpoints for fqn in ckpt.tensors]
    near = [fqn for fqn in names if fqn.endswith(f".{name}")] or get_close_matches(name, names[:10_000], 1)
    did_you_mean = f", did you mean {cut(near[0])}?" if near else "; `ckptlint show PATH` lists them"
    return f"no tensor of {checkpoints[0].path} matches {cut(printable(name))}{did_you_mean}"


# ---------------------------------------------------------------- text


def _facts(ckpt: Checkpoint, style: Style, is_whole: bool = True, with_ranks: bool = False) -> Iterator[str]:
    """What it is, its topology, and records that are not known to be there."""
    if ckpt.partial_because:
        yield from style.wrap(f"partial: {ckpt.partial_because}", "    ", "  ")
    for line in _about(ckpt) if is_whole else ():
        yield from style.wrap(line, "    ", "  ")
    if ckpt.topology:
        sizes = ", ".join(f"{axis} = {size.size:,} ({size.source})" for axis, size in ckpt.topology.items())
        yield from style.wrap(f"topology: {sizes}", "    ", "  ")
    states = np.bincount(record_states(ckpt), minlength=len(STATES)).tolist()
    if bad := [f"{plural(states[i], 'record')} {STATES[i]}" for i in range(NOT_CHECKED, len(STATES)) if states[i]]:
        whose = "" if with_ranks else "; --ranks shows whose"
        yield from map(style.lost, style.wrap(f"{', '.join(bad)}{whose}", "    ", "  "))


def _about(ckpt: Checkpoint) -> Iterator[str]:
    """What it is: the model that it is of, parameters, parts and values."""
    source, fields = description_of(ckpt)
    if fields:
        yield f"{source}: {', '.join(f'{name} {_said(value)}' for name, value in fields.items())}"
    parameters = parameters_of(ckpt)
    amounts = [f"{dtype} {count:,}" for dtype, count in sorted(parameters.by_dtype.items())]
    if len(amounts) == 1:
        amounts = [*parameters.by_dtype]
    if parameters.packed:
        amounts.append(f"{plural(parameters.packed, 'packed weight')} not counted")
    if parameters.are_masters and amounts:
        amounts.append("the optimizer's master copies")
    if amounts:
        yield f"parameters: {parameters.by_dtype.total():,} ({', '.join(amounts)})"
    for part, dtypes in tensors_by_part(ckpt).items():
        sizes = (f"{dtype} {count:,} ({size_text(size or None)})" for dtype, (count, size) in sorted(dtypes.items()))
        yield f"{part}: {', '.join(sizes)}"
    if values := values_of(ckpt):
        shown = [f"{cut(name)} = {join_words([*map(_said, those[:_VALUES])])}" for name, those in values.items()]
        yield f"values: {', '.join(at_most(shown, _LISTED))}"


def _said(value: object) -> str:
    """A value as text: whole numbers with commas, others with six digits."""
    if isinstance(value, tuple):
        return "/".join(map(_said, value))
    if isinstance(value, float):
        return f"{value:g}"
    return cut(f"{value:,}" if type(value) is int and abs(value) >= 10_000 else printable(str(value)))


def _tree(tensors: Iterable[Tensor], style: Style) -> Iterator[str]:
    """The names as a tree; branches that differ in a number alone are one, with the numbers as ranges."""
    root: Branch = {}
    for tensor in tensors:
        *path, last = tensor.fqn.split(".", _DEEPEST)
        node: Branch = root
        for name in path:
            child = node.setdefault(name, {})
            if not isinstance(child, dict):  # a tensor and a folder of one name
                child = node.setdefault(f"{name}.", {})
                assert isinstance(child, dict)
            node = child
        node[last if last not in node else f"{last}."] = tensor
    yield from _branches(root, "", style)


def _branches(node: Branch, indent: str, style: Style) -> Iterator[str]:
    """The tree of keys below a node; branches that are equal but for a number are drawn once."""
    folded = _folded(node)
    bar, tee, corner = ("|  ", "|- ", "`- ") if style.ascii_only else ("│  ", "├─ ", "└─ ")
    for i, (name, child, count) in enumerate(folded):
        while isinstance(child, dict) and len(inner := _folded(child)) == 1:
            word, child, times = inner[0]
            name, count = f"{name}.{word}", count * times
        is_last = i + 1 == len(folded)
        lead, below = (corner, "   ") if is_last else (tee, bar)
        elements = list(_leaves(child))
        size = sum(nbytes(tensor.dtype, tensor.volume) or 0 for tensor in elements) * count
        if isinstance(child, dict):
            about = f"{plural(len(elements) * count, 'tensor')}, {size_text(size or None)}"
        else:
            often = f"  x {count:,}" if count > 1 else ""
            chunks = f"{chunks_text([child])} chunk" + "s" * (chunk_count(child) != 1)
            shape = f"{child.dtype} {shape_text(child.global_shape)}"
            about = f"{shape}  {chunks}  {size_text(size or None)}{often}"
        name = indent + lead + cut(name)
        is_short = len(name) + 2 + len(about) <= style.width
        yield name + ("  " if is_short else f"\n{indent}{below}   ") + about
        if isinstance(child, dict):
            yield from _branches(child, indent + below, style)


def _folded(node: Branch) -> list[tuple[str, Branch | Tensor, int]]:
    """The children by name, those with a number for a name folded where they look the same."""
    alike = grouped(
        (_look(child) if name.isdecimal() and len(name) < 10 else name, name) for name, child in node.items()
    )
    labels = (names[0] if len(names) == 1 else "{" + ranges(map(int, names)) + "}" for names in alike.values())
    return [(label, node[names[0]], len(names)) for label, names in zip(labels, alike.values(), strict=True)]


def _look(child: Branch | Tensor) -> Hashable:
    if isinstance(child, dict):
        return frozenset((name, _look(inner)) for name, inner in child.items())
    return child.dtype, child.global_shape, degrees(child), chunk_count(child)


def _leaves(child: Branch | Tensor) -> Iterator[Tensor]:
    if isinstance(child, dict):
        for inner in child.values():
            yield from _leaves(inner)
    else:
        yield child


def _others(ckpt: Checkpoint, style: Style) -> Iterator[str]:
    """Objects and bytes entries."""
    grids = {(key, shape): len(rows) for key, shape, rows in ckpt.objects.rows_by_grid()}
    if grids:
        alike = grouped(((role(key), shape, count), key) for (key, shape), count in grids.items())
        rows = [
            [name, " x ".join(map(str, shape)) or "1", f"{count:,}"]
            for (_, shape, count), keys in alike.items()
            for name in fold_names(keys)
        ]
        yield from ["", *fitted(["object", "grid", "shards"], rows, style.width)]
    if ckpt.byte_objects:
        listed = first_names(map(cut, fold_names(entry.fqn for entry in ckpt.byte_objects)), _LISTED, "pattern")
        yield ""
        yield from style.wrap(f"{plural(len(ckpt.byte_objects), 'object')} stored as bytes: {listed}", "  ", "")


def _alike(ckpt: Checkpoint, tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[str]]]:
    """One tensor of each look with the names of all that share it: role, cuts and files."""
    by_look: dict[tuple[object, ...], tuple[Tensor, list[str]]] = {}
    for tensor in tensors:
        rows = tensor.chunks.record
        files = np.where(rows < 0, -1, ckpt.records.file[rows]) if len(ckpt.records) else rows
        look = role(tensor.fqn), tensor.dtype, tensor.global_shape, id(tensor.tiling), files.tobytes()
        by_look.setdefault(look, (tensor, []))[1].append(tensor.fqn)
    return list(by_look.values())


def _map(ckpt: Checkpoint, tensor: Tensor, names_alike: list[str], style: Style) -> Iterator[str]:
    """A tensor with its chunk map around the first chunk that is lost."""
    about = f"{tensor.dtype} {shape_text(tensor.global_shape)}, {plural(chunk_count(tensor), 'chunk')}"
    name = cut(tensor.fqn)
    is_short = len(name) + len(about) + 2 <= style.width
    yield style.paint(name, "bold") + ("  " if is_short else "\n  ") + about
    lost = np.flatnonzero(chunk_states(ckpt, tensor) > NOT_CHECKED)
    around = tensor.tiling.box(int(lost[0])) if len(lost) and tensor.is_sound else None
    grid = make_grid(tensor, around) if tensor.volume else None
    if grid is not None:
        lines = draw(ckpt, grid, around, style.ascii_only, style.width - 2, style.lost)
        yield from (f"  {line}".rstrip() for line in lines)
    elif tensor.malformed:
        yield "  the chunks have a different number of dims from the tensor"
    else:
        files = dict.fromkeys(ckpt.chunk_file(tensor, row) or "stored nowhere" for row in range(len(tensor.chunks)))
        yield "  " + (", ".join(list(files)[:_LISTED]) or "stored in no chunk")
    if len(names_alike) > 1:
        names = first_names(map(cut, fold_names(names_alike)), _LISTED, "pattern")
        yield from style.wrap(f"the same for: {names}", "    ", "  ")


# ---------------------------------------------------------------- JSON


def _checkpoint(ckpt: Checkpoint, pattern: str | None) -> dict[str, Any]:
    source, fields = description_of(ckpt)
    counted = parameters_of(ckpt)
    grids = {(key, shape): len(rows) for key, shape, rows in ckpt.objects.rows_by_grid()}
    return {
        "path": ckpt.path,
        "format": ckpt.format,
        "writer": ckpt.writer or None,
        "partial": ckpt.partial_because or None,
        "unseen": list(ckpt.not_looked_at),
        "totals": totals_of(ckpt),
        "description": {"source": source, **fields} if fields else None,
        "parameters": {
            "total": counted.by_dtype.total(),
            "by_dtype": counted.by_dtype,
            "packed_weights": counted.packed,
            "are_masters": counted.are_masters,
        },
        "parts": {
            part: {dtype: {"tensors": count, "bytes": size} for dtype, (count, size) in dtypes.items()}
            for part, dtypes in tensors_by_part(ckpt).items()
        },
        "values": values_of(ckpt),
        "topology": {axis: {"size": size.size, "source": size.source} for axis, size in ckpt.topology.items()},
        "tensors": [_tensor(ckpt, tensor, pattern is not None) for tensor in matching(ckpt, pattern)],
        "objects": [{"key": key, "grid": list(shape), "shards": count} for (key, shape), count in grids.items()],
        "entries": [entry.fqn for entry in ckpt.byte_objects],
        "files": [{"name": file.name, "size": file.size, "state": file.state} for file in ckpt.files],
    }


def _tensor(ckpt: Checkpoint, tensor: Tensor, with_chunks: bool) -> dict[str, Any]:
    """A tensor for `show --format json`; with a pattern its chunks and the files that hold them, too."""
    cuts = degrees(tensor)
    described: dict[str, Any] = {
        "fqn": tensor.fqn,
        "dtype": None if tensor.dtype == "unknown" else tensor.dtype,
        "shape": list(tensor.global_shape),
        "bytes": nbytes(tensor.dtype, tensor.volume),
        "chunks": chunk_count(tensor),
        "cut": None if cuts is None else list(cuts),
    }
    if with_chunks:
        sound = zip(tensor.tiling.offsets.tolist(), tensor.tiling.sizes.tolist(), strict=True)
        boxes = [*sound, *((list(chunk.offsets), list(chunk.sizes)) for chunk in tensor.malformed)]
        malformed = [chunk.record for chunk in tensor.malformed]
        records = [*tensor.chunks.record.tolist(), *malformed]
        states = [record_states(ckpt)[record] if record >= 0 else MISSING for record in malformed]
        states = [*chunk_states(ckpt, tensor).tolist(), *states]
        described["layout"] = [
            {"offsets": offsets, "sizes": sizes} | place_of(ckpt, record) | {"state": STATES[state]}
            for (offsets, sizes), record, state in zip(boxes, records, states, strict=True)
        ]
    return described
