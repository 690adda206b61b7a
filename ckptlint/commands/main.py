"""The command line: parse, call, print, exit. Nothing else in ckptlint prints.

Heavy modules are imported inside the commands, so that `--version`, `--help` and completion stay fast.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource as _Source

from ckptlint._version import __version__
from ckptlint.commands.completion import many_rules, one_rule
from ckptlint.errors import CkptlintError, ConfigError, NothingToCheckError

if TYPE_CHECKING:
    from ckptlint.lint.report import Report
    from ckptlint.model import Checkpoint
    from ckptlint.payload.reader import Reading
    from ckptlint.reporters.style import Style
    from ckptlint.rule import Depth

FORMATS = ("full", "concise", "json", "json-v1", "sarif", "junit", "github", "gitlab", "markdown", "html")
_SOURCE = "ckptlint.source"  # in the context: what reads checkpoints in place of `pipeline.opened`
_ENVIRONMENT: dict[str, Any] = {"auto_envvar_prefix": "CKPTLINT", "help_option_names": ["-h", "--help"]}


class _NoPath(click.UsageError):
    """The options of `check` are right, and no path was given."""


class _DefaultGroup(click.Group):
    """A group in which `ckptlint PATH` means `ckptlint check PATH`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if args and args[0] not in own and args[0] not in self.commands:
            args = ["check", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # the reader of the pipe went away; click would make that exit 1, which claims findings
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)


