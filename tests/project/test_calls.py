"""Calls composed at random: a small part of bench/evidence/calls.py, and the table that it takes its names from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import REPOSITORY, run_python, sweep_only

from ckptlint.formats.pickles import names as pickle_names

CODE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import calls
totals, events, missed = calls.run(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
print("\\n" + json.dumps([totals, events, len(missed)]))
"""


@sweep_only
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and limits")
def test_what_acts_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    arguments = [str(REPOSITORY / "bench" / "evidence"), "500", "5", str(tmp_path / "found")]
    done = run_python(CODE, *arguments, timeout=600)
    totals, events, missed = json.loads(done.stdout.splitlines()[-1])
    assert missed == 0, sorted((tmp_path / "found").iterdir())
    assert totals["fired refused"] > 40 and totals["quiet passed"] > 2
    assert {"file", "open", "os.mkdir"} <= set(events)


TABLE = """
storage = "text"
closed = "sympy"
open = "torch.optim."
tensor = "data"
refused = "torch.hub"
[[calls]]
names = "own: name"
source = "a test"
"""


def test_the_table_says_what_it_was_given() -> None:
    row = pickle_names.parse_calls(TABLE + 'call = ["int, (text, [flag]), *none", ""]\nstate = "kept"').rows[
        "own", "name"
    ]
    fits = [(), (1, ("a",)), (1, ("a", True)), (1, ("a",), None, None)]
    assert all(map(row.call, fits))
    assert not any(map(row.call, [(1,), (True, ("a",)), (1, ["a"]), (1, ("a", 1)), (1, ("a",), 2)]))
    assert not row.new(()) and row.state({"a": 1}) and not row.state({1: 1}) and not row.touches


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('shape = "int"', "the field shape"),
        ("call = 'int'", "the field call"),
        ("items = false", "the field items"),
        ('call = ["int, strange"]', "strange"),
        ('call = ["int,, text"]', "is no shape"),
        ('call = ["[int], text"]', "must stand at the end"),
        ('state = "int()"', "int()"),
    ],
)
def test_a_mistake_in_the_table_names_the_entry(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=r"calls.toml, entry 1 \(own: name\)") as error:
        pickle_names.parse_calls(TABLE + line)
    assert told in str(error.value)


def test_a_table_that_lacks_something_is_a_mistake() -> None:
    twice = TABLE + TABLE[TABLE.index("[[calls]]") :]
    for text in (TABLE.replace('source = "a test"', ""), TABLE.replace("own: name", "own name"), twice):
        with pytest.raises(ValueError, match=r"calls\.toml, entry"):
            pickle_names.parse_calls(text)
