"""The command line: what it accepts, what it prints, and which exit code it ends in."""

from __future__ import annotations

import errno
import json
import os
import pickle
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from support import REAL, REPOSITORY, SWEEP, broken_rule, on_terminal, report_on, run, run_forked, run_python, swept

import ckptlint
from ckptlint.commands import main as cli
from ckptlint.commands.shared import progress
from ckptlint.errors import CheckpointError, ConfigError
from ckptlint.lint.causes import load_causes
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.settings.options import CHECK_OPTIONS, GROUPS
from ckptlint.progress import is_listened_to
from ckptlint.rule import Severity
from ckptlint.testing import write_checkpoint

GOOD = str(REAL / "fsdp2_4r")
BAD = str(REAL / "fsdp2_4r_hole")
WARNING = str(REAL / "boundary_mismatch")
UNSAFE = str(REAL / "metadata_malicious")
UNREADABLE = str(REAL / "metadata_truncated")
NOTHING = str(REPOSITORY / "ckptlint")

SCHEMA = json.loads((REPOSITORY / "ckptlint" / "report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("CKPTLINT_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)


def invoke(*arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
    """A command in this process; an error of ckptlint or click stays an exception."""
    return CliRunner().invoke(cli.cli, arguments, input=stdin, env=env)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the entry point, in this process."""
    monkeypatch.setattr(sys, "argv", ["ckptlint", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
    return 0


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> str:
    rules = broken_rule("GEO008")
    monkeypatch.setattr("ckptlint.lint.registry.load_rules", lambda: rules)
    return "GEO008"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint that the operating system does not let be listed."""
    folder = tmp_path / "refused"
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, folder)
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return str(folder)


# ---------------------------------------------------------------- exit codes


EXIT_CODES: list[tuple[int, list[list[str]]]] = [
    (0, [[GOOD], [WARNING, "--fail-on", "error"], [BAD, "--exit-zero"], [BAD, "--fail-on", "never"]]),
    (0, [["--help"], ["--version"], ["explain", "GEO004"], ["rules"]]),
    (1, [[WARNING], [WARNING, "--strict"], [WARNING, "--fail-on", "warning"], [BAD], [UNSAFE], [UNREADABLE]]),
    (1, [[GOOD, BAD], [NOTHING, BAD]]),
    (2, [[GOOD, "--no-such-option"], [GOOD, "--depth", "x"], [BAD, "--select", "NOPE"], ["explain", "NOPE"]]),
    (2, [[], ["check"], [""], ["latest", ""], ["deletable", "", "--keep", "1"]]),
    (3, [[NOTHING], ["/nowhere/at/all"], [GOOD, NOTHING], [BAD, NOTHING, "--exit-zero"]]),
]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(arguments, code) for code, calls in EXIT_CODES for arguments in calls],
    ids=lambda value: " ".join(Path(v).name for v in value) if isinstance(value, list) else None,
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int) -> None:
    if not arguments:
        assert run().returncode == code
    else:
        assert main(monkeypatch, *arguments) == code


def test_the_order_is_2_1_4_3_0(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    assert main(monkeypatch, GOOD, NOTHING, refused, BAD, "--select", "NOPE") == 2
    assert main(monkeypatch, GOOD, NOTHING, refused, BAD) == 1
    assert main(monkeypatch, GOOD, NOTHING, refused, BAD, "--exit-zero") == 4
    assert main(monkeypatch, GOOD, NOTHING, refused) == 4
    assert main(monkeypatch, refused) == 4
    assert main(monkeypatch, GOOD, NOTHING) == 3
    assert main(monkeypatch, GOOD, GOOD) == 0


def test_a_crashed_rule_gives_4_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, crashing: str) -> None:
    assert main(monkeypatch, GOOD) == 4
    report = ckptlint.check(BAD)
    (part,) = report.checkpoints
    assert list(part.failed) == [crashing]
    assert {"GEO004", "LNT002"} <= {item.code for item in report.diagnostics}
    silent = sum(rule.expects or rule.live or rule.depth in ("headers", "data") for rule in load_rules())
    assert len(part.passed) + len(part.not_applicable) == len(load_rules()) - 1 - silent
    crash = next(item for item in report.diagnostics if item.code == "LNT002")
    assert crash.severity == Severity.ERROR
    assert crashing in crash.title
    assert "\x1b" not in crash.title + "".join(crash.finding.detail)
    assert (ckptlint.check(GOOD).exit_code, ckptlint.check(GOOD).verdict) == (4, "incomplete")


def test_a_crashed_rule_beside_an_error_gives_1(monkeypatch: pytest.MonkeyPatch, crashing: str) -> None:
    assert main(monkeypatch, BAD) == 1
    assert main(monkeypatch, BAD, "--exit-zero") == 4
    assert main(monkeypatch, GOOD, NOTHING) == 4
    assert main(monkeypatch, GOOD, "--ignore", crashing) == 0


def test_a_crashed_rule_is_named_in_every_format(crashing: str) -> None:
    result = invoke("check", GOOD)
    assert result.exit_code == 4
    assert f"1 rule did not finish: {crashing}" in result.output
    document = json.loads(invoke("check", GOOD, "--format", "json").output)
    jsonschema.validate(document, SCHEMA)
    assert document["verdict"] == "incomplete"
    assert document["checkpoints"][0]["failed"][0]["code"] == crashing
    assert "LNT002" in invoke("check", GOOD, "--format", "concise").output


