"""`--expect` and `ckptlint manifest`: every kind of reference, what counts as a difference, broken references."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import REAL, REPOSITORY, codes, found, run

import ckptlint
from ckptlint.analysis.fit.key_matching import match_keys
from ckptlint.errors import ConfigError
from ckptlint.lint.registry import load_rules
from ckptlint.loaders.reference import MANIFEST_SCHEMA, manifest_text, read_reference
from ckptlint.model import Reference
from ckptlint.model.text import printable
from ckptlint.testing import safetensors_header, write_checkpoint

Table = dict[str, Any]

STEP: Table = {
    "tensors": {
        **{f"layers.{i}.attn.wo.weight": {"shape": [8, 8], "chunks": ["0:4, :", "4:8, :"]} for i in range(4)},
        **{f"layers.{i}.mlp.w2.weight": {"shape": [8, 16]} for i in range(4)},
        "tok_embeddings.weight": {"shape": [32, 8]},
        "norm.weight": {"shape": [8]},
    }
}
RULES = {"REF001", "REF002", "REF003", "REF004"}


def step(folder: Path, drop: str = "", **changes: Any) -> Path:
    """A checkpoint of four layers without the keys that hold `drop`; the changes are to `layers.3.mlp.w2.weight`."""
    tensors = {fqn: dict(tensor) for fqn, tensor in STEP["tensors"].items() if not (drop and drop in fqn)}
    if changes:
        tensors["layers.3.mlp.w2.weight"] |= changes
    return write_checkpoint({"tensors": tensors}, folder)


def entries(table: Table = STEP) -> dict[str, dict[str, Any]]:
    return {fqn: {"dtype": "float32", "shape": tensor["shape"]} for fqn, tensor in table["tensors"].items()}


def write_manifest(path: Path, tensors: Any, schema: str = MANIFEST_SCHEMA) -> Path:
    path.write_text(json.dumps({"schema": schema, "tensors": tensors}))
    return path


def write_safetensors(path: Path, tensors: dict[str, dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_header(tensors))
    return path


def write_index(folder: Path, files: dict[str, dict[str, dict[str, Any]]], at_hand: bool = True) -> Path:
    """An index over files of these tensors; the files themselves only where they are at hand."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        if at_hand:
            write_safetensors(folder / name, tensors)
    places = {fqn: name for name, tensors in files.items() for fqn in tensors}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return path


def halves() -> dict[str, dict[str, dict[str, Any]]]:
    names = sorted(entries())
    return {f"model-0000{i + 1}-of-00002.safetensors": {fqn: entries()[fqn] for fqn in names[i::2]} for i in range(2)}


def loud(path: Path, reference: Path) -> set[tuple[str, str]]:
    report = ckptlint.check(path, expect=reference)
    assert not any(part.failed for part in report.checkpoints)
    return {(code, level) for code, level, _ in found(report, "error", "warning") if code in RULES}


# ---------------------------------------------------------------- kinds of references


def make_manifest(folder: Path) -> Path:
    return write_manifest(folder / "manifest.json", entries())


def make_index_with_pointers(folder: Path) -> Path:
    path = write_index(folder / "model", halves())
    for name in halves():
        (path.parent / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    return path


def make_linked_index(folder: Path) -> Path:
    path = write_index(folder / "snapshot", halves(), at_hand=False)
    for number, (name, tensors) in enumerate(halves().items()):
        write_safetensors(folder / "blobs" / str(number), tensors)
        (path.parent / name).symlink_to(folder / "blobs" / str(number))
    return path


def make_model_folder(folder: Path) -> Path:
    path = write_index(folder / "model", halves()).parent
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 32}))
    return path


def make_model_folder_of_one_file(folder: Path) -> Path:
    path = write_safetensors(folder / "model" / "model.safetensors", entries()).parent
    write_safetensors(path / "consolidated.safetensors", {"other.name": {"dtype": "float32", "shape": [1]}})
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "hidden_size": 8}))
    return path


def make_run_folder(folder: Path) -> Path:
    step(folder / "run" / "step-100", drop="norm")
    step(folder / "run" / "step-200")
    return folder / "run"


