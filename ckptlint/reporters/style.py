"""How text is shown: colour, width, characters, how much of it; and the file that it points at."""

from __future__ import annotations

import textwrap
from bisect import bisect
from collections import Counter
from typing import NamedTuple

from ckptlint.model import Checkpoint
from ckptlint.model.text import table
from ckptlint.patterns import lazy_pattern
from ckptlint.storage.paths import is_safe

_CODES = {"error": "31;1", "warning": "33;1", "info": "36", "good": "32", "dim": "2", "bold": "1"}
NAME_LIMIT = 200
_WORD = lazy_pattern(r"[^\W\d]+")
_SHORTEST = 5  # characters of a word that is left: "d...r"


class Style(NamedTuple):
    """What the command line decided about its terminal.

    Attributes:
        color: whether to write colour codes.
        ascii_only: whether lines are drawn with `+-|`.
        width: columns.
        per_rule: groups shown per rule in text; 0 = all.
        quiet: 1 = findings only, 2 = nothing.
        verbose: also rules that did not run, times and notes.
    """

    color: bool = False
    ascii_only: bool = True
    width: int = 80
    per_rule: int = 5
    quiet: int = 0
    verbose: bool = False

    def paint(self, text: str, kind: str) -> str:
        """The text in the colour of its kind; as it is without one."""
        return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if self.color and kind else text

    def lost(self, text: str) -> str:
        """The text in the colour of data that is lost."""
        return self.paint(text, "error")

    def wrap(self, text: str, indent: str, first: str | None = None) -> list[str]:
        """The text in lines of at most `width` columns; names are never broken."""
        first = indent if first is None else first
        wrapper = textwrap.TextWrapper(self.width, first, indent, break_long_words=False, break_on_hyphens=False)
        return wrapper.wrap(text) or [first]


def cut(name: str, limit: int = NAME_LIMIT) -> str:
    """A long name with the middle of its words left out, never a number; where that is not enough, with its own.

    >>> cut("decoder.layers.117.self_attention.linear_proj.weight", 46)
    'decoder.layers.117.sel...ion.lin...roj.weight'
    """
    if len(name) <= limit:
        return name
    lengths = Counter(map(len, _WORD.findall(name))).items()
    fitting = bisect(
        range(_SHORTEST, limit), limit, key=lambda most: len(name) - sum(max(n - most, 0) * m for n, m in lengths)
    )
    if not fitting:
        return _without_middle(name, limit)
    return _WORD.sub(lambda word: _without_middle(word[0], _SHORTEST - 1 + fitting), name)


def _without_middle(text: str, limit: int) -> str:
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[: limit - 3 - half]}...{text[len(text) - half :]}"


def cut_names(title: str, fqn: str | None) -> str:
    """The title with a very long name shortened."""
    return title.replace(fqn, cut(fqn)) if fqn else title


def shown_file(ckpt: Checkpoint, name: str) -> str:
    """The file to point at, relative to the checkpoint: the one of this name, or the metadata where there is none."""
    return name if is_safe(name) else ckpt.metadata_file  # a viewer would follow a path that leaves the folder


def aligned(heads: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table without rules."""
    return [line.rstrip() for line in table([heads, *rows], (), tablefmt="plain").splitlines()]
