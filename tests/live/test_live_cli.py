"""`ckptlint live` as a job of several processes, started by torchrun and by hand."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import REAL, REPOSITORY, run, sweep_only, swept, takes_ctrl_c

import ckptlint
from ckptlint import live
from ckptlint.live.shared_check import shares
from ckptlint.seals.file import SEAL

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KEPT = {key: value for key, value in os.environ.items() if not key.startswith("CKPTLINT_")} | {
    "PYTHONIOENCODING": "utf-8"
}

MAIN = "from ckptlint.__main__ import main\nmain()\n"
EACH_ITS_OWN = f"""
import os, sys
os.chdir(sys.argv.pop(1) + "/" + os.environ["RANK"])
{MAIN}"""
"""ckptlint in a folder of each rank's own: one path, other files."""


def torchrun(world: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "ckptlint", "live", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, env=KEPT, text=True, capture_output=True, timeout=600, check=False)


class Rank:
    """A process as torchrun starts it, but forked: what it would import takes seconds, and this one has it already."""

    def __init__(self, arguments: Sequence[object], code: str, env: dict[str, str]) -> None:
        self.texts: tuple[IO[bytes], IO[bytes]] = (TemporaryFile(), TemporaryFile())  # noqa: SIM115
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=self.run, args=(list(map(str, arguments)), code, env))
        self.process.start()

    def run(self, arguments: list[str], code: str, env: dict[str, str]) -> None:
        signal.alarm(120)  # should the test run be killed, nobody else ends this process
        takes_ctrl_c()
        os.environ.clear()
        os.environ.update(env)
        os.chdir(REPOSITORY)
        for number, file in enumerate(self.texts, 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False), "utf-8") for n in (1, 2))
        sys.argv = ["ckptlint", *arguments]
        torch.set_num_threads(1)
        exec(code, {"__name__": "__main__"})

    def ended(self, seconds: float) -> tuple[int | None, str, str]:
        """Exit code, output and errors."""
        self.process.join(seconds)
        for file in self.texts:
            file.seek(0)
        out, err = (file.read().decode() for file in self.texts)
        assert self.process.exitcode is not None, f"still running after {seconds:.0f} s: {out}{err}"
        return self.process.exitcode, out, err


def started(world: int, arguments: Sequence[object], code: str = MAIN, nodes: int = 1) -> list[Rank]:
    """The ranks as torchrun starts them, on so many nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    local = world // nodes
    ranks = []
    for rank in range(world):
        env = KEPT | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % local)}
        env |= {"LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(Rank(arguments, code, env))
    return ranks


def ended(ranks: list[Rank], seconds: float = 100) -> list[tuple[int | None, str, str]]:
    """Exit code, output and errors of each."""
    until = time.monotonic() + seconds
    try:
        return [rank.ended(max(0, until - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A sealed checkpoint of tensors of several sizes, in two files."""
    made = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.w": torch.randn(40 + 7 * i, 32, generator=made) for i in range(12)}
    folder = tmp_path / "0" / "ckpt"
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
    live.seal(state, folder)
    live.uninstall()  # other tests of this process fork ranks
    return folder


def flip(folder: Path, at: float) -> None:
    path = sorted(folder.glob("*.distcp"))[0]
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def findings(text: str) -> list[tuple[str, str, str]]:
    (part,) = json.loads(text)["checkpoints"]
    return [(item["code"], item["severity"], item.get("fqn") or item.get("file") or "") for item in part["findings"]]