KINDS: dict[str, tuple[Callable[[Path], Path], str, bool]] = {
    "manifest": (make_manifest, "manifest", True),
    "manifest_of_another_name": (lambda folder: write_manifest(folder / "expected", entries()), "manifest", True),
    "safetensors": (lambda folder: write_safetensors(folder / "model.safetensors", entries()), "safetensors", True),
    "index": (lambda folder: write_index(folder / "model", halves()), "index", True),
    "index_alone": (lambda folder: write_index(folder / "model", halves(), at_hand=False), "index", False),
    "index_with_pointers": (make_index_with_pointers, "index", False),
    "linked_index": (make_linked_index, "index", True),
    "model_folder": (make_model_folder, "Hugging Face folder", True),
    "model_folder_of_one_file": (make_model_folder_of_one_file, "Hugging Face folder", True),
    "checkpoint": (lambda folder: step(folder / "reference"), "checkpoint", True),
    "run_folder": (make_run_folder, "checkpoint", True),
    "metadata_file": (lambda folder: step(folder / "reference") / ".metadata", "checkpoint", True),
}
EVERY_KIND = [pytest.param(*row, id=name) for name, row in KINDS.items()]


@pytest.mark.parametrize(("make", "kind", "shapes"), EVERY_KIND)
def test_each_kind_of_reference_is_read(make: Callable[[Path], Path], kind: str, shapes: bool, tmp_path: Path) -> None:
    reference = read_reference(str(make(tmp_path)))
    assert reference.kind == kind
    expected = {fqn: ("float32", tuple(e["shape"])) if shapes else (None, None) for fqn, e in entries().items()}
    assert reference.tensors == expected


@pytest.mark.parametrize(("make", "kind", "shapes"), EVERY_KIND)
def test_each_kind_tells_what_differs(make: Callable[[Path], Path], kind: str, shapes: bool, tmp_path: Path) -> None:
    reference = make(tmp_path)
    assert loud(step(tmp_path / "same"), reference) == set()
    assert loud(step(tmp_path / "missing", drop="layers.3.mlp"), reference) == {("REF001", "error")}
    shape = loud(step(tmp_path / "shape", shape=[16, 8]), reference)
    dtype = loud(step(tmp_path / "dtype", dtype="bfloat16"), reference)
    assert shape == ({("REF002", "error")} if shapes else set())
    assert dtype == ({("REF002", "warning")} if shapes else set())


def test_a_configuration_alone_gives_counts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 32}))
    assert loud(step(tmp_path / "same"), model) == set()
    report = ckptlint.check(step(tmp_path / "short", drop="layers.3"), expect=model)
    assert [title for _, _, title in found(report, "warning")] == ["3 layers here, 4 in the reference"]
    assert report.checkpoints[0].not_applicable["REF001"] == "the reference names no tensors"


def test_local_shards_of_the_torch_writer_give_names_but_no_shapes() -> None:
    reference = read_reference(str(REAL / "hf_sharded"))
    assert reference.tensors and all(shape is None for _, shape in reference.tensors.values())


# ---------------------------------------------------------------- manifests


def test_a_stale_index_in_a_reference_is_not_followed(tmp_path: Path) -> None:
    write_checkpoint({"safetensors": {"model.safetensors": {"tensors": entries()}}}, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"old.weight": "model-00001-of-00001.safetensors"}}'
    )
    reference = read_reference(str(tmp_path))
    assert {fqn: shape for fqn, (_, shape) in reference.tensors.items()} == {
        fqn: tuple(tensor["shape"]) for fqn, tensor in entries().items()
    }


def test_manifest_of_a_checkpoint_passes_as_its_reference(tmp_path: Path) -> None:
    target = tmp_path / "m.json"
    for name in ("fsdp2_4r", "plain_dtypes", "megatron_moe_ep2_dp2", "megatron_0.12_dp2", "fsdp1_local_flat"):
        made = run("manifest", REAL / name, "--output", target)
        assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
        report = ckptlint.check(REAL / name, expect=target)
        assert not codes(report) & RULES
        assert not (RULES - {"REF004"}) & set(report.checkpoints[0].not_run)  # values are read at depth data
        assert "REF002" in report.checkpoints[0].passed


def test_manifest_goes_to_standard_output_and_names_every_tensor() -> None:
    made = run("manifest", REAL / "plain_dtypes")
    document = json.loads(made.stdout)
    assert made.returncode == 0 and document["schema"] == MANIFEST_SCHEMA
    tensors = ckptlint.load(REAL / "plain_dtypes").tensors
    assert document["tensors"] == {t.fqn: {"dtype": t.dtype, "shape": list(t.global_shape)} for t in tensors.values()}


