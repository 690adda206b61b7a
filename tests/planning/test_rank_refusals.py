"""Plans of per-rank torch files, which their loaders reshard nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import REAL

import ckptlint
from ckptlint.errors import ConfigError


@pytest.mark.parametrize(
    ("save", "to", "refused"),
    [
        ("rank_files/verl_fsdp2_4r", "dp=4", ""),
        ("rank_files/verl_fsdp2_4r", "dp=2", "4 ranks saved, the job has 2"),
        ("rank_files/verl_tp2_fsdp2", "dp=2,tp=2", ""),
        ("deepspeed/z2_bf16_4r", "dp=4", ""),
        ("deepspeed/z2_bf16_4r", "dp=2", "4 data-parallel ranks saved, the job has 2"),
        ("deepspeed/z3_fp32_2r", "dp=4", "2 data-parallel ranks saved, the job has 4"),
        ("deepspeed/z0_fp32_2r", "dp=8", ""),
        ("deepspeed/universal_z1", "dp=8", ""),
        ("deepspeed/tp2_dp2_z1", "dp=2,tp=2", ""),
        ("megatron_legacy/tp2", "tp=2", ""),
        ("megatron_legacy/tp2_dp2_distributed", "tp=2,dp=4", ""),
        ("megatron_legacy/tp2", "dp=2", "tp 2 to 1"),
        ("megatron_legacy/pp2_vpp2", "pp=2", "vpp 2 to 1"),
        ("megatron_legacy/ep2", "ep=4,dp=4", "ep 2 to 4"),
    ],
)
def test_another_layout_is_refused_where_the_loader_refuses_it(save: str, to: str, refused: str) -> None:
    made = ckptlint.plan(REAL / save, to)
    told = [item.sentence for item in made.constraints if item.effect == "fails"]
    assert made.exit_code == int(bool(refused))
    assert len(told) == int(bool(refused))
    assert refused in "".join(told)


def test_a_function_is_not_asked_for_what_its_planner_does_not_load() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed\.checkpoint does not load"):
        ckptlint.plan(REAL / "rank_files" / "verl_fsdp2_4r", "job.py:state_dict", world=4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved", [1, 2, 3, 4, 8])
def test_states_of_each_dp_rank_are_for_as_many_ranks(saved: int, tmp_path: Path) -> None:
    """torchtitan's dataloaders: each data parallel rank saves where its data stood, and none is resharded."""
    torch, dcp = pytest.importorskip("torch"), pytest.importorskip("torch.distributed.checkpoint")
    loaders = {f"dp_rank_{rank}": bytes([rank]) * 8 for rank in range(saved)} | {"world_size": saved}
    dcp.save({"model": {"w": torch.ones(8, 8)}, "dataloader": loaders}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    for ranks in (1, 2, 3, 4, 8):
        asked = [f"dp={ranks}", *([f"dp={ranks // 2},dp_replicate=2"] if ranks % 2 == 0 else [])]
        for to in [*asked, f"dp={ranks},tp=2"]:
            made = ckptlint.plan(tmp_path / "step-5", to)
            said = [item.sentence for item in made.constraints if item.effect == "fails"]
            assert (made.exit_code, len(said)) == ((0, 0) if ranks == saved else (1, 1)), (to, said)
            assert ranks == saved or re.search(f"the job has {ranks}|(is|are) dropped", said[0]), (to, said)


@pytest.mark.parametrize(
    ("save", "to", "lost"),
    [
        ("energon/whole", "dp=2", ""),
        ("energon/larger_job", "dp=2", ""),  # ranks 2 and 3 are of a job before
        ("ranks/automodel", "dp=4", ""),
        ("ranks/prime_rl", "dp=2", ""),  # one file of each rank of the job, which may share their data
        ("energon/whole", "dp=1", "the job has 1: 1 position dropped"),
        ("energon/whole", "dp=4", "the job has 4: other ranks begin anew"),
        ("ranks/automodel", "dp=2", "the job has 2: 2 positions dropped"),
    ],
)
def test_files_of_each_dp_rank_are_for_as_many_ranks(save: str, to: str, lost: str) -> None:
    """Megatron-Bridge#5637: files of Energon's dataloaders lie beside the steps."""
    made = ckptlint.plan(REAL / "frameworks" / save, to)
    told = [item.sentence for item in made.constraints if item.effect == "drops" and "their data" in item.sentence]
    assert len(told) == int(bool(lost))
    assert lost in "".join(told)
