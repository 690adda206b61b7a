"""Exports of Hugging Face models: those of the incidents are named with key and cause, the healthy ones pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import REAL, bench, manifest, swept

import ckptlint
from ckptlint.rule import Severity
from ckptlint.testing import write_safetensors

EXPORTS = REAL / "exports"
ROWS = manifest(EXPORTS)


def test_most_healthy_exports_are_judged_by_a_table() -> None:
    """What passes because nothing is known of it proves nothing."""
    healthy = [row for row in ROWS if row["verdict"] == "healthy"]
    judged = [row for row in healthy if "CFG001" in ckptlint.check(EXPORTS / row["path"]).checkpoints[0].passed]
    assert len(healthy) >= 60
    assert len(judged) >= 50


def codes(path: Path, **options: str | list[str]) -> list[str]:
    report = ckptlint.check(path, **options)
    return [item.code for item in report.diagnostics if item.severity > Severity.INFO]


@pytest.mark.parametrize("name", ["R02_head_lost", "R01_shards_lost"])
def test_one_cause_is_one_finding_beside_a_reference(name: str) -> None:
    """The checkpoint's own configuration, given with `--expect`, and a reference that has the lost keys too."""
    folder = EXPORTS / name
    config = str(folder / "config.json")
    assert codes(folder, expect=config) == ["CFG001"]
    assert set(codes(folder, expect=config, select=["REF"])) == {"REF001"}
    assert set(codes(folder, expect=config, ignore=["CFG"])) == {"REF001"}


