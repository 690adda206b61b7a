"""Files that run code where a loader opens them, however they are written: none passes, and nothing of them runs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import found

import ckptlint

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


class Touch:
    """Its pickle makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    safetensors.save_file({"w": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def array(header: str, body: bytes, version: int = 1, encoding: str = "latin-1") -> bytes:
    """A `.npy` file with a header of one's own."""
    text = header.encode(encoding) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + body


def header(descr: str = "'|O'", shape: str = "(1,)", before: str = "", after: str = "") -> str:
    return f"{before}{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}{after}"


HEADERS = {
    "plain": header(),
    "escaped": header(r"'|\x4f'"),
    "escaped and long": header(r"'|\x4f'", "(1L,)"),
    "octal and long": header(r"'|\117'", "(1L,)"),
    "name and long": header(r"'\x6fbject'", "(1L,)"),
    "unicode and long": header(r"'\u004f'", "(1L, 1L)"),
    "joined and long": header("'|' '\\x4f'", "(1L,)"),
    "named character": header(r"'\N{LATIN CAPITAL LETTER O}'", "(1L,)"),
    "spaces": header(before="  \t", after="  \t \n\n"),
    "lines": header().replace(",", ",\n\t "),
    "lines and long": header(r"'|\x4f'", "(1L,)").replace(",", ",\n  "),
    "comment and long": header(r"'|\x4f'", "(1L,)") + " # f4",
    "fields and long": header(r"[('a', '<f4'), ('b', '|\x4f')]", "(1L,)"),
    "fields": header("[('a', '<f4'), ('b', '|O')]"),
    "nested fields": header(r"[('a', [('b', '|\x4f', (2L,))])]"),
    "subtype": header("('|O', (2,))"),
    "many spaces": header(after=" " * 60_000),
    "no whole header": header()[:-4],
}
NUMBERS = {
    "plain": header("'<f4'", "(2,)"),
    "long": header("'<f4'", "(2L,)"),
    "fields": header("[('O', '<f4'), ('object', '<f4')]", "(1,)"),
    "fields and long": header("[('O', '<f4'), ('object', '<f4')]", "(1L,)"),
}


def zipped(members: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def z_file(data: bytes, width: int = 19, gap: bytes = b"") -> bytes:
    """A file of joblib < 0.9.3: `joblib.numpy_pickle_compat.write_zfile`."""
    return b"ZF" + hex(len(data)).encode().ljust(width) + gap + zlib.compress(data)


def lz4(data: bytes) -> bytes:
    """An LZ4 frame of one block that is not packed; its checksum of the header is not looked at here."""
    return b'\x04"M\x18\x60\x40\x82' + struct.pack("<I", len(data) | 1 << 31) + data + b"\0" * 4


def alone(size: int, lc: int = 3, lp: int = 0, pb: int = 2) -> Callable[[bytes], bytes]:
    """FORMAT_ALONE of lzma with a dictionary of this size."""
    chain = [{"id": lzma.FILTER_LZMA1, "dict_size": size, "lc": lc, "lp": lp, "pb": pb}]
    return lambda data: lzma.compress(data, lzma.FORMAT_ALONE, filters=chain)


def old_tar(data: bytes) -> bytes:
    """The form of torch < 0.2, as far as `torch.serialization._legacy_load` looks."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "zf": z_file,
    "zf of python 2": lambda data: z_file(data, gap=b" "),
    "lz4": lz4,
    "old lz4": lambda data: b"\x02!L\x18" + struct.pack("<I", len(data)) + data,
    "zstandard": lambda data: b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + data,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "fast zlib": lambda data: zlib.compress(data, 1),
    "small zlib": lambda data: (pack := zlib.compressobj(wbits=9)).compress(data) + pack.flush(),
    **{f"lzma {size}": alone(size) for size in (4096, 5000, 65536, 2**20, 2**23, 2**24 + 17, 3 << 20)},
    "lzma of other properties": alone(65537, 1, 2, 1),
    "gzip after zeros": lambda data: gzip.compress(b"") + b"\0" * 99 + gzip.compress(data),
    "gzip twice": lambda data: gzip.compress(gzip.compress(data)),
    "gzip of zf": lambda data: gzip.compress(z_file(data)),
    "gzip of lz4": lambda data: gzip.compress(lz4(data)),
    "unknown": lambda data: b"QRS\1" + bytes(byte ^ 0x55 for byte in data),
    "old tar": old_tar,
}
UNREAD = ("lz4", "old lz4", "zstandard", "unknown", "old tar", "gzip of lz4")
UNPACKED = ("zf", "zf of python 2", "lzma 5000", "lzma of other properties", "xz", "gzip after zeros", "old tar")
ENDINGS = ("joblib", "pkl", "pickle", "pt", "pth", "ckpt", "dill", "p")


def judged(step: Path, name: str, data: bytes) -> tuple[int, list[tuple[str, str, str]]]:
    """Exit code and findings with this file in the step."""
    path = step / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    report = ckptlint.check(step)
    path.unlink()
    return report.exit_code, found(report)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def evil(mark: Path) -> Any:
    yield pickle.dumps(Touch(mark), 2)
    assert not mark.exists()


# ---------------------------------------------------------------- numpy


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("form", HEADERS)
def test_an_array_of_objects_never_passes_however_its_header_is_written(step: Path, evil: bytes, form: str) -> None:
    for version in (1, 2, 3):
        data = array(HEADERS[form], evil, version)
        for name, file in (("x.npy", data), ("a/b/c/x", data), ("x.npz", zipped({"x.npy": data, "y": b"1"}))):
            code, rows = judged(step, name, file)
            assert code in (1, 4), (name, version)
            assert name in rows[0][2]


def test_the_headers_are_those_that_numpy_reads() -> None:
    for form, text in HEADERS.items():
        if form != "no whole header":
            with pytest.raises(ValueError, match="allow_pickle"):
                np.load(io.BytesIO(array(text, b"")), allow_pickle=False, max_header_size=2**20)


@pytest.mark.parametrize("form", NUMBERS)
def test_an_array_of_numbers_is_quiet(step: Path, form: str) -> None:
    data = array(NUMBERS[form], b"\0" * 8)
    assert np.load(io.BytesIO(data), allow_pickle=False).nbytes == 8
    assert judged(step, "x.npy", data) == judged(step, "x.npz", zipped({"a.npy": data})) == (0, [])


def test_names_of_fields_in_other_scripts_are_quiet(step: Path) -> None:
    with (step / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, np.zeros(2, [("ж" * 9, "f4"), ("O", "f4")]), version=(3, 0))
    assert judged(step, "x.npy", (step / "x.npy").read_bytes()) == (0, [])


def test_zip_files_of_arrays_are_read_as_numpy_reads_them(step: Path, evil: bytes) -> None:
    objects = zipped({"x.npy": array(header(), evil)})
    for start in (zipped({}), b"PK\3\4" + b"junk" * 99, b"junk" * 999, b"\x80\2."):
        data = start + objects
        for packed in (data, data + b"\0" * 9):
            assert judged(step, "x.npz", packed)[0] in (1, 4)
    assert judged(step, "x", zipped({}) + objects)[0] == 1
    assert judged(step, "x.npz", zipped({})) == (0, [])


def test_every_member_of_a_zip_file_is_looked_at(step: Path, evil: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {f"{number}.npy": array(header("'<f4'", "(0,)"), b"") for number in range(4100)}
    assert judged(step, "x.npz", zipped({**numbers, "z.npy": array(header(), evil)}))[0] == 1
    assert judged(step, "x.npz", zipped({**numbers, "z": array(header(), evil)}))[0] == 1
    assert judged(step, "x.npz", zipped(numbers)) == (0, [])
    monkeypatch.setattr("ckptlint.formats.content._MEMBERS", 4000)
    code, rows = judged(step, "x.npz", zipped(numbers))
    assert code == 4
    assert "has 4,100 members, the limit is 4,000" in rows[0][2]


def test_an_array_that_only_a_newer_python_unpacks_is_told(step: Path, evil: bytes) -> None:
    for name in ("x.npy", "readme"):
        data = bytearray(zipped({name: array(header(), evil)}))
        for mark in (b"PK\3\4", b"PK\1\2"):
            at = data.index(mark) + (8 if mark == b"PK\3\4" else 10)
            data[at : at + 2] = struct.pack("<H", 98)
        assert judged(step, "x.npz", bytes(data))[0] == 4


# ---------------------------------------------------------------- packed


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("form", PACKED)
def test_what_is_called_like_a_pickle_and_packed_never_passes(step: Path, evil: bytes, form: str) -> None:
    data = PACKED[form](evil)
    for name in [f"scaler.{ending}" for ending in ENDINGS] + ["a/b/c/x.pkl", "x.pkl.lz4", "a/b/c/x.joblib.gz"]:
        code, rows = judged(step, name, data)
        assert code in (1, 4), name
        assert name in rows[0][2]
    if form != "unknown":
        assert judged(step, "x.bin", data)[0] in (1, 4)


@pytest.mark.parametrize("form", UNPACKED)
def test_what_is_unpacked_is_told_whatever_its_name(step: Path, evil: bytes, form: str) -> None:
    assert judged(step, "vocab.txt", PACKED[form](evil))[0] == 1


@pytest.mark.parametrize("form", PACKED)
def test_pickles_that_are_unpacked_and_call_nothing_are_quiet(step: Path, form: str) -> None:
    code, rows = judged(step, "scaler.joblib", PACKED[form](pickle.dumps({"mean": [1.0, 2.0]}, 2)))
    assert (code, bool(rows)) == (4 if form in UNREAD else 0, form in UNREAD)


def test_data_of_other_kinds_is_quiet(step: Path) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model_weights.txt"), io.BytesIO())
    for name, data in (
        ("openvino/openvino_model.bin", np.arange(999, dtype="f4").tobytes()),
        ("vocab.bin", b"\x5d\1\2\3" * 99),
        ("tokens.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)),
        ("notes.txt", b"ZF is a company\n" * 9),
        ("code.tar", tar.getvalue()),
        ("logs.gz", gzip.compress(b"step 1\n" * 99)),
        ("code.zip", zipped({"train.py": b"import os\n"})),
        ("state.pkl", pickle.dumps({"a": 1}, 0)),
        ("table.pkl", pickle.dumps(np.arange(3))),
    ):
        assert judged(step, name, data) == (0, []), name


def test_what_joblib_writes_is_judged_as_before(step: Path) -> None:
    joblib = pytest.importorskip("joblib")
    for packing in (0, "zlib", "gzip", "bz2", "lzma", "xz"):
        joblib.dump({"mean": [1.0]}, step / "scaler.joblib", compress=packing)
        assert judged(step, "scaler.joblib", (step / "scaler.joblib").read_bytes()) == (0, [])


def test_payload_that_no_metadata_names_and_that_is_a_pickle_is_told(tmp_path: Path, evil: bytes, mark: Path) -> None:
    import torch.distributed.checkpoint as writer

    step = tmp_path / "step-10"
    writer.save({"w": torch.ones(4)}, checkpoint_id=str(step), no_dist=True)
    payload = (step / "__0_0.distcp").read_bytes()
    for data in (evil, pickle.dumps(Touch(mark), 0), z_file(evil), lzma.compress(evil), array(header(), evil)):
        for name in ("__7_0.distcp", "sub/__7_0.distcp", "sub/a/b/__7_0.distcp", ".hidden.distcp"):
            assert judged(step, name, data)[0] == 1, name
    (step / "__7_0.distcp").write_bytes(payload)
    assert ckptlint.check(step, fail_on="error").exit_code == 0


# ---------------------------------------------------------------- containers


def saved_by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def tarred(members: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def exported(file: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, file)


@pytest.mark.sweep
def test_programs_of_torch_export_are_read_to_their_inner_files(step: Path, mark: Path, evil: bytes) -> None:
    exported(step / "m.pt2")
    data = (step / "m.pt2").read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    inner = next(name for name in members if name.endswith("sample_inputs/model.pt"))
    for name in ("m.pt2", "m.bin", "m", "a/b/c/m.txt"):
        assert judged(step, name, data) == (0, [])
        for bad in (saved_by_torch(Touch(mark)), evil):
            code, rows = judged(step, name, zipped({**members, inner: bad}))
            assert (code, rows[0][0]) == (1, "SAF001"), name


def test_packages_of_torch_are_read_and_their_code_is_told(step: Path, mark: Path) -> None:
    def package(value: Any, code: str = "") -> bytes:
        file = io.BytesIO()
        with warnings.catch_warnings(action="ignore"), torch.package.PackageExporter(file) as exporter:
            exporter.extern(["os", "posix", "torch.**"])
            exporter.save_pickle("model", "model.pkl", value)
            if code:
                exporter.save_source_string("net", code)
        return file.getvalue()

    for name in ("p.pt", "p", "a/p.zip"):
        assert judged(step, name, package({"w": torch.ones(3)})) == (0, [])
        assert judged(step, name, package(Touch(mark)))[0] == 1
        assert judged(step, name, package({"w": 1}, "x = 1\n"))[0] == 4


@pytest.mark.parametrize("name", ["model.nemo", "model.tgz", "a/b/c/x"])
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_members_of_tar_files_are_read(step: Path, mark: Path, name: str, mode: str) -> None:
    healthy = {"model_config.yaml": b"a: 1\n", "model_weights.ckpt": saved_by_torch({"w": torch.ones(3)})}
    assert judged(step, name, tarred(healthy, mode)) == (0, [])
    for bad in (saved_by_torch(Touch(mark)), pickle.dumps(Touch(mark)), zipped({"a": pickle.dumps(Touch(mark), 0)})):
        code, rows = judged(step, name, tarred({**healthy, "model_weights.ckpt": bad}, mode))
        assert (code, rows[0][0]) == (1, "SAF001")
    assert not mark.exists()


def test_a_tar_file_that_goes_on_after_its_end_is_not_passed(step: Path, evil: bytes) -> None:
    tar = tarred({"a.txt": b"a"})
    assert judged(step, "x.tar", tar + b"\0" * 10_240) == (0, [])
    for rest in (evil, tarred({"b": evil})):
        assert judged(step, "x.tar", tar + rest)[0] == 4


def test_what_follows_an_array_is_read_or_told(step: Path, evil: bytes) -> None:
    numbers = array(header("'<f4'", "(2,)"), b"\0" * 8)
    for quiet in (numbers * 3, numbers + b"\0" * 99, numbers[:-3], numbers + pickle.dumps({"a": 1})):
        assert judged(step, "x.npy", quiet) == judged(step, "x.npz", zipped({"x.npy": quiet})) == (0, [])
    for rest in (evil, numbers + evil, array(header(), evil), b"\0" * 2**20 + evil, b"junk", gzip.compress(evil)):
        for name in ("x.npy", "a/b/c/x"):
            assert judged(step, name, numbers + rest)[0] in (1, 4)
    assert judged(step, "x.npy", numbers + evil)[0] == 1


def test_what_is_packed_and_not_unpacked_is_told_whatever_its_name(step: Path, evil: bytes) -> None:
    for form in ("lz4", "old lz4", "zstandard", "gzip of lz4"):
        for name in ("tokens.bin", "a/b/c/x", "events.log"):
            assert judged(step, name, PACKED[form](evil))[0] == 4, (form, name)
    assert judged(step, "x.tar", tarred({"a": lz4(evil)}))[0] == 4
    for protocol in (0, 2, 4):
        pack = zlib.compressobj(wbits=-15)
        data = pack.compress(pickle.dumps({"a": [1.0] * 9}, protocol)) + pack.flush()
        assert judged(step, "x", data) == (0, [])
    pack = zlib.compressobj(wbits=-15)
    assert judged(step, "x", pack.compress(evil) + pack.flush())[0] == 1


def test_containers_are_followed_three_deep(step: Path, evil: bytes) -> None:
    logs = b"step 1\n" * 99
    for wrap in (gzip.compress, lambda data: zipped({"x": data}), lambda data: tarred({"x": data})):
        bad, good = evil, logs
        for depth in range(1, 5):
            bad, good = wrap(bad), wrap(good)
            assert judged(step, "x", bad)[0] == (1 if depth <= 3 else 4)
            assert depth == 4 or judged(step, "x", good) == (0, [])


def test_payload_behind_a_link_inside_the_folder_is_no_other_file(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as writer

    step = tmp_path / "step-10"
    writer.save({"w": torch.ones(4), "v": torch.ones(3)}, checkpoint_id=str(step), no_dist=True)
    (step / "data").mkdir()
    (step / "__0_0.distcp").rename(step / "data" / "0")
    (step / "__0_0.distcp").symlink_to("data/0")
    assert ckptlint.check(step, fail_on="error").exit_code == 0


# ---------------------------------------------------------------- bounds


def test_a_pickle_by_name_that_is_not_looked_at_fails(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.loaders.run.step_files._HEADS", {True: 5})
    (step / "a" / "b" / "c").mkdir(parents=True)
    for number in range(20):
        (step / "a" / "b" / "c" / f"{number}.txt").write_text("x")
    assert ckptlint.check(step).exit_code == 0
    assert judged(step, "a/b/c/x.pkl", b"x")[0] == 4


# ---------------------------------------------------------------- settings

CALL = "object/apply:os.mkdir [{}]"
YAMLS: dict[str, Callable[[str], bytes]] = {
    "short": lambda call: f"a: !!python/{call}".encode(),
    "directive": lambda call: f"%TAG !p! tag:yaml.org,2002:py\n---\na: !p!thon/{call}".encode(),
    "directive of one mark": lambda call: f"%TAG ! tag:yaml.org,2002:python/\n---\na: !{call}".encode(),
    "directive of two marks": lambda call: f"%TAG !! tag:yaml.org,2002:python/object/\n---\n!!{call[7:]}".encode(),
    "verbatim": lambda call: f"a: !<tag:yaml.org,2002:python/{call.replace(' ', '> ')}".encode(),
    "escape": lambda call: f"a: !!p%79thon/{call}".encode(),
    "escapes": lambda call: f"a: !!%70%79%74%68%6f%6E%2F{call}".encode(),
    "escape in a directive": lambda call: f"%TAG !p! tag:yaml.org,2002:%70y\n---\n!p!thon/{call}".encode(),
    "verbatim escape": lambda call: f"- !<tag:yaml.org,2002:p%79thon/{call.replace(' ', '> ')}".encode(),
    "utf-16": lambda call: f"a: !!python/{call}".encode("utf-16"),
    "utf-16 of the other order": lambda call: b"\xfe\xff" + f"a: !!python/{call}".encode("utf-16-be"),
    "utf-32": lambda call: f"a: !!python/{call}".encode("utf-32"),
    "late": lambda call: b"# x\n" * 300_000 + f"a: !!python/{call}".encode(),
    "second document": lambda call: f"a: 1\n---\n!!python/{call}".encode(),
    "key": lambda call: f"? !!python/{call}\n: 1".encode(),
    "flow": lambda call: f"{{a: [!!python/{call}]}}".encode(),
}


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("form", YAMLS)
def test_tags_of_python_are_told_however_they_are_spelled(step: Path, mark: Path, form: str) -> None:
    yaml = pytest.importorskip("yaml")
    data = YAMLS[form](CALL.format(mark))
    events = yaml.parse(data.replace(b"# x\n", b"").decode(json.detect_encoding(data)), yaml.SafeLoader)
    assert any((getattr(event, "tag", None) or "").startswith("tag:yaml.org,2002:python/") for event in events)
    others = ("settings.txt", "hparams", "a/x.cfg") if len(data) <= 2**20 else ()
    for name in ("x.yaml", "a/b/c/x.yml", ".hydra/config.yaml", *others):
        code, rows = judged(step, name, data)
        assert (code, rows) == (0, [("SAF001", "info", f"this folder contains code: {name} (a tag !!python/)")])
    assert not mark.exists()


def test_many_settings_are_all_read_and_what_is_not_is_told(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(80):
        (step / f"a{number}.yaml").write_text("a: 1\n")
    data = YAMLS["short"](CALL.format("m"))
    assert "z.yaml (a tag" in judged(step, "z.yaml", data)[1][0][2]
    unread = "1 file of settings could not be searched for code: z.yaml"
    assert judged(step, "z.yaml", b"a: ! [python/ : {")[1][0][2] == unread
    late = b" " * 2**21 + b'{"auto_map": {"AutoModel": "own.Model"}}'
    assert judged(step, "own_config.json", late)[1][0][2] == "this folder contains code: own_config.json (auto_map)"
    monkeypatch.setattr("ckptlint.loaders.code_beside._LIMIT", 81 * 2**16)
    assert judged(step, "z.yaml", data + b" " * 99)[1][0][2] == unread


def test_settings_without_code_are_quiet(step: Path) -> None:
    hydra = "# !!python/object is not meant\nmodel:\n  _target_: torch.optim.AdamW\n  path: /usr/lib/python/a%20b\n"
    for name in ("config.yaml", ".hydra/config.yaml", "a/b/hparams.yml"):
        for text in (hydra, "a: 'write !!python/object here'\n", "a: !!int 1\nb: !env X\npython/: 1\n"):
            assert judged(step, name, text.encode()) == (0, []), name
    (step / "sub").mkdir()
    assert judged(step, "sub/config.json", json.dumps({"model_type": "llama"}).encode()) == (0, [])


TARGETS = {
    "x.yaml": "a:\n- _target_: {}\n  _args_: [1]\n",
    "hparams": '{{"a": [1, {{"_target_": "{}"}}]}}',
    "setup.json": '{{"a": [{{"\\u005ftarget_": "{}"}}]}}',
    "z.yml": '? "_tar\\\nget_"\n: {}\n',
    "m_config.json": '{{"_target_": "{}"}}',
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_hydra_would_call_is_told(step: Path, name: str) -> None:
    code, rows = judged(step, name, TARGETS[name].format("os.system").encode())
    assert (code, rows) == (0, [("SAF001", "info", f"this folder contains code: {name} (_target_ os.system)")])
    for quiet in ("torch.optim.AdamW", "${model.kind}", "none"):
        assert judged(step, name, TARGETS[name].format(quiet).encode()) == (0, [])


@pytest.mark.parametrize(
    ("name", "entry", "known", "other"),
    [
        ("modules.json", "[{{'idx': 0, 'type': '{}'}}]", "sentence_transformers.models.Transformer", "net.Pooling"),
        ("adapter_config.json", "{{'auto_mapping': {{'parent_library': '{}'}}}}", "transformers.models.llama", "os"),
    ],
)
def test_modules_that_a_library_imports_by_name_are_told(
    step: Path, name: str, entry: str, known: str, other: str
) -> None:
    for module, is_told in ((known, False), (other, True)):
        (step / "sub").mkdir(exist_ok=True)
        rows = judged(step, f"sub/{name}", entry.format(module).replace("'", '"').encode())[1]
        assert any("contains code" in text and module in text for _, _, text in rows) is is_told
