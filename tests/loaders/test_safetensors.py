"""Safetensors: files that the real writers wrote, and the same files damaged."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import REAL, SHARED, codes, found, run, run_python

import ckptlint
from ckptlint.errors import UnreadableError
from ckptlint.formats.safetensors_header import layout_faults, parse_header
from ckptlint.lint.report import Report
from ckptlint.loaders.readers.safetensors import groups
from ckptlint.model import Checkpoint
from ckptlint.storage.local import LocalFolder
from ckptlint.testing import safetensors_header, torch_archive, write_checkpoint, write_safetensors

Case = dict[str, Any]

WRITE = """
import os, sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

out = sys.argv[1]
FILES = {"embed.weight": 1, "layers.0.w": 1, "layers.1.w": 2, "norm.weight": 2, "tiny": 2, "count": 1}

def state(mesh=None):
    torch.manual_seed(0)
    full = {"embed.weight": torch.randn(10, 4), "layers.0.w": torch.randn(8, 8), "layers.1.w": torch.randn(8, 8),
            "norm.weight": torch.ones(8, dtype=torch.bfloat16), "tiny": torch.randn(2, 3), "count": torch.tensor(7)}
    if mesh is None:
        return full
    place = {"norm.weight": Replicate(), "layers.1.w": Shard(1), "count": Replicate()}
    return {k: distribute_tensor(v, mesh, [place.get(k, Shard(0))]) for k, v in full.items()}

