"""Operators that damage the numbers of a real save, in a copy: metadata, shapes and checksums stay right."""

from __future__ import annotations

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from archives import with_checksums
from support import REAL

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.numerics.chunks import ChunkNumbers, chunk_numbers
from ckptlint.numerics.decode import decoded
from ckptlint.testing.cases import load_folder
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.keys import MASTER_COPIES, Key

Values = npt.NDArray[np.float64]

LAYOUTS = {
    "fsdp2_4r": "numbers/step-200",
    "dcp_fsdp2_4r": "fsdp2_4r",
    "fsdp1_sharded": "fsdp1_sharded",
    "megatron_tp2_pp2": "megatron_tp2_pp2/iter_0000010",
    "megatron_experts": "megatron_numbers/iter_0000200",
    "megatron_fsdp_4r": "megatron_fsdp_4r/iter_0000010",
    "verl_fsdp2_4r": "rank_files/verl_fsdp2_4r",
    "flat_2r": "rank_files/flat_2r",
    "experimental_2r": "rank_files/experimental_2r",
    "deepspeed_z1_4r": "deepspeed/z1_bf16_4r/global_step2",
    "deepspeed_z3_4r": "deepspeed/z3_bf16_4r/global_step2",
    "deepspeed_trainer_z3_2r": "deepspeed/trainer_z3_2r/checkpoint-2/global_step2",
    "deepspeed_trainer_2r": "deepspeed/trainer_z2_2r/checkpoint-2/global_step2",
    "safetensors": "exports/ok_in_memory",
}


class Chunk(NamedTuple):
    """A chunk of a floating tensor, as the file holds it.

    Attributes:
        fqn, param: keys of its tensor and of the parameter that it is of; key: the parameter's, taken apart.
        state: "" for a weight.
        box: where it is in its tensor; rank: that saved it, -1 for unknown.
        file, begin: of its bytes; archive: of the archive around them, first byte and length.
    """

    fqn: str
    param: str
    key: Key | None
    state: str
    dtype: str
    box: Any
    rank: int
    file: str
    begin: int
    elements: int
    archive: tuple[int, int]


