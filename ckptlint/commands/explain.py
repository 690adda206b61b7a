"""`ckptlint explain` and `ckptlint rules`: what is judged. Imports no rule for the completion of their names."""

from __future__ import annotations

import shutil

import click

from ckptlint.commands.completion import one_page
from ckptlint.commands.shared import ENVIRONMENT


@click.command(context_settings=ENVIRONMENT)
@click.argument("rule", shell_complete=one_page)
def explain(rule: str) -> None:
    """Print the page of a rule, or of a cause: what it is, why it matters, how to fix it."""
    from ckptlint.lint.causes import load_causes
    from ckptlint.lint.rule_page import cause_page, page
    from ckptlint.lint.selection import find_rule
    from ckptlint.lint.settings_file import every_rule, find_settings

    width = min(shutil.get_terminal_size().columns, 100)
    causes = {known.name: known for known in load_causes()}
    cause = causes.get(rule.lower())
    click.echo(cause_page(cause, width) if cause else page(find_rule(every_rule(find_settings()), rule, causes), width))


@click.command(context_settings=ENVIRONMENT)
@click.option(
    "--format", "format_", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True
)
def rules(format_: str) -> None:
    """List all rules: code, name, severity, the depth they need, what they find.

    A rule without a depth runs at the default depth of `check`.
    """
    from ckptlint.lint.rule_page import catalogue
    from ckptlint.lint.settings_file import every_rule, find_settings

    click.echo(catalogue(every_rule(find_settings()), format_, shutil.get_terminal_size().columns))
