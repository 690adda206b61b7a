"""What every rank planned to write, as Megatron-Core keeps it in the metadata, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, compress
from operator import itemgetter
from typing import Any

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.formats.pickles.columns import END, OneChunk, PlanRows, RowRun
from ckptlint.formats.pickles.rows import Table
from ckptlint.formats.pickles.safe_pickle import Node
from ckptlint.loaders.readers.dcp.metadata import Numbering, attributes_of, attributes_of_all, numbered
from ckptlint.model import SavePlans
from ckptlint.model.files import Names
from ckptlint.model.text import all_printable
from ckptlint.model.tiling import COORDINATE_LIMIT, IntArray


def read_plans(plans: Any) -> SavePlans | None:
    """Every rank's plan as columns, or None where there are none or they make no sense (they are advisory).

    Source: `all_local_plans` of megatron-core >= 0.11: a list by rank of SavePlan or MCoreSavePlan
    """
    if not isinstance(plans, list) or not plans:
        return None
    try:
        listed = [attributes_of(plan, "SavePlan").get("items") or () for plan in plans]
        items = [*chain.from_iterable(listed)]
        is_node = [type(item) is not RowRun and item is not END for item in items]
        lengths = np.array([item.count if type(item) is RowRun else item is not END for item in items], np.int64)
        starts = np.cumsum(lengths) - lengths
        tables = [_of_nodes([*compress(items, is_node)], starts[is_node])]
        runs: dict[int, list[tuple[RowRun, int]]] = {}
        for item, start in zip(items, starts.tolist(), strict=True):
            if type(item) is RowRun:
                runs.setdefault(id(item.table), []).append((item, start))
        tables += [_of_runs(same[0][0].table, same) for same in runs.values()]
        rank = np.repeat(np.arange(len(plans), dtype=np.int32), [*map(len, listed)])
        return _joined(tables, len(plans), np.repeat(rank, lengths))
    except (UnreadableError, KeyError, TypeError, ValueError, OverflowError):
        return None


@dataclass(slots=True, eq=False)
class _Items:
    """Planned items; `rows`, int64 [n], says where each is among all.

    `name` and `dtype` are positions in `names` and `dtypes`, int [n], -1 for the dtype of bytes; offsets, sizes and
    global shapes are int64 [n, d], padded with -1.
    """

    rows: IntArray
    names: Names | list[str]
    name: IntArray
    dtypes: list[str]
    dtype: IntArray
    offsets: IntArray
    sizes: IntArray
    global_shape: IntArray


def _of_nodes(nodes: list[Any], rows: IntArray) -> _Items:
    """The planned items that the general reader found, as columns."""
    states = attributes_of_all(nodes, "WriteItem") if nodes else []
    index = attributes_of_all([state["index"] for state in states], "MetadataIndex") if states else []
    data = [state.get("tensor_data") for state in states]
    of_tensors = np.flatnonzero([item is not None for item in data])
    write_data = (
        attributes_of_all([item for item in data if item is not None], "TensorWriteData") if len(of_tensors) else []
    )
    extents = [_extents(item["chunk"]) for item in write_data]
    name, names = numbered([*map(itemgetter("fqn"), index)])
    dtype = np.full(len(states), -1, np.int64)
    dtype[of_tensors], dtypes = numbered([_dtype_of(item.get("properties")) for item in write_data])
    return _Items(
        rows,
        names,
        name,
        dtypes,
        dtype,
        _padded([offsets for offsets, _ in extents], of_tensors, len(states)),
        _padded([sizes for _, sizes in extents], of_tensors, len(states)),
        _padded([*map(itemgetter("size"), write_data)], of_tensors, len(states)),
    )


def _of_runs(table: Table, runs: list[tuple[RowRun, int]]) -> _Items:
    """The rows of some row runs of one table; with each, where its first is among all."""
    planned = table.rows
    assert isinstance(planned, PlanRows)
    rows = np.concatenate([np.arange(start, start + run.count) for run, start in runs])
    in_table = np.concatenate([np.arange(run.first, run.first + run.count) for run, _ in runs])
    properties = [value if isinstance(value, str) else _dtype_of(value) for value in planned.properties]
    number, dtypes = numbered(properties)
    number = np.append(number, -1)  # the last for bytes
    chunk = planned.chunk
    return _Items(
        rows,
        planned.names,
        planned.name[in_table],
        dtypes,
        number[planned.of_properties[in_table]],
        _with_padding(chunk.offset_rank[in_table], chunk.offsets[in_table]),
        _with_padding(chunk.size_rank[in_table], chunk.sizes[in_table]),
        _with_padding(planned.size_rank[in_table], planned.sizes[in_table]),
    )


def _joined(tables: list[_Items], world_size: int, rank: Any) -> SavePlans:
    """One table of parts that together have all rows."""
    fqn, dtype = np.zeros(len(rank), np.int32), np.full(len(rank), -1, np.int32)
    names, dtypes = Numbering(), Numbering()
    for table in tables:
        of_names, of_dtypes = names.add([*table.names]), dtypes.add(table.dtypes)
        fqn[table.rows] = of_names[table.name]
        tensors = table.dtype >= 0
        dtype[table.rows[tensors]] = of_dtypes[table.dtype[tensors]]
    is_bytes = dtype < 0
    used, fqn = names.in_order_of_use(fqn)
    used_dtypes, dtype[~is_bytes] = dtypes.in_order_of_use(dtype[~is_bytes])
    return SavePlans(
        world_size=world_size,
        fqns=all_printable(used),
        fqn=fqn,
        rank=rank,
        is_bytes=is_bytes,
        offsets=_stacked(len(rank), [(table.rows, table.offsets) for table in tables]),
        sizes=_stacked(len(rank), [(table.rows, table.sizes) for table in tables]),
        dtypes=all_printable(used_dtypes),
        dtype=dtype.astype(np.int16),
        global_shape=_stacked(len(rank), [(table.rows, table.global_shape) for table in tables]),
    )


def _extents(chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if type(chunk) is OneChunk:
        return chunk.extents()
    state = attributes_of(chunk, "ChunkStorageMetadata")
    return state["offsets"], state["sizes"]


def _dtype_of(properties: Any) -> str:
    if type(properties).__base__ is Node and properties and isinstance(properties[0], tuple):
        return str(properties[0][0])
    return "unknown"


def _padded(values: list[tuple[int, ...]], rows: IntArray, count: int) -> IntArray:
    """int64 [count, d], the values in their rows, -1 everywhere else."""
    lengths = np.array([*map(len, values)], np.int64)
    flat = np.fromiter(chain.from_iterable(values), np.int64, int(lengths.sum()))
    if ((flat <= -COORDINATE_LIMIT) | (flat >= COORDINATE_LIMIT)).any():
        raise ValueError("a plan's numbers do not fit")
    table = np.full((count, int(lengths.max(initial=0))), -1, np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    table[np.repeat(rows, lengths), np.arange(len(flat)) - starts] = flat
    return table


def _with_padding(rank: IntArray, coordinates: IntArray) -> IntArray:
    """int64 [n, d], the coordinates with -1 after the rank of each row."""
    axes = max(int(rank.max(initial=0)), 0)
    return np.where(np.arange(axes) < rank[:, None], coordinates[:, :axes], np.int64(-1))


def _stacked(count: int, placed: list[tuple[IntArray, IntArray]]) -> IntArray:
    """int64 [count, d], the tables at their rows, -1 everywhere else."""
    whole = np.full((count, max(table.shape[1] for _, table in placed)), -1, np.int64)
    for rows, table in placed:
        whole[rows, : table.shape[1]] = table
    return whole
