"""Frameworks as data: each file is read as a stranger's would be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptlint.vocabulary import frameworks
from ckptlint.vocabulary.frameworks import merged, read_framework, step_number, world

FILES = sorted(Path(frameworks.__file__).parent.glob("*.toml"))
STEPS = '[[steps]]\npattern = "{}"\nsource = "acme 1"'


def _patterns(value: Any) -> Iterator[Any]:
    """All regular expressions of a file, which are compiled when they are used."""
    if isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _patterns(item)
    elif hasattr(value, "fullmatch"):
        yield value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_says_where_its_names_are_from(path: Path) -> None:
    made = read_framework(path.name, path.read_text(encoding="utf-8"))
    for entry in (*made.steps, *made.trackers, *made.unfinished, *made.written_last, *made.one_counter, *made.unread):
        assert entry.source, entry
    for entry in made.steps:
        assert entry.pattern.groups >= 1, entry
    for entry in made.files:
        assert entry.counted_by == "" or "number" in entry.pattern.groupindex, entry
    for pattern in _patterns(made):
        assert re.compile(pattern.pattern).pattern == pattern.pattern


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parts = ['net']", "acme.toml: source is missing"),
        ('source = "acme 1"\nsteps_dir = "x"', "acme.toml: steps_dir is no entry that is known"),
        ('source = "acme 1"\n[[steps]]\npattern = "a(1)"', "acme.toml: steps[0].source is missing"),
        (f'source = "acme 1"\n{STEPS.format("a(1)")}\ndigits = "7"', "acme.toml: steps[0].digits is '7'"),
        ('source = "acme 1"\n[[trackers]]\nfile = "x"\nholds = "url"\nsource = "y"', "trackers[0].holds is 'url'"),
        ('source = "acme 1"\nparts = "net"', "acme.toml: parts is 'net'"),
        ('source = "acme 1', "acme.toml: "),
        (f'source = "acme 1"\n{STEPS.format("([0-9]+)")}', "matches the bare number 0"),
    ],
)
def test_a_wrong_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^acme\.toml: ") as told:
        read_framework("acme.toml", text)
    assert said in str(told.value)


def test_no_step_is_called_like_a_part_of_one() -> None:
    names = {name for pattern in (*world().parts, *world().roles) for name in pattern.pattern.split("|")}
    assert len(names) > 15 and not [name for name in names if step_number(name) is not None]


def test_one_file_more_adds_to_what_the_others_say() -> None:
    more = read_framework("acme.toml", f'source = "acme 1"\nparts = ["net"]\n{STEPS.format("snap@([0-9]+)")}')
    whole = merged([world(), more])
    assert [len(whole.steps), len(whole.parts)] == [len(world().steps) + 1, len(world().parts) + 1]
