"""What a rank may spend on collecting what it holds: states without an end cost a check, never the job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from threads import run_threads

from ckptlint import live
from ckptlint.lint.report import Report
from ckptlint.live import api, sealing
from ckptlint.live.api import Live
from ckptlint.live.collect import limit
from ckptlint.live.collect.extract import resolved
from ckptlint.live.collect.limit import Limit, readable


class Endless(dict[str, Any]):
    def items(self) -> Iterator[tuple[str, int]]:  # type: ignore[override]
        return ((f"key{i}", i) for i in count())


def doubled(value: Any, kind: type) -> Any:
    """A value that holds the value before it twice, 60 times over."""
    for _ in range(60):
        value = {"a": value, "b": value} if kind is dict else kind((value, value))
    return value


def diagnosed(report: Report) -> list[tuple[str, str]]:
    return [(d.code, d.title) for d in report.diagnostics]


@pytest.mark.filterwarnings("ignore")
def test_a_state_without_an_end_is_given_up_by_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_COLLECTING", 0.02)
    states: dict[str, Any] = {
        "endless": Endless(),
        "endless within": {"model": Endless()},
        "shared by tuples": {"arguments": doubled(1, tuple)},
        "shared by lists": {"arguments": doubled(1, list)},
        "shared by lists of tensors": {"model": doubled(torch.ones(1), list)},
        "shared by mappings": {"model": doubled(1, dict)},
        "a million keys": dict.fromkeys(range(1_000_000), 1),
    }

    def job(of_rank: Live) -> Any:
        held = states if of_rank.group.rank == 2 else {name: {"step": 1} for name in states}
        seen = {name: diagnosed(of_rank.check(state, tag=name)) for name, state in held.items()}
        return seen, of_rank.check({"step": 1}, tag="after").verdict

    first, *others = run_threads(job, world=4)
    assert all(other == first for other in others)
    said = "nothing was compared: rank 2: its state could not be collected within 0.2 s"
    assert first == ({name: [("LIV211", said)] for name in states}, "pass")


def test_time_of_the_jobs_own_code_is_not_counted() -> None:
    class Slow:
        def state_dict(self) -> dict[str, Any]:
            time.sleep(0.2)
            return {"step": 1}

        load_state_dict = None

    assert [key for key, _ in resolved({"app": Slow(), "step": 2}, Limit(0.1))] == ["app", "step"]


def test_a_rank_alone_and_a_seal_stop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "_MOST_VALUES", 1_000)
    said = "its state could not be collected: it has more than 1,000 values"
    with pytest.warns(UserWarning, match="LIV211"):
        assert diagnosed(live.check({"model": Endless()})) == [("LIV211", said)]
    assert live.prepare_seal(Endless()).problem == said


def test_what_was_expanded_far_beyond_its_memory_is_not_read() -> None:
    wide, huge = torch.ones(1).expand(2**27), torch.ones(1, 3).expand(2**40, 3)
    assert readable([wide, wide, wide, huge, torch.ones(3)]).tolist() == [True, True, False, False, True]
    state = {"huge": huge, "kept": (huge,), "b": torch.ones(1).expand(8), "c": torch.ones(2**23)}
    report = run_threads(lambda of_rank: of_rank.check(state), world=2)[0]
    assert diagnosed(report) == [("LIV213", "the contents of up to 2 values per rank were not compared: huge, kept")]
    pending = live.prepare_seal(state)
    assert pending._sums is not None
    reasons = dict(zip(state, pending._sums.reason[pending._sums.places(list(state))].tolist(), strict=True))
    assert reasons == {"huge": sealing._NO_DIGEST, "kept": sealing._OBJECT, "b": 0, "c": 0}
