"""Prints which modules a check of a checkpoint enters, each where it is entered first, below what called it.

`docs/make.py` puts it into design.md. What a child process reads is read in this process here.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from types import FrameType
from typing import Any

from ckptlint.commands.main import cli

CHECKPOINT = "fixtures/real/fsdp2_4r_hole"
_NOT_SHOWN = ("model", "vocabulary", "progress", "depth", "errors", "sandbox", "rule", "storage.paths")
_AS_ONE = ("analysis", "geometry", "architecture", "rules")


def check() -> None:
    """Check the checkpoint, and print nothing."""
    with redirect_stdout(StringIO()), suppress(SystemExit):
        cli.main([CHECKPOINT, "--no-progress", "--isolated"], standalone_mode=False)


def calls() -> list[tuple[int, str]]:
    """Depth below those that are shown, and `module.function`."""
    check()  # what is imported now is not entered later
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptlint.") and hasattr(module, "isolated"):
            module.isolated = lambda work, size: work()  # type: ignore[attr-defined]
    entered: set[str] = set()
    shown: set[int] = set()
    found: list[tuple[int, str]] = []

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        name = module.removeprefix("ckptlint.")
        if event != "call" or name == module or function.startswith(("_", "<")) or name.startswith(_NOT_SHOWN):
            return
        name = name.partition(".")[0] if name.startswith(_AS_ONE) else name
        if name in entered:
            return
        entered.add(name)
        depth, above = 0, frame.f_back
        while above is not None:
            depth, above = depth + (id(above.f_code) in shown), above.f_back
        shown.add(id(frame.f_code))
        found.append((depth, name if name in _AS_ONE else f"{name}.{function}"))

    sys.setprofile(on_call)
    check()
    sys.setprofile(None)
    return found


if __name__ == "__main__":
    for depth, name in calls():
        sys.stdout.write(f"{'  ' * depth}{name}\n")
