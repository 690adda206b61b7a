"""Every cause fires on its own fixtures, and on none of the other broken checkpoints."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from claims import CLAIMS
from support import REAL, REPOSITORY

import ckptlint
from ckptlint.depth import Depth
from ckptlint.lint import causes as causes_module
from ckptlint.lint.causes import Clause, KnownCause, load_causes, read_cause, with_causes
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import Cause, CheckpointReport, Diagnostic
from ckptlint.model import Checkpoint
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.style import Style
from ckptlint.rule import Finding, Location, Severity
from ckptlint.testing import Case, fixture_cases, open_case

CAUSES = {known.name: known for known in load_causes()}
RULES = {rule.code: rule for rule in load_rules()}


def own_cases() -> Iterator[Any]:
    for name in CAUSES:
        for number, table in enumerate(CLAIMS[name].get("case", ())):
            case = {key: value for key, value in table.items() if key not in ("name", "says")}
            yield pytest.param(name, Case(table["name"], case), table["says"], id=f"{name}:{number}")


def real_ones() -> Iterator[Any]:
    for name in CAUSES:
        for number, table in enumerate(CLAIMS[name].get("real", ())):
            yield pytest.param(name, table, id=f"{name}:{number}:{table['path']}")


def edited(table: dict[str, Any], folder: Path) -> Path:
    """A copy of a real checkpoint with the edits that its table names."""
    path = Path(shutil.copytree(REAL / table["path"], folder / Path(table["path"]).name))
    for name in table.get("remove", ()):
        (path / name).unlink()
    for name, size in table.get("cut", {}).items():
        os.truncate(path / name, size)
    for name, source in table.get("copy", {}).items():
        shutil.copy(REAL / source, path / name)
    if "keys" in table:
        for file in path.glob("*.safetensors"):
            rename(file, table["keys"])
    if "forget" in table:
        forget(path / ".metadata", [entry.partition(" ") for entry in table["forget"]])
    return path


def rename(file: Path, pattern: str) -> None:
    """Give the tensors of a safetensors file other keys."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    renamed = {key if key == "__metadata__" else pattern.format(key): entry for key, entry in header.items()}
    text = json.dumps(renamed).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def forget(metadata: Path, entries: list[tuple[str, str, str]]) -> None:
    """Take the entries of a file, or of one key in it, out of the metadata of DCP, chunks and places alike."""
    root = pickle.loads(metadata.read_bytes())
    lost = {
        index
        for index, place in root.storage_data.items()
        for file, _, key in entries
        if place.relative_path == file and index.fqn in (key or index.fqn)
    }
    for index in lost:
        del root.storage_data[index]
    gone = {(index.fqn, tuple(index.offset)) for index in lost if index.offset is not None}
    for key, entry in list(root.state_dict_metadata.items()):
        if hasattr(entry, "chunks"):
            entry.chunks = [chunk for chunk in entry.chunks if (key, tuple(chunk.offsets)) not in gone]
        elif any(index.fqn == key for index in lost):
            del root.state_dict_metadata[key]
    metadata.write_bytes(pickle.dumps(root))


def names(causes: tuple[Cause, ...]) -> list[str]:
    return [cause.name for cause in causes]


# ---------------------------------------------------------------- its own


def test_every_cause_has_a_fixture_and_words() -> None:
    assert len(CAUSES) >= 12
    for name, known in CAUSES.items():
        table = CLAIMS[name]
        assert table.get("case") or table.get("real") or table.get("cases"), name
        assert all((known.summary, known.sentence, known.do, known.why, known.see)), name
        assert all(fixture.get("says") for fixture in (*table.get("case", ()), *table.get("real", ()))), name
        assert set(known.over) <= CAUSES.keys()
    assert {path.stem for path in (REPOSITORY / "fixtures" / "causes").iterdir()} == CAUSES.keys()


@pytest.mark.parametrize(("name", "case", "says"), own_cases())
def test_it_fires_on_its_own_case(name: str, case: Case, says: str, tmp_path: Path) -> None:
    depth = Depth(case.table.get("depth", "files"))
    report = with_causes(run_rules(open_case(case, tmp_path / "case", depth), RULES.values(), depth))
    assert names(report.causes) == [name], [f"{item.code} {item.title}" for item in report.diagnostics]
    check_sentence(report.causes[0], says)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize(("name", "table"), real_ones())
def test_it_fires_on_a_real_checkpoint(name: str, table: dict[str, Any], tmp_path: Path) -> None:
    for depth in (table.get("depth", "files"), "data"):
        report = ckptlint.check(edited(table, tmp_path / depth), depth=depth)
        (part,) = report.checkpoints
        assert names(part.causes) == [name], [f"{item.code} {item.title}" for item in report.diagnostics]
        if depth == table.get("depth", "files"):
            check_sentence(part.causes[0], table["says"])


def check_sentence(cause: Cause, says: str) -> None:
    assert says in cause.sentence, cause.sentence
    assert not {"{", "["} & set(cause.sentence.translate(str.maketrans("", "", "{}[]")))
    assert ".codes}" not in cause.sentence and "()" not in cause.sentence and "  " not in cause.sentence
    assert {code for code in RULES if code in cause.sentence} <= set(cause.codes)
    assert len(cause.findings) > 1
    assert max(item.severity for item in cause.findings) > Severity.INFO


