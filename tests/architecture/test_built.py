"""Models that transformers builds where no table knows them: real ones, and configurations made to harm."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import run_forked, swept

import ckptlint
from ckptlint.architecture import built
from ckptlint.architecture.built import built_model
from ckptlint.architecture.expected import NoTable
from ckptlint.loaders.reference import read_reference

CONVBERT = {
    "model_type": "convbert", "architectures": ["ConvBertModel"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 30,
}  # fmt: skip
"""A type that no table knows."""


def refused(config: dict[str, Any]) -> str:
    """The sentence that a configuration is refused with: one line, and no traceback in it."""
    with pytest.raises(NoTable) as caught:
        built_model(config)
    sentence = str(caught.value)
    assert sentence.startswith("and ") and sentence.isprintable() and len(sentence) < 300
    return sentence


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """The shapes of CONVBERT, built where a file has the name of a package."""
    pytest.importorskip("transformers", reason="needs transformers (extra tables)")
    folder = tmp_path_factory.mktemp("beside")
    (folder / "transformers.py").write_text("raise SystemExit('imported')")
    with contextlib.chdir(folder):
        return built_model(CONVBERT)


@pytest.mark.ci
def test_a_type_without_a_table_is_built(shapes: dict[str, tuple[int, ...]]) -> None:
    assert shapes["encoder.layer.0.intermediate.dense.weight"] == (24, 16)
    assert shapes["encoder.layer.0.output.dense.weight"] == (16, 24)


@pytest.mark.ci
def test_a_file_beside_the_checkpoint_is_never_imported(shapes: dict[str, tuple[int, ...]]) -> None:
    assert shapes


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built in a fork of this process, not in a Python that imports transformers anew for six seconds."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra tables)")
    for model in ("ConvBertModel", "XLMModel"):
        getattr(transformers, model)

    def build(given: str) -> None:
        *limits, asked = json.loads(given)
        built._limit(*limits)
        sys.stdout.write(json.dumps(built._build(asked)))

    def run(command: list[str], *, input: str, **_: Any) -> Any:  # noqa: A002  the name that subprocess has
        return run_forked(lambda: build(input), tmp_path)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("where", ["", "text_config"])
def test_code_of_its_own_is_never_run(where: str) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}}
    assert "auto_map" in refused(CONVBERT | ({where: code} if where else code))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_hidden_layers": 10**9}, "more than 2,000 layers"),
        ({"num_hidden_layers": 1e9}, "more than 2,000 layers"),
        ({"depths": [10**9, 2]}, "more than 2,000 layers"),
        ({"depths": [1] * 3000}, "more than 2,000 layers"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "more than 2,000 layers"),
        ({"architectures": []}, "names no class"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantisation"),
    ],
)
def test_what_is_refused_before_any_work(values: dict[str, Any], told: str) -> None:
    assert told in refused(CONVBERT | values)


@pytest.mark.ci
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["os.system"]}, {"model_type": ["convbert"]}, {"hidden_size": -16}, {"vocab_size": 10**30},
        *swept({"architectures": [["ConvBertModel"]]}, {"hidden_size": "sixteen"}),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_no_model_has_are_one_sentence(values: dict[str, Any]) -> None:
    assert "cannot build it" in refused(CONVBERT | values)


@pytest.mark.ci
@pytest.mark.usefixtures("warm")
def test_what_is_built_is_a_reference(tmp_path: Path) -> None:
    config = {
        "model_type": "xlm", "architectures": ["XLMModel"], "emb_dim": 8, "n_layers": 1, "n_heads": 2, "n_words": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = read_reference(str(tmp_path)).tensors
    assert tensors["embeddings.weight"] == (None, (32, 8))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["os"]}))
    with pytest.raises(ckptlint.errors.ConfigError):
        read_reference(str(tmp_path))


def acting(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the other process do this instead of building a model, under the limits that a build has."""
    start = "import sys, json; from ckptlint.architecture import built; *limits, _ = json.load(sys.stdin)\n"
    real = subprocess.run

    def run(_: object, **options: Any) -> Any:
        return real([sys.executable, "-P", "-c", f"{start}built._limit(*limits)\n{code}"], **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sets no limits on a process")
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True: pass", "was stopped while it built it (signal"),
        ("import os; os.abort()", "was stopped while it built it (signal 6"),
        ("print('no answer')", "cannot build it"),
        ("print('[1, 2]', end='')", "cannot build it"),
        ("raise SystemExit(3)", "cannot build it"),
    ],
)
def test_a_process_that_loops_or_crashes(code: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acting(monkeypatch, code)
    monkeypatch.setattr(built, "SECONDS", 1 if "while" in code else 60)
    assert told in refused(CONVBERT)


def test_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    acting(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(built, "WAIT", 1)
    assert "did not build it within 1 s" in refused(CONVBERT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the memory of a process")
def test_a_process_that_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    acting(monkeypatch, "bytearray(3 << 30)")
    monkeypatch.setattr(built, "MEMORY", 1 << 30)
    assert "MemoryError" in refused(CONVBERT)


def test_what_was_compared_instead_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the declared counts are compared, and the report says what would tell more."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps(CONVBERT))
    reference = read_reference(str(tmp_path))
    assert reference.tensors == {}
    assert "no table for model_type convbert" in reference.not_looked_at
    assert "pip install torch transformers" in reference.not_looked_at
    assert "only what it declares (layers, hidden, heads, vocab)" in reference.not_looked_at
    exports = Path(__file__).parents[2] / "fixtures" / "real" / "exports" / "ok_vit"
    (part,) = ckptlint.check(exports, expect=tmp_path).checkpoints
    assert part.checkpoint.not_looked_at == (reference.not_looked_at,)


def test_a_configuration_that_nothing_follows_from_is_no_reference(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoModel": "own.Model"}}))
    with pytest.raises(ckptlint.errors.ConfigError, match=r"any checkpoint would pass: .*auto_map"):
        read_reference(str(tmp_path))
