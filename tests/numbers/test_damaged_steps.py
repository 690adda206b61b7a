"""Two steps of a real run, of which the second is damaged in its numbers alone: each is named by the step before."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from damages import Save
from support import REAL, SWEEP, codes, report_on

import ckptlint
from ckptlint.lint.settings import request

RUN = REAL / "numbers"
NUMBERS = {"OPT010", "OPT011", "OPT012", "OPT013", "RUN005", "RUN007", "RUN008", "RUN009"} | {
    f"PAY0{n}" for n in range(16, 21)
}
Damage = Callable[[Save, Save, random.Random], None]


@cache
def steps() -> tuple[Save, Save]:
    """The step that is damaged, and the one before it, whose chunks are the same."""
    now, was = Save("fsdp2_4r"), Save("before", RUN / "step-190")
    assert [(one.fqn, str(one.box)) for one in now.chunks] == [(one.fqn, str(one.box)) for one in was.chunks]
    return now, was


def weights(save: Save, **named: object) -> list[int]:
    return [row for row in save.rows("", **named) if len(save.chunks[row].box.sizes) > 1]


def stale_weights_of_a_rank(now: Save, was: Save, draw: random.Random) -> None:
    for row in now.rows("", rank=draw.randrange(4)):
        now.values[row] = was.values[row]


def stale_moments(now: Save, was: Save, draw: random.Random) -> None:
    for row in now.rows("exp_avg") + now.rows("exp_avg_sq"):
        now.values[row] = was.values[row]


def rows_in_another_order(now: Save, was: Save, draw: random.Random) -> None:
    for row in weights(now, rank=draw.randrange(4)):
        lines = now.values[row].reshape(now.chunks[row].box.sizes[0], -1)
        now.values[row] = lines[::-1].reshape(-1).copy()


def all_matrices_times_4(now: Save, was: Save, draw: random.Random) -> None:
    for row in weights(now):
        now.values[row] = now.values[row] * 4


def a_sign_flipped(now: Save, was: Save, draw: random.Random) -> None:
    fqn = now.chunks[draw.choice([row for row in weights(now) if now.chunks[row].elements >= 64])].fqn
    for row in weights(now, fqn=fqn):
        now.values[row] = -now.values[row]


def one_element_of_4(now: Save, was: Save, draw: random.Random) -> None:
    row = draw.choice(weights(now))
    now.values[row][draw.randrange(len(now.values[row]))] = 4.0


def ranks_exchanged(now: Save, was: Save, draw: random.Random) -> None:
    for row in weights(now, rank=0):
        chunk = now.chunks[row]
        other = next(i for i in weights(now, rank=1, fqn=chunk.fqn))
        if len(now.values[row]) == len(now.values[other]):
            now.values[row], now.values[other] = now.values[other], now.values[row]


def noise_in_a_rank(now: Save, was: Save, draw: random.Random) -> None:
    noise = np.random.default_rng(draw.randrange(99))
    for row in weights(now, rank=draw.randrange(4))[:3]:
        now.values[row] = np.float32(now.values[row] + noise.normal(0, now.values[row].std(), len(now.values[row])))


def experts_exchanged(now: Save, was: Save, draw: random.Random) -> None:
    for row, chunk in enumerate(now.chunks):
        if ".experts.0." in chunk.fqn:
            name = chunk.fqn.replace(".experts.0.", ".experts.1.")
            other = next(i for i, one in enumerate(now.chunks) if one.fqn == name and one.box == chunk.box)
            now.values[row], now.values[other] = now.values[other], now.values[row]


def moments_of_another_layer(now: Save, was: Save, draw: random.Random) -> None:
    for row, chunk in enumerate(now.chunks):
        if chunk.state and ".layers.0." in chunk.fqn:
            name = chunk.fqn.replace(".layers.0.", ".layers.1.")
            other = next((i for i, one in enumerate(now.chunks) if (one.fqn, one.box) == (name, chunk.box)), None)
            if other is not None:
                now.values[row], now.values[other] = now.values[other], now.values[row]


def a_transposed_matrix(now: Save, was: Save, draw: random.Random) -> None:
    squares = [fqn for fqn, whole in wholes(now).items() if whole.ndim == 2 and len(set(whole.shape)) == 1]
    put_whole(now, fqn := draw.choice(squares), wholes(now)[fqn].T)


def columns_in_another_order(now: Save, was: Save, draw: random.Random) -> None:
    row = max(weights(now), key=lambda row: now.chunks[row].box.sizes[0])
    lines = now.values[row].reshape(now.chunks[row].box.sizes)
    now.values[row] = lines[:, ::-1].reshape(-1).copy()


def one_projection_of_experts_exchanged(now: Save, was: Save, draw: random.Random) -> None:
    name = next(chunk.fqn for chunk in now.chunks if ".experts.0." in chunk.fqn and not chunk.state)
    exchange(now, name, name.replace(".experts.0.", ".experts.1."))


def a_tensor_copied_from_the_step_before(now: Save, was: Save, draw: random.Random) -> None:
    for row, chunk in enumerate(now.chunks):
        if ".layers.0." in chunk.fqn and "up_proj" in chunk.fqn and not chunk.state:
            other = chunk.fqn.replace(".layers.0.", ".layers.1.")
            now.values[row] = was.values[next(i for i in was.rows("", fqn=other) if was.chunks[i].box == chunk.box)]


def foreign_weights_of_the_same_size(now: Save, was: Save, draw: random.Random) -> None:
    noise = np.random.default_rng(3)
    for row in weights(now, rank=1):
        now.values[row] = np.float32(noise.normal(0, was.values[row].std(), len(was.values[row])))


def exchange(save: Save, one: str, other: str) -> None:
    rows = {chunk.box: row for row, chunk in enumerate(save.chunks) if chunk.fqn == one}
    for row in [row for row, chunk in enumerate(save.chunks) if chunk.fqn == other]:
        mine = rows[save.chunks[row].box]
        save.values[row], save.values[mine] = save.values[mine], save.values[row]


def wholes(save: Save) -> dict[str, np.ndarray]:
    """The weights that are cut along rows, put together."""
    rows: dict[str, list[int]] = {}
    for row in weights(save):
        rows.setdefault(save.chunks[row].fqn, []).append(row)
    return {
        fqn: np.concatenate(
            [
                save.values[row].reshape(save.chunks[row].box.sizes)
                for row in sorted(members, key=lambda row: save.chunks[row].box.offsets)
            ]
        )
        for fqn, members in rows.items()
    }


def put_whole(save: Save, fqn: str, whole: np.ndarray) -> None:
    for row in weights(save, fqn=fqn):
        box = save.chunks[row].box
        save.values[row] = whole[box.offsets[0] : box.ends[0]].reshape(-1).copy()


DAMAGES: dict[Damage, set[str]] = {
    stale_weights_of_a_rank: {"RUN009"},
    stale_moments: {"RUN009"},
    rows_in_another_order: {"RUN007"},
    all_matrices_times_4: {"RUN007"},
    a_sign_flipped: {"RUN007"},
    one_element_of_4: {"RUN007"},
    ranks_exchanged: {"RUN007"},
    noise_in_a_rank: {"RUN007"},
    experts_exchanged: {"RUN007"},
    moments_of_another_layer: {"RUN008"},
    a_transposed_matrix: {"RUN007"},
    columns_in_another_order: {"RUN007"},
    one_projection_of_experts_exchanged: {"RUN007"},
    a_tensor_copied_from_the_step_before: {"RUN007"},
    foreign_weights_of_the_same_size: {"RUN007"},
}
SAYS: dict[Damage, str] = {
    rows_in_another_order: r"the weights of rank \d have their rows in another order than in step-190",
    all_matrices_times_4: r"the weights of 23 of 32 tensors are (3\.9\d?|4(\.0\d)?) times those of step-190",
    a_sign_flipped: r"the weights of \S+ are the negative of those of step-190",
    one_element_of_4: r"the weights of \S+ moved up to .*",
    ranks_exchanged: r"the weights of ranks 0 and 1 in .* are exchanged since step-190",
    noise_in_a_rank: r"the weights of rank \d moved up to .*",
    experts_exchanged: r"the weights and moments of experts 0 and 1 of layer \d are exchanged since step-190",
    moments_of_another_layer: r"the moments of layers 0 and 1 are exchanged since step-190, in \d+ of \d+ chunks .*",
    a_transposed_matrix: r"the weights of \S+ are those of step-190 transposed",
    columns_in_another_order: r"the weights of \S+ have their columns in another order than in step-190",
    one_projection_of_experts_exchanged: r"the weights of \S+\.0\.up_proj\S+ and \S+\.1\.\S+ are exchanged .*",
    a_tensor_copied_from_the_step_before: r"the weights of \S+\.0\.\S+ are those of \S+\.1\.\S+ in step-190",
    foreign_weights_of_the_same_size: r"the weights of rank 1 moved up to .*",
}


@pytest.mark.parametrize("depth", ["headers", "data"])
def test_a_healthy_run_continues(depth: str) -> None:
    report = report_on(RUN, depth=depth)
    assert not codes(report) & NUMBERS
    changes = report.checkpoints[-1].checkpoint.changes
    assert changes is not None
    assert not changes.origins  # nothing leapt, nothing was looked for


def test_what_two_tensors_held_is_not_said_of_one(tmp_path: Path) -> None:
    now, was = steps()
    now.reset()
    was.reset()
    name = "model.layers.{}.mlp.up_proj.weight"
    for row in now.rows("", fqn=name.format(0)):
        one, other = (
            next(i for i in was.rows("", fqn=name.format(n)) if was.chunks[i].box == was.chunks[row].box)
            for n in (1, 2)
        )
        was.values[other] = was.values[one]
        now.values[row] = was.values[one]
        now.values[other] = now.values[one]
    was.write(tmp_path / "run/step-190")
    was.reset()
    now.write(tmp_path / "run/step-200")
    messages = [item.finding.message for item in report_on(tmp_path / "run", depth="headers").diagnostics]
    (told,) = [message for message in messages if name.format(0) in message and "moved up to" in message]
    assert "are those of" not in told


@pytest.mark.sweep(share=5)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_does_not_continue_is_named(damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, was = steps()
    now.reset()
    damage(now, was, random.Random(damage.__name__))
    assert now.is_changed
    shutil.copytree(RUN / "step-190", tmp_path / "run/step-190")
    now.write(tmp_path / "run/step-200")
    report = report_on(tmp_path / "run", depth="data" if SWEEP else "headers")
    assert codes(report) & NUMBERS == DAMAGES[damage]
    if damage in SAYS:
        (message,) = [item.finding.message for item in report.diagnostics if item.code in DAMAGES[damage]]
        assert re.fullmatch(SAYS[damage], message)
    assert not codes(report_on(tmp_path / "run/step-190", depth="data")) & NUMBERS
    monkeypatch.setattr(request, "CHEAP_BYTES", 1)  # numbers are drawn by default
    report = report_on(tmp_path / "run")
    assert codes(report) & NUMBERS == DAMAGES[damage]
    assert report.depth == "files"
    (skipped,) = ckptlint.latest(tmp_path / "run").skipped
    assert skipped.code in DAMAGES[damage]


def test_a_stale_rank_of_deepspeed_is_named(tmp_path: Path) -> None:
    """Its files number the data parallel ranks, which are those of the job without model parallelism."""
    save = Save("deepspeed_z3_4r")
    shutil.copytree(save.folder, tmp_path / "run/global_step2")
    for stale, told in ((2, ["the weights and first moments and second moments of rank 2"]), (None, [])):
        save.values = [
            values if chunk.rank == stale else np.float32(values * 1.01)
            for values, chunk in zip(save.before, save.chunks, strict=True)
        ]
        later = tmp_path / "run/global_step3"
        shutil.rmtree(later, ignore_errors=True)
        save.write(later)
        report = report_on(tmp_path / "run", depth="headers")
        titles = [item.title for item in report.diagnostics if item.code == "RUN009"]
        assert [title.partition(" are those of ")[0] for title in titles] == told
