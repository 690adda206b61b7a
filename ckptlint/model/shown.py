"""What the objects that the Python API gives share: they show themselves in a console and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Shown(ABC):
    """An object that can be printed, looked at in a notebook, and made a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """What the command prints of it, without colour."""
        return str(_views().as_text(self))

    def _repr_html_(self) -> str:
        """A summary and a table for notebooks: no script, and every text in it is escaped."""
        return str(_views().as_html(self))

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """What it holds as flat dictionaries with the same keys, as `pandas.DataFrame` takes them."""


def _views() -> Any:
    from ckptlint.reporters import views  # the one import upward: only once something is shown

    return views
