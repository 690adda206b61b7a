"""The fault table in real gloo jobs of four ranks: what DCP makes of a fault on one rank, and what live mode says."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import Failure, run_alike, run_ranks, works
from support import REPOSITORY, codes
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckptlint import live
from ckptlint.errors import CheckpointError
from ckptlint.lint.report import Report
from ckptlint.live.api import as_text

SECONDS = 10.0
"""No check may take longer, whatever is wrong."""

State = dict[str, Any]


class Piece(torch.Tensor):
    """A tensor that states its own place: the protocol that torch calls `_Checkpointable`."""

    @staticmethod
    def of(data: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
        piece = data.as_subclass(Piece)
        piece.place, piece.whole = offsets, shape  # type: ignore[attr-defined]
        return piece

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.whole)  # type: ignore[attr-defined]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Tensor.size(self.as_subclass(torch.Tensor))
        return [ChunkStorageMetadata(torch.Size(self.place), sizes)]  # type: ignore[attr-defined]

    def __create_write_items__(self, fqn: str, object_: Any) -> list[WriteItem]:
        chunk = self.__create_chunk_list__()[0]
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


a_mesh = cache(init_device_mesh)  # each starts groups on all ranks


def mesh() -> DeviceMesh:
    return a_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def healthy(rank: int) -> State:
    """One of everything, as it should be."""
    torch.manual_seed(0)
    grid, line = mesh(), a_mesh("cpu", (4,))
    full = torch.randn(8, 4)
    return {
        "model": {
            "cut": distribute_tensor(full, line, [Shard(0)]),
            "both": distribute_tensor(full.clone(), grid, [Shard(0), Shard(1)]),
            "copied": distribute_tensor(full.clone(), grid, [Replicate(), Shard(0)]),
            "uneven": distribute_tensor(torch.randn(5, 3), line, [Shard(0)]),
            "fewer": distribute_tensor(torch.randn(3), line, [Shard(0)]),
            "plain": torch.arange(6.0),
            "scalar": torch.tensor(3.0),
            "piece": Piece.of(torch.full((2, 4), float(rank)), (2 * rank, 0), (8, 4)),
        },
        f"stage{rank // 2}": {"only_here": torch.ones(3) * (rank // 2)},
        "step": 7,
        "rng_state": torch.tensor([rank]),
        "args": {"lr": 0.1, "betas": (0.9, 0.95), "name": "adam"},
    }


def from_local(data: torch.Tensor, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    line = a_mesh("cpu", (4,))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(data, line, placements, run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass(frozen=True)
class Fault:
    """What one rank, or all, do wrong.

    Attributes:
        spoil: changes the state of a rank.
        dcp_refuses: whether `dcp.save` raises.
        expect: (code, key, words that name the ranks) of every error and warning.
    """

    spoil: Callable[[State, int], None]
    dcp_refuses: bool
    expect: tuple[tuple[str, str, str], ...]


def on(rank: int, change: Callable[[State], None]) -> Callable[[State, int], None]:
    return lambda state, own: change(state) if own == rank else None


def put(key: str, value: Callable[[], Any]) -> Callable[[State], None]:
    return lambda state: state["model"].__setitem__(key, value())


def drift(state: State) -> None:
    state["model"]["copied"]._local_tensor[1, 1] += 1e-7


def strided(state: State, rank: int) -> None:
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    grid = init_device_mesh("cpu", (2, 2))
    local = torch.zeros(2, 4)
    state["model"]["both"] = DTensor.from_local(
        local, grid, placements, run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
    )


def exchanged(state: State, rank: int) -> None:
    """Ranks 0 and 1 hold each other's rows: the whole is covered, and nothing contradicts anything."""
    place = {0: 1, 1: 0}.get(rank, rank)
    state["model"]["piece"] = Piece.of(torch.full((2, 4), float(rank)), (2 * place, 0), (8, 4))


def piece(rows: int, start: int, value: float = 1.0, shape: tuple[int, int] = (8, 4)) -> Callable[[State], None]:
    return put("piece", lambda: Piece.of(torch.full((rows, 4), value), (start, 0), shape))


def duplicate(state: State, rank: int) -> None:
    """Three chunks, and rank 3 holds the first one too, with other bytes."""
    start, rows = [(0, 2), (2, 2), (4, 4), (0, 2)][rank]
    state["model"]["piece"] = Piece.of(torch.full((rows, 4), float(rank)), (start, 0), (8, 4))


