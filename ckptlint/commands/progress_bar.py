"""The progress bar of a long reading: what is done, how fast, and how long it will take."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from ckptlint.model.text import human_bytes

_PATIENCE = 1.0


class Bar:
    """One bar at a time on standard error; a new one when the unit or the amount changes."""

    def __init__(self) -> None:
        self.phase: tuple[str, int] | None = None
        self.started = 0.0
        self.bar: Any = None

    def show(self, unit: str, done: int, total: int) -> None:
        """Bring the bar up to date; it appears once the phase has taken a second."""
        if self.phase != (unit, total):
            self.close()
            self.phase, self.started = (unit, total), time.monotonic()
        seconds = time.monotonic() - self.started
        if seconds < _PATIENCE:
            return
        if self.bar is None:
            self.bar = click.progressbar(length=total, file=sys.stderr, show_eta=True, item_show_func=self._text)
            self.bar.__enter__()
        self.seconds, self.done, self.unit = seconds, done, unit
        self.bar.update(done - self.bar.pos, done)

    def _text(self, done: int | None) -> str:
        if done is None:
            return ""
        amount, rate = done, done / self.seconds
        if self.unit == "bytes":
            return f"{human_bytes(amount)}, {human_bytes(int(rate))}/s"
        return f"{amount:,} {self.unit}, {rate:,.0f}/s"

    def close(self) -> None:
        """End the line of the bar."""
        if self.bar is not None:
            self.bar.__exit__(None, None, None)
        self.bar = self.phase = None
