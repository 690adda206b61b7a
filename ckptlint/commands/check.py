"""`ckptlint check`, and `ckptlint config`, which shows its settings.

What judges is imported when there is something to check: the options of `check` are asked for by `--help`, by the
shell's completion and by other commands.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckptlint.commands.shared import (
    ENVIRONMENT,
    WithSettings,
    check_options,
    progress,
    show_text,
    tell,
    terminal_style,
    write_file,
)
from ckptlint.depth import Depth
from ckptlint.lint.options import CHECK_OPTIONS, FORMATS, SUFFIXES, percent, tokens

if TYPE_CHECKING:
    from ckptlint.lint.report import Report
    from ckptlint.lint.settings_file import Settings
    from ckptlint.payload.reading import Reading
    from ckptlint.reporters.style import Style
    from ckptlint.rule import Rule

SOURCE = "ckptlint.source"
"""In the context: what reads checkpoints in place of `lint.run.opened`."""

TAKES_REPORT = "ckptlint.takes_report"
"""In the context: what is given the report in place of standard output."""


class NoPath(click.UsageError):
    """The options of `check` are right, and no path was given."""


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("paths", nargs=-1, metavar="PATH...")
@check_options()
def check(paths: tuple[str, ...], **options: Any) -> None:
    """Check checkpoints: a checkpoint folder, a step folder, or a run folder (its newest step).

    With `-` for a PATH, paths come from standard input, one per line. Each option can also stand in ckptlint.toml
    (depth = "headers") or in the environment (CKPTLINT_DEPTH=headers).

    Exit codes: 0 passed, 1 findings, 2 wrong use, 3 nothing to check, 4 verdict incomplete.
    """
    format_, statistics = options["format_"], options["statistics"]
    if statistics and format_ != "full":
        raise click.UsageError(f"--statistics prints a table of its own: leave out --format {format_}")
    outputs = [_output(value) for value in options["output"]]
    judge = judging(options)
    if not paths:
        raise NoPath("which checkpoint? name a PATH; `ckptlint --help` shows how")
    _, checked = click.get_current_context().obj
    with progress(options["no_progress"]):
        report = replace(judge(checked, all_steps=options["all_steps"]), command=_command_line())
    style = terminal_style(
        options["color"], options["ascii_"], options["max_per_rule"], options["quiet"], options["verbose"]
    )
    shown = "statistics" if statistics else format_
    if takes := click.get_current_context().meta.get(TAKES_REPORT):
        takes(report)
        shown = ""
    _emit(report, style, shown, outputs)
    sys.exit(report.exit_code)


def _command_line() -> str:
    """The command that this process runs, without what URLs may hold of secrets."""
    from ckptlint.storage.paths import shown as shown_path

    return shlex.join(["ckptlint", *map(shown_path, sys.argv[1:])])


def judging(options: Mapping[str, Any]) -> Callable[..., Report]:
    """`lint.run.run` with all that the options of `check` and the settings say, but for the paths and `all_steps`.

    Raises:
        UsageError, ConfigError: an option or a setting is wrong.
    """
    from ckptlint.lint import run as pipeline
    from ckptlint.lint import selection
    from ckptlint.lint.settings_file import every_rule, key_ignores

    context = click.get_current_context()
    settings, checked = context.obj
    level = _level()
    for sentence in settings.unread:
        tell(sentence)
    known = every_rule(settings, checked)
    ignores = key_ignores(settings, known)
    depth = Depth(options["depth"])
    rules = selection.select(
        known,
        chosen=tokens(options["select"]),
        extended=tokens(options["extend_select"]),
        ignored=tokens(options["ignore"]),
        severities=[_pair(value) for value in options["severity"]],
        depth=depth,
        has_reference=options["expect"] is not None,
    )
    return partial(
        pipeline.run,
        rules=rules,
        depth=depth,
        fail_on=level,
        expect=options["expect"],
        reading=_reading(depth, options["sample"], options["seed"], options["jobs"]),
        ignores=() if options["no_ignores"] else ignores,
        baseline=options["baseline"],
        source=context.meta.get(SOURCE),
        jobs=options["jobs"],
        settings=settings.file,
    )


def _level() -> Any:
    """The lowest severity that fails the run; of three options that say so the one from the strongest source."""
    context = click.get_current_context()
    for source in (
        ParameterSource.COMMANDLINE,
        ParameterSource.ENVIRONMENT,
        ParameterSource.DEFAULT_MAP,
        ParameterSource.DEFAULT,
    ):
        said = {
            name: value
            for name in ("strict", "exit_zero", "fail_on")
            if (value := context.params[name]) and _source(context, name) == source
        }
        if len(said.keys() & {"strict", "exit_zero"}) == 2:
            raise click.UsageError("--strict and --exit-zero contradict each other: give one of them")
        if said:
            return "warning" if "strict" in said else "never" if "exit_zero" in said else said["fail_on"]
    raise AssertionError("--fail-on has a default")


def _source(context: click.Context, name: str) -> ParameterSource:
    """Where the value of an option comes from; `watch` calls `check` with values of its own."""
    above = context.parent.get_parameter_source(name) if context.parent else None
    return context.get_parameter_source(name) or above or ParameterSource.DEFAULT


def _pair(value: str) -> tuple[str, str]:
    name, equals, level = value.partition("=")
    if not equals:
        raise click.UsageError(f"--severity takes RULE=LEVEL, not {value!r}")
    return name, level


def _reading(depth: Depth, sample: str | None, seed: int | None, jobs: int | None) -> Reading | None:
    """How to read the payload; None at depths that do not."""
    if not depth.opens_records:
        if sample is not None:
            raise click.UsageError("--sample needs --depth headers or --depth data")
        return None
    from ckptlint.payload.reading import default_reading

    reading = default_reading(depth, None if sample is None else percent(sample), seed)
    return replace(reading, jobs=jobs or reading.jobs)


def _output(value: str) -> tuple[str, Path]:
    """The format and file of an `--output`."""
    name, equals, path = value.partition("=")
    if equals and name in FORMATS:
        return name, Path(path)
    suffix = Path(value).suffix
    if suffix not in SUFFIXES:
        raise click.UsageError(f"which format is {value}? end its name in one of {', '.join(SUFFIXES)}, or give F=FILE")
    return SUFFIXES[suffix], Path(value)


_WITHOUT_SETTINGS = ("concise", "gitlab")
"""Formats that have no place for the name of the settings file, each line or item of theirs being a finding."""


def _emit(report: Report, style: Style, format_: str, outputs: list[tuple[str, Path]]) -> None:
    from ckptlint.reporters import REPORTERS

    whole = replace(style, color=False, quiet=0)  # a file is whole, whatever -q says
    if format_ and (text := REPORTERS[format_](report, style)):
        show_text(text)
    if report.settings and format_ in _WITHOUT_SETTINGS and not style.quiet:
        tell(f"settings from {report.settings}")
    for name, path in outputs:
        write_file(path, REPORTERS[name](report, whole))


# ---------------------------------------------------------------- ckptlint config


@click.command(context_settings={**ENVIRONMENT, "ignore_unknown_options": True})
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND PATHS OF check]")
def config(format_: str, arguments: tuple[str, ...]) -> None:
    """Show the settings of `check`, and where each comes from: default, file, environment or option."""
    from ckptlint.lint.settings_file import every_rule, key_ignores

    context = check.make_context("check", [*arguments], parent=click.get_current_context().parent)
    found, checked = context.obj
    for sentence in found.unread:
        tell(sentence)
    known = every_rule(found, checked)
    key_ignores(found, known)
    sources = {
        ParameterSource.DEFAULT: "default",
        ParameterSource.DEFAULT_MAP: "file",
        ParameterSource.ENVIRONMENT: "environment",
    }
    rows = {
        option.name: (context.params[option.variable], sources.get(_source(context, option.variable), "option"))
        for option in CHECK_OPTIONS
    }
    click.echo(_in_force(found, rows, known, format_))


def _in_force(settings: Settings, rows: Mapping[str, tuple[Any, str]], rules: Sequence[Rule], format_: str) -> str:
    """The settings as a table or as JSON.

    Args:
        rows: long option -> value and where it came from.
    """
    shown = dict(rows)
    shown |= {
        f"rules.{rule.name}.{name}": (value, "file" if name.replace("-", "_") in rule.values else "default")
        for rule in rules
        for name, value in rule.options.items()
    }
    ignores = [{"keys": keys, "rules": [*codes], "reason": reason} for keys, codes, reason in settings.ignores]
    if format_ == "json":
        document = {
            "file": settings.file or None,
            "settings": {name: {"value": value, "from": source} for name, (value, source) in shown.items()},
            "per-key-ignores": ignores,
            "plugins": settings.plugins,
        }
        return json.dumps(document, indent=2)
    from tabulate import tabulate

    cells = [(name, json.dumps(value), source) for name, (value, source) in shown.items()]
    lines = [tabulate(cells, ("setting", "value", "from"), disable_numparse=True), ""]
    lines += [f"ignored: {item['keys']} {', '.join(item['rules'])}: {item['reason']}" for item in ignores]
    lines += [f"plug-in: {name}" for name in settings.plugins]
    return "\n".join([*lines, f"file: {settings.file or 'none'}"])
