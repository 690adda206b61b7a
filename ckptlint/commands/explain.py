"""`ckptlint explain` and `ckptlint rules`: what is judged. Imports no rule for the completion of their names."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import click

from ckptlint.commands.completion import one_page
from ckptlint.commands.shared import ENVIRONMENT, say

if TYPE_CHECKING:
    from ckptlint.rule import Rule

_config = click.option(
    "--config", metavar="FILE", envvar="CKPTLINT_CONFIG", help="Read settings from this file and look for no other."
)


@click.command(context_settings=ENVIRONMENT)
@click.argument("rule", shell_complete=one_page)
@_config
def explain(rule: str, config: str | None) -> None:
    """Print the page of a rule, or of a cause: what it is, why it matters, how to fix it."""
    from ckptlint.lint.pages.rule_page import page_of

    click.echo(page_of(_known(config), rule, min(shutil.get_terminal_size().columns, 100)))


@click.command(context_settings=ENVIRONMENT)
@click.option(
    "--format", "format_", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True
)
@click.argument("named", nargs=-1, metavar="[RULES]...")
@_config
def rules(format_: str, named: tuple[str, ...], config: str | None) -> None:
    """List all rules: code, name, severity, the depth they need, what they find.

    The causes follow. RULES are codes, prefixes such as GEO, or names: then only these.

    A rule without a depth runs at the default depth of `check`.
    """
    from ckptlint.lint.pages.rule_page import catalogue, cause_listing
    from ckptlint.lint.settings.selection import matching

    known = _known(config)
    codes = matching(known, named or ["ALL"])
    chosen = [rule for rule in known if rule.code in codes]
    width = shutil.get_terminal_size().columns
    click.echo(catalogue(chosen, format_, width))
    if format_ == "table":
        if not named:
            click.echo(cause_listing(width) + "\n")
        click.echo("`ckptlint explain CODE` prints the page of a rule, or of a cause by its name.")


def _known(config: str | None) -> tuple[Rule, ...]:
    """All rules as the settings have them."""
    from ckptlint.lint.settings.files import every_rule, find_settings, read_settings

    settings = read_settings(config) if config else find_settings()
    say(*settings.unread)
    return every_rule(settings)