def two_sizes(state: State, rank: int) -> None:
    """Rank 0 holds one row of what rank 1 holds two of; DCP keeps that of rank 1, which has less to write."""
    start, rows = [(0, 1), (0, 2), (2, 3), (5, 3)][rank]
    state["model"]["piece"] = Piece.of(torch.ones(rows, 4), (start, 0), (8, 4))


ALL = "ranks 0-3"
FAULTS = {
    "nothing": Fault(lambda state, rank: None, False, ()),
    "overlap": Fault(on(1, piece(3, 1)), True, (("LIV202", "model.piece", "rank 0 and rank 1"),)),
    "missing chunk": Fault(
        on(2, lambda state: state["model"].pop("piece")), True, (("LIV203", "model.piece", "written by ranks 0-1,3"),)
    ),
    "global shape wrong on the first rank": Fault(
        on(0, piece(2, 0, shape=(10, 4))), True, (("LIV201", "model.piece", ALL),)
    ),
    "global shape wrong on another rank": Fault(
        on(2, piece(2, 4, shape=(10, 4))), False, (("LIV201", "model.piece", ALL),)
    ),
    "dtype differs on one rank": Fault(
        on(3, put("piece", lambda: Piece.of(torch.ones(2, 4, dtype=torch.bfloat16), (6, 0), (8, 4)))),
        False,
        (("LIV201", "model.piece", ALL),),
    ),
    "two ranks hold one chunk with different bytes": Fault(duplicate, False, (("LIV205", "model.piece", "ranks 0,3"),)),
    "one offset, two sizes": Fault(two_sizes, False, (("LIV202", "model.piece", "rank 0 and rank 1"),)),
    "a replica drifted by 1e-7": Fault(on(2, drift), False, (("LIV205", "model.copied", "ranks 0,2"),)),
    "a plain tensor has another value": Fault(
        on(1, put("plain", lambda: torch.zeros(6))), False, (("LIV205", "model.plain", ALL),)
    ),
    "a plain tensor has another shape": Fault(
        on(1, put("plain", lambda: torch.zeros(7))), False, (("LIV201", "model.plain", ALL),)
    ),
    "a value differs": Fault(on(3, lambda state: state.__setitem__("step", 8)), False, (("LIV209", "step", ALL),)),
    "the local shape is not the chunk's": Fault(
        on(1, put("cut", lambda: from_local(torch.zeros(1, 4), [Shard(0)], (8, 4)))),
        False,
        (("LIV101", "model.cut", "rank 1"),),
    ),
    "a stale placement after a transpose": Fault(
        lambda state, rank: put("cut", lambda: from_local(torch.zeros(4, 2), [Shard(1)], (4, 8)))(state),
        False,
        (("LIV208", "model.cut", "state dict"),),
    ),
    "two ranks exchanged their rows": Fault(exchanged, False, ()),
    "a strided shard": Fault(strided, True, (("LIV102", "model.both", ALL),)),
    "a pending sum": Fault(
        lambda state, rank: put("cut", lambda: from_local(torch.zeros(8, 4), [Partial()], (8, 4)))(state),
        True,
        (("LIV106", "model.cut", ALL),),
    ),
    "a tensor on one rank, an object on the others": Fault(
        on(2, put("plain", lambda: "no tensor")), True, (("LIV201", "model.plain", ALL),)
    ),
}
"""What the table of docs/live.md says, row by row."""


def reported(report: Report) -> list[tuple[str, str, str]]:
    return [(d.code, d.fqn or "", d.finding.at.label or "state dict") for d in report.diagnostics if d.severity > 1]


@dataclass
class Seen:
    """What one rank saw of one fault."""

    dcp_refuses: bool
    reported: list[tuple[str, str, str]]
    text: str
    report: str
    seconds: float
    works: bool
    log: list[tuple[str, int]]


