"""What several commands need: their options and settings, how they print and write, the checkpoints they describe.

Made light: `ckptlint check --help` and the shell's completion import this module.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckptlint.commands.completion import many_rules
from ckptlint.errors import CkptlintError
from ckptlint.lint.settings.options import CHECK_OPTIONS, GROUPS, CheckOption
from ckptlint.progress import COUNTED, listening
from ckptlint.storage.writing import write_whole

if TYPE_CHECKING:
    from ckptlint.comparing.sides import OpenedCheckpoint
    from ckptlint.model import Checkpoint
    from ckptlint.reporters.style import Style

ENVIRONMENT: dict[str, Any] = {"auto_envvar_prefix": "CKPTLINT", "help_option_names": ["-h", "--help"]}
"""Context settings of a command whose options can stand in the environment."""

_PATIENCE = 1.0  # seconds without a line of progress
_TICK = 0.1  # seconds between two of its states


# ---------------------------------------------------------------- options and settings


def check_options(but: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command the options of `check`, in the order of their table, without a few perhaps."""

    options = [_option(option) for option in reversed(CHECK_OPTIONS) if option.name not in but]
    # click reads a stack of decorators upward
    return lambda function: reduce(lambda decorated, option: option(decorated), options, function)


def _option(option: CheckOption) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The click option for a row of `CHECK_OPTIONS`."""
    is_number = option.minimum is not None and not option.counts
    said: dict[str, Any] = {} if option.default is None else {"default": option.default, "show_default": True}
    return click.option(
        *([f"-{option.short}"] if option.short else []),
        f"--{option.name}",
        option.variable,
        type=click.Choice(option.choices) if option.choices else click.IntRange(option.minimum) if is_number else None,
        metavar=option.metavar,
        is_flag=option.is_flag or None,
        count=option.counts,
        multiple=option.repeats,
        envvar=option.environment,
        shell_complete=many_rules if option.metavar == "RULES" else None,
        help=option.help or None,
        **said,
    )


class WithSettings(click.Command):
    """A command whose defaults come from the settings file; `ctx.obj` has the settings and the paths."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options below headings; those that `check` does not have come first."""
        group_of = {f"--{option.name}": option.group for option in CHECK_OPTIONS} | {"--help": "settings"}
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in ("", *GROUPS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections[group_of.get(parameter.opts[-1], "")].append(record)
        for group, records in sections.items():
            if records:
                with formatter.section(GROUPS.get(group, "Options")):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            self.settle(ctx, args)
        return super().parse_args(ctx, args)

    def settle(self, ctx: click.Context, args: list[str]) -> None:
        """Find out what is checked and which file has the settings, before click asks for defaults."""
        from ckptlint.lint.settings.files import Settings, find_settings, read_settings

        given, _, _ = self.make_parser(ctx).parse_args([*args])
        values = {}
        for parameter in self.params:
            if parameter.name in ("config", "isolated", "paths", "path", "run_dir"):
                value, source = parameter.consume_value(ctx, given)
                is_said = source != ParameterSource.DEFAULT
                values[parameter.name] = parameter.type_cast_value(ctx, value) if is_said else None
        paths: list[str] = []
        for path in values.get("paths") or filter(None, [values.get("run_dir") or values.get("path")]):
            # bytes that are no text stay what they are, as in arguments
            paths += filter(None, os.fsdecode(sys.stdin.buffer.read()).splitlines()) if path == "-" else [path]
        if values["config"] and values["isolated"]:
            raise click.UsageError("--config and --isolated contradict each other")
        if values["config"]:
            settings = read_settings(values["config"], paths)
        else:
            settings = Settings() if values["isolated"] else find_settings(paths)
        ctx.obj = settings, paths
        # an option beats the environment, which beats these
        ctx.default_map = {
            option.variable: settings.options[option.name]
            for option in CHECK_OPTIONS
            if option.name in settings.options
        }


# ---------------------------------------------------------------- printing and writing


def terminal_style(color: str, ascii_only: bool, per_rule: int, quiet: int, verbose: bool) -> Style:
    """What standard output can show, and what the options say about it."""
    from ckptlint.reporters.style import Style

    is_terminal = sys.stdout.isatty()
    chosen = color == "always"
    if color == "auto":
        wanted = bool(os.environ.get("FORCE_COLOR")) or (is_terminal and not _is_dumb())
        chosen = wanted and not os.environ.get("NO_COLOR")
    encoding = (sys.stdout.encoding or "").lower()
    width = min(max(_columns(is_terminal), 60), 120)
    return Style(chosen, ascii_only or "utf" not in encoding or _is_dumb(), width, per_rule, quiet, verbose)


def _columns(is_terminal: bool) -> int:
    """How wide the output may be: as the terminal is, or as COLUMNS says; 80 without either."""
    if not is_terminal and "COLUMNS" not in os.environ:
        return 80
    from shutil import get_terminal_size  # it loads all that can pack files

    return get_terminal_size((80, 24)).columns


def _is_dumb() -> bool:
    """Whether the terminal says that it can show plain text alone."""
    return os.environ.get("TERM") == "dumb"


def show_text(text: str) -> None:
    """Write to standard output, now."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(*sentences: object) -> None:
    """Sentences on standard error, a line each, in which no name is a command of a CI runner."""
    from ckptlint.model.text import inert

    for sentence in sentences:
        click.echo(inert(f"ckptlint: {sentence}"), err=True)


OUTPUT = click.Path(dir_okay=False, path_type=Path)
"""The type of an option that names a file to write; its command calls `checked_target` before it reads anything."""


def write_file(path: Path, text: str) -> None:
    """`write_whole` for a command; raises CkptlintError where the file cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise CkptlintError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def progress(off: bool) -> Iterator[None]:
    """A line on standard error, on a terminal that is not dumb, after a second; it is gone at the end."""
    if off or not sys.stderr.isatty() or _is_dumb():
        yield
        return
    line = _Line()
    try:
        with listening(line.show):
            yield
    finally:
        line.write("")


class _Line:
    """How far a command is: which step and checkpoint of how many, what is read of it, and how long it may take."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int]] = {}  # unit -> done and total, what holds the others first
        self.phase: object = None
        self.started = self.phase_started = self.shown = time.monotonic()
        self.text = ""

    def show(self, unit: str, done: int, total: int) -> None:
        """Bring the line up to date."""
        inner = COUNTED.index(unit) if unit in COUNTED else len(COUNTED)
        self.places = {held: place for held, place in self.places.items() if held in COUNTED[:inner]}
        if total > 1 or unit not in COUNTED:
            self.places[unit] = done, total
        now, outermost = time.monotonic(), next(iter(self.places), "")
        phase = outermost if outermost in COUNTED else (unit, total)
        if self.phase != phase:
            self.phase, self.phase_started = phase, now
        if self.places and now - self.started >= _PATIENCE and now - self.shown >= _TICK:
            self.shown = now
            self.write(self._text(now - self.phase_started))

    def _text(self, seconds: float) -> str:
        from ckptlint.model.text import human_bytes, human_duration

        share, size, texts = 0.0, 1.0, []
        for unit, (done, total) in self.places.items():
            share += size * min(done / max(total, 1), 1)
            size /= max(total, 1)
            if unit in COUNTED:
                texts.append(f"{unit.removesuffix('s')} {min(done + 1, total):,} of {total:,}")
            elif unit == "bytes":
                texts.append(f"{human_bytes(done)} of {human_bytes(total)}")
            else:
                texts.append(f"{done:,} of {total:,} {unit}")
        left = [f"{human_duration(seconds / share - seconds)} left"] if 0 < share < 1 and seconds >= _PATIENCE else []
        return f"{share:4.0%}  {', '.join(texts + left)}"

    def write(self, text: str) -> None:
        """Put a text in place of the one before."""
        text = text[: _columns(True) - 1]
        if text != self.text:
            sys.stderr.write(f"\r{text.ljust(len(self.text))}" + ("" if text else "\r"))
            sys.stderr.flush()
            self.text = text


# ---------------------------------------------------------------- checkpoints to describe


def opened_or_exit(path: str, files: bool = False, partial: bool = False) -> list[OpenedCheckpoint]:
    """`comparing.sides.open_side`; exit 1 where a checkpoint is unsafe or unreadable."""
    from ckptlint.comparing.sides import open_side
    from ckptlint.errors import CheckpointError

    try:
        return open_side(path, files, partial)
    except CheckpointError as error:
        say(*str(error).splitlines())
        sys.exit(1)


def described_or_exit(path: str, files: bool = False, partial: bool = False) -> dict[str, Checkpoint]:
    """The checkpoints that a path means, by their place below it; exit 1 where one is unsafe or unreadable."""
    from ckptlint.comparing.sides import by_place

    return by_place(opened_or_exit(path, files, partial))
