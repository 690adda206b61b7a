"""A matrix of ranks (or files) by parts of model and optimizer, and the ranks whose size is out of balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.geometry.record_states import MISSING, NOT_CHECKED, STATES, THERE, record_states
from ckptlint.geometry.writers import ranks_of_files
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.facts import fact
from ckptlint.model.ranks.files import RankFile
from ckptlint.model.tiling import IntArray
from ckptlint.vocabulary.keys import COPIES, MASTER_COPIES, MOMENTS, Key, is_token_table, modules_of, parse

CELL_STATES = ("nothing", "there", "stored twice", *STATES[1:])
"""States of a cell, from best to worst; a cell has the worst state of its records."""
_PLACES = ("embedding", "layer", "stack", "norm", "head", "rest")
_PLACE_OF = {"norm": "norm", "output": "head"}
_KINDS = ("model", "optimizer", "other")
_MOST_OFF = 0.2
"""Largest relative difference from the median size of peers that counts as balanced.

Chosen, not derived: uneven shards are assumed to stay within it.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A part of the checkpoint: one section, at one place of the model.

    Attributes:
        section: `model`, a second copy of it (`ema`), a state of the optimizer (`exp_avg`; `master` for its copy of the
            weights), `optimizer` for all else of it, `other` for what is neither.
        place: `embedding`, `layer`, `stack` (chunks of several layers in one), `norm` (outside of
            layers), `head`, or `rest`.
        block: of a layer, the path before its number; "" elsewhere.
        layer: its number, -1 elsewhere.
    """

    section: str
    place: str
    block: str = ""
    layer: int = -1

    @property
    def kind(self) -> str:
        """`model`, `optimizer` or `other`."""
        is_copy = self.section in COPIES
        return "model" if is_copy else self.section if self.section in ("model", "other") else "optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class RankContents:
    """The matrix of who holds what: row i is a rank (or a file without one), cell k a non-empty entry.

    Attributes:
        names: names of the rows: `rank 3`, `dp_1,mp_0` as in file names, or a file name.
        ranks: int64 [r], -1 where unknown.
        files: file names of each row.
        size: int64 [r], bytes of the files that exist; -1 without any.
        model, optimizer: int64 [r], bytes of the intact records of each kind.
        factor: float64 [r], size divided by the median size of its peers, the rows that also hold model, optimizer or
            both; 1.0 without peers, for files of an export, and for rows with lost data.
        columns: the parts, the sections one after another.
        row, column: int64 [k], in this order ascending.
        state: uint8 [k], position in `CELL_STATES`.
        lost: (row, file, position in `CELL_STATES`) of each file with a record that failed, is cut or missing.
        unfiled: how many chunks no record holds.
    """

    names: list[str]
    ranks: IntArray
    files: list[list[str]]
    size: IntArray
    model: IntArray
    optimizer: IntArray
    factor: npt.NDArray[np.float64]
    columns: list[Column]
    row: IntArray
    column: IntArray
    state: npt.NDArray[np.uint8]
    lost: list[tuple[int, str, int]]
    unfiled: int

    @property
    def out_of_balance(self) -> npt.NDArray[np.bool_]:
        """bool [r], rows whose size differs by more than 20 % from the median of their peers."""
        return np.asarray(np.abs(self.factor - 1) > _MOST_OFF)

    @property
    def starts(self) -> IntArray:
        """int64 [r + 1], where the cells of each row start."""
        return np.searchsorted(self.row, np.arange(len(self.names) + 1))

    def without(self) -> dict[str, list[Column]]:
        """Section (`exp_avg`, `ema`) -> layers of the model that lack it, where other layers have it."""
        layered = [column for column in self.columns if column.layer >= 0]
        stored = {(column.section, column.block, column.layer) for column in layered}
        absent_layers = {
            section: [c for c in layered if c.section == "model" and (section, c.block, c.layer) not in stored]
            for section in dict.fromkeys(column.section for column in layered)
        }
        return {section: lacking for section, lacking in absent_layers.items() if lacking}


@fact
def rank_contents_of(ckpt: Checkpoint) -> RankContents:
    """The matrix of a checkpoint; a lost file is a row too, with the parts that other files show it held."""
    table, states, sizes = ckpt.records, record_states(ckpt), ckpt.files.size
    lost_files = [file for files in (ckpt.rank_files.missing if ckpt.rank_files else {}).values() for file in files]
    owners = _owners(ckpt, lost_files)
    rows = sorted(dict.fromkeys(owners), key=lambda owner: (owner[0] < 0, owner[0]))
    number = {owner: i for i, owner in enumerate(rows)}
    row_of = np.array([number[owner] for owner in owners], np.int64)
    file_names = [*ckpt.files.names, *(file.name for file in lost_files)]
    files = grouped(zip(row_of.tolist(), file_names, strict=True))
    columns, column, twice, unread = _columns(ckpt)
    row, is_there = row_of[table.file], states <= NOT_CHECKED
    kinds = np.array([column_of_loss.kind for column_of_loss in columns], object)[column]
    size, looked_at, model, optimizer = (
        np.bincount(at, weights, len(rows)).clip(max=2.0**62).astype(np.int64)
        for at, weights in (
            (row_of[: len(sizes)], np.maximum(sizes, 0)),
            (row_of[: len(sizes)], sizes >= 0),
            (row, np.maximum(table.byte_length, 0) * (is_there & (kinds == "model"))),
            (row, np.maximum(table.byte_length, 0) * (is_there & (kinds == "optimizer"))),
        )
    )
    worst = np.full(len(file_names), MISSING)
    worst[: len(sizes)] = THERE
    np.maximum.at(worst, table.file, states)
    worst[[file for file, _ in unread]] = MISSING
    lost = np.flatnonzero(worst > NOT_CHECKED)
    # Only rows with the same kinds of content are compared: under Megatron one data-parallel rank saves the weights
    # while all save optimizer state. Rows with lost data are skipped, since their loss is reported already.
    peer_group = ((model > 0) + 2 * (optimizer > 0)) * (looked_at > 0) * (not ckpt.is_export)
    peer_group[row_of[lost]] = 0
    factor = np.ones(len(rows))
    for kind in (1, 2, 3):
        peers = peer_group == kind
        factor[peers] = size[peers] / median(size[peers].tolist()) if peers.any() else 1.0

    unread += _of_lost_rank_files(ckpt, lost_files, column)
    gone = np.array([(row_of[file], column_of_loss) for file, column_of_loss in unread], np.int64).reshape(-1, 2)
    cell = np.append(np.where(states > THERE, states + 2, 1 + twice), np.full(len(gone), CELL_STATES.index("missing")))
    row, column = np.append(row, gone[:, 0]), np.append(column, gone[:, 1])
    order = np.lexsort((column, row))
    first = np.flatnonzero(np.append(True, np.diff(row[order]) | np.diff(column[order])))[: len(order)]
    return RankContents(
        names=[name for _, name in rows],
        ranks=np.array([rank for rank, _ in rows], np.int64),
        files=[files[row] for row in range(len(rows))],
        size=np.where(looked_at > 0, size, -1),
        model=model,
        optimizer=optimizer,
        factor=factor,
        columns=columns,
        row=row[order][first],
        column=column[order][first],
        state=(np.maximum.reduceat(cell[order], first) if len(first) else cell).astype(np.uint8),
        lost=[(int(row_of[file]), file_names[file], int(worst[file]) + 2) for file in lost.tolist()],
        unfiled=sum(int((tensor.tiling.live & (tensor.chunks.record < 0)).sum()) for tensor in ckpt.tensors.values()),
    )


def _owners(ckpt: Checkpoint, lost: Sequence[RankFile]) -> list[tuple[int, str]]:
    """Rank (-1 for none) and name of the row of each payload file, and then of each rank file that is missing."""
    of_set = ckpt.rank_files.files if ckpt.rank_files else ()
    numbers = {file.name: file.numbers for file in (*of_set, *lost)}
    names = (*ckpt.files.names, *(file.name for file in lost))
    owners = []
    for name, rank in zip(names, [*ranks_of_files(ckpt).tolist(), *(-1 for _ in lost)], strict=True):
        coordinate = {"rank": rank} if rank >= 0 else numbers.get(name, {})
        if coordinate.keys() == {"rank"}:
            owners.append((coordinate["rank"], f"rank {coordinate['rank']}"))
        else:
            owners.append((-1, ",".join(f"{what}_{i}" for what, i in coordinate.items()) or name))
    return owners


def _of_lost_rank_files(ckpt: Checkpoint, lost: Sequence[RankFile], column: IntArray) -> list[tuple[int, int]]:
    """(file, column) of each part that a missing rank file surely held: those that all files of its kind hold."""
    kinds = {file.name: file.kind for file in ckpt.rank_files.files} if ckpt.rank_files and lost else {}
    columns_by_kind: dict[str, set[int]] = {}
    order = np.argsort(ckpt.records.file, kind="stable")
    bounds = np.searchsorted(ckpt.records.file[order], np.arange(len(ckpt.files) + 1))
    for number, name in enumerate(ckpt.files.names if kinds else ()):
        columns = {*column[order[bounds[number] : bounds[number + 1]]].tolist()}
        columns_by_kind[kinds.get(name, "")] = columns & columns_by_kind.get(kinds.get(name, ""), columns)
    return [(i, at) for i, file in enumerate(lost, len(ckpt.files)) for at in columns_by_kind.get(file.kind, ())]


def _columns(ckpt: Checkpoint) -> tuple[list[Column], IntArray, npt.NDArray[np.bool_], list[tuple[int, int]]]:
    """(columns, column of each record, whether its chunk overlaps another, (file, column) of parts an index names)."""
    table, index, states = ckpt.records, ckpt.index, _states(ckpt)
    twice = np.zeros(len(table), bool)
    owners = np.array([*(_column_of(fqn, states) for fqn in table.fqns), None], object)[:-1][table.fqn]
    for tensor in ckpt.sound_tensors():
        rows = np.flatnonzero(tensor.chunks.record >= 0)
        records, whole = tensor.chunks.record[rows], _column_of(tensor.fqn, states)
        starts, extents = (what[rows, :1].ravel() for what in (tensor.tiling.offsets, tensor.tiling.sizes))
        if whole.place == "stack" and len(starts) and (starts >= 0).all() and (extents <= 1).all():
            layers, at = np.unique(starts, return_inverse=True)
            owners[records] = np.array([*(replace(whole, place="layer", layer=i) for i in layers.tolist()), None])[at]
        for box in tensor.tiling.coverage.doubled:
            over = tensor.chunks.record[tensor.tiling.touching(box)]
            twice[over[over >= 0]] = True
    absent = {name: i for i, name in enumerate(ckpt.files.names) if index is not None and name in index.unread}
    unread = [
        (absent[name], _column_of(key, states))
        for key, name in (index.places.items() if index is not None else ())
        if name in absent and key not in ckpt.tensors
    ]
    used = dict.fromkeys([*owners.tolist(), *(owner for _, owner in unread)])
    sections, blocks = ([*dict.fromkeys(getattr(owner, what) for owner in used)] for what in ("section", "block"))

    def place(owner: Column) -> tuple[int, ...]:
        section = sections.index(owner.section) * (owner.section != "model")
        kind = _KINDS.index(owner.kind), owner.section in _KINDS[1:], section
        return (*kind, _PLACES.index(owner.place), blocks.index(owner.block), owner.layer)

    columns = sorted(used, key=place)
    number = {owner: i for i, owner in enumerate(columns)}
    column = np.array([number[owner] for owner in owners.tolist()], np.int64)
    return columns, column, twice, [(file, number[owner]) for file, owner in unread]


def _states(ckpt: Checkpoint) -> dict[str, tuple[str, Key | None]]:
    """Key of an optimizer state -> its section, and the parameter's key where it names one."""
    inventory = inventory_of(ckpt)
    sections: dict[str, tuple[str, Key | None]] = {}
    for state in inventory.states:
        key = state.params[0].key if state.params else parse(state.path) if state.path else None
        sections[state.tensor.fqn] = _section(state.what), key
    for bucket in inventory.buckets:
        sections[bucket.tensor.fqn] = _section(bucket.what), None
    for tensor in inventory.numbered:
        sections[tensor.fqn] = _section(tensor.fqn.rpartition(".")[2]), None
    return sections


def _section(what: str) -> str:
    head = what.partition(".")[0]
    return "master" if head in MASTER_COPIES else head if head in MOMENTS else "optimizer"


def _column_of(fqn: str, states: Mapping[str, tuple[str, Key | None]]) -> Column:
    key = parse(fqn)
    if key.kind != "model":
        section, of = states.get(fqn, ("optimizer" if key.kind == "optimizer" else "other", None))
        if of is None or section == "optimizer":
            return Column(section, "rest")
        key = of
    else:
        section = next((name for name in key.scope if name in COPIES), "model")
    block = "/".join((*modules_of(key), key.block))
    if key.block:
        return Column(section, "stack", block) if key.layer is None else Column(section, "layer", block, key.layer)
    place = "embedding" if is_token_table(key) or key.function == "embedding" else _PLACE_OF.get(key.function, "rest")
    return Column(section, place)