def job(rank: int) -> dict[str, Seen]:
    warnings.simplefilter("ignore")
    installed = live.install(timeout=SECONDS / 2)
    seen = {}
    for name, fault in FAULTS.items():
        live.check(healthy(rank), tag=f"before {name}")
        state = healthy(rank)
        fault.spoil(state, rank)
        folder = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        try:
            dcp.save(state, checkpoint_id=folder[0])
            refuses = False
        except dcp.api.CheckpointException:
            refuses = True
        installed.group.log.clear()
        dist.barrier()
        started = time.monotonic()
        text = ""
        try:
            report = live.check(state, tag=name)
        except live.LiveError as error:
            text, report = str(error), error.report
        seconds = time.monotonic() - started
        whole = as_text(report)
        seen[name] = Seen(refuses, reported(report), text, whole, seconds, works(), list(installed.group.log))
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Seen]]:
    return run_ranks(job)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, seen: list[dict[str, Seen]]) -> None:
    fault, first = FAULTS[name], seen[0][name]
    assert [rank[name].dcp_refuses for rank in seen] == [fault.dcp_refuses] * 4
    for rank in seen:
        own = rank[name]
        assert sorted(own.reported) == sorted(fault.expect)
        assert own.report == first.report, "all ranks have the same report"
        assert bool(own.text) == bool(first.text), "all ranks raise, or none"
        assert own.log == first.log, "all ranks ran the same collectives"
        assert own.seconds < SECONDS
        assert own.works, "the job's own group goes on"
    assert bool(first.text) == any(code not in ("LIV208", "LIV209") for code, *_ in fault.expect)
    if name == "missing chunk":
        assert "rank 2 has no such key" in first.report and "look at the state dict of rank 2" in first.report
    if first.text:
        assert first.text == f"{first.report}Nothing was written.\n"
        (line,) = {rank[name].text for rank in seen[1:]}
        assert "\n" not in line and line.startswith("ckptlint live: LIV")
        assert line.endswith("Nothing was written. Rank 0 prints the report.")


def test_healthy_checks_run_three_reductions_of_one_size(seen: list[dict[str, Seen]]) -> None:
    logs = [seen[0][name].log for name in ("nothing", "two ranks exchanged their rows")]
    assert [name for name, _ in logs[0]] == ["max", "broadcast", "sum", "max"], (
        "one more that names what was not compared"
    )
    assert logs[0] == logs[1]


# ---------------------------------------------------------------- ranks that raise, differ, stay away or come late


class Raising:
    """A Stateful whose state cannot be had."""

    def state_dict(self) -> State:
        raise RuntimeError("the optimizer is on fire")

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def collected(function: Callable[[], Report]) -> tuple[list[tuple[str, str, str]], str, float]:
    started = time.monotonic()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = function()
        text = "".join(str(warning.message) for warning in caught)
    except live.LiveError as error:
        report, text = error.report, str(error)
    return (
        [(d.code, d.fqn or "", d.title) for d in report.diagnostics if d.severity > 1],
        text,
        time.monotonic() - started,
    )


def test_a_rank_that_raises_tells_all_ranks() -> None:
    def job(rank: int) -> Any:
        installed = live.install(timeout=5)
        state = healthy(rank) | ({"optim": Raising()} if rank > 1 else {})
        first = collected(lambda: live.check(state, tag=1))
        log = list(installed.group.log)
        return first[:2], collected(lambda: live.check(healthy(rank), tag=2))[:2], works(), log

    results = run_ranks(job)
    assert all((result[0][0], *result[1:]) == (results[0][0][0], *results[0][1:]) for result in results)
    assert len({result[0][1] for result in results[1:]}) == 1 and "\n" not in results[1][0][1]
    ((code, fqn, title),), text = results[0][0]
    assert (code, fqn) == ("LIV210", "")
    assert title.startswith(
        "rank 2 could not read its own state: RuntimeError: the optimizer is on fire (test_check.py:"
    )
    assert "LIV210" in text
    assert results[0][1:3] == (([], ""), True)
    assert results[0][3] == [("max", 9), ("broadcast", 128)], "no rank goes on alone"


def test_other_options_or_versions_are_not_compared() -> None:
    def job(rank: int) -> Any:
        live.install(timeout=5)
        return collected(lambda: live.check(healthy(rank), tag=1, digest="none" if rank == 1 else "replicas"))[:2]

    results = run_ranks(job)
    assert all(result[0] == results[0][0] for result in results)
    assert ["LIV212" in text for _, text in results] == [True, False, False, False], "rank 0 warns"
    assert results[0][0] == [("LIV212", "", "nothing was compared: the settings of this check differ between ranks")]