@sweep_only
def test_torchrun_of_three_reports_once_what_one_process_reports(saved: Path) -> None:
    (code, text, errors), *others = ended(started(3, ["live", saved, "--digest", "--format", "json"]))
    assert code == 0, errors[-2000:]
    assert findings(text) == [] and [out for _, out, _ in others] == ["", ""]
    flip(saved, 0.5)
    alone = run("live", saved, "--digest", "--format", "json")
    done = torchrun(3, saved, "--digest", "--format", "json")
    assert done.returncode != 0 and alone.returncode == 1
    assert findings(done.stdout) == findings(alone.stdout)  # one document: the other ranks print nothing
    assert {row[0] for row in findings(done.stdout)} == {"LIV302", "PAY012"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "5"}, "RANK is 5, but WORLD_SIZE is 2: the last one is 1"),
        ({"RANK": "a"}, "RANK is 'a', not a number: let torchrun set it"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2', not a number: let torchrun set it"),
        ({"RANK": None}, "WORLD_SIZE is 2, and RANK is not set: let torchrun start the ranks"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE is 2, and MASTER_ADDR is not set: let torchrun start the ranks"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x', not a number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2: the last one is 1"),
    ],
)
def test_an_environment_of_no_job_is_refused(
    changed: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (there | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    done = run("live", REAL / "fsdp2_4r")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ckptlint: {said}\n")


def test_a_rank_says_whom_it_waits_for_and_all_what_they_shared() -> None:
    one, other = started(
        2, ["live", REAL / "fsdp2_4r", "--digest"], "import ckptlint.live.shared_check as c\nc._SILENT = 0\n" + MAIN
    )
    (code, _, errors), (_, out, others) = ended([one, other])
    assert code == 0 and out == ""
    assert errors.endswith("ckptlint: 2 ranks on 1 node see the same 5 files; each read 230.4 KiB\n")
    assert "rank 0 waits for the other rank at 127.0.0.1:" in errors
    assert "rank 1 waits for rank 0 of 2 at 127.0.0.1:" in others


@pytest.mark.parametrize("name", ["fsdp2_4r_hole", "zstd", *swept("hf_sharded", "safetensors_mode")])
@pytest.mark.parametrize("depth", ["headers", "data"])
def test_real_checkpoints_are_judged_as_by_one_process(name: str, depth: str) -> None:
    arguments = ["live", REAL / name, "--depth", depth, "--format", "json", "-v"]
    codes = ended(started(2, arguments))
    report = ckptlint.check(REAL / name, depth=depth)  # type: ignore[arg-type]
    assert [code for code, _, _ in codes] == [report.exit_code] * 2
    assert codes[1][1:] == ("", "")
    document = json.loads(codes[0][1])["checkpoints"][0]
    expected = [(item.code, item.fqn, item.message) for item in report.diagnostics]
    assert sorted((i["code"], i.get("fqn"), i["message"]) for i in document["findings"]) == sorted(expected, key=str)


def test_every_rank_ends_with_the_code_of_the_report(saved: Path, tmp_path: Path) -> None:
    flip(saved, 0.3)
    answers = ended(started(4, ["live", saved, "--digest"]))
    assert [code for code, _, _ in answers] == [1] * 4
    assert "LIV302" in answers[0][1] and [out for _, out, _ in answers[1:]] == ["", "", ""]
    answers = ended(started(2, ["live", tmp_path / "absent"]))
    assert [code for code, _, _ in answers] == [3, 3] and "does not exist" in " ".join(answers[0][1].split())
    answers = ended(started(2, ["live", saved, "--output", tmp_path / "no" / "folder" / "r.json"]))
    assert [code for code, _, _ in answers] == [4, 4] and "cannot be written" in answers[0][2]
    answers = ended(started(2, ["live", saved, "--select", "NONE999"]))
    assert [code for code, _, _ in answers] == [2, 2]


def test_nodes_that_see_other_files_are_named(saved: Path) -> None:
    root = saved.parent.parent
    for rank in ("1", "2"):
        shutil.copytree(saved, root / rank / "ckpt")
    arguments = [root, "live", "ckpt", "--digest", "--format", "json"]
    assert [code for code, _, _ in ended(started(3, arguments, EACH_ITS_OWN))] == [0, 0, 0]
    cut = sorted((root / "2" / "ckpt").glob("*.distcp"))[1]
    cut.write_bytes(cut.read_bytes()[:-100])
    (root / "1" / "ckpt" / ".metadata").write_bytes((saved / ".metadata").read_bytes() + b"\0")
    answers = ended(started(3, arguments, EACH_ITS_OWN))
    assert [code for code, _, _ in answers] == [1, 1, 1]
    (part,) = json.loads(answers[0][1])["checkpoints"]
    differing = {item["file"]: item for item in part["findings"] if item["code"] == "LIV301"}
    assert differing.keys() == {".metadata", "the listing"}
    assert differing[".metadata"]["message"] == "rank 1 sees a different .metadata from rank 0"
    assert differing["the listing"]["message"] == "ranks 1-2 see different files from rank 0"


def test_settle_waits_until_all_see_the_same(saved: Path) -> None:
    root = saved.parent.parent
    shutil.copytree(saved, root / "1" / "ckpt")
    late = sorted((root / "1" / "ckpt").glob("*.distcp"))[0]
    late.rename(root / "late")
    code = EACH_ITS_OWN.replace(
        "main()",
        """
import ckptlint.live.shared_check as c
from pathlib import Path
look = c.look
def looked(*arguments):
    seen = look(*arguments)
    Path("../looked" + os.environ["RANK"]).touch()
    return seen
c.look = looked
main()""",
    )
    ranks = started(2, [root, "live", "ckpt", "--settle", "60", "--digest"], code)
    until = time.monotonic() + 60
    while not all((root / f"looked{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.05)
    (root / "late").rename(late)
    assert [code for code, _, _ in ended(ranks)] == [0, 0]


def test_each_node_reads_all_and_is_compared(saved: Path) -> None:
    root = saved.parent.parent
    for rank in ("1", "2", "3"):
        shutil.copytree(saved, root / rank / "ckpt")
    flip(root / "2" / "ckpt", 0.4)
    flip(root / "3" / "ckpt", 0.4)
    arguments = [root, "live", "ckpt", "--digest", "--every-node", "--format", "json"]
    answers = ended(started(4, arguments, EACH_ITS_OWN, nodes=2))
    assert [code for code, _, _ in answers] == [1] * 4
    rows = findings(answers[0][1])
    assert {"LIV301", "PAY012"} <= {row[0] for row in rows}
    (message,) = [
        item["message"] for item in json.loads(answers[0][1])["checkpoints"][0]["findings"] if item["code"] == "LIV301"
    ]
    assert message in (
        "in 1 record rank 2 read different bytes from the first node",
        "in 1 record rank 3 read different bytes from the first node",
    )


def test_a_rank_that_cannot_read_is_exit_4_everywhere(saved: Path) -> None:
    root = saved.parent.parent
    shutil.copytree(saved, root / "1" / "ckpt")
    code = EACH_ITS_OWN.replace(
        "main()",
        """
import errno
from ckptlint.storage.local import _Checked
whole = _Checked.readinto
def readinto(self, buffer):
    if os.environ["RANK"] == "1" and self._name.endswith(".distcp"):
        from ckptlint.errors import AccessError
        raise AccessError(f"{self._name} cannot be read: Input/output error")
    return whole(self, buffer)
_Checked.readinto = readinto
main()""",
    )
    answers = ended(started(2, [root, "live", "ckpt", "--digest"], code))
    assert [code for code, _, _ in answers] == [4, 4]
    assert "rank 1: " in answers[0][1] + answers[0][2] and "Input/output error" in answers[0][1] + answers[0][2]
    assert answers[1][1] == ""


def test_a_rank_that_dies_ends_the_others_in_time(saved: Path) -> None:
    root = saved.parent.parent
    for rank in ("1", "2"):
        shutil.copytree(saved, root / rank / "ckpt")
    code = EACH_ITS_OWN.replace(
        "main()",
        "import ckptlint.live.shared_check as c\n"
        "if os.environ['RANK'] == '1': c.SharedCheck._read = lambda *_: os._exit(9)\nmain()",
    )
    before = time.monotonic()
    answers = ended(started(3, [root, "live", "ckpt", "--digest"], code))
    assert [code for code, _, _ in answers] == [4, 9, 4]
    assert "a rank was lost" in answers[0][1] + answers[0][2]
    assert time.monotonic() - before < 60


def test_ctrl_c_is_130(saved: Path) -> None:
    slow = "c.look = lambda *_: print('here', flush=True) or time.sleep(60)"
    code = EACH_ITS_OWN.replace("main()", f"import time\nimport ckptlint.live.shared_check as c\n{slow}\nmain()")
    command = [sys.executable, "-c", code, str(saved.parent.parent), "live", "ckpt"]
    env = KEPT | {"RANK": "0", "WORLD_SIZE": "1"}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=takes_ctrl_c
    ) as alone:
        assert alone.stdout is not None and alone.stdout.readline() == "here\n"
        alone.send_signal(signal.SIGINT)
        assert alone.wait(60) == 130


def test_one_process_needs_no_torch(saved: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom ckptlint.__main__ import main\nmain()"
    env = KEPT | {"CKPTLINT_FORMAT": "concise"}
    command = [sys.executable, "-c", code, "live", str(saved), "--digest"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("by_file", [False, True])
def test_every_record_is_read_once_and_bytes_are_shared_out(count: int, by_file: bool) -> None:
    ckpt = ckptlint.load(REAL / "fsdp2_4r")
    parts = shares(ckpt, count, by_file)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(ckpt.records)))
    if by_file:
        files = [set(ckpt.records.file[part].tolist()) for part in parts]
        assert sum(map(len, files)) == len(set().union(*files))
    elif count == 3:
        sizes = [int(ckpt.records.byte_length[part].sum()) for part in parts]
        assert max(sizes) - min(sizes) <= 2 * int(ckpt.records.byte_length.max())


def test_a_seal_is_compared_by_all_ranks_together(saved: Path) -> None:
    document = json.loads((saved / SEAL).read_text())
    document["entries"]["layers.3.w"]["digest"] = "0" * 16
    (saved / SEAL).write_text(json.dumps(document))
    answers = ended(started(3, ["live", saved, "--digest", "--format", "json"]))
    assert findings(answers[0][1]) == [("LIV302", "error", "layers.3.w")]
