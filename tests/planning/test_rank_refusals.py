"""Plans of per-rank torch files, which their loaders reshard nowhere."""

from __future__ import annotations

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