def test_absent_and_late_ranks_are_named_and_cost_the_others_the_time_limit() -> None:
    def job(rank: int) -> Any:
        live.install(timeout=2)
        state = healthy(rank)
        out = []
        if rank != 2:
            out.append(collected(lambda: live.check(state, tag="absent")))
        dist.barrier()
        if rank == 3:
            time.sleep(3)
        out.append(collected(lambda: live.check(state, tag="late")))
        dist.barrier()
        out.append(collected(lambda: live.check(state, tag="all")))
        return out, works()

    results = run_ranks(job)
    absent = [("LIV211", "", "nothing was compared: rank 2 did not come within 2 s")]
    late = [("LIV211", "", "nothing was compared: rank 3 did not come within 2 s")]
    for rank, (out, usable) in enumerate(results):
        found = [item[0] for item in out]
        assert found == ([absent] if rank != 2 else []) + [late, []]
        assert usable
        assert max(item[2] for item in out) < SECONDS
    assert results[3][0][1][2] < 2, "the late rank learns it at once"


def test_a_path_that_is_saved_again_and_again_gets_back_into_step() -> None:
    def job(rank: int) -> Any:
        live.install(timeout=3)
        state = healthy(rank)
        out = []
        for turn in range(4):
            if rank != 1 or turn != 1:
                out.append([code for code, *_ in collected(lambda: live.check(state))[0]])
            dist.barrier()
        return out

    results = run_ranks(job)
    assert results[0] == [[], ["LIV211"], ["LIV211"], []] or results[0] == [[], ["LIV211"], [], []]
    assert results[1][-1] == []


def test_a_rank_that_dies_in_the_check_costs_the_deadline_only() -> None:
    others = multiprocessing.get_context("fork").Semaphore(0)

    def job(rank: int) -> Any:
        installed = live.install(timeout=2)
        state = healthy(rank)
        if rank == 3:
            real = installed.group.reduce

            def dies(words: Any, how: Any) -> Any:
                if how == "sum":
                    for _ in range(3):
                        others.acquire(timeout=60)  # it hangs for as long as anyone waits for it
                    os._exit(9)
                return real(words, how)

            installed.group.reduce = dies
        seen = collected(lambda: live.check(state, tag=1)), collected(lambda: live.check(state, tag=2))
        others.release()
        return seen

    results = run_ranks(job, expect_failures=True)
    assert isinstance(results[3], Failure)
    for first, second in results[:3]:
        assert [code for code, *_ in first[0]] == ["LIV211"]
        assert "live mode is off for the rest of this job" in first[0][0][2]
        assert first[2] < SECONDS
        assert [code for code, *_ in second[0]] == ["LIV211"]
        assert "live mode is off for the rest of this job" in second[0][0][2]
        assert second[2] < 1.5, "a group that was given up is not waited for"


def test_all_ranks_learn_of_a_veto() -> None:
    def job(rank: int) -> Any:
        installed = live.install(timeout=5)
        assert installed.gate is not None
        passage = installed.gate.enter("x", 5, veto="a capture is under way" if rank == 2 else "")
        return passage, works()

    passage, _ = run_alike(job)
    assert not passage.go
    assert passage.reason == "rank 2: a capture is under way"


def test_check_without_install_and_alone() -> None:
    def job(rank: int) -> str:
        with pytest.raises(live.LiveNotInstalled, match=r"call ckptlint\.live\.install"):
            live.check(healthy(rank))
        return "raised"

    assert run_ranks(job) == ["raised"] * 4
    live.uninstall()
    report = live.check({"w": torch.ones(3), "step": 3})
    assert report.verdict == "pass"
    assert report.checkpoints[0].checkpoint.ranks.keys == 2
    live.uninstall()


def test_install_waits_for_the_process_group_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    live.uninstall()
    monkeypatch.setenv("WORLD_SIZE", "4")
    for call in (live.install, lambda: live.check({"w": torch.ones(3)})):
        with pytest.raises(live.LiveNotInstalled, match=r"started 4 ranks .*right after init_process_group"):
            call()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert live.install().group.world == 1
    live.uninstall()


def test_freed_memory_is_named_and_not_read(tmp_path: Path) -> None:
    live.uninstall()
    state = {"w": torch.ones(300, 200), "v": torch.ones(3), "kept": [torch.ones(2)]}
    path = tmp_path / "step-1"
    dcp.save(state, checkpoint_id=path)
    live.seal(state, path)
    state["w"].untyped_storage().resize_(0)
    with pytest.raises(live.LiveError) as caught:
        live.check(state)
    assert codes(caught.value.report) == {"LIV111", "LIV213"}
    said = "the memory of w was freed: its storage has 0 bytes, and its elements need 240,000"
    assert said in {item.title for item in caught.value.report.diagnostics}
    with pytest.raises(live.LiveError) as caught:
        live.check_loaded(state, path)
    assert codes(caught.value.report) == {"LIV111", "LIV213"}
    said = "1 key was not compared with the seal: its memory was freed on some rank"
    assert said in {item.title for item in caught.value.report.diagnostics}
    seal = live.seal(state, path)
    assert seal is not None and json.loads(seal.read_text())["skipped"] == {"w": "its memory was freed on some rank"}
    live.uninstall()