def test_odd_names_survive_the_round_trip(tmp_path: Path) -> None:
    names = ["back\\slash.weight", "bell\x07.weight", "schlüssel.weight", "a b, (c).weight"]
    path = write_checkpoint({"tensors": {name: {"shape": [4]} for name in names}}, tmp_path / "step")
    manifest = tmp_path / "m.json"
    manifest.write_text(manifest_text([ckptlint.load(path)]), encoding="utf-8")
    assert set(read_reference(str(manifest)).tensors) == {printable(name) for name in names}
    assert loud(path, manifest) == set()


@pytest.mark.parametrize(
    ("name", "code"), [("metadata_malicious", "SAF001"), ("metadata_truncated", "SAF002"), ("huge_shape", "SAF003")]
)
def test_manifest_of_what_is_unsafe_or_unreadable_is_refused(name: str, code: str, tmp_path: Path) -> None:
    target = tmp_path / "m.json"
    made = run("manifest", REAL / name, "--output", target)
    assert made.returncode == 1 and code in made.stderr and not made.stdout
    assert not target.exists()


def test_manifest_of_nothing_is_exit_3(tmp_path: Path) -> None:
    assert run("manifest", tmp_path).returncode == 3
    assert run("manifest", tmp_path / "absent").returncode == 3


def test_manifest_holds_all_parts_of_a_step(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"model.w": {"shape": [4]}}}, tmp_path / "step-1" / "model")
    write_checkpoint({"tensors": {"optimizer.state.w.exp_avg": {"shape": [4]}}}, tmp_path / "step-1" / "optim")
    made = run("manifest", tmp_path / "step-1")
    assert set(json.loads(made.stdout)["tensors"]) == {"model.w", "optimizer.state.w.exp_avg"}


def test_manifest_of_parts_with_one_key_asks_for_one_of_them(tmp_path: Path) -> None:
    for part in ("actor", "critic"):
        write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "step-1" / part)
    made = run("manifest", tmp_path / "step-1")
    assert made.returncode == 2 and "both hold w" in made.stderr


# ---------------------------------------------------------------- another step, another mesh


@pytest.mark.parametrize(
    ("path", "reference"),
    [
        ("hsdp_2x2", "tp2_fsdp2_uneven"), ("tp2_fsdp2_uneven", "hsdp_2x2"), ("ep4", "ep2_epshard2"),
        ("ep2_epshard2", "ep4"), ("async_save", "per_rank_metadata"), ("zstd", "safetensors_mode"),
        ("noflatten", "dedup_lowest"), ("megatron_0.19_tp2/iter_0000010", "megatron_0.15_tp2/iter_0000010"),
        ("megatron_0.15_tp2/iter_0000010", "megatron_0.19_tp2/iter_0000010"),
        ("megatron_tp2_dp2_fully_reshardable/iter_0000010", "megatron_0.12_dp2/iter_0000010"),
        ("megatron_0.12_dp2/iter_0000010", "megatron_tp2_dp2_fully_reshardable/iter_0000010"),
    ],
)  # fmt: skip
def test_resharding_and_another_writer_are_no_difference(path: str, reference: str) -> None:
    assert loud(REAL / path, REAL / reference) == set()


def test_lost_layers_are_one_problem() -> None:
    report = ckptlint.check(REAL / "hsdp_2x2", expect=REAL / "fsdp2_4r")
    assert report.exit_code == 1
    groups = [group for group in report.checkpoints[0].groups if group.lead.severity.label == "error"]
    assert [(group.lead.code, len(group.members)) for group in groups] == [("REF001", 9)]


def test_swapped_dims_are_named(tmp_path: Path) -> None:
    report = ckptlint.check(step(tmp_path / "step", shape=[4, 32]), expect=make_manifest(tmp_path))
    (item,) = [item for item in report.diagnostics if item.code == "REF002"]
    assert (
        "relation",
        "dim 1 is 2 times as long, dim 0 1/2, at equal volume: the sharded dims were swapped (SHP003)",
    ) in (item.finding.notes)