# ---------------------------------------------------------------- how it is called


def test_check_is_implied() -> None:
    explicit, implied = invoke("check", BAD), invoke(BAD)
    assert implied.exit_code == explicit.exit_code == 1
    timeless = re.compile(r"\d+\.\d\d s")
    assert timeless.sub("", implied.output) == timeless.sub("", explicit.output)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "concise", BAD],
        [BAD, "--format", "concise"],
        ["--format=concise", BAD],
        ["check", "--format", "concise", BAD],
    ],
)
def test_options_stand_before_or_behind_the_path(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1


def test_a_folder_named_like_a_command_is_reached_with_a_dot(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "rules")
    done = run("./rules", cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0
    assert "1 tensor" in done.stdout


def test_paths_come_from_standard_input_and_none_is_no_pass() -> None:
    result = invoke("-", "--format", "json", stdin=f"{GOOD}\n\n{BAD}\n")
    assert [part["path"] for part in json.loads(result.output)["checkpoints"]] == [GOOD, BAD]
    assert result.exit_code == 1
    both = invoke(WARNING, "-", "--format", "json", stdin=f"{GOOD}\n")
    assert [part["path"] for part in json.loads(both.output)["checkpoints"]] == [WARNING, GOOD]
    assert invoke("-", stdin="").exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chekc", str(GOOD)], "there is no command or path 'chekc', did you mean check?"),
        (["laters", "RUN", "--require", "model"], "did you mean latest?"),
        (["deleteable"], "did you mean deletable?"),
        (["check", "--dept", "files", str(GOOD)], "--depth"),
    ],
    ids=str,
)
def test_a_word_that_is_nearly_a_command_or_an_option(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr


def test_a_path_is_no_command(tmp_path: Path) -> None:
    """What is there is checked whatever its name, and a name that is like no command is a path that is not there."""
    shutil.copytree(GOOD, tmp_path / "chekc")
    assert run("chekc", cwd=tmp_path).returncode == 0
    for name in ("step-1000", "run", "showcase/chec", "./chekc", "llama"):
        done = run(name, cwd=tmp_path / "chekc")
        assert (done.returncode, "did you mean" in done.stderr) == (3, False)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str) -> None:
    assert invoke(flag).output.strip().endswith(ckptlint.__version__)


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["check", "-h"], ["rules", "--help"]])
def test_help(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    listed, real = cli.cli.commands[name], cli.command(name)
    assert listed.get_short_help_str(1000) == real.get_short_help_str(1000)
    assert real.name == name
    whole = " ".join(invoke("--help", env={"COLUMNS": "80"}).output.split())
    assert f"{name} {cli.COMMANDS[name]}" in whole


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_names_values_in_the_words_of_the_field(name: str) -> None:
    assert not re.search(r"\b(INTEGER|FLOAT|TEXT|RANGE|FQN)\b", invoke(name, "--help").output)


def test_options_stand_below_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("check", "watch", "latest", "live"):
        text = invoke(command, "--help").output
        headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        own = [] if command == "check" else ["Options:"]
        assert headings == own + [f"{heading}:" for heading in GROUPS.values()]
        assert max(map(len, text.splitlines())) <= 80
    assert all(f"--{option.name}" in invoke("check", "--help").output for option in CHECK_OPTIONS)
    read = invoke("check", "--help").output.partition("What to read:")[2].partition("\n\n")[0]
    assert re.findall(r"^  (--[a-z-]+)", read, re.MULTILINE) == [
        f"--{option.name}" for option in CHECK_OPTIONS if option.group == "read"
    ]


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_list_of_rules_has_a_row_for_each_that_is_wrapped(width: str) -> None:
    text, _, causes = invoke("rules", env={"COLUMNS": width}).output.partition("Causes, ")
    assert max(map(len, causes.splitlines())) <= int(width)
    assert all(f"{cause.name} {cause.summary}" in " ".join(causes.split()) for cause in load_causes())
    assert all(rule.summary in " ".join(text.split()) for rule in load_rules())
    assert "Causes, " not in invoke("rules", "GEO", env={"COLUMNS": width}).output
    lines = text.splitlines()
    rules = [line for line in lines if re.match(r"  \S", line)]
    assert {line.split()[0] for line in rules} == {rule.code for rule in load_rules()} and len(rules) == len(
        load_rules()
    )
    assert max(map(len, lines)) <= int(width)
    first_live = next(place for place, line in enumerate(lines) if line.startswith("LIV"))
    assert all(line.split()[0].startswith("LIV") for line in lines[first_live:] if line in rules)
    by_code = {line.split()[0]: line for line in rules}
    assert "error, data" in by_code["PAY012"] and "error, --expect" in by_code["REF001"]
    assert "  error  " in by_code["GEO004"]


def test_files_of_one_checkpoint_are_one_check() -> None:
    names = sorted(str(path) for path in Path(GOOD).iterdir())
    document = json.loads(invoke(*names, "--format", "json").output)
    assert [part["path"] for part in document["checkpoints"]] == [GOOD]
    both = json.loads(invoke(GOOD, GOOD, "--format", "json").output)  # asked for twice in so many words
    assert len(both["checkpoints"]) == 2


def test_all_steps_of_a_run(tmp_path: Path) -> None:
    for step, chunks in ((1, ["0:2"]), (2, ["0:4"])):
        write_checkpoint({"tensors": {"w": {"shape": [4], "chunks": chunks}}}, tmp_path / f"step-{step}")
    assert invoke(str(tmp_path)).exit_code == 0
    assert invoke(str(tmp_path), "--all-steps").exit_code == 1


# ---------------------------------------------------------------- choosing rules


@pytest.mark.parametrize(
    ("token", "near"),
    [("GEO04", "GEO00"), ("GE0", "GEO?"), ("coverage-hol", "coverage-hole"), ("chunk_overlap", "chunk-overlap")],
)
@pytest.mark.parametrize("option", ["--select", "--extend-select", "--ignore"])
def test_an_unknown_rule_is_a_usage_error_that_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, token: str, near: str
) -> None:
    assert main(monkeypatch, GOOD, option, token) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"there is no rule {token!r}, did you mean {near}" in said.err


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("geo", "geo is a family: name one of GEO001, GEO002, "),
        ("GE0", "there is no rule 'GE0', did you mean GEO?"),
        ("qqqqqqqq", "`ckptlint rules` lists them"),
    ],
)
def test_what_has_no_page_leads_to_what_has_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str, says: str
) -> None:
    assert main(monkeypatch, "explain", token) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("token", ["SAF", "SAF001", "unsafe-pickle", "LNT002", "saf002"])
