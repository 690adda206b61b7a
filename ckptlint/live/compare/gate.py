"""The store gate: whether all ranks are here, decided before any collective could hang.

The decision is one key of the rendezvous store, written by whoever comes first with `compare_set`: early, late and
absent ranks read the same value and take the same branch. With it comes a turn: checks of several threads run their
collectives one after the other, on all ranks in the same order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptlint.live.compare.group import GroupBroken

_T = TypeVar("_T")

_GO = b"go"
_MAIN = 0  # the main thread, among the threads that wait
_FIRST_LOOK = 0.1  # seconds; a rank that waits longer looks whether rank 0 waits for another tag


@dataclass(frozen=True, slots=True)
class Passage:
    """What a gate decided, the same on all ranks that read it.

    Attributes:
        go: whether all ranks came in time.
        absent: the ranks that had not come when it was decided.
        reason: why a rank that came may not go on; "" where ranks were absent.
        turn: of all that went through this gate, by number.
    """

    go: bool
    absent: tuple[int, ...] = ()
    reason: str = ""
    turn: int = -1


@dataclass(slots=True)
class Gate:
    """A gate of one job, passed again and again; a passage leaves some 300 bytes in the store.

    Attributes:
        store: the rendezvous store; `set, get, add, check, compare_set` are used.
        name: keeps this gate's keys apart from those of others.
    """

    store: Any
    rank: int
    world: int
    name: str = "check"
    _passed: dict[str, int] = field(default_factory=dict)
    _waiting: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: int = 0
    _turned: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, tag: str, timeout: float, veto: str = "", repeats: bool = False, is_main: bool = False) -> Passage:
        """Wait for all ranks.

        Args:
            tag: the same on all ranks; what they are about to check.
            timeout: seconds to wait for the others.
            veto: why this rank may not go on; all ranks then get it as the reason.
            repeats: whether the tag comes again and again (a path that is overwritten). The rank then joins the first
                attempt that was not decided without it, so one that skipped a check is back in step after waiting once,
                and learns of the veto of a rank that came before.
            is_main: whether the main thread waits. Main threads that wait for different tags are told so at once.

        Raises:
            GroupBroken: the store is gone, or did not answer.
        """
        try:
            return aside(lambda: self._enter(tag, timeout, veto, repeats, is_main), 1.25 * timeout + 1)
        except TimeoutError:
            raise GroupBroken("the store of the job did not answer in time") from None
        except Exception as error:  # of torch's stores, each has its own
            raise GroupBroken(f"the store of the job failed: {type(error).__name__}: {error}") from error

    @contextmanager
    def in_turn(self, passage: Passage, timeout: float) -> Iterator[None]:
        """Wait until all that passed before is over on this rank; raises GroupBroken where that takes too long."""
        with self._turned:
            if not self._turned.wait_for(lambda: self._turn == passage.turn, timeout):
                raise GroupBroken("another check of this rank did not end in time")
        try:
            yield
        finally:
            with self._turned:
                self._turn += 1
                self._turned.notify_all()

    def _enter(self, tag: str, timeout: float, veto: str, repeats: bool, is_main: bool) -> Passage:
        thread = _MAIN if is_main else threading.get_ident()
        with self._lock:
            attempt, bases = self._passed.get(tag, 0), f"ckptlint/{self.name}/{tag}"
            while repeats and (before := self._decided(f"{bases}/{attempt}")) and not before.reason:
                attempt += 1
            self._passed[tag] = attempt + 1
            self._waiting[thread] = base = f"{bases}/{attempt}"
            # the main thread's first
            places = [self._waiting.get(_MAIN, ""), *(at for key, at in self._waiting.items() if key != _MAIN)]
            self.store.set(self._place(self.rank), "\n".join(places))
        decision, is_last = f"{base}/decision", False
        if veto:
            self._refuse(decision, (), f"rank {self.rank}: {veto}")
        elif is_last := self.store.add(f"{base}/count", 1) == self.world:
            self.store.compare_set(decision, "", _GO.decode())
        if not self._wait(decision, timeout, base if is_main else ""):
            self._refuse(decision, tuple(rank for rank in range(self.world) if base not in self._places(rank)), "")
        if not is_main:
            with self._lock:
                self._waiting.pop(thread)
        passage = self._decided(base)
        assert passage is not None
        if not passage.go:
            return passage
        if is_last:
            self.store.set(f"{base}/turn", str(self.store.add(f"ckptlint/{self.name}/turns", 1) - 1))
        elif not self._wait(f"{base}/turn", timeout):
            raise GroupBroken("the rank that came last was lost")
        return Passage(True, turn=int(self.store.get(f"{base}/turn")))

    def _decided(self, base: str) -> Passage | None:
        """What was decided there; None while nothing was."""
        decision = f"{base}/decision"
        if not self.store.check([decision]):
            return None
        if (value := bytes(self.store.get(decision))) == _GO:
            return Passage(True)
        refusal = json.loads(value)
        return Passage(False, tuple(refusal["absent"]), refusal["reason"])

    def _tag(self, base: str) -> str:
        return base.removeprefix(f"ckptlint/{self.name}/").rpartition("/")[0]

    def _place(self, rank: int) -> str:
        return f"ckptlint/{self.name}/at/{rank}"

    def _refuse(self, decision: str, absent: tuple[int, ...], reason: str) -> None:
        self.store.compare_set(decision, "", json.dumps({"absent": absent, "reason": reason}))

    def _wait(self, key: str, timeout: float, base: str = "") -> bool:
        """Look again and again: a blocking wait would hold the client's lock, which c10d's own threads may need."""
        pause, started, look = 0.0005, time.monotonic(), _FIRST_LOOK
        while not self.store.check([key]):
            waited = time.monotonic() - started
            if waited > timeout:
                return False
            if base and waited > look:
                self._refuse_two_tags(base)
                look *= 2
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01 + self.world / 20_000)
        return True

    def _refuse_two_tags(self, base: str) -> None:
        """Refuse both, where the main thread of rank 0 waits for another tag than this one: neither can ever go on."""
        main_base = self._places(0)[0]
        if self._tag(main_base) == self._tag(base) or not main_base or self.store.check([f"{main_base}/decision"]):
            return
        tags = f"{self._tag(main_base) or 'none'!r} on rank 0, {self._tag(base) or 'none'!r} on rank {self.rank}"
        for place in (main_base, base):
            self._refuse(f"{place}/decision", (), f"all ranks came, with different tags: {tags}")

    def _places(self, rank: int) -> list[str]:
        """What a rank waits for or waited for last; that of its main thread first."""
        key = self._place(rank)
        return bytes(self.store.get(key)).decode().split("\n") if self.store.check([key]) else [""]


def aside(function: Callable[[], _T], seconds: float | None = None) -> _T:
    """What the function returns, run in a thread that no signal handler and no mode of torch's reaches.

    What a signal handler raises meanwhile is raised once the function is over: the other ranks count on it. Raises
    TimeoutError after so many seconds, and leaves the function to itself.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="ckptlint", daemon=True)
    until = None if seconds is None else time.monotonic() + seconds
    try:
        thread.start()
        return future.result(seconds)
    except BaseException:
        if thread.ident is not None:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        raise