WORDS = "".join(f'{name} = "x"\n' for name in ("summary", "sentence", "do", "why", "see"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{WORDS}[find.a]\ncodes = ["GEO004", "GEO999"]', "find.a.codes has 'GEO999', which is not a rule"),
        (f'{WORDS}[find.a]\ncodes = "GEO004"', "find.a.codes is 'GEO004'"),
        (f'{WORDS}[find.a]\nkinds = ["part"]', "find.a.codes is missing"),
        (f'{WORDS}[find]\n[also.a]\ncodes = []\nkinds = ["part", 2]', "also.a.kinds[1] is 2"),
        (f'{WORDS}[find.a]\ncodes = []\nsame = ["key"]', "find.a.same[0] is 'key'"),
        (f'{WORDS}[find]\n[never.a]\ncodes = []\nother = ["rank"]', "never.a.other[0] is 'rank'"),
        (f'{WORDS}[find.a]\ncodes = []\nseverity = "warn"', "find.a.severity is 'warn'"),
        (f"{WORDS}[find.a]\ncodes = []\nleast = true", "find.a.least is True"),
        (f"{WORDS}[find.a]\ncodes = []\nkind = []", "find.a.kind is no entry that is known"),
        (f"{WORDS}[find]\n[finds]", "finds is no entry that is known"),
        (f"{WORDS}find = 1", "find is 1"),
        (f'{WORDS}name = "y"\n[find]', "name is no entry that is known"),
        (WORDS, "find is missing"),
        ("find = [", ""),
    ],
)
def test_a_wrong_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^cause\.toml: {re.escape(said)}"):
        read_cause("cause.toml", text)


@cache
def texts(path: Path) -> set[str]:
    """The strings that a module writes out."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_kind_that_a_cause_asks_for_is_one_that_its_rules_give() -> None:
    shared = list((REPOSITORY / "ckptlint" / "analysis" / "chunks").glob("*.py"))
    for known in CAUSES.values():
        for clause in (*known.find.values(), *known.also.values(), *known.never.values()):
            own = [path for code in clause.codes for path in (REPOSITORY / "rules").glob(f"{code.lower()}_*.py")]
            assert set(clause.kinds) <= set().union(*map(texts, own + shared)), (known.name, clause)


# ---------------------------------------------------------------- and no other


def test_claimed_cases_exist() -> None:
    known = {f"{code}: {case.name}" for code, case in fixture_cases(REPOSITORY / "fixtures")}
    for name in CAUSES:
        assert set(CLAIMS[name].get("cases", ())) <= known


# ---------------------------------------------------------------- what matches


def report_of(*found: tuple[str, Location, str]) -> CheckpointReport:
    """A report with findings of these codes, at these places, of these kinds."""
    items = [Diagnostic(RULES[code], Finding("found", at, kind=kind), RULES[code].severity) for code, at, kind in found]
    return CheckpointReport(Checkpoint("here", "dcp"), items, passed=[*RULES])


def cause_of(name: str, over: tuple[str, ...] = (), **find: Clause) -> KnownCause:
    return KnownCause(name, "s", f"{name} in {{a.keys}}", "d", "w", "s", find, over=over)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names and sentences that some causes give for some findings."""

    def run(known: tuple[KnownCause, ...], *found: tuple[str, Location, str]) -> list[tuple[str, str]]:
        monkeypatch.setattr(causes_module, "load_causes", lambda: known)
        return [(cause.name, cause.sentence) for cause in with_causes(report_of(*found)).causes]

    return run


HOLE, OVERLAP = Clause(("GEO004",)), Clause(("GEO003",), same=("keys",))


def test_findings_on_other_keys_are_not_of_the_cause(told: Any) -> None:
    known = (cause_of("both", a=HOLE, b=OVERLAP),)
    same = (("GEO004", Location("x"), ""), ("GEO003", Location("x"), ""), ("GEO004", Location("y"), ""))
    assert told(known, *same) == [("both", "both in x")]
    assert told(known, ("GEO004", Location("x"), ""), ("GEO003", Location("y"), "")) == []


def test_ranks_are_those_named_and_those_of_files(told: Any) -> None:
    known = (cause_of("rank", a=HOLE, b=Clause(("PAY006",), same=("ranks",))),)
    hole = ("GEO004", Location("x", ranks=(3,)), "")
    assert told(known, hole, ("PAY006", Location(file="__3_0.distcp"), "")) == [("rank", "rank in x")]
    assert told(known, hole, ("PAY006", Location(file="__2_0.distcp"), "")) == []


def test_of_two_causes_of_one_finding_none_is_told_but_the_more_specific(told: Any) -> None:
    findings = (("GEO004", Location("x"), ""), ("GEO004", Location("y"), ""), ("GEO003", Location("x"), ""))
    holes, both = cause_of("holes", a=HOLE), cause_of("both", a=HOLE, b=OVERLAP)
    assert told((holes, both), *findings) == []
    assert told((holes, cause_of("both", ("holes",), a=HOLE, b=OVERLAP)), *findings) == [("both", "both in x")]


