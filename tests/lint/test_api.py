"""What Python programs call: `ckptlint.check`, the report, `ckptlint.load`."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import REAL, broken_rule, codes, report_on, run, run_python

import ckptlint
from ckptlint.commands import main as cli
from ckptlint.lint.settings.request import Request
from ckptlint.model import Checkpoint
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.style import Style

GOOD, BAD, WARNING = REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole", REAL / "boundary_mismatch"
UNSAFE = REAL / "metadata_malicious"


def test_the_package_names_what_it_returns_and_raises_and_nothing_else() -> None:
    from ckptlint import errors
    from ckptlint.lint.report import Diagnostic, Report

    public = [*ckptlint.__all__]
    program = "import ckptlint; print(dir(ckptlint)); print(ckptlint.Report, ckptlint.Checkpoint)"
    listed, classes = run_python(program).stdout.splitlines()
    assert listed == str(public) == str(sorted(public))
    assert "Report" in classes and "Checkpoint" in classes
    assert (ckptlint.Report, ckptlint.Diagnostic, ckptlint.Checkpoint) == (Report, Diagnostic, Checkpoint)
    raised = {name for name in public if name.endswith("Error")}
    told = {name for name in public for name in re.findall(r"\w+Error\b", getattr(ckptlint, name).__doc__ or "")}
    assert raised >= told & {*vars(errors)} and all(getattr(ckptlint, name) is getattr(errors, name) for name in raised)
    with pytest.raises(AttributeError, match="has no attribute 'Reprot'"):
        _ = ckptlint.Reprot  # type: ignore[attr-defined]


def test_importing_it_imports_nothing_heavy_and_checking_no_torch() -> None:
    heavy = ("numpy", "torch", "networkx", "click", "importlib.metadata")
    program = f"import sys, ckptlint; print([name for name in {heavy!r} if name in sys.modules])"
    assert run_python(program).stdout == "[]\n"
    program = "import sys, ckptlint; ckptlint.check(sys.argv[1]); print('torch' in sys.modules)"
    assert run_python(program, GOOD).stdout == "False\n"


def test_checking_needs_no_command_line(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("format = 'json'\nmax-per-rule = 3\n")
    program = (
        "import sys, ckptlint\n"
        "for config in (None, sys.argv[2]):\n"
        "    assert ckptlint.check(sys.argv[1], config=config).verdict == 'fail'\n"
        "print([name for name in sys.modules if name == 'click' or name.startswith('ckptlint.commands')])"
    )
    done = run_python(program, BAD, tmp_path / "settings.toml")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("path", "verdict", "code"), [(GOOD, "pass", 0), (BAD, "fail", 1), (REAL / "no", "incomplete", 3)]
)
def test_verdict_and_exit_code(path: Path, verdict: str, code: int) -> None:
    report = report_on(path)
    assert (report.verdict, report.exit_code) == (verdict, code)


def test_diagnostics() -> None:
    first = ckptlint.check(str(BAD), select=["GEO"]).diagnostics[0]
    assert (first.code, first.rule.name, first.fqn) == (
        "GEO004",
        "coverage-hole",
        "model.layers.0.feed_forward.w1.weight",
    )
    assert first.region == ((6, 0), (3, 12))
    assert first.severity.label == "error"
    assert first.ignored is None


def test_arguments_do_what_the_options_do(tmp_path: Path) -> None:
    assert ckptlint.check(BAD, ignore=["GEO004", "GEO005"]).verdict == "pass"
    assert ckptlint.check(BAD, ignore=["GEO004,GEO005"]).verdict == "pass"
    assert ckptlint.check(BAD, severity={"GEO004": "warning"}, fail_on="error").verdict == "pass"
    assert ckptlint.check(BAD, severity={"GEO004": "warning"}).verdict == "fail"
    assert [ckptlint.check(WARNING, fail_on=level).exit_code for level in (None, "warning", "error")] == [1, 1, 0]
    assert ckptlint.check(GOOD, depth="metadata").depth == "metadata"
    assert ckptlint.check(GOOD, BAD).exit_code == 1
    assert ckptlint.check(GOOD, depth="headers", sample=50, seed=1).verdict == "pass"
    CliRunner().invoke(cli.cli, [str(BAD), "--output", str(tmp_path / "old.json")])
    report = ckptlint.check(BAD, baseline=tmp_path / "old.json")
    assert report.verdict == "pass"
    assert {item.ignored.by for item in report.ignored if item.ignored} == {"baseline"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"select": ["NOPE"]}, {"ignore": ["SAF001"]}, {"severity": {"GEO004": "bad"}}, {"depth": "deep"},
        {"sample": 5.0}, {"expect": "/nowhere"}, {"baseline": "/nowhere"}, {"config": "/nowhere"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_raise(arguments: dict[str, object]) -> None:
    with pytest.raises(ckptlint.ConfigError):
        ckptlint.check(BAD, **arguments)  # type: ignore[arg-type]


def test_raise_for_findings() -> None:
    ckptlint.check(GOOD).raise_for_findings("warning")
    with pytest.raises(ckptlint.CheckpointError, match="GEO004 rows 6-8 of model"):
        ckptlint.check(BAD).raise_for_findings()
    ckptlint.check(WARNING).raise_for_findings("error")
    with pytest.raises(ckptlint.ConfigError, match="there is no level 'wrong': info, warning, error"):
        ckptlint.check(GOOD).raise_for_findings("wrong")
    ckptlint.check(WARNING, fail_on="error").raise_for_findings()
    with pytest.raises(ckptlint.CheckpointError, match="GEO008"):
        ckptlint.check(WARNING).raise_for_findings()
    with pytest.raises(ckptlint.CheckpointError, match="does not exist"):
        report_on("/nowhere").raise_for_findings()
    with pytest.raises(ckptlint.ConfigError, match="no level 'eror'"):
        ckptlint.check(GOOD, fail_on="eror")  # type: ignore[arg-type]


def test_a_report_is_true_where_it_passed() -> None:
    assert [bool(report_on(path)) for path in (GOOD, WARNING, BAD, "/nowhere")] == [True, False, False, False]
    assert ckptlint.check(WARNING, fail_on="error").passed
    assert repr(report_on("/nowhere/at/all")).endswith("no findings, /nowhere/at/all does not exist>")


def test_raise_for_findings_when_a_rule_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = broken_rule("GEO008")
    monkeypatch.setattr("ckptlint.lint.registry.load_rules", lambda: rules)
    report = ckptlint.check(GOOD)
    assert report.verdict == "incomplete"
    with pytest.raises(ckptlint.CheckpointError):
        report.raise_for_findings()


def test_raise_for_findings_when_a_path_was_refused_beside_lesser_findings() -> None:
    report = replace(ckptlint.check(WARNING, fail_on="warning"), unreadable=("the network said no",))
    assert report.exit_code == 1
    with pytest.raises(ckptlint.CheckpointError, match="the network said no"):
        report.raise_for_findings("error")


@pytest.mark.parametrize("path", [UNSAFE, REAL / "metadata_truncated"])
def test_no_fail_on_makes_the_unsafe_pass(path: Path) -> None:
    assert ckptlint.check(path, fail_on="never").verdict == "fail"


def test_nothing_is_read_unless_named_and_nothing_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ckptlint.toml").write_text("mistake = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTLINT_DEPTH", "metadata")
    report = ckptlint.check(BAD)
    assert (report.depth, report.exit_code) == ("files", 1)
    assert capfd.readouterr() == ("", "")


def test_a_named_settings_file_fills_what_arguments_leave_open(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "depth = 'metadata'\nstrict = true\nselect = ['GEO,LNT']\n"
        "[per-key-ignores]\n'*.w1.weight' = { rules = ['GEO004'], reason = 'known' }\n"
    )
    report = ckptlint.check(BAD, config=file)
    assert (report.depth, report.fail_on, report.verdict) == ("metadata", "warning", "pass")
    assert {item.ignored.reason for item in report.ignored if item.ignored} == {"known"}
    report = ckptlint.check(GOOD, config=file, depth="files", select=["PAY"], fail_on="error")
    assert (report.depth, report.fail_on, report.verdict) == ("files", "error", "pass")
    assert {rule.code[:3] for rule in report.rules} == {"PAY", "SAF", "LNT"}
    unused = ckptlint.check(GOOD, config=file)
    assert [item.code for item in unused.diagnostics] == ["LNT001"]
    file.write_text("depth = 'headers'\nsample = '50%'\nseed = 3\njobs = 1\n")
    assert ckptlint.check(GOOD, config=file).depth == "headers"


def test_a_settings_file_inside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ckptlint.toml").write_text("")
    with pytest.raises(ckptlint.ConfigError, match="never reads settings from a checkpoint"):
        ckptlint.check(tmp_path, config=tmp_path / "ckptlint.toml")


def test_command_line_and_python_agree() -> None:
    document = json.loads(CliRunner().invoke(cli.cli, [str(BAD), "--isolated", "--format", "json"]).output)
    found = [(item["code"], item["fqn"]) for item in document["checkpoints"][0]["findings"]]
    assert sorted(found) == sorted((item.code, item.fqn) for item in ckptlint.check(BAD).diagnostics)


def test_load() -> None:
    ckpt = ckptlint.load(GOOD)
    assert ckpt.tensors["model.norm.weight"].global_shape
    with pytest.raises(ckptlint.CkptlintError):
        ckptlint.load("/nowhere")


def test_a_report_that_is_gone_lets_its_checkpoints_go() -> None:
    of_other_tests = _checkpoints()
    report = ckptlint.check(GOOD, BAD, depth="headers", expect=GOOD)
    for render in REPORTERS.values():
        render(report, Style(verbose=True))
    alive = [weakref.ref(part.checkpoint) for part in report.checkpoints]
    assert len(alive) == 2
    del report
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert {*map(id, _checkpoints())} <= {*map(id, of_other_tests)}


def _checkpoints() -> list[Checkpoint]:
    """Those that are in memory."""
    return [thing for thing in gc.get_objects() if isinstance(thing, Checkpoint)]


def test_a_check_without_findings_needs_no_library_of_reports() -> None:
    heavy = ("networkx", "tabulate", "jinja2", "click", "torch")
    program = (
        "import sys, ckptlint\n"
        "assert ckptlint.check(sys.argv[1], depth='data').exit_code == 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert run_python(program, GOOD).stdout == "[]\n"


def test_a_list_in_the_place_of_paths_is_a_type_error() -> None:
    """It would be read as the path of a file of that name, and nothing is there."""
    with pytest.raises(TypeError, match="one by one"):
        ckptlint.check(["a", "b"])  # type: ignore[arg-type]


def test_a_bare_text_is_a_list_of_one() -> None:
    run = REAL / "frameworks" / "trackers" / "older"
    assert (
        codes(ckptlint.check(BAD, ignore="GEO"))
        == codes(ckptlint.check(BAD, ignore=["GEO"]))
        != codes(ckptlint.check(BAD))
    )
    assert ckptlint.check(BAD, select="PAY004").verdict == "pass"
    with pytest.raises(ckptlint.ConfigError, match="no part 'nothing'"):
        ckptlint.latest(run, require="nothing")
    with pytest.raises(ckptlint.ConfigError, match="nothing"):
        ckptlint.plan(REAL / "megatron_tp2_pp2", "tp=1", give_up="nothing")
    assert len(ckptlint.diff(GOOD, GOOD, values=True, select="model.norm.weight").matches) == 1


def test_the_default_depth_reads_what_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of a small checkpoint, also to choose a step by; of a larger one the files, and some numbers."""
    run = REAL / "frameworks" / "trackers" / "older"
    small, newest = (sum(path.stat().st_size for path in step.rglob("*")) for step in (GOOD, run / "iter_0000020"))
    for limit, depth in ((small, "data"), (small - 1, "files")):
        monkeypatch.setattr("ckptlint.lint.settings.request.CHEAP_BYTES", limit)
        assert ckptlint.check(GOOD).depth == depth
    monkeypatch.setattr("ckptlint.lint.settings.request.CHEAP_BYTES", 2 * small - 1)
    assert ckptlint.check(GOOD, GOOD).depth == "files"
    monkeypatch.setattr("ckptlint.lint.settings.request.CHEAP_BYTES", 1 << 40)
    assert ckptlint.check(GOOD, depth="metadata").depth == "metadata"
    assert report_on(GOOD, "/nowhere/at/all").depth == "data"  # what is not there costs nothing
    seen: list[Request] = []
    real = Request.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Request, "of", classmethod(lambda cls, *args: seen.append(real(cls, *args)) or seen[-1]))
    monkeypatch.setattr("ckptlint.lint.settings.request.CHEAP_BYTES", 2 * newest - 1)
    for choose in (ckptlint.latest, partial(ckptlint.deletable, keep=1)):
        choose(run)
    assert [(asked.depth, asked.fail_on) for asked in seen] == [("data", "error"), ("files", "warning")]
    assert seen[0].reading is not None and not seen[0].reading.draws
    assert seen[1].reading is not None and seen[1].reading.draws