def test_safety_rules_cannot_be_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str
) -> None:
    assert main(monkeypatch, UNSAFE, "--ignore", token) == 2
    assert "cannot be ignored" in capsys.readouterr().err


@pytest.mark.parametrize("token", ["SAF001", "SAF", "unsafe-pickle", "LNT002", "ALL"])
@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_the_severity_of_safety_rules_cannot_be_changed(
    monkeypatch: pytest.MonkeyPatch, token: str, level: str
) -> None:
    assert main(monkeypatch, UNSAFE, "--severity", f"{token}={level}") == 2


@pytest.mark.parametrize(
    "options",
    [
        *("--exit-zero", "--fail-on never", "--select GEO004", "--ignore ALL"),
        *("--select GEO --ignore GEO", "--depth metadata", "-qq"),
    ],
)
@pytest.mark.parametrize("path", [UNSAFE, UNREADABLE, str(REAL / "metadata_is_json"), str(REAL / "huge_shape")])
def test_no_option_turns_a_safety_error_into_0(path: str, options: str) -> None:
    assert invoke(path, *options.split()).exit_code == 1


def test_other_rules_can_be_ignored_and_lowered() -> None:
    assert invoke(BAD, "--ignore", "GEO004,GEO005").exit_code == 0
    assert invoke(BAD, "--ignore", "coverage-hole").exit_code == 0
    assert invoke(BAD, "--severity", "GEO004=info").exit_code == 0
    assert invoke(BAD, "--severity", "GEO004=warning", "--strict").exit_code == 1
    assert invoke(WARNING, "--severity", "GEO008=error").exit_code == 1
    assert invoke(BAD, "--select", "PAY").exit_code == 0
    assert invoke(BAD, "--select", "PAY", "--extend-select", "GEO004").exit_code == 1
    assert invoke(BAD, "--select", "geo004").exit_code == 1
    assert invoke(BAD, "--select", "GEO", "--ignore", "GEO004").exit_code == 0


@pytest.mark.parametrize("token", ["PAY003", "missing-file"])
def test_a_rule_that_needs_more_depth_is_a_usage_error_when_chosen_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: str
) -> None:
    assert main(monkeypatch, GOOD, "--depth", "metadata", "--select", token) == 2
    assert "needs --depth files" in capsys.readouterr().err
    assert main(monkeypatch, GOOD, "--depth", "metadata", "--select", "PAY") == 0


def test_rules_that_need_more_depth_are_listed_as_not_run() -> None:
    document = json.loads(invoke(GOOD, "--depth", "metadata", "--format", "json").output)
    reasons = {row["code"]: row["reason"] for row in document["checkpoints"][0]["not_run"]}
    assert reasons["PAY003"] == "needs --depth files"
    needy = {code for code, reason in reasons.items() if reason.startswith("needs ")}
    assert needy == {r.code for r in load_rules() if r.depth != "metadata" or r.expects or r.live}