def test_one_finding_or_notes_alone_have_no_cause(told: Any) -> None:
    known = (cause_of("holes", a=HOLE), cause_of("notes", a=Clause(("GEO005", "EXP003"))))
    assert told(known, ("GEO004", Location("x"), "")) == []
    assert told(known, ("GEO005", Location("x"), ""), ("EXP003", Location("x"), "")) == []


def test_a_kind_that_is_not_asked_for_does_not_count(told: Any) -> None:
    known = (cause_of("kinds", a=Clause(("GEO004",), kinds=("no entry",), least=2)),)
    two = (("GEO004", Location("x"), "no entry"), ("GEO004", Location("y"), ""))
    assert told(known, *two) == []
    assert told(known, *two, ("GEO004", Location("z"), "no entry")) == [("kinds", "kinds in x and z")]


def test_a_clause_may_be_about_one_rank_alone(told: Any) -> None:
    holes = (("GEO004", Location("x", ranks=(1,)), ""), ("GEO004", Location("y", ranks=(2,)), ""))
    assert told((cause_of("one", a=Clause(("GEO004",), ranks=1)),), *holes) == []
    assert told((cause_of("two", a=Clause(("GEO004",), ranks=2)),), *holes) == [("two", "two in x and y")]


def test_parts_of_a_sentence_that_name_nothing_are_left_out() -> None:
    holes = [("GEO004", Location(key, ranks=(rank,)), "no entry") for key, rank in (("x", 1), ("y", 2))]
    (cause,) = with_causes(report_of(*holes)).causes
    assert cause.sentence == (
        "ranks 1 and 2 never saved: the metadata uses no file from there, and part of x and y is missing (GEO004)"
    )


# ---------------------------------------------------------------- where it is said

LOST = "megatron_moe_ep_offset_lost/iter_0000010"


def test_ignored_and_known_findings_have_no_cause(tmp_path: Path) -> None:
    assert ckptlint.check(REAL / LOST, ignore=["EXP003"]).checkpoints[0].causes == ()
    earlier = tmp_path / "earlier.json"
    report = ckptlint.check(REAL / LOST)
    earlier.write_text(REPORTERS["json"](report, Style()))
    assert ckptlint.check(REAL / LOST, baseline=earlier).checkpoints[0].causes == ()
    assert report.exit_code == 1 and report.counts == {"error": 1, "warning": 1, "info": 5}


def test_without_the_rules_that_could_speak_against_it_a_cause_is_not_told() -> None:
    hole = REAL / "fsdp2_4r_hole"
    assert names(ckptlint.check(hole, select=["GEO", "OBJ", "PAY"]).checkpoints[0].causes) == [
        "rank-saved-without-part"
    ]
    assert ckptlint.check(hole, select=["GEO"]).checkpoints[0].causes == ()
    assert ckptlint.check(hole, depth="metadata").checkpoints[0].causes == ()


def test_json_names_the_findings_of_a_cause() -> None:
    document = json.loads(REPORTERS["json"](ckptlint.check(REAL / LOST), Style()))
    (part,) = document["checkpoints"]
    (cause,) = part["causes"]
    found = [part["findings"][number] for number in cause["findings"]]
    assert [item["fingerprint"] for item in found] == cause["fingerprints"]
    assert sorted({item["code"] for item in found}) == cause["codes"]
    assert {"GEO004", "OBJ001", "EXP003"} <= set(cause["codes"])
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((REPOSITORY / "ckptlint" / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)


def test_a_text_report_begins_with_the_cause_and_folds_what_it_explains() -> None:
    report = ckptlint.check(REAL / LOST)
    text = REPORTERS["full"](report, Style())
    assert text.index("cause: ranks 0 and 1") < text.index("  --> error GEO004") < text.index("= do: ")
    path, *lines = text.splitlines()  # a path of any length stays whole, to be copied
    assert path.endswith(LOST) and "error[GEO004]" not in text and max(map(len, lines)) <= 80
    verbose = REPORTERS["full"](report, Style(verbose=True))
    assert verbose.index("cause: ranks 0 and 1") < verbose.index("error[GEO004]")


def test_a_cause_of_one_group_leaves_it_in_full() -> None:
    text = REPORTERS["full"](ckptlint.check(REAL / "fsdp2_4r_hole"), Style())
    assert text.index("cause: rank 2") < text.index("error[GEO004]") and "--> error" not in text


@pytest.mark.parametrize("format_", ["html", "markdown", "sarif", "junit"])
def test_other_formats_say_it_too(format_: str) -> None:
    text = " ".join(REPORTERS[format_](ckptlint.check(REAL / LOST), Style()).split())
    assert "the expert-parallel offset was lost" in text


@pytest.mark.parametrize("format_", ["concise", "github", "gitlab", "statistics"])
def test_formats_of_one_line_for_each_finding_leave_it_out(format_: str) -> None:
    assert "the expert-parallel offset was lost" not in REPORTERS[format_](ckptlint.check(REAL / LOST), Style())
