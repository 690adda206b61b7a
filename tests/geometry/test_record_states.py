"""What is known of the bytes of each record, on files that the real libraries wrote and that were damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import REAL

import ckptlint
from ckptlint.comparing.sides import open_side
from ckptlint.depth import Depth
from ckptlint.geometry.record_states import STATES, chunk_states, record_states
from ckptlint.model import Checkpoint
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import default_reading

UP = "model.layers.1.mlp.up.weight"


def opened(path: Path, depth: Depth = Depth.FILES) -> Checkpoint:
    (side,) = open_side(str(path), files=depth.looks_at_files, partial=True)
    return read_payload(side.folder, side.ckpt, default_reading(depth)) if depth.opens_records else side.ckpt


def of_chunks(ckpt: Checkpoint, key: str) -> list[str]:
    return [STATES[state] for state in chunk_states(ckpt, ckpt.tensors[key])]


def states(ckpt: Checkpoint) -> set[str]:
    return {STATES[state] for state in np.unique(record_states(ckpt))}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("edit_base", ["there"] * 4),
        ("distcp_missing", ["there", "there", "missing", "there"]),
        ("path_absolute", ["there", "missing", "there", "there"]),
        ("storage_past_eof", ["there", "cut", "there", "there"]),
        ("storage_too_short", ["there", "cut", "there", "there"]),
        ("storage_negative", ["there", "missing", "there", "there"]),
        ("gap_middle", ["there"] * 3),
    ],
)
def test_what_is_lost_of_a_tensor(name: str, expected: list[str]) -> None:
    assert of_chunks(opened(REAL / name), UP) == expected


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_4r", "zstd", "safetensors_mode", "threads_per_rank", "hf_sharded", "flat_1d", "plain_dtypes",
        "ep2_epshard2", "megatron_tp2_pp2/iter_0000010", "megatron_0.10/iter_0000010", "megatron_legacy/tp2_pp2",
        "exports/ok_llama_sharded", "rank_files/verl_hsdp_4r", "deepspeed/z3_bf16_4r", "deepspeed/pipe_pp2_dp2_z1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", [Depth.FILES, Depth.DATA])
def test_nothing_is_lost_of_what_is_healthy(name: str, depth: Depth) -> None:
    for side in open_side(str(REAL / name), files=True, partial=True):
        ckpt = opened(Path(side.ckpt.path), depth)
        assert states(ckpt) <= {"there"}, name
        assert all("there" in of_chunks(ckpt, key) or not len(ckpt.tensors[key].chunks) for key in ckpt.tensors)


def test_files_that_nobody_looked_at_are_not_checked() -> None:
    assert states(opened(REAL / "fsdp2_4r", Depth.METADATA)) == {"not checked"}


@pytest.mark.parametrize(
    ("name", "file", "by"),
    [("safetensors_mode", "__2_0.distcp", 1500), ("zstd", "__1_0.distcp", 8), ("fsdp2_4r", "__3_0.distcp", 1)],
)
def test_a_file_that_was_cut(tmp_path: Path, name: str, file: str, by: int) -> None:
    folder = Path(shutil.copytree(REAL / name, tmp_path / "c"))
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:-by])
    ckpt = opened(folder)
    cut = record_states(ckpt) == STATES.index("cut")
    assert {ckpt.files.names[number] for number in ckpt.records.file[cut].tolist()} == {file}
    assert states(ckpt) == {"there", "cut"}


def test_a_flipped_byte_fails_at_depth_data_alone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "c"))
    ckpt = opened(folder, Depth.DATA)
    row = int(ckpt.tensors[UP].chunks.record[2])
    file = ckpt.byte_range_of(row)[0]
    assert ckpt.payload is not None
    with (folder / file).open("r+b") as stream:
        stream.seek(int(ckpt.payload.start[row]) + 5)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    assert of_chunks(opened(folder), UP) == ["there"] * 4
    assert of_chunks(opened(folder, Depth.DATA), UP) == ["there", "there", "failed", "there"]


def test_a_record_of_other_bytes_is_unreadable_at_depth_headers(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "c"))
    size = (folder / "__2_0.distcp").stat().st_size
    (folder / "__2_0.distcp").write_bytes(b"Z" * size)
    assert of_chunks(opened(folder, Depth.HEADERS), UP) == ["there", "there", "failed", "there"]


def test_the_state_of_a_chunk_without_a_record() -> None:
    ckpt = ckptlint.load(REAL / "no_chunks")
    assert isinstance(ckpt, Checkpoint)
    assert of_chunks(ckpt, UP) == []
