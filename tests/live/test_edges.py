"""Live mode at its edges, in real jobs of two ranks: what one rank does alone costs the others nothing."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import run_ranks
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ckptlint import live
from ckptlint.errors import CkptlintError
from ckptlint.live import api
from ckptlint.live.hooks import dcp as hooks

State = dict[str, Any]


def healthy() -> State:
    return {"w": torch.ones(4, 2), "step": 7}


def outcome(call: Callable[[], Any]) -> tuple[str, float]:
    """Codes of what was found, `pass` or what else was raised; and the seconds."""
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = call()
        said = " ".join(sorted({item.code for item in report.diagnostics})) or report.verdict
    except live.LiveError as error:
        said = "LiveError " + " ".join(sorted({item.code for item in error.report.diagnostics}))
    except BaseException as error:
        said = type(error).__name__
    return said, time.monotonic() - started


# ---------------------------------------------------------------- options


def test_options_are_looked_at_where_they_are_given() -> None:
    live.uninstall()
    for options in ({"digest": "full"}, {"on_error": "Raise"}, {"on_incomplete": "no"}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))} is '.*', and has to be '"):
            live.patch_dcp(**options)
        with pytest.raises(live.LiveError, match="LIV210"):
            live.check(healthy(), **options)  # type: ignore[arg-type]
    for options in ({"digets": "none"}, {"tag": 3}, {"resolve_stateful": True}):
        with pytest.raises(TypeError, match="is no option here"):
            live.patch_dcp(**options)
    with pytest.raises(ValueError, match="backend is 'Gloo', and has to be 'auto' or 'gloo' or 'nccl'"):
        live.install(backend="Gloo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout is 0"):
        live.install(timeout=0)
    live.patch_dcp(digest="none", ignore=iter(["w"]), expect=["w", "step"])()
    live.uninstall()


# ---------------------------------------------------------------- what one rank does alone


class Mute:
    """A tag, or an exception, without a text."""

    def __str__(self) -> str:
        raise RuntimeError("it has no text")


class MuteError(Mute, Exception):
    """It cannot be told."""


def raises(error: BaseException) -> Iterator[str]:
    yield "w"
    raise error


def test_what_one_rank_does_alone_costs_the_others_nothing() -> None:
    def job(rank: int) -> dict[str, Any]:
        live.install(timeout=20)
        alone = rank == 1
        seen: dict[str, Any] = {}

        def look(name: str, **options: Any) -> None:
            seen[name] = outcome(lambda: live.check(healthy(), **{"tag": name} | options))

        look("ignore", ignore=raises(ValueError("no pattern")) if alone else ())
        look("no pattern", ignore=[3] if alone else ())
        look("expect", expect=3 if alone else ["w", "step"])
        look("digest", digest="full" if alone else "replicas")
        look("interrupt", ignore=raises(KeyboardInterrupt()) if alone else ())
        look("exit", ignore=raises(SystemExit(3)) if alone else ())
        look("mute", ignore=raises(MuteError()) if alone else ())
        look("mute tag", tag=Mute())
        look("warn", on_error="warn" if alone else "raise")
        look("after")
        return seen

    zero, one = run_ranks(job, world=2, timeout=120)
    told = {name: (zero[name][0], one[name][0]) for name in zero}
    for name in ("ignore", "no pattern", "expect", "digest", "mute"):
        assert told.pop(name) == ("LiveError LIV210",) * 2, name
    assert told == {
        "interrupt": ("LiveError LIV210", "KeyboardInterrupt"),
        "exit": ("LiveError LIV210", "SystemExit"),
        "mute tag": ("pass", "pass"),
        "warn": ("LIV212", "LIV212"),
        "after": ("pass", "pass"),
    }
    assert max(seconds for rank in (zero, one) for _, seconds in rank.values()) < 10, "nobody waits for the timeout"


def test_a_healthy_save_goes_on_whatever_becomes_of_a_message(tmp_path: Path) -> None:
    def job(rank: int) -> list[str]:
        live.install(timeout=20)
        undo = live.patch_dcp()
        with (tmp_path / f"log{rank}").open("w") as closed:
            pass
        full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
        streams = {"full": full, "closed": closed, "none": None}
        said = []
        for name, stream in streams.items():
            sys.stderr = stream  # type: ignore[assignment]
            api._is_announced = False
            dcp.save(healthy(), checkpoint_id=tmp_path / name)
            warnings.simplefilter("default")
            dcp.save(healthy() | {"step": rank}, checkpoint_id=tmp_path / f"{name} and a warning")
            said.append(name)
        sys.stderr = sys.__stderr__
        warnings.simplefilter("error")
        dcp.save(healthy() | {"step": rank}, checkpoint_id=tmp_path / "a warning")
        warnings.simplefilter("default")
        undo()
        return said

    assert run_ranks(job, world=2, timeout=60) == [["full", "closed", "none"]] * 2
    assert (tmp_path / "a warning" / ".metadata").exists()


# ---------------------------------------------------------------- what states hold


def test_of_keys_that_all_differ_the_first_hundred_are_shown() -> None:
    """Other faults among them are told as ever."""

    def job(rank: int) -> Any:
        live.install(timeout=60)
        state: State = {f"layers.{i}.weight": torch.full((2 + i % 2,), float(rank)) for i in range(3000)}
        state |= {f"step {i}": i + rank for i in range(300)} | {f"even {i}": torch.ones(2) for i in range(3000)}
        state |= {"layers.2998.weight": torch.full((2 + rank,), 7.0), "even 7": torch.full((2,), 1.0 + rank / 2)}
        try:
            live.check(state)
        except live.LiveError as error:
            found = error.report.diagnostics
            return [(item.code, item.keys) for item in found], str(error)

    (found, text), _ = run_ranks(job, world=2, timeout=120)
    codes = [code for code, _ in found]
    assert (codes.count("LIV201"), codes.count("LIV205"), codes.count("LIV209")) == (1, 100, 100), "not one each"
    keys = {code: {key for other, named in found for key in named if other == code} for code in set(codes)}
    assert keys["LIV201"] == {"layers.2998.weight"}
    assert keys["LIV205"] == {f"layers.{i}.weight" for i in range(3000) if i != 2998} | {"even 7"}
    assert keys["LIV209"] == {f"step {i}" for i in range(300)}
    assert "more: 2,900 more keys like the first 100, counted and not listed" in text
    assert "first difference at [0]: 1.0 against 1.5" in text


class CallableState(dict[str, Any]):
    """A state that can be called."""

    def __call__(self) -> None:
        raise RuntimeError("it is no function that makes a state")


class Listed(list[int]):
    """A list with attributes."""


class Noted(dict[str, int]):
    """A mapping within a tuple, with attributes."""


@dataclass
class Settings:
    """Somebody adds to it what is no field."""

    lr: float = 0.1


class Hour(Enum):
    """A value that differs from process to process."""

    START = 0


class AnyName(type):
    """Its classes have whatever one asks for."""

    def __getattr__(cls, name: str) -> Any:
        return lambda *_: None


class Anything(metaclass=AnyName):
    """It looks like a value of any library."""


class Unprintable(int):
    """A number without a text."""

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__ = lambda self: format(self)


class Shy:
    """An object that hides what it holds."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not for you")


