"""Running a reader in a child process that may crash, starve or loop without harm.

A crafted pickle can make the C unpickler hash a tuple nested a million deep (a segmentation fault), hash a small graph
for hours, or ask for gigabytes with five bytes. None of that differs from an honest file without walking every
opcode in Python, so the reading happens where it can be stopped.

Processor time is one budget for all that is read of a checkpoint (`one_budget`): 20 s, and 1 s for each MiB of input.
A child gets half of what is left of the 20 s, so that one crafted file does not keep the others from being read.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from ckptlint.errors import CkptlintError, LimitError, OwnFileError, ReaderError
from ckptlint.progress import Shared, is_listened_to, listening

_T = TypeVar("_T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

_TOO_DEEP = 71  # what the child ends with when its answer is nested too deeply to be sent
_TICK = 0.1  # seconds between two looks at how far the child is
_BASE_BYTES = 1024**3
_BYTES_PER_BYTE = 24  # measured: 12 bytes of memory per byte of a .metadata with a million chunks
_BASE_SECONDS = 20.0
_SECONDS_PER_MIB = 1  # measured: 0.02 to 0.04 s per MiB
_PR_SET_PDEATHSIG = 1  # Linux' prctl.h

in_children = hasattr(os, "fork")
"""Whether readers run in children. Not on Windows, which cannot fork; the tests of what is read do without, too."""

_is_expendable = False  # whether this process is one of `prefetch`, which replaces those that die of what they read
_left: float | None = None  # seconds of the budget that are left beside the shares of the bytes, None without a budget


@contextlib.contextmanager
def one_budget() -> Iterator[None]:
    """All children that `isolated` starts meanwhile share one budget of processor time; within another, that one."""
    global _left
    if _left is not None:
        yield
        return
    _left = _BASE_SECONDS
    try:
        yield
    finally:
        _left = None


def isolated(work: Callable[[], _T], size: int) -> _T:
    """The result of `work`, computed in a forked child under limits of memory and processor time.

    Args:
        work: reads untrusted input; what it returns must be picklable.
        size: bytes of the input, from which the limits follow.

    Raises:
        LimitError: the child exceeded a limit or crashed, or those before it spent the budget.
        CkptlintError: whatever `work` raised of that kind.
        OwnFileError: a file that `work` needs is missing or broken.
        ReaderError: `work` raised anything else, which is a mistake in ckptlint.
    """
    if not in_children:
        return _value(*_outcome(work))  # type: ignore[no-any-return]
    with one_budget():
        assert _left is not None
        if _left <= 0:
            raise LimitError("was not read: reading the files before it took far longer than their sizes explain")
        if _is_expendable:
            return _here(work, size)
        shared = Shared() if is_listened_to() else None
        return _answer(*_forked(work, size, shared), shared, _share(size))  # type: ignore[no-any-return]


def _here(work: Callable[[], _T], size: int) -> _T:
    """As `isolated`, in this process, which may die of it: `prefetch` then has the work done again."""
    global _left
    started = time.process_time()
    _limit(size)
    try:
        return _value(*_outcome(work))  # type: ignore[no-any-return]
    finally:
        assert _left is not None
        _left -= max(0.0, time.process_time() - started - _share(size))


def prefetch(works: Sequence[Callable[[], _T]], jobs: int) -> Iterator[_T]:
    """What each work returns, in their order; up to `jobs` forked processes are at it, each with every `jobs`th work.

    What a work isolates is read in these processes themselves. One that dies of it is replaced, and the work is done
    once more, in a child of its own. Threads would not do: a child that is forked beside one may wait for ever for a
    lock which that thread held.

    Args:
        works: what they return must be picklable.

    Raises:
        as `isolated`.
    """
    if not hasattr(os, "fork"):
        yield from (work() for work in works)
        return
    going: dict[int, tuple[int, BinaryIO]] = {}
    try:
        for turn in range(min(jobs, len(works))):
            going[turn] = _worker(works[turn::jobs])
        for number, work in enumerate(works):
            child, pipe = going.pop(number % jobs)
            answer = _received(pipe)
            if answer is None:  # it ends here, for good or for worse
                _end(child, pipe)
                rest = works[number + jobs :: jobs]
                if rest:
                    going[number % jobs] = _worker(rest)
                yield work()
            else:
                going[number % jobs] = child, pipe
                yield _value(*answer)
    finally:
        for child, pipe in going.values():
            _end(child, pipe)


def _worker(works: Sequence[Callable[[], Any]]) -> tuple[int, BinaryIO]:
    """A child that answers to each of the works in turn, and the pipe with its answers."""
    child, reading = _forked(partial(map, _outcome, works), None, None)
    return child, os.fdopen(reading, "rb")


def _end(child: int, pipe: BinaryIO) -> None:
    """Have nothing of a child left, whose other answers nobody asks for."""
    pipe.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _forked(work: Callable[[], Any], size: int | None, shared: Shared | None) -> tuple[int, int]:
    """A child that works, under limits where a size is given, and the pipe from which its answer can be read."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; the child takes no lock that another thread may hold: it reads and computes
        warnings.simplefilter("ignore", DeprecationWarning)
        with _uninterrupted() as masked:
            child = os.fork()
            if child == 0:
                os.close(reading)
                with listening(shared.write if shared else None):
                    _serve(work, size, writing, parent, masked)
    os.close(writing)
    return child, reading


