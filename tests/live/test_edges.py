"""Live mode at its edges, in real jobs of two ranks: what one rank does alone costs the others nothing."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import run_ranks

from ckptlint import live
from ckptlint.live import api

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
