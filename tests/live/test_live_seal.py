"""Seals in real gloo jobs: what four ranks save and seal is what the files hold and what other layouts load."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import run_alike, run_ranks
from support import swept
from test_check import Piece, mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptlint
from ckptlint import live
from ckptlint.seals.file import SEAL

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, Any]


def state(rank: int) -> State:
    """Tensors of every kind of owner, cut in several ways."""
    torch.manual_seed(0)
    grid, line = mesh(), init_device_mesh("cpu", (4,))
    return {
        "model": {
            "rows": distribute_tensor(torch.randn(8, 6).to(torch.bfloat16), line, [Shard(0)]),
            "both": distribute_tensor(torch.randn(8, 6), grid, [Shard(0), Shard(1)]),
            "copied": distribute_tensor(torch.randn(8, 6), grid, [Replicate(), Shard(1)]),
            "everywhere": distribute_tensor(torch.randn(3, 5), grid, [Replicate(), Replicate()]),
            "uneven": distribute_tensor(torch.randn(5, 3), line, [Shard(0)]),
            "plain": torch.arange(6.0),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "none": torch.zeros(0, 4),
            "piece": Piece.of(torch.full((2, 4), float(rank)), (2 * rank, 0), (8, 4)),
        },
        f"stage{rank // 2}": {"bias": torch.ones(3) * (rank // 2)},
        "rng_state": torch.tensor([rank]),
        "step": 7,
    }


def saved(path: Path, change: Callable[[State, int], None] | None = None) -> list[Any]:
    """A job that saves its state and seals it; `change` comes between the two."""

    def job(rank: int) -> str | None:
        live.install(timeout=20)
        held = state(rank)
        dcp.save(held, checkpoint_id=path)
        if change:
            change(held, rank)
        made = live.seal(held, path, step=7)
        return None if made is None else made.name

    return run_ranks(job)


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed") / "ckpt"
    assert saved(folder) == [SEAL, None, None, None]
    return folder


@pytest.fixture
def sealed(sealed_once: Path, tmp_path: Path) -> Path:
    """A checkpoint that four ranks saved and sealed, for this test alone."""
    return Path(shutil.copytree(sealed_once, tmp_path, dirs_exist_ok=True))


def test_what_four_ranks_sealed_is_what_the_files_hold(tmp_path: Path, sealed: Path) -> None:
    document = json.loads((tmp_path / SEAL).read_text())
    keys = {"rows", "both", "copied", "everywhere", "uneven", "plain", "scalar", "none", "piece"}
    assert document["entries"].keys() == {f"model.{key}" for key in keys} | {"stage0.bias", "stage1.bias"}
    assert document["skipped"] == {"rng_state": "ignored"} and document["step"] == 7
    report = ckptlint.check(tmp_path, depth="data")
    assert [item.title for item in report.diagnostics] == [
        "1 key was not compared with ckptlint.seal.json: not sealed by the job (ignored)"
    ]
    assert report.exit_code == 0 and "LIV302" in report.checkpoints[0].passed


CHANGES: dict[str, Callable[[Any], Any]] = {
    "model.rows": lambda value: value._local_tensor.view(torch.int16).view(-1)[0].bitwise_xor_(1),
    "model.both": lambda value: value._local_tensor.view(torch.int32)[-1, -1].bitwise_xor_(1 << 31),
    "model.plain": lambda value: value.copy_(value.flip(0)),
    "model.scalar": lambda value: value.add_(1),
    "model.piece": lambda value: value.as_subclass(torch.Tensor).add_(1),
}


@pytest.mark.parametrize("fqns", [[*CHANGES], *swept(*([fqn] for fqn in CHANGES))], ids=" ".join)
def test_a_change_between_save_and_seal_is_named(fqns: list[str], tmp_path: Path) -> None:
    def change(held: State, rank: int) -> None:
        for fqn in fqns:
            if rank == 1 or fqn in ("model.plain", "model.scalar"):
                CHANGES[fqn](held["model"][fqn.partition(".")[2]])

    saved(tmp_path, change)
    report = ckptlint.check(tmp_path, depth="data", select=["LIV302"])
    assert sorted(item.fqn or "" for item in report.diagnostics) == sorted(fqns)


def layouts(rank: int) -> State:
    """The same keys in another layout."""
    grid, line = mesh(), init_device_mesh("cpu", (4,))

    def empty(shape: tuple[int, ...], at: Any, placements: list[Any], dtype: torch.dtype = torch.float32) -> DTensor:
        return distribute_tensor(torch.zeros(shape, dtype=dtype), at, placements)

    return {
        "model": {
            "rows": empty((8, 6), grid, [Shard(1), Shard(0)], torch.bfloat16),
            "both": empty((8, 6), line, [Replicate()]), "copied": torch.zeros(8, 6),
            "everywhere": empty((3, 5), line, [Shard(1)]), "uneven": empty((5, 3), grid, [Replicate(), Shard(1)]),
            "plain": empty((6,), line, [Shard(0)]), "scalar": torch.tensor(0, dtype=torch.int64),
            "none": torch.zeros(0, 4), "piece": empty((8, 4), grid, [Shard(1), Replicate()]),
        }
    }  # fmt: skip


def test_another_layout_loads_what_was_sealed(tmp_path: Path, sealed: Path) -> None:
    def job(rank: int) -> list[tuple[list[tuple[str, str | None, str, str, str]], int]]:
        live.install(timeout=20)
        held = layouts(rank)
        dcp.load(held, checkpoint_id=tmp_path)
        reports = [live.check_loaded(held, tmp_path)]
        if rank == 2:  # one element of one shard
            held["model"]["rows"]._local_tensor.view(torch.int16)[0, 0].bitwise_xor_(1)
        held["model"]["copied"][1, 1] += 1
        if rank == 3:  # of four copies; the one that is summed up for the seal is right
            held["model"]["both"]._local_tensor[2, 4] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reports.append(live.check_loaded(held, tmp_path, on_error="warn"))
        try:
            live.check_loaded(held, tmp_path)
        except live.LiveError as error:
            reports.append(error.report)
        dist.barrier()
        return [(reported(report), report.exit_code) for report in reports]

    (good, code), (bad, bad_code), raised = run_alike(job)
    lines = ["2 keys were not compared with the seal: not in the state"]
    assert ([line[3] for line in good], code) == (lines, 0)
    differing = [(code, fqn, place) for code, fqn, place, *_ in bad if code == "LIV304"]
    assert differing == [("LIV304", "model.copied", "ranks 0-3"), ("LIV304", "model.rows", "ranks 0-3")]
    assert [(fqn, hint) for code, fqn, _, _, hint in bad if code == "LIV205"] == [
        ("model.both", "look at rank 3 first")
    ]
    assert bad_code == 1 and raised == (bad, 1)


def reported(report: Any) -> list[tuple[str, str | None, str, str, str]]:
    return [(d.code, d.fqn, d.finding.at.label, d.title, d.finding.hint) for d in report.diagnostics]


UNUSABLE = {
    "absent": "there is no ckptlint.seal.json",
    "broken": "ckptlint.seal.json is not valid JSON",
    "older": "it belongs to a .metadata with the BLAKE2b",
    "later algorithm": "'elem64-2' made its digests",
}


def test_a_seal_that_cannot_be_used_is_no_pass(tmp_path: Path, sealed_once: Path) -> None:
    for fault in UNUSABLE:
        path = Path(shutil.copytree(sealed_once, tmp_path / fault)) / SEAL
        document = json.loads(path.read_text())
        if fault == "absent":
            path.unlink()
        elif fault == "broken":
            path.write_text("{")
        else:
            change = {"metadata_blake2b": "0" * 32} if fault == "older" else {"algorithm": "elem64-2"}
            path.write_text(json.dumps(document | change))

    def job(rank: int) -> dict[str, tuple[list[tuple[str, str | None, str, str]], int]]:
        live.install(timeout=20)
        held = state(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reports = {fault: live.check_loaded(held, tmp_path / fault) for fault in UNUSABLE}
        return {fault: (reported(report), report.exit_code) for fault, report in reports.items()}

    for fault, (found, code) in run_alike(job).items():
        assert (code, [line[0] for line in found]) == (4, ["LIV211"]), fault
        assert UNUSABLE[fault] in found[0][3]


def test_what_ranks_do_not_agree_about_is_not_sealed(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        live.install(timeout=20)
        held = state(rank)
        dcp.save(held, checkpoint_id=tmp_path)
        held["model"]["plain"] = torch.zeros(6 + rank % 2)
        held["model"]["scalar"] = torch.tensor(3.0)
        held["model"]["everywhere"] = torch.zeros(3, 5).to_sparse()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            live.seal(held, tmp_path)

    run_ranks(job)
    document = json.loads((tmp_path / SEAL).read_text())
    assert document["skipped"] == {
        "model.plain": "the ranks disagree on it",
        "model.scalar": "a different dtype or shape in the state",
        "model.everywhere": "no digest for its dtype or class",
        "rng_state": "ignored",
    }


def test_a_rank_that_cannot_read_its_state_seals_nothing_anywhere(tmp_path: Path) -> None:
    class Broken:
        """A stateful value whose state cannot be had."""

        def state_dict(self) -> State:
            raise RuntimeError("out of order")

        def load_state_dict(self, state: State) -> None:
            """Never."""

    def job(rank: int) -> str:
        live.install(timeout=20)
        held = state(rank)
        dcp.save(held, checkpoint_id=tmp_path)
        if rank == 2:
            held["broken"] = Broken()
        pending = live.prepare_seal(held)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert pending.write(tmp_path) is None
        assert len(seen) == (rank == 0)
        return pending.problem

    answers = run_ranks(job)
    assert len(set(answers)) == 1 and "out of order" in answers[0] and "rank 2" in answers[0]
    assert not (tmp_path / SEAL).exists()


def test_an_asynchronous_save_that_copies_too_late_is_found(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        live.install(timeout=20)
        held = state(rank)
        pending = live.prepare_seal(held, tag="step 7", step=7)
        held["model"]["both"]._local_tensor.add_(1)  # the next step of training comes before the copy
        dcp.save(held, checkpoint_id=tmp_path)
        pending.write(tmp_path)

    run_ranks(job)
    report = ckptlint.check(tmp_path, depth="data", select=["LIV302"])
    assert [item.fqn for item in report.diagnostics] == ["model.both"]


def test_one_process_without_distributed(tmp_path: Path) -> None:
    held = {"w": torch.randn(7, 5), "t": torch.randn(7, 5).t(), "step": 3, "opt": [{"m": torch.randn(3)}]}
    live.uninstall()
    try:
        dcp.save(dict(held), checkpoint_id=tmp_path, no_dist=True)
        assert live.seal(held, tmp_path) == live.seal(held, tmp_path) == tmp_path / SEAL
        assert [item.title for item in ckptlint.check(tmp_path, depth="data").diagnostics] == []
        assert list(live.check_loaded(held, tmp_path).diagnostics) == []
        held["opt"][0]["m"][1] += 1
        with pytest.raises(live.LiveError, match=r"the loaded values of opt\.0\.m differ from those that the job"):
            live.check_loaded(held, tmp_path)
    finally:
        live.uninstall()


def test_a_process_that_was_alone_before_is_a_rank_of_the_job(tmp_path: Path) -> None:
    def job(rank: int) -> tuple[str, int]:
        try:
            live.seal(state(rank), tmp_path)
        except live.LiveNotInstalled as error:
            text = str(error)
        return text, live.install(timeout=20).group.world

    live.install()
    try:
        answers = run_ranks(job)
    finally:
        live.uninstall()
    assert all("call ckptlint.live.install" in text and world == 4 for text, world in answers)
