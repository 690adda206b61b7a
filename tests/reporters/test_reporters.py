"""Reporters: what each format says (snapshots), that it is valid, and that no name in a checkpoint can break out of it.

The snapshots are the files of `tests/reporters/snapshots`. After a change that is meant, write them again with
`UPDATE_SNAPSHOTS=1 pytest tests/reporters/test_reporters.py` and read the difference.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from junitparser import Error, Failure, JUnitXml
from markdown_it import MarkdownIt
from support import HOSTILE, REAL, REPOSITORY, report_on

import ckptlint
from ckptlint import __version__
from ckptlint.commands import main as cli
from ckptlint.depth import Depth
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import FailOn, Report
from ckptlint.lint.run import run
from ckptlint.lint.settings import options
from ckptlint.lint.settings.options import SUFFIXES
from ckptlint.lint.settings.request import Request
from ckptlint.lint.steps.trust import JudgedStep
from ckptlint.loaders.layouts import layouts
from ckptlint.model.text import printable
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.full import step_table
from ckptlint.reporters.style import Style
from ckptlint.rule import Confidence, Finding, Location, Rule
from ckptlint.testing import checkpoint_of_ranks, read_cases, write_checkpoint

pytestmark = pytest.mark.ci

SNAPSHOTS = Path(__file__).parent / "snapshots"
FORMATS = sorted(REPORTERS)
TEXTS = ("full", "concise", "markdown", "statistics")
CHECKPOINTS = {
    "clean": ("fsdp2_4r",),
    "several": ("fsdp2_4r", "fsdp2_4r_hole", "metadata_malicious", "metadata_truncated", "storage_past_eof"),
}
STYLE = Style(ascii_only=False)
SCHEMA = json.loads((REPOSITORY / "ckptlint" / "report.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in reports are then the same everywhere."""
    monkeypatch.chdir(REPOSITORY)


def check(*names: str, select: tuple[str, ...] = (), fail_on: FailOn = "error") -> Report:
    """The report on checkpoints of `fixtures/real`."""
    folders = [(REAL / name).relative_to(REPOSITORY) for name in names]
    return report_on(*folders, select=select, fail_on=fail_on)


def render(report: Report, format_: str, style: Style = STYLE) -> str:
    return REPORTERS[format_](report, style)


def crashing(code: str) -> tuple[Rule, ...]:
    """The rules, one of them ending in an error of its own."""

    def crash(_: Any) -> Iterator[Finding]:
        yield from ()
        raise RuntimeError("broken ]]> \x1b[31m rule")

    return tuple(
        Rule(rule.code, rule.name, rule.severity, crash, depth=rule.depth) if rule.code == code else rule
        for rule in load_rules()
    )


# ---------------------------------------------------------------- snapshots


@pytest.mark.parametrize("case", CHECKPOINTS)
@pytest.mark.parametrize("format_", [name for name in FORMATS if name != "html"])
def test_a_report_reads_as_it_did(format_: str, case: str) -> None:
    # a few rules, so that a new rule elsewhere does not change every snapshot
    report = check(*CHECKPOINTS[case], select=("GEO004", "GEO005", "PAY004", "SAF"))
    text = timeless(render(report, format_))
    form = options.FORMATS.get(format_)
    suffix = (
        ".sarif.json" if format_ == "sarif" else ".json" if form and form.syntax == "json" else form and form.suffix
    )
    file = SNAPSHOTS / f"{format_}-{case}{suffix or '.txt'}"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "UPDATE_SNAPSHOTS=1 writes the snapshots again"


def timeless(text: str) -> str:
    """The text without what changes from run to run and from version to version; of SARIF's rules, the ones used."""
    text = re.sub(r" \d\d:\d\d [+-]\d{4}\b", " 00:00 +0000", re.sub(r"\b\d+\.\d\d s\b", "0.00 s", text))
    text = re.sub(r' time="[\d.]+"', ' time="0"', text)
    text = text.replace(f'"{__version__}"', '"VERSION"')
    if '"$schema": "https://docs.oasis-open.org' in text:
        document = json.loads(text)
        driver, used = document["runs"][0]["tool"]["driver"], document["runs"][0]["results"]
        driver["rules"] = [
            rule | {"help": {"text": rule["help"]["text"].partition("\n")[0]}}
            for rule in driver["rules"]
            if rule["id"] in {result["ruleId"] for result in used}
        ]
        return json.dumps(document, indent=1) + "\n"
    return text


def test_every_snapshot_belongs_to_a_test() -> None:
    stems = {f"{format_}-{case}" for format_ in FORMATS for case in CHECKPOINTS}
    assert {file.name.partition(".")[0] for file in SNAPSHOTS.iterdir()} <= stems


# ---------------------------------------------------------------- schemas


def judged(place: Path, rules: Sequence[Rule]) -> Report:
    """The report of these rules."""
    return run(Request((str(place),), (*rules,)))