def work(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    sharded = state(init_device_mesh("cpu", (world,)))
    dcp.save(sharded, storage_writer=HuggingFaceStorageWriter(f"{out}/shards", FILES, save_distributed=True))
    sharded.pop("count")  # torch 2.13 cannot consolidate integers: it asks finfo for their size
    floats = {k: i for k, i in FILES.items() if k != "count"}
    for name, files in (("both", floats), ("ghost", FILES)):
        writer = HuggingFaceStorageWriter(f"{out}/{name}", files, save_distributed=True, enable_consolidation=True)
        dcp.save(sharded, storage_writer=writer)
    dist.barrier()
    os._exit(0)

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(4):
        child = os.fork()
        if child == 0:
            work(rank, 4, port)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    assert not any(failed), failed
    dcp.save(state(), storage_writer=HuggingFaceStorageWriter(f"{out}/rank0", FILES))
    dcp.save(state() | {"note": "a text"}, storage_writer=HuggingFaceStorageWriter(f"{out}/zip"))
    from safetensors.torch import save_file
    os.makedirs(f"{out}/single")
    save_file(state(), f"{out}/single/model.safetensors", {"format": "pt"})
"""


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch's HuggingFaceStorageWriter and the safetensors library write, on 4 ranks and on one."""
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("written")
    done = run_python(WRITE, folder, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of these checkpoints, to damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(written / name, tmp_path / name))

    return copy


def loaded(path: Path) -> Checkpoint:
    (part,) = ckptlint.check(path).checkpoints
    return part.checkpoint


def shapes(ckpt: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {fqn: (tensor.dtype, tensor.global_shape) for fqn, tensor in ckpt.tensors.items()}


WANTED = {
    "embed.weight": ("float32", (10, 4)), "layers.0.w": ("float32", (8, 8)), "layers.1.w": ("float32", (8, 8)),
    "norm.weight": ("bfloat16", (8,)), "tiny": ("float32", (2, 3)), "count": ("int64", ()),
}  # fmt: skip


def loud(report: Report) -> list[tuple[str, str, str]]:
    return found(report, "error", "warning")


# ---------------------------------------------------------------- healthy


def test_every_form_is_read_as_the_same_tensors(written: Path) -> None:
    formats = {"shards": "dcp-safetensors", "rank0": "safetensors", "single": "safetensors"}
    for name, format_ in formats.items():
        report = ckptlint.check(written / name)
        assert (report.exit_code, loud(report)) == (0, []), name
        ckpt = loaded(written / name)
        assert (ckpt.format, shapes(ckpt)) == (format_, WANTED), name
        assert report.checkpoints[0].failed == {}
    assert loaded(written / "shards").writer == "torch >= 2.8"


def test_consolidated_files_and_their_shards_are_judged_each_by_itself(written: Path) -> None:
    report = ckptlint.check(written / "both")
    assert (report.exit_code, loud(report)) == (0, [])
    parts = {Path(part.checkpoint.path).name: part.checkpoint for part in report.checkpoints}
    assert {name: ckpt.format for name, ckpt in parts.items()} == {"both": "safetensors", "sharded": "dcp-safetensors"}
    floats = {fqn: entry for fqn, entry in WANTED.items() if fqn != "count"}
    assert all(shapes(ckpt) == floats for ckpt in parts.values())
    assert parts["both"].index is not None and parts["both"].metadata_file == "model.safetensors.index.json"


def test_chunks_lie_where_the_ranks_had_them(written: Path) -> None:
    ckpt = loaded(written / "shards")
    assert ckpt.tensors["embed.weight"].tiling.offsets.tolist() == [[0, 0], [3, 0], [6, 0], [9, 0]]
    assert ckpt.tensors["layers.1.w"].tiling.offsets.tolist() == [[0, 0], [0, 2], [0, 4], [0, 6]]
    assert len(ckpt.tensors["norm.weight"].chunks) == 1
    sizes = ckpt.tensors["tiny"].tiling.sizes.tolist()
    assert sorted(sizes, reverse=True)[:2] == [[1, 3], [1, 3]]


def test_the_place_of_each_tensor_is_that_of_its_bytes(written: Path) -> None:
    ckpt = loaded(written / "single")
    file, start, length = ckpt.byte_range_of(int(ckpt.tensors["count"].chunks.record[0]))
    data = (written / "single" / file).read_bytes()
    assert int.from_bytes(data[start : start + length], "little") == 7
    assert sum(ckpt.records.byte_length.tolist()) + int(ckpt.records.byte_offset.min()) == len(data)


def test_torch_reads_the_shards_alike(written: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    theirs = {
        key: [list(value.size), sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in value.chunks)]
        for key, value in HuggingFaceStorageReader(str(written / "shards")).read_metadata().state_dict_metadata.items()
    }
    ckpt = loaded(written / "shards")
    ours = {}
    for fqn, tensor in ckpt.tensors.items():
        boxes = zip(tensor.tiling.offsets.tolist(), tensor.tiling.sizes.tolist(), strict=True)
        ours[fqn] = [list(tensor.global_shape), sorted(map(list, boxes))]
    assert ours == theirs


def test_depth_metadata_reads_headers_and_no_sizes(written: Path) -> None:
    report = ckptlint.check(written / "shards", depth="metadata")
    assert report.exit_code == 0
    assert {file.size for file in report.checkpoints[0].checkpoint.files} == {None}


def test_a_file_stands_for_its_own_model(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "rank0", tmp_path / "m")
    write_safetensors(tmp_path / "m" / "adapter_model.safetensors", {"tensors": {"a": {"shape": [4]}}})
    assert len(ckptlint.check(tmp_path / "m").checkpoints) == 2
    for name, tensors in (("adapter_model.safetensors", 1), ("model.safetensors.index.json", 6)):
        (part,) = ckptlint.check(tmp_path / "m" / name).checkpoints
        assert len(part.checkpoint.tensors) == tensors


def test_the_json_report_fits_its_schema(written: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ckptlint.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))
    done = run(written / "both", "--format", "json")
    jsonschema.validate(json.loads(done.stdout), schema)


# ---------------------------------------------------------------- damaged


def test_a_value_before_the_header_is_the_bug_of_the_writer(written: Path) -> None:
    report = ckptlint.check(written / "zip")
    assert codes(report, "error") == {"PAY013"}
    assert "starts with a zip record" in loud(report)[0][2]
    assert report.exit_code == 1
    assert ckptlint.check(written / "zip", select=["GEO"]).exit_code == 4


def test_a_key_of_the_map_that_the_state_lacks_spoils_the_consolidated_file(written: Path) -> None:
    library = pytest.importorskip("safetensors")
    with pytest.raises(library.SafetensorError):
        library.safe_open(written / "ghost" / "model-00001-of-00002.safetensors", "numpy")
    report = ckptlint.check(written / "ghost")
    assert [(code, level) for code, level, _ in loud(report)] == [("PAY013", "error")]
    assert "has '' as the dtype of count" in loud(report)[0][2]


def test_a_dropped_middle_rank_leaves_holes_and_names_its_file(copied: Callable[[str], Path]) -> None:
    folder = copied("shards")
    for path in folder.glob("shard-00002-*"):
        path.unlink()
    report = ckptlint.check(folder)
    assert "GEO004" in codes(report, "error")
    regions = {item.fqn: str(item.finding.at.region) for item in report.diagnostics if item.code == "GEO004"}
    assert regions["embed.weight"] == "[3:6, 0:4]" and regions["layers.1.w"] == "[0:8, 2:4]"
    assert "it probably never saved (shard-00002-*.safetensors)" in run(folder, "-v").stdout.replace("\n     ", " ")


def test_a_dropped_shard_of_a_model_is_named_with_its_keys(copied: Callable[[str], Path]) -> None:
    folder = copied("rank0")
    (folder / "model-00002-of-00002.safetensors").unlink()
    report = ckptlint.check(folder)
    assert [(code, level) for code, level, _ in loud(report)] == [("PAY014", "error")]
    assert loud(report)[0][2] == (
        "model-00002-of-00002.safetensors is missing: model.safetensors.index.json places 3 keys in it"
    )
    assert ckptlint.check(folder, depth="metadata").exit_code == 1
    (folder / "model.safetensors.index.json").unlink()
    assert {title for _, _, title in found(ckptlint.check(folder), "error")} == {"file 2 of 2 is missing"}


def test_an_index_alone_is_no_model(copied: Callable[[str], Path]) -> None:
    folder = copied("rank0")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    report = ckptlint.check(folder)
    assert (codes(report, "error"), report.exit_code) == ({"COM001"}, 1)


def edited_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Report:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return ckptlint.check(folder)


def test_damages_of_the_index(copied: Callable[[str], Path]) -> None:
    folder = copied("both")
    shutil.rmtree(folder / "sharded")
    original = (folder / "model.safetensors.index.json").read_text()

    def swap(document: dict[str, Any]) -> None:
        places = document["weight_map"]
        places["norm.weight"], places["layers.0.w"] = places["layers.0.w"], places["norm.weight"]

    damages: dict[str, tuple[Callable[[dict[str, Any]], None], list[tuple[str, str]]]] = {
        "keys swapped": (swap, [("PAY014", "error"), ("PAY014", "error")]),
        "absent file": (
            lambda d: d["weight_map"].update(tiny="model-00009-of-00009.safetensors"),
            [("PAY014", "error")],
        ),
        "key lacking": (lambda d: d["weight_map"].pop("tiny"), [("PAY014", "warning")]),
        "wrong total": (lambda d: d["metadata"].update(total_size=10_000_000), [("PAY014", "warning")]),
        "path outside": (lambda d: d["weight_map"].update(tiny="../secret.safetensors"), [("PAY014", "error")]),
        "no weight map": (lambda d: d.pop("weight_map"), [("SAF002", "error")]),
    }
    for name, (edit, wanted) in damages.items():
        (folder / "model.safetensors.index.json").write_text(original)
        levels = [(code, level) for code, level, _ in found(edited_index(folder, edit), "error", "warning")]
        assert [item for item in levels if item[1] == "error"] == [item for item in wanted if item[1] == "error"], name
        assert set(wanted) <= set(levels), name
    (folder / "model.safetensors.index.json").write_text(original)

    def shuffle(document: dict[str, Any]) -> None:
        document["weight_map"] = dict(reversed(document["weight_map"].items()))

    assert loud(edited_index(folder, shuffle)) == []


def test_an_absent_index_is_no_damage_when_all_files_are_there(copied: Callable[[str], Path]) -> None:
    folder = copied("rank0")
    (folder / "model.safetensors.index.json").unlink()
    report = ckptlint.check(folder)
    assert (report.exit_code, loud(report)) == (0, [])
    assert codes(report, "info") == {"PAY014"}


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda data: data[:-20], "PAY004"), (lambda data: data[:100], "PAY013"), (lambda data: data[:5], "PAY013"),
        (lambda data: b"", "PAY013"), (lambda data: data + bytes(64), "PAY013"),
        (lambda data: b"PK\x03\x04" + data, "PAY013"), (lambda data: data[:8] + b"[" + data[9:], "PAY013"),
        (lambda data: data.replace(b'"shape":[8,8]', b'"shape":[8,7]', 1), "PAY007"),
        (lambda data: data.replace(b'"shape":[8,8]', b'"shape":[8,9]', 1), "PAY007"),
        (lambda data: data.replace(b'"dtype":"F32"', b'"dtype":"F64"', 1), "PAY007"),
        (lambda data: (2**40).to_bytes(8, "little") + data[8:], "PAY013"),
    ],
    ids=["cut payload", "cut header", "cut length", "empty", "longer", "zip", "list", "short", "long", "dtype", "huge"],
)  # fmt: skip
def test_a_damaged_file_is_an_error(copied: Callable[[str], Path], damage: Any, wanted: str) -> None:
    path = copied("single") / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    report = ckptlint.check(path.parent)
    assert (codes(report, "error"), report.exit_code) == ({wanted}, 1)
    assert report.checkpoints[0].failed == {}


