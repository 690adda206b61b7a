"""The grid around a finding, and the text drawn from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptlint.geometry.chunk_map import CELL_LIMIT, Grid, MapCell, axis_label, draw, make_grid
from ckptlint.model import AxisSize, Checkpoint, ChunkTable, Tensor
from ckptlint.model.text import human_bytes
from ckptlint.model.tiling import Box, Tiling
from ckptlint.testing import load_folder, write_checkpoint


def opened(folder: Path, shape: list[int], chunks: list[str], **more: Any) -> Checkpoint:
    write_checkpoint({"tensors": {"w": {"shape": shape, "chunks": chunks, **more}}}, folder)
    return load_folder(folder)


def grid(ckpt: Checkpoint, region: Box | None) -> Grid:
    made = make_grid(ckpt.tensors["w"], region)
    assert made is not None
    return made


def drawn(ckpt: Checkpoint, region: Box | None, ascii_only: bool = True, width: int = 76) -> list[str]:
    return draw(ckpt, grid(ckpt, region), region, ascii_only, width)


# ---------------------------------------------------------------- one axis


def test_a_strip_with_a_gap(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [16, 8], ["0:4, :", "4:8, :", "12:16, :"])
    assert drawn(ckpt, Box((8, 0), (4, 8))) == [
        "dim 0 ->",
        "0        4        8        12       16",
        "+--------+--------+--------+--------+",
        "|   A    |   B    |........|   C    |",
        "+--------+--------+--------+--------+",
        "                   ^^^^^^^^ 32 elements, 128 B",
        "A __0_0.distcp   B __1_0.distcp   C __2_0.distcp",
    ]


def test_a_strip_in_unicode_has_the_same_cells(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [16, 8], ["0:4, :", "4:8, :", "12:16, :"])
    region = Box((8, 0), (4, 8))
    lines = drawn(ckpt, region, ascii_only=False)
    assert lines[2:5] == [
        "┌────────┬────────┬────────┬────────┐",
        "│   A    │   B    │........│   C    │",
        "└────────┴────────┴────────┴────────┘",
    ]
    plain = str.maketrans("┌┬┐├┼┤└┴┘│─", "+++++++++|-")
    assert [line.translate(plain) for line in lines] == drawn(ckpt, region)


def test_ascii_maps_are_ascii(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [8, 8], ["0:4, :", "4:8, 0:4", "3:8, 4:8"])
    assert "\n".join(drawn(ckpt, Box((3, 4), (1, 4)))).isascii()


def test_a_strip_with_an_overlap(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [8], ["0:5", "4:8"])
    assert drawn(ckpt, Box((4,), (1,)))[1:6] == [
        "0        4        5        8",
        "+--------+--------+--------+",
        "|   A    |###AB###|   B    |",
        "+--------+--------+--------+",
        "          ^^^^^^^^ 1 elements, 4 B",
    ]


def test_a_chunk_that_leaves_the_tensor_is_drawn_outside(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [16], ["0:12", "(12)+(6)"])
    lines = drawn(ckpt, Box((12,), (6,)))
    assert lines[1:4] == [
        "0        12       16       18",
        "+--------+--------+--------+",
        "|   A    |   B    |xxxBxxxx|",
    ]
    assert "x outside the tensor" in lines
    assert grid(ckpt, Box((12,), (6,))).inside == [[True, True, False]]


def test_a_chunk_at_a_negative_offset_is_drawn_outside(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [8], ["(-2)+(6)", "4:8"])
    made = grid(ckpt, Box((-2,), (6,)))
    assert made.inside == [[False, True, True]]
    assert made.holders == [[[0], [0], [1]]]


# ---------------------------------------------------------------- two and three axes


def test_two_axes(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [4, 6], ["0:2, 0:3", "0:2, 3:6", "2:4, 0:3"])
    assert drawn(ckpt, Box((2, 3), (2, 3))) == [
        "  dim 0 down, dim 1 across",
        "  0        3        6",
        "0 +--------+--------+",
        "  |   A    |   B    |",
        "2 +--------+--------+",
        "  |   C    |........|",
        "4 +--------+--------+",
        "A __0_0.distcp   B __1_0.distcp   C __2_0.distcp",
    ]


def test_of_three_cut_axes_two_are_drawn_and_one_is_fixed_inside_the_region(tmp_path: Path) -> None:
    chunks = [f"{e}:{e + 1}, {r}:{r + 2}, {c}:{c + 2}" for e in range(4) for r in (0, 2) for c in (0, 2)]
    del chunks[13]  # expert 3, rows 0:2, columns 2:4
    ckpt = opened(tmp_path, [4, 4, 4], chunks)
    region = Box((3, 0, 2), (1, 2, 2))
    made = grid(ckpt, region)
    assert len(made.fixed) == 1
    ((axis, index),) = made.fixed.items()
    assert region.offsets[axis] <= index < region.ends[axis]
    assert {axis, made.across, made.down} == {0, 1, 2}
    title = drawn(ckpt, region)[0].strip()
    assert title == f"dim {made.down} down, dim {made.across} across, at dim {axis} = {index}"
    empty = [(r, c) for r, row in enumerate(made.holders) for c, held in enumerate(row) if held == []]
    assert len(empty) == 1
    row, column = made.rows[empty[0][0]], made.columns[empty[0][1]]
    assert made.down is not None
    assert (row.start, row.stop) == (region.offsets[made.down], region.ends[made.down])
    assert (column.start, column.stop) == (region.offsets[made.across], region.ends[made.across])


def test_an_axis_that_is_not_cut_is_neither_drawn_nor_fixed(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [4, 6, 2], ["0:2, :, :", "2:4, :, :"])
    made = grid(ckpt, None)
    assert (made.down, made.across, made.fixed) == (None, 0, {})


def test_holders_are_the_chunks_that_hold_the_cell(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [4, 4], ["0:4, 0:2", "0:2, 2:4", "1:4, 1:4"])
    made = grid(ckpt, Box((1, 1), (3, 1)))
    layout = ckpt.tensors["w"].tiling
    for row, cells in zip(made.rows, made.holders, strict=True):
        for column, held in zip(made.columns, cells, strict=True):
            assert held == layout.touching(
                Box((row.start, column.start), (row.stop - row.start, column.stop - column.start))
            )


@pytest.mark.parametrize("shape", [[], [4, 4, 1]], ids=["scalar", "chunks of another rank"])
def test_there_is_no_grid_without_axes_to_compare(tmp_path: Path, shape: list[int]) -> None:
    ckpt = opened(tmp_path, shape, ["(0,0)+(4,4)"] if shape else [""])
    assert make_grid(ckpt.tensors["w"], None) is None


def test_letters_go_on_behind_z(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [1, 30], [f"0:1, {i}:{i + 1}" for i in range(30)])
    made = make_grid(ckpt.tensors["w"], None, cells=40)
    assert made is not None
    letters = list(made.legend.values())
    assert (letters[0], letters[25], letters[26], letters[29]) == ("A", "Z", "AA", "AD")
    assert len(set(letters)) == 30


# ---------------------------------------------------------------- folding


@pytest.mark.parametrize("absent", [0, 1, 5, 17, 30, 31])
def test_more_than_eight_cells_are_folded_around_the_region(tmp_path: Path, absent: int) -> None:
    ckpt = opened(tmp_path, [128], [f"{4 * i}:{4 * i + 4}" for i in range(32) if i != absent])
    region = Box((4 * absent,), (4,))
    made = grid(ckpt, region)
    assert len(made.columns) <= CELL_LIMIT
    assert MapCell(4 * absent, 4 * absent + 4) in made.columns
    assert made.columns[0].start == 0
    assert made.columns[-1].stop == 128
    assert all(a.stop == b.start for a, b in zip(made.columns, made.columns[1:], strict=False))
    assert sum(cell.folded or 1 for cell in made.columns) == 32
    folded = [cell for cell in made.columns if cell.folded]
    assert folded
    strip = next(line for line in drawn(ckpt, region) if line.startswith("|"))
    for cell in folded:
        assert f"..{cell.folded}.." in strip
    assert "........" in strip


def test_eight_cells_are_not_folded(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [8], [f"{i}:{i + 1}" for i in range(8)])
    assert [cell.folded for cell in grid(ckpt, None).columns] == [0] * 8


def test_a_region_behind_the_folded_cells_keeps_its_carets_under_its_cell(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [128], [f"{4 * i}:{4 * i + 4}" for i in range(32) if i != 20])
    lines = drawn(ckpt, Box((80,), (4,)))
    strip, marker = lines[3], lines[5]
    start, stop = marker.index("^"), marker.rindex("^") + 1
    assert strip[start:stop] == "." * (stop - start)
    assert strip[start - 1] == strip[stop] == "|"


# ---------------------------------------------------------------- width


CASES = {
    "strip": ([16, 8], [f"{2 * i}:{2 * i + 2}, :" for i in range(7)], Box((14, 0), (2, 8))),
    "vocabulary": (
        [128256, 4096],
        [f"{8016 * i}:{8016 * i + 8016}, :" for i in range(16) if i != 9],
        Box((72144, 0), (8016, 4096)),
    ),
    "vocabulary x hidden": (
        [128256, 16384],
        [
            f"{8016 * i}:{8016 * i + 8016}, {1024 * j}:{1024 * j + 1024}"
            for i in range(16)
            for j in range(16)
            if (i, j) != (9, 9)
        ],
        Box((72144, 9216), (8016, 1024)),
    ),
    "flat": (
        [7_000_000_000],
        [f"{437_500_000 * i}:{437_500_000 * i + 437_500_000}" for i in range(16) if i != 9],
        Box((3_937_500_000,), (437_500_000,)),
    ),
}


@pytest.mark.parametrize("ascii_only", [True, False], ids=["ascii", "unicode"])
@pytest.mark.parametrize("width", [60, 76, 120])
@pytest.mark.parametrize("case", CASES)
def test_no_line_is_wider_than_asked(tmp_path: Path, case: str, width: int, ascii_only: bool) -> None:
    shape, chunks, region = CASES[case]
    ckpt = opened(tmp_path, shape, chunks)
    lines = drawn(ckpt, region, ascii_only, width)
    assert [line for line in lines if len(line) > width] == []


def test_all_rows_of_a_map_are_equally_wide(tmp_path: Path) -> None:
    shape, chunks, region = CASES["vocabulary x hidden"]
    ckpt = opened(tmp_path, shape, chunks)
    rows = [line for line in drawn(ckpt, region, True, 120) if line.rstrip().endswith(("+", "|"))]
    assert len({len(line) for line in rows}) == 1
    assert len(rows) == 2 * len(grid(ckpt, region).rows) + 1


def test_a_legend_of_many_chunks_is_cut_with_their_number(tmp_path: Path) -> None:
    chunks = [f"{i}:{i + 1}, {j}:{j + 1}" for i in range(7) for j in range(7)]
    ckpt = opened(tmp_path, [7, 7], chunks)
    assert drawn(ckpt, None, True, 76)[-1] == "and 49 chunks in all"


def test_a_chunk_without_a_record_is_said_to_be_stored_nowhere(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [4], ["0:2", "2:4"], records=["__0_0.distcp 0:1600", ""])
    lines = drawn(ckpt, None)
    assert "|   A    |///B////|" in lines and lines[-2:] == ["A __0_0.distcp", "/ missing: B stored nowhere"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB"), (3000 * 2**40, "3,000.0 TiB")],
)
def test_bytes_for_humans(count: int, expected: str) -> None:
    assert human_bytes(count) == expected


@pytest.mark.parametrize(
    ("rows", "label"), [(8, "dim 0 x 4 (dp)"), (4, "dim 0")], ids=["shards", "experts by themselves"]
)
def test_only_shards_are_named_after_a_mesh_axis(rows: int, label: str) -> None:
    step = rows // 4
    offsets = np.array([[step * i, 0] for i in range(4)], np.int64)
    layout = Tiling((rows, 6), offsets, np.array([[step, 6]] * 4, np.int64))
    tensor = Tensor("w", "float32", (rows, 6), ChunkTable(layout, np.full(4, -1, np.int64)))
    ckpt = Checkpoint("here", "dcp", tensors={"w": tensor}, topology={"dp": AxisSize(4, "args")})
    made = make_grid(tensor, None)
    assert made is not None and axis_label(ckpt, made, 0) == label


def test_a_place_that_thousands_of_chunks_hold_is_drawn() -> None:
    made = Tiling((4, 4), np.zeros((3000, 2), np.int64), np.full((3000, 2), 4))
    tensor = Tensor("model.w", "float32", (4, 4), ChunkTable(made, np.full(3000, -1)))
    assert make_grid(tensor, Box((0, 0), (4, 4))).legend[2999] == "DKJ"


def test_all_chunks_that_a_finding_names_are_marked_and_of_an_overlap_the_region(tmp_path: Path) -> None:
    ckpt = opened(tmp_path / "a", [16], ["0:4", "4:8", "8:12", "12:16"])
    region = Box((0,), (4,))
    lines = draw(ckpt, grid(ckpt, region), region, True, 76, rows=[0, 2, 3])
    assert " ^^^^^^^^          ^^^^^^^^^^^^^^^^^ 12 elements, 48 B" in lines
    inside = Box((4,), (2,))
    ckpt = opened(tmp_path / "b", [16], ["0:16", "4:6"])
    lines = draw(ckpt, grid(ckpt, inside), inside, True, 76, rows=[0, 1])
    assert any(line.endswith("^ 2 elements, 8 B") for line in lines)
