"""`ckptlint plan` as users run it: verdicts, exit codes, the three outputs, nonsense and hostile input."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import REAL, run

import ckptlint
from ckptlint.errors import BudgetError, CheckpointError, ConfigError, NothingToCheckError
from ckptlint.planning.reads import ReadBudget
from ckptlint.testing import write_checkpoint


def planned(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = run("plan", *arguments, "--format", "json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_json_has_each_rank_and_adds_up() -> None:
    code, found = planned(REAL / "fsdp2_4r", "--to", "dp=3,tp=2")
    assert (code, found["schema"], found["verdict"], found["world"]) == (0, "ckptlint.plan/1", "loads", 6)
    assert [item["rank"] for item in found["ranks"]] == [*range(6)]
    for name in ("needed_bytes", "read_bytes", "requests"):
        assert found["totals"][name] == sum(item[name] for item in found["ranks"])
    assert found["totals"]["read_bytes"] > found["totals"]["needed_bytes"]
    most = max(item["read_bytes"] for item in found["ranks"])
    assert found["worst_ranks"] == [item["rank"] for item in found["ranks"] if item["read_bytes"] == most]
    assert {name for item in found["ranks"] for name in item["files"]} == {f"__{rank}_0.distcp" for rank in range(4)}
    assert set(found["written_bytes"]) == set("0123")
    assert any("tp cuts" in item["sentence"] for item in found["guessed"])
    assert found["constraints"] == found["missing"] == found["unexpected"] == []


def test_needed_bytes_are_those_of_the_tensors() -> None:
    """Of a job with one rank: all elements once, and the objects."""
    ckpt = ckptlint.load(REAL / "plain_dtypes")
    plan = ckptlint.plan(REAL / "plain_dtypes", "dp=1")
    objects = sum(int(ckpt.records.byte_length[item.record]) for item in ckpt.byte_objects)
    from ckptlint.vocabulary.dtypes import nbytes

    sizes = [nbytes(tensor.dtype, tensor.volume) for tensor in ckpt.tensors.values()]
    known = sum(size for size in sizes if size is not None)
    unknown = [t for t, size in zip(ckpt.tensors.values(), sizes, strict=True) if size is None]
    whole = sum(int(ckpt.records.byte_length[t.chunks.record].sum()) for t in unknown)
    assert int(plan.cost.needed[0]) == known + whole + objects


def test_safetensors_are_read_in_slices() -> None:
    plan = ckptlint.plan(REAL / "hf_sharded", "dp=3")
    assert plan.cost.amplification == 1.0


def test_a_hole_is_lost_and_not_refused() -> None:
    code, found = planned(REAL / "fsdp2_4r_hole", "--to", "dp=2")
    assert (code, found["verdict"]) == (1, "loads")
    (item,) = found["constraints"]
    assert item["effect"] == "drops"
    assert set(item["keys"]) == {f"model.layers.{layer}.feed_forward.w1.weight" for layer in (0, 1)}


def test_a_hole_beside_an_overlap_of_its_size_is_seen() -> None:
    code, found = planned(REAL / "overlap_and_gap_same_volume", "--to", "dp=1")
    assert code == 1
    assert [item["effect"] for item in found["constraints"]] == ["drops"]


def test_files_that_are_not_there_fail_the_load() -> None:
    code, found = planned(REAL / "distcp_missing", "--to", "dp=2")
    assert (code, found["verdict"]) == (1, "fails")
    assert "FileNotFoundError" in found["constraints"][0]["sentence"]


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes there")
@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path)]
)
def test_what_is_no_readable_file_fails_the_load_too(tmp_path: Path, make: Callable[[Path], None]) -> None:
    step = Path(shutil.copytree(REAL / "edit_base", tmp_path / "step-1"))
    (step / "__1_0.distcp").unlink()
    make(step / "__1_0.distcp")
    code, found = planned(step)
    assert (code, found["verdict"]) == (1, "fails")


def test_nodes_of_a_shared_disk() -> None:
    code, found = planned(REAL / "fsdp2_4r", "--to", "dp=4", "--ranks-per-node", "2")
    assert code == 0
    for node in found["nodes"]:
        low, high = node["ranks"]
        of_ranks = {name for item in found["ranks"][low : high + 1] for name in item["files"]}
        assert set(node["files"]) == of_ranks and node["absent"] == []
    assert [node["ranks"] for node in found["nodes"]] == [[0, 1], [2, 3]]


def test_each_node_has_only_what_it_wrote() -> None:
    code, found = planned(REAL / "fsdp2_4r", "--from-nodes", "2")
    assert (code, found["verdict"], found["world"]) == (1, "fails", 4)
    assert [set(node["absent"]) for node in found["nodes"]] == [{"__2_0.distcp", "__3_0.distcp"}, {"__1_0.distcp"}]
    weights = [key for key in found["astray"] if key.startswith("model.")]
    assert not weights  # each rank reads its own part of every weight; steps lie with one rank alone
    assert "optimizer.state.norm.weight.step" in found["astray"]


def test_one_node_has_all() -> None:
    code, found = planned(REAL / "fsdp2_4r", "--from-nodes", "1")
    assert (code, found["astray"], found["nodes"][0]["absent"]) == (0, [], [])


def test_memory_is_compared_with_the_rank_that_needs_the_most() -> None:
    for memory, code, word in (
        ("80GiB", 0, "\nFits: rank 0 needs 32.1 KiB of 80.0 GiB"),
        ("32.2 KiB", 0, "\nFits: rank 0 needs 32.1 KiB of 32.2 KiB"),
        ("32 kB", 1, "\nLoads, but does not fit: rank 0 needs 32.1 KiB of 31.2 KiB"),
    ):
        done = run("plan", REAL / "fsdp2_4r", "--to", "dp=2", "--memory", memory)
        assert done.returncode == code and word in done.stdout and done.stdout.count(" needs 32.1 KiB") == 1
        found = planned(REAL / "fsdp2_4r", "--to", "dp=2", "--memory", memory)
        assert found[0] == code and found[1]["memory"]["fits"] is not bool(code)
    lost = run("plan", REAL / "fsdp2_4r_hole", "--to", "dp=2", "--memory", "1 B").stdout
    assert "Loads, but loses something" in lost and "\nDoes not fit: rank 0 needs " in lost


@pytest.mark.usefixtures("warm_ranks")
def test_other_shapes_are_a_table_with_whole_names(tmp_path: Path) -> None:
    file, page = tmp_path / "job.py", tmp_path / "plan.html"
    name = "model.layers.{}.a_module_with_a_long_name.another_with_a_long_name.weight_of_it"
    tensors = {name.format(i): {"shape": [8, 4]} for i in range(3)} | {"w": {"shape": [4]}}
    folder = write_checkpoint({"tensors": tensors}, tmp_path / "step")
    names = [*tensors]
    file.write_text(f"import torch\ndef state():\n    return {{name: torch.zeros(5, 4) for name in {names}}}\n")
    done = run("plan", folder, "--to", f"{file}:state", "--world", "1", "--html", page)
    lines = done.stdout.splitlines()
    start = lines.index("With a different shape: 4 tensors")
    assert lines[start + 1].split() == ["key", "stored", "wanted"]
    assert name.format("{0-2}") in lines[start + 2 :]
    assert [re.split("  +", line)[-2:] for line in lines if "  [5, 4]" in line] == [
        ["[8, 4]", "[5, 4]"],
        ["[4]", "[5, 4]"],
    ]
    text = page.read_text(encoding="utf-8")
    assert "<th>wanted</th>" in text and '<td class="key" data-name="stored">[8, 4]</td>' in text


def test_quiet_leaves_out_a_pass_and_what_ranks_read() -> None:
    for path, code in (("fsdp2_4r", 0), ("fsdp2_4r_hole", 1)):
        plain, quiet, silent = (run("plan", REAL / path, "--to", "dp=2", *o) for o in ([], ["-q"], ["-qq"]))
        assert {plain.returncode, quiet.returncode, silent.returncode} == {code} and silent.stdout == ""
        assert bool(quiet.stdout) == bool(code) and "GiB" not in quiet.stdout
        assert len(quiet.stdout) < len(plain.stdout)


def test_text_fits_a_terminal() -> None:
    for arguments in (["--to", "dp=64,tp=4,pp=2"], ["--from-nodes", "2"], ["--to", "dp=5", "--nodes", "3"]):
        done = run("plan", REAL / "fsdp2_4r", *arguments)
        assert done.stderr == ""
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert " the most: " in done.stdout


def test_ranks_that_read_the_same_are_one_row_and_none_reads_the_most(tmp_path: Path) -> None:
    folder = write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4", "4:8"]}}}, tmp_path / "step")
    said = run("plan", folder, "--to", "dp=2").stdout
    table = said.partition("\nby bytes read ")[2].partition("\n\n")[0].splitlines()
    assert [line.partition("  ")[0] for line in table[2:]] == ["least, median, most (rank 0)", "all 2"]
    assert "All ranks read the same amount: " in said


def test_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    name = "<script>alert(1)</script>"
    folder = write_checkpoint({"tensors": {name: {"shape": [8], "chunks": ["0:4"]}}}, tmp_path / "step")
    done = run("plan", folder, "--to", "dp=300", "--html", page)
    assert done.returncode == 1
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert text.count("<svg") == 1 and text.count("<title>") <= 65
    assert "Loads, but loses something" in text and "<li>&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--to", "dp=0"], "dp=0 is not the size"),
        (["--to", "dp=99999,tp=99999"], "at most"),
        (["--to", "zz=3"], "there is no axis 'zz'"),
        (["--to", "dp=4", "--world", "5"], "dp=4 has 4 ranks, but --world is 5"),
        (["--to", "dp=4", "--nodes", "3", "--ranks-per-node", "3"], "do not make the 4 ranks"),
        (["--to", "job.py:f"], "for how many ranks"),
        (["--to", "job.py:f", "--world", "2"], "there is no file job.py"),
        (["--to", "job.py:f", "--mesh", "dp=2,dp=2"], "is not a mesh"),
        (["--to", "job.py:f", "--mesh", "dp=2", "--world", "3"], "but --world is 3"),
        (["--to", "job.py:f", "--world", "99999"], "1 to 4,096 ranks"),
        (["--to", "job.py:1f", "--world", "2"], "is not a function"),
        (["--to", "dp=2", "--memory", "lots"], "memory is 'lots'"),
        (["--mesh", "dp=2"], "--mesh needs a function"),
    ],
)
def test_nonsense_is_one_sentence(arguments: list[str], why: str) -> None:
    done = run("plan", REAL / "fsdp2_4r", *arguments)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.startswith("ckptlint: ") and done.stderr.count("\n") == 1
    assert why in done.stderr


@pytest.mark.parametrize("name", ["metadata_malicious", "metadata_truncated", "metadata_is_json", "metadata_missing"])
def test_what_cannot_be_read_is_refused(name: str) -> None:
    done = run("plan", REAL / name, "--to", "dp=2")
    assert done.returncode == 1
    assert done.stdout == "" and "Traceback" not in done.stderr
    with pytest.raises(CheckpointError):
        ckptlint.plan(REAL / name, "dp=2")


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", sorted(path.name for path in REAL.iterdir() if path.is_dir()))
def test_every_checkpoint_gets_an_answer(name: str) -> None:
    """A plan or one sentence, whatever is wrong."""
    try:
        plan = ckptlint.plan(REAL / name, "dp=3,tp=2,pp=2")
    except (CheckpointError, ConfigError, NothingToCheckError) as error:
        assert "\n" not in str(error)
    else:
        assert plan.exit_code in (0, 1) and len(plan.cost.kind) == 12


def test_one_metadata_file_per_rank_ties_a_checkpoint_to_its_ranks() -> None:
    found = {world: ckptlint.plan(REAL / "per_rank_metadata", f"dp={world}") for world in (1, 2, 4, 5)}
    assert {world: (plan.verdict, plan.exit_code) for world, plan in found.items()} == {
        1: ("loads", 1),
        2: ("loads", 1),
        4: ("loads", 0),
        5: ("fails", 1),
    }
    assert found[1].constraints[0].keys == ("model.up.weight", "model.head.weight")


@pytest.mark.slow
def test_torch_passes_over_what_other_ranks_described() -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    wanted = {"model": {"up": {"weight": torch.full((10, 8), 77.0)}}}
    dcp.load(wanted, checkpoint_id=REAL / "per_rank_metadata", no_dist=True)
    stays = (wanted["model"]["up"]["weight"] == 77).all(dim=1)
    assert stays.tolist() == [False] * 3 + [True] * 7


def test_nothing_there(tmp_path: Path) -> None:
    assert run("plan", tmp_path, "--to", "dp=2").returncode == 3


def test_a_spent_budget_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.planning.verdict.ReadBudget", lambda: ReadBudget(pairs=3))
    with pytest.raises(BudgetError, match="plan fewer ranks"):
        ckptlint.plan(REAL / "fsdp2_4r", "dp=4")


# ---------------------------------------------------------------- functions of users

FUNCTIONS = """
import os
import sys


