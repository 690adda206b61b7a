"""What a path means, what a folder holds, and the verdict on every real checkpoint."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REAL, child_processes, codes, ends, examples, found, report_on, run_python, swept

import ckptlint
from ckptlint.errors import NothingToCheckError
from ckptlint.lint.report import Report
from ckptlint.loaders.discover import find
from ckptlint.testing import write_checkpoint

WHOLE = {"tensors": {"w": {"shape": [8, 4], "chunks": ["0:4, :", "4:8, :"]}}}
HOLE = {"tensors": {"w": {"shape": [8, 4], "chunks": ["0:4, :"]}}}


# ---------------------------------------------------------------- real checkpoints


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("fsdp2_4r", "dcp"),
        ("per_rank_metadata", "dcp-per-rank"),
        ("megatron_tp2_pp2/iter_0000010", "torch_dist"),
        ("megatron_0.10/iter_0000010", "torch_dist"),
        ("megatron_0.19_tp2/iter_0000010", "torch_dist"),
        ("megatron_fsdp_dtensor_tp2_dp2/iter_0000010", "fsdp_dtensor"),
        ("metadata_missing", "incomplete"),
        ("hf_sharded", "dcp-safetensors"),
    ],
)
def test_the_format_is_recognised(name: str, format_: str) -> None:
    assert ckptlint.load(REAL / name).format == format_


def test_the_same_checkpoint_is_read_alike_by_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    for folder in (REAL / "plain_dtypes", REAL / "tp2_fsdp2_uneven", write_all_kinds(tmp_path)):
        theirs = {
            key: [
                str(value.properties.dtype).removeprefix("torch."),
                list(value.size),
                sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in value.chunks),
            ]
            for key, value in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
            if hasattr(value, "chunks")
        }
        ours = {
            fqn: [
                tensor.dtype,
                list(tensor.global_shape),
                sorted(map(list, zip(tensor.tiling.offsets.tolist(), tensor.tiling.sizes.tolist(), strict=True))),
            ]
            for fqn, tensor in ckptlint.load(folder).tensors.items()
        }
        assert ours == theirs
        assert ours


def write_all_kinds(folder: Path) -> Path:
    """A checkpoint made by `ckptlint.testing`, which claims to write what torch writes."""
    tensors = {"a": {"shape": [8, 4], "dtype": "bfloat16", "chunks": ["0:4, :", "4:8, :"]}, "b": {"shape": []}}
    write_checkpoint({"tensors": tensors, "bytes": ["c"]}, folder)
    return folder


def test_reading_leaves_no_child_process_behind() -> None:
    before = child_processes()
    ckptlint.check(REAL / "edit_base")
    ckptlint.check(REAL / "metadata_truncated")
    assert child_processes() == before


# ---------------------------------------------------------------- run folders


def steps(folder: Path, **tables: dict[str, Any]) -> Path:
    """A run folder with a checkpoint in each step; `_` in a name stands for `-`."""
    for name, table in tables.items():
        write_checkpoint(table, folder / name)
    return folder


def checked(report: Report, root: Path) -> list[str]:
    return [str(Path(part.checkpoint.path).relative_to(root)) for part in report.checkpoints]


@pytest.mark.parametrize(
    "names",
    [
        ["iter_0000010", "iter_0000020"], ["step-9", "step-10"], ["step_9", "step_10"],
        ["global_step9", "global_step_10"], ["checkpoint-999", "checkpoint-1000"],
        ["epoch_0_step_9", "epoch_0_step_10"], ["ep0-ba9", "ep0-ba10"], ["0000009", "0000010"],
    ],
    ids=lambda names: names[1],
)  # fmt: skip
def test_a_run_folder_means_its_step_with_the_highest_number(tmp_path: Path, names: list[str]) -> None:
    steps(tmp_path, **{names[0]: HOLE, names[1]: WHOLE})
    newest = ckptlint.check(tmp_path)
    assert checked(newest, tmp_path) == [names[1]]
    assert newest.exit_code == 0
    every = ckptlint.check(tmp_path, all_steps=True)
    assert sorted(checked(every, tmp_path)) == sorted(names)
    assert every.exit_code == 1


def test_a_newest_step_that_is_unfinished_is_reported_and_not_skipped(tmp_path: Path) -> None:
    steps(tmp_path, iter_0000010=WHOLE, iter_0000020=WHOLE)
    (tmp_path / "iter_0000020" / ".metadata").unlink()
    report = ckptlint.check(tmp_path)
    assert checked(report, tmp_path) == ["iter_0000020"]
    assert codes(report, "error") == {"COM001"}
    assert report.exit_code == 1
    assert "`ckptlint latest RUN_DIR`" in report.diagnostics[0].finding.hint


def test_a_newest_step_that_is_empty_is_reported_and_not_skipped(tmp_path: Path) -> None:
    steps(tmp_path, iter_0000010=WHOLE)
    (tmp_path / "iter_0000020").mkdir()
    report = ckptlint.check(tmp_path)
    assert checked(report, tmp_path) == ["iter_0000020"]
    assert codes(report, "error") == {"COM001"}


def test_a_newest_step_with_only_an_unfinished_metadata_is_reported(tmp_path: Path) -> None:
    steps(tmp_path, step_10=WHOLE, step_20=WHOLE)
    (tmp_path / "step_20" / ".metadata").rename(tmp_path / "step_20" / ".metadata.tmp")
    assert codes(ckptlint.check(tmp_path), "error") == {"COM001"}


@pytest.mark.parametrize("inside", ["run_config.yaml", "tokenizer/tokenizer.json"])
def test_a_newest_step_that_holds_only_other_files_is_not_skipped(tmp_path: Path, inside: str) -> None:
    steps(tmp_path, iter_0000010=WHOLE)
    other = tmp_path / "iter_0000020" / inside
    other.parent.mkdir(parents=True)
    other.write_text("x")
    report = ckptlint.check(tmp_path)
    assert report.verdict != "pass"


def test_an_error_in_an_older_step_shows_with_all_steps_alone(tmp_path: Path) -> None:
    steps(tmp_path, step_1=HOLE, step_2=WHOLE)
    (tmp_path / "step_3").mkdir()
    assert codes(ckptlint.check(tmp_path), "error") == {"COM001"}
    assert codes(ckptlint.check(tmp_path, all_steps=True), "error") == {"COM001", "GEO004"}


@pytest.mark.parametrize("tracker", ["latest_checkpointed_iteration.txt", "latest_train_state.pt", "latest"])
def test_a_tracker_file_does_not_hide_the_newest_step(tmp_path: Path, tracker: str) -> None:
    steps(tmp_path, iter_0000010=WHOLE, iter_0000020=HOLE)
    (tmp_path / tracker).write_text("10")
    report = ckptlint.check(tmp_path)
    assert checked(report, tmp_path) == ["iter_0000020"]
    assert report.exit_code == 1


def test_a_run_folder_of_megatron(tmp_path: Path) -> None:
    shutil.copytree(REAL / "megatron_edit_base", tmp_path / "run")
    report = ckptlint.check(tmp_path / "run")
    assert checked(report, tmp_path / "run") == ["iter_0000010"]
    assert report.exit_code == 0


def test_release_is_a_step_when_there_is_no_number(tmp_path: Path) -> None:
    steps(tmp_path, release=WHOLE)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    report = ckptlint.check(tmp_path)
    assert checked(report, tmp_path) == ["release"]
    steps(tmp_path, iter_0000010=HOLE)
    assert checked(ckptlint.check(tmp_path), tmp_path) == ["iter_0000010"]
    assert sorted(checked(ckptlint.check(tmp_path, all_steps=True), tmp_path)) == ["iter_0000010", "release"]


@pytest.mark.parametrize("names", [["model", "optim"], ["pytorch_model_fsdp_0", "optimizer_0"], ["weights"]])
@pytest.mark.parametrize("under", ["", "step-5"], ids=["step folder", "run folder"])
def test_each_component_of_a_step_is_checked(tmp_path: Path, names: list[str], under: str) -> None:
    for name in names[:-1]:
        write_checkpoint(WHOLE, tmp_path / under / name)
    write_checkpoint(HOLE, tmp_path / under / names[-1])
    report = ckptlint.check(tmp_path)
    assert sorted(checked(report, tmp_path)) == sorted(str(Path(under) / name) for name in names)
    assert report.exit_code == 1


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_a_checkpoint_means_its_folder(tmp_path: Path, name: str) -> None:
    write_checkpoint(HOLE, tmp_path)
    report = ckptlint.check(tmp_path / name)
    assert [part.checkpoint.path for part in report.checkpoints] == [str(tmp_path)]
    assert codes(report, "error") == {"GEO004"}


def test_load_gives_the_newest_step(tmp_path: Path) -> None:
    steps(tmp_path, step_1=HOLE, step_2=WHOLE)
    assert ckptlint.load(tmp_path).path == str(tmp_path / "step_2")
    with pytest.raises(NothingToCheckError):
        ckptlint.load(tmp_path / "nowhere")


# ---------------------------------------------------------------- other formats


UNSUPPORTED = {
    "NeMo 1": ["mp_rank_00/megatron_gpt.ckpt", "mp_rank_01/megatron_gpt.ckpt"],
    "NVRx local": ["iter_0000010_3_local.pt"],
    "Orbax": ["_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"],
    "Orbax, sharding": ["_sharding", "array_metadatas/process_0"],
    "Orbax, parameter folders": ["_METADATA", "params.w/.zarray"],
    "zarr": ["metadata.json={\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1}", "decoder.w/.zarray"],
    "zarr without config": ["decoder.w/.zarray"],
    "torch_checkpointing": ["metadata.pkl"],
    "nanotron": ["model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors"],
    "TensorFlow": ["ckpt-1.data-00000-of-00001", "ckpt-1.index"],
}  # fmt: skip


@pytest.mark.parametrize("under", ["", "step-100"], ids=["folder", "run folder"])
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_format_is_told_and_never_passes(tmp_path: Path, case: str, under: str) -> None:
    for mark in UNSUPPORTED[case]:
        name, _, content = mark.partition("=")
        path = tmp_path / under / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content or "N.")
    report = ckptlint.check(tmp_path)
    assert [(code, level) for code, level, _ in found(report)] == [("SAF004", "error")]
    assert (report.exit_code, report.verdict) == (1, "fail")
    assert report.diagnostics[0].finding.hint
    assert ckptlint.check(tmp_path, fail_on="never").exit_code == 1


def test_an_unsupported_format_beside_a_checkpoint_is_a_note(tmp_path: Path) -> None:
    write_checkpoint(WHOLE, tmp_path)
    (tmp_path / "metadata.pkl").write_bytes(b"N.")
    report = ckptlint.check(tmp_path)
    assert [(code, level) for code, level, _ in found(report)] == [("SAF004", "info")]
    assert report.exit_code == 0


# ---------------------------------------------------------------- nothing there


FLUTTER = "# This file tracks properties of this Flutter project.\nversion:\n  revision: abc\n"


@pytest.mark.parametrize(
    "files",
    [{}, {"README.md": "x"}, {".metadata": FLUTTER, "pubspec.yaml": "x"}, {"sub/note.txt": "x"}],
    ids=["empty", "other files", "Flutter", "sub-folder"],
)
def test_a_folder_without_a_checkpoint_is_neither_good_nor_bad(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    report = report_on(tmp_path)
    assert (report.exit_code, report.verdict) == (3, "incomplete")
    assert list(report.diagnostics) == []
    assert str(tmp_path) in report.not_found[0]


def test_check_raises_where_a_path_holds_no_checkpoint(tmp_path: Path) -> None:
    hole = REAL / "fsdp2_4r_hole"
    with pytest.raises(NothingToCheckError, match="nowhere does not exist") as caught:
        ckptlint.check(hole, tmp_path / "nowhere")
    assert caught.value.report.counts["error"]
    with pytest.raises(NothingToCheckError, match="no path"):
        ckptlint.check()
    assert ckptlint.check(hole).diagnostics


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    report = report_on(tmp_path / "nowhere")
    assert report.exit_code == 3
    assert "does not exist" in report.not_found[0]


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"], ids=["long name", "long path", "zero byte"])
def test_a_path_that_cannot_exist_is_no_crash(tmp_path: Path, name: str) -> None:
    assert report_on(str(tmp_path / name)).exit_code in (3, 4)


def test_no_path_at_all_is_no_pass() -> None:
    assert report_on().verdict != "pass"


# ---------------------------------------------------------------- damage


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1234\n"
    (tmp_path / ".metadata").write_text(pointer)
    report = ckptlint.check(tmp_path)
    assert codes(report, "error") == {"SAF002"}
    assert "Git LFS pointer" in found(report)[0][2]


@pytest.mark.parametrize("content", [b"", bytes(4096), b"{}", b"\x80"], ids=["empty", "zeros", "JSON", "one byte"])
def test_metadata_that_is_none_is_unreadable_with_and_without_payload(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    assert codes(report_on(tmp_path), "error") == {"SAF002"}
    (tmp_path / "__0_0.distcp").unlink()
    assert report_on(tmp_path).verdict != "pass"


def test_a_newer_unfinished_metadata_beside_a_whole_one(tmp_path: Path) -> None:
    write_checkpoint(WHOLE, tmp_path)
    whole = (tmp_path / ".metadata").stat().st_mtime
    (tmp_path / ".metadata.tmp").write_bytes(b"\x80")
    os.utime(tmp_path / ".metadata.tmp", (whole - 10, whole - 10))
    assert ckptlint.check(tmp_path).exit_code == 0
    os.utime(tmp_path / ".metadata.tmp", (whole + 10, whole + 10))
    assert found(ckptlint.check(tmp_path), "error", "warning") == []  # nothing was replaced
    payload = sorted(tmp_path.glob("*.distcp"))
    for path, level in ((payload[0], "error"), (payload[1], "warning")):
        os.utime(path, (whole + 9, whole + 9))
        report = ckptlint.check(tmp_path)
        assert [(code, own) for code, own, _ in found(report, "error", "warning")] == [("COM001", level)]


# ---------------------------------------------------------------- one metadata file per rank


def test_per_rank_metadata_is_merged(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("per_rank_metadata")
    whole = ckptlint.load(folder)
    assert whole.format == "dcp-per-rank"
    assert whole.partial_because == ""
    assert max(len(tensor.chunks) for tensor in whole.tensors.values()) == 4
    assert found(ckptlint.check(folder)) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_named_and_holes_are_not_judged(real_copy: Callable[[str], Path], rank: int) -> None:
    folder = real_copy("per_rank_metadata")
    (folder / f"__{rank}.metadata").unlink()
    report = ckptlint.check(folder)
    assert codes(report, "error") == {"COM001"}
    assert f"__{rank}.metadata" in found(report, "error")[0][2]
    assert report.checkpoints[0].checkpoint.partial_because
    assert "GEO004" in report.checkpoints[0].not_applicable


def test_a_missing_last_rank_shows_by_its_payload(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("per_rank_metadata")
    (folder / "__3.metadata").unlink()
    assert codes(ckptlint.check(folder), "error") == {"COM001"}


def test_one_damaged_rank_is_unreadable(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("per_rank_metadata")
    data = (folder / "__2.metadata").read_bytes()
    (folder / "__2.metadata").write_bytes(data[: len(data) // 2])
    report = ckptlint.check(folder)
    assert "SAF002" in codes(report, "error")
    assert "__2.metadata" in " ".join(title for code, _, title in found(report) if code == "SAF002")


def test_one_malicious_rank_is_unsafe(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("per_rank_metadata")
    shutil.copy(REAL / "metadata_malicious" / ".metadata", folder / "__3.metadata")
    assert "SAF001" in codes(ckptlint.check(folder), "error")


def test_per_rank_metadata_beside_a_whole_one_belongs_to_another_save(tmp_path: Path) -> None:
    write_checkpoint(WHOLE, tmp_path)
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    report = ckptlint.check(tmp_path)
    assert codes(report, "error", "warning") == set()
    assert any("another save" in title for _, _, title in found(report, "info"))


# ---------------------------------------------------------------- refused by the operating system


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, outside pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="ckptlint-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


class _Refused:
    """Puts PermissionError in the way of some calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def listing(self, folder: Path) -> None:
        real = os.scandir

        def scandir(path: Any = ".") -> Any:
            if Path(path) == folder:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        self._patch.setattr(os, "scandir", scandir)

    def opening(self, file: Path) -> None:
        real = io.open

        def opened(path: Path, *arguments: Any, **options: Any) -> Any:
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        self._patch.setattr(Path, "open", opened)
        self._patch.setattr("builtins.open", lambda name, *more, **how: opened(Path(name), *more, **how))

    def looking(self, file: Path) -> None:
        real = Path.stat

        def stat(path: Path, **options: Any) -> Any:
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, **options)

        self._patch.setattr(Path, "stat", stat)


