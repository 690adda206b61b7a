"""`python -m ckptlint`, and the command `ckptlint`."""

from __future__ import annotations

import gc
import io
import os
import sys

from ckptlint._version import __version__

TYPE_CHECKING = False  # as type checkers read it; the typing module takes longer to import than all else here
if TYPE_CHECKING:
    from typing import NoReturn


_LEAST_MEMORY = 192 * 1024**2
"""Bytes of address space; where numpy gets less to load, OpenBLAS ends the process with exit 1."""
_NEW_OBJECTS = 100_000
"""How many there are before the next search for garbage; a start makes fewer, and none of it is garbage."""


def main() -> None:
    """Run the command line; the version is printed without importing what reads."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"ckptlint, version {__version__}")  # noqa: T201  nothing where stdout is closed
        return
    _open_standard_streams()
    if (limit := _memory_limit()) is not None and limit < _LEAST_MEMORY:
        _stop(f"`ulimit -v` leaves {limit // 1024**2} MiB of memory, {_LEAST_MEMORY // 1024**2} MiB are needed")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread of numpy's takes memory, and waits in a loop
    gc.set_threshold(_NEW_OBJECTS)
    try:
        from ckptlint.commands.main import main as run

        run()
    except KeyboardInterrupt:  # before there is a command that says how far it came
        sys.stderr.write("\nckptlint: interrupted: no answer\n")
        sys.exit(130)
    except MemoryError:
        _stop("there is not enough memory (a limit of the system or of `ulimit -v`)")
    except Exception as error:  # exit 1, which Python would make of it, claims findings
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            _stop("there is not enough memory, or there are too many threads")
        sys.excepthook(*sys.exc_info())
        _stop("this is a mistake in ckptlint or its installation, please report it")
    finally:
        gc.freeze()  # else Python searches every module for garbage before it ends


def _open_standard_streams() -> None:
    """Give the streams that whoever started this has closed a place that swallows all, and keep those from failing.

    Else a file that is opened later would get the number of stdout or stderr, and be written to. What the encoding of
    the output lacks is escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  a number, for good
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _memory_limit() -> int | None:
    """The bytes of address space that this process may have; None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _stop(why: str) -> NoReturn:
    sys.stderr.write(f"ckptlint: {why}; the verdict is incomplete\n")
    sys.exit(4)


def _import_nothing_from_here() -> None:
    """Take the working directory off the import path, where `-m` puts it: in a checkpoint its `click.py` would run."""
    try:
        here = os.getcwd()  # noqa: PTH109  pathlib is not imported yet
    except OSError:  # it was deleted
        return
    source_tree = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    if sys.path[0] in ("", here) and not sys.flags.safe_path and here != source_tree:
        del sys.path[0]


if __name__ == "__main__":
    _import_nothing_from_here()
    main()
