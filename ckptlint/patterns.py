"""Regular expressions that are compiled when they are first used: a check uses half of them, and starts without."""

from __future__ import annotations

import re

TYPE_CHECKING = False  # as type checkers read it; the typing module takes longer to import than this one
if TYPE_CHECKING:
    from typing import Any, AnyStr


class _Lazy:
    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self.pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:  # of what is not yet an attribute
        if name.startswith("__"):  # of a copy, before it has a pattern
            raise AttributeError(name)
        value = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, value)
        return value


def lazy_pattern(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """What `re.compile` gives; a mistake in it shows at its first use.

    >>> lazy_pattern("[0-9]+").fullmatch("17")[0], lazy_pattern("step", re.IGNORECASE).sub("", "STEP 3")
    ('17', ' 3')
    """
    return _Lazy(pattern, flags)  # type: ignore[return-value]