@pytest.mark.parametrize(
    "options",
    [
        *("--strict --exit-zero", "--depth deep", "--format pdf", "--max-per-rule -1", "--color red"),
        *(f"--severity {level}" for level in ("GEO004", "GEO004=bad", "NOPE=info", "=info")),
    ],
)
def test_senseless_options_are_usage_errors(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    assert main(monkeypatch, GOOD, *options.split()) == 2


# ---------------------------------------------------------------- output


@pytest.mark.parametrize(
    "paths",
    [[GOOD], [BAD], [WARNING], [UNSAFE], [UNREADABLE], [NOTHING], [GOOD, BAD, NOTHING], [str(REAL / "huge_shape")]],
    ids=lambda paths: " ".join(Path(p).name for p in paths),
)
def test_json_follows_its_schema(paths: list[str]) -> None:
    result = invoke(*paths, "--format", "json")
    document = json.loads(result.output)
    VALIDATOR.check_schema(SCHEMA)
    VALIDATOR.validate(document)
    assert document["verdict"] == {0: "pass", 1: "fail", 3: "incomplete"}[result.exit_code]
    assert len(document["checkpoints"]) + len(document["not_found"]) == len(paths)


NAMES = sorted(path.name for path in REAL.iterdir() if path.is_dir())[::4]


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", [*NAMES[::3], *swept(*NAMES[1::3], *NAMES[2::3])])
def test_json_of_real_checkpoints_follows_its_schema(name: str) -> None:
    VALIDATOR.validate(json.loads(invoke(str(REAL / name), "--format", "json", "--depth", "files").output))


def test_json_is_not_cut_by_max_per_rule() -> None:
    document = json.loads(invoke(BAD, "--format", "json", "--max-per-rule", "1").output)
    findings = [f for part in document["checkpoints"] for f in part["findings"] if f["code"] == "GEO004"]
    assert len(findings) == 2
    assert findings[0]["region"] == {"offsets": [6, 0], "sizes": [3, 12]}
    assert findings[0]["mesh"] == {"dim 0": [2]}


def test_text_is_cut_by_max_per_rule(tmp_path: Path) -> None:
    tensors = {
        "alpha": {"shape": [4], "chunks": ["0:2"]},
        "beta": {"shape": [9, 2], "chunks": ["0:3, :", "6:9, :"]},
        "gamma": {"shape": [8, 8], "chunks": ["0:4, 0:4", "0:4, 4:8", "4:8, 0:4"]},
        "delta": {"shape": [100], "chunks": ["90:100"]},
    }
    write_checkpoint({"tensors": tensors}, tmp_path)
    for count in (1, 2):
        result = invoke(str(tmp_path), "--max-per-rule", str(count))
        assert result.output.count("error[GEO004]") == count
        assert "more group" in result.output
    assert invoke(str(tmp_path), "--max-per-rule", "0").output.count("error[GEO004]") == 4


@pytest.mark.parametrize(
    ("value", "name", "check"),
    [
        ("report.json", "report.json", lambda text: json.loads(text)["verdict"] == "fail"),
        ("report.txt", "report.txt", lambda text: "error[GEO004]" in text),
        ("json=report", "report", lambda text: json.loads(text)["verdict"] == "fail"),
        ("concise=report.out", "report.out", lambda text: text.count("GEO004") == 1),
        ("full=report.json", "report.json", lambda text: "error[GEO004]" in text),
        ("a=b.json", "a=b.json", lambda text: json.loads(text)["verdict"] == "fail"),
    ],
)
def test_output_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, name: str, check: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(BAD, "--output", value, "--format", "concise")
    assert result.exit_code == 1
    assert "GEO004" in result.output
    assert check((tmp_path / name).read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_several_output_files_are_without_colour(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.txt"]
    invoke(BAD, "--output", str(files[0]), "--output", str(files[1]), "--color", "always", "-qq")
    assert all(file.exists() for file in files)
    assert all("\x1b" not in file.read_text(encoding="utf-8") for file in files)


def test_an_output_of_unknown_format_is_a_usage_error_before_anything_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(monkeypatch, GOOD, "--output", str(tmp_path / "report.docx")) == 2
    assert capsys.readouterr().out == ""


def test_an_output_that_cannot_be_written_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "report.json").mkdir()
    assert main(monkeypatch, GOOD, "--output", str(tmp_path / "report.json")) == 4
    assert "cannot be written" in capsys.readouterr().err


def test_an_output_that_is_no_plain_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        outputs = [f"--output={name}" for name in (tmp_path / "report.json", f"json={tmp_path / 'pipe'}")]
        assert run(GOOD, *outputs, own_process=True).returncode == 0
        piped, _ = reader.communicate(timeout=600)
    assert (tmp_path / "pipe").is_fifo()
    assert json.loads(piped)["summary"] == json.loads((tmp_path / "report.json").read_text())["summary"]
    assert '"schema"' in run(GOOD, "--quiet", "--output", "json=/dev/stdout", own_process=True).stdout


@pytest.fixture
def full() -> Iterator[IO[str]]:
    """A file on a disk that is full."""
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as file:  # noqa: PTH123  a device
        yield file


def test_a_full_disk_below_an_output_is_no_pass(full: IO[str], tmp_path: Path) -> None:
    done = run(GOOD, "--output", "json=/dev/full")
    assert (done.returncode, os.strerror(errno.ENOSPC) in done.stderr) == (4, True)
    assert Path("/dev/full").is_char_device()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", rename)
    assert main(monkeypatch, GOOD, "--output", str(tmp_path / "report.json")) == 4
    assert list(tmp_path.iterdir()) == []


WRITERS = {
    "check": ("check", GOOD, "--output", "{}"),
    "manifest": ("manifest", GOOD, "--output", "{}"),
    "diff": ("diff", GOOD, GOOD, "--values", "--html", "{}"),
    "plan": ("plan", GOOD, "--to", "dp=2", "--html", "{}"),
}


@pytest.mark.parametrize("command", WRITERS)
def test_no_output_is_written_through_a_link(command: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for name in ("report.html", ".report.html.part", "leads-nowhere.html"):
        (tmp_path / name).symlink_to("nowhere" if "nowhere" in name else "kept")
    before = sorted(tmp_path.iterdir())
    for name in ("report.html", "leads-nowhere.html"):
        target = str(tmp_path / name)
        done = run(*(argument.format(target) for argument in WRITERS[command]))
        said = f"ckptlint: {target} is a link, and ckptlint writes through none: name the file itself\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
        assert ((tmp_path / "kept").read_text(), sorted(tmp_path.iterdir())) == ("kept", before)
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "report.html").chmod(0o600)
    assert run(*(argument.format(tmp_path / "report.html") for argument in WRITERS[command])).returncode == 0
    assert ((tmp_path / "kept").read_text(), sorted(tmp_path.iterdir())) == ("kept", before)
    assert len((tmp_path / "report.html").read_text()) > 100
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("command", [*WRITERS, "watch"])
def test_a_folder_that_is_not_there_is_named_before_anything_is_read(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = WRITERS.get(command, ("watch", str(tmp_path), "--once", "--output", "{}"))
    for name, what in (("no", "does not exist: make the folder first"), ("file", "is no folder")):
        target = tmp_path / name / "report.html"
        # what is to be read is not there either: whoever read it first would say so
        done = run(*(argument.format(target).replace(GOOD, f"{tmp_path}/nothing") for argument in writer))
        said = f"ckptlint: {target} cannot be written: {target.parent} {what}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("command", WRITERS)
def test_no_output_is_written_behind_a_link_of_a_checkpoint(command: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    shutil.copytree(GOOD, tmp_path / "reports" / "step-1")
    step = tmp_path / "disk" / "step-1"
    (tmp_path / "disk").symlink_to("reports")  # of the user
    (step / "there").symlink_to(tmp_path / "kept")
    (step / "here").mkdir()

    def written(place: Path) -> Any:
        return run(*(argument.format(place).replace(GOOD, str(step)) for argument in WRITERS[command]))

    for folder in (step / "there", step / "here" / ".." / "there", tmp_path / "reports" / "step-1" / "there"):
        done = written(folder / "report.html")
        said = f"{folder}/report.html lies behind {folder}, a link in a checkpoint: name a folder that is no link"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ckptlint: {said}\n")
        assert [*(tmp_path / "kept").iterdir()] == []
    for folder in (step / "here", tmp_path / "disk"):
        assert written(folder / "report.html").returncode in (0, 4)  # a check does not read what is behind `there`
        assert len((folder / "report.html").read_text()) > 100


def test_a_link_in_the_settings_is_refused_before_the_check(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "report.json").symlink_to("kept")
    (tmp_path / "ckptlint.toml").write_text('output = "report.json"')
    done = run(GOOD, cwd=tmp_path)
    assert (done.returncode, done.stdout, "report.json is a link" in done.stderr) == (2, "", True)
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.skipif(sys.platform == "win32", reason="nobody can remove it there")
def test_a_working_directory_that_somebody_removed_is_named(tmp_path: Path) -> None:
    def work() -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        sys.argv = ["ckptlint", "check", "."]
        cli.main()

    done = run_forked(work, tmp_path)
    said = "ckptlint: the working directory is gone: go to a folder that is there\n"
    assert (done.returncode, done.stdout, done.stderr) == (4, "", said)


@pytest.mark.parametrize(
    "arguments", [[BAD], ["show", GOOD], *swept([GOOD], [GOOD, "--format", "json"], ["rules"], ["-h"])]
)
@pytest.mark.parametrize("unbuffered", ["", *swept("1")])
def test_a_full_disk_below_the_output_is_no_verdict(full: IO[str], arguments: list[str], unbuffered: str) -> None:
    env = {"PYTHONUNBUFFERED": unbuffered}
    done = run(*arguments, env=env, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    said = f"ckptlint: the output cannot be written: {os.strerror(errno.ENOSPC)}\n"
    assert (done.returncode, done.stderr) == (4, said)
    assert run(*arguments, env=env, capture_output=False, stdout=full, stderr=full).returncode == 4


@pytest.mark.parametrize(("arguments", "code"), [([GOOD], 0), ([BAD], 1), *swept((["nowhere"], 3), (["--version"], 0))])
def test_a_closed_output_leaves_the_exit_code(arguments: list[str], code: int) -> None:
    done = run(*arguments, capture_output=False, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (code, "")


def test_quiet_and_verbose() -> None:
    plain, quiet, silent, loud = (invoke(BAD, *o).output for o in ([], ["-q"], ["-qq"], ["-v"]))
    assert silent == ""
    assert quiet.startswith("cause: rank 2 ") and "\n\nerror[GEO004]" in quiet
    assert "ckptlint explain" in plain
    assert "ckptlint explain" not in quiet
    assert plain.startswith(BAD)
    assert "not run:" in loud
    assert "slowest" in loud
    assert "not run:" not in plain
    assert invoke(GOOD, "-q").output == ""
    assert re.search(r"^Passed: \d+ rules ran in \d+\.\d\d s\.$", invoke(GOOD).output, re.MULTILINE)
    assert [invoke(p, "-qq").exit_code for p in (GOOD, BAD, NOTHING)] == [0, 1, 3]


def test_notes_are_shown_with_verbose_or_beside_something_worse(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path)
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({}))
    assert "SAF004" not in invoke(str(tmp_path)).output
    assert "1 note (-v)" in invoke(str(tmp_path)).output
    assert "info[SAF004]" in invoke(str(tmp_path), "-v").output


def test_a_pass_says_what_was_not_read() -> None:
    assert "Tensor bytes were not read" in invoke(GOOD).output
    assert "--depth files" in invoke(GOOD, "--depth", "metadata").output


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_text_fits_the_terminal(columns: int) -> None:
    for name in ("fsdp2_4r_hole", "overlap_one_row", "boundary_mismatch", "experts_same_offset"):
        lines = invoke(f"fixtures/real/{name}", env={"COLUMNS": str(columns)}).output.splitlines()
        assert len(lines) > 5
        assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


TEXTS = (
    ("check",), ("check", "--depth", "data"), ("show",), ("show", "--ranks"), ("latest",), ("deletable", "--keep", "1"),
)  # fmt: skip


@pytest.mark.sweep
def test_no_text_is_wider_than_the_terminal() -> None:
    """Only one word, such as a path, may be wider, alone on its line; a message on stderr is one line."""
    real = [str(path.relative_to(REPOSITORY)) for path in sorted(REAL.iterdir()) if path.is_dir()]
    few = [f"fixtures/real/{name}" for name in ("fsdp2_4r_hole", "frameworks/energon", "storage_too_short")]
    places = real[::6] if SWEEP else few
    asked = [(*TEXTS[0], place) for place in places]
    asked += [(*command, place) for command in TEXTS[1:] for place in places[:: 3 if SWEEP else 1]]
    asked += [("diff", *pair) for pair in pairwise(places[:: 2 if SWEEP else 1])]
    wide = {
        (arguments, line)
        for arguments in asked
        for line in invoke(*arguments, env={"COLUMNS": "80"}).stdout.splitlines()
        if len(line) > 80 and " " in line.strip().replace("(torch.bfloat16, torch.float32)", "")  # in a key
    }
    assert not wide


# ---------------------------------------------------------------- colour


@pytest.mark.parametrize(
    ("options", "env", "coloured"),
    [
        ([], {}, False),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "always"], {}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
    ],
    ids=str,
)
def test_colour_of_piped_output(options: list[str], env: dict[str, str], coloured: bool) -> None:
    assert ("\x1b[" in run(BAD, *options, env=env).stdout) == coloured


def test_the_concise_format_has_colour_too_and_json_never() -> None:
    assert "\x1b[" in run(BAD, "--format", "concise", "--color", "always").stdout
    assert "\x1b" not in invoke(BAD, "--format", "json", "--color", "always").output


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        *swept(({"NO_COLOR": "1"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)),
    ],
    ids=str,
)
def test_colour_on_a_terminal(env: dict[str, str], coloured: bool) -> None:
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")} | env
    process = subprocess.Popen([sys.executable, "-m", "ckptlint", BAD], stdout=theirs, env=kept, cwd=REPOSITORY)
    os.close(theirs)
    read = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        read += part
    os.close(ours)
    assert process.wait(60) == 1
    assert b"GEO004" in read
    assert (b"\x1b[31;1m" in read) == coloured


def test_ascii_by_option_and_by_encoding() -> None:
    assert "┌" in run(BAD).stdout
    assert run(BAD, "--ascii").stdout.isascii()
    assert run(BAD, env={"TERM": "dumb"}).stdout.isascii()
    assert run(BAD, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}).stdout.isascii()


def test_a_dumb_terminal_gets_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for term, is_shown in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        with progress(off=False):
            assert is_listened_to() == is_shown


def test_one_line_of_progress_for_all_checkpoints_is_gone_at_the_end() -> None:
    code = (
        "import sys,time\n"
        "from ckptlint.commands import shared\n"
        "from ckptlint.lint import run\n"
        "shared._PATIENCE=shared._TICK=0\n"
        "from ckptlint.commands.main import main\n"
        f"sys.argv=['ckptlint',{GOOD!r},{BAD!r},{WARNING!r},'--jobs','1']\n"
        "main()\n"
    )
    shown = on_terminal(code).decode()
    texts = [text.strip() for text in shown.split("\r")]
    assert {*re.findall(r"%  (checkpoint \d of \d)", shown)} == {f"checkpoint {place} of 3" for place in (1, 2, 3)}
    assert any(re.fullmatch(r"67%  checkpoint 2 of 3, 3 of 3 files, \d+ s left", text) for text in texts)
    assert "\n" not in shown and texts[-2:] == ["", ""] and run_python(code).stderr == ""


@pytest.mark.parametrize(
    ("paths", "failed"), [([GOOD, WARNING, BAD], "1"), ([GOOD, UNREADABLE, BAD], "1"), ([GOOD, GOOD, BAD], "none")]
)
def test_ctrl_c_among_several_tells_what_is_finished(
    monkeypatch: pytest.MonkeyPatch, paths: list[str], failed: str
) -> None:
    def stops(ckpt: Any, *rest: Any) -> Any:
        if ckpt.path.endswith("fsdp2_4r_hole"):
            raise KeyboardInterrupt
        return run_rules(ckpt, *rest)

    monkeypatch.setattr("ckptlint.lint.run.run_rules", stops)
    ended = run(*paths)
    assert (ended.returncode, ended.stderr.strip()) == (
        130,
        f"ckptlint: interrupted: 2 of 3 checkpoints checked, {failed} failed",
    )
    assert "not read" in ended.stdout and "interrupted: 2 of 3 checkpoints checked" in ended.stdout
    told = json.loads(run(*paths, "--format", "json").stdout)
    VALIDATOR.validate(told)
    assert (told["verdict"] == "pass", len(told["checkpoints"])) == (False, 2)
    assert told["unreadable"] == ["interrupted: 2 of 3 checkpoints checked"]
    with pytest.raises(KeyboardInterrupt):
        ckptlint.check(*paths)
    ended = run(BAD, *paths)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.strip() == "ckptlint: interrupted: 0 of 4 checkpoints checked"
    assert run(BAD).stderr.strip() == "ckptlint: interrupted: no answer"


def test_after_ctrl_c_no_step_is_advised_that_a_newer_one_may_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 5):
        write_checkpoint({"tensors": {"w": {"shape": [4, 4]}}}, tmp_path / f"step-{step}" / "model")

    def stops(ckpt: Any, *rest: Any) -> Any:
        if "step-2" in ckpt.path:
            raise KeyboardInterrupt
        return run_rules(ckpt, *rest)

    monkeypatch.setattr("ckptlint.lint.run.run_rules", stops)
    newest_first = run(tmp_path, "--all-steps", "--depth", "files").stdout
    assert f"The newest step that passes: {tmp_path}/step-4" in " ".join(newest_first.split())
    assert re.search(r"step-2 +not judged", newest_first) and "step-1 " not in newest_first
    oldest_first = run(*(tmp_path / f"step-{step}" for step in (1, 3, 2)), "--depth", "files").stdout
    assert "newest step that passes: " + str(tmp_path / "step-3") in " ".join(oldest_first.split())
    oldest_first = run(*(tmp_path / f"step-{step}" for step in (1, 2, 3)), "--depth", "files").stdout
    assert "step-1 passes, but step-2 may be a newer good step: no answer." in " ".join(oldest_first.split())


@pytest.mark.parametrize(
    ("command", "so_far"),
    [
        (["latest"], "1 of 4 steps judged, none is recommended"),
        (["latest", "--format", "json"], "1 of 4 steps judged, none is recommended"),
        (["deletable", "--keep", "1"], "1 of 4 steps judged, none may be deleted yet"),
        (["deletable", "--keep", "1", "--format", "json"], "1 of 4 steps judged, none may be deleted yet"),
        (["watch", "--once", "--interval", "0", "-qq"], "2 steps: 2 passed"),
        (["show"], "no answer"),
    ],
)
def test_ctrl_c_leaves_nothing_that_could_be_taken_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], so_far: str
) -> None:
    for step in range(1, 5):
        chunks = {"chunks": ["0:2, :"]} if step == 4 else {}
        for part in ("model", "optim"):
            write_checkpoint({"tensors": {"w": {"shape": [4, 4]} | chunks}}, tmp_path / f"step-{step}" / part)

    def stops(ckpt: Any, *rest: Any) -> Any:
        if "step-3/optim" in ckpt.path:
            raise KeyboardInterrupt
        return run_rules(ckpt, *rest)

    def stops_at_once(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptlint.lint.run.run_rules", stops)
    monkeypatch.setattr("ckptlint.comparing.sides.open_side", stops_at_once)
    ended = run(*command, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"\nckptlint: interrupted: {so_far}\n")


def test_ctrl_c_while_ckptlint_is_still_imported() -> None:
    code = (
        "import sys, types\n"
        "def stopped(name): raise KeyboardInterrupt\n"
        "sys.modules['ckptlint.commands.main'] = unfinished = types.ModuleType('main')\n"
        "unfinished.__getattr__ = stopped\n"
        "from ckptlint.__main__ import main\n"
        "main()\n"
    )
    ended = run_python(code)
    assert (ended.returncode, ended.stderr) == (130, "\nckptlint: interrupted: no answer\n")


# ---------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("name", "value", "arguments", "code"),
    [
        ("CKPTLINT_FAIL_ON", "error", [WARNING], 0),
        ("CKPTLINT_FAIL_ON", "error", [WARNING, "--fail-on", "warning"], 1),
        ("CKPTLINT_FAIL_ON", "error", [WARNING, "--strict"], 1),
        ("CKPTLINT_STRICT", "1", [WARNING, "--fail-on", "error"], 0),
        ("CKPTLINT_EXIT_ZERO", "1", [BAD], 0),
        ("CKPTLINT_IGNORE", "GEO004", [BAD], 0),
        ("CKPTLINT_IGNORE", "GEO004,GEO005", [BAD], 0),
        ("CKPTLINT_SELECT", "PAY", [BAD], 0),
        ("CKPTLINT_SEVERITY", "GEO004=info", [BAD], 0),
        ("CKPTLINT_DEPTH", "metadata", [str(REAL / "distcp_missing")], 0),
        ("CKPTLINT_DEPTH", "metadata", [str(REAL / "distcp_missing"), "--depth", "files"], 1),
        ("CKPTLINT_DEPTH", "nonsense", [GOOD], 2),
        ("CKPTLINT_CHECK_DEPTH", "nonsense", [GOOD], 0),
    ],
)
def test_options_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, arguments: list[str], code: int
) -> None:
    monkeypatch.setenv(name, value)
    assert main(monkeypatch, *arguments) == code


