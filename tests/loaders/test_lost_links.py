"""Links that lead nowhere, links that were copied as text, and downloads that did not end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import REAL, codes, report_on

import ckptlint
from ckptlint.testing import write_checkpoint

BLOB = "../../blobs/abc"
LINK = "../../blobs/" + "0123456789abcdef" * 4
CONFIG = json.dumps({"model_type": "something", "num_hidden_layers": 1})
PARTS = {f"model-0000{k}-of-00003.safetensors": {"tensors": {f"w{k}": {"shape": [4, 4]}}} for k in (1, 2, 3)}
INDEX = json.dumps({"weight_map": {f"w{k}": name for k, name in enumerate(PARTS, 1)}})


def lost(folder: Path, *names: str) -> Path:
    """A folder, in which files of these names are links that lead nowhere."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(BLOB)
    return folder


def model(folder: Path) -> Path:
    """A model in three files with its index."""
    return write_checkpoint({"safetensors": PARTS, "raw": {"model.safetensors.index.json": INDEX}}, folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        ".metadata",
        "__0_0.distcp",
        "model.pt",
    ],
)
def test_a_link_that_leads_nowhere_is_the_one_finding(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    report = ckptlint.check(lost(tmp_path, name))
    assert (report.exit_code, codes(report)) == (1, {"COM001"})
    assert report.diagnostics[0].title == f"{name} is a link to {BLOB}, which is not there"
    assert "again" in report.diagnostics[0].finding.hint


def test_all_of_several_links_are_named_once(tmp_path: Path) -> None:
    report = ckptlint.check(lost(tmp_path, *PARTS))
    assert len(report.diagnostics) == 1
    assert "; the same is true of model-00002-of-00003" in report.diagnostics[0].title


def test_a_shard_or_the_index_that_is_a_lost_link(tmp_path: Path) -> None:
    (sentence,) = ckptlint.check(lost(model(tmp_path / "a"), "model-00002-of-00003.safetensors")).diagnostics
    assert sentence.code == "PAY014" and f"is a link to {BLOB}, which is not there" in sentence.finding.hint
    for number, name in enumerate(("model-00002-of-00003.safetensors", "model.safetensors.index.json")):
        folder = model(tmp_path / str(number))
        (folder / "model.safetensors.index.json").unlink()
        titles = [item.title for item in ckptlint.check(lost(folder, name)).diagnostics if item.code == "COM001"]
        assert titles == [f"{name} is a link to {BLOB}, which is not there"]


def test_the_payload_of_a_sharded_save(tmp_path: Path) -> None:
    step = write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "step")
    (payload,) = (file.name for file in step.glob("*.distcp"))
    (item,) = ckptlint.check(lost(step, payload)).diagnostics
    assert item.code == "PAY003" and f"{payload} is a link to {BLOB}, which is not there" in item.finding.hint
    (item,) = ckptlint.check(lost(step, ".metadata")).diagnostics
    assert item.code == "COM001" and item.title.startswith(f".metadata is a link to {BLOB}, which is not there")


def test_the_newest_step_that_is_a_lost_link_is_no_step_to_pass_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, run / "step-10")
    (run / "step-20").symlink_to("/nowhere/step-20")
    (run / "latest").symlink_to("/nowhere/latest")
    (item,) = ckptlint.check(run).diagnostics
    assert (item.code, item.title) == ("COM001", "step-20 is a link to /nowhere/step-20, which is not there")
    assert sorted(bool(part.diagnostics) for part in ckptlint.check(run, all_steps=True).checkpoints) == [False, True]


@pytest.mark.parametrize(
    "ending", ["incomplete", "part", "partial", "crdownload", "download", "0123456789abcdefabcd.incomplete"]
)
def test_a_download_that_did_not_end(tmp_path: Path, ending: str) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / f"model.safetensors.{ending}").write_bytes(b"\x10")
    (item,) = ckptlint.check(tmp_path).diagnostics
    assert item.title == f"the download of model.safetensors did not end: only model.safetensors.{ending} is there"


def test_what_no_checkpoint_needs_is_no_error(tmp_path: Path) -> None:
    assert report_on(lost(model(tmp_path / "a"), "README.md", "consolidated.safetensors")).exit_code == 0
    whole = model(tmp_path / "b")
    (whole / "model-00001-of-00003.safetensors.incomplete").write_bytes(b"\x10")
    assert report_on(whole).exit_code == 0
    step = write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "step-1")
    assert report_on(lost(step, "model.safetensors.lock", "notes.txt")).exit_code == 0
    for name in ("README.md", "train.bin"):
        report = report_on(lost(tmp_path / name.partition(".")[0], name))
        assert report.exit_code == 3


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.pt", ".metadata", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("text", [LINK, "/data/models/w.bin\n"])
def test_a_link_as_text_is_told_as_one(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    item = next(item for item in ckptlint.check(tmp_path).diagnostics if item.severity.label == "error")
    assert item.title == f"{name} holds the path of a link, not the file it leads to"
    assert item.finding.hint == "download or copy it again with links followed"


@pytest.mark.parametrize("text", ["../../blobs/abc and more", "hello", "{}", "../a\n../b\n", "./"])
def test_other_texts_are_no_links(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").write_text(text)
    report = ckptlint.check(tmp_path)
    assert report.exit_code == 1 and "link" not in report.diagnostics[0].title


def test_a_payload_file_that_is_the_text_of_a_link_is_told_as_one(tmp_path: Path) -> None:
    step = Path(shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step"))
    (step / "__1_0.distcp").write_text(LINK)
    shutil.copystat(step / ".metadata", step / "__1_0.distcp")
    report = ckptlint.check(step)
    assert codes(report, "error", "warning") == {"PAY004"}
    finding = report.diagnostics[0]
    assert finding.title.startswith("__1_0.distcp holds the path of a link, not the file it leads to")
    assert finding.finding.hint == "download or copy it again with links followed"
    (step / "__1_0.distcp").write_bytes(b"x" * 70)  # cut, and no link
    (finding,) = [item for item in ckptlint.check(step).diagnostics if item.code == "PAY004"]
    assert "short" in finding.title and "link" not in finding.title


def test_metadata_that_is_a_link_to_nothing_is_no_unfinished_save(tmp_path: Path) -> None:
    step = Path(shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step"))
    (finding,) = ckptlint.check(lost(step, ".metadata")).diagnostics
    assert finding.title == f".metadata is a link to {BLOB}, which is not there; 4 payload files are there"
    assert finding.finding.why.startswith("the link was copied without the file")
    assert "links followed" in finding.finding.hint
