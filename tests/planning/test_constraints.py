"""What Megatron-Core refuses in another layout: held against real loads, and rule by rule on small checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import REAL, REPOSITORY, SWEEP, bench, run_script, swept

import ckptlint
from ckptlint.planning.megatron import constraints, form_of
from ckptlint.planning.outcome import Constraint
from ckptlint.testing import load_folder, write_checkpoint

EVIDENCE = REPOSITORY / "bench" / "evidence"

DRIVEN = ["reshardable tp2 to dp2", "buckets dp1 to dp2", "buckets pp2 to pp2 vpp2"]
"""Pairs of bench/evidence/megatron_loads.py that are driven here; the others were, by several versions."""
ALSO_DRIVEN = ["reshardable vocabulary grows with tp", "experts ep2 to ep1 without rng"]


def step_of(name: str) -> Any:
    """A real checkpoint of the fixtures."""
    return ckptlint.load(str(next((REAL / name).glob("iter_*"))))


def said(found: list[Constraint], *effects: str) -> list[str]:
    """The sentences of these effects."""
    return [one.sentence for one in found if one.effect in effects]


# ---------------------------------------------------------------- real loads


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes by pair, of the megatron-core that is installed."""
    for package in ("torch", "megatron.core", "einops", "psutil"):
        pytest.importorskip(package, reason=f"real loads need {package}")
    out = tmp_path_factory.mktemp("resharding")
    names = [*DRIVEN, *(ALSO_DRIVEN if SWEEP else ())]
    ended = run_script(EVIDENCE / "megatron_loads.py", out, *names, folder=tmp_path_factory.mktemp("said"))
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {"folder": out, **json.loads((out / "outcomes.json").read_text())}


@pytest.mark.ci
@pytest.mark.parametrize("name", [*DRIVEN, *swept(*ALSO_DRIVEN)])
def test_a_real_load_does_what_was_said(driven: dict[str, Any], name: str) -> None:
    compare = bench("evidence/megatron_compare")
    row = driven["pairs"][name]
    assert "unsaved" not in row
    folder = driven["folder"] / name.replace(" ", "_") / "iter_0000010"
    found = compare.foretold(folder, row["loaded"], driven["version"])
    assert compare.disagreements(row, found) == []


@pytest.mark.ci
def test_the_comparison_sees_both_ways_of_being_wrong(driven: dict[str, Any]) -> None:
    compare = bench("evidence/megatron_compare")
    loads, raises = (driven["pairs"][name] for name in ("buckets dp1 to dp2", "buckets pp2 to pp2 vpp2"))
    assert not loads["raised"] and raises["raised"]
    assert compare.disagreements(raises, []) and compare.disagreements(loads, [Constraint("fails", "it does")])
    assert compare.disagreements(driven["pairs"]["reshardable tp2 to dp2"], [])  # random states are left out


# ---------------------------------------------------------------- real files


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("megatron_tp2_pp2", "dp_reshardable"),
        ("megatron_tp2_dp2_fully_reshardable", "fully_reshardable"),
        ("megatron_moe_ep2_dp2", "dp_reshardable"),
        ("megatron_0.12_dp2", "fully_sharded_model_space"),
        ("megatron_0.19_tp2", None),
    ],
)
def test_forms_of_real_checkpoints(name: str, form: str | None) -> None:
    assert form_of(step_of(name)) == form


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("megatron_tp2_pp2", {"tp": 2, "pp": 2}),
        ("megatron_tp2_dp2_fully_reshardable", {"tp": 2, "dp": 2}),
        ("megatron_tp2_dp2_fully_reshardable", {"tp": 2, "dp": 8}),
        ("megatron_moe_ep2_dp2", {"ep": 2, "dp": 4}),
        ("megatron_moe_ep2_dp2", {"ep": 2, "dp": 8}),
        ("megatron_0.12_dp2", {"dp": 16}),
    ],
)
def test_nothing_stands_against_the_layout_that_saved(name: str, layout: dict[str, int]) -> None:
    found = constraints(step_of(name), layout)
    assert said(found, "fails", "drops") == []
    assert "nothing that Megatron-Core checks prevents a load into" in found[-1].sentence


def test_what_is_given_up_is_no_loss() -> None:
    ckpt = step_of("megatron_tp2_pp2")
    layout = {"tp": 1, "dp": 4}
    stopped = constraints(ckpt, layout)
    assert said(stopped, "fails") == [
        "the optimizer state (dp_reshardable) loads only into the tp and pp that saved it (tp 2 to 1, pp 2 to 1): "
        "save again in the old layout, with --dist-ckpt-optim-fully-reshardable"
    ]
    assert [one.keys for one in stopped if one.effect == "drops"] == [("rng_state",)]
    assert all("optimizer" in key for key in stopped[0].keys) and len(stopped[0].keys) > 10
    without = constraints(ckpt, layout, frozenset({"optim", "rng"}))
    assert said(without, "fails", "drops") == []
    assert said(without, "note")[:2] == [
        "the optimizer and the learning rate schedule start anew (--no-load-optim)",
        "every rank keeps the random states that it was seeded with (--no-load-rng)",
    ]