@contextlib.contextmanager
def _uninterrupted() -> Iterator[set[int]]:
    """Hold Ctrl-C back, and give the signals that were held back before.

    Python only prints a KeyboardInterrupt that comes in what it calls around a fork, and goes on.
    """
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # raises what came before
        yield masked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _share(size: int) -> float:
    """Seconds that a child gets for the bytes of its input."""
    return _SECONDS_PER_MIB * size / 2**20


def _answer(child: int, reading: int, shared: Shared | None, share: float = math.inf) -> Any:
    """What a child answers; its end is waited for, and the seconds beyond its share are taken from the budget."""
    global _left
    answer: tuple[str, Any] | None = None
    try:
        with os.fdopen(reading, "rb") as pipe:
            while shared and not select.select([pipe], [], [], _TICK)[0]:
                shared.pass_on()
            answer = _received(pipe)
    finally:
        if answer is None and sys.exc_info()[0] is not None:
            os.kill(child, signal.SIGKILL)  # interrupted: the child is not needed any more
        _, status, used = os.wait4(child, 0)
        if _left is not None:
            _left -= max(0.0, used.ru_utime + used.ru_stime - share)
    if answer is None and os.waitstatus_to_exitcode(status) == _TOO_DEEP:
        raise LimitError("is nested too deeply")
    if answer is None:
        raise LimitError(f"cannot be read: {_ending(status)}")
    return _value(*answer)


def _value(kind: str, value: Any) -> Any:
    """What a reader returned; what it raised is raised."""
    if kind == "result":
        return value
    raise value


def _received(pipe: BinaryIO) -> tuple[str, Any] | None:
    try:
        answer: tuple[str, Any] = pickle.load(pipe)  # noqa: S301  our own child wrote it
    except (EOFError, pickle.UnpicklingError):
        return None
    return answer


def _serve(work: Callable[[], Any], size: int | None, writing: int, parent: int, masked: set[int]) -> NoReturn:
    """The child's whole life: work, answer, end without cleaning up.

    Without a size, the work gives one answer after the other.
    """
    global _is_expendable
    try:
        _end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        _keep_freed_memory()
        if size is not None:
            _limit(size)
        _is_expendable = size is None
        answers = work() if size is None else [_outcome(work)]
        with os.fdopen(writing, "wb") as pipe:
            for answer in answers:
                give_back_freed_memory()
                try:
                    pickle.Pickler(pipe, 5).dump(answer)  # arrays go through the pipe as they are, without a copy
                except RecursionError:
                    os._exit(_TOO_DEEP)
                pipe.flush()
        os._exit(0)
    finally:
        os._exit(70)


def _outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    """What a reader returns or raises, in words for the user: ("result", value) or ("error", exception)."""
    try:
        return "result", work()
    except (CkptlintError, OwnFileError) as error:
        return "error", error
    except MemoryError:
        return "error", LimitError("would take more memory to read than its size explains")
    except Exception as error:  # the loaders are to turn bad input into findings: this is a mistake of theirs
        return "error", ReaderError(f"{type(error).__name__}: {error}")


def _end_with(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent is gone, however that ended."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel heard of it
        os._exit(70)


def _limit(size: int) -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + (_left or _BASE_SECONDS) / 2 + _share(size)))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return  # only Linux says how much address space is taken already
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _BASE_BYTES + _BYTES_PER_BYTE * size)


def _keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks: fetching them from the system anew took a tenth of a large read."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, 2**30)
        allocator.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Return to the system what `_keep_freed_memory` kept, so that it can serve other processes and other uses."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


def _lower(which: int, value: int) -> None:
    import resource

    soft, hard = _given_limits(which)
    limits = [limit for limit in (soft, hard, value) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(which, (min(limits), hard))


@cache
def _given_limits(which: int) -> tuple[int, int]:
    """The limits, soft and hard, before this process set any."""
    import resource

    return resource.getrlimit(which)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return "reading it would take far longer than its size explains"
    if code < 0:
        return f"its content crashes the reader ({signal.Signals(-code).name})"
    return f"the reader ended without an answer (status {code})"