def test_a_bare_text_is_a_list_of_one() -> None:
    live.uninstall()
    state = {"w": torch.ones(3)}
    assert live.check(state, expect="w").verdict == "pass"
    assert not live.prepare_seal(state, ignore="w").problem and live.check(state, ignore="*w").verdict == "pass"
    live.uninstall()


def test_the_error_travels_as_its_text() -> None:
    live.uninstall()
    with pytest.raises(live.LiveError) as caught:
        live.check({"w": torch.ones(3)}, expect=["v"])
    live.uninstall()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, CheckpointError)
    assert str(copy) == str(caught.value)
    assert "error[LIV208]" in str(copy)


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTLINT_LIVE", "0")
    assert live.check({"optim": Raising()}).verdict == "pass"


def test_expected_keys_shapes_and_dtypes() -> None:
    def job(rank: int) -> Any:
        live.install(timeout=5)
        state = {
            "a": distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (4,)), [Shard(0)]),
            "b": torch.ones(2),
        }
        good = {"a": ((8, 4), "float32"), "b": (None, torch.float32)}
        bad = {"a": ((4, 8), None), "b": (None, "bfloat16"), "c": (None, None)}
        out = [collected(lambda: live.check(state, tag="good", expect=good))[0]]
        out.append(collected(lambda: live.check(state, tag="bad", expect=bad))[0])
        out.append(collected(lambda: live.check(state, tag="names", expect=["a"]))[0])
        return out

    good, bad, names = run_alike(job)
    assert good == []
    assert bad == [
        ("LIV208", "a", "the shape or dtype of a is float32 [8, 4], not float32 [4, 8] as expected"),
        ("LIV208", "b", "the shape or dtype of b is float32 [2], not bfloat16 [2] as expected"),
        ("LIV208", "c", "no rank holds any part of c, but you expect it"),
    ]
    assert names == [("LIV208", "b", "float32 [2] of b is not among the expected keys")]


def test_the_example_of_the_docs() -> None:
    def job(rank: int) -> str:
        live.install(timeout=10)
        torch.manual_seed(0)
        keys = [f"layers.{i}.wq.weight" for i in range(4)]
        model = {key: distribute_tensor(torch.randn(16, 8), mesh(), [Replicate(), Shard(0)]) for key in keys}
        for key in keys[1:3] if rank == 2 else ():
            model[key]._local_tensor[0, 0] += 1e-7
        with pytest.raises(live.LiveError) as error:
            live.check({"model": model}, tag=2000)
        return str(error.value)

    texts = run_ranks(job)
    assert set(texts[1:]) == {
        "ckptlint live: LIV205 copies of [0:8, 0:8] of model.layers.1.wq.weight differ between ranks. "
        "Nothing was written. Rank 0 prints the report."
    }
    shown = re.sub(r"in [0-9.]+ s", "in 0.07 s", re.sub(r"\d+ rules", "... rules", texts[0].strip()))
    assert f"```text\n{shown}\n```" in (REPOSITORY / "docs" / "live.md").read_text(encoding="utf-8")


