"""`hf://`, read by huggingface_hub from a server on this machine, and folders that it downloaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from loopback import Handler, serving
from support import REAL, REPOSITORY

import ckptlint

pytestmark = pytest.mark.ci
pytest.importorskip("huggingface_hub", reason="transformers of the ci extra brings it")

COMMIT, MODEL = "a" * 40, REAL / "exports" / "ok_llama"


@dataclass
class Hub:
    """The files of one model, org/model, and the SHA-256 that the Hub has of the large ones."""

    files: dict[str, bytes]
    sums: dict[str, str]

    def answer(self, handler: Handler) -> tuple[int, dict[str, str], bytes]:
        """What HfFileSystem asks for: the model, its files, bytes of one."""
        path = unquote(urlsplit(handler.path).path)
        if "/resolve/" in path:
            data, asked = self.files[path.rpartition("/")[2]], handler.headers.get("Range", "")
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1] if asked else data
            return 206 if asked else 200, {"X-Repo-Commit": COMMIT, "ETag": '"b"'}, part
        if not path.startswith("/api/models/org/model"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        listed = [self.entry(name) for name in self.files]
        document = listed if "/tree/" in path else {"id": "org/model", "sha": COMMIT, "siblings": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()

    def entry(self, name: str) -> dict[str, Any]:
        """A file in a listing."""
        size = len(self.files[name])
        lfs = {"lfs": {"oid": self.sums[name], "size": size, "pointerSize": 130}} if name in self.sums else {}
        return {"type": "file", "path": name, "size": size, "oid": "b" * 40, **lfs}


def changed(data: bytes) -> bytes:
    """Other bytes, and only the last bit of a number differs."""
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


def checked(path: str, environment: dict[str, str]) -> dict[str, Any]:
    """The JSON report of a process of its own: huggingface_hub reads its settings when it is imported."""
    command = [sys.executable, "-m", "ckptlint", path, "--depth", "data", "--format", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


def test_a_model_on_the_hub_is_compared_with_its_hashes() -> None:
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    hub = Hub(files, {name: sha256(data).hexdigest() for name, data in files.items() if name.endswith(".safetensors")})
    with serving(hub.answer) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
        assert checked("hf://org/model", environment)["verdict"] == "pass"
        hub.files["model.safetensors"] = changed(files["model.safetensors"])
        report = checked("hf://org/model", environment)
        assert checked("hf://org/none", environment)["verdict"] != "pass"
    (finding,) = [item for part in report["checkpoints"] for item in part["findings"] if item["severity"] == "error"]
    assert finding["code"] == "PAY012"
    assert "the Hub says" in finding["message"]


def test_a_downloaded_file_is_compared_with_what_was_downloaded(tmp_path: Path) -> None:
    """Unless somebody has written it since."""
    from huggingface_hub._local_folder import write_download_metadata

    folder = shutil.copytree(MODEL, tmp_path / "model")
    file = folder / "model.safetensors"
    write_download_metadata(folder, file.name, COMMIT, sha256(file.read_bytes()).hexdigest())
    assert ckptlint.check(folder, depth="data").exit_code == 0
    data, written = file.read_bytes(), file.stat().st_mtime
    file.write_bytes(changed(data))
    os.utime(file, (written, written))
    assert [item.code for item in ckptlint.check(folder, depth="data", fail_on="error").diagnostics] == ["PAY012"]
    os.utime(file, (written + 100_000_000, written + 100_000_000))
    assert ckptlint.check(folder, depth="data").exit_code == 0


def test_the_extension_of_the_hubs_command_line_installs(tmp_path: Path) -> None:
    """`hf extensions install` calls pip and then looks for a script of the repository's name."""
    template = shutil.copytree(REPOSITORY / "docs" / "hf-ckptlint", tmp_path / "hf-ckptlint")
    pip = [
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--prefix",
        str(tmp_path / "venv"),
    ]  # fmt: skip
    subprocess.run([*pip, str(template)], check=True, timeout=600)
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "hf-ckptlint", MODEL], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Passed" in done.stdout) == (0, True), done.stderr