REPORTS: dict[str, Callable[[], Report]] = {
    "clean": lambda: check("fsdp2_4r"),
    "several": lambda: check(*CHECKPOINTS["several"], "megatron_two_modules_key_collision"),
    "nothing there": lambda: check("fsdp2_4r_hole", "no_such_folder"),
    "offsets below zero": lambda: check("storage_negative", "negative_offset", "path_absolute", "huge_shape"),
    "a crashed rule": lambda: judged(REAL / "fsdp2_4r_hole", crashing("GEO003")),
}


@pytest.fixture(params=REPORTS)
def report(request: pytest.FixtureRequest) -> Report:
    return REPORTS[request.param]()


def test_the_schema_knows_every_depth() -> None:
    text = json.dumps(SCHEMA)
    assert all(f'"{depth}"' in text for depth in Depth)


def test_the_schema_knows_every_format() -> None:
    text = json.dumps(SCHEMA)
    assert all(f'"{name}"' in text for row in layouts() for name in row.formats)


def test_json_is_valid(report: Report) -> None:
    jsonschema.validate(json.loads(render(report, "json")), SCHEMA)


@pytest.fixture(scope="module")
def sarif_log() -> Any:
    """The model of a SARIF log that was generated from the official schema."""
    reason = "needs pydantic-sarif, which the ci extra brings"
    model = pytest.importorskip("pydantic_sarif.model", reason=reason)
    return model.StaticAnalysisResultsFormatSarifVersion210JsonSchema


def test_sarif_is_what_the_models_of_its_schema_take(report: Report, sarif_log: Any) -> None:
    sarif_log.model_validate_json(render(report, "sarif"))


def test_sarif_is_valid(report: Report) -> None:
    document = json.loads(render(report, "sarif"))
    (run,) = document["runs"]
    for result in run["results"]:  # what the models, which are generated from the schema, leave out of it
        assert result["message"]["text"]
        related = [json.dumps(place, sort_keys=True) for place in result["relatedLocations"]]
        assert len(set(related)) == len(related) <= 100
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        for place in result["locations"] + result["relatedLocations"]:
            region = place["physicalLocation"].get("region", {})
            assert min(region.values(), default=0) >= 0
            assert place["physicalLocation"]["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
    artifacts = [json.dumps(artifact, sort_keys=True) for artifact in run["artifacts"]]
    assert len(set(artifacts)) == len(artifacts)


@pytest.mark.skipif("SARIF_SCHEMA" not in os.environ, reason="SARIF_SCHEMA names no sarif-schema-2.1.0.json")
def test_sarif_is_valid_against_the_schema_itself(report: Report) -> None:
    schema = json.loads(Path(os.environ["SARIF_SCHEMA"]).read_text(encoding="utf-8"))
    validator = jsonschema.validators.validator_for(schema)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(render(report, "sarif")))


def test_junit_is_read_by_a_parser_and_its_totals_are_right(report: Report) -> None:
    text = render(report, "junit")
    suites = JUnitXml.fromstring(text.encode())
    reported = [(s.tests, s.failures, s.errors, s.skipped) for s in [suites, *suites]]
    for suite in suites:
        suite.update_statistics()
    suites.update_statistics()
    assert reported == [(s.tests, s.failures, s.errors, s.skipped) for s in [suites, *suites]]
    for part, suite in zip(report.checkpoints, suites, strict=False):
        assert suite.name == part.checkpoint.path
        assert suite.skipped == 0
        assert [case.name.split()[0] for case in suite] == [r.code for r in report.rules if r.code not in part.silent]


def test_gitlab_has_what_gitlab_asks_for(report: Report) -> None:
    issues = json.loads(render(report, "gitlab"))
    for issue in issues:
        assert issue["description"] and issue["check_name"]
        assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert issue["location"]["path"] and issue["location"]["lines"]["begin"] == 1
    prints = [issue["fingerprint"] for issue in issues]
    assert len(set(prints)) == len(prints)


# ---------------------------------------------------------------- what every format takes from one place


def test_every_format_says_the_same_of_the_rules_that_ran(report: Report) -> None:
    document = json.loads(render(report, "json"))
    suites = JUnitXml.fromstring(render(report, "junit").encode())
    for part, reported, suite in zip(report.checkpoints, document["checkpoints"], suites, strict=False):
        own = report.rule_counts_of(part)
        assert reported["rules"] == asdict(own)
        assert (suite.tests - suite.errors, suite.errors) == (own.ran, own.failed)
        facts = {p.name: p.value for p in suite.properties()}
        assert facts["rules that ran"] == f"{own.ran:,}"
        reasons = {row["code"]: row["reason"] for row in reported["not_run"]}
        assert {f"not run: {code}": why for code, why in reasons.items()}.items() <= facts.items()
        assert len(reasons) == own.not_run == sum(name.startswith("not run: ") for name in facts)
        loud = " ".join(render(report, "markdown", Style(verbose=True)).split())
        assert not reasons or "not run:" in loud
    assert document["rules"] == asdict(report.rule_counts)
    assert report.rule_counts.ran >= max(report.rule_counts_of(part).ran for part in report.checkpoints)
    for format_ in ("full", "markdown", "github", "statistics"):
        assert f"{report.rule_counts.ran} rules ran " in render(report, format_) or report.rule_counts.failed