def test_what_only_some_versions_refuse_is_a_note_until_the_version_is_named() -> None:
    ckpt = step_of("megatron_0.12_dp2")
    assert said(constraints(ckpt, {"dp": 4}), "fails") == []
    assert said(constraints(ckpt, {"dp": 4}), "note")[0].startswith("with megatron-core 0.15 and later: the optimizer")
    assert said(constraints(ckpt, {"dp": 4}, reader=(0, 14)), "fails") == []
    assert len(said(constraints(ckpt, {"dp": 4}, reader=(0, 16)), "fails")) == 1
    exits = said(constraints(ckpt, {"tp": 2}, reader=(0, 13)), "fails")
    assert [sentence.rpartition(": ")[2] for sentence in exits[-1:]] == ["Megatron-LM exits without --no-load-rng"]


def test_without_optimizer_state() -> None:
    ckpt = step_of("megatron_0.19_tp2")
    assert said(constraints(ckpt, {"tp": 2}), "fails") == [
        "it holds no optimizer state: Megatron-LM loads it only with --no-load-optim or --finetune"
    ]
    assert said(constraints(ckpt, {"tp": 2}, frozenset({"optim"})), "fails", "drops") == []
    assert "common.pt" in said(constraints(ckpt, {"tp": 2}, frozenset({"optim"}), (0, 18)), "fails")[0]


# ---------------------------------------------------------------- rule by rule

ARGS = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "data_parallel_size": 4,
    "world_size": 16,
    "num_layers": 8,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "make_vocab_size_divisible_by": 8,
    "vocab_size": 30,
}
WEIGHTS = {"embedding.word_embeddings.weight": {"shape": [32, 4], "chunks": ["0:16, :", "16:32, :"]}}
OPTIMIZER = {"optimizer.state.param.embedding.word_embeddings.weight": {"shape": [32, 4], "chunks": [":, :"]}}
RANDOM = [f"rng_state/shard_{pipeline}.{tensor}_2.2" for pipeline in (0, 1) for tensor in (0, 1)]


