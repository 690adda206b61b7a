"""A step that is checked alone, held against the one that the user names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damages import Save
from support import REAL, codes, report_on, run

import ckptlint
from ckptlint.errors import ConfigError

torch = pytest.importorskip("torch")

RUN = REAL / "numbers"


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a step, without its run, of which one rank holds the weights of the step before."""
    now, was = Save("fsdp2_4r"), Save("before", RUN / "step-190")
    for row in now.rows("", rank=2):
        now.values[row] = was.values[row]
    place = tmp_path_factory.mktemp("stale") / "final"
    now.write(place)
    return place


@pytest.mark.parametrize("depth", ["headers", "data"])
def test_a_step_is_held_against_the_named_one(stale: Path, depth: str) -> None:
    assert report_on(stale, depth=depth).exit_code == 0
    report = report_on(stale, before=RUN / "step-190", depth=depth)
    assert codes(report, "error", "warning") == {"RUN009"}
    healthy = report_on(RUN / "step-200", before=RUN / "step-190", depth=depth)
    assert healthy.exit_code == 0


def test_the_parts_of_a_step_are_held_against_the_same_parts(stale: Path, tmp_path: Path) -> None:
    for step, source in (("new", stale), ("old", RUN / "step-190")):
        shutil.copytree(source, tmp_path / step / "model")
        shutil.copytree(RUN / "step-190", tmp_path / step / "optimizer")
    report = report_on(tmp_path / "new", before=tmp_path / "old", depth="headers")
    assert [codes(part, "error", "warning") for part in report.checkpoints] == [{"RUN009"}, {"RUN005"}]
    shutil.rmtree(tmp_path / "old/optimizer")
    report = report_on(tmp_path / "new", before=tmp_path / "old", depth="headers")
    assert codes(report, "error", "warning") == {"RUN009"}
    assert [part.checkpoint.not_looked_at for part in report.checkpoints][1][0].endswith("--before has no such part")


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("final", "which is what is checked"),
        (REAL / "exports", "name the same part of a step"),
        ("nowhere", "does not exist"),
        (REAL / "metadata_truncated", "cannot be compared with: .metadata"),
        (REAL / "exports/ok_bamba", "cannot be compared with: it is"),
    ],
)
def test_what_cannot_be_compared_with_is_refused(stale: Path, before: str | Path, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ckptlint.check(stale, before=stale.parent / before)
    done = run("--isolated", stale, "--before", stale.parent / before)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_one_named_step_is_no_step_before_of_all(stale: Path) -> None:
    with pytest.raises(ConfigError, match="--before names one step"):
        ckptlint.check(RUN, all_steps=True, before=stale)


@pytest.mark.parametrize("name", ["checkpoint_{}.pt", "epoch={}-step={}.ckpt", "model_seed{}.pt"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_step_that_is_a_file_is_held_against_the_file_before(tmp_path: Path, name: str, exchanged: bool) -> None:
    torch.manual_seed(0)
    keys = [f"layers.{layer}.self_attn.{part}_proj.weight" for layer in range(4) for part in "qkvo"]
    weights = {key: torch.randn(32, 32) for key in keys}
    for step in (10, 20, 30):
        weights = {key: value + 1e-3 * torch.randn(32, 32) for key, value in weights.items()}
        stored = dict(weights)
        if exchanged and step == 30:
            stored[keys[0]], stored[keys[3]] = stored[keys[3]], stored[keys[0]]
        state = {"state_dict": stored, "global_step": step, "pytorch-lightning_version": "2.6.6", "epoch": step}
        torch.save(state, tmp_path / name.format(step, step))
    report = ckptlint.check(tmp_path, depth="data")
    newest = tmp_path / name.format(30, 30)
    named = ckptlint.check(newest, depth="data", before=tmp_path / name.format(10, 10))
    assert [item.code for item in named.diagnostics] == ["RUN007"] * exchanged
    for judged in (report, ckptlint.check(newest, depth="data")):  # several seeds are no steps of one run
        assert [item.code for item in judged.diagnostics] == ["RUN007"] * (exchanged and "seed" not in name)