class Save:
    """The chunks of a real save and their values, which an operator changes."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.folder = name, folder or REAL / LAYOUTS[name]
        ckpt = load_folder(self.folder, Depth.DATA)
        self.chunks = [*_chunks(ckpt, chunk_numbers(ckpt))]
        self.files = {name: (self.folder / name).read_bytes() for name in {chunk.file for chunk in self.chunks}}
        self.before = [self.read(chunk) for chunk in self.chunks]
        self.values = [values.copy() for values in self.before]

    def read(self, chunk: Chunk) -> Values:
        item = ITEM_BITS[chunk.dtype] // 8
        words = np.frombuffer(self.files[chunk.file], f"<u{item}", chunk.elements, chunk.begin)
        numbers = decoded(words, chunk.dtype)
        assert numbers is not None
        return numbers.astype(np.float64)

    @property
    def is_changed(self) -> bool:
        return not all(map(np.array_equal, self.values, self.before))

    def reset(self) -> None:
        self.values = [values.copy() for values in self.before]

    def rows(self, state: str | None = None, **named: Any) -> list[int]:
        """Chunks of a state, or of a rank, a tensor or a layer."""
        wanted = named | ({} if state is None else {"state": state})
        return [
            row
            for row, chunk in enumerate(self.chunks)
            if (chunk.key is not None or chunk.state)  # no buffers
            and all(
                (getattr(chunk, what) if what != "layer" else chunk.key and chunk.key.layer) == value
                for what, value in wanted.items()
            )
        ]

    def write(self, place: Path) -> None:
        """A copy of the save with the values as they are now, and with checksums of these."""
        shutil.copytree(self.folder, place)
        changed: dict[str, bytearray] = {}
        archives: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for chunk, before, after in zip(self.chunks, self.before, self.values, strict=True):
            if not np.array_equal(before, after):
                made = changed.setdefault(chunk.file, bytearray(self.files[chunk.file]))
                written = encoded(after, chunk.dtype)
                made[chunk.begin : chunk.begin + len(written)] = written
                archives[chunk.file].add(chunk.archive)
        for name, made in changed.items():
            for begin, length in archives[name] if not name.endswith(".safetensors") else ():
                made[begin : begin + length] = with_checksums(bytes(made[begin : begin + length]))
            (place / name).write_bytes(made)
        for path in place.rglob("*"):  # of one save
            os.utime(path, (0, 0))


def encoded(values: Values, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return values.astype(dtype).tobytes()
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def _chunks(ckpt: Checkpoint, numbers: ChunkNumbers) -> Iterator[Chunk]:
    inventory, payload = inventory_of(ckpt), ckpt.payload
    assert payload is not None
    params = {state.tensor.fqn: state.param for state in inventory.states} | {
        param.tensor.fqn: param for param in inventory.params
    }
    seen = set()
    for row in range(len(numbers.tensor)):
        tensor, record = numbers.tensors[numbers.tensor[row]], int(numbers.record[row])
        content, param = payload.of(record), params.get(tensor.fqn)
        begin, file = int(payload.start[record]), ckpt.files[int(ckpt.records.file[record])]
        archive = int(ckpt.records.byte_offset[record]), int(ckpt.records.byte_length[record])
        offset, elements = (0, int(numbers.elements[row])) if content is None else (content.offset, content.extent)
        if begin < 0 and content is None:
            begin = archive[0]
        begin += offset * ITEM_BITS[tensor.dtype] // 8
        if begin < 0 or elements != numbers.elements[row] or (file.name, begin) in seen:
            continue
        seen.add((file.name, begin))
        if not file.name.endswith(".distcp"):
            archive = 0, file.size or 0
        yield Chunk(
            tensor.fqn,
            param.tensor.fqn if param is not None else tensor.fqn,
            param.key if param is not None else None,
            numbers.states[numbers.tensor[row]],
            tensor.dtype,
            tensor.tiling.box(int(numbers.chunk[row])),
            int(numbers.rank[row]),
            file.name,
            begin,
            elements,
            archive,
        )


# ---------------------------------------------------------------- operators

MOMENTS = ("exp_avg", "exp_avg_sq")


class Operator(NamedTuple):
    """A damage.

    Attributes:
        codes: of which one has to tell it; none where it is legal.
        damage: changes the values, and says what it did; "" where the save has nothing of the kind.
    """

    name: str
    codes: frozenset[str]
    damage: Callable[[Save, random.Random], str]


OPERATORS: list[Operator] = []


def operator(codes: str) -> Callable[[Callable[[Save, random.Random], str]], Callable[[Save, random.Random], str]]:
    def add(damage: Callable[[Save, random.Random], str]) -> Callable[[Save, random.Random], str]:
        OPERATORS.append(Operator(damage.__name__, frozenset(codes.split()), damage))
        return damage

    return add


def pairs(save: Save, of: str = "exp_avg", beside: str = "exp_avg_sq") -> dict[int, int]:
    """Row of a chunk of one state -> that of the other state of the same region; both hold something."""
    other = {(save.chunks[row].param, save.chunks[row].box): row for row in save.rows(beside)}
    return {
        row: other[place]
        for row in save.rows(of)
        if (place := (save.chunks[row].param, save.chunks[row].box)) in other
        and save.before[row].any()
        and save.before[other[place]].any()
    }


def one_param(save: Save, draw: random.Random, rows: list[int]) -> list[int]:
    """The rows of one drawn tensor, of 64 elements or more."""
    by_tensor: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        by_tensor[save.chunks[row].fqn].append(row)
    large = [mine for mine in by_tensor.values() if sum(save.chunks[row].elements for row in mine) >= 64]
    return draw.choice(large) if large else []


def one_rank(save: Save, draw: random.Random, rows: list[int]) -> tuple[int, list[int]]:
    """A drawn rank and its rows: of at least four tensors, others of which are saved by other ranks."""
    ranks = sorted({save.chunks[row].rank for row in rows} - {-1})
    by_tensor: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        by_tensor[save.chunks[row].fqn].add(save.chunks[row].rank)
    shared = {fqn for fqn, of in by_tensor.items() if len(of) > 1}
    fitting = [row for row in rows if save.chunks[row].fqn in shared]
    drawn = {rank: [row for row in fitting if save.chunks[row].rank == rank] for rank in ranks}
    fit = [rank for rank in ranks if len({save.chunks[row].fqn for row in drawn[rank]}) >= 4]
    if not fit:
        return -1, []
    rank = draw.choice(fit)
    return rank, [row for row in rows if save.chunks[row].rank == rank]


def dense_layers(save: Save, rows: list[int]) -> list[int]:
    """The layers of some chunks that have no experts."""
    layers, with_experts = set[int](), set[int]()
    for key in (save.chunks[row].key for row in rows):
        if key is not None and key.layer is not None:
            (layers if key.expert is None else with_experts).add(key.layer)
    return sorted(layers - with_experts)


@operator("OPT010 OPT011")
def moments_exchanged_in_a_tensor(save: Save, draw: random.Random) -> str:
    beside = pairs(save)
    mine = one_param(save, draw, [*beside])
    for row in mine:
        save.values[row], save.values[beside[row]] = save.values[beside[row]], save.values[row]
    return save.chunks[mine[0]].fqn if mine else ""


@operator("OPT010 OPT011")
def moments_exchanged_in_a_rank(save: Save, draw: random.Random) -> str:
    beside = pairs(save)
    rank, mine = one_rank(save, draw, [*beside])
    for row in mine:
        save.values[row], save.values[beside[row]] = save.values[beside[row]], save.values[row]
    return f"rank {rank}" if mine else ""


@operator("OPT011")
def squares_zeroed_in_a_rank(save: Save, draw: random.Random) -> str:
    rank, mine = one_rank(save, draw, [*pairs(save).values()])
    for row in mine:
        save.values[row][:] = 0
    return f"rank {rank}" if mine else ""


@operator("OPT013")
def moments_zeroed_in_a_rank(save: Save, draw: random.Random) -> str:
    beside = pairs(save)
    rank, mine = one_rank(save, draw, [*beside])
    for row in mine:
        save.values[row][:] = save.values[beside[row]][:] = 0
    return f"rank {rank}" if mine else ""


@operator("OPT013")
def moments_zeroed_in_a_layer(save: Save, draw: random.Random) -> str:
    layers = dense_layers(save, [*pairs(save)])
    if len(layers) < 3:
        return ""
    layer = draw.choice(layers)
    for row in save.rows(layer=layer):
        save.values[row][:] *= save.chunks[row].state not in MOMENTS
    return f"layer {layer}"


@operator("OPT011")
def first_moments_of_another_rank(save: Save, draw: random.Random) -> str:
    beside = pairs(save)
    rank, mine = one_rank(save, draw, [*beside])
    there = {save.chunks[row].fqn: row for row in beside if save.chunks[row].rank == (rank + 1) % 4}
    done = 0
    for row in mine:
        other = there.get(save.chunks[row].fqn, row)
        if other != row and len(save.before[other]) == len(save.before[row]):
            save.values[row], done = save.before[other].copy(), done + 1
    return f"rank {rank}" if done >= 4 else ""


@operator("OPT011")
def first_moment_times_100(save: Save, draw: random.Random) -> str:
    mine = one_param(save, draw, [*pairs(save)])
    for row in mine:
        save.values[row] *= 100
    return save.chunks[mine[0]].fqn if mine else ""


@operator("")
def first_moment_halved(save: Save, draw: random.Random) -> str:
    mine = one_param(save, draw, [*pairs(save)])
    for row in mine:
        save.values[row] *= 0.5
    return save.chunks[mine[0]].fqn if mine else ""


@operator("OPT011")
def squares_of_another_scale(save: Save, draw: random.Random) -> str:
    mine = one_param(save, draw, [*pairs(save).values()])
    for row in mine:
        save.values[row] = draw.choice([save.before[other] for other in mine])[: save.chunks[row].elements] * 1e-4
        save.values[row] = np.resize(save.values[row], save.chunks[row].elements)
    return save.chunks[mine[0]].fqn if mine else ""


@operator("OPT010")
def a_sign_in_a_second_moment(save: Save, draw: random.Random) -> str:
    rows = [row for row in save.rows("exp_avg_sq") if save.before[row].any()]
    if not rows:
        return ""
    row = draw.choice(rows)
    save.values[row][draw.choice(np.flatnonzero(save.before[row]).tolist())] *= -1
    return save.chunks[row].fqn


@operator("OPT012")
def masters_shifted(save: Save, draw: random.Random) -> str:
    mine = one_param(save, draw, [row for state in MASTER_COPIES for row in save.rows(state) if save.chunks[row].key])
    for row in mine:
        save.values[row] = np.roll(save.values[row], 8)
    return save.chunks[mine[0]].fqn if mine else ""


def flipped(state: str, bit: int) -> Callable[[Save, random.Random], str]:
    def damage(save: Save, draw: random.Random) -> str:
        mine = one_param(save, draw, [row for row in save.rows(state) if save.chunks[row].dtype == "float32"])
        rows = [row for row in mine if ((save.before[row] != 0) & (np.abs(save.before[row]) < 1)).any()]
        if not rows:
            return ""
        row = draw.choice(rows)
        values = save.values[row].astype(np.float32)
        at = draw.choice(np.flatnonzero((values != 0) & (np.abs(values) < 1)).tolist())
        values.view(np.uint32)[at] ^= np.uint32(1 << bit)
        save.values[row] = values.astype(np.float64)
        return f"{save.chunks[row].fqn} element {at}"

    damage.__name__ = f"bit_{bit}_of_one_{state or 'weight'}"
    return damage


for _state, _codes in (("", "PAY016"), ("exp_avg", "PAY016 OPT011"), ("exp_avg_sq", "PAY016")):
    operator(_codes)(flipped(_state, 30))
    operator("")(flipped(_state, 20))


def rounded(values: Values) -> Values:
    words = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return words.view(np.float32).astype(np.float64)


@operator("PAY017")
def low_bits_lost_in_a_rank(save: Save, draw: random.Random) -> str:
    rows = [row for row in save.rows("") if save.chunks[row].dtype == "float32"]
    rank, mine = one_rank(save, draw, rows)
    for row in mine:
        save.values[row] = rounded(save.values[row])
    return f"rank {rank}" if mine else ""


@operator("PAY017")
def low_bits_lost_in_a_layer(save: Save, draw: random.Random) -> str:
    layers = dense_layers(save, [row for row in save.rows("") if save.chunks[row].dtype == "float32"])
    if len(layers) < 3 or not save.rows("exp_avg"):
        return ""
    layer = draw.choice(layers)
    for row in save.rows("", layer=layer):
        save.values[row] = rounded(save.values[row])
    return f"layer {layer}"


@operator("")
def low_bits_lost_everywhere(save: Save, draw: random.Random) -> str:
    for row in save.rows(""):
        save.values[row] = rounded(save.values[row])
    return "all weights" if save.is_changed else ""


def matrices(save: Save, state: str) -> list[int]:
    """Chunks of matrices: a buffer of one axis may be a copy that all ranks hold."""
    return [row for row in save.rows(state) if len(save.chunks[row].box.sizes) > 1]


def scaled(what: str, by: float) -> Callable[[Save, random.Random], str]:
    states = {"weights": ("",), "moments": MOMENTS}[what]

    def damage(save: Save, draw: random.Random) -> str:
        rank, mine = one_rank(save, draw, [row for state in states for row in matrices(save, state)])
        for row in mine:
            save.values[row] *= by if save.chunks[row].state != "exp_avg_sq" else by * by
        return f"rank {rank}" if mine else ""

    damage.__name__ = f"{what}_of_a_rank_times_{by:g}"
    return damage


for _what in ("weights", "moments"):
    for _by in (2, 0.5, 8):
        operator("PAY018 OPT012" if _what == "weights" else "PAY018")(scaled(_what, _by))  # masters are left


@operator("")
def weights_of_all_ranks_times_2(save: Save, draw: random.Random) -> str:
    for row in matrices(save, "") if not any(save.rows(state) for state in MASTER_COPIES) else ():
        save.values[row] *= 2
    return "all" if save.is_changed else ""


def norms(save: Save) -> dict[str, list[str]]:
    """Norms of layers by their name without the number, four or more."""
    by_name: dict[str, set[str]] = defaultdict(set)
    for row in save.rows(""):
        key = save.chunks[row].key
        if key is not None and key.function == "norm" and key.layer is not None and key.role.endswith("weight"):
            by_name[key.role].add(save.chunks[row].fqn)
    return {name: sorted(members) for name, members in by_name.items() if len(members) > 3}


@operator("PAY019")
def one_norm_less_1(save: Save, draw: random.Random) -> str:
    names = [fqn for members in norms(save).values() for fqn in members]
    if not names:
        return ""
    name = draw.choice(names)
    for row in save.rows("", fqn=name):
        save.values[row] -= 1
    return name


@operator("")
def all_norms_less_1(save: Save, draw: random.Random) -> str:
    members = [fqn for fqns in norms(save).values() for fqn in fqns]
    for row in (row for fqn in members for row in save.rows("", fqn=fqn)):
        save.values[row] -= 1
    return "all norms" if members else ""


def copied(what: str, states: tuple[str, ...]) -> Callable[[Save, random.Random], str]:
    def damage(save: Save, draw: random.Random) -> str:
        units: dict[Any, dict[Any, int]] = defaultdict(dict)
        for row, chunk in enumerate(save.chunks):
            key = chunk.key
            if key is None or chunk.state not in states or (key.expert is None) == (what == "expert"):
                continue
            unit = (key.layer, key.expert) if what == "expert" else key.layer
            if unit is not None:
                units[unit][key.role, chunk.state, chunk.box] = row
        alike = [
            (a, b) for a in units for b in units if a != b and units[a].keys() == units[b].keys() and len(units[a]) > 1
        ]
        if not alike:
            return ""
        source, target = draw.choice(alike)
        for place, row in units[target].items():
            save.values[row] = save.before[units[source][place]].copy()
        return f"{what} {source} over {target}"

    damage.__name__ = f"{what}_copied" + ("_with_moments" if len(states) > 1 else "")
    return damage


operator("OPT012 PAY020")(copied("layer", ("",)))
operator("")(copied("layer", ("", *MOMENTS)))
operator("OPT012 PAY020")(copied("expert", ("",)))
