"""`show`, `diff`, `graph` on checkpoints that the real libraries wrote, healthy and broken; completion."""

from __future__ import annotations

import json
import os
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from click.testing import CliRunner, Result
from support import REAL, manifest, run, run_python

import ckptlint
from ckptlint.commands import main as cli
from ckptlint.commands.graph import GRAPH_FORMATS, as_dot, as_mermaid, drawing
from ckptlint.comparing.differences import differences
from ckptlint.errors import ConfigError
from ckptlint.model import Checkpoint, FileTable
from ckptlint.testing import write_checkpoint

HEALTHY = [row["path"] for row in manifest(REAL) if row["verdict"] == "healthy"]
READABLE = [
    row["path"]
    for row in manifest(REAL)
    if not any(code in row["codes"] for code in ("SAF", "COM001")) and row["path"] != "rank_mismatch"
]
UNREADABLE = ["metadata_malicious", "metadata_truncated", "metadata_missing", "metadata_is_json"]
UP = "model.layers.1.mlp.up.weight"
W1 = "model.layers.0.feed_forward.w1.weight"
EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


def invoke(*arguments: str | Path) -> Result:
    """A command in this process; an error of ckptlint stays an exception."""
    return CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def written(folder: Path, **tensors: dict[str, Any]) -> Path:
    """A checkpoint of these tensors."""
    write_checkpoint({"tensors": tensors}, folder)
    return folder


