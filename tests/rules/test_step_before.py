"""The RUN rules on real saves of torch: two steps of one run that differ in one way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptlint

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

State = dict[str, Any]


def state(step: int) -> State:
    """A model of three layers and the state of Adam, as at a step."""
    made = torch.Generator().manual_seed(step)
    weights = {f"model.layers.{i}.w": torch.randn(16, 8, generator=made) for i in range(3)}
    weights |= {"model.norm.weight": torch.ones(8), "model.embed_tokens.weight": torch.randn(32, 8, generator=made)}
    names = [name.removeprefix("model.") for name in weights]
    moments = {
        f"optimizer.state.{what}.{name}": torch.randn(weights[f"model.{name}"].shape, generator=made)
        for what in ("exp_avg", "exp_avg_sq")
        for name in names
    }
    steps = {f"optimizer.state.step.{name}": torch.tensor(float(step)) for name in names}
    return weights | moments | steps | {"rng_state": step, "lr_scheduler": {"last": step}}


def save(values: State, path: Path) -> None:
    """A save of torch in four files."""
    writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
    dcp.save(values, storage_writer=writer, no_dist=True)


def without(*words: str) -> Callable[[State], State]:
    return lambda values: {key: value for key, value in values.items() if not any(word in key for word in words)}


def recast(*words: str) -> Callable[[State], State]:
    return lambda values: {
        key: value.bfloat16() if any(word in key for word in words) and value.dim() else value
        for key, value in values.items()
    }


def transposed(values: State) -> State:
    return values | {"model.layers.1.w": values["model.layers.1.w"].T.contiguous()}


def grown(values: State) -> State:
    return values | {"model.embed_tokens.weight": torch.randn(40, 8)}


def renamed(values: State) -> State:
    return {key.replace("model.", "model._orig_mod."): value for key, value in values.items()}


def found(path: Path, depth: Any = "files") -> set[tuple[str, str]]:
    """Code and level of what the RUN rules find in a step."""
    report = ckptlint.check(path, depth=depth, select=["RUN"])
    return {(item.code, item.severity.label) for item in report.diagnostics}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda values: values, set()), (without("layers.1.w"), {("RUN001", "warning")}),
        (without("exp_avg_sq.layers.2"), {("RUN001", "warning")}), (without("norm"), {("RUN001", "warning")}),
        (without("rng_state"), {("RUN001", "warning")}), (without("optimizer"), {("RUN001", "info")}),
        (renamed, {("RUN001", "info"), ("RUN002", "info")}), (transposed, {("RUN003", "warning")}),
        (recast("layers.0.w"), {("RUN003", "warning")}), (recast("exp_avg"), {("RUN003", "info")}),
        (grown, {("RUN003", "info")}),
        (lambda values: values | {"model.value_head.weight": torch.ones(1, 8)}, {("RUN002", "info")}),
    ],
    ids=[
        "nothing changed", "a layer is lost", "a moment is lost", "the final norm is lost", "the random state is lost",
        "without the optimizer", "every key renamed", "a layer transposed", "a layer cast", "all first moments cast",
        "the vocabulary grew", "a head is new",
    ],
)  # fmt: skip
def test_a_step_against_the_one_before_it(
    change: Callable[[State], State], expected: set[tuple[str, str]], tmp_path: Path
) -> None:
    save(state(100), tmp_path / "step-100")
    save(change(state(200)), tmp_path / "step-200")
    assert found(tmp_path / "step-200") == expected
    assert found(tmp_path / "step-100") == set()


def test_a_copy_of_the_step_before(tmp_path: Path) -> None:
    """One state under two names: an asynchronous save that staged too late."""
    save(state(100), tmp_path / "step-100")
    save(state(100) | {"rng_state": 200}, tmp_path / "step-200")
    report = ckptlint.check(tmp_path, depth="headers", select=["RUN"], all_steps=True)
    assert [(item.code, item.severity.label) for item in report.diagnostics] == [("RUN005", "warning")]
    assert "bit-identical to step-100" in report.diagnostics[0].title


def test_files_of_two_saves_in_one_folder(tmp_path: Path) -> None:
    """Every second file is that of an older save of the same structure."""
    for step in (100, 200):
        save(state(step), tmp_path / f"step-{step}")
    mixed = tmp_path / "step-200"
    files = sorted(mixed.glob("*.distcp"))
    for file in files[::2]:
        shutil.copy(tmp_path / "step-100" / file.name, file)
    assert ("RUN006", "warning") in found(mixed, "headers")


def test_a_step_after_a_broken_one_has_no_step_before(tmp_path: Path) -> None:
    """One whose save did not finish is no reference; the one before it is."""
    save(without("layers.1.w")(state(100)), tmp_path / "step-100")
    save(state(200), tmp_path / "step-200")
    (tmp_path / "step-200" / ".metadata").unlink()
    save(state(300), tmp_path / "step-300")
    assert found(tmp_path / "step-300") == {("RUN002", "info")}
