"""The store gate: whether all ranks are here, decided before any collective could hang.

The decision is one key of the rendezvous store, written by whoever comes first with `compare_set`: early, late and
absent ranks read the same value and take the same branch.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

_GO = b"go"


@dataclass(frozen=True, slots=True)
class Passage:
    """What a gate decided, the same on all ranks that read it.

    Attributes:
        go: whether all ranks came in time.
        absent: the ranks that had not come when it was decided.
        reason: why a rank that came may not go on; "" where ranks were absent.
    """

    go: bool
    absent: tuple[int, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class Gate:
    """A gate of one job, passed again and again; a passage leaves some 200 bytes in the store.

    Attributes:
        store: the rendezvous store; `set, get, add, check, compare_set` are used.
        name: keeps this gate's keys apart from those of others.
    """

    store: Any
    rank: int
    world: int
    name: str = "check"
    _passed: dict[str, int] = field(default_factory=dict)

    def enter(self, tag: str, timeout: float, veto: str = "", repeats: bool = False) -> Passage:
        """Wait for all ranks.

        Args:
            tag: the same on all ranks; what they are about to check.
            timeout: seconds to wait for the others.
            veto: why this rank may not go on; all ranks then get it as the reason.
            repeats: whether the tag comes again and again (a path that is overwritten). The rank then joins the first
                attempt that was not decided yet, so one that skipped a check is back in step after waiting once.
        """
        attempt = self._passed.get(tag, 0)
        while repeats and self.store.check([f"{self._base(tag, attempt)}/decision"]):
            attempt += 1
        self._passed[tag] = attempt + 1
        base = self._base(tag, attempt)
        decision = f"{base}/decision"
        self.store.set(self._place(self.rank), base)
        if veto:
            self._refuse(decision, (), f"rank {self.rank}: {veto}")
        elif self.store.add(f"{base}/count", 1) == self.world:
            self.store.compare_set(decision, "", _GO.decode())
        if not self._wait(decision, time.monotonic() + timeout):
            self._refuse(decision, tuple(rank for rank in range(self.world) if not self._is_at(rank, base)), "")
        value = bytes(self.store.get(decision))
        if value == _GO:
            return Passage(True)
        refusal = json.loads(value)
        return Passage(False, tuple(refusal["absent"]), refusal["reason"])

    def _base(self, tag: str, attempt: int) -> str:
        return f"ckptlint/{self.name}/{tag}/{attempt}"

    def _place(self, rank: int) -> str:
        return f"ckptlint/{self.name}/at/{rank}"

    def _refuse(self, decision: str, absent: tuple[int, ...], reason: str) -> None:
        self.store.compare_set(decision, "", json.dumps({"absent": absent, "reason": reason}))

    def _wait(self, key: str, until: float) -> bool:
        """Look again and again: a blocking wait would hold the client's lock, which c10d's own threads may need."""
        pause = 0.0005
        while not self.store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01 + self.world / 20_000)
        return True

    def _is_at(self, rank: int, base: str) -> bool:
        key = self._place(rank)
        return bool(self.store.check([key])) and bytes(self.store.get(key)).decode() == base
