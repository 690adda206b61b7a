"""Payload files in columns."""

from __future__ import annotations

import pickle
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ckptlint.model import FILE_STATES, Checkpoint, FileTable, StoredFile
from ckptlint.model.text import printable

NAMES = st.text(max_size=6).map(printable)
FILES = st.lists(
    st.builds(
        StoredFile, NAMES, st.none() | NAMES, st.none() | st.integers(0, 2**62), st.sampled_from(FILE_STATES),
        st.booleans(), st.sampled_from(["", "another file is there"]),
    )
)  # fmt: skip


@given(FILES, FILES)
def test_a_table_holds_what_it_was_made_of(first: list[StoredFile], second: list[StoredFile]) -> None:
    table = FileTable.of(first).followed_by(FileTable.of(second))
    files = first + second
    assert list(table) == files and len(table) == len(files) and list(table.names) == [file.name for file in files]
    assert [table[row] for row in range(len(table))] == files == list(pickle.loads(pickle.dumps(table)))
    assert table.are("ok", "absent").tolist() == [file.state in ("ok", "absent") for file in files]


def test_a_file_takes_few_bytes() -> None:
    count = 100_000
    files = [StoredFile(f"__{number}_0.distcp", f"__{number}_0.distcp", number, "ok", True) for number in range(count)]
    tracemalloc.start()
    table = FileTable.of(files)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 60 * count and len(pickle.dumps(table, 5)) < 60 * count


def test_a_checkpoint_prints_as_one_line() -> None:
    files = FileTable.of([StoredFile("__0_0.distcp", "__0_0.distcp", 5, "ok", True)])
    assert repr(Checkpoint("run/step", "dcp", files=files)) == "<Checkpoint run/step: dcp, 0 tensors, 1 files>"