def test_parts_of_a_step_are_compared_with_the_parts_of_the_other(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"step-{number}"
        write_checkpoint({"tensors": {"model.w": {"shape": [4]}}}, folder / "model")
        tensors = {"optimizer.state.w.exp_avg": {"shape": [4]}, "optimizer.state.w.exp_avg_sq": {"shape": [4]}}
        if number == 2:
            del tensors["optimizer.state.w.exp_avg_sq"]
        write_checkpoint({"tensors": tensors}, folder / "optim")
    assert loud(tmp_path / "step-1", tmp_path / "step-1") == set()
    report = ckptlint.check(tmp_path / "step-2", expect=tmp_path / "step-1")
    assert [(item.code, item.fqn) for item in report.diagnostics if item.code in RULES] == [
        ("REF001", "optimizer.state.w.exp_avg_sq")
    ]


# ---------------------------------------------------------------- names


def hugging_face_llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    rows, kv_rows = heads * 8, kv_heads * 8
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    shapes["lm_head.weight"] = [vocab, hidden]
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": [kv_rows, hidden] for name in ("k", "v")}
        shapes |= {f"{layer}self_attn.q_proj.weight": [rows, hidden], f"{layer}self_attn.o_proj.weight": [hidden, rows]}
        shapes |= {f"{layer}mlp.{name}_proj.weight": [ffn, hidden] for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = [hidden, ffn]
    return {fqn: {"dtype": "bfloat16", "shape": shape} for fqn, shape in shapes.items()}


@pytest.mark.parametrize("name", ["megatron_0.19_tp2", "megatron_0.15_tp2", "megatron_tp2_dp2_fully_reshardable"])
def test_hugging_face_names_against_megatron_names_are_no_alarm(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_safetensors(model / "model.safetensors", hugging_face_llama(1, 8, 16, 2, 2, 16))
    config = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    (model / "config.json").write_text(json.dumps(config))
    report = ckptlint.check(REAL / name, expect=model)
    assert report.exit_code == 0 and not found(report, "error", "warning")
    titles = [title for code, _, title in found(report, "info") if code == "REF001"]
    assert len(titles) == 1 and "have no counterpart" in titles[0]


def test_counts_tell_another_model_although_the_names_differ(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_safetensors(model / "model.safetensors", hugging_face_llama(2, 8, 16, 2, 2, 16))
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 8}))
    report = ckptlint.check(REAL / "megatron_0.19_tp2", expect=model)
    assert [title for _, _, title in found(report, "warning")] == ["1 layers here, 2 in the reference"]


def test_stacked_layers_and_experts_meet_numbered_ones(tmp_path: Path) -> None:
    """Megatron-Core's stacks of layers and experts against one name for each, with a wrapper in front."""
    checkpoint = ckptlint.load(REAL / "megatron_moe_ep2_dp2")
    numbered: dict[str, dict[str, Any]] = {}
    for tensor in checkpoint.tensors.values():
        fqn, shape = tensor.fqn, list(tensor.global_shape)
        if ".experts.experts." in fqn:
            for layer in range(shape[0]):
                for expert in range(shape[1]):
                    name = fqn.replace("layers.", f"layers.{layer}.").replace(
                        ".experts.experts.", ".experts.local_experts.#."
                    )
                    numbered["module." + name.replace("#", str(expert))] = {"dtype": tensor.dtype, "shape": shape[2:]}
        elif fqn.startswith("decoder.layers."):
            for layer in range(shape[0]):
                numbered["module." + fqn.replace("layers.", f"layers.{layer}.")] = {
                    "dtype": tensor.dtype,
                    "shape": shape[1:],
                }
        elif not fqn.startswith("chained"):
            numbered["module." + fqn] = {"dtype": tensor.dtype, "shape": shape}
    whole = write_manifest(tmp_path / "whole.json", numbered)
    assert loud(REAL / "megatron_moe_ep2_dp2", whole) == set()
    reference = read_reference(str(whole))
    result = match_keys(checkpoint, reference)
    assert not result.unpaired_expected and not result.unpaired_stored
    more = numbered | {
        fqn.replace("local_experts.0", "local_experts.4"): entry
        for fqn, entry in numbered.items()
        if "local_experts.0" in fqn
    }
    report = ckptlint.check(REAL / "megatron_moe_ep2_dp2", expect=write_manifest(tmp_path / "more.json", more))
    missing = [item.fqn for item in report.diagnostics if item.code == "REF001" and item.severity.label == "error"]
    assert sorted(missing) == sorted(set(more) - set(numbered)) and missing


def test_pairing_is_linear_in_the_names() -> None:
    tensors = {f"layers.{i}.experts.{e}.w": ("float32", (4, 4)) for i in range(40) for e in range(250)}
    reference = Reference("many", "manifest", {f"model.{fqn}": value for fqn, value in tensors.items()})
    unlike = Reference("unlike", "manifest", {f"part{i}.some.weight": ("float32", (4, 4)) for i in range(10_000)})
    checkpoint = ckptlint.load(REAL / "ep4")
    assert (
        len(match_keys(checkpoint, reference).unpaired_expected) + len(match_keys(checkpoint, reference).absent)
        == 10_000
    )
    assert match_keys(checkpoint, unlike).expected["model"] == 10_000


# ---------------------------------------------------------------- broken references


BROKEN_FILES: dict[str, bytes] = {
    "empty.json": b"", "pickle.json": b"\x80\x04not json",
    "cut.json": b'{"schema": "ckptlint.manifest/1", "tensors": {', "deep.json": b'{"tensors": ' + b"[" * 200_000,
    "list.json": b"[1, 2]",
    "twice.json": b'{"schema": "ckptlint.manifest/1", "tensors": {"w": {"shape": [1]}, "w": {"shape": [2]}}}',
    "report.json": b'{"schema": "ckptlint.report/1", "checkpoints": []}',
    "no-tensors.json": b'{"schema": "ckptlint.manifest/1", "tensors": {}}', "list.index.json": b'{"weight_map": ["w"]}',
    "number.index.json": b'{"weight_map": {"w": 1}}', "empty.safetensors": b"",
    "zip.safetensors": b"PK\x03\x04" + bytes(60), "cut.safetensors": safetensors_header(entries())[:200],
    "long.safetensors": (100_000_001).to_bytes(8, "little") + b'{"w": ' + bytes(100),
    "huge.safetensors": (2**63).to_bytes(8, "little") + b"{",
    "braces.safetensors": (6).to_bytes(8, "little") + b"{{{{{{",
    "pointer.safetensors": b"version https://git-lfs.github.com/spec/v1\n",
    "bare.safetensors": (2).to_bytes(8, "little") + b"{}",
}  # fmt: skip
BROKEN_TENSORS: dict[str, Any] = {
    "tensors is a list": ["w"],
    "entry is no object": {"w": 1},
    "dtype is a number": {"w": {"dtype": 1, "shape": [1]}},
    "shape is text": {"w": {"dtype": "float32", "shape": "4"}},
    "negative size": {"w": {"dtype": "float32", "shape": [-1]}},
    "size is a flag": {"w": {"dtype": "float32", "shape": [True]}},
    "size beyond 64 bits": {"w": {"dtype": "float32", "shape": [2**80]}},
    "65 axes": {"w": {"dtype": "float32", "shape": [1] * 65}},
    "long key": {"w" * 5000: {"dtype": "float32", "shape": [1]}},
}
BROKEN_CHECKPOINTS = (
    "metadata_malicious", "metadata_truncated", "metadata_missing", "per_rank_metadata_missing_rank",
    "megatron_common_malicious", "empty_state", "no_such_folder",
)  # fmt: skip
BROKEN = [*BROKEN_FILES, *BROKEN_TENSORS, *BROKEN_CHECKPOINTS, "empty folder"]


def broken(name: str, folder: Path) -> Path:
    """A reference that must be refused."""
    if name in BROKEN_FILES:
        path = folder / name
        path.write_bytes(BROKEN_FILES[name])
        return path
    if name in BROKEN_TENSORS:
        return write_manifest(folder / "manifest.json", BROKEN_TENSORS[name])
    if name in BROKEN_CHECKPOINTS:
        return REAL / name
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reference_is_one_sentence_and_exit_2(name: str, tmp_path: Path) -> None:
    reference = broken(name, tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_reference(str(reference))
    sentence = str(caught.value)
    assert str(reference) in sentence and "\n" not in sentence and len(sentence) < 700


@pytest.mark.parametrize("name", ["no_such_folder", "pickle.json", "cut.safetensors", "metadata_malicious"])
def test_the_command_line_ends_in_exit_2(name: str, tmp_path: Path) -> None:
    reference = broken(name, tmp_path)
    done = run(REAL / "edit_base", "--expect", reference, "--format", "json")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("ckptlint: the reference ") and done.stderr.count("\n") == 1


def test_a_pipe_is_no_reference(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_reference(str(tmp_path / "pipe.json"))


def test_an_index_is_not_followed_outside_its_folder(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "secret.safetensors", {"w": {"dtype": "float32", "shape": [4]}})
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"w": "../secret.safetensors", "v": str(tmp_path / "secret.safetensors")}})
    )
    assert read_reference(str(index)).tensors == {"w": (None, None), "v": (None, None)}