class Wrapped(torch.Tensor):
    """A weight of codes and scales, as torchao has it."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [torch.float32]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def with_attribute(value: Any, content: object) -> Any:
    value.note = content
    return value


def shard(key: str, data: Any, offset: int, replica: int) -> Any:
    return SimpleNamespace(key=key, data=data, global_shape=(2,), global_offset=(offset,), replica_id=replica)


def odd_values(rank: int, fault: int) -> State:
    """Values that a save takes; `fault` is 1 on rank 1 of a job with faults, else 0."""
    mesh = init_device_mesh("cpu", (2,))
    Hour.START._value_ = fault
    local = torch.ones(2, 2, device="meta" if fault else "cpu")
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.full((3,), 1.0 + fault)], layout=torch.jagged)
    if rank == 1:  # it remembers the answer
        jagged._get_max_seqlen()  # type: ignore[attr-defined]
    return {
        "axes": torch.full((1,) * 65, float(fault)),
        "jagged": jagged,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.full((3,), float(fault))]),
        "float4": torch.tensor([0, 64 + fault], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "wrapped": Wrapped(torch.ones(4, dtype=torch.int8), torch.full((2,), 1.0 + fault)),
        "list": with_attribute(Listed([1]), fault),
        "dict": (with_attribute(Noted(a=1), fault),),
        "settings": with_attribute(Settings(), fault),
        "masked": np.ma.masked_array([1, 2], mask=[0, fault]),
        "enum": (Hour.START,),
        "any": Anything(),
        "number": Unprintable(7 + fault),
        "shy": Shy(),
        "meta": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "plain": (OrderedDict(a=1 + fault), Settings(0.1)),
        "blocks.lamax.weight": torch.ones(2) + fault,
        "blocks.amax": torch.ones(2) + rank,
        "rng": {"torch": torch.Generator().manual_seed(rank).get_state(), "python": random.Random(rank).getstate()},
        "numpy": np.random.RandomState(rank).get_state(),
    }


def test_odd_values_cost_their_key_and_are_named() -> None:
    def job(rank: int) -> list[Any]:
        live.install(timeout=60)
        seen = []
        for fault in (0, 1):
            try:
                report = live.check(CallableState(odd_values(rank, fault * rank)), tag=fault)
            except live.LiveError as error:
                report = error.report
            seen.append([(item.code, item.fqn, item.title) for item in report.diagnostics])
        return seen

    healthy_, faulty = run_ranks(job, world=2, timeout=120)[0]
    ((code, _, text),) = healthy_
    assert code == "LIV213"
    assert text.startswith("the contents of up to 12 values per rank were not compared: nested, list, dict, settings, ")
    assert {(code, fqn) for code, fqn, _ in faulty if code != "LIV213"} == {
        ("LIV209", "axes"), ("LIV209", "jagged"), ("LIV205", "float4"), ("LIV205", "wrapped"), ("LIV209", "plain"),
        ("LIV209", "enum"), ("LIV205", "blocks.lamax.weight"),
    }  # fmt: skip
    ((_, _, text),) = [item for item in faulty if item[0] == "LIV213"]
    assert text.startswith("the contents of up to 13 values per rank"), "the shard without contents too"


def test_objects_of_megatron_that_nobody_writes_are_told() -> None:
    def job(rank: int) -> list[Any]:
        live.install(timeout=60)
        seen = []
        for absent, replica in ((False, 0), (True, 0), (False, 1), (False, 2)):
            state = {} if absent and rank else {"a": shard("extra", {"a": 1}, rank, int(replica > 1 - rank))}
            try:
                report = live.check(state | {"step": 7}, tag=f"{absent} {replica}")
            except live.LiveError as error:
                report = error.report
            seen.append([(item.code, item.title) for item in report.diagnostics if item.code != "LIV208"])
        return seen

    told = [
        [],
        [("LIV203", "1 of 2 objects of extra are missing: no rank writes them")],
        [("LIV206", "rank 1 holds a replica of [1:2] of extra, which no rank writes")],
        [("LIV203", "2 of 2 objects of extra are missing: no rank writes them")],
    ]
    assert run_ranks(job, world=2, timeout=120) == [told] * 2


def test_an_error_keeps_its_report_on_its_way() -> None:
    live.uninstall()
    with pytest.raises(live.LiveError) as raised:
        live.check(healthy(), expect=["w", "gone"])
    for error in (copy.deepcopy(raised.value), pickle.loads(pickle.dumps(raised.value))):
        assert type(error) is live.LiveError and str(error) == str(raised.value)
        assert (
            [item.fqn for item in error.report.diagnostics]
            == [item.fqn for item in raised.value.report.diagnostics]
            != []
        )
    live.uninstall()


# ---------------------------------------------------------------- threads, tags, signals, installations


class Refusing(TorchDispatchMode):
    """A mode of torch in which nothing can be computed."""

    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing is computed here")


def in_threads(rank: int) -> list[str]:
    """Checks of three threads at once, of unlike states and in another order on each rank."""

    def checks(number: int) -> list[str]:
        said = []
        for turn in range(8):
            time.sleep(0.003 * ((number + rank + turn) % 3))
            state = {f"thread {number}": torch.ones(50 * number + 1), f"turn {number}": turn}
            if turn == 5 and number == 1:
                state[f"turn {number}"] = rank
            said.append(outcome(lambda state=state, turn=turn: live.check(state, tag=f"{number}/{turn}"))[0])
        return said

    with ThreadPoolExecutor(3) as pool:
        return [said for checked in pool.map(checks, range(3)) for said in checked]


def test_threads_tags_signals_and_installations() -> None:
    def job(rank: int) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        first = live.install(timeout=20)
        seen: dict[str, Any] = {"threads": in_threads(rank)}
        started = time.monotonic()
        report = live.check(healthy(), tag=f"run {rank}")
        seen["tags"] = [item.title for item in report.diagnostics], time.monotonic() - started
        seen["again"] = outcome(lambda: live.check(healthy(), tag="again"))

        def on_alarm(*_: object) -> None:
            raise RuntimeError("a signal")

        signal.signal(signal.SIGALRM, on_alarm)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # while it waits for the other at the gate
        else:
            time.sleep(0.6)
        seen["signal"] = outcome(lambda: live.check(healthy(), tag="signal"))
        with Refusing() if rank == 0 else nullcontext():
            seen["mode"] = outcome(lambda: live.check({"other": 7}, tag="mode"))
        seen["after"] = outcome(lambda: live.check(healthy(), tag="after"))
        live.uninstall()
        second = live.install(timeout=3)
        if rank == 0:  # the key of before says that both are here
            seen["alone"] = outcome(lambda: live.check(healthy(), tag="after"))
        dist.barrier()
        seen["new"] = second is not first, outcome(lambda: live.check(healthy(), tag="new"))[0]
        return seen

    ranks = run_ranks(job, world=2, timeout=120)
    for number, seen in enumerate(ranks):
        expected = ["pass"] * 24
        expected[8 + 5] = "LIV209"
        assert seen["threads"] == expected
        titles, seconds = seen["tags"]
        assert titles == [
            "nothing was compared: all ranks came, with different tags: 'run 0' on rank 0, 'run 1' on rank 1"
        ]
        assert seconds < 5, "nobody waits for the timeout"
        assert seen["again"][0] == seen["mode"][0] == seen["after"][0] == "pass"
        assert seen["signal"][0] == ("pass" if number else "RuntimeError")
        assert seen["signal"][1] < 5
        assert seen["new"] == (True, "pass")
    assert ranks[0]["alone"][0] == "LIV211"


def test_a_group_that_is_made_anew_is_noticed(tmp_path: Path) -> None:
    def job(rank: int) -> list[Any]:
        first = live.install(timeout=20)
        before = outcome(lambda: live.check(healthy(), tag=1))[0]
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        without = outcome(lambda: live.check(healthy(), tag=1))[0]
        second = live.install(timeout=20)
        return [before, without, second is first, outcome(lambda: live.check(healthy(), tag=1))[0]]

    assert run_ranks(job, world=2, timeout=60) == [["pass", "LiveNotInstalled", False, "pass"]] * 2


# ---------------------------------------------------------------- the store and the disk


def hold_a_store(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(600)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_stops_or_dies_costs_the_timeout(how: signal.Signals, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    host = fork.Process(target=hold_a_store, args=(theirs,))
    host.start()
    assert host.pid is not None
    port, pid = ours.recv(), host.pid

    def job(rank: int) -> list[tuple[str, float]]:
        installed = live.install(timeout=2)
        assert installed.gate is not None
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        api._installed = replace(installed, gate=replace(installed.gate, store=store))
        seen = [outcome(lambda: live.check(healthy(), tag="before"))]
        dist.barrier()
        if rank == 0:
            os.kill(pid, how)
        dist.barrier()
        seen.append(outcome(lambda: live.check(healthy(), tag="during")))
        seen.append(outcome(lambda: live.check(healthy(), tag="after", on_incomplete="raise")))
        seen.append(outcome(lambda: live.check_loaded(healthy(), tmp_path)))
        seen.append(outcome(lambda: SimpleNamespace(diagnostics=[], verdict=live.prepare_seal(healthy()).problem)))
        return seen

    try:
        ranks = run_ranks(job, world=2, timeout=60)
    finally:
        host.kill()
        host.join()
    for before, during, after, loaded, sealed in ranks:
        assert before[0] == "pass"
        assert during[0] == loaded[0] == "LIV211" and after[0] in ("LIV211", "LiveError LIV211")
        assert "live mode is off for the rest of this job: the store of the job" in sealed[0]
        assert max(item[1] for item in (during, after, loaded, sealed)) < 6


def test_a_seal_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def job(rank: int) -> list[str]:
        live.install(timeout=20)
        seen = []
        for path in (tmp_path / "nothing", tmp_path / "saved"):
            if path.name == "saved":
                dcp.save(healthy(), checkpoint_id=path)
            try:
                seen.append(str(live.seal(healthy(), path)))
            except CkptlintError as error:
                seen.append(str(error).replace(str(tmp_path), ""))
        return seen

    zero, one = run_ranks(job, world=2, timeout=60)
    assert one[0] == f"rank 0: {zero[0]}" and "/nothing" in zero[0]
    assert zero[1].endswith("ckptlint.seal.json") and one[1] == "None"


def test_a_load_of_which_nothing_was_sealed_is_incomplete(tmp_path: Path) -> None:
    live.uninstall()
    dcp.save(healthy(), checkpoint_id=tmp_path)
    seal = live.seal(healthy(), tmp_path)
    assert seal is not None
    assert outcome(lambda: live.check_loaded(healthy(), tmp_path))[0] == "pass"
    assert outcome(lambda: live.check_loaded({"other": torch.ones(1)}, tmp_path))[0] == "LIV211"
    document = json.loads(seal.read_text())
    seal.write_text(json.dumps(document | {"entries": {}}))
    assert outcome(lambda: live.check_loaded(healthy(), tmp_path))[0] == "LIV211"
    live.uninstall()


# ---------------------------------------------------------------- patches


def test_a_patch_takes_out_itself_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live.uninstall()
    checked: list[object] = []
    monkeypatch.setattr(hooks, "check_save", lambda _, path, **options: checked.append(options["digest"]))
    places = [(module, name) for module in (dcp, state_dict_saver) for name in ("save", "async_save")]
    originals = [getattr(module, name) for module, name in places]

    def saved() -> list[object]:
        checked.clear()
        dcp.save(healthy(), checkpoint_id=tmp_path)
        return sorted(map(str, checked))

    first, second = live.patch_dcp(digest="none"), live.patch_dcp(digest="replicas")
    assert saved() == ["none", "replicas"]
    assert pickle.loads(pickle.dumps(dcp.save)) is dcp.save
    first()
    assert saved() == ["replicas"]
    below, calls = dcp.save, []

    def of_user(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return below(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", of_user)
        second()
        assert saved() == [] and len(calls) == 1 and dcp.save is of_user
    second()
    assert [getattr(module, name) for module, name in places] == originals