def test_what_could_not_run_names_its_checkpoint_and_nothing_else() -> None:
    text = " ".join(render(check("fsdp2_4r", "metadata_truncated"), "full").split())
    blocked = len(check("metadata_truncated").checkpoints[0].blocked)
    assert f"{blocked} rules could not run on fixtures/real/metadata_truncated: they need a readable .metadata." in text
    (one,) = [line for line in render(check("metadata_truncated"), "full").splitlines() if "could not run" in line]
    assert one == f"{blocked} rules could not run: they need a readable .metadata."


def test_a_file_that_is_no_checkpoint_blocks_rules() -> None:
    text = " ".join(render(check("other_formats/gguf"), "full").split())
    assert "rules could not run: not a checkpoint that ckptlint checks." in text


def test_a_pass_says_what_a_deeper_look_adds() -> None:
    lines = render(check("fsdp2_4r"), "full").splitlines()
    counts = [
        sum(not (rule.live or rule.expects) and rule.depth in deeper for rule in load_rules())
        for deeper in (("headers",), ("headers", "data"))
    ]
    assert lines[-1] == (
        f"Tensor bytes were not read: --depth headers adds {counts[0]} rules, --depth data {counts[1]}."
    )
    assert lines[-2].startswith("Passed: ")
    assert "2 checkpoints passed: " in render(check("fsdp2_4r", "hsdp_2x2"), "full")


def test_verbose_of_a_healthy_checkpoint_fits_on_a_screen_and_names_every_rule() -> None:
    report = check("fsdp2_4r")
    text = render(report, "full", Style(verbose=True))
    assert len(text.splitlines()) <= 40
    (part,) = report.checkpoints
    silent = {*part.not_run, *part.not_applicable}
    named = set()
    for family, numbers in re.findall(r"\b([A-Z]{3})((?:\d{3}(?:-\d{3})?,?)+)", text.partition("slowest")[0]):
        for first, _, last in (item.partition("-") for item in numbers.split(",")):
            named |= {f"{family}{number:03d}" for number in range(int(first), int(last or first) + 1)}
    assert silent <= named


def inferring(rank: int | None = None, confidence: Confidence = "certain") -> Report:
    """The report of a rule that infers what it finds, and knows the rank or not."""

    def check_(ckpt: Any) -> Iterator[Finding]:
        place = Location("w", file="__2_0.distcp", ranks=() if rank is None else (rank, 0))
        basis = "the shapes of layers 0-3"
        yield Finding("one row is missing{of}", place, confidence=confidence, inferred_from=basis, hint="save again")

    rule = next(rule for rule in load_rules() if rule.code == "GEO004")
    return judged(REAL / "fsdp2_4r", [Rule(rule.code, rule.name, rule.severity, check_)])


@pytest.mark.parametrize("format_", [name for name in FORMATS if name not in ("json", "statistics")])
def test_what_a_finding_was_inferred_from_is_in_every_format(format_: str) -> None:
    text = " ".join(render(inferring(), format_).split())
    assert "from the shapes of layers 0-3" in text
    if format_ not in ("html", "sarif"):
        assert text.count("inferred from the shapes of layers 0-3") == 1


@pytest.mark.parametrize(("confidence", "level"), [("certain", "error"), ("likely", "warning"), ("possible", "info")])
def test_doubt_lowers_the_severity_and_is_said(confidence: Confidence, level: str) -> None:
    report = inferring(confidence=confidence)
    (item,) = json.loads(render(report, "json"))["checkpoints"][0]["findings"]
    assert (item["severity"], item["confidence"]) == (level, confidence)
    text = " ".join(render(report, "full", Style(verbose=True)).split())
    said = "inferred from" if confidence == "certain" else f"confidence: {confidence}, inferred from"
    assert f"= {said} the shapes of layers 0-3" in text
    for format_ in ("concise", "gitlab"):
        assert f" ({said} the shapes of layers 0-3)" in render(report, format_)
    (result,) = json.loads(render(report, "sarif"))["runs"][0]["results"]
    assert result["properties"].get("confidence", "") == ("" if confidence == "certain" else confidence)