def test_where_copies_differ_first_and_who_holds_which() -> None:
    def job(rank: int) -> list[dict[str, str]]:
        live.install(timeout=10)
        big = torch.zeros(3, 700, 2, dtype=torch.float64)
        if rank in (1, 3):
            big[1, 513, 1] = -2.5
        if rank == 3:
            big[2, 0, 0] = 1.0
        grid, half = mesh(), torch.ones(8, 4, dtype=torch.bfloat16)
        copied = distribute_tensor(half, grid, [Replicate(), Shard(0)])
        if rank == 3:
            copied._local_tensor.t()[2, 1] = 2.0  # of the lower half: its row 1 is row 5 of the tensor
        state = {
            "big": big,
            "copied": copied,
            "flags": torch.tensor([True, rank == 2]),
            "scalar": torch.tensor(1.0 + 1e-7 * (rank == 1)),
            "packed": torch.full((4,), float("nan")) if rank else torch.full((4,), -float("nan")),
            "step": 7 + rank // 3,
            "names": ["a", "b" * (rank + 1)],
        }
        with pytest.raises(live.LiveError) as error:
            live.check(state, tag=1)
        return {item.fqn: dict(item.finding.notes) for item in error.value.report.diagnostics}

    facts = run_alike(job)
    assert facts["big"] == {
        "copy 1": "ranks 0,2",
        "copy 2": "rank 1",
        "copy 3": "rank 3",
        "values": "first difference at [1, 513, 1]: 0.0 against -2.5",
    }
    assert facts["copied"] == {
        "copy 1": "rank 1",
        "copy 2": "rank 3",
        "values": "first difference at [5, 2]: 1.0 against 2.0",
    }
    assert facts["flags"]["values"] == "first difference at [1]: False against True"
    assert facts["scalar"]["values"] == "1.0 against 1.0000001"
    assert facts["step"] == {"value 1": "ranks 0-2", "value 2": "rank 3", "values": "7 against 8"}
    assert facts["names"] == {f"value {rank + 1}": f"rank {rank}" for rank in range(4)}


def test_copies_that_no_placement_declares_are_compared() -> None:
    """FSDP2 over dp alone beside tensor parallelism: each rank of tp holds the same shards of the norms."""

    def job(rank: int) -> list[list[tuple[str, str, str, dict[str, str]]]]:
        warnings.simplefilter("ignore")
        live.install(timeout=SECONDS)
        grid, seen = mesh(), []
        state = {
            "norm": distribute_tensor(torch.arange(8.0), grid["dp"], [Shard(0)]),
            "up": distribute_tensor(torch.ones(8, 4), grid, [Shard(0), Shard(1)]),
        }
        for drift in (0.0, 0.5):
            if rank == 3:
                state["norm"]._local_tensor[2] += drift
            for digest in ("replicas", "none"):
                report = live.check(state, tag=f"{drift} {digest}", digest=digest, on_error="warn")  # type: ignore[arg-type]
                seen.append(
                    [
                        (d.code, d.severity.label, str(d.finding.at.region), dict(d.finding.notes))
                        for d in report.diagnostics
                    ]
                )
        return seen

    results = run_ranks(job)
    assert all(result == results[0] for result in results)
    equal, unknown, drifted, still_unknown = results[0]
    owners = [(code, level, region, notes) for code, level, region, notes in equal if code == "LIV204"]
    same = {"contents": "equal on all ranks"}
    assert owners == [("LIV204", "info", "[0:4]", same), ("LIV204", "info", "[4:8]", same)]
    assert {level for _, level, _, _ in equal} == {"info"}
    assert {notes["contents"] for code, _, _, notes in (*unknown, *still_unknown) if code == "LIV204"} == {
        "not compared"
    }
    assert [(level, region, notes) for code, level, region, notes in drifted if code == "LIV205"] == [
        (
            "error",
            "[4:8]",
            {"copy 1": "rank 2", "copy 2": "rank 3", "values": "first difference at [6]: 6.0 against 6.5"},
        )
    ]


def test_a_healthy_job_says_once_on_rank_0_that_it_is_on(capfd: pytest.CaptureFixture[str]) -> None:
    def job(rank: int) -> None:
        live.install(timeout=10)
        for step in range(3):
            live.check(healthy(rank), tag=step)

    run_ranks(job)
    assert capfd.readouterr().err == "ckptlint live: on, 4 ranks\n"


def test_a_tag_of_megabytes_is_cut_and_hashed() -> None:
    long = "step \x1b[31m\ud800" + "x" * 3_000_000

    def job(rank: int) -> list[str]:
        warnings.simplefilter("ignore")
        installed = live.install(timeout=SECONDS)
        assert installed.gate is not None
        texts = []
        for tag in (long, long + "y"):
            with pytest.raises(live.LiveError) as error:
                live.check({"w": torch.ones(2 + rank)}, tag=tag)
            texts.append(str(error.value.report.checkpoints[0].checkpoint.path))
        assert max(map(len, installed.gate._passed)) < 1200
        return texts

    first = run_alike(job, world=2)
    assert first[0] != first[1]
    assert all(text.startswith(r"state dict step \x1b[31m\ud800xx") and len(text) < 1200 for text in first)
