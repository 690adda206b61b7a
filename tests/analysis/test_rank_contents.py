"""Who holds what, on files that the real libraries wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import REAL

from ckptlint.analysis.ranks.contents import CELL_STATES, Column, RankContents, rank_contents_of
from ckptlint.comparing.sides import open_side
from ckptlint.testing import load_folder, write_checkpoint


def held(path: Path) -> RankContents:
    (side,) = open_side(str(path), files=True, partial=True)
    return rank_contents_of(side.ckpt)


def cells(found: RankContents, name: str) -> dict[Column, str]:
    row = found.names.index(name)
    own = range(found.starts[row], found.starts[row + 1])
    return {found.columns[found.column[at]]: CELL_STATES[found.state[at]] for at in own}


def test_stacked_layers_are_told_apart_by_their_offsets() -> None:
    found = held(REAL / "megatron_tp2_pp2" / "iter_0000010")
    layers = {name: {c.layer for c in cells(found, name) if c.place == "layer"} for name in found.names}
    assert layers == {"rank 0": {0}, "rank 1": {0}, "rank 2": {1}, "rank 3": {1}}
    assert Column("model", "embedding") in cells(found, "rank 0")
    assert {Column("model", "head"), Column("exp_avg", "rest"), Column("master", "rest")} <= cells(
        found, "rank 3"
    ).keys()
    assert found.files[0] == ["__0_0.distcp", "__0_1.distcp"]


def test_bytes_of_model_and_optimizer_add_up() -> None:
    found = held(REAL / "fsdp2_4r")
    assert found.names == [f"rank {rank}" for rank in range(4)]
    assert (found.model + found.optimizer <= found.size).all()
    (side,) = open_side(str(REAL / "fsdp2_4r"), files=True)
    assert found.size.sum() == side.ckpt.total_bytes
    of_model = [name.startswith("model.") for name in side.ckpt.records.fqns]
    assert found.model.sum() == side.ckpt.records.byte_length[np.array(of_model)[side.ckpt.records.fqn]].sum()
    assert not found.lost and not found.out_of_balance.any() and not found.without()


def test_a_file_that_is_gone_is_missing_in_each_of_its_parts() -> None:
    found = held(REAL / "distcp_missing")
    assert cells(found, "rank 2") == {Column("model", "layer", "layers", 1): "missing"}
    assert found.size[2] == -1 and found.factor[2] == 1
    assert found.lost == [(2, "__2_0.distcp", CELL_STATES.index("missing"))]
    assert [found.names[row] for row in np.flatnonzero(found.out_of_balance)] == ["rank 0"]  # it has both layers


def test_rows_that_two_chunks_hold() -> None:
    found = held(REAL / "overlap_one_row")
    assert cells(found, "rank 1") == {Column("model", "layer", "layers", 1): "stored twice"}
    assert cells(found, "rank 2") == {Column("model", "layer", "layers", 1): "there"}


def test_a_lost_file_of_an_export_is_known_by_its_index(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "exports" / "ok_llama_sharded", tmp_path / "c"))
    (folder / "model-00003-of-00007.safetensors").unlink()
    found = held(folder)
    assert cells(found, "model-00003-of-00007.safetensors") == {Column("model", "layer", "layers", 0): "missing"}
    assert not found.out_of_balance.any()  # its files are cut by size


@pytest.mark.parametrize(
    ("name", "row", "file"),
    [
        ("rank_files/broken_verl_lost_model", "rank 1", "model_world_size_2_rank_1.pt"),
        ("deepspeed/broken_lost_optimizer", "dp_1,mp_0", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_lost_rank_file_is_missing_what_its_kind_holds(name: str, row: str, file: str) -> None:
    found = held(REAL / name)
    assert found.lost == [(found.names.index(row), file, CELL_STATES.index("missing"))]
    assert "missing" in cells(found, row).values()


def test_layers_without_a_moment_and_a_large_rank(tmp_path: Path) -> None:
    tensors: dict[str, dict[str, object]] = {}
    for layer, rank in enumerate((0, 1, 2, 3)):
        for moment in ("", "exp_avg")[: 1 if layer == 3 else 2]:
            key = f"optimizer.state.exp_avg.layers.{layer}.w" if moment else f"layers.{layer}.w"
            start = 4000 * bool(moment)
            tensors[key] = {"shape": [4, 4], "records": [f"__{rank}_0.distcp {start}:{start + 1700}"]}
    write_checkpoint({"tensors": tensors, "files": {"__1_0.distcp": 12_000}}, tmp_path)
    found = rank_contents_of(load_folder(tmp_path))
    assert found.without() == {"exp_avg": [Column("model", "layer", "layers", 3)]}
    assert np.flatnonzero(found.out_of_balance).tolist() == [1]  # rank 3 is of another kind
    assert found.factor[1] == pytest.approx(12_000 / 5_700)


def test_a_chunk_that_no_record_holds() -> None:
    found = held(REAL / "storage_without_chunk")
    assert found.unfiled == 0


def test_files_of_one_rank_are_in_order_of_the_ranks(tmp_path: Path) -> None:
    cut = [f"{i}:{i + 1}" for i in range(12)]
    write_checkpoint({"tensors": {"w": {"shape": [12], "chunks": cut}}}, tmp_path)
    assert rank_contents_of(load_folder(tmp_path)).ranks.tolist() == [*range(12)]


@pytest.mark.parametrize("chunks", [["-1:0, :"], ["0:2, :"]])
def test_layers_in_one_chunk_or_at_a_forged_offset_stay_a_stack(tmp_path: Path, chunks: list[str]) -> None:
    write_checkpoint({"tensors": {"decoder.layers.mlp.w": {"shape": [2, 4], "chunks": chunks}}}, tmp_path)
    assert rank_contents_of(load_folder(tmp_path)).columns == [Column("model", "stack", "decoder.layers")]
