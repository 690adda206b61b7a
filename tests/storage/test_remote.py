"""Checkpoints behind URLs: moto's S3 server as a process of its own, and a web server that answers ranges."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from loopback import (
    BUCKET,
    CREDENTIALS,
    PAGE,
    Asked,
    Handler,
    Server,
    client,
    files_of,
    forwarded_to,
    moto,
    serving,
    upload,
)
from support import REAL, codes, copy_step, found, manifest, report_on, run

import ckptlint
from ckptlint.commands.main import cli
from ckptlint.errors import AccessError, ConfigError
from ckptlint.lint.report import Report
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.style import Style
from ckptlint.storage.folder import Folder

for package in ("s3fs", "aiohttp", "moto", "flask"):
    pytest.importorskip(package, reason=f"needs {package}: pip install 'ckptlint[dev]'")

from ckptlint.loaders.discover import find  # noqa: E402
from ckptlint.storage import remote_folder, requests, web_server  # noqa: E402
from ckptlint.storage.locate import folder_at  # noqa: E402

MEGATRON = "megatron_tp2_pp2/iter_0000010"
SAME = [
    "fsdp2_4r", "fsdp2_4r_hole", "fsdp1_local_flat", "hf_sharded", "safetensors_mode", "zstd", "per_rank_metadata",
    "per_rank_metadata_missing_rank", "metadata_truncated", "metadata_malicious", MEGATRON, "megatron_tp2_pp2",
    "megatron_0.19_tp2/iter_0000010", "megatron_0.12_dp2/iter_0000010", "megatron_fsdp_dtensor_tp2_dp2",
]  # fmt: skip


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[int, Any]]:
    """The S3 server's port and a client that writes to it."""
    with moto() as port:
        yield port, client(port)


@pytest.fixture(scope="module")
def front(store: tuple[int, Any]) -> Iterator[Server]:
    """What lies between ckptlint and the S3 server: it counts, and makes trouble when told to."""
    with serving(forwarded_to(store[0])) as server:
        yield server


