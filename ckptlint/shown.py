"""What the objects that the Python API gives share: they show themselves in a console and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False  # as type checkers read it; the typing module takes longer to import than this one
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar


class Shown(ABC):
    """An object that can be printed, looked at in a notebook, and made a table.

    Attributes:
        views: gives `ckptlint.reporters.views`, which imports every class that it shows; `ckptlint/__init__.py` sets
            it, so that no module imports upward.
    """

    __slots__ = ()
    views: ClassVar[Callable[[], Any]]

    def __str__(self) -> str:
        """What the command prints of it, without colour."""
        return str(Shown.views().as_text(self))

    def _repr_html_(self) -> str:
        """A summary and a table for notebooks: no script, and every text in it is escaped."""
        return str(Shown.views().as_html(self))

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """What it holds as flat dictionaries with the same keys, as `pandas.DataFrame` takes them."""
