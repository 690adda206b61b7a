"""`ckptlint completion`, and what the shell offers for an incomplete rule (codes, names, families) or job (axes).

Imports no rule.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptlint.errors import ConfigError
from ckptlint.storage.writing import write_whole

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SCRIPTS = {
    "bash": "~/.local/share/bash-completion/completions/ckptlint",
    "fish": "~/.config/fish/completions/ckptlint.fish",
    "zsh": "~/.zshrc",
}
"""Shell -> the file of the user that it reads: a script of its own, or for zsh the user's settings.

Source: bash-completion 2 (README, `BASH_COMPLETION_USER_DIR`); fish-shell, "Where to put completions"
"""


@click.command()
@click.argument("shell", type=click.Choice([*_SCRIPTS]), default=lambda: Path(os.environ.get("SHELL", "bash")).name)
@click.option("--install", is_flag=True, help="Write it where the shell reads it at its start, and say where that is.")
def completion(shell: str, install: bool) -> None:
    """Print the script that completes commands, options and rule codes in a shell.

    Without a name it is for the shell that you use.
    """
    from click.shell_completion import get_completion_class

    from ckptlint.commands.main import cli

    made = get_completion_class(shell)
    assert made is not None
    script = made(cli, {}, "ckptlint", "_CKPTLINT_COMPLETE").source()
    if not install:
        click.echo(script)
        return
    place = Path(_SCRIPTS[shell]).expanduser()
    line = '(( $+commands[ckptlint] )) && eval "$(ckptlint completion zsh)"'
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if shell != "zsh":
            write_whole(place.resolve(), script)  # a user keeps such files elsewhere, and links to them
        elif not place.exists() or line not in place.read_text(encoding="utf-8", errors="replace"):
            with place.open("a", encoding="utf-8") as file:  # the rest of it is the user's
                file.write(f"\n{line}\n")
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {error.strerror}") from None
    click.echo(f"{place} completes ckptlint in every {shell} that starts from now on", err=True)


def one_rule(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The rules whose code or name starts like this."""
    from click.shell_completion import CompletionItem

    names = ((code, name) if code.startswith(incomplete.upper()) else (name, code) for code, name in rule_names())
    return [CompletionItem(word, help=alias) for word, alias in names if word.lower().startswith(incomplete.lower())]


def one_page(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same, and the causes."""
    from click.shell_completion import CompletionItem

    names = sorted(path.stem for place in _places() for path in Path(place, "causes").glob("*.toml"))
    causes = [CompletionItem(name, help="cause") for name in names if name.startswith(incomplete.lower())]
    return one_rule(context, parameter, incomplete) + causes


def many_rules(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same after the last comma of a list, and families and `ALL`."""
    from click.shell_completion import CompletionItem

    before, comma, last = incomplete.rpartition(",")
    families = [
        word for word in (*dict.fromkeys(code[:3] for code, _ in rule_names()), "ALL") if word.startswith(last.upper())
    ]
    items = [*(CompletionItem(word, help="all of them") for word in families), *one_rule(context, parameter, last)]
    return [CompletionItem(f"{before}{comma}{item.value}", help=item.help) for item in items]


def rule_names() -> Iterator[tuple[str, str]]:
    """Code and name of each rule, as their modules state them.

    >>> {("GEO004", "coverage-hole"), ("LIV101", "shard-shape-mismatch")} <= {*rule_names()}
    True
    """
    for module in sorted(path for place in _places() for path in Path(place).glob("[a-z]*_*.py")):
        yield from re.findall(r'^@rule\(\s*"(\w+)",\s*"([\w-]+)"', module.read_text(encoding="utf-8"), re.MULTILINE)


def _places() -> list[str]:
    """Where the rules lie."""
    spec = find_spec("ckptlint.rules")
    return list((spec.submodule_search_locations if spec else None) or [str(Path(__file__).parents[2] / "rules")])


def jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The axes of `ckptlint plan --to` after the last comma, and files that may hold a function."""
    from click.shell_completion import CompletionItem

    before, comma, last = incomplete.rpartition(",")
    axes = ("dp", "dp_replicate", "tp", "pp", "vpp", "ep", "etp", "cp")
    items = [CompletionItem(f"{before}{comma}{axis}=") for axis in axes if axis.startswith(last)]
    return items or [CompletionItem(incomplete, type="file")]
