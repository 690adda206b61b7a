"""What a user asks of a check, as one value: the command line, the API, `latest`, `watch` and `live` hold one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ckptlint.depth import Depth
from ckptlint.errors import ConfigError
from ckptlint.lint.report import FailOn
from ckptlint.lint.settings import selection
from ckptlint.lint.settings.files import Settings, every_rule, key_ignores
from ckptlint.lint.settings.ignores import KeyIgnore
from ckptlint.lint.settings.options import LOOSENING, percent, tokens
from ckptlint.rule import Rule, Severity
from ckptlint.storage.paths import is_url

if TYPE_CHECKING:
    from ckptlint.payload.reading import ReadOptions

Purpose = Literal["report", "job", "resume", "delete"]
"""What a verdict is for: to be read, also while a job runs, or to choose the step to resume from or those to delete."""

AUTO = "auto"
"""The depth that reads every byte where that is cheap, and looks at files otherwise."""

CHEAP_BYTES = 512 * 1024**2
"""What a reader takes about two seconds for, from a local disk."""

FAILS: dict[Purpose, FailOn] = {"report": "warning", "job": "warning", "resume": "error", "delete": "warning"}
"""What fails a step where nobody says another: to resume from an older step costs days, to delete a good one more."""


class Request(NamedTuple):
    """What to judge, and how.

    Attributes:
        paths: the checkpoints, step folders and run folders.
        rules: those that run, with their severities and options.
        fail_on: the lowest severity that fails the run.
        all_steps: every step of a run folder, not only the newest.
        expect: the reference to compare each checkpoint with; without one the rules that need it are not run.
        before: the step to compare each checkpoint with, in place of the one before it in its run.
        reading: how to read the payload, at depths `headers` and `data`; None at others.
        ignores: findings that do not count, by key.
        baseline: an earlier JSON report, whose findings do not count.
        jobs: checkpoints that are read at the same time, in processes of their own; None for one per processor, 8 at
            most.
        lenient: the options that leave rules out or make errors less severe.
        settings: the settings file that all this comes from, to be named in the report; "" without one.
    """

    paths: tuple[str, ...]
    rules: tuple[Rule, ...]
    depth: Depth = Depth.FILES
    fail_on: FailOn = "warning"
    all_steps: bool = False
    expect: str | None = None
    before: str | None = None
    reading: ReadOptions | None = None
    ignores: tuple[KeyIgnore, ...] = ()
    baseline: str | None = None
    jobs: int | None = None
    settings: str = ""
    lenient: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, options: Mapping[str, Any], settings: Settings, paths: Iterable[str], purpose: Purpose = "report"
    ) -> Request:
        """The request that options of `check` make, and a settings file where they say nothing: None or an empty list.

        A step is chosen by fixed severities: neither options nor settings make an error less than that. What may be
        deleted is decided by all rules with their own options; both look at files at least. Raises ConfigError where an
        option or a setting is wrong, or two contradict each other.
        """
        paths = tuple(paths)
        given = {name: value for name, value in options.items() if value is not None and value != () and value != []}
        fail_on: FailOn = given.get("fail-on") or settings.fail_on or FAILS[purpose]
        if fail_on not in get_args(FailOn):
            raise ConfigError(f"there is no level {fail_on!r} to fail on: {', '.join(get_args(FailOn))}")
        chooses = purpose in ("resume", "delete")
        if chooses:
            fail_on = min(fail_on, FAILS[purpose], key=get_args(FailOn).index)
        said = {**settings.options, **given}
        if purpose == "delete":
            said = {name: value for name, value in said.items() if name not in LOOSENING}
            settings = settings._replace(ignores=(), rule_options={})
        if "before" in said and said.get("all-steps"):
            raise ConfigError("--before names one step, and --all-steps compares each with the one before it")
        depth, draws = said.get("depth", AUTO), False
        if depth not in [AUTO, *Depth]:
            raise ConfigError(f"there is no depth {depth!r}: {AUTO}, {', '.join(Depth)}")
        if depth == AUTO:
            depth, draws = _cheap_depth(paths, purpose, said)
        depth = Depth(depth)
        if chooses and not depth.looks_at_files:
            depth = Depth.FILES
        known = every_rule(settings, paths)
        ignores = key_ignores(settings, known)
        if wrong := [text for text in said.get("severity", ()) if "=" not in text]:
            raise ConfigError(f"--severity takes RULE=LEVEL, not {wrong[0]!r}")
        rules = selection.select(
            known,
            chosen=tokens(said.get("select", ())),
            extended=tokens(said.get("extend-select", ())),
            ignored=tokens(said.get("ignore", ())),
            severities=[text.split("=", 1) for text in said.get("severity", ())],
            depth=depth,
            has_reference="expect" in said,
            only_raise=chooses,
        )
        return cls(
            paths,
            rules,
            depth,
            fail_on,
            said.get("all-steps", False),
            said.get("expect"),
            said.get("before"),
            _reading(depth, said, draws),
            () if said.get("no-ignores") else ignores,
            said.get("baseline"),
            said.get("jobs"),
            settings.file,
            tuple(_lenient(said, known, rules)),
        )

    def only(self, path: str) -> Request:
        """The same of one step."""
        return self._replace(paths=(path,), all_steps=False)


def _lenient(said: Mapping[str, Any], known: Iterable[Rule], rules: Iterable[Rule]) -> Iterator[str]:
    """The options that leave out rules, or that make the errors of one less severe."""
    yield from (name for name in ("select", "ignore") if said.get(name))
    severities = {rule.code: rule.severity for rule in rules}
    if any(severities.get(rule.code, rule.severity) < rule.severity == Severity.ERROR for rule in known):
        yield "severity"


def _cheap_depth(paths: tuple[str, ...], purpose: Purpose, said: Mapping[str, Any]) -> tuple[Depth, bool]:
    """The depth where nobody says one, and whether numbers are drawn from some records.

    A job is not kept waiting. From a store only those numbers are drawn on which a choice of a step rests.
    """
    from ckptlint.loaders.discover import holds_at_most

    if "sample" in said or CHEAP_BYTES <= 0:
        return Depth.FILES, False
    all_steps = purpose == "delete" or said.get("all-steps", False)
    if purpose != "job" and holds_at_most(paths, all_steps, CHEAP_BYTES):
        return Depth.DATA, False
    return Depth.FILES, purpose in ("resume", "delete") or not any(map(is_url, paths))


def _reading(depth: Depth, said: Mapping[str, Any], draws: bool) -> ReadOptions | None:
    """How to read the payload, by the options; None at depths that do not, unless numbers are drawn there."""
    sample, jobs, hashes = said.get("sample"), said.get("jobs"), said.get("expect-hashes")
    if hashes is not None and (sample is not None or not depth.reads_all):
        raise ConfigError("--expect-hashes needs --depth data" + (" without --sample" if depth.reads_all else ""))
    if not depth.opens_records:
        if sample is not None:
            raise ConfigError("--sample needs --depth headers or --depth data")
        if not draws:
            return None
    from ckptlint.payload.reading import default_reading

    share = None if sample is None else percent(str(sample))
    reading = default_reading(Depth.HEADERS if draws else depth, share, said.get("seed"))
    if hashes is not None:
        from ckptlint.payload.integrity import expected_sums

        reading = replace(reading, sums=expected_sums(hashes))
    return replace(reading, jobs=jobs or reading.jobs, draws=draws)