@pytest.fixture
def s3(front: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """The same, with nothing counted yet and nothing wrong."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": front.url, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    front.asked.clear()
    front.trouble = None
    return front


@pytest.fixture
def put(store: tuple[int, Any], request: pytest.FixtureRequest) -> Callable[..., str]:
    """Uploads a folder; the URL of it, below a prefix of the test's own."""
    prefix = f"{request.node.name.partition('[')[0]}/{time.monotonic_ns()}"

    def upload_to(folder: Path, name: str = "run") -> str:
        upload(store[1], folder, f"{prefix}/{name}")
        return f"s3://{BUCKET}/{prefix}/{name}"

    return upload_to


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Server]:
    """A web server for `fixtures/real`."""
    with serving(files_of(REAL)) as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between attempts."""
    monkeypatch.setattr(requests, "BACKOFF", 0.01)


def forget_connections() -> None:
    """Wait for requests that nobody waits for any more, then drop what they used."""
    requests._pool_of(os.getpid()).shutdown()
    requests._pool_of.cache_clear()
    requests._made.cache_clear()


@pytest.fixture
def afresh() -> Iterator[None]:
    """A test with settings of its own makes its own connections."""
    forget_connections()
    yield
    forget_connections()


def as_json(report: Report) -> dict[str, Any]:
    """The JSON report without the paths."""
    document = json.loads(REPORTERS["json"](report, Style(False, True, 80, 0, 0, False)))
    for part in document["checkpoints"]:
        part.pop("path")
        part.pop("step_files")  # what a store lists beside the tensors is its own
        part["files"].pop("beside")
        for finding in part["findings"]:
            if finding["file"] and finding["file"].startswith(("s3://", "/")):
                finding["file"] = finding["file"].rpartition("/")[2]
    document["not_found"] = len(document["not_found"])
    return document


def payload(names: list[str]) -> list[str]:
    """The payload files among the names."""
    return [name for name in names if name.endswith((".distcp", ".safetensors"))]


# ---------------------------------------------------------------- the same as a local folder


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", SAME)
def test_an_object_store_gives_the_json_of_the_local_folder(s3: Server, put: Callable[..., str], name: str) -> None:
    url = put(REAL / name, name)
    assert as_json(ckptlint.check(url)) == as_json(ckptlint.check(REAL / name))


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("depth", ["headers", "data"])
@pytest.mark.parametrize("name", ["fsdp2_4r", "megatron_tp2_pp2", "bugs/megatron4799e_broken", "hf_sharded", "zstd"])
def test_the_payload_in_an_object_store_is_judged_as_a_local_one(
    s3: Server, put: Callable[..., str], name: str, depth: Any
) -> None:
    url = put(REAL / name, name.rpartition("/")[2])
    assert as_json(ckptlint.check(url, depth=depth)) == as_json(ckptlint.check(REAL / name, depth=depth))


def test_headers_of_records_cost_less_than_the_payload(s3: Server, put: Callable[..., str], tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    tensors = {f"w{number}": torch.full((256, 1024), float(number)) for number in range(4)}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path / "large"), no_dist=True)
    url = put(tmp_path / "large")
    s3.asked.clear()
    assert ckptlint.check(url, depth="headers").exit_code == 0
    fetched = sum(asked.sent for asked in s3.asked if asked.path.endswith(".distcp"))
    size = (tmp_path / "large" / "__0_0.distcp").stat().st_size
    assert 0 < fetched < size / 10


def test_the_command_says_the_same_of_a_url(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "fsdp2_4r_hole")
    local = run(REAL / "fsdp2_4r_hole", "--format", "json")
    done = run(url, "--format", "json")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.replace(url, str(REAL / "fsdp2_4r_hole")) == local.stdout


def test_a_file_stands_for_its_folder(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "edit_base")
    for name in ("/.metadata", "/__1_0.distcp", "/", ""):
        report = ckptlint.check(url + name)
        assert [part.checkpoint.path for part in report.checkpoints] == [url]
        assert report.exit_code == 0


def test_runs_steps_and_trackers_are_found(s3: Server, put: Callable[..., str], store: tuple[int, Any]) -> None:
    url = put(REAL / "megatron_edit_base", "run")
    put(REAL / "megatron_edit_base/iter_0000010", "run/iter_0000005")
    report = ckptlint.check(url)
    assert [part.checkpoint.path for part in report.checkpoints] == [f"{url}/iter_0000010"]
    run_folder = report.checkpoints[0].checkpoint.run
    assert run_folder is not None
    assert run_folder.steps == (5, 10)
    assert len(ckptlint.check(url, all_steps=True).checkpoints) == 2
    key = f"{urlsplit(url).path[1:]}/latest_checkpointed_iteration.txt"
    store[1].put_object(Bucket=BUCKET, Key=key, Body=b"7")
    assert "COM002" in codes(ckptlint.check(url))
    store[1].delete_object(Bucket=BUCKET, Key=f"{urlsplit(url).path[1:]}/iter_0000010/.metadata")
    unfinished = ckptlint.check(url)
    assert "COM001" in codes(unfinished, "error")
    assert unfinished.checkpoints[0].checkpoint.path == f"{url}/iter_0000010"


def test_latest_of_a_run_in_an_object_store(
    s3: Server, put: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = put(REAL / "fsdp2_4r", "run/step-100")[: -len("/step-100")]
    put(REAL / "fsdp2_4r_hole", "run/step-200")
    put(REAL / "metadata_missing", "run/step-300")
    with pytest.raises(SystemExit) as ended:
        cli.main(["latest", "--isolated", url], standalone_mode=False)
    answer = capsys.readouterr()
    assert (ended.value.code, answer.out) == (0, f"{url}/step-100\n")
    assert "step-300 skipped: its save did not finish" in answer.err
    assert "step-200 skipped: error GEO004" in answer.err


@pytest.mark.parametrize("command", [["latest", "-q"], ["deletable", "--keep", "2", "-q"]])
def test_a_search_lists_each_step_of_a_run_a_few_times(
    s3: Server, put: Callable[..., str], tmp_path: Path, command: list[str]
) -> None:
    """Once before it is judged and once after, and where it is the older neighbour of another."""
    steps = range(12)
    for step in steps:
        copy_step(REAL / "fsdp2_4r", tmp_path / f"step-{step}", step)
    url = put(tmp_path)
    s3.asked.clear()
    answer = run(*command, url)
    assert answer.returncode == 0 and answer.stdout.startswith(f"{url}/step-")
    listings = Counter(asked.query.partition("prefix=")[2].partition("&")[0] for asked in s3.asked if not asked.name)
    assert len(listings) <= len(steps) + 1 and max(listings.values()) <= 4, listings


def test_components_are_found(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "edit_base", "step/model")
    put(REAL / "edit_base", "step/optim")
    report = ckptlint.check(url.removesuffix("/model"))
    assert [part.checkpoint.path.rpartition("/")[2] for part in report.checkpoints] == ["model", "optim"]


def test_a_reference_and_a_manifest_may_be_remote(s3: Server, put: Callable[..., str], tmp_path: Path) -> None:
    url, other = put(REAL / "edit_base"), put(REAL / "fsdp2_4r", "other")
    written = run("manifest", url)
    assert (written.returncode, written.stderr) == (0, "")
    assert written.stdout == run("manifest", REAL / "edit_base").stdout
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "good.json").write_text(written.stdout)
    kept = put(tmp_path / "kept", "kept") + "/good.json"
    for reference in (url, kept):
        assert ckptlint.check(REAL / "edit_base", expect=reference).exit_code == 0
        assert "REF001" in codes(ckptlint.check(other, expect=reference))
    with pytest.raises(ConfigError, match="does not exist"):
        ckptlint.check(url, expect=url + "/nothing")


# ---------------------------------------------------------------- only what is needed


@pytest.mark.parametrize("depth", ["metadata", "files"])
def test_no_payload_is_fetched(s3: Server, put: Callable[..., str], depth: Any) -> None:
    url = put(REAL / "fsdp2_4r")
    ckptlint.check(url, depth=depth)
    assert payload(s3.names() + s3.names("HEAD")) == []
    assert s3.names() == [".metadata"]
    assert len(s3.asked) == 2  # and one listing
    listing = sum(request.sent for request in s3.asked if not request.name)
    assert s3.sent - listing == (REAL / "fsdp2_4r" / ".metadata").stat().st_size


def test_of_a_megatron_payload_only_the_records_that_describe_are_fetched(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "megatron_tp2_pp2")
    ckptlint.check(url)
    asked = [request for request in s3.asked if request.method == "GET" and request.name.endswith(".distcp")]
    whole = sum(file.stat().st_size for file in (REAL / MEGATRON).glob("*.distcp"))
    assert all(request.range for request in asked)
    assert sum(request.sent for request in asked) < whole / 20
    assert len(s3.asked) <= 14


def test_a_listing_of_many_pages_is_read_to_its_end(
    s3: Server, put: Callable[..., str], store: tuple[int, Any]
) -> None:
    url = put(REAL / "edit_base")
    for number in range(PAGE):
        store[1].put_object(Bucket=BUCKET, Key=f"{urlsplit(url).path[1:]}/.before-{number:04}", Body=b"")
    assert ckptlint.check(url).exit_code == 0
    assert len([request for request in s3.asked if not request.name]) == 2


def test_files_in_sub_folders_are_looked_at_one_by_one(s3: Server, put: Callable[..., str], tmp_path: Path) -> None:
    from ckptlint.testing import write_checkpoint

    records = [f"epoch_{i}/__{i}_0.distcp 0:1593" for i in range(4)]
    chunks = [f"{i}:{i + 1}" for i in range(4)]
    write_checkpoint({"tensors": {"w": {"shape": [4], "chunks": chunks, "records": records}}}, tmp_path / "c")
    url = put(tmp_path / "c")
    assert as_json(ckptlint.check(url)) == as_json(ckptlint.check(tmp_path / "c"))
    assert len(s3.names("HEAD")) == 4
    (tmp_path / "c" / "epoch_2" / "__2_0.distcp").unlink()
    assert codes(ckptlint.check(put(tmp_path / "c", "lost")), "error") == {"PAY003"}


@pytest.fixture
def folders(s3: Server, web: Server, put: Callable[..., str]) -> list[Folder]:
    """One checkpoint as a local folder, on the store and on the web server."""
    places = (str(REAL / "edit_base"), put(REAL / "edit_base"), f"{web.url}/edit_base")
    return [folder_at(place)[0] for place in places]


def test_all_kinds_of_folders_read_alike(folders: list[Folder]) -> None:
    whole = (REAL / "edit_base" / "__1_0.distcp").read_bytes()
    end = len(whole)
    wanted = [(0, 4), (10, 20), (end - 10, 100), (end, 5), (end + 50, 1), (100, 0), (5, 30), (0, end)]
    for folder in folders:
        assert folder.ranges("__1_0.distcp", wanted) == [whole[o : o + n] for o, n in wanted]
        assert folder.read_range("__1_0.distcp", 7, 9) == whole[7:16]
        assert folder.ranges("__1_0.distcp", []) == []
        assert b"".join(folder.blocks("__1_0.distcp", 100)) == whole
        assert folder.read("__1_0.distcp", end) == whole
        with folder.open("__1_0.distcp") as file:
            assert (file.read(4), file.seek(-22, 2), file.read()) == (whole[:4], end - 22, whole[-22:])
            assert (file.seek(end + 5), file.read(1), file.seek(3), file.read()) == (end + 5, b"", 3, whole[3:])
        with pytest.raises(AccessError):
            folder.read("nothing", 10)
        assert folder.stat("__1_0.distcp") == ("ok", end)
        assert folder.stat("__9_0.distcp") == ("absent", None)
        assert folder.stat("../edit_base/__1_0.distcp") == ("unsafe-path", None)


def test_ranges_that_lie_together_are_one_request(s3: Server, put: Callable[..., str], tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "payload").write_bytes(data)
    folder = folder_at(put(tmp_path / "d"))[0]
    wanted = [(i * 1000, 10) for i in range(100)] + [(900_000 + i * 1000, 10) for i in range(50)]
    assert folder.ranges("payload", wanted) == [data[o : o + n] for o, n in wanted]
    assert len(s3.names()) == 2
    assert s3.sent < 200_000


def test_a_long_range_is_fetched_in_pieces(
    s3: Server, put: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "READ_BLOCK", 100_000)
    data = os.urandom(450_000)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "payload").write_bytes(data)
    folder = folder_at(put(tmp_path / "d"))[0]
    assert folder.read_range("payload", 1, 449_000) == data[1:449_001]
    assert len(s3.names()) == 5


def test_blocks_are_fetched_ahead_with_bounded_memory(s3: Server, put: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "payload").write_bytes(bytes(1_000_000))
    blocks = folder_at(put(tmp_path / "d"))[0].blocks("payload", 10_000)
    next(blocks)
    time.sleep(0.2)
    assert len(s3.names()) <= requests.WORKERS
    assert sum(map(len, blocks)) == 990_000


# ---------------------------------------------------------------- keys that a file system does not have


@pytest.fixture
def edited(put: Callable[..., str], store: tuple[int, Any]) -> tuple[str, Callable[[str, bytes | None], None]]:
    """A healthy checkpoint on the store, and a function that writes or removes one of its keys."""
    url = put(REAL / "edit_base")
    prefix = urlsplit(url).path[1:]

    def edit(name: str, data: bytes | None) -> None:
        if data is None:
            store[1].delete_object(Bucket=BUCKET, Key=f"{prefix}/{name}")
        else:
            store[1].put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=data)

    return url, edit


Edited = tuple[str, Callable[[str, bytes | None], None]]


def test_folder_markers_change_nothing(s3: Server, edited: Edited) -> None:
    url, edit = edited
    edit("", b"")
    edit("tokenizer/", b"")
    edit("_$folder$", b"")
    assert as_json(ckptlint.check(url)) == as_json(ckptlint.check(REAL / "edit_base"))


def test_a_marker_alone_is_an_empty_folder(s3: Server, put: Callable[..., str], store: tuple[int, Any]) -> None:
    url = put(REAL / "edit_base", "run/step-1")
    store[1].put_object(Bucket=BUCKET, Key=f"{urlsplit(url).path[1:].removesuffix('1')}2/", Body=b"")
    report = ckptlint.check(url.removesuffix("/step-1"))
    assert [part.checkpoint.path.rpartition("/")[2] for part in report.checkpoints] == ["step-2"]
    assert codes(report, "error") == {"COM001"}


def test_a_folder_in_place_of_a_payload_file_is_a_finding(s3: Server, edited: Edited) -> None:
    url, edit = edited
    edit("__1_0.distcp", None)
    edit("__1_0.distcp/", b"")
    assert [(c, "not a regular file" in t) for c, _, t in found(ckptlint.check(url), "error")] == [("PAY003", True)]


def test_keys_that_differ_by_case_alone_are_two(s3: Server, edited: Edited) -> None:
    url, edit = edited
    edit("__1_0.DISTCP", b"something else")
    assert as_json(ckptlint.check(url)) == as_json(ckptlint.check(REAL / "edit_base"))
    edit("__1_0.distcp", None)
    report = ckptlint.check(url)
    assert codes(report, "error") == {"PAY003"}
    assert "rename __1_0.DISTCP" in report.diagnostics[0].finding.hint


def test_keys_with_two_slashes_are_not_taken_for_those_with_one(s3: Server, edited: Edited) -> None:
    url, edit = edited
    edit("/__1_0.distcp", (REAL / "edit_base" / "__1_0.distcp").read_bytes())
    assert codes(ckptlint.check(url)) == set()
    edit("__1_0.distcp", None)
    report = ckptlint.check(url)
    assert codes(report, "error") == {"PAY003"}
    assert "`//`" in report.diagnostics[0].finding.hint


def test_a_prefix_with_two_slashes_inside_is_one(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "edit_base", "run//step-1")
    report = report_on(url)
    assert (report.exit_code, report.checkpoints[0].checkpoint.path) == (0, url)
    assert report_on(url.replace("//step-1", "/step-1")).exit_code == 3


def test_a_key_that_begins_with_a_slash_is_no_other_key(s3: Server, store: tuple[int, Any]) -> None:
    upload(store[1], REAL / "edit_base", "slash")
    report = report_on(f"s3://{BUCKET}//slash")
    assert report.exit_code in (3, 4)


# ---------------------------------------------------------------- what goes wrong


def only_sentence(report: Report, code: int = 4) -> str:
    """The one sentence of a run that judged nothing and ended in this code."""
    assert report.exit_code == code
    assert not report.checkpoints
    (sentence,) = (*report.not_found, *report.unreadable)
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert "loopback-secret" not in sentence
    return sentence


def failing(times: int, status: int, code: str = "", only: str = "") -> Callable[[Handler], bool]:
    """The first answers, or those for one file, are an error."""
    count = iter(range(times))

    def trouble(handler: Handler) -> bool:
        if only not in handler.path or next(count, None) is None:
            return False
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>" if code else ""
        handler.reply(status, {"Content-Type": "application/xml"}, body.encode())
        return True

    return trouble


@pytest.mark.parametrize("status", [500, 429])
def test_an_error_that_passes_is_tried_again(s3: Server, put: Callable[..., str], status: int) -> None:
    url = put(REAL / "edit_base")
    s3.trouble = failing(2, status)
    assert ckptlint.check(url).exit_code == 0
    s3.trouble = failing(2, status, only=".metadata")
    assert ckptlint.check(url).exit_code == 0


def test_an_error_that_stays_is_an_incomplete_verdict(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "edit_base")
    s3.trouble = failing(1000, 503, "SlowDown")
    report = ckptlint.check(url)
    assert (report.exit_code, report.verdict) == (4, "incomplete")
    assert "the server answers 503" in only_sentence(report)
    assert len(s3.asked) == requests.ATTEMPTS


@pytest.mark.parametrize(
    ("code", "says"), [("AccessDenied", "403, AccessDenied"), ("ExpiredToken", "Expired"), ("", "403")]
)
@pytest.mark.parametrize("only", ["list-type", ".metadata"])
def test_a_refusal_is_an_incomplete_verdict(
    s3: Server, put: Callable[..., str], code: str, says: str, only: str
) -> None:
    url = put(REAL / "edit_base")
    s3.trouble = failing(1000, 403, code, only)
    report = ckptlint.check(url)
    sentence = only_sentence(report)
    assert "access is denied" in sentence
    assert says in sentence
    assert len([request for request in s3.asked if request.status == 403]) == 1  # it is not tried again


@pytest.mark.usefixtures("afresh")
def test_missing_credentials_are_named(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "there are no usable credentials; set AWS_PROFILE" in only_sentence(ckptlint.check(f"s3://{BUCKET}/run"))


@pytest.mark.parametrize("url", ["s3://no-such-bucket-here/run", f"s3://{BUCKET}/no-such-prefix"])
def test_what_does_not_exist_is_nothing_to_check(s3: Server, url: str) -> None:
    assert f"{url} does not exist" in only_sentence(report_on(url), 3)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("http://127.0.0.1:1", "the server refused the connection"),
        ("http://no-such-host.invalid", "its host name cannot be resolved"),
    ],
)
@pytest.mark.usefixtures("afresh")
def test_a_server_that_cannot_be_reached(s3: Server, monkeypatch: pytest.MonkeyPatch, endpoint: str, says: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert says in only_sentence(ckptlint.check(f"s3://{BUCKET}/run"))
    assert only_sentence(ckptlint.check(f"{endpoint}/run")).startswith(f"{endpoint}/run cannot be accessed: {says}")


def silent(handler: Handler) -> bool:
    """No answer for longer than anyone waits."""
    time.sleep(10)
    handler.close_connection = True
    return True


@pytest.mark.usefixtures("afresh")
def test_a_silent_server_is_given_up(s3: Server, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = put(REAL / "edit_base")
    monkeypatch.setattr(requests, "ATTEMPTS", 2)
    monkeypatch.setattr(requests, "READ_SECONDS", 0.3)
    s3.trouble = silent
    assert "did not answer within" in only_sentence(ckptlint.check(url))
    assert "did not answer within" in only_sentence(ckptlint.check(f"{s3.url}/run"))


def test_an_object_that_vanishes_after_the_listing(s3: Server, put: Callable[..., str]) -> None:
    url = put(REAL / "edit_base")
    s3.trouble = failing(1000, 404, "NoSuchKey", only=".metadata")
    assert "it is gone" in only_sentence(ckptlint.check(url))


def cut_short(times: int) -> Callable[[Handler], bool]:
    """The body of `.metadata` breaks off some times."""
    count = iter(range(times))

    def trouble(handler: Handler) -> bool:
        if ".metadata" not in handler.path or handler.command != "GET" or next(count, None) is None:
            return False
        status, headers, body = type(handler).answer(handler)
        handler.reply(status, headers, body, cut=100)
        return True

    return trouble


def test_a_body_that_breaks_off_is_fetched_again(s3: Server, put: Callable[..., str], web: Server) -> None:
    for server, url in ((s3, put(REAL / "edit_base")), (web, f"{web.url}/edit_base")):
        server.trouble = cut_short(2)
        assert ckptlint.check(url).exit_code == 0
        server.trouble = cut_short(1000)
        only_sentence(ckptlint.check(url))


def test_an_object_that_shrinks_after_the_listing(s3: Server, put: Callable[..., str]) -> None:
    def trouble(handler: Handler) -> bool:
        if ".metadata" not in handler.path:
            return False
        handler.reply(206, {"Content-Range": "bytes 0-99/100"}, bytes(100))
        return True

    url = put(REAL / "edit_base")
    s3.trouble = trouble
    assert "the answer ends after 100" in only_sentence(ckptlint.check(url))


def test_the_command_prints_one_sentence_and_no_secret(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.trouble = failing(1000, 403, "SignatureDoesNotMatch")
    done = run(f"s3://{BUCKET}/run")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr + done.stdout
    assert "loopback-secret" not in done.stderr + done.stdout
    assert "SignatureDoesNotMatch" in done.stdout
    manifested = run("manifest", f"s3://{BUCKET}/run")
    assert (manifested.returncode, manifested.stderr.count("\n")) == (4, 1)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gopher://host/run", "not a scheme that fsspec knows"),
        ("simplecache::s3://bucket/run", "chains file systems"),
        ("s3://", "names no bucket: write s3://BUCKET/"),
        ("s3:///run/step-1?X-Amz-Signature=abc", "s3:///run/step-1 names no bucket: write s3://BUCKET/run/step-1\n"),
        ("https:///run", "names no host: write https://HOST/run"),
    ],
)
def test_a_url_that_cannot_be_read_is_wrong_use(url: str, says: str) -> None:
    done = run(url)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/run", " s3fs"), ("gs://bucket/run", " gcsfs")])
@pytest.mark.usefixtures("afresh")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    import fsspec

    def missing(protocol: str) -> Any:
        raise ImportError("not installed")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"pip install ") as error:
        ckptlint.check(url)
    assert str(error.value).endswith(package)


def test_any_file_system_of_fsspec_will_do(tmp_path: Path) -> None:
    import fsspec

    shutil.copytree(REAL / "edit_base", tmp_path / "step-1")

    fsspec.filesystem("memory").put(str(REAL / "edit_base") + "/", "/memory-run/step-1/", recursive=True)
    report = ckptlint.check("memory://memory-run")
    assert as_json(report) == as_json(ckptlint.check(tmp_path / "step-1"))
    assert report.checkpoints[0].checkpoint.path == "memory://memory-run/step-1"


def test_a_file_system_without_ranged_reads_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

    fetched: list[tuple[int, int]] = []

    class File(AbstractBufferedFile):  # type: ignore[misc]
        def _fetch_range(self, start: int, end: int) -> bytes:
            fetched.append((start, end))
            return bytes(end - start)

    class Plain(AbstractFileSystem):  # type: ignore[misc]
        protocol = "plain"

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
            return [{"name": "top/run/__0_0.distcp", "type": "file", "size": 10_000_000}]

        def _open(self, path: str, mode: str = "rb", **options: Any) -> File:
            return File(self, path, mode, **options)

    fsspec.register_implementation("plain", Plain, clobber=True)
    folder = folder_at("plain://top/run")[0]
    assert folder.ranges("__0_0.distcp", [(100, 50), (9_000_000, 10)]) == [bytes(50), bytes(10)]
    assert sorted(fetched) == [(100, 150), (9_000_000, 9_000_010)]


def test_a_local_path_needs_no_package() -> None:
    program = "import sys, ckptlint; ckptlint.check(sys.argv[1]); print(*sys.modules)"
    from support import run_python

    done = run_python(program, REAL / "edit_base")
    assert not {"fsspec", "aiohttp", "botocore", "ckptlint.storage.remote"} & set(done.stdout.split())


# ---------------------------------------------------------------- web servers


@pytest.mark.parametrize("name", [name for name in SAME if not name.startswith(("hf_", "per_rank", "metadata_"))])
def test_a_web_server_gives_the_findings_of_the_local_folder(web: Server, name: str) -> None:
    name = name if (REAL / name / ".metadata").exists() else f"{name}/iter_0000010"
    remote_report, local = as_json(ckptlint.check(f"{web.url}/{name}")), as_json(ckptlint.check(REAL / name))
    for document in (remote_report, local):
        for part in document["checkpoints"]:
            part.pop("unseen")
    assert remote_report == local


def test_a_web_server_is_asked_for_names_and_sends_only_metadata(web: Server) -> None:
    report = ckptlint.check(f"{web.url}/fsdp2_4r")
    assert report.exit_code == 0
    assert web.names() == [".metadata", ".metadata"]  # its start, to tell it from other files of that name
    assert web.sent == (REAL / "fsdp2_4r" / ".metadata").stat().st_size + 4096
    looked_at = sorted(name for name in web.names("HEAD") if name.endswith("distcp"))
    assert looked_at == [f"__{rank}_0.distcp" for rank in range(4)]
    assert len(web.asked) == len(web_server.ASKED) + 9
    (sentence,) = report.checkpoints[0].checkpoint.not_looked_at
    assert "does not list" in sentence
    text = REPORTERS["full"](report, Style(False, True, 100, 0, 0, False))
    assert "web server does not list them" in text


def test_a_page_in_place_of_the_metadata_on_a_web_server_is_named(real_copy: Callable[[str], Path]) -> None:
    folder = real_copy("fsdp2_4r")
    (folder / ".metadata").write_text("<html>not found</html>")
    with serving(files_of(folder)) as server:
        report = ckptlint.check(server.url)
    assert (report.exit_code, codes(report)) == (1, {"SAF002"})


def test_a_lost_payload_file_is_found_on_a_web_server(web: Server) -> None:
    web.trouble = failing(1000, 404, only="__2_0.distcp")
    assert codes(ckptlint.check(f"{web.url}/fsdp2_4r"), "error") == {"PAY003"}


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("only", ["__2_0.distcp", ".metadata", "common.pt"])
def test_a_refusal_of_a_web_server_is_no_lost_file(web: Server, status: int, only: str) -> None:
    web.trouble = failing(1000, status, only=only)
    assert f"access is denied ({status})" in only_sentence(ckptlint.check(f"{web.url}/fsdp2_4r"))


def test_a_size_that_a_web_server_does_not_tell_is_no_finding(web: Server) -> None:
    def trouble(handler: Handler) -> bool:
        if handler.command != "HEAD" or "distcp" not in handler.path:
            return False
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        return True

    web.trouble = trouble
    report = ckptlint.check(f"{web.url}/fsdp2_4r")
    assert (report.exit_code, codes(report)) == (0, set())
    assert any(
        "the size of 4 of 4 payload files" in sentence for sentence in report.checkpoints[0].checkpoint.not_looked_at
    )


def test_a_server_without_head_is_asked_for_a_byte(web: Server) -> None:
    def trouble(handler: Handler) -> bool:
        if handler.command == "HEAD":
            handler.reply(405, {})
        return handler.command == "HEAD"

    web.trouble = trouble
    assert ckptlint.check(f"{web.url}/fsdp2_4r").exit_code == 0
    assert web.sent < (REAL / "fsdp2_4r" / ".metadata").stat().st_size + 4300


def test_a_server_that_answers_for_everything_is_not_believed(web: Server) -> None:
    def trouble(handler: Handler) -> bool:
        handler.reply(200, {"Content-Type": "text/html"}, b"<html>welcome</html>")
        return True

    web.trouble = trouble
    assert "answers for files that do not exist" in only_sentence(ckptlint.check(f"{web.url}/fsdp2_4r"))


def test_a_server_without_ranges_sends_no_whole_payload() -> None:
    with serving(files_of(REAL, ranges=False)) as server:
        assert ckptlint.check(f"{server.url}/fsdp2_4r").exit_code == 0
        folder = find(f"{server.url}/fsdp2_4r")[0].folder
        assert folder.head("__0_0.distcp", 4) == b"PK\x03\x04"
        with pytest.raises(AccessError, match="does not support range requests"):
            folder.read_range("__0_0.distcp", 100, 4)
        server.asked.clear()
        assert codes(ckptlint.check(f"{server.url}/fsdp2_4r_hole", depth="data"), "error") == {"GEO004"}
        of_files = [server.names().count(f"__{rank}_0.distcp") for rank in range(4)]
        assert max(of_files) <= 2 + requests.WORKERS, of_files  # those that were under way, and one as a whole


def test_a_server_without_ranges_sends_a_large_file_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "_MOST_COPIED", 1000)
    with serving(files_of(REAL, ranges=False)) as server:
        said = only_sentence(ckptlint.check(f"{server.url}/fsdp2_4r", depth="data"), 4)
        assert "does not support range requests, and whole files are read up to 1000 B: download the checkpoint" in said


def test_an_archive_is_read_at_depth_data_from_a_server_without_ranges(tmp_path: Path) -> None:
    """Where its entries begin stands at its end, so it is not known before either."""
    torch = pytest.importorskip("torch")
    torch.save({"a.weight": torch.ones(300, 400)}, tmp_path / "model.pt")
    with serving(files_of(tmp_path, ranges=False)) as server:
        said = only_sentence(report_on(f"{server.url}/model.pt"), 4)
        assert "does not support range requests: download the file, or check it with --depth data" in said
        server.asked.clear()
        report = ckptlint.check(f"{server.url}/model.pt", depth="data")
        assert (report.verdict, report.unreadable) == ("pass", ())
        assert server.names().count("model.pt") <= 6


@pytest.mark.parametrize("name", ["exports/ok_llama", "exports/ok_adapter", "torch.pt"])
def test_a_server_that_lists_folders_gives_the_findings_of_the_local_folder(tmp_path: Path, name: str) -> None:
    files = files_of(tmp_path)

    def with_pages(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        return (200, {}, b"<html>") if handler.path.endswith("/") else files(handler)

    torch = pytest.importorskip("torch")
    shutil.copytree(REAL / "exports", tmp_path / "exports")
    torch.save({"a.weight": torch.ones(3, 4)}, tmp_path / "torch.pt")
    with serving(with_pages) as server:
        assert ckptlint.check(f"{server.url}/{name}").verdict == "pass"
        assert "does not exist" in only_sentence(report_on(f"{server.url}/{name}/other.pt"), 3)


def test_a_run_folder_of_a_web_server_is_nothing_to_check(web: Server) -> None:
    assert "name the checkpoint folder itself" in only_sentence(report_on(f"{web.url}/megatron_tp2_pp2"), 3)


@pytest.mark.parametrize("command", [["latest"], ["deletable", "--keep", "1"], ["watch"], ["watch", "-q", "--once"]])
def test_a_web_server_is_not_asked_for_the_steps_of_a_run(web: Server, command: list[str]) -> None:
    answer = run(*command, f"{web.url}/megatron_tp2_pp2/")
    assert (answer.returncode, answer.stdout, web.asked) == (3, "", [])
    how = f"check each by its own URL, as in `ckptlint {web.url}/megatron_tp2_pp2/step-100`"
    assert answer.stderr == f"ckptlint: a web server does not list the steps of {web.url}/megatron_tp2_pp2/: {how}\n"


def test_a_signed_url_is_used_and_never_printed(web: Server, tmp_path: Path) -> None:
    def trouble(handler: Handler) -> bool:
        signed = "X-Amz-Signature=s3cr3t" in handler.path
        if not signed:
            handler.reply(403, {})
        return not signed

    web.trouble = trouble
    url = f"{web.url}/fsdp2_4r_hole?X-Amz-Credential=AKIASECRET&X-Amz-Signature=s3cr3t"
    for arguments in ([url, "-v"], [REAL / "fsdp2_4r", "--expect", url, "--format", "json"]):
        done = run(*arguments)
        assert done.stdout.count("fsdp2_4r_hole") >= 1, done.stderr
        assert "s3cr3t" not in done.stdout + done.stderr
        assert "AKIASECRET" not in done.stdout + done.stderr
    refused = run(url.replace("s3cr3t", "wr0ng"))
    assert refused.returncode == 4
    assert "wr0ng" not in refused.stdout + refused.stderr
    named = run(url.replace("http://", "http://someone:passw0rd@").replace("s3cr3t", "wr0ng"))
    assert "passw0rd" not in named.stdout + named.stderr


def test_odd_names_stay_inside_the_folder_on_a_web_server(web: Server, tmp_path: Path) -> None:
    from ckptlint.testing import write_checkpoint

    records = ["what?x=1#y 0:1593", "b%2e%2e/c 0:1593"]
    write_checkpoint({"tensors": {"w": {"shape": [2], "chunks": ["0:1", "1:2"], "records": records}}}, tmp_path / "odd")
    with serving(files_of(tmp_path)) as server:
        assert ckptlint.check(f"{server.url}/odd").exit_code == 0
        assert {"what?x=1#y", "c"} <= set(server.names("HEAD"))


def test_every_healthy_checkpoint_is_in_the_manifest() -> None:
    runs = {"megatron_tp2_pp2", "megatron_fsdp_dtensor_tp2_dp2"}
    assert set(SAME) - runs <= {row["path"] for row in manifest(REAL)}


# ---------------------------------------------------------------- the files of a step


def test_the_files_of_a_step_are_read_by_ranges_and_few_requests(
    s3: Server, put: Callable[..., str], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    step = tmp_path / "checkpoint-500"
    step.mkdir()
    safetensors.save_file({"w": torch.ones(1_000, 2_000)}, step / "model.safetensors", metadata={"format": "pt"})
    moments = {"exp_avg": torch.rand(1_000, 2_000), "exp_avg_sq": torch.rand(1_000, 2_000)}
    torch.save({"state": {0: moments}, "param_groups": [{"params": [0]}]}, step / "optimizer.pt")
    for rank in range(32):
        torch.save({"cpu": torch.random.get_rng_state()}, step / f"rng_state_{rank}.pth")
    url = put(step, "checkpoint-500")
    s3.asked.clear()
    before = s3.sent
    report = ckptlint.check(url)
    assert found(report) == []
    files = report.checkpoints[0].checkpoint.step_files
    assert [file.name for file in files if file.state != "read"] == []
    assert len(s3.asked) <= 3 * len(files) + 20, len(s3.asked)
    assert s3.sent - before < 2_000_000  # of 24 MB


@pytest.mark.parametrize(
    ("scheme", "needs"),
    [
        ("s3", r"needs s3fs: pip install fsspec s3fs$"),
        ("gs", r"needs gcsfs: pip install fsspec gcsfs$"),
        ("abfs", r"needs adlfs: pip install fsspec adlfs$"),
    ],
)
def test_the_package_that_a_scheme_needs_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, needs: str) -> None:
    import fsspec

    def refuse(_protocol: str) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec, "get_filesystem_class", refuse)
    requests._made.cache_clear()
    with pytest.raises(ConfigError, match=f"{scheme}:// {needs}"):
        requests.filesystem(scheme)


# ---------------------------------------------------------------- slow servers, and servers that send zeros


def waiting(seconds: float, only: str = "") -> Callable[[Handler], bool]:
    """Each answer comes after a while."""

    def trouble(handler: Handler) -> bool:
        if not only or handler.path.endswith(only):
            time.sleep(seconds)
        return False

    return trouble


def dripping(handler: Handler) -> bool:
    """A body that comes byte by byte, each in time."""
    if handler.command != "GET":
        return False
    handler.send_response(206)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    with suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b"\x80")
            time.sleep(0.1)
    handler.close_connection = True
    return True


@pytest.mark.usefixtures("afresh")
def test_a_server_that_drips_is_given_up(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "READ_SECONDS", 0.5)
    web.trouble = dripping
    assert "did not answer within" in only_sentence(ckptlint.check(f"{web.url}/edit_base"))


def without_end(start: bytes, piece: bytes) -> Callable[[Handler], bool]:
    """An answer that goes on for as long as somebody reads it, at most 100 MB of it."""

    def trouble(handler: Handler) -> bool:
        handler.server_state.asked.append(Asked(handler.command, handler.path, "", "", 0, 0))
        handler.close_connection = True
        with suppress(OSError):
            handler.wfile.write(start)
            for _ in range(100 * 2**20 // len(piece)):
                handler.wfile.write(piece)
        return True

    return trouble


def in_chunks(handler: Handler) -> bool:
    """A body whose last chunk never comes."""
    start = b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n"
    return handler.command == "GET" and without_end(start, b"10000\r\n" + b"\x80\2NN" * 2**14 + b"\r\n")(handler)


def of_ten_terabytes(handler: Handler) -> bool:
    """A file of that size where one is asked for."""
    if not handler.path.endswith("/.metadata"):
        return False
    handler.reply(200 if handler.command == "HEAD" else 206, {"Content-Length": str(10**13)}, b"\x80")
    return True


def sent_round(handler: Handler) -> bool:
    """A redirect to the next name, for ever."""
    handler.reply(302, {"Location": f"/{len(handler.server_state.asked)}"})
    return True


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("trouble", "says"),
    {
        "headers": (without_end(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 2**12), "answer is not HTTP"),
        "one header": (without_end(b"HTTP/1.1 200 OK\r\na: ", b"b" * 2**16), "answer is not HTTP"),
        "10 TB": (of_ten_terabytes, "the server did not answer within 0.5 s"),
        "redirects": (sent_round, "the server redirects again and again"),
    }.values(),
    ids=["headers", "one header", "10 TB", "redirects"],
)
def test_an_answer_without_an_end_is_given_up(
    web: Server, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[Handler], bool], says: str
) -> None:
    monkeypatch.setattr(requests, "READ_SECONDS", 0.5)
    web.trouble = trouble
    begun = time.monotonic()
    report = ckptlint.check(f"{web.url}/edit_base")
    assert says in only_sentence(report)
    assert time.monotonic() - begun < 10


@pytest.mark.usefixtures("afresh")
def test_a_body_without_an_end_is_read_as_far_as_it_was_asked_for(web: Server) -> None:
    web.trouble = in_chunks
    begun = time.monotonic()
    assert codes(ckptlint.check(f"{web.url}/edit_base")) == {"SAF002"}
    assert time.monotonic() - begun < 10


@pytest.mark.usefixtures("afresh")
def test_patience_with_all_requests_of_a_path_ends(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PATIENCE_SECONDS", 2)
    web.trouble = waiting(1.5)
    assert "the server is too slow: ckptlint waits 2 s beyond the time of the bytes" in only_sentence(
        ckptlint.check(f"{web.url}/edit_base")
    )
    web.trouble = None
    assert ckptlint.check(f"{web.url}/edit_base").exit_code == 0  # the next path is waited for again


def endless(handler: Handler) -> bool:
    """A page of a listing that says that another one follows, each with a name."""
    number = len(handler.server_state.asked)
    text = (
        "<ListBucketResult><IsTruncated>true</IsTruncated><KeyCount>1</KeyCount>"
        f"<NextContinuationToken>{number}</NextContinuationToken>"
        f"<Contents><Key>run/{number}</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    handler.reply(200, {"Content-Type": "application/xml"}, text.encode())
    return True


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [("PAGES", 20, "its listing does not end after 20 pages"), ("PATIENCE_SECONDS", 1, "does not end within 1 s")],
)
def test_a_listing_without_an_end_is_given_up(
    s3: Server, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, says: str
) -> None:
    monkeypatch.setattr(requests, limit, value)
    s3.trouble = endless
    begun = time.monotonic()
    report = ckptlint.check(f"s3://{BUCKET}/run")
    assert report.exit_code == 4 and says in only_sentence(report)
    assert time.monotonic() - begun < 10
    count = len(s3.asked)
    time.sleep(0.2)
    assert len(s3.asked) <= count + 1  # nothing goes on behind it
    assert limit != "PAGES" or count == 21


def sent_on(url: str) -> Callable[[Handler], bool]:
    """Trouble that redirects every request."""

    def redirect(handler: Handler) -> bool:
        handler.reply(302, {"Location": url + handler.path})
        return True

    return redirect


def test_the_host_that_a_server_redirects_to_is_named(web: Server) -> None:
    with serving(files_of(REAL)) as front:
        front.trouble = sent_on(f"http://localhost:{web.port}")
        report = ckptlint.check(f"{front.url}/edit_base")
        assert report.exit_code == 0
        sentence = "who answers for localhost, to which the server redirects"
        assert sentence in report.checkpoints[0].checkpoint.not_looked_at
        web.trouble = failing(1000, 403)
        assert ", redirected to localhost cannot be " in only_sentence(ckptlint.check(f"{front.url}/edit_base"))


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:{port}", "http://[::ffff:127.0.0.1]:{port}", "http://169.254.169.254", "http://10.0.0.1"],
)
def test_no_redirect_of_a_public_host_to_a_private_one_is_followed(
    web: Server, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    are_private = requests._are_private

    async def of_others(host: str) -> list[bool]:
        # the first host has a private address beside its public one
        return [False, True] if host == "localhost" else await are_private(host)

    monkeypatch.setattr(requests, "_are_private", of_others)
    with serving(files_of(REAL)) as front:
        front.trouble = sent_on(target.format(port=web.port))
        report = ckptlint.check(f"http://localhost:{front.port}/edit_base")
    assert report.exit_code == 4 and not web.asked
    assert "a private address: pass it if you trust it" in only_sentence(report)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "192.0.0.192",
        "::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "::10.0.0.1",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "2002:a00:1::",
    ],
)
def test_a_private_address_is_one_in_every_form(address: str) -> None:
    assert requests._is_private(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::", "::ffff:8.8.8.8"]
)
def test_a_public_address_is_none(address: str) -> None:
    assert not requests._is_private(address)


def test_a_host_that_was_redirected_to_is_judged_by_the_address_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name had another address when the redirect came."""

    async def connect() -> None:
        async with await requests._client() as session:
            await session.get("http://localhost:9")

    monkeypatch.setattr(requests, "_GUARDED", {"localhost"})
    with pytest.raises(OSError, match="localhost") as raised:
        asyncio.run(connect())
    assert isinstance(raised.value.__cause__, requests.RedirectError)
    assert "a private address: pass it if you trust it" in requests.reason(raised.value, "http")


def test_a_server_that_sends_zeros_is_an_incomplete_verdict() -> None:
    answers = files_of(REAL)

    def zeros(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = answers(handler)
        return status, headers, bytes(len(body)) if handler.headers.get("Range") else body

    with serving(zeros) as server:
        report = ckptlint.check(f"{server.url}/edit_base")
    assert report.exit_code == 4
    assert "the server sends zero bytes only" in only_sentence(report)