def test_one_unreadable_shard_leaves_the_others_judged_and_is_never_a_pass(copied: Callable[[str], Path]) -> None:
    folder = copied("shards")
    next(folder.glob("shard-00003-*")).write_bytes(b"\x10\0\0\0\0\0\0\0{" + b" " * 14)  # one of 16 bytes is cut off
    report = ckptlint.check(folder)
    assert codes(report, "error") == {"PAY013"} and "ends inside its header" in found(report, "error")[0][2]
    assert report.checkpoints[0].not_applicable["GEO004"].startswith("1 of ")
    assert ckptlint.check(folder, ignore=["PAY013"]).exit_code == 4


BOMBS = {
    "nested": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "number": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
    "float": b'{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4000]}}',
    "flag": b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    "negative": b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "backwards": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    "NaN": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "encoding": b'{"a\xff": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
    "UTF-16": '{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'.encode("utf-16-le"),
    "surrogate": b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
    "no offsets": b'{"a": {"dtype": "U8", "shape": [0]}}',
    "metadata": b'{"__metadata__": {"a": 1}}',
    "list": b"[]",
    "dtype": b'{"a": {"dtype": "", "shape": [0], "data_offsets": [0, 0]}}',
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_no_reader_takes_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        parse_header(BOMBS[name], 8)
    write_safetensors(tmp_path / "model.safetensors", {"header": BOMBS[name].decode("latin-1")})
    report = ckptlint.check(tmp_path)
    assert (codes(report, "error"), report.exit_code) == ({"PAY013"}, 1)


def test_the_library_refuses_what_is_refused_here(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    for name, text in BOMBS.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        with pytest.raises(library.SafetensorError):
            library.safe_open(path, "numpy")


@pytest.mark.parametrize("shape", [[2**40, 2**40], [1] * 65])
def test_sizes_beyond_64_bits_are_a_limit(shape: list[int], tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})
    write_safetensors(tmp_path / "model.safetensors", {"header": text, "size": 4096})
    assert "SAF003" in codes(ckptlint.check(tmp_path), "error")


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(200_000_000)
    report = ckptlint.check(tmp_path)
    assert codes(report, "error") == {"SAF003"}


def test_holes_and_overlaps_of_a_header() -> None:
    start = safetensors_header(
        {"a": {"shape": [4]}, "b": {"shape": [4], "span": [12, 28]}, "c": {"shape": [4], "span": [40, 56]}}
    )
    header = parse_header(start[8:], len(start))
    faults = [sentence for sentence, _, _ in layout_faults(header, len(start) + 60)]
    assert faults == [
        "4 bytes belong to two tensors, b and the one before it",
        "no tensor claims 12 bytes before c",
        "no tensor claims 4 bytes after the last tensor",
    ]


# ---------------------------------------------------------------- folders of Hugging Face


def model(folder: Path, entries: dict[str, tuple[str, list[int]]], config: dict[str, Any], files: int = 1) -> Path:
    """A model folder whose tensors are zeros: real shapes take no room in a sparse file."""
    parts: list[dict[str, Any]] = [{} for _ in range(files)]
    for number, (name, (dtype, shape)) in enumerate(entries.items()):
        parts[number * files // len(entries)][name] = {"dtype": dtype, "shape": shape}
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ["model.safetensors"] if files == 1 else [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    )
    for name, part in zip(names, parts, strict=True):
        write_safetensors(folder / name, {"tensors": part})
    if files > 1:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    return folder


def layered(layers: int, per_layer: dict[str, tuple[str, list[int]]], **outside: tuple[str, list[int]]) -> Any:
    entries = {f"model.layers.{n}.{name}": entry for n in range(layers) for name, entry in per_layer.items()}
    return {name.replace("__", "."): entry for name, entry in outside.items()} | entries


BF, F8, F32, I32, U8 = "bfloat16", "float8_e4m3fn", "float32", "int32", "uint8"


def dense(hidden: int, ffn: int, heads: int, kv: int, head: int) -> dict[str, tuple[str, list[int]]]:
    return {
        "input_layernorm.weight": (BF, [hidden]), "post_attention_layernorm.weight": (BF, [hidden]),
        "self_attn.q_proj.weight": (BF, [heads * head, hidden]), "self_attn.k_proj.weight": (BF, [kv * head, hidden]),
        "self_attn.v_proj.weight": (BF, [kv * head, hidden]), "self_attn.o_proj.weight": (BF, [hidden, heads * head]),
        "mlp.gate_proj.weight": (BF, [ffn, hidden]), "mlp.up_proj.weight": (BF, [ffn, hidden]),
        "mlp.down_proj.weight": (BF, [hidden, ffn]),
    }  # fmt: skip


def quantised(entries: dict[str, tuple[str, list[int]]], how: str) -> dict[str, tuple[str, list[int]]]:
    """The projections of a layer as a quantised checkpoint stores them."""
    made: dict[str, tuple[str, list[int]]] = {}
    for name, (dtype, shape) in entries.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            made[name] = (dtype, shape)
            continue
        rows, columns = shape
        made |= {
            "fp8 blocks": {name: (F8, shape), f"{name}_scale_inv": (F32, [-(-rows // 128), -(-columns // 128)])},
            "fp8 tensors": {name: (F8, shape), f"{name}_scale": (F32, [1]), f"{stem}.input_scale": (F32, [1])},
            "gptq": {
                f"{stem}.qweight": (I32, [columns // 8, rows]),
                f"{stem}.qzeros": (I32, [columns // 128, rows // 8]),
                f"{stem}.scales": ("float16", [columns // 128, rows]),
                f"{stem}.g_idx": (I32, [columns]),
            },
            "awq": {
                f"{stem}.qweight": (I32, [columns, rows // 8]),
                f"{stem}.qzeros": (I32, [columns // 128, rows // 8]),
                f"{stem}.scales": ("float16", [columns // 128, rows]),
            },
            "bitsandbytes": {
                name: (U8, [rows * columns // 2, 1]),
                f"{name}.absmax": (U8, [rows * columns // 64]),
                f"{name}.nested_absmax": (F32, [rows * columns // 64 // 256]),
                f"{name}.quant_map": (F32, [16]),
                f"{name}.nested_quant_map": (F32, [256]),
                f"{name}.quant_state.bitsandbytes__nf4": (U8, [160]),
            },
            "compressed-tensors": {
                f"{stem}.weight_packed": (I32, [rows, columns // 8]),
                f"{stem}.weight_scale": (BF, [rows, columns // 128]),
                f"{stem}.weight_shape": ("int64", [2]),
            },
        }[how]
    return made


def deepseek(layers: int) -> dict[str, tuple[str, list[int]]]:
    """DeepSeek-V3 with fewer layers and experts: latent attention, dense first layers, fp8 blocks, one MTP layer."""
    attention = {
        "self_attn.q_a_proj.weight": (BF, [1536, 7168]), "self_attn.q_a_layernorm.weight": (BF, [1536]),
        "self_attn.q_b_proj.weight": (BF, [24576, 1536]), "self_attn.kv_a_proj_with_mqa.weight": (BF, [576, 7168]),
        "self_attn.kv_a_layernorm.weight": (BF, [512]), "self_attn.kv_b_proj.weight": (BF, [32768, 512]),
        "self_attn.o_proj.weight": (BF, [7168, 16384]), "input_layernorm.weight": (BF, [7168]),
        "post_attention_layernorm.weight": (BF, [7168]),
    }  # fmt: skip
    mlp = {name: entry for name, entry in dense(7168, 18432, 1, 1, 1).items() if name.startswith("mlp")}
    shared = {
        name.replace("mlp.", "mlp.shared_experts."): entry
        for name, entry in dense(7168, 2048, 1, 1, 1).items()
        if name.startswith("mlp")
    }
    experts = {
        name.replace("shared_experts.", f"experts.{n}."): entry for n in range(8) for name, entry in shared.items()
    }
    router = {"mlp.gate.weight": (BF, [8, 7168]), "mlp.gate.e_score_correction_bias": (F32, [8])}
    entries: dict[str, tuple[str, list[int]]] = {}
    for n in range(layers + 1):
        body = attention | (mlp if n < 3 else shared | experts | router)
        entries |= {f"model.layers.{n}.{name}": entry for name, entry in quantised(body, "fp8 blocks").items()}
    mtp = {
        "enorm.weight": (BF, [7168]),
        "hnorm.weight": (BF, [7168]),
        "eh_proj.weight": (BF, [7168, 14336]),
        "embed_tokens.weight": (BF, [129280, 7168]),
        "shared_head.head.weight": (BF, [129280, 7168]),
        "shared_head.norm.weight": (BF, [7168]),
    }
    entries |= {f"model.layers.{layers}.{name}": entry for name, entry in mtp.items()}
    outside = {"embed_tokens.weight": [129280, 7168], "norm.weight": [7168]}
    return (
        {f"model.{name}": (BF, shape) for name, shape in outside.items()}
        | entries
        | {"lm_head.weight": (BF, [129280, 7168])}
    )


LLAMA = {"num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"intermediate_size": 14336, "vocab_size": 128256}
OUTSIDE: Any = {"model__embed_tokens__weight": (BF, [128256, 4096]), "model__norm__weight": (BF, [4096])}
HEAD: Any = {"lm_head__weight": (BF, [128256, 4096])}
LAYER = dense(4096, 14336, 32, 8, 128)
VISION = {
    f"visual.blocks.{n}.{name}": (BF, shape)
    for n in range(6)
    for name, shape in {
        "norm1.weight": [1280],
        "attn.qkv.weight": [3840, 1280],
        "attn.proj.weight": [1280, 1280],
        "mlp.fc1.weight": [5120, 1280],
        "mlp.fc2.weight": [1280, 5120],
    }.items()
}
FUSED: dict[str, tuple[str, list[int]]] = {
    "input_layernorm.weight": (BF, [3072]),
    "self_attn.qkv_proj.weight": (BF, [9216, 3072]),
    "self_attn.o_proj.weight": (BF, [3072, 3072]),
    "mlp.gate_up_proj.weight": (BF, [16384, 3072]),
    "mlp.down_proj.weight": (BF, [3072, 8192]),
}
PHI: Any = {"model__embed_tokens__weight": (BF, [32064, 3072]), "model__norm__weight": (BF, [3072])}
MIXTRAL: dict[str, tuple[str, list[int]]] = {
    name: entry for name, entry in LAYER.items() if not name.startswith("mlp")
} | {"block_sparse_moe.gate.weight": (BF, [8, 4096])}
MIXTRAL |= {
    f"block_sparse_moe.experts.{e}.{w}.weight": (BF, shape)
    for e in range(8)
    for w, shape in {"w1": [14336, 4096], "w2": [4096, 14336], "w3": [14336, 4096]}.items()
}
GPT_OSS: dict[str, tuple[str, list[int]]] = {
    "input_layernorm.weight": (BF, [2880]), "self_attn.q_proj.weight": (BF, [4096, 2880]),
    "self_attn.k_proj.weight": (BF, [512, 2880]), "self_attn.v_proj.weight": (BF, [512, 2880]),
    "self_attn.o_proj.weight": (BF, [2880, 4096]), "self_attn.sinks": (BF, [64]), "mlp.router.weight": (BF, [32, 2880]),
    "mlp.router.bias": (BF, [32]), "mlp.experts.gate_up_proj_blocks": (U8, [32, 5760, 90, 16]),
    "mlp.experts.gate_up_proj_scales": (U8, [32, 5760, 90]), "mlp.experts.gate_up_proj_bias": (BF, [32, 5760]),
    "mlp.experts.down_proj_blocks": (U8, [32, 2880, 90, 16]), "mlp.experts.down_proj_scales": (U8, [32, 2880, 90]),
    "mlp.experts.down_proj_bias": (BF, [32, 2880]),
}  # fmt: skip

MODELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "Llama-3 in 3 files": (layered(4, LAYER, **OUTSIDE, **HEAD), LLAMA, 3),
    "tied embeddings": (layered(4, LAYER, **OUTSIDE), LLAMA | {"tie_word_embeddings": True}, 1),
    "vision tower": (layered(4, LAYER, **OUTSIDE, **HEAD) | VISION, LLAMA | {"vision_config": {"depth": 6}}, 2),
    "Mixtral": (layered(4, MIXTRAL, **OUTSIDE, **HEAD), LLAMA | {"num_local_experts": 8}, 2),
    "DeepSeek-V3, fp8 blocks": (
        deepseek(5),
        {"num_hidden_layers": 5, "num_nextn_predict_layers": 1, "hidden_size": 7168, "n_routed_experts": 8}
        | {"vocab_size": 129280, "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"}},
        4,
    ),
    "gpt-oss, mxfp4": (
        layered(3, GPT_OSS, model__norm__weight=(BF, [2880])),
        {"num_hidden_layers": 3, "hidden_size": 2880, "num_local_experts": 32}
        | {"quantization_config": {"quant_method": "mxfp4"}},
        1,
    ),
    "Phi-3, fused": (layered(4, FUSED, **PHI), {"num_hidden_layers": 4, "hidden_size": 3072, "vocab_size": 32064}, 2),
} | {
    f"{method} {how}".strip(): (
        layered(4, quantised(LAYER, how or method), **OUTSIDE, **HEAD),
        LLAMA | {"quantization_config": {"quant_method": method}},
        2,
    )
    for method, how in [("fp8", "fp8 blocks"), ("fp8", "fp8 tensors")]
    + [(method, "") for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors")]
}


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_of_hugging_face_is_no_reason_for_an_alarm(name: str, tmp_path: Path) -> None:
    entries, config, files = MODELS[name]
    report = ckptlint.check(model(tmp_path / "m", entries, config, files))
    assert (report.exit_code, loud(report)) == (0, [])
    (part,) = report.checkpoints
    assert len(part.checkpoint.tensors) == len(entries) and part.failed == {}
    assert part.checkpoint.declared["layers"].source == "config.json"


def test_what_a_model_declares_is_held_against_what_it_stores(tmp_path: Path) -> None:
    entries = layered(4, LAYER, **OUTSIDE, **HEAD)
    fewer = {name: entry for name, entry in entries.items() if ".layers.3." not in name}
    assert not codes(ckptlint.check(model(tmp_path / "unknown", fewer, LLAMA, 2)), "error", "warning")
    known = LLAMA | {"model_type": "deepseek_v4"}  # it has no table, and counts layers as others do
    assert codes(ckptlint.check(model(tmp_path / "lost", fewer, known, 2)), "error") == {"COM008"}
    gap = {name: entry for name, entry in entries.items() if ".layers.2." not in name}
    assert "SHP001" in codes(ckptlint.check(model(tmp_path / "gap", gap, LLAMA, 2)), "error")
    experts = layered(4, MIXTRAL, **OUTSIDE, **HEAD)
    lost = {name: entry for name, entry in experts.items() if ".experts.5." not in name}
    config = LLAMA | {"num_local_experts": 8}
    assert {"EXP001", "EXP002"} & codes(ckptlint.check(model(tmp_path / "experts", lost, config)), "error")


LORA = {
    f"base_model.model.model.layers.{n}.self_attn.{proj}.lora_{half}.weight": (F32, shape)
    for n in (10, 11, 12, 20)
    for proj in ("q_proj", "v_proj")
    for half, shape in (("A", [16, 4096]), ("B", [4096 if proj == "q_proj" else 1024, 16]))
}


def test_an_adapter_is_judged_without_the_configuration_of_its_base(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", layered(4, LAYER, **OUTSIDE), LLAMA, 2)
    table = {"tensors": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in LORA.items()}}
    write_safetensors(folder / "adapter_model.safetensors", table)
    (folder / "adapter_config.json").write_text('{"r": 16}')
    for name in ("optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(torch_archive({"data.pkl": pickle.dumps({}, 2)}))
    report = ckptlint.check(folder)
    assert (report.exit_code, loud(report)) == (0, [])
    parts = {Path(part.checkpoint.path).name: part.checkpoint for part in report.checkpoints}
    assert set(parts) == {"adapter_model.safetensors", "model-*.safetensors"}
    assert not parts["adapter_model.safetensors"].declared


def test_copies_of_one_model_in_other_names_are_judged_each_by_itself(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", layered(4, LAYER, **OUTSIDE), LLAMA, 2)
    tensors = {name.removeprefix("model."): {"dtype": BF, "shape": shape} for name, (_, shape) in LAYER.items()}
    write_safetensors(folder / "consolidated.safetensors", {"tensors": tensors})
    for number in (1, 2):
        name = f"model.fp16-0000{number}-of-00002.safetensors"
        write_safetensors(folder / name, {"tensors": {f"w{number}": {"dtype": "float16", "shape": [8]}}})
    places = {f"w{number}": f"model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": places}))
    report = ckptlint.check(folder)
    assert (report.exit_code, loud(report)) == (0, [])
    assert sorted(Path(part.checkpoint.path).name for part in report.checkpoints) == [
        "consolidated.safetensors",
        "model-*.safetensors",
        "model.fp16-*.safetensors",
    ]


def test_an_export_beside_a_dcp_checkpoint_is_judged_too(tmp_path: Path) -> None:
    folder = write_checkpoint({"tensors": {"model.w": {"shape": [8]}}}, tmp_path / "step-10")
    write_safetensors(folder / "model.safetensors", {"tensors": {"w": {"shape": [8]}}})
    report = ckptlint.check(tmp_path)
    assert (report.exit_code, loud(report)) == (0, [])
    assert {part.checkpoint.format for part in report.checkpoints} == {"dcp", "safetensors"}
    write_safetensors(folder / "model.safetensors", {"tensors": {"w": {"shape": [8]}}, "size": 90})
    assert ckptlint.check(tmp_path).exit_code == 1


def test_files_of_a_model_cache_are_links_that_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    write_safetensors(blobs / "f00", {"tensors": {"w": {"shape": [8]}}})
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00")
    report = ckptlint.check(snapshot)
    assert (report.exit_code, loud(report)) == (0, [])
    assert codes(report, "info") == {"PAY003"} and "w" in report.checkpoints[0].checkpoint.tensors


def test_a_pipeline_of_diffusers_has_a_model_in_each_folder(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    for step in ("checkpoint-2", "checkpoint-4"):
        for part in ("unet", "vae", "text_encoder"):
            name = "model.safetensors" if part == "text_encoder" else "diffusion_pytorch_model.safetensors"
            path = run_folder / step / part / name
            write_safetensors(path, {"tensors": {"conv_in.weight": {"shape": [8, 4, 3, 3]}}})
            own = {"architectures": ["CLIPTextModel"]} if part == "text_encoder" else {"_class_name": part}
            path.with_name("config.json").write_text(json.dumps(own))
        (run_folder / step / "model_index.json").write_text("{}")
    report = ckptlint.check(run_folder)
    assert (report.exit_code, loud(report), len(report.checkpoints)) == (0, [], 3)
    (run_folder / "checkpoint-4/unet/diffusion_pytorch_model.safetensors").unlink()
    for path in (run_folder, run_folder / "checkpoint-4"):
        assert codes(ckptlint.check(path), "error") == {"COM001"}
    assert run("latest", "--isolated", run_folder).stdout.strip().endswith("checkpoint-2")


@pytest.mark.skipif(not (SHARED / "public").is_dir(), reason="no folder of shared checkpoints beside the repository")
def test_public_samples_pass_and_fragments_of_nanotron_do_not() -> None:
    report = ckptlint.check(SHARED / "public" / "safetensors-samples")
    assert (report.exit_code, loud(report), len(report.checkpoints)) == (0, [], 10)
    folder = next((SHARED / "public" / "nanotron-fragments").rglob("*.safetensors")).parent
    assert codes(ckptlint.check(folder), "error") == {"SAF004"}


def test_the_fixture_of_four_ranks_is_healthy_and_a_lost_rank_is_not(real_copy: Callable[[str], Path]) -> None:
    assert ckptlint.check(REAL / "hf_sharded").exit_code == 0
    folder = real_copy("hf_sharded")
    for path in folder.glob("shard-00002-*"):
        path.unlink()
    assert "GEO004" in codes(ckptlint.check(folder), "error")


def test_what_macos_leaves_beside_a_model_is_no_model(written: Path, tmp_path: Path) -> None:
    shutil.copy(written / "single" / "model.safetensors", tmp_path)
    (tmp_path / "._model.safetensors").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(4056))
    report = ckptlint.check(tmp_path)
    assert (len(report.checkpoints), loud(report), report.exit_code) == (1, [], 0)


@pytest.mark.parametrize(
    ("name", "keys", "is_left_out"),
    [
        ("model-mtp-of-00001", ["layers.2.mlp.w", "layers.2.norm", "layers.2.eh_proj"], True),
        ("mtp-00001-of-00001", ["layers.2.mlp.w"], True),
        ("adapter_model", ["layers.2.mlp.w"], False),
        ("consolidated", ["layers.2.mlp.w"], False),
        ("old", ["layers.1.mlp.w", "layers.2.mlp.w"], False),  # repeats a layer
        ("draft", ["layers.3.mlp.w"], False),  # beyond what is declared
        ("scales", ["layers.2.mlp.w_scale", "layers.2.norm_scale", "layers.2.mlp.w"], False),
        ("vision", ["visual.layers.2.mlp.w"], False),
        ("optimizer", ["layers.2.mlp.w.exp_avg", "step"], False),
        ("empty", [], False),
    ],
)
def test_a_file_with_layers_that_only_the_index_lacks_is_of_its_model(
    name: str, keys: list[str], is_left_out: bool, tmp_path: Path
) -> None:
    def save(name: str, keys: list[str]) -> None:
        write_safetensors(tmp_path / name, {"tensors": {f"model.{key}": {"shape": [4]} for key in keys}})

    whole = [f"layers.{number}.{leaf}" for number in (0, 1) for leaf in ("mlp.w", "norm")]
    save("model-00001-of-00001.safetensors", whole)
    save(f"{name}.safetensors", keys)
    places = {f"model.{key}": "model-00001-of-00001.safetensors" for key in whole}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_nextn_predict_layers": 1}')
    models = groups(LocalFolder(tmp_path))
    assert (len(models) == 1) == is_left_out
    assert f"{name}.safetensors" in models[0 if is_left_out else -1].files or not is_left_out