def test_json_has_the_ranks_and_the_inference_as_fields() -> None:
    def finding(report: Report) -> Any:
        return json.loads(render(report, "json"))["checkpoints"][0]["findings"][0]

    assert finding(inferring())["ranks"] == [2]  # the name of the file says it
    assert finding(inferring(3))["ranks"] == [0, 3]
    assert finding(inferring())["inferred_from"] == "the shapes of layers 0-3"
    assert all(note["label"] != "inferred" for note in finding(inferring())["notes"])
    hole = finding(check("fsdp2_4r_hole"))
    assert (hole["ranks"], hole["inferred_from"]) == ([2], None)  # the rank that should have saved it
    jsonschema.validate(json.loads(render(inferring(3), "json")), SCHEMA)
    document = json.loads(render(inferring(), "sarif"))
    assert document["runs"][0]["results"][0]["properties"] == {"ranks": [2], "inferredFrom": "the shapes of layers 0-3"}


def test_json_accounts_for_every_file() -> None:
    (part,) = json.loads(render(check("fsdp2_4r"), "json"))["checkpoints"]
    assert part["files"]["payload"] == {"ok": part["totals"]["files"]}
    assert sum(part["files"]["beside"].values()) == len(part["step_files"])
    (gone,) = json.loads(render(check("distcp_missing"), "json"))["checkpoints"]
    assert gone["files"]["payload"]["absent"] == 1
    assert sum(gone["files"]["payload"].values()) == gone["totals"]["files"]


# ---------------------------------------------------------------- each format


def test_machine_formats_hold_every_group_whatever_text_is_cut_to() -> None:
    report, style = check("fsdp2_4r_hole", "boundary_mismatch", "orphan_distcp"), Style(per_rule=1)
    groups = [group for part in report.checkpoints for group in part.groups]
    results = json.loads(render(report, "sarif", style))["runs"][0]["results"]
    assert [result["occurrenceCount"] for result in results] == [len(group.members) for group in groups]
    assert len(json.loads(render(report, "gitlab", style))) == len(groups)
    assert sum(line.startswith("::") for line in render(report, "github", style).splitlines()) == len(groups)


def test_sarif_names_chunks_and_every_member() -> None:
    document = json.loads(render(check("fsdp2_4r_hole"), "sarif"))
    (run,) = document["runs"]
    (result,) = [result for result in run["results"] if result["ruleId"] == "GEO004"]
    assert (result["level"], result["kind"], result["occurrenceCount"]) == ("error", "fail", 2)
    names = [finding["fqn"] for finding in result["properties"]["findings"]]
    assert names == [f"model.layers.{layer}.feed_forward.w1.weight" for layer in range(2)]
    chunks = {place["message"]["text"]: place["physicalLocation"] for place in result["relatedLocations"]}
    assert chunks["chunk B: [3:6, 0:12]"]["artifactLocation"] == {"uri": "__1_0.distcp", "uriBaseId": "CKPT0"}
    assert chunks["chunk B: [3:6, 0:12]"]["region"]["byteLength"] > 144
    lengths = {artifact["location"]["uri"]: artifact.get("length") for artifact in run["artifacts"]}
    assert lengths["__1_0.distcp"] == (REAL / "fsdp2_4r_hole" / "__1_0.distcp").stat().st_size
    assert run["originalUriBaseIds"]["CKPT0"]["uri"] == "fixtures/real/fsdp2_4r_hole/"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [
        rule.code for rule in load_rules() if not (rule.expects or rule.live)
    ]


def test_sarif_keeps_what_is_ignored_with_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "ckptlint.toml"
    reason = "a region that is filled at the first step"
    config.write_text(f'[per-key-ignores]\n"model.layers.0.*" = {{ rules = ["GEO004"], reason = "{reason}" }}\n')
    hole = REAL / "fsdp2_4r_hole"
    (run_,) = json.loads(REPORTERS["sarif"](ckptlint.check(hole, config=config), STYLE))["runs"]
    kept = [result.get("suppressions") for result in run_["results"]]
    assert kept == [None, [{"kind": "external", "status": "accepted", "justification": reason}]]
    assert [result["occurrenceCount"] for result in run_["results"]] == [1, 1]

    before = tmp_path / "before.json"
    before.write_text(REPORTERS["json"](ckptlint.check(hole), STYLE))
    (run_,) = json.loads(REPORTERS["sarif"](ckptlint.check(hole, baseline=before), STYLE))["runs"]
    assert [result["baselineState"] for result in run_["results"]] == ["unchanged"]
    assert "suppressions" not in run_["results"][0]


def test_sarif_points_at_bytes_and_never_outside_the_checkpoint() -> None:
    run = json.loads(render(check("storage_past_eof", "path_absolute"), "sarif"))["runs"][0]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert any(place["region"].get("byteLength") for place in places)
    assert "/etc/passwd" in render(check("path_absolute"), "concise")
    files = {path.name for path in (REAL / "storage_past_eof").iterdir()}
    assert {artifact["location"]["uri"] for artifact in run["artifacts"]} <= {".metadata", *files}


