"""`python -m ckptlint`, and the command `ckptlint`."""

import os
import sys

from ckptlint._version import __version__


def main() -> None:
    """Run the command line; the version is told without importing what reads it."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"ckptlint, version {__version__}")  # noqa: T201  nothing where stdout is closed
        return
    from ckptlint.commands.main import main as run

    run()


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
