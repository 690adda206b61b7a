"""What a load or a reader asks for by its name, and that cannot be read, never passes; what nobody asks for does."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import REAL, codes, found, report_on, run

from ckptlint.architecture.huggingface import expected_models

WANTED = ("config.json", "model.safetensors.index.json", "sha256sums.txt", "ckptlint.seal.json", "tokenizer.json")
IDLE = ("README.md", "events.log", "train.py", "model.gguf")
KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "lost link": lambda path: path.symlink_to("nowhere"),
}


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@pytest.fixture(params=["exports/ok_llama", "fsdp2_4r"])
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(REAL / request.param, tmp_path / "step"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WANTED)
def test_a_wanted_name_that_is_no_file_is_not_read(step: Path, name: str, kind: str) -> None:
    (step / name).unlink(missing_ok=True)
    KINDS[kind](step / name)
    report = report_on(step)
    assert report.exit_code == 4
    assert [item.title.startswith(f"{name} is a ") for item in report.diagnostics if item.code == "SAF002"] == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IDLE)
def test_what_nobody_asks_for_may_be_anything(step: Path, name: str, kind: str) -> None:
    KINDS[kind](step / name)
    assert report_on(step).exit_code == 0


@pytest.mark.parametrize("name", ["sub", "global_step5", "optimizer", "a/b"])
def test_a_link_out_of_the_checkpoint_is_not_read(step: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/optimizer.pt").write_bytes(pickle.dumps(Hostile()))
    (step / name).parent.mkdir(exist_ok=True)
    (step / name).symlink_to(tmp_path / "elsewhere")
    report = report_on(step)
    (finding,) = [item for item in report.diagnostics if item.code == "SAF002"]
    assert finding.title == f"{name} is a link to a folder outside of the checkpoint, so ckptlint did not read it"
    assert report.exit_code == 4


def test_links_out_of_logs_and_of_a_run_are_nobodys_state(step: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("logs", "wandb"):
        (step / name).symlink_to(tmp_path / "elsewhere")
    assert report_on(step).exit_code == 0
    shutil.move(step, tmp_path / "run/step-10")
    shutil.copytree(tmp_path / "run/step-10", tmp_path / "run/step-20", symlinks=True)
    (tmp_path / "run/data").symlink_to(tmp_path / "elsewhere")
    assert report_on(tmp_path / "run").exit_code in (0, 1)  # 1: the same numbers twice


@pytest.mark.parametrize("depth", ["metadata", "files"])
def test_code_in_a_file_beside_is_told_at_every_depth(step: Path, depth: str) -> None:
    (step / "optimizer.pt").write_bytes(pickle.dumps(Hostile()))
    assert "SAF001" in codes(report_on(step, depth=depth), "error")


def test_latest_looks_at_files_whatever_the_depth(tmp_path: Path) -> None:
    for number in (10, 20):
        shutil.copytree(REAL / "fsdp2_4r", tmp_path / f"step-{number}")
    (tmp_path / "step-20/__1_0.distcp").unlink()
    done = run("latest", tmp_path, "--depth", "metadata", "--isolated")
    assert done.stdout.strip().endswith("step-10")


DAMAGES = {"cut": b'{"a": [1, 2', "zeros": bytes(99), "empty": b"", "noise": bytes(range(128, 255))}


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "generation_config.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_tokens_is_not_read(tmp_path: Path, name: str, damage: str) -> None:
    folder = shutil.copytree(REAL / "exports/ok_llama", tmp_path / "export")
    (folder / name).write_bytes(DAMAGES[damage])
    report = report_on(folder)
    (finding,) = [item for item in report.diagnostics if item.code == "SAF002"]
    assert finding.title.startswith(f"{name} is damaged: ")
    assert report.exit_code == 4


SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("damage", [*DAMAGES, "list"])
def test_damaged_settings_of_a_tokenizer_are_not_read(tmp_path: Path, name: str, damage: str) -> None:
    folder = shutil.copytree(REAL / "exports/ok_llama", tmp_path / "export")
    (folder / name).write_text("{}")
    assert report_on(folder).exit_code == 0
    (folder / name).write_bytes(DAMAGES.get(damage, b"[]"))
    report = report_on(folder)
    (finding,) = [item for item in report.diagnostics if item.code == "SAF002"]
    assert finding.title.startswith(f"{name} is damaged: ")
    assert report.exit_code == 4


def test_settings_of_a_tokenizer_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    folder = shutil.copytree(REAL / "exports/ok_llama", tmp_path / "export")
    (folder / "tokenizer_config.json").touch()
    os.truncate(folder / "tokenizer_config.json", 10 << 40)
    report = report_on(folder)
    (finding,) = report.diagnostics
    assert finding.title == "tokenizer_config.json has 10.0 TiB, more than the 64.0 MiB that are read"
    assert (finding.code, report.exit_code) == ("SAF002", 4)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_tokens_that_no_load_reads_may_be_damaged(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(REAL / "exports/ok_llama", tmp_path / "export")
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / name).write_text("{")
    assert report_on(folder).exit_code == 0


@pytest.mark.parametrize("value", ["two", -1, 1e308, 2.5, [], [2], None])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_size_that_is_none_is_an_error(tmp_path: Path, name: str, value: object) -> None:
    report = report_on(export_with(tmp_path, {name: value}))
    (finding,) = [item for item in report.diagnostics if item.code == "CFG001"]
    assert f"{name} is " in finding.title
    assert report.exit_code == 1


@pytest.mark.parametrize("change", [{"num_key_value_heads": None, "num_attention_heads": 2}, {"head_dim": None}])
def test_a_null_that_a_library_takes_is_no_error(tmp_path: Path, change: dict[str, object]) -> None:
    assert not [item for item in report_on(export_with(tmp_path, change)).diagnostics if "null" in item.title]


def test_a_size_that_the_library_works_out_is_none_in_words() -> None:
    worded = expected_models({"model_type": "jamba", "mamba_dt_rank": "auto"})
    assert [model.tensors for model in worded] == [model.tensors for model in expected_models({"model_type": "jamba"})]


def export_with(folder: Path, change: dict[str, object]) -> Path:
    export = Path(shutil.copytree(REAL / "exports/ok_llama", folder / "export"))
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | change))
    return export


def test_a_configuration_beyond_the_limit_is_not_passed_over(step: Path) -> None:
    """An export is built by it; beside a DCP save it says what the job declared, and is named."""
    path = step / "config.json"
    declared = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(declared | {"notes": "x" * 2**21}))
    report = report_on(step)
    assert any("config.json cannot be read" in title for _, _, title in found(report))
    assert report.exit_code == (4 if (step / "model.safetensors").exists() else 0)