def made(folder: Path, args: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A checkpoint of TP 2, PP 2, DP 4 with these arguments beside the usual ones."""
    common: dict[str, Any] = {"args": ARGS | (args or {}), "checkpoint_version": 3.0}
    common["content_metadata"] = {"distrib_optim_sharding_type": changes.pop("form", "fully_reshardable")}
    table = {"tensors": WEIGHTS | OPTIMIZER, "objects": RANDOM, "megatron": True, "common": common} | changes
    return load_folder(write_checkpoint(table, folder))


SAME = {"tp": 2, "pp": 2, "dp": 4}


@pytest.mark.parametrize(
    ("to", "args", "sentence"),
    [
        ({"tp": 3}, {}, "8 attention heads do not divide by tp 3"),
        ({"tp": 4}, {"num_query_groups": 6}, "6 query groups do not divide by tp 4"),
        ({"tp": 4}, {"ffn_hidden_size": 50}, "the 50 rows of a feed-forward layer do not divide by tp 4"),
        ({"tp": 4, "vpp": 3}, {}, "8 layers do not divide by pp 2 with vpp 3, unless the job names an uneven cut"),
        ({"pp": 3}, {}, "8 layers do not divide by pp 3, unless the job names an uneven cut"),
        ({"pp": 1, "vpp": 2}, {}, "virtual stages (vpp 2) need more than one pipeline stage"),
        ({"ep": 2}, {}, "the model has no experts for ep 2"),
        ({"ep": 4}, {"num_experts": 6}, "6 experts do not divide by ep 4"),
        ({"ep": 16, "etp": 1}, {"num_experts": 16}, "a pipeline stage has 8 ranks, which cannot hold ep 16 x etp 1"),
        ({"etp": 5, "dp": 5}, {"num_experts": 4}, "the 48 rows of an expert do not divide by etp 5"),
    ],
)
def test_what_does_not_divide(tmp_path: Path, to: dict[str, int], args: dict[str, Any], sentence: str) -> None:
    assert sentence in said(constraints(made(tmp_path, args), SAME | to), "fails")


@pytest.mark.parametrize(
    ("to", "args"),
    [
        ({"tp": 1, "dp": 8}, {}),
        ({"tp": 8, "pp": 1}, {"ffn_hidden_size": 64}),
        ({"pp": 8}, {}),
        ({"pp": 4, "vpp": 2}, {}),
        ({"cp": 2, "dp": 2}, {}),
        ({"pp": 4}, {"group_query_attention": False, "num_query_groups": 1}),
        ({"ep": 4, "etp": 1}, {"num_experts": 8, "expert_model_parallel_size": 2}),
    ],
)
def test_what_divides(tmp_path: Path, to: dict[str, int], args: dict[str, Any]) -> None:
    assert said(constraints(made(tmp_path, args), SAME | to, reader=(0, 19)), "fails") == []


def test_an_uneven_cut_of_the_layers_is_not_judged(tmp_path: Path) -> None:
    ckpt = made(tmp_path, {"decoder_first_pipeline_num_layers": 3})
    found = constraints(ckpt, SAME | {"pp": 3})
    assert said(found, "fails") == []
    assert [one.guessed for one in found if "unevenly" in one.sentence] == [True]


@pytest.mark.parametrize(
    ("tp", "args", "note"),
    [
        (2, {}, ""),
        (1, {}, ""),
        (
            4,
            {"vocab_size": 33},
            "pads the vocabulary to 64 rows, not 40: 24 more rows of padding, and no token",
        ),
        (
            1,
            {"vocab_size": 20},
            "pads the vocabulary to 24 rows, not 32: 8 fewer rows of padding, and no token",
        ),
        (4, {"vocab_size": None}, ""),
        (8, {"vocab_size": None}, "pads the vocabulary to a multiple of 64 rows (now 32)"),
    ],
)
def test_padding_of_the_vocabulary(tmp_path: Path, tp: int, args: dict[str, Any], note: str) -> None:
    rows = 40 if args.get("vocab_size") == 33 else 32
    weights = {"embedding.word_embeddings.weight": {"shape": [rows, 4], "chunks": [":, :"]}}
    found = constraints(made(tmp_path, args, tensors=weights | OPTIMIZER), SAME | {"tp": tp})
    about = [one for one in found if "pads the vocabulary" in one.sentence]
    assert [note in one.sentence for one in about] == ([True] if note else [])
    assert all(one.effect == "note" for one in about)


@pytest.mark.parametrize(
    ("shape", "to", "reader", "effects"),
    [
        ("2.2", SAME, (0, 19), []),
        ("2.2", SAME | {"ep": 2}, (0, 16), ["fails"]),
        ("2.2", SAME | {"ep": 2}, (0, 17), []),
        ("2.2.4", SAME | {"ep": 2}, (0, 16), []),
        ("2.2.4", SAME | {"ep": 2, "dp": 8}, (0, 16), ["fails"]),
        ("2.2.4", SAME | {"ep": 2}, (0, 17), ["fails"]),
        ("2.2.4", SAME | {"ep": 2}, None, []),
        ("2.2", SAME | {"tp": 1}, (0, 19), ["drops"]),
        ("2.2", SAME | {"tp": 1}, (0, 13), ["fails"]),
    ],
)
def test_the_grid_of_random_states(
    tmp_path: Path, shape: str, to: dict[str, int], reader: tuple[int, int] | None, effects: list[str]
) -> None:
    places = product(*(range(int(size)) for size in shape.split(".")))
    objects = [f"rng_state/shard_{'.'.join(map(str, place))}_{shape}" for place in places]
    ckpt = made(tmp_path, {"num_experts": 4, "expert_model_parallel_size": 2}, objects=objects)
    found = constraints(ckpt, to, frozenset({"optim"}), reader)
    assert [one.effect for one in found if "random states" in one.sentence and one.effect != "note"] == effects


def test_random_states_that_are_missing(tmp_path: Path) -> None:
    assert len(said(constraints(made(tmp_path, objects=[]), SAME), "fails")) == 1
    assert said(constraints(made(tmp_path / "told", {"no_save_rng": True}, objects=[]), SAME), "fails") == []
    assert said(constraints(made(tmp_path / "moved", objects=[]), SAME | {"tp": 1}), "fails", "drops") == []


def test_a_release_needs_neither_optimizer_nor_random_states(tmp_path: Path) -> None:
    found = constraints(made(tmp_path / "release", tensors=WEIGHTS, objects=[]), SAME | {"tp": 1})
    assert said(found, "fails", "drops") == []
    assert said(found, "note")[0].startswith("Megatron-LM loads a release without optimizer")
    assert len(said(constraints(made(tmp_path / "iter_0000001", tensors=WEIGHTS, objects=[]), SAME), "fails")) == 2


def test_the_rerun_state_is_left_out(tmp_path: Path) -> None:
    objects = RANDOM + [f"rerun_state_machine_state/shard_{rank}_16" for rank in range(16)]
    ckpt = made(tmp_path, objects=objects)
    assert not [one for one in constraints(ckpt, SAME) if "rerun" in one.sentence]
    [note] = [one for one in constraints(ckpt, SAME | {"dp": 2}) if "rerun" in one.sentence]
    assert (note.effect, note.keys) == ("note", ("rerun_state_machine_state",))


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_"


@pytest.mark.parametrize(
    ("sizes", "args", "to", "effects"),
    [
        ([50_000_000, 30_000_000], {}, {"dp": 8}, []),
        ([50_000_000, 30_000_000], {}, {"dp": 128}, ["fails"]),
        ([50_000_000], {}, {"dp": 128}, []),
        ([30_000_000], {}, {"dp": 128}, []),
        ([50_000_000, 30_000_000], {"overlap_grad_reduce": False}, {"dp": 128}, []),
        ([50_000_000, 30_000_000], {"ddp_bucket_size": 40_000_000}, {"dp": 128}, ["note"]),
    ],
)
def test_buckets_that_grow_with_the_ranks(
    tmp_path: Path, sizes: list[int], args: dict[str, Any], to: dict[str, int], effects: list[str]
) -> None:
    tensors = {f"{BUCKET}{i}.param": {"shape": [size], "chunks": [f"0:{size}"]} for i, size in enumerate(sizes)}
    form = {"form": "dp_reshardable", "tensors": WEIGHTS | tensors}
    ckpt = made(tmp_path, {"overlap_grad_reduce": True} | args, **form)
    found = constraints(ckpt, SAME | to)
    assert [one.effect for one in found if "buckets" in one.sentence] == effects


def test_arguments_that_are_missing(tmp_path: Path) -> None:
    table = {"tensors": WEIGHTS | OPTIMIZER, "megatron": True, "common": {}}
    found = constraints(load_folder(write_checkpoint(table, tmp_path)), SAME)
    assert said(found, "fails", "drops") == []
    assert [
        one.guessed for one in found if "holds no arguments of the job: ckptlint did not judge" in one.sentence
    ] == [True]
    assert any(one.sentence.startswith("with megatron-core 0.15: the checkpoint holds no arguments") for one in found)


def test_every_constraint_that_keeps_a_load_from_working_has_a_source(tmp_path: Path) -> None:
    ckpt = made(tmp_path, {"num_experts": 6})
    found = constraints(ckpt, {"tp": 3, "pp": 3, "vpp": 2, "ep": 4, "etp": 5})
    assert len(found) > 5
    assert all(one.source for one in found if one.effect != "note")
    assert [one.effect for one in found] == sorted((one.effect for one in found), key="fails drops note".index)


# ---------------------------------------------------------------- the whole plan


@pytest.mark.parametrize(
    ("to", "options", "exit_code"),
    [
        ("tp=2,pp=2", {}, 0),
        (None, {}, 0),
        ("tp=2,pp=2,dp=4", {}, 0),
        ("tp=1,dp=4", {}, 1),
        ("tp=1,dp=4", {"give_up": ["optim"]}, 1),
        ("tp=1,dp=4", {"give_up": ["optim", "rng"]}, 0),
        ("tp=1,dp=4", {"give_up": ["optim"], "megatron": "0.13"}, 1),
    ],
)
def test_a_plan_of_a_megatron_checkpoint(to: str | None, options: dict[str, Any], exit_code: int) -> None:
    plan = ckptlint.plan(REAL / "megatron_tp2_pp2", to, **options)
    assert plan.exit_code == exit_code
    read = "optim" not in options.get("give_up", [])
    whole = ckptlint.plan(REAL / "megatron_tp2_pp2", to)
    assert read == (plan.cost.needed.tolist() == whole.cost.needed.tolist())


def test_experts_over_tensor_ranks() -> None:
    """EP 4 and ETP 1 on the ranks of TP 4: each rank reads a quarter of the experts."""
    plan = ckptlint.plan(REAL / "megatron_moe_ep2_dp2", "tp=4,ep=4,etp=1", give_up=["optim", "rng"])
    assert plan.world == 4 and not plan.missing
    with pytest.raises(ckptlint.ConfigError, match="ep=8 x etp=1 does not divide the 4 ranks of dp, cp and tp"):
        ckptlint.plan(REAL / "megatron_moe_ep2_dp2", "tp=4,ep=8,etp=1")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fsdp2_4r", {"give_up": ["optim"]}, "are for checkpoints of Megatron-Core only"),
        ("megatron_tp2_pp2", {"give_up": ["data"]}, "a load can leave out optim and rng, not 'data'"),
        ("megatron_tp2_pp2", {"megatron": "new"}, "is not a version of megatron-core"),
    ],
)
def test_what_makes_no_sense(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ckptlint.ConfigError, match=says):
        ckptlint.plan(REAL / name, "tp=1,dp=2", **options)


def test_a_file_that_is_cut_short_does_not_load(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("fsdp2_4r")
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])
    plan = ckptlint.plan(folder, "dp=8")
    assert plan.verdict == "fails" and "cut short" in plan.constraints[0].sentence