# ---------------------------------------------------------------- what all of them refuse


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("command", ["show", "graph", "diff", "diff-new"])
def test_unsafe_or_unreadable_input_is_exit_1_with_a_sentence(command: str, name: str) -> None:
    arguments = {
        "show": ["show", REAL / name],
        "graph": ["graph", REAL / name, UP],
        "diff": ["diff", REAL / name, REAL / "edit_base"],
        "diff-new": ["diff", REAL / "edit_base", REAL / name],
    }[command]
    done = run(*arguments)
    assert done.returncode == 1
    assert not done.stdout
    assert "Traceback" not in done.stderr and f"ckptlint: {REAL / name}: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "nowhere"], 3),
        (["diff", "nowhere", str(REAL / "edit_base")], 3),
        (["graph", "nowhere", UP], 3),
        (["show", str(REAL / "edit_base"), "nothing*"], 2),
        (["show", str(REAL / "edit_base"), "--tree", "--format", "json"], 2),
        (["graph", str(REAL / "edit_base"), "nothing"], 2),
        (["graph", str(REAL / "edit_base"), UP, "--dim", "2"], 2),
        (["graph", str(REAL / "rank_mismatch"), UP], 2),
        (["graph", str(REAL / "edit_base"), UP, "--format", "png"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert not done.stdout and done.stderr


def test_a_name_that_is_not_there_brings_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=f"did you mean {UP}"):
        CliRunner().invoke(cli.cli, ["graph", str(REAL / "edit_base"), UP[6:]], catch_exceptions=False)


# ---------------------------------------------------------------- show


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", READABLE)
def test_show_has_everything_that_the_loader_read(name: str) -> None:
    loaded = ckptlint.load(REAL / name)
    assert isinstance(loaded, Checkpoint)
    (shown,) = json.loads(invoke("show", REAL / name, "--format", "json").output)["checkpoints"]
    tensors = {item["fqn"]: (item["dtype"], tuple(item["shape"]), item["chunks"]) for item in shown["tensors"]}
    assert tensors == {t.fqn: (t.dtype, t.global_shape, len(t.chunks)) for t in loaded.tensors.values()}
    assert sum(item["shards"] for item in shown["objects"]) == len(loaded.objects)
    assert shown["entries"] == [entry.fqn for entry in loaded.byte_objects]
    assert shown["totals"]["bytes"] == loaded.total_bytes
    for options in ([], ["--tree"], ["*", "--ascii"]):
        text = invoke("show", REAL / name, *options)
        assert text.exit_code == (0 if loaded.tensors or options[:1] != ["*"] else 1), text.output


def test_show_folds_layers_and_names_how_tensors_are_cut() -> None:
    lines = invoke("show", REAL / "fsdp2_4r").output.splitlines()
    (line,) = (line for line in lines if line.startswith("model.layers.{0-1}.attention.wk.weight"))
    assert line.split()[1:] == ["[6,", "12]", "4", "(3x1)", "288", "B"]
    assert any("topology: world = 4 (files)" in line for line in lines)
    assert any(line.startswith("14 objects stored as bytes: ") for line in lines)


def test_tree_folds_layers_that_look_the_same(tmp_path: Path) -> None:
    shapes = {f"m.layers.{layer}.w": {"shape": [4, 4]} for layer in range(100)}
    shapes["m.layers.7.w"] = {"shape": [4, 2]}
    shapes["m.norm"] = {"shape": [4]}
    shown = invoke("show", written(tmp_path / "c", **shapes), "--tree", "--ascii").output
    assert "{0-6,8-99}.w  float32 [4, 4]  1 chunk  6.2 KiB  x 99" in shown
    assert "7.w  float32 [4, 2]  1 chunk  32 B" in shown
    assert len(shown.splitlines()) < 12


@pytest.mark.parametrize("name", ["a." * 2000 + "w", "a..b", ".", "7", "a\\x1b[31m"])
def test_tree_of_forged_names(tmp_path: Path, name: str) -> None:
    shown = invoke("show", written(tmp_path / "c", **{name: {"shape": [4]}, f"{name}.w": {"shape": [4]}}), "--tree")
    assert shown.exit_code == 0, shown.exception
    assert shown.output.count("float32 [4]") == 2


def test_a_glob_brings_chunk_maps_once_for_tensors_that_look_the_same() -> None:
    shown = invoke("show", REAL / "fsdp2_4r_hole", "*.w1.weight", "--ascii").output
    assert shown.count("dim 0 ->") == 1
    assert "|   A    |   B    |........|   C    |" in shown
    assert "the same for: model.layers.{0-1}.feed_forward.w1.weight" in shown
    (chunks,) = (
        item["layout"]
        for item in json.loads(invoke("show", REAL / "fsdp2_4r_hole", W1, "--format", "json").output)["checkpoints"][0][
            "tensors"
        ]
    )
    assert [(chunk["offsets"], chunk["file"]) for chunk in chunks] == [
        ([0, 0], "__0_0.distcp"),
        ([3, 0], "__1_0.distcp"),
        ([9, 0], "__3_0.distcp"),
    ]


def test_a_name_with_brackets_is_found_as_it_is(tmp_path: Path) -> None:
    folder = written(tmp_path / "c", **{"w[0]": {"shape": [4]}, "w0": {"shape": [4]}})
    assert "w[0]  float32" in invoke("show", folder, "w[0]").output


def test_show_of_partial_metadata_says_so() -> None:
    shown = invoke("show", REAL / "per_rank_metadata_missing_rank")
    assert (shown.exit_code == 0) == ("partial: " in shown.output)


# ---------------------------------------------------------------- diff


@pytest.mark.parametrize("name", HEALTHY)
def test_a_checkpoint_does_not_differ_from_itself(name: str) -> None:
    done = invoke("diff", REAL / name, REAL / name, "--layout")
    assert done.exit_code == 0, done.output
    assert "The same: " in done.output


def test_resharding_is_a_difference_of_layout_alone(tmp_path: Path) -> None:
    old = written(tmp_path / "old", w={"shape": [8, 4], "chunks": ["0:4, :", "4:8, :"]})
    new = written(tmp_path / "new", w={"shape": [8, 4], "chunks": [":, 0:2", ":, 2:4"]})
    assert invoke("diff", old, new).exit_code == 0
    done = invoke("diff", old, new, "--layout")
    assert done.exit_code == 1
    assert "  w  2 x 1 in 2 chunks -> 1 x 2 in 2 chunks" in done.output


def test_each_kind_of_difference_is_one_line_for_all_layers(tmp_path: Path) -> None:
    layers = range(100)
    base = {f"layers.{i}.{name}": {"shape": [4, 4]} for i in layers for name in ("a", "b", "c")}
    other = {
        **{f"layers.{i}.a": {"shape": [4, 2]} for i in layers},
        **{f"layers.{i}.b": {"shape": [4, 4], "dtype": "bfloat16"} for i in layers},
        **{f"module.layers.{i}.c": {"shape": [4, 4]} for i in layers},
        **{f"layers.{i}.d": {"shape": [2]} for i in layers},
    }
    old, new = written(tmp_path / "old", **base), written(tmp_path / "new", **other)
    done = invoke("diff", old, new)
    assert done.exit_code == 1
    for line in (
        "layers.{0-99}.a  [4, 4] -> [4, 2]",
        "layers.{0-99}.b  float32 -> bfloat16",
        "layers.{0-99}.c            float32 [4, 4]",
        "-> module.layers.{0-99}.c  float32 [4, 4]",
        "layers.{0-99}.d  float32 [2]",
    ):
        assert f"  {line}\n" in done.output
    assert len(done.output.splitlines()) <= 20
    listed = json.loads(invoke("diff", old, new, "--format", "json").output)
    assert len(listed["differences"]) == 400 and not listed["same"]
    assert {item["kind"] for item in listed["differences"]} == {"shape", "dtype", "renamed", "added"}


def test_moments_are_one_line_and_no_line_is_too_long() -> None:
    done = invoke("diff", REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole")
    assert "  optimizer.state.norm.weight.*                             float32 [12]\n" in done.output
    assert "  * is exp_avg or exp_avg_sq\n" in done.output
    assert max(map(len, done.output.split("\n\n", 1)[1].splitlines())) <= 80


def test_a_broken_copy_differs_in_its_layout() -> None:
    assert invoke("diff", REAL / "edit_base", REAL / "gap_middle").exit_code == 0
    done = invoke("diff", REAL / "edit_base", REAL / "gap_middle", "--layout")
    assert done.exit_code == 1
    assert f"{UP}  4 x 1 in 4 chunks -> 3 x 1 in 3 chunks" in done.output


def test_flattened_tensors_are_compared_by_their_elements() -> None:
    kinds = {
        item.kind
        for item in differences(
            {"": load("megatron_tp2_dp2_fully_reshardable/iter_0000010")}, {"": load("megatron_0.12_dp2/iter_0000010")}
        ).differences
    }
    assert kinds == {"renamed"}  # `param` was called `fp32_param`


def test_components_are_compared_by_their_names(tmp_path: Path) -> None:
    for step, shape in (("step-1", [4]), ("step-2", [8])):
        written(tmp_path / step / "model", w={"shape": shape})
        written(tmp_path / step / "optim", **{"optim.state.w.exp_avg": {"shape": [4]}})
    done = invoke("diff", tmp_path / "step-1", tmp_path / "step-2")
    assert done.exit_code == 1
    assert "  model/w  [4] -> [8]" in done.output
    assert "optim" not in done.output.split("\n\n", 1)[1]
    shutil.rmtree(tmp_path / "step-2" / "optim")
    assert "optim/optim.state.w.exp_avg" not in invoke("diff", tmp_path / "step-1", tmp_path / "step-1").output


def test_a_key_that_is_stored_as_something_else(tmp_path: Path) -> None:
    old, new = load("plain_dtypes"), load("plain_dtypes")
    entry = new.byte_objects[0]
    moved = replace(new.byte_objects[0], fqn="w")
    tensor = replace(next(iter(old.tensors.values())), fqn="w")
    found = differences(
        {"": replace(old, tensors=old.tensors | {"w": tensor})},
        {"": replace(new, byte_objects=[*new.byte_objects, moved])},
    )
    assert [(item.kind, item.key, item.new) for item in found.differences] == [("kind", "w", "bytes")]
    assert entry in new.byte_objects


def load(name: str) -> Checkpoint:
    """A checkpoint of `fixtures/real`."""
    loaded = ckptlint.load(REAL / name)
    assert isinstance(loaded, Checkpoint)
    return loaded


# ---------------------------------------------------------------- graph


def test_mermaid_of_a_hole_is_the_sample_of_the_documentation() -> None:
    done = invoke("graph", REAL / "fsdp2_4r_hole", W1, "--dim", "0", "--format", "mermaid")
    assert done.output == (
        'graph LR\n  a["0:3<br/>__0_0"] --> b["3:6<br/>__1_0"]\n  b -. "6:9 missing" .-> c["9:10<br/>__3_0"]\n'
    )


@pytest.mark.parametrize("name", [name for name in HEALTHY if name != "empty_state"])
def test_an_axis_of_a_healthy_tensor_is_one_path(name: str) -> None:
    ckpt = load(name)
    for tensor in list(ckpt.tensors.values())[:40]:
        for axis, size in enumerate(tensor.global_shape if tensor.volume else ()):
            graph = drawing(ckpt, tensor, axis)
            assert not any("missing" in data for _, _, data in graph.edges(data=True))
            path = nx.dag_longest_path(graph)
            assert graph.nodes[path[0]]["start"] == 0 and graph.nodes[path[-1]]["stop"] == size


@pytest.mark.parametrize(
    ("name", "fqn", "missing"),
    [
        ("gap_middle", UP, 1), ("gap_tail", UP, 1), ("no_chunks", UP, 2),
        ("megatron_moe_ep_offset_lost/iter_0000010", EXPERTS, 1), ("boundary_mismatch", UP, 0),
        ("out_of_bounds", UP, None), ("negative_offset", UP, None), ("overlap_one_row", UP, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format_", GRAPH_FORMATS)
def test_graph_of_a_broken_tensor(name: str, fqn: str, missing: int | None, format_: str) -> None:
    done = invoke("graph", REAL / name, fqn, "--format", format_)
    assert done.exit_code == 0, done.output
    if format_ == "json":
        graph = nx.node_link_graph(json.loads(done.stdout), edges="edges")
        links = [data["missing"] for _, _, data in graph.edges(data=True) if "missing" in data]
        assert missing is None or bool(links) == bool(missing)
    elif format_ == "graphml":
        graph = nx.parse_graphml(done.stdout)
        assert graph.graph["fqn"] == fqn
    elif missing is not None:
        assert ("missing" in done.stdout) == bool(missing)


HOSTILE = 'a"b<script>&#;\\n[x]{y}|z`%%end.w'


def hostile(folder: Path) -> Checkpoint:
    """A checkpoint whose tensor and file have a name that means something in every format."""
    written(folder, **{HOSTILE: {"shape": [8], "chunks": ["0:2", "4:8"]}})
    loaded = ckptlint.load(folder)
    assert isinstance(loaded, Checkpoint)
    return replace(loaded, files=FileTable.of(replace(file, name=f"{HOSTILE}.distcp") for file in loaded.files))


def test_names_are_escaped_in_every_format(tmp_path: Path) -> None:
    ckpt = hostile(tmp_path / "c")
    (tensor,) = ckpt.tensors.values()
    graph = drawing(ckpt, tensor, None)
    mermaid = as_mermaid(graph)
    assert not set('<>&`{}|%\\"') & set(mermaid.replace("<br/>", "").replace('["', "").replace('"]', "")) - {'"', ">"}
    assert mermaid.count('"') == 2 * 3
    dot = as_dot(graph)
    unescaped = dot.replace("\\\\", "").replace('\\"', "")
    assert all(line.count('"') % 2 == 0 for line in unescaped.splitlines())
    root = ET.fromstring(GRAPH_FORMATS["graphml"](graph))
    assert any((item.text or "").startswith('a"b<script>') for item in root.iter())
    assert json.loads(GRAPH_FORMATS["json"](graph))["nodes"][0]["files"] == [f"{HOSTILE}.distcp"]


def test_several_axes_are_apart(tmp_path: Path) -> None:
    folder = written(tmp_path / "c", w={"shape": [4, 4], "chunks": ["0:2, 0:2", "0:2, 2:4", "2:4, 0:2", "2:4, 2:4"]})
    text = invoke("graph", folder, "w", "--format", "mermaid").output
    assert text.count("subgraph") == text.count("  end\n") == 2
    assert '"0:2<br/>__0_0, __1_0"' in text
    assert invoke("graph", folder, "w", "--dim", "1").output.count("subgraph") == 1


# ---------------------------------------------------------------- completion


def asked_of_bash(line: str) -> dict[str, str]:
    return {"_CKPTLINT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def complete(line: str) -> list[str]:
    """What bash would be offered for a line."""
    program = "import sys; sys.argv = ['ckptlint']; from ckptlint.commands.main import main; main()"
    done = run_python(program, env=os.environ | asked_of_bash(line))
    return [item.partition(",")[2] for item in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckptlint explain GEO00", "GEO004"),
        ("ckptlint explain coverage-h", "coverage-hole"),
        ("ckptlint check --select GE", "GEO"),
        ("ckptlint check --ignore GEO001,PAY01", "GEO001,PAY010"),
        ("ckptlint watch --extend-select geo00", "GEO004"),
        ("ckptlint wat", "watch"),
        ("ckptlint plan --to d", "dp="),
        ("ckptlint plan --to dp=2,t", "dp=2,tp="),
    ],
)
def test_completion_offers_rules(line: str, expected: str) -> None:
    assert expected in complete(line)


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".local/share/bash-completion/completions/ckptlint"),
        ("fish", ".config/fish/completions/ckptlint.fish"),
        ("zsh", ".zshrc"),
    ],
)
def test_completion_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, place: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    (tmp_path / ".zshrc").write_text("setopt autocd")
    script = run("completion", env={"HOME": str(tmp_path)}).stdout
    assert "_CKPTLINT_COMPLETE" in script
    for _ in range(2):
        assert str(tmp_path / place) in run("completion", "--install", env={"HOME": str(tmp_path)}).stderr
    installed = (tmp_path / place).read_text()
    if shell == "zsh":
        assert installed.startswith("setopt autocd\n") and installed.count("ckptlint completion zsh") == 1
    else:
        assert installed.strip() == script.strip()


def test_completion_imports_nothing_heavy() -> None:
    code = """
import sys
from ckptlint.commands.completion import many_rules, one_rule
assert one_rule(None, None, "GEO") and many_rules(None, None, "")
heavy = {"numpy", "networkx", "torch", "tabulate"} & set(sys.modules)
sys.exit(", ".join(heavy) or 0)
"""
    assert run_python(code).returncode == 0


@pytest.mark.parametrize("line", ["ckptlint ", "ckptlint explain GEO00", "ckptlint check --select GE"])
def test_completion_of_a_line_imports_nothing_heavy(line: str) -> None:
    code = """
import atexit, os, sys
heavy = {"numpy", "networkx", "torch", "tabulate"}
atexit.register(lambda: print("imported", *heavy & set(sys.modules), file=sys.stderr))
sys.argv = ["ckptlint"]
from ckptlint.commands.main import main
main()
"""
    done = run_python(code, env=os.environ | asked_of_bash(line))
    assert done.stdout and done.stderr == "imported\n"


def test_completion_knows_every_rule() -> None:
    from ckptlint.commands.completion import rule_names
    from ckptlint.lint.registry import load_rules

    assert dict(rule_names()) == {rule.code: rule.name for rule in load_rules()}


@pytest.mark.parametrize("name", ["::stop-commands::x", "##[error]x", "##vso[task.complete]x", "a ::error::x"])
def test_no_line_of_show_diff_and_graph_is_a_command_of_ci(tmp_path: Path, name: str) -> None:
    tensors = {key: {"shape": [8], "chunks": ["0:4", "4:8"]} for key in (name, f"layers.0.{name}", "w")}
    folder = write_checkpoint({"tensors": tensors, "objects": [f"{name}.object"]}, tmp_path / name)
    other = write_checkpoint({"tensors": {"w": {"shape": [8]}}}, tmp_path / "other")
    graphs = [["graph", folder, name, "--format", form] for form in ("dot", "mermaid", "graphml", "json")]
    forms: list[list[str]] = [[], ["--tree"], ["*"], ["--format", "json"]]
    shows = [["show", folder, *form] for form in forms]
    diffs = [
        ["diff", *pair, *form] for pair in ((folder, other), (other, folder)) for form in ([], ["--format", "json"])
    ]
    for command in [*graphs, *shows, *diffs, ["graph", folder, "missing"]]:
        done = run(*command)
        assert done.returncode in (0, 1, 2), done.stderr
        assert "Traceback" not in done.stderr
        text = done.stdout + done.stderr
        assert not re.search(r"^\s*::|##\w*\[", text, re.MULTILINE), (command, text)
    document = json.loads(run("show", folder, "--format", "json").stdout)
    assert name in {tensor["fqn"] for tensor in document["checkpoints"][0]["tensors"]}