def test_a_shape_is_told_once_beside_a_reference() -> None:
    row = next(row for row in ROWS if row["codes"] == "CFG003")
    folder = EXPORTS / row["path"]
    config = str(folder / "config.json")
    assert set(codes(folder, expect=config)) == {"CFG003"}
    assert set(codes(folder, expect=config, select=["REF"])) == {"REF002"}


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("folder", sorted(EXPORTS.glob("ok_table_*")), ids=lambda folder: folder.name)
def test_a_table_that_was_wrong_is_silent_and_judges(folder: Path, tmp_path: Path) -> None:
    """Nothing is found in the export; a tensor that is lost, and one of half its size, are."""
    report = ckptlint.check(folder)
    assert {"CFG001", "CFG003"} <= set(report.checkpoints[0].passed)
    assert not codes(folder)
    shutil.copy(folder / "config.json", tmp_path)
    shapes = {key: list(tensor.global_shape) for key, tensor in report.checkpoints[0].checkpoint.tensors.items()}
    for key, shape in sorted(shapes.items())[::12]:
        others = {k: v for k, v in shapes.items() if k != key}
        for left, code in ((others, "CFG001"), (others | {key: [size // 2 or 2 for size in shape]}, "CFG003")):
            tensors = {k: {"shape": v, "dtype": "bfloat16"} for k, v in left.items()}
            write_safetensors(tmp_path / "model.safetensors", {"tensors": tensors})
            assert code in codes(tmp_path), key


@pytest.mark.parametrize(("declared", "wanted"), [("float16", []), ("float32", []), ("bfloat16", ["CFG005"])])
def test_the_declared_dtype_may_be_that_of_a_variant_beside(declared: str, wanted: list[str], tmp_path: Path) -> None:
    """Each `save_pretrained` of transformers writes `config.json`, a later one of a variant too."""
    tensors = ckptlint.check(EXPORTS / "ok_llama").checkpoints[0].checkpoint.tensors
    for name, dtype in (("model.safetensors", "float32"), ("model.fp16.safetensors", "float16")):
        table = {key: {"shape": list(tensor.global_shape), "dtype": dtype} for key, tensor in tensors.items()}
        write_safetensors(tmp_path / name, {"tensors": table})
    config = json.loads((EXPORTS / "ok_llama/config.json").read_text()) | {"dtype": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert codes(tmp_path, depth="files") == wanted


@pytest.mark.ci
@pytest.mark.parametrize("place", [0, 1])
def test_transformers_loads_the_last_copy_of_a_key_whatever_the_index_says(place: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra tables)")
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    state, key = {name: tensor.clone() for name, tensor in model.state_dict().items()}, "model.norm.weight"
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    model.config.save_pretrained(tmp_path)
    last = {key: torch.full((16,), 2.0), "lm_head.weight": state.pop("lm_head.weight")}
    safetensors.save_file(state, tmp_path / files[0], {"format": "pt"})
    safetensors.save_file(last, tmp_path / files[1], {"format": "pt"})
    places = dict.fromkeys(state, files[0]) | dict.fromkeys(last, files[1]) | {key: files[place]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict()[key].tolist() == [2.0] * 16
    said = [item for item in ckptlint.check(tmp_path, depth="data").diagnostics if key in item.keys]
    assert [item.severity for item in said] == [Severity.INFO if place else Severity.WARNING]


def float32_told(path: Path, expect: Path | None = None) -> list[tuple[str, str, Severity]]:
    """The findings that say that a class keeps tensors in float32: code, end of the key, severity."""
    given = {} if expect is None else {"expect": str(expect)}
    every = ckptlint.check(path, **given).diagnostics
    told = [item for item in every if "keeps it in float32" in f"{item.message} {item.why}"]
    return [(item.code, str(item.fqn).rpartition("gate.")[2], item.severity) for item in told]


def in_dtype(name: str, folder: Path, **dtypes: str) -> Path:
    """An export with tensors of other dtypes: those whose name ends as the words do, `_` for all others."""
    folder.mkdir()
    shutil.copy(EXPORTS / name / "config.json", folder)
    tensors = ckptlint.check(EXPORTS / name).checkpoints[0].checkpoint.tensors
    chosen = {key: next((d for end, d in dtypes.items() if key.endswith(end)), dtypes["_"]) for key in tensors}
    table = {key: {"shape": list(tensors[key].global_shape), "dtype": dtype} for key, dtype in chosen.items()}
    write_safetensors(folder / "model.safetensors", {"tensors": table})
    return folder


BIAS = "e_score_correction_bias"


@pytest.mark.parametrize("name", ["ok_deepseek_v3", "ok_mtp"])
def test_a_routers_bias_in_16_bits_is_a_note_and_a_warning_beside_float32(name: str, tmp_path: Path) -> None:
    """Automodel#2553. transformers itself writes it after `.to(bfloat16)`."""
    full = in_dtype(name, tmp_path / "full", _="float32")
    assert float32_told(EXPORTS / name) == [("CFG005", BIAS, Severity.INFO)]
    beside = float32_told(EXPORTS / name, full)
    assert {code for code, _, _ in beside} == {"REF002"}
    assert ("REF002", BIAS, Severity.WARNING) in beside


def test_what_a_class_keeps_in_float32_is_silent_where_nothing_was_lost(tmp_path: Path) -> None:
    name = "ok_deepseek_v3"
    assert not float32_told(EXPORTS / "ok_glm4_moe")  # as published: its bias is float32, the gate is not
    assert not float32_told(EXPORTS / "ok_llama")
    assert not float32_told(in_dtype(name, tmp_path / "full", _="float32"))
    kept = in_dtype(name, tmp_path / "kept", _="bfloat16", **{BIAS: "float32", "gate.weight": "float32"})
    assert not float32_told(kept)
    assert not float32_told(kept, tmp_path / "full")
    assert not float32_told(EXPORTS / name, EXPORTS / name)  # the training held 16 bits


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["hy_v3", "glm4_moe", *swept("exaone_moe", "ernie4_5_moe", "kolibri1")])
def test_what_transformers_keeps_in_float32_under_the_names_that_it_writes(kind: str, tmp_path: Path) -> None:
    """A class names modules of the model (`e_score_correction_bias`); its files may name them otherwise."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    precision = bench("evidence/precision")
    model = precision.build(kind, precision.tiny(kind, 3))
    model.save_pretrained(tmp_path / "float32")
    type(model).from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(tmp_path / "loaded")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "cast")
    for name in ("float32", "loaded"):
        assert not [item for item in ckptlint.check(tmp_path / name).diagnostics if item.code == "CFG005"]
    assert [(code, severity) for code, _, severity in float32_told(tmp_path / "cast")] == [("CFG005", Severity.INFO)]
    assert ("REF002", Severity.WARNING) in {(c, s) for c, _, s in float32_told(tmp_path / "cast", tmp_path / "loaded")}