def test_a_path_outside_the_working_directory_is_absolute(tmp_path: Path) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [4]}}}, tmp_path / "a b")
    bases = json.loads(render(ckptlint.check(tmp_path / "a b"), "sarif"))["runs"][0]["originalUriBaseIds"]
    assert bases["CKPT0"]["uri"] == f"{(tmp_path / 'a b').as_uri()}/"


def of_a_url(url: str, tmp_path: Path) -> Report:
    folder = write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:4"]}}}, tmp_path / "step")
    whole = ckptlint.check(folder)
    (part,) = whole.checkpoints
    ckpt = replace(part.checkpoint, path=url, not_looked_at=("when the files were written",))
    return replace(whole, checkpoints=[replace(part, checkpoint=ckpt)])


def test_a_url_in_sarif_is_what_the_models_of_its_schema_take(tmp_path: Path, sarif_log: Any) -> None:
    sarif_log.model_validate_json(render(of_a_url("s3://bucket/a b/step", tmp_path), "sarif"))


def test_a_url_stays_one(tmp_path: Path) -> None:
    url = "s3://bucket/a b/step"
    report = of_a_url(url, tmp_path)
    run = json.loads(render(report, "sarif"))["runs"][0]
    assert run["originalUriBaseIds"]["CKPT0"]["uri"] == "s3://bucket/a%20b/step/"
    assert run["invocations"][0]["executionSuccessful"] is True
    assert json.loads(render(report, "gitlab"))[0]["location"]["path"] == f"{url}/.metadata"
    assert f"file={url.replace(':', '%3A')}/.metadata," in render(report, "github")
    for format_ in ("full", "json", "sarif", "junit", "github", "markdown"):
        assert "when the files were written" in render(report, format_)