def test_control_characters_of_a_reference_reach_no_output(tmp_path: Path) -> None:
    name = "layers.0.\x1b]8;;evil\x07weight"
    reference = write_manifest(tmp_path / "m.json", entries() | {name: {"dtype": "\x1b[31m", "shape": [4]}})
    done = run(step(tmp_path / "step"), "--expect", reference)
    assert done.returncode == 1 and "\x1b" not in done.stdout and "\\x1b" in done.stdout


# ---------------------------------------------------------------- options and reports


def test_without_a_reference_the_rules_are_listed_as_not_run_and_not_as_passed() -> None:
    report = ckptlint.check(REAL / "edit_base")
    part = report.checkpoints[0]
    assert {part.not_run[code] for code in RULES - {"REF004"}} == {"needs --expect"}
    assert not RULES & {*part.passed, *(rule.code for rule in report.rules)}
    others = len([rule for rule in load_rules() if not (rule.expects or rule.live)])

    def judged(*options: str | Path) -> int:
        """How many rules judged, or found nothing to judge."""
        document = json.loads(run(REAL / "edit_base", "--depth", "data", "--format", "json", *options).stdout)
        reasons = [row["reason"] for row in document["checkpoints"][0]["not_run"]]
        return int(document["rules"]["ran"]) + sum(not reason.startswith("needs ") for reason in reasons)

    done = run(REAL / "edit_base", "-v", "--depth", "data")
    assert judged() == others and "REF001-004 needs --expect" in " ".join(done.stdout.split())
    assert judged("--expect", REAL / "edit_base") == others + len(RULES)


