"""No pattern takes more than linear time over a long text: names, keys and files are written by anybody."""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY

import ckptlint
from ckptlint.loaders.readers.vocabulary import _without_merges

_PIECE = re.compile(r"\w{2,}|\\?[^\w\s]")
_LENGTH = int(os.environ.get("LENGTH", "4096"))
"""Of each text: `LENGTH=131072 pytest tests/formats/test_patterns.py` takes minutes, and shows what is quadratic."""
_MOST_SECONDS = max(0.1, _LENGTH / 2**20)
_SOURCES = {path: path.read_text() for path in Path(ckptlint.__file__).parent.rglob("*.py")}

Pattern = re.Pattern[str] | re.Pattern[bytes]


def _patterns() -> Iterator[Any]:
    for path, source in _SOURCES.items():
        for name in re.findall(r"^(\w+)(?:: [^=\n]+)? = lazy_pattern\(", source, re.MULTILINE):
            module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
            used = source if name.startswith("_") else "\n".join(_SOURCES.values())
            ways = {*re.findall(rf"\b{name}\.(search|match|fullmatch|finditer|findall|sub|split)\b", used)}
            yield pytest.param(
                getattr(importlib.import_module(module), name), ways or {"fullmatch"}, id=f"{module}.{name}"
            )


def _texts(pattern: str) -> Iterator[str]:
    """Texts that repeat what the pattern spells, and end in what it does not."""
    spelled = [piece.removeprefix("\\") for piece in _PIECE.findall(pattern)]
    pieces = [*dict.fromkeys([*[*filter(None, spelled)][:12], "a", "A", "1", " ", "_", ".", "\n"])]
    for first in pieces:
        for second in ("", *pieces):
            yield (first + second) * (_LENGTH // len(first + second)) + "\0"


def _slowest(pattern: Pattern, ways: Iterable[str]) -> tuple[float, str]:
    """The longest processor time of a drawn text, the better of two looks, and how that text begins."""
    worst = 0.0, ""
    is_text = isinstance(pattern.pattern, str)
    for text in _texts(str(pattern.pattern) if is_text else bytes(pattern.pattern).decode("latin-1")):
        given: Any = text if is_text else text.encode()
        for way in ways:
            taken = []
            for _ in range(2):
                started = time.process_time()
                if way == "sub":
                    pattern.sub(given[:0], given)
                else:
                    deque(found if isinstance(found := getattr(pattern, way)(given), Iterator) else (), maxlen=0)
                taken.append(time.process_time() - started)
                if taken[-1] < _MOST_SECONDS:
                    break
            worst = max(worst, (min(taken), f"{way} {text[:40]!r}"))
    return worst


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize(("pattern", "ways"), _patterns())
def test_a_long_text_takes_no_pattern_long(pattern: Pattern, ways: set[str]) -> None:
    seconds, text = _slowest(pattern, ways)
    assert seconds < _MOST_SECONDS, text


def test_a_pattern_that_backtracks_is_noticed() -> None:
    assert _slowest(re.compile(r"(.*,)(.*,)x"), {"fullmatch"})[0] > _MOST_SECONDS / 8  # linear ones take a hundredth


def test_a_tokenizer_of_many_brackets_is_read_in_linear_time() -> None:
    def seconds(count: int) -> float:
        text = b'{"model": {"vocab": {}, "merges": [' + b'"merges": [] } ' * count + b"]}}"
        started = time.process_time()
        _without_merges(text)
        return time.process_time() - started

    assert seconds(200_000) < 2


@pytest.mark.parametrize("merges", ["[]", '["a b", "merges"]', '[["merges", "a"]]', '["] } }"]'])
def test_what_is_read_of_a_tokenizer_does_not_depend_on_its_merges(merges: str) -> None:
    text = f'{{"model": {{"vocab": {{"merges": 5, "a": 1}}, "merges" : {merges} \n}} }}\n'
    assert json.loads(_without_merges(text.encode()))["model"]["vocab"] == {"merges": 5, "a": 1}
    assert json.loads(_without_merges(text[:-2].encode() + b', "x": 1}')) == json.loads(text[:-2] + ', "x": 1}')
