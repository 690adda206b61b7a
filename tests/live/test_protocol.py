"""The whole check with many ranks as threads: random layouts, random damage, and what overflows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import SWEEP, examples
from threads import Sharded, run_threads
from torch.distributed.tensor import Replicate, Shard

from ckptlint.lint.report import Report
from ckptlint.live.api import Live, LiveError, as_text
from ckptlint.live.compare import fingerprints as fp
from ckptlint.live.compare import protocol

WORLD = 64 if SWEEP else 16
GRIDS = (
    [(1, 1), (4, 2), (8, 8), (64, 1), (3, 5), (16, 4)] if SWEEP else [(1, 1), (2, 1), (4, 4), (16, 1), (3, 1), (4, 2)]
)
"""Rows and columns of chunks: of some each rank has its own, of others several ranks have copies, or some none."""
TENSORS = examples(12, 80)


def layout(seed: int, tensors: int = TENSORS) -> list[dict[str, Any]]:
    """Per rank a state dict: tensors cut into a random grid, a chunk a rank at most, copies on the ranks left."""
    random.seed(seed)
    states: list[dict[str, Any]] = [{} for _ in range(WORLD)]
    half = WORLD // 2
    for number in range(tensors):
        rows, columns = random.choice(GRIDS)
        shape = (rows * random.randint(1, 3), columns * random.randint(1, 3))
        chunk = shape[0] // rows, shape[1] // columns
        stage = random.randrange(2)  # some tensors exist on one half of the ranks, as with pipeline stages
        members = range(WORLD) if rows * columns > half else range(half * stage, half * stage + half)
        for place, rank in enumerate(members):
            cell, copy = place % (rows * columns), place // (rows * columns)
            if place >= len(members) // (rows * columns) * rows * columns:
                continue
            row, column = divmod(cell, columns)
            offset = row * chunk[0], column * chunk[1]
            data = torch.full(chunk, float(number * 100 + cell))
            states[rank][f"t{number}"] = Sharded(f"t{number}", data, offset, shape, (copy, 0))
    for rank, state in enumerate(states):
        state["plain"] = torch.ones(3)
        state["step"] = 5
        state[f"own{rank}"] = torch.tensor(float(rank))
    return states


def checked(states: list[dict[str, Any]], tag: str = "x", **options: Any) -> Report:
    """The report, after asserting that all ranks have the same one and ran the same collectives."""

    def one(live: Live) -> tuple[Report, str, list[Any]]:
        try:
            report = live.check(states[live.group.rank], tag=tag, **options)
            return report, "", live.group.log
        except LiveError as error:
            return error.report, str(error), live.group.log

    results = run_threads(one, len(states))
    assert len({as_text(report) for report, *_ in results}) == 1
    assert len({text for _, text, _ in results[1:]}) == 1 and "\n" not in results[1][1]
    assert results[0][1] in ("", as_text(results[0][0]) + "Nothing was written.\n")
    assert len({str(log) for *_, log in results}) == 1
    found = [[(d.code, d.title, d.finding.at.label) for d in report.diagnostics] for report, *_ in results]
    assert all(item == found[0] for item in found)
    assert not any(part.failed for part in results[0][0].checkpoints)
    return results[0][0]


def reported(report: Report) -> set[tuple[str, str]]:
    return {(d.code, d.fqn or "") for d in report.diagnostics if d.severity > 1}


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(examples(2, 12)))
def test_random_layouts_are_healthy(seed: int) -> None:
    report = checked(layout(seed))
    assert not list(report.diagnostics)
    assert report.checkpoints[0].checkpoint.ranks.keys == TENSORS + 2 + WORLD


DAMAGES = ("drop", "content", "shape", "dtype", "claim", "shift", "step")


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("seed", range(examples(4, 14)))
def test_random_damage_is_found_and_named(seed: int) -> None:
    states = layout(seed)
    kind = DAMAGES[seed % len(DAMAGES)]
    random.seed(seed)
    held = [(rank, key) for rank, state in enumerate(states) for key in state if key.startswith("t")]
    random.shuffle(held)
    for rank, key in held:
        item = states[rank][key]
        holders = [state[key] for state in states if key in state]
        copies = [other for other in holders if other.global_offset == item.global_offset]
        if kind == "content" and len(copies) > 1:
            item.data = item.data.clone()
            item.data.view(-1)[0] += 1
            wanted = {("LIV205", key)}
        elif kind == "drop" and item.replica_id == (0, 0) and len(copies) == 1:
            del states[rank][key]
            wanted = {("LIV203", key)}
        elif kind == "drop" and item.replica_id == (0, 0):
            del states[rank][key]  # copies are left, and none of them is written
            wanted = {("LIV203", key), ("LIV206", key)} if len(holders) > len(copies) else {("LIV203", key)}
        elif kind == "shape" and len(holders) > 1:
            item.global_shape = (item.global_shape[0] + 64, item.global_shape[1])
            wanted = {("LIV201", key)}
        elif kind == "dtype" and len(holders) > 1:
            item.data = item.data.bfloat16()
            item.dtype = torch.bfloat16
            wanted = {("LIV201", key)}
        elif kind == "claim" and item.replica_id != (0, 0):
            item.replica_id = (0, 0)
            wanted = {("LIV204", key)}
        elif kind == "shift" and item.replica_id == (0, 0) and item.global_offset[0] and len(copies) == 1:
            item.global_offset = (item.global_offset[0] - 1, item.global_offset[1])
            onto_another = item.local_shape[0] == 1
            others = {("LIV204", key), ("LIV205", key)} if onto_another else {("LIV202", key)}
            wanted = {("LIV203", key), *others}
        elif kind == "step":
            states[rank]["step"] = 6
            wanted = {("LIV209", "step")}
        else:
            continue
        break
    assert reported(checked(states)) == wanted, (kind, rank, key)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(examples(1, 6)))
def test_contents_that_drift_after_a_healthy_check_are_found(seed: int) -> None:
    """Of Megatron's chunks, plain tensors and values no placement says how many copies there are."""
    turns = [layout(seed) for _ in range(5)]
    drift = random.choice(["plain", "step", *(key for key in turns[0][WORLD * 5 // 8] if key.startswith("t"))])
    holders = [rank for rank, state in enumerate(turns[2]) if drift in state]
    where = random.choice(holders)
    held = turns[2][where][drift]
    if isinstance(held, Sharded):
        holders = [rank for rank in holders if turns[2][rank][drift].global_offset == held.global_offset]
        held.data.view(-1)[0] += 1
    else:
        turns[2][where][drift] = held + 1
    for state in turns[4]:  # the same change on all ranks is none
        state["plain"], state["step"] = state["plain"] * 2, 6

    def all_turns(live: Live) -> Any:
        seen = []
        for number, states in enumerate(turns):
            live.group.log.clear()
            report = live.check(states[live.group.rank], tag=number, on_error="warn")
            sums = [how for how, _ in live.group.log if how != "broadcast"]  # these ask where copies differ
            seen.append(([(d.code, d.fqn) for d in report.diagnostics], len(sums)))
        return seen

    results = run_threads(all_turns, WORLD)
    assert all(result == results[0] for result in results)
    expected = [("LIV209" if drift == "step" else "LIV205", drift)] if len(holders) > 1 else []
    assert results[0] == [([], 3), ([], 3), (expected, 5 if expected else 3), ([], 3), ([], 3)]


class Placed(torch.Tensor):
    """A tensor with the attributes of a DTensor, on a mesh that needs no process group."""

    @staticmethod
    def of(whole: torch.Tensor, rank: int, sizes: Sequence[int], cut: Sequence[int | None]) -> Placed:
        """This rank's part of the whole, cut on a dim by each axis of the mesh, or copied by it."""
        coordinate = [int(place) for place in np.unravel_index(rank, sizes)]
        local = whole
        for place, size, dim in zip(coordinate, sizes, cut, strict=True):
            local = local if dim is None else local.chunk(size, dim)[place]
        tensor = local.as_subclass(Placed)
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in cut)
        on = SimpleNamespace(shape=tuple(sizes), get_coordinate=lambda: coordinate)
        spec = SimpleNamespace(mesh=on, placements=placements, tensor_meta=SimpleNamespace(shape=whole.shape))
        tensor._local_tensor, tensor._spec = local.clone(), spec  # type: ignore[attr-defined]
        return tensor


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(examples(1, 20)))
def test_random_copies_that_drift_on_small_meshes_are_found(seed: int) -> None:
    """Copies that placements declare, and those of axes that they do not know of; 25 draws each."""
    draw = random.Random(seed)
    for number in range(25):
        sizes = draw.choice([(2,), (3,), (4,), (2, 2), (1, 3), (4, 1)])
        world = prod(sizes)
        states: list[dict[str, Any]] = [{} for _ in range(world)]
        cuts = {f"t{i}": [draw.choice([None, 0, 1]) for _ in sizes] for i in range(6)}
        seen = {key: [draw.random() < 0.7 for _ in sizes] for key in cuts}  # the axes that are on the tensor's mesh
        for (key, cut), rank in product(cuts.items(), range(world)):
            place = np.unravel_index(rank, sizes)
            known = [axis for axis in range(len(sizes)) if seen[key][axis] or cut[axis] is not None]
            own = sum(int(place[axis]) * prod(sizes[other] for other in known if other > axis) for axis in known)
            whole = torch.arange(144.0).view(12, 12)
            states[rank][key] = Placed.of(whole, own, [sizes[a] for a in known], [cut[a] for a in known])
        key, rank = draw.choice(list(cuts)), draw.randrange(world)
        if drifts := number % 3 > 0:
            flat = states[rank][key]._local_tensor.view(-1)
            flat[draw.randrange(len(flat))] += 1e-3
        is_copied = any(dim is None and size > 1 for size, dim in zip(sizes, cuts[key], strict=True))
        expected = {("LIV205", key)} if drifts and is_copied else set()
        found = reported(checked(states))
        may_have = {("LIV204", key)} if expected else set()  # where both are written and no placement says so
        assert found - may_have == expected, (seed, number, sizes, cuts, seen, key, rank)


def test_a_table_that_overflows_grows_and_stays_so() -> None:
    states = layout(3, tensors=40)

    def two(live: Live) -> Any:
        live.memory.cells = 48
        reports = [live.check(states[live.group.rank] | more, tag=str(more)) for more in ({}, {"new": 1})]
        clean = [not [d for d in report.diagnostics if d.severity > 1] for report in reports]
        return clean, live.memory.cells, live.group.log

    results = run_threads(two, WORLD)
    assert all(result == results[0] for result in results)
    clean, cells, log = results[0]
    assert clean == [True, True]
    assert cells > 48
    assert [name for name, _ in log].count("sum") > 2, "once more after it overflowed, once in the second check"
    assert log[-5:-2] == [("max", 9), ("sum", 3 * fp.BUCKETS + 5 * cells), ("max", fp.BUCKETS)]


def test_beyond_the_largest_table_a_sample_is_compared_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "MOST_CELLS", 192)
    states = layout(3, tensors=40)

    def many(live: Live) -> Any:
        live.memory.cells = 192
        reports = [live.check(states[live.group.rank], tag=tag) for tag in range(6)]
        return [[d.title for d in report.diagnostics] for report in reports], live.memory.shift

    results = run_threads(many, WORLD)
    assert all(result == results[0] for result in results)
    titles, shift = results[0]
    assert shift > 0
    assert titles[-1] == [f"this check compared one chunk in {2**shift:,} with its copies; later checks take others"]


@pytest.mark.sweep
def test_too_many_bad_keys_are_counted_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    states = layout(5)
    for key in [key for key in states[7] if key.startswith("t")]:
        states[7][key].data = states[7][key].data + 1
    everything = reported(checked(states))
    monkeypatch.setattr(protocol, "GATHER_LIMIT", 16 * WORLD * TENSORS)
    report = checked(states)
    some = reported(report)
    assert {code for code, _ in some} == {"LIV205"}
    assert 0 < len(some) < len(everything)
    left = [d.title for d in report.diagnostics if d.code == "LIV213"]
    assert len(left) == 1
    assert "too many to compare in one check" in left[0]


def test_two_keys_of_one_number_cost_one_needless_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 44-bit collision: two keys that agree with themselves look like one that does not."""
    real = fp._short

    def colliding(key: Any, salt: int, family: int) -> Any:
        out = real(key, salt, family)
        if salt == 0 and family == 0:
            twins = np.array([fp.hashed("plain"), fp.hashed("step")], np.uint64)
            out = np.where(np.isin(key, twins), np.uint64(2), out)
        return out

    monkeypatch.setattr(fp, "_short", colliding)
    states = layout(1, tensors=3)

    def two(live: Live) -> Any:
        reports = [live.check(states[live.group.rank], tag=tag) for tag in "ab"]
        return [list(report.diagnostics) for report in reports], live.group.log, live.memory.salt

    results = run_threads(two, WORLD)
    for found, log, salt in results:
        assert found == [[], []]
        assert [name for name, _ in log] == ["max", "sum", "max", "max", "gather", "max", "sum", "max"]
        assert salt == 1


def test_names_that_no_console_should_see_arrive_escaped() -> None:
    states: list[dict[str, Any]] = [{"\x1b[31mred\udc80": torch.ones(2) * (rank == 5)} for rank in range(WORLD)]
    report = checked(states)
    assert reported(report) == {("LIV205", "\\x1b[31mred\\udc80")}


def test_changes_since_the_last_check_are_named_by_their_holders() -> None:
    first, second = layout(2), layout(2)
    for state in second:
        for chunk in [item for key, item in state.items() if key == "t4"]:
            chunk.global_shape = (*chunk.global_shape, 1)
            chunk.global_offset = (*chunk.global_offset, 0)
            chunk.data = chunk.data[..., None]
            chunk.local_shape = tuple(chunk.data.shape)
        state.pop("t7", None)
        state["later"] = torch.ones(1)

    def two(live: Live) -> Any:
        own = live.group.rank
        live.check(first[own], tag="a")
        report = live.check(second[own], tag="b")
        return [(d.code, d.fqn, d.severity.label) for d in report.diagnostics]

    results = run_threads(two, WORLD)
    assert all(result == results[0] for result in results)
    assert results[0] == [("LIV208", "later", "info"), ("LIV208", "t4", "warning"), ("LIV208", "t7", "warning")]


def test_another_state_dict_is_no_change_of_the_last() -> None:
    def two(live: Live) -> Any:
        live.check({f"a{i}": torch.ones(1) for i in range(9)}, tag="model")
        return list(live.check({f"b{i}": torch.ones(1) for i in range(9)}, tag="optim").diagnostics)

    assert run_threads(two, world=8) == [[]] * 8


def test_a_change_of_keys_is_judged_as_one_between_two_steps() -> None:
    first = {f"layers.{i}.{name}": torch.ones(4) for i in range(4) for name in ("wq.weight", "wk.weight")}
    first |= {"value_head.weight": torch.ones(4), "cut": torch.ones(8)}
    second = {key: value for key, value in first.items() if key not in ("layers.2.wq.weight", "value_head.weight")}
    second["cut"] = torch.ones(9)

    def two(live: Live) -> Any:
        live.check(first, tag="a")
        report = live.check(second, tag="b")
        return [(d.fqn, d.severity.label, d.message) for d in report.diagnostics if d.code == "LIV208"]

    last = "the state of the last check"
    results = run_threads(two, world=4)
    assert all(result == results[0] for result in results)
    assert sorted(results[0]) == [
        ("cut", "warning", f"the shape is [9]; it was [8] in {last}"),
        ("layers.2.wq.weight", "warning", f"no part is held by any rank now; {last} has float32 [4]"),
        ("value_head.weight", "info", f"no part is held by any rank now; {last} has float32 [4]"),
    ]