def raises(mesh):
    raise ValueError("no such layer \\x1b[31m")


def a_number():
    return 3


def needs_a_gpu():
    import torch

    torch.cuda.synchronize()


def leaves():
    sys.exit(3)


def ends():
    os._exit(7)


def fails_at_one():
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has no data")
    return {}


def runs_on():
    while True:
        pass


def prints():
    print("x" * 1_000_000)
    print("y" * 1_000_000, file=sys.stderr)
    return {}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "job.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            "raises",
            ["raised an error", 'job.py:7 in raises: raise ValueError("no such layer', "no such layer \\x1b[31m"],
        ),
        ("a_number", ["returned int, not a dict"]),
        ("needs_a_gpu", ["raised an error", "job.py:17 in needs_a_gpu"]),
        ("leaves", ["called exit(3)"]),
        ("ends", ["ended with exit code 7"]),
        ("fails_at_one", ["run for rank 1 of 2, raised an error", "RuntimeError: rank 1 has no data"]),
        ("nothing", ["raised an error", "AttributeError"]),
    ],
)
@pytest.mark.usefixtures("warm_ranks")
def test_a_function_that_fails_gets_a_sentence_and_its_own_error(file: Path, function: str, why: list[str]) -> None:
    done = run("plan", REAL / "plain_dtypes", "--to", f"{file}:{function}", "--world", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr
    for text in why:
        assert text in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_a_function_that_does_not_end_is_ended(file: Path) -> None:
    done = run("plan", REAL / "plain_dtypes", "--to", f"{file}:runs_on", "--world", "2", "--timeout", "2")
    assert done.returncode == 2
    assert "did not finish within 2 s" in done.stderr


@pytest.mark.slow
def test_what_a_function_prints_is_not_the_answer(file: Path) -> None:
    done = run("plan", REAL / "plain_dtypes", "--to", f"{file}:prints", "--world", "2", "--format", "json")
    assert done.returncode == 1 and done.stderr == ""  # it asks for nothing
    found = json.loads(done.stdout)
    assert found["form"] == "exact" and len(found["unexpected"]) == 42
    assert found["constraints"][0]["sentence"] == "no rank asks for the model"


def test_a_function_is_run_only_when_it_is_named(tmp_path: Path, real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("fsdp2_4r")
    (folder / "job.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')")
    assert run("plan", folder, "--to", "dp=2", cwd=folder).returncode == 0
    assert not (tmp_path / "was_here").exists()
