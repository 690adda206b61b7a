"""What a pass says that it compared with hashes, a seal or a reference."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from support import REAL, run

import ckptlint
from ckptlint import live

GOOD = REAL / "fsdp2_4r"
EMPTY = save({}, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": "{}", "format": "pt"})


def said(*arguments: str | Path) -> str:
    """What a check that passes says behind that, in one line."""
    done = run(*arguments, "--depth", "data")
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.partition("Passed")[2].split())


def sums_of(folder: Path) -> str:
    """What sha256sum prints of the files of a folder."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def test_files_that_match_their_hashes(tmp_path: Path) -> None:
    shutil.copytree(GOOD, tmp_path / "step")
    assert "match" not in said(tmp_path / "step")
    sums, count = sums_of(tmp_path / "step"), len([*(tmp_path / "step").iterdir()])
    (tmp_path / "sums.txt").write_text(sums)
    assert f" {count} files match their hashes. " in said(tmp_path / "step", "--expect-hashes", tmp_path / "sums.txt")
    (tmp_path / "step" / "sha256sums.txt").write_text(sums.splitlines()[-1])
    assert " 1 file matches its hash. " in said(tmp_path / "step")
    (tmp_path / "step" / "sha256sums.txt").write_text(sums.replace(sums[:8], "00000000"))
    done = run(tmp_path / "step", "--depth", "data")
    assert (done.returncode, "PAY012" in done.stdout) == (1, True)


def test_a_format_without_checksums_is_verified_by_a_hash_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    files = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    for key, name in files.items():
        save_file({key: torch.randn(4, 4)}, tmp_path / "a" / name)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "2 tensors were read; this format stores no checksums." in said(tmp_path / "a")
    sums = sums_of(tmp_path / "a")
    (tmp_path / "a" / "sha256sums.txt").write_text(sums)
    text = said(tmp_path / "a")
    assert "3 files match their hashes. Every record was read." in text and "checksum" not in text
    (tmp_path / "a" / "sha256sums.txt").write_text(sums.splitlines()[0])
    assert "1 file matches its hash. 1 tensor was read; this format stores no checksums." in said(tmp_path / "a")


def test_a_signature_lists_hashes_and_who_signed_is_not_verified(tmp_path: Path) -> None:
    signed = shutil.copytree(REAL / "signed", tmp_path / "signed")
    command = "`model_signing verify key --public_key KEY.pem --signature model.sig PATH`"
    assert f" 7 files match their hashes. Who signed was not verified: {command} does that." in said(signed)
    shard, extra = min(signed.glob("*.safetensors")), signed / "shard-00009-model-00001-of-00001.safetensors"
    data = shard.read_bytes()

    def fault(depth: str = "data") -> str:
        [item] = ckptlint.check(signed, depth=depth).diagnostics
        assert item.code in ("PAY012", "SAF002")
        return f"{item.severity.label} {item.title}"

    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert fault().startswith(f"error {shard.name} is not the file that was written: its SHA-256 starts with ")
    shard.write_bytes(data)
    extra.write_bytes(EMPTY)
    assert fault() == f"info model.sig does not list 1 payload file, first {extra.name}"
    extra.unlink()
    shard.unlink()
    assert f"model.sig lists {shard.name}, which is missing" in " ".join(run(signed, "--depth", "data").stdout.split())
    shard.write_bytes(data)
    for text in (
        b"",
        b"{}",
        (signed / "model.sig").read_bytes()[:-9],
        b'{"dsseEnvelope": {"payload": "e30="}}',
        b"[" * 9999,
    ):
        (signed / "model.sig").write_bytes(text)
        assert fault().startswith("error model.sig ")
    (signed / "model.sig").unlink()
    assert "match" not in said(signed)


def test_tensors_that_match_a_seal(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(4, 4) for i in range(3)}
    for name, step in (("with", 3), ("without", None)):
        dcp.save(dict(state), checkpoint_id=tmp_path / name, no_dist=True)
        live.seal(state, tmp_path / name, step=step)
    assert " 3 tensors match the seal of step 3. Every record was read." in said(tmp_path / "with")
    assert " 3 tensors match the seal. Every record was read." in said(tmp_path / "without")
    dcp.save(dict(state) | {"x": torch.ones(2)}, checkpoint_id=tmp_path / "with", no_dist=True)
    assert "match" not in said(tmp_path / "with")  # the seal is about the save before


def test_tensors_that_match_a_reference(tmp_path: Path) -> None:
    text = said(GOOD, "--expect", GOOD)
    assert f" 84 tensors match {GOOD} (name, shape, dtype). " in text, text
    assert "match" not in said(GOOD, "--expect", GOOD, "--ignore", "REF")
    hole = run(REAL / "fsdp2_4r_hole", "--expect", GOOD).stdout
    assert (" match " in hole, "GEO004" in hole) == (False, True)