def test_choosing_the_rule_without_a_reference_is_wrong_use() -> None:
    for token in ("REF001", "shape-dtype-diff"):
        done = run(REAL / "edit_base", "--select", token)
        assert done.returncode == 2 and "needs --expect" in done.stderr
    assert run(REAL / "edit_base", "--select", "REF", "--expect", REAL / "edit_base").returncode == 0
    with pytest.raises(ConfigError, match="needs --expect"):
        ckptlint.check(REAL / "edit_base", select=["REF001"])


def test_the_environment_names_a_reference(tmp_path: Path) -> None:
    reference = str(write_manifest(tmp_path / "m.json", {"other": {"dtype": "float32", "shape": [4]}}))
    done = run(REAL / "edit_base", "--format", "json", env={"CKPTLINT_EXPECT": reference})
    assert json.loads(done.stdout)["checkpoints"][0]["reference"]["source"] == reference


def test_the_json_report_names_the_reference(tmp_path: Path) -> None:
    reference = make_model_folder(tmp_path)
    schema = json.loads((REPOSITORY / "ckptlint" / "report.schema.json").read_text())
    for arguments, wanted in (
        (["--expect", reference], {"source": str(reference), "kind": "Hugging Face folder", "tensors": 10}),
        ([], None),
    ):
        done = run(step(tmp_path / "step", drop="layers.3.mlp"), *arguments, "--format", "json")
        document = json.loads(done.stdout)
        jsonschema.validate(document, schema)
        assert document["checkpoints"][0]["reference"] == wanted
        assert done.returncode == (1 if wanted else 0)


def test_the_reference_is_not_judged_and_may_have_holes() -> None:
    assert not loud(REAL / "edit_base", REAL / "gap_middle")
    holes = ckptlint.check(REAL / "fsdp2_4r_hole", expect=REAL / "fsdp2_4r_hole")
    assert codes(holes, "error", "warning") == {"GEO004"}


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
    "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_configuration_alone_names_every_tensor_that_it_implies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        reference = read_reference(str(path))
        assert len(reference.tensors) == 2 + 2 * 9  # a tied head is not expected
        assert reference.tensors["model.layers.1.mlp.down_proj.weight"] == (None, (8, 12))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "no_such", "architectures": None}))
    assert not read_reference(str(tmp_path)).tensors
