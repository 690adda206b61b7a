"""`python -m ckptlint`, and the command `ckptlint`."""

import sys

from ckptlint._version import __version__


def main() -> None:
    """Run the command line; the version is told without importing what reads it."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"ckptlint, version {__version__}")  # noqa: T201  nothing where stdout is closed
        return
    from ckptlint.commands.main import main as run

    run()


if __name__ == "__main__":
    main()