def test_show_manifest_and_explain_say_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    step = REAL / "fsdp2_4r_hole"
    for options, text in {
        ("show", step, "--ascii"): ckptlint.show(step),
        ("show", step, "--ascii", "--ranks"): ckptlint.show(step, ranks=True),
        ("show", step, "--ascii", "*.w1.weight"): ckptlint.show(step, "*.w1.weight"),
        ("show", step, "--ascii", "--tree", "--depth", "data"): ckptlint.show(step, tree=True, depth="data"),
        ("manifest", step): ckptlint.manifest(step),
        ("explain", "copy-stopped"): ckptlint.explain("copy-stopped"),
        ("explain", "coverage-hole"): ckptlint.explain("GEO004"),
    }.items():
        assert run(*options).stdout.rstrip("\n") == text.rstrip("\n")
    expected = tmp_path / "expected.json"
    expected.write_text(ckptlint.manifest(REAL / "fsdp2_4r", values=True))
    assert ckptlint.check(REAL / "fsdp2_4r", expect=expected, depth="data").passed


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: ckptlint.show(REAL / "fsdp2_4r", "nope"), "no tensor of .* matches nope"),
        (lambda: ckptlint.show(REAL / "fsdp2_4r", depth="deep"), "no depth 'deep'"),
        (lambda: ckptlint.manifest(REAL / "fsdp2_4r", rows=True), "rows needs values"),
        (lambda: ckptlint.manifest(REAL / "metadata_malicious"), "posix.system"),
        (lambda: ckptlint.explain("GEO04"), "did you mean GEO004"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(ask: Callable[[], str], sentence: str) -> None:
    with pytest.raises(ckptlint.CkptlintError, match=sentence):
        ask()
