"""Depths headers and data: what real records written by torch say, healthy and damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pickles import named, number, stream
from support import REAL, codes, found, on_terminal, report_on, run, run_python, takes_ctrl_c

import ckptlint
from ckptlint.depth import Depth
from ckptlint.errors import ConfigError
from ckptlint.formats.torch_archive import data_start, read_end, read_members
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.model import Checkpoint, RecordState
from ckptlint.payload import reader
from ckptlint.payload.archives.record_headers import RecordPlace, read_headers
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import ReadOptions
from ckptlint.storage.local import LocalFolder
from ckptlint.testing import torch_archive
from ckptlint.vocabulary.dtypes import ENCODINGS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")
dcp = pytest.importorskip("torch.distributed.checkpoint")


def test_a_blob_says_other_offsets_than_the_metadata(real_copy: Callable[[str], Path]) -> None:
    """Two payload files of the SAFETENSORS mode in each other's place: every shape and dtype fits."""
    folder = real_copy("safetensors_mode")
    first, second = (folder / f"__{rank}_0.distcp" for rank in (0, 1))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    report = ckptlint.check(folder, depth="headers", select=["PAY009"])
    said = "2 records of {} hold the chunk at offsets {} where the metadata says offsets [0, 0]"
    assert found(report) == [
        ("PAY009", "error", said.format("model.up.weight", [3, 0])),
        ("PAY009", "error", said.format("model.head.weight", [1, 0])),
    ]


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """A checkpoint of one process."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def model(count: int = 4, rows: int = 64) -> dict[str, Any]:
    """Weights of two shapes that differ from each other."""
    made = torch.Generator().manual_seed(0)
    return {f"layers.{i}.w": torch.randn((rows, 32) if i % 2 else (32, rows), generator=made) for i in range(count)}


def load(folder: Path, depth: Any = "data", **options: Any) -> Checkpoint:
    """The checkpoint with its payload."""
    ckpt = open_checkpoint(find(str(folder))[0])
    return read_payload(LocalFolder(folder), ckpt, ReadOptions(Depth(depth), 2, **options))


def place(folder: Path, fqn: str) -> tuple[Path, int, int]:
    """File, first byte and length of a key's only record."""
    ckpt = open_checkpoint(find(str(folder))[0])
    name, start, length = ckpt.byte_range_of(int(ckpt.tensors[fqn].chunks.record[0]))
    return folder / name, start, length


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def content(path: Path, at: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(length)


# ---------------------------------------------------------------- healthy


@pytest.mark.parametrize("depth", ["headers", "data"])
def test_every_dtype_of_torch_is_read_as_it_was_saved(depth: str, tmp_path: Path) -> None:
    names = [
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "complex64", "complex128",
    ]  # fmt: skip
    names += ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    names += ["float8_e4m3fnuz", "float8_e5m2fnuz"]
    state = {name: torch.ones(4, 6).to(getattr(torch, name)) for name in names}
    state |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3), "object": {"lr": 0.1}}
    state["turned"] = torch.randn(6, 4).t()
    state["float4_e2m1fn_x2"] = torch.ones(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    report = ckptlint.check(save(state, tmp_path), depth=depth)
    assert found(report) == []
    assert report.exit_code == 0
    ckpt = load(tmp_path, depth)
    assert ckpt.payload is not None
    for name in [*names, "float4_e2m1fn_x2"]:
        said = ckpt.payload.of(int(ckpt.tensors[name].chunks.record[0]))
        assert said is not None
        assert (said.form, said.dtype, said.shape) == ("tensor", name, tuple(state[name].shape))
    turned = ckpt.payload.of(int(ckpt.tensors["turned"].chunks.record[0]))
    assert turned is not None
    assert turned.strides in ((1, 4), (6, 1))
    assert (ckpt.payload.state == RecordState.READ).all()


def test_checksums_switched_off_are_no_damage(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        twice = torch.randn(64, 8)
        save({"a": twice, "b": twice.clone()}, tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert found(ckptlint.check(tmp_path, depth="data")) == []
    assert (load(tmp_path).payload.crc == -1).all()  # type: ignore[union-attr]


def test_tensor_subclass_and_parameter_are_no_mismatch(tmp_path: Path) -> None:
    class Marked(torch.Tensor):
        """A subclass whose name only this test knows."""

    sys.modules[__name__].Marked = Marked  # type: ignore[attr-defined]
    Marked.__qualname__ = "Marked"
    state = {"w": torch.randn(8, 8).as_subclass(Marked), "p": torch.nn.Parameter(torch.randn(8, 8))}
    report = ckptlint.check(save(state, tmp_path), depth="data")
    assert codes(report, "error", "warning") == set()


class Quantised(torch.Tensor):  # type: ignore[misc]
    """As torchao's Int8Tensor is pickled: in a form of its own, with values of int8 and their scales."""

    @staticmethod
    def __new__(cls, values: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Any) -> None:
        self.values_of_int8, self.scales, self.offsets = values, torch.ones(len(values), 1), torch.zeros(len(values))

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if "is_pinned" not in str(call) else False


@pytest.mark.parametrize(("rows", "wanted"), [(256, set()), (64, {"PAY007"})])
def test_bytes_needed_are_those_of_the_form_that_a_record_has(rows: int, wanted: set[str], tmp_path: Path) -> None:
    save({"w": Quantised(torch.ones(rows, 64, dtype=torch.int8))}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["w"]
    tensor.size = tensor.chunks[0].sizes = torch.Size((256, 64))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for depth in ("headers", "data"):
        assert codes(ckptlint.check(tmp_path, depth=depth), "error", "warning") == wanted
    assert ("PAY007" in codes(ckptlint.check(tmp_path), "error")) == bool(wanted)


def test_a_view_with_a_larger_storage_counts_only_its_own_values(tmp_path: Path) -> None:
    folder = save({"w": torch.zeros(16, 8)}, tmp_path)
    path, start, length = place(folder, "w")
    whole = torch.zeros(16, 64)
    whole[0, 0] = float("nan")  # outside of the view
    buffer = Path(tmp_path / "view.pt")
    torch.save(whole.flatten()[64:192].view(16, 8), buffer)
    record = buffer.read_bytes()
    buffer.unlink()
    replace_record(folder, path, start, length, record)
    report = ckptlint.check(folder, depth="data")
    assert codes(report, "error", "warning") == set()


def replace_record(folder: Path, path: Path, start: int, length: int, record: bytes) -> None:
    """Put another record in the place of the only one of a file, and tell the metadata its length."""
    assert start == 0 and path.stat().st_size == length
    path.write_bytes(record)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(record)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_stream_transform_is_said_to_be_unopened() -> None:
    report = run(REAL / "zstd", "--depth", "data")
    assert report.returncode == 0
    assert "not opened because of a stream transform" in " ".join(report.stdout.split())


# ---------------------------------------------------------------- damaged


def test_a_flipped_byte_shows_at_depth_data_only(tmp_path: Path) -> None:
    folder = save(model(), tmp_path)
    path, start, length = place(folder, "layers.2.w")
    at = start + length // 2
    overwrite(path, at, bytes([content(path, at, 1)[0] ^ 1]))
    assert found(ckptlint.check(folder, depth="headers")) == []
    report = ckptlint.check(folder, depth="data")
    ((code, level, text),) = found(report)
    assert (code, level) == ("PAY012", "error")
    assert text.startswith("data/0 of layers.2.w in __0_0.distcp does not match its checksum: CRC-32 ")
    assert report.exit_code == 1


def test_two_records_of_equal_length_swapped_show_by_their_shapes(tmp_path: Path) -> None:
    folder = save(model(), tmp_path)
    (path, a, length), (_, b, other) = place(folder, "layers.0.w"), place(folder, "layers.1.w")
    assert length == other
    first, second = content(path, a, length), content(path, b, length)
    overwrite(path, a, second)
    overwrite(path, b, first)
    report = ckptlint.check(folder, depth="headers")
    assert [code for code, _, _ in found(report)] == ["PAY009", "PAY009"]
    assert "holds shape [64, 32] where the metadata says shape [32, 64]" in found(report)[0][2]


def test_a_shard_in_place_of_another_one_shows_as_equal_shards(real_copy: Any) -> None:
    folder = real_copy("edit_base")
    ckpt = open_checkpoint(find(str(folder))[0])
    records = ckpt.tensors["model.layers.1.mlp.up.weight"].chunks.record.tolist()
    (one, a, length), (two, b, other) = ckpt.byte_range_of(records[0]), ckpt.byte_range_of(records[1])
    assert length == other
    overwrite(folder / two, b, content(folder / one, a, length))
    small = ckptlint.check(folder, depth="headers")
    assert "PAY010" not in codes(small)  # 32 elements may be equal by chance


def test_equal_shards_of_a_trained_weight(tmp_path: Path) -> None:
    from ckptlint.testing import write_checkpoint

    tensors = {"w": {"shape": [64, 32], "chunks": ["0:32, :", "32:64, :"]}}
    table = {"depth": "headers", "tensors": tensors, "common": {"iteration": 100}}
    folder = write_checkpoint(table, tmp_path / "case")
    (folder / "__1_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    assert codes(ckptlint.check(folder, depth="headers")) == {"PAY010"}
    assert codes(ckptlint.check(folder)) == set()


@pytest.mark.parametrize("back", [0, 21, 60, 97, 150, 400])
def test_zeros_in_the_central_directory_are_no_readable_record(back: int, tmp_path: Path) -> None:
    folder = save(model(1), tmp_path)
    path, start, length = place(folder, "layers.0.w")
    overwrite(path, start + length - back - 8, bytes(8))
    report = ckptlint.check(folder, depth="headers")
    assert [code for code, _, _ in found(report)] == ["PAY013"]
    assert report.exit_code == 1


def test_a_file_cut_inside_a_directory_is_told_once(tmp_path: Path) -> None:
    folder = save(model(2), tmp_path)
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 300)
    assert codes(ckptlint.check(folder, depth="data")) == {"PAY004"}


@pytest.mark.parametrize("dtype", sorted(ENCODINGS))
def test_nan_is_found_in_every_floating_dtype(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    values = torch.ones(5, 7).to(kind)
    raw = values.view(torch.uint8).clone().reshape(-1)
    item = values.element_size()
    bad = {"float8_e4m3fn": b"\x7f", "float8_e5m2": b"\xfe", "float8_e8m0fnu": b"\xff"}.get(dtype, b"\x80")
    if item > 1:
        real = "float16" if dtype == "complex32" else dtype
        bad = bytes(torch.tensor([float("nan")]).to(getattr(torch, real)).view(torch.uint8).tolist())
    raw[17 * item : 17 * item + len(bad)] = torch.tensor(list(bad), dtype=torch.uint8)
    folder = save({"w": raw.view(kind).reshape(5, 7), "fine": values}, tmp_path)
    ((code, level, text),) = found(ckptlint.check(folder, depth="data"))
    assert (code, level) == ("PAY011", "warning")
    assert "1 NaN in chunk [0:5, 0:7] of w, the first at [2, 3]" in text


def test_counts_agree_with_torch_across_blocks(tmp_path: Path) -> None:
    values = torch.randn(3_000_000, dtype=torch.bfloat16)
    values[::1001] = float("inf")
    values[7::2003] = float("nan")
    values[5] = float("-inf")
    payload = load(save({"a": torch.zeros(3), "w": values}, tmp_path)).payload
    assert payload is not None
    assert int(payload.nan.sum()) == int(values.isnan().sum())
    assert int(payload.plus_inf.sum()) == int((values == float("inf")).sum())
    assert int(payload.minus_inf.sum()) == int((values == float("-inf")).sum())
    assert int(payload.first.max()) == 0


def test_integrity_of_megatron_is_checked(real_copy: Any) -> None:
    import hashlib

    folder = real_copy("megatron_edit_base") / "iter_0000010"
    names = [path.name for path in folder.iterdir() if path.is_file()]
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    assert found(ckptlint.check(folder, depth="data")) == []
    common = folder / "common.pt"
    sums["common.pt"] = "0" * 64
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums | {"lost.distcp": "0"}}))
    texts = [text for code, _, text in found(ckptlint.check(folder, depth="data")) if code == "PAY012"]
    assert common.name in texts[0] and "integrity.json lists lost.distcp, which is missing" in texts
    (folder / "integrity.json").write_text("{")
    assert codes(ckptlint.check(folder, depth="data")) == {"SAF002"}


# ---------------------------------------------------------------- hostile


def test_a_malicious_pickle_in_a_record_is_named_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "was_here"
    folder = save({"w": torch.randn(4, 4)}, tmp_path / "ckpt")
    path, start, length = place(folder, "w")
    command = f"touch {marker}".encode()
    evil = b"\x80\x02cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR."
    replace_record(folder, path, start, length, torch_archive({"data.pkl": evil, "data/0": bytes(64)}))
    report = ckptlint.check(folder, depth="headers")
    assert not marker.exists()
    unsafe = [text for code, level, text in found(report, "error") if code == "SAF001"]
    assert unsafe and "data.pkl of w in __0_0.distcp asks to call posix.system" in unsafe[0]
    assert report.exit_code == 1
    assert ckptlint.check(folder, fail_on="never", depth="data").exit_code == 1


@pytest.mark.forks
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(stream(b"(" + number(1) * 3, b"\x85" * 200_000, b"}s" * 3), id="nested"),
        pytest.param(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", id="deep list"),
        pytest.param(
            stream(named("torch._utils", "_rebuild_parameter"), b"(" + b"N" * 3 + b"tR"), id="parameter of none"
        ),
        pytest.param(stream(named("torch._utils", "_rebuild_tensor_v2"), b")R"), id="tensor of nothing"),
        pytest.param(b"\x80\x02\x8c", id="cut"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_crafted_pickle_ends_in_a_finding_or_in_peace(data: bytes, tmp_path: Path) -> None:
    folder = save({"w": torch.randn(4, 4)}, tmp_path / "ckpt")
    path, start, length = place(folder, "w")
    replace_record(folder, path, start, length, torch_archive({"data.pkl": data, "data/0": bytes(64)}))
    report = ckptlint.check(folder, depth="data")
    assert report.unreadable == ()
    assert not any(part.failed for part in report.checkpoints)
    assert report.exit_code in (0, 1)


def test_random_damage_never_ends_in_a_crash(tmp_path: Path) -> None:
    folder = save(model(3, 8) | {"object": {"a": [1, 2]}}, tmp_path)
    path = folder / "__0_0.distcp"
    good = path.read_bytes()
    chance = np.random.default_rng(0)
    missed = 0
    for _ in range(60):
        bad = bytearray(good)
        at = int(chance.integers(len(bad) - 16))
        bad[at : at + 16] = chance.bytes(16)
        path.write_bytes(bad)
        report = ckptlint.check(folder, depth="data")
        assert report.unreadable == ()
        assert not any(part.failed for part in report.checkpoints)
        missed += report.exit_code == 0
    assert missed < 45  # padding, times and descriptors carry nothing


# ---------------------------------------------------------------- the archive alone


def test_archives_of_torch_and_of_the_fixtures_are_read_alike(tmp_path: Path) -> None:
    torch.save(torch.arange(6.0), tmp_path / "archive.pt")
    for data in ((tmp_path / "archive.pt").read_bytes(), torch_archive({"data.pkl": b"\x80\x02N.", "data/0": b"abcd"})):
        directory = read_end(data[-98:], len(data))
        members = read_members(data[directory.start : directory.start + directory.size], directory)
        assert {member.short for member in members} >= {"data.pkl", "data/0", "byteorder", "version"}
        for member in members:
            start = data_start(data[member.header : member.header + 30 + len(member.name)], member)
            assert start % 64 == 0
    many = {"data.pkl": b"\x80\x02N."} | {f"data/{i}": bytes([i % 256]) * 5000 for i in range(300)}
    (tmp_path / "many").write_bytes(torch_archive(many))
    size = (tmp_path / "many").stat().st_size
    (found_,) = read_headers(LocalFolder(tmp_path), "many", [RecordPlace(0, 0, size)])
    assert found_.broken == [] and len(found_.records[0].parts) == 303


def test_ranges_close_together_are_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    wanted = [(10, 5), (0, 3), (5000, 4), (16380, 100), (99999, 4), (10, 5)]
    assert LocalFolder(tmp_path).ranges("file", wanted) == [
        bytes(range(10, 15)), bytes(range(3)), bytes(i % 256 for i in range(5000, 5004)), b"\xfc\xfd\xfe\xff", b"",
        bytes(range(10, 15)),
    ]  # fmt: skip


# ---------------------------------------------------------------- the command line


def test_a_sample_is_said_to_be_one(tmp_path: Path) -> None:
    folder = save(model(40, 8), tmp_path)
    result = run(folder, "--depth", "headers", "--sample", "10%", "--seed", "7")
    assert result.returncode == 0
    assert "Only a sample was read: 10% of the records (4 of 40), seed 7." in " ".join(result.stdout.split())
    report = json.loads(run(folder, "--depth", "data", "--sample", "10", "--format", "json").stdout)
    assert report["tool"]["sample"].startswith("10% of the records (4 of 40), seed ")
    states = [load(folder, percent=10.0, seed=7).payload.state.tolist() for _ in range(2)]  # type: ignore[union-attr]
    assert states[0] == states[1] and states[0].count(RecordState.READ) == 4


@pytest.mark.parametrize("options", [["--sample", "5%"], ["--depth", "data", "--sample", "0"], ["--sample", "x"]])
def test_a_sample_needs_a_depth_and_a_share(options: list[str]) -> None:
    assert run(REAL / "edit_base", *options).returncode == 2


def test_all_jobs_give_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (REAL / "fsdp2_4r", "--depth", "data", "--format", "json", "--jobs")
    without_threads = run(*arguments, "8").stdout
    monkeypatch.setattr(reader, "BLOCK", 0)  # as if the files were too long for one thread
    assert {run(*arguments, jobs).stdout for jobs in ("1", "2", "8")} == {without_threads}


def test_the_bar_shows_on_a_terminal_only(tmp_path: Path) -> None:
    folder = save({"w": torch.zeros(1024, 1024)}, tmp_path)
    code = (
        "import sys,time\n"
        "from ckptlint.commands import shared\n"
        "from ckptlint.payload import stream\n"
        "shared._PATIENCE=0.1\n"
        "read=stream._Work._read\n"
        "def slow(*a):\n time.sleep(0.5)\n return read(*a)\n"
        "stream._Work._read=slow\n"
        "from ckptlint.commands.main import main\n"
        f"sys.argv=['ckptlint',{str(folder)!r},'--depth','data']+sys.argv[1:]\n"
        "main()\n"
    )
    shown = on_terminal(code)
    assert b"%" in shown and b" of 4.0 MiB" in shown and b"bytes" not in shown
    assert on_terminal(code, "--no-progress") == b""
    assert run_python(code).stderr == ""


def test_ctrl_c_says_what_was_covered(tmp_path: Path) -> None:
    folder = save({f"w{i}": torch.zeros(1024, 1024) for i in range(4)}, tmp_path, thread_count=4)
    code = (
        "import sys,time\n"
        "from ckptlint.payload import stream\n"
        "read=stream._Work._read\n"
        "def slow(*a):\n time.sleep(0.3)\n print('reading',flush=True)\n return read(*a)\n"
        "stream._Work._read=slow\n"
        "from ckptlint.commands.main import main\n"
        f"sys.argv=['ckptlint',{str(folder)!r},'--depth','data','--jobs','1']\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=takes_ctrl_c,
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 130
    lines = error.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ckptlint: interrupted after ") and "no damage was found so far" in lines[0]


def test_a_list_of_hashes_from_outside_is_compared(tmp_path: Path) -> None:
    """Changed, absent and unlisted files are errors; a list that cannot be used is one sentence."""
    folder = shutil.copytree(REAL / "exports" / "ok_llama", tmp_path / "export")
    names = ("config.json", "model.safetensors")
    lines = {name: f"{sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in names}
    for case, text, said in (
        ("same", "\n".join(lines.values()), ""),
        (
            "other",
            lines["model.safetensors"].replace("model.safetensors", "config.json"),
            "config.json is not the file",
        ),
        ("absent", f"{lines['model.safetensors']}\n{'0' * 64}  lost.json", "lists lost.json, which is missing"),
        ("unlisted", lines["config.json"], "does not list model.safetensors"),
    ):
        (tmp_path / case).write_text(text)
        report = ckptlint.check(folder, depth="data", expect_hashes=tmp_path / case)
        told = [item.title for item in report.diagnostics if item.code == "PAY012"]
        assert bool(told) == bool(said) == (report.exit_code == 1), (case, told)
        assert not said or any(said in title for title in told), told
    (tmp_path / "none").write_text("nothing")
    for path, depth in ((tmp_path / "none", "data"), (tmp_path / "gone", "data"), (tmp_path / "same", "files")):
        with pytest.raises(ConfigError):
            ckptlint.check(folder, depth=depth, expect_hashes=path)


def test_a_file_whose_records_are_all_zeros_is_one_finding(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("fsdp2_4r")
    os.truncate(folder / "__0_0.distcp", 0)
    os.truncate(folder / "__0_0.distcp", 10 << 40)
    for depth in ("files", "headers"):
        assert codes(report_on(folder, depth=depth)) == {"PAY013"}


def test_bytes_beyond_readable_records_are_named_beside_a_damaged_one(real_copy: Callable[[str], Path]) -> None:
    file = real_copy("fsdp2_4r") / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[:4] = bytes(4)
    file.write_bytes(data + bytes(4096))
    assert codes(report_on(file.parent, depth="headers")) >= {"PAY006", "PAY013"}
