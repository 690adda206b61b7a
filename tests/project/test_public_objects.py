"""What the Python API gives can be printed, compared, copied and pickled, before and after it was used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from support import REAL, report_on

import ckptlint
from ckptlint import live
from ckptlint.integrations.saved import SaveCheck

GOOD, HOLE, RUN = REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole", REAL / "frameworks" / "trackers" / "older"


@pytest.fixture(autouse=True)
def fresh_live_mode() -> Iterator[None]:
    live.uninstall()
    yield
    live.uninstall()


def used_live() -> Any:
    live.check({"w": torch.ones(3)})
    return live.install()


def an_error() -> ckptlint.CkptlintError:
    with pytest.raises(ckptlint.ConfigError) as caught:
        ckptlint.check(GOOD, select=["GEO04"])
    return caught.value


def a_live_error() -> live.LiveError:
    with pytest.raises(live.LiveError) as caught:
        live.check({"w": torch.ones(3)}, expect={"w": ((4,), None)})
    return caught.value


def sealed() -> live.Pending:
    return live.prepare_seal({"w": torch.ones(3)})


OBJECTS: dict[str, Callable[[], Any]] = {
    "a report": lambda: ckptlint.check(GOOD, depth="data"),
    "a report that fails": lambda: ckptlint.check(HOLE, REAL / "gap_middle"),
    "a report of a run": lambda: ckptlint.check(RUN, all_steps=True),
    "a report on nothing": lambda: report_on("no such path"),
    "latest": lambda: ckptlint.latest(RUN),
    "deletable": lambda: ckptlint.deletable(RUN, keep=1),
    "a checkpoint": lambda: ckptlint.load(GOOD),
    "a plan": lambda: ckptlint.plan(GOOD, "dp=3"),
    "a diff": lambda: ckptlint.diff(GOOD, HOLE),
    "equal values": lambda: ckptlint.diff(GOOD, GOOD, values=True),
    "other values": lambda: ckptlint.diff(GOOD, HOLE, values=True),
    "an error": an_error,
    "live mode": live.install,
    "live mode that was used": used_live,
    "a live error": a_live_error,
    "a seal to be written": sealed,
    "a planner": live.SaveLint,
    "a check of a save": lambda: SaveCheck("step-1", "fail", "error GEO004", {"exit_code": 1}),
}


def parts(value: Any, seen: set[type]) -> Iterator[Any]:
    """An object and the objects of ckptlint in it, one of each class."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)) and not type(value).__module__.startswith("ckptlint"):
        for item in value:
            yield from parts(item, seen)
    elif type(value).__module__.startswith("ckptlint") and type(value) not in seen:
        seen.add(type(value))
        yield value
        for item in fields(value) if is_dataclass(value) else ():
            yield from parts(getattr(value, item.name), seen)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", OBJECTS)
def test_it_behaves_as_an_object_should(name: str) -> None:
    whole = OBJECTS[name]()
    behaves(whole)
    str(whole)
    getattr(whole, "_repr_html_", str)()  # what was worked out to show it is now kept on it
    behaves(whole)


def behaves(whole: Any) -> None:
    for value in parts(whole, set()):
        assert value == value and value != object()
        text = repr(value)
        for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert type(other) is type(value) or isinstance(value, live.LiveError)
            assert str(other) == str(value) or " at 0x" in text


def test_a_report_travels_with_all_that_it_says() -> None:
    report = ckptlint.check(HOLE)
    other = pickle.loads(pickle.dumps(report))
    assert (str(other), other._repr_html_(), other.rows()) == (str(report), report._repr_html_(), report.rows())
    assert [item.all_notes() for item in other.diagnostics] == [item.all_notes() for item in report.diagnostics]


def test_live_mode_is_one_object_of_its_process() -> None:
    mode = live.install()
    assert repr(mode) == "<Live: on, 1 rank>"
    assert copy.copy(mode) is copy.deepcopy(mode) is pickle.loads(pickle.dumps(mode)) is mode
