"""`ckptlint explain` and `ckptlint rules`: what is judged. Imports no rule for the completion of their names."""

from __future__ import annotations

import shutil

import click

from ckptlint.commands.completion import one_rule
from ckptlint.commands.shared import ENVIRONMENT


@click.command(context_settings=ENVIRONMENT)
@click.argument("rule", shell_complete=one_rule)
def explain(rule: str) -> None:
    """Print the page of a rule: what it checks, why it matters, usual causes, how to fix."""
    from ckptlint.lint.rule_page import page
    from ckptlint.lint.selection import find_rule
    from ckptlint.lint.settings_file import every_rule, find

    click.echo(page(find_rule(every_rule(find()), rule), min(shutil.get_terminal_size().columns, 100)))


@click.command(context_settings=ENVIRONMENT)
@click.option(
    "--format", "format_", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True
)
def rules(format_: str) -> None:
    """List all rules: code, name, severity, the depth they need, what they find.

    A rule without a depth runs at the one that `check` reads by default.
    """
    from ckptlint.lint.rule_page import catalogue
    from ckptlint.lint.settings_file import every_rule, find

    click.echo(catalogue(every_rule(find()), format_, shutil.get_terminal_size().columns))
