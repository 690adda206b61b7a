"""The store gate: whether all ranks are here, decided before any collective could hang.

The decision is one key of the rendezvous store, written by whoever comes first with `compare_set`: early, late and
absent ranks all take the same branch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_PREFIX = "ckptlint"


@dataclass(frozen=True, slots=True)
class Passage:
    """What a gate decided.

    Attributes:
        go: whether all ranks came in time; the same on all ranks.
        absent: the ranks that had not come when this rank looked; empty for `go`.
        reason: why not, in words.
        seconds: how long this rank waited.
    """

    go: bool
    absent: tuple[int, ...] = ()
    reason: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class Gate:
    """A gate of one job, passed again and again.

    Attributes:
        store: the rendezvous store; `set, get, add, check, compare_set, delete_key` are used.
        name: tells this gate's keys from those of others.
    """

    store: Any
    rank: int
    world: int
    name: str = "check"
    _passed: dict[str, int] = field(default_factory=dict)
    _old: list[list[str]] = field(default_factory=list)

    def enter(self, tag: str, timeout: float, veto: str = "", repeats: bool = False) -> Passage:
        """Wait for all ranks.

        Args:
            tag: the same on all ranks; what they are about to check.
            timeout: seconds to wait for the others.
            veto: why this rank may not go on; all ranks are then told so.
            repeats: whether the tag comes again and again (a path that is overwritten). The rank then joins the first
                attempt that was not decided yet, so one that skipped a check is back in step after waiting once.
        """
        started = time.monotonic()
        attempt = self._attempt(tag) if repeats else self._passed.get(tag, 0)
        self._passed[tag] = attempt + 1
        base = f"{_PREFIX}/{self.name}/{tag}/{attempt}"
        count, decision, why = f"{base}/count", f"{base}/decision", f"{base}/why"
        self.store.set(f"{_PREFIX}/{self.name}/at/{self.rank}", base)
        if veto:
            self.store.set(why, f"rank {self.rank}: {veto}")
            self.store.compare_set(decision, "", "nogo")
        elif self.store.add(count, 1) == self.world:
            self.store.compare_set(decision, "", "go")
        if not self._wait(lambda: self.store.check([decision]), started + timeout):
            self.store.compare_set(decision, "", "nogo")
        go = bytes(self.store.get(decision)) == b"go"
        self._forget([count, decision, why])
        seconds = time.monotonic() - started
        if go:
            return Passage(True, seconds=seconds)
        absent = tuple(rank for rank in range(self.world) if not self._is_at(rank, base))
        reason = bytes(self.store.get(why)).decode() if self.store.check([why]) else ""
        return Passage(False, absent, reason, seconds)

    def _attempt(self, tag: str) -> int:
        attempt = self._passed.get(tag, 0)
        while self.store.check([f"{_PREFIX}/{self.name}/{tag}/{attempt}/decision"]):
            attempt += 1
        return attempt

    def _wait(self, is_there: Callable[[], bool], until: float) -> bool:
        """Look again and again: a blocking wait would hold the client's lock, which c10d's own threads may need."""
        pause = 0.0005
        while not is_there():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01 + self.world / 20_000)
        return True

    def _is_at(self, rank: int, base: str) -> bool:
        key = f"{_PREFIX}/{self.name}/at/{rank}"
        return bool(self.store.check([key])) and bytes(self.store.get(key)).decode() == base

    def _forget(self, keys: list[str]) -> None:
        """Rank 0 deletes the keys of the check before the last one, which nobody can still be reading."""
        self._old.append(keys)
        if len(self._old) > 2:
            for key in self._old.pop(0) if self.rank == 0 else self._old.pop(0)[:0]:
                self.store.delete_key(key)