@pytest.mark.parametrize(
    ("name", "value", "shows"),
    [
        ("CKPTLINT_FORMAT", "concise", lambda text: len(text.splitlines()) == 1),
        ("CKPTLINT_ASCII", "1", lambda text: "┌" not in text),
        ("CKPTLINT_COLOR", "always", lambda text: "\x1b[" in text),
        ("CKPTLINT_QUIET", "2", lambda text: text == ""),
        ("CKPTLINT_VERBOSE", "1", lambda text: "not run:" in text),
        ("CKPTLINT_MAX_PER_RULE", "0", lambda text: "GEO004" in text),
    ],
)
def test_output_options_are_read_from_the_environment(name: str, value: str, shows: Any) -> None:
    assert shows(run(BAD, env={name: value}).stdout)


def test_check_in_python_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTLINT_IGNORE", "GEO004")
    monkeypatch.setenv("CKPTLINT_DEPTH", "nonsense")
    assert ckptlint.check(BAD).exit_code == 1


# ---------------------------------------------------------------- pipes


@pytest.mark.parametrize(
    "arguments", [[BAD], ["rules"], *swept([GOOD], [BAD, "--format", "json"], ["explain", "GEO004"])]
)
def test_a_closed_pipe_is_141_and_silent(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(*arguments, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


# ---------------------------------------------------------------- rules and explain


def test_the_list_of_rules_in_every_format() -> None:
    rows = json.loads(invoke("rules", "--format", "json").output)
    assert [row["code"] for row in rows] == [rule.code for rule in load_rules()]
    assert all(row["summary"] and row["severity"] in ("error", "warning", "info") for row in rows)
    for format_ in ("table", "markdown"):
        output = invoke("rules", "--format", format_).output
        assert all(rule.code in output and rule.name in output for rule in load_rules())
    lines = invoke("rules", "--format", "markdown").output.splitlines()
    assert all(line.startswith("|") and line.endswith("|") for line in lines if line)


@pytest.mark.parametrize("token", ["GEO004", "geo004", "coverage-hole", "Coverage-Hole"])
def test_explain_by_code_and_by_name(token: str) -> None:
    result = invoke("explain", token)
    assert result.exit_code == 0
    assert result.output.startswith("GEO004 coverage-hole\n")
    for heading in ("What it checks:", "Why it matters:", "Usual causes:", "How to fix:"):
        assert heading in result.output


# ---------------------------------------------------------------- in Python


def test_check_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for path in (GOOD, BAD, UNSAFE, NOTHING):
        report_on(path)
    assert capsys.readouterr() == ("", "")


def test_check_raises_only_for_wrong_arguments() -> None:
    for wrong in ({"depth": "deep"}, {"select": ["NOPE"]}, {"ignore": ["SAF"]}):
        with pytest.raises(ConfigError):
            ckptlint.check(GOOD, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "level", "raises"),
    [
        (GOOD, "warning", False),
        (WARNING, "error", False),
        (WARNING, "warning", True),
        (BAD, "error", True),
        (NOTHING, "error", True),
        (UNSAFE, "error", True),
    ],
)
def test_raise_for_findings(path: str, level: str, raises: bool) -> None:
    report = report_on(path)
    if not raises:
        report.raise_for_findings(level)
        return
    with pytest.raises(CheckpointError):
        report.raise_for_findings(level)


def test_a_crashed_rule_raises_for_findings(crashing: str) -> None:
    with pytest.raises(CheckpointError):
        ckptlint.check(GOOD).raise_for_findings()


# ---------------------------------------------------------------- what is imported

HEAVY = ("torch", "numpy", "networkx", "tabulate", "importlib.metadata")


def imported(*arguments: str) -> set[str]:
    """Which heavy modules a command imports."""
    program = (
        "import sys\n"
        "sys.argv = ['ckptlint', *sys.argv[1:]]\n"
        "from ckptlint.commands.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('imported', *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    done = run_python(program, *arguments)
    last = done.stderr.splitlines()[-1].split()
    assert last[0] == "imported", done.stderr
    return set(last[1:])


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        *((arguments, {*HEAVY}) for arguments in (["--version"], ["--help"], ["check", "--help"])),
        ([GOOD], {"torch", "networkx", "tabulate"}),
        ([BAD], {"torch", "tabulate"}),
        *swept(
            ([BAD, "--format", "json"], {"torch"}),
            (["explain", "GEO004"], {"torch", "networkx"}),
            (["rules"], {"torch", "networkx"}),
        ),
    ],
    ids=["version", "help", "help of check", "pass", "full", "json", "explain", "rules"],
)
def test_commands_import_no_more_than_they_need(arguments: list[str], absent: set[str]) -> None:
    assert imported(*arguments) & absent == set()


def test_importing_ckptlint_imports_neither_numpy_nor_torch() -> None:
    done = run_python("import sys, ckptlint; print([n for n in ('numpy', 'torch', 'networkx') if n in sys.modules])")
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("help", "[OPTIONS] COMMAND"),
        ("help latest", "latest [OPTIONS] RUN_DIR"),
        ("version", ", version "),
        ("rules GEO003", "GEO003  chunk-overlap"),
        (f"--depth files latest {REAL / 'frameworks' / 'trackers' / 'older'}", "iter_0000020"),
    ],
)
def test_words_that_people_try(words: str, says: str) -> None:
    ended = run(*words.split())
    assert (ended.returncode, says in ended.stdout) == (0, True)
    assert run("rules", "NOPE").returncode == 2
