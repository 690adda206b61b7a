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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckptlint.commands.shared import (
    ENVIRONMENT,
    WithSettings,
    check_options,
    progress,
    say,
    show_text,
    terminal_style,
    write_file,
)
from ckptlint.lint.settings.options import CHECK_OPTIONS, FORMATS, SUFFIXES
from ckptlint.storage.writing import checked_target

if TYPE_CHECKING:
    from ckptlint.lint.report import Report
    from ckptlint.lint.run import Opener
    from ckptlint.lint.settings.files import Settings
    from ckptlint.lint.settings.request import Purpose, Request
    from ckptlint.rule import Rule


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("paths", nargs=-1, metavar="PATH...")
@check_options()
def check(paths: tuple[str, ...], **options: Any) -> None:
    """Check checkpoints: a checkpoint folder, a step folder, or a run folder (its newest step).

    With `-` for a PATH, paths come from standard input, one per line. Each option can also stand in ckptlint.toml
    (depth = "headers") or in the environment (CKPTLINT_DEPTH=headers).

    Exit codes: 0 passed, 1 findings, 2 wrong use, 3 nothing to check, 4 verdict incomplete.
    """
    emit = emitter(options)
    request = requested(options)
    if not paths:
        raise click.UsageError("which checkpoint? name a PATH; `ckptlint --help` shows how")
    from ckptlint.lint.run import Interrupted

    try:
        with progress(options["no_progress"]):
            report = judge(request)
    except Interrupted as stopped:
        emit(stopped.report)
        raise
    emit(report)
    sys.exit(report.exit_code)


def requested(options: Mapping[str, Any], purpose: Purpose = "report") -> Request:
    """What the options of `check`, variable -> value, and the settings ask for; raises UsageError and ConfigError."""
    from ckptlint.lint.settings.request import Request

    settings, checked = click.get_current_context().obj
    level = _level()
    say(*settings.unread)
    given = {option.name: options[option.variable] for option in CHECK_OPTIONS if option.variable in options}
    return Request.of(given | {"fail-on": level}, settings, checked, purpose)


def judge(request: Request, source: Opener | None = None) -> Report:
    """`lint.run.run`, with the command that asked."""
    from ckptlint.lint.run import run
    from ckptlint.storage.paths import shown  # without what URLs may hold of secrets

    return replace(run(request, source), command=shlex.join(["ckptlint", *map(shown, sys.argv[1:])]))


def emitter(
    options: Mapping[str, Any], prints: bool = True, looks_for_folders: bool = True
) -> Callable[[Report], None]:
    """What prints a report, unless somebody else does, and writes the files of `--output`; raises UsageError."""
    format_ = options["format_"]
    if options["statistics"]:
        if format_ != "full":
            raise click.UsageError(f"--statistics prints a table of its own: leave out --format {format_}")
        format_ = "statistics"
    _, checked = click.get_current_context().obj
    outputs = [_output(value, checked, looks_for_folders) for value in options["output"]]
    style = terminal_style(*(options[name] for name in ("color", "ascii_", "max_per_rule", "quiet", "verbose")))

    def emit(report: Report) -> None:
        from ckptlint.reporters import REPORTERS

        if prints and (text := REPORTERS[format_](report, style)):
            show_text(text)
        is_named = format_ not in FORMATS or FORMATS[format_].names_settings
        if prints and report.settings and not is_named and not style.quiet:
            say(f"settings from {report.settings}")
        whole = style._replace(color=False, quiet=0)  # a file is whole, whatever -q says
        for name, path in outputs:
            write_file(path, REPORTERS[name](report, whole))

    return emit


def _level() -> Any:
    """The lowest severity that fails the run; of three options that say so the one from the strongest source.

    None where nobody says one.
    """
    context = click.get_current_context()
    for source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
        said = {
            name: value
            for name in ("strict", "exit_zero", "fail_on")
            if (value := context.params.get(name)) and context.get_parameter_source(name) == source
        }
        if len(said.keys() & {"strict", "exit_zero"}) == 2:
            raise click.UsageError("--strict and --exit-zero contradict each other: use one of them")
        if said:
            return "warning" if "strict" in said else "never" if "exit_zero" in said else said["fail_on"]
    return None


def _output(value: str, checked: Sequence[str], looks_for_folder: bool) -> tuple[str, Path]:
    """The format and file of an `--output`."""
    name, equals, path = value.partition("=")
    if not equals or name not in FORMATS:
        name, path = SUFFIXES.get(Path(value).suffix, ""), value
    if not name:
        raise click.UsageError(f"--output {value} has no known suffix: use one of {', '.join(SUFFIXES)}, or F=FILE")
    return name, checked_target(Path(path), checked, looks_for_folder)


@click.command(context_settings={**ENVIRONMENT, "ignore_unknown_options": True})
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND PATHS OF check]")
def config(format_: str, arguments: tuple[str, ...]) -> None:
    """Show the settings of `check`, and where each comes from: default, file, environment or option."""
    from ckptlint.depth import Depth
    from ckptlint.lint.settings.files import every_rule, key_ignores
    from ckptlint.lint.settings.request import FAILS
    from ckptlint.payload.reading import default_reading

    context = check.make_context("check", [*arguments], parent=click.get_current_context().parent)
    settings, checked = context.obj
    say(*settings.unread)
    known = every_rule(settings, checked)
    key_ignores(settings, known)
    sources: dict[ParameterSource | None, str] = {
        ParameterSource.DEFAULT: "default",
        ParameterSource.DEFAULT_MAP: "file",
        ParameterSource.ENVIRONMENT: "environment",
    }
    rows = {}
    by_default = {"fail-on": context.invoke(_level) or FAILS["report"], "jobs": default_reading(Depth.DATA).jobs}
    for option in CHECK_OPTIONS:
        source = sources.get(context.get_parameter_source(option.variable), "option")
        value = context.params[option.variable]
        rows[option.name] = (by_default.get(option.name) if value is None else value, source)
    click.echo(_in_force(settings, rows, known, format_))


def _in_force(settings: Settings, rows: Mapping[str, tuple[Any, str]], rules: Sequence[Rule], format_: str) -> str:
    """The settings, long option -> value and where it came from, as a table or as JSON."""
    shown = {**rows} | {
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
    from ckptlint.model.text import table

    cells = [(name, "none" if value is None else json.dumps(value), source) for name, (value, source) in shown.items()]
    lines = [table(cells, ("setting", "value", "from")), ""]
    lines += [f"ignored: {item['keys']} {', '.join(item['rules'])}: {item['reason']}" for item in ignores]
    lines += [f"plug-in: {name}" for name in settings.plugins]
    return "\n".join([*lines, f"file: {settings.file or 'none'}"])