@pytest.mark.parametrize("what", ["listing", "opening", "looking", "the path itself"])
def test_a_refusal_of_the_operating_system_is_an_incomplete_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = tmp_path / "ckpt"
    write_checkpoint(WHOLE, folder)
    refused = _Refused(monkeypatch)
    match what:
        case "listing":
            refused.listing(folder)
        case "opening":
            refused.opening(folder / ".metadata")
        case "looking":
            refused.looking(folder / "__0_0.distcp")
        case _:
            refused.looking(folder)
    report = ckptlint.check(folder)
    assert (report.exit_code, report.verdict) == (4, "incomplete")
    assert len(report.unreadable) == 1
    assert "Permission denied" in report.unreadable[0]


def test_a_refused_common_state_is_an_incomplete_verdict(
    real_copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = real_copy("megatron_edit_base/iter_0000010")
    _Refused(monkeypatch).opening(folder / "common.pt")
    assert ckptlint.check(folder).exit_code == 4


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("locked", ["folder", *swept("metadata", "parent")])
def test_another_user_gets_an_incomplete_verdict(open_folder: Path, locked: str) -> None:
    checkpoint = open_folder / "run" / "ckpt"
    write_checkpoint(WHOLE, checkpoint)
    {"folder": checkpoint, "metadata": checkpoint / ".metadata", "parent": open_folder / "run"}[locked].chmod(0)
    program = (
        "import os, sys, ckptlint\n"
        "ckptlint.check(sys.argv[2])\n"  # whatever is imported late is imported now
        "os.setgid(65534); os.setuid(65534)\n"
        "report = ckptlint.check(sys.argv[1])\n"
        "print(report.exit_code, report.verdict)\n"
    )
    done = run_python(program, checkpoint, REAL / "gap_middle")
    assert done.stdout == "4 incomplete\n", done.stderr


def test_an_error_elsewhere_outweighs_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, table in (("a", WHOLE), ("b", HOLE)):
        write_checkpoint(table, tmp_path / name)
    _Refused(monkeypatch).listing(tmp_path / "a")
    assert report_on(tmp_path / "a", tmp_path / "b").exit_code == 1
    assert report_on(tmp_path / "a", tmp_path / "nowhere").exit_code == 4


def test_a_named_file_that_belongs_to_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(NothingToCheckError, match=r"metadata\.json in .* belongs to no checkpoint: .* name the folder"):
        find(str(tmp_path / "metadata.json"))


def test_a_named_file_beside_a_checkpoint_says_which_folder_to_name(tmp_path: Path) -> None:
    shutil.copytree(REAL / "fsdp2_4r", tmp_path / "run" / "step-1")
    (tmp_path / "run" / "latest").write_text("step-1")
    (tmp_path / "run" / "step-1" / "notes.yaml").write_text("{}")
    for path, hint in (
        (tmp_path / "run" / "latest", "name the run folder, "),
        (tmp_path / "run/step-1/notes.yaml", ""),
    ):
        (item,) = ckptlint.check(path).diagnostics
        assert (item.code, str(path.parent) in item.finding.hint) == ("SAF004", True)
        assert item.finding.hint.startswith(hint or "name the folder of the checkpoint, ")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "content", "code"), [("note.txt", "x", 3), (".metadata", "x", 3), (".metadata", "", 1)]
)
def test_a_run_of_many_nearly_empty_steps_is_judged(tmp_path: Path, name: str, content: str, code: int) -> None:
    for number in range(examples(500, 20_000)):
        (step := tmp_path / f"step-{number}").mkdir()
        (step / name).write_text(content)
    with ends(100):
        assert report_on(tmp_path).exit_code == code


@pytest.mark.parametrize("held", ["", '{"sharded_backend": "torch_dist", "shard'], ids=["empty", "cut"])
def test_a_cut_mark_of_megatron_is_named_though_the_common_state_is_gone(tmp_path: Path, held: str) -> None:
    """What is left looks like a DCP save of another writer."""
    step = REAL / "frameworks" / "trackers" / "older" / "iter_0000010"
    folder = shutil.copytree(step, tmp_path / "step", ignore=shutil.ignore_patterns("common.pt"))
    (folder / "metadata.json").write_text(held)
    assert [code for code, *_ in found(ckptlint.check(folder), "error")] == ["SAF002"]