def test_a_crashed_rule_is_told_apart_from_a_finding() -> None:
    report = judged(REAL / "fsdp2_4r", crashing("GEO008"))
    (invocation,) = json.loads(render(report, "sarif"))["runs"][0]["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 4)
    (reported,) = invocation["toolExecutionNotifications"]
    assert reported["associatedRule"]["id"] == "GEO008"
    suites = JUnitXml.fromstring(render(report, "junit").encode())
    cases = {case.name.split()[0]: case for suite in suites for case in suite}
    assert isinstance(cases["GEO008"].result[0], Error)
    assert cases["LNT002"].is_passed and "broken" in cases["LNT002"].system_out
    assert "title=LNT002 rule-crashed::" in render(report, "github")
    assert "## ⚠️ ckptlint: incomplete\n" in render(report, "markdown")


@pytest.mark.parametrize("format_", [name for name in FORMATS if name != "html"])
def test_an_unread_path_is_in_every_format(format_: str) -> None:
    text = render(check("fsdp2_4r", "no_such_folder"), format_)
    assert "no_such_folder" in text
    if format_ == "sarif":
        assert json.loads(text)["runs"][0]["invocations"][0]["executionSuccessful"] is False


def test_junit_fails_what_fails_the_run() -> None:
    def result(fail_on: FailOn) -> Any:
        suites = JUnitXml.fromstring(render(check("boundary_mismatch", fail_on=fail_on), "junit").encode())
        return next(case for suite in suites for case in suite if case.name.startswith("GEO008"))

    assert result("error").is_passed
    assert "boundary-mismatch" in result("error").system_out
    assert isinstance(result("warning").result[0], Failure)
    assert result("warning").result[0].type == "warning"


def test_junit_says_why_a_rule_was_skipped() -> None:
    suites = JUnitXml.fromstring(render(check("metadata_truncated", "fsdp2_4r"), "junit").encode())
    facts = [{p.name: p.value for p in suite.properties()} for suite in suites]
    assert [own["not run: PAY003"] for own in facts if "not run: PAY003" in own] == ["needs .metadata"]
    assert facts[1]["not run: LIV101"] == "needs a running job"
    assert facts[1]["not run: EXP001"] == "there are no routed experts with a router"


def test_a_text_on_several_ends_with_a_line_for_each_failures_last() -> None:
    report = check("fsdp2_4r_hole", "no_such_folder", "fsdp2_4r", "storage_past_eof", "hsdp_2x2")
    assert render(report, "full", Style(width=60)).splitlines()[-5:] == [
        "passes        fixtures/real/fsdp2_4r",
        "passes        fixtures/real/hsdp_2x2",
        "not read      fixtures/real/no_such_folder does not exist",
        "fails GEO004  fixtures/real/fsdp2_4r_hole",
        "fails PAY004  fixtures/real/storage_past_eof",
    ]
    assert "1 path without a checkpoint." in render(check("fsdp2_4r", "no_such_folder"), "full")
    for clean in (check("fsdp2_4r", "hsdp_2x2"), check("fsdp2_4r_hole")):
        assert "fails GEO004" not in render(clean, "full") and "passes  " not in render(clean, "full")


def test_github_tells_in_the_last_shown_annotation_how_many_more_there_are(tmp_path: Path) -> None:
    tensors = different_holes(13)
    tensors["z.weight"] = {"shape": [8, 8], "chunks": ["0:4, 0:3", "0:4, 3:8", "4:8, 0:5", "4:8, 5:8"]}
    report = ckptlint.check(write_checkpoint({"tensors": tensors}, tmp_path / "many"), select=["GEO"])
    lines = render(report, "github").splitlines()
    commands = [line for line in lines if line.startswith("::")]
    levels = [line.partition(" ")[0] for line in commands]
    assert levels == sorted(levels, key=["::error", "::warning", "::notice"].index)
    errors = [line for line in commands if line.startswith("::error")]
    assert len(errors) == 14
    assert errors[9] == "::error title=ckptlint::4 more errors: the log of this step lists them"
    assert sum(" title=" in line or ",title=GEO004" in line for line in errors) == 14


def test_the_same_fault_in_two_checkpoints_is_two_issues() -> None:
    (one,) = json.loads(render(check("fsdp2_4r_hole", select=("GEO004",)), "gitlab"))
    both = json.loads(render(check("fsdp2_4r_hole", "fsdp2_4r_hole", select=("GEO004",)), "gitlab"))
    assert [issue["fingerprint"] for issue in both].count(one["fingerprint"]) == 1
    assert len({issue["fingerprint"] for issue in both}) == 2


def different_holes(count: int) -> dict[str, Any]:
    """Tensors of which the last of 2, 3, 4... places is missing: a problem each."""
    return {
        f"w{places}.weight": {"shape": [4 * places], "chunks": [f"{4 * i}:{4 * i + 4}" for i in range(places - 1)]}
        for places in range(2, count + 2)
    }


def test_markdown_stays_below_what_a_comment_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.reporters.markdown.TEXT_LIMIT", 5_000)
    folder = write_checkpoint({"tensors": different_holes(30)}, tmp_path / "many")
    text = render(ckptlint.check(folder, select=["GEO004"]), "markdown", Style(per_rule=0))
    shown = text.count("| error |")
    assert 4_000 < len(text) < 6_000 and 0 < shown < 30
    assert text.endswith(f"{30 - shown} more groups of GEO004 not shown.\n")


def test_statistics_are_a_table_of_rules() -> None:
    lines = render(check("fsdp2_4r_hole", "boundary_mismatch"), "statistics").splitlines()
    assert lines[0].split() == ["count", "code", "name", "keys"]
    assert lines[2].split() == ["1", "GEO004", "coverage-hole", "2"]
    assert lines[3].split() == ["1", "GEO008", "boundary-mismatch", "1"]
    assert " ".join(lines[5:]).startswith("1 error, 1 warning in 2 checkpoints: 1 passed, 1 failed.")


@pytest.mark.parametrize("width", [60, 80])
def test_the_lines_below_the_table_of_rules_are_wrapped(width: int) -> None:
    report = check("fsdp2_4r_hole", "boundary_mismatch", "metadata_truncated")
    text = render(report, "statistics", STYLE._replace(width=width))
    assert max(map(len, text.splitlines())) <= width
    assert "rules could not run on fixtures/real/metadata_truncated" in " ".join(text.split())


def test_a_table_of_steps_without_times_has_no_column_for_them() -> None:
    step = JudgedStep(5, "step-5", "s3://bucket/run/step-5", "passes", parts=("model",), size=1024)
    assert step_table([step], 80).split() == [
        *("step", "holds", "payload", "verdict"),
        *("step-5", "model", "1.0", "KiB", "passes"),
    ]
    assert "written" in step_table([replace(step, written=1.0), step], 80)


# ---------------------------------------------------------------- many layers


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A model of 100 layers that lacks the same rows in each of them."""
    whole, hole = ["0:256, :", "256:512, :", "512:768, :", "768:1024, :"], ["0:256, :", "256:512, :", "768:1024, :"]
    tensors = {"model.embed.weight": {"shape": [1024, 64], "chunks": whole}}
    for layer in range(100):
        tensors[f"model.layers.{layer}.mlp.w1.weight"] = {"shape": [1024, 64], "chunks": hole}
        tensors[f"model.layers.{layer}.mlp.w2.weight"] = {"shape": [64, 1024]}
    return ckptlint.check(write_checkpoint({"tensors": tensors}, tmp_path_factory.mktemp("layers") / "step"))


@pytest.mark.parametrize("format_", ["full", "markdown"])
def test_the_same_fault_in_100_layers_is_one_message_on_one_screen(layers: Report, format_: str) -> None:
    text = render(layers, format_)
    assert "model.layers.{1-99}.mlp.w1.weight" in text
    assert len([line for line in text.splitlines() if "GEO004] coverage-hole" in line]) == 1
    assert len(text.splitlines()) <= (34 if format_ == "full" else 40)


def test_the_same_fault_in_100_layers_is_one_result(layers: Report) -> None:
    results = json.loads(render(layers, "sarif"))["runs"][0]["results"]
    assert [(result["ruleId"], result["occurrenceCount"]) for result in results] == [("GEO004", 100)]
    assert len(results[0]["properties"]["findings"]) == 100
    assert sum(line.startswith("::") for line in render(layers, "github").splitlines()) == 1
    (issue,) = json.loads(render(layers, "gitlab"))
    assert issue["description"].endswith("(+99 more)")
    failed = [c for s in JUnitXml.fromstring(render(layers, "junit").encode()) for c in s if c.result]
    failed = [case for case in failed if isinstance(case.result[0], Failure)]
    assert len(failed) == 1
    assert all(f"model.layers.{layer}.mlp.w1.weight" in failed[0].result[0].text for layer in range(100))


# ---------------------------------------------------------------- hostile names


@pytest.fixture(scope="module", params=HOSTILE)
def hostile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Report]:
    """A name, and the report on a checkpoint whose tensors, objects and files bear it, in a folder with such a name."""
    name = HOSTILE[request.param]
    file = name.replace("\0", "").replace(" ", "_")  # the table cuts the name of a file at a blank
    folder = tmp_path_factory.mktemp("hostile") / "a b,c%0A:d|e`f`<g>]]>&'\"::error::h"
    tensors = {
        name: {"shape": [8], "chunks": ["0:4"]},
        f"model.{name}": {"shape": [8], "chunks": ["0:4"], "records": [f"{file} 0:5000"]},
    }
    table = {"tensors": tensors, "unstored": [f"object {name}"], "files": {file: "absent"}}
    return name, ckptlint.check(write_checkpoint(table, folder))


@pytest.mark.sweep
def test_no_name_reaches_the_output_raw(hostile: tuple[str, Report]) -> None:
    _, report = hostile
    assert len(list(report.diagnostics)) > 1
    raw = {}
    for format_ in FORMATS:
        text = render(report, format_, Style(width=60, per_rule=0))
        text.encode()
        raw[format_] = [char for char in {*text} if not char.isprintable() and char != "\n"]
        if format_ != "github":
            raw[format_] += [line for line in text.splitlines() if line.lstrip().startswith("::")]
            raw[format_] += re.findall(r"::[\w-]+(?: [^:\n]*)?::", text)
        raw[format_] += re.findall(r"##\w*\[", text)
    assert not any(raw.values()), raw


def test_structured_formats_give_the_name_back(hostile: tuple[str, Report]) -> None:
    name, report = hostile
    seen = printable(name)
    (part,) = json.loads(render(report, "json"))["checkpoints"]
    assert seen in {finding["fqn"] for finding in part["findings"]}
    run = json.loads(render(report, "sarif"))["runs"][0]
    names = {
        place["fullyQualifiedName"]
        for result in run["results"]
        for location in result["locations"]
        for place in location.get("logicalLocations", ())
    }
    assert seen in names
    assert not any("](" in result["message"]["text"] for result in run["results"])
    assert seen in "".join(issue["description"] for issue in json.loads(render(report, "gitlab")))


def test_xml_holds_the_name_and_no_element_of_its_own(hostile: tuple[str, Report]) -> None:
    name, report = hostile
    suites = JUnitXml.fromstring(render(report, "junit").encode())
    tags = Counter(element.tag for element in suites._elem.iter())
    ours = {"testsuites", "testsuite", "properties", "property", "testcase"}
    assert tags.keys() <= ours | {"failure", "error", "skipped", "system-out"}
    failures = [r for suite in suites for case in suite for r in case.result if isinstance(r, Failure)]
    assert any(printable(name) in failure.message or printable(name) in (failure.text or "") for failure in failures)
    assert [suite.name for suite in suites] == [report.checkpoints[0].checkpoint.path]


def test_xml_can_be_written_of_what_xml_cannot_hold() -> None:
    def check_(_: Any) -> Iterator[Finding]:
        yield Finding("a\x00b\ufffe ]]> \ud800 \x1b[1m")

    rule = next(rule for rule in load_rules() if rule.code == "GEO004")
    own = Rule(rule.code, rule.name, rule.severity, check_)
    report = judged(REAL / "fsdp2_4r", [own])
    (suite,) = JUnitXml.fromstring(render(report, "junit").encode())
    (case,) = suite
    assert case.result[0].message == r"a\x00b\ufffe ]]> \ud800 \x1b[1m"


def test_github_gets_its_own_commands_only(hostile: tuple[str, Report]) -> None:
    _, report = hostile
    groups = report.checkpoints[0].groups
    commands = [line for line in render(report, "github").splitlines() if line.lstrip().startswith("::")]
    assert len(commands) == len(groups)
    for command in commands:
        found = re.fullmatch(
            r"::(error|warning|notice) file=([^,:]*),line=1,title=[A-Z]{3}\d{3} [a-z-]+::(.+)", command
        )
        assert found
        file = found[2].replace("%2C", ",").replace("%3A", ":").replace("%0A", "\n").replace("%25", "%")
        assert file.startswith(report.checkpoints[0].checkpoint.path + "/")
        assert not re.search("%(?!25|0A|0D)", found[3])


def test_markdown_holds_the_name_as_code_only(hostile: tuple[str, Report]) -> None:
    _, report = hostile
    reader = MarkdownIt("commonmark").enable("table")
    text = render(report, "markdown", Style(per_rule=0))
    tokens = reader.parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in [*tokens, *inline]}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "strong_open", "em_open", "code_block"}
    prose = " ".join(child.content for child in inline if child.type == "text")
    assert not re.search(r"injected|evil|script|@user|</", prose)
    rows = [token for token in tokens if token.type == "tr_open"]
    cells = [token for token in tokens if token.type in ("td_open", "th_open")]
    shown = len(report.checkpoints[0].groups) - sum(map(int, re.findall(r"(\d+) more groups? of", text)))
    assert len(cells) == 4 * len(rows) and len(rows) == shown + 1 > 1
    assert len([token for token in tokens if token.type == "fence"]) == shown


# ---------------------------------------------------------------- the command line


def test_several_outputs_at_once_each_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ckptlint"])
    files = {suffix: tmp_path / f"report{suffix}" for suffix in SUFFIXES}
    options = [text for file in files.values() for text in ("--output", str(file))]
    named = tmp_path / "quality"
    bad = str((REAL / "fsdp2_4r_hole").relative_to(REPOSITORY))
    result = CliRunner().invoke(cli.cli, [bad, *options, "--output", f"gitlab={named}", "-qq"])
    assert (result.exit_code, result.output) == (1, "")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*(f.name for f in files.values()), "quality"])
    assert json.loads(named.read_text(encoding="utf-8"))[0]["check_name"] == "coverage-hole"
    for suffix, file in files.items():
        text = file.read_text(encoding="utf-8")
        assert "model.layers.0.feed_forward.w1.weight" in text
        assert timeless(text) == timeless(
            render(replace(check("fsdp2_4r_hole"), command="ckptlint"), SUFFIXES[suffix], Style(ascii_only=False))
        ) or (suffix == ".txt" and text.rstrip().endswith("shows more."))


def test_statistics_replace_the_findings_on_stdout_only(tmp_path: Path) -> None:
    bad = str(REAL / "fsdp2_4r_hole")
    result = CliRunner().invoke(cli.cli, [bad, "--statistics", "--output", str(tmp_path / "r.json")])
    assert result.exit_code == 1
    assert result.output.startswith("  count  code") and "1 error." in result.output and "hint" not in result.output
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["summary"]["error"] == 1
    assert CliRunner().invoke(cli.cli, [bad, "--statistics", "-qq"]).output == ""
    assert "GEO004" in CliRunner().invoke(cli.cli, [bad, "--statistics", "-q"]).output
    assert CliRunner().invoke(cli.cli, [bad, "--statistics", "--format", "json"]).exit_code == 2
    clean = CliRunner().invoke(cli.cli, [str(REAL / "fsdp2_4r"), "--statistics"])
    assert clean.exit_code == 0 and re.match(r"Passed: \d+ rules ran in ", clean.output)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_running_job_is_told_in_every_format(format_: str) -> None:
    rules = tuple(rule for rule in load_rules() if rule.live)
    case = read_cases(REPOSITORY / "fixtures" / "LIV205.toml")[0]
    report = Report([run_rules(checkpoint_of_ranks(case.table), rules, Depth.METADATA)], rules, Depth.METADATA)
    text = REPORTERS[format_](report, Style(width=80))
    assert "LIV205" in text
    if format_ == "html":
        assert "7 ranks" in text and "7 files" not in text
        assert not re.search('class="lost-(missing|cut|failed)', text)
    if format_ == "json":
        jsonschema.validate(json.loads(text), json.loads((REPOSITORY / "ckptlint" / "report.schema.json").read_text()))


def test_sarif_links_each_rule_to_the_pages_that_the_package_states(monkeypatch: pytest.MonkeyPatch) -> None:
    from email.message import Message

    from ckptlint.reporters.ci import sarif

    def linked() -> set[str]:
        (run,) = json.loads(render(ckptlint.check(REAL / "fsdp2_4r_hole"), "sarif"))["runs"]
        return {rule.get("helpUri", "") for rule in run["tool"]["driver"]["rules"]}

    stated = Message()
    monkeypatch.setattr(sarif, "metadata", lambda _: stated)
    assert linked() == {""}
    stated["Project-URL"] = "Documentation, https://docs.example.com/ckptlint/"
    assert "https://docs.example.com/ckptlint/rules/GEO.html#geo004-coverage-hole" in linked()
