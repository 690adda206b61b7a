"""`ckptlint show` of data that is lost, of ranks and of regions; `graph` of a chain."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import REAL
from test_commands import invoke

from ckptlint.errors import ConfigError
from ckptlint.testing import write_checkpoint

UP = "model.layers.1.mlp.up.weight"
W1 = "model.layers.0.feed_forward.w1.weight"


def shown(*arguments: object) -> list[str]:
    done = invoke("show", *arguments)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def described(path: Path) -> dict[str, Any]:
    (ckpt,) = json.loads(invoke("show", path, "--format", "json").output)["checkpoints"]
    return ckpt  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("fsdp2_4r", ["parameters: 2,412 (float32)", "model: float32 21 (9.4 KiB)",
                      "optimizer: float32 63 (18.9 KiB)"]),
        ("megatron_tp2_pp2/iter_0000010", ["args: layers 2, hidden size 8", "parameters: 2,088 (bfloat16)"]),
        ("exports/ok_llama", ["config.json: type llama, layers 2, hidden size 16, vocabulary 24",
                              "parameters: 5,072 (bfloat16)"]),
        ("exports/ok_tied_and_stored", ["config.json: type llama, layers 2, hidden size 16, vocabulary 24",
                                        "parameters: 4,688 (bfloat16)", "model: bfloat16 21 (9.9 KiB)"]),
        ("exports/ok_llama_tied", ["config.json: type llama, layers 2, hidden size 16, vocabulary 24",
                                   "parameters: 4,688 (bfloat16)", "model: bfloat16 20 (9.2 KiB)"]),
        ("exports/ok_ema", ["config.json: type llama, layers 2, hidden size 16, vocabulary 24",
                            "parameters: 5,072 (bfloat16)", "ema: bfloat16 21 (9.9 KiB)"]),
        ("adapters/lora", ["adapter_config.json: type LORA, r 4, alpha 8", "parameters: 1,632 (float32)",
                           "adapter: float32 24 (6.4 KiB)"]),
        ("deepspeed/z1_bf16_4r", ["parameters: 469 (bfloat16)", "model: bfloat16 9 (938 B)"]),
        ("deepspeed/z3_bf16_4r", ["parameters: 469 (bfloat16 168, float32 301)"]),
        ("deepspeed/universal_z3", ["parameters: 469 (float32, the optimizer's master copies)"]),
        ("frameworks/lightning/last.ckpt", ["parameters: 10 (float32)", "model: float32 2 (40 B)"]),
        ("quantised_exports/ct_fp8", ["config.json: type llama, layers 2, hidden size 32, vocabulary 32",
                                      "parameters: 20,640 (bfloat16 2,208, float8_e4m3fn 18,432)"]),
        ("quantised_exports/wide", ["config.json: type llama, layers 2, hidden size 32, vocabulary 32",
                                    "parameters: 20,640 (bfloat16)"]),
        ("quantised_exports/bnb_nf4", ["config.json: type llama, layers 2, hidden size 32, vocabulary 32",
                                       "parameters: 2,208 (bfloat16, 14 packed weights not counted)"]),
    ],
)  # fmt: skip
def test_it_begins_with_what_it_is_and_counts_each_weight_once(name: str, begins: list[str]) -> None:
    lines = [line.strip() for line in shown(REAL / name)]
    start = next(i for i, line in enumerate(lines) if line.startswith(("parameters", "args", "config", "adapter_")))
    assert lines[start : start + len(begins)] == begins


def test_values_that_are_cheap_to_read_are_shown() -> None:
    values = described(REAL / "fsdp2_4r")["values"]
    assert values["train.step"] == [10] and values["lr"] == [0.0003] and values["train.tokens"] == [81920]
    values = described(REAL / "deepspeed/z1_bf16_4r")["values"]
    assert values["weight_decay"] == [0.1, 0.0] and values["betas"] == [[0.9, 0.999]]
    assert described(REAL / "frameworks/lightning/last.ckpt")["values"]["global_step of last.ckpt"] == [4]
    assert described(REAL / "megatron_tp2_pp2/iter_0000010")["values"]["iteration"] == [10]
    ckpt = described(REAL / "exports/ok_llama")
    assert ckpt["description"]["type"] == "llama" and ckpt["parameters"]["by_dtype"] == {"bfloat16": 5072}


def test_an_entry_that_is_damaged_or_gone_is_no_value(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "async_save", tmp_path / "c"))
    assert described(folder)["values"] == {"step": [10]}
    for file in folder.glob("*.distcp"):
        file.write_bytes(b"Z" * file.stat().st_size)
    assert described(folder)["values"] == {}
    for file in folder.glob("*.distcp"):
        file.unlink()
    assert described(folder)["values"] == {}


def test_a_tree_joins_equal_layers_whatever_the_order_of_their_keys(tmp_path: Path) -> None:
    names = ["h.0.up.weight", "h.0.down.weight", "h.1.down.weight", "h.1.up.weight"]
    folder = write_checkpoint({"tensors": {name: {"shape": [4]} for name in names}}, tmp_path / "c")
    assert any("h.{0-1}  4 tensors" in line for line in shown(folder, "--tree"))


def test_a_key_that_is_not_there_is_told_with_the_one_that_ends_so() -> None:
    for key in ("q_proj.weight", "embed_tokens.weigth", "embed_tokens.weight[0:2]"):
        with pytest.raises(ConfigError, match=r"did you mean model\."):
            raise invoke("show", REAL / "exports/ok_llama", key).exception


@pytest.mark.parametrize(
    ("name", "count"),
    [("model.layers.{0-1}.attention.wk.weight", 2), ("model.layers.{1}.attention.w*.weight", 4),
     ("model.layers.{2-9}.*", 0),     ("optimizer.state.layers.{0-1}.attention.wk.weight.*", 6),
     ("model.layers.{0,1}.{0}.*", 0), ("model.{x}", 0)],
)  # fmt: skip
def test_a_name_as_the_table_folds_it_can_be_asked_for(name: str, count: int) -> None:
    if not count:
        with pytest.raises(ConfigError, match="no tensor of"):
            raise invoke("show", REAL / "fsdp2_4r", name).exception
    else:
        done = invoke("show", REAL / "fsdp2_4r", name, "--format", "json")
        assert len(json.loads(done.output)["checkpoints"][0]["tensors"]) == count


# ---------------------------------------------------------------- the table of tensors


@pytest.mark.parametrize(
    "name",
    [
        "megatron_0.19_tp2/iter_0000010", "megatron_moe_ep2_dp2/iter_0000010", "fsdp2_4r", "deepspeed/z2_bf16_4r",
        "exports/ok_qwen3_next", "exports/ok_longcat_flash", "adapters/lora_experts", "lookalikes/galore",
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [[], ["--tree"], ["*"]])
def test_what_is_shown_fits_80_columns_but_for_whole_names(
    name: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.replace(str(REAL), "") for line in shown(REAL / name, *options)]
    assert [line for line in lines if len(line) > 80 and "  " in line.strip("│├└─ ")] == []
    assert not any("..." in line for line in lines)


def test_moments_scalars_and_layers_are_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(REAL / "fsdp2_4r")
    assert "optimizer.state.*.weight.step                   21 x []       1        4 B" in lines
    row = lines.index("optimizer.state.layers.{0-1}.attention.wk.weight.*") + 1
    assert lines[row].split() == ["2", "x", "[6,", "12]", "4", "(3x1)", "288", "B"]
    assert "* is exp_avg or exp_avg_sq; of scalars, a parameter" in lines
    assert any(
        re.fullmatch(r"optimizer\.state\.\*\.layers\.\{1-2\}\.down\.weight\n +float32 +3 x \[77\] +1 to 2 +308 B", pair)
        for pair in map("\n".join, pairwise(shown(REAL / "deepspeed/z2_bf16_4r")))
    )
    assert "each tensor is one chunk" in shown(REAL / "exports/ok_llama")


def test_moments_that_are_not_there_for_all_are_named(tmp_path: Path) -> None:
    names = ["optimizer.state.exp_avg.a", "optimizer.state.exp_avg_sq.a", "optimizer.state.exp_avg.b.0"]
    folder = write_checkpoint({"tensors": {name: {"shape": [4]} for name in names}}, tmp_path / "c")
    assert any(line.startswith("optimizer.state.*.a ") and " 2 x [4] " in line for line in shown(folder))
    assert any(line.startswith("optimizer.state.exp_avg.b.0 ") for line in shown(folder))
    (folder / ".metadata").unlink()
    names += ["optimizer.state.exp_avg.b.1", "optimizer.state.exp_avg_sq.b.0"]
    folder = write_checkpoint({"tensors": {name: {"shape": [4]} for name in names}}, tmp_path / "d")
    rows = [line.split()[0] for line in shown(folder) if " [4] " in line and line.startswith("optim")]
    assert rows == ["optimizer.state.*.a", "optimizer.state.exp_avg.b.{0-1}", "optimizer.state.exp_avg_sq.b.0"]


def test_a_name_that_no_shortening_fits_has_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "a.layers." + ".".join(f"{word}_projection" for word in ("first", "second", "third")) + ".weight"
    twins = [f"b.{'x' * 20}{middle}{'y' * 60}" for middle in ("one", "two")]
    shape = {"shape": [1] * 12}
    folder = write_checkpoint({"tensors": dict.fromkeys([long, "a.117.w", *twins], shape)}, tmp_path / "c")
    lines = shown(folder)
    at = lines.index(long)
    assert lines[at + 1].startswith(" ") and lines[at + 1].split()[0] == "[1,"
    assert any(line.startswith("a.117.w  ") for line in lines)
    assert len({line for line in lines if line.startswith("b.xx")}) == 2


# ---------------------------------------------------------------- lost chunks


@pytest.mark.parametrize(
    ("name", "cell", "legend"),
    [
        ("distcp_missing", "///C////", "  / missing: C __2_0.distcp"),
        ("storage_past_eof", "%%%B%%%%", "  % cut: B __1_0.distcp"),
        ("storage_negative", "///B////", "  / missing: B __1_0.distcp"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--ascii"], ["--color", "always"]])
def test_a_chunk_whose_bytes_are_lost_is_hatched(name: str, cell: str, legend: str, options: list[str]) -> None:
    lines = shown(REAL / name, UP, *options)
    if "always" in options:
        assert any(f"\x1b[31;1m{cell}\x1b[0m" in line for line in lines)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert legend in lines and any(cell in line for line in lines)
    assert "  1 record " + legend[4:].split(":")[0] + "; --ranks shows whose" in lines


def test_the_map_is_of_the_part_that_is_lost_and_a_healthy_one_has_no_marks(tmp_path: Path) -> None:
    cut = [f"{4 * i}:{4 * i + 4}, :" for i in range(64)]
    folder = write_checkpoint({"tensors": {"w": {"shape": [256, 4], "chunks": cut}}}, tmp_path / "c")
    assert not re.search(r"[/%!]{2}|missing|not known", "\n".join(shown(folder, "w")).replace(str(folder), ""))
    (folder / "__40_0.distcp").unlink()
    lines = shown(folder, "w", "--ascii")
    assert any("///" in line for line in lines)
    assert lines[-1].endswith(" __40_0.distcp") and lines[-1].startswith("  / missing: ")


def test_a_checksum_is_compared_at_depth_data(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(REAL / "edit_base", tmp_path / "c"))
    (folder / "__2_0.distcp").write_bytes(b"Z" * (folder / "__2_0.distcp").stat().st_size)
    assert not any("!!" in line for line in shown(folder, UP))
    assert "  ! failed: C __2_0.distcp" in shown(folder, UP, "--depth", "data")
    (chunks,) = (
        tensor["layout"]
        for tensor in json.loads(invoke("show", folder, UP, "--depth", "data", "--format", "json").output)[
            "checkpoints"
        ][0]["tensors"]
    )
    assert [chunk["state"] for chunk in chunks] == ["there", "there", "failed", "there"]


# ---------------------------------------------------------------- --ranks


def test_one_row_for_ranks_that_hold_the_same() -> None:
    lines = shown(REAL / "distcp_missing", "--ranks", "--ascii")
    assert [line.split() for line in lines if line.startswith("rank")][:3] == [
        ["rank", "0", "##", "3.7", "KiB", "100%", "0%"],
        ["ranks", "1,3", ".#", "1.7", "KiB", "100%", "0%"],
        ["rank", "2", "./", "missing"],
    ]
    assert lines[-2:] == ["missing of rank 2: __2_0.distcp", "rank 0 has 2.2 times the median size of its kind"]


def test_tables_below_each_other_name_their_columns() -> None:
    """Where one line is too narrow for the names of all columns; sizes stand beside the last."""
    lines = shown(REAL / "megatron_tp2_pp2/iter_0000010", "--ranks", "--ascii")
    heads = [line.split() for line in lines if "others" in line]
    assert heads == [
        ["embedding", "layers", "0-1", "norms", "head", *["others"] * 4],
        ["others", "size", "model", "optim"],
    ]
    rows = [line.split() for line in lines if line.startswith("rank 2")]
    assert rows == [["rank", "2", ".", ".#", *"######"], ["rank", "2", "#", "86.6", "KiB", "17%", "67%"]]


@pytest.mark.parametrize(
    "name",
    [
        "megatron_tp2_pp2/iter_0000010", "megatron_moe_ep2_dp2/iter_0000010", "fsdp2_4r", "exports/ok_mixtral",
        "empty_state", "deepspeed/pipe_pp2_dp2_z1", "rank_files/verl_fsdp2_4r", "per_rank_metadata_missing_rank",
    ],
)  # fmt: skip
def test_rows_fit_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = invoke("show", REAL / name, "--ranks")
    lines = done.output.replace(str(REAL / name), "").splitlines()
    assert done.exit_code == 0 and max(map(len, lines)) <= 80


def test_ranks_of_one_size_are_one_sentence_and_no_option_points_at_itself(tmp_path: Path) -> None:
    sizes = {rank: 3400 if rank in (1, 4) else 1700 for rank in range(7)}
    records = [f"__{rank}_0.distcp 0:{size}" for rank, size in sizes.items()]
    chunks = [f"{2 * rank}:{2 * rank + 2}" for rank in sizes]
    folder = write_checkpoint({"tensors": {"w": {"shape": [14], "chunks": chunks, "records": records}}}, tmp_path / "c")
    (folder / "__6_0.distcp").unlink()
    lines = shown(folder, "--ranks", "--ascii")
    assert "ranks 1,4 have 2.0 times the median size of their kind" in lines
    assert "  1 record missing" in lines


def test_many_ranks_and_layers_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tensors: dict[str, object] = {}
    end = dict.fromkeys(range(64), 0)
    for layer in range(80):
        ranks = [layer // 10 * 8 + i for i in range(8)]
        for key in (f"layers.{layer}.w", f"optimizer.state.exp_avg.layers.{layer}.w")[: 1 if 30 <= layer < 40 else 2]:
            records = [f"__{rank}_0.distcp {end[rank]}:{end[rank] + 1700}" for rank in ranks]
            tensors[key] = {"shape": [16], "chunks": [f"{2 * i}:{2 * i + 2}" for i in range(8)], "records": records}
            end |= {rank: end[rank] + 1700 for rank in ranks}
    folder = write_checkpoint({"tensors": tensors}, tmp_path / "c")
    (folder / "__13_0.distcp").unlink()
    lines = shown(folder, "--ranks", "--ascii")
    rows = [line.split("  ")[0] for line in lines if line.startswith("rank")]
    assert rows == ["ranks 0-7", "ranks 8-12,14-15", "rank 13", *(f"ranks {8 * i}-{8 * i + 7}" for i in range(2, 8))]
    (stage,) = (line for line in lines if line.startswith("ranks 24-31"))
    assert "##" in stage.split()[2] and set(stage.split()[3]) == {"."}  # no moments
    assert lines[-2:] == ["missing of rank 13: __13_0.distcp", "no exp_avg for layers 30-39"]
    assert max(map(len, lines)) <= 80


def test_the_matrix_as_json() -> None:
    found = json.loads(invoke("show", REAL / "distcp_missing", "--ranks", "--format", "json").output)
    ranks = found["checkpoints"][0]["ranks"]
    assert ranks["columns"][1] == {"section": "model", "place": "layer", "block": "layers", "layer": 1}
    assert ranks["rows"][2]["cells"] == {"missing": [1]} and ranks["rows"][2]["bytes"] is None
    assert ranks["lost"] == [{"row": 2, "file": "__2_0.distcp", "state": "missing"}]


@pytest.mark.parametrize("options", [[UP, "--ranks"], ["--tree", "--ranks"], [f"{UP}[0]", "--tree"]])
def test_what_does_not_go_together_is_one_sentence(options: list[str]) -> None:
    error = invoke("show", REAL / "edit_base", *options).exception
    assert isinstance(error, ConfigError) and ": leave out the " in str(error)


# ---------------------------------------------------------------- regions


@pytest.mark.parametrize(
    ("slices", "region", "ranks"),
    [
        ("[4:12]", "[4:12, 0:8]", "12"), ("[-4:, 2:]", "[12:16, 2:8]", "3"), ("[7]", "[7:8, 0:8]", "1"),
        ("[-1]", "[15:16, 0:8]", "3"), ("[:, -2:]", "[0:16, 6:8]", "0123"), ("[..., 0:3]", "[0:16, 0:3]", "0123"),
        ("[5, ...]", "[5:6, 0:8]", "1"), ("[...]", "[0:16, 0:8]", "0123"),
    ],
)  # fmt: skip
def test_slices_as_python_writes_them(slices: str, region: str, ranks: str) -> None:
    lines = shown(REAL / "edit_base", UP + slices)
    assert any(line.startswith(f"{UP} {region}  float32") for line in lines)
    assert [line.split()[-3] for line in lines if line.endswith("  there")] == [*ranks]


@pytest.mark.parametrize(
    ("slices", "sentence"),
    [
        ("[16]", "16 is outside dim 0 of {}, which has 16 elements"),
        ("[0:20]", "0:20 is outside dim 0 of {}, which has 16 elements"),
        ("[-17:]", "-17: is outside dim 0 of {}, which has 16 elements"),
        ("[:, 3:3]", "3:3 is an empty slice of dim 1 of {}, which has 8 elements"),
        ("[::2]", "[::2] is not a slice"),
        ("[1, 2, 3]", "{} has 2 dims, and [1, 2, 3] has 3"),
        ("[]", "[] is not a slice"),
    ],
)
def test_slices_that_do_not_fit(slices: str, sentence: str) -> None:
    error = invoke("show", REAL / "edit_base", UP + slices).exception
    assert isinstance(error, ConfigError) and str(error).startswith(sentence.format(UP))


def test_what_of_a_region_is_lost_or_in_no_chunk() -> None:
    assert "nobody holds [6:9, 0:12]: 36 elements" in shown(REAL / "fsdp2_4r_hole", f"{W1}[5:10, :]")
    lines = shown(REAL / "distcp_missing", f"{UP}[4:10]")
    assert lines[-1] == "not to be loaded: [8:10, 0:8], 16 elements"
    assert any(re.fullmatch(r"\[8:10, 0:8\] +\[8:12, 0:8\] +__2_0.distcp +2 +0-1,704 +missing", line) for line in lines)
    done = invoke("show", REAL / "distcp_missing", f"{UP}[4:10]", "--format", "json")
    (found,) = json.loads(done.output)["checkpoints"]
    assert found["region"]["lost"] == [[[8, 10], [0, 8]]] and found["region"]["chunks"] == [1, 2]
    assert [found["tensors"][0]["layout"][row]["state"] for row in found["region"]["chunks"]] == ["there", "missing"]


def test_chunks_that_do_not_fit_their_tensor_have_no_regions() -> None:
    error = invoke("show", REAL / "rank_mismatch", f"{UP}[0:4]").exception
    assert isinstance(error, ConfigError) and "do not fit its shape: run `ckptlint" in str(error)


def test_a_glob_with_a_class_stays_a_glob(tmp_path: Path) -> None:
    folder = write_checkpoint({"tensors": {name: {"shape": [4]} for name in ("w", "w0", "w1")}}, tmp_path / "c")
    lines = shown(folder, "w[01]")
    assert sum(line.startswith(("w0  ", "w1  ")) for line in lines) >= 1
    assert any(line.startswith("w [0:1]  ") for line in shown(folder, "w[0:1]"))


# ---------------------------------------------------------------- graph


def test_a_graph_that_is_a_chain_says_so() -> None:
    done = invoke("graph", REAL / "distcp_missing", UP, "--format", "mermaid")
    assert f"{UP} is cut on dim 0 alone: its graph is a chain of 4 intervals" in done.output
    assert "8:12<br/>__2_0<br/>missing" in done.output
    done = invoke("graph", REAL / "edit_base", "model.layers.0.mlp.up.weight")
    assert "is not cut: its graph is one interval" in done.output
    assert "chain" not in invoke("graph", REAL / "ep2_epshard2", UP).output
