"""Settings files: where they are looked for, what may stand in them, and what that means for the rules.

The keys are the long options of `ckptlint check`, as `lint/settings/options.py` lists them, and four tables of its own.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptlint.errors import ConfigError
from ckptlint.lint import registry
from ckptlint.lint.report import FailOn
from ckptlint.lint.settings import selection
from ckptlint.lint.settings.ignores import KeyIgnore
from ckptlint.lint.settings.options import CHECK_OPTIONS, FORMATS, CheckOption, tokens
from ckptlint.loaders.run.folder import is_named_step, is_of_a_run
from ckptlint.model.text import nearest
from ckptlint.rule import Rule
from ckptlint.storage.local import LocalFolder
from ckptlint.storage.paths import is_url

FILE, SHARED_FILE = "ckptlint.toml", "pyproject.toml"
_TABLES = ("per-key-ignores", "plugins", "rules", "severity")
_KNOWN = {option.name: option for option in CHECK_OPTIONS if option.in_files}
_REFUSED = {"help"}.union(option.name for option in CHECK_OPTIONS if not option.in_files)
_SIZE_LIMIT = 16 * 1024**2  # bytes; a device has no end


class Settings(NamedTuple):
    """What a settings file says.

    Attributes:
        file: its path, as the user would write it; "" without one.
        options: long option of `check` -> value; lists for options that may be repeated, `severity` as RULE=LEVEL.
        ignores: (glob of keys, codes or names of rules, reason).
        rule_options: rule -> option -> value.
        plugins: packages to look for rules in.
        unread: sentences on files that were passed over because they lie inside a checked path or beside checkpoints.
    """

    file: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    ignores: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    rule_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    plugins: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def fail_on(self) -> FailOn | None:
        """The lowest severity that fails a run, if it is said; raises ConfigError for both `strict` and `exit-zero`."""
        is_strict, never_fails = self.options.get("strict"), self.options.get("exit-zero")
        if is_strict and never_fails:
            raise ConfigError(f"{self.file}: strict and exit-zero contradict each other")
        level: FailOn | None = self.options.get("fail-on")
        return "warning" if is_strict else "never" if never_fails else level


def find_settings(checked: Iterable[str] = ()) -> Settings:
    """The settings of the nearest file from the working directory upward, never of one that came with a checkpoint.

    Such a file is inside of a checked path or of a step, or in a folder that holds steps, payload or a tracker.
    In each folder `ckptlint.toml` comes before `pyproject.toml`, which counts when it has a table `[tool.ckptlint]`.

    Raises:
        ConfigError: the file cannot be read, or says something that it may not.
    """
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return Settings()
    barred = local_folders(checked)
    unread = []
    for folder in (here, *here.parents):
        for name in (FILE, SHARED_FILE):
            file = Path(os.path.relpath(folder / name, here))
            if not os.path.lexists(file):
                continue
            if _inside(file, barred):
                unread.append(f"{file} lies inside a checked path, so ckptlint did not read it for settings")
            elif is_of_a_run(LocalFolder(folder)) or any(is_named_step(above.name) for above in folder.parents):
                unread.append(f"{file} lies in a folder of checkpoints, so ckptlint did not read it; use --config FILE")
            elif (table := _table(file)) is not None:
                return _settings(file, table, tuple(unread))
    return Settings(unread=tuple(unread))


def read_settings(file: str, checked: Iterable[str] = ()) -> Settings:
    """The settings of this file; raises ConfigError as `find_settings`, and where it is checked itself or has none."""
    path = Path(file)
    if _inside(path, local_folders(checked)):
        raise ConfigError(f"{file} lies inside a checked path: ckptlint never reads settings from a checkpoint")
    table = _table(path)
    if table is None:
        raise ConfigError(f"{file} has no table [tool.ckptlint]")
    return _settings(path, table, ())


def every_rule(settings: Settings, checked: Iterable[str] = ()) -> tuple[Rule, ...]:
    """All rules, those of plug-ins too, with the options that the settings give them.

    Raises ConfigError where a plug-in cannot be used, or an option of a rule is unknown or of another type.
    """
    rules = registry.with_plugins(registry.load_rules(), settings.plugins, local_folders(checked))
    try:
        return selection.configured(rules, settings.rule_options)
    except ConfigError as error:
        raise ConfigError(f"{settings.file}, table rules: {error}") from None


def key_ignores(settings: Settings, rules: Sequence[Rule]) -> tuple[KeyIgnore, ...]:
    """The per-key ignores with their codes; raises ConfigError for an unknown rule, or one that cannot be ignored."""
    made = []
    for pattern, named, reason in settings.ignores:
        try:
            codes = frozenset[str]().union(*(selection.ignorable(rules, token) for token in named))
        except ConfigError as error:
            raise ConfigError(f"{settings.file}, per-key-ignores, {pattern!r}: {error}") from None
        made.append(KeyIgnore(pattern, codes, reason, settings.file))
    return tuple(made)


def local_folders(paths: Iterable[str]) -> tuple[Path, ...]:
    """The paths that lie on this machine, links resolved; URLs are left out."""
    return tuple(_real(path.removeprefix("file://")) for path in paths if not is_url(path) and "\0" not in path)


def _real(path: str | Path) -> Path:
    """The path with links resolved; a loop of links, which `Path.resolve` does not bear, is left as it is."""
    return Path(os.path.realpath(path))


def _inside(file: Path, folders: Iterable[Path]) -> bool:
    places = (Path(os.path.abspath(file)), _real(file))  # noqa: PTH100  a link inside a folder is inside it
    return any(place.is_relative_to(folder) for folder in folders for place in places)


def _table(file: Path) -> dict[str, Any] | None:
    """What a file says about ckptlint; None for a pyproject.toml that says nothing."""
    try:
        with file.open("rb") as source:
            data = source.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
            raise ConfigError(f"{file} is not a settings file: it has more than {_SIZE_LIMIT:,} bytes")
        document = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    if file.name != SHARED_FILE:
        return document
    table = tool.get("ckptlint") if isinstance(tool := document.get("tool"), dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{file}: tool.ckptlint must be a table")
    return table


def _settings(file: Path, table: dict[str, Any], unread: tuple[str, ...]) -> Settings:
    """The settings of a table; a key or a value that nobody knows is an error that names it."""
    name = str(file)
    options: dict[str, Any] = {}
    for key, value in table.items():
        if key == "severity":
            options[key] = _severity(name, value)
        elif key in _KNOWN:
            options[key] = _option(name, value, _KNOWN[key])
        elif key in _REFUSED:
            raise ConfigError(f"{file}: {key} cannot be set in a file")
        elif key not in _TABLES:
            near = nearest(key.replace("_", "-"), [*_KNOWN, *_TABLES])
            more = f", did you mean {near}?" if near else "; `ckptlint config` lists them"
            raise ConfigError(f"{file}: there is no setting {key!r}{more}")
    for key in options.keys() & {"baseline", "expect", "expect-hashes"}:
        options[key] = _anchored(file.parent, options[key])
    if "output" in options:
        options["output"] = [_output(file, value) for value in options["output"]]
    ignores = tuple(_ignores(name, _of_tables(name, "per-key-ignores", table)))
    rules, plugins = _of_tables(name, "rules", table), tuple(_texts(name, "plugins", table.get("plugins", [])))
    return Settings(name, options, ignores, rules, plugins, unread)


def _option(file: str, value: Any, option: CheckOption) -> Any:
    """The value of an option, which must have the TOML type that the option asks for."""
    if option.repeats:
        return _texts(file, option.name, [value] if isinstance(value, str) else value)
    if option.minimum is not None:
        fits, wanted = type(value) is int, "a whole number"
    elif option.is_flag:
        fits, wanted = type(value) is bool, "true or false"
    else:
        fits, wanted = isinstance(value, str), "a string"
    if not fits:
        raise ConfigError(f"{file}: {option.name} takes {wanted}, not {value!r}")
    # the sentences of click, which says the same of an option
    if option.choices and value not in option.choices:
        raise ConfigError(f"{file}: {option.name}: {value!r} is not one of {', '.join(map(repr, option.choices))}.")
    if option.minimum is not None and value < option.minimum:
        raise ConfigError(f"{file}: {option.name}: {value} is not in the range x>={option.minimum}.")
    return value


def _texts(file: str, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{file}: {key} takes a list of strings, not {value!r}")
    return value


def _severity(file: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not all(isinstance(level, str) for level in value.values()):
        raise ConfigError(f'{file}: severity takes a table of levels, such as {{ PAY006 = "info" }}, not {value!r}')
    return [f"{rule}={level}" for rule, level in value.items()]


def _of_tables(file: str, key: str, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    value = table.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise ConfigError(f"{file}: {key} takes a table of tables, not {value!r}")
    return value


def _ignores(file: str, tables: dict[str, dict[str, Any]]) -> Iterable[tuple[str, tuple[str, ...], str]]:
    for pattern, entry in tables.items():
        place = f"per-key-ignores, {pattern!r}"
        if unknown := [key for key in entry if key not in ("rules", "reason")]:
            raise ConfigError(f"{file}, {place}: there is no setting {unknown[0]!r}, only rules and reason")
        rules = _texts(file, f"{place}: rules", entry.get("rules", []))
        if not rules:
            raise ConfigError(f'{file}, {place}: which rules? add rules = ["GEO004"]')
        reason = entry.get("reason")
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f'{file}, {place}: why? add reason = "..."')
        yield pattern, tuple(tokens(rules)), reason.strip()


def _anchored(folder: Path, path: str) -> str:
    """A path in a file is relative to the file's folder."""
    return path if is_url(path) else os.path.normpath(folder / path)


def _output(file: Path, value: str) -> str:
    """An `--output`, which may name its format in front; it may write below the file's folder alone."""
    name, equals, path = value.partition("=")
    form, path = (f"{name}=", path) if equals and name in FORMATS else ("", value)
    if "\0" in path or is_url(path) or not _real(file.parent / path).is_relative_to(_real(file.parent)):
        raise ConfigError(f"{file}: output {value!r} must lie below the folder of this file")
    return form + _anchored(file.parent, path)
