"""A checkpoint beside what its configuration implies: which names are paired, and what may differ."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support import REAL, ends

import ckptlint
from ckptlint.analysis.fit.judgement import Fit, config_fit, expectations
from ckptlint.analysis.fit.pairing import best_pairing
from ckptlint.architecture.expected import Expected, ExpectedTensor
from ckptlint.model import Checkpoint, ModelConfig
from ckptlint.rule import Severity
from ckptlint.testing import write_safetensors

LAYER = {"attn.q_proj.weight": (8, 4), "attn.k_proj.weight": (2, 4), "mlp.up.weight": (6, 4), "norm.weight": (4,)}
ROOT = {"model.embed_tokens.weight": (9, 4), "model.norm.weight": (4,)}


def expected(layers: int = 2, **more: ExpectedTensor) -> Expected:
    """A model of a few tensors per layer, its head not tied."""
    shapes = ROOT | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER.items()}
    shapes |= {"lm_head.weight": (9, 4)}
    tensors = {name: ExpectedTensor(shape) for name, shape in shapes.items()}
    return Expected("config.json", "tiny", "saved", tensors | more, {"num_hidden_layers": layers}, "float32")


def stored(names: dict[str, tuple[int, ...]], folder: Path, *forms: Expected) -> Checkpoint:
    """A checkpoint of these tensors, held against what a configuration is said to imply."""
    write_safetensors(
        folder / "model.safetensors", {"tensors": {k: {"dtype": "float32", "shape": s} for k, s in names.items()}}
    )
    ckpt = replace(ckptlint.load(folder), config=ModelConfig("config.json", {"transformers_version": "5"}))
    ckpt.facts[(expectations.__wrapped__,)] = forms or (expected(),)
    return ckpt


def shapes(form: Expected) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in form.tensors.items()}


def fit_of(ckpt: Checkpoint) -> Fit:
    fit = config_fit(ckpt)
    assert isinstance(fit, Fit), fit
    return fit


@pytest.mark.parametrize(
    ("words", "carried"),
    [
        ("_orig_mod.{}", "_orig_mod."),
        ("module.{}", "module."),
        ("module._orig_mod.{}", "module._orig_mod."),
        ("base_model.model.{}", "base_model.model."),
        ("policy.{}", "policy."),
    ],
)
def test_a_prefix_on_every_name_is_told(words: str, carried: str) -> None:
    form = expected()
    pairing = best_pairing([form], [words.format(name) for name in form.tensors])
    assert pairing.fits
    assert pairing.carried == {carried: len(form.tensors)}
    assert pairing.stored.keys() == form.tensors.keys()
    assert not pairing.unknown


def test_words_inside_of_names_are_told() -> None:
    form = expected()
    pairing = best_pairing([form], [name.replace(".attn.", "._orig_mod.attn.") for name in form.tensors])
    assert pairing.carried == {"_orig_mod.": 4}
    assert len(pairing.stored) == len(form.tensors)


def test_a_base_model_needs_no_head(tmp_path: Path) -> None:
    names = {k.removeprefix("model."): v for k, v in shapes(expected()).items() if k != "lm_head.weight"}
    fit = fit_of(stored(names, tmp_path))
    assert (fit.pairing.base, fit.missing, fit.foreign) == ("model", [], [])


def test_the_naming_that_most_names_follow_is_taken(tmp_path: Path) -> None:
    fused = {f"model.layers.{i}.attn.qkv.weight": ExpectedTensor((12, 4)) for i in (0, 1)}
    plain = expected()
    other = replace(
        plain, form="in memory", tensors={k: v for k, v in plain.tensors.items() if "_proj" not in k} | fused
    )
    assert fit_of(stored(shapes(other), tmp_path, plain, other)).expected.form == "in memory"


def test_names_of_another_scheme_are_not_judged(tmp_path: Path) -> None:
    ckpt = stored({f"blocks.{i}.w{j}": (4, 4) for i in range(4) for j in range(4)}, tmp_path)
    assert config_fit(ckpt) == "the keys here are not those of model_type tiny in config.json"


def test_a_tower_that_is_absent_as_a_whole_is_not_missing(tmp_path: Path) -> None:
    tower = {f"visual.blocks.{i}.w": ExpectedTensor((3, 3)) for i in range(3)}
    form = expected(**tower)
    fit = fit_of(stored(shapes(expected()), tmp_path, form))
    assert (fit.missing, fit.absent_towers) == ([], ("visual",))


def test_half_a_tower_is_missing(tmp_path: Path) -> None:
    tower = {f"visual.blocks.{i}.w": ExpectedTensor((3, 3)) for i in range(3)}
    fit = fit_of(stored(shapes(expected()) | {"visual.blocks.0.w": (3, 3)}, tmp_path, expected(**tower)))
    assert fit.missing == ["visual.blocks.1.w", "visual.blocks.2.w"]


def test_weights_that_were_quantised_are_not_judged(tmp_path: Path) -> None:
    names = {k: v for k, v in shapes(expected()).items() if "_proj" not in k}
    for name, shape in shapes(expected()).items():
        if "_proj" in name:
            stem = name.removesuffix(".weight")
            names |= {f"{stem}.qweight": (1, shape[0]), f"{stem}.qzeros": (1, 1), f"{stem}.scales": (1, shape[0])}
    fit = fit_of(stored(names, tmp_path))
    assert (fit.missing, fit.shapes, fit.foreign, fit.beyond) == ([], [], [], [])


@pytest.mark.parametrize(
    "suffix", ["_scale", "_scale_inv", ".absmax", ".quant_state.bitsandbytes__nf4", ".nested_absmax"]
)
def test_what_lies_beside_a_quantised_weight_is_known(tmp_path: Path, suffix: str) -> None:
    name = "model.layers.0.mlp.up.weight"
    fit = fit_of(stored(shapes(expected()) | {f"{name}{suffix}": (1,), name: (12, 1)}, tmp_path))
    assert (fit.shapes, fit.foreign, fit.beyond) == ([], [], [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":' + "[" * 2000 + "]" * 2000 + "}", "recursion"),
        ('{"a": [' + "{}," * 60_000 + "{}]}", "lists and objects"),
        ('{"a": "' + "x" * 3_000_000 + '"}', "bytes"),
        ("[1, 2]", "not a JSON object"),
        ("{", "not a JSON object"),
    ],
    ids=["nested", "many", "large", "a list", "cut"],
)
def test_a_configuration_that_is_no_configuration_gives_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"tensors": {"w": {"dtype": "float32", "shape": [2]}}})
    (tmp_path / "config.json").write_text(text)
    report = ckptlint.check(tmp_path)
    (item,) = report.diagnostics
    is_damaged = says in ("recursion", "not a JSON object")
    assert item.title.startswith("config.json is damaged: " if is_damaged else "config.json cannot be read (")
    assert says in item.title
    assert report.exit_code == (1 if is_damaged else 4)


@pytest.mark.parametrize("value", [-1, 0, 10**9, 10**30, 1.5, "12", None, True, [], {}, [1, 2], {"a": 1}])
@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim", "num_attention_heads"])
def test_no_value_of_a_field_breaks_the_judgement(tmp_path: Path, field: str, value: object) -> None:
    folder = REAL / "exports" / "ok_llama"
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = ckptlint.check(tmp_path)
    assert not any(part.failed for part in report.checkpoints)
    assert not report.unreadable


@pytest.mark.parametrize(
    ("place", "file"),
    [("", "config.json"), ("huggingface", "huggingface/config.json"), (".hf_metadata", ".hf_metadata/config.json")],
)
def test_the_configuration_of_a_training_checkpoint_is_found(tmp_path: Path, place: str, file: str) -> None:
    folder = shutil.copytree(REAL / "exports" / "ok_dcp", tmp_path / "step")
    text = (folder / "huggingface" / "config.json").read_text()
    shutil.rmtree(folder / "huggingface")
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "config.json").write_text(text)
    ckpt = ckptlint.load(folder)
    assert ckpt.config is not None
    assert ckpt.config.file == file
    assert fit_of(ckpt).pairing.prefix == "model."


@pytest.mark.parametrize("name", ["consolidated.safetensors", "embeddings.safetensors", "adapter_model.safetensors"])
def test_weights_that_no_library_loads_by_the_configuration_are_not_held_against_it(tmp_path: Path, name: str) -> None:
    export = REAL / "exports" / "R02_head_lost"
    shutil.copy(export / "config.json", tmp_path)
    shutil.copy(export / "model.safetensors", tmp_path / name)
    assert ckptlint.load(tmp_path).config is None
    loud = {"CFG001", "CFG002", "CFG003", "CFG004", "CFG005"}
    assert not [item for item in ckptlint.check(tmp_path).diagnostics if item.code in loud]


def test_a_large_configuration_is_not_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"tensors": {"w": {"dtype": "float32", "shape": [2]}}})
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100 * 1024**2)
    with ends(2):
        (item,) = ckptlint.check(tmp_path).diagnostics
    assert item.title.startswith("config.json cannot be read (")


def test_the_total_of_an_index_is_not_told_twice(tmp_path: Path) -> None:
    """What the configuration implies is what the index says, and CFG001 names what is lost."""
    export = shutil.copytree(REAL / "exports" / "ok_llama_sharded", tmp_path / "export")
    index = export / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    lost = export / document["weight_map"].pop("model.norm.weight")
    for key in [key for key, file in document["weight_map"].items() if file == lost.name]:
        del document["weight_map"][key]
    lost.unlink()
    index.write_text(json.dumps(document))
    loud = [item.code for item in ckptlint.check(export).diagnostics if item.severity > Severity.INFO]
    assert loud == ["CFG001"]


def test_rules_that_infer_leave_it_to_the_configuration() -> None:
    """One cause, one finding: experts, layers and shapes are known here."""
    report = ckptlint.check(REAL / "exports" / "R06_experts_lost")
    assert [item.code for item in report.diagnostics] == ["CFG001"]
    assert {"SHP001", "EXP001", "EXP002", "COM008"} <= report.checkpoints[0].not_applicable.keys()


def test_a_key_without_the_prefix_of_all_others_is_missing(tmp_path: Path) -> None:
    form = expected()
    names = {f"model.{name}": shape for name, shape in shapes(form).items()}
    names["model.norm.weight"] = names.pop("model.model.norm.weight")
    ckpt = replace(stored(names, tmp_path), format="dcp")
    ckpt.facts[(expectations.__wrapped__,)] = (form,)
    fit = fit_of(ckpt)
    assert (fit.missing, fit.instead) == (["model.norm.weight"], ["model.norm.weight"])
    assert fit.shown("model.norm.weight") == "model.model.norm.weight"