class _WithSettings(click.Command):
    """A command whose defaults come from the settings file; `ctx.obj` has the settings and the paths."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            self.settle(ctx, args)
        return super().parse_args(ctx, args)

    def settle(self, ctx: click.Context, args: list[str]) -> None:
        """Find out what is checked and which file has the settings, before click asks for defaults."""
        from ckptlint.commands import settings

        given, _, _ = self.make_parser(ctx).parse_args([*args])
        values = {}
        for parameter in self.params:
            if parameter.name in ("config", "isolated", "paths", "path", "run_dir"):
                value, source = parameter.consume_value(ctx, given)
                values[parameter.name] = None if source == _Source.DEFAULT else parameter.type_cast_value(ctx, value)
        paths = _paths(values.get("paths") or filter(None, [values.get("run_dir") or values.get("path")]))
        if values["config"] and values["isolated"]:
            raise click.UsageError("--config and --isolated contradict each other")
        if values["config"]:
            found = settings.read(values["config"], self.params, paths)
        else:
            found = settings.Settings() if values["isolated"] else settings.find(self.params, paths)
        ctx.obj = found, paths
        parameters = settings.long_options(self.params)
        ctx.default_map = {str(parameters[name].name): value for name, value in found.options.items()}


@click.group(cls=_DefaultGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", "-V", prog_name="ckptlint")
def cli() -> None:
    """The linter for saved distributed checkpoints.

    `ckptlint PATH` checks a checkpoint; it is short for `ckptlint check PATH`. A folder that is named like a command
    is reached as ./NAME.

    Exit codes: 0 passed, 1 findings, 2 wrong use, 3 nothing to check, 4 verdict incomplete.
    """


@cli.command(cls=_WithSettings, context_settings=_ENVIRONMENT)
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option(
    "--select",
    multiple=True,
    metavar="RULES",
    shell_complete=many_rules,
    help="Only these rules: codes, prefixes, names, ALL.",
)
@click.option("--extend-select", multiple=True, metavar="RULES", shell_complete=many_rules, help="These rules too.")
@click.option("--ignore", multiple=True, metavar="RULES", shell_complete=many_rules, help="Not these rules.")
@click.option("--severity", multiple=True, metavar="RULE=LEVEL", help="Another severity for a rule.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info", "never"]),
    default="error",
    show_default=True,
    help="Lowest severity that gives exit 1.",
)
@click.option("--strict", is_flag=True, help="Short for --fail-on warning.")
@click.option("--exit-zero", is_flag=True, help="Short for --fail-on never; unsafe or unread input still fails.")
@click.option(
    "--depth",
    type=click.Choice(["metadata", "files", "headers", "data"]),
    default="files",
    show_default=True,
    help="How much to read: the metadata only; names and sizes of payload files; each record's header; every byte.",
)
@click.option("--sample", metavar="P%", help="Read a random part of the records, at depths headers and data.")
@click.option("--seed", type=click.IntRange(min=0), help="Of --sample; printed when not given.")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads that read files.  [default: min(8, CPUs)]")
@click.option("--no-progress", is_flag=True, help="No progress bar on a terminal.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    default="full",
    show_default=True,
    envvar="CKPTLINT_FORMAT",
    help="What goes to stdout.",
)
@click.option(
    "--output", multiple=True, metavar="[F=]FILE", help="Also write a report; the format by suffix, or given as F=."
)
@click.option("--max-per-rule", type=click.IntRange(min=0), default=5, show_default=True, help="Groups shown; 0 = all.")
@click.option("--statistics", is_flag=True, help="A table instead of findings: count, code, name, tensors.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option(
    "--ascii", "ascii_only", is_flag=True, envvar="CKPTLINT_ASCII", help="Draw chunk maps with plain characters."
)
@click.option("--all-steps", is_flag=True, help="Every step of a run folder, not only the newest.")
@click.option(
    "--expect", metavar="REF", help="Compare with a manifest, safetensors, a model folder or another checkpoint."
)
@click.option("--baseline", metavar="FILE", help="Hide the findings of this earlier JSON report.")
@click.option("--config", metavar="FILE", help="This settings file, instead of the nearest.")
@click.option("--isolated", is_flag=True, help="No settings file.")
@click.option("--no-ignores", is_flag=True, help="Show what the ignores of the settings would hide.")
@click.option("-q", "--quiet", count=True, help="-q findings only, -qq exit code only.")
@click.option("-v", "--verbose", is_flag=True, help="Also notes, rules that did not run and why, times.")
def check(
    paths: tuple[str, ...],
    select: tuple[str, ...],
    extend_select: tuple[str, ...],
    ignore: tuple[str, ...],
    severity: tuple[str, ...],
    fail_on: str,
    strict: bool,
    exit_zero: bool,
    depth: Any,
    sample: str | None,
    seed: int | None,
    jobs: int | None,
    no_progress: bool,
    format_: str,
    output: tuple[str, ...],
    max_per_rule: int,
    statistics: bool,
    color: str,
    ascii_only: bool,
    all_steps: bool,
    expect: str | None,
    baseline: str | None,
    config: str | None,
    isolated: bool,
    no_ignores: bool,
    quiet: int,
    verbose: bool,
) -> None:
    """Check checkpoints: a checkpoint folder, a step folder, or a run folder (its newest step).

    `-` reads paths from standard input, one per line.
    """
    from ckptlint.commands.settings import every_rule, key_ignores
    from ckptlint.lint import run as pipeline
    from ckptlint.lint import selection

    settings, checked = click.get_current_context().obj
    level = _level()
    if statistics and format_ != "full":
        raise click.UsageError(f"--statistics is a text of its own and does not go with --format {format_}")
    for sentence in settings.unread:
        click.echo(f"ckptlint: {sentence}", err=True)
    outputs = [_output(value) for value in output]
    known = every_rule(settings, checked)
    ignores = key_ignores(settings, known)
    rules = selection.select(
        known,
        chosen=_tokens(select),
        extended=_tokens(extend_select),
        ignored=_tokens(ignore),
        severities=[_pair(value) for value in severity],
        depth=depth,
        has_reference=expect is not None,
    )
    reading = _reading(depth, sample, seed, jobs)
    if not paths:
        raise _NoPath("which checkpoint? give a PATH, see `ckptlint --help`")
    with _progress(no_progress):
        report = pipeline.run(
            checked,
            rules,
            depth=depth,
            fail_on=level,
            all_steps=all_steps,
            expect=expect,
            reading=reading,
            ignores=() if no_ignores else ignores,
            baseline=baseline,
            source=click.get_current_context().meta.get(_SOURCE),
        )
    style = _style(color, ascii_only, max_per_rule, quiet, verbose)
    _emit(report, style, "statistics" if statistics else format_, outputs)
    sys.exit(report.exit_code)


@cli.command(context_settings=_ENVIRONMENT)
@click.argument("rule", shell_complete=one_rule)
def explain(rule: str) -> None:
    """The page of a rule: what it checks, why, usual causes, how to fix."""
    from ckptlint.commands.settings import every_rule, find
    from ckptlint.lint.rule_page import page
    from ckptlint.lint.selection import find_rule

    click.echo(page(find_rule(every_rule(find(check.params)), rule), min(shutil.get_terminal_size().columns, 100)))


@cli.command(context_settings=_ENVIRONMENT)
@click.option(
    "--format", "format_", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True
)
def rules(format_: str) -> None:
    """All rules: code, name, severity, the depth they need, what they find."""
    from ckptlint.commands.settings import every_rule, find
    from ckptlint.lint.rule_page import catalogue

    click.echo(catalogue(every_rule(find(check.params)), format_, shutil.get_terminal_size().columns))


@cli.command("config", context_settings={**_ENVIRONMENT, "ignore_unknown_options": True})
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND PATHS OF check]")
def show_config(format_: str, arguments: tuple[str, ...]) -> None:
    """The settings in force for `check`, and where each came from: default, file, environment or option."""
    from ckptlint.commands import settings

    context = check.make_context("check", [*arguments], parent=click.get_current_context().parent)
    found, checked = context.obj
    for sentence in found.unread:
        click.echo(f"ckptlint: {sentence}", err=True)
    known = settings.every_rule(found, checked)
    settings.key_ignores(found, known)
    sources = {_Source.DEFAULT: "default", _Source.DEFAULT_MAP: "file", _Source.ENVIRONMENT: "environment"}
    rows = {
        name: (context.params[str(option.name)], sources.get(_source(context, str(option.name)), "option"))
        for name, option in settings.long_options(check.params).items()
    }
    click.echo(settings.in_force(found, rows, known, format_))


@cli.command(context_settings=_ENVIRONMENT)
@click.argument("path")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
def manifest(path: str, output: Path | None) -> None:
    """The tensors of a checkpoint as JSON, to compare others with: `ckptlint OTHER --expect FILE`.

    Exit codes: 0 written, 1 unsafe or unreadable, 3 nothing there.
    """
    from ckptlint.loaders.reference import manifest_text

    text = manifest_text(_described(path).values())
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        _write(output, text)


@cli.command(context_settings=_ENVIRONMENT)
@click.argument("path")
@click.argument("pattern", metavar="[GLOB]", required=False)
@click.option("--tree", is_flag=True, help="By dotted name, layers that look the same folded.")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with plain characters.")
def show(path: str, pattern: str | None, tree: bool, format_: str, color: str, ascii_only: bool) -> None:
    """What is in a checkpoint, without a verdict: tensors, shapes, dtypes, how they are cut, objects, topology.

    With a GLOB the tensors whose name matches, and how their chunks lie.

    Exit codes: 0 shown, 1 unsafe or unreadable, 2 no tensor matches, 3 nothing there.
    """
    from ckptlint.commands.show import as_json, as_text

    if tree and format_ == "json":
        raise click.UsageError("--tree is a form of text")
    checkpoints = list(_described(path, files=True, partial=True).values())
    style = _style(color, ascii_only, 0, 0, False)
    _print(as_json(checkpoints, pattern) if format_ == "json" else as_text(checkpoints, pattern, tree, style))


@cli.command(context_settings=_ENVIRONMENT)
@click.argument("old")
@click.argument("new")
@click.option("--layout", is_flag=True, help="Also how tensors are cut and in which files they lie.")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
def diff(old: str, new: str, layout: bool, format_: str, color: str) -> None:
    """The keys, shapes and dtypes that differ between two checkpoints; resharding is no difference.

    Exit codes: 0 the same, 1 different, or unsafe or unreadable, 3 nothing there.
    """
    from ckptlint.commands import diff as comparison

    found = comparison.diff(_described(old), _described(new), layout)
    style = _style(color, False, 0, 0, False)
    _print(comparison.as_json(found) if format_ == "json" else comparison.as_text(found, style))
    sys.exit(found.exit_code)


@cli.command(context_settings=_ENVIRONMENT)
@click.argument("path")
@click.argument("fqn")
@click.option("--axis", type=click.IntRange(min=0), help="One axis.  [default: those that are cut]")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["dot", "mermaid", "graphml", "json"]),
    default="dot",
    show_default=True,
)
def graph(path: str, fqn: str, axis: int | None, format_: str) -> None:
    """The chunk graph of one tensor: per axis the intervals that chunks occupy, joined where one ends and one starts.

    Exit codes: 0 drawn, 1 unsafe or unreadable, 2 no such tensor or axis, 3 nothing there.
    """
    from ckptlint.commands.graph import FORMATS as DRAWINGS
    from ckptlint.commands.graph import drawing
    from ckptlint.commands.show import no_tensor

    checkpoints = list(_described(path, partial=True).values())
    holder = next((ckpt for ckpt in checkpoints if fqn in ckpt.tensors), None)
    if holder is None:
        raise ConfigError(no_tensor(checkpoints, fqn))
    _print(DRAWINGS[format_](drawing(holder, holder.tensors[fqn], axis)))


@cli.command(cls=_WithSettings, context_settings=_ENVIRONMENT)
@click.argument("run_dir")
@click.option(
    "--interval", type=click.FloatRange(min=0), default=30, show_default=True, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="Lint what is finished, and end with the worst exit code.")
@click.option("--exec", "command", metavar="CMD", help="Run for each step that does not give 0; see below.")
@click.pass_context
def watch(
    context: click.Context, /, run_dir: str, interval: float, once: bool, command: str | None, **options: Any
) -> None:
    """Lint each step of a running job once, as soon as it is finished, with the options of `check`.

    CMD finds CKPTLINT_STEP_PATH, CKPTLINT_EXIT_CODE and CKPTLINT_REPORT (a JSON file) in its environment. A report that
    --output names is that of the last step. Ends on Ctrl-C (130).
    """
    from tempfile import TemporaryDirectory

    from ckptlint.commands.watch import events, is_vanishing

    with suppress(_NoPath):  # a wrong option ends the watch now, not in an hour
        context.invoke(check, paths=(), **options)
    codes: list[int] = []
    with TemporaryDirectory(prefix="ckptlint-") as folder:
        for event in events(run_dir, interval, once):
            if event.text:
                click.echo(f"ckptlint: {event.text}", err=True)
            if event.kind == "unread":
                codes.append(4)
                continue
            step = f"{run_dir.rstrip('/') or '/'}/{event.step}"
            report = Path(folder, f"{len(codes)}.json")
            code = _lint_step(context, step, report if command else None, options)
            if code and is_vanishing(step, event):
                click.echo(f"ckptlint: {event.step} is being removed: what was found in it does not count", err=True)
                continue
            codes.append(code)
            if code and command:
                _execute(command, step, code, report)
    if not codes:
        raise NothingToCheckError(f"nothing to check: no step of {run_dir} is finished")
    sys.exit(next((code for code in (1, 4, 3) if code in codes), 0))


watch.params += [option for option in check.params if option.name not in ("paths", "all_steps")]


@cli.command(cls=_WithSettings, context_settings=_ENVIRONMENT)
@click.argument("path")
@click.option("--every-node", is_flag=True, help="Every node reads all of the payload, past its page cache.")
@click.option("--digest", is_flag=True, help="Short for --depth data.")
@click.option(
    "--settle",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="Wait so long for all nodes to see the same files.",
)
@click.pass_context
def live(context: click.Context, /, path: str, every_node: bool, digest: bool, settle: float, **options: Any) -> None:
    """Check a checkpoint with all ranks of a job, with the options of `check`: every node must see the same files.

    Run as `torchrun --nproc-per-node N -m ckptlint live PATH`, on one node or many. At depths headers and data the
    payload is shared out. Rank 0 prints; every rank ends with the same exit code. One process alone is a job too.
    """
    from ckptlint.live.shared_check import joined

    with joined(every_node, settle) as job:
        if digest:
            options["depth"] = "data"
        if options["jobs"] is None:
            options["jobs"] = job.threads
        if options["seed"] is None:
            options["seed"] = job.seed
        options["no_progress"] |= job.rank > 0
        context.meta[_SOURCE] = job.source
        context.obj = context.obj[0], [path]
        try:
            context.invoke(check, paths=(path,), **options)
        except SystemExit as ended:
            job.tell(ended.code if isinstance(ended.code, int) else 4)
            raise
        except CkptlintError:
            job.tell(4)
            raise


live.params += [option for option in check.params if option.name not in ("paths", "all_steps")]


def main() -> None:
    """Run the command line; every error that ckptlint itself raises is one sentence, with the exit code of its kind."""
    if sys.stdout is None:  # closed by whoever started this: the exit code alone is wanted
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        _main()
    except OSError as error:  # stdout or stderr lies on a full disk; a file that is read says so where it fails
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for what is still in the buffers
        os.dup2(nowhere, sys.stdout.fileno())
        try:
            click.echo(f"ckptlint: the output cannot be written: {error.strerror or error}", err=True)
        except OSError:
            os.dup2(nowhere, sys.stderr.fileno())
        sys.exit(4)


def _main() -> None:
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort as error:
        if error.__cause__ is not None and error.__cause__.args:  # how far a reading of the payload came
            click.echo(f"ckptlint: {error.__cause__}", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ConfigError as error:
        click.echo(f"ckptlint: {error}", err=True)
        sys.exit(2)
    except NothingToCheckError as error:
        click.echo(f"ckptlint: {error}", err=True)
        sys.exit(3)
    except CkptlintError as error:
        click.echo(f"ckptlint: {error}", err=True)
        sys.exit(4)
    except KeyboardInterrupt:
        sys.exit(130)


def _source(context: click.Context, name: str) -> _Source:
    """Where the value of an option comes from; `watch` calls `check` with values of its own."""
    above = context.parent.get_parameter_source(name) if context.parent else None
    return context.get_parameter_source(name) or above or _Source.DEFAULT


def _level() -> Any:
    """The lowest severity that fails the run; of three options that say so the one from the strongest source."""
    context = click.get_current_context()
    for source in (_Source.COMMANDLINE, _Source.ENVIRONMENT, _Source.DEFAULT_MAP, _Source.DEFAULT):
        said = {
            name: value
            for name in ("strict", "exit_zero", "fail_on")
            if (value := context.params[name]) and _source(context, name) == source
        }
        if len(said.keys() & {"strict", "exit_zero"}) == 2:
            raise click.UsageError("--strict and --exit-zero contradict each other")
        if said:
            return "warning" if "strict" in said else "never" if "exit_zero" in said else said["fail_on"]
    raise AssertionError("--fail-on has a default")


def _tokens(values: Iterable[str]) -> list[str]:
    return [token for value in values for token in value.split(",")]


def _pair(value: str) -> tuple[str, str]:
    name, equals, level = value.partition("=")
    if not equals:
        raise click.UsageError(f"--severity takes RULE=LEVEL, not {value!r}")
    return name, level


def _reading(depth: Depth, sample: str | None, seed: int | None, jobs: int | None) -> Reading | None:
    """How to read the payload; None at depths that do not."""
    if depth != "headers" and depth != "data":
        if sample is not None:
            raise click.UsageError("--sample needs --depth headers or --depth data")
        return None
    from dataclasses import replace

    from ckptlint.commands.settings import percent
    from ckptlint.payload.reader import default_reading

    reading = default_reading(depth, None if sample is None else percent(sample), seed)
    return replace(reading, jobs=jobs or reading.jobs)


@contextmanager
def _progress(off: bool) -> Iterator[None]:
    """A bar on standard error, on a terminal only, once a phase has taken a second."""
    if off or not sys.stderr.isatty():
        yield
        return
    from ckptlint.commands.progress_bar import Bar
    from ckptlint.progress import listening

    bar = Bar()
    try:
        with listening(bar.show):
            yield
    finally:
        bar.close()


def _output(value: str) -> tuple[str, Path]:
    """The format and file of an `--output`."""
    from ckptlint.reporters import SUFFIXES

    name, equals, path = value.partition("=")
    if equals and name in FORMATS:
        return name, Path(path)
    suffix = Path(value).suffix
    if suffix not in SUFFIXES:
        raise click.UsageError(f"which format is {value}? use one of {', '.join(SUFFIXES)} or F=FILE")
    return SUFFIXES[suffix], Path(value)


def _paths(paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        # bytes that are no text stay what they are, as in arguments
        lines = os.fsdecode(sys.stdin.buffer.read()).splitlines() if path == "-" else [path]
        found += [line for line in lines if line or path != "-"]
    return found


def _style(color: str, ascii_only: bool, per_rule: int, quiet: int, verbose: bool) -> Style:
    from ckptlint.reporters.style import Style

    is_terminal = sys.stdout.isatty()
    chosen = {"always": True, "never": False}.get(color)
    if chosen is None:
        chosen = not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or is_terminal)
    encoding = (sys.stdout.encoding or "").lower()
    width = min(max(shutil.get_terminal_size((80, 24)).columns, 60), 120)
    return Style(chosen, ascii_only or "utf" not in encoding, width, per_rule, quiet, verbose)


def _emit(report: Report, style: Style, format_: str, outputs: list[tuple[str, Path]]) -> None:
    from dataclasses import replace

    from ckptlint.reporters import REPORTERS

    if text := REPORTERS[format_](report, style):
        sys.stdout.write(text)
        sys.stdout.flush()
    for name, path in outputs:
        _write(path, REPORTERS[name](report, replace(style, color=False, quiet=0)))  # a file is whole, whatever -q says


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _described(path: str, files: bool = False, partial: bool = False) -> dict[str, Checkpoint]:
    """The checkpoints that a path means, by their place below it; exit 1 where one is unsafe or unreadable.

    Args:
        files: look at the payload files.
        partial: take one whose metadata describes only part of the save.
    """
    from dataclasses import replace

    from ckptlint.loaders.checkpoint import find, open_checkpoint
    from ckptlint.loaders.reference import obstacle

    checkpoints = [open_checkpoint(folder, files) for folder in find(path)]
    sentences = [obstacle(replace(ckpt, partial="") if partial else ckpt) for ckpt in checkpoints]
    if any(sentences):
        click.echo("\n".join(f"ckptlint: {sentence}" for sentence in sentences if sentence), err=True)
        sys.exit(1)
    # of text, since a URL is no path; cut back to whole names
    above = os.path.commonprefix([f"{ckpt.path}/" for ckpt in checkpoints]).rpartition("/")[0]  # noqa: RUF071
    return {ckpt.path[len(above) :].strip("/"): ckpt for ckpt in checkpoints}


def _lint_step(context: click.Context, step: str, report: Path | None, options: dict[str, Any]) -> int:
    """The exit code of `check`; what it could not write or read is no reason to stop watching."""
    if report is not None:
        options = options | {"output": (*options["output"], f"json={report}")}
    from dataclasses import replace

    context.obj = replace(context.obj[0], unread=()), [step]  # said once, at the start
    try:
        context.invoke(check, paths=(step,), **options)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 4
    except ConfigError:
        raise
    except CkptlintError as error:
        click.echo(f"ckptlint: {error}", err=True)
        return 4
    raise AssertionError("check ends in an exit code")


def _execute(command: str, step: str, code: int, report: Path) -> None:
    """Run the user's command; what it is about is in its environment, where no name can be taken for a command."""
    import subprocess

    about = {
        "CKPTLINT_STEP_PATH": step,
        "CKPTLINT_EXIT_CODE": str(code),
        "CKPTLINT_REPORT": str(report) if report.exists() else "",
    }
    # the shell is the user's own: CMD comes from the command line, like a recipe of make
    ended = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, env=os.environ | about, check=False)  # noqa: S602
    if ended.returncode:
        click.echo(f"ckptlint: --exec ended in {ended.returncode}", err=True)


def _write(path: Path, text: str) -> None:
    """A whole file or none: written under another name, then renamed. What is there and no plain file is kept."""
    is_special = path.is_symlink() or (path.exists() and not path.is_file())  # /dev/stdout, a pipe
    unfinished = path if is_special else path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if not is_special:
            unfinished.replace(path)
    except OSError as error:
        if not is_special:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        raise CkptlintError(f"{path} cannot be written: {error.strerror}") from None
