"""Settings: where they are looked for, what may stand in them, ignores and baselines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from support import REAL, REPOSITORY, broken_rule, run

from ckptlint.commands import main as cli
from ckptlint.commands.main import COMMANDS
from ckptlint.depth import Depth
from ckptlint.errors import ConfigError
from ckptlint.lint.settings.options import CHECK_OPTIONS, FORMATS, CheckOption
from ckptlint.testing import write_checkpoint

GOOD, BAD = str(REAL / "fsdp2_4r"), str(REAL / "fsdp2_4r_hole")
WARNING, UNSAFE = str(REAL / "boundary_mismatch"), str(REAL / "metadata_malicious")
SCHEMA = json.loads((REPOSITORY / "ckptlint" / "report.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, without settings of ckptlint in the environment."""
    for name in [*os.environ]:
        if name.startswith("CKPTLINT_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def invoke(*arguments: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(cli.cli, [*map(str, arguments)], **options)


@pytest.fixture
def usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the entry point says on stderr of such arguments, when it ends in exit 2 and nothing was checked."""

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ckptlint", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams = capsys.readouterr()
        assert (ended.value.code, streams.out) == (2, "")
        return streams.err.removeprefix("ckptlint: ").rstrip("\n")

    return said


def in_force(*arguments: str, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(invoke("config", "--format", "json", *arguments, **options).stdout)
    return document


# ---------------------------------------------------------------- which file


@pytest.mark.parametrize(
    ("name", "text"),
    [("ckptlint.toml", "fail-on = 'error'\n"), ("pyproject.toml", "[tool.ckptlint]\nfail-on = 'error'\n")],
)
def test_the_nearest_file_upward_counts(here: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (here / name).write_text(text)
    deep = here / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert invoke(WARNING).exit_code == 0
    assert in_force()["file"] == f"../../{name}"
    (here / "a" / "pyproject.toml").write_text("[tool.other]\n")  # says nothing of ckptlint: the search goes on
    assert invoke(WARNING).exit_code == 0
    (here / "a" / "ckptlint.toml").write_text("")
    assert invoke(WARNING).exit_code == 1


def test_ckptlint_toml_comes_before_pyproject(here: Path) -> None:
    (here / "ckptlint.toml").write_text("strict = true\n")
    (here / "pyproject.toml").write_text("[tool.ckptlint]\nstrict = false\n")
    assert in_force()["file"] == "ckptlint.toml"


def test_config_and_isolated(here: Path, tmp_path: Path) -> None:
    (here / "ckptlint.toml").write_text("fail-on = 'error'\n")
    (tmp_path / "other.toml").write_text('depth = "metadata"\n')
    assert invoke(WARNING).exit_code == 0
    assert invoke(WARNING, "--isolated").exit_code == 1
    assert invoke(WARNING, "--config", tmp_path / "other.toml").exit_code == 1
    assert invoke(WARNING, env={"CKPTLINT_CONFIG": str(tmp_path / "other.toml")}).exit_code == 1
    assert invoke(WARNING, env={"CKPTLINT_ISOLATED": "1"}).exit_code == 1
    assert invoke(WARNING, "--isolated", "--config", "ckptlint.toml").exit_code == 2


@pytest.mark.parametrize("path", [".", "step-1", "{here}", "file://{here}", "../link"])
def test_a_file_inside_a_checked_path_is_not_read(here: Path, path: str) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, here / "step-1")
    (here.parent / "link").symlink_to(here)
    inner = here / "step-1"
    for folder in (here, inner):
        (folder / "ckptlint.toml").write_text('ignore = ["GEO"]\nfail-on = "never"\nmistake = 1\n')
    os.chdir(inner)
    path = {".": ".", "step-1": "../step-1", "../link": "../../link"}.get(path, path).format(here=here)
    (here.parent / "ckptlint.toml").write_text('depth = "metadata"\n')  # outside: the search goes on to it
    if path in (".", "../step-1"):
        (here / "ckptlint.toml").unlink()
    done = run(path, "--format", "json", cwd=inner)
    assert "ckptlint.toml lies inside a checked path, so ckptlint did not read it for settings" in done.stderr
    assert json.loads(done.stdout)["tool"]["depth"] == "metadata"


def test_paths_from_standard_input_are_checked_paths_too(here: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, here)
    (here / "ckptlint.toml").write_text('ignore = ["GEO"]\n')
    result = invoke("-", input=f"{here}\n")
    assert result.exit_code == 1
    assert "GEO004" in result.output


def test_a_link_inside_a_checked_path_is_not_read_either(here: Path, tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, here)
    (tmp_path / "real.toml").write_text('ignore = ["GEO"]\n')
    (here / "ckptlint.toml").symlink_to(tmp_path / "real.toml")
    assert invoke(".").exit_code == 1


@pytest.mark.parametrize(
    ("step", "beside", "is_taken"),
    [
        ("step-10", {}, False),
        ("0000001000", {}, False),
        ("checkpoint-5/model", {}, False),
        ("last", {"latest_checkpointed_iteration.txt": "10"}, False),
        ("last", {".git/HEAD": "", "__0_0.distcp": ""}, False),
        ("last", {"2024/notes": "", "train.py": ""}, True),
        ("runs/step-10", {".git/HEAD": ""}, True),
    ],
)
def test_settings_that_came_with_the_run_are_not_read(
    here: Path, step: str, beside: dict[str, str], is_taken: bool
) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, here / step)
    for name, text in ({"ckptlint.toml": "exit-zero = true"} | beside).items():
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_text(text)
    above = "/".join(".." for _ in step.split("/")) + "/ckptlint.toml"
    done = run(".", cwd=here / step)
    assert (done.returncode, f"\nSettings: {above}.\n" in done.stdout) == ((0, True) if is_taken else (1, False))
    unread = f"ckptlint: {above} lies in a folder of checkpoints, so ckptlint did not read it; "
    unread += "use --config FILE\n"
    assert done.stderr == ("" if is_taken else unread)
    assert run(".", "--config", above, cwd=here / step).returncode == 0
    assert run(GOOD, cwd=here).stderr == ("" if is_taken else unread.replace(above, "ckptlint.toml"))


HARMFUL = 'exit-zero = true\nplugins = ["harmful"]\n[severity]\nGEO004 = "info"\n'


@pytest.mark.parametrize("place", ["step-10", "step-10/code", "model"])
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "completion"])
def test_no_command_reads_settings_that_came_with_a_checkpoint(here: Path, command: str, place: str) -> None:
    """Whatever is asked from inside of it, about nothing or about another checkpoint."""
    step = here / place.removesuffix("/code")
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, step)
    (here / place).mkdir(exist_ok=True)
    (here / place / "ckptlint.toml").write_text(HARMFUL)
    torn = here.parent / "torn" / "step-1"
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, torn)
    arguments = {
        "diff": [torn, torn], "explain": ["GEO004"], "graph": [torn, "w"], "rules": [], "config": [],
        "watch": [torn.parent, "--once", "--interval", "0"], "live": [torn],
        "latest": [torn.parent], "deletable": [torn.parent, "--keep", "1"],
        "plan": [torn], "show": [torn], "manifest": [torn], "check": [torn],
    }[command]  # fmt: skip
    done = run(command, *arguments, cwd=here / place)
    assert "harmful" not in done.stdout + done.stderr
    assert done.returncode == {"check": 1, "watch": 1, "latest": 1, "deletable": 1, "plan": 1}.get(
        command, done.returncode
    )
    if command not in ("diff", "graph", "manifest", "plan", "show"):  # which have no settings
        assert "ckptlint.toml lies in a folder of checkpoints, so ckptlint did not read it" in done.stderr
        if command in ("rules", "explain", "config", "check"):
            assert "harmful" in run(command, *arguments, "--config", "ckptlint.toml", cwd=here / place).stderr


def test_each_report_names_its_settings_file(here: Path) -> None:
    (here / "ckptlint.toml").write_text("strict = true\n")
    assert invoke(GOOD).output.endswith("\nSettings: ckptlint.toml.\n")
    assert "\nSettings: ckptlint.toml.\n" in invoke(BAD, "--format", "markdown").output
    assert "<dt>settings</dt><dd>ckptlint.toml</dd>" in invoke(BAD, "--format", "html").output
    assert json.loads(invoke(GOOD, "--format", "json").output)["tool"]["settings"] == "ckptlint.toml"
    (sarif,) = json.loads(invoke(GOOD, "--format", "sarif").output)["runs"]
    assert sarif["properties"]["settings"] == "ckptlint.toml"
    assert '<property name="settings" value="ckptlint.toml" />' in invoke(GOOD, "--format", "junit").output
    assert invoke(GOOD, "--format", "github").stdout.endswith("\nSettings: ckptlint.toml.\n")
    assert invoke(GOOD, "--statistics").stdout.endswith("\nSettings: ckptlint.toml.\n")
    for format_ in (name for name, form in FORMATS.items() if not form.names_settings):
        done = invoke(GOOD, "--format", format_)
        assert ("ckptlint.toml" in done.stdout, done.stderr) == (False, "ckptlint: settings from ckptlint.toml\n")
        assert invoke(GOOD, "--format", format_, "-q").stderr == ""
    assert json.loads(invoke(GOOD, "--format", "json", "--isolated").output)["tool"]["settings"] is None


@pytest.mark.parametrize(
    "value", ["../out.json", "/tmp/out.json", "link/out.json", "json=../out", "https://host/out.json"]
)
def test_an_output_of_a_file_stays_below_its_folder(here: Path, value: str) -> None:
    (here / "link").symlink_to("..")
    (here / "ckptlint.toml").write_text(f"output = {value!r}\n")
    result = run(GOOD, cwd=here)
    assert result.returncode == 2
    assert result.stderr == f"ckptlint: ckptlint.toml: output {value!r} must lie below the folder of this file\n"


@pytest.mark.parametrize("path", ["loop", "a\0b", "\udcff"], ids=["a loop of links", "a null byte", "no unicode"])
def test_odd_paths_end_in_a_sentence(here: Path, path: str) -> None:
    (here / "loop").symlink_to("loop")
    (here / "ckptlint.toml").write_text("")
    done = run("-", input=path, cwd=here, errors="surrogateescape")
    assert done.returncode in (3, 4)
    assert "Traceback" not in done.stderr


def test_a_settings_file_that_is_a_loop_of_links_is_exit_2(here: Path, usage_error: Callable[..., str]) -> None:
    (here / "ckptlint.toml").symlink_to("ckptlint.toml")
    assert "ckptlint.toml cannot be read: " in usage_error(GOOD)


def test_a_named_file_inside_a_checked_path_is_refused(here: Path, usage_error: Callable[..., str]) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, here / "step-1")
    (here / "step-1" / "ckptlint.toml").write_text("")
    said = usage_error("step-1", "--config", "step-1/ckptlint.toml")
    assert said == "step-1/ckptlint.toml lies inside a checked path: ckptlint never reads settings from a checkpoint"


# ---------------------------------------------------------------- what may stand in it


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dept = 'files'", "there is no setting 'dept', did you mean depth?"),
        ("fail_on = 'error'", "there is no setting 'fail_on', did you mean fail-on?"),
        ("per-key-ignore = {}", "there is no setting 'per-key-ignore', did you mean per-key-ignores?"),
        ("zzz = 1", "there is no setting 'zzz'; `ckptlint config` lists them"),
        ("config = 'x'", "config cannot be set in a file"),
        ("isolated = true", "isolated cannot be set in a file"),
        ("depth = 3", "depth takes a string, not 3"),
        ("depth = 'deep'", "depth: 'deep' is not one of"),
        ("strict = 'yes'", "strict takes true or false, not 'yes'"),
        ("strict = 1", "strict takes true or false, not 1"),
        ("max-per-rule = true", "max-per-rule takes a whole number, not True"),
        ("max-per-rule = -1", "max-per-rule: -1 is not in the range"),
        ("verbose = 2", "verbose takes true or false, not 2"),
        ("quiet = true", "quiet takes a whole number, not True"),
        ("select = 4", "select takes a list of strings, not 4"),
        ("select = [4]", "select takes a list of strings, not [4]"),
        ("plugins = 'acme'", "plugins takes a list of strings, not 'acme'"),
        ("severity = 'info'", "severity takes a table of levels"),
        ("severity = { PAY006 = 1 }", "severity takes a table of levels"),
        ("per-key-ignores = ['x']", "per-key-ignores takes a table of tables"),
        ("rules = { PAY006 = 1 }", "rules takes a table of tables"),
        ("x =", "is not TOML"),
    ],
)
def test_what_may_not_stand_in_a_file_is_one_sentence(
    here: Path, usage_error: Callable[..., str], text: str, sentence: str
) -> None:
    (here / "ckptlint.toml").write_text(text + "\n")
    said = usage_error(GOOD)
    assert said.startswith("ckptlint.toml")
    assert sentence in said
    assert "\n" not in said
    (here / "ckptlint.toml").unlink()
    (here / "pyproject.toml").write_text(text if text == "x =" else f"[tool.ckptlint]\n{text}\n")
    assert usage_error(GOOD).startswith("pyproject.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[tool]\nckptlint = 3\n", "pyproject.toml: tool.ckptlint must be a table"),
        ("[tool.other]\n", "pyproject.toml has no table [tool.ckptlint]"),
        ("\xff", "pyproject.toml is not TOML"),
        ("x = " + "[" * 5000, "pyproject.toml is not TOML"),
        (None, "pyproject.toml cannot be read: No such file or directory"),
    ],
)
def test_a_named_file_without_settings_is_refused(
    here: Path, usage_error: Callable[..., str], text: str | None, sentence: str
) -> None:
    if text is not None:
        (here / "pyproject.toml").write_bytes(text.encode("latin-1"))
    assert sentence in usage_error(GOOD, "--config", "pyproject.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("select = ['NOPE']", "there is no rule 'NOPE'"),
        ("ignore = ['SAF001']", "SAF001 cannot be ignored"),
        ("severity = { SAF = 'info' }", "the severity of SAF001 cannot be changed: unsafe input must never pass"),
        ("severity = { GEO004 = 'bad' }", "'bad' is not a severity"),
        ("rules.NOPE.x = 1", "ckptlint.toml, table rules: there is no rule 'NOPE'"),
        ("rules.PAY006.min-byte = 1", "PAY006 unreferenced-bytes has no option 'min-byte', did you mean min-bytes?"),
        ("rules.GEO004.x = 1", "GEO004 coverage-hole has no option 'x'; it has none"),
        ("rules.PAY006.min-bytes = '1'", "min-bytes of PAY006 unreferenced-bytes takes int, not '1'"),
        ("rules.PAY006.min-bytes = true", "min-bytes of PAY006 unreferenced-bytes takes int, not True"),
        ("per-key-ignores = { x = { rules = ['SAF001'], reason = 'r' } }", "SAF001 cannot be ignored"),
        ("per-key-ignores = { x = { rules = ['LNT002'], reason = 'r' } }", "LNT002 cannot be ignored"),
        ("per-key-ignores = { x = { rules = ['NOPE'], reason = 'r' } }", "'x': there is no rule 'NOPE'"),
        ("per-key-ignores = { x = { rules = ['GEO'] } }", "'x': why? add reason"),
        ("per-key-ignores = { x = { rules = ['GEO'], reason = ' ' } }", "'x': why? add reason"),
        ("per-key-ignores = { x = { reason = 'r' } }", "'x': which rules?"),
        ("per-key-ignores = { x = { rule = ['GEO'], reason = 'r' } }", "there is no setting 'rule'"),
        ("strict = true\nexit-zero = true", "contradict each other"),
        ("plugins = ['./rules.py']", "is not a plug-in: name an importable package, not a path"),
        ("baseline = 'nowhere.json'", "the baseline nowhere.json cannot be read"),
        ("sample = '0%'\ndepth = 'headers'", "takes a share above 0%"),
    ],
)
def test_what_a_file_may_not_say_about_rules_is_exit_2(
    here: Path, usage_error: Callable[..., str], text: str, sentence: str
) -> None:
    (here / "ckptlint.toml").write_text(text + "\n")
    assert sentence in usage_error(UNSAFE)


def test_the_example_of_the_documentation_is_accepted(here: Path) -> None:
    page = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    (here / "ckptlint.toml").write_text(text.replace('"acme_ckpt_rules"', ""))
    document = in_force()
    assert document["settings"]["depth"] == {"value": "headers", "from": "file"}
    assert document["settings"]["rules.unreferenced-bytes.min-bytes"] == {"value": 4096, "from": "file"}
    assert document["per-key-ignores"][0]["rules"] == ["REF"]


def test_help_does_not_depend_on_settings(here: Path) -> None:
    (here / "ckptlint.toml").write_text("mistake = 1\n")
    assert invoke("check", "--help").exit_code == 0
    assert invoke("--version").exit_code == 0


# ---------------------------------------------------------------- who wins

CASES = {
    "depth": ("'metadata'", "metadata", "files", "headers"),
    "fail-on": ("'info'", "info", "warning", "never"),
    "max-per-rule": ("1", 1, 2, 3),
    "expect": ("'s3://a/b'", "s3://a/b", "s3://a/c", "s3://a/d"),
    "seed": ("1", 1, 2, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_an_option_beats_the_environment_which_beats_the_file(here: Path, name: str) -> None:
    text, in_file, in_environment, in_option = CASES[name]
    assert in_force()["settings"][name]["from"] == "default"
    (here / "ckptlint.toml").write_text(f"{name} = {text}\n")
    assert in_force()["settings"][name] == {"value": in_file, "from": "file"}
    env = {f"CKPTLINT_{name.upper().replace('-', '_')}": str(in_environment)}
    assert in_force(env=env)["settings"][name] == {"value": in_environment, "from": "environment"}
    found = in_force(f"--{name}", str(in_option), env=env)["settings"][name]
    assert found == {"value": in_option, "from": "option"}


def test_flags_and_lists_come_from_a_file(here: Path) -> None:
    (here / "ckptlint.toml").write_text(
        "strict = true\nverbose = true\nquiet = 1\nselect = ['GEO', 'PAY,COM']\nextend-select = 'OPT'\n"
    )
    found = {name: row["value"] for name, row in in_force()["settings"].items() if row["from"] == "file"}
    expected = {"strict": True, "verbose": True, "quiet": 1, "select": ["GEO", "PAY,COM"], "extend-select": ["OPT"]}
    assert found == expected
    codes = json.loads(invoke(GOOD, "--format", "json").output)["tool"]["rules"]
    assert {code[:3] for code in codes} == {"GEO", "PAY", "COM", "OPT", "SAF", "LNT"}


@pytest.mark.parametrize(
    ("text", "options", "env", "code"),
    [
        ("strict = true", [], {}, 1),
        ("strict = true", ["--fail-on", "error"], {}, 0),
        ("strict = true", ["--exit-zero"], {}, 0),
        ("exit-zero = true", ["--strict"], {}, 1),
        ("exit-zero = true", [], {"CKPTLINT_STRICT": "1"}, 1),
        ("fail-on = 'warning'", [], {}, 1),
        ("fail-on = 'warning'", [], {"CKPTLINT_FAIL_ON": "error"}, 0),
        ("fail-on = 'never'", ["--strict"], {}, 1),
        ("", ["--strict", "--fail-on", "error"], {}, 1),
    ],
)
def test_the_level_that_fails_comes_from_the_strongest_source(
    here: Path, text: str, options: list[str], env: dict[str, str], code: int
) -> None:
    (here / "ckptlint.toml").write_text(text + "\n")
    assert invoke(WARNING, *options, env=env).exit_code == code


def test_the_format_of_a_file_and_severities(here: Path) -> None:
    (here / "ckptlint.toml").write_text("format = 'json'\nseverity = { GEO008 = 'error', GEO004 = 'info' }\n")
    assert json.loads(invoke(WARNING).output)["verdict"] == "fail"
    assert json.loads(invoke(BAD).output)["verdict"] == "pass"
    assert invoke(BAD, "--severity", "GEO008=info").exit_code == 1  # the option replaces the table


def test_paths_of_a_file_are_relative_to_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke(BAD, "--output", "base.json")
    invoke("manifest", GOOD, "--output", "good.json")
    (here / "ckptlint.toml").write_text(
        "baseline = 'base.json'\nexpect = 'good.json'\noutput = ['out.json', 'concise=out']\n"
    )
    deep = here / "deep"
    deep.mkdir()
    monkeypatch.chdir(deep)
    assert in_force()["settings"]["output"]["value"] == ["../out.json", "concise=../out"]
    result = invoke(BAD, "--select", "GEO")
    assert result.exit_code == 0, result.output
    assert json.loads((here / "out.json").read_text())["summary"]["baselined"] == 2
    assert (here / "out").exists()


def test_every_long_option_is_a_setting_and_in_the_table() -> None:
    names = {option.name for option in CHECK_OPTIONS}
    assert {"select", "depth", "fail-on", "baseline", "no-ignores", "ascii", "format", "quiet", "verbose"} <= names
    assert names <= set(in_force()["settings"])
    taken = {name.removeprefix("--") for option in cli.command("check").params for name in option.opts if "--" in name}
    assert taken == {option.name for option in CHECK_OPTIONS}
    assert {option.name: option.choices for option in CHECK_OPTIONS}["depth"] == ("auto", *Depth)


@pytest.mark.parametrize("option", [option for option in CHECK_OPTIONS if option.choices or option.minimum is not None])
def test_a_file_is_refused_in_the_words_of_the_command_line(
    here: Path, usage_error: Callable[..., str], option: CheckOption
) -> None:
    value: Any = "'no'" if option.choices else option.minimum - 1 if option.minimum is not None else None
    (here / "ckptlint.toml").write_text(f"{option.name} = {value}\n")
    in_file = usage_error(GOOD).removeprefix(f"ckptlint.toml: {option.name}: ")
    (here / "ckptlint.toml").unlink()
    if not option.counts:  # -q has no value
        said = usage_error(GOOD, f"--{option.name}", str(value).strip("'"))
        assert said.endswith(f": {in_file}")
    assert in_file.endswith(".")


@pytest.mark.parametrize("command", [("watch", "--once"), ("live",)], ids=["watch", "live"])
def test_a_file_for_check_serves_the_commands_that_check(here: Path, command: tuple[str, ...]) -> None:
    (here / "ckptlint.toml").write_text("all-steps = true\n")
    assert "all-steps" not in invoke(*command, "nowhere").output
    (here / "ckptlint.toml").write_text("every-node = true\nonce = true\n")
    assert isinstance(invoke(*command, "nowhere").exception, ConfigError)


# ---------------------------------------------------------------- ckptlint config


def test_config_as_text(here: Path) -> None:
    (here / "ckptlint.toml").write_text(
        "depth = 'headers'\n[per-key-ignores]\n'*.w' = { rules = ['GEO'], reason = 'because' }\n"
        "[rules.PAY006]\nmin-bytes = 9\n"
    )
    lines = [line.split() for line in invoke("config", "--strict").output.splitlines()]
    assert ["depth", '"headers"', "file"] in lines
    assert ["strict", "true", "option"] in lines
    assert ["rules.unreferenced-bytes.min-bytes", "9", "file"] in lines
    assert ["ignored:", "*.w", "GEO:", "because"] in lines
    assert lines[-1] == ["file:", "ckptlint.toml"]


def test_config_shows_the_value_in_force(here: Path) -> None:
    text = run("config", cwd=here).stdout
    assert "null" not in text and '"warning"' in text
    settings = json.loads(run("config", "--format", "json", "--exit-zero", cwd=here).stdout)["settings"]
    assert settings["fail-on"]["value"] == "never" and settings["jobs"]["value"] > 0
    assert settings["sample"]["value"] is None


def test_config_refuses_what_check_refuses(here: Path, usage_error: Callable[..., str]) -> None:
    assert "No such option" in usage_error("config", "--no-such-option")
    (here / "ckptlint.toml").write_text("mistake = 1\n")
    assert "there is no setting" in usage_error("config")


# ---------------------------------------------------------------- ignores

IGNORE = "[per-key-ignores]\n'*.w1.weight' = { rules = ['coverage-hole', 'GEO005'], reason = 'rank 2 \"was\" lost' }\n"


def test_ignored_findings_do_not_count_and_are_kept(here: Path) -> None:
    (here / "ckptlint.toml").write_text(IGNORE)
    result = invoke(BAD)
    assert result.exit_code == 0
    assert "GEO004" not in result.output
    assert "(2 findings ignored by the settings)" in " ".join(result.output.split())
    assert 'rank 2 "was" lost' in invoke(BAD, "-v").output
    assert invoke(BAD, "--format", "concise").stdout == ""
    document = json.loads(invoke(BAD, "--format", "json").output)
    jsonschema.validate(document, SCHEMA)
    assert document["verdict"] == "pass"
    assert document["summary"]["error"] == 0
    assert document["summary"]["ignored"] == 2
    findings = document["checkpoints"][0]["findings"]
    assert [item["ignored"] for item in findings] == [{"by": "per-key-ignores", "reason": 'rank 2 "was" lost'}] * 2
    assert len({item["group"] for item in findings}) == 1


def test_no_ignores_shows_them(here: Path) -> None:
    (here / "ckptlint.toml").write_text(IGNORE)
    result = invoke(BAD, "--no-ignores")
    assert result.exit_code == 1
    assert "error[GEO004]" in result.output
    assert "ignored" not in result.output


def test_other_keys_and_rules_still_count(here: Path) -> None:
    (here / "ckptlint.toml").write_text(IGNORE.replace("*.w1", "*.0.*.w1"))
    shown = invoke(BAD).output
    assert "GEO004" in shown and "1 finding ignored by the settings" in shown
    (here / "ckptlint.toml").write_text(IGNORE.replace("coverage-hole", "GEO003"))
    assert invoke(BAD).exit_code == 1


def pasted(text: str) -> str:
    """The lines of TOML at the end of a text, with a reason."""
    lines = text[text.index("[per-key-ignores.") :].splitlines()
    assert (len(lines), lines[2]) == (3, 'reason = ""'), text
    return "\n".join(lines).replace('""', '"known"')


@pytest.mark.parametrize(
    "name", ["boundary_mismatch", "experts_same_offset", "fsdp2_4r_hole", "rank_mismatch", "storage_past_eof"]
)
def test_the_ignore_below_a_report_is_pasted(here: Path, name: str) -> None:
    (here / "ckptlint.toml").write_text(pasted(invoke(REAL / name).output))
    done = invoke(REAL / name, "--strict")
    assert (done.exit_code, "If that is meant" in done.output) == (0, False), done.output
    assert invoke(REAL / name, "--no-ignores").exit_code == 1


def test_the_ignore_is_for_the_table_of_a_pyproject(here: Path) -> None:
    (here / "pyproject.toml").write_text("[tool.ckptlint]\n")
    text = invoke(BAD).output
    lines = text[text.index("[tool.ckptlint.per-key-ignores.") :].replace('""', '"known"')
    (here / "pyproject.toml").write_text(lines)
    assert invoke(BAD).exit_code == 0


def test_a_key_is_pasted_as_it_is_named(here: Path) -> None:
    tensors = {name: {"shape": [8], "chunks": chunks} for name, chunks in {'w["*"]': ["0:4"], "wxb": ["0:8"]}.items()}
    write_checkpoint({"tensors": tensors}, here.parent / "named")
    (here / "ckptlint.toml").write_text(pasted(invoke("../named").output))
    assert invoke("../named", "--strict").exit_code == 0


@pytest.mark.parametrize("name", ["fsdp2_4r", "distcp_missing", "gap_middle", "metadata_malicious", "metadata_missing"])
def test_no_ignore_below_a_pass_several_kinds_files_and_what_none_mends(name: str) -> None:
    assert "per-key-ignores" not in invoke(REAL / name).output


def test_a_glob_that_would_hide_other_keys_is_not_offered(here: Path) -> None:
    broken = {f"layers.{n}.weight": {"shape": [8], "chunks": ["0:4"]} for n in range(2)}
    beside = {f"layers.{n}.norm.weight": {"shape": [8]} for n in range(2)}
    write_checkpoint({"tensors": broken}, here / "alone")
    write_checkpoint({"tensors": broken | beside}, here / "both")
    assert '[per-key-ignores."layers.*.weight"]' in invoke("alone").output
    assert "per-key-ignores" not in invoke("both").output


def test_explain_ends_with_the_ignore(here: Path) -> None:
    text = invoke("explain", "GEO004").output
    (here / "ckptlint.toml").write_text(pasted(text).replace("KEY", "*"))
    assert invoke(BAD).exit_code == 0
    assert "per-key-ignores" not in invoke("explain", "SAF001").output


def test_a_finding_without_key_is_ignored_by_its_file(here: Path) -> None:
    path = REAL / "orphan_distcp"
    found = json.loads(invoke(path, "--format", "json").output)["checkpoints"][0]["findings"]
    file = next(item["file"] for item in found if item["code"] == "PAY006")
    assert invoke(path, "--strict").exit_code == 1
    (here / "ckptlint.toml").write_text(f"[per-key-ignores]\n'{file}' = {{ rules = ['PAY006'], reason = 'kept' }}\n")
    assert "PAY006" not in invoke(path).output


def test_safety_is_not_ignored_by_all(here: Path) -> None:
    (here / "ckptlint.toml").write_text("[per-key-ignores]\n'*' = { rules = ['ALL'], reason = 'no' }\n")
    assert invoke(UNSAFE).exit_code == 1
    assert "SAF001" in invoke(UNSAFE).output
    assert invoke(BAD).exit_code == 0


def test_an_unused_ignore_is_a_warning(here: Path) -> None:
    (here / "ckptlint.toml").write_text(IGNORE)
    result = invoke(GOOD, "--fail-on", "error")
    assert result.exit_code == 0
    assert "warning[LNT001] unused-ignore: the ignore of GEO004, GEO005" in result.output
    assert "ckptlint.toml: per-key-ignores" in result.output
    assert invoke(GOOD, "--strict").exit_code == 1
    assert invoke(GOOD, "--strict", "--ignore", "LNT001").exit_code == 0


@pytest.mark.parametrize(
    "options", [["--ignore", "GEO005"], ["--select", "PAY"], ["--no-ignores"], [BAD], ["nowhere"]], ids=" ".join
)
def test_an_ignore_that_could_not_be_used_is_not_unused(here: Path, options: list[str]) -> None:
    """A rule was left out; or another checkpoint has the finding, or could not be found."""
    (here / "ckptlint.toml").write_text(IGNORE)
    assert "LNT001" not in invoke(GOOD, *options).output


def test_an_ignore_of_a_deeper_rule_is_not_unused(here: Path) -> None:
    (here / "ckptlint.toml").write_text(IGNORE.replace("GEO005", "PAY009"))
    assert "LNT001" not in invoke(GOOD).output
    assert "LNT001" in invoke(GOOD, "--depth", "headers").output


def test_an_ignore_whose_rule_crashed_is_not_unused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = broken_rule("GEO004")
    monkeypatch.setattr("ckptlint.lint.registry.load_rules", lambda: rules)
    (here / "ckptlint.toml").write_text(IGNORE)
    result = invoke(GOOD)
    assert "LNT002" in result.output
    assert "LNT001" not in result.output


def test_an_option_of_a_rule_reaches_it(here: Path) -> None:
    path = REAL / "orphan_distcp"
    assert "PAY006" in invoke(path).output
    (here / "ckptlint.toml").write_text("[rules.unreferenced-bytes]\nmin-bytes = 1000000000\n")
    assert "PAY006" not in invoke(path).output
    (here / "ckptlint.toml").write_text("[rules.pay006]\nmin-bytes = -5\n")
    assert "PAY006" not in invoke(GOOD).output


# ---------------------------------------------------------------- baseline


@pytest.fixture
def baseline(here: Path) -> Path:
    invoke(BAD, "--output", str(here / "old.json"), "-qq")
    return here / "old.json"


def test_findings_of_the_baseline_do_not_count(baseline: Path) -> None:
    result = invoke(BAD, "--baseline", baseline)
    assert result.exit_code == 0
    assert "(2 findings known from the baseline)" in " ".join(result.output.split())
    assert "error[" not in result.output
    document = json.loads(invoke(BAD, "--baseline", baseline, "--format", "json").output)
    jsonschema.validate(document, SCHEMA)
    assert document["summary"]["baselined"] == 2
    assert [item["ignored"] for item in document["checkpoints"][0]["findings"]] == [{"by": "baseline"}] * 2


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
@pytest.mark.parametrize("option", ["--baseline", "--config"])
def test_a_device_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr("ckptlint.lint.settings.ignores._SIZE_LIMIT", 1000)
    result = invoke(GOOD, option, "/dev/zero")
    assert isinstance(result.exception, ConfigError) and "has more than" in str(result.exception)


def test_a_baselined_report_is_a_baseline_again(baseline: Path, here: Path) -> None:
    invoke(BAD, "--baseline", baseline, "--output", "new.json")
    assert invoke(BAD, "--baseline", "new.json").exit_code == 0


def test_new_findings_count_and_solved_ones_are_listed(baseline: Path, here: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, here / "new")
    result = invoke("new", "--baseline", baseline, "-v")
    assert result.exit_code == 1
    assert result.output.count("no longer occurs: GEO004 model.layers.") == 2
    assert "no longer" not in invoke("new", "--baseline", baseline).output
    assert "no longer" not in invoke("new", "--baseline", baseline, "-v", "--ignore", "GEO004").output


def test_a_baseline_survives_from_step_to_step(tmp_path: Path) -> None:
    table = {"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}
    for step in ("step-1", "step-2"):
        write_checkpoint(table, tmp_path / step)
    invoke(tmp_path / "step-1", "--output", tmp_path / "old.json")
    assert invoke(tmp_path / "step-2", "--baseline", tmp_path / "old.json").exit_code == 0


@pytest.mark.parametrize("name", ["metadata_malicious", "metadata_truncated", "huge_shape"])
def test_safety_is_never_baselined(here: Path, name: str) -> None:
    path = REAL / name
    invoke(path, "--output", "old.json")
    assert invoke(path, "--baseline", "old.json").exit_code == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("\xff\xfe", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is not a JSON report of ckptlint"),
        ("[]", "is not a JSON report of ckptlint"),
        ('{"schema": "ckptlint.manifest/1", "tensors": {}}', "is not a JSON report of ckptlint"),
        ('{"schema": "ckptlint.report/2", "checkpoints": []}', "is not a JSON report of ckptlint"),
        ('{"schema": "ckptlint.report/1"}', "is not a JSON report of ckptlint"),
        ('{"schema": "ckptlint.report/1", "checkpoints": [{"findings": [{"code": 1}]}]}', "is not a JSON report"),
        ('{"schema": "ckptlint.report/1", "checkpoints": [{"findings": ["x"]}]}', "is not a JSON report"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_or_foreign_baseline_is_exit_2(
    here: Path, usage_error: Callable[..., str], text: str | None, sentence: str
) -> None:
    if text is not None:
        (here / "old.json").write_bytes(text.encode("latin-1"))
    said = usage_error(BAD, "--baseline", "old.json")
    assert said.startswith("the baseline old.json ")
    assert sentence in said
