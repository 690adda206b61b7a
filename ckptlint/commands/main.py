"""The command line: parse, call, print, exit. Nothing else in ckptlint prints.

A command's module is imported when the command is asked for: `--version`, `--help` and completion stay fast.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Any

import click

from ckptlint._version import __version__
from ckptlint.errors import CkptlintError, ConfigError, NothingToCheckError, OwnFileError

COMMANDS = {
    "check": "Check checkpoints: a checkpoint folder, a step folder, or a run folder (its newest step).",
    "completion": "Print the script that completes commands, options and rule codes in a shell.",
    "config": "Show the settings of `check`, and where each comes from: default, file, environment or option.",
    "deletable": "Print the paths of the steps of a run that may be deleted, and nothing else.",
    "diff": "Compare the keys, shapes and dtypes of two checkpoints, however each is sharded.",
    "explain": "Print the page of a rule, or of a cause: what it is, why it matters, how to fix it.",
    "graph": "Draw the chunks of one tensor as a graph: on each dim, which intervals they cover and where one is "
    "missing.",
    "latest": "Print the path of the newest step that has no errors, and nothing else.",
    "live": "Check a checkpoint with all ranks of a job: every node must see the same files.",
    "manifest": "Write the tensors of a checkpoint as JSON, to compare others with: `ckptlint OTHER --expect FILE`.",
    "plan": "Say whether a checkpoint loads into a job of another shape, and what each rank would read.",
    "rules": "List all rules: code, name, severity, the depth they need, what they find.",
    "show": "Show what a checkpoint is and holds, without a verdict: parameters, tensors, chunks, objects, topology.",
    "watch": "Check each step of a running job once, as soon as it is finished.",
}
"""The commands, each with the first sentence of its help."""

# a command of another name is in the module of its own name
_MODULES = {"config": "check", "manifest": "show", "rules": "explain"}

_NEAR = 0.75  # how alike a word is to the command that was probably meant


def command(name: str) -> click.Command:
    """The command of this name, imported now."""
    subcommand = getattr(import_module(f"ckptlint.commands.{_MODULES.get(name, name)}"), name)
    assert isinstance(subcommand, click.Command)
    return subcommand


class _LazyGroup(click.Group):
    """A group in which `ckptlint PATH` means `ckptlint check PATH`.

    Its commands are names with a sentence of help; the one that runs, or is completed, is imported in their place.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        first = args[0] if args else ""
        if first in ("help", "version") and not os.path.lexists(first):
            args = ["--version"] if first == "version" else [*args[1:2], "--help"]
        elif first.startswith("-") and first not in known:  # the options of a command before its name
            names = [word for word in args if word in self.commands and not os.path.lexists(word)]
            args = [*names[:1], *(word for word in args if word not in names[:1])]
        if args and args[0] not in known and args[0] not in self.commands:
            from difflib import get_close_matches  # `model.text` would import numpy first

            near = [] if os.path.lexists(args[0]) else get_close_matches(args[0], self.commands, 1, _NEAR)
            if near:
                raise click.UsageError(f"there is no command or path {args[0]!r}, did you mean {near[0]}?", ctx)
            args = ["check", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(name) if name else None, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # the reader of the pipe went away; click would make that exit 1, which claims findings
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)


@click.group(
    cls=_LazyGroup,
    commands={name: click.Command(name, short_help=sentence) for name, sentence in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "--version", "-V", prog_name="ckptlint")
def cli() -> None:
    """The linter for saved distributed checkpoints.

    `ckptlint PATH` is short for `ckptlint check PATH`. Write ./NAME for a folder that has the name of a command.

    Exit codes: 0 passed, 1 findings, 2 wrong use, 3 nothing to check, 4 verdict incomplete.
    """


def main() -> None:
    """Run the command line; every error that ckptlint itself raises is one sentence, with the exit code of its kind."""
    try:
        _main()
    except OSError as error:  # stdout or stderr is on a full disk; a file that is read says so where it fails
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for what is still in the buffers
        os.dup2(nowhere, sys.stdout.fileno())
        try:
            is_gone = isinstance(
                error, FileNotFoundError
            )  # no stream says so, what asks for the working directory does
            gone = "the working directory is gone: go to a folder that is there"
            why = gone if is_gone else f"the output cannot be written: {error.strerror or error}"
            click.echo(f"ckptlint: {why}", err=True)
        except OSError:
            os.dup2(nowhere, sys.stderr.fileno())
        sys.exit(4)


def _main() -> None:
    """Run the command line; each error becomes one sentence on stderr and its exit code."""
    from ckptlint.commands.shared import say

    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort as error:
        how_far = error.__cause__ is not None and error.__cause__.args
        say(error.__cause__ if how_far else "interrupted: no answer")
        sys.exit(130)
    except click.ClickException as error:
        from ckptlint.model.text import inert, printable

        shown = io.StringIO()
        error.show(shown)
        click.echo(inert("\n".join(map(printable, shown.getvalue().split("\n")))), err=True, nl=False)
        sys.exit(2)
    except (ConfigError, NothingToCheckError, CkptlintError, OwnFileError) as error:
        say(error)
        sys.exit(2 if isinstance(error, ConfigError) else 3 if isinstance(error, NothingToCheckError) else 4)
